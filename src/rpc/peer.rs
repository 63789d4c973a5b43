//! Peer of a socket: credentials and process.

use std::{
    fs, io,
    mem::size_of,
    os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd},
    sync::Arc,
};

use nix::poll::{PollFd, PollFlags, PollTimeout};
use tokio::{
    io::{Interest, unix::AsyncFd},
    net::UnixStream,
};

/// Who is at the other end of a connection, by the credentials that the kernel keeps of it.
#[derive(Clone, Debug, Default)]
pub struct PeerInfo {
    /// User id.
    pub uid: u32,
    /// Primary group id.
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Arc<[u32]>,
    /// Process id; `None` where the process is not visible from here, as in another PID namespace.
    pub pid: Option<u32>,
    /// The process itself, which cannot be confused with a later one of the same id.
    pub process: Option<Arc<Process>>,
}

impl PeerInfo {
    /// Reads who is at the other end.
    ///
    /// # Errors
    ///
    /// When the kernel does not tell the user.
    pub fn of(stream: &UnixStream) -> io::Result<Self> {
        let credentials = stream.peer_cred()?;
        let pid = credentials
            .pid()
            .and_then(|pid| u32::try_from(pid).ok())
            .filter(|pid| *pid != 0);
        Ok(Self {
            uid: credentials.uid(),
            gid: credentials.gid(),
            groups: peer_groups(stream.as_raw_fd()).unwrap_or_default().into(),
            pid,
            process: pid
                .and_then(|pid| Process::of_peer(stream.as_raw_fd(), pid))
                .map(Arc::new),
        })
    }
}

/// A process that can be waited for, whoever started it.
#[derive(Debug)]
pub struct Process {
    pid: u32,
    pidfd: OwnedFd,
}

impl Process {
    /// The process that connected to the socket `fd`; `None` when it has ended already, or cannot be told from a later
    /// process with the same id.
    fn of_peer(fd: RawFd, pid: u32) -> Option<Self> {
        if let Some(pidfd) = peer_pidfd(fd) {
            return Some(Self { pid, pidfd });
        }
        // Before Linux 6.5 the socket does not give the process itself. A process that took over the id would have
        // started after the connection was made, that is, now.
        let now = boot_ticks()?;
        let pidfd = pidfd_open(pid).ok()?;
        let started = start_ticks(pid)?;
        (started <= now).then_some(Self { pid, pidfd })
    }

    /// The process that had this id at `then`, in [`boot_ticks`], and still has; `None` when it has ended.
    #[must_use]
    pub fn of_earlier_peer(pid: u32, then: u64) -> Option<Self> {
        let pidfd = pidfd_open(pid).ok()?;
        let started = start_ticks(pid)?;
        (started <= then && !is_over(&pidfd)).then_some(Self { pid, pidfd })
    }

    /// Process id.
    #[must_use]
    pub const fn pid(&self) -> u32 {
        self.pid
    }

    /// Whether the process has ended, reaped or not.
    pub(super) fn is_over(&self) -> bool {
        is_over(&self.pidfd)
    }

    /// Waits until the process has ended.
    ///
    /// # Errors
    ///
    /// When the process cannot be watched, for want of file descriptors.
    pub async fn ended(&self) -> io::Result<()> {
        let pidfd = self.pidfd.try_clone()?;
        // SAFETY: an `OwnedFd` keeps its one descriptor open and the same until it is dropped, together with the `AsyncFd`.
        let pidfd = unsafe { AsyncFd::register_with_interest(pidfd, Interest::READABLE) }?;
        let _ready = pidfd.readable().await?;
        Ok(())
    }
}

/// Supplementary groups of the peer (`SO_PEERGROUPS`, Linux 4.13).
fn peer_groups(fd: RawFd) -> Option<Vec<u32>> {
    // Linux allows 65536 groups; who has more than 1024 is judged by user and primary group.
    let mut groups = vec![0u32; 1024];
    let bytes = socket_option(fd, libc::SO_PEERGROUPS, &mut groups)?;
    groups.truncate(bytes / size_of::<u32>());
    Some(groups)
}

