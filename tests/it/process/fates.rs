//! Every way a payment can end, on a real EVM: what the tables, the outbox and `explain` say then.

use reconciled::domain::RawPayment;
use reconciled::sim::gateway::{OrderUpdate, SeenRefund};
use serde_json::json;

use super::scene::{AMOUNT, ELSEWHERE, PAST_THE_DEADLINE, PAY_TO, Scene, ago, number};
use crate::support::anvil::Authorization;
use crate::support::daemon::eventually;

fn refund(payment: &str, reason: &str, amount: u64) -> SeenRefund {
    SeenRefund {
        payment_id: payment.to_owned(),
        reason: reason.to_owned(),
        amount: amount.to_string(),
        status: "owed".to_owned(),
    }
}

/// I2, I7, I12: the settle call times out, the money lands later, and the order is paid, with the block
/// and the log to show for it.
#[tokio::test]
async fn a_settle_call_times_out_and_then_the_transfer_lands() {
    let scene = Scene::start().await;
    scene.gateway.put_stock("thing", 7).await.unwrap();
    let authorization = scene.unknown("p").await;
    let config = scene.settings().write();
    let _daemon = config.start_ready().await;

    scene.checked_again("p", "pending").await;
    assert_eq!(scene.order_status("order-p").await, "paying");
    let before = config.explain("p").await;
    assert_eq!(before["watch"]["last_verdict"], "pending", "{before}");
    assert_eq!(before["resolutions"], json!([]), "{before}");

    let receipt = scene.land(&authorization).await;
    scene.order_is("order-p", "paid").await;
    assert_eq!(scene.paid_by("order-p").await.as_deref(), Some("p"));
    assert_eq!(scene.payment_status("p").await, "settled");
    assert_eq!(scene.gateway.reservations().await.unwrap()["order-p/thing"], "committed");
    assert_eq!(scene.shelf().await, "7");
    assert_eq!(scene.identifier("p").await, "settled");
    assert_eq!(scene.gateway.events().await.unwrap(), ["order.paid:order-p"]);
    scene.phase_is("p", "finality").await;

    let story = config.explain("p").await;
    let block = number(&receipt["blockNumber"]);
    // The authorization's use is the log before the transfer.
    let log = number(&receipt["logs"][1]["logIndex"]);
    let resolution = &story["resolutions"][0];
    assert_eq!(resolution["outcome"], "paid", "{story}");
    assert_eq!(resolution["block_number"], json!(block), "{story}");
    assert_eq!(resolution["block_hash"], receipt["blockHash"], "{story}");
    assert_eq!(resolution["tx_hash"], receipt["transactionHash"], "{story}");
    assert_eq!(resolution["log_index"], json!(log), "{story}");
    assert_eq!(resolution["evidence"]["evidence"]["readings"][0]["endpoint"], "anvil", "{story}");
    assert_eq!(story["watch"]["phase"], "finality", "{story}");
    let checks = story["checks"].as_array().unwrap();
    assert!(checks.iter().any(|check| check["verdict"] == "pending"), "{story}");
    assert!(checks.iter().any(|check| check["verdict"] == "settled:tentative"), "{story}");

    let text = config.explain_text("order-p").await;
    let hash = receipt["transactionHash"].as_str().unwrap();
    for part in [
        "payment p",
        "resolution: paid",
        "order.paid",
        hash,
        "anvil",
        "next: settled, and watched until",
    ] {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }

    scene.finalize().await;
    scene.phase_is("p", "closed").await;
    let text = config.explain_text("p").await;
    assert!(text.contains("next: closed: nothing more can happen"), "{text}");
    assert_eq!(scene.gateway.events().await.unwrap(), ["order.paid:order-p"]);
    assert_eq!(scene.gateway.transfers().await.unwrap()[0].finality, "final");
    scene.assert_conserved().await;
}

