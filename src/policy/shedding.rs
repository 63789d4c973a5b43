//! What is given back first: candidates with their cost, and the smallest set that suffices.
//!
//! Each candidate says how many bytes it can give, what that costs the user now, and what it costs to undo, both in
//! milliseconds of somebody's waiting. The cheapest byte goes first, weighed by class; costs are compared by
//! cross-multiplying in 128 bits, so that no byte passes through a float.

use std::cmp::Ordering;

use super::lease::{Class, LeaseId};
use crate::units::Bytes;

/// Who could give memory back, and how.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Source {
    /// The engine: KV capacity and resident layers, by its plan.
    Engine,
    /// A tenant that holds more than its least.
    Tenant(LeaseId),
    /// An idle worker that can do with a smaller variant.
    WorkerVariant {
        /// Its name.
        worker: String,
        /// The smaller variant.
        variant: String,
    },
    /// A worker, by stopping it.
    WorkerStop(String),
}

/// One way to get memory back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Who and how.
    pub source: Source,
    /// The holder's class.
    pub class: Class,
    /// The most that it can give.
    pub bytes: Bytes,
    /// Whether it can also give a part.
    pub divisible: bool,
    /// What it costs the user at once, in ms.
    pub cost_now_ms: u64,
    /// What it costs to undo, in ms.
    pub cost_undo_ms: u64,
}

impl Candidate {
    /// Cost times the weight of the class.
    fn weighed_cost(&self) -> u128 {
        let weight: u128 = match self.class {
            Class::AudioRealtime => 32,
            Class::Interactive => 8,
            Class::LlmElastic => 2,
            Class::Batch => 1,
        };
        let stop: u128 = if matches!(self.source, Source::WorkerStop(_)) {
            STOP_WEIGHT
        } else {
            1
        };
        (u128::from(self.cost_now_ms) + u128::from(self.cost_undo_ms) + 1) * weight * stop
    }

    fn by_cost_per_byte(&self, other: &Self) -> Ordering {
        let mine = self.weighed_cost().saturating_mul(u128::from(other.bytes.get()));
        let theirs = other.weighed_cost().saturating_mul(u128::from(self.bytes.get()));
        mine.cmp(&theirs).then_with(|| self.source.cmp(&other.source))
    }
}

/// Something chosen, and how much of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chosen {
    /// Who and how.
    pub source: Source,
    /// How much.
    pub bytes: Bytes,
}

/// Chooses what gives `need` back: cheapest byte first, and then without everything that the rest can spare.
///
/// All candidates together may be too little; then all are chosen.
#[must_use]
pub fn choose(mut candidates: Vec<Candidate>, need: Bytes) -> Vec<Chosen> {
    candidates.retain(|candidate| candidate.bytes > Bytes::ZERO);
    candidates.sort_by(Candidate::by_cost_per_byte);
    let mut sum = Bytes::ZERO;
    let mut taken = Vec::new();
    for candidate in candidates {
        if sum >= need {
            break;
        }
        sum = sum.saturating_add(candidate.bytes);
        taken.push(candidate);
    }
    // The dearest first: what was taken before something large may have become superfluous by it.
    for index in (0..taken.len()).rev() {
        let bytes = taken.get(index).map_or(Bytes::ZERO, |candidate| candidate.bytes);
        if sum.saturating_sub(bytes) >= need {
            sum = sum.saturating_sub(bytes);
            taken.remove(index);
        }
    }
    // Who can give a part gives only what the others leave; the dearest gives least.
    let mut surplus = sum.saturating_sub(need);
    let mut chosen: Vec<Chosen> = taken
        .into_iter()
        .rev()
        .map(|candidate| {
            let spared = if candidate.divisible {
                surplus.min(candidate.bytes)
            } else {
                Bytes::ZERO
            };
            surplus = surplus.saturating_sub(spared);
            Chosen {
                source: candidate.source,
                bytes: candidate.bytes.saturating_sub(spared),
            }
        })
        .filter(|chosen| chosen.bytes > Bytes::ZERO)
        .collect();
    chosen.reverse();
    chosen
}

/// The sum of what all candidates can give.
#[must_use]
pub fn reclaimable(candidates: &[Candidate]) -> Bytes {
    candidates
        .iter()
        .map(|candidate| candidate.bytes)
        .fold(Bytes::ZERO, Bytes::saturating_add)
}

/// Shed first, kill last: a process that is stopped loses more than the time to start it.
const STOP_WEIGHT: u128 = 64;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn candidate(source: Source, class: Class, mib: u64, divisible: bool, cost: u64) -> Candidate {
        Candidate {
            source,
            class,
            bytes: Bytes::from_mib(mib),
            divisible,
            cost_now_ms: 0,
            cost_undo_ms: cost,
        }
    }

    fn stop(name: &str, class: Class, mib: u64) -> Candidate {
        candidate(Source::WorkerStop(name.to_owned()), class, mib, false, 1000)
    }

    #[test]
    fn the_engine_gives_before_a_worker_is_stopped() {
        let engine = candidate(Source::Engine, Class::LlmElastic, 500, true, 250);
        let tts = stop("tts", Class::AudioRealtime, 500);
        assert_eq!(
            choose(vec![tts, engine], Bytes::from_mib(64)),
            [Chosen {
                source: Source::Engine,
                bytes: Bytes::from_mib(64)
            }]
        );
    }

    #[test]
    fn one_large_process_is_stopped_rather_than_a_small_and_a_large_one() {
        let small = stop("small", Class::Batch, 40);
        let mut large = stop("large", Class::Batch, 2000);
        large.cost_undo_ms = 100_000;
        let chosen = choose(vec![small, large], Bytes::from_mib(1000));
        assert_eq!(chosen.len(), 1);
        assert_eq!(chosen[0].source, Source::WorkerStop("large".to_owned()));
    }

    #[test]
    fn the_lower_class_gives_first() {
        let batch = candidate(Source::Tenant(LeaseId(2)), Class::Batch, 100, true, 10);
        let interactive = candidate(Source::Tenant(LeaseId(1)), Class::Interactive, 100, true, 10);
        let chosen = choose(vec![interactive, batch], Bytes::from_mib(120));
        assert_eq!(chosen[0].source, Source::Tenant(LeaseId(2)));
        assert_eq!(
            (chosen[0].bytes, chosen[1].bytes),
            (Bytes::from_mib(100), Bytes::from_mib(20))
        );
    }

    proptest! {
        #[test]
        fn a_choice_suffices_if_anything_does_and_nothing_in_it_is_superfluous(
            sizes in prop::collection::vec((0u64..500, any::<bool>(), 0u64..5000), 0..8),
            need in 0u64..2000,
        ) {
            let candidates: Vec<Candidate> = (1..)
                .zip(sizes)
                .map(|(id, (size, divisible, cost))| {
                    candidate(Source::Tenant(LeaseId(id)), Class::Batch, size, divisible, cost)
                })
                .collect();
            let need = Bytes::from_mib(need);
            let all = reclaimable(&candidates);
            let chosen = choose(candidates, need);
            let sum: Bytes = chosen.iter().map(|chosen| chosen.bytes).sum();
            prop_assert!(sum >= need.min(all));
            for one in &chosen {
                prop_assert!(all < need || sum.saturating_sub(one.bytes) < need);
            }
        }
    }
}
