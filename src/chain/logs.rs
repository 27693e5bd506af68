//! Log reads over block ranges: without a gap, without an overlap, as wide as the endpoint allows.
//!
//! Endpoints refuse ranges in many ways and for many reasons, so the width is learnt: halved on every
//! refusal, kept, and tried wider again after a while.

mod absence;
mod ranges;

use alloy_primitives::{Address, B256, Bloom, Bytes, U64};
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::blocks::{header_by_number, parse_header_and_bloom};
use super::endpoint::Endpoint;
use super::error::CallError;
use super::transport::{Call, decode};
use crate::domain::{BlockRef, ReadFailure, ReadFailureKind};
use ranges::Ranges;
pub(super) use ranges::{LogsOf, Widths};

/// The most log reads for one filter in one check.
pub(super) const READS_MAX: usize = 1_000;

/// Which logs to ask for: any of `tokens`, and per position any of its topics.
#[derive(Debug)]
pub(super) struct LogFilter {
    /// What they are for.
    pub(super) of: LogsOf,
    /// The emitting contracts.
    pub(super) tokens: Vec<Address>,
    /// Per position, the alternatives; none of them means any. The first position is the event.
    pub(super) topics: Vec<Vec<B256>>,
}

impl LogFilter {
    /// The call for these logs, in the blocks that `within` names.
    fn call(&self, within: &[(&str, Value)]) -> Call {
        // Nodes agree about null, not about an empty list.
        let topics: Vec<Option<&Vec<B256>>> =
            self.topics.iter().map(|any| (!any.is_empty()).then_some(any)).collect();
        let mut filter = json!({ "address": self.tokens, "topics": topics });
        for (field, value) in within {
            filter[*field] = value.clone();
        }
        Call { method: "eth_getLogs", params: json!([filter]) }
    }

    /// The logs of an answer, all of which fit.
    fn read(&self, answer: &RawValue, range: (u64, u64)) -> Result<Vec<TokenLog>, CallError> {
        let logs: Vec<RawLog> = decode("eth_getLogs", answer)?;
        let checked = logs.into_iter().map(|log| log.check(self, range));
        checked.collect::<Result<_, _>>().map_err(|why| bad(&format!("eth_getLogs: {why}")))
    }
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

/// An answer to one log read.
struct LogAnswer {
    logs: Vec<TokenLog>,
    /// The last block of the range, and its bloom filter, where it has one.
    last: (BlockRef, Option<Bloom>),
}

/// Log reads under way: rising ranges that cover the blocks from `first` to `last`, each of them once.
pub(super) struct LogScan<'a> {
    endpoint: &'a Endpoint,
    /// Which logs to ask for in what is left.
    pub(super) filter: LogFilter,
    range: (u64, u64),
    ranges: Ranges,
    reads_max: usize,
    reads: usize,
}

impl<'a> LogScan<'a> {
    /// Reads nothing yet. At most `reads_max` log reads are made, whatever they come to.
    pub(super) fn new(
        endpoint: &'a Endpoint,
        filter: LogFilter,
        range: (u64, u64),
        reads_max: usize,
    ) -> Self {
        let ranges = Ranges::new(range.0, range.1);
        Self { endpoint, filter, range, ranges, reads_max, reads: 0 }
    }

    /// How many log reads it took so far.
    pub(super) fn reads(&self) -> usize {
        self.reads
    }

    /// The logs of the next range; `None` when there is none. After an error the scan is over.
    pub(super) async fn next(&mut self) -> Result<Option<Vec<TokenLog>>, ReadFailure> {
        let (endpoint, of) = (self.endpoint, self.filter.of);
        loop {
            let width = endpoint.memory().log_widths.of(of).blocks();
            let Some(range) = self.ranges.peek(width) else { return Ok(None) };
            if self.reads >= self.reads_max {
                let ((first, last), most) = (self.range, self.reads_max);
                let detail = format!("blocks {first} to {last} need more than {most} log reads");
                return Err(ReadFailure::new(ReadFailureKind::RangeRefused, detail));
            }
            self.reads += 1;
            let blocks = range.1 - range.0 + 1;
            match endpoint.logs(&self.filter, range).await {
                Ok(answer) => {
                    endpoint.memory().log_widths.of(of).answered(blocks);
                    // Boxed: it is large, seldom more than begun, and every search would carry it.
                    Box::pin(endpoint.check_absence(&self.filter, range, &answer)).await?;
                    self.ranges.advance(range.1);
                    return Ok(Some(answer.logs));
                }
                Err(error) if error.is_range_refusal() => {
                    if !endpoint.memory().log_widths.of(of).refused(blocks) {
                        return Err(ReadFailure::new(
                            ReadFailureKind::RangeRefused,
                            format!("logs of the one block {}: {error}", range.0),
                        ));
                    }
                }
                Err(error) => {
                    // Some endpoints meet a wide range with silence: be more modest the next time.
                    if error == CallError::Timeout {
                        endpoint.memory().log_widths.of(of).refused(blocks);
                    }
                    return Err(error.into());
                }
            }
        }
    }
}

impl Endpoint {
    /// Reads the logs of blocks `first` to `last`, in rising ranges, and hands each answer to `take`
    /// until that returns `false`.
    pub(super) async fn scan_logs(
        &self,
        filter: LogFilter,
        first: u64,
        last: u64,
        mut take: impl FnMut(Vec<TokenLog>) -> bool,
    ) -> Result<(), ReadFailure> {
        let mut scan = LogScan::new(self, filter, (first, last), READS_MAX);
        while let Some(logs) = scan.next().await? {
            if !take(logs) {
                break;
            }
        }
        Ok(())
    }

    async fn logs(&self, filter: &LogFilter, range: (u64, u64)) -> Result<LogAnswer, CallError> {
        let call = filter.call(&[
            ("fromBlock", json!(format!("{:#x}", range.0))),
            ("toBlock", json!(format!("{:#x}", range.1))),
        ]);
        // The last block in the same request: a node that does not have it answers with an empty list.
        let calls = [call, header_by_number(range.1)];
        let mut results = self.transport.batch(&calls).await.into_iter();
        let mut next = || results.next().unwrap_or_else(|| Err(bad("no answer")));
        let (logs, header) = (next()?, next()?);
        let logs = filter.read(&logs, range)?;
        let last = parse_header_and_bloom("the last block of the range", &header)?;
        if last.0.number != range.1 {
            return Err(bad(&format!("asked for block {}, got {}", range.1, last.0.number)));
        }
        Ok(LogAnswer { logs, last })
    }
}

fn bad(detail: &str) -> CallError {
    CallError::BadAnswer(detail.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_that_do_not_fit_the_filter_are_refused() {
        let token = Address::repeat_byte(1);
        let (event, payer) = (B256::repeat_byte(2), B256::repeat_byte(3));
        let filter = LogFilter {
            of: LogsOf::Uses,
            tokens: vec![token],
            topics: vec![vec![event], vec![payer]],
        };
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
