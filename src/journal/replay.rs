//! Replay of a journal through an arbiter.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::{Content, JournalEntry, rebuilt::begun};
use cotenant_policy::{
    arbiter::{Arbiter, Checkpoint},
    event::{Action, Event},
};

/// Result of replaying one run of the supervisor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// Id of the run.
    pub boot_id: String,
    /// Number of replayed events.
    pub events: u64,
    /// Number of matching actions.
    pub actions: u64,
    /// Number of intermediate checkpoints with a matching state.
    pub checkpoints: u64,
    /// Number of gaps after which the replay resumed from a checkpoint.
    pub gaps: u64,
    /// Number of lines before the first checkpoint, or between a gap and the next checkpoint, which could not be
    /// compared.
    pub skipped: u64,
    /// Result of the replay.
    pub outcome: Outcome,
}

/// Result of the replay of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Every decision matched.
    Same,
    /// A decision differs; later ones were not compared.
    Differs(Box<Difference>),
    /// Every decision matched, but the state at a checkpoint differs.
    StateDiffers {
        /// The line of the checkpoint.
        sequence: u64,
    },
    /// Every decision matched up to a gap in the journal that no checkpoint follows.
    Gap {
        /// First line after the gap.
        sequence: u64,
    },
    /// The journal has neither the beginning of the run nor a checkpoint, so replay is impossible.
    NoStart {
        /// First line in the journal.
        sequence: u64,
    },
    /// The settings or a checkpoint of the run are not valid in this version.
    NoArbiter {
        /// The reason.
        reason: String,
    },
    /// The arbiter panicked: an invariant of the ledger is violated.
    Panicked {
        /// The line of the event.
        sequence: u64,
        /// Its message.
        message: String,
    },
}

/// First decision that differs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The line of the event.
    pub event: JournalEntry,
    /// The actions in the journal.
    pub recorded: Vec<Action>,
    /// The actions of the replay.
    pub replayed: Vec<Action>,
}

/// Feeds the events of each run to an arbiter and compares its actions with those in the journal.
///
/// A run begins with its start or, if that is missing, with its first checkpoint; after a gap it resumes at the next
/// checkpoint. The last event's actions may be incomplete, since a supervisor may die between writing two lines.
pub fn replay(entries: &[JournalEntry]) -> Vec<Run> {
    entries
        .chunk_by(|one, next| one.boot_id == next.boot_id)
        .map(|entries| {
            let mut run = Run {
                boot_id: entries
                    .first()
                    .map(|first| first.boot_id.clone())
                    .unwrap_or_default(),
                events: 0,
                actions: 0,
                checkpoints: 0,
                gaps: 0,
                skipped: 0,
                outcome: Outcome::Same,
            };
            if let Err(outcome) = run.replay(entries) {
                run.outcome = outcome;
            }
            run
        })
        .collect()
}

impl Run {
    fn replay(&mut self, mut rest: &[JournalEntry]) -> Result<(), Outcome> {
        let Some(first) = rest.first() else {
            return Ok(());
        };
        let nothing = Outcome::NoStart {
            sequence: first.sequence,
        };
        let mut arbiter = None;
        // Whether a checkpoint is accepted without comparison: right at the start, where a state may have been
        // restored.
        let mut fresh = false;
        let mut last = first.sequence.saturating_sub(1);
        while let Some((entry, after)) = rest.split_first() {
            if arbiter.is_none() || entry.sequence != last + 1 {
                if arbiter.take().is_some() {
                    self.gaps += 1;
                }
                let next = rest.iter().position(|entry| {
                    matches!(entry.content, Content::Start(_) | Content::Checkpoint(_))
                });
                let gap = Outcome::Gap {
                    sequence: entry.sequence,
                };
                let Some((skipped, resumed)) = next.map(|next| rest.split_at(next)) else {
                    return Err(if self.events == 0 && self.gaps == 0 {
                        nothing
                    } else {
                        gap
                    });
                };
                self.skipped += u64::try_from(skipped.len()).unwrap_or(u64::MAX);
                let Some((entry, after)) = resumed.split_first() else {
                    break;
                };
                fresh = matches!(entry.content, Content::Start(_));
                arbiter = begin(entry)?;
                last = entry.sequence;
                rest = after;
                continue;
            }
            let Some(decider) = &mut arbiter else { break };
            match &entry.content {
                Content::Event(event) => {
                    let (next, at) = self.compare(decider, entry, event, after)?;
                    (rest, last, fresh) = (next, at, false);
                }
                Content::Checkpoint(checkpoint) => {
                    if Checkpoint::of(decider) == **checkpoint {
                        self.checkpoints += 1;
                    } else if fresh {
                        arbiter = begin(entry)?;
                    } else {
                        return Err(Outcome::StateDiffers {
                            sequence: entry.sequence,
                        });
                    }
                    (rest, last, fresh) = (after, entry.sequence, false);
                }
                // An action without its event, a drop, or a second start: lines are missing before it.
                Content::Action(_) | Content::Dropped { .. } | Content::Start(_) => {
                    last = u64::MAX - 1;
                }
            }
        }
        Ok(())
    }

