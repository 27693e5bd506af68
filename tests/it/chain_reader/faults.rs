//! What a faulty endpoint in front of an honest chain must not make us believe.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use alloy_primitives::{Address, B256};
use reconciled::chain::{Breadth, ChainSettings};
use reconciled::domain::{
    ConsumptionKind, Evidence, Inconclusive, NonceState, Payment, Policy, ReadFailureKind,
    Timestamp, Verdict, judge,
};
use serde_json::{Value, json};
use url::Url;

use super::backend::{
    FINALIZED_AFTER, Mined, Reader, TestChain, Through, authorization, failures, observed, payment,
    permit, permit_payment, settings,
};
use super::proxy::{asks_by_hash, hanging_at, log_blocks, proxy, refuse};

const TRANSFER: &str = "0xddf252ad1be2c89b69c2b068fc378daa952ba7f163c4a11628f55a4df523b3ef";

/// A chain with one landed payment and one unused one, 30 blocks later.
async fn staged<C: TestChain>() -> (C, [Payment; 2], Mined) {
    let chain = C::start().await;
    let landed = authorization(&chain, 1).await;
    let payments =
        [payment(&chain, &landed).await, payment(&chain, &authorization(&chain, 2).await).await];
    chain.mine(30).await;
    let mined = chain.transfer(&[landed]).await;
    chain.mine(30).await;
    (chain, payments, mined)
}

/// Reads through an endpoint with this fault.
async fn read_through(
    chain: &impl TestChain,
    payments: &[Payment],
    change: impl Fn(&Value, &mut Value) + Send + Sync + 'static,
) -> (Vec<Evidence>, Reader) {
    let url = proxy(chain.url(), change).await;
    let reader = Reader::with(settings(chain, &[url]));
    (reader.read(payments).await, reader)
}

fn is_transferred(evidence: &Evidence) -> bool {
    let used = evidence.readings.iter().filter_map(|r| r.outcome.as_ref().ok());
    used.filter_map(|seen| match seen.nonce {
        NonceState::Used(consumption) => Some(consumption.kind),
        _ => None,
    })
    .any(|kind| matches!(kind, ConsumptionKind::Transferred(_)))
}

pub(crate) async fn a_small_range_limit_is_learnt_and_everything_is_found<C: TestChain>() {
    let (chain, payments, mined) = staged::<C>().await;
    let url = proxy(chain.url(), |call, answer| {
        if log_blocks(call).is_some_and(|blocks| blocks > 9) {
            refuse(answer, -32005, "query is limited to 9 blocks");
        }
    })
    .await;
    let reader = Reader::with(settings(&chain, &[url]));
    let evidence = reader.read(&payments).await;
    let NonceState::Used(consumption) = observed(&evidence[0]).nonce else {
        panic!("{evidence:?}")
    };
    assert_eq!(consumption.log.block, mined.block);
    assert!(is_transferred(&evidence[0]));
    let refused = reader.calls.with_outcome("rpc_error");
    assert!((1..=8).contains(&refused), "{:?}", reader.calls);
    assert!(is_transferred(&reader.read(&payments).await[0]));
    assert!(reader.calls.with_outcome("rpc_error") <= refused + 1, "the width is remembered");
}

pub(crate) async fn a_range_limit_of_nothing_is_range_refused<C: TestChain>() {
    let (chain, payments, _) = staged::<C>().await;
    let (evidence, reader) = read_through(&chain, &payments, |call, answer| {
        if log_blocks(call).is_some() {
            refuse(answer, -32602, "block range is too wide");
        }
    })
    .await;
    assert_eq!(failures(&evidence[0]), [Some(ReadFailureKind::RangeRefused)]);
    assert_eq!(observed(&evidence[1]).nonce, NonceState::Unused);
    assert!(reader.calls.of("eth_getLogs") <= 11, "{:?}", reader.calls);
}

