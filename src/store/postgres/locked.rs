//! Fills a [`Ledger`] with freshly locked rows, in one order for everybody: watches, orders, their
//! payments, stock, identifiers. Every row a resolution may write is locked; rows that only inform it
//! (claimants of the same authorization in other orders) are read.

use std::collections::{BTreeMap, BTreeSet};

use sqlx::PgConnection;

use super::apply::ApplyError;
use super::rows::{hex, select_payments, texts};
use crate::domain::{
    Identifier, IdentifierStatus, Judged, Ledger, OrderId, PaymentId, PaymentStatus, RefundStatus,
    Sibling, Sku, Transfer, Verdict,
};
use crate::store::row::{RawOrder, RawReservation, RawTransfer, coded, column_number};
use crate::store::{Lease, OptionalTables};

/// Locks the watches that the lease still holds, and returns their payments' ids.
pub(super) async fn lock_watches(
    connection: &mut PgConnection,
    lease: &Lease,
    batch: &[Judged],
) -> Result<BTreeSet<String>, sqlx::Error> {
    let held = sqlx::query_scalar!(
        "SELECT payment_id FROM reconciled.watches
          WHERE payment_id = ANY($1::text[]) AND lease_token = $2
          ORDER BY payment_id
            FOR UPDATE",
        &texts(batch.iter().map(|judged| &judged.payment_id)),
        lease.token,
    )
    .fetch_all(connection)
    .await?;
    Ok(held.into_iter().collect())
}

/// Locks and reads every row around these payments.
pub(super) async fn read_ledger(
    connection: &mut PgConnection,
    batch: &[Judged],
    optional: OptionalTables,
) -> Result<Ledger, ApplyError> {
    let mut ledger = Ledger::default();
    let ids = texts(batch.iter().map(|judged| &judged.payment_id));
    let order_ids = sqlx::query_scalar!(
        r#"SELECT DISTINCT order_id AS "order_id!" FROM payments
            WHERE id = ANY($1::text[]) AND order_id IS NOT NULL"#,
        &ids,
    )
    .fetch_all(&mut *connection)
    .await?;
    lock_orders(connection, &mut ledger, &order_ids).await?;
    lock_payments(connection, &mut ledger, batch, &ids, &order_ids).await?;
    if optional.stock {
        lock_stock(connection, &mut ledger, &order_ids).await?;
    }
    if optional.identifiers {
        lock_identifiers(connection, &mut ledger, &ids).await?;
    }
    read_claimants(connection, &mut ledger, &ids).await?;
    read_transfers(connection, &mut ledger, batch).await?;
    lock_refunds(connection, &mut ledger).await?;
    Ok(ledger)
}

async fn lock_orders(
    connection: &mut PgConnection,
    ledger: &mut Ledger,
    order_ids: &[String],
) -> Result<(), ApplyError> {
    let rows = sqlx::query_as!(
        RawOrder,
        r#"SELECT id AS "id!", kind::text AS "kind?", status::text AS "status?",
                  paid_by::text AS "paid_by?",
                  trunc(extract(epoch FROM delivered_at) * 1000)::text AS "delivered_at?"
             FROM orders
            WHERE id = ANY($1::text[])
            ORDER BY id
              FOR UPDATE"#,
        order_ids,
    )
    .fetch_all(connection)
    .await?;
    // An order that cannot be read is left out: its payments are then flagged, not guessed at.
    let orders = rows.into_iter().filter_map(RawOrder::parse);
    ledger.orders.extend(orders.map(|order| (order.id.clone(), order)));
    Ok(())
}

