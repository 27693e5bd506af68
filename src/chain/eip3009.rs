//! EIP-3009: what one endpoint shows about authorizations (DESIGN section 6).
//!
//! State first, at a block pinned by hash; logs only for what is used; then the proof that every block
//! the evidence rests on is still canonical. A failed call fails only the payments it was about.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::time::Duration;

use alloy_primitives::{Address, B256, U256};
use alloy_sol_types::{SolEvent, sol};

use super::ChainSettings;
use super::blocks::{header_by_number, header_call, parse_header};
use super::endpoint::Endpoint;
use super::error::CallError;
use super::logs::{LogFilter, TokenLog};
use crate::domain::{
    Amount, BlockRef, BlockTime, Consumption, ConsumptionKind, LogRef, NonceState, Observation,
    Payment, ReadFailure, ReadFailureKind, SeenTransfer, Timestamp,
};

sol! {
    event AuthorizationUsed(address indexed authorizer, bytes32 indexed nonce);
    event AuthorizationCanceled(address indexed authorizer, bytes32 indexed nonce);
    event Transfer(address indexed from, address indexed to, uint256 value);
}

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

/// One authorization of a chain: token, payer, nonce.
type Authorization = (Address, Address, B256);

impl Asked {
    fn authorization(&self) -> Authorization {
        (self.token, self.payer, self.nonce)
    }
}

/// Where an endpoint stands.
struct Heads {
    head: BlockRef,
    safe: Option<BlockRef>,
    finalized: BlockRef,
}

/// One result per payment, by its place in the question.
type Outcomes = HashMap<usize, Result<NonceState, ReadFailure>>;

fn bad(detail: String) -> CallError {
    CallError::BadAnswer(detail)
}

impl Endpoint {
    /// What this endpoint shows about each; one result each, in order.
    pub(super) async fn read_eip3009(
        &self,
        settings: &ChainSettings,
        asked: &[Asked],
        now: Timestamp,
    ) -> Vec<Result<Observation, ReadFailure>> {
        let heads = match self.heads(settings.read_safe).await {
            Ok(heads) => heads,
            Err(error) => {
                let failure = ReadFailure::from(error);
                return asked.iter().map(|_| Err(failure.clone())).collect();
            }
        };
        let states = self.states(settings, asked, &heads.head).await;
        // Only a head of the right chain says anything about this endpoint's pulse.
        let fresh = match states.iter().any(Result::is_ok) {
            true => self.memory().pulse.see(&heads.head, now, settings.head_age_max),
            false => Ok(()),
        };
        let used = (0..asked.len()).filter(|index| states[*index] == Ok(true)).collect();
        let mut consumed = self.consumptions(settings, asked, used, &heads).await;
        let outcomes = states.into_iter().enumerate().map(|(index, state)| {
            let nonce = match state? {
                // "Unused" at an old head is old news; a transfer that was found stays found.
                false => fresh.clone().map(|()| NonceState::Unused)?,
                true => consumed
                    .remove(&index)
                    .unwrap_or_else(|| Err(bad("no log was read".to_owned()).into()))?,
            };
            let Heads { head, safe, finalized } = heads;
            Ok(Observation { head, safe, finalized, nonce })
        });
        outcomes.collect()
    }

    async fn heads(&self, read_safe: bool) -> Result<Heads, CallError> {
        let mut tags = vec!["latest", "finalized"];
        tags.extend(read_safe.then_some("safe"));
        let calls: Vec<_> = tags.iter().map(|tag| header_call(tag)).collect();
        let mut blocks = Vec::with_capacity(tags.len());
        for (tag, result) in tags.iter().zip(self.transport.batch(&calls).await) {
            blocks.push(parse_header(tag, &result?)?);
        }
        let (head, safe) = (blocks[0], blocks.get(2).copied());
        for (tag, block) in tags.iter().zip(&blocks).skip(1) {
            let same_number = block.number == head.number;
            if block.number > head.number || same_number && block.hash != head.hash {
                return Err(bad(format!(
                    "the {tag} block {} is not at or below the head {}",
                    block.number, head.number
                )));
            }
        }
        Ok(Heads { head, safe, finalized: blocks[1] })
    }

