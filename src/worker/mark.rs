//! Marks that identify the supervisor of a process.

use std::{
    fmt, fs, io,
    path::{Path, PathBuf},
    str::FromStr,
};

use cotenant_probe::processes::ProcessStat;

/// Identifies one supervisor process among all since boot, in any pid namespace.
///
/// Every worker and its children have it in their environment. It distinguishes workers of an ended supervisor from
/// those of one that runs concurrently.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SupervisorMark {
    /// The pid namespace as written by the kernel: `pid:[4026531836]`.
    namespace: String,
    pid: u32,
    started: u64,
}

impl SupervisorMark {
    pub(super) fn own(proc: &Path) -> io::Result<Self> {
        let pid = std::process::id();
        let own = ProcessStat::read(proc, pid)
            .ok_or_else(|| io::Error::other("cannot read `/proc/self/stat`"))?;
        Ok(Self {
            namespace: namespace_of(proc, pid)?,
            pid,
            started: own.start_ticks,
        })
    }

    /// Returns whether that supervisor still runs; `true` also if its namespace is not visible.
    pub(super) fn may_run(&self, proc: &Path) -> bool {
        let ours = namespace_of(proc, std::process::id());
        if !ours.is_ok_and(|ours| ours == self.namespace) {
            return true;
        }
        ProcessStat::read(proc, self.pid)
            .is_some_and(|found| found.start_ticks == self.started && !found.is_dead())
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

/// Environment variable of every worker: mark of its supervisor.
pub(super) const SUPERVISOR_VARIABLE: &str = "COTENANT_SUPERVISOR";

/// Environment variable of every worker: its name and the number of the launch, as in `asr 3`.
pub(super) const WORKER_VARIABLE: &str = "COTENANT_WORKER";

#[cfg(test)]
mod tests {
    use super::*;

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
        assert!(
            !earlier.may_run(proc),
            "the id was given to another process"
        );
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
