//! Samples of settle latency: see [`SampleStore`].

use std::time::Duration;

use async_trait::async_trait;
use sqlx::SqliteConnection;

use super::{SqliteStore, failed, finish, id_list, load};
use crate::domain::{ChainId, PaymentId, Timestamp};
use crate::store::StoreError;
use crate::store::row::column_number;
use crate::store::samples::{
    BinGrid, FoundInBin, FoundPlace, FoundRow, NeverRow, NeverSettled, ObservedChecks, ObservedRow,
    OpenAges, OpenRow, SampleBin, SampleRow, SampleStore, SettledStretch, SkewRow, Watermark,
    epoch_of, stretch,
};
use crate::store::schedules::Series;

/// The next of each kind by their indexes alone; only then is it asked which of them count. A payment of
/// ours has a place among the gateway's too, where it does not. A `settled_at` that is not a whole number
/// has no place in the order, and is passed over (I11). SQLite seeks by a row value only where nothing is
/// computed, so a bound of the first column stands beside it all the same.
const SETTLED_AFTER: &str = "
    SELECT at, id, block_time, counts FROM (
        SELECT o.at, o.id, t.block_time,
               EXISTS (SELECT 1 FROM payments p WHERE p.id = o.id AND p.status = 'settled')
               AND NOT EXISTS (
                   SELECT 1 FROM reconciled_resolutions u
                   WHERE u.payment_id = o.id AND u.id > o.resolution
                     AND u.outcome = 'reopened' AND u.resolved_at < o.at + ?5)
               AND NOT EXISTS (
                   SELECT 1 FROM reconciled_resolutions e
                   WHERE e.payment_id = o.id AND e.id < o.resolution AND e.settles
                     AND NOT EXISTS (
                         SELECT 1 FROM reconciled_resolutions u
                         WHERE u.payment_id = o.id AND u.id > e.id
                           AND u.outcome = 'reopened' AND u.resolved_at < e.resolved_at + ?5))
               AND NOT EXISTS (
                   SELECT 1 FROM reconciled_resolutions u
                   WHERE u.payment_id = o.id AND u.id < o.resolution AND u.outcome = 'reopened'
                     AND NOT EXISTS (
                         SELECT 1 FROM reconciled_resolutions e
                         WHERE e.payment_id = o.id AND e.id < u.id AND e.settles)) AS counts
        FROM (
            SELECT r.id AS resolution, r.resolved_at AS at, r.payment_id AS id
            FROM reconciled_resolutions r
            WHERE r.settles AND r.resolved_at >= ?1
              AND (r.resolved_at, r.payment_id) > (?1, ?2) AND r.resolved_at <= ?3
            ORDER BY r.resolved_at, r.payment_id
            LIMIT ?4) AS o
            LEFT JOIN reconciled_transfers t ON t.payment_id = o.id AND t.orphaned_at IS NULL
        UNION ALL
        SELECT h.at, h.id, t.block_time,
               NOT EXISTS (
                   SELECT 1 FROM reconciled_resolutions r
                   WHERE r.payment_id = h.id AND r.settles) AS counts
        FROM (
            SELECT p.settled_at AS at, p.id
            FROM payments p
            WHERE p.status = 'settled' AND p.settled_at >= ?1
              AND (p.settled_at, p.id) > (?1, ?2) AND p.settled_at <= ?3
              AND typeof(p.settled_at) = 'integer' AND typeof(p.id) = 'text'
            ORDER BY p.settled_at, p.id
            LIMIT ?4) AS h
            LEFT JOIN reconciled_transfers t ON t.payment_id = h.id AND t.orphaned_at IS NULL)
    ORDER BY at, id, counts DESC
    LIMIT ?4";

const OPEN_AGES: &str = "
    SELECT p.rail, g.chain_id,
           min(g.bins, max(0, (?2 - p.started_at) / g.step_ms)) AS bin, count(*) AS payments
    FROM (SELECT rail, chain_id, coalesce(broadcast_at, created_at) AS started_at
          FROM payments WHERE status IN ('settling', 'unknown', 'settle_failed')) AS p
        JOIN (SELECT value ->> 0 AS chain_id, value ->> 1 AS step_ms, value ->> 2 AS bins
              FROM json_each(?1)) AS g ON p.chain_id = g.chain_id
    WHERE p.rail IN ('x402', 'mpp') AND p.started_at >= ?3 AND typeof(p.started_at) = 'integer'
    GROUP BY 1, 2, 3
    ORDER BY 1, 2, 3";

