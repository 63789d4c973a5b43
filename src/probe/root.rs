//! Root directory of all readings.

use std::path::{Path, PathBuf};

/// The folders that stand for `/proc`, `/sys`, `/etc` and `/var`.
///
/// ```
/// use cotenant::probe::ProbeRoot;
/// assert_eq!(ProbeRoot::default().proc("meminfo"), std::path::Path::new("/proc/meminfo"));
/// assert_eq!(ProbeRoot::at("/tmp/board".as_ref()).etc("nv_tegra_release"), std::path::Path::new("/tmp/board/etc/nv_tegra_release"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeRoot {
    /// Stands for `/proc`.
    pub proc: PathBuf,
    /// Stands for `/sys`.
    pub sys: PathBuf,
    /// Stands for `/etc`.
    pub etc: PathBuf,
    /// Stands for `/var`.
    pub var: PathBuf,
}

impl ProbeRoot {
    /// A tree with `proc`, `sys` and `etc` below `root`; any of them may be missing.
    #[must_use]
    pub fn at(root: &Path) -> Self {
        Self { proc: root.join("proc"), sys: root.join("sys"), etc: root.join("etc"), var: root.join("var") }
    }

    /// A path below `/proc`.
    #[must_use]
    pub fn proc(&self, path: impl AsRef<Path>) -> PathBuf {
        self.proc.join(path)
    }

    /// A path below `/sys`.
    #[must_use]
    pub fn sys(&self, path: impl AsRef<Path>) -> PathBuf {
        self.sys.join(path)
    }

    /// A path below `/etc`.
    #[must_use]
    pub fn etc(&self, path: impl AsRef<Path>) -> PathBuf {
        self.etc.join(path)
    }

    /// A path below `/var`.
    #[must_use]
    pub fn var(&self, path: impl AsRef<Path>) -> PathBuf {
        self.var.join(path)
    }

    /// The folder of a process.
    #[must_use]
    pub fn process(&self, pid: u32) -> PathBuf {
        self.proc.join(pid.to_string())
    }
}

impl Default for ProbeRoot {
    /// The machine itself.
    fn default() -> Self {
        Self::at(Path::new("/"))
    }
}
