//! Gateways that write over what we resolved, or change things while we look at the chain (I9).

use reconciled::domain::{Outcome, Phase, Policy, RefundReason};
use reconciled::sim::gateway::OrderUpdate;

use super::harness::{TestDb, at, expired, hours, judged, outcome, resolved, settled};

for_each_backend!(
    a_payment_written_open_again_is_settled_again_with_no_second_effect,
    an_order_written_open_again_is_paid_again_with_no_second_event,
    a_payment_owed_back_is_owed_once_however_often_it_is_resolved,
    a_failed_order_frees_its_stock_once,
    what_the_gateway_changed_since_the_lease_is_seen,
    an_order_the_gateway_failed_meanwhile_keeps_what_it_released,
    a_client_s_finished_key_is_left_alone,
);

fn status(status: &str) -> OrderUpdate {
    OrderUpdate { status: Some(status.to_owned()), ..OrderUpdate::default() }
}

async fn a_payment_written_open_again_is_settled_again_with_no_second_effect(db: &TestDb) {
    db.order_with_stock("o", "sku").await;
    db.payment("p", "o").await;
    db.gateway.insert_identifier("key", "p", "in_flight", None).await.unwrap();
    db.apply("p", settled("p")).await;
    for overwritten in ["unknown", "settle_failed"] {
        db.gateway.set_payment_status("p", overwritten).await.unwrap();
        let done = db.apply("p", settled("p")).await;
        assert_eq!((done.outcome, done.recorded), (Outcome::Confirmed, true));
        assert_eq!(db.payment_status("p").await, "settled");
    }
    assert_eq!(db.order_status("o").await, ("paid".to_owned(), Some("p".to_owned())));
    assert_eq!(db.events().await, ["order.paid:o"]);
    assert_eq!(db.reservation("o/sku").await, "committed");
    assert_eq!(db.stock("sku").await, "3");
    assert_eq!(db.identifier("key").await, "settled");
    assert_eq!(db.gateway.transfers().await.unwrap().len(), 1);
    assert!(db.refunds().await.is_empty());
}

async fn an_order_written_open_again_is_paid_again_with_no_second_event(db: &TestDb) {
    db.order_with_stock("o", "sku").await;
    db.payment("p", "o").await;
    db.apply("p", settled("p")).await;
    db.gateway.update_order("o", &status("paying")).await.unwrap();
    db.gateway.set_payment_status("p", "unknown").await.unwrap();
    assert_eq!(db.apply("p", settled("p")).await.outcome, Outcome::Paid);
    assert_eq!(db.order_status("o").await, ("paid".to_owned(), Some("p".to_owned())));
    assert_eq!(db.events().await, ["order.paid:o"]);
    assert_eq!(db.stock("sku").await, "3");
}

/// I6.
async fn a_payment_owed_back_is_owed_once_however_often_it_is_resolved(db: &TestDb) {
    db.paid_order("o").await;
    db.payment("p", "o").await;
    assert_eq!(db.apply("p", settled("p")).await.refund, Some(RefundReason::Duplicate));
    for refund_status in ["owed", "claimed", "sent", "paid"] {
        let sql = "UPDATE {refunds_owed} SET status = ?";
        db.gateway.execute(sql, &[Some(refund_status)]).await.unwrap();
        db.gateway.set_payment_status("p", "unknown").await.unwrap();
        let done = db.apply("p", settled("p")).await;
        assert_eq!((done.outcome, done.refund), (Outcome::Confirmed, None));
        assert_eq!(db.refunds().await, [format!("p duplicate 1000000 {refund_status}")]);
    }
    assert_eq!(db.events().await, ["refund.owed:o"]);
}

/// I5.
async fn a_failed_order_frees_its_stock_once(db: &TestDb) {
    db.order_with_stock("o", "sku").await;
    db.payment("p", "o").await;
    for round in 0..3 {
        let batch = vec![judged("p", expired(hours(24)))];
        let applied = db.apply_at(at(hours(24)), &Policy::default(), batch).await;
        assert_eq!(outcome(&applied, "p"), Outcome::Failed, "round {round}");
        assert_eq!(resolved(&applied, "p").phase, Phase::Closed);
        assert_eq!(db.stock("sku").await, "5");
        db.gateway.set_payment_status("p", "unknown").await.unwrap();
        if round == 1 {
            db.gateway.update_order("o", &status("paying")).await.unwrap();
        }
    }
    assert_eq!(db.order_status("o").await.0, "failed");
    assert_eq!(db.reservation("o/sku").await, "released");
    assert_eq!(db.events().await, ["order.failed:o"]);
}

/// The rows are read when the verdict is applied, not when the watch was leased.
async fn what_the_gateway_changed_since_the_lease_is_seen(db: &TestDb) {
    db.paying_order("o", "p").await;
    db.discover().await;
    let (lease, _) = db.lease_all().await;
    db.gateway.update_order("o", &status("canceled")).await.unwrap();
    let batch = vec![judged("p", settled("p"))];
    let applied = db.store.apply(&lease, batch, &Policy::default(), at(30)).await.unwrap();
    assert_eq!(resolved(&applied, "p").refund, Some(RefundReason::Late));
    assert_eq!(db.order_status("o").await, ("canceled".to_owned(), None));
}

/// I5.
async fn an_order_the_gateway_failed_meanwhile_keeps_what_it_released(db: &TestDb) {
    db.order_with_stock("o", "sku").await;
    db.payment("p", "o").await;
    let released = OrderUpdate { release_stock: true, ..status("failed") };
    db.gateway.update_order("o", &released).await.unwrap();
    assert_eq!(db.stock("sku").await, "5");
    let batch = vec![judged("p", expired(hours(24)))];
    db.apply_at(at(hours(24)), &Policy::default(), batch).await;
    assert_eq!(db.payment_status("p").await, "failed");
    assert_eq!(db.stock("sku").await, "5");
    assert!(db.events().await.is_empty(), "the gateway has told of it itself");
}

async fn a_client_s_finished_key_is_left_alone(db: &TestDb) {
    db.paying_order("o", "p").await;
    db.gateway.insert_identifier("done", "p", "completed", Some("body")).await.unwrap();
    db.gateway.insert_identifier("odd", "p", "no idea", None).await.unwrap();
    db.gateway.insert_identifier("other", "another payment", "in_flight", None).await.unwrap();
    db.apply("p", settled("p")).await;
    assert_eq!(db.identifier("done").await, "completed");
    assert_eq!(db.identifier("odd").await, "no idea");
    assert_eq!(db.identifier("other").await, "in_flight");
    assert_eq!(db.count("{retry_outcomes}").await, 0);
}
