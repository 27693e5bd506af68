//! The rows of DESIGN section 7 in which the money did not move, or nobody can tell.

use reconciled::domain::{
    Inconclusive, Outcome, Phase, Policy, RefundReason, Unsettleable, Verdict,
};
use reconciled::sim::gateway::OrderUpdate;

use super::harness::{
    T0, TestDb, at, expired, hours, inconclusive, judged, outcome, payment, pending, resolved,
    settled, unsettleable,
};

for_each_backend!(
    silence_never_fails_a_payment,
    before_the_deadline_a_negative_waits,
    with_early_failure_a_proven_negative_fails_at_once,
    at_the_deadline_a_negative_fails_the_order_and_frees_its_stock,
    stock_goes_back_on_a_shelf_that_is_oversold,
    a_payment_that_could_still_land_is_watched_on_and_owed_back_when_it_does,
    an_order_lives_as_long_as_one_of_its_payments_may_pay_it,
    a_payment_whose_money_is_owed_back_keeps_no_order_alive,
    the_last_of_several_payments_fails_the_order,
    an_authorization_used_for_other_money_is_flagged_before_the_deadline,
    a_quorum_that_is_not_met_fails_nothing,
    a_row_that_makes_no_sense_is_flagged_and_changes_nothing,
    a_chain_that_is_not_configured_is_flagged_until_it_is,
    a_flag_that_a_person_closed_stays_closed,
    a_flag_raised_again_keeps_its_note_and_learns_its_order,
);

/// I2.
async fn silence_never_fails_a_payment(db: &TestDb) {
    db.order_with_stock("o", "sku").await;
    db.payment("p", "o").await;
    db.gateway.insert_identifier("key", "p", "in_flight", None).await.unwrap();
    let done = db.apply("p", inconclusive()).await;
    assert_eq!(
        (done.outcome, done.phase, done.recorded),
        (Outcome::Waiting, Phase::Targeted, false)
    );
    assert!(db.flags().await.is_empty());

    let batch = vec![judged("p", inconclusive())];
    let applied = db.apply_at(at(hours(1_000)), &Policy::default(), batch).await;
    assert!(!resolved(&applied, "p").recorded);
    assert_eq!(db.flags().await, ["inconclusive_at_deadline:p"]);
    assert_eq!(db.payment_status("p").await, "unknown");
    assert_eq!(db.order_status("o").await.0, "paying");
    assert_eq!(db.reservation("o/sku").await, "held");
    assert_eq!(db.identifier("key").await, "in_flight");
    assert_eq!(db.count("{resolutions}").await, 0);
    let watch = db.store.story(&"p".into()).await.unwrap().unwrap().watch.unwrap();
    assert_eq!((watch.checks_done, watch.consecutive_inconclusive), (2, 2));

    // It could be read after all: the flag's cause is gone.
    db.apply("p", settled("p")).await;
    assert!(db.flags().await.is_empty());
    let note = db.value("SELECT closed_by || ': ' || note FROM {flags}").await;
    assert_eq!(note.as_deref(), Some("reconciled: the chain gave a conclusive answer"));
}

async fn before_the_deadline_a_negative_waits(db: &TestDb) {
    db.paying_order("o", "p").await;
    for verdict in [pending(hours(23)), expired(hours(23))] {
        let done = db.apply("p", verdict).await;
        assert_eq!((done.outcome, done.recorded), (Outcome::Waiting, false));
    }
    assert_eq!(db.payment_status("p").await, "unknown");
    assert_eq!(db.order_status("o").await.0, "paying");
    assert!(db.events().await.is_empty());
}

async fn with_early_failure_a_proven_negative_fails_at_once(db: &TestDb) {
    db.paying_order("o", "p").await;
    let policy = Policy { early_failure: true, ..Policy::default() };
    let done = db.apply_with(&policy, "p", pending(hours(1))).await;
    assert_eq!(done.outcome, Outcome::Waiting, "it can still land: that is no proof");
    let done = db.apply_with(&policy, "p", unsettleable(Unsettleable::Canceled, 70)).await;
    assert_eq!((done.outcome, done.phase), (Outcome::Failed, Phase::Closed));
    assert_eq!(db.order_status("o").await, ("failed".to_owned(), None));
}

