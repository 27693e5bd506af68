//! What the fit of repeat schedules asks of a database (DESIGN section 8): samples of settle latency, the
//! place up to which they were taken, and what is known of payments that are no sample.
//!
//! Latencies are counted into the bins of a grid, so that neither rows nor memory grow with the payments.
//! What a bin's index means is the caller's to know.

mod rows;

use std::time::Duration;

use async_trait::async_trait;
use serde::Serialize;

pub(super) use self::rows::{
    FoundPlace, FoundRow, NeverRow, ObservedRow, OpenRow, SampleRow, SkewRow, stretch,
};
use super::StoreError;
use super::schedules::Series;
use crate::domain::{
    BlockTime, ChainId, MalformedPayment, Payment, PaymentId, Timestamp, column_code,
};

/// The grid that latencies of one chain are counted on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct BinGrid {
    /// The width of a bin, in milliseconds.
    pub step_ms: u64,
    /// How many bins there are; the index `bins` holds what is at or past the horizon.
    pub bins: u64,
}

/// How far the search for samples has come: the settled payments up to and including this one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Watermark {
    /// Unix microseconds: as fine as a database keeps a time, or a payment could be passed over.
    pub at_micros: i64,
    /// Among those of one moment, the last.
    pub payment_id: PaymentId,
}

impl Watermark {
    /// Before every payment that was settled at `at` or later.
    pub fn before(at: Timestamp) -> Self {
        Self { at_micros: at.as_millis().saturating_mul(1_000), payment_id: PaymentId::from("") }
    }
}

/// Settled payments, as far as one query looked.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct SettledStretch {
    /// Those that become samples, in order.
    pub payments: Vec<SettledPayment>,
    /// The last place that was looked at, whether or not a sample comes of it; `None`: there was nothing.
    pub up_to: Option<Watermark>,
    /// Whether there may be more behind it.
    pub is_full: bool,
}

/// A settled payment on its way to being a sample.
#[derive(Debug, Clone, PartialEq)]
pub struct SettledPayment {
    /// Its place in the order of settled payments.
    pub at: Watermark,
    /// The gateway's row, or what is wrong with it.
    pub payment: Result<Payment, MalformedPayment>,
    /// The time of the block that holds its transfer, where we know it already.
    pub block_time: Option<BlockTime>,
}

column_code! {
    /// What a sample is for: a schedule is fitted to one part and judged by the other.
    Part {
        /// The schedule is fitted to these.
        Fit = "fit",
        /// It is compared with the one in use by these.
        HeldOut = "held_out",
    }
}

/// Samples of one series that fall into one bin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct SampleKey {
    /// Whose.
    pub series: Series,
    /// The grid the bin belongs to.
    pub grid: BinGrid,
    /// Hours since the Unix epoch, of the block's time.
    pub epoch: i64,
    /// What they are for.
    pub part: Part,
    /// The bin, at most `grid.bins`.
    pub bin: u64,
}

/// How many samples there are, and what they sum up to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SampleCount {
    /// Settled payments.
    pub settled: u64,
    /// The sum of their latencies, in milliseconds.
    pub latency_sum_ms: u64,
    /// Those whose block is older than their broadcast: their latency counts as zero.
    pub clamped: u64,
    /// The largest such difference, in milliseconds.
    pub skew_max_ms: u64,
}

impl SampleCount {
    /// Counts one more.
    pub fn add(&mut self, other: &Self) {
        self.settled = self.settled.saturating_add(other.settled);
        self.latency_sum_ms = self.latency_sum_ms.saturating_add(other.latency_sum_ms);
        self.clamped = self.clamped.saturating_add(other.clamped);
        self.skew_max_ms = self.skew_max_ms.max(other.skew_max_ms);
    }
}

/// A bin and what is in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SampleBin {
    /// Which.
    pub key: SampleKey,
    /// What.
    pub count: SampleCount,
}

/// Payments of one series that are open and have reached the age of one bin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpenAges {
    /// Whose.
    pub series: Series,
    /// The bin of their age, at most the grid's `bins`.
    pub bin: u64,
    /// How many.
    pub payments: u64,
}

/// Payments of one series that were failed in one hour, and have not settled since.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NeverSettled {
    /// Whose.
    pub series: Series,
    /// Hours since the Unix epoch.
    pub epoch: i64,
    /// How many.
    pub payments: u64,
}

/// What was seen of payments resolved under one version.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct ObservedChecks {
    /// Whose.
    pub series: Series,
    /// The version they followed; `None`: the configured or built-in repeats.
    pub schedule_id: Option<i64>,
    /// How many payments.
    pub payments: u64,
    /// Checks per payment until it was resolved.
    pub reads_mean: f64,
    /// From the block to the resolution, in milliseconds.
    pub delay_mean_ms: f64,
    /// The longest of these.
    pub delay_max_ms: u64,
}

