//! `reconciled run`: the daemon.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Notify;
use tokio_cron_scheduler::{Job, JobScheduler};

use super::Ending;
use crate::chain::Chain;
use crate::cli::ConfigArgs;
use crate::clock::{Clock, SystemClock};
use crate::config::{Config, ConfigError, ConfiguredChain};
use crate::domain::{ChainId, Policy};
use crate::errors::error_chain;
use crate::http::{Pages, serve};
use crate::schedule::Schedule;
use crate::store::{DatabaseUrl, Store, StoreError, connect};
use crate::telemetry::{Metrics, init_logging, rpc_observer};
use crate::worker::tune::ChainTuning;
use crate::worker::{
    AskForRuns, Checker, CheckerSettings, Discovery, Driver, Maintenance, Probes, Reconcile,
    ReconcileSettings, Reconciler, RefundSettings, Refunds, Sampling, Schedules, Stop, Targeted,
    Task, Tuning, Waits, WatchedChain,
};

/// The share of the grace period that reading may go on for; the rest is for giving leases back.
const PATIENCE_SHARE_OF_GRACE: f64 = 0.5;
/// How often old checks are pruned.
const MAINTENANCE_EVERY: Duration = Duration::from_secs(600);
/// The period of a task that only its ticker wakes.
const TICKED: Duration = Duration::from_secs(24 * 3_600);
/// How often a run is looked for that somebody asked for, or left unfinished.
const RECONCILE_POLL: Duration = Duration::from_secs(2);
/// The waits between attempts to reach the database at the start.
const CONNECT_RETRY: Duration = Duration::from_secs(2);

/// Runs until SIGTERM or SIGINT.
pub async fn run(args: &ConfigArgs) -> anyhow::Result<Ending> {
    let config = Config::load(&args.config)?;
    init_logging(config.log.format, &config.log.filter)
        .map_err(|error| ConfigError::Shape(error.to_string()))?;
    config.validate_limits()?;
    let url = config.database_url()?;
    let policy = config.policy()?;
    let chains = config.chains(|name| std::env::var(name).ok())?;
    let repeats = config.repeats()?;
    let tick = Arc::new(Notify::new());
    let ticks = ticking(&config.reconcile.cron, Arc::clone(&tick))?;
    let metrics = Metrics::new()?;
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    let grace = config.shutdown.grace.0;
    let (stopper, stop) = Stop::new(grace.mul_f64(PATIENCE_SHARE_OF_GRACE));
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;

    let listener = TcpListener::bind(config.http.listen).await.with_context(|| {
        format!(
            "http.listen {} cannot be listened on; is another replica running?",
            config.http.listen
        )
    })?;
    let listen = listener.local_addr()?;
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        tracing::info!("stopping: what is leased is finished or given back");
        stopper.stop();
    });

    let pages = Arc::new(Pages::new(Arc::clone(&clock), metrics.clone()));
    let server = tokio::spawn(serve(listener, Arc::clone(&pages), stop.clone()));
    tracing::info!(%listen, "serving /metrics, /healthz and /readyz");

    let Some(store) = open_when_reachable(&url, &config, &stop).await? else {
        return Ok(Ending::Good);
    };
    let schedules = Arc::new(Schedules::new(config.following()));
    // The first checks should find the schedules that are in use. If not, sampling reads them soon.
    if let Err(error) = schedules.refresh(store.as_ref()).await {
        tracing::warn!(error = error_chain(&error), "fitted schedules could not be read yet");
    }
    let parts = Parts { store: &store, clock: &clock, metrics: &metrics, schedules };
    let works = parts.assemble(&config, chains, policy)?;
    let mut driver = Driver::new(Arc::clone(&clock), metrics.clone(), stop.clone());
    start_tasks(&config, &works, &mut driver, tick);
    if config.schedule.enabled {
        parts.start_fitting(&config, repeats, works, &mut driver);
    }
    let mut ticker = JobScheduler::new().await?;
    ticker.add(ticks).await?;
    ticker.start().await?;
    pages.set_working(store, driver.states());
    tracing::info!("running");

    stop.requested().await;
    let finished = tokio::time::timeout(grace, driver.finished()).await;
    if finished.is_err() {
        tracing::warn!(
            "the grace period is over; what is still leased is taken up again when its lease runs out"
        );
    }
    if let Err(error) = ticker.shutdown().await {
        tracing::warn!(%error, "the ticker did not stop");
    }
    // The server stops by itself on the same request; an open connection must not hold up the end.
    server.abort();
    tracing::info!("stopped");
    Ok(Ending::Good)
}

