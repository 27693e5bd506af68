//! What was seen used stays used, unless its block was replaced.
//!
//! A guard and nothing else: it turns an answer that cannot be true into no evidence, and never makes
//! evidence of its own. An endpoint whose head is below the use says nothing about it, whoever has seen it.
//! One that is above is held to its own words only, and for a while: else one that lied once about a payment
//! would silence the others about it for good.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::time::Duration;

use alloy_primitives::{Address, B256};
use tokio::time::Instant;

use super::Outcomes;
use super::asked::{Asked, Keeper};
use super::blocks::{header_by_number, parse_header};
use super::endpoint::Endpoint;
use super::heads::Heads;
use crate::domain::{BlockRef, EndpointName, NonceState, ReadFailure, ReadFailureKind, Timestamp};

/// The most authorizations remembered per chain; the oldest are forgotten first.
const SEEN_MAX: usize = 10_000;

/// How long an endpoint is held to what it said. A node behind its URL that lags has caught up by then.
const SEEN_FOR: Duration = Duration::from_secs(3_600);

/// What others have seen used binds one whose head is at most so many blocks below that. No endpoint that is
/// believed lags by more, and one that names any number as its head must not silence the others.
const ABOVE_MAX: u64 = 1_000;

/// One authorization of a chain.
type Authorization = (Keeper, Address, Address, B256);

fn authorization(asked: &Asked) -> Authorization {
    (asked.keeper, asked.token, asked.payer, asked.nonce)
}

/// A use that was shown.
#[derive(Debug, Clone)]
struct Seen {
    block: BlockRef,
    /// When it was last shown.
    at: Timestamp,
    /// By whom.
    by: BTreeSet<EndpointName>,
}

/// Authorizations that some endpoint has shown to be used.
#[derive(Debug, Default)]
pub(super) struct SeenUsed {
    uses: HashMap<Authorization, Seen>,
    oldest_first: VecDeque<Authorization>,
}

impl SeenUsed {
    /// It was used in this block.
    fn note(&mut self, one: Authorization, block: BlockRef, by: &EndpointName, now: Timestamp) {
        self.note_as(one, block, by, now, |seen| *seen != block);
    }

    /// It was used in this block or before it: the first such block says most.
    fn note_by(&mut self, one: Authorization, block: BlockRef, by: &EndpointName, now: Timestamp) {
        self.note_as(one, block, by, now, |seen| block.number < seen.number);
    }

    fn note_as(
        &mut self,
        one: Authorization,
        block: BlockRef,
        by: &EndpointName,
        now: Timestamp,
        replaces: impl Fn(&BlockRef) -> bool,
    ) {
        if let Some(seen) = self.uses.get_mut(&one) {
            if replaces(&seen.block) {
                *seen = Seen { block, at: now, by: BTreeSet::new() };
            }
            seen.at = now;
            seen.by.insert(by.clone());
            return;
        }
        self.uses.insert(one, Seen { block, at: now, by: BTreeSet::from([by.clone()]) });
        self.oldest_first.push_back(one);
        if self.oldest_first.len() > SEEN_MAX
            && let Some(oldest) = self.oldest_first.pop_front()
        {
            self.uses.remove(&oldest);
        }
    }

    /// The block it was shown used in not long ago, if that says something about an endpoint at this head.
    fn block(
        &self,
        one: &Authorization,
        endpoint: &EndpointName,
        head: u64,
        now: Timestamp,
    ) -> Option<BlockRef> {
        let seen = self.uses.get(one).filter(|seen| now.since(seen.at) < SEEN_FOR)?;
        let lags = seen.block.number > head && seen.block.number - head <= ABOVE_MAX;
        (lags || seen.by.contains(endpoint)).then_some(seen.block)
    }
}

