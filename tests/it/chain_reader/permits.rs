//! What an honest chain shows of Permit2.

use alloy_primitives::{Address, B256, U256};
use reconciled::domain::{
    Amount, ConsumptionKind, Inconclusive, NonceState, Policy, ReadFailureKind, SeenTransfer,
    Unsettleable, Verdict, judge,
};

use super::backend::{
    FINALIZED_AFTER, PAY_TO, Permit, Reader, TestChain, Through, authorization, failures, observed,
    payment, permit, permit_payment, settings,
};
use super::cases::used;

fn amount(units: u64) -> Amount {
    Amount::new(U256::from(units))
}

fn word(nonce: B256) -> U256 {
    U256::from_be_bytes(nonce.0) >> 8
}

fn bit(nonce: B256) -> U256 {
    U256::ONE << usize::from(nonce[31])
}

pub(crate) async fn an_unused_permit_is_pending_and_a_landed_one_reads_as_it_stands_on_chain<
    C: TestChain,
>() {
    let chain = C::start().await;
    let permit = permit(&chain, 1).await;
    let payment = permit_payment(&chain, &permit).await;
    let reader = Reader::of(&chain);
    let evidence = reader.read_one(&payment).await;
    assert_eq!(observed(&evidence).nonce, NonceState::Unused);
    let verdict = judge(&payment, &evidence, &Policy::default());
    assert_eq!(verdict, Verdict::Pending { as_of: chain.head().await, agreeing: 1 });

    chain.mine(2).await;
    let mined = chain.settle_permits(&[permit], Through::Nobody).await;
    let evidence = reader.read_one(&payment).await;
    let consumption = used(&evidence);
    let log = (consumption.log.block, consumption.log.tx_hash, consumption.log.log_index);
    assert_eq!(log, (mined.block, mined.tx_hash, mined.logs[0]));
    let transfer = SeenTransfer {
        log_index: mined.logs[0],
        token: chain.token(),
        from: permit.owner,
        to: PAY_TO,
        value: amount(1_000_000),
        at_most: None,
    };
    assert_eq!(consumption.kind, ConsumptionKind::Transferred(transfer));
    let verdict = judge(&payment, &evidence, &Policy::default());
    assert!(matches!(verdict, Verdict::Settled(_)), "{verdict:?}");
}

pub(crate) async fn upto_settles_for_what_a_trusted_facilitator_moved<C: TestChain>() {
    let chain = C::start().await;
    let permit = Permit { upto: Some(250), ..permit(&chain, 1).await };
    let payment = permit_payment(&chain, &permit).await;
    chain.settle_permits(&[permit], Through::Nobody).await;
    let evidence = Reader::of(&chain).read_one(&payment).await;
    let Verdict::Settled(settlement) = judge(&payment, &evidence, &Policy::default()) else {
        panic!("{evidence:?}")
    };
    assert_eq!(settlement.transfer.value, amount(250));
    // To a reader that trusts nobody's meter, it is other money than was asked for.
    let mut trusting_nobody = settings(&chain, &[chain.url()]);
    trusting_nobody.permit2.upto_facilitators.clear();
    chain.mine(FINALIZED_AFTER).await;
    let evidence = Reader::with(trusting_nobody).read_one(&payment).await;
    let verdict = judge(&payment, &evidence, &Policy::default());
    let Verdict::Unsettleable { reason, .. } = verdict else { panic!("{verdict:?}") };
    assert_eq!(reason, Unsettleable::UsedElsewhere);
}

/// The payer signed what was asked, and then its nonce once more for the upto proxy, to choose the amount.
pub(crate) async fn i6_an_amount_that_the_payer_or_a_batch_chose_pays_only_if_it_is_all<
    C: TestChain,
