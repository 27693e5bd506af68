//! From counts to a schedule that is used: sane whatever was measured.

use std::time::Duration;

use proptest::prelude::*;

use super::support::*;
use crate::schedule::{
    Adoption, AdoptionRule, FitSettings, Fitted, Grid, LatencyCounts, Objective, Prices,
    REPEATS_MAX, Schedule, Survival, adopt, expected, fit,
};

fn settings() -> FitSettings {
    FitSettings::for_block_time(Duration::from_secs(2))
}

fn fitted(counts: &LatencyCounts) -> Fitted {
    let settings = settings();
    let fitted = fit(counts, &settings).unwrap();
    let ages = ages(&fitted.schedule, 0.0);
    assert!((1..=REPEATS_MAX).contains(&ages.len()), "{ages:?}");
    assert!(ages.last().is_some_and(|last| *last >= 300.0), "they end too early: {ages:?}");
    let mut before = 0.0;
    for age in &ages {
        assert!(*age > before && age - before <= 60.0, "{ages:?}");
        before = *age;
    }
    let figures = fitted.expected;
    for figure in [figures.reads, figures.delay_secs, figures.found_delay_secs, figures.missed] {
        assert!(figure.is_finite() && figure >= 0.0, "{figures:?}");
    }
    fitted
}

/// How many checks fall in a span of ages.
fn checks_in(fitted: &Fitted, from: f64, until: f64) -> usize {
    ages(&fitted.schedule, 0.0).iter().filter(|age| (from..until).contains(*age)).count()
}

#[test]
fn nothing_measured_gives_the_priors_schedule() {
    let fitted = fitted(&LatencyCounts::new(base()));
    assert!(checks_in(&fitted, 0.0, 30.0) >= 3, "{:?}", ages(&fitted.schedule, 0.0));
    assert!(fitted.expected.missed < 0.01, "{:?}", fitted.expected);
}

#[test]
fn one_sample_barely_moves_it() {
    let one = fitted(&counts(base(), &[200.0]));
    let none = fitted(&LatencyCounts::new(base()));
    assert_eq!(checks_in(&one, 0.0, 30.0), checks_in(&none, 0.0, 30.0));
}

#[test]
fn when_nobody_settles_it_looks_as_rarely_as_it_may() {
    let mut counts = LatencyCounts::new(base());
    counts.add_never(1_000.0);
    counts.add_open(Duration::from_secs(40), 1_000.0);
    let fitted = fitted(&counts);
    assert!(ages(&fitted.schedule, 0.0).len() <= 6, "{:?}", ages(&fitted.schedule, 0.0));
}

#[test]
fn when_all_are_still_open_nothing_is_claimed() {
    let mut counts = LatencyCounts::new(base());
    counts.add_open(Duration::from_secs(5), 500.0);
    let fitted = fitted(&counts);
    assert_eq!(fitted.samples, 0.0);
    assert!(fitted.prior_weight > 0.0);
    assert!(checks_in(&fitted, 0.0, 60.0) >= 2);
}

#[test]
fn when_all_take_equally_long_it_looks_right_behind_them() {
    let fitted = fitted(&counts(base(), &[12.0; 1_000]));
    let first = ages(&fitted.schedule, 0.0)[0];
    assert_eq!(first, 12.5, "the edge, and until a block is visible");
    assert!((fitted.expected.reads - 2.0).abs() < 1e-9);
    assert!((fitted.expected.delay_secs - 0.5).abs() < 1e-9);
}

#[test]
fn between_two_modes_it_waits() {
    let fast = evenly(800).map(|share| 2.0 + 4.0 * share);
    let slow = evenly(200).map(|share| 90.0 + 10.0 * share);
    let fitted = fitted(&counts(base(), &fast.chain(slow).collect::<Vec<_>>()));
    assert!(checks_in(&fitted, 0.0, 8.0) >= 1);
    assert!(checks_in(&fitted, 8.0, 88.0) <= 2, "{:?}", ages(&fitted.schedule, 0.0));
    assert!(checks_in(&fitted, 90.0, 103.0) >= 2, "{:?}", ages(&fitted.schedule, 0.0));
}

#[test]
fn a_heavy_tail_is_followed_ever_more_rarely() {
    let tail: Vec<f64> =
        evenly(2_000).map(|share| 4.0 * (share / (1.0 - share)).powf(0.75)).collect();
    let fitted = fitted(&counts(base(), &tail));
    let thick = checks_in(&fitted, 0.0, 20.0);
    let thin = checks_in(&fitted, 100.0, 120.0);
    assert!(thick >= 3 && thin <= 1, "{:?}", ages(&fitted.schedule, 0.0));
    assert_eq!(fitted.expected.missed.max(0.01), 0.01);
}

/// All was fast, and at once everything takes a minute and a half: the largest gap bounds what the old
/// schedule costs until the next fit.
#[test]
fn a_step_in_latency_costs_at_most_the_largest_gap() {
    let old = fitted(&counts(base(), &evenly(5_000).map(|s| 1.0 + 3.0 * s).collect::<Vec<_>>()));
    for slow in [30.0, 90.0, 200.0, 280.0] {
        let now = Survival::measured(&counts(base(), &vec![slow; 1_000]));
        let regret = expected(&old.schedule, &now, &settings().conditions);
        assert_eq!(regret.missed, 0.0, "at {slow} s");
        assert!(regret.delay_secs <= 60.0, "at {slow} s: {regret:?}");
        assert!(regret.reads <= 12.0, "at {slow} s: {regret:?}");
    }
}

