//! Goal: every row of DESIGN section 7, and the sequences around it that could move money twice.
//!
//! Each test starts from rows, applies verdicts through the ledger as a store does, and compares every
//! status there is afterwards.

use alloy_primitives::B256;

use super::support::*;
use crate::domain::Finality::{Final, Tentative};
use crate::domain::OrderStatus as O;
use crate::domain::ReservationStatus::{Committed, Held, Released};
use crate::domain::*;

fn default() -> Policy {
    Policy::default()
}

fn reinstate() -> Policy {
    Policy { late: LatePolicy::Reinstate, ..default() }
}

fn with_status(mut payment: Payment, status: PaymentStatus) -> Payment {
    payment.status = status;
    payment
}

fn p1() -> Payment {
    payment("p1", "o")
}

fn p2() -> Payment {
    payment("p2", "o")
}

// ---- Settled

#[test]
fn settled_pays_an_open_order_with_its_stock_and_identifier() {
    for status in [O::AwaitingPayment, O::Paying, O::PaymentFailed] {
        let mut ledger = Ledger::of(&[p1()], &[order("o", status, None)])
            .with_stock("mug", Some(4))
            .with_reservation("o", "mug", 2, Held)
            .with_reservation("o", "hat", 1, Held)
            .with_identifier("p1", IdentifierStatus::InFlight);
        let resolution = ledger.apply("p1", settled(&p1(), 9, Tentative), &default());
        assert_eq!(
            ledger.told(),
            "p1=settled, o=paid by p1, r0=committed, r1=committed, mug=4, i0=settled"
        );
        assert_eq!(resolution.outcome, Outcome::Paid);
        assert_eq!(events(&resolution), ["order.paid"]);
        assert_eq!(resolution.watch.next.phase, Phase::Finality);
        assert!(flags(&resolution).is_empty());

        let again = ledger.apply("p1", settled(&p1(), 9, Tentative), &default());
        assert!(!again.is_recorded(), "the same reading again changes nothing");
        let upgrade = ledger.apply("p1", settled(&p1(), 9, Final), &default());
        assert_eq!(
            (upgrade.outcome, upgrade.watch.next.phase),
            (Outcome::Confirmed, Phase::Closed)
        );
        assert!(upgrade.events.is_empty() && upgrade.order.is_none());
    }
}

#[test]
fn settled_for_an_order_paid_by_another_is_owed_back() {
    let mut ledger = Ledger::of(
        &[with_status(p1(), PaymentStatus::Settled), p2()],
        &[order("o", O::Paid, Some("p1"))],
    )
    .with_reservation("o", "mug", 2, Committed)
    .with_identifier("p2", IdentifierStatus::InFlight);
    let resolution = ledger.apply("p2", settled(&p2(), 9, Tentative), &default());
    assert_eq!(
        ledger.told(),
        "p1=settled, p2=settled, o=paid by p1, r0=committed, i0=settled, refund p2=owed"
    );
    let RefundChange::Owe(owed) = &resolution.refund else { panic!("{resolution:?}") };
    assert_eq!((owed.reason, owed.transfer.value), (RefundReason::Duplicate, p2().amount));
    assert_eq!(events(&resolution), ["refund.owed"]);
}

#[test]
fn settled_for_an_order_that_is_over_is_owed_back_or_reinstated() {
    for status in [O::Failed, O::Expired, O::Canceled] {
        let ledger = Ledger::of(&[p1()], &[order("o", status, None)])
            .with_stock("mug", Some(2))
            .with_reservation("o", "mug", 2, Released)
            .with_identifier("p1", IdentifierStatus::InFlight);
        let mut refunded = ledger.clone();
        refunded.apply("p1", settled(&p1(), 9, Final), &default());
        assert_eq!(
            refunded.told(),
            format!("p1=settled, o={status}, r0=released, mug=2, i0=failed, refund p1=owed")
        );
        let mut reinstated = ledger.clone();
        let resolution = reinstated.apply("p1", settled(&p1(), 9, Final), &reinstate());
        assert_eq!(resolution.outcome, Outcome::Reinstated);
        assert_eq!(reinstated.told(), "p1=settled, o=paid by p1, r0=committed, mug=0, i0=settled");
    }
}

#[test]
fn reinstating_needs_all_of_the_stock_back() {
    let over = || Ledger::of(&[p1()], &[order("o", O::Expired, None)]);
    let two_rows = || {
        over().with_reservation("o", "mug", 1, Released).with_reservation("o", "mug", 1, Released)
    };
    let owed = |mut ledger: Ledger| {
        ledger.apply("p1", settled(&p1(), 9, Final), &reinstate()).outcome == Outcome::RefundOwed
    };
    assert!(owed(two_rows().with_stock("mug", Some(1))), "both rows want one each");
    assert!(!owed(two_rows().with_stock("mug", Some(2))));
    assert!(owed(two_rows()), "no stock row: nothing to take from");
    let two_skus =
        || two_rows().with_stock("mug", Some(2)).with_reservation("o", "hat", 1, Released);
    assert!(owed(two_skus()), "one of the two skus has no row");
    assert!(owed(two_skus().with_stock("hat", Some(0))), "one of the two skus is sold out");
    assert!(!owed(two_skus().with_stock("hat", Some(1))));
    let still_held = over().with_reservation("o", "mug", 5, Held);
    assert!(!owed(still_held), "what is still held need not be taken again");
    assert!(!owed(over()), "a call holds no stock");
}

#[test]
fn settled_for_an_undelivered_order_is_owed_back_once() {
    for paid_by in [Some("p1"), None] {
        let row = with_status(p1(), PaymentStatus::Settled);
        let mut ledger = Ledger::of(&[row], &[order("o", O::Undelivered, paid_by)]);
        let resolution = ledger.apply("p1", settled(&p1(), 9, Final), &default());
        let RefundChange::Owe(owed) = &resolution.refund else { panic!("{resolution:?}") };
        assert_eq!(owed.reason, RefundReason::Undelivered);
        let again = ledger.apply("p1", settled(&p1(), 9, Final), &default());
        assert_eq!(again.refund, RefundChange::Keep);
    }
    let rows = [with_status(p1(), PaymentStatus::Settled), p2()];
    let mut ledger = Ledger::of(&rows, &[order("o", O::Undelivered, Some("p1"))]);
    let resolution = ledger.apply("p2", settled(&p2(), 9, Final), &default());
    let RefundChange::Owe(owed) = &resolution.refund else { panic!("{resolution:?}") };
    assert_eq!(owed.reason, RefundReason::Duplicate);
}

