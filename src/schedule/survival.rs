//! From counts to a distribution: the Kaplan–Meier estimate on a grid, mixed with a prior.
//!
//! In each bin, of those known to have come that far (at risk), the share that settled in it is its
//! hazard; the survival is the product of what remains. An open payment is at risk in the bins it lived
//! through and leaves without settling, so that it neither counts as settled nor is ignored.

use std::time::Duration;

use super::{Grid, LatencyCounts};

/// What is believed before enough was measured: a log-logistic latency and a share that never settles.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Prior {
    /// Half of those that settle do so within this.
    pub median: Duration,
    /// How steep: the larger, the lighter the tail. From 1 to 2 the tail is heavy.
    pub shape: f64,
    /// The share that never settles.
    pub never: f64,
    /// How many samples it counts as when nothing was measured.
    pub weight: f64,
    /// The number of samples at which it no longer counts; in between it fades.
    pub until: f64,
}

impl Prior {
    /// The built-in prior: half settle within two blocks and a second, one in twenty takes six times as
    /// long, one in ten never settles (payments become unknown for a reason).
    pub fn for_block_time(block_time: Duration) -> Self {
        Self {
            median: block_time * 2 + Duration::from_secs(1),
            shape: 1.6,
            never: 0.1,
            weight: 40.0,
            until: 200.0,
        }
    }

    /// No prior at all.
    pub const NONE: Self =
        Self { median: Duration::ZERO, shape: 1.0, never: 0.0, weight: 0.0, until: 0.0 };

    /// What it weighs beside `samples` measured ones.
    pub fn weight_beside(&self, samples: f64) -> f64 {
        if self.until <= 0.0 {
            return 0.0;
        }
        self.weight.max(0.0) * (1.0 - samples / self.until).clamp(0.0, 1.0)
    }

    /// As it weighs beside this many samples, whatever each of those weighs.
    #[must_use]
    pub fn beside(self, samples: f64) -> Self {
        Self { weight: self.weight_beside(samples), until: f64::INFINITY, ..self }
    }

    /// The share that has not settled by this age.
    fn survival(&self, age_secs: f64) -> f64 {
        let never = self.never.clamp(0.0, 1.0);
        let median = self.median.as_secs_f64();
        if median <= 0.0 {
            return never;
        }
        let odds = (age_secs / median).powf(self.shape.max(0.1));
        never + (1.0 - never) / (1.0 + odds)
    }
}

/// A distribution of settle latency on a grid.
#[derive(Debug, Clone, PartialEq)]
pub struct Survival {
    grid: Grid,
    /// By edge: the share that has not settled by then.
    survival: Vec<f64>,
    /// By edge: the sum, over those settled by then, of share times latency in seconds.
    latency_sum: Vec<f64>,
    /// Of those that outlive the grid, the share that was seen to settle later.
    late_share: f64,
}

impl Survival {
    /// The estimate from counts alone.
    pub fn measured(counts: &LatencyCounts) -> Self {
        Self::estimate(counts, &Prior::NONE)
    }

