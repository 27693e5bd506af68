//! The search for what used each nonce: logs first, then the transactions of those logs that can matter.

use std::collections::{BTreeSet, HashMap, HashSet};

use alloy_primitives::{Address, B256, U256};
use alloy_sol_types::{SolEvent, sol};

use super::calldata::{PermitCall, PermitCalls, PermitId, is_settled_event};
use super::transactions::Receipt;
use super::{Permit2Settings, position};
use crate::chain::ChainSettings;
use crate::chain::asked::Asked;
use crate::chain::endpoint::Endpoint;
use crate::chain::logs::{LogFilter, LogsOf, TokenLog};
use crate::chain::read::{Finding, Findings, FoundAt};
use crate::domain::{Amount, ConsumptionKind, ReadFailure, ReadFailureKind, SeenTransfer};

sol! {
    event UnorderedNonceInvalidation(address indexed owner, uint256 word, uint256 mask);
    event Transfer(address indexed from, address indexed to, uint256 value);
}

/// The most transactions looked at for one group of payments.
const TRANSACTIONS_MAX: usize = 2_000;

/// The most transfers to others that are kept, to look for a nonce that was used elsewhere.
const OTHERS_MAX: usize = 500;

/// A transfer of a payer, as its log has it.
#[derive(Debug, Clone)]
struct Moved {
    log: TokenLog,
    from: Address,
    to: Address,
    value: Amount,
    /// Whether its transaction has no other transfer of this token from and to the same.
    alone: bool,
}

impl Moved {
    fn parse(log: TokenLog) -> Option<Self> {
        let (from, to, value) = parse_transfer(&log.topics, &log.data)?;
        Some(Self { log, from, to, value, alone: false })
    }

