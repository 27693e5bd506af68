//! The simulated node, as anybody sees it who speaks JSON-RPC to it over HTTP.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::time::Duration;

use alloy_primitives::{Address, B256, Bloom, BloomInput, Bytes, U256, address, b256};
use alloy_sol_types::{SolCall, sol};
use reconciled::chain::MULTICALL3;
use reconciled::domain::{Amount, ChainId, Timestamp};
use reconciled::sim::{Authorized, Fault, FaultKind, Included, SimChain, SimServer, SimSettings};
use serde_json::{Value, json};
use url::Url;

sol! {
    function authorizationState(address authorizer, bytes32 nonce) external view returns (bool);
    struct Call3 { address target; bool allowFailure; bytes callData; }
    struct CallResult { bool success; bytes returnData; }
    function aggregate3(Call3[] calls) external payable returns (CallResult[] returnData);
    function getBlockNumber() external view returns (uint256 blockNumber);
    function getCurrentBlockTimestamp() external view returns (uint256 timestamp);
    function getChainId() external view returns (uint256 chainid);
    function balanceOf(address owner) external view returns (uint256);
}

const TOKEN: Address = address!("0x833589fCD6eDb6E08f4c7C32D4f71b54bdA02913");
const MERCHANT: Address = address!("0x00000000000000000000000000000000000000c1");
const NOWHERE: Address = address!("0x00000000000000000000000000000000000000ff");
const USED: B256 = b256!("0x98de503528ee59b575ef0c0a2576a82497bfc029a5685b209e9ec333479b10a5");
const CANCELED: B256 = b256!("0x1cdd46ff242716cdaa72d159d339a485b3438398348d68f09d7c8c0a59353d81");
const TRANSFER: B256 = b256!("0xddf252ad1be2c89b69c2b068fc378daa952ba7f163c4a11628f55a4df523b3ef");
const CHAIN_ID: u64 = 8453;
const GENESIS_SECS: i64 = 1_700_000_000;

fn at(secs: i64) -> Timestamp {
    Timestamp::from_millis((GENESIS_SECS + secs) * 1_000)
}

fn payer(n: u8) -> Address {
    Address::with_last_byte(n)
}

fn nonce(n: u8) -> B256 {
    B256::with_last_byte(n)
}

fn payment(n: u8) -> Authorized {
    let value = Amount::new(U256::from(1_000_000));
    Authorized { payer: payer(n), to: MERCHANT, value, nonce: nonce(n) }
}

/// A chain of 2 s blocks that is a minute old, whose server has two endpoints. What happened on it:
/// payment 1 in block 6; payments 2 and 3 in one transaction of block 8, behind a revert; 4 canceled in
/// block 10; money without an authorization in block 12.
struct Story {
    server: SimServer,
    http: reqwest::Client,
    first: Included,
    reverted: Included,
    batch: Included,
}

#[allow(clippy::disallowed_methods, reason = "not the daemon's own client")]
fn http_client() -> reqwest::Client {
    // Taken by whichever test comes first.
    let _ = rustls::crypto::ring::default_provider().install_default();
    reqwest::Client::builder().timeout(Duration::from_secs(30)).no_proxy().build().unwrap()
}

impl Story {
    async fn start() -> Self {
        let chain = SimChain::new(SimSettings::new(
            ChainId::new(CHAIN_ID),
            at(0),
            Duration::from_secs(2),
            Duration::from_secs(20),
            TOKEN,
        ));
        let (first, reverted, batch) = {
            let mut chain = chain.lock();
            let first = chain.transfer(at(12), payment(1)).unwrap();
            let reverted = chain.revert(at(16)).unwrap();
            let batch = chain.batch(at(16), &[payment(2), payment(3)]).unwrap();
            chain.cancel(at(20), payer(4), nonce(4)).unwrap();
            chain.bare_transfer(at(24), payer(5), MERCHANT, payment(5).value).unwrap();
            chain.set_time(at(60));
            (first, reverted, batch)
        };
        let server = SimServer::start(chain, 2).await.unwrap();
        Self { server, http: http_client(), first, reverted, batch }
    }

    async fn post(&self, endpoint: usize, body: String) -> (u16, String) {
        post(&self.http, &self.server.urls()[endpoint], body).await
    }

