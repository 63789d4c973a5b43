//! OpenAI's Realtime API: a spoken conversation over one WebSocket.
//!
//! ```text
//!   client ──► event ──► session ─► input (audio, turns) ─► recogniser ─► conversation
//!      ▲                    │                                                  │
//!      └─────── outbox ◄────┴── output (one response) ◄── run ◄── LLM and voice ┘
//! ```
//!
//! A client, or a user who begins to speak, cancels the response. A client's mistake is an event `error`; a failed
//! response is reported in its `response.done`. Both use the codes of [`super::fault`].

mod endpoint;
mod event;
mod input;
mod items;
mod outbox;
mod output;
mod run;
mod session;
mod settings;

pub(super) use endpoint::{Sessions, realtime};
