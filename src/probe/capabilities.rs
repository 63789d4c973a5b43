//! Capabilities of this machine and their consequences.

use std::fmt;

use super::{
    ProbeError, ProbeRoot,
    board::{Board, L4tRelease},
    cgroup::{Cgroup, CgroupVersion, watch::GroupWatch},
    meminfo::Meminfo,
    nvmap::{self, Nvmap},
    processes::ProcessMemory,
    psi::{PsiRung, PsiWatch},
    source::{lines, read_optional},
    swap, vmstat,
};
use cotenant_units::Bytes;

/// Degree to which a capability is available.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Presence {
    /// Not available.
    Absent,
    /// Partly available.
    Limited,
    /// Available.
    Present,
}

impl fmt::Display for Presence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Absent => "absent",
            Self::Limited => "limited",
            Self::Present => "present",
        })
    }
}

/// One possible capability of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capability {
    /// Its name, also in JSON: `psi`, `cma`.
    pub name: &'static str,
    /// Its availability.
    pub presence: Presence,
    /// The finding, or the reason of its absence.
    pub detail: String,
    /// Consequence for the supervisor.
    pub consequence: String,
}

/// Capabilities of this machine, in a fixed order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// One entry per capability, including absent ones.
    pub items: Vec<Capability>,
    /// Known problems, each with its remedy.
    pub warnings: Vec<String>,
}

impl Capabilities {
    /// Probes everything once. Arms a pressure trigger temporarily.
    pub fn probe(root: &ProbeRoot) -> Self {
        let board = Board::read(root);
        let meminfo = Meminfo::read(root);
        let mut found = Self::default();
        found.memory(root, &meminfo);
        found.cma(&meminfo);
        found.psi(root);
        found.vmstat(root);
        found.process_memory(root);
        found.cgroup(root);
        found.oom_score(root);
        found.nvmap(root, &board);
        found.swap(root, meminfo.as_ref().ok());
        found.board(&board);
        found
    }

    /// Returns the capabilities shown by files copied from another machine. Missing files are not reported, nor are
    /// properties that only a process there could test: its rights, its control group, PSI triggers.
    pub fn of_copy(root: &ProbeRoot) -> Self {
        let board = Board::read(root);
        let meminfo = Meminfo::read(root);
        let mut found = Self::default();
        if let Ok(info) = &meminfo {
            let detail = format!("{} in all, {} available", info.total, info.available);
            found.add(
                "memory",
                Presence::Present,
                detail,
                "the budget is about all of it unless `budget.total` says otherwise",
            );
            found.cma(&meminfo);
        }
        let mut unknown = Vec::new();
        let mut look = |name, is_there: bool, look: &mut dyn FnMut(&mut Self)| {
            if is_there {
                look(&mut found);
            } else {
                unknown.push(name);
            }
        };
        look(
            "psi",
            root.proc("pressure/memory").is_file(),
            &mut |found| {
                found.add(
                    "psi",
                    Presence::Present,
                    "counted",
                    "whether a trigger can be armed shows on the machine itself",
                );
            },
        );
        look("vmstat", root.proc("vmstat").is_file(), &mut |found| {
            found.vmstat(root);
        });
        look("nvmap", root.sys("kernel/debug").is_dir(), &mut |found| {
            found.nvmap(root, &board);
        });
        look("swap", root.proc("swaps").is_file(), &mut |found| {
            found.swap(root, meminfo.as_ref().ok());
        });
        let knows_board =
            board.l4t.is_some() || board.model.is_some() || !board.compatible.is_empty();
        look("board", knows_board, &mut |found| found.board(&board));
        if !unknown.is_empty() {
            found.warnings.push(format!(
                "not in this folder, therefore unknown: {}",
                unknown.join(", ")
            ));
        }
        found
    }

    /// Returns a line per capability, for people: `psi: trigger, 2 s window; …`.
    pub fn lines(&self) -> Vec<String> {
        let line =
            |item: &Capability| format!("{}: {}; {}", item.name, item.detail, item.consequence);
        self.items
            .iter()
            .map(line)
            .chain(self.warnings.iter().cloned())
            .collect()
    }

    /// Returns the entry of this name.
    pub fn get(&self, name: &str) -> Option<&Capability> {
        self.items.iter().find(|item| item.name == name)
    }

    fn add(
        &mut self,
        name: &'static str,
        presence: Presence,
        detail: impl Into<String>,
        consequence: impl Into<String>,
    ) {
        self.items.push(Capability {
            name,
            presence,
            detail: detail.into(),
            consequence: consequence.into(),
        });
    }

    fn memory(&mut self, root: &ProbeRoot, meminfo: &Result<Meminfo, ProbeError>) {
        match meminfo {
            Ok(info) => match limit(root).filter(|(limit, _)| *limit < info.total) {
                Some((limit, group)) => self.add(
                    "memory",
                    Presence::Limited,
                    format!(
                        "{} in all, {} available; limited to {limit} by the control group `{group}`",
                        info.total, info.available
                    ),
                    format!("the budget is about {limit} unless `budget.total` says otherwise"),
                ),
                None => self.add(
                    "memory",
                    Presence::Present,
                    format!("{} in all, {} available", info.total, info.available),
                    "the budget is about all of it unless `budget.total` says otherwise",
                ),
            },
            Err(error) => {
                let cause = std::error::Error::source(error).map_or_else(String::new, |cause| format!(": {cause}"));
                self.add("memory", Presence::Absent, format!("{error}{cause}"), "the supervisor cannot run");
            }
        }
    }