pub(crate) async fn empty_log_answers_send_us_to_the_next_endpoint<C: TestChain>() {
    let (chain, payments, _) = staged::<C>().await;
    let limited = proxy(chain.url(), |call, answer| {
        if log_blocks(call).is_some() {
            answer["result"] = json!([]);
        }
    })
    .await;
    let alone = Reader::with(settings(&chain, std::slice::from_ref(&limited)));
    let evidence = alone.read(&payments).await;
    let head = chain.head().await.number;
    assert!(matches!(observed(&evidence[0]).nonce,
            NonceState::UsedWithoutLog { from_block, to_block } if from_block < to_block && to_block == head));
    let verdict = judge(&payments[0], &evidence[0], &Policy::default());
    assert_eq!(verdict, Verdict::Inconclusive(Inconclusive::UsedWithoutLog));
    let both = Reader::with(settings(&chain, &[limited, chain.url()]));
    let evidence = both.read(&payments).await;
    assert_eq!(evidence[0].readings.len(), 2, "the first endpoint's reading is kept");
    assert!(is_transferred(&evidence[0]));
    assert_eq!(evidence[1].readings.len(), 1, "the other payment needs no second endpoint");
}

pub(crate) async fn no_logs_under_a_bloom_filter_that_has_one_is_an_error<C: TestChain>() {
    let chain = C::start().await;
    let landed = authorization(&chain, 1).await;
    let payment = payment(&chain, &landed).await;
    // In the newest block, which is the last of the range.
    chain.transfer(&[landed]).await;
    let (evidence, _) = read_through(&chain, std::slice::from_ref(&payment), |call, answer| {
        if log_blocks(call).is_some() && !asks_by_hash(call) {
            answer["result"] = json!([]);
        }
    })
    .await;
    assert_eq!(failures(&evidence[0]), [Some(ReadFailureKind::BadAnswer)]);
    assert!(format!("{evidence:?}").contains("logsBloom"), "{evidence:?}");
}

pub(crate) async fn a_node_without_the_last_block_of_the_range_shows_no_absence<C: TestChain>() {
    let (chain, payments, _) = staged::<C>().await;
    let head = json!(format!("{:#x}", chain.head().await.number));
    let (evidence, _) = read_through(&chain, &payments, move |call, answer| {
        if log_blocks(call).is_some() {
            answer["result"] = json!([]);
        }
        if call["method"] == "eth_getBlockByNumber" && call["params"][0] == head {
            answer["result"] = json!(null);
        }
    })
    .await;
    assert_eq!(failures(&evidence[0]), [Some(ReadFailureKind::BadAnswer)]);
    assert!(format!("{evidence:?}").contains("the last block of the range"), "{evidence:?}");
    assert_eq!(observed(&evidence[1]).nonce, NonceState::Unused);
}

pub(crate) async fn logs_that_do_not_fit_the_question_are_refused<C: TestChain>() {
    let (chain, payments, _) = staged::<C>().await;
    type Fault = fn(&mut Value);
    let faults: [Fault; 6] = [
        |log| log["removed"] = json!(true),
        |log| log["address"] = json!("0x5555555555555555555555555555555555555555"),
        |log| log["blockNumber"] = json!("0x1"),
        |log| log["blockNumber"] = json!(null),
        |log| log["logIndex"] = json!(null),
        |log| log["topics"][0] = json!(TRANSFER.replace("dd", "ee")),
    ];
    for fault in faults {
        let (evidence, _) = read_through(&chain, &payments, move |call, answer| {
            if log_blocks(call).is_some() {
                answer["result"].as_array_mut().unwrap().iter_mut().for_each(fault);
            }
        })
        .await;
        assert_eq!(failures(&evidence[0]), [Some(ReadFailureKind::BadAnswer)], "{evidence:?}");
        assert_eq!(observed(&evidence[1]).nonce, NonceState::Unused);
    }
}

