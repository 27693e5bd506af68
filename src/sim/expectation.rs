//! What must hold at a moment of a story, and how what was found differs from it.
//!
//! Pure: whoever runs the story looks into the database and fills an [`Observed`].

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde::Deserialize;

use super::scenario::duration;
use crate::domain::{
    Amount, IdentifierStatus, OrderStatus, PaymentStatus, RefundReason, RefundStatus,
    ReservationStatus,
};

/// `[[expect]]`: only what is named is compared.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Expect {
    /// When, from the start of the story.
    #[serde(deserialize_with = "duration")]
    pub at: Duration,
    /// Statuses by order.
    #[serde(default)]
    pub orders: BTreeMap<String, OrderStatus>,
    /// The payment that pays, by order.
    #[serde(default)]
    pub paid_by: BTreeMap<String, String>,
    /// Statuses by payment.
    #[serde(default)]
    pub payments: BTreeMap<String, PaymentStatus>,
    /// What is on the shelf, by sku.
    #[serde(default)]
    pub stock: BTreeMap<String, i64>,
    /// What became of the reservations, by order.
    #[serde(default)]
    pub reservations: BTreeMap<String, ReservationStatus>,
    /// Statuses by identifier.
    #[serde(default)]
    pub identifiers: BTreeMap<String, IdentifierStatus>,
    /// The whole list of refund records, in any order.
    pub refunds: Option<Vec<Refund>>,
    /// What reached the buyer of each payment on the chain.
    #[serde(default)]
    pub refunded: BTreeMap<String, Amount>,
    /// The whole list of open flags as `kind:PAYMENT`, or `kind` alone where it is no payment's.
    pub flags: Option<Vec<String>>,
    /// Events as `kind:NAME` that have occurred, in this order; others may stand between them.
    #[serde(default)]
    pub events: Vec<String>,
    /// The drift of the last full reconcile, in base units.
    pub drift: Option<String>,
    /// At most so many RPC requests so far.
    pub reads_at_most: Option<u64>,
}

/// A refund record, as far as stories speak of it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Refund {
    /// The payment whose money it is.
    pub payment: String,
    /// Why.
    pub reason: RefundReason,
    /// How much.
    pub amount: Amount,
    /// Where it stands.
    pub status: RefundStatus,
}

impl fmt::Display for Refund {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { payment, reason, amount, status } = self;
        write!(f, "{payment} {reason} {amount} {status}")
    }
}

/// What was found, in the words of the database.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Observed {
    /// Statuses by order.
    pub orders: BTreeMap<String, String>,
    /// The payment that pays, by order; no entry for an order that nothing pays.
    pub paid_by: BTreeMap<String, String>,
    /// Statuses by payment.
    pub payments: BTreeMap<String, String>,
    /// What is on the shelf, by sku.
    pub stock: BTreeMap<String, i64>,
    /// What became of the reservations, by order; where an order's differ, all of them, joined by `+`.
    pub reservations: BTreeMap<String, String>,
    /// Statuses by identifier.
    pub identifiers: BTreeMap<String, String>,
    /// Every refund record.
    pub refunds: Vec<Refund>,
    /// What reached the buyer on the chain, by payment.
    pub refunded: BTreeMap<String, Amount>,
    /// Every open flag, as `kind:PAYMENT`, or `kind` alone where it is no payment's.
    pub flags: Vec<String>,
    /// Every event, as `kind:NAME`, oldest first.
    pub events: Vec<String>,
    /// The drift of the last full reconcile, in base units; `None` before the first.
    pub drift: Option<String>,
    /// RPC requests so far.
    pub reads: u64,
}

/// One thing that is not as it must be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// What: `orders.o`, `flags`, …
    pub what: String,
    /// What must be.
    pub expected: String,
    /// What is.
    pub found: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: expected {}, found {}", self.what, self.expected, self.found)
    }
}

const NOTHING: &str = "nothing";

/// Compares what must hold with what was found; empty when all of it does.
pub fn check(expect: &Expect, observed: &Observed) -> Vec<Difference> {
    let mut differences = Differences(Vec::new());
    differences.maps("orders", &expect.orders, &observed.orders);
    differences.maps("paid_by", &expect.paid_by, &observed.paid_by);
    differences.maps("payments", &expect.payments, &observed.payments);
    differences.maps("stock", &expect.stock, &observed.stock);
    differences.maps("reservations", &expect.reservations, &observed.reservations);
    differences.maps("identifiers", &expect.identifiers, &observed.identifiers);
    if let Some(refunds) = &expect.refunds {
        differences.whole_lists("refunds", refunds, &observed.refunds);
    }
    differences.maps("refunded", &expect.refunded, &observed.refunded);
    if let Some(flags) = &expect.flags {
        differences.whole_lists("flags", flags, &observed.flags);
    }
    if !occurred_in_order(&expect.events, &observed.events) {
        differences.add("events", list(&expect.events), list(&observed.events));
    }
    if let Some(drift) = &expect.drift {
        let found = observed.drift.as_deref().unwrap_or(NOTHING);
        if drift != found {
            differences.add("drift", drift, found);
        }
    }
    if let Some(most) = expect.reads_at_most.filter(|most| observed.reads > *most) {
        differences.add("reads", format!("at most {most}"), observed.reads);
    }
    differences.0
}