#[test]
fn money_for_an_order_nobody_can_read_is_recorded_and_flagged() {
    let mut ledger = Ledger::of(&[p1()], &[]);
    let resolution = ledger.apply("p1", settled(&p1(), 9, Final), &default());
    assert_eq!(flags(&resolution), ["order_unreadable"]);
    assert!(!resolution.close_flags.contains(&FlagKind::OrderUnreadable), "raised, so not closed");
    assert_eq!(ledger.transfers.len(), 1);

    ledger.orders.insert(OrderId::from("o"), order("o", O::Paying, None));
    let resolution = ledger.apply("p1", settled(&p1(), 9, Final), &default());
    assert_eq!(ledger.told(), "p1=settled, o=paid by p1");
    assert_eq!(events(&resolution), ["order.paid"]);
    assert!(resolution.close_flags.contains(&FlagKind::OrderUnreadable));
}

#[test]
fn money_that_may_have_paid_for_a_payment_nobody_can_read_pays_and_is_owed_only_once_that_is_known()
{
    let other =
        Payment { order_id: OrderId::from("other"), ..with_status(p1(), PaymentStatus::Settled) };
    let claimant = Payment { payer: p2().payer, nonce: p2().nonce, ..other };
    for status in [O::Paying, O::Failed] {
        // I4: one transfer would pay two orders, or pay one and be owed back.
        let mut ledger = Ledger::of(&[p2()], &[order("o", status, None)]);
        ledger.malformed.insert(claimant.id.clone(), without_amount(&claimant));
        let before = ledger.told();
        let resolution = ledger.apply("p2", settled(&p2(), 9, Final), &default());
        assert_eq!(flags(&resolution), ["authorization_contested"]);
        assert_ne!(resolution.watch.next.phase, Phase::Closed);
        assert_eq!(ledger.told(), before);
        assert!(ledger.transfers.is_empty());

        // Mended, the row has it.
        ledger.malformed.clear();
        ledger.payments.insert(claimant.id.clone(), claimant.clone());
        let resolution = ledger.apply("p2", settled(&p2(), 9, Final), &default());
        assert_eq!(flags(&resolution), ["authorization_reused"]);
        assert!(resolution.close_flags.contains(&FlagKind::AuthorizationContested));
    }
}

#[test]
fn a_row_nobody_can_read_holds_up_nothing_it_cannot_have_had() {
    let p2 = p2();
    type Edit = fn(&mut RawPayment);
    let settled_row = |edit: Edit| {
        let mut row = without_amount(&Payment {
            payer: p2.payer,
            nonce: p2.nonce,
            ..with_status(p1(), PaymentStatus::Settled)
        });
        edit(&mut row);
        row
    };
    let cases: [(Edit, bool); 12] = [
        (|_| {}, false),
        (|row| row.status = None, false),
        (|row| row.status = Some("paid?".to_owned()), false),
        (|row| row.payer = None, false),
        (|row| row.token = Some("0x".to_owned()), false),
        (|row| row.chain_id = Some("-1".to_owned()), false),
        (|row| row.status = Some("unknown".to_owned()), true),
        (|row| row.status = Some("failed".to_owned()), true),
        (|row| row.payer = Some(format!("0x{}", "11".repeat(20))), true),
        (|row| row.chain_id = Some("1".to_owned()), true),
        (|row| row.method = Some("permit2".to_owned()), true),
        // Rows of one batch that show no nonce at all.
        (|row| row.nonce = None, true),
    ];
    for (edit, pays) in cases {
        let row = settled_row(edit);
        let mut ledger = Ledger::of(std::slice::from_ref(&p2), &[order("o", O::Paying, None)]);
        ledger.malformed.insert(p1().id, row.clone());
        let resolution = ledger.apply("p2", settled(&p2, 9, Final), &default());
        assert_eq!(resolution.outcome == Outcome::Paid, pays, "{row:?}");
    }
}

#[test]
fn money_for_an_order_paid_by_nobody_knows_whom_is_flagged_and_the_buyer_answered() {
    let mut ledger = Ledger::of(&[p1()], &[order("o", O::Paid, None)])
        .with_identifier("p1", IdentifierStatus::InFlight);
    let resolution = ledger.apply("p1", settled(&p1(), 9, Final), &default());
    assert_eq!(flags(&resolution), ["paid_by_unknown"]);
    assert_eq!(ledger.told(), "p1=settled, o=paid, i0=settled");
}

#[test]
fn of_two_settled_payments_the_first_on_chain_pays_whatever_the_order_of_the_batch() {
    for swapped in [false, true] {
        let mut ledger = Ledger::of(&[p1(), p2()], &[order("o", O::Paying, None)]);
        let mut batch = vec![
            judged_as("p1", settled(&p1(), 9, Tentative)),
            judged_as("p2", settled(&p2(), 8, Tentative)),
        ];
        if swapped {
            batch.reverse();
        }
        ledger.apply_all(batch, &default(), secs(100));
        assert_eq!(ledger.told(), "p1=settled, p2=settled, o=paid by p2, refund p1=owed");
    }
    let mut apart = Ledger::of(&[p1(), p2()], &[order("o", O::Paying, None)]);
    apart.apply("p1", settled(&p1(), 9, Tentative), &default());
    apart.apply("p2", settled(&p2(), 8, Tentative), &default());
    assert_eq!(apart.told(), "p1=settled, p2=settled, o=paid by p1, refund p2=owed");
}

#[test]
fn in_one_batch_a_sibling_that_settles_saves_the_order_from_one_that_fails() {
    let mut ledger = Ledger::of(&[p1(), p2()], &[order("o", O::Paying, None)])
        .with_reservation("o", "mug", 1, Held);
    let batch = vec![
        judged_as("p1", pending(DEADLINE_BLOCK)),
        judged_as("p2", settled(&p2(), 8, Tentative)),
    ];
    ledger.apply_all(batch, &default(), secs(100));
    assert_eq!(ledger.told(), "p1=failed, p2=settled, o=paid by p2, r0=committed");
}

// ---- Pending, Unsettleable, Inconclusive

#[test]
fn before_the_deadline_by_block_time_nothing_fails() {
    let before = DEADLINE_BLOCK - 1;
    for verdict in [pending(before), unsettleable(Unsettleable::Expired, before)] {
        let mut ledger = Ledger::of(&[p1()], &[order("o", O::Paying, None)]);
        let mut batch = vec![judged_as("p1", verdict)];
        batch[0].checked_at = secs(10_000_000);
        let resolved = ledger.apply_all(batch, &default(), secs(10_000_000));
        assert_eq!(ledger.told(), "p1=unknown, o=paying", "the local clock is far ahead");
        assert_eq!(resolved[0].1.watch.next, due().open);
    }
}

