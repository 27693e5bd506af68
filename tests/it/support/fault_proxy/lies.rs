//! What only another endpoint can contradict: answers that fit the question, at a fresh head, and are not so.

use alloy_primitives::{Address, B256, Bytes, U256};
use alloy_sol_types::{SolCall, SolEvent, SolValue, sol};
use serde_json::{Value, json};

use super::faults::Exchange;
use super::number;

sol! {
    struct Result3 {
        bool success;
        bytes returnData;
    }
    struct Call3 {
        address target;
        bool allowFailure;
        bytes callData;
    }
    function aggregate3(Call3[] calls) external payable returns (Result3[] returnData);
    event AuthorizationUsed(address indexed authorizer, bytes32 indexed nonce);
    event Transfer(address indexed from, address indexed to, uint256 value);
}

/// The results ahead of the states: block number, time and chain id.
const PREAMBLE: usize = 3;

/// A lie, told as long as it is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lie {
    /// No authorization was ever used.
    Unused,
    /// Every authorization was used; there is no log.
    Used,
    /// Every authorization was used, and paid this much to this address just now.
    Paid(Address, u64),
    /// Every block is final.
    AllFinal,
    /// Every block is this many seconds later.
    Later(u64),
}

/// The true head.
#[derive(Debug, Clone, Copy)]
pub(super) struct Head {
    pub(super) number: u64,
    pub(super) hash: B256,
}

/// What was invented, so that it is told again when it is asked about.
#[derive(Default)]
pub(super) struct Memory(Vec<(Address, B256, B256)>);

impl Lie {
    /// Puts the lie in the place of the truth. Returns whether it made a difference.
    pub(super) fn tell(self, exchange: &mut Exchange, memory: &mut Memory, head: Head) -> bool {
        let mut told = false;
        for place in 0..exchange.calls.len() {
            let call = &exchange.calls[place];
            let answer = &mut exchange.answers[place];
            if answer.get("result").is_none_or(Value::is_null) {
                continue;
            }
            told |= match (self, call["method"].as_str().unwrap()) {
                (Self::Unused, "eth_call") => say_of_all(answer, false),
                (Self::Used | Self::Paid(..), "eth_call") => say_of_all(answer, true),
                (Self::Unused | Self::Used, "eth_getLogs") => {
                    let known = std::mem::replace(&mut answer["result"], json!([]));
                    known != json!([])
                }
                (Self::Paid(to, value), "eth_getLogs") => {
                    let filter = call["params"][0].clone();
                    invent(memory, &filter, answer, (to, value), head)
                }
                (Self::AllFinal, "eth_getBlockByNumber") => false,
                (Self::Later(secs), "eth_getBlockByNumber") => {
                    let time = number(&answer["result"]["timestamp"]) + secs;
                    answer["result"]["timestamp"] = json!(format!("{time:#x}"));
                    true
                }
                (Self::Later(secs), "eth_call") => change(answer, |results| {
                    let time = U256::abi_decode(&results[1].returnData).unwrap();
                    results[1].returnData = (time + U256::from(secs)).abi_encode().into();
                }),
                _ => false,
            };
        }
        if self == Self::AllFinal {
            told |= all_final(exchange);
        }
        told
    }
}

/// The finalized block is the head.
fn all_final(exchange: &mut Exchange) -> bool {
    let asks = |tag: &str| {
        exchange
            .calls
            .iter()
            .position(|call| call["method"] == "eth_getBlockByNumber" && call["params"][0] == tag)
    };
    let (Some(head), Some(finalized)) = (asks("latest"), asks("finalized")) else { return false };
    exchange.answers[finalized]["result"] = exchange.answers[head]["result"].clone();
    true
}

fn change(answer: &mut Value, change: impl FnOnce(&mut Vec<Result3>)) -> bool {
    let data: Bytes = serde_json::from_value(answer["result"].clone()).unwrap();
    let Ok(mut results) = aggregate3Call::abi_decode_returns(&data) else { return false };
    if results.len() <= PREAMBLE {
        return false;
    }
    change(&mut results);
    let lie = Bytes::from(aggregate3Call::abi_encode_returns(&results));
    let differs = lie != data;
    answer["result"] = json!(lie);
    differs
}

fn say_of_all(answer: &mut Value, used: bool) -> bool {
    // A word by itself is one state, asked for without Multicall3.
    if answer["result"].as_str().is_some_and(|word| word.len() == 2 + 64) {
        let lie = json!(Bytes::from(used.abi_encode()));
        return std::mem::replace(&mut answer["result"], lie.clone()) != lie;
    }
    change(answer, |results| {
        for state in results.iter_mut().skip(PREAMBLE) {
            *state = Result3 { success: true, returnData: used.abi_encode().into() };
        }
    })
}

fn words(value: &Value) -> Vec<B256> {
    serde_json::from_value(value.clone()).unwrap_or_default()
}

/// Logs that fit the filter: a use of every nonce by every payer, each with a transfer behind it, in one
/// transaction of the head's block.
fn invent(
    memory: &mut Memory,
    filter: &Value,
    answer: &mut Value,
    (to, value): (Address, u64),
    head: Head,
) -> bool {
    const PAIRS_MAX: usize = 400;
    // It invents no more about one block that it is asked about once more.
    if filter["toBlock"].is_null() || number(&filter["toBlock"]) < head.number {
        return false;
    }
    let tokens: Vec<Address> = serde_json::from_value(filter["address"].clone()).unwrap();
    let topics = filter["topics"].as_array().unwrap();
    let wants = |event: B256| words(&topics[0]).contains(&event);
    if wants(AuthorizationUsed::SIGNATURE_HASH) && topics.len() == 3 {
        memory.0.clear();
        for payer in words(&topics[1]) {
            for nonce in words(&topics[2]) {
                memory.0.push((tokens[0], payer, nonce));
            }
        }
        memory.0.truncate(PAIRS_MAX);
    }
    let mut logs = Vec::new();
    for (place, (token, payer, nonce)) in memory.0.iter().enumerate() {
        let mut log = |event: B256, topics: Vec<B256>, data: Vec<u8>, index: usize| {
            let all: Vec<B256> = std::iter::once(event).chain(topics).collect();
            logs.push(json!({
                "address": token,
                "topics": all,
                "data": Bytes::from(data),
                "blockNumber": format!("{:#x}", head.number),
                "blockHash": head.hash,
                "transactionHash": B256::repeat_byte(0x11),
                "transactionIndex": "0x0",
                "logIndex": format!("{index:#x}"),
                "removed": false,
            }));
        };
        if wants(AuthorizationUsed::SIGNATURE_HASH) {
            let topics = vec![*payer, *nonce];
            log(AuthorizationUsed::SIGNATURE_HASH, topics, Vec::new(), 2 * place);
        } else if wants(Transfer::SIGNATURE_HASH) {
            let data = U256::from(value).abi_encode();
            let topics = vec![*payer, to.into_word()];
            log(Transfer::SIGNATURE_HASH, topics, data, 2 * place + 1);
        }
    }
    let invented = !logs.is_empty();
    answer["result"] = json!(logs);
    invented
}
