//! From verdict to resolution (DESIGN section 7): what changes in the database because of a verdict.
//!
//! [`resolve`] only says what changes; the store writes all of it in the transaction in which the
//! [`Situation`] was read and locked (I7). It never looks at a clock for a deadline where a block is at
//! hand, and never fails a payment on an inconclusive verdict (I2).

use alloy_primitives::B256;
use serde_json::json;

use super::{
    BlockRef, Consumption, DueTimes, Event, EventKind, Finality, FlagKind, IdentifierStatus,
    Inconclusive, Judged, LatePolicy, NextCheck, Order, OrderChange, OrderStatus, Outcome,
    PaymentId, PaymentStatus, Phase, Policy, RawPayment, RefundChange, RefundOwed, RefundReason,
    RefundStatus, Reservation, ReservationStatus, Resolution, Settlement, Situation, StockChange,
    Timestamp, Transfer, TransferChange, Unsettleable, Verdict, WatchChange, flag::causes_gone,
    refund_nonce,
};

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
    let is_stale = judged.terms.is_some_and(|terms| terms != situation.payment.terms());
    let resolution = match &judged.verdict {
        _ if is_stale => decision.look_again(),
        Verdict::Settled(settlement) => decision.settled(settlement),
        Verdict::Pending { as_of, agreeing } => decision.pending(*as_of, *agreeing),
        Verdict::Unsettleable { reason, as_of, consumption } => {
            decision.unsettleable(*reason, *as_of, consumption.as_ref())
        }
        Verdict::Inconclusive(reason) => decision.inconclusive(*reason, judged),
    };
    let mut resolution = never_closed_too_early(resolution, situation);
    resolution.close_flags = causes_gone(&judged.verdict, situation, &resolution);
    if resolution.is_recorded() || resolution.outcome == Outcome::Flagged {
        return resolution;
    }
    Resolution { outcome: Outcome::Waiting, ..resolution }
}

