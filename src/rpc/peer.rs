//! Peer of a socket: credentials and process.

use std::{
    io,
    mem::size_of,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
    sync::Arc,
};

use nix::poll::{PollFd, PollFlags, PollTimeout};
use tokio::{
    io::{Interest, unix::AsyncFd},
    net::UnixStream,
};

#[cfg(doc)]
use cotenant_probe::processes::boot_ticks;
use cotenant_probe::{ProbeRoot, processes::ProcessStat};
use cotenant_units::pidfd;

/// The process at the other end of a connection, by the kernel's credentials.
#[derive(Clone, Debug, Default)]
pub struct PeerInfo {
    /// User id.
    pub uid: u32,
    /// Primary group id.
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Arc<[u32]>,
    /// Process id; `None` if the process is not visible, for example in another PID namespace.
    pub pid: Option<u32>,
    /// Whether it came through a path socket, whose file mode restricts callers.
    pub through_path: bool,
    /// The process itself, protected against reuse of its id.
    pub process: Option<Arc<Process>>,
}

impl PeerInfo {
    /// Reads the credentials of a connection that was already waiting at `waiting_at`, in [`boot_ticks`], a time read
    /// before it was accepted.
    ///
    /// # Errors
    /// If the kernel does not provide the user.
    pub fn of(stream: &UnixStream, waiting_at: Option<u64>) -> io::Result<Self> {
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
            through_path: stream
                .local_addr()
                .is_ok_and(|address| address.as_pathname().is_some()),
            process: pid
                .and_then(|pid| Process::of_peer(stream.as_fd(), pid, waiting_at))
                .map(Arc::new),
        })
    }
}

/// A process that can be waited for without being its parent.
#[derive(Debug)]
pub struct Process {
    pid: u32,
    pidfd: OwnedFd,
}

impl Process {
    /// The process that connected to `socket`; `None` if it has ended, or its id may have been reused.
    fn of_peer(socket: BorrowedFd<'_>, pid: u32, waiting_at: Option<u64>) -> Option<Self> {
        match peer_pidfd(socket.as_raw_fd()) {
            Some(pidfd) => Some(Self { pid, pidfd }),
            None => Self::of_waiting_peer(socket, pid, waiting_at?),
        }
    }

    /// Before Linux 6.5 the socket provides no pidfd.
    ///
    /// The id may have been reused since the connection was made. A process that reused it started after the connection
    /// began to wait; and an ended process has closed its end of the connection, unless a child has inherited it.
    /// Therefore the process is opened first; then the connection must be open, and the process older than it.
    fn of_waiting_peer(socket: BorrowedFd<'_>, pid: u32, waiting_at: u64) -> Option<Self> {
        let process = Self::of_earlier_peer(pid, waiting_at)?;
        (!is_hung_up(socket)).then_some(process)
    }

    /// The process that had this id at `then`, in [`boot_ticks`], and still has it; `None` if it has ended.
    pub fn of_earlier_peer(pid: u32, then: u64) -> Option<Self> {
        let pidfd = pidfd::open(pid).ok()?;
        let started = ProcessStat::read(&ProbeRoot::default().proc, pid)?.start_ticks;
        (started <= then && !pidfd::is_over(&pidfd)).then_some(Self { pid, pidfd })
    }

    /// Process id.
    pub const fn pid(&self) -> u32 {
        self.pid
    }

    /// Whether the process has ended, reaped or not.
    pub(super) fn is_over(&self) -> bool {
        pidfd::is_over(&self.pidfd)
    }

    /// Waits until the process has ended.
    ///
    /// # Errors
    /// If the process cannot be watched, for lack of file descriptors.
    pub async fn ended(&self) -> io::Result<()> {
        let pidfd = self.pidfd.try_clone()?;
        // SAFETY: an `OwnedFd` keeps its descriptor open and unchanged until it is dropped, together with the
        // `AsyncFd`.
        let pidfd = unsafe { AsyncFd::register_with_interest(pidfd, Interest::READABLE) }?;
        let _ready = pidfd.readable().await?;
        Ok(())
    }
}

