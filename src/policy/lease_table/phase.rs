//! Phases of a lease: granted, under a target, ended and not yet acknowledged.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{
    decision::{Claim, NotReduced},
    lease::{
        Class, LeaseId, LeaseKind, LeaseMemory, LeaseOwner, LeaseRequest, LeaseState, LeaseView,
        Peer, Target, TargetAnswer,
    },
    ledger::Ledger,
};
use cotenant_units::{Bytes, Timestamp};

/// A lease in the table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Lease {
    pub(crate) tenant: String,
    /// Name under which its process is measured: the tenant, unless another process has that name too.
    pub(crate) holder: String,
    pub(crate) kind: LeaseKind,
    pub(crate) class: Class,
    pub(crate) generation: u64,
    pub(crate) min: Bytes,
    pub(crate) max: Bytes,
    pub(crate) granted_at: Timestamp,
    pub(crate) expires_at: Option<Timestamp>,
    /// User and process of the owner; the supervisor's if there is no request.
    pub(crate) owner: (u32, Option<u32>),
    /// The request of a tenant.
    pub(crate) request: Option<LeaseRequest>,
    pub(crate) phase: Phase,
}

impl Lease {
    /// Returns a lease that the supervisor holds for one of its processes, or for the engine.
    pub(crate) fn of_ours(
        tenant: &str,
        (kind, class): (LeaseKind, Class),
        generation: u64,
        (min, max): (Bytes, Bytes),
        now: Timestamp,
    ) -> Self {
        Self {
            tenant: tenant.to_owned(),
            holder: tenant.to_owned(),
            kind,
            class,
            generation,
            min,
            max,
            granted_at: now,
            expires_at: None,
            owner: (0, None),
            request: None,
            phase: Phase::Granted,
        }
    }

    /// Returns the lease for a request, granted now; `holder` is the name under which its process is measured.
    pub(crate) fn of_tenant(
        request: LeaseRequest,
        holder: String,
        generation: u64,
        now: Timestamp,
    ) -> Self {
        let kind = (LeaseKind::Tenant, request.class);
        let bounds = (request.min, request.max);
        let lease = Self::of_ours(&request.tenant, kind, generation, bounds, now);
        Self {
            holder,
            expires_at: request.term.map(|term| now + term),
            owner: (request.peer.uid, request.holder_pid()),
            request: Some(request),
            ..lease
        }
    }

    /// Returns the lease as operators and clients see it.
    pub(crate) fn view(&self, id: LeaseId, ledger: &Ledger) -> LeaseView {
        let measured = ledger.measurement(&self.holder);
        let (state, target) = match &self.phase {
            Phase::Granted => (LeaseState::Granted, None),
            Phase::Revoking(revocation) => (LeaseState::Revoking, Some(revocation.target.clone())),
            Phase::Residual { .. } => (LeaseState::Gone, None),
            Phase::Ending { deadline, .. } => (
                LeaseState::Gone,
                Some(Target {
                    nonce: 0,
                    bytes: Bytes::ZERO,
                    deadline: *deadline,
                }),
            ),
        };
        let (owner_uid, owner_pid) = self.owner;
        LeaseView {
            id,
            tenant: self.tenant.clone(),
            holder: self.holder.clone(),
            kind: self.kind,
            class: self.class,
            state,
            generation: self.generation,
            memory: LeaseMemory {
                held: ledger.held_by(id),
                min: self.min,
                max: self.max,
                used: measured.map(|measured| measured.used),
                used_at: measured.map(|measured| measured.at),
            },
            target,
            granted_at: self.granted_at,
            expires_at: self.expires_at,
            owner: LeaseOwner {
                owner_uid,
                owner_pid,
                cgroup: self.cgroup().map(str::to_owned),
            },
        }
    }

    pub(crate) const fn is_ending(&self) -> bool {
        matches!(self.phase, Phase::Ending { .. } | Phase::Residual { .. })
    }

    /// Returns whether the lease holds nothing but its holder still uses memory.
    pub(crate) const fn is_residual(&self) -> bool {
        matches!(self.phase, Phase::Residual { .. })
    }

    /// Returns the control group that holds it.
    pub(crate) fn cgroup(&self) -> Option<&str> {
        self.request.as_ref()?.cgroup.as_deref()
    }

    /// Returns whether `peer` acts for the holder: any process of the user does for a control group.
    pub(crate) fn is_owned_by(&self, peer: &Peer) -> bool {
        let (uid, pid) = self.owner;
        uid == peer.uid && (pid == peer.pid || self.cgroup().is_some())
    }

