//! Signals that the daemon handles.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// SIGTERM and SIGINT. SIGHUP is ignored: there is nothing to reload while the daemon runs.
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

    /// Waits for the next one that ends the daemon; returns its name.
    pub(super) async fn next(&mut self) -> &'static str {
        loop {
            tokio::select! {
                _ = self.hangup.recv() => {
                    tracing::warn!("SIGHUP is ignored; restart the daemon to use a changed configuration");
                }
                _ = self.terminate.recv() => return "SIGTERM",
                _ = self.interrupt.recv() => return "SIGINT",
            }
        }
    }
}
