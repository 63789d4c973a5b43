//! Watches the process behind each lease, so that a lease ends with it.

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
/// A lost connection proves nothing, and the lease continues for its term; the exit of the process ends the lease. Only
/// the process that requested the lease, which is measured for it, is watched. The watch lasts beyond the end of the
/// lease while the arbiter lists it: the process may have released the lease but not the memory, or may not have been
/// notified.
#[derive(Clone)]
pub(super) struct Holders {
    supervisor: Arc<dyn Supervisor>,
    stop: CancellationToken,
    watches: Arc<Mutex<Watches>>,
}

/// One watch per process with its leases.
#[derive(Default)]
struct Watches {
    of: BTreeMap<u32, Watch>,
    /// Leases added since the last removal of ended ones.
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

    /// Associates `process` with a lease, and watches it if it is the holder.
    pub(super) fn attach(&self, view: &LeaseView, process: &Arc<Process>) {
        if view.owner.owner_pid == Some(process.pid()) {
            self.attach_holder(view.id, process);
        }
    }

    /// [`attach`](Self::attach) for the holder.
    pub(super) fn attach_holder(&self, lease: LeaseId, process: &Arc<Process>) {
        let mut watches = locked(&self.watches);
        watches.forget_those_gone(&*self.supervisor);
        let known = watches.of.get(&process.pid());
        // An ended process keeps its watch until the arbiter is notified, and its id may already be reused.
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

    /// Waits for the exit of a process and notifies the arbiter.
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
    /// Removes leases that the arbiter no longer lists, at each doubling, which amortises the cost.
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

/// Additions before ended leases are removed (our choice: their memory is negligible).
const FORGET_AFTER: usize = 64;

/// Interval of attempts at a full inbox (our choice: well below the shortest term).
const RETRY_EVERY: Duration = Duration::from_millis(50);
