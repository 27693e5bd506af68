//! From settled payments to samples, and from samples to what a schedule is fitted to: the tasks themselves,
//! on a real database, with a clock that the test moves. The chain is out of reach here; where it is asked
//! and answers, the daemon's own suite looks on.

use std::collections::BTreeMap;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use alloy_primitives::{Address, B256, U256};
use reconciled::clock::{Clock, ManualClock};
use reconciled::commands::run::watch_chain;
use reconciled::config::Config;
use reconciled::domain::{Amount, ChainId, Rail, RawPayment, Timestamp};
use reconciled::schedule::{Adoption, LatencyCounts, Schedule, Survival, expected, fit};
use reconciled::sim::gateway::GatewayDb;
use reconciled::sim::{Authorized, Fault, SimChain, SimServer, SimSettings};
use reconciled::store::samples::{Part, SampleBin, SampleCount, SampleKey, Watermark, epoch_of};
use reconciled::store::schedules::Series;
use reconciled::store::{DatabaseUrl, Store, connect};
use reconciled::telemetry::{Metrics, VersionOutcome};
use reconciled::worker::sampling::{HELD_OUT_ONE_IN, WAITS_MAX, Waits, bin_grid, part_of};
use reconciled::worker::schedules::Following;
use reconciled::worker::tune::{
    ChainTuning, Measured, TuneSettings, Tuning, measure, observed, store_version,
};
use reconciled::worker::{Sampling, Schedules, Stop, Stopper, Task};

/// On a full hour.
const T0: Timestamp = Timestamp::from_millis(1_780_002_000_000);

const BASE: Series = Series { rail: Rail::X402, chain_id: ChainId::new(8453) };

const CONFIGURATION: &str = r#"
    [database]
    url = "sqlite:unused"
    [schedule]
    half_life = "1h"
    [[chains]]
    chain_id = 8453
    request_timeout = "1s"
    [[chains.endpoints]]
    name = "nowhere"
    url = "http://127.0.0.1:9"
"#;

fn at(secs: u64) -> Timestamp {
    T0.saturating_add(Duration::from_secs(secs))
}

struct Bench {
    config: Config,
    store: Arc<dyn Store>,
    gateway: GatewayDb,
    clock: Arc<ManualClock>,
    metrics: Metrics,
    sampling: Sampling,
    tunings: BTreeMap<ChainId, ChainTuning>,
    stop: Stop,
    _stopper: Stopper,
    _folder: tempfile::TempDir,
}

impl Bench {
    async fn new() -> Self {
        Self::configured(CONFIGURATION).await
    }

    async fn configured(configuration: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let url = format!("sqlite:{}", folder.path().join("gateway.db").display());
        let url = DatabaseUrl::parse(&url).unwrap();
        let store = connect(&url, 4).await.unwrap();
        store.migrate().await.unwrap();
        store.verify_schema().await.unwrap();
        let gateway = GatewayDb::connect(&url).await.unwrap();
        let clock = Arc::new(ManualClock::new(at(600)));
        let metrics = Metrics::new().unwrap();
        let config = Config::parse(configuration, []).unwrap();
        let mut chains = BTreeMap::new();
        let mut tunings = BTreeMap::new();
        for chain in config.chains(|_| None).unwrap() {
            let tuning = ChainTuning { grid: chain.grid, settings: chain.fit.clone() };
            let (id, chain) = {
                let clock = Arc::<ManualClock>::clone(&clock);
                watch_chain(chain, &metrics, clock).unwrap()
            };
            chains.insert(id, (Arc::new(chain), tuning.grid));
            tunings.insert(id, tuning);
        }
        let (stopper, stop) = Stop::new(Duration::ZERO);
        let sampling = Sampling {
            store: Arc::clone(&store),
            chains,
            schedules: Arc::new(Schedules::default()),
            clock: Arc::<ManualClock>::clone(&clock),
            metrics: metrics.clone(),
            window: Duration::from_secs(24 * 3_600),
            settle_lag: Duration::from_secs(60),
            waits: Waits::default(),
        };
        Self {
            config,
            store,
            gateway,
            clock,
            metrics,
            sampling,
            tunings,
            stop,
            _stopper: stopper,
            _folder: folder,
        }
    }