    async fn answer(&self, endpoint: usize, method: &str, params: Value) -> Value {
        let body = json!({ "jsonrpc": "2.0", "id": 7, "method": method, "params": params });
        let (status, text) = self.post(endpoint, body.to_string()).await;
        assert_eq!(status, 200, "{text}");
        let answer: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&answer["jsonrpc"], &answer["id"]), (&json!("2.0"), &json!(7)));
        answer
    }

    async fn result_of(&self, endpoint: usize, method: &str, params: Value) -> Value {
        let mut answer = self.answer(endpoint, method, params).await;
        assert_eq!(answer.get("error"), None, "{method}");
        answer["result"].take()
    }

    async fn result(&self, method: &str, params: Value) -> Value {
        self.result_of(0, method, params).await
    }

    async fn error(&self, method: &str, params: Value) -> (i64, String) {
        let answer = self.answer(0, method, params).await;
        let error = &answer["error"];
        (error["code"].as_i64().unwrap(), error["message"].as_str().unwrap().to_owned())
    }

    async fn block(&self, id: &str) -> Value {
        self.result("eth_getBlockByNumber", json!([id, false])).await
    }

    /// The (block, log index) of every log found.
    async fn logs_of(&self, endpoint: usize, filter: Value) -> Vec<(u64, u64)> {
        let logs = self.result_of(endpoint, "eth_getLogs", json!([filter])).await;
        let place = |log: &Value| (number(&log["blockNumber"]), number(&log["logIndex"]));
        logs.as_array().unwrap().iter().map(place).collect()
    }

    async fn logs(&self, filter: Value) -> Vec<(u64, u64)> {
        self.logs_of(0, filter).await
    }

    async fn used(&self, endpoint: usize, n: u8, block: Value) -> bool {
        let data = authorizationStateCall { authorizer: payer(n), nonce: nonce(n) }.abi_encode();
        let call = json!({ "to": TOKEN, "input": Bytes::from(data) });
        let result = self.result_of(endpoint, "eth_call", json!([call, block])).await;
        let data: Bytes = serde_json::from_value(result).unwrap();
        authorizationStateCall::abi_decode_returns_validate(&data).unwrap()
    }
}

async fn post(http: &reqwest::Client, url: &Url, body: String) -> (u16, String) {
    let request = http.post(url.clone()).header("content-type", "application/json").body(body);
    let response = request.send().await.unwrap();
    (response.status().as_u16(), response.text().await.unwrap())
}

fn number(quantity: &Value) -> u64 {
    let digits = quantity.as_str().unwrap().strip_prefix("0x").unwrap();
    assert!(digits == "0" || !digits.starts_with('0'), "{quantity}");
    u64::from_str_radix(digits, 16).unwrap()
}

/// A request to Multicall3 for number, time and chain id, and for what each of `calls` says.
fn aggregate(calls: Vec<(Address, Vec<u8>)>) -> Value {
    let about = [
        (MULTICALL3, getBlockNumberCall {}.abi_encode()),
        (MULTICALL3, getCurrentBlockTimestampCall {}.abi_encode()),
        (MULTICALL3, getChainIdCall {}.abi_encode()),
    ];
    let calls = about.into_iter().chain(calls).map(|(target, data)| Call3 {
        target,
        allowFailure: true,
        callData: data.into(),
    });
    let data = aggregate3Call { calls: calls.collect() }.abi_encode();
    json!({ "to": MULTICALL3, "data": Bytes::from(data) })
}

fn aggregated(result: Value) -> Vec<(bool, Bytes)> {
    let data: Bytes = serde_json::from_value(result).unwrap();
    let results = aggregate3Call::abi_decode_returns_validate(&data).unwrap();
    results.into_iter().map(|result| (result.success, result.returnData)).collect()
}

fn word(data: &Bytes) -> u64 {
    U256::from_be_slice(data).to()
}

fn state_of(n: u8) -> (Address, Vec<u8>) {
    (TOKEN, authorizationStateCall { authorizer: payer(n), nonce: nonce(n) }.abi_encode())
}

