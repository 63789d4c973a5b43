//! Root directory of all readings.

use std::path::{Path, PathBuf};

/// Folders used as `/proc`, `/sys`, `/dev`, `/etc`, `/var` and `/lib`.
///
/// ```
/// use cotenant_probe::ProbeRoot;
/// assert_eq!(ProbeRoot::default().proc("meminfo"), std::path::Path::new("/proc/meminfo"));
/// assert_eq!(ProbeRoot::at("/tmp/board".as_ref()).etc("nv_tegra_release"), std::path::Path::new("/tmp/board/etc/nv_tegra_release"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeRoot {
    /// `/proc`.
    pub proc: PathBuf,
    /// `/sys`.
    pub sys: PathBuf,
    /// `/dev`, with the kernel's log.
    pub dev: PathBuf,
    /// `/etc`.
    pub etc: PathBuf,
    /// `/var`.
    pub var: PathBuf,
    /// `/lib`, with systemd's units.
    pub lib: PathBuf,
}

impl ProbeRoot {
    /// Uses `proc`, `sys`, `dev`, `etc`, `var` and `lib` (or `usr/lib`) below `root`; any of them may be missing.
    pub fn at(root: &Path) -> Self {
        let lib = Some(root.join("lib"))
            .filter(|lib| lib.is_dir())
            .unwrap_or_else(|| root.join("usr/lib"));
        let [proc, sys, dev, etc, var] =
            ["proc", "sys", "dev", "etc", "var"].map(|name| root.join(name));
        Self {
            proc,
            sys,
            dev,
            etc,
            var,
            lib,
        }
    }

    /// Returns whether it is the machine itself rather than a partial copy.
    pub fn is_live(&self) -> bool {
        self.proc == Path::new("/proc")
    }

    /// Returns a path below `/proc`.
    pub fn proc(&self, path: impl AsRef<Path>) -> PathBuf {
        self.proc.join(path)
    }

    /// Returns a path below `/sys`.
    pub fn sys(&self, path: impl AsRef<Path>) -> PathBuf {
        self.sys.join(path)
    }

    /// Returns a path below `/etc`.
    pub fn etc(&self, path: impl AsRef<Path>) -> PathBuf {
        self.etc.join(path)
    }

    /// Returns a path below `/var`.
    pub fn var(&self, path: impl AsRef<Path>) -> PathBuf {
        self.var.join(path)
    }

    /// Returns a path below `/lib`.
    pub fn lib(&self, path: impl AsRef<Path>) -> PathBuf {
        self.lib.join(path)
    }

    /// Returns the folder of a process.
    pub fn process(&self, pid: u32) -> PathBuf {
        self.proc.join(pid.to_string())
    }
}

impl Default for ProbeRoot {
    /// Uses the folders of the machine itself.
    fn default() -> Self {
        Self::at(Path::new("/"))
    }
}
