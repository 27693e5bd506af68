//! State reads: words of contracts' state, in one call per few hundred, pinned to one block hash.
//!
//! Through Multicall3, so that block, time, chain id and state come from one backend. Where it is
//! absent, through JSON-RPC batches at the same block hash. What a word means is the asker's business.

use alloy_primitives::{Address, B256, Bytes, U64, U256};
use alloy_sol_types::{SolCall, sol};
use serde_json::json;

use super::ChainSettings;
use super::endpoint::Endpoint;
use super::error::CallError;
use super::transport::{Call, CallResult, decode};
use crate::domain::{BlockRef, ReadFailure, ReadFailureKind};

sol! {
    struct Call3 {
        address target;
        bool allowFailure;
        bytes callData;
    }
    struct Result3 {
        bool success;
        bytes returnData;
    }
    function aggregate3(Call3[] calls) external payable returns (Result3[] returnData);
    function getBlockNumber() external view returns (uint256 blockNumber);
    function getCurrentBlockTimestamp() external view returns (uint256 timestamp);
    function getChainId() external view returns (uint256 chainid);
}

/// The calls of an `aggregate3`, in order: whom, and with what. Multicall3 makes these, and no others.
pub(super) fn aggregate3_calls(input: &[u8]) -> Option<Vec<(Address, Bytes)>> {
    let call = aggregate3Call::abi_decode(input).ok()?;
    Some(call.calls.into_iter().map(|call| (call.target, call.callData)).collect())
}

/// The calldata of an `aggregate3` of which any call may fail.
pub(super) fn aggregate3_input(calls: impl Iterator<Item = (Address, Bytes)>) -> Bytes {
    let call = |(target, data)| Call3 { target, allowFailure: true, callData: data };
    aggregate3Call { calls: calls.map(call).collect() }.abi_encode().into()
}

/// A call of a contract that answers with one word.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct StateCall {
    /// The contract.
    pub(super) target: Address,
    /// The function's name, for people.
    pub(super) what: &'static str,
    /// The call itself.
    pub(super) data: Bytes,
}

/// The calls that say where the state was read, ahead of the calls for it.
const PREAMBLE: usize = 3;

fn bad(detail: String) -> ReadFailure {
    ReadFailure::new(ReadFailureKind::BadAnswer, detail)
}

fn no_code(call: &StateCall) -> ReadFailure {
    ReadFailure::new(
        ReadFailureKind::NoCode,
        format!("{} of {} answers nothing or fails", call.what, call.target),
    )
}

/// The most times a call that took too much is made in two halves, in one read: enough to single out several
/// contracts among a few hundred.
const SPLITS_MAX: usize = 128;

/// How nodes say that a call took too much: gas, memory or time. Lower case.
const TOO_MUCH_PHRASES: [&str; 5] =
    ["gas", "oog", "memory limit", "execution aborted", "execution timeout"];

fn is_too_much(failure: &ReadFailure) -> bool {
    let detail = failure.detail.to_lowercase();
    failure.kind == ReadFailureKind::RpcError
        && TOO_MUCH_PHRASES.iter().any(|phrase| detail.contains(phrase))
}

/// Whether the chain id is the configured one.
pub(super) fn check_chain_id(settings: &ChainSettings, id: U256) -> Result<(), ReadFailure> {
    let wanted = settings.chain_id;
    if id == U256::from(wanted.get()) {
        return Ok(());
    }
    let detail = format!("the chain id is {id}, not {wanted}");
    Err(ReadFailure::new(ReadFailureKind::WrongChain, detail))
}

/// An `eth_call` that is answered only from exactly this block.
fn call_at(block: B256, to: Address, data: &Bytes) -> Call {
    let pinned = json!({"blockHash": block, "requireCanonical": true});
    Call { method: "eth_call", params: json!([{"to": to, "data": data}, pinned]) }
}

/// The word a contract answered with: exactly 32 bytes.
fn parse_word(call: &StateCall, data: &[u8]) -> Result<U256, ReadFailure> {
    if data.is_empty() {
        return Err(no_code(call));
    }
    let StateCall { target, what, .. } = call;
    let word = <[u8; 32]>::try_from(data)
        .map_err(|_| bad(format!("{what} of {target} has {} bytes", data.len())))?;
    Ok(U256::from_be_bytes(word))
}

