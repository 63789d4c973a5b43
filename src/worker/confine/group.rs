//! Control group of each worker.
//!
//! In version 2, a group that delegates controllers cannot hold processes. A supervisor that is alone in its group (a
//! unit with `Delegate=`) therefore first moves into a leaf of it. If other processes share the group, workers have no
//! groups.

use std::{
    fs::{self, File, OpenOptions},
    io,
    path::{Path, PathBuf},
    process,
    sync::atomic::{AtomicU64, Ordering},
};

use nix::unistd::write;

use super::settings::Measure;
use cotenant_probe::{
    ProbeRoot,
    cgroup::{Cgroup, CgroupVersion},
};
use cotenant_units::Bytes;

/// Parent of the workers' groups.
#[derive(Clone, Debug)]
pub struct Groups {
    parent: Result<Cgroup, String>,
}

impl Groups {
    /// Returns a value without groups, with the reason.
    pub fn none(reason: &str) -> Self {
        Self {
            parent: Err(reason.to_owned()),
        }
    }

    /// Prepares the supervisor's own group as parent of the workers' groups, if possible.
    pub fn open(roots: &ProbeRoot) -> Self {
        let groups = Self {
            parent: own(roots).and_then(|parent| match parent.version() {
                CgroupVersion::V1 => Ok(parent),
                CgroupVersion::V2 => hand_down(parent),
            }),
        };
        if let Ok(parent) = &groups.parent {
            sweep(parent.folder(), roots);
        }
        groups
    }

    /// Returns whether workers would have groups, without changing anything.
    pub fn look(roots: &ProbeRoot) -> Self {
        let parent = own(roots).and_then(|parent| {
            let folder = parent.folder();
            let writable = OpenOptions::new()
                .write(true)
                .open(folder.join("cgroup.procs"));
            match (parent.version(), writable) {
                (_, Err(error)) => {
                    Err(format!("`{}` cannot be changed: {error}", folder.display()))
                }
                (CgroupVersion::V2, Ok(_)) if !hands_down(folder) => {
                    shared(folder).map_or(Ok(parent), Err)
                }
                _ => Ok(parent),
            }
        });
        Self { parent }
    }

    /// Lists the processes in each group of a supervisor that no longer runs.
    pub(crate) fn of_the_gone(&self, roots: &ProbeRoot) -> Vec<Vec<u32>> {
        let Ok(parent) = &self.parent else {
            return Vec::new();
        };
        let gone = of_the_gone(parent.folder(), roots);
        gone.iter().map(|folder| members(folder)).collect()
    }

    /// Returns the folder of the groups, or the reason for their absence.
    ///
    /// # Errors
    /// The reason in words.
    pub fn describe(&self) -> Result<String, String> {
        self.parent.as_ref().map_err(Clone::clone).map(|parent| {
            let version = match parent.version() {
                CgroupVersion::V1 => 1,
                CgroupVersion::V2 => 2,
            };
            format!("version {version}, below `{}`", parent.folder().display())
        })
    }
}

/// Control group of one worker, possibly empty; removed on drop.
#[derive(Debug)]
pub(crate) struct WorkerGroup {
    folder: PathBuf,
    procs: File,
}

impl WorkerGroup {
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    pub(crate) fn members(&self) -> Vec<u32> {
        members(&self.folder)
    }

    /// Opens the group of a worker taken over and sets its limit again; `None` if the group is gone.
    ///
    /// In version 2, the unit withdraws the memory controller when a supervisor ends, because a delegating group admits
    /// no process, including the next supervisor. This removes the limits.
    pub(crate) fn reopened(folder: PathBuf, limit: Option<Bytes>) -> Option<Self> {
        let procs = OpenOptions::new()
            .write(true)
            .open(folder.join("cgroup.procs"))
            .ok()?;
        let version = if folder.join("memory.max").exists() {
            CgroupVersion::V2
        } else {
            CgroupVersion::V1
        };
        if let Err(error) = limit_memory(version, &folder, limit) {
            tracing::warn!(folder = %folder.display(), %error, "a worker taken over has no limit of memory");
        }
        Some(Self { folder, procs })
    }

    /// Moves the calling process into it: one system call on an open file.
    pub(super) fn enter(&self) -> io::Result<()> {
        // 0 means the caller.
        Ok(write(&self.procs, b"0").map(drop)?)
    }
}

impl Drop for WorkerGroup {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir(&self.folder)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::debug!(folder = %self.folder.display(), %error, "cannot remove a control group");
        }
    }
}

