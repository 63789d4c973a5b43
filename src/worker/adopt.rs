//! Take-over of workers that outlived their supervisor.
//!
//! All required data is in the environment in which the worker was started, which exists exactly as long as the worker
//! does. A separate file could be stale.

use std::{
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

use super::{
    mark::{SUPERVISOR_VARIABLE, SupervisorMark, WORKER_VARIABLE},
    spec::WorkerSpec,
};
use cotenant_probe::{
    ProbeRoot,
    processes::{self, ProcessStat},
};
use cotenant_speech::client::Endpoint;
use cotenant_units::fnv1a;

/// Record of how a worker was started, kept in its environment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct LaunchRecord {
    pub(super) worker: String,
    /// Place of its supervisors; see [`Successor`](super::spec::Successor).
    pub(super) place: String,
    /// Hash of its specification; only a worker with an equal one is taken over.
    pub(super) specification: String,
    /// Its address, as `unix:///path` or `tcp://host:port`.
    pub(super) endpoint: Option<String>,
    /// Variant in which it was started.
    pub(super) variant: Option<String>,
    pub(super) group: Option<PathBuf>,
}

/// Worker that outlived its supervisor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Survivor {
    /// Its process id, also the id of its group.
    pub pid: u32,
    /// Its name.
    pub worker: String,
    /// Variant in which it was started.
    pub variant: Option<String>,
    /// Whether it has been ready before, if known. If so, signs that appear only once, such as an output line, are not
    /// awaited again.
    pub was_ready: bool,
    pub(super) endpoint: Option<Endpoint>,
    pub(super) mark: SupervisorMark,
    pub(super) label: String,
    pub(super) group: Option<PathBuf>,
    /// Start time in clock ticks since boot.
    pub(super) started: u64,
}

impl LaunchRecord {
    /// Returns the record for a start of `spec`; `None` if the worker may not be taken over.
    ///
    /// This includes a worker of another user unless we are root, since it could not be inspected.
    pub(super) fn of(
        spec: &WorkerSpec,
        endpoint: Option<&Endpoint>,
        variant: Option<&str>,
        group: Option<&Path>,
    ) -> Option<Self> {
        if spec.confinement.user.is_some() && !nix::unistd::geteuid().is_root() {
            return None;
        }
        Some(Self {
            worker: spec.name.clone(),
            place: spec.successor.as_ref()?.place.clone(),
            specification: specification_of(spec),
            endpoint: endpoint.map(ToString::to_string),
            variant: variant.map(str::to_owned),
            group: group.map(Path::to_owned),
        })
    }
}

impl Survivor {
    /// Returns whether the process with its id is still the one that was found.
    pub(super) fn is_still_there(&self, proc: &Path) -> bool {
        ProcessStat::read(proc, self.pid)
            .is_some_and(|now| now.start_ticks == self.started && !now.is_dead())
    }

    pub(super) fn started_at(&self, proc: &Path) -> Instant {
        let now = Instant::now();
        let up = fs::read_to_string(proc.join("uptime")).unwrap_or_default();
        let up = up
            .split(' ')
            .next()
            .and_then(|seconds| seconds.parse().ok());
        let up = up.and_then(|seconds: f64| Duration::try_from_secs_f64(seconds).ok());
        let started = Duration::from_millis(self.started.saturating_mul(1000 / TICKS));
        let age = up.unwrap_or(started).saturating_sub(started);
        now.checked_sub(age).unwrap_or(now)
    }
}

/// Returns the running workers that supervisors of the place of `specs` have left behind and that match `specs`: at
/// most one for each. Call it while no supervisor of this place runs.
pub fn survivors(roots: &ProbeRoot, specs: &[WorkerSpec]) -> Vec<Survivor> {
    let proc = &roots.proc;
    let us = nix::unistd::geteuid().as_raw();
    let mut found: Vec<Survivor> = Vec::new();
    let mut processes = processes::all(proc);
    // A child in another group inherits the variables; the worker itself is older.
    processes.sort_by_key(|process| process.start_ticks);
    for process in processes {
        if process.is_dead() || process.group != process.pid || process.pid == std::process::id() {
            continue;
        }
        let variable = |name| processes::environment(proc, process.pid, name);
        let Some(record) = variable(LAUNCH_VARIABLE)
            .and_then(|text| serde_json::from_str::<LaunchRecord>(&text).ok())
        else {
            continue;
        };
        let Some(mark) =
            variable(SUPERVISOR_VARIABLE).and_then(|text| text.parse::<SupervisorMark>().ok())
        else {
            continue;
        };
        let Some(label) = variable(WORKER_VARIABLE) else {
            continue;
        };
        // Any user can put such variables into the environment of their own process.
        let owner = fs::metadata(proc.join(process.pid.to_string())).map(|owner| owner.uid());
        let wanted = specs.iter().any(|spec| {
            let successor = spec
                .successor
                .as_ref()
                .is_some_and(|successor| successor.place == record.place);
            let user = spec
                .confinement
                .user
                .as_deref()
                .and_then(user_id)
                .unwrap_or(us);
            let ours = owner.as_ref().is_ok_and(|owner| *owner == user);
            successor
                && ours
                && spec.name == record.worker
                && specification_of(spec) == record.specification
        });
        let known = found.iter().any(|other| other.worker == record.worker);
        if !wanted || known || mark.may_run(proc) {
            continue;
        }
        let endpoint = match record.endpoint.as_deref().map(str::parse::<Endpoint>) {
            None => None,
            Some(Ok(endpoint)) => Some(endpoint),
            Some(Err(_)) => continue,
        };
        found.push(Survivor {
            pid: process.pid,
            worker: record.worker,
            variant: record.variant,
            was_ready: false,
            endpoint,
            mark,
            label,
            group: record.group,
            started: process.start_ticks,
        });
    }
    found
}

