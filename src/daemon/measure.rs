//! Measurement of holders: worker trees, the engine's mappings, tenants' processes.
//!
//! ```text
//!   asked ──► reading ──► Measured { used, taken_at }                     one task for each holder
//!                │ not read within the limit
//!                └──► Measured { used: None } ──► read at last ──► Measured { used, taken_at }
//! ```
//!
//! The time to read a holder grows with its size, and includes waiting for its memory lock. Holders are therefore read
//! independently, each with a time limit: a value not read in time is unknown, not zero. At most one reading of a
//! holder runs at a time; a request meanwhile causes another reading afterwards, so that it starts after the request.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use nix::{errno::Errno, sys::signal::kill, unistd::Pid};
use tokio::sync::OnceCell;

use super::{
    control_handle::ControlHandle,
    control_loop::Clock as _,
    engine::{CurrentEngine, activity},
    parts::Parts,
};
use cotenant_policy::{
    event::Event,
    lease::{LeaseKind, LeaseView},
    params::ENGINE_TENANT,
};
use cotenant_probe::{
    ProbeRoot,
    nvmap::{self, Nvmap},
    processes::{self, ProcessTable},
};
use cotenant_telemetry::Metrics;
use cotenant_threads::blocking;
use cotenant_units::lock::locked;
use cotenant_units::{Bytes, Timestamp};
use cotenant_worker::{handle::WorkerHandle, report::MemoryReading};

#[derive(Clone)]
pub(super) struct Measurer {
    parts: Parts,
    shared: Arc<Shared>,
}

struct Shared {
    control: Arc<ControlHandle>,
    root: ProbeRoot,
    workers: BTreeMap<String, WorkerHandle>,
    engine: Option<CurrentEngine>,
    metrics: Arc<Metrics>,
    peaks: Mutex<BTreeMap<String, Bytes>>,
    /// Holders being measured, and whether to measure each once more.
    under_way: Mutex<BTreeMap<String, Again>>,
    /// Whether the refusal to empty the GPU's page pool was logged.
    pool_refused: AtomicBool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Again {
    No,
    Yes,
}

/// Processes of the machine, listed once for all holders of a request: with many tenants, the list dominates the cost.
#[derive(Clone, Default)]
struct Listing(Arc<OnceCell<Option<Arc<ProcessTable>>>>);

impl Listing {
    async fn table(&self, root: &ProbeRoot) -> Option<Arc<ProcessTable>> {
        let proc = root.proc.clone();
        let list = || async {
            let read = blocking(move || ProcessTable::read(&proc).ok());
            read.await.ok().flatten().map(Arc::new)
        };
        self.0.get_or_init(list).await.clone()
    }
}

impl Measurer {
    /// Creates a measurer of these workers, this engine, and all tenants.
    pub(super) fn new(
        control: &Arc<ControlHandle>,
        root: ProbeRoot,
        workers: BTreeMap<String, WorkerHandle>,
        engine: Option<CurrentEngine>,
        metrics: &Arc<Metrics>,
        parts: &Parts,
    ) -> Self {
        Self {
            parts: parts.clone(),
            shared: Arc::new(Shared {
                control: Arc::clone(control),
                root,
                workers,
                engine,
                metrics: Arc::clone(metrics),
                peaks: Mutex::default(),
                under_way: Mutex::default(),
                pool_refused: AtomicBool::new(false),
            }),
        }
    }

    /// Empties nvmap's page pool outside the loop: the kernel frees some 100 000 pages. A refusal is logged once.
    pub(super) fn empty_page_pool(&self, bytes: Bytes) {
        let shared = Arc::clone(&self.shared);
        self.parts.spawn("emptying the page pool", async move {
            let root = shared.root.clone();
            let emptied = blocking(move || nvmap::empty_pool(&root, bytes)).await;
            if let Ok(Err(error)) = emptied
                && !shared.pool_refused.swap(true, Ordering::Relaxed)
            {
                tracing::warn!(%error, "cannot empty the GPU's page pool; allocations of the CPU wait for it");
            }
        });
    }

