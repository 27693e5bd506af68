//! `reconciled schedule`: shows how long payments take to settle and when they are checked, and fits now.
//!
//! Nothing here talks to a chain. `show` and `tune` only look; `tune --apply` adds a version.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use serde_json::{Value, json};

use super::Ending;
use super::output::{say, say_text};
use crate::cli::{ScheduleArgs, ScheduleCommand, SeriesArgs};
use crate::clock::{Clock, SystemClock};
use crate::config::{Config, ConfigError};
use crate::domain::{ChainId, Timestamp};
use crate::schedule::{Adoption, Expected, Plot, Schedule, Survival};
use crate::store::schedules::{ObservedChecks, Series, Version};
use crate::store::{Store, connect};
use crate::telemetry::VersionOutcome;
use crate::worker::tune::{
    ChainTuning, Measured, Proposal, Stored, TuneSettings, measure, store_version,
};

/// Columns and rows of a plot in a terminal.
const PLOT_WIDTH: usize = 72;
const PLOT_HEIGHT: usize = 8;

/// Shows or fits.
pub async fn schedule(args: &ScheduleArgs) -> anyhow::Result<Ending> {
    let config = Config::load(&args.config.config)?;
    match &args.command {
        ScheduleCommand::Show { series, json, svg } => {
            let bench = Bench::open(&config, series).await?;
            bench.show(*json, svg.as_deref())
        }
        ScheduleCommand::Tune { series, json, apply } => {
            let bench = Bench::open(&config, series).await?;
            bench.tune(*json, *apply).await
        }
    }
}

/// What both commands work with.
struct Bench {
    store: std::sync::Arc<dyn Store>,
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

    fn show(&self, json: bool, svg: Option<&Path>) -> anyhow::Result<Ending> {
        let pictures = self
            .measured
            .iter()
            .map(|one| self.picture(one))
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

    fn picture<'a>(&self, measured: &'a Measured) -> anyhow::Result<Picture<'a>> {
        let settings = measured.settings(&self.chain(measured.series)?.settings);
        let in_use = measured.in_use(&self.base);
        let found_at = settings.conditions.found_at;
        Ok(Picture {
            measured,
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
            let found_at = measured.settings(&chain.settings).conditions.found_at;
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

/// One series, measured, with the schedule in use.
struct Picture<'a> {
    measured: &'a Measured,
    survival: Survival,
    prior_weight: f64,
    checks: Vec<Duration>,
    found_at: Duration,
    title: String,
    window: Duration,
    now: Timestamp,
}

/// The shares whose latency is told.
const QUANTILES: [(&str, f64); 4] = [("p50", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99)];

impl Picture<'_> {
    fn plot(&self) -> Plot<'_> {
        Plot { title: &self.title, survival: &self.survival, checks: &self.checks }
    }

    fn text(&self) -> String {
        let m = self.measured;
        let mut out = self.plot().text(PLOT_WIDTH, PLOT_HEIGHT);
        let mut row = |name: &str, text: String| out.push_str(&format!("{name:<12} {text}\n"));
        let prior = if self.prior_weight > 0.0 {
            format!("; a built-in belief counts as {:.0} more", self.prior_weight)
        } else {
            String::new()
        };
        row(
            "samples",
            format!(
                "{} settled within {}, {} open now, {} failed{prior}",
                m.samples,
                short(self.window),
                m.open,
                m.never
            ),
        );
        let quantiles = QUANTILES.map(|(name, share)| {
            format!("{name} {}", self.survival.quantile(share).map_or("beyond".to_owned(), short))
        });
        let never = 100.0 * self.survival.never();
        // Without samples there is only the belief, and the ages of what is open.
        let believed = if m.samples == 0 { " (believed)" } else { "" };
        row("latency", format!("{}, never {never:.1} %{believed}", quantiles.join(", ")));
        if m.clamped > 0 {
            let worst = short(Duration::from_millis(m.skew_max_ms));
            let n = m.clamped;
            row(
                "clock skew",
                format!("{n} blocks older than their broadcast, by {worst} at most within a day"),
            );
        }
        match &m.adopted {
            Some(version) => row("in use", told(version, self.now)),
            None => row("in use", "the configured or built-in repeats".to_owned()),
        }
        let found = short(self.found_at);
        row(
            "checks at",
            format!("{} (found at {found}, ages since the broadcast)", ages(&self.checks)),
        );
        if let Some(version) = &m.adopted {
            let f = &version.fitted;
            row("expected", figures(f.expected_reads, f.expected_delay_ms / 1_000.0));
        }
        for seen in &m.observed {
            row("observed", observed(seen));
        }
        if let Some(newest) = m.newest.as_ref().filter(|n| !n.fitted.adopted) {
            row("last fit", told(newest, self.now));
        }
        out
    }

