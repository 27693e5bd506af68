//! Reorgs under a payment that is paid already, on a real EVM.

use reconciled::sim::gateway::OrderUpdate;
use serde_json::json;

use super::scene::{Scene, now, number};
use crate::support::daemon::{Daemon, eventually};

/// Far enough that nothing is final by chance.
const SLOTS_IN_AN_EPOCH: u64 = 4;

/// A paid order whose transfer is one block below the head, and not final.
async fn paid_tentatively(scene: &Scene) -> (crate::support::anvil::Authorization, Daemon) {
    scene.gateway.put_stock("thing", 7).await.unwrap();
    let authorization = scene.unknown("p").await;
    let daemon = scene.settings().write().start_ready().await;
    scene.land(&authorization).await;
    scene.order_is("order-p", "paid").await;
    scene.chain.anvil.mine(1).await;
    (authorization, daemon)
}

async fn events_are(scene: &Scene, expected: &[&str]) {
    eventually(&format!("the events are {expected:?}"), async || {
        let events = scene.gateway.events().await.unwrap();
        if events == expected { Ok(()) } else { Err(format!("{events:?}")) }
    })
    .await;
}

/// Section 6: back to unknown, and paid again when it lands again.
#[tokio::test]
async fn a_reorg_that_removes_the_transfer_takes_the_payment_of_the_order_back() {
    let scene = Scene::with_epochs_of(SLOTS_IN_AN_EPOCH).await;
    let (authorization, _daemon) = paid_tentatively(&scene).await;

    scene.chain.anvil.reorg(2).await;
    scene.order_is("order-p", "paying").await;
    assert_eq!(scene.payment_status("p").await, "unknown");
    assert_eq!(scene.paid_by("order-p").await, None);
    assert_eq!(scene.gateway.reservations().await.unwrap()["order-p/thing"], "held");
    assert_eq!(scene.identifier("p").await, "in_flight");
    assert_eq!(scene.gateway.open_flags().await.unwrap(), [""; 0]);
    events_are(&scene, &["order.paid:order-p", "order.reopened:order-p"]).await;
    assert!(scene.gateway.transfers().await.unwrap()[0].orphaned);
    scene.assert_conserved().await;

    scene.land(&authorization).await;
    scene.order_is("order-p", "paid").await;
    scene.finalize().await;
    scene.all_closed().await;
    events_are(&scene, &["order.paid:order-p", "order.reopened:order-p", "order.paid:order-p"])
        .await;
    assert_eq!(scene.gateway.reservations().await.unwrap()["order-p/thing"], "committed");
    assert_eq!(scene.shelf().await, "7");
    scene.assert_conserved().await;
}

/// What was handed over cannot be taken back: a person is told.
#[tokio::test]
async fn a_reorg_after_delivery_is_flagged() {
    let scene = Scene::with_epochs_of(SLOTS_IN_AN_EPOCH).await;
    let (_, _daemon) = paid_tentatively(&scene).await;
    let delivered = OrderUpdate { delivered_at: Some(now()), ..OrderUpdate::default() };
    scene.gateway.update_order("order-p", &delivered).await.unwrap();

    scene.chain.anvil.reorg(2).await;
    scene.flagged("reorged_after_delivery", "p").await;
    assert_eq!(scene.order_status("order-p").await, "paying");
    assert_eq!(scene.payment_status("p").await, "unknown");
}

/// I4, I6: the same transfer in another block is the same money: no second event, no refund.
#[tokio::test]
async fn a_reorg_that_moves_the_transfer_to_another_block_moves_the_record() {
    let scene = Scene::with_epochs_of(SLOTS_IN_AN_EPOCH).await;
    let (authorization, _daemon) = paid_tentatively(&scene).await;
    let before = scene.chain.anvil.block("latest").await;

    // In one step, so that no reader sees the time in between: from the first of the two blocks to the
    // second.
    let from = scene.chain.anvil.rpc("eth_accounts", json!([])).await[0].clone();
    let transaction = json!({
        "from": from,
        "to": scene.chain.token,
        "data": scene.chain.transfer_call(&authorization),
        "gas": "0xf4240",
    });
    scene.chain.anvil.rpc("anvil_reorg", json!([2, [[transaction, 1]]])).await;
    let head = scene.chain.anvil.block("latest").await;
    assert_eq!(head.number, before.number);

    let place = async || {
        let sql = "SELECT CAST(block_number AS TEXT), block_hash, tx_hash FROM {transfers} \
                   WHERE payment_id = 'p' AND orphaned_at IS NULL";
        scene.gateway.rows(sql, &[], 3).await.unwrap()
    };
    eventually("the record is about the new block", async || {
        let seen = place().await;
        let is_there = seen.len() == 1
            && seen[0][0] == Some(head.number.to_string())
            && seen[0][1] == Some(head.hash.to_string());
        if is_there { Ok(()) } else { Err(format!("{seen:?}")) }
    })
    .await;
    assert_eq!(scene.order_status("order-p").await, "paid");
    scene.finalize().await;
    scene.all_closed().await;
    let hash = place().await[0][2].clone().unwrap();
    let receipt = scene.chain.anvil.rpc("eth_getTransactionReceipt", json!([hash])).await;
    assert_eq!(number(&receipt["blockNumber"]), head.number);
    assert_eq!(scene.gateway.events().await.unwrap(), ["order.paid:order-p"]);
    assert_eq!(scene.gateway.refunds().await.unwrap(), []);
    assert_eq!(scene.gateway.open_flags().await.unwrap(), [""; 0]);
    assert_eq!(scene.outcomes().await["paid"], 1);
    scene.assert_conserved().await;
}
