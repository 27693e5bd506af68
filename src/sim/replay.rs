//! Replays settle latencies through the real targeted worker, to see what a schedule costs.
//!
//! Payments are broadcast, become unknown, and land or not at given times; the daemon's own discovery,
//! checker, chain reader and store find out, on a clock that jumps from one due time to the next. Counted
//! are the reads and how long after its block each payment is detected.
//!
//! A payment that settles after its repeats is found late by the daemon's mandatory check, once its
//! authorization is over. A poll loop written by hand has no such check: whatever settles after its last
//! poll is missed for good. The full reconcile, which may come earlier, is not run here.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use alloy_primitives::{Address, B256, U256, keccak256};
use anyhow::Context;
use tokio::sync::Notify;

use super::gateway::{GatewayDb, NewOrder};
use super::runner::{STORY_CHAIN, STORY_PAY_TO, STORY_START, STORY_TOKEN};
use super::stage::Stage;
use super::{Authorized, SimChain, SimServer, SimSettings};
use crate::chain::{Chain, ChainSettings, EndpointSettings};
use crate::clock::{Clock, ManualClock};
use crate::domain::{Amount, PaymentId, Phase, Policy, RawPayment, Timestamp};
use crate::schedule::{Pacing, Schedule, Timing};
use crate::store::{Store, connect};
use crate::telemetry::{Metrics, rpc_observer};
use crate::worker::{Checker, CheckerSettings, Discovery, Stop, Stopper, WatchedChain};

/// From one block of the replay to the next; a block is made at every multiple of it.
pub const BLOCK_TIME: Duration = Duration::from_secs(2);
/// How long an authorization holds. One that would land later never does.
pub const VALID_FOR: Duration = Duration::from_secs(600);
/// The age of the chain at the start, and what heads and logs may be old.
const HISTORY: Duration = Duration::from_secs(3_600);
/// How long after the end of its authorization a payment gets its mandatory check. Blocks are final at
/// once here: how late they are changes nothing else.
const FINALITY_MARGIN: Duration = Duration::from_secs(60);
/// Beyond everything a replay lasts.
const NEVER: Duration = Duration::from_secs(365 * 24 * 3_600);
const BATCH_MAX: u32 = 500;
const AMOUNT: u64 = 1_000_000;
/// Far more than any replay needs, so that a loop ends.
const STEPS_MAX: usize = 1_000_000;

/// One payment to replay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Broadcast {
    /// When, after the start.
    pub after: Duration,
    /// When it can be mined, after the broadcast: it is, in the next block. `None`: never.
    pub minable_after: Option<Duration>,
}

impl Broadcast {
    /// From the broadcast to the block that holds the transfer; `None` when there will be none.
    pub fn latency(&self) -> Option<Duration> {
        let minable = self.after + self.minable_after?;
        let blocks = minable.as_millis().div_ceil(BLOCK_TIME.as_millis());
        let block = BLOCK_TIME * u32::try_from(blocks).ok()?;
        Some(block - self.after).filter(|latency| *latency < VALID_FOR)
    }
}

/// How payments are found out about.
#[derive(Debug, Clone)]
pub struct ReplaySettings {
    /// The repeats.
    pub schedule: Schedule,
    /// How the repeats are shifted.
    pub pacing: Pacing,
    /// The age at which payments become unknown.
    pub found_at: Duration,
    /// How long a block takes to be visible.
    pub visible_after: Duration,
    /// Whether the mandatory check is made, as the daemon makes it; a loop written by hand has none.
    pub has_mandatory: bool,
}

/// What came of a replay.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Replayed {
    /// First checks and repeats made, all payments together.
    pub reads: u64,
    /// Mandatory checks made after the repeats.
    pub mandatory_reads: u64,
    /// From its block to its detection, of each payment that the repeats detected; ascending.
    pub delays: Vec<Duration>,
    /// The same of those that only the mandatory check detected.
    pub late_delays: Vec<Duration>,
    /// Payments that settled and were never detected.
    pub missed: usize,
    /// Checks that proved nothing, of any kind: the endpoint was not believed. They cost a read like others.
    pub inconclusive: u64,
    /// JSON-RPC requests made.
    pub requests: u64,
}

impl Replayed {
    /// The delays of all detected payments. Whoever is detected late settled after all repeats, and waits
    /// longer than any of the others.
    fn all(&self) -> impl Iterator<Item = Duration> + '_ {
        self.delays.iter().chain(&self.late_delays).copied()
    }

    /// The delay that this share of the detected payments does not exceed.
    pub fn delay_at(&self, share: f64) -> Duration {
        let mut delays: Vec<Duration> = self.all().collect();
        delays.sort_unstable();
        let last = delays.len().saturating_sub(1);
        delays.get((last as f64 * share).round() as usize).copied().unwrap_or_default()
    }

    /// The delays of all detected payments together.
    pub fn delay_sum(&self) -> Duration {
        self.all().sum()
    }

    /// The mean delay of all detected payments.
    pub fn delay_mean(&self) -> Duration {
        mean(self.delay_sum(), self.delays.len() + self.late_delays.len())
    }

    /// The mean delay of those that the repeats detected.
    pub fn repeats_delay_mean(&self) -> Duration {
        mean(self.delays.iter().sum(), self.delays.len())
    }
}

