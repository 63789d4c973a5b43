//! Feeding the events of a journal through an arbiter again.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::{Content, JournalEntry};
use crate::{
    policy::{
        arbiter::Arbiter,
        event::{Action, Event},
        params::Params,
    },
    units::Timestamp,
};

/// What became of one run of the supervisor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// Names the run.
    pub boot_id: String,
    /// Events that were fed in.
    pub events: u64,
    /// Actions that were the same.
    pub actions: u64,
    /// How it ended.
    pub outcome: Outcome,
}

/// How the replay of a run ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Every decision was the same.
    Same,
    /// A decision was another one; what comes after it is not compared.
    Differs(Box<Difference>),
    /// Up to here every decision was the same, and then the journal has a gap.
    Gap {
        /// The line after the gap.
        sequence: u64,
    },
    /// The journal does not have the beginning of the run, without which there is nothing to replay.
    NoStart {
        /// The first line there is.
        sequence: u64,
    },
    /// The settings of the run are not valid in this version.
    NoArbiter {
        /// Why.
        reason: String,
    },
    /// The arbiter panicked: an invariant of the book was broken.
    Panicked {
        /// The line of the event.
        sequence: u64,
        /// Its words.
        message: String,
    },
}

/// The first decision that was another one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The line of the event.
    pub event: JournalEntry,
    /// The actions in the journal.
    pub recorded: Vec<Action>,
    /// The actions now.
    pub replayed: Vec<Action>,
}

/// Feeds the events of each run through a fresh arbiter and compares its actions with those of the journal.
///
/// The last event's actions may be missing from its end, since a supervisor may die between writing two lines.
#[must_use]
pub fn replay(entries: &[JournalEntry]) -> Vec<Run> {
    replay_with(entries, |params| {
        let mut arbiter = Arbiter::new(params).map_err(|error| error.to_string())?;
        Ok(move |now, event| arbiter.handle(now, event))
    })
}

/// As [`replay`], with anything that decides.
fn replay_with<D>(entries: &[JournalEntry], start: impl Fn(Params) -> Result<D, String>) -> Vec<Run>
where
    D: FnMut(Timestamp, Event) -> Vec<Action>,
{
    entries
        .chunk_by(|one, next| one.boot_id == next.boot_id)
        .map(|entries| replay_run(entries, &start))
        .collect()
}