/// Creates the group of a worker; also returns the measure.
pub(super) fn create(
    groups: &Groups,
    worker: &str,
    limit: Option<Bytes>,
) -> (Option<WorkerGroup>, Measure) {
    let asked = limit.is_some();
    let what = if asked { LIMIT } else { GROUP };
    let measure = |state| Measure { what, state, asked };
    let parent = match &groups.parent {
        Ok(parent) => parent,
        Err(reason) => return (None, measure(Err(reason.clone()))),
    };
    // Unique number: the group of the previous start may still be in use, and its end must not affect this one.
    let number = STARTS.fetch_add(1, Ordering::Relaxed);
    let folder = parent
        .folder()
        .join(format!("{PREFIX}{}-{number}-{worker}", process::id()));
    let made = make(&folder).and_then(|procs| {
        limit_memory(parent.version(), &folder, limit)
            .map(|words| (WorkerGroup { folder, procs }, words))
    });
    match made {
        Ok((group, words)) => (Some(group), measure(Ok(words))),
        Err(error) => (
            None,
            measure(Err(format!(
                "no group below `{}`: {error}",
                parent.folder().display()
            ))),
        ),
    }
}

/// Returns the result of [`create`], without creating anything.
pub(super) fn foresee(groups: &Groups, limit: Option<Bytes>) -> Measure {
    Measure {
        what: if limit.is_some() { LIMIT } else { GROUP },
        asked: limit.is_some(),
        state: groups.describe().map(|place| match limit {
            Some(limit) => format!("{limit}, no swap ({place})"),
            None => format!("its own, no swap ({place})"),
        }),
    }
}

fn make(folder: &Path) -> io::Result<File> {
    match fs::create_dir(folder) {
        // Left by an interrupted start.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        other => other?,
    }
    OpenOptions::new()
        .write(true)
        .open(folder.join("cgroup.procs"))
}

/// Sets the limit and disables swap: with `memory.max` alone, a unit of 2 GB used 3.1 GB.
fn limit_memory(version: CgroupVersion, folder: &Path, limit: Option<Bytes>) -> io::Result<String> {
    let write = |file: &str, value: &str| fs::write(folder.join(file), value);
    let limit_text = limit.map(|limit| limit.get().to_string());
    let swap = match version {
        CgroupVersion::V2 => {
            if let Some(limit) = &limit_text {
                write("memory.max", limit)?;
            }
            // A worker of several processes is killed as a whole.
            let _ = write("memory.oom.group", "1");
            // Absent on kernels without swap accounting.
            write("memory.swap.max", "0")
        }
        CgroupVersion::V1 => {
            if let Some(limit) = &limit_text {
                write("memory.limit_in_bytes", limit)?;
            }
            let both = limit_text
                .as_ref()
                .map(|limit| write("memory.memsw.limit_in_bytes", limit));
            match both {
                Some(Ok(())) => Ok(()),
                _ => write("memory.swappiness", "0"),
            }
        }
    };
    let swap = match swap {
        Ok(()) => "no swap",
        Err(_) => "swap cannot be forbidden",
    };
    let place = folder.display();
    Ok(match limit {
        Some(limit) => format!("{limit}, {swap} (`{place}`)"),
        None => format!("its own, {swap} (`{place}`)"),
    })
}

/// Returns our own group in the hierarchy with the memory controller.
fn own(roots: &ProbeRoot) -> Result<Cgroup, String> {
    let group = Cgroup::own(roots).filter(|group| members(group.folder()).contains(&process::id()));
    let mount = roots.sys("fs/cgroup");
    group.ok_or_else(|| {
        format!(
            "no group of the supervisor with a memory controller below `{}`",
            mount.display()
        )
    })
}

fn members(folder: &Path) -> Vec<u32> {
    let text = fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
    text.lines().filter_map(|line| line.parse().ok()).collect()
}

fn hands_down(folder: &Path) -> bool {
    fs::read_to_string(folder.join("cgroup.subtree_control"))
        .is_ok_and(|text| text.split_whitespace().any(|name| name == "memory"))
}

/// Returns why a group of version 2 cannot delegate: it is shared with other processes.
fn shared(folder: &Path) -> Option<String> {
    let others = members(folder)
        .iter()
        .filter(|pid| **pid != process::id())
        .count();
    (others > 0).then(|| {
        format!(
            "`{}` holds {others} other processes; run as a unit with `Delegate=memory`",
            folder.display()
        )
    })
}

/// Makes a group of version 2 delegate the memory controller, and moves this process into a leaf for that.
fn hand_down(parent: Cgroup) -> Result<Cgroup, String> {
    let folder = parent.folder();
    let control = folder.join("cgroup.subtree_control");
    if hands_down(folder) || fs::write(&control, "+memory").is_ok() {
        return Ok(parent);
    }
    if let Some(reason) = shared(folder) {
        return Err(reason);
    }
    let leaf = folder.join(LEAF);
    let moved = match fs::create_dir(&leaf) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => fs::write(leaf.join("cgroup.procs"), process::id().to_string()),
    };
    moved
        .and_then(|()| fs::write(&control, "+memory"))
        .map_err(|error| format!("`{}` cannot be changed: {error}", folder.display()))?;
    Ok(parent)
}