fn mean(sum: Duration, count: usize) -> Duration {
    sum.checked_div(u32::try_from(count).unwrap_or(u32::MAX)).unwrap_or_default()
}

/// Replays payments, on an SQLite database and a simulated chain of its own.
pub async fn replay(payments: &[Broadcast], settings: &ReplaySettings) -> anyhow::Result<Replayed> {
    let stage = Stage::sqlite()?;
    let mut replay = Replay::new(&stage, settings).await?;
    let replayed = replay.run(payments, settings).await?;
    replay.gateway.close().await;
    replay.server.stop().await?;
    drop(replay.store);
    stage.strike().await?;
    Ok(replayed)
}

struct Replay {
    gateway: GatewayDb,
    store: Arc<dyn Store>,
    server: SimServer,
    clock: Arc<ManualClock>,
    checker: Checker,
    discovery: Discovery,
    stop: Stop,
    _stopper: Stopper,
}

impl Replay {
    async fn new(stage: &Stage, settings: &ReplaySettings) -> anyhow::Result<Self> {
        let store = connect(&stage.url(), 4).await?;
        store.migrate().await?;
        let gateway = GatewayDb::connect(&stage.url()).await?;
        let genesis = STORY_START.saturating_sub(HISTORY);
        let finalized_lag = Duration::ZERO;
        let chain = SimChain::new(SimSettings::new(
            STORY_CHAIN,
            genesis,
            BLOCK_TIME,
            finalized_lag,
            STORY_TOKEN,
        ));
        chain.lock().set_time(STORY_START);
        let server = SimServer::start(chain, 1).await?;
        let clock = Arc::new(ManualClock::new(STORY_START));
        let metrics = Metrics::new()?;
        let endpoint = |url: &url::Url| EndpointSettings::new("simulated", url.clone());
        let endpoints = server.urls().iter().map(endpoint).collect();
        let chain_settings = ChainSettings {
            block_time: BLOCK_TIME,
            head_age_max: HISTORY,
            head_lag_max: HISTORY,
            log_lookback: HISTORY,
            batch_max: 400,
            learn_known_used: false,
            ..ChainSettings::new(STORY_CHAIN, endpoints)
        };
        let watched = WatchedChain {
            chain: Chain::new(chain_settings, rpc_observer(&metrics), clock.clone())?,
            schedule: settings.schedule.clone(),
            timing: Timing {
                finality_margin: if settings.has_mandatory { FINALITY_MARGIN } else { NEVER },
                deadline_margin: BLOCK_TIME,
                finality_retry: FINALITY_MARGIN,
                pacing: settings.pacing,
            },
            // A payment that is proven over ends there, and no deadline comes before.
            policy: Policy { deadline_after: NEVER, early_failure: true, ..Policy::default() },
        };
        let policy = watched.policy.clone();
        let checker = Checker::new(
            Arc::clone(&store),
            BTreeMap::from([(STORY_CHAIN, Arc::new(watched))]),
            policy,
            Arc::<ManualClock>::clone(&clock),
            metrics,
            CheckerSettings { lease_ttl: Duration::from_secs(60) },
        );
        let discovery = Discovery {
            store: Arc::clone(&store),
            clock: Arc::<ManualClock>::clone(&clock),
            stale_after: HISTORY,
            batch_max: 1_000,
            wakes: Arc::new(Notify::new()),
        };
        let (stopper, stop) = Stop::new(Duration::ZERO);
        Ok(Self { gateway, store, server, clock, checker, discovery, stop, _stopper: stopper })
    }

    async fn run(
        &mut self,
        payments: &[Broadcast],
        settings: &ReplaySettings,
    ) -> anyhow::Result<Replayed> {
        let mut blocks = BTreeMap::new();
        for (n, payment) in payments.iter().enumerate() {
            if payment.latency().is_some() {
                let block = self.land(n, payment)?;
                blocks.insert(PaymentId::new(id(n)), block);
            }
        }
        let mut waiting: Vec<usize> = (0..payments.len()).collect();
        waiting.sort_by_key(|n| std::cmp::Reverse(payments[*n].after));
        let found = |n: usize| STORY_START.saturating_add(payments[n].after + settings.found_at);
        let mut replayed = Replayed::default();
        for _ in 0..STEPS_MAX {
            let due = self.store.next_due_at(self.clock.now()).await?;
            let due = due.filter(|at| at.since(STORY_START) < NEVER / 2);
            let arrival = waiting.last().map(|n| found(*n));
            let Some(now) = [due, arrival].into_iter().flatten().min() else {
                replayed.missed = blocks.len();
                replayed.inconclusive = self.inconclusive().await?;
                replayed.requests = self.server.requests();
                return Ok(replayed);
            };
            let now = now.max(self.clock.now());
            self.clock.set(now);
            self.server.chain().lock().set_time(now.saturating_sub(settings.visible_after));
            let mut arrived = false;
            while let Some(n) = waiting.pop_if(|n| found(*n) <= now) {
                self.write_rows(n, &payments[n]).await?;
                arrived = true;
            }
            if arrived {
                self.discovery.discover(&self.stop).await?;
            }
            self.check_all_due(&mut replayed, &mut blocks).await?;
        }
        anyhow::bail!("the replay did not end in {STEPS_MAX} steps")
    }

