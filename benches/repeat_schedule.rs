//! What a fitted schedule is worth: the same latencies through the real targeted worker on the simulated
//! chain, with a schedule fitted to one half of them and with those people write by hand.
//!
//! ```text
//! cargo bench --bench repeat_schedule
//! ```
//!
//! `RECONCILED_BENCH_PAYMENTS` changes how many payments each half of each shape has, `RECONCILED_BENCH_SVG`
//! names a file for a plot of the heavy tail. The aims are judged from [`AIMS_FROM`] payments up: below,
//! the optimum of a half is an optimum for its noise, and nothing fitted elsewhere comes near it.

use std::time::{Duration, Instant};

use anyhow::Context;
use reconciled::schedule::{
    AgeTable, Expected, FitSettings, Fitted, Grid, LatencyCounts, Objective, Pacing, Plot, Prices,
    Prior, Schedule, Survival, expected, fit,
};
use reconciled::sim::replay::{BLOCK_TIME, Broadcast, ReplaySettings, Replayed, VALID_FOR, replay};

const SEED: u64 = 20_260_101;
const HORIZON: Duration = Duration::from_secs(600);
/// Payments come in over this long, at multiples of [`PHASE`].
const ARRIVALS: Duration = Duration::from_secs(60);
const PHASE: Duration = Duration::from_millis(250);
/// One payment in ten never lands.
const NEVER: f64 = 0.1;
const FIT_SAMPLES: u32 = 100_000;
/// What must hold.
const FIT_SECS_MAX: f64 = 0.2;
const COST_OVER_OPTIMUM_MAX: f64 = 0.03;
/// What is hoped for; printed and not enforced, because it depends on the payments more than on the fit.
const FEWER_READS_AIM: f64 = 2.0;
const AIMS_FROM: usize = 2_000;

/// How long payments take to become minable.
#[derive(Clone, Copy, PartialEq)]
enum Shape {
    FastAndSteady,
    HeavyTail,
    TwoModes,
    CongestedHour,
}

impl Shape {
    const ALL: [(Self, &'static str); 4] = [
        (Self::FastAndSteady, "fast and steady"),
        (Self::HeavyTail, "heavy tail"),
        (Self::TwoModes, "two modes"),
        (Self::CongestedHour, "congested hour"),
    ];

    /// Seconds from the broadcast until the next block takes the transaction; `None`: never.
    fn sample(self, random: &mut Random) -> Option<f64> {
        if random.unit() < NEVER {
            return None;
        }
        let fast = random.log_normal(0.8, 0.4);
        Some(match self {
            Self::FastAndSteady => fast,
            // Log-logistic: half within 5 s, one in 25 later than 50 s, one in 300 later than 5 minutes.
            Self::HeavyTail => {
                let u = random.unit();
                5.0 * (u / (1.0 - u)).powf(1.0 / 1.4)
            }
            // One in five is sent again with a higher fee after a minute.
            Self::TwoModes if random.unit() < 0.2 => (60.0 + 8.0 * random.normal()).max(0.0),
            // Two in five come while blocks are full.
            Self::CongestedHour if random.unit() < 0.4 => random.log_normal(30.0, 0.6),
            Self::TwoModes | Self::CongestedHour => fast,
        })
    }
}

/// SplitMix64, so that every run sees the same payments.
struct Random(u64);

impl Random {
    fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
    }

    fn normal(&mut self) -> f64 {
        let (radius, turn) = (1.0 - self.unit(), self.unit());
        (-2.0 * radius.ln()).sqrt() * (std::f64::consts::TAU * turn).cos()
    }

    fn log_normal(&mut self, median: f64, sigma: f64) -> f64 {
        median * (sigma * self.normal()).exp()
    }
}

fn main() -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(run())
}

async fn run() -> anyhow::Result<()> {
    let size = match std::env::var("RECONCILED_BENCH_PAYMENTS") {
        Ok(text) => text.parse().context("RECONCILED_BENCH_PAYMENTS must be a number")?,
        Err(_) => 4_000,
    };
    let started = Instant::now();
    let mut failed = Vec::new();
    for (shape, name) in Shape::ALL {
        Bench::new(shape, name, size).run(&mut failed).await?;
    }
    time_the_fit(&mut failed)?;
    println!("\ntook {:.0} s", started.elapsed().as_secs_f64());
    anyhow::ensure!(failed.is_empty(), "aims that were missed: {}", failed.join("; "));
    Ok(())
}

