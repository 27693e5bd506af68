//! Whether logs that an answer lacks are not there.
//!
//! A node without its log index, or behind a load balancer with one that is not there yet, answers with an
//! empty list and no error. A block's bloom filter says which logs it cannot hold, and comes from elsewhere: the
//! header. So some headers of an empty range are looked at. Where one may hold a log, that block alone is asked
//! for again, by its hash: nodes answer that from the block's receipts. The filters of busy chains are nearly full
//! and match everything, and any words may stand in different logs: a match is a question, and no proof.

use std::collections::BTreeSet;

use alloy_primitives::{Bloom, BloomInput};
use serde_json::json;
use uuid::Uuid;

use super::{LogAnswer, LogFilter, LogsOf};
use crate::chain::blocks::{header_by_number, parse_header_and_bloom};
use crate::chain::endpoint::Endpoint;
use crate::chain::error::CallError;
use crate::chain::transport::{Call, CallResult};
use crate::domain::{BlockRef, ReadFailure, ReadFailureKind};

/// The most headers of one empty range that are looked at. Both ends are always among them.
const HEADERS_MAX: usize = 8;

/// The same for the transfers into the shop's receivers: nearly all of its ranges are empty, all day long, and
/// it asks two endpoints where there are two.
const HEADERS_OF_SCAN_MAX: usize = 2;

impl Endpoint {
    /// Whether the blocks that are looked at hold no log that `answer` lacks: the last one, and some of all where
    /// the answer is empty. An empty answer is also in error where that cannot be found out; another shows what it
    /// shows.
    pub(super) async fn check_absence(
        &self,
        filter: &LogFilter,
        range: (u64, u64),
        answer: &LogAnswer,
    ) -> Result<(), ReadFailure> {
        let (last, bloom) = &answer.last;
        let is_shown = answer.logs.iter().any(|log| log.block_number == last.number);
        let mut blocks = vec![(*last, *bloom)];
        blocks.retain(|_| !is_shown);
        if answer.logs.is_empty() {
            let headers_max = match filter.of {
                LogsOf::Receivers => HEADERS_OF_SCAN_MAX,
                _ => HEADERS_MAX,
            };
            let mut numbers = samples(range, headers_max, Uuid::new_v4().as_u64_pair().0);
            numbers.remove(&last.number);
            blocks.extend(self.headers(&numbers).await?);
        }
        let may_hold = |bloom: &Option<Bloom>| bloom.is_some_and(|bloom| may_hold(&bloom, filter));
        blocks.retain(|(_, bloom)| may_hold(bloom));
        let suspects: Vec<BlockRef> = blocks.into_iter().map(|(block, _)| block).collect();
        if suspects.is_empty() {
            return Ok(());
        }
        let calls: Vec<Call> =
            suspects.iter().map(|block| filter.call(&[("blockHash", json!(block.hash))])).collect();
        for (block, result) in suspects.iter().zip(self.transport.batch(&calls).await) {
            let number = block.number;
            let logs = result.and_then(|result| filter.read(&result, (number, number)));
            let logs = match logs {
                Err(error) if answer.logs.is_empty() => {
                    let detail = format!("block {number} may have a log, asked again: {error}");
                    return Err(ReadFailure::new(error.kind(), detail));
                }
                logs => logs.unwrap_or_default(),
            };
            if !logs.is_empty() {
                let (first, last) = range;
                let detail = format!(
                    "no log of block {number} in blocks {first} to {last}; its logsBloom has one, and so \
                     has the block"
                );
                return Err(ReadFailure::new(ReadFailureKind::BadAnswer, detail));
            }
        }
        Ok(())
    }

    /// These blocks and their bloom filters.
    async fn headers(
        &self,
        numbers: &BTreeSet<u64>,
    ) -> Result<Vec<(BlockRef, Option<Bloom>)>, CallError> {
        if numbers.is_empty() {
            return Ok(Vec::new());
        }
        let calls: Vec<Call> = numbers.iter().map(|number| header_by_number(*number)).collect();
        let results = self.transport.batch(&calls).await;
        let header = |(number, result): (&u64, CallResult)| {
            let found = parse_header_and_bloom("a block of the range", &result?)?;
            match found.0.number == *number {
                true => Ok(found),
                false => {
                    Err(super::bad(&format!("asked for block {number}, got {}", found.0.number)))
                }
            }
        };
        numbers.iter().zip(results).map(header).collect()
    }
}