    /// Returns the target in force.
    pub(crate) const fn revocation(&self) -> Option<&Revocation> {
        match &self.phase {
            Phase::Revoking(revocation) => Some(revocation),
            Phase::Granted | Phase::Ending { .. } | Phase::Residual { .. } => None,
        }
    }

    /// Returns whether the holder lowered its lease itself, and `max` is more than that.
    pub(crate) fn wants_less_than(&self, max: Bytes) -> bool {
        let revocation = self.revocation();
        revocation.is_some_and(|revocation| revocation.voluntary && max > revocation.target.bytes)
    }
}

/// Phase of a lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Phase {
    Granted,
    Revoking(Revocation),
    /// Ended; its bytes stay in the ledger until a reading shows what became of them.
    Ending {
        since: Timestamp,
        deadline: Timestamp,
        next_poll: Timestamp,
        /// The holder cannot be measured: a sample of the scope is used instead.
        unmeasurable: bool,
        /// The holder has not acknowledged the end.
        unacknowledged: Option<Unacknowledged>,
    },
    /// Holds nothing; the measured use of its holder is unaccounted.
    Residual {
        next_poll: Timestamp,
        /// Since when the holder is unreadable: a later sample shows its memory as unmanaged.
        unreadable_since: Option<Timestamp>,
    },
}

/// Bytes that the holder of an ended lease may still take, since it has not acknowledged the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Unacknowledged {
    pub(crate) bytes: Bytes,
    /// End of the last granted term; after it no holder relies on its lease.
    pub(crate) until: Timestamp,
}

/// Lower size of a holder: a tenant's target, a worker's after a notification, or that of a smaller variant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lower {
    pub(crate) who: LeaseId,
    pub(crate) to: Bytes,
    /// Bytes before, if other than its last measurement.
    pub(crate) had: Option<Bytes>,
    pub(crate) deadline: Timestamp,
    /// Since when measurements count as evidence; `None` until it answers.
    pub(crate) answered_at: Option<Timestamp>,
}

/// Target in force, below the present size.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Revocation {
    pub(crate) target: Target,
    pub(crate) asked_at: Timestamp,
    /// Use measured before the request.
    pub(super) used_before: Option<Bytes>,
    pub(super) answered: Option<TargetAnswer>,
    /// When it answered that it has reached the target, or will.
    pub(super) answered_at: Option<Timestamp>,
    /// When it first answered that its memory is freed.
    pub(super) applied_at: Option<Timestamp>,
    /// Result of readings newer than its claim.
    pub(crate) evidence: Evidence,
    pub(super) next_poll: Timestamp,
    /// The holder lowered its lease itself: if no measurement confirms that, its lease does not end.
    pub(crate) voluntary: bool,
}

/// Evidence about a holder since it answered its target.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Evidence {
    /// No reading yet.
    #[default]
    Missing,
    /// Uses `used`, above its target.
    Above { used: Bytes },
    /// Not readable.
    Unmeasurable,
}

impl Evidence {
    pub(crate) const fn used(self) -> Option<Bytes> {
        match self {
            Self::Above { used } => Some(used),
            Self::Missing | Self::Unmeasurable => None,
        }
    }
}

impl Revocation {
    /// Returns when the lease of a holder that has not been measured at its target ends.
    ///
    /// Readings from before the answer are no evidence. After an answer, the lease ends by a newer reading, or if none
    /// is taken for `patience` after the answer.
    pub(super) fn ends_at(&self, patience: Duration) -> Timestamp {
        let end = self.target.deadline + GRACE;
        match (self.claimed_at(), self.evidence) {
            (Some(at), Evidence::Missing) if !self.voluntary => end.max(at + patience),
            _ => end,
        }
    }

    /// Returns when it claimed to have freed its memory, or else to be shrinking.
    pub(super) fn claimed_at(&self) -> Option<Timestamp> {
        self.applied_at.or(self.answered_at)
    }

    /// Returns the evidence that the holder has not reached its target.
    pub(super) fn cause(&self) -> NotReduced {
        let claim = match &self.answered {
            Some(TargetAnswer::Refused { reason }) => {
                return NotReduced::Refused {
                    reason: reason.clone(),
                };
            }
            None if self.answered_at.is_none() => return NotReduced::Unanswered,
            Some(TargetAnswer::Applied) => Claim::Applied,
            Some(TargetAnswer::Deferred { .. }) => Claim::Deferred,
            None => Claim::Resized,
        };
        match self.evidence {
            Evidence::Above { used } => NotReduced::Measured { used, claim },
            Evidence::Missing | Evidence::Unmeasurable => NotReduced::Unmeasurable { claim },
        }
    }
}

/// Time after the deadline of a target for the last measurement to arrive.
const GRACE: Duration = Duration::from_millis(200);
