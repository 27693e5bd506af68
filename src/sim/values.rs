//! Chain values as JSON-RPC writes them: quantities without leading zeros, data in full, and the exact
//! members a node gives for headers, logs and receipts.

use alloy_primitives::{Address, B256, Bloom, Bytes, b256, keccak256};
use serde_json::{Value, json};

use super::chain::{ChainEvent, ChainState, Contents, Transaction, View, bloom_of};
use crate::domain::{BlockRef, ChainId};

/// keccak256(rlp([])): the uncles of a block that has none.
const NO_UNCLES: B256 = b256!("0x1dcc4de8dec75d7aab85b567b6ccd41ad312451b948a7413f0a142fd40d49347");
/// The root of an empty trie.
const EMPTY_ROOT: B256 =
    b256!("0x56e81f171bcc55a6ff8345e692c0f86e5b48e01b996cadc001622fb5e363b421");
/// sha256(""): the requests of a block that has none (EIP-7685).
const NO_REQUESTS: B256 =
    b256!("0xe3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
/// What every transaction costs; nobody reads it.
const GAS_PER_TRANSACTION: u64 = 60_000;
const GAS_PRICE: u64 = 1_000_000_000;
const GAS_LIMIT: u64 = 30_000_000;

/// A number: `0x`, hexadecimal, no leading zeros.
pub(super) fn quantity(number: u64) -> Value {
    Value::String(format!("{number:#x}"))
}

/// A block with its transactions, in full or as hashes.
pub(super) fn block(chain: &ChainState, view: &View, block: BlockRef, full: bool) -> Value {
    let contents = chain.contents(view, block.number);
    let transactions = contents.map_or(&[][..], |c| &c.transactions);
    let root = |tag: &[u8]| match transactions {
        [] => EMPTY_ROOT,
        _ => keccak256([tag, block.hash.as_slice()].concat()),
    };
    let listed: Vec<Value> = transactions
        .iter()
        .enumerate()
        .map(|(index, transaction)| match full {
            true => full_transaction(chain.settings().chain_id, block, transaction, index),
            false => json!(transaction.hash),
        })
        .collect();
    json!({
        "hash": block.hash,
        "parentHash": chain.parent_hash(view, block.number),
        "sha3Uncles": NO_UNCLES,
        "miner": Address::ZERO,
        "stateRoot": keccak256([b"state".as_slice(), block.hash.as_slice()].concat()),
        "transactionsRoot": root(b"transactions"),
        "receiptsRoot": root(b"receipts"),
        "logsBloom": contents.map_or(Bloom::ZERO, |c| c.bloom(chain.settings().token)),
        "difficulty": "0x0",
        "number": quantity(block.number),
        "gasLimit": quantity(GAS_LIMIT),
        "gasUsed": quantity(GAS_PER_TRANSACTION * transactions.len() as u64),
        "timestamp": quantity(block.time.as_secs()),
        "extraData": "0x",
        "mixHash": keccak256([b"mix".as_slice(), block.hash.as_slice()].concat()),
        "nonce": "0x0000000000000000",
        "baseFeePerGas": quantity(GAS_PRICE),
        "withdrawalsRoot": EMPTY_ROOT,
        "blobGasUsed": "0x0",
        "excessBlobGas": "0x0",
        "parentBeaconBlockRoot": B256::ZERO,
        "requestsHash": NO_REQUESTS,
        "totalDifficulty": "0x0",
        "size": quantity(615),
        "uncles": [],
        "transactions": listed,
        "withdrawals": [],
    })
}

/// A transaction as `eth_getTransactionByHash` and full blocks give it.
pub(super) fn full_transaction(
    chain_id: ChainId,
    block: BlockRef,
    transaction: &Transaction,
    index: usize,
) -> Value {
    json!({
        "type": "0x2",
        "chainId": quantity(chain_id.get()),
        "nonce": "0x0",
        "gas": quantity(GAS_PER_TRANSACTION),
        "maxFeePerGas": quantity(GAS_PRICE),
        "maxPriorityFeePerGas": quantity(GAS_PRICE),
        "to": transaction.to,
        "value": "0x0",
        "accessList": [],
        "input": transaction.input,
        "r": transaction.hash,
        "s": transaction.hash,
        "yParity": "0x0",
        "v": "0x0",
        "hash": transaction.hash,
        "blockHash": block.hash,
        "blockNumber": quantity(block.number),
        "transactionIndex": quantity(index as u64),
        "from": transaction.from,
        "gasPrice": quantity(GAS_PRICE),
        "blockTimestamp": quantity(block.time.as_secs()),
    })
}

/// A log with the topics it was found by.
pub(super) struct Log<'a> {
    pub(super) transaction: &'a Transaction,
    pub(super) transaction_index: usize,
    pub(super) log_index: usize,
    pub(super) topics: Vec<B256>,
    event: &'a ChainEvent,
}

impl Log<'_> {
    /// Who emitted it.
    pub(super) fn emitter(&self, token: Address) -> Address {
        self.event.emitter(token)
    }
}

/// Every log of a block, in order.
pub(super) fn logs_of(contents: &Contents) -> impl Iterator<Item = Log<'_>> {
    contents
        .transactions
        .iter()
        .enumerate()
        .flat_map(|(index, transaction)| {
            transaction.events.iter().map(move |event| (index, transaction, event))
        })
        .enumerate()
        .map(|(log_index, (transaction_index, transaction, event))| Log {
            transaction,
            transaction_index,
            log_index,
            topics: event.topics(),
            event,
        })
}

/// A log as `eth_getLogs` and receipts give it.
pub(super) fn log(token: Address, block: BlockRef, log: &Log<'_>) -> Value {
    json!({
        "address": log.emitter(token),
        "topics": log.topics,
        "data": Bytes::from(log.event.data()),
        "blockHash": block.hash,
        "blockNumber": quantity(block.number),
        "blockTimestamp": quantity(block.time.as_secs()),
        "transactionHash": log.transaction.hash,
        "transactionIndex": quantity(log.transaction_index as u64),
        "logIndex": quantity(log.log_index as u64),
        "removed": false,
    })
}

/// A receipt.
pub(super) fn receipt(token: Address, block: BlockRef, contents: &Contents, index: usize) -> Value {
    let transaction = &contents.transactions[index];
    let own = logs_of(contents).filter(|log| log.transaction_index == index);
    json!({
        "type": "0x2",
        "status": quantity(u64::from(transaction.succeeded)),
        "cumulativeGasUsed": quantity(GAS_PER_TRANSACTION * (index as u64 + 1)),
        "logs": own.map(|own| log(token, block, &own)).collect::<Vec<_>>(),
        "logsBloom": bloom_of(token, std::slice::from_ref(transaction)),
        "transactionHash": transaction.hash,
        "transactionIndex": quantity(index as u64),
        "blockHash": block.hash,
        "blockNumber": quantity(block.number),
        "gasUsed": quantity(GAS_PER_TRANSACTION),
        "effectiveGasPrice": quantity(GAS_PRICE),
        "blobGasPrice": "0x1",
        "from": transaction.from,
        "to": transaction.to,
        "contractAddress": null,
        // A plain number, as anvil writes it.
        "blockTimestamp": block.time.as_secs(),
    })
}
