//! The format of case files: stories with a known right ending (tests/cases/README.md is its contract).
//!
//! This module reads a story and checks that it makes sense; it runs nothing. Whatever a file leaves out
//! has its default here, names included, so that the runner never meets a missing value. What must hold
//! in the end is [`super::expectation`]'s.

mod act;
mod sense;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use alloy_primitives::{Address, B256, keccak256};
use serde::{Deserialize, Deserializer};

pub use act::{Act, ChainAct, Event, GatewaySet, KillPoint, RefundAct, RefundStep};

use super::expectation::Expect;
use crate::domain::{
    Amount, IdentifierStatus, LatePolicy, Method, OrderKind, OrderStatus, PaidAfter, PaymentStatus,
    Rail,
};
use sense::Nonsense;

/// A story, as its file has it, with every default filled in.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// What happens, in one sentence.
    pub name: String,
    /// Where the story comes from.
    pub origin: String,
    /// What it shows.
    pub teaches: String,
    /// How the daemon is set up.
    #[serde(default)]
    pub policy: PolicyTable,
    /// How the chain is set up.
    #[serde(default)]
    pub chain: ChainTable,
    /// The gateway's orders at the start.
    #[serde(default, rename = "order")]
    pub orders: BTreeMap<String, OrderTable>,
    /// Stock on the shelf at the start, by sku.
    #[serde(default)]
    pub stock: BTreeMap<String, i64>,
    /// The gateway's payments at the start.
    #[serde(default, rename = "payment")]
    pub payments: BTreeMap<String, PaymentTable>,
    /// The clients' idempotency keys at the start.
    #[serde(default, rename = "identifier")]
    pub identifiers: BTreeMap<String, IdentifierTable>,
    /// What happens, in the order of the file; the runner sorts by `at` and keeps that order within.
    #[serde(default, rename = "event")]
    pub events: Vec<Event>,
    /// What must hold, and when.
    #[serde(rename = "expect")]
    pub expects: Vec<Expect>,
}

/// `[policy]`
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[allow(missing_docs, reason = "each field is the key of the same name in the format's contract")]
pub struct PolicyTable {
    #[serde(deserialize_with = "duration")]
    pub deadline: Duration,
    pub early_failure: bool,
    pub late: LatePolicy,
    #[serde(deserialize_with = "from_text")]
    pub paid_after: PaidAfter,
    pub quorum: usize,
    #[serde(deserialize_with = "duration")]
    pub stale_after: Duration,
    #[serde(deserialize_with = "duration")]
    pub reconcile_every: Duration,
}

impl Default for PolicyTable {
    fn default() -> Self {
        Self {
            deadline: Duration::from_secs(24 * 60 * 60),
            early_failure: false,
            late: LatePolicy::Refund,
            paid_after: PaidAfter::Confirmations(1),
            quorum: 1,
            stale_after: Duration::from_secs(2 * 60),
            reconcile_every: Duration::from_secs(10 * 60),
        }
    }
}

/// `[chain]`
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[allow(missing_docs, reason = "each field is the key of the same name in the format's contract")]
pub struct ChainTable {
    pub rail: Rail,
    #[serde(deserialize_with = "duration")]
    pub block_time: Duration,
    #[serde(deserialize_with = "duration")]
    pub finalized_lag: Duration,
    pub endpoints: usize,
}

impl Default for ChainTable {
    fn default() -> Self {
        Self {
            rail: Rail::X402,
            block_time: Duration::from_secs(2),
            finalized_lag: Duration::from_secs(20 * 60),
            endpoints: 1,
        }
    }
}

/// `[order.NAME]`
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[allow(missing_docs, reason = "each field is the key of the same name in the format's contract")]
pub struct OrderTable {
    pub kind: OrderKind,
    pub status: OrderStatus,
    /// The payment that pays it.
    pub paid_by: Option<String>,
    #[serde(deserialize_with = "duration")]
    pub quote_expires_at: Duration,
    /// What it holds, by sku.
    pub stock: BTreeMap<String, i64>,
    pub delivered: bool,
}

