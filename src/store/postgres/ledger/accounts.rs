//! Transfers in order of block time, with everything that says what became of their money.

use std::collections::BTreeSet;

use sqlx::{PgConnection, PgPool};

use crate::domain::{
    BlockTime, ChainId, FlagKind, FlagState, KnownTransfer, LedgerKey, LedgerPage, PaymentId,
    RefundStatus, Timestamp, log_subject,
};
use crate::store::StoreError;
use crate::store::postgres::rows::{block_datetime, datetime, hex, select_payments, texts};
use crate::store::postgres::{SNAPSHOT, finish};
use crate::store::row::{
    RawOrder, RawTransfer, coded, column_number, parsed, refund_amount, unsigned,
};

const OPERATION: &str = "to read a page of transfers";

pub(super) async fn page(
    pool: &PgPool,
    chain_id: ChainId,
    after: &LedgerKey,
    last_block: u64,
    limit: u32,
) -> Result<LedgerPage, StoreError> {
    let refused = |source| StoreError::from_sqlx(OPERATION, source);
    let mut transaction = pool.begin_with(SNAPSHOT).await.map_err(refused)?;
    let page = page_in(&mut transaction, chain_id, after, last_block, limit).await;
    finish(transaction, page, refused).await
}

async fn page_in(
    connection: &mut PgConnection,
    chain_id: ChainId,
    after: &LedgerKey,
    last_block: u64,
    limit: u32,
) -> Result<LedgerPage, StoreError> {
    let refused = |source| StoreError::from_sqlx(OPERATION, source);
    let mut page = LedgerPage::default();
    let rows = sqlx::query!(
        r#"SELECT id, payment_id, chain_id, token, payer, pay_to, amount::text AS "amount!",
                  block_number, block_hash,
                  extract(epoch FROM block_time)::bigint AS "block_time!", tx_hash, log_index,
                  finality, (extract(epoch FROM seen_at) * 1000)::bigint AS "seen_at!", nonce,
                  scanned_at IS NOT NULL AS "scanned!",
                  unaccounted_since IS NOT NULL AS "marked!"
             FROM reconciled.transfers
            WHERE chain_id = $1 AND orphaned_at IS NULL AND (block_time, id) > ($2, $3)
              AND block_number <= $4
            ORDER BY block_time, id
            LIMIT $5"#,
        column_number(chain_id.get()),
        block_datetime(after.time),
        after.id,
        column_number(last_block),
        i64::from(limit),
    )
    .fetch_all(&mut *connection)
    .await
    .map_err(refused)?;
    for row in rows {
        let recorded = RawTransfer {
            payment_id: row.payment_id.clone().unwrap_or_default(),
            chain_id: row.chain_id,
            token: row.token,
            payer: row.payer,
            pay_to: row.pay_to,
            amount: row.amount,
            block_number: row.block_number,
            block_hash: row.block_hash,
            block_time: row.block_time,
            tx_hash: row.tx_hash,
            log_index: row.log_index,
            finality: row.finality,
            seen_at: row.seen_at,
        };
        page.transfers.push(KnownTransfer {
            id: row.id,
            transfer: recorded.parse()?.settlement.transfer,
            payment_id: row.payment_id.map(PaymentId::new),
            nonce: row.nonce.map(|nonce| parsed("transfers", "nonce", &nonce)).transpose()?,
            scanned: row.scanned,
            marked: row.marked,
        });
    }
    read_payments(connection, &mut page).await.map_err(refused)?;
    read_orders(connection, &mut page).await.map_err(refused)?;
    let ids: BTreeSet<&PaymentId> = page
        .payments
        .keys()
        .chain(page.transfers.iter().filter_map(|known| known.payment_id.as_ref()))
        .collect();
    let ids = texts(ids);
    read_records(connection, &mut page, &ids).await?;
    Ok(page)
}

/// The payments that the transfers were found to be, and all with one of their nonces. One that makes no
/// sense claims nothing.
async fn read_payments(
    connection: &mut PgConnection,
    page: &mut LedgerPage,
) -> Result<(), sqlx::Error> {
    let recorded = texts(page.transfers.iter().filter_map(|known| known.payment_id.as_ref()));
    let nonces: BTreeSet<String> =
        page.transfers.iter().filter_map(|known| known.nonce.as_ref().map(hex)).collect();
    let nonces: Vec<String> = nonces.into_iter().collect();
    let rows = select_payments!(
        "WHERE id = ANY($1::text[]) OR lower(nonce) = ANY($2::text[])",
        &recorded,
        &nonces,
    )
    .fetch_all(connection)
    .await?;
    let payments = rows.iter().filter_map(|row| row.parse().ok());
    page.payments.extend(payments.map(|payment| (payment.id.clone(), payment)));
    Ok(())
}

