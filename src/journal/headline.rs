//! Headlines: one sentence for each decision, completed by its outcome.

use std::collections::VecDeque;

use super::{
    Content, JournalEntry,
    render::{given_back, render, render_action},
};
use cotenant_policy::{
    death::DeathClass,
    decision::{ChangeCause, Decision, LeaseDecision, LeaseEnd, WorkerDecision},
    event::{Action, Answer, EngineApplied, Event, WorkerResized},
    lease::{LeaseId, Ticket},
    reason::{PlanReason, StopReason},
};
use cotenant_units::{Bytes, Timestamp};

/// Kind of a headline, by which charts mark it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadlineKind {
    /// A worker or the engine ended unexpectedly.
    Death,
    /// The engine takes memory.
    Growth,
    /// Another holder has to give memory: a lease or a worker.
    Preemption,
    /// The pressure level changed.
    Pressure,
    /// A client requests memory, capacity or a worker.
    Request,
    /// The engine gives memory.
    Shed,
}

impl HeadlineKind {
    /// Returns its name in documents.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Death => "death",
            Self::Growth => "growth",
            Self::Preemption => "preemption",
            Self::Pressure => "pressure",
            Self::Request => "request",
            Self::Shed => "shed",
        }
    }
}

/// One decision or request, with its outcome if known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Headline {
    /// Number of its line, as for `cotenant why`.
    pub sequence: u64,
    /// Wall-clock time, µs since 1970.
    pub unix_us: u64,
    /// Its kind.
    pub kind: HeadlineKind,
    /// The sentence with its figures.
    pub text: String,
    /// Time of its outcome in the run, once known.
    pub outcome: Option<Timestamp>,
}

/// Collector of headlines from the lines of a journal.
#[derive(Debug, Default)]
pub struct Headlines {
    boot_id: String,
    /// Headlines without an outcome, oldest first.
    open: VecDeque<Open>,
}

#[derive(Debug)]
struct Open {
    awaits: Outcome,
    at: Timestamp,
    headline: Headline,
}

/// The line that completes a headline.
#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    /// Report about a plan of the engine, by revision.
    Plan(u64),
    /// A lease measured at its target, or ended.
    Lease(LeaseId),
    /// End of a worker's process.
    Exit(String),
    /// Confirmation of a worker's variant.
    Variant(String),
    /// Decision about the restart of a worker.
    Restart(String),
    /// A worker's readiness.
    Ready(String),
    /// Answer to a request.
    Answer(Ticket),
}

impl Headlines {
    /// Takes the next line. Returns the headline that it begins or completes; a completed one replaces the headline
    /// with the same number.
    pub fn take(&mut self, entry: &JournalEntry) -> Option<Headline> {
        if entry.boot_id != self.boot_id {
            self.boot_id.clone_from(&entry.boot_id);
            self.open.clear();
        }
        if let Some((outcome, text, is_timed)) = outcome_of(entry) {
            let place = self.open.iter().position(|open| open.awaits == outcome)?;
            let Open {
                at, mut headline, ..
            } = self.open.remove(place)?;
            headline.outcome = Some(entry.at);
            headline.text.push_str(&format!("; {text}"));
            if is_timed {
                let took = entry.at.saturating_since(at).as_millis();
                headline.text.push_str(&format!(" after {took} ms"));
            }
            return Some(headline);
        }
        let (kind, text, awaits) = begun(entry)?;
        let headline = Headline {
            sequence: entry.sequence,
            unix_us: entry.unix_us,
            kind,
            text,
            outcome: None,
        };
        if let Some(awaits) = awaits {
            if self.open.len() == OPEN_MAX {
                self.open.pop_front();
            }
            self.open.push_back(Open {
                awaits,
                at: entry.at,
                headline: headline.clone(),
            });
        }
        Some(headline)
    }
}

