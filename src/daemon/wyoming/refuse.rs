//! Rendering of [`Refusal`] over Wyoming.
//!
//! Recognition and speech end with `error` and a closed connection. A conversation that fails for lack of memory or
//! context is `not-handled` with the reason, so that it is spoken to the user; its other failures are an `error` too.

use cotenant_conversation::{
    refusal::Refusal,
    refusals::{Kind, with_hint},
};
use cotenant_speech::server;

/// The `error` that a refusal is.
pub(super) fn error_of(refusal: &Refusal) -> server::Refusal {
    server::Refusal::new(Kind::of(refusal).word, with_hint(refusal))
}

/// The text of `not-handled`, if that is how a conversation ends that is refused so.
pub(super) fn not_handled(refusal: &Refusal) -> Option<String> {
    match refusal {
        Refusal::InsufficientMemory { .. }
        | Refusal::PressureHigh { .. }
        | Refusal::ContextLengthExceeded { .. }
        | Refusal::KvCapacityShed { .. }
        | Refusal::KvReclaimed { .. } => Some(refusal.to_string()),
        _ => None,
    }
}

/// The `error` of a refusal, and the text of `not-handled` if a conversation gets that, for the test that compares all
/// protocols.
#[cfg(test)]
pub(crate) fn rendered(refusal: &Refusal) -> (server::Refusal, Option<String>) {
    (error_of(refusal), not_handled(refusal))
}
