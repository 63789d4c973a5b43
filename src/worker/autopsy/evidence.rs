//! Evidence of a death, as plain values.

use std::{collections::BTreeMap, time::Duration};

use super::kernel_log::KernelLogTail;
use crate::report::{ExitStatus, Intent};
use cotenant_units::Bytes;

/// Everything that is known of the end of one process.
#[derive(Clone, Debug)]
pub(super) struct Evidence {
    pub(super) worker: String,
    pub(super) pid: u32,
    pub(super) status: ExitStatus,
    pub(super) asked: Option<Asked>,
    pub(super) found: Gathered,
    /// `MemAvailable` when it was last measured alive, or at its start.
    pub(super) available: Option<Bytes>,
    /// Its last lines.
    pub(super) lines: Vec<String>,
    /// So many of them it wrote within [`RECENT`] of its end.
    pub(super) recent: usize,
    pub(super) lived: Duration,
    pub(super) was_ready: bool,
}

/// Evidence gathered at the end.
#[derive(Clone, Debug, Default)]
pub(super) struct Gathered {
    /// As the kernel has it, at most 15 characters; empty when it was not read in time.
    pub(super) comm: String,
    pub(super) log: KernelLogTail,
    /// Whether its pid is also the number in the kernel's log.
    pub(super) pid_is_global: bool,
    pub(super) before: Counters,
    pub(super) after: Counters,
    pub(super) limits: Limits,
    pub(super) cpu_time: Option<Duration>,
    pub(super) peak_resident: Option<Bytes>,
    pub(super) available_before: Option<Bytes>,
    pub(super) available: Option<Bytes>,
    /// Programs that kill others for memory and run here.
    pub(super) killers: Vec<String>,
    /// For a library that it misses: files of another version that are there.
    pub(super) other_versions: Vec<String>,
    /// Reason why the kernel would not execute the program's file.
    pub(super) unfit_program: Option<String>,
    /// Whether the kernel refuses to overcommit (`vm.overcommit_memory` is 2).
    pub(super) strict_overcommit: bool,
    /// Known fault of the board's L4T release; `None` on any other machine.
    pub(super) l4t_fault: Option<&'static str>,
}

/// Our request to end it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Asked {
    pub(super) intent: Intent,
    /// In words, with figures; empty when not given.
    pub(super) why: String,
    /// Whether SIGKILL was sent too.
    pub(super) killed: bool,
}

/// Counters of the kernel at one time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Counters {
    /// `oom_kill` of the machine.
    pub(super) machine_kills: Option<u64>,
    /// The group it is in, when that is not also ours.
    pub(super) group: Option<GroupCounters>,
}

/// Counters of a control group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct GroupCounters {
    /// Its path below the mount.
    pub(super) path: String,
    /// Processes of it that were killed for memory.
    pub(super) kills: Option<u64>,
    /// Times that it ran into its limit.
    pub(super) hits: Option<u64>,
    /// Its limit, when it has one.
    pub(super) limit: Option<Bytes>,
}

/// Resource limits of the process, the soft ones; only those that are finite.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Limits {
    /// By the name in `/proc/PID/limits`: `Max address space`, in that file's unit.
    pub(super) finite: BTreeMap<String, u64>,
    /// The hard limit of processor time, s; SIGKILL follows it.
    pub(super) cpu_hard: Option<u64>,
}

impl Limits {
    pub(super) fn of(&self, name: &str) -> Option<u64> {
        self.finite.get(name).copied()
    }

    /// In bytes and seconds, for people. Values common to all processes are omitted.
    pub(super) fn lines(&self) -> Vec<String> {
        self.finite
            .iter()
            .filter_map(|(name, value)| {
                let figure = match name.as_str() {
                    ADDRESS_SPACE | DATA | LOCKED => Bytes::new(*value).to_string(),
                    CPU_TIME => format!("{value} s"),
                    "Max open files" => value.to_string(),
                    _ => return None,
                };
                Some(format!("{name}: {figure}"))
            })
            .collect()
    }
}

/// Greatest age of a line that explains an end. Our choice: programs unload for some seconds after their last error,
/// and a warning of a minute ago is not their last error.
pub(super) const RECENT: Duration = Duration::from_secs(10);

pub(super) const ADDRESS_SPACE: &str = "Max address space";
pub(super) const DATA: &str = "Max data size";
pub(super) const LOCKED: &str = "Max locked memory";
pub(super) const CPU_TIME: &str = "Max cpu time";

impl Evidence {
    /// Lines that it wrote shortly before its end: earlier ones are not about the end.
    pub(super) fn recent_lines(&self) -> &[String] {
        let first = self.lines.len().saturating_sub(self.recent);
        self.lines.get(first..).unwrap_or_default()
    }

    /// Whether the kernel's counters show no kill for memory, whatever a record says.
    pub(super) fn counters_deny_kills(&self, memcg: bool) -> bool {
        self.machine_kills() == Some(0) || (memcg && self.group_kills() == Some(0))
    }

    /// Processes of its own group that were killed for memory meanwhile; `None` when unknown.
    pub(super) fn group_kills(&self) -> Option<u64> {
        let after = self
            .found
            .after
            .group
            .as_ref()
            .or(self.found.before.group.as_ref())?
            .kills?;
        let before = self
            .found
            .before
            .group
            .as_ref()
            .and_then(|group| group.kills)
            .unwrap_or(0);
        Some(after.saturating_sub(before))
    }

    /// How many processes of the machine were killed for memory meanwhile.
    pub(super) fn machine_kills(&self) -> Option<u64> {
        Some(
            self.found
                .after
                .machine_kills?
                .saturating_sub(self.found.before.machine_kills?),
        )
    }

    /// Whether at least half of `limit` was resident by the kernel's count. Our choice: a limit of address space also
    /// counts memory that is reserved and never used, some hundred MiB of stacks and arenas.
    pub(super) fn had_come_near(&self, limit: Bytes) -> bool {
        self.found
            .peak_resident
            .is_some_and(|peak| peak.get() >= limit.get() / 2)
    }

    pub(super) fn group(&self) -> Option<&GroupCounters> {
        self.found
            .after
            .group
            .as_ref()
            .or(self.found.before.group.as_ref())
    }
}