    /// Feeds one event, compares the actions that follow it, and returns the rest with the number of the last of them.
    fn compare<'a>(
        &mut self,
        arbiter: &mut Arbiter,
        entry: &JournalEntry,
        event: &Event,
        after: &'a [JournalEntry],
    ) -> Result<(&'a [JournalEntry], u64), Outcome> {
        // The event's actions, up to the first gap.
        let mut expected = entry.sequence;
        let recorded: Vec<_> = after
            .iter()
            .map_while(|entry| match &entry.content {
                Content::Action(action) if entry.sequence == expected + 1 => {
                    expected += 1;
                    Some(action)
                }
                _ => None,
            })
            .collect();
        let replayed = catch_unwind(AssertUnwindSafe(|| arbiter.handle(entry.at, event.clone())))
            .map_err(|panic| Outcome::Panicked {
            sequence: entry.sequence,
            message: panic_message(&*panic),
        })?;
        self.events += 1;
        let (_, next) = after.split_at(recorded.len());
        let is_cut = next
            .first()
            .is_none_or(|next| next.sequence != expected + 1);
        let same = recorded.len() <= replayed.len()
            && (is_cut || recorded.len() == replayed.len())
            && recorded
                .iter()
                .zip(&replayed)
                .all(|(one, other)| *one == other);
        if !same {
            return Err(Outcome::Differs(Box::new(Difference {
                event: entry.clone(),
                recorded: recorded.into_iter().cloned().collect(),
                replayed,
            })));
        }
        self.actions += u64::try_from(recorded.len()).unwrap_or(u64::MAX);
        Ok((next, expected))
    }
}