impl Endpoint {
    /// The word each call answers with at `head`; one result each, in order.
    pub(super) async fn words(
        &self,
        settings: &ChainSettings,
        calls: &[StateCall],
        head: &BlockRef,
    ) -> Vec<Result<U256, ReadFailure>> {
        let mut words: Vec<Result<U256, ReadFailure>> = Vec::with_capacity(calls.len());
        // A stack of what is left to ask, the next on top.
        let mut left: Vec<&[StateCall]> = calls.chunks(settings.batch_max).rev().collect();
        let mut splits = 0;
        while let Some(chunk) = left.pop() {
            let read = match self.lacks_multicall() {
                true => Ok(None),
                false => self.aggregate(settings, chunk, head).await,
            };
            match read {
                Ok(Some(read)) => words.extend(read),
                Ok(None) => {
                    let read = self.words_one_by_one(settings, chunk, head).await;
                    // Only an endpoint that answers otherwise is known to lack Multicall3.
                    if read.iter().any(Result::is_ok) {
                        self.multicall_is_absent();
                    }
                    words.extend(read);
                }
                // One contract may burn all the gas of a call: the others must not pay for it (I11).
                Err(failure) if is_too_much(&failure) && chunk.len() > 1 && splits < SPLITS_MAX => {
                    splits += 1;
                    let (first, second) = chunk.split_at(chunk.len() / 2);
                    left.extend([second, first]);
                }
                Err(failure) => {
                    let gives_up = failure.kind == ReadFailureKind::Unreachable;
                    words.extend(chunk.iter().map(|_| Err(failure.clone())));
                    if gives_up {
                        // Whoever does not answer is not asked again and again: others are waiting.
                        words.resize(calls.len(), Err(failure));
                        break;
                    }
                }
            }
        }
        words
    }

    /// One call to Multicall3; `None` where there is none.
    async fn aggregate(
        &self,
        settings: &ChainSettings,
        calls: &[StateCall],
        head: &BlockRef,
    ) -> Result<Option<Vec<Result<U256, ReadFailure>>>, ReadFailure> {
        let multicall = settings.multicall3;
        let preamble = [
            getBlockNumberCall {}.abi_encode(),
            getCurrentBlockTimestampCall {}.abi_encode(),
            getChainIdCall {}.abi_encode(),
        ];
        let all = preamble
            .into_iter()
            .map(|data| (multicall, data.into()))
            .chain(calls.iter().map(|call| (call.target, call.data.clone())));
        let data = aggregate3_input(all);
        let result = self.transport.call(call_at(head.hash, multicall, &data)).await?;
        let answer: Bytes = decode("aggregate3", &result)?;
        if answer.is_empty() {
            // What is read without it is not shown to be of this block: only where it was never there.
            return match self.has_multicall() {
                true => Err(bad(format!("Multicall3 at {multicall} was there, and is no longer"))),
                false => Ok(None),
            };
        }
        let words = parse_aggregate(settings, calls, head, &answer)?;
        self.multicall_is_there();
        Ok(Some(words))
    }

    /// The same without Multicall3: JSON-RPC batches, the chain id in the first.
    async fn words_one_by_one(
        &self,
        settings: &ChainSettings,
        calls: &[StateCall],
        head: &BlockRef,
    ) -> Vec<Result<U256, ReadFailure>> {
        let mut batch = vec![Call { method: "eth_chainId", params: json!([]) }];
        batch.extend(calls.iter().map(|call| call_at(head.hash, call.target, &call.data)));
        let mut results = self.transport.batch(&batch).await.into_iter();
        let missing = || Err(CallError::BadAnswer("no chain id".to_owned()));
        let checked = results
            .next()
            .unwrap_or_else(missing)
            .and_then(|result| decode::<U64>("eth_chainId", &result))
            .map_err(ReadFailure::from)
            .and_then(|id| check_chain_id(settings, U256::from(id)));
        if let Err(failure) = checked {
            return calls.iter().map(|_| Err(failure.clone())).collect();
        }
        calls.iter().zip(results).map(|(call, result)| parse_single(call, result)).collect()
    }
}

