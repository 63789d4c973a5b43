//! Process behind each lease, so that a lease ends with it.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::task::AbortHandle;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::{
    peer::Process,
    supervisor::{SubmitError, Supervisor},
};
use cotenant_policy::{
    event::Event,
    lease::{LeaseId, LeaseView},
};
use cotenant_units::lock::locked;

/// Watches the processes that hold leases.
///
/// A lost connection proves nothing: the lease continues until its term. The end of the process ends the lease. Only
/// the process that requested the lease is watched, since it is the one measured. It is watched beyond the end of its
/// lease, while the arbiter lists it: it may have released the lease and not the memory, or may not have been notified
/// of the end.
#[derive(Clone)]
pub(super) struct Holders {
    supervisor: Arc<dyn Supervisor>,
    stop: CancellationToken,
    watches: Arc<Mutex<Watches>>,
}

/// One watch for each process, however many leases it has.
#[derive(Default)]
struct Watches {
    of: BTreeMap<u32, Watch>,
    /// Leases that have been added since those that are gone were last taken out.
    added: usize,
}

struct Watch {
    process: Arc<Process>,
    leases: Arc<Mutex<BTreeSet<LeaseId>>>,
    task: AbortHandle,
}

impl Holders {
    /// Watches until `stop`.
    pub(super) fn new(supervisor: Arc<dyn Supervisor>, stop: CancellationToken) -> Self {
        Self {
            supervisor,
            stop,
            watches: Arc::default(),
        }
    }

    /// Takes note that `process` has to do with a lease, and watches it if it is the one that holds it.
    pub(super) fn attach(&self, view: &LeaseView, process: &Arc<Process>) {
        if view.owner.owner_pid == Some(process.pid()) {
            self.attach_holder(view.id, process);
        }
    }

    /// As [`attach`](Self::attach), for a process that holds the lease.
    pub(super) fn attach_holder(&self, lease: LeaseId, process: &Arc<Process>) {
        let mut watches = locked(&self.watches);
        watches.forget_those_gone(&*self.supervisor);
        let known = watches.of.get(&process.pid());
        // One that has ended has its watch until it is notified, and its id may be another one's by now.
        let leases = known
            .filter(|watch| !watch.process.is_over())
            .map(|watch| Arc::clone(&watch.leases));
        let leases = leases.unwrap_or_else(|| {
            let leases = Arc::<Mutex<BTreeSet<LeaseId>>>::default();
            let task = tokio::spawn(self.clone().watch(Arc::clone(process), Arc::clone(&leases)));
            let watch = Watch {
                process: Arc::clone(process),
                leases: Arc::clone(&leases),
                task: task.abort_handle(),
            };
            watches.of.insert(process.pid(), watch);
            leases
        });
        let mut leases = locked(&leases);
        watches.added += usize::from(leases.insert(lease));
    }

    /// Waits for the end of a process and notifies the arbiter.
    async fn watch(self, process: Arc<Process>, leases: Arc<Mutex<BTreeSet<LeaseId>>>) {
        let ended = tokio::select! {
            ended = process.ended() => ended,
            () = self.stop.cancelled() => return,
        };
        {
            let mut watches = locked(&self.watches);
            let of = &mut watches.of;
            if of
                .get(&process.pid())
                .is_some_and(|watch| Arc::ptr_eq(&watch.leases, &leases))
            {
                of.remove(&process.pid());
            }
        }
        let leases = std::mem::take(&mut *locked(&leases));
        if let Err(error) = ended {
            // The term still ends the leases.
            warn!(leases = leases.len(), pid = process.pid(), %error, "cannot watch the holder of leases");
            return;
        }
        for lease in leases {
            let pid = Some(process.pid());
            while self
                .supervisor
                .submit(Event::HolderLost { lease, pid }, None)
                == Err(SubmitError::Full)
            {
                tokio::time::sleep(RETRY_EVERY).await;
            }
        }
    }
}

impl Watches {
    /// Takes out leases that the arbiter does not list any more; with each doubling, so that it costs little.
    fn forget_those_gone(&mut self, supervisor: &dyn Supervisor) {
        if self.added < FORGET_AFTER {
            return;
        }
        let state = supervisor.snapshot().borrow().clone();
        if self.added < state.leases.len() {
            return;
        }
        self.added = 0;
        let listed: BTreeSet<LeaseId> = state.leases.iter().map(|lease| lease.id).collect();
        self.of.retain(|_, watch| {
            let mut leases = locked(&watch.leases);
            leases.retain(|lease| listed.contains(lease));
            if leases.is_empty() {
                watch.task.abort();
            }
            !leases.is_empty()
        });
    }
}

/// Additions between two removals of ended leases (our choice: their memory is negligible).
const FORGET_AFTER: usize = 64;

/// How often an event is offered to a full inbox (our choice: well below the shortest term).
const RETRY_EVERY: Duration = Duration::from_millis(50);