/// I2, I5: unused and expired is not yet failed; at the deadline, by block time, it is, and the stock
/// goes back once.
#[tokio::test]
async fn a_payment_that_never_lands_fails_at_the_deadline_and_not_before() {
    let scene = Scene::start().await;
    scene.gateway.put_stock("thing", 7).await.unwrap();
    scene.unknown("p").await;
    let config = scene.settings().write();
    let _daemon = config.start_ready().await;

    scene.checked_again("p", "pending").await;
    scene.later(super::scene::VALID_FOR + 60).await;
    scene.checked_again("p", "unsettleable:expired").await;
    assert_eq!(scene.order_status("order-p").await, "paying");
    assert_eq!(scene.payment_status("p").await, "unknown");
    assert_eq!(scene.shelf().await, "7");

    scene.later(PAST_THE_DEADLINE).await;
    scene.order_is("order-p", "failed").await;
    assert_eq!(scene.payment_status("p").await, "failed");
    assert_eq!(scene.gateway.reservations().await.unwrap()["order-p/thing"], "released");
    assert_eq!(scene.shelf().await, "8");
    assert_eq!(scene.identifier("p").await, "failed");
    assert_eq!(scene.gateway.events().await.unwrap(), ["order.failed:order-p"]);
    scene.phase_is("p", "closed").await;
    let story = config.explain("p").await;
    assert_eq!(story["resolutions"][0]["verdict"], "unsettleable:expired", "{story}");

    // A careless gateway writes over it: the same ending again, with no second effect.
    scene.gateway.set_payment_status("p", "unknown").await.unwrap();
    scene.payment_is("p", "failed").await;
    assert_eq!(scene.shelf().await, "8");
    assert_eq!(scene.gateway.events().await.unwrap(), ["order.failed:order-p"]);
    assert_eq!(scene.gateway.refunds().await.unwrap(), []);
}

/// I2: a canceled authorization reads as used, and is not paid.
#[tokio::test]
async fn a_canceled_authorization_fails_the_payment() {
    let scene = Scene::start().await;
    scene.gateway.put_stock("thing", 7).await.unwrap();
    let authorization = scene.unknown("p").await;
    let config = scene.settings().set("policy", "early_failure", "true").write();
    let _daemon = config.start_ready().await;

    scene.chain.cancel(&authorization).await;
    // Not before the cancellation is final.
    scene.checked_again("p", "inconclusive:not_finalized").await;
    assert_eq!(scene.order_status("order-p").await, "paying");
    scene.finalize().await;
    scene.order_is("order-p", "failed").await;
    assert_eq!(scene.payment_status("p").await, "failed");
    assert_eq!(scene.shelf().await, "8");
    scene.phase_is("p", "closed").await;
    let story = config.explain("p").await;
    assert_eq!(story["resolutions"][0]["verdict"], "unsettleable:canceled", "{story}");
    assert_eq!(scene.gateway.refunds().await.unwrap(), []);
    scene.assert_conserved().await;
}

/// The nonce was used, and the money went elsewhere, or was less: a person is told at once, the
/// payment waits for its deadline, and is never paid.
async fn the_nonce_moved_other_money(change: impl FnOnce(&mut Authorization)) -> Scene {
    let scene = Scene::start().await;
    scene.gateway.put_stock("thing", 7).await.unwrap();
    let mut authorization = scene.unknown("p").await;
    let _daemon = scene.settings().write().start_ready().await;

    change(&mut authorization);
    scene.land(&authorization).await;
    scene.finalize().await;
    scene.flagged("nonce_used_elsewhere", "p").await;
    scene.checked_again("p", "unsettleable:used_elsewhere").await;
    assert_eq!(scene.order_status("order-p").await, "paying");

    scene.later(PAST_THE_DEADLINE).await;
    scene.order_is("order-p", "failed").await;
    assert_eq!(scene.payment_status("p").await, "failed");
    assert_eq!(scene.shelf().await, "8");
    assert_eq!(scene.gateway.open_flags().await.unwrap(), ["nonce_used_elsewhere:p"]);
    assert_eq!(scene.gateway.events().await.unwrap(), ["order.failed:order-p"]);
    scene
}

