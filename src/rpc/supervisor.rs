//! Interface of the daemon for gRPC: arbiter, state, events.

use std::{
    collections::VecDeque,
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime},
};

use tokio::sync::{broadcast, oneshot, watch};

use super::{deaths::DeathLog, v1};
use cotenant_policy::{
    event::{Answer, ChangedKeys, Event, Origin},
    lease::{LeaseId, LeaseRequest, Ticket},
    snapshot::Snapshot,
};
use cotenant_units::{Bytes, Timestamp, lock::locked};

/// The daemon's interface for the services. No method blocks.
pub trait Supervisor: Send + Sync + 'static {
    /// Identifies this run of the daemon; leases and sequences of other runs are invalid in it.
    fn boot_id(&self) -> &str;

    /// Whether leases of that run are valid in this one: those of this run, and of earlier runs that were taken over.
    fn continues(&self, boot_id: &str) -> bool {
        boot_id == self.boot_id()
    }

    /// The current time, monotonic and by the wall clock.
    fn now(&self) -> (Timestamp, SystemTime);

    /// A unique ticket.
    fn ticket(&self) -> Ticket;

    /// Submits an event to the arbiter. The answer to `answer`'s ticket, if any, is sent to its channel; a caller that
    /// stops waiting drops the receiver.
    ///
    /// # Errors
    /// [`SubmitError::Full`] if the arbiter's inbox is full, [`SubmitError::Stopped`] if it has ended.
    fn submit(
        &self,
        event: Event,
        answer: Option<(Ticket, oneshot::Sender<Answer>)>,
    ) -> Result<(), SubmitError>;

    /// Reloads the configuration. The outcome is the changed keys, or the reason for no change.
    ///
    /// # Errors
    /// As for [`submit`](Self::submit).
    fn reload(
        &self,
        _by: Option<Origin>,
    ) -> Result<oneshot::Receiver<Result<ChangedKeys, String>>, SubmitError> {
        Err(SubmitError::Stopped)
    }

    /// The current state and its changes.
    fn snapshot(&self) -> watch::Receiver<Arc<Snapshot>>;

    /// Future notices for tenants.
    fn notices(&self) -> broadcast::Receiver<Notice>;

    /// The last lines of the journal.
    fn events(&self) -> &EventLog;

    /// The last death certificates of workers.
    fn deaths(&self) -> &DeathLog;

    /// Reason to refuse a lease regardless of memory, if any: only a worker may use its name, a process that is measured
    /// with a worker may use no other, and a control group must exist and have no process of ours.
    fn bar(&self, _request: &LeaseRequest) -> Option<Bar> {
        None
    }

    /// Sets values outside of the snapshot: locked memory, counters of the emergency reserve, the next shed, running
    /// answers, the engine's load, sequences and command gap, and the confinement of each worker.
    fn complete(&self, _status: &mut v1::GetStatusResponse) {}
}

/// Reason why a process or control group cannot have a lease with some name, regardless of free memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Bar {
    /// The name belongs to a worker that does not include the process.
    NotTheWorker {
        /// The worker's process, if running.
        runs_as: Option<u32>,
    },
    /// The process is measured with a worker: it would count twice with another lease.
    OfWorker {
        /// Its name.
        worker: String,
        /// Its process.
        runs_as: u32,
    },
    /// There is no such control group.
    NoCgroup {
        /// Mount point of the hierarchy; `None` if none has the memory controller.
        mount: Option<PathBuf>,
    },
    /// The control group has processes of the supervisor, or is that of a worker: they have leases of their own.
    OurCgroup {
        /// The worker; `None` for the supervisor itself.
        worker: Option<String>,
        /// Its process.
        runs_as: u32,
    },
}

/// An event could not be submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// The inbox is full.
    #[error("the inbox of the arbiter is full")]
    Full,
    /// The arbiter has ended.
    #[error("the arbiter has stopped")]
    Stopped,
}

