//! What a schedule costs on a distribution, whatever kind of schedule it is.

use std::time::Duration;

use super::optimise::{Ending, Prices};
use super::{Grid, Schedule, Survival};

/// The world a schedule is used in.
#[derive(Debug, Clone, PartialEq)]
pub struct Conditions {
    /// How old payments are when they become unknown, and are looked at for the first time.
    pub found: FoundAges,
    /// How long a block takes until a check can see it.
    pub visible_after: Duration,
    /// What a payment past its repeats has to expect.
    pub ending: Ending,
}

impl Conditions {
    /// The share of payments that, settling in this bin, have not been seen to when they are found.
    pub fn open_when_found(&self, grid: Grid, bin: usize) -> f64 {
        if bin >= grid.bins() {
            return 1.0;
        }
        let visible_at = grid.edge(bin + 1).saturating_add(self.visible_after);
        let found_before = self.found.0.iter().filter(|(age, _)| *age < visible_at);
        found_before.map(|(_, share)| share).sum::<f64>().min(1.0)
    }
}

/// The ages at which payments are found, with the share of each. Payments of which most are found at once and some
/// late are not like payments that are all found at the mean of it: nobody is found then.
#[derive(Debug, Clone, PartialEq)]
pub struct FoundAges(Vec<(Duration, f64)>);

impl FoundAges {
    /// All at this age.
    pub fn at(age: Duration) -> Self {
        Self(vec![(age, 1.0)])
    }

    /// So many at each age; `None` if there are none.
    pub fn counted(ages: impl IntoIterator<Item = (Duration, f64)>) -> Option<Self> {
        let sensible = |(_, count): &(Duration, f64)| count.is_finite() && *count > 0.0;
        let mut ages: Vec<_> = ages.into_iter().filter(sensible).collect();
        ages.sort_by_key(|(age, _)| *age);
        let sum: f64 = ages.iter().map(|(_, count)| count).sum();
        ages.iter_mut().for_each(|(_, count)| *count /= sum);
        (!ages.is_empty()).then_some(Self(ages))
    }

    /// The age by which half of them are found: to show one schedule by.
    pub fn median(&self) -> Duration {
        let mut found = 0.0;
        let reaches_half = |(age, share): &(Duration, f64)| {
            found += share;
            (found >= 0.5).then_some(*age)
        };
        self.0.iter().find_map(reaches_half).unwrap_or_default()
    }
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

/// The expectation over a distribution, and over the ages at which payments are found. Exact for checks at the
/// edges of its grid; between them, latencies count as spread evenly over their bin.
pub fn expected(schedule: &Schedule, survival: &Survival, conditions: &Conditions) -> Expected {
    let mut sums = Sums::default();
    for (found_at, share) in &conditions.found.0 {
        sums.add(schedule, survival, conditions, *found_at, *share);
    }
    sums.per_open_payment()
}

/// Sums over all payments.
#[derive(Default)]
struct Sums {
    /// Those that had not settled when they were found.
    open: f64,
    reads: f64,
    /// Of these, those that the repeats detect.
    found: f64,
    /// Seconds that these waited.
    waited: f64,
    /// Those that settle after the repeats.
    missed: f64,
    /// Seconds that these wait.
    missed_wait: f64,
}

impl Sums {
    /// Adds the share of payments that are found at one age.
    fn add(
        &mut self,
        schedule: &Schedule,
        survival: &Survival,
        conditions: &Conditions,
        found_at: Duration,
        share: f64,
    ) {
        let seen_by =
            |age: Duration| survival.settled_by(age.saturating_sub(conditions.visible_after));
        let (mut settled, mut latencies) = seen_by(found_at);
        let settled_when_found = settled;
        let (mut repeats, mut waited) = (0.0, 0.0);
        for age in schedule.ages_after(found_at) {
            repeats += 1.0 - settled;
            let (settled_now, latencies_now) = seen_by(age);
            waited += age.as_secs_f64() * (settled_now - settled) - (latencies_now - latencies);
            (settled, latencies) = (settled_now, latencies_now);
        }
        let missed = (1.0 - survival.beyond_horizon() - settled).max(0.0);
        let open = (1.0 - settled_when_found).max(0.0);
        self.open += share * open;
        self.reads += share * (open + repeats + conditions.ending.reads * (1.0 - settled));
        self.found += share * (settled - settled_when_found);
        self.waited += share * waited;
        self.missed += share * missed;
        self.missed_wait += share * missed * conditions.ending.delay_secs;
    }

    fn per_open_payment(self) -> Expected {
        if self.open <= 0.0 {
            return Expected { reads: 1.0, delay_secs: 0.0, found_delay_secs: 0.0, missed: 0.0 };
        }
        Expected {
            reads: self.reads / self.open,
            delay_secs: (self.waited + self.missed_wait) / self.open,
            found_delay_secs: if self.found > 0.0 { self.waited / self.found } else { 0.0 },
            missed: self.missed / self.open,
        }
    }
}
