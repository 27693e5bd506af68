//! A fitted policy: for every age, the age of the next check.
//!
//! The optimiser's choice at an age does not depend on how a payment got there, so the whole schedule is
//! this table, and it is right for every payment whatever its age when it was found.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Grid;

/// For every edge of a grid, the edge to look at next, or that the repeats are over.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "StoredTable", into = "StoredTable")]
pub struct AgeTable {
    grid: Grid,
    visible_after: Duration,
    next: Vec<Option<u16>>,
}

/// What is wrong with a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    /// Every edge but the last needs an entry.
    #[error("the runs of a table must start at 0, rise, and stay inside the grid")]
    Runs,
    /// A check must come after the one before it.
    #[error("the next check after edge {at} must be a later edge of the grid")]
    NotLater {
        /// The edge whose entry is wrong.
        at: usize,
    },
    /// The lag must be short enough to compute with.
    #[error("visible_after must be at most a day")]
    VisibleAfter,
}

const VISIBLE_AFTER_MAX: Duration = Duration::from_secs(24 * 3_600);

impl AgeTable {
    /// A table of the next edge for every edge of `grid` but the last.
    ///
    /// `visible_after` is how long a block takes until a check can see it: checks are placed that much
    /// later than their edge, so that none misses the block it was placed for.
    pub fn new(
        grid: Grid,
        visible_after: Duration,
        next: Vec<Option<u16>>,
    ) -> Result<Self, TableError> {
        if next.len() != grid.bins() {
            return Err(TableError::Runs);
        }
        if visible_after > VISIBLE_AFTER_MAX {
            return Err(TableError::VisibleAfter);
        }
        let visible_after =
            Duration::from_millis(u64::try_from(visible_after.as_millis()).unwrap_or(0));
        for (at, next) in next.iter().enumerate() {
            if next.is_some_and(|n| usize::from(n) <= at || usize::from(n) > grid.bins()) {
                return Err(TableError::NotLater { at });
            }
        }
        Ok(Self { grid, visible_after, next })
    }

    /// The grid.
    pub fn grid(&self) -> Grid {
        self.grid
    }

    /// How long a block takes until a check can see it.
    pub fn visible_after(&self) -> Duration {
        self.visible_after
    }

    /// The age from which on there are no repeats.
    pub fn horizon(&self) -> Duration {
        self.grid.horizon() + self.visible_after
    }

    /// The age of the next check of a payment that was looked at when it was this old.
    pub fn next_age(&self, age: Duration) -> Option<Duration> {
        let edge = self.grid.nearest_edge(age.saturating_sub(self.visible_after));
        let next = (*self.next.get(edge)?)?;
        Some(self.grid.edge(next.into()) + self.visible_after)
    }

    /// The most checks any payment gets, its first one not counted.
    pub fn checks_max(&self) -> usize {
        let mut longest = vec![0_usize; self.next.len() + 1];
        for at in (0..self.next.len()).rev() {
            longest[at] = self.next[at].map_or(0, |next| 1 + longest[usize::from(next)]);
        }
        longest.into_iter().max().unwrap_or(0)
    }
}

/// The table by runs of equal entries: `[first edge, next edge]`, `null` for "no more".
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoredTable {
    grid: Grid,
    visible_after_ms: u64,
    next: Vec<(u16, Option<u16>)>,
}

impl From<AgeTable> for StoredTable {
    fn from(table: AgeTable) -> Self {
        let mut runs: Vec<(u16, Option<u16>)> = Vec::new();
        for (at, next) in (0_u16..).zip(&table.next) {
            if runs.last().is_none_or(|(_, last)| last != next) {
                runs.push((at, *next));
            }
        }
        Self {
            grid: table.grid,
            visible_after_ms: u64::try_from(table.visible_after.as_millis()).unwrap_or(u64::MAX),
            next: runs,
        }
    }
}

impl TryFrom<StoredTable> for AgeTable {
    type Error = TableError;

    fn try_from(stored: StoredTable) -> Result<Self, TableError> {
        let bins = stored.grid.bins();
        let starts_well = stored.next.first().is_some_and(|(first, _)| *first == 0);
        let rises = stored.next.windows(2).all(|pair| pair[0].0 < pair[1].0);
        let inside = stored.next.last().is_some_and(|(last, _)| usize::from(*last) < bins);
        if !(starts_well && rises && inside) {
            return Err(TableError::Runs);
        }
        let mut next = Vec::with_capacity(bins);
        for (i, (_, entry)) in stored.next.iter().enumerate() {
            let until = stored.next.get(i + 1).map_or(bins, |(first, _)| usize::from(*first));
            next.resize(until, *entry);
        }
        Self::new(stored.grid, Duration::from_millis(stored.visible_after_ms), next)
    }
}
