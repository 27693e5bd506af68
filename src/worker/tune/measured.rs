//! What was measured about a rail on a chain, put together for one fit.

use std::collections::BTreeMap;
use std::time::Duration;

use super::{ChainTuning, TuneSettings};
use crate::domain::{ChainId, Rail, Timestamp};
use crate::schedule::{Bin, Conditions, FitSettings, FoundAges, Grid, LatencyCounts, Schedule};
use crate::store::samples::{ObservedChecks, Part, SampleBin, epoch_of, epoch_start};
use crate::store::schedules::{Series, Version};
use crate::store::{Store, StoreError};
use crate::worker::sampling::{HELD_OUT_ONE_IN, bin_grid};
use crate::worker::schedules::Following;

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
    /// How old payments were when they were found, where any were found in time.
    pub found: Option<FoundAges>,
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
    let found = store.found_ages(&grids, since).await?;
    let newest = store.newest_versions().await?;
    let mut measured = Vec::new();
    for (chain_id, tuning) in chains {
        for rail in Rail::ALL {
            let series = Series { rail: *rail, chain_id: *chain_id };
            let grid = bin_grid(tuning.grid);
            let mut one = Measured::none(series, tuning.grid);
            let found = found.iter().filter(|found| found.series == series).map(|found| {
                let age = Duration::from_secs_f64(found.age_mean_ms.max(0.0) / 1_000.0);
                (age, found.payments as f64)
            });
            one.found = FoundAges::counted(found);
            let conditions = one.conditions(&tuning.settings.conditions);
            let bins = store.sample_bins(series, grid, epoch_of(since)).await?;
            let still_open = |bin: u64| {
                conditions.open_when_found(tuning.grid, usize::try_from(bin).unwrap_or(usize::MAX))
            };
            let recent_from = recent_from(&bins, now, settings.rule.samples_min, still_open);
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
            let mut versions = newest.iter().filter(|v| v.fitted.series == series);
            one.adopted = versions
                .clone()
                .find(|v| v.fitted.adopted && settings.following == Following::Adopted)
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

/// What was seen of payments that were found settled, as far back as their checks are kept whole. Only for people
/// to look at: nothing is fitted to it.
pub async fn observed(
    store: &dyn Store,
    chains: &BTreeMap<ChainId, ChainTuning>,
    settings: &TuneSettings,
    now: Timestamp,
) -> Result<Vec<ObservedChecks>, StoreError> {
    // A payment found just then may have had its first check as much earlier as its repeats last.
    let repeats = chains.values().map(|chain| chain.grid.horizon()).max().unwrap_or_default();
    let whole = settings.checks_kept_for.saturating_sub(repeats);
    store.observed_checks(now.saturating_sub(settings.window.min(whole))).await
}

/// The first epoch whose clock skew is told.
fn skewed_from(now: Timestamp) -> i64 {
    epoch_of(now).saturating_sub(SKEW_EPOCHS - 1)
}

/// By how many milliseconds blocks were older than their broadcast, at most and within a day, for every series of
/// these chains.
pub(super) async fn skews(
    store: &dyn Store,
    chains: &BTreeMap<ChainId, ChainTuning>,
    now: Timestamp,
) -> Result<BTreeMap<Series, u64>, StoreError> {
    let grids: Vec<_> = chains.iter().map(|(id, c)| (*id, bin_grid(c.grid))).collect();
    let rails = |chain_id: &ChainId| {
        let chain_id = *chain_id;
        Rail::ALL.iter().map(move |rail| (Series { rail: *rail, chain_id }, 0))
    };
    let mut skews: BTreeMap<Series, u64> = chains.keys().flat_map(rails).collect();
    skews.extend(store.clock_skews(&grids, skewed_from(now)).await?);
    Ok(skews)
}

/// A fit is judged by the payments held out in this many hours: when latency changes, a day later nothing but
/// the new one counts. With too few payments it goes further back, until there are enough.
const RECENT_EPOCHS: i64 = 24;

/// The first epoch whose held-out samples a fit is judged by; `still_open` is the share of a bin's samples that
/// count.
fn recent_from(
    bins: &[SampleBin],
    now: Timestamp,
    samples_min: f64,
    still_open: impl Fn(u64) -> f64,
) -> i64 {
    let mut from = epoch_of(now).saturating_sub(RECENT_EPOCHS - 1);
    let mut judged = 0.0;
    let held_out = bins.iter().rev().filter(|bin| bin.key.part == Part::HeldOut);
    // From the newest back, whole hours.
    for bin in held_out {
        if bin.key.epoch < from {
            if judged >= samples_min {
                break;
            }
            from = bin.key.epoch;
        }
        judged += bin.count.settled as f64 * still_open(bin.key.bin);
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
            found: None,
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
        if key.epoch >= skewed_from(now) {
            self.skew_max_ms = self.skew_max_ms.max(count.skew_max_ms);
        }
    }

    /// The settings with what was seen of how old payments are when they are found, and the prior as it is
    /// beside so many settled payments: they need not be fresh to take its place, and failed ones do not.
    pub fn settings(&self, settings: &FitSettings) -> FitSettings {
        FitSettings {
            conditions: self.conditions(&settings.conditions),
            prior: settings.prior.beside(self.fitted_to as f64),
            ..settings.clone()
        }
    }

    /// The conditions with what was seen of how old payments are when they are found.
    fn conditions(&self, conditions: &Conditions) -> Conditions {
        let found = self.found.clone().unwrap_or_else(|| conditions.found.clone());
        Conditions { found, ..*conditions }
    }

    /// The schedule in use: the adopted version, else `base`.
    pub fn in_use(&self, base: &Schedule) -> Schedule {
        let adopted = self.adopted.as_ref();
        let readable = adopted.and_then(|v| serde_json::from_value(v.fitted.policy.clone()).ok());
        readable.unwrap_or_else(|| base.clone())
    }
}
