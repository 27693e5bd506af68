//! Empty lists of logs that hide something, and the widths of log searches.

use std::collections::BTreeSet;
use std::time::Duration;

use reconciled::chain::ChainSettings;
use reconciled::domain::{
    EndpointName, NonceState, ReadFailure, ReadFailureKind, Receiver, ScanAnswer,
};
use serde_json::{Value, json};

use super::backend::{
    Authorization, FINALIZED_AFTER, PAY_TO, Reader, TestChain, Through, authorization, failures,
    observed, payment, permit, permit_payment, settings,
};
use super::proxy::{asks_by_hash, log_blocks, proxy, refuse};

/// So wide that every block of an empty range is looked at.
const LOOKED_AT: u64 = 8;

async fn scan(
    chain: &impl TestChain,
    reader: &Reader,
    endpoint: &str,
    (first, last): (u64, u64),
) -> Result<ScanAnswer, ReadFailure> {
    let receivers = BTreeSet::from([Receiver { token: chain.token(), pay_to: PAY_TO }]);
    let (name, within) = (EndpointName::new(endpoint), Duration::from_secs(30));
    reader.chain.scan(&name, &receivers, first, last, within).await
}

pub(crate) async fn an_empty_list_is_an_error_where_a_block_by_itself_has_a_log<C: TestChain>() {
    const BAD: Option<ReadFailureKind> = Some(ReadFailureKind::BadAnswer);
    let chain = C::start().await;
    let (landed, permitted) = (authorization(&chain, 1).await, permit(&chain, 2).await);
    let payments = [payment(&chain, &landed).await, permit_payment(&chain, &permitted).await];
    chain.mine(10).await;
    let mined = chain.transfer(&[landed]).await;
    chain.mine(10).await;
    chain.settle_permits(&[permitted], Through::Nobody).await;
    chain.mine(10).await;
    let without_index = proxy(chain.url(), |call, answer| {
        if log_blocks(call).is_some() && !asks_by_hash(call) {
            answer["result"] = json!([]);
        }
    })
    .await;
    let settings = ChainSettings {
        log_range_max: LOOKED_AT,
        ..settings(&chain, &[without_index, chain.url()])
    };
    let reader = Reader::with(settings);
    let evidence = reader.read(&payments).await;
    for evidence in evidence {
        assert_eq!(failures(&evidence), [BAD, None], "another one is asked: {evidence:?}");
        assert!(format!("{evidence:?}").contains("logsBloom"), "{evidence:?}");
        let shown = evidence.readings[1].outcome.as_ref().unwrap();
        assert!(matches!(shown.nonce, NonceState::Used(_)), "{evidence:?}");
    }
    // Of a scan's ranges, both ends are looked at.
    let number = mined.block.number;
    for range in [(number, number + 4), (number - 4, number)] {
        let hidden = scan(&chain, &reader, "a", range).await.unwrap_err();
        assert_eq!(hidden.kind, ReadFailureKind::BadAnswer, "{hidden}");
        assert_eq!(scan(&chain, &reader, "b", range).await.unwrap().transfers.len(), 1);
    }
}

/// Anybody can make them, from anybody's address and for nothing: each would be a flag for a person.
pub(crate) async fn transfers_of_nothing_are_not_scanned<C: TestChain>() {
    let chain = C::start().await;
    let money = authorization(&chain, 1).await;
    let nothing = Authorization { value: 0, ..authorization(&chain, 2).await };
    let first = chain.head().await.number + 1;
    for authorization in [nothing, money] {
        chain.transfer(&[authorization]).await;
    }
    chain.mine(FINALIZED_AFTER).await;
    let reader = Reader::with(settings(&chain, &[chain.url()]));
    let last = chain.head().await.number;
    let scanned = scan(&chain, &reader, "a", (first, last)).await.unwrap();
    let values: Vec<String> =
        scanned.transfers.iter().map(|seen| seen.transfer.value.to_string()).collect();
    assert_eq!(values, ["1000000"]);
}

