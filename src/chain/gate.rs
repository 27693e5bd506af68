//! How much one endpoint is asked, and when it is left alone.
//!
//! So many requests at a time, so many calls per second, and none at all for a while after it asked to be
//! spared. Whoever would have to wait for longer than a request may take is refused at once: there are
//! other endpoints, and the next check is the retry.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::Instant;

use super::error::CallError;
use crate::clock::Clock;
use crate::domain::{ReadFailureKind, Timestamp};

/// How much one endpoint may be asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EndpointLimits {
    /// No answer to one HTTP request for this long is a failure; the chain's own limit when left out.
    pub request_timeout: Option<Duration>,
    /// The most HTTP requests at a time.
    pub concurrency_max: usize,
    /// The most JSON-RPC calls per second, each of a batch counted; no limit when left out.
    pub calls_per_second: Option<u32>,
}

impl Default for EndpointLimits {
    fn default() -> Self {
        Self { request_timeout: None, concurrency_max: 8, calls_per_second: None }
    }
}

/// The first time an endpoint is left alone for, doubled each time it refuses again.
const BACKOFF_MIN: Duration = Duration::from_secs(1);
/// The longest time it is left alone for when it did not say how long.
const BACKOFF_MAX: Duration = Duration::from_secs(16);
/// The longest time it is left alone for however long it asked.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(10 * 60);

/// A bucket of calls that fills at a steady rate and holds one second's worth.
#[derive(Debug)]
struct Bucket {
    per_second: f64,
    calls: f64,
    filled_at: Instant,
}

impl Bucket {
    fn full(per_second: u32, now: Instant) -> Self {
        let per_second = f64::from(per_second);
        Self { per_second, calls: per_second, filled_at: now }
    }

    /// Takes `calls` out, into debt if need be, and says how long to wait before making them. `None`, with
    /// nothing taken: that would be longer than `wait_max`.
    fn take(&mut self, calls: usize, now: Instant, wait_max: Duration) -> Option<Duration> {
        let since = now.saturating_duration_since(self.filled_at).as_secs_f64();
        self.calls = (self.calls + since * self.per_second).min(self.per_second);
        self.filled_at = now;
        let left = self.calls - calls as f64;
        let wait = Duration::from_secs_f64((-left / self.per_second).max(0.0));
        if wait > wait_max {
            return None;
        }
        self.calls = left;
        Some(wait)
    }
}

/// Whether an endpoint is left alone at the moment.
#[derive(Debug, Default)]
struct Backoff {
    refusals: u32,
    /// From when until when, and of which class the refusal was.
    spared: Option<(Timestamp, Timestamp, ReadFailureKind)>,
}

impl Backoff {
    /// How much longer, and why. A local clock that went back must not make it longer than it was.
    fn left(&self, now: Timestamp) -> Option<(Duration, ReadFailureKind)> {
        let (since, until, kind) = self.spared?;
        (since <= now && now < until).then(|| (until.since(now), kind))
    }

    fn refused(&mut self, now: Timestamp, asked_for: Option<Duration>, kind: ReadFailureKind) {
        let running = self.left(now).map(|(left, _)| left);
        // Requests that were under way together are one refusal.
        if running.is_none() {
            self.refusals = self.refusals.saturating_add(1);
        }
        let doublings = self.refusals.saturating_sub(1).min(u32::BITS - 1);
        let own = BACKOFF_MIN.saturating_mul(1 << doublings).min(BACKOFF_MAX);
        let wait = asked_for.map_or(own, |asked| asked.max(BACKOFF_MIN).min(RETRY_AFTER_MAX));
        let wait = running.map_or(wait, |left| left.max(wait));
        self.spared = Some((now, now.saturating_add(wait), kind));
    }
}

fn calls_max(limits: &EndpointLimits, wait_max: Duration) -> usize {
    let Some(rate) = limits.calls_per_second else { return usize::MAX };
    let in_time = f64::from(rate) * wait_max.as_secs_f64().min(1.0);
    // A saturating cast of a number that is not negative.
    (in_time as usize).max(1)
}

/// The gate in front of one endpoint.
pub(super) struct Gate {
    slots: Semaphore,
    bucket: Option<Mutex<Bucket>>,
    backoff: Mutex<Backoff>,
    clock: Arc<dyn Clock>,
    wait_max: Duration,
    calls_max: usize,
}

impl Gate {
    /// An open gate. Nobody waits at it for longer than `wait_max`.
    pub(super) fn new(limits: &EndpointLimits, clock: Arc<dyn Clock>, wait_max: Duration) -> Self {
        let bucket = |rate| Mutex::new(Bucket::full(rate, Instant::now()));
        Self {
            slots: Semaphore::new(limits.concurrency_max.max(1)),
            bucket: limits.calls_per_second.map(bucket),
            backoff: Mutex::new(Backoff::default()),
            clock,
            wait_max,
            calls_max: calls_max(limits, wait_max),
        }
    }

