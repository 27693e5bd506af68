//! Logs and metrics.
//!
//! Every metric is prefixed `reconciled_`, in base units, with timestamps rather than ages and no ids in
//! labels; every label value the code knows exists from the start, so that an alert on a rate never
//! misses the first event. Process figures are counted in place; service figures (open payments, owed,
//! flags) are read from the database at scrape time, by [`Metrics::set_figures`].

use std::io::IsTerminal;
use std::sync::Arc;
use std::time::Duration;

use prometheus::core::Collector;
use prometheus::{
    Encoder, Gauge, GaugeVec, HistogramOpts, HistogramVec, IntCounterVec, IntGauge, IntGaugeVec,
    Opts, Registry, TextEncoder,
};
use serde::Deserialize;
use tracing_subscriber::EnvFilter;

use crate::chain::{RpcObserver, Sickness};
use crate::domain::{
    Account, Amount, ChainId, EndpointName, FlagKind, Outcome, Phase, Rail, ReadFailureKind,
    Receiver, RefundReason, RefundStatus, Timestamp, Verdict,
};
use crate::store::schedules::Series;
use crate::store::{Figures, Runs};
use crate::worker::Report;

mod schedules;

pub use schedules::{ScheduleMetrics, SkippedSample, VersionOutcome};

/// How logs are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LogFormat {
    /// Human on a terminal, JSON otherwise.
    #[default]
    Auto,
    /// For people.
    Human,
    /// One JSON object per line.
    Json,
}

/// Libraries whose informational lines tell an operator nothing. What the configuration says of the same
/// target comes later, and wins.
const QUIET: &str = "tokio_cron_scheduler=warn";

/// Starts logging to standard error. `filter` is a `tracing` directive list such as `info,sqlx=warn`.
pub fn init_logging(format: LogFormat, filter: &str) -> anyhow::Result<()> {
    let filter = EnvFilter::try_new(format!("{QUIET},{filter}"))
        .map_err(|e| anyhow::anyhow!("log.filter {filter:?} is not a list of directives: {e}"))?;
    let terminal = std::io::stderr().is_terminal();
    let json = match format {
        LogFormat::Auto => !terminal,
        LogFormat::Human => false,
        LogFormat::Json => true,
    };
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_target(false);
    let started = if json {
        builder.json().flatten_event(true).try_init()
    } else {
        builder.with_ansi(terminal).try_init()
    };
    started.map_err(|e| anyhow::anyhow!("logging could not be started: {e}"))
}

/// Every metric of the process, in one registry.
#[derive(Clone)]
pub struct Metrics {
    registry: Registry,
    open_payments: IntGaugeVec,
    oldest_open: GaugeVec,
    overdue: IntGauge,
    refunds_owed: IntGaugeVec,
    open_flags: IntGaugeVec,
    /// Checks, by verdict.
    pub checks: IntCounterVec,
    /// Resolutions written, by outcome.
    pub resolutions: IntCounterVec,
    detection_delay: HistogramVec,
    /// Of repeat schedules.
    pub schedules: ScheduleMetrics,
    /// Resolutions the database refused.
    pub apply_failures: IntCounterVec,
    rpc_requests: IntCounterVec,
    rpc_duration: HistogramVec,
    endpoint_reads: IntCounterVec,
    endpoint_disagreements: IntCounterVec,
    endpoint_sick: IntGaugeVec,
    endpoint_probes: IntCounterVec,
    ledger: GaugeVec,
    ledger_drift: GaugeVec,
    ledger_scanned: GaugeVec,
    reconcile_finished: Gauge,
    reconcile_unfinished: Gauge,
    reconcile_problems: IntGauge,
    scan_problems: IntCounterVec,
    /// When a task last succeeded.
    pub task_last_success: GaugeVec,
    /// Activations of a task that failed.
    pub task_failures: IntCounterVec,
    /// Activations of a task that panicked.
    pub task_panics: IntCounterVec,
    /// When a chain was last searched for every refund that was due.
    pub refunds_searched: GaugeVec,
    scrape_failed: Gauge,
}

/// From a block to seconds later (the usual case) to a day (the backstop).
const DELAY_BUCKETS: [f64; 14] =
    [0.5, 1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 30.0, 60.0, 300.0, 900.0, 3_600.0, 21_600.0, 86_400.0];

