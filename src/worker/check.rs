//! One batch on its way: leased watches -> evidence -> verdicts -> the store.
//!
//! The three steps are three functions, so that no database transaction can be open while the chain is
//! read (I8), and so that a test can stop between any two of them (I9).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinSet;
use uuid::Uuid;

use super::driver::Stop;
use super::read::{ChainReader, Part};
use super::schedules::Schedules;
use crate::chain::Chain;
use crate::clock::Clock;
use crate::domain::{
    ChainId, DueTimes, Evidence, Inconclusive, Judged, NextCheck, Outcome, Payment, PaymentId,
    Phase, Policy, Timestamp, Verdict,
};
use crate::schedule::{Schedule, Timing};
use crate::store::schedules::Series;
use crate::store::{Applied, ApplyFailure, Followed, Lease, Store, StoreError};
use crate::telemetry::Metrics;

/// A configured chain, and what goes with reading it.
pub struct WatchedChain {
    /// How to read it.
    pub chain: Chain,
    /// The configured or built-in repeats of targeted checks.
    pub schedule: Schedule,
    /// The margins of mandatory checks.
    pub timing: Timing,
    /// How to decide about its payments.
    pub policy: Policy,
}

/// The limits of one batch.
#[derive(Debug, Clone, Copy)]
pub struct CheckerSettings {
    /// How long a lease lasts. Reading a batch that takes longer is given up.
    pub lease_ttl: Duration,
}

/// Leases, reads and writes batches of watches. Cheap to share.
pub struct Checker {
    store: Arc<dyn Store>,
    chains: BTreeMap<ChainId, Arc<WatchedChain>>,
    schedules: Arc<Schedules>,
    default_policy: Policy,
    clock: Arc<dyn Clock>,
    metrics: Metrics,
    settings: CheckerSettings,
}

/// A batch of leased watches.
#[derive(Debug)]
pub struct Leased {
    lease: Lease,
    followed: Vec<Followed>,
}

impl Leased {
    /// The watches and their payments.
    pub fn followed(&self) -> &[Followed] {
        &self.followed
    }
}

/// What was read and judged, and not yet written.
#[derive(Debug)]
pub struct Read {
    lease: Lease,
    /// Verdicts that change nothing but their watch.
    unchanged: Vec<Judged>,
    /// Verdicts to resolve, with the policy of their chain.
    to_resolve: Vec<(Policy, Vec<Judged>)>,
    histories: Arc<Histories>,
}

/// What the metrics of a resolution need to know beside it, of every payment of a batch that could be read.
type Histories = BTreeMap<PaymentId, History>;

/// Whose a payment is, and how many checks of it went before this one.
#[derive(Debug, Clone, Copy)]
struct History {
    series: Series,
    checks_done: u32,
}

impl Read {
    fn of(lease: Lease, histories: Arc<Histories>) -> Self {
        Self { lease, unchanged: Vec::new(), to_resolve: Vec::new(), histories }
    }
}

/// A batch that is being read: its parts come as they are judged.
struct Reading {
    lease: Lease,
    histories: Arc<Histories>,
    parts: mpsc::UnboundedReceiver<Part>,
    readers: JoinSet<()>,
}

/// The share of a lease that reading may take; the rest is for writing and for clocks that disagree.
const READ_SHARE_OF_LEASE: f64 = 0.6;

impl Checker {
    /// Puts the pieces together.
    pub fn new(
        store: Arc<dyn Store>,
        chains: BTreeMap<ChainId, Arc<WatchedChain>>,
        default_policy: Policy,
        clock: Arc<dyn Clock>,
        metrics: Metrics,
        settings: CheckerSettings,
    ) -> Self {
        let schedules = Arc::default();
        Self { store, chains, schedules, default_policy, clock, metrics, settings }
    }

    /// The same, following fitted schedules; without, every watch follows its chain's own repeats.
    #[must_use]
    pub fn with_schedules(self, schedules: Arc<Schedules>) -> Self {
        Self { schedules, ..self }
    }

    /// The database.
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// The chains.
    pub fn chains(&self) -> &BTreeMap<ChainId, Arc<WatchedChain>> {
        &self.chains
    }

    /// A configured chain.
    pub fn chain(&self, id: ChainId) -> Option<&Arc<WatchedChain>> {
        self.chains.get(&id)
    }

    /// The clock.
    pub fn clock(&self) -> &Arc<dyn Clock> {
        &self.clock
    }

    fn new_lease(&self) -> Lease {
        let now = self.clock.now();
        let expires_at = now.saturating_add(self.settings.lease_ttl);
        Lease { token: Uuid::new_v4(), now, expires_at }
    }

    /// Leases what is due, oldest first.
    pub async fn lease_due(&self, limit: u32) -> Result<Leased, StoreError> {
        let lease = self.new_lease();
        let followed = self.store.lease_due(&lease, limit).await?;
        Ok(self.leased(lease, followed).await)
    }

