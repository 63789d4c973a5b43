//! Handler of `GET /v1/realtime`: the WebSocket upgrade, and the sessions of one listener.

use std::sync::Arc;

use axum::{
    Extension,
    extract::{
        Query, State,
        rejection::QueryRejection,
        ws::{WebSocketUpgrade, rejection::WebSocketUpgradeRejection},
    },
    response::{IntoResponse as _, Response},
};
use serde::Deserialize;
use tokio_util::{
    sync::{CancellationToken, DropGuard},
    task::TaskTracker,
};

use super::{
    super::{
        answer::llm,
        api::{Api, Meta, Permits},
        fault::Fault,
        memory::RequestMemory,
        models::model_named,
    },
    session::{Session, draining},
    settings::Settings,
};

/// The sessions of one listener, which outlive the connections from which they were upgraded.
#[derive(Clone)]
pub(crate) struct Sessions {
    tasks: TaskTracker,
    shutdown: CancellationToken,
    ended: CancellationToken,
}

impl Sessions {
    /// Sessions that end when `shutdown` is cancelled, after their current response, or when the guard is dropped.
    pub(crate) fn new(shutdown: &CancellationToken) -> (Self, DropGuard) {
        let sessions = Self {
            tasks: TaskTracker::new(),
            shutdown: shutdown.clone(),
            ended: CancellationToken::new(),
        };
        let guard = sessions.ended.clone().drop_guard();
        (sessions, guard)
    }

    /// Waits until all sessions have ended; no new ones may follow.
    pub(crate) async fn all_ended(&self) {
        self.tasks.close();
        self.tasks.wait().await;
    }
}

#[derive(Debug, Deserialize)]
pub(crate) struct Wanted {
    model: Option<String>,
    intent: Option<String>,
}

pub(crate) async fn realtime(
    State(api): State<Api>,
    Extension(meta): Meta,
    Extension(sessions): Extension<Sessions>,
    Extension(place): Extension<Arc<Permits>>,
    Extension(memory): Extension<RequestMemory>,
    wanted: Result<Query<Wanted>, QueryRejection>,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, Fault> {
    let Query(wanted) =
        wanted.map_err(|rejection| Fault::invalid("query", "", rejection.body_text()))?;
    let transcription_only = wanted.intent.as_deref() == Some("transcription");
    let backends = api.backends();
    let model = if transcription_only {
        wanted.model.unwrap_or_default()
    } else {
        let _there = llm(&api)?;
        model_named(&api, wanted.model.as_deref())?
    };
    if backends.status.snapshot().draining {
        return Err(draining().into());
    }
    let upgrade = upgrade.map_err(|rejection| {
        let status = rejection.into_response().status();
        let message = "not a WebSocket handshake (hint: connect to `ws://…/v1/realtime` with a WebSocket client)";
        Fault::request(status, "websocket_required", message)
    })?;
    let settings = Settings::new(model, transcription_only, backends.speech.is_some());
    let message_max = api.limits().session_message_max.as_len();
    let task = sessions.tasks.token();
    Ok(upgrade
        // the subprotocol requested by browsers, followed by their key
        .protocols(["realtime"])
        .max_message_size(message_max)
        .max_frame_size(message_max)
        .read_buffer_size(READ_BUFFER)
        .write_buffer_size(0)
        .on_upgrade(move |socket| async move {
            let ended = sessions.ended.clone();
            let session = Session::new(api, meta, memory, settings, sessions.shutdown);
            tokio::select! {
                () = ended.cancelled() => {}
                () = session.run(socket) => {}
            }
            drop((place, task));
        }))
}

/// Our choice: far above the size of an event; allocated per session.
const READ_BUFFER: usize = 16 << 10;