/// The peer's process (`SO_PEERPIDFD`, Linux 6.5).
fn peer_pidfd(fd: RawFd) -> Option<OwnedFd> {
    let mut pidfd = [-1];
    let bytes = socket_option(fd, libc::SO_PEERPIDFD, &mut pidfd)?;
    let [pidfd] = pidfd;
    if bytes != size_of::<RawFd>() || pidfd < 0 {
        return None;
    }
    // SAFETY: the kernel has just made this descriptor for us, and nobody else knows its number.
    Some(unsafe { OwnedFd::from_raw_fd(pidfd) })
}

/// Reads a socket option into `values`; returns the bytes written.
fn socket_option<T: Copy>(fd: RawFd, option: libc::c_int, values: &mut [T]) -> Option<usize> {
    let mut length = libc::socklen_t::try_from(size_of_val(values)).ok()?;
    // SAFETY: `values` is writable for `length` bytes, the kernel writes at most that many, and every bit pattern is a
    // value of the integer types that this file passes.
    let result = unsafe {
        libc::getsockopt(
            fd,
            libc::SOL_SOCKET,
            option,
            values.as_mut_ptr().cast::<libc::c_void>(),
            &raw mut length,
        )
    };
    (result == 0).then(|| usize::try_from(length).ok()).flatten()
}

/// Opens a process by its id.
fn pidfd_open(pid: u32) -> io::Result<OwnedFd> {
    // SAFETY: pidfd_open takes two integers and touches no memory of ours.
    let result = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    match RawFd::try_from(result) {
        // SAFETY: the kernel has just made this descriptor for us, and nobody else knows its number.
        Ok(fd) if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Whether the process of a pidfd has ended, reaped or not.
fn is_over(pidfd: &OwnedFd) -> bool {
    let mut poll = [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)];
    nix::poll::poll(&mut poll, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
}

/// When a process started, in clock ticks since boot: field 22 of `/proc/[pid]/stat` (proc(5)).
fn start_ticks(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold anything, parentheses included; after the last one comes field 3.
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_ascii_whitespace().nth(22 - 3)?.parse().ok()
}

/// The present, in clock ticks since boot, as `/proc/PID/stat` counts.
#[must_use]
pub fn boot_ticks() -> Option<u64> {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is a valid timespec to write to.
    let result = unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &raw mut now) };
    // SAFETY: sysconf takes an integer and touches no memory of ours.
    let per_second = u64::try_from(unsafe { libc::sysconf(libc::_SC_CLK_TCK) }).ok()?;
    let seconds = u64::try_from(now.tv_sec).ok()?;
    let nanos = u64::try_from(now.tv_nsec).ok()?;
    (result == 0).then_some(seconds * per_second + nanos * per_second / 1_000_000_000)
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio, id};

    use super::*;

    #[tokio::test]
    async fn the_other_end_of_a_socket_pair_is_this_process() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let peer = PeerInfo::of(&ours).unwrap();
        assert_eq!(peer.pid, Some(id()));
        assert_eq!(peer.process.unwrap().pid(), id());
    }

    #[tokio::test]
    async fn the_end_of_a_process_is_noticed() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let process = Process {
            pid: child.id(),
            pidfd: pidfd_open(child.id()).unwrap(),
        };
        assert!(start_ticks(child.id()).unwrap() <= boot_ticks().unwrap());
        drop(child.stdin.take());
        process.ended().await.unwrap();
        assert!(child.try_wait().unwrap().is_some());
    }

    #[test]
    fn a_process_is_known_again_unless_it_ended_or_its_id_passed_on() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let (pid, now) = (child.id(), boot_ticks().unwrap());
        assert!(Process::of_earlier_peer(pid, now).is_some());
        let before = start_ticks(pid).unwrap() - 1;
        assert!(Process::of_earlier_peer(pid, before).is_none(), "it came later");
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(Process::of_earlier_peer(pid, now).is_none());
    }

    #[test]
    fn a_process_that_is_gone_cannot_be_opened() {
        let mut child = Command::new("true").spawn().unwrap();
        let pid = child.id();
        child.wait().unwrap();
        assert!(pidfd_open(pid).is_err());
    }
}
