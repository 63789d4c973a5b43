//! Counters of connections and streams per peer.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use cotenant_policy::roles::Bounds;
use cotenant_units::lock::locked;

/// A user, and the process if known.
pub(super) type Key = (u32, Option<u32>);

/// Counts open connections and streams by process, by user and in total.
#[derive(Clone, Debug)]
pub(super) struct Slots {
    open: Arc<Mutex<BTreeMap<Key, u64>>>,
    bounds: Bounds,
}

/// One of them; freed on drop.
#[derive(Debug)]
pub(super) struct Slot {
    open: Arc<Mutex<BTreeMap<Key, u64>>>,
    key: Key,
}

impl Slots {
    pub(super) fn new(bounds: Bounds) -> Self {
        Self {
            open: Arc::default(),
            bounds,
        }
    }

    /// Opens one more, or returns the exhausted limit.
    pub(super) fn open(&self, key: Key) -> Result<Slot, u64> {
        let mut open = locked(&self.open);
        let (mut of_user, mut total) = (0u64, 0u64);
        for ((uid, _), count) in open.iter() {
            total += count;
            if *uid == key.0 {
                of_user += count;
            }
        }
        let of_process = open.get(&key).copied().unwrap_or_default();
        for (count, limit) in [
            (of_process, self.bounds.per_process),
            (of_user, self.bounds.per_user),
            (total, self.bounds.total),
        ] {
            if count >= limit {
                return Err(limit);
            }
        }
        open.insert(key, of_process + 1);
        Ok(Slot {
            open: Arc::clone(&self.open),
            key,
        })
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut open = locked(&self.open);
        if let Some(count) = open.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                open.remove(&self.key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_limit_holds_and_a_closed_slot_is_free_again() {
        let slots = Slots::new(Bounds {
            per_process: 2,
            per_user: 3,
            total: 4,
        });
        let first = slots.open((1, Some(10))).unwrap();
        let _second = slots.open((1, Some(10))).unwrap();
        assert_eq!(slots.open((1, Some(10))).unwrap_err(), 2);
        let _third = slots.open((1, Some(11))).unwrap();
        assert_eq!(slots.open((1, Some(12))).unwrap_err(), 3);
        let _fourth = slots.open((2, None)).unwrap();
        assert_eq!(slots.open((3, None)).unwrap_err(), 4);
        drop(first);
        let _again = slots.open((1, Some(10))).unwrap();
    }
}
