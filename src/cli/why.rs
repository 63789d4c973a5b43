//! `cotenant why`: explanation of one decision.

use std::{
    fmt::Write as _,
    path::PathBuf,
    process::ExitCode,
    time::{Duration, SystemTime},
};

use clap::Args;
use serde_json::{Value, json};

use super::{
    Global, Output,
    exit::{self, CliError},
    global::runtime,
    output, plot, quantity,
};
use cotenant_journal::{self as journal, Content, JournalEntry, Why as Story};
use cotenant_policy::{event::Action, snapshot::Snapshot};
use cotenant_rpc::v1::{
    self, EntryKind, WatchEventsRequest, operator_service_client::OperatorServiceClient,
};
use cotenant_units::{Bytes, Timestamp};

/// Explains a decision: what had happened, what was known, what was chosen, and what came of it.
#[derive(Debug, Args)]
pub struct Why {
    /// Line number, as printed by `cotenant events`.
    #[arg(value_name = "LINE", value_parser = quantity::line)]
    sequence: u64,
    /// Read journal files, oldest first, instead of the supervisor's memory, which lacks the state before each decision.
    /// For a single FILE, its rotated part `FILE.1` is read first. Line numbers restart at 1 in each run of the supervisor:
    /// the last run with this line is used.
    #[arg(long = "file", value_name = "FILE")]
    files: Vec<PathBuf>,
}

pub(super) fn run(global: &Global, why: &Why) -> Result<ExitCode, CliError> {
    let act = format!("cannot explain line {}", why.sequence);
    let mut entries = if why.files.is_empty() {
        runtime()?.block_on(remembered(global))?
    } else {
        Vec::new()
    };
    for path in plot::older_parts(&why.files).iter().chain(&why.files) {
        let contents = journal::read(path).map_err(|error| CliError::failed(act.clone(), error))?;
        entries.extend(contents.entries);
    }
    let story = journal::why(&entries, why.sequence).map_err(|error| {
        CliError::failed(act, error).with_hint(why.files.is_empty().then(|| MEMORY_HINT.to_owned()))
    })?;
    let answer = journal::answer_to(&entries, &story.event);
    match global.output {
        Output::Table => output::write(&describe(&story, answer.as_ref()))?,
        Output::Json | Output::Ndjson => {
            output::write_json(global.output, &to_json(&story, answer.as_ref()))?;
        }
    }
    Ok(ExitCode::from(exit::OK))
}

/// Explains a line that the supervisor has in memory, or states why it cannot.
pub(super) async fn text_of(global: &Global, sequence: u64) -> String {
    let entries = match remembered(global).await {
        Ok(entries) => entries,
        Err(error) => return format!("cannot explain line {sequence}: {error}"),
    };
    match journal::why(&entries, sequence) {
        Ok(story) => {
            let answer = journal::answer_to(&entries, &story.event);
            describe(&story, answer.as_ref())
        }
        Err(error) => format!("cannot explain line {sequence}: {error}\nhint: {MEMORY_HINT}"),
    }
}

const MEMORY_HINT: &str = "the supervisor's memory has the last lines only, without readings; name the journal with \
                           `--file`, by default /var/lib/cotenant/journal.ndjson";

/// Returns the lines that the supervisor has in memory.
async fn remembered(global: &Global) -> Result<Vec<JournalEntry>, CliError> {
    let mut client = OperatorServiceClient::new(global.connect().await?);
    let request = tonic::Request::new(WatchEventsRequest {
        after_sequence: 0,
        boot_id: String::new(),
        no_follow: true,
    });
    let mut stream = global.call(client.watch_events(request)).await?;
    let mut entries = Vec::new();
    while let Some(response) = stream.message().await? {
        // A newer supervisor may send lines of unknown kinds.
        entries.extend(response.entry.and_then(entry));
    }
    Ok(entries)
}

/// Parses a line of the supervisor; `None` if its kind or content is unknown.
pub(super) fn entry(line: v1::JournalEntry) -> Option<JournalEntry> {
    let body = &line.body_json;
    let content = match line.kind() {
        EntryKind::Event => Content::Event(serde_json::from_str(body).ok()?),
        EntryKind::Action => Content::Action(serde_json::from_str(body).ok()?),
        EntryKind::Start => Content::Start(serde_json::from_str(body).ok()?),
        EntryKind::Dropped => Content::Dropped {
            lines: serde_json::from_str::<Value>(body)
                .ok()?
                .get("lines")?
                .as_u64()?,
        },
        EntryKind::Unspecified => return None,
    };
    let time = line.time.unwrap_or_default();
    Some(JournalEntry {
        sequence: line.sequence,
        boot_id: line.boot_id,
        at: Timestamp::START + Duration::try_from(line.at?).ok()?,
        unix_us: u64::try_from(time.seconds).ok()? * 1_000_000
            + u64::try_from(time.nanos).ok()? / 1000,
        content,
    })
}