>() {
    for through in [Through::Payer, Through::Multicall3] {
        for (value, is_paid) in [(1, false), (999_999, false), (1_000_000, true)] {
            let chain = C::start().await;
            let permit = Permit { upto: Some(value), ..permit(&chain, 1).await };
            let payment = permit_payment(&chain, &permit).await;
            chain.settle_permits(&[permit], through).await;
            chain.mine(FINALIZED_AFTER).await;
            let evidence = Reader::of(&chain).read_one(&payment).await;
            let verdict = judge(&payment, &evidence, &Policy::default());
            let found = match verdict {
                Verdict::Settled(settlement) => Ok(settlement.transfer.value),
                Verdict::Unsettleable { reason, .. } => Err(reason),
                other => panic!("{value} {through:?}: {other:?}"),
            };
            let right = if is_paid { Ok(amount(value)) } else { Err(Unsettleable::UsedElsewhere) };
            assert_eq!(found, right, "{value} {through:?}");
        }
    }
}

pub(crate) async fn several_permits_through_multicall3_have_their_own_transfers<C: TestChain>() {
    let chain = C::start().await;
    let mut permits = Vec::new();
    // Three of one owner for the same amount, and one of another.
    for (n, name) in [(1, 1), (1, 2), (1, 3), (2, 4)] {
        permits.push(Permit { nonce: B256::repeat_byte(name), ..permit(&chain, n).await });
    }
    let mut payments = Vec::new();
    for permit in &permits {
        payments.push(permit_payment(&chain, permit).await);
    }
    let mined = chain.settle_permits(&permits, Through::Multicall3).await;
    let evidence = Reader::of(&chain).read(&payments).await;
    for ((evidence, payment), log_index) in evidence.iter().zip(&payments).zip(&mined.logs) {
        let Verdict::Settled(settlement) = judge(payment, evidence, &Policy::default()) else {
            panic!("{evidence:?}")
        };
        let transfer = settlement.transfer;
        assert_eq!((transfer.tx_hash, transfer.log_index), (mined.tx_hash, *log_index));
    }
}

pub(crate) async fn a_permit_settled_in_an_unseen_call_proves_nothing<C: TestChain>() {
    let chain = C::start().await;
    let permit = permit(&chain, 1).await;
    let payment = permit_payment(&chain, &permit).await;
    chain.settle_permits(&[permit], Through::Obscurity).await;
    // Nor does it when its owner invalidates what he has used.
    chain.invalidate(permit.owner, word(permit.nonce), bit(permit.nonce)).await;
    chain.mine(FINALIZED_AFTER).await;
    let evidence = Reader::of(&chain).read_one(&payment).await;
    let nonce = &observed(&evidence).nonce;
    assert!(matches!(nonce, NonceState::UsedWithoutLog { .. }), "{nonce:?}");
    let verdict = judge(&payment, &evidence, &Policy::default());
    assert_eq!(verdict, Verdict::Inconclusive(Inconclusive::UsedWithoutLog));
}

pub(crate) async fn an_invalidated_nonce_is_canceled_and_a_used_one_stays_used<C: TestChain>() {
    let chain = C::start().await;
    let open = permit(&chain, 1).await;
    // Two nonces of one word, one of them used before the word is burned.
    let mut sibling = open.nonce;
    sibling.0[31] ^= 1;
    let landed = Permit { nonce: sibling, ..open };
    let payments = [permit_payment(&chain, &open).await, permit_payment(&chain, &landed).await];
    chain.settle_permits(&[landed], Through::Nobody).await;
    let mined = chain.invalidate(open.owner, word(open.nonce), U256::MAX).await;
    let reader = Reader::of(&chain);
    let evidence = reader.read(&payments).await;
    let consumption = used(&evidence[0]);
    assert_eq!(consumption.kind, ConsumptionKind::Canceled);
    let log = (consumption.log.block, consumption.log.tx_hash, consumption.log.log_index);
    assert_eq!(log, (mined.block, mined.tx_hash, mined.logs[0]));
    let verdict = judge(&payments[1], &evidence[1], &Policy::default());
    assert!(matches!(verdict, Verdict::Settled(_)), "{verdict:?}");
    chain.mine(FINALIZED_AFTER).await;
    let evidence = reader.read_one(&payments[0]).await;
    let verdict = judge(&payments[0], &evidence, &Policy::default());
    let Verdict::Unsettleable { reason, .. } = verdict else { panic!("{verdict:?}") };
    assert_eq!(reason, Unsettleable::Canceled);
}

