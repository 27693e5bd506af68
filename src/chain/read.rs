//! What one endpoint shows about a batch of payments, whatever their method (DESIGN section 6).
//!
//! State first, at a block pinned by hash; what consumed it only for what is used; then the proof that
//! every block the evidence rests on is still canonical. A failed call fails only the payments it was
//! about, and takes nothing away that was read before it. How an authorization's state is read, and what proves its use, is its method's own business:
//! [`super::eip3009`], [`super::permit2`].

use std::collections::{BTreeSet, HashMap};

use alloy_primitives::B256;
use tokio::time::Instant;

use super::asked::{Asked, Keeper, groups};
use super::blocks::{Anchors, header_by_number, parse_header};
use super::endpoint::Endpoint;
use super::error::CallError;
use super::heads::Heads;
use super::logs::TokenLog;
use super::multicall::StateCall;
use super::transport::{Call, CallResult};
use super::{ChainSettings, Outcomes, by, same_for_all};
use crate::domain::{
    BlockRef, BlockTime, Consumption, ConsumptionKind, LogRef, NonceState, Observation,
    ReadFailure, ReadFailureKind, Timestamp,
};

/// What a search for one payment's consumption came to.
#[derive(Debug, Clone, Copy)]
#[allow(clippy::large_enum_variant, reason = "one per used payment of a batch")]
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

/// The share of what is left of a read that is kept for showing that what was found is canonical.
const CONFIRM_SHARE: f64 = 0.2;

fn bad(detail: String) -> CallError {
    CallError::BadAnswer(detail)
}

impl Endpoint {
    /// What this endpoint shows about each at its newest block, as far as it has shown it by `ends_at`; one
    /// result each, in order.
    pub(super) async fn read(
        &self,
        settings: &ChainSettings,
        asked: &[Asked],
        now: Timestamp,
        ends_at: Instant,
    ) -> Outcomes {
        match by(ends_at, self.heads(settings)).await {
            Ok(heads) => {
                let fresh = self.see_head(settings, &heads.head, now);
                self.read_at(settings, asked, (&heads, fresh), ends_at).await
            }
            Err(failure) => same_for_all(asked.len(), &failure),
        }
    }

    /// The same at a block that the endpoint has; `fresh` says whether its head is. It is not asked about a
    /// token that it answers wrongly about.
    pub(super) async fn read_at(
        &self,
        settings: &ChainSettings,
        asked: &[Asked],
        at: (&Heads, Result<(), ReadFailure>),
        ends_at: Instant,
    ) -> Outcomes {
        let silenced = self.silenced(asked.iter().map(|asked| &asked.token));
        let believed = asked.iter().zip(&silenced).filter(|(_, silence)| silence.is_none());
        let believed: Vec<Asked> = believed.map(|(asked, _)| *asked).collect();
        let mut read = self.read_believed(settings, &believed, at, ends_at).await.into_iter();
        let unread = || Err(bad("nothing was read".to_owned()).into());
        let outcome = |silence: Option<ReadFailure>| {
            silence.map_or_else(|| read.next().unwrap_or_else(unread), Err)
        };
        silenced.into_iter().map(outcome).collect()
    }

    async fn read_believed(
        &self,
        settings: &ChainSettings,
        asked: &[Asked],
        (heads, fresh): (&Heads, Result<(), ReadFailure>),
        ends_at: Instant,
    ) -> Outcomes {
        let states = async { Ok(self.states(settings, asked, &heads.head).await) };
        let states = by(ends_at, states).await;
        let states = states.unwrap_or_else(|failure| vec![Err(failure); asked.len()]);
        let used = (0..asked.len()).filter(|index| states[*index] == Ok(true)).collect();
        let mut consumed = self.consumptions(settings, asked, used, heads, ends_at).await;
        let outcomes = states.into_iter().enumerate().map(|(index, state)| {
            let nonce = match state? {
                // "Unused" at an old head is old news; a transfer that was found stays found.
                false => fresh.clone().map(|()| NonceState::Unused)?,
                // Used is used, whatever became of the search for how (I2).
                true => consumed
                    .remove(&index)
                    .unwrap_or_else(|| Err(bad("no log was read".to_owned()).into()))
                    .unwrap_or_else(NonceState::UsedUnread),
            };
            let Heads { head, safe, finalized } = *heads;
            Ok(Observation { head, safe, finalized, nonce })
        });
        let mut outcomes: Outcomes = outcomes.collect();
        self.guard(asked, heads, &mut outcomes, ends_at).await;
        outcomes
    }

