//! Detector of workers that run but do not respond.
//!
//! One late answer proves little: the work may be long, or the machine slow. A worker counts as unresponsive if several
//! probes after such a request, each on its own connection, get no answer either, or if several requests in a row got
//! none: a worker may still answer probes, but do no work. The detector only reports; policy decides.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use super::control_handle::{AtWork, ControlHandle};
use cotenant_config::WorkerProtocol;
use cotenant_policy::event::Event;
use cotenant_probe::processes;
use cotenant_speech::client::{ClientError, ClientTimeouts, WyomingClient};
use cotenant_units::lock::locked;
use cotenant_worker::handle::{WorkerHandle, WorkerState};

/// Start number of a worker, and its consecutive requests without a timely answer.
#[derive(Clone, Debug, Default)]
struct Unanswered(Arc<Mutex<(u64, u32)>>);

impl Unanswered {
    /// Counts an unanswered request in this life; returns the number in a row.
    fn one_more(&self, life: u64) -> u32 {
        let mut count = locked(&self.0);
        let before = if count.0 == life { count.1 } else { 0 };
        *count = (life, before + 1);
        before + 1
    }

    /// Resets the count after a completed answer.
    fn answered(&self) {
        *locked(&self.0) = (0, 0);
    }
}

/// Detector for one worker; clones share its state.
#[derive(Clone, Debug)]
pub(super) struct HangDetector {
    worker: WorkerHandle,
    protocol: WorkerProtocol,
    control: Arc<ControlHandle>,
    unanswered: Unanswered,
}

impl HangDetector {
    /// Creates a detector that reports to `control`.
    pub(super) fn new(
        worker: WorkerHandle,
        protocol: WorkerProtocol,
        control: &Arc<ControlHandle>,
    ) -> Self {
        Self {
            worker,
            protocol,
            control: Arc::clone(control),
            unanswered: Unanswered::default(),
        }
    }

    pub(super) fn answered(&self) {
        self.unanswered.answered();
    }

    /// Keeps a worker whose request was abandoned counted as busy while it computes. Returns at once.
    pub(super) fn busy_until_done(&self, at_work: AtWork) {
        let (worker, life) = (self.worker.clone(), self.worker.starts());
        tokio::spawn(async move {
            let _at_work = at_work;
            let mut before = None;
            for _ in 0..COMPUTES_ON_MAX.as_secs() {
                let now = worker
                    .state()
                    .pid()
                    .filter(|_| worker.starts() == life)
                    .and_then(processes::cpu_time);
                let Some(now) = now else { return };
                if before.is_some_and(|before| now.saturating_sub(before) < COMPUTES) {
                    return;
                }
                before = Some(now);
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        });
    }

    /// Examines the worker after a failed request, and reports it if it hangs. Returns at once.
    pub(super) fn failed(&self, error: &ClientError) {
        let ClientError::Late { .. } = error else {
            return;
        };
        let life = self.worker.starts();
        let in_a_row = self.unanswered.one_more(life);
        let (control, worker) = (Arc::clone(&self.control), self.worker.clone());
        if in_a_row >= IN_A_ROW {
            let evidence =
                format!("{error}, and none of the last {in_a_row} requests was answered");
            tokio::spawn(async move { report(&control, &worker, life, evidence).await });
            return;
        }
        // Only Wyoming has a cheap probe; an HTTP server may legitimately wait for the rest of a request.
        if self.protocol == WorkerProtocol::Wyoming {
            let late = error.to_string();
            tokio::spawn(async move {
                if let Some(evidence) =
                    examine(&worker, late, ClientTimeouts::default(), PAUSE).await
                {
                    report(&control, &worker, life, evidence).await;
                }
            });
        }
    }
}

/// Reports a hung worker, unless it has been restarted since.
async fn report(control: &ControlHandle, worker: &WorkerHandle, life: u64, evidence: String) {
    let WorkerState::Ready { pid, .. } = worker.state() else {
        return;
    };
    if worker.starts() == life {
        let worker = worker.name().to_owned();
        control
            .tell(Event::WorkerUnresponsive {
                worker,
                pid,
                evidence,
            })
            .await;
    }
}

/// Probes a worker; returns the evidence if no probe is answered.
async fn examine(
    worker: &WorkerHandle,
    late: String,
    timeouts: ClientTimeouts,
    pause: Duration,
) -> Option<String> {
    let mut last = String::new();
    for _ in 0..QUESTIONS {
        let (WorkerState::Ready { .. }, Some(endpoint)) = (worker.state(), worker.endpoint())
        else {
            return None;
        };
        match WyomingClient::new(endpoint, timeouts).describe().await {
            Err(error @ ClientError::Late { .. }) => last = error.to_string(),
            // It answers, though with an error, or it has just ended.
            Ok(_) | Err(_) => return None,
        }
        tokio::time::sleep(pause).await;
    }
    Some(format!(
        "{late}, and {QUESTIONS} later probes timed out ({last})"
    ))
}

/// Number of probes: one slow answer under thrashing does not prove a hang.
const QUESTIONS: u32 = 3;

/// Consecutive requests without a timely answer. Our choice: given the pauses of retrying clients (LiveKit: three
/// times, every 2 s), an idle worker is ended while its first client still retries.
const IN_A_ROW: u32 = 3;

const PAUSE: Duration = Duration::from_secs(2);

/// Processor time per second that indicates computing (our choice): an idle server uses some milliseconds.
const COMPUTES: Duration = Duration::from_millis(200);

/// Longest time for which a worker counts as busy with an abandoned request; equals the maximum of `answer_timeout`.
const COMPUTES_ON_MAX: Duration = Duration::from_secs(600);

#[cfg(test)]
mod tests {
    use tokio::{net::UnixListener, sync::mpsc};

