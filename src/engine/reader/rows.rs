//! Small reads with a time limit, on a separate thread.

use std::{
    io,
    sync::{Arc, Condvar, Mutex},
    thread::{self, JoinHandle},
    time::Instant,
};

use super::{
    file::{Extent, Source},
    stream::{Missing, wait_step},
};
use crate::{disk::DiskTimeout, error::ReadError};
use cotenant_memory::emergency;
use cotenant_units::lock::{locked, waited};

/// A thread that reads rows of a matrix, such as embeddings, to the heap.
pub struct RowReader {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// Some rows of a matrix.
#[derive(Clone, Debug)]
pub struct WantedRows {
    /// The matrix, for messages.
    pub what: Arc<str>,
    /// Offset of each in the file.
    pub offsets: Vec<u64>,
    /// Length of each.
    pub bytes: usize,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// Signals a request, or the end.
    asked: Condvar,
    /// Signals a reply, or an idle thread.
    answered: Condvar,
}

#[derive(Default)]
struct State {
    wanted: Option<WantedRows>,
    /// The last requested matrix, for messages.
    what: Arc<str>,
    /// Number of the last request.
    asked: u64,
    /// Start of the current row's read; `None` if idle.
    reading: Option<Instant>,
    /// Reply to the last request.
    answer: Option<Result<Vec<u8>, ReadError>>,
    stop: bool,
}

impl RowReader {
    /// Starts the thread.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn start(source: Arc<dyn Source>) -> io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let theirs = Arc::clone(&shared);
        let thread = thread::Builder::new()
            .name("cotenant-reader".to_owned())
            .spawn(move || {
                // A token waits for it.
                emergency::be_prompt().ok();
                theirs.serve(source.as_ref());
            })?;
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }

    /// Requests rows; replaces an earlier request.
    pub fn ask(&self, wanted: WantedRows) {
        let mut state = locked(&self.shared.state);
        state.asked += 1;
        state.what = Arc::clone(&wanted.what);
        state.wanted = Some(wanted);
        state.answer = None;
        drop(state);
        self.shared.asked.notify_one();
    }

    /// Waits for the requested rows, concatenated. `patience` is called periodically and decides whether to keep
    /// waiting; call this again to resume.
    ///
    /// # Errors
    /// They could not be read, the disk did not respond to a read within `limit`, or `patience` ran out.
    pub fn wait(
        &self,
        limit: DiskTimeout,
        patience: &mut dyn FnMut() -> bool,
    ) -> Result<Vec<u8>, Missing> {
        let (shared, started) = (&*self.shared, Instant::now());
        let mut state = locked(&shared.state);
        loop {
            if let Some(answer) = state.answer.take() {
                return answer.map_err(Missing::Failed);
            }
            // A read started for another caller may hang.
            let left = match limit.left(state.reading.unwrap_or(started).elapsed(), &state.what) {
                Ok(left) => left,
                Err(stalled) => {
                    state.wanted = None;
                    return Err(Missing::Stalled(stalled));
                }
            };
            state = wait_step(&shared.answered, (&shared.state, state), left, patience)?;
        }
    }
}

impl Drop for RowReader {
    fn drop(&mut self) {
        let mut state = locked(&self.shared.state);
        state.stop = true;
        let reads = state.reading.is_some();
        drop(state);
        self.shared.asked.notify_one();
        // A reading thread ends by itself when the disk responds.
        if let Some(thread) = self.thread.take().filter(|_| !reads) {
            // It has no way to panic; if it did, there would be nothing to add here.
            thread.join().ok();
        }
    }
}

impl Shared {
    /// Main loop of the thread.
    fn serve(&self, source: &dyn Source) {
        let mut state = locked(&self.state);
        while !state.stop {
            let Some(wanted) = state.wanted.take() else {
                state = waited(&self.asked, state);
                continue;
            };
            let asked = state.asked;
            drop(state);
            let answer = self.read(source, &wanted, asked);
            state = locked(&self.state);
            state.reading = None;
            if state.asked == asked {
                state.answer = Some(answer);
                self.answered.notify_all();
            }
        }
    }

