//! `cotenant health`, with the exit codes of `grpc_health_probe`.

use std::{
    process::ExitCode,
    time::{Duration, Instant},
};

use clap::Args;
use serde_json::json;
use tonic::transport::Channel;

use super::{
    Global, Output,
    exit::{self, CliError},
    output,
};
use cotenant_rpc::{
    health_v1::{
        HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
    },
    v1::{GetStatusRequest, operator_service_client::OperatorServiceClient},
};

/// Asks whether the supervisor, or a part of it, answers.
#[derive(Debug, Args)]
pub struct Health {
    /// Service: `cotenant.engine`, `cotenant.pressure`, `cotenant.reboot`, `cotenant.worker.NAME`. Default: the supervisor.
    #[arg(
        long,
        default_value = "",
        hide_default_value = true,
        value_name = "NAME"
    )]
    service: String,
    /// Poll until it is serving, or until --timeout expires.
    #[arg(long)]
    wait: bool,
}

enum Found {
    Status(ServingStatus),
    Unreachable(CliError),
    Failed(CliError),
}

pub(super) async fn run(global: &Global, health: &Health) -> ExitCode {
    let until = Instant::now() + global.timeout;
    let found = loop {
        let found = ask(global, &health.service).await;
        let serves = matches!(found, Found::Status(ServingStatus::Serving));
        if serves || !health.wait || Instant::now() >= until {
            break found;
        }
        tokio::time::sleep(ASK_AGAIN_AFTER).await;
    };
    let code = match found {
        Found::Status(status) => {
            let shown = match global.output {
                Output::Table => output::write(&format!("{}\n", status.as_str_name())),
                Output::Json | Output::Ndjson => output::write_json(
                    global.output,
                    &json!({ "service": health.service, "status": status.as_str_name() }),
                ),
            };
            match (status, shown) {
                (ServingStatus::Serving, Ok(()) | Err(CliError::OutputClosed)) => {
                    exit::health::SERVING
                }
                (ServingStatus::Serving, Err(error)) => {
                    let _ = error.report(global.output != Output::Table);
                    exit::health::FAILED
                }
                _ => exit::health::NOT_SERVING,
            }
        }
        Found::Unreachable(error) => {
            let _ = error.report(global.output != Output::Table);
            exit::health::UNREACHABLE
        }
        Found::Failed(error) => {
            let _ = error.report(global.output != Output::Table);
            exit::health::FAILED
        }
    };
    ExitCode::from(code)
}

async fn ask(global: &Global, service: &str) -> Found {
    let channel = match global.connect().await {
        Ok(channel) => channel,
        Err(error) => return Found::Unreachable(error),
    };
    let request = global.request(HealthCheckRequest {
        service: service.to_owned(),
    });
    let named = OperatorServiceClient::new(channel.clone());
    match global.call(HealthClient::new(channel).check(request)).await {
        Ok(answer) => Found::Status(answer.status()),
        Err(CliError::Call(status)) if status.code() == tonic::Code::NotFound => {
            let error = format!("the supervisor has no service `{service}`");
            let known = format!("services: {}", services(global, named).await);
            Found::Failed(CliError::plain(error, exit::health::FAILED).with_hint(known))
        }
        Err(error) => Found::Failed(error),
    }
}

/// Lists the services of the supervisor, and its workers if visible to this user.
async fn services(global: &Global, mut operator: OperatorServiceClient<Channel>) -> String {
    let mut names = ["engine", "pressure", "reboot"]
        .map(|part| format!("`cotenant.{part}`"))
        .to_vec();
    match global
        .call(operator.get_status(global.request(GetStatusRequest {})))
        .await
    {
        Ok(status) => names.extend(
            status
                .workers
                .iter()
                .map(|worker| format!("`cotenant.worker.{}`", worker.name)),
        ),
        Err(_) => names.push("`cotenant.worker.NAME` for each worker".to_owned()),
    }
    names.join(", ")
}

/// Polling interval of --wait (our choice).
const ASK_AGAIN_AFTER: Duration = Duration::from_millis(100);
