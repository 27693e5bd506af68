//! Whether the tables and columns this daemon reads and writes are there; views count.

use std::collections::BTreeSet;

use sqlx::PgPool;

use crate::store::{OptionalTables, StoreError};

/// What is read or written of the gateway's tables.
const REQUIRED: [(&str, &[&str]); 2] = [
    ("orders", &["id", "kind", "status", "paid_by", "delivered_at", "updated_at"]),
    (
        "payments",
        &[
            "id",
            "order_id",
            "rail",
            "method",
            "chain_id",
            "token",
            "payer",
            "pay_to",
            "amount",
            "nonce",
            "valid_after",
            "valid_before",
            "tx_hash",
            "status",
            "created_at",
            "broadcast_at",
            "settled_at",
            "updated_at",
        ],
    ),
];

/// Likewise, where the table is there at all.
const OPTIONAL: [(&str, &[&str]); 3] = [
    ("stock_reservations", &["id", "order_id", "sku", "quantity", "status"]),
    ("stock", &["sku", "available"]),
    ("payment_identifiers", &["id", "payment_id", "status", "response", "updated_at"]),
];

/// Our own: the migrations create them whole, so the names are enough.
const OWN: [&str; 12] = [
    "reconciled.watches",
    "reconciled.resolutions",
    "reconciled.checks",
    "reconciled.refunds_owed",
    "reconciled.flags",
    "reconciled.events",
    "reconciled.settle_latencies",
    "reconciled.schedules",
    "reconciled.transfers",
    "reconciled.cursors",
    "reconciled.reconcile_runs",
    "reconciled.retry_outcomes",
];

/// Checks that every required table and column is there, and says which optional tables are.
pub(super) async fn verify(pool: &PgPool) -> Result<OptionalTables, StoreError> {
    let (tables, columns): (Vec<String>, Vec<String>) = REQUIRED
        .iter()
        .chain(&OPTIONAL)
        .flat_map(|(table, columns)| {
            columns.iter().map(|column| ((*table).to_owned(), (*column).to_owned()))
        })
        .chain(OWN.iter().map(|table| ((*table).to_owned(), String::new())))
        .unzip();
    // A name without a column asks for the table alone.
    let missing = sqlx::query!(
        r#"SELECT w.relation AS "table!", w.name AS "column!",
                  to_regclass(w.relation) IS NULL AS "whole!"
             FROM unnest($1::text[], $2::text[]) AS w (relation, name)
            WHERE to_regclass(w.relation) IS NULL
               OR w.name <> '' AND NOT EXISTS (
                      SELECT FROM pg_attribute a
                       WHERE a.attrelid = to_regclass(w.relation) AND a.attname = w.name
                         AND a.attnum > 0 AND NOT a.attisdropped)"#,
        &tables,
        &columns,
    )
    .fetch_all(pool)
    .await
    .map_err(|source| StoreError::from_sqlx("a look at the schema", source))?;

    let absent: BTreeSet<&str> =
        missing.iter().filter(|m| m.whole).map(|m| m.table.as_str()).collect();
    let is_optional = |table: &str| OPTIONAL.iter().any(|(name, _)| *name == table);
    let first = missing.iter().find(|m| !(m.whole && is_optional(&m.table)));
    if let Some(m) = first {
        let missing = if m.whole {
            format!("table {}", m.table)
        } else {
            format!("column {}.{}", m.table, m.column)
        };
        return Err(StoreError::Schema { missing });
    }
    Ok(OptionalTables {
        stock: !absent.contains("stock_reservations") && !absent.contains("stock"),
        identifiers: !absent.contains("payment_identifiers"),
    })
}
