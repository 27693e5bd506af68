//! The rows one transaction has locked, held in memory: where a batch of verdicts is resolved one after
//! another, each seeing what the ones before it changed.
//!
//! Both stores fill a [`Ledger`], let it resolve, and write down the resolutions; so the rules live here
//! once, and can be tested over arbitrary histories without a database. It performs no I/O.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::decision::unreadable;
use super::{
    IdentifierStatus, Judged, MalformedPayment, Order, OrderId, Payment, PaymentId, PaymentStatus,
    Policy, RefundChange, RefundStatus, Reservation, ReservationStatus, Resolution, Settlement,
    Sibling, Situation, Sku, StockChange, Timestamp, Transfer, TransferChange, Verdict, resolve,
};

/// A transfer that was recorded as a payment's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RecordedTransfer {
    /// Whose it is.
    pub payment_id: PaymentId,
    /// What it is.
    pub settlement: Settlement,
}

/// A client's idempotency key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Identifier {
    /// The key itself.
    pub id: String,
    /// The payment it stands for.
    pub payment_id: PaymentId,
    /// Where it stands.
    pub status: IdentifierStatus,
}

/// The rows one transaction has locked.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Ledger {
    /// Every payment being resolved, and every other payment with one of their authorizations.
    pub payments: BTreeMap<PaymentId, Payment>,
    /// Payments being resolved whose row makes no sense.
    pub malformed: BTreeMap<PaymentId, MalformedPayment>,
    /// Their orders, those that can be read.
    pub orders: BTreeMap<OrderId, Order>,
    /// Every payment of those orders.
    pub siblings: BTreeMap<PaymentId, Sibling>,
    /// Those orders' reservations, by the reservation's id.
    pub reservations: BTreeMap<String, Reservation>,
    /// Stock on the shelf, for the skus of those reservations.
    pub stock: BTreeMap<Sku, i64>,
    /// The payments' identifiers.
    pub identifiers: BTreeMap<String, Identifier>,
    /// Canonical transfers recorded for those payments, or with the logs the verdicts speak of.
    pub transfers: Vec<RecordedTransfer>,
    /// The refund records of those payments, and of their orders' other payments.
    pub refunds: BTreeMap<PaymentId, RefundStatus>,
}

impl Ledger {
    /// Resolves a batch in chain order (block, log index), so that of two payments of one order that
    /// settled the first on chain pays it. Returns what to write, in the order resolved; the ledger then
    /// stands as the database will.
    pub fn resolve_all(
        &mut self,
        mut batch: Vec<Judged>,
        policy: &Policy,
        now: Timestamp,
    ) -> Vec<(Judged, Resolution)> {
        batch.sort_by_key(|judged| match &judged.verdict {
            Verdict::Settled(s) => (0, s.transfer.block.number, s.transfer.log_index),
            _ => (1, 0, 0),
        });
        batch
            .into_iter()
            .map(|judged| {
                let resolution = match self.situation(&judged) {
                    Some(situation) => resolve(&judged, &situation, policy, now),
                    None => unreadable(&judged),
                };
                self.commit(&judged.payment_id, &resolution);
                (judged, resolution)
            })
            .collect()
    }

    /// The rows around one payment; `None` when its own row makes no sense.
    fn situation<'a>(&'a self, judged: &'a Judged) -> Option<Situation<'a>> {
        let payment = self.payments.get(&judged.payment_id)?;
        let reservations: Vec<&Reservation> =
            self.reservations.values().filter(|r| r.order_id == payment.order_id).collect();
        let skus: BTreeSet<&Sku> = reservations.iter().map(|r| &r.sku).collect();
        let siblings: Vec<&Sibling> = self
            .siblings
            .values()
            .filter(|s| s.order_id == payment.order_id && s.id != payment.id)
            .collect();
        let sibling_refunds =
            siblings.iter().filter_map(|s| Some((&s.id, *self.refunds.get(&s.id)?))).collect();
        Some(Situation {
            payment,
            order: self.orders.get(&payment.order_id),
            siblings,
            reservations,
            available: self
                .stock
                .iter()
                .filter(|(sku, _)| skus.contains(sku))
                .map(|(s, n)| (s, *n))
                .collect(),
            recorded: self.transfers.iter().find(|t| t.payment_id == payment.id),
            transfer_owner: match &judged.verdict {
                Verdict::Settled(settlement) => self.transfer_owner(payment, &settlement.transfer),
                _ => None,
            },
            refund: self.refunds.get(&payment.id).copied(),
            sibling_refunds,
        })
    }

