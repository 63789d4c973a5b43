//! Wyoming API: recogniser, voice, assistant and speech to speech on one address.
//!
//! ```text
//! describe                              ─► info                                    from memory, see `info_cache`
//! audio-start, -chunk*, -stop           ─► transcript
//! synthesize                            ─► audio-start, -chunk*, -stop
//! synthesize-start, -chunk*, -stop      ─► the same by sentences, then synthesize-stopped
//! transcript                            ─► handled-start, -chunk*, handled, -stop  or not-handled
//! run-pipeline{asr … tts}, audio…       ─► transcript, handled…, audio…            see `pipeline`
//! ```
//!
//! A connection runs one task at a time. In a pipeline, a new utterance ends the answer to the previous one (barge-in):
//! generation stops, its KV is freed, and unsent audio is dropped.

mod conversations;
mod info_cache;
mod listen;
mod pipeline;
mod refuse;
mod session;
mod shared;
#[cfg(test)]
mod tests;

#[cfg(test)]
pub(super) use refuse::rendered;

pub(super) use self::{listen::Bound, shared::Backends};
