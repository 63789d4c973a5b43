//! Detector of workers that run but do not respond.
//!
//! A request that got no answer in time proves little: the work may be long, or the machine slow. So a worker is ended
//! as hung only when several questions after it, each on a connection of its own, go unanswered too, or when no request
//! in a row was answered: one that still says what it is, and does nothing, hangs as well.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use super::workers::Speaker;
use crate::{
    config::WorkerProtocol,
    speech::client::{ClientError, ClientTimeouts, WyomingClient},
    worker::handle::{WorkerHandle, WorkerState},
};

/// Requests of one life of a worker that were not answered in time, since the last one that was.
#[derive(Clone, Debug, Default)]
pub(super) struct Unanswered(Arc<Mutex<(u64, u32)>>);

impl Unanswered {
    /// One more in this life; returns how many it are in a row.
    fn one_more(&self, life: u64) -> u32 {
        let mut count = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let before = if count.0 == life { count.1 } else { 0 };
        *count = (life, before + 1);
        before + 1
    }

    /// A request was answered to its end.
    pub(super) fn answered(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = (0, 0);
    }
}

/// Looks at a worker whose request has failed, and ends it if it hangs. Returns at once.
pub(super) fn suspect(speaker: Option<&Speaker>, error: &ClientError) {
    let (Some(speaker), ClientError::Late { .. }) = (speaker, error) else {
        return;
    };
    let worker = speaker.handle.clone();
    let life = worker.starts();
    let in_a_row = speaker.unanswered.one_more(life);
    if in_a_row >= IN_A_ROW {
        let why = format!("{error}, and none of the last {in_a_row} requests was answered");
        tokio::spawn(async move { end(&worker, life, &why).await });
        return;
    }
    // It is asked in Wyoming whether it hangs; an HTTP server may rightly wait for the rest of what it takes for a request.
    if speaker.way.protocol == WorkerProtocol::Wyoming {
        tokio::spawn(examine(worker, error.to_string(), ClientTimeouts::default(), PAUSE));
    }
}

/// Ends a worker that hangs, unless it is in another life already.
async fn end(worker: &WorkerHandle, life: u64, why: &str) {
    if worker.starts() == life && matches!(worker.state(), WorkerState::Ready { .. }) {
        tracing::warn!(worker = worker.name(), why, "ending a worker that hangs");
        let _ = worker.end_hung(why).await;
    }
}

async fn examine(worker: WorkerHandle, late: String, timeouts: ClientTimeouts, pause: Duration) {
    let start = worker.starts();
    let mut last = String::new();
    for _ in 0..QUESTIONS {
        let (WorkerState::Ready { .. }, Some(endpoint)) = (worker.state(), worker.endpoint()) else {
            return;
        };
        match WyomingClient::new(endpoint, timeouts).describe().await {
            Ok(_) => return,
            Err(error @ ClientError::Late { .. }) => last = error.to_string(),
            // It answers, if with an error, or it has just ended.
            Err(_) => return,
        }
        tokio::time::sleep(pause).await;
    }
    let why = format!("{late}, and {QUESTIONS} questions after it went unanswered ({last})");
    end(&worker, start, &why).await;
}

/// Questions that a worker may leave unanswered after a late request: one slow answer under thrash is no death.
const QUESTIONS: u32 = 3;

/// Requests in a row without an answer in time. Our choice: with the pauses of clients that try again (LiveKit: every 2 s,
/// three times) a worker that does nothing is ended while its first client still tries.
const IN_A_ROW: u32 = 3;

/// Pause between two questions.
const PAUSE: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use tokio::{net::UnixListener, sync::mpsc, time::timeout};

    use super::*;
    use crate::{
        policy::death::DeathClass,
        worker::{
            measure::KernelRoots,
            report::WorkerEventKind,
            spec::{Listen, Readiness, WorkerSpec},
        },
    };

    #[tokio::test]
    async fn a_worker_that_answers_nothing_is_ended_as_hung_with_what_it_left_unanswered() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("asr.sock");
        let argv = vec!["sleep".to_owned(), "1000".to_owned()];
        let mut spec = WorkerSpec::new("asr", argv, Listen::Socket(socket.clone()));
        spec.readiness = Readiness::Started;
        let (sender, mut events) = mpsc::channel(16);
        let worker = WorkerHandle::new(spec, KernelRoots::default(), sender);
        worker.start(None).await.unwrap();
        assert!(worker.ready().await);
        // Connections are taken, and nothing is answered.
        let _listener = UnixListener::bind(&socket).unwrap();
        let short = ClientTimeouts {
            describe: Duration::from_millis(50),
            ..ClientTimeouts::default()
        };
        let late = "`unix:///asr` did not transcribe within 30.0 s".to_owned();
        examine(worker.clone(), late, short, Duration::from_millis(1)).await;
        let certificate = loop {
            let event = timeout(Duration::from_secs(30), events.recv()).await.unwrap().unwrap();
            if let WorkerEventKind::Died(certificate) = event.kind {
                break certificate;
            }
        };
        assert_eq!(certificate.class, DeathClass::Hang);
        assert_eq!(certificate.signal, Some(libc::SIGABRT));
        let asked = certificate.asked.unwrap();
        assert!(
            asked.contains("did not transcribe within 30.0 s") && asked.contains("3 questions"),
            "{asked}"
        );
    }
}
