//! Block headers: reading them, and finding the block at a time with few reads.

use std::collections::BTreeMap;
use std::time::Duration;

use alloy_primitives::{B256, Bloom, U64};
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::endpoint::Endpoint;
use super::error::CallError;
use super::logs::LogsOf;
use super::transport::{Call, decode};
use crate::domain::{BlockRef, BlockTime};

/// The most headers one search may read.
const SEARCH_STEPS_MAX: u32 = 72;

/// Steps that guess by block time; after them the search halves, which cannot be led astray.
const GUESSES_MAX: u32 = 6;

/// The most (number, time) pairs remembered per endpoint.
const ANCHORS_MAX: usize = 64;

/// Only what is needed of a header, so that chains with unusual headers read as well as any.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Header {
    number: U64,
    hash: B256,
    timestamp: U64,
    /// Of whatever shape: what cannot be read as one says nothing.
    #[serde(default)]
    logs_bloom: Value,
}

/// The call for the header of `block`: a tag, or a number in hex.
pub(super) fn header_call(block: &str) -> Call {
    Call { method: "eth_getBlockByNumber", params: json!([block, false]) }
}

/// The call for the header with this number.
pub(super) fn header_by_number(number: u64) -> Call {
    header_call(&format!("{number:#x}"))
}

/// Decodes a header; a block the endpoint does not have is a bad answer.
pub(super) fn parse_header(what: &str, result: &RawValue) -> Result<BlockRef, CallError> {
    parse_header_and_bloom(what, result).map(|(block, _)| block)
}

/// The same, and the filter of what the block's logs hold, where there is one.
pub(super) fn parse_header_and_bloom(
    what: &str,
    result: &RawValue,
) -> Result<(BlockRef, Option<Bloom>), CallError> {
    if result.get() == "null" {
        return Err(CallError::BadAnswer(format!("{what}: there is no such block")));
    }
    let header: Header = decode(what, result)?;
    let block = BlockRef {
        number: header.number.to(),
        hash: header.hash,
        time: BlockTime::from_secs(header.timestamp.to()),
    };
    Ok((block, serde_json::from_value(header.logs_bloom).ok()))
}

/// A block's number and time.
type Known = (u64, u64);

/// What is known of finalized blocks, thinned out evenly when there are too many.
#[derive(Debug, Default)]
pub(super) struct Anchors(BTreeMap<u64, u64>);

impl Anchors {
    fn insert(&mut self, number: u64, time: u64) {
        self.0.insert(number, time);
        if self.0.len() <= ANCHORS_MAX {
            return;
        }
        let numbers: Vec<u64> = self.0.keys().copied().collect();
        let closest = numbers.windows(2).min_by_key(|pair| pair[1] - pair[0]).map(|pair| pair[1]);
        if let Some(number) = closest {
            self.0.remove(&number);
        }
    }

    /// The last anchor at or before `time`, and the first one after it.
    fn around(&self, time: u64) -> (Option<Known>, Option<Known>) {
        let pair = |(number, time): (&u64, &u64)| -> Known { (*number, *time) };
        let before = self.0.iter().rev().find(|(_, t)| **t <= time).map(pair);
        let after = self.0.iter().find(|(_, t)| **t > time).map(pair);
        (before, after)
    }
}

/// The search for a block at a time, as a pure state: what is known, and what to read next.
#[derive(Debug)]
struct Search {
    time: u64,
    /// A block at or before `time`.
    before: Option<Known>,
    /// A block after `time`.
    after: Known,
    /// How far before `time` is near enough, in seconds.
    tolerance: u64,
    block_time_ms: u64,
    steps: u32,
}

impl Search {
    /// Which header to read next; `Err` holds the answer.
    fn next(&self) -> Result<u64, u64> {
        if self.after.0 == 0 {
            return Err(0);
        }
        let (low, high) = (self.before.map_or(0, |(number, _)| number + 1), self.after.0 - 1);
        let near = self.before.is_some_and(|(_, time)| self.time - time <= self.tolerance);
        if near || low > high || self.steps >= SEARCH_STEPS_MAX {
            return Err(self.before.map_or(0, |(number, _)| number));
        }
        let (number, time) = self.after;
        let guess = match self.before {
            _ if self.steps >= GUESSES_MAX => low + (high - low) / 2,
            // Between two known blocks, their own pace is the best guess.
            Some((first, start)) => {
                let share = u128::from(self.time - start) * u128::from(number - first)
                    / u128::from(time - start);
                first.saturating_add(u64::try_from(share).unwrap_or(u64::MAX))
            }
            // A little further back: a guess before the time ends the search, one after does not.
            None => {
                let distance = (time - self.time).saturating_mul(1_000) / self.block_time_ms;
                number.saturating_sub(distance.saturating_add(distance / 256 + 1))
            }
        };
        Ok(guess.clamp(low, high))
    }

