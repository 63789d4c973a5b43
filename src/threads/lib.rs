//! Threads for blocking work: reading files, parsing, computing.
//!
//! If the system provides no thread, tokio's own pool panics or holds the work until one is available. This pool waits
//! for up to `WAIT_MAX` and then refuses the work with the system's error.

use std::{
    any::Any,
    collections::VecDeque,
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Condvar, Mutex, MutexGuard},
    thread,
    time::Duration,
};

use tokio::{
    runtime::Handle,
    sync::oneshot,
    time::{Instant, sleep},
};

use cotenant_units::lock::locked;

/// Reason why work was not completed.
#[derive(Debug, thiserror::Error)]
pub enum NotDone {
    /// It was not started, and may be retried.
    #[error("no thread is free for it: {0}")]
    NoThread(#[source] io::Error),
    /// It panicked; with the message.
    #[error("it panicked: {0}")]
    Panicked(String),
}

/// Starts the permanent threads.
///
/// # Errors
/// If the system does not provide them.
pub fn start() -> io::Result<()> {
    let mut pool = locked(&POOL);
    while pool.threads < THREADS_MIN {
        pool.add_thread()?;
    }
    Ok(())
}

/// Runs work on a pool thread; it continues if the returned future is dropped.
///
/// # Errors
/// If it panics, or was not started because no thread was free for `WAIT_MAX`.
pub fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> impl Future<Output = Result<T, NotDone>> + Send {
    let (sender, mut done) = oneshot::channel();
    let runtime = Handle::try_current().ok();
    let begun = locked(&POOL).push(Box::new(move || {
        let _runtime = runtime.as_ref().map(Handle::enter);
        let _gone = sender.send(catch_unwind(AssertUnwindSafe(work)));
    }));
    async move {
        if let Err(number) = begun {
            let deadline = Instant::now() + WAIT_MAX;
            loop {
                tokio::select! {
                    biased;
                    done = &mut done => return outcome(done),
                    () = sleep(TRY_EVERY) => {}
                }
                let mut pool = locked(&POOL);
                if !pool.waits(number) {
                    break;
                }
                match pool.add_thread() {
                    Ok(()) => break,
                    Err(error) if Instant::now() >= deadline => {
                        pool.queue.retain(|(other, _)| *other != number);
                        return Err(NotDone::NoThread(error));
                    }
                    Err(_) => {}
                }
            }
        }
        outcome(done.await)
    }
}

fn outcome<T>(done: Result<thread::Result<T>, oneshot::error::RecvError>) -> Result<T, NotDone> {
    match done {
        Ok(Ok(done)) => Ok(done),
        Ok(Err(panic)) => Err(NotDone::Panicked(in_words(&*panic))),
        Err(_dropped) => Err(NotDone::Panicked("its thread ended".to_owned())),
    }
}

fn in_words(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("without a message").to_owned()
}

type Work = Box<dyn FnOnce() + Send>;

/// Queue of work by number, and its threads.
struct Pool {
    queue: VecDeque<(u64, Work)>,
    next: u64,
    idle: usize,
    threads: usize,
}

impl Pool {
    /// Queues work, and adds a thread if none is idle.
    ///
    /// # Errors
    /// Returns the number of the work if no thread could be added: it waits for a busy one.
    fn push(&mut self, work: Work) -> Result<(), u64> {
        let number = self.next;
        self.next += 1;
        self.queue.push_back((number, work));
        if self.idle >= self.queue.len() {
            ADDED.notify_one();
            return Ok(());
        }
        self.add_thread().map_err(|_error| number)
    }

    fn waits(&self, number: u64) -> bool {
        self.queue.iter().any(|(other, _)| *other == number)
    }

