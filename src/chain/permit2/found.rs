//! What a search for permits has come to so far: which transfers may be a payment's, and what is known of them.

use std::collections::{BTreeSet, HashMap, HashSet};

use alloy_primitives::{Address, B256, U256};
use alloy_sol_types::{SolEvent, sol};

use super::calldata::{PermitCall, PermitCalls, PermitId};
use super::position;
use super::transactions::Receipt;
use super::vouched::{vouched, vouched_call};
use crate::chain::ChainSettings;
use crate::chain::asked::Asked;
use crate::chain::logs::{LogFilter, LogsOf, TokenLog};
use crate::chain::read::{Finding, FoundAt};
use crate::domain::{Amount, ConsumptionKind, ReadFailure, ReadFailureKind, SeenTransfer};

sol! {
    event UnorderedNonceInvalidation(address indexed owner, uint256 word, uint256 mask);
    event Transfer(address indexed from, address indexed to, uint256 value);
}

/// The most logs of one payer in one search.
const LOGS_MAX: usize = 5_000;

/// The most transactions of one payer that are read, to see whether they settled one of his permits.
const TRANSACTIONS_MAX: usize = 1_000;

/// The most transfers of one payer to others that are kept, to look for a nonce that was used elsewhere.
const OTHERS_MAX: usize = 100;

/// A transfer of a payer, as its log has it.
#[derive(Debug, Clone)]
pub(super) struct Moved {
    pub(super) log: TokenLog,
    pub(super) from: Address,
    to: Address,
    value: Amount,
    /// Whether its transaction has no other transfer of this token from and to the same.
    alone: bool,
}

impl Moved {
    pub(super) fn parse(log: TokenLog) -> Option<Self> {
        let (from, to, value) = parse_transfer(&log.topics, &log.data)?;
        Some(Self { log, from, to, value, alone: false })
    }

    pub(super) fn parties(&self) -> (Address, Address, Address) {
        (self.log.token, self.from, self.to)
    }

    fn is_of(&self, call: &PermitCall) -> bool {
        self.parties() == (call.token, call.owner, call.to)
    }

    fn consumed(&self, at_most: Option<Amount>) -> (FoundAt, ConsumptionKind) {
        let kind = ConsumptionKind::Transferred(SeenTransfer {
            log_index: self.log.log_index,
            token: self.log.token,
            from: self.from,
            to: self.to,
            value: self.value,
            at_most,
        });
        (FoundAt::from(&self.log), kind)
    }
}

/// Payer, receiver and value of a log that is a `Transfer`.
pub(super) fn parse_transfer(topics: &[B256], data: &[u8]) -> Option<(Address, Address, Amount)> {
    let [Transfer::SIGNATURE_HASH, from, to] = topics else { return None };
    let value = <[u8; 32]>::try_from(data).ok()?;
    let value = Amount::new(U256::from_be_bytes(value));
    Some((Address::from_word(*from), Address::from_word(*to), value))
}

/// One search: what is asked, and what came of it so far.
pub(super) struct Search<'a> {
    pub(super) settings: &'a ChainSettings,
    /// Permits that are used and not explained yet.
    pub(super) open: HashSet<PermitId>,
    /// The most any payment asks of these: token, payer, receiver.
    wanted: HashMap<(Address, Address, Address), Amount>,
    pub(super) found: HashMap<PermitId, (FoundAt, ConsumptionKind)>,
    pub(super) failed: HashMap<PermitId, ReadFailure>,
    /// The first invalidation of each.
    pub(super) invalidated: HashMap<PermitId, TokenLog>,
    /// Transfers that could be a payment's, in transactions that called no proxy directly: payer, block.
    pub(super) unexplained: HashSet<(Address, u64)>,
    /// Those of them whose transaction was a batch with calls for an open permit.
    pub(super) batched: Vec<(Moved, Vec<PermitCall>)>,
    /// The payers' other transfers.
    pub(super) others: Vec<Moved>,
    /// What was looked at of each payer.
    looks: HashMap<Address, Looks>,
    /// Whether some payer had too much to look through, since this was last asked.
    has_given_up: bool,
}

/// How much of one payer was looked at. The bounds are each payer's own: whoever exceeds one, or is made to by
/// somebody who moves nothing in his name, goes without, and takes nothing from the others (I11).
#[derive(Debug, Default)]
struct Looks {
    logs: usize,
    transactions: usize,
    others: usize,
}

