//! Control thread: a single-threaded runtime for the loop and gRPC.
//!
//! A request, its decision and its response stay on the thread woken for it. In a multi-threaded runtime, each thread
//! wakes another one to share work, and each wake-up may wait for a processor; a grant took three to four of them. Slow
//! work (reading `/proc`, starting processes, speech, HTTP) runs on the other runtime.

use std::{io, sync::mpsc, thread, time::Duration};

use tokio::{
    runtime::{Builder, Handle},
    sync::oneshot,
};

use cotenant_memory::emergency;

/// Handle of the thread; dropping it ends the thread.
#[derive(Debug)]
pub struct ControlThread {
    handle: Handle,
    stop: oneshot::Sender<()>,
    ended: mpsc::Receiver<()>,
}

impl ControlThread {
    /// Starts the thread.
    ///
    /// # Errors
    /// If the system refuses a thread, or the runtime's descriptors.
    pub fn start() -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel();
        let (end, ended) = mpsc::channel();
        thread::Builder::new().name("control".to_owned()).spawn(move || {
            emergency::lock_stack();
            if let Err(error) = emergency::be_prompt() {
                tracing::debug!(%error, "answers may wait for other threads on the same processor");
            }
            // Returns when the starter sends or is dropped.
            runtime.block_on(stopped).ok();
            // Tasks that still wait for a disk are abandoned.
            runtime.shutdown_background();
            end.send(()).ok();
        })?;
        Ok(Self {
            handle,
            stop,
            ended,
        })
    }

    /// Returns a handle for starting tasks on it.
    #[must_use]
    pub const fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Ends it, and waits at most `limit`.
    pub fn end(self, limit: Duration) {
        drop(self.stop);
        // A thread that does not end in time is abandoned.
        self.ended.recv_timeout(limit).ok();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_started_there_runs_on_one_thread_that_ends() {
        let control = ControlThread::start().unwrap();
        let name = || async {
            let outside = thread::current().name().map(str::to_owned);
            let inside = tokio::spawn(async { thread::current().name().map(str::to_owned) });
            (outside, inside.await.unwrap())
        };
        let (first, second) = (
            control.handle().spawn(name()),
            control.handle().spawn(name()),
        );
        let other = Builder::new_current_thread().build().unwrap();
        for task in [first, second] {
            let (outside, inside) = other.block_on(task).unwrap();
            assert_eq!(outside.as_deref(), Some("control"));
            assert_eq!(inside.as_deref(), Some("control"));
        }
        let waits = control.handle().spawn(std::future::pending::<()>());
        control.end(Duration::from_secs(20));
        assert!(other.block_on(waits).unwrap_err().is_cancelled());
    }
}
