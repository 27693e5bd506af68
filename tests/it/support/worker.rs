//! The daemon's own worker in a test: its store, its chain reader and its loops, on a clock that the test
//! moves. Set up from a configuration's text, as the daemon is.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::sync::Arc;
use std::time::Duration;

use reconciled::clock::{Clock, ManualClock};
use reconciled::commands::run::{Parts, Works};
use reconciled::config::Config;
use reconciled::domain::Timestamp;
use reconciled::sim::gateway::GatewayDb;
use reconciled::store::{DatabaseUrl, Store, connect};
use reconciled::telemetry::Metrics;
use reconciled::worker::{
    Discovery, Probes, Report, RunEnd, Schedules, Stop, Stopper, Targeted, Task, Unheard,
};
use tokio::sync::Notify;

use super::postgres::TestDatabase;

/// A fresh database.
pub(crate) enum Home {
    /// A file in a folder of its own.
    Sqlite(tempfile::TempDir),
    /// On the tests' server.
    Postgres(TestDatabase),
}

impl Home {
    pub(crate) fn sqlite() -> Self {
        Self::Sqlite(tempfile::tempdir().unwrap())
    }

    pub(crate) async fn postgres() -> Self {
        Self::Postgres(TestDatabase::migrated().await)
    }

    fn url(&self) -> DatabaseUrl {
        let url = match self {
            Self::Postgres(database) => database.url(),
            Self::Sqlite(folder) => {
                format!("sqlite:{}", folder.path().join("gateway.db").display())
            }
        };
        DatabaseUrl::parse(&url).unwrap()
    }
}

/// The worker, and the gateway's side of its database.
pub(crate) struct Worker {
    pub(crate) clock: Arc<ManualClock>,
    pub(crate) gateway: GatewayDb,
    discovery: Discovery,
    targeted: Targeted,
    works: Works,
    store: Arc<dyn Store>,
    probes: Probes,
    stop: Stop,
    _stopper: Stopper,
    _home: Home,
}

impl Worker {
    /// On a fresh database; `configuration` is a configuration file's text.
    pub(crate) async fn start(home: Home, configuration: &str, now: Timestamp) -> Self {
        let config = Config::parse(configuration, []).unwrap();
        config.validate_limits().unwrap();
        let metrics = Metrics::new().unwrap();
        let clock = Arc::new(ManualClock::new(now));
        let store = connect(&home.url(), 4).await.unwrap();
        store.migrate().await.unwrap();
        store.verify_schema().await.unwrap();
        let gateway = GatewayDb::connect(&home.url()).await.unwrap();
        let shared: Arc<dyn Clock> = Arc::<ManualClock>::clone(&clock);
        let schedules = Arc::new(Schedules::new(config.following()));
        let parts = Parts { store: &store, clock: &shared, metrics: &metrics, schedules };
        let chains = config.chains(|_| None).unwrap();
        let works = parts.assemble(&config, chains, config.policy().unwrap()).unwrap();
        let probes = Probes { chains: works.checker.chains().clone(), clock: Arc::clone(&shared) };
        let discovery = Discovery {
            store: Arc::clone(&store),
            clock: Arc::<ManualClock>::clone(&clock),
            stale_after: config.discovery.stale_after.0,
            batch_max: config.discovery.batch_max,
            wakes: Arc::new(Notify::new()),
        };
        let batch_max = config.checks.batch_max;
        let targeted = Targeted { checker: Arc::clone(&works.checker), batch_max };
        let (stopper, stop) = Stop::new(Duration::ZERO);
        Self {
            clock,
            gateway,
            discovery,
            targeted,
            works,
            store,
            probes,
            stop,
            _stopper: stopper,
            _home: home,
        }
    }

    pub(crate) fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// Finds payments to follow, and checks whatever is due. Returns how many were checked.
    pub(crate) async fn look(&self) -> usize {
        self.discovery.discover(&self.stop).await.unwrap();
        self.targeted.check_all_due(&self.stop).await.unwrap()
    }

    /// Asks every endpoint what the answer to is known.
    pub(crate) async fn probe(&self) {
        self.probes.activate(&self.stop).await.unwrap();
    }

    /// Finds payments to follow, and makes a full reconcile.
    pub(crate) async fn reconcile(&self) -> Report {
        self.discovery.discover(&self.stop).await.unwrap();
        self.reconcile_undiscovered().await
    }

    /// Makes a full reconcile, as `reconcile --once` does.
    pub(crate) async fn reconcile_undiscovered(&self) -> Report {
        self.store.request_run(self.clock.now()).await.unwrap();
        match self.works.reconciler.run_pending(&Unheard, &self.stop).await.unwrap() {
            RunEnd::Finished(report) => *report,
            other => panic!("{other:?}"),
        }
    }

    /// Looks for refunds that are due for a search. Returns how many records were closed.
    pub(crate) async fn search_refunds(&self) -> usize {
        self.works.refunds.search_all(&self.stop).await.unwrap()
    }
}
