//! Rendering of [`Refusal`] over Wyoming.
//!
//! Recognition and speech end with `error` and a closed connection. A conversation that fails for lack of memory or
//! context gets `not-handled` with the reason, which is spoken to the user; other failures are an `error` too.

use cotenant_conversation::{
    refusal::Refusal,
    refusals::{Kind, with_hint},
};
use cotenant_speech::server;

/// Converts a refusal to an `error`.
pub(super) fn error_of(refusal: &Refusal) -> server::Refusal {
    server::Refusal::new(Kind::of(refusal).word, with_hint(refusal))
}

/// Returns the text of `not-handled`, if a conversation refused like this gets one.
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

/// Returns both forms of a refusal, for the test that compares all protocols.
#[cfg(test)]
pub(crate) fn rendered(refusal: &Refusal) -> (server::Refusal, Option<String>) {
    (error_of(refusal), not_handled(refusal))
}