    fn parties(&self) -> (Address, Address, Address) {
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

fn parse_transfer(topics: &[B256], data: &[u8]) -> Option<(Address, Address, Amount)> {
    let [Transfer::SIGNATURE_HASH, from, to] = topics else { return None };
    let value = <[u8; 32]>::try_from(data).ok()?;
    let value = Amount::new(U256::from_be_bytes(value));
    Some((Address::from_word(*from), Address::from_word(*to), value))
}

/// One search: what is asked, and what came of it so far.
struct Search<'a> {
    settings: &'a ChainSettings,
    /// Permits that are used and not explained yet.
    open: HashSet<PermitId>,
    /// The most any payment asks of these: token, payer, receiver.
    wanted: HashMap<(Address, Address, Address), Amount>,
    found: HashMap<PermitId, (FoundAt, ConsumptionKind)>,
    failed: HashMap<PermitId, ReadFailure>,
    /// The first invalidation of each.
    invalidated: HashMap<PermitId, TokenLog>,
    /// Transfers that could be a payment's, in transactions that called no proxy directly: payer, block.
    unexplained: HashSet<(Address, u64)>,
    /// Those of them whose transaction was a batch with calls for an open permit.
    batched: Vec<(Moved, Vec<PermitCall>)>,
    /// The payers' other transfers.
    others: Vec<Moved>,
    transactions_left: usize,
}

impl<'a> Search<'a> {
    fn new(settings: &'a ChainSettings, asked: impl Iterator<Item = &'a Asked>) -> Self {
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
            transactions_left: TRANSACTIONS_MAX,
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
    fn filter(&self) -> LogFilter {
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
    fn sort(&mut self, logs: Vec<TokenLog>) -> Vec<Moved> {
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
        let can_pay = |one: &Moved| {
            let most = self.wanted.get(&one.parties());
            one.value > Amount::ZERO && most.is_some_and(|most| one.value <= *most)
        };
        let (candidates, others): (Vec<_>, Vec<_>) = moved.into_iter().partition(can_pay);
        let room = OTHERS_MAX - self.others.len();
        self.others.extend(others.into_iter().take(room));
        candidates
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
    fn note_calls(&mut self, moved: &Moved, sender: Address, calls: &PermitCalls) {
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
    fn note_batched(
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

    fn fail_all_of(&mut self, payer: Address, failure: &ReadFailure) {
        let theirs = self.open.iter().filter(|(owner, _)| *owner == payer);
        self.failed.extend(theirs.map(|permit| (*permit, failure.clone())));
    }

    fn finding(
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

/// The transfers between these parties that a known proxy vouched for, in order: log index and value.
///
/// The proxy's event stands directly behind the transfer; only other logs of the token (an `Approval`, say)
/// may stand between.
fn vouched(
    receipt: &Receipt,
    settings: &Permit2Settings,
    parties: (Address, Address, Address),
) -> Vec<(u64, Amount)> {
    let (token, from, to) = parties;
    let mut last: Option<(u64, Address, Address, Amount)> = None;
    let mut vouched = Vec::new();
    for log in &receipt.logs {
        if log.address == token {
            if let Some((from, to, value)) = parse_transfer(&log.topics, &log.data) {
                last = Some((log.log_index.to(), from, to, value));
            }
            continue;
        }
        let is_settled = settings.proxies.contains(&log.address)
            && log.topics.first().is_some_and(is_settled_event);
        if let Some((index, f, t, value)) = last.take()
            && is_settled
            && (f, t) == (from, to)
        {
            vouched.push((index, value));
        }
    }
    vouched
}

/// Which of the batched calls made this transfer: only when all of them came through, in their order and
/// with their amounts.
fn vouched_call(
    moved: &Moved,
    calls: &[PermitCall],
    vouched: &[(u64, Amount)],
) -> Option<PermitCall> {
    let all_came_through = calls.len() == vouched.len()
        && calls.iter().zip(vouched).all(|(call, (_, value))| call.amount == *value);
    let place = vouched.iter().position(|(index, _)| *index == moved.log.log_index)?;
    calls.get(place).filter(|_| all_came_through).copied()
}

impl Endpoint {
    /// Looks for what used the nonces of one group in the blocks of `range`.
    pub(in crate::chain) async fn find_permit2(
        &self,
        settings: &ChainSettings,
        asked: &[Asked],
        group: &[usize],
        range: (u64, u64),
    ) -> Findings {
        let of_group = group.iter().map(|index| &asked[*index]);
        let mut search = Search::new(settings, of_group);
        let searched = self.search_permits(&mut search, range).await;
        let finding = |index: &usize| (*index, search.finding(&asked[*index], range, &searched));
        group.iter().map(finding).collect()
    }

    async fn search_permits(
        &self,
        search: &mut Search<'_>,
        range: (u64, u64),
    ) -> Result<(), ReadFailure> {
        let mut next = Some(range.0);
        while let Some(first) = next.filter(|first| *first <= range.1 && !search.open.is_empty()) {
            let width = self.memory().log_widths.of(LogsOf::Permits).blocks().max(1);
            let last = first.saturating_add(width - 1).min(range.1);
            next = last.checked_add(1);
            let mut logs = Vec::new();
            let take = |answer: Vec<TokenLog>| {
                logs.extend(answer);
                true
            };
            self.scan_logs(search.filter(), first, last, take).await?;
            let candidates = search.sort(logs);
            self.examine(search, candidates).await?;
            self.examine_batched(search).await;
        }
        self.examine_invalidated(search).await;
        if !search.open.is_empty() {
            let others = std::mem::take(&mut search.others);
            self.examine(search, others).await?;
            self.examine_batched(search).await;
        }
        Ok(())
    }

    /// Reads the transactions of these transfers. An error is about the whole search.
    async fn examine(
        &self,
        search: &mut Search<'_>,
        candidates: Vec<Moved>,
    ) -> Result<(), ReadFailure> {
        let transactions: HashSet<B256> = candidates.iter().map(|one| one.log.tx_hash).collect();
        search.transactions_left =
            search.transactions_left.checked_sub(transactions.len()).ok_or_else(|| {
                let detail = format!("more than {TRANSACTIONS_MAX} transactions to look through");
                ReadFailure::new(ReadFailureKind::RangeRefused, detail)
            })?;
        let logs: Vec<&TokenLog> = candidates.iter().map(|one| &one.log).collect();
        let calls = self.permit_calls_of(search.settings, &logs).await;
        for moved in &candidates {
            match calls.get(&moved.log.tx_hash) {
                Some(Ok((sender, calls))) => search.note_calls(moved, *sender, calls),
                // Whoever does not answer is not asked again and again: others are waiting.
                Some(Err(failure)) if failure.kind == ReadFailureKind::Unreachable => {
                    return Err(failure.clone());
                }
                Some(Err(failure)) => search.fail_all_of(moved.from, failure),
                None => {
                    let detail = format!("transaction {} was not read", moved.log.tx_hash);
                    let failure = ReadFailure::new(ReadFailureKind::BadAnswer, detail);
                    search.fail_all_of(moved.from, &failure);
                }
            }
        }
        Ok(())
    }

    /// Rule 2: calls through Multicall3.
    async fn examine_batched(&self, search: &mut Search<'_>) {
        let batched = std::mem::take(&mut search.batched);
        if batched.is_empty() {
            return;
        }
        let logs: Vec<&TokenLog> = batched.iter().map(|(moved, _)| &moved.log).collect();
        let receipts = self.receipts_of(&logs).await;
        let moments: Vec<(PermitId, u64)> = batched
            .iter()
            .flat_map(|(moved, calls)| calls.iter().map(|call| (call.id(), moved.log.block_number)))
            .flat_map(|(permit, block)| [(permit, block.saturating_sub(1)), (permit, block)])
            .collect();
        let bits = self.bits_at(&search.settings.permit2, &moments).await;
        let mut bits = bits.chunks(2);
        for (moved, calls) in &batched {
            let flips: Vec<_> =
                calls.iter().copied().zip(bits.by_ref().take(calls.len())).collect();
            if let Err(failure) =
                search.note_batched(moved, &flips, receipts.get(&moved.log.tx_hash))
            {
                search.fail_all_of(moved.from, &failure);
            }
        }
    }

    /// Rule 3: nonces their owner set himself.
    async fn examine_invalidated(&self, search: &mut Search<'_>) {
        let likely: Vec<(PermitId, TokenLog)> = search
            .invalidated
            .iter()
            .filter(|(permit, log)| {
                search.open.contains(*permit)
                    && !search.unexplained.contains(&(permit.0, log.block_number))
            })
            .map(|(permit, log)| (*permit, log.clone()))
            .collect();
        let before =
            |(permit, log): &(PermitId, TokenLog)| (*permit, log.block_number.saturating_sub(1));
        let moments: Vec<(PermitId, u64)> = likely.iter().map(before).collect();
        let bits = self.bits_at(&search.settings.permit2, &moments).await;
        for ((permit, log), bit) in likely.into_iter().zip(bits) {
            match bit {
                Ok(false) => {
                    search.open.remove(&permit);
                    let canceled = (FoundAt::from(&log), ConsumptionKind::Canceled);
                    search.found.insert(permit, canceled);
                }
                Ok(true) => {}
                Err(failure) => drop(search.failed.insert(permit, failure)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use alloy_primitives::{Bytes, keccak256};
    use serde_json::{Value, json};

    use super::*;

    const TOKEN: Address = Address::repeat_byte(1);
    const PAYER: Address = Address::repeat_byte(2);
    const SHOP: Address = Address::repeat_byte(3);
    const PROXY: Address = Address::repeat_byte(4);
    const OTHER: Address = Address::repeat_byte(5);

    fn settings() -> Permit2Settings {
        let permit2 = Address::repeat_byte(6);
        Permit2Settings { permit2, proxies: vec![PROXY], upto_facilitators: Vec::new() }
    }

    fn transfer(from: Address, to: Address, value: u64) -> Value {
        let topics = [Transfer::SIGNATURE_HASH, from.into_word(), to.into_word()];
        let data = Bytes::from(U256::from(value).to_be_bytes::<32>());
        json!({ "address": TOKEN, "topics": topics, "data": data })
    }

    fn bare(address: Address, event: &str) -> Value {
        json!({ "address": address, "topics": [keccak256(event)], "data": "0x" })
    }

    fn receipt(mut logs: Vec<Value>) -> Receipt {
        for (index, log) in logs.iter_mut().enumerate() {
            log["logIndex"] = json!(format!("{index:#x}"));
        }
        let hash = B256::repeat_byte(9);
        let receipt = json!({
            "transactionHash": hash, "blockHash": hash, "blockNumber": "0x1", "logs": logs,
        });
        serde_json::from_value(receipt).unwrap()
    }

    fn vouched_in(logs: Vec<Value>) -> Vec<u64> {
        let found = vouched(&receipt(logs), &settings(), (TOKEN, PAYER, SHOP));
        found.into_iter().map(|(index, _)| index).collect()
    }

    #[test]
    fn a_proxy_vouches_for_the_transfer_directly_before_its_event() {
        let pays = || transfer(PAYER, SHOP, 5);
        let settled = || bare(PROXY, "Settled()");
        let approval = || bare(TOKEN, "Approval(address,address,uint256)");
        assert_eq!(vouched_in(vec![pays(), settled()]), [0]);
        assert_eq!(vouched_in(vec![pays(), approval(), settled()]), [0], "the token's own log");
        let with_permit = bare(PROXY, "SettledWithPermit()");
        assert_eq!(vouched_in(vec![approval(), pays(), with_permit, pays(), settled()]), [1, 3]);
        for (logs, why) in [
            (vec![pays()], "nobody vouches"),
            (vec![settled(), pays()], "before it"),
            (vec![pays(), bare(OTHER, "Settled()")], "not a proxy"),
            (vec![pays(), bare(PROXY, "Paid()")], "another event"),
            (vec![pays(), bare(OTHER, "Noise()"), settled()], "something in between"),
            (vec![pays(), transfer(PAYER, OTHER, 1), settled()], "another transfer in between"),
            (vec![transfer(PAYER, OTHER, 5), settled()], "to somebody else"),
            (vec![transfer(OTHER, SHOP, 5), settled()], "from somebody else"),
        ] {
            assert!(vouched_in(logs).is_empty(), "{why}");
        }
    }

    #[test]
    fn a_batched_call_counts_only_when_all_of_them_came_through_as_they_say() {
        let amount = |units: u64| Amount::new(U256::from(units));
        let call = |nonce: u8, units: u64| PermitCall {
            owner: PAYER,
            nonce: B256::repeat_byte(nonce),
            token: TOKEN,
            to: SHOP,
            amount: amount(units),
            upto: None,
        };
        let log = |index: u64| TokenLog {
            token: TOKEN,
            topics: vec![Transfer::SIGNATURE_HASH, PAYER.into_word(), SHOP.into_word()],
            data: Bytes::from(U256::from(5).to_be_bytes::<32>()),
            block_number: 1,
            block_hash: B256::ZERO,
            tx_hash: B256::ZERO,
            log_index: index,
        };
        let nonce_of = |index: u64, calls: &[PermitCall], vouched: &[(u64, Amount)]| {
            let moved = Moved::parse(log(index)).unwrap();
            vouched_call(&moved, calls, vouched).map(|call| call.nonce[0])
        };
        let both = [call(1, 5), call(2, 7)];
        let came_through = [(0, amount(5)), (4, amount(7))];
        assert_eq!(nonce_of(0, &both, &came_through), Some(1));
        assert_eq!(nonce_of(4, &both, &came_through), Some(2));
        assert_eq!(nonce_of(2, &both, &came_through), None, "nobody vouches for this one");
        assert_eq!(nonce_of(0, &both, &came_through[..1]), None, "one of two: which?");
        assert_eq!(nonce_of(0, &both[..1], &came_through), None, "a call that nobody sees");
        let swapped = [call(2, 7), call(1, 5)];
        assert_eq!(nonce_of(0, &swapped, &came_through), None, "in another order");
        assert_eq!(nonce_of(0, &[], &[]), None);
    }
}
