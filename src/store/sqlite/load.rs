//! Reading the rows around a batch of payments into a [`Ledger`], each kind with one query.

use std::collections::BTreeSet;

use sqlx::sqlite::SqliteRow;
use sqlx::{Row, SqliteConnection};

use super::{failed, id_list};
use crate::domain::{
    Identifier, IdentifierStatus, Judged, Ledger, Order, OrderId, PaymentId, PaymentStatus,
    RawPayment, RefundStatus, Sibling, Sku, Verdict,
};
use crate::store::row::{RawOrder, RawReservation, RawTransfer, coded};
use crate::store::{OptionalTables, StoreError};

const OPERATION: &str = "to read the rows of a batch";

// Columns of the gateway are cast to blobs: whatever stands there can be read as bytes, also text that is
// not UTF-8 and numbers that are not whole.
macro_rules! payments_where {
    ($condition:literal) => {
        concat!(
            "SELECT CAST(id AS BLOB), CAST(order_id AS BLOB), CAST(rail AS BLOB), ",
            "CAST(method AS BLOB), CAST(chain_id AS BLOB), CAST(token AS BLOB), ",
            "CAST(payer AS BLOB), CAST(pay_to AS BLOB), CAST(amount AS BLOB), ",
            "CAST(nonce AS BLOB), CAST(valid_after AS BLOB), CAST(valid_before AS BLOB), ",
            "CAST(tx_hash AS BLOB), CAST(status AS BLOB), CAST(created_at AS BLOB), ",
            "CAST(broadcast_at AS BLOB) FROM payments WHERE ",
            $condition,
            " IN (SELECT value FROM json_each(?))"
        )
    };
}

const PAYMENTS_BY_ID: &str = payments_where!("id");

const PAYMENTS_BY_NONCE: &str = payments_where!("lower(nonce)");

/// A column of the gateway, cast to a blob, as text.
pub(super) fn text(row: &SqliteRow, column: usize) -> Result<Option<String>, StoreError> {
    let bytes: Option<Vec<u8>> = row.try_get(column).map_err(failed(OPERATION))?;
    Ok(bytes.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()))
}

fn id(row: &SqliteRow, column: usize) -> Result<String, StoreError> {
    Ok(text(row, column)?.unwrap_or_default())
}

/// The payments' rows, as text; `ids` is a list as [`id_list`] makes it.
pub(super) async fn raw_payments(
    conn: &mut SqliteConnection,
    ids: &str,
) -> Result<Vec<RawPayment>, StoreError> {
    payments_by(conn, PAYMENTS_BY_ID, ids).await
}

/// The same for those with one of these nonces.
pub(super) async fn raw_payments_by_nonce(
    conn: &mut SqliteConnection,
    nonces: &str,
) -> Result<Vec<RawPayment>, StoreError> {
    payments_by(conn, PAYMENTS_BY_NONCE, nonces).await
}

async fn payments_by(
    conn: &mut SqliteConnection,
    statement: &'static str,
    list: &str,
) -> Result<Vec<RawPayment>, StoreError> {
    rows(conn, statement, list).await?.iter().map(raw_payment).collect()
}

fn raw_payment(row: &SqliteRow) -> Result<RawPayment, StoreError> {
    Ok(RawPayment {
        id: id(row, 0)?,
        order_id: text(row, 1)?,
        rail: text(row, 2)?,
        method: text(row, 3)?,
        chain_id: text(row, 4)?,
        token: text(row, 5)?,
        payer: text(row, 6)?,
        pay_to: text(row, 7)?,
        amount: text(row, 8)?,
        nonce: text(row, 9)?,
        valid_after: text(row, 10)?,
        valid_before: text(row, 11)?,
        tx_hash: text(row, 12)?,
        status: text(row, 13)?,
        created_at: text(row, 14)?,
        broadcast_at: text(row, 15)?,
    })
}

async fn rows(
    conn: &mut SqliteConnection,
    statement: &'static str,
    list: &str,
) -> Result<Vec<SqliteRow>, StoreError> {
    sqlx::query(statement).bind(list).fetch_all(conn).await.map_err(failed(OPERATION))
}

/// Reads everything that resolving `batch` depends on. Within `BEGIN IMMEDIATE` all of it is locked.
pub(super) async fn ledger(
    conn: &mut SqliteConnection,
    batch: &[Judged],
    tables: OptionalTables,
) -> Result<Ledger, StoreError> {
    let mut ledger = Ledger::default();
    let ids = id_list(batch.iter().map(|judged| judged.payment_id.as_str()));
    payments(conn, &mut ledger, &ids).await?;
    let orders: BTreeSet<&OrderId> = ledger.payments.values().map(|p| &p.order_id).collect();
    let order_ids = id_list(orders.into_iter().map(OrderId::as_str));
    claimants(conn, &mut ledger).await?;
    orders_and_siblings(conn, &mut ledger, &order_ids).await?;
    if tables.stock {
        stock(conn, &mut ledger, &order_ids).await?;
    }
    if tables.identifiers {
        identifiers(conn, &mut ledger, &ids).await?;
    }
    transfers(conn, &mut ledger, batch).await?;
    refunds(conn, &mut ledger).await?;
    Ok(ledger)
}

