//! Supervision task of one worker's process.

use std::{
    io,
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::TcpStream,
    sync::{mpsc, oneshot, watch},
    time::{sleep, timeout},
};

use super::{
    adopt::{LAUNCH_VARIABLE, LOCK_VARIABLE, LaunchRecord, Survivor},
    autopsy::{self, Case, History, LINES_MAX, Life},
    confine::{Prepared, Surroundings, WorkerGroup},
    launch::Launch,
    log::{LogTail, Needle, Stream},
    mark::{SUPERVISOR_VARIABLE, SupervisorMark, WORKER_VARIABLE},
    notify::Notifications,
    orphans::{Launched, end_left_behind},
    ports::Claimed,
    pressure::{OFF, Tap, WATCH_VARIABLE, WRITE_VARIABLE},
    process::{self, Leash, Process, Spawned},
    report::{ExitReport, ExitStatus, FailureReason, Intent, WorkerEvent, WorkerEventKind},
    shared::{Command, Shared, StartError, Status, WorkerState, family, write_oom_score_adj},
    spec::Readiness,
};
use cotenant_policy::death::DeathCertificate;
use cotenant_probe::processes::ProcessStat;
use cotenant_speech::client::{ClientTimeouts, Endpoint, WyomingClient};
use cotenant_units::{causes::in_one_line, lock::locked};

/// Owner of one worker's process, serving its handles.
pub(super) struct Supervisor {
    shared: Arc<Shared>,
    inbox: mpsc::Receiver<Command>,
    status: watch::Sender<Status>,
    events: mpsc::Sender<WorkerEvent>,
}

impl Supervisor {
    pub(super) const fn new(
        shared: Arc<Shared>,
        inbox: mpsc::Receiver<Command>,
        status: watch::Sender<Status>,
        events: mpsc::Sender<WorkerEvent>,
    ) -> Self {
        Self {
            shared,
            inbox,
            status,
            events,
        }
    }

    /// Runs until the last handle is dropped.
    pub(super) async fn run(mut self) {
        while let Some(command) = self.inbox.recv().await {
            match command {
                Command::Adopt { survivor, reply } => match self.adopt(*survivor) {
                    Ok(child) => self.begin(child, reply).await,
                    // It is not in the ledger yet, so no end is reported.
                    Err(error) => {
                        let _ = reply.send(Err(error));
                    }
                },
                Command::Start { variant, reply } => match self.launch(variant).await {
                    Ok(child) => self.begin(child, reply).await,
                    Err(error) => {
                        let certificate = self.not_started(&error);
                        let reason = FailureReason::NotStarted {
                            error: in_one_line(&error),
                        };
                        let _ = reply.send(Err(error));
                        self.emit(WorkerEventKind::Died(Box::new(certificate)))
                            .await;
                        self.emit(WorkerEventKind::Failed { reason }).await;
                    }
                },
                Command::End { reply, .. } => {
                    let _ = reply.send(None);
                }
                Command::Switched { .. } => {}
            }
        }
    }

    async fn begin(&mut self, child: Child, reply: oneshot::Sender<Result<u32, StartError>>) {
        let pid = child.process.pid();
        let _ = reply.send(Ok(pid));
        self.emit(WorkerEventKind::Starting { pid }).await;
        self.attend(child).await;
    }

