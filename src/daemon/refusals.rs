//! Comparison of all refusals in all protocols.

use axum::response::Response;
use tonic::{Code, Status};
use tonic_types::StatusExt as _;

use super::wyoming::rendered as wyoming;
use crate::policy::refusal::{Refusal, samples};

/// What one situation is everywhere.
#[derive(Debug, PartialEq)]
struct Row {
    /// Code, reason, and whether it says when to try again.
    grpc: (Code, &'static str, bool),
    /// Status, code, and `x-should-retry`.
    openai: (u16, &'static str, bool),
    ollama: u16,
    /// Status and type of Anthropic's API.
    anthropic: (u16, &'static str),
    /// Code of the `error` that closes the connection.
    wyoming: &'static str,
    /// Whether somebody who talks with the assistant is told `not-handled`, on an open connection.
    not_handled: bool,
}

const fn row(
    grpc: (Code, &'static str, bool),
    openai: (u16, &'static str, bool),
    ollama: u16,
    anthropic: (u16, &'static str),
    wyoming: &'static str,
    not_handled: bool,
) -> Row {
    Row {
        grpc,
        openai,
        ollama,
        anthropic,
        wyoming,
        not_handled,
    }
}

const OVERLOADED: (u16, &str) = (529, "overloaded_error");
const FAILED: (u16, &str) = (500, "api_error");
const INVALID: (u16, &str) = (400, "invalid_request_error");
const NOT_FOUND: (u16, &str) = (404, "not_found_error");

/// The table. The match is exhaustive: a new situation has to say what it is in each protocol.
fn expected(refusal: &Refusal) -> Row {
    use Code::{
        Aborted, DeadlineExceeded, FailedPrecondition, Internal, InvalidArgument, NotFound, PermissionDenied,
        ResourceExhausted, Unavailable,
    };
    match refusal {
        Refusal::InsufficientMemory { .. } | Refusal::KvCapacityShed { .. } => row(
            (ResourceExhausted, "INSUFFICIENT_MEMORY", true),
            (503, "memory_pressure", true),
            503,
            OVERLOADED,
            "memory-pressure",
            true,
        ),
        Refusal::PressureHigh { .. } => row(
            (ResourceExhausted, "PRESSURE_HIGH", true),
            (503, "memory_pressure", true),
            503,
            OVERLOADED,
            "memory-pressure",
            true,
        ),
        Refusal::ExceedsBudget { .. } => row(
            (FailedPrecondition, "EXCEEDS_BUDGET", false),
            (400, "exceeds_budget", false),
            400,
            INVALID,
            "exceeds-budget",
            false,
        ),
        Refusal::ContextLengthExceeded { .. } => row(
            (InvalidArgument, "CONTEXT_LENGTH_EXCEEDED", false),
            (400, "context_length_exceeded", false),
            400,
            INVALID,
            "context-length-exceeded",
            true,
        ),
        Refusal::KvReclaimed { .. } => row(
            (Aborted, "KV_RECLAIMED", true),
            (503, "kv_reclaimed", true),
            503,
            OVERLOADED,
            "kv-reclaimed",
            true,
        ),
        Refusal::QuotaExceeded { .. } => row(
            (ResourceExhausted, "QUOTA_EXCEEDED", true),
            (429, "rate_limit_exceeded", true),
            429,
            (429, "rate_limit_error"),
            "busy",
            false,
        ),
        Refusal::Draining { .. } => row(
            (Unavailable, "DRAINING", true),
            (503, "draining", true),
            503,
            OVERLOADED,
            "draining",
            false,
        ),
        Refusal::Starting { .. } => row(
            (Unavailable, "ENGINE_NOT_READY", true),
            (503, "starting", true),
            503,
            OVERLOADED,
            "starting",
            false,
        ),
        Refusal::EngineLost { .. } => row(
            (Internal, "ENGINE_LOST", false),
            (503, "engine_lost", true),
            503,
            FAILED,
            "engine-lost",
            false,
        ),
        Refusal::WorkerLost { .. } => row(
            (Unavailable, "WORKER_LOST", true),
            (503, "worker_lost", true),
            503,
            FAILED,
            "worker-lost",
            false,
        ),
        Refusal::DeadlineUnreachable { .. } => row(
            (DeadlineExceeded, "DEADLINE_UNREACHABLE", true),
            (503, "deadline_unreachable", true),
            503,
            OVERLOADED,
            "deadline-unreachable",
            false,
        ),
        Refusal::Invalid { .. } => row(
            (InvalidArgument, "INVALID_FIELD", false),
            (400, "invalid_value", false),
            400,
            INVALID,
            "bad-request",
            false,
        ),
        Refusal::UnknownModel { .. } => row(
            (NotFound, "UNKNOWN_MODEL", false),
            (404, "model_not_found", false),
            404,
            NOT_FOUND,
            "model-not-found",
            false,
        ),
        Refusal::NotConfigured { .. } => row(
            (FailedPrecondition, "NOT_CONFIGURED", false),
            (404, "not_configured", false),
            404,
            NOT_FOUND,
            "not-configured",
            false,
        ),
        Refusal::Stopped { .. } => row(
            (FailedPrecondition, "STOPPED", false),
            (503, "stopped", false),
            503,
            FAILED,
            "stopped",
            false,
        ),
        Refusal::UnknownLease { .. } => row(
            (NotFound, "UNKNOWN_LEASE", false),
            (404, "unknown_lease", false),
            404,
            NOT_FOUND,
            "unknown-lease",
            false,
        ),
        Refusal::NotAllowed { .. } => row(
            (PermissionDenied, "NOT_ALLOWED", false),
            (403, "not_allowed", false),
            403,
            (403, "permission_error"),
            "not-allowed",
            false,
        ),
    }
}

async fn body(answer: Response) -> serde_json::Value {
    let bytes = axum::body::to_bytes(answer.into_body(), 1 << 16).await.unwrap();
    serde_json::from_slice(&bytes).unwrap()
}

#[tokio::test]
async fn every_refusal_is_what_each_protocol_calls_it() {
    for refusal in samples() {
        let expected = expected(&refusal);
        let (text, wait) = (refusal.to_string(), refusal.retry_after());

        let status = Status::from(refusal.clone());
        let details = status.get_error_details();
        let info = details.error_info().unwrap();
        assert_eq!(
            (status.code(), info.reason.as_str(), info.domain.as_str()),
            (expected.grpc.0, expected.grpc.1, "cotenant"),
            "{refusal:?}"
        );
        assert!(status.message() == text && info.reason.len() <= 63, "{status:?}");
        let retry = details.retry_info().and_then(|info| info.retry_delay);
        assert_eq!(retry.is_some(), expected.grpc.2, "{refusal:?}");
        assert!(retry.is_none_or(|retry| Some(retry) >= wait), "{refusal:?}");
        match status.code() {
            Code::InvalidArgument => assert_eq!(details.bad_request().unwrap().field_violations.len(), 1),
            Code::ResourceExhausted if expected.grpc.1 != "PRESSURE_HIGH" => {
                assert_eq!(details.quota_failure().unwrap().violations.len(), 1);
            }
            _ => {}
        }

        let [openai, ollama, anthropic] = crate::http::rendered(&refusal);
        for answer in [&openai, &ollama, &anthropic] {
            let header = |name: &str| {
                answer
                    .headers()
                    .get(name)
                    .map(|value| value.to_str().unwrap().to_owned())
            };
            assert_eq!(
                header("x-should-retry").unwrap(),
                expected.openai.2.to_string(),
                "{refusal:?}"
            );
            let waits = wait.map(|wait| wait.as_millis().to_string());
            assert_eq!(header("retry-after-ms"), waits, "{refusal:?}");
            assert_eq!(header("retry-after").is_some(), wait.is_some(), "{refusal:?}");
        }
        let (status, of_ollama) = (openai.status().as_u16(), ollama.status().as_u16());
        let object = body(openai).await;
        assert_eq!(
            (status, object["error"]["code"].as_str().unwrap()),
            (expected.openai.0, expected.openai.1),
            "{refusal:?}"
        );
        assert!(
            object["error"]["message"].as_str().unwrap().starts_with(&text),
            "{object}"
        );
        assert_eq!(of_ollama, expected.ollama, "{refusal:?}");
        assert!(
            body(ollama).await["error"].as_str().unwrap().starts_with(&text),
            "{refusal:?}"
        );

        let status = anthropic.status().as_u16();
        let object = body(anthropic).await;
        assert_eq!(
            (status, object["error"]["type"].as_str().unwrap()),
            expected.anthropic,
            "{refusal:?}"
        );
        assert!(object["type"] == "error" && object["error"]["code"] == expected.openai.1);
        assert!(
            object["error"]["message"].as_str().unwrap().starts_with(&text),
            "{object}"
        );

        let (error, not_handled) = wyoming(&refusal);
        assert_eq!(error.code, expected.wyoming, "{refusal:?}");
        assert!(error.text.starts_with(&text), "{error}");
        assert_eq!(not_handled.is_some(), expected.not_handled, "{refusal:?}");
        assert!(not_handled.is_none_or(|said| said == text), "{refusal:?}");
    }
}
