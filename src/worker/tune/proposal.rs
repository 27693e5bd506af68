//! A fit on its way to being a version: compared with the schedule in use, and stored with the reason.

use anyhow::Context;

use super::{Measured, TuneSettings};
use crate::domain::Timestamp;
use crate::schedule::{
    Adoption, AdoptionRule, Expected, FitSettings, Fitted, Schedule, SettingsError, Survival,
    adopt, expected, fit,
};
use crate::store::Store;
use crate::store::schedules::NewVersion;
use crate::telemetry::VersionOutcome;

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

impl Measured {
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
        let adoption = adopt(&fitted, in_use, &self.recent, conditions, rule);
        let comparison = (self.recent.samples() > 0.0).then(|| {
            let recent = Survival::measured(&self.recent);
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
        sample_size: measured.fitted_to,
        window_ms: u64::try_from(settings.window.as_millis()).unwrap_or(u64::MAX),
        expected_reads: fitted.expected.reads,
        expected_delay_ms: fitted.expected.found_delay_secs * 1_000.0,
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
