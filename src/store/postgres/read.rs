//! What people and metrics ask: stories, figures, and the pruning of old checks.

use serde_json::Value;
use sqlx::postgres::PgArguments;
use sqlx::query::QueryScalar;
use sqlx::types::time::OffsetDateTime;
use sqlx::{PgConnection, PgPool, Postgres};

use super::rows::{WatchRow, datetime};
use super::{SNAPSHOT, finish};
use crate::domain::{FlagKind, PaymentId, Phase, RefundReason, RefundStatus, Timestamp, Watch};
use crate::store::row::{coded, unsigned};
use crate::store::{Figures, OptionalTables, STORY_CHECKS_MAX, StoreError, Story, StoryCheck};

const STORY: &str = "to read what is known about a payment";
const FIGURES: &str = "to count for metrics";

/// The payments of an order: see [`crate::store::Store::payments_of_order`].
pub(super) async fn payments_of_order(
    pool: &PgPool,
    order_id: &str,
) -> Result<Vec<PaymentId>, StoreError> {
    let ids = sqlx::query_scalar!(
        r#"SELECT id AS "id!" FROM payments WHERE order_id = $1 ORDER BY id"#,
        order_id,
    )
    .fetch_all(pool)
    .await
    .map_err(|source| StoreError::from_sqlx("to read the payments of an order", source))?;
    Ok(ids.into_iter().map(PaymentId::new).collect())
}

/// The rows of a query whose only column is one row as JSON, null columns left out. Amounts are selected
/// as text: a JSON number would round them.
async fn rows(
    connection: &mut PgConnection,
    query: QueryScalar<'_, Postgres, String, PgArguments>,
) -> Result<Vec<Value>, StoreError> {
    let refused = |source| StoreError::from_sqlx(STORY, source);
    let rows = query.fetch_all(connection).await.map_err(refused)?;
    rows.iter().map(|row| parsed(row)).collect()
}

fn parsed(row: &str) -> Result<Value, StoreError> {
    serde_json::from_str(row)
        .map_err(|error| StoreError::from_sqlx(STORY, sqlx::Error::Decode(error.into())))
}

/// The same, of a query written in place.
macro_rules! rows {
    ($connection:expr, $sql:literal $(, $arg:expr)* $(,)?) => {
        rows($connection, sqlx::query_scalar!($sql $(, $arg)*)).await?
    };
}

/// Everything known about one payment: see [`crate::store::Store::story`].
pub(super) async fn story(
    pool: &PgPool,
    optional: OptionalTables,
    id: &PaymentId,
) -> Result<Option<Story>, StoreError> {
    // One snapshot for the whole story.
    let refused = |source| StoreError::from_sqlx(STORY, source);
    let mut transaction = pool.begin_with(SNAPSHOT).await.map_err(refused)?;
    let story = story_in(&mut transaction, optional, id.as_str()).await;
    finish(transaction, story, refused).await
}

