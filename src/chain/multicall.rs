//! State reads: whether authorizations are used, in one call per few hundred, pinned to one block hash.
//!
//! Through Multicall3, so that block, time, chain id and states come from one backend. Where it is
//! absent, through JSON-RPC batches at the same block hash.

use alloy_primitives::{Address, B256, Bytes, U64, U256};
use alloy_sol_types::{SolCall, sol};
use serde_json::json;

use super::ChainSettings;
use super::eip3009::Asked;
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
    function authorizationState(address authorizer, bytes32 nonce) external view returns (bool);
}

/// The calls that say where the states were read, ahead of the states themselves.
const PREAMBLE: usize = 3;

fn bad(detail: String) -> ReadFailure {
    ReadFailure::new(ReadFailureKind::BadAnswer, detail)
}

fn no_code(token: Address) -> ReadFailure {
    ReadFailure::new(
        ReadFailureKind::NoCode,
        format!("authorizationState of {token} answers nothing or fails"),
    )
}

fn is_out_of_gas(failure: &ReadFailure) -> bool {
    failure.kind == ReadFailureKind::RpcError && failure.detail.to_lowercase().contains("gas")
}

fn check_chain_id(settings: &ChainSettings, id: U256) -> Result<(), ReadFailure> {
    let wanted = settings.chain_id;
    if id == U256::from(wanted.get()) {
        return Ok(());
    }
    let detail = format!("the chain id is {id}, not {wanted}");
    Err(ReadFailure::new(ReadFailureKind::WrongChain, detail))
}

/// An `eth_call` that is answered only from exactly this block.
fn call_at(block: B256, to: Address, data: Vec<u8>) -> Call {
    let pinned = json!({"blockHash": block, "requireCanonical": true});
    Call { method: "eth_call", params: json!([{"to": to, "data": Bytes::from(data)}, pinned]) }
}

fn state_call(asked: &Asked) -> Vec<u8> {
    authorizationStateCall { authorizer: asked.payer, nonce: asked.nonce }.abi_encode()
}

/// The bool a token answered with: exactly one word, 0 or 1.
fn parse_state(token: Address, data: &[u8]) -> Result<bool, ReadFailure> {
    if data.is_empty() {
        return Err(no_code(token));
    }
    let word = <[u8; 32]>::try_from(data)
        .map_err(|_| bad(format!("authorizationState of {token} has {} bytes", data.len())))?;
    match U256::from_be_bytes(word) {
        U256::ZERO => Ok(false),
        U256::ONE => Ok(true),
        _ => Err(bad(format!("authorizationState of {token} is neither true nor false"))),
    }
}

impl Endpoint {
    /// `authorizationState` of each at `head`; one result each, in order.
    pub(super) async fn states(
        &self,
        settings: &ChainSettings,
        asked: &[Asked],
        head: &BlockRef,
    ) -> Vec<Result<bool, ReadFailure>> {
        let mut states: Vec<Result<bool, ReadFailure>> = Vec::with_capacity(asked.len());
        // A stack of what is left to ask, the next on top.
        let mut left: Vec<&[Asked]> = asked.chunks(settings.batch_max).rev().collect();
        while let Some(chunk) = left.pop() {
            let known_absent = self.memory().multicall_absent;
            let read = match known_absent {
                true => Ok(None),
                false => self.aggregate(settings, chunk, head).await,
            };
            match read {
                Ok(Some(read)) => states.extend(read),
                Ok(None) => {
                    let read = self.states_one_by_one(settings, chunk, head).await;
                    // Only an endpoint that answers otherwise is known to lack Multicall3.
                    if read.iter().any(Result::is_ok) {
                        self.memory().multicall_absent = true;
                    }
                    states.extend(read);
                }
                // One token may burn all the gas of a call: the others must not pay for it (I11).
                Err(failure) if is_out_of_gas(&failure) && chunk.len() > 1 => {
                    let (first, second) = chunk.split_at(chunk.len() / 2);
                    left.extend([second, first]);
                }
                Err(failure) => {
                    let gives_up = failure.kind == ReadFailureKind::Unreachable;
                    states.extend(chunk.iter().map(|_| Err(failure.clone())));
                    if gives_up {
                        // Whoever does not answer is not asked again and again: others are waiting.
                        states.resize(asked.len(), Err(failure));
                        break;
                    }
                }
            }
        }
        states
    }

