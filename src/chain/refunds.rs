//! The search for refunds: who used the nonces of refund records, and what for (DESIGN section 10).
//!
//! Only final blocks are searched, so that nothing found can be taken back. One search covers a bounded
//! range, and says how far it came: the caller goes on from there. Nothing is concluded here.

use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant};

use alloy_primitives::{Address, B256, U64, U256};
use alloy_sol_types::SolEvent;
use serde_json::json;

use super::blocks::{header_by_number, header_call, parse_header};
use super::eip3009::{
    AuthorizationCanceled, AuthorizationUsed, Transfer, pair, place, place_behind,
};
use super::endpoint::Endpoint;
use super::error::CallError;
use super::logs::{LogFilter, TokenLog};
use super::multicall::check_chain_id;
use super::transport::{Call, decode};
use super::{Chain, ChainSettings};
use crate::domain::{
    BlockRef, BlockTime, Consumption, ConsumptionKind, LogRef, NonceUse, OpenRefund, ReadFailure,
    ReadFailureKind, RefundPolicy, RefundReading, RefundSearch, Timestamp,
};

/// The most log reads one search makes at the widest range an endpoint takes; what is left is for the next.
const READS_PER_SEARCH: u64 = 32;

/// The most uses of the nonces in one search. A nonce can be used by any number of strangers.
const USES_MAX: usize = 500;

impl Chain {
    /// Searches for all these records at once, at one endpoint after another, until `policy.quorum` of
    /// them have answered. Never fails: an endpoint that shows nothing is a reading that says why. It
    /// takes at most `within`, of which each endpoint has its share.
    pub async fn search_refunds(
        &self,
        refunds: &[OpenRefund],
        policy: &RefundPolicy,
        within: Duration,
    ) -> Vec<RefundReading> {
        let ends_at = Instant::now() + within;
        let mut readings = Vec::new();
        let mut answers = 0;
        // Those that want to be left alone come last.
        let mut order: Vec<&Endpoint> = self.endpoints.iter().map(AsRef::as_ref).collect();
        order.sort_by_key(|endpoint| endpoint.is_spared());
        for (place, endpoint) in order.iter().enumerate() {
            let waiting = u32::try_from(order.len() - place).unwrap_or(u32::MAX);
            let share = ends_at.saturating_duration_since(Instant::now()) / waiting;
            let search = endpoint.search_refunds(&self.settings, refunds, policy);
            let outcome = tokio::time::timeout(share, search).await.unwrap_or_else(|_| {
                let detail = format!("the search was given up after {:.1} s", share.as_secs_f64());
                Err(ReadFailure::new(ReadFailureKind::Unreachable, detail))
            });
            answers += usize::from(outcome.is_ok());
            readings.push(RefundReading { endpoint: endpoint.name.clone(), outcome });
            if answers >= policy.quorum.max(1) {
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
        refunds: &[OpenRefund],
        policy: &RefundPolicy,
    ) -> Result<RefundSearch, ReadFailure> {
        let (head, finalized) = self.final_block(settings).await?;
        let span = self.memory().log_width.blocks().saturating_mul(READS_PER_SEARCH);
        let from_block = self.first_block(settings, refunds, span, &head, &finalized).await?;
        let to_block = from_block.saturating_add(span - 1).min(finalized.number);
        let mut found = Vec::new();
        let filter = uses_filter(refunds, policy);
        let take = |logs: Vec<TokenLog>| {
            found.extend(logs);
            found.len() <= USES_MAX
        };
        self.scan_logs(&filter, from_block, to_block, take).await?;
        if found.len() > USES_MAX {
            let detail = format!(
                "more than {USES_MAX} uses of refund nonces in blocks {from_block} to {to_block}; name \
                 the wallets that count in refund_wallets"
            );
            return Err(ReadFailure::new(ReadFailureKind::BadAnswer, detail));
        }
        let uses = self.uses(&found).await?;
        Ok(RefundSearch { from_block, to_block, finalized, uses })
    }

    /// The newest block, and the newest final one, of the right chain.
    async fn final_block(
        &self,
        settings: &ChainSettings,
    ) -> Result<(BlockRef, BlockRef), ReadFailure> {
        let chain_id = Call { method: "eth_chainId", params: json!([]) };
        let calls = [chain_id, header_call("latest"), header_call("finalized")];
        let mut results = self.transport.batch(&calls).await.into_iter();
        let mut next = || {
            let missing = || CallError::BadAnswer("an answer is missing".to_owned());
            results.next().unwrap_or_else(|| Err(missing()))
        };
        let id: U64 = decode("eth_chainId", &next()?)?;
        // Every time: on another chain nothing would be found, and the search would pass it over for good.
        check_chain_id(settings, U256::from(id))?;
        let head = parse_header("latest", &next()?)?;
        let finalized = parse_header("finalized", &next()?)?;
        Ok((head, finalized))
    }

    /// Where the search starts: where the last one ended, less the lookback, in case that one was answered
    /// by a node that had not seen everything; for a record never searched for, when it was made.
    async fn first_block(
        &self,
        settings: &ChainSettings,
        refunds: &[OpenRefund],
        span: u64,
        head: &BlockRef,
        finalized: &BlockRef,
    ) -> Result<u64, ReadFailure> {
        let again = settings.log_lookback.as_millis() / settings.block_time.as_millis().max(1);
        // Every search gets further than the one before it, however narrow the endpoint's ranges are.
        let again = u64::try_from(again).unwrap_or(u64::MAX).min(span / 2);
        let reached = refunds.iter().filter_map(|refund| refund.searched_to).min();
        let reached = reached.map(|block| (block + 1).saturating_sub(again));
        let fresh = refunds.iter().filter(|refund| refund.searched_to.is_none());
        let Some(made_at) = fresh.map(|refund| refund.detected_at).min() else {
            return Ok(reached.unwrap_or(finalized.number));
        };
        let start: Timestamp = made_at.saturating_sub(settings.log_lookback);
        let start = BlockTime::from_secs(u64::try_from(start.as_millis() / 1_000).unwrap_or(0));
        let fresh = self.block_at(start, head, finalized, settings.block_time).await?;
        Ok(reached.map_or(fresh, |block| block.min(fresh)))
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
                tokens: tokens.into_iter().collect(),
                topics: vec![vec![Transfer::SIGNATURE_HASH], by.into_iter().collect()],
            };
            let take = |logs: Vec<TokenLog>| {
                transfers.extend(logs.into_iter().map(|log| (place(&log), log)));
                true
            };
            self.scan_logs(&filter, number, number, take).await?;
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

/// Uses and cancellations of the records' nonces by the refund wallets; by anybody where none are named.
fn uses_filter(refunds: &[OpenRefund], policy: &RefundPolicy) -> LogFilter {
    let tokens: BTreeSet<Address> = refunds.iter().map(|refund| refund.token).collect();
    let nonces: BTreeSet<B256> = refunds.iter().map(|refund| refund.refund_nonce).collect();
    LogFilter {
        tokens: tokens.into_iter().collect(),
        topics: vec![
            vec![AuthorizationUsed::SIGNATURE_HASH, AuthorizationCanceled::SIGNATURE_HASH],
            policy.wallets.iter().map(|wallet| wallet.into_word()).collect(),
            nonces.into_iter().collect(),
        ],
    }
}