#[tokio::test]
async fn blocks_are_found_by_number_tag_and_hash() {
    let story = Story::start().await;
    assert_eq!(story.result("eth_chainId", json!([])).await, json!("0x2105"));
    assert_eq!(story.result("eth_blockNumber", json!([])).await, json!("0x1e"));
    for (tag, expected) in
        [("latest", 30), ("safe", 25), ("finalized", 20), ("earliest", 0), ("0x7", 7)]
    {
        let block = story.block(tag).await;
        assert_eq!(number(&block["number"]), expected, "{tag}");
        assert_eq!(number(&block["timestamp"]) as i64, GENESIS_SECS + 2 * expected as i64);
        let by_hash = story.result("eth_getBlockByHash", json!([block["hash"], false])).await;
        assert_eq!(by_hash, block);
    }
    assert_eq!(story.block("0x8").await["parentHash"], story.block("0x7").await["hash"]);
    assert_eq!(story.block("0x1f").await, Value::Null);
    let nobody = json!([B256::repeat_byte(9), false]);
    assert_eq!(story.result("eth_getBlockByHash", nobody).await, Value::Null);
    story.server.stop().await.unwrap();
}

#[tokio::test]
async fn headers_carry_transactions_and_the_bloom_of_their_logs() {
    let story = Story::start().await;
    let block = story.block("0x8").await;
    assert_eq!(block["transactions"], json!([story.reverted.tx_hash, story.batch.tx_hash]));
    let bloom: Bloom = serde_json::from_value(block["logsBloom"].clone()).unwrap();
    let has = |bytes: &[u8]| bloom.contains_input(BloomInput::Raw(bytes));
    assert!(has(TOKEN.as_slice()) && has(USED.as_slice()) && has(nonce(2).as_slice()));
    assert!(!has(nonce(1).as_slice()));
    let full = story.result("eth_getBlockByNumber", json!(["0x8", true])).await;
    assert_eq!(full["transactions"][1]["hash"], json!(story.batch.tx_hash));
    assert_eq!(full["transactions"][1]["transactionIndex"], "0x1");
    assert_eq!(story.block("0x9").await["logsBloom"], json!(Bloom::ZERO));
}

#[tokio::test]
async fn receipts_tell_success_from_failure_and_hold_their_own_logs() {
    let story = Story::start().await;
    let receipt = |hash: B256| story.result("eth_getTransactionReceipt", json!([hash]));
    let batch = receipt(story.batch.tx_hash).await;
    assert_eq!((&batch["status"], &batch["transactionIndex"]), (&json!("0x1"), &json!("0x1")));
    assert_eq!(batch["blockHash"], story.block("0x8").await["hash"]);
    let logs = batch["logs"].as_array().unwrap();
    assert_eq!(logs.len(), 4);
    let found = story.result("eth_getLogs", json!([{ "blockHash": batch["blockHash"] }])).await;
    assert_eq!(&found, &batch["logs"]);
    let reverted = receipt(story.reverted.tx_hash).await;
    assert_eq!((&reverted["status"], &reverted["logs"]), (&json!("0x0"), &json!([])));
    assert_eq!(reverted["logsBloom"], json!(Bloom::ZERO));
    assert_eq!(receipt(B256::repeat_byte(9)).await, Value::Null);
}

#[tokio::test]
async fn a_used_authorization_is_logged_directly_before_its_transfer() {
    let story = Story::start().await;
    let filter = json!([{ "fromBlock": "0x6", "toBlock": "0x6", "address": TOKEN }]);
    let logs = story.result("eth_getLogs", filter).await;
    let block = story.block("0x6").await;
    let log = |topics: Value, data: Value, index: &str| {
        json!({
            "address": format!("{TOKEN:?}"),
            "topics": topics,
            "data": data,
            "blockHash": block["hash"],
            "blockNumber": "0x6",
            "blockTimestamp": block["timestamp"],
            "transactionHash": story.first.tx_hash,
            "transactionIndex": "0x0",
            "logIndex": index,
            "removed": false,
        })
    };
    let value = B256::from(U256::from(1_000_000));
    let used = json!([USED, payer(1).into_word(), nonce(1)]);
    let transfer = json!([TRANSFER, payer(1).into_word(), MERCHANT.into_word()]);
    let expected = json!([log(used, json!("0x"), "0x0"), log(transfer, json!(value), "0x1")]);
    assert_eq!(logs, expected);
}