    fn json(&self) -> Value {
        let m = self.measured;
        let quantiles: serde_json::Map<String, Value> = QUANTILES
            .iter()
            .map(|(name, share)| {
                ((*name).to_owned(), json!(self.survival.quantile(*share).map(|d| d.as_secs_f64())))
            })
            .collect();
        let grid = self.survival.grid();
        let edges: Vec<usize> = (0..=grid.bins())
            .filter(|i| *i == 0 || self.survival.at(*i) < self.survival.at(*i - 1))
            .collect();
        let open: Vec<(f64, f64)> =
            edges.into_iter().map(|i| (grid.edge_secs(i), self.survival.at(i))).collect();
        json!({
            "rail": m.series.rail,
            "chain_id": m.series.chain_id,
            "samples": m.samples,
            "window_seconds": self.window.as_secs(),
            "open": m.open,
            "failed": m.never,
            "prior_weight": self.prior_weight,
            "latency_seconds": quantiles,
            "never_share": self.survival.never(),
            "still_open": open,
            "clamped": m.clamped,
            "clock_skew_seconds": m.skew_max_ms as f64 / 1_000.0,
            "found_at_seconds": self.found_at.as_secs_f64(),
            "checks_seconds": seconds(&self.checks),
            "in_use": m.adopted.as_ref().map(version_json),
            "last_fit": m.newest.as_ref().map(version_json),
            "observed": m.observed.iter().map(observed_json).collect::<Vec<_>>(),
        })
    }
}

/// What a fit would change, or has changed.
struct Change<'a> {
    measured: &'a Measured,
    proposal: Proposal,
    in_use: Schedule,
    found_at: Duration,
    stored: Option<Stored>,
}

impl Change<'_> {
    fn why(&self) -> (bool, &str) {
        match &self.proposal.adoption {
            Adoption::Adopt { why } => (true, why),
            Adoption::Keep { why } => (false, why),
        }
    }

    fn text(&self) -> String {
        let Series { rail, chain_id } = self.measured.series;
        let fitted = &self.proposal.fitted;
        let mut out = format!("{rail} on chain {chain_id}: {} samples\n", self.measured.samples);
        let mut row = |name: &str, text: String| out.push_str(&format!("  {name:<10} {text}\n"));
        row("checks now", ages(&self.in_use.ages_after(self.found_at)));
        row("fitted", ages(&fitted.schedule.ages_after(self.found_at)));
        if let Some(comparison) = &self.proposal.comparison {
            let told = |e: &Expected| figures(e.reads, e.delay_secs);
            row("expected", format!("now {}", told(&comparison.in_use)));
            row("", format!("fitted {}", told(&comparison.candidate)));
        }
        if let Some(budget) = fitted.unmet_budget {
            let fewest = fitted.expected.reads;
            row("budget", format!("{budget} reads cannot be kept; {fewest:.2} are the fewest"));
        }
        let (better, why) = self.why();
        row(if better { "better" } else { "not better" }, why.to_owned());
        if let Some(Stored { outcome, id, reason }) = &self.stored {
            let id = id.unwrap_or_default();
            let words = match outcome {
                VersionOutcome::Adopted => format!("adopted as version {id}: new watches take it"),
                VersionOutcome::Rejected => {
                    format!("kept as version {id} and not used: {reason}")
                }
                VersionOutcome::Superseded => {
                    "not kept: another fit was first; try again".to_owned()
                }
            };
            row("outcome", words);
        }
        out
    }

    fn json(&self) -> Value {
        let fitted = &self.proposal.fitted;
        let (better, why) = self.why();
        let told = |e: &Expected| json!({ "reads": e.reads, "delay_seconds": e.delay_secs, "missed_share": e.missed });
        json!({
            "rail": self.measured.series.rail,
            "chain_id": self.measured.series.chain_id,
            "samples": self.measured.samples,
            "better": better,
            "why": why,
            "in_use": {
                "version": self.measured.adopted.as_ref().map(|version| version.id),
                "checks_seconds": seconds(&self.in_use.ages_after(self.found_at)),
                "held_out": self.proposal.comparison.map(|c| told(&c.in_use)),
            },
            "fitted": {
                "checks_seconds": seconds(&fitted.schedule.ages_after(self.found_at)),
                "expected": told(&fitted.expected),
                "held_out": self.proposal.comparison.map(|c| told(&c.candidate)),
                "budget_kept": fitted.unmet_budget.is_none(),
                "read_price": fitted.prices.read,
                "delay_price": fitted.prices.delay_second,
            },
            "outcome": self.stored.as_ref().map(|stored| stored.outcome),
            "version": self.stored.as_ref().and_then(|stored| stored.id),
        })
    }
}

