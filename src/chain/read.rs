//! What one endpoint shows about a batch of payments, whatever their method (DESIGN section 6).
//!
//! State first, at a block pinned by hash; what consumed it only for what is used; then the proof that
//! every block the evidence rests on is still canonical. A failed call fails only the payments it was
//! about. How an authorization's state is read, and what proves its use, is its method's own business:
//! [`super::eip3009`].

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use alloy_primitives::{Address, B256};

use super::blocks::{Anchors, header_by_number, parse_header};
use super::eip3009;
use super::endpoint::Endpoint;
use super::error::CallError;
use super::heads::Heads;
use super::logs::TokenLog;
use super::multicall::StateCall;
use super::{ChainSettings, Outcomes, same_for_all};
use crate::domain::{
    BlockRef, BlockTime, Consumption, ConsumptionKind, LogRef, NonceState, Observation, Payment,
    ReadFailure, ReadFailureKind, Timestamp,
};

/// What is asked about one payment.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asked {
    /// The token contract.
    pub(super) token: Address,
    /// Who pays.
    pub(super) payer: Address,
    /// The authorization's nonce.
    pub(super) nonce: B256,
    /// Not used before this, by the gateway's clock.
    pub(super) started_at: Timestamp,
}

impl From<&Payment> for Asked {
    fn from(payment: &Payment) -> Self {
        Self {
            token: payment.token,
            payer: payment.payer,
            nonce: payment.nonce,
            started_at: payment.started_at().min(payment.created_at),
        }
    }
}

/// What a search for one payment's consumption came to.
#[derive(Debug, Clone, Copy)]
pub(super) enum Finding {
    /// The log that stands here consumed it, and means this; its block is yet to be shown canonical.
    Consumed(FoundAt, ConsumptionKind),
    /// Nothing in these blocks says what did.
    Nothing {
        /// First block searched.
        from_block: u64,
        /// Last block searched.
        to_block: u64,
    },
}

/// Where a log was found, as the log itself says.
#[derive(Debug, Clone, Copy)]
pub(super) struct FoundAt {
    block_number: u64,
    block_hash: B256,
    tx_hash: B256,
    log_index: u64,
}

impl From<&TokenLog> for FoundAt {
    fn from(log: &TokenLog) -> Self {
        Self {
            block_number: log.block_number,
            block_hash: log.block_hash,
            tx_hash: log.tx_hash,
            log_index: log.log_index,
        }
    }
}

/// By a payment's place in the question.
pub(super) type Findings = HashMap<usize, Result<Finding, ReadFailure>>;

fn bad(detail: String) -> CallError {
    CallError::BadAnswer(detail)
}

impl Endpoint {
    /// What this endpoint shows about each at its newest block; one result each, in order.
    pub(super) async fn read(
        &self,
        settings: &ChainSettings,
        asked: &[Asked],
        now: Timestamp,
    ) -> Outcomes {
        match self.heads(settings).await {
            Ok(heads) => {
                let fresh = self.see_head(settings, &heads.head, now);
                self.read_at(settings, asked, &heads, fresh).await
            }
            Err(failure) => same_for_all(asked.len(), &failure),
        }
    }

    /// The same at a block that the endpoint has; `fresh` says whether its head is.
    pub(super) async fn read_at(
        &self,
        settings: &ChainSettings,
        asked: &[Asked],
        heads: &Heads,
        fresh: Result<(), ReadFailure>,
    ) -> Outcomes {
        let states = self.states(settings, asked, &heads.head).await;
        let used = (0..asked.len()).filter(|index| states[*index] == Ok(true)).collect();
        let mut consumed = self.consumptions(settings, asked, used, heads).await;
        let outcomes = states.into_iter().enumerate().map(|(index, state)| {
            let nonce = match state? {
                // "Unused" at an old head is old news; a transfer that was found stays found.
                false => fresh.clone().map(|()| NonceState::Unused)?,
                true => consumed
                    .remove(&index)
                    .unwrap_or_else(|| Err(bad("no log was read".to_owned()).into()))?,
            };
            let Heads { head, safe, finalized } = *heads;
            Ok(Observation { head, safe, finalized, nonce })
        });
        outcomes.collect()
    }

    /// Whether each authorization is used or canceled at `head`; one result each, in order. All methods in
    /// one call, and each word of state once, however many payments it is about.
    async fn states(
        &self,
        settings: &ChainSettings,
        asked: &[Asked],
        head: &BlockRef,
    ) -> Vec<Result<bool, ReadFailure>> {
        let mut calls: Vec<StateCall> = Vec::with_capacity(asked.len());
        let mut places: HashMap<StateCall, usize> = HashMap::with_capacity(asked.len());
        let of_each: Vec<usize> = asked
            .iter()
            .map(|asked| {
                let call = eip3009::state_call(asked);
                *places.entry(call).or_insert_with_key(|call| {
                    calls.push(call.clone());
                    calls.len() - 1
                })
            })
            .collect();
        let words = self.words(settings, &calls, head).await;
        let state =
            |(asked, place): (&Asked, usize)| eip3009::is_used(asked, words[place].clone()?);
        asked.iter().zip(of_each).map(state).collect()
    }