    /// Leases one page of all that is open.
    pub async fn lease_page(
        &self,
        after: Option<&PaymentId>,
        limit: u32,
    ) -> Result<Leased, StoreError> {
        let lease = self.new_lease();
        let followed = self.store.lease_page(&lease, after, limit).await?;
        Ok(self.leased(lease, followed).await)
    }

    /// A batch, once the schedules that its watches follow are known.
    async fn leased(&self, lease: Lease, followed: Vec<Followed>) -> Leased {
        let watches = followed.iter().map(|one| &one.watch);
        self.schedules.load(self.store.as_ref(), watches).await;
        Leased { lease, followed }
    }

    /// Reads the chains about the batch and judges each payment. Never fails: what could not be read is
    /// inconclusive. Touches no database (I8).
    pub async fn read(&self, leased: Leased) -> Read {
        let mut reading = self.begin(leased);
        let mut whole = Read::of(reading.lease, Arc::clone(&reading.histories));
        while let Some(mut part) = self.next_part(&mut reading).await {
            whole.unchanged.append(&mut part.unchanged);
            whole.to_resolve.append(&mut part.to_resolve);
        }
        whole
    }

    /// Starts reading a batch: every chain side by side, so that a slow one costs the others nothing.
    fn begin(&self, leased: Leased) -> Reading {
        let Leased { lease, followed } = leased;
        let mut unreadable = Vec::new();
        let mut histories = Histories::new();
        let mut by_chain: BTreeMap<ChainId, Vec<(Followed, Payment)>> = BTreeMap::new();
        for one in followed {
            match self.unreadable(&one) {
                Some(judged) => unreadable.push(judged),
                None => {
                    if let Ok(payment) = one.payment.clone() {
                        let series = Series { rail: payment.rail, chain_id: payment.chain_id };
                        let history = History { series, checks_done: one.watch.checks_done };
                        histories.insert(payment.id.clone(), history);
                        by_chain.entry(payment.chain_id).or_default().push((one, payment));
                    }
                }
            }
        }
        // Bounded by what a batch holds: a payment is sent once.
        let (sender, parts) = mpsc::unbounded_channel();
        self.count(&unreadable);
        // The receiver is in our hand.
        let _ = sender.send(Part {
            policy: self.default_policy.clone(),
            unchanged: Vec::new(),
            to_resolve: unreadable,
        });
        // Not detached: when the reading is dropped, so is the set, and the reads end.
        let mut readers = JoinSet::new();
        let budget = self.settings.lease_ttl.mul_f64(READ_SHARE_OF_LEASE);
        for (chain_id, group) in by_chain {
            let Some(watched) = self.chains.get(&chain_id).cloned() else { continue };
            let (clock, metrics) = (Arc::clone(&self.clock), self.metrics.clone());
            let schedules = Arc::clone(&self.schedules);
            let sender = sender.clone();
            readers.spawn(async move {
                let reader = ChainReader { watched, schedules, group, clock, metrics };
                reader.read(budget, sender).await;
            });
        }
        Reading { lease, histories: Arc::new(histories), parts, readers }
    }

    /// What was judged next; `None` when all was. Nothing is lost when this is dropped half way.
    async fn next_part(&self, reading: &mut Reading) -> Option<Read> {
        while let Some(part) = reading.parts.recv().await {
            let Part { policy, unchanged, to_resolve } = part;
            if unchanged.is_empty() && to_resolve.is_empty() {
                continue;
            }
            let mut read =
                Read { unchanged, ..Read::of(reading.lease, Arc::clone(&reading.histories)) };
            if !to_resolve.is_empty() {
                read.to_resolve.push((policy, to_resolve));
            }
            return Some(read);
        }
        while let Some(joined) = reading.readers.join_next().await {
            // The watches keep their lease until it runs out, and are checked again then.
            if let Err(panic) = joined {
                self.metrics.task_panics.with_label_values(&["chain_read"]).inc();
                tracing::error!(%panic, "reading a chain panicked; its payments are checked again when their lease runs out");
            }
        }
        None
    }

    /// Writes a batch down. Returns what became of every payment whose verdict was resolved.
    pub async fn write(&self, read: Read) -> Result<Vec<Applied>, StoreError> {
        let Read { lease, unchanged, to_resolve, histories } = read;
        if !unchanged.is_empty() {
            self.store.reschedule(&lease, &unchanged).await?;
        }
        let mut all = Vec::new();
        for (policy, batch) in to_resolve {
            let settled_at: BTreeMap<_, _> = batch
                .iter()
                .filter_map(|judged| match &judged.verdict {
                    Verdict::Settled(s) => Some((judged.payment_id.clone(), s.transfer.block.time)),
                    _ => None,
                })
                .collect();
            // Chain order across transactions as well: the first transfer pays.
            let mut batch = batch;
            batch.sort_by_key(Judged::chain_order);
            for chunk in chunks(batch, APPLY_BATCH_MAX) {
                let now = self.clock.now();
                let applied = self.store.apply(&lease, chunk, &policy, now).await?;
                for one in &applied {
                    let history = histories.get(&one.payment_id);
                    self.record(one, settled_at.get(&one.payment_id).copied(), history, now);
                }
                all.extend(applied);
            }
        }
        Ok(all)
    }