impl Endpoint {
    /// Takes note of what is used, and leaves out every "unused" about what was used in a block above this
    /// endpoint's head, or what it has shown used itself in a block that it still has.
    pub(super) async fn guard(
        &self,
        asked: &[Asked],
        heads: &Heads,
        outcomes: &mut Outcomes,
        ends_at: Instant,
    ) {
        let head = heads.head.number;
        let mut doubtful: Vec<(usize, BlockRef)> = Vec::new();
        {
            let now = self.clock.now();
            let mut seen = self.seen_used();
            for (index, outcome) in outcomes.iter().enumerate() {
                let one = authorization(&asked[index]);
                match outcome.as_ref().map(|observation| &observation.nonce) {
                    Ok(NonceState::Used(consumption)) => {
                        seen.note(one, consumption.log.block, &self.name, now);
                    }
                    Ok(NonceState::Unused) => {
                        let block = seen.block(&one, &self.name, head, now);
                        doubtful.extend(block.map(|block| (index, block)));
                    }
                    // Used is used, whatever became of the search for how (I2).
                    Ok(NonceState::UsedWithoutLog { .. } | NonceState::UsedUnread(_)) => {
                        seen.note_by(one, heads.head, &self.name, now);
                    }
                    Err(_) => {}
                }
            }
        }
        let numbers: BTreeSet<u64> =
            doubtful.iter().map(|(_, block)| block.number).filter(|n| *n <= head).collect();
        let calls: Vec<_> = numbers.iter().map(|number| header_by_number(*number)).collect();
        let results = match calls.is_empty() {
            true => Vec::new(),
            false => self.batch_by(ends_at, &calls).await,
        };
        let headers: HashMap<u64, Result<BlockRef, ReadFailure>> = numbers
            .into_iter()
            .zip(results)
            .map(|(number, result)| {
                let block = result.and_then(|result| parse_header("header", &result));
                (number, block.map_err(ReadFailure::from))
            })
            .collect();
        for (index, used_in) in doubtful {
            let used = format!("it was seen used at block {}", used_in.number);
            let failure = match headers.get(&used_in.number) {
                None => {
                    let detail = format!("{used}, and this endpoint is at {head}");
                    ReadFailure::new(ReadFailureKind::Lagging, detail)
                }
                Some(Err(failure)) => failure.clone(),
                Some(Ok(block)) if *block == used_in => {
                    let detail = format!("{used}, which is canonical, and reads unused at {head}");
                    ReadFailure::new(ReadFailureKind::BadAnswer, detail)
                }
                Some(Ok(block)) if block.number != used_in.number => {
                    let detail =
                        format!("asked for block {}, got {}", used_in.number, block.number);
                    ReadFailure::new(ReadFailureKind::BadAnswer, detail)
                }
                // A reorg has taken it away: then it may well be unused.
                Some(Ok(_)) => continue,
            };
            outcomes[index] = Err(failure);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::BlockTime;

    fn one(n: u64) -> Authorization {
        let nonce = B256::left_padding_from(&n.to_be_bytes());
        (Keeper::Token, Address::ZERO, Address::ZERO, nonce)
    }

    const NOW: Timestamp = Timestamp::from_millis(0);

    #[test]
    fn only_the_latest_are_remembered() {
        let mut seen = SeenUsed::default();
        let block = BlockRef { number: 1, hash: B256::ZERO, time: BlockTime::from_secs(1) };
        let endpoint = EndpointName::new("a");
        for n in 0..SEEN_MAX as u64 + 5 {
            seen.note(one(n), block, &endpoint, NOW);
            seen.note(one(n), block, &endpoint, NOW);
        }
        assert_eq!((seen.uses.len(), seen.oldest_first.len()), (SEEN_MAX, SEEN_MAX));
        assert!(!seen.uses.contains_key(&one(4)) && seen.uses.contains_key(&one(5)));
    }

    #[test]
    fn a_use_that_was_not_found_is_known_by_the_first_block_that_showed_it() {
        let mut seen = SeenUsed::default();
        let at = |number| BlockRef { number, hash: B256::ZERO, time: BlockTime::from_secs(1) };
        let [a, b] = ["a", "b"].map(EndpointName::new);
        let block = |seen: &SeenUsed| seen.block(&one(1), &a, 0, NOW).map(|block| block.number);
        seen.note_by(one(1), at(100), &a, NOW);
        assert_eq!(block(&seen), Some(100));
        seen.note_by(one(1), at(120), &b, NOW);
        assert_eq!(block(&seen), Some(100), "a later block says less");
        seen.note_by(one(1), at(90), &b, NOW);
        assert_eq!(block(&seen), Some(90));
        seen.note(one(1), at(95), &b, NOW);
        assert_eq!(block(&seen), Some(95), "the use itself, after a reorg");
    }

    /// One that lied about a payment must not silence the others about it (I11).
    #[test]
    fn a_use_binds_who_showed_it_and_who_is_below_it_and_not_for_good() {
        let mut seen = SeenUsed::default();
        let block = BlockRef { number: 9, hash: B256::ZERO, time: BlockTime::from_secs(1) };
        let [liar, honest] = ["liar", "honest"].map(EndpointName::new);
        seen.note(one(1), block, &liar, NOW);
        let binds = |endpoint: &EndpointName, head: u64, now: Timestamp| {
            seen.block(&one(1), endpoint, head, now).is_some()
        };
        assert!(binds(&liar, 9, NOW) && binds(&liar, 8, NOW) && binds(&honest, 8, NOW));
        assert!(!binds(&honest, 9, NOW));
        let far = BlockRef { number: 9 + ABOVE_MAX, ..block };
        seen.note(one(1), far, &liar, NOW);
        let binds =
            |endpoint: &EndpointName, head: u64| seen.block(&one(1), endpoint, head, NOW).is_some();
        assert!(binds(&honest, 9) && !binds(&honest, 8), "no lag is as long as that");
        assert!(binds(&liar, 8), "its own word");
        seen.note(one(1), block, &liar, NOW);
        let binds = |endpoint: &EndpointName, head: u64, now: Timestamp| {
            seen.block(&one(1), endpoint, head, now).is_some()
        };
        let later = NOW.saturating_add(SEEN_FOR);
        assert!(!binds(&liar, 9, later) && !binds(&honest, 8, later));
    }
}
