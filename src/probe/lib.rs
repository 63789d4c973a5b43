//! Readings of the machine and of processes.
//!
//! Every reader takes a [`ProbeRoot`], so that a folder can replace `/proc`, `/sys` and `/etc`. Parsers accept any
//! bytes. A value missing on a kernel or board is `None`, never zero.
//!
//! | file | contents |
//! |---|---|
//! | `meminfo` | `/proc/meminfo` with CMA; memory available to a tenant, and unaccounted memory |
//! | `arc` | reclaimable part of ZFS's cache |
//! | `buddyinfo` | the largest free blocks |
//! | `vmstat` | refaults, scans, stalls, swap-ins, OOM kills |
//! | `psi` | pressure stall information, and triggers on it |
//! | `process` | PSS, RSS and relations of processes; sums over a session or a tree |
//! | `cgroup` | usage and limits of control groups, version 1 and 2 |
//! | `nvmap` | GPU memory of a Jetson, as root |
//! | `swap` | swap devices and the memory of zram |
//! | `board` | model and L4T release |
//! | `audit` | losses of memory or speed, with remedies |
//! | `sandbox` | confinement of a running supervisor |
//! | `cores` | physical cores available to this process |
//! | `capabilities` | capabilities of the machine and their consequences |
//! | `sampler` | all files of one sample, read cheaply and repeatedly |

mod arc;
pub mod audit;
pub mod board;
pub mod buddyinfo;
pub mod capabilities;
pub mod cgroup;
pub mod cores;
mod error;
pub mod host;
pub mod meminfo;
pub mod nvmap;
pub mod processes;
pub mod psi;
mod root;
pub mod sampler;
pub mod sandbox;
mod session;
mod source;
pub mod swap;
pub mod vmstat;

pub use error::{ParseError, ProbeError, ProbeErrorKind};
pub use root::ProbeRoot;
pub use sampler::{Reading, Sampler, Ticker, Wake};
