//! Fitted schedules against those people write by hand.
//!
//! Schedules trade reads for delay. Those that are best at some price are the corners of the lower convex
//! hull of all such trades. So the exact claims are: at any price, nothing costs less; and for any schedule
//! there is a fitted one with no more reads whose delay is larger by at most the price times the reads it
//! saves, and one with no less reads and no more delay.

use std::time::Duration;

use proptest::prelude::*;

use super::support::*;
use crate::schedule::{
    AgeTable, Bounds, Conditions, Ending, Expected, FitSettings, LatencyCounts, Objective, Prices,
    Prior, Schedule, Survival, expected, fit, optimise,
};

const BINS: usize = 60;
const FREE: Bounds = Bounds { gap_min: 1, gap_max: BINS, end_from: 0 };

fn best(survival: &Survival, prices: Prices, conditions: &Conditions) -> Expected {
    let lag = conditions.visible_after;
    let next = optimise(survival, prices, FREE, conditions.ending, lag.as_secs_f64()).into_next();
    let table = AgeTable::new(survival.grid(), lag, next).unwrap();
    expected(&Schedule::by_age(table), survival, conditions)
}

/// A fixed interval, or an exponential backoff with a cap, on a grid of 2 s.
fn by_hand() -> impl Strategy<Value = Schedule> {
    let fixed = (1..=20_u64, 1..=60_usize)
        .prop_map(|(every, times)| (1..=times as u64).map(|i| 2 * every * i).collect());
    let backoff = (1..=4_u64, 1.1..3.0_f64, 4..=60_u64, 1..=60_usize).prop_map(
        |(first, factor, cap, times)| {
            let (mut gap, mut at) = (first as f64, 0);
            let mut next = || {
                at += 2 * (gap as u64).clamp(1, cap);
                gap *= factor;
                at
            };
            (0..times).map(|_| next()).collect::<Vec<u64>>()
        },
    );
    prop_oneof![fixed, backoff].prop_map(|offsets: Vec<u64>| {
        Schedule::new(offsets.into_iter().map(Duration::from_secs).collect()).unwrap()
    })
}

/// Only what lies on the grid: past it, a check can find nothing and is wasted by whoever makes it.
fn on_grid(schedule: &Schedule) -> Schedule {
    let ages = schedule.ages_after(Duration::ZERO);
    let inside: Vec<_> = ages.iter().copied().filter(|a| a.as_secs() <= 2 * BINS as u64).collect();
    if inside.is_empty() { schedule.clone() } else { Schedule::new(inside).unwrap() }
}

