//! Which payments get a watch, and when a closed one opens again.

use reconciled::domain::{PaymentId, Phase, Policy, RawPayment};
use reconciled::sim::gateway::{NewOrder, OrderUpdate};

use super::harness::{
    T0, TestDb, at, expired, hours, ids, judged, lease, payment, pending, resolved, settled,
};

for_each_backend!(
    open_payments_get_a_watch_and_others_do_not,
    a_settling_payment_counts_from_the_moment_its_gateway_must_have_died,
    the_oldest_payments_are_found_first,
    an_open_watch_is_not_opened_twice,
    a_row_that_makes_no_sense_gets_its_watch_and_starves_nobody,
    a_closed_watch_opens_again_when_the_gateway_writes_an_open_status,
    a_settled_payment_is_followed_once_its_order_owes_it_back,
    a_settled_payment_with_a_refund_record_is_left_alone,
    a_settled_payment_among_many_is_found_within_a_few_rounds,
    a_settled_payment_whose_money_is_another_s_is_not_followed_for_ever,
    a_settled_payment_whose_order_names_nobody_as_its_payer_is_left_alone,
    a_recheck_makes_watches_due_and_opens_missing_ones,
);

async fn open_payments_get_a_watch_and_others_do_not(db: &TestDb) {
    db.order("o").await;
    for status in ["unknown", "settle_failed", "settled", "failed"] {
        let row = RawPayment { status: Some(status.to_owned()), ..payment(status, "o") };
        db.gateway.insert_payment(&row).await.unwrap();
    }
    assert_eq!(db.discover().await, (2, 0));
    let (_, followed) = db.lease_all().await;
    assert_eq!(ids(&followed), ["settle_failed", "unknown"]);
    for one in followed {
        assert_eq!(one.watch.phase, Phase::Targeted);
        assert_eq!((one.watch.opened_at, one.watch.next_check_at), (T0, Some(T0)));
        assert_eq!((one.watch.checks_done, one.watch.consecutive_inconclusive), (0, 0));
        assert_eq!(one.payment.unwrap().order_id.as_str(), "o");
    }
}

async fn a_settling_payment_counts_from_the_moment_its_gateway_must_have_died(db: &TestDb) {
    db.order("o").await;
    for (id, created_at) in [("before", at(99)), ("at", at(100)), ("after", at(101))] {
        let row = RawPayment {
            status: Some("settling".to_owned()),
            created_at: Some(created_at.as_millis().to_string()),
            ..payment(id, "o")
        };
        db.gateway.insert_payment(&row).await.unwrap();
    }
    let found = db.store.discover(at(200), at(100), 10).await.unwrap();
    assert_eq!((found.opened, found.reopened), (1, 0));
    assert_eq!(ids(&db.lease_all().await.1), ["before"]);
}

async fn the_oldest_payments_are_found_first(db: &TestDb) {
    db.order("o").await;
    for (id, created_at) in [("c", at(1)), ("a", at(3)), ("b", at(2))] {
        let row =
            RawPayment { created_at: Some(created_at.as_millis().to_string()), ..payment(id, "o") };
        db.gateway.insert_payment(&row).await.unwrap();
    }
    assert_eq!(db.store.discover(T0, T0, 2).await.unwrap().opened, 2);
    assert_eq!(ids(&db.lease_all().await.1), ["b", "c"]);
    assert_eq!(db.store.discover(T0, T0, 2).await.unwrap().opened, 1);
    assert_eq!(db.store.discover(T0, T0, 2).await.unwrap().opened, 0);
}

async fn an_open_watch_is_not_opened_twice(db: &TestDb) {
    db.paying_order("o", "p").await;
    assert_eq!(db.discover().await, (1, 0));
    assert_eq!(db.discover().await, (0, 0));
    assert_eq!(db.count("{watches}").await, 1);
}

/// I11: the column at fault is named, and payments behind the bad ones are found all the same.
async fn a_row_that_makes_no_sense_gets_its_watch_and_starves_nobody(db: &TestDb) {
    db.order("o").await;
    let oldest = Some((T0.as_millis() - 1_000).to_string());
    let bad = [
        RawPayment { nonce: Some("nonsense".to_owned()), ..payment("nonce", "o") },
        RawPayment { token: None, ..payment("token", "o") },
        RawPayment { rail: Some("carrier pigeon".to_owned()), ..payment("rail", "o") },
        RawPayment { order_id: None, ..payment("order_id", "o") },
        RawPayment { amount: Some("-5".to_owned()), ..payment("amount", "o") },
    ];
    for row in bad {
        let row = RawPayment { created_at: oldest.clone(), ..row };
        db.gateway.insert_payment(&row).await.unwrap();
    }
    db.payment("sound", "o").await;
    for _ in 0..6 {
        assert_eq!(db.store.discover(T0, T0, 1).await.unwrap().opened, 1);
    }
    let (_, followed) = db.lease_all().await;
    for one in followed {
        match one.watch.payment_id.as_str() {
            "sound" => assert!(one.payment.is_ok()),
            column => assert_eq!(one.payment.unwrap_err().column, column),
        }
    }
}

async fn a_closed_watch_opens_again_when_the_gateway_writes_an_open_status(db: &TestDb) {
    db.paying_order("o", "p").await;
    db.apply("p", settled("p")).await;
    assert_eq!(db.phase("p").await, Phase::Closed);
    assert_eq!(db.discover().await, (0, 0));

    db.gateway.set_payment_status("p", "unknown").await.unwrap();
    let found = db.store.discover(at(500), T0, 10).await.unwrap();
    assert_eq!((found.opened, found.reopened), (0, 1));
    let (_, followed) = db.lease_all().await;
    let watch = &followed[0].watch;
    assert_eq!(watch.phase, Phase::Targeted);
    assert_eq!((watch.opened_at, watch.next_check_at), (at(500), Some(at(500))));
    assert_eq!(watch.checks_done, 0);
}

