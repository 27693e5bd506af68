//! `[schedule]`: what settle latency is sampled for, and what schedules are fitted for.

use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use croner::errors::CronError;
use croner::parser::{CronParser, Seconds};
use serde::Deserialize;

use super::{ConfigError, Span, bad, secs};
use crate::domain::PaidAfter;
use crate::schedule::{
    AdoptionRule, FitSettings, Grid, JITTER_SHARE_MAX, Objective, Pacing, Prices, Prior, Timing,
    visible_after,
};

section! {
    /// `[schedule]`
    ScheduleSection {
        /// Whether latency is sampled, and schedules fitted and followed.
        enabled: bool = true,
        /// Whether a better schedule is taken into use by itself.
        auto_adopt: bool = true,
        /// How often settled payments are sampled.
        sample_every: Span = secs(10),
        /// How long a payment must have been settled to be sampled.
        settle_lag: Span = secs(120),
        /// How often schedules are fitted.
        every: Span = secs(3_600),
        /// How far back samples are used.
        window: Span = secs(14 * 24 * 3_600),
        /// A sample this old counts half.
        half_life: Span = secs(3 * 24 * 3_600),
        /// Up to which age latencies are measured.
        horizon: Span = secs(15 * 60),
        /// Below this many samples a built-in belief is mixed in.
        minimum_samples: u32 = 200,
        /// Held-out samples that a comparison needs.
        minimum_held_out: u32 = 50,
        /// The price of a read.
        read_price: f64 = 1.0,
        /// The price of a second until a settlement is noticed.
        delay_price: f64 = 0.5,
        /// Reads per payment, instead of the prices.
        reads_budget: Option<f64> = None,
        /// The longest time between two repeats.
        gap_max: Span = secs(60),
        /// The repeats do not end before this age.
        repeat_for: Span = secs(5 * 60),
        /// What repeats are rounded up to.
        tick: Span = secs(0),
        /// As long as they are at most this much later.
        tick_delay_max: Span = secs(0),
        /// The share of a gap by which a repeat may come later.
        jitter: f64 = 0.0,
    }
}

/// The settings' own names, in the words of this section.
const KEYS: [(&str, &str); 4] = [
    ("price of a read", "read_price"),
    ("price of a second", "delay_price"),
    ("budget of reads", "reads_budget"),
    ("gap_max", "gap_max"),
];

impl ScheduleSection {
    /// Checks what does not depend on a chain.
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        for (key, span, least) in [
            ("sample_every", self.sample_every, Duration::from_millis(100)),
            ("every", self.every, Duration::from_secs(1)),
            ("window", self.window, Duration::from_secs(3_600)),
            ("half_life", self.half_life, Duration::from_secs(60)),
            ("horizon", self.horizon, Duration::from_secs(10)),
        ] {
            if span.0 < least {
                let least = humantime::format_duration(least);
                return Err(bad(
                    format!("schedule.{key}"),
                    format!("must be at least \"{least}\""),
                ));
            }
        }
        if !(0.0..=JITTER_SHARE_MAX).contains(&self.jitter) {
            let problem = format!("must be from 0 to {JITTER_SHARE_MAX}");
            return Err(bad("schedule.jitter", problem));
        }
        Ok(())
    }

    /// How repeats are shifted.
    pub(super) fn pacing(&self) -> Pacing {
        Pacing {
            jitter_share: self.jitter,
            tick: self.tick.0,
            tick_delay_max: self.tick_delay_max.0,
        }
    }

    /// When a fit replaces the schedule in use.
    pub fn adoption_rule(&self) -> AdoptionRule {
        AdoptionRule { samples_min: self.minimum_held_out.into(), ..AdoptionRule::default() }
    }

    /// What is counted on, and what is fitted for, on a chain with blocks in this rhythm.
    pub(super) fn for_chain(
        &self,
        block_time: Duration,
        paid_after: PaidAfter,
        timing: &Timing,
        reconcile_cron: &str,
    ) -> Result<(Grid, FitSettings), ConfigError> {
        let usual = FitSettings::for_block_time(block_time);
        let prices = Prices { read: self.read_price, delay_second: self.delay_price };
        let mut settings = FitSettings {
            objective: self
                .reads_budget
                .map_or(Objective::Prices(prices), |reads| Objective::Budget { reads }),
            gap_max: self.gap_max.0,
            repeat_for: self.repeat_for.0,
            prior: Prior { until: self.minimum_samples.into(), ..usual.prior },
            ..usual
        };
        settings.conditions.visible_after = visible_after(paid_after, block_time, timing);
        settings.conditions.ending.delay_secs = mean_wait_secs(reconcile_cron)?;
        let grid = Grid::covering(block_time, self.horizon.0);
        settings.check(grid).map_err(|error| {
            let key = KEYS.iter().find(|(field, _)| *field == error.field);
            let key = key.map_or(error.field, |(_, key)| key);
            bad(format!("schedule.{key}"), error.problem)
        })?;
        if self.repeat_for.0 > grid.horizon() {
            let horizon = humantime::format_duration(grid.horizon());
            let problem = format!("must be at most the horizon, here \"{horizon}\"");
            return Err(bad("schedule.repeat_for", problem));
        }
        Ok((grid, settings))
    }
}

