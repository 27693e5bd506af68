//! What a schedule costs on a distribution, whatever kind of schedule it is.

use std::time::Duration;

use super::optimise::{Ending, Prices};
use super::{Schedule, Survival};

/// The world a schedule is used in.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Conditions {
    /// The age at which payments become unknown, and are looked at for the first time.
    pub found_at: Duration,
    /// How long a block takes until a check can see it.
    pub visible_after: Duration,
    /// What a payment past its repeats has to expect.
    pub ending: Ending,
}

/// What one payment has to expect that had not settled when it was found.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Expected {
    /// Reads, the first one and those after the repeats included.
    pub reads: f64,
    /// Seconds from its block until it is detected; nothing for one that never settles, and the wait for
    /// the full reconcile for one that the repeats miss.
    pub delay_secs: f64,
    /// The same, as a mean over those that the repeats detect.
    pub found_delay_secs: f64,
    /// The share that settles within the horizon after the last repeat.
    pub missed: f64,
}

impl Expected {
    /// The cost at these prices.
    pub fn cost(&self, prices: Prices) -> f64 {
        prices.read * self.reads + prices.delay_second * self.delay_secs
    }
}

/// The expectation over a distribution. Exact for checks at the edges of its grid; between them, latencies
/// count as spread evenly over their bin.
pub fn expected(schedule: &Schedule, survival: &Survival, conditions: &Conditions) -> Expected {
    let seen_by = |age: Duration| survival.settled_by(age.saturating_sub(conditions.visible_after));
    let (mut settled, mut latencies) = seen_by(conditions.found_at);
    let open_when_found = 1.0 - settled;
    if open_when_found <= 0.0 {
        return Expected { reads: 1.0, delay_secs: 0.0, found_delay_secs: 0.0, missed: 0.0 };
    }
    let settled_when_found = settled;
    let (mut repeats, mut waited) = (0.0, 0.0);
    for age in schedule.ages_after(conditions.found_at) {
        repeats += 1.0 - settled;
        let (settled_now, latencies_now) = seen_by(age);
        waited += age.as_secs_f64() * (settled_now - settled) - (latencies_now - latencies);
        (settled, latencies) = (settled_now, latencies_now);
    }
    let found = settled - settled_when_found;
    let missed = (1.0 - survival.beyond_horizon() - settled).max(0.0);
    let ending = conditions.ending;
    Expected {
        reads: 1.0 + (repeats + ending.reads * (1.0 - settled)) / open_when_found,
        delay_secs: (waited + ending.delay_secs * missed) / open_when_found,
        found_delay_secs: if found > 0.0 { waited / found } else { 0.0 },
        missed: missed / open_when_found,
    }
}
