//! The simulated node answers as anvil does: the same story on both, the same questions to both, and
//! answers of the same members, types, encodings and error codes.
//!
//! Values differ (gas, hashes), so an answer is reduced to its shape before it is compared.

use alloy_primitives::{Address, B256, Bytes, U256, hex, keccak256};
use alloy_sol_types::SolValue;
use reconciled::chain::MULTICALL3;
use serde_json::{Map, Value, json};

use super::backend::{TestChain, authorization};
use super::on_anvil::OnAnvil;
use super::on_sim::OnSim;

/// A value without what may differ: quantities lose their size, data keeps its length.
fn shape(key: &str, value: &Value) -> Value {
    match value {
        // What no reader may rely on: signatures and calldata.
        Value::String(_) if ["r", "s", "input"].contains(&key) => json!("some data"),
        Value::String(text) => match text.strip_prefix("0x") {
            None => value.clone(),
            Some("") => json!("no data"),
            Some(digits) if digits.len() <= 16 && (digits == "0" || !digits.starts_with('0')) => {
                json!("quantity")
            }
            Some(digits) => json!(format!("{} digits of data", digits.len())),
        },
        Value::Number(_) => json!("number"),
        Value::Array(items) => items.iter().map(|item| shape(key, item)).collect(),
        Value::Object(members) => {
            let members = members.iter().map(|(key, value)| (key.clone(), shape(key, value)));
            Value::Object(members.collect::<Map<_, _>>())
        }
        Value::Null | Value::Bool(_) => value.clone(),
    }
}

fn answer_shape(answer: &Value) -> Value {
    match answer.get("error") {
        // Parse errors are worded by the parser; their codes are what a reader acts on.
        Some(error) => json!({ "code": error["code"], "data": error.get("data").is_some() }),
        None => shape("", &answer["result"]),
    }
}

fn call(target: Address, signature: &str, arguments: Vec<u8>) -> Value {
    let mut data = keccak256(signature)[..4].to_vec();
    data.extend(arguments);
    json!({ "to": target, "input": Bytes::from(data) })
}

/// Lives one story on `chain` and asks it everything a reader may ask.
async fn interview<C: TestChain>() -> Vec<(String, Value)> {
    let chain = C::start().await;
    let mut four = Vec::new();
    for n in 1..=4 {
        four.push(authorization(&chain, n).await);
    }
    chain.fail(&four[0]).await;
    let failed_in = chain.head().await;
    let landed = chain.transfer(&four[..1]).await;
    chain.mine(1).await;
    let batch = chain.transfer(&four[1..3]).await;
    let canceled = chain.cancel(&four[3]).await;
    chain.mine(5).await;

    let hex = |number: u64| format!("{number:#x}");
    let (token, head) = (chain.token(), chain.head().await.number);
    let state = |n: usize| {
        let arguments = (four[n].payer, four[n].nonce).abi_encode();
        call(token, "authorizationState(address,bytes32)", arguments)
    };
    let calls: Vec<(Address, bool, Bytes)> = [
        (MULTICALL3, call(MULTICALL3, "getBlockNumber()", vec![])),
        (MULTICALL3, call(MULTICALL3, "getCurrentBlockTimestamp()", vec![])),
        (MULTICALL3, call(MULTICALL3, "getChainId()", vec![])),
        (token, state(0)),
        (token, call(token, "nothing()", vec![])),
        (PLAIN, state(0)),
    ]
    .into_iter()
    .map(|(target, call)| (target, true, call["input"].as_str().unwrap().parse().unwrap()))
    .collect();
    let aggregate = |calls: &Vec<(Address, bool, Bytes)>| {
        call(MULTICALL3, "aggregate3((address,bool,bytes)[])", (calls.clone(),).abi_encode_params())
    };
    let strict = vec![(token, false, Bytes::from_static(&[1, 2, 3, 4]))];
    let pinned = json!({ "blockHash": landed.block.hash, "requireCanonical": true });
    let (from, to) = (hex(failed_in.number), hex(canceled.block.number));
    let payer_topics: Vec<B256> = four.iter().map(|a| a.payer.into_word()).collect();
    let used = keccak256("AuthorizationUsed(address,bytes32)");
    let empty = hex(landed.block.number + 1);
    let failed = {
        let block = ask(&chain, "eth_getBlockByNumber", json!([from, false])).await;
        block["result"]["transactions"][0].clone()
    };

    let questions = [
        ("eth_chainId", json!([])),
        ("eth_blockNumber", json!([])),
        ("eth_getBlockByNumber", json!([hex(landed.block.number), false])),
        ("eth_getBlockByNumber", json!([hex(landed.block.number), true])),
        ("eth_getBlockByNumber", json!([empty, false])),
        ("eth_getBlockByNumber", json!(["latest", false])),
        ("eth_getBlockByNumber", json!(["safe", false])),
        ("eth_getBlockByNumber", json!(["finalized", false])),
        ("eth_getBlockByNumber", json!(["earliest", false])),
        ("eth_getBlockByNumber", json!([hex(head + 9), false])),
        ("eth_getBlockByNumber", json!(["latest"])),
        ("eth_getBlockByNumber", json!(["twelve", false])),
        ("eth_getBlockByHash", json!([landed.block.hash, false])),
        ("eth_getBlockByHash", json!([B256::repeat_byte(9), false])),
        ("eth_getBlockByHash", json!(["0x12", false])),
        ("eth_getTransactionReceipt", json!([landed.tx_hash])),
        ("eth_getTransactionReceipt", json!([batch.tx_hash])),
        ("eth_getTransactionReceipt", json!([canceled.tx_hash])),
        ("eth_getTransactionReceipt", json!([failed])),
        ("eth_getTransactionReceipt", json!([B256::repeat_byte(9)])),
        ("eth_getLogs", json!([{ "fromBlock": from, "toBlock": to, "address": token }])),
        (
            "eth_getLogs",
            json!([{ "fromBlock": from, "toBlock": hex(head + 9), "address": [token] }]),
        ),
        ("eth_getLogs", json!([{ "fromBlock": from, "toBlock": to, "address": PLAIN }])),
        ("eth_getLogs", json!([{ "fromBlock": from, "toBlock": to, "topics": [used] }])),
        (
            "eth_getLogs",
            json!([{ "fromBlock": from, "toBlock": to, "topics": [[used], payer_topics] }]),
        ),
        (
            "eth_getLogs",
            json!([{ "fromBlock": from, "toBlock": to, "topics": [null, null, four[1].nonce] }]),
        ),
        ("eth_getLogs", json!([{ "blockHash": batch.block.hash }])),
        ("eth_getLogs", json!([{ "blockHash": B256::repeat_byte(9) }])),
        ("eth_getLogs", json!([{ "blockHash": batch.block.hash, "fromBlock": from }])),
        ("eth_getLogs", json!([{ "fromBlock": hex(head + 5), "toBlock": hex(head + 9) }])),
        ("eth_getLogs", json!([{ "fromBlock": to, "toBlock": from }])),
        ("eth_getLogs", json!([{}])),
        ("eth_getCode", json!([PLAIN, "latest"])),
        ("eth_getCode", json!([PLAIN])),
        ("eth_call", json!([state(0), "latest"])),
        ("eth_call", json!([state(0)])),
        ("eth_call", json!([state(3), pinned])),
        ("eth_call", json!([aggregate(&calls), pinned])),
        ("eth_call", json!([aggregate(&calls), hex(landed.block.number)])),
        ("eth_call", json!([aggregate(&calls), { "blockNumber": hex(landed.block.number) }])),
        ("eth_call", json!([aggregate(&strict), "latest"])),
        ("eth_call", json!([call(token, "nothing()", vec![]), "latest"])),
        ("eth_call", json!([call(PLAIN, "nothing()", vec![]), "latest"])),
        ("eth_call", json!([state(0), hex(head + 9)])),
        (
            "eth_call",
            json!([state(0), { "blockHash": B256::repeat_byte(9), "requireCanonical": true }]),
        ),
        ("eth_call", json!([{ "to": "0x12" }, "latest"])),
        ("eth_unheardOf", json!([])),
        ("eth_chainId", json!(["x"])),
    ];
    let mut answers = Vec::new();
    for (method, params) in questions {
        let answer = ask(&chain, method, params).await;
        let facts = facts(method, &answer["result"]);
        let title = format!("question {}: {method}", answers.len());
        answers.push((title, json!([answer_shape(&answer), facts])));
    }
    answers
}

