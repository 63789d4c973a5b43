//! `cotenant plot`: memory by owner over time, from the journal.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsString,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use clap::Args;
use serde_json::{Value, json};

use super::{
    Global, Output,
    chart::{Chart, ChartMark, ChartPoint, MarkKind, UNACCOUNTED},
    exit::{self, CliError},
    output, quantity,
};
use cotenant_journal::{self as journal, JournalEntry, Rebuilt};
use cotenant_policy::{lease::LeaseKind, pressure::PressureLevel, snapshot::Snapshot};
use cotenant_units::{Bytes, Timestamp, micros};

/// Draws memory by owner against the budget, from the journal: what each lease held, and what was unaccounted.
#[derive(Debug, Args)]
pub struct Plot {
    /// Journal files, oldest first. For a single FILE, its rotated part `FILE.1` is read first.
    #[arg(
        value_name = "FILE",
        default_value = "/var/lib/cotenant/journal.ndjson"
    )]
    files: Vec<PathBuf>,
    /// Plot only the last period of this length, such as `2h`.
    #[arg(long, value_name = "DURATION", value_parser = quantity::duration)]
    since: Option<Duration>,
    /// Write an SVG image to this file instead of printing a chart.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

pub(super) fn run(global: &Global, plot: &Plot) -> Result<(), CliError> {
    let mut entries = Vec::new();
    for path in older_parts(&plot.files).iter().chain(&plot.files) {
        let contents =
            journal::read(path).map_err(|error| CliError::failed("cannot plot", error))?;
        entries.extend(contents.entries);
    }
    let now = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    let from = plot
        .since
        .map_or(Duration::ZERO, |since| now.saturating_sub(since));
    let history = History::of(&entries, micros(from));
    if let (Some(last), true) = (entries.last(), history.points.is_empty()) {
        let ago = now
            .saturating_sub(Duration::from_micros(last.unix_us))
            .as_secs();
        let error = format!("cannot plot: no events in this period; the last line is {ago} s old");
        return Err(CliError::plain(error, exit::FAILED)
            .with_hint("use a longer --since, or omit it".to_owned()));
    }
    let chart = history.chart();
    if let Some(path) = &plot.svg {
        let svg = chart
            .to_svg()
            .map_err(|error| CliError::failed("cannot plot", error))?;
        std::fs::write(path, svg).map_err(|error| {
            CliError::failed(format!("cannot write `{}`", path.display()), error)
        })?;
    }
    match global.output {
        Output::Table if plot.svg.is_some() => Ok(()),
        output => output::write_list(output, points_json(&chart), || {
            let picture = chart.to_text(WIDTH, HEIGHT, false);
            format!("{}, {}\n{picture}", chart.title, chart.subtitle)
        }),
    }
}

/// Returns the older part of the journal, `FILE.1`, if a single file is given and that part exists.
pub(super) fn older_parts(files: &[PathBuf]) -> Vec<PathBuf> {
    let [file] = files else { return Vec::new() };
    let mut name = OsString::from(file);
    name.push(".1");
    let older = PathBuf::from(name);
    Path::new(&older)
        .is_file()
        .then_some(older)
        .into_iter()
        .collect()
}

fn points_json(chart: &Chart) -> impl Iterator<Item = Value> {
    chart.points.iter().map(|point| {
        let at = chart.epoch.unwrap_or_default() + point.at.since_start();
        let owners: BTreeMap<&String, u64> = point
            .owners
            .iter()
            .map(|(owner, held)| (owner, held.get()))
            .collect();
        json!({
            "time": prost_types::Timestamp::from(SystemTime::UNIX_EPOCH + at).to_string(),
            "budgetBytes": chart.budget.get(),
            "heldBytes": owners,
        })
    })
}

/// Chart data collected from a journal.
#[derive(Debug, Default)]
struct History {
    /// Time of the first point, µs since 1970.
    began_us: u64,
    points: Vec<ChartPoint>,
    budget: Bytes,
    /// Owners in stacking order: workers, other programs, the LLM.
    order: BTreeSet<(u8, String)>,
    happened: Vec<Happened>,
}

/// Event to mark.
#[derive(Debug)]
struct Happened {
    at: Timestamp,
    kind: MarkKind,
    what: String,
    /// Bytes moved; the maximum for events that are always shown.
    bytes: Bytes,
    times: u32,
}

impl History {
    fn of(entries: &[JournalEntry], from_us: u64) -> Self {
        let mut history = Self::default();
        let mut rebuilt = Rebuilt::default();
        let mut before: Option<(String, Snapshot)> = None;
        for entry in entries {
            let Some((arbiter, event)) = rebuilt.at(entry) else {
                continue;
            };
            let _actions = arbiter.handle(entry.at, event.clone());
            if entry.unix_us < from_us {
                continue;
            }
            let state = arbiter.snapshot();
            if history.points.is_empty() {
                history.began_us = entry.unix_us;
            }
            let at = Timestamp::START
                + Duration::from_micros(entry.unix_us.saturating_sub(history.began_us));
            history.add_point(at, &state);
            if let Some((_, before)) = before.filter(|(run, _)| *run == entry.boot_id) {
                history.add_marks(at, &before, &state);
            }
            before = Some((entry.boot_id.clone(), state));
        }
        history
    }

