//! I4: what arrived is accounted for exactly once, and what is not shows as drift.

use std::collections::BTreeMap;

use super::support::*;
use crate::domain::*;

/// What every payment of these tests moves.
const MOVED: &str = "1000000";

/// A page with one transfer of a settled payment `p` of order `o`, seen by the scan alone.
fn page(order_status: OrderStatus, paid_by: Option<&str>) -> LedgerPage {
    let mut page = LedgerPage::default();
    let p = Payment { status: PaymentStatus::Settled, ..payment("p", "o") };
    page.transfers.push(scanned(1, &p));
    page.payments.insert(p.id.clone(), p);
    let order = order("o", order_status, paid_by);
    page.orders.insert(order.id.clone(), order);
    page
}

fn scanned(id: i64, payment: &Payment) -> KnownTransfer {
    KnownTransfer {
        id,
        transfer: transfer_of(payment, block(100), 5),
        payment_id: None,
        nonce: Some(payment.nonce),
        scanned: true,
        marked: false,
    }
}

fn receiver() -> Receiver {
    Receiver { token: TOKEN, pay_to: PAY_TO }
}

fn account(page: &LedgerPage) -> PageAccount {
    page.account(&BTreeMap::from([(receiver(), Scanned { first: 50, last: 200 })]))
}

fn drift(account: &PageAccount) -> String {
    let totals = account.totals.get(&receiver()).copied().unwrap_or_default();
    totals.drift().to_string()
}

/// The accounts that hold something.
fn held(account: &PageAccount) -> Vec<(Account, String)> {
    let totals = account.totals.get(&receiver()).copied().unwrap_or_default();
    Account::ALL
        .iter()
        .map(|one| (*one, totals.of(*one)))
        .filter(|(_, amount)| *amount != Amount::ZERO)
        .map(|(one, amount)| (one, amount.to_string()))
        .collect()
}

fn once(one: Account) -> Vec<(Account, String)> {
    vec![(one, MOVED.to_owned())]
}

fn refund(page: &mut LedgerPage, status: RefundStatus) {
    page.refunds.insert(PaymentId::from("p"), (status, MOVED.parse().unwrap()));
}

#[test]
fn a_settlement_the_gateway_saw_itself_needs_nothing() {
    let seen = account(&page(OrderStatus::Paid, Some("p")));
    assert_eq!(held(&seen), once(Account::Paid));
    assert_eq!(drift(&seen), "0");
    assert!(seen.take_up.is_empty() && seen.raise.is_empty() && seen.close.is_empty());
    assert!(seen.mark.is_empty() && seen.unmark.is_empty());
}

#[test]
fn a_refund_record_accounts_for_money_whatever_its_status() {
    for (status, expected) in [
        (RefundStatus::Owed, Account::Owed),
        (RefundStatus::Claimed, Account::Owed),
        (RefundStatus::Sent, Account::Owed),
        (RefundStatus::Blocked, Account::Owed),
        (RefundStatus::Paid, Account::Refunded),
        (RefundStatus::Void, Account::CalledOff),
    ] {
        let mut page = page(OrderStatus::Canceled, None);
        refund(&mut page, status);
        let seen = account(&page);
        assert_eq!((held(&seen), drift(&seen)), (once(expected), "0".to_owned()), "{status}");
        assert!(seen.take_up.is_empty() && seen.raise.is_empty(), "{status}");
    }
}

/// I4, I6: what went back once too often is missing until a person has decided about it.
#[test]
fn a_refund_that_landed_and_was_not_to_shows() {
    let over = || page(OrderStatus::Canceled, None);
    let paid = || page(OrderStatus::Paid, Some("p"));
    let again = |open, decided| RefundsAgain { open, decided };
    let (flagged, refunded) = (Account::Flagged, Account::Refunded);
    let one = |account| (account, MOVED.to_owned());
    for (mut page, status, again, expected, missing) in [
        (over(), RefundStatus::Paid, again(1, 0), vec![one(refunded), one(flagged)], "-1000000"),
        (over(), RefundStatus::Paid, again(0, 1), vec![one(refunded)], "0"),
        // It came once and went back once, and yet the record says otherwise.
        (over(), RefundStatus::Void, again(1, 0), vec![one(flagged)], "0"),
        (over(), RefundStatus::Void, again(0, 1), vec![one(flagged)], "0"),
        (
            paid(),
            RefundStatus::Void,
            again(1, 0),
            vec![one(Account::Paid), one(flagged)],
            "-1000000",
        ),
        (paid(), RefundStatus::Void, again(0, 1), vec![one(Account::Paid)], "0"),
        // Found again by the search of a record that is owed once more, which closes it.
        (over(), RefundStatus::Owed, again(1, 0), vec![one(Account::Owed)], "0"),
    ] {
        refund(&mut page, status);
        page.again.insert(PaymentId::from("p"), again);
        let seen = account(&page);
        assert_eq!(
            (held(&seen), drift(&seen)),
            (expected, missing.to_owned()),
            "{status} {again:?}"
        );
        assert_eq!(seen.mark.is_empty(), missing == "0", "{status}: it stays in view");
    }
    let mut twice = over();
    refund(&mut twice, RefundStatus::Void);
    twice.again.insert(PaymentId::from("p"), again(2, 0));
    assert_eq!(drift(&account(&twice)), "-1000000");
}

