//! Goal: the invariants hold over arbitrary histories of chain, gateway and daemon (I2 to I6).
//!
//! Method: random acts on [`Shop`], with random policies. After every transaction of the daemon each of
//! its resolutions is replayed on its own and checked against what the chain was when it was read.
//! With a careful gateway everything is settled in the end, and every transfer is accounted for once.

use std::collections::BTreeMap;
use std::time::Duration;

use proptest::prelude::*;

use super::model::*;
use crate::domain::*;

fn is_live(refund: Option<RefundStatus>) -> bool {
    refund.is_some_and(|status| status != RefundStatus::Void)
}

fn pays(db: &Ledger, payment: &Payment) -> bool {
    db.orders.get(&payment.order_id).is_some_and(|order| {
        order.status == OrderStatus::Paid && order.paid_by.as_ref() == Some(&payment.id)
    })
}

/// Shelf + held + committed, by sku.
fn totals(db: &Ledger) -> BTreeMap<Sku, i64> {
    let mut totals = db.stock.clone();
    for r in db.reservations.values().filter(|r| r.status != ReservationStatus::Released) {
        *totals.entry(r.sku.clone()).or_default() += r.quantity;
    }
    totals
}

/// I2: a payment fails only on what the chain proved when it was read.
fn assert_failure_is_proven(
    shop: &Shop,
    before: &Ledger,
    row: &Payment,
    read: &Read,
    outcome: Outcome,
) {
    let Read { judged, chain } = read;
    let paying = |c: &Consumption| c.pays(row);
    let consumed = |number| chain.consumed_at(row.nonce, number);
    let deadline = shop.policy.deadline(row);
    if outcome == Outcome::AuthorizationReused {
        let claims = before.payments.values().any(|p| p.id != row.id && p.same_authorization(row));
        // A careless gateway may have written another nonce over the owner's row.
        let consumption = consumed(chain.head().number).filter(paying);
        let transfer = consumption.and_then(|c| Transfer::consumed(row, &c));
        let is_others = |t: &RecordedTransfer, seen: &Transfer| {
            t.payment_id != row.id && t.settlement.transfer.is_same_log(seen)
        };
        let has_it =
            transfer.is_some_and(|seen| before.transfers.iter().any(|t| is_others(t, &seen)));
        assert!(consumption.is_some() && (claims || has_it), "nobody else has the authorization");
        return;
    }
    match &judged.verdict {
        Verdict::Pending { as_of, .. } => {
            assert!(as_of.time.reached(deadline), "I2: before the deadline");
            assert_eq!(consumed(as_of.number), None, "I2: it was used");
        }
        Verdict::Unsettleable { reason, as_of, .. } => {
            assert!(as_of.time.reached(deadline) || shop.policy.early_failure);
            let finalized = consumed(chain.finalized);
            match reason {
                Unsettleable::Expired => {
                    // A cancellation may come after the window, and changes nothing.
                    let used = consumed(chain.head().number)
                        .is_some_and(|c| c.kind != ConsumptionKind::Canceled);
                    assert!(!used, "I2: it was used");
                    assert!(chain.head().time >= row.over_from(), "I2: it can still land");
                }
                _ => assert!(finalized.is_some_and(|c| !paying(&c)), "I2: not finalized"),
            }
        }
        other => panic!("I2: failed on {other:?}"),
    }
}

