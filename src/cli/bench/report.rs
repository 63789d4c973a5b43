//! Figures of a measurement with their limits, as text and JSON.

use std::{fmt, time::Duration};

use serde::Serialize;

use super::load::Reading;
use crate::{
    Output,
    exit::CliError,
    output::{self, Column, Table},
};

/// Figures of one measurement.
#[derive(Debug, Serialize)]
pub struct Report {
    version: &'static str,
    bench: &'static str,
    setting: String,
    figures: Vec<Figure>,
    /// Share of all processors used by other processes meanwhile, in percent.
    #[serde(skip_serializing_if = "Option::is_none")]
    others_percent: Option<f64>,
    notes: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Figure {
    what: String,
    unit: &'static str,
    value: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    limit: Option<Limit>,
    #[serde(skip_serializing_if = "Option::is_none")]
    met: Option<bool>,
}

/// Limit of a figure.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// Minimum.
    AtLeast(f64),
    /// Maximum.
    AtMost(f64),
}

impl Limit {
    /// Whether a value is within the limit.
    pub(super) fn is_met(self, value: f64) -> bool {
        match self {
            Self::AtLeast(least) => value >= least,
            Self::AtMost(most) => value <= most,
        }
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AtLeast(least) => write!(f, "at least {}", shown(*least)),
            Self::AtMost(most) => write!(f, "at most {}", shown(*most)),
        }
    }
}

/// Returns the middle value, or the mean of the two in the middle.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let upper = *sorted.get(sorted.len() / 2)?;
    let lower = *sorted.get((sorted.len() - 1) / 2)?;
    Some(f64::midpoint(lower, upper))
}

impl Report {
    /// Creates an empty report.
    pub fn new(bench: &'static str, setting: impl Into<String>) -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION"),
            bench,
            setting: setting.into(),
            figures: Vec::new(),
            others_percent: None,
            notes: Vec::new(),
        }
    }

    /// Adds a figure.
    pub fn figure(
        &mut self,
        what: impl Into<String>,
        unit: &'static str,
        value: f64,
        limit: Option<Limit>,
    ) {
        self.figures.push(Figure {
            what: what.into(),
            unit,
            value,
            limit,
            met: limit.map(|limit| limit.is_met(value)),
        });
    }

    /// Adds median, 99th percentile and maximum of `times`, in ms; the limit applies to the 99th percentile.
    pub fn times(&mut self, what: &str, mut times: Vec<Duration>, p99_max: Option<Duration>) {
        times.sort_unstable();
        let at = |per_mille| milliseconds(&times, per_mille);
        self.figure(format!("{what}: median"), "ms", at(500), None);
        let limit = p99_max.map(|limit| Limit::AtMost(limit.as_secs_f64() * 1e3));
        self.figure(format!("{what}: 99th percentile"), "ms", at(990), limit);
        self.figure(format!("{what}: most"), "ms", at(1000), None);
    }

    /// Adds a note.
    pub fn note(&mut self, note: impl Into<String>) {
        self.notes.push(note.into());
    }

    /// Records the use of the machine by others since `reading`.
    pub fn others(&mut self, reading: &Reading) {
        self.others_percent = reading.foreign_percent();
    }

    /// Writes the report to stdout.
    pub fn write(&self, output: Output) -> Result<(), CliError> {
        output::write_report(output, self, || self.render())
    }

    fn render(&self) -> String {
        let mut table = Table::new([
            Column::Text("FIGURE"),
            Column::Figure("VALUE"),
            Column::Text("UNIT"),
            Column::Text("LIMIT"),
            Column::Text("MET"),
        ]);
        for figure in &self.figures {
            let limit = figure.limit.map(|limit| limit.to_string());
            let limit = limit.unwrap_or_default();
            let met = figure.met.map_or("", |met| if met { "yes" } else { "no" });
            table.row([
                figure.what.clone(),
                shown(figure.value),
                figure.unit.to_owned(),
                limit,
                met.to_owned(),
            ]);
        }
        let mut text = format!("{}: {}\n{}", self.bench, self.setting, table.render());
        if let Some(others) = self.others_percent {
            text.push_str(&format!(
                "note: all other processes, the daemon among them, used {others:.0} % of the processors meanwhile\n"
            ));
        }
        for note in &self.notes {
            text.push_str(&format!("note: {note}\n"));
        }
        text
    }
}

/// Formats a value with a useful number of digits.
pub(super) fn shown(value: f64) -> String {
    if value.abs() >= 100.0 || value.fract() == 0.0 {
        format!("{value:.0}")
    } else {
        format!("{value:.2}")
    }
}

/// Returns the value at a per-mille rank of a sorted list.
pub fn at<T>(sorted: &[T], per_mille: usize) -> Option<&T> {
    let last = sorted.len().checked_sub(1)?;
    sorted.get(
        (sorted.len() * per_mille)
            .div_ceil(1000)
            .saturating_sub(1)
            .min(last),
    )
}

/// Returns the value at a per-mille rank of a sorted list, in ms.
pub fn milliseconds(sorted: &[Duration], per_mille: usize) -> f64 {
    at(sorted, per_mille).map_or(0.0, |wait| wait.as_secs_f64() * 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_of_what_was_seen() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0]), Some(2.5));
        assert_eq!(median(&[8.0, 1.0, 4.0, 2.0]), Some(3.0));
        assert_eq!((median(&[7.0]), median(&[])), (Some(7.0), None));
    }

    #[test]
    fn a_figure_is_beside_its_limit_and_a_percentile_is_a_value_that_came() {
        let mut report = Report::new("grants", "1 tenant");
        let times = (1..=200).map(Duration::from_millis).collect();
        report.times("asked to granted", times, Some(Duration::from_millis(198)));
        report.figure(
            "renewals",
            "per s",
            25_000.0,
            Some(Limit::AtLeast(20_000.0)),
        );
        let text = report.render();
        assert!(text.contains("99th percentile"), "{text}");
        let value = serde_json::to_value(&report).unwrap();
        assert_eq!(value["figures"][0]["value"], 100.0);
        assert_eq!(value["figures"][1]["value"], 198.0);
        assert_eq!(value["figures"][1]["met"], true);
        assert_eq!(value["figures"][3]["limit"]["at_least"], 20_000.0);
    }
}
