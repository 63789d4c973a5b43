//! Adoption of processes whose parent has ended (`PR_SET_CHILD_SUBREAPER`).
//!
//! A worker adopts its own descendants, so a process that forks twice and starts its own session stays below the
//! worker: it is measured with it, and ends with it. When the worker ends, its descendants become children of this
//! process. A child that this process has not started has therefore outlived its worker.

use std::{
    collections::BTreeSet,
    io,
    path::Path,
    process::{Child, Command},
    sync::{Mutex, MutexGuard, OnceLock},
};

use cotenant_probe::processes::{self, ProcessStat};
use cotenant_units::lock::locked;

/// Makes the calling process adopt its descendants when their parent ends. Survives `execve`; not inherited by
/// children. Async-signal-safe.
///
/// # Errors
/// Before Linux 3.4.
pub fn adopt_descendants() -> io::Result<()> {
    Ok(nix::sys::prctl::set_child_subreaper(true)?)
}

/// Starts a child and registers it before it can be mistaken for an adopted one.
pub(super) fn start(command: &mut Command) -> io::Result<Child> {
    let mut children = children();
    let child = command.spawn()?;
    children.insert(child.id());
    Ok(child)
}

/// Unregisters a child that has been reaped.
pub(super) fn forget(pid: libc::pid_t) {
    children().remove(&pid.unsigned_abs());
}

/// Returns whether a process is a child that this process has not started, and is not older than `since`.
///
/// Children in our own process group are excluded: workers and their children have other groups.
pub(super) fn is_adopted(process: &ProcessStat, since: u64) -> bool {
    process.parent == std::process::id()
        && process.start_ticks >= since
        && process.group != own_group()
        && only_ours()
        && !children().contains(&process.pid)
}

/// Makes this process adopt leftover processes of workers.
pub(super) fn prepare() {
    if let Err(error) = adopt_descendants() {
        tracing::warn!(%error, "leftover processes of workers are found by their environment only");
    }
    only_ours();
}

/// Returns whether all children that this process adopts come from its workers: not if it is the first process of a
/// container, nor if the program that executed this one had children.
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

/// Locks the set of children started and not yet reaped; held while one is started.
fn children() -> MutexGuard<'static, BTreeSet<u32>> {
    static CHILDREN: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());
    locked(&CHILDREN)
}
