//! `[[chains]]`: how to read each chain, whom to ask, and who is paid on it.

mod defaults;
mod endpoint;

use std::collections::BTreeSet;
use std::time::Duration;

use alloy_primitives::Address;
use serde::Deserialize;

use super::{Config, ConfigError, Span, bad, parse_paid_after, secs};
use crate::chain::{ChainSettings, ErrorRateLimits, Permit2Settings};
use crate::domain::{ChainId, PaidAfter, Policy, Receiver, RefundPolicy};
use crate::schedule::{FitSettings, Grid, Schedule, Timing};
use crate::worker::{ScanStart, WatchedReceiver};
pub use endpoint::{EndpointSection, KnownUsedSection};

/// Blocks between the deadline and the check that may fail a payment, so that the head is past it.
const DEADLINE_MARGIN_BLOCKS: u32 = 10;
/// The most values in one position of a log filter: go-ethereum's own limit.
const BATCH_MAX: usize = 1_000;
/// How far before the first scan to start, unless the configuration says otherwise.
const LOOKBACK: Span = secs(7 * 24 * 3_600);
/// A window of requests that is shorter than this holds but one moment.
const ERROR_WINDOW_MIN: Duration = Duration::from_secs(12);
/// The least time between two looks for finality.
const FINALITY_RETRY: Duration = Duration::from_secs(60);

/// `[[chains]]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChainSection {
    /// EIP-155 id.
    pub chain_id: u64,
    /// For people.
    #[serde(default)]
    pub name: Option<String>,
    /// Time between blocks.
    #[serde(default = "defaults::block_time")]
    pub block_time: Span,
    /// How long a block takes, at most, to be finalized.
    #[serde(default = "defaults::finality_margin")]
    pub finality_margin: Span,
    /// A head that has not moved for this long is stale.
    #[serde(default = "defaults::head_age_max")]
    pub head_age_max: Span,
    /// How much older than the others' an endpoint's head may be, to count for a negative.
    #[serde(default = "defaults::head_lag_max")]
    pub head_lag_max: Span,
    /// Log searches start this long before the broadcast.
    #[serde(default = "defaults::log_lookback")]
    pub log_lookback: Span,
    /// The widest log range, in blocks.
    #[serde(default = "defaults::log_range_max")]
    pub log_range_max: u64,
    /// The most payments in one call.
    #[serde(default = "defaults::batch_max")]
    pub batch_max: usize,
    /// No answer for this long is a failure.
    #[serde(default = "defaults::request_timeout")]
    pub request_timeout: Span,
    /// When an endpoint has not answered for this long, the next one is asked as well.
    #[serde(default = "defaults::hedge_after")]
    pub hedge_after: Span,
    /// Requests count for this long, to tell an endpoint that fails too often.
    #[serde(default = "defaults::error_window")]
    pub error_window: Span,
    /// Of fewer requests nothing is concluded.
    #[serde(default = "defaults::error_requests_min")]
    pub error_requests_min: u32,
    /// The share of requests above which an endpoint fails too often.
    #[serde(default = "defaults::error_share_max")]
    pub error_share_max: f64,
    /// Where Multicall3 is.
    #[serde(default = "defaults::multicall3")]
    pub multicall3: Address,
    /// Where Permit2 is.
    #[serde(default = "defaults::permit2")]
    pub permit2: Address,
    /// The x402 proxies that settle with Permit2.
    #[serde(default = "defaults::permit2_proxies")]
    pub permit2_proxies: Vec<Address>,
    /// The facilitators that may settle Permit2's `upto` for less than was signed for.
    #[serde(default)]
    pub upto_facilitators: Vec<Address>,
    /// Whether Multicall3's block number is another chain's.
    #[serde(default)]
    pub foreign_block_number: bool,
    /// The wallets that pay refunds; anybody's refund counts where none are named.
    #[serde(default)]
    pub refund_wallets: Vec<Address>,
    /// Overrides `policy.paid_after`.
    #[serde(default)]
    pub paid_after: Option<String>,
    /// Whom to ask.
    #[serde(default)]
    pub endpoints: Vec<EndpointSection>,
    /// Authorizations that are used, to test endpoints with.
    #[serde(default)]
    pub known_used: Vec<KnownUsedSection>,
    /// Who is paid.
    #[serde(default)]
    pub receivers: Vec<ReceiverSection>,
}

