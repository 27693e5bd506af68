//! Runs one story: plays the gateway and the chain, drives the real worker on a real store with a clock
//! that jumps from one thing to the next, and compares what the database says with what it must say.
//!
//! The worker, the store and the chain reader are the daemon's own. What is left out is waiting: where
//! the daemon would poll and find nothing, the runner goes on to the next moment at which something can
//! be found.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use alloy_primitives::{Address, U256, address};
use tokio::sync::Notify;

use super::chain::{Authorized, SimSettings};
use super::expectation::{Difference, Observed, Refund, check};
use super::gateway::{GatewayDb, NewOrder, OrderUpdate};
use super::scenario::{Act, ChainAct, GatewaySet, KillPoint, Scenario, StoryPayment};
use super::{Fault, SimChain, SimServer};
use crate::chain::{Chain, ChainSettings, EndpointSettings, MULTICALL3};
use crate::clock::{Clock, ManualClock};
use crate::domain::{
    Amount, ChainId, EndpointName, OrderStatus, Outcome, PaidAfter, PaymentId, Policy, RawPayment,
    RefundReason, RefundStatus, Timestamp,
};
use crate::schedule::{Schedule, Timing};
use crate::store::{Applied, DatabaseUrl, Store, connect};
use crate::telemetry::{Metrics, rpc_observer};
use crate::worker::{Checker, CheckerSettings, Discovery, Leased, Stop, Stopper, WatchedChain};

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

/// As in the daemon's configuration.
const LEASE_TTL: Duration = Duration::from_secs(60);
const DISCOVERY_EVERY: Duration = Duration::from_secs(1);
const HEAD_AGE_MAX: Duration = Duration::from_secs(60);
const LOG_LOOKBACK: Duration = Duration::from_secs(3_600);
const BATCH_MAX: u32 = 500;
const PAGE_SIZE: u32 = 2_000;
const FINALITY_RETRY: Duration = Duration::from_secs(60);
/// Beyond the story's own `finalized_lag`.
const FINALITY_SLACK: Duration = Duration::from_secs(60);
/// The simulated chain answers at once or not at all.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// Steps a story may take: far more than any needs, so that a loop in the runner ends.
const STEPS_MAX: usize = 200_000;

/// Something the runner's audience may want to hear of.
#[derive(Debug, Clone, PartialEq)]
pub enum Told {
    /// The gateway wrote a payment's row.
    PaymentWritten(StoryPayment),
    /// The gateway changed a row.
    GatewaySet(GatewaySet),
    /// Something happened on the chain.
    Chain(ChainAct),
    /// An endpoint misbehaves, or is well again.
    Rpc {
        /// Which.
        endpoint: usize,
        /// How.
        fault: Fault,
        /// Whether it starts.
        starts: bool,
    },
    /// The daemon was killed and started again.
    Killed,
    /// A payment was resolved.
    Resolved {
        /// Which.
        payment: PaymentId,
        /// How.
        outcome: Outcome,
        /// From its transfer's block, if it has one.
        delay: Option<Duration>,
    },
}

/// Hears what happens, when it happens in the story, and may take its time.
#[async_trait::async_trait]
pub trait Audience: Send {
    /// Something happened at this time of the story.
    async fn hear(&mut self, at: Duration, told: Told);
    /// The story goes on from one moment to the next.
    async fn step(&mut self, from: Duration, to: Duration);
}

/// Nobody listens.
pub struct Nobody;

#[async_trait::async_trait]
impl Audience for Nobody {
    async fn hear(&mut self, _at: Duration, _told: Told) {}
    async fn step(&mut self, _from: Duration, _to: Duration) {}
}

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

