//! Fitting a schedule to counts, and deciding whether a fit replaces the one in use.

use std::time::Duration;

use super::expected::{Conditions, Expected, FoundAges, expected};
use super::optimise::{Bounds, Ending, Prices, optimise};
use super::table::AgeTable;
use super::{Bin, Grid, LatencyCounts, Prior, REPEATS_MAX, Schedule, Survival};

/// What a schedule is fitted for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Objective {
    /// At these prices, the least cost.
    Prices(Prices),
    /// At most this many reads per payment, and the least delay for them.
    Budget {
        /// Reads per payment, the first one and those after the repeats included.
        reads: f64,
    },
}

/// How to fit.
#[derive(Debug, Clone, PartialEq)]
pub struct FitSettings {
    /// What for.
    pub objective: Objective,
    /// The least time between two checks of one payment.
    pub gap_min: Duration,
    /// The largest. When latency changes at once, this is what detection waits at most, while the repeats
    /// last.
    pub gap_max: Duration,
    /// The repeats may not end before this age.
    pub repeat_for: Duration,
    /// The world the schedule is used in.
    pub conditions: Conditions,
    /// What is believed before enough was measured.
    pub prior: Prior,
}

impl FitSettings {
    /// The built-in settings for a chain whose blocks come in this rhythm.
    pub fn for_block_time(block_time: Duration) -> Self {
        Self {
            objective: Objective::Prices(Prices { read: 1.0, delay_second: 0.5 }),
            gap_min: block_time.min(Duration::from_secs(1)),
            gap_max: Duration::from_secs(60),
            repeat_for: Duration::from_secs(300),
            conditions: Conditions {
                found: FoundAges::at(Duration::ZERO),
                visible_after: super::PROPAGATION,
                ending: Ending { delay_secs: 300.0, reads: 1.0 },
            },
            prior: Prior::for_block_time(block_time),
        }
    }

    /// What is wrong with these settings on this grid, by the name of the field.
    pub fn check(&self, grid: Grid) -> Result<(), SettingsError> {
        let bad = |field, problem| Err(SettingsError { field, problem });
        let sensible = |price: f64| price.is_finite() && (0.0..=PRICE_MAX).contains(&price);
        match self.objective {
            Objective::Prices(Prices { read, .. }) if !sensible(read) || read <= 0.0 => {
                return bad("price of a read", "must be above 0 and at most a million");
            }
            Objective::Prices(Prices { delay_second, .. }) if !sensible(delay_second) => {
                return bad("price of a second", "must be from 0 to a million");
            }
            Objective::Budget { reads } if !(reads.is_finite() && reads >= 1.0) => {
                return bad("budget of reads", "must be at least 1: the first check is one");
            }
            _ => {}
        }
        if self.gap_max < grid.step() * 3 / 2 || self.gap_max < self.gap_min {
            return bad("gap_max", "must be at least gap_min and one and a half steps of the grid");
        }
        if grid.bins().div_ceil(self.bounds(grid).gap_max) > REPEATS_MAX {
            return bad("gap_max", "is so short that the repeats would not reach the horizon");
        }
        let ending = self.conditions.ending;
        if !(ending.delay_secs >= 0.0 && ending.delay_secs.is_finite() && ending.reads >= 0.0) {
            return bad("ending", "must not be below 0");
        }
        Ok(())
    }

    fn bounds(&self, grid: Grid) -> Bounds {
        let step = grid.step().as_nanos();
        // A payment may be looked at half a step off its edge: what remains is never more than `gap_max`.
        let gap_max = (self.gap_max.as_nanos().saturating_sub(step / 2)) / step;
        let bins = |n: u128| usize::try_from(n).unwrap_or(usize::MAX).clamp(1, grid.bins());
        Bounds {
            gap_min: bins(self.gap_min.as_nanos().div_ceil(step)),
            gap_max: bins(gap_max),
            end_from: bins(self.repeat_for.as_nanos().div_ceil(step)),
        }
    }
}

const PRICE_MAX: f64 = 1e6;
/// Where the search for a price of a read ends: no reads are saved above it.
const READ_PRICE_MAX: f64 = PRICE_MAX * PRICE_MAX;

/// A setting that makes no sense.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{field} {problem}")]
pub struct SettingsError {
    /// The setting.
    pub field: &'static str,
    /// What it must be.
    pub problem: &'static str,
}

/// A fitted schedule, and what is to be expected of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Fitted {
    /// The schedule, without an id.
    pub schedule: Schedule,
    /// The distribution it was fitted to.
    pub survival: Survival,
    /// The weight of the payments whose end is known.
    pub samples: f64,
    /// The weight of those still open.
    pub open: f64,
    /// What the prior weighed beside them.
    pub prior_weight: f64,
    /// The prices it is the optimum for: the given ones, or those that meet the budget; the price of a
    /// read is higher where the given one asked for more than [`REPEATS_MAX`] checks.
    pub prices: Prices,
    /// What a payment has to expect.
    pub expected: Expected,
    /// The budget, where no schedule that `gap_max` and `repeat_for` allow keeps it: then this is one of
    /// those with the fewest reads.
    pub unmet_budget: Option<f64>,
}

/// Steps of a search for a price, and how near is near enough: the first suffice for the second.
const SEARCH_STEPS: u32 = 64;
const PRICE_PRECISION: f64 = 1e-9;