    fn add_thread(&mut self) -> io::Result<()> {
        if self.threads >= THREADS_MAX {
            let limit = format!("all {THREADS_MAX} threads are busy");
            return Err(io::Error::new(io::ErrorKind::WouldBlock, limit));
        }
        let thread = thread::Builder::new().name("cotenant-work".to_owned());
        thread.spawn(serve)?;
        self.threads += 1;
        Ok(())
    }
}

/// Main loop of each thread.
fn serve() {
    let mut pool = locked(&POOL);
    loop {
        if let Some((_, work)) = pool.queue.pop_front() {
            drop(pool);
            work();
            pool = locked(&POOL);
            continue;
        }
        pool.idle += 1;
        let late;
        (pool, late) = waited(pool);
        pool.idle -= 1;
        if late && pool.queue.is_empty() && pool.threads > THREADS_MIN {
            pool.threads -= 1;
            return;
        }
    }
}

/// Waits for work; returns whether none arrived for [`IDLE_MAX`].
fn waited(pool: MutexGuard<'static, Pool>) -> (MutexGuard<'static, Pool>, bool) {
    let (pool, waited) = ADDED
        .wait_timeout(pool, IDLE_MAX)
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    (pool, waited.timed_out())
}

static POOL: Mutex<Pool> = Mutex::new(Pool {
    queue: VecDeque::new(),
    next: 0,
    idle: 0,
    threads: 0,
});
static ADDED: Condvar = Condvar::new();

/// Permanent threads. Our choice: one may wait for a hanging disk.
pub const THREADS_MIN: usize = 2;
/// Our choice: request limits keep the number of threads far below.
const THREADS_MAX: usize = 64;
/// Longest wait of work for a thread. Our choice: shorter than the read timeouts of clients.
const WAIT_MAX: Duration = Duration::from_secs(2);
/// Retry interval for starting a thread. Our choice.
const TRY_EVERY: Duration = Duration::from_millis(100);
/// Idle time after which a further thread ends, as in tokio.
const IDLE_MAX: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use nix::sys::resource::{Resource, getrlimit, setrlimit};

    use super::*;

    /// Switches to another user, because the thread limit does not apply to root. The kernel keeps credentials per
    /// thread.
    fn drop_privileges() {
        const OTHER_UID: libc::c_long = 65_534;
        // SAFETY: the call changes the credentials of this thread and no memory.
        let _ = unsafe { libc::syscall(libc::SYS_setresuid, OTHER_UID, OTHER_UID, OTHER_UID) };
    }

    /// One test for both, because the limit applies to the whole process.
    #[test]
    fn work_without_a_thread_is_refused_and_work_behind_a_busy_one_waits() {
        drop_privileges();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .unwrap();
        let (soft, hard) = getrlimit(Resource::RLIMIT_NPROC).unwrap();
        let limit_threads = |max| setrlimit(Resource::RLIMIT_NPROC, max, hard).unwrap();
        runtime.block_on(async {
            limit_threads(0);
            let refused = blocking(|| 1).await.unwrap_err();
            assert!(matches!(refused, NotDone::NoThread(_)), "{refused:?}");
            assert!(
                refused
                    .to_string()
                    .contains("Resource temporarily unavailable"),
                "{refused}"
            );
            assert!(start().is_err());

            limit_threads(soft);
            let (begun, begins) = mpsc::channel();
            let (end, ends) = mpsc::channel::<()>();
            let busy = blocking(move || {
                begun.send(()).unwrap();
                ends.recv()
            });
            begins.recv().unwrap();
            limit_threads(0);
            let behind = blocking(|| 2);
            let never = blocking(|| 3);
            drop(never);
            end.send(()).unwrap();
            assert_eq!(behind.await.unwrap(), 2);
            assert!(busy.await.unwrap().is_ok());

            let panicked = blocking(|| panic!("on purpose")).await.unwrap_err();
            assert_eq!(panicked.to_string(), "it panicked: on purpose");
            assert_eq!(blocking(|| 4).await.unwrap(), 4, "the thread goes on");
            limit_threads(soft);
        });
    }
}