const RPC_BUCKETS: [f64; 10] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0];

impl Metrics {
    /// Registers every series, those without a chain or task in their labels at zero.
    pub fn new() -> Result<Self, prometheus::Error> {
        let registry = Registry::new();
        let counters =
            |name: &str, help: &str, labels: &[&str]| counters(&registry, name, help, labels);
        let int_gauges = |name: &str, help: &str, labels: &[&str]| {
            register(&registry, IntGaugeVec::new(opts(name, help), labels)?)
        };
        let times = |name: &str, help: &str, labels: &[&str]| gauges(&registry, name, help, labels);
        let metrics = Self {
            open_payments: int_gauges(
                "open_payments",
                "Payments being watched, by phase of the watch.",
                &["phase"],
            )?,
            oldest_open: times(
                "oldest_open_timestamp_seconds",
                "When the oldest open watch was opened, by phase; 0 when there is none.",
                &["phase"],
            )?,
            overdue: register(
                &registry,
                IntGauge::with_opts(opts("overdue_payments", "Open watches whose check is due."))?,
            )?,
            refunds_owed: int_gauges(
                "refunds_owed",
                "Refund records, by reason and status.",
                &["reason", "status"],
            )?,
            open_flags: int_gauges(
                "open_flags",
                "Flags only a person can close, by kind.",
                &["kind"],
            )?,
            checks: counters("checks_total", "Checks of one payment, by verdict.", &["verdict"])?,
            resolutions: counters(
                "resolutions_total",
                "Resolutions written, by outcome.",
                &["outcome"],
            )?,
            apply_failures: counters(
                "apply_failures_total",
                "Judged payments that could not be written down, by cause.",
                &["cause"],
            )?,
            detection_delay: histograms(
                &registry,
                "detection_delay_seconds",
                "From the block that holds a transfer to the committed resolution.",
                &["rail", "chain"],
                &DELAY_BUCKETS,
            )?,
            schedules: ScheduleMetrics::new(&registry)?,
            rpc_requests: counters(
                "rpc_requests_total",
                "JSON-RPC calls; each call of a batch counts.",
                &["chain", "endpoint", "method", "outcome"],
            )?,
            endpoint_reads: counters(
                "endpoint_reads_total",
                "Batches an endpoint was read about: ok, or why it gave no evidence.",
                &["chain", "endpoint", "outcome"],
            )?,
            endpoint_sick: int_gauges(
                "endpoint_sick",
                "1 for the reason why an endpoint is not well, as of its last probe.",
                &["chain", "endpoint", "reason"],
            )?,
            endpoint_probes: counters(
                "endpoint_probes_total",
                "Probes of an endpoint: ok, or what was found wrong.",
                &["chain", "endpoint", "outcome"],
            )?,
            endpoint_disagreements: counters(
                "endpoint_disagreements_total",
                "Checks in which two endpoints contradicted each other, by pair, in order of name.",
                &["chain", "endpoint_a", "endpoint_b"],
            )?,
            rpc_duration: histograms(
                &registry,
                "rpc_duration_seconds",
                "How long JSON-RPC calls took.",
                &["chain", "endpoint"],
                &RPC_BUCKETS,
            )?,
            ledger: times(
                "ledger_base_units",
                "Money by what became of it, in the window of the last full reconcile.",
                &["chain", "token", "pay_to", "account"],
            )?,
            ledger_drift: times(
                "ledger_drift_base_units",
                "What arrived less what is accounted for, at the last full reconcile.",
                &["chain", "token", "pay_to"],
            )?,
            ledger_scanned: times(
                "ledger_scanned_timestamp_seconds",
                "Time of the last block whose transfers are accounted for; 0 before the first.",
                &["chain", "token", "pay_to"],
            )?,
            reconcile_finished: register(
                &registry,
                Gauge::with_opts(opts(
                    "reconcile_finished_timestamp_seconds",
                    "When the last full reconcile ended; 0 before the first.",
                ))?,
            )?,
            reconcile_unfinished: register(
                &registry,
                Gauge::with_opts(opts(
                    "reconcile_unfinished_timestamp_seconds",
                    "When the full reconcile that is not finished was asked for; 0 when there is none.",
                ))?,
            )?,
            reconcile_problems: register(
                &registry,
                IntGauge::with_opts(opts(
                    "reconcile_problems",
                    "What the last full reconcile could not do; a receiver that it could not account for keeps its last figures.",
                ))?,
            )?,
            scan_problems: counters(
                "scan_problems_total",
                "Pages of the scan for transfers that did not move it on, by cause.",
                &["chain", "cause"],
            )?,
            task_last_success: times(
                "task_last_success_timestamp_seconds",
                "When a task last ended well; 0 before the first time.",
                &["task"],
            )?,
            task_failures: counters(
                "task_failures_total",
                "Activations of a task that ended in an error.",
                &["task"],
            )?,
            task_panics: counters(
                "task_panics_total",
                "Activations of a task that panicked.",
                &["task"],
            )?,
            refunds_searched: times(
                "refunds_searched_timestamp_seconds",
                "When every refund that was due had been looked for on the chain; 0 before.",
                &["chain"],
            )?,
            scrape_failed: register(
                &registry,
                Gauge::with_opts(opts(
                    "scrape_failed",
                    "1 while the figures from the database are stale because it could not be asked.",
                ))?,
            )?,
            registry,
        };
        for verdict in Verdict::KINDS {
            metrics.checks.with_label_values(&[verdict]);
        }
        for outcome in Outcome::ALL {
            metrics.resolutions.with_label_values(&[outcome.code()]);
        }
        // Not a task of the driver's: see `Checker::read`.
        metrics.task_panics.with_label_values(&["chain_read"]);
        for cause in ["lease_lost", "refused"] {
            metrics.apply_failures.with_label_values(&[cause]);
        }
        metrics.set_figures(Some(&Figures::default()));
        Ok(metrics)
    }