    /// Whether each authorization is used or canceled at `head`; one result each, in order. All methods in
    /// one call, and each word of state once, however many payments it is about.
    pub(super) async fn states(
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
                let call = asked.state_call(settings);
                *places.entry(call).or_insert_with_key(|call| {
                    calls.push(call.clone());
                    calls.len() - 1
                })
            })
            .collect();
        let words = self.words(settings, &calls, head).await;
        let state = |(asked, place): (&Asked, usize)| asked.is_used(words[place].clone()?);
        asked.iter().zip(of_each).map(state).collect()
    }

    /// What consumed each of the `used` authorizations. A search that is not over in time takes nothing
    /// from those that are.
    async fn consumptions(
        &self,
        settings: &ChainSettings,
        asked: &[Asked],
        used: Vec<usize>,
        heads: &Heads,
        ends_at: Instant,
    ) -> HashMap<usize, Result<NonceState, ReadFailure>> {
        if used.is_empty() {
            return HashMap::new();
        }
        let gap_max = |keeper: Keeper| {
            let width = self.memory().log_widths.of(keeper.logs()).blocks();
            settings.block_time.saturating_mul(u32::try_from(width).unwrap_or(u32::MAX)) / 2
        };
        let left = ends_at.saturating_duration_since(Instant::now());
        let search_until = ends_at - left.mul_f64(CONFIRM_SHARE);
        let mut findings = Findings::new();
        let mut silent: Option<ReadFailure> = None;
        // The youngest first: their ranges are the shortest.
        for group in groups(asked, used, gap_max, settings.batch_max).into_iter().rev() {
            if let Some(failure) = &silent {
                // Whoever does not answer is not asked again and again: others are waiting.
                findings.extend(group.iter().map(|index| (*index, Err(failure.clone()))));
                continue;
            }
            let search = self.search(settings, asked, &group, heads);
            let found = by(search_until, search).await.unwrap_or_else(|failure| {
                group.iter().map(|index| (*index, Err(failure.clone()))).collect()
            });
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
        self.confirm(findings, &heads.head, ends_at).await
    }

    /// Looks for the logs of one group.
    async fn search(
        &self,
        settings: &ChainSettings,
        asked: &[Asked],
        group: &[usize],
        heads: &Heads,
    ) -> Result<Findings, ReadFailure> {
        let first = self.search_start(settings, asked, group, heads).await?;
        let range = (first, heads.head.number);
        Ok(match asked[group[0]].keeper {
            Keeper::Token => self.find_eip3009(settings, asked, group, range).await,
            Keeper::Permit2 => self.find_permit2(settings, asked, group, range).await,
        })
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
        // None is empty, and all are of one keeper.
        let logs = asked[group[0]].keeper.logs();
        let known = (&heads.head, &heads.finalized);
        Ok(self.block_at(time, known, settings.block_time, logs).await?)
    }

    /// Reads the blocks that the findings are in, and the head, once more by number: what is not canonical
    /// any more is no evidence.
    async fn confirm(
        &self,
        findings: Findings,
        head: &BlockRef,
        ends_at: Instant,
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
        let results = self.batch_by(ends_at, &calls).await;
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

impl Endpoint {
    /// The results of these calls; all time out at `ends_at`.
    pub(super) async fn batch_by(&self, ends_at: Instant, calls: &[Call]) -> Vec<CallResult> {
        let too_late = |_| calls.iter().map(|_| Err(CallError::Timeout)).collect();
        let batch = tokio::time::timeout_at(ends_at, self.transport.batch(calls));
        batch.await.unwrap_or_else(too_late)
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
