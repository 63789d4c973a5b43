//! Decisions of another mode on a recorded journal.
//!
//! At every event the arbiter of the journal is copied with the other mode, both take the event, and what they want done
//! is compared. The next event finds the arbiter as it really was: no answer of the engine or of a holder has to be made
//! up. So the result is the first difference of each decision, not the history that would have followed from it.

use super::{Content, JournalEntry};
use crate::{
    policy::{
        arbiter::Arbiter,
        event::{Action, Answer, Event},
        params::ResidencyMode,
        residency::{EnginePlan, ModelShape},
        snapshot::Snapshot,
        speed::Speed,
    },
    units::Bytes,
};

/// One run of the supervisor, under its own mode and another one.
#[derive(Clone, Debug)]
pub struct Comparison {
    /// Names the run.
    pub boot_id: String,
    /// Events that were fed in.
    pub events: u64,
    /// Events at which either of them wanted something done that matters.
    pub decisions: u64,
    /// Those at which the two wanted something else, in order.
    pub differing: Vec<Differing>,
    /// What was decided.
    pub recorded: Tally,
    /// What the other mode would have decided.
    pub other: Tally,
}

/// A decision that would have been another one.
#[derive(Clone, Debug)]
pub struct Differing {
    /// The event.
    pub event: JournalEntry,
    /// What was decided.
    pub recorded: Vec<Action>,
    /// What the other mode would have decided.
    pub other: Vec<Action>,
}

/// Sums over all decisions of one side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Bytes that the engine was to give back.
    pub shed: Bytes,
    /// Tokens of KV capacity that it was to give up.
    pub context: u64,
    /// Tokens per second that it was to lose by it, in thousandths, at the speeds of the field.
    pub milli_tokens_per_s: u64,
    /// Requests that were denied, at once or after they had waited in vain.
    pub denied: u64,
    /// Workers that were to be stopped.
    pub stopped: u64,
}

/// Compares the decisions of each run with those of `mode`. What stands behind a gap is left out up to the next
/// checkpoint.
#[must_use]
pub fn compare(entries: &[JournalEntry], mode: ResidencyMode) -> Vec<Comparison> {
    entries
        .chunk_by(|one, next| one.boot_id == next.boot_id)
        .map(|run| compare_run(run, mode))
        .collect()
}

fn compare_run(run: &[JournalEntry], mode: ResidencyMode) -> Comparison {
    let mut comparison = Comparison {
        boot_id: run.first().map(|first| first.boot_id.clone()).unwrap_or_default(),
        events: 0,
        decisions: 0,
        differing: Vec::new(),
        recorded: Tally::default(),
        other: Tally::default(),
    };
    let mut arbiter: Option<Arbiter> = None;
    let mut last = 0;
    for entry in run {
        if entry.sequence != last + 1 {
            arbiter = None;
        }
        last = entry.sequence;
        match (&entry.content, &mut arbiter) {
            (Content::Start(start), _) => arbiter = Arbiter::new(start.params.clone()).ok(),
            (Content::Checkpoint(checkpoint), _) => {
                arbiter = Arbiter::from_checkpoint((**checkpoint).clone()).ok();
            }
            (Content::Dropped { .. }, _) => arbiter = None,
            (Content::Event(event), Some(arbiter)) => comparison.take(arbiter, entry, event, mode),
            (Content::Event(_) | Content::Action(_), _) => {}
        }
    }
    comparison
}

impl Comparison {
    fn take(&mut self, arbiter: &mut Arbiter, entry: &JournalEntry, event: &Event, mode: ResidencyMode) {
        self.events += 1;
        let other = Arbiter::from_checkpoint(arbiter.checkpoint().with_mode(mode));
        let before = arbiter.snapshot();
        let recorded = deeds(arbiter.handle(entry.at, event.clone()));
        let Ok(mut other) = other else { return };
        let other = deeds(other.handle(entry.at, event.clone()));
        if recorded.is_empty() && other.is_empty() {
            return;
        }
        self.decisions += 1;
        self.recorded.add(&before, &recorded);
        self.other.add(&before, &other);
        let same = recorded.len() == other.len() && recorded.iter().zip(&other).all(|(one, two)| is_same(one, two));
        if !same {
            self.differing.push(Differing {
                event: entry.clone(),
                recorded,
                other,
            });
        }
    }
}

/// Actions that a user notices; readings, words and the balance are left out.
fn deeds(actions: Vec<Action>) -> Vec<Action> {
    actions
        .into_iter()
        .filter(|action| {
            matches!(
                action,
                Action::ApplyPlan { .. }
                    | Action::LoadEngine { .. }
                    | Action::SetTarget { .. }
                    | Action::EndLease { .. }
                    | Action::StartWorker { .. }
                    | Action::StopWorker { .. }
                    | Action::AbortWorker { .. }
                    | Action::ResizeWorker { .. }
                    | Action::Answer {
                        answer: Answer::Denied { .. },
                        ..
                    }
            )
        })
        .collect()
}

/// Whether two deeds are the same, whatever the words.
fn is_same(one: &Action, other: &Action) -> bool {
    match (one, other) {
        (Action::ApplyPlan { plan: one, .. }, Action::ApplyPlan { plan: other, .. }) => one == other,
        (Action::StopWorker { worker: one, .. }, Action::StopWorker { worker: other, .. }) => one == other,
        (Action::EndLease { lease: one, .. }, Action::EndLease { lease: other, .. }) => one == other,
        (
            Action::SetTarget {
                lease: one, bytes: to, ..
            },
            Action::SetTarget {
                lease: other,
                bytes: down,
                ..
            },
        ) => (one, to) == (other, down),
        (Action::Answer { ticket: one, .. }, Action::Answer { ticket: other, .. }) => one == other,
        _ => one == other,
    }
}

