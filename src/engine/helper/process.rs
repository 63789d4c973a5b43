//! Helper process: accepts streams, and forks a bounded job for each.

use std::{
    io::{self, IoSliceMut},
    os::{
        fd::{AsFd as _, AsRawFd as _, FromRawFd as _, OwnedFd},
        unix::net::UnixStream,
    },
    process::ExitCode,
    time::Duration,
};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        resource::{Resource, getrlimit, setrlimit},
        signal::Signal,
        socket::{ControlMessageOwned, MsgFlags, recvmsg},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::{ForkResult, Pid, fork},
};

use super::{
    frame::{self, Kind},
    job::{Bounds, Library, Setup},
};
use cotenant_memory::emergency::end_when_refused;
use cotenant_units::pidfd;

/// Runs as a helper whose owner is at the other end of standard input; returns when the owner disconnects.
pub fn serve_stdin() -> ExitCode {
    let Ok(control) = io::stdin().as_fd().try_clone_to_owned() else {
        return ExitCode::FAILURE;
    };
    // SAFETY: standard input has no other reader, and both refer to the same socket.
    unsafe { libc::close(libc::STDIN_FILENO) };
    match serve(UnixStream::from(control)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn serve(mut control: UnixStream) -> io::Result<()> {
    // A job ended by its bounds dumps no core, and is the OOM killer's first choice.
    setrlimit(Resource::RLIMIT_CORE, 0, 0)?;
    let _ = std::fs::write("/proc/self/oom_score_adj", OOM_SCORE);
    map_large_blocks();
    let library = Library::new(Setup::read(&mut control)?);
    let mut jobs: Vec<Running> = Vec::new();
    loop {
        let announced = wait(&control, &jobs)?;
        jobs.retain_mut(|job| !job.has_ended());
        if !announced {
            continue;
        }
        let Some(Announced {
            kind,
            bytes,
            stream,
        }) = next_job(&control)?
        else {
            return Ok(());
        };
        if kind == FORM {
            let _ = library.vocabulary();
        }
        // SAFETY: this process has one thread, so the child may call anything that it could.
        match unsafe { fork() }? {
            ForkResult::Parent { child } => jobs.push(Running {
                pidfd: pidfd::open(child.as_raw().unsigned_abs())?,
                pid: child,
                stream,
            }),
            ForkResult::Child => {
                drop((control, jobs));
                let done = work(stream, &library, bytes);
                // SAFETY: ends the process; freeing memory shared with other processes would copy it.
                unsafe { libc::_exit(done.is_err().into()) }
            }
        }
    }
}

/// A running job.
struct Running {
    pid: Pid,
    pidfd: OwnedFd,
    /// Kept to report its end.
    stream: UnixStream,
}

impl Running {
    /// Whether it has ended; notifies its owner if its bounds were the reason. Any other end is not the job's fault.
    fn has_ended(&mut self) -> bool {
        use Signal as S;
        let by_its_bounds = match waitpid(self.pid, Some(WaitPidFlag::WNOHANG)) {
            Ok(WaitStatus::StillAlive | WaitStatus::Stopped(..) | WaitStatus::Continued(_)) => {
                return false;
            }
            Ok(WaitStatus::Signaled(_, S::SIGPROF | S::SIGSEGV | S::SIGABRT | S::SIGBUS, _)) => {
                true
            }
            Ok(WaitStatus::Exited(_, code)) => code != 0,
            _ => false,
        };
        if by_its_bounds && self.stream.set_nonblocking(true).is_ok() {
            let _ = frame::write(&mut self.stream, Kind::Bound, &[]);
        }
        true
    }
}

/// Waits until a job is announced or one has ended; returns whether `control` is readable.
fn wait(control: &UnixStream, jobs: &[Running]) -> io::Result<bool> {
    let mut fds = vec![PollFd::new(control.as_fd(), PollFlags::POLLIN)];
    fds.extend(
        jobs.iter()
            .map(|job| PollFd::new(job.pidfd.as_fd(), PollFlags::POLLIN)),
    );
    match poll(&mut fds, PollTimeout::NONE) {
        Ok(_) => Ok(fds.first().and_then(PollFd::any).unwrap_or(false)),
        Err(Errno::EINTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// An announced job.
struct Announced {
    kind: u8,
    /// Its allocation limit.
    bytes: u64,
    stream: UnixStream,
}

/// The next job; `None` after the owner has disconnected.
fn next_job(control: &UnixStream) -> io::Result<Option<Announced>> {
    let mut head = [0; ANNOUNCED_BYTES];
    let mut space = nix::cmsg_space!([std::os::fd::RawFd; 1]);
    let mut parts = [IoSliceMut::new(&mut head)];
    let flags = MsgFlags::MSG_CMSG_CLOEXEC;
    let message = recvmsg::<()>(control.as_raw_fd(), &mut parts, Some(&mut space), flags)?;
    if message.bytes == 0 {
        return Ok(None);
    }
    let mut received = Vec::new();
    for part in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(fds) = part {
            // SAFETY: the kernel has just created it for this process.
            received.extend(
                fds.into_iter()
                    .map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }),
            );
        }
    }
    let stream = received
        .pop()
        .ok_or_else(|| io::Error::other("a job without a stream"))?;
    let [kind, bytes @ ..] = head;
    Ok(Some(Announced {
        kind,
        bytes: u64::from_le_bytes(bytes),
        stream: UnixStream::from(stream),
    }))
}

/// Runs one job in this process, under its bounds.
fn work(mut stream: UnixStream, library: &Library, bytes: u64) -> io::Result<()> {
    let bounds = OfProcess {
        data_max: data_bytes()?.saturating_add(bytes),
    };
    bounds.given(0);
    end_when_refused();
    watch(&stream)?;
    frame::write(&mut stream, Kind::Begun, &std::process::id().to_le_bytes())?;
    library.run(&mut stream, &bounds)
}

/// Ends this process as soon as the other end of the stream is closed, regardless of its state.
fn watch(stream: &UnixStream) -> io::Result<()> {
    let fd = stream.as_raw_fd();
    let wait = move || {
        let mut gone = libc::pollfd {
            fd,
            events: libc::POLLRDHUP,
            revents: 0,
        };
        // SAFETY: one entry, which outlives the call.
        while unsafe { libc::poll(&raw mut gone, 1, -1) } < 0 {}
        // SAFETY: ends the process; none of its state is needed any more.
        unsafe { libc::_exit(0) }
    };
    std::thread::Builder::new()
        .stack_size(WATCH_STACK)
        .spawn(wait)?;
    Ok(())
}

/// Bounds enforced by the kernel.
struct OfProcess {
    data_max: u64,
}

impl Bounds for OfProcess {
    fn time(&self, most: Duration) {
        let once = libc::itimerval {
            it_interval: libc::timeval {
                tv_sec: 0,
                tv_usec: 0,
            },
            it_value: libc::timeval {
                tv_sec: most.as_secs().try_into().unwrap_or(1),
                tv_usec: most.subsec_micros().into(),
            },
        };
        // SAFETY: reads one structure. SIGPROF is unhandled, so that it ends the process.
        unsafe { libc::setitimer(libc::ITIMER_PROF, &raw const once, std::ptr::null_mut()) };
    }

    fn given(&self, bytes: usize) {
        let most = self.data_max.saturating_add(bytes as u64);
        let hard = getrlimit(Resource::RLIMIT_DATA).map_or(libc::RLIM_INFINITY, |(_, hard)| hard);
        if setrlimit(Resource::RLIMIT_DATA, most.min(hard), hard).is_err() {
            // SAFETY: ends the process: no job runs without bounds.
            unsafe { libc::_exit(1) }
        }
    }
}

/// Memory that counts towards `RLIMIT_DATA` now.
fn data_bytes() -> io::Result<u64> {
    let text = std::fs::read_to_string("/proc/self/status")?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmData:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kib.map(|kib| kib << 10)
        .ok_or_else(|| io::Error::other("the kernel reports no amount of data"))
}

/// Makes the allocator map large blocks regardless of earlier frees, so that freeing returns them to the kernel.
fn map_large_blocks() {
    #[cfg(target_env = "gnu")]
    {
        // SAFETY: sets a parameter of the allocator.
        unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED_FROM) };
    }
}

/// Announcement of a job: its kind and its allocation limit.
pub(super) fn announced(kind: u8, bytes: u64) -> [u8; ANNOUNCED_BYTES] {
    let mut head = [kind; ANNOUNCED_BYTES];
    if let Some(place) = head.get_mut(1..) {
        place.copy_from_slice(&bytes.to_le_bytes());
    }
    head
}

const ANNOUNCED_BYTES: usize = 9;

/// The allocator's default, which it would raise otherwise.
#[cfg(target_env = "gnu")]
const MAPPED_FROM: libc::c_int = 128 << 10;

/// Announces a grammar.
pub(super) const FORM: u8 = b'f';
/// Announces a rendering.
pub(super) const RENDER: u8 = b'r';

/// Our choice: killed before workers and the daemon.
const OOM_SCORE: &str = "800";

/// It only makes system calls; more than the smallest allowed stack.
const WATCH_STACK: usize = 64 << 10;
