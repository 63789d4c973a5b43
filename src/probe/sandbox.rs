//! Confinement of a running supervisor: capabilities, new privileges, system call filters.

use std::{fmt, fs};

use super::{
    ProbeRoot,
    source::{number, read_optional},
};

/// Status of a supervisor process, from `/proc/PID/status`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sandbox {
    /// Process id.
    pub pid: u32,
    /// Effective user id.
    pub uid: u32,
    /// `NoNewPrivs`: programs that it starts gain no rights.
    pub no_new_privileges: bool,
    /// Whether system calls are filtered (`Seccomp: 2`).
    pub filtered: bool,
    /// `CapEff`: effective capabilities.
    pub effective: u64,
    /// `CapBnd`: upper bound for it and its children.
    pub bounding: u64,
}

impl Sandbox {
    /// Returns the statuses of all running supervisors: processes named `cotenant` with the argument `serve`.
    pub fn of_daemons(root: &ProbeRoot) -> Vec<Self> {
        let entries = fs::read_dir(&root.proc).into_iter().flatten().flatten();
        let mut found: Vec<Self> = entries
            .take(ENTRIES_MAX)
            .filter_map(|entry| {
                number(entry.file_name().as_encoded_bytes()).and_then(|pid| u32::try_from(pid).ok())
            })
            .filter_map(|pid| {
                let of = |name: &str| read_optional(&root.process(pid).join(name));
                let serves = of("cmdline")?
                    .split(|byte| *byte == 0)
                    .skip(1)
                    .any(|word| word == b"serve");
                (of("comm")?.trim_ascii() == b"cotenant" && serves).then_some(())?;
                Self::parse(pid, &of("status")?)
            })
            .collect();
        found.sort_unstable_by_key(|daemon| daemon.pid);
        found
    }

    fn parse(pid: u32, status: &[u8]) -> Option<Self> {
        let text = String::from_utf8_lossy(status);
        let of = |key: &str| {
            text.lines()
                .find_map(|line| Some(line.strip_prefix(key)?.strip_prefix(':')?.trim()))
        };
        let mask = |key: &str| u64::from_str_radix(of(key)?, 16).ok();
        Some(Self {
            pid,
            uid: of("Uid")?.split_whitespace().nth(1)?.parse().ok()?,
            no_new_privileges: of("NoNewPrivs") == Some("1"),
            filtered: of("Seccomp") == Some("2"),
            effective: mask("CapEff")?,
            bounding: mask("CapBnd")?,
        })
    }
}

impl fmt::Display for Sandbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pid, uid, .. } = self;
        let gains = if self.no_new_privileges {
            "no new privileges"
        } else {
            "may gain privileges"
        };
        let calls = if self.filtered {
            "system calls filtered"
        } else {
            "system calls not filtered"
        };
        let (effective, bounding) = (named(self.effective), named(self.bounding));
        write!(
            f,
            "pid {pid}, uid {uid}: {gains}, {calls}, has {effective}, at most {bounding}"
        )
    }
}

/// Lists the names of capabilities in a mask.
fn named(mask: u64) -> String {
    let all = (1u64 << NAMES.len()) - 1;
    if mask & all == all {
        return "all capabilities".to_owned();
    }
    let names: Vec<String> = (0u32..64)
        .filter(|bit| mask & (1 << bit) != 0)
        .map(|bit| match NAMES.get(bit as usize) {
            Some(name) => format!("CAP_{name}"),
            None => format!("capability {bit}"),
        })
        .collect();
    if names.is_empty() {
        "no capabilities".to_owned()
    } else {
        names.join(" ")
    }
}

/// Names from `linux/capability.h`, ordered by number.
const NAMES: [&str; 41] = [
    "CHOWN",
    "DAC_OVERRIDE",
    "DAC_READ_SEARCH",
    "FOWNER",
    "FSETID",
    "KILL",
    "SETGID",
    "SETUID",
    "SETPCAP",
    "LINUX_IMMUTABLE",
    "NET_BIND_SERVICE",
    "NET_BROADCAST",
    "NET_ADMIN",
    "NET_RAW",
    "IPC_LOCK",
    "IPC_OWNER",
    "SYS_MODULE",
    "SYS_RAWIO",
    "SYS_CHROOT",
    "SYS_PTRACE",
    "SYS_PACCT",
    "SYS_ADMIN",
    "SYS_BOOT",
    "SYS_NICE",
    "SYS_RESOURCE",
    "SYS_TIME",
    "SYS_TTY_CONFIG",
    "MKNOD",
    "LEASE",
    "AUDIT_WRITE",
    "AUDIT_CONTROL",
    "SETFCAP",
    "MAC_OVERRIDE",
    "MAC_ADMIN",
    "SYSLOG",
    "WAKE_ALARM",
    "BLOCK_SUSPEND",
    "AUDIT_READ",
    "PERFMON",
    "BPF",
    "CHECKPOINT_RESTORE",
];

/// Our choice: a board runs a few hundred processes.
const ENTRIES_MAX: usize = 20_000;
