//! Refunds on a real EVM: the batch pays, and the daemon closes the record. And the commands for flags.

use alloy_primitives::B256;
use serde_json::{Value, json};

use super::scene::{AMOUNT, ELSEWHERE, Scene};
use crate::support::anvil::Authorization;
use crate::support::daemon::{ConfigFile, eventually};

/// Looks for refunds all the time; flags and claims are worked through by hand.
fn config(scene: &Scene) -> ConfigFile {
    scene
        .settings()
        .set("refunds", "every", "\"1s\"")
        .set("refunds", "owed_every", "\"1s\"")
        .write()
}

/// A payment `first` that is owed back, claimed by a batch, and what the batch signs to pay it.
async fn claimed(scene: &Scene) -> Authorization {
    let (first, second) = (scene.sign().await, scene.sign().await);
    scene.order("o").await;
    scene.pay("first", "o", "settle_failed", &first).await;
    scene.pay("second", "o", "unknown", &second).await;
    scene.land(&second).await;
    scene.order_is("o", "paid").await;
    scene.land(&first).await;
    refund_is(scene, "owed").await;
    scene.finalize().await;
    scene.all_closed().await;
    let claim = "UPDATE {refunds_owed} SET status = 'claimed', claimed_by = 'batch' \
                 WHERE payment_id = 'first' AND status = 'owed'";
    assert_eq!(scene.gateway.execute(claim, &[]).await.unwrap(), 1);
    let nonce = column(scene, "refund_nonce").await;
    // The refund wallet: some account that holds the token.
    let wallet = scene.sign().await;
    Authorization { to: first.payer, nonce: nonce.parse::<B256>().unwrap(), ..wallet }
}

async fn column(scene: &Scene, name: &str) -> String {
    let sql = format!("SELECT CAST({name} AS TEXT) FROM {{refunds_owed}}");
    let rows = scene.gateway.rows(&sql, &[], 1).await.unwrap();
    rows[0][0].clone().unwrap_or_default()
}

