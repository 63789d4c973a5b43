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

/// One session.
pub(in crate::realtime) struct Session {
    pub(super) api: Api,
    pub(super) meta: RequestMeta,
    pub(super) id: String,
    pub(super) conversation: String,
    pub(super) settings: Settings,
    /// Memory for the settings and for values that a response derives from them.
    pub(super) memory: RequestMemory,
    pub(super) items: Items,
    pub(super) input: Input,
    /// The item of the turn that is being spoken.
    pub(super) turn: Option<String>,
    pub(super) hearing: Option<Heard>,
    /// Utterances to recognise next.
    pub(super) said: VecDeque<Said>,
    /// Work on a turn that has probably ended, and the pause after which it has.
    pub(super) early: Option<Early>,
    pub(super) early_pause: EarlyPause,
    /// The answer that was begun ahead of the turn that was recognised last.
    pub(super) ahead: Option<Ahead>,
    /// The span of the last turn, which the response to it continues.
    pub(super) turn_span: Option<Span>,
    pub(super) active: Option<Active>,
    pub(super) outbox: Outbox,
    pub(super) shutdown: CancellationToken,
    pub(super) times: Times,
}

/// The response that is given.
pub(super) struct Active {
    pub(super) output: Output,
    pub(super) settings: Settings,
    /// Whether it continues the conversation, or its own input only.
    pub(super) own: bool,
    pub(super) input: Vec<Value>,
    /// Reservation for its own data.
    pub(super) _memory: RequestMemory,
    /// `None` until the preceding speech is recognised.
    pub(super) run: Option<Run>,
    /// Request to repeat if the answer that was begun ahead fails before its first word.
    pub(super) again: Option<(ChatRequest, Option<Voice>)>,
    pub(super) span: Span,
    pub(super) finished: Option<(FinishReason, Usage)>,
}

pub(super) struct Times {
    /// Time of the last client data, and of a ping sent since then.
    pub(super) seen: Instant,
    pub(super) pinged: bool,
    /// When something happened that is no sign of life alone.
    pub(super) used: Instant,
}

/// An utterance that waits for the recogniser.
pub(super) struct Said {
    pub(super) item: String,
    pub(super) utterance: Utterance,
    /// What was done of it ahead.
    pub(super) early: Option<Early>,
    /// Whether a response follows it.
    pub(super) respond: bool,
}

/// Work ahead of the end of a turn. Its client sees nothing of it before the turn has ended, and it is dropped if the
/// turn goes on.
pub(super) struct Early {
    pub(super) hearing: Hearing,
    pub(super) is_heard: bool,
    pub(super) unwanted: BoxFuture<'static, ()>,
    pub(super) answer: Option<Ahead>,
    pub(super) span: Span,
    pub(super) memory: Option<OwnedSemaphorePermit>,
    pub(super) place: OwnedSemaphorePermit,
}

/// An answer that was begun ahead, and the request that it answers.
pub(super) struct Ahead {
    pub(super) request: ChatRequest,
    pub(super) voice: Option<Voice>,
    pub(super) run: Run,
}

/// Something that is being recognised.
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
