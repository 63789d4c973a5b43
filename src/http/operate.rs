//! Commands of operators, whom their key names.

use axum::{
    Extension, Json,
    extract::{Request, State},
    http::StatusCode,
};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    access::Client,
    answer::read_plain_json,
    api::{Api, Meta},
    backend::{Asked, RequestMeta},
    fault::Fault,
};
use cotenant_policy::{
    event::{Answer, Event, Origin, WorkerCommand},
    roles::Role,
};
use cotenant_units::Bytes;

/// Body of `POST /operate`.
#[derive(Deserialize)]
#[serde(
    rename_all = "snake_case",
    tag = "command",
    deny_unknown_fields,
    expecting = "a `command`: `shed` with `bytes`, `regrow`, or `restart` with `worker`"
)]
enum Command {
    Shed { bytes: u64 },
    Regrow {},
    Restart { worker: String },
}

/// The client of a request, if its key has the role of an operator.
pub(super) fn operator(meta: &RequestMeta) -> Option<&Client> {
    let client = meta.client.as_deref();
    client.filter(|client| client.role == Role::Operator)
}

/// `POST /operate`: a command of an operator, and its outcome as a sentence. Only a key in a header counts, which no page
/// of another site can send: browsers attach nothing else to this path.
pub(super) async fn operate(
    State(api): State<Api>,
    Extension(meta): Meta,
    request: Request,
) -> Result<Json<Value>, Fault> {
    let Some(client) = operator(&meta) else {
        let who = match &meta.client {
            Some(client) => format!("client `{}` has the role {}", client.name, client.role),
            None => "without `http.keys_file` no client has a role".to_owned(),
        };
        let message = format!(
            "cannot operate: {who}, operator is required (hint: set `role: operator` of a client in `http.keys_file`)"
        );
        return Err(Fault::request(
            StatusCode::FORBIDDEN,
            "role_missing",
            message,
        ));
    };
    let by = Some(Origin::Key(client.name.to_string()));
    let (command, _memory): (Command, _) = read_plain_json(&api, request).await?;
    let status = &api.backends().status;
    let asked: Asked = match command {
        Command::Shed { bytes } => Box::new(move |ticket| Event::OperatorShed {
            ticket,
            bytes: Bytes::new(bytes),
            by,
        }),
        Command::Regrow {} => Box::new(move |ticket| Event::OperatorRegrow { ticket, by }),
        Command::Restart { worker } => {
            let workers = &status.snapshot().workers;
            if !workers.iter().any(|known| known.name == worker) {
                return Err(Fault::invalid("worker", &worker, "is no worker"));
            }
            Box::new(move |ticket| Event::OperatorWorker {
                ticket,
                worker,
                command: WorkerCommand::Recycle,
                by,
            })
        }
    };
    let outcome = match status.ask(asked).await {
        Some(Answer::Shed(outcome)) => outcome.to_string(),
        Some(Answer::Done { done }) => done.to_string(),
        Some(Answer::Denied { denial, .. }) => {
            let message = denial.to_string();
            return Err(Fault::request(StatusCode::CONFLICT, "denied", message));
        }
        Some(Answer::Lease { .. } | Answer::WouldGrant { .. }) | None => {
            let message =
                "cannot operate: the supervisor is stopping or overloaded (hint: try again)";
            let unavailable = StatusCode::SERVICE_UNAVAILABLE;
            return Err(Fault::request(
                unavailable,
                "supervisor_unavailable",
                message,
            ));
        }
    };
    Ok(Json(json!({"outcome": outcome})))
}