    async fn inconclusive(&self) -> anyhow::Result<u64> {
        let sql = "SELECT CAST(count(*) AS text) FROM {checks} WHERE verdict LIKE 'inconclusive%'";
        let rows = self.gateway.rows(sql, &[], 1).await?;
        let count = rows.first().and_then(|row| row.first()?.as_deref()).context("a count")?;
        count.parse().context("a count is a number")
    }

    async fn check_all_due(
        &self,
        replayed: &mut Replayed,
        blocks: &mut BTreeMap<PaymentId, Timestamp>,
    ) -> anyhow::Result<()> {
        loop {
            let leased = self.checker.lease_due(BATCH_MAX).await?;
            if leased.followed().is_empty() {
                return Ok(());
            }
            let mut past_repeats = BTreeSet::new();
            for followed in leased.followed() {
                match followed.watch.phase {
                    Phase::Targeted => replayed.reads += 1,
                    Phase::Reconcile => {
                        replayed.mandatory_reads += 1;
                        past_repeats.insert(followed.watch.payment_id.clone());
                    }
                    Phase::Late | Phase::Finality | Phase::Closed => {}
                }
            }
            for applied in self.checker.finish(leased, &self.stop).await? {
                let resolved = applied.result.map_err(|e| anyhow::anyhow!("{e:?}"))?;
                if !resolved.recorded {
                    continue;
                }
                // Else it is one that never settles, and was proven over.
                let Some(block) = blocks.remove(&applied.payment_id) else { continue };
                let delay = self.clock.now().since(block);
                if past_repeats.contains(&applied.payment_id) {
                    replayed.late_delays.push(delay);
                } else {
                    replayed.delays.push(delay);
                }
            }
        }
    }

    /// The transfer of payment `n` is in the block it has to be in. Returns that block's time.
    fn land(&self, n: usize, payment: &Broadcast) -> anyhow::Result<Timestamp> {
        let latency = payment.latency().context("it never lands")?;
        let at = STORY_START.saturating_add(payment.after + latency);
        let value = Amount::new(U256::from(AMOUNT));
        let transfer = Authorized { payer: payer(n), to: STORY_PAY_TO, value, nonce: nonce(n) };
        let included = self.server.chain().lock().transfer(at.max(first_block()), transfer)?;
        let block = Timestamp::from(included.time);
        anyhow::ensure!(block == at, "payment {n} is in the block of {block}, and not of {at}");
        Ok(block)
    }

    async fn write_rows(&self, n: usize, payment: &Broadcast) -> anyhow::Result<()> {
        let broadcast = STORY_START.saturating_add(payment.after);
        let broadcast_ms = broadcast.as_millis();
        let valid_before = broadcast.saturating_add(VALID_FOR).as_millis() / 1_000;
        let id = id(n);
        self.gateway.insert_order(&NewOrder::paying(&id, broadcast)).await?;
        let row = RawPayment {
            id: id.clone(),
            order_id: Some(id),
            rail: Some("x402".to_owned()),
            method: Some("eip3009".to_owned()),
            chain_id: Some(STORY_CHAIN.to_string()),
            token: Some(STORY_TOKEN.to_string()),
            payer: Some(payer(n).to_string()),
            pay_to: Some(STORY_PAY_TO.to_string()),
            amount: Some(AMOUNT.to_string()),
            nonce: Some(nonce(n).to_string()),
            valid_after: Some("0".to_owned()),
            valid_before: Some(valid_before.to_string()),
            tx_hash: None,
            status: Some("unknown".to_owned()),
            created_at: Some(broadcast_ms.to_string()),
            broadcast_at: Some(broadcast_ms.to_string()),
        };
        self.gateway.insert_payment(&row).await?;
        Ok(())
    }
}

/// The first block that does not exist when a replay starts.
fn first_block() -> Timestamp {
    STORY_START.saturating_add(Duration::from_millis(1))
}

fn id(n: usize) -> String {
    format!("payment-{n}")
}

/// As unlike each other as real ones: a block's bloom filter must not find one word for both.
fn payer(n: usize) -> Address {
    Address::from_word(keccak256(format!("payer {n}")))
}

fn nonce(n: usize) -> B256 {
    keccak256(format!("nonce {n}"))
}

#[cfg(test)]
mod tests;