    /// One call to Multicall3; `None` where there is none.
    async fn aggregate(
        &self,
        settings: &ChainSettings,
        asked: &[Asked],
        head: &BlockRef,
    ) -> Result<Option<Vec<Result<bool, ReadFailure>>>, ReadFailure> {
        let multicall = settings.multicall3;
        let preamble = [
            getBlockNumberCall {}.abi_encode(),
            getCurrentBlockTimestampCall {}.abi_encode(),
            getChainIdCall {}.abi_encode(),
        ];
        let calls = preamble
            .into_iter()
            .map(|data| (multicall, data))
            .chain(asked.iter().map(|asked| (asked.token, state_call(asked))))
            .map(|(target, data)| Call3 { target, allowFailure: true, callData: data.into() })
            .collect();
        let data = aggregate3Call { calls }.abi_encode();
        let result = self.transport.call(call_at(head.hash, multicall, data)).await?;
        let answer: Bytes = decode("aggregate3", &result)?;
        if answer.is_empty() {
            return Ok(None);
        }
        parse_aggregate(settings, asked, head, &answer).map(Some)
    }

    /// The same without Multicall3: JSON-RPC batches, the chain id in the first.
    async fn states_one_by_one(
        &self,
        settings: &ChainSettings,
        asked: &[Asked],
        head: &BlockRef,
    ) -> Vec<Result<bool, ReadFailure>> {
        let mut calls = vec![Call { method: "eth_chainId", params: json!([]) }];
        calls.extend(asked.iter().map(|a| call_at(head.hash, a.token, state_call(a))));
        let mut results = self.transport.batch(&calls).await.into_iter();
        let missing = || Err(CallError::BadAnswer("no chain id".to_owned()));
        let checked = results
            .next()
            .unwrap_or_else(missing)
            .and_then(|result| decode::<U64>("eth_chainId", &result))
            .map_err(ReadFailure::from)
            .and_then(|id| check_chain_id(settings, U256::from(id)));
        if let Err(failure) = checked {
            return asked.iter().map(|_| Err(failure.clone())).collect();
        }
        asked.iter().zip(results).map(|(asked, result)| parse_single(asked.token, result)).collect()
    }
}

fn parse_single(token: Address, result: CallResult) -> Result<bool, ReadFailure> {
    match result {
        Ok(result) => {
            let data: Bytes = decode("authorizationState", &result)?;
            parse_state(token, &data)
        }
        // What Multicall3 would report as a failed call.
        Err(error) if error.is_revert() => Err(no_code(token)),
        Err(error) => Err(error.into()),
    }
}

fn parse_aggregate(
    settings: &ChainSettings,
    asked: &[Asked],
    head: &BlockRef,
    answer: &[u8],
) -> Result<Vec<Result<bool, ReadFailure>>, ReadFailure> {
    let results = aggregate3Call::abi_decode_returns(answer)
        .map_err(|error| bad(format!("aggregate3: {error}")))?;
    if results.len() != PREAMBLE + asked.len() {
        return Err(bad(format!(
            "aggregate3: {} results to {} calls",
            results.len(),
            PREAMBLE + asked.len()
        )));
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
    let states = asked.iter().zip(&results[PREAMBLE..]).map(|(asked, result)| {
        if result.success {
            parse_state(asked.token, &result.returnData)
        } else {
            Err(no_code(asked.token))
        }
    });
    Ok(states.collect())
}

#[cfg(test)]
mod tests {
    use alloy_primitives::hex;

    use super::*;

    #[test]
    fn selectors_are_the_canonical_ones() {
        assert_eq!(aggregate3Call::SELECTOR, hex!("82ad56cb"));
        assert_eq!(getBlockNumberCall::SELECTOR, hex!("42cbb15c"));
        assert_eq!(getCurrentBlockTimestampCall::SELECTOR, hex!("0f28c97d"));
        assert_eq!(getChainIdCall::SELECTOR, hex!("3408e470"));
        assert_eq!(authorizationStateCall::SELECTOR, hex!("e94a0102"));
    }

    #[test]
    fn a_state_is_exactly_one_word_of_zero_or_one() {
        let word = |last: u8| {
            let mut word = [0; 32];
            word[31] = last;
            word
        };
        let parse = |data: &[u8]| parse_state(Address::ZERO, data).map_err(|failure| failure.kind);
        assert_eq!(parse(&word(0)), Ok(false));
        assert_eq!(parse(&word(1)), Ok(true));
        assert_eq!(parse(&word(2)), Err(ReadFailureKind::BadAnswer));
        assert_eq!(parse(&[0xff; 32]), Err(ReadFailureKind::BadAnswer));
        assert_eq!(parse(&[]), Err(ReadFailureKind::NoCode));
        assert_eq!(parse(&[0; 31]), Err(ReadFailureKind::BadAnswer));
        assert_eq!(parse(&[0; 64]), Err(ReadFailureKind::BadAnswer));
    }
}