    /// A settled payment, broadcast and settled at these seconds; with the time of its block where we
    /// have recorded that.
    async fn settled(&self, id: &str, broadcast: u64, settled: u64, block: Option<u64>) {
        self.gateway.insert_payment(&row(id, broadcast)).await.unwrap();
        let settled_at = at(settled).as_millis().to_string();
        let sql = "UPDATE payments SET settled_at = ?t WHERE id = ?";
        self.gateway.execute(sql, &[Some(&settled_at), Some(id)]).await.unwrap();
        let Some(block) = block else { return };
        let secs = (at(block).as_millis() / 1_000).to_string();
        let hash = format!("0x{id}");
        let sql = "INSERT INTO {transfers} (chain_id, tx_hash, log_index, payment_id, token, payer, \
                   pay_to, amount, block_number, block_hash, block_time, finality, seen_at) \
                   VALUES (8453, ?, 1, ?, '', '', '', '1', 1, ?, ?i, 'final', 0)";
        let binds = [Some(hash.as_str()), Some(id), Some(hash.as_str()), Some(secs.as_str())];
        self.gateway.execute(sql, &binds).await.unwrap();
    }

    async fn bins(&self) -> Vec<SampleBin> {
        let grid = bin_grid(self.tunings[&BASE.chain_id].grid);
        self.store.sample_bins(BASE, grid, 0).await.unwrap()
    }

    async fn measured(&self) -> Vec<Measured> {
        let settings = self.config.tune_settings();
        measure(self.store.as_ref(), &self.tunings, &settings, self.clock.now()).await.unwrap()
    }

    /// A series of `/metrics`.
    fn metric(&self, series: &str) -> String {
        let text = String::from_utf8(self.metrics.render().unwrap()).unwrap();
        let line =
            text.lines().find_map(|line| line.strip_prefix(&format!("reconciled_{series} ")));
        line.unwrap_or_else(|| panic!("no series {series} in {text}")).to_owned()
    }
}

fn row(id: &str, broadcast: u64) -> RawPayment {
    let text = |text: &str| Some(text.to_owned());
    RawPayment {
        id: id.to_owned(),
        order_id: text("o"),
        rail: text("x402"),
        method: text("eip3009"),
        chain_id: text("8453"),
        token: text("0x833589fCD6eDb6E08f4c7C32D4f71b54bdA02913"),
        payer: text("0x00000000000000000000000000000000000000b1"),
        pay_to: text("0x00000000000000000000000000000000000000Aa"),
        amount: text("1"),
        nonce: Some(format!("0x{:064x}", broadcast + 1)),
        valid_after: text("0"),
        valid_before: Some((at(3_600).as_millis() / 1_000).to_string()),
        tx_hash: None,
        status: text("settled"),
        created_at: Some(at(broadcast).as_millis().to_string()),
        broadcast_at: Some(at(broadcast).as_millis().to_string()),
    }
}

#[tokio::test]
async fn a_latency_is_counted_in_its_bin_and_beyond_the_horizon_as_later() {
    let bench = Bench::new().await;
    // Steps of two seconds: an age of exactly four belongs to the second bin, which a look at four sees.
    bench.settled("four", 100, 105, Some(104)).await;
    bench.settled("five", 100, 106, Some(105)).await;
    bench.settled("late", 0, 500, Some(3_000)).await;
    bench.settled("too fresh", 500, 590, Some(502)).await;
    let sampled = bench.sampling.sample(&bench.stop).await.unwrap();
    assert_eq!((sampled.samples, sampled.skipped, sampled.more), (3, 0, false));
    let mut seen: Vec<_> =
        bench.bins().await.iter().map(|b| (b.key.bin, b.count.latency_sum_ms)).collect();
    seen.sort_unstable();
    let horizon = bin_grid(bench.tunings[&BASE.chain_id].grid).bins;
    assert_eq!(seen, [(1, 4_000), (2, 5_000), (horizon, 0)]);
    assert_eq!(bench.sampling.sample(&bench.stop).await.unwrap().samples, 0, "each once");
    bench.clock.advance(Duration::from_secs(60));
    assert_eq!(bench.sampling.sample(&bench.stop).await.unwrap().samples, 1, "the fresh one");
}

