//! The configuration: one TOML file, typed and validated, unknown keys refused by name.
//!
//! A value in a `[section]` can be overridden from the environment: `RECONCILED_DATABASE_URL` stands for
//! `database.url`. Secrets belong there: the database's URL, and endpoint URLs through `url_env`.

use std::collections::BTreeSet;
use std::fmt;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use serde::Deserialize;

use crate::domain::{LatePolicy, PaidAfter, Policy};
use crate::schedule::Schedule;
use crate::store::DatabaseUrl;
use crate::telemetry::LogFormat;
use crate::worker::schedules::Following;
use crate::worker::tune::TuneSettings;

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

mod chain;
mod schedule;

pub use chain::{
    ChainSection, ConfiguredChain, EndpointSection, KnownUsedSection, ReceiverSection,
};
pub use schedule::ScheduleSection;

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

section! {
    /// `[refunds]`
    Refunds {
        /// How often the chain is searched for refunds that are claimed or sent.
        every: Span = secs(60),
        /// How often for those that are owed or blocked.
        owed_every: Span = secs(3_600),
        /// How long a closed record is still searched for: a second refund is flagged.
        closed_for: Span = secs(14 * 24 * 3_600),
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
            ("refunds.closed_for", self.refunds.closed_for, Duration::from_secs(3_600)),
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
            following: self.following(),
            checks_kept_for: self.checks.keep_for.0,
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
                section.configured(&key, self, &policy, &repeats, &environment)
            })
            .collect()
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
