//! Unloading of whole models above a memory threshold: LocalAI and Lemonade.

use std::time::Duration;

use super::{Resident, Rival, Room, View, Wanted, least_recent};
use cotenant::units::Timestamp;

/// Watch that polls the memory of the machine and stops one idle model at a time. Loads do not wait for memory.
#[derive(Clone, Debug)]
pub(crate) struct ThresholdLru {
    name: &'static str,
    every: Duration,
    above_per_mille: u32,
    /// Idle time after which a model is unloaded.
    idle: Option<Duration>,
    /// Whether models with short loads go first, with one slot per kind of model.
    scored: bool,
    next: Timestamp,
}

impl ThresholdLru {
    /// LocalAI `pkg/model/watchdog.go` with its memory reclaimer on: polls every 500 ms, and above 0.80 stops the least
    /// recently used idle model.
    #[must_use]
    pub(crate) const fn local_ai() -> Self {
        Self {
            name: "threshold-lru 0.80",
            every: Duration::from_millis(500),
            above_per_mille: 800,
            idle: None,
            scored: false,
            next: Timestamp::START,
        }
    }

    /// Lemonade `eviction_engine.cpp`: every 5 s, evicts models idle for 300 s, and above 0.90 the one with the highest
    /// `idle_ms / load_duration_ms`; one slot per kind of model. The downsizing after 60 s frees no bytes (its issue
    /// 2961) and is left out.
    #[must_use]
    pub(crate) const fn lemonade() -> Self {
        Self {
            name: "threshold-lru 0.90",
            every: Duration::from_secs(5),
            above_per_mille: 900,
            idle: Some(Duration::from_secs(300)),
            scored: true,
            next: Timestamp::START,
        }
    }

    fn victim<'a>(&self, now: Timestamp, view: &'a View) -> Option<&'a Resident> {
        let free = view.residents.iter().filter(|resident| !resident.busy);
        if !self.scored {
            return least_recent(free);
        }
        free.max_by(|one, other| {
            let idle = |resident: &Resident| now.saturating_since(resident.used_at).as_millis();
            let load = |resident: &Resident| resident.load_time.as_millis().max(1);
            let (left, right) = (idle(one) * load(other), idle(other) * load(one));
            left.cmp(&right).then_with(|| other.name.cmp(&one.name))
        })
    }
}

impl Rival for ThresholdLru {
    fn name(&self) -> &'static str {
        self.name
    }

    fn make_room(&mut self, view: &View, wanted: &Wanted) -> Room {
        let same = view
            .residents
            .iter()
            .filter(|resident| resident.kind == wanted.kind);
        match least_recent(same) {
            Some(resident) if self.scored && resident.busy => Room::Wait,
            Some(resident) if self.scored => Room::Evict(vec![resident.name.clone()]),
            _ => Room::Load,
        }
    }

    fn poll(&mut self, now: Timestamp, view: &View) -> Vec<String> {
        if now < self.next {
            return Vec::new();
        }
        self.next = now + self.every;
        let idle = view.residents.iter().filter(|resident| {
            !resident.busy
                && self
                    .idle
                    .is_some_and(|limit| now.saturating_since(resident.used_at) >= limit)
        });
        let mut stopped: Vec<String> = idle.map(|resident| resident.name.clone()).collect();
        if stopped.is_empty() && view.used > view.total.per_mille(self.above_per_mille) {
            stopped.extend(self.victim(now, view).map(|resident| resident.name.clone()));
        }
        stopped
    }

    fn waits_for_release(&self) -> bool {
        self.scored
    }
}
