//! Signals that the daemon handles.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// SIGTERM, SIGINT, and SIGHUP, which comes when the terminal goes.
#[derive(Debug)]
pub(super) struct Signals {
    hangup: Signal,
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    /// Takes the signals over from now on.
    pub(super) fn install() -> io::Result<Self> {
        Ok(Self {
            hangup: signal(SignalKind::hangup())?,
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    /// Waits for the next one; returns its name.
    pub(super) async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.hangup.recv() => "SIGHUP",
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}