fn saturate(call: &Value, answer: &mut Value) {
    if call["method"] == "eth_getBlockByNumber" && answer["result"].is_object() {
        answer["result"]["logsBloom"] = json!(format!("0x{}", "f".repeat(512)));
    }
}

pub(crate) async fn bloom_filters_that_match_everything_stall_nothing<C: TestChain>() {
    let chain = C::start().await;
    let landed = authorization(&chain, 1).await;
    let payment = payment(&chain, &landed).await;
    chain.mine(30).await;
    let empty = chain.head().await.number;
    chain.transfer(&[landed]).await;
    chain.mine(FINALIZED_AFTER).await;
    let busy = proxy(chain.url(), saturate).await;
    let settings = ChainSettings { log_range_max: 10, ..settings(&chain, &[busy]) };
    let reader = Reader::with(settings);
    let evidence = reader.read_one(&payment).await;
    assert!(matches!(observed(&evidence).nonce, NonceState::Used(_)), "{evidence:?}");
    let before = (reader.calls.of("eth_getLogs"), reader.calls.of("eth_getBlockByNumber"));
    assert_eq!(scan(&chain, &reader, "a", (empty - 9, empty)).await.unwrap().transfers, []);
    // One read, both ends, and these two blocks by themselves; and the last block once more.
    assert_eq!(reader.calls.of("eth_getLogs") - before.0, 1 + 2);
    assert_eq!(reader.calls.of("eth_getBlockByNumber") - before.1, 2 + 1);
}

pub(crate) async fn a_second_look_that_fails_makes_an_empty_list_an_error<C: TestChain>() {
    let chain = C::start().await;
    chain.mine(30).await;
    let head = chain.head().await.number;
    let no_second_look = proxy(chain.url(), |call, answer| {
        saturate(call, answer);
        if asks_by_hash(call) {
            refuse(answer, -32_601, "blockHash is not supported");
        }
    })
    .await;
    let limited = proxy(chain.url(), |call, answer| {
        saturate(call, answer);
        if asks_by_hash(call) {
            refuse(answer, -32_016, "over rate limit");
        }
    })
    .await;
    let reader = Reader::with(settings(&chain, &[no_second_look, limited]));
    for (endpoint, kind) in [("a", ReadFailureKind::RpcError), ("b", ReadFailureKind::RateLimited)]
    {
        let failure = scan(&chain, &reader, endpoint, (head - 9, head)).await.unwrap_err();
        assert_eq!(failure.kind, kind, "its class is kept: {failure}");
    }
}

pub(crate) async fn each_kind_of_log_search_learns_a_width_of_its_own<C: TestChain>() {
    let chain = C::start().await;
    let landed = authorization(&chain, 1).await;
    let payment = payment(&chain, &landed).await;
    chain.mine(40).await;
    chain.transfer(&[landed]).await;
    chain.mine(40).await;
    let head = chain.head().await.number;
    // Searches for nonces have three positions, all of them filled.
    let picky = proxy(chain.url(), |call, answer| {
        let topics = &call["params"][0]["topics"];
        let is_for_nonces = topics.as_array().is_some_and(|t| t.len() == 3 && !t[1].is_null());
        if log_blocks(call).is_some_and(|blocks| blocks > 9) && is_for_nonces {
            refuse(answer, -32_005, "query is limited to 9 blocks");
        }
    })
    .await;
    let reader = Reader::with(settings(&chain, &[picky]));
    let evidence = reader.read_one(&payment).await;
    assert!(matches!(observed(&evidence).nonce, NonceState::Used(_)), "{evidence:?}");
    assert!(reader.calls.with_outcome("rpc_error") > 0, "{:?}", reader.calls);
    let before = reader.calls.of("eth_getLogs");
    assert_eq!(scan(&chain, &reader, "a", (head - 39, head)).await.unwrap().transfers, []);
    assert_eq!(reader.calls.of("eth_getLogs") - before, 1, "one range, as wide as ever");
}
