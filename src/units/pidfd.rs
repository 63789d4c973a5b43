//! Descriptors of processes.

use std::{
    io,
    os::fd::{AsFd as _, FromRawFd as _, OwnedFd, RawFd},
};

use nix::{
    errno::Errno,
    libc,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};

/// Opens a descriptor of the process with this id, close-on-exec; it becomes readable when the process has ended.
///
/// # Errors
/// If there is no such process, or no descriptor is left.
pub fn open(pid: u32) -> io::Result<OwnedFd> {
    // SAFETY: passes two integers; the flags must be 0.
    let fd = Errno::result(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) })?;
    let fd = RawFd::try_from(fd).map_err(io::Error::other)?;
    // SAFETY: the kernel has just created this descriptor, and no other code uses it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Whether the process of a descriptor has ended, reaped or not.
pub fn is_over(pidfd: &OwnedFd) -> bool {
    let mut asked = [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)];
    poll(&mut asked, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
}