#[test]
fn at_the_deadline_the_payment_fails_and_its_order_and_stock_with_it() {
    for (verdict, phase) in [
        (pending(DEADLINE_BLOCK), Phase::Late),
        (unsettleable(Unsettleable::Expired, DEADLINE_BLOCK), Phase::Closed),
        (unsettleable(Unsettleable::Canceled, DEADLINE_BLOCK), Phase::Closed),
    ] {
        let mut ledger = Ledger::of(&[p1()], &[order("o", O::Paying, None)])
            .with_stock("mug", Some(0))
            .with_reservation("o", "mug", 2, Held)
            .with_reservation("o", "mug", 1, Held)
            .with_reservation("o", "mug", 7, Released)
            .with_reservation("o", "hat", 1, Held)
            .with_identifier("p1", IdentifierStatus::InFlight)
            .with_identifier("p1", IdentifierStatus::Completed);
        let resolution = ledger.apply("p1", verdict.clone(), &default());
        let ended = "p1=failed, o=failed, r0=released, r1=released, r2=released, r3=released, \
                     mug=3, i0=failed, i1=completed";
        assert_eq!(ledger.told(), ended);
        assert_eq!(events(&resolution), ["order.failed"]);
        assert_eq!(resolution.watch.next.phase, phase);
        let again = ledger.apply("p1", verdict, &default());
        assert!(!again.is_recorded());
        assert_eq!(ledger.told(), ended, "released once (I5)");
    }
}

#[test]
fn early_failure_needs_a_proof_and_no_deadline() {
    let early = Policy { early_failure: true, ..default() };
    let mut ledger = Ledger::of(&[p1()], &[order("o", O::Paying, None)]);
    ledger.apply("p1", pending(50), &early);
    assert_eq!(ledger.told(), "p1=unknown, o=paying");
    ledger.apply("p1", unsettleable(Unsettleable::Expired, 50), &early);
    assert_eq!(ledger.told(), "p1=failed, o=failed");
}

#[test]
fn used_elsewhere_is_flagged_at_once() {
    let mut ledger = Ledger::of(&[p1()], &[order("o", O::Paying, None)]);
    let verdict = Verdict::Unsettleable {
        reason: Unsettleable::UsedElsewhere,
        as_of: block(50),
        consumption: Some(paying_less(&p1(), block(9))),
    };
    let resolution = ledger.apply("p1", verdict, &default());
    assert_eq!(flags(&resolution), ["nonce_used_elsewhere"]);
    assert_eq!(ledger.told(), "p1=unknown, o=paying");
}

#[test]
fn pending_at_the_deadline_on_less_than_the_quorum_fails_nothing() {
    let quorum = Policy { quorum: 2, ..default() };
    let mut ledger = Ledger::of(&[p1()], &[order("o", O::Paying, None)]);
    let resolution = ledger.apply("p1", pending(DEADLINE_BLOCK), &quorum);
    assert_eq!(flags(&resolution), ["inconclusive_at_deadline"]);
    assert_eq!(ledger.told(), "p1=unknown, o=paying");
}

#[test]
fn inconclusive_never_fails_a_payment_and_flags_it_at_the_deadline() {
    let reasons = [
        Inconclusive::NotAsked,
        Inconclusive::ReadFailed(ReadFailureKind::Unreachable),
        Inconclusive::UsedWithoutLog,
        Inconclusive::UsedWithoutTransfer,
        Inconclusive::EndpointsDisagree,
        Inconclusive::QuorumNotMet,
        Inconclusive::TooShallow,
        Inconclusive::NotFinalized,
    ];
    for reason in reasons {
        let mut ledger = Ledger::of(&[p1()], &[order("o", O::Paying, None)]);
        let resolution = ledger.apply("p1", Verdict::Inconclusive(reason), &default());
        assert_eq!(flags(&resolution), ["inconclusive_at_deadline"]);
        assert_eq!(ledger.told(), "p1=unknown, o=paying");
    }
    for (reason, flag) in [
        (Inconclusive::ChainNotConfigured, "chain_not_configured"),
        (Inconclusive::UnsupportedMethod, "unsupported_method"),
    ] {
        let mut ledger = Ledger::of(&[p1()], &[order("o", O::Paying, None)]);
        let resolution = ledger.apply("p1", Verdict::Inconclusive(reason), &default());
        assert_eq!(flags(&resolution), [flag]);
        assert_eq!(resolution.watch.next.phase, Phase::Reconcile);
    }
    let mut ledger = Ledger::of(&[], &[order("o", O::Paying, None)]);
    let verdict = Verdict::Inconclusive(Inconclusive::MalformedPayment);
    assert_eq!(flags(&ledger.apply("p1", verdict, &default())), ["malformed_payment"]);
}

#[test]
fn a_sibling_that_may_still_pay_keeps_the_order_and_its_stock() {
    use PaymentStatus as P;
    for status in [
        Some(P::Unknown),
        Some(P::Settling),
        Some(P::SettleFailed),
        Some(PaymentStatus::Settled),
        None,
    ] {
        let mut ledger = Ledger::of(&[p1(), p2()], &[order("o", O::Paying, None)])
            .with_reservation("o", "mug", 1, Held);
        ledger.siblings.get_mut(&p2().id).unwrap().status = status;
        ledger.apply("p1", pending(DEADLINE_BLOCK), &default());
        assert_eq!(ledger.orders[&p1().order_id].status, O::Paying, "{status:?}");
        assert_eq!(ledger.reservations["r0"].status, Held);
    }
    let rows = [p1(), with_status(p2(), P::Failed)];
    let mut ledger = Ledger::of(&rows, &[order("o", O::Paying, None)]);
    ledger.apply("p1", pending(DEADLINE_BLOCK), &default());
    assert_eq!(ledger.orders[&p1().order_id].status, O::Failed);
}

#[test]
fn a_sibling_whose_money_is_owed_back_does_not_hold_the_order_for_ever() {
    use RefundStatus as R;
    for (refund, expected) in [
        (R::Owed, O::Failed),
        (R::Claimed, O::Failed),
        (R::Sent, O::Failed),
        (R::Paid, O::Failed),
        (R::Blocked, O::Failed),
        (R::Void, O::Paying),
    ] {
        let rows = [p1(), with_status(p2(), PaymentStatus::Settled)];
        let mut ledger =
            Ledger::of(&rows, &[order("o", O::Paying, None)]).with_refund("p2", refund);
        ledger.apply("p1", pending(DEADLINE_BLOCK), &default());
        assert_eq!(ledger.orders[&p1().order_id].status, expected, "{refund}");
    }
}

#[test]
fn an_order_that_somebody_else_pays_is_not_failed() {
    // The gateway wrote an open status over a paid order; the row that pays it is gone.
    let mut ledger = Ledger::of(&[p1()], &[order("o", O::Paying, Some("gone"))])
        .with_reservation("o", "mug", 1, Held);
    ledger.apply("p1", pending(DEADLINE_BLOCK), &default());
    assert_eq!(ledger.told(), "p1=failed, o=paying by gone, r0=held");
    // A gateway that notes its attempts in `paid_by`: a failed one holds nothing.
    let rows = [p1(), with_status(p2(), PaymentStatus::Failed)];
    let mut ledger = Ledger::of(&rows, &[order("o", O::Paying, Some("p2"))]);
    ledger.apply("p1", pending(DEADLINE_BLOCK), &default());
    assert_eq!(ledger.told(), "p1=failed, p2=failed, o=failed");
}

