//! Writes resolutions, set by set: one statement per table whatever the size of the batch. The gateway's
//! tables are written here, our own in `record`.
//!
//! Rows were locked before they were resolved, so every update of a gateway's row must change exactly
//! one; anything else rolls the transaction back (I7).

use std::collections::BTreeMap;

use sqlx::PgConnection;
use sqlx::postgres::PgQueryResult;
use sqlx::types::time::OffsetDateTime;

use super::apply::ApplyError;
use super::flags;
use super::record::{
    write_events, write_refunds, write_resolutions, write_transfers, write_watches,
};
use super::rows::{block_datetime, datetime, hex, texts};
use crate::domain::{
    Decided, IdentifierStatus, OrderChange, OrderId, PaymentStatus, ReservationStatus, Sku,
    Timestamp,
};
use crate::store::flags::of_resolutions;

/// Writes everything of these resolutions.
pub(super) async fn write_all(
    connection: &mut PgConnection,
    decided: &[Decided],
    now: Timestamp,
) -> Result<(), ApplyError> {
    let now = datetime(now);
    write_orders(connection, decided, now).await?;
    write_payments(connection, decided, now).await?;
    write_stock(connection, decided).await?;
    write_identifiers(connection, decided, now).await?;
    write_transfers(connection, decided, now).await?;
    write_refunds(connection, decided).await?;
    let (raised, gone) = of_resolutions(decided);
    flags::write(connection, &raised, &gone, now).await?;
    write_events(connection, decided, now).await?;
    write_resolutions(connection, decided, now).await?;
    write_watches(connection, decided, now).await
}

/// Every row must have taken its update.
pub(super) fn all_written(
    table: &'static str,
    wanted: usize,
    result: &PgQueryResult,
) -> Result<(), ApplyError> {
    let written = result.rows_affected();
    if u64::try_from(wanted).is_ok_and(|wanted| wanted == written) {
        return Ok(());
    }
    Err(ApplyError::NotWritten { table, wanted, written })
}

async fn write_orders(
    connection: &mut PgConnection,
    decided: &[Decided],
    now: OffsetDateTime,
) -> Result<(), ApplyError> {
    // Of two resolutions of one order the later one stands.
    let changes: BTreeMap<&OrderId, &OrderChange> = decided
        .iter()
        .filter_map(|d| Some((d.order_id.as_ref()?, d.resolution.order.as_ref()?)))
        .collect();
    if changes.is_empty() {
        return Ok(());
    }
    let ids: Vec<String> = changes.keys().map(|id| id.as_str().to_owned()).collect();
    let statuses: Vec<String> = changes.values().map(|c| c.status.code().to_owned()).collect();
    let payers: Vec<Option<String>> =
        changes.values().map(|c| c.paid_by.as_ref().map(|id| id.as_str().to_owned())).collect();
    let result = sqlx::query!(
        "UPDATE orders o SET status = c.status, paid_by = c.paid_by, updated_at = $4
           FROM unnest($1::text[], $2::text[], $3::text[]) AS c (id, status, paid_by)
          WHERE o.id = c.id",
        &ids,
        &statuses,
        &payers as &[Option<String>],
        now,
    )
    .execute(connection)
    .await?;
    all_written("orders", ids.len(), &result)
}

async fn write_payments(
    connection: &mut PgConnection,
    decided: &[Decided],
    now: OffsetDateTime,
) -> Result<(), ApplyError> {
    let changes: Vec<(&Decided, PaymentStatus)> =
        decided.iter().filter_map(|d| Some((d, d.resolution.payment?))).collect();
    if changes.is_empty() {
        return Ok(());
    }
    let ids = texts(changes.iter().map(|(d, _)| &d.judged.payment_id));
    let statuses: Vec<String> =
        changes.iter().map(|(_, status)| status.code().to_owned()).collect();
    let settled: Vec<Option<OffsetDateTime>> = changes
        .iter()
        .map(|(d, status)| match status {
            PaymentStatus::Settled => d.settlement.map(|s| block_datetime(s.transfer.block.time)),
            _ => None,
        })
        .collect();
    let result = sqlx::query!(
        "UPDATE payments p SET status = c.status, settled_at = c.settled_at, updated_at = $4
           FROM unnest($1::text[], $2::text[], $3::timestamptz[]) AS c (id, status, settled_at)
          WHERE p.id = c.id",
        &ids,
        &statuses,
        &settled as &[Option<OffsetDateTime>],
        now,
    )
    .execute(connection)
    .await?;
    all_written("payments", ids.len(), &result)
}

