//! A maximum number of models regardless of size: the router of llama.cpp.

use super::{Resident, Rival, Room, View, Wanted, least_recent};
use cotenant::units::Timestamp;

/// `unload_lru()` of llama.cpp `tools/server/server-models.cpp`: above `--models-max` the model with the oldest last
/// request is unloaded, regardless of running requests; bytes are not counted.
#[derive(Clone, Debug)]
pub(crate) struct CountLru {
    most: usize,
}

impl CountLru {
    /// Default of `--models-max`.
    pub(crate) const DEFAULT: usize = 4;

    /// Keeps at most `most` models.
    #[must_use]
    pub(crate) const fn new(most: usize) -> Self {
        Self { most }
    }
}

impl Rival for CountLru {
    fn name(&self) -> &'static str {
        if self.most == Self::DEFAULT {
            "count-lru, 4 models"
        } else {
            "count-lru, as many as fit"
        }
    }

    fn make_room(&mut self, view: &View, _: &Wanted) -> Room {
        let oldest = least_recent(view.residents.iter());
        match oldest {
            Some(Resident { name, .. }) if view.residents.len() >= self.most => {
                Room::Evict(vec![name.clone()])
            }
            _ => Room::Load,
        }
    }

    fn poll(&mut self, _: Timestamp, _: &View) -> Vec<String> {
        Vec::new()
    }

    fn waits_for_release(&self) -> bool {
        true
    }
}
