//! Roles of gRPC peers, and how much of something peers may have open.

/// What a peer is to the supervisor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Role {
    /// Does everything; from another machine all but leases, whose holder is a process that is measured here.
    #[error("operator")]
    Operator,
    /// Has leases of its own, generates, and reads.
    #[error("tenant")]
    Tenant,
    /// Reads.
    #[error("viewer")]
    Viewer,
    /// Reads, and intervenes when memory is short: sheds, drains, recycles workers.
    #[error("watchdog")]
    Watchdog,
}

/// Users and groups by number.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ids {
    /// User ids.
    pub uids: Vec<u32>,
    /// Group ids; the peer's supplementary groups count too.
    pub gids: Vec<u32>,
}

/// How many of something may be open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// By one process.
    pub per_process: u64,
    /// By all processes of one user.
    pub per_user: u64,
    /// In all.
    pub total: u64,
}
