//! The full reconcile (DESIGN section 9): the backstop behind the targeted checks, in three directions.
//!
//! 1. Open payments to chain: every open watch is read, whatever its schedule says.
//! 2. Chain to ledger ([`scan`], [`accounts`]): every transfer into a receiver is read, and accounted for.
//! 3. Ledger to chain ([`unproven`]): every payment called settled must have its transfer.
//!
//! And it closes flags whose cause is gone ([`flags`]).
//!
//! A run is a row in the database. It goes step by step, each bounded in time and memory; after each step
//! it writes down where it stands and renews its lease. So no two runs ever happen at once, whoever finds
//! one that nobody holds takes it up where it stands, and everything a step does can be done again.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::Notify;
use tokio::time::Instant;
use uuid::Uuid;

use super::check::{Checker, Leased, WatchedChain};
use super::driver::{Activation, Stop, Task};
use crate::clock::Clock;
use crate::domain::{ChainId, Receiver, Timestamp};
use crate::errors::error_chain;
use crate::store::{Applied, Lease, Run, Store, StoreError};
use crate::telemetry::Metrics;

mod accounts;
mod flags;
mod progress;
mod scan;
mod unproven;

pub use progress::{Counts, Progress, ReceiverReport, Report, Stage};
use scan::Widths;

/// From which block on the transfers into a receiver are scanned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ScanStart {
    /// From this one.
    Block(u64),
    /// From so long before the scan is first made.
    Lookback(Duration),
}

/// A configured receiver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WatchedReceiver {
    /// Who is paid.
    pub receiver: Receiver,
    /// Since when.
    pub start: ScanStart,
}

/// The limits of a run.
#[derive(Debug, Clone, Copy)]
pub struct ReconcileSettings {
    /// Rows per page.
    pub page_size: u32,
    /// How far back transfers are accounted for, and settled payments must have their transfer.
    pub window: Duration,
    /// How long a run that nobody renews is held.
    pub lease_ttl: Duration,
}

/// Hears what a run does.
pub trait RunAudience: Send + Sync {
    /// A step was made.
    fn progressed(&self, _progress: &Progress) {}
    /// Payments were resolved.
    fn resolved(&self, _applied: &[Applied]) {}
}

/// Nobody listens.
pub struct Unheard;

impl RunAudience for Unheard {}

/// How an attempt at a run ended.
#[derive(Debug, Clone, PartialEq)]
pub enum RunEnd {
    /// No run is asked for, or somebody else holds the one that is.
    Nothing,
    /// It was made to its end.
    Finished(Box<Report>),
    /// A stop was requested: it can be taken up where it stands.
    Stopped,
    /// Somebody else took it up.
    Lost,
}

/// Makes runs.
pub struct Reconciler {
    checker: Arc<Checker>,
    receivers: BTreeMap<ChainId, Vec<WatchedReceiver>>,
    metrics: Metrics,
    settings: ReconcileSettings,
    widths: Widths,
}

/// What a step came to.
enum Step {
    /// There is more to do.
    More,
    /// The run is over.
    Over,
    /// The stop's patience was over before the step was.
    Stopped,
}

/// The share of a run's lease that the reads of one step may take together; the rest is for writing, and for
/// clocks that disagree.
const READ_SHARE_OF_LEASE: f64 = 0.6;

/// The time that the reads of one step share: a step that outlasts the run's lease is done by several replicas
/// at once, and comes to nothing (I10).
#[derive(Debug, Clone, Copy)]
struct Budget {
    ends_at: Instant,
}

impl Budget {
    /// One of so many equal parts of what is left.
    fn part(self, parts: usize) -> Duration {
        let left = self.ends_at.saturating_duration_since(Instant::now());
        left / u32::try_from(parts.max(1)).unwrap_or(u32::MAX)
    }

    /// One of so many equal parts of what is left, to be parted further.
    fn within(self, parts: usize) -> Self {
        Self { ends_at: Instant::now() + self.part(parts) }
    }
}

/// Batches of due checks that one run makes for what it found, at most.
const SETTLE_BATCHES_MAX: u32 = 50;

