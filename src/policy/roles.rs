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

/// Members of the roles over gRPC. The first of operator, watchdog, delegate, tenant and viewer applies.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Members {
    /// All operations.
    pub operators: Ids,
    /// Read; shed; drain and recycle workers.
    pub watchdogs: Ids,
    /// As tenants; hold leases of control groups, over the path socket only.
    pub delegates: Ids,
    /// Read; hold leases; generate.
    pub tenants: Ids,
    /// Read.
    pub viewers: Ids,
    /// Role of all other users: tenant, viewer, or none. Default none: the abstract socket has no file mode, so every
    /// local user can connect.
    pub others: Option<Role>,
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
