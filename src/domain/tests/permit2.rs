//! Goal: a permit is judged by what was signed and what moved, and its money is accounted for as observed
//! (I2, I4, I6; DESIGN section 6, Permit2).

use proptest::prelude::*;

use super::support::*;
use crate::domain::NonceState::{Unused, Used};
use crate::domain::OrderStatus as O;
use crate::domain::*;

fn permit(id: &str) -> Payment {
    Payment { method: Method::Permit2, ..payment(id, "o") }
}

/// `value` moved from the payer to `pay_to`; a trusted facilitator chose it out of `at_most`, or nobody did.
fn moved(payment: &Payment, at: u64, value: u64, at_most: Option<u64>) -> Consumption {
    let mut consumption = paying(payment, block(at), 4);
    if let ConsumptionKind::Transferred(seen) = &mut consumption.kind {
        (seen.value, seen.at_most) = (amount(value), at_most.map(amount));
    }
    consumption
}

fn verdict_on(payment: &Payment, nonce: NonceState, finalized: u64) -> String {
    let shown = evidence([Ok(view(50, finalized, nonce))]);
    let verdict = judge(payment, &shown, &Policy::default());
    format!("{}:{}", verdict.kind(), verdict.reason().unwrap_or("-"))
}

#[test]
fn what_was_signed_decides_and_not_how_much_moved() {
    const ASKED: u64 = 1_000_000;
    let rows = [
        (ASKED, None, "settled:final", "what was asked, whoever chose it"),
        (ASKED - 1, None, "unsettleable:used_elsewhere", "exact, or a stranger's choice: less"),
        (1, None, "unsettleable:used_elsewhere", "a payer who settles for one base unit"),
        (ASKED + 1, None, "unsettleable:used_elsewhere", "more"),
        (ASKED, Some(ASKED), "settled:final", "metered, all of it"),
        (1, Some(ASKED), "settled:final", "metered, the least that moves"),
        (0, Some(ASKED), "unsettleable:used_elsewhere", "metered, nothing: no proxy does that"),
        (
            ASKED + 1,
            Some(ASKED),
            "unsettleable:used_elsewhere",
            "metered, more than was signed for",
        ),
        (1, Some(ASKED - 1), "unsettleable:used_elsewhere", "metered, signed for less than asked"),
        (1, Some(ASKED + 1), "unsettleable:used_elsewhere", "metered, signed for more than asked"),
    ];
    for (value, at_most, expected, name) in rows {
        let permit = permit("p");
        let shown = Used(moved(&permit, 20, value, at_most));
        assert_eq!(verdict_on(&permit, shown, 40), expected, "{name}");
    }
    // No token's own authorization leaves the amount to whoever settles.
    let authorization = payment("p", "o");
    let shown = Used(moved(&authorization, 20, 1, Some(ASKED)));
    assert_eq!(verdict_on(&authorization, shown, 40), "unsettleable:used_elsewhere");
}

#[test]
fn i4_a_nonce_used_for_less_than_was_asked_is_flagged_at_once_with_the_amount() {
    let permit = permit("p");
    let shown = evidence([Ok(view(50, 40, Used(moved(&permit, 20, 1, None))))]);
    let verdict = judge(&permit, &shown, &Policy::default());
    let mut ledger = Ledger::of(&[permit], &[order("o", O::Paying, None)]);
    let resolution = ledger.apply("p", verdict, &Policy::default());
    assert_eq!(flags(&resolution), ["nonce_used_elsewhere"]);
    let detail = &resolution.flags[0].detail["consumption"];
    assert_eq!(detail["kind"]["transferred"]["value"], "1", "{detail}");
    assert!(!ledger.told().contains("o=paid"), "{}", ledger.told());
}

#[test]
fn a_transfer_of_another_token_with_the_same_nonce_is_used_elsewhere() {
    let permit = permit("p");
    let mut other = moved(&permit, 20, 1_000_000, None);
    if let ConsumptionKind::Transferred(seen) = &mut other.kind {
        seen.token = PAY_TO;
    }
    assert_eq!(verdict_on(&permit, Used(other), 40), "unsettleable:used_elsewhere");
    assert_eq!(verdict_on(&permit, Used(other), 19), "inconclusive:not_finalized");
}

#[test]
fn i2_a_permit_holds_through_its_deadline_second_and_an_authorization_does_not() {
    // Block 30 has the time 60, which is the deadline of one and the end of the other.
    for (finalized, permit_is, authorization_is) in [
        (29, "pending:-", "pending:-"),
        (30, "pending:-", "unsettleable:expired"),
        (31, "unsettleable:expired", "unsettleable:expired"),
    ] {
        assert_eq!(verdict_on(&permit("p"), Unused, finalized), permit_is);
        assert_eq!(verdict_on(&payment("p", "o"), Unused, finalized), authorization_is);
    }
    let never = Payment { valid_before: BlockTime::from_secs(u64::MAX), ..permit("p") };
    assert_eq!(verdict_on(&never, Unused, 50), "pending:-", "nothing overflows");
}

