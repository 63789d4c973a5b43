//! Reads on demand: extents that are known only when they are needed, such as the experts that a token has chosen.

use std::{
    collections::VecDeque,
    io,
    sync::{Arc, Condvar, Mutex},
    thread,
    time::Instant,
};

use super::{
    file::{Extent, Source},
    progress::ReadProgress,
    stream::{Missing, wait_step},
};
use crate::{arena::SharedMapping, disk::DiskTimeout, error::ReadError};
use cotenant_memory::emergency;
use cotenant_units::lock::{locked, waited};

/// Threads that read extents into memory in the order of the requests.
pub struct Fetcher {
    shared: Arc<Shared>,
}

struct Shared {
    source: Arc<dyn Source>,
    memory: Arc<SharedMapping>,
    state: Mutex<State>,
    progress: ReadProgress,
    /// Signals a request, or the end.
    asked: Condvar,
    /// Signals the end of a read.
    ended: Condvar,
}

#[derive(Default)]
struct State {
    wanted: VecDeque<Wanted>,
    /// Requests that a thread reads.
    reading: Vec<usize>,
    /// Requests that are complete, with the first failure of each.
    done: Vec<(usize, Option<ReadError>)>,
    stop: bool,
}

/// A request.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// Number by which it is waited for; free to be used again once it has been.
    pub number: usize,
    /// The extents, each with the page-aligned offset in memory of its aligned superset.
    pub extents: Vec<(Extent, usize)>,
}

impl Fetcher {
    /// Starts threads that read from `source` to `memory`.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn start(source: Arc<dyn Source>, memory: Arc<SharedMapping>) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            source,
            memory,
            state: Mutex::default(),
            progress: ReadProgress::new(),
            asked: Condvar::new(),
            ended: Condvar::new(),
        });
        for number in 0..FETCHERS {
            let theirs = Arc::clone(&shared);
            let thread = thread::Builder::new().name("cotenant-reader".to_owned());
            let started = thread.spawn(move || {
                // A token waits for it.
                emergency::be_prompt().ok();
                theirs.serve();
            });
            // The existing threads do all the work.
            if let Err(error) = started
                && number == 0
            {
                return Err(error);
            }
        }
        Ok(Self { shared })
    }

    /// Requests an extent. The memory of requests that have not been waited for must not overlap, and belongs to the
    /// readers until then.
    pub fn ask(&self, wanted: Wanted) {
        locked(&self.shared.state).wanted.push_back(wanted);
        self.shared.asked.notify_one();
    }

    /// Waits for a request. `patience` is called periodically and decides whether to keep waiting; call this again to
    /// resume.
    ///
    /// # Errors
    /// It could not be read, the disk did not respond within `limit`, or `patience` ran out.
    pub fn wait(
        &self,
        number: usize,
        limit: DiskTimeout,
        patience: &mut dyn FnMut() -> bool,
    ) -> Result<(), Missing> {
        let take = |state: &mut State| {
            let at = state.done.iter().position(|(done, _)| *done == number)?;
            Some(state.done.swap_remove(at).1)
        };
        let failed = self.wait_for(take, limit, patience)?;
        failed.map_or(Ok(()), |error| Err(Missing::Failed(error)))
    }

    /// Withdraws all requests, and waits for those that are being read, as [`Self::wait`].
    ///
    /// # Errors
    /// As there.
    pub fn withdraw(
        &self,
        limit: DiskTimeout,
        patience: &mut dyn FnMut() -> bool,
    ) -> Result<(), Missing> {
        locked(&self.shared.state).wanted.clear();
        let is_idle = |state: &mut State| state.reading.is_empty().then(|| state.done.clear());
        self.wait_for(is_idle, limit, patience)
    }

    fn wait_for<T>(
        &self,
        mut is_over: impl FnMut(&mut State) -> Option<T>,
        limit: DiskTimeout,
        patience: &mut dyn FnMut() -> bool,
    ) -> Result<T, Missing> {
        let (shared, started) = (&*self.shared, Instant::now());
        let mut state = locked(&shared.state);
        loop {
            if let Some(result) = is_over(&mut state) {
                return Ok(result);
            }
            // A slow disk that delivers data is responding.
            let idle = started.elapsed().min(shared.progress.idle());
            let left = limit.left(idle, &"experts".into());
            let left = left.map_err(Missing::Stalled)?;
            state = wait_step(&shared.ended, (&shared.state, state), left, patience)?;
        }
    }
}

impl Drop for Fetcher {
    fn drop(&mut self) {
        // A reading thread ends by itself when the disk responds, and keeps the memory until then.
        let mut state = locked(&self.shared.state);
        state.stop = true;
        state.wanted.clear();
        drop(state);
        self.shared.progress.give_up();
        self.shared.asked.notify_all();
    }
}

impl Shared {
    /// A reader thread.
    fn serve(&self) {
        let mut state = locked(&self.state);
        while !state.stop {
            let Some(wanted) = state.wanted.pop_front() else {
                state = waited(&self.asked, state);
                continue;
            };
            if state.reading.is_empty() {
                // No thread has waited for the disk so far.
                self.progress.note();
            }
            state.reading.push(wanted.number);
            drop(state);
            let read = wanted
                .extents
                .iter()
                .try_for_each(|(extent, target)| self.read(extent, *target));
            self.progress.note();
            state = locked(&self.state);
            state.reading.retain(|number| *number != wanted.number);
            state.done.push((wanted.number, read.err()));
            self.ended.notify_all();
        }
    }

    fn read(&self, extent: &Extent, target: usize) -> Result<(), ReadError> {
        let place = self.memory.range(target, extent.aligned_bytes());
        let place = place
            .ok_or_else(|| extent.error(std::path::Path::new(""), "there is no memory for it"))?;
        // SAFETY: whole pages of a request of this thread's own, which is not used before it has been waited for.
        unsafe { self.source.read(extent, place, &self.progress) }
    }
}

/// Threads that read. Our choice: as many requests as NVMe disks need to reach their full rate with reads of some MiB.
const FETCHERS: usize = 4;
