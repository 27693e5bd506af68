//! Fits repeat schedules to what was sampled, keeps each as a version, and adopts the better ones.
//!
//! The fit itself is pure and lives in [`crate::schedule`]. Here it gets its counts, and its answer is
//! stored whatever it is, with the reason. Replicas do not fight: a version follows the one it was compared
//! with, and of two that follow the same one the database takes the first (I10).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use async_trait::async_trait;

use super::driver::{Activation, Stop, Task};
use super::sampling::{HELD_OUT_ONE_IN, bin_grid};
use super::schedules::Schedules;
use crate::clock::Clock;
use crate::domain::{ChainId, Rail, Timestamp};
use crate::schedule::{
    Adoption, AdoptionRule, Bin, Conditions, Expected, FitSettings, Fitted, Grid, LatencyCounts,
    Schedule, SettingsError, Survival, adopt, expected, fit,
};
use crate::store::schedules::{
    NewVersion, ObservedChecks, Part, Series, Version, epoch_of, epoch_start,
};
use crate::store::{Store, StoreError};
use crate::telemetry::{Metrics, VersionOutcome};

/// What is fitted for one chain.
#[derive(Debug, Clone)]
pub struct ChainTuning {
    /// What latencies are counted on.
    pub grid: Grid,
    /// What a schedule is fitted for.
    pub settings: FitSettings,
}

/// What is fitted for all of them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TuneSettings {
    /// Samples older than this are not used.
    pub window: Duration,
    /// A sample this old counts half.
    pub half_life: Duration,
    /// When a fit replaces the one in use.
    pub rule: AdoptionRule,
    /// Whether a better version is adopted by itself.
    pub auto_adopt: bool,
    /// Whether the repeats are configured, and override every version.
    pub repeats_configured: bool,
}

impl TuneSettings {
    /// Why no version is adopted, if none is to be.
    fn not_adopting(&self) -> Option<&'static str> {
        if self.repeats_configured {
            Some("checks.repeats is set and overrides every version")
        } else {
            (!self.auto_adopt).then_some("schedule.auto_adopt is off")
        }
    }
}