// ---- Late, and orders that the gateway opens again

#[test]
fn the_late_watch_of_a_failed_payment_leaves_a_reopened_order_alone() {
    for verdict in
        [pending(DEADLINE_BLOCK + 5), unsettleable(Unsettleable::Expired, DEADLINE_BLOCK + 5)]
    {
        let failed = with_status(p1(), PaymentStatus::Failed);
        let mut ledger = Ledger::of(&[failed], &[order("o", O::AwaitingPayment, None)])
            .with_reservation("o", "mug", 1, Held);
        let resolution = ledger.apply("p1", verdict, &default());
        assert_eq!(ledger.told(), "p1=failed, o=awaiting_payment, r0=held");
        assert!(!resolution.is_recorded());
    }
}

#[test]
fn money_for_a_reopened_order_takes_its_released_stock_again_or_is_owed_back() {
    let reopened = |available| {
        Ledger::of(
            &[with_status(p1(), PaymentStatus::Failed)],
            &[order("o", O::AwaitingPayment, None)],
        )
        .with_stock("mug", Some(available))
        .with_reservation("o", "mug", 2, Released)
    };
    let mut there = reopened(2);
    there.apply("p1", settled(&p1(), 9, Final), &default());
    assert_eq!(there.told(), "p1=settled, o=paid by p1, r0=committed, mug=0");
    let mut sold = reopened(1);
    sold.apply("p1", settled(&p1(), 9, Final), &default());
    assert_eq!(sold.told(), "p1=settled, o=awaiting_payment, r0=released, mug=1, refund p1=owed");
    // Set aside anew by the gateway: the old reservation is history.
    let mut anew = reopened(1).with_reservation("o", "mug", 2, Held);
    anew.apply("p1", settled(&p1(), 9, Final), &default());
    assert_eq!(anew.told(), "p1=settled, o=paid by p1, r0=released, r1=committed, mug=1");
}

// ---- Reorgs

#[test]
fn a_reorg_puts_everything_back() {
    let mut ledger = Ledger::of(&[p1()], &[order("o", O::Paying, None)])
        .with_stock("mug", Some(0))
        .with_reservation("o", "mug", 1, Held)
        .with_identifier("p1", IdentifierStatus::InFlight);
    ledger.apply("p1", settled(&p1(), 9, Tentative), &default());
    ledger.apply("p1", pending(8), &default());
    assert_eq!(
        ledger.told(),
        "p1=settled, o=paid by p1, r0=committed, mug=0, i0=settled",
        "an older head cannot know of the block"
    );
    let resolution = ledger.apply("p1", pending(9), &default());
    assert_eq!(ledger.told(), "p1=unknown, o=paying, r0=held, mug=0, i0=in_flight");
    assert!(flags(&resolution).is_empty());
    assert_eq!(events(&resolution), ["order.reopened"]);
    assert!(resolution.watch.restart);

    let landed_again = settled(&p1(), 11, Final);
    let resolution = ledger.apply("p1", landed_again, &default());
    assert_eq!(ledger.told(), "p1=settled, o=paid by p1, r0=committed, mug=0, i0=settled");
    assert_eq!(events(&resolution), ["order.paid"]);
}

#[test]
fn what_was_delivered_is_on_no_shelf_again_whatever_a_reorg_does() {
    let mut delivered = order("o", O::Paying, None);
    delivered.delivered_at = Some(secs(20));
    let mut ledger = Ledger::of(&[p1()], &[delivered])
        .with_stock("mug", Some(0))
        .with_reservation("o", "mug", 1, Held);
    ledger.apply("p1", settled(&p1(), 9, Tentative), &default());
    let resolution = ledger.apply("p1", pending(9), &default());
    assert_eq!(ledger.told(), "p1=unknown, o=paying, r0=committed, mug=0");
    assert_eq!(flags(&resolution), ["reorged_after_delivery"]);

    let mut lands_again = ledger.clone();
    lands_again.apply("p1", settled(&p1(), 11, Final), &default());
    assert_eq!(lands_again.told(), "p1=settled, o=paid by p1, r0=committed, mug=0");
    ledger.apply("p1", pending(DEADLINE_BLOCK), &default());
    assert_eq!(ledger.told(), "p1=failed, o=failed, r0=committed, mug=0");
}

#[test]
fn that_the_chain_has_no_such_transfer_is_said_only_on_the_word_of_the_quorum() {
    let quorum = Policy { quorum: 2, ..default() };
    for (row, order_row) in [
        (with_status(p1(), PaymentStatus::Settled), order("o", O::Paying, None)),
        (p1(), order("o", O::Paid, Some("p1"))),
    ] {
        let mut ledger = Ledger::of(&[row], &[order_row]);
        let resolution = ledger.apply("p1", pending(DEADLINE_BLOCK), &quorum);
        assert!(flags(&resolution).is_empty());
        assert_ne!(resolution.watch.next.phase, Phase::Closed);
        let agreed = Verdict::Pending { as_of: block(DEADLINE_BLOCK), agreeing: 2 };
        let resolution = ledger.apply("p1", agreed, &quorum);
        assert_eq!(flags(&resolution), ["settled_without_transfer"]);
        // Silence afterwards does not take it back.
        let silence = Verdict::Inconclusive(Inconclusive::NotAsked);
        let resolution = ledger.apply("p1", silence, &quorum);
        assert!(!resolution.close_flags.contains(&FlagKind::SettledWithoutTransfer));
    }
}

#[test]
fn a_payment_settled_again_from_its_record_keeps_the_transfer_s_data() {
    let mut ledger = Ledger::of(&[p1()], &[order("o", O::Paying, None)]);
    let ending = settled(&p1(), 9, Final);
    ledger.apply("p1", ending.clone(), &default());
    ledger.payments.get_mut(&p1().id).unwrap().status = PaymentStatus::Unknown;
    let judged = judged_as("p1", pending(DEADLINE_BLOCK));
    let decided = ledger.resolve_all(vec![judged], &default(), secs(90)).remove(0);
    assert_eq!(decided.resolution.payment, Some(PaymentStatus::Settled));
    let Verdict::Settled(settlement) = ending else { unreachable!() };
    assert_eq!(decided.settlement, Some(settlement));
    assert_eq!(decided.block(), Some(settlement.transfer.block));
}

#[test]
fn a_reorg_is_believed_only_on_the_word_of_the_quorum() {
    let quorum = Policy { quorum: 2, ..default() };
    let mut ledger = Ledger::of(&[p1()], &[order("o", O::Paying, None)]);
    ledger.apply("p1", settled(&p1(), 9, Tentative), &quorum);
    let resolution = ledger.apply("p1", pending(9), &quorum);
    assert_eq!(ledger.told(), "p1=settled, o=paid by p1");
    assert_eq!(resolution.watch.next.phase, Phase::Finality);
    ledger.apply("p1", Verdict::Pending { as_of: block(9), agreeing: 2 }, &quorum);
    assert_eq!(ledger.told(), "p1=unknown, o=paying");
}

