//! The search for refunds: who used the nonces of refund records, and what for (DESIGN section 10).
//!
//! Only final blocks are searched, so that nothing found can be taken back. One search covers a bounded
//! range, and says how far it came: the caller goes on from there. Nothing is concluded here.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::{Duration, Instant};

use alloy_primitives::{Address, B256, U64, U256};
use alloy_sol_types::SolEvent;
use serde_json::json;

use super::blocks::{header_by_number, parse_header};
use super::eip3009::{
    AuthorizationCanceled, AuthorizationUsed, Transfer, pair, place, place_behind,
};
use super::endpoint::Endpoint;
use super::heads::Heads;
use super::logs::{LogFilter, LogsOf, TokenLog};
use super::multicall::{StateCall, check_chain_id};
use super::transport::{Call, decode};
use super::{Chain, ChainSettings, bounded, eip3009};
use crate::domain::{
    BlockRef, BlockTime, Consumption, ConsumptionKind, LogRef, NonceUse, ReadFailure,
    ReadFailureKind, RefundPolicy, RefundReading, RefundSearch, SearchedRefund, Timestamp,
};

/// The most log reads one search makes at the widest range an endpoint takes; what is left is for the next.
const READS_PER_SEARCH: u64 = 32;

/// The most uses of one nonce in one search. A nonce can be used by any number of strangers, for nothing:
/// one that is used more often is not looked into, and its record goes without (I11).
const USES_PER_NONCE_MAX: usize = 32;

/// The most blocks with uses that one search looks into; the nonces used most often go without first.
const USE_BLOCKS_MAX: usize = 128;

impl Chain {
    /// Searches for all these records at once, at one endpoint after another, beginning at the next one each
    /// time, until `is_enough` says so of what has been read. Never fails: an endpoint that shows nothing is
    /// a reading that says why. It takes at most `within`, of which each endpoint has its share. `now` is the
    /// local time, used for nothing but the age of an endpoint's head.
    pub async fn search_refunds(
        &self,
        refunds: &[SearchedRefund],
        policy: &RefundPolicy,
        now: Timestamp,
        within: Duration,
        is_enough: impl Fn(&[RefundReading]) -> bool,
    ) -> Vec<RefundReading> {
        let ends_at = Instant::now() + within;
        let mut readings: Vec<RefundReading> = Vec::new();
        let tokens = refunds.iter().map(|refund| refund.token).collect();
        let order = self.in_turn(&tokens);
        for (turn, place) in order.iter().enumerate() {
            let endpoint = &self.endpoints[*place];
            let waiting = u32::try_from(order.len() - turn).unwrap_or(u32::MAX);
            let share = ends_at.saturating_duration_since(Instant::now()) / waiting;
            // All search the same blocks, as far as each gets: else they have nothing to agree on.
            let first = readings.iter().find_map(|r| r.outcome.as_ref().ok());
            let first = first.map(|search| (search.from_block, search.to_block));
            let search = endpoint.search_refunds(&self.settings, refunds, policy, first, now);
            let outcome = bounded(share, search).await;
            readings.push(RefundReading { endpoint: endpoint.name.clone(), outcome });
            if is_enough(&readings) {
                break;
            }
        }
        readings
    }
}