    /// Measures holders; each result is sent as an event.
    pub(super) fn measure(&self, holders: impl IntoIterator<Item = String>) {
        let listing = Listing::default();
        for holder in self.shared.depart(holders) {
            let (shared, mut listing) = (Arc::clone(&self.shared), listing.clone());
            self.parts.spawn("measuring", async move {
                loop {
                    shared.measure(&holder, &listing).await;
                    if !shared.is_wanted_again(&holder) {
                        return;
                    }
                    listing = Listing::default();
                }
            });
        }
    }
}

impl Shared {
    /// Marks `holders` as being measured, and returns those that were not; the others are measured once more
    /// afterwards.
    fn depart(&self, holders: impl IntoIterator<Item = String>) -> BTreeSet<String> {
        let mut under_way = locked(&self.under_way);
        let mut due = BTreeSet::new();
        for holder in holders {
            if let Some(again) = under_way.get_mut(&holder) {
                // A holder named twice in one call counts once.
                if !due.contains(&holder) {
                    *again = Again::Yes;
                }
            } else {
                under_way.insert(holder.clone(), Again::No);
                due.insert(holder);
            }
        }
        due
    }

    /// Ends a measurement; returns whether to measure the holder once more.
    fn is_wanted_again(&self, holder: &str) -> bool {
        let mut under_way = locked(&self.under_way);
        match under_way.get_mut(holder) {
            Some(again @ Again::Yes) => {
                *again = Again::No;
                true
            }
            Some(Again::No) | None => {
                under_way.remove(holder);
                false
            }
        }
    }

    async fn measure(&self, holder: &str, listing: &Listing) {
        // A reading is as old as its start.
        let taken_at = self.control.clock().now();
        if holder == ENGINE_TENANT {
            let used = self.read_engine().await;
            self.report(holder, used, taken_at).await;
        } else if let Some(worker) = self.workers.get(holder) {
            let reading = worker.measure();
            let reading = self
                .within_limit(holder, taken_at, reading, READING_MAX)
                .await;
            self.show(holder, reading);
            if let Some(peak) = reading.and_then(|reading| reading.peak())
                && self.is_news(holder, peak)
            {
                let worker = holder.to_owned();
                self.control
                    .tell(Event::PeakMeasured { worker, peak })
                    .await;
            }
            self.report(holder, reading.map(|reading| reading.used()), taken_at)
                .await;
        } else {
            let reading = self.read_tenant(holder, listing);
            let used = self
                .within_limit(holder, taken_at, reading, READING_MAX)
                .await;
            self.report(holder, used, taken_at).await;
        }
    }

    /// Waits for a reading. If it exceeds `limit`, the holder is reported as unmeasured meanwhile.
    async fn within_limit<T>(
        &self,
        holder: &str,
        taken_at: Timestamp,
        reading: impl Future<Output = Option<T>>,
        limit: Duration,
    ) -> Option<T> {
        let mut reading = std::pin::pin!(reading);
        match tokio::time::timeout(limit, &mut reading).await {
            Ok(read) => read,
            Err(_elapsed) => {
                tracing::warn!(
                    holder,
                    "the memory of a holder could not be read within {limit:?}"
                );
                self.report(holder, None, taken_at).await;
                reading.await
            }
        }
    }

    async fn report(&self, holder: &str, used: Option<Bytes>, taken_at: Timestamp) {
        let tenant = holder.to_owned();
        self.control
            .tell(Event::Measured {
                tenant,
                used,
                taken_at,
            })
            .await;
    }

    /// Returns whether a peak differs from the last reported one.
    fn is_news(&self, worker: &str, peak: Bytes) -> bool {
        let mut peaks = locked(&self.peaks);
        peaks.insert(worker.to_owned(), peak) != Some(peak)
    }

    async fn read_engine(&self) -> Option<Bytes> {
        let handle = self.engine.as_ref()?.handle();
        self.control.tell(activity(&handle)).await;
        handle.snapshot().held
    }