    /// The estimate from counts and a prior, which fades as samples come in.
    pub fn estimate(counts: &LatencyCounts, prior: &Prior) -> Self {
        let grid = counts.grid();
        let bins = grid.bins();
        let prior_weight = prior.weight_beside(counts.samples());
        let prior_at = |i: usize| prior_weight * prior.survival(grid.edge_secs(i));

        let mut settled = Vec::with_capacity(bins);
        let mut mean = Vec::with_capacity(bins);
        for bin in counts.bins() {
            let believed = prior_at(bin.index) - prior_at(bin.index + 1);
            let middle = (grid.edge_secs(bin.index) + grid.edge_secs(bin.index + 1)) / 2.0;
            let weight = bin.settled + believed;
            settled.push(weight);
            mean.push(if weight > 0.0 {
                (bin.latency_secs + believed * middle) / weight
            } else {
                middle
            });
        }
        // Those at risk, summed from the end, so that "everybody settles here" comes out exact.
        let outlived = counts.late() + counts.never() + prior_at(bins);
        let mut at_risk = vec![0.0; bins];
        let mut later = outlived;
        for k in (0..bins).rev() {
            later += settled[k] + counts.open_after(k + 1);
            at_risk[k] = later;
        }

        let mut survival = Vec::with_capacity(bins + 1);
        let mut latency_sum = Vec::with_capacity(bins + 1);
        let (mut alive, mut sum) = (1.0, 0.0);
        survival.push(alive);
        latency_sum.push(sum);
        for k in 0..bins {
            let hazard =
                if at_risk[k] > 0.0 { (settled[k] / at_risk[k]).clamp(0.0, 1.0) } else { 0.0 };
            let before = alive;
            alive *= 1.0 - hazard;
            sum += (before - alive) * mean[k];
            survival.push(alive);
            latency_sum.push(sum);
        }
        let ended = outlived + counts.open_after(bins);
        let late_share = if ended > 0.0 { (counts.late() / ended).min(1.0) } else { 0.0 };
        Self { grid, survival, latency_sum, late_share }
    }

    /// The grid.
    pub fn grid(&self) -> Grid {
        self.grid
    }

    /// The share that has not settled by edge `i`; beyond the grid, as at its end.
    pub fn at(&self, i: usize) -> f64 {
        self.survival[i.min(self.grid.bins())]
    }

    /// The share that settles in bin `k`.
    pub fn settling_in(&self, k: usize) -> f64 {
        self.at(k) - self.at(k + 1)
    }

    /// The sum, over those settled by edge `i`, of share times latency in seconds.
    pub fn latency_sum(&self, i: usize) -> f64 {
        self.latency_sum[i.min(self.grid.bins())]
    }

    /// Share settled by an age, and its sum of share times latency, between edges by straight lines.
    pub fn settled_by(&self, age: Duration) -> (f64, f64) {
        let whole = self.grid.whole_bins(age);
        let into = age.saturating_sub(self.grid.edge(whole)).as_secs_f64();
        let part = (into / self.grid.step().as_secs_f64()).min(1.0);
        let share = self.at(whole) - part * (self.at(whole) - self.at(whole + 1));
        let sum = self.latency_sum(whole)
            + part * (self.latency_sum(whole + 1) - self.latency_sum(whole));
        (1.0 - share, sum)
    }

    /// The share that does not settle within the horizon.
    pub fn beyond_horizon(&self) -> f64 {
        self.at(self.grid.bins())
    }

    /// The share that never settles: beyond the horizon, and not seen to settle later.
    pub fn never(&self) -> f64 {
        self.beyond_horizon() * (1.0 - self.late_share)
    }

    /// The age by which this share of all payments has settled, between edges by straight lines; `None`
    /// when fewer settle within the horizon.
    pub fn quantile(&self, share: f64) -> Option<Duration> {
        let left = 1.0 - share;
        let k = (0..self.grid.bins()).find(|k| self.at(k + 1) <= left)?;
        let settling = self.settling_in(k);
        let part =
            if settling > 0.0 { ((self.at(k) - left) / settling).clamp(0.0, 1.0) } else { 0.0 };
        Some(self.grid.edge(k) + self.grid.step().mul_f64(part))
    }

    /// The distribution of those that have not settled by edge `i`; the same when nobody is left.
    #[cfg(test)]
    #[must_use]
    pub(super) fn conditioned(&self, i: usize) -> Self {
        let i = i.min(self.grid.bins());
        let alive = self.at(i);
        if alive <= 0.0 {
            return self.clone();
        }
        let survival = self.survival.iter().map(|s| (s / alive).min(1.0)).collect();
        let before = self.latency_sum(i);
        let latency_sum =
            self.latency_sum.iter().map(|sum| ((sum - before) / alive).max(0.0)).collect();
        Self { grid: self.grid, survival, latency_sum, late_share: self.late_share }
    }
}
