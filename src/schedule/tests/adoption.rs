//! A fit that is worse on recent payments is not adopted, and says why.

use super::support::*;
use crate::schedule::{
    Adoption, AdoptionRule, Conditions, Expected, FitSettings, FoundAges, LatencyCounts, Prior,
    Schedule, Survival, adopt, expected, fit,
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

/// Nine in ten are found a second after their broadcast and one in ten after two minutes: what is expected is the
/// mean over both, each weighing what it finds open, and no payment is found at the mean age of 12.9 s.
#[test]
fn what_is_expected_is_averaged_over_the_ages_at_which_payments_are_found() {
    let counts = counts(base(), &evenly(400).map(|s| 40.0 + 100.0 * s).collect::<Vec<_>>());
    let survival = Survival::measured(&counts);
    let schedule = Schedule::default();
    let at = |found: FoundAges| {
        expected(&schedule, &survival, &Conditions { found, ..settings().conditions })
    };
    let (early, late) = (at(FoundAges::at(secs(1.0))), at(FoundAges::at(secs(120.0))));
    let both = FoundAges::counted([(secs(120.0), 1.0), (secs(1.0), 9.0)]).unwrap();
    assert_eq!(both.median(), secs(1.0));
    let open = 1.0 - survival.settled_by(secs(119.5)).0;
    let mean = |f: &dyn Fn(&Expected) -> f64| (9.0 * f(&early) + open * f(&late)) / (9.0 + open);
    let both = at(both);
    assert!((both.reads - mean(&|e| e.reads)).abs() < 1e-9, "{both:?}");
    assert!((both.delay_secs - mean(&|e| e.delay_secs)).abs() < 1e-9, "{both:?}");
    let nobody = at(FoundAges::at(secs(12.9)));
    assert!((both.reads - nobody.reads).abs() > 0.1, "{both:?} {nobody:?}");
}

/// The first check finds them, whatever the schedule.
#[test]
fn who_had_settled_when_found_says_nothing_about_a_schedule() {
    let candidate = fit(&around(40.0), &settings()).unwrap();
    let found = FoundAges::counted([(secs(1.0), 1.0), (secs(100.0), 9.0)]).unwrap();
    let conditions = Conditions { found, ..settings().conditions };
    let decision = adopt(
        &candidate,
        &Schedule::default(),
        &around(41.0),
        &conditions,
        &AdoptionRule::default(),
    );
    let Adoption::Keep { why } = decision else { panic!("{decision:?}") };
    assert!(why.contains("40 recent samples are too few"), "{why}");
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
