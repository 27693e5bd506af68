//! Settle latencies, counted.
//!
//! What is kept is one count and one sum per bin of a [`Grid`], whatever the number of samples. Counts are
//! weights: a sample counts 1 when it is fresh and less as it ages.
//!
//! A payment that is still open is an observation too: it has survived until its age (right-censored).
//! Open payments are a snapshot: add them to a copy made for one fit, never to what is kept, or each would
//! be counted again at every look.

use std::time::Duration;

use super::Grid;

/// Settle latencies of one rail and chain, on a grid.
#[derive(Debug, Clone, PartialEq)]
pub struct LatencyCounts {
    grid: Grid,
    settled: Vec<f64>,
    latency_secs: Vec<f64>,
    /// By the number of whole bins survived; the last is "all of them".
    open: Vec<f64>,
    late: f64,
    never: f64,
}

/// What one bin holds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bin {
    /// The bin's number.
    pub index: usize,
    /// The weight of the payments that settled in it.
    pub settled: f64,
    /// The sum of their latencies, weighted, in seconds.
    pub latency_secs: f64,
}

impl LatencyCounts {
    /// Nothing counted yet.
    pub fn new(grid: Grid) -> Self {
        Self {
            grid,
            settled: vec![0.0; grid.bins()],
            latency_secs: vec![0.0; grid.bins()],
            open: vec![0.0; grid.bins() + 1],
            late: 0.0,
            never: 0.0,
        }
    }

    /// The grid.
    pub fn grid(&self) -> Grid {
        self.grid
    }

    /// A payment that settled after this long.
    pub fn add_latency(&mut self, latency: Duration, weight: f64) {
        let weight = weight_of(weight);
        match self.grid.bin_of(latency) {
            Some(bin) => {
                self.settled[bin] += weight;
                self.latency_secs[bin] += weight * latency.as_secs_f64();
            }
            None => self.late += weight,
        }
    }

    /// A bin as it was stored: `settled` payments with latencies that sum up to `latency_secs`. The mean is
    /// brought inside the bin; a bin beyond the horizon counts as late.
    pub fn add_bin(&mut self, bin: Bin) {
        let weight = weight_of(bin.settled);
        if bin.index >= self.grid.bins() {
            self.late += weight;
            return;
        }
        let (first, last) = (self.grid.edge_secs(bin.index), self.grid.edge_secs(bin.index + 1));
        let sum = if bin.latency_secs.is_finite() { bin.latency_secs } else { 0.0 };
        self.settled[bin.index] += weight;
        self.latency_secs[bin.index] += sum.clamp(weight * first, weight * last);
    }

    /// Payments that settled beyond the horizon, as stored.
    pub fn add_late(&mut self, weight: f64) {
        self.late += weight_of(weight);
    }

    /// A payment that is still open at this age. It is known to have survived the bins it lived through
    /// whole, and says nothing about the one it is in.
    pub fn add_open(&mut self, age: Duration, weight: f64) {
        self.open[self.grid.whole_bins(age)] += weight_of(weight);
    }

    /// A payment that was failed and has not settled since: it survives every age.
    pub fn add_never(&mut self, weight: f64) {
        self.never += weight_of(weight);
    }

    /// Every bin, in order.
    pub fn bins(&self) -> impl Iterator<Item = Bin> + '_ {
        let both = self.settled.iter().zip(&self.latency_secs).enumerate();
        both.map(|(index, (settled, latency_secs))| Bin {
            index,
            settled: *settled,
            latency_secs: *latency_secs,
        })
    }

    /// The weight of the payments that settled within the horizon.
    pub fn settled(&self) -> f64 {
        self.settled.iter().sum()
    }

    /// The weight of those that settled later than that.
    pub fn late(&self) -> f64 {
        self.late
    }

    /// The weight of those that were failed and have not settled since.
    pub fn never(&self) -> f64 {
        self.never
    }

    /// The weight of those still open, of any age.
    pub fn open(&self) -> f64 {
        self.open.iter().sum()
    }

    /// The weight of those still open after `whole` bins of their life; the last is "all of them".
    pub fn open_after(&self, whole: usize) -> f64 {
        self.open.get(whole).copied().unwrap_or(0.0)
    }

    /// The weight of the payments whose end is known: the sample size of a fit.
    pub fn samples(&self) -> f64 {
        self.settled() + self.late + self.never
    }
}

/// A weight that makes sense: not below zero, and a number.
fn weight_of(weight: f64) -> f64 {
    if weight.is_finite() { weight.max(0.0) } else { 0.0 }
}