/// `[[chains.receivers]]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReceiverSection {
    /// The token contract.
    pub token: Address,
    /// The address that is paid.
    pub pay_to: Address,
    /// The first block to scan.
    #[serde(default)]
    pub first_block: Option<u64>,
    /// How far before the first scan to start, where no block is named.
    #[serde(default)]
    pub lookback: Option<Span>,
}

/// A configured chain, validated.
pub struct ConfiguredChain {
    /// How to read it.
    pub settings: ChainSettings,
    /// The repeats.
    pub schedule: Schedule,
    /// The margins of mandatory checks.
    pub timing: Timing,
    /// How to decide.
    pub policy: Policy,
    /// What settle latencies are counted on.
    pub grid: Grid,
    /// What schedules are fitted for.
    pub fit: FitSettings,
    /// Whom to believe about refunds.
    pub refunds: RefundPolicy,
    /// Whose transfers to scan for.
    pub receivers: Vec<WatchedReceiver>,
}

impl ChainSection {
    pub(super) fn configured(
        &self,
        key: &str,
        config: &Config,
        policy: &Policy,
        repeats: &Schedule,
        environment: &impl Fn(&str) -> Option<String>,
    ) -> Result<ConfiguredChain, ConfigError> {
        let mut policy = policy.clone();
        if let Some(text) = &self.paid_after {
            policy.paid_after = parse_paid_after(&format!("{key}.paid_after"), text)?;
        }
        let mut names = BTreeSet::new();
        let endpoints = self
            .endpoints
            .iter()
            .map(|endpoint| {
                let key = format!("{key}.endpoints[{:?}]", endpoint.name);
                if endpoint.name.is_empty() || !names.insert(&endpoint.name) {
                    return Err(bad(key, "must have a name of its own"));
                }
                endpoint.configured(&key, environment)
            })
            .collect::<Result<Vec<_>, _>>()?;
        for (place, one) in endpoints.iter().enumerate() {
            if let Some(same) = endpoints[..place].iter().find(|other| other.url == one.url) {
                return Err(bad(
                    format!("{key}.endpoints[{:?}]", one.name.as_str()),
                    format!(
                        "has the URL of {:?}; one node cannot agree with itself",
                        same.name.as_str()
                    ),
                ));
            }
        }
        let needed = policy.quorum.max(policy.positive_quorum);
        if endpoints.len() < needed {
            return Err(bad(
                format!("{key}.endpoints"),
                format!(
                    "lists {} of the {needed} that policy.quorum and policy.positive_quorum ask for",
                    endpoints.len()
                ),
            ));
        }
        if self.block_time.0 < Duration::from_millis(50) {
            return Err(bad(format!("{key}.block_time"), "must be at least \"50ms\""));
        }
        for (name, value) in [
            ("log_range_max", self.log_range_max),
            ("batch_max", u64::try_from(self.batch_max).unwrap_or(u64::MAX)),
        ] {
            if value == 0 {
                return Err(bad(format!("{key}.{name}"), "must be at least 1"));
            }
        }
        if self.batch_max > BATCH_MAX {
            let problem =
                format!("must be at most {BATCH_MAX}, which is what nodes take in a filter");
            return Err(bad(format!("{key}.batch_max"), problem));
        }
        if self.permit2_proxies.is_empty() {
            let problem = "must list at least one proxy; leave it out for the canonical ones";
            return Err(bad(format!("{key}.permit2_proxies"), problem));
        }
        for (name, addresses) in [
            ("permit2_proxies", &self.permit2_proxies),
            ("upto_facilitators", &self.upto_facilitators),
            ("refund_wallets", &self.refund_wallets),
        ] {
            if addresses.contains(&Address::ZERO) {
                return Err(bad(format!("{key}.{name}"), "names the zero address"));
            }
        }
        for (name, contract) in [("permit2", self.permit2), ("multicall3", self.multicall3)] {
            if self.upto_facilitators.contains(&contract) {
                let problem = format!("names {name}, which anybody can call: list only wallets");
                return Err(bad(format!("{key}.upto_facilitators"), problem));
            }
        }
        for (name, span) in [
            ("head_age_max", self.head_age_max),
            ("head_lag_max", self.head_lag_max),
            ("request_timeout", self.request_timeout),
            ("hedge_after", self.hedge_after),
        ] {
            if span.0.is_zero() {
                return Err(bad(format!("{key}.{name}"), "must be longer than \"0s\""));
            }
        }
        if self.error_window.0 < ERROR_WINDOW_MIN {
            let least = humantime::format_duration(ERROR_WINDOW_MIN);
            return Err(bad(
                format!("{key}.error_window"),
                format!("must be at least \"{least}\""),
            ));
        }
        if self.error_requests_min == 0 {
            return Err(bad(format!("{key}.error_requests_min"), "must be at least 1"));
        }
        if !(self.error_share_max > 0.0 && self.error_share_max <= 1.0) {
            let problem = "must be above 0 and at most 1; at 1 no endpoint fails too often";
            return Err(bad(format!("{key}.error_share_max"), problem));
        }
        let timing = Timing {
            finality_margin: self.finality_margin.0,
            deadline_margin: self.block_time.0.saturating_mul(DEADLINE_MARGIN_BLOCKS),
            finality_retry: FINALITY_RETRY,
            pacing: config.schedule.pacing(),
        };
        let (grid, fit) = config.schedule.for_chain(
            self.block_time.0,
            policy.paid_after,
            &timing,
            &config.reconcile.cron,
        )?;
        Ok(ConfiguredChain {
            refunds: RefundPolicy {
                wallets: self.refund_wallets.clone(),
                quorum: policy.positive_quorum,
            },
            settings: ChainSettings {
                chain_id: ChainId::new(self.chain_id),
                endpoints,
                block_time: self.block_time.0,
                head_age_max: self.head_age_max.0,
                head_lag_max: self.head_lag_max.0,
                log_lookback: self.log_lookback.0,
                log_range_max: self.log_range_max,
                batch_max: self.batch_max,
                read_safe: policy.paid_after == PaidAfter::Safe,
                foreign_block_number: self.foreign_block_number,
                multicall3: self.multicall3,
                permit2: Permit2Settings {
                    permit2: self.permit2,
                    proxies: self.permit2_proxies.clone(),
                    upto_facilitators: self.upto_facilitators.clone(),
                },
                request_timeout: self.request_timeout.0,
                hedge_after: self.hedge_after.0,
                error_rate: ErrorRateLimits {
                    window: self.error_window.0,
                    requests_min: self.error_requests_min,
                    share_max: self.error_share_max,
                },
                known_used: self.known_used.iter().map(KnownUsedSection::known).collect(),
                learn_known_used: config.health.learn_known_used,
            },
            schedule: repeats.clone(),
            timing,
            grid,
            fit,
            policy,
            receivers: self.receivers(key)?,
        })
    }

    fn receivers(&self, key: &str) -> Result<Vec<WatchedReceiver>, ConfigError> {
        if self.receivers.len() > BATCH_MAX {
            let problem =
                format!("lists more than {BATCH_MAX}, which is what nodes take in a filter");
            return Err(bad(format!("{key}.receivers"), problem));
        }
        let mut seen = BTreeSet::new();
        self.receivers
            .iter()
            .map(|section| {
                let receiver = Receiver { token: section.token, pay_to: section.pay_to };
                let key = format!("{key}.receivers[{}]", section.pay_to);
                if !seen.insert(receiver) {
                    return Err(bad(key, format!("is listed twice for token {}", section.token)));
                }
                let start = match (section.first_block, section.lookback) {
                    (Some(_), Some(_)) => {
                        return Err(bad(key, "must have first_block or lookback, not both"));
                    }
                    (Some(0), None) => {
                        return Err(bad(format!("{key}.first_block"), "must be at least 1"));
                    }
                    (Some(first), None) => ScanStart::Block(first),
                    (None, lookback) => ScanStart::Lookback(lookback.unwrap_or(LOOKBACK).0),
                };
                Ok(WatchedReceiver { receiver, start })
            })
            .collect()
    }
}