    fn learn(&mut self, block: &BlockRef) {
        let known = (block.number, block.time.as_secs());
        if known.1 <= self.time {
            self.before = Some(known);
        } else {
            self.after = known;
        }
        self.steps += 1;
    }
}

impl Endpoint {
    /// A block whose time is at or before `time`, and not much before it, where a search for `searched_for`
    /// begins; block 0 where there is none.
    pub(super) async fn block_at(
        &self,
        time: BlockTime,
        (head, finalized): (&BlockRef, &BlockRef),
        block_time: Duration,
        searched_for: LogsOf,
    ) -> Result<u64, CallError> {
        if head.time <= time {
            return Ok(head.number);
        }
        let block_time_ms = u64::try_from(block_time.as_millis()).unwrap_or(u64::MAX).max(1);
        let near_blocks = self.memory().log_widths.of(searched_for).blocks() / 8;
        let mut search = {
            let memory = self.memory();
            let (before, after) = memory.anchors.around(time.as_secs());
            Search {
                time: time.as_secs(),
                before: before.filter(|(number, _)| *number < head.number),
                after: after
                    .filter(|(number, _)| *number < head.number)
                    .unwrap_or((head.number, head.time.as_secs())),
                tolerance: near_blocks.saturating_mul(block_time_ms) / 1_000,
                block_time_ms,
                steps: 0,
            }
        };
        loop {
            let number = match search.next() {
                Ok(number) => number,
                Err(found) => return Ok(found),
            };
            let result = self.transport.call(header_by_number(number)).await?;
            let block = parse_header("header", &result)?;
            if block.number != number {
                return Err(CallError::BadAnswer(format!(
                    "asked for block {number}, got block {}",
                    block.number
                )));
            }
            search.learn(&block);
            // A reorg could make a younger one wrong.
            if number <= finalized.number {
                self.memory().anchors.insert(number, block.time.as_secs());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run(times: &[u64], time: u64, tolerance: u64, block_time_ms: u64) -> (u64, u32) {
        let head = times.len() as u64 - 1;
        let mut search = Search {
            time,
            before: None,
            after: (head, times[head as usize]),
            tolerance,
            block_time_ms,
            steps: 0,
        };
        loop {
            match search.next() {
                Err(found) => return (found, search.steps),
                Ok(number) => search.learn(&BlockRef {
                    number,
                    hash: B256::ZERO,
                    time: BlockTime::from_secs(times[number as usize]),
                }),
            }
        }
    }

    proptest! {
        #[test]
        fn the_block_found_is_never_after_the_time_and_is_near(
            gaps in proptest::collection::vec(0u64..30, 1..400),
            start in 1u64..100,
            ask in 0u64..12_000,
            tolerance in 0u64..50,
            block_time_ms in prop_oneof![Just(250u64), Just(2_000), Just(12_000)],
        ) {
            let mut times = vec![start];
            for gap in gaps {
                times.push(times[times.len() - 1] + gap);
            }
            let head_time = times[times.len() - 1];
            prop_assume!(head_time > ask);
            let (found, steps) = run(&times, ask, tolerance, block_time_ms);
            prop_assert!(steps < 20, "{steps} steps");
            prop_assert!(times[found as usize] <= ask || found == 0);
            let exact = times.iter().rposition(|t| *t <= ask).unwrap_or(0);
            prop_assert!(times[exact].saturating_sub(times[found as usize]) <= tolerance);
        }
    }

    #[test]
    fn a_steady_chain_takes_a_header_or_two() {
        let times: Vec<u64> = (0..1_000_000).map(|n| 1_000 + 2 * n).collect();
        let (found, steps) = run(&times, 1_500_000, 2_000, 2_000);
        assert!(
            times[found as usize] <= 1_500_000 && 1_500_000 - times[found as usize] <= 2_000_000
        );
        assert!(steps <= 3, "{steps}");
    }

    #[test]
    fn anchors_stay_bounded_and_keep_their_spread() {
        let mut anchors = Anchors::default();
        for number in 0..10_000 {
            anchors.insert(number * 10, number * 20);
        }
        assert_eq!(anchors.0.len(), ANCHORS_MAX);
        let (before, after) = anchors.around(100);
        assert!(before.is_some_and(|(_, t)| t <= 100) && after.is_some_and(|(_, t)| t > 100));
    }
}