    async fn launch(&mut self, variant: Option<String>) -> Result<Child, StartError> {
        let spec = self.shared.spec();
        let worker = || spec.name.clone();
        let start = self.status.borrow().start + 1;
        self.status.send_modify(|status| status.start = start);
        *self.shared.history() = History::default();
        self.shared.family().clear();

        let launch =
            Launch::prepare(&spec, variant.as_deref()).map_err(|source| StartError::Launch {
                worker: worker(),
                source,
            })?;
        let confine = self.confine(&launch)?;
        let failed = |source| StartError::Execute {
            worker: worker(),
            program: launch.program.clone(),
            source,
        };
        let mark = SupervisorMark::own(&self.shared.roots.proc)
            .or_else(|_| SupervisorMark::own("/proc".as_ref()));
        let mark = mark.map_err(failed)?;
        let label = format!("{} {}", spec.name, LAUNCHES.fetch_add(1, Ordering::Relaxed));
        let mut command = launch.command;
        // Variables about this process's own supervisor and pressure file must not reach a worker.
        for variable in OURS.into_iter().chain([NOTIFY_VARIABLE, WRITE_VARIABLE]) {
            if !spec.env.contains_key(variable) {
                command.env_remove(variable);
            }
        }
        command
            .env(SUPERVISOR_VARIABLE, mark.to_string())
            .env(WORKER_VARIABLE, &label);
        match &spec.pressure {
            Some(watch) => command.env(WATCH_VARIABLE, &watch.path),
            None => command.env(WATCH_VARIABLE, OFF),
        };
        if let Some(tap) = self.shared.tap().as_ref() {
            tap.keep_open_in(&mut command);
        }
        let notifications = match spec.readiness {
            Readiness::Notify => {
                let (folder, name) = (std::env::temp_dir(), label.replace(' ', "-"));
                let socket = Notifications::open(&folder, &name, self.shared.roots.proc.clone())
                    .map_err(failed)?;
                command.env(NOTIFY_VARIABLE, socket.path());
                Some(socket)
            }
            _ => None,
        };
        let record = LaunchRecord::of(
            &spec,
            launch.endpoint.as_ref(),
            variant.as_deref(),
            confine.group().map(WorkerGroup::folder),
        );
        let leash = match (&spec.successor, record) {
            (Some(successor), Some(record)) => {
                let record = serde_json::to_string(&record)
                    .map_err(io::Error::other)
                    .map_err(failed)?;
                command
                    .env(LAUNCH_VARIABLE, record)
                    .env(LOCK_VARIABLE, &successor.lock);
                Leash::Long
            }
            _ => {
                command
                    .env_remove(LAUNCH_VARIABLE)
                    .env_remove(LOCK_VARIABLE);
                Leash::Ours
            }
        };
        let mut life = Life::before_start(&self.shared.roots);
        let started_at = Instant::now();
        let Spawned {
            process,
            stdout,
            stderr,
            group,
        } = process::spawn(command, leash, confine)
            .await
            .map_err(failed)?;
        let pid = process.pid();
        life.look_at_group(pid);
        if let Some(adjustment) = spec.oom_score_adj
            && let Err(error) = write_oom_score_adj(&self.shared.roots, pid, adjustment)
        {
            tracing::warn!(worker = spec.name, pid, adjustment, %error, "cannot set oom_score_adj");
        }

        let (stdout, stderr, log_line) = self.follow((stdout, stderr), false).map_err(failed)?;
        self.status.send_modify(|status| {
            status.state = WorkerState::Starting { pid };
            status.endpoint.clone_from(&launch.endpoint);
            status.variant = variant;
        });
        tracing::debug!(worker = spec.name, pid, group = ?group.as_ref().map(WorkerGroup::folder), "worker started");
        Ok(Child {
            process,
            stdout,
            stderr,
            log_line,
            endpoint: launch.endpoint,
            started_at,
            ready_at: None,
            taken_over: false,
            mark,
            label,
            notifications,
            group,
            _port: launch.port,
            life: Some(life),
            program: launch.program,
        })
    }

    /// Prepares the confinement of the new process; reports features missing on this machine.
    fn confine(&self, launch: &Launch) -> Result<Prepared, StartError> {
        let spec = self.shared.spec();
        let tap = spec.pressure.as_ref().map(Tap::open).transpose();
        let tap = tap.map_err(|source| StartError::Pressure {
            worker: spec.name.clone(),
            source,
        })?;
        *self.shared.tap() = tap;
        let around = Surroundings {
            worker: &spec.name,
            program: &launch.program,
            working_dir: spec.working_dir.as_deref(),
            socket_dir: match &launch.endpoint {
                Some(Endpoint::Unix(path)) => path.parent(),
                _ => None,
            },
            watched: spec.pressure.as_ref().map(|watch| watch.path.as_path()),
        };
        let confine =
            Prepared::new(&spec.confinement, &self.shared.groups, &around).map_err(|source| {
                StartError::Confine {
                    worker: spec.name.clone(),
                    source,
                }
            })?;
        for measure in &confine.measures {
            match (&measure.state, measure.asked) {
                (Err(_), true) => tracing::warn!(worker = spec.name, "{measure}"),
                _ => tracing::debug!(worker = spec.name, "{measure}"),
            }
        }
        self.shared.measures().clone_from(&confine.measures);
        Ok(confine)
    }

