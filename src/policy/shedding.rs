//! Choice of the cheapest set of candidates that is enough.
//!
//! Each candidate says how many bytes it can give, in which steps, and what each costs the user, now and until it is
//! undone, in microseconds of waiting, weighed by class. Among all sets of steps that give enough, the one with the least
//! cost is taken; of equal ones the one that asks fewer holders, and then the one that takes fewer bytes. The search is
//! exact: a partial set is only dropped when another one costs no more and gives no less. Costs are added in 128 bits, so
//! that no byte passes through a float.
#![expect(missing_docs, reason = "fields are named by what they hold")]

use std::{cmp::Ordering, time::Duration};

use serde::{Deserialize, Serialize};

use super::{
    lease::{Class, LeaseId},
    params::ResidencyMode,
    reason::{ReclaimReason, SpareReason},
};
use cotenant_units::Bytes;

/// Who could give memory back, and how.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "source")]
pub enum Source {
    /// KV blocks of the engine that no sequence uses.
    UnusedKv,
    /// KV blocks that keep what the last answer has left, while no request runs: the prefix of the next prompt.
    PrefixKv,
    /// The oldest KV blocks of the running answer, whose request allows that they are dropped; what was said in them is
    /// lost to it.
    OldestKv,
    /// KV of the engine, by keeping it in a smaller type; besides that the only one that changes what is answered, and weighed only
    /// where the configuration allows it.
    KvType,
    /// Layers of the engine that are resident.
    Layers,
    /// Workspace of the engine that larger prefill chunks need, while parts are streamed.
    PrefillChunk,
    /// A tenant that holds more than its least.
    Tenant { lease: LeaseId, tenant: String },
    /// An idle worker that can do with a smaller variant.
    WorkerVariant { worker: String, variant: String },
    /// A worker, by stopping it.
    WorkerStop { worker: String },
    /// A worker that comes down when it is notified that memory is short.
    WorkerNotified { worker: String },
}

impl Source {
    /// Whether a process ends by it.
    #[must_use]
    pub const fn stops(&self) -> bool {
        matches!(self, Self::WorkerStop { .. })
    }
}

/// A part of what a candidate can give.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Blocks or layers; 1 for what cannot be counted.
    pub units: u32,
    pub bytes: Bytes,
    /// What the user waits for this step and all before it, now and for undoing it, µs.
    pub cost_us: u64,
}

/// One way to get memory back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    pub source: Source,
    pub class: Class,
    /// What it can give, the least first; each step holds those before it, so neither bytes nor costs fall.
    pub steps: Vec<Step>,
    /// Bytes of the unit in which less than a step can be given; zero where only whole steps can.
    pub unit: Bytes,
}

impl Candidate {
    /// Something that is given as a whole.
    #[must_use]
    pub fn whole(source: Source, class: Class, bytes: Bytes, cost_us: u64) -> Self {
        Self {
            steps: vec![Step {
                units: 1,
                bytes,
                cost_us,
            }],
            source,
            class,
            unit: Bytes::ZERO,
        }
    }

    /// Something that is given in any number of `units` of the same size, each at the same part of `cost_us`.
    #[must_use]
    pub fn even(source: Source, class: Class, unit: Bytes, units: u32, cost_us: u64) -> Self {
        let all = u128::from(cost_us);
        let cost_of = |taken: u32| {
            let part = all * u128::from(taken) / u128::from(units.max(1));
            u64::try_from(part).unwrap_or(u64::MAX)
        };
        Self::graded(source, class, unit, units, cost_of)
    }

    /// Something that is given in any number of `units` of the same size, at a cost that grows as `cost_of` says.
    #[must_use]
    pub fn graded(
        source: Source,
        class: Class,
        unit: Bytes,
        units: u32,
        cost_of: impl Fn(u32) -> u64,
    ) -> Self {
        let stride = units.div_ceil(STEPS_MAX).max(1);
        let steps = (1..=units.div_ceil(stride))
            .map(|step| step.saturating_mul(stride).min(units))
            .map(|taken| Step {
                units: taken,
                bytes: unit.saturating_mul(u64::from(taken)),
                cost_us: cost_of(taken),
            })
            .collect();
        Self {
            source,
            class,
            steps,
            unit,
        }
    }

