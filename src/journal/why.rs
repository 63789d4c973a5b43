//! Explanation of one decision: event, known state, choice, outcome.

use super::{Content, JournalEntry, Rebuilt};
use cotenant_policy::{
    arbiter::Arbiter,
    decision::{Decision, LeaseDecision},
    event::{Action, EngineApplied, Event, WorkerResized},
    lease::LeaseId,
    residency::EnginePlan,
    snapshot::Snapshot,
};
use cotenant_units::{Bytes, Timestamp};

/// Explanation of one decision.
#[derive(Clone, Debug)]
pub struct Why {
    /// The requested line.
    pub asked: JournalEntry,
    /// The event that led to it; the requested line itself, if it is an event.
    pub event: JournalEntry,
    /// State of the arbiter before it; `None` if the journal has no earlier state.
    pub before: Option<Box<Snapshot>>,
    /// State of the arbiter after it.
    pub after: Option<Box<Snapshot>>,
    /// All actions that the event led to, in order.
    pub actions: Vec<Chosen>,
}

/// One decision, and its outcome.
#[derive(Clone, Debug)]
pub struct Chosen {
    /// Its line.
    pub entry: JournalEntry,
    /// Bytes to release, or to take, if it concerns bytes.
    pub promised: Option<Bytes>,
    /// Deadline of its outcome.
    pub deadline: Option<Timestamp>,
    /// The line with its outcome, if known.
    pub outcome: Option<JournalEntry>,
    /// Bytes measured as returned.
    pub measured: Option<Bytes>,
}

/// A line cannot be explained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WhyError {
    /// The line is not in the journal.
    #[error("line {sequence} does not exist; the last run has {first} to {last}")]
    Unknown {
        /// The requested line.
        sequence: u64,
        /// First line of the last run.
        first: u64,
        /// Last line of that run.
        last: u64,
    },
    /// The line does not belong to a decision.
    #[error("line {sequence} is neither an event nor an action: nothing to explain")]
    NoDecision {
        /// The requested line.
        sequence: u64,
    },
    /// The event before it was dropped from the journal.
    #[error("the event that led to line {sequence} is missing from the journal")]
    NoEvent {
        /// The requested line.
        sequence: u64,
    },
}

/// Explains line `sequence` of the last run that contains it.
///
/// # Errors
/// If there is no such line, or no event led to it.
pub fn why(entries: &[JournalEntry], sequence: u64) -> Result<Why, WhyError> {
    let runs: Vec<&[JournalEntry]> = entries
        .chunk_by(|one, next| one.boot_id == next.boot_id)
        .collect();
    let has = |run: &&&[JournalEntry]| run.iter().any(|entry| entry.sequence == sequence);
    let Some(run) = runs.iter().rev().find(has).copied() else {
        let ends = runs.last().copied().unwrap_or_default();
        return Err(WhyError::Unknown {
            sequence,
            first: ends.first().map_or(0, |entry| entry.sequence),
            last: ends.last().map_or(0, |entry| entry.sequence),
        });
    };
    let at = run
        .iter()
        .position(|entry| entry.sequence == sequence)
        .unwrap_or(0);
    let (before, rest) = run.split_at(at);
    let Some(asked) = rest.first() else {
        return Err(WhyError::NoEvent { sequence });
    };
    let back = match &asked.content {
        Content::Event(_) => 0,
        // Actions follow their event and have its time.
        Content::Action(_) => {
            let actions = before
                .iter()
                .rev()
                .take_while(|entry| is_action_at(entry, asked.at))
                .count();
            actions + 1
        }
        Content::Start(_) | Content::Checkpoint(_) | Content::Dropped { .. } => {
            return Err(WhyError::NoDecision { sequence });
        }
    };
    let Some(index) = at.checked_sub(back) else {
        return Err(WhyError::NoEvent { sequence });
    };
    let (past, now) = run.split_at(index);
    let Some((event, after)) = now.split_first() else {
        return Err(WhyError::NoEvent { sequence });
    };
    let Content::Event(happened) = &event.content else {
        return Err(WhyError::NoEvent { sequence });
    };
    if event.at != asked.at {
        return Err(WhyError::NoEvent { sequence });
    }
    let arbiter = state_before(past);
    let known = arbiter.as_ref().map(|arbiter| Box::new(arbiter.snapshot()));
    let later_state = arbiter.map(|mut arbiter| {
        let _ = arbiter.handle(event.at, happened.clone());
        Box::new(arbiter.snapshot())
    });
    let count = after
        .iter()
        .take_while(|entry| is_action_at(entry, event.at))
        .count();
    let (actions, later) = after.split_at(count);
    let actions = actions
        .iter()
        .map(|entry| chosen(entry, known.as_deref(), later))
        .collect();
    Ok(Why {
        asked: asked.clone(),
        event: event.clone(),
        before: known,
        after: later_state,
        actions,
    })
}

