//! What is so: read from the chain itself, whole, past every faulty endpoint.

use std::collections::{BTreeMap, HashMap};

use alloy_primitives::{Address, B256, U256, keccak256};
use serde_json::{Value, json};

use super::ground::Ground;
use crate::support::fault_proxy::number;

/// Money that moved by authorization.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Moved {
    pub(super) to: Address,
    pub(super) value: u64,
    pub(super) block: u64,
    pub(super) tx_hash: String,
    /// Of the transfer.
    pub(super) log_index: u64,
}

/// What became of every authorization, and what reached each address, as of one moment.
#[derive(Debug, Default)]
pub(super) struct Truth {
    /// By payer and nonce; `None` where it was canceled.
    pub(super) consumed: HashMap<(Address, B256), Option<Moved>>,
    /// Every transfer by (transaction, log index): to whom, and how much.
    pub(super) transfers: BTreeMap<(String, u64), (Address, u64)>,
}

/// All logs of the token, as far as they were read.
#[derive(Debug, Default)]
pub(super) struct Past {
    logs: Vec<Value>,
    /// How many of them are in final blocks, and the last of those blocks.
    final_logs: usize,
    finalized: u64,
}

impl Past {
    /// Reads what is not final, and what has come since.
    pub(super) async fn follow(&mut self, chain: &impl Ground) {
        let first = if self.finalized == 0 { 0 } else { self.finalized + 1 };
        let first = format!("{first:#x}");
        let filter = json!([{ "fromBlock": first, "toBlock": "latest", "address": chain.token() }]);
        let mut logs = chain.node().rpc("eth_getLogs", filter).await;
        self.logs.truncate(self.final_logs);
        self.logs.append(logs.as_array_mut().unwrap());
        self.finalized = chain.node().block("finalized").await.number;
        let is_final = |log: &&Value| number(&log["blockNumber"]) <= self.finalized;
        self.final_logs = self.logs.iter().take_while(is_final).count();
    }

    /// What it all means.
    pub(super) fn truth(&self) -> Truth {
        let mut truth = Truth::default();
        let mut before: Option<&Value> = None;
        for log in &self.logs {
            let event: B256 = topic(log, 0);
            if event == keccak256("AuthorizationCanceled(address,bytes32)") {
                truth.consumed.insert(authorization(log), None);
            } else if event == keccak256("Transfer(address,address,uint256)") {
                let to = Address::from_word(topic(log, 2));
                let value: U256 = log["data"].as_str().unwrap().parse().unwrap();
                let value: u64 = value.to();
                let (block, log_index) = (number(&log["blockNumber"]), number(&log["logIndex"]));
                let tx_hash = log["transactionHash"].as_str().unwrap().to_owned();
                truth.transfers.insert((tx_hash.clone(), log_index), (to, value));
                if let Some(used) = before.filter(|before| is_use(before)) {
                    let moved = Moved { to, value, block, tx_hash, log_index };
                    truth.consumed.insert(authorization(used), Some(moved));
                }
            }
            before = Some(log);
        }
        truth
    }
}

impl Truth {
    /// Reads all logs of the token.
    pub(super) async fn of(chain: &impl Ground) -> Self {
        let mut past = Past::default();
        past.follow(chain).await;
        past.truth()
    }

    /// Every transfer to this address: where, and how much.
    pub(super) fn received(&self, by: Address) -> BTreeMap<&(String, u64), u64> {
        let to = self.transfers.iter().filter(|(_, (to, _))| *to == by);
        to.map(|(place, (_, value))| (place, *value)).collect()
    }
}

fn topic(log: &Value, place: usize) -> B256 {
    serde_json::from_value(log["topics"][place].clone()).unwrap()
}

fn is_use(log: &Value) -> bool {
    topic(log, 0) == keccak256("AuthorizationUsed(address,bytes32)")
}

fn authorization(log: &Value) -> (Address, B256) {
    (Address::from_word(topic(log, 1)), topic(log, 2))
}
