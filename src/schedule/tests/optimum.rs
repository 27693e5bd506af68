//! The dynamic program against every other way to place checks.

use proptest::prelude::*;

use super::support::*;
use crate::schedule::{Bounds, Ending, Prices, Survival, optimise};

const BINS: usize = 9;

/// Every list of checks after `from` that keeps the bounds, one bit per edge.
fn all_plans(from: usize, bounds: Bounds) -> impl Iterator<Item = Vec<usize>> {
    (0..1_u32 << (BINS - from)).filter_map(move |bits| {
        let checks: Vec<usize> =
            (from + 1..=BINS).filter(|edge| bits & (1 << (edge - from - 1)) != 0).collect();
        let mut at = from;
        for next in &checks {
            let gap = next - at;
            // Near the horizon there may be no room for the least gap: then the last edge is allowed.
            let too_small = gap < bounds.gap_min && *next != BINS;
            if too_small || gap > bounds.gap_max {
                return None;
            }
            at = *next;
        }
        (at == BINS || at >= bounds.end_from).then_some(checks)
    })
}

fn follow(optimum: &crate::schedule::Optimum, from: usize) -> Vec<usize> {
    std::iter::successors(optimum.next(from), |at| optimum.next(*at)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// The optimum is the optimum: from every edge, no plan whatever costs less, and its own plan costs
    /// what it says.
    #[test]
    fn no_plan_beats_it_from_any_age(
        counts in any_counts(BINS),
        prices in any_prices(),
        bounds in any_bounds(BINS),
        ending in any_ending(),
        lag in 0.0..3.0,
    ) {
        let survival = Survival::measured(&counts);
        let optimum = optimise(&survival, prices, bounds, ending, lag);
        for from in 0..=BINS {
            let cost = |plan: &[usize]| {
                cost_by_definition(&survival, prices, ending, lag, from, plan)
            };
            let best = all_plans(from, bounds).map(|plan| cost(&plan)).fold(f64::INFINITY, f64::min);
            let own = follow(&optimum, from);
            prop_assert!((optimum.value(from) - best).abs() < 1e-9 * (1.0 + best),
                "from edge {from}: {} where {best} was possible", optimum.value(from));
            prop_assert!((cost(&own) - best).abs() < 1e-9 * (1.0 + best), "{own:?}");
            prop_assert!(all_plans(from, bounds).any(|plan| plan == own), "{own:?} breaks a bound");
        }
    }
}

#[test]
fn one_certain_block_gets_one_check_right_behind_it() {
    let survival = Survival::measured(&counts(grid(2, BINS), &[6.0; 10]));
    let prices = Prices { read: 1.0, delay_second: 1.0 };
    let bounds = Bounds { gap_min: 1, gap_max: BINS, end_from: 0 };
    let optimum =
        optimise(&survival, prices, bounds, Ending { delay_secs: 100.0, reads: 1.0 }, 0.0);
    assert_eq!(follow(&optimum, 0), [3]);
    assert!((optimum.value(0) - 1.0).abs() < 1e-12);
}

proptest! {
    /// A policy by age is exact: fitted to everybody, it does from any age on what a fit to those who got
    /// that far would do, for the same price.
    #[test]
    fn it_is_right_for_payments_of_any_age(
        counts in any_counts(BINS),
        prices in any_prices(),
        bounds in any_bounds(BINS),
        ending in any_ending(),
        from in 0..BINS,
    ) {
        let survival = Survival::measured(&counts);
        prop_assume!(survival.at(from) > 0.0);
        let whole = optimise(&survival, prices, bounds, ending, 0.5);
        let conditioned = survival.conditioned(from);
        let fresh = optimise(&conditioned, prices, bounds, ending, 0.5);
        let scaled = whole.value(from) / survival.at(from);
        prop_assert!((fresh.value(from) - scaled).abs() < 1e-9 * (1.0 + scaled));
        let plan = follow(&whole, from);
        let cost = cost_by_definition(&conditioned, prices, ending, 0.5, from, &plan);
        prop_assert!((cost - fresh.value(from)).abs() < 1e-9 * (1.0 + cost));
    }
}
