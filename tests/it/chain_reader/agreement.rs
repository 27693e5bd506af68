//! Several endpoints, read at one and the same block.

use std::time::Duration;

use reconciled::chain::Breadth;
use reconciled::domain::{
    BlockRef, BlockTime, EndpointName, Evidence, Inconclusive, NonceState, Payment, Policy,
    ReadFailureKind, Timestamp, Unsettleable, Verdict, disagreements, judge,
};
use serde_json::{Value, json};
use url::Url;

use super::backend::{
    FINALIZED_AFTER, Reader, TestChain, authorization, failures, payment, settings,
};
use super::proxy::proxy;

/// An endpoint of `chain` that has not got further than `head`, of which `finalized` is final.
pub(super) async fn behind(chain: &impl TestChain, head: BlockRef, finalized: BlockRef) -> Url {
    proxy(chain.url(), move |call, answer| {
        let block = match &call["params"][0] {
            Value::String(tag) if tag == "latest" => head,
            Value::String(tag) if tag == "finalized" => finalized,
            _ => return,
        };
        answer["result"]["number"] = json!(format!("{:#x}", block.number));
        answer["result"]["hash"] = json!(block.hash);
        answer["result"]["timestamp"] = json!(format!("{:#x}", block.time.as_secs()));
    })
    .await
}

/// An endpoint of `chain` that calls one authorization unused, whatever it is.
async fn denying(chain: &impl TestChain) -> Url {
    // The last word of the answer is the state.
    proxy(chain.url(), |call, answer| {
        if call["method"] == "eth_call" {
            let result = answer["result"].as_str().unwrap();
            let unused = format!("{}0", &result[..result.len() - 1]);
            answer["result"] = json!(unused);
        }
    })
    .await
}

async fn read_all(reader: &Reader, payment: &Payment) -> Evidence {
    reader.read_at(std::slice::from_ref(payment), Breadth::All, 0).await.remove(0)
}

/// The blocks at which those endpoints were read that gave evidence.
fn read_at(evidence: &Evidence) -> Vec<BlockRef> {
    evidence.readings.iter().filter_map(|r| r.outcome.as_ref().ok()).map(|s| s.head).collect()
}

fn quorum(quorum: usize) -> Policy {
    Policy { quorum, ..Policy::default() }
}

pub(crate) async fn all_are_read_at_the_lowest_head_that_is_near_the_others<C: TestChain>() {
    let chain = C::start().await;
    let first = chain.head().await;
    let payment = payment(&chain, &authorization(&chain, 1).await).await;
    chain.mine(10).await;
    let lowest = chain.head().await;
    chain.mine(3).await;
    let urls = [chain.url(), behind(&chain, lowest, first).await, chain.url()];
    let evidence = read_all(&Reader::with(settings(&chain, &urls)), &payment).await;
    assert_eq!(failures(&evidence), [None, None, None], "{evidence:?}");
    assert_eq!(read_at(&evidence), [lowest; 3]);
    let verdict = judge(&payment, &evidence, &quorum(3));
    assert_eq!(verdict, Verdict::Pending { as_of: lowest, agreeing: 3 });
}

pub(crate) async fn an_endpoint_too_far_behind_is_lagging_and_drags_nobody<C: TestChain>() {
    let chain = C::start().await;
    let head = chain.head().await;
    let payment = payment(&chain, &authorization(&chain, 1).await).await;
    chain.mine(10).await;
    let newest = chain.head().await;
    let urls = [chain.url(), behind(&chain, head, head).await, chain.url()];
    let mut settings = settings(&chain, &urls);
    settings.head_lag_max = Duration::from_secs(5);
    let evidence = read_all(&Reader::with(settings), &payment).await;
    assert_eq!(failures(&evidence), [None, Some(ReadFailureKind::Lagging), None]);
    assert_eq!(read_at(&evidence), [newest; 2]);
    assert!(disagreements(&evidence).is_empty(), "lag is no contradiction");
}

pub(crate) async fn what_a_lagging_endpoint_shows_used_is_evidence<C: TestChain>() {
    let chain = C::start().await;
    let first = chain.head().await;
    let used = authorization(&chain, 1).await;
    let payment = payment(&chain, &used).await;
    chain.transfer(&[used]).await;
    let head = chain.head().await;
    chain.mine(10).await;
    // One that has got further, and denies the transfer.
    let urls = [behind(&chain, head, first).await, denying(&chain).await];
    let mut settings = settings(&chain, &urls);
    settings.head_lag_max = Duration::from_secs(5);
    let evidence = read_all(&Reader::with(settings), &payment).await;
    assert_eq!(failures(&evidence), [None, None], "{evidence:?}");
    let shown = evidence.readings[0].outcome.as_ref().unwrap();
    assert!(matches!(shown.nonce, NonceState::Used(_)), "{shown:?}");
    assert_eq!(shown.head, head, "at its own head");
    let verdict = judge(&payment, &evidence, &quorum(1));
    assert!(matches!(verdict, Verdict::Settled { .. }), "{verdict:?}");
}

pub(crate) async fn i2_a_head_of_the_future_makes_nobody_lag_and_shows_nothing_unused<
    C: TestChain,