pub(crate) async fn a_nonce_used_for_another_payment_is_used_elsewhere<C: TestChain>() {
    for (to, value) in [(Address::repeat_byte(0x99), 1_000_000), (PAY_TO, 999_999)] {
        let chain = C::start().await;
        let wanted = permit(&chain, 1).await;
        let payment = permit_payment(&chain, &wanted).await;
        let other = Permit { to, amount: value, ..wanted };
        chain.settle_permits(&[other], Through::Nobody).await;
        chain.mine(FINALIZED_AFTER).await;
        let evidence = Reader::of(&chain).read_one(&payment).await;
        let ConsumptionKind::Transferred(seen) = used(&evidence).kind else {
            panic!("{evidence:?}")
        };
        assert_eq!((seen.to, seen.value), (to, amount(value)));
        let verdict = judge(&payment, &evidence, &Policy::default());
        let Verdict::Unsettleable { reason, .. } = verdict else { panic!("{verdict:?}") };
        assert_eq!(reason, Unsettleable::UsedElsewhere);
    }
}

pub(crate) async fn other_transfers_of_the_payer_are_told_from_the_payments_own<C: TestChain>() {
    let chain = C::start().await;
    let wanted = permit(&chain, 1).await;
    let payment = permit_payment(&chain, &wanted).await;
    // The same payer pays the same shop the same amount, by another permit and by an authorization.
    let other = Permit { nonce: B256::repeat_byte(0x44), ..wanted };
    chain.settle_permits(&[other], Through::Nobody).await;
    chain.transfer(&[authorization(&chain, 1).await]).await;
    let reader = Reader::of(&chain);
    assert_eq!(observed(&reader.read_one(&payment).await).nonce, NonceState::Unused);
    let mined = chain.settle_permits(&[wanted], Through::Nobody).await;
    chain
        .settle_permits(&[Permit { nonce: B256::repeat_byte(0x45), ..wanted }], Through::Nobody)
        .await;
    assert_eq!(used(&reader.read_one(&payment).await).log.tx_hash, mined.tx_hash);
}

pub(crate) async fn a_permit_expires_only_after_its_deadline_and_finalized<C: TestChain>() {
    let chain = C::start().await;
    let permit = permit(&chain, 1).await;
    let payment = permit_payment(&chain, &permit).await;
    let reader = Reader::of(&chain);
    let left = permit.deadline - chain.head().await.time.as_secs();
    chain.advance(left).await;
    assert_eq!(chain.head().await.time.as_secs(), permit.deadline);
    // Blocks are a second apart: each is the finalized one some blocks later.
    let mut expired = false;
    for _ in 0..2 * FINALIZED_AFTER {
        let evidence = reader.read_one(&payment).await;
        let is_over = observed(&evidence).finalized.time.as_secs() > permit.deadline;
        match judge(&payment, &evidence, &Policy::default()) {
            Verdict::Pending { .. } => assert!(!is_over),
            Verdict::Unsettleable { reason, .. } => {
                assert_eq!(reason, Unsettleable::Expired);
                assert!(is_over);
                expired = true;
            }
            other => panic!("{other:?}"),
        }
        chain.mine(1).await;
    }
    assert!(expired);
}