fn describe(story: &Story, answer: Option<&JournalEntry>) -> String {
    let mut text = String::new();
    let at = story.event.at;
    let happened = SystemTime::UNIX_EPOCH + Duration::from_micros(story.event.unix_us);
    let _ = writeln!(
        text,
        "run             {}, at {}",
        story.event.boot_id,
        prost_types::Timestamp::from(happened)
    );
    let _ = writeln!(text, "event           {}", line(&story.event));
    match &story.before {
        Some(before) => describe_known(&mut text, before, at),
        None => text.push_str(
            "state before    not in the supervisor's memory; read the journal with `--file`\n",
        ),
    }
    if story.actions.is_empty() {
        text.push_str("action          none\n");
    }
    for chosen in &story.actions {
        let mark = if chosen.entry.sequence == story.asked.sequence {
            ">"
        } else {
            " "
        };
        let _ = writeln!(text, "action        {mark} {}", line(&chosen.entry));
        let mut figures = Vec::new();
        if let Some(promised) = chosen.promised {
            figures.push(format!("{promised} promised"));
        }
        if let Some(measured) = chosen.measured {
            figures.push(format!("{measured} measured"));
        }
        if let Some(deadline) = chosen.deadline {
            let allowed = deadline.saturating_since(chosen.entry.at);
            figures.push(format!("due by {deadline}, in {} ms", allowed.as_millis()));
        }
        if !figures.is_empty() {
            let _ = writeln!(text, "                  {}", figures.join(", "));
        }
        if let Some(outcome) = &chosen.outcome {
            let took = outcome.at.saturating_since(chosen.entry.at).as_millis();
            let _ = writeln!(text, "  outcome         after {took} ms: {}", line(outcome));
        } else if is_pending(&chosen.entry) {
            text.push_str("  outcome         none yet\n");
        }
    }
    if let (Some(before), Some(after)) = (&story.before, &story.after) {
        let _ = writeln!(
            text,
            "ledger          held {} -> {}, free {} -> {}, {} -> {}",
            before.memory.held,
            after.memory.held,
            before.memory.free,
            after.memory.free,
            before.pressure.level,
            after.pressure.level
        );
    }
    if let Some(answer) = answer {
        let took = answer.at.saturating_since(at).as_millis();
        let _ = writeln!(text, "reply           after {took} ms: {}", line(answer));
    }
    text
}

fn describe_known(text: &mut String, before: &Snapshot, at: Timestamp) {
    let age = |taken: Option<Timestamp>| {
        taken.map_or_else(
            || "never measured".to_owned(),
            |taken| format!("{} ms old", at.saturating_since(taken).as_millis()),
        )
    };
    let sampled = before
        .pressure
        .sample
        .as_ref()
        .map(|sample| sample.taken_at);
    let headroom = before
        .pressure
        .headroom
        .map_or_else(|| "unknown".to_owned(), |bytes| bytes.to_string());
    let _ = writeln!(
        text,
        "state before    {}: headroom {headroom} (sample {}); Elevated below {}, Critical below {}",
        before.pressure.level,
        age(sampled),
        before.pressure.elevated_below,
        before.pressure.critical_below
    );
    let _ = writeln!(
        text,
        "                {} held, {} unaccounted, {} free of {}; {} being released, {} reserved for a restarting holder",
        before.memory.held,
        before.memory.unaccounted,
        before.memory.free,
        before.memory.budget,
        before.memory.coming_back,
        before.memory.returning
    );
    for lease in &before.leases {
        let used = lease
            .memory
            .used
            .map_or_else(|| "unknown".to_owned(), |used: Bytes| used.to_string());
        let _ = writeln!(
            text,
            "                {:<16} {:<15} holds {}, uses {used} ({})",
            lease.name(),
            lease.class.to_string(),
            lease.memory.held,
            age(lease.memory.used_at)
        );
    }
}

fn is_pending(entry: &JournalEntry) -> bool {
    matches!(
        entry.content,
        Content::Action(
            Action::ApplyPlan { .. }
                | Action::LoadEngine { .. }
                | Action::ResizeWorker { .. }
                | Action::SetTarget { .. }
                | Action::StartWorker { .. }
                | Action::StopWorker { .. }
                | Action::AbortWorker { .. }
        )
    )
}

fn line(entry: &JournalEntry) -> String {
    format!(
        "{} at {}: {}",
        entry.sequence,
        entry.at,
        journal::render(entry)
    )
}

fn to_json(story: &Story, answer: Option<&JournalEntry>) -> Value {
    let sampled = story
        .before
        .as_ref()
        .and_then(|before| before.pressure.sample.as_ref());
    let age = sampled.map(|sample| story.event.at.saturating_since(sample.taken_at).as_micros());
    json!({
        "sequence": story.asked.sequence,
        "event": story.event,
        "sampleAgeUs": age.and_then(|age| u64::try_from(age).ok()),
        "before": story.before,
        "after": story.after,
        "actions": story.actions.iter().map(|chosen| json!({
            "line": chosen.entry,
            "promisedBytes": chosen.promised,
            "measuredBytes": chosen.measured,
            "deadline": chosen.deadline,
            "outcome": chosen.outcome,
        })).collect::<Vec<_>>(),
        "answer": answer,
    })
}