#[test]
fn a_payment_reorged_while_a_sibling_paid_comes_back_as_a_duplicate() {
    let mut ledger = Ledger::of(&[p1(), p2()], &[order("o", O::Paying, None)]);
    ledger.apply("p1", settled(&p1(), 9, Tentative), &default());
    ledger.apply("p1", pending(10), &default());
    ledger.apply("p2", settled(&p2(), 11, Tentative), &default());
    assert_eq!(ledger.told(), "p1=unknown, p2=settled, o=paid by p2");
    ledger.apply("p1", settled(&p1(), 12, Tentative), &default());
    assert_eq!(ledger.told(), "p1=settled, p2=settled, o=paid by p2, refund p1=owed");
    ledger.apply("p2", pending(13), &default());
    assert_eq!(
        ledger.told(),
        "p1=settled, p2=unknown, o=paying, refund p1=owed",
        "what is owed back stays owed back (I6)"
    );
    ledger.apply("p1", settled(&p1(), 12, Final), &default());
    assert_eq!(ledger.told(), "p1=settled, p2=unknown, o=paying, refund p1=owed");
    ledger.apply("p2", pending(DEADLINE_BLOCK), &default());
    assert_eq!(ledger.told(), "p1=settled, p2=failed, o=failed, refund p1=owed");
}

#[test]
fn a_transfer_that_lands_in_another_block_unnoticed_moves_its_record_and_its_refund() {
    let rows = [p1(), with_status(p2(), PaymentStatus::Settled)];
    let mut ledger = Ledger::of(&rows, &[order("o", O::Paid, Some("p2"))]);
    ledger.apply("p1", settled(&p1(), 9, Tentative), &default());
    let moved = ledger.apply("p1", settled(&p1(), 12, Tentative), &default());
    assert!(matches!(moved.refund, RefundChange::Follow(s) if s.transfer.block == block(12)));
    assert_eq!(ledger.transfers.len(), 1);
    let still = ledger.apply("p1", settled(&p1(), 12, Final), &default());
    assert_eq!(still.refund, RefundChange::Keep);
}

/// I6: what was observed goes back.
#[test]
fn a_transfer_that_lands_again_for_another_value_changes_what_nobody_has_taken_and_flags_the_rest()
{
    use RefundStatus as R;
    let upto = |p: Payment| Payment { method: Method::Permit2, ..p };
    let of_value = |block, value| {
        let mut verdict = settled(&upto(p1()), block, Tentative);
        if let Verdict::Settled(settlement) = &mut verdict {
            settlement.transfer.value = amount(value);
        }
        verdict
    };
    for (status, is_flagged) in [
        (R::Owed, false),
        (R::Blocked, false),
        (R::Claimed, true),
        (R::Sent, true),
        (R::Paid, true),
    ] {
        let rows = [upto(p1()), with_status(p2(), PaymentStatus::Settled)];
        let mut ledger = Ledger::of(&rows, &[order("o", O::Paid, Some("p2"))]);
        ledger.apply("p1", of_value(9, 700), &default());
        let mut ledger = ledger.with_refund("p1", status);
        let moved = ledger.apply("p1", of_value(12, 500), &default());
        assert!(
            matches!(moved.refund, RefundChange::Follow(s) if s.transfer.value == amount(500)),
            "{status}: {moved:?}"
        );
        let flags: Vec<FlagKind> = moved.flags.iter().map(|flag| flag.kind).collect();
        assert_eq!(flags.contains(&FlagKind::ReorgedAfterRefund), is_flagged, "{status}");
        let last = ledger.apply("p1", of_value(12, 500), &default());
        assert!(!last.close_flags.contains(&FlagKind::ReorgedAfterRefund), "a person's: {status}");
    }
}

#[test]
fn a_reorg_voids_a_refund_nobody_has_taken_and_flags_one_that_somebody_has() {
    use RefundStatus as R;
    for (status, after, flagged) in [
        (R::Owed, R::Void, false),
        (R::Blocked, R::Void, false),
        (R::Claimed, R::Claimed, true),
        (R::Sent, R::Sent, true),
        (R::Paid, R::Paid, true),
        (R::Void, R::Void, true),
    ] {
        let rows = [with_status(p1(), PaymentStatus::Settled), p2()];
        let mut ledger = Ledger::of(&rows, &[order("o", O::Paid, Some("p2"))])
            .with_record(&p1(), 9, Tentative)
            .with_refund("p1", status);
        let resolution = ledger.apply("p1", pending(10), &default());
        assert_eq!(ledger.refunds[&p1().id], after);
        assert_eq!(flags(&resolution) == ["reorged_after_refund"], flagged, "{status}");

        let resolution = ledger.apply("p1", settled(&p1(), 12, Final), &default());
        let owed_again = matches!(resolution.refund, RefundChange::Owe(_));
        assert_eq!(owed_again, after == R::Void, "{status}: it landed again");
        assert!(ledger.orders[&p1().order_id].paid_by == Some(p2().id));
    }
}

#[test]
fn a_refund_that_a_person_called_off_stays_called_off() {
    for (status, paid_by) in [(O::Paid, Some("p2")), (O::Expired, None), (O::Paying, None)] {
        let rows = [with_status(p1(), PaymentStatus::Settled), p2()];
        let mut ledger = Ledger::of(&rows, &[order("o", status, paid_by)])
            .with_record(&p1(), 9, Tentative)
            .with_refund("p1", RefundStatus::Void);
        let before = ledger.orders.clone();
        let resolution = ledger.apply("p1", settled(&p1(), 9, Final), &default());
        assert_eq!(resolution.refund, RefundChange::Keep, "{status}");
        assert_eq!(ledger.orders, before);
    }
}

#[test]
fn an_order_fails_though_a_sibling_settled_whose_refund_a_person_called_off() {
    // I5: nobody else can pay it, and it would hold its stock for ever.
    let rows = [with_status(p1(), PaymentStatus::Settled), p2()];
    let ledger = Ledger::of(&rows, &[order("o", O::Paying, None)])
        .with_stock("mug", Some(0))
        .with_reservation("o", "mug", 1, Held)
        .with_refund("p1", RefundStatus::Void);
    let mut called_off = ledger.clone().with_record(&p1(), 9, Final);
    called_off.apply("p2", unsettleable(Unsettleable::Expired, DEADLINE_BLOCK), &default());
    assert_eq!(
        called_off.told(),
        "p1=settled, p2=failed, o=failed, r0=released, mug=1, refund p1=void"
    );

    // Void because a reorg took the transfer: it can land again and pay.
    let mut reorged = ledger;
    reorged.apply("p2", unsettleable(Unsettleable::Expired, DEADLINE_BLOCK), &default());
    assert!(reorged.told().contains("p2=failed, o=paying, r0=held"), "{}", reorged.told());
}

