//! What the main job costs: a full reconcile of 100,000 open payments, and one payment from wake to
//! applied. On a real PostgreSQL and the simulated chain over real HTTP:
//!
//! ```text
//! ./test.sh run cargo bench
//! ```
//!
//! `RECONCILED_BENCH_PAYMENTS` and `RECONCILED_BENCH_SINGLES` change how many. Resident memory is this
//! whole process's, the simulated chain included.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use alloy_primitives::{Address, B256, U256};
use anyhow::Context;
use reconciled::chain::{Chain, ChainSettings, EndpointSettings};
use reconciled::clock::{Clock, ManualClock};
use reconciled::domain::{Amount, PaymentId, Policy, RawPayment, Timestamp};
use reconciled::schedule::{Pacing, Schedule, Timing};
use reconciled::sim::gateway::{GatewayDb, NewOrder};
use reconciled::sim::runner::{STORY_CHAIN, STORY_PAY_TO, STORY_START, STORY_TOKEN};
use reconciled::sim::stage::Stage;
use reconciled::sim::{Authorized, SimChain, SimServer, SimSettings};
use reconciled::store::{Store, connect};
use reconciled::telemetry::{Metrics, rpc_observer};
use reconciled::worker::{Checker, CheckerSettings, Discovery, Stop, Stopper, WatchedChain};
use tokio::sync::Notify;

/// As in the daemon's sample configuration.
const PAGE_SIZE: u32 = 2_000;
const BATCH_MAX: u32 = 500;
/// Of the open payments, one in this many has landed, so that logs are read and resolutions written.
const ONE_LANDED_IN: u64 = 1_000;
/// What the main job may cost.
const REQUESTS_MAX: u64 = 1_000;
const RESIDENT_MAX_MB: f64 = 200.0;
/// The payers and nonces of single payments start here, out of the others' way.
const SINGLES_FROM: u64 = 0x1000_0000;
const AMOUNT: u64 = 1_000_000;

fn main() -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(run())
}

async fn run() -> anyhow::Result<()> {
    let server = std::env::var("RECONCILED_TEST_POSTGRES")
        .context("RECONCILED_TEST_POSTGRES is not set; run ./test.sh run cargo bench")?;
    let payments = count("RECONCILED_BENCH_PAYMENTS", 100_000)?;
    let singles = count("RECONCILED_BENCH_SINGLES", 500)?;
    // Each on a database and a chain of its own.
    let stage = Stage::postgres(&server).await?;
    let bench = Bench::new(&stage).await?;
    bench.single_payments(singles).await?;
    bench.end(stage).await?;
    let stage = Stage::postgres(&server).await?;
    let bench = Bench::new(&stage).await?;
    bench.full_reconcile(payments).await?;
    bench.end(stage).await
}

fn count(variable: &str, default: u64) -> anyhow::Result<u64> {
    match std::env::var(variable) {
        Ok(text) => text.parse().with_context(|| format!("{variable} must be a number")),
        Err(_) => Ok(default),
    }
}

struct Bench {
    gateway: GatewayDb,
    store: Arc<dyn Store>,
    server: SimServer,
    clock: Arc<ManualClock>,
    checker: Checker,
    discovery: Discovery,
    stop: Stop,
    _stopper: Stopper,
}

