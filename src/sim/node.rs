//! JSON-RPC requests, answered from the simulated chain as anvil answers them.
//!
//! The methods are those a reader needs, and no other: nothing can be sent here. Shapes, error codes and
//! messages are anvil's; where it is laxer than go-ethereum (quantities with leading zeros), this is as
//! strict as go-ethereum. Pure: HTTP is [`super::server`]'s.

use std::collections::HashSet;

use alloy_primitives::{Address, B256, Bytes, U256};
use alloy_sol_types::{Revert, SolCall, SolError};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::abi;
use super::chain::{ChainState, View};
use super::fault::{Fault, Faults};
use super::values;
use crate::chain::{MULTICALL3, PERMIT2, X402_EXACT_PROXY, X402_UPTO_PROXY};
use crate::domain::BlockRef;

/// What stands at a contract's address. No method executes it, so any code will do.
const SOME_CODE: &str = "0x60806040526004361061000e57600080fd5b";

/// How many JSON-RPC calls a request body holds: a batch of n counts n, and anything else is one.
pub fn calls_in(body: &Value) -> u64 {
    match body {
        Value::Array(batch) => (batch.len() as u64).max(1),
        _ => 1,
    }
}

/// Answers a request or a batch. `None` when there is nothing to answer (only notifications).
pub fn answer(chain: &ChainState, faults: &Faults, body: &Value) -> Option<Value> {
    let node = Node { chain, faults, view: faults.frozen().unwrap_or_else(|| chain.view()) };
    match body {
        Value::Array(batch) if !batch.is_empty() => {
            let answers: Vec<Value> = batch.iter().filter_map(|one| node.respond(one)).collect();
            (!answers.is_empty()).then_some(Value::Array(answers))
        }
        one => node.respond(one),
    }
}

/// The answer to a body that is no JSON-RPC request at all.
pub fn invalid_request() -> Value {
    let error = RpcError::new(-32600, "Invalid request");
    json!({ "jsonrpc": "2.0", "id": null, "error": error.to_json() })
}

/// An error object.
#[derive(Debug, Clone, PartialEq, Eq)]
struct RpcError {
    code: i64,
    message: String,
    data: Option<Bytes>,
}

impl RpcError {
    fn new(code: i64, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), data: None }
    }

    fn invalid_params(message: impl Into<String>) -> Self {
        Self::new(-32602, message)
    }

    fn beyond_head(head: u64, asked: u64) -> Self {
        Self::invalid_params(format!(
            "BlockOutOfRangeError: block height is {head} but requested was {asked}"
        ))
    }

    fn reverted(data: Vec<u8>) -> Self {
        let message = match Revert::abi_decode(&data) {
            Ok(revert) => format!("execution reverted: {}", revert.reason()),
            Err(_) => "execution reverted".to_owned(),
        };
        Self { code: 3, message, data: Some(data.into()) }
    }

    fn to_json(&self) -> Value {
        let mut error = json!({ "code": self.code, "message": self.message });
        if let Some(data) = &self.data {
            error["data"] = json!(data);
        }
        error
    }
}

/// A call that reverted, with what it returned.
struct Reverted(Vec<u8>);

struct Node<'a> {
    chain: &'a ChainState,
    faults: &'a Faults,
    view: &'a View,
}

