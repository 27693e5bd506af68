//! Open flags, with the rows that say whether their causes are gone.

use std::collections::BTreeSet;

use sqlx::SqliteConnection;

use super::accounts::read_records;
use crate::domain::{Finality, FlaggedPage, PaymentId, Timestamp};
use crate::store::StoreError;
use crate::store::flags::{RawFlag, known_kinds};
use crate::store::row::coded;
use crate::store::sqlite::{SqliteStore, failed, finish, id_list, load};

const OPERATION: &str = "to read a page of flags";

pub(super) async fn page(
    store: &SqliteStore,
    after: i64,
    limit: u32,
) -> Result<FlaggedPage, StoreError> {
    let mut tx = store.reader.begin().await.map_err(failed(OPERATION))?;
    let result = page_in(&mut tx, after, limit).await;
    finish(tx, OPERATION, result).await
}

async fn page_in(
    conn: &mut SqliteConnection,
    after: i64,
    limit: u32,
) -> Result<FlaggedPage, StoreError> {
    let get = failed(OPERATION);
    let mut page = FlaggedPage::default();
    let flags: Vec<RawFlag> = sqlx::query_as(
        "SELECT * FROM reconciled_flags
         WHERE closed_at IS NULL AND id > ?1 AND json_valid(detail)
           AND kind IN (SELECT value FROM json_each(?3))
         ORDER BY id LIMIT ?2",
    )
    .bind(after)
    .bind(limit)
    .bind(id_list(known_kinds().iter().map(String::as_str)))
    .fetch_all(&mut *conn)
    .await
    .map_err(get)?;
    page.flags = flags.into_iter().map(RawFlag::parse).collect::<Result<_, _>>()?;
    let ids: BTreeSet<&str> = page
        .flags
        .iter()
        .filter_map(|flag| flag.payment_id.as_ref().map(PaymentId::as_str))
        .collect();
    let ids = id_list(ids);
    let payments = load::raw_payments(conn, &ids).await?;
    let payments = payments.iter().filter_map(|row| row.parse().ok());
    page.rows.payments.extend(payments.map(|payment| (payment.id.clone(), payment)));
    let orders: BTreeSet<&str> = page.rows.payments.values().map(|p| p.order_id.as_str()).collect();
    let orders = load::readable_orders(conn, &id_list(orders)).await?;
    page.rows.orders.extend(orders.into_iter().map(|order| (order.id.clone(), order)));
    read_records(conn, &mut page.rows, &ids).await?;
    let recorded: Vec<(String, String)> = sqlx::query_as(
        "SELECT payment_id, finality FROM reconciled_transfers
         WHERE payment_id IN (SELECT value FROM json_each(?)) AND orphaned_at IS NULL",
    )
    .bind(&ids)
    .fetch_all(conn)
    .await
    .map_err(get)?;
    for (payment_id, finality) in recorded {
        let finality = coded("transfers", "finality", &finality, Finality::from_code)?;
        page.finality.insert(PaymentId::new(payment_id), finality);
    }
    Ok(page)
}

pub(super) async fn mark_claimed(
    store: &SqliteStore,
    subjects: &[String],
    now: Timestamp,
) -> Result<u64, StoreError> {
    const MARK: &str = "to mark claimed transfers";
    // A permit may have moved less than it was for: whether that pays, the accounting says.
    let mut tx = store.begin(MARK).await?;
    let result = sqlx::query(
        "UPDATE reconciled_transfers AS t SET unaccounted_since = coalesce(unaccounted_since, ?1)
         WHERE t.id IN (
                 SELECT o.id FROM reconciled_flags f JOIN reconciled_transfers o
                     ON o.tx_hash = json_extract(f.detail, '$.tx_hash')
                    AND o.log_index = json_extract(f.detail, '$.log_index')
                    AND o.chain_id = json_extract(f.detail, '$.chain_id')
                 WHERE f.payment_id = '' AND f.kind = ?2 AND f.cause_gone_at IS NULL
                   AND f.subject IN (SELECT value FROM json_each(?3)))
           AND t.orphaned_at IS NULL
           AND (t.payment_id IS NOT NULL
                OR EXISTS (
                    SELECT 1 FROM payments p
                     WHERE lower(p.nonce) = t.nonce AND CAST(p.chain_id AS TEXT) = CAST(t.chain_id AS TEXT)
                       AND lower(p.token) = t.token AND lower(p.payer) = t.payer
                       AND lower(p.pay_to) = t.pay_to
                       AND (CAST(p.amount AS TEXT) = t.amount OR p.method = 'permit2')))",
    )
    .bind(now.as_millis())
    .bind(crate::domain::FlagKind::UnmatchedTransfer.code())
    .bind(id_list(subjects.iter().map(String::as_str)))
    .execute(&mut *tx)
    .await
    .map(|marked| marked.rows_affected())
    .map_err(failed(MARK));
    finish(tx, MARK, result).await
}
