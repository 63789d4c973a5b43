//! Reload of the configuration while the daemon runs.
//!
//! Everything is read and checked before any change; the arbiter decides last, since only it has the ledger.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use tokio::sync::{mpsc, oneshot, watch};

use super::{
    control_handle::{ControlHandle, ReloadCall},
    notify,
    status::Status,
    workers,
};
use cotenant_config::{self as config, ClientConfig, Config, Fault, LoadError, reloaded};
use cotenant_http::{Access, Client, Key, Keyless};
use cotenant_policy::{
    denial::Denial,
    event::{Answer, ChangedKeys, Event, Origin},
    health::safe_profile,
    params::MachineMemory,
};
use cotenant_rpc::supervisor::{SubmitError, Supervisor as _};
use cotenant_telemetry::{LogError, LogFilter};
use cotenant_threads::{NotDone, blocking};
use cotenant_units::causes::in_one_line;
use cotenant_worker::handle::WorkerHandle;

/// Bound of the queue of calls; each call reads the file when served.
const CALLS_MAX: usize = 4;

/// Settings outside the arbiter that a reload changes.
pub(super) struct Reloader {
    pub(super) file: PathBuf,
    pub(super) log: LogFilter,
    /// Memory of the machine, which bounds the budget; it may change while the daemon runs.
    pub(super) machine: watch::Receiver<MachineMemory>,
    pub(super) running: Config,
    /// Present clients with keys.
    pub(super) clients: Option<Vec<ClientConfig>>,
    pub(super) control: Arc<ControlHandle>,
    pub(super) workers: BTreeMap<String, WorkerHandle>,
    pub(super) status: Arc<Status>,
    pub(super) access: watch::Sender<Arc<Access>>,
}

