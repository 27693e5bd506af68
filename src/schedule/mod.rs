//! When to look next at one payment (DESIGN section 8), as pure functions of data.
//!
//! A repeat schedule is a list of offsets from the moment a watch opened. Two checks are mandatory
//! whatever the schedule says: at `valid_before` plus the finality margin, the first moment a negative
//! can be proven, and at the deadline. Fitting the offsets to measured latency is not done here yet.

use std::time::Duration;

use crate::domain::{DueTimes, NextCheck, Payment, Phase, Policy, Timestamp, Verdict};

#[cfg(test)]
mod tests;

/// The repeats of one version of the schedule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule {
    /// The stored version, once schedules are fitted; `None` for a configured or built-in one.
    pub id: Option<i64>,
    offsets: Vec<Duration>,
}

/// The most repeats a schedule may hold.
pub const REPEATS_MAX: usize = 64;

/// The built-in repeats: dense where Base settles (within seconds of the broadcast), thinning out until
/// ordinary authorizations have expired after five minutes.
const DEFAULT_OFFSETS_SECS: [u64; 13] = [0, 2, 4, 7, 11, 16, 24, 36, 54, 80, 120, 180, 300];

impl Default for Schedule {
    fn default() -> Self {
        let offsets = DEFAULT_OFFSETS_SECS.iter().map(|s| Duration::from_secs(*s)).collect();
        Self { id: None, offsets }
    }
}

/// What is wrong with a list of offsets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ScheduleError {
    /// There is nothing to repeat.
    #[error("give at least one offset, the first check is usually at \"0s\"")]
    Empty,
    /// Offsets must rise.
    #[error("every offset must be larger than the one before it")]
    NotRising,
    /// More than [`REPEATS_MAX`].
    #[error("at most {REPEATS_MAX} offsets")]
    TooMany,
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
        Ok(Self { id: None, offsets })
    }

    /// The first repeat after `now` of a watch opened at `opened_at`; missed ones are skipped.
    pub fn next_repeat(&self, opened_at: Timestamp, now: Timestamp) -> Option<Timestamp> {
        self.offsets.iter().map(|offset| opened_at.saturating_add(*offset)).find(|at| *at > now)
    }
}

/// What the times of mandatory checks depend on, per chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// How long a block takes, at most, to be finalized.
    pub finality_margin: Duration,
    /// Added to the deadline, so that a block at or past it is the head by then.
    pub deadline_margin: Duration,
    /// The least time between two looks for finality at one payment.
    pub finality_retry: Duration,
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
        Timestamp::from(payment.valid_before).saturating_add(timing.finality_margin);
    let deadline = policy.deadline(payment).saturating_add(timing.deadline_margin);
    let mandatory = [negative_provable, deadline].into_iter().filter(|at| *at > now).min();
    let repeat = schedule.next_repeat(opened_at, now);
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
    DueTimes { open, late: Some(negative_provable).filter(|at| *at > now), finality, reopened: now }
}