/// One shape of latency, in two halves.
struct Bench {
    shape: Shape,
    name: &'static str,
    to_fit: LatencyCounts,
    held_out: Vec<Broadcast>,
    held_out_counts: LatencyCounts,
    settings: FitSettings,
}

/// A line of the table.
struct Line {
    replayed: Replayed,
    cost: f64,
}

impl Bench {
    fn new(shape: Shape, name: &'static str, size: usize) -> Self {
        let mut random = Random(SEED ^ shape as u64);
        let mut payments = Vec::with_capacity(2 * size);
        for _ in 0..2 * size {
            let phases = ARRIVALS.as_secs_f64() / PHASE.as_secs_f64();
            let phase = (random.unit() * phases) as u32;
            let minable_after = shape.sample(&mut random).map(Duration::from_secs_f64);
            payments.push(Broadcast { after: PHASE * phase, minable_after });
        }
        let held_out = payments.split_off(size);
        let mut settings = FitSettings::for_block_time(BLOCK_TIME);
        // The settle call failed at once: found when a first block could be visible.
        settings.conditions.found_at = settings.conditions.visible_after;
        Self {
            shape,
            name,
            to_fit: count(&payments),
            held_out_counts: count(&held_out),
            held_out,
            settings,
        }
    }

    async fn run(&self, failed: &mut Vec<String>) -> anyhow::Result<()> {
        let fitted = fit(&self.to_fit, &self.settings)?;
        let no_prior = FitSettings { prior: Prior::NONE, ..self.settings };
        let optimum = fit(&self.held_out_counts, &no_prior)?;
        println!(
            "\n{}: {} payments, {} of them settle; half within {:.1} s, 9 in 10 of all {}",
            self.name,
            self.held_out.len(),
            self.held_out_counts.settled(),
            optimum.survival.quantile(0.5).unwrap_or_default().as_secs_f64(),
            match optimum.survival.quantile(0.9) {
                Some(age) => format!("within {:.1} s", age.as_secs_f64()),
                None => "never".to_owned(),
            },
        );
        println!(
            "  {:<34} {:>6} {:>8} {:>8} {:>8} {:>8} {:>8}",
            "", "reads", "mean s", "p50 s", "p99 s", "missed", "cost"
        );
        let best = self.line("offline optimum of these payments", &optimum.schedule).await?;
        let ours = self.line("fitted to the other half", &fitted.schedule).await?;
        for (name, schedule) in by_hand()? {
            self.line(name, &schedule).await?;
        }
        self.check_promise(&fitted, &ours)?;
        let over = ours.cost / best.cost - 1.0;
        println!("  the fitted one costs {:.1} % more than the optimum", 100.0 * over);
        let judged = self.held_out.len() >= AIMS_FROM;
        if judged && over > COST_OVER_OPTIMUM_MAX {
            failed.push(format!("{}: {:.1} % over the optimum", self.name, 100.0 * over));
        }
        if ours.replayed.missed > 0 {
            failed.push(format!("{}: {} missed", self.name, ours.replayed.missed));
        }
        if self.shape == Shape::HeavyTail {
            self.against_equal_delay(&ours).await?;
            self.most_that_is_possible(&optimum);
            self.draw(&fitted)?;
        }
        Ok(())
    }

