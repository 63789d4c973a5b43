//! Memory of a worker's processes, measured.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use super::procfs;
use crate::units::Bytes;

/// Where the kernel's figures are read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelRoots {
    /// In place of `/proc`.
    pub proc: PathBuf,
    /// In place of `/sys/fs/cgroup`.
    pub cgroup: PathBuf,
    /// In place of `/dev/kmsg`.
    pub kernel_log: PathBuf,
}

impl Default for KernelRoots {
    fn default() -> Self {
        Self {
            proc: PathBuf::from("/proc"),
            cgroup: PathBuf::from("/sys/fs/cgroup"),
            kernel_log: PathBuf::from("/dev/kmsg"),
        }
    }
}

/// What a process and its descendants hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryReading {
    /// Sum over the processes that could be read.
    pub tree: Bytes,
    /// What was summed.
    pub basis: MemoryBasis,
    /// Anonymous pages of the tree; `None` when a process gave no `smaps_rollup`.
    pub anonymous: Option<Bytes>,
    /// Pages of the tree in swap; `None` when a process gave no `smaps_rollup`.
    pub swapped: Option<Bytes>,
    /// The most that the processes that are there have used, as the kernel remembers it, less what they share now; `None`
    /// when it does not tell.
    pub peak: Option<Bytes>,
    /// How many processes were summed.
    pub processes: u32,
    /// What the kernel charges to the worker's control group, when it has one that is not also the supervisor's.
    pub cgroup: Option<Bytes>,
}

/// Which figure of the kernel was summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum MemoryBasis {
    /// Proportional set size of every process: shared pages count once over all who share them.
    Pss,
    /// Resident set size of at least one process, since its `smaps_rollup` was not readable: shared pages may count
    /// more than once, none is missed.
    Rss,
}

/// To which of the processes `mains` `pid` belongs: those whose trees [`measure_tree`] would sum with it. The nearest one,
/// where they start one another.
///
/// Goes up from `pid`: asking that of every process of the machine would take milliseconds.
#[must_use]
pub fn main_of(roots: &KernelRoots, mains: &BTreeSet<u32>, pid: u32) -> Option<u32> {
    let mut next = pid;
    for _ in 0..ANCESTORS_MAX {
        let found = procfs::stat(&roots.proc, next)?;
        if let Some(main) = [found.pid, found.group].into_iter().find(|id| mains.contains(id)) {
            return Some(main);
        }
        next = found.parent;
    }
    None
}

/// Ancestors that are looked at: more than any process has that starts others for a purpose (our choice). Ids that are
/// given anew while they are read could make a ring of them.
const ANCESTORS_MAX: usize = 256;

/// What `pid`, its descendants and its process group hold; `None` when `pid` is gone or cannot be read, which is not
/// the same as nothing.
#[must_use]
pub fn measure_tree(roots: &KernelRoots, pid: u32) -> Option<MemoryReading> {
    let root = procfs::stat(&roots.proc, pid)?;
    if root.is_dead() {
        return None;
    }
    let mut sum = Sum {
        reading: MemoryReading {
            tree: Bytes::ZERO,
            basis: MemoryBasis::Pss,
            anonymous: Some(Bytes::ZERO),
            swapped: Some(Bytes::ZERO),
            peak: Some(Bytes::ZERO),
            processes: 0,
            cgroup: cgroup_charge(roots, pid),
        },
    };
    for member in procfs::tree(&procfs::all(&roots.proc), pid) {
        let folder = roots.proc.join(member.to_string());
        if !sum.add_rollup(&folder) && !sum.add_status(&folder) && member == pid {
            return None;
        }
    }
    (sum.reading.processes > 0).then_some(sum.reading)
}

struct Sum {
    reading: MemoryReading,
}

impl Sum {
    fn add_rollup(&mut self, folder: &Path) -> bool {
        let Ok(text) = fs::read_to_string(folder.join("smaps_rollup")) else {
            return false;
        };
        let Some(pss) = field(&text, "Pss:") else { return false };
        let reading = &mut self.reading;
        reading.tree = reading.tree.saturating_add(pss);
        reading.anonymous = plus(reading.anonymous, field(&text, "Anonymous:"));
        reading.swapped = plus(reading.swapped, field(&text, "SwapPss:").or(field(&text, "Swap:")));
        let shared = field(&text, "Rss:").map(|rss| rss.saturating_sub(pss));
        let status = fs::read_to_string(folder.join("status")).ok();
        let most = status.and_then(|status| field(&status, "VmHWM:"));
        let peak = most
            .zip(shared)
            .map(|(most, shared)| most.saturating_sub(shared).max(pss));
        reading.peak = plus(reading.peak, peak);
        reading.processes += 1;
        true
    }

