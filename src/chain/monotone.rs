//! What was seen used stays used, unless its block was replaced.
//!
//! A guard and nothing else: it turns an answer that cannot be true into no evidence, and never makes
//! evidence of its own.

use std::collections::{BTreeSet, HashMap, VecDeque};

use alloy_primitives::{Address, B256};
use tokio::time::Instant;

use super::Outcomes;
use super::blocks::{header_by_number, parse_header};
use super::endpoint::Endpoint;
use super::heads::Heads;
use super::read::{Asked, Keeper};
use crate::domain::{BlockRef, NonceState, ReadFailure, ReadFailureKind};

/// The most authorizations remembered per chain; the oldest are forgotten first.
const SEEN_MAX: usize = 10_000;

/// One authorization of a chain.
type Authorization = (Keeper, Address, Address, B256);

fn authorization(asked: &Asked) -> Authorization {
    (asked.keeper, asked.token, asked.payer, asked.nonce)
}

/// Authorizations that some endpoint has shown to be used, with the block of the use.
#[derive(Debug, Default)]
pub(super) struct SeenUsed {
    blocks: HashMap<Authorization, BlockRef>,
    oldest_first: VecDeque<Authorization>,
}

impl SeenUsed {
    fn note(&mut self, one: Authorization, block: BlockRef) {
        if self.blocks.insert(one, block).is_some() {
            return;
        }
        self.oldest_first.push_back(one);
        if self.oldest_first.len() > SEEN_MAX
            && let Some(oldest) = self.oldest_first.pop_front()
        {
            self.blocks.remove(&oldest);
        }
    }
}

impl Endpoint {
    /// Takes note of what is used, and leaves out every "unused" about what was used before in a block that
    /// this endpoint still has.
    pub(super) async fn guard(
        &self,
        asked: &[Asked],
        heads: &Heads,
        outcomes: &mut Outcomes,
        ends_at: Instant,
    ) {
        let mut doubtful: Vec<(usize, BlockRef)> = Vec::new();
        {
            let mut seen = self.seen_used();
            for (index, outcome) in outcomes.iter().enumerate() {
                let one = authorization(&asked[index]);
                match outcome.as_ref().map(|observation| &observation.nonce) {
                    Ok(NonceState::Used(consumption)) => seen.note(one, consumption.log.block),
                    Ok(NonceState::Unused) => {
                        doubtful.extend(seen.blocks.get(&one).map(|block| (index, *block)));
                    }
                    Ok(NonceState::UsedWithoutLog { .. } | NonceState::UsedUnread(_)) | Err(_) => {}
                }
            }
        }
        let head = heads.head.number;
        let numbers: BTreeSet<u64> =
            doubtful.iter().map(|(_, block)| block.number).filter(|n| *n <= head).collect();
        let calls: Vec<_> = numbers.iter().map(|number| header_by_number(*number)).collect();
        let results = match calls.is_empty() {
            true => Vec::new(),
            false => self.batch_by(ends_at, &calls).await,
        };
        let headers: HashMap<u64, Result<BlockRef, ReadFailure>> = numbers
            .into_iter()
            .zip(results)
            .map(|(number, result)| {
                let block = result.and_then(|result| parse_header("header", &result));
                (number, block.map_err(ReadFailure::from))
            })
            .collect();
        for (index, used_in) in doubtful {
            let used = format!("it was seen used in block {}", used_in.number);
            let failure = match headers.get(&used_in.number) {
                None => {
                    let detail = format!("{used}, and this endpoint is at {head}");
                    ReadFailure::new(ReadFailureKind::Lagging, detail)
                }
                Some(Err(failure)) => failure.clone(),
                Some(Ok(block)) if *block == used_in => {
                    let detail = format!("{used}, which is canonical, and reads unused at {head}");
                    ReadFailure::new(ReadFailureKind::BadAnswer, detail)
                }
                Some(Ok(block)) if block.number != used_in.number => {
                    let detail =
                        format!("asked for block {}, got {}", used_in.number, block.number);
                    ReadFailure::new(ReadFailureKind::BadAnswer, detail)
                }
                // A reorg has taken it away: then it may well be unused. Only this endpoint says so: for
                // the others it stays as seen.
                Some(Ok(_)) => continue,
            };
            outcomes[index] = Err(failure);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::BlockTime;

    #[test]
    fn only_the_latest_are_remembered() {
        let mut seen = SeenUsed::default();
        let block = BlockRef { number: 1, hash: B256::ZERO, time: BlockTime::from_secs(1) };
        let one = |n: u64| {
            let nonce = B256::left_padding_from(&n.to_be_bytes());
            (Keeper::Token, Address::ZERO, Address::ZERO, nonce)
        };
        for n in 0..SEEN_MAX as u64 + 5 {
            seen.note(one(n), block);
            seen.note(one(n), block);
        }
        assert_eq!((seen.blocks.len(), seen.oldest_first.len()), (SEEN_MAX, SEEN_MAX));
        assert!(!seen.blocks.contains_key(&one(4)) && seen.blocks.contains_key(&one(5)));
    }
}
