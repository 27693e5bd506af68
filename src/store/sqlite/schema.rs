//! Creating our tables, and finding out what the gateway has.

use sqlx::SqlitePool;

use super::failed;
use crate::store::contract::{IDENTIFIERS, OWN, REQUIRED, STOCK};
use crate::store::{OptionalTables, StoreError};

/// Where the applied migrations are noted: a gateway may use sqlx in the same file.
const MIGRATIONS_TABLE: &str = "reconciled_migrations";

/// Indexes on the gateway's tables. Not a migration: where a gateway exposes a view instead of a table,
/// an index of it is the gateway's to make.
const GATEWAY_INDEXES: [(&str, &str); 7] = [
    (
        "payments",
        "CREATE INDEX IF NOT EXISTS reconciled_payments_status ON payments (status, created_at)",
    ),
    ("payments", "CREATE INDEX IF NOT EXISTS reconciled_payments_order ON payments (order_id)"),
    ("payments", "CREATE INDEX IF NOT EXISTS reconciled_payments_nonce ON payments (lower(nonce))"),
    (
        "payments",
        "CREATE INDEX IF NOT EXISTS reconciled_payments_settled \
         ON payments (status, settled_at, id)",
    ),
    ("orders", "CREATE INDEX IF NOT EXISTS reconciled_orders_status ON orders (status)"),
    (
        "stock_reservations",
        "CREATE INDEX IF NOT EXISTS reconciled_reservations_order ON stock_reservations (order_id)",
    ),
    (
        "payment_identifiers",
        "CREATE INDEX IF NOT EXISTS reconciled_identifiers_payment \
         ON payment_identifiers (payment_id)",
    ),
];

/// Creates or upgrades what is ours, and what the gateway lacks.
pub(super) async fn migrate(writer: &SqlitePool) -> Result<(), StoreError> {
    let mut migrator = sqlx::migrate!("migrations/sqlite");
    migrator.dangerous_set_table_name(MIGRATIONS_TABLE);
    migrator.run(writer).await.map_err(|e| StoreError::Migrate(Box::new(e)))?;
    let operation = "to index the gateway's tables";
    for (table, statement) in GATEWAY_INDEXES {
        let is_table: bool = sqlx::query_scalar(
            "SELECT EXISTS (SELECT 1 FROM sqlite_schema WHERE type = 'table' AND name = ?)",
        )
        .bind(table)
        .fetch_one(writer)
        .await
        .map_err(failed(operation))?;
        if is_table {
            sqlx::query(statement).execute(writer).await.map_err(failed(operation))?;
        }
    }
    Ok(())
}

/// Checks that what is required is there, column by column, and says which optional tables are.
pub(super) async fn verify(reader: &SqlitePool) -> Result<OptionalTables, StoreError> {
    for (table, expected) in REQUIRED {
        if !has_table(reader, table, expected).await? {
            return Err(StoreError::Schema { missing: format!("the table {table}") });
        }
    }
    for table in OWN.map(|table| format!("reconciled_{table}")) {
        if !has_table(reader, &table, &[]).await? {
            return Err(StoreError::Schema { missing: format!("the table {table}") });
        }
    }
    let mut stock = true;
    for (table, expected) in STOCK {
        stock &= has_table(reader, table, expected).await?;
    }
    let (table, expected) = IDENTIFIERS;
    let identifiers = has_table(reader, table, expected).await?;
    Ok(OptionalTables { stock, identifiers })
}

/// Whether there is a table or view of that name; when there is, it must have the columns.
async fn has_table(
    reader: &SqlitePool,
    table: &str,
    expected: &[&str],
) -> Result<bool, StoreError> {
    let columns: Vec<String> = sqlx::query_scalar("SELECT name FROM pragma_table_info(?)")
        .bind(table)
        .fetch_all(reader)
        .await
        .map_err(failed("to describe its tables"))?;
    if columns.is_empty() {
        return Ok(false);
    }
    match expected.iter().find(|name| !columns.iter().any(|c| c.eq_ignore_ascii_case(name))) {
        Some(name) => Err(StoreError::Schema { missing: format!("the column {table}.{name}") }),
        None => Ok(true),
    }
}
