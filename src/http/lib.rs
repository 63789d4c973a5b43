//! HTTP APIs: OpenAI's, Anthropic's, Ollama's, metrics and one page.
//!
//! ```text
//!   client ──► server (connections: header limits, stalls, lingering close)
//!                └─► routes (request id, limits, metrics) ──► chat · completions · responses · messages · ollama · …
//!                                                               └─► backend traits ──► daemon
//! ```
//! A request is *admitted first and answered then*: before the first byte of the answer a refusal is a status code with
//! retry headers, afterwards an error object in the stream. [`cotenant_conversation::refusal::Refusal`] lists all
//! reasons; `fault.rs` renders them.

pub mod backend;

mod access;
mod admission;
mod answer;
mod api;
mod body;
mod chat;
mod chat_wire;
mod completions;
mod effort;
mod embeddings;
mod fault;
mod fields;
mod generation;
mod hosts;
mod limits;
mod memory;
mod messages;
mod messages_wire;
mod models;
mod numbers;
mod ollama;
mod ollama_wire;
mod ollama_writer;
mod operate;
mod patience;
mod realtime;
mod responses;
mod responses_wire;
mod routes;
mod sampling;
mod server;
mod speech;
mod stall;
mod status;
mod stream;
mod tokens;
mod transcription;

pub use access::{Access, Client, Key, Keyless};
pub use api::Api;
pub use hosts::Reach;
pub use limits::Limits;
pub use patience::patiently;
pub use server::{ClientListener, serve};

/// The answers to a refused request, as clients of OpenAI's, Ollama's and Anthropic's APIs see them.
pub fn rendered(
    refusal: &cotenant_conversation::refusal::Refusal,
) -> [axum::response::Response; 3] {
    use axum::response::IntoResponse as _;
    [
        fault::Fault::from(refusal.clone()).into_response(),
        ollama::OllamaFault::from(refusal.clone()).into_response(),
        messages::MessagesFault::from(refusal.clone()).into_response(),
    ]
}
