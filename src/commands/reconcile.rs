//! `reconciled reconcile`: asks for a full reconcile, or makes one here and reports it.

use std::fmt::Write as _;
use std::io::{IsTerminal, Write};
use std::sync::Arc;
use std::time::Duration;

use comfy_table::{Table, presets};
use serde::Deserialize;
use tokio::signal::unix::{SignalKind, signal};

use super::output::{complain, say, say_text};
use super::run::Parts;
use super::{Ending, open_store};
use crate::cli::ConfigArgs;
use crate::clock::{Clock, SystemClock};
use crate::config::Config;
use crate::domain::Account;
use crate::store::{FinishedRun, Store, connect};
use crate::telemetry::Metrics;
use crate::worker::{Progress, Report, RunAudience, RunEnd, Schedules, Stop};

/// How often a run that is made elsewhere is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(300);

/// How long a read of a chain may go on after a stop was asked for.
const PATIENCE: Duration = Duration::from_secs(1);

/// Asks the running daemon for a full reconcile.
pub async fn request(args: &ConfigArgs, json: bool) -> anyhow::Result<Ending> {
    let store = open_store(&args.config).await?;
    let is_new = store.request_run(SystemClock.now()).await?;
    if json {
        say!("{}", serde_json::json!({ "requested": is_new }))?;
    } else if is_new {
        say!("a full reconcile is asked for; the running daemon starts it within seconds")?;
    } else {
        say!("a full reconcile is under way, or asked for already")?;
    }
    Ok(Ending::Good)
}

/// Makes a full reconcile, or waits for the one that is made elsewhere, and reports it.
pub async fn once(args: &ConfigArgs, json: bool) -> anyhow::Result<Ending> {
    let config = Config::load(&args.config)?;
    config.validate_limits()?;
    let policy = config.policy()?;
    let chains = config.chains(|name| std::env::var(name).ok())?;
    let store = connect(&config.database_url()?, config.database.connections_max).await?;
    store.verify_schema().await?;
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    let schedules = Arc::new(Schedules::new(config.following()));
    schedules.refresh(store.as_ref()).await?;
    let metrics = Metrics::new()?;
    let parts = Parts { store: &store, clock: &clock, metrics: &metrics, schedules };
    let works = parts.assemble(&config, chains, policy)?;

    let (stopper, stop) = Stop::new(PATIENCE);
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        stopper.stop();
    });

    store.request_run(clock.now()).await?;
    let runs = store.runs().await?;
    let wanted = runs.unfinished.map(|run| run.id).or(runs.finished.map(|run| run.id)).unwrap_or(0);
    let shown = Shown { terminal: std::io::stderr().is_terminal() };
    let report = loop {
        match works.reconciler.run_pending(&shown, &stop).await? {
            RunEnd::Finished(report) => break Some(*report),
            RunEnd::Stopped => break None,
            RunEnd::Nothing | RunEnd::Lost if stop.is_requested() => break None,
            RunEnd::Nothing | RunEnd::Lost => {}
        }
        if let Some(run) = made_elsewhere(store.as_ref(), wanted, &shown).await? {
            break Some(Report::deserialize(&run.report)?);
        }
        tokio::time::sleep(LOOK_EVERY).await;
    };
    shown.clear();
    let Some(report) = report else {
        complain!("stopped; the next full reconcile goes on where this one stands");
        return Ok(Ending::Wrong);
    };
    if json {
        say!("{}", serde_json::to_string_pretty(&report)?)?;
    } else {
        say_text!("{}", tell(&report))?;
    }
    Ok(if report.is_well() { Ending::Good } else { Ending::Wrong })
}

/// The run that is waited for, once somebody else has ended it.
async fn made_elsewhere(
    store: &dyn Store,
    wanted: i64,
    shown: &Shown,
) -> anyhow::Result<Option<FinishedRun>> {
    let runs = store.runs().await?;
    if let Some(run) = &runs.unfinished {
        shown.show(&format!("made elsewhere: {}", stands(&Progress::read(run))));
    }
    Ok(runs.finished.filter(|run| run.id >= wanted))
}

fn stands(progress: &Progress) -> String {
    let counts = &progress.counts;
    format!(
        "{}: {} payments read, {} transfers found, {} accounted for",
        progress.stage, counts.payments_read, counts.transfers_found, counts.transfers_accounted
    )
}

/// Progress on a terminal, nothing in a pipe.
struct Shown {
    terminal: bool,
}

impl Shown {
    fn show(&self, line: &str) {
        if self.terminal {
            // Nobody is harmed by progress that cannot be shown.
            let _ = write!(std::io::stderr(), "\r\x1b[K{line}");
        }
    }

    fn clear(&self) {
        self.show("");
    }
}

impl RunAudience for Shown {
    fn progressed(&self, progress: &Progress) {
        self.show(&stands(progress));
    }
}

/// The report as text.
pub fn tell(report: &Report) -> String {
    let mut out = String::new();
    let counts = &report.counts;
    // Writing to a String cannot fail.
    let _ = writeln!(
        out,
        "open payments read {}, transfers found {}, settled payments read {}, taken up {}, flags raised {}, flags closed {}",
        counts.payments_read,
        counts.transfers_found,
        counts.settled_read,
        counts.taken_up,
        counts.flags_raised,
        counts.flags_closed
    );
    if report.receivers.is_empty() {
        let _ = writeln!(out, "no receiver is scanned; see [[chains.receivers]]");
    } else {
        let mut table = Table::new();
        table.load_style(presets::NOTHING);
        let mut header = vec!["chain", "token", "pay_to", "up to block", "arrived"];
        header.extend(Account::ALL.iter().map(|account| account.code()));
        header.push("drift");
        table.set_header(header);
        for one in &report.receivers {
            let mut row = vec![
                one.chain_id.to_string(),
                one.token.to_string(),
                one.pay_to.to_string(),
                one.up_to.number.to_string(),
                one.totals.chain.to_string(),
            ];
            row.extend(Account::ALL.iter().map(|account| one.totals.of(*account).to_string()));
            row.push(one.drift.to_string());
            table.add_row(row);
        }
        let _ = writeln!(out, "{table}");
    }
    for one in &report.unaccounted {
        let payment = one.payment_id.as_ref().map(|id| format!(", payment {id}"));
        let _ = writeln!(
            out,
            "not accounted for once: {}{}, by {}",
            one.subject,
            payment.unwrap_or_default(),
            one.drift
        );
    }
    for problem in &report.problems {
        let _ = writeln!(out, "could not be done: {problem}");
    }
    out
}
