//! Workers: ASR, TTS and others as child processes.
//!
//! [`spec`] specifies a worker, [`handle`] runs it, `probe` reads its memory. Restarts are decided by the daemon, which
//! calls [`handle::WorkerHandle::start`].
//!
//! ```text
//!            start()            describe answers
//!  Stopped ──────────► Starting ───────────────► Ready
//!     ▲                   │ exec failed,           │ stop_because()
//!     │                   │ not ready in time      ▼
//!     └──── exited ◄──────┴───────────────────► Stopping: SIGTERM to the group, grace, SIGKILL to the group
//! ```
//!
//! [`verbs`] are the built-in workers: two for speech, and one that only takes memory.

pub mod adopt;
pub mod confine;
pub mod descent;
pub mod handle;
pub mod launch;
pub mod orphans;
pub mod ports;
pub mod preflight;
pub mod pressure;
pub mod report;
pub mod spec;
pub mod verbs;

mod autopsy;
mod log;
mod mark;
mod notify;
mod process;
mod shared;
mod supervise;
