//! The choices an operator makes about deciding.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use super::Payment;
use super::Timestamp;
use super::order::column_code;

/// The choices an operator makes about deciding. Everything has a conservative default.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// From `broadcast_at` to the deadline, judged by block time (default 24 h).
    pub deadline_after: Duration,
    /// Fail a payment as soon as the chain proves it can never settle, instead of at the deadline.
    pub early_failure: bool,
    /// What to do with money that arrives for an order that is over.
    pub late: LatePolicy,
    /// How deep a transfer must be before its order is paid.
    pub paid_after: PaidAfter,
    /// How many endpoints must agree on a negative that ends a payment.
    pub quorum: usize,
    /// How many endpoints must show a positive.
    pub positive_quorum: usize,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            deadline_after: Duration::from_secs(24 * 60 * 60),
            early_failure: false,
            late: LatePolicy::Refund,
            paid_after: PaidAfter::Confirmations(1),
            quorum: 1,
            positive_quorum: 1,
        }
    }
}

impl Policy {
    /// When a payment that has not settled is failed, if that can be shown (DESIGN section 7).
    pub fn deadline(&self, payment: &Payment) -> Timestamp {
        payment.started_at().saturating_add(self.deadline_after)
    }
}

column_code! {
    /// What to do with money that arrives for an order that is over.
    LatePolicy {
        /// Owe it back.
        Refund = "refund",
        /// Take the stock again and pay the order; owe it back when the stock is gone.
        Reinstate = "reinstate",
    }
}

/// How deep a transfer must be before its order is paid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PaidAfter {
    /// This many blocks, its own included; at least 1.
    Confirmations(u64),
    /// The chain's `safe` block has reached it.
    Safe,
    /// The chain's `finalized` block has reached it.
    Finalized,
}

impl fmt::Display for PaidAfter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Confirmations(1) => f.write_str("1 confirmation"),
            Self::Confirmations(n) => write!(f, "{n} confirmations"),
            Self::Safe => f.write_str("safe"),
            Self::Finalized => f.write_str("finalized"),
        }
    }
}

impl FromStr for PaidAfter {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const EXPECTED: &str = "\"safe\", \"finalized\" or \"N confirmations\" with N at least 1";
        match text {
            "safe" => return Ok(Self::Safe),
            "finalized" => return Ok(Self::Finalized),
            _ => {}
        }
        let count = text
            .strip_suffix(" confirmations")
            .or_else(|| text.strip_suffix(" confirmation"))
            .ok_or(EXPECTED)?;
        match count.parse() {
            Ok(n) if n >= 1 => Ok(Self::Confirmations(n)),
            _ => Err(EXPECTED),
        }
    }
}
