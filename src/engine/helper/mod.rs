//! Helper process for grammars and chat templates, bounded by the kernel.
//!
//! Both are computed from what clients and model files contain, by libraries that can be interrupted at no point and whose
//! use of memory has no bound. So they run in a process of their own: one that holds the vocabulary as a tree, and forks
//! for each job.
//!
//! ```text
//!  daemon ──spawn──► helper (vocabulary as tree) ───fork───► job: one grammar with its masks, or one rendered text
//!     │                 ▲                                      │  RLIMIT_DATA, a timer of CPU time
//!     ├──setup, fds─────┘                                      │  ends with its stream, and gives everything back
//!     └──────────────── a stream for each job ─────────────────┘
//! ```
//!
//! Without a program to start (tools and tests, which work on input of their own) jobs are threads of this process.

mod bounds;
mod client;
mod frame;
mod job;
mod process;
mod vocabulary;

pub(super) use self::{
    bounds::{form_bytes, most},
    client::{ANSWER_WAIT_MAX, Helper, Job, JobError},
    frame::Kind,
    job::{Setup, le_bytes},
};
pub use self::{client::FormPlace, process::serve_stdin};

/// What this process runs, also after another version was installed in its place.
pub const THIS_PROGRAM: &str = "/proc/self/exe";
