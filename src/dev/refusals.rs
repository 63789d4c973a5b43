//! Refusals rendered by tests of several protocols.

use std::time::Duration;

use cotenant_conversation::refusal::Refusal;
use cotenant_policy::pressure_level::PressureLevel;
use cotenant_units::{Bytes, Tokens};

/// Returns one refusal of each kind, so that every renderer is tested with all of them.
#[must_use]
pub fn refusals() -> Vec<Refusal> {
    let act = || "start a chat completion".to_owned();
    let retry_after = Duration::from_millis(50);
    let (small, large) = (Bytes::from_mib(64), Bytes::from_mib(512));
    vec![
        Refusal::InsufficientMemory {
            act: act(),
            asked: small,
            free: Bytes::from_mib(12),
            reclaimable: Bytes::from_mib(20),
            budget: large,
            retry_after,
        },
        Refusal::PressureHigh {
            act: act(),
            level: PressureLevel::Critical,
            retry_after,
        },
        Refusal::ContextLengthExceeded {
            model: "m".to_owned(),
            prompt: Tokens::new(9000),
            limit: Tokens::new(4096),
        },
        Refusal::KvCapacityShed {
            model: "m".to_owned(),
            prompt: Tokens::new(2000),
            capacity: Tokens::new(1024),
            limit: Tokens::new(4096),
            retry_after,
        },
        Refusal::KvReclaimed {
            generated: Tokens::new(7),
            retry_after,
        },
        Refusal::QuotaExceeded {
            act: act(),
            what: "requests in flight".to_owned(),
            limit: 16,
            retry_after,
        },
        Refusal::Draining {
            act: act(),
            retry_after,
        },
        Refusal::Starting {
            act: act(),
            who: "the engine".to_owned(),
            state: "loading".to_owned(),
            retry_after,
        },
        Refusal::EngineLost {
            reason: "it panicked".to_owned(),
            retry_after,
        },
        Refusal::ModelFailed {
            failure: "its weights are damaged".to_owned(),
        },
        Refusal::WorkerLost {
            worker: "tts".to_owned(),
            reason: "killed by SIGKILL, sender unknown".to_owned(),
            retry_after,
        },
        Refusal::NoThread {
            act: act(),
            cause: "no thread is free for it: Resource temporarily unavailable (os error 11)"
                .to_owned(),
            retry_after,
        },
        Refusal::DeadlineUnreachable {
            act: act(),
            patience_ms: 1000,
            expected_ms: 4000,
            retry_after,
        },
        Refusal::Invalid {
            field: "top_p".to_owned(),
            value: "7".to_owned(),
            problem: "is above the limit of 1".to_owned(),
        },
        Refusal::UnknownModel {
            model: "x".to_owned(),
            known: "; there is `m`".to_owned(),
        },
        Refusal::NotConfigured {
            act: act(),
            what: "model".to_owned(),
        },
        Refusal::Stopped {
            act: act(),
            worker: "tts".to_owned(),
        },
    ]
}