#[tokio::test]
async fn a_nonce_used_for_another_recipient_pays_nothing_and_is_flagged() {
    let scene = the_nonce_moved_other_money(|signed| signed.to = ELSEWHERE).await;
    assert_eq!(scene.gateway.refunds().await.unwrap(), []);
    scene.assert_conserved().await;
}

/// I4: too little reached the merchant. It pays no order; the flag is how it is accounted for.
#[tokio::test]
async fn a_nonce_used_for_a_smaller_amount_pays_nothing_and_is_flagged() {
    the_nonce_moved_other_money(|signed| signed.value = AMOUNT - 1).await;
}

/// I3, I4, I6: a settle that failed for the gateway, a second payment that paid the order, and then the
/// first one lands as well.
#[tokio::test]
async fn a_failed_settle_that_lands_after_the_order_was_paid_again_is_owed_back() {
    let scene = Scene::start().await;
    scene.gateway.put_stock("thing", 7).await.unwrap();
    let (first, second) = (scene.sign().await, scene.sign().await);
    scene.order("o").await;
    scene.pay("first", "o", "settle_failed", &first).await;
    scene.pay("second", "o", "unknown", &second).await;
    let _daemon = scene.settings().write().start_ready().await;

    scene.land(&second).await;
    scene.order_is("o", "paid").await;
    scene.land(&first).await;
    scene.payment_is("first", "settled").await;
    scene.finalize().await;
    scene.all_closed().await;
    assert_eq!(scene.paid_by("o").await.as_deref(), Some("second"));
    assert_eq!(scene.gateway.refunds().await.unwrap(), [refund("first", "duplicate", AMOUNT)]);
    assert_eq!(scene.gateway.events().await.unwrap(), ["order.paid:o", "refund.owed:o"]);
    // The buyer who retries with either is told that the order is paid.
    assert_eq!(scene.identifier("first").await, "settled");
    assert_eq!(scene.identifier("second").await, "settled");
    assert_eq!(scene.gateway.reservations().await.unwrap()["o/thing"], "committed");
    scene.assert_conserved().await;
}

/// I4, I5: failed at the deadline while it could still land, and then it lands.
#[tokio::test]
async fn a_transfer_that_lands_after_the_order_failed_is_owed_back_and_leaves_stock_alone() {
    let scene = Scene::start().await;
    scene.gateway.put_stock("thing", 7).await.unwrap();
    let mut authorization = scene.sign().await;
    authorization.valid_before += 10 * PAST_THE_DEADLINE;
    scene.order("o").await;
    scene.pay("p", "o", "unknown", &authorization).await;
    let _daemon = scene.settings().write().start_ready().await;

    scene.later(PAST_THE_DEADLINE).await;
    scene.order_is("o", "failed").await;
    assert_eq!(scene.shelf().await, "8");
    scene.phase_is("p", "late").await;

    scene.land(&authorization).await;
    scene.finalize().await;
    scene.all_closed().await;
    assert_eq!(scene.order_status("o").await, "failed");
    assert_eq!(scene.payment_status("p").await, "settled");
    assert_eq!(scene.gateway.refunds().await.unwrap(), [refund("p", "late", AMOUNT)]);
    assert_eq!(scene.gateway.events().await.unwrap(), ["order.failed:o", "refund.owed:o"]);
    assert_eq!(scene.shelf().await, "8");
    assert_eq!(scene.gateway.reservations().await.unwrap()["o/thing"], "released");
    scene.assert_conserved().await;
}