/// Returns kind and sentence of the headline that a line begins, and the outcome that completes it.
fn begun(entry: &JournalEntry) -> Option<(HeadlineKind, String, Option<Outcome>)> {
    use HeadlineKind as Kind;
    Some(match &entry.content {
        Content::Action(action) => match action {
            Action::ApplyPlan {
                revision, reason, ..
            } => (
                kind_of_plan(reason)?,
                reason.to_string(),
                Some(Outcome::Plan(*revision)),
            ),
            Action::LoadEngine { revision, .. } => (
                Kind::Growth,
                render_action(action),
                Some(Outcome::Plan(*revision)),
            ),
            Action::SetTarget { lease, .. } => (
                Kind::Preemption,
                render_action(action),
                Some(Outcome::Lease(*lease)),
            ),
            Action::StopWorker {
                worker,
                reason:
                    StopReason::Reclaim { .. }
                    | StopReason::IgnoredPressure(_)
                    | StopReason::OverBudget { .. },
            } => (
                Kind::Preemption,
                render_action(action),
                Some(Outcome::Exit(worker.clone())),
            ),
            Action::EndLease {
                end: LeaseEnd::Expired { .. },
                ..
            } => (Kind::Death, render_action(action), None),
            Action::LevelChanged(_) => (Kind::Pressure, render_action(action), None),
            Action::Decided {
                decision:
                    Decision::Worker(WorkerDecision::Changing {
                        worker,
                        cause: ChangeCause::Room { .. },
                        ..
                    }),
            } => (
                Kind::Preemption,
                render_action(action),
                Some(Outcome::Variant(worker.clone())),
            ),
            _ => return None,
        },
        Content::Event(event) => match event {
            Event::WorkerDied { certificate } => {
                if certificate.verdict.class == DeathClass::KilledByUs {
                    return None;
                }
                let restart = Outcome::Restart(certificate.worker.clone());
                (Kind::Death, render(entry), Some(restart))
            }
            Event::EngineFailed { .. } => (Kind::Death, render(entry), None),
            Event::LeaseRequested { ticket, request } if !request.validate_only => {
                let answer = Outcome::Answer(*ticket);
                (Kind::Request, render(entry), Some(answer))
            }
            Event::WorkerWanted { worker, .. } => {
                let ready = Outcome::Ready(worker.clone());
                (Kind::Request, render(entry), Some(ready))
            }
            Event::CapacityWanted(_) => (Kind::Request, render(entry), None),
            Event::WorkerResizeRequested(resize) => {
                let answer = Outcome::Answer(resize.ticket);
                (Kind::Request, render(entry), Some(answer))
            }
            _ => return None,
        },
        Content::Start(_) | Content::Checkpoint(_) | Content::Dropped { .. } => return None,
    })
}

/// Returns the outcome that a line states, its words, and whether its duration follows them.
fn outcome_of(entry: &JournalEntry) -> Option<(Outcome, String, bool)> {
    Some(match &entry.content {
        Content::Event(Event::EngineApplied(EngineApplied {
            revision,
            freed,
            untouched_given,
            ..
        })) => {
            let text = format!("{}applied", given_back(*freed, *untouched_given));
            (Outcome::Plan(*revision), text, true)
        }
        Content::Event(Event::EngineApplyFailed { revision, reason }) => (
            Outcome::Plan(*revision),
            format!("not applied: {reason}"),
            false,
        ),
        Content::Event(Event::WorkerExited { worker, .. }) => {
            (Outcome::Exit(worker.clone()), "ended".to_owned(), true)
        }
        Content::Event(Event::WorkerResized(WorkerResized { worker, error, .. })) => {
            let text = match error {
                None => "changed".to_owned(),
                Some(error) => format!("not changed: {error}"),
            };
            (Outcome::Variant(worker.clone()), text, error.is_none())
        }
        Content::Event(Event::WorkerReady { worker, .. }) => {
            (Outcome::Ready(worker.clone()), "ready".to_owned(), true)
        }
        Content::Action(action) => match action {
            Action::Decided {
                decision: Decision::Lease(LeaseDecision::Reduced { lease, freed, .. }),
            } => (
                Outcome::Lease(lease.id),
                format!("{freed} verified back"),
                true,
            ),
            Action::EndLease { lease, .. } if !expired(action) => {
                (Outcome::Lease(lease.id), "ended".to_owned(), true)
            }
            Action::Decided {
                decision: Decision::Worker(decision),
            } => {
                let (worker, text) = match decision {
                    WorkerDecision::Restarting { worker, wait, .. } => (
                        worker,
                        format!("it restarts in {:.1} s", wait.as_secs_f64()),
                    ),
                    WorkerDecision::GivenUp { worker, .. } => (
                        worker,
                        "it failed too often and is not restarted".to_owned(),
                    ),
                    WorkerDecision::NeedsOperator { worker } => {
                        (worker, "it waits for an operator".to_owned())
                    }
                    _ => return None,
                };
                (Outcome::Restart(worker.clone()), text, false)
            }
            Action::Answer { ticket, answer } => {
                let (text, is_timed) = match answer {
                    Answer::Lease { lease } => (format!("granted {}", lease.memory.held), true),
                    Answer::Denied { denial, .. } => (format!("denied: {denial}"), false),
                    Answer::Done { .. } => ("done".to_owned(), true),
                    Answer::WouldGrant { .. } | Answer::Shed(_) => return None,
                };
                (Outcome::Answer(*ticket), text, is_timed)
            }
            _ => return None,
        },
        _ => return None,
    })
}

