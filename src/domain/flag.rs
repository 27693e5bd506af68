//! Flags: what only a person can decide, and when one is no longer needed.
//!
//! One row stands per payment, kind and subject. Raising it again while it stands changes nothing that a
//! person decided: an open flag keeps its age, and one that a person closed stays closed, so that nobody
//! is asked the same thing every ten minutes. Once its cause is gone the row no longer stands: it is
//! closed by itself if nobody did before, is kept as history, and the same cause coming back is a new
//! flag. What happens rather than holds, such as a reorg, names the occasion as its subject: the next
//! occasion is a flag of its own, whatever became of the last one.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::order::column_code;
use super::standing::Standing;
use super::{
    OrderId, PaymentId, Phase, RefundChange, RefundStatus, Resolution, Situation, TransferChange,
    Verdict,
};

column_code! {
    /// What a person has to look at.
    FlagKind {
        /// A payment row that cannot be parsed; the detail names the column (I11).
        MalformedPayment = "malformed_payment",
        /// A payment on a chain the configuration does not name (I11).
        ChainNotConfigured = "chain_not_configured",
        /// A payment by a method this version cannot read.
        UnsupportedMethod = "unsupported_method",
        /// The deadline passed and no conclusive read was possible.
        InconclusiveAtDeadline = "inconclusive_at_deadline",
        /// The payer used the authorization for other money than this payment's.
        NonceUsedElsewhere = "nonce_used_elsewhere",
        /// One authorization was accepted for two payments, and the transfer pays the other one.
        AuthorizationReused = "authorization_reused",
        /// Money moved by an authorization that another payment may have too, and that one cannot be read.
        AuthorizationContested = "authorization_contested",
        /// A transfer vanished in a reorg after the result had been handed over.
        ReorgedAfterDelivery = "reorged_after_delivery",
        /// A transfer vanished in a reorg after its refund had left the hands of this daemon.
        ReorgedAfterRefund = "reorged_after_refund",
        /// The gateway says settled, and the chain has no such transfer.
        SettledWithoutTransfer = "settled_without_transfer",
        /// Money moved for an order that says paid without saying by which payment.
        PaidByUnknown = "paid_by_unknown",
        /// The gateway calls an order paid by money that is owed back.
        RefundContradicted = "refund_contradicted",
        /// Money moved for an order that does not exist, or cannot be read.
        OrderUnreadable = "order_unreadable",
        /// An order failed, and what it held is of a sku that has no row in `stock`: it was released and
        /// put on no shelf.
        StockMissing = "stock_missing",
        /// Money reached a `pay_to` and no payment knows it.
        UnmatchedTransfer = "unmatched_transfer",
        /// A refund's nonce was used for something else than that refund.
        RefundMismatch = "refund_mismatch",
        /// A refund landed that was not to: a second one, or one that had been called off.
        RefundedAgain = "refunded_again",
        /// Money moved for an order that is over, the gateway settled it itself, and nothing says whether it
        /// went back.
        SettledOrderOver = "settled_order_over",
        /// A block that was final is not canonical any more.
        FinalizedReorg = "finalized_reorg",
        /// A refund record that cannot be parsed; the detail names the column (I11).
        MalformedRefund = "malformed_refund",
    }
}

impl FlagKind {
    /// What a flag that closes by itself says about why; `None`: only a person closes one of this kind.
    pub const fn cause_gone(self) -> Option<&'static str> {
        match self {
            Self::MalformedPayment => Some("the row can be read"),
            Self::ChainNotConfigured => {
                Some("the chain is configured, or need not be read any more")
            }
            Self::UnsupportedMethod => Some("the method is read, or need not be any more"),
            Self::InconclusiveAtDeadline => Some("the chain gave a conclusive answer"),
            Self::AuthorizationContested => Some("the other payment can be read"),
            Self::OrderUnreadable => Some("the order can be read"),
            Self::SettledWithoutTransfer => {
                Some("its transfer was seen, or the gateway no longer calls it settled")
            }
            Self::SettledOrderOver => Some("it pays its order, or its refund is recorded"),
            Self::UnmatchedTransfer => Some("a payment claims it"),
            Self::PaidByUnknown => Some("the order no longer says paid without saying by what"),
            Self::RefundContradicted => {
                Some("the refund was called off, or the order is no longer paid by it")
            }
            Self::MalformedRefund => Some("the record can be read"),
            Self::RefundedAgain => Some("it is the refund that its record was closed by"),
            Self::ReorgedAfterDelivery => Some("the transfer landed again, and is final"),
            Self::ReorgedAfterRefund => {
                Some("the transfer landed again, and is final: the refund is right")
            }
            Self::NonceUsedElsewhere
            | Self::AuthorizationReused
            | Self::StockMissing
            | Self::RefundMismatch
            | Self::FinalizedReorg => None,
        }
    }
}