impl Endpoint {
    async fn search_refunds(
        &self,
        settings: &ChainSettings,
        refunds: &[SearchedRefund],
        policy: &RefundPolicy,
        first: Option<(u64, u64)>,
        now: Timestamp,
    ) -> Result<RefundSearch, ReadFailure> {
        let silenced = self.silenced(refunds.iter().map(|refund| &refund.token));
        let (believed, unsearched) = believed_about(refunds, silenced)?;
        let heads = self.heads(settings).await?;
        self.check_chain(settings).await?;
        // What a head that stands still does not show may well be there.
        self.see_head(settings, &heads.head, now)?;
        let slack = lookback_blocks(settings);
        let span =
            self.memory().log_widths.of(LogsOf::Refunds).blocks().saturating_mul(READS_PER_SEARCH);
        let finalized = heads.finalized;
        let last_of = |begins_at: u64| begins_at.saturating_add(span - 1).min(finalized.number);
        let (from_block, to_block) = match first {
            None => {
                let from = self.first_block(settings, refunds, span, &heads).await?;
                (from, last_of(from))
            }
            // Each gets further than the search before, however narrow its own ranges are.
            Some((from, to)) => {
                let reached = refunds.iter().map(|r| r.reached(finalized.number, slack)).min();
                let begins_at = reached.flatten().map_or(from, |block| from.max(block + 1));
                (from, last_of(begins_at).min(to))
            }
        };
        let mut by_nonce: BTreeMap<B256, Vec<TokenLog>> = BTreeMap::new();
        let filter = uses_filter(&believed, policy);
        let take = |logs: Vec<TokenLog>| {
            for log in logs {
                let uses = by_nonce.entry(log.topics[2]).or_default();
                // One more than is looked into says that there were more.
                if uses.len() <= USES_PER_NONCE_MAX {
                    uses.push(log);
                }
            }
            true
        };
        self.scan_logs(filter, from_block, to_block, take).await?;
        let flooded = take_floods(&mut by_nonce);
        let found: Vec<TokenLog> = by_nonce.into_values().flatten().collect();
        let uses = self.uses(&found).await?;
        let (consumed, mut unread) = self.consumed(settings, &believed, policy, &heads.head).await;
        unread.extend(unsearched);
        let range = RefundSearch {
            from_block,
            to_block,
            finalized,
            slack,
            uses,
            flooded,
            consumed,
            unread,
        };
        Ok(range)
    }

    /// Every time: on another chain nothing would be found, and the search would pass it over for good.
    async fn check_chain(&self, settings: &ChainSettings) -> Result<(), ReadFailure> {
        let call = Call { method: "eth_chainId", params: json!([]) };
        let id: U64 = decode("eth_chainId", &self.transport.call(call).await?)?;
        check_chain_id(settings, U256::from(id))
    }

    /// Where the search starts: where the last one ended, less the lookback, in case that one was answered
    /// by a node that had not seen everything; for a record never searched for, when it was made.
    async fn first_block(
        &self,
        settings: &ChainSettings,
        refunds: &[SearchedRefund],
        span: u64,
        heads: &Heads,
    ) -> Result<u64, ReadFailure> {
        let finalized = heads.finalized;
        let slack = lookback_blocks(settings);
        // Every search gets further than the one before it, however narrow the endpoint's ranges are.
        let again = slack.min(span / 2);
        let reached = |refund: &SearchedRefund| refund.reached(finalized.number, slack);
        let before = refunds.iter().filter_map(reached).min();
        let before = before.map(|block| (block + 1).saturating_sub(again));
        let fresh = refunds.iter().filter(|refund| reached(refund).is_none());
        let Some(made_at) = fresh.map(|refund| refund.detected_at).min() else {
            return Ok(before.unwrap_or(finalized.number));
        };
        let start: Timestamp = made_at.saturating_sub(settings.log_lookback);
        let start = BlockTime::from_secs(u64::try_from(start.as_millis() / 1_000).unwrap_or(0));
        let fresh = self
            .block_at(start, (&heads.head, &finalized), settings.block_time, LogsOf::Refunds)
            .await?;
        Ok(before.map_or(fresh, |block| block.min(fresh)).min(finalized.number))
    }

