//! Log reads over block ranges: without a gap, without an overlap, as wide as the endpoint allows.
//!
//! Endpoints refuse ranges in many ways and for many reasons, so the width is learnt: halved on every
//! refusal, kept, and tried wider again after a while.

mod ranges;

use alloy_primitives::{Address, B256, Bloom, BloomInput, Bytes, U64};
use alloy_sol_types::SolEvent;
use serde::Deserialize;
use serde_json::json;

use super::blocks::{header_by_number, parse_header_and_bloom};
use super::eip3009::AuthorizationUsed;
use super::endpoint::Endpoint;
use super::error::CallError;
use super::transport::{Call, decode};
use crate::domain::{ReadFailure, ReadFailureKind};
use ranges::Ranges;
pub(super) use ranges::Width;

/// The most log reads for one filter in one check.
const READS_MAX: usize = 1_000;

/// Which logs to ask for: any of `tokens`, and per position any of its topics.
#[derive(Debug)]
pub(super) struct LogFilter {
    /// The emitting contracts.
    pub(super) tokens: Vec<Address>,
    /// Per position, the alternatives; none of them means any. The first position is the event.
    pub(super) topics: Vec<Vec<B256>>,
}

/// A log that fits the filter it was asked with.
#[derive(Debug, Clone)]
pub(super) struct TokenLog {
    /// The emitting contract.
    pub(super) token: Address,
    /// Its topics; at least as many as the filter's positions.
    pub(super) topics: Vec<B256>,
    /// Its data.
    pub(super) data: Bytes,
    /// The block's number.
    pub(super) block_number: u64,
    /// The block's hash, as the log says.
    pub(super) block_hash: B256,
    /// The transaction.
    pub(super) tx_hash: B256,
    /// The index within the block.
    pub(super) log_index: u64,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawLog {
    address: Address,
    topics: Vec<B256>,
    data: Bytes,
    block_number: Option<U64>,
    block_hash: Option<B256>,
    transaction_hash: Option<B256>,
    log_index: Option<U64>,
    #[serde(default)]
    removed: bool,
}

impl RawLog {
    /// `Err` says why it is no answer to `filter` over these blocks.
    fn check(self, filter: &LogFilter, range: (u64, u64)) -> Result<TokenLog, &'static str> {
        let (Some(number), Some(block_hash), Some(tx_hash), Some(log_index)) =
            (self.block_number, self.block_hash, self.transaction_hash, self.log_index)
        else {
            return Err("a log without its block, transaction or index");
        };
        let block_number = number.to::<u64>();
        if self.removed {
            return Err("a removed log");
        }
        if block_number < range.0 || block_number > range.1 {
            return Err("a log outside the range");
        }
        if !filter.tokens.contains(&self.address) {
            return Err("a log of another contract");
        }
        let fits = self.topics.len() >= filter.topics.len()
            && filter
                .topics
                .iter()
                .zip(&self.topics)
                .all(|(any, topic)| any.is_empty() || any.contains(topic));
        if !fits {
            return Err("a log with other topics");
        }
        Ok(TokenLog {
            token: self.address,
            topics: self.topics,
            data: self.data,
            block_number,
            block_hash,
            tx_hash,
            log_index: log_index.to(),
        })
    }
}