    /// The most calls of one request that can ever enter: what the bucket holds, and fills again in time.
    pub(super) fn calls_max(&self) -> usize {
        self.calls_max
    }

    /// Waits for its turn to send one request of `calls` calls. The request is over when the permit is
    /// dropped. An error: nothing is to be sent now.
    pub(super) async fn enter(&self, calls: usize) -> Result<SemaphorePermit<'_>, CallError> {
        self.check_not_spared()?;
        let ours = |detail: &str| {
            let detail = format!("not asked: {detail}");
            CallError::NotSent { kind: ReadFailureKind::RateLimited, detail }
        };
        let slot = match tokio::time::timeout(self.wait_max, self.slots.acquire()).await {
            Ok(Ok(slot)) => slot,
            // The semaphore is never closed.
            Ok(Err(_)) | Err(_) => return Err(ours("concurrency_max requests are under way")),
        };
        if let Some(bucket) = &self.bucket {
            let wait = lock(bucket)
                .take(calls, Instant::now(), self.wait_max)
                .ok_or_else(|| ours("requests_per_second is used up"))?;
            tokio::time::sleep(wait).await;
        }
        // It may have refused somebody else meanwhile.
        self.check_not_spared()?;
        Ok(slot)
    }

    fn check_not_spared(&self) -> Result<(), CallError> {
        let Some((left, kind)) = self.spared_for() else { return Ok(()) };
        let detail = format!(
            "not asked: it refused before, and is left alone for another {:.1} s",
            left.as_secs_f64()
        );
        Err(CallError::NotSent { kind, detail })
    }

    /// How much longer the endpoint is left alone, and why.
    pub(super) fn spared_for(&self) -> Option<(Duration, ReadFailureKind)> {
        lock(&self.backoff).left(self.clock.now())
    }

    /// It answered: whatever it refused before is over, unless it is left alone right now. Then the request
    /// was under way before, and its answer takes nothing back.
    pub(super) fn answered(&self) {
        let now = self.clock.now();
        let mut backoff = lock(&self.backoff);
        if backoff.left(now).is_none() {
            *backoff = Backoff::default();
        }
    }

    /// It asked to be left alone, for as long as it said, if it did.
    pub(super) fn refused(&self, asked_for: Option<Duration>, kind: ReadFailureKind) {
        lock(&self.backoff).refused(self.clock.now(), asked_for, kind);
    }

    /// As after a refusal whose time is over.
    #[cfg(test)]
    pub(super) fn refused_before(&self, kind: ReadFailureKind) {
        let before = self.clock.now().saturating_sub(RETRY_AFTER_MAX);
        lock(&self.backoff).refused(before, None, kind);
    }

    /// How many refusals in a row there were.
    #[cfg(test)]
    pub(super) fn refusals(&self) -> u32 {
        lock(&self.backoff).refusals
    }

    /// The time to wait that a `Retry-After` header asks for: seconds, or a date of HTTP.
    pub(super) fn retry_after(&self, header: &str) -> Option<Duration> {
        if let Ok(secs) = header.trim().parse::<u64>() {
            return Some(Duration::from_secs(secs));
        }
        let at = httpdate::parse_http_date(header.trim()).ok()?;
        let at = at.duration_since(std::time::UNIX_EPOCH).ok()?;
        let at = Timestamp::from_millis(i64::try_from(at.as_millis()).ok()?);
        Some(at.since(self.clock.now()))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every change is a few assignments of numbers, so a panic elsewhere spoils nothing.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::ManualClock;

    const SECOND: Duration = Duration::from_secs(1);

    fn at(secs: i64) -> Timestamp {
        Timestamp::from_millis(secs * 1_000)
    }

    fn gate(limits: EndpointLimits) -> (Gate, Arc<ManualClock>) {
        let clock = Arc::new(ManualClock::new(at(1_000)));
        (Gate::new(&limits, clock.clone(), SECOND), clock)
    }

    #[test]
    fn a_bucket_lets_through_its_rate_and_refuses_what_would_wait_too_long() {
        let start = Instant::now();
        let mut bucket = Bucket::full(10, start);
        assert_eq!(bucket.take(10, start, SECOND), Some(Duration::ZERO), "one second's worth");
        assert_eq!(bucket.take(5, start, SECOND), Some(SECOND / 2));
        assert_eq!(bucket.take(6, start, SECOND), None, "1.1 s is too long");
        assert_eq!(bucket.take(5, start, SECOND), Some(SECOND), "and took nothing");
        assert_eq!(bucket.take(1, start + SECOND, SECOND), Some(SECOND / 10), "the debt is paid");
        let later = start + SECOND * 1_000;
        assert_eq!(bucket.take(10, later, SECOND), Some(Duration::ZERO));
        assert_eq!(bucket.take(1, later, SECOND), Some(SECOND / 10), "it never holds more");
    }

    #[test]
    fn refusals_in_a_row_are_spared_longer_and_an_answer_ends_it() {
        let mut backoff = Backoff::default();
        let kind = ReadFailureKind::RateLimited;
        let mut now = at(0);
        for secs in [1, 2, 4, 8, 16, 16] {
            backoff.refused(now, None, kind);
            backoff.refused(now, None, kind);
            assert_eq!(backoff.left(now), Some((SECOND * secs, kind)), "once for both");
            assert_eq!(backoff.left(now.saturating_sub(SECOND)), None, "the clock went back");
            now = now.saturating_add(SECOND * secs);
            assert_eq!(backoff.left(now), None);
        }
        backoff.refused(now, Some(SECOND * 60), kind);
        assert_eq!(backoff.left(now), Some((SECOND * 60, kind)), "as long as it asked");
        backoff.refused(now, None, kind);
        assert_eq!(backoff.left(now), Some((SECOND * 60, kind)), "never shorter");
        let now = at(10_000);
        backoff.refused(now, Some(SECOND * 86_400), kind);
        assert_eq!(backoff.left(now), Some((RETRY_AFTER_MAX, kind)));
    }

    #[test]
    fn retry_after_is_read_in_both_forms_and_never_believed_blindly() {
        let (gate, clock) = gate(EndpointLimits::default());
        clock.set(at(784_111_777));
        let cases = [
            ("120", Some(120)),
            (" 3 ", Some(3)),
            ("Sun, 06 Nov 1994 08:50:37 GMT", Some(60)),
            ("Sun, 06 Nov 1994 08:49:00 GMT", Some(0)),
            ("soon", None),
            ("-1", None),
            ("", None),
        ];
        for (header, secs) in cases {
            assert_eq!(gate.retry_after(header), secs.map(Duration::from_secs), "{header:?}");
        }
    }

    #[tokio::test]
    async fn whoever_refused_is_not_asked_until_the_time_is_over() {
        let (gate, clock) = gate(EndpointLimits::default());
        drop(gate.enter(1).await.unwrap());
        gate.refused(Some(SECOND * 5), ReadFailureKind::RateLimited);
        // An answer to what was sent before that.
        gate.answered();
        let refused = gate.enter(1).await.unwrap_err();
        assert_eq!(refused.kind(), ReadFailureKind::RateLimited);
        clock.advance(SECOND * 5);
        drop(gate.enter(1).await.unwrap());
        gate.answered();
        assert_eq!(gate.spared_for(), None);
    }

    #[tokio::test]
    async fn whoever_waited_looks_again_whether_it_was_refused_meanwhile() {
        let limits = EndpointLimits { concurrency_max: 1, ..EndpointLimits::default() };
        let (gate, _) = gate(limits);
        let slot = gate.enter(1).await.unwrap();
        let refuse = async {
            tokio::task::yield_now().await;
            gate.refused(None, ReadFailureKind::RpcError);
            drop(slot);
        };
        let (waited, ()) = tokio::join!(gate.enter(1), refuse);
        assert_eq!(waited.unwrap_err().kind(), ReadFailureKind::RpcError);
    }

    #[test]
    fn requests_of_the_largest_size_enter_one_after_the_other_at_any_rate() {
        for rate in [1, 3, 9, 10, 50, 1_000] {
            for wait_max in [SECOND, SECOND * 10] {
                let limits =
                    EndpointLimits { calls_per_second: Some(rate), ..EndpointLimits::default() };
                let calls = calls_max(&limits, wait_max);
                let mut now = Instant::now();
                let mut bucket = Bucket::full(rate, now);
                for _ in 0..20 {
                    let wait = bucket.take(calls, now, wait_max);
                    now += wait.unwrap_or_else(|| panic!("{calls} at {rate} in {wait_max:?}"));
                }
            }
        }
        assert_eq!(calls_max(&EndpointLimits::default(), SECOND), usize::MAX);
    }

    #[tokio::test]
    async fn no_more_requests_at_a_time_and_no_endless_wait() {
        let limits = EndpointLimits { concurrency_max: 2, ..EndpointLimits::default() };
        let (mut gate, _) = gate(limits);
        gate.wait_max = SECOND / 50;
        let first = gate.enter(1).await.unwrap();
        let _second = gate.enter(1).await.unwrap();
        assert_eq!(gate.enter(1).await.unwrap_err().kind(), ReadFailureKind::RateLimited);
        drop(first);
        drop(gate.enter(1).await.unwrap());
    }

    #[tokio::test]
    async fn calls_are_paced() {
        let limits = EndpointLimits { calls_per_second: Some(100), ..EndpointLimits::default() };
        let (gate, _) = gate(limits);
        let started = Instant::now();
        for _ in 0..4 {
            drop(gate.enter(30).await.unwrap());
        }
        let took = started.elapsed();
        assert!(took >= SECOND / 5, "100 at once, then 20 at 100 per second: {took:?}");
        assert!(gate.enter(1_000).await.is_err(), "that would take too long");
    }
}
