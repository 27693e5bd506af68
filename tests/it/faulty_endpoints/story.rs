//! One story: the chain and the gateway play a script tick by tick, the endpoints misbehave, reorgs take
//! blocks away, and the worker looks. After every look, what it wrote is held against what is so.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::time::{Duration, Instant};

use alloy_primitives::Address;
use reconciled::domain::{RawPayment, Timestamp};
use reconciled::sim::gateway::{NewOrder, OrderUpdate};
use reconciled::worker::ReceiverReport;

use super::fates::{AMOUNT, DEADLINE_TICKS, PAY_TO, Play, Script, Step, Stray, TICK_SECS};
use super::ground::{FINALIZED_BEHIND, Ground, TICK_BLOCKS};
use super::truth::Past;
use crate::support::anvil::{Authorization, RICH_PAYERS, payer_key};
use crate::support::dice::Dice;
use crate::support::fault_proxy::faults::Fault;
use crate::support::fault_proxy::lies::Lie;
use crate::support::fault_proxy::{FaultProxy, Manners};
use crate::support::worker::{Home, Worker};

/// At the end everybody behaves for so many ticks, so that what is left can be concluded.
const CALM_TICKS: u64 = 4;

/// And then for at most so long.
const PATIENCE: Duration = Duration::from_secs(20);

/// How often it is looked whether all is concluded.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Watches that are not.
const OPEN: &str = "{watches} WHERE phase <> 'closed'";

/// Who serves the chain, and how many must agree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Endpoints {
    /// All honest, all faulty; one is enough.
    Honest { count: usize },
    /// Three, two of which must agree about everything; now and then one of them lies.
    OneLies,
}

impl Endpoints {
    fn count(self) -> usize {
        match self {
            Self::Honest { count } => count,
            Self::OneLies => 3,
        }
    }

    fn quorum(self) -> usize {
        match self {
            Self::Honest { .. } => 1,
            Self::OneLies => 2,
        }
    }
}

/// Who pays refunds.
fn refund_wallet() -> Address {
    payer_key(RICH_PAYERS - 1).address()
}

/// A story under way.
pub(super) struct Story<G> {
    pub(super) seed: u64,
    pub(super) chain: G,
    pub(super) worker: Worker,
    pub(super) script: Script,
    endpoints: Endpoints,
    proxies: Vec<FaultProxy>,
    dice: Dice,
    /// What was done on the chain, with the block, until it is final.
    done: Vec<(u64, Step)>,
    /// The second at which each payment was written and broadcast.
    written_at: BTreeMap<String, u64>,
    /// What the chain holds.
    past: Past,
    /// The last resolution looked at.
    looked_at: u64,
    /// For how many more ticks each endpoint stays frozen.
    frozen: Vec<u64>,
    reorgs: u64,
    /// Transactions that reorgs took away.
    pub(super) lost: usize,
    outcomes: BTreeMap<String, u64>,
    /// What playing, looking and checking took.
    took: [Duration; 3],
    /// Payments that were failed at some time.
    pub(super) failed_once: BTreeSet<String>,
}

/// One row of `resolutions`.
#[derive(Debug)]
struct Resolution {
    id: u64,
    payment: String,
    outcome: String,
    verdict: String,
    /// Only for people.
    #[allow(dead_code, reason = "shown where something is wrong")]
    evidence: String,
}

