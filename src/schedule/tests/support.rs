//! Distributions to fit to.

use std::time::Duration;

use proptest::prelude::*;

use crate::schedule::{
    Bounds, Conditions, Ending, FoundAges, Grid, LatencyCounts, Prices, Schedule, Survival,
};

pub(super) fn secs(secs: f64) -> Duration {
    Duration::from_secs_f64(secs)
}

pub(super) fn grid(step_secs: u64, bins: usize) -> Grid {
    Grid::new(Duration::from_secs(step_secs), bins).unwrap()
}

pub(super) fn counts(grid: Grid, latencies: &[f64]) -> LatencyCounts {
    let mut counts = LatencyCounts::new(grid);
    for latency in latencies {
        counts.add_latency(secs(*latency), 1.0);
    }
    counts
}

/// Anything that was ever measured: settled anywhere in a bin, open, late, never.
pub(super) fn any_counts(bins: usize) -> impl Strategy<Value = LatencyCounts> {
    let bin = prop_oneof![2 => Just((0_u32, 0_u32, 0.0)), 5 => (0..20_u32, 0..4_u32, 0.0..=1.0)];
    (proptest::collection::vec(bin, bins), 0..6_u32, 0..6_u32).prop_map(
        move |(all, late, never)| {
            let grid = grid(2, bins);
            let mut counts = LatencyCounts::new(grid);
            for (k, (settled, open, part)) in all.into_iter().enumerate() {
                let latency = grid.edge(k + 1) - grid.step().mul_f64(part * 0.999);
                counts.add_latency(latency, settled.into());
                counts.add_open(grid.edge(k), open.into());
            }
            counts.add_late(late.into());
            counts.add_never(never.into());
            counts
        },
    )
}

pub(super) fn any_prices() -> impl Strategy<Value = Prices> {
    (0.01..10.0, prop_oneof![1 => Just(0.0), 9 => 0.001..5.0])
        .prop_map(|(read, delay_second)| Prices { read, delay_second })
}

pub(super) fn any_ending() -> impl Strategy<Value = Ending> {
    (0.0..200.0, 0.0..3.0).prop_map(|(delay_secs, reads)| Ending { delay_secs, reads })
}

pub(super) fn any_bounds(bins: usize) -> impl Strategy<Value = Bounds> {
    (1..=3_usize, 0..bins, 0..=bins).prop_map(move |(gap_min, more, end_from)| Bounds {
        gap_min,
        gap_max: gap_min + more,
        end_from,
    })
}

/// The cost of checks at these edges, from edge `from` on, times the chance of getting there: by the
/// definition, sample by sample, and not by the optimiser's sums.
pub(super) fn cost_by_definition(
    survival: &Survival,
    prices: Prices,
    ending: Ending,
    lag: f64,
    from: usize,
    checks: &[usize],
) -> f64 {
    let grid = survival.grid();
    let mean = |k: usize| {
        let settling = survival.settling_in(k);
        let sum = survival.latency_sum(k + 1) - survival.latency_sum(k);
        if settling > 0.0 { sum / settling } else { 0.0 }
    };
    let mut cost = 0.0;
    for k in from..grid.bins() {
        let before = checks.iter().filter(|j| **j <= k).count() as f64;
        let settling = survival.settling_in(k);
        cost += match checks.iter().find(|j| **j > k) {
            Some(found_at) => {
                let waits = grid.edge_secs(*found_at) + lag - mean(k);
                settling * (prices.read * (before + 1.0) + prices.delay_second * waits)
            }
            None => {
                let reads = prices.read * (before + ending.reads);
                settling * (reads + prices.delay_second * ending.delay_secs)
            }
        };
    }
    cost + survival.beyond_horizon() * prices.read * (checks.len() as f64 + ending.reads)
}

/// The schedule as a list, for printing and comparing.
pub(super) fn ages(schedule: &Schedule, found_at: f64) -> Vec<f64> {
    schedule.ages_after(secs(found_at)).iter().map(Duration::as_secs_f64).collect()
}

/// A world without lag in which payments are found at their broadcast.
pub(super) fn conditions(ending: Ending) -> Conditions {
    Conditions { found: FoundAges::at(Duration::ZERO), visible_after: Duration::ZERO, ending }
}

/// A grid of 2 s up to ten minutes, as Base has.
pub(super) fn base() -> Grid {
    Grid::covering(Duration::from_secs(2), Duration::from_secs(600))
}

/// Numbers from 0 to 1, evenly spread and always the same: quantiles to sample a distribution at.
pub(super) fn evenly(n: u32) -> impl Iterator<Item = f64> {
    (0..n).map(move |i| (f64::from(i) + 0.5) / f64::from(n))
}
