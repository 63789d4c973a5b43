//! Measurement of holders: worker trees, the engine's mappings, tenants' processes.
//!
//! Each holder is measured at most once at a time, so that nothing piles up where a measurement takes longer than the
//! pause between two: whoever asks meanwhile is answered by one more, which begins after the question.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, PoisonError},
};

use nix::{errno::Errno, sys::signal::kill, unistd::Pid};
use tokio::task::spawn_blocking;

use super::{
    engine::{CurrentEngine, ENGINE_TENANT, activity},
    hub::Hub,
    parts::Parts,
};
use crate::{
    policy::{
        event::Event,
        lease::{LeaseKind, LeaseView},
    },
    probe::{
        ProbeRoot,
        process::{self, ProcessTable},
    },
    telemetry::Metrics,
    units::Bytes,
    worker::{
        handle::WorkerHandle,
        measure::{MemoryBasis, MemoryReading},
    },
};

/// Measures holders on demand.
#[derive(Clone)]
pub(super) struct Measurer {
    parts: Parts,
    shared: Arc<Shared>,
}

struct Shared {
    hub: Arc<Hub>,
    root: ProbeRoot,
    workers: BTreeMap<String, WorkerHandle>,
    engine: Option<CurrentEngine>,
    metrics: Arc<Metrics>,
    /// Peaks of workers, as last told.
    peaks: Mutex<BTreeMap<String, Bytes>>,
    /// Holders that are being measured, and whether they are to be measured once more.
    under_way: Mutex<BTreeMap<String, Again>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Again {
    No,
    Yes,
}

impl Measurer {
    /// Measures these holders of ours, and any tenant.
    pub(super) fn new(
        hub: &Arc<Hub>,
        root: ProbeRoot,
        workers: BTreeMap<String, WorkerHandle>,
        engine: Option<CurrentEngine>,
        metrics: &Arc<Metrics>,
        parts: &Parts,
    ) -> Self {
        Self {
            parts: parts.clone(),
            shared: Arc::new(Shared {
                hub: Arc::clone(hub),
                root,
                workers,
                engine,
                metrics: Arc::clone(metrics),
                peaks: Mutex::default(),
                under_way: Mutex::default(),
            }),
        }
    }

    /// Measures holders; each result comes as an event. None of ours waits for another one.
    pub(super) fn measure(&self, holders: impl IntoIterator<Item = String>) {
        let (ours, tenants): (BTreeSet<_>, BTreeSet<_>) = self
            .shared
            .depart(holders)
            .into_iter()
            .partition(|holder| holder == ENGINE_TENANT || self.shared.workers.contains_key(holder));
        for holder in ours {
            self.spawn(BTreeSet::from([holder]));
        }
        self.spawn(tenants);
    }

