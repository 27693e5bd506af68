//! Reading for people and metrics, and pruning.

use serde_json::{Map, Value};
use sqlx::sqlite::{SqliteConnection, SqliteRow};
use sqlx::{Column, Row, SqlitePool, TypeInfo, ValueRef};

use super::{SqliteStore, failed, finish, watches};
use crate::domain::{FlagKind, PaymentId, Phase, RefundReason, RefundStatus, Timestamp};
use crate::store::row::{coded, unsigned};
use crate::store::{Figures, OptionalTables, STORY_CHECKS_MAX, StoreError, Story, StoryCheck};

const STORY: &str = "to tell a payment's story";

pub(super) async fn payments_of_order(
    reader: &SqlitePool,
    order_id: &str,
) -> Result<Vec<PaymentId>, StoreError> {
    let ids: Vec<String> = sqlx::query_scalar(
        "SELECT id FROM payments WHERE order_id = ? AND typeof(id) = 'text' ORDER BY id",
    )
    .bind(order_id)
    .fetch_all(reader)
    .await
    .map_err(failed("to read the payments of an order"))?;
    Ok(ids.into_iter().map(PaymentId::new).collect())
}

/// The payment's columns, without the credential: whoever holds that can still submit it.
const PAYMENT: &str = "
    SELECT id, order_id, rail, method, chain_id, token, payer, pay_to, amount, nonce, valid_after,
        valid_before, tx_hash, status, created_at, broadcast_at, settled_at, updated_at
    FROM payments WHERE id = ?";

const ORDER: &str = "
    SELECT o.id, o.kind, o.status, o.paid_by, o.delivered_at, o.updated_at
    FROM orders o JOIN payments p ON p.order_id = o.id WHERE p.id = ?";

const SIBLINGS: &str = "
    SELECT s.id, s.status
    FROM payments p JOIN payments s ON s.order_id = p.order_id AND s.id <> p.id
    WHERE p.id = ? ORDER BY s.id";

const RESERVATIONS: &str = "
    SELECT r.id, r.sku, r.quantity, r.status
    FROM payments p JOIN stock_reservations r ON r.order_id = p.order_id
    WHERE p.id = ? ORDER BY r.id";

const IDENTIFIERS: &str = "
    SELECT id, status, updated_at FROM payment_identifiers WHERE payment_id = ? ORDER BY id";

const RESOLUTIONS: &str = "SELECT * FROM reconciled_resolutions WHERE payment_id = ? ORDER BY id";

const REFUND: &str = "SELECT * FROM reconciled_refunds_owed WHERE payment_id = ?";

const FLAGS: &str = "SELECT * FROM reconciled_flags WHERE payment_id = ? ORDER BY id";

const EVENTS: &str = "SELECT * FROM reconciled_events WHERE payment_id = ? ORDER BY id";

pub(super) async fn story(
    reader: &SqlitePool,
    tables: OptionalTables,
    id: &PaymentId,
) -> Result<Option<Story>, StoreError> {
    // One snapshot for the whole story; reading never blocks a writer.
    let mut tx = reader.begin().await.map_err(failed(STORY))?;
    let result = story_in(&mut tx, tables, id.as_str()).await;
    finish(tx, STORY, result).await
}

async fn story_in(
    conn: &mut SqliteConnection,
    tables: OptionalTables,
    id: &str,
) -> Result<Option<Story>, StoreError> {
    let Some(payment) = objects(conn, PAYMENT, id).await?.into_iter().next() else {
        return Ok(None);
    };
    let watch = sqlx::query("SELECT * FROM reconciled_watches WHERE payment_id = ?")
        .bind(id)
        .fetch_optional(&mut *conn)
        .await
        .map_err(failed(STORY))?;
    Ok(Some(Story {
        payment,
        order: objects(conn, ORDER, id).await?.into_iter().next(),
        siblings: objects(conn, SIBLINGS, id).await?,
        reservations: match tables.stock {
            true => objects(conn, RESERVATIONS, id).await?,
            false => Vec::new(),
        },
        identifiers: match tables.identifiers {
            true => objects(conn, IDENTIFIERS, id).await?,
            false => Vec::new(),
        },
        watch: watch.as_ref().map(watches::watch).transpose()?,
        checks: checks(conn, id).await?,
        resolutions: objects(conn, RESOLUTIONS, id).await?,
        refund: objects(conn, REFUND, id).await?.into_iter().next(),
        flags: objects(conn, FLAGS, id).await?,
        events: objects(conn, EVENTS, id).await?,
    }))
}

async fn checks(conn: &mut SqliteConnection, id: &str) -> Result<Vec<StoryCheck>, StoreError> {
    let rows: Vec<(i64, String, Option<i64>, Option<String>)> = sqlx::query_as(
        "SELECT checked_at, verdict, block_number, detail FROM (
            SELECT * FROM reconciled_checks WHERE payment_id = ? ORDER BY id DESC LIMIT ?)
         ORDER BY id",
    )
    .bind(id)
    .bind(STORY_CHECKS_MAX)
    .fetch_all(conn)
    .await
    .map_err(failed(STORY))?;
    rows.into_iter()
        .map(|(at, verdict, block, detail)| {
            Ok(StoryCheck {
                at: Timestamp::from_millis(at),
                verdict,
                block: block.map(|n| unsigned("checks", "block_number", n)).transpose()?,
                detail,
            })
        })
        .collect()
}