    /// Replays one schedule and prints its line.
    async fn line(&self, name: &str, schedule: &Schedule) -> anyhow::Result<Line> {
        let settings = ReplaySettings {
            schedule: schedule.clone(),
            pacing: Pacing::default(),
            found_at: self.settings.conditions.found_at,
            visible_after: self.settings.conditions.visible_after,
        };
        let replayed = replay(&self.held_out, &settings).await?;
        let payments = self.held_out.len() as f64;
        let Objective::Prices(prices) = self.settings.objective else {
            anyhow::bail!("the built-in objective is a price");
        };
        let ending = self.settings.conditions.ending;
        let waited: f64 = replayed.delays.iter().map(Duration::as_secs_f64).sum::<f64>()
            + replayed.missed as f64 * ending.delay_secs;
        let open = (self.held_out.len() - replayed.delays.len()) as f64;
        let reads = replayed.reads as f64 + open * ending.reads;
        let cost = (prices.read * reads + prices.delay_second * waited) / payments;
        println!(
            "  {name:<34} {:>6.2} {:>8.2} {:>8.2} {:>8.2} {:>6.2} % {cost:>8.3}",
            replayed.reads as f64 / payments,
            replayed.delay_mean().as_secs_f64(),
            replayed.delay_at(0.5).as_secs_f64(),
            replayed.delay_at(0.99).as_secs_f64(),
            100.0 * replayed.missed as f64 / self.held_out_counts.settled(),
        );
        Ok(Line { replayed, cost })
    }

    /// What was replayed is what arithmetic on the counts says, so neither is measured wrongly.
    fn check_promise(&self, fitted: &Fitted, ours: &Line) -> anyhow::Result<()> {
        let promised = self.expected(&fitted.schedule).cost(fitted.prices);
        let differs = (ours.cost / promised - 1.0).abs();
        anyhow::ensure!(differs < 1e-6, "replayed {}, and {promised} by arithmetic", ours.cost);
        Ok(())
    }

    fn expected(&self, schedule: &Schedule) -> Expected {
        let survival = Survival::measured(&self.held_out_counts);
        expected(schedule, &survival, &self.settings.conditions)
    }

    /// The fixed interval that detects as early as the fitted schedule, and what it reads.
    async fn against_equal_delay(&self, ours: &Line) -> anyhow::Result<()> {
        let tenths = self.as_early_as(ours.replayed.delay_mean().as_secs_f64())?;
        let name = format!("fixed {:.1} s, as early on average", f64::from(tenths) / 10.0);
        let fixed = self.line(&name, &every(tenths)?).await?;
        let fewer = fixed.replayed.reads as f64 / ours.replayed.reads as f64;
        println!(
            "  which reads {fewer:.2} times as often as the fitted one (aim: {FEWER_READS_AIM})"
        );
        Ok(())
    }

    /// The same of the optimum: no schedule of these bounds does better for these payments, so where the
    /// aim is missed here it cannot be met by any fit.
    fn most_that_is_possible(&self, optimum: &Fitted) {
        let best = self.expected(&optimum.schedule);
        let fewer = self.as_early_as(best.found_delay_secs).and_then(every).map(|fixed| {
            let ending = self.settings.conditions.ending.reads;
            let unsettled = 1.0 - self.held_out_counts.settled() / self.held_out.len() as f64;
            let targeted = |schedule: &Schedule| self.expected(schedule).reads - ending * unsettled;
            targeted(&fixed) / targeted(&optimum.schedule)
        });
        if let Ok(fewer) = fewer {
            println!(
                "  the optimum of these payments, beside its own fixed interval: {fewer:.2} times"
            );
        }
    }

    /// The interval, in tenths of a second, whose mean delay is nearest to this one.
    fn as_early_as(&self, delay_secs: f64) -> anyhow::Result<u32> {
        let distance = |tenths: u32| {
            let schedule = every(tenths).ok()?;
            Some((tenths, (self.expected(&schedule).found_delay_secs - delay_secs).abs()))
        };
        let nearest = (5..400).filter_map(distance).min_by(|(_, a), (_, b)| a.total_cmp(b));
        nearest.map(|(tenths, _)| tenths).context("no interval fits the grid")
    }

    fn draw(&self, fitted: &Fitted) -> anyhow::Result<()> {
        let checks = fitted.schedule.ages_after(self.settings.conditions.found_at);
        let plot = Plot {
            title: "Settle latency and checks",
            survival: &fitted.survival,
            checks: &checks,
        };
        println!("\n{}", plot.text(72, 8));
        if let Some(file) = std::env::var_os("RECONCILED_BENCH_SVG") {
            std::fs::write(&file, plot.svg())
                .with_context(|| format!("could not write {}", file.display()))?;
        }
        Ok(())
    }
}

