//! `cotenant events`: decisions or all lines of the journal, as they happen.

use std::time::{Duration, Instant};

use clap::Args;
use serde_json::Value;
use tokio::time::timeout_at;
use tonic::transport::Channel;

use super::{Global, Output, decisions::Decisions, exit::CliError, output, quantity, show};
use cotenant_rpc::{
    json,
    v1::{WatchEventsRequest, operator_service_client::OperatorServiceClient},
};

/// Prints each decision with its outcome on one line, oldest first, and what else an operator must see.
///
/// Each line has its number, the time of day, a mark and a sentence; `cotenant why NUMBER` explains it. Marks: `>` an action
/// of the supervisor, `=` its start, `!` lines that the journal lost, none for an event. With --follow, a line and those after
/// it wait at most a second for its outcome; a later outcome follows alone, with the same number.
#[derive(Debug, Args)]
pub struct Events {
    /// Follow new lines, across restarts of the supervisor.
    #[arg(short, long)]
    follow: bool,
    /// Print each event and each action on a line, as `-o json` does.
    #[arg(short, long)]
    verbose: bool,
    /// Start after this line. Default: the oldest line in the supervisor's memory.
    #[arg(long, value_name = "LINE", default_value_t = 0, hide_default_value = true, value_parser = quantity::line)]
    after: u64,
}

pub(super) async fn run(global: &Global, events: &Events) -> Result<(), CliError> {
    tokio::select! {
        ended = print_all(global, events) => ended,
        // A quiet supervisor gives no line whose writing would fail.
        () = output::closed(), if events.follow => Err(CliError::OutputClosed),
    }
}

async fn print_all(global: &Global, events: &Events) -> Result<(), CliError> {
    let mut seen = Seen {
        sequence: events.after,
        boot_id: String::new(),
    };
    let mut client = OperatorServiceClient::new(global.connect().await?);
    loop {
        let mut decisions = Decisions::default();
        let ended = print(global, events, &mut client, &mut seen, &mut decisions).await;
        for line in decisions.lines {
            output::write(&show::entry_text(&line))?;
        }
        match ended {
            Ok(()) if !events.follow => return Ok(()),
            Err(error) if !events.follow || !error.is_gone() => return Err(error),
            // The supervisor has ended: follow its successor.
            Ok(()) | Err(_) => {}
        }
        eprintln!("the supervisor stopped; waiting for the next one");
        client = loop {
            tokio::time::sleep(LOOK_EVERY).await;
            if let Ok(channel) = global.connect().await {
                break OperatorServiceClient::new(channel);
            }
        };
        eprintln!("reconnected");
    }
}

/// Last printed line, and its run.
struct Seen {
    sequence: u64,
    boot_id: String,
}

/// Polling interval for a successor. Our choice: systemd restarts the supervisor after a second.
const LOOK_EVERY: Duration = Duration::from_millis(500);

async fn print(
    global: &Global,
    events: &Events,
    client: &mut OperatorServiceClient<Channel>,
    seen: &mut Seen,
    decisions: &mut Decisions,
) -> Result<(), CliError> {
    let request = tonic::Request::new(WatchEventsRequest {
        after_sequence: seen.sequence,
        boot_id: seen.boot_id.clone(),
        no_follow: !events.follow,
    });
    let mut stream = global.call(client.watch_events(request)).await?;
    let mut collected = Vec::new();
    let mut before = String::new();
    loop {
        if events.follow {
            while let Some(line) = decisions.next(Instant::now()) {
                output::write(&show::entry_text(&line))?;
            }
        }
        let response = match decisions.due().filter(|_| events.follow) {
            Some(due) => match timeout_at(due.into(), stream.message()).await {
                Ok(response) => response?,
                Err(_due) => continue,
            },
            None => stream.message().await?,
        };
        let Some(response) = response else {
            break;
        };
        if response.missed > 0 {
            eprintln!("{} events are missing here", response.missed);
        }
        let Some(entry) = response.entry else {
            continue;
        };
        (seen.sequence, seen.boot_id) = (entry.sequence, entry.boot_id.clone());
        match global.output {
            Output::Table if !events.verbose => decisions.add(Instant::now(), &entry),
            // The answer to a request repeats the preceding decision, for the client only.
            Output::Table
                if std::mem::replace(&mut before, entry.summary.clone()) == entry.summary => {}
            Output::Table => output::write(&show::entry_text(&entry))?,
            Output::Ndjson => output::write_json(global.output, &json::entry(&entry))?,
            // One document cannot be written incrementally; with --follow it would never end.
            Output::Json if events.follow => {
                output::write_json(Output::Ndjson, &json::entry(&entry))?;
            }
            Output::Json => collected.push(json::entry(&entry)),
        }
    }
    if global.output == Output::Json && !events.follow {
        output::write_json(global.output, &Value::Array(collected))?;
    }
    Ok(())
}
