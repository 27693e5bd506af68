//! The rows of DESIGN section 7 in which the money moved.

use std::sync::Arc;

use reconciled::domain::{
    Finality, FlagKind, Inconclusive, LatePolicy, Outcome, PaymentId, Phase, Policy, RawPayment,
    RefundReason, Settlement, Transfer, Verdict, refund_nonce,
};
use reconciled::sim::gateway::{NewOrder, OrderUpdate};

use super::harness::{
    AMOUNT, T0, TestDb, at, ids, judged, lease, outcome, payment, resolved, settled, settled_in,
    tentative, transfer, tx_hash,
};

for_each_backend!(
    a_settled_payment_pays_its_open_order,
    a_call_without_stock_or_identifier_is_paid_too,
    a_tentative_settlement_pays_and_stays_watched_until_it_is_final,
    an_order_paid_by_its_gateway_meanwhile_only_gains_what_was_missing,
    money_for_an_order_paid_by_another_payment_is_owed_back,
    money_for_an_order_that_is_over_is_owed_back,
    money_for_an_order_that_is_over_reinstates_it_when_the_stock_is_back,
    an_order_is_not_reinstated_without_stock,
    money_for_work_that_failed_is_owed_back,
    one_authorization_pays_one_order,
    the_payment_created_first_has_the_transfer_they_both_claim,
    a_transfer_that_a_row_nobody_can_read_may_have_had_pays_nobody_yet,
    a_transfer_that_a_reorg_moved_still_is_whose_it_was,
    a_recorded_transfer_stays_taken_when_its_payment_s_row_is_gone,
    of_two_payments_in_one_batch_the_first_on_chain_pays,
    money_for_an_order_that_cannot_be_read_is_flagged,
    money_for_an_order_paid_by_nobody_knows_whom_is_flagged,
    a_transfer_seen_before_and_matched_to_nobody_becomes_the_payment_s,
    addresses_and_hashes_are_compared_whatever_their_case,
    two_replicas_on_one_order_pay_it_once_and_owe_once,
    a_large_batch_is_one_transaction,
);

/// What is left to say of a key when the gateway has dropped its own row.
const RETRY: &str = "SELECT outcome FROM {retry_outcomes}";
const RETRY_TRANSACTION: &str = "SELECT tx_hash FROM {retry_outcomes}";

/// I4, I12: everything that a payment changes, and the evidence beside it.
async fn a_settled_payment_pays_its_open_order(db: &TestDb) {
    for status in ["awaiting_payment", "paying", "payment_failed"] {
        let (order, id, sku, key) = (
            format!("order {status}"),
            format!("payment {status}"),
            format!("sku {status}"),
            format!("key {status}"),
        );
        db.order_with_stock(&order, &sku).await;
        let update = OrderUpdate { status: Some(status.to_owned()), ..OrderUpdate::default() };
        db.gateway.update_order(&order, &update).await.unwrap();
        db.payment(&id, &order).await;
        db.gateway.insert_identifier(&key, &id, "in_flight", Some("body")).await.unwrap();

        let done = db.apply(&id, settled(&id)).await;

        assert_eq!((done.outcome, done.recorded), (Outcome::Paid, true));
        assert_eq!((done.refund, done.phase), (None, Phase::Closed));
        assert_eq!(db.payment_status(&id).await, "settled");
        assert_eq!(db.order_status(&order).await, ("paid".to_owned(), Some(id.clone())));
        assert_eq!(db.reservation(&format!("{order}/{sku}")).await, "committed");
        assert_eq!(db.stock(&sku).await, "3", "sold stock was off the shelf already");
        assert_eq!(db.identifier(&key).await, "settled");
        assert_eq!(db.events().await.last().unwrap(), &format!("order.paid:{order}"));
        let story = db.store.story(&PaymentId::from(id.as_str())).await.unwrap().unwrap();
        assert_eq!(story.resolutions.len(), 1);
        let resolution = &story.resolutions[0];
        assert_eq!(resolution["outcome"], "paid");
        assert_eq!(resolution["verdict"], "settled:final");
        assert_eq!(resolution["tx_hash"], tx_hash(&id).to_string());
        assert_eq!(resolution["log_index"], 7);
        assert_eq!(resolution["block_number"], 100);
        assert_eq!(resolution["detection_delay_ms"], 26_000, "from block time 4 to 30");
        assert_eq!(resolution["evidence"]["evidence"]["readings"][0]["endpoint"], "first");
        assert_eq!(resolution["evidence"]["verdict"]["settled"]["finality"], "final");
        assert!(story.payment["settled_at"].is_string() && story.payment["updated_at"].is_string());
    }
    assert!(db.refunds().await.is_empty());
    assert!(db.flags().await.is_empty());
    // The sha256 of `key paying` and of `body`.
    let kept = db
        .value(
            "SELECT outcome || ' ' || response_sha256 FROM {retry_outcomes} WHERE \
             identifier_sha256 = \
             '86cb1a9cccf046d5fd4d5360a48b3d7aabb7348720ce3f89b3993f4e27fc0ab7'",
        )
        .await;
    assert_eq!(
        kept.as_deref(),
        Some("settled 230d8358dc8e8890b4c58deeb62912ee2f20357ae92a5cc861b98e68fe31acb5")
    );
    assert_eq!(db.count("{retry_outcomes}").await, 3);
}

