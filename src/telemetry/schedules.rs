//! What is measured about repeat schedules: samples, fits, what they promise and what was seen.

use std::collections::BTreeMap;

use prometheus::{GaugeVec, HistogramVec, IntCounterVec, Registry};

use super::{counters, gauges, histograms, seconds};
use crate::domain::{ChainId, Rail, column_code};
use crate::store::samples::{SampleCount, SampleKey};
use crate::store::schedules::{Series, Version};

column_code! {
    /// Why a settled payment is no sample.
    SkippedSample {
        /// Its row makes no sense.
        MalformedPayment = "malformed_payment",
        /// Its chain is not configured.
        ChainNotConfigured = "chain_not_configured",
        /// Its method cannot be read.
        UnsupportedMethod = "unsupported_method",
        /// The chain does not show it as settled.
        NotShown = "not_shown",
        /// Its chain answered nothing, as often as it was waited for.
        Unanswered = "unanswered",
    }
}

column_code! {
    /// What became of a fitted schedule.
    VersionOutcome {
        /// New watches take it.
        Adopted = "adopted",
        /// It is kept, and not used.
        Rejected = "rejected",
        /// Another replica was first; it was not kept.
        Superseded = "superseded",
    }
}

/// Metrics of repeat schedules.
#[derive(Clone)]
pub struct ScheduleMetrics {
    samples: IntCounterVec,
    skipped: IntCounterVec,
    skewed: IntCounterVec,
    skew: GaugeVec,
    fit_time: GaugeVec,
    expected_reads: GaugeVec,
    expected_delay: GaugeVec,
    versions: IntCounterVec,
    pub(super) checks_per_payment: HistogramVec,
}

/// From the first look to the most that a schedule makes.
const CHECKS_BUCKETS: [f64; 10] = [1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 20.0, 40.0, 80.0];

const SERIES: [&str; 2] = ["rail", "chain"];

fn labels(series: Series) -> [String; 2] {
    [series.rail.code().to_owned(), series.chain_id.to_string()]
}

impl ScheduleMetrics {
    pub(super) fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let counters = |name, help, labels: &[&str]| counters(registry, name, help, labels);
        let gauges = |name, help| gauges(registry, name, help, &SERIES);
        let metrics = Self {
            samples: counters(
                "schedule_samples_total",
                "Settled payments whose settle latency was sampled.",
                &SERIES,
            )?,
            skipped: counters(
                "schedule_samples_skipped_total",
                "Settled payments that could not be sampled, by reason.",
                &["reason"],
            )?,
            skewed: counters(
                "clock_skewed_samples_total",
                "Samples whose block is older than their broadcast.",
                &SERIES,
            )?,
            skew: gauges(
                "clock_skew_seconds",
                "The largest time by which a block was older than its broadcast, within a day.",
            )?,
            fit_time: gauges(
                "schedule_fit_timestamp_seconds",
                "When a schedule was last fitted, adopted or not; 0 before the first time.",
            )?,
            expected_reads: gauges(
                "schedule_expected_reads",
                "Reads per payment that the schedule in use promises; 0 without a fitted one.",
            )?,
            expected_delay: gauges(
                "schedule_expected_delay_seconds",
                "The detection delay that the schedule in use promises where its repeats find a settlement; 0 without a fitted one.",
            )?,
            versions: counters(
                "schedule_versions_total",
                "Fitted schedules, by what became of them.",
                &[SERIES[0], SERIES[1], "outcome"],
            )?,
            checks_per_payment: histograms(
                registry,
                "payment_checks",
                "Checks of one payment until it was found settled.",
                &SERIES,
                &CHECKS_BUCKETS,
            )?,
        };
        for reason in SkippedSample::ALL {
            metrics.skipped.with_label_values(&[reason.code()]);
        }
        Ok(metrics)
    }

    /// Makes the series of a configured chain exist from the start.
    pub(super) fn expect_chain(&self, chain_id: ChainId) {
        for rail in Rail::ALL {
            let series = labels(Series { rail: *rail, chain_id });
            for counters in [&self.samples, &self.skewed] {
                counters.with_label_values(&series);
            }
            for gauges in [&self.skew, &self.fit_time, &self.expected_reads, &self.expected_delay] {
                gauges.with_label_values(&series);
            }
            self.checks_per_payment.with_label_values(&series);
            for outcome in VersionOutcome::ALL {
                let [rail, chain] = &series;
                self.versions.with_label_values(&[rail, chain, outcome.code()]);
            }
        }
    }

    /// A page of samples was recorded.
    pub fn sampled(
        &self,
        bins: &BTreeMap<SampleKey, SampleCount>,
        skipped: &BTreeMap<SkippedSample, u64>,
    ) {
        for (key, count) in bins {
            let series = labels(key.series);
            self.samples.with_label_values(&series).inc_by(count.settled);
            self.skewed.with_label_values(&series).inc_by(count.clamped);
            let skew = self.skew.with_label_values(&series);
            skew.set(skew.get().max(count.skew_max_ms as f64 / 1_000.0));
        }
        for (reason, count) in skipped {
            self.skipped.with_label_values(&[reason.code()]).inc_by(*count);
        }
    }

    /// The largest skew of the last day, as stored.
    pub fn skew(&self, series: Series, skew_max_ms: u64) {
        self.skew.with_label_values(&labels(series)).set(skew_max_ms as f64 / 1_000.0);
    }

    /// The newest versions of every series: when the last fit was, and, where `followed`, what the one in
    /// use promises.
    pub fn in_use(&self, newest: &[Version], followed: bool) {
        for version in newest {
            let series = labels(version.fitted.series);
            let fit_time = self.fit_time.with_label_values(&series);
            fit_time.set(fit_time.get().max(seconds(version.created_at)));
            if version.fitted.adopted && followed {
                let delay = version.fitted.expected_delay_ms / 1_000.0;
                self.expected_delay.with_label_values(&series).set(delay);
                let reads = version.fitted.expected_reads;
                self.expected_reads.with_label_values(&series).set(reads);
            }
        }
    }

    /// A schedule was fitted.
    pub fn fitted(&self, series: Series, outcome: VersionOutcome) {
        let [rail, chain] = labels(series);
        self.versions.with_label_values(&[rail.as_str(), &chain, outcome.code()]).inc();
    }
}