/// A notice for the holder of a lease: the actions `SetTarget` and `EndLease`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// Shrink to a target.
    Target {
        /// Lease to shrink.
        lease: LeaseId,
        /// Identifies the target.
        nonce: u64,
        /// Bytes that the holder may keep.
        bytes: Bytes,
        /// Deadline.
        deadline: Timestamp,
        /// Reason, with figures.
        reason: String,
    },
    /// The lease has ended.
    Ended {
        /// The ended lease.
        lease: LeaseId,
        /// Reason, with figures.
        reason: String,
    },
}

impl Notice {
    /// The lease of the notice.
    #[must_use]
    pub const fn lease(&self) -> LeaseId {
        match self {
            Self::Target { lease, .. } | Self::Ended { lease, .. } => *lease,
        }
    }
}

/// The last lines of the journal in memory, for any number of readers at their own pace.
///
/// A reader costs nothing while it does not read: it keeps a number, and is given the number of missed lines. Lines are
/// stored without the run's `boot_id`, which is added when they are sent.
#[derive(Debug)]
pub struct EventLog {
    kept: Mutex<Kept>,
    last: watch::Sender<u64>,
    /// Number of the last line that was recorded, and of the last one that the journal's writer has passed on.
    recorded: AtomicU64,
    passed: watch::Sender<u64>,
    capacity: usize,
}

/// Result of [`EventLog::after`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    /// The lines, in order.
    pub records: Vec<Arc<v1::JournalEntry>>,
    /// Lines between the requested number and the first of `records` that were evicted.
    pub missed: u64,
}

/// The stored lines, and their start.
#[derive(Debug, Default)]
struct Kept {
    records: VecDeque<Arc<v1::JournalEntry>>,
    /// Bytes of their text.
    bytes: usize,
    /// Number of the last evicted line.
    gone_up_to: u64,
}

impl EventLog {
    /// An empty log of the last `capacity` lines, with at most 4 MiB of text.
    pub fn new(capacity: usize) -> Self {
        Self {
            kept: Mutex::default(),
            last: watch::Sender::new(0),
            recorded: AtomicU64::new(0),
            passed: watch::Sender::new(0),
            capacity: capacity.max(1),
        }
    }

    /// Notes the number of the last line recorded, which the journal's writer will pass on.
    pub fn note_recorded(&self, sequence: u64) {
        self.recorded.fetch_max(sequence, Ordering::Relaxed);
    }

    /// Notes that a line was passed on; if it is one for readers, it was added before.
    pub fn note_passed(&self, sequence: u64) {
        self.passed.send_replace(sequence);
    }

    /// Waits until all lines recorded so far are passed on, as long as `patience`: while a disk stalls, the journal's
    /// writer is behind.
    pub async fn catch_up(&self, patience: Duration) {
        let recorded = self.recorded.load(Ordering::Relaxed);
        let mut passed = self.passed.subscribe();
        let all = passed.wait_for(|passed| *passed >= recorded);
        // What is there is shown after that.
        let _in_time = tokio::time::timeout(patience, all).await.is_ok();
    }

    /// Adds a line; evicts the oldest ones above the bounds.
    pub fn push(&self, record: v1::JournalEntry) {
        let sequence = record.sequence;
        {
            let mut kept = locked(&self.kept);
            kept.bytes += text_bytes(&record);
            while kept.records.len() >= self.capacity || kept.bytes > BYTES_MAX {
                let Some(oldest) = kept.records.pop_front() else {
                    break;
                };
                kept.bytes -= text_bytes(&oldest);
                kept.gone_up_to = oldest.sequence;
            }
            kept.records.push_back(Arc::new(record));
        }
        self.last.send_replace(sequence);
    }

