//! What was measured about a rail on a chain, put together for one fit.

use std::collections::BTreeMap;
use std::time::Duration;

use super::{ChainTuning, TuneSettings};
use crate::domain::{ChainId, Rail, Timestamp};
use crate::errors::error_chain;
use crate::schedule::{Bin, Conditions, FitSettings, Grid, LatencyCounts, Schedule};
use crate::store::samples::{ObservedChecks, Part, SampleBin, epoch_of, epoch_start};
use crate::store::schedules::{Series, Version};
use crate::store::{Store, StoreError};
use crate::worker::sampling::{HELD_OUT_ONE_IN, bin_grid};

/// Everything that was measured about one series.
#[derive(Debug, Clone)]
pub struct Measured {
    /// Whose.
    pub series: Series,
    /// What a schedule is fitted to.
    pub to_fit: LatencyCounts,
    /// The same with what is held out of it: for people to look at.
    pub all: LatencyCounts,
    /// The newest of what is held out, each payment counted whole: what a fit is judged by.
    pub recent: LatencyCounts,
    /// Settled payments that a schedule is fitted to, each counted once.
    pub fitted_to: u64,
    /// Settled payments sampled, of both parts, each counted once.
    pub samples: u64,
    /// Those whose block is older than their broadcast.
    pub clamped: u64,
    /// The largest such difference within the last day, in milliseconds.
    pub skew_max_ms: u64,
    /// Payments open now.
    pub open: u64,
    /// Payments that we failed, and that have not settled since.
    pub never: u64,
    /// What was seen of payments resolved, by version.
    pub observed: Vec<ObservedChecks>,
    /// The newest version, adopted or not.
    pub newest: Option<Version>,
    /// The version in use.
    pub adopted: Option<Version>,
}

/// A clock that was wrong more than a day ago may be right by now.
const SKEW_EPOCHS: i64 = 24;

/// Reads what was measured about every series of these chains that has any samples or open payments.
pub async fn measure(
    store: &dyn Store,
    chains: &BTreeMap<ChainId, ChainTuning>,
    settings: &TuneSettings,
    now: Timestamp,
) -> Result<Vec<Measured>, StoreError> {
    let since = now.saturating_sub(settings.window);
    let grids: Vec<_> = chains.iter().map(|(id, c)| (*id, bin_grid(c.grid))).collect();
    let open = store.open_ages(&grids, since, now).await?;
    let never = store.never_settled(since).await?;
    // What the repeats are fitted to does not depend on it.
    let horizon = chains.values().map(|chain| chain.grid.horizon()).min().unwrap_or_default();
    let observed = store.observed_checks(since, horizon).await.unwrap_or_else(|error| {
        tracing::warn!(
            error = error_chain(&error),
            "what was seen of resolved payments could not be read; it is left out of this fit"
        );
        Vec::new()
    });
    let newest = store.newest_versions().await?;
    let mut measured = Vec::new();
    for (chain_id, tuning) in chains {
        for rail in Rail::ALL {
            let series = Series { rail: *rail, chain_id: *chain_id };
            let grid = bin_grid(tuning.grid);
            let mut one = Measured::none(series, tuning.grid);
            let bins = store.sample_bins(series, grid, epoch_of(since)).await?;
            let recent_from = recent_from(&bins, now, settings.rule.samples_min);
            for bin in &bins {
                one.add_samples(bin, settings.half_life, now, recent_from);
            }
            for ages in open.iter().filter(|ages| ages.series == series) {
                let age = tuning.grid.edge(usize::try_from(ages.bin).unwrap_or(usize::MAX));
                one.open += ages.payments;
                one.to_fit.add_open(age, ages.payments as f64 * (1.0 - HELD_OUT_SHARE));
                one.all.add_open(age, ages.payments as f64);
                one.recent.add_open(age, ages.payments as f64 * HELD_OUT_SHARE);
            }
            for failed in never.iter().filter(|never| never.series == series) {
                let weight = failed.payments as f64 * decay(failed.epoch, settings.half_life, now);
                one.never += failed.payments;
                one.to_fit.add_never(weight * (1.0 - HELD_OUT_SHARE));
                one.all.add_never(weight);
                if failed.epoch >= recent_from {
                    one.recent.add_never(failed.payments as f64 * HELD_OUT_SHARE);
                }
            }
            one.observed = observed.iter().filter(|o| o.series == series).copied().collect();
            let mut versions = newest.iter().filter(|v| v.fitted.series == series);
            one.adopted = versions
                .clone()
                .find(|v| v.fitted.adopted && !settings.repeats_configured)
                .cloned();
            one.newest = versions.clone().max_by_key(|v| v.id).cloned();
            let is_known = versions.next().is_some();
            if is_known || one.samples + one.open + one.never > 0 {
                measured.push(one);
            }
        }
    }
    Ok(measured)
}

