//! What is deployed beside the daemon speaks of series that it has.

use std::collections::BTreeSet;

use alloy_primitives::{Address, B256};

use super::*;

/// Every series the daemon has, with one endpoint and one task.
fn series() -> BTreeSet<String> {
    let metrics = Metrics::new().expect("metrics");
    metrics.configured(ChainId::new(1), &EndpointName::new("one"), &["eth_call"]);
    metrics.compared(ChainId::new(1), &EndpointName::new("one"), &EndpointName::new("two"));
    metrics.expect_task("one");
    let receiver = Receiver { token: Default::default(), pay_to: Default::default() };
    metrics.expect_receiver(ChainId::new(1), &receiver);
    let text = String::from_utf8(metrics.render().expect("renders")).expect("is text");
    let samples = text.lines().filter(|line| !line.starts_with('#'));
    samples.map(|line| line.split(['{', ' ']).next().unwrap_or_default().to_owned()).collect()
}

/// Every word of a text that begins as our series do.
fn mentioned(text: &str) -> BTreeSet<String> {
    text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'))
        .filter(|word| word.starts_with("reconciled_"))
        .map(str::to_owned)
        .collect()
}

#[test]
fn alerts_and_dashboard_speak_of_series_that_exist() {
    let series = series();
    for (file, text) in [
        ("alerts", include_str!("../../deploy/prometheus/alerts.yml")),
        ("dashboard", include_str!("../../deploy/grafana/reconciled.json")),
    ] {
        let mentioned = mentioned(text);
        assert!(mentioned.len() > 5, "{file} speaks of {mentioned:?}");
        let unknown: Vec<&String> = mentioned.difference(&series).collect();
        assert!(unknown.is_empty(), "{file} speaks of {unknown:?}");
    }
}

#[test]
fn every_series_is_on_the_dashboard_or_in_an_alert() {
    let deployed = concat!(
        include_str!("../../deploy/prometheus/alerts.yml"),
        include_str!("../../deploy/grafana/reconciled.json")
    );
    let mentioned = mentioned(deployed);
    let base = |name: &str| {
        ["_bucket", "_sum", "_count"]
            .iter()
            .find_map(|suffix| name.strip_suffix(suffix))
            .unwrap_or(name)
            .to_owned()
    };
    let shown: BTreeSet<String> = mentioned.iter().map(|name| base(name)).collect();
    let unseen: BTreeSet<String> =
        series().iter().map(|name| base(name)).filter(|name| !shown.contains(name)).collect();
    assert!(unseen.is_empty(), "nobody would see {unseen:?}");
}

/// I4: drift 0 is said of what was accounted for, and of nothing else.
#[test]
fn a_receiver_that_was_not_accounted_for_keeps_its_figures_and_the_problem_shows() {
    use crate::store::FinishedRun;
    let metrics = Metrics::new().expect("metrics");
    let run = |report: serde_json::Value| Runs {
        unfinished: None,
        finished: Some(FinishedRun {
            id: 1,
            started_at: Timestamp::from_millis(0),
            finished_at: Timestamp::from_millis(1_000),
            report,
        }),
    };
    let shown = |name: &str| {
        let text = String::from_utf8(metrics.render().expect("renders")).expect("is text");
        let line = text.lines().find(|line| line.starts_with(name)).map(str::to_owned);
        line.and_then(|line| line.rsplit(' ').next().and_then(|value| value.parse::<f64>().ok()))
    };
    let mut report = serde_json::to_value(Report::default()).expect("is JSON");
    report["receivers"] = serde_json::json!([{
        "chain_id": 1, "token": Address::ZERO, "pay_to": Address::ZERO, "since": 1,
        "up_to": { "number": 7, "hash": B256::ZERO, "time": 70 }, "drift": "-5",
        "chain": "0", "paid": "5", "owed": "0", "refunded": "0", "called_off": "0",
        "flagged": "0", "open": "0",
    }]);
    let Ok(read) = Report::deserialize(&report) else { panic!("no report: {report}") };
    assert_eq!(read.receivers.len(), 1);
    metrics.set_runs(&run(report.clone()));
    assert_eq!(shown("reconciled_ledger_drift_base_units"), Some(-5.0));
    assert_eq!(shown("reconciled_reconcile_problems"), Some(0.0));
    report["receivers"] = serde_json::json!([]);
    report["problems"] = serde_json::json!(["accounts, chain 1: the database refused"]);
    metrics.set_runs(&run(report));
    assert_eq!(shown("reconciled_ledger_drift_base_units"), Some(-5.0));
    assert_eq!(shown("reconciled_ledger_scanned_timestamp_seconds"), Some(70.0));
    assert_eq!(shown("reconciled_reconcile_problems"), Some(1.0));
}