impl Endpoint {
    /// Reads the logs of blocks `first` to `last`, in rising ranges, and hands each answer to `take`
    /// until that returns `false`.
    pub(super) async fn scan_logs(
        &self,
        filter: &LogFilter,
        first: u64,
        last: u64,
        mut take: impl FnMut(Vec<TokenLog>) -> bool,
    ) -> Result<(), ReadFailure> {
        let mut ranges = Ranges::new(first, last);
        for _ in 0..READS_MAX {
            let width = self.memory().log_width.blocks();
            let Some(range) = ranges.peek(width) else { return Ok(()) };
            let blocks = range.1 - range.0 + 1;
            match self.logs(filter, range).await {
                Ok(logs) => {
                    self.memory().log_width.answered(blocks);
                    ranges.advance(range.1);
                    if !take(logs) {
                        return Ok(());
                    }
                }
                Err(error) if error.is_range_refusal() => {
                    if !self.memory().log_width.refused(blocks) {
                        return Err(ReadFailure::new(
                            ReadFailureKind::RangeRefused,
                            format!("logs of the one block {}: {error}", range.0),
                        ));
                    }
                }
                Err(error) => {
                    // Some endpoints meet a wide range with silence: be more modest the next time.
                    if error == CallError::Timeout {
                        self.memory().log_width.refused(blocks);
                    }
                    return Err(error.into());
                }
            }
        }
        if ranges.next.is_none() {
            return Ok(());
        }
        Err(ReadFailure::new(
            ReadFailureKind::RangeRefused,
            format!("blocks {first} to {last} need more than {READS_MAX} log reads"),
        ))
    }

    async fn logs(
        &self,
        filter: &LogFilter,
        range: (u64, u64),
    ) -> Result<Vec<TokenLog>, CallError> {
        // Nodes agree about null, not about an empty list.
        let topics: Vec<Option<&Vec<B256>>> =
            filter.topics.iter().map(|any| (!any.is_empty()).then_some(any)).collect();
        let params = json!([{
            "fromBlock": format!("{:#x}", range.0),
            "toBlock": format!("{:#x}", range.1),
            "address": filter.tokens,
            "topics": topics,
        }]);
        // The last block in the same request: a node that does not have it answers with an empty list.
        let calls = [Call { method: "eth_getLogs", params }, header_by_number(range.1)];
        let mut results = self.transport.batch(&calls).await.into_iter();
        let mut next = || results.next().unwrap_or_else(|| Err(bad("no answer")));
        let (logs, header) = (next()?, next()?);
        let logs: Vec<RawLog> = decode("eth_getLogs", &logs)?;
        let logs = logs
            .into_iter()
            .map(|log| log.check(filter, range))
            .collect::<Result<Vec<_>, _>>()
            .map_err(|why| bad(&format!("eth_getLogs: {why}")))?;
        let (last, bloom) = parse_header_and_bloom("the last block of the range", &header)?;
        if last.number != range.1 {
            return Err(bad(&format!("asked for block {}, got {}", range.1, last.number)));
        }
        let in_last = logs.iter().any(|log| log.block_number == last.number);
        if !in_last && bloom.is_some_and(|bloom| surely_holds(&bloom, filter)) {
            return Err(bad(&format!("no log in block {}, whose logsBloom has one", last.number)));
        }
        Ok(logs)
    }
}

fn bad(detail: &str) -> CallError {
    CallError::BadAnswer(detail.to_owned())
}

/// A bloom filter that would match by chance more often than this says nothing.
const CHANCE_MAX: f64 = 1e-6;