/// Connects and checks the tables, waiting for a database that cannot be reached. `None`: told to stop.
async fn open_when_reachable(
    url: &DatabaseUrl,
    config: &Config,
    stop: &Stop,
) -> anyhow::Result<Option<Arc<dyn Store>>> {
    while !stop.is_requested() {
        let opened = match connect(url, config.database.connections_max).await {
            Ok(store) => store.verify_schema().await.map(|optional| (store, optional)),
            Err(error) => Err(error),
        };
        match opened {
            Ok((store, optional)) => {
                if !optional.stock {
                    tracing::info!(
                        "tables stock_reservations and stock are absent: stock is left alone"
                    );
                }
                if !optional.identifiers {
                    tracing::info!("table payment_identifiers is absent: retries are not answered");
                }
                return Ok(Some(store));
            }
            Err(error @ StoreError::Unreachable(_)) => {
                tracing::error!(
                    error = error_chain(&error),
                    retry_in_secs = CONNECT_RETRY.as_secs(),
                    "the database cannot be reached; check database.url and that the server is up"
                );
                tokio::select! {
                    () = tokio::time::sleep(CONNECT_RETRY) => {}
                    () = stop.requested() => {}
                }
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(None)
}

/// One configured chain, ready to be read.
pub fn watch_chain(
    configured: ConfiguredChain,
    metrics: &Metrics,
    clock: Arc<dyn Clock>,
) -> anyhow::Result<(ChainId, WatchedChain)> {
    let ConfiguredChain { settings, schedule, timing, policy, .. } = configured;
    let id = settings.chain_id;
    let chain = Chain::new(settings, rpc_observer(metrics), clock)?;
    Ok((id, WatchedChain { chain, schedule, timing, policy }))
}

/// Starts every task; `tick` has a full reconcile asked for.
fn start_tasks(config: &Config, works: &Works, driver: &mut Driver, tick: Arc<Notify>) {
    let Works { checker, reconciler, refunds, .. } = works;
    let due = Arc::new(Notify::new());
    let every = config.discovery.every.0;
    let discovery = Discovery {
        store: Arc::clone(checker.store()),
        clock: Arc::clone(checker.clock()),
        stale_after: config.discovery.stale_after.0,
        batch_max: config.discovery.batch_max,
        wakes: Arc::clone(&due),
    };
    let targeted = Targeted { checker: Arc::clone(checker), batch_max: config.checks.batch_max };
    let asked = Arc::new(Notify::new());
    let ask = AskForRuns {
        store: Arc::clone(checker.store()),
        clock: Arc::clone(checker.clock()),
        wakes: Arc::clone(&asked),
    };
    let reconcile = Reconcile { reconciler: Arc::clone(reconciler) };
    let maintenance = Maintenance {
        store: Arc::clone(checker.store()),
        clock: Arc::clone(checker.clock()),
        keep_for: config.checks.keep_for.0,
    };
    driver.start(Arc::new(discovery), every, Arc::new(Notify::new()));
    driver.start(Arc::new(targeted), every, due);
    driver.start(Arc::new(ask), TICKED, tick);
    driver.start(Arc::new(reconcile), RECONCILE_POLL, asked);
    driver.start(
        Arc::clone(refunds) as Arc<dyn Task>,
        config.refunds.every.0,
        Arc::new(Notify::new()),
    );
    let probes = Probes { chains: checker.chains().clone(), clock: Arc::clone(checker.clock()) };
    driver.start(Arc::new(probes), config.health.every.0, Arc::new(Notify::new()));
    driver.start(Arc::new(maintenance), MAINTENANCE_EVERY, Arc::new(Notify::new()));
}

/// What does the work.
pub struct Works {
    /// Checks payments.
    pub checker: Arc<Checker>,
    /// Makes full reconciles.
    pub reconciler: Arc<Reconciler>,
    /// Looks for refunds.
    pub refunds: Arc<Refunds>,
    watched: BTreeMap<ChainId, Arc<WatchedChain>>,
    tunings: BTreeMap<ChainId, ChainTuning>,
}

/// What it is put together from.
pub struct Parts<'a> {
    /// The database.
    pub store: &'a Arc<dyn Store>,
    /// The clock.
    pub clock: &'a Arc<dyn Clock>,
    /// The metrics.
    pub metrics: &'a Metrics,
    /// The repeat schedules that are in use.
    pub schedules: Arc<Schedules>,
}

impl Parts<'_> {
    /// Puts together what does the work.
    pub fn assemble(
        &self,
        config: &Config,
        chains: Vec<ConfiguredChain>,
        policy: Policy,
    ) -> anyhow::Result<Works> {
        let mut watched = BTreeMap::new();
        let mut tunings = BTreeMap::new();
        let mut receivers = BTreeMap::new();
        let mut refunding = BTreeMap::new();
        for chain in chains {
            let tuning = ChainTuning { grid: chain.grid, settings: chain.fit.clone() };
            let (of_chain, refund_policy) = (chain.receivers.clone(), chain.refunds.clone());
            let (id, chain) = watch_chain(chain, self.metrics, Arc::clone(self.clock))?;
            let chain = Arc::new(chain);
            refunding.insert(id, (Arc::clone(&chain), refund_policy));
            watched.insert(id, chain);
            tunings.insert(id, tuning);
            receivers.insert(id, of_chain);
        }
        let lease_ttl = config.checks.lease_ttl.0;
        let checker = Checker::new(
            Arc::clone(self.store),
            watched.clone(),
            policy,
            Arc::clone(self.clock),
            self.metrics.clone(),
            CheckerSettings { lease_ttl },
        );
        let checker = Arc::new(checker.with_schedules(Arc::clone(&self.schedules)));
        let settings = ReconcileSettings {
            page_size: config.reconcile.page_size,
            window: config.reconcile.window.0,
            // A step reads a page of payments, under their own lease, or a page of a chain.
            lease_ttl: lease_ttl.saturating_mul(2),
        };
        let metrics = self.metrics.clone();
        let reconciler = Reconciler::new(Arc::clone(&checker), receivers, metrics, settings);
        let refunds = Refunds {
            store: Arc::clone(self.store),
            chains: refunding,
            clock: Arc::clone(self.clock),
            metrics: self.metrics.clone(),
            settings: RefundSettings {
                every: config.refunds.every.0,
                owed_every: config.refunds.owed_every.0,
                closed_for: config.refunds.closed_for.0,
                batch_max: config.refunds.batch_max,
            },
        };
        let (reconciler, refunds) = (Arc::new(reconciler), Arc::new(refunds));
        Ok(Works { checker, reconciler, refunds, watched, tunings })
    }

    /// Starts the tasks that fit the repeat schedules.
    fn start_fitting(self, config: &Config, repeats: Schedule, works: Works, driver: &mut Driver) {
        let Works { watched, tunings, .. } = works;
        let settings = config.tune_settings();
        let with_grid = |(id, chain): (ChainId, Arc<WatchedChain>)| {
            tunings.get(&id).map(|tuning| (id, (chain, tuning.grid)))
        };
        let sampling = Sampling {
            store: Arc::clone(self.store),
            chains: watched.into_iter().filter_map(with_grid).collect(),
            schedules: Arc::clone(&self.schedules),
            clock: Arc::clone(self.clock),
            metrics: self.metrics.clone(),
            window: settings.window,
            settle_lag: config.schedule.settle_lag.0,
            waits: Waits::default(),
        };
        let tuning = Tuning {
            store: Arc::clone(self.store),
            chains: tunings,
            base: repeats,
            settings,
            every: config.schedule.every.0,
            schedules: self.schedules,
            clock: Arc::clone(self.clock),
            metrics: self.metrics.clone(),
        };
        let sample_every = config.schedule.sample_every.0;
        driver.start(Arc::new(sampling), sample_every, Arc::new(Notify::new()));
        driver.start(Arc::new(tuning), config.schedule.every.0, Arc::new(Notify::new()));
    }
}

/// A job that signals `tick` on a cron schedule, in UTC. The scheduler guards against nothing, so it
/// only signals.
fn ticking(cron: &str, tick: Arc<Notify>) -> Result<Job, ConfigError> {
    Job::new_async(cron, move |_, _| {
        let tick = Arc::clone(&tick);
        Box::pin(async move { tick.notify_one() })
    })
    .map_err(|e| ConfigError::Value {
        key: "reconcile.cron".to_owned(),
        problem: format!(
            "{cron:?} is not a cron expression with seconds, such as \"0 */10 * * * *\": {e}"
        ),
    })
}