    /// Counts two endpoints that contradicted each other about one payment; in order of name.
    pub fn endpoints_disagree(&self, chain: ChainId, one: &EndpointName, other: &EndpointName) {
        self.disagreements_of(chain, one, other).inc();
    }

    fn disagreements_of(
        &self,
        chain: ChainId,
        one: &EndpointName,
        other: &EndpointName,
    ) -> prometheus::IntCounter {
        let chain = chain.to_string();
        self.endpoint_disagreements.with_label_values(&[
            chain.as_str(),
            one.as_str(),
            other.as_str(),
        ])
    }

    /// Makes the series of a configured chain exist from the start.
    pub fn expect_chain(&self, chain: ChainId) {
        for rail in Rail::ALL {
            self.detection_delay.with_label_values(&[rail.code(), &chain.to_string()]);
        }
        self.schedules.expect_chain(chain);
    }

    /// A payment was found settled this long after its block, by its `checks`-th check.
    pub fn settlement_found(&self, series: Series, delay: Duration, checks: u32) {
        let labels = [series.rail.code().to_owned(), series.chain_id.to_string()];
        self.detection_delay.with_label_values(&labels).observe(delay.as_secs_f64());
        self.schedules.checks_per_payment.with_label_values(&labels).observe(checks.into());
    }

    /// Makes a task's series exist from the start.
    pub fn expect_task(&self, task: &str) {
        self.task_last_success.with_label_values(&[task]);
        self.task_failures.with_label_values(&[task]);
        self.task_panics.with_label_values(&[task]);
    }

    /// Shows what the database says; label sets without any are zero. `None`: it could not be asked, and
    /// the last figures stay.
    pub fn set_figures(&self, figures: Option<&Figures>) {
        self.scrape_failed.set(if figures.is_some() { 0.0 } else { 1.0 });
        let Some(figures) = figures else { return };
        for phase in Phase::ALL.iter().filter(|phase| **phase != Phase::Closed) {
            self.open_payments.with_label_values(&[phase.code()]).set(0);
            self.oldest_open.with_label_values(&[phase.code()]).set(0.0);
        }
        for (phase, count) in &figures.open {
            self.open_payments.with_label_values(&[phase.code()]).set(as_i64(*count));
        }
        for (phase, since) in &figures.oldest {
            self.oldest_open.with_label_values(&[phase.code()]).set(seconds(*since));
        }
        self.overdue.set(as_i64(figures.overdue));
        for reason in RefundReason::ALL {
            for status in RefundStatus::ALL {
                self.refunds_owed.with_label_values(&[reason.code(), status.code()]).set(0);
            }
        }
        for (reason, status, count) in &figures.refunds {
            self.refunds_owed
                .with_label_values(&[reason.code(), status.code()])
                .set(as_i64(*count));
        }
        for kind in FlagKind::ALL {
            self.open_flags.with_label_values(&[kind.code()]).set(0);
        }
        for (kind, count) in &figures.flags {
            self.open_flags.with_label_values(&[kind.code()]).set(as_i64(*count));
        }
    }

