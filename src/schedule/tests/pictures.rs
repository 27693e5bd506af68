//! The plots show what is there.

use super::support::*;
use crate::schedule::{FitSettings, LatencyCounts, Plot, Survival, fit};

fn plot<T>(counts: &LatencyCounts, look: impl FnOnce(Plot<'_>) -> T) -> T {
    let fitted = fit(counts, &FitSettings::for_block_time(secs(2.0))).unwrap();
    let checks = fitted.schedule.ages_after(secs(0.0));
    look(Plot { title: "x402 <8453> & more", survival: &fitted.survival, checks: &checks })
}

#[test]
fn a_terminal_shows_bars_over_the_checks() {
    let counts = counts(base(), &evenly(500).map(|s| 2.0 + 6.0 * s).collect::<Vec<_>>());
    let text = plot(&counts, |plot| plot.text(60, 8));
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 1 + 8 + 2, "{text}");
    assert!(lines[1].contains('█') && lines[1].contains('%'), "{text}");
    assert!(lines[9].matches('┴').count() >= 5, "{text}");
    assert!(lines[10].contains("10s") && lines[10].contains("5m"), "{text}");
    assert!(lines.iter().all(|line| line.chars().count() <= 60 + 16), "{text}");
}

#[test]
fn nothing_measured_can_be_drawn_too() {
    let survival = Survival::measured(&LatencyCounts::new(base()));
    let empty = Plot { title: "nothing", survival: &survival, checks: &[] };
    assert!(!empty.text(40, 5).contains('█'));
    assert!(empty.svg().ends_with("</svg>\n"));
}

#[test]
fn a_picture_is_well_formed_and_has_a_tick_per_check() {
    let counts = counts(base(), &[3.0, 4.0, 50.0]);
    let (svg, checks) = plot(&counts, |plot| (plot.svg(), plot.checks.len()));
    assert_eq!(svg.matches("<line ").count(), checks + 1, "{svg}");
    assert!(svg.contains("x402 &lt;8453&gt; &amp; more"));
    for tag in ["svg", "text", "tspan"] {
        let (opened, closed) =
            (svg.matches(&format!("<{tag}")).count(), svg.matches(&format!("</{tag}>")).count());
        assert_eq!(opened, closed, "{tag}");
    }
    assert!(!svg.contains("NaN") && !svg.contains("inf"));
}