const NEVER_SETTLED: &str = "
    SELECT rail, chain_id, failed_at / 3600000 AS epoch, count(*) AS payments
    FROM (SELECT p.rail, p.chain_id, max(r.resolved_at) AS failed_at
          FROM reconciled_resolutions r CROSS JOIN payments p ON p.id = r.payment_id
          WHERE r.resolved_at >= ?1 AND r.outcome = 'failed' AND +p.status = 'failed'
          GROUP BY p.id)
    WHERE rail IN ('x402', 'mpp') AND typeof(chain_id) = 'integer' AND chain_id > 0
    GROUP BY 1, 2, 3
    ORDER BY 1, 2, 3";

const OBSERVED: &str = "
    SELECT rail, chain_id, schedule_id, count(*) AS payments, avg(checks) AS reads,
           avg(detection_delay_ms) AS delay_mean, max(detection_delay_ms) AS delay_max
    FROM (SELECT p.rail, p.chain_id, w.schedule_id, r.detection_delay_ms,
                 (SELECT count(*) FROM reconciled_checks c
                  WHERE c.payment_id = r.payment_id AND c.checked_at <= r.resolved_at) AS checks
          FROM reconciled_resolutions r
              CROSS JOIN payments p ON p.id = r.payment_id
              CROSS JOIN reconciled_watches w ON w.payment_id = r.payment_id
          WHERE r.resolved_at >= ?1 AND r.detection_delay_ms IS NOT NULL
            AND r.settles)
    WHERE rail IN ('x402', 'mpp') AND typeof(chain_id) = 'integer' AND chain_id > 0
    GROUP BY 1, 2, 3
    ORDER BY 1, 2, 3";

const FOUND_AGES: &str = "
    SELECT f.rail, g.chain_id, f.age / g.step_ms AS bin, count(*) AS payments,
           avg(f.age) AS age_mean
    FROM (SELECT p.rail, p.chain_id, w.opened_at - coalesce(p.broadcast_at, p.created_at) AS age
          FROM reconciled_resolutions r
              CROSS JOIN payments p ON p.id = r.payment_id
              CROSS JOIN reconciled_watches w ON w.payment_id = r.payment_id
          WHERE r.resolved_at >= ?2 AND r.settles
            AND typeof(coalesce(p.broadcast_at, p.created_at)) = 'integer') AS f
        JOIN (SELECT value ->> 0 AS chain_id, value ->> 1 AS step_ms, value ->> 2 AS bins
              FROM json_each(?1)) AS g ON f.chain_id = g.chain_id
    WHERE f.rail IN ('x402', 'mpp') AND f.age >= 0 AND f.age / g.step_ms < g.bins
    GROUP BY 1, 2, 3
    ORDER BY 1, 2, 3";

const CLOCK_SKEWS: &str = "
    SELECT l.rail, l.chain_id, max(l.skew_max_ms) AS skew_max_ms
    FROM (SELECT value ->> 0 AS chain_id, value ->> 1 AS step_ms, value ->> 2 AS bins
          FROM json_each(?1)) AS g
        CROSS JOIN (SELECT 'x402' AS rail UNION ALL SELECT 'mpp') AS s
        JOIN reconciled_settle_latencies l
             ON l.rail = s.rail AND l.chain_id = g.chain_id AND l.step_ms = g.step_ms
            AND l.grid_bins = g.bins AND l.epoch >= ?2
    GROUP BY 1, 2
    ORDER BY 1, 2";

const UPSERT: &str = "
    INSERT INTO reconciled_settle_latencies AS l
        (rail, chain_id, step_ms, grid_bins, epoch, part, bin, settled, latency_sum_ms, clamped,
         skew_max_ms)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (rail, chain_id, step_ms, grid_bins, epoch, part, bin) DO UPDATE SET
        settled = l.settled + excluded.settled,
        latency_sum_ms = l.latency_sum_ms + excluded.latency_sum_ms,
        clamped = l.clamped + excluded.clamped,
        skew_max_ms = max(l.skew_max_ms, excluded.skew_max_ms)";

