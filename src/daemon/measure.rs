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

use tokio::sync::OnceCell;

use super::{
    control_handle::ControlHandle,
    control_loop::Clock as _,
    engine::{CurrentEngine, activity},
    parts::Parts,
    tenants::{Claims, Processes, tenant_memory},
};
use cotenant_policy::{event::Event, lease::LeaseView, params::ENGINE_TENANT};
use cotenant_probe::{ProbeRoot, nvmap};
use cotenant_telemetry::Metrics;
use cotenant_threads::blocking;
use cotenant_units::{Bytes, Timestamp, lock::locked};
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

/// List of the machine's processes, read once for all holders of a request: with many tenants, it dominates the cost.
#[derive(Clone, Default)]
struct Listing(Arc<OnceCell<Option<Arc<Processes>>>>);

impl Listing {
    async fn processes(&self, root: &ProbeRoot, leases: &[LeaseView]) -> Option<Arc<Processes>> {
        let (root, groups) = (root.clone(), Claims::of(leases).groups());
        let list = || async {
            let read = blocking(move || Processes::read(&root, groups));
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
        let before = self.control.state();
        let processes = listing.processes(&self.root, &before.leases).await?;
        // A lease granted meanwhile counts.
        let state = self.control.state();
        let is_lost = |lease: &&LeaseView| lease.holder() == tenant && processes.has_lost(lease);
        for lease in state.leases.iter().filter(is_lost).map(|lease| lease.id) {
            let pid = None;
            self.control.tell(Event::HolderLost { lease, pid }).await;
        }
        let (root, tenant) = (self.root.clone(), tenant.to_owned());
        let read =
            blocking(move || tenant_memory(&root, &processes, &Claims::of(&state.leases), &tenant));
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::MonotonicClock;

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
}
