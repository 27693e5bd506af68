//! Repeat schedules as somebody who runs the daemon sees them: measured from what settled, fitted, adopted,
//! followed, and shown.

use std::time::Duration;

use reconciled::domain::RawPayment;
use serde_json::Value;

use super::scene::Scene;
use crate::support::anvil::ANVIL_CHAIN_ID;
use crate::support::daemon::{ConfigFile, Settings, eventually};

/// Payments that the gateway settles, and that we settle.
const BY_THE_GATEWAY: u64 = 60;
const BY_US: u64 = 12;

/// Fast, and following fitted schedules.
fn settings(scene: &Scene) -> Settings {
    scene
        .settings()
        .without("checks", "repeats")
        .text("schedule", "sample_every", "100ms")
        .text("schedule", "settle_lag", "1s")
        .text("schedule", "every", "1s")
        .set("schedule", "minimum_held_out", "3")
        .set("schedule", "minimum_samples", "20")
}

async fn number_of(scene: &Scene, sql: &str) -> u64 {
    let rows = scene.gateway.rows(sql, &[], 1).await.unwrap();
    rows[0][0].as_deref().map_or(0, |text| text.parse().unwrap())
}

/// A payment that the gateway broadcast some seconds ago, saw settle, and wrote down as settled.
async fn settled_by_the_gateway(scene: &Scene, n: u64) {
    let (id, order) = (format!("g{n:03}"), format!("order-g{n:03}"));
    let authorization = scene.sign().await;
    scene.order(&order).await;
    let receipt = scene.land(&authorization).await;
    let block = scene.chain.anvil.block(receipt["blockNumber"].as_str().unwrap()).await;
    let broadcast_at = (block.time.as_secs() - 1 - n % 4) * 1_000 + 500;
    let row = RawPayment {
        status: Some("settled".to_owned()),
        broadcast_at: Some(broadcast_at.to_string()),
        ..scene.row(&id, &order, &authorization)
    };
    scene.gateway.insert_payment(&row).await.unwrap();
    let sql = "UPDATE payments SET settled_at = updated_at WHERE id = ?";
    scene.gateway.execute(sql, &[Some(&id)]).await.unwrap();
}

async fn show(config: &ConfigFile) -> Value {
    let ended = config.run(&["schedule", "show", "--json"]).await;
    assert_eq!(ended.code, 0, "{ended:?}");
    let mut shown: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(shown.as_array().map(Vec::len), Some(1), "{shown}");
    shown[0].take()
}

async fn version_of(scene: &Scene, payment: &str) -> Option<String> {
    let sql = "SELECT CAST(schedule_id AS TEXT) FROM {watches} WHERE payment_id = ?";
    let rows = scene.gateway.rows(sql, &[Some(payment)], 1).await.unwrap();
    rows.into_iter().flatten().flatten().next()
}

