//! The check times that cost least, exactly.
//!
//! With survival S and edges t, `V(i)` is what is still to be paid after a look at edge `i` found nothing,
//! times the chance of getting there. The next look is at some `j > i`: it is made by the share `S(i)`, and
//! whoever settles in between waits from its block until then:
//!
//! ```text
//! V(i) = min over j of  c1*S(i) + c2*[ (t(j)+lag)*(P(j)-P(i)) - (M(j)-M(i)) ] + V(j)
//! ```
//!
//! with `P = 1 - S`, and `M` the sum of share times latency. Instead of looking again the repeats may end:
//! then a payment waits for the full reconcile.
//!
//! Swapping `j` and `j'` between two rows `i < i'` changes the sum by `c2*(t(j')-t(j))*(P(i)-P(i'))`, which
//! is never positive: the costs are Monge, so the best next look never moves back as `i` grows. The search
//! for row `i` therefore ends where row `i + 1`'s did, and with the largest gap it stays in a window. That
//! is O(bins * gap) at worst, and in practice a few looks per row.

use super::{Grid, Survival};

/// What things cost.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Prices {
    /// One read of one payment.
    pub read: f64,
    /// One second between a payment's block and our knowing of it.
    pub delay_second: f64,
}

/// What a payment that is past its repeats has to expect.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ending {
    /// From its block until the full reconcile finds it, in seconds: half the period, for one that settles
    /// at any time in it.
    pub delay_secs: f64,
    /// How many reads it still costs.
    pub reads: f64,
}

/// What a schedule may not do, in bins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// The least gap between two checks; at least 1.
    pub gap_min: usize,
    /// The largest; at least `gap_min`.
    pub gap_max: usize,
    /// The repeats may not end before this edge.
    pub end_from: usize,
}

/// The best choice at every edge.
#[derive(Debug, Clone, PartialEq)]
pub struct Optimum {
    grid: Grid,
    next: Vec<Option<u16>>,
    value: Vec<f64>,
}

impl Optimum {
    /// The edge to look at after edge `i`; `None`: the repeats end there.
    pub fn next(&self, i: usize) -> Option<usize> {
        self.next.get(i).copied().flatten().map(usize::from)
    }

    /// `V(i)`: what is still to be paid from edge `i` on, times the chance of getting there.
    pub fn value(&self, i: usize) -> f64 {
        self.value[i.min(self.grid.bins())]
    }

    /// The choices, edge by edge, without the last.
    pub fn into_next(self) -> Vec<Option<u16>> {
        self.next
    }
}

/// The cost of looking at edge `j` next after edge `i`, times the chance of getting to `i`.
pub fn cost_of_gap(survival: &Survival, prices: Prices, lag_secs: f64, i: usize, j: usize) -> f64 {
    let settled = survival.at(i) - survival.at(j);
    let latencies = survival.latency_sum(j) - survival.latency_sum(i);
    let waited = (survival.grid().edge_secs(j) + lag_secs) * settled - latencies;
    prices.read * survival.at(i) + prices.delay_second * waited
}

/// The cost of ending the repeats after edge `i`, times the chance of getting there. Who settles beyond
/// the grid is left out: that costs the same whatever the schedule.
pub fn cost_of_ending(survival: &Survival, prices: Prices, ending: Ending, i: usize) -> f64 {
    let settled = survival.at(i) - survival.beyond_horizon();
    prices.read * ending.reads * survival.at(i) + prices.delay_second * ending.delay_secs * settled
}

/// The best choice at every edge, for payments whose blocks can be seen `lag_secs` after they are made.
/// Of equally good choices, the latest check, which is the one with the fewest reads.
pub fn optimise(
    survival: &Survival,
    prices: Prices,
    bounds: Bounds,
    ending: Ending,
    lag_secs: f64,
) -> Optimum {
    let grid = survival.grid();
    let bins = grid.bins();
    let gap_min = bounds.gap_min.max(1);
    let gap_max = bounds.gap_max.max(gap_min);
    let mut next: Vec<Option<u16>> = vec![None; bins];
    let mut value = vec![0.0; bins + 1];
    value[bins] = cost_of_ending(survival, prices, ending, bins);
    // Where the row after this one found its best next look: no earlier row looks further.
    let mut furthest = bins;
    for i in (0..bins).rev() {
        let first = (i + gap_min).min(bins);
        let last = (i + gap_max).min(furthest).max(first);
        let mut best = f64::INFINITY;
        let mut best_at = first;
        for (j, onward) in (first..=last).zip(&value[first..]) {
            let cost = cost_of_gap(survival, prices, lag_secs, i, j) + onward;
            if cost <= best {
                (best, best_at) = (cost, j);
            }
        }
        furthest = best_at;
        let end = cost_of_ending(survival, prices, ending, i);
        if i >= bounds.end_from && end <= best {
            value[i] = end;
        } else {
            value[i] = best;
            next[i] = u16::try_from(best_at).ok();
        }
    }
    Optimum { grid, next, value }
}
