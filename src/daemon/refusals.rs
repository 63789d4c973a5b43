//! Comparison table of all refusals over all protocols.

use axum::response::Response;
use tonic::Code;
use tonic_types::StatusExt as _;

use super::wyoming::rendered as wyoming;
use cotenant_conversation::refusal::Refusal;
use cotenant_dev::refusals::refusals;
use cotenant_rpc::status::refused;

/// Row of a refusal: gRPC code, reason, presence of RetryInfo; HTTP status of the OpenAI and Ollama APIs, code,
/// `x-should-retry`; status and type of the Anthropic API; Wyoming's code, and whether a conversation gets
/// `not-handled`.
///
/// The match is exhaustive, so that a new refusal is defined for each protocol.
const fn expected(refusal: &Refusal) -> &'static str {
    use Refusal as R;
    match refusal {
        R::InsufficientMemory { .. } | R::KvCapacityShed { .. } => {
            "ResourceExhausted INSUFFICIENT_MEMORY retry, 503 memory_pressure retry, 529 overloaded_error, \
             memory-pressure not-handled"
        }
        R::PressureHigh { .. } => {
            "ResourceExhausted PRESSURE_HIGH retry, 503 memory_pressure retry, 529 overloaded_error, \
             memory-pressure not-handled"
        }
        R::ContextLengthExceeded { .. } => {
            "InvalidArgument CONTEXT_LENGTH_EXCEEDED, 400 context_length_exceeded, 400 invalid_request_error, \
             context-length-exceeded not-handled"
        }
        R::KvReclaimed { .. } => {
            "Aborted KV_RECLAIMED retry, 503 kv_reclaimed retry, 529 overloaded_error, kv-reclaimed not-handled"
        }
        R::QuotaExceeded { .. } => {
            "ResourceExhausted QUOTA_EXCEEDED retry, 429 rate_limit_exceeded retry, 429 rate_limit_error, busy"
        }
        R::Draining { .. } => {
            "Unavailable DRAINING retry, 503 draining retry, 529 overloaded_error, draining"
        }
        R::Starting { .. } => {
            "Unavailable ENGINE_NOT_READY retry, 503 starting retry, 529 overloaded_error, starting"
        }
        R::EngineLost { .. } => {
            "Internal ENGINE_LOST, 503 engine_lost retry, 500 api_error, engine-lost"
        }
        R::ModelFailed { .. } => {
            "FailedPrecondition MODEL_FAILED, 500 model_failed, 500 api_error, model-failed"
        }
        R::WorkerLost { .. } => {
            "Unavailable WORKER_LOST retry, 503 worker_lost retry, 500 api_error, worker-lost"
        }
        R::NoThread { .. } => {
            "Unavailable NO_THREAD retry, 503 no_thread retry, 529 overloaded_error, no-thread"
        }
        R::DeadlineUnreachable { .. } => {
            "DeadlineExceeded DEADLINE_UNREACHABLE retry, 503 deadline_unreachable retry, 529 overloaded_error, \
             deadline-unreachable"
        }
        R::Invalid { .. } => {
            "InvalidArgument INVALID_FIELD, 400 invalid_value, 400 invalid_request_error, bad-request"
        }
        R::UnknownModel { .. } => {
            "NotFound UNKNOWN_MODEL, 404 model_not_found, 404 not_found_error, model-not-found"
        }
        R::NotConfigured { .. } => {
            "FailedPrecondition NOT_CONFIGURED, 404 not_configured, 404 not_found_error, not-configured"
        }
        R::Stopped { .. } => "FailedPrecondition STOPPED, 503 stopped, 500 api_error, stopped",
    }
}

async fn body(answer: Response) -> serde_json::Value {
    let bytes = axum::body::to_bytes(answer.into_body(), 1 << 16)
        .await
        .unwrap();
    serde_json::from_slice(&bytes).unwrap()
}

#[tokio::test]
async fn every_refusal_is_what_each_protocol_calls_it() {
    let retries = |retry: bool| if retry { " retry" } else { "" };
    let mut messages = Vec::new();
    for refusal in refusals() {
        let (text, wait) = (refusal.to_string(), refusal.retry_after());

        let status = refused(refusal.clone());
        let details = status.get_error_details();
        let info = details.error_info().unwrap();
        assert!(
            info.domain == "cotenant" && info.reason.len() <= 63,
            "{status:?}"
        );
        assert_eq!(status.message(), text);
        let retry = details.retry_info().and_then(|info| info.retry_delay);
        assert!(retry.is_none_or(|retry| Some(retry) >= wait), "{refusal:?}");
        match status.code() {
            Code::InvalidArgument => {
                assert_eq!(details.bad_request().unwrap().field_violations.len(), 1);
            }
            Code::ResourceExhausted if info.reason != "PRESSURE_HIGH" => {
                assert_eq!(details.quota_failure().unwrap().violations.len(), 1);
            }
            _ => {}
        }
        let grpc = format!(
            "{:?} {}{}",
            status.code(),
            info.reason,
            retries(retry.is_some())
        );

        let [openai, ollama, anthropic] = cotenant_http::rendered(&refusal);
        let header = |answer: &Response, name: &str| {
            let value = answer.headers().get(name);
            value.map(|value| value.to_str().unwrap().to_owned())
        };
        let should_retry = header(&openai, "x-should-retry").unwrap();
        for answer in [&openai, &ollama, &anthropic] {
            assert_eq!(
                header(answer, "x-should-retry").unwrap(),
                should_retry,
                "{refusal:?}"
            );
            let waits = wait.map(|wait| wait.as_millis().to_string());
            assert_eq!(header(answer, "retry-after-ms"), waits, "{refusal:?}");
            assert_eq!(
                header(answer, "retry-after").is_some(),
                wait.is_some(),
                "{refusal:?}"
            );
        }
        let codes = [&openai, &ollama, &anthropic].map(|answer| answer.status().as_u16());
        assert_eq!(codes[0], codes[1], "{refusal:?}");
        let (openai, ollama, anthropic) = (
            body(openai).await,
            body(ollama).await,
            body(anthropic).await,
        );
        for message in [
            &openai["error"]["message"],
            &ollama["error"],
            &anthropic["error"]["message"],
        ] {
            // Anthropic's clients search for their own words at the start of the message.
            assert!(
                message
                    .as_str()
                    .unwrap()
                    .trim_start_matches("prompt is too long: ")
                    .starts_with(&text),
                "{message}"
            );
        }
        assert!(
            anthropic["type"] == "error" && anthropic["error"]["code"] == openai["error"]["code"]
        );
        messages.push(format!(
            "{}: {}",
            openai["error"]["param"], openai["error"]["message"]
        ));
        let code = openai["error"]["code"].as_str().unwrap();
        let kind = anthropic["error"]["type"].as_str().unwrap();

        let (error, not_handled) = wyoming(&refusal);
        assert!(error.text.starts_with(&text), "{error}");
        assert_eq!(
            error.text.contains("(hint: "),
            refusal.hint().is_some(),
            "{error}"
        );
        assert!(
            not_handled.as_ref().is_none_or(|said| *said == text),
            "{refusal:?}"
        );
        let handled = if not_handled.is_some() {
            " not-handled"
        } else {
            ""
        };

        let retry = retries(should_retry == "true");
        let found = format!(
            "{grpc}, {} {code}{retry}, {} {kind}, {}{handled}",
            codes[0], codes[2], error.code
        );
        assert_eq!(found, expected(&refusal), "{refusal:?}");
    }
    insta::assert_snapshot!(messages.join("\n"));
}