impl Bench {
    async fn new(stage: &Stage) -> anyhow::Result<Self> {
        let store = connect(&stage.url(), 8).await?;
        store.migrate().await?;
        store.verify_schema().await?;
        let gateway = GatewayDb::connect(&stage.url()).await?;
        let hour = Duration::from_secs(3_600);
        let chain = SimChain::new(SimSettings::new(
            STORY_CHAIN,
            STORY_START.saturating_sub(hour),
            Duration::from_secs(2),
            Duration::from_secs(20 * 60),
            STORY_TOKEN,
        ));
        chain.lock().set_time(STORY_START);
        let server = SimServer::start(chain, 1).await?;
        let clock = Arc::new(ManualClock::new(STORY_START));
        let metrics = Metrics::new()?;
        let endpoint = |url: &url::Url| EndpointSettings::new("simulated", url.clone());
        let endpoints = server.urls().iter().map(endpoint).collect();
        let settings = ChainSettings {
            head_age_max: hour,
            batch_max: 400,
            ..ChainSettings::new(STORY_CHAIN, endpoints)
        };
        let policy = Policy::default();
        let watched = WatchedChain {
            chain: Chain::new(settings, rpc_observer(&metrics), clock.clone())?,
            schedule: Schedule::default(),
            timing: Timing {
                finality_margin: Duration::from_secs(30 * 60),
                deadline_margin: Duration::from_secs(20),
                finality_retry: Duration::from_secs(60),
                pacing: Pacing::default(),
            },
            policy: policy.clone(),
        };
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
            stale_after: Duration::from_secs(120),
            batch_max: 1_000,
            wakes: Arc::new(Notify::new()),
        };
        let (stopper, stop) = Stop::new(Duration::ZERO);
        Ok(Self { gateway, store, server, clock, checker, discovery, stop, _stopper: stopper })
    }

    async fn end(self, stage: Stage) -> anyhow::Result<()> {
        self.gateway.close().await;
        self.server.stop().await?;
        drop(self.store);
        stage.strike().await
    }

    /// From the poll that finds one payment to its committed resolution, over and over.
    async fn single_payments(&self, singles: u64) -> anyhow::Result<()> {
        let mut took = Vec::new();
        for n in SINGLES_FROM..SINGLES_FROM + singles {
            let now = self.tick();
            self.land(now, n)?;
            let id = format!("single-{n}");
            self.gateway.insert_order(&NewOrder::paying(&id, now)).await?;
            self.gateway.insert_payment(&row(&id, now, n)).await?;
            self.tick();

            let woken = Instant::now();
            self.discovery.discover(&self.stop).await?;
            let leased = self.checker.lease_due(BATCH_MAX).await?;
            let applied = self.checker.finish(leased, &self.stop).await?;
            took.push(woken.elapsed());
            let resolved = applied.iter().any(|a| {
                a.payment_id.as_str() == id && a.result.as_ref().is_ok_and(|r| r.recorded)
            });
            anyhow::ensure!(resolved, "payment {id} was not resolved: {applied:?}");
        }
        took.sort();
        let at = |share: f64| took[((took.len() - 1) as f64 * share) as usize].as_secs_f64() * 1e3;
        println!("one payment, from wake to applied, {singles} times");
        println!("  median                   {:>8.1} ms", at(0.5));
        println!("  p99                      {:>8.1} ms", at(0.99));
        Ok(())
    }

    /// Every open payment read once, in pages, as the daemon does it.
    async fn full_reconcile(&self, payments: u64) -> anyhow::Result<()> {
        let now = self.tick();
        self.write_rows(payments, now).await?;
        for n in (0..payments).step_by(ONE_LANDED_IN as usize) {
            self.land(self.clock.now(), n)?;
        }
        self.tick();
        let started = Instant::now();
        while self.discovery.discover(&self.stop).await?.opened > 0 {}
        println!("\nfull reconcile of {payments} open payments, 1 in {ONE_LANDED_IN} landed");
        println!("  discovered in            {:>8.2} s", started.elapsed().as_secs_f64());

        let requests_before = self.server.requests();
        let (mut database, mut chain) = (Duration::ZERO, Duration::ZERO);
        let (mut read, mut resolved) = (0_u64, 0_u64);
        let mut after: Option<PaymentId> = None;
        let started = Instant::now();
        loop {
            let at = Instant::now();
            let leased = self.checker.lease_page(after.as_ref(), PAGE_SIZE).await?;
            database += at.elapsed();
            let Some(last) = leased.followed().last() else { break };
            after = Some(last.watch.payment_id.clone());
            read += leased.followed().len() as u64;
            let at = Instant::now();
            let page = self.checker.read(leased).await;
            chain += at.elapsed();
            let at = Instant::now();
            let applied = self.checker.write(page).await?;
            database += at.elapsed();
            let recorded = |a: &&_| recorded(a);
            resolved += applied.iter().filter(recorded).count() as u64;
        }
        let whole = started.elapsed();
        let requests = self.server.requests() - requests_before;
        let resident = resident_peak_mb()?;
        let share = |part: Duration| 100.0 * part.as_secs_f64() / whole.as_secs_f64();
        println!("  read                     {read:>8}");
        println!("  resolved                 {resolved:>8}");
        println!("  took                     {:>8.2} s", whole.as_secs_f64());
        println!("    of it in the database  {:>8.1} %", share(database));
        println!("    of it in RPC           {:>8.1} %", share(chain));
        println!("  RPC requests             {requests:>8}    (at most {REQUESTS_MAX})");
        println!("  peak resident memory     {resident:>8.1} MB (at most {RESIDENT_MAX_MB} MB)");
        let open: u64 =
            self.store.figures(self.clock.now()).await?.open.iter().map(|(_, n)| n).sum();
        println!("  open afterwards          {open:>8}");
        anyhow::ensure!(read >= payments, "{read} of {payments} payments were read");
        let landed = payments.div_ceil(ONE_LANDED_IN);
        anyhow::ensure!(resolved == landed, "{resolved} resolved, and {landed} landed");
        anyhow::ensure!(requests <= REQUESTS_MAX, "too many RPC requests");
        anyhow::ensure!(resident <= RESIDENT_MAX_MB, "too much memory");
        Ok(())
    }

    /// The chain and the clock go on by one block.
    fn tick(&self) -> Timestamp {
        self.clock.advance(Duration::from_secs(2));
        let now = self.clock.now();
        self.server.chain().lock().set_time(now);
        now
    }

    /// The transfer of payment `n` is in the next block.
    fn land(&self, now: Timestamp, n: u64) -> anyhow::Result<()> {
        let value = Amount::new(U256::from(AMOUNT));
        let transfer = Authorized { payer: payer(n), to: STORY_PAY_TO, value, nonce: nonce(n) };
        self.server.chain().lock().transfer(now, transfer)?;
        Ok(())
    }

    async fn write_rows(&self, payments: u64, now: Timestamp) -> anyhow::Result<()> {
        let count = payments.to_string();
        let now_ms = now.as_millis().to_string();
        let order = "INSERT INTO orders (id, kind, status, created_at, updated_at) \
             SELECT 'o' || n, 'order', 'paying', ?t, ?t FROM generate_series(0, ?i - 1) n";
        self.gateway.execute(order, &[Some(&now_ms), Some(&now_ms), Some(&count)]).await?;
        let payment = "INSERT INTO payments (id, order_id, rail, method, chain_id, token, payer, \
             pay_to, amount, nonce, valid_after, valid_before, status, created_at, broadcast_at) \
             SELECT 'p' || n, 'o' || n, 'x402', 'eip3009', ?i, ?, \
             '0x' || lpad(to_hex(n), 40, '0'), ?, ?n, '0x' || lpad(to_hex(n), 64, '0'), \
             0, ?n, 'unknown', ?t, ?t FROM generate_series(0, ?i - 1) n";
        let binds = [
            STORY_CHAIN.to_string(),
            STORY_TOKEN.to_string(),
            STORY_PAY_TO.to_string(),
            AMOUNT.to_string(),
            (now.as_millis() / 1_000 + 3_600).to_string(),
            now_ms.clone(),
            now_ms,
            count,
        ];
        let binds: Vec<Option<&str>> = binds.iter().map(|bind| Some(bind.as_str())).collect();
        self.gateway.execute(payment, &binds).await?;
        self.gateway.execute("ANALYZE", &[]).await?;
        Ok(())
    }
}

