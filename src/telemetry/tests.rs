//! What is deployed beside the daemon speaks of series that it has.

use std::collections::BTreeSet;

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