    fn cma(&mut self, meminfo: &Result<Meminfo, ProbeError>) {
        let (total, free) = match meminfo {
            Ok(info) => (info.cma_total, info.cma_free.unwrap_or_default()),
            Err(_) => (None, Bytes::ZERO),
        };
        match total {
            Some(total) if total > Bytes::ZERO => self.add(
                "cma",
                Presence::Present,
                format!("{total}, {free} of it free"),
                "its free part counts as available and cannot serve the GPU: it is subtracted",
            ),
            Some(_) => self.add(
                "cma",
                Presence::Absent,
                "switched off (`cma=0`)",
                CMA_ABSENT,
            ),
            None => self.add(
                "cma",
                Presence::Absent,
                "the kernel was built without it",
                CMA_ABSENT,
            ),
        }
    }

    fn psi(&mut self, root: &ProbeRoot) {
        let watch = PsiWatch::arm(root);
        let presence = match watch.rung {
            PsiRung::Absent => Presence::Absent,
            PsiRung::ReadOnly | PsiRung::TriggerTwoSeconds => Presence::Limited,
            PsiRung::TriggerOneSecond => Presence::Present,
        };
        let detail = match (watch.rung, watch.reason) {
            (PsiRung::Absent, Some(reason)) => reason,
            (rung, Some(reason)) => format!("{rung} ({reason})"),
            (rung, None) => rung.to_string(),
        };
        self.add("psi", presence, detail, watch.rung.latency());
    }

    fn vmstat(&mut self, root: &ProbeRoot) {
        let stat = vmstat::read(root).unwrap_or_default();
        let counters = [
            ("refaults", stat.refaults_file),
            ("direct scans", stat.pgscan_direct),
            ("stalls", stat.allocstalls),
            ("swap-ins", stat.swap_ins),
            ("OOM kills", stat.oom_kills),
        ];
        let missing: Vec<&str> = counters
            .iter()
            .filter(|(_, value)| value.is_none())
            .map(|(name, _)| *name)
            .collect();
        if missing.is_empty() {
            self.add(
                "vmstat",
                Presence::Present,
                "refaults, direct scans, stalls, swap-ins, OOM kills",
                "thrashing is detected early",
            );
        } else {
            let presence = if missing.len() == counters.len() {
                Presence::Absent
            } else {
                Presence::Limited
            };
            self.add(
                "vmstat",
                presence,
                format!("without {}", missing.join(", ")),
                "without a counter, thrashing is detected by watermarks alone",
            );
        }
    }

    fn process_memory(&mut self, root: &ProbeRoot) {
        match ProcessMemory::read(&root.proc, std::process::id()) {
            Ok(Some(memory)) => self.add(
                "smaps_rollup",
                Presence::Present,
                format!("this process uses {} PSS", memory.pss),
                "workers are measured by their share of shared pages",
            ),
            Ok(None) | Err(_) => self.add(
                "smaps_rollup",
                Presence::Absent,
                "the kernel has none, or denies reading it",
                "workers are measured by RSS, which counts shared pages in full",
            ),
        }
    }

    fn cgroup(&mut self, root: &ProbeRoot) {
        let Some(group) = Cgroup::own(root) else {
            self.add(
                "cgroup",
                Presence::Absent,
                "no memory controller is mounted",
                "workers cannot be limited by the kernel and are measured by PSS alone",
            );
            return;
        };
        let version = match group.version() {
            CgroupVersion::V1 => 1,
            CgroupVersion::V2 => 2,
        };
        let limit = match limit(root) {
            Some((limit, group)) => format!("limit {limit} of `{group}`"),
            None => "no limit".to_owned(),
        };
        self.add(
            "cgroup",
            if version == 2 {
                Presence::Present
            } else {
                Presence::Limited
            },
            format!("version {version}, {limit}"),
            "a worker's page cache is seen with it; GPU memory of a Jetson is in no control group",
        );
    }

    fn oom_score(&mut self, root: &ProbeRoot) {
        match effective_capabilities(root) {
            Some(set) if set & (1 << CAP_SYS_RESOURCE) != 0 => self.add(
                "oom_score_adj",
                Presence::Present,
                "CAP_SYS_RESOURCE is held",
                "the kernel can be made to spare the supervisor",
            ),
            _ => self.add(
                "oom_score_adj",
                Presence::Limited,
                "CAP_SYS_RESOURCE is not held",
                "workers can be offered to the OOM killer, but the supervisor cannot be spared",
            ),
        }
    }