fn is_action_at(entry: &JournalEntry, at: Timestamp) -> bool {
    entry.at == at && matches!(entry.content, Content::Action(_))
}

/// Returns the arbiter after the last of these lines, rebuilt from the last complete state.
fn state_before(past: &[JournalEntry]) -> Option<Arbiter> {
    let begin = past
        .iter()
        .rposition(|entry| matches!(entry.content, Content::Start(_) | Content::Checkpoint(_)))?;
    let mut rebuilt = Rebuilt::default();
    for entry in past.split_at(begin).1 {
        if let Some((arbiter, event)) = rebuilt.at(entry) {
            let _ = arbiter.handle(entry.at, event.clone());
        }
    }
    rebuilt.arbiter
}

fn chosen(entry: &JournalEntry, before: Option<&Snapshot>, later: &[JournalEntry]) -> Chosen {
    let mut chosen = Chosen {
        entry: entry.clone(),
        promised: None,
        deadline: None,
        outcome: None,
        measured: None,
    };
    let Content::Action(action) = &entry.content else {
        return chosen;
    };
    let find_event = |wanted: &dyn Fn(&Event) -> bool| {
        later
            .iter()
            .find(|entry| matches!(&entry.content, Content::Event(event) if wanted(event)))
            .cloned()
    };
    match action {
        Action::ApplyPlan { revision, plan, .. } | Action::LoadEngine { revision, plan } => {
            chosen.promised = before.and_then(|before| difference(before, plan));
            chosen.outcome = find_event(&|event| {
                matches!(event,
                    Event::EngineApplied(EngineApplied { revision: done, .. }) | Event::EngineApplyFailed { revision: done, .. }
                        if done >= revision)
                    || matches!(event, Event::EngineFailed { .. })
            });
            if let Some(Content::Event(Event::EngineApplied(EngineApplied { freed, .. }))) =
                chosen.outcome.as_ref().map(|entry| &entry.content)
            {
                chosen.measured = Some(*freed);
            }
        }
        Action::SetTarget {
            lease,
            bytes,
            deadline,
            ..
        } => {
            let view =
                before.and_then(|before| before.leases.iter().find(|view| view.id == *lease));
            chosen.promised = view.map(|view| view.memory.held.saturating_sub(*bytes));
            chosen.deadline = Some(*deadline);
            chosen.outcome = later
                .iter()
                .find(|entry| match &entry.content {
                    Content::Action(Action::EndLease { lease: ended, .. }) => ended.id == *lease,
                    Content::Action(action) => reduced(action).is_some_and(|(of, _)| of == *lease),
                    _ => false,
                })
                .cloned();
            chosen.measured = chosen.outcome.as_ref().map(|entry| match &entry.content {
                Content::Action(action) => reduced(action).map_or(Bytes::ZERO, |(_, freed)| freed),
                _ => Bytes::ZERO,
            });
        }
        Action::StartWorker { worker, .. } => {
            chosen.outcome = find_event(&|event| {
                matches!(event,
                    Event::WorkerReady { worker: other, .. } | Event::WorkerExited { worker: other, .. }
                        if other == worker)
            });
        }
        Action::StopWorker { worker, .. } | Action::AbortWorker { worker, .. } => {
            let view =
                before.and_then(|before| before.leases.iter().find(|view| view.tenant == *worker));
            chosen.promised = view.map(|view| view.memory.held);
            chosen.outcome = find_event(
                &|event| matches!(event, Event::WorkerExited { worker: other, .. } if other == worker),
            );
        }
        Action::ResizeWorker { worker, .. } => {
            chosen.outcome = find_event(
                &|event| matches!(event, Event::WorkerResized(WorkerResized { worker: other, .. }) if other == worker),
            );
        }
        Action::LevelChanged(_) => {
            chosen.outcome = later
                .iter()
                .find(|entry| matches!(entry.content, Content::Action(Action::LevelChanged(_))))
                .cloned();
        }
        _ => {}
    }
    chosen
}

