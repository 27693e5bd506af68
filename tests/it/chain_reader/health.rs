//! Known-answer probes: who answers wrongly is not believed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use reconciled::chain::{Breadth, KnownUsed, Sickness};
use reconciled::domain::{ChainId, NonceState, Payment, ReadFailureKind, Timestamp};
use serde_json::json;
use url::Url;

use super::agreement::behind;
use super::backend::{
    FINALIZED_AFTER, Reader, TestChain, authorization, failures, observed, payment, settings,
};
use super::cases::nobody;
use super::proxy::{log_blocks, proxy, refuse};

/// What an endpoint lies about.
#[derive(Clone, Copy)]
enum Lie {
    Nothing,
    UsedIsUnused,
    UnusedIsUsed,
    NoLogs,
    Failing,
}

/// An endpoint whose lies can be changed. A probe asks for two states, a nonce that is unused and one that
/// is used: their words are the only ones that are 0 or 1 and hold a whole result of one word.
async fn liar(upstream: Url) -> (Url, Arc<AtomicU8>) {
    let lie = Arc::new(AtomicU8::new(Lie::Nothing as u8));
    let told = lie.clone();
    let url = proxy(upstream, move |call, answer| {
        let lie = told.load(Ordering::SeqCst);
        if lie == Lie::NoLogs as u8 && log_blocks(call).is_some() {
            answer["result"] = json!([]);
        }
        if lie == Lie::Failing as u8 {
            return refuse(answer, -32_603, "internal error");
        }
        let states = call["method"] == "eth_call";
        let word = |bit: char| format!("{:0>64}{:0>63}{bit}", "20", "");
        let swap = match lie {
            lie if lie == Lie::UsedIsUnused as u8 => Some((word('1'), word('0'))),
            lie if lie == Lie::UnusedIsUsed as u8 => Some((word('0'), word('1'))),
            _ => None,
        };
        if let (true, Some((from, to))) = (states, swap) {
            let result = answer["result"].as_str().unwrap();
            answer["result"] = json!(result.replace(&from, &to));
        }
    })
    .await;
    (url, lie)
}

/// A chain with a final transfer, its payment, and the unused payment of somebody else.
async fn staged<C: TestChain>() -> (C, [Payment; 2], KnownUsed) {
    let chain = C::start().await;
    let landed = authorization(&chain, 1).await;
    let payments =
        [payment(&chain, &landed).await, payment(&chain, &authorization(&chain, 2).await).await];
    let mined = chain.transfer(&[landed]).await;
    chain.mine(FINALIZED_AFTER).await;
    let known = KnownUsed {
        token: chain.token(),
        payer: landed.payer,
        nonce: landed.nonce,
        block: mined.block.number,
    };
    (chain, payments, known)
}

async fn probe(reader: &Reader) -> Vec<Option<Sickness>> {
    probe_at(reader, 0).await
}

/// Probes when the local clock shows `now_secs`.
pub(super) async fn probe_at(reader: &Reader, now_secs: i64) -> Vec<Option<Sickness>> {
    let now = Timestamp::from_millis(now_secs * 1_000);
    reader.set_clock(now);
    let found = reader.chain.probe(now).await;
    found.into_iter().map(|diagnosis| diagnosis.map(|(sickness, _)| sickness)).collect()
}

pub(crate) async fn a_sick_endpoint_gives_no_evidence_until_it_answers_rightly_again<
    C: TestChain,
>() {
    let (chain, payments, known) = staged::<C>().await;
    let (url, lie) = liar(chain.url()).await;
    let mut settings = settings(&chain, &[url, chain.url()]);
    settings.known_used = vec![known];
    let reader = Reader::with(settings);
    assert_eq!(probe(&reader).await, [None, None]);
    // docs/rpc-figures.md: two heads and the chain id, one batch of states, two log reads with a header each.
    assert_eq!(reader.calls.total(), 2 * 8, "{:?}", reader.calls);
    for (told, sickness) in [
        (Lie::UsedIsUnused, Sickness::KnownNonceUnused),
        (Lie::UnusedIsUsed, Sickness::RandomNonceUsed),
        (Lie::NoLogs, Sickness::KnownLogMissing),
    ] {
        assert_eq!(probe(&reader).await, [None, None]);
        lie.store(told as u8, Ordering::SeqCst);
        assert_eq!(probe(&reader).await, [Some(sickness), None]);
        for breadth in [Breadth::FirstAnswer, Breadth::All] {
            let evidence = reader.read_at(&payments, breadth, 0).await;
            let found = failures(&evidence[1]);
            let expected: &[_] = match breadth {
                Breadth::FirstAnswer => &[None],
                Breadth::All => &[Some(ReadFailureKind::Unhealthy), None],
            };
            assert_eq!(found, expected, "{sickness}: the sick one comes last, and is not needed");
        }
        lie.store(Lie::Nothing as u8, Ordering::SeqCst);
    }
    assert_eq!(probe(&reader).await, [None, None]);
    let evidence = reader.read_at(&payments, Breadth::All, 0).await;
    assert_eq!(failures(&evidence[1]), [None, None], "it is believed again");
}

