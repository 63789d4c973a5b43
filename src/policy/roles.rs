//! Roles of gRPC peers, and limits on open objects.

/// Permissions of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Role {
    /// Everything; from another machine all but leases, whose holder must be a process that can be measured here.
    #[error("operator")]
    Operator,
    /// As a tenant, and leases of control groups.
    #[error("delegate")]
    Delegate,
    /// Own leases, generation, and reading.
    #[error("tenant")]
    Tenant,
    /// Reading.
    #[error("viewer")]
    Viewer,
    /// Reading, and intervention in a shortage: shed, drain, recycle workers.
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

/// Limits on the number of open objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Per process.
    pub per_process: u64,
    /// Per user, over all processes.
    pub per_user: u64,
    /// In all.
    pub total: u64,
}
