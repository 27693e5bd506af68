//! Samples of settle latency: see [`SampleStore`].

use std::time::Duration;

use async_trait::async_trait;
use sqlx::PgConnection;
use sqlx::types::time::OffsetDateTime;

use super::rows::{datetime, select_payments};
use super::{PostgresStore, finish};
use crate::domain::{ChainId, PaymentId, Timestamp};
use crate::store::StoreError;
use crate::store::row::column_number;
use crate::store::samples::{
    BinGrid, FoundInBin, FoundPlace, FoundRow, NeverRow, NeverSettled, ObservedChecks, ObservedRow,
    OpenAges, OpenRow, SampleBin, SampleRow, SampleStore, SettledStretch, SkewRow, Watermark,
    epoch_of, stretch,
};
use crate::store::schedules::Series;

/// The moment of a watermark; the last there is where a calendar has none.
fn moment(at: &Watermark) -> OffsetDateTime {
    OffsetDateTime::from_unix_timestamp_nanos(i128::from(at.at_micros) * 1_000)
        .unwrap_or_else(|_| datetime(Timestamp::from_millis(at.at_micros / 1_000)))
}

fn watermark(at: OffsetDateTime, payment_id: String) -> Watermark {
    let at_micros = i64::try_from(at.unix_timestamp_nanos() / 1_000).unwrap_or(i64::MAX);
    Watermark { at_micros, payment_id: PaymentId::new(payment_id) }
}

/// Chains and grids as a query takes them: the chains, the steps and the numbers of bins.
fn grid_columns(grids: &[(ChainId, BinGrid)]) -> [Vec<i64>; 3] {
    let column = |number: &dyn Fn(&(ChainId, BinGrid)) -> u64| {
        grids.iter().map(|of_chain| column_number(number(of_chain))).collect()
    };
    [column(&|(c, _)| c.get()), column(&|(_, g)| g.step_ms), column(&|(_, g)| g.bins)]
}

#[async_trait]
impl SampleStore for PostgresStore {
    async fn sampled_up_to(&self) -> Result<Option<Watermark>, StoreError> {
        let row =
            sqlx::query!("SELECT at, payment_id FROM reconciled.sampling WHERE name = 'settled'")
                .fetch_optional(&self.pool)
                .await
                .map_err(|source| {
                    StoreError::from_sqlx("to read how far samples were taken", source)
                })?;
        Ok(row.map(|row| watermark(row.at, row.payment_id)))
    }