impl Default for OrderTable {
    fn default() -> Self {
        Self {
            kind: OrderKind::Order,
            status: OrderStatus::Paying,
            paid_by: None,
            quote_expires_at: Duration::from_secs(15 * 60),
            stock: BTreeMap::new(),
            delivered: false,
        }
    }
}

/// `[payment.NAME]`, and the act `gateway = "payment"`. What is `None` here is resolved by
/// [`Scenario::payment`].
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[allow(missing_docs, reason = "each field is the key of the same name in the format's contract")]
pub struct PaymentTable {
    pub order: Option<String>,
    pub method: Option<Method>,
    pub scheme: Scheme,
    pub status: PaymentStatus,
    #[serde(deserialize_with = "duration")]
    pub created_at: Duration,
    #[serde(deserialize_with = "duration")]
    pub broadcast_at: Duration,
    pub amount: Amount,
    #[serde(deserialize_with = "duration")]
    pub valid_before: Duration,
    pub payer: Option<Address>,
    pub same_authorization_as: Option<String>,
}

impl Default for PaymentTable {
    fn default() -> Self {
        Self {
            order: None,
            method: None,
            scheme: Scheme::Exact,
            status: PaymentStatus::Unknown,
            created_at: Duration::ZERO,
            broadcast_at: Duration::ZERO,
            amount: Amount::new(alloy_primitives::U256::from(1_000_000)),
            valid_before: Duration::from_secs(60),
            payer: None,
            same_authorization_as: None,
        }
    }
}

/// How much a permit moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scheme {
    /// What was signed for.
    Exact,
    /// What whoever settles chooses, at most what was signed for.
    Upto,
}

/// `[identifier.NAME]`
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IdentifierTable {
    /// The payment it stands for.
    pub payment: String,
    /// Where it stands.
    #[serde(default = "in_flight")]
    pub status: IdentifierStatus,
}

fn in_flight() -> IdentifierStatus {
    IdentifierStatus::InFlight
}

/// A payment of a story, complete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoryPayment {
    /// Its name in the story, and its id.
    pub name: String,
    /// The order it pays.
    pub order: String,
    /// How the money moves.
    pub method: Method,
    /// Whether whoever settles chooses the amount.
    pub scheme: Scheme,
    /// Its status when the row is written.
    pub status: PaymentStatus,
    /// When the row was written.
    pub created_at: Duration,
    /// When the settlement was broadcast.
    pub broadcast_at: Duration,
    /// How much.
    pub amount: Amount,
    /// When the authorization ends.
    pub valid_before: Duration,
    /// Who pays.
    pub payer: Address,
    /// The authorization's nonce: a function of the name, so that a story reads the same every time.
    pub nonce: B256,
}

/// What is wrong with a case file.
#[derive(Debug, thiserror::Error)]
pub enum ScenarioError {
    /// It cannot be read.
    #[error("{file}: cannot be read")]
    Io {
        /// The file's name.
        file: String,
        /// Why.
        source: std::io::Error,
    },
    /// It is not TOML of this format; the source names the line and the key.
    #[error("{file}: not a case")]
    Format {
        /// The file's name.
        file: String,
        /// Where and why.
        source: toml::de::Error,
    },
    /// It reads well and makes no sense.
    #[error("{file}: [{table}] {key}: {problem}")]
    Invalid {
        /// The file's name.
        file: String,
        /// The table.
        table: String,
        /// The key.
        key: &'static str,
        /// What is wrong with its value.
        problem: String,
    },
}

impl Scenario {
    /// Reads and checks a case file.
    pub fn load(path: &Path) -> Result<Self, ScenarioError> {
        let file = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        let text = std::fs::read_to_string(path)
            .map_err(|source| ScenarioError::Io { file: file.clone(), source })?;
        Self::parse(&file, &text)
    }

    /// Reads and checks a case; `file` is its name in errors.
    pub fn parse(file: &str, text: &str) -> Result<Self, ScenarioError> {
        let scenario: Self = toml::from_str(text)
            .map_err(|source| ScenarioError::Format { file: file.to_owned(), source })?;
        scenario.check_sense().map_err(|Nonsense { table, key, problem }| {
            ScenarioError::Invalid { file: file.to_owned(), table, key, problem }
        })?;
        Ok(scenario)
    }

