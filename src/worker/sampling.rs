//! Takes samples of settle latency from every payment that settled, by the gateway or by us.
//!
//! It follows a watermark in the order of settling, page by page. A page's samples and the new watermark
//! are written together, so that neither a killed process nor a second replica counts a payment twice
//! (I9, I10). A block's time comes from our own records, else from the chain. What the chain does not show
//! as settled is no sample and is passed over; nothing is concluded about it (I2). A payment about which no
//! endpoint answered, or none read its logs, is not one of those: its page waits where it is, up to a named
//! number of activations.
//!
//! Replicas take no lease for this. Two that look at the same moment read the same page, and the second to
//! write finds the watermark moved and leaves the rest of its activation to the other. So a page costs at
//! most one read per replica, of some requests per [`READS_MAX`] payments, and no lease can get stuck.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use sha2::{Digest, Sha256};

use super::check::WatchedChain;
use super::driver::{Activation, Stop, Task};
use super::schedules::Schedules;
use crate::chain::{Breadth, Chain};
use crate::clock::Clock;
use crate::domain::{
    BlockTime, ChainId, PaidAfter, Payment, PaymentId, Policy, Timestamp, Verdict, failure_of,
    judge,
};
use crate::schedule::Grid;
use crate::store::samples::{
    BinGrid, Part, SampleBin, SampleCount, SampleKey, SettledPayment, SettledStretch, Watermark,
    epoch_of,
};
use crate::store::schedules::Series;
use crate::store::{Store, StoreError};
use crate::telemetry::{Metrics, SkippedSample};

/// Settled payments in one page, and in one transaction.
const PAGE_MAX: u32 = 500;
/// Pages in one activation; the next goes on.
const PAGES_MAX: u32 = 20;
/// Payments that one activation asks the chains about. With the usual batches of 400 that is about a dozen
/// requests.
const READS_MAX: usize = 2_000;
/// How long the chains may take about one page.
const READ_BUDGET: Duration = Duration::from_secs(30);
/// Activations in which pages wait for a chain that leaves payments unanswered: with the usual ten seconds
/// between them, ten minutes. What is unanswered after that is lost until the chain has answered all that it
/// was asked about in one page; without an end, a chain whose endpoints are gone for good would keep all others
/// from being sampled.
pub const WAITS_MAX: u32 = 60;
/// One payment in this many is held out of the fit, to judge it by.
pub const HELD_OUT_ONE_IN: u64 = 5;

/// Counts settle latencies.
pub struct Sampling {
    /// The database.
    pub store: Arc<dyn Store>,
    /// The chains to ask, and the grids to count on.
    pub chains: BTreeMap<ChainId, (Arc<WatchedChain>, Grid)>,
    /// Refreshed by the way: another replica may have adopted a version.
    pub schedules: Arc<Schedules>,
    /// The clock.
    pub clock: Arc<dyn Clock>,
    /// What was counted.
    pub metrics: Metrics,
    /// How far back the first activation begins.
    pub window: Duration,
    /// Payments are taken once they have been settled for this long, so that a row committed late is not
    /// passed over.
    pub settle_lag: Duration,
    /// Which chains are waited for; starts with none.
    pub waits: Waits,
}

/// For how many activations pages have waited for each chain since it last answered all it was asked about. A
/// chain that answers is not waited for longer because another one does not, nor a dead one anew because the
/// others answered.
#[derive(Debug, Default)]
pub struct Waits(Mutex<BTreeMap<ChainId, u32>>);

impl Waits {
    /// Whether a page is to be asked about once more, in which each of these chains was `true`, silent, or
    /// answered. Tells of the first time and of the last.
    fn asks_again(&self, chains: &BTreeMap<ChainId, bool>) -> bool {
        // Every change is one insertion or removal, so what is there is whole whoever panicked.
        let mut waited = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut again = false;
        for (chain, is_silent) in chains {
            if !is_silent {
                waited.remove(chain);
                continue;
            }
            let waits = waited.entry(*chain).or_default();
            match *waits {
                0 => {
                    tracing::warn!(%chain, "this chain leaves payments unanswered; sampling waits for it")
                }
                WAITS_MAX => tracing::warn!(
                    %chain,
                    waits = WAITS_MAX,
                    "this chain left payments unanswered for too long; sampling goes on without them"
                ),
                _ => {}
            }
            again |= *waits < WAITS_MAX;
            // Stays above the last that is told of.
            *waits = waits.saturating_add(1).min(WAITS_MAX + 1);
        }
        again
    }
}

