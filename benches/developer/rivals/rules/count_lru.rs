//! Keeps so many models, whatever they weigh: the router of llama.cpp.

use super::{Resident, Rival, Room, View, Wanted, least_recent};
use cotenant::units::Timestamp;

/// `unload_lru()` of llama.cpp `tools/server/server-models.cpp`: above `--models-max` the model whose last request is the
/// oldest is unloaded, without a look at requests in flight; bytes are not counted.
#[derive(Clone, Debug)]
pub(crate) struct CountLru {
    most: usize,
}

impl CountLru {
    /// `--models-max` where nothing is said.
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