#[test]
fn money_that_pays_an_order_and_is_owed_back_counts_twice() {
    let mut page = page(OrderStatus::Paid, Some("p"));
    refund(&mut page, RefundStatus::Owed);
    let seen = account(&page);
    assert_eq!(drift(&seen), "-1000000");
    assert_eq!(seen.mark, [1]);
    refund(&mut page, RefundStatus::Void);
    assert_eq!(drift(&account(&page)), "0", "called off, it is not owed");
}

/// A second settled payment of a paid order, without a refund record.
#[test]
fn a_double_payment_of_an_order_drifts_and_is_taken_up() {
    let mut page = page(OrderStatus::Paid, Some("p"));
    let second = Payment { status: PaymentStatus::Settled, ..payment("q", "o") };
    page.transfers.push(scanned(2, &second));
    page.payments.insert(second.id.clone(), second);
    let seen = account(&page);
    assert_eq!(held(&seen), once(Account::Paid));
    assert_eq!(drift(&seen), MOVED);
    assert_eq!(seen.take_up, [PaymentId::from("q")].into());
    assert_eq!(seen.mark, [2]);
    assert_eq!(seen.unaccounted[0].payment_id, Some(PaymentId::from("q")));
    page.watched.insert(PaymentId::from("q"));
    let followed = account(&page);
    assert_eq!(drift(&followed), "0", "followed, it is open and not lost");
    assert!(followed.take_up.is_empty(), "every full reconcile reads it anyway");
}

#[test]
fn a_transfer_that_the_scan_missed_drifts_the_other_way() {
    let mut page = page(OrderStatus::Paid, Some("p"));
    page.transfers[0].scanned = false;
    page.transfers[0].payment_id = Some(PaymentId::from("p"));
    let seen = account(&page);
    assert_eq!((held(&seen), drift(&seen)), (once(Account::Paid), "-1000000".to_owned()));
    page.transfers[0].scanned = true;
    page.transfers[0].marked = true;
    let seen = account(&page);
    assert_eq!((drift(&seen), seen.unmark), ("0".to_owned(), vec![1]));
}

#[test]
fn lost_records_drift() {
    // The refund record is gone, its payment is not followed any more: taken up.
    let seen = account(&page(OrderStatus::Expired, None));
    assert!(seen.take_up.is_empty(), "the gateway settled it, and may have paid it back by hand");
    assert_eq!(seen.raise[0].flag.kind, FlagKind::SettledOrderOver);
    // Resolved by a check, then the payment's row is gone: nobody can say what it paid.
    let mut gone = page(OrderStatus::Paid, Some("p"));
    gone.transfers[0].payment_id = Some(PaymentId::from("p"));
    gone.payments.clear();
    let seen = account(&gone);
    assert_eq!((drift(&seen), held(&seen)), (MOVED.to_owned(), Vec::new()));
    // The transfer's own row is gone, the refund's is not.
    let unbacked = Unbacked {
        receiver: receiver(),
        account: Account::Owed,
        amount: MOVED.parse().unwrap(),
        subject: "p".to_owned(),
    };
    let mut totals = BTreeMap::new();
    let told = unbacked.add_to(&mut totals);
    assert_eq!(told.drift.to_string(), "-1000000");
    assert_eq!(totals[&receiver()].drift().to_string(), "-1000000");
}

