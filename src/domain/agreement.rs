//! Which endpoints agree, and which contradict each other.
//!
//! Endpoints are compared by what cannot differ on one chain. Lag is no contradiction: an endpoint whose
//! block is older than what another one shows cannot know of it. Neither is a missing log: some nodes
//! keep none.

use std::collections::{BTreeMap, BTreeSet};

use alloy_primitives::B256;

use super::{BlockRef, BlockTime, EndpointName, Evidence, NonceState, Observation};

/// What one endpoint showed.
#[derive(Clone, Copy)]
pub(super) struct Seen<'a> {
    pub(super) endpoint: &'a EndpointName,
    pub(super) at: &'a Observation,
}

/// How many different endpoints these are: one that answers twice agrees only with itself.
pub(super) fn count_endpoints<'a>(seen: impl Iterator<Item = Seen<'a>>) -> usize {
    seen.map(|s| s.endpoint).collect::<BTreeSet<_>>().len()
}

/// Whether what an endpoint says can be true of any chain at all. The proofs of a negative rest on it:
/// unused at the head says nothing about a finalized block above that head.
fn is_coherent(seen: &Observation) -> bool {
    let head = seen.head;
    let below_head = |block: &BlockRef| block.number <= head.number && block.time <= head.time;
    below_head(&seen.finalized)
        && seen.safe.as_ref().is_none_or(below_head)
        && match &seen.nonce {
            NonceState::Used(consumption) => below_head(&consumption.log.block),
            _ => true,
        }
}

/// What was observed, without the readings that failed or that fit no chain.
pub(super) fn observed(evidence: &Evidence) -> Vec<Seen<'_>> {
    evidence
        .readings
        .iter()
        .filter_map(|r| r.outcome.as_ref().ok().map(|at| Seen { endpoint: &r.endpoint, at }))
        .filter(|seen| is_coherent(seen.at))
        .collect()
}

/// The pairs of endpoints that contradict each other, each pair once and in order of name.
pub fn disagreements(evidence: &Evidence) -> BTreeSet<(EndpointName, EndpointName)> {
    let seen = observed(evidence);
    let mut pairs = BTreeSet::new();
    for (place, one) in seen.iter().enumerate() {
        for other in &seen[place + 1..] {
            if one.endpoint != other.endpoint && contradict(one.at, other.at) {
                let (first, second) =
                    (one.endpoint.min(other.endpoint), one.endpoint.max(other.endpoint));
                pairs.insert((first.clone(), second.clone()));
            }
        }
    }
    pairs
}

/// Whether any two of these observations cannot both be true.
pub(super) fn any_contradiction(seen: &[Seen<'_>]) -> bool {
    seen.iter()
        .enumerate()
        .any(|(place, one)| seen[place + 1..].iter().any(|other| contradict(one.at, other.at)))
}

fn contradict(one: &Observation, other: &Observation) -> bool {
    let forked = blocks(one)
        .flatten()
        .any(|mine| blocks(other).flatten().any(|theirs| on_different_chains(&mine, &theirs)));
    forked || states_contradict(one, other) || states_contradict(other, one)
}

/// The blocks an observation rests on.
fn blocks(seen: &Observation) -> impl Iterator<Item = Option<BlockRef>> {
    let consumed = match &seen.nonce {
        NonceState::Used(consumption) => Some(consumption.log.block),
        _ => None,
    };
    [Some(seen.head), Some(seen.finalized), consumed].into_iter()
}

/// One chain has one block of a number, and a later block is not older.
fn on_different_chains(one: &BlockRef, other: &BlockRef) -> bool {
    match one.number.cmp(&other.number) {
        std::cmp::Ordering::Equal => one != other,
        std::cmp::Ordering::Less => one.time > other.time,
        std::cmp::Ordering::Greater => one.time < other.time,
    }
}

/// An authorization is consumed once and stays so.
fn states_contradict(one: &Observation, other: &Observation) -> bool {
    match (&one.nonce, &other.nonce) {
        (NonceState::Unused, NonceState::Used(consumption)) => {
            one.head.number >= consumption.log.block.number
        }
        (NonceState::Unused, NonceState::UsedWithoutLog { .. } | NonceState::UsedUnread(_)) => {
            one.head.number >= other.head.number
        }
        (NonceState::Used(mine), NonceState::Used(theirs)) => mine != theirs,
        _ => false,
    }
}

/// What makes one block newer than another. Time first: it is what deadlines are judged by.
fn age_key(block: &BlockRef) -> (BlockTime, u64, B256) {
    (block.time, block.number, block.hash)
}

/// The newest block that `quorum` endpoints were read at, and how many were; where there is none, the
/// one that most were read at. `None` when nothing was seen at all.
pub(super) fn agreed_block<'a>(
    seen: impl Iterator<Item = Seen<'a>>,
    quorum: usize,
) -> Option<(BlockRef, usize)> {
    let mut read_at: BTreeMap<(BlockTime, u64, B256), (BlockRef, BTreeSet<&EndpointName>)> =
        BTreeMap::new();
    for s in seen {
        let (_, endpoints) =
            read_at.entry(age_key(&s.at.head)).or_insert((s.at.head, BTreeSet::new()));
        endpoints.insert(s.endpoint);
    }
    let counted = read_at.into_values().map(|(block, endpoints)| (block, endpoints.len()));
    // Rising by age, and the last of equals wins.
    counted.max_by_key(|(_, count)| (*count).min(quorum))
}
