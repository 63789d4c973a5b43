//! `cotenant replay`: a recorded journal through the arbiter again.

use std::{path::PathBuf, process::ExitCode};

use clap::Args;
use serde_json::json;

use super::{
    Global,
    exit::{self, CliError},
    output,
};
use cotenant_journal::{self as journal, Outcome, Run};

/// Feeds a journal's events through the arbiter again.
#[derive(Debug, Args)]
pub struct Replay {
    /// Journal files of one run, oldest first.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
}

pub(super) fn run(global: &Global, replay: &Replay) -> Result<ExitCode, CliError> {
    let mut entries = Vec::new();
    for path in &replay.files {
        let act = format!("cannot replay `{}`", path.display());
        let contents = output::read_journal(path, act)?;
        if contents.torn {
            eprintln!("{}: skipped the incomplete last line", path.display());
        }
        entries.extend(contents.entries);
    }
    let runs = journal::replay(&entries);
    let text = || runs.iter().map(describe).collect();
    output::write_list(global.output, runs.iter().map(to_json), text)?;
    let same = !runs.is_empty() && runs.iter().all(|run| run.outcome == Outcome::Same);
    Ok(ExitCode::from(if same { exit::OK } else { exit::FAILED }))
}

fn describe(run: &Run) -> String {
    let mut so_far = format!(
        "run {}: {} events, {} actions",
        run.boot_id, run.events, run.actions
    );
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
        Outcome::Same => format!("{so_far}: identical decisions\n"),
        Outcome::Differs(difference) => {
            let mut text = format!(
                "{so_far}: different decision at line {}\n  event     {}\n",
                difference.event.sequence,
                journal::render(&difference.event),
            );
            for (title, actions) in [
                ("recorded", &difference.recorded),
                ("replayed", &difference.replayed),
            ] {
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
            format!(
                "{so_far}: identical decisions, but different state at the checkpoint in line {sequence}\n"
            )
        }
        Outcome::Gap { sequence } => {
            format!("{so_far}: identical decisions up to a gap before line {sequence}\n")
        }
        Outcome::NoStart { sequence } => format!(
            "run {}: first line {sequence} is neither the beginning nor a checkpoint; add rotated files, oldest first\n",
            run.boot_id
        ),
        Outcome::NoArbiter { reason } => format!(
            "run {}: its settings are not valid here: {reason}\n",
            run.boot_id
        ),
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
        Outcome::StateDiffers { sequence } => {
            json!({ "outcome": "STATE_DIFFERS", "sequence": sequence })
        }
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
