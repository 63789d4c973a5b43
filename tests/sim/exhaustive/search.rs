//! Parallel search over every order of letters, with shared visited states.

use std::{
    collections::HashMap,
    env,
    fmt::Debug,
    num::NonZero,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread,
};

/// A ledger with its environment, to which letters are applied in order.
pub(super) trait Book: Clone + Send + Sync {
    type Letter: Copy + Debug + Send + Sync;

    /// The possible letters.
    fn letters(&self) -> Vec<Self::Letter>;
    /// Applies a letter; returns the violation after it.
    fn take(&mut self, letter: Self::Letter) -> Result<(), String>;
    /// No further letters: everything must come to rest.
    fn settles(self) -> Result<(), String>;
    /// Equal fingerprints mean equal states.
    fn fingerprint(&self) -> u64;
}

/// Visited states of a search.
pub(super) struct Search {
    /// States and the most letters left when they were entered, in separately locked parts.
    seen: Vec<Mutex<HashMap<u64, u64>>>,
    orders: AtomicU64,
    threads: usize,
}

/// Start of a search: a ledger, and its history.
struct Root<B: Book> {
    book: B,
    path: Vec<B::Letter>,
}

/// Parts of the visited states (our choice: many times the threads).
const PARTS: usize = 64;
/// Letters after which the states are distributed to the threads: some hundreds of them.
const HANDED_OUT_AFTER: u64 = 2;

impl Search {
    pub(super) fn new(threads: usize) -> Self {
        Self {
            seen: (0..PARTS).map(|_| Mutex::default()).collect(),
            orders: AtomicU64::new(0),
            threads: threads.max(1),
        }
    }

    /// As many threads as processors, or as set by `COTENANT_EXHAUSTIVE_THREADS`.
    pub(super) fn with_all_threads() -> Self {
        let processors = thread::available_parallelism().map_or(1, NonZero::get);
        let wanted = env::var("COTENANT_EXHAUSTIVE_THREADS");
        Self::new(wanted.map_or(processors, |text| text.parse().unwrap()))
    }

    /// Different states so far.
    pub(super) fn states(&self) -> usize {
        self.seen
            .iter()
            .map(|part| part.lock().unwrap().len())
            .sum()
    }

    /// Different states after the last letter, which came to rest.
    pub(super) fn orders(&self) -> u64 {
        self.orders.load(Ordering::Relaxed)
    }

    /// Tries all orders of `steps` letters from a state with the history `path`.
    pub(super) fn run<B: Book>(
        &self,
        book: B,
        path: &[B::Letter],
        steps: u64,
    ) -> Result<(), String> {
        let mut roots = vec![Root {
            book,
            path: path.to_vec(),
        }];
        // The first letters sequentially, so that there is work to distribute.
        let first = steps.min(HANDED_OUT_AFTER);
        for left in (steps - first + 1..=steps).rev() {
            let mut next = Vec::new();
            for root in roots {
                if self.is_new(root.book.fingerprint(), left) {
                    self.each(&root.book, &root.path, |book, path| {
                        next.push(Root {
                            book,
                            path: path.to_vec(),
                        });
                        Ok(())
                    })?;
                }
            }
            roots = next;
        }
        let (taken, stopped) = (AtomicUsize::new(0), AtomicBool::new(false));
        let work = || -> Result<(), String> {
            while !stopped.load(Ordering::Relaxed)
                && let Some(root) = roots.get(taken.fetch_add(1, Ordering::Relaxed))
            {
                self.enter(&root.book, &root.path, steps - first, &stopped)
                    .inspect_err(|_| stopped.store(true, Ordering::Relaxed))?;
            }
            Ok(())
        };
        thread::scope(|scope| {
            let others: Vec<_> = (1..self.threads).map(|_| scope.spawn(work)).collect();
            let mine = work();
            others
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .fold(mine, Result::and)
        })
    }

    /// Whether a state has not been entered with as many letters left.
    fn is_new(&self, fingerprint: u64, left: u64) -> bool {
        let part = &self.seen[usize::try_from(fingerprint % PARTS as u64).unwrap()];
        let mut part = part.lock().unwrap();
        match part.get_mut(&fingerprint) {
            Some(known) if *known >= left => false,
            Some(known) => {
                *known = left;
                true
            }
            None => {
                part.insert(fingerprint, left);
                true
            }
        }
    }

    fn enter<B: Book>(
        &self,
        book: &B,
        path: &[B::Letter],
        left: u64,
        stopped: &AtomicBool,
    ) -> Result<(), String> {
        if stopped.load(Ordering::Relaxed) || !self.is_new(book.fingerprint(), left) {
            return Ok(());
        }
        if left == 0 {
            self.orders.fetch_add(1, Ordering::Relaxed);
            return book
                .clone()
                .settles()
                .map_err(|problem| tell(&problem, path));
        }
        self.each(book, path, |book, path| {
            self.enter(&book, path, left - 1, stopped)
        })
    }

    /// The state after each possible letter.
    fn each<B: Book>(
        &self,
        book: &B,
        path: &[B::Letter],
        mut then: impl FnMut(B, &[B::Letter]) -> Result<(), String>,
    ) -> Result<(), String> {
        let mut path = path.to_vec();
        for letter in book.letters() {
            let mut next = book.clone();
            path.push(letter);
            next.take(letter).map_err(|problem| tell(&problem, &path))?;
            then(next, &path)?;
            path.pop();
        }
        Ok(())
    }
}

pub(super) fn tell(problem: &str, path: &[impl Debug]) -> String {
    format!("{problem}\nafter {path:?}")
}