    /// Makes a receiver's series exist from the start.
    pub fn expect_receiver(&self, chain: ChainId, receiver: &Receiver) {
        let labels = receiver_labels(chain, receiver);
        let [chain, token, pay_to] = labels.each_ref().map(String::as_str);
        for account in ["chain"].into_iter().chain(Account::ALL.iter().map(|a| a.code())) {
            self.ledger.with_label_values(&[chain, token, pay_to, account]);
        }
        self.ledger_drift.with_label_values(&[chain, token, pay_to]);
        self.ledger_scanned.with_label_values(&[chain, token, pay_to]);
        for cause in SCAN_PROBLEMS {
            self.scan_problems.with_label_values(&[chain, cause]);
        }
    }

    /// Counts a page of the scan that did not move it on.
    pub fn scan_problem(&self, chain: ChainId, cause: &str) {
        self.scan_problems.with_label_values(&[chain.to_string().as_str(), cause]).inc();
    }

    /// Shows what the full reconciles say.
    pub fn set_runs(&self, runs: &Runs) {
        let asked = runs.unfinished.as_ref().map_or(0.0, |run| seconds(run.requested_at));
        self.reconcile_unfinished.set(asked);
        let Some(finished) = &runs.finished else { return };
        self.reconcile_finished.set(seconds(finished.finished_at));
        // One that another version wrote may say nothing to this one: the last figures stay.
        let Ok(report) = Report::deserialize(&finished.report) else { return };
        self.reconcile_problems.set(as_i64(report.problems.len() as u64));
        // One that could not be accounted for is not among them: its last figures stay.
        for one in report.receivers {
            let receiver = Receiver { token: one.token, pay_to: one.pay_to };
            let labels = receiver_labels(one.chain_id, &receiver);
            let [chain, token, pay_to] = labels.each_ref().map(String::as_str);
            let set = |account: &str, amount: Amount| {
                let amount = f64::from(amount.get());
                self.ledger.with_label_values(&[chain, token, pay_to, account]).set(amount);
            };
            set("chain", one.totals.chain);
            for account in Account::ALL {
                set(account.code(), one.totals.of(*account));
            }
            self.ledger_drift.with_label_values(&[chain, token, pay_to]).set(one.drift.as_f64());
            let scanned = seconds(one.up_to.time.into());
            self.ledger_scanned.with_label_values(&[chain, token, pay_to]).set(scanned);
        }
    }

    /// Everything in Prometheus' text format.
    pub fn render(&self) -> Result<Vec<u8>, prometheus::Error> {
        let mut text = Vec::new();
        TextEncoder::new().encode(&self.registry.gather(), &mut text)?;
        Ok(text)
    }
}

/// Why a page of the scan does not move it on: not enough endpoints answered, they disagree, the last block
/// left the chain although it was final, or a transfer was left out before.
const SCAN_PROBLEMS: [&str; 4] = ["too_few", "disagreement", "rewind", "missed"];

fn receiver_labels(chain: ChainId, receiver: &Receiver) -> [String; 3] {
    [chain.to_string(), format!("{:#x}", receiver.token), format!("{:#x}", receiver.pay_to)]
}

/// What a single call can end in; a batch of reads can also end in any other
/// [`ReadFailureKind`].
const CALL_OUTCOMES: [&str; 5] = [
    "ok",
    ReadFailureKind::Unreachable.code(),
    ReadFailureKind::RateLimited.code(),
    ReadFailureKind::RpcError.code(),
    ReadFailureKind::BadAnswer.code(),
];

