//! Versions of schedules: see [`ScheduleStore`].

use async_trait::async_trait;
use sqlx::FromRow;
use sqlx::sqlite::SqliteRow;

use super::{SqliteStore, failed, finish};
use crate::domain::Timestamp;
use crate::store::StoreError;
use crate::store::row::column_number;
use crate::store::schedules::{NewVersion, ScheduleStore, Version, readable};

/// Times are Unix milliseconds here.
type VersionRow = crate::store::schedules::VersionRow<i64>;

const PRUNE_VERSIONS: &str = "
    DELETE FROM reconciled_schedules WHERE id IN (
        SELECT s.id FROM reconciled_schedules s
        WHERE s.created_at < ?1
          AND EXISTS (
              SELECT 1 FROM reconciled_schedules n
              WHERE n.rail = s.rail AND n.chain_id = s.chain_id AND n.id > s.id)
          AND (s.adopted_at IS NULL OR EXISTS (
              SELECT 1 FROM reconciled_schedules n
              WHERE n.rail = s.rail AND n.chain_id = s.chain_id AND n.id > s.id
                AND n.adopted_at IS NOT NULL AND n.created_at < ?1))
          AND NOT EXISTS (
              SELECT 1 FROM reconciled_watches w
              WHERE w.schedule_id = s.id AND w.phase <> 'closed')
        LIMIT ?2)";

/// A column may hold anything here, so each row is read by itself.
fn versions(rows: &[SqliteRow]) -> Vec<Version> {
    let rows = rows.iter().filter_map(|row| {
        let read = VersionRow::from_row(row).inspect_err(|error| {
            tracing::warn!(%error, "a version of a schedule cannot be read; it is left out");
        });
        read.ok()
    });
    readable(rows, Timestamp::from_millis)
}

#[async_trait]
impl ScheduleStore for SqliteStore {
    async fn add_version(
        &self,
        version: &NewVersion,
        now: Timestamp,
    ) -> Result<Option<i64>, StoreError> {
        const OPERATION: &str = "to add a schedule";
        let mut tx = self.begin(OPERATION).await?;
        let result = sqlx::query_scalar(
            "INSERT INTO reconciled_schedules
                (rail, chain_id, previous_id, policy, sample_size, window_ms, expected_reads,
                 expected_delay_ms, never_share, created_at, adopted_at, reason)
             VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
             ON CONFLICT (rail, chain_id, previous_id) DO NOTHING
             RETURNING id",
        )
        .bind(version.series.rail.code())
        .bind(column_number(version.series.chain_id.get()))
        .bind(version.previous_id.unwrap_or(0))
        .bind(version.policy.to_string())
        .bind(column_number(version.sample_size))
        .bind(column_number(version.window_ms))
        .bind(version.expected_reads)
        .bind(version.expected_delay_ms)
        .bind(version.never_share)
        .bind(now.as_millis())
        .bind(version.adopted.then(|| now.as_millis()))
        .bind(&version.reason)
        .fetch_optional(&mut *tx)
        .await
        .map_err(failed(OPERATION));
        finish(tx, OPERATION, result).await
    }

    async fn newest_versions(&self) -> Result<Vec<Version>, StoreError> {
        let rows = sqlx::query(
            "SELECT * FROM reconciled_schedules WHERE id IN (
                 SELECT max(id) FROM reconciled_schedules
                 GROUP BY rail, chain_id, adopted_at IS NULL)
             ORDER BY rail, chain_id, adopted_at IS NULL",
        )
        .fetch_all(&self.reader)
        .await
        .map_err(failed("to read the newest schedules"))?;
        Ok(versions(&rows))
    }

    async fn versions(&self, ids: &[i64]) -> Result<Vec<Version>, StoreError> {
        let rows = sqlx::query(
            "SELECT * FROM reconciled_schedules
             WHERE id IN (SELECT value FROM json_each(?)) ORDER BY id",
        )
        .bind(serde_json::json!(ids).to_string())
        .fetch_all(&self.reader)
        .await
        .map_err(failed("to read schedules"))?;
        Ok(versions(&rows))
    }

    async fn prune_schedules(&self, before: Timestamp, limit: u32) -> Result<u64, StoreError> {
        const OPERATION: &str = "to prune schedules";
        let mut tx = self.begin(OPERATION).await?;
        let query = sqlx::query(PRUNE_VERSIONS).bind(before.as_millis()).bind(limit);
        let pruned = query.execute(&mut *tx).await.map_err(failed(OPERATION));
        finish(tx, OPERATION, pruned.map(|done| done.rows_affected())).await
    }
}