impl<'a> Search<'a> {
    pub(super) fn new(settings: &'a ChainSettings, asked: impl Iterator<Item = &'a Asked>) -> Self {
        let mut search = Self {
            settings,
            open: HashSet::new(),
            wanted: HashMap::new(),
            found: HashMap::new(),
            failed: HashMap::new(),
            invalidated: HashMap::new(),
            unexplained: HashSet::new(),
            batched: Vec::new(),
            others: Vec::new(),
            looks: HashMap::new(),
            has_given_up: false,
        };
        for asked in asked {
            search.open.insert((asked.payer, asked.nonce));
            let parties = (asked.token, asked.payer, asked.pay_to);
            let most = search.wanted.entry(parties).or_insert(asked.amount);
            *most = (*most).max(asked.amount);
        }
        search
    }

    /// Every transfer of the payers in the tokens asked about, and every nonce they invalidated.
    pub(super) fn filter(&self) -> LogFilter {
        let mut emitters: BTreeSet<Address> = self.wanted.keys().map(|(t, _, _)| *t).collect();
        emitters.insert(self.settings.permit2.permit2);
        let payers: BTreeSet<B256> = self.open.iter().map(|(o, _)| o.into_word()).collect();
        let events = vec![Transfer::SIGNATURE_HASH, UnorderedNonceInvalidation::SIGNATURE_HASH];
        LogFilter {
            of: LogsOf::Permits,
            tokens: emitters.into_iter().collect(),
            topics: vec![events, payers.into_iter().collect()],
        }
    }

    /// Takes note of some blocks' logs. Returns the transfers that could be a payment's.
    pub(super) fn sort(&mut self, logs: Vec<TokenLog>) -> Vec<Moved> {
        self.count_logs(&logs);
        let (by_permit2, by_tokens): (Vec<_>, Vec<_>) =
            logs.into_iter().partition(|log| log.token == self.settings.permit2.permit2);
        by_permit2.into_iter().for_each(|log| self.note_invalidation(&log));
        let mut moved: Vec<Moved> = by_tokens.into_iter().filter_map(Moved::parse).collect();
        let mut counts: HashMap<_, usize> = HashMap::new();
        for one in &moved {
            *counts.entry((one.log.tx_hash, one.parties())).or_default() += 1;
        }
        for one in &mut moved {
            one.alone = counts[&(one.log.tx_hash, one.parties())] == 1;
        }
        // A proxy refuses to move nothing, and anybody can move nothing in anybody's name.
        let payers = self.payers();
        moved.retain(|one| one.value > Amount::ZERO && payers.contains(&one.from));
        let can_pay =
            |one: &Moved| self.wanted.get(&one.parties()).is_some_and(|most| one.value <= *most);
        let (candidates, others): (Vec<_>, Vec<_>) = moved.into_iter().partition(can_pay);
        for other in others {
            let looks = self.looks.entry(other.from).or_default();
            if looks.others < OTHERS_MAX {
                looks.others += 1;
                self.others.push(other);
            }
        }
        candidates
    }

    /// Whose permits are used and not explained yet.
    pub(super) fn payers(&self) -> BTreeSet<Address> {
        self.open.iter().map(|(owner, _)| *owner).collect()
    }

    /// Whether this one's permit is.
    pub(super) fn is_open_still(&self, asked: &Asked) -> bool {
        self.open.contains(&(asked.payer, asked.nonce))
    }

    fn count_logs(&mut self, logs: &[TokenLog]) {
        for log in logs {
            let payer = log.topics.get(1).map(|topic| Address::from_word(*topic));
            let Some(payer) = payer else { continue };
            let looks = self.looks.entry(payer).or_default();
            looks.logs += 1;
            if looks.logs == LOGS_MAX + 1 {
                self.give_up_on(payer, &format!("more than {LOGS_MAX} logs"));
            }
        }
    }

    /// Those of these transfers whose transactions are to be read.
    pub(super) fn admit(&mut self, mut candidates: Vec<Moved>) -> Vec<Moved> {
        let transactions: HashSet<(Address, B256)> =
            candidates.iter().map(|one| (one.from, one.log.tx_hash)).collect();
        for (payer, _) in transactions {
            let looks = self.looks.entry(payer).or_default();
            looks.transactions += 1;
            if looks.transactions == TRANSACTIONS_MAX + 1 {
                self.give_up_on(payer, &format!("more than {TRANSACTIONS_MAX} transactions"));
            }
        }
        let payers = self.payers();
        candidates.retain(|one| payers.contains(&one.from));
        candidates
    }