    /// Which of the records in somebody's hands have their nonce used by one of the wallets, and of which
    /// that could not be read. Without named wallets there is nobody to ask about.
    async fn consumed(
        &self,
        settings: &ChainSettings,
        refunds: &[SearchedRefund],
        policy: &RefundPolicy,
        head: &BlockRef,
    ) -> (BTreeSet<i64>, BTreeSet<i64>) {
        let in_hand = refunds.iter().filter(|r| r.is_in_hand() && !r.is_use_seen);
        let asked: Vec<(&SearchedRefund, Address)> =
            in_hand.flat_map(|r| policy.wallets.iter().map(move |wallet| (r, *wallet))).collect();
        let calls: Vec<StateCall> = asked
            .iter()
            .map(|(refund, wallet)| {
                eip3009::state_call_of(refund.token, *wallet, refund.refund_nonce)
            })
            .collect();
        let (mut consumed, mut unread) = (BTreeSet::new(), BTreeSet::new());
        if calls.is_empty() {
            return (consumed, unread);
        }
        let words = self.words(settings, &calls, head).await;
        for ((refund, _), word) in asked.into_iter().zip(words) {
            match word.and_then(|word| eip3009::flag_of(refund.token, word)) {
                Ok(true) => consumed.insert(refund.id),
                Ok(false) => false,
                Err(_) => unread.insert(refund.id),
            };
        }
        (consumed, unread)
    }

    /// What each of these uses came to, and the blocks they are in, which must be canonical.
    async fn uses(&self, found: &[TokenLog]) -> Result<Vec<NonceUse>, ReadFailure> {
        let numbers: BTreeSet<u64> = found.iter().map(|log| log.block_number).collect();
        let calls: Vec<Call> = numbers.iter().map(|number| header_by_number(*number)).collect();
        let mut blocks: HashMap<u64, BlockRef> = HashMap::new();
        for result in self.transport.batch(&calls).await {
            let block = parse_header("header", &result?)?;
            blocks.insert(block.number, block);
        }
        let mut transfers = HashMap::new();
        for number in numbers {
            let here = || found.iter().filter(|log| log.block_number == number);
            let by: BTreeSet<B256> = here().map(|log| log.topics[1]).collect();
            let tokens: BTreeSet<Address> = here().map(|log| log.token).collect();
            let filter = LogFilter {
                of: LogsOf::Transfers,
                tokens: tokens.into_iter().collect(),
                topics: vec![vec![Transfer::SIGNATURE_HASH], by.into_iter().collect()],
            };
            let take = |logs: Vec<TokenLog>| {
                transfers.extend(logs.into_iter().map(|log| (place(&log), log)));
                true
            };
            self.scan_logs(filter, number, number, take).await?;
        }
        found
            .iter()
            .map(|log| {
                let block = blocks.get(&log.block_number).filter(|b| b.hash == log.block_hash);
                let Some(block) = block else {
                    let detail = format!("block {} changed while it was read", log.block_number);
                    return Err(ReadFailure::new(ReadFailureKind::NotCanonical, detail));
                };
                let behind = transfers.get(&place_behind(log));
                let behind = behind.filter(|transfer| transfer.block_hash == log.block_hash);
                let kind = match behind {
                    _ if log.topics[0] == AuthorizationCanceled::SIGNATURE_HASH => {
                        ConsumptionKind::Canceled
                    }
                    Some(transfer) => pair(log, transfer),
                    None => ConsumptionKind::WithoutTransfer,
                };
                let (tx_hash, log_index) = (log.tx_hash, log.log_index);
                Ok(NonceUse {
                    token: log.token,
                    authorizer: Address::from_word(log.topics[1]),
                    nonce: log.topics[2],
                    consumption: Consumption {
                        log: LogRef { block: *block, tx_hash, log_index },
                        kind,
                    },
                })
            })
            .collect()
    }
}

fn lookback_blocks(settings: &ChainSettings) -> u64 {
    let blocks = settings.log_lookback.as_millis() / settings.block_time.as_millis().max(1);
    u64::try_from(blocks).unwrap_or(u64::MAX)
}

