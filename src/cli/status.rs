//! `cotenant status`: budget, pressure, engine, workers and leases.

use std::{
    io::{self, IsTerminal},
    time::Duration,
};

use clap::Args;

use super::{Global, Output, exit::CliError, output, quantity, show};
use cotenant_rpc::{
    json,
    v1::{GetStatusRequest, operator_service_client::OperatorServiceClient},
};

/// Options of `cotenant status`.
#[derive(Debug, Args)]
pub struct Status {
    /// Repeat until interrupted; on a terminal, each state replaces the one before. With an interval: 1 s if none is given.
    #[arg(
        long, value_name = "DURATION", num_args = 0..=1, default_missing_value = "1s", require_equals = true,
        value_parser = quantity::wait
    )]
    watch: Option<Duration>,
}

pub(super) async fn run(global: &Global, status: &Status) -> Result<(), CliError> {
    let mut client = OperatorServiceClient::new(global.connect().await?);
    let clears = io::stdout().is_terminal() && global.output == Output::Table;
    loop {
        let request = global.request(GetStatusRequest {});
        let found = global.call(client.get_status(request)).await?;
        match (global.output, status.watch) {
            (Output::Table, watch) => {
                let text = show::status_text(&found, show::columns());
                // Lines are drawn over the ones before, so that nothing flickers.
                let text = match watch {
                    Some(_) if clears => format!("\x1b[H{}\x1b[J", text.replace('\n', "\x1b[K\n")),
                    Some(_) => format!("{text}\n"),
                    None => text,
                };
                output::write(&text)?;
            }
            (Output::Json, None) => output::write_json(Output::Json, &json::status(&found))?,
            _ => output::write_json(Output::Ndjson, &json::status(&found))?,
        }
        match status.watch {
            Some(interval) => tokio::time::sleep(interval).await,
            None => return Ok(()),
        }
    }
}
