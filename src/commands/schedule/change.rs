//! What a fit would change, or has changed: told, and as JSON.

use std::time::Duration;

use serde_json::{Value, json};

use super::words::{ages, figures, seconds};
use crate::schedule::{Adoption, Expected, Schedule};
use crate::store::schedules::Series;
use crate::telemetry::VersionOutcome;
use crate::worker::tune::{Measured, Proposal, Stored};

/// What a fit would change, or has changed.
pub(super) struct Change<'a> {
    pub(super) measured: &'a Measured,
    pub(super) proposal: Proposal,
    pub(super) in_use: Schedule,
    pub(super) found_at: Duration,
    pub(super) stored: Option<Stored>,
}

impl Change<'_> {
    fn why(&self) -> (bool, &str) {
        match &self.proposal.adoption {
            Adoption::Adopt { why } => (true, why),
            Adoption::Keep { why } => (false, why),
        }
    }

    pub(super) fn text(&self) -> String {
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

    pub(super) fn json(&self) -> Value {
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
