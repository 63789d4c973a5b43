//! `developer rivals`: the arbiter and other programs' rules on the same simulated days.

mod device;
mod ours;
pub(crate) mod rules;
mod theirs;
mod trace;

use serde::Serialize;

pub(super) use self::ours::shape;
use self::{
    device::{Device, Score},
    trace::{Happening, Trace},
};
use cotenant::{
    cli::{
        Output,
        exit::{self, CliError},
        output::{self, Column, Table},
    },
    units::Bytes,
};

/// Settings of the comparison.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct RivalsArgs {
    /// Draws the traces that are not taken from a published incident.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

const OURS: &str = "cotenant";

#[derive(Debug, Serialize)]
struct Report {
    version: &'static str,
    seed: u64,
    results: Vec<Row>,
    totals: Vec<Row>,
}

#[derive(Clone, Debug, Serialize)]
struct Row {
    trace: &'static str,
    policy: &'static str,
    #[serde(flatten)]
    score: Score,
}

pub(super) fn run(args: &RivalsArgs, format: Output) -> Result<(), CliError> {
    let report = compare(args.seed).map_err(|problem| CliError::plain(problem, exit::FAILED))?;
    match format {
        Output::Table => output::write(&table(&report)),
        Output::Json | Output::Ndjson => {
            let value = serde_json::to_value(&report)
                .map_err(|error| CliError::failed("cannot write the report", error))?;
            output::write_json(format, &value)
        }
    }
}

fn compare(seed: u64) -> Result<Report, String> {
    let mut results = Vec::new();
    for trace in trace::all(seed) {
        results.extend(run_all(&trace)?);
    }
    let mut totals: Vec<Row> = Vec::new();
    for row in &results {
        match totals.iter_mut().find(|total| total.policy == row.policy) {
            Some(total) => total.score.add(&row.score),
            None => totals.push(Row {
                trace: "all",
                ..row.clone()
            }),
        }
    }
    Ok(Report {
        version: env!("CARGO_PKG_VERSION"),
        seed,
        results,
        totals,
    })
}

/// Runs ours, then the rivals.
fn run_all(trace: &Trace) -> Result<Vec<Row>, String> {
    let row = |policy, device: &Device<'_>| Row {
        trace: trace.name,
        policy,
        score: device.score,
    };
    let mut device = Device::new(trace);
    ours::run(&mut device)
        .map_err(|error| format!("cannot run trace `{}`: {error}", trace.name))?;
    let mut rows = vec![row(OURS, &device)];
    let extras = trace
        .happenings
        .iter()
        .map(|(_, happening)| match happening {
            Happening::Listen { extra_mib, .. } => Bytes::from_mib(*extra_mib),
            _ => Bytes::ZERO,
        });
    let extra = extras.max().unwrap_or(Bytes::ZERO);
    for mut rival in theirs::all(&Device::new(trace), extra) {
        let mut device = Device::new(trace);
        theirs::run(&mut device, rival.as_mut());
        rows.push(row(rival.name(), &device));
    }
    Ok(rows)
}

fn table(report: &Report) -> String {
    let mut table = Table::new([
        Column::Text("TRACE"),
        Column::Text("POLICY"),
        Column::Figure("MISSED"),
        Column::Figure("OF"),
        Column::Figure("INFEASIBLE"),
        Column::Figure("OVER-COMMITS"),
        Column::Figure("RELOADED"),
        Column::Figure("STREAMED"),
        Column::Figure("TOKENS LOST"),
        Column::Figure("OF"),
        Column::Figure("ABORTED"),
    ]);
    for Row {
        trace,
        policy,
        score,
    } in report.results.iter().chain(&report.totals)
    {
        table.row([
            (*trace).to_owned(),
            (*policy).to_owned(),
            score.missed.to_string(),
            score.audio.to_string(),
            score.infeasible.to_string(),
            score.over_commits.to_string(),
            score.reloaded.to_string(),
            score.streamed.to_string(),
            score.tokens_lost.to_string(),
            score.tokens.to_string(),
            score.aborted.to_string(),
        ]);
    }
    table.render()
}

#[cfg(test)]
mod tests;

#[cfg(test)]
pub(crate) const TESTS: &[(&str, fn())] = &[
    (
        "rivals::ours_keeps_deadlines_and_budget_where_rivals_break_one_of_them",
        tests::ours_keeps_deadlines_and_budget_where_rivals_break_one_of_them,
    ),
    (
        "rivals::a_seed_gives_the_same_days_and_the_same_figures",
        tests::a_seed_gives_the_same_days_and_the_same_figures,
    ),
];