const PRUNE_BINS: &str = "
    DELETE FROM reconciled_settle_latencies
    WHERE (rail, chain_id, step_ms, grid_bins, epoch, part, bin) IN (
        SELECT rail, chain_id, step_ms, grid_bins, epoch, part, bin
        FROM reconciled_settle_latencies WHERE epoch < ? LIMIT ?)";

/// The moment of a watermark in Unix milliseconds, as times are kept here.
fn millis(at: &Watermark) -> i64 {
    at.at_micros.div_euclid(1_000)
}

/// Chains and grids as a query takes them.
fn grid_list(grids: &[(ChainId, BinGrid)]) -> String {
    let grids: Vec<[i64; 3]> = grids
        .iter()
        .map(|(chain, grid)| [chain.get(), grid.step_ms, grid.bins].map(column_number))
        .collect();
    serde_json::json!(grids).to_string()
}

fn watermark(at_millis: i64, payment_id: String) -> Watermark {
    Watermark { at_micros: at_millis.saturating_mul(1_000), payment_id: PaymentId::new(payment_id) }
}

#[async_trait]
impl SampleStore for SqliteStore {
    async fn sampled_up_to(&self) -> Result<Option<Watermark>, StoreError> {
        let row: Option<(i64, String)> =
            sqlx::query_as("SELECT at, payment_id FROM reconciled_sampling WHERE name = 'settled'")
                .fetch_optional(&self.reader)
                .await
                .map_err(failed("to read how far samples were taken"))?;
        Ok(row.map(|(at_micros, id)| Watermark { at_micros, payment_id: PaymentId::new(id) }))
    }

    async fn settled_after(
        &self,
        after: &Watermark,
        until: Timestamp,
        lag: Duration,
        limit: u32,
    ) -> Result<SettledStretch, StoreError> {
        let get = failed("to read settled payments");
        let rows: Vec<(i64, String, Option<i64>, bool)> = sqlx::query_as(SETTLED_AFTER)
            .bind(millis(after))
            .bind(after.payment_id.as_str())
            .bind(until.as_millis())
            .bind(limit)
            .bind(i64::try_from(lag.as_millis()).unwrap_or(i64::MAX))
            .fetch_all(&self.reader)
            .await
            .map_err(get)?;
        let places: Vec<FoundPlace> = rows
            .into_iter()
            .map(|(at, id, block_time, counts)| FoundPlace {
                at: watermark(at, id),
                block_time,
                counts,
            })
            .collect();
        let ids = id_list(FoundPlace::counting(&places));
        let mut conn = self.reader.acquire().await.map_err(get)?;
        let payments = load::raw_payments(&mut conn, &ids).await?;
        Ok(stretch(places, payments, limit))
    }

    async fn record_samples(
        &self,
        from: Option<&Watermark>,
        to: &Watermark,
        bins: &[SampleBin],
        now: Timestamp,
    ) -> Result<bool, StoreError> {
        const OPERATION: &str = "to record samples";
        let mut tx = self.begin(OPERATION).await?;
        let result = record(&mut tx, from, to, bins, now).await.map_err(failed(OPERATION));
        finish(tx, OPERATION, result).await
    }

    async fn sample_bins(
        &self,
        series: Series,
        grid: BinGrid,
        since_epoch: i64,
    ) -> Result<Vec<SampleBin>, StoreError> {
        let rows: Vec<SampleRow> = sqlx::query_as(
            "SELECT epoch, part, bin, settled, latency_sum_ms, clamped, skew_max_ms
             FROM reconciled_settle_latencies
             WHERE rail = ? AND chain_id = ? AND step_ms = ? AND grid_bins = ? AND epoch >= ?
             ORDER BY epoch, part, bin",
        )
        .bind(series.rail.code())
        .bind(column_number(series.chain_id.get()))
        .bind(column_number(grid.step_ms))
        .bind(column_number(grid.bins))
        .bind(since_epoch)
        .fetch_all(&self.reader)
        .await
        .map_err(failed("to read samples"))?;
        rows.into_iter().map(|row| row.sample(series, grid)).collect()
    }

    async fn open_ages(
        &self,
        grids: &[(ChainId, BinGrid)],
        since: Timestamp,
        now: Timestamp,
    ) -> Result<Vec<OpenAges>, StoreError> {
        let rows: Vec<OpenRow> = sqlx::query_as(OPEN_AGES)
            .bind(grid_list(grids))
            .bind(now.as_millis())
            .bind(since.as_millis())
            .fetch_all(&self.reader)
            .await
            .map_err(failed("to count open payments"))?;
        rows.into_iter().map(OpenAges::try_from).collect()
    }

