//! Input and output of audit rules.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{BufRead as _, BufReader, Read as _},
    path::{Path, PathBuf},
};

use serde::Serialize;

use crate::{
    ProbeRoot,
    board::Board,
    meminfo::Meminfo,
    source::{number, read_number, read_optional, words},
};
use cotenant_units::{Bytes, page};

/// One finding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Finding {
    /// Name of the rule: `zram_store`.
    pub rule: &'static str,
    /// Its severity.
    pub severity: Severity,
    /// The finding, with figures.
    pub text: String,
    /// Its cost.
    pub cost: Cost,
    /// Its remedy.
    pub remedy: &'static str,
}

/// Severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Severity {
    /// Information.
    Note,
    /// Costs memory or speed.
    Warning,
}

/// Cost of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase", tag = "kind", content = "value")]
pub enum Cost {
    /// None at present; a fault or missing visibility.
    Risk,
    /// Unusable memory.
    Memory(Bytes),
    /// Percent of the tokens per second.
    Speed(u64),
    /// Percent of the tokens per second while layers are streamed.
    Streaming(u64),
}

impl std::fmt::Display for Cost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Risk => f.write_str("no bytes now"),
            Self::Memory(bytes) => write!(f, "{bytes}"),
            Self::Speed(percent) => write!(f, "{percent} % of tokens/s"),
            Self::Streaming(percent) => write!(f, "{percent} % of tokens/s of streamed layers"),
        }
    }
}

/// Component of a Jetson's software.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Version {
    /// Its name: `CUDA`.
    pub name: &'static str,
    /// Installed version; `None` if no package is installed.
    pub found: Option<String>,
    /// Version for this L4T; `None` for an unknown L4T.
    pub expected: Option<String>,
    /// Whether both match; `None` if nothing is installed.
    pub belongs: Option<bool>,
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let expected = self.expected.as_deref().unwrap_or("not known here");
        match (&self.found, self.belongs) {
            (Some(found), Some(true)) => {
                write!(f, "{}: {found}, compatible ({expected})", self.name)
            }
            (Some(found), Some(false)) => {
                write!(f, "{}: {found}, not compatible ({expected})", self.name)
            }
            (Some(found), None) => write!(f, "{}: {found} ({expected})", self.name),
            (None, _) => write!(f, "{}: not installed; expected is {expected}", self.name),
        }
    }
}

/// Files read once, shared by all rules.
pub(super) struct Facts<'a> {
    pub(super) root: &'a ProbeRoot,
    pub(super) board: Board,
    pub(super) meminfo: Option<Meminfo>,
    pub(super) processes: Vec<Process>,
    pub(super) packages: BTreeMap<String, String>,
}

/// The properties of a process that rules use.
pub(super) struct Process {
    name: String,
    resident: Bytes,
}

pub(super) type Rule = (&'static str, fn(&Facts<'_>) -> Option<Found>);

/// Finding without the name of its rule.
pub(super) struct Found {
    pub(super) severity: Severity,
    pub(super) text: String,
    pub(super) cost: Cost,
    pub(super) remedy: &'static str,
}

pub(super) fn warning(text: String, cost: Cost, remedy: &'static str) -> Option<Found> {
    Some(Found {
        severity: Severity::Warning,
        text,
        cost,
        remedy,
    })
}

pub(super) fn note(text: String, cost: Cost, remedy: &'static str) -> Option<Found> {
    Some(Found {
        severity: Severity::Note,
        text,
        cost,
        remedy,
    })
}

impl<'a> Facts<'a> {
    pub(super) fn read(root: &'a ProbeRoot) -> Self {
        Self {
            root,
            board: Board::read(root),
            meminfo: Meminfo::read(root).ok(),
            processes: processes(root),
            packages: packages(root),
        }
    }

    /// Reads a small file below `/sys` as trimmed text; `None` if it is missing, unreadable, incomplete or empty.
    pub(super) fn sys(&self, path: &str) -> Option<String> {
        text_of(&self.root.sys(path))
    }

    pub(super) fn proc(&self, path: &str) -> Option<String> {
        text_of(&self.root.proc(path))
    }

    pub(super) fn sys_number(&self, path: &str) -> Option<u64> {
        read_number(&self.root.sys(path))
    }