    fn not_started(&self, error: &StartError) -> DeathCertificate {
        let spec = self.shared.spec();
        let (program, source) = match error {
            StartError::Execute {
                program, source, ..
            } => (program.as_str(), Some(source)),
            _ => (spec.argv.first().map_or("", String::as_str), None),
        };
        // The missing resource may have been needed for a pipe or a group.
        let source = source.or_else(|| refused_by_the_kernel(error));
        let start = self.status.borrow().start;
        autopsy::not_started(
            &spec.name,
            start,
            program,
            &spec.env,
            &in_one_line(error),
            source,
        )
    }

    /// Determines the cause of an end while the process can still be inspected, before its leftovers are ended.
    async fn examine(
        &self,
        child: &mut Child,
        status: ExitStatus,
        ending: Option<&Ending>,
        exited_at: Instant,
    ) -> DeathCertificate {
        let (stdout, stderr) = tokio::join!(
            child.stdout.so_far(LINES_MAX),
            child.stderr.so_far(LINES_MAX)
        );
        let (start, history) = (self.status.borrow().start, self.shared.history().clone());
        autopsy::certify(Case {
            worker: self.shared.spec().name.clone(),
            start,
            pid: child.process.pid(),
            pidfd: child.process.descriptor(),
            status,
            intent: ending.map(|ending| ending.intent),
            why: ending.map_or_else(String::new, |ending| ending.why.clone()),
            killed: ending.is_some_and(|ending| ending.killed),
            life: child.life.take(),
            history,
            stderr,
            stdout,
            program: child.program.clone(),
            env: self.shared.spec().env.clone(),
            started_at: child.started_at,
            // For a worker taken over, the time before this run is unknown.
            ready_at: child.ready_at.filter(|_| !child.taken_over),
            was_ready: child.ready_at.is_some()
                && self.shared.spec().readiness != Readiness::Started,
            exited_at,
        })
        .await
    }

    fn adopt(&mut self, survivor: Survivor) -> Result<Child, StartError> {
        let proc = &self.shared.roots.proc;
        let failed = |source| StartError::Adopt {
            worker: self.shared.spec().name.clone(),
            pid: survivor.pid,
            source,
        };
        let process =
            Process::adopt(survivor.pid, || survivor.is_still_there(proc)).map_err(failed)?;
        let pid = process.pid();
        let output = |fd| process::reopened(proc, pid, fd).map_err(failed);
        // Output read by the previous supervisor is not repeated.
        let (stdout, stderr, log_line) = self
            .follow((output(1)?, output(2)?), survivor.was_ready)
            .map_err(failed)?;
        let started_at = survivor.started_at(proc);
        let port = match &survivor.endpoint {
            Some(Endpoint::Tcp(address)) => address
                .rsplit_once(':')
                .and_then(|(_, port)| port.parse().ok()),
            _ => None,
        };
        let port = port.and_then(Claimed::fixed);
        // Kernel messages from the time without a supervisor are unknown.
        let mut life = Life::before_start(&self.shared.roots);
        life.look_at_group(pid);
        self.status.send_modify(|status| {
            status.start += 1;
            status.state = WorkerState::Starting { pid };
            status.endpoint.clone_from(&survivor.endpoint);
            status.variant.clone_from(&survivor.variant);
        });
        let spec = self.shared.spec();
        let limit = spec.confinement.memory;
        let group = survivor
            .group
            .and_then(|folder| WorkerGroup::reopened(folder, limit));
        *self.shared.tap() = spec
            .pressure
            .as_ref()
            .and_then(|watch| Tap::reopen(watch).ok());
        tracing::debug!(worker = &*self.shared.name, pid, "worker taken over");
        Ok(Child {
            process,
            stdout,
            stderr,
            log_line,
            endpoint: survivor.endpoint,
            started_at,
            ready_at: None,
            taken_over: true,
            mark: survivor.mark,
            label: survivor.label,
            notifications: None,
            group,
            _port: port,
            life: Some(life),
            program: self.shared.spec().argv.first().cloned().unwrap_or_default(),
        })
    }

