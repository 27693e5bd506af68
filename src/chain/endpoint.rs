//! One endpoint: the way to it, and what was learnt about it while this process runs.
//!
//! The memory only saves requests and tells a stale head; no evidence ever comes from it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::blocks::Anchors;
use super::error_rate::ErrorMeter;
use super::gate::Gate;
use super::health::Condition;
use super::logs::Widths;
use super::monotone::SeenUsed;
use super::transport::Transport;
use super::{ChainSettings, EndpointSettings, RpcObserver, given_up};
use crate::clock::Clock;
use crate::domain::{
    BlockRef, ChainId, EndpointName, Observation, ReadFailure, ReadFailureKind, Timestamp,
    failure_of,
};

/// A head this far below the highest one seen is no reorg any more: the endpoint went back in time.
const REORG_DEPTH_MAX: u64 = 128;

/// So long after Multicall3 was found absent it is tried again.
const MULTICALL_RETRY: Duration = Duration::from_secs(10 * 60);

/// So long an endpoint that hung is asked last.
const PASSED_BY_SPARED: Duration = Duration::from_secs(30);

/// One endpoint of a chain.
pub(super) struct Endpoint {
    /// Shown in evidence.
    pub(super) name: EndpointName,
    /// The way to it.
    pub(super) transport: Transport,
    pub(super) observer: Arc<dyn RpcObserver>,
    pub(super) clock: Arc<dyn Clock>,
    /// Shared by the endpoints of a chain.
    seen_used: Arc<Mutex<SeenUsed>>,
    memory: Mutex<Memory>,
}

/// What was learnt about an endpoint.
#[derive(Debug)]
pub(super) struct Memory {
    /// How wide log ranges it answers.
    pub(super) log_widths: Widths,
    /// Blocks whose time is known.
    pub(super) anchors: Anchors,
    /// Whether it moves.
    pub(super) pulse: Pulse,
    /// Whether it was once seen to serve the right chain.
    pub(super) is_right_chain: bool,
    /// Since when a call to Multicall3 is known to come back empty.
    multicall_absent_since: Option<Timestamp>,
    /// Whether Multicall3 has answered here: it does not go away again.
    has_multicall: bool,
    /// When it was last passed by: it had not answered when another one had.
    passed_by_at: Option<Timestamp>,
    /// What probes found wrong.
    pub(super) condition: Condition,
    /// Why it gave no evidence when it was last asked, if it gave none.
    silent_because: Option<ReadFailureKind>,
}

/// Failures that are the endpoint's own: the others can be about one payment's token or block.
const OF_THE_ENDPOINT: [ReadFailureKind; 6] = [
    ReadFailureKind::Unreachable,
    ReadFailureKind::RateLimited,
    ReadFailureKind::RpcError,
    ReadFailureKind::BadAnswer,
    ReadFailureKind::WrongChain,
    ReadFailureKind::StaleHead,
];

impl Endpoint {
    /// Sets up the way; connects to nobody yet. The error never holds the URL.
    pub(super) fn new(
        settings: &ChainSettings,
        endpoint: &EndpointSettings,
        observer: Arc<dyn RpcObserver>,
        clock: Arc<dyn Clock>,
        seen_used: Arc<Mutex<SeenUsed>>,
    ) -> Result<Self, String> {
        let request_timeout = endpoint.limits.request_timeout.unwrap_or(settings.request_timeout);
        let transport = Transport::new(
            settings.chain_id,
            endpoint.name.clone(),
            endpoint.url.clone(),
            request_timeout,
            Arc::clone(&observer),
            Gate::new(&endpoint.limits, Arc::clone(&clock), request_timeout),
            ErrorMeter::new(settings.error_rate, Arc::clone(&clock)),
        )?;
        let memory = Memory {
            log_widths: Widths::new(settings.log_range_max),
            anchors: Anchors::default(),
            pulse: Pulse::default(),
            is_right_chain: false,
            multicall_absent_since: None,
            has_multicall: false,
            passed_by_at: None,
            condition: Condition::default(),
            silent_because: None,
        };
        Ok(Self {
            name: endpoint.name.clone(),
            transport,
            observer,
            clock,
            seen_used,
            memory: Mutex::new(memory),
        })
    }

