//! A fit that is worse on recent payments is not adopted, and says why.

use super::support::*;
use crate::schedule::{
    Adoption, AdoptionRule, FitSettings, LatencyCounts, Prior, Schedule, adopt, fit,
};

fn settings() -> FitSettings {
    FitSettings { prior: Prior::NONE, ..FitSettings::for_block_time(secs(2.0)) }
}

fn around(middle: f64) -> LatencyCounts {
    counts(base(), &evenly(400).map(|s| middle * (0.5 + s)).collect::<Vec<_>>())
}

fn decide(fitted_to: &LatencyCounts, in_use: &Schedule, recent: &LatencyCounts) -> Adoption {
    let candidate = fit(fitted_to, &settings()).unwrap();
    adopt(&candidate, in_use, recent, &settings().conditions, &AdoptionRule::default())
}

#[test]
fn a_better_fit_is_adopted_with_its_figures() {
    let decision = decide(&around(40.0), &Schedule::default(), &around(41.0));
    let Adoption::Adopt { why } = decision else { panic!("{decision:?}") };
    for part in ["saves", "400 recent samples", "reads", "of delay"] {
        assert!(why.contains(part), "{why}");
    }
}

#[test]
fn a_fit_to_what_is_over_is_not_adopted() {
    let in_use = fit(&around(10.0), &settings()).unwrap().schedule;
    let decision = decide(&around(100.0), &in_use, &around(10.0));
    let Adoption::Keep { why } = decision else { panic!("{decision:?}") };
    assert!(why.starts_with("it is worse: on 400 recent samples it costs "), "{why}");
}

#[test]
fn the_same_again_is_no_new_version() {
    let in_use = fit(&around(10.0), &settings()).unwrap().schedule;
    let decision = decide(&around(10.0), &in_use, &around(10.0));
    let Adoption::Keep { why } = decision else { panic!("{decision:?}") };
    assert!(why.starts_with("it saves less than 1.0 %"), "{why}");
}

#[test]
fn a_handful_of_recent_payments_decides_nothing() {
    let decision = decide(&around(10.0), &Schedule::default(), &counts(base(), &[10.0; 3]));
    let Adoption::Keep { why } = decision else { panic!("{decision:?}") };
    assert!(why.contains("3 recent samples are too few") && why.contains("50"), "{why}");
}

/// Whoever never settles says nothing about when to look, however many they are.
#[test]
fn payments_that_failed_do_not_make_up_for_settled_ones() {
    let mut recent = counts(base(), &[10.0; 3]);
    recent.add_never(1_000.0);
    let decision = decide(&around(10.0), &Schedule::default(), &recent);
    let Adoption::Keep { why } = decision else { panic!("{decision:?}") };
    assert!(why.contains("3 recent samples are too few"), "{why}");
}