    fn add_status(&mut self, folder: &Path) -> bool {
        let rss = fs::read_to_string(folder.join("status"))
            .ok()
            .and_then(|text| field(&text, "VmRSS:"));
        let Some(rss) = rss else { return false };
        let reading = &mut self.reading;
        reading.tree = reading.tree.saturating_add(rss);
        reading.basis = MemoryBasis::Rss;
        (reading.anonymous, reading.swapped, reading.peak) = (None, None, None);
        reading.processes += 1;
        true
    }
}

fn plus(sum: Option<Bytes>, more: Option<Bytes>) -> Option<Bytes> {
    Some(sum?.saturating_add(more?))
}

/// `Name:   1234 kB` as bytes.
fn field(text: &str, name: &str) -> Option<Bytes> {
    let value = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kib = value.trim().strip_suffix("kB")?.trim_end().parse().ok()?;
    Some(Bytes::from_kib(kib))
}

/// What is charged to the control group of `pid`, when this process is not in it.
///
/// Version 2 counts in `memory.current`, version 1 in `memory.usage_in_bytes` of the memory hierarchy.
fn cgroup_charge(roots: &KernelRoots, pid: u32) -> Option<Bytes> {
    let groups = |pid: u32| fs::read_to_string(roots.proc.join(pid.to_string()).join("cgroup")).ok();
    let (theirs, ours) = (groups(pid)?, groups(std::process::id())?);
    let unified = |text: &str| Some(text.lines().find_map(|line| line.strip_prefix("0::"))?.to_owned());
    let version_1 = |text: &str| {
        text.lines().find_map(|line| {
            let mut parts = line.splitn(3, ':').skip(1);
            let (controllers, path) = (parts.next()?, parts.next()?);
            controllers
                .split(',')
                .any(|name| name == "memory")
                .then(|| path.to_owned())
        })
    };
    let charge = |group: Option<String>, own: Option<String>, folder: &str, file: &str| {
        let group = group.filter(|group| Some(group) != own.as_ref())?;
        let path = roots.cgroup.join(folder).join(group.trim_start_matches('/')).join(file);
        Some(Bytes::new(fs::read_to_string(path).ok()?.trim().parse().ok()?))
    };
    charge(version_1(&theirs), version_1(&ours), "memory", "memory.usage_in_bytes")
        .or_else(|| charge(unified(&theirs), unified(&ours), "", "memory.current"))
}

#[cfg(test)]
mod tests {
    use std::process;

    use super::*;

    /// A folder tree in place of `/proc` with the given files.
    fn roots(files: &[(&str, &str)]) -> (tempfile::TempDir, KernelRoots) {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = dir.path().join(path.replace("SELF", &process::id().to_string()));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let roots = KernelRoots {
            proc: dir.path().join("proc"),
            cgroup: dir.path().join("cgroup"),
            kernel_log: dir.path().join("kmsg"),
        };
        (dir, roots)
    }

    const LEADER: &str = "70 (asr) S 1 70 70 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 5 0 0";
    const CHILD: &str = "71 (helper) S 70 70 70 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 6 0 0";
    const OTHER: &str = "72 (other) S 1 72 72 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 6 0 0";
    const ROLLUP: &str = "00400000-7ffe000 ---p 00000000 00:00 0 [rollup]\nRss:  2048 kB\nPss:  1024 kB\nAnonymous:  512 kB\nSwap:  8 kB\nSwapPss:  4 kB\n";

    #[test]
    fn a_process_belongs_to_the_worker_that_it_is_measured_with() {
        // As CHILD, but with a session and a group of its own, and one whose parent has ended.
        let apart = "73 (apart) S 71 73 73 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 6 0 0";
        let left = "74 (left) S 1 70 70 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 6 0 0";
        let (_dir, roots) = roots(&[
            ("proc/70/stat", LEADER),
            ("proc/71/stat", CHILD),
            ("proc/72/stat", OTHER),
            ("proc/73/stat", apart),
            ("proc/74/stat", left),
        ]);
        let mains = BTreeSet::from([70, 90]);
        for pid in [70, 71, 73, 74] {
            assert_eq!(main_of(&roots, &mains, pid), Some(70), "{pid}");
            assert!(procfs::tree(&procfs::all(&roots.proc), 70).contains(&pid), "{pid}");
        }
        for pid in [72, 1, 99] {
            assert_eq!(main_of(&roots, &mains, pid), None, "{pid}");
        }
        assert_eq!(
            main_of(&roots, &BTreeSet::from([70, 73]), 73),
            Some(73),
            "the nearest one"
        );
    }