pub(crate) async fn a_settled_payment_that_all_endpoints_show_becomes_a_known_one<C: TestChain>() {
    let (chain, payments, _) = staged::<C>().await;
    let (url, lie) = liar(chain.url()).await;
    let reader = Reader::with(settings(&chain, &[url, chain.url()]));
    lie.store(Lie::UsedIsUnused as u8, Ordering::SeqCst);
    assert_eq!(probe(&reader).await, [None, None], "nothing is known yet");
    lie.store(Lie::Nothing as u8, Ordering::SeqCst);
    let NonceState::Used(_) = observed(&reader.read_one(&payments[0]).await).nonce else {
        panic!("it landed")
    };
    assert_eq!(probe(&reader).await, [None, None], "both show it");
    lie.store(Lie::UsedIsUnused as u8, Ordering::SeqCst);
    assert_eq!(probe(&reader).await, [Some(Sickness::KnownNonceUnused), None]);
}

pub(crate) async fn what_one_endpoint_alone_shows_is_never_learnt<C: TestChain>() {
    let (chain, payments, _) = staged::<C>().await;
    let (url, lie) = liar(chain.url()).await;
    let reader = Reader::with(settings(&chain, &[chain.url(), url]));
    reader.read_one(&payments[0]).await;
    lie.store(Lie::UsedIsUnused as u8, Ordering::SeqCst);
    for _ in 0..3 {
        assert_eq!(probe(&reader).await, [None, None]);
    }
}

pub(crate) async fn what_two_endpoints_show_is_asked_of_one_that_denies_it_from_the_start<
    C: TestChain,
>() {
    let (chain, payments, _) = staged::<C>().await;
    let (url, lie) = liar(chain.url()).await;
    lie.store(Lie::UsedIsUnused as u8, Ordering::SeqCst);
    let reader = Reader::with(settings(&chain, &[url, chain.url(), chain.url()]));
    reader.read_at(&payments[..1], Breadth::All, 0).await;
    assert_eq!(probe(&reader).await, [None; 3], "the candidate is confirmed, and then asked about");
    assert_eq!(probe(&reader).await, [Some(Sickness::KnownNonceUnused), None, None]);
}

pub(crate) async fn i2_a_sick_endpoint_stays_sick_while_probes_fail<C: TestChain>() {
    let (chain, payments, known) = staged::<C>().await;
    let (url, lie) = liar(chain.url()).await;
    let mut settings = settings(&chain, &[url]);
    settings.known_used = vec![known];
    let reader = Reader::with(settings);
    for (told, sickness) in [
        (Lie::UsedIsUnused, Sickness::KnownNonceUnused),
        (Lie::UnusedIsUsed, Sickness::RandomNonceUsed),
        (Lie::NoLogs, Sickness::KnownLogMissing),
    ] {
        lie.store(told as u8, Ordering::SeqCst);
        assert_eq!(probe(&reader).await, [Some(sickness)]);
        lie.store(Lie::Failing as u8, Ordering::SeqCst);
        assert_eq!(probe(&reader).await, [Some(sickness)], "no answer is not a right one");
        lie.store(told as u8, Ordering::SeqCst);
        let evidence = reader.read_one(&payments[1]).await;
        assert_eq!(failures(&evidence), [Some(ReadFailureKind::Unhealthy)]);
        lie.store(Lie::Nothing as u8, Ordering::SeqCst);
        assert_eq!(probe(&reader).await, [None]);
        assert_eq!(failures(&reader.read_one(&payments[1]).await), [None]);
    }
    lie.store(Lie::Failing as u8, Ordering::SeqCst);
    assert_eq!(probe(&reader).await, [Some(Sickness::Failing)]);
}

pub(crate) async fn a_learnt_one_without_its_log_forbids_nothing_and_is_not_asked_for_ever<
    C: TestChain,
