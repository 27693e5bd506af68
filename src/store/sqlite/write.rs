//! Writing one resolution, table by table, within the transaction that decided it (I7).
//!
//! Every update names the status it was decided on, and one that does not find its row ends the
//! transaction. Nothing here decides.

use sqlx::SqliteConnection;

use super::watches::{WatchWrite, write_check, write_watch};
use super::{exactly_one, failed, flags, load};
use crate::domain::{
    Decided, Event, PaymentId, PaymentStatus, RefundChange, RefundOwed, RefundStatus, Settlement,
    Timestamp, TransferChange,
};
use crate::store::flags::of_resolutions;
use crate::store::row::{check_detail, column_number, evidence_json, sha256_hex};
use crate::store::{Lease, StoreError};

/// Everything that `decided` changes, its check and its watch; gives the lease back.
pub(super) async fn write(
    conn: &mut SqliteConnection,
    lease: &Lease,
    decided: &Decided,
    now: Timestamp,
) -> Result<(), StoreError> {
    let resolution = &decided.resolution;
    order(conn, decided, now).await?;
    payment(conn, decided, now).await?;
    stock(conn, decided).await?;
    identifiers(conn, decided, now).await?;
    transfer(conn, decided, now).await?;
    refund(conn, decided).await?;
    let (raised, gone) = of_resolutions(std::slice::from_ref(decided));
    flags::write(conn, &raised, &gone, now).await?;
    for event in &resolution.events {
        write_event(conn, event, now).await?;
    }
    if resolution.is_recorded() {
        record(conn, decided, now).await?;
    }
    let judged = &decided.judged;
    write_check(conn, judged, check_detail(judged).as_deref()).await?;
    let watch = WatchWrite {
        phase: Some(resolution.watch.next.phase),
        next_check_at: resolution.watch.next.at,
        restart_at: resolution.watch.restart.then_some(now),
    };
    let held = write_watch(conn, lease, judged, &watch).await?;
    exactly_one("to update a watch", usize::from(held))
}

async fn order(
    conn: &mut SqliteConnection,
    decided: &Decided,
    now: Timestamp,
) -> Result<(), StoreError> {
    const OPERATION: &str = "to update the order";
    let (Some(change), Some(id)) = (&decided.resolution.order, &decided.order_id) else {
        return Ok(());
    };
    // RETURNING rather than a count of changes: SQLite counts none where a view stands for the table.
    let changed = sqlx::query(
        "UPDATE orders SET status = ?, paid_by = ?, updated_at = ?
         WHERE id = ? AND status = ? RETURNING 1",
    )
    .bind(change.status.code())
    .bind(change.paid_by.as_ref().map(PaymentId::as_str))
    .bind(now.as_millis())
    .bind(id.as_str())
    .bind(decided.order_was.map(|status| status.code()))
    .fetch_all(conn)
    .await
    .map_err(failed(OPERATION))?;
    exactly_one(OPERATION, changed.len())
}

async fn payment(
    conn: &mut SqliteConnection,
    decided: &Decided,
    now: Timestamp,
) -> Result<(), StoreError> {
    const OPERATION: &str = "to update the payment";
    let Some(status) = decided.resolution.payment else { return Ok(()) };
    // A payment settles when its block does, whenever that is noticed.
    let settled_at = match status {
        PaymentStatus::Settled => {
            decided.settlement.map(|s| Timestamp::from(s.transfer.block.time))
        }
        _ => None,
    };
    let changed = sqlx::query(
        "UPDATE payments SET status = ?, settled_at = ?, updated_at = ?
         WHERE id = ? AND status = ? RETURNING 1",
    )
    .bind(status.code())
    .bind(settled_at.map(Timestamp::as_millis))
    .bind(now.as_millis())
    .bind(decided.judged.payment_id.as_str())
    .bind(decided.payment_was.map(PaymentStatus::code))
    .fetch_all(conn)
    .await
    .map_err(failed(OPERATION))?;
    exactly_one(OPERATION, changed.len())
}