    /// Reads both outputs; `found` starts with its given value and is set when the line that shows readiness appears.
    fn follow(
        &self,
        (stdout, stderr): (OwnedFd, OwnedFd),
        seen: bool,
    ) -> io::Result<(LogTail, LogTail, watch::Receiver<bool>)> {
        let spec = self.shared.spec();
        let (found, log_line) = watch::channel(seen);
        let needle = match &spec.readiness {
            Readiness::LogLine(text) => Some(Needle::Text(text.clone())),
            Readiness::LogPattern(pattern) => Some(Needle::pattern(pattern)?),
            _ => None,
        };
        let follow = |pipe, stream| {
            let (name, found) = (Arc::clone(&self.shared.name), found.clone());
            LogTail::follow(pipe, name, stream, spec.log_lines, needle.clone(), found)
        };
        Ok((
            follow(stdout, Stream::Stdout)?,
            follow(stderr, Stream::Stderr)?,
            log_line,
        ))
    }

    /// Publishes that it is ready.
    async fn now_ready(&self, child: &mut Child) {
        let pid = child.process.pid();
        let now = Instant::now();
        child.ready_at = Some(now);
        if let Some(life) = &mut child.life {
            life.look_at_group(pid);
        }
        self.status
            .send_modify(|status| status.state = WorkerState::Ready { pid });
        let took = now.saturating_duration_since(child.started_at);
        tracing::debug!(worker = &*self.shared.name, pid, ?took, "worker ready");
        self.emit(WorkerEventKind::Ready { took }).await;
    }

    /// Supervises a process until its end.
    async fn attend(&mut self, mut child: Child) {
        let pid = child.process.pid();
        let spec = self.shared.spec();
        let ready_timeout = spec.ready_timeout;
        let last_attempt = Arc::new(Mutex::new(None));
        let readiness = child.readiness(&spec.readiness, Arc::clone(&last_attempt));
        tokio::pin!(readiness);
        let ready_deadline = sleep(ready_timeout);
        tokio::pin!(ready_deadline);
        let mut ending: Option<Ending> = None;
        let mut waiting: Vec<oneshot::Sender<Option<ExitReport>>> = Vec::new();
        let mut inbox_open = true;

        let status = loop {
            let starting = ending.is_none() && child.ready_at.is_none();
            tokio::select! {
                biased;
                status = child.process.ended() => break status,
                () = &mut readiness, if starting => self.now_ready(&mut child).await,
                () = &mut ready_deadline, if starting => {
                    if child.taken_over && spec.readiness.is_shown_once() {
                        tracing::warn!(
                            worker = &*self.shared.name, pid,
                            "worker taken over without a readiness signal, assumed ready: the earlier supervisor may have \
                             received it"
                        );
                        self.now_ready(&mut child).await;
                        continue;
                    }
                    let last_attempt = locked(&last_attempt).take();
                    let last = last_attempt.as_ref().map_or_else(String::new, |text| format!(" ({text})"));
                    let why = format!("not ready within {:.1} s{last}", ready_timeout.as_secs_f64());
                    let reason = FailureReason::NotReady { waited: ready_timeout, last_attempt };
                    self.emit(WorkerEventKind::Failed { reason }).await;
                    ending = self.end(&child.process, Intent::NotReady, spec.stop_grace, why);
                }
                () = Ending::due(ending.as_ref()), if ending.as_ref().is_some_and(|ending| !ending.killed) => {
                    tracing::warn!(worker = &*self.shared.name, pid, "worker did not stop within its grace; killing it");
                    self.signal(&child.process, libc::SIGKILL);
                    if let Some(ending) = &mut ending {
                        ending.killed = true;
                    }
                }
                command = self.inbox.recv(), if inbox_open => match command {
                    Some(Command::Start { reply, .. } | Command::Adopt { reply, .. }) => {
                        let worker = self.shared.spec().name.clone();
                        let _ = reply.send(Err(StartError::Running { worker, pid }));
                    }
                    Some(Command::End { intent, grace, why, reply }) => {
                        waiting.push(reply);
                        let sooner = Instant::now() + grace;
                        match &mut ending {
                            // The first intent counts; later requests can only shorten the grace.
                            Some(ending) if grace.is_zero() && !ending.killed => {
                                self.signal(&child.process, libc::SIGKILL);
                                ending.killed = true;
                            }
                            Some(ending) => ending.kill_at = ending.kill_at.min(sooner),
                            None => ending = self.end(&child.process, intent, grace, why),
                        }
                    }
                    Some(Command::Switched { start, variant, reply }) => {
                        self.status.send_modify(|status| {
                            if status.start == start {
                                status.variant = Some(variant);
                            }
                        });
                        let _ = reply.send(());
                    }
                    None => {
                        inbox_open = false;
                        if ending.is_none() {
                            ending = self.end(&child.process, Intent::Abandoned, Duration::ZERO, String::new());
                        }
                    }
                },
            }
        };
        let exited_at = Instant::now();
        let how = *status.as_ref().unwrap_or(&ExitStatus::Unknown);
        let certificate = self
            .examine(&mut child, how, ending.as_ref(), exited_at)
            .await;
        let sentence = certificate.verdict.sentence.clone();
        self.emit(WorkerEventKind::Died(Box::new(certificate)))
            .await;
        // A SIGKILL that we have not sent came from another process, even if we had just requested an end.
        let intent = ending
            .filter(|ending| {
                ending.killed
                    || !matches!(
                        status,
                        Ok(ExitStatus::Signal {
                            signal: libc::SIGKILL,
                            ..
                        })
                    )
            })
            .map(|ending| ending.intent);
        let report = self.bury(child, status, intent, sentence).await;
        for reply in waiting {
            let _ = reply.send(Some(report.clone()));
        }
        self.emit(WorkerEventKind::Exited(report)).await;
    }

