//! What happens in a story, and how it is written in `[[event]]`.

use std::time::Duration;

use alloy_primitives::Address;
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer};
use toml::Table;

use super::PaymentTable;
use crate::domain::{Amount, IdentifierStatus, OrderStatus, PaymentStatus};
use crate::sim::fault::Fault;

/// `[[event]]`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// When, from the start of the story.
    pub at: Duration,
    /// What.
    pub act: Act,
}

/// Something that happens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Act {
    /// On the chain.
    Chain(ChainAct),
    /// An endpoint starts to misbehave.
    Rpc {
        /// Which endpoint, from 0.
        endpoint: usize,
        /// How.
        fault: Fault,
        /// When it stops; the end of the story when `None`.
        until: Option<Duration>,
    },
    /// The gateway writes a new payment row.
    GatewayPayment {
        /// Its name.
        payment: String,
        /// The row.
        row: PaymentTable,
    },
    /// The gateway changes a row.
    GatewaySet(GatewaySet),
    /// The daemon is killed and started again at once.
    Kill {
        /// At what point of its work.
        between: KillPoint,
    },
    /// The refund process acts.
    Refund(RefundAct),
    /// The local clock jumps ahead; the chain's does not.
    ClockJump {
        /// By how much.
        by: Duration,
    },
}

/// What the refund process does with one record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RefundAct {
    /// What it does.
    pub step: RefundStep,
    /// For which payment.
    pub payment: String,
    /// Whether it pays with the record's nonce.
    pub with_nonce: bool,
    /// Whom it pays instead of the buyer.
    pub to: Option<Address>,
    /// How much it pays instead of what is owed.
    pub amount: Option<Amount>,
}

/// What can happen on the chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ChainAct {
    /// The payment's authorization is used.
    Transfer {
        /// Whose authorization.
        payment: String,
        /// Who is paid instead of the merchant.
        to: Option<Address>,
        /// How much moves instead of the payment's amount.
        amount: Option<Amount>,
        /// Whether it is made by a contract in whose calldata the call cannot be found (Permit2).
        unseen: bool,
        /// Whether the payer settles it himself, and not the facilitator (Permit2).
        by_payer: bool,
    },
    /// Several authorizations are used in one transaction.
    Batch {
        /// Whose.
        payments: Vec<String>,
    },
    /// The payer cancels the authorization.
    Cancel {
        /// Which.
        payment: String,
    },
    /// A transaction for the payment is mined and fails.
    Revert {
        /// Which payment.
        payment: String,
    },
    /// A transfer into `pay_to` that no authorization stands behind.
    BareTransfer {
        /// How much.
        amount: Amount,
        /// From whom.
        payer: Address,
    },
    /// The newest blocks are replaced by empty ones.
    Reorg {
        /// How many.
        depth: u64,
    },
    /// The money is parked by a receive policy (Tempo).
    Park {
        /// Whose.
        payment: String,
    },
}

/// What the gateway changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GatewaySet {
    /// A payment's status.
    Payment {
        /// Which.
        payment: String,
        /// The new status.
        status: PaymentStatus,
    },
    /// An order.
    Order {
        /// Which.
        order: String,
        /// The new status.
        status: Option<OrderStatus>,
        /// The payment that pays it.
        paid_by: Option<String>,
        /// Whether the result was handed over.
        delivered: Option<bool>,
        /// Whether its held stock goes back on the shelf.
        release_stock: bool,
    },
    /// An identifier's status.
    Identifier {
        /// Which.
        identifier: String,
        /// The new status.
        status: IdentifierStatus,
    },
    /// What is on the shelf.
    Stock {
        /// Of what.
        sku: String,
        /// How many.
        available: i64,
    },
}

/// Where the daemon is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KillPoint {
    /// After the chain was read, before anything is written.
    ReadAndApply,
    /// After the lease was taken, before the chain is read.
    LeaseAndRead,
}

/// What the refund process does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RefundStep {
    /// Takes the record.
    Claim,
    /// Gives it back.
    Release,
    /// Pays it.
    Pay,
    /// Pays it twice.
    PayTwice,
    /// Pays it from another wallet than before.
    PayElsewhere,
    /// Calls it off.
    Void,
}

impl<'de> Deserialize<'de> for Event {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut keys = Keys(Table::deserialize(deserializer)?);
        let at = keys.duration("at").and_then(|at| at.ok_or_else(|| missing("at")));
        let at = at.map_err(|problem| D::Error::custom(format!("event: {problem}")))?;
        let act = Act::parse(keys).map_err(|problem| {
            D::Error::custom(format!("event at {}: {problem}", humantime::format_duration(at)))
        })?;
        Ok(Self { at, act })
    }
}

/// The keys of one event, taken out one by one; what is left in the end does not belong there.
struct Keys(Table);

fn missing(key: &str) -> String {
    format!("missing key `{key}`")
}

impl Keys {
    fn take<T: DeserializeOwned>(&mut self, key: &str) -> Result<Option<T>, String> {
        let Some(value) = self.0.remove(key) else { return Ok(None) };
        value.try_into().map(Some).map_err(|error| format!("key `{key}`: {}", error.message()))
    }