    async fn read_tenant(&self, tenant: &str, listing: &Listing) -> Option<Bytes> {
        let table = listing.table(&self.root).await?;
        let state = self.control.state();
        let owners = owners_of(&state.leases);
        let pids = owners.get(tenant).cloned().unwrap_or_default();
        let holders: BTreeSet<u32> = owners.into_values().flatten().collect();
        let root = self.root.clone();
        let read = blocking(move || tenant_memory(&root, &table, &pids, &holders));
        read.await.ok().flatten()
    }

    fn show(&self, worker: &str, reading: Option<MemoryReading>) {
        let sum = |by_rss: bool| {
            let sum = reading.map(|reading| reading.sum);
            sum.filter(|sum| (sum.by_rss > 0) == by_rss)
                .map(|sum| sum.used)
        };
        let kinds = [
            ("pss", sum(false)),
            ("rss", sum(true)),
            ("cgroup", reading.and_then(|reading| reading.cgroup)),
            ("gpu", reading.and_then(|reading| reading.gpu)),
        ];
        for (kind, bytes) in kinds {
            self.metrics.set_worker_memory(worker, kind, bytes);
        }
    }
}

/// Time limit of reading one holder: 16 GiB of small pages take 1.2 s on an x86-64 server (our choice: somewhat more).
const READING_MAX: Duration = Duration::from_secs(2);

/// Returns the processes of each holder of a tenant's lease, including ended leases whose memory is still in use.
///
/// A process that only waits for a lease is excluded: it is not the holder with the same name, and if it is a holder's
/// child, its memory counts for that holder.
fn owners_of(leases: &[LeaseView]) -> BTreeMap<&str, Vec<u32>> {
    let mut owners: BTreeMap<&str, Vec<u32>> = BTreeMap::new();
    for lease in leases {
        if lease.kind == LeaseKind::Tenant && !lease.waits() {
            let pids = owners.entry(lease.holder()).or_default();
            pids.extend(lease.owner.owner_pid.filter(|pid| !pids.contains(pid)));
        }
    }
    owners
}

/// Returns the memory of a tenant's processes and their children: zero if all have ended, `None` if none is known or
/// one cannot be read. Children that are `holders` themselves are excluded.
fn tenant_memory(
    root: &ProbeRoot,
    table: &ProcessTable,
    pids: &[u32],
    holders: &BTreeSet<u32>,
) -> Option<Bytes> {
    let mut tree = BTreeSet::new();
    for pid in pids {
        tree.extend(table.tree(*pid));
    }
    if tree.is_empty() {
        let gone = !pids.is_empty() && pids.iter().all(|pid| is_gone(*pid));
        return gone.then_some(Bytes::ZERO);
    }
    for holder in holders.iter().filter(|holder| !pids.contains(holder)) {
        if tree.contains(holder) {
            for theirs in table
                .tree(*holder)
                .difference(&pids.iter().copied().collect())
            {
                tree.remove(theirs);
            }
        }
    }
    // A tenant that started the supervisor is not charged for it, nor for its workers.
    for ours in table.tree(std::process::id()) {
        tree.remove(&ours);
    }
    if tree.is_empty() {
        return None;
    }
    let gpu = Nvmap::find(root).and_then(|nvmap| nvmap.clients()?.of_all(tree.iter().copied()));
    Some(
        processes::sum(&root.proc, tree)
            .used
            .saturating_add(gpu.unwrap_or_default()),
    )
}

/// Returns whether the process does not exist. A process missing in `/proc` may only be hidden from us (`hidepid`).
fn is_gone(pid: u32) -> bool {
    i32::try_from(pid)
        .is_ok_and(|pid| pid > 0 && kill(Pid::from_raw(pid), None) == Err(Errno::ESRCH))
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;
    use crate::clock::MonotonicClock;
    use cotenant_policy::lease::{Class, LeaseId, LeaseMemory, LeaseOwner, LeaseState};
    use cotenant_units::Timestamp;

    fn measurer() -> (
        Measurer,
        tokio::sync::mpsc::Receiver<crate::control_loop::Inbound>,
    ) {
        let (control, inbox) =
            ControlHandle::new("boot".to_owned(), Vec::new(), MonotonicClock::start(), 64);
        let (parts, _losses) = Parts::new();
        let root = ProbeRoot::default();
        let metrics = Arc::new(Metrics::new());
        (
            Measurer::new(&control, root, BTreeMap::new(), None, &metrics, &parts),
            inbox,
        )
    }

    #[tokio::test]
    async fn a_holder_asked_for_while_it_is_measured_is_measured_once_more_and_no_more() {
        let (measurer, _inbox) = measurer();
        let names = |names: &[&str]| {
            names
                .iter()
                .map(|&name| name.to_owned())
                .collect::<BTreeSet<_>>()
        };
        let shared = &measurer.shared;
        assert_eq!(
            shared.depart(["a".to_owned(), "a".to_owned()]),
            names(&["a"])
        );
        for _ in 0..3 {
            assert!(
                !shared
                    .depart(["a".to_owned(), "b".to_owned()])
                    .contains("a"),
                "it is under way"
            );
        }
        assert!(shared.is_wanted_again("a"));
        assert!(!shared.is_wanted_again("a"));
        assert_eq!(shared.depart(["a".to_owned()]), names(&["a"]));
    }

    #[tokio::test]
    async fn a_holder_that_cannot_be_read_in_time_delays_no_other_and_is_unmeasured_meanwhile() {
        let (measurer, mut inbox) = measurer();
        let (finish, finished) = tokio::sync::oneshot::channel::<Bytes>();
        let shared = Arc::clone(&measurer.shared);
        let taken_at = shared.control.clock().now();
        let slow = tokio::spawn(async move {
            let reading = async { finished.await.ok() };
            let used = shared
                .within_limit("slow", taken_at, reading, Duration::ZERO)
                .await;
            shared.report("slow", used, taken_at).await;
        });
        measurer.measure(["absent".to_owned()]);
        let mut measured = Vec::new();
        while measured.len() < 2 {
            if let Event::Measured { tenant, used, .. } = inbox.recv().await.unwrap().event {
                measured.push((tenant, used));
            }
        }
        measured.sort();
        assert_eq!(
            measured,
            [("absent".to_owned(), None), ("slow".to_owned(), None)]
        );
        finish.send(Bytes::from_mib(9)).unwrap();
        slow.await.unwrap();
        match inbox.recv().await.unwrap().event {
            Event::Measured {
                used, taken_at: at, ..
            } => {
                assert_eq!(
                    (used, at),
                    (Some(Bytes::from_mib(9)), taken_at),
                    "as old as it is"
                );
            }
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn every_question_is_answered_and_unknown_is_not_zero() {
        let (measurer, mut inbox) = measurer();
        measurer.measure(["absent".to_owned(), ENGINE_TENANT.to_owned()]);
        let mut reported = BTreeMap::new();
        while reported.len() < 2 {
            if let Event::Measured { tenant, used, .. } = inbox.recv().await.unwrap().event {
                reported.insert(tenant, used);
            }
        }
        assert_eq!(reported.into_values().collect::<Vec<_>>(), [None, None]);
    }

    fn lease(holder: &str, kind: LeaseKind, state: LeaseState, pid: Option<u32>) -> LeaseView {
        LeaseView {
            id: LeaseId(1),
            tenant: holder.to_owned(),
            holder: holder.to_owned(),
            kind,
            class: Class::Batch,
            state,
            generation: 1,
            memory: LeaseMemory {
                held: Bytes::ZERO,
                min: Bytes::ZERO,
                max: Bytes::ZERO,
                used: None,
                used_at: None,
            },
            target: None,
            granted_at: Timestamp::START,
            expires_at: None,
            owner: LeaseOwner {
                owner_uid: 1000,
                owner_pid: pid,
            },
        }
    }

    /// Otherwise a holder would be charged for any process that requests a lease by its name, and a holder's child with
    /// a pending lease of its own would be charged to none.
    #[test]
    fn who_waits_for_a_lease_is_not_measured_for_it() {
        let tenant = |holder, state, pid| lease(holder, LeaseKind::Tenant, state, Some(pid));
        let leases = [
            lease("asr", LeaseKind::Worker, LeaseState::Granted, None),
            tenant("vision", LeaseState::Granted, 10),
            tenant("vision", LeaseState::Revoking, 10),
            lease("hidden", LeaseKind::Tenant, LeaseState::Granted, None),
            tenant("gone", LeaseState::Gone, 12),
            tenant("vision", LeaseState::Requested, 11),
            tenant("x", LeaseState::Requested, 13),
        ];
        let expected = BTreeMap::from([
            ("vision", vec![10]),
            ("hidden", Vec::new()),
            ("gone", vec![12]),
        ]);
        assert_eq!(owners_of(&leases), expected);
    }

    #[test]
    fn a_process_that_has_ended_uses_nothing() {
        let root = ProbeRoot::default();
        let mut child = Command::new("sleep")
            .arg("1000")
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let pid = child.id();
        let none = BTreeSet::new();
        let measure = |pids: &[u32]| {
            tenant_memory(&root, &ProcessTable::read(&root.proc).unwrap(), pids, &none)
        };
        // Our own children count for us.
        assert_eq!(measure(&[pid]), None);
        assert_eq!(measure(&[]), None);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(measure(&[pid]), Some(Bytes::ZERO));
        // An existing process of another user.
        assert!(
            measure(&[1]).is_some_and(|used| used > Bytes::ZERO),
            "the first process"
        );
        // An existing process missing in this list is hidden, not gone.
        assert_eq!(
            tenant_memory(&root, &ProcessTable::default(), &[1], &none),
            None
        );
    }

    #[test]
    fn a_child_that_holds_a_lease_answers_for_itself_and_not_its_parent() {
        // A tenant (100) with a child (101), and with another child that is a tenant (102) with its own child (103).
        let folder = tempfile::tempdir().unwrap();
        for (pid, parent, kib) in [(100, 1, 10), (101, 100, 20), (102, 100, 40), (103, 102, 80)] {
            let own = folder.path().join(format!("proc/{pid}"));
            std::fs::create_dir_all(&own).unwrap();
            let stat = format!(
                "{pid} (tenant) S {parent} {pid} 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 {pid} 0 0"
            );
            std::fs::write(own.join("stat"), stat).unwrap();
            let rollup =
                format!("00400000-7fff rollup\nRss: {kib} kB\nPss: {kib} kB\nSwapPss: 0 kB\n");
            std::fs::write(own.join("smaps_rollup"), rollup).unwrap();
        }
        let root = ProbeRoot::at(folder.path());
        let table = ProcessTable::read(&root.proc).unwrap();
        let holders = BTreeSet::from([100, 102]);
        let measure = |pids: &[u32]| tenant_memory(&root, &table, pids, &holders);
        assert_eq!(measure(&[100]), Some(Bytes::from_kib(30)));
        assert_eq!(measure(&[102]), Some(Bytes::from_kib(120)));
        assert_eq!(
            measure(&[100, 102]),
            Some(Bytes::from_kib(150)),
            "one tenant with two leases"
        );
        // GPU memory of a Jetson for each, and for others.
        let clients = root.sys("kernel/debug/nvmap/iovmm/clients");
        std::fs::create_dir_all(clients.parent().unwrap()).unwrap();
        std::fs::write(
            clients,
            "CLIENT PROCESS PID SIZE\nuser t 101 5K\nuser t 103 300K\nuser x 7 9000K\ntotal 9305K\n",
        )
        .unwrap();
        assert_eq!(measure(&[100]), Some(Bytes::from_kib(35)));
        assert_eq!(measure(&[102]), Some(Bytes::from_kib(420)));
    }
}