async fn story_in(
    connection: &mut PgConnection,
    optional: OptionalTables,
    id: &str,
) -> Result<Option<Story>, StoreError> {
    let refused = |source| StoreError::from_sqlx(STORY, source);
    // Without the credential: whoever holds that can still submit it.
    let payment = sqlx::query!(
        r#"SELECT jsonb_strip_nulls(to_jsonb(p) - 'credential' || jsonb_build_object(
                      'amount', amount::text,
                      'valid_after', valid_after::text,
                      'valid_before', valid_before::text))::text AS "row!",
                  order_id
             FROM payments p WHERE id = $1"#,
        id,
    )
    .fetch_optional(&mut *connection)
    .await
    .map_err(refused)?;
    let Some(payment) = payment else { return Ok(None) };
    let order_id = payment.order_id.unwrap_or_default();
    let mut order = rows!(
        connection,
        r#"SELECT json_strip_nulls(row_to_json(o))::text AS "row!"
                 FROM orders o WHERE id = $1"#,
        order_id
    );
    let siblings = rows!(
        connection,
        r#"SELECT json_build_object('id', id, 'status', status)::text AS "row!"
             FROM payments WHERE order_id = $1 AND id <> $2 ORDER BY id"#,
        order_id,
        id
    );
    let reservations = match optional.stock {
        true => rows!(
            connection,
            r#"SELECT json_strip_nulls(row_to_json(r))::text AS "row!"
                 FROM stock_reservations r WHERE order_id = $1 ORDER BY id"#,
            order_id
        ),
        false => Vec::new(),
    };
    let identifiers = match optional.identifiers {
        true => rows!(
            connection,
            r#"SELECT jsonb_strip_nulls(to_jsonb(i) - 'response')::text AS "row!"
                 FROM payment_identifiers i WHERE payment_id = $1 ORDER BY id"#,
            id
        ),
        false => Vec::new(),
    };
    let resolutions = rows!(
        connection,
        r#"SELECT json_strip_nulls(row_to_json(r))::text AS "row!"
                     FROM reconciled.resolutions r WHERE payment_id = $1 ORDER BY id"#,
        id
    );
    let mut refund = rows!(
        connection,
        r#"SELECT jsonb_strip_nulls(to_jsonb(r)
                              || jsonb_build_object('amount', amount::text))::text AS "row!"
                     FROM reconciled.refunds_owed r WHERE payment_id = $1"#,
        id
    );
    let flags = rows!(
        connection,
        r#"SELECT json_strip_nulls(row_to_json(f))::text AS "row!"
                     FROM reconciled.flags f WHERE payment_id = $1 ORDER BY id"#,
        id
    );
    let events = rows!(
        connection,
        r#"SELECT json_strip_nulls(row_to_json(e))::text AS "row!"
                     FROM reconciled.events e WHERE payment_id = $1 ORDER BY id"#,
        id
    );
    Ok(Some(Story {
        payment: parsed(&payment.row)?,
        order: order.pop(),
        siblings,
        reservations,
        identifiers,
        watch: watch(connection, id).await?,
        checks: checks(connection, id).await?,
        resolutions,
        refund: refund.pop(),
        flags,
        events,
    }))
}

async fn watch(connection: &mut PgConnection, id: &str) -> Result<Option<Watch>, StoreError> {
    sqlx::query_as!(
        WatchRow,
        "SELECT payment_id, phase, opened_at, next_check_at, checks_done,
                consecutive_inconclusive, schedule_id, last_verdict
           FROM reconciled.watches WHERE payment_id = $1",
        id,
    )
    .fetch_optional(&mut *connection)
    .await
    .map_err(|source| StoreError::from_sqlx(STORY, source))?
    .map(Watch::try_from)
    .transpose()
}

/// The newest checks, oldest first.
async fn checks(connection: &mut PgConnection, id: &str) -> Result<Vec<StoryCheck>, StoreError> {
    let rows = sqlx::query!(
        "SELECT checked_at, verdict, block_number, detail
           FROM reconciled.checks WHERE payment_id = $1
          ORDER BY id DESC LIMIT $2",
        id,
        STORY_CHECKS_MAX,
    )
    .fetch_all(&mut *connection)
    .await
    .map_err(|source| StoreError::from_sqlx(STORY, source))?;
    rows.into_iter()
        .rev()
        .map(|row| {
            let block = row.block_number;
            Ok(StoryCheck {
                at: row.checked_at.into(),
                verdict: row.verdict,
                block: block
                    .map(|n| unsigned("reconciled.checks", "block_number", n))
                    .transpose()?,
                detail: row.detail,
            })
        })
        .collect()
}

/// Figures for metrics: see [`crate::store::Store::figures`].
pub(super) async fn figures(pool: &PgPool, now: Timestamp) -> Result<Figures, StoreError> {
    let refused = |source| StoreError::from_sqlx(FIGURES, source);
    let mut transaction = pool.begin_with(SNAPSHOT).await.map_err(refused)?;
    let figures = figures_in(&mut transaction, now).await;
    finish(transaction, figures, refused).await
}