/// The gateway settled it and then ended the order: nobody knows whether it paid the money back by hand.
#[test]
fn money_of_an_order_that_is_over_is_flagged_and_never_owed_back_unasked() {
    for status in [OrderStatus::Failed, OrderStatus::Expired, OrderStatus::Canceled] {
        let mut page = page(status, None);
        let seen = account(&page);
        assert_eq!((held(&seen), drift(&seen)), (once(Account::Flagged), "0".to_owned()));
        assert_eq!(seen.raise[0].flag.kind, FlagKind::SettledOrderOver);
        let key = (FlagKind::SettledOrderOver, "p".to_owned());
        for state in [FlagState::Open, FlagState::Decided] {
            page.flags.insert(key.clone(), state);
            let seen = account(&page);
            assert_eq!((held(&seen), seen.raise), (once(Account::Flagged), Vec::new()));
        }
        page.flags.insert(key, FlagState::Open);
        refund(&mut page, RefundStatus::Owed);
        let seen = account(&page);
        assert_eq!(held(&seen), once(Account::Owed));
        assert_eq!(seen.close[0].kind, FlagKind::SettledOrderOver);
    }
}

#[test]
fn matched_money_that_nobody_resolved_is_taken_up() {
    let failed = |status| {
        let mut page = page(OrderStatus::Failed, None);
        page.payments.values_mut().for_each(|p| p.status = status);
        page
    };
    let mut undelivered = page(OrderStatus::Undelivered, Some("p"));
    undelivered.orders.values_mut().for_each(|o| o.kind = OrderKind::Call);
    for (why, page) in [
        ("failed, and it landed all the same", failed(PaymentStatus::Failed)),
        ("nobody polls it", failed(PaymentStatus::Unknown)),
        ("settled, and its order still open", page(OrderStatus::Paying, None)),
        ("settled, and owed back", undelivered),
        ("paid by nobody knows whom", page(OrderStatus::Paid, None)),
    ] {
        let seen = account(&page);
        assert_eq!(seen.take_up, [PaymentId::from("p")].into(), "{why}");
        assert!(seen.raise.is_empty(), "{why}");
        assert_eq!(drift(&seen), MOVED, "{why}: until it is resolved");
    }
}

#[test]
fn a_flag_about_a_payment_s_money_accounts_for_it() {
    let mut page = page(OrderStatus::Paid, None);
    for state in [FlagState::Open, FlagState::Decided] {
        page.flags.insert((FlagKind::PaidByUnknown, "p".to_owned()), state);
        let seen = account(&page);
        assert_eq!((held(&seen), drift(&seen)), (once(Account::Flagged), "0".to_owned()));
    }
}

#[test]
fn money_that_no_payment_claims_is_flagged_with_all_that_is_known() {
    let mut page = page(OrderStatus::Paid, Some("p"));
    page.payments.clear();
    page.orders.clear();
    let seen = account(&page);
    assert_eq!((held(&seen), drift(&seen)), (once(Account::Flagged), "0".to_owned()));
    let flag = &seen.raise[0].flag;
    let p = payment("p", "o");
    assert_eq!(flag.kind, FlagKind::UnmatchedTransfer);
    assert_eq!(flag.subject, format!("8453:{}:5", p.nonce));
    for key in ["token", "from", "pay_to", "amount", "block", "tx_hash", "log_index", "nonce"] {
        assert!(!flag.detail[key].is_null(), "{key} is in {}", flag.detail);
    }
    page.flags.insert((FlagKind::UnmatchedTransfer, flag.subject.clone()), FlagState::Decided);
    let seen = account(&page);
    assert_eq!((held(&seen), seen.raise), (once(Account::Flagged), Vec::new()));
}

/// The authorization was used, into the right address, for another amount: that pays nothing.
#[test]
fn money_of_a_known_authorization_that_pays_another_amount_is_nobody_s() {
    let mut page = page(OrderStatus::Paid, Some("p"));
    page.transfers[0].transfer.value = amount(400_000);
    let seen = account(&page);
    assert_eq!(held(&seen), [(Account::Flagged, "400000".to_owned())]);
    assert_eq!(seen.raise[0].flag.detail["candidates"][0]["payment"], "p");
}

