//! The schedules people write by hand.

use std::time::Duration;

use anyhow::Context;
use reconciled::schedule::{AgeTable, BINS_MAX, FitSettings, Grid, Schedule};
use reconciled::sim::replay::{BLOCK_TIME, VALID_FOR};

pub(crate) const GIVES_UP: &str = "every 2 s for 30 s, then give up";

/// The schedules people write, each until no authorization can land any more, unless it gives up before.
pub(crate) fn by_hand() -> anyhow::Result<[(&'static str, Schedule); 6]> {
    let backoff = |factor: f64, cap: f64| {
        let mut gap = 2.0;
        move || {
            let this = gap;
            gap = f64::min(gap * factor, cap);
            this
        }
    };
    Ok([
        ("fixed 2 s", every(20, VALID_FOR)?),
        ("fixed 4 s", every(40, VALID_FOR)?),
        ("fixed 10 s", every(100, VALID_FOR)?),
        ("exponential x1.5, at most 30 s", at_ages(1_000, backoff(1.5, 30.0), VALID_FOR)?),
        ("exponential x2", at_ages(1_000, backoff(2.0, f64::INFINITY), VALID_FOR)?),
        (GIVES_UP, every(20, Duration::from_secs(30))?),
    ])
}

/// Checks every so many tenths of a second.
pub(crate) fn every(tenths: u32, until: Duration) -> anyhow::Result<Schedule> {
    // Steps as fine as a table of all that time may have, of which an interval is a whole number.
    let interval_ms = u64::from(tenths) * 100;
    let finest_ms = u64::try_from(VALID_FOR.as_millis())?.div_ceil(1_000);
    let step_ms = (finest_ms..=interval_ms).find(|ms| interval_ms.is_multiple_of(*ms));
    at_ages(
        step_ms.context("intervals are longer than a step")?,
        || f64::from(tenths) / 10.0,
        until,
    )
}

/// Checks with these gaps, in seconds, until the first at or past `until`. As a table, because a list of
/// offsets is bounded, and polling is not.
pub(crate) fn at_ages(
    step_ms: u64,
    mut gap: impl FnMut() -> f64,
    until: Duration,
) -> anyhow::Result<Schedule> {
    let grid = Grid::new(Duration::from_millis(step_ms), BINS_MAX)?;
    let mut next: Vec<Option<u16>> = vec![None; grid.bins()];
    let (mut age, mut filled) = (0.0, 0_usize);
    while age < until.as_secs_f64() {
        age += gap();
        let edge =
            ((age * 1_000.0 / step_ms as f64).round() as usize).clamp(filled + 1, grid.bins());
        next[filled..edge].fill(Some(u16::try_from(edge)?));
        filled = edge;
        if filled == grid.bins() {
            break;
        }
    }
    let visible_after = FitSettings::for_block_time(BLOCK_TIME).conditions.visible_after;
    Ok(Schedule::by_age(AgeTable::new(grid, visible_after, next)?))
}