    use super::*;
    use crate::clock::MonotonicClock;
    use cotenant_probe::ProbeRoot;
    use cotenant_worker::{
        confine::Groups,
        spec::{Listen, Readiness, WorkerSpec},
    };

    #[tokio::test]
    async fn a_worker_that_answers_nothing_is_reported_with_what_it_left_unanswered_and_not_ended_here()
     {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("asr.sock");
        let argv = vec!["sleep".to_owned(), "1000".to_owned()];
        let mut spec = WorkerSpec::new("asr", argv, Listen::Socket(socket.clone()));
        spec.readiness = Readiness::Started;
        let (sender, _events) = mpsc::channel(16);
        let worker = WorkerHandle::new(
            spec,
            ProbeRoot::default(),
            Groups::none("not in this test"),
            sender,
        );
        let started = worker.start(None).await.unwrap();
        assert!(worker.ready().await);
        // Accepts connections, but never answers.
        let _listener = UnixListener::bind(&socket).unwrap();
        let short = ClientTimeouts {
            describe: Duration::from_millis(50),
            ..ClientTimeouts::default()
        };
        let late = "`unix:///asr` did not transcribe within 30.0 s".to_owned();
        let found = examine(&worker, late, short, Duration::from_millis(1))
            .await
            .unwrap();
        assert!(
            found.contains("did not transcribe within 30.0 s") && found.contains("3 later probes"),
            "{found}"
        );
        let (control, mut inbox) =
            ControlHandle::new("boot".to_owned(), Vec::new(), MonotonicClock::start(), 8);
        let life = worker.starts();
        report(&control, &worker, life + 1, found.clone()).await;
        report(&control, &worker, life, found.clone()).await;
        let expected = Event::WorkerUnresponsive {
            worker: "asr".to_owned(),
            pid: started,
            evidence: found,
        };
        assert_eq!(inbox.recv().await.unwrap().event, expected);
        assert!(
            inbox.try_recv().is_err(),
            "a worker that was restarted since is left alone"
        );
        worker.stop_because(Some(Duration::ZERO), "").await;
    }
}