    /// The most that it can give.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        self.steps
            .iter()
            .map(|step| step.bytes)
            .max()
            .unwrap_or(Bytes::ZERO)
    }

    /// By how much its cost counts: the class, and whether a process is lost.
    #[must_use]
    pub const fn weight(&self) -> u64 {
        let class = match self.class {
            Class::AudioRealtime => 32,
            Class::Interactive => 8,
            Class::LlmElastic => 2,
            Class::Batch => 1,
        };
        let stop = if matches!(self.source, Source::WorkerStop { .. }) {
            STOP_WEIGHT
        } else {
            1
        };
        class * stop
    }

    /// Orders by the weighed cost of a byte, if everything is given: the cheaper one is shed first, the dearer one comes
    /// back first.
    #[must_use]
    pub fn by_cost_of_a_byte(&self, other: &Self) -> Ordering {
        let whole = |candidate: &Self| {
            let most = candidate.steps.last();
            most.map_or((0, 1), |step| {
                (candidate.score(step), u128::from(step.bytes.get().max(1)))
            })
        };
        let ((cost, bytes), (other_cost, other_bytes)) = (whole(self), whole(other));
        cost.saturating_mul(other_bytes)
            .cmp(&other_cost.saturating_mul(bytes))
    }

    /// The weighed cost of a step. Asking a holder costs something.
    fn score(&self, step: &Step) -> u128 {
        (u128::from(step.cost_us) + ASKING_US) * u128::from(self.weight())
    }
}

/// Something chosen, and how much of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chosen {
    pub source: Source,
    /// Blocks or layers, where it is counted.
    pub units: u32,
    pub bytes: Bytes,
}

/// What would be shed first, and at which headroom.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NextShed {
    /// The cheapest set that suffices; empty when nothing may be shed.
    pub chosen: Vec<Chosen>,
    /// What a shed at that headroom has to give.
    pub need: Bytes,
    /// The headroom below which something is shed.
    pub below: Bytes,
    /// The headroom now.
    pub headroom: Bytes,
}

/// Chooses the steps that give `need` back at the least cost; all of them, if all together are too little.
#[must_use]
pub fn choose(candidates: &[Candidate], need: Bytes) -> Vec<Chosen> {
    if need == Bytes::ZERO {
        return Vec::new();
    }
    if reclaimable(candidates) <= need {
        return candidates
            .iter()
            .filter_map(|candidate| {
                chosen(
                    candidate,
                    candidate.steps.iter().max_by_key(|step| step.bytes)?,
                )
            })
            .collect();
    }
    let mut trail = Trail::default();
    let mut front = vec![Partial::default()];
    let mut bound = greedy_cost(candidates, need);
    for (index, candidate) in candidates.iter().enumerate() {
        let mut next = front.clone();
        for partial in &front {
            // What is enough already can only become dearer.
            if partial.bytes >= need {
                continue;
            }
            for (number, step) in candidate.steps.iter().enumerate() {
                if step.bytes == Bytes::ZERO {
                    continue;
                }
                let cost = partial.cost.saturating_add(candidate.score(step));
                if cost > bound {
                    break;
                }
                let bytes = partial.bytes.saturating_add(step.bytes);
                next.push(Partial {
                    cost,
                    asked: partial.asked + 1,
                    bytes,
                    last: trail.append(partial.last, index, number),
                });
                if bytes >= need {
                    bound = cost;
                    break;
                }
            }
        }
        front = undominated(next, need);
    }
    let best = front
        .iter()
        .filter(|partial| partial.bytes >= need)
        .min_by_key(|partial| partial.key());
    let Some(best) = best else { return Vec::new() };
    let mut taken: Vec<(&Candidate, Step)> = trail
        .back_from(best.last)
        .into_iter()
        .filter_map(|(index, number)| {
            let candidate = candidates.get(index)?;
            Some((candidate, *candidate.steps.get(number)?))
        })
        .collect();
    spare(&mut taken, best.bytes.saturating_sub(need));
    taken
        .iter()
        .filter_map(|(candidate, step)| chosen(candidate, step))
        .collect()
}

/// The sum of what all candidates can give.
#[must_use]
pub fn reclaimable(candidates: &[Candidate]) -> Bytes {
    candidates
        .iter()
        .map(Candidate::bytes)
        .fold(Bytes::ZERO, Bytes::saturating_add)
}

/// What was weighed before memory was reclaimed: who was asked, and who was not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Weighing {
    pub reason: ReclaimReason,
    pub need: Bytes,
    /// What all candidates could give.
    pub reclaimable: Bytes,
    /// How context and speed were weighed; nothing without an engine.
    pub mode: Option<ResidencyMode>,
    /// Who could give something, the cheapest byte first.
    pub candidates: Vec<Weighed>,
    /// Who holds something and was not asked, and why.
    pub spared: Vec<Spared>,
}

