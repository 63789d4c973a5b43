//! Reports on a worker: events while it runs, and a report of its end.

use std::{
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use cotenant_policy::death::DeathCertificate;
use cotenant_probe::processes::MemorySum;
use cotenant_units::Bytes;

/// Event of a worker.
#[derive(Clone, Debug)]
pub struct WorkerEvent {
    /// Its name.
    pub worker: Arc<str>,
    /// Number of its start, from 1; events of an earlier start may arrive after the next one began.
    pub start: u64,
    /// Kind of event.
    pub kind: WorkerEventKind,
}

/// Kind of an event.
#[derive(Clone, Debug)]
pub enum WorkerEventKind {
    /// The process runs.
    Starting {
        /// Its process id, also the id of its group.
        pid: u32,
    },
    /// It is ready.
    Ready {
        /// Time since the start.
        took: Duration,
    },
    /// It could not be started, or is being stopped because it did not become ready; [`Exited`](Self::Exited) follows
    /// in the latter case.
    Failed {
        /// The reason.
        reason: FailureReason,
    },
    /// Cause of its death, or of a failed start: known before its group is gone, and always followed by
    /// [`Exited`](Self::Exited) or preceded by [`Failed`](Self::Failed).
    Died(Box<DeathCertificate>),
    /// It has ended, with every process of its group.
    Exited(ExitReport),
    /// Its memory, on request.
    Measured(MemoryReading),
}

/// Reason why a worker did not start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FailureReason {
    /// The program could not be executed, or its command line not be built.
    NotStarted {
        /// The error with its causes.
        error: String,
    },
    /// It ran, but did not show readiness.
    NotReady {
        /// Length of the wait.
        waited: Duration,
        /// Error of the last attempt, if there was one.
        last_attempt: Option<String>,
    },
}

/// End of a worker.
#[derive(Clone, Debug)]
pub struct ExitReport {
    /// Its name.
    pub worker: Arc<str>,
    /// Its process id.
    pub pid: u32,
    /// Exit status from `waitid`.
    pub status: ExitStatus,
    /// Our intent, if we requested the end before; `None` if it ended by itself or was killed by another process.
    pub intended_by_us: Option<Intent>,
    /// Time at which it became ready, if ever.
    pub ready_at: Option<Instant>,
    /// The sentence of its death certificate.
    pub sentence: String,
    /// Last lines of stderr, oldest first.
    pub stderr: Vec<String>,
    /// Last lines of stdout, oldest first.
    pub stdout: Vec<String>,
    /// Number of leftover processes that had to be killed.
    pub left_behind: usize,
}

impl fmt::Display for ExitReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.sentence)
    }
}

/// Exit status of a process.
///
/// A code of 137 is an exit code, not a signal, and neither proves that memory ran out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExitStatus {
    /// It exited with this code.
    Code(i32),
    /// A signal ended it.
    Signal {
        /// Number of the signal.
        signal: i32,
        /// Whether the kernel wrote a core file.
        core_dumped: bool,
    },
    /// The kernel did not report it.
    Unknown,
}

/// The supervisor's intent when a worker ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Intent {
    /// [`stop_because`](super::handle::WorkerHandle::stop_because): SIGTERM, then SIGKILL after the grace.
    Stop,
    /// [`end_hung`](super::handle::WorkerHandle::end_hung): SIGABRT, so that it can report its state, then SIGKILL
    /// after the grace.
    Hung,
    /// It did not become ready in time and was stopped.
    NotReady,
    /// The supervisor's handle was dropped.
    Abandoned,
}

impl fmt::Display for Intent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Stop => "after the supervisor stopped it",
            Self::Hung => "after the supervisor killed it as hung",
            Self::NotReady => "after the supervisor stopped it as not ready",
            Self::Abandoned => "as the supervisor released it",
        })
    }
}

/// Returns `SIGKILL` for 9, and so on; `signal 35` for those without a name.
pub fn signal_name(signal: i32) -> String {
    nix::sys::signal::Signal::try_from(signal)
        .map_or_else(|_| format!("signal {signal}"), |known| known.to_string())
}

/// Memory of a worker's processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryReading {
    /// Memory of the process, its descendants, and the members of its group.
    pub sum: MemorySum,
    /// Memory charged to the worker's control group, unless it is also the supervisor's.
    pub cgroup: Option<Bytes>,
    /// nvmap memory of its processes on a Jetson, if readable.
    pub gpu: Option<Bytes>,
}

impl MemoryReading {
    /// Returns its memory, including GPU memory.
    ///
    /// GPU pages mapped by the processor are in both sums. With GPU memory, the first sum is therefore limited to the
    /// charge of the control group, which excludes them.
    pub fn used(&self) -> Bytes {
        match self.gpu {
            Some(gpu) => self
                .cgroup
                .unwrap_or(Bytes::MAX)
                .min(self.sum.used)
                .saturating_add(gpu),
            None => self.sum.used,
        }
    }

    /// Returns its peak memory as recorded by the kernel, at least its present memory; GPU memory has no recorded peak.
    pub fn peak(&self) -> Option<Bytes> {
        let peak = self.sum.peak?;
        Some(self.gpu.map_or(peak, |_| peak.max(self.used())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Figures of a board: resident with and without processor-mapped GPU pages, charged to the control group, and
    /// counted by nvmap.
    #[test]
    fn gpu_memory_counts_once_whether_it_is_mapped_or_not() {
        let mib = Bytes::from_mib;
        let reading = |resident, cgroup: Option<u64>, gpu: Option<u64>| MemoryReading {
            sum: MemorySum {
                used: mib(resident),
                peak: Some(mib(resident + 100)),
                ..MemorySum::default()
            },
            cgroup: cgroup.map(mib),
            gpu: gpu.map(mib),
        };
        let (mapped, apart) = (
            reading(7629, Some(3935), Some(2909)),
            reading(1907, Some(1828), Some(710)),
        );
        assert_eq!((mapped.used(), mapped.peak()), (mib(6844), Some(mib(7729))));
        assert_eq!((apart.used(), apart.peak()), (mib(2538), Some(mib(2538))));
        assert_eq!(
            reading(500, Some(100), None).used(),
            mib(500),
            "the share of a library that others have read"
        );
        assert_eq!(reading(500, None, Some(20)).used(), mib(520));
        assert_eq!(reading(500, None, None).peak(), Some(mib(600)));
    }
}