/// A fit is judged by the payments held out in this many hours: when latency changes, a day later nothing but
/// the new one counts. With too few payments it goes further back, until there are enough.
const RECENT_EPOCHS: i64 = 24;

/// The first epoch whose held-out samples a fit is judged by.
fn recent_from(bins: &[SampleBin], now: Timestamp, samples_min: f64) -> i64 {
    let mut from = epoch_of(now).saturating_sub(RECENT_EPOCHS - 1);
    let mut settled = 0;
    let held_out = bins.iter().rev().filter(|bin| bin.key.part == Part::HeldOut);
    // From the newest back, whole hours.
    for bin in held_out {
        if bin.key.epoch < from {
            if settled as f64 >= samples_min {
                break;
            }
            from = bin.key.epoch;
        }
        settled += bin.count.settled;
    }
    from
}

/// The part of payments without a sample that belongs to the held-out ones: the same as of the samples.
const HELD_OUT_SHARE: f64 = 1.0 / HELD_OUT_ONE_IN as f64;

/// How much what happened in an epoch still counts.
fn decay(epoch: i64, half_life: Duration, now: Timestamp) -> f64 {
    let age = now.since(epoch_start(epoch));
    (-age.as_secs_f64() / half_life.as_secs_f64()).exp2()
}

impl Measured {
    /// Nothing yet.
    fn none(series: Series, grid: Grid) -> Self {
        Self {
            series,
            to_fit: LatencyCounts::new(grid),
            all: LatencyCounts::new(grid),
            recent: LatencyCounts::new(grid),
            fitted_to: 0,
            samples: 0,
            clamped: 0,
            skew_max_ms: 0,
            open: 0,
            never: 0,
            observed: Vec::new(),
            newest: None,
            adopted: None,
        }
    }

    fn add_samples(
        &mut self,
        bin: &SampleBin,
        half_life: Duration,
        now: Timestamp,
        recent_from: i64,
    ) {
        let (key, count) = (&bin.key, &bin.count);
        let weight = decay(key.epoch, half_life, now);
        let weighing = |weight: f64| Bin {
            index: usize::try_from(key.bin).unwrap_or(usize::MAX),
            settled: weight * count.settled as f64,
            latency_secs: weight * count.latency_sum_ms as f64 / 1_000.0,
        };
        self.all.add_bin(weighing(weight));
        match key.part {
            Part::Fit => {
                self.to_fit.add_bin(weighing(weight));
                self.fitted_to += count.settled;
            }
            Part::HeldOut if key.epoch >= recent_from => self.recent.add_bin(weighing(1.0)),
            Part::HeldOut => {}
        }
        self.samples += count.settled;
        self.clamped += count.clamped;
        if key.epoch > epoch_of(now) - SKEW_EPOCHS {
            self.skew_max_ms = self.skew_max_ms.max(count.skew_max_ms);
        }
    }

    /// The settings with what was seen of how old payments are when they are found, and the prior as it is
    /// beside so many settled payments: they need not be fresh to take its place, and failed ones do not.
    pub fn settings(&self, settings: &FitSettings) -> FitSettings {
        let found_at = self.found_at().unwrap_or(settings.conditions.found_at);
        FitSettings {
            conditions: Conditions { found_at, ..settings.conditions },
            prior: settings.prior.beside(self.fitted_to as f64),
            ..*settings
        }
    }

    /// The mean age at which payments were found that were found in time.
    fn found_at(&self) -> Option<Duration> {
        let found: u64 = self.observed.iter().map(|o| o.found_in_time).sum();
        let of_version = |o: &ObservedChecks| o.found_age_mean_ms * o.found_in_time as f64;
        let sum_ms: f64 = self.observed.iter().map(of_version).sum();
        (found > 0).then(|| Duration::from_secs_f64((sum_ms / found as f64 / 1_000.0).max(0.0)))
    }

    /// The schedule in use: the adopted version, else `base`.
    pub fn in_use(&self, base: &Schedule) -> Schedule {
        let adopted = self.adopted.as_ref();
        let readable = adopted.and_then(|v| serde_json::from_value(v.fitted.policy.clone()).ok());
        readable.unwrap_or_else(|| base.clone())
    }
}
