//! Built-in workers: recogniser, voice, embeddings, ballast.
//!
//! The engines are libraries of the distribution, opened at run time. Each verb consists of command-line arguments,
//! whose doc comments are the text of `--help`, and a function that serves until SIGTERM or SIGINT.

pub mod asr;
pub mod ballast;
pub mod embed;
pub mod tts;

mod error;
mod flite;
mod library;
mod lifeline;
mod pocketsphinx;
mod serve;

pub use self::{
    error::VerbError, flite::FliteError, library::LibraryError, pocketsphinx::SphinxError,
    serve::ListenArgs,
};