impl Node<'_> {
    fn respond(&self, request: &Value) -> Option<Value> {
        let method = request.get("method").and_then(Value::as_str);
        let versioned = request.get("jsonrpc").and_then(Value::as_str) == Some("2.0");
        let (Some(method), true) = (method, versioned) else {
            return Some(invalid_request());
        };
        let id = request.get("id")?;
        let params = match request.get("params") {
            None | Some(Value::Null) => Ok(Params(&[])),
            Some(Value::Array(params)) => Ok(Params(params)),
            Some(_) => Err(RpcError::invalid_params("invalid type: params must be a list")),
        };
        Some(match params.and_then(|params| self.call(method, params)) {
            Ok(result) => json!({ "jsonrpc": "2.0", "id": id, "result": result }),
            Err(error) => json!({ "jsonrpc": "2.0", "id": id, "error": error.to_json() }),
        })
    }

    fn call(&self, method: &str, params: Params<'_>) -> Result<Value, RpcError> {
        match method {
            "eth_chainId" => params.at_most(0).map(|()| values::quantity(self.chain_id())),
            "eth_blockNumber" => params.at_most(0).map(|()| values::quantity(self.head())),
            "eth_getBlockByNumber" => {
                let (number, full) = (params.block(0)?, params.get::<bool>(1)?);
                Ok(self.block_json(self.number(number), full))
            }
            "eth_getBlockByHash" => {
                let (hash, full) = (params.get::<B256>(0)?, params.get::<bool>(1)?);
                Ok(self.block_json(self.chain.number_of(self.view, hash), full))
            }
            "eth_call" => self.eth_call(params),
            "eth_getLogs" => self.logs(params.get(0)?),
            "eth_getCode" => self.code(params),
            "eth_getTransactionByHash" => self.transaction(params.get(0)?),
            "eth_getTransactionReceipt" => self.receipt(params.get(0)?),
            _ => Err(RpcError::new(-32601, "Method not found")),
        }
    }

    fn chain_id(&self) -> u64 {
        self.faults.chain_id(self.chain.settings().chain_id).get()
    }

    fn head(&self) -> u64 {
        self.chain.head(self.view)
    }

    /// The number of a block, `None` when it does not exist (yet, or any more).
    fn number(&self, id: BlockId) -> Option<u64> {
        match id {
            BlockId::Latest => Some(self.head()),
            BlockId::Safe => Some(self.chain.safe(self.view)),
            BlockId::Finalized => Some(self.chain.finalized(self.view)),
            BlockId::Number(number) => (number <= self.head()).then_some(number),
            BlockId::Hash(hash) => self.chain.number_of(self.view, hash),
        }
    }

    /// The block whose state is asked for.
    fn state_at(&self, id: BlockId) -> Result<BlockRef, RpcError> {
        self.number(id).and_then(|number| self.chain.block(self.view, number)).ok_or(match id {
            BlockId::Number(asked) => RpcError::beyond_head(self.head(), asked),
            _ => RpcError::new(-32001, "Resource not found"),
        })
    }

    fn block_json(&self, number: Option<u64>, full: bool) -> Value {
        number
            .and_then(|number| self.chain.block(self.view, number))
            .map_or(Value::Null, |block| values::block(self.chain, self.view, block, full))
    }

    fn code(&self, params: Params<'_>) -> Result<Value, RpcError> {
        let address: Address = params.get(0)?;
        self.state_at(params.block(1)?)?;
        Ok(Value::from(if self.has_code(address) { SOME_CODE } else { "0x" }))
    }

    fn has_code(&self, address: Address) -> bool {
        (address == MULTICALL3 && self.chain.has_multicall())
            || [PERMIT2, X402_EXACT_PROXY, X402_UPTO_PROXY].contains(&address)
            || (address == self.chain.settings().token && !self.faults.has(Fault::NoCode))
    }

    fn transaction(&self, hash: B256) -> Result<Value, RpcError> {
        let Some((number, index)) = self.chain.find_transaction(self.view, hash) else {
            return Ok(Value::Null);
        };
        let found = self.chain.block(self.view, number).zip(self.chain.contents(self.view, number));
        Ok(found.map_or(Value::Null, |(block, contents)| {
            let chain_id = self.chain.settings().chain_id;
            values::full_transaction(chain_id, block, &contents.transactions[index], index)
        }))
    }

    fn receipt(&self, hash: B256) -> Result<Value, RpcError> {
        let Some((number, index)) = self.chain.find_transaction(self.view, hash) else {
            return Ok(Value::Null);
        };
        let found = self.chain.block(self.view, number).zip(self.chain.contents(self.view, number));
        Ok(found.map_or(Value::Null, |(block, contents)| {
            values::receipt(self.chain.settings().token, block, contents, index)
        }))
    }

    fn eth_call(&self, params: Params<'_>) -> Result<Value, RpcError> {
        let request: CallRequest = params.get(0)?;
        let block = self.state_at(params.block_or_latest(1)?)?;
        let data = request.input.or(request.data).unwrap_or_default();
        let returned = match request.to {
            Some(MULTICALL3)
                if self.chain.has_multicall()
                    && data.starts_with(&abi::aggregate3Call::SELECTOR) =>
            {
                self.aggregate3(&data, block)
            }
            Some(target) => self.contract_call(target, &data, block),
            None => Ok(Vec::new()),
        };
        match returned {
            Ok(data) => Ok(json!(Bytes::from(data))),
            Err(Reverted(data)) => Err(RpcError::reverted(data)),
        }
    }

    fn aggregate3(&self, data: &[u8], block: BlockRef) -> Result<Vec<u8>, Reverted> {
        let decoded =
            abi::aggregate3Call::abi_decode_validate(data).map_err(|_| Reverted(Vec::new()))?;
        let mut results = Vec::with_capacity(decoded.calls.len());
        for call in decoded.calls {
            let (success, returned) = match self.contract_call(call.target, &call.callData, block) {
                Ok(returned) => (true, returned),
                Err(Reverted(returned)) => (false, returned),
            };
            if !success && !call.allowFailure {
                return Err(Reverted(Revert::from("Multicall3: call failed").abi_encode()));
            }
            results.push(abi::CallResult { success, returnData: returned.into() });
        }
        Ok(abi::aggregate3Call::abi_encode_returns(&results))
    }

    /// One call of one contract. Where no code is, it succeeds and returns nothing, as in the EVM.
    fn contract_call(
        &self,
        target: Address,
        data: &[u8],
        block: BlockRef,
    ) -> Result<Vec<u8>, Reverted> {
        if !self.has_code(target) {
            return Ok(Vec::new());
        }
        let selector = data.first_chunk::<4>().copied().unwrap_or_default();
        if target == PERMIT2 {
            return self.permit2_call(data, block);
        }
        match (target == MULTICALL3, selector) {
            (true, abi::getBlockNumberCall::SELECTOR) => {
                Ok(abi::getBlockNumberCall::abi_encode_returns(&U256::from(block.number)))
            }
            (true, abi::getCurrentBlockTimestampCall::SELECTOR) => {
                let time = U256::from(block.time.as_secs());
                Ok(abi::getCurrentBlockTimestampCall::abi_encode_returns(&time))
            }
            (true, abi::getChainIdCall::SELECTOR) => {
                Ok(abi::getChainIdCall::abi_encode_returns(&U256::from(self.chain_id())))
            }
            (false, abi::authorizationStateCall::SELECTOR) => {
                let call = abi::authorizationStateCall::abi_decode_validate(data)
                    .map_err(|_| Reverted(Vec::new()))?;
                let used = !self.faults.has(Fault::SaysUnused)
                    && self.chain.nonce_used(self.view, call.authorizer, call.nonce, block.number);
                Ok(abi::authorizationStateCall::abi_encode_returns(&used))
            }
            _ => Err(Reverted(Vec::new())),
        }
    }

    fn permit2_call(&self, data: &[u8], block: BlockRef) -> Result<Vec<u8>, Reverted> {
        let call =
            abi::nonceBitmapCall::abi_decode_validate(data).map_err(|_| Reverted(Vec::new()))?;
        let word = match self.faults.has(Fault::SaysUnused) {
            true => U256::ZERO,
            false => self.chain.nonce_bitmap(self.view, call.owner, call.wordPos, block.number),
        };
        Ok(abi::nonceBitmapCall::abi_encode_returns(&word))
    }

    fn logs(&self, filter: Filter) -> Result<Value, RpcError> {
        let (first, last) = self.log_range(&filter)?;
        let width = last.saturating_sub(first).saturating_add(1);
        if let Some(max) = self.faults.log_range_max().filter(|max| width > *max) {
            let message = format!("query exceeds max block range {max}");
            return Err(RpcError::new(-32005, message));
        }
        // A node that lags finds nothing beyond its head and does not say why (go-ethereum #24078).
        if first > self.head() && self.faults.frozen().is_none() {
            return Err(RpcError::beyond_head(self.head(), first));
        }
        let token = self.chain.settings().token;
        if self.faults.has(Fault::EmptyLogs) {
            return Ok(json!([]));
        }
        let mut found = Vec::new();
        for (number, contents) in self.chain.contents_between(self.view, first, last) {
            let mut matching = values::logs_of(contents)
                .filter(|log| filter.address.admits(&log.emitter(token)))
                .filter(|log| filter.topics_match(&log.topics))
                .peekable();
            // A block's hash costs more than all of its logs: only where it is needed.
            if matching.peek().is_some()
                && let Some(block) = self.chain.block(self.view, number)
            {
                found.extend(matching.map(|log| values::log(token, block, &log)));
            }
        }
        Ok(Value::Array(found))
    }

    /// The first and last block to search; the last may be beyond the head.
    fn log_range(&self, filter: &Filter) -> Result<(u64, u64), RpcError> {
        if let Some(hash) = filter.block_hash {
            if filter.from_block.is_some() || filter.to_block.is_some() {
                return Err(RpcError::invalid_params(
                    "cannot specify both blockHash and fromBlock/toBlock, choose one or the other",
                ));
            }
            return self
                .chain
                .number_of(self.view, hash)
                .map(|number| (number, number))
                .ok_or_else(|| RpcError::new(-32000, "unknown block"));
        }
        let bound = |value: &Option<Value>| match value.as_ref().map(BlockId::parse).transpose()? {
            None => Ok(self.head()),
            Some(BlockId::Number(number)) => Ok(number),
            Some(BlockId::Hash(_)) => {
                Err(RpcError::invalid_params("a hash is no bound of a range"))
            }
            Some(tag) => Ok(self.number(tag).unwrap_or_else(|| self.head())),
        };
        Ok((bound(&filter.from_block)?, bound(&filter.to_block)?))
    }
}

