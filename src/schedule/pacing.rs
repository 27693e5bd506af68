//! Small shifts of repeats: apart, so that payments found together are not always read together, or onto
//! shared ticks, so that they are and one batch reads many.
//!
//! Both only ever make a repeat later, within named bounds: a check placed just after a block must not
//! come before it. Mandatory checks are never moved.

use std::time::Duration;

use crate::domain::{PaymentId, Timestamp};

/// The largest share of a gap that jitter may take.
pub const JITTER_SHARE_MAX: f64 = 0.5;

/// How repeats are shifted. The default shifts none.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Pacing {
    /// A repeat comes up to this share of its gap later, from 0 to [`JITTER_SHARE_MAX`]; always the same
    /// for one payment.
    pub jitter_share: f64,
    /// Repeats are rounded up to multiples of this since the Unix epoch; zero: they are not.
    pub tick: Duration,
    /// But only where that makes them at most this much later.
    pub tick_delay_max: Duration,
}

impl Pacing {
    /// When the repeat of `payment` that is due at `due` is made, seen from `now`.
    pub fn place(&self, payment: &PaymentId, now: Timestamp, due: Timestamp) -> Timestamp {
        let share = if self.jitter_share.is_finite() {
            self.jitter_share.clamp(0.0, JITTER_SHARE_MAX)
        } else {
            0.0
        };
        let jittered = due.saturating_add(due.since(now).mul_f64(share * part_of(payment)));
        self.onto_tick(jittered)
    }

    fn onto_tick(&self, at: Timestamp) -> Timestamp {
        let Ok(tick) = i64::try_from(self.tick.as_millis()) else { return at };
        if tick <= 0 {
            return at;
        }
        let past = at.as_millis().rem_euclid(tick);
        let wait = Duration::from_millis(u64::try_from((tick - past) % tick).unwrap_or(0));
        if wait <= self.tick_delay_max { at.saturating_add(wait) } else { at }
    }
}

/// A number from 0 to 1 that is always the same for one payment, and spread evenly over many (FNV-1a,
/// then mixed, because it is the low bits that FNV spreads best).
fn part_of(payment: &PaymentId) -> f64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for byte in payment.as_str().bytes() {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    }
    hash ^= hash >> 32;
    hash = hash.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (hash >> 11) as f64 / (1_u64 << 53) as f64
}