    /// What any endpoint of the chain has shown used; never hold it across a request.
    pub(super) fn seen_used(&self) -> MutexGuard<'_, SeenUsed> {
        // It only makes answers no evidence: at worst, one too few.
        self.seen_used.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was learnt so far; never hold it across a request.
    pub(super) fn memory(&self) -> MutexGuard<'_, Memory> {
        // Every change is one assignment or a map's own insert, so a panic elsewhere spoils nothing.
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether others are to be asked before it: it wants to be left alone, or hung not long ago.
    pub(super) fn is_spared(&self) -> bool {
        let passed_by_at = self.memory().passed_by_at;
        let now = self.clock.now();
        let hung = passed_by_at.is_some_and(|at| at <= now && now.since(at) < PASSED_BY_SPARED);
        hung || self.transport.is_spared()
    }

    /// Takes note that it had not answered when another one had, and was waited for no longer. It is still
    /// asked where all are asked.
    pub(super) fn was_passed_by(&self, chain: ChainId, waited: Duration) {
        self.memory().passed_by_at = Some(self.clock.now());
        self.report_health(chain, &[Err(given_up(waited))]);
    }

    /// Whether Multicall3 was found absent here not long ago. It is tried again after a while: one node
    /// of several behind a URL may lack it, or it was asked at a block before it was there.
    pub(super) fn lacks_multicall(&self) -> bool {
        let since = self.memory().multicall_absent_since;
        let now = self.clock.now();
        since.is_some_and(|since| since <= now && now.since(since) < MULTICALL_RETRY)
    }

    /// Takes note that Multicall3 is absent.
    pub(super) fn multicall_is_absent(&self) {
        let now = self.clock.now();
        self.memory().multicall_absent_since = Some(now);
    }

    /// Takes note that Multicall3 has answered.
    pub(super) fn multicall_is_there(&self) {
        self.memory().has_multicall = true;
    }

    /// Whether Multicall3 has answered before.
    pub(super) fn has_multicall(&self) -> bool {
        self.memory().has_multicall
    }

    /// Counts a read, and logs when the endpoint stops giving evidence, and when it gives some again: once each, not at
    /// every read.
    pub(super) fn report_health(
        &self,
        chain: ChainId,
        outcomes: &[Result<Observation, ReadFailure>],
    ) {
        let failures: Vec<&ReadFailure> = outcomes.iter().filter_map(failure_of).collect();
        let failure = match failures.first() {
            _ if outcomes.is_empty() => return,
            Some(first) if failures.len() == outcomes.len() => Some(*first),
            _ => None,
        };
        self.observer.read(chain, &self.name, failure.map_or("ok", |failure| failure.kind.code()));
        if failure.is_some_and(|failure| !OF_THE_ENDPOINT.contains(&failure.kind)) {
            return;
        }
        let kind = failure.map(|failure| failure.kind);
        if std::mem::replace(&mut self.memory().silent_because, kind) == kind {
            return;
        }
        let endpoint = &self.name;
        match failure {
            // No other failure is a mistake for certain, and stays until somebody mends it.
            Some(ReadFailure { kind: kind @ ReadFailureKind::WrongChain, detail }) => {
                tracing::error!(
                    %chain, %endpoint, %kind, detail,
                    "the endpoint gives no evidence: it serves another chain; mend its url or the \
                     chain_id under [[chains]]"
                );
            }
            Some(ReadFailure { kind, detail }) => {
                tracing::warn!(
                    %chain, %endpoint, %kind, detail,
                    "the endpoint gives no evidence; nothing is concluded from its silence"
                );
            }
            None => tracing::info!(%chain, %endpoint, "the endpoint gives evidence again"),
        }
    }
}

/// Whether an endpoint's head moves.
#[derive(Debug, Default)]
pub(super) struct Pulse {
    /// The highest head, and when this process first saw it.
    highest: Option<(u64, Timestamp)>,
    /// Heads far below that one, if there were any since.
    below: Option<Below>,
}

/// Heads that are too far below the highest one seen for a reorg, and advance.
#[derive(Debug, Clone, Copy)]
struct Below {
    first: (u64, Timestamp),
    highest: (u64, Timestamp),
}

