//! `cotenant replay`: a recorded journal through the arbiter again.

use std::{path::PathBuf, process::ExitCode};

use clap::{Args, ValueEnum};
use serde_json::json;

use super::{
    Global, Output,
    exit::{self, CliError},
    output::{self, Column, Table},
};
use crate::{
    journal::{self, Comparison, JournalEntry, Outcome, Run, Tally},
    policy::params::ResidencyMode,
};

/// Feeds a journal's events through the arbiter again.
#[derive(Debug, Args)]
pub struct Replay {
    /// The journal; several files of one run, oldest first.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Say instead what this mode would have decided at every event, and what that had cost.
    #[arg(long, value_enum, value_name = "MODE")]
    policy: Option<Mode>,
}

/// What the engine gives up first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Mode {
    /// Context and speed by what each costs.
    Balanced,
    /// Layers before context.
    MaxContext,
    /// Context before layers.
    MaxSpeed,
}

impl From<Mode> for ResidencyMode {
    fn from(mode: Mode) -> Self {
        match mode {
            Mode::Balanced => Self::Balanced,
            Mode::MaxContext => Self::MaxContext,
            Mode::MaxSpeed => Self::MaxSpeed,
        }
    }
}

pub(super) fn run(global: &Global, replay: &Replay) -> Result<ExitCode, CliError> {
    let mut entries = Vec::new();
    for path in &replay.files {
        let contents = journal::read(path).map_err(|error| {
            let act = format!("cannot replay `{}`", path.display());
            CliError::failed(act, error)
        })?;
        if !contents.damaged.is_empty() {
            eprintln!(
                "{}: lines {:?} cannot be read and are left out",
                path.display(),
                contents.damaged
            );
        }
        if contents.torn {
            eprintln!("{}: the last line has no end and is left out", path.display());
        }
        entries.extend(contents.entries);
    }
    if let Some(mode) = replay.policy {
        return compare(global, &entries, mode.into());
    }
    let runs = journal::replay(&entries);
    match global.output {
        Output::Table => {
            for run in &runs {
                output::write(&describe(run))?;
            }
        }
        Output::Json => output::write_json(global.output, &runs.iter().map(to_json).collect())?,
        Output::Ndjson => runs
            .iter()
            .try_for_each(|run| output::write_json(global.output, &to_json(run)))?,
    }
    let same = !runs.is_empty() && runs.iter().all(|run| run.outcome == Outcome::Same);
    Ok(ExitCode::from(if same { exit::OK } else { exit::FAILED }))
}

fn compare(global: &Global, entries: &[JournalEntry], mode: ResidencyMode) -> Result<ExitCode, CliError> {
    let runs = journal::compare(entries, mode);
    match global.output {
        Output::Table => {
            for run in &runs {
                output::write(&describe_comparison(run, mode))?;
            }
        }
        Output::Json => {
            let all = runs.iter().map(|run| comparison_json(run, mode)).collect();
            output::write_json(global.output, &all)?;
        }
        Output::Ndjson => runs
            .iter()
            .try_for_each(|run| output::write_json(global.output, &comparison_json(run, mode)))?,
    }
    let fed = runs.iter().any(|run| run.events > 0);
    Ok(ExitCode::from(if fed { exit::OK } else { exit::FAILED }))
}

fn describe_comparison(run: &Comparison, mode: ResidencyMode) -> String {
    let mut text = format!(
        "run {}: {} events, {} decisions, {} of which {mode} would have made otherwise\n",
        run.boot_id,
        run.events,
        run.decisions,
        run.differing.len()
    );
    for differing in run.differing.iter().take(SHOWN) {
        text.push_str(&format!(
            "  line {}  {}\n",
            differing.event.sequence,
            journal::render(&differing.event)
        ));
        for (title, actions) in [("recorded", &differing.recorded), ("instead ", &differing.other)] {
            if actions.is_empty() {
                text.push_str(&format!("    {title}  nothing\n"));
            }
            for action in actions {
                text.push_str(&format!("    {title}  {}\n", journal::render_action(action)));
            }
        }
    }
    if run.differing.len() > SHOWN {
        text.push_str(&format!(
            "  … and {} more; all of them with -o json\n",
            run.differing.len() - SHOWN
        ));
    }
    let mut table = Table::new([
        Column::Text(""),
        Column::Figure("SHED"),
        Column::Figure("KV TOKENS"),
        Column::Figure("TOKENS/S LOST"),
        Column::Figure("DENIED"),
        Column::Figure("STOPPED"),
    ]);
    for (name, tally) in [("recorded", &run.recorded), ("instead", &run.other)] {
        let tokens = tally.milli_tokens_per_s;
        table.row([
            name.to_owned(),
            tally.shed.to_string(),
            tally.context.to_string(),
            format!("{}.{}", tokens / 1000, tokens % 1000 / 100),
            tally.denied.to_string(),
            tally.stopped.to_string(),
        ]);
    }
    text.push_str(&table.render());
    text
}

