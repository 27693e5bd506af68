//! Flags: what only a person can decide.

use serde::Serialize;

use super::order::column_code;

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
    }
}

/// A flag to raise; at most one of a kind is open per payment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Flag {
    /// What a person has to look at.
    pub kind: FlagKind,
    /// All that is known, as JSON for people and programs.
    pub detail: serde_json::Value,
}
