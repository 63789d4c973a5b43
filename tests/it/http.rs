//! HTTP APIs over real sockets, with scripted backends.

mod access;
mod audio;
mod chat;
pub(crate) mod client;
mod clients;
mod embeddings;
mod fields;
mod limits;
mod memory;
mod messages;
mod ollama;
mod realtime;
mod responses;
mod script;
mod status;
