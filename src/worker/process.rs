//! Child process and process group, with the system calls that need `unsafe`.
//!
//! The child leads its own process group, so that it is signalled together with its children. It is awaited through a
//! pidfd and reaped last: until then its id, which is also that of the group, cannot be reused.

use std::{
    io,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::process::CommandExt,
    },
    process::{Command, Stdio},
    sync::{Arc, OnceLock, mpsc},
    thread,
    time::Duration,
};

use nix::{
    errno::Errno,
    sys::{prctl, signal::Signal},
};
use tokio::{
    io::{
        Interest,
        unix::{AsyncFd, AsyncFdRegisterError},
    },
    sync::oneshot,
    time::timeout,
};

use super::{
    confine::{Prepared, WorkerGroup},
    descent,
    report::ExitStatus,
};
use cotenant_units::pidfd;

/// Supervised process that has not been reaped. Dropping it kills its group and reaps it.
#[derive(Debug)]
pub(super) struct Process {
    pid: libc::pid_t,
    pidfd: AsyncFd<OwnedFd>,
    reaped: bool,
    /// Whether it is our child: only the parent can reap a process and read its exit status.
    child: bool,
}

#[derive(Debug)]
pub(super) struct Spawned {
    pub(super) process: Process,
    pub(super) stdout: OwnedFd,
    pub(super) stderr: OwnedFd,
    pub(super) group: Option<WorkerGroup>,
}

/// Starts a program in its own process group, without stdin, with pipes for its output.
///
/// With [`Leash::Ours`], the kernel sends it SIGKILL when this program ends in any way. With [`Leash::Long`], it
/// continues, and also holds the reading ends of its pipes, so that writing works without a reader: see [`reopened`].
///
/// # Errors
/// If it cannot be executed, which the new process reports.
pub(super) async fn spawn(
    mut command: Command,
    leash: Leash,
    confine: Prepared,
) -> io::Result<Spawned> {
    command.process_group(0).stdin(Stdio::null());
    let (reply, answer) = oneshot::channel();
    let job = Job {
        command,
        leash,
        confine,
        reply,
    };
    spawner()?
        .send(job)
        .map_err(|_| io::Error::other("the thread that starts workers has ended"))?;
    let raw = answer
        .await
        .map_err(|_| io::Error::other("the thread that starts workers has ended"))??;
    raw.into_spawned()
}

/// Whether a process outlives its supervisor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Leash {
    /// It continues.
    Long,
    /// It is killed with its supervisor.
    Ours,
}

