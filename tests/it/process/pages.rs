//! `/metrics`: what alerts rest on is there from the start, and moves as it should.

use std::io::Write as _;
use std::process::{Command, Stdio};

use super::scene::Scene;
use crate::support::daemon::eventually;

/// Series that exist before anything has happened, without the prefix `reconciled_`.
const FROM_THE_START: &[&str] = &[
    "rpc_requests_total{chain=\"31337\",endpoint=\"anvil\",method=\"eth_getLogs\",outcome=\"ok\"}",
    "rpc_duration_seconds_count{chain=\"31337\",endpoint=\"anvil\"}",
    "endpoint_reads_total{chain=\"31337\",endpoint=\"anvil\",outcome=\"wrong_chain\"}",
    "open_payments{phase=\"targeted\"}",
    "open_payments{phase=\"reconcile\"}",
    "open_payments{phase=\"late\"}",
    "open_payments{phase=\"finality\"}",
    "oldest_open_timestamp_seconds{phase=\"targeted\"}",
    "overdue_payments",
    "refunds_owed{reason=\"duplicate\",status=\"owed\"}",
    "refunds_owed{reason=\"late\",status=\"blocked\"}",
    "refunds_owed{reason=\"undelivered\",status=\"paid\"}",
    "open_flags{kind=\"malformed_payment\"}",
    "open_flags{kind=\"inconclusive_at_deadline\"}",
    "open_flags{kind=\"nonce_used_elsewhere\"}",
    "checks_total{verdict=\"settled\"}",
    "checks_total{verdict=\"pending\"}",
    "checks_total{verdict=\"unsettleable\"}",
    "checks_total{verdict=\"inconclusive\"}",
    "resolutions_total{outcome=\"paid\"}",
    "resolutions_total{outcome=\"failed\"}",
    "resolutions_total{outcome=\"refund_owed\"}",
    "resolutions_total{outcome=\"reopened\"}",
    "detection_delay_seconds_count{chain=\"31337\",rail=\"x402\"}",
    "payment_checks_count{chain=\"31337\",rail=\"x402\"}",
    "schedule_samples_total{chain=\"31337\",rail=\"x402\"}",
    "schedule_samples_total{chain=\"31337\",rail=\"mpp\"}",
    "schedule_samples_skipped_total{reason=\"not_shown\"}",
    "schedule_samples_skipped_total{reason=\"unanswered\"}",
    "schedule_fit_timestamp_seconds{chain=\"31337\",rail=\"x402\"}",
    "schedule_versions_total{chain=\"31337\",outcome=\"adopted\",rail=\"x402\"}",
    "clock_skew_seconds{chain=\"31337\",rail=\"x402\"}",
    "apply_failures_total{cause=\"lease_lost\"}",
    "apply_failures_total{cause=\"refused\"}",
    "task_last_success_timestamp_seconds{task=\"discovery\"}",
    "task_last_success_timestamp_seconds{task=\"targeted\"}",
    "task_last_success_timestamp_seconds{task=\"reconcile\"}",
    "task_last_success_timestamp_seconds{task=\"maintenance\"}",
    "task_last_success_timestamp_seconds{task=\"sampling\"}",
    "task_last_success_timestamp_seconds{task=\"tuning\"}",
    "task_failures_total{task=\"targeted\"}",
    "task_panics_total{task=\"discovery\"}",
    "task_panics_total{task=\"chain_read\"}",
    "scrape_failed",
];

/// Prometheus' own linter, where it is installed.
fn lint(metrics: &str) {
    let started = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut promtool = match started {
        Ok(promtool) => promtool,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            eprintln!("promtool is not installed: the metrics were not linted");
            return;
        }
        Err(error) => panic!("promtool: {error}"),
    };
    promtool.stdin.take().unwrap().write_all(metrics.as_bytes()).unwrap();
    let output = promtool.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.is_empty(), "{said}\n{metrics}");
}

#[tokio::test]
async fn every_core_series_is_there_from_the_start_and_moves_with_what_happens() {
    let scene = Scene::start().await;
    let daemon = scene.settings().write().start_ready().await;
    let idle = daemon.metrics().await;
    for series in FROM_THE_START {
        idle.get(series);
    }
    assert_eq!(idle.sum("checks_total"), 0.0);
    assert_eq!(idle.sum("resolutions_total"), 0.0);
    assert_eq!(idle.sum("open_payments"), 0.0);
    assert_eq!(idle.get("scrape_failed"), 0.0);

    let first = scene.unknown("first").await;
    let second = scene.sign().await;
    scene.pay("second", "order-first", "settle_failed", &second).await;
    scene.checked_again("second", "pending").await;
    let metrics = daemon.metrics().await;
    assert_eq!(metrics.get("open_payments{phase=\"targeted\"}"), 2.0);
    assert!(metrics.get("oldest_open_timestamp_seconds{phase=\"targeted\"}") > 1.6e9);
    assert!(metrics.get("checks_total{verdict=\"pending\"}") >= 3.0);
    assert!(metrics.get("task_last_success_timestamp_seconds{task=\"targeted\"}") > 1.6e9);
    assert!(metrics.sum("rpc_requests_total{chain=\"31337\",endpoint=\"anvil\"") > 0.0);

    scene.land(&first).await;
    scene.order_is("order-first", "paid").await;
    scene.land(&second).await;
    scene.finalize().await;
    scene.all_closed().await;
    // The database says so a moment before the process has counted it.
    let metrics = eventually("both are counted", async || {
        let metrics = daemon.metrics().await;
        let counted = metrics.sum("detection_delay_seconds_count");
        if counted == 2.0 { Ok(metrics) } else { Err(counted.to_string()) }
    })
    .await;
    assert_eq!(metrics.get("resolutions_total{outcome=\"paid\"}"), 1.0);
    assert_eq!(metrics.get("resolutions_total{outcome=\"refund_owed\"}"), 1.0);
    assert_eq!(metrics.get("refunds_owed{reason=\"duplicate\",status=\"owed\"}"), 1.0);
    assert_eq!(metrics.sum("open_payments"), 0.0);
    assert_eq!(metrics.sum("open_flags"), 0.0);
    assert_eq!(metrics.sum("apply_failures_total"), 0.0);
    assert_eq!(metrics.sum("task_failures_total"), 0.0);
    assert!(metrics.sum("detection_delay_seconds_sum") < 120.0);
    lint(&daemon.metrics_text().await);

    let (status, body) = daemon.page("/healthz").await;
    assert_eq!((status, body.as_str()), (200, "ok\n"));
    assert_eq!(daemon.page("/nothing").await.0, 404);
}
