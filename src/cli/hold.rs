//! `cotenant hold`: a lease for a program without lease support.
//!
//! The program is notified of memory pressure by a FIFO in `$MEMORY_PRESSURE_WATCH`, as by systemd, and its memory is
//! measured like the supervisor measures it. When the lease ends (by the supervisor, or after a term without one), the
//! program is ended before its term expires, since memory may not be used without a lease.
//!
//! A control group needs no program to keep its lease: the lease lasts as long as the group.
//!
//! A target is confirmed only after the program has read the notification: before that, it may fill its lease at any
//! time, even if it uses little now.

use std::{
    collections::VecDeque,
    fs,
    os::{fd::AsFd as _, unix::fs::OpenOptionsExt as _},
    path::{Path, PathBuf},
    process::{ExitCode, ExitStatus},
    time::{Duration, Instant},
};

use clap::{Args, ValueEnum};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::stat::Mode,
    unistd,
};
use serde_json::{Value, json};
use tokio::{process::Child, sync::mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};

use super::{
    Global, Output,
    exit::{self, CliError},
    group::{self, GroupArgs},
    output, quantity,
    session::{Interrupts, end_with_parent},
    stage::TemporaryFolder,
};
use cotenant_probe::{
    ProbeRoot,
    processes::{self, ProcessTable},
};
use cotenant_rpc::json::lease as lease_json;
use cotenant_rpc::v1::{
    CreateLeaseRequest, HoldLeaseRequest, HoldLeaseResponse, Lease, LeaseClass,
    ReleaseLeaseRequest, Target, TargetState, hold_lease_response::Message,
    lease_service_client::LeaseServiceClient,
};
use cotenant_units::{Bytes, TimeSpan, millis};
use cotenant_worker::{descent::adopt_descendants, orphans};

/// Keeps a lease until interrupted, or until a program that runs under it has ended.
#[derive(Debug, Args)]
pub struct Hold {
    /// Name of the holder: a letter, then letters, digits, `-`, `_` and `.`.
    tenant: String,
    /// Minimum memory that the program needs, with its unit: `180MiB`.
    #[arg(long, value_name = "BYTES", value_parser = quantity::some)]
    min: Bytes,
    /// Maximum memory that the program can use [default: --min]. Memory above --min may be reclaimed; a program that does
    /// not read $MEMORY_PRESSURE_WATCH is then terminated with its lease.
    #[arg(long, value_name = "BYTES", value_parser = quantity::size)]
    max: Option<Bytes>,
    /// Urgency of its work.
    #[arg(long, value_enum, default_value_t = Class::Interactive)]
    class: Class,
    /// Term of the lease without contact to the supervisor [default: 10s]; the program receives SIGTERM shortly before
    /// its end, and SIGKILL at its end. The lease of a control group has a term only with this option, and ends after
    /// it unless a client renews it.
    #[arg(long, value_name = "DURATION", value_parser = quantity::duration)]
    term: Option<Duration>,
    /// Longest wait for memory.
    #[arg(long, value_name = "DURATION", default_value = "0s", value_parser = quantity::duration)]
    wait: Duration,
    #[command(flatten)]
    group: GroupArgs,
    /// Command to run under the lease, with its arguments.
    #[arg(last = true, value_name = "COMMAND", conflicts_with = "GroupArgs")]
    command: Vec<String>,
}

/// Classes on the command line.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Class {
    AudioRealtime,
    Batch,
    Interactive,
    LlmElastic,
}

impl From<Class> for LeaseClass {
    fn from(class: Class) -> Self {
        match class {
            Class::AudioRealtime => Self::AudioRealtime,
            Class::Batch => Self::Batch,
            Class::Interactive => Self::Interactive,
            Class::LlmElastic => Self::LlmElastic,
        }
    }
}