/// I5: released once, and put back on the shelf.
async fn at_the_deadline_a_negative_fails_the_order_and_frees_its_stock(db: &TestDb) {
    db.order_with_stock("o", "sku").await;
    db.payment("p", "o").await;
    db.gateway.insert_identifier("key", "p", "in_flight", None).await.unwrap();
    let batch = vec![judged("p", expired(hours(24)))];
    let applied = db.apply_at(at(hours(24)), &Policy::default(), batch).await;
    assert_eq!(outcome(&applied, "p"), Outcome::Failed);
    assert_eq!(resolved(&applied, "p").phase, Phase::Closed);
    assert_eq!(db.payment_status("p").await, "failed");
    assert_eq!(db.order_status("o").await, ("failed".to_owned(), None));
    assert_eq!(db.reservation("o/sku").await, "released");
    assert_eq!(db.stock("sku").await, "5");
    assert_eq!(db.identifier("key").await, "failed");
    assert_eq!(db.events().await, ["order.failed:o"]);
    assert_eq!(db.value("SELECT outcome FROM {retry_outcomes}").await.as_deref(), Some("failed"));
    assert_eq!(
        db.value("SELECT verdict FROM {resolutions}").await.as_deref(),
        Some("unsettleable:expired")
    );
}

/// I5: the gateway sold more than there was, and what comes back does not cover it.
async fn stock_goes_back_on_a_shelf_that_is_oversold(db: &TestDb) {
    db.order_with_stock("o", "sku").await;
    db.payment("p", "o").await;
    db.gateway.execute("UPDATE stock SET available = -5", &[]).await.unwrap();
    let batch = vec![judged("p", expired(hours(24)))];
    let applied = db.apply_at(at(hours(24)), &Policy::default(), batch).await;
    assert_eq!(outcome(&applied, "p"), Outcome::Failed);
    assert_eq!(db.reservation("o/sku").await, "released");
    assert_eq!(db.stock("sku").await, "-3");
}

async fn a_payment_that_could_still_land_is_watched_on_and_owed_back_when_it_does(db: &TestDb) {
    db.order_with_stock("o", "sku").await;
    db.payment("p", "o").await;
    let batch = vec![judged("p", pending(hours(24)))];
    let applied = db.apply_at(at(hours(24)), &Policy::default(), batch).await;
    assert_eq!(outcome(&applied, "p"), Outcome::Failed);
    assert_eq!(resolved(&applied, "p").phase, Phase::Late);
    assert_eq!(db.stock("sku").await, "5");
    assert_eq!(db.discover().await, (0, 0), "its watch never closed");

    let done = db.apply("p", settled("p")).await;
    assert_eq!(done.refund, Some(RefundReason::Late));
    assert_eq!(db.payment_status("p").await, "settled");
    assert_eq!(db.order_status("o").await.0, "failed");
    assert_eq!(
        (db.reservation("o/sku").await, db.stock("sku").await),
        ("released".into(), "5".into())
    );
    assert_eq!(db.events().await, ["order.failed:o", "refund.owed:o"]);
}

async fn an_order_lives_as_long_as_one_of_its_payments_may_pay_it(db: &TestDb) {
    for sibling in ["settling", "unknown", "settle_failed", "settled", "who knows"] {
        let (order, id) = (format!("o {sibling}"), format!("p {sibling}"));
        db.order(&order).await;
        db.payment(&id, &order).await;
        let mut row = payment(&format!("s {sibling}"), &order);
        row.status = Some(sibling.to_owned());
        db.gateway.insert_payment(&row).await.unwrap();
        let batch = vec![judged(&id, expired(hours(24)))];
        let applied = db.apply_at(at(hours(24)), &Policy::default(), batch).await;
        assert_eq!(outcome(&applied, &id), Outcome::Failed);
        assert_eq!(db.payment_status(&id).await, "failed");
        assert_eq!(db.order_status(&order).await.0, "paying", "sibling is {sibling}");
    }
    assert!(db.events().await.is_empty());
}

/// The gateway took another payment for an order it had called off before.
async fn a_payment_whose_money_is_owed_back_keeps_no_order_alive(db: &TestDb) {
    db.order_with_status("o", "canceled").await;
    db.payment("first", "o").await;
    assert_eq!(db.apply("first", settled("first")).await.refund, Some(RefundReason::Late));
    let again = OrderUpdate { status: Some("paying".to_owned()), ..OrderUpdate::default() };
    db.gateway.update_order("o", &again).await.unwrap();
    db.payment("second", "o").await;
    let batch = vec![judged("second", expired(hours(24)))];
    db.apply_at(at(hours(24)), &Policy::default(), batch).await;
    assert_eq!(db.order_status("o").await, ("failed".to_owned(), None));
}

