//! What people and metrics read, and pruning.

use reconciled::domain::{
    FlagKind, PaymentId, Phase, Policy, RefundReason, RefundStatus, Unsettleable,
};
use reconciled::store::{Figures, STORY_CHECKS_MAX};

use super::harness::{T0, TestDb, at, hours, judged, pending, settled, tentative, unsettleable};

for_each_backend!(
    the_story_of_a_payment_is_told_whole,
    the_story_of_a_row_that_makes_no_sense_is_told_too,
    an_unheard_of_payment_has_no_story,
    a_story_tells_of_the_newest_checks_oldest_first,
    the_payments_of_an_order_are_found,
    figures_count_what_is_open_owed_and_flagged,
    old_checks_are_pruned_a_few_at_a_time,
    events_are_pruned_once_acknowledged_and_old,
);

async fn the_story_of_a_payment_is_told_whole(db: &TestDb) {
    db.order_with_stock("o", "sku").await;
    db.payment("p", "o").await;
    db.payment("sibling", "o").await;
    let secret = "UPDATE payments SET credential = 'the signature' WHERE id = 'p'";
    db.gateway.execute(secret, &[]).await.unwrap();
    db.gateway.insert_identifier("key", "p", "in_flight", None).await.unwrap();
    db.apply("p", unsettleable(Unsettleable::UsedElsewhere, 70)).await;
    db.apply("p", settled("p")).await;
    let story = db.store.story(&PaymentId::from("p")).await.unwrap().unwrap();
    let payment = &story.payment;
    assert_eq!((&payment["id"], &payment["status"]), (&"p".into(), &"settled".into()));
    assert_eq!(payment["amount"].to_string().trim_matches('"'), "1000000");
    assert!(payment.get("tx_hash").is_none(), "null columns are left out");
    assert!(!serde_json::to_string(&story).unwrap().contains("the signature"));
    assert_eq!(story.order.unwrap()["status"], "paid");
    assert_eq!(story.siblings.len(), 1);
    assert_eq!(
        (&story.siblings[0]["id"], &story.siblings[0]["status"]),
        (&"sibling".into(), &"unknown".into())
    );
    assert_eq!(story.reservations[0]["status"], "committed");
    assert_eq!(
        (&story.identifiers[0]["id"], &story.identifiers[0]["status"]),
        (&"key".into(), &"settled".into())
    );
    let watch = story.watch.unwrap();
    assert_eq!((watch.phase, watch.checks_done), (Phase::Closed, 2));
    let verdicts: Vec<&str> = story.checks.iter().map(|c| c.verdict.as_str()).collect();
    assert_eq!(verdicts, ["unsettleable:used_elsewhere", "settled:final"]);
    assert_eq!(story.resolutions.len(), 1);
    assert!(story.resolutions[0]["evidence"].is_object());
    assert_eq!(story.refund, None);
    assert_eq!(story.flags[0]["kind"], "nonce_used_elsewhere");
    assert!(story.flags[0]["detail"].is_object());
    assert_eq!(story.events[0]["kind"], "order.paid");
}

async fn the_story_of_a_row_that_makes_no_sense_is_told_too(db: &TestDb) {
    let mut row = super::harness::payment("p", "nowhere");
    row.nonce = Some("nonsense".to_owned());
    row.status = Some("dreaming".to_owned());
    db.gateway.insert_payment(&row).await.unwrap();
    let story = db.store.story(&PaymentId::from("p")).await.unwrap().unwrap();
    assert_eq!(story.payment["nonce"], "nonsense");
    assert_eq!((story.order, story.watch), (None, None));
}

async fn an_unheard_of_payment_has_no_story(db: &TestDb) {
    assert_eq!(db.store.story(&PaymentId::from("p")).await.unwrap(), None);
}

async fn a_story_tells_of_the_newest_checks_oldest_first(db: &TestDb) {
    db.paying_order("o", "p").await;
    let count = STORY_CHECKS_MAX + 3;
    for n in 0..count {
        let sql = "INSERT INTO {checks} (payment_id, checked_at, verdict) VALUES ('p', ?t, ?)";
        let (time, verdict) = ((T0.as_millis() + n).to_string(), n.to_string());
        db.gateway.execute(sql, &[Some(&time), Some(&verdict)]).await.unwrap();
    }
    let story = db.store.story(&PaymentId::from("p")).await.unwrap().unwrap();
    let verdicts: Vec<String> = story.checks.into_iter().map(|c| c.verdict).collect();
    let expected: Vec<String> = (3..count).map(|n| n.to_string()).collect();
    assert_eq!(verdicts, expected);
}

