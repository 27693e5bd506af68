//! Runs one story: plays the gateway and the chain, drives the real worker on a real store with a clock
//! that jumps from one thing to the next, and compares what the database says with what it must say.
//!
//! The worker, the store and the chain reader are the daemon's own. What is left out is waiting: where
//! the daemon would poll and find nothing, the runner goes on to the next moment at which something can
//! be found.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use alloy_primitives::{Address, address};

use self::daemon::{Daemon, start_daemon};
use super::chain::SimSettings;
use super::expectation::{Difference, check};
use super::gateway::GatewayDb;
use super::scenario::{KillPoint, Scenario};
use super::{SimChain, SimServer};
use crate::clock::{Clock, ManualClock};
use crate::domain::{ChainId, PaymentId, Timestamp};
use crate::store::{DatabaseUrl, Store, connect};
use crate::worker::{Stop, Stopper};

mod acts;
mod audience;
mod daemon;
mod observe;
mod refunds;
mod rows;

pub use audience::{Audience, Nobody, Told};

/// When every story starts: 2026-01-01T00:00:00Z.
pub const STORY_START: Timestamp = Timestamp::from_millis(1_767_225_600_000);
/// The chain exists for this long before a story starts.
const CHAIN_HISTORY: Duration = Duration::from_secs(2 * 3_600);
/// The simulated chain's id: Base's.
pub const STORY_CHAIN: ChainId = ChainId::new(8453);
/// The simulated token: USDC's address on Base.
pub const STORY_TOKEN: Address = address!("0x833589fCD6eDb6E08f4c7C32D4f71b54bdA02913");
/// Where every payment of a story goes.
pub const STORY_PAY_TO: Address = address!("0x00000000000000000000000000000000000c0ffe");
/// How often the daemon looks for new payments.
const DISCOVERY_EVERY: Duration = Duration::from_secs(1);
/// Steps a story may take: far more than any needs, so that a loop in the runner ends.
const STEPS_MAX: usize = 200_000;

/// How a story ended.
#[derive(Debug, Clone, PartialEq)]
pub struct Ended {
    /// What the database should have said and did not, with the time of the story.
    pub wrong: Vec<(Duration, Difference)>,
    /// From a transfer's block to its resolution, per payment.
    pub delays: BTreeMap<String, Duration>,
    /// JSON-RPC calls made.
    pub requests: u64,
}

/// One story, under way.
pub struct Runner {
    scenario: Scenario,
    gateway: GatewayDb,
    store: Arc<dyn Store>,
    server: SimServer,
    clock: Arc<ManualClock>,
    daemon: Daemon,
    stop: Stop,
    _stopper: Stopper,
    /// How far the local clock is ahead of the chain's.
    clock_ahead: Duration,
    kill_at_next: Option<KillPoint>,
    discoveries: BTreeSet<Duration>,
    landed: BTreeMap<PaymentId, Timestamp>,
    delays: BTreeMap<String, Duration>,
}

impl Runner {
    /// Sets the stage on a migrated database: rows, chain, endpoints, daemon.
    pub async fn new(scenario: Scenario, database: &DatabaseUrl) -> anyhow::Result<Self> {
        let store = connect(database, 4).await?;
        store.migrate().await?;
        store.verify_schema().await?;
        let gateway = GatewayDb::connect(database).await?;
        let chain = SimChain::new(SimSettings::new(
            STORY_CHAIN,
            STORY_START.saturating_sub(CHAIN_HISTORY),
            scenario.chain.block_time,
            scenario.chain.finalized_lag,
            STORY_TOKEN,
        ));
        chain.lock().set_time(STORY_START);
        let server = SimServer::start(chain, scenario.chain.endpoints).await?;
        let clock = Arc::new(ManualClock::new(STORY_START));
        let (stopper, stop) = Stop::new(Duration::ZERO);
        let daemon = start_daemon(&scenario, &server, &store, &clock)?;
        let mut runner = Self {
            scenario,
            gateway,
            store,
            server,
            clock,
            daemon,
            stop,
            _stopper: stopper,
            clock_ahead: Duration::ZERO,
            kill_at_next: None,
            discoveries: BTreeSet::from([Duration::ZERO]),
            landed: BTreeMap::new(),
            delays: BTreeMap::new(),
        };
        runner.write_first_rows().await?;
        Ok(runner)
    }