async fn a_call_without_stock_or_identifier_is_paid_too(db: &TestDb) {
    let order = NewOrder { kind: "call".to_owned(), ..NewOrder::paying("o", T0) };
    db.gateway.insert_order(&order).await.unwrap();
    db.payment("p", "o").await;
    assert_eq!(db.apply("p", settled("p")).await.outcome, Outcome::Paid);
    assert_eq!(db.order_status("o").await, ("paid".to_owned(), Some("p".to_owned())));
}

async fn a_tentative_settlement_pays_and_stays_watched_until_it_is_final(db: &TestDb) {
    db.paying_order("o", "p").await;
    let done = db.apply("p", tentative("p")).await;
    assert_eq!((done.outcome, done.phase), (Outcome::Paid, Phase::Finality));
    let watch = db.store.story(&PaymentId::from("p")).await.unwrap().unwrap().watch.unwrap();
    assert_eq!(watch.next_check_at, Some(at(1_200)));

    let done = db.apply("p", tentative("p")).await;
    assert_eq!((done.outcome, done.recorded), (Outcome::Waiting, false), "nothing new");
    let seen_at = "SELECT CAST(seen_at AS TEXT) FROM {transfers}";
    let before = db.value(seen_at).await;
    let batch = vec![judged("p", settled("p"))];
    let done = resolved(&db.apply_at(at(900), &Policy::default(), batch).await, "p");
    assert_eq!((done.outcome, done.recorded), (Outcome::Confirmed, true));
    assert_eq!(done.phase, Phase::Closed);
    assert_eq!(db.value(seen_at).await, before, "first seen when it was");
    assert_eq!(db.events().await, ["order.paid:o"]);
    assert_eq!(db.count("{resolutions}").await, 2);
    let transfers = db.gateway.transfers().await.unwrap();
    assert_eq!(transfers.len(), 1);
    assert_eq!((transfers[0].finality.as_str(), transfers[0].orphaned), ("final", false));
}

/// The gateway paid the order and died before it saw to the rest.
async fn an_order_paid_by_its_gateway_meanwhile_only_gains_what_was_missing(db: &TestDb) {
    db.order_with_stock("o", "sku").await;
    db.payment("p", "o").await;
    db.gateway.insert_identifier("key", "p", "in_flight", None).await.unwrap();
    let paid = OrderUpdate {
        status: Some("paid".to_owned()),
        paid_by: Some("p".to_owned()),
        ..OrderUpdate::default()
    };
    db.gateway.update_order("o", &paid).await.unwrap();
    assert_eq!(db.apply("p", settled("p")).await.outcome, Outcome::Confirmed);
    assert_eq!(db.order_status("o").await, ("paid".to_owned(), Some("p".to_owned())));
    assert_eq!(db.reservation("o/sku").await, "committed");
    assert_eq!(db.identifier("key").await, "settled");
    assert!(db.events().await.is_empty(), "the gateway has told of it itself");
    assert!(db.refunds().await.is_empty());
}