pub(super) async fn run(global: &Global, hold: &Hold) -> Result<ExitCode, CliError> {
    if let Some(max) = hold.max.filter(|max| *max < hold.min) {
        let least = hold.min;
        let act = format!("--max {max} is below --min {least}");
        return Err(CliError::plain(act, exit::USAGE));
    }
    let mut interrupts =
        Interrupts::new().map_err(|error| CliError::failed("cannot watch signals", error))?;
    adopt_descendants()
        .map_err(|error| CliError::failed("cannot track child processes of the program", error))?;
    let group = hold.group.path()?;
    let mut leases = LeaseServiceClient::new(global.connect().await?);
    let lease = create(global, &mut leases, hold, group.as_deref()).await?;
    if group.is_some() {
        match global.output {
            Output::Table => output::write(&format!("{}\n", lease.name))?,
            Output::Json | Output::Ndjson => {
                output::write_json(global.output, &lease_json(&lease))?;
            }
        }
        return Ok(ExitCode::SUCCESS);
    }
    let mut keeper = Keeper {
        say: Say {
            output: global.output,
            beside_a_program: !hold.command.is_empty(),
        },
        heard: Instant::now(),
        sent: VecDeque::new(),
        term: hold.term.unwrap_or(TERM),
        lease,
        due: None,
        program: None,
    };
    keeper.say.held(&keeper.lease)?;
    if let Some((program, arguments)) = hold.command.split_first() {
        match Program::start(program, arguments, &keeper.lease) {
            Ok(started) => keeper.program = Some(started),
            Err(error) => {
                keeper.release(global, &mut leases).await;
                let code = match error.kind() {
                    std::io::ErrorKind::NotFound => NOT_FOUND,
                    std::io::ErrorKind::PermissionDenied => NOT_EXECUTABLE,
                    _ => exit::FAILED,
                };
                return Err(
                    CliError::failed(format!("cannot start `{program}`"), error).with_code(code)
                );
            }
        }
    }
    let over = tokio::select! {
        over = keeper.keep(&mut leases) => over,
        code = interrupts.next() => Ok(Over::Interrupted(code)),
    };
    let code = match over {
        Ok(Over::Exited(status)) => {
            keeper.release(global, &mut leases).await;
            code_of(status)
        }
        Ok(Over::Interrupted(code)) => {
            keeper.end_program().await;
            keeper.release(global, &mut leases).await;
            ExitCode::from(code)
        }
        Ok(Over::Ended(reason)) => {
            keeper.end_program().await;
            keeper.say.line(
                "over",
                &format!("over: {reason}"),
                &json!({ "reason": reason }),
            )?;
            ExitCode::from(exit::REFUSED)
        }
        Err(error) => {
            keeper.end_program().await;
            return Err(error);
        }
    };
    Ok(code)
}

async fn create(
    global: &Global,
    leases: &mut LeaseServiceClient<tonic::transport::Channel>,
    hold: &Hold,
    group: Option<&str>,
) -> Result<Lease, CliError> {
    let duration = |duration: Duration| prost_types::Duration::try_from(duration).ok();
    let since = std::time::SystemTime::UNIX_EPOCH
        .elapsed()
        .unwrap_or_default();
    let term = hold.term.or(group.is_none().then_some(TERM));
    let mut request = tonic::Request::new(CreateLeaseRequest {
        request_id: match group {
            Some(group) => group::request_id(group),
            None => format!("hold-{}-{}", std::process::id(), since.as_nanos()),
        },
        tenant: hold.tenant.clone(),
        lease_class: LeaseClass::from(hold.class).into(),
        min_bytes: hold.min.get(),
        max_bytes: hold.max.unwrap_or_default().get(),
        term: term.and_then(duration),
        max_wait: duration(hold.wait),
        cgroup: group.unwrap_or_default().to_owned(),
        ..CreateLeaseRequest::default()
    });
    request.set_timeout(global.timeout + hold.wait);
    let created = tokio::time::timeout(
        global.timeout + hold.wait + super::global::ANSWER_GRACE,
        leases.create_lease(request),
    );
    let created = created.await.map_err(|_| global.too_late())??;
    let lease = created.into_inner().lease;
    lease.ok_or_else(|| {
        CliError::plain(
            "cannot hold a lease: the response contains none",
            exit::FAILED,
        )
    })
}