    /// At most `limit` lines after number `sequence`.
    pub fn after(&self, sequence: u64, limit: usize) -> Page {
        let kept = locked(&self.kept);
        let begin = kept
            .records
            .partition_point(|record| record.sequence <= sequence);
        Page {
            records: kept
                .records
                .iter()
                .skip(begin)
                .take(limit)
                .cloned()
                .collect(),
            // Numbers without a line, such as those of samples, are not missed.
            missed: kept.gone_up_to.saturating_sub(sequence),
        }
    }

    /// The number of the last line, and its changes.
    #[must_use]
    pub fn last_sequence(&self) -> watch::Receiver<u64> {
        self.last.subscribe()
    }
}

const fn text_bytes(record: &v1::JournalEntry) -> usize {
    record.name.len() + record.summary.len() + record.body_json.len()
}

/// Maximum text of all lines: a line has some 500 bytes, one with a whole ledger of leases some 100 KiB.
const BYTES_MAX: usize = 4 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_make_place_for_each_other() {
        let log = EventLog::new(1000);
        for sequence in 1..=100 {
            log.push(v1::JournalEntry {
                body_json: "x".repeat(100 << 10),
                ..record(sequence)
            });
        }
        let page = log.after(0, 1000);
        assert!(
            (30..=40).contains(&page.records.len()),
            "{}",
            page.records.len()
        );
        assert_eq!(page.missed, 100 - page.records.len() as u64);
        // A line larger than the bound is stored alone.
        log.push(v1::JournalEntry {
            body_json: "x".repeat(5 << 20),
            ..record(101)
        });
        assert_eq!(log.after(0, 1000).records.len(), 1);
        log.push(record(102));
        assert_eq!(log.after(0, 1000).records.len(), 1);
    }

    fn record(sequence: u64) -> v1::JournalEntry {
        v1::JournalEntry {
            sequence,
            name: "drain_requested".into(),
            body_json: "{}".into(),
            ..v1::JournalEntry::default()
        }
    }

    #[test]
    fn a_reader_is_reported_how_many_lines_it_has_missed() {
        let log = EventLog::new(3);
        for sequence in 1..=5 {
            log.push(record(sequence));
        }
        let page = log.after(1, 10);
        assert_eq!(page.missed, 1);
        assert_eq!(
            page.records.iter().map(|r| r.sequence).collect::<Vec<_>>(),
            [3, 4, 5]
        );
        assert_eq!(log.after(4, 10).missed, 0);
        assert!(log.after(5, 10).records.is_empty());
        assert_eq!(*log.last_sequence().borrow(), 5);
    }

    #[tokio::test]
    async fn a_reader_waits_for_lines_that_are_recorded_and_not_passed_on_yet() {
        let patience = Duration::from_secs(60);
        let log = Arc::new(EventLog::new(3));
        // Nothing is recorded.
        log.catch_up(patience).await;
        log.note_recorded(2);
        let theirs = Arc::clone(&log);
        let reader = tokio::spawn(async move {
            theirs.catch_up(patience).await;
            theirs.after(0, 10).records.len()
        });
        tokio::task::yield_now().await;
        log.push(record(1));
        log.note_passed(1);
        tokio::task::yield_now().await;
        assert!(!reader.is_finished());
        // The second is no line for readers.
        log.note_passed(2);
        assert_eq!(reader.await.unwrap(), 1);
        // A writer that does not go on is not waited for longer than that.
        log.note_recorded(3);
        log.catch_up(Duration::from_millis(1)).await;
    }

    #[test]
    fn numbers_that_were_never_here_are_not_missed() {
        let log = EventLog::new(2);
        log.push(record(3));
        log.push(record(9));
        assert_eq!(log.after(0, 10).missed, 0);
        assert_eq!(log.after(4, 10).missed, 0);
        log.push(record(12));
        assert_eq!(log.after(4, 10).missed, 0);
        assert_eq!(log.after(1, 10).missed, 2);
    }

    #[test]
    fn a_page_has_a_bound() {
        let log = EventLog::new(100);
        for sequence in 1..=50 {
            log.push(record(sequence));
        }
        assert_eq!(log.after(0, 8).records.len(), 8);
    }
}
