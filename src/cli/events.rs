//! `cotenant events`: events and decisions, as they happen.

use clap::Args;
use serde_json::Value;

use super::{Global, Output, exit::CliError, output, quantity, show};
use crate::rpc::{
    json,
    v1::{WatchEventsRequest, operator_service_client::OperatorServiceClient},
};

/// Prints what happened and what was done about it.
///
/// Each line has its number, the time of day, a mark and one fact. Marks: `>` an action of the supervisor, `=` its start,
/// `!` lines that the journal lost, none for an event.
#[derive(Debug, Args)]
pub struct Events {
    /// Go on as more happens.
    #[arg(short, long)]
    follow: bool,
    /// Begin after this line; without it, with the oldest that the supervisor keeps in memory.
    #[arg(long, value_name = "LINE", default_value_t = 0, hide_default_value = true, value_parser = quantity::line)]
    after: u64,
}

pub(super) async fn run(global: &Global, events: &Events) -> Result<(), CliError> {
    let mut client = OperatorServiceClient::new(global.connect().await?);
    let request = tonic::Request::new(WatchEventsRequest {
        after_sequence: events.after,
        boot_id: String::new(),
        no_follow: !events.follow,
    });
    let mut stream = global.call(client.watch_events(request)).await?;
    let mut collected = Vec::new();
    let mut before = String::new();
    while let Some(response) = stream.message().await? {
        if response.missed > 0 {
            eprintln!("{} events are missing here", response.missed);
        }
        let Some(entry) = response.entry else { continue };
        match global.output {
            // The answer to a request repeats the decision before it, for the client alone.
            Output::Table if std::mem::replace(&mut before, entry.summary.clone()) == entry.summary => {}
            Output::Table => output::write(&show::entry_text(&entry))?,
            Output::Ndjson => output::write_json(global.output, &json::entry(&entry))?,
            // One document cannot be written piece by piece; with --follow it would never end.
            Output::Json if events.follow => output::write_json(Output::Ndjson, &json::entry(&entry))?,
            Output::Json => collected.push(json::entry(&entry)),
        }
    }
    if global.output == Output::Json && !events.follow {
        output::write_json(global.output, &Value::Array(collected))?;
    }
    Ok(())
}