impl Process {
    /// Takes over a process started by an earlier supervisor; `is_still_it` verifies its identity.
    ///
    /// # Errors
    /// If it has ended, or cannot be watched.
    pub(super) fn adopt(pid: u32, is_still_it: impl FnOnce() -> bool) -> io::Result<Self> {
        let pidfd = pidfd::open(pid)?;
        let pid =
            libc::pid_t::try_from(pid).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        // Open first, then verify: from here on, the id cannot be reused unnoticed.
        if !is_still_it() {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        Ok(Self {
            pid,
            pidfd: watched(pidfd)?,
            reaped: false,
            child: false,
        })
    }

    /// Returns its process id, also the id of its group.
    pub(super) fn pid(&self) -> u32 {
        self.pid.unsigned_abs()
    }

    pub(super) fn descriptor(&self) -> Option<OwnedFd> {
        self.pidfd.get_ref().try_clone().ok()
    }

    /// Waits until it has ended, without reaping it.
    pub(super) async fn ended(&self) -> io::Result<ExitStatus> {
        loop {
            // A pidfd stays readable once the process has ended, so readiness is never cleared.
            let ready = self.pidfd.readable().await?;
            if !self.child {
                return Ok(ExitStatus::Unknown);
            }
            if let Some(status) = wait(self.pidfd.get_ref(), libc::WNOWAIT | libc::WNOHANG)? {
                return Ok(status);
            }
            drop(ready);
            tokio::task::yield_now().await;
        }
    }

    pub(super) fn has_ended(&self) -> bool {
        if !self.child {
            return pidfd::is_over(self.pidfd.get_ref());
        }
        matches!(
            wait(self.pidfd.get_ref(), libc::WNOWAIT | libc::WNOHANG),
            Ok(Some(_))
        )
    }

    /// Sends a signal to every process of its group.
    pub(super) fn signal_group(&self, signal: libc::c_int) -> io::Result<()> {
        // If another process reaps it, its id may already name another group.
        if !self.child && pidfd::is_over(self.pidfd.get_ref()) {
            return Ok(());
        }
        signal_group(self.pid, signal)
    }

    /// Reaps it, after [`ended`](Self::ended).
    pub(super) fn reap(mut self) {
        self.reaped = true;
        if !self.child {
            return;
        }
        if let Err(error) = wait(self.pidfd.get_ref(), libc::WNOHANG) {
            tracing::warn!(pid = self.pid, %error, "cannot reap a worker");
        }
        descent::forget(self.pid);
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.reaped {
            return;
        }
        if self.child {
            kill_and_reap(self.pid, self.pidfd.get_ref());
        } else {
            let _ = self.signal_group(libc::SIGKILL);
        }
    }
}

/// Process that is not a child, held by a pidfd so that reuse of its id is noticed.
#[derive(Debug)]
pub(super) struct UnmanagedProcess {
    pidfd: OwnedFd,
}

impl UnmanagedProcess {
    /// Opens the process that has this id now.
    pub(super) fn open(pid: u32) -> io::Result<Self> {
        pidfd::open(pid).map(|pidfd| Self { pidfd })
    }

    /// Sends it a signal; `false` if it has ended.
    pub(super) fn signal(&self, signal: libc::c_int) -> io::Result<bool> {
        // SAFETY: the descriptor is open, no signal information is needed, and the flags must be 0.
        let result = unsafe {
            libc::syscall(
                libc::SYS_pidfd_send_signal,
                self.pidfd.as_raw_fd(),
                signal,
                std::ptr::null::<libc::siginfo_t>(),
                0,
            )
        };
        match Errno::result(result) {
            Ok(_) => Ok(true),
            Err(Errno::ESRCH) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Kills it and waits for its end; `false` if that takes longer than `patience`.
    pub(super) async fn kill(self, patience: Duration) -> io::Result<bool> {
        if !self.signal(libc::SIGKILL)? {
            return Ok(true);
        }
        let pidfd = watched(self.pidfd)?;
        let ended = timeout(patience, pidfd.readable()).await;
        let ended = ended.is_ok_and(|ready| ready.is_ok());
        reap_adopted(pidfd.get_ref());
        Ok(ended)
    }

    /// Reaps it if it has ended and is our child.
    pub(super) fn reap(self) {
        reap_adopted(&self.pidfd);
    }
}

/// Child handed over by the spawning thread, before a runtime owns it.
struct RawSpawned {
    pid: libc::pid_t,
    /// `None` once handed over.
    parts: Option<(OwnedFd, OwnedFd, OwnedFd)>,
    group: Option<WorkerGroup>,
}

impl RawSpawned {
    fn into_spawned(mut self) -> io::Result<Spawned> {
        let (pidfd, stdout, stderr) = self
            .parts
            .take()
            .ok_or_else(|| io::Error::other("a worker was handed over twice"))?;
        match watched(pidfd) {
            Ok(pidfd) => Ok(Spawned {
                process: Process {
                    pid: self.pid,
                    pidfd,
                    reaped: false,
                    child: true,
                },
                stdout,
                stderr,
                group: self.group.take(),
            }),
            Err(error) => {
                let (pidfd, error) = error.into_parts();
                kill_and_reap(self.pid, &pidfd);
                Err(error)
            }
        }
    }
}

impl Drop for RawSpawned {
    /// The caller was dropped before the child was started.
    fn drop(&mut self) {
        if let Some((pidfd, ..)) = &self.parts {
            kill_and_reap(self.pid, pidfd);
        }
    }
}

struct Job {
    command: Command,
    leash: Leash,
    confine: Prepared,
    reply: oneshot::Sender<io::Result<RawSpawned>>,
}

/// Returns the thread that starts all children.
///
/// The kernel sends the parent-death signal when the *thread* that forked ends, and a runtime ends its threads at any
/// time; this one lives as long as the program.
fn spawner() -> io::Result<&'static mpsc::Sender<Job>> {
    static SPAWNER: OnceLock<Result<mpsc::Sender<Job>, String>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        descent::prepare();
        let (sender, jobs) = mpsc::channel::<Job>();
        thread::Builder::new()
            .name("worker-spawner".to_owned())
            .stack_size(SPAWNER_STACK)
            .spawn(move || {
                for job in jobs {
                    // If the receiver is gone, `RawSpawned::drop` ends the child.
                    let _ = job
                        .reply
                        .send(spawn_here(job.command, job.leash, job.confine));
                }
            })
            .map(|_| sender)
            .map_err(|error| error.to_string())
    });
    spawner
        .as_ref()
        .map_err(|error| io::Error::other(format!("cannot start a thread: {error}")))
}

