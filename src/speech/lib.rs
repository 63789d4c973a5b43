//! Wyoming frames and audio formats, shared by workers, APIs and clients.
//!
//! | module | contents |
//! |---|---|
//! | [`wyoming`] | the protocol: frames, events, the `info` of a server |
//! | [`client`] | Wyoming client: describe, transcribe, synthesize, resize |
//! | [`server`] | the server loop shared by the Wyoming API and the built-in workers |
//! | [`http`] | clients of HTTP workers |
//! | [`embeddings`] | the same, for text to vectors |
//! | [`worker`] | client of a worker with any protocol |
//! | [`audio`] | WAV and PCM in every common format, to and from 16-bit mono |
//! | [`decode`] | files in compressed formats, to 16 kHz mono |
//! | [`decoder`] | the same in a separate process with limits |
//! | [`encode`] | speech in compressed formats |
//! | [`sentences`] | splits an answer at points where a voice can begin, and removes markup |
//! | [`resample`] | from one sample rate to another |
//! | [`voice_activity`] | begin and end of speech |

pub mod audio;
pub mod client;
mod coded_wav;
pub mod decode;
pub mod decoder;
pub mod embeddings;
pub mod encode;
mod format;
pub mod http;
pub mod resample;
pub mod sentences;
pub mod server;
mod spoken;
pub mod voice_activity;
pub mod worker;
pub mod wyoming;