enum Over {
    Ended(String),
    Exited(ExitStatus),
    Interrupted(u8),
}

enum Next {
    Exited(ExitStatus),
    Heard(Box<Result<Option<HoldLeaseResponse>, Status>>),
    Time,
}

struct Due {
    target: Target,
    /// Whether the target was answered on this stream. Answers are not repeated, since each causes two responses.
    said: bool,
}

struct Keeper {
    say: Say,
    lease: Lease,
    term: Duration,
    /// Sending time of the last confirmed renewal: the term starts no earlier.
    heard: Instant,
    /// Sending times of unconfirmed renewals on this stream.
    sent: VecDeque<Instant>,
    due: Option<Due>,
    program: Option<Program>,
}

impl Keeper {
    /// Keeps the lease until it ends, across losses of the stream and restarts of the supervisor.
    async fn keep(
        &mut self,
        leases: &mut LeaseServiceClient<tonic::transport::Channel>,
    ) -> Result<Over, CliError> {
        loop {
            let (say, said) = mpsc::channel(ANSWERS_MAX);
            self.sent.clear();
            self.send(&say, self.message());
            // A supervisor that does not answer is treated as absent.
            match tokio::time::timeout(self.left(), leases.hold_lease(ReceiverStream::new(said)))
                .await
            {
                Ok(Ok(stream)) => {
                    if let Some(over) = self.listen(&say, stream.into_inner()).await? {
                        return Ok(over);
                    }
                }
                Ok(Err(status)) if is_final(&status) => {
                    return Ok(Over::Ended(status.message().to_owned()));
                }
                Ok(Err(_)) | Err(_) => {}
            }
            if self.left().is_zero() {
                let away = format!(
                    "the supervisor is unreachable, and the term of {} expires",
                    TimeSpan(self.term)
                );
                return Ok(Over::Ended(away));
            }
            let pause = PAUSE.min(self.left());
            if let Some(program) = &mut self.program {
                if let Ok(status) = tokio::time::timeout(pause, program.ended(&self.say)).await {
                    let status = status
                        .map_err(|error| CliError::failed("cannot wait for the program", error))?;
                    return Ok(Over::Exited(status));
                }
            } else {
                tokio::time::sleep(pause).await;
            }
        }
    }

    /// Returns the time left until the lease expires, minus the grace for the program.
    fn left(&self) -> Duration {
        let to_end = self
            .program
            .as_ref()
            .map_or(Duration::ZERO, |_| GRACE.min(self.term / 8));
        self.of_term().saturating_sub(to_end)
    }

    /// Returns the time left of the term, as far as renewals are confirmed.
    fn of_term(&self) -> Duration {
        self.term.saturating_sub(self.heard.elapsed())
    }

    /// Returns the time until the next check without a message.
    fn pause(&self, renew_at: Instant) -> Duration {
        let look = if self.due.is_some() {
            LOOK
        } else {
            self.term / 3
        };
        renew_at
            .saturating_duration_since(Instant::now())
            .min(look)
            .min(self.left())
    }