    /// Reads rows, until another request arrives.
    fn read(
        &self,
        source: &dyn Source,
        wanted: &WantedRows,
        asked: u64,
    ) -> Result<Vec<u8>, ReadError> {
        let mut rows = vec![0u8; wanted.offsets.len() * wanted.bytes];
        for (offset, row) in wanted
            .offsets
            .iter()
            .zip(rows.chunks_exact_mut(wanted.bytes.max(1)))
        {
            let mut state = locked(&self.state);
            if state.stop || state.asked != asked {
                break;
            }
            state.reading = Some(Instant::now());
            drop(state);
            let extent = Extent {
                what: Arc::clone(&wanted.what),
                offset: *offset,
                bytes: wanted.bytes,
            };
            source.read_small(&extent, row)?;
        }
        Ok(rows)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        ptr::NonNull,
        sync::atomic::{AtomicBool, Ordering},
        time::Duration,
    };

    use super::*;
    use crate::reader::ReadProgress;

    /// Responds on command, with the offset read.
    #[derive(Default)]
    struct Gate {
        closed: AtomicBool,
    }

    impl Source for Gate {
        unsafe fn read(
            &self,
            _: &Extent,
            _: NonNull<u8>,
            _: &ReadProgress,
        ) -> Result<(), ReadError> {
            Ok(())
        }

        fn read_small(&self, extent: &Extent, target: &mut [u8]) -> Result<(), ReadError> {
            while self.closed.load(Ordering::Acquire) {
                thread::yield_now();
            }
            target.fill(u8::try_from(extent.offset).unwrap());
            Ok(())
        }
    }

    const LONG: DiskTimeout = DiskTimeout::new(Duration::from_secs(60));
    const SHORT: DiskTimeout = DiskTimeout::new(Duration::from_millis(1));

    fn rows(offsets: impl IntoIterator<Item = u64>) -> WantedRows {
        WantedRows {
            what: "rows".into(),
            offsets: offsets.into_iter().collect(),
            bytes: 2,
        }
    }

    /// A reader with a pending row that does not arrive.
    fn hanging() -> (Arc<Gate>, RowReader) {
        let gate = Arc::new(Gate::default());
        gate.closed.store(true, Ordering::Release);
        let source: Arc<dyn Source> = Arc::<Gate>::clone(&gate);
        let reader = RowReader::start(source).unwrap();
        reader.ask(rows([1]));
        (gate, reader)
    }

    #[test]
    fn rows_come_in_the_order_in_which_they_are_asked_for() {
        let reader = RowReader::start(Arc::new(Gate::default())).unwrap();
        for turn in 0..100 {
            reader.ask(rows([turn, 3, turn]));
            let turn = u8::try_from(turn).unwrap();
            let read = reader.wait(LONG, &mut || true).unwrap();
            assert_eq!(read, [turn, turn, 3, 3, turn, turn]);
        }
    }

    #[test]
    fn a_read_that_hangs_is_left_alone_and_what_is_asked_for_later_is_had_when_it_returns() {
        let (gate, reader) = hanging();
        assert!(matches!(
            reader.wait(LONG, &mut || false),
            Err(Missing::Stopped)
        ));
        // The same read continues.
        assert!(matches!(
            reader.wait(SHORT, &mut || true),
            Err(Missing::Stalled(_))
        ));
        reader.ask(rows([2]));
        assert!(matches!(
            reader.wait(SHORT, &mut || true),
            Err(Missing::Stalled(_))
        ));
        reader.ask(rows([3, 4]));
        gate.closed.store(false, Ordering::Release);
        assert_eq!(reader.wait(LONG, &mut || true).unwrap(), [3, 3, 4, 4]);
    }

    #[test]
    fn a_reader_is_dropped_without_waiting_for_a_read_that_hangs() {
        let (gate, reader) = hanging();
        while locked(&reader.shared.state).reading.is_none() {
            thread::yield_now();
        }
        drop(reader);
        gate.closed.store(false, Ordering::Release);
        while Arc::strong_count(&gate) > 1 {
            thread::yield_now();
        }
    }
}