    /// Looks for this payer's permits no further.
    fn give_up_on(&mut self, payer: Address, why: &str) {
        let detail = format!("{why} of payer {payer} to look through");
        self.fail_all_of(payer, &ReadFailure::new(ReadFailureKind::RangeRefused, detail));
        let before = self.open.len();
        self.open.retain(|(owner, _)| *owner != payer);
        self.has_given_up |= self.open.len() < before;
    }

    /// Whether some payer was given up on since this was last asked.
    pub(super) fn has_given_up(&mut self) -> bool {
        std::mem::take(&mut self.has_given_up)
    }

    fn note_invalidation(&mut self, log: &TokenLog) {
        let Ok(event) =
            UnorderedNonceInvalidation::decode_raw_log(log.topics.iter().copied(), &log.data)
        else {
            return;
        };
        for permit in &self.open {
            let (word, bit) = position(permit.1);
            if (permit.0, word) == (event.owner, event.word) && event.mask.bit(bit) {
                self.invalidated.entry(*permit).or_insert_with(|| log.clone());
            }
        }
    }

    /// Takes note of what the transaction of a transfer was asked to settle.
    pub(super) fn note_calls(&mut self, moved: &Moved, sender: Address, calls: &PermitCalls) {
        match calls {
            PermitCalls::Direct(call) if moved.is_of(call) && moved.alone => {
                if self.open.remove(&call.id()) {
                    let at_most = call.metered(&self.settings.permit2, sender);
                    self.found.insert(call.id(), moved.consumed(at_most));
                }
            }
            PermitCalls::Direct(_) | PermitCalls::Unknown => {
                self.unexplained.insert(unexplained(moved));
            }
            PermitCalls::Batched(calls) => {
                self.unexplained.insert(unexplained(moved));
                let of_parties = calls.iter().filter(|call| moved.is_of(call)).copied();
                let of_parties: Vec<PermitCall> = of_parties.collect();
                if of_parties.iter().any(|call| self.open.contains(&call.id())) {
                    self.batched.push((moved.clone(), of_parties));
                }
            }
        }
    }

    /// Rule 2, about one transfer: `flips` holds each call for its parties, and its bit in the
    /// block before and in this one.
    pub(super) fn note_batched(
        &mut self,
        moved: &Moved,
        flips: &[(PermitCall, &[Result<bool, ReadFailure>])],
        receipt: Option<&Result<Receipt, ReadFailure>>,
    ) -> Result<(), ReadFailure> {
        let Some(receipt) = receipt else { return Ok(()) };
        let receipt = receipt.as_ref().map_err(ReadFailure::clone)?;
        let mut flipped = Vec::new();
        for (call, bits) in flips {
            let [before, after] = bits else { return Ok(()) };
            // A call whose nonce was not used in this block did not come through.
            if (before.clone()?, after.clone()?) == (false, true) {
                flipped.push(*call);
            }
        }
        let vouched = vouched(receipt, &self.settings.permit2, moved.parties());
        let Some(call) = vouched_call(moved, &flipped, &vouched) else { return Ok(()) };
        let invalidated_here = self
            .invalidated
            .get(&call.id())
            .is_some_and(|log| log.block_number == moved.log.block_number);
        if !invalidated_here && self.open.remove(&call.id()) {
            // Multicall3 asked for the amount: whoever called that is no meter.
            self.found.insert(call.id(), moved.consumed(None));
        }
        Ok(())
    }

    pub(super) fn fail_all_of(&mut self, payer: Address, failure: &ReadFailure) {
        let theirs = self.open.iter().filter(|(owner, _)| *owner == payer);
        self.failed.extend(theirs.map(|permit| (*permit, failure.clone())));
    }

    pub(super) fn finding(
        &self,
        asked: &Asked,
        range: (u64, u64),
        searched: &Result<(), ReadFailure>,
    ) -> Result<Finding, ReadFailure> {
        let permit = (asked.payer, asked.nonce);
        if let Some((at, kind)) = self.found.get(&permit) {
            return Ok(Finding::Consumed(*at, *kind));
        }
        if let Some(failure) = self.failed.get(&permit) {
            return Err(failure.clone());
        }
        searched.clone().map(|()| Finding::Nothing { from_block: range.0, to_block: range.1 })
    }
}

fn unexplained(moved: &Moved) -> (Address, u64) {
    (moved.from, moved.log.block_number)
}