    /// Keeps the lease on one stream; `None` if that is lost.
    async fn listen(
        &mut self,
        say: &mpsc::Sender<HoldLeaseRequest>,
        mut stream: Streaming<HoldLeaseResponse>,
    ) -> Result<Option<Over>, CliError> {
        let mut renew_at = Instant::now() + self.term / 3;
        loop {
            let pause = self.pause(renew_at);
            let exited = async {
                match &mut self.program {
                    Some(program) => program.ended(&self.say).await,
                    None => std::future::pending().await,
                }
            };
            let next = tokio::select! {
                status = exited => {
                    Next::Exited(status.map_err(|error| CliError::failed("cannot wait for the program", error))?)
                }
                heard = stream.message() => Next::Heard(Box::new(heard)),
                () = tokio::time::sleep(pause) => Next::Time,
            };
            match next {
                Next::Exited(status) => return Ok(Some(Over::Exited(status))),
                Next::Heard(heard) => match *heard {
                    Ok(Some(response)) => {
                        if let Some(reason) = self.hear(response)? {
                            return Ok(Some(Over::Ended(reason)));
                        }
                        self.answer(say)?;
                    }
                    Err(status) if is_final(&status) => {
                        return Ok(Some(Over::Ended(status.message().to_owned())));
                    }
                    Ok(None) | Err(_) => return Ok(None),
                },
                Next::Time => {
                    if self.left().is_zero() {
                        return Ok(None);
                    }
                    self.answer(say)?;
                    if let Some(program) = &self.program {
                        program.others();
                    }
                    if Instant::now() >= renew_at {
                        renew_at = Instant::now() + self.term / 3;
                        self.send(say, self.message());
                    }
                }
            }
        }
    }

    /// Handles a message of the supervisor; returns the reason if the lease has ended.
    fn hear(&mut self, response: HoldLeaseResponse) -> Result<Option<String>, CliError> {
        match response.message {
            Some(Message::Renewed(lease)) => {
                self.heard = self.sent.pop_front().unwrap_or(self.heard);
                let changed = lease.held_bytes != self.lease.held_bytes;
                self.lease = lease;
                if changed {
                    self.say.held(&self.lease)?;
                }
            }
            Some(Message::Target(target)) => {
                let known = self
                    .due
                    .as_ref()
                    .is_some_and(|due| due.target.nonce == target.nonce);
                if !known {
                    self.say.target(&target)?;
                    if let Some(program) = &self.program {
                        program.tell();
                    }
                }
                self.due = Some(Due {
                    target,
                    said: false,
                });
            }
            Some(Message::Ended(ended)) => return Ok(Some(ended.reason)),
            Some(Message::Receipt(_)) | None => {}
        }
        Ok(None)
    }

    /// Answers the pending target by the measured memory, once the program has read its notification: first that it is
    /// not reached yet, if so, then that it is.
    fn answer(&mut self, say: &mpsc::Sender<HoldLeaseRequest>) -> Result<(), CliError> {
        let has_heard = self.program.as_ref().is_none_or(Program::has_heard);
        let Some(Due { target, said }) = self.due.take_if(|_| has_heard) else {
            return Ok(());
        };
        let used = used();
        let applied = used.filter(|used| used.get() <= target.target_bytes);
        if applied.is_none() {
            self.due = Some(Due {
                target: target.clone(),
                said: true,
            });
            if said {
                return Ok(());
            }
        }
        let answer = match (applied, used) {
            (Some(used), _) => {
                let text = format!("shrunk to {used}");
                self.say
                    .line("applied", &text, &json!({ "used_bytes": used.get() }))?;
                (TargetState::Applied, Some(used.get()), String::new())
            }
            (None, Some(used)) => (TargetState::Deferred, Some(used.get()), String::new()),
            (None, None) => (
                TargetState::Refused,
                None,
                "the memory of this holder cannot be measured".to_owned(),
            ),
        };
        let (state, used_bytes, error_detail) = answer;
        let message = HoldLeaseRequest {
            nonce: target.nonce,
            target_bytes: target.target_bytes,
            state: state.into(),
            used_bytes,
            error_detail,
            ..self.message()
        };
        self.send(say, message);
        Ok(())
    }

    /// If the supervisor does not read, messages queue up, and further ones are dropped.
    fn send(&mut self, say: &mpsc::Sender<HoldLeaseRequest>, message: HoldLeaseRequest) {
        let now = Instant::now();
        if say.try_send(message).is_ok() {
            self.sent.push_back(now);
        }
    }

    fn message(&self) -> HoldLeaseRequest {
        HoldLeaseRequest {
            name: self.lease.name.clone(),
            boot_id: self.lease.boot_id.clone(),
            generation: self.lease.generation,
            ..HoldLeaseRequest::default()
        }
    }