#[test]
fn a_row_that_appears_late_closes_the_flag_and_says_so() {
    let mut page = page(OrderStatus::Paid, Some("p"));
    let subject = log_subject(&page.transfers[0].transfer);
    page.flags.insert((FlagKind::UnmatchedTransfer, subject.clone()), FlagState::Open);
    page.flags.insert((FlagKind::SettledWithoutTransfer, "p".to_owned()), FlagState::Open);
    let seen = account(&page);
    let closed: Vec<_> = seen.close.iter().map(|flag| (flag.kind, flag.note.as_str())).collect();
    assert_eq!(
        closed,
        [
            (FlagKind::UnmatchedTransfer, "payment p claims it"),
            (FlagKind::SettledWithoutTransfer, "its transfer was found"),
        ]
    );
    assert_eq!((held(&seen), drift(&seen)), (once(Account::Paid), "0".to_owned()));
    page.flags.insert((FlagKind::UnmatchedTransfer, subject), FlagState::Decided);
    let seen = account(&page);
    let kinds: Vec<FlagKind> = seen.close.iter().map(|flag| flag.kind).collect();
    assert_eq!(kinds, [FlagKind::SettledWithoutTransfer], "what a person closed stays as it is");
}

#[test]
fn of_two_payments_with_one_authorization_one_owns_the_transfer() {
    let mut page = page(OrderStatus::Paid, Some("p"));
    let reused = Payment {
        id: PaymentId::from("a"),
        order_id: OrderId::from("other"),
        status: PaymentStatus::Failed,
        ..payment("p", "o")
    };
    page.payments.insert(reused.id.clone(), reused);
    let seen = account(&page);
    assert_eq!((held(&seen), seen.take_up.len()), (once(Account::Paid), 0));
}

/// I3: one transfer was taken for the settlement of two orders, by the gateway alone or after our own check.
#[test]
fn who_was_called_settled_by_another_payment_s_transfer_is_flagged() {
    let other = |status| Payment {
        id: PaymentId::from("q"),
        order_id: OrderId::from("other"),
        status,
        ..payment("p", "o")
    };
    let (settled, failed) = (PaymentStatus::Settled, PaymentStatus::Failed);
    for recorded in [None, Some(PaymentId::from("p"))] {
        for (status, pays, is_flagged) in [
            (settled, true, true),
            (settled, false, true),
            (failed, true, true),
            (failed, false, false),
        ] {
            let mut page = page(OrderStatus::Paid, Some("p"));
            page.transfers[0].payment_id = recorded.clone();
            page.payments.insert(PaymentId::from("q"), other(status));
            let order = order("other", OrderStatus::Paid, pays.then_some("q"));
            page.orders.insert(order.id.clone(), order);
            let seen = account(&page);
            let why = format!("{recorded:?} {status:?} {pays}");
            assert_eq!(held(&seen), once(Account::Paid), "{why}: it moved once");
            let flagged: Vec<_> =
                seen.raise.iter().map(|r| (r.flag.kind, r.payment_id.clone())).collect();
            let expected = (FlagKind::SettledWithoutTransfer, Some(PaymentId::from("q")));
            assert_eq!(flagged, Vec::from_iter(is_flagged.then_some(expected)), "{why}");
            for state in [FlagState::Open, FlagState::Decided] {
                page.flags.insert((FlagKind::SettledWithoutTransfer, "q".to_owned()), state);
                let again = account(&page);
                assert!(again.raise.is_empty() && again.close.is_empty(), "{why}: once");
            }
        }
    }
    // The row it was found to be is gone.
    let mut gone = page(OrderStatus::Paid, Some("p"));
    gone.transfers[0].payment_id = Some(PaymentId::from("lost"));
    assert_eq!(account(&gone).raise[0].payment_id, Some(PaymentId::from("p")));
}

#[test]
fn only_blocks_that_were_scanned_are_accounted_for() {
    let page = page(OrderStatus::Paid, Some("p"));
    let at = |first, last| page.account(&BTreeMap::from([(receiver(), Scanned { first, last })]));
    assert!(at(101, 200).totals.is_empty() && at(1, 99).totals.is_empty());
    assert_eq!((at(100, 100).totals.len(), at(1, 200).totals.len()), (1, 1));
    assert!(page.account(&BTreeMap::new()).totals.is_empty());
}

#[test]
fn drift_reads_as_it_was_written() {
    for text in ["0", "17", "-17", "340282366920938463463374607431768211456"] {
        let drift: Drift = serde_json::from_value(text.into()).unwrap();
        assert_eq!(drift.to_string(), text);
        assert_eq!(serde_json::to_value(drift).unwrap(), text);
        assert_eq!(drift.is_zero(), text == "0");
        assert_eq!(drift.as_f64(), text.parse::<f64>().unwrap());
    }
}
