//! How things stand with what a flag is about, and whether its cause is gone: the one place that says when.
//!
//! While a payment is followed, its resolutions ask. Of those that nobody follows any more, the full reconcile
//! does, from the rows alone. Pure.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    ChainId, Finality, FlagKind, GoneFlag, Inconclusive, LedgerPage, Method, OrderStatus, Payment,
    PaymentId, PaymentStatus, RefundStatus, StoredFlag,
};

/// How things stand with one payment.
pub(super) struct Standing<'a> {
    /// The payment, whose row can be read.
    pub(super) payment: &'a Payment,
    /// Where the payment stands.
    pub(super) status: PaymentStatus,
    /// Why nothing could be read about it.
    pub(super) unread: Option<Inconclusive>,
    /// Nothing needs to be read any more: what could not be, does not matter.
    pub(super) is_over: bool,
    /// Whether another payment may have its authorization, and cannot be read.
    pub(super) is_contested: bool,
    /// Its order, if that can be read: status and who pays it.
    pub(super) order: Option<(OrderStatus, Option<&'a PaymentId>)>,
    /// Its refund record.
    pub(super) refund: Option<RefundStatus>,
    /// Of the transfer recorded as this payment's, if one is.
    pub(super) finality: Option<Finality>,
}

impl Standing<'_> {
    /// Whether the cause of such a flag about the payment is gone.
    pub(super) fn is_gone(&self, kind: FlagKind) -> bool {
        let is_unread =
            |reasons: &[Inconclusive]| self.unread.is_some_and(|reason| reasons.contains(&reason));
        let pays = |(status, paid_by): (OrderStatus, Option<&PaymentId>)| {
            status == OrderStatus::Paid && paid_by == Some(&self.payment.id)
        };
        match kind {
            FlagKind::MalformedPayment => true,
            // The row is read first, then the method looked at, then the chain: a reason further down says
            // that those above are no more.
            FlagKind::UnsupportedMethod => {
                let reasons = [Inconclusive::MalformedPayment, Inconclusive::UnsupportedMethod];
                self.is_over || !is_unread(&reasons)
            }
            FlagKind::ChainNotConfigured => {
                let reasons = [
                    Inconclusive::MalformedPayment,
                    Inconclusive::UnsupportedMethod,
                    Inconclusive::ChainNotConfigured,
                ];
                self.is_over || !is_unread(&reasons)
            }
            // A read that proves something, and a payment that is no longer open because of it.
            FlagKind::InconclusiveAtDeadline => {
                self.is_over || self.unread.is_none() && !self.status.is_open()
            }
            FlagKind::AuthorizationContested => !self.is_contested,
            FlagKind::OrderUnreadable => self.order.is_some(),
            FlagKind::SettledWithoutTransfer => {
                let says_it_moved =
                    self.status == PaymentStatus::Settled || self.order.is_some_and(pays);
                self.finality.is_some() || !says_it_moved
            }
            FlagKind::SettledOrderOver => self.refund.is_some() || self.order.is_some_and(pays),
            FlagKind::PaidByUnknown => self
                .order
                .is_some_and(|(status, paid_by)| status != OrderStatus::Paid || paid_by.is_some()),
            FlagKind::RefundContradicted => {
                let called_off = matches!(self.refund, None | Some(RefundStatus::Void));
                self.order.is_some_and(|order| called_off || !pays(order))
            }
            FlagKind::ReorgedAfterDelivery => {
                let is_paid = self.order.is_some_and(|(status, _)| status == OrderStatus::Paid);
                is_paid && self.finality == Some(Finality::Final)
            }
            // One that is owed again by now may have been called off by a person before.
            FlagKind::ReorgedAfterRefund => {
                let in_other_hands = self.refund.is_some_and(RefundStatus::is_in_other_hands);
                // Permit2's `upto` can land again for another value than the one that goes back.
                let is_same_money = self.payment.method != Method::Permit2;
                in_other_hands && is_same_money && self.finality == Some(Finality::Final)
            }
            // Who claims a transfer, the accounting finds; what becomes of a refund, the search for it.
            FlagKind::UnmatchedTransfer | FlagKind::RefundedAgain | FlagKind::MalformedRefund => {
                false
            }
            FlagKind::NonceUsedElsewhere
            | FlagKind::AuthorizationReused
            | FlagKind::StockMissing
            | FlagKind::RefundMismatch
            | FlagKind::FinalizedReorg => false,
        }
    }
}

/// A page of open flags, and what the rows say of the payments they are about.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct FlaggedPage {
    /// The flags, oldest row first.
    pub flags: Vec<StoredFlag>,
    /// Those payments, their orders, refund records and watches, as far as they can be read.
    pub rows: LedgerPage,
    /// Of the transfers recorded as theirs.
    pub finality: BTreeMap<PaymentId, Finality>,
}

impl FlaggedPage {
    /// Flags about payments that nobody follows, whose cause is gone. `configured` are the chains that are
    /// read.
    pub fn gone(&self, configured: &BTreeSet<ChainId>) -> Vec<GoneFlag> {
        self.flags.iter().filter_map(|flag| self.gone_one(flag, configured)).collect()
    }

    fn gone_one(&self, flag: &StoredFlag, configured: &BTreeSet<ChainId>) -> Option<GoneFlag> {
        let payment = self.rows.payments.get(flag.payment_id.as_ref()?)?;
        // Its next resolution says so.
        if self.rows.watched.contains(&payment.id) {
            return None;
        }
        let unread = match payment.method {
            Method::Tempo => Some(Inconclusive::UnsupportedMethod),
            _ if configured.contains(&payment.chain_id) => None,
            _ => Some(Inconclusive::ChainNotConfigured),
        };
        let order = self.rows.orders.get(&payment.order_id);
        let standing = Standing {
            payment,
            status: payment.status,
            unread,
            is_over: !payment.status.is_open(),
            // Who else may have its authorization is not read here: that flag waits for a person, or a recheck.
            is_contested: true,
            order: order.map(|order| (order.status, order.paid_by.as_ref())),
            refund: self.rows.refunds.get(&payment.id).map(|(status, _)| *status),
            finality: self.finality.get(&payment.id).copied(),
        };
        standing.is_gone(flag.kind).then(|| GoneFlag {
            kind: flag.kind,
            payment_id: Some(payment.id.clone()),
            subject: Some(flag.subject.clone()),
            note: flag.kind.cause_gone().unwrap_or_default().to_owned(),
        })
    }

    /// The logs, by their subjects, of money that was nobody's when it was flagged.
    pub fn unmatched(&self) -> Vec<String> {
        let unmatched = self.flags.iter().filter(|flag| flag.kind == FlagKind::UnmatchedTransfer);
        unmatched.map(|flag| flag.subject.clone()).collect()
    }
}
