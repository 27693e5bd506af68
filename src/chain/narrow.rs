//! The narrow read: one endpoint is asked, and another one about what the first has no evidence for.
//!
//! The load is spread: each read starts at the next endpoint. A slow endpoint does not slow the read: after
//! a while the next one is asked as well, and the first evidence counts.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use alloy_primitives::Address;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::asked::Asked;
use super::endpoint::Endpoint;
use super::{Chain, ChainSettings, Outcomes, ask, is_evidence};
use crate::domain::{Evidence, Reading, Timestamp};

/// One endpoint's answer: its place, what it was asked about, and what it said.
type Answer = (usize, Vec<usize>, Outcomes);

impl Chain {
    /// Asks each endpoint at most once, each only about what has no evidence yet, in at most `within`.
    pub(super) async fn read_until_answered(
        &self,
        asked: &[Asked],
        now: Timestamp,
        within: Duration,
        evidence: &mut [Evidence],
        hear: &mut impl FnMut(&[Evidence]),
    ) {
        let ends_at = Instant::now() + within;
        let tokens: BTreeSet<Address> = asked.iter().map(|asked| asked.token).collect();
        let mut waiting = self.in_turn(&tokens).into_iter().peekable();
        let count = u32::try_from(self.endpoints.len()).unwrap_or(u32::MAX).max(1);
        let patience = self.settings.hedge_after.min(within / count);
        let mut open: BTreeSet<usize> = (0..asked.len()).collect();
        // Not detached: when this future is dropped, or all is answered, so are the reads under way.
        let mut reads: JoinSet<Answer> = JoinSet::new();
        while !open.is_empty() {
            if let Some(place) = waiting.next() {
                self.start(&mut reads, place, asked, &open, now, ends_at);
            }
            let joined = tokio::select! {
                joined = reads.join_next() => joined,
                () = tokio::time::sleep(patience), if waiting.peek().is_some() => continue,
            };
            let Some(joined) = joined else { return };
            let (place, indices, outcomes) = match joined {
                Ok(answer) => answer,
                // Nobody aborts one: it is a bug, and the whole read is to fail loudly.
                Err(error) => std::panic::resume_unwind(error.into_panic()),
            };
            for (index, outcome) in indices.into_iter().zip(outcomes) {
                if !open.contains(&index) {
                    continue;
                }
                if is_evidence(&outcome) {
                    open.remove(&index);
                }
                let endpoint = self.endpoints[place].name.clone();
                evidence[index].readings.push(Reading { endpoint, outcome });
            }
            hear(evidence);
        }
    }

    /// The endpoints, beginning at the next one each time; those that would not be asked about these tokens
    /// now come last.
    pub(super) fn in_turn(&self, tokens: &BTreeSet<Address>) -> Vec<usize> {
        let count = self.endpoints.len();
        let first = self.turn.fetch_add(1, Ordering::Relaxed) % count.max(1);
        let (spared, mut order): (Vec<usize>, Vec<usize>) =
            (0..count).map(|place| (first + place) % count).partition(|place| {
                let endpoint = &self.endpoints[*place];
                let is_silent = || match tokens.is_empty() {
                    true => endpoint.sickness().is_some(),
                    false => endpoint.silence(tokens.iter()).is_some(),
                };
                endpoint.is_spared() || is_silent()
            });
        order.extend(spared);
        order
    }

    fn start(
        &self,
        reads: &mut JoinSet<Answer>,
        place: usize,
        asked: &[Asked],
        open: &BTreeSet<usize>,
        now: Timestamp,
        ends_at: Instant,
    ) {
        let indices: Vec<usize> = open.iter().copied().collect();
        let question: Vec<Asked> = indices.iter().map(|index| asked[*index]).collect();
        let (endpoint, settings) = (self.endpoints[place].clone(), self.settings.clone());
        reads.spawn(async move {
            let mut waits = Waits::new(endpoint.clone(), settings.clone());
            let outcomes = ask(&endpoint, &settings, &question, now, ends_at).await;
            waits.answered = true;
            (place, indices, outcomes)
        });
    }
}

/// A read under way. Dropped without an answer after others were asked as well, it is a hang to take note of.
struct Waits {
    endpoint: Arc<Endpoint>,
    settings: Arc<ChainSettings>,
    since: Instant,
    answered: bool,
}

impl Waits {
    fn new(endpoint: Arc<Endpoint>, settings: Arc<ChainSettings>) -> Self {
        Self { endpoint, settings, since: Instant::now(), answered: false }
    }
}

impl Drop for Waits {
    fn drop(&mut self) {
        let waited = self.since.elapsed();
        if !self.answered && waited >= self.settings.hedge_after {
            self.endpoint.was_passed_by(self.settings.chain_id, waited);
        }
    }
}