async fn refund_is(scene: &Scene, status: &str) {
    eventually(&format!("the refund is {status}"), async || {
        let refunds = scene.gateway.refunds().await.unwrap();
        match refunds.first() {
            Some(refund) if refund.status == status => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await;
}

/// Waits for two searches that began after the call.
async fn searched_again(scene: &Scene) {
    for _ in 0..2 {
        let before = column(scene, "searched_at").await;
        eventually("the refund is looked for", async || {
            let now = column(scene, "searched_at").await;
            if now == before { Err(now) } else { Ok(()) }
        })
        .await;
    }
}

async fn a_refund_that_is_paid_closes_its_record(scene: Scene) {
    let config = config(&scene);
    let daemon = config.start_ready().await;
    let refund = claimed(&scene).await;
    // The batch dies here, and wrote nothing down.
    let receipt = scene.land(&refund).await;
    searched_again(&scene).await;
    refund_is(&scene, "claimed").await;

    scene.finalize().await;
    refund_is(&scene, "paid").await;
    let story = config.explain("first").await;
    assert_eq!(story["refund"]["paid_tx"], receipt["transactionHash"], "{story}");
    let last = story["resolutions"].as_array().unwrap().last().unwrap();
    assert_eq!(last["outcome"], "refund_paid", "{story}");
    assert_eq!(last["block_hash"], receipt["blockHash"], "{story}");
    assert_eq!(last["evidence"]["shown_by"], json!(["anvil"]), "{story}");
    let events = scene.gateway.events().await.unwrap();
    assert_eq!(events, ["order.paid:o", "refund.owed:o", "refund.paid:o"]);
    assert_eq!(scene.gateway.open_flags().await.unwrap(), [""; 0]);
    scene.assert_conserved().await;
    eventually("the metrics say so", async || {
        let metrics = daemon.metrics().await;
        let paid = metrics.get("refunds_owed{reason=\"duplicate\",status=\"paid\"}");
        let counted = metrics.get("resolutions_total{outcome=\"refund_paid\"}");
        let searched = metrics.get("refunds_searched_timestamp_seconds{chain=\"31337\"}");
        match (paid, counted) {
            (1.0, 1.0) if searched > 1_700_000_000.0 => Ok(()),
            _ => Err(format!("{paid} {counted} {searched}")),
        }
    })
    .await;
    // The token takes the nonce once: a batch that starts again cannot pay twice.
    let again = scene.chain.transfer(&refund).await;
    assert_eq!(again["status"], "0x0", "{again}");
}

/// I6, mirrored, I7, I12: on PostgreSQL.
#[tokio::test]
async fn a_refund_paid_on_the_chain_closes_its_record() {
    a_refund_that_is_paid_closes_its_record(Scene::start().await).await;
}

/// The same on SQLite.
#[tokio::test]
async fn a_refund_paid_on_the_chain_closes_its_record_on_sqlite() {
    a_refund_that_is_paid_closes_its_record(Scene::on_sqlite().await).await;
}

/// A nonce used for something else closes nothing. A person is told, lists the flag and closes it, and is
/// not asked again.
#[tokio::test]
async fn a_refund_that_went_astray_is_flagged_listed_and_closed_by_hand() {
    let scene = Scene::start().await;
    let config = config(&scene);
    let _daemon = config.start_ready().await;
    let mut refund = claimed(&scene).await;
    refund.to = ELSEWHERE;
    scene.land(&refund).await;
    scene.finalize().await;
    scene.flagged("refund_mismatch", "first").await;
    refund_is(&scene, "claimed").await;

    let listed = config.run(&["flags", "list"]).await;
    assert_eq!(listed.code, 0, "{listed:?}");
    for part in ["refund_mismatch", "first", "payment", "opened"] {
        assert!(listed.stdout.contains(part), "{listed:?}");
    }
    let of = |said: &str| -> Value { serde_json::from_str(said).unwrap() };
    let listed = config.run(&["flags", "list", "--kind", "refund_mismatch", "--json"]).await;
    let flags = of(&listed.stdout);
    assert_eq!(flags["more"], json!(false), "{flags}");
    let flag = &flags["flags"][0];
    assert_eq!(flag["detail"]["owed"]["amount"], json!(AMOUNT.to_string()), "{flag}");
    let id = flag["id"].to_string();

    let refused = config.run(&["flags", "close", &id, "--by", "alice"]).await;
    assert_eq!(refused.code, 2, "a note is required: {refused:?}");
    let refused = config.run(&["flags", "close", &id, "--by", "alice", "--note", " "]).await;
    assert_eq!(refused.code, 2, "{refused:?}");
    let refused = config.run(&["flags", "close", &id, "--by", "reconciled", "--note", "x"]).await;
    assert_eq!(refused.code, 2, "that is the daemon's name: {refused:?}");
    let refused = config.run(&["flags", "list", "--kind", "nonsense"]).await;
    assert_eq!(refused.code, 2, "{refused:?}");
    assert!(refused.stderr.contains("refund_mismatch"), "the kinds are named: {refused:?}");

    let close = ["flags", "close", &id, &id, "999999", "--by", "alice", "--note", "paid by wire"];
    let closed = config.run(&close).await;
    assert_eq!(closed.code, 1, "one of them is unknown: {closed:?}");
    assert!(closed.stdout.contains(&format!("flag {id} is closed")), "{closed:?}");
    assert!(closed.stderr.contains("there is no flag 999999"), "{closed:?}");
    assert!(!closed.stderr.contains("was closed before"), "named twice: {closed:?}");
    let again = config.run(&["flags", "close", &id, "--by", "bob", "--note", "mine"]).await;
    assert_eq!(again.code, 1, "{again:?}");
    assert!(again.stderr.contains("by alice: paid by wire"), "{again:?}");

    searched_again(&scene).await;
    let listed = config.run(&["flags", "list"]).await;
    assert!(listed.stdout.contains("No flag is open"), "{listed:?}");
    let all = config.run(&["flags", "list", "--all", "--payment", "first", "--json"]).await;
    assert_eq!(of(&all.stdout)["flags"][0]["closed"]["by"], "alice", "{all:?}");
    let story = config.explain_text("first").await;
    for part in ["closed_by=alice", "paid by wire"] {
        assert!(story.contains(part), "{story}");
    }
}

/// Only the wallets that are named count, where some are.
#[tokio::test]
async fn where_wallets_are_named_a_stranger_s_refund_changes_nothing() {
    let scene = Scene::start().await;
    let named = format!("[{:?}]", ELSEWHERE.to_string());
    let settings = scene.settings().set("refunds", "every", "\"1s\"");
    let config = settings.of_chain("refund_wallets", &named).write();
    let _daemon = config.start_ready().await;
    let refund = claimed(&scene).await;
    scene.land(&refund).await;
    scene.finalize().await;
    searched_again(&scene).await;
    refund_is(&scene, "claimed").await;
    assert_eq!(scene.gateway.open_flags().await.unwrap(), [""; 0]);
}
