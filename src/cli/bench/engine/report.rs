//! Report of the engine's measurements.

use std::{collections::BTreeMap, time::Duration};

use serde::Serialize;

use crate::{
    Output,
    exit::CliError,
    output::{self, Column, Table},
};
use cotenant_units::Bytes;

/// All measurements.
#[derive(Debug, Serialize)]
pub struct Report {
    pub version: &'static str,
    pub model: String,
    pub file_bytes: Bytes,
    pub backend: String,
    pub chunk: u32,
    pub rounds: u32,
    /// Whether logits of a resident and a streamed pass were bit-identical.
    pub exact: bool,
    pub figures: Vec<Figure>,
    pub notes: Vec<String>,
}

/// One figure over all rounds.
#[derive(Debug, Serialize)]
pub struct Figure {
    pub what: String,
    pub unit: &'static str,
    pub median: f64,
    pub least: f64,
    pub most: f64,
    /// 90th percentile.
    pub ninetieth: f64,
    /// 99th percentile.
    pub ninety_ninth: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer: Option<Peer>,
}

/// The same figure of the peer, in its setting with the better median.
#[derive(Debug, Serialize)]
pub struct Peer {
    pub repack: bool,
    pub median: f64,
    /// Median over rounds of our value over the peer's: the machine drifts less within a round than over all.
    pub ratio: f64,
    pub ratio_least: f64,
    pub ratio_most: f64,
}

/// Values by figure, in the order of first occurrence.
#[derive(Default)]
pub struct Values {
    /// Figures and their units.
    pub order: Vec<(String, &'static str)>,
    /// Values of each figure.
    pub values: BTreeMap<String, Vec<f64>>,
}

impl Values {
    /// Adds a value to a figure.
    pub fn add(&mut self, what: impl Into<String>, unit: &'static str, value: f64) {
        let what = what.into();
        if !self.values.contains_key(&what) {
            self.order.push((what.clone(), unit));
        }
        self.values.entry(what).or_default().push(value);
    }

    /// Adds a duration.
    pub fn time(&mut self, what: impl Into<String>, took: Duration) {
        self.add(what, "ms", took.as_secs_f64() * 1e3);
    }

    /// Adds a size.
    pub fn memory(&mut self, what: impl Into<String>, bytes: Bytes) {
        self.add(what, "MiB", mib(bytes));
    }

    /// Adds a size with its share of the whole.
    pub fn part(&mut self, what: impl Into<String>, part: Bytes, whole: Bytes) {
        self.add(what, "%", percent(part.get(), whole.get()));
    }

    /// Adds a speed, given the seconds per token.
    pub fn speed(&mut self, what: impl Into<String>, seconds: f64) {
        self.add(what, TOKENS, 1.0 / seconds);
    }
}

impl Report {
    /// Writes the report to stdout.
    pub fn write(&self, output: Output) -> Result<(), CliError> {
        output::write_report(output, self, || self.render())
    }

    fn render(&self) -> String {
        let mut text = format!(
            "{}, {} in the file, {}, chunks of {}, {} rounds; resident and streamed logits have the same bits\n\n",
            self.model, self.file_bytes, self.backend, self.chunk, self.rounds
        );
        let mut table = Table::new([
            Column::Text("FIGURE"),
            Column::Figure("MEDIAN"),
            Column::Figure("LEAST"),
            Column::Figure("P90"),
            Column::Figure("P99"),
            Column::Figure("MOST"),
            Column::Text("UNIT"),
            Column::Figure("PEER"),
            Column::Text("SETTING"),
            Column::Figure("RATIO"),
            Column::Text("RANGE"),
        ]);
        let number = |value: f64| {
            if value < 10.0 {
                format!("{value:.2}")
            } else {
                format!("{value:.1}")
            }
        };
        for figure in &self.figures {
            let [peer, setting, ratio, range] =
                figure.peer.as_ref().map_or_else(Default::default, |peer| {
                    [
                        number(peer.median),
                        if peer.repack { "repacked" } else { "plain" }.to_owned(),
                        format!("{:.2}", peer.ratio),
                        format!("{:.2}-{:.2}", peer.ratio_least, peer.ratio_most),
                    ]
                });
            table.row([
                figure.what.clone(),
                number(figure.median),
                number(figure.least),
                number(figure.ninetieth),
                number(figure.ninety_ninth),
                number(figure.most),
                figure.unit.to_owned(),
                peer,
                setting,
                ratio,
                range,
            ]);
        }
        text.push_str(&table.render());
        for note in &self.notes {
            text.push_str(&format!("note: {note}\n"));
        }
        text
    }
}

#[expect(clippy::cast_precision_loss, reason = "for people; below 2^53")]
/// Returns a size in MiB.
pub fn mib(bytes: Bytes) -> f64 {
    bytes.get() as f64 / f64::from(1 << 20)
}

#[expect(clippy::cast_precision_loss, reason = "for people; below 2^53")]
/// Returns the percentage of a part.
pub fn percent(part: u64, whole: u64) -> f64 {
    100.0 * part as f64 / (whole as f64).max(1.0)
}

/// Unit of speed.
pub const TOKENS: &str = "tokens/s";
