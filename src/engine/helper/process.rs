//! The helper process: waits for streams, and forks a bounded job for each.

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
    sys::{
        resource::{Resource, getrlimit, setrlimit},
        signal::{SigHandler, Signal, signal},
        socket::{ControlMessageOwned, MsgFlags, recvmsg},
    },
    unistd::{ForkResult, fork},
};

use super::job::{Bounds, Library, Setup};
use crate::emergency::end_when_refused;

/// Runs as a helper whose owner is at the other end of standard input; returns when that has gone.
#[must_use]
pub fn serve_stdin() -> ExitCode {
    let Ok(control) = io::stdin().as_fd().try_clone_to_owned() else {
        return ExitCode::FAILURE;
    };
    // SAFETY: nothing else reads standard input, and both refer to the same socket.
    unsafe { libc::close(libc::STDIN_FILENO) };
    match serve(UnixStream::from(control)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn serve(mut control: UnixStream) -> io::Result<()> {
    // A job that its bounds end leaves no core and no zombie, and is the first that a machine short of memory ends.
    setrlimit(Resource::RLIMIT_CORE, 0, 0)?;
    // SAFETY: no handler of ours runs.
    unsafe { signal(Signal::SIGCHLD, SigHandler::SigIgn) }?;
    let _ = std::fs::write("/proc/self/oom_score_adj", OOM_SCORE);
    let mut bytes = [0; 8];
    io::Read::read_exact(&mut control, &mut bytes)?;
    let job_bytes = u64::from_le_bytes(bytes);
    let library = Library::new(Setup::read(&mut control)?);
    while let Some((form, stream)) = next_job(&control)? {
        if form {
            let _ = library.vocabulary();
        }
        // SAFETY: this process has one thread, so that a child may do whatever it could do.
        match unsafe { fork() }? {
            ForkResult::Parent { .. } => drop(stream),
            ForkResult::Child => {
                drop(control);
                let done = work(stream, &library, job_bytes);
                // SAFETY: ends the process; freeing what it shares with the others would copy it.
                unsafe { libc::_exit(done.is_err().into()) }
            }
        }
    }
    Ok(())
}

/// The next job: whether it is a grammar, and its stream. `None` when the owner has gone.
fn next_job(control: &UnixStream) -> io::Result<Option<(bool, UnixStream)>> {
    let mut kind = [0];
    let mut space = nix::cmsg_space!([std::os::fd::RawFd; 1]);
    let mut parts = [IoSliceMut::new(&mut kind)];
    let flags = MsgFlags::MSG_CMSG_CLOEXEC;
    let message = recvmsg::<()>(control.as_raw_fd(), &mut parts, Some(&mut space), flags)?;
    if message.bytes == 0 {
        return Ok(None);
    }
    let mut received = Vec::new();
    for part in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(fds) = part {
            // SAFETY: the kernel has just made it for this process.
            received.extend(fds.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
        }
    }
    let stream = received.pop().ok_or_else(|| io::Error::other("a job without a stream"))?;
    Ok(Some((kind == [FORM], UnixStream::from(stream))))
}

/// Does one job in this process, under its bounds.
fn work(mut stream: UnixStream, library: &Library, job_bytes: u64) -> io::Result<()> {
    let bounds = OfProcess { data_max: data_bytes()?.saturating_add(job_bytes) };
    bounds.given(0);
    end_when_refused();
    watch(&stream)?;
    library.run(&mut stream, &bounds)
}

/// Ends this process as soon as the other end of the stream is closed, whatever it is doing.
fn watch(stream: &UnixStream) -> io::Result<()> {
    let fd = stream.as_raw_fd();
    let wait = move || {
        let mut gone = libc::pollfd { fd, events: libc::POLLRDHUP, revents: 0 };
        // SAFETY: one entry, which lives as long as the call.
        while unsafe { libc::poll(&raw mut gone, 1, -1) } < 0 {}
        // SAFETY: ends the process; nothing of it is needed any more.
        unsafe { libc::_exit(0) }
    };
    std::thread::Builder::new().stack_size(WATCH_STACK).spawn(wait)?;
    Ok(())
}

/// Bounds that the kernel keeps.
struct OfProcess {
    data_max: u64,
}

impl Bounds for OfProcess {
    fn time(&self, most: Duration) {
        let once = libc::itimerval {
            it_interval: libc::timeval { tv_sec: 0, tv_usec: 0 },
            it_value: libc::timeval {
                tv_sec: most.as_secs().try_into().unwrap_or(1),
                tv_usec: most.subsec_micros().into(),
            },
        };
        // SAFETY: reads one structure. SIGPROF is not handled, so that it ends the process.
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

/// What counts towards `RLIMIT_DATA` now.
fn data_bytes() -> io::Result<u64> {
    let text = std::fs::read_to_string("/proc/self/status")?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmData:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kib.map(|kib| kib << 10).ok_or_else(|| io::Error::other("the kernel does not say how much data there is"))
}

/// The byte that announces a grammar.
pub(super) const FORM: u8 = b'f';
/// The byte that announces a text to render.
pub(super) const RENDER: u8 = b'r';

/// Our choice: ended before workers and the daemon.
const OOM_SCORE: &str = "800";

/// It calls the kernel, and nothing else; more than the smallest stack that is allowed.
const WATCH_STACK: usize = 64 << 10;
