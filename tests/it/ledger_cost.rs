//! What the scan for transfers costs in RPC requests: an idle run, and a day of a chain with 2 s blocks.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use alloy_primitives::{Address, B256, U256};
use reconciled::chain::{Chain, ChainSettings, EndpointSettings};
use reconciled::clock::{Clock, ManualClock};
use reconciled::domain::{Amount, ChainId, Policy, Receiver, Timestamp, Totals};
use reconciled::schedule::{Pacing, Schedule, Timing};
use reconciled::sim::{Authorized, Fault, SimChain, SimServer, SimSettings};
use reconciled::store::{DatabaseUrl, Store, connect};
use reconciled::telemetry::{Metrics, rpc_observer};
use reconciled::worker::{
    Checker, CheckerSettings, ReconcileSettings, Reconciler, Report, RunEnd, ScanStart, Stop,
    Unheard, WatchedChain, WatchedReceiver,
};

const CHAIN: ChainId = ChainId::new(8453);
const TOKEN: Address = Address::repeat_byte(0x11);
const PAY_TO: Address = Address::repeat_byte(0x22);
const GENESIS: Timestamp = Timestamp::from_millis(1_767_225_600_000);
const BLOCK_TIME: Duration = Duration::from_secs(2);
const DAY_BLOCKS: u64 = 43_200;
const LAG: Duration = Duration::from_secs(20 * 60);

struct Scene {
    server: SimServer,
    clock: Arc<ManualClock>,
    store: Arc<dyn Store>,
    reconciler: Reconciler,
    stop: Stop,
    _stopper: reconciled::worker::Stopper,
    _folder: tempfile::TempDir,
}

impl Scene {
    /// A chain that is a day old, all of it final, with a transfer every so many blocks.
    async fn start(endpoints: usize, range_limit: u64, every: Option<u64>) -> Self {
        let settings = SimSettings::new(CHAIN, GENESIS, BLOCK_TIME, LAG, TOKEN);
        let chain = SimChain::new(settings);
        if let Some(every) = every {
            for n in (every..DAY_BLOCKS).step_by(usize::try_from(every).unwrap()) {
                let transfer = Authorized {
                    payer: Address::from_word(B256::from(U256::from(n % 50 + 1))),
                    to: PAY_TO,
                    value: Amount::new(U256::from(n)),
                    nonce: B256::from(U256::from(n)),
                };
                let at = GENESIS.saturating_add(BLOCK_TIME * u32::try_from(n).unwrap());
                chain.lock().transfer(at, transfer).unwrap();
            }
        }
        let now = GENESIS.saturating_add(BLOCK_TIME * u32::try_from(DAY_BLOCKS).unwrap() + LAG);
        chain.lock().set_time(now);
        let server = SimServer::start(chain, endpoints).await.unwrap();
        for endpoint in 0..endpoints {
            server.set_fault(endpoint, Fault::LogRangeLimit(range_limit));
        }
        let folder = tempfile::tempdir().unwrap();
        let url = format!("sqlite:{}", folder.path().join("cost.db").display());
        let store = connect(&DatabaseUrl::parse(&url).unwrap(), 4).await.unwrap();
        store.migrate().await.unwrap();
        store.verify_schema().await.unwrap();
        let clock = Arc::new(ManualClock::new(now));
        let reconciler = reconciler(&server, &store, &clock);
        let (stopper, stop) = Stop::new(Duration::ZERO);
        Self { server, clock, store, reconciler, stop, _stopper: stopper, _folder: folder }
    }

    /// Makes a run; returns its report and the requests it made.
    async fn run(&self) -> (Report, u64) {
        let before = self.server.requests();
        self.store.request_run(self.clock.now()).await.unwrap();
        let end = self.reconciler.run_pending(&Unheard, &self.stop).await.unwrap();
        let RunEnd::Finished(report) = end else { panic!("{end:?}") };
        assert!(report.problems.is_empty(), "{:?}", report.problems);
        (*report, self.server.requests() - before)
    }