/// Both in one batch: the second one sees what the first one did.
async fn the_last_of_several_payments_fails_the_order(db: &TestDb) {
    db.order_with_stock("o", "sku").await;
    db.payment("a", "o").await;
    db.payment("b", "o").await;
    let batch = vec![judged("a", expired(hours(24))), judged("b", expired(hours(24)))];
    db.apply_at(at(hours(24)), &Policy::default(), batch).await;
    assert_eq!(db.order_status("o").await.0, "failed");
    assert_eq!(db.stock("sku").await, "5");
    assert_eq!(db.events().await, ["order.failed:o"]);
}

async fn an_authorization_used_for_other_money_is_flagged_before_the_deadline(db: &TestDb) {
    db.paying_order("o", "p").await;
    let done = db.apply("p", unsettleable(Unsettleable::UsedElsewhere, 70)).await;
    assert!(!done.recorded);
    assert_eq!(db.flags().await, ["nonce_used_elsewhere:p"]);
    assert_eq!(db.payment_status("p").await, "unknown");
}

/// I2: at the deadline the other endpoints' silence is not their agreement.
async fn a_quorum_that_is_not_met_fails_nothing(db: &TestDb) {
    db.paying_order("o", "p").await;
    let policy = Policy { quorum: 2, ..Policy::default() };
    let batch = vec![judged("p", pending(hours(24)))];
    let applied = db.apply_at(at(hours(24)), &policy, batch).await;
    assert!(!resolved(&applied, "p").recorded);
    assert_eq!(db.payment_status("p").await, "unknown");
    assert_eq!(db.flags().await, ["inconclusive_at_deadline:p"]);
}

/// I11.
async fn a_row_that_makes_no_sense_is_flagged_and_changes_nothing(db: &TestDb) {
    db.order("o").await;
    let mut row = payment("p", "o");
    row.nonce = Some("nonsense".to_owned());
    db.gateway.insert_payment(&row).await.unwrap();
    let mut check = judged("p", Verdict::Inconclusive(Inconclusive::MalformedPayment));
    check.problem = Some("column nonce is \"nonsense\"".to_owned());
    let applied = db.apply_at(at(30), &Policy::default(), vec![check]).await;
    assert_eq!(outcome(&applied, "p"), Outcome::Flagged);
    assert_eq!(resolved(&applied, "p").phase, Phase::Reconcile);
    assert_eq!(db.flags().await, ["malformed_payment:p"]);
    assert_eq!(db.payment_status("p").await, "unknown");
    let story = db.store.story(&"p".into()).await.unwrap().unwrap();
    assert_eq!(story.flags[0]["detail"]["problem"], "column nonce is \"nonsense\"");
    assert_eq!(story.checks[0].detail.as_deref(), Some("column nonce is \"nonsense\""));
}

/// I11. A cause that comes back is a new flag, beside the history of the old one.
async fn a_chain_that_is_not_configured_is_flagged_until_it_is(db: &TestDb) {
    db.paying_order("o", "p").await;
    let unconfigured = || Verdict::Inconclusive(Inconclusive::ChainNotConfigured);
    db.apply("p", unconfigured()).await;
    db.apply("p", unconfigured()).await;
    assert_eq!(db.flags().await, ["chain_not_configured:p"]);
    db.apply("p", pending(10)).await;
    assert!(db.flags().await.is_empty());
    db.apply("p", unconfigured()).await;
    assert_eq!(db.flags().await, ["chain_not_configured:p"]);
    assert_eq!(db.count("{flags}").await, 2, "the closed one is history");
}

async fn a_flag_that_a_person_closed_stays_closed(db: &TestDb) {
    db.paying_order("o", "p").await;
    let used = || unsettleable(Unsettleable::UsedElsewhere, 70);
    db.apply("p", used()).await;
    let closed = T0.as_millis().to_string();
    let sql = "UPDATE {flags} SET closed_at = ?t, closed_by = 'alice', note = 'known customer'";
    db.gateway.execute(sql, &[Some(&closed)]).await.unwrap();
    db.apply("p", used()).await;
    assert!(db.flags().await.is_empty());
    let kept = db.value("SELECT closed_by || ': ' || note FROM {flags}").await;
    assert_eq!(kept.as_deref(), Some("alice: known customer"));
}

async fn a_flag_raised_again_keeps_its_note_and_learns_its_order(db: &TestDb) {
    db.paying_order("o", "p").await;
    let used = || unsettleable(Unsettleable::UsedElsewhere, 70);
    db.apply("p", used()).await;
    let sql = "UPDATE {flags} SET note = 'asked the buyer', order_id = NULL";
    db.gateway.execute(sql, &[]).await.unwrap();
    db.apply("p", used()).await;
    let kept = db.value("SELECT order_id || ': ' || note FROM {flags}").await;
    assert_eq!(kept.as_deref(), Some("o: asked the buyer"));
}
