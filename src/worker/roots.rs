//! Where the figures of the kernel are read.

use std::path::PathBuf;

/// The folders and files that stand for those of the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelRoots {
    /// In place of `/proc`.
    pub proc: PathBuf,
    /// In place of `/sys`, where the GPU memory of a Jetson is counted.
    pub sys: PathBuf,
    /// In place of `/sys/fs/cgroup`.
    pub cgroup: PathBuf,
    /// In place of `/dev/kmsg`.
    pub kernel_log: PathBuf,
}

impl Default for KernelRoots {
    fn default() -> Self {
        Self {
            proc: PathBuf::from("/proc"),
            sys: PathBuf::from("/sys"),
            cgroup: PathBuf::from("/sys/fs/cgroup"),
            kernel_log: PathBuf::from("/dev/kmsg"),
        }
    }
}