#[tokio::test]
async fn a_block_older_than_its_broadcast_counts_as_settled_at_once_and_is_told() {
    let bench = Bench::new().await;
    bench.settled("ahead", 107, 110, Some(100)).await;
    bench.settled("right", 100, 110, Some(101)).await;
    bench.settled("right too", 100, 110, Some(101)).await;
    bench.sampling.sample(&bench.stop).await.unwrap();
    let bins = bench.bins().await;
    assert!(bins.iter().all(|bin| bin.key.bin == 0), "{bins:?}");
    let sum = |f: &dyn Fn(&SampleBin) -> u64| bins.iter().map(f).sum::<u64>();
    assert_eq!(sum(&|b| b.count.settled), 3);
    assert_eq!(sum(&|b| b.count.clamped), 1);
    assert_eq!(sum(&|b| b.count.latency_sum_ms), 2_000);
    assert_eq!(bench.metric("clock_skew_seconds{chain=\"8453\",rail=\"x402\"}"), "7");
    assert_eq!(bench.metric("clock_skewed_samples_total{chain=\"8453\",rail=\"x402\"}"), "1");
    let measured = bench.measured().await;
    assert_eq!((measured[0].clamped, measured[0].skew_max_ms), (1, 7_000));
    // A day later it no longer counts as the clock's error of now.
    bench.clock.advance(Duration::from_secs(25 * 3_600));
    assert_eq!(bench.measured().await[0].skew_max_ms, 0);
}

#[tokio::test]
async fn what_cannot_be_sampled_is_counted_by_reason_and_stops_nothing() {
    let bench = Bench::new().await;
    bench.settled("unread", 100, 110, None).await;
    bench.settled("known", 100, 111, Some(103)).await;
    for (id, sql) in [
        ("malformed", "UPDATE payments SET payer = 'nobody' WHERE id = ?"),
        ("elsewhere", "UPDATE payments SET chain_id = 5 WHERE id = ?"),
    ] {
        bench.settled(id, 100, 112, None).await;
        bench.gateway.execute(sql, &[Some(id)]).await.unwrap();
    }
    // As long as the chain answers nothing, nothing is known about `unread`: the page waits for it.
    for _ in 0..WAITS_MAX {
        let sampled = bench.sampling.sample(&bench.stop).await.unwrap();
        assert_eq!((sampled.samples, sampled.skipped, sampled.more), (0, 0, true));
    }
    assert_eq!(bench.store.sampled_up_to().await.unwrap(), None);
    assert_eq!(bench.metric("schedule_samples_skipped_total{reason=\"unanswered\"}"), "0");
    // But not for ever: then it keeps the others no longer.
    let sampled = bench.sampling.sample(&bench.stop).await.unwrap();
    assert_eq!((sampled.samples, sampled.skipped, sampled.asked), (1, 3, 1));
    for (reason, count) in [
        ("unanswered", "1"),
        ("not_shown", "0"),
        ("malformed_payment", "1"),
        ("chain_not_configured", "1"),
        ("unsupported_method", "0"),
    ] {
        let series = format!("schedule_samples_skipped_total{{reason=\"{reason}\"}}");
        assert_eq!(bench.metric(&series), count, "{reason}");
    }
    let again = bench.sampling.sample(&bench.stop).await.unwrap();
    assert_eq!((again.samples, again.skipped), (0, 0), "nobody is asked twice");
    bench.settled("unread as well", 100, 120, None).await;
    let sampled = bench.sampling.sample(&bench.stop).await.unwrap();
    assert_eq!(
        (sampled.skipped, sampled.more),
        (1, false),
        "the others wait for a dead chain once"
    );
}