impl<G: Ground> Story<G> {
    pub(super) async fn start(
        home: Home,
        endpoints: Endpoints,
        payments: usize,
        seed: u64,
    ) -> Self {
        let mut dice = Dice::new(seed);
        let chain = G::start().await;
        let start = chain.node().block("latest").await.time.as_secs();
        let script = Script::write(payments, start, &mut dice);
        let mut proxies = Vec::new();
        for place in 0..endpoints.count() as u64 {
            let seed = dice.roll(0..u64::MAX) ^ place;
            let (url, id) = (chain.node().url(), chain.chain_id());
            proxies.push(FaultProxy::start(url, id, FINALIZED_BEHIND, seed).await);
        }
        let quorum = endpoints.quorum();
        let mut configuration = format!(
            "[policy]\nquorum = {quorum}\npositive_quorum = {quorum}\n\
             [checks]\nlease_ttl = \"60s\"\nrepeats = [\"0s\", \"20m\", \"1h\", \"2h\", \"5h\"]\n\
             [discovery]\nstale_after = \"30m\"\n\
             [[chains]]\nchain_id = {id}\nblock_time = \"150s\"\n\
             finality_margin = \"50m\"\nhead_age_max = \"30m\"\nhead_lag_max = \"15m\"\n\
             log_range_max = 300\n\
             batch_max = 100\nrequest_timeout = \"1s\"\nrefund_wallets = [\"{wallet}\"]\n\
             [[chains.receivers]]\ntoken = \"{token}\"\npay_to = \"{PAY_TO}\"\nfirst_block = 1\n",
            id = chain.chain_id(),
            token = chain.token(),
            wallet = refund_wallet(),
        );
        for (name, proxy) in ('a'..).zip(&proxies) {
            let url = proxy.url();
            let endpoint = format!("[[chains.endpoints]]\nname = \"{name}\"\nurl = \"{url}\"\n");
            configuration.push_str(&endpoint);
        }
        let now = Timestamp::from_millis(start as i64 * 1_000);
        let worker = Worker::start(home, &configuration, now).await;
        Self {
            seed,
            chain,
            worker,
            script,
            endpoints,
            frozen: vec![0; proxies.len()],
            proxies,
            dice,
            done: Vec::new(),
            written_at: BTreeMap::new(),
            past: Past::default(),
            looked_at: 0,
            reorgs: 0,
            lost: 0,
            outcomes: BTreeMap::new(),
            took: [Duration::ZERO; 3],
            failed_once: BTreeSet::new(),
        }
    }

    /// Plays it to its end.
    pub(super) async fn play(&mut self) {
        let start = self.worker.now().as_millis() as u64 / 1_000;
        let ends_at = self.script.ends_at(start);
        for tick in 1..=ends_at + CALM_TICKS {
            // Mostly blocks come before the acts of a tick, so that a reorg may take either.
            let watch = Instant::now();
            self.move_to(start + tick * TICK_SECS).await;
            if tick <= ends_at && self.dice.roll(0..6) == 0 {
                self.reorg(tick).await;
            }
            self.write_rows(tick).await;
            let steps = self.script.steps.remove(&tick).unwrap_or_default();
            self.act(&steps).await;
            self.misbehave(tick > ends_at).await;
            self.took[0] += watch.elapsed();
            let watch = Instant::now();
            self.worker.look().await;
            if tick % 3 == 0 || tick > ends_at {
                self.worker.reconcile().await;
            }
            self.took[1] += watch.elapsed();
            let watch = Instant::now();
            self.hold_against_the_truth().await;
            self.took[2] += watch.elapsed();
        }
        // An endpoint that was too much for is left alone for a while of real time.
        let started = Instant::now();
        while started.elapsed() < PATIENCE && self.worker.gateway.count(OPEN).await.unwrap() > 0 {
            tokio::time::sleep(LOOK_EVERY).await;
            self.worker.reconcile().await;
        }
        self.hold_against_the_truth().await;
    }

    /// A batch pays every other refund, and writes nothing down. Returns whose, once that is final.
    pub(super) async fn pay_refunds(&mut self) -> BTreeSet<String> {
        let sql = "SELECT payment_id, payer, CAST(amount AS TEXT), refund_nonce \
                   FROM {refunds_owed} WHERE status = 'owed' ORDER BY id";
        let owed = self.worker.gateway.rows(sql, &[], 4).await.unwrap();
        let claim = "UPDATE {refunds_owed} SET status = 'claimed', claimed_by = 'batch' \
                     WHERE payment_id = ?";
        let mut refunded = BTreeSet::new();
        for record in owed.into_iter().step_by(2) {
            let [payment, payer, amount, nonce] =
                <[_; 4]>::try_from(record).unwrap().map(Option::unwrap);
            let refund = Authorization {
                payer: refund_wallet(),
                to: payer.parse().unwrap(),
                value: amount.parse().unwrap(),
                valid_after: 0,
                valid_before: u64::MAX,
                nonce: nonce.parse().unwrap(),
            };
            // Nobody pays himself.
            if refund.payer != refund.to {
                self.worker.gateway.execute(claim, &[Some(&payment)]).await.unwrap();
                self.chain.use_together(&[refund]).await.unwrap();
                refunded.insert(payment);
            }
        }
        self.chain.end_acts().await;
        for _ in 0..FINALIZED_BEHIND / TICK_BLOCKS + 1 {
            self.move_to(self.worker.now().as_millis() as u64 / 1_000 + TICK_SECS).await;
        }
        refunded
    }