async fn stock(conn: &mut SqliteConnection, decided: &Decided) -> Result<(), StoreError> {
    const RESERVATION: &str = "to update a stock reservation";
    const SHELF: &str = "to move stock (is the sku there, and enough of it?)";
    for change in &decided.reservations {
        let changed = sqlx::query(
            "UPDATE stock_reservations SET status = ? WHERE id = ? AND status = ? RETURNING 1",
        )
        .bind(change.status.code())
        .bind(&change.id)
        .bind(change.was.code())
        .fetch_all(&mut *conn)
        .await
        .map_err(failed(RESERVATION))?;
        exactly_one(RESERVATION, changed.len())?;
        if change.shelf == 0 {
            continue;
        }
        let changed = sqlx::query(
            "UPDATE stock SET available = available + ?1
             WHERE sku = ?2 AND typeof(available) = 'integer' AND (?1 > 0 OR available + ?1 >= 0)
             RETURNING 1",
        )
        .bind(change.shelf)
        .bind(change.sku.as_str())
        .fetch_all(&mut *conn)
        .await
        .map_err(failed(SHELF))?;
        exactly_one(SHELF, changed.len())?;
    }
    Ok(())
}

/// Updates the client's keys, and remembers what each stands for once the gateway has dropped its row.
async fn identifiers(
    conn: &mut SqliteConnection,
    decided: &Decided,
    now: Timestamp,
) -> Result<(), StoreError> {
    const IDENTIFIER: &str = "to update a payment identifier";
    const OUTCOME: &str = "to record a retry's outcome";
    for change in &decided.identifiers {
        let changed = sqlx::query(
            "UPDATE payment_identifiers SET status = ?, updated_at = ?
             WHERE id = ? AND status = ? RETURNING CAST(response AS BLOB)",
        )
        .bind(change.status.code())
        .bind(now.as_millis())
        .bind(&change.id)
        .bind(change.was.code())
        .fetch_all(&mut *conn)
        .await
        .map_err(failed(IDENTIFIER))?;
        exactly_one(IDENTIFIER, changed.len())?;
        let response = match changed.first() {
            Some(row) => load::text(row, 0)?,
            None => None,
        };
        sqlx::query(
            "INSERT INTO reconciled_retry_outcomes
                (identifier_sha256, payment_id, order_id, outcome, tx_hash, response_sha256,
                 updated_at)
             VALUES (?, ?, ?, ?, ?, ?, ?)
             ON CONFLICT (identifier_sha256) DO UPDATE SET
                payment_id = excluded.payment_id, order_id = excluded.order_id,
                outcome = excluded.outcome, tx_hash = excluded.tx_hash,
                response_sha256 = excluded.response_sha256, updated_at = excluded.updated_at",
        )
        .bind(sha256_hex(change.id.as_bytes()))
        .bind(decided.judged.payment_id.as_str())
        .bind(decided.order_id.as_ref().map(|id| id.as_str()))
        .bind(change.status.code())
        .bind(decided.settlement.map(|s| s.transfer.tx_hash.to_string()))
        .bind(response.map(|text| sha256_hex(text.as_bytes())))
        .bind(now.as_millis())
        .execute(&mut *conn)
        .await
        .map_err(failed(OUTCOME))?;
    }
    Ok(())
}

