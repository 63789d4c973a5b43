//! `cotenant events`.

use clap::Args;
use serde_json::Value;

use super::{Global, Output, exit::CliError, output, show};
use crate::rpc::v1::{WatchEventsRequest, operator_service_client::OperatorServiceClient};

/// Prints what happened and what was done about it.
#[derive(Debug, Args)]
pub struct Events {
    /// Go on as more happens.
    #[arg(short, long)]
    follow: bool,
    /// Begin after this number; without it, with the oldest that the supervisor keeps in memory.
    #[arg(long, value_name = "SEQUENCE", default_value_t = 0)]
    after: u64,
    /// Leave out samples, measurements and other lines that change nothing.
    #[arg(long)]
    decisions: bool,
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
    while let Some(response) = stream.message().await? {
        if response.missed > 0 {
            eprintln!("{} events are missing here", response.missed);
        }
        let Some(entry) = response.entry else { continue };
        if events.decisions && UNCHANGING.contains(&entry.name.as_str()) {
            continue;
        }
        match global.output {
            Output::Table => output::write(&show::entry_text(&entry))?,
            Output::Ndjson => output::write_json(global.output, &show::entry_json(&entry))?,
            // One document cannot be written piece by piece; with --follow it would never end.
            Output::Json if events.follow => output::write_json(Output::Ndjson, &show::entry_json(&entry))?,
            Output::Json => collected.push(show::entry_json(&entry)),
        }
    }
    if global.output == Output::Json && !events.follow {
        output::write_json(global.output, &Value::Array(collected))?;
    }
    Ok(())
}

/// Lines that come all the time and decide nothing by themselves.
const UNCHANGING: [&str; 8] = [
    "sampled",
    "measured",
    "measure",
    "sample_after",
    "deadline_reached",
    "lease_renewed",
    "engine_activity",
    "worker_activity",
];
