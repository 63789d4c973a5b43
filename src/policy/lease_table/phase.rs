//! Phases of a lease: granted, asked to come down, ended and not yet acknowledged.

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
    /// As whom its process is measured: the tenant, unless another process has that name too.
    pub(crate) holder: String,
    pub(crate) kind: LeaseKind,
    pub(crate) class: Class,
    pub(crate) generation: u64,
    pub(crate) min: Bytes,
    pub(crate) max: Bytes,
    pub(crate) granted_at: Timestamp,
    pub(crate) expires_at: Option<Timestamp>,
    /// User and process that it belongs to; ours where there is no request.
    pub(crate) owner: (u32, Option<u32>),
    /// The request of a tenant.
    pub(crate) request: Option<LeaseRequest>,
    pub(crate) phase: Phase,
}

impl Lease {
    /// The lease that the supervisor holds for a process of its own, or for the engine.
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

    /// The lease that a request asks for, granted now; `holder` is the name by which its process is measured.
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
            expires_at: Some(now + request.term),
            owner: (request.peer.uid, request.peer.pid),
            request: Some(request),
            ..lease
        }
    }

    /// As others see it.
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
            },
        }
    }

    pub(crate) const fn is_ending(&self) -> bool {
        matches!(self.phase, Phase::Ending { .. } | Phase::Residual { .. })
    }

    /// Off the book, with a holder that still uses memory.
    pub(crate) const fn is_residual(&self) -> bool {
        matches!(self.phase, Phase::Residual { .. })
    }

    pub(crate) fn is_owned_by(&self, peer: &Peer) -> bool {
        self.owner == (peer.uid, peer.pid)
    }

    /// The target under way.
    pub(crate) const fn revocation(&self) -> Option<&Revocation> {
        match &self.phase {
            Phase::Revoking(revocation) => Some(revocation),
            Phase::Granted | Phase::Ending { .. } | Phase::Residual { .. } => None,
        }
    }

    /// The target under way, where the holder itself asked for less and more than that is wanted now.
    pub(crate) fn wants_less_than(&self, max: Bytes) -> bool {
        let revocation = self.revocation();
        revocation.is_some_and(|revocation| revocation.voluntary && max > revocation.target.bytes)
    }
}

/// Where a lease is in its life.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Phase {
    Granted,
    Revoking(Revocation),
    /// Has ended; its bytes stay on the book until a reading shows where they are.
    Ending {
        since: Timestamp,
        deadline: Timestamp,
        next_poll: Timestamp,
        /// The holder cannot be measured: a sample of the scope has to do.
        unmeasurable: bool,
        /// The holder has not acknowledged the end.
        unacknowledged: Option<Unacknowledged>,
    },
    /// Holds nothing any more, and its holder is still measured to use memory, which is unaccounted.
    Residual {
        next_poll: Timestamp,
        /// Since when the holder cannot be read: a later sample shows its memory as unmanaged.
        unreadable_since: Option<Timestamp>,
    },
}

/// What the holder of a lease that has ended may still take while it has not acknowledged the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Unacknowledged {
    pub(crate) bytes: Bytes,
    /// The end of the term that it was granted last: after it no holder relies on its lease.
    pub(crate) until: Timestamp,
}

/// A holder that has to come down: a tenant to its target, a worker for a notification or in a smaller variant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lower {
    pub(crate) who: LeaseId,
    pub(crate) to: Bytes,
    /// What it had before, where that is not its last measurement.
    pub(crate) had: Option<Bytes>,
    pub(crate) deadline: Timestamp,
    /// Since when it is known to come down; `None` until it answers.
    pub(crate) answered_at: Option<Timestamp>,
}

/// A lower target under way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Revocation {
    pub(crate) target: Target,
    pub(crate) asked_at: Timestamp,
    /// What the holder was measured to use when it was asked.
    pub(super) used_before: Option<Bytes>,
    pub(super) answered: Option<TargetAnswer>,
    /// When it answered that it has come down, or will.
    pub(super) answered_at: Option<Timestamp>,
    /// When it first answered that its memory is back.
    pub(super) applied_at: Option<Timestamp>,
    /// What a reading newer than its claim has shown.
    pub(crate) evidence: Evidence,
    pub(super) next_poll: Timestamp,
    /// The holder itself lowered its lease: nothing is ended if that does not show.
    pub(crate) voluntary: bool,
}

/// What is known of a holder since it answered its target.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Evidence {
    /// It has not been read since.
    #[default]
    Missing,
    /// It uses this much, which is above its target.
    Above { used: Bytes },
    /// It could not be read.
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
    /// When a holder that is not seen to have come down is ended.
    ///
    /// A reading from before its answer shows nothing of it. So one that has answered is ended by a newer one, or when
    /// none has been taken for `patience` after the answer.
    pub(super) fn ends_at(&self, patience: Duration) -> Timestamp {
        let end = self.target.deadline + GRACE;
        match (self.claimed_at(), self.evidence) {
            (Some(at), Evidence::Missing) if !self.voluntary => end.max(at + patience),
            _ => end,
        }
    }

    /// When it claimed what has to be seen: that its memory is back, or that it comes down.
    pub(super) fn claimed_at(&self) -> Option<Timestamp> {
        self.applied_at.or(self.answered_at)
    }

    /// How it is known that the holder has not come down.
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
