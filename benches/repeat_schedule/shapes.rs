//! The latencies that are replayed: four shapes, each in two halves.

use std::time::Duration;

use reconciled::sim::replay::{BLOCK_TIME, Broadcast};

/// So that every run sees the same payments.
pub(crate) const SEED: u64 = 20_260_101;
/// Payments come in over this long, at multiples of [`PHASE`].
const ARRIVALS: Duration = Duration::from_secs(60);
const PHASE: Duration = Duration::from_millis(250);
/// One payment in ten never lands.
const NEVER: f64 = 0.1;
/// Days of the congested hour in each half, by turns.
const DAYS: u32 = 2;
const DAY: Duration = Duration::from_secs(24 * 3_600);
/// When blocks are full: for an hour of every day.
const CONGESTED_FROM: Duration = Duration::from_secs(18 * 3_600);
const CONGESTED_FOR: Duration = Duration::from_secs(3_600);
/// The share of a day's payments that come in that hour: full blocks are many payments.
const CONGESTED_SHARE: f64 = 0.4;
/// In that hour, and in the rest of the day, payments come together at multiples of these.
const BUSY_EVERY: Duration = Duration::from_secs(5 * 60);
const QUIET_EVERY: Duration = Duration::from_secs(2 * 3_600);

/// How long payments take to become minable.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Shape {
    FastAndSteady,
    HeavyTail,
    TwoModes,
    CongestedHour,
}

impl Shape {
    pub(crate) const ALL: [(Self, &'static str); 4] = [
        (Self::FastAndSteady, "fast and steady"),
        (Self::HeavyTail, "heavy tail"),
        (Self::TwoModes, "two modes"),
        (Self::CongestedHour, "congested hour"),
    ];

    /// So many payments to fit to, and so many held out.
    pub(crate) fn halves(self, size: usize) -> [Vec<Broadcast>; 2] {
        let mut random = Random(SEED ^ self as u64);
        if self == Self::CongestedHour {
            return congested_days(size, &mut random);
        }
        [(); 2].map(|()| (0..size).map(|_| self.payment(&mut random)).collect())
    }

    fn payment(self, random: &mut Random) -> Broadcast {
        let after = random.up_to(ARRIVALS);
        let minable_after = self.sample(random).map(Duration::from_secs_f64);
        Broadcast { after, minable_after }
    }

    /// Seconds from the broadcast until the next block takes the transaction; `None`: never.
    pub(crate) fn sample(self, random: &mut Random) -> Option<f64> {
        if random.unit() < NEVER {
            return None;
        }
        Some(match self {
            // Log-logistic: half within 5 s, one in 25 later than 50 s, one in 300 later than 5 minutes.
            Self::HeavyTail => {
                let u = random.unit();
                5.0 * (u / (1.0 - u)).powf(1.0 / 1.4)
            }
            // One in five is sent again with a higher fee after a minute.
            Self::TwoModes if random.unit() < 0.2 => (60.0 + 8.0 * random.normal()).max(0.0),
            Self::FastAndSteady | Self::TwoModes | Self::CongestedHour => {
                random.log_normal(0.8, 0.4)
            }
        })
    }
}

/// Whole days, the odd ones to fit to and the even ones held out, so that each half has hours of the kind.
/// Time stands still between the days that a half has: no payment is open over midnight.
fn congested_days(size: usize, random: &mut Random) -> [Vec<Broadcast>; 2] {
    let of_day = size.div_ceil(DAYS as usize);
    let mut halves = [Vec::new(), Vec::new()];
    for n in 0..DAYS {
        for (turn, half) in (0..).zip(&mut halves) {
            let phases = Random(SEED + u64::from(2 * n + turn));
            half.extend((0..of_day).map(|_| {
                let payment = of_congested_day(random, &phases);
                Broadcast { after: payment.after + DAY * n, ..payment }
            }));
        }
    }
    halves
}

/// In the hour latency rises from its usual median to fifty times that, and falls again.
fn of_congested_day(random: &mut Random, phases_of_day: &Random) -> Broadcast {
    let is_busy = random.unit() < CONGESTED_SHARE;
    let at = if is_busy {
        CONGESTED_FROM + random.multiple_of(BUSY_EVERY, CONGESTED_FOR)
    } else {
        // The busy hour is the last of those that payments of the rest of the day come before.
        random.multiple_of(QUIET_EVERY, CONGESTED_FROM)
    };
    // What comes together has one phase to its block, another each time.
    let phases = (BLOCK_TIME.as_millis() / PHASE.as_millis()) as u32;
    let phase = Random(phases_of_day.0 ^ at.as_secs()).unit() * f64::from(phases);
    let after = at + PHASE * (phase as u32);
    if random.unit() < NEVER {
        return Broadcast { after, minable_after: None };
    }
    let into = at.saturating_sub(CONGESTED_FROM).as_secs_f64() / CONGESTED_FOR.as_secs_f64();
    let fullness = (std::f64::consts::PI * into).sin().powi(2);
    let minable = random.log_normal(0.8 + 40.0 * fullness, 0.4 + 0.2 * fullness);
    Broadcast { after, minable_after: Some(Duration::from_secs_f64(minable)) }
}

/// SplitMix64, so that every run sees the same payments.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
    }

    fn normal(&mut self) -> f64 {
        let (radius, turn) = (1.0 - self.unit(), self.unit());
        (-2.0 * radius.ln()).sqrt() * (std::f64::consts::TAU * turn).cos()
    }

    fn log_normal(&mut self, median: f64, sigma: f64) -> f64 {
        median * (sigma * self.normal()).exp()
    }

    /// A multiple of `step` below `end`.
    fn multiple_of(&mut self, step: Duration, end: Duration) -> Duration {
        step * ((self.unit() * end.as_secs_f64() / step.as_secs_f64()) as u32)
    }

    /// A multiple of [`PHASE`] below `end`.
    fn up_to(&mut self, end: Duration) -> Duration {
        self.multiple_of(PHASE, end)
    }
}