async fn objects(
    conn: &mut SqliteConnection,
    statement: &'static str,
    id: &str,
) -> Result<Vec<Value>, StoreError> {
    let rows = sqlx::query(statement).bind(id).fetch_all(conn).await.map_err(failed(STORY))?;
    rows.iter().map(|row| object(row).map_err(failed(STORY))).collect()
}

/// A row as people read it: no nulls, times in words, JSON columns as JSON.
fn object(row: &SqliteRow) -> Result<Value, sqlx::Error> {
    let mut object = Map::new();
    for column in row.columns() {
        let (index, name) = (column.ordinal(), column.name());
        let raw = row.try_get_raw(index)?;
        if raw.is_null() {
            continue;
        }
        let kind = raw.type_info().name().to_owned();
        let value = match kind.as_str() {
            "INTEGER" => {
                let number: i64 = row.try_get_unchecked(index)?;
                if name.ends_with("_at") {
                    Value::from(Timestamp::from_millis(number).to_string())
                } else {
                    Value::from(number)
                }
            }
            "REAL" => Value::from(row.try_get_unchecked::<f64, _>(index)?),
            _ => {
                let bytes: Vec<u8> = row.try_get_unchecked(index)?;
                let text = String::from_utf8_lossy(&bytes).into_owned();
                match name {
                    "evidence" | "detail" => {
                        serde_json::from_str(&text).unwrap_or(Value::String(text))
                    }
                    _ => Value::String(text),
                }
            }
        };
        object.insert(name.to_owned(), value);
    }
    Ok(Value::Object(object))
}

pub(super) async fn figures(reader: &SqlitePool, now: Timestamp) -> Result<Figures, StoreError> {
    const OPERATION: &str = "to count for metrics";
    let mut tx = reader.begin().await.map_err(failed(OPERATION))?;
    let result = figures_in(&mut tx, now).await;
    finish(tx, OPERATION, result).await
}

async fn figures_in(conn: &mut SqliteConnection, now: Timestamp) -> Result<Figures, StoreError> {
    let get = failed("to count for metrics");
    let mut figures = Figures::default();
    let phases: Vec<(String, i64, i64)> = sqlx::query_as(
        "SELECT phase, count(*), min(opened_at) FROM reconciled_watches
         WHERE phase <> 'closed' GROUP BY phase ORDER BY phase",
    )
    .fetch_all(&mut *conn)
    .await
    .map_err(get)?;
    for (phase, count, oldest) in phases {
        let phase = coded("watches", "phase", &phase, Phase::from_code)?;
        figures.open.push((phase, unsigned("watches", "count", count)?));
        figures.oldest.push((phase, Timestamp::from_millis(oldest)));
    }
    let refunds: Vec<(String, String, i64)> = sqlx::query_as(
        "SELECT reason, status, count(*) FROM reconciled_refunds_owed
         GROUP BY reason, status ORDER BY reason, status",
    )
    .fetch_all(&mut *conn)
    .await
    .map_err(get)?;
    for (reason, status, count) in refunds {
        figures.refunds.push((
            coded("refunds_owed", "reason", &reason, RefundReason::from_code)?,
            coded("refunds_owed", "status", &status, RefundStatus::from_code)?,
            unsigned("refunds_owed", "count", count)?,
        ));
    }
    let flags: Vec<(String, i64)> = sqlx::query_as(
        "SELECT kind, count(*) FROM reconciled_flags
         WHERE closed_at IS NULL GROUP BY kind ORDER BY kind",
    )
    .fetch_all(&mut *conn)
    .await
    .map_err(get)?;
    for (kind, count) in flags {
        let kind = coded("flags", "kind", &kind, FlagKind::from_code)?;
        figures.flags.push((kind, unsigned("flags", "count", count)?));
    }
    let overdue: i64 = sqlx::query_scalar(
        "SELECT count(*) FROM reconciled_watches WHERE phase <> 'closed' AND next_check_at < ?",
    )
    .bind(now.as_millis())
    .fetch_one(conn)
    .await
    .map_err(get)?;
    figures.overdue = unsigned("watches", "count", overdue)?;
    Ok(figures)
}

pub(super) async fn prune(
    store: &SqliteStore,
    before: Timestamp,
    limit: u32,
) -> Result<u64, StoreError> {
    const OPERATION: &str = "to prune checks, events and runs";
    const CHECKS: &str = "
        DELETE FROM reconciled_checks WHERE id IN (
            SELECT id FROM reconciled_checks WHERE checked_at < ? ORDER BY checked_at LIMIT ?)";
    const EVENTS: &str = "
        DELETE FROM reconciled_events WHERE id IN (
            SELECT id FROM reconciled_events WHERE acknowledged_at < ?
            ORDER BY acknowledged_at LIMIT ?)";
    // The newest says what the books are like, however long ago that was.
    const RUNS: &str = "
        DELETE FROM reconciled_reconcile_runs WHERE id IN (
            SELECT id FROM reconciled_reconcile_runs
            WHERE finished_at < ?
              AND id < (SELECT max(id) FROM reconciled_reconcile_runs
                        WHERE finished_at IS NOT NULL)
            ORDER BY finished_at LIMIT ?)";
    let mut tx = store.begin(OPERATION).await?;
    let result = async {
        let mut most = 0;
        for statement in [CHECKS, EVENTS, RUNS] {
            let query = sqlx::query(statement).bind(before.as_millis()).bind(limit);
            let done = query.execute(&mut *tx).await.map_err(failed(OPERATION))?;
            most = most.max(done.rows_affected());
        }
        Ok(most)
    }
    .await;
    finish(tx, OPERATION, result).await
}
