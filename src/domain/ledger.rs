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
    BlockRef, Claim, IdentifierStatus, Judged, Order, OrderId, OrderStatus, Payment, PaymentId,
    PaymentStatus, Policy, RawPayment, RefundChange, RefundStatus, Reservation, ReservationStatus,
    Resolution, Settlement, Sibling, Situation, Sku, StockChange, Timestamp, Transfer,
    TransferChange, Verdict, resolve,
};

/// A transfer that was recorded as a payment's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RecordedTransfer {
    /// Whose it is.
    pub payment_id: PaymentId,
    /// What it is.
    pub settlement: Settlement,
    /// When this log was first recorded.
    pub seen_at: Timestamp,
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
    /// Rows that make no sense: of those being resolved, and of those that show one of their nonces.
    pub malformed: BTreeMap<PaymentId, RawPayment>,
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
    /// Canonical transfers recorded for those payments and their orders' other payments, or with the logs
    /// the verdicts speak of.
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
    ) -> Vec<Decided> {
        // Of two that claim one transfer, the one that has it goes first.
        batch.sort_by_cached_key(|judged| {
            let created_at = self.payments.get(&judged.payment_id).map(|p| p.created_at);
            (judged.chain_order(), created_at, judged.payment_id.clone())
        });
        batch
            .into_iter()
            .map(|judged| {
                let resolution = match self.situation(&judged) {
                    Some(situation) => resolve(&judged, &situation, policy, now),
                    None => unreadable(&judged),
                };
                let decided = self.decided(judged, resolution);
                self.commit(&decided.judged.payment_id, &decided.resolution, now);
                decided
            })
            .collect()
    }

    /// The resolution beside what the rows held before it: what a store needs to write it.
    fn decided(&self, judged: Judged, resolution: Resolution) -> Decided {
        let payment = self.payments.get(&judged.payment_id);
        let order_id = payment.map(|p| p.order_id.clone());
        Decided {
            payment_was: payment.map(|p| p.status),
            order_was: order_id.as_ref().and_then(|id| self.orders.get(id)).map(|o| o.status),
            reservations: order_id
                .as_ref()
                .map(|id| self.reservation_changes(id, resolution.stock))
                .unwrap_or_default(),
            identifiers: self.identifier_changes(&judged.payment_id, &resolution),
            settlement: match resolution.transfer {
                TransferChange::Record(settlement) => Some(settlement),
                TransferChange::Keep => self.recorded(&judged.payment_id).map(|r| r.settlement),
                TransferChange::Orphan => None,
            },
            order_id,
            judged,
            resolution,
        }
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
        let owed_back =
            siblings.iter().map(|s| &s.id).filter(|id| self.refund_stands(id)).collect();
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
            recorded: self.recorded(&payment.id),
            transfer_owner: match &judged.verdict {
                Verdict::Settled(settlement) => self.transfer_owner(payment, &settlement.transfer),
                _ => None,
            },
            unreadable_claimant: self
                .malformed
                .values()
                .find(|row| row.may_have_settled_by(payment)),
            refund: self.refunds.get(&payment.id).copied(),
            refund_stands: self.refund_stands(&payment.id),
            owed_back,
        })
    }

    fn recorded(&self, payment_id: &PaymentId) -> Option<&RecordedTransfer> {
        self.transfers.iter().find(|t| t.payment_id == *payment_id)
    }

    /// Whether a payment's money was owed back, and so never pays an order (I4). One that is void was
    /// called off by a person, who decided about the money; unless a reorg took the transfer, which takes
    /// the record of it along.
    fn refund_stands(&self, payment_id: &PaymentId) -> bool {
        match self.refunds.get(payment_id) {
            None => false,
            Some(RefundStatus::Void) => self.recorded(payment_id).is_some(),
            Some(_) => true,
        }
    }

    /// Who else has this transfer, or comes before `payment`: whoever it is recorded for; else, of the
    /// payments it fits, one that had it before a reorg moved it, else one the gateway settled, else the one
    /// created first of those that have not failed. One that failed comes before nobody: it may never be
    /// read again.
    ///
    /// A log is known by its block too: in another block the same transaction has other log indices. Who
    /// asked for another amount than `payment` asked for something else than was signed, even where less
    /// may move.
    fn transfer_owner<'a>(&'a self, payment: &Payment, transfer: &Transfer) -> Option<Claim<'a>> {
        if let Some(recorded) =
            self.transfers.iter().find(|t| t.settlement.transfer.is_same_log(transfer))
        {
            let payment_id = &recorded.payment_id;
            return (*payment_id != payment.id).then_some(Claim { payment_id, has_it: true });
        }
        let has_it =
            |p: &Payment| (self.recorded(&p.id).is_some(), p.status == PaymentStatus::Settled);
        let failed = |p: &Payment| p.status == PaymentStatus::Failed;
        self.payments
            .values()
            .filter(|p| p.same_authorization(payment) && p.amount == payment.amount)
            .filter(|p| transfer.pays(p))
            .filter(|p| p.id == payment.id || !failed(p) || has_it(p).0)
            .min_by_key(|p| (Reverse(has_it(p)), failed(p), p.created_at, &p.id))
            .filter(|owner| owner.id != payment.id)
            .map(|owner| Claim { payment_id: &owner.id, has_it: has_it(owner) != (false, false) })
    }

    /// Stands as the database will once `resolution` is written at `now`.
    pub fn commit(&mut self, payment_id: &PaymentId, resolution: &Resolution, now: Timestamp) {
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
        for change in self.reservation_changes(&order_id, resolution.stock) {
            if let Some(quantity) = self.stock.get_mut(&change.sku) {
                *quantity = quantity.saturating_add(change.shelf);
            }
            if let Some(reservation) = self.reservations.get_mut(&change.id) {
                reservation.status = change.status;
            }
        }
        for change in self.identifier_changes(payment_id, resolution) {
            if let Some(identifier) = self.identifiers.get_mut(&change.id) {
                identifier.status = change.status;
            }
        }
        match resolution.transfer {
            TransferChange::Keep => {}
            TransferChange::Record(settlement) => {
                // The same log may be recorded again, as final now: it was seen when it was.
                let is_known = |t: &&RecordedTransfer| {
                    t.payment_id == *payment_id
                        && t.settlement.transfer.is_same_log(&settlement.transfer)
                };
                let seen_at = self.transfers.iter().find(is_known).map_or(now, |t| t.seen_at);
                let payment_id = payment_id.clone();
                self.transfers.retain(|t| t.payment_id != payment_id);
                self.transfers.push(RecordedTransfer { payment_id, settlement, seen_at });
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

    /// What `change` does to each of the order's reservations, as they stand now.
    fn reservation_changes(
        &self,
        order_id: &OrderId,
        change: StockChange,
    ) -> Vec<ReservationChange> {
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
                // What is released of a sku that is on no shelf goes nowhere, and is flagged.
                let lost = change == StockChange::Release && !self.stock.contains_key(&r.sku);
                let shelf = match r.status {
                    status if status == from && lost => 0,
                    status if status == from => r.quantity.saturating_mul(direction),
                    ReservationStatus::Held if also_held => 0,
                    _ => return None,
                };
                Some(ReservationChange {
                    id: r.id.clone(),
                    was: r.status,
                    status,
                    sku: r.sku.clone(),
                    shelf,
                })
            })
            .collect()
    }

    /// What `resolution` does to the payment's identifiers, as they stand now: to those in flight; those
    /// settled, when a reorg puts them back in flight; those failed, when the payment settled after all.
    fn identifier_changes(
        &self,
        payment_id: &PaymentId,
        resolution: &Resolution,
    ) -> Vec<IdentifierChange> {
        let Some(status) = resolution.identifiers else { return Vec::new() };
        let from: &[IdentifierStatus] = match status {
            IdentifierStatus::InFlight => &[IdentifierStatus::Settled],
            IdentifierStatus::Settled => &[IdentifierStatus::InFlight, IdentifierStatus::Failed],
            IdentifierStatus::Failed | IdentifierStatus::Completed => &[IdentifierStatus::InFlight],
        };
        self.identifiers
            .values()
            .filter(|i| i.payment_id == *payment_id && from.contains(&i.status))
            .map(|i| IdentifierChange { id: i.id.clone(), was: i.status, status })
            .collect()
    }
}