/// Whether a block's bloom filter says beyond doubt that it holds a log that fits.
///
/// Only a filter for nonces can be told so: any other address and topic may stand in different logs of one
/// block. The filters of busy chains are nearly full and match everything: the chance of that is
/// worked out from how full this one is.
fn surely_holds(bloom: &Bloom, filter: &LogFilter) -> bool {
    let is_for_nonces =
        filter.topics.len() == 3 && filter.topics[0].contains(&AuthorizationUsed::SIGNATURE_HASH);
    if !is_for_nonces {
        return false;
    }
    let bits: u32 = bloom.iter().map(|byte| byte.count_ones()).sum();
    // Each word sets three bits.
    let by_chance = (f64::from(bits) / (8.0 * Bloom::len_bytes() as f64)).powi(3);
    let mut chance = 1.0;
    let tokens: Vec<&[u8]> = filter.tokens.iter().map(|token| token.as_slice()).collect();
    let topics = filter.topics.iter().map(|any| any.iter().map(|topic| topic.as_slice()).collect());
    for any in std::iter::once(tokens).chain(topics) {
        if !any.iter().any(|word| bloom.contains_input(BloomInput::Raw(word))) {
            return false;
        }
        chance *= (by_chance * any.len() as f64).min(1.0);
    }
    chance < CHANCE_MAX
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bloom_filter_speaks_only_when_it_cannot_be_chance() {
        let word = |n: u64| B256::left_padding_from(&n.to_be_bytes());
        let token = Address::repeat_byte(1);
        let (payer, nonce) = (word(1), alloy_primitives::keccak256("nonce"));
        let event = AuthorizationUsed::SIGNATURE_HASH;
        let filter = |nonce| LogFilter {
            tokens: vec![token],
            topics: vec![vec![event], vec![word(9), payer], vec![nonce]],
        };
        let mut bloom = Bloom::ZERO;
        assert!(!surely_holds(&bloom, &filter(nonce)), "an empty one");
        bloom.accrue_raw_log(token, &[event, payer, nonce]);
        assert!(surely_holds(&bloom, &filter(nonce)));
        assert!(!surely_holds(&bloom, &filter(word(5))), "another nonce");
        let mut without_nonce = filter(nonce);
        without_nonce.topics.pop();
        assert!(!surely_holds(&bloom, &without_nonce), "its words may stand in different logs");
        for n in 0..3_000 {
            bloom.accrue_raw_log(Address::ZERO, &[word(n), word(n + 10_000)]);
        }
        assert!(!surely_holds(&bloom, &filter(nonce)), "a full one matches everything");
    }

    #[test]
    fn logs_that_do_not_fit_the_filter_are_refused() {
        let token = Address::repeat_byte(1);
        let (event, payer) = (B256::repeat_byte(2), B256::repeat_byte(3));
        let filter = LogFilter { tokens: vec![token], topics: vec![vec![event], vec![payer]] };
        let good = json!({
            "address": token, "topics": [event, payer, payer], "data": "0x", "blockNumber": "0x5",
            "blockHash": event, "transactionHash": event, "logIndex": "0x0", "removed": false,
        });
        let check = |change: &dyn Fn(&mut serde_json::Value)| {
            let mut log = good.clone();
            change(&mut log);
            serde_json::from_value::<RawLog>(log).unwrap().check(&filter, (5, 9)).map(|_| ())
        };
        assert_eq!(check(&|_| {}), Ok(()));
        assert_eq!(check(&|log| log["removed"] = json!(true)), Err("a removed log"));
        assert_eq!(check(&|log| log["blockNumber"] = json!("0x4")), Err("a log outside the range"));
        assert_eq!(check(&|log| log["blockNumber"] = json!("0xa")), Err("a log outside the range"));
        assert_eq!(
            check(&|log| log["address"] = json!(Address::ZERO)),
            Err("a log of another contract")
        );
        assert_eq!(check(&|log| log["topics"] = json!([event])), Err("a log with other topics"));
        assert_eq!(
            check(&|log| log["topics"] = json!([event, event])),
            Err("a log with other topics")
        );
        for field in ["blockNumber", "blockHash", "transactionHash", "logIndex"] {
            let refused = check(&|log| log[field] = json!(null));
            assert_eq!(refused, Err("a log without its block, transaction or index"));
        }
        let any = LogFilter { topics: vec![vec![event], vec![], vec![payer]], ..filter };
        let checked = |topics: serde_json::Value| {
            let mut log = good.clone();
            log["topics"] = topics;
            serde_json::from_value::<RawLog>(log).unwrap().check(&any, (5, 9)).map(|_| ())
        };
        assert_eq!(checked(json!([event, event, payer])), Ok(()), "a position for any topic");
        assert_eq!(checked(json!([event, payer, event])), Err("a log with other topics"));
        assert_eq!(checked(json!([event, payer])), Err("a log with other topics"));
    }
}
