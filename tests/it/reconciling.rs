//! The full reconcile over several simulated chains, of which something is spoiled or cannot be heard: what it
//! costs, and what it must not cost (I4, I11).

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::fmt::Write as _;
use std::time::Duration;

use alloy_primitives::{Address, B256, U256};
use reconciled::domain::{Amount, ChainId, Timestamp};
use reconciled::sim::{Authorized, Fault, FaultKind, SimChain, SimServer, SimSettings};
use reconciled::worker::Report;

use crate::support::worker::{Home, Worker};

const TOKEN: Address = Address::repeat_byte(0x11);
const PAY_TO: Address = Address::repeat_byte(0x22);
const GENESIS: Timestamp = Timestamp::from_millis(1_767_225_600_000);
const BLOCK_TIME: Duration = Duration::from_secs(2);
const LAG: Duration = Duration::from_secs(20);
/// Blocks that are final.
const BLOCKS: u32 = 1_000;

/// Chains, each with one transfer that no payment claims, and all of it final.
struct Scene {
    servers: Vec<SimServer>,
    worker: Worker,
}

impl Scene {
    async fn start(home: Home, chains: &[u64], endpoints: usize) -> Self {
        let mut servers = Vec::new();
        let mut configuration = String::new();
        let now = GENESIS.saturating_add(BLOCK_TIME * BLOCKS + LAG);
        for id in chains {
            let chain_id = ChainId::new(*id);
            let chain = SimChain::new(SimSettings::new(chain_id, GENESIS, BLOCK_TIME, LAG, TOKEN));
            let money = Authorized {
                payer: Address::repeat_byte(0x33),
                to: PAY_TO,
                value: Amount::new(U256::from(5)),
                nonce: B256::with_last_byte(1),
            };
            chain.lock().transfer(GENESIS.saturating_add(BLOCK_TIME * 10), money).unwrap();
            chain.lock().set_time(now);
            let server = SimServer::start(chain, endpoints).await.unwrap();
            configuration.push_str(&configuration_of(*id));
            for (n, url) in server.urls().iter().enumerate() {
                writeln!(configuration, "[[chains.endpoints]]\nname = \"{n}\"\nurl = \"{url}\"")
                    .unwrap();
            }
            servers.push(server);
        }
        Self { servers, worker: Worker::start(home, &configuration, now).await }
    }

    async fn spoil(&self, sql: &str) {
        self.worker.gateway.execute(sql, &[]).await.unwrap();
    }
}

/// A chain without endpoints.
fn configuration_of(id: u64) -> String {
    format!(
        "[[chains]]\nchain_id = {id}\nblock_time = \"2s\"\nfinality_margin = \"20s\"\n\
         head_lag_max = \"1h\"\n\
         [[chains.receivers]]\ntoken = \"{TOKEN}\"\npay_to = \"{PAY_TO}\"\nfirst_block = 1\n"
    )
}

fn chains(report: &Report) -> Vec<u64> {
    report.receivers.iter().map(|one| one.chain_id.get()).collect()
}

/// I4, I11: a chain whose rows make no sense is not said to be in balance, and the next one is accounted for.
async fn a_chain_whose_accounting_fails_is_left_out_and_costs_no_other(home: Home) {
    let scene = Scene::start(home, &[1, 2], 1).await;
    let report = scene.worker.reconcile_undiscovered().await;
    assert_eq!((chains(&report), report.counts.flags_raised), (vec![1, 2], 2), "{report:?}");
    scene.spoil("UPDATE {transfers} SET block_hash = '0xzz' WHERE chain_id = 1").await;
    let report = scene.worker.reconcile_undiscovered().await;
    assert_eq!(chains(&report), [2], "{report:?}");
    assert!(report.problems[0].contains("chain 1"), "{report:?}");
    assert!(report.receivers[0].drift.is_zero() && !report.is_well());
}