/// Everything that was measured about one series.
#[derive(Debug, Clone)]
pub struct Measured {
    /// Whose.
    pub series: Series,
    /// What a schedule is fitted to.
    pub to_fit: LatencyCounts,
    /// What it is judged by.
    pub held_out: LatencyCounts,
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

/// A fit, and whether it is better than the schedule in use.
#[derive(Debug, Clone)]
pub struct Proposal {
    /// The fit.
    pub fitted: Fitted,
    /// Whether it replaces the schedule in use, and why.
    pub adoption: Adoption,
    /// What the held-out samples expect of both; `None` when there are none.
    pub comparison: Option<Comparison>,
}

/// Old against new, on the samples that were held out.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Comparison {
    /// The schedule in use.
    pub in_use: Expected,
    /// The fit.
    pub candidate: Expected,
}

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
    let observed = store.observed_checks(since).await?;
    let newest = store.newest_versions().await?;
    let mut measured = Vec::new();
    for (chain_id, tuning) in chains {
        for rail in Rail::ALL {
            let series = Series { rail: *rail, chain_id: *chain_id };
            let grid = bin_grid(tuning.grid);
            let mut one = Measured::none(series, tuning.grid);
            for bin in store.sample_bins(series, grid, epoch_of(since)).await? {
                one.add_samples(&bin, settings.half_life, now);
            }
            for ages in open.iter().filter(|ages| ages.series == series) {
                let age = tuning.grid.edge(usize::try_from(ages.bin).unwrap_or(usize::MAX));
                one.open += ages.payments;
                one.to_fit.add_open(age, ages.payments as f64 * (1.0 - HELD_OUT_SHARE));
                one.held_out.add_open(age, ages.payments as f64 * HELD_OUT_SHARE);
            }
            for failed in never.iter().filter(|never| never.series == series) {
                let weight = failed.payments as f64 * decay(failed.epoch, settings.half_life, now);
                one.never += failed.payments;
                one.to_fit.add_never(weight * (1.0 - HELD_OUT_SHARE));
                one.held_out.add_never(weight * HELD_OUT_SHARE);
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
            held_out: LatencyCounts::new(grid),
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
        bin: &crate::store::schedules::SampleBin,
        half_life: Duration,
        now: Timestamp,
    ) {
        let (key, count) = (&bin.key, &bin.count);
        let weight = decay(key.epoch, half_life, now);
        let counts = match key.part {
            Part::Fit => &mut self.to_fit,
            Part::HeldOut => &mut self.held_out,
        };
        counts.add_bin(Bin {
            index: usize::try_from(key.bin).unwrap_or(usize::MAX),
            settled: weight * count.settled as f64,
            latency_secs: weight * count.latency_sum_ms as f64 / 1_000.0,
        });
        self.samples += count.settled;
        self.clamped += count.clamped;
        if key.epoch > epoch_of(now) - SKEW_EPOCHS {
            self.skew_max_ms = self.skew_max_ms.max(count.skew_max_ms);
        }
    }

    /// The settings with what was seen of how old payments are when they are found.
    pub fn settings(&self, settings: &FitSettings) -> FitSettings {
        let found: u64 = self.observed.iter().map(|o| o.payments).sum();
        if found == 0 {
            return *settings;
        }
        let sum: f64 = self.observed.iter().map(|o| o.found_age_mean_ms * o.payments as f64).sum();
        // A mean beyond the horizon says that payments are found late, and nothing about the repeats.
        let horizon = self.to_fit.grid().horizon().as_secs_f64();
        let found_at = (sum / found as f64 / 1_000.0).clamp(0.0, horizon);
        let found_at = Duration::from_secs_f64(found_at);
        FitSettings { conditions: Conditions { found_at, ..settings.conditions }, ..*settings }
    }

    /// The schedule in use: the adopted version, else `base`.
    pub fn in_use(&self, base: &Schedule) -> Schedule {
        let adopted = self.adopted.as_ref();
        let readable = adopted.and_then(|v| serde_json::from_value(v.fitted.policy.clone()).ok());
        readable.unwrap_or_else(|| base.clone())
    }

    /// Fits a schedule and compares it with the one in use. Takes up to some tenths of a second.
    pub fn propose(
        &self,
        settings: &FitSettings,
        in_use: &Schedule,
        rule: &AdoptionRule,
    ) -> Result<Proposal, SettingsError> {
        let settings = self.settings(settings);
        let fitted = fit(&self.to_fit, &settings)?;
        let conditions = &settings.conditions;
        let adoption = adopt(&fitted, in_use, &self.held_out, conditions, rule);
        let comparison = (self.held_out.samples() > 0.0).then(|| {
            let recent = Survival::measured(&self.held_out);
            Comparison {
                in_use: expected(in_use, &recent, conditions),
                candidate: expected(&fitted.schedule, &recent, conditions),
            }
        });
        Ok(Proposal { fitted, adoption, comparison })
    }
}

/// A proposal as it was stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stored {
    /// What became of it.
    pub outcome: VersionOutcome,
    /// The version, unless it was superseded.
    pub id: Option<i64>,
    /// Why it was adopted, or why not.
    pub reason: String,
}

/// Stores a proposal as a version, adopted or not.
pub async fn store_version(
    store: &dyn Store,
    measured: &Measured,
    proposal: &Proposal,
    settings: &TuneSettings,
    now: Timestamp,
) -> anyhow::Result<Stored> {
    let (adopted, reason) = match (&proposal.adoption, settings.not_adopting()) {
        (Adoption::Keep { why }, _) => (false, why.clone()),
        (Adoption::Adopt { why }, Some(not)) => (false, format!("{not}; {why}")),
        (Adoption::Adopt { why }, None) => (true, why.clone()),
    };
    let fitted = &proposal.fitted;
    let version = NewVersion {
        series: measured.series,
        previous_id: measured.newest.as_ref().map(|newest| newest.id),
        policy: serde_json::to_value(&fitted.schedule).context("a schedule is JSON")?,
        sample_size: measured.samples,
        window_ms: u64::try_from(settings.window.as_millis()).unwrap_or(u64::MAX),
        expected_reads: fitted.expected.reads,
        expected_delay_ms: fitted.expected.delay_secs * 1_000.0,
        never_share: fitted.survival.never(),
        adopted,
        reason,
    };
    let id = store.add_version(&version, now).await?;
    let outcome = match id {
        None => VersionOutcome::Superseded,
        Some(_) if adopted => VersionOutcome::Adopted,
        Some(_) => VersionOutcome::Rejected,
    };
    Ok(Stored { outcome, id, reason: version.reason })
}

