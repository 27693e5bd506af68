//! EIP-3009: how an authorization's state is read, and which logs say what became of it (DESIGN section 6).

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap, HashSet};

use alloy_primitives::{Address, B256, U256};
use alloy_sol_types::{SolCall, SolEvent, sol};

use super::ChainSettings;
use super::asked::Asked;
use super::endpoint::Endpoint;
use super::logs::{LogFilter, LogsOf, TokenLog};
use super::multicall::StateCall;
use super::read::{Finding, Findings, FoundAt};
use crate::domain::{Amount, ConsumptionKind, ReadFailure, ReadFailureKind, SeenTransfer};

sol! {
    function authorizationState(address authorizer, bytes32 nonce) external view returns (bool);
    event AuthorizationUsed(address indexed authorizer, bytes32 indexed nonce);
    event AuthorizationCanceled(address indexed authorizer, bytes32 indexed nonce);
    event Transfer(address indexed from, address indexed to, uint256 value);
}

/// One authorization of a chain: token, payer, nonce.
type Authorization = (Address, Address, B256);

fn authorization(asked: &Asked) -> Authorization {
    (asked.token, asked.payer, asked.nonce)
}

/// `authorizationState` of the token.
pub(super) fn state_call(asked: &Asked) -> StateCall {
    state_call_of(asked.token, asked.payer, asked.nonce)
}

/// The call for whether this authorizer used this nonce.
pub(super) fn state_call_of(token: Address, authorizer: Address, nonce: B256) -> StateCall {
    let call = authorizationStateCall { authorizer, nonce };
    StateCall { target: token, what: "authorizationState", data: call.abi_encode().into() }
}

/// The bool in the word the token answered with: 0 or 1 and nothing else.
pub(super) fn is_used(asked: &Asked, word: U256) -> Result<bool, ReadFailure> {
    flag_of(asked.token, word)
}

/// The same, of the authorization's token.
pub(super) fn flag_of(token: Address, word: U256) -> Result<bool, ReadFailure> {
    match word {
        U256::ZERO => Ok(false),
        U256::ONE => Ok(true),
        _ => Err(ReadFailure::new(
            ReadFailureKind::BadAnswer,
            format!("authorizationState of {} is neither true nor false", token),
        )),
    }
}

impl Endpoint {
    /// Looks for the logs of one group in the blocks of `range`, and for what each of them meant.
    pub(super) async fn find_eip3009(
        &self,
        settings: &ChainSettings,
        asked: &[Asked],
        group: &[usize],
        range: (u64, u64),
    ) -> Findings {
        let wanted: HashSet<Authorization> =
            group.iter().map(|index| authorization(&asked[*index])).collect();
        let mut logs: HashMap<Authorization, TokenLog> = HashMap::new();
        let mut twice: HashSet<Authorization> = HashSet::new();
        let filter = consumption_filter(&wanted);
        let take = |answer: Vec<TokenLog>| {
            for log in answer.into_iter().filter(is_consumption) {
                let key = (log.token, Address::from_word(log.topics[1]), log.topics[2]);
                // Payers and nonces are OR-ed apart: other pairs of them come along.
                if !wanted.contains(&key) {
                    continue;
                }
                match logs.entry(key) {
                    Entry::Vacant(free) => drop(free.insert(log)),
                    Entry::Occupied(first) if place(first.get()) != place(&log) => {
                        twice.insert(key);
                    }
                    Entry::Occupied(_) => {}
                }
            }
            // An authorization is consumed once: nothing is left to find.
            logs.len() < wanted.len()
        };
        let searched = self.scan_logs(filter, range.0, range.1, take).await;
        let missing =
            searched.map(|()| Finding::Nothing { from_block: range.0, to_block: range.1 });
        let mut findings = Findings::new();
        let mut found: Vec<(usize, TokenLog)> = Vec::new();
        for index in group {
            let authorization = authorization(&asked[*index]);
            match logs.get(&authorization) {
                // Which of the two counts? Of a token that follows EIP-3009 nobody has to ask.
                Some(_) if twice.contains(&authorization) => {
                    let detail = format!("{} was consumed twice", authorization.2);
                    let failure = ReadFailure::new(ReadFailureKind::BadAnswer, detail);
                    findings.insert(*index, Err(failure));
                }
                Some(log) => found.push((*index, log.clone())),
                None => drop(findings.insert(*index, missing.clone())),
            }
        }
        let kinds = self.find_transfers(settings, &mut found).await;
        findings.extend(found.into_iter().zip(kinds).map(|((index, log), kind)| {
            (index, kind.map(|kind| Finding::Consumed(FoundAt::from(&log), kind)))
        }));
        findings
    }