/// A flag to raise about the payment that is being resolved.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Flag {
    /// What a person has to look at.
    pub kind: FlagKind,
    /// The occasion, for what happens rather than holds; else empty.
    pub subject: String,
    /// All that is known, as JSON for people and programs.
    pub detail: Value,
}

/// A flag to raise, and whom or what it is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RaisedFlag {
    /// The payment it is about, if it is about one.
    pub payment_id: Option<PaymentId>,
    /// That payment's order.
    pub order_id: Option<OrderId>,
    /// The flag.
    pub flag: Flag,
}

/// Flags whose cause is gone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GoneFlag {
    /// What a person had to look at.
    pub kind: FlagKind,
    /// The payment they are about, if they are about one.
    pub payment_id: Option<PaymentId>,
    /// The subject; `None`: whatever it is.
    pub subject: Option<String>,
    /// Why the cause is gone, for whoever reads it later.
    pub note: String,
}

/// A flag as stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredFlag {
    /// The row.
    pub id: i64,
    /// What a person has to look at.
    pub kind: FlagKind,
    /// The payment it is about, if it is about one.
    pub payment_id: Option<PaymentId>,
    /// That payment's order.
    pub order_id: Option<OrderId>,
    /// What it is about, beyond the payment; may be empty.
    pub subject: String,
    /// All that is known.
    pub detail: Value,
    /// When it was raised.
    pub opened_at: super::Timestamp,
    /// When and by whom it was closed, and why.
    pub closed: Option<Closing>,
}

/// The end of a flag.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Closing {
    /// When.
    pub at: super::Timestamp,
    /// By whom; [`CLOSED_BY_ITSELF`] when its cause was gone.
    pub by: String,
    /// Why, in the words of whoever closed it.
    pub note: String,
}

/// Who closes a flag whose cause is gone.
pub const CLOSED_BY_ITSELF: &str = "reconciled";

/// The payment's flags whose cause is gone once `resolution` is written: the one place that says when.
///
/// Not among them are flags that `resolution` raises itself.
pub(super) fn causes_gone(
    verdict: &Verdict,
    situation: &Situation<'_>,
    resolution: &Resolution,
) -> Vec<FlagKind> {
    let standing = after(verdict, situation, resolution);
    FlagKind::ALL
        .iter()
        .copied()
        .filter(|kind| !resolution.flags.iter().any(|flag| flag.kind == *kind))
        .filter(|kind| standing.is_gone(*kind))
        .collect()
}

/// How things stand once a resolution is written.
fn after<'a>(
    verdict: &Verdict,
    situation: &'a Situation<'a>,
    resolution: &'a Resolution,
) -> Standing<'a> {
    Standing {
        payment: situation.payment,
        status: resolution.payment.unwrap_or(situation.payment.status),
        unread: match verdict {
            Verdict::Inconclusive(reason) => Some(*reason),
            _ => None,
        },
        is_over: resolution.watch.next.phase == Phase::Closed,
        is_contested: situation.unreadable_claimant.is_some(),
        order: situation.order.map(|order| match &resolution.order {
            Some(change) => (change.status, change.paid_by.as_ref()),
            None => (order.status, order.paid_by.as_ref()),
        }),
        refund: match resolution.refund {
            RefundChange::Owe(_) => Some(RefundStatus::Owed),
            RefundChange::Void => Some(RefundStatus::Void),
            RefundChange::Keep | RefundChange::Follow(_) => situation.refund,
        },
        finality: match resolution.transfer {
            TransferChange::Record(settlement) => Some(settlement.finality),
            TransferChange::Orphan => None,
            TransferChange::Keep => situation.recorded.map(|known| known.settlement.finality),
        },
    }
}
