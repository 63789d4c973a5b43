//! Helper process for grammars and chat templates, bounded by the kernel.
//!
//! Both are computed from the content of clients and model files, by libraries that cannot be interrupted and whose
//! memory use is unbounded. They therefore run in a separate process, which holds the vocabulary as a tree and forks
//! for each job.
//!
//! ```text
//!  daemon ──spawn──► helper (vocabulary as tree) ───fork───► job: one grammar with its masks, or one rendered text
//!     │                 ▲                                      │  RLIMIT_DATA, a timer of CPU time
//!     ├──setup, fds─────┘                                      │  ends with its stream; its memory is freed
//!     └──────────────── a stream for each job ─────────────────┘
//! ```
//!
//! Without a helper program (tools and tests, which process their own input) jobs are threads of this process.

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

/// The executable of this process, even after another version was installed in its place.
pub const THIS_PROGRAM: &str = "/proc/self/exe";