async fn figures_in(connection: &mut PgConnection, now: Timestamp) -> Result<Figures, StoreError> {
    let refused = |source| StoreError::from_sqlx(FIGURES, source);
    let mut figures = Figures::default();
    let open = sqlx::query!(
        r#"SELECT phase, count(*) AS "count!", min(opened_at) AS "oldest!",
                  count(*) FILTER (WHERE next_check_at < $1) AS "overdue!"
             FROM reconciled.watches WHERE phase <> 'closed' GROUP BY phase ORDER BY phase"#,
        datetime(now),
    )
    .fetch_all(&mut *connection)
    .await
    .map_err(refused)?;
    for row in open {
        let phase = coded("reconciled.watches", "phase", &row.phase, Phase::from_code)?;
        let oldest: OffsetDateTime = row.oldest;
        figures.open.push((phase, count(row.count)));
        figures.oldest.push((phase, oldest.into()));
        figures.overdue += count(row.overdue);
    }
    let refunds = sqlx::query!(
        r#"SELECT reason, status, count(*) AS "count!"
             FROM reconciled.refunds_owed GROUP BY reason, status ORDER BY reason, status"#,
    )
    .fetch_all(&mut *connection)
    .await
    .map_err(refused)?;
    for row in refunds {
        const TABLE: &str = "reconciled.refunds_owed";
        let reason = coded(TABLE, "reason", &row.reason, RefundReason::from_code)?;
        let status = coded(TABLE, "status", &row.status, RefundStatus::from_code)?;
        figures.refunds.push((reason, status, count(row.count)));
    }
    let flags = sqlx::query!(
        r#"SELECT kind, count(*) AS "count!"
             FROM reconciled.flags WHERE closed_at IS NULL GROUP BY kind ORDER BY kind"#,
    )
    .fetch_all(&mut *connection)
    .await
    .map_err(refused)?;
    for row in flags {
        let kind = coded("reconciled.flags", "kind", &row.kind, FlagKind::from_code)?;
        figures.flags.push((kind, count(row.count)));
    }
    Ok(figures)
}

fn count(n: i64) -> u64 {
    u64::try_from(n).unwrap_or(0)
}

/// Deletes old checks, acknowledged events and old runs: see [`crate::store::Store::prune`].
pub(super) async fn prune(pool: &PgPool, before: Timestamp, limit: u32) -> Result<u64, StoreError> {
    let (before, limit) = (datetime(before), i64::from(limit));
    let checks = sqlx::query!(
        "DELETE FROM reconciled.checks
          WHERE id IN (
              SELECT id FROM reconciled.checks
               WHERE checked_at < $1 ORDER BY checked_at LIMIT $2
                 FOR UPDATE SKIP LOCKED)",
        before,
        limit,
    )
    .execute(pool)
    .await
    .map_err(|source| StoreError::from_sqlx("to prune checks", source))?;
    let events = sqlx::query!(
        "DELETE FROM reconciled.events
          WHERE id IN (
              SELECT id FROM reconciled.events
               WHERE acknowledged_at < $1 ORDER BY acknowledged_at LIMIT $2
                 FOR UPDATE SKIP LOCKED)",
        before,
        limit,
    )
    .execute(pool)
    .await
    .map_err(|source| StoreError::from_sqlx("to prune events", source))?;
    // The newest says what the books are like, however long ago that was.
    let runs = sqlx::query!(
        "DELETE FROM reconciled.reconcile_runs
          WHERE id IN (
              SELECT id FROM reconciled.reconcile_runs
               WHERE finished_at < $1
                 AND id < (SELECT max(id) FROM reconciled.reconcile_runs
                            WHERE finished_at IS NOT NULL)
               ORDER BY finished_at LIMIT $2
                 FOR UPDATE SKIP LOCKED)",
        before,
        limit,
    )
    .execute(pool)
    .await
    .map_err(|source| StoreError::from_sqlx("to prune full reconciles", source))?;
    let deleted = [checks.rows_affected(), events.rows_affected(), runs.rows_affected()];
    Ok(deleted.into_iter().max().unwrap_or(0))
}