/// Replays one resolution on the rows as they were, and checks what it did.
fn assert_resolution_is_right(shop: &Shop, db: &mut Ledger, read: &Read, resolution: &Resolution) {
    let id = &read.judged.payment_id;
    let before = db.clone();
    db.commit(id, resolution, read.judged.checked_at);
    let row = &before.payments[id];
    let refund = before.refunds.get(id).copied();
    let order = before.orders.get(&row.order_id);

    if resolution.payment == Some(PaymentStatus::Failed) {
        assert_failure_is_proven(shop, &before, row, read, resolution.outcome);
    }
    if let (Some(order), Some(change)) = (order, &resolution.order) {
        let paid_by_other = order.paid_by.as_ref().is_some_and(|by| by != id);
        assert!(!(order.status == OrderStatus::Paid && paid_by_other), "I3: paid by another");
        // One that is owed back never pays, though a reorg has it open again (I4).
        let may_pay = |s: &Sibling| {
            let is_open = s.status.is_none_or(PaymentStatus::is_open);
            is_open && !is_live(before.refunds.get(&s.id).copied())
        };
        let mut others = before.siblings.values().filter(|s| s.order_id == order.id && s.id != *id);
        let is_left = change.status != OrderStatus::Failed || !others.any(may_pay);
        assert!(is_left, "a sibling may pay it");
        if change.status == OrderStatus::Paid {
            assert_eq!(change.paid_by.as_ref(), Some(id));
            assert!(!is_live(refund), "I4: owed back, and now it pays");
        }
    }
    let record = before.transfers.iter().find(|t| t.payment_id == *id);
    match &resolution.refund {
        RefundChange::Owe(owed) => {
            assert!(!is_live(refund), "I6: owed twice");
            assert!(refund.is_none() || record.is_none(), "I6: called off, and owed again");
            let moved = read.chain.consumed_at(row.nonce, read.chain.head().number);
            let moved = moved.and_then(|c| Transfer::consumed(row, &c));
            // The gateway may have written another nonce over a row whose transfer is final.
            let recorded = record.map(|known| known.settlement.transfer);
            let is_moved = moved == Some(owed.transfer) || recorded == Some(owed.transfer);
            assert!(is_moved, "I6: what moved, and nothing else");
            assert!(!pays(db, row), "I4: it pays, and is owed back");
        }
        RefundChange::Void => {
            assert!(matches!(refund, Some(RefundStatus::Owed | RefundStatus::Blocked)));
            assert_eq!(resolution.transfer, TransferChange::Orphan);
        }
        RefundChange::Follow(_) => assert!(refund.is_some()),
        RefundChange::Keep => {}
    }
    if let TransferChange::Record(settlement) = resolution.transfer {
        let shown = read.chain.consumed_at(row.nonce, read.chain.head().number);
        let shown = shown.and_then(|c| Transfer::consumed(row, &c));
        let same_log = shown.is_some_and(|t| t.is_same_log(&settlement.transfer));
        assert!(same_log, "no such transfer when it was read");
        let is_final = settlement.transfer.block.number <= read.chain.finalized;
        assert!(settlement.finality == Finality::Tentative || is_final);
    }
    for (key, now) in &db.reservations {
        let was = &before.reservations[key];
        let order = db.orders.get(&now.order_id).map(|o| o.status);
        match (was.status, now.status) {
            (was, now) if was == now => {}
            (_, ReservationStatus::Released) => {
                assert_eq!(was.status, ReservationStatus::Held, "I5: only what is held");
                assert_eq!(order, Some(OrderStatus::Failed), "I5: released, and not failed");
            }
            (_, ReservationStatus::Committed) => assert_eq!(order, Some(OrderStatus::Paid)),
            (_, ReservationStatus::Held) => assert_eq!(order, Some(OrderStatus::Paying)),
        }
    }
    if matches!(resolution.outcome, Outcome::Paid | Outcome::Reinstated) {
        let mine = || db.reservations.values().filter(|r| r.order_id == row.order_id);
        assert!(mine().all(|r| r.status != ReservationStatus::Held), "paid, and still held");
        assert!(
            mine().next().is_none() || mine().any(|r| r.status == ReservationStatus::Committed),
            "I5: paid, and its stock is on the shelf"
        );
    }
    assert!(db.stock.values().all(|n| *n >= 0), "stock below zero");
    assert_eq!(totals(db), totals(&before), "I5: stock is conserved");
}

