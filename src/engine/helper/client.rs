//! Client of the helper process: starts it and communicates with its jobs.

use std::{
    fmt,
    io::{self, IoSlice},
    os::{
        fd::{AsFd as _, AsRawFd as _},
        unix::net::UnixStream,
    },
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        signal::{Signal, kill},
        socket::{ControlMessage, MsgFlags, sendmsg},
    },
    unistd::Pid,
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{
    bounds::{FORMS, RENDER, most, without_grammars},
    frame::{self, Kind},
    job::{Bounds, Library, Setup},
    process::{self, announced},
};
use cotenant_units::{Bytes, causes::in_one_line, lock::locked};

/// Slot for one grammar; released on drop.
#[derive(Debug)]
pub struct FormPlace {
    /// Allocation limit of the grammar.
    bytes: Bytes,
    _permits: Option<OwnedSemaphorePermit>,
}

impl FormPlace {
    /// Allocation limit of the grammar.
    pub(crate) const fn bytes(&self) -> Bytes {
        self.bytes
    }
}

/// The helper of one model; started on first use, and restarted after it has ended.
pub(crate) struct Helper {
    /// Program started with the argument `text-helper`; jobs are threads if absent.
    program: Option<PathBuf>,
    running: Mutex<Option<Running>>,
    renders: Mutex<()>,
    forms: Arc<Semaphore>,
    /// Whether a grammar was requested since its start.
    grammars: AtomicBool,
    words: AtomicUsize,
    text: AtomicUsize,
}

enum Running {
    Threads(Arc<Library>),
    Process(Process),
}

struct Process {
    control: UnixStream,
    child: Child,
}