>() {
    let chain = C::start().await;
    let payment = payment(&chain, &authorization(&chain, 1).await).await;
    chain.mine(3).await;
    let head = chain.head().await;
    let ahead = BlockRef {
        number: head.number + 1_000,
        time: BlockTime::from_secs(head.time.as_secs() + 2 * 86_400),
        ..head
    };
    let urls = [chain.url(), behind(&chain, ahead, ahead).await];
    let reader = Reader::with(settings(&chain, &urls));
    let (now, within) = (Timestamp::from(head.time), Duration::from_secs(20));
    let asked = std::slice::from_ref(&payment);
    let evidence = reader.read_within(asked, Breadth::All, now, within).await.remove(0);
    assert_eq!(failures(&evidence), [None, Some(ReadFailureKind::BadAnswer)], "{evidence:?}");
    assert_eq!(read_at(&evidence), [head]);
}

pub(crate) async fn i2_an_old_number_of_a_new_time_hides_no_transfer<C: TestChain>() {
    let chain = C::start().await;
    let first = chain.head().await;
    chain.mine(20).await;
    let used = authorization(&chain, 1).await;
    let payment = payment(&chain, &used).await;
    chain.transfer(&[used]).await;
    let newest = chain.head().await;
    let old = BlockRef { time: newest.time, ..first };
    let urls = [chain.url(), behind(&chain, old, old).await];
    let mut settings = settings(&chain, &urls);
    // So that twenty blocks are far.
    settings.block_time = Duration::from_secs(20);
    let evidence = read_all(&Reader::with(settings), &payment).await;
    let shown = evidence.readings[0].outcome.as_ref().unwrap();
    assert!(matches!(shown.nonce, NonceState::Used(_)), "{shown:?}");
    assert_eq!(shown.head, newest);
}

pub(crate) async fn what_is_final_above_the_common_block_makes_that_final<C: TestChain>() {
    let chain = C::start().await;
    let first = chain.head().await;
    let payment = payment(&chain, &authorization(&chain, 1).await).await;
    chain.advance(602).await;
    let expired = chain.head().await;
    chain.mine(FINALIZED_AFTER + 4).await;
    let urls = [chain.url(), behind(&chain, expired, first).await];
    let mut settings = settings(&chain, &urls);
    settings.head_lag_max = Duration::from_secs(60);
    let evidence = read_all(&Reader::with(settings), &payment).await;
    assert_eq!(read_at(&evidence), [expired; 2], "{evidence:?}");
    let finalized = |place: usize| evidence.readings[place].outcome.as_ref().unwrap().finalized;
    assert_eq!((finalized(0), finalized(1)), (expired, first));
    let verdict = judge(&payment, &evidence, &quorum(1));
    let Verdict::Unsettleable { reason, as_of, .. } = verdict else { panic!("{verdict:?}") };
    assert_eq!((reason, as_of), (Unsettleable::Expired, expired));
    // The other one has not finalized the end of the window.
    let verdict = judge(&payment, &evidence, &quorum(2));
    assert_eq!(verdict, Verdict::Pending { as_of: expired, agreeing: 2 });
}

pub(crate) async fn another_hash_at_the_common_block_is_disagreement<C: TestChain>() {
    let (chain, fork) = (C::start().await, C::start().await);
    let payment = payment(&chain, &authorization(&chain, 1).await).await;
    for chain in [&chain, &fork] {
        chain.advance(700).await;
        chain.mine(FINALIZED_AFTER).await;
    }
    fork.reorg(1).await;
    let (one, other) = (chain.head().await, fork.head().await);
    assert_eq!(one.number, other.number);
    assert_ne!(one.hash, other.hash);
    let mut settings = settings(&chain, &[chain.url(), fork.url()]);
    settings.head_lag_max = Duration::from_secs(3_600);
    let evidence = read_all(&Reader::with(settings), &payment).await;
    assert_eq!(read_at(&evidence), [one, other]);
    let pair = (EndpointName::new("a"), EndpointName::new("b"));
    assert_eq!(disagreements(&evidence).into_iter().collect::<Vec<_>>(), [pair]);
    for quorum in [quorum(1), quorum(2)] {
        let verdict = judge(&payment, &evidence, &quorum);
        assert_eq!(verdict, Verdict::Inconclusive(Inconclusive::EndpointsDisagree));
    }
}

pub(crate) async fn one_that_denies_a_cancellation_is_named_and_ends_nothing<C: TestChain>() {
    let chain = C::start().await;
    let canceled = authorization(&chain, 1).await;
    let payment = payment(&chain, &canceled).await;
    chain.cancel(&canceled).await;
    chain.mine(FINALIZED_AFTER).await;
    let denies = denying(&chain).await;
    let urls = [chain.url(), denies, chain.url()];
    let evidence = read_all(&Reader::with(settings(&chain, &urls)), &payment).await;
    let states: Vec<_> =
        evidence.readings.iter().flat_map(|r| &r.outcome).map(|s| &s.nonce).collect();
    assert!(
        matches!(states[..], [NonceState::Used(_), NonceState::Unused, NonceState::Used(_)]),
        "{states:?}"
    );
    let pairs: Vec<_> = disagreements(&evidence).into_iter().collect();
    let name = EndpointName::new;
    assert_eq!(pairs, [(name("a"), name("b")), (name("b"), name("c"))]);
    let verdict = judge(&payment, &evidence, &quorum(2));
    assert_eq!(verdict, Verdict::Inconclusive(Inconclusive::EndpointsDisagree));
}