/// A watch never closes over what discovery would open it for again at the next poll: a payment left
/// open, or a settled one of an order that owes its money back without a record of that. It is left to
/// the full reconcile.
fn never_closed_too_early(mut resolution: Resolution, situation: &Situation<'_>) -> Resolution {
    let Situation { payment, order, refund, .. } = *situation;
    let status = resolution.payment.unwrap_or(payment.status);
    let owes = order.is_some_and(|order| match order.status {
        OrderStatus::Undelivered => true,
        OrderStatus::Paid => order.paid_by.as_ref().is_some_and(|by| *by != payment.id),
        _ => false,
    });
    let has_record = refund.is_some() || resolution.refund != RefundChange::Keep;
    let would_reopen = status.is_open() || status == PaymentStatus::Settled && owes && !has_record;
    if resolution.watch.next.phase == Phase::Closed && would_reopen {
        resolution.watch.next.phase = Phase::Reconcile;
    }
    resolution
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

    /// The verdict speaks of a row that changed since it was read: only a new check can say.
    fn look_again(&self) -> Resolution {
        let mut resolution = self.wait_as_recorded();
        resolution.watch.next.at = Some(self.due.reopened);
        resolution
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

    /// An event each time a transfer comes or goes. A reorg can take a block away and bring the same one
    /// back, so the block alone does not tell one time from another: when it was recorded does. Writing
    /// an ending again over a careless gateway is no news, and has the same key.
    fn transfer_event(&self, kind: EventKind, settlement: &Settlement) -> Event {
        self.event(kind, &self.time_of(settlement))
    }

    /// One time of a transfer on the chain, told from others of the same log.
    fn time_of(&self, settlement: &Settlement) -> String {
        let known = self.situation.recorded;
        let known = known.filter(|r| r.settlement.transfer.is_same_log(&settlement.transfer));
        let since = known.map_or(self.now, |recorded| recorded.seen_at);
        format!("{}:{}", block_key(settlement), since.as_millis())
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
        let Situation { payment, order, recorded, .. } = *self.situation;
        match self.situation.transfer_owner {
            Some(owner) if owner.has_it => {
                return self.authorization_reused(settlement, owner.payment_id);
            }
            // It may fail before it sees the transfer, and then nobody would have it (I4).
            Some(_) => return self.wait_as_recorded(),
            None => {}
        }
        if recorded.is_none()
            && let Some(other) = self.situation.unreadable_claimant
        {
            return self.contested(settlement, other);
        }
        // Final is final: a reader that lags behind takes nothing of it back.
        let recorded = recorded.map(|r| &r.settlement);
        let settlement = recorded.filter(|r| r.finality == Finality::Final).unwrap_or(settlement);
        let mut resolution = Resolution {
            payment: (payment.status != PaymentStatus::Settled).then_some(PaymentStatus::Settled),
            transfer: match recorded {
                Some(recorded) if recorded == settlement => TransferChange::Keep,
                _ => TransferChange::Record(*settlement),
            },
            watch: self.after_settled(settlement),
            ..self.wait()
        };
        let Some(order) = order else {
            // Read on, though the money is final: the order may be mended.
            if resolution.watch.next.phase == Phase::Closed {
                resolution.watch.next.phase = Phase::Reconcile;
            }
            return Resolution { outcome: Outcome::Flagged, ..resolution }.flagged(
                FlagKind::OrderUnreadable,
                json!({ "order": payment.order_id, "settlement": settlement }),
            );
        };
        let refund_stands = self.situation.refund_stands;
        if refund_stands || self.order_is_paid_by_this() {
            resolution.outcome = Outcome::Confirmed;
        }
        if refund_stands {
            // Owed back once already: it stands (I6), and never pays an order as well (I4).
            if recorded.is_none_or(|r| !r.transfer.is_same_log(&settlement.transfer)) {
                resolution.refund = RefundChange::Follow(*settlement);
                // What is in other hands goes out as it was when they took it.
                let before = recorded.map(|known| known.transfer.value);
                let is_other = before.is_some_and(|value| value != settlement.transfer.value);
                if is_other && self.situation.refund.is_some_and(RefundStatus::is_in_other_hands) {
                    let detail = json!({ "before": recorded, "settlement": settlement });
                    let occasion = self.time_of(settlement);
                    let kind = FlagKind::ReorgedAfterRefund;
                    resolution = resolution.flagged_once(kind, &occasion, detail);
                }
            }
            resolution.identifiers = Some(match order.status {
                OrderStatus::Paid => IdentifierStatus::Settled,
                _ => IdentifierStatus::Failed,
            });
        }
        if self.order_is_paid_by_this() {
            // The gateway may have paid the order and died before it saw to the rest.
            resolution.stock = StockChange::Commit;
            resolution.identifiers = Some(IdentifierStatus::Settled);
            if refund_stands && self.situation.refund != Some(RefundStatus::Void) {
                let detail = json!({ "order": order.id, "settlement": settlement });
                resolution = resolution.flagged(FlagKind::RefundContradicted, detail);
            }
            return resolution;
        }
        if refund_stands {
            return resolution;
        }
        match order.status {
            status if status.is_open() => self.settle_open(order, settlement, resolution),
            OrderStatus::Paid if order.paid_by.is_none() => Resolution {
                outcome: Outcome::Flagged,
                identifiers: Some(IdentifierStatus::Settled),
                ..resolution
            }
            .flagged(
                FlagKind::PaidByUnknown,
                json!({ "order": order.id, "settlement": settlement }),
            ),
            OrderStatus::Paid => self.owe(RefundReason::Duplicate, settlement, resolution),
            OrderStatus::Undelivered
                if order.paid_by.as_ref().is_some_and(|by| *by != payment.id) =>
            {
                self.owe(RefundReason::Duplicate, settlement, resolution)
            }
            OrderStatus::Undelivered => self.owe(RefundReason::Undelivered, settlement, resolution),
            _ if self.policy.late == LatePolicy::Reinstate && self.stock_is_back() => {
                self.pay(order, settlement, StockChange::Retake, resolution)
            }
            _ => self.owe(RefundReason::Late, settlement, resolution),
        }
    }

    /// Pays an open order. One that was over and that the gateway opened again may hold nothing any
    /// more: then it is paid only if its stock is still there (I5).
    fn settle_open(
        &self,
        order: &Order,
        settlement: &Settlement,
        resolution: Resolution,
    ) -> Resolution {
        let all = &self.situation.reservations;
        let is_released = |r: &&Reservation| r.status == ReservationStatus::Released;
        if all.is_empty() || !all.iter().all(is_released) {
            self.pay(order, settlement, StockChange::Commit, resolution)
        } else if self.stock_is_back() {
            self.pay(order, settlement, StockChange::Retake, resolution)
        } else {
            self.owe(RefundReason::Late, settlement, resolution)
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
            events: vec![self.transfer_event(EventKind::OrderPaid, settlement)],
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
            events: vec![self.transfer_event(EventKind::RefundOwed, settlement)],
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

    /// Held reservations whose sku is on no shelf: there is nowhere to put them back.
    fn held_without_shelf(&self) -> Vec<&Reservation> {
        let on_shelf = |r: &Reservation| self.situation.available.iter().any(|(s, _)| **s == r.sku);
        let held = |r: &Reservation| r.status == ReservationStatus::Held;
        self.situation.reservations.iter().filter(|r| held(r) && !on_shelf(r)).copied().collect()
    }

    fn authorization_reused(&self, settlement: &Settlement, owner: &PaymentId) -> Resolution {
        let detail = json!({ "pays": owner, "settlement": settlement });
        let next = NextCheck { phase: Phase::Closed, at: None };
        let resolution = if self.order_is_paid_by_this() {
            Resolution { watch: WatchChange { next, restart: false }, ..self.wait() }
                .flagged(FlagKind::SettledWithoutTransfer, detail.clone())
        } else {
            self.fail(next)
        };
        Resolution { outcome: Outcome::AuthorizationReused, ..resolution }.flagged_once(
            FlagKind::AuthorizationReused,
            settlement.transfer.tx_hash,
            detail,
        )
    }

    /// The money may have paid another order already: until that payment can be read it pays none, and is
    /// owed to nobody (I4).
    fn contested(&self, settlement: &Settlement, other: &RawPayment) -> Resolution {
        let problem = other.parse().err().map(|malformed| malformed.to_string());
        let detail = json!({ "other": other.id, "problem": problem, "settlement": settlement });
        Resolution { outcome: Outcome::Flagged, ..self.wait_as_recorded() }
            .flagged(FlagKind::AuthorizationContested, detail)
    }

    // ---- Pending, Unsettleable

    fn pending(&self, as_of: BlockRef, agreeing: usize) -> Resolution {
        let Situation { payment, recorded, .. } = *self.situation;
        // Silence of the other endpoints is not their agreement (I2).
        let has_quorum = agreeing >= self.policy.quorum;
        let says_it_moved = match recorded {
            Some(known) => known.settlement.finality == Finality::Tentative,
            None => self.is_settled_without_record(),
        };
        if says_it_moved && !has_quorum {
            return self.wait_as_recorded();
        }
        if let Some(resolution) = self.not_on_chain(as_of) {
            return resolution;
        }
        let at_deadline = as_of.time.reached(self.policy.deadline(payment));
        if !at_deadline || payment.status == PaymentStatus::Failed {
            return self.wait_as_recorded();
        }
        if !has_quorum {
            return self.wait_as_recorded().flagged(
                FlagKind::InconclusiveAtDeadline,
                json!({ "reason": Inconclusive::QuorumNotMet.code() }),
            );
        }
        self.fail(NextCheck { phase: Phase::Late, at: self.due.late })
    }

    fn unsettleable(
        &self,
        reason: Unsettleable,
        as_of: BlockRef,
        consumption: Option<&Consumption>,
    ) -> Resolution {
        let payment = self.situation.payment;
        let moved = consumption.and_then(|c| Transfer::consumed(payment, c));
        let resolution = self.never_lands(as_of, moved);
        match reason {
            // Flagged at once, though the payment may wait for its deadline.
            Unsettleable::UsedElsewhere => {
                let by = consumption.map(|c| c.log.tx_hash.to_string()).unwrap_or_default();
                let detail = json!({ "consumption": consumption });
                resolution.flagged_once(FlagKind::NonceUsedElsewhere, by, detail)
            }
            _ => resolution,
        }
    }

    fn never_lands(&self, as_of: BlockRef, moved: Option<Transfer>) -> Resolution {
        let Situation { payment, recorded, .. } = *self.situation;
        let closed = NextCheck { phase: Phase::Closed, at: None };
        if let (Some(recorded), Some(moved)) = (recorded, moved)
            && recorded.settlement.transfer.is_same_log(&moved)
        {
            // The transfer recorded as this payment's is there, and final: the row has changed.
            let settlement = Settlement { finality: Finality::Final, ..recorded.settlement };
            let is_known = recorded.settlement == settlement;
            return Resolution {
                transfer: match is_known {
                    true => TransferChange::Keep,
                    false => TransferChange::Record(settlement),
                },
                outcome: Outcome::Flagged,
                ..Resolution::only_watch(closed)
            };
        }
        if let Some(resolution) = self.not_on_chain(as_of) {
            return resolution;
        }
        let at_deadline = as_of.time.reached(self.policy.deadline(payment));
        if !at_deadline && !self.policy.early_failure && payment.status.is_open() {
            return self.wait();
        }
        self.fail(closed)
    }

    /// The verdict says that the money did not move. What if we, or the gateway, say that it did?
    fn not_on_chain(&self, as_of: BlockRef) -> Option<Resolution> {
        let Situation { payment, recorded, .. } = *self.situation;
        match recorded.map(|r| &r.settlement) {
            // Final is final, and is written again over a careless gateway.
            Some(recorded) if recorded.finality == Finality::Final => {
                Some(match recorded.transfer.pays(payment) {
                    true => self.settled(recorded),
                    false => Resolution::only_watch(self.after_settled(recorded).next),
                })
            }
            // A head older than the transfer's block cannot know of it.
            Some(recorded) if as_of.number < recorded.transfer.block.number => {
                Some(self.wait_as_recorded())
            }
            Some(recorded) => Some(self.reopen(recorded)),
            None if self.is_settled_without_record() => {
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

    /// Whether the gateway says that the money moved, and nothing we saw does.
    fn is_settled_without_record(&self) -> bool {
        let Situation { payment, recorded, .. } = *self.situation;
        let says_so = payment.status == PaymentStatus::Settled || self.order_is_paid_by_this();
        recorded.is_none() && says_so
    }

    /// The transfer recorded as this payment's, once nothing can take it away.
    fn known_final(&self) -> Option<&Settlement> {
        let known = self.situation.recorded.map(|r| &r.settlement)?;
        let is_final = known.finality == Finality::Final;
        (is_final && known.transfer.pays(self.situation.payment)).then_some(known)
    }

    fn order_is_paid_by_this(&self) -> bool {
        self.situation.order.is_some_and(|order| {
            order.status == OrderStatus::Paid
                && order.paid_by.as_ref() == Some(&self.situation.payment.id)
        })
    }

    fn fail(&self, next: NextCheck) -> Resolution {
        let Situation { payment, order, .. } = *self.situation;
        let Some(order) = order else {
            // Failed now, it would leave its order and stock as they are for good, once mended.
            let next = NextCheck { phase: Phase::Reconcile, at: None };
            return Resolution { outcome: Outcome::Flagged, ..Resolution::only_watch(next) }
                .flagged(FlagKind::OrderUnreadable, json!({ "order": payment.order_id }));
        };
        let was_failed = payment.status == PaymentStatus::Failed;
        let mut resolution = Resolution {
            outcome: Outcome::Failed,
            payment: (!was_failed).then_some(PaymentStatus::Failed),
            identifiers: Some(IdentifierStatus::Failed),
            watch: WatchChange { next, restart: false },
            ..self.wait()
        };
        // A payment that failed before has had its effect: an order that is open now was opened again.
        if !was_failed && order.status.is_open() && !self.may_be_paid_otherwise(order) {
            resolution.order = Some(OrderChange { status: OrderStatus::Failed, paid_by: None });
            resolution.stock = StockChange::Release;
            resolution.events.push(self.event(EventKind::OrderFailed, ""));
            let lost = self.held_without_shelf();
            if !lost.is_empty() {
                resolution =
                    resolution.flagged(FlagKind::StockMissing, json!({ "reservations": lost }));
            }
        }
        resolution
    }

    /// Whether another payment may still pay the order, or already does. One whose money was owed back
    /// does not; nor does one that failed, whatever `paid_by` says of it.
    fn may_be_paid_otherwise(&self, order: &Order) -> bool {
        let Situation { payment, ref siblings, ref owed_back, .. } = *self.situation;
        let is_named = order.paid_by.as_ref().is_some_and(|by| {
            *by != payment.id && !siblings.iter().any(|sibling| sibling.id == *by)
        });
        is_named || siblings.iter().any(|s| s.keeps_order_alive() && !owed_back.contains(&&s.id))
    }

    /// A reorg took the recorded transfer away: back to unknown, and everything that hung on it.
    fn reopen(&self, lost: &Settlement) -> Resolution {
        let Situation { payment, order, refund, .. } = *self.situation;
        let detail = json!({ "lost": lost });
        let occasion = self.time_of(lost);
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
            // In other hands by now, or called off by a person.
            Some(
                RefundStatus::Claimed
                | RefundStatus::Sent
                | RefundStatus::Paid
                | RefundStatus::Void,
            ) => {
                let kind = FlagKind::ReorgedAfterRefund;
                resolution = resolution.flagged_once(kind, &occasion, detail.clone());
            }
            None => {}
        }
        let Some(order) = order else { return resolution };
        if !self.order_is_paid_by_this() {
            return resolution;
        }
        resolution.identifiers = Some(IdentifierStatus::InFlight);
        resolution.events.push(self.transfer_event(EventKind::OrderReopened, lost));
        resolution.order = Some(OrderChange { status: OrderStatus::Paying, paid_by: None });
        if order.delivered_at.is_none() {
            resolution.stock = StockChange::Hold;
        } else {
            // What was handed over is on no shelf again, whatever becomes of the order.
            resolution = resolution.flagged_once(FlagKind::ReorgedAfterDelivery, &occasion, detail);
        }
        resolution
    }

    // ---- Inconclusive

    fn inconclusive(&self, reason: Inconclusive, judged: &Judged) -> Resolution {
        if let Some(known) = self.known_final() {
            // No reader is needed for what is final: its order may owe the money back since.
            return self.settled(known);
        }
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
        let Situation { payment, recorded, .. } = *self.situation;
        let resolution = self.wait_as_recorded();
        let nobody_knows = match payment.status {
            PaymentStatus::Settled => recorded.is_none(),
            status => status.is_open(),
        };
        if nobody_knows && self.now >= self.policy.deadline(payment) {
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