    /// Lists a folder below `/sys`, sorted.
    pub(super) fn sys_names(&self, path: &str) -> Vec<String> {
        let entries = fs::read_dir(self.root.sys(path))
            .into_iter()
            .flatten()
            .flatten();
        let mut names: Vec<_> = entries
            .take(ENTRIES_MAX)
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .collect();
        names.sort_unstable();
        names
    }

    /// Returns the files that define the supervisor's unit, in systemd's order.
    pub(super) fn unit_files(&self) -> Vec<PathBuf> {
        let folders = [
            self.root.etc("systemd/system"),
            self.root.lib("systemd/system"),
        ];
        // systemd takes the unit from the first folder that contains it, and drop-ins from all folders.
        let unit = folders
            .iter()
            .map(|folder| folder.join(UNIT))
            .find(|unit| unit.exists());
        let mut beside: Vec<PathBuf> = folders
            .iter()
            .filter_map(|folder| fs::read_dir(folder.join(format!("{UNIT}.d"))).ok())
            .flat_map(|entries| {
                entries
                    .flatten()
                    .take(ENTRIES_MAX)
                    .map(|entry| entry.path())
            })
            .collect();
        // Sorted by name across folders; of files with one name, only that in the first folder counts.
        beside.sort_by(|one, other| one.file_name().cmp(&other.file_name()));
        beside.dedup_by(|later, first| later.file_name() == first.file_name());
        unit.into_iter().chain(beside).collect()
    }

    /// Returns the running processes with these names, each name once, and their total memory.
    pub(super) fn running(&self, names: &[&str]) -> Option<(String, Bytes)> {
        let mut found: Vec<&str> = Vec::new();
        let mut sum = Bytes::ZERO;
        for process in &self.processes {
            if names.contains(&process.name.as_str()) {
                sum = sum.saturating_add(process.resident);
                if !found.contains(&process.name.as_str()) {
                    found.push(&process.name);
                }
            }
        }
        (!found.is_empty()).then(|| (found.join(", "), sum))
    }

    pub(super) fn total(&self) -> Bytes {
        self.meminfo.map_or(Bytes::ZERO, |info| info.total)
    }
}

pub(super) fn text_of(path: &Path) -> Option<String> {
    let bytes = read_optional(path)?;
    let text = String::from_utf8_lossy(&bytes).trim().to_owned();
    (!text.is_empty()).then_some(text)
}

fn processes(root: &ProbeRoot) -> Vec<Process> {
    let entries = fs::read_dir(&root.proc).into_iter().flatten().flatten();
    entries
        .take(ENTRIES_MAX)
        .filter(|entry| number(entry.file_name().as_encoded_bytes()).is_some())
        .filter_map(|entry| {
            let name = text_of(&entry.path().join("comm"))?;
            let statm = read_optional(&entry.path().join("statm"));
            let pages = statm.and_then(|text| words(text.trim_ascii()).nth(1).and_then(number));
            Some(Process {
                name,
                resident: page().saturating_mul(pages.unwrap_or(0)),
            })
        })
        .collect()
}

/// Reads installed packages that rules use, with their versions, from dpkg's list.
fn packages(root: &ProbeRoot) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let Ok(file) = File::open(root.var("lib/dpkg/status")) else {
        return found;
    };
    let mut lines = BufReader::new(file.take(DPKG_MAX)).split(b'\n');
    let mut package = None;
    while let Some(Ok(line)) = lines.next() {
        let line = String::from_utf8_lossy(&line);
        if let Some(name) = line.strip_prefix("Package: ") {
            package = Some(name.trim().to_owned());
        } else if let Some(version) = line.strip_prefix("Version: ")
            && let Some(name) = package.take()
            && asks_for(&name)
        {
            found.insert(name, version.trim().to_owned());
        }
    }
    found
}

fn asks_for(package: &str) -> bool {
    matches!(package, "nvidia-l4t-core" | "nvidia-jetpack")
        || ["cuda-cudart-", "libnvinfer", "libcudnn"]
            .iter()
            .any(|name| package.starts_with(name))
}

const UNIT: &str = "cotenant.service";
/// Our choice: a board runs a few hundred processes.
const ENTRIES_MAX: usize = 20_000;
/// The list of a full desktop takes about 5 MB.
const DPKG_MAX: u64 = 64 << 20;
