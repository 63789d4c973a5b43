//! Readings of the machine and of processes.
//!
//! Every reader takes a [`ProbeRoot`], so that a folder can stand in for `/proc`, `/sys` and `/etc`. Parsers take
//! bytes and return for any bytes. What a kernel or a board does not have is `None`, never zero.
//!
//! | file | what it reads |
//! |---|---|
//! | `meminfo` | `/proc/meminfo` with CMA; what a tenant can get, and unaccounted memory |
//! | `arc` | what ZFS's cache can give back |
//! | `buddyinfo` | the largest free blocks |
//! | `vmstat` | refaults, scans, stalls, swap-ins, OOM kills |
//! | `psi` | pressure stall information, and triggers on it |
//! | `process` | PSS, RSS and relations of processes; sums over a session or a tree |
//! | `cgroup` | usage and limits of control groups, version 1 and 2 |
//! | `nvmap` | GPU memory of a Jetson, as root |
//! | `swap` | swap devices and what zram costs |
//! | `board` | model and L4T release |
//! | `audit` | what costs memory or speed here, with remedies |
//! | `sandbox` | what confines a supervisor that runs |
//! | `cores` | physical cores that this process may compute on |
//! | `capabilities` | what is here, what is not, and what follows from it |
//! | `sampler` | all that one sample needs, cheaply and again and again |

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