fn assert_step(shop: &Shop, applied: &Applied) {
    let mut db = applied.before.clone();
    for (id, resolution) in &applied.resolved {
        let read = applied.reads.iter().find(|r| r.judged.payment_id == *id).unwrap();
        assert_resolution_is_right(shop, &mut db, read, resolution);
    }
    // The rows a store locks are enough: the whole database would have come to the same.
    for (id, payment) in &shop.db.payments {
        assert_eq!(db.payments[id].status, payment.status);
    }
    assert_eq!(db.orders, shop.db.orders);
    assert_eq!(db.reservations, shop.db.reservations);
    assert_eq!(db.stock, shop.db.stock);
    assert_eq!(db.identifiers, shop.db.identifiers);
    assert_eq!(db.refunds, shop.db.refunds);
    let records = |db: &Ledger| -> BTreeMap<PaymentId, Settlement> {
        db.transfers.iter().map(|t| (t.payment_id.clone(), t.settlement)).collect()
    };
    assert_eq!(records(&db), records(&shop.db));
    assert_eq!(records(&db).len(), db.transfers.len(), "one record per payment");
    for (i, one) in db.transfers.iter().enumerate() {
        let twice = db.transfers[..i]
            .iter()
            .any(|other| other.settlement.transfer.is_same_log(&one.settlement.transfer));
        assert!(!twice, "I4: one log, two payments");
    }
}

/// I4, and that nothing is left hanging: after a careful gateway, when all is final and checked.
fn assert_accounted(shop: &Shop) {
    let db = &shop.db;
    for authorization in shop.authorizations.values() {
        let rows = || db.payments.values().filter(|p| p.nonce == authorization.nonce);
        let refund = |p: &Payment| db.refunds.get(&p.id).copied();
        let consumption = shop.chain.consumed.get(&authorization.nonce);
        let has_moved =
            consumption.is_some_and(|c| matches!(c.kind, ConsumptionKind::Transferred(_)));
        let paying = rows().filter(|p| pays(db, p)).count();
        let owed = rows().filter(|p| is_live(refund(p))).count();
        let is_flagged = |kind| rows().any(|p| shop.flags.contains(&(p.id.clone(), kind)));
        let called_off = rows().any(|p| {
            refund(p) == Some(RefundStatus::Void)
                && db.transfers.iter().any(|t| t.payment_id == p.id)
        });
        if has_moved {
            assert!(paying + owed <= 1, "I4: {paying} orders paid, {owed} owed");
            if paying + owed == 0 && !called_off {
                assert!(is_flagged(FlagKind::NonceUsedElsewhere), "I4: money nobody accounts for");
                assert!(
                    rows().all(|p| p.amount != authorization.value),
                    "I4: flagged, though a payment asked for exactly this"
                );
            }
        } else {
            assert_eq!(paying, 0, "I4: paid for nothing");
            // A refund that was already in other hands when a reorg took the money.
            assert!(owed == 0 || is_flagged(FlagKind::ReorgedAfterRefund), "I4: owed for nothing");
        }
    }
    for payment in db.payments.values() {
        assert!(!payment.status.is_open(), "{payment} is left open");
        assert!(!shop.watches.contains(&payment.id), "{payment} is watched for ever");
        let order = &db.orders[&payment.order_id];
        assert!(!order.status.is_open(), "{payment} ended, and its order is {}", order.status);
        let settled = payment.status == PaymentStatus::Settled;
        let accounted = pays(db, payment) || db.refunds.contains_key(&payment.id);
        assert_eq!(settled, accounted && settled, "{payment} settled without effect");
    }
    for order in db.orders.values().filter(|o| o.status == OrderStatus::Paid) {
        let by = order.paid_by.as_ref().unwrap();
        assert_eq!(db.payments[by].status, PaymentStatus::Settled);
        assert_eq!(db.payments[by].order_id, order.id);
    }
    for reservation in db.reservations.values() {
        let order = &db.orders[&reservation.order_id];
        let expected = match order.status {
            OrderStatus::Paid | OrderStatus::Undelivered => ReservationStatus::Committed,
            // What was handed over before a reorg is on no shelf again.
            _ if order.delivered_at.is_some() => ReservationStatus::Committed,
            status if status.is_open() => ReservationStatus::Held,
            _ => ReservationStatus::Released,
        };
        assert_eq!(reservation.status, expected, "of order {}", order.status);
    }
}

// ---- Arbitrary histories

