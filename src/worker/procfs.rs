//! Processes in `/proc`: descent, and the supervisor that started them.

use std::{
    fmt, fs, io,
    path::{Path, PathBuf},
    str::FromStr,
};

/// The fields of `/proc/PID/stat` that are needed here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ProcessStat {
    pub(super) pid: u32,
    pub(super) state: char,
    pub(super) parent: u32,
    pub(super) group: u32,
    /// In clock ticks since boot; with the id it names one process for good.
    pub(super) started: u64,
}

impl ProcessStat {
    /// Whether it has ended and only waits to be reaped.
    pub(super) const fn is_dead(self) -> bool {
        matches!(self.state, 'Z' | 'X' | 'x')
    }
}

/// Reads `/proc/PID/stat`; `None` when the process is gone.
pub(super) fn stat(proc: &Path, pid: u32) -> Option<ProcessStat> {
    parse_stat(&fs::read_to_string(proc.join(pid.to_string()).join("stat")).ok()?)
}

/// All processes that can be seen.
pub(super) fn all(proc: &Path) -> Vec<ProcessStat> {
    pids(proc).into_iter().filter_map(|pid| stat(proc, pid)).collect()
}

fn pids(proc: &Path) -> Vec<u32> {
    let Ok(entries) = fs::read_dir(proc) else {
        return Vec::new();
    };
    entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect()
}

/// The process, its descendants, and the members of its group, which includes those whose parent has ended.
pub(super) fn tree(processes: &[ProcessStat], root: u32) -> Vec<u32> {
    let mut members: Vec<u32> = processes
        .iter()
        .filter(|process| process.pid == root || process.group == root)
        .map(|process| process.pid)
        .collect();
    let mut looked_at = 0;
    while let Some(&parent) = members.get(looked_at) {
        looked_at += 1;
        for process in processes {
            if process.parent == parent && !members.contains(&process.pid) {
                members.push(process.pid);
            }
        }
    }
    members
}

/// `pid (name, which may hold anything) state ppid pgrp …`, and the start time as field 22.
fn parse_stat(text: &str) -> Option<ProcessStat> {
    let (pid, rest) = text.split_once(" (")?;
    let (_, rest) = rest.rsplit_once(") ")?;
    let mut fields = rest.split_ascii_whitespace();
    Some(ProcessStat {
        pid: pid.parse().ok()?,
        state: fields.next()?.chars().next()?,
        parent: fields.next()?.parse().ok()?,
        group: fields.next()?.parse().ok()?,
        started: fields.nth(16)?.parse().ok()?,
    })
}

/// Names one supervisor process among all that ever ran since boot, in any process namespace.
///
/// Every worker and its children carry it in their environment, so that those of a supervisor that is gone can be told
/// from those of one that runs beside us.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SupervisorMark {
    /// The process namespace, as the kernel writes it: `pid:[4026531836]`.
    namespace: String,
    pid: u32,
    started: u64,
}

impl SupervisorMark {
    /// The mark of this process.
    pub(super) fn own(proc: &Path) -> io::Result<Self> {
        let pid = std::process::id();
        let own = stat(proc, pid).ok_or_else(|| io::Error::other("cannot read `/proc/self/stat`"))?;
        Ok(Self {
            namespace: namespace_of(proc, pid)?,
            pid,
            started: own.started,
        })
    }

    /// Whether that supervisor still runs; also `true` when it lived where we cannot see it.
    pub(super) fn may_run(&self, proc: &Path) -> bool {
        let ours = namespace_of(proc, std::process::id());
        if !ours.is_ok_and(|ours| ours == self.namespace) {
            return true;
        }
        stat(proc, self.pid).is_some_and(|found| found.started == self.started && !found.is_dead())
    }
}

impl fmt::Display for SupervisorMark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.namespace, self.pid, self.started)
    }
}

impl FromStr for SupervisorMark {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let mut fields = text.split(' ');
        let mut next = || fields.next().ok_or(());
        Ok(Self {
            namespace: next()?.to_owned(),
            pid: next()?.parse().map_err(drop)?,
            started: next()?.parse().map_err(drop)?,
        })
    }
}

fn namespace_of(proc: &Path, pid: u32) -> io::Result<String> {
    let link: PathBuf = fs::read_link(proc.join(pid.to_string()).join("ns/pid"))?;
    Ok(link.to_string_lossy().into_owned())
}

/// Value of a variable in the environment a process was started with; `None` when it has none or may not be read.
pub(super) fn environment(proc: &Path, pid: u32, variable: &str) -> Option<String> {
    let bytes = fs::read(proc.join(pid.to_string()).join("environ")).ok()?;
    bytes
        .split(|&byte| byte == 0)
        .filter_map(|entry| std::str::from_utf8(entry).ok()?.split_once('='))
        .find_map(|(name, value)| (name == variable).then(|| value.to_owned()))
}

/// In the environment of every worker: which supervisor started it.
pub(super) const SUPERVISOR_VARIABLE: &str = "COTENANT_SUPERVISOR";

/// In the environment of every worker: its name and the number of the launch, as `asr 3`.
pub(super) const WORKER_VARIABLE: &str = "COTENANT_WORKER";

#[cfg(test)]
mod tests {
    use super::*;

    fn process(pid: u32, parent: u32, group: u32) -> ProcessStat {
        ProcessStat {
            pid,
            state: 'S',
            parent,
            group,
            started: 0,
        }
    }

    #[test]
    fn a_name_may_hold_anything() {
        let line = "1234 (a) b (c) S 17 1234 1234 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 998877 1000 2 3";
        assert_eq!(
            parse_stat(line),
            Some(ProcessStat {
                pid: 1234,
                state: 'S',
                parent: 17,
                group: 1234,
                started: 998_877
            })
        );
        for broken in ["", "1 (x", "1 (x) S", "x (y) S 1 1 1", "1 (x) S 1 2 3 0 -1 0 0 0 0 0 0"] {
            assert_eq!(parse_stat(broken), None, "{broken}");
        }
    }

    #[test]
    fn a_tree_has_descendants_and_members_of_the_group_whose_parent_is_gone() {
        let processes = [
            process(1, 0, 1),
            process(10, 1, 10),
            process(12, 11, 12),
            process(11, 10, 10),
            process(13, 1, 10),
            process(14, 13, 14),
            process(20, 1, 20),
        ];
        let mut members = tree(&processes, 10);
        members.sort_unstable();
        assert_eq!(members, [10, 11, 12, 13, 14]);
        assert_eq!(tree(&processes, 99), [0; 0]);
    }

    #[test]
    fn a_mark_reads_as_it_prints_and_knows_the_dead() {
        let proc = Path::new("/proc");
        let own = SupervisorMark::own(proc).unwrap();
        assert_eq!(own.to_string().parse(), Ok(own.clone()));
        assert!(own.may_run(proc));
        let earlier = SupervisorMark {
            started: own.started.wrapping_sub(1),
            ..own.clone()
        };
        assert!(!earlier.may_run(proc), "the id was given to another process");
        let elsewhere = SupervisorMark {
            namespace: "pid:[1]".to_owned(),
            ..earlier
        };
        assert!(
            elsewhere.may_run(proc),
            "a supervisor in another namespace cannot be seen"
        );
    }
}
