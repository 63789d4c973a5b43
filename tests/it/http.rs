//! The HTTP APIs over real sockets, with backends that follow a script.

mod access;
mod audio;
mod chat;
pub(crate) mod client;
mod clients;
mod fields;
mod limits;
mod memory;
mod messages;
mod ollama;
mod realtime;
mod responses;
mod script;
mod status;
