//! Critical tasks, whose end ends the daemon.
//!
//! Otherwise the daemon would continue without a task that panicked unnoticed; systemd restarts it instead.

use std::panic::AssertUnwindSafe;

use futures_util::FutureExt as _;
use tokio::{runtime::Handle, sync::mpsc, task::JoinHandle};

/// Spawner of such tasks; clones report to the same receiver.
#[derive(Clone, Debug)]
pub(super) struct Parts {
    lost: mpsc::Sender<String>,
    runtime: Handle,
}

impl Parts {
    /// Creates a spawner on the current runtime, and the receiver of losses.
    pub(super) fn new() -> (Self, mpsc::Receiver<String>) {
        let (lost, losses) = mpsc::channel(1);
        let runtime = Handle::current();
        (Self { lost, runtime }, losses)
    }

    /// Returns a spawner on another runtime.
    pub(super) fn on(&self, runtime: &Handle) -> Self {
        Self {
            lost: self.lost.clone(),
            runtime: runtime.clone(),
        }
    }

    /// Spawns a task that may end; only a panic is a loss.
    pub(super) fn spawn(
        &self,
        name: &'static str,
        task: impl Future<Output = ()> + Send + 'static,
    ) -> JoinHandle<()> {
        let parts = self.clone();
        self.runtime.spawn(async move {
            if AssertUnwindSafe(task).catch_unwind().await.is_err() {
                parts.report(format!("{name} panicked"));
            }
        })
    }

    /// Spawns a task that must run as long as the daemon; any end is a loss.
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

    /// Reports a loss; the first one ends the daemon.
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
        assert_eq!(losses.recv().await.unwrap(), "a bridge panicked");
        parts.spawn_permanent("sampling", async {});
        assert_eq!(losses.recv().await.unwrap(), "sampling has ended");
    }
}