fn any_endpoint() -> impl Strategy<Value = Endpoint> {
    prop_oneof![
        10 => Just(Endpoint::Honest { lag: 0 }),
        4 => (0..10u64).prop_map(|lag| Endpoint::Honest { lag }),
        2 => Just(Endpoint::Failing),
        1 => Just(Endpoint::WithoutLogs),
        1 => Just(Endpoint::RefusesLogs),
        2 => Just(Endpoint::SaysUnused),
    ]
}

fn some_payments() -> impl Strategy<Value = Vec<usize>> {
    proptest::collection::vec(0..8usize, 1..4)
}

fn any_gateway_act() -> impl Strategy<Value = Act> {
    let new_payment = (
        0..3usize,
        proptest::option::weighted(0.25, 0..8usize),
        proptest::bool::weighted(0.1),
        prop_oneof![
            2 => Just(Signed::ForToken),
            1 => Just(Signed::Permit),
            1 => (1..=1_000_000u64).prop_map(Signed::PermitUpto),
        ],
        proptest::sample::select(vec![8u64, 40, 200]),
        proptest::bool::weighted(0.05),
    );
    prop_oneof![
        6 => new_payment.prop_map(|(order, reuse, asks_more, signed, valid_secs, malformed)| {
            Act::NewPayment { order, reuse, asks_more, signed, valid_secs, malformed }
        }),
        4 => (0..8usize, any::<bool>())
            .prop_map(|(payment, failed)| Act::Answer { payment, failed }),
        1 => (0..8usize).prop_map(Act::Mend),
        2 => (0..8usize).prop_map(Act::Settle),
        1 => (0..3usize).prop_map(Act::Expire),
        1 => (0..3usize).prop_map(Act::CancelOrder),
        1 => (0..3usize).prop_map(Act::Undelivered),
        1 => (0..3usize).prop_map(Act::Deliver),
    ]
}

fn any_chain_act() -> impl Strategy<Value = Act> {
    prop_oneof![
        2 => (1..4u64).prop_map(Act::Mine),
        1 => (4..40u64).prop_map(Act::Mine),
        6 => (some_payments(), 0..3u64)
            .prop_map(|(payments, first_log_index)| Act::Land { payments, first_log_index }),
        1 => (0..8usize).prop_map(Act::CancelAuthorization),
        3 => (1..8u64, 0..9u64).prop_map(|(depth, regrow)| Act::Reorg { depth, regrow }),
    ]
}

fn any_daemon_act() -> impl Strategy<Value = Act> {
    use RefundAct::*;
    let refund_acts = vec![Claim, Claim, Release, Send, Send, Pay, Block, CallOff];
    prop_oneof![
        8 => (1..4usize).prop_map(|batch| Act::Check { batch }),
        1 => Just(Act::Discover),
        6 => (proptest::collection::vec(0..8usize, 1..5), proptest::collection::vec(any_endpoint(), 1..4))
            .prop_map(|(payments, endpoints)| Act::Read { payments, endpoints }),
        6 => (1..5usize, any::<i64>()).prop_map(|(count, now)| Act::Apply { count, now }),
        1 => Just(Act::Kill),
        2 => (0..8usize, proptest::sample::select(refund_acts))
            .prop_map(|(payment, act)| Act::Refund { payment, act }),
    ]
}

fn any_careless_act() -> impl Strategy<Value = Act> {
    let paid_by = prop_oneof![
        2 => Just(PaidBy::Kept),
        1 => Just(PaidBy::Nobody),
        1 => (0..8usize).prop_map(PaidBy::Payment),
    ];
    prop_oneof![
        4 => (0..8usize, proptest::sample::select(PaymentStatus::ALL))
            .prop_map(|(payment, status)| Act::OverwritePayment { payment, status }),
        4 => (0..3usize, proptest::sample::select(OrderStatus::ALL), paid_by)
            .prop_map(|(order, status, paid_by)| Act::OverwriteOrder { order, status, paid_by }),
        1 => (0..8usize, proptest::sample::select(vec![Term::Amount, Term::Nonce, Term::ValidBefore]))
            .prop_map(|(payment, term)| Act::ChangeTerms { payment, term }),
        1 => (0..3usize).prop_map(Act::DeleteOrder),
        1 => (0..3usize).prop_map(|order| Act::Reserve { order }),
    ]
}