/// Removes groups left by supervisors that no longer run, except those with processes.
fn sweep(folder: &Path, roots: &ProbeRoot) {
    for group in of_the_gone(folder, roots) {
        let _ = fs::remove_dir(group);
    }
}

/// Returns the groups of workers whose supervisor no longer runs.
fn of_the_gone(folder: &Path, roots: &ProbeRoot) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let is_of_the_gone = |entry: &fs::DirEntry| {
        let name = entry.file_name();
        let owner = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
        let pid = owner.and_then(|owner| owner.split('-').next()?.parse::<u32>().ok());
        pid.is_some_and(|pid| pid != process::id() && !roots.proc.join(pid.to_string()).exists())
    };
    entries
        .filter(is_of_the_gone)
        .map(|entry| entry.path())
        .collect()
}

const LIMIT: &str = "memory limit";
const GROUP: &str = "control group";

/// Prefix of a worker's group name, before the id of its supervisor.
const PREFIX: &str = "cotenant-worker-";

static STARTS: AtomicU64 = AtomicU64::new(0);

/// Leaf group of the supervisor in version 2.
const LEAF: &str = "cotenant-supervisor";

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(cgroup: &str, files: &[(&str, &str)]) -> (tempfile::TempDir, ProbeRoot) {
        let dir = tempfile::tempdir().unwrap();
        let roots = ProbeRoot::at(dir.path());
        fs::create_dir_all(roots.proc.join("self")).unwrap();
        fs::write(roots.proc.join("self/cgroup"), cgroup).unwrap();
        for (path, text) in files {
            let path = roots.sys("fs/cgroup").join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text.replace("SELF", &process::id().to_string())).unwrap();
        }
        (dir, roots)
    }

    #[test]
    fn a_unit_of_its_own_hands_down_and_a_shared_group_is_left_alone() {
        let unit = [
            ("u/memory.stat", "anon 0\n"),
            ("u/cgroup.procs", "SELF\n"),
            ("u/cgroup.subtree_control", "memory\n"),
        ];
        let (_dir, roots) = tree("0::/u\n", &unit);
        let place = Groups::look(&roots).describe().unwrap();
        assert!(
            place.starts_with("version 2, below") && place.ends_with("/u`"),
            "{place}"
        );

        let session = [
            ("s/memory.stat", "anon 0\n"),
            ("s/cgroup.procs", "SELF\n1\n2\n"),
            ("s/cgroup.subtree_control", ""),
        ];
        let (_dir, roots) = tree("0::/s\n", &session);
        let reason = Groups::look(&roots).describe().unwrap_err();
        assert!(
            reason.ends_with("holds 2 other processes; run as a unit with `Delegate=memory`"),
            "{reason}"
        );
    }

    #[test]
    fn version_1_serves_where_version_2_has_no_memory_controller() {
        let files = [
            ("unified/cgroup.procs", "SELF\n"),
            ("memory/a/memory.usage_in_bytes", "0\n"),
            ("memory/a/cgroup.procs", "SELF\n"),
        ];
        let (_dir, roots) = tree("4:cpu,memory:/a\n0::/\n", &files);
        let groups = Groups::open(&roots);
        assert!(groups.describe().unwrap().starts_with("version 1"));
        // A plain folder has no `cgroup.procs`: the refusal is reported.
        let (group, measure) = create(&groups, "asr", Some(Bytes::from_mib(64)));
        assert!(group.is_none() && measure.asked);
        assert!(
            measure
                .to_string()
                .contains("memory limit: not in force: no group below"),
            "{measure}"
        );
    }

    #[test]
    fn without_a_group_of_ours_the_reason_is_reported() {
        let (_dir, roots) = tree(
            "0::/\n",
            &[("memory.stat", "anon 0\n"), ("cgroup.procs", "1\n")],
        );
        let reason = Groups::open(&roots).describe().unwrap_err();
        assert!(
            reason.starts_with("no group of the supervisor with a memory controller"),
            "{reason}"
        );
    }

    #[test]
    fn groups_of_supervisors_that_are_gone_are_swept() {
        let (_dir, roots) = tree("", &[]);
        let parent = roots.sys("fs/cgroup/p");
        for name in [
            "cotenant-worker-999999999-asr",
            "cotenant-worker-7-tts",
            "other",
        ] {
            fs::create_dir_all(parent.join(name)).unwrap();
        }
        fs::create_dir_all(roots.proc.join("7")).unwrap();
        sweep(&parent, &roots);
        assert!(!parent.join("cotenant-worker-999999999-asr").exists());
        assert!(parent.join("cotenant-worker-7-tts").exists() && parent.join("other").exists());
    }
}
