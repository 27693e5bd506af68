//! The wide read: every endpoint is asked about everything, at one and the same block.
//!
//! A negative needs endpoints that agree, and endpoints can only agree about one block. So all say first
//! where they stand; the block is the lowest of those heads that are near each other; and each is read at
//! the hash that it has there itself. Whether the hashes are the same is for [`crate::domain::judge`].

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;

use super::endpoint::Endpoint;
use super::heads::Heads;
use super::read::Asked;
use super::{Chain, ChainSettings, Outcomes, given_up, same_for_all};
use crate::domain::{BlockRef, ReadFailure, ReadFailureKind, Timestamp};

/// The share of the time in which the endpoints must say where they stand; the rest is for reading.
const HEADS_SHARE: f64 = 0.4;

/// An endpoint that says where it stands.
struct Standing {
    /// Its place in the configuration.
    place: usize,
    heads: Heads,
    /// Whether its head moves.
    fresh: Result<(), ReadFailure>,
}

impl Chain {
    /// Asks every endpoint about everything, at the same time, and hands each one's outcomes to `hear` as
    /// they come, with the endpoint's place in the configuration.
    pub(super) async fn read_all(
        &self,
        asked: Arc<[Asked]>,
        now: Timestamp,
        within: Duration,
        mut hear: impl FnMut(usize, Outcomes),
    ) {
        let ends_at = Instant::now() + within;
        let (heads, silent) = self.all_heads(now, within.mul_f64(HEADS_SHARE)).await;
        for (place, failure) in silent {
            self.report(place, asked.len(), failure, &mut hear);
        }
        // A head that stands still decides only where there is no other.
        let of = |stand: &Standing| stand.heads.head;
        let fresh: Vec<BlockRef> = heads.iter().filter(|s| s.fresh.is_ok()).map(of).collect();
        let seen = if fresh.is_empty() { heads.iter().map(of).collect() } else { fresh };
        let Some(common) = common_block(&seen, self.settings.head_lag_max) else { return };
        // Not detached: when this future is dropped, so is the set, and the reads end.
        let mut reads = JoinSet::new();
        for Standing { place, heads, fresh } in heads {
            if heads.head.number < common {
                let failure = fresh.err().unwrap_or_else(|| self.lagging(&heads.head));
                self.report(place, asked.len(), failure, &mut hear);
                continue;
            }
            let (endpoint, settings) = (self.endpoints[place].clone(), self.settings.clone());
            let asked = asked.clone();
            let left = ends_at.saturating_duration_since(Instant::now());
            reads.spawn(async move {
                let read = read_at(&endpoint, &settings, &asked, (heads, fresh), common);
                let outcomes = tokio::time::timeout(left, read).await;
                (place, outcomes.unwrap_or_else(|_| same_for_all(asked.len(), &given_up(left))))
            });
        }
        while let Some(joined) = reads.join_next().await {
            match joined {
                Ok((place, outcomes)) => {
                    self.endpoints[place].report_health(self.settings.chain_id, &outcomes);
                    hear(place, outcomes);
                }
                // Nobody aborts one: it is a bug, and the whole read is to fail loudly.
                Err(error) => std::panic::resume_unwind(error.into_panic()),
            }
        }
    }

    /// Where every endpoint stands, by its place; and why those that do not say, do not.
    async fn all_heads(
        &self,
        now: Timestamp,
        within: Duration,
    ) -> (Vec<Standing>, Vec<(usize, ReadFailure)>) {
        let mut asked = JoinSet::new();
        for (place, endpoint) in self.endpoints.iter().enumerate() {
            let (endpoint, settings) = (endpoint.clone(), self.settings.clone());
            asked.spawn(async move {
                if let Some(failure) = endpoint.sickness() {
                    return (place, Err(failure));
                }
                let heads = tokio::time::timeout(within, endpoint.heads(&settings)).await;
                let heads = heads.unwrap_or_else(|_| Err(given_up(within)));
                let fresh = |heads: Heads| (heads, endpoint.see_head(&settings, &heads.head, now));
                (place, heads.map(fresh))
            });
        }
        let (mut standing, mut silent) = (Vec::new(), Vec::new());
        for (place, heads) in asked.join_all().await {
            match heads {
                Ok((heads, fresh)) => standing.push(Standing { place, heads, fresh }),
                Err(failure) => silent.push((place, failure)),
            }
        }
        (standing, silent)
    }

    /// The failure of an endpoint whose head is this.
    pub(super) fn lagging(&self, head: &BlockRef) -> ReadFailure {
        let detail = format!(
            "the head is {} of time {}, more than {} s behind the others'",
            head.number,
            head.time.as_secs(),
            self.settings.head_lag_max.as_secs()
        );
        ReadFailure::new(ReadFailureKind::Lagging, detail)
    }

    /// Hears of an endpoint that could not be read at all.
    fn report(
        &self,
        place: usize,
        count: usize,
        failure: ReadFailure,
        hear: &mut impl FnMut(usize, Outcomes),
    ) {
        let outcomes = same_for_all(count, &failure);
        self.endpoints[place].report_health(self.settings.chain_id, &outcomes);
        hear(place, outcomes);
    }
}

async fn read_at(
    endpoint: &Endpoint,
    settings: &ChainSettings,
    asked: &[Asked],
    (heads, fresh): (Heads, Result<(), ReadFailure>),
    number: u64,
) -> Outcomes {
    match endpoint.heads_at(&heads, number).await {
        Ok(heads) => endpoint.read_at(settings, asked, &heads, fresh).await,
        Err(failure) => same_for_all(asked.len(), &failure),
    }
}

/// The number of the block to read all at: the lowest head that is at most `lag_max` older than the
/// middle one, so that neither a straggler nor one that runs ahead, alone among three, decides for the others.
/// `None` without any head.
pub(super) fn common_block(heads: &[BlockRef], lag_max: Duration) -> Option<u64> {
    let mut heads = heads.to_vec();
    heads.sort_by_key(|head| std::cmp::Reverse((head.time, head.number)));
    // Of two, the newer one: who is behind is asked when it has caught up.
    let middle = heads.get(heads.len().saturating_sub(1) / 2)?.time;
    let near = |head: &&BlockRef| {
        middle.as_secs().saturating_sub(head.time.as_secs()) <= lag_max.as_secs()
    };
    heads.iter().filter(near).map(|head| head.number).min()
}

#[cfg(test)]
mod tests {
    use alloy_primitives::B256;

    use super::*;
    use crate::domain::BlockTime;

    #[test]
    fn the_common_block_is_the_lowest_head_that_does_not_lag() {
        let common = |numbers: &[u64]| {
            let head = |number: &u64| BlockRef {
                number: *number,
                hash: B256::ZERO,
                time: BlockTime::from_secs(2 * number),
            };
            let heads: Vec<_> = numbers.iter().map(head).collect();
            common_block(&heads, Duration::from_secs(20))
        };
        assert_eq!(common(&[]), None);
        assert_eq!(common(&[7]), Some(7));
        assert_eq!(common(&[100, 98]), Some(98));
        assert_eq!(common(&[90, 100]), Some(90), "as far behind as is allowed");
        assert_eq!(common(&[89, 100]), Some(100), "too far");
        assert_eq!(common(&[100, 99, 50]), Some(99), "one straggler of three");
        assert_eq!(common(&[100, 900, 99]), Some(99), "one of three that runs ahead");
        assert_eq!(
            common(&[50, 100, 50]),
            Some(50),
            "the majority is behind, and all can be read there"
        );
        assert_eq!(common(&[u64::MAX / 2, 0]), Some(u64::MAX / 2), "nothing overflows");
    }
}