/// Payments of one series that were found at an age within one bin.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FoundInBin {
    /// Whose.
    pub series: Series,
    /// The bin of that age, below the grid's `bins`.
    pub bin: u64,
    /// How many.
    pub payments: u64,
    /// How old these were when they were found, in milliseconds.
    pub age_mean_ms: f64,
}

/// Samples of settle latency.
#[async_trait]
pub trait SampleStore: Send + Sync + 'static {
    /// How far the search for samples has come; `None` before the first time.
    async fn sampled_up_to(&self) -> Result<Option<Watermark>, StoreError>;

    /// The next places after `after` and not later than `until` in the order of settled payments, at most
    /// `limit` of them. A payment that the gateway settled has its place by `settled_at`, and none without
    /// it: `updated_at` moves. One that we settled has it by the time of our first resolution that did so,
    /// because its block may be older than what was sampled already. So each comes once, whatever is
    /// confirmed or written to it later. Looks at no more rows than `limit` of either kind.
    ///
    /// `lag` is how long before now `until` is. A settlement of ours that a reorg undid within it never counted,
    /// and the next one has the place instead; one that was undone later keeps it. Block times are those of the
    /// transfers that stand now.
    ///
    /// Two things are not told apart, and neither decides anything. A payment whose settlement, by the gateway,
    /// was undone and that we settled then is taken to have been counted, and lost if it was not. A payment that
    /// was counted as the gateway's, that a careless gateway then called open again, and that we settled after
    /// that, counts a second time.
    async fn settled_after(
        &self,
        after: &Watermark,
        until: Timestamp,
        lag: Duration,
        limit: u32,
    ) -> Result<SettledStretch, StoreError>;

    /// Adds samples, every key once, and moves the watermark from `from` to `to`, both or neither (I7). `false`: somebody
    /// else has moved it meanwhile, and nothing was written (I10).
    async fn record_samples(
        &self,
        from: Option<&Watermark>,
        to: &Watermark,
        bins: &[SampleBin],
        now: Timestamp,
    ) -> Result<bool, StoreError>;

    /// The samples of one series on one grid since an epoch, in order of epoch, part and bin.
    async fn sample_bins(
        &self,
        series: Series,
        grid: BinGrid,
        since_epoch: i64,
    ) -> Result<Vec<SampleBin>, StoreError>;

    /// Open payments by the age they have reached at `now`, for these chains; those that started before
    /// `since` are left out. Rows that make no sense are not counted (I11).
    async fn open_ages(
        &self,
        grids: &[(ChainId, BinGrid)],
        since: Timestamp,
        now: Timestamp,
    ) -> Result<Vec<OpenAges>, StoreError>;

    /// Payments that we failed since `since` and that are still failed.
    async fn never_settled(&self, since: Timestamp) -> Result<Vec<NeverSettled>, StoreError>;

    /// What was seen of payments that we found settled since `since`, where the block is known. Counts their
    /// checks, which are to be kept for as long.
    async fn observed_checks(&self, since: Timestamp) -> Result<Vec<ObservedChecks>, StoreError>;

    /// How old payments were when their watch opened, of those that we found settled since `since`. Beyond the
    /// grid something was down, and before the broadcast a clock is wrong: neither is counted.
    async fn found_ages(
        &self,
        grids: &[(ChainId, BinGrid)],
        since: Timestamp,
    ) -> Result<Vec<FoundInBin>, StoreError>;

    /// The largest clock skew of the samples on these grids since an epoch, in milliseconds, for every series
    /// that has any.
    async fn clock_skews(
        &self,
        grids: &[(ChainId, BinGrid)],
        since_epoch: i64,
    ) -> Result<Vec<(Series, u64)>, StoreError>;

    /// Deletes at most `limit` bins of epochs before the one of `before`. Returns how many.
    async fn prune_samples(&self, before: Timestamp, limit: u32) -> Result<u64, StoreError>;
}

/// Milliseconds in an epoch.
const EPOCH_MS: i64 = 3_600_000;

/// The epoch of a moment: hours since the Unix epoch.
pub fn epoch_of(at: Timestamp) -> i64 {
    at.as_millis().div_euclid(EPOCH_MS)
}

/// The moment at which an epoch begins.
pub fn epoch_start(epoch: i64) -> Timestamp {
    Timestamp::from_millis(epoch.saturating_mul(EPOCH_MS))
}
