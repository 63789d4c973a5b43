//! End of a run: drain requests in flight, then stop engine, workers and listeners.

use std::{future::Future, sync::Arc, time::Duration};

use tokio::sync::mpsc;

use super::{
    clock::MonotonicClock,
    control_loop::{ControlLoop, Inbound},
    device::Device,
    engine::EngineDriver,
    error::RunError,
    listeners::Listeners,
    notify,
    signals::Signals,
};
use cotenant_policy::event::{Event, Origin};

/// Longest time for requests in flight when the daemon ends. Together with [`STOP_GRACE`], well below
/// `TimeoutStopSec=45s` of the unit.
const DRAIN_MAX: Duration = Duration::from_secs(8);

/// Longest time for the engine, the workers and the listeners to end.
const STOP_GRACE: Duration = Duration::from_secs(5);

pub(super) type DaemonLoop = ControlLoop<MonotonicClock, Device>;

/// Runs the loop until a signal or the loss of a critical task, then ends the run.
pub(super) async fn run_to_the_end(
    mut control_loop: DaemonLoop,
    mut inbox: mpsc::Receiver<Inbound>,
    mut signals: Signals,
    mut losses: mpsc::Receiver<String>,
    listeners: Listeners,
) -> Result<(), RunError> {
    let (mut lost, mut by) = (None, None);
    let control = Arc::clone(&control_loop.device().control);
    let reason = tokio::select! {
        signal = signals.next(&control) => {
            by = Some(Origin::Signal(signal.to_owned()));
            signal.to_owned()
        }
        Some(loss) = losses.recv() => lost.insert(loss).clone(),
        () = control_loop.run(&mut inbox) => "the inbox closed".to_owned(),
    };
    tracing::info!(reason, "cotenant ends");
    notify::stopping();
    control_loop.handle(Event::DrainRequested { by });
    let drained = drained(&control_loop);
    tokio::select! {
        () = drained => {}
        () = control_loop.run(&mut inbox) => {}
        () = tokio::time::sleep(DRAIN_MAX) => {
            tracing::warn!("requests in flight did not finish within {DRAIN_MAX:?}; aborting them");
        }
        signal = signals.next(&control) => tracing::warn!(signal, "stopping without waiting for requests"),
    }
    // Tasks that wait for space in the inbox must not block on an ended loop.
    drop(inbox);
    stop(control_loop, listeners).await;
    lost.map_or(Ok(()), |what| Err(RunError::Lost { what }))
}

/// Waits until every request in flight at the engine and the workers is answered.
fn drained(control_loop: &DaemonLoop) -> impl Future<Output = ()> + use<> {
    let device = control_loop.device();
    let answered = device.engine.as_ref().map(EngineDriver::drain);
    let mut work = device.control.work();
    async move {
        if let Some(answered) = answered {
            answered.await;
        }
        let _ = work
            .wait_for(|counts| counts.values().all(|count| *count == 0))
            .await;
    }
}

async fn stop(control_loop: DaemonLoop, listeners: Listeners) {
    let (arbiter, device) = control_loop.into_parts();
    device.watchdog.stand_down();
    let Device {
        engine,
        workers,
        accounts,
        ..
    } = device;
    let engine = async {
        if let Some(engine) = engine {
            engine.stop(STOP_GRACE).await;
        }
    };
    tokio::join!(
        engine,
        workers.stop_all(STOP_GRACE),
        listeners.close(STOP_GRACE)
    );
    accounts.handoff.close(&arbiter);
    match accounts.recorder.lost() {
        0 => {}
        lines => tracing::warn!(lines, "the journal lost lines"),
    }
}
