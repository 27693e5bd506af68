//! Fits repeat schedules to what was sampled, keeps each as a version, and adopts the better ones.
//!
//! The fit itself is pure and lives in [`crate::schedule`]. Here it gets its counts, and its answer is
//! stored whatever it is, with the reason. Replicas do not fight: a version follows the one it was compared
//! with, and of two that follow the same one the database takes the first (I10).

mod measured;
mod proposal;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use async_trait::async_trait;

use self::measured::skews;
pub use self::measured::{Measured, measure, observed};
pub use self::proposal::{Comparison, Proposal, Stored, store_version};
use super::driver::{Activation, Stop, Task};
use super::schedules::{Following, Schedules};
use crate::clock::Clock;
use crate::domain::{ChainId, Timestamp};
use crate::schedule::{AdoptionRule, FitSettings, Grid, Schedule};
use crate::store::schedules::Series;
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
    /// Which schedules watches follow.
    pub following: Following,
    /// How long checks are kept: what was observed longer ago is not whole any more.
    pub checks_kept_for: Duration,
}

impl TuneSettings {
    /// Why no version is adopted, if none is to be.
    fn not_adopting(&self) -> Option<&'static str> {
        match self.following {
            Following::Configured => Some("checks.repeats is set and overrides every version"),
            Following::Started => {
                Some("schedule.enabled is off, and new watches take the built-in repeats")
            }
            Following::Adopted => (!self.auto_adopt).then_some("schedule.auto_adopt is off"),
        }
    }
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
/// Such statements in one activation; the next goes on.
const PRUNE_BATCHES_MAX: u32 = 100;

impl Tuning {
    /// Fits every series that has samples and no recent fit. One that cannot be fitted keeps no other from
    /// it; the first error is returned at the end.
    pub async fn tune(&self, stop: &Stop) -> anyhow::Result<Vec<(Series, VersionOutcome)>> {
        let now = self.clock.now();
        let chains = self.due(now).await?;
        if chains.is_empty() {
            return Ok(Vec::new());
        }
        let measured = measure(self.store.as_ref(), &chains, &self.settings, now).await?;
        let mut outcomes = Vec::new();
        let mut first_error = None;
        for one in measured {
            if stop.is_requested() {
                break;
            }
            let series = one.series;
            let last_fit = one.newest.as_ref().map(|newest| newest.created_at);
            if one.samples == 0 || last_fit.is_some_and(|at| self.is_recent(at, now)) {
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

    /// Tells how far clocks were apart within a day: whoever fits, and whoever took the samples, every replica
    /// tells the same, and it falls.
    async fn tell_skews(&self) -> Result<(), StoreError> {
        let skews = skews(self.store.as_ref(), &self.chains, self.clock.now()).await?;
        for (series, skew_max_ms) in skews {
            self.metrics.schedules.skew(series, skew_max_ms);
        }
        Ok(())
    }

    /// The chains whose fits are not all recent. Asked before anything is counted, which takes the database
    /// much longer.
    async fn due(&self, now: Timestamp) -> Result<BTreeMap<ChainId, ChainTuning>, StoreError> {
        let mut last_fits: BTreeMap<Series, Timestamp> = BTreeMap::new();
        for version in self.store.newest_versions().await? {
            let last = last_fits.entry(version.fitted.series).or_insert(version.created_at);
            *last = version.created_at.max(*last);
        }
        let is_due = |chain_id: ChainId| {
            let mut fits = last_fits.iter().filter(|(series, _)| series.chain_id == chain_id);
            let is_recent = |(_, at): (_, &Timestamp)| self.is_recent(*at, now);
            fits.clone().next().is_none() || !fits.all(is_recent)
        };
        let due = self.chains.iter().filter(|(chain_id, _)| is_due(**chain_id));
        Ok(due.map(|(chain_id, tuning)| (*chain_id, tuning.clone())).collect())
    }

    /// Whether a fit is so new that another one is not due.
    fn is_recent(&self, fitted_at: Timestamp, now: Timestamp) -> bool {
        now.since(fitted_at) < self.every / 2
    }

    /// Deletes what is older than the window.
    async fn prune(&self, stop: &Stop) -> Result<(), StoreError> {
        let before = self.clock.now().saturating_sub(self.settings.window);
        for _ in 0..PRUNE_BATCHES_MAX {
            let pruned = self.store.prune_samples(before, PRUNE_BATCH).await?;
            if pruned < u64::from(PRUNE_BATCH) || stop.is_requested() {
                break;
            }
        }
        self.store.prune_schedules(before, PRUNE_BATCH).await?;
        Ok(())
    }

    async fn tune_one(&self, measured: Measured) -> anyhow::Result<VersionOutcome> {
        let series = measured.series;
        let settings = self.chains.get(&series.chain_id).context("the chain is configured")?;
        let (settings, rule) = (settings.settings.clone(), self.settings.rule);
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
        let samples = measured.fitted_to;
        if let Some(budget) = proposal.fitted.unmet_budget {
            let fewest = proposal.fitted.expected.reads;
            tracing::warn!(
                %rail, %chain, budget, fewest,
                "schedule.reads_budget cannot be kept with this gap_max and repeat_for"
            );
        }
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
        let told = self.tell_skews().await;
        let tuned = self.tune(stop).await;
        let newest = self.schedules.refresh(self.store.as_ref()).await?;
        self.metrics.schedules.in_use(&newest, self.schedules.adopts());
        self.prune(stop).await?;
        told?;
        tuned?;
        Ok(Activation::default())
    }
}
