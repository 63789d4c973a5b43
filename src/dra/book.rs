//! Leases of claims: what is booked, what may be taken back for another claim, and what may grow.

use super::claim;
use cotenant_rpc::v1::{Lease, LeaseState};
use cotenant_units::Bytes;

/// Lease of a claim, in the state that the supervisor reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// Uid of the claim.
    pub uid: String,
    /// Name of the lease, which calls about it repeat, as its run and generation.
    pub name: String,
    /// Run of the supervisor.
    pub boot_id: String,
    /// Number of its last grant.
    pub generation: u64,
    /// Control group that holds it.
    pub cgroup: String,
    /// State of the lease.
    pub state: LeaseState,
    /// Sizes.
    pub size: Size,
    /// Target to which its pod has to shrink: nonce and bytes.
    pub target: Option<(u64, Bytes)>,
}

/// Sizes of a lease.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Size {
    /// Given by Kubernetes.
    pub min: Bytes,
    /// Booked now.
    pub held: Bytes,
    /// In use; `None` before the first measurement.
    pub used: Option<Bytes>,
}

/// Call to change the bounds of a lease: its `min` stays.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resize {
    /// The lease.
    pub lease: Held,
    /// New upper bound.
    pub max: Bytes,
}

/// Answer to a target of the supervisor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TargetReply {
    /// The pod uses no more.
    Applied,
    /// The pod still uses this much.
    Deferred(Bytes),
}

impl Held {
    /// Reads the leases of claims among all leases.
    #[must_use]
    pub fn of(leases: &[Lease]) -> Vec<Self> {
        let held = leases.iter().filter_map(|lease| {
            let uid = claim::uid_of(&lease.tenant).filter(|_| !lease.cgroup.is_empty())?;
            let target = lease.target.as_ref().filter(|target| target.nonce != 0);
            Some(Self {
                uid: uid.to_owned(),
                name: lease.name.clone(),
                boot_id: lease.boot_id.clone(),
                generation: lease.generation,
                cgroup: lease.cgroup.clone(),
                state: lease.state(),
                size: Size {
                    min: Bytes::new(lease.min_bytes),
                    held: Bytes::new(lease.held_bytes),
                    used: lease.used_bytes.map(Bytes::new),
                },
                target: target.map(|target| (target.nonce, Bytes::new(target.target_bytes))),
            })
        });
        held.collect()
    }

    /// Returns whether it is in force, unlike one that waits or has ended.
    #[must_use]
    pub fn is_live(&self) -> bool {
        matches!(self.state, LeaseState::Granted | LeaseState::Revoking)
    }

    /// Returns the bytes above `min` that the pod does not use: they can be taken back without its help.
    #[must_use]
    pub fn idle(&self) -> Bytes {
        let Size { min, held, used } = self.size;
        match (self.state, used) {
            (LeaseState::Granted, Some(used)) => held.saturating_sub(min.max(used)),
            _ => Bytes::ZERO,
        }
    }

    /// Returns the answer to its target, if that differs from the last one, which was for the target `before`.
    #[must_use]
    pub fn reply(&self, before: Option<(u64, TargetReply)>) -> Option<TargetReply> {
        let (nonce, target) = self.target?;
        let used = self.size.used.unwrap_or(self.size.held);
        let reply = if used <= target {
            TargetReply::Applied
        } else {
            TargetReply::Deferred(used)
        };
        match before {
            Some((known, TargetReply::Applied)) if known == nonce => None,
            // Deferral is reported once.
            Some((known, TargetReply::Deferred(_)))
                if known == nonce && reply != TargetReply::Applied =>
            {
                None
            }
            _ => Some(reply),
        }
    }
}

/// Returns the memory that claims have from Kubernetes, including leases that end: their memory is still coming back.
#[must_use]
pub fn booked(leases: &[Held]) -> Bytes {
    let booked = leases
        .iter()
        .filter(|lease| lease.state != LeaseState::Requested);
    booked
        .map(|lease| lease.size.min.min(lease.size.held))
        .fold(Bytes::ZERO, Bytes::saturating_add)
}

/// Returns the memory above the minimum of claims that no pod uses.
#[must_use]
pub fn idle(leases: &[Held]) -> Bytes {
    leases
        .iter()
        .map(Held::idle)
        .fold(Bytes::ZERO, Bytes::saturating_add)
}

/// Returns the leases to lower so that `missing` bytes become free: unused bytes first, then bytes that pods have to
/// free, the largest amounts first. Less than `missing` if all together have less.
#[must_use]
pub fn room(leases: &[Held], missing: Bytes) -> Vec<Resize> {
    let mut left = missing;
    let mut lowered: Vec<Resize> = Vec::new();
    for in_use in [false, true] {
        let gives = |lease: &Held| {
            let Size { min, held, used } = lease.size;
            let stays = if in_use {
                min
            } else {
                min.max(used.unwrap_or(held))
            };
            held.saturating_sub(stays)
        };
        let mut givers: Vec<(Bytes, &Held)> = leases
            .iter()
            .filter(|lease| lease.state == LeaseState::Granted)
            .map(|lease| (gives(lease), lease))
            .collect();
        givers.sort_by(|a, b| (b.0, &a.1.uid).cmp(&(a.0, &b.1.uid)));
        for (bytes, lease) in givers {
            let before = lowered.iter_mut().find(|one| one.lease.uid == lease.uid);
            let given = before
                .as_ref()
                .map_or(Bytes::ZERO, |one| lease.size.held.saturating_sub(one.max));
            let take = bytes.saturating_sub(given).min(left);
            if take == Bytes::ZERO {
                continue;
            }
            left = left.saturating_sub(take);
            let max = lease.size.held.saturating_sub(given).saturating_sub(take);
            match before {
                Some(one) => one.max = max,
                None => lowered.push(Resize {
                    lease: lease.clone(),
                    max,
                }),
            }
        }
    }
    lowered
}

