//! A series as it was measured, with the schedule in use: drawn, told, and as JSON.

use std::time::Duration;

use serde_json::{Value, json};

use super::words::{ages, figures, seconds, short};
use crate::domain::Timestamp;
use crate::schedule::{Plot, Survival};
use crate::store::samples::ObservedChecks;
use crate::store::schedules::Version;
use crate::worker::tune::Measured;

/// Columns and rows of a plot in a terminal.
const PLOT_WIDTH: usize = 72;
const PLOT_HEIGHT: usize = 8;

/// One series, measured, with the schedule in use.
pub(super) struct Picture<'a> {
    pub(super) measured: &'a Measured,
    /// What was seen of payments resolved, by version.
    pub(super) observed: Vec<ObservedChecks>,
    pub(super) survival: Survival,
    pub(super) prior_weight: f64,
    pub(super) checks: Vec<Duration>,
    pub(super) found_at: Duration,
    pub(super) title: String,
    pub(super) window: Duration,
    pub(super) now: Timestamp,
}

/// The shares whose latency is told.
const QUANTILES: [(&str, f64); 4] = [("p50", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99)];

impl Picture<'_> {
    pub(super) fn plot(&self) -> Plot<'_> {
        Plot { title: &self.title, survival: &self.survival, checks: &self.checks }
    }

    pub(super) fn text(&self) -> String {
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
        for seen in &self.observed {
            row("observed", observed(seen));
        }
        if let Some(newest) = m.newest.as_ref().filter(|n| !n.fitted.adopted) {
            row("last fit", told(newest, self.now));
        }
        out
    }

    pub(super) fn json(&self) -> Value {
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
            "observed": self.observed.iter().map(observed_json).collect::<Vec<_>>(),
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
