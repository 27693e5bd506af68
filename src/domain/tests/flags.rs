//! Which flags close by themselves, and when; and what tells one occasion from another.

use super::support::*;
use crate::domain::*;

use FlagKind as K;

/// The payment of every test.
fn p1() -> Payment {
    payment("p1", "o")
}

fn ledger() -> Ledger {
    Ledger::of(&[p1()], &[order("o", OrderStatus::Paying, None)])
}

fn gone(ledger: &mut Ledger, verdict: Verdict) -> Vec<FlagKind> {
    ledger.apply("p1", verdict, &Policy::default()).close_flags
}

const UNREADABLE: [K; 3] = [K::MalformedPayment, K::UnsupportedMethod, K::ChainNotConfigured];

#[test]
fn what_could_not_be_read_is_told_apart_by_how_far_the_reading_came() {
    for (reason, expected) in [
        // The row was mended between the read and the write: of the rest nothing is known yet.
        (Inconclusive::MalformedPayment, [true, false, false]),
        (Inconclusive::UnsupportedMethod, [true, false, false]),
        (Inconclusive::ChainNotConfigured, [true, true, false]),
        (Inconclusive::ReadFailed(ReadFailureKind::Unreachable), [true, true, true]),
        (Inconclusive::EndpointsDisagree, [true, true, true]),
    ] {
        let gone = gone(&mut ledger(), Verdict::Inconclusive(reason));
        assert_eq!(UNREADABLE.map(|kind| gone.contains(&kind)), expected, "{reason:?}");
        assert!(!gone.contains(&K::InconclusiveAtDeadline), "I2: {reason:?} proves nothing");
    }
    assert!(UNREADABLE.iter().all(|kind| gone(&mut ledger(), pending(5)).contains(kind)));
}

#[test]
fn a_flag_that_is_raised_is_not_closed_as_well() {
    let unconfigured = Verdict::Inconclusive(Inconclusive::ChainNotConfigured);
    let resolution = ledger().apply("p1", unconfigured, &Policy::default());
    assert_eq!(flags(&resolution), ["chain_not_configured"]);
    assert!(!resolution.close_flags.contains(&K::ChainNotConfigured));
}

#[test]
fn only_a_verdict_that_ends_the_payment_closes_the_flag_of_the_deadline() {
    let closes =
        |verdict: Verdict| gone(&mut ledger(), verdict).contains(&K::InconclusiveAtDeadline);
    assert!(!closes(pending(5)), "it is open, and its deadline is yet to come");
    assert!(!closes(Verdict::Inconclusive(Inconclusive::UsedWithoutLog)));
    assert!(closes(settled(&p1(), 9, Finality::Tentative)));
    assert!(closes(pending(DEADLINE_BLOCK)), "it failed");
    assert!(closes(unsettleable(Unsettleable::Expired, DEADLINE_BLOCK)), "it failed");
}

#[test]
fn a_delivery_whose_transfer_landed_again_is_no_loss_once_that_is_final() {
    let mut ledger = ledger();
    for (finality, closes) in [(Finality::Tentative, false), (Finality::Final, true)] {
        let gone = gone(&mut ledger, settled(&p1(), 9, finality));
        assert_eq!(gone.contains(&K::ReorgedAfterDelivery), closes, "{finality}");
    }
    // It landed again, and the order was over by then: the money goes back, and the delivery is a loss.
    let mut over = Ledger::of(&[p1()], &[order("o", OrderStatus::Failed, None)]);
    let gone = gone_of_final(&mut over);
    assert!(!gone.contains(&K::ReorgedAfterDelivery));
}

fn gone_of_final(ledger: &mut Ledger) -> Vec<FlagKind> {
    gone(ledger, settled(&p1(), 9, Finality::Final))
}

#[test]
fn a_refund_in_other_hands_is_right_again_once_its_transfer_is_final_again() {
    use RefundStatus as R;
    for (status, closes) in [
        (R::Claimed, true),
        (R::Sent, true),
        (R::Paid, true),
        // A person called it off, and it is owed anew: they must hear of that.
        (R::Void, false),
        (R::Owed, false),
    ] {
        let settled = Payment { status: PaymentStatus::Settled, ..p1() };
        let rows = [settled, payment("p2", "o")];
        let mut ledger = Ledger::of(&rows, &[order("o", OrderStatus::Paid, Some("p2"))])
            .with_refund("p1", status);
        let gone = gone_of_final(&mut ledger);
        assert_eq!(gone.contains(&K::ReorgedAfterRefund), closes, "{status}");
    }
}

