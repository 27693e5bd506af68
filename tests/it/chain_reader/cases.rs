//! What an honest chain shows.

use std::time::Duration;

use alloy_primitives::{Address, U256, keccak256};
use reconciled::chain::Breadth;
use reconciled::domain::{
    Amount, ConsumptionKind, Evidence, Finality, Inconclusive, NonceState, PaidAfter, Policy,
    ReadFailureKind, SeenTransfer, Unsettleable, Verdict, judge,
};
use url::Url;

use super::backend::{
    FINALIZED_AFTER, PAY_TO, Reader, TestChain, authorization, failures, observed, payment,
    settings,
};

/// A URL where nobody listens.
pub(super) async fn nobody() -> Url {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    Url::parse(&format!("http://{}", listener.local_addr().unwrap())).unwrap()
}

pub(super) fn used(evidence: &Evidence) -> reconciled::domain::Consumption {
    match &observed(evidence).nonce {
        NonceState::Used(consumption) => *consumption,
        other => panic!("{other:?}"),
    }
}

pub(crate) async fn an_unused_authorization_reads_unused_and_is_pending<C: TestChain>() {
    let chain = C::start().await;
    let payment = payment(&chain, &authorization(&chain, 1).await).await;
    let head = chain.head().await;
    let evidence = Reader::of(&chain).read_one(&payment).await;
    let seen = observed(&evidence);
    assert_eq!((&seen.nonce, seen.head, seen.safe), (&NonceState::Unused, head, None));
    assert!(seen.finalized.number < head.number && seen.finalized.time < head.time);
    let verdict = judge(&payment, &evidence, &Policy::default());
    assert_eq!(verdict, Verdict::Pending { as_of: head, agreeing: 1 });
}

pub(crate) async fn a_landed_transfer_reads_exactly_as_it_stands_on_chain<C: TestChain>() {
    let chain = C::start().await;
    let authorization = authorization(&chain, 1).await;
    let payment = payment(&chain, &authorization).await;
    chain.mine(2).await;
    let mined = chain.transfer(&[authorization]).await;
    let evidence = Reader::of(&chain).read_one(&payment).await;
    let consumption = used(&evidence);
    assert_eq!(consumption.log.block, mined.block);
    assert_eq!(consumption.log.tx_hash, mined.tx_hash);
    assert_eq!(consumption.log.log_index, mined.logs[0]);
    let transfer = SeenTransfer {
        log_index: mined.logs[0] + 1,
        token: chain.token(),
        from: authorization.payer,
        to: PAY_TO,
        value: Amount::new(U256::from(authorization.value)),
        at_most: None,
    };
    assert_eq!(consumption.kind, ConsumptionKind::Transferred(transfer));
    let Verdict::Settled(settlement) = judge(&payment, &evidence, &Policy::default()) else {
        panic!("{evidence:?}")
    };
    assert_eq!(settlement.finality, Finality::Tentative);
    assert_eq!(settlement.transfer.log_index, transfer.log_index);
}

pub(crate) async fn a_canceled_authorization_reads_canceled<C: TestChain>() {
    let chain = C::start().await;
    let authorization = authorization(&chain, 1).await;
    let payment = payment(&chain, &authorization).await;
    let mined = chain.cancel(&authorization).await;
    let reader = Reader::of(&chain);
    let evidence = reader.read_one(&payment).await;
    let consumption = used(&evidence);
    assert_eq!(consumption.kind, ConsumptionKind::Canceled);
    assert_eq!((consumption.log.tx_hash, consumption.log.block), (mined.tx_hash, mined.block));
    let verdict = judge(&payment, &evidence, &Policy::default());
    assert_eq!(verdict, Verdict::Inconclusive(Inconclusive::NotFinalized));
    chain.mine(FINALIZED_AFTER).await;
    let verdict = judge(&payment, &reader.read_one(&payment).await, &Policy::default());
    let Verdict::Unsettleable { reason, .. } = verdict else { panic!("{verdict:?}") };
    assert_eq!(reason, Unsettleable::Canceled);
}