/// Creates a pipe for an output stream: our end, and the child's.
///
/// On a long leash, the child's end is open for reading as well, like the descriptors of a terminal. The pipe thus
/// always has a reader: a worker that writes while no supervisor runs gets neither SIGPIPE nor an error. Its output
/// stays in the pipe for the next supervisor; once the pipe is full, the worker blocks.
fn output(leash: Leash) -> io::Result<(OwnedFd, OwnedFd)> {
    let (reader, writer) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC)?;
    if leash == Leash::Ours {
        return Ok((reader, writer));
    }
    // The pages of a user's pipes are limited; if the limit is reached, the default of 64 KiB suffices.
    // SAFETY: `F_SETPIPE_SZ` takes an integer, and the descriptor is open.
    let _ = unsafe { libc::fcntl(writer.as_raw_fd(), libc::F_SETPIPE_SZ, PIPE_BYTES) };
    let both = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(format!("/proc/self/fd/{}", writer.as_raw_fd()))?;
    Ok((reader, both.into()))
}

/// Opens our end of the pipe to which a process on a long leash writes as descriptor `fd`.
///
/// # Errors
/// If `fd` is not such a pipe, or the process may not be inspected.
pub(super) fn reopened(proc: &std::path::Path, pid: u32, fd: u32) -> io::Result<OwnedFd> {
    use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
    let path = proc.join(format!("{pid}/fd/{fd}"));
    let pipe = std::fs::OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)?;
    if !pipe.metadata()?.file_type().is_fifo() {
        return Err(io::Error::other("its output is no longer a pipe"));
    }
    Ok(pipe.into())
}

