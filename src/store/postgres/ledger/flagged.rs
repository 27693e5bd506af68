//! Open flags, with the rows that say whether their causes are gone.

use std::collections::BTreeSet;

use sqlx::{PgConnection, PgPool};

use super::accounts::{read_orders, read_records};
use crate::domain::{Finality, FlaggedPage, PaymentId, Timestamp};
use crate::store::StoreError;
use crate::store::flags::{RawFlag, known_kinds};
use crate::store::postgres::rows::{datetime, select_payments, texts};
use crate::store::postgres::{SNAPSHOT, finish};
use crate::store::row::coded;

const OPERATION: &str = "to read a page of flags";

pub(super) async fn page(pool: &PgPool, after: i64, limit: u32) -> Result<FlaggedPage, StoreError> {
    let refused = |source| StoreError::from_sqlx(OPERATION, source);
    let mut transaction = pool.begin_with(SNAPSHOT).await.map_err(refused)?;
    let page = page_in(&mut transaction, after, limit).await;
    finish(transaction, page, refused).await
}

async fn page_in(
    connection: &mut PgConnection,
    after: i64,
    limit: u32,
) -> Result<FlaggedPage, StoreError> {
    let refused = |source| StoreError::from_sqlx(OPERATION, source);
    let mut page = FlaggedPage::default();
    let flags = sqlx::query_as!(
        RawFlag,
        r#"SELECT id, kind, payment_id, order_id, subject, detail::text AS "detail!",
                  (extract(epoch FROM opened_at) * 1000)::bigint AS "opened_at!",
                  (extract(epoch FROM closed_at) * 1000)::bigint AS closed_at, closed_by, note
             FROM reconciled.flags
            WHERE closed_at IS NULL AND id > $1 AND kind = ANY($3::text[])
            ORDER BY id LIMIT $2"#,
        after,
        i64::from(limit),
        &known_kinds(),
    )
    .fetch_all(&mut *connection)
    .await
    .map_err(refused)?;
    page.flags = flags.into_iter().map(RawFlag::parse).collect::<Result<_, _>>()?;
    let ids: BTreeSet<&PaymentId> =
        page.flags.iter().filter_map(|flag| flag.payment_id.as_ref()).collect();
    let ids = texts(ids);
    let payments = select_payments!("WHERE id = ANY($1::text[])", &ids)
        .fetch_all(&mut *connection)
        .await
        .map_err(refused)?;
    let payments = payments.iter().filter_map(|row| row.parse().ok());
    page.rows.payments.extend(payments.map(|payment| (payment.id.clone(), payment)));
    read_orders(connection, &mut page.rows).await.map_err(refused)?;
    read_records(connection, &mut page.rows, &ids).await?;
    let recorded = sqlx::query!(
        r#"SELECT payment_id AS "payment_id!", finality FROM reconciled.transfers
            WHERE payment_id = ANY($1::text[]) AND orphaned_at IS NULL"#,
        &ids,
    )
    .fetch_all(connection)
    .await
    .map_err(refused)?;
    for row in recorded {
        let finality = coded("transfers", "finality", &row.finality, Finality::from_code)?;
        page.finality.insert(PaymentId::new(row.payment_id), finality);
    }
    Ok(page)
}

pub(super) async fn mark_claimed(
    pool: &PgPool,
    subjects: &[String],
    now: Timestamp,
) -> Result<u64, StoreError> {
    // A permit may have moved less than it was for: whether that pays, the accounting says.
    let marked = sqlx::query!(
        "UPDATE reconciled.transfers t SET unaccounted_since = coalesce(unaccounted_since, $2)
           FROM unnest($1::text[]) AS s (subject)
          WHERE t.tx_hash = split_part(s.subject, ':', 2)
            AND t.log_index::text = split_part(s.subject, ':', 3)
            AND t.chain_id::text = split_part(s.subject, ':', 1)
            AND t.orphaned_at IS NULL
            AND (t.payment_id IS NOT NULL
                 OR EXISTS (
                     SELECT FROM payments p
                      WHERE lower(p.nonce) = t.nonce AND p.chain_id::text = t.chain_id::text
                        AND lower(p.token::text) = t.token AND lower(p.payer::text) = t.payer
                        AND lower(p.pay_to::text) = t.pay_to
                        AND (p.amount::text = t.amount::text OR p.method::text = 'permit2')))",
        subjects,
        datetime(now),
    )
    .execute(pool)
    .await
    .map_err(|source| StoreError::from_sqlx("to mark claimed transfers", source))?;
    Ok(marked.rows_affected())
}