/// A simulated chain with one transfer in the block of second 104, which the payment `unread`, broadcast in
/// second 100, made.
async fn simulated() -> SimServer {
    let token = Address::from_str(row("any", 0).token.as_deref().unwrap()).unwrap();
    let genesis = T0.saturating_sub(Duration::from_secs(600));
    let (block_time, finalized_lag) = (Duration::from_secs(2), Duration::from_secs(60));
    let chain =
        SimChain::new(SimSettings::new(BASE.chain_id, genesis, block_time, finalized_lag, token));
    chain.lock().set_time(T0);
    let transfer = Authorized {
        payer: Address::left_padding_from(&[0xb1]),
        to: Address::left_padding_from(&[0xaa]),
        value: Amount::new(U256::from(1)),
        nonce: B256::left_padding_from(&[101]),
    };
    chain.lock().transfer(at(104), transfer).unwrap();
    chain.lock().set_time(at(600));
    SimServer::start(chain, 1).await.unwrap()
}

/// An endpoint that answers nothing, and one that says that it was used and refuses every look at its logs.
#[tokio::test]
async fn an_outage_of_a_chain_or_of_its_logs_costs_no_sample() {
    for fault in [Fault::Down, Fault::LogRangeLimit(0)] {
        let server = simulated().await;
        let url = server.urls()[0].to_string();
        let bench = Bench::configured(&CONFIGURATION.replace("http://127.0.0.1:9", &url)).await;
        bench.settled("unread", 100, 110, None).await;
        server.set_fault(0, fault);
        for _ in 0..5 {
            let sampled = bench.sampling.sample(&bench.stop).await.unwrap();
            assert_eq!((sampled.samples, sampled.skipped, sampled.more), (0, 0, true), "{fault:?}");
            bench.clock.advance(Duration::from_secs(10));
            server.chain().lock().set_time(bench.clock.now());
        }
        server.clear_fault(0, fault.kind());
        bench.clock.advance(Duration::from_secs(60));
        server.chain().lock().set_time(bench.clock.now());
        let sampled = bench.sampling.sample(&bench.stop).await.unwrap();
        assert_eq!((sampled.samples, sampled.skipped), (1, 0), "{fault:?}");
        assert_eq!(bench.bins().await[0].count.latency_sum_ms, 4_000);
        server.stop().await.unwrap();
    }
}