/// Returns the lease measured at its target, and the credited bytes.
const fn reduced(action: &Action) -> Option<(LeaseId, Bytes)> {
    match action {
        Action::Decided {
            decision: Decision::Lease(LeaseDecision::Reduced { lease, freed, .. }),
        } => Some((lease.id, *freed)),
        _ => None,
    }
}

/// Returns the bytes that the engine releases, or takes, between its last requested plan and `plan`.
fn difference(before: &Snapshot, plan: &EnginePlan) -> Option<Bytes> {
    let shape = before.engine.shape.as_ref()?;
    let goal = before
        .engine
        .asked
        .as_ref()
        .or(before.engine.in_force.as_ref());
    let from = goal.map_or(Bytes::ZERO, |goal| shape.plan_bytes(goal));
    let to = shape.plan_bytes(plan);
    Some(from.saturating_sub(to).max(to.saturating_sub(from)))
}

/// Returns the answer to the caller of an event, which may come much later.
pub fn answer_to(entries: &[JournalEntry], event: &JournalEntry) -> Option<JournalEntry> {
    let Content::Event(happened) = &event.content else {
        return None;
    };
    let ticket = happened.ticket()?;
    entries
        .iter()
        .filter(|entry| entry.boot_id == event.boot_id && entry.sequence > event.sequence)
        .find(|entry| matches!(&entry.content, Content::Action(Action::Answer { ticket: to, .. }) if *to == ticket))
        .cloned()
}

#[cfg(test)]
mod tests {
    use super::*;

    use cotenant_policy::{
        event::TargetAnswered,
        lease::{Class, LeaseRequest, Peer, Ticket},
        params::{Params, Scope},
        pressure::{MemoryReading, Sample},
    };

