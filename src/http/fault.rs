//! Errors in OpenAI's form, and the rendering of [`Refusal`].

use std::time::Duration;

use axum::{
    Json,
    http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

use cotenant_conversation::{
    refusal::Refusal,
    refusals::{self, Kind, with_hint},
};
use cotenant_units::millis;

/// A failure in the form of OpenAI's API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Fault {
    status: StatusCode,
    kind: &'static str,
    code: &'static str,
    param: Option<String>,
    message: String,
    retry_after: Option<Duration>,
}

impl Fault {
    /// An invalid request: 400, which a retry does not change.
    pub(super) fn invalid(
        field: &str,
        value: impl std::fmt::Display,
        problem: impl Into<String>,
    ) -> Self {
        refusals::invalid(field, shortened(&value.to_string()), problem).into()
    }

    /// A failure that is not a [`Refusal`]: of transport or encoding.
    pub(super) fn request(
        status: StatusCode,
        code: &'static str,
        message: impl Into<String>,
    ) -> Self {
        Self {
            status,
            kind: INVALID_REQUEST,
            code,
            param: None,
            message: message.into(),
            retry_after: None,
        }
    }

    /// [`Fault::request`] with status 400.
    pub(super) fn bad_request(code: &'static str, message: impl Into<String>) -> Self {
        Self::request(StatusCode::BAD_REQUEST, code, message)
    }

    #[must_use]
    pub(super) fn of_param(mut self, param: &str) -> Self {
        self.param = Some(param.to_owned());
        self
    }

    /// Replaces `messages`, by which faults of conversations name their field, with the API's field.
    #[must_use]
    pub(super) fn input_named(self, field: &str) -> Self {
        self.renamed(CONVERSATION, field)
    }

    /// Renames the parameter `field` to its name in another API.
    #[must_use]
    pub(super) fn renamed(mut self, field: &str, there: &str) -> Self {
        if self.param.as_deref() == Some(field) {
            self.param = Some(there.to_owned());
            if let Some(rest) = self.message.strip_prefix(field) {
                self.message = format!("{there}{rest}");
            }
        }
        self
    }

    pub(super) fn to_json(&self) -> Value {
        json!({"error": {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }})
    }

    /// An answer whose body has only the message, `{"error": "…"}`; status and retry headers are the same.
    pub(super) fn into_plain_response(self) -> Response {
        let body = Json(json!({"error": self.message}));
        (self.status, self.retry_headers(), body).into_response()
    }

    pub(super) const fn status(&self) -> StatusCode {
        self.status
    }

    /// Stable code for programs.
    pub(super) const fn code(&self) -> &'static str {
        self.code
    }

    pub(super) const fn passes(&self) -> bool {
        self.retry_after.is_some()
    }

    pub(super) fn message(&self) -> &str {
        &self.message
    }

    /// The retry headers: clients obey `x-should-retry` first, then `retry-after-ms`, then `retry-after`.
    pub(super) fn retry_headers(&self) -> HeaderMap {
        let mut headers = HeaderMap::new();
        let Some(wait) = self.retry_after else {
            headers.insert(SHOULD_RETRY, HeaderValue::from_static("false"));
            return headers;
        };
        let wait = wait.clamp(RETRY_AFTER_MIN, RETRY_AFTER_MAX);
        let millis = millis(wait);
        headers.insert(SHOULD_RETRY, HeaderValue::from_static("true"));
        headers.insert(RETRY_AFTER_MS, HeaderValue::from(millis));
        headers.insert(
            header::RETRY_AFTER,
            HeaderValue::from(millis.div_ceil(1000)),
        );
        headers
    }
}

/// Refuses a field of the request.
///
/// # Errors
/// Always [`Fault::invalid`].
pub(super) fn invalid<T>(
    field: &str,
    value: impl std::fmt::Display,
    problem: impl Into<String>,
) -> Result<T, Fault> {
    Err(Fault::invalid(field, value, problem))
}

impl From<Refusal> for Fault {
    fn from(refusal: Refusal) -> Self {
        let Kind { code, status, .. } = Kind::of(&refusal);
        let (kind, status) = match StatusCode::from_u16(status) {
            Ok(StatusCode::TOO_MANY_REQUESTS) => (RATE_LIMIT, StatusCode::TOO_MANY_REQUESTS),
            Ok(status) if status.is_client_error() => (INVALID_REQUEST, status),
            status => (
                SERVER_ERROR,
                status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR),
            ),
        };
        let param = match &refusal {
            Refusal::ContextLengthExceeded { .. } => Some(CONVERSATION.to_owned()),
            Refusal::Invalid { field, .. } => Some(field.clone()),
            Refusal::UnknownModel { .. } => Some("model".to_owned()),
            _ => None,
        };
        Self {
            status,
            kind,
            code,
            param,
            message: with_hint(&refusal),
            retry_after: refusal.retry_after(),
        }
    }
}

impl IntoResponse for Fault {
    fn into_response(self) -> Response {
        (self.status, self.retry_headers(), Json(self.to_json())).into_response()
    }
}

/// A value for display in an error: one line of limited length.
pub(super) fn shortened(value: &str) -> String {
    let mut chars = value.chars().map(|c| if c.is_control() { ' ' } else { c });
    let mut text: String = chars.by_ref().take(SHOWN_CHARS_MAX).collect();
    if chars.next().is_some() {
        text.push('…');
    }
    text
}

/// The field by which faults of conversations name their field.
const CONVERSATION: &str = "messages";
const INVALID_REQUEST: &str = "invalid_request_error";
const RATE_LIMIT: &str = "rate_limit_error";
const SERVER_ERROR: &str = "server_error";

/// Read by the OpenAI SDKs before the status.
const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");
/// Read by the OpenAI SDKs before `retry-after`.
const RETRY_AFTER_MS: HeaderName = HeaderName::from_static("retry-after-ms");

/// At zero the SDK would use its own backoff.
const RETRY_AFTER_MIN: Duration = Duration::from_millis(1);
/// Beyond 120 s the OpenAI SDK does not retry at all (`_base_client.py`).
const RETRY_AFTER_MAX: Duration = Duration::from_secs(120);
/// Our choice: enough to recognise the value.
const SHOWN_CHARS_MAX: usize = 80;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_never_zero_and_never_so_long_that_clients_give_up() {
        for (wait, millis, seconds) in [
            (0, "1", "1"),
            (999, "999", "1"),
            (1001, "1001", "2"),
            (900_000, "120000", "120"),
        ] {
            let fault = Fault::from(Refusal::Draining {
                act: String::new(),
                retry_after: Duration::from_millis(wait),
            });
            let headers = fault.retry_headers();
            assert_eq!(headers.get("retry-after-ms").unwrap(), millis);
            assert_eq!(headers.get("retry-after").unwrap(), seconds);
        }
    }

    #[test]
    fn a_long_value_is_shortened_at_a_character() {
        assert_eq!(shortened("a\nb"), "a b");
        let shown = shortened(&"ü".repeat(500));
        assert_eq!(shown.chars().count(), SHOWN_CHARS_MAX + 1);
    }
}