    /// What consumed each of the `used` authorizations.
    async fn consumptions(
        &self,
        settings: &ChainSettings,
        asked: &[Asked],
        used: Vec<usize>,
        heads: &Heads,
    ) -> Outcomes {
        let mut outcomes = Outcomes::new();
        if used.is_empty() {
            return outcomes;
        }
        let width = u32::try_from(self.memory().log_width.blocks()).unwrap_or(u32::MAX);
        let gap_max = settings.block_time.saturating_mul(width) / 2;
        let mut found = Vec::new();
        let mut silent: Option<ReadFailure> = None;
        for group in groups(asked, used, gap_max, settings.batch_max) {
            if let Some(failure) = &silent {
                // Whoever does not answer is not asked again and again: others are waiting.
                outcomes.extend(group.iter().map(|index| (*index, Err(failure.clone()))));
                continue;
            }
            self.find_consumptions(settings, asked, &group, heads, &mut found, &mut outcomes).await;
            silent = group.iter().find_map(|index| match outcomes.get(index) {
                Some(Err(failure)) if failure.kind == ReadFailureKind::Unreachable => {
                    Some(failure.clone())
                }
                _ => None,
            });
        }
        let transfers = self.find_transfers(settings, &mut found).await;
        let canonical = self.canonical(&found, &heads.head).await;
        for ((index, log), transfer) in found.into_iter().zip(transfers) {
            let consumed = transfer.and_then(|kind| canonical.confirm(&log, kind));
            outcomes.insert(index, consumed.map(NonceState::Used));
        }
        if let Err(failure) = canonical.head {
            for outcome in outcomes.values_mut().filter(|outcome| outcome.is_ok()) {
                *outcome = Err(failure.clone());
            }
        }
        outcomes
    }

    /// Looks for the logs of one group. What is found goes to `found`, the rest to `outcomes`.
    async fn find_consumptions(
        &self,
        settings: &ChainSettings,
        asked: &[Asked],
        group: &[usize],
        heads: &Heads,
        found: &mut Vec<(usize, TokenLog)>,
        outcomes: &mut Outcomes,
    ) {
        let wanted: HashSet<Authorization> =
            group.iter().map(|index| asked[*index].authorization()).collect();
        let mut logs: HashMap<Authorization, TokenLog> = HashMap::new();
        let started = group.iter().map(|index| asked[*index].started_at).min();
        let start =
            started.unwrap_or(Timestamp::from_millis(0)).saturating_sub(settings.log_lookback);
        let time = BlockTime::from_secs(u64::try_from(start.as_millis() / 1_000).unwrap_or(0));
        let block_time = settings.block_time;
        let searched = match self.block_at(time, &heads.head, &heads.finalized, block_time).await {
            Err(error) => Err(error.into()),
            Ok(first) => {
                let filter = consumption_filter(&wanted);
                let take = |answer: Vec<TokenLog>| {
                    for log in answer {
                        let key = (log.token, Address::from_word(log.topics[1]), log.topics[2]);
                        // Payers and nonces are OR-ed apart: other pairs of them come along.
                        if wanted.contains(&key) {
                            logs.entry(key).or_insert(log);
                        }
                    }
                    // An authorization is consumed once: nothing is left to find.
                    logs.len() < wanted.len()
                };
                self.scan_logs(&filter, first, heads.head.number, take).await.map(|()| first)
            }
        };
        let to_block = heads.head.number;
        let missing =
            searched.map(|from_block| NonceState::UsedWithoutLog { from_block, to_block });
        for index in group {
            if let Some(log) = logs.get(&asked[*index].authorization()) {
                found.push((*index, log.clone()));
            } else {
                outcomes.insert(*index, missing.clone());
            }
        }
    }

    /// What each consumption meant, in the order of `found`, which is sorted by block.
    async fn find_transfers(
        &self,
        settings: &ChainSettings,
        found: &mut [(usize, TokenLog)],
    ) -> Vec<Result<ConsumptionKind, ReadFailure>> {
        found.sort_by_key(|(_, log)| (log.block_number, log.log_index));
        let width = self.memory().log_width.blocks();
        let mut kinds = Vec::with_capacity(found.len());
        let near = |first: &TokenLog, log: &TokenLog| log.block_number - first.block_number < width;
        let mut rest = &*found;
        while let Some((_, first)) = rest.first() {
            let count =
                rest.iter().take(settings.batch_max).take_while(|(_, l)| near(first, l)).count();
            let (window, after) = rest.split_at(count);
            kinds.extend(self.transfers_in(window).await);
            rest = after;
        }
        kinds
    }

    /// The same for a few that are near each other: never empty, sorted by block.
    async fn transfers_in(
        &self,
        window: &[(usize, TokenLog)],
    ) -> Vec<Result<ConsumptionKind, ReadFailure>> {
        let is_used = |log: &TokenLog| log.topics[0] == AuthorizationUsed::SIGNATURE_HASH;
        let used: Vec<&TokenLog> =
            window.iter().map(|(_, log)| log).filter(|l| is_used(l)).collect();
        let mut transfers: HashMap<LogPlace, TokenLog> = HashMap::new();
        let mut read = Ok(());
        if let (Some(first), Some(last)) = (used.first(), used.last()) {
            let filter = transfer_filter(&used);
            let wanted: HashSet<LogPlace> = used.iter().map(|log| place_behind(log)).collect();
            let take = |answer: Vec<TokenLog>| {
                let placed = answer.into_iter().map(|log| (place(&log), log));
                // A busy payer has many other transfers.
                transfers.extend(placed.filter(|(place, _)| wanted.contains(place)));
                true
            };
            read = self.scan_logs(&filter, first.block_number, last.block_number, take).await;
        }
        let kinds = window.iter().map(|(_, log)| {
            if !is_used(log) {
                return Ok(ConsumptionKind::Canceled);
            }
            match transfers
                .get(&place_behind(log))
                .filter(|transfer| transfer.block_hash == log.block_hash)
            {
                Some(transfer) => Ok(pair(log, transfer)),
                None => read.clone().map(|()| ConsumptionKind::WithoutTransfer),
            }
        });
        kinds.collect()
    }