impl Drop for Process {
    fn drop(&mut self) {
        // It has nothing to complete: running jobs end with their streams.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Helper {
    pub(crate) fn new(program: Option<PathBuf>) -> Self {
        Self {
            program,
            running: Mutex::default(),
            renders: Mutex::default(),
            forms: Arc::new(Semaphore::new(units(FORMS) as usize)),
            grammars: AtomicBool::new(false),
            words: AtomicUsize::new(0),
            text: AtomicUsize::new(0),
        }
    }

    /// Upper bound of its and its jobs' memory now.
    pub(crate) fn held(&self) -> Bytes {
        match (
            self.words.load(Ordering::Relaxed),
            self.text.load(Ordering::Relaxed),
        ) {
            (0, _) => Bytes::ZERO,
            (words, text) if self.grammars.load(Ordering::Relaxed) => most(words, text),
            (words, text) => without_grammars(words, text),
        }
    }

    /// Waits for a slot for a grammar with this allocation limit.
    pub(crate) async fn form_place(&self, bytes: Bytes) -> FormPlace {
        // The semaphore is never closed.
        FormPlace {
            bytes,
            _permits: Arc::clone(&self.forms)
                .acquire_many_owned(units(bytes))
                .await
                .ok(),
        }
    }

    /// Starts a grammar with this allocation limit, and waits for its first reply until its owner cancels it.
    pub(crate) fn form(
        &self,
        bytes: Bytes,
        (kind, grammar): (Kind, &[u8]),
        gone: &dyn Fn() -> bool,
        setup: impl Fn() -> Setup,
    ) -> Result<(Job, Kind, Vec<u8>), JobError> {
        self.grammars.store(true, Ordering::Relaxed);
        self.begin((process::FORM, bytes), (kind, grammar), gone, &setup)
    }

    /// Compiles the template, or renders it for a context in JSON.
    pub(crate) fn template(
        &self,
        kind: Kind,
        context: &[u8],
        setup: impl Fn() -> Setup,
    ) -> Result<(Kind, Vec<u8>), JobError> {
        let _one_at_a_time = locked(&self.renders);
        let (_job, kind, body) = self.begin(
            (process::RENDER, RENDER),
            (kind, context),
            &|| false,
            &setup,
        )?;
        Ok((kind, body))
    }

    /// Starts a job and waits for its first reply; retries in a new helper if the job was lost through no fault of its
    /// own.
    fn begin(
        &self,
        (what, bytes): (u8, Bytes),
        (kind, body): (Kind, &[u8]),
        gone: &dyn Fn() -> bool,
        setup: &dyn Fn() -> Setup,
    ) -> Result<(Job, Kind, Vec<u8>), JobError> {
        let mut tried = 0;
        loop {
            let mut job = self.job(what, bytes, setup)?;
            let first = job.send(kind, body).and_then(|()| job.first(gone));
            tried += 1;
            match first {
                Ok((kind, body)) => return Ok((job, kind, body)),
                Err(error @ (JobError::Bound | JobError::Gone)) => return Err(error),
                Err(error) => {
                    tracing::warn!(
                        error = in_one_line(&error),
                        "a job of the text helper was lost"
                    );
                    self.lost(&job);
                    if tried == TRIES {
                        return Err(error);
                    }
                }
            }
        }
    }

    /// Ends an unresponsive job, and the helper if that is not running either.
    fn lost(&self, job: &Job) {
        let mut running = locked(&self.running);
        if let Some(Running::Process(process)) = &mut *running {
            if process.child.try_wait().is_ok_and(|ended| ended.is_none())
                && !is_stopped(process.child.id())
            {
                job.end();
            } else {
                *running = None;
            }
        }
    }

    /// Ends it until its next use: unused, it should hold no memory.
    pub(crate) fn end(&self) {
        *locked(&self.running) = None;
        self.grammars.store(false, Ordering::Relaxed);
        self.words.store(0, Ordering::Relaxed);
    }

    fn job(&self, kind: u8, bytes: Bytes, setup: &dyn Fn() -> Setup) -> Result<Job, JobError> {
        let (ours, theirs) = UnixStream::pair()?;
        let mut running = locked(&self.running);
        // Twice: the end of a helper is detected on use.
        for _ in 0..2 {
            let helper = match &mut *running {
                Some(helper) => helper,
                absent => absent.insert(self.start(setup())?),
            };
            match helper {
                Running::Threads(library) => {
                    let (library, mut stream) = (Arc::clone(library), theirs);
                    let thread = thread::Builder::new().name("cotenant-form".to_owned());
                    thread.spawn(move || library.run(&mut stream, &Unbounded))?;
                    return Ok(Job {
                        stream: ours,
                        process: None,
                    });
                }
                Running::Process(process) => {
                    let fds = [theirs.as_raw_fd()];
                    let sent = sendmsg::<()>(
                        process.control.as_raw_fd(),
                        &[IoSlice::new(&announced(kind, bytes.get()))],
                        &[ControlMessage::ScmRights(&fds)],
                        MsgFlags::MSG_NOSIGNAL,
                        None,
                    );
                    match sent {
                        Ok(_) => {
                            return Ok(Job {
                                stream: ours,
                                process: Some(process.child.id()),
                            });
                        }
                        Err(_ended) => *running = None,
                    }
                }
            }
        }
        Err(JobError::Lost)
    }

    fn start(&self, setup: Setup) -> io::Result<Running> {
        let (words, text) = (setup.words.ends().len(), setup.words.bytes().len());
        let running = match &self.program {
            None => Running::Threads(Arc::new(Library::new(setup))),
            Some(program) => {
                let (control, theirs) = UnixStream::pair()?;
                let child = Command::new(program)
                    .arg("text-helper")
                    .env_clear()
                    .current_dir("/")
                    .stdin(Stdio::from(std::os::fd::OwnedFd::from(theirs)))
                    .stdout(Stdio::null())
                    .stderr(Stdio::null())
                    .spawn()?;
                let mut process = Process { control, child };
                process.control.set_write_timeout(Some(ANSWER_WAIT_MAX))?;
                setup.write(&mut process.control)?;
                Running::Process(process)
            }
        };
        self.words.store(words, Ordering::Relaxed);
        self.text.store(text, Ordering::Relaxed);
        Ok(running)
    }
}

/// Units of the semaphore of grammars.
fn units(bytes: Bytes) -> u32 {
    u32::try_from(bytes.get().div_ceil(1 << 20)).unwrap_or(u32::MAX)
}

/// The owner's end of a job; dropping it ends the job.
pub(crate) struct Job {
    stream: UnixStream,
    /// Its process: the helper, until the job has begun.
    process: Option<u32>,
}

impl Job {
    /// Sends a frame.
    pub(crate) fn send(&mut self, kind: Kind, body: &[u8]) -> Result<(), JobError> {
        self.stream.set_write_timeout(Some(ANSWER_WAIT_MAX))?;
        Ok(frame::write(&mut self.stream, kind, body)?)
    }

    /// Whether a frame can be received, waiting up to `wait`.
    pub(crate) fn ready(&self, wait: Duration) -> Result<bool, JobError> {
        let mut asked = [PollFd::new(self.stream.as_fd(), PollFlags::POLLIN)];
        let millis = PollTimeout::try_from(wait).unwrap_or(PollTimeout::MAX);
        match poll(&mut asked, millis) {
            Ok(ready) => Ok(ready > 0),
            Err(Errno::EINTR) => Ok(false),
            Err(error) => Err(io::Error::from(error).into()),
        }
    }

