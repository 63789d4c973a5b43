//! Memory that is refused on demand.

use std::sync::{
    Mutex, Weak,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

use super::*;
use crate::reader::Source;

/// Switch that makes a backend refuse memory.
#[derive(Clone, Debug, Default)]
pub(super) struct Refusing(Arc<Orders>);

#[derive(Debug, Default)]
struct Orders {
    refuse: AtomicBool,
    /// Number of allocations before all are refused.
    left: AtomicUsize,
    file: Mutex<Option<Weak<dyn Source>>>,
    owners: AtomicUsize,
}

impl Refusing {
    pub(super) fn refuse(&self, refuse: bool) {
        self.0.left.store(0, Ordering::Relaxed);
        self.0.refuse.store(refuse, Ordering::Relaxed);
    }

    /// Refuses memory after `times` more allocations.
    pub(super) fn refuse_after(&self, times: usize) {
        self.refuse(true);
        self.0.left.store(times, Ordering::Relaxed);
    }

    /// Counts the owners of the file at each allocation from now on.
    pub(super) fn watch(&self, model: &Model) {
        *self.0.file.lock().unwrap() = Some(Arc::downgrade(model.weights.source()));
    }

    /// Maximum number of owners of the file.
    pub(super) fn owners_of_the_file(&self) -> usize {
        self.0.owners.load(Ordering::Relaxed)
    }

    /// Whether an allocation is refused now.
    pub(super) fn refuses(&self) -> bool {
        let orders = &self.0;
        let owners = orders
            .file
            .lock()
            .unwrap()
            .as_ref()
            .map_or(0, Weak::strong_count);
        orders.owners.fetch_max(owners, Ordering::Relaxed);
        let left = |left: usize| left.checked_sub(1);
        let found = orders
            .left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, left)
            .is_ok();
        orders.refuse.load(Ordering::Relaxed) && !found
    }
}