    /// What each consumption meant, in the order of `found`, which is sorted by block.
    async fn find_transfers(
        &self,
        settings: &ChainSettings,
        found: &mut [(usize, TokenLog)],
    ) -> Vec<Result<ConsumptionKind, ReadFailure>> {
        found.sort_by_key(|(_, log)| (log.block_number, log.log_index));
        let width = self.memory().log_widths.of(LogsOf::Transfers).blocks();
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
            read = self.scan_logs(filter, first.block_number, last.block_number, take).await;
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
}

/// Whether this is EIP-3009's `AuthorizationUsed` or `AuthorizationCanceled`: both arguments indexed, and
/// nothing else. A filter admits logs with more topics, and says nothing about data.
fn is_consumption(log: &TokenLog) -> bool {
    log.topics.len() == 3 && log.data.is_empty()
}

/// Where a log stands: transaction, index within the block, and the contract that emitted it.
pub(super) type LogPlace = (B256, u64, Address);

pub(super) fn place(log: &TokenLog) -> LogPlace {
    (log.tx_hash, log.log_index, log.token)
}

/// Where EIP-3009's `Transfer` must stand.
pub(super) fn place_behind(used: &TokenLog) -> LogPlace {
    (used.tx_hash, used.log_index.saturating_add(1), used.token)
}

/// What the transfer directly behind an `AuthorizationUsed` makes of it. Another payer's, or one of
/// another shape, is not the one EIP-3009 asks for.
pub(super) fn pair(used: &TokenLog, transfer: &TokenLog) -> ConsumptionKind {
    let value = <[u8; 32]>::try_from(&transfer.data[..]);
    match (value, transfer.topics.as_slice()) {
        (Ok(value), [_, from, to]) if *from == used.topics[1] => {
            ConsumptionKind::Transferred(SeenTransfer {
                log_index: transfer.log_index,
                token: transfer.token,
                from: Address::from_word(*from),
                to: Address::from_word(*to),
                value: Amount::new(U256::from_be_bytes(value)),
                at_most: None,
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
        of: LogsOf::Uses,
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
        of: LogsOf::Transfers,
        tokens: tokens.into_iter().collect(),
        topics: vec![vec![Transfer::SIGNATURE_HASH], payers.into_iter().collect()],
    }
}

#[cfg(test)]
mod tests {
    use alloy_primitives::{b256, hex};

    use super::*;
    use crate::chain::asked::Keeper;

    #[test]
    fn signatures_are_the_ones_tokens_use() {
        let used = b256!("98de503528ee59b575ef0c0a2576a82497bfc029a5685b209e9ec333479b10a5");
        let canceled = b256!("1cdd46ff242716cdaa72d159d339a485b3438398348d68f09d7c8c0a59353d81");
        let transfer = b256!("ddf252ad1be2c89b69c2b068fc378daa952ba7f163c4a11628f55a4df523b3ef");
        assert_eq!(AuthorizationUsed::SIGNATURE_HASH, used);
        assert_eq!(AuthorizationCanceled::SIGNATURE_HASH, canceled);
        assert_eq!(Transfer::SIGNATURE_HASH, transfer);
        assert_eq!(authorizationStateCall::SELECTOR, hex!("e94a0102"));
    }

    #[test]
    fn a_state_is_true_or_false_and_nothing_else() {
        let asked = Asked {
            keeper: Keeper::Token,
            token: Address::ZERO,
            payer: Address::ZERO,
            pay_to: Address::ZERO,
            amount: Amount::ZERO,
            nonce: B256::ZERO,
            started_at: crate::domain::Timestamp::from_millis(0),
        };
        let read = |word: U256| is_used(&asked, word).map_err(|failure| failure.kind);
        assert_eq!(read(U256::ZERO), Ok(false));
        assert_eq!(read(U256::ONE), Ok(true));
        assert_eq!(read(U256::from(2)), Err(ReadFailureKind::BadAnswer));
        assert_eq!(read(U256::MAX), Err(ReadFailureKind::BadAnswer));
    }
}
