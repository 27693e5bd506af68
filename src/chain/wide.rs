//! The wide read: every endpoint is asked about everything, at one and the same block.
//!
//! A negative needs endpoints that agree, and endpoints can only agree about one block. So all say first
//! where they stand; the block is the lowest of those heads that are near each other; and each is read at
//! the hash that it has there itself. Whoever takes longer to say is read at that block when it does: its
//! silence keeps no transfer waiting that others show. Whether the hashes are the same is for [`crate::domain::judge`].

use std::sync::Arc;
use std::time::Duration;

use tokio::task::{JoinError, JoinSet};
use tokio::time::Instant;

use super::asked::Asked;
use super::heads::Heads;
use super::{Chain, Outcomes, by, same_for_all};
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
        let started = Instant::now();
        let ends_at = started + within;
        let heads_by = started + within.mul_f64(HEADS_SHARE);
        let mut heads = self.ask_heads(&asked, now, heads_by);
        let mut standing: Vec<Standing> = Vec::new();
        let mut enough_since = None;
        loop {
            let patience_over = enough_since.unwrap_or(ends_at) + self.settings.hedge_after;
            let answer = tokio::select! {
                answer = heads.join_next() => answer,
                () = tokio::time::sleep_until(patience_over), if enough_since.is_some() => break,
            };
            match answer.map(joined) {
                None => break,
                Some((_, Ok(stand))) => standing.push(stand),
                Some((place, Err(outcomes))) => self.report(place, outcomes, &mut hear),
            }
            if enough_since.is_none() && self.is_enough(&standing) {
                enough_since = Some(Instant::now());
            }
        }
        // A head that stands still decides only where there is no other.
        let of = |stand: &Standing| stand.heads.head;
        let fresh: Vec<BlockRef> = standing.iter().filter(|s| s.fresh.is_ok()).map(of).collect();
        let seen = if fresh.is_empty() { standing.iter().map(of).collect() } else { fresh };
        let Some(common) = common_block(&seen, self.settings.head_lag_max) else { return };
        // Not detached: when this future is dropped, so is the set, and the reads end.
        let mut reads = JoinSet::new();
        let mut standing = standing.into_iter();
        loop {
            let late = match standing.next() {
                Some(stand) => Ok(stand),
                None => tokio::select! {
                    Some(answer) = heads.join_next() => match joined(answer) {
                        (_, Ok(stand)) => Ok(stand),
                        (place, Err(outcomes)) => Err((place, outcomes)),
                    },
                    Some(read) = reads.join_next() => Err(joined(read)),
                    else => return,
                },
            };
            match late {
                Ok(Standing { place, heads, fresh }) if heads.head.number < common => {
                    let failure = fresh.err().unwrap_or_else(|| self.lagging(&heads.head));
                    self.report(place, same_for_all(asked.len(), &failure), &mut hear);
                }
                Ok(Standing { place, heads, fresh }) => {
                    let (endpoint, settings) =
                        (self.endpoints[place].clone(), self.settings.clone());
                    let asked = asked.clone();
                    reads.spawn(async move {
                        let at = by(ends_at, endpoint.heads_at(&heads, common)).await;
                        let outcomes = match at {
                            Ok(at) => {
                                endpoint.read_at(&settings, &asked, (&at, fresh), ends_at).await
                            }
                            Err(failure) => same_for_all(asked.len(), &failure),
                        };
                        (place, outcomes)
                    });
                }
                Err((place, outcomes)) => self.report(place, outcomes, &mut hear),
            }
        }
    }

    /// Asks every endpoint that is believed about any of these where it stands, by `ends_at`.
    fn ask_heads(
        &self,
        about: &Arc<[Asked]>,
        now: Timestamp,
        ends_at: Instant,
    ) -> JoinSet<(usize, Result<Standing, Outcomes>)> {
        let mut asked = JoinSet::new();
        for (place, endpoint) in self.endpoints.iter().enumerate() {
            let (endpoint, settings) = (endpoint.clone(), self.settings.clone());
            let about = Arc::clone(about);
            asked.spawn(async move {
                if let Some(failures) = endpoint.silence(about.iter().map(|asked| &asked.token)) {
                    return (place, Err(failures.into_iter().map(Err).collect()));
                }
                let stand = |heads: Heads| Standing {
                    place,
                    heads,
                    fresh: endpoint.see_head(&settings, &heads.head, now),
                };
                let heads = by(ends_at, endpoint.heads(&settings)).await;
                (place, heads.map(stand).map_err(|failure| same_for_all(about.len(), &failure)))
            });
        }
        asked
    }

    /// Whether the block to read at need not wait for further heads: a majority of the endpoints stand at
    /// moving heads, all near each other, so that no further head could show one of them to run ahead.
    fn is_enough(&self, standing: &[Standing]) -> bool {
        let fresh = standing.iter().filter(|stand| stand.fresh.is_ok());
        let times: Vec<u64> = fresh.map(|stand| stand.heads.head.time.as_secs()).collect();
        let (oldest, newest) = (times.iter().min(), times.iter().max());
        let apart = newest.zip(oldest).map_or(0, |(newest, oldest)| newest - oldest);
        times.len() > self.endpoints.len() / 2 && apart <= self.settings.head_lag_max.as_secs()
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

    /// Hears of an endpoint.
    fn report(&self, place: usize, outcomes: Outcomes, hear: &mut impl FnMut(usize, Outcomes)) {
        self.endpoints[place].report_health(self.settings.chain_id, &outcomes);
        hear(place, outcomes);
    }
}

/// What a task came to. Nobody aborts one: it is a bug, and the whole read is to fail loudly.
fn joined<T>(task: Result<T, JoinError>) -> T {
    task.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()))
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
