//! gRPC and its command line, over real sockets, against the real arbiter.

mod cli;
mod clients;
mod daemon;
mod generate;
mod hold;
pub(crate) mod leases;
mod limits;
mod operators;
mod rights;
mod sockets;
mod stalled;