/// I3, I6.
async fn money_for_an_order_paid_by_another_payment_is_owed_back(db: &TestDb) {
    db.paid_order("o").await;
    db.payment("p", "o").await;
    db.gateway.insert_identifier("key", "p", "in_flight", None).await.unwrap();
    let done = db.apply("p", settled("p")).await;
    assert_eq!((done.outcome, done.refund), (Outcome::RefundOwed, Some(RefundReason::Duplicate)));
    assert_eq!(db.order_status("o").await, ("paid".to_owned(), Some("o/first".to_owned())));
    assert_eq!(db.payment_status("p").await, "settled");
    assert_eq!(db.refunds().await, ["p duplicate 1000000 owed"]);
    assert_eq!(db.events().await, ["refund.owed:o"]);
    assert_eq!(db.identifier("key").await, "settled", "the order is paid: no need to pay again");
    assert_eq!(db.value(RETRY).await.as_deref(), Some("settled"));
    let story = db.store.story(&PaymentId::from("p")).await.unwrap().unwrap();
    let refund = story.refund.unwrap();
    let expected = refund_nonce(&payment("p", "o").parse().unwrap());
    assert_eq!(refund["refund_nonce"], expected.to_string());
    assert_eq!(refund["tx_hash"], tx_hash("p").to_string());
    let payer = transfer("p", 100, 7).from;
    assert_eq!(refund["payer"], format!("{payer:#x}"), "the observed payer, in lower case");
}

async fn money_for_an_order_that_is_over_is_owed_back(db: &TestDb) {
    for status in ["canceled", "expired", "failed"] {
        let (id, key) = (format!("p {status}"), format!("key {status}"));
        db.order_with_status(status, status).await;
        db.payment(&id, status).await;
        db.gateway.insert_identifier(&key, &id, "in_flight", None).await.unwrap();
        let done = db.apply(&id, settled(&id)).await;
        assert_eq!((done.outcome, done.refund), (Outcome::RefundOwed, Some(RefundReason::Late)));
        assert_eq!(db.order_status(status).await, (status.to_owned(), None));
        assert_eq!(db.payment_status(&id).await, "settled");
        assert_eq!(db.identifier(&key).await, "failed", "the buyer may pay anew");
    }
    let outcomes = "SELECT DISTINCT outcome FROM {retry_outcomes}";
    assert_eq!(db.value(outcomes).await.as_deref(), Some("failed"));
    let owed = |status| format!("p {status} late {AMOUNT} owed");
    assert_eq!(db.refunds().await, [owed("canceled"), owed("expired"), owed("failed")]);
}

/// I5: what is taken again is taken from the shelf.
async fn money_for_an_order_that_is_over_reinstates_it_when_the_stock_is_back(db: &TestDb) {
    db.order_with_stock("o", "sku").await;
    let over = OrderUpdate {
        status: Some("expired".to_owned()),
        release_stock: true,
        ..OrderUpdate::default()
    };
    db.gateway.update_order("o", &over).await.unwrap();
    assert_eq!(db.stock("sku").await, "5");
    db.payment("p", "o").await;
    let policy = Policy { late: LatePolicy::Reinstate, ..Policy::default() };
    let done = db.apply_with(&policy, "p", settled("p")).await;
    assert_eq!((done.outcome, done.refund), (Outcome::Reinstated, None));
    assert_eq!(db.order_status("o").await, ("paid".to_owned(), Some("p".to_owned())));
    assert_eq!(db.reservation("o/sku").await, "committed");
    assert_eq!(db.stock("sku").await, "3");
    assert_eq!(db.events().await, ["order.paid:o"]);
}

async fn an_order_is_not_reinstated_without_stock(db: &TestDb) {
    db.gateway.put_stock("sku", 1).await.unwrap();
    db.order_with_status("o", "expired").await;
    db.gateway.insert_reservation("o", "sku", 2, "released").await.unwrap();
    db.payment("p", "o").await;
    let policy = Policy { late: LatePolicy::Reinstate, ..Policy::default() };
    let done = db.apply_with(&policy, "p", settled("p")).await;
    assert_eq!(done.refund, Some(RefundReason::Late));
    assert_eq!(db.stock("sku").await, "1");
    assert_eq!(db.reservation("o/sku").await, "released");
}

async fn money_for_work_that_failed_is_owed_back(db: &TestDb) {
    db.order_with_status("o", "undelivered").await;
    db.payment("p", "o").await;
    db.gateway.insert_identifier("key", "p", "in_flight", None).await.unwrap();
    assert_eq!(db.apply("p", settled("p")).await.refund, Some(RefundReason::Undelivered));
    assert_eq!(db.order_status("o").await.0, "undelivered");
    assert_eq!(db.refunds().await, ["p undelivered 1000000 owed"]);
    assert_eq!(db.identifier("key").await, "failed");
}

