//! Process session for a program that starts a complete system and cleans up after it.

use std::{
    env, io,
    os::unix::process::{CommandExt as _, ExitStatusExt as _},
    process::{Command, ExitCode, ExitStatus},
};

use nix::{
    sys::{prctl, signal::Signal},
    unistd,
};
use tokio::signal::unix::{SignalKind, signal};

/// Base of the exit code of a program ended by a signal, as in shells; the signal's number is added.
const SIGNALLED: u8 = 128;

/// Runs `work` in its own session, with the budget of that session, so that other processes on this host do not affect
/// the figures.
///
/// The leader of a process group, which a shell makes of each program, cannot start a session; and Ctrl-C does not
/// reach another session. Therefore this program starts itself again in a new session, forwards signals that end
/// programs, and returns its exit code.
pub fn in_own_session(work: impl FnOnce() -> ExitCode) -> ExitCode {
    if unistd::getsid(None).is_ok_and(|session| session == unistd::getpid()) {
        return work();
    }
    match run_again() {
        Ok(status) => {
            let code = status.code().and_then(|code| u8::try_from(code).ok());
            let signal = status.signal().and_then(|signal| u8::try_from(signal).ok());
            ExitCode::from(
                code.unwrap_or_else(|| SIGNALLED.saturating_add(signal.unwrap_or_default())),
            )
        }
        Err(error) => {
            eprintln!("error: cannot create a session\n  caused by: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run_again() -> io::Result<ExitStatus> {
    let mut command = Command::new(env::current_exe()?);
    command.args(env::args_os().skip(1));
    // SAFETY: `setsid` is async-signal-safe and touches no memory of this process.
    unsafe {
        command.pre_exec(|| unistd::setsid().map(drop).map_err(io::Error::from));
    }
    end_with_parent(&mut command);
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
        let mut interrupts = Interrupts::new()?;
        let mut child = tokio::process::Command::from(command).spawn()?;
        loop {
            tokio::select! {
                ended = child.wait() => return ended,
                _ = interrupts.next() => {
                    if let Some(pid) = child.id().and_then(|pid| i32::try_from(pid).ok()) {
                        // It may just have ended, which the next turn notices.
                        let _ = nix::sys::signal::kill(unistd::Pid::from_raw(pid), Signal::SIGTERM);
                    }
                }
            }
        }
    })
}

/// Makes the kernel end `command` when the thread that starts it ends.
pub fn end_with_parent(command: &mut Command) {
    // SAFETY: `prctl` is a single system call, which touches no memory of this process.
    unsafe {
        command.pre_exec(|| prctl::set_pdeathsig(Signal::SIGTERM).map_err(io::Error::from));
    }
}

/// Handler of the signals that end a program at a terminal or under a service manager.
pub struct Interrupts([(tokio::signal::unix::Signal, u8); 3]);

impl Interrupts {
    /// Installs the handler.
    pub fn new() -> io::Result<Self> {
        let hangup = (signal(SignalKind::hangup())?, 1);
        let interrupt = (signal(SignalKind::interrupt())?, 2);
        let terminate = (signal(SignalKind::terminate())?, 15);
        Ok(Self([hangup, interrupt, terminate]))
    }

    /// Waits for the next signal; returns the corresponding exit code.
    pub async fn next(&mut self) -> u8 {
        let [(hangup, one), (interrupt, two), (terminate, three)] = &mut self.0;
        let number = tokio::select! {
            _ = hangup.recv() => *one,
            _ = interrupt.recv() => *two,
            _ = terminate.recv() => *three,
        };
        SIGNALLED.saturating_add(number)
    }
}