/// Supplementary groups of the peer (`SO_PEERGROUPS`, Linux 4.13).
fn peer_groups(fd: RawFd) -> Option<Vec<u32>> {
    // Linux allows 65536 groups; a user with more than 1024 is identified by user and primary group.
    let mut groups = vec![0u32; 1024];
    let bytes = socket_option(fd, libc::SO_PEERGROUPS, &mut groups)?;
    groups.truncate(bytes / size_of::<u32>());
    Some(groups)
}

/// The pidfd of the peer's process (`SO_PEERPIDFD`, Linux 6.5).
fn peer_pidfd(fd: RawFd) -> Option<OwnedFd> {
    let mut pidfd = [-1];
    let bytes = socket_option(fd, libc::SO_PEERPIDFD, &mut pidfd)?;
    let [pidfd] = pidfd;
    if bytes != size_of::<RawFd>() || pidfd < 0 {
        return None;
    }
    // SAFETY: the kernel has just created this descriptor, and no other code has its number.
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
    (result == 0)
        .then(|| usize::try_from(length).ok())
        .flatten()
}

/// Whether the other end of a connection has been closed.
fn is_hung_up(socket: BorrowedFd<'_>) -> bool {
    let mut poll = [PollFd::new(socket, PollFlags::empty())];
    let polled = nix::poll::poll(&mut poll, PollTimeout::ZERO).is_ok();
    let [poll] = poll;
    !polled
        || poll
            .revents()
            .is_none_or(|found| found.contains(PollFlags::POLLHUP))
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio, id};

    use super::*;
    use cotenant_probe::processes::boot_ticks;

    #[tokio::test]
    async fn the_other_end_of_a_socket_pair_is_this_process() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let peer = PeerInfo::of(&ours, boot_ticks()).unwrap();
        assert_eq!(peer.pid, Some(id()));
        assert_eq!(peer.process.unwrap().pid(), id());
    }

    #[tokio::test]
    async fn the_end_of_a_process_is_noticed() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let process = Process {
            pid: child.id(),
            pidfd: pidfd::open(child.id()).unwrap(),
        };
        drop(child.stdin.take());
        process.ended().await.unwrap();
        assert!(child.try_wait().unwrap().is_some());
    }

    #[test]
    fn a_process_is_known_again_unless_it_ended_or_its_id_passed_on() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let (pid, now) = (child.id(), boot_ticks().unwrap());
        assert!(Process::of_earlier_peer(pid, now).is_some());
        let before = ProcessStat::read("/proc".as_ref(), pid)
            .unwrap()
            .start_ticks
            - 1;
        assert!(
            Process::of_earlier_peer(pid, before).is_none(),
            "it came later"
        );
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(Process::of_earlier_peer(pid, now).is_none());
    }

    /// Kernels before 6.5 provide no other evidence.
    #[tokio::test]
    async fn a_process_that_took_over_the_id_of_the_peer_is_not_taken_for_it() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut later = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let started = ProcessStat::read("/proc".as_ref(), later.id())
            .unwrap()
            .start_ticks;
        let of = |waiting_at| Process::of_waiting_peer(ours.as_fd(), later.id(), waiting_at);
        assert!(
            of(started - 1).is_none(),
            "it was started after the connection was made"
        );
        assert!(of(started).is_some());
        // The peer has ended, which closed its end of the connection; an older process now has its id.
        drop(theirs);
        assert!(of(started).is_none());
        later.kill().unwrap();
        later.wait().unwrap();
    }

    #[test]
    fn a_process_that_is_gone_cannot_be_opened() {
        let mut child = Command::new("true").spawn().unwrap();
        let pid = child.id();
        child.wait().unwrap();
        assert!(pidfd::open(pid).is_err());
    }
}