/// What one call answered, outside Multicall3.
pub(super) fn parse_single(call: &StateCall, result: CallResult) -> Result<U256, ReadFailure> {
    match result {
        Ok(result) => {
            let data: Bytes = decode(call.what, &result)?;
            parse_word(call, &data)
        }
        // What Multicall3 would report as a failed call.
        Err(error) if error.is_revert() => Err(no_code(call)),
        Err(error) => Err(error.into()),
    }
}

fn parse_aggregate(
    settings: &ChainSettings,
    calls: &[StateCall],
    head: &BlockRef,
    answer: &[u8],
) -> Result<Vec<Result<U256, ReadFailure>>, ReadFailure> {
    let results = aggregate3Call::abi_decode_returns(answer)
        .map_err(|error| bad(format!("aggregate3: {error}")))?;
    let asked = PREAMBLE + calls.len();
    if results.len() != asked {
        return Err(bad(format!("aggregate3: {} results to {asked} calls", results.len())));
    }
    let number = |index: usize, what: &str| {
        let result = &results[index];
        match <[u8; 32]>::try_from(&result.returnData[..]) {
            Ok(word) if result.success => Ok(U256::from_be_bytes(word)),
            _ => Err(bad(format!("{what} of Multicall3 failed"))),
        }
    };
    check_chain_id(settings, number(2, "getChainId")?)?;
    let (block, time) = (number(0, "getBlockNumber")?, number(1, "getCurrentBlockTimestamp")?);
    let same_block = settings.foreign_block_number || block == U256::from(head.number);
    if !same_block || time != U256::from(head.time.as_secs()) {
        return Err(bad(format!(
            "asked at block {} of time {}, answered at block {block} of time {time}",
            head.number,
            head.time.as_secs()
        )));
    }
    let words = calls.iter().zip(&results[PREAMBLE..]).map(|(call, result)| {
        if result.success { parse_word(call, &result.returnData) } else { Err(no_code(call)) }
    });
    Ok(words.collect())
}

#[cfg(test)]
mod tests {
    use alloy_primitives::hex;

    use super::*;

    #[test]
    fn a_call_that_took_too_much_is_told_from_one_that_failed_otherwise() {
        let failed = |detail: &str| ReadFailure::new(ReadFailureKind::RpcError, detail);
        for detail in [
            "error -32000: out of gas",
            "error -32603: EVM error MemoryOOG",
            "error -32003: EVM error OutOfGas",
            "error -32000: execution aborted (timeout = 5s)",
            "error -32015: VM execution error: Execution timeout",
        ] {
            assert!(is_too_much(&failed(detail)), "{detail}");
        }
        for detail in ["error -32603: internal error", "error -32000: header not found"] {
            assert!(!is_too_much(&failed(detail)), "{detail}");
        }
        let silent = ReadFailure::new(ReadFailureKind::Unreachable, "out of gas");
        assert!(!is_too_much(&silent), "whoever does not answer is not asked again");
    }

    #[test]
    fn selectors_are_the_canonical_ones() {
        assert_eq!(aggregate3Call::SELECTOR, hex!("82ad56cb"));
        assert_eq!(getBlockNumberCall::SELECTOR, hex!("42cbb15c"));
        assert_eq!(getCurrentBlockTimestampCall::SELECTOR, hex!("0f28c97d"));
        assert_eq!(getChainIdCall::SELECTOR, hex!("3408e470"));
    }

    #[test]
    fn a_word_is_exactly_32_bytes() {
        let call = StateCall { target: Address::ZERO, what: "answer", data: Bytes::new() };
        let parse = |data: &[u8]| parse_word(&call, data).map_err(|failure| failure.kind);
        assert_eq!(parse(&U256::from(7).to_be_bytes::<32>()), Ok(U256::from(7)));
        assert_eq!(parse(&[]), Err(ReadFailureKind::NoCode));
        assert_eq!(parse(&[0; 31]), Err(ReadFailureKind::BadAnswer));
        assert_eq!(parse(&[0; 64]), Err(ReadFailureKind::BadAnswer));
    }
}