fn any_act(careful: bool) -> impl Strategy<Value = Act> {
    prop_oneof![
        3 => any_gateway_act(),
        3 => any_chain_act(),
        4 => any_daemon_act(),
        (if careful { 0 } else { 2 }) => any_careless_act(),
    ]
}

fn any_policy() -> impl Strategy<Value = Policy> {
    let paid_after = prop_oneof![
        3 => Just(PaidAfter::Confirmations(1)),
        1 => Just(PaidAfter::Confirmations(3)),
        1 => Just(PaidAfter::Safe),
        1 => Just(PaidAfter::Finalized),
    ];
    let late = proptest::sample::select(LatePolicy::ALL);
    let deadline_secs = proptest::sample::select(vec![20u64, 60, 120]);
    (deadline_secs, any::<bool>(), late, paid_after, 1..4usize, 1..3usize).prop_map(
        |(deadline_secs, early_failure, late, paid_after, quorum, positive_quorum)| Policy {
            deadline_after: Duration::from_secs(deadline_secs),
            early_failure,
            late,
            paid_after,
            quorum,
            positive_quorum,
        },
    )
}

/// Long enough for a payment to be reorged, failed, found late and owed back.
const ACTS_MAX: usize = 70;

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 20_000, ..ProptestConfig::default() })]

    #[test]
    fn with_a_careful_gateway_every_transfer_is_accounted_for_once(
        policy in any_policy(),
        acts in proptest::collection::vec(any_act(true), 1..ACTS_MAX),
    ) {
        let mut shop = Shop::new(true, policy);
        for act in &acts {
            shop.act(act, assert_step);
        }
        shop.calm_down(assert_step);
        assert_accounted(&shop);
    }

    #[test]
    fn no_careless_gateway_makes_the_daemon_break_an_invariant(
        policy in any_policy(),
        acts in proptest::collection::vec(any_act(false), 1..ACTS_MAX),
    ) {
        let mut shop = Shop::new(false, policy);
        for act in &acts {
            shop.act(act, assert_step);
        }
        shop.calm_down(assert_step);
    }
}

fn words(resolution: &Resolution) -> Vec<&'static str> {
    let mut words = vec![resolution.outcome.code()];
    words.extend(resolution.flags.iter().map(|f| f.kind.code()));
    words.push(match &resolution.refund {
        RefundChange::Owe(owed) => owed.reason.code(),
        RefundChange::Void => "refund voided",
        RefundChange::Follow(_) => "refund moved",
        RefundChange::Keep => "refund kept",
    });
    words
}

/// The histories are no proof of what they never reach.
#[test]
fn the_histories_reach_every_outcome() {
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;

    const HISTORIES: usize = 500;
    let mut runner = TestRunner::deterministic();
    let histories =
        (any_policy(), any::<bool>(), proptest::collection::vec(any_act(false), ACTS_MAX));
    let mut reached: BTreeMap<&'static str, usize> = BTreeMap::new();
    for _ in 0..HISTORIES {
        let (policy, careful, acts) = histories.new_tree(&mut runner).unwrap().current();
        let mut shop = Shop::new(careful, policy);
        for act in &acts {
            shop.act(act, |_, applied| {
                for (_, resolution) in &applied.resolved {
                    for word in words(resolution) {
                        *reached.entry(word).or_default() += 1;
                    }
                }
            });
        }
    }
    // No resolution of a payment: the search for refunds writes it.
    let elsewhere = [Outcome::RefundPaid];
    let outcomes = Outcome::ALL.iter().filter(|o| !elsewhere.contains(o)).map(|o| o.code());
    let reasons = RefundReason::ALL.iter().map(|r| r.code());
    let refunds = ["refund voided", "refund moved"];
    for word in outcomes.chain(reasons).chain(refunds) {
        assert!(reached.contains_key(word), "never {word}: {reached:#?}");
    }
}
