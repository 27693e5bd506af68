//! Repeats may be shifted, by little and only later; mandatory checks never.

use std::time::Duration;

use proptest::prelude::*;

use crate::domain::{PaymentId, Timestamp};
use crate::schedule::{JITTER_SHARE_MAX, Pacing};

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

proptest! {
    /// A repeat is never made before it is due, nor later than the named bounds allow.
    #[test]
    fn a_shift_is_later_and_bounded(
        id in "[a-z0-9]{1,20}",
        now in 1_600_000_000_000..1_900_000_000_000_i64,
        gap in 1..100_000_u64,
        share in 0.0..1.0_f64,
        tick in 0..10_000_u64,
        tick_delay_max in 0..10_000_u64,
    ) {
        let pacing = Pacing { jitter_share: share, tick: ms(tick), tick_delay_max: ms(tick_delay_max) };
        let now = Timestamp::from_millis(now);
        let due = now.saturating_add(ms(gap));
        let payment = PaymentId::new(id);
        let placed = pacing.place(&payment, now, due);
        prop_assert!(placed >= due);
        let jitter_max = ms(gap).mul_f64(share.min(JITTER_SHARE_MAX));
        prop_assert!(placed.since(due) <= jitter_max + ms(tick.min(tick_delay_max)));
        prop_assert_eq!(placed, pacing.place(&payment, now, due), "always the same for one payment");
        prop_assert_eq!(Pacing::default().place(&payment, now, due), due);
    }

    /// Ticks are shared: payments due within one tick are read together.
    #[test]
    fn payments_due_within_a_tick_meet(
        tick in 1..5_000_u64,
        number in 1_000_000..2_000_000_u64,
        first in 0.0..1.0_f64,
        second in 0.0..1.0_f64,
    ) {
        let pacing = Pacing { jitter_share: 0.0, tick: ms(tick), tick_delay_max: ms(tick) };
        let on_tick = Timestamp::from_millis(i64::try_from(tick * number).unwrap());
        let [first, second] = [first, second].map(|part| {
            let due = on_tick.saturating_sub(ms((part * tick as f64) as u64));
            pacing.place(&PaymentId::from("p"), due.saturating_sub(ms(10)), due)
        });
        prop_assert_eq!(first, second);
        prop_assert_eq!(first, on_tick);
    }
}

#[test]
fn jitter_spreads_payments_evenly() {
    let pacing = Pacing { jitter_share: 0.1, ..Pacing::default() };
    let now = Timestamp::from_millis(1_700_000_000_000);
    let due = now.saturating_add(ms(100_000));
    let mut in_tenth = [0_u32; 10];
    for n in 0..10_000 {
        let late = pacing.place(&PaymentId::new(format!("pay_{n}")), now, due).since(due);
        in_tenth[(late.as_millis() / 1_000).min(9) as usize] += 1;
    }
    assert!(in_tenth.iter().all(|n| (850..1_150).contains(n)), "{in_tenth:?}");
}

#[test]
fn a_tick_that_would_cost_more_than_stated_is_not_waited_for() {
    let pacing = Pacing { jitter_share: 0.0, tick: ms(1_000), tick_delay_max: ms(300) };
    let at = |millis| {
        let due = Timestamp::from_millis(millis);
        pacing.place(&PaymentId::from("p"), due.saturating_sub(ms(5_000)), due).as_millis()
    };
    assert_eq!([at(10_700), at(10_699), at(10_000), at(10_001)], [11_000, 10_699, 10_000, 10_001]);
}