    fn spawn(&self, mut due: BTreeSet<String>) {
        let shared = Arc::clone(&self.shared);
        if !due.is_empty() {
            self.parts.spawn("measuring", async move {
                while !due.is_empty() {
                    shared.measure(due.clone()).await;
                    due = shared.land(&due);
                }
            });
        }
    }
}

impl Shared {
    /// Those of `holders` that are not being measured; they are from now on. The others are to be measured once more.
    fn depart(&self, holders: impl IntoIterator<Item = String>) -> BTreeSet<String> {
        let mut under_way = self.under_way.lock().unwrap_or_else(PoisonError::into_inner);
        let mut due = BTreeSet::new();
        for holder in holders {
            if let Some(again) = under_way.get_mut(&holder) {
                // Named twice in one breath is asked once.
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

    /// Ends the measurement of `measured`; returns those that are to be measured once more.
    fn land(&self, measured: &BTreeSet<String>) -> BTreeSet<String> {
        let mut under_way = self.under_way.lock().unwrap_or_else(PoisonError::into_inner);
        let mut due = BTreeSet::new();
        for holder in measured {
            match under_way.insert(holder.clone(), Again::No) {
                Some(Again::Yes) => {
                    due.insert(holder.clone());
                }
                Some(Again::No) | None => {
                    under_way.remove(holder);
                }
            }
        }
        due
    }

    async fn measure(&self, mut holders: BTreeSet<String>) {
        if holders.remove(ENGINE_TENANT) {
            self.measure_engine().await;
        }
        for (name, worker) in &self.workers {
            if holders.remove(name) {
                self.measure_worker(name, worker).await;
            }
        }
        self.measure_tenants(holders).await;
    }

    async fn measure_worker(&self, name: &str, worker: &WorkerHandle) {
        // What is read may be as old as the beginning of the reading.
        let taken_at = self.hub.clock().now();
        let reading = worker.measure().await;
        self.show(name, reading);
        if let Some(peak) = reading.and_then(|reading| reading.peak)
            && self.is_news(name, peak)
        {
            let worker = name.to_owned();
            self.hub.tell(Event::PeakMeasured { worker, peak }).await;
        }
        let used = reading.map(|reading| reading.tree);
        let measured = Event::Measured {
            tenant: name.to_owned(),
            used,
            taken_at,
        };
        self.hub.tell(measured).await;
    }

    /// Whether a peak is another one than the last that was told.
    fn is_news(&self, worker: &str, peak: Bytes) -> bool {
        let mut peaks = self.peaks.lock().unwrap_or_else(PoisonError::into_inner);
        peaks.insert(worker.to_owned(), peak) != Some(peak)
    }

    async fn measure_engine(&self) {
        let taken_at = self.hub.clock().now();
        let handle = self.engine.as_ref().map(CurrentEngine::handle);
        if let Some(handle) = &handle {
            self.hub.tell(activity(handle)).await;
        }
        let measured = Event::Measured {
            tenant: ENGINE_TENANT.to_owned(),
            used: handle.and_then(|handle| handle.snapshot().held),
            taken_at,
        };
        self.hub.tell(measured).await;
    }

    async fn measure_tenants(&self, tenants: BTreeSet<String>) {
        if tenants.is_empty() {
            return;
        }
        let state = self.hub.state();
        let holders = owners_of(&state.leases);
        let owners: Vec<(String, Vec<u32>)> = tenants
            .into_iter()
            .map(|tenant| {
                let pids = holders.get(tenant.as_str()).cloned().unwrap_or_default();
                (tenant, pids)
            })
            .collect();
        let holders: BTreeSet<u32> = holders.into_values().flatten().collect();
        let root = self.root.clone();
        let taken_at = self.hub.clock().now();
        let read = spawn_blocking(move || {
            // One list of processes for all of them: with many tenants it is what costs.
            let table = ProcessTable::read(&root).ok();
            let used = |pids: &[u32]| tenant_memory(&root, table.as_ref()?, pids, &holders);
            let read = owners.into_iter().map(|(tenant, pids)| (used(&pids), tenant));
            read.collect::<Vec<_>>()
        });
        for (used, tenant) in read.await.unwrap_or_default() {
            self.hub.tell(Event::Measured { tenant, used, taken_at }).await;
        }
    }

    fn show(&self, worker: &str, reading: Option<MemoryReading>) {
        let tree = |basis| {
            reading
                .filter(|reading| reading.basis == basis)
                .map(|reading| reading.tree)
        };
        let kinds = [
            ("pss", tree(MemoryBasis::Pss)),
            ("rss", tree(MemoryBasis::Rss)),
            ("cgroup", reading.and_then(|reading| reading.cgroup)),
        ];
        for (kind, bytes) in kinds {
            self.metrics.set_worker_memory(worker, kind, bytes);
        }
    }
}

/// The processes behind each holder of a tenant's lease, with those whose lease has ended and that still use memory.
///
/// Who only waits for a lease is none: its memory is not that of a holder whose name it asks by, and if it is a holder's
/// child, what it uses is the holder's.
fn owners_of(leases: &[LeaseView]) -> BTreeMap<&str, Vec<u32>> {
    let mut owners: BTreeMap<&str, Vec<u32>> = BTreeMap::new();
    for lease in leases {
        if lease.kind == LeaseKind::Tenant && !lease.waits() {
            let pids = owners.entry(lease.holder()).or_default();
            pids.extend(lease.owner_pid.filter(|pid| !pids.contains(pid)));
        }
    }
    owners
}

/// What the processes behind a tenant's leases use, children included: zero when all of them are gone, `None` when none
/// is known or what is there cannot be read. Children that are `holders` themselves answer for themselves.
fn tenant_memory(root: &ProbeRoot, table: &ProcessTable, pids: &[u32], holders: &BTreeSet<u32>) -> Option<Bytes> {
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
            for theirs in table.tree(*holder).difference(&pids.iter().copied().collect()) {
                tree.remove(theirs);
            }
        }
    }
    // A tenant that started the supervisor itself does not answer for it, nor for its workers.
    for ours in table.tree(std::process::id()) {
        tree.remove(&ours);
    }
    if tree.is_empty() {
        return None;
    }
    Some(process::sum(root, tree).pss)
}

/// Whether there is no such process. One that `/proc` does not show may only be hidden from us (`hidepid`).
fn is_gone(pid: u32) -> bool {
    i32::try_from(pid).is_ok_and(|pid| pid > 0 && kill(Pid::from_raw(pid), None) == Err(Errno::ESRCH))
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;
    use crate::{
        daemon::clock::Clock,
        policy::lease::{Class, LeaseId, LeaseState},
        units::Timestamp,
    };

    fn measurer() -> (Measurer, tokio::sync::mpsc::Receiver<crate::daemon::hub::Inbound>) {
        let (hub, inbox) = Hub::new("boot".to_owned(), Vec::new(), Clock::start());
        let (parts, _losses) = Parts::new();
        let root = ProbeRoot::default();
        let metrics = Arc::new(Metrics::new());
        (
            Measurer::new(&hub, root, BTreeMap::new(), None, &metrics, &parts),
            inbox,
        )
    }

    #[tokio::test]
    async fn a_holder_asked_for_while_it_is_measured_is_measured_once_more_and_no_more() {
        let (measurer, _inbox) = measurer();
        let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<BTreeSet<_>>();
        let shared = &measurer.shared;
        assert_eq!(shared.depart(["a".to_owned(), "a".to_owned()]), names(&["a"]));
        for _ in 0..3 {
            assert!(
                !shared.depart(["a".to_owned(), "b".to_owned()]).contains("a"),
                "it is under way"
            );
        }
        assert_eq!(shared.land(&names(&["a"])), names(&["a"]));
        assert_eq!(shared.land(&names(&["a"])), names(&[]));
        assert_eq!(shared.depart(["a".to_owned()]), names(&["a"]));
    }

    #[tokio::test]
    async fn every_question_is_answered_and_unknown_is_not_zero() {
        let (measurer, mut inbox) = measurer();
        measurer.measure(["nobody".to_owned(), ENGINE_TENANT.to_owned()]);
        let mut told = BTreeMap::new();
        while told.len() < 2 {
            if let Event::Measured { tenant, used, .. } = inbox.recv().await.unwrap().event {
                told.insert(tenant, used);
            }
        }
        assert_eq!(told.into_values().collect::<Vec<_>>(), [None, None]);
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
            held: Bytes::ZERO,
            min: Bytes::ZERO,
            max: Bytes::ZERO,
            used: None,
            used_at: None,
            target: None,
            granted_at: Timestamp::START,
            expires_at: None,
            owner_uid: 1000,
            owner_pid: pid,
        }
    }