#[test]
fn reads_for_nothing_still_end() {
    let counts = counts(base(), &evenly(1_000).map(|s| 600.0 * s).collect::<Vec<_>>());
    let cheap = Objective::Prices(Prices { read: 1e-6, delay_second: 1.0 });
    let fitted = fit(&counts, &FitSettings { objective: cheap, ..settings() }).unwrap();
    assert!(fitted.schedule.repeats_max() <= REPEATS_MAX);
    assert!(fitted.schedule.repeats_max() > REPEATS_MAX / 2, "the bound is used, too");
    assert!(fitted.prices.read > 1e-6, "and the price says what was paid for");
}

#[test]
fn settings_that_make_no_sense_are_refused_by_name() {
    let counts = LatencyCounts::new(base());
    let mut bad = Vec::new();
    for (field, change) in [
        ("price of a read", (|s| price(s, 0.0, 1.0)) as fn(&mut FitSettings)),
        ("price of a second", |s| price(s, 1.0, f64::NAN)),
        ("budget of reads", |s| s.objective = Objective::Budget { reads: 0.5 }),
        ("gap_max", |s| s.gap_max = Duration::from_secs(1)),
        ("gap_max", |s| s.gap_max = Duration::from_secs(3)),
        ("ending", |s| s.conditions.ending.delay_secs = -1.0),
    ] {
        let mut settings = settings();
        change(&mut settings);
        let refused = fit(&counts, &settings).unwrap_err();
        bad.push((refused.field, field));
    }
    assert!(bad.iter().all(|(refused, field)| refused == field), "{bad:?}");
}

fn price(settings: &mut FitSettings, read: f64, delay_second: f64) {
    settings.objective = Objective::Prices(Prices { read, delay_second });
}

#[test]
fn a_grid_reaches_the_horizon_whatever_the_blocks() {
    for (block_ms, horizon) in [(250, 600), (500, 600), (2_000, 600), (12_000, 3_600), (400, 7_200)]
    {
        let horizon = Duration::from_secs(horizon);
        let grid = Grid::covering(Duration::from_millis(block_ms), horizon);
        assert!(grid.horizon() >= horizon, "{block_ms}: {grid:?}");
        assert!(grid.step() <= Duration::from_secs(8), "{block_ms}: {grid:?}");
    }
}

proptest! {
    /// Whatever was measured, and whenever a payment was found: checks come later and later, no gap is
    /// larger than allowed while the repeats last, they last as long as they must, and they end.
    #[test]
    fn whatever_was_measured_the_bounds_hold(
        counts in any_counts(300),
        found_ms in 0..700_000_u64,
        read in 0.001..20.0_f64,
    ) {
        let objective = Objective::Prices(Prices { read, delay_second: 0.5 });
        let settings = FitSettings { objective, ..settings() };
        let fitted = fit(&counts, &settings).unwrap();
        let found_at = Duration::from_millis(found_ms);
        let ages = fitted.schedule.ages_after(found_at);
        prop_assert!(ages.len() <= REPEATS_MAX);
        let mut before = found_at;
        for age in &ages {
            prop_assert!(*age > before && *age - before <= settings.gap_max, "{:?}", ages);
            before = *age;
        }
        prop_assert!(before >= settings.repeat_for, "{:?}", ages);
    }

    /// What a fit promises is what its schedule does to the distribution, payment by payment.
    #[test]
    fn the_promise_is_kept_sample_by_sample(
        latencies in proptest::collection::vec(0.1..400.0_f64, 200..400),
        never in 0..100_u32,
    ) {
        let mut counts = counts(base(), &latencies);
        counts.add_never(never.into());
        let settings = settings();
        let fitted = fit(&counts, &settings).unwrap();
        let checks = ages(&fitted.schedule, 0.0);
        let lag = settings.conditions.visible_after.as_secs_f64();
        let ending = settings.conditions.ending;
        let (mut reads, mut delay) = (0.0, 0.0);
        for latency in &latencies {
            match checks.iter().position(|check| check - lag >= *latency) {
                Some(at) => {
                    reads += at as f64 + 2.0;
                    delay += checks[at] - latency;
                }
                None => {
                    reads += checks.len() as f64 + 1.0 + ending.reads;
                    delay += ending.delay_secs;
                }
            }
        }
        reads += f64::from(never) * (checks.len() as f64 + 1.0 + ending.reads);
        let all = latencies.len() as f64 + f64::from(never);
        prop_assert!((fitted.expected.reads - reads / all).abs() < 1e-6);
        prop_assert!((fitted.expected.delay_secs - delay / all).abs() < 1e-6);
    }
}

#[test]
fn a_budget_that_cannot_be_kept_is_told_and_its_price_makes_sense() {
    let mut counts = counts(base(), &evenly(1_000).map(|s| 1.0 + 3.0 * s).collect::<Vec<_>>());
    // Who never settles is looked at once a minute for five minutes, whatever that costs.
    counts.add_never(1_000.0);
    let within = |reads: f64| {
        let objective = Objective::Budget { reads };
        fit(&counts, &FitSettings { objective, ..settings() }).unwrap()
    };
    let unmet = within(1.5);
    assert_eq!(unmet.unmet_budget, Some(1.5));
    assert!(unmet.expected.reads > 1.5);
    assert!(
        unmet.prices.read < 1e6,
        "a price that is the reason for something: {:?}",
        unmet.prices
    );
    let kept = within(unmet.expected.reads + 0.01);
    assert_eq!(kept.unmet_budget, None);
    assert!(kept.expected.reads <= unmet.expected.reads + 0.01);

    let conditions = &settings().conditions;
    let decision =
        adopt(&unmet, &Schedule::default(), &counts, conditions, &AdoptionRule::default());
    let (Adoption::Adopt { why } | Adoption::Keep { why }) = decision;
    assert!(why.contains("the budget of 1.5 reads cannot be kept"), "{why}");
}
