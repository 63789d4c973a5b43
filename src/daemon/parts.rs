//! Critical tasks: when one ends, the daemon ends.
//!
//! An unnoticed panic of a task would leave the daemon running without it; systemd restarts the daemon instead.

use std::panic::AssertUnwindSafe;

use futures_util::FutureExt as _;
use tokio::{runtime::Handle, sync::mpsc, task::JoinHandle};

/// Starts such tasks. Clones report to the same place.
#[derive(Clone, Debug)]
pub(super) struct Parts {
    lost: mpsc::Sender<String>,
    runtime: Handle,
}

impl Parts {
    /// A starter on the current runtime, and the receiver of lost tasks.
    pub(super) fn new() -> (Self, mpsc::Receiver<String>) {
        let (lost, losses) = mpsc::channel(1);
        let runtime = Handle::current();
        (Self { lost, runtime }, losses)
    }

    /// The same on another runtime.
    pub(super) fn on(&self, runtime: &Handle) -> Self {
        Self {
            lost: self.lost.clone(),
            runtime: runtime.clone(),
        }
    }

    /// Starts a task that may end; breaking down is a loss.
    pub(super) fn spawn(
        &self,
        name: &'static str,
        task: impl Future<Output = ()> + Send + 'static,
    ) -> JoinHandle<()> {
        let parts = self.clone();
        self.runtime.spawn(async move {
            if AssertUnwindSafe(task).catch_unwind().await.is_err() {
                parts.report(format!("{name} broke down"));
            }
        })
    }

    /// Starts a task that must run as long as the daemon; any end is a loss.
    pub(super) fn spawn_permanent(
        &self,
        name: &'static str,
        task: impl Future<Output = ()> + Send + 'static,
    ) {
        let parts = self.clone();
        self.spawn(name, async move {
            task.await;
            parts.report(format!("{name} has ended"));
        });
    }

    /// Reports a loss. The first one is enough to end the daemon.
    pub(super) fn report(&self, loss: String) {
        let _ = self.lost.try_send(loss);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_task_that_breaks_down_is_missed_and_one_that_ends_only_if_it_should_not() {
        let (parts, mut losses) = Parts::new();
        parts.spawn("a request", async {}).await.unwrap();
        assert!(losses.try_recv().is_err());
        parts
            .spawn("a bridge", async { panic!("as planted") })
            .await
            .unwrap();
        assert_eq!(losses.recv().await.unwrap(), "a bridge broke down");
        parts.spawn_permanent("sampling", async {});
        assert_eq!(losses.recv().await.unwrap(), "sampling has ended");
    }
}