#[test]
fn upto_settled_for_less_pays_its_order_and_a_duplicate_is_owed_what_moved() {
    let first = permit("p1");
    let second = permit("p2");
    let settled_for = |payment: &Payment, at: u64, value: u64| {
        let shown = evidence([Ok(view(50, 40, Used(moved(payment, at, value, Some(1_000_000)))))]);
        judge(payment, &shown, &Policy::default())
    };
    let mut ledger = Ledger::of(&[first.clone(), second.clone()], &[order("o", O::Paying, None)]);
    let resolution = ledger.apply("p1", settled_for(&first, 9, 250), &Policy::default());
    assert_eq!(resolution.outcome, Outcome::Paid);
    let resolution = ledger.apply("p2", settled_for(&second, 10, 40), &Policy::default());
    assert_eq!(ledger.told(), "p1=settled, p2=settled, o=paid by p1, refund p2=owed");
    let RefundChange::Owe(owed) = resolution.refund else { panic!("{resolution:?}") };
    assert_eq!((owed.reason, owed.transfer.value), (RefundReason::Duplicate, amount(40)));
    // Seen again as it was recorded, it changes nothing.
    let before = ledger.clone();
    let again = ledger.apply("p1", settled_for(&first, 9, 250), &Policy::default());
    assert_eq!(again.transfer, TransferChange::Keep);
    assert_eq!(ledger, before);
}

#[test]
fn i4_of_two_rows_with_one_permit_the_one_that_was_signed_for_has_the_transfer() {
    // Created first, and asking for more than was signed for: less could have moved for it, too.
    let greedy = Payment { created_at: secs(0), amount: amount(2_000_000), ..permit("p1") };
    let signed = Payment { id: PaymentId::from("p2"), created_at: secs(5), ..permit("p1") };
    assert!(greedy.same_authorization(&signed));
    let shown = moved(&signed, 9, 250, Some(1_000_000));
    let shown = evidence([Ok(view(50, 40, Used(shown)))]);
    let verdict = |payment: &Payment| judge(payment, &shown, &Policy::default());
    let mut ledger = Ledger::of(&[greedy.clone(), signed.clone()], &[order("o", O::Paying, None)]);
    let resolution = ledger.apply("p1", verdict(&greedy), &Policy::default());
    assert_eq!(flags(&resolution), ["nonce_used_elsewhere"]);
    ledger.apply("p2", verdict(&signed), &Policy::default());
    assert!(ledger.told().contains("p2=settled, o=paid by p2"), "{}", ledger.told());
}

#[test]
fn an_owners_nonce_serves_for_one_token_and_no_tokens_own_authorizations() {
    let one = permit("p");
    let of_other_token = Payment { token: PAY_TO, ..one.clone() };
    assert!(one.same_authorization(&of_other_token));
    let differs: [fn(&mut Payment); 4] = [
        |p| p.payer = PAY_TO,
        |p| p.nonce = alloy_primitives::B256::ZERO,
        |p| p.chain_id = ChainId::new(1),
        |p| p.method = Method::Eip3009,
    ];
    for change in differs {
        let mut other = one.clone();
        change(&mut other);
        assert!(!one.same_authorization(&other) && !other.same_authorization(&one));
    }
    let authorization = Payment { method: Method::Eip3009, ..one.clone() };
    let of_other_token = Payment { token: PAY_TO, ..authorization.clone() };
    assert!(!authorization.same_authorization(&of_other_token));
    // Both may be owed back: one refund must not pass for the other's.
    assert_ne!(refund_nonce(&one), refund_nonce(&authorization));
}

proptest! {
    /// Whatever a facilitator chose to move: it settles only what was signed for this amount, and only less.
    #[test]
    fn i6_settled_means_signed_for_and_no_more(
        value in 0..3_000_000u64,
        at_most in proptest::option::of(prop_oneof![Just(1_000_000u64), 0..3_000_000u64]),
        asked in prop_oneof![Just(1_000_000u64), 0..3_000_000u64],
        by_permit2 in any::<bool>(),
    ) {
        let method = if by_permit2 { Method::Permit2 } else { Method::Eip3009 };
        let payment = Payment { method, amount: amount(asked), ..permit("p") };
        let shown = evidence([Ok(view(50, 40, Used(moved(&payment, 20, value, at_most))))]);
        let verdict = judge(&payment, &shown, &Policy::default());
        let right = match at_most {
            None => value == asked,
            Some(most) => by_permit2 && most == asked && value >= 1 && value <= most,
        };
        prop_assert_eq!(matches!(verdict, Verdict::Settled(_)), right, "{:?}", verdict);
        if let Verdict::Settled(settlement) = verdict {
            prop_assert_eq!(settlement.transfer.value, amount(value));
            prop_assert!(settlement.transfer.pays(&payment), "and it still does when it is read back");
        }
    }
}