/// The parameters of a call.
#[derive(Clone, Copy)]
struct Params<'a>(&'a [Value]);

impl Params<'_> {
    fn at_most(self, count: usize) -> Result<(), RpcError> {
        if self.0.len() > count {
            let found = self.0.len();
            return Err(RpcError::invalid_params(format!(
                "invalid length {found}, expected at most {count}"
            )));
        }
        Ok(())
    }

    fn value(&self, index: usize) -> Result<&Value, RpcError> {
        self.0.get(index).ok_or_else(|| {
            let found = self.0.len();
            RpcError::invalid_params(format!("invalid length {found}, expected more parameters"))
        })
    }

    fn get<T: DeserializeOwned>(&self, index: usize) -> Result<T, RpcError> {
        T::deserialize(self.value(index)?)
            .map_err(|error| RpcError::invalid_params(error.to_string()))
    }

    fn block(&self, index: usize) -> Result<BlockId, RpcError> {
        BlockId::parse(self.value(index)?)
    }

    fn block_or_latest(&self, index: usize) -> Result<BlockId, RpcError> {
        self.0.get(index).map_or(Ok(BlockId::Latest), BlockId::parse)
    }
}

/// A block parameter: a tag, a number, or an EIP-1898 object.
///
/// `requireCanonical` makes no difference: like anvil, this node keeps no state of any other block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BlockId {
    Latest,
    Safe,
    Finalized,
    Number(u64),
    Hash(B256),
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct BlockIdObject {
    block_hash: Option<B256>,
    block_number: Option<Value>,
}