/// Returns the leases that may grow into `free` bytes, each with its share: the smallest part of its own maximum first.
/// `most` is the maximum of a claim, by its uid.
#[must_use]
pub fn growth(leases: &[Held], free: Bytes, most: impl Fn(&str) -> Option<Bytes>) -> Vec<Resize> {
    let mut left = free;
    let mut wanting: Vec<(Bytes, &Held)> = leases
        .iter()
        .filter(|lease| lease.state == LeaseState::Granted)
        .filter_map(|lease| {
            let lacks = most(&lease.uid)?.saturating_sub(lease.size.held);
            (lacks >= GROWTH_MIN).then_some((lacks, lease))
        })
        .collect();
    wanting.sort_by_key(|(lacks, lease)| (*lacks, lease.uid.clone()));
    let mut count = u64::try_from(wanting.len()).unwrap_or(u64::MAX);
    let mut grown = Vec::new();
    for (lacks, lease) in wanting {
        // Equal shares; what one does not need is left to those that lack more.
        let share = Bytes::new(left.get() / count.max(1)).min(lacks);
        count = count.saturating_sub(1);
        if share < GROWTH_MIN {
            continue;
        }
        left = left.saturating_sub(share);
        grown.push(Resize {
            lease: lease.clone(),
            max: lease.size.held.saturating_add(share),
        });
    }
    grown
}

/// Least growth of a lease. Our choice: fewer bytes are not worth a call.
const GROWTH_MIN: Bytes = Bytes::from_mib(4);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn lease(uid: &str, min: u64, held: u64, used: u64) -> Held {
        Held {
            uid: uid.to_owned(),
            name: format!("claim-{uid}#1"),
            boot_id: "run".to_owned(),
            generation: 1,
            cgroup: format!("/kubepods/pod{uid}"),
            state: LeaseState::Granted,
            size: Size {
                min: Bytes::from_mib(min),
                held: Bytes::from_mib(held),
                used: Some(Bytes::from_mib(used)),
            },
            target: None,
        }
    }

    #[test]
    fn unused_memory_is_taken_back_before_memory_in_use_and_never_the_minimum() {
        let leases = [lease("a", 64, 300, 100), lease("b", 64, 128, 20)];
        let lowered = |missing| {
            let room = room(&leases, Bytes::from_mib(missing));
            Vec::from_iter(
                room.into_iter()
                    .map(|one| (one.lease.uid, one.max.whole_mib())),
            )
        };
        assert_eq!(lowered(100), [("a".to_owned(), 200)]);
        assert_eq!(lowered(240), [("a".to_owned(), 100), ("b".to_owned(), 88)]);
        assert_eq!(lowered(290), [("a".to_owned(), 74), ("b".to_owned(), 64)]);
        assert_eq!(lowered(9999), [("a".to_owned(), 64), ("b".to_owned(), 64)]);
        assert_eq!(idle(&leases), Bytes::from_mib(200 + 64));
        assert_eq!(booked(&leases), Bytes::from_mib(128));
    }

    #[test]
    fn free_memory_is_shared_and_a_maximum_is_not_exceeded() {
        let leases = [
            lease("a", 64, 64, 64),
            lease("b", 64, 64, 64),
            lease("c", 64, 64, 64),
        ];
        let most = |uid: &str| {
            Some(Bytes::from_mib(match uid {
                "a" => 96,
                "b" => 512,
                _ => 64,
            }))
        };
        let grown = growth(&leases, Bytes::from_mib(200), most);
        let grown: Vec<_> = grown
            .iter()
            .map(|one| (&*one.lease.uid, one.max.whole_mib()))
            .collect();
        assert_eq!(grown, [("a", 96), ("b", 64 + 168)]);
        assert!(growth(&leases, Bytes::from_mib(3), most).is_empty());
    }

    #[test]
    fn a_target_is_answered_once_deferred_and_once_applied() {
        let mut held = lease("a", 64, 300, 250);
        held.target = Some((7, Bytes::from_mib(200)));
        let deferred = held.reply(None).unwrap();
        assert_eq!(deferred, TargetReply::Deferred(Bytes::from_mib(250)));
        assert_eq!(held.reply(Some((7, deferred))), None);
        held.size.used = Some(Bytes::from_mib(180));
        assert_eq!(held.reply(Some((7, deferred))), Some(TargetReply::Applied));
        assert_eq!(held.reply(Some((7, TargetReply::Applied))), None);
        held.target = Some((8, Bytes::from_mib(100)));
        assert!(held.reply(Some((7, TargetReply::Applied))).is_some());
    }

    proptest! {
        #[test]
        fn room_takes_what_is_missing_and_keeps_each_minimum(
            sizes in proptest::collection::vec((1u64..100, 0u64..400, 0u64..500), 0..8),
            missing in 0u64..3000,
        ) {
            let leases: Vec<Held> = sizes
                .iter()
                .enumerate()
                .map(|(at, (min, more, used))| lease(&at.to_string(), *min, min + more, *used))
                .collect();
            let lowered = room(&leases, Bytes::from_mib(missing));
            let mut taken = 0;
            for one in &lowered {
                prop_assert!(one.max >= one.lease.size.min && one.max < one.lease.size.held);
                taken += (one.lease.size.held - one.max).whole_mib();
            }
            let all: u64 = sizes.iter().map(|(_, more, _)| more).sum();
            prop_assert_eq!(taken, missing.min(all));
        }
    }
}