    /// Or a holder would answer for the memory of whoever asks by its name, and a holder's child that asks for a lease of
    /// its own would be nobody's while it waits.
    #[test]
    fn who_waits_for_a_lease_is_not_measured_for_it() {
        let tenant = |holder, state, pid| lease(holder, LeaseKind::Tenant, state, Some(pid));
        let leases = [
            lease("asr", LeaseKind::Worker, LeaseState::Granted, None),
            tenant("vision", LeaseState::Granted, 10),
            tenant("vision", LeaseState::Revoking, 10),
            lease("hidden", LeaseKind::Tenant, LeaseState::Granted, None),
            tenant("ghost", LeaseState::Gone, 12),
            tenant("vision", LeaseState::Requested, 11),
            tenant("x", LeaseState::Requested, 13),
        ];
        let expected = BTreeMap::from([("vision", vec![10]), ("hidden", Vec::new()), ("ghost", vec![12])]);
        assert_eq!(owners_of(&leases), expected);
    }

    #[test]
    fn a_process_that_has_ended_uses_nothing() {
        let root = ProbeRoot::default();
        let mut child = Command::new("sleep").arg("1000").stdout(Stdio::null()).spawn().unwrap();
        let pid = child.id();
        let none = BTreeSet::new();
        let measure = |pids: &[u32]| tenant_memory(&root, &ProcessTable::read(&root).unwrap(), pids, &none);
        // Our own children answer with us.
        assert_eq!(measure(&[pid]), None);
        assert_eq!(measure(&[]), None);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(measure(&[pid]), Some(Bytes::ZERO));
        // A process of somebody else that is there.
        assert!(measure(&[1]).is_some() || std::process::id() == 1);
        // One that is there and that this list does not show is hidden, not gone.
        assert_eq!(tenant_memory(&root, &ProcessTable::default(), &[1], &none), None);
    }

    #[test]
    fn a_child_that_holds_a_lease_answers_for_itself_and_not_its_parent() {
        // A tenant (100) with a child (101), one that is a tenant too (102) with a child of its own (103).
        let folder = tempfile::tempdir().unwrap();
        for (pid, parent, kib) in [(100, 1, 10), (101, 100, 20), (102, 100, 40), (103, 102, 80)] {
            let own = folder.path().join(format!("proc/{pid}"));
            std::fs::create_dir_all(&own).unwrap();
            let stat = format!("{pid} (tenant) S {parent} {pid} 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 {pid} 0 0");
            std::fs::write(own.join("stat"), stat).unwrap();
            let rollup = format!("00400000-7fff rollup\nRss: {kib} kB\nPss: {kib} kB\nSwapPss: 0 kB\n");
            std::fs::write(own.join("smaps_rollup"), rollup).unwrap();
        }
        let root = ProbeRoot::at(folder.path());
        let table = ProcessTable::read(&root).unwrap();
        let holders = BTreeSet::from([100, 102]);
        let measure = |pids: &[u32]| tenant_memory(&root, &table, pids, &holders);
        assert_eq!(measure(&[100]), Some(Bytes::from_kib(30)));
        assert_eq!(measure(&[102]), Some(Bytes::from_kib(120)));
        assert_eq!(
            measure(&[100, 102]),
            Some(Bytes::from_kib(150)),
            "one tenant with two leases"
        );
    }
}