struct Differences(Vec<Difference>);

impl Differences {
    fn add(&mut self, what: impl Into<String>, expected: impl ToString, found: impl ToString) {
        let (expected, found) = (expected.to_string(), found.to_string());
        self.0.push(Difference { what: what.into(), expected, found });
    }

    fn maps<E: ToString, F: ToString>(
        &mut self,
        what: &str,
        expected: &BTreeMap<String, E>,
        found: &BTreeMap<String, F>,
    ) {
        for (name, value) in expected {
            let expected = value.to_string();
            let found = found.get(name).map_or_else(|| NOTHING.to_owned(), F::to_string);
            if expected != found {
                self.add(format!("{what}.{name}"), expected, found);
            }
        }
    }

    fn whole_lists<T: Ord + Clone + fmt::Display>(
        &mut self,
        what: &str,
        expected: &[T],
        found: &[T],
    ) {
        let (mut expected, mut found) = (expected.to_vec(), found.to_vec());
        expected.sort();
        found.sort();
        if expected != found {
            self.add(what, list(&expected), list(&found));
        }
    }
}

/// Whether every expected event occurred, each after the one before it.
fn occurred_in_order(expected: &[String], found: &[String]) -> bool {
    let mut rest = found.iter();
    expected.iter().all(|event| rest.any(|other| other == event))
}

fn list<T: fmt::Display>(items: &[T]) -> String {
    let items: Vec<String> = items.iter().map(T::to_string).collect();
    format!("[{}]", items.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expect(text: &str) -> Expect {
        toml::from_str(text).unwrap()
    }

    fn texts(expect: &Expect, observed: &Observed) -> Vec<String> {
        check(expect, observed).iter().map(Difference::to_string).collect()
    }

    fn map(key: &str, value: &str) -> BTreeMap<String, String> {
        BTreeMap::from([(key.to_owned(), value.to_owned())])
    }

    #[test]
    fn differences_name_what_was_expected_and_what_was_found() {
        let expect = expect(
            r#"
            at = "1m"
            orders = { o = "paid" }
            paid_by = { o = "p1" }
            stock = { mug = 3 }
            drift = "0"
            reads_at_most = 10
            "#,
        );
        let observed = Observed {
            orders: map("o", "paying"),
            stock: BTreeMap::from([("mug".to_owned(), 4)]),
            reads: 11,
            ..Observed::default()
        };
        assert_eq!(
            texts(&expect, &observed),
            [
                "orders.o: expected paid, found paying",
                "paid_by.o: expected p1, found nothing",
                "stock.mug: expected 3, found 4",
                "drift: expected 0, found nothing",
                "reads: expected at most 10, found 11",
            ]
        );
    }

    #[test]
    fn only_what_is_named_is_compared() {
        let observed = Observed {
            orders: map("o", "paying"),
            flags: vec!["nonce_used_elsewhere:p1".to_owned()],
            drift: Some("5".to_owned()),
            ..Observed::default()
        };
        assert_eq!(texts(&expect(r#"at = "1m""#), &observed), [""; 0]);
    }

    #[test]
    fn refunds_and_flags_are_whole_lists_in_any_order() {
        let named = expect(
            r#"
            at = "1m"
            refunds = [{ payment = "p1", reason = "late", amount = "5", status = "owed" }]
            flags = ["b:p1", "a"]
            "#,
        );
        let mut observed = Observed {
            refunds: named.refunds.clone().unwrap(),
            flags: vec!["a".to_owned(), "b:p1".to_owned()],
            ..Observed::default()
        };
        assert_eq!(texts(&named, &observed), [""; 0]);

        observed.refunds[0].amount = "6".parse().unwrap();
        observed.flags.push("a".to_owned());
        assert_eq!(
            texts(&named, &observed),
            [
                "refunds: expected [p1 late 5 owed], found [p1 late 6 owed]",
                "flags: expected [a, b:p1], found [a, a, b:p1]",
            ]
        );
        let none = expect("at = \"1m\"\nrefunds = []");
        assert_eq!(texts(&none, &observed), ["refunds: expected [], found [p1 late 6 owed]"]);
    }

    #[test]
    fn events_occur_in_the_order_named() {
        let named = expect("at = \"1m\"\nevents = [\"order.failed:o\", \"order.paid:o\"]");
        let observed = |events: &[&str]| Observed {
            events: events.iter().map(|event| (*event).to_owned()).collect(),
            ..Observed::default()
        };
        let right = observed(&["order.failed:o", "refund.owed:p1", "order.paid:o"]);
        assert_eq!(texts(&named, &right), [""; 0]);
        for wrong in [&["order.paid:o", "order.failed:o"][..], &["order.paid:o"], &[]] {
            assert_eq!(texts(&named, &observed(wrong)).len(), 1, "{wrong:?}");
        }
    }
}