async fn a_settled_payment_is_followed_once_its_order_owes_it_back(db: &TestDb) {
    db.paying_order("o", "p").await;
    db.apply("p", settled("p")).await;
    let undelivered =
        OrderUpdate { status: Some("undelivered".to_owned()), ..OrderUpdate::default() };
    db.gateway.update_order("o", &undelivered).await.unwrap();
    assert_eq!(db.discover().await, (0, 1));

    // Settled by the gateway itself, and never followed before.
    db.paid_order("q").await;
    let second = RawPayment { status: Some("settled".to_owned()), ..payment("second", "q") };
    db.gateway.insert_payment(&second).await.unwrap();
    assert_eq!(db.discover().await, (1, 0), "the one that pays the order is left alone");
    assert_eq!(ids(&db.lease_all().await.1), ["p", "second"]);
}

async fn a_settled_payment_with_a_refund_record_is_left_alone(db: &TestDb) {
    db.order_with_status("o", "undelivered").await;
    db.payment("p", "o").await;
    db.apply("p", settled("p")).await;
    assert_eq!(db.refunds().await, ["p undelivered 1000000 owed"]);
    assert_eq!(db.payment_status("p").await, "settled");
    assert_eq!(db.discover().await, (0, 0));
}

/// However many settled payments there are, each round looks through a part of them, and all in turn.
async fn a_settled_payment_among_many_is_found_within_a_few_rounds(db: &TestDb) {
    db.paid_order("o").await;
    for id in ["a", "zz"] {
        let row = RawPayment { status: Some("settled".to_owned()), ..payment(id, "o") };
        db.gateway.insert_payment(&row).await.unwrap();
    }
    let crowd = "INSERT INTO payments (id, order_id, status) \
                 WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 7000) \
                 SELECT 'm' || CAST(i AS TEXT), 'o of ' || CAST(i AS TEXT), 'settled' FROM n";
    db.gateway.execute(crowd, &[]).await.unwrap();
    let mut opened = 0;
    for _ in 0..8 {
        opened += db.discover().await.0;
    }
    assert_eq!(opened, 2);
    assert_eq!(ids(&db.lease_all().await.1), ["a", "zz"]);
}

/// Two payments with one authorization, both called settled by the gateway: the one without money of its
/// own is flagged, and then it is a person's turn.
async fn a_settled_payment_whose_money_is_another_s_is_not_followed_for_ever(db: &TestDb) {
    db.paying_order("o", "first").await;
    db.apply("first", settled("first")).await;
    let order = NewOrder {
        status: "undelivered".to_owned(),
        paid_by: Some("second".to_owned()),
        ..NewOrder::paying("q", T0)
    };
    db.gateway.insert_order(&order).await.unwrap();
    let second = RawPayment {
        id: "second".to_owned(),
        order_id: Some("q".to_owned()),
        status: Some("settled".to_owned()),
        ..payment("first", "q")
    };
    db.gateway.insert_payment(&second).await.unwrap();
    let applied =
        db.apply_at(at(30), &Policy::default(), vec![judged("second", settled("first"))]).await;
    assert_eq!(resolved(&applied, "second").phase, Phase::Closed);
    assert_eq!(db.flags().await, ["authorization_reused:second"]);
    assert_eq!(db.discover().await, (0, 0));
}

/// No text is no payer: such an order is flagged when its payment is resolved, not at every discovery.
async fn a_settled_payment_whose_order_names_nobody_as_its_payer_is_left_alone(db: &TestDb) {
    db.paying_order("o", "p").await;
    let paid = OrderUpdate {
        status: Some("paid".to_owned()),
        paid_by: Some(String::new()),
        ..OrderUpdate::default()
    };
    db.gateway.update_order("o", &paid).await.unwrap();
    assert_eq!(db.apply("p", settled("p")).await.phase, Phase::Closed);
    assert_eq!(db.flags().await, ["paid_by_unknown:p"]);
    assert_eq!(db.payment_status("p").await, "settled");
    for _ in 0..2 {
        assert_eq!(db.discover().await, (0, 0));
    }
}

async fn a_recheck_makes_watches_due_and_opens_missing_ones(db: &TestDb) {
    db.paying_order("o", "waiting").await;
    db.paying_order("q", "over").await;
    db.apply_at(at(hours(24)), &Policy::default(), vec![judged("over", expired(hours(24)))]).await;
    assert_eq!(db.phase("over").await, Phase::Closed);
    let (lease_now, _) = db.lease_all().await;
    let waits = judged("waiting", pending(10));
    assert_eq!(db.store.reschedule(&lease_now, &[waits]).await.unwrap(), 1);
    db.order("r").await;
    let row = RawPayment { status: Some("settled".to_owned()), ..payment("never", "r") };
    db.gateway.insert_payment(&row).await.unwrap();

    let asked: Vec<PaymentId> =
        ["waiting", "over", "never", "unheard of"].map(PaymentId::from).to_vec();
    let found = db.store.recheck(&asked, at(35)).await.unwrap();
    let mut found: Vec<&str> = found.iter().map(PaymentId::as_str).collect();
    found.sort_unstable();
    assert_eq!(found, ["never", "over", "waiting"]);
    let due = db.store.lease_due(&lease(at(35), at(60)), 10).await.unwrap();
    assert_eq!(ids(&due), ["never", "over", "waiting"]);
    let waiting = due.iter().find(|f| f.watch.payment_id.as_str() == "waiting").unwrap();
    assert_eq!(waiting.watch.checks_done, 1, "an open watch only becomes due");
    assert_eq!(waiting.watch.opened_at, T0);
}