/// Fits a schedule.
pub fn fit(counts: &LatencyCounts, settings: &FitSettings) -> Result<Fitted, SettingsError> {
    let grid = counts.grid();
    settings.check(grid)?;
    let survival = Survival::estimate(counts, &settings.prior);
    let at = |prices: Prices| best_at(&survival, settings, prices);
    let allowed = |(schedule, _): &(Schedule, Expected)| schedule.repeats_max() <= REPEATS_MAX;
    let mut unmet_budget = None;
    let (prices, (schedule, expected)) = match settings.objective {
        Objective::Prices(prices) => cheapest_read(prices, at, allowed),
        Objective::Budget { reads } => {
            let lowest = Prices { read: 1.0 / PRICE_MAX, delay_second: 1.0 };
            let fewest = at(Prices { read: READ_PRICE_MAX, ..lowest }).1.reads;
            unmet_budget = (fewest > reads).then_some(reads);
            // The lowest price that gets as few reads as there can be, not the highest that was tried.
            cheapest_read(lowest, at, |found| allowed(found) && found.1.reads <= reads.max(fewest))
        }
    };
    Ok(Fitted {
        schedule,
        samples: counts.samples(),
        open: counts.open(),
        prior_weight: settings.prior.weight_beside(counts.samples()),
        survival,
        prices,
        expected,
        unmet_budget,
    })
}

/// The lowest price of a read, from the given one up, at which the best schedule is `allowed`. Dearer
/// reads are never more reads, so halving finds it. If none is, the best at the highest price.
fn cheapest_read<T>(
    prices: Prices,
    at: impl Fn(Prices) -> T,
    allowed: impl Fn(&T) -> bool,
) -> (Prices, T) {
    let found = at(prices);
    if allowed(&found) {
        return (prices, found);
    }
    let with_read = |read: f64| Prices { read, ..prices };
    let (mut too_low, mut high) = (prices.read, READ_PRICE_MAX);
    let mut best = at(with_read(high));
    if !allowed(&best) {
        return (with_read(high), best);
    }
    for _ in 0..SEARCH_STEPS {
        let middle = (too_low * high).sqrt();
        if high <= too_low * (1.0 + PRICE_PRECISION) {
            break;
        }
        let found = at(with_read(middle));
        if allowed(&found) {
            (high, best) = (middle, found);
        } else {
            too_low = middle;
        }
    }
    (with_read(high), best)
}

/// The best schedule at these prices, and what it costs.
fn best_at(survival: &Survival, settings: &FitSettings, prices: Prices) -> (Schedule, Expected) {
    let grid = survival.grid();
    let conditions = &settings.conditions;
    let lag = conditions.visible_after;
    let optimum =
        optimise(survival, prices, settings.bounds(grid), conditions.ending, lag.as_secs_f64());
    let schedule = match AgeTable::new(grid, lag, optimum.into_next()) {
        Ok(table) => Schedule::by_age(table),
        // The optimiser only ever moves forward on its grid; a lag of days is no schedule.
        Err(_) => Schedule::default(),
    };
    let expected = expected(&schedule, survival, conditions);
    (schedule, expected)
}

/// When a fitted schedule replaces the one in use.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdoptionRule {
    /// The least number of recent settled payments, held out of the fit, to judge by: of those that had not
    /// settled when they were found.
    pub samples_min: f64,
    /// The least share of the cost that a new version must save.
    pub saves_min: f64,
}

impl Default for AdoptionRule {
    fn default() -> Self {
        Self { samples_min: 50.0, saves_min: 0.01 }
    }
}

/// Whether a candidate replaces the schedule in use, with the reason in words and figures.
#[derive(Debug, Clone, PartialEq)]
pub enum Adoption {
    /// It does.
    Adopt {
        /// Why.
        why: String,
    },
    /// It does not.
    Keep {
        /// Why not.
        why: String,
    },
}

/// Compares a candidate with the schedule in use on recent samples that it was not fitted to.
pub fn adopt(
    candidate: &Fitted,
    in_use: &Schedule,
    held_out: &LatencyCounts,
    conditions: &Conditions,
    rule: &AdoptionRule,
) -> Adoption {
    // Who had settled when found was found by the first check, which every schedule makes.
    let open = |bin: Bin| bin.settled * conditions.open_when_found(held_out.grid(), bin.index);
    let samples = held_out.bins().map(open).sum::<f64>() + held_out.late();
    if samples < rule.samples_min {
        return Adoption::Keep {
            why: format!(
                "{samples:.0} recent samples are too few to judge by; {:.0} are needed",
                rule.samples_min
            ),
        };
    }
    let recent = Survival::measured(held_out);
    let prices = candidate.prices;
    let [new, old] = [&candidate.schedule, in_use].map(|s| expected(s, &recent, conditions));
    let (new_cost, old_cost) = (new.cost(prices), old.cost(prices));
    let figures = format!(
        "on {samples:.0} recent samples it costs {new_cost:.2} per payment ({:.2} reads, {:.2} s of delay) \
         and the one in use {old_cost:.2} ({:.2} reads, {:.2} s)",
        new.reads, new.delay_secs, old.reads, old.delay_secs
    );
    let figures = match candidate.unmet_budget {
        Some(budget) => format!(
            "{figures}; the budget of {budget} reads cannot be kept with this gap_max and repeat_for, \
             {:.2} are the fewest",
            candidate.expected.reads
        ),
        None => figures,
    };
    if new_cost > old_cost {
        Adoption::Keep { why: format!("it is worse: {figures}") }
    } else if new_cost > old_cost * (1.0 - rule.saves_min) {
        Adoption::Keep {
            why: format!("it saves less than {:.1} %: {figures}", 100.0 * rule.saves_min),
        }
    } else {
        let saves = if old_cost > 0.0 { 100.0 * (1.0 - new_cost / old_cost) } else { 0.0 };
        Adoption::Adopt { why: format!("it saves {saves:.1} %: {figures}") }
    }
}