/// Fits regularly.
pub struct Tuning {
    /// The database.
    pub store: Arc<dyn Store>,
    /// What to fit, per chain.
    pub chains: BTreeMap<ChainId, ChainTuning>,
    /// The configured or built-in repeats.
    pub base: Schedule,
    /// How.
    pub settings: TuneSettings,
    /// How often; a fit that another replica made within half of it is not made again.
    pub every: Duration,
    /// Takes up what is adopted.
    pub schedules: Arc<Schedules>,
    /// The clock.
    pub clock: Arc<dyn Clock>,
    /// What became of it.
    pub metrics: Metrics,
}

/// Rows pruned in one statement.
const PRUNE_BATCH: u32 = 5_000;

impl Tuning {
    /// Fits every series that has samples and no recent fit. One that cannot be fitted keeps no other from
    /// it; the first error is returned at the end.
    pub async fn tune(&self, stop: &Stop) -> anyhow::Result<Vec<(Series, VersionOutcome)>> {
        let now = self.clock.now();
        let measured = measure(self.store.as_ref(), &self.chains, &self.settings, now).await?;
        let mut outcomes = Vec::new();
        let mut first_error = None;
        for one in measured {
            if stop.is_requested() {
                break;
            }
            let series = one.series;
            self.metrics.schedules.skew(series, one.skew_max_ms);
            let last_fit = one.newest.as_ref().map(|newest| newest.created_at);
            let is_recent = last_fit.is_some_and(|at| now.since(at) < self.every / 2);
            if one.samples == 0 || is_recent {
                continue;
            }
            match self.tune_one(one).await {
                Ok(outcome) => {
                    self.metrics.schedules.fitted(series, outcome);
                    outcomes.push((series, outcome));
                }
                Err(error) => {
                    first_error.get_or_insert(error);
                }
            }
        }
        match first_error {
            Some(error) => Err(error),
            None => Ok(outcomes),
        }
    }

    async fn tune_one(&self, measured: Measured) -> anyhow::Result<VersionOutcome> {
        let series = measured.series;
        let settings = self.chains.get(&series.chain_id).context("the chain is configured")?;
        let (settings, rule) = (settings.settings, self.settings.rule);
        let in_use = measured.in_use(&self.base);
        // Not on a thread that others wait for.
        let (measured, proposal) = tokio::task::spawn_blocking(move || {
            let proposal = measured.propose(&settings, &in_use, &rule);
            (measured, proposal)
        })
        .await?;
        let proposal = proposal?;
        let now = self.clock.now();
        let stored =
            store_version(self.store.as_ref(), &measured, &proposal, &self.settings, now).await?;
        let Stored { outcome, id, reason } = stored;
        let (rail, chain) = (series.rail, series.chain_id);
        let samples = measured.samples;
        tracing::info!(%rail, %chain, schedule = id, %outcome, samples, reason, "a schedule was fitted");
        Ok(outcome)
    }
}

#[async_trait]
impl Task for Tuning {
    fn name(&self) -> &'static str {
        "tuning"
    }

    async fn activate(&self, stop: &Stop) -> anyhow::Result<Activation> {
        let tuned = self.tune(stop).await;
        let newest = self.schedules.refresh(self.store.as_ref()).await?;
        self.metrics.schedules.in_use(&newest);
        let before = self.clock.now().saturating_sub(self.settings.window);
        self.store.prune_schedules(before, PRUNE_BATCH).await?;
        tuned?;
        Ok(Activation::default())
    }
}
