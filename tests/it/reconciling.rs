//! The full reconcile over several simulated chains, of which something is spoiled or cannot be heard: what it
//! costs, and what it must not cost (I4, I11).

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::fmt::Write as _;
use std::time::Duration;

use alloy_primitives::{Address, B256, U256};
use reconciled::domain::{Amount, ChainId, Timestamp};
use reconciled::sim::{Authorized, SimChain, SimServer, SimSettings};
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
            writeln!(
                configuration,
                "[[chains]]\nchain_id = {id}\nblock_time = \"2s\"\nfinality_margin = \"20s\"\n\
                 head_lag_max = \"1h\"\n\
                 [[chains.receivers]]\ntoken = \"{TOKEN}\"\npay_to = \"{PAY_TO}\"\nfirst_block = 1"
            )
            .unwrap();
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
);