/// What one page came to.
#[derive(Debug, Default)]
struct Page {
    bins: BTreeMap<SampleKey, SampleCount>,
    skipped: BTreeMap<SkippedSample, u64>,
    /// The payments to ask about.
    to_ask: BTreeMap<ChainId, Vec<Payment>>,
    /// The chains that were asked, and whether one left any payment unanswered.
    asked: BTreeMap<ChainId, bool>,
}

/// What asking about one payment came to.
enum Asked {
    /// It settled in a block of this time.
    Settled(BlockTime),
    /// The chain does not show it as settled.
    NotShown,
    /// No endpoint answered, or none that answered could read the logs.
    Unanswered,
}

/// What one activation came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sampled {
    /// Payments that became samples.
    pub samples: u64,
    /// Payments that did not.
    pub skipped: u64,
    /// Payments that a chain was asked about.
    pub asked: usize,
    /// Whether there is more to take.
    pub more: bool,
}

impl Sampling {
    /// Takes samples until there are none left, or a limit is reached.
    pub async fn sample(&self, stop: &Stop) -> Result<Sampled, StoreError> {
        let now = self.clock.now();
        let until = now.saturating_sub(self.settle_lag);
        let mut from = self.store.sampled_up_to().await?;
        let mut sampled = Sampled::default();
        for _ in 0..PAGES_MAX {
            let after =
                from.clone().unwrap_or_else(|| Watermark::before(now.saturating_sub(self.window)));
            let stretch =
                self.store.settled_after(&after, until, self.settle_lag, PAGE_MAX).await?;
            let SettledStretch { payments: page, up_to: Some(to), is_full } = stretch else {
                return Ok(sampled);
            };
            sampled.more = is_full;
            let page = self.sort(page);
            let asked = page.to_ask.values().map(Vec::len).sum::<usize>();
            if sampled.asked + asked > READS_MAX || stop.is_requested() {
                sampled.more = true;
                return Ok(sampled);
            }
            sampled.asked += asked;
            let counted = tokio::select! {
                counted = self.count(page) => counted,
                () = stop.patience_over() => return Ok(sampled),
            };
            if self.waits.asks_again(&counted.asked) {
                sampled.more = true;
                return Ok(sampled);
            }
            let bins: Vec<SampleBin> = counted
                .bins
                .iter()
                .map(|(key, count)| SampleBin { key: *key, count: *count })
                .collect();
            let now = self.clock.now();
            let is_first = self.store.record_samples(from.as_ref(), &to, &bins, now).await?;
            if !is_first {
                tracing::debug!("another replica has taken these samples");
                return Ok(sampled);
            }
            sampled.samples += bins.iter().map(|bin| bin.count.settled).sum::<u64>();
            sampled.skipped += counted.skipped.values().sum::<u64>();
            self.metrics.schedules.sampled(&counted.bins, &counted.skipped);
            from = Some(to);
            if !is_full {
                return Ok(sampled);
            }
        }
        Ok(sampled)
    }

    /// Counts what needs no asking, and sorts the rest by chain.
    fn sort(&self, settled: Vec<SettledPayment>) -> Page {
        let mut page = Page::default();
        for one in settled {
            let payment = match one.payment {
                Ok(payment) => payment,
                Err(_) => {
                    page.skip(SkippedSample::MalformedPayment);
                    continue;
                }
            };
            match (self.chains.get(&payment.chain_id), one.block_time) {
                (None, _) => page.skip(SkippedSample::ChainNotConfigured),
                (Some((_, grid)), Some(block_time)) => page.add(&payment, block_time, *grid),
                (Some(_), None) if !Chain::can_read(payment.method) => {
                    page.skip(SkippedSample::UnsupportedMethod);
                }
                (Some(_), None) => page.to_ask.entry(payment.chain_id).or_default().push(payment),
            }
        }
        page
    }