async fn payments(
    conn: &mut SqliteConnection,
    ledger: &mut Ledger,
    ids: &str,
) -> Result<(), StoreError> {
    for raw in raw_payments(conn, ids).await? {
        match raw.parse() {
            Ok(payment) => {
                ledger.payments.insert(payment.id.clone(), payment);
            }
            Err(malformed) => {
                ledger.malformed.insert(malformed.payment_id, raw);
            }
        }
    }
    Ok(())
}

/// Other payments with one of the batch's authorizations, and rows with its nonce that make no sense.
async fn claimants(conn: &mut SqliteConnection, ledger: &mut Ledger) -> Result<(), StoreError> {
    let nonces: Vec<String> = ledger.payments.values().map(|p| p.nonce.to_string()).collect();
    let list = id_list(nonces.iter().map(String::as_str));
    for raw in raw_payments_by_nonce(conn, &list).await? {
        match raw.parse() {
            Ok(payment) if ledger.payments.values().any(|p| p.same_authorization(&payment)) => {
                ledger.payments.entry(payment.id.clone()).or_insert(payment);
            }
            Ok(_) => {}
            Err(malformed) => {
                ledger.malformed.insert(malformed.payment_id, raw);
            }
        }
    }
    Ok(())
}

/// The orders that can be read; one that makes no sense is left out.
pub(super) async fn readable_orders(
    conn: &mut SqliteConnection,
    order_ids: &str,
) -> Result<Vec<Order>, StoreError> {
    let statement = "
        SELECT CAST(id AS BLOB), CAST(kind AS BLOB), CAST(status AS BLOB), CAST(paid_by AS BLOB),
            CAST(delivered_at AS BLOB)
        FROM orders WHERE id IN (SELECT value FROM json_each(?))";
    let mut orders = Vec::new();
    for row in rows(conn, statement, order_ids).await? {
        let raw = RawOrder {
            id: id(&row, 0)?,
            kind: text(&row, 1)?,
            status: text(&row, 2)?,
            paid_by: text(&row, 3)?,
            delivered_at: text(&row, 4)?,
        };
        orders.extend(raw.parse());
    }
    Ok(orders)
}

async fn orders_and_siblings(
    conn: &mut SqliteConnection,
    ledger: &mut Ledger,
    order_ids: &str,
) -> Result<(), StoreError> {
    let orders = readable_orders(conn, order_ids).await?;
    ledger.orders.extend(orders.into_iter().map(|order| (order.id.clone(), order)));
    let statement = "
        SELECT CAST(id AS BLOB), CAST(order_id AS BLOB), CAST(status AS BLOB)
        FROM payments WHERE order_id IN (SELECT value FROM json_each(?))";
    for row in rows(conn, statement, order_ids).await? {
        let sibling = Sibling {
            id: PaymentId::new(id(&row, 0)?),
            order_id: OrderId::new(id(&row, 1)?),
            status: text(&row, 2)?.as_deref().and_then(PaymentStatus::from_code),
        };
        ledger.siblings.insert(sibling.id.clone(), sibling);
    }
    Ok(())
}

/// An order with a reservation that makes no sense is unreadable as a whole: paying or failing it would
/// leave stock nobody can account for (I5).
async fn stock(
    conn: &mut SqliteConnection,
    ledger: &mut Ledger,
    order_ids: &str,
) -> Result<(), StoreError> {
    let statement = "
        SELECT CAST(id AS BLOB), CAST(order_id AS BLOB), CAST(sku AS BLOB),
            CAST(quantity AS BLOB), CAST(status AS BLOB)
        FROM stock_reservations WHERE order_id IN (SELECT value FROM json_each(?))";
    for row in rows(conn, statement, order_ids).await? {
        let raw = RawReservation {
            id: id(&row, 0)?,
            order_id: id(&row, 1)?,
            sku: text(&row, 2)?,
            quantity: text(&row, 3)?,
            status: text(&row, 4)?,
        };
        match raw.parse() {
            Ok(reservation) => {
                ledger.reservations.insert(reservation.id.clone(), reservation);
            }
            Err(order_id) => {
                ledger.orders.remove(&order_id);
            }
        }
    }
    let skus: BTreeSet<&Sku> = ledger.reservations.values().map(|r| &r.sku).collect();
    let list = id_list(skus.into_iter().map(Sku::as_str));
    let statement = "
        SELECT CAST(sku AS BLOB), CAST(available AS BLOB)
        FROM stock WHERE sku IN (SELECT value FROM json_each(?))";
    for row in rows(conn, statement, &list).await? {
        if let Some(available) = text(&row, 1)?.and_then(|n| n.parse().ok()) {
            ledger.stock.insert(Sku::new(id(&row, 0)?), available);
        }
    }
    Ok(())
}