    /// Its first reply; waits until its owner cancels it.
    fn first(&mut self, gone: &dyn Fn() -> bool) -> Result<(Kind, Vec<u8>), JobError> {
        let mut since = Instant::now();
        let mut most = START_WAIT_MAX;
        while !gone() {
            if !self.ready(SLICE)? {
                self.check(since.elapsed(), most)?;
                continue;
            }
            match self.receive()? {
                (Kind::Begun, process) => {
                    self.process = process.as_slice().try_into().ok().map(u32::from_le_bytes);
                    (since, most) = (Instant::now(), ANSWER_WAIT_MAX);
                }
                answer => return Ok(answer),
            }
        }
        Err(JobError::Gone)
    }

    /// Whether a reply can still arrive after this time.
    pub(crate) fn check(&self, waited: Duration, most: Duration) -> Result<(), JobError> {
        if waited >= most {
            return Err(JobError::Late);
        }
        if waited >= STOPPED_LOOK && self.process.is_some_and(is_stopped) {
            return Err(JobError::Stopped);
        }
        Ok(())
    }

    /// Receives a frame.
    pub(crate) fn receive(&mut self) -> Result<(Kind, Vec<u8>), JobError> {
        let began = Instant::now();
        while !self.ready(SLICE)? {
            self.check(began.elapsed(), ANSWER_WAIT_MAX)?;
        }
        self.stream.set_read_timeout(Some(ANSWER_WAIT_MAX))?;
        match frame::read(&mut self.stream)? {
            (Kind::Bound, _) => Err(JobError::Bound),
            answer => Ok(answer),
        }
    }

    /// Ends its process if that is not running.
    fn end(&self) {
        if let Some(process) = self
            .process
            .filter(|&process| is_stopped(process))
            .and_then(|id| id.try_into().ok())
        {
            let _ = kill(Pid::from_raw(process), Signal::SIGKILL);
        }
    }
}

/// Whether a process was stopped, by a signal or a debugger.
fn is_stopped(process: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    // The name, in brackets, may contain any character.
    stat.rsplit_once(") ")
        .is_some_and(|(_, rest)| rest.starts_with(['T', 't']))
}

/// Reason for a missing reply. All but the first two are faults of the helper, not of its input.
#[derive(Debug, thiserror::Error)]
pub(crate) enum JobError {
    /// It reached its limit of memory or time.
    #[error("it exceeds the allowed memory or time")]
    Bound,
    /// Its owner has cancelled it.
    #[error("the client disconnected")]
    Gone,
    /// The helper cannot be started or used.
    #[error("the helper process cannot be used")]
    Io(#[source] io::Error),
    /// No reply arrived, although CPU time remained.
    #[error("the helper process did not answer in time")]
    Late,
    /// Its process ended before replying.
    #[error("the helper process ended")]
    Lost,
    /// Its process was stopped.
    #[error("the helper process was stopped by a signal")]
    Stopped,
}

impl From<io::Error> for JobError {
    fn from(error: io::Error) -> Self {
        use io::ErrorKind as K;
        match error.kind() {
            K::UnexpectedEof | K::BrokenPipe | K::ConnectionReset => Self::Lost,
            K::WouldBlock | K::TimedOut => Self::Late,
            _ => Self::Io(error),
        }
    }
}

impl fmt::Debug for Helper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Helper")
            .field("program", &self.program)
            .finish_non_exhaustive()
    }
}

/// Bounds of jobs on threads: none.
struct Unbounded;

impl Bounds for Unbounded {
    fn time(&self, _most: Duration) {}
    fn given(&self, _bytes: usize) {}
}

/// Longest wait for the start of a job: before the first one the helper builds a tree of the vocabulary, which takes 1
/// s for 262,144 tokens on an idle processor.
const START_WAIT_MAX: Duration = Duration::from_secs(60);

/// Longest wall-clock wait for a reply: on an overloaded machine a job may not run, so that its CPU timer does not end
/// it.
pub(crate) const ANSWER_WAIT_MAX: Duration = Duration::from_secs(10);

/// Interval at which a wait checks for its owner.
const SLICE: Duration = Duration::from_millis(20);

/// Time after which a wait checks for a stopped process.
const STOPPED_LOOK: Duration = Duration::from_millis(200);

/// Attempts to start a job that was lost through no fault of its own.
const TRIES: u32 = 2;