/// The first page waits for it, and no later one does: neither because another chain answered in between, nor
/// because a page had nobody to ask.
#[tokio::test]
async fn a_dead_chain_keeps_the_others_waiting_once() {
    let server = simulated().await;
    let answers = format!(
        "[[chains]]\nchain_id = 8453\n[[chains.endpoints]]\nname = \"sim\"\nurl = \"{}\"\n",
        server.urls()[0]
    );
    let configuration = CONFIGURATION.replace("8453", "5") + &answers;
    let bench = Bench::configured(&configuration).await;
    let of_the_dead = async |id: &str, settled: u64| {
        bench.settled(id, 90, settled, None).await;
        let sql = "UPDATE payments SET chain_id = 5 WHERE id = ?";
        bench.gateway.execute(sql, &[Some(id)]).await.unwrap();
    };
    of_the_dead("first", 109).await;
    bench.settled("unread", 100, 110, None).await;
    for _ in 0..WAITS_MAX {
        let sampled = bench.sampling.sample(&bench.stop).await.unwrap();
        assert_eq!((sampled.samples, sampled.skipped, sampled.more), (0, 0, true));
    }
    let sampled = bench.sampling.sample(&bench.stop).await.unwrap();
    assert_eq!((sampled.samples, sampled.skipped), (1, 1));
    bench.settled("known", 100, 111, Some(103)).await;
    assert_eq!(bench.sampling.sample(&bench.stop).await.unwrap().samples, 1);
    of_the_dead("second", 112).await;
    let sampled = bench.sampling.sample(&bench.stop).await.unwrap();
    assert_eq!((sampled.samples, sampled.skipped, sampled.more), (0, 1, false));
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_backlog_is_taken_page_by_page_and_every_payment_once() {
    let bench = Bench::new().await;
    const PAYMENTS: u64 = 1_203;
    for n in 0..PAYMENTS {
        // Many settle in one moment: a page may end inside it.
        bench.settled(&format!("p{n:05}"), 100, 110 + n / 700, Some(104)).await;
    }
    let sampled = bench.sampling.sample(&bench.stop).await.unwrap();
    assert_eq!((sampled.samples, sampled.more), (PAYMENTS, false));
    let held_out: u64 = bench
        .bins()
        .await
        .iter()
        .filter(|bin| bin.key.part == Part::HeldOut)
        .map(|bin| bin.count.settled)
        .sum();
    let share = PAYMENTS / HELD_OUT_ONE_IN;
    assert!((share * 3 / 4..share * 5 / 4).contains(&held_out), "{held_out} of {PAYMENTS}");
}

#[tokio::test]
async fn fresh_samples_weigh_more_and_open_and_failed_payments_count_as_such() {
    let bench = Bench::new().await;
    let to_fit = |n: u64| {
        (0..).map(move |i| format!("p{n}-{i}")).find(|id| part_of(&id.as_str().into()) == Part::Fit)
    };
    bench.settled(&to_fit(1).unwrap(), 100, 110, Some(104)).await;
    bench.sampling.sample(&bench.stop).await.unwrap();
    // Two half-lives later another one settles, and one is open.
    let later = 2 * 3_600;
    bench.clock.set(at(later + 600));
    bench.settled(&to_fit(2).unwrap(), later + 100, later + 110, Some(later + 104)).await;
    let open = RawPayment { status: Some("unknown".to_owned()), ..row("open", later + 590) };
    bench.gateway.insert_payment(&open).await.unwrap();
    bench.sampling.sample(&bench.stop).await.unwrap();
    let measured = bench.measured().await;
    let one = &measured[0];
    assert_eq!((one.series, one.samples, one.open, one.never), (BASE, 2, 1, 0));
    // Both epochs began some minutes ago: a quarter and one, times the same.
    let minutes = 600.0_f64 / 3_600.0;
    let expected = (0.25 + 1.0) * (-minutes).exp2();
    assert!((one.to_fit.settled() - expected).abs() < 1e-9, "{}", one.to_fit.settled());
    assert!((one.all.open() - 1.0).abs() < 1e-9);
    assert_eq!(epoch_of(bench.clock.now()) - epoch_of(T0), 2);

    // A day and more later none of it is within the window of one day, but for the version of it.
    let config =
        Config::parse(&CONFIGURATION.replace("half_life", "window = \"24h\"\nhalf_life"), []);
    let settings = config.unwrap().tune_settings();
    let now = at(40 * 3_600);
    let none = measure(bench.store.as_ref(), &bench.tunings, &settings, now).await.unwrap();
    assert!(none.is_empty());
}

impl Bench {
    /// Samples of these hours, of one latency each: so many to fit to, and so many held out.
    async fn sampled(&self, hours: &[(u64, u64, u64)]) {
        for (hour, of_hour) in (0..).zip(hours) {
            self.sampled_in(hour, *of_hour).await;
        }
    }

    /// Samples of one hour after the last; its last second is now.
    async fn sampled_in(&self, hour: u64, (secs, to_fit, held_out): (u64, u64, u64)) {
        let grid = self.tunings[&BASE.chain_id].grid;
        let bin = grid.bin_of(Duration::from_secs(secs)).unwrap();
        let bins = [(Part::Fit, to_fit), (Part::HeldOut, held_out)].map(|(part, settled)| {
            let key = SampleKey {
                series: BASE,
                grid: bin_grid(grid),
                epoch: epoch_of(at(hour * 3_600)),
                part,
                bin: u64::try_from(bin).unwrap(),
            };
            let latency_sum_ms = settled * secs * 1_000;
            SampleBin { key, count: SampleCount { settled, latency_sum_ms, ..Default::default() } }
        });
        self.clock.set(at(hour * 3_600 + 3_599));
        let now = self.clock.now();
        let from = self.store.sampled_up_to().await.unwrap();
        let to = Watermark::before(now);
        assert!(self.store.record_samples(from.as_ref(), &to, &bins, now).await.unwrap());
    }

    /// The task that fits every hour, following what it adopts.
    fn tuning(&self) -> Tuning {
        Tuning {
            store: Arc::clone(&self.store),
            chains: self.tunings.clone(),
            base: Schedule::default(),
            settings: self.config.tune_settings(),
            every: Duration::from_secs(3_600),
            schedules: Arc::new(Schedules::new(Following::Adopted)),
            clock: Arc::<ManualClock>::clone(&self.clock),
            metrics: self.metrics.clone(),
        }
    }
}

#[tokio::test]
async fn a_day_after_latency_doubled_a_fit_is_judged_by_the_new_latency_alone() {
    let bench = Bench::new().await;
    let old = [(10, 40, 10); 5 * 24];
    let new = [(20, 40, 10); 24];
    bench.sampled(&[&old[..], &new[..]].concat()).await;
    let measured = bench.measured().await;
    let one = &measured[0];
    assert_eq!((one.samples, one.fitted_to), (6 * 24 * 50, 6 * 24 * 40));
    assert_eq!(one.recent.settled(), 240.0, "whole payments, however old");
    let grid = one.recent.grid();
    let recent = Survival::measured(&one.recent);
    assert_eq!(recent.settled_by(Duration::from_secs(18)).0, 0.0, "nothing of the old one");

    let settings = &bench.tunings[&BASE.chain_id].settings;
    let mut ten = LatencyCounts::new(grid);
    (0..1_000).for_each(|_| ten.add_latency(Duration::from_secs(10), 1.0));
    let in_use = fit(&ten, settings).unwrap().schedule;
    let rule = bench.config.tune_settings().rule;
    let proposal = one.propose(settings, &in_use, &rule).unwrap();
    let Adoption::Adopt { why } = proposal.adoption else { panic!("{:?}", proposal.adoption) };
    assert!(why.contains("on 240 recent samples"), "{why}");
}

#[tokio::test]
async fn where_few_payments_settle_a_fit_is_judged_by_as_many_hours_as_it_takes() {
    let bench = Bench::new().await;
    bench.sampled(&[(10, 4, 1); 5 * 24]).await;
    let rule = bench.config.tune_settings().rule;
    assert_eq!(bench.measured().await[0].recent.settled(), rule.samples_min);
}

/// Until the new latency is known, nobody waits longer than the largest gap; and it is known soon.
#[tokio::test]
async fn a_step_in_latency_is_taken_up_soon_and_costs_at_most_the_largest_gap_until_then() {
    let bench = Bench::configured(&CONFIGURATION.replace("half_life = \"1h\"", "")).await;
    let tuning = bench.tuning();
    let settings = &bench.tunings[&BASE.chain_id].settings;
    let adopted = async || {
        let versions = bench.store.newest_versions().await.unwrap();
        let newest = versions.into_iter().find(|version| version.fitted.adopted).unwrap();
        serde_json::from_value::<Schedule>(newest.fitted.policy).unwrap()
    };
    let (before, after) = (5 * 24, 24);
    let new = Duration::from_secs(45);
    let mut new_latency = LatencyCounts::new(bench.tunings[&BASE.chain_id].grid);
    (0..1_000).for_each(|_| new_latency.add_latency(new, 1.0));
    let new_latency = Survival::measured(&new_latency);
    let mut delays = Vec::new();
    for hour in 0..before + after {
        bench.sampled_in(hour, (if hour < before { 10 } else { 45 }, 40, 10)).await;
        tuning.tune(&bench.stop).await.unwrap();
        if hour + 1 < before {
            continue;
        }
        let schedule = adopted().await;
        let found = expected(&schedule, &new_latency, &settings.conditions);
        let most = settings.gap_max + settings.conditions.visible_after;
        assert!(found.missed == 0.0 && found.delay_secs <= most.as_secs_f64(), "{found:?}");
        delays.push(found.delay_secs);
    }
    // The grid's steps are two seconds: about as early as it can be, within a working day.
    let soon = delays.iter().position(|delay| *delay < 3.0);
    assert!(delays[0] > 10.0, "{delays:?}");
    assert!(soon.is_some_and(|hours| (1..=8).contains(&hours)), "{delays:?}");
    assert!(delays[soon.unwrap()..].iter().all(|delay| *delay < 3.0), "{delays:?}");
}

#[tokio::test]
async fn what_was_observed_may_be_missing_and_recent_fits_cost_no_counting() {
    let bench = Bench::new().await;
    bench.sampled(&[(10, 40, 10); 24]).await;
    bench.gateway.execute("DROP TABLE {checks}", &[]).await.unwrap();
    let tuning = bench.tuning();
    let outcomes = tuning.tune(&bench.stop).await.unwrap();
    assert_eq!(outcomes, [(BASE, VersionOutcome::Adopted)]);
    // Half-lives later the samples weigh next to nothing, and are no fewer: no belief takes their place.
    let newest = bench.store.newest_versions().await.unwrap();
    assert_eq!(newest[0].fitted.sample_size, 24 * 40);
    let one = &bench.measured().await[0];
    assert!(one.to_fit.settled() < 100.0, "{}", one.to_fit.settled());
    assert_eq!(one.settings(&bench.tunings[&BASE.chain_id].settings).prior.weight, 0.0);
    // What cannot be counted any more is not even asked for.
    bench.gateway.execute("DROP TABLE {settle_latencies}", &[]).await.unwrap();
    assert_eq!(tuning.tune(&bench.stop).await.unwrap(), []);
    bench.clock.advance(Duration::from_secs(1_801));
    tuning.tune(&bench.stop).await.unwrap_err();
}

/// Clocks were wrong a day ago: a replica that another one leaves nothing to fit tells that they are right again.
#[tokio::test]
async fn a_replica_that_fits_nothing_tells_the_clock_skew_of_now_all_the_same() {
    let bench = Bench::new().await;
    bench.settled("ahead", 107, 110, Some(100)).await;
    bench.sampling.sample(&bench.stop).await.unwrap();
    let skew = "clock_skew_seconds{chain=\"8453\",rail=\"x402\"}";
    assert_eq!(bench.metric(skew), "7");
    bench.clock.advance(Duration::from_secs(25 * 3_600));
    let other = Tuning { metrics: Metrics::new().unwrap(), ..bench.tuning() };
    other.activate(&bench.stop).await.unwrap();
    let fits = bench.store.newest_versions().await.unwrap();
    assert_eq!(fits[0].created_at, bench.clock.now(), "the other one has fitted just now");
    bench.tuning().activate(&bench.stop).await.unwrap();
    assert_eq!(bench.metric(skew), "0");
}

/// Whoever asks is not told that new watches take a version, while they take the built-in repeats.
#[tokio::test]
async fn where_fitting_is_off_no_version_is_in_use_and_none_is_adopted() {
    let bench = Bench::new().await;
    bench.sampled(&[(10, 40, 10); 24]).await;
    bench.tuning().tune(&bench.stop).await.unwrap();
    assert!(bench.measured().await[0].adopted.is_some());
    let off = Config::parse(&CONFIGURATION.replace("half_life", "enabled = false\nhalf_life"), []);
    let settings = TuneSettings { auto_adopt: true, ..off.unwrap().tune_settings() };
    let now = bench.clock.now();
    let store = bench.store.as_ref();
    let measured = measure(store, &bench.tunings, &settings, now).await.unwrap();
    let one = &measured[0];
    assert!(one.adopted.is_none(), "{:?}", one.adopted);
    let chain = &bench.tunings[&BASE.chain_id].settings;
    let in_use = one.in_use(&Schedule::default());
    let proposal = one.propose(chain, &in_use, &settings.rule).unwrap();
    assert!(matches!(proposal.adoption, Adoption::Adopt { .. }), "{:?}", proposal.adoption);
    let stored = store_version(store, one, &proposal, &settings, now).await.unwrap();
    assert_eq!(stored.outcome, VersionOutcome::Rejected);
    assert!(stored.reason.starts_with("schedule.enabled is off"), "{}", stored.reason);
}

/// Checks are deleted by then: a mean over what is left of them would be too low.
#[tokio::test]
async fn checks_are_observed_only_as_far_back_as_they_are_kept() {
    let bench = Bench::new().await;
    bench.settled("found", 100, 110, Some(104)).await;
    let millis = at(110).as_millis().to_string();
    for sql in [
        "INSERT INTO {resolutions} (payment_id, outcome, verdict, evidence, resolved_at, \
         detection_delay_ms, settles) VALUES ('found', 'paid', 'settled', '{}', ?i, 6000, 1)",
        "INSERT INTO {watches} (payment_id, phase, opened_at) VALUES ('found', 'closed', ?i)",
    ] {
        bench.gateway.execute(sql, &[Some(&millis)]).await.unwrap();
    }
    bench.clock.set(at(2 * 3_600));
    for (keep_for, payments) in [("1h", 0), ("3h", 1)] {
        let checks = format!("[checks]\nkeep_for = \"{keep_for}\"\n[schedule]");
        let config = Config::parse(&CONFIGURATION.replace("[schedule]", &checks), []).unwrap();
        let (store, settings) = (bench.store.as_ref(), config.tune_settings());
        let seen = observed(store, &bench.tunings, &settings, bench.clock.now()).await.unwrap();
        assert_eq!(seen.iter().map(|seen| seen.payments).sum::<u64>(), payments, "{keep_for}");
    }
}

/// More bins than one statement deletes, and activations an hour apart.
#[tokio::test]
async fn one_activation_prunes_all_that_is_too_old() {
    let bench = Bench::new().await;
    let grid = bin_grid(bench.tunings[&BASE.chain_id].grid);
    let of_hours = (0..40).flat_map(|hour| (0..200).map(move |bin| (hour, bin)));
    let bins: Vec<SampleBin> = of_hours
        .map(|(hour, bin)| {
            let key =
                SampleKey { series: BASE, grid, epoch: epoch_of(T0) + hour, part: Part::Fit, bin };
            SampleBin { key, count: SampleCount { settled: 1, ..Default::default() } }
        })
        .collect();
    let to = Watermark::before(T0);
    assert!(bench.store.record_samples(None, &to, &bins, T0).await.unwrap());
    bench.clock.set(at(100 * 24 * 3_600));
    bench.tuning().activate(&bench.stop).await.unwrap();
    assert_eq!(bench.bins().await, []);
}

#[tokio::test]
async fn only_a_schedule_that_is_followed_promises_anything() {
    let bench = Bench::new().await;
    bench.sampled(&[(10, 40, 10); 24]).await;
    let mut tuning = bench.tuning();
    tuning.schedules = Arc::new(Schedules::new(Following::Configured));
    let reads = "schedule_expected_reads{chain=\"8453\",rail=\"x402\"}";
    tuning.activate(&bench.stop).await.unwrap();
    bench.sampling.activate(&bench.stop).await.unwrap();
    assert!(bench.metric("schedule_fit_timestamp_seconds{chain=\"8453\",rail=\"x402\"}") != "0");
    assert_eq!(bench.metric(reads), "0");
    tuning.schedules = Arc::new(Schedules::new(Following::Adopted));
    tuning.activate(&bench.stop).await.unwrap();
    assert_ne!(bench.metric(reads), "0");
}