/// I4, I12: evidence is keyed by the log, not by the transaction.
#[tokio::test]
async fn four_payments_in_one_transaction_each_pay_their_order_with_a_log_of_their_own() {
    let scene = Scene::start().await;
    let mut calls = Vec::new();
    for id in ["a", "b", "c", "d"] {
        calls.push(scene.chain.transfer_call(&scene.unknown(id).await));
    }
    let _daemon = scene.settings().write().start_ready().await;
    let receipt = scene.chain.batch(calls).await;
    scene.finalize().await;
    scene.all_closed().await;
    for id in ["a", "b", "c", "d"] {
        assert_eq!(scene.paid_by(&format!("order-{id}")).await.as_deref(), Some(id));
    }
    let mut transfers = scene.gateway.transfers().await.unwrap();
    transfers.sort_by_key(|transfer| transfer.payment_id.clone());
    for (place, transfer) in transfers.iter().enumerate() {
        assert_eq!(transfer.tx_hash, receipt["transactionHash"].as_str().unwrap());
        // Calls in order of ids, two logs each.
        let log = number(&receipt["logs"][2 * place + 1]["logIndex"]);
        assert_eq!(transfer.log_index, log.to_string(), "{transfers:?}");
    }
    assert_eq!(transfers.len(), 4);
    scene.assert_conserved().await;
}

/// The gateway died between writing the row and hearing of the settle: nobody says `unknown`.
#[tokio::test]
async fn a_settling_row_left_by_a_dead_gateway_is_found() {
    let scene = Scene::start().await;
    let authorization = scene.sign().await;
    scene.order("o").await;
    let row = RawPayment {
        status: Some("settling".to_owned()),
        created_at: Some(ago(60).as_millis().to_string()),
        broadcast_at: None,
        ..scene.row("p", "o", &authorization)
    };
    scene.gateway.insert_payment(&row).await.unwrap();
    scene.land(&authorization).await;
    let _daemon = scene.settings().write().start_ready().await;
    scene.order_is("o", "paid").await;
}

/// Section 10: the record of a payment whose work failed for good starts at detection.
#[tokio::test]
async fn a_paid_order_that_the_gateway_cannot_deliver_is_owed_back() {
    let scene = Scene::start().await;
    let authorization = scene.unknown("p").await;
    scene.land(&authorization).await;
    let _daemon = scene.settings().write().start_ready().await;
    scene.order_is("order-p", "paid").await;
    let undelivered =
        OrderUpdate { status: Some("undelivered".to_owned()), ..OrderUpdate::default() };
    scene.gateway.update_order("order-p", &undelivered).await.unwrap();
    eventually("the refund is owed", async || {
        let refunds = scene.gateway.refunds().await.unwrap();
        if refunds == [refund("p", "undelivered", AMOUNT)] {
            Ok(())
        } else {
            Err(format!("{refunds:?}"))
        }
    })
    .await;
    assert_eq!(authorization.to, PAY_TO);
    scene.assert_conserved().await;
}

/// Nothing is due for a day, and no reconcile comes: `recheck` has the running daemon look at once.
#[tokio::test]
async fn a_payment_is_checked_at_once_when_somebody_asks() {
    let scene = Scene::start().await;
    let mut authorization = scene.sign().await;
    authorization.valid_before += PAST_THE_DEADLINE;
    scene.order("o").await;
    scene.pay("p", "o", "unknown", &authorization).await;
    let settings = scene.settings().set("checks", "repeats", r#"["0s", "1d"]"#);
    let config = settings.text("reconcile", "cron", "0 0 0 1 1 *").write();
    let daemon = config.start_ready().await;
    let checks = async || daemon.metrics().await.sum("checks_total");
    eventually("it was checked at its start", async || match checks().await {
        0.0 => Err("it was not".to_owned()),
        _ => Ok(()),
    })
    .await;
    scene.land(&authorization).await;
    assert_eq!(scene.order_status("o").await, "paying");

    let ended = config.run(&["recheck", "p", "nothing", "--json"]).await;
    // One of them does not exist.
    assert_eq!(ended.code, 1, "{ended:?}");
    let said: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(said, json!({"due": ["p"], "not_found": ["nothing"]}));
    scene.order_is("o", "paid").await;
    let ended = config.run(&["recheck", "p"]).await;
    assert_eq!(ended.code, 0, "{ended:?}");
    assert!(ended.stdout.contains("payment p is due now"), "{ended:?}");
}
