//! Transfers that vanish, move to another block, or come back.

use reconciled::domain::{
    Finality, Outcome, PaymentId, Phase, Policy, RefundReason, Settlement, Transfer, Verdict,
};
use reconciled::sim::gateway::OrderUpdate;

use super::harness::{
    TestDb, at, expired, hours, judged, outcome, pending, settled, settled_in, tentative, transfer,
    tx_hash,
};

for_each_backend!(
    a_vanished_transfer_opens_everything_again,
    an_order_fails_though_a_payment_settled_whose_refund_was_called_off,
    what_was_reopened_can_be_paid_again_by_the_same_log_in_another_block,
    a_transfer_that_moved_to_another_block_is_recorded_once,
    transfers_of_one_transaction_may_change_places,
    a_refund_whose_transfer_vanished_is_void_and_is_owed_again_when_it_returns,
    a_refund_that_has_left_our_hands_is_flagged_when_its_transfer_vanishes,
    a_reorg_after_delivery_is_flagged,
    an_older_head_than_the_transfer_s_block_opens_nothing,
);

async fn a_vanished_transfer_opens_everything_again(db: &TestDb) {
    db.order_with_stock("o", "sku").await;
    db.payment("p", "o").await;
    db.gateway.insert_identifier("key", "p", "in_flight", None).await.unwrap();
    db.apply("p", tentative("p")).await;
    let done = db.apply("p", pending(40)).await;
    assert_eq!((done.outcome, done.recorded), (Outcome::Reopened, true));
    assert_eq!(done.phase, Phase::Targeted);
    assert_eq!(db.payment_status("p").await, "unknown");
    assert_eq!(db.order_status("o").await, ("paying".to_owned(), None));
    assert_eq!(db.reservation("o/sku").await, "held");
    assert_eq!(db.stock("sku").await, "3");
    assert_eq!(db.identifier("key").await, "in_flight");
    assert_eq!(db.events().await, ["order.paid:o", "order.reopened:o"]);
    assert!(db.flags().await.is_empty());
    let transfers = db.gateway.transfers().await.unwrap();
    assert_eq!((transfers.len(), transfers[0].orphaned), (1, true));
    let story = db.store.story(&PaymentId::from("p")).await.unwrap().unwrap();
    assert!(story.payment.get("settled_at").is_none());
    let watch = story.watch.unwrap();
    assert_eq!((watch.opened_at, watch.checks_done), (at(30), 0), "the repeats start anew");
    assert_eq!(
        db.value("SELECT outcome FROM {retry_outcomes}").await.as_deref(),
        Some("in_flight")
    );
}

/// I5. `a` is owed back as a duplicate, and a person calls that off; then a reorg takes away what paid.
async fn an_order_fails_though_a_payment_settled_whose_refund_was_called_off(db: &TestDb) {
    db.order_with_stock("o", "sku").await;
    db.payment("b", "o").await;
    db.payment("a", "o").await;
    db.apply("b", tentative("b")).await;
    assert_eq!(db.apply("a", settled("a")).await.refund, Some(RefundReason::Duplicate));
    db.gateway.execute("UPDATE {refunds_owed} SET status = 'void'", &[]).await.unwrap();
    assert_eq!(db.apply("b", pending(40)).await.outcome, Outcome::Reopened);
    assert_eq!(db.order_status("o").await.0, "paying");
    let batch = vec![judged("b", expired(hours(24)))];
    let applied = db.apply_at(at(hours(24)), &Policy::default(), batch).await;
    assert_eq!(outcome(&applied, "b"), Outcome::Failed);
    assert_eq!(db.order_status("o").await, ("failed".to_owned(), None));
    assert_eq!(db.reservation("o/sku").await, "released");
}

async fn what_was_reopened_can_be_paid_again_by_the_same_log_in_another_block(db: &TestDb) {
    db.order_with_stock("o", "sku").await;
    db.payment("p", "o").await;
    db.apply("p", tentative("p")).await;
    db.apply("p", pending(40)).await;
    let done = db.apply("p", settled_in("p", 103, 7, Finality::Tentative)).await;
    assert_eq!(done.outcome, Outcome::Paid);
    assert_eq!(db.order_status("o").await, ("paid".to_owned(), Some("p".to_owned())));
    assert_eq!(db.reservation("o/sku").await, "committed");
    assert_eq!(db.events().await, ["order.paid:o", "order.reopened:o", "order.paid:o"]);
    let transfers = db.gateway.transfers().await.unwrap();
    let orphaned: Vec<bool> = transfers.iter().map(|t| t.orphaned).collect();
    assert_eq!(orphaned, [true, false]);
}

async fn a_transfer_that_moved_to_another_block_is_recorded_once(db: &TestDb) {
    db.paying_order("o", "p").await;
    db.apply("p", tentative("p")).await;
    // In another block, then at another index as well.
    for (number, log_index, finality) in [(101, 7, Finality::Tentative), (102, 3, Finality::Final)]
    {
        let done = db.apply("p", settled_in("p", number, log_index, finality)).await;
        assert_eq!((done.outcome, done.recorded), (Outcome::Confirmed, true));
        let live = "SELECT block_number || ' ' || log_index FROM {transfers} \
                    WHERE orphaned_at IS NULL";
        assert_eq!(db.value(live).await, Some(format!("{number} {log_index}")));
    }
    assert_eq!(db.events().await, ["order.paid:o"]);
}