    /// Starts ending a process; the intent is recorded before the signal is sent. `None` if it has just ended by
    /// itself, which must not be reported as requested.
    fn end(
        &self,
        process: &Process,
        intent: Intent,
        grace: Duration,
        why: String,
    ) -> Option<Ending> {
        if process.has_ended() {
            return None;
        }
        let pid = process.pid();
        // Identifies leftovers that are not adopted when it ends.
        self.shared
            .family()
            .extend(family(&self.shared.roots.proc, pid).unwrap_or_default());
        self.status
            .send_modify(|status| status.state = WorkerState::Stopping { pid });
        let ending = Ending {
            intent,
            why,
            kill_at: Instant::now() + grace,
            killed: grace.is_zero(),
        };
        let signal = match intent {
            _ if ending.killed => libc::SIGKILL,
            // A Python program may have a handler that prints its stack; others leave a core file.
            Intent::Hung => libc::SIGABRT,
            _ => libc::SIGTERM,
        };
        self.signal(process, signal);
        if !ending.killed {
            // A stopped process would not handle SIGTERM.
            self.signal(process, libc::SIGCONT);
        }
        Some(ending)
    }

    fn signal(&self, process: &Process, signal: libc::c_int) {
        if let Err(error) = process.signal_group(signal) {
            tracing::warn!(worker = &*self.shared.name, pid = process.pid(), signal, %error, "cannot signal a worker");
        }
    }

