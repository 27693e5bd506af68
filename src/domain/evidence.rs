//! What a read of the chain showed: facts with the block they were read at, and nothing concluded.

use std::fmt;
use std::sync::Arc;

use alloy_primitives::{Address, B256};
use serde::{Deserialize, Serialize};

use super::order::column_code;
use super::{Amount, BlockTime, Method, Payment};

/// The configured name of an endpoint. Never its URL, which may hold a secret.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct EndpointName(Arc<str>);

impl EndpointName {
    /// Takes the name as configured.
    pub fn new(name: &str) -> Self {
        Self(Arc::from(name))
    }

    /// The name as configured.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for EndpointName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// One block of a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct BlockRef {
    /// Its number.
    pub number: u64,
    /// Its hash.
    pub hash: B256,
    /// Its timestamp.
    pub time: BlockTime,
}

/// One log of a chain, in a block that was canonical when it was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LogRef {
    /// The block.
    pub block: BlockRef,
    /// The transaction.
    pub tx_hash: B256,
    /// The index within the block.
    pub log_index: u64,
}

/// A token's `Transfer` event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SeenTransfer {
    /// The index within the block.
    pub log_index: u64,
    /// The token.
    pub token: Address,
    /// Who paid.
    pub from: Address,
    /// Who was paid.
    pub to: Address,
    /// How much moved.
    pub value: Amount,
    /// The most that was signed for, where a trusted facilitator itself chose the amount (Permit2's `upto`).
    /// Missing where anybody else chose it: then nothing but the amount asked for is right.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub at_most: Option<Amount>,
}

/// What consumed an authorization.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Consumption {
    /// The log that shows it: `AuthorizationUsed` or `AuthorizationCanceled` (EIP-3009); the `Transfer`
    /// itself or `UnorderedNonceInvalidation` (Permit2, which logs no use).
    pub log: LogRef,
    /// What it meant.
    pub kind: ConsumptionKind,
}

impl Consumption {
    /// Whether this is what `payment` asked for: from its payer, to its `pay_to`, in its token, and the
    /// amount. Less is right only where a trusted facilitator chose it; the payer must then have signed for
    /// the payment's amount as the most, and something must have moved: the proxy refuses to move nothing.
    pub fn pays(&self, payment: &Payment) -> bool {
        let ConsumptionKind::Transferred(seen) = self.kind else { return false };
        (seen.token, seen.from, seen.to) == (payment.token, payment.payer, payment.pay_to)
            && match seen.at_most {
                None => seen.value == payment.amount,
                Some(most) => {
                    payment.method == Method::Permit2
                        && most == payment.amount
                        && seen.value > Amount::ZERO
                        && seen.value <= most
                }
            }
    }
}

/// What the log that consumed an authorization meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ConsumptionKind {
    /// The payer took it back: `AuthorizationCanceled`, or an invalidated nonce (Permit2).
    Canceled,
    /// It moved this money: the transfer directly behind an `AuthorizationUsed`, or one that a proxy of
    /// Permit2 made with this nonce.
    Transferred(SeenTransfer),
    /// `AuthorizationUsed`, and no transfer directly behind it: not a token that follows EIP-3009.
    WithoutTransfer,
}

/// What an endpoint said about one authorization.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(clippy::large_enum_variant, reason = "one per payment and endpoint of a batch")]
pub enum NonceState {
    /// Neither used nor canceled at the head.
    Unused,
    /// Used or canceled, and nothing in the range shows how.
    UsedWithoutLog {
        /// First block searched.
        from_block: u64,
        /// Last block searched.
        to_block: u64,
    },
    /// Used or canceled, and how could not be read: this failed. It proves nothing by itself, but whoever
    /// says "unused" is contradicted (I2).
    UsedUnread(ReadFailure),
    /// Used or canceled, and this is how.
    Used(Consumption),
}

/// One endpoint's view of one authorization, all read at one block.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Observation {
    /// The block the state was read at: the endpoint's newest, or the one that all endpoints were asked at.
    pub head: BlockRef,
    /// The endpoint's `safe` block, where the policy asks for it.
    pub safe: Option<BlockRef>,
    /// The endpoint's `finalized` block, or [`Self::head`] where that is finalized already; an ancestor of
    /// the head, or the head itself.
    pub finalized: BlockRef,
    /// What was read.
    pub nonce: NonceState,
}

column_code! {
    /// Why a read gave no evidence.
    ReadFailureKind {
        /// No answer: connection refused or reset, or a timeout.
        Unreachable = "unreachable",
        /// The endpoint asks us to slow down.
        RateLimited = "rate_limited",
        /// The endpoint answered with an error.
        RpcError = "rpc_error",
        /// The answer does not fit the question.
        BadAnswer = "bad_answer",
        /// The endpoint serves another chain.
        WrongChain = "wrong_chain",
        /// There is no code at the token's address, or at Permit2's.
        NoCode = "no_code",
        /// The endpoint's head does not move.
        StaleHead = "stale_head",
        /// The endpoint gave a wrong answer to a question whose answer is known.
        Unhealthy = "unhealthy",
        /// The endpoint's head is too far behind the others'.
        Lagging = "lagging",
        /// A block the evidence rests on was replaced while it was read.
        NotCanonical = "not_canonical",
        /// Every log range down to one block was refused.
        RangeRefused = "range_refused",
    }
}

/// How much is kept of what an endpoint said.
const DETAIL_CHARS_MAX: usize = 300;

/// A read that gave no evidence, and why. The detail never holds a URL.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{kind}: {detail}")]
pub struct ReadFailure {
    /// The kind.
    pub kind: ReadFailureKind,
    /// For people.
    pub detail: String,
}

impl ReadFailure {
    /// A failure of this kind.
    /// It is kept once per payment and check, so the detail is cut short.
    pub fn new(kind: ReadFailureKind, detail: impl Into<String>) -> Self {
        let mut detail = detail.into();
        if let Some((end, _)) = detail.char_indices().nth(DETAIL_CHARS_MAX) {
            detail.truncate(end);
        }
        Self { kind, detail }
    }
}

/// What failed in asking an endpoint about one payment, if anything did.
pub fn failure_of(outcome: &Result<Observation, ReadFailure>) -> Option<&ReadFailure> {
    match outcome {
        Err(failure) | Ok(Observation { nonce: NonceState::UsedUnread(failure), .. }) => {
            Some(failure)
        }
        Ok(_) => None,
    }
}

/// What came of asking one endpoint about one payment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Reading {
    /// Who was asked.
    pub endpoint: EndpointName,
    /// What it showed, or why it showed nothing.
    #[serde(serialize_with = "serialize_outcome")]
    pub outcome: Result<Observation, ReadFailure>,
}

fn serialize_outcome<S: serde::Serializer>(
    outcome: &Result<Observation, ReadFailure>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    #[derive(Serialize)]
    #[serde(rename_all = "snake_case")]
    enum Outcome<'a> {
        Observed(&'a Observation),
        Failed(&'a ReadFailure),
    }
    match outcome {
        Ok(observation) => Outcome::Observed(observation).serialize(serializer),
        Err(failure) => Outcome::Failed(failure).serialize(serializer),
    }
}

/// Everything that was read about one payment in one check: one reading per endpoint asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Default)]
pub struct Evidence {
    /// In the order asked.
    pub readings: Vec<Reading>,
}
