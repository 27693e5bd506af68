//! Payers with too many logs for a search, of their own making or a stranger's.

use alloy_primitives::{Address, B256, keccak256};
use reconciled::domain::{
    NonceState, Payment, Policy, ReadFailureKind, Unsettleable, Verdict, judge,
};
use serde_json::{Value, json};
use url::Url;

use super::backend::{
    FINALIZED_AFTER, Permit, Reader, TestChain, Through, failures, observed, permit,
    permit_payment, settings,
};
use super::proxy::{asks_by_hash, log_blocks, proxy, refuse};

const TRANSFER: &str = "0xddf252ad1be2c89b69c2b068fc378daa952ba7f163c4a11628f55a4df523b3ef";

/// A chain with a landed permit of each of these payers, and their payments.
async fn staged<C: TestChain>(payers: &[u64]) -> (C, Vec<Payment>) {
    let chain = C::start().await;
    let mut payments = Vec::new();
    for n in payers {
        let permit = permit(&chain, *n).await;
        payments.push(permit_payment(&chain, &permit).await);
        chain.settle_permits(&[permit], Through::Nobody).await;
    }
    chain.mine(FINALIZED_AFTER).await;
    (chain, payments)
}

/// Whether a call searches for logs of this payer.
fn is_about(call: &Value, payer: Address) -> bool {
    let payers = &call["params"][0]["topics"][1];
    log_blocks(call).is_some()
        && !asks_by_hash(call)
        && payers.as_array().is_some_and(|all| all.contains(&json!(payer.into_word())))
}

/// An endpoint that shows so many more transfers of nothing by this payer, ahead of the others.
async fn with_noise(chain: &impl TestChain, payer: Address, count: u64) -> Url {
    let token = chain.token();
    proxy(chain.url(), move |call, answer| {
        if !is_about(call, payer) {
            return;
        }
        let noise = (0..count).map(|n| {
            json!({
                "address": token,
                "topics": [TRANSFER, payer.into_word(), B256::with_last_byte(1)],
                "data": B256::ZERO,
                "blockNumber": call["params"][0]["fromBlock"],
                "blockHash": B256::ZERO,
                "transactionHash": keccak256(n.to_be_bytes()),
                "logIndex": "0x0",
            })
        });
        let mut logs: Vec<Value> = noise.collect();
        logs.append(answer["result"].as_array_mut().unwrap());
        answer["result"] = json!(logs);
    })
    .await
}

pub(crate) async fn i11_a_payer_with_too_many_logs_takes_nothing_from_the_others<C: TestChain>() {
    let (chain, payments) = staged::<C>(&[1, 2, 3]).await;
    let url = with_noise(&chain, payments[1].payer, 5_001).await;
    let evidence = Reader::with(settings(&chain, &[url])).read(&payments).await;
    assert_eq!(failures(&evidence[1]), [Some(ReadFailureKind::RangeRefused)], "he goes without");
    for place in [0, 2] {
        let verdict = judge(&payments[place], &evidence[place], &Policy::default());
        assert!(matches!(verdict, Verdict::Settled(_)), "{:?}", evidence[place]);
    }
}

pub(crate) async fn i11_a_payer_whose_logs_are_refused_takes_nothing_from_the_others<
    C: TestChain,
>() {
    let (chain, payments) = staged::<C>(&[1, 2, 3, 4, 5, 6, 7]).await;
    let payer = payments[2].payer;
    // Whatever the range: one block of his is too much already.
    let url = proxy(chain.url(), move |call, answer| {
        if is_about(call, payer) {
            refuse(answer, -32_005, "query returned more than 10000 results");
        }
    })
    .await;
    let reader = Reader::with(settings(&chain, &[url]));
    let evidence = reader.read(&payments).await;
    for (place, (payment, evidence)) in payments.iter().zip(&evidence).enumerate() {
        match place {
            2 => assert_eq!(failures(evidence), [Some(ReadFailureKind::RangeRefused)]),
            _ => {
                let verdict = judge(payment, evidence, &Policy::default());
                assert!(matches!(verdict, Verdict::Settled(_)), "{place}: {evidence:?}");
            }
        }
    }
    assert!(reader.calls.of("eth_getLogs") <= 60, "{:?}", reader.calls);
}

/// Anybody can have a token move nothing in anybody's name, which logs a transfer all the same.
pub(crate) async fn transfers_of_nothing_in_a_payer_s_name_hide_nothing<C: TestChain>() {
    let chain = C::start().await;
    let wanted = permit(&chain, 1).await;
    let payment = permit_payment(&chain, &wanted).await;
    let elsewhere = Permit { to: Address::repeat_byte(0x99), ..wanted };
    chain.settle_permits(&[elsewhere], Through::Nobody).await;
    chain.mine(FINALIZED_AFTER).await;
    let url = with_noise(&chain, payment.payer, 1_000).await;
    let evidence = Reader::with(settings(&chain, &[url])).read_one(&payment).await;
    assert!(matches!(observed(&evidence).nonce, NonceState::Used(_)), "{evidence:?}");
    let verdict = judge(&payment, &evidence, &Policy::default());
    let Verdict::Unsettleable { reason, .. } = verdict else { panic!("{verdict:?}") };
    assert_eq!(reason, Unsettleable::UsedElsewhere);
}
