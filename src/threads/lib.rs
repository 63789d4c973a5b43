//! Threads for work that blocks: reads files, parses, computes.
//!
//! tokio's own pool panics where the system gives no thread, or keeps the work until it gives one. Here work waits for a
//! thread for up to `WAIT_MAX` and is refused then, with the system's error.

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

/// Why work was not done.
#[derive(Debug, thiserror::Error)]
pub enum NotDone {
    /// It was not begun, and may be tried again.
    #[error("no thread is free for it: {0}")]
    NoThread(#[source] io::Error),
    /// It broke down.
    #[error("it panicked: {0}")]
    Panicked(String),
}

/// Starts the threads that are always there.
///
/// # Errors
/// When the system does not give them.
pub fn start() -> io::Result<()> {
    let mut pool = locked(&POOL);
    while pool.threads < THREADS_MIN {
        pool.add_thread()?;
    }
    Ok(())
}

/// Begins work on a thread of its own; it goes on when the returned future is dropped.
///
/// # Errors
/// When it panics, or no thread was free for `WAIT_MAX`: then it was not begun.
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

/// Work that waits, by number, and the threads for it.
struct Pool {
    queue: VecDeque<(u64, Work)>,
    next: u64,
    idle: usize,
    threads: usize,
}

impl Pool {
    /// Queues work, and adds a thread where none is idle.
    ///
    /// # Errors
    /// Its number where no thread could be added: it waits for one of those that are busy.
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

/// What each thread does.
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

/// Waits for work; whether there was none for [`IDLE_MAX`].
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

/// Threads that do not end. Our choice: one may wait for a disk that hangs.
pub const THREADS_MIN: usize = 2;
/// Our choice: the limits of requests keep it far below.
const THREADS_MAX: usize = 64;
/// How long work waits for a thread. Our choice: the shortest read timeouts of clients are above it.
const WAIT_MAX: Duration = Duration::from_secs(2);
/// How often the system is asked again for a thread. Our choice.
const TRY_EVERY: Duration = Duration::from_millis(100);
/// How long a further thread stays without work, as in tokio.
const IDLE_MAX: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use nix::sys::resource::{Resource, getrlimit, setrlimit};

    use super::*;

    /// Becomes another user: the limit of threads does not count for root. Of this thread alone, as the kernel has it.
    fn drop_privileges() {
        const OTHER_UID: libc::c_long = 65_534;
        // SAFETY: the call changes the credentials of this thread and no memory.
        let _ = unsafe { libc::syscall(libc::SYS_setresuid, OTHER_UID, OTHER_UID, OTHER_UID) };
    }

    /// One test, because the limit is one of the process.
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