/// I11: so does one whose scan the database refuses.
async fn a_chain_whose_cursor_makes_no_sense_keeps_no_other_from_being_scanned(home: Home) {
    let scene = Scene::start(home, &[1, 2], 1).await;
    scene.worker.reconcile_undiscovered().await;
    scene.spoil("UPDATE {cursors} SET block_hash = '0xzz' WHERE chain_id = 1").await;
    let later = scene.worker.now().saturating_add(Duration::from_secs(600));
    scene.worker.clock.set(later);
    scene.servers.iter().for_each(|server| server.chain().lock().set_time(later));
    let report = scene.worker.reconcile_undiscovered().await;
    assert_eq!(chains(&report), [2], "{report:?}");
    assert!(report.receivers[0].up_to.number > u64::from(BLOCKS), "{report:?}");
}

/// I4: of three endpoints two are asked; where one of them gives no logs, the third is heard as well, and
/// shows what the first left out.
async fn the_scan_does_not_move_on_by_one_word_while_another_can_be_heard(home: Home) {
    let scene = Scene::start(home, &[1], 3).await;
    let server = &scene.servers[0];
    server.set_fault(0, Fault::EmptyLogs);
    server.set_fault(1, Fault::LogRangeLimit(0));
    let report = scene.worker.reconcile_undiscovered().await;
    assert_eq!(report.counts.transfers_found, 0, "{report:?}");
    assert_eq!(report.receivers[0].up_to.number, 0, "it stands: {report:?}");
    assert!(report.problems[0].contains("different transfers"), "{report:?}");
    server.clear_fault(0, FaultKind::EmptyLogs);
    let report = scene.worker.reconcile_undiscovered().await;
    assert_eq!((report.counts.transfers_found, report.problems.len()), (1, 0), "{report:?}");
}

/// I4: nor does it start behind money that one endpoint cannot see, because another chain is behind it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_scan_starts_where_endpoints_agree() {
    let scene = Scene::start(Home::sqlite(), &[1], 2).await;
    let other = SimChain::new(SimSettings::new(
        ChainId::new(1),
        GENESIS.saturating_add(BLOCK_TIME / 2),
        BLOCK_TIME,
        LAG,
        Address::repeat_byte(0x44),
    ));
    other.lock().set_time(scene.worker.now());
    let foreign = SimServer::start(other, 1).await.unwrap();
    let text = format!(
        "{}[[chains.endpoints]]\nname = \"0\"\nurl = \"{}\"\n\
         [[chains.endpoints]]\nname = \"1\"\nurl = \"{}\"\n",
        configuration_of(1),
        foreign.urls()[0],
        scene.servers[0].urls()[1],
    );
    let worker = Worker::start(Home::sqlite(), &text, scene.worker.now()).await;
    let report = worker.reconcile_undiscovered().await;
    assert!(report.problems[0].contains("disagree about block 0"), "{report:?}");
    assert_eq!(worker.gateway.count("{cursors}").await.unwrap(), 0, "{report:?}");
}

/// I10: a step that outlasts the run's lease is done by others too, and comes to nothing.
#[tokio::test]
async fn endpoints_that_hang_make_no_step_outlast_the_lease() {
    let lease = Duration::from_secs(10);
    let hanging = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", hanging.local_addr().unwrap());
    let mut text = format!("[checks]\nlease_ttl = \"5s\"\n{}", configuration_of(1));
    for n in 0..6 {
        writeln!(text, "[[chains.endpoints]]\nname = \"{n}\"\nurl = \"{url}/{n}\"").unwrap();
    }
    let worker = Worker::start(Home::sqlite(), &text, GENESIS).await;
    let started = std::time::Instant::now();
    let report = worker.reconcile_undiscovered().await;
    assert!(started.elapsed() < lease, "{:?}", started.elapsed());
    assert!(report.problems[0].contains("not enough endpoints"), "{report:?}");
}

macro_rules! on_both_stores {
    ($($test:ident),* $(,)?) => {
        mod sqlite {
            use crate::support::worker::Home;
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                super::$test(Home::sqlite()).await;
            })*
        }
        mod postgres {
            use crate::support::worker::Home;
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                super::$test(Home::postgres().await).await;
            })*
        }
    };
}

on_both_stores!(
    a_chain_whose_accounting_fails_is_left_out_and_costs_no_other,
    a_chain_whose_cursor_makes_no_sense_keeps_no_other_from_being_scanned,
    the_scan_does_not_move_on_by_one_word_while_another_can_be_heard,
);