/// Returns the arbiter of a line with a complete state.
fn begin(entry: &JournalEntry) -> Result<Option<Arbiter>, Outcome> {
    begun(&entry.content)
        .transpose()
        .map_err(|reason| Outcome::NoArbiter { reason })
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    panic
        .downcast_ref::<String>()
        .cloned()
        .or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()))
        .unwrap_or_else(|| "a panic without a message".to_owned())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use cotenant_policy::{
        book::{Book, LastNumbers},
        decision::AdmissionDecision,
        lease::{Class, LeaseRequest, Peer, Ticket},
        params::{Params, Scope},
    };
    use cotenant_units::{Bytes, Timestamp};

    fn params() -> Params {
        Params::for_budget(Bytes::from_gib(1), Bytes::from_mib(128), Scope::Machine)
    }

    fn line(sequence: u64, content: Content) -> JournalEntry {
        JournalEntry {
            sequence,
            boot_id: "a".into(),
            at: Timestamp::from_millis(sequence),
            unix_us: 0,
            content,
        }
    }

    /// Returns a run with these events and the arbiter's decisions on them.
    fn run_of(events: Vec<Event>) -> Vec<JournalEntry> {
        let mut arbiter = Arbiter::new(params()).unwrap();
        let mut lines = vec![line(1, Content::start(params()))];
        for event in events {
            let entry = line(next(&lines), Content::Event(event.clone()));
            let actions = arbiter.handle(entry.at, event);
            lines.push(entry);
            for action in actions {
                lines.push(line(next(&lines), Content::Action(action)));
            }
        }
        lines
    }

    fn next(lines: &[JournalEntry]) -> u64 {
        lines.last().unwrap().sequence + 1
    }

    /// Returns a run of one event with an action and one without.
    fn lines() -> Vec<JournalEntry> {
        let lines = run_of(vec![
            Event::DrainRequested { by: None },
            Event::DeadlineReached,
        ]);
        assert!(
            matches!(lines[2].content, Content::Action(_)) && lines.len() == 4,
            "{lines:?}"
        );
        lines
    }

    fn decided(decision: AdmissionDecision) -> Content {
        Content::Action(Action::Decided {
            decision: decision.into(),
        })
    }

    fn only_run(entries: &[JournalEntry]) -> Run {
        replay(entries).remove(0)
    }

    fn outcome(entries: &[JournalEntry]) -> Outcome {
        only_run(entries).outcome
    }

    #[test]
    fn the_same_decisions_are_the_same() {
        let run = only_run(&lines());
        assert_eq!(
            (run.events, run.actions, run.outcome),
            (2, 1, Outcome::Same)
        );
    }

    #[test]
    fn another_action_is_reported_with_its_event() {
        let mut lines = lines();
        lines[2].content = decided(AdmissionDecision::DrainEnded);
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
        // A book with the largest possible number, and a lease that needs one more.
        let book = Book {
            last: LastNumbers {
                lease: u64::MAX,
                ..LastNumbers::default()
            },
            ..Book::default()
        };
        let mut lines = run_of(vec![Event::Recovered {
            book,
            adopted: Vec::new(),
        }]);
        let request = LeaseRequest {
            tenant: "a".into(),
            request_id: String::new(),
            peer: Peer::default(),
            class: Class::Batch,
            min: Bytes::from_mib(1),
            max: Bytes::from_mib(1),
            term: Some(Duration::from_secs(30)),
            wait: Duration::ZERO,
            validate_only: false,
            cgroup: None,
        };
        let sequence = next(&lines);
        lines.push(line(
            sequence,
            Content::Event(Event::LeaseRequested {
                ticket: Ticket(1),
                request,
            }),
        ));
        let message = "attempt to add with overflow".into();
        assert_eq!(outcome(&lines), Outcome::Panicked { sequence, message });
    }

    fn checkpoint() -> Content {
        Content::Checkpoint(Box::new(Checkpoint::of(&Arbiter::new(params()).unwrap())))
    }

    #[test]
    fn a_file_that_begins_in_the_middle_is_replayed_from_its_checkpoint() {
        let mut lines = lines();
        lines.remove(0);
        lines[0].content = decided(AdmissionDecision::DrainEnded);
        lines[1].content = checkpoint();
        let run = only_run(&lines);
        assert_eq!(
            (run.events, run.skipped, run.gaps, run.outcome),
            (1, 1, 0, Outcome::Same)
        );
    }

    #[test]
    fn behind_a_gap_the_replay_goes_on_from_the_next_checkpoint() {
        let mut lines = lines();
        lines.push(line(5, Content::Dropped { lines: 3 }));
        lines.push(line(8, Content::Event(Event::DrainRequested { by: None })));
        lines.push(line(9, checkpoint()));
        lines.push(line(10, Content::Event(Event::DrainRequested { by: None })));
        lines.push(line(11, decided(AdmissionDecision::DrainBegun)));
        let run = only_run(&lines);
        assert_eq!((run.events, run.actions), (3, 2));
        assert_eq!((run.skipped, run.gaps, run.outcome), (2, 1, Outcome::Same));
        lines.truncate(6);
        assert_eq!(outcome(&lines), Outcome::Gap { sequence: 5 });
    }

    #[test]
    fn another_state_at_a_checkpoint_is_reported_and_the_first_one_is_where_a_run_begins() {
        let entries = |contents: Vec<Content>| -> Vec<JournalEntry> {
            (1..)
                .zip(contents)
                .map(|(sequence, content)| line(sequence, content))
                .collect()
        };
        let params = Params::for_budget(Bytes::from_gib(2), Bytes::from_mib(128), Scope::Machine);
        let start = || Content::start(params.clone());
        // After a restore, the state differs from that of a fresh arbiter.
        let restored = replay(&entries(vec![
            start(),
            checkpoint(),
            Content::Event(Event::DeadlineReached),
        ]));
        assert_eq!(restored[0].outcome, Outcome::Same);
        let strayed = replay(&entries(vec![
            start(),
            Content::Event(Event::DeadlineReached),
            checkpoint(),
        ]));
        assert_eq!(strayed[0].outcome, Outcome::StateDiffers { sequence: 3 });
    }
}
