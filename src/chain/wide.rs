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

/// A head of a time this far ahead of the local clock is not believed where others' heads are not: no chain
/// makes blocks for the future, and one that did could end any window.
const AHEAD_MAX: Duration = Duration::from_secs(60);

/// Blocks may come so many times as often as configured: heads of nearly one time that are further apart in
/// number are not of one chain.
const BLOCK_RATE_SLACK: u128 = 4;

/// And heads this far apart in number always may be, however short the time is.
const APART_MIN: u64 = 16;

/// An endpoint that says where it stands.
struct Standing {
    /// Its place in the configuration.
    place: usize,
    heads: Heads,
    /// Whether its head moves.
    fresh: Result<(), ReadFailure>,
}

impl Standing {
    /// Does not believe a head of a later time than can be.
    fn doubt_beyond(&mut self, time_max: Option<u64>) {
        let time = self.heads.head.time.as_secs();
        if self.fresh.is_ok() && time_max.is_some_and(|time_max| time > time_max) {
            let number = self.heads.head.number;
            let detail = format!(
                "the head is {number} of time {time}, ahead of the local clock and of the others' heads"
            );
            self.fresh = Err(ReadFailure::new(ReadFailureKind::BadAnswer, detail));
        }
    }
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
        let heads_seen: Vec<BlockRef> = standing.iter().map(of).collect();
        let time_max = time_max(&heads_seen, now, self.settings.head_lag_max);
        standing.iter_mut().for_each(|stand| stand.doubt_beyond(time_max));
        let fresh: Vec<BlockRef> = standing.iter().filter(|s| s.fresh.is_ok()).map(of).collect();
        let seen = if fresh.is_empty() { heads_seen } else { fresh };
        let Some(common) = common_block(&seen, self.near()) else { return };
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
                Ok(mut stand) => {
                    stand.doubt_beyond(time_max);
                    let Standing { place, heads, fresh } = stand;
                    // Below the common block "unused" is old news; what it shows used is used all the same:
                    // a head that runs ahead must not silence who has seen the transfer.
                    let (number, fresh) = match heads.head.number {
                        own if own < common => {
                            (own, fresh.and_then(|()| Err(self.lagging(&heads.head))))
                        }
                        _ => (common, fresh),
                    };
                    let (endpoint, settings) =
                        (self.endpoints[place].clone(), self.settings.clone());
                    let asked = asked.clone();
                    reads.spawn(async move {
                        let at = by(ends_at, endpoint.heads_at(&heads, number)).await;
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
        let heads: Vec<BlockRef> = fresh.map(|stand| stand.heads.head).collect();
        let apart = |of: fn(&BlockRef) -> u64| {
            let (lowest, highest) = (heads.iter().map(of).min(), heads.iter().map(of).max());
            highest.zip(lowest).map_or(0, |(highest, lowest)| highest - lowest)
        };
        let near = self.near();
        heads.len() > self.endpoints.len() / 2
            && apart(|head| head.time.as_secs()) <= near.secs
            && apart(|head| head.number) <= near.blocks
    }

    /// How far apart heads may be for all to be read at the lowest of them.
    pub(super) fn near(&self) -> Near {
        Near::of(self.settings.head_lag_max, self.settings.block_time)
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

/// How far apart heads may be.
#[derive(Debug, Clone, Copy)]
pub(super) struct Near {
    secs: u64,
    blocks: u64,
}

impl Near {
    fn of(lag_max: Duration, block_time: Duration) -> Self {
        let blocks = lag_max.as_millis() * BLOCK_RATE_SLACK / block_time.as_millis().max(1);
        let blocks = u64::try_from(blocks).unwrap_or(u64::MAX).max(APART_MIN);
        Self { secs: lag_max.as_secs(), blocks }
    }
}

/// The number of the block to read all at: the lowest head that is near the middle one, in time and in
/// number, so that neither a straggler, nor one that runs ahead, nor one that gives an old number a new
/// time, alone among three, decides for the others. `None` without any head.
pub(super) fn common_block(heads: &[BlockRef], near: Near) -> Option<u64> {
    // Of two, the newer or higher one: who is behind is asked when it has caught up, and shows what it has
    // seen used meanwhile.
    let middle = |of: fn(&BlockRef) -> u64| {
        let mut all: Vec<u64> = heads.iter().map(of).collect();
        all.sort_unstable_by_key(|at| std::cmp::Reverse(*at));
        all.get(all.len().saturating_sub(1) / 2).copied()
    };
    let (time, number) = (middle(|head| head.time.as_secs())?, middle(|head| head.number)?);
    let is_near = |head: &&BlockRef| {
        time.saturating_sub(head.time.as_secs()) <= near.secs
            && number.saturating_sub(head.number) <= near.blocks
    };
    // Where none is near in both, the higher number: nobody is read at a block before a transfer it has.
    heads.iter().filter(is_near).map(|head| head.number).min().or(Some(number))
}

/// The latest time of a head that can be, in seconds, where any head says that the local clock is right:
/// where all are ahead of it, it is the clock that is wrong, and it decides nothing.
fn time_max(heads: &[BlockRef], now: Timestamp, lag_max: Duration) -> Option<u64> {
    let by_clock = now.saturating_add(AHEAD_MAX).as_millis() / 1_000;
    let by_clock = u64::try_from(by_clock).unwrap_or(0);
    let times = heads.iter().map(|head| head.time.as_secs());
    let newest = times.filter(|time| *time <= by_clock).max()?;
    Some(by_clock.max(newest.saturating_add(lag_max.as_secs())))
}

#[cfg(test)]
mod tests {
    use alloy_primitives::B256;

    use super::*;
    use crate::domain::BlockTime;

    /// 20 s; 40 blocks.
    const NEAR: Near = Near { secs: 20, blocks: 40 };

    fn common(heads: &[(u64, u64)]) -> Option<u64> {
        common_block(&heads.iter().copied().map(head).collect::<Vec<_>>(), NEAR)
    }

    fn head((number, secs): (u64, u64)) -> BlockRef {
        BlockRef { number, hash: B256::ZERO, time: BlockTime::from_secs(secs) }
    }

    #[test]
    fn i4_an_old_number_of_a_new_time_makes_nobody_read_before_the_transfers() {
        let near = Near::of(Duration::from_secs(20), Duration::from_secs(2));
        assert_eq!((near.secs, near.blocks), (NEAR.secs, NEAR.blocks));
        assert_eq!(Near::of(Duration::ZERO, Duration::ZERO).blocks, APART_MIN);
        assert_eq!(common(&[(5, 2_000), (1_000, 2_000)]), Some(1_000));
        assert_eq!(common(&[(5, 2_002), (1_000, 2_000)]), Some(1_000));
        assert_eq!(common(&[(5, 2_002), (1_000, 2_000), (999, 1_998)]), Some(999));
        assert_eq!(common(&[(960, 2_000), (1_000, 2_000)]), Some(960), "as far as is allowed");
        assert_eq!(common(&[(959, 2_000), (1_000, 2_000)]), Some(1_000), "too far");
        assert_eq!(common(&[(5, 9_000), (1_000, 2_000)]), Some(1_000), "neither is near");
        assert_eq!(common(&[(u64::MAX, 2_000), (1_000, 2_000), (999, 1_998)]), Some(999));
    }

    #[test]
    fn i2_a_head_of_the_future_is_not_believed_beside_others_of_the_present() {
        let now = Timestamp::from_millis(2_000_000);
        let max = |heads: &[(u64, u64)]| {
            let heads: Vec<_> = heads.iter().copied().map(head).collect();
            time_max(&heads, now, Duration::from_secs(20))
        };
        assert_eq!(max(&[(1_000, 2_000), (2_000, 2_000 + 172_800)]), Some(2_060));
        assert_eq!(
            max(&[(1_000, 2_055), (1_003, 2_061)]),
            Some(2_075),
            "near one that is not ahead"
        );
        assert_eq!(max(&[(1_000, 90_000), (1_001, 90_002)]), None, "the clock is behind");
        assert_eq!(max(&[]), None);
        let past = Timestamp::from_millis(i64::MIN);
        assert_eq!(time_max(&[head((1, 5))], past, Duration::ZERO), None, "nothing overflows");
    }

    #[test]
    fn the_common_block_is_the_lowest_head_that_does_not_lag() {
        let common = |numbers: &[u64]| {
            let head = |number: &u64| BlockRef {
                number: *number,
                hash: B256::ZERO,
                time: BlockTime::from_secs(2 * number),
            };
            let heads: Vec<_> = numbers.iter().map(head).collect();
            common_block(&heads, NEAR)
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