    /// Releases the lease; if that fails, it ends with this process.
    async fn release(
        &self,
        global: &Global,
        leases: &mut LeaseServiceClient<tonic::transport::Channel>,
    ) {
        let release = global.request(ReleaseLeaseRequest {
            name: self.lease.name.clone(),
            boot_id: self.lease.boot_id.clone(),
            generation: self.lease.generation,
        });
        let _ = global.call(leases.release_lease(release)).await;
    }

    /// Ends the program, at the latest with the term, since the lease is not renewed meanwhile.
    async fn end_program(&mut self) {
        let grace = GRACE.min(self.of_term());
        if let Some(program) = &mut self.program {
            program.end(grace).await;
        }
    }
}

struct Program {
    child: Child,
    /// Exit status, while processes that it started continue.
    exited: Option<ExitStatus>,
    /// Open in both directions, so that opening does not block and the reader sees no end of file.
    fifo: fs::File,
    /// Folder of the FIFO, removed on drop.
    _folder: TemporaryFolder,
}

impl Program {
    fn start(program: &str, arguments: &[String], lease: &Lease) -> std::io::Result<Self> {
        let folder = TemporaryFolder::new("cotenant-hold")?;
        let path: PathBuf = folder.path().join("pressure");
        let fifo = fifo(&path)?;
        let mut command = std::process::Command::new(program);
        command
            .args(arguments)
            .env("MEMORY_PRESSURE_WATCH", &path)
            .env_remove("MEMORY_PRESSURE_WRITE")
            .env("COTENANT_LEASE", &lease.name)
            .env("COTENANT_LEASE_BYTES", lease.held_bytes.to_string());
        end_with_parent(&mut command);
        let child = tokio::process::Command::from(command)
            .kill_on_drop(true)
            .spawn()?;
        Ok(Self {
            child,
            exited: None,
            fifo,
            _folder: folder,
        })
    }

    /// Notifies it that memory is short. If the FIFO is full, it is already notified.
    fn tell(&self) {
        let _ = unistd::write(&self.fifo, b"\n");
    }

    /// Returns whether it has read all notifications. A watcher reads the FIFO, since it would stay readable otherwise.
    fn has_heard(&self) -> bool {
        let mut unread = [PollFd::new(self.fifo.as_fd(), PollFlags::POLLIN)];
        poll(&mut unread, PollTimeout::ZERO).is_ok_and(|unread| unread == 0)
    }

    /// Waits until it and all processes that it started have ended, since their memory belongs to the lease. Returns
    /// the program's own exit status.
    async fn ended(&mut self, say: &Say) -> std::io::Result<ExitStatus> {
        let status = match self.exited {
            Some(status) => status,
            None => self.child.wait().await?,
        };
        while let left @ 1.. = self.others() {
            if self.exited.replace(status).is_none() {
                let text = format!(
                    "the program ended ({status}); the lease continues for {left} of its processes"
                );
                let _ = say.line("program_ended", &text, &json!({ "processes": left }));
            }
            tokio::time::sleep(LOOK_FOR_OTHERS).await;
        }
        Ok(status)
    }

    /// Returns the number of processes that it started; reaps ended ones.
    fn others(&self) -> usize {
        orphans::descendants(&ProbeRoot::default().proc, self.child.id())
    }

    /// Sends SIGTERM to it and its descendants, and SIGKILL after `grace`.
    async fn end(&mut self, grace: Duration) {
        let proc = ProbeRoot::default().proc;
        let pid = self.child.id().and_then(|pid| i32::try_from(pid).ok());
        if let Some(pid) = pid {
            let _ = nix::sys::signal::kill(
                unistd::Pid::from_raw(pid),
                nix::sys::signal::Signal::SIGTERM,
            );
        }
        orphans::ask_descendants_to_end(&proc, self.child.id());
        let all = async {
            let _ = self.child.wait().await;
            while orphans::descendants(&proc, None) > 0 {
                tokio::time::sleep(LOOK).await;
            }
        };
        if tokio::time::timeout(grace, all).await.is_err() {
            let _ = self.child.kill().await;
            orphans::end_descendants(&proc).await;
        }
    }
}

