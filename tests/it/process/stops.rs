//! SIGTERM: what is leased is finished or given back, and the exit code says that all is well.

use std::time::Duration;

use tokio::net::TcpListener;

use super::scene::{Scene, now};
use crate::support::anvil::ANVIL_CHAIN_ID;
use crate::support::daemon::eventually;

/// Watches that somebody holds at this moment.
async fn leased(scene: &Scene) -> u64 {
    let sql = "SELECT payment_id FROM {watches} \
               WHERE lease_token IS NOT NULL AND lease_expires_at > ?t";
    let now = now().as_millis().to_string();
    scene.gateway.rows(sql, &[Some(&now)], 1).await.unwrap().len() as u64
}

/// I9: busy with payments that all have news.
#[tokio::test]
async fn sigterm_under_load_ends_well_and_leaves_no_lease() {
    let scene = Scene::start().await;
    let count = 300;
    let mut calls = Vec::new();
    for n in 0..count {
        calls.push(scene.chain.transfer_call(&scene.unknown(&format!("p{n}")).await));
    }
    for calls in calls.chunks(100) {
        scene.chain.batch(calls.to_vec()).await;
    }
    let settings = scene.settings().set("checks", "batch_max", "10");
    let config = settings.set("reconcile", "page_size", "10").write();
    let mut daemon = config.start().await;
    let resolved = async || scene.gateway.count("{resolutions}").await.unwrap();
    eventually("some are resolved", async || match resolved().await {
        0 => Err("none".to_owned()),
        _ => Ok(()),
    })
    .await;
    let (code, took) = daemon.sigterm().await;
    assert_eq!(code, 0, "{:?}", daemon.logs());
    assert!(took < Duration::from_secs(10), "within the grace period, not {took:?}");
    assert_eq!(leased(&scene).await, 0);
    assert_eq!(daemon.logs_with("stopped").len(), 1);

    // What was left is taken up at once: nothing waits for a lease to run out.
    let _again = config.start_ready().await;
    scene.finalize().await;
    scene.all_closed().await;
    assert_eq!(scene.outcomes().await["paid"], count);
    scene.assert_conserved().await;
}

/// I9: an endpoint that accepts a question and never answers does not hold up the end.
#[tokio::test]
async fn sigterm_while_an_endpoint_is_silent_gives_the_leases_back() {
    let scene = Scene::start().await;
    for id in ["a", "b", "c"] {
        scene.unknown(id).await;
    }
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", silent.local_addr().unwrap());
    let settings = scene.settings_without_chain().chain(ANVIL_CHAIN_ID, &[("silent", &url)]);
    let settings = settings.text("checks", "lease_ttl", "120s").text("shutdown", "grace", "4s");
    let mut daemon = settings.write().start_ready().await;
    eventually("all are leased", async || match leased(&scene).await {
        3 => Ok(()),
        other => Err(other.to_string()),
    })
    .await;
    let (code, took) = daemon.sigterm().await;
    assert_eq!(code, 0);
    assert!(took < Duration::from_secs(4), "within the grace period, not {took:?}");
    assert_eq!(leased(&scene).await, 0);
    let released = daemon.logs_with("given back");
    let count: u64 = released.iter().filter_map(|line| line["released"].as_u64()).sum();
    assert_eq!(count, 3, "{:?}", daemon.logs());
    // I2: nothing was concluded from silence.
    assert_eq!(scene.payment_status("a").await, "unknown");
}

/// A database that was never there does not hold up the end either.
#[tokio::test]
async fn sigterm_while_the_database_is_unreachable_ends_well() {
    let scene = Scene::start().await;
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("postgres://nobody@{}/nothing", silent.local_addr().unwrap());
    drop(silent);
    let mut daemon = scene.settings().text("database", "url", &url).write().start().await;
    eventually("it says so", async || {
        let lines = daemon.logs_with("the database cannot be reached");
        if lines.is_empty() { Err(format!("{:?}", daemon.logs())) } else { Ok(()) }
    })
    .await;
    let (code, took) = daemon.sigterm().await;
    assert_eq!(code, 0);
    assert!(took < Duration::from_secs(10), "{took:?}");
}
