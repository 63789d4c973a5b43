//! Rules of other programs as small baselines.
//!
//! Each is only the rule of a public program with its published constants: whole models are loaded and unloaded. A
//! rival is called before a model is loaded, and polled; it sees the same state as that program.

mod count_lru;
mod declared_sets;
mod keep_alive;
mod threshold_lru;

pub(crate) use self::{
    count_lru::CountLru, declared_sets::DeclaredSets, keep_alive::KeepAliveOrder,
    threshold_lru::ThresholdLru,
};

use std::time::Duration;

use cotenant::units::{Bytes, Timestamp};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// Generates answers.
    Llm,
    /// Recognises speech.
    Asr,
    /// Synthesises speech.
    Tts,
}

/// Model that is loaded or loading.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Resident {
    /// Its name.
    pub name: String,
    /// Its purpose.
    pub kind: Kind,
    /// Time of its last request.
    pub used_at: Timestamp,
    /// Whether it serves a request, or is being loaded for one.
    pub busy: bool,
    /// Its load time.
    pub load_time: Duration,
}

/// State visible to a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct View {
    /// `MemTotal`.
    pub total: Bytes,
    /// Use on the whole machine.
    pub used: Bytes,
    /// The models in memory.
    pub residents: Vec<Resident>,
}

/// Requested model that is not in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Wanted {
    /// Its name.
    pub name: String,
    /// Its purpose.
    pub kind: Kind,
    /// Its size.
    pub bytes: Bytes,
}

/// Action required before a load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Room {
    /// Load it.
    Load,
    /// Unload these first, then call again.
    Evict(Vec<String>),
    /// A program is busy: call again.
    Wait,
}

pub(crate) trait Rival {
    fn name(&self) -> &'static str;
    /// Returns the action before a load; called in every step while a request waits for a model that is not in memory.
    fn make_room(&mut self, view: &View, wanted: &Wanted) -> Room;
    /// Returns models to unload now; called in every step.
    fn poll(&mut self, now: Timestamp, view: &View) -> Vec<String>;
    /// Returns whether a load waits until unloaded memory has been released.
    fn waits_for_release(&self) -> bool;
}

/// Returns the least recently used idle model; among equal ones, the first by name.
fn least_recent<'a>(residents: impl Iterator<Item = &'a Resident>) -> Option<&'a Resident> {
    residents.min_by_key(|resident| (resident.used_at, &resident.name))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) const TESTS: &[(&str, fn())] = &[
        (
            "rivals::rules::count_lru_looks_at_the_count_alone_and_not_at_work",
            count_lru_looks_at_the_count_alone_and_not_at_work,
        ),
        ("rivals::rules::declared_sets_evict_least_and_wait_for_work", declared_sets_evict_least_and_wait_for_work),
        (
            "rivals::rules::threshold_lru_stops_one_idle_model_with_each_poll_above_its_threshold",
            threshold_lru_stops_one_idle_model_with_each_poll_above_its_threshold,
        ),
        (
            "rivals::rules::lemonade_gives_up_what_is_idle_for_300_s_and_has_one_slot_for_each_kind",
            lemonade_gives_up_what_is_idle_for_300_s_and_has_one_slot_for_each_kind,
        ),
        (
            "rivals::rules::keep_alive_order_takes_the_shortest_when_the_forecast_is_above_80_percent_of_what_is_free",
            keep_alive_order_takes_the_shortest_when_the_forecast_is_above_80_percent_of_what_is_free,
        ),
    ];

    fn resident(name: &str, kind: Kind, used_at_s: u64, busy: bool) -> Resident {
        Resident {
            name: name.to_owned(),
            kind,
            used_at: Timestamp::START + Duration::from_secs(used_at_s),
            busy,
            load_time: Duration::from_secs(1),
        }
    }

    fn view(used_mib: u64, residents: &[Resident]) -> View {
        View {
            total: Bytes::from_mib(1000),
            used: Bytes::from_mib(used_mib),
            residents: residents.to_vec(),
        }
    }

    fn wanted(mib: u64) -> Wanted {
        Wanted {
            name: "new".to_owned(),
            kind: Kind::Llm,
            bytes: Bytes::from_mib(mib),
        }
    }

    fn evict(name: &str) -> Room {
        Room::Evict(vec![name.to_owned()])
    }

    fn count_lru_looks_at_the_count_alone_and_not_at_work() {
        let full = view(
            999,
            &[
                resident("a", Kind::Llm, 5, false),
                resident("b", Kind::Asr, 3, true),
            ],
        );
        assert_eq!(CountLru::new(3).make_room(&full, &wanted(900)), Room::Load);
        assert_eq!(CountLru::new(2).make_room(&full, &wanted(1)), evict("b"));
    }

    fn declared_sets_evict_least_and_wait_for_work() {
        let set = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let mut sets = DeclaredSets::new(vec![
            set(&["new", "a"]),
            set(&["new", "b", "c"]),
            set(&["a", "b", "c"]),
        ]);
        let mut loaded = view(
            0,
            &["a", "b", "c"].map(|name| resident(name, Kind::Tts, 0, false)),
        );
        assert_eq!(sets.make_room(&loaded, &wanted(1)), evict("a"));
        loaded.residents[0].busy = true;
        assert_eq!(sets.make_room(&loaded, &wanted(1)), Room::Wait);
    }

    fn threshold_lru_stops_one_idle_model_with_each_poll_above_its_threshold() {
        let mut local = ThresholdLru::local_ai();
        let residents = [
            resident("a", Kind::Llm, 1, true),
            resident("b", Kind::Asr, 2, false),
            resident("c", Kind::Tts, 3, false),
        ];
        let at =
            |millis| Timestamp::START + Duration::from_secs(10) + Duration::from_millis(millis);
        assert!(local.poll(at(0), &view(800, &residents)).is_empty());
        assert_eq!(local.poll(at(500), &view(801, &residents)), ["b"]);
        assert!(local.poll(at(990), &view(801, &residents)).is_empty());
        assert_eq!(local.poll(at(1000), &view(801, &residents)), ["b"]);
    }

    fn lemonade_gives_up_what_is_idle_for_300_s_and_has_one_slot_for_each_kind() {
        let mut lemonade = ThresholdLru::lemonade();
        let idle = view(
            10,
            &[
                resident("a", Kind::Llm, 0, false),
                resident("b", Kind::Tts, 200, false),
            ],
        );
        let at = |secs| Timestamp::START + Duration::from_secs(secs);
        assert!(lemonade.poll(at(299), &idle).is_empty());
        assert_eq!(lemonade.poll(at(304), &idle), ["a"]);
        assert_eq!(lemonade.make_room(&idle, &wanted(1)), evict("a"));
    }

    fn keep_alive_order_takes_the_shortest_when_the_forecast_is_above_80_percent_of_what_is_free() {
        let mut ollama = KeepAliveOrder;
        let one = view(
            500,
            &[
                resident("a", Kind::Llm, 0, false),
                resident("b", Kind::Tts, 9, false),
            ],
        );
        assert_eq!(ollama.make_room(&one, &wanted(400)), Room::Load);
        assert_eq!(ollama.make_room(&one, &wanted(401)), evict("a"));
        // The first load beside foreign memory is not checked at all.
        assert_eq!(ollama.make_room(&view(990, &[]), &wanted(900)), Room::Load);
        let after = Timestamp::START + Duration::from_secs(300);
        assert_eq!(ollama.poll(after, &one), ["a"]);
    }
}
