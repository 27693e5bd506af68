//! From verdict to resolution (DESIGN section 7): what changes in the database because of a verdict.
//!
//! [`resolve`] only says what changes; the store writes all of it in the transaction in which the
//! [`Situation`] was read and locked (I7). It never looks at a clock for a deadline where a block is at
//! hand, and never fails a payment on an inconclusive verdict (I2).

use alloy_primitives::B256;
use serde_json::json;

use super::{
    BlockRef, DueTimes, Event, EventKind, Finality, FlagKind, IdentifierStatus, Inconclusive,
    Judged, LatePolicy, NextCheck, Order, OrderChange, OrderStatus, Outcome, PaymentId,
    PaymentStatus, Phase, Policy, RefundChange, RefundOwed, RefundReason, RefundStatus,
    ReservationStatus, Resolution, Settlement, Situation, StockChange, Timestamp, TransferChange,
    Unsettleable, Verdict, WatchChange, refund_nonce,
};

/// Flags that say "this could not be read": gone as soon as it could.
const UNREADABLE: [FlagKind; 5] = [
    FlagKind::MalformedPayment,
    FlagKind::ChainNotConfigured,
    FlagKind::UnsupportedMethod,
    FlagKind::InconclusiveAtDeadline,
    FlagKind::OrderUnreadable,
];

/// The same without [`FlagKind::InconclusiveAtDeadline`], which only a conclusion closes.
const UNPARSED: [FlagKind; 4] = [
    FlagKind::MalformedPayment,
    FlagKind::ChainNotConfigured,
    FlagKind::UnsupportedMethod,
    FlagKind::OrderUnreadable,
];

/// What changes because of `judged`, given freshly locked rows. The table of DESIGN section 7.
///
/// A row that cannot be parsed has no [`Situation`]; see [`unreadable`].
pub fn resolve(
    judged: &Judged,
    situation: &Situation<'_>,
    policy: &Policy,
    now: Timestamp,
) -> Resolution {
    let decision = Decision { situation, policy, due: &judged.due, now };
    let resolution = match &judged.verdict {
        Verdict::Settled(settlement) => decision.settled(settlement),
        Verdict::Pending { as_of, agreeing } => decision.pending(*as_of, *agreeing),
        Verdict::Unsettleable { reason, as_of, consumption } => {
            let resolution = decision.unsettleable(*as_of);
            match reason {
                // Flagged at once, though the payment may wait for its deadline.
                Unsettleable::UsedElsewhere => resolution
                    .flagged(FlagKind::NonceUsedElsewhere, json!({ "consumption": consumption })),
                _ => resolution,
            }
        }
        Verdict::Inconclusive(reason) => decision.inconclusive(*reason, judged),
    };
    if resolution.is_recorded() || resolution.outcome == Outcome::Flagged {
        return resolution;
    }
    Resolution { outcome: Outcome::Waiting, ..resolution }
}

/// What changes when the payment's own row makes no sense: a person is told, the watch goes on (I11).
pub(super) fn unreadable(judged: &Judged) -> Resolution {
    let resolution = Resolution::only_watch(NextCheck { phase: Phase::Reconcile, at: None });
    let detail = json!({ "problem": judged.problem });
    Resolution { outcome: Outcome::Flagged, ..resolution }
        .flagged(FlagKind::MalformedPayment, detail)
}

struct Decision<'a> {
    situation: &'a Situation<'a>,
    policy: &'a Policy,
    due: &'a DueTimes,
    now: Timestamp,
}