fn spawn_here(mut command: Command, leash: Leash, confine: Prepared) -> io::Result<RawSpawned> {
    let (stdout, theirs) = output(leash)?;
    command.stdout(theirs);
    let (stderr, theirs) = output(leash)?;
    command.stderr(theirs);
    let parent = std::process::id();
    let confine = Arc::new(confine);
    let inside = Arc::clone(&confine);
    // SAFETY: between fork and exec, only async-signal-safe system calls are made, on memory and descriptors prepared
    // before; nothing is allocated.
    unsafe {
        command.pre_exec(move || {
            // Before the parent-death signal is requested: a change of user withdraws it.
            inside.enter()?;
            if leash == Leash::Long {
                return inside.wall_in();
            }
            prctl::set_pdeathsig(Signal::SIGKILL)?;
            // The parent may have ended before the signal was requested.
            if libc::getppid().unsigned_abs() != parent {
                return Err(io::Error::from_raw_os_error(libc::ESRCH));
            }
            inside.wall_in()
        });
    }
    let spawned = descent::start(&mut command);
    // The command holds the other half of it, and our copies of the writing ends.
    drop(command);
    let confine =
        Arc::try_unwrap(confine).map_err(|_| io::Error::other("a confinement is held twice"))?;
    let (group, step) = confine.finish();
    let mut child = spawned.map_err(|error| match step {
        Some(step) => io::Error::new(error.kind(), format!("{step}: {error}")),
        None => error,
    })?;
    let pid = libc::pid_t::try_from(child.id()).map_err(io::Error::other)?;
    match pidfd::open(child.id()) {
        Ok(pidfd) => Ok(RawSpawned {
            pid,
            parts: Some((pidfd, stdout, stderr)),
            group,
        }),
        Err(error) => {
            let _ = signal_group(pid, libc::SIGKILL);
            let _ = child.wait();
            descent::forget(pid);
            Err(error)
        }
    }
}

fn kill_and_reap(pid: libc::pid_t, pidfd: &OwnedFd) {
    let _ = signal_group(pid, libc::SIGKILL);
    // Blocks until the kernel has torn the process down, which is short: it no longer runs its own code.
    let _ = wait(pidfd, 0);
    descent::forget(pid);
}

/// Reaps a process adopted as a child; any other is reaped by its own parent.
fn reap_adopted(pidfd: &OwnedFd) {
    let _ = wait(pidfd, libc::WNOHANG);
}

fn signal_group(pid: libc::pid_t, signal: libc::c_int) -> io::Result<()> {
    // SAFETY: `killpg` takes two integers. The group's id is not reused before its leader is reaped.
    match Errno::result(unsafe { libc::killpg(pid, signal) }) {
        // The group may be empty.
        Ok(_) | Err(Errno::ESRCH) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Registers a pidfd with the runtime; it becomes readable when the process has ended.
fn watched(pidfd: OwnedFd) -> Result<AsyncFd<OwnedFd>, AsyncFdRegisterError<OwnedFd>> {
    // SAFETY: an `OwnedFd` is open, never changes, and stays open as long as the `AsyncFd` owns it.
    unsafe { AsyncFd::register_with_interest(pidfd, Interest::READABLE) }
}

/// Calls `waitid` on a child; `None` if `WNOHANG` is set and it has not ended.
fn wait(pidfd: &OwnedFd, flags: libc::c_int) -> io::Result<Option<ExitStatus>> {
    let id = libc::id_t::try_from(pidfd.as_raw_fd()).map_err(io::Error::other)?;
    loop {
        // SAFETY: all zeroes is a valid `siginfo_t`.
        let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
        // SAFETY: `info` is valid for writes, and the descriptor is open.
        let result =
            unsafe { libc::waitid(libc::P_PIDFD, id, &raw mut info, libc::WEXITED | flags) };
        match Errno::result(result) {
            Ok(_) => {}
            Err(Errno::EINTR) => continue,
            Err(error) => return Err(error.into()),
        }
        // SAFETY: `waitid` has set the fields of a child's end, or left the process id at 0.
        let (pid, status) = unsafe { (info.si_pid(), info.si_status()) };
        return Ok(match info.si_code {
            _ if pid == 0 => None,
            libc::CLD_EXITED => Some(ExitStatus::Code(status)),
            code => Some(ExitStatus::Signal {
                signal: status,
                core_dumped: code == libc::CLD_DUMPED,
            }),
        });
    }
}

/// Sufficient for forking, the only work of the thread.
const SPAWNER_STACK: usize = 256 << 10;

/// Bytes that a worker may write while no supervisor reads: the largest pipe for an unprivileged user (pipe(7)). The
/// kernel allocates pages only when they are written.
const PIPE_BYTES: libc::c_int = 1 << 20;
