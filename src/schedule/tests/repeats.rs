//! The repeats, and the two checks that no schedule may skip.

use std::time::Duration;

use proptest::prelude::*;

use super::support::any_counts;
use crate::domain::{PaymentId, Timestamp};
use crate::schedule::{
    AgeTable, FitSettings, Grid, JITTER_SHARE_MAX, Pacing, Schedule, ScheduleError, fit,
};

#[test]
fn offsets_must_rise_and_be_few() {
    let secs = |list: &[u64]| list.iter().map(|s| Duration::from_secs(*s)).collect::<Vec<_>>();
    assert_eq!(Schedule::new(vec![]), Err(ScheduleError::Empty));
    assert_eq!(Schedule::new(secs(&[0, 2, 2])), Err(ScheduleError::NotRising));
    assert_eq!(
        Schedule::new((0..65).map(Duration::from_secs).collect()),
        Err(ScheduleError::TooMany)
    );
    assert!(Schedule::new(secs(&[0, 2, 5])).is_ok());
}

#[test]
fn missed_repeats_are_skipped_not_made_up_for() {
    let schedule = Schedule::default();
    let opened = Timestamp::from_millis(1_000_000);
    let after = |secs| opened.saturating_add(Duration::from_secs(secs));
    assert_eq!(schedule.next_repeat(opened, opened, opened), Some(after(2)));
    assert_eq!(schedule.next_repeat(opened, opened, after(60)), Some(after(80)));
    assert_eq!(schedule.next_repeat(opened, opened, after(300)), None);
}

/// Edge 0 -> 2 -> 3 -> 6 of a grid of 2 s, and then no more; blocks are visible after half a second.
fn table() -> Schedule {
    let next = [Some(2), Some(2), Some(3), Some(6), Some(6), Some(6)].to_vec();
    let grid = Grid::new(Duration::from_secs(2), 6).unwrap();
    Schedule::by_age(AgeTable::new(grid, Duration::from_millis(500), next).unwrap())
}

fn at(ms: i64) -> Timestamp {
    Timestamp::from_millis(1_700_000_000_000 + ms)
}

#[test]
fn a_fitted_schedule_goes_by_the_payments_age_and_not_the_watchs() {
    let schedule = table();
    for (now, next) in [
        (0, Some(4_500)),
        (2_500, Some(4_500)),
        (4_499, Some(6_500)),
        (4_700, Some(6_500)),
        (6_500, Some(12_500)),
        (12_500, None),
        (90_000, None),
    ] {
        for opened in [0, 2_000, 11_000] {
            let next_repeat = schedule.next_repeat(at(opened), at(0), at(now));
            assert_eq!(next_repeat, next.map(at), "{now} ms after the broadcast");
        }
    }
}

#[test]
fn who_opens_again_after_all_that_was_measured_starts_anew() {
    let (schedule, reorged) = (table(), 600_000);
    let after = |ms| schedule.next_repeat(at(reorged), at(0), at(reorged + ms));
    assert_eq!(after(0), Some(at(reorged + 4_500)));
    assert_eq!(after(12_500), None);
}

proptest! {
    /// Whatever the gateway's clock says of the broadcast, the next repeat is never further away than the
    /// largest gap, up to the end of the repeats, jitter and tick included.
    #[test]
    fn the_gap_to_the_next_repeat_is_bounded_whatever_the_gateways_clock_says(
        counts in any_counts(60),
        started in -400_000_i64..400_000,
        opened in 0_i64..200_000,
        waited in 0_i64..200_000,
        jitter_share in 0.0..JITTER_SHARE_MAX,
        tick in 0..5_000_u64,
    ) {
        let settings = FitSettings {
            gap_max: Duration::from_secs(20),
            repeat_for: Duration::from_secs(110),
            ..FitSettings::for_block_time(Duration::from_secs(2))
        };
        let schedule = fit(&counts, &settings).unwrap().schedule;
        let now = at(opened + waited);
        let tick = Duration::from_millis(tick);
        let pacing = Pacing { jitter_share, tick, tick_delay_max: tick };
        let Some(next) = schedule.next_repeat(at(opened), at(started), now) else {
            // Only whoever has been followed for as long as the repeats last has none left.
            let age = now.since(at(started.min(opened)));
            prop_assert!(age >= settings.repeat_for - Duration::from_secs(1), "none at {age:?}");
            return Ok(());
        };
        let placed = pacing.place(&PaymentId::from("p"), now, next);
        let most = settings.gap_max.mul_f64(1.0 + jitter_share) + tick;
        prop_assert!(next > now && placed.since(now) <= most, "{:?}", placed.since(now));
    }
}

