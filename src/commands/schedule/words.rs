//! Durations and figures, as both pictures and changes put them.

use std::time::Duration;

pub(super) fn figures(reads: f64, delay_secs: f64) -> String {
    format!("{reads:.2} reads per payment, {delay_secs:.2} s of delay")
}

pub(super) fn seconds(ages: &[Duration]) -> Vec<f64> {
    ages.iter().map(Duration::as_secs_f64).collect()
}

pub(super) fn ages(ages: &[Duration]) -> String {
    let ages: Vec<String> = ages.iter().map(|age| short(*age)).collect();
    if ages.is_empty() { "none".to_owned() } else { ages.join(" ") }
}

/// A duration for people, to a tenth of a second.
pub(super) fn short(duration: Duration) -> String {
    let secs = duration.as_secs_f64();
    if secs < 60.0 {
        let text = format!("{secs:.1}");
        return format!("{}s", text.strip_suffix(".0").unwrap_or(&text));
    }
    humantime::format_duration(Duration::from_secs(duration.as_secs())).to_string().replace(' ', "")
}