/// I4: the transfer pays the order it was recorded for, and no other.
async fn one_authorization_pays_one_order(db: &TestDb) {
    db.paying_order("o", "first").await;
    db.order("q").await;
    db.apply("first", settled("first")).await;
    let reused =
        RawPayment { id: "second".to_owned(), order_id: Some("q".into()), ..payment("first", "q") };
    db.gateway.insert_payment(&reused).await.unwrap();
    db.gateway.insert_identifier("key", "second", "in_flight", None).await.unwrap();
    let done = db.apply("second", settled("first")).await;
    assert_eq!(done.outcome, Outcome::AuthorizationReused);
    assert_eq!(db.payment_status("second").await, "failed");
    assert_eq!(db.order_status("q").await.0, "failed");
    assert_eq!(db.order_status("o").await, ("paid".to_owned(), Some("first".to_owned())));
    assert_eq!(db.flags().await, ["authorization_reused:second"]);
    assert!(db.refunds().await.is_empty());
    assert_eq!(db.gateway.transfers().await.unwrap().len(), 1);
    // I12: the record says which transfer that was; the buyer who retries is not shown another's money.
    let sql = "SELECT tx_hash FROM {resolutions} WHERE payment_id = 'second'";
    assert_eq!(db.value(sql).await, Some(transfer("first", 100, 7).tx_hash.to_string()));
    assert_eq!(db.value(RETRY_TRANSACTION).await, None);
}

/// Nothing is recorded yet, and the later claimant is judged alone: the store must find the earlier one.
async fn the_payment_created_first_has_the_transfer_they_both_claim(db: &TestDb) {
    db.order("o").await;
    db.order("q").await;
    let earlier = RawPayment {
        id: "z earlier".to_owned(),
        created_at: Some((T0.as_millis() - 5_000).to_string()),
        nonce: payment("p", "o").nonce.map(|n| n.to_uppercase().replace("0X", "0x")),
        ..payment("p", "o")
    };
    db.gateway.insert_payment(&earlier).await.unwrap();
    db.payment("p", "q").await;
    assert_eq!(db.apply("p", settled("p")).await.outcome, Outcome::Waiting);
    assert_eq!(db.apply("z earlier", settled("p")).await.outcome, Outcome::Paid);
    assert_eq!(db.apply("p", settled("p")).await.outcome, Outcome::AuthorizationReused);
    assert_eq!(db.order_status("o").await, ("paid".to_owned(), Some("z earlier".to_owned())));
    assert_eq!(db.order_status("q").await.0, "failed");
}

/// I4. The gateway settled one payment and its row was spoiled since; another comes with its authorization.
async fn a_transfer_that_a_row_nobody_can_read_may_have_had_pays_nobody_yet(db: &TestDb) {
    for (id, hides) in [("alone", false), ("together", true)] {
        let (order, first) = (format!("o {id}"), format!("first {id}"));
        db.order(&order).await;
        let spoiled = RawPayment {
            id: first.clone(),
            status: Some("settled".to_owned()),
            rail: Some("nonsense".to_owned()),
            ..payment(id, "elsewhere")
        };
        db.gateway.insert_payment(&spoiled).await.unwrap();
        db.payment(id, &order).await;
        let mut batch = vec![judged(id, settled(id))];
        if hides {
            let unread = Verdict::Inconclusive(Inconclusive::MalformedPayment);
            batch.push(judged(&first, unread));
        }
        let applied = db.apply_at(at(30), &Policy::default(), batch).await;
        assert_eq!(outcome(&applied, id), Outcome::Flagged);
        assert!(db.flags().await.contains(&format!("authorization_contested:{id}")));
        assert_eq!(db.order_status(&order).await.0, "paying");
        assert!(db.gateway.transfers().await.unwrap().is_empty());

        let sql = format!("UPDATE payments SET rail = 'x402' WHERE id = '{first}'");
        db.gateway.execute(&sql, &[]).await.unwrap();
        assert_eq!(db.apply(id, settled(id)).await.outcome, Outcome::AuthorizationReused);
        assert!(!db.flags().await.contains(&format!("authorization_contested:{id}")));
        assert_eq!(db.order_status(&order).await.0, "failed");
    }
}