pub(crate) async fn a_mixed_batch_is_one_state_read_and_words_are_shared<C: TestChain>() {
    let chain = C::start().await;
    let first = permit(&chain, 1).await;
    let mut payments = Vec::new();
    for n in 0..20 {
        let mut nonce = first.nonce;
        nonce.0[31] = n;
        payments.push(permit_payment(&chain, &Permit { nonce, ..first }).await);
        payments.push(payment(&chain, &authorization(&chain, u64::from(n)).await).await);
    }
    let landed = authorization(&chain, 3).await;
    payments.push(payment(&chain, &landed).await);
    payments.push(permit_payment(&chain, &first).await);
    let reader = Reader::of(&chain);
    for evidence in reader.read(&payments).await {
        assert_eq!(observed(&evidence).nonce, NonceState::Unused);
    }
    assert_eq!(reader.calls.of("eth_call"), 1);
    chain.transfer(&[landed]).await;
    chain.settle_permits(&[first], Through::Nobody).await;
    let evidence = reader.read(&payments).await;
    for (evidence, payment) in evidence.iter().zip(&payments).rev().take(2) {
        let verdict = judge(payment, evidence, &Policy::default());
        assert!(matches!(verdict, Verdict::Settled(_)), "{verdict:?}");
    }
    // Without Multicall3: one call per word and authorization, and the same answers.
    chain.remove_multicall().await;
    let reader = Reader::of(&chain);
    let again = reader.read(&payments).await;
    for (one, other) in evidence.iter().zip(&again) {
        assert_eq!(observed(one).nonce, observed(other).nonce);
    }
    let words = payments.iter().filter(|p| p.nonce.0[..31] == first.nonce.0[..31]).count();
    assert!(words > 20 && reader.calls.of("eth_call") <= 1 + 20 + 2, "{:?}", reader.calls);
}

pub(crate) async fn a_hundred_landed_permits_take_few_requests<C: TestChain>() {
    let chain = C::start().await;
    let mut payments = Vec::new();
    let mut permits = Vec::new();
    for n in 0..100 {
        let permit = permit(&chain, n).await;
        payments.push(permit_payment(&chain, &permit).await);
        permits.push(permit);
    }
    for permit in &permits {
        chain.settle_permits(std::slice::from_ref(permit), Through::Nobody).await;
    }
    let reader = Reader::of(&chain);
    for (evidence, payment) in reader.read(&payments).await.iter().zip(&payments) {
        let verdict = judge(payment, evidence, &Policy::default());
        assert!(matches!(verdict, Verdict::Settled(_)), "{verdict:?}");
    }
    assert_eq!((reader.calls.of("eth_call"), reader.calls.of("eth_getLogs")), (1, 1));
    assert_eq!(reader.calls.of("eth_getTransactionByHash"), 100, "one each, in one batch");
    assert_eq!(reader.calls.of("eth_getTransactionReceipt"), 0);
}

pub(crate) async fn a_reorg_removes_and_moves_a_permits_transfer<C: TestChain>() {
    let chain = C::start().await;
    let permit = permit(&chain, 1).await;
    let payment = permit_payment(&chain, &permit).await;
    let reader = Reader::of(&chain);
    chain.settle_permits(&[permit], Through::Nobody).await;
    used(&reader.read_one(&payment).await);
    chain.reorg(1).await;
    assert_eq!(observed(&reader.read_one(&payment).await).nonce, NonceState::Unused);
    let moved = chain.settle_permits(&[permit], Through::Nobody).await;
    assert_eq!(used(&reader.read_one(&payment).await).log.block, moved.block);
}

pub(crate) async fn a_call_of_an_unknown_proxy_proves_nothing_and_no_permit2_is_no_code<
    C: TestChain,
>() {
    let chain = C::start().await;
    let permit = permit(&chain, 1).await;
    let payment = permit_payment(&chain, &permit).await;
    chain.settle_permits(&[permit], Through::Nobody).await;
    let mut unknown = settings(&chain, &[chain.url()]);
    unknown.permit2.proxies = vec![Address::repeat_byte(0x55)];
    let evidence = Reader::with(unknown).read_one(&payment).await;
    assert!(matches!(observed(&evidence).nonce, NonceState::UsedWithoutLog { .. }));
    let mut nowhere = settings(&chain, &[chain.url()]);
    nowhere.permit2.permit2 = Address::repeat_byte(0x55);
    let evidence = Reader::with(nowhere).read_one(&payment).await;
    assert_eq!(failures(&evidence), [Some(ReadFailureKind::NoCode)]);
}
