//! Unloading in the order of keep-alive: Ollama.

use std::time::Duration;

use super::{Rival, Room, View, Wanted};
use cotenant::units::Timestamp;

/// `server/sched.go` of Ollama: a model is unloaded after 5 min without a request. Before a load, unless it is the
/// first one, models are unloaded until the forecast is at most 80 % of free memory, shortest keep-alive first and then
/// by name (all have the same here), and at most 3 remain. It waits for busy models. Release is not checked on shared
/// memory.
#[derive(Clone, Debug, Default)]
pub(crate) struct KeepAliveOrder;

const KEEP_ALIVE: Duration = Duration::from_secs(300);
const FORECAST_PER_MILLE: u32 = 800;
const MODELS_MAX: usize = 3;

impl Rival for KeepAliveOrder {
    fn name(&self) -> &'static str {
        "keep-alive order"
    }

    fn make_room(&mut self, view: &View, wanted: &Wanted) -> Room {
        let free = view.total.saturating_sub(view.used);
        let fits =
            wanted.bytes <= free.per_mille(FORECAST_PER_MILLE) && view.residents.len() < MODELS_MAX;
        // All have the same keep-alive, so the name decides; idle ones go first, as in Ollama.
        let first = view
            .residents
            .iter()
            .min_by_key(|resident| (resident.busy, &resident.name));
        match first {
            Some(resident) if !fits && resident.busy => Room::Wait,
            Some(resident) if !fits => Room::Evict(vec![resident.name.clone()]),
            _ => Room::Load,
        }
    }

    fn poll(&mut self, now: Timestamp, view: &View) -> Vec<String> {
        let expired = view.residents.iter().filter(|resident| {
            !resident.busy && now.saturating_since(resident.used_at) >= KEEP_ALIVE
        });
        expired.map(|resident| resident.name.clone()).collect()
    }

    fn waits_for_release(&self) -> bool {
        false
    }
}