    /// Reads and writes one leased batch, and writes what is known while the rest is being read: a transfer
    /// that one endpoint has shown does not wait for the others that only a negative needs. When a stop was
    /// requested and its patience is over, the rest is given back instead; only reading the chain is ever
    /// broken off, never the database's work.
    pub async fn finish(&self, leased: Leased, stop: &Stop) -> Result<Vec<Applied>, StoreError> {
        let mut applied = Vec::new();
        if leased.followed.is_empty() {
            return Ok(applied);
        }
        let mut reading = self.begin(leased);
        loop {
            let part = tokio::select! {
                part = self.next_part(&mut reading) => part,
                () = stop.patience_over() => {
                    let lease = reading.lease;
                    drop(reading);
                    let released = self.store.release(&lease).await?;
                    tracing::info!(released, "stopping: payments not yet checked were given back");
                    return Ok(applied);
                }
            };
            let Some(part) = part else { return Ok(applied) };
            applied.extend(self.write(part).await?);
        }
    }

    /// A verdict without reading the chain, for what cannot be asked about (I11).
    fn unreadable(&self, followed: &Followed) -> Option<Judged> {
        let (reason, problem) = match &followed.payment {
            Err(malformed) => (Inconclusive::MalformedPayment, malformed.to_string()),
            Ok(payment) if !Chain::can_read(payment.method) => (
                Inconclusive::UnsupportedMethod,
                format!("{payment}: method {} cannot be read by this version", payment.method),
            ),
            Ok(payment) if !self.chains.contains_key(&payment.chain_id) => (
                Inconclusive::ChainNotConfigured,
                format!(
                    "{payment}: chain {} is not configured; add it under [[chains]]",
                    payment.chain_id
                ),
            ),
            Ok(_) => return None,
        };
        let now = self.clock.now();
        let later = now.saturating_add(self.settings.lease_ttl);
        Some(Judged {
            payment_id: followed.watch.payment_id.clone(),
            checked_at: now,
            terms: None,
            evidence: Evidence::default(),
            verdict: Verdict::Inconclusive(reason),
            problem: Some(problem),
            due: DueTimes {
                open: NextCheck { phase: Phase::Reconcile, at: None },
                late: None,
                finality: later,
                reopened: later,
                schedule_id: None,
            },
        })
    }

    fn count(&self, judged: &[Judged]) {
        for one in judged {
            self.metrics.checks.with_label_values(&[one.verdict.kind()]).inc();
        }
    }

    fn record(
        &self,
        applied: &Applied,
        block_time: Option<crate::domain::BlockTime>,
        history: Option<&History>,
        now: Timestamp,
    ) {
        let payment = applied.payment_id.as_str();
        match &applied.result {
            Ok(resolved) if resolved.recorded => {
                let outcome = resolved.outcome.code();
                self.metrics.resolutions.with_label_values(&[outcome]).inc();
                if let (Some(time), Some(history), true) = (block_time, history, resolved.settles) {
                    let delay = now.since(Timestamp::from(time));
                    self.metrics.settlement_found(history.series, delay, history.checks_done + 1);
                }
                let refund = resolved.refund.map(|reason| reason.code());
                tracing::info!(payment, outcome, refund, phase = %resolved.phase, "payment resolved");
            }
            Ok(resolved) if resolved.outcome == Outcome::Flagged => {
                tracing::warn!(
                    payment,
                    "payment flagged: only a person can decide; see `reconciled explain`"
                );
            }
            Ok(_) => {}
            Err(ApplyFailure::LeaseLost) => {
                self.metrics.apply_failures.with_label_values(&["lease_lost"]).inc();
                tracing::debug!(payment, "the lease ran out; somebody else checks this payment");
            }
            Err(ApplyFailure::Refused(problem)) => {
                self.metrics.apply_failures.with_label_values(&["refused"]).inc();
                tracing::error!(
                    payment,
                    problem,
                    "the resolution could not be written; nothing of it was, and the next check tries again"
                );
            }
        }
    }
}

/// The most payments resolved in one transaction.
const APPLY_BATCH_MAX: usize = 200;

fn chunks<T>(mut items: Vec<T>, size: usize) -> Vec<Vec<T>> {
    let mut out = Vec::with_capacity(items.len().div_ceil(size));
    while items.len() > size {
        let rest = items.split_off(size);
        out.push(std::mem::replace(&mut items, rest));
    }
    if !items.is_empty() {
        out.push(items);
    }
    out
}
