//! Runs of the full reconcile. The unique index on unfinished ones is what keeps them apart.

use serde_json::Value;
use sqlx::Row;
use sqlx::sqlite::SqliteRow;

use crate::domain::Timestamp;
use crate::store::sqlite::{SqliteStore, failed, finish as finish_tx};
use crate::store::{FinishedRun, Lease, Run, Runs, StoreError};

/// Runs one writing statement and says how many rows it changed.
async fn changed(
    store: &SqliteStore,
    operation: &'static str,
    query: sqlx::query::Query<'_, sqlx::Sqlite, sqlx::sqlite::SqliteArguments>,
) -> Result<bool, StoreError> {
    let mut tx = store.begin(operation).await?;
    let result = query.execute(&mut *tx).await.map_err(failed(operation));
    Ok(finish_tx(tx, operation, result).await?.rows_affected() == 1)
}

pub(super) async fn request(store: &SqliteStore, now: Timestamp) -> Result<bool, StoreError> {
    let query = sqlx::query(
        "INSERT INTO reconciled_reconcile_runs (requested_at) VALUES (?) ON CONFLICT DO NOTHING",
    )
    .bind(now.as_millis());
    changed(store, "to ask for a full reconcile", query).await
}

pub(super) async fn take(store: &SqliteStore, lease: &Lease) -> Result<Option<Run>, StoreError> {
    const OPERATION: &str = "to take up a full reconcile";
    // Usually there is none, and then nobody needs to wait for the write lock.
    let free: bool = sqlx::query_scalar(
        "SELECT EXISTS (SELECT 1 FROM reconciled_reconcile_runs
          WHERE finished_at IS NULL
            AND (lease_expires_at IS NULL OR lease_expires_at <= ? OR lease_token = ?))",
    )
    .bind(lease.now.as_millis())
    .bind(lease.token.to_string())
    .fetch_one(&store.reader)
    .await
    .map_err(failed(OPERATION))?;
    if !free {
        return Ok(None);
    }
    let mut tx = store.begin(OPERATION).await?;
    let result = sqlx::query(
        "UPDATE reconciled_reconcile_runs
         SET lease_token = ?1, lease_expires_at = ?3, started_at = coalesce(started_at, ?2)
         WHERE finished_at IS NULL
           AND (lease_expires_at IS NULL OR lease_expires_at <= ?2 OR lease_token = ?1)
         RETURNING *",
    )
    .bind(lease.token.to_string())
    .bind(lease.now.as_millis())
    .bind(lease.expires_at.as_millis())
    .fetch_optional(&mut *tx)
    .await
    .map_err(failed(OPERATION));
    finish_tx(tx, OPERATION, result).await?.as_ref().map(run).transpose()
}

fn time(row: &SqliteRow, column: &str) -> Result<Option<Timestamp>, StoreError> {
    let millis: Option<i64> = row.try_get(column).map_err(failed("to read a full reconcile"))?;
    Ok(millis.map(Timestamp::from_millis))
}

fn json(row: &SqliteRow, column: &'static str) -> Result<Option<Value>, StoreError> {
    let text: Option<String> = row.try_get(column).map_err(failed("to read a full reconcile"))?;
    text.map(|text| {
        serde_json::from_str(&text).map_err(|_| StoreError::Inconsistent {
            table: "reconcile_runs",
            column,
            found: text,
        })
    })
    .transpose()
}

fn run(row: &SqliteRow) -> Result<Run, StoreError> {
    Ok(Run {
        id: row.try_get("id").map_err(failed("to read a full reconcile"))?,
        requested_at: time(row, "requested_at")?.unwrap_or(Timestamp::from_millis(0)),
        started_at: time(row, "started_at")?,
        held_until: time(row, "lease_expires_at")?,
        progress: json(row, "progress")?,
    })
}

pub(super) async fn keep(
    store: &SqliteStore,
    lease: &Lease,
    run: i64,
    progress: &Value,
) -> Result<bool, StoreError> {
    let query = sqlx::query(
        "UPDATE reconciled_reconcile_runs SET progress = ?, lease_expires_at = ?
         WHERE id = ? AND lease_token = ? AND finished_at IS NULL",
    )
    .bind(progress.to_string())
    .bind(lease.expires_at.as_millis())
    .bind(run)
    .bind(lease.token.to_string());
    changed(store, "to renew a full reconcile's lease", query).await
}

pub(super) async fn finish(
    store: &SqliteStore,
    lease: &Lease,
    run: i64,
    report: &Value,
    now: Timestamp,
) -> Result<bool, StoreError> {
    let query = sqlx::query(
        "UPDATE reconciled_reconcile_runs
         SET finished_at = ?, report = ?, progress = NULL, lease_token = NULL,
             lease_expires_at = NULL
         WHERE id = ? AND lease_token = ? AND finished_at IS NULL",
    )
    .bind(now.as_millis())
    .bind(report.to_string())
    .bind(run)
    .bind(lease.token.to_string());
    changed(store, "to end a full reconcile", query).await
}

pub(super) async fn release(store: &SqliteStore, lease: &Lease) -> Result<bool, StoreError> {
    let query = sqlx::query(
        "UPDATE reconciled_reconcile_runs SET lease_token = NULL, lease_expires_at = NULL
         WHERE lease_token = ? AND finished_at IS NULL",
    )
    .bind(lease.token.to_string());
    changed(store, "to give a full reconcile back", query).await
}

pub(super) async fn read(store: &SqliteStore) -> Result<Runs, StoreError> {
    let get = failed("to read full reconciles");
    let unfinished =
        sqlx::query("SELECT * FROM reconciled_reconcile_runs WHERE finished_at IS NULL")
            .fetch_optional(&store.reader)
            .await
            .map_err(get)?;
    let finished = sqlx::query(
        "SELECT *, coalesce(started_at, requested_at) AS began_at
         FROM reconciled_reconcile_runs WHERE finished_at IS NOT NULL
         ORDER BY finished_at DESC, id DESC LIMIT 1",
    )
    .fetch_optional(&store.reader)
    .await
    .map_err(get)?;
    let finished = finished.map(|row| {
        let zero = Timestamp::from_millis(0);
        Ok::<_, StoreError>(FinishedRun {
            id: row.try_get("id").map_err(get)?,
            started_at: time(&row, "began_at")?.unwrap_or(zero),
            finished_at: time(&row, "finished_at")?.unwrap_or(zero),
            report: json(&row, "report")?.unwrap_or_default(),
        })
    });
    Ok(Runs {
        unfinished: unfinished.as_ref().map(run).transpose()?,
        finished: finished.transpose()?,
    })
}