async fn is_used_elsewhere<C: TestChain>(to: Address, value: u64) {
    let chain = C::start().await;
    let wanted = authorization(&chain, 1).await;
    let payment = payment(&chain, &wanted).await;
    let mut other = wanted;
    (other.to, other.value) = (to, value);
    chain.transfer(&[other]).await;
    chain.mine(FINALIZED_AFTER).await;
    let evidence = Reader::of(&chain).read_one(&payment).await;
    let ConsumptionKind::Transferred(seen) = used(&evidence).kind else { panic!("{evidence:?}") };
    assert_eq!((seen.to, seen.value), (to, Amount::new(U256::from(value))));
    let verdict = judge(&payment, &evidence, &Policy::default());
    let Verdict::Unsettleable { reason, .. } = verdict else { panic!("{verdict:?}") };
    assert_eq!(reason, Unsettleable::UsedElsewhere);
}

pub(crate) async fn a_transfer_to_somebody_else_is_used_elsewhere<C: TestChain>() {
    is_used_elsewhere::<C>(Address::repeat_byte(0x99), 1_000_000).await;
}

pub(crate) async fn a_short_amount_is_used_elsewhere<C: TestChain>() {
    is_used_elsewhere::<C>(PAY_TO, 999_999).await;
}

pub(crate) async fn a_reverted_transaction_leaves_the_authorization_unused<C: TestChain>() {
    let chain = C::start().await;
    let authorization = authorization(&chain, 1).await;
    let payment = payment(&chain, &authorization).await;
    chain.fail(&authorization).await;
    chain.mine(FINALIZED_AFTER).await;
    let reader = Reader::of(&chain);
    let evidence = reader.read_one(&payment).await;
    assert_eq!(observed(&evidence).nonce, NonceState::Unused);
    // Anyone may still submit it.
    chain.transfer(&[authorization]).await;
    let verdict = judge(&payment, &reader.read_one(&payment).await, &Policy::default());
    assert!(matches!(verdict, Verdict::Settled(_)), "{verdict:?}");
}

pub(crate) async fn an_authorization_past_its_window_expires_only_when_finalized<C: TestChain>() {
    let chain = C::start().await;
    let payment = payment(&chain, &authorization(&chain, 1).await).await;
    let reader = Reader::of(&chain);
    // Past the window at the head, and not yet at the finalized block.
    chain.advance(602).await;
    let verdict = judge(&payment, &reader.read_one(&payment).await, &Policy::default());
    assert!(matches!(verdict, Verdict::Pending { .. }), "{verdict:?}");
    chain.mine(FINALIZED_AFTER).await;
    let verdict = judge(&payment, &reader.read_one(&payment).await, &Policy::default());
    let Verdict::Unsettleable { reason, .. } = verdict else { panic!("{verdict:?}") };
    assert_eq!(reason, Unsettleable::Expired);
}

pub(crate) async fn four_in_one_transaction_have_their_own_log_indices<C: TestChain>() {
    let chain = C::start().await;
    let mut authorizations = Vec::new();
    let mut payments = Vec::new();
    for n in 1..=4 {
        let mut authorization = authorization(&chain, n).await;
        authorization.value = 100 * n;
        payments.push(payment(&chain, &authorization).await);
        authorizations.push(authorization);
    }
    let mined = chain.transfer(&authorizations).await;
    let evidence = Reader::of(&chain).read(&payments).await;
    for ((evidence, payment), log_index) in evidence.iter().zip(&payments).zip(&mined.logs) {
        let consumption = used(evidence);
        assert_eq!(
            (consumption.log.tx_hash, consumption.log.log_index),
            (mined.tx_hash, *log_index)
        );
        let Verdict::Settled(settlement) = judge(payment, evidence, &Policy::default()) else {
            panic!("{evidence:?}")
        };
        assert_eq!(settlement.transfer.log_index, log_index + 1);
        assert_eq!(settlement.transfer.value, payment.amount);
    }
}

pub(crate) async fn two_payments_with_one_authorization_see_the_same_transfer<C: TestChain>() {
    let chain = C::start().await;
    let authorization = authorization(&chain, 1).await;
    let payment = payment(&chain, &authorization).await;
    let mined = chain.transfer(&[authorization]).await;
    let evidence = Reader::of(&chain).read(&[payment.clone(), payment]).await;
    assert_eq!(used(&evidence[0]), used(&evidence[1]));
    assert_eq!(used(&evidence[0]).log.tx_hash, mined.tx_hash);
}

