//! State of one session.

use std::{collections::VecDeque, time::Duration};

use futures_util::future::BoxFuture;
use serde_json::Value;
use tokio::{sync::OwnedSemaphorePermit, time::Instant};
use tokio_util::sync::CancellationToken;

use crate::{
    api::Api,
    backend::{ChatRequest, FinishReason, RequestMeta, Usage},
    memory::RequestMemory,
    realtime::{
        input::{Input, Utterance},
        items::Items,
        outbox::Outbox,
        output::Output,
        run::{Run, Voice},
        settings::Settings,
    },
    transcription::Hearing,
};
use cotenant_speech::voice_activity::EarlyPause;
use cotenant_telemetry::Span;

pub(in crate::realtime) struct Session {
    pub(super) api: Api,
    pub(super) meta: RequestMeta,
    pub(super) id: String,
    pub(super) conversation: String,
    pub(super) settings: Settings,
    /// Memory for the settings and the values that a response derives from them.
    pub(super) memory: RequestMemory,
    pub(super) items: Items,
    pub(super) input: Input,
    /// The item of the current turn.
    pub(super) turn: Option<String>,
    pub(super) hearing: Option<Heard>,
    /// Utterances to recognise next.
    pub(super) said: VecDeque<Said>,
    /// Work on a turn that has probably ended, and the pause after which it starts.
    pub(super) early: Option<Early>,
    pub(super) early_pause: EarlyPause,
    /// The answer started early for the last recognised turn.
    pub(super) ahead: Option<Ahead>,
    /// The span of the last turn, to which its response belongs.
    pub(super) turn_span: Option<Span>,
    pub(super) active: Option<Active>,
    pub(super) outbox: Outbox,
    pub(super) shutdown: CancellationToken,
    pub(super) times: Times,
}

/// The response in progress.
pub(super) struct Active {
    pub(super) output: Output,
    pub(super) settings: Settings,
    /// Whether it continues the conversation, or only its own input.
    pub(super) own: bool,
    pub(super) input: Vec<Value>,
    /// Reservation for its own data.
    pub(super) _memory: RequestMemory,
    /// `None` until all earlier speech is recognised.
    pub(super) run: Option<Run>,
    /// Request to repeat if the early answer fails before its first text.
    pub(super) again: Option<(ChatRequest, Option<Voice>)>,
    pub(super) span: Span,
    pub(super) finished: Option<(FinishReason, Usage)>,
}

pub(super) struct Times {
    /// Times of the last client data, and of a ping sent since.
    pub(super) seen: Instant,
    pub(super) pinged: bool,
    /// Time of the last event other than a sign of life.
    pub(super) used: Instant,
}

/// An utterance to be recognised.
pub(super) struct Said {
    pub(super) item: String,
    pub(super) utterance: Utterance,
    /// Early work on it.
    pub(super) early: Option<Early>,
    /// Whether a response follows it.
    pub(super) respond: bool,
}

/// Work ahead of the end of a turn. The client sees nothing of it before the end, and it is dropped if the turn
/// continues.
pub(super) struct Early {
    pub(super) hearing: Hearing,
    pub(super) is_heard: bool,
    pub(super) unwanted: BoxFuture<'static, ()>,
    pub(super) answer: Option<Ahead>,
    pub(super) span: Span,
    pub(super) memory: Option<OwnedSemaphorePermit>,
    pub(super) place: OwnedSemaphorePermit,
}

/// An answer started early, and its request.
pub(super) struct Ahead {
    pub(super) request: ChatRequest,
    pub(super) voice: Option<Voice>,
    pub(super) run: Run,
}

/// A recognition in progress.
pub(super) struct Heard {
    pub(super) item: String,
    pub(super) respond: bool,
    pub(super) duration: Duration,
    pub(super) hearing: Hearing,
    pub(super) ahead: Option<Ahead>,
    /// Audio to recognise again if the early recognition fails.
    pub(super) again: Option<Utterance>,
    pub(super) span: Span,
    pub(super) _memory: Option<OwnedSemaphorePermit>,
    pub(super) _place: OwnedSemaphorePermit,
}