/// The payments being resolved, whole, and every other payment of their orders.
async fn lock_payments(
    connection: &mut PgConnection,
    ledger: &mut Ledger,
    batch: &[Judged],
    ids: &[String],
    order_ids: &[String],
) -> Result<(), ApplyError> {
    let rows = select_payments!(
        "WHERE id = ANY($1::text[]) OR order_id = ANY($2::text[]) ORDER BY id FOR UPDATE",
        ids,
        order_ids,
    )
    .fetch_all(connection)
    .await?;
    let rows: BTreeMap<&str, _> = rows.iter().map(|row| (row.id.as_str(), row)).collect();
    for judged in batch {
        let id = &judged.payment_id;
        let Some(row) = rows.get(id.as_str()) else { continue };
        match row.parse() {
            Ok(payment) if !order_ids.iter().any(|o| o == payment.order_id.as_str()) => {
                // Moved to another order between two statements: that one is not locked.
                return Err(ApplyError::Moved);
            }
            Ok(payment) => {
                ledger.payments.insert(id.clone(), payment);
            }
            Err(_) => {
                ledger.malformed.insert(id.clone(), (*row).clone());
            }
        }
    }
    for row in rows.values() {
        let Some(order_id) = &row.order_id else { continue };
        let sibling = Sibling {
            id: PaymentId::from(row.id.as_str()),
            order_id: OrderId::from(order_id.as_str()),
            status: row.status.as_deref().and_then(PaymentStatus::from_code),
        };
        ledger.siblings.insert(sibling.id.clone(), sibling);
    }
    Ok(())
}

/// An order with a reservation that makes no sense is unreadable as a whole: paying or failing it would
/// leave stock nobody can account for (I5).
async fn lock_stock(
    connection: &mut PgConnection,
    ledger: &mut Ledger,
    order_ids: &[String],
) -> Result<(), ApplyError> {
    let rows = sqlx::query_as!(
        RawReservation,
        r#"SELECT id AS "id!", order_id AS "order_id!", sku::text AS "sku?",
                  quantity::text AS "quantity?", status::text AS "status?"
             FROM stock_reservations
            WHERE order_id = ANY($1::text[])
            ORDER BY id
              FOR UPDATE"#,
        order_ids,
    )
    .fetch_all(&mut *connection)
    .await?;
    for row in rows {
        match row.parse() {
            Ok(reservation) => {
                ledger.reservations.insert(reservation.id.clone(), reservation);
            }
            Err(order_id) => {
                ledger.orders.remove(&order_id);
            }
        }
    }
    let skus: BTreeSet<&str> = ledger.reservations.values().map(|r| r.sku.as_str()).collect();
    let skus: Vec<String> = skus.into_iter().map(str::to_owned).collect();
    let rows = sqlx::query!(
        r#"SELECT sku AS "sku!", available::text AS "available?"
             FROM stock
            WHERE sku = ANY($1::text[])
            ORDER BY sku
              FOR UPDATE"#,
        &skus,
    )
    .fetch_all(connection)
    .await?;
    for row in rows {
        if let Some(available) = row.available.and_then(|a| a.parse().ok()) {
            ledger.stock.insert(Sku::new(row.sku), available);
        }
    }
    Ok(())
}

async fn lock_identifiers(
    connection: &mut PgConnection,
    ledger: &mut Ledger,
    ids: &[String],
) -> Result<(), ApplyError> {
    let rows = sqlx::query!(
        r#"SELECT id AS "id!", payment_id AS "payment_id!", status::text AS "status?"
             FROM payment_identifiers
            WHERE payment_id = ANY($1::text[])
            ORDER BY id
              FOR UPDATE"#,
        ids,
    )
    .fetch_all(connection)
    .await?;
    for row in rows {
        let status = row.status.as_deref().and_then(IdentifierStatus::from_code);
        let Some(status) = status else { continue };
        let payment_id = PaymentId::new(row.payment_id);
        let identifier = Identifier { id: row.id, payment_id, status };
        ledger.identifiers.insert(identifier.id.clone(), identifier);
    }
    Ok(())
}

/// Every other payment that claims one of the authorizations, whichever order it is of.
async fn read_claimants(
    connection: &mut PgConnection,
    ledger: &mut Ledger,
    ids: &[String],
) -> Result<(), ApplyError> {
    let nonces: BTreeSet<String> = ledger.payments.values().map(|p| hex(&p.nonce)).collect();
    let nonces: Vec<String> = nonces.into_iter().collect();
    let rows = select_payments!(
        "WHERE lower(nonce) = ANY($1::text[]) AND NOT id = ANY($2::text[])",
        &nonces,
        ids,
    )
    .fetch_all(connection)
    .await?;
    for row in rows {
        match row.parse() {
            Ok(payment) => {
                ledger.payments.insert(payment.id.clone(), payment);
            }
            Err(malformed) => {
                ledger.malformed.insert(malformed.payment_id, row);
            }
        }
    }
    Ok(())
}