    /// Returns a run in which a small request reclaims memory from a large holder that complies.
    fn lines() -> Vec<JournalEntry> {
        let params = Params::for_budget(Bytes::from_mib(1000), Bytes::ZERO, Scope::Session);
        let mut arbiter = Arbiter::new(params.clone()).unwrap();
        let mut lines: Vec<JournalEntry> = Vec::new();
        let mut write = |at, content| {
            let sequence = 1 + u64::try_from(lines.len()).unwrap();
            lines.push(JournalEntry {
                sequence,
                boot_id: "a".into(),
                at,
                unix_us: 0,
                content,
            });
        };
        write(Timestamp::START, Content::start(params));
        let request = |tenant: &str, class, min, max| LeaseRequest {
            tenant: tenant.into(),
            request_id: String::new(),
            peer: Peer::default(),
            class,
            min: Bytes::from_mib(min),
            max: Bytes::from_mib(max),
            term: Some(std::time::Duration::from_secs(60)),
            wait: std::time::Duration::from_secs(5),
            validate_only: false,
            cgroup: None,
        };
        let sample = |at| Sample {
            taken_at: at,
            memory: MemoryReading {
                mem_total: Bytes::from_gib(4),
                mem_available: Bytes::from_gib(3),
                ..MemoryReading::default()
            },
            scope_used: Some(Bytes::ZERO),
            ..Sample::default()
        };
        let ms = Timestamp::from_millis;
        let events = [
            (ms(10), Event::Sampled(sample(ms(10)))),
            (
                ms(20),
                Event::LeaseRequested {
                    ticket: Ticket(1),
                    request: request("indexer", Class::Batch, 100, 900),
                },
            ),
            (
                ms(250),
                Event::LeaseRequested {
                    ticket: Ticket(2),
                    request: request("asr", Class::AudioRealtime, 300, 300),
                },
            ),
            (
                ms(260),
                Event::TargetAnswered(TargetAnswered {
                    lease: LeaseId(1),
                    nonce: 1,
                    answer: cotenant_policy::lease::TargetAnswer::Applied,
                    claimed: None,
                }),
            ),
            (
                ms(270),
                Event::Measured {
                    tenant: "indexer".into(),
                    used: Some(Bytes::from_mib(600)),
                    taken_at: ms(270),
                },
            ),
        ];
        for (at, event) in events {
            write(at, Content::Event(event.clone()));
            for action in arbiter.handle(at, event) {
                write(at, Content::Action(action));
            }
        }
        lines
    }

    #[test]
    fn a_target_is_explained_with_what_was_known_and_what_came_of_it() {
        let lines = lines();
        let target = lines
            .iter()
            .find(|entry| matches!(entry.content, Content::Action(Action::SetTarget { .. })))
            .unwrap();
        let why = why(&lines, target.sequence).unwrap();
        assert!(matches!(
            &why.event.content,
            Content::Event(Event::LeaseRequested {
                ticket: Ticket(2),
                ..
            })
        ));
        let before = why.before.unwrap();
        assert_eq!(before.memory.held, Bytes::from_mib(900));
        assert_eq!(
            before.pressure.sample.unwrap().taken_at,
            Timestamp::from_millis(10)
        );
        let chosen = why.actions.iter().find(|one| one.entry == *target).unwrap();
        assert_eq!(chosen.promised, Some(Bytes::from_mib(200)));
        assert_eq!(chosen.measured, Some(Bytes::from_mib(200)));
        assert!(chosen.deadline.is_some() && chosen.outcome.is_some());
        let answer = answer_to(&lines, &why.event).unwrap();
        assert!(super::super::render(&answer).contains("asr"));
    }

    /// The supervisor's memory has no readings.
    #[test]
    fn no_event_has_the_actions_of_a_missing_one() {
        let mut lines = lines();
        lines.retain(|line| !matches!(line.content, Content::Event(Event::Measured { .. })));
        let last = lines.last().unwrap().sequence;
        assert_eq!(
            why(&lines, last).unwrap_err(),
            WhyError::NoEvent { sequence: last }
        );
        let answered = lines
            .iter()
            .find(|line| matches!(line.content, Content::Event(Event::TargetAnswered(_))))
            .unwrap();
        let story = why(&lines, answered.sequence).unwrap();
        assert!(
            story
                .actions
                .iter()
                .all(|chosen| chosen.entry.at == answered.at)
        );
    }

    #[test]
    fn what_cannot_be_explained_is_an_error() {
        let mut lines = lines();
        assert_eq!(
            why(&lines, 1).unwrap_err(),
            WhyError::NoDecision { sequence: 1 }
        );
        let last = lines.last().unwrap().sequence;
        assert_eq!(
            why(&lines, 999).unwrap_err(),
            WhyError::Unknown {
                sequence: 999,
                first: 1,
                last
            }
        );
        lines.drain(..2);
        assert_eq!(
            why(&lines, 3).unwrap_err(),
            WhyError::NoEvent { sequence: 3 }
        );
    }
}