#[tokio::test]
async fn log_filters_combine_range_address_and_topics() {
    let story = Story::start().await;
    let everything = [(6, 0), (6, 1), (8, 0), (8, 1), (8, 2), (8, 3), (10, 0), (12, 0)];
    let all = json!({ "fromBlock": "earliest", "toBlock": "latest" });
    let with = |key: &str, value: Value| {
        let mut filter = all.clone();
        filter[key] = value;
        filter
    };
    for filter in [
        all.clone(),
        with("address", json!(TOKEN)),
        with("address", json!([NOWHERE, TOKEN])),
        with("address", Value::Null),
        with("topics", json!([])),
        with("topics", json!([null, [], null])),
        with("toBlock", json!("0xffff")),
    ] {
        assert_eq!(story.logs(filter.clone()).await, everything, "{filter}");
    }
    let word = |n: u8| payer(n).into_word();
    for (filter, expected) in [
        (with("address", json!(NOWHERE)), &[][..]),
        (with("toBlock", json!("0x6")), &[(6, 0), (6, 1)]),
        (with("fromBlock", json!("0xb")), &[(12, 0)]),
        (with("fromBlock", json!("safe")), &[]),
        (with("topics", json!([USED])), &[(6, 0), (8, 0), (8, 2)]),
        (with("topics", json!([[USED, CANCELED]])), &[(6, 0), (8, 0), (8, 2), (10, 0)]),
        (with("topics", json!([USED, [word(1), word(3)]])), &[(6, 0), (8, 2)]),
        (with("topics", json!([null, null, [nonce(2), nonce(4)]])), &[(8, 0), (10, 0)]),
        (
            with("topics", json!([TRANSFER, null, MERCHANT.into_word()])),
            &[(6, 1), (8, 1), (8, 3), (12, 0)],
        ),
        (with("topics", json!([USED, word(1), nonce(2)])), &[]),
        (with("topics", json!([null, null, null, null])), &[]),
        (json!({ "blockHash": story.block("0xa").await["hash"] }), &[(10, 0)]),
        (json!({}), &[]),
        (json!({ "fromBlock": "0xc", "toBlock": "0x6" }), &[]),
    ] {
        assert_eq!(story.logs(filter.clone()).await, expected, "{filter}");
    }
}

#[tokio::test]
async fn one_call_reads_block_time_and_states_at_a_pinned_block() {
    let story = Story::start().await;
    let calls = || (1..=4).map(state_of).chain([(NOWHERE, vec![1, 2, 3, 4])]).collect();
    for (at_number, states) in
        [(30, [1, 1, 1, 1]), (9, [1, 1, 1, 0]), (6, [1, 0, 0, 0]), (5, [0, 0, 0, 0])]
    {
        let quantity = format!("{at_number:#x}");
        let hash = story.block(&quantity).await["hash"].clone();
        for id in [
            json!(quantity),
            json!({ "blockHash": hash, "requireCanonical": true }),
            json!({ "blockHash": hash }),
            json!({ "blockNumber": quantity }),
        ] {
            let result = story.result("eth_call", json!([aggregate(calls()), id])).await;
            let results = aggregated(result);
            assert!(results.iter().all(|(success, _)| *success));
            let words: Vec<u64> = results[..7].iter().map(|(_, data)| word(data)).collect();
            let time = (GENESIS_SECS + 2 * at_number) as u64;
            assert_eq!(words[..3], [at_number as u64, time, CHAIN_ID]);
            assert_eq!(words[3..], states, "at {id}");
            assert!(results[7].1.is_empty(), "no code answers with nothing");
        }
    }
    assert!(story.used(0, 1, json!("latest")).await);
    assert!(!story.used(0, 1, json!("earliest")).await);
}

