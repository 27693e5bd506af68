//! How often the requests to an endpoint fail, over a rolling window of bounded memory.
//!
//! One whose requests fail too often is sick, and what it answers in between is not believed: an answer that
//! got lost, or was another request's, looks like none. It is asked by probes only, and is well again as soon
//! as few of the window's requests fail. What is a failure is for [`super::transport`] to say.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::clock::Clock;
use crate::domain::Timestamp;

/// When an endpoint's requests fail too often for it to be believed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ErrorRateLimits {
    /// Requests count for this long.
    pub window: Duration,
    /// Of fewer requests nothing is concluded.
    pub requests_min: u32,
    /// It is sick when more than this share of them fail; from 0 to 1.
    pub share_max: f64,
}

impl Default for ErrorRateLimits {
    fn default() -> Self {
        Self { window: Duration::from_secs(2 * 60), requests_min: 20, share_max: 0.5 }
    }
}

/// The window rolls on in this many steps.
const BUCKETS: usize = 12;

/// Failures in fewer steps than this are one bad moment, however many there are: a restart, or one large batch.
const FAILING_BUCKETS_MIN: usize = 3;

/// It is well again when no more than this part of `share_max` fails: at the very limit it would come and go.
const RECOVERED_PART: f64 = 0.5;

/// And so many requests in a row did not fail, however long that took: only probes ask while it is sick, and
/// between two of them the window may have run empty.
const RECOVERED_IN_A_ROW: u32 = 3;

/// One step of the window.
#[derive(Debug, Clone, Copy, Default)]
struct Bucket {
    /// Which step of all time it is.
    step: i64,
    requests: u32,
    failures: u32,
}

/// What the window holds.
struct Tally {
    requests: u32,
    failures: u32,
    failing_buckets: usize,
}

/// The requests of the window, as a pure state.
#[derive(Debug)]
struct ErrorRate {
    limits: ErrorRateLimits,
    buckets: [Bucket; BUCKETS],
    is_sick: bool,
    /// How many requests did not fail since the last one that did.
    good_in_a_row: u32,
}

impl ErrorRate {
    fn new(limits: ErrorRateLimits) -> Self {
        Self { limits, buckets: [Bucket::default(); BUCKETS], is_sick: false, good_in_a_row: 0 }
    }

    fn step(&self, now: Timestamp) -> i64 {
        let steps = u128::from(u32::try_from(BUCKETS).unwrap_or(u32::MAX));
        let millis = i64::try_from(self.limits.window.as_millis() / steps).unwrap_or(i64::MAX);
        now.as_millis().div_euclid(millis.max(1))
    }

    /// What happened in the window that ends now. When the clock jumped, nothing did.
    fn tally(&self, now: Timestamp) -> Tally {
        let last = self.step(now);
        let steps = i64::try_from(BUCKETS).unwrap_or(i64::MAX);
        let in_window =
            |bucket: &&Bucket| bucket.step <= last && bucket.step > last.saturating_sub(steps);
        let mut tally = Tally { requests: 0, failures: 0, failing_buckets: 0 };
        for bucket in self.buckets.iter().filter(in_window) {
            tally.requests = tally.requests.saturating_add(bucket.requests);
            tally.failures = tally.failures.saturating_add(bucket.failures);
            tally.failing_buckets += usize::from(bucket.failures > 0);
        }
        tally
    }

    /// Takes note of one request. Returns whether it made the endpoint sick, or well, if it did.
    fn note(&mut self, now: Timestamp, has_failed: bool) -> Option<bool> {
        let step = self.step(now);
        let steps = i64::try_from(BUCKETS).unwrap_or(i64::MAX);
        let place = usize::try_from(step.rem_euclid(steps)).unwrap_or(0);
        let bucket = &mut self.buckets[place];
        if bucket.step != step {
            *bucket = Bucket { step, ..Bucket::default() };
        }
        bucket.requests = bucket.requests.saturating_add(1);
        bucket.failures = bucket.failures.saturating_add(u32::from(has_failed));
        self.good_in_a_row = if has_failed { 0 } else { self.good_in_a_row.saturating_add(1) };
        let Tally { requests, failures, failing_buckets } = self.tally(now);
        let ErrorRateLimits { requests_min, share_max, .. } = self.limits;
        let fails_more_than = |share: f64| f64::from(failures) > share * f64::from(requests);
        let is_sick = match self.is_sick {
            // Few requests are enough: it is asked little while it is sick.
            true => {
                self.good_in_a_row < RECOVERED_IN_A_ROW
                    || fails_more_than(share_max * RECOVERED_PART)
            }
            false => {
                requests >= requests_min
                    && failing_buckets >= FAILING_BUCKETS_MIN
                    && fails_more_than(share_max)
            }
        };
        let has_changed = is_sick != self.is_sick;
        self.is_sick = is_sick;
        has_changed.then_some(is_sick)
    }
}

/// Counts the requests to one endpoint.
pub(super) struct ErrorMeter {
    rate: Mutex<ErrorRate>,
    clock: Arc<dyn Clock>,
}

impl ErrorMeter {
    /// Of an endpoint that has not been asked yet.
    pub(super) fn new(limits: ErrorRateLimits, clock: Arc<dyn Clock>) -> Self {
        Self { rate: Mutex::new(ErrorRate::new(limits)), clock }
    }

    /// Takes note of one request. Returns whether it made the endpoint sick, or well, if it did.
    pub(super) fn note(&self, has_failed: bool) -> Option<bool> {
        let now = self.clock.now();
        self.rate().note(now, has_failed)
    }