#[test]
fn final_is_final() {
    let row = with_status(p1(), PaymentStatus::Settled);
    let ledger =
        Ledger::of(&[row], &[order("o", O::Paid, Some("p1"))]).with_record(&p1(), 9, Final);
    let doubts = [
        settled(&p1(), 9, Tentative),
        settled(&p1(), 12, Tentative),
        pending(DEADLINE_BLOCK),
        unsettleable(Unsettleable::Expired, DEADLINE_BLOCK),
    ];
    for verdict in doubts {
        let mut quiet = ledger.clone();
        let resolution = quiet.apply("p1", verdict.clone(), &default());
        assert_eq!(quiet, ledger);
        assert_eq!(resolution.watch.next.phase, Phase::Closed);

        // The gateway wrote open statuses over it: the same ending is written again.
        let mut careless = ledger.clone();
        careless.payments.get_mut(&p1().id).unwrap().status = PaymentStatus::Unknown;
        *careless.orders.get_mut(&p1().order_id).unwrap() = order("o", O::Paying, None);
        careless.apply("p1", verdict, &default());
        assert_eq!(careless.told(), "p1=settled, o=paid by p1");
    }
}

#[test]
fn one_transaction_of_two_payments_that_moves_within_its_block_confuses_nobody() {
    // The batch is mined first in block 9, then behind two other logs in block 12: p1's log is where
    // p2's was.
    let at = |payment: &Payment, n, log_index| {
        let transfer =
            Transfer { tx_hash: TOKEN.into_word(), ..transfer_of(payment, block(n), log_index) };
        Verdict::Settled(Settlement { transfer, finality: Tentative })
    };
    let rows = [p1(), payment("q", "other")];
    let mut ledger = Ledger::of(&rows, &two_orders());
    ledger.apply("p1", at(&rows[0], 9, 1), &default());
    ledger.apply("q", at(&rows[1], 9, 3), &default());
    let paid = "p1=settled, q=settled, o=paid by p1, other=paid by q";
    assert_eq!(ledger.told(), paid);
    ledger.apply("p1", at(&rows[0], 12, 3), &default());
    ledger.apply("q", at(&rows[1], 12, 5), &default());
    assert_eq!(ledger.told(), paid);
    let places: Vec<u64> =
        ledger.transfers.iter().map(|t| t.settlement.transfer.log_index).collect();
    assert_eq!(places, [3, 5]);

    // The same, with p1 back to unknown in between: it must not be failed as a reuse of q's transfer.
    let mut ledger = Ledger::of(&rows, &two_orders()).with_record(&rows[1], 9, Tentative);
    ledger.transfers[0].settlement.transfer.tx_hash = TOKEN.into_word();
    ledger.apply("p1", at(&rows[0], 12, 5), &default());
    assert_eq!(ledger.told(), "p1=settled, q=unknown, o=paid by p1, other=paying");
}

// ---- One authorization, two payments

fn reused(created_at: u64, status: PaymentStatus) -> Payment {
    let mut other = with_status(payment("q", "other"), status);
    (other.payer, other.nonce) = (p1().payer, p1().nonce);
    other.created_at = secs(created_at);
    other
}

fn two_orders() -> [Order; 2] {
    [order("o", O::Paying, None), order("other", O::Paying, None)]
}

fn first_created() -> Payment {
    Payment { created_at: secs(10), ..p1() }
}

#[test]
fn one_transfer_pays_one_of_two_orders_whichever_is_checked_first() {
    for (created_at, owner, outcome) in [
        (11, "p1", "p1=settled, q=failed, o=paid by p1, other=failed"),
        (9, "q", "p1=failed, q=settled, o=failed, other=paid by q"),
    ] {
        for ids in [["p1", "q"], ["q", "p1"]] {
            let rows = [first_created(), reused(created_at, PaymentStatus::Unknown)];
            let mut ledger = Ledger::of(&rows, &two_orders());
            for id in ids {
                let has_it = ledger.transfers.iter().any(|t| t.payment_id.as_str() == owner);
                let resolution = ledger.apply(id, settled(&p1(), 9, Tentative), &default());
                assert_eq!(flags(&resolution).is_empty(), id == owner || !has_it);
            }
            ledger.apply(ids[0], settled(&p1(), 9, Tentative), &default());
            assert_eq!(ledger.told(), outcome);
        }
        // In one batch the owner goes first.
        let rows = [first_created(), reused(created_at, PaymentStatus::Unknown)];
        let mut ledger = Ledger::of(&rows, &two_orders());
        let batch = ["q", "p1"].map(|id| judged_as(id, settled(&p1(), 9, Tentative)));
        ledger.apply_all(batch.to_vec(), &default(), secs(50));
        assert_eq!(ledger.told(), outcome);
    }
}

#[test]
fn a_transfer_is_left_to_nobody_who_may_fail_before_seeing_it() {
    // I4. p1 comes first, and fails on an older read than the one that shows q the transfer.
    let rows = [first_created(), reused(11, PaymentStatus::Unknown)];
    let mut ledger = Ledger::of(&rows, &two_orders());
    let resolution = ledger.apply("q", settled(&p1(), 9, Tentative), &default());
    assert_ne!(resolution.watch.next.phase, Phase::Closed);
    ledger.apply("p1", pending(DEADLINE_BLOCK), &default());
    assert_eq!(ledger.told(), "p1=failed, q=unknown, o=failed, other=paying");
    ledger.apply("q", settled(&p1(), 9, Tentative), &default());
    assert_eq!(ledger.told(), "p1=failed, q=settled, o=failed, other=paid by q");

    // Both failed before either saw it: whoever sees it has it.
    for order in [["p1", "q"], ["q", "p1"]] {
        let rows = [first_created(), reused(11, PaymentStatus::Unknown)]
            .map(|row| with_status(row, PaymentStatus::Failed));
        let orders = two_orders().map(|row| Order { status: O::Failed, ..row });
        let mut ledger = Ledger::of(&rows, &orders);
        for id in order {
            ledger.apply(id, settled(&p1(), 9, Tentative), &default());
        }
        let owed: Vec<&str> = ledger.refunds.keys().map(PaymentId::as_str).collect();
        assert_eq!(owed, [order[0]]);
    }
}

#[test]
fn the_payment_the_gateway_settled_has_the_transfer() {
    let rows = [first_created(), reused(11, PaymentStatus::Settled)];
    let orders = [order("o", O::Paying, None), order("other", O::Paid, Some("q"))];
    let mut ledger = Ledger::of(&rows, &orders);
    let resolution = ledger.apply("p1", settled(&p1(), 9, Tentative), &default());
    assert_eq!(flags(&resolution), ["authorization_reused"]);
    assert_eq!(ledger.told(), "p1=failed, q=settled, o=failed, other=paid by q");
}

