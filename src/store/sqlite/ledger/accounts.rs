//! Transfers in order of block time, with everything that says what became of their money.

use std::collections::BTreeSet;

use sqlx::{Row, SqliteConnection};

use crate::domain::{
    BlockTime, ChainId, FlagKind, FlagState, KnownTransfer, LedgerKey, LedgerPage, PaymentId,
    RefundStatus, Timestamp, log_subject,
};
use crate::store::StoreError;
use crate::store::row::{RawTransfer, coded, column_number, parsed, refund_amount, unsigned};
use crate::store::sqlite::{SqliteStore, failed, finish, id_list, load};

const OPERATION: &str = "to read a page of transfers";

pub(super) async fn page(
    store: &SqliteStore,
    chain_id: ChainId,
    after: &LedgerKey,
    last_block: u64,
    limit: u32,
) -> Result<LedgerPage, StoreError> {
    // One snapshot; reading never blocks a writer.
    let mut tx = store.reader.begin().await.map_err(failed(OPERATION))?;
    let result = page_in(&mut tx, chain_id, after, last_block, limit).await;
    finish(tx, OPERATION, result).await
}

async fn page_in(
    conn: &mut SqliteConnection,
    chain_id: ChainId,
    after: &LedgerKey,
    last_block: u64,
    limit: u32,
) -> Result<LedgerPage, StoreError> {
    let get = failed(OPERATION);
    let mut page = LedgerPage::default();
    let rows = sqlx::query(
        "SELECT *, scanned_at IS NOT NULL AS scanned, unaccounted_since IS NOT NULL AS marked
         FROM reconciled_transfers
         WHERE chain_id = ? AND orphaned_at IS NULL AND (block_time, id) > (?, ?)
           AND block_number <= ?
         ORDER BY block_time, id LIMIT ?",
    )
    .bind(column_number(chain_id.get()))
    .bind(column_number(after.time.as_secs()))
    .bind(after.id)
    .bind(column_number(last_block))
    .bind(limit)
    .fetch_all(&mut *conn)
    .await
    .map_err(get)?;
    for row in rows {
        let payment_id: Option<String> = row.try_get("payment_id").map_err(get)?;
        let nonce: Option<String> = row.try_get("nonce").map_err(get)?;
        let recorded = RawTransfer {
            payment_id: payment_id.clone().unwrap_or_default(),
            chain_id: row.try_get("chain_id").map_err(get)?,
            token: row.try_get("token").map_err(get)?,
            payer: row.try_get("payer").map_err(get)?,
            pay_to: row.try_get("pay_to").map_err(get)?,
            amount: row.try_get("amount").map_err(get)?,
            block_number: row.try_get("block_number").map_err(get)?,
            block_hash: row.try_get("block_hash").map_err(get)?,
            block_time: row.try_get("block_time").map_err(get)?,
            tx_hash: row.try_get("tx_hash").map_err(get)?,
            log_index: row.try_get("log_index").map_err(get)?,
            finality: row.try_get("finality").map_err(get)?,
            seen_at: row.try_get("seen_at").map_err(get)?,
        };
        page.transfers.push(KnownTransfer {
            id: row.try_get("id").map_err(get)?,
            transfer: recorded.parse()?.settlement.transfer,
            payment_id: payment_id.map(PaymentId::new),
            nonce: nonce.map(|nonce| parsed("transfers", "nonce", &nonce)).transpose()?,
            scanned: row.try_get("scanned").map_err(get)?,
            marked: row.try_get("marked").map_err(get)?,
        });
    }
    read_payments(conn, &mut page).await?;
    let orders: BTreeSet<&str> = page.payments.values().map(|p| p.order_id.as_str()).collect();
    let orders = load::readable_orders(conn, &id_list(orders)).await?;
    page.orders.extend(orders.into_iter().map(|order| (order.id.clone(), order)));
    let ids: BTreeSet<&str> = page
        .payments
        .keys()
        .chain(page.transfers.iter().filter_map(|known| known.payment_id.as_ref()))
        .map(PaymentId::as_str)
        .collect();
    let ids = id_list(ids);
    read_records(conn, &mut page, &ids).await?;
    Ok(page)
}

/// The payments that the transfers were found to be, and all with one of their nonces. One that makes no
/// sense claims nothing.
async fn read_payments(
    conn: &mut SqliteConnection,
    page: &mut LedgerPage,
) -> Result<(), StoreError> {
    let recorded: BTreeSet<&str> = page
        .transfers
        .iter()
        .filter_map(|known| known.payment_id.as_ref().map(PaymentId::as_str))
        .collect();
    let nonces: BTreeSet<String> = page
        .transfers
        .iter()
        .filter_map(|known| known.nonce.map(|nonce| nonce.to_string()))
        .collect();
    let mut rows = load::raw_payments(conn, &id_list(recorded)).await?;
    let nonces = id_list(nonces.iter().map(String::as_str));
    rows.extend(load::raw_payments_by_nonce(conn, &nonces).await?);
    let payments = rows.iter().filter_map(|row| row.parse().ok());
    page.payments.extend(payments.map(|payment| (payment.id.clone(), payment)));
    Ok(())
}