#[test]
fn a_check_that_came_late_is_not_followed_by_one_at_once() {
    let schedule = table();
    for now in (0..11_500).step_by(10) {
        let next = schedule.next_repeat(at(0), at(0), at(now)).unwrap();
        assert!(next.since(at(now)) >= Duration::from_millis(500), "{now} -> {next}");
    }
}

mod mandatory {
    use super::*;
    use crate::domain::{BlockTime, Inconclusive, Payment, Policy, RawPayment, Verdict};
    use crate::schedule::{Timing, due_times};

    fn payment(valid_before_secs: u64) -> Payment {
        let zeros = |bytes: usize| Some(format!("0x{}", "00".repeat(bytes)));
        let text = |text: &str| Some(text.to_owned());
        let raw = RawPayment {
            id: "p1".to_owned(),
            order_id: text("o1"),
            rail: text("x402"),
            method: text("eip3009"),
            chain_id: text("8453"),
            token: zeros(20),
            payer: zeros(20),
            pay_to: zeros(20),
            amount: text("1"),
            nonce: zeros(32),
            valid_after: text("0"),
            valid_before: Some((1_700_000_000 + valid_before_secs).to_string()),
            status: text("unknown"),
            created_at: text("1700000000000"),
            broadcast_at: text("1700000000000"),
            ..RawPayment::default()
        };
        raw.parse().unwrap()
    }

    proptest! {
        /// Whatever the schedule, jitter and ticks: the first check after `now` is never past a mandatory
        /// one, and the mandatory one is made exactly when it is due.
        #[test]
        fn mandatory_checks_stay_where_they_are(
            now in 0..2_000_000_i64,
            valid_before in 1..600_u64,
            margin in 0..60_u64,
            deadline in 60..1_200_u64,
            jitter_share in 0.0..1.0_f64,
            tick in 0..20_000_u64,
            fitted in any::<bool>(),
        ) {
            let tick = Duration::from_millis(tick);
            let timing = Timing {
                finality_margin: Duration::from_secs(margin),
                deadline_margin: Duration::from_secs(1),
                finality_retry: Duration::from_secs(60),
                pacing: Pacing { jitter_share, tick, tick_delay_max: tick },
            };
            let policy = Policy { deadline_after: Duration::from_secs(deadline), ..Policy::default() };
            let schedule = if fitted { table() } else { Schedule::default() };
            let payment = payment(valid_before);
            let verdict = Verdict::Inconclusive(Inconclusive::NotAsked);
            let due = due_times(&schedule, at(0), &payment, &verdict, &policy, &timing, at(now));

            let provable = Timestamp::from(BlockTime::from_secs(1_700_000_000 + valid_before + margin));
            let deadline = at(0).saturating_add(Duration::from_secs(deadline + 1));
            let mandatory = [provable, deadline].into_iter().filter(|t| *t > at(now)).min();
            match (due.open.at, mandatory) {
                (Some(next), Some(mandatory)) => prop_assert!(next <= mandatory && next > at(now)),
                (None, Some(_)) => prop_assert!(false, "a mandatory check was dropped"),
                (Some(next), None) => prop_assert!(next > at(now)),
                (None, None) => {}
            }
            if schedule.next_repeat(at(0), at(0), at(now)).is_none() {
                prop_assert_eq!(due.open.at, mandatory, "and exactly so when nothing else is left");
            }
        }
    }
}