    fn later(&self, by: Duration) {
        self.clock.advance(by);
        self.server.chain().lock().set_time(self.clock.now());
    }
}

fn reconciler(server: &SimServer, store: &Arc<dyn Store>, clock: &Arc<ManualClock>) -> Reconciler {
    let metrics = Metrics::new().unwrap();
    let endpoints = server
        .urls()
        .iter()
        .enumerate()
        .map(|(n, url)| EndpointSettings::new(&format!("endpoint-{n}"), url.clone()));
    let settings = ChainSettings {
        block_time: BLOCK_TIME,
        head_lag_max: Duration::from_secs(60),
        batch_max: 400,
        learn_known_used: false,
        ..ChainSettings::new(CHAIN, endpoints.collect())
    };
    let policy = Policy::default();
    let watched = WatchedChain {
        chain: Chain::new(settings, rpc_observer(&metrics), Arc::<ManualClock>::clone(clock))
            .unwrap(),
        schedule: Schedule::default(),
        timing: Timing {
            finality_margin: LAG,
            deadline_margin: Duration::from_secs(20),
            finality_retry: Duration::from_secs(60),
            pacing: Pacing::default(),
        },
        policy: policy.clone(),
    };
    let clock: Arc<dyn Clock> = Arc::<ManualClock>::clone(clock);
    let lease_ttl = Duration::from_secs(60);
    let checker = Checker::new(
        Arc::clone(store),
        BTreeMap::from([(CHAIN, Arc::new(watched))]),
        policy,
        clock,
        metrics.clone(),
        CheckerSettings { lease_ttl },
    );
    let receiver = WatchedReceiver {
        receiver: Receiver { token: TOKEN, pay_to: PAY_TO },
        start: ScanStart::Block(1),
    };
    let window = Duration::from_secs(7 * 24 * 3_600);
    Reconciler::new(
        Arc::new(checker),
        BTreeMap::from([(CHAIN, vec![receiver])]),
        metrics,
        ReconcileSettings { page_size: 2_000, window, lease_ttl: 2 * lease_ttl },
    )
}

/// What the table in the docs says. A day without transfers, a day with one every ten minutes, and a run ten
/// minutes later that finds nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_day_s_scan_and_an_idle_run_cost_what_the_docs_say() {
    let mut figures = Vec::new();
    for (endpoints, limit) in [(1, 10_000), (1, 500), (2, 10_000), (2, 500)] {
        let quiet = Scene::start(endpoints, limit, None).await;
        let (report, day) = quiet.run().await;
        assert_eq!(report.receivers[0].up_to.number, DAY_BLOCKS, "up to the finalized block");
        quiet.later(Duration::from_secs(600));
        let (_, idle) = quiet.run().await;

        let busy = Scene::start(endpoints, limit, Some(300)).await;
        let (report, busy_day) = busy.run().await;
        let all = report.receivers[0].totals;
        let sum: u64 = (300..DAY_BLOCKS).step_by(300).sum();
        let sum = Amount::new(U256::from(sum));
        assert_eq!(all, Totals { chain: sum, flagged: sum, ..Totals::default() });
        assert_eq!(report.counts.transfers_found, DAY_BLOCKS / 300 - 1);
        figures.push((endpoints, limit, day, busy_day, idle));
    }
    println!("endpoints, range limit, day without transfers, day with 143 transfers, idle run");
    for figure in &figures {
        println!("{figure:?}");
    }
    let most = [
        (1, 10_000, 30, 180, 7),
        (1, 500, 470, 780, 7),
        (2, 10_000, 60, 360, 14),
        (2, 500, 940, 1_560, 14),
    ];
    for (figure, most) in figures.iter().zip(most) {
        assert_eq!((figure.0, figure.1), (most.0, most.1));
        let within = figure.2 <= most.2 && figure.3 <= most.3 && figure.4 <= most.4;
        assert!(within, "{figure:?} is more than {most:?}");
    }
}