pub(crate) async fn a_transfer_that_does_not_follow_directly_is_no_transfer<C: TestChain>() {
    let (chain, payments, mined) = staged::<C>().await;
    let shifted = proxy(chain.url(), |call, answer| {
        if log_blocks(call).is_some() && call["params"][0]["topics"][0][0] == TRANSFER {
            for log in answer["result"].as_array_mut().unwrap() {
                let index = log["logIndex"].as_str().unwrap().trim_start_matches("0x").to_owned();
                let index = u64::from_str_radix(&index, 16).unwrap() + 1;
                log["logIndex"] = json!(format!("{index:#x}"));
            }
        }
    })
    .await;
    let alone = Reader::with(settings(&chain, std::slice::from_ref(&shifted)));
    let evidence = alone.read(&payments).await;
    let NonceState::Used(consumption) = observed(&evidence[0]).nonce else {
        panic!("{evidence:?}")
    };
    assert_eq!(consumption.log.tx_hash, mined.tx_hash);
    assert_eq!(consumption.kind, ConsumptionKind::WithoutTransfer);
    let verdict = judge(&payments[0], &evidence[0], &Policy::default());
    assert_eq!(verdict, Verdict::Inconclusive(Inconclusive::UsedWithoutTransfer));
    // It may be the node's fault and not the token's: another is asked.
    let both = Reader::with(settings(&chain, &[shifted, chain.url()]));
    assert!(is_transferred(&both.read(&payments).await[0]));
}

/// Gives the header of block `number` another hash, when it is asked for by number.
fn replaced(number: u64) -> impl Fn(&Value, &mut Value) + Send + Sync + 'static {
    move |call, answer| {
        if call["method"] == "eth_getBlockByNumber"
            && call["params"][0] == json!(format!("{number:#x}"))
        {
            answer["result"]["hash"] = json!(B256::repeat_byte(0xee));
        }
    }
}

pub(crate) async fn a_block_that_is_no_longer_canonical_gives_no_evidence<C: TestChain>() {
    let (chain, payments, mined) = staged::<C>().await;
    let (evidence, _) = read_through(&chain, &payments, replaced(mined.block.number)).await;
    assert_eq!(failures(&evidence[0]), [Some(ReadFailureKind::NotCanonical)]);
    assert_eq!(observed(&evidence[1]).nonce, NonceState::Unused);
}

pub(crate) async fn a_head_that_is_no_longer_canonical_gives_no_evidence<C: TestChain>() {
    let (chain, payments, _) = staged::<C>().await;
    let head = chain.head().await.number;
    let (evidence, _) = read_through(&chain, &payments, replaced(head)).await;
    assert_eq!(failures(&evidence[0]), [Some(ReadFailureKind::NotCanonical)]);
    assert_eq!(observed(&evidence[1]).nonce, NonceState::Unused);
}

pub(crate) async fn a_finalized_block_above_the_head_is_a_bad_answer<C: TestChain>() {
    let (chain, payments, _) = staged::<C>().await;
    let (evidence, _) = read_through(&chain, &payments, |call, answer| {
        if call["params"][0] == "finalized" {
            answer["result"]["number"] = json!("0xffffff");
        }
    })
    .await;
    for evidence in evidence {
        assert_eq!(failures(&evidence), [Some(ReadFailureKind::BadAnswer)]);
    }
}

pub(crate) async fn a_finalized_block_above_the_safe_one_is_a_bad_answer<C: TestChain>() {
    let (chain, payments, _) = staged::<C>().await;
    // The answers to two calls of the batch, mixed up.
    let seen = Mutex::new(json!(null));
    let swapped = proxy(chain.url(), move |call, answer| {
        let mut seen = seen.lock().unwrap();
        if call["params"][0] == "finalized" {
            *seen = answer["result"].clone();
            let number = answer["result"]["number"].as_str().unwrap().trim_start_matches("0x");
            let above = u64::from_str_radix(number, 16).unwrap() + 1;
            answer["result"]["number"] = json!(format!("{above:#x}"));
        } else if call["params"][0] == "safe" {
            answer["result"] = seen.clone();
        }
    })
    .await;
    let settings = ChainSettings { read_safe: true, ..settings(&chain, &[swapped]) };
    for evidence in Reader::with(settings).read(&payments).await {
        assert_eq!(failures(&evidence), [Some(ReadFailureKind::BadAnswer)]);
    }
}