/// Waits until processes that have just executed a program show an environment that identifies them: the kernel
/// publishes it shortly after the lock of the place is released.
pub async fn all_visible(roots: &ProbeRoot) {
    let proc = &roots.proc;
    let us = nix::unistd::geteuid().as_raw();
    let end = Instant::now() + VISIBLE_PATIENCE;
    let now = ProcessStat::read(proc, std::process::id()).map_or(0, |own| own.start_ticks);
    let unseen = || {
        processes::all(proc).into_iter().any(|process| {
            let folder = proc.join(process.pid.to_string());
            // Some programs never have an environment; those are older, or cost this wait once.
            !process.is_dead()
                && process.group == process.pid
                && process.start_ticks + VISIBLE_TICKS >= now
                && fs::metadata(&folder).is_ok_and(|owner| owner.uid() == us)
                && fs::read(folder.join("environ")).is_ok_and(|environment| environment.is_empty())
        })
    };
    while unseen() && Instant::now() < end {
        tokio::time::sleep(VISIBLE_LOOK_EVERY).await;
    }
}

/// Returns the id of a user given by name or number.
fn user_id(user: &str) -> Option<u32> {
    let by_name = || nix::unistd::User::from_name(user).ok().flatten();
    user.parse()
        .ok()
        .or_else(|| by_name().map(|user| user.uid.as_raw()))
}

/// Returns a hash that is the same for equal specifications, within one version of this program.
fn specification_of(spec: &WorkerSpec) -> String {
    // Collisions are no attack: they help only a process that could change the configuration anyway.
    let hash = fnv1a(format!("{spec:?}").into_bytes());
    format!("{}-{hash:016x}", env!("CARGO_PKG_VERSION"))
}

/// Environment variable of workers that may be taken over: a [`LaunchRecord`] as JSON.
pub(super) const LAUNCH_VARIABLE: &str = "COTENANT_LAUNCH";

/// Environment variable of workers that may be taken over: path of the file that its supervisor keeps locked.
pub const LOCK_VARIABLE: &str = "COTENANT_LOCK";

/// Ticks of `/proc/PID/stat` per second: `USER_HZ`, 100 on all supported architectures (proc(5)).
const TICKS: u64 = 100;

/// Greatest age of a process, relative to this one, for which [`all_visible`] waits: five seconds.
const VISIBLE_TICKS: u64 = 5 * TICKS;

/// Longest wait of [`all_visible`]; the kernel needs microseconds, unless it waits for pages.
const VISIBLE_PATIENCE: Duration = Duration::from_millis(100);

const VISIBLE_LOOK_EVERY: Duration = Duration::from_millis(1);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{Listen, Successor};

    fn spec(place: &str) -> WorkerSpec {
        WorkerSpec {
            successor: Some(Successor {
                place: place.to_owned(),
                lock: "/nowhere/lock".into(),
            }),
            ..WorkerSpec::new("asr", vec!["sleep".to_owned()], Listen::Nowhere)
        }
    }

    /// Creates a folder in place of `/proc` with this process and a worker of a supervisor that has ended.
    fn proc_with(pid: u32, group: u32, record: &LaunchRecord) -> (tempfile::TempDir, ProbeRoot) {
        let dir = tempfile::tempdir().unwrap();
        let us = std::process::id();
        let namespace = fs::read_link("/proc/self/ns/pid").unwrap();
        for (id, group, environment) in [
            (
                pid,
                group,
                format!(
                    "{SUPERVISOR_VARIABLE}={} 3999999 7\0{WORKER_VARIABLE}=asr 1\0{LAUNCH_VARIABLE}={}\0",
                    namespace.display(),
                    serde_json::to_string(record).unwrap()
                ),
            ),
            (us, us, String::new()),
        ] {
            let folder = dir.path().join(id.to_string());
            fs::create_dir_all(folder.join("ns")).unwrap();
            let stat = format!("{id} (x) S 1 {group} 5 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 99 0 0");
            fs::write(folder.join("stat"), stat).unwrap();
            fs::write(folder.join("environ"), environment).unwrap();
            std::os::unix::fs::symlink(&namespace, folder.join("ns/pid")).unwrap();
        }
        let roots = ProbeRoot {
            proc: dir.path().to_owned(),
            ..ProbeRoot::default()
        };
        (dir, roots)
    }

    #[test]
    fn a_worker_is_taken_over_in_its_own_place_with_its_own_specification_and_by_its_leader_only() {
        let wanted = spec("here");
        let endpoint = Endpoint::Tcp("127.0.0.1:4711".to_owned());
        let record = LaunchRecord::of(&wanted, Some(&endpoint), Some("open"), None).unwrap();
        let (_dir, roots) = proc_with(4_000_001, 4_000_001, &record);
        let found = survivors(&roots, std::slice::from_ref(&wanted));
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].pid, 4_000_001);
        assert_eq!(found[0].endpoint, Some(endpoint));
        assert_eq!(found[0].variant.as_deref(), Some("open"));
        assert!(found[0].is_still_there(&roots.proc));
        // Nor may it be another process with the same id.
        let later = Survivor {
            started: 100,
            ..found[0].clone()
        };
        assert!(!later.is_still_there(&roots.proc));

        assert_eq!(survivors(&roots, &[spec("elsewhere")]), []);
        let mut changed = wanted.clone();
        changed.argv.push("1000".to_owned());
        assert_eq!(survivors(&roots, &[changed]), []);
        let (_dir, roots) = proc_with(4_000_001, 4_000_000, &record);
        assert_eq!(survivors(&roots, &[wanted]), [], "a child of it");
    }
}
