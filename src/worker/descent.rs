//! Adoption of processes whose parent has ended (`PR_SET_CHILD_SUBREAPER`).
//!
//! A worker adopts its own descendants, so a process that forks twice and begins its own session stays below the
//! worker: it is measured with it, and ends with it. When the worker has ended they become children of this process,
//! which has started none of them: a child that was never started here has outlived its worker.

use std::{
    collections::BTreeSet,
    io,
    path::Path,
    process::{Child, Command},
    sync::{Mutex, MutexGuard, OnceLock},
};

use cotenant_probe::processes::{self, ProcessStat};
use cotenant_units::lock::locked;

/// Has the kernel give the calling process those of its descendants whose parent ends. Kept over `execve`, not by
/// children. Async-signal-safe.
///
/// # Errors
/// Before Linux 3.4.
pub fn adopt_descendants() -> io::Result<()> {
    // SAFETY: numbers only.
    if unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) } == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Starts a child, known as one from the first moment.
pub(super) fn start(command: &mut Command) -> io::Result<Child> {
    let mut children = children();
    let child = command.spawn()?;
    children.insert(child.id());
    Ok(child)
}

/// Forgets a child that has been reaped.
pub(super) fn forget(pid: libc::pid_t) {
    children().remove(&pid.unsigned_abs());
}

/// Whether a process is a child that this process has not started, and not older than `since`.
///
/// A child in our own process group is one of ours: workers and their children have other groups.
pub(super) fn is_adopted(process: &ProcessStat, since: u64) -> bool {
    process.parent == std::process::id()
        && process.start_ticks >= since
        && process.group != own_group()
        && only_ours()
        && !children().contains(&process.pid)
}

/// Makes this process adopt the leftover processes of workers.
pub(super) fn prepare() {
    if let Err(error) = adopt_descendants() {
        tracing::warn!(%error, "what workers leave behind is found by its environment only");
    }
    only_ours();
}

/// Whether all children that this process adopts come from its workers: not if it is the first process of a container,
/// nor if the program that became this one had children.
fn only_ours() -> bool {
    static ONLY: OnceLock<bool> = OnceLock::new();
    *ONLY.get_or_init(|| {
        let us = std::process::id();
        let inherited =
            |process: &ProcessStat| process.parent == us && process.group != own_group();
        us != 1 && !processes::all(Path::new("/proc")).iter().any(inherited)
    })
}

fn own_group() -> u32 {
    nix::unistd::getpgrp().as_raw().unsigned_abs()
}

/// The children that this process has started and not reaped; locked while one is started.
fn children() -> MutexGuard<'static, BTreeSet<u32>> {
    static CHILDREN: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());
    locked(&CHILDREN)
}