    #[test]
    fn a_tree_is_summed_and_strangers_are_not() {
        let (_dir, roots) = roots(&[
            ("proc/70/stat", LEADER),
            ("proc/70/smaps_rollup", ROLLUP),
            ("proc/70/status", "VmHWM:\t    3072 kB\n"),
            ("proc/71/stat", CHILD),
            ("proc/71/smaps_rollup", ROLLUP),
            ("proc/71/status", "VmHWM:\t    1024 kB\n"),
            ("proc/72/stat", OTHER),
            ("proc/72/smaps_rollup", ROLLUP),
        ]);
        assert_eq!(
            measure_tree(&roots, 70),
            Some(MemoryReading {
                tree: Bytes::from_mib(2),
                basis: MemoryBasis::Pss,
                anonymous: Some(Bytes::from_mib(1)),
                swapped: Some(Bytes::from_kib(8)),
                // 3 MiB of one and 1 MiB of the other, of which each shares one now; and never less than now.
                peak: Some(Bytes::from_mib(3)),
                processes: 2,
                cgroup: None,
            })
        );
    }

    #[test]
    fn rss_stands_in_where_pss_may_not_be_read() {
        let (_dir, roots) = roots(&[
            ("proc/70/stat", LEADER),
            ("proc/70/smaps_rollup", ROLLUP),
            ("proc/71/stat", CHILD),
            ("proc/71/status", "Name:\thelper\nVmRSS:\t    3072 kB\n"),
        ]);
        let reading = measure_tree(&roots, 70).unwrap();
        assert_eq!(reading.tree, Bytes::from_mib(4));
        assert_eq!(reading.basis, MemoryBasis::Rss);
        assert_eq!((reading.anonymous, reading.swapped), (None, None));
    }

    #[test]
    fn unknown_is_not_zero() {
        let (_dir, roots) = roots(&[
            ("proc/70/stat", LEADER),
            ("proc/71/stat", CHILD),
            ("proc/71/smaps_rollup", ROLLUP),
        ]);
        assert_eq!(measure_tree(&roots, 70), None, "the leader cannot be read");
        assert_eq!(measure_tree(&roots, 99), None, "there is no such process");
    }

    #[test]
    fn a_zombie_holds_nothing_that_could_be_measured() {
        let zombie = LEADER.replace(" S ", " Z ");
        let (_dir, roots) = roots(&[("proc/70/stat", &zombie), ("proc/70/status", "VmRSS:\t1 kB\n")]);
        assert_eq!(measure_tree(&roots, 70), None);
    }

    #[test]
    fn a_control_group_counts_only_when_it_is_not_ours() {
        let files = |theirs: &'static str, ours: &'static str| {
            roots(&[
                ("proc/70/stat", LEADER),
                ("proc/70/smaps_rollup", ROLLUP),
                ("proc/70/cgroup", theirs),
                ("proc/SELF/cgroup", ours),
                ("cgroup/w/asr/memory.current", "7340032\n"),
                ("cgroup/memory/w/asr/memory.usage_in_bytes", "8388608\n"),
            ])
        };
        let charge = |theirs, ours| {
            let (_dir, roots) = files(theirs, ours);
            measure_tree(&roots, 70).unwrap().cgroup
        };
        assert_eq!(charge("0::/w/asr\n", "0::/w\n"), Some(Bytes::from_mib(7)));
        assert_eq!(
            charge("4:cpu,memory:/w/asr\n0::/\n", "4:cpu,memory:/w\n0::/\n"),
            Some(Bytes::from_mib(8))
        );
        assert_eq!(charge("0::/w/asr\n", "0::/w/asr\n"), None);
        assert_eq!(charge("0::/gone\n", "0::/w\n"), None);
    }

    #[test]
    fn this_process_can_be_measured() {
        let reading = measure_tree(&KernelRoots::default(), process::id()).unwrap();
        assert!(reading.tree > Bytes::from_kib(100));
        assert!(reading.processes >= 1);
    }
}
