//! What the database refuses, and leases that are lost: nothing is half written, and nobody else waits.

use reconciled::domain::{Outcome, PaymentId, Phase, Policy};
use reconciled::store::ApplyFailure;

use super::harness::{
    T0, TestDb, at, expired, failure, hours, ids, judged, lease, outcome, settled,
};

for_each_backend!(
    all_of_a_resolution_is_written_or_nothing,
    a_refused_payment_is_tried_again_later,
    one_bad_order_in_a_batch_stops_nothing_else,
    the_payments_of_one_order_share_its_fate,
    stock_that_is_on_no_shelf_is_released_and_flagged,
    nothing_is_written_under_a_lost_lease,
    an_empty_batch_is_answered_with_nothing,
);

/// I7: whichever statement of the transaction fails.
async fn all_of_a_resolution_is_written_or_nothing(db: &TestDb) {
    for table in ["transfers", "retry_outcomes", "events", "resolutions"] {
        let (order, id, key) = (format!("o {table}"), format!("p {table}"), format!("key {table}"));
        db.order_with_stock(&order, &format!("sku {table}")).await;
        db.payment(&id, &order).await;
        db.gateway.insert_identifier(&key, &id, "in_flight", None).await.unwrap();
        db.refuse_inserts(table, &id).await;

        let batch = vec![judged(&id, settled(&id))];
        let applied = db.apply_at(at(30), &Policy::default(), batch).await;

        let ApplyFailure::Refused(text) = failure(&applied, &id) else { panic!("{applied:?}") };
        assert!(text.contains("refuse"), "the database's own words: {text}");
        assert_eq!(db.payment_status(&id).await, "unknown");
        assert_eq!(db.order_status(&order).await, ("paying".to_owned(), None));
        assert_eq!(db.reservation(&format!("{order}/sku {table}")).await, "held");
        assert_eq!(db.identifier(&key).await, "in_flight");
        for untouched in
            ["transfers", "retry_outcomes", "events", "resolutions", "refunds_owed", "flags"]
        {
            let rows = db.count(&format!("{{{untouched}}}")).await;
            assert_eq!(rows, 0, "{untouched}, when {table} is refused");
        }
        db.allow_inserts(table).await;
    }
}

async fn a_refused_payment_is_tried_again_later(db: &TestDb) {
    db.paying_order("o", "p").await;
    db.refuse_inserts("events", "p").await;
    let batch = vec![judged("p", settled("p"))];
    db.discover().await;
    let (held, _) = db.lease_all().await;
    db.store.apply(&held, batch, &Policy::default(), at(30)).await.unwrap();
    assert_eq!(db.store.release(&held).await.unwrap(), 0, "its lease was given back");
    let story = db.store.story(&PaymentId::from("p")).await.unwrap().unwrap();
    let watch = story.watch.unwrap();
    assert_eq!((watch.phase, watch.next_check_at), (Phase::Targeted, Some(at(40))));
    assert_eq!(watch.checks_done, 1);
    let detail = story.checks[0].detail.clone().unwrap();
    assert!(detail.starts_with("not applied: "), "{detail}");

    db.allow_inserts("events").await;
    assert_eq!(db.apply("p", settled("p")).await.outcome, Outcome::Paid);
}

/// I11.
async fn one_bad_order_in_a_batch_stops_nothing_else(db: &TestDb) {
    for n in 1..=4 {
        db.paying_order(&format!("o{n}"), &format!("p{n}")).await;
    }
    db.refuse_inserts("resolutions", "p2").await;
    let batch = (1..=4).map(|n| format!("p{n}")).map(|id| judged(&id, settled(&id))).collect();
    let applied = db.apply_at(at(30), &Policy::default(), batch).await;
    assert_eq!(applied.len(), 4);
    assert!(matches!(failure(&applied, "p2"), ApplyFailure::Refused(_)));
    for n in [1, 3, 4] {
        assert_eq!(outcome(&applied, &format!("p{n}")), Outcome::Paid);
        assert_eq!(db.order_status(&format!("o{n}")).await.0, "paid");
    }
    assert_eq!(db.order_status("o2").await.0, "paying");
    assert_eq!(db.count("{events}").await, 3);
}

/// They depend on each other: resolving one without the other could pay the wrong one.
async fn the_payments_of_one_order_share_its_fate(db: &TestDb) {
    db.paying_order("o", "a").await;
    db.payment("b", "o").await;
    db.paying_order("q", "c").await;
    db.refuse_inserts("resolutions", "b").await;
    let batch = ["a", "b", "c"].map(|id| judged(id, settled(id))).to_vec();
    let applied = db.apply_at(at(30), &Policy::default(), batch).await;
    for id in ["a", "b"] {
        assert!(matches!(failure(&applied, id), ApplyFailure::Refused(_)));
        assert_eq!(db.payment_status(id).await, "unknown");
    }
    assert_eq!(outcome(&applied, "c"), Outcome::Paid);
    assert_eq!(db.order_status("o").await, ("paying".to_owned(), None));
}

/// I5: released once, and only what has a shelf goes back on one.
async fn stock_that_is_on_no_shelf_is_released_and_flagged(db: &TestDb) {
    db.order("o").await;
    db.gateway.insert_reservation("o", "sku", 2, "held").await.unwrap();
    db.payment("p", "o").await;
    let batch = vec![judged("p", expired(hours(24)))];
    db.apply_at(at(hours(24)), &Policy::default(), batch).await;
    assert_eq!(db.payment_status("p").await, "failed");
    assert_eq!(db.order_status("o").await.0, "failed");
    assert_eq!(db.reservation("o/sku").await, "released");
    assert_eq!(db.flags().await, ["stock_missing:p"]);
}

/// I10: the check of whoever has the watch now counts.
async fn nothing_is_written_under_a_lost_lease(db: &TestDb) {
    db.paying_order("o", "lost").await;
    db.paying_order("q", "kept").await;
    db.discover().await;
    let old = lease(T0, at(10));
    assert_eq!(db.store.lease_due(&old, 10).await.unwrap().len(), 2);
    let other = lease(at(10), at(60));
    let after = PaymentId::from("kept");
    let theirs = db.store.lease_page(&other, Some(&after), 10).await.unwrap();
    assert_eq!(ids(&theirs), ["lost"]);

    let batch = ["lost", "kept"].map(|id| judged(id, settled(id))).to_vec();
    let applied = db.store.apply(&old, batch, &Policy::default(), at(30)).await.unwrap();
    assert_eq!(applied.len(), 2);
    assert_eq!(failure(&applied, "lost"), ApplyFailure::LeaseLost);
    assert_eq!(outcome(&applied, "kept"), Outcome::Paid, "a lease that ran out is not yet lost");
    assert_eq!(db.payment_status("lost").await, "unknown");
    assert_eq!(db.order_status("o").await.0, "paying");
    assert_eq!(db.count("{checks}").await, 1);
    assert_eq!(db.store.release(&other).await.unwrap(), 1, "the other lease still holds");
}

async fn an_empty_batch_is_answered_with_nothing(db: &TestDb) {
    let held = lease(T0, at(60));
    assert!(db.store.apply(&held, Vec::new(), &Policy::default(), T0).await.unwrap().is_empty());
    assert_eq!(db.store.reschedule(&held, &[]).await.unwrap(), 0);
}
