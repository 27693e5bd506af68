//! A distribution of settle latency with its check times, as text for a terminal and as SVG.
//!
//! The age axis is logarithmic beyond the first few steps, because most payments settle within seconds and
//! the horizon is minutes away. Each bar is the share of payments that settles within its column.

use std::fmt::Write as _;
use std::time::Duration;

use super::Survival;

/// What is drawn.
#[derive(Debug, Clone, Copy)]
pub struct Plot<'a> {
    /// Above it.
    pub title: &'a str,
    /// The distribution.
    pub survival: &'a Survival,
    /// The ages of the checks.
    pub checks: &'a [Duration],
}

/// The ages that may get a label, in seconds.
const LABELS: [u32; 16] =
    [0, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1_200, 1_800, 3_600, 7_200, 14_400];
/// Columns of bars in an SVG.
const SVG_COLUMNS: usize = 96;
const SVG_WIDTH: f64 = 860.0;
const SVG_HEIGHT: f64 = 400.0;
const SVG_LEFT: f64 = 64.0;
const SVG_RIGHT: f64 = 56.0;
const SVG_TOP: f64 = 44.0;
const SVG_BOTTOM: f64 = 330.0;

impl Plot<'_> {
    /// Text of `width` columns and `height` rows of bars, at least 20 and 3, with the axis below.
    pub fn text(&self, width: usize, height: usize) -> String {
        const EIGHTHS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
        let (width, height) = (width.clamp(20, 400), height.clamp(3, 100));
        let bars = self.bars(width);
        let highest = highest(&bars);
        let mut out = String::new();
        let _ = writeln!(out, "{}", self.title);
        for row in (0..height).rev() {
            let line: String = bars
                .iter()
                .map(|bar| {
                    let eighths = (bar / highest * height as f64 * 8.0).ceil() as usize;
                    EIGHTHS[eighths.saturating_sub(row * 8).min(8)]
                })
                .collect();
            let _ = match row {
                r if r + 1 == height => writeln!(out, "{:>6} ┤{line}", percent(highest)),
                _ => writeln!(out, "{:>6} │{line}", ""),
            };
        }
        let mut checks = vec!['─'; width];
        for age in self.checks {
            checks[self.column(*age, width)] = '┴';
        }
        let _ = writeln!(out, "checks └{}", checks.into_iter().collect::<String>());
        let mut labels = vec![' '; width + 8];
        let mut free_from = 0;
        for (age, label) in self.labels() {
            let at = self.column(age, width);
            if at < free_from {
                continue;
            }
            labels.splice(at..at + label.len(), label.chars());
            free_from = at + label.len() + 1;
        }
        let _ = writeln!(out, "{:>7} {}", "age", labels.into_iter().collect::<String>().trim_end());
        out
    }

    /// A picture that stands by itself: bars, the share still open as a line, and a tick per check.
    pub fn svg(&self) -> String {
        let plot_width = SVG_WIDTH - SVG_LEFT - SVG_RIGHT;
        let plot_height = SVG_BOTTOM - SVG_TOP;
        let x = |age: Duration| SVG_LEFT + self.place(age) * plot_width;
        let y = |share: f64| SVG_BOTTOM - share * plot_height;
        let bars = self.bars(SVG_COLUMNS);
        let highest = highest(&bars);
        let column = plot_width / SVG_COLUMNS as f64;
        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {SVG_WIDTH} {SVG_HEIGHT}\" \
             font-family=\"sans-serif\" font-size=\"12\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n\
             <text x=\"{SVG_LEFT}\" y=\"24\" font-size=\"15\">{}</text>\n",
            escaped(self.title)
        );
        for (i, bar) in bars.iter().enumerate().filter(|(_, bar)| **bar > 0.0) {
            let height = bar / highest * plot_height;
            let (left, top) = (SVG_LEFT + i as f64 * column, SVG_BOTTOM - height);
            let width = column - 1.0;
            let _ = writeln!(
                out,
                "<rect x=\"{left:.1}\" y=\"{top:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"#9ec5e8\"/>"
            );
        }
        let grid = self.survival.grid();
        let line: String = (0..=grid.bins())
            .map(|i| format!("{:.1},{:.1} ", x(grid.edge(i)), y(self.survival.at(i))))
            .collect();
        let _ = writeln!(
            out,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"#b5482a\" stroke-width=\"1.5\"/>",
            line.trim_end()
        );
        for age in self.checks {
            let x = x(*age);
            let (from, to) = (SVG_BOTTOM, SVG_BOTTOM + 12.0);
            let _ = writeln!(
                out,
                "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{from}\" y2=\"{to}\" stroke=\"#1f2d3a\" stroke-width=\"1.5\"/>"
            );
        }
        let _ = writeln!(
            out,
            "<line x1=\"{SVG_LEFT}\" x2=\"{}\" y1=\"{SVG_BOTTOM}\" y2=\"{SVG_BOTTOM}\" stroke=\"#1f2d3a\"/>",
            SVG_WIDTH - SVG_RIGHT
        );
        let mut free_from = f64::MIN;
        for (age, label) in self.labels() {
            let x = x(age);
            if x < free_from {
                continue;
            }
            free_from = x + 8.0 * label.len() as f64 + 6.0;
            let _ = writeln!(
                out,
                "<text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\">{label}</text>",
                SVG_BOTTOM + 28.0
            );
        }
        let (right, low) = (SVG_WIDTH - SVG_RIGHT + 6.0, SVG_BOTTOM + 50.0);
        let _ = writeln!(
            out,
            "<text x=\"{left}\" y=\"{top}\" text-anchor=\"end\" fill=\"#3f7fb5\">{most}</text>\n\
             <text x=\"{left}\" y=\"{SVG_BOTTOM}\" text-anchor=\"end\" fill=\"#3f7fb5\">0 %</text>\n\
             <text x=\"{right}\" y=\"{top}\" fill=\"#b5482a\">100 %</text>\n\
             <text x=\"{right}\" y=\"{SVG_BOTTOM}\" fill=\"#b5482a\">0 %</text>\n\
             <text x=\"{SVG_LEFT}\" y=\"{low}\">age since the broadcast; \
             <tspan fill=\"#3f7fb5\">bars: share settling in that column</tspan>; \
             <tspan fill=\"#b5482a\">line: share still open</tspan>; ticks below the axis: {checks} checks</text>\n\
             </svg>",
            left = SVG_LEFT - 6.0,
            top = SVG_TOP + 10.0,
            most = percent(highest),
            checks = self.checks.len(),
        );
        out
    }

    /// Where on the axis an age is, from 0 to 1.
    fn place(&self, age: Duration) -> f64 {
        let (unit, end) = self.scale();
        (1.0 + age.as_secs_f64().min(end) / unit).ln() / (1.0 + end / unit).ln()
    }

    fn column(&self, age: Duration, columns: usize) -> usize {
        ((self.place(age) * columns as f64) as usize).min(columns - 1)
    }

    /// The age at a place on the axis.
    fn age_at(&self, place: f64) -> Duration {
        let (unit, end) = self.scale();
        Duration::from_secs_f64((unit * ((1.0 + end / unit).powf(place) - 1.0)).clamp(0.0, end))
    }

    /// Up to the first of these the axis is about even; the second is its end. In seconds.
    fn scale(&self) -> (f64, f64) {
        let grid = self.survival.grid();
        let end = self.checks.iter().copied().max().unwrap_or_default().max(grid.horizon());
        (2.0 * grid.step().as_secs_f64(), end.as_secs_f64())
    }

    fn bars(&self, columns: usize) -> Vec<f64> {
        let settled = |i: usize| self.survival.settled_by(self.age_at(i as f64 / columns as f64)).0;
        (0..columns).map(|i| (settled(i + 1) - settled(i)).max(0.0)).collect()
    }

    fn labels(&self) -> impl Iterator<Item = (Duration, String)> {
        let (_, end) = self.scale();
        LABELS.iter().filter(move |secs| f64::from(**secs) <= end).map(|secs| {
            let label = match secs {
                0..60 => format!("{secs}s"),
                60..3_600 => format!("{}m", secs / 60),
                _ => format!("{}h", secs / 3_600),
            };
            (Duration::from_secs((*secs).into()), label)
        })
    }
}

/// The highest bar; 1 when there is none, so that it can be divided by.
fn highest(bars: &[f64]) -> f64 {
    let highest = bars.iter().copied().fold(0.0, f64::max);
    if highest > 0.0 { highest } else { 1.0 }
}

fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