fn comparison_json(run: &Comparison, mode: ResidencyMode) -> serde_json::Value {
    let tally = |tally: &Tally| {
        json!({
            "shedBytes": tally.shed,
            "kvTokens": tally.context,
            "milliTokensPerSecondLost": tally.milli_tokens_per_s,
            "denied": tally.denied,
            "workersStopped": tally.stopped,
        })
    };
    json!({
        "bootId": run.boot_id,
        "mode": mode,
        "events": run.events,
        "decisions": run.decisions,
        "differing": run.differing.iter().map(|differing| json!({
            "event": differing.event,
            "recorded": differing.recorded,
            "instead": differing.other,
        })).collect::<Vec<_>>(),
        "recorded": tally(&run.recorded),
        "instead": tally(&run.other),
    })
}

/// Decisions that the table shows (our choice: a screen).
const SHOWN: usize = 10;

fn describe(run: &Run) -> String {
    let mut so_far = format!("run {}: {} events, {} actions", run.boot_id, run.events, run.actions);
    if run.checkpoints > 0 {
        so_far.push_str(&format!(", {} checkpoints", run.checkpoints));
    }
    if run.skipped > 0 || run.gaps > 0 {
        so_far.push_str(&format!(
            " ({} lines before a checkpoint or in {} gaps are not compared)",
            run.skipped, run.gaps
        ));
    }
    match &run.outcome {
        Outcome::Same => format!("{so_far}: the same decisions\n"),
        Outcome::Differs(difference) => {
            let mut text = format!(
                "{so_far}: another decision at line {}\n  event     {}\n",
                difference.event.sequence,
                journal::render(&difference.event),
            );
            for (title, actions) in [("recorded", &difference.recorded), ("replayed", &difference.replayed)] {
                if actions.is_empty() {
                    text.push_str(&format!("  {title}  nothing\n"));
                }
                for action in actions {
                    let body = serde_json::to_string(action).unwrap_or_default();
                    text.push_str(&format!("  {title}  {body}\n"));
                }
            }
            text
        }
        Outcome::StateDiffers { sequence } => {
            format!("{so_far}: the same decisions, and another state at the checkpoint of line {sequence}\n")
        }
        Outcome::Gap { sequence } => format!("{so_far}: the same decisions up to a gap before line {sequence}\n"),
        Outcome::NoStart { sequence } => format!(
            "run {}: neither its beginning nor a checkpoint is there, the first line is {sequence}; give the files put \
             aside too, oldest first\n",
            run.boot_id
        ),
        Outcome::NoArbiter { reason } => format!("run {}: its settings are not valid here: {reason}\n", run.boot_id),
        Outcome::Panicked { sequence, message } => {
            format!("{so_far}: the arbiter panicked at line {sequence}: {message}\n")
        }
    }
}

fn to_json(run: &Run) -> serde_json::Value {
    let mut json = json!({
        "bootId": run.boot_id,
        "events": run.events,
        "actions": run.actions,
        "checkpoints": run.checkpoints,
        "gaps": run.gaps,
        "skippedLines": run.skipped,
    });
    let outcome = match &run.outcome {
        Outcome::Same => json!({ "outcome": "SAME" }),
        Outcome::Differs(difference) => json!({
            "outcome": "DIFFERS",
            "event": difference.event,
            "recorded": difference.recorded,
            "replayed": difference.replayed,
        }),
        Outcome::StateDiffers { sequence } => json!({ "outcome": "STATE_DIFFERS", "sequence": sequence }),
        Outcome::Gap { sequence } => json!({ "outcome": "GAP", "sequence": sequence }),
        Outcome::NoStart { sequence } => json!({ "outcome": "NO_START", "sequence": sequence }),
        Outcome::NoArbiter { reason } => json!({ "outcome": "NO_ARBITER", "reason": reason }),
        Outcome::Panicked { sequence, message } => {
            json!({ "outcome": "PANICKED", "sequence": sequence, "message": message })
        }
    };
    if let (Some(fields), serde_json::Value::Object(more)) = (json.as_object_mut(), outcome) {
        fields.extend(more);
    }
    json
}
