//! Evidence of a death, as plain values.

use std::{collections::BTreeMap, time::Duration};

use super::kernel_log::KernelLogTail;
use crate::report::{ExitStatus, Intent};
use cotenant_units::Bytes;

/// All evidence about the end of one process.
#[derive(Clone, Debug)]
pub(super) struct Evidence {
    pub(super) worker: String,
    pub(super) pid: u32,
    pub(super) status: ExitStatus,
    pub(super) asked: Option<Asked>,
    pub(super) found: Gathered,
    /// `MemAvailable` at its last measurement alive, or at its start.
    pub(super) available: Option<Bytes>,
    pub(super) lines: Vec<String>,
    /// Number of last lines written within [`RECENT`] of its end.
    pub(super) recent: usize,
    pub(super) lived: Duration,
    pub(super) was_ready: bool,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Gathered {
    /// Name as known to the kernel, at most 15 characters; empty if not read in time.
    pub(super) comm: String,
    pub(super) log: KernelLogTail,
    /// Whether its id equals that in the kernel's log.
    pub(super) pid_is_global: bool,
    pub(super) before: Counters,
    pub(super) after: Counters,
    pub(super) limits: Limits,
    pub(super) cpu_time: Option<Duration>,
    pub(super) peak_resident: Option<Bytes>,
    pub(super) available_before: Option<Bytes>,
    pub(super) available: Option<Bytes>,
    /// Running programs that kill others when memory is short.
    pub(super) killers: Vec<String>,
    /// For a missing library: files of other versions.
    pub(super) other_versions: Vec<String>,
    /// Reason why the kernel would not execute the program's file.
    pub(super) unfit_program: Option<String>,
    /// Whether the kernel refuses to overcommit (`vm.overcommit_memory` is 2).
    pub(super) strict_overcommit: bool,
    /// Known fault of the board's L4T release; `None` on other machines.
    pub(super) l4t_fault: Option<&'static str>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Asked {
    pub(super) intent: Intent,
    /// Reason in words, with figures; may be empty.
    pub(super) why: String,
    /// Whether SIGKILL was sent as well.
    pub(super) killed: bool,
}

/// Kernel counters at one time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Counters {
    /// `oom_kill` of the machine.
    pub(super) machine_kills: Option<u64>,
    /// Group of the process, unless shared with the supervisor.
    pub(super) group: Option<GroupCounters>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct GroupCounters {
    /// Its path below the mount.
    pub(super) path: String,
    /// Number of its processes killed for memory.
    pub(super) kills: Option<u64>,
    /// Number of times that it reached its limit.
    pub(super) hits: Option<u64>,
    pub(super) limit: Option<Bytes>,
}

/// Finite soft resource limits of the process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Limits {
    /// By the name in `/proc/PID/limits`: `Max address space`, in that file's unit.
    pub(super) finite: BTreeMap<String, u64>,
    /// Hard limit of processor time in seconds; exceeding it causes SIGKILL.
    pub(super) cpu_hard: Option<u64>,
}

impl Limits {
    pub(super) fn of(&self, name: &str) -> Option<u64> {
        self.finite.get(name).copied()
    }

    /// Renders the limits in bytes and seconds. Values common to all processes are omitted.
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

/// Greatest age of a line that explains an end. Our choice: programs take some seconds to unload after their last
/// error, and a warning a minute old is not it.
pub(super) const RECENT: Duration = Duration::from_secs(10);

pub(super) const ADDRESS_SPACE: &str = "Max address space";
pub(super) const DATA: &str = "Max data size";
pub(super) const LOCKED: &str = "Max locked memory";
pub(super) const CPU_TIME: &str = "Max cpu time";

impl Evidence {
    /// Returns lines written shortly before its end; earlier ones are unrelated.
    pub(super) fn recent_lines(&self) -> &[String] {
        let first = self.lines.len().saturating_sub(self.recent);
        self.lines.get(first..).unwrap_or_default()
    }

    /// Returns whether the kernel's counters exclude a kill for memory, despite a record.
    pub(super) fn counters_deny_kills(&self, memcg: bool) -> bool {
        self.machine_kills() == Some(0) || (memcg && self.group_kills() == Some(0))
    }

    /// Returns how many processes of its own group were killed for memory since the start; `None` if unknown.
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

    /// Returns how many processes of the machine were killed for memory since the start.
    pub(super) fn machine_kills(&self) -> Option<u64> {
        Some(
            self.found
                .after
                .machine_kills?
                .saturating_sub(self.found.before.machine_kills?),
        )
    }

    /// Returns whether the kernel counted at least half of `limit` as resident. Our choice: an address space limit
    /// includes memory reserved but never used, some hundred MiB of stacks and arenas.
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