fn version_json(version: &Version) -> Value {
    let f = &version.fitted;
    json!({
        "version": version.id,
        "created_at": version.created_at.to_string(),
        "adopted": f.adopted,
        "reason": f.reason,
        "sample_size": f.sample_size,
        "window_seconds": f.window_ms / 1_000,
        "expected_reads": f.expected_reads,
        "expected_delay_seconds": f.expected_delay_ms / 1_000.0,
        "never_share": f.never_share,
    })
}

fn observed_json(seen: &ObservedChecks) -> Value {
    json!({
        "version": seen.schedule_id,
        "payments": seen.payments,
        "reads_mean": seen.reads_mean,
        "delay_mean_seconds": seen.delay_mean_ms / 1_000.0,
        "delay_max_seconds": seen.delay_max_ms as f64 / 1_000.0,
    })
}

fn told(version: &Version, now: Timestamp) -> String {
    let f = &version.fitted;
    format!(
        "version {}, fitted {} ago to {} samples; {}: {}",
        version.id,
        short(Duration::from_secs(now.since(version.created_at).as_secs())),
        f.sample_size,
        if f.adopted { "adopted" } else { "not adopted" },
        f.reason
    )
}

fn observed(seen: &ObservedChecks) -> String {
    let version = match seen.schedule_id {
        Some(id) => format!("version {id}"),
        None => "configured or built-in repeats".to_owned(),
    };
    let longest = short(Duration::from_millis(seen.delay_max_ms));
    let told = figures(seen.reads_mean, seen.delay_mean_ms / 1_000.0);
    format!("{told}, at most {longest}; {} payments, {version}", seen.payments)
}

fn figures(reads: f64, delay_secs: f64) -> String {
    format!("{reads:.2} reads per payment, {delay_secs:.2} s of delay")
}

fn seconds(ages: &[Duration]) -> Vec<f64> {
    ages.iter().map(Duration::as_secs_f64).collect()
}

fn ages(ages: &[Duration]) -> String {
    let ages: Vec<String> = ages.iter().map(|age| short(*age)).collect();
    if ages.is_empty() { "none".to_owned() } else { ages.join(" ") }
}

/// A duration for people, to a tenth of a second.
fn short(duration: Duration) -> String {
    let secs = duration.as_secs_f64();
    if secs < 60.0 {
        let text = format!("{secs:.1}");
        return format!("{}s", text.strip_suffix(".0").unwrap_or(&text));
    }
    humantime::format_duration(Duration::from_secs(duration.as_secs())).to_string().replace(' ', "")
}
