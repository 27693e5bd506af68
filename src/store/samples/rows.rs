//! From rows to values, the same for every database: only the queries differ.

use std::collections::HashMap;

use super::{
    BinGrid, FoundInBin, NeverSettled, ObservedChecks, OpenAges, Part, SampleBin, SampleCount,
    SampleKey, SettledPayment, SettledStretch, Watermark,
};
use crate::domain::{BlockTime, MalformedPayment, Payment, RawPayment};
use crate::store::StoreError;
use crate::store::row::{coded, payment_is_gone, unsigned};
use crate::store::schedules::{Series, series};

/// A place in the order of settled payments.
pub(in crate::store) struct FoundPlace {
    pub(in crate::store) at: Watermark,
    /// Unix seconds.
    pub(in crate::store) block_time: Option<i64>,
    /// Whether a sample may come of it.
    pub(in crate::store) counts: bool,
}

impl FoundPlace {
    /// The ids of those that count.
    pub(in crate::store) fn counting(places: &[Self]) -> impl Iterator<Item = &str> {
        places.iter().filter(|place| place.counts).map(|place| place.at.payment_id.as_str())
    }
}

/// What a query found that was to look at `limit` places, with the rows of the payments that count.
pub(in crate::store) fn stretch(
    places: Vec<FoundPlace>,
    payments: Vec<RawPayment>,
    limit: u32,
) -> SettledStretch {
    let is_full = places.len() >= usize::try_from(limit).unwrap_or(usize::MAX);
    let up_to = places.last().map(|last| last.at.clone());
    let payments: HashMap<&str, &RawPayment> =
        payments.iter().map(|raw| (raw.id.as_str(), raw)).collect();
    let parse = |id: &str| -> Result<Payment, MalformedPayment> {
        payments.get(id).map_or_else(|| Err(payment_is_gone(id)), |raw| raw.parse())
    };
    let payments = places
        .into_iter()
        .filter(|place| place.counts)
        .map(|FoundPlace { at, block_time, .. }| SettledPayment {
            payment: parse(at.payment_id.as_str()),
            block_time: block_time.and_then(|s| u64::try_from(s).ok()).map(BlockTime::from_secs),
            at,
        })
        .collect();
    SettledStretch { payments, up_to, is_full }
}

/// A row of the samples of one series on one grid.
#[derive(sqlx::FromRow)]
pub(in crate::store) struct SampleRow {
    pub(in crate::store) epoch: i64,
    pub(in crate::store) part: String,
    pub(in crate::store) bin: i64,
    pub(in crate::store) settled: i64,
    pub(in crate::store) latency_sum_ms: i64,
    pub(in crate::store) clamped: i64,
    pub(in crate::store) skew_max_ms: i64,
}

impl SampleRow {
    pub(in crate::store) fn sample(
        self,
        series: Series,
        grid: BinGrid,
    ) -> Result<SampleBin, StoreError> {
        const TABLE: &str = "settle_latencies";
        let count = |column, n| unsigned(TABLE, column, n);
        Ok(SampleBin {
            key: SampleKey {
                series,
                grid,
                epoch: self.epoch,
                part: coded(TABLE, "part", &self.part, Part::from_code)?,
                bin: count("bin", self.bin)?,
            },
            count: SampleCount {
                settled: count("settled", self.settled)?,
                latency_sum_ms: count("latency_sum_ms", self.latency_sum_ms)?,
                clamped: count("clamped", self.clamped)?,
                skew_max_ms: count("skew_max_ms", self.skew_max_ms)?,
            },
        })
    }
}

/// Open payments of one age.
#[derive(sqlx::FromRow)]
pub(in crate::store) struct OpenRow {
    pub(in crate::store) rail: String,
    pub(in crate::store) chain_id: i64,
    pub(in crate::store) bin: i64,
    pub(in crate::store) payments: i64,
}

impl TryFrom<OpenRow> for OpenAges {
    type Error = StoreError;

    fn try_from(row: OpenRow) -> Result<Self, StoreError> {
        Ok(Self {
            series: series("payments", &row.rail, row.chain_id)?,
            bin: unsigned("payments", "bin", row.bin)?,
            payments: unsigned("payments", "count", row.payments)?,
        })
    }
}

/// Payments failed in one hour.
#[derive(sqlx::FromRow)]
pub(in crate::store) struct NeverRow {
    pub(in crate::store) rail: String,
    pub(in crate::store) chain_id: i64,
    pub(in crate::store) epoch: i64,
    pub(in crate::store) payments: i64,
}

impl TryFrom<NeverRow> for NeverSettled {
    type Error = StoreError;

    fn try_from(row: NeverRow) -> Result<Self, StoreError> {
        Ok(Self {
            series: series("payments", &row.rail, row.chain_id)?,
            epoch: row.epoch,
            payments: unsigned("payments", "count", row.payments)?,
        })
    }
}

/// Payments that were found settled under one version.
#[derive(sqlx::FromRow)]
pub(in crate::store) struct ObservedRow {
    pub(in crate::store) rail: String,
    pub(in crate::store) chain_id: i64,
    pub(in crate::store) schedule_id: Option<i64>,
    pub(in crate::store) payments: i64,
    pub(in crate::store) reads: f64,
    pub(in crate::store) delay_mean: f64,
    pub(in crate::store) delay_max: i64,
}

impl TryFrom<ObservedRow> for ObservedChecks {
    type Error = StoreError;

    fn try_from(row: ObservedRow) -> Result<Self, StoreError> {
        Ok(Self {
            series: series("payments", &row.rail, row.chain_id)?,
            schedule_id: row.schedule_id,
            payments: unsigned("payments", "count", row.payments)?,
            reads_mean: row.reads,
            delay_mean_ms: row.delay_mean,
            delay_max_ms: unsigned("resolutions", "detection_delay_ms", row.delay_max)?,
        })
    }
}

/// Payments found at an age within one bin.
#[derive(sqlx::FromRow)]
pub(in crate::store) struct FoundRow {
    pub(in crate::store) rail: String,
    pub(in crate::store) chain_id: i64,
    pub(in crate::store) bin: i64,
    pub(in crate::store) payments: i64,
    pub(in crate::store) age_mean: f64,
}

impl TryFrom<FoundRow> for FoundInBin {
    type Error = StoreError;

    fn try_from(row: FoundRow) -> Result<Self, StoreError> {
        Ok(Self {
            series: series("payments", &row.rail, row.chain_id)?,
            bin: unsigned("payments", "bin", row.bin)?,
            payments: unsigned("payments", "count", row.payments)?,
            age_mean_ms: row.age_mean,
        })
    }
}

/// The clock skew of one series.
#[derive(sqlx::FromRow)]
pub(in crate::store) struct SkewRow {
    pub(in crate::store) rail: String,
    pub(in crate::store) chain_id: i64,
    pub(in crate::store) skew_max_ms: i64,
}

impl TryFrom<SkewRow> for (Series, u64) {
    type Error = StoreError;

    fn try_from(row: SkewRow) -> Result<Self, StoreError> {
        const TABLE: &str = "settle_latencies";
        let series = series(TABLE, &row.rail, row.chain_id)?;
        Ok((series, unsigned(TABLE, "skew_max_ms", row.skew_max_ms)?))
    }
}