pub(super) async fn read_orders(
    connection: &mut PgConnection,
    page: &mut LedgerPage,
) -> Result<(), sqlx::Error> {
    let ids: BTreeSet<&str> = page.payments.values().map(|p| p.order_id.as_str()).collect();
    let ids: Vec<String> = ids.into_iter().map(str::to_owned).collect();
    let rows = sqlx::query_as!(
        RawOrder,
        r#"SELECT id AS "id!", kind::text AS "kind?", status::text AS "status?",
                  paid_by::text AS "paid_by?",
                  trunc(extract(epoch FROM delivered_at) * 1000)::text AS "delivered_at?"
             FROM orders WHERE id = ANY($1::text[])"#,
        &ids,
    )
    .fetch_all(connection)
    .await?;
    let orders = rows.into_iter().filter_map(RawOrder::parse);
    page.orders.extend(orders.map(|order| (order.id.clone(), order)));
    Ok(())
}

/// Our own rows: refund records, flags, watches. A flag of no known kind says nothing.
pub(super) async fn read_records(
    connection: &mut PgConnection,
    page: &mut LedgerPage,
    ids: &[String],
) -> Result<(), StoreError> {
    let refused = |source| StoreError::from_sqlx(OPERATION, source);
    let refunds = sqlx::query!(
        r#"SELECT payment_id, status, amount::text AS "amount!"
             FROM reconciled.refunds_owed WHERE payment_id = ANY($1::text[])"#,
        ids,
    )
    .fetch_all(&mut *connection)
    .await
    .map_err(refused)?;
    for row in refunds {
        let status = coded("refunds_owed", "status", &row.status, RefundStatus::from_code)?;
        let amount = refund_amount(&row.payment_id, &row.amount);
        page.refunds.insert(PaymentId::new(row.payment_id), (status, amount));
    }
    let subjects: Vec<String> =
        page.transfers.iter().map(|known| log_subject(&known.transfer)).collect();
    let flags = sqlx::query!(
        r#"SELECT kind, payment_id, subject, closed_at IS NULL AS "open!"
             FROM reconciled.flags
            WHERE (payment_id = ANY($1::text[]) AND payment_id <> ''
                   OR payment_id = '' AND kind = $2 AND subject = ANY($3::text[]))
              AND cause_gone_at IS NULL"#,
        ids,
        FlagKind::UnmatchedTransfer.code(),
        &subjects,
    )
    .fetch_all(&mut *connection)
    .await
    .map_err(refused)?;
    for row in flags {
        let Some(kind) = FlagKind::from_code(&row.kind) else { continue };
        let about = if row.payment_id.is_empty() { row.subject } else { row.payment_id };
        let state = if row.open { FlagState::Open } else { FlagState::Decided };
        if kind == FlagKind::RefundedAgain {
            page.again.entry(PaymentId::new(about.clone())).or_default().count(state);
        }
        page.flags.insert((kind, about), state);
    }
    let watched = sqlx::query_scalar!(
        "SELECT payment_id FROM reconciled.watches
          WHERE payment_id = ANY($1::text[]) AND phase <> 'closed'",
        ids,
    )
    .fetch_all(connection)
    .await
    .map_err(refused)?;
    page.watched.extend(watched.into_iter().map(PaymentId::new));
    Ok(())
}

pub(super) async fn unaccounted_since(
    pool: &PgPool,
    chain_id: ChainId,
) -> Result<Option<BlockTime>, StoreError> {
    let oldest = sqlx::query_scalar!(
        "SELECT extract(epoch FROM min(block_time))::bigint FROM reconciled.transfers
          WHERE chain_id = $1 AND orphaned_at IS NULL AND unaccounted_since IS NOT NULL",
        column_number(chain_id.get()),
    )
    .fetch_one(pool)
    .await
    .map_err(|source| StoreError::from_sqlx("to look for unaccounted transfers", source))?;
    oldest
        .map(|secs| Ok(BlockTime::from_secs(unsigned("transfers", "block_time", secs)?)))
        .transpose()
}

pub(super) async fn missed_by_scan(
    pool: &PgPool,
    chain_id: ChainId,
) -> Result<Option<u64>, StoreError> {
    let oldest = sqlx::query_scalar!(
        "SELECT min(t.block_number)
           FROM reconciled.transfers t
           JOIN reconciled.cursors c
             ON c.chain_id = t.chain_id AND c.token = t.token AND c.pay_to = t.pay_to
          WHERE t.chain_id = $1 AND t.orphaned_at IS NULL AND t.unaccounted_since IS NOT NULL
            AND t.scanned_at IS NULL AND t.payment_id IS NOT NULL
            AND t.block_number BETWEEN c.first_block AND c.block_number",
        column_number(chain_id.get()),
    )
    .fetch_one(pool)
    .await
    .map_err(|source| StoreError::from_sqlx("to look for missed transfers", source))?;
    oldest.map(|number| unsigned("transfers", "block_number", number)).transpose()
}

pub(super) async fn mark(
    pool: &PgPool,
    mark: &[i64],
    unmark: &[i64],
    now: Timestamp,
) -> Result<(), StoreError> {
    if mark.is_empty() && unmark.is_empty() {
        return Ok(());
    }
    sqlx::query!(
        "UPDATE reconciled.transfers
            SET unaccounted_since = CASE WHEN id = ANY($1::bigint[]) THEN $3::timestamptz END
          WHERE id = ANY($1::bigint[]) OR id = ANY($2::bigint[])",
        mark,
        unmark,
        datetime(now),
    )
    .execute(pool)
    .await
    .map_err(|source| StoreError::from_sqlx("to mark unaccounted transfers", source))?;
    Ok(())
}