async fn transfer(
    conn: &mut SqliteConnection,
    decided: &Decided,
    now: Timestamp,
) -> Result<(), StoreError> {
    const ORPHAN: &str = "to orphan a transfer";
    const RECORD: &str = "to record a transfer";
    let payment_id = decided.judged.payment_id.as_str();
    let Settlement { transfer, finality } = match decided.resolution.transfer {
        TransferChange::Keep => return Ok(()),
        TransferChange::Orphan => {
            let changed = sqlx::query(
                "UPDATE reconciled_transfers SET orphaned_at = ?
                 WHERE payment_id = ? AND orphaned_at IS NULL",
            )
            .bind(now.as_millis())
            .bind(payment_id)
            .execute(conn)
            .await
            .map_err(failed(ORPHAN))?
            .rows_affected();
            return exactly_one(ORPHAN, usize::try_from(changed).unwrap_or(usize::MAX));
        }
        TransferChange::Record(settlement) => settlement,
    };
    let chain_id = column_number(transfer.chain_id.get());
    let log_index = column_number(transfer.log_index);
    sqlx::query(
        "UPDATE reconciled_transfers SET orphaned_at = ?
         WHERE payment_id = ? AND orphaned_at IS NULL
           AND NOT (chain_id = ? AND block_hash = ? AND tx_hash = ? AND log_index = ?)",
    )
    .bind(now.as_millis())
    .bind(payment_id)
    .bind(chain_id)
    .bind(transfer.block.hash.to_string())
    .bind(transfer.tx_hash.to_string())
    .bind(log_index)
    .execute(&mut *conn)
    .await
    .map_err(failed(ORPHAN))?;
    // A row of this log may be there already: this payment's, not yet final; or seen by the
    // chain-to-ledger pass and matched to nobody.
    let changed = sqlx::query(
        "INSERT INTO reconciled_transfers
            (chain_id, tx_hash, log_index, payment_id, token, payer, pay_to, amount, block_number,
             block_hash, block_time, finality, seen_at)
         VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
         ON CONFLICT (chain_id, block_hash, tx_hash, log_index) WHERE orphaned_at IS NULL
         DO UPDATE SET payment_id = excluded.payment_id, finality = excluded.finality
         WHERE payment_id IS NULL OR payment_id = excluded.payment_id",
    )
    .bind(chain_id)
    .bind(transfer.tx_hash.to_string())
    .bind(log_index)
    .bind(payment_id)
    .bind(lower_hex(&transfer.token))
    .bind(lower_hex(&transfer.from))
    .bind(lower_hex(&transfer.to))
    .bind(transfer.value.to_string())
    .bind(column_number(transfer.block.number))
    .bind(transfer.block.hash.to_string())
    .bind(column_number(transfer.block.time.as_secs()))
    .bind(finality.code())
    .bind(now.as_millis())
    .execute(conn)
    .await
    .map_err(failed(RECORD))?
    .rows_affected();
    exactly_one(RECORD, usize::try_from(changed).unwrap_or(usize::MAX))
}

pub(super) fn lower_hex(address: &alloy_primitives::Address) -> String {
    format!("{address:#x}")
}

async fn refund(conn: &mut SqliteConnection, decided: &Decided) -> Result<(), StoreError> {
    const FOLLOW: &str = "to update a refund record";
    const VOID: &str = "to void a refund record";
    let payment_id = decided.judged.payment_id.as_str();
    let changed = match &decided.resolution.refund {
        RefundChange::Keep => return Ok(()),
        RefundChange::Owe(owed) => return owe(conn, owed).await,
        RefundChange::Follow(Settlement { transfer, .. }) => sqlx::query(
            "UPDATE reconciled_refunds_owed
             SET tx_hash = ?, log_index = ?,
                 amount = CASE WHEN status IN ('owed', 'blocked') THEN ? ELSE amount END
             WHERE payment_id = ?",
        )
        .bind(transfer.tx_hash.to_string())
        .bind(column_number(transfer.log_index))
        .bind(transfer.value.to_string())
        .bind(payment_id)
        .execute(conn)
        .await
        .map_err(failed(FOLLOW))?,
        RefundChange::Void => sqlx::query(
            "UPDATE reconciled_refunds_owed
             SET status = 'void', note = 'the transfer vanished in a reorg'
             WHERE payment_id = ? AND status IN ('owed', 'blocked')",
        )
        .bind(payment_id)
        .execute(conn)
        .await
        .map_err(failed(VOID))?,
    };
    exactly_one(FOLLOW, usize::try_from(changed.rows_affected()).unwrap_or(usize::MAX))
}