fn replay_run<D>(entries: &[JournalEntry], start: &impl Fn(Params) -> Result<D, String>) -> Run
where
    D: FnMut(Timestamp, Event) -> Vec<Action>,
{
    let mut run = Run {
        boot_id: entries.first().map(|first| first.boot_id.clone()).unwrap_or_default(),
        events: 0,
        actions: 0,
        outcome: Outcome::Same,
    };
    let Some((first, mut rest)) = entries.split_first() else {
        return run;
    };
    let mut decide = match &first.content {
        Content::Start(begun) => match start(begun.params.clone()) {
            Ok(decide) => decide,
            Err(reason) => {
                run.outcome = Outcome::NoArbiter { reason };
                return run;
            }
        },
        _ => {
            run.outcome = Outcome::NoStart {
                sequence: first.sequence,
            };
            return run;
        }
    };
    let mut last = first.sequence;
    while let Some((entry, after)) = rest.split_first() {
        let Content::Event(event) = &entry.content else {
            // An action without its event, a drop, or a second start: something is missing before it.
            run.outcome = Outcome::Gap {
                sequence: entry.sequence,
            };
            return run;
        };
        // The event's actions, as far as they are there without a gap.
        let mut expected = entry.sequence;
        let recorded: Vec<_> = after
            .iter()
            .map_while(|entry| match &entry.content {
                Content::Action(action) if entry.sequence == expected + 1 => {
                    expected += 1;
                    Some(action.clone())
                }
                _ => None,
            })
            .collect();
        if entry.sequence != last + 1 {
            run.outcome = Outcome::Gap {
                sequence: entry.sequence,
            };
            return run;
        }
        let replayed = match catch_unwind(AssertUnwindSafe(|| decide(entry.at, event.clone()))) {
            Ok(replayed) => replayed,
            Err(panic) => {
                run.outcome = Outcome::Panicked {
                    sequence: entry.sequence,
                    message: panic_message(&*panic),
                };
                return run;
            }
        };
        run.events += 1;
        let (_, next) = after.split_at(recorded.len());
        let is_cut = next.first().is_none_or(|next| next.sequence != expected + 1);
        if recorded != replayed && !(is_cut && replayed.starts_with(&recorded)) {
            run.outcome = Outcome::Differs(Box::new(Difference {
                event: entry.clone(),
                recorded,
                replayed,
            }));
            return run;
        }
        run.actions += u64::try_from(recorded.len()).unwrap_or(u64::MAX);
        last = expected;
        rest = next;
    }
    run
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    panic
        .downcast_ref::<String>()
        .cloned()
        .or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()))
        .unwrap_or_else(|| "a panic without words".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{journal::Start, policy::params::Scope, units::Bytes};

    /// A run of one event with one action, and another event without.
    fn lines() -> Vec<JournalEntry> {
        let params = Params::for_budget(Bytes::from_gib(1), Bytes::from_mib(128), Scope::Machine);
        let contents = [
            Content::Start(Box::new(Start {
                version: "0".into(),
                params,
            })),
            Content::Event(Event::DrainRequested),
            Content::Action(Action::Explain { message: "one".into() }),
            Content::Event(Event::DeadlineReached),
        ];
        (1..)
            .zip(contents)
            .map(|(sequence, content)| JournalEntry {
                sequence,
                boot_id: "a".into(),
                at: Timestamp::from_millis(sequence),
                unix_us: 0,
                content,
            })
            .collect()
    }

    fn outcome(entries: &[JournalEntry]) -> Outcome {
        replay_counting(entries).outcome
    }

    fn replay_counting(entries: &[JournalEntry]) -> Run {
        let mut runs = replay_with(entries, |_| {
            Ok(|_now, event| match event {
                Event::DrainRequested => vec![Action::Explain { message: "one".into() }],
                _ => Vec::new(),
            })
        });
        runs.remove(0)
    }

    #[test]
    fn the_same_decisions_are_the_same() {
        let run = replay_counting(&lines());
        assert_eq!((run.events, run.actions, run.outcome), (2, 1, Outcome::Same));
    }

    #[test]
    fn another_action_is_told_with_its_event() {
        let mut lines = lines();
        lines[2].content = Content::Action(Action::Explain { message: "two".into() });
        match outcome(&lines) {
            Outcome::Differs(difference) => {
                assert_eq!(difference.event.sequence, 2);
                assert_ne!(difference.recorded, difference.replayed);
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn an_action_that_is_missing_in_the_middle_differs_and_at_the_end_does_not() {
        let mut cut = lines();
        cut.truncate(2);
        assert_eq!(outcome(&cut), Outcome::Same);
        let mut missing = lines();
        missing.remove(2);
        missing[2].sequence = 3;
        assert!(matches!(outcome(&missing), Outcome::Differs(_)));
    }

    #[test]
    fn a_gap_ends_the_comparison() {
        let mut lines = lines();
        lines[3].sequence = 9;
        assert_eq!(outcome(&lines), Outcome::Gap { sequence: 9 });
        lines.remove(0);
        assert_eq!(outcome(&lines), Outcome::NoStart { sequence: 2 });
    }

    #[test]
    fn a_panic_of_the_arbiter_is_an_outcome() {
        let runs = replay_with(&lines(), |_| {
            Ok(|_now, _event| -> Vec<Action> { panic!("held exceeds the budget") })
        });
        assert_eq!(
            runs[0].outcome,
            Outcome::Panicked {
                sequence: 2,
                message: "held exceeds the budget".into()
            }
        );
    }
}
