//! The estimate is Kaplan and Meier's.

use std::time::Duration;

use proptest::prelude::*;

use super::support::*;
use crate::schedule::{Prior, Survival};

/// Six remissions at 1, 3, 3, 6 with patients lost at 2 and 5: (5/6), then with 4 at risk (2/4), then the
/// last one (0/1).
#[test]
fn it_equals_the_textbook() {
    let mut counts = counts(grid(1, 8), &[1.0, 3.0, 3.0, 6.0]);
    counts.add_open(secs(2.0), 1.0);
    counts.add_open(secs(5.0), 1.0);
    let survival = Survival::measured(&counts);
    let by_edge = [1.0, 5.0 / 6.0, 5.0 / 6.0, 5.0 / 12.0, 5.0 / 12.0, 5.0 / 12.0, 0.0, 0.0, 0.0];
    for (i, expected) in by_edge.into_iter().enumerate() {
        assert!((survival.at(i) - expected).abs() < 1e-12, "S({i}) = {}", survival.at(i));
    }
    assert!((survival.settling_in(2) / survival.at(2) - 0.5).abs() < 1e-12, "the hazard");
    assert_eq!(survival.never(), 0.0);
}

#[test]
fn open_payments_are_neither_settled_nor_ignored() {
    let settled = counts(grid(1, 10), &[2.0; 5]);
    let (alone, mut with_open) = (Survival::measured(&settled), settled.clone());
    with_open.add_open(secs(6.0), 5.0);
    let with_open = Survival::measured(&with_open);
    assert_eq!(alone.at(2), 0.0, "all that was seen settled");
    assert!((with_open.at(2) - 0.5).abs() < 1e-12, "half were seen to live on");
    assert!((with_open.never() - 0.5).abs() < 1e-12, "and nothing is known of them later");
}

#[test]
fn who_settles_after_the_horizon_is_not_never() {
    let mut counts = counts(grid(1, 10), &[2.0; 6]);
    counts.add_latency(secs(11.0), 1.0);
    counts.add_never(3.0);
    let survival = Survival::measured(&counts);
    assert!((survival.beyond_horizon() - 0.4).abs() < 1e-12);
    assert!((survival.never() - 0.3).abs() < 1e-12);
    assert_eq!(survival.quantile(0.7), None, "fewer than that settle in time");
    assert_eq!(survival.quantile(0.6), Some(secs(2.0)));
}

#[test]
fn the_prior_fades_and_ends() {
    let prior = Prior::for_block_time(Duration::from_secs(2));
    let far = |n: usize| {
        let counts = counts(base(), &vec![100.0; n]);
        let (estimate, measured) =
            (Survival::estimate(&counts, &prior), Survival::measured(&counts));
        (0..=base().bins()).map(|i| (estimate.at(i) - measured.at(i)).abs()).fold(0.0, f64::max)
    };
    let distances = [0, 10, 50, 150, 199, 200, 1_000].map(far);
    assert!(distances.windows(2).all(|pair| pair[0] >= pair[1]), "{distances:?}");
    assert!(distances[0] > 0.5 && distances[5] == 0.0, "{distances:?}");
}

proptest! {
    /// Without open payments the estimate is the share counted, whatever was counted.
    #[test]
    fn without_censoring_it_is_the_empirical_distribution(
        latencies in proptest::collection::vec(0.0..30.0_f64, 1..200),
        never in 0..50_u32,
    ) {
        let mut counts = counts(grid(2, 12), &latencies);
        counts.add_never(never.into());
        let survival = Survival::measured(&counts);
        let all = latencies.len() as f64 + f64::from(never);
        for i in 0..=12 {
            let edge = survival.grid().edge_secs(i);
            // Nanoseconds are what a latency is rounded to on its way into the counts.
            let settled: Vec<f64> = latencies.iter().copied().filter(|l| *l <= edge && i > 0).collect();
            let share = 1.0 - settled.len() as f64 / all;
            prop_assert!((survival.at(i) - share).abs() < 1e-9);
            let sum = settled.iter().sum::<f64>() / all;
            prop_assert!((survival.latency_sum(i) - sum).abs() < 1e-6);
        }
    }

    /// Survival starts at one and never rises, whatever was counted.
    #[test]
    fn survival_never_rises(counts in any_counts(20)) {
        let survival = Survival::measured(&counts);
        prop_assert_eq!(survival.at(0), 1.0);
        for k in 0..20 {
            prop_assert!(survival.at(k + 1) <= survival.at(k));
            let mean = survival.latency_sum(k + 1) - survival.latency_sum(k);
            let settling = survival.settling_in(k);
            let grid = survival.grid();
            prop_assert!(mean >= settling * grid.edge_secs(k) - 1e-9);
            prop_assert!(mean <= settling * grid.edge_secs(k + 1) + 1e-9);
        }
    }
}