    /// What fails, in words, while the endpoint is sick of it.
    pub(super) fn sickness(&self) -> Option<String> {
        let now = self.clock.now();
        let rate = self.rate();
        let Tally { requests, failures, .. } = rate.tally(now);
        let window = humantime::format_duration(rate.limits.window);
        let told = || {
            format!(
                "{failures} of {requests} requests failed in the last {window}, or too few since"
            )
        };
        rate.is_sick.then(told)
    }

    fn rate(&self) -> MutexGuard<'_, ErrorRate> {
        // Every change is a few assignments of numbers, so a panic elsewhere spoils nothing.
        self.rate.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Buckets of 10 s.
    const LIMITS: ErrorRateLimits =
        ErrorRateLimits { window: Duration::from_secs(120), requests_min: 20, share_max: 0.5 };

    fn at(secs: i64) -> Timestamp {
        Timestamp::from_millis(secs * 1_000)
    }

    /// Notes this many failures, or successes, at one moment.
    fn note(rate: &mut ErrorRate, secs: i64, count: u32, has_failed: bool) -> bool {
        for _ in 0..count {
            rate.note(at(secs), has_failed);
        }
        rate.is_sick
    }

    #[test]
    fn one_that_keeps_failing_is_sick_and_well_again_once_the_window_is_good() {
        let mut rate = ErrorRate::new(LIMITS);
        assert!(!note(&mut rate, 0, 9, true));
        assert!(!note(&mut rate, 11, 9, true));
        assert!(!note(&mut rate, 22, 1, true), "nineteen are too few");
        assert_eq!(rate.note(at(23), true), Some(true));
        assert!(note(&mut rate, 60, 3, false), "three good ones among twenty bad ones");
        assert!(note(&mut rate, 125, 2, true), "the first bad ones are forgotten, not the last");
        assert!(note(&mut rate, 179, 2, false), "two of seven");
        assert_eq!(rate.note(at(300), false), Some(false), "and then none");
        assert!(rate.tally(at(300)).requests < LIMITS.requests_min, "probes alone end it");
    }

    #[test]
    fn one_that_is_asked_by_probes_only_is_not_well_by_one_good_request() {
        let mut rate = ErrorRate::new(LIMITS);
        for secs in [0, 11, 22] {
            note(&mut rate, secs, 7, true);
        }
        assert!(rate.is_sick);
        // A probe each time that the window has run empty: part of its requests fail.
        for probe in 1..50 {
            let secs = probe * 120 + 30;
            for has_failed in [false, true, false] {
                assert_eq!(rate.note(at(secs), has_failed), None, "at {secs} s");
            }
        }
        assert!(rate.is_sick);
        assert!(!note(&mut rate, 50 * 120 + 30, RECOVERED_IN_A_ROW, false), "a whole good probe");
    }

    #[test]
    fn one_bad_moment_condemns_nobody() {
        let mut rate = ErrorRate::new(LIMITS);
        assert!(!note(&mut rate, 5, 10_000, true), "a large batch in a quiet hour");
        assert!(!note(&mut rate, 14, 10_000, true), "it goes on into the next step");
        assert!(note(&mut rate, 20, 1, true), "and on");
    }

    #[test]
    fn half_of_the_requests_may_fail_and_at_the_limit_nothing_comes_and_goes() {
        let mut rate = ErrorRate::new(LIMITS);
        for secs in 0..600 {
            assert_eq!(rate.note(at(secs), secs % 2 == 1), None, "one half, at {secs} s");
        }
        let mut changes = Vec::new();
        for secs in 600..1_800 {
            changes.extend(rate.note(at(secs), secs % 5 < 3));
            changes.extend(rate.note(at(secs), secs % 7 < 3));
        }
        assert_eq!(changes, [true], "a little more than one half");
    }

    #[test]
    fn a_clock_that_jumps_makes_nobody_sick_and_keeps_nobody_so_for_ever() {
        let mut rate = ErrorRate::new(LIMITS);
        for secs in [0, 10, 1_000_000, -50] {
            assert!(!note(&mut rate, secs, 7, true), "at {secs} s");
        }
        assert!(note(&mut rate, 20, 7, true), "the third bad moment of one window");
        assert!(!note(&mut rate, -1_000_000, RECOVERED_IN_A_ROW, false));
        let ends = [Timestamp::from_millis(i64::MIN), Timestamp::from_millis(i64::MAX)];
        assert_eq!(ends.map(|end| rate.note(end, true)), [None; 2], "nothing overflows");
    }

    proptest! {
        /// Whatever happens at whatever time: the window holds what a list of all requests says it does.
        #[test]
        fn the_window_counts_what_happened_in_it(
            steps in proptest::collection::vec((0i64..40, any::<bool>()), 1..300),
        ) {
            let mut rate = ErrorRate::new(LIMITS);
            let (mut secs, mut all) = (0, Vec::new());
            for (later, has_failed) in steps {
                secs += later;
                rate.note(at(secs), has_failed);
                all.push((secs / 10, has_failed));
                let last = secs / 10;
                let in_window = || all.iter().filter(|(step, _)| *step > last - 12);
                let tally = rate.tally(at(secs));
                prop_assert_eq!(tally.requests as usize, in_window().count());
                prop_assert_eq!(tally.failures as usize, in_window().filter(|(_, f)| *f).count());
            }
        }
    }
}