proptest! {
    /// Nothing written by hand costs less, at any price.
    #[test]
    fn no_interval_or_backoff_costs_less(
        counts in any_counts(BINS),
        prices in any_prices(),
        ending in any_ending(),
        other in by_hand(),
    ) {
        let survival = Survival::measured(&counts);
        let conditions = conditions(ending);
        let fitted = best(&survival, prices, &conditions).cost(prices);
        let theirs = expected(&on_grid(&other), &survival, &conditions).cost(prices);
        prop_assert!(fitted <= theirs + 1e-9 * (1.0 + theirs), "{fitted} > {theirs}");
    }

    /// At the reads of any schedule written by hand, the fitted one detects no later.
    #[test]
    fn at_equal_reads_it_detects_no_later(
        counts in any_counts(BINS),
        ending in any_ending(),
        other in by_hand(),
    ) {
        let survival = Survival::measured(&counts);
        let conditions = conditions(ending);
        let theirs = expected(&on_grid(&other), &survival, &conditions);
        let at = |read: f64| best(&survival, Prices { read, delay_second: 1.0 }, &conditions);
        // The two corners of the hull between which their reads lie.
        let (mut low, mut high) = (1e-7, 1e7);
        prop_assume!(at(low).reads >= theirs.reads && at(high).reads <= theirs.reads);
        for _ in 0..100 {
            let middle = f64::sqrt(low * high);
            if at(middle).reads >= theirs.reads { low = middle } else { high = middle }
        }
        let (more, fewer) = (at(low), at(high));
        prop_assert!(more.reads >= theirs.reads && fewer.reads <= theirs.reads);
        let allowance = 1e-6 * (1.0 + theirs.delay_secs);
        prop_assert!(more.delay_secs <= theirs.delay_secs + allowance,
            "{more:?} is later than {theirs:?}");
        let saved = high * (theirs.reads - fewer.reads);
        prop_assert!(fewer.delay_secs <= theirs.delay_secs + saved + allowance,
            "{fewer:?} is later than {theirs:?}");
    }

    /// Dearer reads are never more reads, and dearer seconds never more delay.
    #[test]
    fn it_follows_the_prices(
        counts in any_counts(BINS),
        prices in any_prices(),
        ending in any_ending(),
        factor in 1.0..50.0_f64,
    ) {
        let survival = Survival::measured(&counts);
        let conditions = conditions(ending);
        let at = |prices| best(&survival, prices, &conditions);
        let here = at(prices);
        let dear_reads = at(Prices { read: prices.read * factor, ..prices });
        let dear_delay = at(Prices { delay_second: prices.delay_second * factor, ..prices });
        prop_assert!(dear_reads.reads <= here.reads + 1e-9, "{dear_reads:?} {here:?}");
        prop_assert!(dear_reads.delay_secs >= here.delay_secs - 1e-6);
        prop_assert!(dear_delay.delay_secs <= here.delay_secs + 1e-6, "{dear_delay:?} {here:?}");
        prop_assert!(dear_delay.reads >= here.reads - 1e-9);
    }

    /// A budget is kept, and used: the next better corner would break it.
    #[test]
    fn a_budget_is_kept(counts in any_counts(BINS), budget in 3.5..20.0_f64) {
        let mut settings = FitSettings::for_block_time(Duration::from_secs(2));
        settings.prior = Prior::NONE;
        settings.objective = Objective::Budget { reads: budget };
        settings.repeat_for = Duration::ZERO;
        settings.gap_max = Duration::from_secs(120);
        settings.conditions = conditions(Ending { delay_secs: 60.0, reads: 1.0 });
        let fitted = fit(&counts, &settings).unwrap();
        prop_assert!(fitted.expected.reads <= budget, "{:?}", fitted.expected);
        prop_assert!(fitted.schedule.repeats_max() <= crate::schedule::REPEATS_MAX);
        let dearer = Prices { read: fitted.prices.read * 1.01, ..fitted.prices };
        settings.objective = Objective::Prices(dearer);
        let with_dearer_reads = fit(&counts, &settings).unwrap();
        prop_assert!(with_dearer_reads.expected.delay_secs >= fitted.expected.delay_secs - 1e-6);
        // What a read that is any cheaper would buy is beyond the budget, unless a bound was the limit: the
        // lowest price there is, or the most repeats.
        let cheaper = Prices { read: fitted.prices.read * 0.99, ..fitted.prices };
        settings.objective = Objective::Prices(cheaper);
        let with_cheaper_reads = fit(&counts, &settings).unwrap();
        let was_lowest = cheaper.read < 1e-6;
        let was_most_repeats = with_cheaper_reads.prices.read > cheaper.read;
        prop_assert!(with_cheaper_reads.expected.reads > budget || was_lowest || was_most_repeats,
            "{budget} reads: {:?} {:?}", fitted.expected, with_cheaper_reads.expected);
    }
}

/// A thousand latencies cost what one does, and more read no faster.
#[test]
fn more_samples_of_the_same_change_nothing() {
    let settings = FitSettings { prior: Prior::NONE, ..FitSettings::for_block_time(secs(2.0)) };
    let fit_times = |weight: f64| {
        let mut counts = LatencyCounts::new(base());
        for share in evenly(100) {
            counts.add_latency(secs(3.0 / (1.0 - share)), weight);
        }
        fit(&counts, &settings).unwrap().schedule
    };
    assert_eq!(fit_times(1.0), fit_times(1_000.0));
}