/// A new record, or a void one owed again; any other record stands (I6).
async fn owe(conn: &mut SqliteConnection, owed: &RefundOwed) -> Result<(), StoreError> {
    const OPERATION: &str = "to record a refund owed";
    let transfer = &owed.transfer;
    let changed = sqlx::query(
        "INSERT INTO reconciled_refunds_owed
            (payment_id, order_id, rail, chain_id, token, payer, amount, reason, tx_hash, log_index,
             detected_at, status, refund_nonce)
         VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
         ON CONFLICT (payment_id) DO UPDATE SET
            status = excluded.status, order_id = excluded.order_id, rail = excluded.rail,
            chain_id = excluded.chain_id, token = excluded.token, payer = excluded.payer,
            amount = excluded.amount, reason = excluded.reason, tx_hash = excluded.tx_hash,
            log_index = excluded.log_index, detected_at = excluded.detected_at,
            refund_nonce = excluded.refund_nonce, batch_id = NULL, claimed_by = NULL,
            claimed_at = NULL, note = NULL,
            -- What landed while it was void closes it now.
            searched_to = CASE WHEN closed_seen_at IS NULL THEN searched_to ELSE closed_from END,
            closed_seen_at = NULL, closed_from = NULL
         WHERE status = 'void'",
    )
    .bind(owed.payment_id.as_str())
    .bind(owed.order_id.as_str())
    .bind(owed.rail.code())
    .bind(column_number(transfer.chain_id.get()))
    .bind(lower_hex(&transfer.token))
    .bind(lower_hex(&transfer.from))
    .bind(transfer.value.to_string())
    .bind(owed.reason.code())
    .bind(transfer.tx_hash.to_string())
    .bind(column_number(transfer.log_index))
    .bind(owed.detected_at.as_millis())
    .bind(RefundStatus::Owed.code())
    .bind(owed.refund_nonce.to_string())
    .execute(conn)
    .await
    .map_err(failed(OPERATION))?
    .rows_affected();
    exactly_one(OPERATION, usize::try_from(changed).unwrap_or(usize::MAX))
}

async fn write_event(
    conn: &mut SqliteConnection,
    event: &Event,
    now: Timestamp,
) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO reconciled_events (kind, order_id, payment_id, dedupe_key, created_at)
         VALUES (?, ?, ?, ?, ?) ON CONFLICT (dedupe_key) DO NOTHING",
    )
    .bind(event.kind.code())
    .bind(event.order_id.as_str())
    .bind(event.payment_id.as_str())
    .bind(&event.dedupe_key)
    .bind(now.as_millis())
    .execute(conn)
    .await
    .map_err(failed("to write an event"))?;
    Ok(())
}

/// Adds the resolution itself, with what it was based on (I12).
async fn record(
    conn: &mut SqliteConnection,
    decided: &Decided,
    now: Timestamp,
) -> Result<(), StoreError> {
    let judged = &decided.judged;
    let transfer = decided.transfer();
    let block = decided.block();
    let delay = transfer.map(|t| now.since(Timestamp::from(t.block.time)).as_millis());
    sqlx::query(
        "INSERT INTO reconciled_resolutions
            (payment_id, order_id, outcome, verdict, evidence, tx_hash, log_index, block_number,
             block_hash, block_time, resolved_at, detection_delay_ms, settles)
         VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
    )
    .bind(judged.payment_id.as_str())
    .bind(decided.order_id.as_ref().map(|id| id.as_str()))
    .bind(decided.resolution.outcome.code())
    .bind(judged.verdict_code())
    .bind(evidence_json(judged).to_string())
    .bind(transfer.map(|t| t.tx_hash.to_string()))
    .bind(transfer.map(|t| column_number(t.log_index)))
    .bind(block.map(|b| column_number(b.number)))
    .bind(block.map(|b| b.hash.to_string()))
    .bind(block.map(|b| column_number(b.time.as_secs())))
    .bind(now.as_millis())
    .bind(delay.map(|ms| i64::try_from(ms).unwrap_or(i64::MAX)))
    .bind(decided.resolution.payment == Some(PaymentStatus::Settled))
    .execute(conn)
    .await
    .map_err(failed("to record a resolution"))?;
    Ok(())
}
