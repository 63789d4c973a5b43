//! gRPC and its command line, over real sockets, against the real arbiter.

mod cli;
mod clients;
pub(crate) mod daemon;
mod generate;
pub(crate) mod hold;
pub(crate) mod leases;
mod limits;
mod onlookers;
mod operators;
mod rights;
mod sockets;
mod stalled;