/// A candidate in the balance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Weighed {
    /// Who and how.
    #[serde(flatten)]
    pub source: Source,
    pub class: Class,
    /// The most that it can give.
    pub bytes: Bytes,
    /// By how much its cost counts.
    pub weight: u64,
    /// Its weighed cost for each MiB, µs: the less, the sooner it is asked.
    pub score: u64,
    /// What it was asked for; nothing for those who were not.
    pub chosen: Option<Bytes>,
}

/// A holder that could not be asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spared {
    /// Its name: `llm#1`.
    pub holder: String,
    pub held: Bytes,
    pub why: SpareReason,
}

impl Weighing {
    /// What has been weighed and chosen.
    #[must_use]
    pub fn new(
        reason: ReclaimReason,
        need: Bytes,
        candidates: &[Candidate],
        choice: &[Chosen],
    ) -> Self {
        let mut weighed: Vec<Weighed> = candidates
            .iter()
            .map(|candidate| {
                let most = candidate.steps.last();
                let score = most.map_or(0, |step| {
                    let whole = candidate.score(step) * u128::from(Bytes::from_mib(1).get());
                    whole / u128::from(step.bytes.get().max(1))
                });
                Weighed {
                    source: candidate.source.clone(),
                    class: candidate.class,
                    bytes: candidate.bytes(),
                    weight: candidate.weight(),
                    score: u64::try_from(score).unwrap_or(u64::MAX),
                    chosen: choice
                        .iter()
                        .find(|chosen| chosen.source == candidate.source)
                        .map(|chosen| chosen.bytes),
                }
            })
            .collect();
        weighed.sort_by(|one, other| (one.score, &one.source).cmp(&(other.score, &other.source)));
        Self {
            reason,
            need,
            reclaimable: reclaimable(candidates),
            mode: None,
            candidates: weighed,
            spared: Vec::new(),
        }
    }
}

fn chosen(candidate: &Candidate, step: &Step) -> Option<Chosen> {
    (step.bytes > Bytes::ZERO).then(|| Chosen {
        source: candidate.source.clone(),
        units: step.units,
        bytes: step.bytes,
    })
}

/// What a set that suffices costs, the cheapest byte first: nothing dearer has to be looked at.
fn greedy_cost(candidates: &[Candidate], need: Bytes) -> u128 {
    let mut wholes: Vec<(&Source, u128, Bytes)> = candidates
        .iter()
        .filter_map(|candidate| {
            let most = candidate.steps.last()?;
            Some((&candidate.source, candidate.score(most), most.bytes))
        })
        .collect();
    wholes.sort_by(|(one, cost, bytes), (other, other_cost, other_bytes)| {
        let mine = cost.saturating_mul(u128::from(other_bytes.get()));
        let theirs = other_cost.saturating_mul(u128::from(bytes.get()));
        mine.cmp(&theirs).then_with(|| one.cmp(other))
    });
    let (mut sum, mut total) = (Bytes::ZERO, 0u128);
    for (_, cost, bytes) in wholes {
        if sum >= need {
            break;
        }
        sum = sum.saturating_add(bytes);
        total = total.saturating_add(cost);
    }
    total
}

/// Who can give less than a step gives only what the others leave; the dearest gives least.
fn spare(taken: &mut [(&Candidate, Step)], mut surplus: Bytes) {
    taken.sort_by(|(one, a), (other, b)| {
        let mine = one.score(a).saturating_mul(u128::from(b.bytes.get()));
        let theirs = other.score(b).saturating_mul(u128::from(a.bytes.get()));
        mine.cmp(&theirs)
            .then_with(|| one.source.cmp(&other.source))
    });
    for (candidate, step) in taken.iter_mut().rev() {
        if candidate.unit == Bytes::ZERO {
            continue;
        }
        let units = (surplus.get() / candidate.unit.get()).min(u64::from(step.units));
        let units = u32::try_from(units).unwrap_or(u32::MAX);
        let bytes = candidate.unit.saturating_mul(u64::from(units));
        surplus = surplus.saturating_sub(bytes);
        step.units -= units;
        step.bytes = step.bytes.saturating_sub(bytes);
    }
}

/// A set of steps of the candidates looked at so far.
#[derive(Clone, Copy, Debug, Default)]
struct Partial {
    cost: u128,
    asked: u32,
    bytes: Bytes,
    /// Its last step in the trail.
    last: Option<usize>,
}

impl Partial {
    const fn key(&self) -> (u128, u32, Bytes) {
        (self.cost, self.asked, self.bytes)
    }
}

/// Sets, each as its last step and the set that it was added to.
#[derive(Default)]
struct Trail(Vec<(Option<usize>, usize, usize)>);