/// Two payments in one transaction: in another block, each log has the index that was the other's.
async fn transfers_of_one_transaction_may_change_places(db: &TestDb) {
    db.paying_order("o", "a").await;
    db.paying_order("q", "b").await;
    let one_transaction = |id: &str, number: u64, log_index: u64| {
        let moved = Transfer { tx_hash: tx_hash("both"), ..transfer(id, number, log_index) };
        Verdict::Settled(Settlement { transfer: moved, finality: Finality::Tentative })
    };
    db.apply("a", one_transaction("a", 100, 3)).await;
    db.apply("b", one_transaction("b", 100, 5)).await;
    for (id, log_index) in [("a", 5), ("b", 3)] {
        let done = db.apply(id, one_transaction(id, 101, log_index)).await;
        assert_eq!((done.outcome, done.recorded), (Outcome::Confirmed, true));
    }
    let transfers = db.gateway.transfers().await.unwrap();
    let live: Vec<(Option<&str>, &str)> = transfers
        .iter()
        .filter(|t| !t.orphaned)
        .map(|t| (t.payment_id.as_deref(), t.log_index.as_str()))
        .collect();
    assert_eq!(live, [(Some("a"), "5"), (Some("b"), "3")]);
    assert!(db.flags().await.is_empty());
}

/// I6: the record is the same one all along.
async fn a_refund_whose_transfer_vanished_is_void_and_is_owed_again_when_it_returns(db: &TestDb) {
    db.paid_order("o").await;
    db.payment("p", "o").await;
    assert_eq!(db.apply("p", tentative("p")).await.refund, Some(RefundReason::Duplicate));
    assert_eq!(db.apply("p", pending(40)).await.outcome, Outcome::Reopened);
    assert_eq!(db.refunds().await, ["p duplicate 1000000 void"]);
    assert_eq!(db.order_status("o").await, ("paid".to_owned(), Some("o/first".to_owned())));

    let claimed = "UPDATE {refunds_owed} SET batch_id = 'b', claimed_by = 'payer', claimed_at = ?t";
    db.gateway.execute(claimed, &[Some(&at(35).as_millis().to_string())]).await.unwrap();
    let back = settled_in("p", 105, 2, Finality::Tentative);
    assert_eq!(db.apply("p", back).await.refund, Some(RefundReason::Duplicate));
    assert_eq!(db.refunds().await, ["p duplicate 1000000 owed"]);
    let story = db.store.story(&PaymentId::from("p")).await.unwrap().unwrap();
    let refund = story.refund.unwrap();
    assert_eq!(refund["log_index"], 2);
    for column in ["note", "batch_id", "claimed_by", "claimed_at"] {
        assert!(refund.get(column).is_none(), "{column} is of the claim that was called off");
    }

    // Moved once more while owed: the record follows, with what was observed, and nothing is owed twice.
    db.gateway.execute("UPDATE {refunds_owed} SET amount = 7", &[]).await.unwrap();
    let moved = settled_in("p", 106, 5, Finality::Final);
    let done = db.apply("p", moved).await;
    assert_eq!((done.outcome, done.refund), (Outcome::Confirmed, None));
    assert_eq!(db.refunds().await, ["p duplicate 1000000 owed"]);
    let story = db.store.story(&PaymentId::from("p")).await.unwrap().unwrap();
    let refund = story.refund.unwrap();
    assert_eq!((&refund["log_index"], &refund["status"]), (&5.into(), &"owed".into()));
    assert_eq!(refund["tx_hash"], tx_hash("p").to_string());
    assert_eq!(db.count("{refunds_owed}").await, 1);
    assert_eq!(db.events().await, ["refund.owed:o", "refund.owed:o"]);
}

async fn a_refund_that_has_left_our_hands_is_flagged_when_its_transfer_vanishes(db: &TestDb) {
    db.paid_order("o").await;
    db.payment("p", "o").await;
    db.apply("p", tentative("p")).await;
    db.gateway.execute("UPDATE {refunds_owed} SET status = 'sent'", &[]).await.unwrap();
    db.apply("p", pending(40)).await;
    assert_eq!(db.refunds().await, ["p duplicate 1000000 sent"]);
    assert_eq!(db.flags().await, ["reorged_after_refund:p"]);
}

async fn a_reorg_after_delivery_is_flagged(db: &TestDb) {
    db.paying_order("o", "p").await;
    db.apply("p", tentative("p")).await;
    let delivered = OrderUpdate { delivered_at: Some(at(10)), ..OrderUpdate::default() };
    db.gateway.update_order("o", &delivered).await.unwrap();
    db.apply("p", pending(40)).await;
    assert_eq!(db.flags().await, ["reorged_after_delivery:p"]);
    assert_eq!(db.order_status("o").await.0, "paying");
}

async fn an_older_head_than_the_transfer_s_block_opens_nothing(db: &TestDb) {
    db.paying_order("o", "p").await;
    let applied = db
        .apply_at(
            at(30),
            &Policy::default(),
            vec![judged("p", settled_in("p", 2_000, 7, Finality::Tentative))],
        )
        .await;
    assert_eq!(applied.len(), 1);
    let done = db.apply("p", pending(40)).await;
    assert_eq!((done.recorded, done.phase), (false, Phase::Finality));
    assert_eq!(db.order_status("o").await.0, "paid");
}
