//! The configuration: one TOML file, typed and validated, unknown keys refused by name.
//!
//! A value in a `[section]` can be overridden from the environment: `RECONCILED_DATABASE_URL` stands for
//! `database.url`. Secrets belong there: the database's URL, and endpoint URLs through `url_env`.

use std::collections::BTreeSet;
use std::fmt;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use alloy_primitives::{Address, B256};
use serde::Deserialize;
use url::Url;

use crate::chain::{ChainSettings, EndpointLimits, EndpointSettings, KnownUsed, Permit2Settings};
use crate::domain::{ChainId, LatePolicy, PaidAfter, Policy, Receiver, RefundPolicy};
use crate::schedule::{FitSettings, Grid, Schedule, Timing};
use crate::store::DatabaseUrl;
use crate::telemetry::LogFormat;
use crate::worker::schedules::Following;
use crate::worker::tune::TuneSettings;
use crate::worker::{ScanStart, WatchedReceiver};

/// What is wrong with the configuration, with the key's name and what to do.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration file {path}: {source}; name it with --config")]
    Unreadable {
        /// The file.
        path: String,
        /// Why.
        source: std::io::Error,
    },
    /// It is not TOML of the right shape: a wrong type, an unknown or missing key.
    #[error("configuration: {0}")]
    Shape(String),
    /// A value makes no sense.
    #[error("configuration: {key} {problem}")]
    Value {
        /// The key, as a path.
        key: String,
        /// What is wrong, and what to write instead.
        problem: String,
    },
}

fn bad(key: impl Into<String>, problem: impl Into<String>) -> ConfigError {
    ConfigError::Value { key: key.into(), problem: problem.into() }
}

/// A duration as people write it: `"90s"`, `"24h"`, `"10m 30s"`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Span(pub Duration);

impl fmt::Debug for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", humantime::format_duration(self.0))
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        humantime::parse_duration(&text).map(Self).map_err(|e| {
            serde::de::Error::custom(format!("{text:?} is not a duration such as \"90s\": {e}"))
        })
    }
}

const fn secs(secs: u64) -> Span {
    Span(Duration::from_secs(secs))
}