/// A cron expression is looked at for a week at least, so that its nights and its Sundays are seen.
const SPAN_MIN: TimeDelta = TimeDelta::weeks(1);
/// And for at least so many gaps: more than a year of daily ticks.
const GAPS_MIN: usize = 400;
/// But not for more than these: a week of a tick every ten seconds. The pauses of one that is denser than that count
/// only as far as these reach.
const GAPS_MAX: usize = 60_480;

/// How long a moment that may be any waits for the next tick of the full reconcile, on average. Long gaps hold
/// more moments than short ones, so it is E[gap^2] / (2 E[gap]).
fn mean_wait_secs(cron: &str) -> Result<f64, ConfigError> {
    let refused = |error: CronError| {
        let problem = format!(
            "{cron:?} is not a cron expression with seconds, such as \"0 */10 * * * *\": {error}"
        );
        bad("reconcile.cron", problem)
    };
    // As the scheduler reads it.
    let parser = CronParser::builder().seconds(Seconds::Required).dom_and_dow(true).build();
    let cron = parser.parse(cron).map_err(refused)?;
    // From any fixed moment: what is asked is how far the ticks are apart.
    let first = cron.find_next_occurrence(&DateTime::<Utc>::UNIX_EPOCH, true).map_err(refused)?;
    let mut last = first;
    let (mut sum, mut squares) = (0.0, 0.0);
    for (gaps, next) in cron.iter_after(first).take(GAPS_MAX).enumerate() {
        if gaps >= GAPS_MIN && last - first >= SPAN_MIN {
            break;
        }
        let gap = next.signed_duration_since(last).as_seconds_f64();
        sum += gap;
        squares += gap * gap;
        last = next;
    }
    if sum > 0.0 {
        Ok(squares / (2.0 * sum))
    } else {
        Err(bad("reconcile.cron", "never comes again"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wait_for_the_full_reconcile_is_half_of_where_a_moment_falls() {
        for (cron, wait) in [
            ("0 */10 * * * *", 300.0),
            ("0 0 3 * * *", 43_200.0),
            // Ten minutes and fifty, by turns: five sixths of all moments are in the longer one.
            ("0 0,10 * * * *", (10.0 * 10.0 + 50.0 * 50.0) / 60.0 / 2.0 * 60.0),
            // Every minute by day, and a night of thirteen hours: most of the wait is its.
            ("0 * 8-18 * * *", (659.0 * 60.0 * 60.0 + 46_860.0 * 46_860.0) / 86_400.0 / 2.0),
        ] {
            assert!((mean_wait_secs(cron).unwrap() - wait).abs() < 1e-6, "{cron}");
        }
        for cron in ["", "* * * *", "often", "0 0 0 30 2 *"] {
            let refused = mean_wait_secs(cron).unwrap_err().to_string();
            assert!(refused.contains("reconcile.cron"), "{refused}");
        }
    }
}
