//! Roles of peers, by user and group.

use std::fmt;

use super::peer::PeerInfo;
pub use cotenant_policy::roles::{Ids, Members, Role};

/// A kind of call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Permission {
    /// Create leases of control groups.
    Delegate,
    /// Generate text.
    Generate,
    /// Shed, drain, recycle.
    Intervene,
    /// Create leases and change own ones.
    Lease,
    /// Read the state and the events.
    Observe,
    /// All other changes, including leases of others.
    Operate,
}

impl Permission {
    /// Whether the role includes this permission.
    #[must_use]
    pub const fn is_of(self, role: Role) -> bool {
        match role {
            Role::Operator => true,
            Role::Delegate => matches!(
                self,
                Self::Observe | Self::Lease | Self::Generate | Self::Delegate
            ),
            Role::Tenant => matches!(self, Self::Observe | Self::Lease | Self::Generate),
            Role::Viewer => matches!(self, Self::Observe),
            Role::Watchdog => matches!(self, Self::Observe | Self::Intervene),
        }
    }

    /// The least privileged role with this permission, among the roles of local or of remote peers.
    #[must_use]
    pub const fn least_role(self, remote: bool) -> &'static str {
        match self {
            Self::Observe => "viewer",
            Self::Intervene => "watchdog",
            Self::Delegate if !remote => "delegate",
            Self::Generate | Self::Lease if !remote => "tenant",
            Self::Delegate | Self::Generate | Self::Lease | Self::Operate => "operator",
        }
    }
}

impl fmt::Display for Permission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Delegate => "create leases of control groups",
            Self::Generate => "generate",
            Self::Intervene => "intervene",
            Self::Lease => "lease",
            Self::Observe => "observe",
            Self::Operate => "operate",
        })
    }
}

/// Whether the user or a group of the peer is listed.
fn is_among(ids: &Ids, peer: &PeerInfo) -> bool {
    ids.uids.contains(&peer.uid)
        || ids
            .gids
            .iter()
            .any(|gid| *gid == peer.gid || peer.groups.contains(gid))
}

/// Roles of peers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Roles {
    /// Their members; root and the daemon's own user are operators too.
    pub members: Members,
    own_uid: u32,
}

impl Roles {
    /// Only root and `own_uid` have a role: operator.
    pub fn new(own_uid: u32) -> Self {
        Self {
            members: Members::default(),
            own_uid,
        }
    }

    /// The role of a peer.
    pub fn role_of(&self, peer: &PeerInfo) -> Option<Role> {
        if peer.uid == 0 || peer.uid == self.own_uid || is_among(&self.members.operators, peer) {
            Some(Role::Operator)
        } else if is_among(&self.members.watchdogs, peer) {
            Some(Role::Watchdog)
        } else if is_among(&self.members.delegates, peer) {
            Some(Role::Delegate)
        } else if is_among(&self.members.tenants, peer) {
            Some(Role::Tenant)
        } else if is_among(&self.members.viewers, peer) {
            Some(Role::Viewer)
        } else {
            self.members.others
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(uid: u32, gid: u32, groups: &[u32]) -> PeerInfo {
        PeerInfo {
            uid,
            gid,
            groups: groups.into(),
            ..PeerInfo::default()
        }
    }

    #[test]
    fn root_and_the_own_user_are_operators_and_others_are_nothing() {
        let roles = Roles::new(1000);
        assert_eq!(roles.role_of(&peer(0, 0, &[])), Some(Role::Operator));
        assert_eq!(roles.role_of(&peer(1000, 1000, &[])), Some(Role::Operator));
        assert_eq!(roles.role_of(&peer(1001, 1001, &[])), None);
    }

    #[test]
    fn a_supplementary_group_gives_its_role_and_the_stronger_role_counts() {
        let mut roles = Roles::new(1000);
        roles.members.tenants.gids.push(44);
        roles.members.viewers.uids.push(1001);
        assert_eq!(roles.role_of(&peer(1001, 1001, &[])), Some(Role::Viewer));
        assert_eq!(
            roles.role_of(&peer(1001, 1001, &[7, 44])),
            Some(Role::Tenant)
        );
        roles.members.others = Some(Role::Viewer);
        assert_eq!(roles.role_of(&peer(5, 5, &[])), Some(Role::Viewer));
    }

    #[test]
    fn a_delegate_does_what_a_tenant_does_and_a_tenant_holds_no_control_group() {
        let mut roles = Roles::new(1000);
        (roles.members.delegates.uids, roles.members.tenants.uids) = (vec![1001], vec![1001]);
        let role = roles.role_of(&peer(1001, 1001, &[]));
        assert_eq!(role, Some(Role::Delegate));
        for permission in [Permission::Observe, Permission::Lease, Permission::Generate] {
            assert!(permission.is_of(Role::Delegate) && permission.is_of(Role::Tenant));
        }
        for (role, delegates) in [
            (Role::Delegate, true),
            (Role::Operator, true),
            (Role::Tenant, false),
        ] {
            assert_eq!(Permission::Delegate.is_of(role), delegates, "{role}");
        }
        assert!(!Permission::Operate.is_of(Role::Delegate));
    }

    #[test]
    fn a_watchdog_intervenes_and_does_not_operate() {
        assert!(Permission::Intervene.is_of(Role::Watchdog));
        assert!(!Permission::Operate.is_of(Role::Watchdog));
        assert!(!Permission::Lease.is_of(Role::Watchdog));
        assert!(!Permission::Intervene.is_of(Role::Tenant));
    }
}