    fn add_point(&mut self, at: Timestamp, state: &Snapshot) {
        let mut owners: BTreeMap<String, Bytes> = BTreeMap::new();
        for lease in &state.leases {
            let rank = match lease.kind {
                LeaseKind::Worker => 0,
                LeaseKind::Tenant => 1,
                LeaseKind::Engine => 2,
            };
            self.order.insert((rank, lease.tenant.clone()));
            let held = owners.entry(lease.tenant.clone()).or_default();
            *held = held.saturating_add(lease.memory.held);
        }
        owners.insert(UNACCOUNTED.to_owned(), state.memory.unaccounted);
        self.budget = self.budget.max(state.memory.budget);
        // A constant value is drawn by its first and its last point.
        match self.points.as_mut_slice() {
            [.., before, last] if before.owners == owners && last.owners == owners => last.at = at,
            _ => self.points.push(ChartPoint { at, owners }),
        }
    }

    fn add_marks(&mut self, at: Timestamp, before: &Snapshot, state: &Snapshot) {
        let mut add = |kind, what: String, bytes| {
            self.happened.push(Happened {
                at,
                kind,
                what,
                bytes,
                times: 1,
            });
        };
        if state.pressure.level > before.pressure.level {
            let weight = if state.pressure.level == PressureLevel::Critical {
                Bytes::MAX
            } else {
                Bytes::ZERO
            };
            add(
                MarkKind::Alarm,
                format!("pressure {}", state.pressure.level),
                weight,
            );
        }
        let shed = state
            .totals
            .shed_bytes
            .saturating_sub(before.totals.shed_bytes);
        if shed > Bytes::ZERO {
            add(MarkKind::Shed, "shed".to_owned(), shed);
        }
        let regrown = state
            .totals
            .regrown_bytes
            .saturating_sub(before.totals.regrown_bytes);
        if regrown > Bytes::ZERO {
            add(MarkKind::Regrow, "grown back".to_owned(), regrown);
        }
        for worker in &state.workers {
            let known = before
                .workers
                .iter()
                .find(|known| known.name == worker.name);
            if known.is_some_and(|known| known.failures < worker.failures) {
                add(
                    MarkKind::Note,
                    format!("{} failed", worker.name),
                    Bytes::MAX,
                );
            }
        }
    }

    fn chart(mut self) -> Chart {
        let end = self
            .points
            .last()
            .map_or(Timestamp::START, |point| point.at);
        let marks = thinned(
            std::mem::take(&mut self.happened),
            end.since_start() / MERGED_WITHIN,
        );
        let left_out = marks.len().saturating_sub(MARKS_MAX);
        let mut subtitle = "held by lease, and unaccounted; times are UTC".to_owned();
        if left_out > 0 {
            subtitle.push_str(&format!("; {left_out} smaller events are not marked"));
        }
        let mut order: Vec<String> = self.order.into_iter().map(|(_, owner)| owner).collect();
        order.push(UNACCOUNTED.to_owned());
        Chart {
            title: "cotenant: memory by owner".to_owned(),
            subtitle,
            points: self.points,
            budget: self.budget,
            budget_name: "budget",
            epoch: Some(Duration::from_micros(self.began_us)),
            marks: marks
                .into_iter()
                .take(MARKS_MAX)
                .map(Happened::mark)
                .collect(),
            order,
        }
    }
}

impl Happened {
    fn mark(self) -> ChartMark {
        let mut label = self.what;
        if self.bytes > Bytes::ZERO && self.bytes < Bytes::MAX {
            label.push_str(&format!(" {}", self.bytes));
        }
        if self.times > 1 {
            label.push_str(&format!(", {} times", self.times));
        }
        ChartMark {
            at: self.at,
            label,
            kind: self.kind,
        }
    }
}

/// Merges equal events within this time, and orders them by weight, heaviest first.
fn thinned(happened: Vec<Happened>, within: Duration) -> Vec<Happened> {
    let mut marks: Vec<Happened> = Vec::new();
    for next in happened {
        let same = marks.iter_mut().rev().find(|mark| mark.what == next.what);
        match same.filter(|mark| next.at.saturating_since(mark.at) <= within) {
            Some(mark) => {
                mark.bytes = mark.bytes.saturating_add(next.bytes);
                mark.times += 1;
            }
            None => marks.push(next),
        }
    }
    marks.sort_by_key(|mark| std::cmp::Reverse(mark.bytes));
    marks
}

/// Marks that fit above the picture (by eye).
const MARKS_MAX: usize = 16;
/// Divisor of the picture within which equal events are one mark: about the width of a label (by eye).
const MERGED_WITHIN: u32 = 16;
/// Columns and rows of a printed chart: those of a small terminal.
const WIDTH: usize = 80;
const HEIGHT: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    fn shed(second: u64, mib: u64) -> Happened {
        Happened {
            at: Timestamp::from_millis(second * 1000),
            kind: MarkKind::Shed,
            what: "shed".to_owned(),
            bytes: Bytes::from_mib(mib),
            times: 1,
        }
    }

    #[test]
    fn sheds_in_a_row_are_one_mark_and_the_largest_come_first() {
        let marks = thinned(
            vec![shed(1, 8), shed(2, 8), shed(60, 32), shed(61, 4)],
            Duration::from_secs(5),
        );
        let labels: Vec<String> = marks.into_iter().map(|mark| mark.mark().label).collect();
        assert_eq!(labels, ["shed 36 MiB, 2 times", "shed 16 MiB, 2 times"]);
    }
}
