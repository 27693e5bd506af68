//! When to look next at one payment (DESIGN section 8), as pure functions of data.
//!
//! A repeat schedule is either a list of offsets from the moment a watch opened (configured, or built in),
//! or a table by age fitted to measured settle latency: [`LatencyCounts`] -> [`Survival`] -> [`fit()`].
//! Two checks are mandatory whatever the schedule says: at `valid_before` plus the finality margin, the
//! first moment a negative can be proven, and at the deadline.
//!
//! What is not here: collecting samples, storing versions, and choosing which one a watch follows.

mod expected;
mod fit;
mod grid;
mod latency;
mod optimise;
mod pacing;
mod plot;
mod survival;
mod table;
#[cfg(test)]
mod tests;

use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use self::expected::{Conditions, Expected, FoundAges, expected};
pub use self::fit::{
    Adoption, AdoptionRule, FitSettings, Fitted, Objective, SettingsError, adopt, fit,
};
pub use self::grid::{BINS_MAX, Grid, GridError};
pub use self::latency::{Bin, LatencyCounts};
pub use self::optimise::{Bounds, Ending, Optimum, Prices, cost_of_ending, cost_of_gap, optimise};
pub use self::pacing::{JITTER_SHARE_MAX, Pacing};
pub use self::plot::Plot;
pub use self::survival::{Prior, Survival};
pub use self::table::{AgeTable, TableError};
use crate::domain::{DueTimes, NextCheck, PaidAfter, Payment, Phase, Policy, Timestamp, Verdict};

/// The repeats of one version of the schedule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "Stored", try_from = "Stored")]
pub struct Schedule {
    /// The stored version; `None` for a configured or built-in one. Not part of the stored text.
    pub id: Option<i64>,
    repeats: Repeats,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Repeats {
    /// Offsets from the moment the watch opened.
    Offsets(Vec<Duration>),
    /// Ages of the payment.
    ByAge(AgeTable),
}

/// The most repeats one payment may get.
pub const REPEATS_MAX: usize = 64;

/// How long a fresh block takes to reach an endpoint, as far as schedules reckon with it.
pub const PROPAGATION: Duration = Duration::from_millis(500);

/// The built-in repeats: dense where Base settles (within seconds of the broadcast), thinning out until
/// ordinary authorizations have expired after five minutes.
const DEFAULT_OFFSETS_SECS: [u64; 13] = [0, 2, 4, 7, 11, 16, 24, 36, 54, 80, 120, 180, 300];

impl Default for Schedule {
    fn default() -> Self {
        let offsets = DEFAULT_OFFSETS_SECS.iter().map(|s| Duration::from_secs(*s)).collect();
        Self { id: None, repeats: Repeats::Offsets(offsets) }
    }
}

/// What is wrong with a schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ScheduleError {
    /// There is nothing to repeat.
    #[error("give at least one offset, the first check is usually at \"0s\"")]
    Empty,
    /// Offsets must rise.
    #[error("every offset must be larger than the one before it")]
    NotRising,
    /// More than [`REPEATS_MAX`].
    #[error("at most {REPEATS_MAX} repeats")]
    TooMany,
    /// Not a table.
    #[error(transparent)]
    Table(#[from] TableError),
}

impl Schedule {
    /// A schedule of these offsets from the moment the watch opens.
    pub fn new(offsets: Vec<Duration>) -> Result<Self, ScheduleError> {
        if offsets.is_empty() {
            return Err(ScheduleError::Empty);
        }
        if offsets.len() > REPEATS_MAX {
            return Err(ScheduleError::TooMany);
        }
        if offsets.windows(2).any(|pair| pair[0] >= pair[1]) {
            return Err(ScheduleError::NotRising);
        }
        Ok(Self { id: None, repeats: Repeats::Offsets(offsets) })
    }

    /// A fitted schedule.
    pub fn by_age(table: AgeTable) -> Self {
        Self { id: None, repeats: Repeats::ByAge(table) }
    }

    /// The fitted table, if it is one.
    pub fn table(&self) -> Option<&AgeTable> {
        match &self.repeats {
            Repeats::Offsets(_) => None,
            Repeats::ByAge(table) => Some(table),
        }
    }

    /// The most repeats one payment gets.
    pub fn repeats_max(&self) -> usize {
        match &self.repeats {
            Repeats::Offsets(offsets) => offsets.len(),
            Repeats::ByAge(table) => table.checks_max(),
        }
    }