#[derive(Debug, thiserror::Error)]
enum ReloadError {
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error("cannot use `{}`: {}", .file.display(), .faults.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Settings { file: PathBuf, faults: Vec<Fault> },
    #[error(transparent)]
    Denied(Denial),
    #[error(transparent)]
    Log(#[from] LogError),
    #[error("cannot reload the configuration")]
    Control(#[source] SubmitError),
    #[error("cannot read `{}`", .file.display())]
    Read { file: PathBuf, source: NotDone },
    #[error("the supervisor is stopping")]
    Stopping,
}

impl ReloadError {
    /// Renders the complete message with causes and remedies, in lines, for the caller.
    fn report(&self) -> String {
        match self {
            Self::Load(error) => {
                let report = error.report();
                report
                    .strip_prefix("error: ")
                    .unwrap_or(&report)
                    .trim_end()
                    .to_owned()
            }
            other => in_one_line(other),
        }
    }
}

impl Reloader {
    /// Opens the channel of reload calls; returns the task that serves them in order while the daemon runs.
    pub(super) fn open(self) -> impl Future<Output = ()> {
        let (calls, waiting) = mpsc::channel(CALLS_MAX);
        self.control.note_reloader(calls);
        self.serve(waiting)
    }

    async fn serve(mut self, mut calls: mpsc::Receiver<ReloadCall>) {
        loop {
            let caller = tokio::select! {
                Ok(()) = self.machine.changed() => {
                    self.resize().await;
                    continue;
                }
                caller = calls.recv() => caller,
            };
            let Some((by, caller)) = caller else { return };
            notify::reloading();
            let outcome = self.reload(by.clone()).await;
            notify::ready();
            match &outcome {
                Ok(changes) => tracing::info!("configuration reloaded: {changes}"),
                Err(error) => {
                    let cause = in_one_line(error);
                    tracing::error!("configuration not reloaded, nothing changed: {cause}");
                    // The arbiter's denials are already in the journal.
                    if !matches!(error, ReloadError::Denied(_)) {
                        self.control
                            .tell(Event::ReloadRefused {
                                cause,
                                by: by.clone(),
                            })
                            .await;
                    }
                }
            }
            let _ = caller.send(outcome.map_err(|error| error.report()));
        }
    }

    /// Adapts the budget to the memory of the machine. The arbiter reports settings that do not fit.
    async fn resize(&mut self) {
        let machine = self.machine.borrow_and_update().clone();
        let params = self.running.params_within(&machine).map(Box::new);
        let params = params.map_err(|faults| {
            faults
                .iter()
                .map(ToString::to_string)
                .collect::<Vec<_>>()
                .join("; ")
        });
        self.control.tell(Event::Resized { machine, params }).await;
    }

    async fn reload(&mut self, by: Option<Origin>) -> Result<ChangedKeys, ReloadError> {
        let file = self.file.clone();
        let read = blocking(move || {
            let new = config::load(&file)?;
            let clients = clients_of(&new)?;
            Ok::<_, LoadError>((new, clients))
        });
        let (new, clients) = read.await.map_err(|source| ReloadError::Read {
            file: self.file.clone(),
            source,
        })??;
        let (next, mut changes) = reloaded(&self.running, &new);
        let keys_file = "http.keys_file".to_owned();
        if clients != self.clients && !changes.applied.contains(&keys_file) {
            changes.applied.push(keys_file); // same path, different contents
        }
        let machine = self.machine.borrow().clone();
        let params = next
            .params(&machine)
            .map_err(|faults| ReloadError::Settings {
                file: self.file.clone(),
                faults,
            })?;
        // A worker may start as soon as the arbiter has its settings.
        self.change_workers(&next);
        let ticket = self.control.ticket();
        let (caller, answer) = oneshot::channel();
        let event = Event::Reconfigured {
            ticket,
            params: Box::new(params),
            changes: changes.clone(),
            by: by.clone(),
        };
        let asked = self.control.submit(event, Some((ticket, caller)));
        let answer = match asked {
            Ok(()) => answer.await.map_err(|_closed| ReloadError::Stopping),
            Err(error) => Err(ReloadError::Control(error)),
        };
        match answer {
            Ok(Answer::Denied { denial, .. }) => {
                self.change_workers(&self.running);
                return Err(ReloadError::Denied(denial));
            }
            Ok(_) => {}
            Err(error) => {
                self.change_workers(&self.running);
                return Err(error);
            }
        }
        self.log.set(&next.log.filter)?;
        self.status.reconfigure(&next);
        self.clients.clone_from(&clients);
        let access = access_of(&next, clients, &self.access.borrow());
        self.access.send_replace(Arc::new(access));
        if safe_profile(&self.control.state()).is_some() {
            let ticket = self.control.ticket();
            let loads = self
                .control
                .submit(Event::OperatorLoad { ticket, by: None }, None);
            loads.map_err(ReloadError::Control)?;
        }
        self.running = next;
        Ok(changes)
    }

    /// Sets the specification of each worker for its next start.
    fn change_workers(&self, config: &Config) {
        for worker in &config.workers {
            if let Some(handle) = self.workers.get(&worker.name) {
                handle.change(workers::supervised(worker, config));
            }
        }
    }
}

/// Returns the clients with keys, if a file is configured.
///
/// # Errors
/// If that file cannot be used.
pub(super) fn clients_of(config: &Config) -> Result<Option<Vec<ClientConfig>>, LoadError> {
    let file = config.http.keys_file.as_deref();
    file.map(config::load_clients).transpose()
}

/// Returns the access rules of the HTTP APIs; clients that existed `before` keep their requests in flight.
pub(super) fn access_of(
    config: &Config,
    clients: Option<Vec<ClientConfig>>,
    before: &Access,
) -> Access {
    let known = before.clients.iter().flatten();
    let client = |client: ClientConfig| {
        let before = known.clone().find(|before| *before.name == *client.name);
        Arc::new(Client::new(
            (
                client.name.as_str(),
                Key::new(client.key.reveal().to_owned()),
            ),
            client.class,
            client.role,
            client.requests_max,
            client.tokens_max,
            before.map(Arc::as_ref),
        ))
    };
    let keyless = |what| config.http.keyless.contains(&what);
    Access {
        hosts: config.http.allowed_hosts.clone(),
        proxies: config.http.trusted_proxies.clone(),
        clients: clients.map(|clients| clients.into_iter().map(client).collect()),
        keyless: Keyless {
            health: keyless(config::Keyless::Health),
            metrics: keyless(config::Keyless::Metrics),
        },
    }
}

/// Returns the absolute path of a file, independent of later changes of the working directory.
pub(super) fn absolute(file: &Path) -> PathBuf {
    std::path::absolute(file).unwrap_or_else(|_| file.to_owned())
}