    /// Searches for refunds and full reconciles through endpoints that go wrong again, until so many refunds
    /// were found and all that is final is read: what the last one says of the merchant.
    pub(super) async fn reconcile_to_the_end(&mut self, refunded: usize) -> ReceiverReport {
        let finalized = self.chain.node().block("finalized").await.number;
        let started = Instant::now();
        loop {
            // What was passed over because an endpoint kept logs back is searched again after a while.
            self.move_to(self.worker.now().as_millis() as u64 / 1_000 + TICK_SECS).await;
            self.misbehave(false).await;
            self.worker.search_refunds().await;
            let report = self.worker.reconcile().await;
            let [receiver] = report.receivers.as_slice() else { panic!("{report:?}") };
            let is_whole = report.problems.is_empty() && receiver.up_to.number >= finalized;
            let paid = "{refunds_owed} WHERE status = 'paid'";
            let paid = self.worker.gateway.count(paid).await.unwrap();
            if is_whole && paid >= refunded as u64 {
                return receiver.clone();
            }
            assert!(started.elapsed() < PATIENCE, "seed {}: {report:?}", self.seed);
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    // ---- The chain

    /// Mines to a time of the chain, and shows it on the clock.
    async fn move_to(&self, secs: u64) {
        self.chain.move_to(secs).await;
        self.show_time().await;
        let now = self.worker.now().as_millis() as u64 / 1_000;
        assert!(now.abs_diff(secs) < TICK_SECS / 4, "{now} is about {secs}");
    }

    async fn show_time(&self) {
        let head = self.chain.node().block("latest").await.time;
        self.worker.clock.set(Timestamp::from(head));
    }

    async fn act(&mut self, steps: &[Step]) {
        let mut uses: Vec<usize> = Vec::new();
        for step in steps {
            match *step {
                Step::Use(play) => uses.push(play),
                Step::Cancel(play) => {
                    let block = self.chain.cancel(&self.script.plays[play].signed).await;
                    self.done.push((block, *step));
                }
                Step::Fail(play) => self.chain.fail(&self.script.plays[play].signed).await,
                Step::Stray(stray) => {
                    let block = match self.script.strays[stray] {
                        Stray::Authorized(signed) => self.chain.use_together(&[signed]).await,
                        Stray::Bare(from, value) => {
                            Some(self.chain.give(from, PAY_TO, value).await)
                        }
                    };
                    self.done.extend(block.map(|block| (block, *step)));
                }
                Step::GiveUp(play) => {
                    let update = OrderUpdate {
                        status: Some("canceled".to_owned()),
                        release_stock: true,
                        ..OrderUpdate::default()
                    };
                    let order = &self.script.plays[play].order;
                    self.worker.gateway.update_order(order, &update).await.unwrap();
                }
            }
        }
        // Several in one transaction, as they come.
        while !uses.is_empty() {
            let count = (1 + self.dice.roll(0..5) as usize).min(uses.len());
            let together: Vec<usize> = uses.drain(..count).collect();
            self.use_together(&together).await;
        }
        self.chain.end_acts().await;
        self.show_time().await;
    }

    async fn use_together(&mut self, plays: &[usize]) {
        let signed: Vec<_> = plays.iter().map(|play| self.script.plays[*play].signed).collect();
        if let Some(block) = self.chain.use_together(&signed).await {
            self.done.extend(plays.iter().map(|play| (block, Step::Use(*play))));
        } else if plays.len() > 1 {
            // One of them may be over; the others need not suffer for it.
            for play in plays {
                Box::pin(self.use_together(&[*play])).await;
            }
        }
    }

    /// Takes blocks away that are not final. Most of what they held comes again, now or later.
    async fn reorg(&mut self, tick: u64) {
        let head = self.chain.node().block("latest").await.number;
        let finalized = head - FINALIZED_BEHIND;
        self.done.retain(|(block, _)| *block > finalized);
        let depth = TICK_BLOCKS + self.dice.roll(0..FINALIZED_BEHIND - TICK_BLOCKS);
        self.chain.reorg(depth).await;
        self.reorgs += 1;
        let lost = |(block, _): &(u64, Step)| *block > head - depth;
        let gone: Vec<Step> = self.done.iter().filter(|d| lost(d)).map(|(_, step)| *step).collect();
        self.done.retain(|done| !lost(done));
        self.lost += gone.len();
        let mut again = Vec::new();
        for step in gone {
            match self.dice.roll(0..10) {
                0 | 1 => {}
                2..6 => {
                    let later = tick + 1 + self.dice.roll(0..3);
                    self.script.steps.entry(later).or_default().push(step);
                }
                _ => again.push(step),
            }
        }
        self.act(&again).await;
    }

    // ---- The gateway

    async fn write_rows(&mut self, tick: u64) {
        let now = self.worker.now();
        let mut orders = BTreeSet::new();
        for play in self.script.plays.iter().filter(|play| play.written == tick) {
            if orders.insert(&play.order) {
                let order = NewOrder::paying(&play.order, now);
                self.worker.gateway.insert_order(&order).await.unwrap();
            }
            self.worker.gateway.insert_payment(&self.row(play, now)).await.unwrap();
            self.written_at.insert(play.id.clone(), now.as_millis() as u64 / 1_000);
        }
    }

    fn row(&self, play: &Play, now: Timestamp) -> RawPayment {
        let text = |value: &dyn ToString| Some(value.to_string());
        let a = &play.claimed;
        RawPayment {
            id: play.id.clone(),
            order_id: text(&play.order),
            rail: text(&"x402"),
            method: text(&"eip3009"),
            chain_id: text(&self.chain.chain_id()),
            token: text(&self.chain.token()),
            payer: text(&a.payer),
            pay_to: text(&PAY_TO),
            amount: text(&AMOUNT),
            nonce: text(&a.nonce),
            valid_after: text(&a.valid_after),
            valid_before: text(&a.valid_before),
            tx_hash: None,
            status: text(&play.status),
            created_at: text(&now.as_millis()),
            broadcast_at: text(&now.as_millis()),
        }
    }

    // ---- The endpoints

    /// Says how every endpoint behaves until the next tick.
    async fn misbehave(&mut self, calm: bool) {
        let head = self.chain.node().block("latest").await.number;
        let lies = self.endpoints == Endpoints::OneLies && self.dice.roll(0..2) == 0;
        let liar = lies.then(|| self.dice.roll(0..self.proxies.len() as u64) as usize);
        for place in 0..self.proxies.len() {
            let manners = if calm {
                Manners::default()
            } else if liar == Some(place) {
                self.frozen[place] = 0;
                Manners { lie: Some(self.lie()), ..Manners::default() }
            } else {
                self.manners(place, head)
            };
            self.proxies[place].behave(manners);
        }
    }

    fn lie(&mut self) -> Lie {
        let secs = 3 * DEADLINE_TICKS * TICK_SECS;
        *self.dice.pick(&[
            Lie::Unused,
            Lie::Unused,
            Lie::Used,
            Lie::Paid(PAY_TO, AMOUNT),
            Lie::AllFinal,
            Lie::Later(secs),
        ])
    }

    fn manners(&mut self, place: usize, head: u64) -> Manners {
        if self.frozen[place] > 0 {
            // It stays at the block at which it froze.
            self.frozen[place] -= 1;
            return self.proxies[place].manners();
        }
        let all = |faults: &[Fault]| Manners {
            faulty_per_mille: 1_000,
            faults: faults.to_vec(),
            ..Manners::default()
        };
        match self.dice.roll(0..20) {
            0 => all(&[Fault::SlowDown, Fault::SlowDownFor, Fault::SlowDownNext]),
            1 => all(&[Fault::Unavailable, Fault::BadGateway, Fault::Reset]),
            2 => all(&[Fault::NoLogs, Fault::SomeLogs]),
            3 => {
                self.frozen[place] = 1 + self.dice.roll(0..4);
                let behind = self.dice.roll(0..12);
                Manners { frozen_at: Some(head - behind), ..Manners::default() }
            }
            4 => Manners::default(),
            _ => {
                // All of them several times, and now and then what takes long.
                let mut faults = Fault::QUICK.repeat(4);
                faults.extend([Fault::Hang, Fault::Huge]);
                Manners { faulty_per_mille: 120, faults, ..Manners::default() }
            }
        }
    }

    // ---- The worker

    async fn new_resolutions(&mut self) -> Vec<Resolution> {
        let sql = format!(
            "SELECT CAST(id AS TEXT) AS text, payment_id, outcome, verdict, \
             CAST(evidence AS TEXT) FROM {{resolutions}} \
             WHERE id > {} ORDER BY id",
            self.looked_at
        );
        let rows = self.worker.gateway.rows(&sql, &[], 5).await.unwrap();
        let resolutions: Vec<Resolution> = rows
            .into_iter()
            .map(|row| {
                let mut row = row.into_iter().map(Option::unwrap);
                let mut next = || row.next().unwrap();
                Resolution {
                    id: next().parse().unwrap(),
                    payment: next(),
                    outcome: next(),
                    verdict: next(),
                    evidence: next(),
                }
            })
            .collect();
        if let Some(last) = resolutions.last() {
            self.looked_at = last.id;
        }
        resolutions
    }

    /// Nothing that was written since the last look contradicts the chain as it is.
    async fn hold_against_the_truth(&mut self) {
        let resolutions = self.new_resolutions().await;
        if resolutions.is_empty() {
            return;
        }
        self.past.follow(&self.chain).await;
        let truth = self.past.truth();
        let head = self.chain.node().block("latest").await;
        for resolution in resolutions {
            let told = || format!("seed {}: {resolution:?}", self.seed);
            let play = self.script.plays.iter().find(|p| p.id == resolution.payment).unwrap();
            let moved = truth.consumed.get(&(play.claimed.payer, play.claimed.nonce));
            let landed =
                moved.and_then(Option::as_ref).filter(|m| m.to == PAY_TO && m.value == AMOUNT);
            match resolution.outcome.as_str() {
                "paid" | "refund_owed" | "reinstated" | "authorization_reused" => {
                    assert!(landed.is_some(), "{}: nothing landed: {moved:?}", told());
                }
                "failed" => {
                    let proven = ["pending", "unsettleable:"];
                    let is_proven = proven.iter().any(|p| resolution.verdict.starts_with(p));
                    assert!(is_proven, "{}: from silence", told());
                    let deadline =
                        self.written_at[&resolution.payment] + DEADLINE_TICKS * TICK_SECS;
                    let time = head.time.as_secs();
                    assert!(time >= deadline, "{}: {time} is before {deadline}", told());
                    if let Some(moved) = landed {
                        let block = self.chain.node().block(&format!("{:#x}", moved.block)).await;
                        let late = block.time.as_secs() >= deadline;
                        assert!(late, "{}: it had landed: {moved:?}", told());
                    }
                    self.failed_once.insert(resolution.payment.clone());
                }
                "reopened" | "confirmed" => {}
                other => panic!("{}: {other}", told()),
            }
            *self.outcomes.entry(resolution.outcome).or_default() += 1;
        }
    }

    /// What happened, for people.
    pub(super) fn figures(&self) -> String {
        let mut played: BTreeMap<String, u64> = BTreeMap::new();
        let mut requests = 0;
        for proxy in &self.proxies {
            requests += proxy.requests();
            for (name, count) in proxy.played() {
                *played.entry(name).or_default() += count;
            }
        }
        let [playing, looking, checking] = self.took;
        let mut text = format!("{} reorgs took {}, {requests} requests", self.reorgs, self.lost);
        write!(text, ", played {playing:.1?}, looked {looking:.1?}, checked {checking:.1?}")
            .unwrap();
        write!(text, ", outcomes {:?}, faults {played:?}", self.outcomes).unwrap();
        text
    }

    /// How often each fault and lie was played by anybody.
    pub(super) fn played(&self) -> BTreeSet<String> {
        self.proxies.iter().flat_map(|proxy| proxy.played().into_keys()).collect()
    }

    pub(super) fn endpoints(&self) -> Endpoints {
        self.endpoints
    }
}
