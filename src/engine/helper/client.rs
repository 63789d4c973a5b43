//! The owner's side: starts the helper, and talks to its jobs.

use std::{
    fmt,
    io::{self, IoSlice, Write as _},
    os::{fd::AsRawFd as _, unix::net::UnixStream},
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{
    bounds::{FORMS_MAX, job_bytes, most},
    frame::{self, Kind},
    job::{Bounds, Library, Setup},
    process::{FORM, RENDER},
};
use crate::units::Bytes;

/// Place for one grammar; given back when it is dropped.
#[derive(Debug)]
pub struct FormPlace {
    _permit: Option<OwnedSemaphorePermit>,
}

/// The helper of one model; started when it is first needed, and again when it was ended.
pub(in crate::engine) struct Helper {
    /// What is started with the argument `text-helper`; jobs are threads when absent.
    program: Option<PathBuf>,
    running: Mutex<Option<Running>>,
    renders: Mutex<()>,
    forms: Arc<Semaphore>,
    held: AtomicUsize,
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
        // It has nothing to finish: jobs that are under way end with their streams.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Helper {
    pub(in crate::engine) fn new(program: Option<PathBuf>) -> Self {
        Self {
            program,
            running: Mutex::default(),
            renders: Mutex::default(),
            forms: Arc::new(Semaphore::new(FORMS_MAX)),
            held: AtomicUsize::new(0),
        }
    }

    /// What it and its jobs may occupy now.
    pub(in crate::engine) fn held(&self) -> Bytes {
        Bytes::of_len(self.held.load(Ordering::Relaxed))
    }

    /// Waits for place for a grammar.
    pub(in crate::engine) async fn form_place(&self) -> FormPlace {
        // It is never closed.
        FormPlace { _permit: Arc::clone(&self.forms).acquire_owned().await.ok() }
    }

    /// Starts a grammar.
    pub(in crate::engine) fn form(&self, setup: impl Fn() -> Setup) -> Result<Job, JobError> {
        self.job(FORM, &setup)
    }

    /// Compiles the template, or renders it with a context in JSON.
    pub(in crate::engine) fn template(
        &self,
        kind: Kind,
        context: &[u8],
        setup: impl Fn() -> Setup,
    ) -> Result<(Kind, Vec<u8>), JobError> {
        let _one_at_a_time = self.renders.lock().unwrap_or_else(PoisonError::into_inner);
        let mut job = self.job(RENDER, &setup)?;
        job.send(kind, context)?;
        job.first(&|| false)
    }

    /// Ends it, until it is needed again: what is not used yet holds no memory.
    pub(in crate::engine) fn end(&self) {
        *self.running.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.held.store(0, Ordering::Relaxed);
    }

    fn job(&self, kind: u8, setup: &dyn Fn() -> Setup) -> Result<Job, JobError> {
        let (ours, theirs) = UnixStream::pair()?;
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        // Twice: a helper that was ended is noticed when it is used.
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
                    return Ok(Job::new(ours));
                }
                Running::Process(process) => {
                    let fds = [theirs.as_raw_fd()];
                    let sent = sendmsg::<()>(
                        process.control.as_raw_fd(),
                        &[IoSlice::new(&[kind])],
                        &[ControlMessage::ScmRights(&fds)],
                        MsgFlags::MSG_NOSIGNAL,
                        None,
                    );
                    match sent {
                        Ok(_) => return Ok(Job::new(ours)),
                        Err(_ended) => *running = None,
                    }
                }
            }
        }
        Err(JobError::Lost)
    }

    fn start(&self, setup: Setup) -> io::Result<Running> {
        let tokens = setup.words.len();
        let text = setup.words.iter().map(Vec::len).sum();
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
                process.control.set_write_timeout(Some(BUILD_WAIT_MAX))?;
                process.control.write_all(&job_bytes(tokens).get().to_le_bytes())?;
                setup.write(&mut process.control)?;
                Running::Process(process)
            }
        };
        self.held.store(most(tokens, text).as_len(), Ordering::Relaxed);
        Ok(running)
    }
}

/// The owner's end of a job; dropping it ends the job.
pub(in crate::engine) struct Job {
    stream: UnixStream,
}

impl Job {
    fn new(stream: UnixStream) -> Self {
        Self { stream }
    }

    /// Sends a frame.
    pub(in crate::engine) fn send(&mut self, kind: Kind, body: &[u8]) -> Result<(), JobError> {
        self.stream.set_write_timeout(Some(BUILD_WAIT_MAX))?;
        Ok(frame::write(&mut self.stream, kind, body)?)
    }

    /// Whether a frame can be received, waiting for it so long at most.
    pub(in crate::engine) fn ready(&self, wait: Duration) -> Result<bool, JobError> {
        let mut fd = libc::pollfd { fd: self.stream.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        let millis = wait.as_millis().try_into().unwrap_or(i32::MAX);
        // SAFETY: one entry, which lives as long as the call.
        match unsafe { libc::poll(&raw mut fd, 1, millis) } {
            0 => Ok(false),
            ready if ready > 0 => Ok(true),
            _ => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::Interrupted => Ok(false),
                error => Err(error.into()),
            },
        }
    }

    /// Its first answer; waits for that until its owner does not want it any more.
    pub(in crate::engine) fn first(&mut self, gone: &dyn Fn() -> bool) -> Result<(Kind, Vec<u8>), JobError> {
        let began = Instant::now();
        while !gone() {
            if self.ready(SLICE)? {
                return self.receive();
            }
            if began.elapsed() >= BUILD_WAIT_MAX {
                return Err(JobError::Bound);
            }
        }
        Err(JobError::Gone)
    }

    /// Receives a frame, once it is ready.
    pub(in crate::engine) fn receive(&mut self) -> Result<(Kind, Vec<u8>), JobError> {
        self.stream.set_read_timeout(Some(BUILD_WAIT_MAX))?;
        Ok(frame::read(&mut self.stream)?)
    }
}

/// Why a job has no answer.
#[derive(Debug, thiserror::Error)]
pub(in crate::engine) enum JobError {
    /// It came to the end of its memory or its time.
    #[error("it takes more memory or time than is allowed for it")]
    Bound,
    /// Its owner does not want it any more.
    #[error("the client has gone")]
    Gone,
    /// The helper cannot be started or used.
    #[error("the helper process cannot be used")]
    Io(#[source] io::Error),
    /// The helper ended twice.
    #[error("the helper process ended")]
    Lost,
}

impl From<io::Error> for JobError {
    fn from(error: io::Error) -> Self {
        use io::ErrorKind as K;
        match error.kind() {
            // Nothing else ends a job before its answer.
            K::UnexpectedEof | K::BrokenPipe | K::ConnectionReset | K::WouldBlock | K::TimedOut => Self::Bound,
            _ => Self::Io(error),
        }
    }
}

impl fmt::Debug for Helper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Helper").field("program", &self.program).finish_non_exhaustive()
    }
}

/// Jobs on threads have no bounds.
struct Unbounded;

impl Bounds for Unbounded {
    fn time(&self, _most: Duration) {}
    fn given(&self, _bytes: usize) {}
}

/// How long an answer is waited for, whatever the job takes of a processor: on a machine so busy that it does not come to
/// run, its timer does not end it.
const BUILD_WAIT_MAX: Duration = Duration::from_secs(10);

/// How often a wait looks whether the owner is still there.
const SLICE: Duration = Duration::from_millis(20);