impl Tally {
    fn add(&mut self, before: &Snapshot, deeds: &[Action]) {
        let goal = before.engine.asked.as_ref().or(before.engine.in_force.as_ref());
        for deed in deeds {
            match deed {
                Action::ApplyPlan { plan, .. } => {
                    let (Some(shape), Some(goal)) = (&before.engine.shape, goal) else {
                        continue;
                    };
                    let gives = shape.plan_bytes(goal).saturating_sub(shape.plan_bytes(plan));
                    let context = goal.kv_capacity.get().saturating_sub(plan.kv_capacity.get());
                    let slower = speed(shape, goal).saturating_sub(speed(shape, plan));
                    self.shed = self.shed.saturating_add(gives);
                    self.context += u64::from(context);
                    self.milli_tokens_per_s += slower;
                }
                Action::StopWorker { .. } | Action::AbortWorker { .. } => self.stopped += 1,
                Action::Answer { .. } => self.denied += 1,
                _ => {}
            }
        }
    }
}

/// Tokens per second under a plan, in thousandths, at the speeds of the field.
fn speed(shape: &ModelShape, plan: &EnginePlan) -> u64 {
    let layers: Bytes = shape.layers.iter().map(|layer| layer.resident_bytes).sum();
    let streamed: Bytes = (0..)
        .zip(&shape.layers)
        .filter(|(index, _)| !plan.resident.contains(index))
        .map(|(_, layer)| layer.resident_bytes)
        .sum();
    Speed::FIELD.milli_tokens_per_s(layers.saturating_add(shape.fixed_bytes), streamed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        policy::{
            lease::Ticket,
            params::{EngineParams, Params, Scope},
            pressure::Sample,
            residency::sample_shape,
        },
        units::{Timestamp, Tokens},
    };

    /// A run in which an operator takes memory back from the engine.
    fn lines() -> Vec<JournalEntry> {
        let mut params = Params::for_budget(Bytes::from_mib(400), Bytes::ZERO, Scope::Session);
        params.engine = Some(EngineParams::default());
        let shape = ModelShape {
            fixed_bytes: Bytes::from_mib(16),
            state_bytes: Bytes::from_mib(1),
            workspace_fixed_bytes: Bytes::from_mib(3),
            ring_bytes: Bytes::from_mib(4),
            ..sample_shape(8, Bytes::from_mib(10))
        };
        let mut arbiter = Arbiter::new(params.clone()).unwrap();
        let mut contents = vec![(Timestamp::START, Content::start(params))];
        let mut tell = |millis, event: Event| {
            let at = Timestamp::from_millis(millis);
            contents.push((at, Content::Event(event.clone())));
            let actions = arbiter.handle(at, event);
            contents.extend(actions.iter().map(|action| (at, Content::Action(action.clone()))));
            actions
        };
        let sample = Sample {
            taken_at: Timestamp::from_millis(10),
            mem_total: Bytes::from_gib(8),
            mem_available: Bytes::from_gib(4),
            scope_used: Some(Bytes::ZERO),
            ..Sample::default()
        };
        let _ = tell(10, Event::Sampled(sample));
        let used = shape.plan_bytes(&EnginePlan {
            resident: (0..8).collect(),
            kv_capacity: Tokens::new(4096),
            prefill_chunk: Tokens::new(128),
            kv_type: crate::policy::kv_type::KvType::F16,
        });
        for action in tell(20, Event::EngineInspected { shape }) {
            if let Action::LoadEngine { revision, plan } = action {
                let applied = Event::EngineApplied {
                    revision,
                    in_force: plan,
                    freed: Bytes::ZERO,
                    used,
                    untouched: Bytes::ZERO,
                    untouched_given: Bytes::ZERO,
                    took: std::time::Duration::from_millis(5),
                };
                let _ = tell(30, applied);
            }
        }
        let shed = Event::OperatorShed {
            ticket: Ticket(1),
            bytes: Bytes::from_mib(24),
        };
        let _ = tell(40, shed);
        (1..)
            .zip(contents)
            .map(|(sequence, (at, content))| JournalEntry {
                sequence,
                boot_id: "a".into(),
                at,
                unix_us: 0,
                content,
            })
            .collect()
    }

    #[test]
    fn the_mode_that_it_had_decides_the_same_and_another_gives_up_something_else() {
        let lines = lines();
        let same = compare(&lines, ResidencyMode::Balanced).remove(0);
        assert!(same.differing.is_empty() && same.decisions > 0);
        assert_eq!(same.recorded, same.other);
        assert!(same.recorded.shed >= Bytes::from_mib(24));
        let context = compare(&lines, ResidencyMode::MaxContext).remove(0);
        let speed = compare(&lines, ResidencyMode::MaxSpeed).remove(0);
        assert!(context.other.context < speed.other.context, "{context:?} {speed:?}");
        assert!(context.other.milli_tokens_per_s > speed.other.milli_tokens_per_s);
        assert!(!context.differing.is_empty() || !speed.differing.is_empty());
    }
}
