//! Declared sets of co-resident models (llama-swap).

use std::collections::BTreeSet;

use super::{Resident, Rival, Room, View, Wanted};
use cotenant::units::Timestamp;

/// The matrix of llama-swap `internal/router`: of the declared sets with the requested model, the one with the fewest
/// evictions, at `evict_costs` of 1 each. A busy model is not interrupted; the request waits. Bytes are not considered.
#[derive(Clone, Debug)]
pub(crate) struct DeclaredSets {
    sets: Vec<BTreeSet<String>>,
}

impl DeclaredSets {
    /// Uses these sets; among equal ones, the first wins.
    #[must_use]
    pub(crate) const fn new(sets: Vec<BTreeSet<String>>) -> Self {
        Self { sets }
    }
}

impl Rival for DeclaredSets {
    fn name(&self) -> &'static str {
        "declared sets"
    }

    fn make_room(&mut self, view: &View, wanted: &Wanted) -> Room {
        let outside = |set: &BTreeSet<String>| -> Vec<Resident> {
            let others = view
                .residents
                .iter()
                .filter(|resident| !set.contains(&resident.name));
            others.cloned().collect()
        };
        let fitting = self
            .sets
            .iter()
            .filter(|set| set.contains(&wanted.name))
            .map(outside);
        let Some(evicted) = fitting.min_by_key(Vec::len) else {
            // In no set: runs alone.
            return evict(view.residents.clone());
        };
        evict(evicted)
    }

    fn poll(&mut self, _: Timestamp, _: &View) -> Vec<String> {
        Vec::new()
    }

    fn waits_for_release(&self) -> bool {
        true
    }
}

fn evict(residents: Vec<Resident>) -> Room {
    if residents.is_empty() {
        Room::Load
    } else if residents.iter().any(|resident| resident.busy) {
        Room::Wait
    } else {
        Room::Evict(
            residents
                .into_iter()
                .map(|resident| resident.name)
                .collect(),
        )
    }
}