async fn identifiers(
    conn: &mut SqliteConnection,
    ledger: &mut Ledger,
    ids: &str,
) -> Result<(), StoreError> {
    let statement = "
        SELECT CAST(id AS BLOB), CAST(payment_id AS BLOB), CAST(status AS BLOB)
        FROM payment_identifiers WHERE payment_id IN (SELECT value FROM json_each(?))";
    for row in rows(conn, statement, ids).await? {
        // A status that is none of ours is not ours to change.
        let status = text(&row, 2)?.as_deref().and_then(IdentifierStatus::from_code);
        if let Some(status) = status {
            let identifier =
                Identifier { id: id(&row, 0)?, payment_id: PaymentId::new(id(&row, 1)?), status };
            ledger.identifiers.insert(identifier.id.clone(), identifier);
        }
    }
    Ok(())
}

/// What is recorded for these payments, for those that claim the same authorizations and for their orders'
/// other payments, and whatever is recorded of the transactions that the verdicts speak of.
async fn transfers(
    conn: &mut SqliteConnection,
    ledger: &mut Ledger,
    batch: &[Judged],
) -> Result<(), StoreError> {
    let ids = ids_with_siblings(ledger);
    let hashes: Vec<String> = batch
        .iter()
        .filter_map(|judged| match &judged.verdict {
            Verdict::Settled(settlement) => Some(settlement.transfer.tx_hash.to_string()),
            _ => None,
        })
        .collect();
    let found = sqlx::query(
        "SELECT payment_id, chain_id, token, payer, pay_to, amount, block_number, block_hash,
            block_time, tx_hash, log_index, finality, seen_at
         FROM reconciled_transfers
         WHERE id IN (
            SELECT id FROM reconciled_transfers
            WHERE orphaned_at IS NULL AND payment_id IS NOT NULL
              AND payment_id IN (SELECT value FROM json_each(?1))
            UNION
            SELECT id FROM reconciled_transfers
            WHERE orphaned_at IS NULL AND payment_id IS NOT NULL
              AND tx_hash IN (SELECT value FROM json_each(?2)))
         ORDER BY id",
    )
    .bind(ids)
    .bind(id_list(hashes.iter().map(String::as_str)))
    .fetch_all(conn)
    .await
    .map_err(failed(OPERATION))?;
    for row in found {
        let raw = RawTransfer {
            payment_id: row.try_get(0).map_err(failed(OPERATION))?,
            chain_id: row.try_get(1).map_err(failed(OPERATION))?,
            token: row.try_get(2).map_err(failed(OPERATION))?,
            payer: row.try_get(3).map_err(failed(OPERATION))?,
            pay_to: row.try_get(4).map_err(failed(OPERATION))?,
            amount: row.try_get(5).map_err(failed(OPERATION))?,
            block_number: row.try_get(6).map_err(failed(OPERATION))?,
            block_hash: row.try_get(7).map_err(failed(OPERATION))?,
            block_time: row.try_get(8).map_err(failed(OPERATION))?,
            tx_hash: row.try_get(9).map_err(failed(OPERATION))?,
            log_index: row.try_get(10).map_err(failed(OPERATION))?,
            finality: row.try_get(11).map_err(failed(OPERATION))?,
            seen_at: row.try_get(12).map_err(failed(OPERATION))?,
        };
        ledger.transfers.push(raw.parse()?);
    }
    Ok(())
}

fn ids_with_siblings(ledger: &Ledger) -> String {
    let ids: BTreeSet<&PaymentId> = ledger.payments.keys().chain(ledger.siblings.keys()).collect();
    id_list(ids.into_iter().map(PaymentId::as_str))
}

/// The refund records of these payments and of their orders' other payments.
async fn refunds(conn: &mut SqliteConnection, ledger: &mut Ledger) -> Result<(), StoreError> {
    let ids = ids_with_siblings(ledger);
    let statement = "
        SELECT payment_id, status FROM reconciled_refunds_owed
        WHERE payment_id IN (SELECT value FROM json_each(?))";
    for row in rows(conn, statement, &ids).await? {
        let payment_id: String = row.try_get(0).map_err(failed(OPERATION))?;
        let status: String = row.try_get(1).map_err(failed(OPERATION))?;
        let status = coded("refunds_owed", "status", &status, RefundStatus::from_code)?;
        ledger.refunds.insert(PaymentId::new(payment_id), status);
    }
    Ok(())
}
