//! Leftover processes of workers.

use std::{path::Path, time::Duration};

use super::{
    KernelRoots,
    adopt::{LAUNCH_VARIABLE, LaunchRecord, Survivor},
    mark::{SUPERVISOR_VARIABLE, SupervisorMark, WORKER_VARIABLE},
    process::Stranger,
};
use crate::probe::processes::{self, ProcessStat};

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

/// Ends the workers of supervisors that do not run any more; to be called before the first worker is started.
///
/// Without an heir a worker gets SIGKILL from the kernel when its supervisor dies, but its own children do not. Only
/// processes that carry a mark of a supervisor of this process namespace are touched, none of one that runs beside us,
/// and none that is left to the heirs of another place than `place`. `spared` are taken over, with their children.
pub async fn end_orphans(roots: &KernelRoots, place: Option<&str>, spared: &[Survivor]) -> Vec<Orphan> {
    let proc = &roots.proc;
    end_where(proc, |pid| {
        let mark: SupervisorMark = processes::environment(proc, pid, SUPERVISOR_VARIABLE)?.parse().ok()?;
        if mark.may_run(proc) {
            return None;
        }
        let record = processes::environment(proc, pid, LAUNCH_VARIABLE);
        let record = record.and_then(|text| serde_json::from_str::<LaunchRecord>(&text).ok());
        if record.is_some_and(|record| place != Some(record.place.as_str())) {
            return None;
        }
        let worker = processes::environment(proc, pid, WORKER_VARIABLE).unwrap_or_default();
        if spared
            .iter()
            .any(|spared| spared.mark == mark && spared.label == worker)
        {
            return None;
        }
        Some(worker.split(' ').next().unwrap_or_default().to_owned())
    })
    .await
}

/// Ends the processes that one launch of a worker left behind, in its group or elsewhere.
pub(super) async fn end_left_behind(
    roots: &KernelRoots,
    leader: u32,
    supervisor: &SupervisorMark,
    label: &str,
) -> Vec<Orphan> {
    let proc = &roots.proc;
    let supervisor = supervisor.to_string();
    end_where(proc, |pid| {
        let in_group = ProcessStat::read(proc, pid).is_some_and(|process| process.group == leader);
        let marked = || {
            processes::environment(proc, pid, WORKER_VARIABLE).as_deref() == Some(label)
                && processes::environment(proc, pid, SUPERVISOR_VARIABLE).as_deref() == Some(supervisor.as_str())
        };
        (pid != leader && (in_group || marked())).then(|| label.to_owned())
    })
    .await
}

/// Ends every process for which `owner` names a worker.
async fn end_where(proc: &Path, owner: impl Fn(u32) -> Option<String>) -> Vec<Orphan> {
    let mut ended = Vec::new();
    for process in processes::all(proc) {
        if process.is_dead() || process.pid == std::process::id() || owner(process.pid).is_none() {
            continue;
        }
        // First held, then looked at again: the id may have passed to another process in between.
        let Ok(stranger) = Stranger::open(process.pid) else {
            continue;
        };
        let Some(worker) = owner(process.pid) else { continue };
        match stranger.kill(PATIENCE).await {
            Ok(gone) => ended.push(Orphan {
                pid: process.pid,
                worker,
                ended: gone,
            }),
            Err(error) => tracing::warn!(pid = process.pid, worker, %error, "cannot end a process left behind"),
        }
    }
    ended
}

/// A killed process is gone within milliseconds, unless a driver holds it.
const PATIENCE: Duration = Duration::from_secs(1);