pub(crate) async fn a_time_that_was_told_wrong_is_not_remembered_for_good<C: TestChain>() {
    let (chain, payments, _) = staged::<C>().await;
    let wrong = Arc::new(AtomicBool::new(true));
    let lies = Arc::clone(&wrong);
    let url = proxy(chain.url(), move |call, answer| {
        let by_number = call["method"] == "eth_getBlockByNumber"
            && call["params"][0].as_str().unwrap().starts_with("0x");
        if by_number && lies.load(Ordering::SeqCst) {
            let time = answer["result"]["timestamp"].as_str().unwrap().trim_start_matches("0x");
            let before = u64::from_str_radix(time, 16).unwrap() - 50;
            answer["result"]["timestamp"] = json!(format!("{before:#x}"));
        }
    })
    .await;
    let reader = Reader::with(ChainSettings { log_range_max: 16, ..settings(&chain, &[url]) });
    let evidence = reader.read(&payments).await;
    let nonce = &observed(&evidence[0]).nonce;
    assert!(matches!(nonce, NonceState::UsedWithoutLog { .. }), "searched too late: {nonce:?}");
    wrong.store(false, Ordering::SeqCst);
    let evidence = reader.read(&payments).await;
    assert!(is_transferred(&evidence[0]), "{evidence:?}");
}

pub(crate) async fn states_from_another_block_are_a_bad_answer<C: TestChain>() {
    let (chain, payments, _) = staged::<C>().await;
    for (field, value) in [("number", "0xffffff"), ("timestamp", "0xffffffff")] {
        let (evidence, _) = read_through(&chain, &payments, move |call, answer| {
            if call["params"][0] == "latest" {
                answer["result"][field] = json!(value);
            }
        })
        .await;
        for evidence in evidence {
            assert_eq!(failures(&evidence), [Some(ReadFailureKind::BadAnswer)], "{field}");
        }
    }
}

pub(crate) async fn states_are_read_at_the_hash_of_the_head_or_not_at_all<C: TestChain>() {
    let (chain, payments, _) = staged::<C>().await;
    let pinned = json!({"blockHash": chain.head().await.hash, "requireCanonical": true});
    let (evidence, reader) = read_through(&chain, &payments, move |call, answer| {
        if call["method"] == "eth_call" && call["params"][1] != pinned {
            refuse(answer, -32603, "not pinned to the head");
        }
    })
    .await;
    assert!(is_transferred(&evidence[0]));
    assert_eq!(observed(&evidence[1]).nonce, NonceState::Unused);
    assert_eq!(reader.calls.of("eth_call"), 1);
}

pub(crate) async fn a_slow_down_is_rate_limited<C: TestChain>() {
    let (chain, payments, _) = staged::<C>().await;
    let limited: Url =
        proxy(chain.url(), |_, answer| refuse(answer, -32016, "over rate limit")).await;
    let reader = Reader::with(settings(&chain, &[limited, chain.url()]));
    let evidence = reader.read(&payments).await;
    assert_eq!(failures(&evidence[0]), [Some(ReadFailureKind::RateLimited), None]);
    assert!(is_transferred(&evidence[0]));
}

pub(crate) async fn an_endpoint_that_refuses_is_left_alone_for_a_while<C: TestChain>() {
    let (chain, payments, _) = staged::<C>().await;
    let limited = proxy(chain.url(), |_, answer| refuse(answer, -32016, "over rate limit")).await;
    let reader = Reader::with(settings(&chain, &[limited]));
    let read = async |secs| reader.read_at(&payments, Breadth::FirstAnswer, secs).await;
    let mut calls = Vec::new();
    for secs in [0, 0, 1, 2, 3] {
        let evidence = read(secs).await;
        assert_eq!(failures(&evidence[0]), [Some(ReadFailureKind::RateLimited)], "at {secs} s");
        calls.push(reader.calls.total());
    }
    assert_eq!(calls, [3, 3, 6, 6, 9], "1 s, then 2 s; nothing is sent in between");
}

pub(crate) async fn a_failed_log_read_fails_only_the_used_payments<C: TestChain>() {
    let (chain, payments, _) = staged::<C>().await;
    let (evidence, reader) = read_through(&chain, &payments, |call, answer| {
        if log_blocks(call).is_some() {
            refuse(answer, -32603, "internal error");
        }
    })
    .await;
    let NonceState::UsedUnread(failure) = &observed(&evidence[0]).nonce else {
        panic!("{evidence:?}")
    };
    assert_eq!(failure.kind, ReadFailureKind::RpcError, "used all the same");
    assert_eq!(observed(&evidence[1]).nonce, NonceState::Unused);
    assert_eq!(reader.calls.of("eth_getLogs"), 1, "nothing is retried");
}