    /// Asks about the rest of a page, and counts it too. Touches no database (I8).
    async fn count(&self, mut page: Page) -> Page {
        for (chain_id, payments) in std::mem::take(&mut page.to_ask) {
            let Some((watched, grid)) = self.chains.get(&chain_id) else { continue };
            let mut is_silent = false;
            for (payment, asked) in payments.iter().zip(self.ask(watched, &payments).await) {
                match asked {
                    Asked::Settled(block_time) => page.add(payment, block_time, *grid),
                    Asked::NotShown => page.skip(SkippedSample::NotShown),
                    Asked::Unanswered => {
                        is_silent = true;
                        page.skip(SkippedSample::Unanswered);
                    }
                }
            }
            page.asked.insert(chain_id, is_silent);
        }
        page
    }

    /// What the chain shows of each payment. Nothing is decided by it, so one endpoint's word and one block's
    /// depth are enough.
    async fn ask(&self, watched: &WatchedChain, payments: &[Payment]) -> Vec<Asked> {
        let policy = Policy {
            paid_after: PaidAfter::Confirmations(1),
            positive_quorum: 1,
            ..watched.policy.clone()
        };
        let now = self.clock.now();
        let evidence = watched.chain.read(payments, Breadth::FirstAnswer, now, READ_BUDGET).await;
        let of_each = payments.iter().zip(&evidence).map(|(payment, evidence)| {
            if evidence.readings.iter().all(|reading| failure_of(&reading.outcome).is_some()) {
                return Asked::Unanswered;
            }
            match judge(payment, evidence, &policy) {
                Verdict::Settled(settlement) => Asked::Settled(settlement.transfer.block.time),
                _ => Asked::NotShown,
            }
        });
        of_each.collect()
    }
}

impl Page {
    fn skip(&mut self, reason: SkippedSample) {
        *self.skipped.entry(reason).or_default() += 1;
    }

    fn add(&mut self, payment: &Payment, block_time: BlockTime, grid: Grid) {
        let (started, block) = (payment.started_at(), Timestamp::from(block_time));
        let latency = block.since(started);
        let skew = started.since(block);
        let bins = bin_grid(grid);
        let bin = grid.bin_of(latency).and_then(|bin| u64::try_from(bin).ok()).unwrap_or(bins.bins);
        let millis = |d: Duration| u64::try_from(d.as_millis()).unwrap_or(u64::MAX);
        let key = SampleKey {
            series: Series { rail: payment.rail, chain_id: payment.chain_id },
            grid: bins,
            epoch: epoch_of(block),
            part: part_of(&payment.id),
            bin,
        };
        // Beyond the horizon the sum is of no use, and a payment years old would overflow it in the end.
        let latency_sum_ms = if bin < bins.bins { millis(latency) } else { 0 };
        let one = SampleCount {
            settled: 1,
            latency_sum_ms,
            clamped: u64::from(!skew.is_zero()),
            skew_max_ms: millis(skew),
        };
        self.bins.entry(key).or_default().add(&one);
    }
}

/// A grid in the store's words.
pub fn bin_grid(grid: Grid) -> BinGrid {
    BinGrid {
        step_ms: u64::try_from(grid.step().as_millis()).unwrap_or(u64::MAX),
        bins: u64::try_from(grid.bins()).unwrap_or(u64::MAX),
    }
}

/// Whether a payment is held out: by a hash of its id, so that both parts cover the same time and every
/// replica agrees.
pub fn part_of(payment: &PaymentId) -> Part {
    let digest = Sha256::digest(payment.as_str().as_bytes());
    let number = digest.iter().take(8).fold(0_u64, |n, byte| n << 8 | u64::from(*byte));
    if number % HELD_OUT_ONE_IN == 0 { Part::HeldOut } else { Part::Fit }
}

#[async_trait]
impl Task for Sampling {
    fn name(&self) -> &'static str {
        "sampling"
    }

    async fn activate(&self, stop: &Stop) -> anyhow::Result<Activation> {
        let newest = self.schedules.refresh(self.store.as_ref()).await?;
        self.metrics.schedules.in_use(&newest, self.schedules.adopts());
        let sampled = self.sample(stop).await?;
        if sampled.samples + sampled.skipped > 0 {
            let Sampled { samples, skipped, .. } = sampled;
            tracing::debug!(samples, skipped, "settle latencies were sampled");
        }
        // A backlog is taken up at once, unless that costs requests: then one period after the other.
        let at_once = sampled.more && sampled.asked == 0;
        Ok(Activation { again_in: at_once.then_some(Duration::ZERO) })
    }
}