/// I4: one authorization pays one order also while its transfer is on the move, and only the rival is
/// looked at.
async fn a_transfer_that_a_reorg_moved_still_is_whose_it_was(db: &TestDb) {
    db.paying_order("o", "first").await;
    db.apply("first", tentative("first")).await;
    db.order("q").await;
    let rival = RawPayment {
        id: "rival".to_owned(),
        created_at: Some((T0.as_millis() - 5_000).to_string()),
        ..payment("first", "q")
    };
    db.gateway.insert_payment(&rival).await.unwrap();
    let moved = Transfer { tx_hash: tx_hash("another try"), ..transfer("first", 101, 2) };
    let verdict = Verdict::Settled(Settlement { transfer: moved, finality: Finality::Tentative });
    assert_eq!(db.apply("rival", verdict.clone()).await.outcome, Outcome::AuthorizationReused);
    assert_eq!(db.order_status("q").await.0, "failed");
    assert_eq!(db.apply("first", verdict).await.outcome, Outcome::Confirmed);
    assert_eq!(db.order_status("o").await, ("paid".to_owned(), Some("first".to_owned())));
}

/// I4.
async fn a_recorded_transfer_stays_taken_when_its_payment_s_row_is_gone(db: &TestDb) {
    db.paying_order("o", "first").await;
    db.apply("first", settled("first")).await;
    db.gateway.execute("DELETE FROM payments WHERE id = 'first'", &[]).await.unwrap();
    db.order("q").await;
    let rival = RawPayment { id: "rival".to_owned(), ..payment("first", "q") };
    db.gateway.insert_payment(&rival).await.unwrap();
    assert_eq!(db.apply("rival", settled("first")).await.outcome, Outcome::AuthorizationReused);
    assert_eq!(db.order_status("q").await.0, "failed");
}

/// I3: the batch's order does not matter, the chain's does.
async fn of_two_payments_in_one_batch_the_first_on_chain_pays(db: &TestDb) {
    db.order_with_stock("o", "sku").await;
    for id in ["a", "b", "c"] {
        db.payment(id, "o").await;
    }
    let batch = vec![
        judged("a", settled_in("a", 101, 0, Finality::Final)),
        judged("b", settled_in("b", 100, 9, Finality::Final)),
        judged("c", settled_in("c", 100, 8, Finality::Final)),
    ];
    let applied = db.apply_at(at(30), &Policy::default(), batch).await;
    assert_eq!(outcome(&applied, "c"), Outcome::Paid);
    assert_eq!(resolved(&applied, "a").refund, Some(RefundReason::Duplicate));
    assert_eq!(resolved(&applied, "b").refund, Some(RefundReason::Duplicate));
    assert_eq!(db.order_status("o").await, ("paid".to_owned(), Some("c".to_owned())));
    assert_eq!(db.refunds().await, ["a duplicate 1000000 owed", "b duplicate 1000000 owed"]);
    assert_eq!(db.stock("sku").await, "3");
    assert_eq!(db.reservation("o/sku").await, "committed");
}

async fn money_for_an_order_that_cannot_be_read_is_flagged(db: &TestDb) {
    db.payment("p", "nowhere").await;
    db.order_with_status("o", "dreaming").await;
    db.payment("q", "o").await;
    assert_eq!(db.apply("p", settled("p")).await.outcome, Outcome::Flagged);
    assert_eq!(db.apply("q", settled("q")).await.outcome, Outcome::Flagged);
    assert_eq!(db.flags().await, ["order_unreadable:p", "order_unreadable:q"]);
    assert_eq!(db.payment_status("p").await, "settled", "the money did move");
    assert_eq!(db.order_status("o").await.0, "dreaming");
    assert_eq!(db.gateway.transfers().await.unwrap().len(), 2);
}

async fn money_for_an_order_paid_by_nobody_knows_whom_is_flagged(db: &TestDb) {
    db.order_with_status("o", "paid").await;
    db.payment("p", "o").await;
    assert_eq!(db.apply("p", settled("p")).await.outcome, Outcome::Flagged);
    assert_eq!(db.flags().await, [format!("{}:p", FlagKind::PaidByUnknown)]);
    assert!(db.refunds().await.is_empty());
}