async fn the_payments_of_an_order_are_found(db: &TestDb) {
    db.paying_order("o", "b").await;
    db.payment("a", "o").await;
    db.paying_order("q", "c").await;
    let found = db.store.payments_of_order("o").await.unwrap();
    assert_eq!(found, ["a", "b"].map(PaymentId::from));
    assert!(db.store.payments_of_order("nowhere").await.unwrap().is_empty());
}

async fn figures_count_what_is_open_owed_and_flagged(db: &TestDb) {
    assert_eq!(db.store.figures(T0).await.unwrap(), Figures::default());
    db.paying_order("o", "open").await;
    db.discover().await;
    db.paying_order("q", "tentative").await;
    db.paying_order("r", "flagged").await;
    db.paid_order("s").await;
    db.payment("owed", "s").await;
    assert_eq!(db.store.discover(at(5), T0, 10).await.unwrap().opened, 3);
    db.apply("tentative", tentative("tentative")).await;
    db.apply("flagged", unsettleable(Unsettleable::UsedElsewhere, 70)).await;
    db.apply("owed", settled("owed")).await;

    // `open` is due at T0, `flagged` at 40 seconds, `tentative` at 1200.
    let figures = db.store.figures(at(40)).await.unwrap();
    let mut open = figures.open.clone();
    open.sort();
    assert_eq!(open, [(Phase::Targeted, 2), (Phase::Finality, 1)]);
    let mut oldest = figures.oldest.clone();
    oldest.sort();
    assert_eq!(oldest, [(Phase::Targeted, T0), (Phase::Finality, at(5))]);
    assert_eq!(figures.refunds, [(RefundReason::Duplicate, RefundStatus::Owed, 1)]);
    assert_eq!(figures.flags, [(FlagKind::NonceUsedElsewhere, 1)]);
    assert_eq!(figures.overdue, 1);
    assert_eq!(db.store.figures(at(1_201)).await.unwrap().overdue, 3);
}

async fn old_checks_are_pruned_a_few_at_a_time(db: &TestDb) {
    db.paying_order("o", "p").await;
    for n in 0..5 {
        let mut check = judged("p", pending(10));
        check.checked_at = at(n);
        db.apply_at(at(n), &Policy::default(), vec![check]).await;
    }
    assert_eq!(db.store.prune(at(3), 2).await.unwrap(), 2);
    let story = db.store.story(&PaymentId::from("p")).await.unwrap().unwrap();
    let left: Vec<_> = story.checks.iter().map(|c| c.at).collect();
    assert_eq!(left, [at(2), at(3), at(4)], "the oldest go first");
    assert_eq!(db.store.prune(at(3), 2).await.unwrap(), 1);
    assert_eq!(db.store.prune(at(3), 2).await.unwrap(), 0);
    assert_eq!(db.store.prune(at(hours(1)), 100).await.unwrap(), 2);
}

async fn events_are_pruned_once_acknowledged_and_old(db: &TestDb) {
    for (order, payment) in [("o1", "p1"), ("o2", "p2"), ("o3", "p3")] {
        db.paying_order(order, payment).await;
        db.apply(payment, settled(payment)).await;
    }
    let acknowledge = "UPDATE {events} SET acknowledged_at = ?t WHERE order_id = ?";
    for (order, when) in [("o1", at(10)), ("o2", at(20))] {
        let when = when.as_millis().to_string();
        db.gateway.execute(acknowledge, &[Some(&when), Some(order)]).await.unwrap();
    }
    assert_eq!(db.gateway.count("{events}").await.unwrap(), 3);
    assert_eq!(db.store.prune(at(15), 100).await.unwrap(), 1);
    let left = db.gateway.events().await.unwrap();
    assert_eq!(left, ["order.paid:o2", "order.paid:o3"], "what nobody acknowledged stays");
}
