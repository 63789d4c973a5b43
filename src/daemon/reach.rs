//! Reaches a worker with a request: wakes it, waits until it accepts requests, and counts the request.

use std::{sync::Arc, time::Duration};

use tokio::time::{Instant, timeout_at};

use super::{
    control_handle::{AtWork, ControlHandle},
    workers::Speaker,
};
use cotenant_conversation::{
    refusal::Refusal,
    refusals::{invalid, worker_lost},
};
use cotenant_http::backend::RequestMeta;
use cotenant_policy::{
    event::Event,
    snapshot::{self, Rest, Snapshot},
};
use cotenant_rpc::supervisor::Supervisor as _;
use cotenant_speech::{
    client::{ClientError, Endpoint},
    server::{BAD_REQUEST, TOO_LONG},
};
use cotenant_units::causes::in_one_line;
use cotenant_worker::handle::WorkerState;

/// Retry interval while a worker is starting.
pub(super) const RETRY_SOON: Duration = Duration::from_millis(500);

/// Retry interval for a worker that waits for memory it cannot get. Our choice: the longest wait of a request for a
/// worker, since an operator has to change something first.
const RETRY_LATE: Duration = Duration::from_secs(60);

/// Part of a client's timeout reserved for the response itself, including a refusal.
pub(super) const TO_ANSWER: Duration = Duration::from_millis(200);

/// Returns the address of a worker that accepts requests, and a guard that counts a request in flight; waits for the
/// worker if necessary.
///
/// # Errors
/// If it is stopped permanently, or does not accept requests in time.
pub(super) async fn worker(
    control: &Arc<ControlHandle>,
    speaker: &Speaker,
    act: &str,
    meta: &RequestMeta,
) -> Result<(Endpoint, AtWork), Refusal> {
    let name = speaker.handle.name();
    let limit = speaker.way.wake_timeout;
    // A start after the client's timeout is useless to it, a refusal before it is not.
    let limit = meta.patience.map_or(limit, |patience| {
        limit.min(patience.saturating_sub(TO_ANSWER))
    });
    let deadline = Instant::now() + limit;
    let mut states = control.snapshot();
    let mut asked = false;
    loop {
        let state = states.borrow_and_update().clone();
        let mut found = look(&state, speaker, meta.part_of.is_some(), act);
        if matches!(found, Look::Go(_)) {
            // Count first, then check again: a worker being stopped has seen one of the two.
            let at_work = control.at_work(name);
            found = look(&control.state(), speaker, meta.part_of.is_some(), act);
            if let Look::Go(endpoint) = found {
                return Ok((endpoint, at_work));
            }
        }
        let doing = match found {
            Look::Never(refusal) => return Err(refusal),
            Look::Wait(doing) => doing,
            Look::Go(_) => continue,
        };
        if !asked {
            asked = true;
            let wanted = Event::WorkerWanted {
                worker: name.to_owned(),
                client: meta.client.as_ref().map(|client| client.name.to_string()),
            };
            control.tell(wanted).await;
        }
        let late = Refusal::Starting {
            act: act.to_owned(),
            who: format!("worker `{name}`"),
            state: doing.to_owned(),
            retry_after: RETRY_SOON,
        };
        match timeout_at(deadline, states.changed()).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) | Err(_) => return Err(late),
        }
    }
}

pub(super) enum Look {
    /// Available at this endpoint.
    Go(Endpoint),
    /// It will not accept this request.
    Never(Refusal),
    /// It may become available; with its current activity.
    Wait(&'static str),
}

/// Returns whether a worker accepts a request, which may be a stage of a running answer.
pub(super) fn look(state: &Snapshot, speaker: &Speaker, is_stage: bool, act: &str) -> Look {
    let act = act.to_owned();
    if state.draining && !is_stage {
        return Look::Never(Refusal::Draining {
            act,
            retry_after: RETRY_SOON,
        });
    }
    let name = speaker.handle.name();
    let Some(view) = state.workers.iter().find(|view| view.name == name) else {
        return Look::Wait("unknown");
    };
    match (view.state, view.rest) {
        (snapshot::WorkerState::Degraded, _) => {
            let reason = view.last_exit.clone().unwrap_or_default();
            Look::Never(worker_lost(name, reason))
        }
        (_, Some(Rest::Operator)) => Look::Never(Refusal::Stopped {
            act,
            worker: name.to_owned(),
        }),
        (snapshot::WorkerState::Ready, _) if view.winding_up => Look::Wait("about to be restarted"),
        (snapshot::WorkerState::Ready, _) => {
            match (speaker.handle.state(), speaker.handle.endpoint()) {
                (WorkerState::Ready { .. }, Some(endpoint)) => Look::Go(endpoint),
                _ => Look::Wait("ending"),
            }
        }
        (snapshot::WorkerState::Stopped, Some(_)) => Look::Wait("asleep"),
        (snapshot::WorkerState::Stopped, None) => Look::Wait("not started yet"),
        (snapshot::WorkerState::AwaitingMemory, _)
            if let Some(wait) = view.waits.as_ref().filter(|wait| wait.is_out_of_reach()) =>
        {
            Look::Never(Refusal::InsufficientMemory {
                act,
                asked: wait.needs,
                free: wait.free,
                reclaimable: wait.most.saturating_sub(wait.free),
                budget: state.memory.budget,
                retry_after: RETRY_LATE,
            })
        }
        (snapshot::WorkerState::AwaitingMemory, _) => Look::Wait("waiting for memory"),
        (snapshot::WorkerState::BackingOff, _) => {
            Look::Wait("waiting for its restart after a failure")
        }
        (snapshot::WorkerState::Starting, _) => Look::Wait("starting"),
        (snapshot::WorkerState::Stopping, _) => Look::Wait("stopping"),
    }
}

pub(super) fn lost(worker: String) -> impl FnOnce(ClientError) -> Refusal {
    move |error| worker_lost(&worker, in_one_line(&error))
}

/// Returns the refusal for a worker's failure. Input that the worker will never accept is a permanent error, which
/// clients do not retry.
pub(super) fn refusal_of(error: ClientError, worker: String, field: &str) -> Refusal {
    match error {
        ClientError::Refused {
            text,
            code: Some(code),
            ..
        } if matches!(code.as_str(), BAD_REQUEST | TOO_LONG) => {
            invalid(field, worker, format!("rejected the request: {text}"))
        }
        error => lost(worker)(error),
    }
}