impl Decision<'_> {
    fn wait(&self) -> Resolution {
        Resolution::only_watch(self.due.open)
    }

    /// Waits, in the phase the watch has earned: a recorded transfer stays watched for finality.
    fn wait_as_recorded(&self) -> Resolution {
        match self.situation.recorded {
            Some(_) => Resolution::only_watch(NextCheck {
                phase: Phase::Finality,
                at: Some(self.due.finality),
            }),
            None if self.situation.payment.status == PaymentStatus::Failed => {
                Resolution::only_watch(NextCheck { phase: Phase::Late, at: self.due.late })
            }
            None => self.wait(),
        }
    }

    fn event(&self, kind: EventKind, detail: &str) -> Event {
        let payment = self.situation.payment;
        Event {
            kind,
            order_id: payment.order_id.clone(),
            payment_id: payment.id.clone(),
            dedupe_key: format!("{kind}:{}:{}:{detail}", payment.order_id, payment.id),
        }
    }

    fn after_settled(&self, settlement: &Settlement) -> WatchChange {
        let next = match settlement.finality {
            Finality::Final => NextCheck { phase: Phase::Closed, at: None },
            Finality::Tentative => {
                NextCheck { phase: Phase::Finality, at: Some(self.due.finality) }
            }
        };
        WatchChange { next, restart: false }
    }

    // ---- Settled

    fn settled(&self, settlement: &Settlement) -> Resolution {
        let Situation { payment, order, .. } = *self.situation;
        if let Some(owner) = self.situation.transfer_owner {
            return self.authorization_reused(settlement, owner);
        }
        let mut resolution = Resolution {
            payment: (payment.status != PaymentStatus::Settled).then_some(PaymentStatus::Settled),
            transfer: match self.situation.recorded {
                Some(recorded) if recorded.settlement == *settlement => TransferChange::Keep,
                _ => TransferChange::Record(*settlement),
            },
            close_flags: UNREADABLE.to_vec(),
            watch: self.after_settled(settlement),
            ..self.wait()
        };
        let Some(order) = order else {
            return Resolution { outcome: Outcome::Flagged, ..resolution }.flagged(
                FlagKind::OrderUnreadable,
                json!({ "order": payment.order_id, "settlement": settlement }),
            );
        };
        let paid_by_this = order.paid_by.as_ref() == Some(&payment.id);
        if self.situation.refund.is_some_and(|status| status != RefundStatus::Void) {
            // Owed back once already: it stands (I6), and never pays an order as well (I4).
            resolution.outcome = Outcome::Confirmed;
            let moved = self
                .situation
                .recorded
                .is_none_or(|r| !r.settlement.transfer.is_same_log(&settlement.transfer));
            if moved {
                resolution.refund = RefundChange::Follow(*settlement);
            }
            return resolution;
        }
        match order.status {
            status if status.is_open() => {
                self.pay(order, settlement, StockChange::Commit, resolution)
            }
            OrderStatus::Paid if paid_by_this => {
                // The gateway may have paid the order and died before it saw to the rest.
                Resolution {
                    outcome: Outcome::Confirmed,
                    stock: StockChange::Commit,
                    identifiers: Some(IdentifierStatus::Settled),
                    ..resolution
                }
            }
            OrderStatus::Paid if order.paid_by.is_none() => {
                Resolution { outcome: Outcome::Flagged, ..resolution }.flagged(
                    FlagKind::PaidByUnknown,
                    json!({ "order": order.id, "settlement": settlement }),
                )
            }
            OrderStatus::Paid => self.owe(RefundReason::Duplicate, settlement, resolution),
            OrderStatus::Undelivered if order.paid_by.is_some() && !paid_by_this => {
                self.owe(RefundReason::Duplicate, settlement, resolution)
            }
            OrderStatus::Undelivered => self.owe(RefundReason::Undelivered, settlement, resolution),
            _ if self.policy.late == LatePolicy::Reinstate && self.stock_is_back() => {
                self.pay(order, settlement, StockChange::Retake, resolution)
            }
            _ => self.owe(RefundReason::Late, settlement, resolution),
        }
    }

    fn pay(
        &self,
        order: &Order,
        settlement: &Settlement,
        stock: StockChange,
        resolution: Resolution,
    ) -> Resolution {
        let outcome = match stock {
            StockChange::Retake => Outcome::Reinstated,
            _ => Outcome::Paid,
        };
        let payment = &self.situation.payment.id;
        debug_assert!(order.status != OrderStatus::Paid, "I3: an order is paid once");
        Resolution {
            outcome,
            order: Some(OrderChange { status: OrderStatus::Paid, paid_by: Some(payment.clone()) }),
            stock,
            identifiers: Some(IdentifierStatus::Settled),
            events: vec![self.event(EventKind::OrderPaid, &block_key(settlement))],
            ..resolution
        }
    }

    fn owe(
        &self,
        reason: RefundReason,
        settlement: &Settlement,
        resolution: Resolution,
    ) -> Resolution {
        let payment = self.situation.payment;
        // The buyer who retries learns what the order is, not what became of the money.
        let identifiers = match reason {
            RefundReason::Duplicate => IdentifierStatus::Settled,
            RefundReason::Late | RefundReason::Undelivered => IdentifierStatus::Failed,
        };
        Resolution {
            outcome: Outcome::RefundOwed,
            refund: RefundChange::Owe(RefundOwed {
                payment_id: payment.id.clone(),
                order_id: payment.order_id.clone(),
                rail: payment.rail,
                transfer: settlement.transfer,
                reason,
                refund_nonce: refund_nonce(payment),
                detected_at: self.now,
            }),
            identifiers: Some(identifiers),
            events: vec![self.event(EventKind::RefundOwed, &block_key(settlement))],
            ..resolution
        }
    }

    /// Whether everything that was released can be taken from the shelf again. Stock still held counts
    /// as taken.
    fn stock_is_back(&self) -> bool {
        self.situation.available.iter().all(|(sku, available)| {
            let wanted: i64 = self
                .situation
                .reservations
                .iter()
                .filter(|r| r.status == ReservationStatus::Released && r.sku == **sku)
                .map(|r| r.quantity)
                .fold(0, i64::saturating_add);
            wanted <= *available
        }) && self
            .situation
            .reservations
            .iter()
            .filter(|r| r.status == ReservationStatus::Released)
            .all(|r| self.situation.available.iter().any(|(sku, _)| **sku == r.sku))
    }

    fn authorization_reused(&self, settlement: &Settlement, owner: &PaymentId) -> Resolution {
        let detail = json!({ "pays": owner, "settlement": settlement });
        let next = NextCheck { phase: Phase::Closed, at: None };
        let resolution = if self.order_depends_on_this() {
            Resolution { watch: WatchChange { next, restart: false }, ..self.wait() }
                .flagged(FlagKind::SettledWithoutTransfer, detail.clone())
        } else {
            self.fail(next)
        };
        Resolution { outcome: Outcome::AuthorizationReused, ..resolution }
            .flagged(FlagKind::AuthorizationReused, detail)
    }

    // ---- Pending, Unsettleable

    fn pending(&self, as_of: BlockRef, agreeing: usize) -> Resolution {
        if let Some(resolution) = self.not_on_chain(as_of) {
            return resolution;
        }
        if !as_of.time.reached(self.policy.deadline(self.situation.payment)) {
            return Resolution { close_flags: UNPARSED.to_vec(), ..self.wait_as_recorded() };
        }
        if agreeing < self.policy.quorum {
            // Silence of the other endpoints is not their agreement (I2).
            return self.wait_as_recorded().flagged(
                FlagKind::InconclusiveAtDeadline,
                json!({ "reason": Inconclusive::QuorumNotMet.code() }),
            );
        }
        self.fail(NextCheck { phase: Phase::Late, at: self.due.late })
    }

    fn unsettleable(&self, as_of: BlockRef) -> Resolution {
        if let Some(resolution) = self.not_on_chain(as_of) {
            return resolution;
        }
        let at_deadline = as_of.time.reached(self.policy.deadline(self.situation.payment));
        if !at_deadline && !self.policy.early_failure && self.situation.payment.status.is_open() {
            return Resolution { close_flags: UNPARSED.to_vec(), ..self.wait() };
        }
        self.fail(NextCheck { phase: Phase::Closed, at: None })
    }

    /// The verdict says that the money did not move. What if we, or the gateway, say that it did?
    fn not_on_chain(&self, as_of: BlockRef) -> Option<Resolution> {
        let Situation { payment, recorded, .. } = *self.situation;
        match recorded {
            // Final is final; and a head older than the transfer's block cannot know of it.
            Some(r) if r.settlement.finality == Finality::Final => {
                Some(Resolution::only_watch(NextCheck { phase: Phase::Closed, at: None }))
            }
            Some(r) if as_of.number < r.settlement.transfer.block.number => {
                Some(self.wait_as_recorded())
            }
            Some(r) => Some(self.reopen(&r.settlement)),
            None if payment.status == PaymentStatus::Settled || self.order_depends_on_this() => {
                let at_deadline = as_of.time.reached(self.policy.deadline(payment));
                let next = NextCheck { phase: Phase::Reconcile, at: None };
                Some(if at_deadline {
                    let detail = json!({ "as_of": as_of });
                    Resolution { outcome: Outcome::Flagged, ..Resolution::only_watch(next) }
                        .flagged(FlagKind::SettledWithoutTransfer, detail)
                } else {
                    self.wait()
                })
            }
            None => None,
        }
    }

    fn order_depends_on_this(&self) -> bool {
        self.situation.order.is_some_and(|order| {
            matches!(order.status, OrderStatus::Paid | OrderStatus::Undelivered)
                && order.paid_by.as_ref() == Some(&self.situation.payment.id)
        })
    }

    fn fail(&self, next: NextCheck) -> Resolution {
        let Situation { payment, order, ref siblings, .. } = *self.situation;
        let mut resolution = Resolution {
            outcome: Outcome::Failed,
            payment: (payment.status != PaymentStatus::Failed).then_some(PaymentStatus::Failed),
            close_flags: UNREADABLE.to_vec(),
            watch: WatchChange { next, restart: false },
            ..self.wait()
        };
        resolution.identifiers = Some(IdentifierStatus::Failed);
        let Some(order) = order else { return resolution };
        if order.status.is_open() && !siblings.iter().any(|s| s.keeps_order_alive()) {
            resolution.order = Some(OrderChange { status: OrderStatus::Failed, paid_by: None });
            resolution.stock = StockChange::Release;
            resolution.events.push(self.event(EventKind::OrderFailed, ""));
        }
        resolution
    }

    /// A reorg took the recorded transfer away: back to unknown, and everything that hung on it.
    fn reopen(&self, lost: &Settlement) -> Resolution {
        let Situation { payment, order, refund, .. } = *self.situation;
        let detail = json!({ "lost": lost });
        let mut resolution = Resolution {
            outcome: Outcome::Reopened,
            payment: (payment.status != PaymentStatus::Unknown).then_some(PaymentStatus::Unknown),
            transfer: TransferChange::Orphan,
            watch: WatchChange {
                next: NextCheck { phase: Phase::Targeted, at: Some(self.due.reopened) },
                restart: true,
            },
            ..self.wait()
        };
        match refund {
            Some(RefundStatus::Owed | RefundStatus::Blocked) => {
                resolution.refund = RefundChange::Void;
            }
            Some(RefundStatus::Claimed | RefundStatus::Sent | RefundStatus::Paid) => {
                resolution = resolution.flagged(FlagKind::ReorgedAfterRefund, detail.clone());
            }
            Some(RefundStatus::Void) | None => {}
        }
        let Some(order) = order else { return resolution };
        if !self.order_depends_on_this() {
            return resolution;
        }
        resolution.identifiers = Some(IdentifierStatus::InFlight);
        resolution.events.push(self.event(EventKind::OrderReopened, &block_key(lost)));
        if order.status == OrderStatus::Paid {
            resolution.order = Some(OrderChange { status: OrderStatus::Paying, paid_by: None });
            resolution.stock = StockChange::Hold;
        }
        if order.delivered_at.is_some() {
            resolution = resolution.flagged(FlagKind::ReorgedAfterDelivery, detail);
        }
        resolution
    }

    // ---- Inconclusive

    fn inconclusive(&self, reason: Inconclusive, judged: &Judged) -> Resolution {
        let unreadable = match reason {
            Inconclusive::ChainNotConfigured => Some(FlagKind::ChainNotConfigured),
            Inconclusive::UnsupportedMethod => Some(FlagKind::UnsupportedMethod),
            _ => None,
        };
        if let Some(kind) = unreadable {
            let next = NextCheck { phase: Phase::Reconcile, at: None };
            return Resolution { outcome: Outcome::Flagged, ..Resolution::only_watch(next) }
                .flagged(kind, json!({ "problem": judged.problem }));
        }
        let payment = self.situation.payment;
        let resolution = self.wait_as_recorded();
        if payment.status.is_open() && self.now >= self.policy.deadline(payment) {
            let detail = json!({ "reason": reason.code(), "evidence": judged.evidence });
            return resolution.flagged(FlagKind::InconclusiveAtDeadline, detail);
        }
        resolution
    }
}

fn block_key(settlement: &Settlement) -> String {
    let hash: B256 = settlement.transfer.block.hash;
    format!("{hash}:{}", settlement.transfer.log_index)
}
