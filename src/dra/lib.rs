//! The memory pool of a node as a resource of Kubernetes: a driver for dynamic resource allocation.
//!
//! ```text
//!   API server ◄── ResourceSlice: capacity, taints ── driver ──── leases, status, events ──► supervisor
//!       │ claim                                        ▲   │
//!       └────────────────► kubelet ── prepare ─────────┘   └─ CDI file ──► container runtime
//! ```
//!
//! | file | contents |
//! |---|---|
//! | `claim.rs`, `quantity.rs` | a claim as booking |
//! | `book.rs` | leases of claims: what is booked, taken back, grown |
//! | `pool.rs`, `slice.rs` | the published capacity and taints, and their object |
//! | `kubeconfig.rs`, `kube.rs` | client of the API server |
//! | `supervisor.rs` | client of the supervisor |
//! | `cdi.rs`, `groups.rs` | files for the container runtime, control groups of pods |
//! | `driver.rs` | preparation of claims |
//! | `upkeep.rs`, `publish.rs` | reactions to the supervisor, and to the API server |
//! | `kubelet.rs` | services for kubelet on their sockets |
//! | `run.rs`, `settings.rs` | the process |
//!
//! The first three lines decide, from values and a time that is passed in; the others act.

pub mod book;
pub mod cdi;
pub mod claim;
mod driver;
pub mod groups;
pub mod kube;
pub mod kubeconfig;
mod kubelet;
#[cfg(test)]
mod manifest_tests;
pub mod pool;
mod publish;
pub mod quantity;
mod run;
mod settings;
#[cfg(test)]
mod simulation_tests;
pub mod slice;
mod supervisor;
mod upkeep;

pub use run::main;

/// Services of kubelet's plugins, generated from `proto/kubelet`.
#[expect(
    unused_qualifications,
    clippy::allow_attributes,
    clippy::allow_attributes_without_reason,
    reason = "generated code"
)]
pub mod proto {
    /// Registration of plugins.
    pub mod registration {
        tonic::include_proto!("pluginregistration");
    }

    /// Preparation of claims.
    pub mod dra {
        tonic::include_proto!("k8s.io.kubelet.pkg.apis.dra.v1");
    }

    /// Health of devices.
    pub mod health {
        tonic::include_proto!("v1alpha1");
    }
}
