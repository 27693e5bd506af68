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
//!
//! The fitted schedule and the optimum are replayed as the daemon follows them, with the mandatory check when
//! an authorization is over. Those written by hand are loops as people write them, without one.

mod by_hand;
mod shapes;

use std::time::{Duration, Instant};

use anyhow::Context;
use reconciled::schedule::{
    Expected, FitSettings, Fitted, FoundAges, Grid, LatencyCounts, Objective, Pacing, Plot, Prices,
    Prior, Schedule, Survival, expected, fit,
};
use reconciled::sim::replay::{BLOCK_TIME, Broadcast, ReplaySettings, Replayed, VALID_FOR, replay};

use crate::by_hand::{GIVES_UP, by_hand, every};
use crate::shapes::{Random, SEED, Shape};

/// The built-in one.
const HORIZON: Duration = Duration::from_secs(900);
const FIT_SAMPLES: u32 = 100_000;
/// What must hold.
const FIT_SECS_MAX: f64 = 0.2;
const COST_OVER_OPTIMUM_MAX: f64 = 0.03;
/// Fewer reads on the heavy tail than a loop that detects as early and misses nothing either.
const FEWER_READS_AIM: f64 = 2.0;
const AIMS_FROM: usize = 2_000;

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
        let [payments, held_out] = shape.halves(size);
        let mut settings = FitSettings::for_block_time(BLOCK_TIME);
        // The settle call failed at once: found when a first block could be visible.
        settings.conditions.found = FoundAges::at(settings.conditions.visible_after);
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
        let no_prior = FitSettings { prior: Prior::NONE, ..self.settings.clone() };
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
            "  {:<36} {:>6} {:>8} {:>8} {:>8} {:>8} {:>8}",
            "", "reads", "mean s", "p50 s", "p99 s", "missed", "cost"
        );
        let best = self.line("offline optimum of these payments", &optimum.schedule, true).await?;
        let ours = self.line("fitted to the other half", &fitted.schedule, true).await?;
        for (name, schedule) in by_hand()? {
            let line = self.line(name, &schedule, false).await?;
            anyhow::ensure!(
                name != GIVES_UP || self.shape == Shape::FastAndSteady || line.replayed.missed > 0,
                "giving up must miss something here"
            );
        }
        self.check_promise(&fitted, &ours)?;
        let over = ours.cost / best.cost - 1.0;
        println!("  the fitted one costs {:.1} % more than the optimum", 100.0 * over);
        let late = ours.replayed.late_delays.len();
        println!("  {late} of its payments were found by the mandatory check alone");
        let judged = self.held_out.len() >= AIMS_FROM;
        if judged && over > COST_OVER_OPTIMUM_MAX {
            failed.push(format!("{}: {:.1} % over the optimum", self.name, 100.0 * over));
        }
        if ours.replayed.missed > 0 {
            failed.push(format!("{}: {} missed", self.name, ours.replayed.missed));
        }
        if self.shape == Shape::HeavyTail {
            let fewer = self.against_equal_delay(&best, &ours).await?;
            if judged && fewer < FEWER_READS_AIM {
                failed.push(format!("{}: only {fewer:.2} times fewer reads", self.name));
            }
            self.draw(&fitted)?;
        }
        Ok(())
    }

    /// Replays one schedule and prints its line. A payment that is missed costs as much as if a full
    /// reconcile found it; to whoever has none it costs more.
    async fn line(
        &self,
        name: &str,
        schedule: &Schedule,
        has_mandatory: bool,
    ) -> anyhow::Result<Line> {
        let settings = ReplaySettings {
            schedule: schedule.clone(),
            pacing: Pacing::default(),
            found_at: self.settings.conditions.visible_after,
            visible_after: self.settings.conditions.visible_after,
            has_mandatory,
        };
        let replayed = replay(&self.held_out, &settings).await?;
        let payments = self.held_out.len() as f64;
        let Objective::Prices(prices) = self.settings.objective else {
            anyhow::bail!("the built-in objective is a price");
        };
        let waited = replayed.delay_sum().as_secs_f64()
            + replayed.missed as f64 * self.settings.conditions.ending.delay_secs;
        let line = Line {
            cost: (prices.read * all_reads(&replayed) + prices.delay_second * waited) / payments,
            replayed,
        };
        let Line { replayed, cost } = &line;
        println!(
            "  {name:<36} {:>6.2} {:>8.2} {:>8.2} {:>8.2} {:>6.2} % {cost:>8.3}",
            all_reads(replayed) / payments,
            replayed.delay_mean().as_secs_f64(),
            replayed.delay_at(0.5).as_secs_f64(),
            replayed.delay_at(0.99).as_secs_f64(),
            100.0 * replayed.missed as f64 / self.held_out_counts.settled(),
        );
        if replayed.inconclusive > 0 {
            println!("    {} of its checks proved nothing", replayed.inconclusive);
        }
        Ok(line)
    }

    /// What was replayed of the repeats is what arithmetic on the counts says, so neither is measured wrongly:
    /// to the last digit, unless a check proved nothing.
    fn check_promise(&self, fitted: &Fitted, ours: &Line) -> anyhow::Result<()> {
        let payments = self.held_out.len() as f64;
        let promised = self.expected(&fitted.schedule);
        let past_repeats = payments - ours.replayed.delays.len() as f64;
        let ending = self.settings.conditions.ending.reads * past_repeats / payments;
        for (what, replayed, promised) in [
            ("reads", ours.replayed.reads as f64 / payments, promised.reads - ending),
            (
                "seconds of delay",
                ours.replayed.repeats_delay_mean().as_secs_f64(),
                promised.found_delay_secs,
            ),
        ] {
            let differs = (replayed / promised - 1.0).abs();
            let allowed = if ours.replayed.inconclusive == 0 { 1e-6 } else { 0.01 };
            anyhow::ensure!(differs < allowed, "{replayed} {what}, and {promised} by arithmetic");
        }
        Ok(())
    }

    fn expected(&self, schedule: &Schedule) -> Expected {
        let survival = Survival::measured(&self.held_out_counts);
        expected(schedule, &survival, &self.settings.conditions)
    }

    /// The fixed intervals that detect as early as the fitted schedule: a loop that misses nothing, because
    /// it polls until the authorization is over; and, what nobody has who writes a loop, one in the daemon,
    /// that ends where the fitted one does and leaves the rest to the same mandatory check. Returns how many
    /// times the loop reads as often.
    async fn against_equal_delay(&self, best: &Line, ours: &Line) -> anyhow::Result<f64> {
        let tenths = self.as_early_as(ours.replayed.delay_mean().as_secs_f64(), VALID_FOR)?;
        let name = format!("fixed {:.1} s, as early on average", f64::from(tenths) / 10.0);
        let fixed = self.line(&name, &every(tenths, VALID_FOR)?, false).await?;
        let times = |line: &Line| all_reads(&fixed.replayed) / all_reads(&line.replayed);
        println!(
            "  which reads {:.2} times as often as the fitted one, and {:.2} as the optimum (aim: {FEWER_READS_AIM})",
            times(ours),
            times(best),
        );
        let until = self.settings.repeat_for;
        let tenths = self.as_early_as(ours.replayed.repeats_delay_mean().as_secs_f64(), until)?;
        let name = format!("fixed {:.1} s in the daemon", f64::from(tenths) / 10.0);
        let in_daemon = self.line(&name, &every(tenths, until)?, true).await?;
        println!(
            "  which reads {:.2} times as often as the fitted one, and {:.2} as the optimum",
            all_reads(&in_daemon.replayed) / all_reads(&ours.replayed),
            all_reads(&in_daemon.replayed) / all_reads(&best.replayed),
        );
        Ok(times(ours))
    }

    /// The interval, in tenths of a second, whose mean delay is nearest to this one.
    fn as_early_as(&self, delay_secs: f64, until: Duration) -> anyhow::Result<u32> {
        let distance = |tenths: u32| {
            let schedule = every(tenths, until).ok()?;
            Some((tenths, (self.expected(&schedule).found_delay_secs - delay_secs).abs()))
        };
        let nearest = (10..400).filter_map(distance).min_by(|(_, a), (_, b)| a.total_cmp(b));
        nearest.map(|(tenths, _)| tenths).context("no interval fits the grid")
    }

    fn draw(&self, fitted: &Fitted) -> anyhow::Result<()> {
        let checks = fitted.schedule.ages_after(self.settings.conditions.visible_after);
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

/// First checks, repeats and mandatory checks.
fn all_reads(replayed: &Replayed) -> f64 {
    (replayed.reads + replayed.mandatory_reads) as f64
}

/// From raw samples to a schedule, at a price and for a budget.
fn time_the_fit(failed: &mut Vec<String>) -> anyhow::Result<()> {
    let mut random = Random(SEED);
    let latencies: Vec<Option<Duration>> = (0..FIT_SAMPLES)
        .map(|_| Shape::HeavyTail.sample(&mut random).map(Duration::from_secs_f64))
        .collect();
    println!("\nfitting {FIT_SAMPLES} samples, counting included");
    for (name, block_time, objective) in [
        ("at a price, 450 bins", 2.0, Objective::Prices(Prices { read: 1.0, delay_second: 0.5 })),
        ("for a budget, 450 bins", 2.0, Objective::Budget { reads: 5.0 }),
        ("for a budget, 1,000 bins", 0.9, Objective::Budget { reads: 5.0 }),
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
