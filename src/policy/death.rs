//! Death certificate of a worker's process: class, confidence, evidence.
#![expect(missing_docs, reason = "fields are named by what they hold")]

use std::fmt;

use serde::{Deserialize, Serialize};

use cotenant_units::Bytes;

/// The end of one process of a worker.
///
/// Written once and never changed. An absent field is unknown; zero is a value.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DeathCertificate {
    pub worker: String,
    /// Number of its start, from 1.
    pub start: u64,
    /// Its process; absent if none was created.
    pub pid: Option<u32>,
    /// Cause of death and evidence.
    #[serde(flatten)]
    pub verdict: DeathVerdict,
    /// Exit status and time.
    #[serde(flatten)]
    pub end: ProcessEnd,
    /// Memory use and limits.
    #[serde(flatten)]
    pub memory: DeathMemory,
    /// Loading progress reported by the worker.
    pub load_progress: Option<String>,
    /// Its last lines, oldest first: stderr if there was any, otherwise stdout.
    pub last_lines: Vec<String>,
    /// Time from the detection of its end to this certificate, µs.
    pub took_us: u64,
}

/// Cause of death of a process, and the evidence.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DeathVerdict {
    pub class: DeathClass,
    pub confidence: Confidence,
    /// The cause in one sentence.
    pub sentence: String,
    /// Evidence, the strongest first.
    pub evidence: Vec<Finding>,
    pub remedy: Option<String>,
    /// Whether a restart without a change would end in the same way, so that an operator has to act first.
    pub needs_operator: bool,
}

/// Exit status and time of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ProcessEnd {
    pub exit_code: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<i32>,
    pub core_dumped: bool,
    /// Request by the supervisor that preceded the end, with its reason.
    pub asked: Option<String>,
    /// Time of the end, µs since 1970.
    pub ended_unix_us: u64,
    /// Lifetime, ms.
    pub lived_ms: u64,
    /// Time from its start to being ready, ms; absent if it never was, or if an earlier run of the supervisor started
    /// it.
    pub ready_after_ms: Option<u64>,
}

/// Memory of a process that has ended.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DeathMemory {
    /// Peak resident memory of its main process, from the kernel.
    pub peak_resident: Option<Bytes>,
    /// Last measurements of its process tree, oldest first.
    pub history: Vec<MemoryPoint>,
    /// The lease at its end.
    pub lease: Option<LeaseAtDeath>,
    /// Limits in force.
    pub limits: Vec<String>,
}

impl fmt::Display for DeathCertificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.verdict.sentence)
    }
}

/// The part of a certificate that determines the next step, shown with the worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeathSummary {
    pub class: DeathClass,
    /// Whether an operator has to change something before it can run.
    pub needs_operator: bool,
    pub remedy: Option<String>,
}

impl DeathCertificate {
    /// Returns the part that determines the next step.
    #[must_use]
    pub fn summary(&self) -> DeathSummary {
        DeathSummary {
            class: self.verdict.class,
            needs_operator: self.verdict.needs_operator,
            remedy: self.verdict.remedy.clone(),
        }
    }
}

/// Declares the classes with their names in the journal, in metrics and on the wire.
macro_rules! classes {
    ($($(#[$attribute:meta])* $class:ident = $name:literal,)+) => {
        /// Cause of death of a process. Alphabetical; the order has no meaning.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
        pub enum DeathClass {
            $($(#[$attribute])* #[serde(rename = $name)] $class,)+
        }

        impl DeathClass {
            /// All classes.
            pub const ALL: &[Self] = &[$(Self::$class),+];

            /// Returns its name in the journal, in metrics and on the wire: `memcg_oom`.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$class => $name,)+
                }
            }
        }
    };
}

classes! {
    /// It aborted: a failed assertion, an uncaught exception, a corrupt heap.
    Abort = "abort",
    /// An allocation failed while the machine had memory, or without an OOM kill.
    AllocationFailed = "allocation_failed",
    /// SIGBUS: a page of a mapped file was not available.
    BusError = "bus_error",
    /// It exceeded its limit of CPU time.
    CpuTimeLimit = "cpu_time_limit",
    /// The CUDA runtime and the driver are incompatible.
    CudaMismatch = "cuda_mismatch",
    /// No process: the program could not be executed.
    ExecFailed = "exec_failed",
    /// It returned a non-zero exit code; 137 is also one.
    ExitCode = "exit_code",
    /// The kernel killed it because the machine was out of memory.
    GlobalOom = "global_oom",
    /// It made no progress and was ended by the supervisor.
    Hang = "hang",
    /// SIGILL: an instruction not supported by this processor, or a trap.
    IllegalInstruction = "illegal_instruction",
    /// The supervisor ended it.
    KilledByUs = "killed_by_us",
    /// A signal that was sent neither by the supervisor nor, as far as can be determined, by the OOM killer.
    KilledExternally = "killed_externally",
    /// The kernel killed it because its control group was out of memory.
    MemcgOom = "memcg_oom",
    /// A shared library is missing or incompatible.
    MissingLibrary = "missing_library",
    /// Any other signal.
    OtherSignal = "other_signal",
    /// A resource limit refused it memory.
    RlimitMemory = "rlimit_memory",
    /// SIGSYS: a system call forbidden by its sandbox.
    SeccompViolation = "seccomp_violation",
    /// SIGSEGV.
    SegmentationFault = "segmentation_fault",
    /// It returned zero without being asked to stop.
    SilentExit = "silent_exit",
    /// No process: the system had no process, file or memory available for it.
    SpawnFailed = "spawn_failed",
    /// It was not ready in time and was ended by the supervisor.
    StartTimeout = "start_timeout",
    /// The kernel did not report how it ended.
    #[default]
    Unknown = "unknown",
}

impl fmt::Display for DeathClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Confidence in a class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Confidence {
    /// The best explanation from little evidence.
    #[default]
    Low,
    /// Contrary evidence may be missing.
    Likely,
    /// Reported by the kernel or by the supervisor itself.
    Certain,
}

impl fmt::Display for Confidence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Low => "low",
            Self::Likely => "likely",
            Self::Certain => "certain",
        })
    }
}

/// One piece of evidence.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Finding {
    /// Its source: `waitid`, `kernel log`, `counters`, `stderr`, `limits`, `memory`, `supervisor`.
    pub source: String,
    /// The finding, in words or as read.
    pub text: String,
}

impl Finding {
    /// Creates a finding.
    #[must_use]
    pub fn new(source: &str, text: impl Into<String>) -> Self {
        Self {
            source: source.to_owned(),
            text: text.into(),
        }
    }
}

/// A measurement during the life of a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct MemoryPoint {
    /// Time before its end, ms.
    pub before_end_ms: u64,
    /// Memory of its process tree.
    pub used: Bytes,
    /// `MemAvailable` of the machine at that time.
    pub available: Option<Bytes>,
}

/// The lease of a worker at its death.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LeaseAtDeath {
    /// Bytes held.
    pub held: Bytes,
    /// Minimum of the lease.
    pub min: Bytes,
    /// Maximum of the lease.
    pub max: Bytes,
    /// Free bytes of the budget.
    pub free: Bytes,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_with_unknown_and_missing_fields_is_read() {
        let read: DeathCertificate =
            serde_json::from_str(r#"{"worker":"asr","class":"memcg_oom","later":1}"#).unwrap();
        assert_eq!(
            (read.worker.as_str(), read.verdict.class),
            ("asr", DeathClass::MemcgOom)
        );
        assert_eq!(read.verdict.confidence, Confidence::Low);
    }
}
