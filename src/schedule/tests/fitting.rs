//! From counts to a schedule that is used.

use std::time::Duration;

use super::support::*;
use crate::schedule::{FitSettings, Grid, LatencyCounts, REPEATS_MAX, Schedule, fit};

fn settings() -> FitSettings {
    FitSettings::for_block_time(Duration::from_secs(2))
}

fn base() -> Grid {
    Grid::covering(Duration::from_secs(2), Duration::from_secs(600))
}

#[test]
fn nothing_measured_gives_the_priors_schedule() {
    let fitted = fit(&LatencyCounts::new(base()), &settings()).unwrap();
    let ages = ages(&fitted.schedule, 0.0);
    assert!((5..=REPEATS_MAX).contains(&ages.len()), "{ages:?}");
    assert!(*ages.last().unwrap() >= 300.0, "{ages:?}");
    assert!(ages.windows(2).all(|pair| pair[0] < pair[1] && pair[1] - pair[0] <= 60.0), "{ages:?}");
    assert!(fitted.expected.missed < 0.01, "{:?}", fitted.expected);
}

#[test]
fn a_schedule_reads_back_as_it_was_written() {
    let fitted = fit(&counts(base(), &[3.0, 5.5, 9.0, 80.0]), &settings()).unwrap();
    for schedule in [fitted.schedule, Schedule::default()] {
        let text = serde_json::to_string(&schedule).unwrap();
        assert_eq!(serde_json::from_str::<Schedule>(&text).unwrap(), schedule, "{text}");
        assert!(text.len() < 4_000, "{} bytes", text.len());
    }
}