/// Live transfers recorded for these payments, for those that claim the same authorizations and for their
/// orders' other payments, or with the logs that the verdicts speak of.
async fn read_transfers(
    connection: &mut PgConnection,
    ledger: &mut Ledger,
    batch: &[Judged],
) -> Result<(), ApplyError> {
    let logs: Vec<&Transfer> = batch
        .iter()
        .filter_map(|judged| match &judged.verdict {
            Verdict::Settled(settlement) => Some(&settlement.transfer),
            _ => None,
        })
        .collect();
    let chains: Vec<i64> = logs.iter().map(|t| column_number(t.chain_id.get())).collect();
    let blocks: Vec<String> = logs.iter().map(|t| hex(&t.block.hash)).collect();
    let transactions: Vec<String> = logs.iter().map(|t| hex(&t.tx_hash)).collect();
    let indexes: Vec<i64> = logs.iter().map(|t| column_number(t.log_index)).collect();
    let rows = sqlx::query_as!(
        RawTransfer,
        r#"SELECT payment_id AS "payment_id!", chain_id AS "chain_id!", token AS "token!",
                  payer AS "payer!", pay_to AS "pay_to!", amount::text AS "amount!",
                  block_number AS "block_number!", block_hash AS "block_hash!",
                  extract(epoch FROM block_time)::bigint AS "block_time!", tx_hash AS "tx_hash!",
                  log_index AS "log_index!", finality AS "finality!",
                  (extract(epoch FROM seen_at) * 1000)::bigint AS "seen_at!"
             FROM reconciled.transfers
            WHERE orphaned_at IS NULL AND payment_id = ANY($1::text[])
            UNION
           SELECT t.payment_id, t.chain_id, t.token, t.payer, t.pay_to, t.amount::text,
                  t.block_number, t.block_hash, extract(epoch FROM t.block_time)::bigint,
                  t.tx_hash, t.log_index, t.finality,
                  (extract(epoch FROM t.seen_at) * 1000)::bigint
             FROM unnest($2::bigint[], $3::text[], $4::text[], $5::bigint[])
                      AS l (chain_id, block_hash, tx_hash, log_index)
             JOIN reconciled.transfers t
               ON t.chain_id = l.chain_id AND t.block_hash = l.block_hash
                  AND t.tx_hash = l.tx_hash AND t.log_index = l.log_index
            WHERE t.orphaned_at IS NULL AND t.payment_id IS NOT NULL"#,
        &texts(with_siblings(ledger)),
        &chains,
        &blocks,
        &transactions,
        &indexes,
    )
    .fetch_all(connection)
    .await?;
    for row in rows {
        ledger.transfers.push(row.parse()?);
    }
    Ok(())
}

fn with_siblings(ledger: &Ledger) -> BTreeSet<&PaymentId> {
    ledger.payments.keys().chain(ledger.siblings.keys()).collect()
}

/// The refund records of these payments and of their orders' other payments: locked, because a batch
/// that pays refunds may be claiming one right now.
async fn lock_refunds(
    connection: &mut PgConnection,
    ledger: &mut Ledger,
) -> Result<(), ApplyError> {
    let rows = sqlx::query!(
        "SELECT payment_id, status FROM reconciled.refunds_owed
          WHERE payment_id = ANY($1::text[])
          ORDER BY payment_id
            FOR UPDATE",
        &texts(with_siblings(ledger)),
    )
    .fetch_all(connection)
    .await?;
    for row in rows {
        let status =
            coded("reconciled.refunds_owed", "status", &row.status, RefundStatus::from_code)?;
        ledger.refunds.insert(PaymentId::new(row.payment_id), status);
    }
    Ok(())
}