    /// What consumed each of the `used` authorizations.
    async fn consumptions(
        &self,
        settings: &ChainSettings,
        asked: &[Asked],
        used: Vec<usize>,
        heads: &Heads,
    ) -> HashMap<usize, Result<NonceState, ReadFailure>> {
        if used.is_empty() {
            return HashMap::new();
        }
        let width = u32::try_from(self.memory().log_width.blocks()).unwrap_or(u32::MAX);
        let gap_max = settings.block_time.saturating_mul(width) / 2;
        let mut findings = Findings::new();
        let mut silent: Option<ReadFailure> = None;
        for group in groups(asked, used, gap_max, settings.batch_max) {
            if let Some(failure) = &silent {
                // Whoever does not answer is not asked again and again: others are waiting.
                findings.extend(group.iter().map(|index| (*index, Err(failure.clone()))));
                continue;
            }
            let found = match self.search_start(settings, asked, &group, heads).await {
                Err(failure) => group.iter().map(|index| (*index, Err(failure.clone()))).collect(),
                Ok(first) => {
                    self.find_eip3009(settings, asked, &group, (first, heads.head.number)).await
                }
            };
            silent = found.values().find_map(|outcome| match outcome {
                Err(failure) if failure.kind == ReadFailureKind::Unreachable => {
                    Some(failure.clone())
                }
                _ => None,
            });
            if found.values().any(|finding| matches!(finding, Ok(Finding::Nothing { .. }))) {
                // The search may have begun too late, at a block whose time was once told wrong.
                self.memory().anchors = Anchors::default();
            }
            findings.extend(found);
        }
        self.confirm(findings, &heads.head).await
    }

    /// The first block in which any of the group can have been used.
    async fn search_start(
        &self,
        settings: &ChainSettings,
        asked: &[Asked],
        group: &[usize],
        heads: &Heads,
    ) -> Result<u64, ReadFailure> {
        let started = group.iter().map(|index| asked[*index].started_at).min();
        let start =
            started.unwrap_or(Timestamp::from_millis(0)).saturating_sub(settings.log_lookback);
        let time = BlockTime::from_secs(u64::try_from(start.as_millis() / 1_000).unwrap_or(0));
        let block_time = settings.block_time;
        Ok(self.block_at(time, &heads.head, &heads.finalized, block_time).await?)
    }

    /// Reads the blocks that the findings are in, and the head, once more by number: what is not canonical
    /// any more is no evidence.
    async fn confirm(
        &self,
        findings: Findings,
        head: &BlockRef,
    ) -> HashMap<usize, Result<NonceState, ReadFailure>> {
        let mut numbers: BTreeSet<u64> = findings
            .values()
            .filter_map(|finding| match finding {
                Ok(Finding::Consumed(at, _)) => Some(at.block_number),
                _ => None,
            })
            .collect();
        numbers.insert(head.number);
        // The head last: what was canonical below it is so as of then.
        let calls: Vec<_> = numbers.iter().map(|number| header_by_number(*number)).collect();
        let results = self.transport.batch(&calls).await;
        let blocks: HashMap<u64, Result<BlockRef, ReadFailure>> = numbers
            .into_iter()
            .zip(results)
            .map(|(number, result)| {
                let block = result.and_then(|result| parse_header("header", &result));
                let block = block.and_then(|block| match block.number == number {
                    true => Ok(block),
                    false => Err(bad(format!("asked for block {number}, got {}", block.number))),
                });
                (number, block.map_err(ReadFailure::from))
            })
            .collect();
        let head_now = canonical_block(&blocks, head.number, head.hash);
        let confirmed = |finding: Finding| {
            let nonce = match finding {
                Finding::Consumed(at, kind) => {
                    let block = canonical_block(&blocks, at.block_number, at.block_hash)?;
                    let log = LogRef { block, tx_hash: at.tx_hash, log_index: at.log_index };
                    NonceState::Used(Consumption { log, kind })
                }
                Finding::Nothing { from_block, to_block } => {
                    NonceState::UsedWithoutLog { from_block, to_block }
                }
            };
            head_now.clone().map(|_| nonce)
        };
        findings.into_iter().map(|(index, found)| (index, found.and_then(confirmed))).collect()
    }
}

fn canonical_block(
    blocks: &HashMap<u64, Result<BlockRef, ReadFailure>>,
    number: u64,
    hash: B256,
) -> Result<BlockRef, ReadFailure> {
    let not_canonical = |detail| Err(ReadFailure::new(ReadFailureKind::NotCanonical, detail));
    match blocks.get(&number) {
        Some(Ok(block)) if block.hash == hash => Ok(*block),
        Some(Ok(block)) => not_canonical(format!("block {number} is {}, not {hash}", block.hash)),
        Some(Err(failure)) => Err(failure.clone()),
        None => not_canonical(format!("block {number} was not read again")),
    }
}

/// Payments whose logs are searched together: at most `count_max`, and none that started more than
/// `gap_max` after the one before it, so that an old payment does not widen everybody's range.
fn groups(
    asked: &[Asked],
    mut used: Vec<usize>,
    gap_max: Duration,
    count_max: usize,
) -> Vec<Vec<usize>> {
    used.sort_by_key(|index| asked[*index].started_at);
    used.chunk_by(|one, next| asked[*next].started_at.since(asked[*one].started_at) <= gap_max)
        .flat_map(|near| near.chunks(count_max).map(<[usize]>::to_vec))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_payment_is_searched_apart() {
        let at = |secs: i64| Asked {
            token: Address::ZERO,
            payer: Address::ZERO,
            nonce: B256::ZERO,
            started_at: Timestamp::from_millis(secs * 1_000),
        };
        let times = [1_000, 5, 1_030, 1_060, 1_061];
        let asked = times.map(at);
        let gap = Duration::from_secs(30);
        let grouped = groups(&asked, vec![0, 1, 2, 3, 4], gap, 3);
        assert_eq!(grouped, [vec![1], vec![0, 2, 3], vec![4]]);
        assert_eq!(groups(&asked, vec![4, 2], gap, 3), [vec![2], vec![4]]);
    }
}
