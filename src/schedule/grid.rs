//! The grid of ages on which latency is counted and checks are placed.
//!
//! An age is a time since the broadcast. Edge `i` is at `i * step`; bin `k` holds the latencies after edge
//! `k` up to and including edge `k + 1`, so that a look at edge `j` sees exactly the bins below `j`. A
//! latency of zero is in bin 0.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The most bins a grid may have: what bounds the memory of counts, tables and the optimiser.
pub const BINS_MAX: usize = 1_024;
/// The shortest step. Times are kept in milliseconds, and no chain's blocks come faster.
const STEP_MIN: Duration = Duration::from_millis(50);
/// The longest step [`Grid::covering`] chooses: with slow blocks, a finer grid than theirs still pays,
/// because broadcasts fall anywhere between two blocks.
const STEP_MAX: Duration = Duration::from_secs(2);

/// Ages in equal steps, up to a horizon.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "StoredGrid", into = "StoredGrid")]
pub struct Grid {
    step_ms: u32,
    bins: u16,
}

/// What is wrong with a grid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum GridError {
    /// The step is too short, too long, or no whole number of milliseconds.
    #[error("the step of a grid must be whole milliseconds, from 50 ms to an hour")]
    Step,
    /// Too few or too many bins.
    #[error("a grid must have 1 to {BINS_MAX} bins")]
    Bins,
}

impl Grid {
    /// A grid of `bins` steps.
    pub fn new(step: Duration, bins: usize) -> Result<Self, GridError> {
        let whole = step.subsec_nanos().is_multiple_of(1_000_000);
        if !whole || step < STEP_MIN || step > Duration::from_secs(3_600) {
            return Err(GridError::Step);
        }
        let bins = u16::try_from(bins).map_err(|_| GridError::Bins)?;
        if bins == 0 || usize::from(bins) > BINS_MAX {
            return Err(GridError::Bins);
        }
        let step_ms = u32::try_from(step.as_millis()).map_err(|_| GridError::Step)?;
        Ok(Self { step_ms, bins })
    }

    /// The grid for a chain: steps of its block time, at most 2 s, or coarser where [`BINS_MAX`] of them
    /// would not reach `horizon`. Reaches at least `horizon`, for horizons up to 42 days.
    pub fn covering(block_time: Duration, horizon: Duration) -> Self {
        let ms = |d: Duration| u64::try_from(d.as_millis()).unwrap_or(u64::MAX);
        let most = BINS_MAX as u64;
        let horizon_ms = ms(horizon).clamp(1, most * 3_600_000);
        let finest = ms(block_time).clamp(ms(STEP_MIN), ms(STEP_MAX));
        // A multiple of the block time, so that steps and blocks keep in phase.
        let step = horizon_ms.div_ceil(most).div_ceil(finest).max(1) * finest;
        let step = step.min(3_600_000);
        let bins = horizon_ms.div_ceil(step).clamp(1, most);
        Self {
            step_ms: u32::try_from(step).unwrap_or(3_600_000),
            bins: u16::try_from(bins).unwrap_or(1),
        }
    }

    /// From one edge to the next.
    pub fn step(self) -> Duration {
        Duration::from_millis(self.step_ms.into())
    }

    /// How many bins there are.
    pub fn bins(self) -> usize {
        self.bins.into()
    }

    /// The age at which the grid ends.
    pub fn horizon(self) -> Duration {
        self.edge(self.bins())
    }

    /// The age at edge `i`.
    pub fn edge(self, i: usize) -> Duration {
        let i = u64::try_from(i).unwrap_or(u64::MAX);
        Duration::from_millis(i.saturating_mul(self.step_ms.into()))
    }

    /// The age at edge `i`, in seconds.
    pub fn edge_secs(self, i: usize) -> f64 {
        self.edge(i).as_secs_f64()
    }

    /// The bin of a latency; `None` beyond the horizon.
    pub fn bin_of(self, latency: Duration) -> Option<usize> {
        let nanos = latency.as_nanos();
        let step = self.step().as_nanos();
        let bin = usize::try_from(nanos.div_ceil(step).saturating_sub(1)).ok()?;
        (bin < self.bins()).then_some(bin)
    }

    /// How many whole bins somebody of this age has lived through, at most all.
    pub fn whole_bins(self, age: Duration) -> usize {
        let whole = age.as_nanos() / self.step().as_nanos();
        usize::try_from(whole).unwrap_or(usize::MAX).min(self.bins())
    }

    /// The edge nearest to an age; halves go up. May lie beyond the horizon.
    pub fn nearest_edge(self, age: Duration) -> usize {
        let step = self.step().as_nanos();
        usize::try_from((age.as_nanos() + step / 2) / step).unwrap_or(usize::MAX)
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoredGrid {
    step_ms: u64,
    bins: usize,
}

impl TryFrom<StoredGrid> for Grid {
    type Error = GridError;

    fn try_from(stored: StoredGrid) -> Result<Self, GridError> {
        Self::new(Duration::from_millis(stored.step_ms), stored.bins)
    }
}

impl From<Grid> for StoredGrid {
    fn from(grid: Grid) -> Self {
        Self { step_ms: grid.step_ms.into(), bins: grid.bins() }
    }
}