/// At most `count` blocks of a range: both ends, and between them one at random of each of equal parts.
fn samples((first, last): (u64, u64), count: usize, random: u64) -> BTreeSet<u64> {
    let count = u64::try_from(count).unwrap_or(u64::MAX);
    let between = last.saturating_sub(first).saturating_sub(1);
    let parts = count.saturating_sub(2).min(between);
    let mut blocks = BTreeSet::from([first, last]);
    for part in 0..parts {
        let width = between / parts;
        let begins = first + 1 + part * width;
        let ends = if part + 1 == parts { last } else { begins + width };
        // Another share of the same random number for each part.
        let random = random.rotate_left(u32::try_from(part * 11 % 64).unwrap_or(0));
        blocks.insert(begins + random % (ends - begins));
    }
    blocks
}

/// Whether a block with this bloom filter may hold a log that fits: by its emitter, and by each position.
fn may_hold(bloom: &Bloom, filter: &LogFilter) -> bool {
    let has = |word: &[u8]| bloom.contains_input(BloomInput::Raw(word));
    filter.tokens.iter().any(|token| has(token.as_slice()))
        && filter
            .topics
            .iter()
            .all(|any| any.is_empty() || any.iter().any(|topic| has(topic.as_slice())))
}

#[cfg(test)]
mod tests {
    use alloy_primitives::{Address, B256};
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn both_ends_are_looked_at_and_no_block_twice_or_outside(
            first in 0u64..1_000,
            span in prop_oneof![0u64..12, 0u64..100_000],
            count in 2usize..12,
            random: u64,
        ) {
            let last = first + span;
            let blocks = samples((first, last), count, random);
            prop_assert_eq!(blocks.len() as u64, (span + 1).min(count as u64));
            prop_assert_eq!((blocks.first(), blocks.last()), (Some(&first), Some(&last)));
        }

        /// Whatever block it is, some looks find it.
        #[test]
        fn no_block_is_never_looked_at(place in 0u64..40) {
            let hit = |n: u64| samples((0, 39), 4, n.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            prop_assert!((0..2_000).any(|n| hit(n).contains(&place)));
        }
    }

    #[test]
    fn the_widest_range_there_is_can_be_sampled() {
        assert_eq!(samples((0, u64::MAX), 4, u64::MAX).len(), 4);
        assert_eq!(samples((7, 7), 4, 1), BTreeSet::from([7]));
    }

    #[test]
    fn a_bloom_filter_admits_what_has_each_part_of_the_filter() {
        let word = |n: u64| B256::left_padding_from(&n.to_be_bytes());
        let token = Address::repeat_byte(1);
        let (event, payer, nonce) = (word(7), word(1), word(2));
        let filter = |tokens: &[Address], topics: &[&[B256]]| LogFilter {
            of: LogsOf::Uses,
            tokens: tokens.to_vec(),
            topics: topics.iter().map(|any| any.to_vec()).collect(),
        };
        let mut bloom = Bloom::ZERO;
        let whole = filter(&[token], &[&[event], &[word(9), payer], &[nonce]]);
        assert!(!may_hold(&bloom, &whole), "an empty one");
        bloom.accrue_raw_log(token, &[event, payer, nonce]);
        assert!(may_hold(&bloom, &whole));
        assert!(may_hold(&bloom, &filter(&[Address::ZERO, token], &[&[event], &[], &[nonce]])));
        assert!(!may_hold(&bloom, &filter(&[Address::ZERO], &[&[event], &[], &[nonce]])));
        assert!(!may_hold(&bloom, &filter(&[token], &[&[event], &[], &[word(5)]])));
        assert!(may_hold(&Bloom::repeat_byte(0xff), &filter(&[Address::ZERO], &[&[word(5)]])));
    }
}