    /// Reads the blocks the logs are in, and the head, once more by number.
    async fn canonical(&self, found: &[(usize, TokenLog)], head: &BlockRef) -> Canonical {
        let mut numbers: BTreeSet<u64> = found.iter().map(|(_, log)| log.block_number).collect();
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
        Canonical { head: head_now.map(|_| ()), blocks }
    }
}

/// Which blocks are canonical, as of the end of the read.
struct Canonical {
    head: Result<(), ReadFailure>,
    blocks: HashMap<u64, Result<BlockRef, ReadFailure>>,
}

impl Canonical {
    fn confirm(&self, log: &TokenLog, kind: ConsumptionKind) -> Result<Consumption, ReadFailure> {
        let block = canonical_block(&self.blocks, log.block_number, log.block_hash)?;
        Ok(Consumption {
            log: LogRef { block, tx_hash: log.tx_hash, log_index: log.log_index },
            kind,
        })
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

/// Where a log stands: transaction, index within the block, and the contract that emitted it.
type LogPlace = (B256, u64, Address);

fn place(log: &TokenLog) -> LogPlace {
    (log.tx_hash, log.log_index, log.token)
}

/// Where EIP-3009's `Transfer` must stand.
fn place_behind(used: &TokenLog) -> LogPlace {
    (used.tx_hash, used.log_index.saturating_add(1), used.token)
}

/// What the transfer directly behind an `AuthorizationUsed` makes of it. Another payer's, or one of
/// another shape, is not the one EIP-3009 asks for.
fn pair(used: &TokenLog, transfer: &TokenLog) -> ConsumptionKind {
    let value = <[u8; 32]>::try_from(&transfer.data[..]);
    match (value, transfer.topics.as_slice()) {
        (Ok(value), [_, from, to]) if *from == used.topics[1] => {
            ConsumptionKind::Transferred(SeenTransfer {
                log_index: transfer.log_index,
                from: Address::from_word(*from),
                to: Address::from_word(*to),
                value: Amount::new(U256::from_be_bytes(value)),
            })
        }
        _ => ConsumptionKind::WithoutTransfer,
    }
}

fn consumption_filter(wanted: &HashSet<Authorization>) -> LogFilter {
    let tokens: BTreeSet<Address> = wanted.iter().map(|(token, _, _)| *token).collect();
    let payers: BTreeSet<B256> = wanted.iter().map(|(_, payer, _)| payer.into_word()).collect();
    let nonces: BTreeSet<B256> = wanted.iter().map(|(_, _, nonce)| *nonce).collect();
    LogFilter {
        tokens: tokens.into_iter().collect(),
        topics: vec![
            vec![AuthorizationUsed::SIGNATURE_HASH, AuthorizationCanceled::SIGNATURE_HASH],
            payers.into_iter().collect(),
            nonces.into_iter().collect(),
        ],
    }
}

fn transfer_filter(used: &[&TokenLog]) -> LogFilter {
    let tokens: BTreeSet<Address> = used.iter().map(|log| log.token).collect();
    let payers: BTreeSet<B256> = used.iter().map(|log| log.topics[1]).collect();
    LogFilter {
        tokens: tokens.into_iter().collect(),
        topics: vec![vec![Transfer::SIGNATURE_HASH], payers.into_iter().collect()],
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
    use alloy_primitives::b256;

    use super::*;

    #[test]
    fn event_signatures_are_the_ones_tokens_emit() {
        let used = b256!("98de503528ee59b575ef0c0a2576a82497bfc029a5685b209e9ec333479b10a5");
        let canceled = b256!("1cdd46ff242716cdaa72d159d339a485b3438398348d68f09d7c8c0a59353d81");
        let transfer = b256!("ddf252ad1be2c89b69c2b068fc378daa952ba7f163c4a11628f55a4df523b3ef");
        assert_eq!(AuthorizationUsed::SIGNATURE_HASH, used);
        assert_eq!(AuthorizationCanceled::SIGNATURE_HASH, canceled);
        assert_eq!(Transfer::SIGNATURE_HASH, transfer);
    }

    #[test]
    fn an_old_payment_is_searched_apart() {
        let at = |secs: i64| Asked {
            token: Address::ZERO,
            payer: Address::ZERO,
            nonce: B256::ZERO,
            started_at: Timestamp::from_millis(secs * 1_000),
        };
        let asked = [at(1_000), at(5), at(1_030), at(1_060), at(1_061)];
        let gap = Duration::from_secs(30);
        let grouped = groups(&asked, vec![0, 1, 2, 3, 4], gap, 3);
        assert_eq!(grouped, [vec![1], vec![0, 2, 3], vec![4]]);
        assert_eq!(groups(&asked, vec![4, 2], gap, 3), [vec![2], vec![4]]);
    }
}