    /// Ends the leftovers of a process, reaps it and returns its exit report.
    async fn bury(
        &self,
        child: Child,
        status: io::Result<ExitStatus>,
        intent: Option<Intent>,
        sentence: String,
    ) -> ExitReport {
        let pid = child.process.pid();
        let proc = &self.shared.roots.proc;
        let start_of = |pid| ProcessStat::read(proc, pid).map(|process| process.start_ticks);
        let mut seen = std::mem::take(&mut *self.shared.family());
        let members = child
            .group
            .as_ref()
            .map(WorkerGroup::members)
            .unwrap_or_default();
        seen.extend(
            members
                .into_iter()
                .filter_map(|pid| Some((pid, start_of(pid)?))),
        );
        let launched = Launched {
            leader: pid,
            since: start_of(pid).unwrap_or(u64::MAX),
            supervisor: &child.mark,
            label: &child.label,
            seen,
        };
        let left = end_left_behind(&self.shared.roots, launched).await;
        let (stdout, stderr) = tokio::join!(child.stdout.finish(), child.stderr.finish());
        *self.shared.tap() = None;
        child.process.reap();
        drop(child.group);
        let status = status.unwrap_or_else(|error| {
            tracing::error!(worker = &*self.shared.name, pid, %error, "cannot read the exit status of a worker");
            ExitStatus::Unknown
        });
        if let Some(Endpoint::Unix(path)) = &child.endpoint {
            // A killed worker cannot remove it.
            let _ = std::fs::remove_file(path);
        }
        self.status.send_modify(|status| {
            status.state = WorkerState::Stopped;
            status.endpoint = None;
        });
        let report = ExitReport {
            worker: Arc::clone(&self.shared.name),
            pid,
            status,
            intended_by_us: intent,
            ready_at: child.ready_at,
            sentence,
            stderr,
            stdout,
            left_behind: left.len(),
        };
        tracing::debug!("{report}");
        report
    }

    async fn emit(&self, kind: WorkerEventKind) {
        let event = WorkerEvent {
            worker: Arc::clone(&self.shared.name),
            start: self.status.borrow().start,
            kind,
        };
        // The receiver is gone only when the daemon exits.
        let _ = self.events.send(event).await;
    }
}

/// Returns the kernel's own error in an error's chain.
fn refused_by_the_kernel(error: &StartError) -> Option<&io::Error> {
    let mut next = std::error::Error::source(error);
    while let Some(error) = next {
        match error.downcast_ref::<io::Error>() {
            Some(found) if found.raw_os_error().is_some() => return Some(found),
            _ => next = error.source(),
        }
    }
    None
}

struct Child {
    process: Process,
    stdout: LogTail,
    stderr: LogTail,
    log_line: watch::Receiver<bool>,
    endpoint: Option<Endpoint>,
    started_at: Instant,
    ready_at: Option<Instant>,
    /// Whether an earlier supervisor has started it.
    taken_over: bool,
    mark: SupervisorMark,
    /// Name of the worker and number of this launch, as in the environment of the process.
    label: String,
    notifications: Option<Notifications>,
    /// Its control group; removed when its last process has ended.
    group: Option<WorkerGroup>,
    _port: Option<Claimed>,
    /// State before the start, for the examination of its end.
    life: Option<Life>,
    program: String,
}

impl Child {
    /// Waits until the worker is ready; each failed attempt stores its error.
    fn readiness(
        &mut self,
        readiness: &Readiness,
        last_attempt: Arc<Mutex<Option<String>>>,
    ) -> impl Future<Output = ()> + Send + use<> {
        let mut log_line = self.log_line.clone();
        let endpoint = self.endpoint.clone();
        let readiness = readiness.clone();
        let (notifications, pid) = (self.notifications.take(), self.process.pid());
        async move {
            let note = |text: String| {
                *locked(&last_attempt) = Some(text);
            };
            match (readiness, endpoint) {
                (Readiness::Started, _) => {}
                (Readiness::LogLine(text) | Readiness::LogPattern(text), _) => {
                    if log_line.wait_for(|&found| found).await.is_err() {
                        note(format!("its output ended without `{text}`"));
                        std::future::pending::<()>().await;
                    }
                }
                (Readiness::Notify, _) => {
                    note("it has not sent `READY=1`".to_owned());
                    let Some(notifications) = notifications else {
                        // Taken over: an earlier supervisor has received the notification, or it will never come.
                        if *log_line.borrow() {
                            return;
                        }
                        return std::future::pending().await;
                    };
                    loop {
                        match notifications.next(pid).await {
                            Ok(sent) if sent.ready => break,
                            Ok(sent) => note(format!(
                                "it has not sent `READY=1`; its status is `{}`",
                                sent.status.unwrap_or_default()
                            )),
                            Err(error) => {
                                note(format!("its notifications cannot be read: {error}"));
                                std::future::pending::<()>().await;
                            }
                        }
                    }
                }
                (Readiness::Connect | Readiness::Describe | Readiness::Http { .. }, None) => {
                    note("it has no endpoint to probe".to_owned());
                    std::future::pending::<()>().await;
                }
                (readiness, Some(endpoint)) => {
                    let mut pause = ATTEMPT_PAUSE_MIN;
                    while let Err(error) = attempt(&readiness, &endpoint).await {
                        note(error);
                        sleep(pause).await;
                        pause = (pause * 2).min(ATTEMPT_PAUSE_MAX);
                    }
                }
            }
        }
    }
}