fn count(payments: &[Broadcast]) -> LatencyCounts {
    let mut counts = LatencyCounts::new(Grid::covering(BLOCK_TIME, HORIZON));
    for payment in payments {
        match payment.latency() {
            Some(latency) => counts.add_latency(latency, 1.0),
            None => counts.add_never(1.0),
        }
    }
    counts
}

/// The schedules people write, each until no authorization can land any more, unless it gives up before.
fn by_hand() -> anyhow::Result<[(&'static str, Schedule); 6]> {
    let backoff = |factor: f64, cap: f64| {
        let mut gap = 2.0;
        move |_: f64| {
            let this = gap;
            gap = f64::min(gap * factor, cap);
            this
        }
    };
    let all = VALID_FOR.as_secs_f64();
    Ok([
        ("fixed 2 s", every(20)?),
        ("fixed 4 s", every(40)?),
        ("fixed 10 s", every(100)?),
        ("exponential x1.5, at most 30 s", at_ages(backoff(1.5, 30.0), all)?),
        ("exponential x2", at_ages(backoff(2.0, f64::INFINITY), all)?),
        ("every 2 s for 30 s, then give up", at_ages(|_| 2.0, 30.0)?),
    ])
}

fn every(tenths: u32) -> anyhow::Result<Schedule> {
    at_ages(|_| f64::from(tenths) / 10.0, VALID_FOR.as_secs_f64())
}

/// Checks with these gaps, in seconds, until the first at or past `until`. As a table, because a list of
/// offsets is bounded, and polling is not.
fn at_ages(mut gap: impl FnMut(f64) -> f64, until: f64) -> anyhow::Result<Schedule> {
    const STEP_MS: f64 = 500.0;
    let grid = Grid::new(Duration::from_millis(STEP_MS as u64), 1_024)?;
    let mut next: Vec<Option<u16>> = vec![None; grid.bins()];
    let (mut age, mut filled) = (0.0, 0_usize);
    while age < until {
        age += gap(age);
        let edge = ((age * 1_000.0 / STEP_MS).round() as usize).clamp(filled + 1, grid.bins());
        next[filled..edge].fill(Some(u16::try_from(edge)?));
        filled = edge;
        if filled == grid.bins() {
            break;
        }
    }
    let visible_after = FitSettings::for_block_time(BLOCK_TIME).conditions.visible_after;
    Ok(Schedule::by_age(AgeTable::new(grid, visible_after, next)?))
}

/// From raw samples to a schedule, at a price and for a budget.
fn time_the_fit(failed: &mut Vec<String>) -> anyhow::Result<()> {
    let mut random = Random(SEED);
    let latencies: Vec<Option<Duration>> = (0..FIT_SAMPLES)
        .map(|_| Shape::HeavyTail.sample(&mut random).map(Duration::from_secs_f64))
        .collect();
    println!("\nfitting {FIT_SAMPLES} samples, counting included");
    for (name, block_time, objective) in [
        ("at a price, 300 bins", 2.0, Objective::Prices(Prices { read: 1.0, delay_second: 0.5 })),
        ("for a budget, 300 bins", 2.0, Objective::Budget { reads: 5.0 }),
        ("for a budget, 1,000 bins", 0.6, Objective::Budget { reads: 5.0 }),
    ] {
        let block_time = Duration::from_secs_f64(block_time);
        let settings = FitSettings { objective, ..FitSettings::for_block_time(block_time) };
        let started = Instant::now();
        let mut counts = LatencyCounts::new(Grid::covering(block_time, HORIZON));
        for latency in &latencies {
            match latency {
                Some(latency) => counts.add_latency(*latency, 1.0),
                None => counts.add_never(1.0),
            }
        }
        let fitted = fit(&counts, &settings)?;
        let took = started.elapsed().as_secs_f64();
        println!(
            "  {name:<26} {:>7.1} ms    (at most {:.0} ms), {:.2} reads, {:.2} s of delay",
            1e3 * took,
            1e3 * FIT_SECS_MAX,
            fitted.expected.reads,
            fitted.expected.delay_secs
        );
        if took > FIT_SECS_MAX {
            failed.push(format!("fitting {name} took {took:.2} s"));
        }
    }
    Ok(())
}
