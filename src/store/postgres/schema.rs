//! Whether the tables and columns this daemon reads and writes are there; views count.

use std::collections::BTreeSet;

use sqlx::PgPool;

use crate::store::contract::{IDENTIFIERS, OWN, REQUIRED, STOCK};
use crate::store::{OptionalTables, StoreError};

/// Checks that every required table and column is there, and says which optional tables are.
pub(super) async fn verify(pool: &PgPool) -> Result<OptionalTables, StoreError> {
    let optional = || STOCK.iter().chain([&IDENTIFIERS]);
    let (tables, columns): (Vec<String>, Vec<String>) = REQUIRED
        .iter()
        .chain(optional())
        .flat_map(|(table, columns)| {
            columns.iter().map(|column| ((*table).to_owned(), (*column).to_owned()))
        })
        .chain(OWN.iter().map(|table| (format!("reconciled.{table}"), String::new())))
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
    let is_optional = |table: &str| optional().any(|(name, _)| *name == table);
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