    /// Who else has this transfer: whoever it is recorded for; else, of the payments it fits, one that
    /// had it before a reorg moved it, else one the gateway settled, else the one created first of those
    /// that have not failed.
    ///
    /// A log is known by its block too: in another block the same transaction has other log indices.
    fn transfer_owner<'a>(
        &'a self,
        payment: &Payment,
        transfer: &Transfer,
    ) -> Option<&'a PaymentId> {
        if let Some(recorded) =
            self.transfers.iter().find(|t| t.settlement.transfer.is_same_log(transfer))
        {
            return (recorded.payment_id != payment.id).then_some(&recorded.payment_id);
        }
        let has_record = |p: &Payment| self.transfers.iter().any(|t| t.payment_id == p.id);
        self.payments
            .values()
            .filter(|p| p.same_authorization(payment) && transfer.pays(p))
            .min_by_key(|p| {
                let preferred = (has_record(p), p.status == PaymentStatus::Settled);
                let failed = p.status == PaymentStatus::Failed;
                (Reverse(preferred), failed, p.created_at, &p.id)
            })
            .map(|p| &p.id)
            .filter(|owner| **owner != payment.id)
    }

    /// Stands as the database will once `resolution` is written.
    pub fn commit(&mut self, payment_id: &PaymentId, resolution: &Resolution) {
        let Some(order_id) = self.payments.get(payment_id).map(|p| p.order_id.clone()) else {
            return;
        };
        if let Some(status) = resolution.payment {
            if let Some(payment) = self.payments.get_mut(payment_id) {
                payment.status = status;
            }
            if let Some(sibling) = self.siblings.get_mut(payment_id) {
                sibling.status = Some(status);
            }
        }
        if let (Some(change), Some(order)) = (&resolution.order, self.orders.get_mut(&order_id)) {
            order.status = change.status;
            order.paid_by.clone_from(&change.paid_by);
        }
        for (reservation, change) in self.reservation_changes(&order_id, resolution.stock) {
            if let Some(quantity) = self.stock.get_mut(&change.sku) {
                *quantity = quantity.saturating_add(change.shelf);
            }
            if let Some(reservation) = self.reservations.get_mut(&reservation) {
                reservation.status = change.status;
            }
        }
        for id in self.identifier_changes(payment_id, resolution) {
            if let (Some(identifier), Some(status)) =
                (self.identifiers.get_mut(&id), resolution.identifiers)
            {
                identifier.status = status;
            }
        }
        match resolution.transfer {
            TransferChange::Keep => {}
            TransferChange::Record(settlement) => {
                self.transfers.retain(|t| t.payment_id != *payment_id);
                self.transfers
                    .push(RecordedTransfer { payment_id: payment_id.clone(), settlement });
            }
            TransferChange::Orphan => self.transfers.retain(|t| t.payment_id != *payment_id),
        }
        match resolution.refund {
            RefundChange::Keep | RefundChange::Follow(_) => {}
            RefundChange::Owe(_) => {
                self.refunds.insert(payment_id.clone(), RefundStatus::Owed);
            }
            RefundChange::Void => {
                self.refunds.insert(payment_id.clone(), RefundStatus::Void);
            }
        }
    }

    /// What `change` does to each of the order's reservations, by the reservation's id.
    pub fn reservation_changes(
        &self,
        order_id: &OrderId,
        change: StockChange,
    ) -> Vec<(String, ReservationChange)> {
        let (from, status, direction) = match change {
            StockChange::Keep => return Vec::new(),
            StockChange::Commit => (ReservationStatus::Held, ReservationStatus::Committed, 0),
            StockChange::Release => (ReservationStatus::Held, ReservationStatus::Released, 1),
            StockChange::Retake => (ReservationStatus::Released, ReservationStatus::Committed, -1),
            StockChange::Hold => (ReservationStatus::Committed, ReservationStatus::Held, 0),
        };
        // A reinstated order also keeps what it still holds.
        let also_held = change == StockChange::Retake;
        self.reservations
            .values()
            .filter(|r| r.order_id == *order_id)
            .filter_map(|r| {
                let shelf = match r.status {
                    status if status == from => r.quantity.saturating_mul(direction),
                    ReservationStatus::Held if also_held => 0,
                    _ => return None,
                };
                Some((r.id.clone(), ReservationChange { status, sku: r.sku.clone(), shelf }))
            })
            .collect()
    }

    /// The ids of the payment's identifiers that `resolution` changes: those in flight; those settled,
    /// when a reorg puts them back in flight; those failed, when the payment settled after all.
    pub fn identifier_changes(
        &self,
        payment_id: &PaymentId,
        resolution: &Resolution,
    ) -> Vec<String> {
        let from: &[IdentifierStatus] = match resolution.identifiers {
            None => return Vec::new(),
            Some(IdentifierStatus::InFlight) => &[IdentifierStatus::Settled],
            Some(IdentifierStatus::Settled) => {
                &[IdentifierStatus::InFlight, IdentifierStatus::Failed]
            }
            Some(IdentifierStatus::Failed | IdentifierStatus::Completed) => {
                &[IdentifierStatus::InFlight]
            }
        };
        self.identifiers
            .values()
            .filter(|i| i.payment_id == *payment_id && from.contains(&i.status))
            .map(|i| i.id.clone())
            .collect()
    }
}

/// What becomes of one reservation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReservationChange {
    /// Its new status.
    pub status: ReservationStatus,
    /// What it sets aside.
    pub sku: Sku,
    /// What goes back on the shelf (positive) or is taken from it (negative).
    pub shelf: i64,
}