#[tokio::test]
async fn what_cannot_be_answered_is_an_error_of_the_usual_shape() {
    let story = Story::start().await;
    let call = json!({ "to": TOKEN, "data": "0x12345678" });
    for (method, params, code, message) in [
        ("eth_sendRawTransaction", json!(["0x"]), -32601, "Method not found"),
        ("eth_getBlockByNumber", json!(["latest"]), -32602, "invalid length 1"),
        ("eth_getBlockByNumber", json!(["7", false]), -32602, "hex string without 0x prefix"),
        ("eth_getBlockByNumber", json!(["0x07", false]), -32602, "leading zero"),
        ("eth_getBlockByHash", json!(["0x12", false]), -32602, ""),
        ("eth_chainId", json!(["x"]), -32602, "invalid length 1"),
        ("eth_chainId", json!({ "a": 1 }), -32602, "invalid type"),
        ("eth_call", json!([{ "to": "0x1" }, "latest"]), -32602, ""),
        ("eth_call", json!([call, "latest"]), 3, "execution reverted"),
        ("eth_call", json!([call, "0x1f"]), -32602, "block height is 30 but requested was 31"),
        ("eth_call", json!([call, { "blockHash": B256::ZERO }]), -32001, "Resource not found"),
        ("eth_getLogs", json!([{ "fromBlock": "0x1f" }]), -32602, "block height is 30"),
        ("eth_getLogs", json!([{ "blockHash": B256::ZERO }]), -32000, "unknown block"),
        (
            "eth_getLogs",
            json!([{ "blockHash": B256::ZERO, "toBlock": "0x1" }]),
            -32602,
            "cannot specify both blockHash and fromBlock/toBlock",
        ),
        ("eth_getLogs", json!([{ "topics": ["0x12"] }]), -32602, ""),
    ] {
        let (found, text) = story.error(method, params.clone()).await;
        assert_eq!(found, code, "{method} {params}: {text}");
        assert!(text.contains(message), "{method} {params}: {text}");
    }
    for body in ["{bad", "[]", "7", r#"{"method":"eth_chainId","id":1}"#] {
        let (status, text) = story.post(0, body.to_owned()).await;
        let answer: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((status, &answer["error"]["code"]), (200, &json!(-32600)), "{body}");
    }
}

#[tokio::test]
async fn a_failed_call_in_a_multicall_fails_alone_unless_it_may_not() {
    let story = Story::start().await;
    let unknown = balanceOfCall { owner: MERCHANT }.abi_encode();
    let result = story
        .result("eth_call", json!([aggregate(vec![(TOKEN, unknown.clone())]), "latest"]))
        .await;
    assert_eq!(aggregated(result)[3], (false, Bytes::new()));
    let strict = Call3 { target: TOKEN, allowFailure: false, callData: unknown.into() };
    let data = Bytes::from(aggregate3Call { calls: vec![strict] }.abi_encode());
    let call = json!([{ "to": MULTICALL3, "data": data }, "latest"]);
    let (code, message) = story.error("eth_call", call).await;
    assert_eq!((code, message.as_str()), (3, "execution reverted: Multicall3: call failed"));
}

#[tokio::test]
async fn a_batch_is_answered_call_by_call_and_counted_as_many() {
    let story = Story::start().await;
    let before = story.server.requests();
    let batch = json!([
        { "jsonrpc": "2.0", "id": 1, "method": "eth_chainId", "params": [] },
        { "jsonrpc": "2.0", "id": "two", "method": "eth_nothing", "params": [] },
        { "jsonrpc": "2.0", "method": "eth_chainId" },
        { "a": 1 },
    ]);
    let (_, text) = story.post(1, batch.to_string()).await;
    let answer: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        answer,
        json!([
            { "jsonrpc": "2.0", "id": 1, "result": "0x2105" },
            { "jsonrpc": "2.0", "id": "two", "error": { "code": -32601, "message": "Method not found" } },
            { "jsonrpc": "2.0", "id": null, "error": { "code": -32600, "message": "Invalid request" } },
        ])
    );
    story.result("eth_chainId", json!([])).await;
    assert_eq!(story.server.requests() - before, 5);
    assert_eq!((story.server.requests_to(0), story.server.requests_to(1)), (1, 4));
    let note = json!({ "jsonrpc": "2.0", "method": "eth_chainId" });
    assert_eq!(story.post(0, note.to_string()).await, (204, String::new()));
}

#[tokio::test]
async fn code_is_where_contracts_are() {
    let story = Story::start().await;
    for (address, present) in [(TOKEN, true), (MULTICALL3, true), (NOWHERE, false)] {
        let code = story.result("eth_getCode", json!([address, "latest"])).await;
        assert_eq!(code != "0x", present, "{address}");
    }
    story.server.set_fault(0, Fault::NoCode);
    assert_eq!(story.result("eth_getCode", json!([TOKEN, "latest"])).await, "0x");
    let call = json!([aggregate(vec![state_of(1)]), "latest"]);
    let results = aggregated(story.result("eth_call", call).await);
    assert_eq!(word(&results[0].1), 30, "Multicall3 stays");
    assert_eq!(results[3], (true, Bytes::new()));
}