    async fn never_settled(&self, since: Timestamp) -> Result<Vec<NeverSettled>, StoreError> {
        let rows: Vec<NeverRow> = sqlx::query_as(NEVER_SETTLED)
            .bind(since.as_millis())
            .fetch_all(&self.reader)
            .await
            .map_err(failed("to count failed payments"))?;
        rows.into_iter().map(NeverSettled::try_from).collect()
    }

    async fn observed_checks(&self, since: Timestamp) -> Result<Vec<ObservedChecks>, StoreError> {
        let rows: Vec<ObservedRow> = sqlx::query_as(OBSERVED)
            .bind(since.as_millis())
            .fetch_all(&self.reader)
            .await
            .map_err(failed("to read what was observed"))?;
        rows.into_iter().map(ObservedChecks::try_from).collect()
    }

    async fn found_ages(
        &self,
        grids: &[(ChainId, BinGrid)],
        since: Timestamp,
    ) -> Result<Vec<FoundInBin>, StoreError> {
        let rows: Vec<FoundRow> = sqlx::query_as(FOUND_AGES)
            .bind(grid_list(grids))
            .bind(since.as_millis())
            .fetch_all(&self.reader)
            .await
            .map_err(failed("to count how old payments were when they were found"))?;
        rows.into_iter().map(FoundInBin::try_from).collect()
    }

    async fn clock_skews(
        &self,
        grids: &[(ChainId, BinGrid)],
        since_epoch: i64,
    ) -> Result<Vec<(Series, u64)>, StoreError> {
        let rows: Vec<SkewRow> = sqlx::query_as(CLOCK_SKEWS)
            .bind(grid_list(grids))
            .bind(since_epoch)
            .fetch_all(&self.reader)
            .await
            .map_err(failed("to read clock skews"))?;
        rows.into_iter().map(TryInto::try_into).collect()
    }

    async fn prune_samples(&self, before: Timestamp, limit: u32) -> Result<u64, StoreError> {
        const OPERATION: &str = "to prune samples";
        let mut tx = self.begin(OPERATION).await?;
        let query = sqlx::query(PRUNE_BINS).bind(epoch_of(before)).bind(limit);
        let pruned = query.execute(&mut *tx).await.map_err(failed(OPERATION));
        finish(tx, OPERATION, pruned.map(|done| done.rows_affected())).await
    }
}

async fn record(
    conn: &mut SqliteConnection,
    from: Option<&Watermark>,
    to: &Watermark,
    bins: &[SampleBin],
    now: Timestamp,
) -> Result<bool, sqlx::Error> {
    let to_id = to.payment_id.as_str();
    let moved = match from {
        Some(from) => {
            sqlx::query(
                "UPDATE reconciled_sampling SET at = ?, payment_id = ?, updated_at = ?
                 WHERE name = 'settled' AND at = ? AND payment_id = ?",
            )
            .bind(to.at_micros)
            .bind(to_id)
            .bind(now.as_millis())
            .bind(from.at_micros)
            .bind(from.payment_id.as_str())
            .execute(&mut *conn)
            .await?
        }
        None => {
            sqlx::query(
                "INSERT INTO reconciled_sampling (name, at, payment_id, updated_at)
                 VALUES ('settled', ?, ?, ?) ON CONFLICT (name) DO NOTHING",
            )
            .bind(to.at_micros)
            .bind(to_id)
            .bind(now.as_millis())
            .execute(&mut *conn)
            .await?
        }
    };
    if moved.rows_affected() != 1 {
        return Ok(false);
    }
    for SampleBin { key, count } in bins {
        sqlx::query(UPSERT)
            .bind(key.series.rail.code())
            .bind(column_number(key.series.chain_id.get()))
            .bind(column_number(key.grid.step_ms))
            .bind(column_number(key.grid.bins))
            .bind(key.epoch)
            .bind(key.part.code())
            .bind(column_number(key.bin))
            .bind(column_number(count.settled))
            .bind(column_number(count.latency_sum_ms))
            .bind(column_number(count.clamped))
            .bind(column_number(count.skew_max_ms))
            .execute(&mut *conn)
            .await?;
    }
    Ok(true)
}

#[cfg(test)]
mod tests;
