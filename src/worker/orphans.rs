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

/// Leftover process that was killed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Orphan {
    /// Its process id.
    pub pid: u32,
    /// Name of its worker.
    pub worker: String,
    /// Whether it has ended; in an uninterruptible wait, this takes longer.
    pub ended: bool,
}

/// Id and start time, which together identify a process.
pub(super) type Known = (u32, u64);

/// Processes and group of one launch of a worker.
pub(super) struct Launched<'a> {
    /// The worker's own process, ended but not reaped.
    pub(super) leader: u32,
    /// Start time of the leader, in clock ticks since boot.
    pub(super) since: u64,
    pub(super) supervisor: &'a SupervisorMark,
    /// Name of the worker and number of the launch.
    pub(super) label: &'a str,
    /// Processes seen below the leader or in its control group.
    pub(super) seen: BTreeSet<Known>,
}

/// Ends workers of supervisors that no longer run; call it before the first worker is started.
///
/// Without a successor, the kernel kills a worker when its supervisor dies, but not the worker's children. Ends only
/// processes marked by a supervisor of this pid namespace, with their descendants and the processes in their control
/// groups; not those of running supervisors, nor those left for successors in a place other than `place`. `spared` are
/// taken over, with their children.
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
    // Group of an ended supervisor, in which nothing is spared.
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

/// Claim on a process according to its environment.
enum Claim {
    /// Belongs to a running supervisor, or is taken over.
    Kept,
    /// Left behind by this worker.
    Left(String),
}

/// Ends all processes that one launch of a worker left behind.
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

/// Returns the number of processes that this one has started or adopted, with their descendants, except `leader`; reaps
/// ended ones. For a program that has made itself the [adopter](descent::adopt_descendants) and runs only `leader`.
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

/// Sends SIGTERM to all [`descendants`].
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

/// Ends every process to which `owner` assigns a worker, and its descendants, which are reported under `otherwise` if
/// they have no worker.
///
/// Repeats until nothing is found, because a process may have started another one just before its end.
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
        // This process may itself run below a process left by another supervisor.
        if found.contains(&us) {
            found.retain(|pid| *pid != us && !ours.contains(pid));
        }
        let before = ended.len();
        for process in table
            .processes
            .iter()
            .filter(|process| found.contains(&process.pid))
        {
            // Open first, then check again: the id may have been reused in between.
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

/// A killed process ends within milliseconds, unless a driver blocks it.
const PATIENCE: Duration = Duration::from_secs(1);

/// Limit on rounds of searching for leftovers: more than a process that forks in a loop survives (our choice).
const PASSES_MAX: usize = 16;
