//! The HTTP doors over real sockets, with backends that follow a script.

mod audio;
mod chat;
pub(crate) mod client;
mod clients;
mod limits;
mod ollama;
mod script;
mod status;
