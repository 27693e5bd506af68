//! Permit2 payments, on a real EVM with contracts at the canonical addresses: the binary pays for what
//! moved, owes back what moved, and concludes nothing from a bit it cannot explain.

use alloy_primitives::U256;
use reconciled::domain::RawPayment;
use reconciled::sim::gateway::SeenRefund;

use super::scene::{AMOUNT, PAST_THE_DEADLINE, PAY_TO, Scene, ago};
use crate::support::anvil::{ANVIL_SENDER, Authorization, Permit, Through};

/// Writes a payment of `order` with the terms of `a` as a permit.
async fn pay_by_permit(scene: &Scene, id: &str, order: &str, a: &Authorization, started: u64) {
    let at = Some(ago(started).as_millis().to_string());
    let row = RawPayment {
        method: Some("permit2".to_owned()),
        created_at: at.clone(),
        broadcast_at: at,
        ..scene.row(id, order, a)
    };
    scene.gateway.insert_payment(&row).await.unwrap();
    scene.gateway.insert_identifier(&format!("retry-{id}"), id, "in_flight", None).await.unwrap();
}

fn permit(a: &Authorization, upto: Option<u64>) -> Permit {
    Permit {
        owner: a.payer,
        to: PAY_TO,
        amount: AMOUNT,
        upto,
        deadline: a.valid_before,
        nonce: a.nonce,
    }
}

/// I2, I6: a metered payment settles for less and pays; its duplicate is owed back as observed; a nonce its
/// owner took back fails at the deadline; one that was used where nobody can see it stays unknown.
#[tokio::test]
async fn permits_end_by_what_the_chain_shows_of_them() {
    let scene = Scene::start().await;
    scene.gateway.put_stock("thing", 7).await.unwrap();
    let [metered, double, taken_back, unseen, cheap] =
        scene.sign_many(5).await.try_into().unwrap_or_else(|_| unreachable!("five of five"));
    for order in ["metered", "taken-back", "unseen", "cheap"] {
        scene.order(order).await;
    }
    pay_by_permit(&scene, "p1", "metered", &metered, 0).await;
    pay_by_permit(&scene, "p2", "metered", &double, 0).await;
    pay_by_permit(&scene, "p3", "taken-back", &taken_back, 0).await;
    pay_by_permit(&scene, "p5", "cheap", &cheap, 0).await;
    let _daemon = scene
        .settings()
        .of_chain("upto_facilitators", &format!("[\"{ANVIL_SENDER}\"]"))
        .write()
        .start_ready()
        .await;
    scene.checked_again("p1", "pending").await;

    let settle = async |a: &Authorization, upto, through| {
        let receipt = scene.chain.settle_permits(&[permit(a, upto)], through).await;
        assert_eq!(receipt["status"], "0x1", "{receipt}");
    };
    settle(&metered, Some(250), Through::Nobody).await;
    scene.order_is("metered", "paid").await;
    assert_eq!(scene.paid_by("metered").await.as_deref(), Some("p1"));
    settle(&double, Some(40), Through::Nobody).await;
    scene.payment_is("p2", "settled").await;
    let owed = SeenRefund {
        payment_id: "p2".to_owned(),
        reason: "duplicate".to_owned(),
        amount: "40".to_owned(),
        status: "owed".to_owned(),
    };
    assert_eq!(scene.gateway.refunds().await.unwrap(), [owed]);

    // Its payer names himself as the facilitator of a second permit, and is modest.
    settle(&cheap, Some(1), Through::Payer).await;
    let word = U256::from_be_bytes(taken_back.nonce.0) >> 8;
    scene.chain.invalidate(taken_back.payer, word, U256::MAX).await;
    settle(&unseen, None, Through::Obscurity).await;
    // Its deadline is over by the local clock: only now is its silence flagged.
    pay_by_permit(&scene, "p4", "unseen", &unseen, PAST_THE_DEADLINE).await;
    scene.flagged("inconclusive_at_deadline", "p4").await;
    scene.later(PAST_THE_DEADLINE).await;
    scene.payment_is("p3", "failed").await;
    scene.flagged("nonce_used_elsewhere", "p5").await;
    scene.payment_is("p5", "failed").await;
    scene.order_is("cheap", "failed").await;
    scene.order_is("taken-back", "failed").await;
    assert_eq!(scene.payment_status("p4").await, "unknown");
    assert_eq!(scene.order_status("unseen").await, "paying");
    scene.phase_is("p1", "closed").await;
    scene.phase_is("p2", "closed").await;
    let flags = scene.gateway.open_flags().await.unwrap();
    assert_eq!(flags, ["inconclusive_at_deadline:p4", "nonce_used_elsewhere:p5"]);
}
