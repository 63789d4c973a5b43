//! Built-in workers: recogniser, voice, ballast.
//!
//! The engines are libraries of the distribution, opened at run time. Each verb is its command-line arguments, whose
//! comments are the texts of `--help`, and a plain function that serves until SIGTERM or SIGINT.

pub mod asr;
pub mod ballast;
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