    fn need<T: DeserializeOwned>(&mut self, key: &str) -> Result<T, String> {
        self.take(key)?.ok_or_else(|| missing(key))
    }

    fn duration(&mut self, key: &str) -> Result<Option<Duration>, String> {
        let Some(text) = self.take::<String>(key)? else { return Ok(None) };
        humantime::parse_duration(&text)
            .map(Some)
            .map_err(|error| format!("key `{key}`: {text:?} is no duration: {error}"))
    }

    fn end(self, act: Act) -> Result<Act, String> {
        match self.0.keys().next() {
            None => Ok(act),
            Some(key) => Err(format!("key `{key}` does not belong to this act")),
        }
    }
}

impl Act {
    fn parse(mut keys: Keys) -> Result<Self, String> {
        let actors = ["chain", "rpc", "gateway", "daemon", "refund", "clock"];
        let mut named = actors.into_iter().filter(|actor| keys.0.contains_key(*actor));
        let (Some(actor), None) = (named.next(), named.next()) else {
            return Err(format!("exactly one of `{}` must be there", actors.join("`, `")));
        };
        let act: String = keys.need(actor)?;
        let parsed = match (actor, act.as_str()) {
            ("chain", act) => ChainAct::parse(act, &mut keys)?.map(Self::Chain),
            ("rpc", act) => match rpc_fault(act, &mut keys)? {
                None => None,
                Some(fault) => Some(Self::Rpc {
                    endpoint: keys.take("endpoint")?.unwrap_or(0),
                    fault,
                    until: keys.duration("until")?,
                }),
            },
            ("gateway", "payment") => {
                let payment = keys.need("payment")?;
                let row = Table::try_into(std::mem::take(&mut keys.0));
                let row = row.map_err(|error| error.message().to_owned())?;
                Some(Self::GatewayPayment { payment, row })
            }
            ("gateway", "set") => Some(Self::GatewaySet(GatewaySet::parse(&mut keys)?)),
            ("daemon", "kill") => Some(Self::Kill { between: keys.need("between")? }),
            ("refund", step) => {
                let step = RefundStep::deserialize(toml::Value::from(step))
                    .map_err(|error| format!("key `refund`: {}", error.message()))?;
                Some(Self::Refund(RefundAct {
                    step,
                    payment: keys.need("payment")?,
                    with_nonce: keys.take("with_nonce")?.unwrap_or(true),
                    to: keys.take("to")?,
                    amount: keys.take("amount")?,
                }))
            }
            ("clock", "jump") => {
                Some(Self::ClockJump { by: keys.duration("by")?.ok_or_else(|| missing("by"))? })
            }
            _ => None,
        };
        let parsed = parsed.ok_or_else(|| format!("key `{actor}`: {act:?} is no act"))?;
        keys.end(parsed)
    }
}

impl ChainAct {
    fn parse(act: &str, keys: &mut Keys) -> Result<Option<Self>, String> {
        Ok(Some(match act {
            "transfer" => Self::Transfer {
                payment: keys.need("payment")?,
                to: keys.take("to")?,
                amount: keys.take("amount")?,
                unseen: keys.take("unseen")?.unwrap_or(false),
                by_payer: keys.take("by_payer")?.unwrap_or(false),
            },
            "batch" => Self::Batch { payments: keys.need("payments")? },
            "cancel" => Self::Cancel { payment: keys.need("payment")? },
            "revert" => Self::Revert { payment: keys.need("payment")? },
            "bare_transfer" => {
                Self::BareTransfer { amount: keys.need("amount")?, payer: keys.need("payer")? }
            }
            "reorg" => Self::Reorg { depth: keys.need("depth")? },
            "park" => Self::Park { payment: keys.need("payment")? },
            _ => return Ok(None),
        }))
    }
}

fn rpc_fault(act: &str, keys: &mut Keys) -> Result<Option<Fault>, String> {
    Ok(Some(match act {
        "down" => Fault::Down,
        "frozen_head" => Fault::FrozenHead,
        "empty_logs" => Fault::EmptyLogs,
        "says_unused" => Fault::SaysUnused,
        "wrong_chain" => Fault::WrongChain,
        "rate_limited" => Fault::RateLimited,
        "no_code" => Fault::NoCode,
        "log_range_limit" => Fault::LogRangeLimit(keys.need("blocks")?),
        _ => return Ok(None),
    }))
}

impl GatewaySet {
    fn parse(keys: &mut Keys) -> Result<Self, String> {
        let rows = ["payment", "order", "identifier", "stock"];
        let mut named = rows.into_iter().filter(|row| keys.0.contains_key(*row));
        let (Some(row), None) = (named.next(), named.next()) else {
            return Err(format!("exactly one of `{}` must be there", rows.join("`, `")));
        };
        let name: String = keys.need(row)?;
        Ok(match row {
            "payment" => Self::Payment { payment: name, status: keys.need("status")? },
            "order" => Self::Order {
                order: name,
                status: keys.take("status")?,
                paid_by: keys.take("paid_by")?,
                delivered: keys.take("delivered")?,
                release_stock: keys.take("release_stock")?.unwrap_or(false),
            },
            "identifier" => Self::Identifier { identifier: name, status: keys.need("status")? },
            _ => Self::Stock { sku: name, available: keys.need("available")? },
        })
    }
}
