//! The daemon's own row about a payment it follows, and one check's outcome on its way to the store.

use serde::Serialize;

use super::order::column_code;
use super::{Evidence, PaymentId, Terms, Timestamp, Verdict};

column_code! {
    /// Where a watch stands: `targeted` -> `reconcile` -> `late` or `finality` -> `closed`.
    Phase {
        /// On the repeat schedule.
        Targeted = "targeted",
        /// The repeats are over, or a person must help: read by every full reconcile.
        Reconcile = "reconcile",
        /// Failed at the deadline while it could still land.
        Late = "late",
        /// Settled, in a block that is not finalized.
        Finality = "finality",
        /// Nothing more can happen.
        Closed = "closed",
    }
}

/// The daemon's own row about a payment it follows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Watch {
    /// The payment.
    pub payment_id: PaymentId,
    /// Where the watch stands.
    pub phase: Phase,
    /// When the repeat schedule started.
    pub opened_at: Timestamp,
    /// When it is due; `None`: only the full reconcile reads it.
    pub next_check_at: Option<Timestamp>,
    /// Checks since `opened_at`.
    pub checks_done: u32,
    /// Inconclusive checks in a row.
    pub consecutive_inconclusive: u32,
    /// The version of the repeat schedule it follows, from its first check on; `None`: the configured or
    /// built-in one.
    pub schedule_id: Option<i64>,
    /// `kind` or `kind:reason` of the last verdict.
    pub last_verdict: Option<String>,
}

/// When to look next, and in which phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NextCheck {
    /// The phase from then on.
    pub phase: Phase,
    /// `None`: only the full reconcile reads it.
    pub at: Option<Timestamp>,
}

/// The next check for every way a resolution can go; which one holds is decided on fresh rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DueTimes {
    /// While the payment is open.
    pub open: NextCheck,
    /// Once it was failed and may still land.
    pub late: Option<Timestamp>,
    /// Once it is settled and waits for finality.
    pub finality: Timestamp,
    /// When a reorg takes its transfer away and the repeats start anew.
    pub reopened: Timestamp,
    /// The version of the repeat schedule that says so; `None`: the configured or built-in one.
    pub schedule_id: Option<i64>,
}

/// One check's outcome, on its way to the store.
#[derive(Debug, Clone, PartialEq)]
pub struct Judged {
    /// The payment.
    pub payment_id: PaymentId,
    /// When it was checked.
    pub checked_at: Timestamp,
    /// The row's terms when it was read; `None` where it could not be read, or nothing was asked.
    pub terms: Option<Terms>,
    /// What was read (I12).
    pub evidence: Evidence,
    /// What that proves.
    pub verdict: Verdict,
    /// For [`super::Inconclusive::MalformedPayment`] and its like: what a person is told.
    pub problem: Option<String>,
    /// When to look next.
    pub due: DueTimes,
}

impl Judged {
    /// Settled payments by block and log index, before all others: the order to resolve a batch in.
    pub fn chain_order(&self) -> (bool, u64, u64) {
        match &self.verdict {
            Verdict::Settled(s) => (false, s.transfer.block.number, s.transfer.log_index),
            _ => (true, 0, 0),
        }
    }

    /// `kind` or `kind:reason` of the verdict, as watches and checks store it.
    pub fn verdict_code(&self) -> String {
        match self.verdict.reason() {
            Some(reason) => format!("{}:{reason}", self.verdict.kind()),
            None => self.verdict.kind().to_owned(),
        }
    }
}