impl RpcObserver for Metrics {
    fn configured(&self, chain: ChainId, endpoint: &EndpointName, methods: &[&'static str]) {
        self.expect_chain(chain);
        let (chain, endpoint) = (chain.to_string(), endpoint.as_str());
        for method in methods {
            for outcome in CALL_OUTCOMES {
                self.rpc_requests.with_label_values(&[chain.as_str(), endpoint, method, outcome]);
            }
        }
        self.rpc_duration.with_label_values(&[chain.as_str(), endpoint]);
        self.refunds_searched.with_label_values(&[chain.as_str()]);
        for sickness in Sickness::ALL {
            let labels = [chain.as_str(), endpoint, sickness.code()];
            self.endpoint_sick.with_label_values(&labels);
            self.endpoint_probes.with_label_values(&labels);
        }
        self.endpoint_probes.with_label_values(&[chain.as_str(), endpoint, "ok"]);
        for outcome in ReadFailureKind::ALL.iter().map(|kind| kind.code()).chain(["ok"]) {
            self.endpoint_reads.with_label_values(&[chain.as_str(), endpoint, outcome]);
        }
    }

    fn probed(&self, chain: ChainId, endpoint: &EndpointName, sickness: Option<Sickness>) {
        let (chain, endpoint) = (chain.to_string(), endpoint.as_str());
        for one in Sickness::ALL {
            let sick = i64::from(sickness == Some(one));
            self.endpoint_sick.with_label_values(&[&chain, endpoint, one.code()]).set(sick);
        }
        let outcome = sickness.map_or("ok", Sickness::code);
        self.endpoint_probes.with_label_values(&[&chain, endpoint, outcome]).inc();
    }

    fn error_rate(&self, chain: ChainId, endpoint: &EndpointName, is_sick: bool) {
        let labels = [&chain.to_string(), endpoint.as_str(), Sickness::ErrorRate.code()];
        self.endpoint_sick.with_label_values(&labels).set(i64::from(is_sick));
    }

    fn compared(&self, chain: ChainId, one: &EndpointName, other: &EndpointName) {
        self.disagreements_of(chain, one, other);
    }

    fn called(
        &self,
        chain: ChainId,
        endpoint: &EndpointName,
        method: &'static str,
        outcome: &'static str,
        took: Duration,
    ) {
        let chain = chain.to_string();
        self.rpc_requests
            .with_label_values(&[chain.as_str(), endpoint.as_str(), method, outcome])
            .inc();
        self.rpc_duration
            .with_label_values(&[chain.as_str(), endpoint.as_str()])
            .observe(took.as_secs_f64());
    }

    fn read(&self, chain: ChainId, endpoint: &EndpointName, outcome: &'static str) {
        let chain = chain.to_string();
        self.endpoint_reads.with_label_values(&[chain.as_str(), endpoint.as_str(), outcome]).inc();
    }
}

/// The same metrics as the observer of RPC calls.
pub fn rpc_observer(metrics: &Metrics) -> Arc<dyn RpcObserver> {
    Arc::new(metrics.clone())
}

/// Seconds since the Unix epoch, as Prometheus wants them.
pub fn seconds(at: Timestamp) -> f64 {
    at.as_millis() as f64 / 1_000.0
}

fn opts(name: &str, help: &str) -> Opts {
    Opts::new(name, help).namespace("reconciled")
}

fn counters(
    registry: &Registry,
    name: &str,
    help: &str,
    labels: &[&str],
) -> Result<IntCounterVec, prometheus::Error> {
    register(registry, IntCounterVec::new(opts(name, help), labels)?)
}

fn gauges(
    registry: &Registry,
    name: &str,
    help: &str,
    labels: &[&str],
) -> Result<GaugeVec, prometheus::Error> {
    register(registry, GaugeVec::new(opts(name, help), labels)?)
}

fn histograms(
    registry: &Registry,
    name: &str,
    help: &str,
    labels: &[&str],
    buckets: &[f64],
) -> Result<HistogramVec, prometheus::Error> {
    let options = HistogramOpts::from(opts(name, help)).buckets(buckets.to_vec());
    register(registry, HistogramVec::new(options, labels)?)
}

fn register<C: Collector + Clone + 'static>(
    registry: &Registry,
    collector: C,
) -> Result<C, prometheus::Error> {
    registry.register(Box::new(collector.clone()))?;
    Ok(collector)
}

fn as_i64(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests;