impl Reconciler {
    /// Puts the pieces together.
    pub fn new(
        checker: Arc<Checker>,
        receivers: BTreeMap<ChainId, Vec<WatchedReceiver>>,
        metrics: Metrics,
        settings: ReconcileSettings,
    ) -> Self {
        for (chain_id, receivers) in &receivers {
            for watched in receivers {
                metrics.expect_receiver(*chain_id, &watched.receiver);
            }
        }
        Self { checker, receivers, metrics, settings, widths: Widths::default() }
    }

    fn store(&self) -> &Arc<dyn Store> {
        self.checker.store()
    }

    fn now(&self) -> Timestamp {
        self.checker.clock().now()
    }

    /// The time that the reads of a step have, from now on.
    fn budget(&self) -> Budget {
        let reads = self.settings.lease_ttl.mul_f64(READ_SHARE_OF_LEASE);
        Budget { ends_at: Instant::now() + reads }
    }

    /// The chain and its receivers, for every chain that has any.
    fn scanned_chains(&self) -> Vec<(ChainId, &Arc<WatchedChain>, &[WatchedReceiver])> {
        self.receivers
            .iter()
            .filter_map(|(id, receivers)| {
                Some((*id, self.checker.chain(*id)?, receivers.as_slice()))
            })
            .filter(|(.., receivers)| !receivers.is_empty())
            .collect()
    }

    fn lease(&self, token: Uuid) -> Lease {
        let now = self.now();
        Lease { token, now, expires_at: now.saturating_add(self.settings.lease_ttl) }
    }

    /// Takes up the run that is asked for and makes it to its end.
    pub async fn run_pending(
        &self,
        audience: &dyn RunAudience,
        stop: &Stop,
    ) -> Result<RunEnd, StoreError> {
        let token = Uuid::new_v4();
        let Some(run) = self.store().take_run(&self.lease(token)).await? else {
            return Ok(RunEnd::Nothing);
        };
        let end = self.make(token, &run, audience, stop).await;
        if !matches!(end, Ok(RunEnd::Finished(_))) {
            // Else others would wait until the lease runs out.
            if let Err(error) = self.store().release_run(&self.lease(token)).await {
                tracing::debug!(error = error_chain(&error), "a run could not be given back");
            }
        }
        end
    }

    async fn make(
        &self,
        token: Uuid,
        run: &Run,
        audience: &dyn RunAudience,
        stop: &Stop,
    ) -> Result<RunEnd, StoreError> {
        let mut progress = Progress::of(run);
        if run.progress.is_some() {
            tracing::info!(run = run.id, stage = %progress.stage.name(), "full reconcile taken up");
        }
        loop {
            audience.progressed(&progress);
            if stop.is_requested() {
                return Ok(RunEnd::Stopped);
            }
            match self.step(&mut progress, audience, stop).await {
                Ok(Step::More) => {}
                Ok(Step::Over) => break,
                Ok(Step::Stopped) => return Ok(RunEnd::Stopped),
                // A row that makes no sense must not keep the other stages from being done (I11).
                Err(error) => {
                    progress.or_told::<()>(progress.stage.name(), Err(error))?;
                    self.next_stage(&mut progress);
                }
            }
            let stands = serde_json::to_value(&progress).unwrap_or_default();
            if !self.store().keep_run(&self.lease(token), run.id, &stands).await? {
                tracing::warn!(run = run.id, "somebody else took up this full reconcile");
                return Ok(RunEnd::Lost);
            }
        }
        let report = progress.into_report();
        let stored = serde_json::to_value(&report).unwrap_or_default();
        let lease = self.lease(token);
        if !self.store().finish_run(&lease, run.id, &stored, lease.now).await? {
            return Ok(RunEnd::Lost);
        }
        report.log(run.id);
        Ok(RunEnd::Finished(Box::new(report)))
    }