pub(crate) async fn a_reorg_removes_a_transfer<C: TestChain>() {
    let chain = C::start().await;
    let authorization = authorization(&chain, 1).await;
    let payment = payment(&chain, &authorization).await;
    let reader = Reader::of(&chain);
    chain.transfer(&[authorization]).await;
    used(&reader.read_one(&payment).await);
    chain.reorg(1).await;
    let evidence = reader.read_one(&payment).await;
    assert_eq!(observed(&evidence).nonce, NonceState::Unused);
}

pub(crate) async fn a_reorg_moves_a_transfer<C: TestChain>() {
    let chain = C::start().await;
    let authorization = authorization(&chain, 1).await;
    let payment = payment(&chain, &authorization).await;
    let reader = Reader::of(&chain);
    let first = chain.transfer(&[authorization]).await;
    assert_eq!(used(&reader.read_one(&payment).await).log.block, first.block);
    chain.reorg(1).await;
    let second = chain.transfer(&[authorization]).await;
    assert_ne!(first.block.hash, second.block.hash);
    let moved = used(&reader.read_one(&payment).await);
    assert_eq!((moved.log.block, moved.log.tx_hash), (second.block, second.tx_hash));
}

pub(crate) async fn a_settlement_becomes_final<C: TestChain>() {
    let chain = C::start().await;
    let authorization = authorization(&chain, 1).await;
    let payment = payment(&chain, &authorization).await;
    chain.transfer(&[authorization]).await;
    let reader = Reader::of(&chain);
    let finality = |evidence: &Evidence, policy: &Policy| match judge(&payment, evidence, policy) {
        Verdict::Settled(settlement) => Some(settlement.finality),
        verdict => {
            assert_eq!(verdict, Verdict::Inconclusive(Inconclusive::TooShallow));
            None
        }
    };
    let deep = Policy { paid_after: PaidAfter::Finalized, ..Policy::default() };
    let shallow = reader.read_one(&payment).await;
    assert_eq!(finality(&shallow, &Policy::default()), Some(Finality::Tentative));
    assert_eq!(finality(&shallow, &deep), None);
    chain.mine(FINALIZED_AFTER).await;
    assert_eq!(finality(&reader.read_one(&payment).await, &deep), Some(Finality::Final));
}

pub(crate) async fn without_multicall3_the_answers_are_the_same<C: TestChain>() {
    let chain = C::start().await;
    let mut payments = Vec::new();
    for n in 1..=4 {
        payments.push(payment(&chain, &authorization(&chain, n).await).await);
    }
    let used_one = authorization(&chain, 10).await;
    payments.push(payment(&chain, &used_one).await);
    let mut no_code = payments[0].clone();
    no_code.token = Address::repeat_byte(0x55);
    payments.push(no_code);
    chain.transfer(&[used_one]).await;
    chain.remove_multicall().await;
    // Multicall3 anywhere else is as absent: the same code path, and the first call finds out.
    let reader = Reader::of(&chain);
    let first = reader.read(&payments).await;
    let calls = reader.calls.of("eth_call");
    assert_eq!(calls, 1 + 6, "one try at Multicall3, then one call each");
    assert_eq!(reader.calls.of("eth_chainId"), 2, "once with the heads, once with the states");
    let second = reader.read(&payments).await;
    assert_eq!(reader.calls.of("eth_call"), calls + 6, "its absence is remembered");
    assert_eq!(first, second);
    reader.read_at(&payments, Breadth::FirstAnswer, 601).await;
    assert_eq!(reader.calls.of("eth_call"), calls + 6 + 7, "after a while it is tried again");
    for evidence in &first[..4] {
        assert_eq!(observed(evidence).nonce, NonceState::Unused);
    }
    assert!(matches!(used(&first[4]).kind, ConsumptionKind::Transferred(_)));
    assert_eq!(failures(&first[5]), [Some(ReadFailureKind::NoCode)]);
    let mut wrong = settings(&chain, &[chain.url()]);
    wrong.chain_id = reconciled::domain::ChainId::new(1);
    payments.iter_mut().for_each(|payment| payment.chain_id = wrong.chain_id);
    for evidence in Reader::with(wrong).read(&payments).await {
        assert_eq!(failures(&evidence), [Some(ReadFailureKind::WrongChain)]);
    }
}