    /// The next repeat after `now`; missed ones are skipped.
    ///
    /// `opened_at` is the watch's, `started_at` the payment's. A fitted schedule goes by the payment's age.
    /// A watch that opened when the payment was older than all that was measured (after a reorg, or found
    /// late) is counted from its opening instead. So is one whose payment says that it starts only later:
    /// a gateway's clock that is ahead of ours, or wrong, must not postpone the repeats.
    pub fn next_repeat(
        &self,
        opened_at: Timestamp,
        started_at: Timestamp,
        now: Timestamp,
    ) -> Option<Timestamp> {
        match &self.repeats {
            Repeats::Offsets(offsets) => {
                offsets.iter().map(|offset| opened_at.saturating_add(*offset)).find(|at| *at > now)
            }
            Repeats::ByAge(table) => {
                let found_late = opened_at.since(started_at) >= table.horizon();
                let from = if found_late { opened_at } else { started_at.min(opened_at) };
                let next = from.saturating_add(table.next_age(now.since(from))?);
                Some(next).filter(|at| *at > now)
            }
        }
    }

    /// The ages of the repeats of a payment that is found, and looked at, at this age.
    pub fn ages_after(&self, found_at: Duration) -> Vec<Duration> {
        match &self.repeats {
            Repeats::Offsets(offsets) => {
                offsets.iter().filter(|o| !o.is_zero()).map(|o| found_at + *o).collect()
            }
            Repeats::ByAge(table) => {
                std::iter::successors(table.next_age(found_at), |age| table.next_age(*age))
                    .collect()
            }
        }
    }
}

/// A schedule as it is stored.
#[derive(Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
enum Stored {
    Offsets { offsets_ms: Vec<u64> },
    ByAge { table: AgeTable },
}

impl From<Schedule> for Stored {
    fn from(schedule: Schedule) -> Self {
        match schedule.repeats {
            Repeats::Offsets(offsets) => {
                let ms = |o: &Duration| u64::try_from(o.as_millis()).unwrap_or(u64::MAX);
                Self::Offsets { offsets_ms: offsets.iter().map(ms).collect() }
            }
            Repeats::ByAge(table) => Self::ByAge { table },
        }
    }
}

impl TryFrom<Stored> for Schedule {
    type Error = ScheduleError;

    fn try_from(stored: Stored) -> Result<Self, ScheduleError> {
        let schedule = match stored {
            Stored::Offsets { offsets_ms } => {
                Self::new(offsets_ms.into_iter().map(Duration::from_millis).collect())?
            }
            Stored::ByAge { table } => Self::by_age(table),
        };
        if schedule.repeats_max() > REPEATS_MAX {
            return Err(ScheduleError::TooMany);
        }
        Ok(schedule)
    }
}

/// How long after a block's time a check can call its transfer settled: until it has reached an endpoint
/// and is as deep as `paid_after` asks, at most.
pub fn visible_after(paid_after: PaidAfter, block_time: Duration, timing: &Timing) -> Duration {
    let depth = match paid_after {
        PaidAfter::Confirmations(n) => {
            block_time.saturating_mul(u32::try_from(n.saturating_sub(1)).unwrap_or(u32::MAX))
        }
        PaidAfter::Safe | PaidAfter::Finalized => timing.finality_margin,
    };
    PROPAGATION.saturating_add(depth)
}

/// What the times of checks depend on beside the schedule, per chain.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Timing {
    /// How long a block takes, at most, to be finalized.
    pub finality_margin: Duration,
    /// Added to the deadline, so that a block at or past it is the head by then.
    pub deadline_margin: Duration,
    /// The least time between two looks for finality at one payment.
    pub finality_retry: Duration,
    /// How repeats are shifted.
    pub pacing: Pacing,
}

/// When to look next at `payment`, for every way its resolution can go.
///
/// `opened_at` is the watch's; `verdict` is this check's (a settlement's block time sets the look for
/// finality).
pub fn due_times(
    schedule: &Schedule,
    opened_at: Timestamp,
    payment: &Payment,
    verdict: &Verdict,
    policy: &Policy,
    timing: &Timing,
    now: Timestamp,
) -> DueTimes {
    let negative_provable =
        Timestamp::from(payment.over_from()).saturating_add(timing.finality_margin);
    let deadline = policy.deadline(payment).saturating_add(timing.deadline_margin);
    let mandatory = [negative_provable, deadline].into_iter().filter(|at| *at > now).min();
    let repeat = schedule
        .next_repeat(opened_at, payment.started_at(), now)
        .map(|due| timing.pacing.place(&payment.id, now, due));
    let open = match repeat {
        Some(repeat) => NextCheck {
            phase: Phase::Targeted,
            at: Some(mandatory.map_or(repeat, |at| at.min(repeat))),
        },
        None => NextCheck { phase: Phase::Reconcile, at: mandatory },
    };
    let retry = now.saturating_add(timing.finality_retry);
    let finality = match verdict {
        Verdict::Settled(settlement) => Timestamp::from(settlement.transfer.block.time)
            .saturating_add(timing.finality_margin)
            .max(retry),
        _ => retry,
    };
    DueTimes {
        open,
        late: Some(negative_provable).filter(|at| *at > now),
        finality,
        reopened: now,
        schedule_id: schedule.id,
    }
}