#[test]
fn a_failed_row_does_not_keep_the_transfer_from_one_that_waits_for_it() {
    // The gateway wrote a second row for the same authorization of the same order, and gave up the first.
    let mut second = reused(11, PaymentStatus::Unknown);
    second.order_id = p1().order_id;
    let rows = [with_status(first_created(), PaymentStatus::Failed), second];
    let mut ledger = Ledger::of(&rows, &two_orders()[..1]);
    ledger.apply("q", settled(&p1(), 9, Tentative), &default());
    assert_eq!(ledger.told(), "p1=failed, q=settled, o=paid by q");
    ledger.apply("p1", settled(&p1(), 9, Tentative), &default());
    assert_eq!(ledger.told(), "p1=failed, q=settled, o=paid by q");
}

#[test]
fn a_recorded_transfer_stays_with_its_payment_when_a_reorg_moves_it() {
    // q has the transfer at block 9; the gateway wrote over q's status; it landed again at block 12.
    let rows = [first_created(), reused(11, PaymentStatus::Unknown)];
    let orders = [order("o", O::Paying, None), order("other", O::Paid, Some("q"))];
    let mut ledger = Ledger::of(&rows, &orders).with_record(&rows[1], 9, Tentative);
    ledger.apply("p1", settled(&p1(), 12, Tentative), &default());
    ledger.apply("q", settled(&p1(), 12, Tentative), &default());
    assert_eq!(ledger.told(), "p1=failed, q=settled, o=failed, other=paid by q");
}

#[test]
fn an_order_paid_on_a_transfer_that_pays_another_is_flagged_and_left() {
    let rows = [first_created(), reused(11, PaymentStatus::Settled)];
    let orders = [order("o", O::Paid, Some("p1")), order("other", O::Paid, Some("q"))];
    let mut ledger = Ledger::of(&rows, &orders).with_record(&rows[0], 9, Final);
    let resolution = ledger.apply("q", settled(&p1(), 9, Final), &default());
    assert_eq!(flags(&resolution), ["settled_without_transfer", "authorization_reused"]);
    assert_eq!(ledger.told(), "p1=unknown, q=settled, o=paid by p1, other=paid by q");
}

// ---- Rows that changed since the check

#[test]
fn a_verdict_about_a_row_that_changed_since_the_check_is_not_applied() {
    let changes: [fn(&mut Payment); 9] = [
        |p| p.method = Method::Permit2,
        |p| p.chain_id = ChainId::new(1),
        |p| p.token = PAY_TO,
        |p| p.payer = TOKEN,
        |p| p.pay_to = TOKEN,
        |p| p.amount = amount(1),
        |p| p.nonce = B256::ZERO,
        |p| p.valid_after = BlockTime::from_secs(1),
        |p| p.valid_before = BlockTime::from_secs(1_000),
    ];
    let verdicts = [
        settled(&p1(), 9, Final),
        pending(DEADLINE_BLOCK),
        unsettleable(Unsettleable::Expired, DEADLINE_BLOCK),
        unsettleable(Unsettleable::Canceled, DEADLINE_BLOCK),
        Verdict::Unsettleable {
            reason: Unsettleable::UsedElsewhere,
            as_of: block(50),
            consumption: Some(paying(&p1(), block(9), 4)),
        },
    ];
    let early = Policy { early_failure: true, ..default() };
    for change in changes {
        for verdict in &verdicts {
            let mut row = p1();
            change(&mut row);
            let mut ledger = Ledger::of(&[row], &[order("o", O::Paying, None)]);
            let judged = Judged { terms: Some(p1().terms()), ..judged_as("p1", verdict.clone()) };
            let at = secs(DEADLINE_BLOCK * BLOCK_SECS);
            let (_, resolution) = ledger.apply_all(vec![judged], &early, at).remove(0);
            assert_eq!(ledger.told(), "p1=unknown, o=paying", "{verdict:?}");
            assert!(ledger.transfers.is_empty() && resolution.flags.is_empty());
            assert_eq!(resolution.watch.next.at, Some(due().reopened), "look again at once");
        }
    }
}

#[test]
fn a_row_that_changed_after_its_transfer_was_recorded_is_flagged_and_keeps_it() {
    let row = Payment { amount: amount(5), ..with_status(p1(), PaymentStatus::Settled) };
    let mut ledger =
        Ledger::of(&[row], &[order("o", O::Paid, Some("p1"))]).with_record(&p1(), 9, Tentative);
    let used = Verdict::Unsettleable {
        reason: Unsettleable::UsedElsewhere,
        as_of: block(50),
        consumption: Some(paying(&p1(), block(9), 4)),
    };
    let resolution = ledger.apply("p1", used, &default());
    assert_eq!(flags(&resolution), ["nonce_used_elsewhere"]);
    assert_eq!(ledger.told(), "p1=settled, o=paid by p1", "the money is there: this is no reorg");
    assert_eq!(ledger.transfers.len(), 1);
}

// ---- What the gateway says, against the chain

#[test]
fn settled_by_the_gateway_without_a_transfer_is_flagged_at_the_deadline_and_never_failed() {
    let row = || with_status(p1(), PaymentStatus::Settled);
    for verdict in [pending(DEADLINE_BLOCK), unsettleable(Unsettleable::Expired, DEADLINE_BLOCK)] {
        let mut ledger = Ledger::of(&[row()], &[order("o", O::Paid, Some("p1"))]);
        let resolution = ledger.apply("p1", verdict, &default());
        assert_eq!(flags(&resolution), ["settled_without_transfer"]);
        assert_eq!(ledger.told(), "p1=settled, o=paid by p1");
    }
    let mut ledger = Ledger::of(&[row()], &[order("o", O::Paid, Some("p1"))]);
    let resolution = ledger.apply("p1", pending(DEADLINE_BLOCK - 1), &default());
    assert!(flags(&resolution).is_empty());
}

#[test]
fn a_payment_of_an_undelivered_order_that_never_landed_simply_fails() {
    let mut ledger = Ledger::of(&[p1()], &[order("o", O::Undelivered, Some("p1"))]);
    ledger.apply("p1", pending(DEADLINE_BLOCK), &default());
    assert_eq!(ledger.told(), "p1=failed, o=undelivered by p1");
}

#[test]
fn an_order_the_gateway_calls_paid_by_money_that_is_owed_back_is_flagged() {
    let row = with_status(p1(), PaymentStatus::Settled);
    let mut ledger = Ledger::of(&[row], &[order("o", O::Paid, Some("p1"))])
        .with_record(&p1(), 9, Tentative)
        .with_refund("p1", RefundStatus::Owed);
    let resolution = ledger.apply("p1", settled(&p1(), 9, Final), &default());
    assert_eq!(flags(&resolution), ["refund_contradicted"]);
    assert_eq!(ledger.refunds[&p1().id], RefundStatus::Owed);
}

