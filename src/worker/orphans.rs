//! Leftover processes of workers.

use std::{collections::BTreeSet, path::Path, time::Duration};

use super::{
    adopt::{LAUNCH_VARIABLE, LaunchRecord, Survivor},
    confine::Groups,
    descent,
    mark::{SUPERVISOR_VARIABLE, SupervisorMark, WORKER_VARIABLE},
    process::UnmanagedProcess,
};
use cotenant_probe::{
    ProbeRoot,
    processes::{self, ProcessStat, ProcessTable},
};

/// A process that was ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Orphan {
    /// Its process id.
    pub pid: u32,
    /// The worker it belonged to.
    pub worker: String,
    /// Whether it has ended; a process in an uninterruptible wait takes longer.
    pub ended: bool,
}

/// Id and start of a process, which together name one.
pub(super) type Known = (u32, u64);

/// Processes and group of one launch of a worker.
pub(super) struct Launched<'a> {
    /// The worker's own process, which has ended and is not reaped.
    pub(super) leader: u32,
    /// When the leader was started, in clock ticks since boot.
    pub(super) since: u64,
    pub(super) supervisor: &'a SupervisorMark,
    /// Name of the worker and number of the launch.
    pub(super) label: &'a str,
    /// Processes that were seen below the leader or in its control group.
    pub(super) seen: BTreeSet<Known>,
}

/// Ends the workers of supervisors that no longer run; to be called before the first worker is started.
///
/// Without a successor a worker gets SIGKILL from the kernel when its supervisor dies, but its own children do not.
/// Only processes that carry a mark of a supervisor of this process namespace are ended, with their descendants and the
/// processes in their control groups; none of a supervisor that runs beside us, and none that is left to successors in
/// another place than `place`. `spared` are taken over, with their children.
pub async fn end_orphans(
    roots: &ProbeRoot,
    groups: &Groups,
    place: Option<&str>,
    spared: &[Survivor],
) -> Vec<Orphan> {
    let proc = &roots.proc;
    let claim = |pid: u32| {
        let mark =
            processes::environment(proc, pid, SUPERVISOR_VARIABLE)?.parse::<SupervisorMark>();
        let Ok(mark) = mark else { return None };
        let worker = processes::environment(proc, pid, WORKER_VARIABLE).unwrap_or_default();
        let record = processes::environment(proc, pid, LAUNCH_VARIABLE);
        let record = record.and_then(|text| serde_json::from_str::<LaunchRecord>(&text).ok());
        let kept = mark.may_run(proc)
            || record.is_some_and(|record| place != Some(record.place.as_str()))
            || spared
                .iter()
                .any(|spared| spared.mark == mark && spared.label == worker);
        Some(if kept {
            Claim::Kept
        } else {
            Claim::Left(worker.split(' ').next().unwrap_or_default().to_owned())
        })
    };
    // A group of a supervisor that is gone, in which nothing is to be kept.
    let abandoned = groups.of_the_gone(roots);
    let in_group: BTreeSet<u32> = abandoned
        .iter()
        .filter(|pids| {
            !pids
                .iter()
                .any(|pid| matches!(claim(*pid), Some(Claim::Kept)))
        })
        .flatten()
        .copied()
        .collect();
    end_where(proc, "", |process| match claim(process.pid) {
        Some(Claim::Left(worker)) => Some(worker),
        Some(Claim::Kept) => None,
        None => in_group.contains(&process.pid).then(String::new),
    })
    .await
}

/// Mark in the environment of a process.
enum Claim {
    /// It belongs to a running supervisor, or continues.
    Kept,
    /// The worker that it was left behind by.
    Left(String),
}

/// Ends the processes that one launch of a worker left behind, wherever they are.
pub(super) async fn end_left_behind(roots: &ProbeRoot, launched: Launched<'_>) -> Vec<Orphan> {
    let proc = &roots.proc;
    let supervisor = launched.supervisor.to_string();
    let label = launched.label;
    end_where(proc, label, |process| {
        let pid = process.pid;
        let marked = || {
            processes::environment(proc, pid, WORKER_VARIABLE).as_deref() == Some(label)
                && processes::environment(proc, pid, SUPERVISOR_VARIABLE).as_deref()
                    == Some(supervisor.as_str())
        };
        let left = pid != launched.leader
            && (process.group == launched.leader
                || launched.seen.contains(&(pid, process.start_ticks))
                || descent::is_adopted(process, launched.since)
                || marked());
        left.then(|| label.to_owned())
    })
    .await
}

