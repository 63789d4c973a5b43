//! Sampler of the machine, at the arbiter's interval and on stalls.

use std::{
    pin::pin,
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::sync::watch;

use super::{control_handle::ControlHandle, control_loop::Clock as _, parts::Parts};
use cotenant_memory::emergency;
use cotenant_policy::{
    event::Event,
    params::MachineMemory,
    pressure::{Sample, StallWatch},
};
use cotenant_probe::{
    ProbeRoot, Sampler, Ticker,
    psi::{PsiRung, PsiWatch},
};
use cotenant_threads::{NotDone, blocking};
use cotenant_units::{causes::in_one_line, lock::locked};

/// Sampling interval until the arbiter sets another one.
const FIRST_INTERVAL: Duration = Duration::from_millis(100);

/// Setter of the sampling interval; a shorter one cuts the current wait short.
#[derive(Clone, Debug)]
pub(super) struct Pace {
    interval: watch::Sender<Duration>,
}

impl Pace {
    /// Creates a setter, and the interval that sampling follows.
    pub(super) fn new() -> (Self, watch::Receiver<Duration>) {
        let (interval, wanted) = watch::channel(FIRST_INTERVAL);
        (Self { interval }, wanted)
    }

    pub(super) fn set(&self, interval: Duration) {
        // Only a different value wakes the sampler.
        self.interval
            .send_if_modified(|current| std::mem::replace(current, interval) != interval);
    }
}

const fn watch_of(rung: PsiRung) -> StallWatch {
    match rung {
        PsiRung::Absent => StallWatch::Absent,
        PsiRung::ReadOnly => StallWatch::Polling,
        PsiRung::TriggerTwoSeconds => StallWatch::TwoSeconds,
        PsiRung::TriggerOneSecond => StallWatch::OneSecond,
    }
}

/// Starts sampling, which continues while `Pace` exists; `machine` follows the machine's memory.
pub(super) fn spawn(
    sampler: Sampler,
    root: &ProbeRoot,
    mut wanted: watch::Receiver<Duration>,
    machine: watch::Sender<MachineMemory>,
    control: Arc<ControlHandle>,
    parts: &Parts,
) {
    let watch = PsiWatch::arm(root);
    tracing::info!(rung = %watch.rung, reason = watch.reason.as_deref(), "memory stalls are watched");
    let mut ticker = Ticker::new(watch);
    let sampler = Arc::new(Mutex::new(sampler));
    parts.spawn_permanent("sampling", async move {
        let mut failing = false;
        loop {
            // A reading is as old as its start.
            let taken_at = control.clock().now();
            let of_session = locked(&sampler).is_of_session();
            let reading = if of_session {
                // Reading /proc takes too long for a shared thread.
                let theirs = Arc::clone(&sampler);
                let read = emergency::within(|| {
                    blocking(move || emergency::within(|| locked(&theirs).read()))
                });
                match within_limit(read).await {
                    Ok(reading) => reading.map_err(|error| in_one_line(&error)),
                    Err(error @ NotDone::NoThread(_)) => Err(in_one_line(&error)),
                    Err(broken) => return tell_broken(&broken),
                }
            } else {
                let reading = emergency::within(|| locked(&sampler).read());
                reading.map_err(|error| in_one_line(&error))
            };
            match reading {
                Ok(reading) => {
                    failing = false;
                    let changed = {
                        let sampler = locked(&sampler);
                        let changed = sampler.has_changed(&reading, &machine.borrow());
                        changed.then(|| sampler.machine(&reading))
                    };
                    if let Some(changed) = changed {
                        machine.send_replace(changed);
                    }
                    let sample = Sample {
                        own_used: control.own_use(),
                        stall_watch: Some(watch_of(ticker.rung())),
                        ..reading.sample(taken_at)
                    };
                    control.tell(Event::Sampled(sample)).await;
                }
                // Logged once per series of failures, of which there may be a hundred per second.
                Err(error) if !std::mem::replace(&mut failing, true) => {
                    tracing::error!("no samples: {error}");
                }
                Err(_) => {}
            }
            let started = tokio::time::Instant::now();
            let wants_refresh = locked(&sampler).wants_refresh();
            if wants_refresh {
                let theirs = Arc::clone(&sampler);
                let refresh = emergency::within(|| {
                    blocking(move || emergency::within(|| locked(&theirs).refresh()))
                });
                match refresh.await {
                    // Without a thread, the release is requested again after the next sample.
                    Ok(()) | Err(NotDone::NoThread(_)) => {}
                    Err(broken) => return tell_broken(&broken),
                }
            }
            loop {
                let interval = *wanted.borrow_and_update();
                let left = interval.saturating_sub(started.elapsed());
                tokio::select! {
                    _ = ticker.next(left) => break,
                    changed = wanted.changed() => if changed.is_err() { return },
                }
            }
        }
    });
}

/// Waits for a reading, and logs if it takes too long. A read blocked in the kernel cannot be cancelled. Meanwhile the
/// last sample ages, and decisions based on samples have a maximum age.
async fn within_limit<T>(read: impl Future<Output = T>) -> T {
    let mut read = pin!(read);
    match tokio::time::timeout(READING_MAX, &mut read).await {
        Ok(read) => read,
        Err(_elapsed) => {
            tracing::error!("no samples: the machine could not be read within {READING_MAX:?}");
            read.await
        }
    }
}

/// Time limit of a reading: a thousand times the usual duration (our choice).
const READING_MAX: Duration = Duration::from_secs(2);

/// Logs a failed reading, unless it was cancelled because the daemon ends.
fn tell_broken(broken: &NotDone) {
    tracing::error!(%broken, "sampling panicked");
}