// ---- What would otherwise come round at every poll

#[test]
fn a_watch_is_never_closed_over_a_payment_that_stays_open() {
    // The gateway paid order b by p2, whose authorization paid order a.
    let mut second = p2();
    (second.order_id, second.nonce, second.payer) = (OrderId::from("b"), p1().nonce, p1().payer);
    let first = with_status(p1(), PaymentStatus::Settled);
    let orders = [order("o", O::Paid, Some("p1")), order("b", O::Paid, Some("p2"))];
    let mut ledger = Ledger::of(&[first, second.clone()], &orders).with_record(&p1(), 9, Final);
    let resolution = ledger.apply("p2", settled(&p1(), 9, Final), &default());
    assert_eq!(flags(&resolution), ["settled_without_transfer", "authorization_reused"]);
    assert_eq!(ledger.payments[&second.id].status, PaymentStatus::Unknown);
    assert_eq!(resolution.watch.next, NextCheck { phase: Phase::Reconcile, at: None });
}

#[test]
fn stock_that_is_on_no_shelf_is_released_and_flagged_and_fails_nothing_else() {
    let mut ledger = Ledger::of(&[p1()], &[order("o", O::Paying, None)])
        .with_stock("mug", Some(0))
        .with_reservation("o", "mug", 2, Held)
        .with_reservation("o", "hat", 1, Held);
    let resolution = ledger.apply("p1", pending(DEADLINE_BLOCK), &default());
    assert_eq!(ledger.told(), "p1=failed, o=failed, r0=released, r1=released, mug=2");
    assert_eq!(flags(&resolution), ["stock_missing"]);
    assert!(resolution.flags[0].detail.to_string().contains("hat"));
    assert!(!resolution.flags[0].detail.to_string().contains("mug"));
}

// ---- Events

#[test]
fn a_block_that_a_reorg_takes_away_and_brings_back_is_told_of_each_time() {
    let mut ledger = Ledger::of(&[p1()], &[order("o", O::Paying, None)]);
    let mut keys = std::collections::BTreeSet::new();
    let mut told = Vec::new();
    for (second, verdict) in [
        (100, settled(&p1(), 9, Tentative)),
        (200, pending(9)),
        (300, settled(&p1(), 9, Tentative)),
    ] {
        let batch = vec![judged_as("p1", verdict)];
        let (_, resolution) = ledger.apply_all(batch, &default(), secs(second)).remove(0);
        told.extend(events(&resolution));
        keys.extend(resolution.events.into_iter().map(|e| e.dedupe_key));
    }
    assert_eq!(told, ["order.paid", "order.reopened", "order.paid"]);
    assert_eq!(keys.len(), 3, "the outbox keeps one row per key: {keys:?}");
}

#[test]
fn writing_an_ending_again_over_a_careless_gateway_tells_nobody() {
    let mut ledger = Ledger::of(&[p1()], &[order("o", O::Paying, None)]);
    let first = judged_as("p1", settled(&p1(), 9, Tentative));
    let (_, first) = ledger.apply_all(vec![first], &default(), secs(100)).remove(0);
    let paying = order("o", O::Paying, None);
    ledger.orders.insert(paying.id.clone(), paying);
    let again = judged_as("p1", settled(&p1(), 9, Final));
    let (_, again) = ledger.apply_all(vec![again], &default(), secs(200)).remove(0);
    assert_eq!(ledger.told(), "p1=settled, o=paid by p1");
    assert_eq!(first.events, again.events, "the outbox keeps one row per key");
}

// ---- When something cannot be read

#[test]
fn what_is_final_needs_no_reader() {
    let row = with_status(p1(), PaymentStatus::Settled);
    let unreachable = Verdict::Inconclusive(Inconclusive::ReadFailed(ReadFailureKind::Unreachable));
    let mut ledger =
        Ledger::of(&[row], &[order("o", O::Undelivered, Some("p1"))]).with_record(&p1(), 9, Final);
    let resolution = ledger.apply("p1", unreachable.clone(), &default());
    assert_eq!(ledger.told(), "p1=settled, o=undelivered by p1, refund p1=owed");
    assert_eq!(resolution.watch.next.phase, Phase::Closed);

    // Tentative, it could still be taken away: nothing is concluded without a reader (I2).
    let row = with_status(p1(), PaymentStatus::Settled);
    let mut ledger = Ledger::of(&[row], &[order("o", O::Undelivered, Some("p1"))]).with_record(
        &p1(),
        9,
        Tentative,
    );
    ledger.apply("p1", unreachable, &default());
    assert_eq!(ledger.told(), "p1=settled, o=undelivered by p1");
}

#[test]
fn what_the_gateway_alone_calls_settled_and_nobody_can_read_is_flagged_at_the_deadline() {
    let row = with_status(p1(), PaymentStatus::Settled);
    let mut ledger = Ledger::of(&[row], &[order("o", O::Undelivered, Some("p1"))]);
    let verdict = Verdict::Inconclusive(Inconclusive::UsedWithoutLog);
    let resolution = ledger.apply("p1", verdict, &default());
    assert_eq!(flags(&resolution), ["inconclusive_at_deadline"]);
}

#[test]
fn a_payment_is_not_failed_while_its_order_cannot_be_read() {
    let mut ledger = Ledger::of(&[p1()], &[]);
    let resolution = ledger.apply("p1", pending(DEADLINE_BLOCK), &default());
    assert_eq!(ledger.told(), "p1=unknown");
    assert_eq!(flags(&resolution), ["order_unreadable"]);
    assert_eq!(resolution.watch.next, NextCheck { phase: Phase::Reconcile, at: None });

    ledger.orders.insert(OrderId::from("o"), order("o", O::Paying, None));
    let resolution = ledger.apply("p1", pending(DEADLINE_BLOCK), &default());
    assert_eq!(ledger.told(), "p1=failed, o=failed", "mended, both fail");
    assert!(resolution.close_flags.contains(&FlagKind::OrderUnreadable));
}

#[test]
fn a_settled_payment_whose_money_may_be_owed_is_not_let_go_without_a_record() {
    // The row was changed after its transfer became final, and then the work failed.
    let mut row = with_status(p1(), PaymentStatus::Settled);
    row.amount = amount(2);
    let mut ledger = Ledger::of(&[row.clone()], &[order("o", O::Undelivered, Some("p1"))])
        .with_record(&p1(), 9, Final);
    let used = Verdict::Unsettleable {
        reason: Unsettleable::UsedElsewhere,
        as_of: block(20),
        consumption: Some(paying(&p1(), block(9), 4)),
    };
    let resolution = ledger.apply("p1", used, &default());
    assert_eq!(resolution.watch.next.phase, Phase::Reconcile, "discovery would find it again");
    assert_eq!(flags(&resolution), ["nonce_used_elsewhere"]);
}