/// The processes that this one has started or adopted, with all below them, except `leader`; ended ones are reaped. For
/// a program that has made itself the [adopter](descent::adopt_descendants) and runs only `leader`.
#[must_use]
pub fn descendants(proc: &Path, leader: Option<u32>) -> usize {
    let living = |process: &ProcessStat| match UnmanagedProcess::open(process.pid) {
        Ok(ended) if process.is_dead() => {
            ended.reap();
            false
        }
        Ok(_) => !process.is_dead(),
        Err(_) => false,
    };
    below_us(proc, leader)
        .iter()
        .filter(|process| living(process))
        .count()
}

/// Asks all [`descendants`] to end.
pub fn ask_descendants_to_end(proc: &Path, leader: Option<u32>) {
    for process in below_us(proc, leader) {
        if let Ok(held) = UnmanagedProcess::open(process.pid)
            && ProcessStat::read(proc, process.pid)
                .is_some_and(|now| now.start_ticks == process.start_ticks)
        {
            let _ = held.signal(libc::SIGTERM);
        }
    }
}

/// Kills all [`descendants`].
pub async fn end_descendants(proc: &Path) {
    let us = std::process::id();
    end_where(proc, "", |process| (process.parent == us).then(String::new)).await;
}

fn below_us(proc: &Path, leader: Option<u32>) -> Vec<ProcessStat> {
    let us = std::process::id();
    let table = ProcessTable::read(proc).unwrap_or_default();
    let found = table.tree(us);
    let is_below = |process: &ProcessStat| {
        found.contains(&process.pid) && ![Some(us), leader].contains(&Some(process.pid))
    };
    table.processes.into_iter().filter(is_below).collect()
}

/// Ends every process for which `owner` names a worker, and all that descend from it; `otherwise` is named for these.
///
/// A process that is ended may have just started another one, so it is looked again until nothing is found.
async fn end_where(
    proc: &Path,
    otherwise: &str,
    owner: impl Fn(&ProcessStat) -> Option<String>,
) -> Vec<Orphan> {
    let mut ended: Vec<Orphan> = Vec::new();
    let us = std::process::id();
    for _ in 0..PASSES_MAX {
        let table = ProcessTable::read(proc).unwrap_or_default();
        let ours = table.tree(us);
        let mut found = table.descendants(|process| owner(process).is_some());
        // We may run below a process that another supervisor has left.
        if found.contains(&us) {
            found.retain(|pid| *pid != us && !ours.contains(pid));
        }
        let before = ended.len();
        for process in table
            .processes
            .iter()
            .filter(|process| found.contains(&process.pid))
        {
            // First held, then looked at again: the id may have passed to another process in between.
            let Ok(orphan) = UnmanagedProcess::open(process.pid) else {
                continue;
            };
            let Some(now) = ProcessStat::read(proc, process.pid)
                .filter(|now| now.start_ticks == process.start_ticks)
            else {
                continue;
            };
            if now.is_dead() {
                orphan.reap();
                continue;
            }
            if ended.iter().any(|orphan| orphan.pid == process.pid) {
                continue;
            }
            let worker = owner(&now).unwrap_or_else(|| otherwise.to_owned());
            match orphan.kill(PATIENCE).await {
                Ok(gone) => ended.push(Orphan {
                    pid: process.pid,
                    worker,
                    ended: gone,
                }),
                Err(error) => {
                    tracing::warn!(pid = process.pid, worker, %error, "cannot end a process left behind");
                }
            }
        }
        if ended.len() == before {
            break;
        }
    }
    ended
}

/// A killed process is gone within milliseconds, unless a driver holds it.
const PATIENCE: Duration = Duration::from_secs(1);

/// How often leftovers are searched for: more rounds than a process that forks in a loop survives (our choice).
const PASSES_MAX: usize = 16;