#[test]
fn what_the_gateway_mended_closes() {
    let unnamed = || order("o", OrderStatus::Paid, None);
    let mut ledger = Ledger::of(&[p1()], &[unnamed()]);
    assert!(!gone_of_final(&mut ledger).contains(&K::PaidByUnknown));
    let mut ledger = Ledger::of(&[p1()], &[order("o", OrderStatus::Paid, Some("p1"))]);
    assert!(gone_of_final(&mut ledger).contains(&K::PaidByUnknown));

    let mut missing = Ledger::of(&[p1()], &[]);
    let gone_without_order = gone_of_final(&mut missing);
    for kind in [K::OrderUnreadable, K::PaidByUnknown, K::RefundContradicted] {
        assert!(!gone_without_order.contains(&kind), "{kind}: nothing is known of the order");
    }

    for (refund, closes) in [(RefundStatus::Owed, false), (RefundStatus::Void, true)] {
        let mut ledger = Ledger::of(&[p1()], &[order("o", OrderStatus::Paid, Some("p1"))])
            .with_record(&p1(), 9, Finality::Final)
            .with_refund("p1", refund);
        let closed = gone_of_final(&mut ledger).contains(&K::RefundContradicted);
        assert_eq!(closed, closes, "{refund}");
    }
}

#[test]
fn every_kind_that_ever_closes_by_itself_says_why_and_no_other_does() {
    // Every verdict on every order, with and without a record of the transfer.
    let mut seen = std::collections::BTreeSet::new();
    let paid = Some("p1");
    for order_row in [
        None,
        Some(order("o", OrderStatus::Paying, None)),
        Some(order("o", OrderStatus::Paid, paid)),
        Some(order("o", OrderStatus::Paid, None)),
    ] {
        for verdict in [
            settled(&p1(), 9, Finality::Final),
            settled(&p1(), 9, Finality::Tentative),
            pending(DEADLINE_BLOCK),
            unsettleable(Unsettleable::UsedElsewhere, DEADLINE_BLOCK),
            Verdict::Inconclusive(Inconclusive::NotAsked),
        ] {
            for refund in [None, Some(RefundStatus::Sent)] {
                let mut ledger = Ledger::of(&[p1()], order_row.as_slice());
                if let Some(status) = refund {
                    ledger =
                        ledger.with_record(&p1(), 9, Finality::Tentative).with_refund("p1", status);
                }
                seen.extend(gone(&mut ledger, verdict.clone()));
            }
        }
    }
    // Who claims a transfer that nobody knew is found by accounting for it: see the conservation tests.
    seen.insert(K::UnmatchedTransfer);
    // What becomes of a refund is found by the search for it: see the store's tests.
    seen.extend([K::RefundedAgain, K::MalformedRefund]);
    for kind in K::ALL {
        assert_eq!(seen.contains(kind), kind.cause_gone().is_some(), "{kind}");
    }
}

#[test]
fn another_reorg_is_another_occasion_and_another_look_at_one_nonce_is_not() {
    let mut delivered = order("o", OrderStatus::Paying, None);
    delivered.delivered_at = Some(secs(20));
    let mut ledger = Ledger::of(&[p1()], &[delivered]);
    let mut reorg = |block_number: u64, now: u64| {
        let verdict = settled(&p1(), block_number, Finality::Tentative);
        ledger.apply_all(vec![judged_as("p1", verdict)], &Policy::default(), secs(now));
        let resolution = ledger.apply("p1", pending(block_number + 1), &Policy::default());
        assert_eq!(flags(&resolution), ["reorged_after_delivery"]);
        resolution.flags[0].subject.clone()
    };
    let first = reorg(9, 20);
    let second = reorg(11, 24);
    let again = reorg(9, 30);
    assert!(first != second && second != again);
    assert_ne!(first, again, "the same block, seen at another time");

    let mut consumption = paying_less(&p1(), block(9));
    consumption.log.tx_hash = p1().nonce;
    let elsewhere = || Verdict::Unsettleable {
        reason: Unsettleable::UsedElsewhere,
        as_of: block(40),
        consumption: Some(consumption),
    };
    let subject = |ledger: &mut Ledger| {
        ledger.apply("p1", elsewhere(), &Policy::default()).flags[0].subject.clone()
    };
    let mut ledger = self::ledger();
    assert_eq!(subject(&mut ledger), subject(&mut ledger));
}