    fn nvmap(&mut self, root: &ProbeRoot, board: &Board) {
        let Some(nvmap) = Nvmap::find(root) else {
            if board.is_jetson() && board.l4t.is_none_or(L4tRelease::uses_nvmap) {
                self.add(
                    "nvmap",
                    Presence::Absent,
                    "`/sys/kernel/debug/nvmap` cannot be read: debugfs belongs to root and may not be mounted",
                    "GPU memory is inferred from what no process accounts for; up to an eighth of the memory may hide \
                     in the page pool",
                );
            } else {
                self.add(
                    "nvmap",
                    Presence::Absent,
                    "not a Jetson with nvmap",
                    "GPU memory is not seen per process",
                );
            }
            return;
        };
        let show = |bytes: Option<Bytes>| {
            bytes.map_or_else(|| "unknown".to_owned(), |bytes| bytes.to_string())
        };
        let (total, pool) = (nvmap.total(), nvmap.pool());
        let whole = total.is_some()
            && pool.is_some()
            && nvmap
                .clients()
                .is_some_and(|clients| clients.total.is_some());
        let emptied = if nvmap::may_empty_pool(root) {
            "which is emptied where the processor runs short"
        } else {
            "which may not be emptied from here"
        };
        let (presence, consequence) = if whole {
            (
                Presence::Present,
                "GPU memory is measured per process, as is the page pool",
            )
        } else {
            (
                Presence::Limited,
                "unreadable counters count as zero: GPU memory of workers as unaccounted, the page pool as used",
            )
        };
        self.add(
            "nvmap",
            presence,
            format!(
                "{} allocated, {} in the page pool, {emptied}",
                show(total),
                show(pool.map(|pool| pool.bytes()))
            ),
            consequence,
        );
    }

    fn swap(&mut self, root: &ProbeRoot, meminfo: Option<&Meminfo>) {
        let devices = swap::devices(root);
        let total: Bytes = devices
            .iter()
            .map(|device| device.size)
            .fold(Bytes::ZERO, Bytes::saturating_add);
        let zram: Bytes = devices
            .iter()
            .filter(|device| device.is_zram())
            .map(|device| device.size)
            .fold(Bytes::ZERO, Bytes::saturating_add);
        if devices.is_empty() {
            self.add(
                "swap",
                Presence::Absent,
                "no device",
                "memory ends where it ends; nothing of a worker can be pushed out",
            );
            return;
        }
        let store = swap::zram_store(root);
        let cost = match store {
            Some(store) => format!(", which costs {store} now"),
            None if zram > Bytes::ZERO => ", at an unreadable cost".to_owned(),
            None => String::new(),
        };
        self.add(
            "swap",
            Presence::Present,
            format!(
                "{} devices, {total}, of it zram {zram}{cost}",
                devices.len()
            ),
            "swap makes room by pushing out ASR and TTS; GPU memory stays",
        );
        // The stock script configures half of the memory as zram.
        if let Some(info) = meminfo
            && zram >= info.total.per_mille(ZRAM_STOCK_PER_MILLE)
        {
            self.warnings.push(format!(
                "zram of {zram} is {}% of the memory; when full it is the second largest tenant: disable \
                 `nvzramconfig` and use a swap file on NVMe",
                zram.get().saturating_mul(100) / info.total.get().max(1)
            ));
        }
    }

    fn board(&mut self, board: &Board) {
        if !board.is_jetson() {
            self.add(
                "board",
                Presence::Absent,
                board
                    .model
                    .clone()
                    .unwrap_or_else(|| "not a Jetson: no device tree of NVIDIA, no L4T".to_owned()),
                "features of a Jetson (CMA, nvmap, its page pool) are not exercised here",
            );
            return;
        }
        let l4t = board
            .l4t
            .map_or_else(|| "L4T unknown".to_owned(), |l4t| format!("L4T {l4t}"));
        let model = board.model.as_deref().unwrap_or("unknown model");
        let mode = if board.is_super() { ", super mode" } else { "" };
        self.add(
            "board",
            Presence::Present,
            format!("{model}, {l4t}{mode}"),
            "limits known for this board apply",
        );
        if let Some(warning) = board.l4t.and_then(L4tRelease::warning) {
            self.warnings.push(warning.to_owned());
        }
    }
}

/// Returns the tightest limit of the enclosing control groups, and the path of the group.
fn limit(root: &ProbeRoot) -> Option<(Bytes, String)> {
    let mut groups = GroupWatch::open(root);
    let limit = groups.read()?.limit;
    Some((limit, groups.tightest()?.to_owned()))
}

/// Returns the effective capabilities of this process as a bit mask.
pub(super) fn effective_capabilities(root: &ProbeRoot) -> Option<u64> {
    let status = read_optional(&root.proc("self/status"))?;
    lines(&status).find_map(|(_, line)| {
        let digits = std::str::from_utf8(line.strip_prefix(b"CapEff:")?).ok()?;
        u64::from_str_radix(digits.trim(), 16).ok()
    })
}

/// Bit of CAP_SYS_RESOURCE (capabilities(7)).
pub(super) const CAP_SYS_RESOURCE: u32 = 24;

/// Just below the half that `nvzramconfig` configures, since it rounds down per CPU.
const ZRAM_STOCK_PER_MILLE: u32 = 480;

const CMA_ABSENT: &str = "nothing is subtracted from the available memory";
