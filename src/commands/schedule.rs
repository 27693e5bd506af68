//! `reconciled schedule`: shows how long payments take to settle and when they are checked, and fits now.
//!
//! Nothing here talks to a chain. `show` and `tune` only look; `tune --apply` adds a version.

mod change;
mod picture;
mod words;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use serde_json::Value;

use self::change::Change;
use self::picture::Picture;
use super::Ending;
use super::output::{say, say_text};
use crate::cli::{ScheduleArgs, ScheduleCommand, SeriesArgs};
use crate::clock::{Clock, SystemClock};
use crate::config::{Config, ConfigError};
use crate::domain::{ChainId, Timestamp};
use crate::schedule::{Schedule, Survival};
use crate::store::samples::ObservedChecks;
use crate::store::schedules::Series;
use crate::store::{Store, connect};
use crate::telemetry::VersionOutcome;
use crate::worker::tune::{ChainTuning, Measured, TuneSettings, measure, observed, store_version};

/// Shows or fits.
pub async fn schedule(args: &ScheduleArgs) -> anyhow::Result<Ending> {
    let config = Config::load(&args.config.config)?;
    match &args.command {
        ScheduleCommand::Show { series, json, svg } => {
            let bench = Bench::open(&config, series).await?;
            let observed =
                observed(bench.store.as_ref(), &bench.chains, &bench.settings, bench.now);
            bench.show(&observed.await?, *json, svg.as_deref())
        }
        ScheduleCommand::Tune { series, json, apply } => {
            let bench = Bench::open(&config, series).await?;
            bench.tune(*json, *apply).await
        }
    }
}

/// What both commands work with.
struct Bench {
    store: Arc<dyn Store>,
    chains: BTreeMap<ChainId, ChainTuning>,
    base: Schedule,
    settings: TuneSettings,
    measured: Vec<Measured>,
    now: Timestamp,
}

impl Bench {
    async fn open(config: &Config, wanted: &SeriesArgs) -> anyhow::Result<Self> {
        config.validate_limits()?;
        // No endpoint is asked anything, so a URL that only the daemon's environment holds may be missing.
        let configured = config.chains(|_| Some("http://127.0.0.1".to_owned()))?;
        let chain = wanted.chain.map(ChainId::new);
        let chains: BTreeMap<ChainId, ChainTuning> = configured
            .into_iter()
            .map(|c| (c.settings.chain_id, ChainTuning { grid: c.grid, settings: c.fit }))
            .filter(|(id, _)| chain.is_none_or(|chain| chain == *id))
            .collect();
        if let Some(chain) = chain.filter(|_| chains.is_empty()) {
            return Err(usage("--chain", format!("{chain} is not configured")).into());
        }
        let store = connect(&config.database_url()?, config.database.connections_max).await?;
        store.verify_schema().await?;
        let settings = config.tune_settings();
        let now = SystemClock.now();
        let mut measured = measure(store.as_ref(), &chains, &settings, now).await?;
        measured.retain(|one| wanted.rail.is_none_or(|rail| rail == one.series.rail));
        let base = config.repeats()?;
        Ok(Self { store, chains, base, settings, measured, now })
    }

    fn chain(&self, series: Series) -> anyhow::Result<&ChainTuning> {
        self.chains.get(&series.chain_id).context("only configured chains are measured")
    }

    fn show(
        &self,
        observed: &[ObservedChecks],
        json: bool,
        svg: Option<&Path>,
    ) -> anyhow::Result<Ending> {
        let pictures = self
            .measured
            .iter()
            .map(|one| self.picture(one, observed))
            .collect::<anyhow::Result<Vec<_>>>()?;
        if let Some(path) = svg {
            let [picture] = &pictures[..] else {
                let problem = format!(
                    "draws one rail on one chain, and there are {}; name one with --rail and --chain",
                    pictures.len()
                );
                return Err(usage("--svg", problem).into());
            };
            std::fs::write(path, picture.plot().svg())
                .with_context(|| format!("{} cannot be written", path.display()))?;
        }
        if json {
            let values: Vec<Value> = pictures.iter().map(Picture::json).collect();
            say!("{}", serde_json::to_string_pretty(&values)?)?;
        } else if pictures.is_empty() {
            say!("nothing was measured yet: no payment was sampled, and none is open")?;
        } else {
            let texts: Vec<String> = pictures.iter().map(Picture::text).collect();
            say_text!("{}", texts.join("\n"))?;
        }
        Ok(Ending::Good)
    }

    fn picture<'a>(
        &self,
        measured: &'a Measured,
        observed: &[ObservedChecks],
    ) -> anyhow::Result<Picture<'a>> {
        let settings = measured.settings(&self.chain(measured.series)?.settings);
        let in_use = measured.in_use(&self.base);
        let found_at = settings.conditions.found.median();
        Ok(Picture {
            measured,
            observed: observed.iter().filter(|o| o.series == measured.series).copied().collect(),
            survival: Survival::estimate(&measured.all, &settings.prior),
            prior_weight: settings.prior.weight,
            checks: in_use.ages_after(found_at),
            found_at,
            title: format!("{} on chain {}", measured.series.rail, measured.series.chain_id),
            window: self.settings.window,
            now: self.now,
        })
    }

    async fn tune(&self, json: bool, apply: bool) -> anyhow::Result<Ending> {
        let mut values = Vec::new();
        let mut ending = Ending::Good;
        for measured in &self.measured {
            let chain = self.chain(measured.series)?;
            let in_use = measured.in_use(&self.base);
            let rule = &self.settings.rule;
            let proposal = measured.propose(&chain.settings, &in_use, rule)?;
            let stored = if apply {
                // The person at the terminal asked for it.
                let settings = TuneSettings { auto_adopt: true, ..self.settings };
                let store = self.store.as_ref();
                Some(store_version(store, measured, &proposal, &settings, self.now).await?)
            } else {
                None
            };
            if stored.as_ref().is_some_and(|s| s.outcome == VersionOutcome::Superseded) {
                ending = Ending::Wrong;
            }
            let found_at = measured.settings(&chain.settings).conditions.found.median();
            let change = Change { measured, proposal, in_use, found_at, stored };
            if json {
                values.push(change.json());
            } else {
                say_text!("{}", change.text())?;
            }
        }
        if json {
            say!("{}", serde_json::to_string_pretty(&values)?)?;
        } else if self.measured.is_empty() {
            say!("nothing was measured yet: no payment was sampled, and none is open")?;
        } else if !apply {
            say!(
                "nothing was changed; --apply keeps each as a version and takes up the better ones"
            )?;
        }
        Ok(ending)
    }
}

fn usage(key: &str, problem: String) -> ConfigError {
    ConfigError::Value { key: key.to_owned(), problem }
}
