//! Autopsy of a worker: evidence, decision, certificate.
//!
//! ```text
//!  before the start          at the end, before the process is reaped                then
//!  counters, kernel log ──►  counters, kernel log, usage, limits, last lines ──► decide() ──► DeathCertificate
//! ```
//!
//! [`collect`] performs all reads, [`decide`] none. An autopsy takes a few milliseconds, at most [`GATHER_MAX`] plus
//! [`LINES_MAX`]: evidence not read by then is reported as unknown.

#[cfg(test)]
mod captures;
mod collect;
mod decide;
mod evidence;
mod exec;
mod kernel_log;
mod progress;
mod words;

use std::{
    collections::{BTreeMap, VecDeque},
    os::fd::OwnedFd,
    path::PathBuf,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use self::{
    collect::Questions,
    evidence::{Asked, Evidence, Gathered, RECENT},
    exec::unix_us,
    words::Said,
};
use super::{
    log::LogLine,
    report::{ExitStatus, Intent},
};
use cotenant_policy::death::{DeathCertificate, DeathMemory, MemoryPoint, ProcessEnd};
use cotenant_threads::blocking;
use cotenant_units::{Bytes, micros, millis};

pub(super) use self::{
    collect::{Life, available, other_versions, unfit},
    exec::{find_program, interpreter, not_started},
};

/// Process that has ended and is not reaped yet.
#[derive(Debug)]
pub(super) struct Case {
    pub(super) worker: String,
    pub(super) start: u64,
    pub(super) pid: u32,
    pub(super) pidfd: Option<OwnedFd>,
    pub(super) status: ExitStatus,
    pub(super) intent: Option<Intent>,
    pub(super) why: String,
    pub(super) killed: bool,
    pub(super) life: Option<Life>,
    pub(super) history: History,
    pub(super) stderr: Vec<LogLine>,
    pub(super) stdout: Vec<LogLine>,
    pub(super) program: String,
    pub(super) env: BTreeMap<String, String>,
    pub(super) started_at: Instant,
    pub(super) ready_at: Option<Instant>,
    /// Whether readiness was observed. A worker that counts as ready on start shows no sign of it.
    pub(super) was_ready: bool,
    pub(super) exited_at: Instant,
}

pub(super) async fn certify(case: Case) -> DeathCertificate {
    let Case {
        pid,
        pidfd,
        life,
        status,
        ..
    } = case;
    // Messages of the program itself are on stderr; stdout may be anything, such as transcripts.
    let lines = if case.stderr.is_empty() {
        case.stdout
    } else {
        case.stderr
    };
    let recent = lines
        .iter()
        .filter(|line| case.exited_at.saturating_duration_since(line.at) <= RECENT)
        .count();
    let lines: Vec<String> = lines.into_iter().map(|line| line.text).collect();
    let lived = case.exited_at.saturating_duration_since(case.started_at);
    let questions = Questions {
        killers: matches!(
            status,
            ExitStatus::Signal {
                signal: libc::SIGKILL | libc::SIGTERM,
                ..
            }
        ) && case.intent.is_none(),
        library: missing_library(&lines).map(|library| (library, library_folders(&case.env))),
        program: (lived < PROGRAM_DOUBT && matches!(status, ExitStatus::Code(2 | 126 | 127)))
            .then(|| find_program(&case.program, &case.env))
            .flatten(),
    };
    let found = Arc::new(Mutex::new(Gathered {
        log: kernel_log::KernelLogTail {
            unreadable: Some(format!("not read within {} ms", GATHER_MAX.as_millis())),
            ..kernel_log::KernelLogTail::default()
        },
        ..Gathered::default()
    }));
    if let Some(life) = life {
        let found = Arc::clone(&found);
        let gathering = blocking(move || {
            life.gather(pid, pidfd.as_ref(), &questions, &found);
        });
        // On a timeout, missing evidence stays unknown.
        let _ = tokio::time::timeout(GATHER_MAX, gathering).await;
    }
    let mut gathered = std::mem::take(&mut *collect::held(&found));
    let measured = case.history.points.iter().map(|point| point.used).max();
    gathered.peak_resident = gathered.peak_resident.or(measured);
    let alive = case.history.points.back().and_then(|point| point.available);
    let evidence = Evidence {
        worker: case.worker.clone(),
        pid,
        status,
        asked: case.intent.map(|intent| Asked {
            intent,
            why: case.why,
            killed: case.killed,
        }),
        available: alive.or(gathered.available_before).or(gathered.available),
        lived,
        was_ready: case.was_ready,
        lines,
        recent,
        found: gathered,
    };
    let verdict = decide::decide(&evidence);
    let mut limits = evidence.found.limits.lines();
    if let Some((group, limit)) = evidence
        .group()
        .and_then(|group| Some((group, group.limit?)))
    {
        limits.push(format!("Memory of group `{}`: {limit}", group.path));
    }
    let (exit_code, signal, core_dumped) = match status {
        ExitStatus::Code(code) => (Some(code), None, false),
        ExitStatus::Signal {
            signal,
            core_dumped,
        } => (None, Some(signal), core_dumped),
        ExitStatus::Unknown => (None, None, false),
    };
    let last_lines = evidence.lines.len().saturating_sub(LAST_LINES);
    DeathCertificate {
        worker: case.worker,
        start: case.start,
        pid: Some(pid),
        load_progress: progress::load_progress(evidence.lines.iter().map(String::as_str)),
        last_lines: evidence
            .lines
            .iter()
            .skip(last_lines)
            .map(|line| words::shortened(line))
            .collect(),
        took_us: micros(case.exited_at.elapsed()),
        verdict,
        end: ProcessEnd {
            exit_code,
            signal,
            core_dumped,
            asked: evidence.asked.map(|asked| match asked.why.is_empty() {
                true => asked.intent.to_string(),
                false => format!("{}: {}", asked.intent, asked.why),
            }),
            ended_unix_us: unix_us(),
            lived_ms: millis(lived),
            ready_after_ms: case
                .ready_at
                .map(|at| millis(at.saturating_duration_since(case.started_at))),
        },
        memory: DeathMemory {
            peak_resident: evidence.found.peak_resident,
            history: case.history.before(case.exited_at),
            lease: None,
            limits,
        },
    }
}

/// Latest measurements of one process.
#[derive(Clone, Debug, Default)]
pub(super) struct History {
    points: VecDeque<Point>,
}

#[derive(Clone, Copy, Debug)]
struct Point {
    at: Instant,
    used: Bytes,
    available: Option<Bytes>,
}

impl History {
    /// Adds the memory of its process tree, and the machine's available memory at that time.
    pub(super) fn push(&mut self, used: Bytes, available: Option<Bytes>) {
        if self.points.len() >= HISTORY {
            self.points.pop_front();
        }
        self.points.push_back(Point {
            at: Instant::now(),
            used,
            available,
        });
    }

    fn before(&self, end: Instant) -> Vec<MemoryPoint> {
        self.points
            .iter()
            .map(|point| MemoryPoint {
                before_end_ms: millis(end.saturating_duration_since(point.at)),
                used: point.used,
                available: point.available,
            })
            .collect()
    }
}

fn missing_library(lines: &[String]) -> Option<String> {
    words::quotes(lines)
        .into_iter()
        .find_map(|quote| match quote.said {
            Said::MissingLibrary { library } => Some(library),
            _ => None,
        })
}

/// Returns folders of CUDA libraries: the worker's own path, and those of distributions and JetPack.
pub(super) fn library_folders(env: &BTreeMap<String, String>) -> Vec<PathBuf> {
    let own = env
        .get("LD_LIBRARY_PATH")
        .cloned()
        .or_else(|| std::env::var("LD_LIBRARY_PATH").ok())
        .unwrap_or_default();
    let own = own
        .split(':')
        .filter(|part| !part.is_empty())
        .map(PathBuf::from);
    own.chain(LIBRARY_FOLDERS.iter().map(PathBuf::from))
        .collect()
}

/// Default library folders, those of CUDA first.
const LIBRARY_FOLDERS: [&str; 9] = [
    "/usr/local/cuda/lib64",
    "/usr/local/cuda/targets/aarch64-linux/lib",
    "/usr/local/cuda/targets/x86_64-linux/lib",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu/nvidia",
    "/usr/local/lib",
    "/usr/lib64",
    "/usr/lib",
];

/// Time limit for reading the machine's state; under thrashing even `/proc` is slow.
const GATHER_MAX: Duration = Duration::from_millis(100);

/// Time limit for reading the last lines, if a child of the worker holds the pipe open.
pub(super) const LINES_MAX: Duration = Duration::from_millis(50);

/// Measurements kept: half a minute at the daemon's interval.
const HISTORY: usize = 32;

const LAST_LINES: usize = 20;

/// Runtime below which an exit with a shell's code (2 syntax, 126 not executable, 127 not found) may mean that the file
/// is not a program: execvp(3) passes files that the kernel does not execute to a shell.
const PROGRAM_DOUBT: Duration = Duration::from_secs(5);