macro_rules! section {
    ($(#[$doc:meta])* $name:ident { $($(#[$fdoc:meta])* $field:ident: $type:ty = $default:expr),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Deserialize)]
        #[serde(deny_unknown_fields, default)]
        pub struct $name { $($(#[$fdoc])* pub $field: $type),+ }

        impl Default for $name {
            fn default() -> Self {
                Self { $($field: $default),+ }
            }
        }
    };
}

section! {
    /// `[database]`
    Database {
        /// `postgres://…` or `sqlite:PATH`.
        url: Secret = Secret(String::new()),
        /// The most connections (PostgreSQL).
        connections_max: u32 = 8,
    }
}

section! {
    /// `[http]`
    Http {
        /// Where `/metrics`, `/healthz` and `/readyz` are served.
        listen: SocketAddr = SocketAddr::from(([127, 0, 0, 1], 9464)),
    }
}

section! {
    /// `[log]`
    Log {
        /// `auto`, `human` or `json`.
        format: LogFormat = LogFormat::Auto,
        /// Directives such as `info,sqlx=warn`.
        filter: String = "info".to_owned(),
    }
}

section! {
    /// `[discovery]`
    Discovery {
        /// How often the gateway's tables are polled.
        every: Span = secs(1),
        /// A `settling` row this old means that the gateway died.
        stale_after: Span = secs(120),
        /// The most watches opened in one statement.
        batch_max: u32 = 1_000,
    }
}

section! {
    /// `[checks]`
    Checks {
        /// The most payments read in one batch.
        batch_max: u32 = 1_000,
        /// How long a replica may hold a batch.
        lease_ttl: Span = secs(60),
        /// How long the attempt log is kept.
        keep_for: Span = secs(30 * 24 * 3_600),
        /// When to check, from the moment a payment was found: overrides every fitted schedule. The built-in
        /// repeats, until a schedule is fitted, when left out.
        repeats: Option<Vec<Span>> = None,
    }
}

section! {
    /// `[reconcile]`
    Reconcile {
        /// When the full reconcile runs: cron with seconds, in UTC.
        cron: String = "0 */10 * * * *".to_owned(),
        /// Rows per page.
        page_size: u32 = 2_000,
        /// How far back money is accounted for and settled payments must have their transfer.
        window: Span = secs(7 * 24 * 3_600),
    }
}

mod schedule;

pub use schedule::ScheduleSection;

section! {
    /// `[refunds]`
    Refunds {
        /// How often the chain is searched for refunds that are claimed or sent.
        every: Span = secs(60),
        /// How often for those that are owed or blocked.
        owed_every: Span = secs(3_600),
        /// The most records searched for at once.
        batch_max: u32 = 200,
    }
}

section! {
    /// `[health]`
    Health {
        /// How often every endpoint is probed.
        every: Span = secs(120),
        /// Whether settled payments may serve as known answers.
        learn_known_used: bool = true,
    }
}

section! {
    /// `[shutdown]`
    Shutdown {
        /// How long a stop may take.
        grace: Span = secs(20),
    }
}

section! {
    /// `[policy]`
    PolicySection {
        /// From the broadcast to the deadline.
        deadline_after: Span = secs(24 * 3_600),
        /// Fail as soon as the chain proves it.
        early_failure: bool = false,
        /// What to do with money for an order that is over.
        late: LatePolicy = LatePolicy::Refund,
        /// How deep a transfer must be.
        paid_after: String = PaidAfter::Confirmations(1).to_string(),
        /// Endpoints that must agree on a negative.
        quorum: usize = 1,
        /// Endpoints that must show a positive.
        positive_quorum: usize = 1,
    }
}

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

mod defaults {
    use super::*;

    /// What [`ChainSettings::new`] sets where nothing else is configured.
    fn chain() -> ChainSettings {
        ChainSettings::new(ChainId::new(0), Vec::new())
    }
    pub(super) fn block_time() -> Span {
        Span(chain().block_time)
    }
    pub(super) fn finality_margin() -> Span {
        secs(30 * 60)
    }
    pub(super) fn head_age_max() -> Span {
        Span(chain().head_age_max)
    }
    pub(super) fn head_lag_max() -> Span {
        Span(chain().head_lag_max)
    }
    pub(super) fn log_lookback() -> Span {
        Span(chain().log_lookback)
    }
    pub(super) fn log_range_max() -> u64 {
        chain().log_range_max
    }
    pub(super) fn batch_max() -> usize {
        chain().batch_max
    }
    pub(super) fn request_timeout() -> Span {
        Span(chain().request_timeout)
    }
    pub(super) fn hedge_after() -> Span {
        Span(chain().hedge_after)
    }
    pub(super) fn concurrency_max() -> usize {
        EndpointLimits::default().concurrency_max
    }
    pub(super) fn multicall3() -> Address {
        chain().multicall3
    }
    pub(super) fn permit2() -> Address {
        chain().permit2.permit2
    }
    pub(super) fn permit2_proxies() -> Vec<Address> {
        chain().permit2.proxies
    }
}

/// `[[chains.known_used]]`
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KnownUsedSection {
    /// The token.
    pub token: Address,
    /// Who signed.
    pub payer: Address,
    /// The authorization's nonce.
    pub nonce: B256,
    /// The block that used or canceled it.
    pub block: u64,
}

impl KnownUsedSection {
    const fn known(&self) -> KnownUsed {
        let Self { token, payer, nonce, block } = *self;
        KnownUsed { token, payer, nonce, block }
    }
}

/// `[[chains.endpoints]]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EndpointSection {
    /// Shown in logs, metrics and evidence.
    pub name: String,
    /// Where it is.
    #[serde(default)]
    pub url: Option<Secret>,
    /// The environment variable that holds the URL.
    #[serde(default)]
    pub url_env: Option<String>,
    /// Overrides the chain's `request_timeout`.
    #[serde(default)]
    pub request_timeout: Option<Span>,
    /// The most HTTP requests at a time.
    #[serde(default = "defaults::concurrency_max")]
    pub concurrency_max: usize,
    /// The most calls per second.
    #[serde(default)]
    pub requests_per_second: Option<u32>,
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

/// Text that is never shown.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct Secret(String);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("…")
    }
}

/// The whole file.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs, reason = "each field is the section of the same name")]
pub struct Config {
    #[serde(default)]
    pub database: Database,
    #[serde(default)]
    pub http: Http,
    #[serde(default)]
    pub log: Log,
    #[serde(default)]
    pub discovery: Discovery,
    #[serde(default)]
    pub checks: Checks,
    #[serde(default)]
    pub reconcile: Reconcile,
    #[serde(default)]
    pub schedule: ScheduleSection,
    #[serde(default)]
    pub refunds: Refunds,
    #[serde(default)]
    pub health: Health,
    #[serde(default)]
    pub shutdown: Shutdown,
    #[serde(default)]
    pub policy: PolicySection,
    #[serde(default)]
    pub chains: Vec<ChainSection>,
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

/// Sections whose keys the environment can override.
const SECTIONS: [&str; 11] = [
    "database",
    "http",
    "log",
    "discovery",
    "checks",
    "reconcile",
    "schedule",
    "refunds",
    "health",
    "shutdown",
    "policy",
];
/// The longest time a sick endpoint may go unnoticed.
const PROBE_EVERY_MAX: Duration = Duration::from_secs(15 * 60);
const ENV_PREFIX: &str = "RECONCILED_";
/// Blocks between the deadline and the check that may fail a payment, so that the head is past it.
const DEADLINE_MARGIN_BLOCKS: u32 = 10;
/// The most values in one position of a log filter: go-ethereum's own limit.
const BATCH_MAX: usize = 1_000;
/// How far before the first scan to start, unless the configuration says otherwise.
const LOOKBACK: Span = secs(7 * 24 * 3_600);
/// The least time between two looks for finality.
const FINALITY_RETRY: Duration = Duration::from_secs(60);

impl Config {
    /// Reads a file and the environment.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path).map_err(|source| ConfigError::Unreadable {
            path: path.display().to_string(),
            source,
        })?;
        // A variable that is not Unicode is none of ours.
        let environment = std::env::vars_os().filter_map(|(name, value)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        });
        Self::parse(&text, environment)
    }

    /// Reads text and an environment; validates nothing that needs other secrets.
    pub fn parse(
        text: &str,
        environment: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Self, ConfigError> {
        // Parsed twice: from the text, for messages that name the line, and with the overrides.
        let shape = |error: &toml::de::Error| ConfigError::Shape(where_and_why(text, error));
        toml::from_str::<Self>(text).map_err(|e| shape(&e))?;
        let mut table: toml::Table = toml::from_str(text).map_err(|e| shape(&e))?;
        for (name, value) in environment {
            override_from(&mut table, &name, &value);
        }
        // Without a text to quote, the parser's own words name the key.
        table.try_into().map_err(|e: toml::de::Error| {
            ConfigError::Shape(e.to_string().trim_end().replace('\n', " "))
        })
    }

    /// Where the database is.
    pub fn database_url(&self) -> Result<DatabaseUrl, ConfigError> {
        if self.database.url.0.is_empty() {
            return Err(bad(
                "database.url",
                "is missing; set it, or the environment variable RECONCILED_DATABASE_URL",
            ));
        }
        if self.database.connections_max < 2 {
            return Err(bad("database.connections_max", "must be at least 2"));
        }
        DatabaseUrl::parse(&self.database.url.0).map_err(|e| ConfigError::Shape(e.to_string()))
    }

    /// The policy where no chain says otherwise.
    pub fn policy(&self) -> Result<Policy, ConfigError> {
        let section = &self.policy;
        if section.deadline_after.0.is_zero() {
            return Err(bad("policy.deadline_after", "must be longer than \"0s\""));
        }
        for (key, value) in
            [("quorum", section.quorum), ("positive_quorum", section.positive_quorum)]
        {
            if value == 0 {
                return Err(bad(format!("policy.{key}"), "must be at least 1"));
            }
        }
        Ok(Policy {
            deadline_after: section.deadline_after.0,
            early_failure: section.early_failure,
            late: section.late,
            paid_after: parse_paid_after("policy.paid_after", &section.paid_after)?,
            quorum: section.quorum,
            positive_quorum: section.positive_quorum,
        })
    }

    /// Checks every limit that has a least value.
    pub fn validate_limits(&self) -> Result<(), ConfigError> {
        let at_least = |key: &str, value: u64, least: u64| {
            if value < least { Err(bad(key, format!("must be at least {least}"))) } else { Ok(()) }
        };
        at_least("discovery.batch_max", self.discovery.batch_max.into(), 1)?;
        at_least("checks.batch_max", self.checks.batch_max.into(), 1)?;
        at_least("refunds.batch_max", self.refunds.batch_max.into(), 1)?;
        at_least("reconcile.page_size", self.reconcile.page_size.into(), 1)?;
        self.schedule.validate()?;
        for (key, span, least) in [
            ("discovery.every", self.discovery.every, Duration::from_millis(10)),
            ("checks.lease_ttl", self.checks.lease_ttl, Duration::from_secs(5)),
            ("refunds.every", self.refunds.every, Duration::from_secs(1)),
            ("refunds.owed_every", self.refunds.owed_every, Duration::from_secs(1)),
            ("health.every", self.health.every, Duration::from_secs(1)),
            ("reconcile.window", self.reconcile.window, Duration::from_secs(3_600)),
            ("shutdown.grace", self.shutdown.grace, Duration::from_secs(1)),
        ] {
            if span.0 < least {
                let least = humantime::format_duration(least);
                return Err(bad(key, format!("must be at least \"{least}\"")));
            }
        }
        if self.health.every.0 > PROBE_EVERY_MAX {
            return Err(bad("health.every", "must be at most \"15m\""));
        }
        Ok(())
    }

    /// The repeats of targeted checks.
    pub fn repeats(&self) -> Result<Schedule, ConfigError> {
        match &self.checks.repeats {
            None => Ok(Schedule::default()),
            Some(spans) => Schedule::new(spans.iter().map(|span| span.0).collect())
                .map_err(|e| bad("checks.repeats", e.to_string())),
        }
    }

    /// How schedules are fitted and adopted.
    pub fn tune_settings(&self) -> TuneSettings {
        TuneSettings {
            window: self.schedule.window.0,
            half_life: self.schedule.half_life.0,
            rule: self.schedule.adoption_rule(),
            auto_adopt: self.schedule.auto_adopt,
            repeats_configured: self.checks.repeats.is_some(),
        }
    }

    /// Which schedules watches follow.
    pub fn following(&self) -> Following {
        match (&self.checks.repeats, self.schedule.enabled) {
            (Some(_), _) => Following::Configured,
            (None, true) => Following::Adopted,
            (None, false) => Following::Started,
        }
    }

    /// Every configured chain, validated, with endpoint URLs from `environment` where so configured.
    pub fn chains(
        &self,
        environment: impl Fn(&str) -> Option<String>,
    ) -> Result<Vec<ConfiguredChain>, ConfigError> {
        if self.chains.is_empty() {
            return Err(bad("chains", "is empty; add a [[chains]] table with its endpoints"));
        }
        let policy = self.policy()?;
        let repeats = self.repeats()?;
        let mut seen = BTreeSet::new();
        self.chains
            .iter()
            .map(|section| {
                let key = format!("chains[{}]", section.chain_id);
                if section.chain_id == 0 || !seen.insert(section.chain_id) {
                    return Err(bad(key, "must have a chain_id of its own, at least 1"));
                }
                let mut chain =
                    section.configured(&key, &policy, &repeats, &self.schedule, &environment)?;
                chain.settings.learn_known_used = self.health.learn_known_used;
                Ok(chain)
            })
            .collect()
    }
}