    /// Why this version cannot run the story, if it cannot.
    pub fn unsupported(&self) -> Option<&'static str> {
        let rows = || self.payments.values().chain(self.later_rows().map(|(_, _, row)| row));
        if self.chain.rail == Rail::Mpp || rows().any(|row| row.method == Some(Method::Tempo)) {
            return Some("MPP on Tempo is not read yet");
        }
        if self.events.iter().any(|event| matches!(event.act, Act::Chain(ChainAct::Park { .. }))) {
            return Some("receive policies are Tempo's");
        }
        None
    }

    /// The payments whose rows are there from the start, complete, by name.
    pub fn payments_at_start(&self) -> Vec<StoryPayment> {
        self.payments.keys().filter_map(|name| self.payment(name)).collect()
    }

    /// Whether money goes back in this story.
    pub fn pays_refunds(&self) -> bool {
        self.events.iter().any(|event| matches!(event.act, Act::Refund(_)))
    }

    /// Every payment of the story, complete.
    pub fn all_payments(&self) -> Vec<StoryPayment> {
        let later = self.events.iter().filter_map(|event| match &event.act {
            Act::GatewayPayment { payment, .. } => self.payment(payment),
            _ => None,
        });
        self.payments_at_start().into_iter().chain(later).collect()
    }

    /// A payment of the story, complete: one from the start, or one the gateway writes later.
    pub fn payment(&self, name: &str) -> Option<StoryPayment> {
        let row = self.row(name)?;
        let order = match &row.order {
            Some(order) => order,
            None => self.only_order()?,
        };
        // An authorization belongs to the payment that it was signed for first.
        let signed = row.same_authorization_as.as_deref().unwrap_or(name);
        let payer = match row.payer.or(self.row(signed)?.payer) {
            Some(payer) => payer,
            None => Address::from_word(named_hash("payer", signed)),
        };
        Some(StoryPayment {
            name: name.to_owned(),
            order: order.clone(),
            method: row.method.unwrap_or(match self.chain.rail {
                Rail::X402 => Method::Eip3009,
                Rail::Mpp => Method::Tempo,
            }),
            scheme: row.scheme,
            status: row.status,
            created_at: row.created_at,
            broadcast_at: row.broadcast_at,
            amount: row.amount,
            valid_before: row.valid_before,
            payer,
            nonce: named_hash("nonce", signed),
        })
    }

    /// The row of a payment, whenever it is written.
    fn row(&self, name: &str) -> Option<&PaymentTable> {
        let later = || self.later_rows().find(|(_, payment, _)| *payment == name);
        self.payments.get(name).or_else(|| later().map(|(_, _, row)| row))
    }

    /// The rows the gateway writes during the story.
    fn later_rows(&self) -> impl Iterator<Item = (Duration, &str, &PaymentTable)> {
        self.events.iter().filter_map(|event| match &event.act {
            Act::GatewayPayment { payment, row } => Some((event.at, payment.as_str(), row)),
            _ => None,
        })
    }

    fn only_order(&self) -> Option<&String> {
        match self.orders.len() {
            1 => self.orders.keys().next(),
            _ => None,
        }
    }
}

/// A value that is a function of a payment's name, so that a story reads the same every time.
fn named_hash(what: &str, payment: &str) -> B256 {
    keccak256(format!("reconciled/case/{what}/{payment}"))
}

/// A duration as humantime writes it, such as `"25h"`.
pub(super) fn duration<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    let text = String::deserialize(deserializer)?;
    humantime::parse_duration(&text)
        .map_err(|error| serde::de::Error::custom(format!("{text:?} is no duration: {error}")))
}

fn from_text<'de, D: Deserializer<'de>, T>(deserializer: D) -> Result<T, D::Error>
where
    T: std::str::FromStr<Err = &'static str>,
{
    let text = String::deserialize(deserializer)?;
    text.parse().map_err(|expected| serde::de::Error::custom(format!("{text:?} is not {expected}")))
}

#[cfg(test)]
mod tests;