    async fn settled_after(
        &self,
        after: &Watermark,
        until: Timestamp,
        lag: Duration,
        limit: u32,
    ) -> Result<SettledStretch, StoreError> {
        let refused = |source| StoreError::from_sqlx("to read settled payments", source);
        let rows = sqlx::query!(
            // The next of each kind by their indexes alone; only then is it asked which of them count. A
            // payment of ours has a place among the gateway's too, where it does not.
            r#"WITH ours AS MATERIALIZED (
                   SELECT r.id AS resolution, r.resolved_at AS at, r.payment_id AS id
                     FROM reconciled.resolutions r
                    WHERE r.settles AND (r.resolved_at, r.payment_id) > ($1, $2)
                      AND r.resolved_at <= $3
                    ORDER BY r.resolved_at, r.payment_id
                    LIMIT $4
               ), theirs AS MATERIALIZED (
                   SELECT p.settled_at AS at, p.id
                     FROM payments p
                    WHERE p.status = 'settled' AND (p.settled_at, p.id) > ($1, $2)
                      AND p.settled_at <= $3
                    ORDER BY p.settled_at, p.id
                    LIMIT $4
               )
               SELECT at AS "at!", id AS "id!", block_time AS "block_time?", counts AS "counts!"
                 FROM (SELECT o.at, o.id, t.block_time,
                              EXISTS (SELECT FROM payments p
                                       WHERE p.id = o.id AND p.status = 'settled')
                              AND NOT EXISTS (
                                  SELECT FROM reconciled.resolutions u
                                   WHERE u.payment_id = o.id AND u.id > o.resolution
                                     AND u.outcome = 'reopened'
                                     AND u.resolved_at < o.at + $5::float8 * interval '1 ms')
                              AND NOT EXISTS (
                                  SELECT FROM reconciled.resolutions e
                                   WHERE e.payment_id = o.id AND e.id < o.resolution
                                     AND e.settles
                                     AND NOT EXISTS (
                                         SELECT FROM reconciled.resolutions u
                                          WHERE u.payment_id = o.id AND u.id > e.id
                                            AND u.outcome = 'reopened'
                                            AND u.resolved_at
                                                < e.resolved_at + $5::float8 * interval '1 ms'))
                              AND NOT EXISTS (
                                  SELECT FROM reconciled.resolutions u
                                   WHERE u.payment_id = o.id AND u.id < o.resolution
                                     AND u.outcome = 'reopened'
                                     AND NOT EXISTS (
                                         SELECT FROM reconciled.resolutions e
                                          WHERE e.payment_id = o.id AND e.id < u.id
                                            AND e.settles)) AS counts
                         FROM ours o
                         LEFT JOIN reconciled.transfers t
                                ON t.payment_id = o.id AND t.orphaned_at IS NULL
                       UNION ALL
                       SELECT h.at, h.id, t.block_time,
                              NOT EXISTS (
                                  SELECT FROM reconciled.resolutions r
                                   WHERE r.payment_id = h.id AND r.settles)
                         FROM theirs h
                         LEFT JOIN reconciled.transfers t
                                ON t.payment_id = h.id AND t.orphaned_at IS NULL) AS page
                ORDER BY at, id, counts DESC
                LIMIT $4"#,
            moment(after),
            after.payment_id.as_str(),
            datetime(until),
            i64::from(limit),
            lag.as_secs_f64() * 1_000.0,
        )
        .fetch_all(&self.pool)
        .await
        .map_err(refused)?;
        let places: Vec<FoundPlace> = rows
            .into_iter()
            .map(|row| FoundPlace {
                at: watermark(row.at, row.id),
                block_time: row.block_time.map(OffsetDateTime::unix_timestamp),
                counts: row.counts,
            })
            .collect();
        let ids: Vec<String> = FoundPlace::counting(&places).map(str::to_owned).collect();
        let payments = select_payments!("WHERE id = ANY($1::text[])", &ids)
            .fetch_all(&self.pool)
            .await
            .map_err(refused)?;
        Ok(stretch(places, payments, limit))
    }

    async fn record_samples(
        &self,
        from: Option<&Watermark>,
        to: &Watermark,
        bins: &[SampleBin],
        now: Timestamp,
    ) -> Result<bool, StoreError> {
        let refused = |source| StoreError::from_sqlx("to record samples", source);
        let mut transaction = self.pool.begin().await.map_err(refused)?;
        let recorded = record(&mut transaction, from, to, bins, now).await.map_err(refused);
        finish(transaction, recorded, refused).await
    }

    async fn sample_bins(
        &self,
        series: Series,
        grid: BinGrid,
        since_epoch: i64,
    ) -> Result<Vec<SampleBin>, StoreError> {
        let rows = sqlx::query_as!(
            SampleRow,
            "SELECT epoch, part, bin, settled, latency_sum_ms, clamped, skew_max_ms
               FROM reconciled.settle_latencies
              WHERE rail = $1 AND chain_id = $2 AND step_ms = $3 AND grid_bins = $4
                AND epoch >= $5
              ORDER BY epoch, part, bin",
            series.rail.code(),
            column_number(series.chain_id.get()),
            column_number(grid.step_ms),
            column_number(grid.bins),
            since_epoch,
        )
        .fetch_all(&self.pool)
        .await
        .map_err(|source| StoreError::from_sqlx("to read samples", source))?;
        rows.into_iter().map(|row| row.sample(series, grid)).collect()
    }

    async fn open_ages(
        &self,
        grids: &[(ChainId, BinGrid)],
        since: Timestamp,
        now: Timestamp,
    ) -> Result<Vec<OpenAges>, StoreError> {
        let [chains, steps, bins] = grid_columns(grids);
        let rows = sqlx::query_as!(
            OpenRow,
            r#"SELECT p.rail AS "rail!", g.chain_id AS "chain_id!",
                      least(g.bins, greatest(0, floor(
                          extract(epoch FROM $4 - p.started_at) * 1000 / g.step_ms)))::bigint
                          AS "bin!",
                      count(*) AS "payments!"
                 FROM (SELECT rail::text AS rail, chain_id::text AS chain_id,
                              coalesce(broadcast_at, created_at) AS started_at
                         FROM payments
                        WHERE status IN ('settling', 'unknown', 'settle_failed')) AS p
                 JOIN unnest($1::bigint[], $2::bigint[], $3::bigint[])
                          AS g (chain_id, step_ms, bins) ON g.chain_id::text = p.chain_id
                WHERE p.rail IN ('x402', 'mpp') AND p.started_at >= $5
                  AND isfinite(p.started_at)
                GROUP BY 1, 2, 3
                ORDER BY 1, 2, 3"#,
            &chains,
            &steps,
            &bins,
            datetime(now),
            datetime(since),
        )
        .fetch_all(&self.pool)
        .await
        .map_err(|source| StoreError::from_sqlx("to count open payments", source))?;
        rows.into_iter().map(OpenAges::try_from).collect()
    }

    async fn never_settled(&self, since: Timestamp) -> Result<Vec<NeverSettled>, StoreError> {
        let rows = sqlx::query_as!(
            NeverRow,
            r#"SELECT f.rail AS "rail!", f.chain_id::bigint AS "chain_id!",
                      floor(extract(epoch FROM f.failed_at) / 3600)::bigint AS "epoch!",
                      count(*) AS "payments!"
                 FROM (SELECT p.id, p.rail::text AS rail, p.chain_id::text AS chain_id,
                              max(r.resolved_at) AS failed_at
                         FROM reconciled.resolutions r JOIN payments p ON p.id = r.payment_id
                        WHERE r.resolved_at >= $1 AND r.outcome = 'failed'
                          AND p.status = 'failed'
                        GROUP BY p.id) AS f
                WHERE f.rail IN ('x402', 'mpp') AND f.chain_id ~ '^[0-9]{1,18}$'
                GROUP BY 1, 2, 3
                ORDER BY 1, 2, 3"#,
            datetime(since),
        )
        .fetch_all(&self.pool)
        .await
        .map_err(|source| StoreError::from_sqlx("to count failed payments", source))?;
        rows.into_iter().map(NeverSettled::try_from).collect()
    }

    async fn observed_checks(&self, since: Timestamp) -> Result<Vec<ObservedChecks>, StoreError> {
        let rows = sqlx::query_as!(
            ObservedRow,
            r#"SELECT o.rail AS "rail!", o.chain_id::bigint AS "chain_id!", o.schedule_id,
                      count(*) AS "payments!", avg(o.checks)::float8 AS "reads!",
                      avg(o.detection_delay_ms)::float8 AS "delay_mean!",
                      max(o.detection_delay_ms) AS "delay_max!"
                 FROM (SELECT p.rail::text AS rail, p.chain_id::text AS chain_id, w.schedule_id,
                              r.detection_delay_ms,
                              (SELECT count(*) FROM reconciled.checks c
                                WHERE c.payment_id = r.payment_id
                                  AND c.checked_at <= r.resolved_at) AS checks
                         FROM reconciled.resolutions r
                         JOIN payments p ON p.id = r.payment_id
                         JOIN reconciled.watches w ON w.payment_id = r.payment_id
                        WHERE r.resolved_at >= $1 AND r.detection_delay_ms IS NOT NULL
                          AND r.settles) AS o
                WHERE o.rail IN ('x402', 'mpp') AND o.chain_id ~ '^[0-9]{1,18}$'
                GROUP BY 1, 2, 3
                ORDER BY 1, 2, 3"#,
            datetime(since),
        )
        .fetch_all(&self.pool)
        .await
        .map_err(|source| StoreError::from_sqlx("to read what was observed", source))?;
        rows.into_iter().map(ObservedChecks::try_from).collect()
    }

    async fn found_ages(
        &self,
        grids: &[(ChainId, BinGrid)],
        since: Timestamp,
    ) -> Result<Vec<FoundInBin>, StoreError> {
        let [chains, steps, bins] = grid_columns(grids);
        let rows = sqlx::query_as!(
            FoundRow,
            r#"SELECT f.rail AS "rail!", g.chain_id AS "chain_id!",
                      floor(f.age / g.step_ms)::bigint AS "bin!", count(*) AS "payments!",
                      avg(f.age)::float8 AS "age_mean!"
                 FROM (SELECT p.rail::text AS rail, p.chain_id::text AS chain_id,
                              (extract(epoch FROM w.opened_at
                                       - coalesce(p.broadcast_at, p.created_at)) * 1000)::float8
                                  AS age
                         FROM reconciled.resolutions r
                         JOIN payments p ON p.id = r.payment_id
                         JOIN reconciled.watches w ON w.payment_id = r.payment_id
                        WHERE r.resolved_at >= $4 AND r.settles
                          AND isfinite(coalesce(p.broadcast_at, p.created_at))) AS f
                 JOIN unnest($1::bigint[], $2::bigint[], $3::bigint[])
                          AS g (chain_id, step_ms, bins) ON g.chain_id::text = f.chain_id
                WHERE f.rail IN ('x402', 'mpp') AND f.age >= 0 AND floor(f.age / g.step_ms) < g.bins
                GROUP BY 1, 2, 3
                ORDER BY 1, 2, 3"#,
            &chains,
            &steps,
            &bins,
            datetime(since),
        )
        .fetch_all(&self.pool)
        .await
        .map_err(|source| {
            StoreError::from_sqlx("to count how old payments were when they were found", source)
        })?;
        rows.into_iter().map(FoundInBin::try_from).collect()
    }

    async fn clock_skews(
        &self,
        grids: &[(ChainId, BinGrid)],
        since_epoch: i64,
    ) -> Result<Vec<(Series, u64)>, StoreError> {
        let [chains, steps, bins] = grid_columns(grids);
        let rows = sqlx::query_as!(
            SkewRow,
            r#"SELECT l.rail, l.chain_id, max(l.skew_max_ms) AS "skew_max_ms!"
                 FROM unnest($1::bigint[], $2::bigint[], $3::bigint[]) AS g (chain_id, step_ms, bins)
                CROSS JOIN (VALUES ('x402'), ('mpp')) AS s (rail)
                 JOIN reconciled.settle_latencies l
                   ON l.rail = s.rail AND l.chain_id = g.chain_id AND l.step_ms = g.step_ms
                  AND l.grid_bins = g.bins AND l.epoch >= $4
                GROUP BY 1, 2
                ORDER BY 1, 2"#,
            &chains,
            &steps,
            &bins,
            since_epoch,
        )
        .fetch_all(&self.pool)
        .await
        .map_err(|source| StoreError::from_sqlx("to read clock skews", source))?;
        rows.into_iter().map(TryInto::try_into).collect()
    }

    async fn prune_samples(&self, before: Timestamp, limit: u32) -> Result<u64, StoreError> {
        let pruned = sqlx::query!(
            "DELETE FROM reconciled.settle_latencies
              WHERE ctid = ANY (ARRAY(
                  SELECT ctid FROM reconciled.settle_latencies WHERE epoch < $1 LIMIT $2
                     FOR UPDATE SKIP LOCKED))",
            epoch_of(before),
            i64::from(limit),
        )
        .execute(&self.pool)
        .await
        .map_err(|source| StoreError::from_sqlx("to prune samples", source))?;
        Ok(pruned.rows_affected())
    }
}

