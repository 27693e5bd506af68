//! Versions of schedules: see [`ScheduleStore`].

use async_trait::async_trait;
use sqlx::types::time::OffsetDateTime;

use super::PostgresStore;
use super::rows::datetime;
use crate::domain::Timestamp;
use crate::store::StoreError;
use crate::store::row::column_number;
use crate::store::schedules::{NewVersion, ScheduleStore, Version, readable};

type VersionRow = crate::store::schedules::VersionRow<OffsetDateTime>;

#[async_trait]
impl ScheduleStore for PostgresStore {
    async fn add_version(
        &self,
        version: &NewVersion,
        now: Timestamp,
    ) -> Result<Option<i64>, StoreError> {
        let now = datetime(now);
        sqlx::query_scalar!(
            "INSERT INTO reconciled.schedules
                    (rail, chain_id, previous_id, policy, sample_size, window_ms, expected_reads,
                     expected_delay_ms, never_share, created_at, adopted_at, reason)
             VALUES ($1, $2, $3, $4::text::jsonb, $5, $6, $7, $8, $9, $10, $11, $12)
             ON CONFLICT (rail, chain_id, previous_id) DO NOTHING
             RETURNING id",
            version.series.rail.code(),
            column_number(version.series.chain_id.get()),
            version.previous_id.unwrap_or(0),
            version.policy.to_string(),
            column_number(version.sample_size),
            column_number(version.window_ms),
            version.expected_reads,
            version.expected_delay_ms,
            version.never_share,
            now,
            version.adopted.then_some(now),
            version.reason,
        )
        .fetch_optional(&self.pool)
        .await
        .map_err(|source| StoreError::from_sqlx("to add a schedule", source))
    }

    async fn newest_versions(&self) -> Result<Vec<Version>, StoreError> {
        let rows = sqlx::query_as!(
            VersionRow,
            r#"SELECT DISTINCT ON (rail, chain_id, adopted_at IS NULL)
                      id, rail, chain_id, previous_id, policy::text AS "policy!", sample_size,
                      window_ms, expected_reads, expected_delay_ms, never_share, created_at,
                      adopted_at, reason
                 FROM reconciled.schedules
                ORDER BY rail, chain_id, adopted_at IS NULL, id DESC"#,
        )
        .fetch_all(&self.pool)
        .await
        .map_err(|source| StoreError::from_sqlx("to read the newest schedules", source))?;
        Ok(readable(rows, Timestamp::from))
    }

    async fn versions(&self, ids: &[i64]) -> Result<Vec<Version>, StoreError> {
        let rows = sqlx::query_as!(
            VersionRow,
            r#"SELECT id, rail, chain_id, previous_id, policy::text AS "policy!", sample_size,
                      window_ms, expected_reads, expected_delay_ms, never_share, created_at,
                      adopted_at, reason
                 FROM reconciled.schedules WHERE id = ANY($1) ORDER BY id"#,
            ids,
        )
        .fetch_all(&self.pool)
        .await
        .map_err(|source| StoreError::from_sqlx("to read schedules", source))?;
        Ok(readable(rows, Timestamp::from))
    }

    async fn prune_schedules(&self, before: Timestamp, limit: u32) -> Result<u64, StoreError> {
        let pruned = sqlx::query!(
            "DELETE FROM reconciled.schedules
              WHERE id = ANY (ARRAY(
                  SELECT s.id FROM reconciled.schedules s
                   WHERE s.created_at < $1
                     AND EXISTS (
                         SELECT FROM reconciled.schedules n
                          WHERE n.rail = s.rail AND n.chain_id = s.chain_id AND n.id > s.id)
                     AND (s.adopted_at IS NULL OR EXISTS (
                         SELECT FROM reconciled.schedules n
                          WHERE n.rail = s.rail AND n.chain_id = s.chain_id AND n.id > s.id
                            AND n.adopted_at IS NOT NULL AND n.created_at < $1))
                     AND NOT EXISTS (
                         SELECT FROM reconciled.watches w
                          WHERE w.schedule_id = s.id AND w.phase <> 'closed')
                   LIMIT $2))",
            datetime(before),
            i64::from(limit),
        )
        .execute(&self.pool)
        .await
        .map_err(|source| StoreError::from_sqlx("to prune schedules", source))?;
        Ok(pruned.rows_affected())
    }
}
