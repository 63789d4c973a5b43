//! Signal handling of the daemon.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

use super::control_handle::ControlHandle;
use cotenant_policy::event::Origin;
use cotenant_rpc::supervisor::Supervisor as _;

/// Handler: SIGTERM and SIGINT end the daemon, SIGHUP reloads its configuration.
#[derive(Debug)]
pub(super) struct Signals {
    hangup: Signal,
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    pub(super) fn install() -> io::Result<Self> {
        Ok(Self {
            hangup: signal(SignalKind::hangup())?,
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    /// Waits for the next signal that ends the daemon; returns its name.
    pub(super) async fn next(&mut self, control: &ControlHandle) -> &'static str {
        loop {
            tokio::select! {
                _ = self.hangup.recv() => match control.reload(Some(Origin::Signal("SIGHUP".to_owned()))) {
                    Ok(_outcome_is_logged) => {}
                    Err(error) => tracing::warn!(%error, "SIGHUP: cannot reload the configuration"),
                },
                _ = self.terminate.recv() => return "SIGTERM",
                _ = self.interrupt.recv() => return "SIGINT",
            }
        }
    }
}