impl ChainSection {
    fn configured(
        &self,
        key: &str,
        policy: &Policy,
        repeats: &Schedule,
        schedule: &ScheduleSection,
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
        let timing = Timing {
            finality_margin: self.finality_margin.0,
            deadline_margin: self.block_time.0.saturating_mul(DEADLINE_MARGIN_BLOCKS),
            finality_retry: FINALITY_RETRY,
            pacing: schedule.pacing(),
        };
        let (grid, fit) = schedule.for_chain(self.block_time.0, policy.paid_after, &timing)?;
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
                known_used: self.known_used.iter().map(KnownUsedSection::known).collect(),
                learn_known_used: true,
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

impl EndpointSection {
    fn configured(
        &self,
        key: &str,
        environment: &impl Fn(&str) -> Option<String>,
    ) -> Result<EndpointSettings, ConfigError> {
        let text = match (&self.url, &self.url_env) {
            (Some(url), None) => url.0.clone(),
            (None, Some(name)) => environment(name).ok_or_else(|| {
                bad(format!("{key}.url_env"), format!("names {name}, which is not set"))
            })?,
            _ => return Err(bad(key, "must have either url or url_env")),
        };
        // The parser's own message could repeat the URL, which may hold a secret.
        let url = Url::parse(&text)
            .ok()
            .filter(|url| matches!(url.scheme(), "http" | "https") && url.has_host())
            .ok_or_else(|| bad(format!("{key}.url"), "must be an http:// or https:// URL"))?;
        if self.concurrency_max == 0 {
            return Err(bad(format!("{key}.concurrency_max"), "must be at least 1"));
        }
        if self.requests_per_second == Some(0) {
            let problem = "must be at least 1; leave it out for no limit";
            return Err(bad(format!("{key}.requests_per_second"), problem));
        }
        if self.request_timeout.is_some_and(|span| span.0.is_zero()) {
            return Err(bad(format!("{key}.request_timeout"), "must be longer than \"0s\""));
        }
        let limits = EndpointLimits {
            request_timeout: self.request_timeout.map(|span| span.0),
            concurrency_max: self.concurrency_max,
            calls_per_second: self.requests_per_second,
        };
        Ok(EndpointSettings { limits, ..EndpointSettings::new(&self.name, url) })
    }
}

fn parse_paid_after(key: &str, text: &str) -> Result<PaidAfter, ConfigError> {
    text.parse().map_err(|expected| bad(key, format!("is {text:?}; it must be {expected}")))
}

/// The line and what is wrong with it. The parser's own text also quotes the line, and that may hold a
/// password or a key.
fn where_and_why(text: &str, error: &toml::de::Error) -> String {
    let start = error.span().map_or(0, |span| span.start);
    let line = text.bytes().take(start).filter(|byte| *byte == b'\n').count() + 1;
    format!("line {line}: {}", error.message())
}

/// `RECONCILED_SECTION_KEY=value` stands for `section.key`. Other variables are left alone.
fn override_from(table: &mut toml::Table, name: &str, value: &str) {
    let Some(rest) = name.strip_prefix(ENV_PREFIX) else { return };
    let lower = rest.to_ascii_lowercase();
    let Some((section, key)) = lower.split_once('_') else { return };
    if !SECTIONS.contains(&section) || key.is_empty() {
        return;
    }
    let section =
        table.entry(section.to_owned()).or_insert_with(|| toml::Value::Table(toml::Table::new()));
    if let Some(section) = section.as_table_mut() {
        section.insert(key.to_owned(), scalar(value));
    }
}

/// A number or boolean where the text is one, else the text itself.
fn scalar(text: &str) -> toml::Value {
    if let Ok(number) = text.parse::<i64>() {
        return toml::Value::Integer(number);
    }
    let may_be_decimal = text.starts_with(|c: char| c.is_ascii_digit());
    if let Some(number) = text.parse::<f64>().ok().filter(|_| may_be_decimal) {
        return toml::Value::Float(number);
    }
    match text {
        "true" => toml::Value::Boolean(true),
        "false" => toml::Value::Boolean(false),
        _ => toml::Value::String(text.to_owned()),
    }
}

#[cfg(test)]
mod tests;
