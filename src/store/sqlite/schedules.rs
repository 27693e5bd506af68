//! Samples of settle latency, and versions of schedules: see [`ScheduleStore`].

use std::collections::HashMap;
use std::time::Duration;

use async_trait::async_trait;
use sqlx::sqlite::SqliteRow;
use sqlx::{Row, SqliteConnection};

use super::{SqliteStore, failed, finish, id_list, load};
use crate::domain::{BlockTime, ChainId, PaymentId, Rail, Timestamp};
use crate::store::StoreError;
use crate::store::row::{coded, column_number, payment_is_gone, unsigned};
use crate::store::schedules::{
    BinGrid, NeverSettled, NewVersion, ObservedChecks, OpenAges, Part, SampleBin, SampleCount,
    SampleKey, ScheduleStore, Series, SettledPayment, SettledStretch, Version, Watermark, epoch_of,
};

const LATENCIES: &str = "reconciled_settle_latencies";
const SCHEDULES: &str = "reconciled_schedules";

/// The next of each kind by their indexes alone; only then is it asked which of them count. A payment of
/// ours has a place among the gateway's too, where it does not. A `settled_at` that is not a whole number
/// has no place in the order, and is passed over (I11). SQLite seeks by a row value only where nothing is
/// computed, so a bound of the first column stands beside it all the same.
const SETTLED_AFTER: &str = "
    SELECT at, id, block_time, counts FROM (
        SELECT o.at, o.id, o.block_time,
               EXISTS (SELECT 1 FROM payments p WHERE p.id = o.id AND p.status = 'settled')
               AND NOT EXISTS (
                   SELECT 1 FROM reconciled_resolutions e
                   WHERE e.payment_id = o.id AND e.id < o.resolution
                     AND (e.settles OR e.outcome = 'reopened')) AS counts
        FROM (
            SELECT r.id AS resolution, r.resolved_at AS at, r.payment_id AS id, r.block_time
            FROM reconciled_resolutions r
            WHERE r.settles AND r.resolved_at >= ?1
              AND (r.resolved_at, r.payment_id) > (?1, ?2) AND r.resolved_at <= ?3
            ORDER BY r.resolved_at, r.payment_id
            LIMIT ?4) AS o
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
           min(g.bins, max(0, (?2 - p.started_at) / g.step_ms)) AS bin, count(*)
    FROM (SELECT rail, chain_id, coalesce(broadcast_at, created_at) AS started_at
          FROM payments WHERE status IN ('settling', 'unknown', 'settle_failed')) AS p
        JOIN (SELECT value ->> 0 AS chain_id, value ->> 1 AS step_ms, value ->> 2 AS bins
              FROM json_each(?1)) AS g ON p.chain_id = g.chain_id
    WHERE p.rail IN ('x402', 'mpp') AND p.started_at >= ?3 AND typeof(p.started_at) = 'integer'
    GROUP BY 1, 2, 3
    ORDER BY 1, 2, 3";

const NEVER_SETTLED: &str = "
    SELECT rail, chain_id, failed_at / 3600000 AS epoch, count(*)
    FROM (SELECT p.rail, p.chain_id, max(r.resolved_at) AS failed_at
          FROM reconciled_resolutions r CROSS JOIN payments p ON p.id = r.payment_id
          WHERE r.resolved_at >= ?1 AND r.outcome = 'failed' AND +p.status = 'failed'
          GROUP BY p.id)
    WHERE rail IN ('x402', 'mpp') AND typeof(chain_id) = 'integer' AND chain_id > 0
    GROUP BY 1, 2, 3
    ORDER BY 1, 2, 3";

const OBSERVED: &str = "
    SELECT rail, chain_id, schedule_id, count(*), avg(checks), avg(detection_delay_ms),
           max(detection_delay_ms),
           count(*) FILTER (WHERE found_age >= 0 AND found_age < ?2),
           coalesce(avg(found_age) FILTER (WHERE found_age >= 0 AND found_age < ?2), 0.0)
    FROM (SELECT p.rail, p.chain_id, w.schedule_id, r.detection_delay_ms,
                 w.opened_at - coalesce(p.broadcast_at, p.created_at) AS found_age,
                 (SELECT count(*) FROM reconciled_checks c
                  WHERE c.payment_id = r.payment_id AND c.checked_at <= r.resolved_at) AS checks
          FROM reconciled_resolutions r
              CROSS JOIN payments p ON p.id = r.payment_id
              CROSS JOIN reconciled_watches w ON w.payment_id = r.payment_id
          WHERE r.resolved_at >= ?1 AND r.detection_delay_ms IS NOT NULL
            AND r.outcome IN ('paid', 'reinstated', 'refund_owed'))
    WHERE rail IN ('x402', 'mpp') AND typeof(chain_id) = 'integer' AND chain_id > 0
    GROUP BY 1, 2, 3
    ORDER BY 1, 2, 3";

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

const PRUNE_VERSIONS: &str = "
    DELETE FROM reconciled_schedules WHERE id IN (
        SELECT s.id FROM reconciled_schedules s
        WHERE s.created_at < ?
          AND EXISTS (
              SELECT 1 FROM reconciled_schedules n
              WHERE n.rail = s.rail AND n.chain_id = s.chain_id AND n.id > s.id)
          AND (s.adopted_at IS NULL OR EXISTS (
              SELECT 1 FROM reconciled_schedules n
              WHERE n.rail = s.rail AND n.chain_id = s.chain_id AND n.id > s.id
                AND n.adopted_at IS NOT NULL))
          AND NOT EXISTS (
              SELECT 1 FROM reconciled_watches w
              WHERE w.schedule_id = s.id AND w.phase <> 'closed')
        LIMIT ?)";

/// The moment of a watermark in Unix milliseconds, as times are kept here.
fn millis(at: &Watermark) -> i64 {
    at.at_micros.div_euclid(1_000)
}

fn watermark(at_millis: i64, payment_id: String) -> Watermark {
    Watermark { at_micros: at_millis.saturating_mul(1_000), payment_id: PaymentId::new(payment_id) }
}

fn series(table: &'static str, rail: &str, chain_id: i64) -> Result<Series, StoreError> {
    Ok(Series {
        rail: coded(table, "rail", rail, Rail::from_code)?,
        chain_id: ChainId::new(unsigned(table, "chain_id", chain_id)?),
    })
}

fn version(row: &SqliteRow) -> Result<Version, StoreError> {
    let get = failed("to read schedules");
    let text = |column: &str| row.try_get::<String, _>(column).map_err(get);
    let number = |column: &str| row.try_get::<i64, _>(column).map_err(get);
    let real = |column: &str| row.try_get::<f64, _>(column).map_err(get);
    let policy = text("policy")?;
    Ok(Version {
        id: number("id")?,
        fitted: NewVersion {
            series: series(SCHEDULES, &text("rail")?, number("chain_id")?)?,
            previous_id: Some(number("previous_id")?).filter(|id| *id != 0),
            policy: coded(SCHEDULES, "policy", &policy, |t| serde_json::from_str(t).ok())?,
            sample_size: unsigned(SCHEDULES, "sample_size", number("sample_size")?)?,
            window_ms: unsigned(SCHEDULES, "window_ms", number("window_ms")?)?,
            expected_reads: real("expected_reads")?,
            expected_delay_ms: real("expected_delay_ms")?,
            never_share: real("never_share")?,
            adopted: row.try_get::<Option<i64>, _>("adopted_at").map_err(get)?.is_some(),
            reason: text("reason")?,
        },
        created_at: Timestamp::from_millis(number("created_at")?),
    })
}

#[async_trait]
impl ScheduleStore for SqliteStore {
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
        limit: u32,
    ) -> Result<SettledStretch, StoreError> {
        let get = failed("to read settled payments");
        let rows: Vec<(i64, String, Option<i64>, bool)> = sqlx::query_as(SETTLED_AFTER)
            .bind(millis(after))
            .bind(after.payment_id.as_str())
            .bind(until.as_millis())
            .bind(limit)
            .fetch_all(&self.reader)
            .await
            .map_err(get)?;
        let up_to = rows.last().map(|(at, id, _, _)| watermark(*at, id.clone()));
        let is_full = rows.len() >= usize::try_from(limit).unwrap_or(usize::MAX);
        let ids = id_list(rows.iter().filter(|row| row.3).map(|(_, id, _, _)| id.as_str()));
        let mut conn = self.reader.acquire().await.map_err(get)?;
        let mut payments: HashMap<String, _> = load::raw_payments(&mut conn, &ids)
            .await?
            .into_iter()
            .map(|raw| (raw.id.clone(), raw.parse()))
            .collect();
        let payments = rows
            .into_iter()
            .filter(|row| row.3)
            .map(|(at, id, seconds, _)| {
                let payment = payments.remove(&id).unwrap_or_else(|| Err(payment_is_gone(&id)));
                let block_time =
                    seconds.and_then(|s| u64::try_from(s).ok()).map(BlockTime::from_secs);
                SettledPayment { at: watermark(at, id), payment, block_time }
            })
            .collect();
        Ok(SettledStretch { payments, up_to, is_full })
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
        let rows: Vec<(i64, String, i64, i64, i64, i64, i64)> = sqlx::query_as(
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
        rows.into_iter()
            .map(|(epoch, part, bin, settled, latency_sum_ms, clamped, skew_max_ms)| {
                let count = |column, n| unsigned(LATENCIES, column, n);
                let part = coded(LATENCIES, "part", &part, Part::from_code)?;
                Ok(SampleBin {
                    key: SampleKey { series, grid, epoch, part, bin: count("bin", bin)? },
                    count: SampleCount {
                        settled: count("settled", settled)?,
                        latency_sum_ms: count("latency_sum_ms", latency_sum_ms)?,
                        clamped: count("clamped", clamped)?,
                        skew_max_ms: count("skew_max_ms", skew_max_ms)?,
                    },
                })
            })
            .collect()
    }

    async fn open_ages(
        &self,
        grids: &[(ChainId, BinGrid)],
        since: Timestamp,
        now: Timestamp,
    ) -> Result<Vec<OpenAges>, StoreError> {
        let grids: Vec<[i64; 3]> = grids
            .iter()
            .map(|(chain, grid)| [chain.get(), grid.step_ms, grid.bins].map(column_number))
            .collect();
        let rows: Vec<(String, i64, i64, i64)> = sqlx::query_as(OPEN_AGES)
            .bind(serde_json::json!(grids).to_string())
            .bind(now.as_millis())
            .bind(since.as_millis())
            .fetch_all(&self.reader)
            .await
            .map_err(failed("to count open payments"))?;
        rows.into_iter()
            .map(|(rail, chain_id, bin, payments)| {
                Ok(OpenAges {
                    series: series("payments", &rail, chain_id)?,
                    bin: unsigned("payments", "bin", bin)?,
                    payments: unsigned("payments", "count", payments)?,
                })
            })
            .collect()
    }

    async fn never_settled(&self, since: Timestamp) -> Result<Vec<NeverSettled>, StoreError> {
        let rows: Vec<(String, i64, i64, i64)> = sqlx::query_as(NEVER_SETTLED)
            .bind(since.as_millis())
            .fetch_all(&self.reader)
            .await
            .map_err(failed("to count failed payments"))?;
        rows.into_iter()
            .map(|(rail, chain_id, epoch, payments)| {
                Ok(NeverSettled {
                    series: series("payments", &rail, chain_id)?,
                    epoch,
                    payments: unsigned("payments", "count", payments)?,
                })
            })
            .collect()
    }

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
        rows.iter().map(version).collect()
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
        rows.iter().map(version).collect()
    }

    async fn observed_checks(
        &self,
        since: Timestamp,
        horizon: Duration,
    ) -> Result<Vec<ObservedChecks>, StoreError> {
        let rows: Vec<(String, i64, Option<i64>, i64, f64, f64, i64, i64, f64)> =
            sqlx::query_as(OBSERVED)
                .bind(since.as_millis())
                .bind(i64::try_from(horizon.as_millis()).unwrap_or(i64::MAX))
                .fetch_all(&self.reader)
                .await
                .map_err(failed("to read what was observed"))?;
        rows.into_iter()
            .map(
                |(
                    rail,
                    chain_id,
                    schedule_id,
                    payments,
                    reads_mean,
                    delay_mean_ms,
                    max,
                    found_in_time,
                    found_age,
                )| {
                    Ok(ObservedChecks {
                        series: series("payments", &rail, chain_id)?,
                        schedule_id,
                        payments: unsigned("payments", "count", payments)?,
                        reads_mean,
                        delay_mean_ms,
                        delay_max_ms: unsigned(
                            "reconciled_resolutions",
                            "detection_delay_ms",
                            max,
                        )?,
                        found_in_time: unsigned("payments", "count", found_in_time)?,
                        found_age_mean_ms: found_age,
                    })
                },
            )
            .collect()
    }

    async fn prune_schedules(&self, before: Timestamp, limit: u32) -> Result<u64, StoreError> {
        const OPERATION: &str = "to prune samples and schedules";
        let mut tx = self.begin(OPERATION).await?;
        let result = async {
            let mut most = 0;
            for (statement, bound) in
                [(PRUNE_BINS, epoch_of(before)), (PRUNE_VERSIONS, before.as_millis())]
            {
                let query = sqlx::query(statement).bind(bound).bind(limit);
                let done = query.execute(&mut *tx).await.map_err(failed(OPERATION))?;
                most = most.max(done.rows_affected());
            }
            Ok(most)
        }
        .await;
        finish(tx, OPERATION, result).await
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
