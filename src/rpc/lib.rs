//! gRPC `cotenant.v1`: tenants, operators and generation over Unix sockets.
//!
//! The services depend on two traits of the daemon: [`Supervisor`] passes events to the arbiter and shows its state,
//! [`Generator`] generates text. [`Server`] combines them, the sockets and the standard services (health, reflection).
//!
//! | file | contents |
//! |---|---|
//! | `supervisor.rs`, `llm.rs` | interfaces that the daemon implements |
//! | `server.rs` | sockets, limits, assembly of the services |
//! | `peer.rs`, `roles.rs`, `slots.rs` | the peer of a socket, its role, its open connections and streams |
//! | `call.rs` | one call: credentials, deadline, the path to the arbiter and back |
//! | `lease.rs`, `hold.rs`, `holders.rs` | leases, their streams, and the processes behind them |
//! | `lease_watch.rs` | all leases, now and after each change |
//! | `outlet.rs` | server side of a stream, with a cut-off for clients that do not read |
//! | `operator.rs`, `generate.rs` | the other services |
//! | `convert.rs`, `status.rs` | proto to domain and back, errors with their details |
//! | `json.rs` | messages as JSON, for the command line and the page |
//! | `health.rs` | `grpc.health.v1` |
//! | `client.rs` | client connection of the command line |

mod call;
pub mod client;
mod connection;
mod convert;
pub mod deaths;
mod generate;
pub mod health;
mod hint;
mod hold;
mod holders;
pub mod json;
mod lease;
mod lease_watch;
pub mod llm;
mod operator;
mod outlet;
pub mod peer;
pub mod remote;
pub mod roles;
pub mod server;
mod slots;
pub mod status;
pub mod supervisor;
pub mod target;

pub use client::Endpoint;
pub use convert::class as lease_class;
pub use cotenant_policy::roles::Bounds;
pub use deaths::DeathLog;
pub use health::Health;
pub use llm::{GenerateEvent, GenerateRequest, Generator};
pub use roles::{Role, Roles};
pub use server::{Limits, Server, Sockets};
pub use supervisor::{EventLog, Notice, Supervisor};

/// Messages, clients and servers of `cotenant.v1`, generated from `proto/cotenant/v1`.
#[expect(
    unused_qualifications,
    clippy::allow_attributes,
    clippy::allow_attributes_without_reason,
    clippy::large_enum_variant,
    reason = "generated code"
)]
pub mod v1 {
    tonic::include_proto!("cotenant.v1");
}

/// Generated from `proto/grpc/health/v1/health.proto`.
#[expect(
    unused_qualifications,
    clippy::allow_attributes,
    clippy::allow_attributes_without_reason,
    reason = "generated code"
)]
pub mod health_v1 {
    tonic::include_proto!("grpc.health.v1");
}

/// Descriptors of both packages and their imports, for reflection.
pub const DESCRIPTOR_SET: &[u8] =
    include_bytes!(concat!(env!("OUT_DIR"), "/cotenant_descriptor.bin"));
