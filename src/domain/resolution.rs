//! What a verdict changes in the database, as a value: a [`Resolution`], and the [`Situation`] it is
//! decided in. How it is decided is [`super::resolve`]'s business.

use serde::Serialize;

use super::order::column_code;
use super::{
    Flag, FlagKind, IdentifierStatus, NextCheck, Order, OrderId, OrderStatus, Payment, PaymentId,
    PaymentStatus, RawPayment, RecordedTransfer, RefundOwed, RefundStatus, Reservation, Settlement,
    Sibling, Sku,
};

/// Freshly locked rows around one payment.
#[derive(Debug, Clone, PartialEq)]
pub struct Situation<'a> {
    /// The payment.
    pub payment: &'a Payment,
    /// Its order; `None` when the row is missing or makes no sense.
    pub order: Option<&'a Order>,
    /// The other payments of that order.
    pub siblings: Vec<&'a Sibling>,
    /// The order's stock reservations.
    pub reservations: Vec<&'a Reservation>,
    /// Stock on the shelf, for the skus of those reservations.
    pub available: Vec<(&'a Sku, i64)>,
    /// The transfer already recorded as this payment's, if one is.
    pub recorded: Option<&'a RecordedTransfer>,
    /// Who else has the transfer the verdict speaks of, or comes before this payment, if somebody does.
    pub transfer_owner: Option<Claim<'a>>,
    /// Another row that may have had the payment's transfer, and that nobody can read.
    pub unreadable_claimant: Option<&'a RawPayment>,
    /// This payment's refund record.
    pub refund: Option<RefundStatus>,
    /// Whether its money was owed back, and so never pays an order.
    pub refund_stands: bool,
    /// The order's other payments whose money was.
    pub owed_back: Vec<&'a PaymentId>,
}

/// Another payment's claim on a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Claim<'a> {
    /// Whose.
    pub payment_id: &'a PaymentId,
    /// Whether it has the transfer, and not only comes first.
    pub has_it: bool,
}

column_code! {
    /// In one word, what a resolution did: for metrics, logs and people.
    Outcome {
        /// Nothing to change but the watch.
        Waiting = "waiting",
        /// The order is paid by this payment.
        Paid = "paid",
        /// An order that was over is paid by this payment, its stock taken again.
        Reinstated = "reinstated",
        /// Settled, and owed back.
        RefundOwed = "refund_owed",
        /// Recorded before; now final, or in another block, or written again over a careless gateway.
        Confirmed = "confirmed",
        /// A refund was paid, and its record is closed.
        RefundPaid = "refund_paid",
        /// Failed for good.
        Failed = "failed",
        /// Failed, because its transfer pays another order.
        AuthorizationReused = "authorization_reused",
        /// Its transfer vanished in a reorg; unknown again.
        Reopened = "reopened",
        /// Only a person can decide.
        Flagged = "flagged",
    }
}

column_code! {
    /// What an event tells a consumer.
    EventKind {
        /// The order is paid.
        OrderPaid = "order.paid",
        /// The order failed for good.
        OrderFailed = "order.failed",
        /// A reorg took the order's payment away.
        OrderReopened = "order.reopened",
        /// A refund is owed.
        RefundOwed = "refund.owed",
        /// A refund was paid.
        RefundPaid = "refund.paid",
    }
}

/// One row of the outbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Event {
    /// What happened.
    pub kind: EventKind,
    /// To which order.
    pub order_id: OrderId,
    /// By which payment.
    pub payment_id: PaymentId,
    /// Written at most once per key: repeating a resolution has no second effect.
    pub dedupe_key: String,
}

/// A new status for an order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct OrderChange {
    /// The status.
    pub status: OrderStatus,
    /// Who pays it from now on.
    pub paid_by: Option<PaymentId>,
}

/// What happens to an order's stock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum StockChange {
    /// Nothing.
    Keep,
    /// `held` becomes `committed`.
    Commit,
    /// `held` becomes `released`, and the quantity goes back on the shelf (I5: once, as only `held` does).
    Release,
    /// `released` becomes `committed`, and the quantity is taken from the shelf again.
    Retake,
    /// `committed` becomes `held`: a reorg took the payment away.
    Hold,
}

/// What happens to the record of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TransferChange {
    /// Nothing.
    Keep,
    /// It is this payment's, with this finality. An older record of this payment's is orphaned.
    Record(Settlement),
    /// It vanished in a reorg.
    Orphan,
}

/// What happens to the refund record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RefundChange {
    /// Nothing.
    Keep,
    /// A new record, or one that a reorg voided owed again.
    Owe(RefundOwed),
    /// The transfer moved to another block, perhaps with another value: the record follows. The amount does
    /// so only while nobody has taken the record.
    Follow(Settlement),
    /// The transfer vanished while the refund was merely owed.
    Void,
}

/// Where the watch goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WatchChange {
    /// The phase and when to look next.
    pub next: NextCheck,
    /// Start the repeats anew.
    pub restart: bool,
}

/// What changes in the database because of a verdict. Everything or nothing of it is written (I7).
#[derive(Debug, Clone, PartialEq)]
pub struct Resolution {
    /// In one word.
    pub outcome: Outcome,
    /// The payment's new status.
    pub payment: Option<PaymentStatus>,
    /// The order's new status.
    pub order: Option<OrderChange>,
    /// What happens to its stock.
    pub stock: StockChange,
    /// What identifiers still in flight become; `in_flight` puts `settled` ones back.
    pub identifiers: Option<IdentifierStatus>,
    /// What happens to the record of the transfer.
    pub transfer: TransferChange,
    /// What happens to the refund record.
    pub refund: RefundChange,
    /// Flags to raise.
    pub flags: Vec<Flag>,
    /// Flags whose cause is gone; filled in by [`super::resolve`].
    pub close_flags: Vec<FlagKind>,
    /// Rows for the outbox.
    pub events: Vec<Event>,
    /// Where the watch goes.
    pub watch: WatchChange,
}

impl Resolution {
    /// Nothing but the watch changes.
    pub(super) fn only_watch(next: NextCheck) -> Self {
        Self {
            outcome: Outcome::Waiting,
            payment: None,
            order: None,
            stock: StockChange::Keep,
            identifiers: None,
            transfer: TransferChange::Keep,
            refund: RefundChange::Keep,
            flags: Vec::new(),
            close_flags: Vec::new(),
            events: Vec::new(),
            watch: WatchChange { next, restart: false },
        }
    }

    /// Whether it is written to `resolutions`: it changed what somebody else can see (I12).
    pub fn is_recorded(&self) -> bool {
        self.payment.is_some()
            || self.order.is_some()
            || self.transfer != TransferChange::Keep
            || self.refund != RefundChange::Keep
    }

    /// Raises a flag as well, about what holds.
    pub(super) fn flagged(self, kind: FlagKind, detail: serde_json::Value) -> Self {
        self.flagged_once(kind, "", detail)
    }

    /// Raises a flag as well, about what happened: another occasion is another flag.
    pub(super) fn flagged_once(
        mut self,
        kind: FlagKind,
        occasion: impl ToString,
        detail: serde_json::Value,
    ) -> Self {
        self.flags.push(Flag { kind, subject: occasion.to_string(), detail });
        self
    }
}