fn fifo(path: &Path) -> std::io::Result<fs::File> {
    unistd::mkfifo(path, Mode::S_IRUSR | Mode::S_IWUSR)?;
    fs::OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)
}

/// Returns the memory of this process and its descendants, as measured by the supervisor.
fn used() -> Option<Bytes> {
    let proc = ProbeRoot::default().proc;
    let table = ProcessTable::read(&proc).ok()?;
    Some(processes::sum(&proc, table.tree(std::process::id())).used)
}

/// Returns whether another stream would be refused in the same way.
fn is_final(status: &Status) -> bool {
    matches!(
        status.code(),
        Code::NotFound
            | Code::FailedPrecondition
            | Code::PermissionDenied
            | Code::InvalidArgument
            | Code::Unimplemented
    )
}

fn code_of(status: ExitStatus) -> ExitCode {
    use std::os::unix::process::ExitStatusExt as _;
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    // As in shells.
    let signalled = || {
        status
            .signal()
            .and_then(|signal| u8::try_from(128 + signal).ok())
    };
    ExitCode::from(code.or_else(signalled).unwrap_or(exit::FAILED))
}

/// Destination of messages: stderr, since stdout belongs to the program.
struct Say {
    output: Output,
    beside_a_program: bool,
}

impl Say {
    fn held(&self, lease: &Lease) -> Result<(), CliError> {
        let held = Bytes::new(lease.held_bytes);
        let text = format!("holds {held} as `{}`", lease.name);
        self.line(
            "held",
            &text,
            &json!({ "name": lease.name, "held_bytes": lease.held_bytes }),
        )
    }

    fn target(&self, target: &Target) -> Result<(), CliError> {
        let left = target
            .deadline_in
            .and_then(|left| Duration::try_from(left).ok());
        let left = left.unwrap_or_default();
        let text = format!(
            "shrink to {} within {:.1} s: {}",
            Bytes::new(target.target_bytes),
            left.as_secs_f64(),
            target.reason
        );
        let fields = json!({
            "nonce": target.nonce,
            "target_bytes": target.target_bytes,
            "deadline_in_ms": millis(left),
            "reason": target.reason,
        });
        self.line("target", &text, &fields)
    }

    fn line(&self, what: &str, text: &str, fields: &Value) -> Result<(), CliError> {
        let line = match self.output {
            Output::Table => format!("{text}\n"),
            Output::Json | Output::Ndjson => {
                format!("{}\n", json!({ "event": what, "fields": fields }))
            }
        };
        if self.beside_a_program {
            use std::io::Write as _;
            // The program continues even if stderr is closed.
            let _ = std::io::stderr()
                .lock()
                .write_all(exit::escaped(&line).as_bytes());
            return Ok(());
        }
        output::write(&line)
    }
}

/// Default term of a lease that this process keeps.
const TERM: Duration = Duration::from_secs(10);

/// Bound of the queue of messages to the supervisor.
const ANSWERS_MAX: usize = 8;

/// Pause between attempts to reach the supervisor.
const PAUSE: Duration = Duration::from_millis(100);

/// Interval of measurements while a target is pending: a fifth of the tolerance beyond a deadline (our choice).
const LOOK: Duration = Duration::from_millis(50);

/// Polling interval for the descendants of an ended program (our choice).
const LOOK_FOR_OTHERS: Duration = Duration::from_millis(250);

/// Longest time between SIGTERM and SIGKILL; the rest of the term may be shorter.
const GRACE: Duration = Duration::from_secs(5);

