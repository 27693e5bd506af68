//! What the worker does in a replay is what was promised, and what a loop leaves behind.

use super::*;
use crate::schedule::{FitSettings, FoundAges, Grid, LatencyCounts, Prior, expected, fit};

/// 100 payments settle between 3 s and a minute after their broadcast, and 10 never do.
fn payments() -> Vec<Broadcast> {
    (0..110_u32)
        .map(|n| Broadcast {
            after: Duration::from_millis(u64::from(n % 8) * 250),
            minable_after: (n % 11 != 0)
                .then(|| Duration::from_millis(3_000 + u64::from(n * n * 31) % 57_000)),
        })
        .collect()
}

/// The wiring from a fit to the worker: what a fitted schedule promises, by arithmetic on counts, is
/// what the daemon then does, read for read and second for second.
#[tokio::test]
async fn the_worker_does_what_a_fitted_schedule_promises() {
    let payments = payments();
    let mut counts = LatencyCounts::new(Grid::covering(BLOCK_TIME, Duration::from_secs(600)));
    for payment in &payments {
        match payment.latency() {
            Some(latency) => counts.add_latency(latency, 1.0),
            None => counts.add_never(1.0),
        }
    }
    let mut settings = FitSettings::for_block_time(BLOCK_TIME);
    settings.conditions.found = FoundAges::at(settings.conditions.visible_after);
    settings.conditions.ending.reads = 0.0;
    // What is promised is then the mean over these very payments.
    settings.prior = Prior::NONE;
    let fitted = fit(&counts, &settings).unwrap();
    let replayed = replay(
        &payments,
        &ReplaySettings {
            schedule: fitted.schedule.clone(),
            pacing: Pacing::default(),
            found_at: settings.conditions.visible_after,
            visible_after: settings.conditions.visible_after,
            has_mandatory: true,
        },
    )
    .await
    .unwrap();
    let promised = expected(&fitted.schedule, &fitted.survival, &settings.conditions);
    let settled = counts.settled();
    assert_eq!((replayed.missed, replayed.delays.len() as f64), (0, settled));
    let reads = replayed.reads as f64 / payments.len() as f64;
    assert!((reads - promised.reads).abs() < 1e-9, "{reads} reads of {}", promised.reads);
    let delay = replayed.delay_mean().as_secs_f64();
    assert!((delay - promised.found_delay_secs).abs() < 1e-6, "{delay} s of {promised:?}");
}

/// What a loop that gives up leaves behind, only the daemon's mandatory check finds.
#[tokio::test]
async fn who_gives_up_misses_what_the_mandatory_check_finds() {
    let landing = |secs: Option<u64>| Broadcast {
        after: Duration::ZERO,
        minable_after: secs.map(Duration::from_secs),
    };
    let payments = [landing(Some(5)), landing(Some(100)), landing(None)];
    let offsets = (0..=15).map(|n| Duration::from_secs(2 * n)).collect();
    let mut settings = ReplaySettings {
        schedule: Schedule::new(offsets).unwrap(),
        pacing: Pacing::default(),
        found_at: Duration::from_millis(500),
        visible_after: Duration::from_millis(500),
        has_mandatory: false,
    };
    let gave_up = replay(&payments, &settings).await.unwrap();
    assert_eq!((gave_up.missed, gave_up.mandatory_reads), (1, 0));
    assert_eq!((gave_up.delays.len(), gave_up.late_delays.len()), (1, 0));
    settings.has_mandatory = true;
    let found = replay(&payments, &settings).await.unwrap();
    assert_eq!((found.missed, found.reads), (0, gave_up.reads));
    // One settled, and one never will: each is read once, when its authorization is over.
    assert_eq!(found.mandatory_reads, 2);
    let late = VALID_FOR + FINALITY_MARGIN - Duration::from_secs(100);
    assert_eq!(found.late_delays, [late]);
}

/// Nobody waits longer than one interval, whatever else is read at the same time.
#[tokio::test]
async fn a_fixed_interval_bounds_every_delay() {
    let payments: Vec<Broadcast> = (0..600_u32)
        .map(|n| Broadcast {
            after: Duration::from_millis(u64::from(n * 7 % 240) * 250),
            minable_after: (n % 10 != 0)
                .then(|| Duration::from_millis(300 + u64::from(n * n * 31) % 1_500)),
        })
        .collect();
    let offsets = (0..60).map(|n| Duration::from_secs(10 * n)).collect();
    let settings = ReplaySettings {
        schedule: Schedule::new(offsets).unwrap(),
        pacing: Pacing::default(),
        found_at: Duration::from_millis(500),
        visible_after: Duration::from_millis(500),
        has_mandatory: false,
    };
    let replayed = replay(&payments, &settings).await.unwrap();
    assert_eq!((replayed.missed, replayed.delays.len()), (0, 540));
    let longest = replayed.delay_at(1.0);
    assert!(longest <= Duration::from_secs(10), "{longest:?}");
}