fn recorded(applied: &reconciled::store::Applied) -> bool {
    applied.result.as_ref().is_ok_and(|resolved| resolved.recorded)
}

fn payer(n: u64) -> Address {
    Address::left_padding_from(&n.to_be_bytes())
}

fn nonce(n: u64) -> B256 {
    B256::left_padding_from(&n.to_be_bytes())
}

fn row(id: &str, now: Timestamp, n: u64) -> RawPayment {
    let now_ms = now.as_millis();
    RawPayment {
        id: id.to_owned(),
        order_id: Some(id.to_owned()),
        rail: Some("x402".to_owned()),
        method: Some("eip3009".to_owned()),
        chain_id: Some(STORY_CHAIN.to_string()),
        token: Some(STORY_TOKEN.to_string()),
        payer: Some(payer(n).to_string()),
        pay_to: Some(STORY_PAY_TO.to_string()),
        amount: Some(AMOUNT.to_string()),
        nonce: Some(nonce(n).to_string()),
        valid_after: Some("0".to_owned()),
        valid_before: Some((now_ms / 1_000 + 300).to_string()),
        tx_hash: None,
        status: Some("unknown".to_owned()),
        created_at: Some(now_ms.to_string()),
        broadcast_at: Some(now_ms.to_string()),
    }
}

/// The most memory this process ever held.
fn resident_peak_mb() -> anyhow::Result<f64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kilobytes = line.and_then(|l| l.split_whitespace().next()).context("VmHWM is missing")?;
    Ok(kilobytes.parse::<f64>()? / 1_024.0)
}
