//! Threads of the program stopped from outside, without a hook in the program.

use std::{fs, sync::mpsc::RecvTimeoutError, time::Duration};

/// Thread of another process stopped by ptrace.
pub(super) struct Frozen {
    thaw: std::sync::mpsc::Sender<()>,
    tracer: std::thread::JoinHandle<()>,
}

impl Frozen {
    /// Stops the thread with this name. All requests must come from one tracer thread, so a dedicated one is used.
    pub(super) fn thread(pid: u32, name: &str) -> Self {
        let tid: libc::pid_t = fs::read_dir(format!("/proc/{pid}/task"))
            .unwrap()
            .flatten()
            .find(|task| {
                fs::read_to_string(task.path().join("comm")).is_ok_and(|comm| comm.trim() == name)
            })
            .and_then(|task| task.file_name().to_str()?.parse().ok())
            .unwrap();
        let (thaw, thawed) = std::sync::mpsc::channel();
        let (stopped, is_stopped) = std::sync::mpsc::channel();
        let tracer = std::thread::spawn(move || {
            let none = std::ptr::null_mut::<libc::c_void>();
            let mut status = 0;
            // SAFETY: these requests read and write no memory of either process.
            unsafe {
                assert_eq!(
                    libc::ptrace(libc::PTRACE_SEIZE, tid, none, none),
                    0,
                    "may it be traced?"
                );
                assert_eq!(libc::ptrace(libc::PTRACE_INTERRUPT, tid, none, none), 0);
                assert_eq!(libc::waitpid(tid, &raw mut status, libc::__WALL), tid);
            }
            stopped.send(()).unwrap();
            // If its process ends meanwhile, the thread is reaped here: the process cannot be reaped before.
            while thawed.recv_timeout(REAP_EVERY) == Err(RecvTimeoutError::Timeout) {
                // SAFETY: `status` outlives the call.
                let changed =
                    unsafe { libc::waitpid(tid, &raw mut status, libc::__WALL | libc::WNOHANG) };
                if changed == tid && (libc::WIFSIGNALED(status) || libc::WIFEXITED(status)) {
                    return;
                }
            }
            // SAFETY: as above; a thread that has ended meanwhile is no error.
            unsafe { libc::ptrace(libc::PTRACE_DETACH, tid, none, none) };
        });
        is_stopped.recv().unwrap();
        Self { thaw, tracer }
    }

    pub(super) fn thaw(self) {
        drop(self.thaw);
        self.tracer.join().unwrap();
    }
}

/// Polling interval for a stopped thread: short enough that the end of its process is noticed promptly.
const REAP_EVERY: Duration = Duration::from_millis(10);