impl BlockId {
    fn parse(value: &Value) -> Result<Self, RpcError> {
        match value {
            Value::Null => return Ok(Self::Latest),
            Value::String(text) => return Self::parse_text(text),
            _ => {}
        }
        let object = BlockIdObject::deserialize(value)
            .map_err(|error| RpcError::invalid_params(error.to_string()))?;
        match (object.block_hash, object.block_number) {
            (Some(hash), None) => Ok(Self::Hash(hash)),
            (None, Some(Value::String(number))) => Self::parse_text(&number),
            _ => Err(RpcError::invalid_params("expected either blockHash or blockNumber")),
        }
    }

    fn parse_text(text: &str) -> Result<Self, RpcError> {
        match text {
            // No mempool: what is pending is what is latest.
            "latest" | "pending" => return Ok(Self::Latest),
            "safe" => return Ok(Self::Safe),
            "finalized" => return Ok(Self::Finalized),
            "earliest" => return Ok(Self::Number(0)),
            _ => {}
        }
        let digits = text
            .strip_prefix("0x")
            .ok_or_else(|| RpcError::invalid_params("hex string without 0x prefix"))?;
        if digits.len() > 1 && digits.starts_with('0') {
            return Err(RpcError::invalid_params("hex number with leading zero digits"));
        }
        u64::from_str_radix(digits, 16)
            .map(Self::Number)
            .map_err(|error| RpcError::invalid_params(error.to_string()))
    }
}

#[derive(Deserialize)]
struct CallRequest {
    to: Option<Address>,
    input: Option<Bytes>,
    data: Option<Bytes>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Filter {
    from_block: Option<Value>,
    to_block: Option<Value>,
    block_hash: Option<B256>,
    #[serde(default)]
    address: AnyOf<Address>,
    #[serde(default)]
    topics: Vec<AnyOf<B256>>,
}

impl Filter {
    /// Position by position; a log with fewer topics than the filter has positions never matches.
    fn topics_match(&self, topics: &[B256]) -> bool {
        self.topics.len() <= topics.len()
            && self.topics.iter().zip(topics).all(|(wanted, topic)| wanted.admits(topic))
    }
}

/// `null`, one value, or any of several; `null` and an empty list admit everything.
struct AnyOf<T>(HashSet<T>);

impl<T> Default for AnyOf<T> {
    fn default() -> Self {
        Self(HashSet::new())
    }
}

impl<T: Eq + std::hash::Hash> AnyOf<T> {
    fn admits(&self, value: &T) -> bool {
        self.0.is_empty() || self.0.contains(value)
    }
}

impl<'de, T: Deserialize<'de> + Eq + std::hash::Hash> Deserialize<'de> for AnyOf<T> {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Shape<T> {
            One(T),
            Many(Vec<T>),
        }
        Ok(Self(match Option::<Shape<T>>::deserialize(deserializer)? {
            None => HashSet::new(),
            Some(Shape::One(value)) => HashSet::from([value]),
            Some(Shape::Many(values)) => values.into_iter().collect(),
        }))
    }
}