async fn write_stock(connection: &mut PgConnection, decided: &[Decided]) -> Result<(), ApplyError> {
    let mut statuses: BTreeMap<&str, ReservationStatus> = BTreeMap::new();
    let mut shelf: BTreeMap<&Sku, i64> = BTreeMap::new();
    for change in decided.iter().flat_map(|d| &d.reservations) {
        statuses.insert(&change.id, change.status);
        if change.shelf != 0 {
            let sum = shelf.entry(&change.sku).or_default();
            *sum = sum.saturating_add(change.shelf);
        }
    }
    if statuses.is_empty() {
        return Ok(());
    }
    let ids: Vec<String> = statuses.keys().map(|id| (*id).to_owned()).collect();
    let codes: Vec<String> = statuses.values().map(|s| s.code().to_owned()).collect();
    let result = sqlx::query!(
        "UPDATE stock_reservations r SET status = c.status
           FROM unnest($1::text[], $2::text[]) AS c (id, status)
          WHERE r.id = c.id",
        &ids,
        &codes,
    )
    .execute(&mut *connection)
    .await?;
    all_written("stock_reservations", ids.len(), &result)?;

    if shelf.is_empty() {
        return Ok(());
    }
    let skus: Vec<String> = shelf.keys().map(|sku| sku.as_str().to_owned()).collect();
    let amounts: Vec<i64> = shelf.values().copied().collect();
    // Nothing is taken below zero, and nothing is lost because the sku is on no shelf. A shelf that the
    // gateway has oversold takes back what is released.
    let result = sqlx::query!(
        "UPDATE stock s SET available = s.available + c.amount
           FROM unnest($1::text[], $2::bigint[]) AS c (sku, amount)
          WHERE s.sku = c.sku AND (c.amount > 0 OR s.available + c.amount >= 0)",
        &skus,
        &amounts,
    )
    .execute(connection)
    .await?;
    all_written("stock", skus.len(), &result)
}

async fn write_identifiers(
    connection: &mut PgConnection,
    decided: &[Decided],
    now: OffsetDateTime,
) -> Result<(), ApplyError> {
    let mut changes: BTreeMap<&str, (IdentifierStatus, &Decided)> = BTreeMap::new();
    for d in decided {
        changes.extend(d.identifiers.iter().map(|c| (c.id.as_str(), (c.status, d))));
    }
    if changes.is_empty() {
        return Ok(());
    }
    let ids: Vec<String> = changes.keys().map(|id| (*id).to_owned()).collect();
    let statuses: Vec<String> = changes.values().map(|(s, _)| s.code().to_owned()).collect();
    let result = sqlx::query!(
        "UPDATE payment_identifiers i SET status = c.status, updated_at = $3
           FROM unnest($1::text[], $2::text[]) AS c (id, status)
          WHERE i.id = c.id",
        &ids,
        &statuses,
        now,
    )
    .execute(&mut *connection)
    .await?;
    all_written("payment_identifiers", ids.len(), &result)?;

    let orders: Vec<String> = changes
        .values()
        .map(|(_, d)| d.order_id.as_ref().map_or_else(String::new, ToString::to_string))
        .collect();
    let transactions: Vec<Option<String>> =
        changes.values().map(|(_, d)| d.settlement.map(|s| hex(&s.transfer.tx_hash))).collect();
    sqlx::query!(
        "INSERT INTO reconciled.retry_outcomes AS r
                (identifier_sha256, payment_id, order_id, outcome, tx_hash, response_sha256,
                 updated_at)
         SELECT encode(sha256(convert_to(i.id, 'UTF8')), 'hex'), i.payment_id, c.order_id,
                c.outcome, c.tx_hash, encode(sha256(convert_to(i.response::text, 'UTF8')), 'hex'), $5
           FROM unnest($1::text[], $2::text[], $3::text[], $4::text[])
                    AS c (id, order_id, outcome, tx_hash)
           JOIN payment_identifiers i ON i.id = c.id
         ON CONFLICT (identifier_sha256) DO UPDATE
            SET payment_id = excluded.payment_id, order_id = excluded.order_id,
                outcome = excluded.outcome, tx_hash = excluded.tx_hash,
                response_sha256 = excluded.response_sha256, updated_at = excluded.updated_at",
        &ids,
        &orders,
        &statuses,
        &transactions as &[Option<String>],
        now,
    )
    .execute(connection)
    .await?;
    Ok(())
}