/// The chain-to-ledger pass may have seen the transfer before anybody knew whose it was.
async fn a_transfer_seen_before_and_matched_to_nobody_becomes_the_payment_s(db: &TestDb) {
    db.paying_order("o", "p").await;
    db.apply("p", tentative("p")).await;
    let sql = "UPDATE {transfers} SET payment_id = NULL";
    db.gateway.execute(sql, &[]).await.unwrap();
    assert_eq!(db.apply("p", settled("p")).await.outcome, Outcome::Confirmed);
    let transfers = db.gateway.transfers().await.unwrap();
    assert_eq!(transfers.len(), 1);
    assert_eq!(transfers[0].payment_id.as_deref(), Some("p"));
    assert_eq!(transfers[0].finality, "final");
}

async fn addresses_and_hashes_are_compared_whatever_their_case(db: &TestDb) {
    db.order("o").await;
    let plain = payment("p", "o");
    let upper =
        |text: &Option<String>| text.as_ref().map(|t| format!("0x{}", t[2..].to_uppercase()));
    let row = RawPayment {
        token: upper(&plain.token),
        payer: upper(&plain.payer),
        pay_to: upper(&plain.pay_to),
        nonce: upper(&plain.nonce),
        ..plain
    };
    db.gateway.insert_payment(&row).await.unwrap();
    assert_eq!(db.apply("p", settled("p")).await.outcome, Outcome::Paid);
}

/// I3, I6, I10: whoever comes second sees what the first one wrote.
async fn two_replicas_on_one_order_pay_it_once_and_owe_once(db: &TestDb) {
    const ORDERS: usize = 12;
    for n in 0..ORDERS {
        db.order(&format!("o{n}")).await;
        db.payment(&format!("a{n}"), &format!("o{n}")).await;
        db.payment(&format!("b{n}"), &format!("o{n}")).await;
    }
    assert_eq!(db.discover().await, (2 * ORDERS, 0));
    // All of the a's in one lease, all of the b's in the other: every order is contended.
    let (first, second) = (lease(T0, at(60)), lease(T0, at(60)));
    let a = db.store.lease_page(&first, None, u32::try_from(ORDERS).unwrap()).await.unwrap();
    let b = db.store.lease_page(&second, None, 100).await.unwrap();
    assert!(ids(&a).iter().all(|id| id.starts_with('a')));
    assert!(ids(&b).iter().all(|id| id.starts_with('b')));
    let other = db.replica().await;
    let tasks: Vec<_> = [(Arc::clone(&db.store), first, "a"), (other, second, "b")]
        .into_iter()
        .map(|(store, held, prefix)| {
            tokio::spawn(async move {
                for n in 0..ORDERS {
                    let id = format!("{prefix}{n}");
                    let batch = vec![judged(&id, settled(&id))];
                    let applied =
                        store.apply(&held, batch, &Policy::default(), at(30)).await.unwrap();
                    resolved(&applied, &id);
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(db.count("{refunds_owed}").await, 12);
    let orders = db.gateway.orders().await.unwrap();
    let refunds = db.gateway.refunds().await.unwrap();
    for n in 0..ORDERS {
        let (status, paid_by) = &orders[&format!("o{n}")];
        let paid_by = paid_by.clone().unwrap();
        assert_eq!(status, "paid");
        let owed = refunds.iter().filter(|r| r.payment_id[1..] == n.to_string());
        let owed: Vec<&str> = owed.map(|r| r.payment_id.as_str()).collect();
        assert_eq!(owed.len(), 1);
        assert_ne!(owed[0], paid_by);
    }
    assert!(db.flags().await.is_empty());
}

async fn a_large_batch_is_one_transaction(db: &TestDb) {
    let mut batch = Vec::new();
    for n in 0..250 {
        let (order, id) = (format!("o{n}"), format!("p{n}"));
        db.paying_order(&order, &id).await;
        batch.push(judged(&id, settled_in(&id, 100, n, Finality::Final)));
    }
    let applied = db.apply_at(at(30), &Policy::default(), batch).await;
    assert_eq!(applied.len(), 250);
    assert!(applied.iter().all(|a| a.result.as_ref().unwrap().outcome == Outcome::Paid));
    assert_eq!(db.count("{transfers}").await, 250);
    assert_eq!(db.count("{checks}").await, 250);
}