pub(crate) async fn no_code_at_one_token_does_not_touch_its_neighbours<C: TestChain>() {
    let chain = C::start().await;
    let landed = authorization(&chain, 1).await;
    let mut payments = [
        payment(&chain, &landed).await,
        payment(&chain, &authorization(&chain, 2).await).await,
        payment(&chain, &authorization(&chain, 3).await).await,
    ];
    payments[1].token = Address::repeat_byte(0x55);
    chain.transfer(&[landed]).await;
    let evidence = Reader::of(&chain).read(&payments).await;
    assert!(matches!(used(&evidence[0]).kind, ConsumptionKind::Transferred(_)));
    assert_eq!(failures(&evidence[1]), [Some(ReadFailureKind::NoCode)]);
    assert_eq!(observed(&evidence[2]).nonce, NonceState::Unused);
    let verdict = judge(&payments[1], &evidence[1], &Policy::default());
    assert_eq!(verdict, Verdict::Inconclusive(Inconclusive::ReadFailed(ReadFailureKind::NoCode)));
}

pub(crate) async fn another_chain_id_is_the_wrong_chain<C: TestChain>() {
    let chain = C::start().await;
    let mut payment = payment(&chain, &authorization(&chain, 1).await).await;
    let mut settings = settings(&chain, &[chain.url()]);
    settings.chain_id = reconciled::domain::ChainId::new(8_453);
    payment.chain_id = settings.chain_id;
    let evidence = Reader::with(settings).read_one(&payment).await;
    assert_eq!(failures(&evidence), [Some(ReadFailureKind::WrongChain)]);
}

pub(crate) async fn an_endpoint_that_is_down_is_passed_over<C: TestChain>() {
    let chain = C::start().await;
    let authorization = authorization(&chain, 1).await;
    let payment = payment(&chain, &authorization).await;
    chain.transfer(&[authorization]).await;
    let reader = Reader::with(settings(&chain, &[nobody().await, chain.url(), nobody().await]));
    let evidence = reader.read_one(&payment).await;
    assert_eq!(failures(&evidence), [Some(ReadFailureKind::Unreachable), None]);
    assert_eq!(evidence.readings[0].endpoint.as_str(), "a");
    assert_eq!(evidence.readings[1].endpoint.as_str(), "b");
    assert_eq!(
        reader.calls.with_outcome("unreachable"),
        3,
        "head, finalized and the chain id, in one batch"
    );
    let verdict = judge(&payment, &evidence, &Policy::default());
    assert!(matches!(verdict, Verdict::Settled(_)), "{verdict:?}");
}

pub(crate) async fn every_endpoint_is_asked_when_breadth_is_all<C: TestChain>() {
    let chain = C::start().await;
    let payment = payment(&chain, &authorization(&chain, 1).await).await;
    chain.advance(700).await;
    chain.mine(FINALIZED_AFTER).await;
    let urls = [chain.url(), nobody().await, chain.url()];
    let reader = Reader::with(settings(&chain, &urls));
    let evidence = reader.read_at(std::slice::from_ref(&payment), Breadth::All, 0).await.remove(0);
    assert_eq!(failures(&evidence), [None, Some(ReadFailureKind::Unreachable), None]);
    let names: Vec<_> = evidence.readings.iter().map(|r| r.endpoint.as_str()).collect();
    assert_eq!(names, ["a", "b", "c"]);
    let verdict = judge(&payment, &evidence, &Policy { quorum: 2, ..Policy::default() });
    assert!(matches!(verdict, Verdict::Unsettleable { .. }), "{verdict:?}");
    let verdict = judge(&payment, &evidence, &Policy { quorum: 3, ..Policy::default() });
    assert!(!matches!(verdict, Verdict::Unsettleable { .. }), "{verdict:?}");
}

pub(crate) async fn a_head_that_stands_still_gives_no_negative_but_still_a_transfer<
    C: TestChain,