impl Trail {
    fn append(&mut self, before: Option<usize>, candidate: usize, step: usize) -> Option<usize> {
        self.0.push((before, candidate, step));
        Some(self.0.len() - 1)
    }

    fn back_from(&self, mut last: Option<usize>) -> Vec<(usize, usize)> {
        let mut steps = Vec::new();
        while let Some((before, candidate, step)) = last.and_then(|last| self.0.get(last)) {
            steps.push((*candidate, *step));
            last = *before;
        }
        steps.reverse();
        steps
    }
}

/// Drops every set for which another one costs no more and gives no less of what is needed.
fn undominated(mut sets: Vec<Partial>, need: Bytes) -> Vec<Partial> {
    sets.sort_by_key(|set| (set.key(), set.last));
    let mut kept: Vec<Partial> = Vec::new();
    for set in sets {
        let reach = set.bytes.min(need);
        if kept.last().is_none_or(|last| last.bytes.min(need) < reach) {
            kept.push(set);
        }
    }
    // Beyond this many the search would take longer than it can save; the dearest, which suffices if any does, stays.
    while kept.len() > SETS_MAX {
        let last = kept.len() - 1;
        let mut number = 0;
        kept.retain(|_| {
            number += 1;
            number % 2 == 1 || number > last
        });
    }
    kept
}