const fn expired(action: &Action) -> bool {
    matches!(
        action,
        Action::EndLease {
            end: LeaseEnd::Expired { .. },
            ..
        }
    )
}

fn kind_of_plan(reason: &PlanReason) -> Option<HeadlineKind> {
    let by_size = |from: Bytes, to: Bytes| {
        if to < from {
            HeadlineKind::Shed
        } else {
            HeadlineKind::Growth
        }
    };
    Some(match reason {
        PlanReason::Shed { .. } => HeadlineKind::Shed,
        PlanReason::KvType { change }
        | PlanReason::Capacity { change, .. }
        | PlanReason::Chunk { change, .. } => by_size(change.from.bytes, change.to.bytes),
        PlanReason::Regrowth { .. } | PlanReason::FullForNothing { .. } => HeadlineKind::Growth,
        PlanReason::Confirm | PlanReason::Unanswered => return None,
    })
}

/// Headlines that wait for their outcome at once. Our choice: a decision has some actions, most done within a second.
const OPEN_MAX: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;
    use cotenant_policy::lease::{Class, LeaseRequest, Peer};
    use std::time::Duration;

    fn entry(sequence: u64, ms: u64, content: Content) -> JournalEntry {
        JournalEntry {
            sequence,
            boot_id: "a".into(),
            at: Timestamp::from_millis(ms),
            unix_us: ms * 1000,
            content,
        }
    }

    fn request(ticket: u64) -> Content {
        let request = LeaseRequest {
            tenant: "indexer".into(),
            request_id: String::new(),
            peer: Peer::default(),
            class: Class::Batch,
            min: Bytes::from_mib(100),
            max: Bytes::from_mib(100),
            term: None,
            wait: Duration::ZERO,
            validate_only: false,
            cgroup: None,
        };
        let ticket = Ticket(ticket);
        Content::Event(Event::LeaseRequested { ticket, request })
    }

    fn done(ticket: u64) -> Content {
        let answer = Answer::Done {
            done: cotenant_policy::event::Done::FullSize,
        };
        let ticket = Ticket(ticket);
        Content::Action(Action::Answer { ticket, answer })
    }

    #[test]
    fn a_request_is_one_headline_that_its_answer_completes() {
        let mut headlines = Headlines::default();
        let asked = headlines.take(&entry(7, 10, request(1))).unwrap();
        assert_eq!((asked.sequence, asked.kind), (7, HeadlineKind::Request));
        assert_eq!(asked.outcome, None);
        assert_eq!(headlines.take(&entry(8, 11, done(2))), None);
        let answered = headlines.take(&entry(9, 250, done(1))).unwrap();
        assert_eq!(
            (answered.sequence, answered.outcome),
            (7, Some(Timestamp::from_millis(250)))
        );
        assert_eq!(
            answered.text,
            "`indexer` (batch) requests 100 MiB; done after 240 ms"
        );
        assert_eq!(headlines.take(&entry(10, 260, done(1))), None);
    }

    #[test]
    fn another_run_completes_no_headline_and_open_ones_are_bounded() {
        let mut headlines = Headlines::default();
        for ticket in 1..=100 {
            assert!(headlines.take(&entry(ticket, 1, request(ticket))).is_some());
        }
        assert_eq!(headlines.open.len(), OPEN_MAX);
        assert_eq!(headlines.take(&entry(101, 1, done(1))), None);
        let mut later = entry(1, 2, done(100));
        later.boot_id = "b".into();
        assert_eq!(headlines.take(&later), None);
    }
}