>() {
    let chain = C::start().await;
    let landed = authorization(&chain, 1).await;
    let payments =
        [payment(&chain, &landed).await, payment(&chain, &authorization(&chain, 2).await).await];
    chain.transfer(&[landed]).await;
    let reader = Reader::of(&chain);
    let at = async |secs| reader.read_at(&payments, Breadth::FirstAnswer, secs).await;
    assert_eq!(observed(&at(1_000).await[1]).nonce, NonceState::Unused);
    assert_eq!(observed(&at(1_060).await[1]).nonce, NonceState::Unused);
    let stale = at(1_061).await;
    assert!(matches!(used(&stale[0]).kind, ConsumptionKind::Transferred(_)));
    assert_eq!(failures(&stale[1]), [Some(ReadFailureKind::StaleHead)]);
    chain.mine(1).await;
    assert_eq!(observed(&at(1_062).await[1]).nonce, NonceState::Unused);
    assert_eq!(observed(&at(-5_000).await[1]).nonce, NonceState::Unused, "the clock went back");
}

pub(crate) async fn an_old_payment_and_a_new_one_are_both_found<C: TestChain>() {
    let chain = C::start().await;
    let old = authorization(&chain, 1).await;
    let mut payments = vec![payment(&chain, &old).await];
    let old_mined = chain.transfer(&[old]).await;
    for _ in 0..3 {
        chain.mine(40).await;
        chain.advance(3_600).await;
    }
    let new = authorization(&chain, 2).await;
    payments.push(payment(&chain, &new).await);
    let new_mined = chain.transfer(&[new]).await;
    chain.mine(FINALIZED_AFTER).await;
    let mut settings = settings(&chain, &[chain.url()]);
    settings.log_range_max = 16;
    settings.block_time = Duration::from_secs(2);
    let reader = Reader::with(settings);
    let evidence = reader.read(&payments).await;
    assert_eq!(used(&evidence[0]).log.block, old_mined.block);
    assert_eq!(used(&evidence[1]).log.block, new_mined.block);
    assert!(reader.calls.of("eth_getLogs") <= 6, "{:?}", reader.calls);
    assert!(reader.calls.of("eth_getBlockByNumber") <= 40, "{:?}", reader.calls);
}

pub(crate) async fn a_thousand_unused_payments_take_few_requests<C: TestChain>() {
    let chain = C::start().await;
    let one = payment(&chain, &authorization(&chain, 1).await).await;
    let payments: Vec<_> = (0..1_000)
        .map(|n| {
            let mut payment = one.clone();
            payment.nonce = keccak256(format!("nonce {n}"));
            payment
        })
        .collect();
    let reader = Reader::of(&chain);
    for evidence in reader.read(&payments).await {
        assert_eq!(observed(&evidence).nonce, NonceState::Unused);
    }
    assert_eq!(
        reader.calls.total(),
        1 + 2 + 4,
        "the chain id once, two heads, four batches: {:?}",
        reader.calls
    );
}

pub(crate) async fn a_hundred_landed_payments_take_few_requests<C: TestChain>() {
    let chain = C::start().await;
    let mut authorizations = Vec::new();
    let mut payments = Vec::new();
    for n in 0..100 {
        let authorization = authorization(&chain, n).await;
        payments.push(payment(&chain, &authorization).await);
        authorizations.push(authorization);
    }
    let mut mined = Vec::new();
    for ten in authorizations.chunks(10) {
        mined.push(chain.transfer(ten).await);
    }
    let reader = Reader::of(&chain);
    let evidence = reader.read(&payments).await;
    for (n, evidence) in evidence.iter().enumerate() {
        let consumption = used(evidence);
        assert_eq!(consumption.log.block, mined[n / 10].block);
        assert_eq!(consumption.log.log_index, mined[n / 10].logs[n % 10]);
        let verdict = judge(&payments[n], evidence, &Policy::default());
        assert!(matches!(verdict, Verdict::Settled(_)), "{verdict:?}");
    }
    assert_eq!(reader.calls.of("eth_call"), 1);
    assert_eq!(reader.calls.of("eth_getLogs"), 2, "{:?}", reader.calls);
    // Two heads, at most two to find the first block, the last block of each log read, ten blocks and at most
    // the head again.
    assert!(reader.calls.of("eth_getBlockByNumber") <= 2 + 2 + 2 + 11, "{:?}", reader.calls);
}
