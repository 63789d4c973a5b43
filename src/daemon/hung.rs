//! Workers that live and do nothing.
//!
//! A request that got no answer in time proves little: the work may be long, or the machine slow. So a worker is ended
//! as hung only when several questions after it, each on a connection of its own, go unanswered too.

use std::time::Duration;

use crate::{
    speech::client::{ClientError, ClientTimeouts, WyomingClient},
    worker::handle::{WorkerHandle, WorkerState},
};

/// Looks at a worker whose request has failed, and ends it if it hangs. Returns at once.
pub(super) fn suspect(worker: Option<&WorkerHandle>, error: &ClientError) {
    if let (Some(worker), ClientError::Late { .. }) = (worker, error) {
        tokio::spawn(examine(
            worker.clone(),
            error.to_string(),
            ClientTimeouts::default(),
            PAUSE,
        ));
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
    if worker.starts() == start && matches!(worker.state(), WorkerState::Ready { .. }) {
        let why = format!("{late}, and {QUESTIONS} questions after it went unanswered ({last})");
        tracing::warn!(worker = worker.name(), why, "ending a worker that hangs");
        let _ = worker.end_hung(&why).await;
    }
}

/// Questions that a worker may leave unanswered after a late request: one slow answer under thrash is no death.
const QUESTIONS: u32 = 3;

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