/// An endpoint that says of the only authorization it is asked about, in the last word, that it is unused.
async fn says_unused(chain: &impl TestChain) -> Url {
    proxy(chain.url(), |call, answer| {
        if call["method"] == "eth_call" {
            let result = answer["result"].as_str().unwrap();
            answer["result"] = json!(format!("{}{:064}", &result[..result.len() - 64], 0));
        }
    })
    .await
}

pub(crate) async fn i2_who_refuses_logs_still_contradicts_who_says_unused<C: TestChain>() {
    let chain = C::start().await;
    let (landed, permit) = (authorization(&chain, 1).await, permit(&chain, 2).await);
    let payments = [payment(&chain, &landed).await, permit_payment(&chain, &permit).await];
    chain.transfer(&[landed]).await;
    chain.settle_permits(&[permit], Through::Nobody).await;
    chain.advance(700).await;
    chain.mine(FINALIZED_AFTER).await;
    type Fault = fn(&Value, &mut Value);
    let refusals: [Fault; 3] = [
        |call, answer| {
            if log_blocks(call).is_some() {
                refuse(answer, 429, "too many requests");
            }
        },
        |call, answer| {
            if log_blocks(call).is_some() {
                refuse(answer, -32603, "internal error");
            }
        },
        // The logs are there, and what shows them canonical is not.
        |call, answer| {
            let number = call["params"][0].as_str().is_some_and(|block| block.starts_with("0x"));
            if call["method"] == "eth_getBlockByNumber" && number {
                answer["result"] = json!(null);
            }
        },
    ];
    for (place, refusal) in refusals.into_iter().enumerate() {
        for payment in &payments {
            let liar = says_unused(&chain).await;
            let urls = [liar, proxy(chain.url(), refusal).await, proxy(chain.url(), refusal).await];
            let settings = ChainSettings {
                head_lag_max: Duration::from_secs(3_600),
                ..settings(&chain, &urls)
            };
            let reader = Reader::with(settings);
            let one = std::slice::from_ref(payment);
            let evidence = reader.read_at(one, Breadth::All, 0).await.remove(0);
            let verdict = judge(payment, &evidence, &Policy { quorum: 1, ..Policy::default() });
            assert_eq!(
                verdict,
                Verdict::Inconclusive(Inconclusive::EndpointsDisagree),
                "refusal {place}: {evidence:?}"
            );
        }
    }
}

/// An endpoint that takes every connection and never says a word. It ends with the test's runtime.
async fn hanging() -> Url {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        let mut held = Vec::new();
        while let Ok((connection, _)) = listener.accept().await {
            held.push(connection);
        }
    });
    Url::parse(&url).unwrap()
}

pub(crate) async fn an_endpoint_that_hangs_takes_nothing_from_the_others<C: TestChain>() {
    let (chain, payments, _) = staged::<C>().await;
    // Its requests would time out long after the whole read has to be over.
    let reader = Reader::with(settings(&chain, &[hanging().await, chain.url()]));
    let now = Timestamp::from_millis(0);
    for breadth in [Breadth::FirstAnswer, Breadth::All] {
        let within = Duration::from_secs(6);
        let evidence = reader.read_within(&payments, breadth, now, within).await;
        // The narrow read has its evidence and waits no longer; the wide one says who was silent.
        let expected: &[_] = match breadth {
            Breadth::FirstAnswer => &[None],
            Breadth::All => &[Some(ReadFailureKind::Unreachable), None],
        };
        assert_eq!(failures(&evidence[0]), expected);
        assert!(is_transferred(&evidence[0]), "{breadth:?}");
    }
    // Whose turn it is: but whoever hung comes last for a while.
    for _ in 0..2 {
        let started = std::time::Instant::now();
        reader.read_within(&payments, Breadth::FirstAnswer, now, Duration::from_secs(6)).await;
        assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
    }
}