/// One payment's resolution, and all that a store needs to write it: which rows it changes and what they
/// must still hold.
#[derive(Debug, Clone, PartialEq)]
pub struct Decided {
    /// What it was decided on.
    pub judged: Judged,
    /// What changes.
    pub resolution: Resolution,
    /// The transfer that is the payment's once this is written.
    pub settlement: Option<Settlement>,
    /// The payment's order; `None` when the payment's row makes no sense.
    pub order_id: Option<OrderId>,
    /// The payment's status before.
    pub payment_was: Option<PaymentStatus>,
    /// The order's status before; `None` when its row is missing or makes no sense.
    pub order_was: Option<OrderStatus>,
    /// The order's reservations that change.
    pub reservations: Vec<ReservationChange>,
    /// The payment's identifiers that change.
    pub identifiers: Vec<IdentifierChange>,
}

impl Decided {
    /// The transfer that the resolution speaks of: the payment's, else the one that the verdict is about,
    /// which may be another payment's.
    pub fn transfer(&self) -> Option<Transfer> {
        let judged = match &self.judged.verdict {
            Verdict::Settled(settlement) => Some(settlement.transfer),
            _ => None,
        };
        self.settlement.map(|settlement| settlement.transfer).or(judged)
    }

    /// The block that it speaks of: that transfer's, else the one that the verdict was read at.
    pub fn block(&self) -> Option<BlockRef> {
        self.transfer().map(|t| t.block).or_else(|| self.judged.verdict.block())
    }
}

/// What becomes of one identifier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdentifierChange {
    /// The key.
    pub id: String,
    /// Its status before.
    pub was: IdentifierStatus,
    /// Its new status.
    pub status: IdentifierStatus,
}

/// What becomes of one reservation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReservationChange {
    /// The gateway's id of the reservation.
    pub id: String,
    /// Its status before.
    pub was: ReservationStatus,
    /// Its new status.
    pub status: ReservationStatus,
    /// What it sets aside.
    pub sku: Sku,
    /// What goes back on the shelf (positive) or is taken from it (negative).
    pub shelf: i64,
}
