//! Streams of server-sent events: opened in time, kept alive, aborted on failure.

use std::{borrow::Borrow, convert::Infallible, io, time::Duration};

use axum::{
    body::{Body, Bytes as Piece},
    http::{HeaderMap, HeaderName, HeaderValue, header},
    response::{
        IntoResponse, Response,
        sse::{Event, KeepAlive, Sse},
    },
};
use futures_util::{
    StreamExt,
    stream::{self, Stream},
};
use serde_json::{Value, json};
use tokio::time::timeout;

use super::{
    api::Api,
    backend::{ChatRequest, RequestMeta},
    fault::Fault,
    limits::Limits,
};
use cotenant_conversation::refusal::Refusal;

/// Time that a stream waits for admission before it is opened: at most half of the client's patience.
pub(super) fn admission_patience(meta: &RequestMeta, limits: &Limits) -> Duration {
    meta.patience.map_or(limits.admission_timeout, |patience| {
        limits.admission_timeout.min(patience / 2)
    })
}

/// Time that a request waits during a shortage, so that its refusal is a status code and arrives in time.
pub(super) fn held_for_memory(api: &Api, meta: &RequestMeta) -> Duration {
    api.limits()
        .memory_patience
        .min(admission_patience(meta, api.limits()))
}

/// Payload of one event, or of one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Payload {
    event: Option<&'static str>,
    data: String,
}

impl Payload {
    /// The last event of a stream of OpenAI's older APIs.
    pub(super) fn done() -> Self {
        Self {
            event: None,
            data: "[DONE]".to_owned(),
        }
    }
}

impl Payload {
    pub(super) fn named(event: &'static str, data: &Value) -> Self {
        Self {
            event: Some(event),
            data: data.to_string(),
        }
    }
}

impl From<&Value> for Payload {
    fn from(data: &Value) -> Self {
        Self {
            event: None,
            data: data.to_string(),
        }
    }
}

/// A stream of JSON lines, with `quiet` after every silence.
pub(super) fn lines<S>(payloads: S, quiet: Payload, meta: &RequestMeta, limits: &Limits) -> Response
where
    S: Stream<Item = Payload> + Send + Unpin + 'static,
{
    let silence = silence(meta, limits);
    let lines = stream::unfold((payloads, quiet), move |(mut payloads, quiet)| async move {
        let line = match timeout(silence, payloads.next()).await {
            Ok(payload) => payload?.data,
            Err(_elapsed) => quiet.data.clone(),
        };
        Some((
            Ok::<_, Infallible>(Piece::from(line + "\n")),
            (payloads, quiet),
        ))
    });
    let kind = [(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/x-ndjson"),
    )];
    (kind, Body::from_stream(lines)).into_response()
}

/// A stream of server-sent events, with a comment after every silence. An error aborts the connection.
pub(super) fn sse<S>(payloads: S, meta: &RequestMeta, limits: &Limits) -> Response
where
    S: Stream<Item = io::Result<Payload>> + Send + 'static,
{
    let events = payloads.then(|payload| async {
        if payload.is_err() {
            // Lets earlier data be sent first: aborting the connection discards unsent data.
            tokio::task::yield_now().await;
        }
        payload.map(|payload| {
            let event = payload
                .event
                .map_or_else(Event::default, |name| Event::default().event(name));
            event.data(payload.data)
        })
    });
    let keepalive = KeepAlive::new()
        .interval(silence(meta, limits))
        .text("keepalive");
    (
        // keeps nginx and similar proxies from buffering the stream
        [(NO_BUFFERING, HeaderValue::from_static("no"))],
        Sse::new(events).keep_alive(keepalive),
    )
        .into_response()
}

/// Silence after which a comment is sent: at most a third of the client's timeout.
pub(super) fn silence(meta: &RequestMeta, limits: &Limits) -> Duration {
    meta.patience.map_or(limits.keepalive, |patience| {
        limits.keepalive.min((patience / 3).max(SILENCE_MIN))
    })
}

/// The header of ignored fields, and of schema keywords that the answer's form does not enforce.
pub(super) fn ignored_of(fields: Vec<impl Into<String>>, request: &ChatRequest) -> HeaderMap {
    let mut names: Vec<String> = fields.into_iter().map(Into::into).collect();
    if let Some(form) = &request.form {
        names.extend(form.let_through(request.prompt.tools()));
    }
    ignored_header(&names)
}

pub(super) fn ignored_header(ignored: &[impl Borrow<str>]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    if let Ok(value) = HeaderValue::from_str(&ignored.join(", "))
        && !ignored.is_empty()
    {
        headers.insert(IGNORED, value);
    }
    headers
}

/// The last event of a failed stream, and the error that aborts its connection.
pub(super) fn broken_off(refusal: Refusal) -> [io::Result<Payload>; 2] {
    let error = Fault::from(refusal.clone()).to_json();
    let error = merged(error, json!({"type": "error"}));
    [Ok(Payload::from(&error)), Err(io::Error::other(refusal))]
}

/// Merges two objects; members of `more` follow, and override equal names.
pub(super) fn merged(mut object: Value, more: Value) -> Value {
    if let (Some(object), Value::Object(more)) = (object.as_object_mut(), more) {
        object.extend(more);
    }
    object
}

/// Our choice: more frequent comments are useless traffic.
const SILENCE_MIN: Duration = Duration::from_millis(100);
const NO_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");
/// Ignored fields of the request.
pub(super) const IGNORED: HeaderName = HeaderName::from_static("x-cotenant-ignored");

#[cfg(test)]
mod tests {
    use super::*;
    use cotenant_conversation::AnswerForm;

    #[test]
    fn keywords_that_a_form_does_not_keep_are_named_behind_the_fields() {
        let schema = json!({"type": "array", "uniqueItems": true, "items": {"type": "string", "format": "password"}});
        let form = Some(AnswerForm::JsonSchema {
            schema,
            field: "format",
        });
        let headers = ignored_of(
            vec!["min_p"],
            &ChatRequest {
                form,
                ..ChatRequest::default()
            },
        );
        assert_eq!(headers[IGNORED], "min_p, format.format, format.uniqueItems");
        assert!(ignored_of(Vec::<String>::new(), &ChatRequest::default()).is_empty());
    }
}
