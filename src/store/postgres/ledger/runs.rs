//! Runs of the full reconcile. The unique index on unfinished ones is what keeps them apart.

use serde_json::Value;
use sqlx::PgPool;

use crate::domain::Timestamp;
use crate::store::postgres::rows::datetime;
use crate::store::{FinishedRun, Lease, Run, Runs, StoreError};

pub(super) async fn request(pool: &PgPool, now: Timestamp) -> Result<bool, StoreError> {
    let done = sqlx::query!(
        "INSERT INTO reconciled.reconcile_runs (requested_at) VALUES ($1) ON CONFLICT DO NOTHING",
        datetime(now),
    )
    .execute(pool)
    .await
    .map_err(|source| StoreError::from_sqlx("to ask for a full reconcile", source))?;
    Ok(done.rows_affected() == 1)
}

pub(super) async fn take(pool: &PgPool, lease: &Lease) -> Result<Option<Run>, StoreError> {
    let row = sqlx::query!(
        r#"UPDATE reconciled.reconcile_runs
              SET lease_token = $1, lease_expires_at = $3, started_at = coalesce(started_at, $2)
            WHERE finished_at IS NULL
              AND (lease_expires_at IS NULL OR lease_expires_at <= $2 OR lease_token = $1)
        RETURNING id, requested_at, started_at, lease_expires_at, progress::text AS progress"#,
        lease.token,
        datetime(lease.now),
        datetime(lease.expires_at),
    )
    .fetch_optional(pool)
    .await
    .map_err(|source| StoreError::from_sqlx("to take up a full reconcile", source))?;
    row.map(|row| {
        Ok(Run {
            id: row.id,
            requested_at: row.requested_at.into(),
            started_at: row.started_at.map(Into::into),
            held_until: row.lease_expires_at.map(Into::into),
            progress: row.progress.map(|text| json("progress", &text)).transpose()?,
        })
    })
    .transpose()
}

fn json(column: &'static str, text: &str) -> Result<Value, StoreError> {
    serde_json::from_str(text).map_err(|_| StoreError::Inconsistent {
        table: "reconciled.reconcile_runs",
        column,
        found: text.to_owned(),
    })
}

pub(super) async fn keep(
    pool: &PgPool,
    lease: &Lease,
    run: i64,
    progress: &Value,
) -> Result<bool, StoreError> {
    let done = sqlx::query!(
        "UPDATE reconciled.reconcile_runs SET progress = $3::text::jsonb, lease_expires_at = $4
          WHERE id = $1 AND lease_token = $2 AND finished_at IS NULL",
        run,
        lease.token,
        progress.to_string(),
        datetime(lease.expires_at),
    )
    .execute(pool)
    .await
    .map_err(|source| StoreError::from_sqlx("to renew a full reconcile's lease", source))?;
    Ok(done.rows_affected() == 1)
}

pub(super) async fn finish(
    pool: &PgPool,
    lease: &Lease,
    run: i64,
    report: &Value,
    now: Timestamp,
) -> Result<bool, StoreError> {
    let done = sqlx::query!(
        "UPDATE reconciled.reconcile_runs
            SET finished_at = $4, report = $3::text::jsonb, progress = NULL, lease_token = NULL,
                lease_expires_at = NULL
          WHERE id = $1 AND lease_token = $2 AND finished_at IS NULL",
        run,
        lease.token,
        report.to_string(),
        datetime(now),
    )
    .execute(pool)
    .await
    .map_err(|source| StoreError::from_sqlx("to end a full reconcile", source))?;
    Ok(done.rows_affected() == 1)
}

pub(super) async fn release(pool: &PgPool, lease: &Lease) -> Result<bool, StoreError> {
    let done = sqlx::query!(
        "UPDATE reconciled.reconcile_runs SET lease_token = NULL, lease_expires_at = NULL
          WHERE lease_token = $1 AND finished_at IS NULL",
        lease.token,
    )
    .execute(pool)
    .await
    .map_err(|source| StoreError::from_sqlx("to give a full reconcile back", source))?;
    Ok(done.rows_affected() == 1)
}

pub(super) async fn read(pool: &PgPool) -> Result<Runs, StoreError> {
    let refused = |source| StoreError::from_sqlx("to read full reconciles", source);
    let unfinished = sqlx::query!(
        "SELECT id, requested_at, started_at, lease_expires_at, progress::text AS progress
           FROM reconciled.reconcile_runs WHERE finished_at IS NULL",
    )
    .fetch_optional(pool)
    .await
    .map_err(refused)?;
    let finished = sqlx::query!(
        r#"SELECT id, coalesce(started_at, requested_at) AS "started_at!",
                  finished_at AS "finished_at!", report::text AS "report!"
             FROM reconciled.reconcile_runs
            WHERE finished_at IS NOT NULL
            ORDER BY finished_at DESC, id DESC LIMIT 1"#,
    )
    .fetch_optional(pool)
    .await
    .map_err(refused)?;
    Ok(Runs {
        unfinished: unfinished
            .map(|row| {
                Ok::<_, StoreError>(Run {
                    id: row.id,
                    requested_at: row.requested_at.into(),
                    started_at: row.started_at.map(Into::into),
                    held_until: row.lease_expires_at.map(Into::into),
                    progress: row.progress.map(|text| json("progress", &text)).transpose()?,
                })
            })
            .transpose()?,
        finished: finished
            .map(|row| {
                Ok::<_, StoreError>(FinishedRun {
                    id: row.id,
                    started_at: row.started_at.into(),
                    finished_at: row.finished_at.into(),
                    report: json("report", &row.report)?,
                })
            })
            .transpose()?,
    })
}