async fn record(
    connection: &mut PgConnection,
    from: Option<&Watermark>,
    to: &Watermark,
    bins: &[SampleBin],
    now: Timestamp,
) -> Result<bool, sqlx::Error> {
    let now = datetime(now);
    let to_id = to.payment_id.as_str();
    let moved = match from {
        Some(from) => {
            sqlx::query!(
                "UPDATE reconciled.sampling SET at = $1, payment_id = $2, updated_at = $3
              WHERE name = 'settled' AND at = $4 AND payment_id = $5",
                moment(to),
                to_id,
                now,
                moment(from),
                from.payment_id.as_str(),
            )
            .execute(&mut *connection)
            .await?
        }
        None => {
            sqlx::query!(
                "INSERT INTO reconciled.sampling (name, at, payment_id, updated_at)
             VALUES ('settled', $1, $2, $3) ON CONFLICT (name) DO NOTHING",
                moment(to),
                to_id,
                now,
            )
            .execute(&mut *connection)
            .await?
        }
    };
    if moved.rows_affected() != 1 {
        return Ok(false);
    }
    if bins.is_empty() {
        return Ok(true);
    }
    let number = |field: &dyn Fn(&SampleBin) -> u64| -> Vec<i64> {
        bins.iter().map(|bin| column_number(field(bin))).collect()
    };
    let rails: Vec<String> = bins.iter().map(|b| b.key.series.rail.code().to_owned()).collect();
    let parts: Vec<String> = bins.iter().map(|b| b.key.part.code().to_owned()).collect();
    let epochs: Vec<i64> = bins.iter().map(|b| b.key.epoch).collect();
    sqlx::query!(
        "INSERT INTO reconciled.settle_latencies AS l
                (rail, chain_id, step_ms, grid_bins, epoch, part, bin, settled, latency_sum_ms,
                 clamped, skew_max_ms)
         SELECT * FROM unnest($1::text[], $2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[],
                              $6::text[], $7::bigint[], $8::bigint[], $9::bigint[],
                              $10::bigint[], $11::bigint[])
         ON CONFLICT (rail, chain_id, step_ms, grid_bins, epoch, part, bin) DO UPDATE
            SET settled = l.settled + excluded.settled,
                latency_sum_ms = l.latency_sum_ms + excluded.latency_sum_ms,
                clamped = l.clamped + excluded.clamped,
                skew_max_ms = greatest(l.skew_max_ms, excluded.skew_max_ms)",
        &rails,
        &number(&|b| b.key.series.chain_id.get()),
        &number(&|b| b.key.grid.step_ms),
        &number(&|b| b.key.grid.bins),
        &epochs,
        &parts,
        &number(&|b| b.key.bin),
        &number(&|b| b.count.settled),
        &number(&|b| b.count.latency_sum_ms),
        &number(&|b| b.count.clamped),
        &number(&|b| b.count.skew_max_ms),
    )
    .execute(connection)
    .await?;
    Ok(true)
}