/// Microseconds, as costs are counted.
pub(super) fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// Shed first, kill last: a process that is stopped loses more than the time to start it.
const STOP_WEIGHT: u64 = 64;
/// The cost of asking a holder, so that fewer are asked where nothing else differs: one round through the loop.
const ASKING_US: u128 = 100;
/// Steps of a candidate that is given in many units. What a step gives too much is spared afterwards.
const STEPS_MAX: u32 = 16;
/// Sets that are kept while searching: 20 candidates with 16 steps each stay within a few milliseconds.
const SETS_MAX: usize = 512;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const fn mib(mib: u64) -> Bytes {
        Bytes::from_mib(mib)
    }

    fn tenant(lease: u64) -> Source {
        Source::Tenant {
            lease: LeaseId(lease),
            tenant: format!("t{lease}"),
        }
    }

    fn layers(count: u32, each_us: u64) -> Candidate {
        Candidate::even(
            Source::Layers,
            Class::LlmElastic,
            mib(10),
            count,
            each_us * u64::from(count),
        )
    }

    fn stop(name: &str, class: Class, size: u64, cost_us: u64) -> Candidate {
        let worker = name.to_owned();
        Candidate::whole(Source::WorkerStop { worker }, class, mib(size), cost_us)
    }

    #[test]
    fn the_engine_gives_before_a_worker_is_stopped() {
        let tts = stop("tts", Class::AudioRealtime, 500, 1_000_000);
        assert_eq!(
            choose(&[tts, layers(50, 5000)], mib(64)),
            [Chosen {
                source: Source::Layers,
                units: 7,
                bytes: mib(70)
            }]
        );
    }

    #[test]
    fn the_lower_class_gives_first() {
        let even = |lease, class| Candidate::even(tenant(lease), class, mib(1), 100, 10_000);
        let chosen = choose(
            &[even(1, Class::Interactive), even(2, Class::Batch)],
            mib(120),
        );
        let given: Vec<_> = chosen
            .iter()
            .map(|chosen| (&chosen.source, chosen.bytes))
            .collect();
        assert_eq!(given, [(&tenant(2), mib(100)), (&tenant(1), mib(20))]);
    }

    #[test]
    fn the_balance_shows_winners_and_losers_with_their_scores() {
        let candidates = [
            layers(8, 30_000),
            stop("indexer", Class::Batch, 50, 1_000_000),
        ];
        let weighing = Weighing::new(
            ReclaimReason::Operator { asked: mib(20) },
            mib(20),
            &candidates,
            &choose(&candidates, mib(20)),
        );
        let seen: Vec<_> = weighing
            .candidates
            .iter()
            .map(|weighed| (weighed.source.clone(), weighed.score, weighed.chosen))
            .collect();
        assert_eq!(
            seen,
            [
                (Source::Layers, 6002, Some(mib(20))),
                (candidates[1].source.clone(), 1_280_128, None)
            ]
        );
    }

    #[test]
    fn many_candidates_with_many_steps_are_weighed_in_reasonable_work() {
        let candidates: Vec<Candidate> = (1..=64)
            .map(|lease| {
                let units = 100 + u32::try_from(lease * lease % 97).unwrap();
                Candidate::even(
                    tenant(lease),
                    Class::Batch,
                    Bytes::new(997 + lease),
                    units,
                    lease * 7919,
                )
            })
            .collect();
        let need = reclaimable(&candidates).per_mille(618);
        let chosen = choose(&candidates, need);
        let sum: Bytes = chosen.iter().map(|chosen| chosen.bytes).sum();
        assert!(
            sum >= need && sum < need + Bytes::from_kib(8),
            "{sum} of {need}"
        );
    }

    /// Every set of steps, one of each candidate at most.
    fn least_by_trying_all(candidates: &[Candidate], need: Bytes) -> Option<(u128, u32, Bytes)> {
        let mut sets = vec![(0, 0, Bytes::ZERO)];
        for candidate in candidates {
            let more: Vec<_> = sets
                .iter()
                .flat_map(|(cost, asked, bytes)| {
                    candidate
                        .steps
                        .iter()
                        .filter(|step| step.bytes > Bytes::ZERO)
                        .map(move |step| {
                            (cost + candidate.score(step), asked + 1, *bytes + step.bytes)
                        })
                })
                .collect();
            sets.extend(more);
        }
        sets.into_iter()
            .filter(|(_, _, bytes)| *bytes >= need)
            .min()
    }

    fn candidates() -> impl Strategy<Value = Vec<Candidate>> {
        let class = prop::sample::select(vec![Class::Interactive, Class::LlmElastic, Class::Batch]);
        let steps = prop::collection::vec((0u64..60, 0u64..300), 1..4);
        prop::collection::vec((class, steps, any::<bool>()), 0..6).prop_map(|drawn| {
            (1..)
                .zip(drawn)
                .map(|(lease, (class, drawn, stops))| {
                    let (mut units, mut bytes, mut cost_us) = (0, 0, 0);
                    let steps = drawn
                        .into_iter()
                        .map(|(more, dearer)| {
                            (units, bytes, cost_us) = (units + 1, bytes + more, cost_us + dearer);
                            Step {
                                units,
                                bytes: Bytes::new(bytes),
                                cost_us,
                            }
                        })
                        .collect();
                    let worker = format!("w{lease}");
                    Candidate {
                        source: if stops {
                            Source::WorkerStop { worker }
                        } else {
                            tenant(lease)
                        },
                        class,
                        steps,
                        unit: Bytes::ZERO,
                    }
                })
                .collect()
        })
    }

    proptest! {
        #[test]
        fn the_choice_is_the_cheapest_of_all_sets_that_suffice(candidates in candidates(), need in 1u64..400) {
            let need = Bytes::new(need);
            let chosen = choose(&candidates, need);
            let sum: Bytes = chosen.iter().map(|chosen| chosen.bytes).sum();
            match least_by_trying_all(&candidates, need) {
                None => prop_assert_eq!(sum, reclaimable(&candidates)),
                Some((least, asked, bytes)) => {
                    let cost: u128 = chosen
                        .iter()
                        .map(|chosen| {
                            let candidate = candidates.iter().find(|one| one.source == chosen.source).unwrap();
                            let step = candidate.steps.iter().find(|step| step.units == chosen.units).unwrap();
                            candidate.score(step)
                        })
                        .sum();
                    if reclaimable(&candidates) > need {
                        prop_assert_eq!((cost, chosen.len(), sum), (least, asked as usize, bytes));
                    }
                    prop_assert!(sum >= need);
                }
            }
        }

        #[test]
        fn what_is_shed_last_comes_back_first(
            drawn in prop::collection::vec((1u64..2000, 0u64..5_000_000, any::<bool>(), 0u8..4), 1..10),
        ) {
            let candidates: Vec<Candidate> = (1..)
                .zip(drawn)
                .map(|(lease, (size, cost_us, stops, class))| {
                    let class = [Class::AudioRealtime, Class::Interactive, Class::LlmElastic, Class::Batch]
                        [usize::from(class)];
                    let worker = format!("w{lease}");
                    let source = if stops { Source::WorkerStop { worker } } else { tenant(lease) };
                    Candidate::whole(source, class, mib(size), cost_us)
                })
                .collect();
            let weighing = Weighing::new(ReclaimReason::Operator { asked: Bytes::ZERO }, Bytes::ZERO, &candidates, &[]);
            let mut back = candidates;
            back.sort_by(|one, other| other.by_cost_of_a_byte(one));
            let scores = |source: &Source| {
                weighing.candidates.iter().find(|weighed| weighed.source == *source).unwrap().score
            };
            for pair in back.windows(2) {
                prop_assert!(scores(&pair[0].source) >= scores(&pair[1].source));
            }
        }
    }
}