/// What a killed daemon loses and a started one has anew.
struct Daemon {
    checker: Arc<Checker>,
    discovery: Discovery,
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
            let next = [act_at, expect_at, due_at, discovery_at, Some(next_reconcile)]
                .into_iter()
                .flatten()
                .min()
                .unwrap_or(now)
                .max(now);
            audience.step(now, next).await;
            now = next;
            // What a block holds must be known before the block exists.
            for (_, step) in acts.iter().take_while(|(at, _)| *at <= now) {
                self.mine(now, step)?;
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

    // ---- time

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

    // ---- the daemon

    async fn check_due(
        &mut self,
        now: Duration,
        audience: &mut dyn Audience,
    ) -> anyhow::Result<()> {
        loop {
            let leased = self.daemon.checker.lease_due(BATCH_MAX).await?;
            let count = leased.followed().len();
            if count == 0 {
                return Ok(());
            }
            if let Some(point) = self.kill_at_next.take() {
                self.die(point, leased).await?;
                audience.hear(now, Told::Killed).await;
                return Ok(());
            }
            let applied = self.daemon.checker.finish(leased, &self.stop).await?;
            self.tell(now, applied, audience).await;
        }
    }

    async fn reconcile(
        &mut self,
        now: Duration,
        audience: &mut dyn Audience,
    ) -> anyhow::Result<()> {
        let mut after: Option<PaymentId> = None;
        loop {
            let leased = self.daemon.checker.lease_page(after.as_ref(), PAGE_SIZE).await?;
            let Some(last) = leased.followed().last() else { return Ok(()) };
            after = Some(last.watch.payment_id.clone());
            let applied = self.daemon.checker.finish(leased, &self.stop).await?;
            self.tell(now, applied, audience).await;
        }
    }

    /// Whatever the process held in memory is gone; what it leased stays leased.
    async fn die(&mut self, point: KillPoint, leased: Leased) -> anyhow::Result<()> {
        match point {
            KillPoint::LeaseAndRead => drop(leased),
            KillPoint::ReadAndApply => drop(self.daemon.checker.read(leased).await),
        }
        self.daemon = start_daemon(&self.scenario, &self.server, &self.store, &self.clock)?;
        Ok(())
    }

    async fn tell(&mut self, now: Duration, applied: Vec<Applied>, audience: &mut dyn Audience) {
        for one in applied {
            let Ok(resolved) = one.result else { continue };
            if !resolved.recorded && resolved.outcome != Outcome::Flagged {
                continue;
            }
            let paid = matches!(
                resolved.outcome,
                Outcome::Paid
                    | Outcome::Reinstated
                    | Outcome::RefundOwed
                    | Outcome::AuthorizationReused
            );
            let delay = self.landed.get(&one.payment_id).filter(|_| paid);
            let delay = delay.map(|landed| self.at(now).since(*landed));
            if let Some(delay) = delay {
                self.delays.entry(one.payment_id.to_string()).or_insert(delay);
            }
            let told = Told::Resolved { payment: one.payment_id, outcome: resolved.outcome, delay };
            audience.hear(now, told).await;
        }
    }

    // ---- the story

    /// Every act in order of time, the ends of faults among them.
    fn acts(&self) -> Vec<(Duration, Step)> {
        let mut acts: Vec<(Duration, Step)> = Vec::new();
        for event in &self.scenario.events {
            acts.push((event.at, Step::Act(event.act.clone())));
            if let Act::Rpc { endpoint, fault, until: Some(until) } = &event.act {
                acts.push((*until, Step::FaultEnds(*endpoint, *fault)));
            }
        }
        acts.sort_by_key(|(at, _)| *at);
        acts
    }

    async fn act(
        &mut self,
        now: Duration,
        step: Step,
        audience: &mut dyn Audience,
    ) -> anyhow::Result<()> {
        let told = match step {
            Step::FaultEnds(endpoint, fault) => {
                self.server.clear_fault(endpoint, fault.kind());
                Told::Rpc { endpoint, fault, starts: false }
            }
            Step::Act(Act::Rpc { endpoint, fault, .. }) => {
                self.server.set_fault(endpoint, fault);
                Told::Rpc { endpoint, fault, starts: true }
            }
            Step::Act(Act::Chain(act)) => {
                if let ChainAct::Reorg { depth } = &act {
                    self.server.chain().lock().reorg(*depth)?;
                }
                Told::Chain(act)
            }
            Step::Act(Act::GatewayPayment { payment, .. }) => {
                let payment = self.payment(&payment)?;
                self.write_payment(&payment).await?;
                self.discoveries.insert(now + DISCOVERY_EVERY);
                Told::PaymentWritten(payment)
            }
            Step::Act(Act::GatewaySet(set)) => {
                self.gateway_set(now, &set).await?;
                self.discoveries.insert(now + DISCOVERY_EVERY);
                Told::GatewaySet(set)
            }
            Step::Act(Act::Kill { between }) => {
                self.kill_at_next = Some(between);
                return Ok(());
            }
            Step::Act(Act::ClockJump { by }) => {
                self.clock_ahead += by;
                self.set_time(now);
                return Ok(());
            }
            Step::Act(Act::Refund { .. }) => anyhow::bail!("refunds are not followed yet"),
        };
        audience.hear(now, told).await;
        Ok(())
    }

    fn payment(&self, name: &str) -> anyhow::Result<StoryPayment> {
        self.scenario
            .payment(name)
            .ok_or_else(|| anyhow::anyhow!("the story has no payment {name}"))
    }

    /// Puts a transaction into the block at `now`, which must not exist yet.
    fn mine(&mut self, now: Duration, step: &Step) -> anyhow::Result<()> {
        let Step::Act(Act::Chain(act)) = step else { return Ok(()) };
        let at = self.at(now);
        let chain = self.server.chain().clone();
        match act {
            ChainAct::Transfer { payment, to, amount } => {
                let story = self.payment(payment)?;
                let mut authorized = authorized(&story);
                authorized.to = to.unwrap_or(authorized.to);
                authorized.value = amount.unwrap_or(authorized.value);
                let included = chain.lock().transfer(at, authorized)?;
                self.landed.insert(PaymentId::from(payment.as_str()), included.time.into());
            }
            ChainAct::Batch { payments } => {
                let stories: Vec<StoryPayment> =
                    payments.iter().map(|name| self.payment(name)).collect::<Result<_, _>>()?;
                let all: Vec<Authorized> = stories.iter().map(authorized).collect();
                let included = chain.lock().batch(at, &all)?;
                for name in payments {
                    self.landed.insert(PaymentId::from(name.as_str()), included.time.into());
                }
            }
            ChainAct::Cancel { payment } => {
                let story = self.payment(payment)?;
                chain.lock().cancel(at, story.payer, story.nonce)?;
            }
            ChainAct::Revert { .. } => {
                chain.lock().revert(at)?;
            }
            ChainAct::BareTransfer { amount, payer } => {
                chain.lock().bare_transfer(at, *payer, STORY_PAY_TO, *amount)?;
            }
            ChainAct::Reorg { .. } => {}
            ChainAct::Park { .. } => anyhow::bail!("receive policies are Tempo's"),
        }
        Ok(())
    }

    // ---- the gateway

    async fn write_first_rows(&mut self) -> anyhow::Result<()> {
        for (sku, available) in &self.scenario.stock {
            self.gateway.put_stock(sku, *available).await?;
        }
        for (name, order) in &self.scenario.orders {
            let row = NewOrder {
                id: name.clone(),
                kind: order.kind.code().to_owned(),
                status: order.status.code().to_owned(),
                paid_by: order.paid_by.clone(),
                quote_expires_at: Some(self.at(order.quote_expires_at)),
                delivered_at: order.delivered.then(|| self.at(Duration::ZERO)),
                created_at: self.at(Duration::ZERO),
                held: order.stock.iter().map(|(sku, n)| (sku.clone(), *n)).collect(),
            };
            self.gateway.insert_order(&row).await?;
        }
        for payment in self.scenario.payments_at_start() {
            self.write_payment(&payment).await?;
        }
        for (name, identifier) in &self.scenario.identifiers {
            self.gateway
                .insert_identifier(name, &identifier.payment, identifier.status.code(), None)
                .await?;
        }
        Ok(())
    }

    async fn write_payment(&mut self, payment: &StoryPayment) -> anyhow::Result<()> {
        let millis = |at: Duration| Some(self.at(at).as_millis().to_string());
        let valid_before = self.at(payment.valid_before).as_millis() / 1_000;
        let row = RawPayment {
            id: payment.name.clone(),
            order_id: Some(payment.order.clone()),
            rail: Some(self.scenario.chain.rail.code().to_owned()),
            method: Some(payment.method.code().to_owned()),
            chain_id: Some(STORY_CHAIN.to_string()),
            token: Some(STORY_TOKEN.to_string()),
            payer: Some(payment.payer.to_string()),
            pay_to: Some(STORY_PAY_TO.to_string()),
            amount: Some(payment.amount.to_string()),
            nonce: Some(payment.nonce.to_string()),
            valid_after: Some("0".to_owned()),
            valid_before: Some(valid_before.to_string()),
            tx_hash: None,
            status: Some(payment.status.code().to_owned()),
            created_at: millis(payment.created_at),
            broadcast_at: millis(payment.broadcast_at),
        };
        self.gateway.insert_payment(&row).await?;
        // A `settling` row is found once it is stale.
        let stale_at = payment.broadcast_at + self.scenario.policy.stale_after + DISCOVERY_EVERY;
        self.discoveries.insert(stale_at);
        Ok(())
    }

    async fn gateway_set(&self, now: Duration, set: &GatewaySet) -> anyhow::Result<()> {
        match set {
            GatewaySet::Payment { payment, status } => {
                self.gateway.set_payment_status(payment, status.code()).await?;
            }
            GatewaySet::Order { order, status, paid_by, delivered, release_stock } => {
                let update = OrderUpdate {
                    status: status.map(|s: OrderStatus| s.code().to_owned()),
                    paid_by: paid_by.clone(),
                    delivered_at: delivered.unwrap_or(false).then(|| self.at(now)),
                    release_stock: *release_stock,
                };
                self.gateway.update_order(order, &update).await?;
            }
            GatewaySet::Identifier { identifier, status } => {
                self.gateway.set_identifier_status(identifier, status.code()).await?;
            }
            GatewaySet::Stock { sku, available } => self.gateway.put_stock(sku, *available).await?,
        }
        Ok(())
    }

    // ---- what the database says

    async fn observe(&self) -> anyhow::Result<Observed> {
        let orders = self.gateway.orders().await?;
        let payments = self.gateway.payments().await?;
        let refunds = self.refunds().await?;
        let stock = self.gateway.stock().await?;
        let flags = self.gateway.open_flags().await?;
        Ok(Observed {
            drift: Some(self.drift(&orders, &payments, &refunds)?),
            paid_by: orders
                .iter()
                .filter_map(|(order, (_, paid_by))| Some((order.clone(), paid_by.clone()?)))
                .collect(),
            orders: orders.into_iter().map(|(order, (status, _))| (order, status)).collect(),
            payments,
            stock: stock
                .into_iter()
                .map(|(sku, available)| Ok((sku, available.parse()?)))
                .collect::<anyhow::Result<_>>()?,
            reservations: self.gateway.reservations_by_order().await?,
            identifiers: self.gateway.identifiers().await?,
            refunds,
            flags: flags.iter().map(|flag| flag.trim_end_matches(':').to_owned()).collect(),
            events: self.gateway.events().await?,
            reads: self.server.requests(),
        })
    }

    async fn refunds(&self) -> anyhow::Result<Vec<Refund>> {
        let seen = self.gateway.refunds().await?;
        seen.into_iter()
            .map(|refund| {
                let odd = |what: &str| anyhow::anyhow!("refunds_owed holds the {what} {refund:?}");
                Ok(Refund {
                    reason: RefundReason::from_code(&refund.reason).ok_or_else(|| odd("reason"))?,
                    status: RefundStatus::from_code(&refund.status).ok_or_else(|| odd("status"))?,
                    amount: refund.amount.parse().map_err(|_| odd("amount"))?,
                    payment: refund.payment_id.clone(),
                })
            })
            .collect()
    }

    /// What reached `pay_to` on the simulated chain less what the database accounts for: paid, owed back
    /// or flagged (I4). The chain's side is the chain's own record, not what the daemon saw of it.
    fn drift(
        &self,
        orders: &BTreeMap<String, (String, Option<String>)>,
        payments: &BTreeMap<String, String>,
        refunds: &[Refund],
    ) -> anyhow::Result<String> {
        let on_chain = self.server.chain().lock().received(STORY_PAY_TO);
        let mut accounted = Amount::ZERO;
        for (status, paid_by) in orders.values() {
            let pays = matches!(status.as_str(), "paid" | "undelivered");
            let Some(payer) = paid_by.as_ref().filter(|_| pays) else { continue };
            if payments.get(payer).is_some_and(|status| status == "settled") {
                accounted = accounted.saturating_add(self.payment(payer)?.amount);
            }
        }
        for refund in refunds.iter().filter(|refund| refund.status != RefundStatus::Void) {
            accounted = accounted.saturating_add(refund.amount);
        }
        let (chain, books): (U256, U256) = (on_chain.get(), accounted.get());
        Ok(if chain >= books { (chain - books).to_string() } else { format!("-{}", books - chain) })
    }
}

/// One thing to do in a story.
enum Step {
    Act(Act),
    FaultEnds(usize, Fault),
}

fn authorized(payment: &StoryPayment) -> Authorized {
    Authorized {
        payer: payment.payer,
        to: STORY_PAY_TO,
        value: payment.amount,
        nonce: payment.nonce,
    }
}

fn start_daemon(
    scenario: &Scenario,
    server: &SimServer,
    store: &Arc<dyn Store>,
    clock: &Arc<ManualClock>,
) -> anyhow::Result<Daemon> {
    let metrics = Metrics::new()?;
    let policy = Policy {
        deadline_after: scenario.policy.deadline,
        early_failure: scenario.policy.early_failure,
        late: scenario.policy.late,
        paid_after: scenario.policy.paid_after,
        quorum: scenario.policy.quorum,
        positive_quorum: 1,
    };
    let endpoints = server.urls().iter().enumerate().map(|(i, url)| EndpointSettings {
        name: EndpointName::new(&format!("endpoint-{i}")),
        url: url.clone(),
    });
    let settings = ChainSettings {
        chain_id: STORY_CHAIN,
        endpoints: endpoints.collect(),
        block_time: scenario.chain.block_time,
        head_age_max: HEAD_AGE_MAX,
        log_lookback: LOG_LOOKBACK,
        log_range_max: 10_000,
        batch_max: 400,
        read_safe: policy.paid_after == PaidAfter::Safe,
        foreign_block_number: false,
        multicall3: MULTICALL3,
        request_timeout: REQUEST_TIMEOUT,
    };
    let watched = WatchedChain {
        chain: Chain::new(settings, rpc_observer(&metrics))?,
        schedule: Schedule::default(),
        timing: Timing {
            finality_margin: scenario.chain.finalized_lag + FINALITY_SLACK,
            deadline_margin: scenario.chain.block_time * 10,
            finality_retry: FINALITY_RETRY,
        },
        policy: policy.clone(),
    };
    let clock: Arc<dyn Clock> = Arc::<ManualClock>::clone(clock);
    let checker = Checker::new(
        Arc::clone(store),
        BTreeMap::from([(STORY_CHAIN, Arc::new(watched))]),
        policy,
        Arc::clone(&clock),
        metrics,
        CheckerSettings { lease_ttl: LEASE_TTL },
    );
    let discovery = Discovery {
        store: Arc::clone(store),
        clock,
        stale_after: scenario.policy.stale_after,
        batch_max: 1_000,
        wakes: Arc::new(Notify::new()),
    };
    Ok(Daemon { checker: Arc::new(checker), discovery })
}
