//! Death certificate of a worker's process: class, confidence, evidence.
//!
//! Plain values that go into the journal.
#![expect(missing_docs, reason = "fields are named by what they hold")]

use std::fmt;

use serde::{Deserialize, Serialize};

use cotenant_units::Bytes;

/// One end of one worker.
///
/// It is written once and never changed. A field that is absent was not known; zero is a value.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DeathCertificate {
    pub worker: String,
    /// Which of its starts, from 1.
    pub start: u64,
    /// Its process; absent when there never was one.
    pub pid: Option<u32>,
    /// What it died of, and how that is known.
    #[serde(flatten)]
    pub verdict: DeathVerdict,
    /// How its process ended, and when.
    #[serde(flatten)]
    pub end: ProcessEnd,
    /// Its memory.
    #[serde(flatten)]
    pub memory: DeathMemory,
    /// How far it had come loading, as it said itself.
    pub load_progress: Option<String>,
    /// Its last lines, oldest first: stderr where there was any, else stdout.
    pub last_lines: Vec<String>,
    /// From seeing its end to this certificate, µs.
    pub took_us: u64,
}

/// What a process died of, and how that is known.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DeathVerdict {
    pub class: DeathClass,
    pub confidence: Confidence,
    /// The end in one sentence.
    pub sentence: String,
    /// What says so, the strongest first.
    pub evidence: Vec<Finding>,
    pub remedy: Option<String>,
    /// Started again as it is, it would end in the same way; an operator has to change something first.
    pub needs_operator: bool,
}

/// How a process ended, and when.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ProcessEnd {
    pub exit_code: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<i32>,
    pub core_dumped: bool,
    /// What we had asked of it, and why.
    pub asked: Option<String>,
    /// When it ended, µs since 1970.
    pub ended_unix_us: u64,
    /// From its start to its end, ms.
    pub lived_ms: u64,
    /// From its start to being ready, ms; absent when it never was, and where an earlier run of the supervisor started it.
    pub ready_after_ms: Option<u64>,
}

/// Memory of a process that has ended.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DeathMemory {
    /// Most that its main process held resident, as the kernel counted to its end.
    pub peak_resident: Option<Bytes>,
    /// Last measurements of its whole tree, oldest first.
    pub history: Vec<MemoryPoint>,
    /// The lease at its end.
    pub lease: Option<LeaseAtDeath>,
    /// Limits that were in force.
    pub limits: Vec<String>,
}

impl fmt::Display for DeathCertificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.verdict.sentence)
    }
}

/// The part of a certificate that decides what follows, and that is shown with the worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeathSummary {
    pub class: DeathClass,
    /// Whether an operator has to change something before it can run.
    pub needs_operator: bool,
    pub remedy: Option<String>,
}

impl DeathCertificate {
    /// The part of it that decides what follows.
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
        /// What a process died of. Alphabetical; the order means nothing.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
        pub enum DeathClass {
            $($(#[$attribute])* #[serde(rename = $name)] $class,)+
        }

        impl DeathClass {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$class),+];

            /// Its name in the journal, in metrics and on the wire: `memcg_oom`.
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
    /// It gave itself up: a failed assertion, an uncaught exception, a corrupt heap.
    Abort = "abort",
    /// An allocation was refused while the machine had memory, or the kernel killed no process for it.
    AllocationFailed = "allocation_failed",
    /// SIGBUS: a page of a mapped file could not be had.
    BusError = "bus_error",
    /// It had used up its processor time.
    CpuTimeLimit = "cpu_time_limit",
    /// The CUDA runtime and the driver do not fit each other.
    CudaMismatch = "cuda_mismatch",
    /// There never was a process: the program could not be executed.
    ExecFailed = "exec_failed",
    /// It returned a code other than zero. 137 is such a code.
    ExitCode = "exit_code",
    /// The kernel killed it since the machine had no memory left.
    GlobalOom = "global_oom",
    /// It lived and made no progress; we ended it.
    Hang = "hang",
    /// SIGILL: an instruction that this processor does not have, or a trap.
    IllegalInstruction = "illegal_instruction",
    /// We ended it.
    KilledByUs = "killed_by_us",
    /// A signal ended it that neither we nor, as far as can be seen, the kernel's killer sent.
    KilledExternally = "killed_externally",
    /// The kernel killed it since its control group had no memory left.
    MemcgOom = "memcg_oom",
    /// A shared library is missing or does not fit.
    MissingLibrary = "missing_library",
    /// Any other signal.
    OtherSignal = "other_signal",
    /// A resource limit of its own refused it memory.
    RlimitMemory = "rlimit_memory",
    /// SIGSYS: a system call that its sandbox forbids.
    SeccompViolation = "seccomp_violation",
    /// SIGSEGV.
    SegmentationFault = "segmentation_fault",
    /// It returned zero without having been asked to end.
    SilentExit = "silent_exit",
    /// There never was a process: the system had none to give, or no file or memory for it.
    SpawnFailed = "spawn_failed",
    /// It was not ready in time; we ended it.
    StartTimeout = "start_timeout",
    /// The kernel did not say how it ended.
    #[default]
    Unknown = "unknown",
}

impl fmt::Display for DeathClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How sure a class is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Confidence {
    /// It is the best explanation of little.
    #[default]
    Low,
    /// Something may be missing that would say otherwise.
    Likely,
    /// The kernel, or we ourselves, say so.
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

/// One thing that was found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Finding {
    /// Where: `waitid`, `kernel log`, `counters`, `stderr`, `limits`, `memory`, `supervisor`.
    pub source: String,
    /// What, in words or as it was read.
    pub text: String,
}

impl Finding {
    /// What was found where.
    #[must_use]
    pub fn new(source: &str, text: impl Into<String>) -> Self {
        Self {
            source: source.to_owned(),
            text: text.into(),
        }
    }
}

/// A measurement in the life of a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct MemoryPoint {
    /// Time before its end, ms.
    pub before_end_ms: u64,
    /// What its tree used.
    pub used: Bytes,
    /// `MemAvailable` of the machine at that time.
    pub available: Option<Bytes>,
}

/// The lease that the worker held when it died.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LeaseAtDeath {
    /// What was held for it.
    pub held: Bytes,
    /// The least that it holds.
    pub min: Bytes,
    /// The most that it may hold.
    pub max: Bytes,
    /// Budget that was free.
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
