//! `WatchLeases`: all leases, initially and after each change.

use std::sync::{Arc, Mutex};

use tokio::sync::watch;
use tonic::Status;

use super::{
    call::{Call, Context},
    convert::{self, Clock},
    status::CallError,
    supervisor::Supervisor,
    v1::{WatchLeasesRequest, WatchLeasesResponse},
};
use cotenant_policy::{
    lease::{LeaseMemory, LeaseView},
    snapshot::Snapshot,
};
use cotenant_units::lock::locked;

/// The last state sent, and the sequence from which it is valid, to resume a watch.
///
/// Without watchers nothing is recorded: a returning reader is compared with the last state sent.
#[derive(Debug, Default)]
pub(super) struct States(Mutex<Seen>);

#[derive(Debug, Default)]
struct Seen {
    /// The last snapshot examined, once for all watchers.
    snapshot: Option<Arc<Snapshot>>,
    leases: Option<Arc<Vec<LeaseView>>>,
    /// The sequence at its first observation.
    since: u64,
    /// Whether another state was sent with the same sequence.
    ambiguous: bool,
    /// The highest sequence sent so far.
    sent: u64,
}

/// A state to send.
struct Taken {
    snapshot: Arc<Snapshot>,
    leases: Arc<Vec<LeaseView>>,
    sequence: u64,
    /// The lowest sequence that was sent only with this state.
    known_from: u64,
}

impl States {
    /// Reads the current state.
    fn take(&self, supervisor: &dyn Supervisor) -> Taken {
        let mut seen = locked(&self.0);
        // Read before the state, so that the state contains every event up to it.
        let sequence = *supervisor.events().last_sequence().borrow();
        let snapshot = supervisor.snapshot().borrow().clone();
        let leases = seen.look(&snapshot, sequence);
        Taken {
            snapshot,
            leases,
            sequence,
            known_from: seen.since + u64::from(seen.ambiguous),
        }
    }
}

impl Seen {
    /// The leases of a state; shares those of the previous one if equal.
    fn look(&mut self, snapshot: &Arc<Snapshot>, sequence: u64) -> Arc<Vec<LeaseView>> {
        let known = self
            .snapshot
            .as_ref()
            .is_some_and(|known| Arc::ptr_eq(known, snapshot));
        let known = self.leases.as_ref().filter(|_| known).map(Arc::clone);
        let leases = known.unwrap_or_else(|| self.look_through(snapshot, sequence));
        self.sent = self.sent.max(sequence);
        leases
    }

    fn look_through(&mut self, snapshot: &Arc<Snapshot>, sequence: u64) -> Arc<Vec<LeaseView>> {
        self.snapshot = Some(Arc::clone(snapshot));
        let now: Vec<_> = snapshot
            .leases
            .iter()
            .cloned()
            .map(without_time_of_measurement)
            .collect();
        match &self.leases {
            Some(leases) if **leases == now => Arc::clone(leases),
            before => {
                self.ambiguous = before.is_some() && self.sent == sequence;
                self.since = sequence;
                Arc::clone(self.leases.insert(Arc::new(now)))
            }
        }
    }
}

pub(super) struct Watching {
    context: Context,
    call: Call,
    states: Arc<States>,
    snapshots: watch::Receiver<Arc<Snapshot>>,
    /// The state last sent.
    sent: Option<Arc<Vec<LeaseView>>>,
}

impl Watching {
    /// A reader that already has the state of its request.
    pub(super) fn new(
        context: Context,
        call: Call,
        states: &Arc<States>,
        request: &WatchLeasesRequest,
    ) -> Self {
        let supervisor = &*context.supervisor;
        // Subscribed before the state is read, so that no change is missed.
        let snapshots = supervisor.snapshot();
        let taken = states.take(supervisor);
        let has_it = request.after_sequence != 0
            && request.boot_id == supervisor.boot_id()
            && request.after_sequence >= taken.known_from;
        Self {
            states: Arc::clone(states),
            snapshots,
            sent: has_it.then_some(taken.leases),
            context,
            call,
        }
    }

    /// The next state that differs from the last one sent.
    pub(super) async fn next(mut self) -> Result<Option<(WatchLeasesResponse, Self)>, Status> {
        loop {
            self.snapshots.mark_unchanged();
            let supervisor = &*self.context.supervisor;
            let taken = self.states.take(supervisor);
            if self.sent.as_ref() != Some(&taken.leases) {
                let boot_id = supervisor.boot_id();
                let clock = Clock::new(supervisor.now());
                let response = WatchLeasesResponse {
                    leases: taken
                        .snapshot
                        .leases
                        .iter()
                        .map(|view| convert::lease(view, boot_id, clock))
                        .collect(),
                    boot_id: boot_id.to_owned(),
                    sequence: taken.sequence,
                };
                self.sent = Some(taken.leases);
                return Ok(Some((response, self)));
            }
            tokio::select! {
                changed = self.snapshots.changed() => changed.map_err(|_closed| CallError::Stopping)?,
                allowed = self.call.expired() => return Err(CallError::DeadlinePassed { allowed }.into()),
                () = self.context.stop.cancelled() => return Err(CallError::Stopping.into()),
            }
        }
    }
}

/// Removes the measurement time: a repeated figure is not a change.
fn without_time_of_measurement(view: LeaseView) -> LeaseView {
    LeaseView {
        memory: LeaseMemory {
            used_at: None,
            ..view.memory
        },
        ..view
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_is_looked_through_once_however_many_watch() {
        let (first, second) = (Arc::new(Snapshot::default()), Arc::new(Snapshot::default()));
        let mut seen = Seen::default();
        let leases = seen.look(&first, 1);
        // Replaced by another examination of the snapshot, if there is one.
        let mark = Arc::new(Vec::with_capacity(7));
        seen.leases = Some(Arc::clone(&mark));
        let again = seen.look(&first, 2);
        assert!(Arc::ptr_eq(&again, &mark) && !Arc::ptr_eq(&again, &leases));
        assert_eq!((seen.since, seen.sent, seen.ambiguous), (1, 2, false));
        // For watchers, another snapshot with equal leases is the same state.
        assert!(Arc::ptr_eq(&seen.look(&second, 3), &mark));
        assert!(Arc::ptr_eq(seen.snapshot.as_ref().unwrap(), &second));
    }
}
