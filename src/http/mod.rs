//! HTTP APIs: OpenAI's, Ollama's, metrics and one page.
//!
//! ```text
//!   client ──► server (connections: header limits, stalls, lingering close)
//!                └─► routes (request id, limits, metrics) ──► chat · ollama · transcription · speech · status
//!                                                               └─► backend traits ──► daemon
//! ```
//!
//! A request is *admitted first and answered then*: while the answer has no byte yet, a refusal is a status code with
//! retry headers; afterwards it can only be an error object in the stream. [`crate::policy::refusal::Refusal`] is the
//! one list of reasons; `fault.rs` renders it.

pub mod backend;

mod answer;
mod api;
mod body;
mod chat;
mod chat_wire;
mod chat_writer;
mod fault;
mod generation;
mod limits;
mod models;
mod ollama;
mod ollama_wire;
mod ollama_writer;
mod routes;
mod server;
mod speech;
mod stall;
mod status;
mod stream;
mod transcription;

pub use api::Api;
pub use limits::Limits;
pub use server::{ClientListener, serve};

/// A refusal as OpenAI's clients and as Ollama's see it, for the test that has all protocols in one table.
#[cfg(test)]
pub(crate) fn rendered(refusal: &crate::policy::refusal::Refusal) -> [axum::response::Response; 2] {
    use axum::response::IntoResponse as _;
    [
        fault::Fault::from(refusal.clone()).into_response(),
        ollama::OllamaFault::from(refusal.clone()).into_response(),
    ]
}
