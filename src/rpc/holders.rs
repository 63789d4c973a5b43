//! Which process stands behind each lease, so that a lease does not outlive it.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::{sync::broadcast::error::RecvError, task::AbortHandle};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::{
    peer::Process,
    supervisor::{Notice, SubmitError, Supervisor},
};
use crate::policy::{event::Event, lease::LeaseId};

/// Watches the processes that hold leases.
///
/// A lost connection says nothing: the lease goes on until its term. The end of the process does, and the lease ends
/// with it. A process is watched beyond the end of its lease too, since it may have given back the lease and not the
/// memory, which then counts as used until the process is gone.
#[derive(Clone)]
pub(super) struct Holders {
    supervisor: Arc<dyn Supervisor>,
    watches: Arc<Mutex<BTreeMap<LeaseId, Watch>>>,
}

struct Watch {
    tenant: String,
    /// Whether the lease has ended.
    ended: bool,
    process: Arc<Process>,
    task: AbortHandle,
}

impl Holders {
    pub(super) fn new(supervisor: Arc<dyn Supervisor>) -> Self {
        Self {
            supervisor,
            watches: Arc::default(),
        }
    }

    /// From now on `process` stands behind `lease` of `tenant`, in place of the one before.
    pub(super) fn attach(&self, lease: LeaseId, tenant: &str, process: &Arc<Process>) {
        let mut watches = self.watches.lock().unwrap_or_else(PoisonError::into_inner);
        if watches
            .get(&lease)
            .is_some_and(|watch| Arc::ptr_eq(&watch.process, process))
        {
            return;
        }
        // What a tenant has not given back is known by its last lease; more than a few ended ones are of no use.
        let ended = watches.values().filter(|watch| watch.ended).count();
        let mut surplus = ended.saturating_sub(ENDED_MAX);
        watches.retain(|id, watch| {
            let oldest = watch.ended && surplus > 0;
            surplus -= usize::from(oldest);
            let keep = *id != lease && !oldest && !(watch.ended && watch.tenant == tenant);
            if !keep {
                watch.task.abort();
            }
            keep
        });
        let task = tokio::spawn(watch(Arc::clone(&self.supervisor), lease, Arc::clone(process))).abort_handle();
        watches.insert(
            lease,
            Watch {
                tenant: tenant.to_owned(),
                ended: false,
                process: Arc::clone(process),
                task,
            },
        );
    }

    /// The lease has ended.
    pub(super) fn ended(&self, lease: LeaseId) {
        let mut watches = self.watches.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(watch) = watches.get_mut(&lease) {
            watch.ended = true;
        }
    }

    /// Takes note of leases that end, until the server ends.
    pub(super) async fn follow(self, stop: CancellationToken) {
        let mut notices = self.supervisor.notices();
        loop {
            let notice = tokio::select! {
                notice = notices.recv() => notice,
                () = stop.cancelled() => break,
            };
            match notice {
                Ok(Notice::Ended { lease, .. }) => self.ended(lease),
                Ok(Notice::Target { .. }) => {}
                // A watch that stays too long does no harm: the arbiter does not know its lease any more.
                Err(RecvError::Lagged(_)) => {}
                Err(RecvError::Closed) => break,
            }
        }
        let watches = std::mem::take(&mut *self.watches.lock().unwrap_or_else(PoisonError::into_inner));
        for watch in watches.into_values() {
            watch.task.abort();
        }
    }
}

/// Waits for the end of the process and tells the arbiter.
async fn watch(supervisor: Arc<dyn Supervisor>, lease: LeaseId, process: Arc<Process>) {
    if let Err(error) = process.ended().await {
        // The term still ends the lease.
        warn!(lease = lease.0, pid = process.pid(), %error, "cannot watch the holder of a lease");
        return;
    }
    while supervisor.submit(Event::HolderLost { lease }, None) == Err(SubmitError::Full) {
        tokio::time::sleep(RETRY_EVERY).await;
    }
}

/// Watches of ended leases that are kept (our choice: above the leases that one user may have).
const ENDED_MAX: usize = 256;

/// How often an event is offered to a full inbox (our choice: well below the shortest term).
const RETRY_EVERY: Duration = Duration::from_millis(50);