    /// Goes on with what follows the whole of this stage.
    fn next_stage(&self, progress: &mut Progress) {
        progress.stage = match progress.stage {
            Stage::Watches { .. } => Stage::Scan { chain: None, pages: 0 },
            Stage::Scan { .. } => Stage::Unproven { after: None },
            Stage::Unproven { .. } => Stage::Flags { after: 0 },
            Stage::Flags { .. } => self.first_account(0),
            Stage::Settle { .. } => {
                progress.forget_accounts();
                self.first_account(1)
            }
            Stage::Accounts(_) | Stage::Over => Stage::Over,
        };
    }

    async fn step(
        &self,
        progress: &mut Progress,
        audience: &dyn RunAudience,
        stop: &Stop,
    ) -> Result<Step, StoreError> {
        match progress.stage.clone() {
            Stage::Watches { after } => {
                let leased =
                    self.checker.lease_page(after.as_ref(), self.settings.page_size).await?;
                let Some(last) = leased.followed().last() else {
                    progress.stage = Stage::Scan { chain: None, pages: 0 };
                    return Ok(Step::More);
                };
                progress.stage = Stage::Watches { after: Some(last.watch.payment_id.clone()) };
                progress.counts.payments_read += leased.followed().len() as u64;
                self.finish(progress, leased, audience, stop).await?;
                Ok(Step::More)
            }
            Stage::Scan { chain, pages } => self.scan_step(progress, chain, pages, stop).await,
            Stage::Unproven { after } => self.unproven_step(progress, after, stop).await,
            Stage::Flags { after } => self.flags_step(progress, after).await,
            Stage::Accounts(place) => self.accounts_step(progress, place).await,
            Stage::Settle { batches } => {
                let leased = self.checker.lease_due(self.settings.page_size).await?;
                if leased.followed().is_empty() || batches >= SETTLE_BATCHES_MAX {
                    self.next_stage(progress);
                    return Ok(Step::More);
                }
                progress.stage = Stage::Settle { batches: batches + 1 };
                self.finish(progress, leased, audience, stop).await?;
                Ok(Step::More)
            }
            Stage::Over => Ok(Step::Over),
        }
    }

    /// Checks what was leased. A page that cannot be written does not keep the others from being read (I11).
    async fn finish(
        &self,
        progress: &mut Progress,
        leased: Leased,
        audience: &dyn RunAudience,
        stop: &Stop,
    ) -> Result<(), StoreError> {
        let applied = self.checker.finish(leased, stop).await;
        if let Some(applied) = progress.or_told(progress.stage.name(), applied)? {
            audience.resolved(&applied);
        }
        Ok(())
    }
}

/// What comes of reading a chain, unless a requested stop's patience is over before. Only such reads may
/// be broken off, never the database's work.
async fn unless_stopped<T>(stop: &Stop, read: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        read = read => Some(read),
        () = stop.patience_over() => None,
    }
}

/// Asks for a run: at every start, and at every tick of the schedule.
pub struct AskForRuns {
    /// The database.
    pub store: Arc<dyn Store>,
    /// The clock.
    pub clock: Arc<dyn Clock>,
    /// Woken when a run was asked for.
    pub wakes: Arc<Notify>,
}

/// Replicas tick at the same moment: who finds a run that began only now asks for no second one.
const SAME_TICK: Duration = Duration::from_millis(500);

#[async_trait]
impl Task for AskForRuns {
    fn name(&self) -> &'static str {
        "reconcile_request"
    }

    async fn activate(&self, _stop: &Stop) -> anyhow::Result<Activation> {
        let now = self.clock.now();
        let last = self.store.runs().await?.finished;
        if last.is_none_or(|run| now.since(run.started_at) > SAME_TICK) {
            self.store.request_run(now).await?;
        }
        self.wakes.notify_one();
        Ok(Activation::default())
    }
}

/// Makes the runs that are asked for, and those that somebody left unfinished.
pub struct Reconcile {
    /// Makes them.
    pub reconciler: Arc<Reconciler>,
}

#[async_trait]
impl Task for Reconcile {
    fn name(&self) -> &'static str {
        "reconcile"
    }

    async fn activate(&self, stop: &Stop) -> anyhow::Result<Activation> {
        self.reconciler.run_pending(&Unheard, stop).await?;
        Ok(Activation::default())
    }
}
