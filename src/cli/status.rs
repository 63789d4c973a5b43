//! `cotenant status`: budget, pressure, engine, workers and leases.

use super::{Global, Output, exit::CliError, output, show};
use cotenant_rpc::{
    json,
    v1::{GetStatusRequest, operator_service_client::OperatorServiceClient},
};

pub(super) async fn status(global: &Global) -> Result<(), CliError> {
    let mut client = OperatorServiceClient::new(global.connect().await?);
    let status = global
        .call(client.get_status(global.request(GetStatusRequest {})))
        .await?;
    match global.output {
        Output::Table => output::write(&show::status_text(&status, show::columns())),
        Output::Json | Output::Ndjson => output::write_json(global.output, &json::status(&status)),
    }
}
