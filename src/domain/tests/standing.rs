//! Flags of payments that nobody follows: each kind closes when its cause is gone, and only then.

use std::collections::BTreeSet;

use super::support::*;
use crate::domain::{FlagKind as K, *};

/// Payment `p` of order `o`, closed, with a flag of this kind open.
fn page(kind: K, status: PaymentStatus, order_row: Option<Order>) -> FlaggedPage {
    let mut page = FlaggedPage::default();
    page.flags.push(StoredFlag {
        id: 1,
        kind,
        payment_id: Some(PaymentId::from("p")),
        order_id: Some(OrderId::from("o")),
        subject: "an occasion".to_owned(),
        detail: serde_json::json!({}),
        opened_at: secs(10),
        closed: None,
    });
    let p = Payment { status, ..payment("p", "o") };
    page.rows.payments.insert(p.id.clone(), p);
    page.rows.orders.extend(order_row.map(|order| (order.id.clone(), order)));
    page
}

fn closes(page: &FlaggedPage) -> bool {
    let gone = page.gone(&BTreeSet::from([CHAIN]));
    for one in &gone {
        let flag = &page.flags[0];
        assert_eq!((one.kind, &one.payment_id), (flag.kind, &flag.payment_id));
        assert_eq!(one.subject.as_deref(), Some("an occasion"), "this flag and no other");
        assert_eq!(Some(one.note.as_str()), flag.kind.cause_gone(), "it says why");
    }
    !gone.is_empty()
}

fn id() -> PaymentId {
    PaymentId::from("p")
}

/// A page on which the flag's cause is gone, and one on which it is not. `None`: no row about a payment says
/// so of this kind.
fn gone_and_not(kind: K) -> Option<(FlaggedPage, FlaggedPage)> {
    use OrderStatus as O;
    use PaymentStatus as P;
    let over = |status| Some(order("o", status, None));
    let paid = |by| Some(order("o", O::Paid, by));
    let with = |mut page: FlaggedPage, refund: Option<RefundStatus>, finality| {
        page.rows.refunds.extend(refund.map(|status| (id(), (status, amount(1)))));
        page.finality.extend(Option::map(finality, |finality| (id(), finality)));
        page
    };
    let unreadable = |mut page: FlaggedPage| {
        page.rows.payments.clear();
        page
    };
    let elsewhere = |mut page: FlaggedPage| {
        for payment in page.rows.payments.values_mut() {
            payment.chain_id = ChainId::new(1);
        }
        page
    };
    let tempo = |mut page: FlaggedPage| {
        for payment in page.rows.payments.values_mut() {
            payment.method = Method::Tempo;
        }
        page
    };
    let final_ = Some(Finality::Final);
    Some(match kind {
        K::MalformedPayment => {
            (page(kind, P::Unknown, None), unreadable(page(kind, P::Unknown, None)))
        }
        K::ChainNotConfigured => {
            (elsewhere(page(kind, P::Failed, None)), elsewhere(page(kind, P::Unknown, None)))
        }
        K::UnsupportedMethod => {
            (tempo(page(kind, P::Settled, None)), tempo(page(kind, P::Unknown, None)))
        }
        K::InconclusiveAtDeadline => (page(kind, P::Settled, None), page(kind, P::Unknown, None)),
        K::OrderUnreadable => {
            (page(kind, P::Unknown, over(O::Paying)), page(kind, P::Unknown, None))
        }
        K::SettledWithoutTransfer => (page(kind, P::Failed, None), page(kind, P::Settled, None)),
        K::SettledOrderOver => (
            with(page(kind, P::Settled, over(O::Failed)), Some(RefundStatus::Owed), final_),
            with(page(kind, P::Settled, over(O::Failed)), None, final_),
        ),
        K::PaidByUnknown => {
            (page(kind, P::Unknown, paid(Some("q"))), page(kind, P::Unknown, paid(None)))
        }
        K::RefundContradicted => (
            with(page(kind, P::Settled, paid(Some("p"))), Some(RefundStatus::Void), final_),
            with(page(kind, P::Settled, paid(Some("p"))), Some(RefundStatus::Owed), final_),
        ),
        K::ReorgedAfterDelivery => (
            with(page(kind, P::Settled, paid(Some("p"))), None, final_),
            with(page(kind, P::Settled, paid(Some("p"))), None, Some(Finality::Tentative)),
        ),
        K::ReorgedAfterRefund => (
            with(page(kind, P::Settled, over(O::Failed)), Some(RefundStatus::Paid), final_),
            with(page(kind, P::Settled, over(O::Failed)), Some(RefundStatus::Void), final_),
        ),
        // A resolution closes it.
        K::AuthorizationContested => return None,
        // The accounting and the search for refunds close these; the rest is a person's.
        K::UnmatchedTransfer | K::RefundedAgain | K::MalformedRefund => return None,
        K::NonceUsedElsewhere
        | K::AuthorizationReused
        | K::StockMissing
        | K::RefundMismatch
        | K::FinalizedReorg => return None,
    })
}

#[test]
fn every_kind_closes_when_its_cause_is_gone_and_nobody_follows_the_payment() {
    for kind in K::ALL {
        let Some((gone, holds)) = gone_and_not(*kind) else {
            for status in PaymentStatus::ALL {
                assert!(!closes(&page(*kind, *status, None)), "{kind} {status}");
            }
            continue;
        };
        assert!(kind.cause_gone().is_some(), "{kind}");
        assert!(closes(&gone), "{kind}");
        assert!(!closes(&holds), "{kind}");
        let mut followed = gone;
        followed.rows.watched.insert(id());
        assert!(!closes(&followed), "{kind}: its next resolution says so");
    }
}

#[test]
fn more_ways_in_which_a_cause_goes() {
    let found = |finality| {
        let mut page = page(K::SettledWithoutTransfer, PaymentStatus::Settled, None);
        page.finality.insert(id(), finality);
        page
    };
    assert!(closes(&found(Finality::Final)) && closes(&found(Finality::Tentative)));
    assert!(closes(&page(K::ChainNotConfigured, PaymentStatus::Unknown, None)), "it is by now");
    let pays = Some(order("o", OrderStatus::Paid, Some("p")));
    assert!(closes(&page(K::SettledOrderOver, PaymentStatus::Settled, pays)));
}

/// A flag about no payment, or one whose row is gone, is left to others.
#[test]
fn what_names_no_payment_closes_nothing_here() {
    let mut none = page(K::UnmatchedTransfer, PaymentStatus::Settled, None);
    none.flags[0].payment_id = None;
    assert!(!closes(&none));
    assert_eq!(none.unmatched(), ["an occasion"]);
    let mut missing = page(K::InconclusiveAtDeadline, PaymentStatus::Failed, None);
    missing.rows.payments.clear();
    assert!(!closes(&missing));
}