/// Has a payment checked by the running daemon, now.
async fn recheck(scene: &Scene, config: &ConfigFile, payment: &str) {
    let checks = async || {
        let sql = "SELECT CAST(count(*) AS TEXT) FROM {checks} WHERE payment_id = ?";
        let rows = scene.gateway.rows(sql, &[Some(payment)], 1).await.unwrap();
        rows[0][0].as_deref().unwrap().parse::<u64>().unwrap()
    };
    let before = checks().await;
    assert_eq!(config.run(&["recheck", payment]).await.code, 0);
    eventually(&format!("{payment} is checked"), async || {
        let seen = checks().await;
        if seen > before { Ok(()) } else { Err(seen.to_string()) }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_settlement_is_sampled_once_and_the_fit_is_followed_whoever_is_killed_on_postgres() {
    sampled_once_and_followed(&Scene::start().await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_settlement_is_sampled_once_and_the_fit_is_followed_whoever_is_killed_on_sqlite() {
    sampled_once_and_followed(&Scene::on_sqlite().await).await;
}

async fn sampled_once_and_followed(scene: &Scene) {
    scene.gateway.put_stock("thing", 0).await.unwrap();
    let config = settings(scene).write();
    // This one never lands, and starts before anything is fitted.
    scene.unknown("early").await;

    let load = async {
        for n in 0..BY_THE_GATEWAY {
            settled_by_the_gateway(scene, n).await;
            if n % (BY_THE_GATEWAY / BY_US) == 0 {
                let authorization = scene.unknown(&format!("u{n:03}")).await;
                scene.land(&authorization).await;
            }
        }
    };
    let killer = async {
        for life in [700, 1_300, 400, 1_900, 1_000] {
            let mut daemon = config.start().await;
            tokio::time::sleep(Duration::from_millis(life)).await;
            daemon.kill9();
        }
    };
    tokio::join!(load, killer);

    // I9: whatever was in the middle, each payment counts once.
    let daemon = config.start_ready().await;
    let total = BY_THE_GATEWAY + BY_US;
    let counted = "SELECT CAST(sum(settled) AS TEXT) FROM {settle_latencies}";
    eventually("every settlement is sampled", async || {
        let seen = number_of(scene, counted).await;
        if seen >= total { Ok(()) } else { Err(seen.to_string()) }
    })
    .await;
    let held_out = format!("{counted} WHERE part = 'held_out'");
    assert!((3..total / 2).contains(&number_of(scene, &held_out).await));

    // A fit is adopted, and a new payment follows it.
    let adopted = "SELECT CAST(count(*) AS TEXT) FROM {schedules} WHERE adopted_at IS NOT NULL";
    eventually("a fit is adopted", async || {
        if number_of(scene, adopted).await > 0 {
            return Ok(());
        }
        let sql = "SELECT reason FROM {schedules} ORDER BY id DESC LIMIT 2";
        Err(format!("{:?}", scene.gateway.rows(sql, &[], 1).await.unwrap()))
    })
    .await;
    let mut tries = 0;
    let followed = loop {
        // Another replica's, or this one's: known to the daemon a moment after it is in the database.
        let id = format!("late-{tries}");
        scene.unknown(&id).await;
        recheck(scene, &config, &id).await;
        match version_of(scene, &id).await {
            Some(version) => break (id, version),
            None => tries += 1,
        }
        assert!(tries < 20, "no new payment follows the fit");
    };
    let metrics = daemon.metrics().await;
    let series = format!("{{chain=\"{ANVIL_CHAIN_ID}\",rail=\"x402\"}}");
    assert!(metrics.get(&format!("schedule_fit_timestamp_seconds{series}")) > 1.7e9);
    assert!(metrics.get(&format!("schedule_expected_reads{series}")) >= 1.0);
    assert_eq!(metrics.sum("task_failures_total"), 0.0);

    // Another replica adopts a newer version: who started keeps what it started on.
    let copy = "INSERT INTO {schedules} (rail, chain_id, previous_id, policy, sample_size, \
                window_ms, expected_reads, expected_delay_ms, never_share, created_at, adopted_at, \
                reason) SELECT rail, chain_id, -id, policy, sample_size, window_ms, \
                expected_reads, expected_delay_ms, never_share, created_at, adopted_at, 'copied' \
                FROM {schedules} WHERE adopted_at IS NOT NULL ORDER BY id LIMIT 1";
    assert_eq!(scene.gateway.execute(copy, &[]).await.unwrap(), 1);
    let mut tries = 0;
    let newest = loop {
        let id = format!("later-{tries}");
        scene.unknown(&id).await;
        recheck(scene, &config, &id).await;
        let version = version_of(scene, &id).await;
        match version {
            Some(version) if version != followed.1 => break (id, version),
            _ => tries += 1,
        }
        assert!(tries < 20, "no new payment follows the newer version");
    };
    for (id, version) in [(&followed.0, Some(&followed.1)), (&newest.0, Some(&newest.1))] {
        recheck(scene, &config, id).await;
        assert_eq!(version_of(scene, id).await.as_ref(), version, "{id}");
    }
    recheck(scene, &config, "early").await;
    assert_eq!(version_of(scene, "early").await, None, "it started on the built-in repeats");

    // A version that is gone is told of, and stops nothing.
    let lost = "UPDATE {watches} SET schedule_id = 999999 WHERE payment_id = ?";
    scene.gateway.execute(lost, &[Some(&newest.0)]).await.unwrap();
    recheck(scene, &config, &newest.0).await;
    assert!(!daemon.logs_with("no such version").is_empty());

    stays_sampled_once(scene, counted, total).await;
    drop(daemon);
    is_shown(scene, &config, total).await;
}

/// Nothing is sampled a second time, whatever resolutions and restarts come.
async fn stays_sampled_once(scene: &Scene, counted: &str, total: u64) {
    scene.finalize().await;
    let sql = "UPDATE {watches} SET next_check_at = opened_at WHERE phase = 'finality'";
    scene.gateway.execute(sql, &[]).await.unwrap();
    eventually("settled payments are final", async || {
        let sql = "SELECT CAST(count(*) AS TEXT) FROM {watches} WHERE phase = 'finality'";
        let open = number_of(scene, sql).await;
        if open == 0 { Ok(()) } else { Err(open.to_string()) }
    })
    .await;
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    assert_eq!(number_of(scene, counted).await, total);
}

/// The commands tell what the tables say, and change nothing unless they are told to.
async fn is_shown(scene: &Scene, config: &ConfigFile, total: u64) {
    let versions =
        async || number_of(scene, "SELECT CAST(count(*) AS TEXT) FROM {schedules}").await;
    let before = versions().await;
    let shown = show(config).await;
    assert_eq!(shown["samples"], total);
    assert_eq!((&shown["rail"], &shown["chain_id"]), (&"x402".into(), &ANVIL_CHAIN_ID.into()));
    let newest = "SELECT CAST(max(id) AS TEXT) FROM {schedules} WHERE adopted_at IS NOT NULL";
    assert_eq!(shown["in_use"]["version"], number_of(scene, newest).await);
    let by_us: u64 =
        shown["observed"].as_array().unwrap().iter().map(|o| o["payments"].as_u64().unwrap()).sum();
    assert_eq!(by_us, BY_US);
    assert!(shown["latency_seconds"]["p50"].as_f64().unwrap() < 6.0, "{shown}");

    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("schedule.svg");
    let path = file.to_str().unwrap();
    let ended = config.run(&["schedule", "show", "--rail", "x402", "--svg", path]).await;
    assert_eq!(ended.code, 0, "{ended:?}");
    for word in ["samples", "latency", "in use", "checks at", "expected", "observed"] {
        assert!(ended.stdout.contains(word), "{word}: {}", ended.stdout);
    }
    assert!(std::fs::read_to_string(&file).unwrap().starts_with("<svg"));

    let ended = config.run(&["schedule", "tune", "--json"]).await;
    assert_eq!(ended.code, 0, "{ended:?}");
    let tuned: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert!(tuned[0]["why"].as_str().is_some_and(|why| !why.is_empty()), "{tuned}");
    assert_eq!(tuned[0]["outcome"], Value::Null);
    assert_eq!(versions().await, before, "without --apply nothing is written");

    let ended = config.run(&["schedule", "tune", "--apply"]).await;
    assert_eq!(ended.code, 0, "{ended:?}");
    assert_eq!(versions().await, before + 1, "{}", ended.stdout);

    let ended = config.run(&["schedule", "show", "--chain", "5"]).await;
    assert_eq!(ended.code, 2, "{ended:?}");
    assert!(ended.stderr.contains("--chain 5 is not configured"), "{}", ended.stderr);
    let ended = config.run(&["schedule", "show", "--rail", "cash"]).await;
    assert_eq!(ended.code, 2, "{ended:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_replicas_sample_every_settlement_once_and_make_one_line_of_versions() {
    let scene = Scene::start().await;
    scene.gateway.put_stock("thing", 0).await.unwrap();
    let config = settings(&scene).write();
    let mut replicas = [config.start().await, config.start().await];
    for n in 0..BY_THE_GATEWAY {
        settled_by_the_gateway(&scene, n).await;
    }
    let counted = "SELECT CAST(sum(settled) AS TEXT) FROM {settle_latencies}";
    eventually("every settlement is sampled", async || {
        let seen = number_of(&scene, counted).await;
        if seen >= BY_THE_GATEWAY { Ok(()) } else { Err(seen.to_string()) }
    })
    .await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(number_of(&scene, counted).await, BY_THE_GATEWAY);
    let mut sampled = 0.0;
    for replica in &replicas {
        let metrics = replica.metrics().await;
        sampled += metrics.sum("schedule_samples_total");
        assert_eq!(metrics.sum("task_failures_total"), 0.0);
        assert_eq!(metrics.sum("schedule_samples_skipped_total"), 0.0);
    }
    assert_eq!(sampled, BY_THE_GATEWAY as f64, "each counted what it wrote itself");
    // Every version but the first follows another one, and no two the same.
    let forks = "SELECT CAST(count(*) - count(DISTINCT previous_id) AS TEXT) FROM {schedules}";
    assert_eq!(number_of(&scene, forks).await, 0);
    let firsts = "SELECT CAST(count(*) AS TEXT) FROM {schedules} WHERE previous_id = 0";
    assert_eq!(number_of(&scene, firsts).await, 1);
    for replica in &mut replicas {
        assert_eq!(replica.sigterm().await.0, 0);
    }
}
