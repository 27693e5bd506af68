//! How a chain is read: every number an operator may have to change, and what holds where nothing is configured.

use std::time::Duration;

use alloy_primitives::Address;
use url::Url;

use super::{EndpointLimits, ErrorRateLimits, KnownUsed, MULTICALL3, Permit2Settings};
use crate::domain::{ChainId, EndpointName};

/// One JSON-RPC endpoint of a chain.
#[derive(Clone)]
pub struct EndpointSettings {
    /// Shown in logs, metrics and evidence.
    pub name: EndpointName,
    /// Never shown: it may hold a secret.
    pub url: Url,
    /// How much it may be asked.
    pub limits: EndpointLimits,
}

impl EndpointSettings {
    /// An endpoint with the usual limits.
    pub fn new(name: &str, url: Url) -> Self {
        Self { name: EndpointName::new(name), url, limits: EndpointLimits::default() }
    }
}

/// How to read one chain. Every number an operator may have to change is here; none is a constant.
#[derive(Clone)]
pub struct ChainSettings {
    /// The id every endpoint must answer with.
    pub chain_id: ChainId,
    /// Asked in turn.
    pub endpoints: Vec<EndpointSettings>,
    /// Time between blocks: for guesses that are then verified, never for a proof.
    pub block_time: Duration,
    /// A head that has not moved for this long is stale.
    pub head_age_max: Duration,
    /// An endpoint whose head is this much older than the others' is no judge of a negative.
    pub head_lag_max: Duration,
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
    /// Where Permit2 and the proxies are that settle with it.
    pub permit2: Permit2Settings,
    /// No answer to one HTTP request for this long is a failure.
    pub request_timeout: Duration,
    /// When an endpoint has not answered for this long, the next one is asked as well.
    pub hedge_after: Duration,
    /// When an endpoint's requests fail too often for it to be believed.
    pub error_rate: ErrorRateLimits,
    /// Authorizations that are used, to test endpoints with.
    pub known_used: Vec<KnownUsed>,
    /// Whether settled payments may serve as known ones too: to an endpoint that has shown one itself, or to
    /// all once two have.
    pub learn_known_used: bool,
}

impl ChainSettings {
    /// The settings of a chain with blocks of 2 s and the canonical contracts: what holds where nothing else
    /// is configured.
    pub fn new(chain_id: ChainId, endpoints: Vec<EndpointSettings>) -> Self {
        Self {
            chain_id,
            endpoints,
            block_time: Duration::from_secs(2),
            head_age_max: Duration::from_secs(60),
            head_lag_max: Duration::from_secs(20),
            log_lookback: Duration::from_secs(3_600),
            log_range_max: 10_000,
            batch_max: 500,
            read_safe: false,
            foreign_block_number: false,
            multicall3: MULTICALL3,
            permit2: Permit2Settings::default(),
            request_timeout: Duration::from_secs(10),
            hedge_after: Duration::from_secs(2),
            error_rate: ErrorRateLimits::default(),
            known_used: Vec::new(),
            learn_known_used: true,
        }
    }
}
