//! Wyoming frames and audio formats, shared by workers, APIs and clients.
//!
//! | module | what it is |
//! |---|---|
//! | [`wyoming`] | the protocol: frames, events, the `info` of a server |
//! | [`client`] | asks a worker: describe, transcribe, synthesize, resize |
//! | [`server`] | answers: the loop that the Wyoming API and the built-in workers share |
//! | [`http`] | asks a worker that speaks HTTP |
//! | [`worker`] | asks a worker, whatever it speaks |
//! | [`audio`] | WAV and PCM in every common shape, to and from 16-bit mono |
//! | [`decode`] | files in compressed formats, to 16 kHz mono |
//! | [`decoder`] | the same in a process of its own, with bounds |
//! | [`encode`] | speech in compressed formats |
//! | [`sentences`] | cuts an answer where a voice can begin, and leaves markup away |
//! | [`resample`] | from one sample rate to another |
//! | [`voice_activity`] | where speech begins and ends |

pub mod audio;
pub mod client;
mod coded_wav;
pub mod decode;
pub mod decoder;
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