#[tokio::test]
async fn an_endpoint_that_is_down_or_overrun_answers_nothing_useful() {
    let story = Story::start().await;
    let body = json!({ "jsonrpc": "2.0", "id": 1, "method": "eth_chainId" }).to_string();
    for (fault, kind, status) in
        [(Fault::Down, FaultKind::Down, 503), (Fault::RateLimited, FaultKind::RateLimited, 429)]
    {
        assert!(story.server.set_fault(0, fault));
        assert_eq!(story.post(0, body.clone()).await.0, status);
        assert_eq!(story.post(1, body.clone()).await.0, 200, "the other endpoint is well");
        assert!(story.server.clear_fault(0, kind));
        assert_eq!(story.post(0, body.clone()).await.0, 200);
    }
    assert_eq!(story.server.requests_to(0), 4, "what came to nothing counts as well");
    assert!(!story.server.set_fault(2, Fault::Down), "there is no such endpoint");
}

#[tokio::test]
async fn a_frozen_endpoint_stays_where_it_was_and_says_nothing() {
    let story = Story::start().await;
    let (head, final_then) = (story.block("latest").await, story.block("finalized").await);
    story.server.set_fault(1, Fault::FrozenHead);
    {
        let mut chain = story.server.chain().lock();
        chain.transfer(at(70), payment(9)).unwrap();
        chain.reorg(5).unwrap();
        chain.set_time(at(100));
    }
    let frozen =
        |tag: &'static str| story.result_of(1, "eth_getBlockByNumber", json!([tag, false]));
    assert_eq!(frozen("latest").await, head);
    assert_eq!(frozen("finalized").await, final_then);
    assert_eq!(frozen("0x1f").await, Value::Null);
    let pinned = json!({ "blockHash": head["hash"], "requireCanonical": true });
    assert!(!story.used(1, 9, pinned.clone()).await);
    let beyond = json!({ "fromBlock": "0x1f", "toBlock": "0x28" });
    assert_eq!(story.logs_of(1, beyond.clone()).await, []);

    assert!(story.used(0, 9, json!("latest")).await);
    assert_eq!(story.logs(beyond).await, [(35, 0), (35, 1)]);
    assert_ne!(story.block("0x1e").await["hash"], head["hash"]);
    let (code, _) = story.error("eth_call", json!([{ "to": TOKEN }, pinned])).await;
    assert_eq!(code, -32001, "a block that was replaced has no state");

    story.server.clear_fault(1, FaultKind::FrozenHead);
    assert_eq!(story.result_of(1, "eth_blockNumber", json!([])).await, "0x32");
}

#[tokio::test]
async fn an_endpoint_can_lie_about_logs_states_and_its_chain() {
    let story = Story::start().await;
    let all = json!({ "fromBlock": "0x0", "toBlock": "latest" });
    story.server.set_fault(1, Fault::EmptyLogs);
    assert_eq!(story.logs_of(1, all.clone()).await, []);
    assert!(story.used(1, 1, json!("latest")).await);
    story.server.clear_fault(1, FaultKind::EmptyLogs);

    story.server.set_fault(1, Fault::SaysUnused);
    assert!(!story.used(1, 1, json!("latest")).await);
    assert_eq!(story.logs_of(1, all).await.len(), 8);
    story.server.clear_fault(1, FaultKind::SaysUnused);

    story.server.set_fault(1, Fault::WrongChain);
    let id = number(&story.result_of(1, "eth_chainId", json!([])).await);
    assert_ne!(id, CHAIN_ID);
    let call = json!([aggregate(vec![]), "latest"]);
    let results = aggregated(story.result_of(1, "eth_call", call).await);
    assert_eq!(word(&results[2].1), id);
    assert_eq!(story.result("eth_chainId", json!([])).await, "0x2105");
}

#[tokio::test]
async fn a_limited_endpoint_refuses_wide_log_ranges_only() {
    let story = Story::start().await;
    story.server.set_fault(0, Fault::LogRangeLimit(5));
    assert_eq!(story.logs(json!({ "fromBlock": "0x6", "toBlock": "0xa" })).await.len(), 7);
    let wide = json!([{ "fromBlock": "0x6", "toBlock": "0xb" }]);
    let (code, message) = story.error("eth_getLogs", wide).await;
    assert_eq!((code, message.as_str()), (-32005, "query exceeds max block range 5"));
}

#[tokio::test]
async fn a_stopped_server_is_gone() {
    let story = Story::start().await;
    story.result("eth_chainId", json!([])).await;
    let url = story.server.urls()[0].clone();
    story.server.stop().await.unwrap();
    let error = story.http.post(url).body("{}").send().await.unwrap_err();
    assert!(error.is_connect(), "{error:?}");
}