/// Checks once whether a worker is ready.
async fn attempt(readiness: &Readiness, endpoint: &Endpoint) -> Result<(), String> {
    let client = WyomingClient::new(endpoint.clone(), ClientTimeouts::default());
    match (readiness, endpoint) {
        (Readiness::Describe, _) => client
            .describe()
            .await
            .map(drop)
            .map_err(|error| in_one_line(&error)),
        (Readiness::Http { path, status }, Endpoint::Tcp(address)) => {
            timeout(ATTEMPT_TIMEOUT, http_get(address, path, *status))
                .await
                .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
                .map_err(|error| format!("`GET {path}` of `{endpoint}`: {error}"))
        }
        _ => client
            .connect_only()
            .await
            .map_err(|error| in_one_line(&error)),
    }
}

/// Succeeds if a `GET` returns the status.
async fn http_get(address: &str, path: &str, status: u16) -> io::Result<()> {
    let mut stream = TcpStream::connect(address).await?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut line = Vec::new();
    BufReader::new(stream.take(STATUS_LINE_BYTES_MAX))
        .read_until(b'\n', &mut line)
        .await?;
    let line = String::from_utf8_lossy(&line);
    let line = line.trim_end();
    match line.split(' ').nth(1) {
        Some(code) if line.starts_with("HTTP/") && code.parse() == Ok(status) => Ok(()),
        _ => Err(io::Error::other(format!("answered `{line}`"))),
    }
}

struct Ending {
    intent: Intent,
    why: String,
    kill_at: Instant,
    killed: bool,
}

impl Ending {
    async fn due(ending: Option<&Self>) {
        match ending {
            Some(ending) => tokio::time::sleep_until(ending.kill_at.into()).await,
            None => std::future::pending().await,
        }
    }
}

/// Launches of this program so far, so that each process has a unique mark.
static LAUNCHES: AtomicU64 = AtomicU64::new(1);

/// Variable with the path of the sd_notify(3) socket.
const NOTIFY_VARIABLE: &str = "NOTIFY_SOCKET";

/// Variables that systemd sets for a service itself (systemd.exec(5), sd_listen_fds(3), sd_watchdog_enabled(3)).
const OURS: [&str; 17] = [
    "CACHE_DIRECTORY",
    "CONFIGURATION_DIRECTORY",
    "CREDENTIALS_DIRECTORY",
    "FDSTORE",
    "INVOCATION_ID",
    "JOURNAL_STREAM",
    "LISTEN_FDNAMES",
    "LISTEN_FDS",
    "LISTEN_PID",
    "LOGS_DIRECTORY",
    "MAINPID",
    "MANAGERPID",
    "RUNTIME_DIRECTORY",
    "STATE_DIRECTORY",
    "SYSTEMD_EXEC_PID",
    "WATCHDOG_PID",
    "WATCHDOG_USEC",
];

const STATUS_LINE_BYTES_MAX: u64 = 1024;

/// Time limit of one HTTP attempt; Wyoming attempts have the client's own timeouts.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(1);

/// Initial pause between two attempts to reach a starting worker; doubles up to the longest.
const ATTEMPT_PAUSE_MIN: Duration = Duration::from_millis(10);

/// Longest pause, which bounds the delay in detecting readiness.
const ATTEMPT_PAUSE_MAX: Duration = Duration::from_millis(100);