/// Our own rows: refund records, flags, watches. A flag of no known kind says nothing.
pub(super) async fn read_records(
    conn: &mut SqliteConnection,
    page: &mut LedgerPage,
    ids: &str,
) -> Result<(), StoreError> {
    let get = failed(OPERATION);
    let refunds: Vec<(String, String, String)> = sqlx::query_as(
        "SELECT payment_id, status, amount FROM reconciled_refunds_owed
         WHERE payment_id IN (SELECT value FROM json_each(?))",
    )
    .bind(ids)
    .fetch_all(&mut *conn)
    .await
    .map_err(get)?;
    for (payment_id, status, amount) in refunds {
        let status = coded("refunds_owed", "status", &status, RefundStatus::from_code)?;
        let amount = refund_amount(&payment_id, &amount);
        page.refunds.insert(PaymentId::new(payment_id), (status, amount));
    }
    let subjects: Vec<String> =
        page.transfers.iter().map(|known| log_subject(&known.transfer)).collect();
    let flags: Vec<(String, String, String, bool)> = sqlx::query_as(
        "SELECT kind, payment_id, subject, closed_at IS NULL FROM reconciled_flags
         WHERE payment_id <> '' AND payment_id IN (SELECT value FROM json_each(?1))
           AND cause_gone_at IS NULL
         UNION ALL
         SELECT kind, payment_id, subject, closed_at IS NULL FROM reconciled_flags
         WHERE payment_id = '' AND kind = ?2 AND subject IN (SELECT value FROM json_each(?3))
           AND cause_gone_at IS NULL",
    )
    .bind(ids)
    .bind(FlagKind::UnmatchedTransfer.code())
    .bind(id_list(subjects.iter().map(String::as_str)))
    .fetch_all(&mut *conn)
    .await
    .map_err(get)?;
    for (kind, payment_id, subject, open) in flags {
        let Some(kind) = FlagKind::from_code(&kind) else { continue };
        let about = if payment_id.is_empty() { subject } else { payment_id };
        let state = if open { FlagState::Open } else { FlagState::Decided };
        if kind == FlagKind::RefundedAgain {
            page.again.entry(PaymentId::new(about.clone())).or_default().count(state);
        }
        page.flags.insert((kind, about), state);
    }
    let watched: Vec<String> = sqlx::query_scalar(
        "SELECT payment_id FROM reconciled_watches
         WHERE phase <> 'closed' AND payment_id IN (SELECT value FROM json_each(?))",
    )
    .bind(ids)
    .fetch_all(conn)
    .await
    .map_err(get)?;
    page.watched.extend(watched.into_iter().map(PaymentId::new));
    Ok(())
}

pub(super) async fn unaccounted_since(
    store: &SqliteStore,
    chain_id: ChainId,
) -> Result<Option<BlockTime>, StoreError> {
    let oldest: Option<i64> = sqlx::query_scalar(
        "SELECT min(block_time) FROM reconciled_transfers
         WHERE chain_id = ? AND orphaned_at IS NULL AND unaccounted_since IS NOT NULL",
    )
    .bind(column_number(chain_id.get()))
    .fetch_one(&store.reader)
    .await
    .map_err(failed("to look for unaccounted transfers"))?;
    oldest
        .map(|secs| Ok(BlockTime::from_secs(unsigned("transfers", "block_time", secs)?)))
        .transpose()
}

pub(super) async fn missed_by_scan(
    store: &SqliteStore,
    chain_id: ChainId,
) -> Result<Option<u64>, StoreError> {
    let oldest: Option<i64> = sqlx::query_scalar(
        "SELECT min(t.block_number)
         FROM reconciled_transfers t
         JOIN reconciled_cursors c
            ON c.chain_id = t.chain_id AND c.token = t.token AND c.pay_to = t.pay_to
         WHERE t.chain_id = ? AND t.orphaned_at IS NULL AND t.unaccounted_since IS NOT NULL
           AND t.scanned_at IS NULL AND t.payment_id IS NOT NULL
           AND t.block_number BETWEEN c.first_block AND c.block_number",
    )
    .bind(column_number(chain_id.get()))
    .fetch_one(&store.reader)
    .await
    .map_err(failed("to look for missed transfers"))?;
    oldest.map(|number| unsigned("transfers", "block_number", number)).transpose()
}

pub(super) async fn mark(
    store: &SqliteStore,
    mark: &[i64],
    unmark: &[i64],
    now: Timestamp,
) -> Result<(), StoreError> {
    const OPERATION: &str = "to mark unaccounted transfers";
    if mark.is_empty() && unmark.is_empty() {
        return Ok(());
    }
    let mut tx = store.begin(OPERATION).await?;
    let result = async {
        for (ids, since) in [(mark, Some(now.as_millis())), (unmark, None)] {
            sqlx::query(
                "UPDATE reconciled_transfers SET unaccounted_since = ?
                 WHERE id IN (SELECT value FROM json_each(?))",
            )
            .bind(since)
            .bind(serde_json::Value::from(ids).to_string())
            .execute(&mut *tx)
            .await
            .map_err(failed(OPERATION))?;
        }
        Ok(())
    }
    .await;
    finish(tx, OPERATION, result).await
}