/// Takes out the nonces that are used too often to be looked into.
fn take_floods(by_nonce: &mut BTreeMap<B256, Vec<TokenLog>>) -> BTreeSet<B256> {
    let too_many = |uses: &Vec<TokenLog>| uses.len() > USES_PER_NONCE_MAX;
    let mut flooded: BTreeSet<B256> =
        by_nonce.iter().filter(|(_, uses)| too_many(uses)).map(|(nonce, _)| *nonce).collect();
    by_nonce.retain(|_, uses| !too_many(uses));
    let mut blocks = BTreeSet::new();
    let mut rarest: Vec<(usize, B256)> = by_nonce.iter().map(|(n, u)| (u.len(), *n)).collect();
    rarest.sort_unstable();
    for (_, nonce) in rarest {
        let here = by_nonce.get(&nonce).into_iter().flatten().map(|log| log.block_number);
        blocks.extend(here);
        // The page's refunds themselves, one use each, are never a flood.
        let uses = by_nonce.get(&nonce).map_or(0, Vec::len);
        if blocks.len() > USE_BLOCKS_MAX && uses > 1 {
            by_nonce.remove(&nonce);
            flooded.insert(nonce);
        }
    }
    flooded
}

/// The records that an endpoint is searched about, and those that it is not, as it answers wrongly about
/// their token (I11); an error where that leaves none.
fn believed_about(
    refunds: &[SearchedRefund],
    silenced: Vec<Option<ReadFailure>>,
) -> Result<(Vec<SearchedRefund>, BTreeSet<i64>), ReadFailure> {
    let (mut believed, mut unsearched, mut why) = (Vec::new(), BTreeSet::new(), None);
    for (refund, silence) in refunds.iter().zip(silenced) {
        match silence {
            None => believed.push(refund.clone()),
            Some(failure) => {
                unsearched.insert(refund.id);
                why.get_or_insert(failure);
            }
        }
    }
    match why {
        Some(failure) if believed.is_empty() => Err(failure),
        _ => Ok((believed, unsearched)),
    }
}

/// Uses and cancellations of the records' nonces by the refund wallets; by anybody where none are named.
fn uses_filter(refunds: &[SearchedRefund], policy: &RefundPolicy) -> LogFilter {
    let tokens: BTreeSet<Address> = refunds.iter().map(|refund| refund.token).collect();
    let nonces: BTreeSet<B256> = refunds.iter().map(|refund| refund.refund_nonce).collect();
    LogFilter {
        of: LogsOf::Refunds,
        tokens: tokens.into_iter().collect(),
        topics: vec![
            vec![AuthorizationUsed::SIGNATURE_HASH, AuthorizationCanceled::SIGNATURE_HASH],
            policy.wallets.iter().map(|wallet| wallet.into_word()).collect(),
            nonces.into_iter().collect(),
        ],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{Amount, ChainId, OrderId, PaymentId, RefundStatus};

    fn refund(id: i64) -> SearchedRefund {
        SearchedRefund {
            id,
            payment_id: PaymentId::from("p"),
            order_id: OrderId::from("o"),
            chain_id: ChainId::new(1),
            token: Address::ZERO,
            payer: Address::ZERO,
            amount: Amount::ZERO,
            refund_nonce: B256::ZERO,
            status: RefundStatus::Owed,
            paid_tx: None,
            detected_at: Timestamp::from_millis(0),
            searched_to: None,
            begun_at: None,
            is_use_seen: false,
            was_malformed: false,
        }
    }

    #[test]
    fn i11_a_record_of_a_token_the_endpoint_is_wrong_about_is_not_searched_and_the_others_are() {
        let refunds = [refund(1), refund(2)];
        let wrong = || Some(ReadFailure::new(ReadFailureKind::Unhealthy, "wrong"));
        let ids = |silenced| {
            let (believed, unsearched) = believed_about(&refunds, silenced)?;
            Ok((believed.iter().map(|refund| refund.id).collect::<Vec<_>>(), unsearched))
        };
        assert_eq!(ids(vec![None, None]), Ok((vec![1, 2], [].into())));
        assert_eq!(ids(vec![wrong(), None]), Ok((vec![2], [1].into())));
        assert_eq!(ids(vec![wrong(), wrong()]), Err(wrong().unwrap()));
    }
}