>() {
    const DAY: i64 = 24 * 3_600;
    let (chain, payments, _) = staged::<C>().await;
    let (url, lie) = liar(chain.url()).await;
    let reader = Reader::with(settings(&chain, &[url, nobody().await]));
    reader.read_one(&payments[0]).await;
    let dead = Some(Sickness::Failing);
    assert_eq!(probe(&reader).await, [None, dead], "learnt, though another one is down");
    lie.store(Lie::NoLogs as u8, Ordering::SeqCst);
    assert_eq!(probe(&reader).await, [Some(Sickness::LearntLogMissing), dead]);
    let evidence = reader.read_one(&payments[1]).await;
    assert!(failures(&evidence).contains(&None), "its states are believed: {evidence:?}");
    // It is asked until it answers rightly, however old that has become.
    lie.store(Lie::UsedIsUnused as u8, Ordering::SeqCst);
    let liar = Some(Sickness::KnownNonceUnused);
    assert_eq!(probe(&reader).await, [liar, dead]);
    chain.mine(1).await;
    assert_eq!(probe_at(&reader, DAY + 1).await, [liar, dead]);
    lie.store(Lie::NoLogs as u8, Ordering::SeqCst);
    chain.mine(1).await;
    let shown = probe_at(&reader, DAY + 2).await;
    assert_eq!(shown, [Some(Sickness::LearntLogMissing), dead], "the state is right");
    chain.mine(1).await;
    assert_eq!(probe_at(&reader, DAY + 3).await, [None, dead], "it is no longer asked");
    lie.store(Lie::UsedIsUnused as u8, Ordering::SeqCst);
    chain.mine(1).await;
    assert_eq!(probe_at(&reader, DAY + 4).await, [None, dead]);
}

pub(crate) async fn a_random_nonce_is_asked_about_from_the_first_read_on<C: TestChain>() {
    let (chain, payments, _) = staged::<C>().await;
    let (url, lie) = liar(chain.url()).await;
    let mut settings = settings(&chain, &[url, chain.url()]);
    settings.learn_known_used = false;
    let reader = Reader::with(settings);
    assert_eq!(probe(&reader).await, [None, None]);
    assert_eq!(reader.calls.of("eth_call"), 0, "no token is known");
    reader.read_one(&payments[1]).await;
    lie.store(Lie::UnusedIsUsed as u8, Ordering::SeqCst);
    assert_eq!(probe(&reader).await, [Some(Sickness::RandomNonceUsed), None]);
    lie.store(Lie::Nothing as u8, Ordering::SeqCst);
    assert_eq!(probe(&reader).await, [None, None]);
}

pub(crate) async fn an_endpoint_that_is_down_or_serves_another_chain_is_said_to_be_so<
    C: TestChain,
>() {
    let (chain, payments, _) = staged::<C>().await;
    let reader = Reader::with(settings(&chain, &[nobody().await, chain.url()]));
    assert_eq!(probe(&reader).await, [Some(Sickness::Failing), None]);
    let evidence = reader.read_at(&payments, Breadth::All, 0).await;
    assert_eq!(failures(&evidence[1]), [Some(ReadFailureKind::Unreachable), None]);
    let mut wrong = settings(&chain, &[chain.url()]);
    wrong.chain_id = ChainId::new(8_453);
    let reader = Reader::with(wrong);
    assert_eq!(probe(&reader).await, [Some(Sickness::WrongChain)]);
}

pub(crate) async fn what_was_seen_used_does_not_become_unused<C: TestChain>() {
    let (chain, payments, _) = staged::<C>().await;
    let (url, lie) = liar(chain.url()).await;
    let reader = Reader::with(settings(&chain, &[url]));
    let NonceState::Used(_) = observed(&reader.read_one(&payments[0]).await).nonce else {
        panic!("it landed")
    };
    lie.store(Lie::UsedIsUnused as u8, Ordering::SeqCst);
    let evidence = reader.read_one(&payments[0]).await;
    assert_eq!(failures(&evidence), [Some(ReadFailureKind::BadAnswer)]);
    // Whoever has not seen it used must believe it.
    let (url, lie) = liar(chain.url()).await;
    lie.store(Lie::UsedIsUnused as u8, Ordering::SeqCst);
    let evidence = Reader::with(settings(&chain, &[url])).read_one(&payments[0]).await;
    assert_eq!(observed(&evidence).nonce, NonceState::Unused);
}

pub(crate) async fn an_older_block_says_nothing_about_what_was_seen_used<C: TestChain>() {
    let chain = C::start().await;
    let landed = authorization(&chain, 1).await;
    let payment = payment(&chain, &landed).await;
    let before = chain.head().await;
    chain.transfer(&[landed]).await;
    let urls = [chain.url(), behind(&chain, before, before).await];
    let reader = Reader::with(settings(&chain, &urls));
    let NonceState::Used(_) = observed(&reader.read_one(&payment).await).nonce else {
        panic!("it landed")
    };
    // It is the other one's turn.
    let evidence = reader.read_one(&payment).await;
    assert_eq!(failures(&evidence), [Some(ReadFailureKind::Lagging), None]);
}