    /// The gateway's side of the database.
    pub fn gateway(&self) -> &GatewayDb {
        &self.gateway
    }

    /// Our side.
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// Plays the story to its last event or expectation.
    pub async fn play(&mut self, audience: &mut dyn Audience) -> anyhow::Result<Ended> {
        for payment in self.scenario.payments_at_start() {
            audience.hear(Duration::ZERO, Told::PaymentWritten(payment)).await;
        }
        let mut acts = self.acts();
        let mut expects = self.scenario.expects.clone();
        expects.sort_by_key(|expect| expect.at);
        let mut expects = expects.into_iter().peekable();
        let mut wrong = Vec::new();
        let mut next_reconcile = self.scenario.policy.reconcile_every;
        let mut next_search = self.scenario.pays_refunds().then_some(refunds::SEARCH_EVERY);
        let mut now = Duration::ZERO;
        for _ in 0..STEPS_MAX {
            let act_at = acts.first().map(|(at, _)| *at);
            let expect_at = expects.peek().map(|expect| expect.at);
            if act_at.is_none() && expect_at.is_none() {
                return Ok(Ended {
                    wrong,
                    delays: self.delays.clone(),
                    requests: self.server.requests(),
                });
            }
            let due_at = self.next_due(now).await?;
            let discovery_at = self.discoveries.first().copied();
            let next = [act_at, expect_at, due_at, discovery_at, next_search, Some(next_reconcile)]
                .into_iter()
                .flatten()
                .min()
                .unwrap_or(now)
                .max(now);
            audience.step(now, next).await;
            now = next;
            // What a block holds must be known before the block exists.
            for (_, step) in acts.iter().take_while(|(at, _)| *at <= now) {
                self.mine(now, step).await?;
            }
            self.set_time(now);
            while acts.first().is_some_and(|(at, _)| *at <= now) {
                let (_, step) = acts.remove(0);
                self.act(now, step, audience).await?;
            }
            while self.discoveries.first().is_some_and(|at| *at <= now) {
                self.discoveries.pop_first();
                self.daemon.discovery.discover(&self.stop).await?;
            }
            self.check_due(now, audience).await?;
            if next_reconcile <= now || next_search.is_some_and(|at| at <= now) {
                self.daemon.refunds.search_all(&self.stop).await?;
                next_search = next_search.map(|at| at.max(now + refunds::SEARCH_EVERY));
            }
            if next_reconcile <= now {
                next_reconcile += self.scenario.policy.reconcile_every;
                self.daemon.discovery.discover(&self.stop).await?;
                self.reconcile(now, audience).await?;
            }
            while let Some(expect) = expects.next_if(|expect| expect.at <= now) {
                let observed = self.observe().await?;
                wrong.extend(check(&expect, &observed).into_iter().map(|d| (now, d)));
            }
        }
        anyhow::bail!("the story took more than {STEPS_MAX} steps; the runner is stuck at {now:?}")
    }

    /// Stops the endpoints and closes the gateway's connections.
    pub async fn finish(self) -> anyhow::Result<()> {
        self.gateway.close().await;
        self.server.stop().await?;
        Ok(())
    }

    fn set_time(&self, at: Duration) {
        let chain_time = STORY_START.saturating_add(at);
        self.server.chain().lock().set_time(chain_time);
        self.clock.set(chain_time.saturating_add(self.clock_ahead));
    }

    fn at(&self, story_time: Duration) -> Timestamp {
        STORY_START.saturating_add(story_time)
    }

    /// When the next watch is due, in story time; at least the daemon's poll later than now.
    async fn next_due(&self, now: Duration) -> anyhow::Result<Option<Duration>> {
        let due = self.store.next_due_at(self.clock.now()).await?;
        Ok(due.map(|due| {
            let story = due.saturating_sub(self.clock_ahead).since(STORY_START);
            if story > now { story } else { now + DISCOVERY_EVERY }
        }))
    }
}