/// Exit codes of a shell for a program that is not found, or not executable.
const NOT_FOUND: u8 = 127;
const NOT_EXECUTABLE: u8 = 126;

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;
    use cotenant_rpc::v1::TargetReceipt;

    const TERM: Duration = Duration::from_secs(300);

    fn keeper(program: Option<&str>) -> Keeper {
        let lease = Lease::default();
        let arguments = |script: &str| ["-c".to_owned(), script.to_owned()];
        Keeper {
            say: Say {
                output: Output::Table,
                beside_a_program: true,
            },
            program: program
                .map(|script| Program::start("sh", &arguments(script), &lease).unwrap()),
            lease,
            term: TERM,
            heard: Instant::now(),
            sent: VecDeque::new(),
            due: None,
        }
    }

    fn hears(keeper: &mut Keeper, say: &mpsc::Sender<HoldLeaseRequest>, message: Message) {
        let response = HoldLeaseResponse {
            message: Some(message),
        };
        assert_eq!(keeper.hear(response).unwrap(), None);
        keeper.answer(say).unwrap();
    }

    const fn target(nonce: u64, target_bytes: u64) -> Message {
        Message::Target(Target {
            nonce,
            target_bytes,
            revoke_deadline: None,
            deadline_in: None,
            reason: String::new(),
        })
    }

    #[test]
    fn what_is_not_down_yet_is_said_once_and_not_to_each_answer() {
        let (say, mut said) = mpsc::channel(ANSWERS_MAX);
        let mut keeper = keeper(None);
        // No process uses less than this.
        hears(&mut keeper, &say, target(7, 1));
        assert_eq!(said.try_recv().unwrap().state(), TargetState::Deferred);
        for _ in 0..3 {
            hears(
                &mut keeper,
                &say,
                Message::Receipt(TargetReceipt::default()),
            );
            hears(&mut keeper, &say, Message::Renewed(Lease::default()));
        }
        assert!(
            said.try_recv().is_err(),
            "its receipts are no reason to say it again"
        );
        // Another stream repeats the target.
        hears(&mut keeper, &say, target(7, 1));
        assert_eq!(said.try_recv().unwrap().state(), TargetState::Deferred);
        hears(&mut keeper, &say, target(8, u64::MAX));
        assert_eq!(said.try_recv().unwrap().state(), TargetState::Applied);
        assert!(keeper.due.is_none());
    }

    #[tokio::test]
    async fn a_program_that_has_not_read_that_memory_is_short_is_not_answered_for() {
        let (say, mut said) = mpsc::channel(ANSWERS_MAX);
        let mut keeper = keeper(Some("exec sleep 1000"));
        hears(&mut keeper, &say, target(7, u64::MAX));
        hears(&mut keeper, &say, Message::Renewed(Lease::default()));
        assert!(
            said.try_recv().is_err(),
            "it uses little, and has not heard"
        );
        // Like the program.
        let program = keeper.program.as_ref().unwrap();
        assert_eq!((&program.fifo).read(&mut [0; 16]).unwrap(), 1);
        keeper.answer(&say).unwrap();
        assert_eq!(said.try_recv().unwrap().state(), TargetState::Applied);
        keeper.end_program().await;
    }

    #[tokio::test]
    async fn a_program_is_gone_when_the_term_is_over() {
        let mut keeper = keeper(Some("trap '' TERM; exec sleep 1000"));
        let renew_at = Instant::now() + TERM / 3;
        let left = |keeper: &Keeper| (keeper.pause(renew_at), keeper.left());
        assert!(left(&keeper).0 > TERM / 4, "renewed in turn");
        // The last message is long ago, which is noticed before the next renewal.
        keeper.heard = Instant::now()
            .checked_sub(TERM - GRACE - Duration::from_millis(10))
            .unwrap();
        assert!(left(&keeper).0 <= Duration::from_millis(10));
        keeper.heard = Instant::now().checked_sub(TERM - GRACE).unwrap();
        assert!(left(&keeper).1.is_zero());
        // It does not end by itself.
        keeper.heard = Instant::now().checked_sub(TERM).unwrap();
        let begun = Instant::now();
        keeper.end_program().await;
        assert!(begun.elapsed() < GRACE);
        assert!(
            keeper
                .program
                .as_mut()
                .unwrap()
                .child
                .try_wait()
                .unwrap()
                .is_some()
        );
    }
}