/// What must be equal as well, beyond the shape: states, and what a log or receipt says.
fn facts(method: &str, result: &Value) -> Value {
    let of_logs = |logs: &Value| -> Value {
        let places = logs.as_array().into_iter().flatten();
        places.map(|log| json!([log["topics"][0], log["data"], log["logIndex"]])).collect()
    };
    match method {
        "eth_getLogs" => of_logs(result),
        "eth_getTransactionReceipt" => json!([result["status"], of_logs(&result["logs"])]),
        "eth_getBlockByNumber" => {
            let bloom = result["logsBloom"].as_str().map(|text| hex::decode(text).unwrap());
            json!(bloom.map(|bytes| bytes.iter().any(|byte| *byte != 0)))
        }
        "eth_call" => match result.as_str().map(|text| hex::decode(text).unwrap()) {
            Some(word) if word.len() == 32 => json!(U256::from_be_slice(&word)),
            _ => Value::Null,
        },
        _ => Value::Null,
    }
}

/// An address without code.
const PLAIN: Address = Address::repeat_byte(0x55);

async fn ask(chain: &impl TestChain, method: &str, params: Value) -> Value {
    let request = json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params });
    #[allow(clippy::disallowed_methods, reason = "not the daemon's own client")]
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    let response = http
        .post(chain.url())
        .header("content-type", "application/json")
        .body(request.to_string())
        .send()
        .await
        .unwrap();
    serde_json::from_slice(&response.bytes().await.unwrap()).unwrap()
}

#[tokio::test]
async fn the_simulated_node_answers_as_anvil_does() {
    let anvil = interview::<OnAnvil>().await;
    let sim = interview::<OnSim>().await;
    assert_eq!(anvil.len(), sim.len());
    let mut differences = Vec::new();
    for (anvil, sim) in anvil.iter().zip(&sim) {
        if anvil != sim {
            differences.push(format!("{}\n  anvil {}\n  sim   {}", anvil.0, anvil.1, sim.1));
        }
    }
    assert!(differences.is_empty(), "{}", differences.join("\n"));
}