impl Pulse {
    /// Whether heads have advanced below the highest one for so long that it must have been a mistake: one
    /// header of another chain, for one.
    fn has_advanced_below(&mut self, number: u64, now: Timestamp, age_max: Duration) -> bool {
        let begins = Below { first: (number, now), highest: (number, now) };
        let mut below = self.below.unwrap_or(begins);
        let (highest, moved_at) = below.highest;
        if now < moved_at || now.since(moved_at) > age_max || number + REORG_DEPTH_MAX < highest {
            // It stood still, went back, or the clock did: that is no progress.
            below = begins;
        } else if number > highest {
            below.highest = (number, now);
        }
        self.below = Some(below);
        below.highest.0 > below.first.0 && now.since(below.first.1) > age_max
    }

    /// Takes note of a head; an error when it is stale.
    pub(super) fn see(
        &mut self,
        head: &BlockRef,
        now: Timestamp,
        age_max: Duration,
    ) -> Result<(), ReadFailure> {
        let (highest, first_seen) = match self.highest {
            Some((highest, first_seen)) if head.number <= highest => {
                // When the local clock went backwards, the age is counted anew from there: else a
                // frozen head would pass for a fresh one until the clock has caught up.
                (highest, first_seen.min(now))
            }
            _ => (head.number, now),
        };
        self.highest = Some((highest, first_seen));
        let stale = |detail: String| Err(ReadFailure::new(ReadFailureKind::StaleHead, detail));
        if highest - head.number > REORG_DEPTH_MAX {
            if self.has_advanced_below(head.number, now, age_max) {
                *self = Self { highest: Some((head.number, now)), below: None };
                return Ok(());
            }
            return stale(format!("the head is {}, and was {highest} before", head.number));
        }
        let age = now.since(first_seen);
        if age > age_max {
            return stale(format!("no head above {highest} for {} s", age.as_secs()));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use alloy_primitives::B256;

    use super::*;
    use crate::domain::BlockTime;

    fn head(number: u64) -> BlockRef {
        BlockRef { number, hash: B256::ZERO, time: BlockTime::from_secs(0) }
    }

    #[test]
    fn a_head_is_stale_when_it_stops_or_goes_back_and_never_because_the_clock_does() {
        let at = |secs: i64| Timestamp::from_millis(secs * 1_000);
        let age_max = Duration::from_secs(60);
        let steps = [
            (1_000, 100_000, true, "first seen"),
            (1_000, 100_060, true, "not too old yet"),
            (1_000, 100_061, false, "too old"),
            (999, 100_062, false, "a lower one is no progress"),
            (1_001, 100_063, true, "moves again"),
            (1_001, 50_000, true, "the clock went back"),
            (1_001, 50_061, false, "and the age counts from there"),
            (1_002, 50_062, true, "moves again"),
            (1_002, 900_000, false, "the clock jumped ahead: the safe side"),
            (1_003, 900_002, true, "moves again"),
            (1_003 - 128, 900_003, true, "a reorg"),
            (1_003 - 129, 900_004, false, "no reorg"),
            (0, i64::MIN / 1_000, false, "nothing overflows"),
            (u64::MAX, i64::MAX / 1_000, true, "nothing overflows"),
        ];
        let mut pulse = Pulse::default();
        for (number, now, fresh, why) in steps {
            let seen = pulse.see(&head(number), at(now), age_max);
            assert_eq!(seen.is_ok(), fresh, "{why}: {seen:?}");
        }
    }

    #[test]
    fn one_head_that_was_far_too_high_is_forgotten_when_lower_ones_advance() {
        let at = |secs: i64| Timestamp::from_millis(secs * 1_000);
        let age_max = Duration::from_secs(60);
        let mut pulse = Pulse::default();
        pulse.see(&head(1_000), at(0), age_max).unwrap();
        pulse.see(&head(9_000_000), at(1), age_max).unwrap();
        for secs in 2..=62_i64 {
            let number = 1_000 + secs.unsigned_abs() / 2;
            pulse.see(&head(number), at(secs), age_max).unwrap_err();
        }
        for secs in 63..400_i64 {
            let number = 1_000 + secs.unsigned_abs() / 2;
            pulse.see(&head(number), at(secs), age_max).unwrap();
        }
        // Heads that stand still below it are stale for good.
        pulse.see(&head(9_000_000), at(400), age_max).unwrap();
        for secs in 401..900 {
            pulse.see(&head(1_200), at(secs), age_max).unwrap_err();
        }
    }
}