pub(crate) async fn i11_a_log_search_that_hangs_takes_nothing_from_what_was_answered<
    C: TestChain,
>() {
    let chain = C::start().await;
    let old = authorization(&chain, 1).await;
    let old_payment = payment(&chain, &old).await;
    chain.mine(100).await;
    let (young, unused) = (authorization(&chain, 2).await, authorization(&chain, 3).await);
    let payments = [old_payment, payment(&chain, &young).await, payment(&chain, &unused).await];
    let before = chain.head().await.number - 50;
    chain.transfer(&[old, young]).await;
    let hangs = move |call: &Value| {
        log_blocks(call).is_some()
            && !asks_by_hash(call)
            && crate::support::fault_proxy::number(&call["params"][0]["fromBlock"]) < before
    };
    let url = hanging_at(chain.url(), hangs).await;
    let settings = ChainSettings { log_range_max: 60, ..settings(&chain, &[url]) };
    let reader = Reader::with(settings);
    for breadth in [Breadth::FirstAnswer, Breadth::All] {
        let (now, within) = (Timestamp::from_millis(0), Duration::from_secs(5));
        let evidence = reader.read_within(&payments, breadth, now, within).await;
        let NonceState::UsedUnread(failure) = &observed(&evidence[0]).nonce else {
            panic!("{breadth:?}: {evidence:?}")
        };
        assert_eq!(failure.kind, ReadFailureKind::Unreachable, "used all the same");
        assert!(is_transferred(&evidence[1]), "{breadth:?}: {evidence:?}");
        assert_eq!(observed(&evidence[2]).nonce, NonceState::Unused);
    }
}

pub(crate) async fn a_token_that_burns_all_gas_does_not_touch_its_neighbours<C: TestChain>() {
    let (chain, payments, _) = staged::<C>().await;
    let burner = Address::repeat_byte(0xb4);
    let burning = Payment { token: burner, ..payments[1].clone() };
    let payments = [payments[0].clone(), payments[1].clone(), burning];
    let word = format!("{burner:x}");
    let (evidence, _) = read_through(&chain, &payments, move |call, answer| {
        if call["method"] == "eth_call" && call["params"][0].to_string().contains(&word) {
            refuse(answer, -32000, "out of gas");
        }
    })
    .await;
    assert!(is_transferred(&evidence[0]));
    assert_eq!(observed(&evidence[1]).nonce, NonceState::Unused);
    let burnt = evidence.last().unwrap();
    assert_eq!(failures(burnt), [Some(ReadFailureKind::RpcError)]);
}

pub(crate) async fn one_that_calls_everything_too_much_is_not_asked_in_halves_for_ever<
    C: TestChain,
>() {
    let (chain, payments, _) = staged::<C>().await;
    let nonces = (0..250u64).map(|n| B256::left_padding_from(&n.to_be_bytes()));
    let payments: Vec<Payment> =
        nonces.map(|nonce| Payment { nonce, ..payments[1].clone() }).collect();
    let (evidence, reader) = read_through(&chain, &payments, |call, answer| {
        if call["method"] == "eth_call" {
            refuse(answer, -32_000, "out of gas");
        }
    })
    .await;
    assert!(evidence.iter().all(|e| failures(e) == [Some(ReadFailureKind::RpcError)]));
    let calls = reader.calls.of("eth_call");
    assert!((200..300).contains(&calls), "all of them in halves were 499, and these {calls}");
}

pub(crate) async fn what_an_endpoint_says_is_never_kept_whole<C: TestChain>() {
    let (chain, payments, _) = staged::<C>().await;
    let (evidence, _) = read_through(&chain, &payments, |call, answer| {
        if call["method"] == "eth_getBlockByNumber" {
            answer["result"] = json!("KEY".repeat(100_000));
        }
    })
    .await;
    for evidence in evidence {
        assert_eq!(failures(&evidence), [Some(ReadFailureKind::BadAnswer)]);
        let told = serde_json::to_string(&evidence).unwrap();
        assert!(told.len() < 1_000 && !told.contains("KEY"), "{told}");
    }
}
