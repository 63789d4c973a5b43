//! Headlines: one sentence for each decision, completed by its outcome.

use std::time::Duration;

use super::{
    Content, JournalEntry,
    render::{given_back, render},
};
use cotenant_policy::{
    death::DeathClass,
    decision::{
        AdmissionDecision, ChangeCause, Decision, EngineDecision, GrowthDecision, LeaseDecision,
        LeaseEnd, PlanOutcome, WorkerDecision,
    },
    event::{Action, Answer, Done, EngineApplied, Event, WorkerResized},
    lease::{LeaseId, Ticket},
    reason::{PlanReason, StopReason},
};
use cotenant_units::{Bytes, TimeSpan, Timestamp, micros};

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
    /// A client or an operator requests memory, capacity or a worker.
    Request,
    /// The engine gives memory.
    Shed,
    /// Any other fact that an operator must see: a start, a reload, a worker's readiness, lost lines.
    State,
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
            Self::State => "state",
        }
    }
}

/// One decision, request or fact, with its outcome if known.
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
    /// Whether its outcome is still to come.
    pub is_open: bool,
    /// Time of its outcome in the run, once known.
    pub outcome: Option<Timestamp>,
}

/// Collector of headlines from the lines of a journal.
#[derive(Debug, Default)]
pub struct Headlines {
    boot_id: String,
    /// Headlines without an outcome, oldest first.
    open: Vec<Open>,
}

#[derive(Debug)]
struct Open {
    /// The first of them completes it.
    awaits: Vec<Outcome>,
    at: Timestamp,
    headline: Headline,
}

/// The line that completes a headline.
#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    /// Report about a plan of the engine, by revision.
    Plan(u64),
    /// The engine is ready.
    Loaded,
    /// Decision about the next load of the engine.
    NextLoad,
    /// Decision about a request for KV capacity.
    Capacity,
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
    /// Takes the next line. Returns the headlines that it completes, or the one that it begins; a completed one replaces
    /// the headline with the same number.
    pub fn take(&mut self, entry: &JournalEntry) -> Vec<Headline> {
        if entry.boot_id != self.boot_id {
            self.boot_id.clone_from(&entry.boot_id);
            self.open.clear();
        }
        if let Some((outcome, text, is_timed)) = outcome_of(entry) {
            let done = self
                .open
                .extract_if(.., |open| open.awaits.contains(&outcome));
            let completed: Vec<_> = done
                .map(|Open { at, headline, .. }| {
                    let took = rounded(entry.at.saturating_since(at));
                    let after = if is_timed {
                        format!(" after {took}")
                    } else {
                        String::new()
                    };
                    Headline {
                        text: format!("{}; {text}{after}", headline.text),
                        is_open: false,
                        outcome: Some(entry.at),
                        ..headline
                    }
                })
                .collect();
            if !completed.is_empty() {
                return completed;
            }
        }
        let Some((kind, text, awaits)) = begun(entry) else {
            return Vec::new();
        };
        // A worker's start or change is the outcome of the request for it.
        let is_told = |open: &Open| {
            open.headline.kind == HeadlineKind::Request
                && awaits.iter().any(|one| open.awaits.contains(one))
        };
        if kind == HeadlineKind::State && self.open.iter().any(is_told) {
            return Vec::new();
        }
        let headline = Headline {
            sequence: entry.sequence,
            unix_us: entry.unix_us,
            kind,
            text,
            is_open: !awaits.is_empty(),
            outcome: None,
        };
        if headline.is_open {
            if self.open.len() == OPEN_MAX {
                self.open.remove(0);
            }
            self.open.push(Open {
                awaits,
                at: entry.at,
                headline: headline.clone(),
            });
        }
        vec![headline]
    }
}

/// Kind and sentence of a headline, and the outcomes that complete it.
type Begun = (HeadlineKind, String, Vec<Outcome>);

/// Returns the headline that a line begins; none for details of another one.
fn begun(entry: &JournalEntry) -> Option<Begun> {
    use HeadlineKind as Kind;
    let (kind, awaits) = match &entry.content {
        Content::Start(_) | Content::Dropped { .. } => (Kind::State, vec![]),
        Content::Checkpoint(_) => return None,
        Content::Action(action) => match action {
            Action::ApplyPlan {
                revision, reason, ..
            } => {
                let awaits = vec![Outcome::Plan(*revision)];
                return Some((kind_of_plan(reason)?, reason.to_string(), awaits));
            }
            Action::SetTarget { lease, .. } => (Kind::Preemption, vec![Outcome::Lease(*lease)]),
            Action::StopWorker { worker, reason } => {
                let kind = match reason {
                    StopReason::Reclaim { .. }
                    | StopReason::IgnoredPressure(_)
                    | StopReason::OverBudget { .. } => Kind::Preemption,
                    _ => Kind::State,
                };
                (kind, vec![Outcome::Exit(worker.clone())])
            }
            Action::EndLease { lease, .. } => (Kind::Death, vec![Outcome::Lease(lease.id)]),
            Action::LevelChanged(_) => (Kind::Pressure, vec![]),
            Action::EmptyPagePool { .. } => (Kind::State, vec![]),
            Action::Decided { decision } => decided(decision)?,
            _ => return None,
        },
        Content::Event(event) => match event {
            Event::WorkerDied { certificate } => {
                if certificate.verdict.class == DeathClass::KilledByUs {
                    return None;
                }
                let mut text = render(entry);
                if let Some(remedy) = &certificate.verdict.remedy {
                    text.push_str(&format!("; remedy: {remedy}"));
                }
                let awaits = vec![Outcome::Restart(certificate.worker.clone())];
                return Some((Kind::Death, text, awaits));
            }
            Event::EngineFailed { .. } => (Kind::Death, vec![Outcome::NextLoad]),
            Event::WorkerUnresponsive { .. } => (Kind::Death, vec![]),
            Event::LeaseRequested { request, .. } if request.validate_only => return None,
            Event::WorkerWanted { worker, .. } => {
                (Kind::Request, vec![Outcome::Ready(worker.clone())])
            }
            Event::WorkerResizeRequested(resize) => {
                let variant = Outcome::Variant(resize.worker.clone());
                (Kind::Request, vec![variant, Outcome::Answer(resize.ticket)])
            }
            Event::CapacityWanted(_) => (Kind::Request, vec![Outcome::Capacity]),
            Event::LeaseRequested { ticket, .. }
            | Event::OperatorShed { ticket, .. }
            | Event::OperatorRegrow { ticket, .. }
            | Event::OperatorKvType { ticket, .. }
            | Event::OperatorLoad { ticket, .. }
            | Event::OperatorWorker { ticket, .. } => {
                (Kind::Request, vec![Outcome::Answer(*ticket)])
            }
            Event::LeaseResizeRequested(resize) => {
                (Kind::Request, vec![Outcome::Answer(resize.ticket)])
            }
            Event::WorkerReady { .. }
            | Event::EngineApplyFailed { .. }
            | Event::BookLost { .. }
            | Event::Reconfigured { .. }
            | Event::ReloadRefused { .. }
            | Event::Resized { .. } => (Kind::State, vec![]),
            _ => return None,
        },
    };
    Some((kind, render(entry), awaits))
}

/// Returns kind and outcomes of the headline that a decision begins.
fn decided(decision: &Decision) -> Option<(HeadlineKind, Vec<Outcome>)> {
    use HeadlineKind as Kind;
    Some(match decision {
        Decision::Engine(EngineDecision::Loading { .. }) => {
            (Kind::Growth, vec![Outcome::Loaded, Outcome::NextLoad])
        }
        Decision::Engine(EngineDecision::Applied {
            outcome: PlanOutcome::ChunkEnded { .. },
            ..
        }) => (Kind::Shed, vec![]),
        Decision::Lease(LeaseDecision::Released { lease, .. }) => {
            (Kind::State, vec![Outcome::Lease(lease.id)])
        }
        Decision::Worker(WorkerDecision::Starting { worker, .. }) => {
            let exit = Outcome::Exit(worker.clone());
            (Kind::State, vec![Outcome::Ready(worker.clone()), exit])
        }
        Decision::Worker(WorkerDecision::Changing { worker, cause, .. }) => {
            let kind = match cause {
                ChangeCause::Room { .. } => Kind::Preemption,
                ChangeCause::Asked | ChangeCause::Idle { .. } => Kind::State,
            };
            (kind, vec![Outcome::Variant(worker.clone())])
        }
        // Details or outcomes of other headlines.
        Decision::Admission(
            AdmissionDecision::Granted { .. }
            | AdmissionDecision::Grown { .. }
            | AdmissionDecision::Withdrawn { .. },
        )
        | Decision::Engine(
            EngineDecision::Applied { .. }
            | EngineDecision::Gone { .. }
            | EngineDecision::Inspected { .. }
            | EngineDecision::NotApplied { .. }
            | EngineDecision::StrayPlan { .. },
        )
        | Decision::Lease(
            LeaseDecision::Answered { .. }
            | LeaseDecision::AnswerIgnored { .. }
            | LeaseDecision::Closed { .. }
            | LeaseDecision::EndAcknowledged { .. },
        )
        | Decision::Worker(
            WorkerDecision::Died { .. }
            | WorkerDecision::Exited { .. }
            | WorkerDecision::Ignored { .. }
            | WorkerDecision::Ready { .. }
            | WorkerDecision::Resized { .. }
            | WorkerDecision::Unresponsive { .. }
            | WorkerDecision::VariantKept { .. }
            | WorkerDecision::Woken { .. },
        ) => return None,
        _ => (Kind::State, vec![]),
    })
}

/// Returns the outcome that a line states, its words, and whether its duration follows them.
fn outcome_of(entry: &JournalEntry) -> Option<(Outcome, String, bool)> {
    Some(match &entry.content {
        Content::Event(event) => match event {
            Event::EngineApplied(EngineApplied {
                revision,
                freed,
                untouched_given,
                ..
            }) => {
                let text = format!("{}applied", given_back(*freed, *untouched_given));
                (Outcome::Plan(*revision), text, true)
            }
            Event::EngineApplyFailed { revision, reason } => {
                let text = format!("not applied: {reason}");
                (Outcome::Plan(*revision), text, false)
            }
            Event::WorkerExited { worker, .. } => {
                (Outcome::Exit(worker.clone()), "ended".to_owned(), true)
            }
            Event::WorkerResized(WorkerResized { worker, error, .. }) => {
                let text = match error {
                    None => "changed".to_owned(),
                    Some(error) => format!("not changed: {error}"),
                };
                (Outcome::Variant(worker.clone()), text, error.is_none())
            }
            Event::WorkerReady { worker, .. } => {
                (Outcome::Ready(worker.clone()), "ready".to_owned(), true)
            }
            Event::LeaseRequestCancelled { ticket } => {
                (Outcome::Answer(*ticket), "withdrawn".to_owned(), true)
            }
            _ => return None,
        },
        Content::Action(action) => match action {
            Action::Decided { decision } => return outcome_in(decision),
            Action::EndLease {
                end: LeaseEnd::Expired { .. },
                ..
            } => return None,
            Action::EndLease { lease, end } => (Outcome::Lease(lease.id), end.to_string(), false),
            Action::Answer { ticket, answer } => {
                let (text, is_timed) = match answer {
                    Answer::Lease { lease } => (format!("granted {}", lease.memory.held), true),
                    Answer::Denied { denial, .. } => (format!("denied: {denial}"), false),
                    // The plan is a headline of its own.
                    Answer::Done {
                        done: Done::Grows(_),
                    } => ("the engine grows".to_owned(), false),
                    Answer::Done { done } => (done.to_string(), false),
                    Answer::Shed(outcome) => (outcome.to_string(), false),
                    Answer::WouldGrant { .. } => return None,
                };
                (Outcome::Answer(*ticket), text, is_timed)
            }
            _ => return None,
        },
        _ => return None,
    })
}

/// As [`outcome_of`], for a decision.
fn outcome_in(decision: &Decision) -> Option<(Outcome, String, bool)> {
    Some(match decision {
        Decision::Lease(LeaseDecision::Reduced { lease, freed, .. }) => {
            let text = format!("{freed} verified back");
            (Outcome::Lease(lease.id), text, true)
        }
        Decision::Lease(LeaseDecision::Closed {
            lease, held, rest, ..
        }) => {
            let text = format!("{} verified back", held.saturating_sub(*rest));
            (Outcome::Lease(lease.id), text, true)
        }
        Decision::Engine(EngineDecision::Applied {
            outcome: PlanOutcome::Ready,
            ..
        }) => (Outcome::Loaded, "ready".to_owned(), true),
        Decision::Engine(EngineDecision::Gone { freed, next, .. }) => {
            let text = format!("{freed} removed from the ledger; {next}");
            (Outcome::NextLoad, text, false)
        }
        Decision::Growth(GrowthDecision::CapacityWithheld { present, wait, .. }) => {
            let text = format!("{present} are planned: {wait}");
            (Outcome::Capacity, text, false)
        }
        Decision::Worker(WorkerDecision::Restarting { worker, wait, .. }) => {
            let text = format!("it restarts in {}", rounded(*wait));
            (Outcome::Restart(worker.clone()), text, false)
        }
        Decision::Worker(WorkerDecision::GivenUp { worker, .. }) => {
            let text = "it failed too often and is not restarted".to_owned();
            (Outcome::Restart(worker.clone()), text, false)
        }
        Decision::Worker(WorkerDecision::NeedsOperator { worker }) => {
            let text = "it waits for an operator".to_owned();
            (Outcome::Restart(worker.clone()), text, false)
        }
        _ => return None,
    })
}

/// Rounds a span down to whole milliseconds, and from a second to tenths.
fn rounded(span: Duration) -> TimeSpan {
    let us = micros(span);
    let step = match us {
        0..1000 => 1,
        1000..1_000_000 => 1000,
        _ => 100_000,
    };
    TimeSpan(Duration::from_micros(us - us % step))
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
            done: Done::FullSize,
        };
        let ticket = Ticket(ticket);
        Content::Action(Action::Answer { ticket, answer })
    }

    fn only(mut taken: Vec<Headline>) -> Headline {
        assert_eq!(taken.len(), 1);
        taken.remove(0)
    }

    #[test]
    fn a_start_is_the_outcome_of_the_requests_for_it_and_otherwise_a_headline() {
        let worker = || "asr".to_owned();
        let wanted = || {
            let (worker, client) = (worker(), None);
            Content::Event(Event::WorkerWanted { worker, client })
        };
        let starting = || {
            let decision = Decision::Worker(WorkerDecision::Starting {
                worker: worker(),
                peak: Bytes::from_mib(54),
                free: Bytes::from_mib(30),
                budget: Bytes::from_mib(200),
            });
            Content::Action(Action::Decided { decision })
        };
        let ready = || {
            let (worker, pid) = (worker(), 7);
            Content::Event(Event::WorkerReady { worker, pid })
        };
        let mut headlines = Headlines::default();
        only(headlines.take(&entry(1, 0, wanted())));
        assert_eq!(headlines.take(&entry(2, 0, starting())), []);
        only(headlines.take(&entry(3, 5, wanted())));
        let done = headlines.take(&entry(4, 1_250, ready()));
        let lines: Vec<_> = done.iter().map(|it| (it.sequence, it.is_open)).collect();
        assert_eq!(lines, [(1, false), (3, false)]);
        only(headlines.take(&entry(5, 2_000, starting())));
        let started = only(headlines.take(&entry(6, 3_250, ready())));
        assert_eq!(
            (started.sequence, started.text.as_str()),
            (
                5,
                "starting worker `asr` with 54 MiB held for its peak; 30 MiB is free of 200 MiB; ready after 1.2 s"
            )
        );
        let taken_over = only(headlines.take(&entry(7, 4_000, ready())));
        assert_eq!(taken_over.text, "worker `asr` (pid 7) is ready");
        assert_eq!(taken_over.kind, HeadlineKind::State);
    }

    #[test]
    fn a_request_is_one_headline_that_its_answer_completes() {
        let mut headlines = Headlines::default();
        let asked = only(headlines.take(&entry(7, 10, request(1))));
        assert_eq!((asked.sequence, asked.kind), (7, HeadlineKind::Request));
        assert_eq!((asked.is_open, asked.outcome), (true, None));
        assert_eq!(headlines.take(&entry(8, 11, done(2))), []);
        let withdrawn = Content::Event(Event::LeaseRequestCancelled { ticket: Ticket(1) });
        let answered = only(headlines.take(&entry(9, 250, withdrawn)));
        assert_eq!(
            (answered.sequence, answered.outcome),
            (7, Some(Timestamp::from_millis(250)))
        );
        assert_eq!(
            answered.text,
            "`indexer` (batch) requests 100 MiB; withdrawn after 240 ms"
        );
        assert_eq!(headlines.take(&entry(10, 260, done(1))), []);
    }

    #[test]
    fn another_run_completes_no_headline_and_open_ones_are_bounded() {
        let mut headlines = Headlines::default();
        for ticket in 1..=100 {
            assert_eq!(headlines.take(&entry(ticket, 1, request(ticket))).len(), 1);
        }
        assert_eq!(headlines.open.len(), OPEN_MAX);
        assert_eq!(headlines.take(&entry(101, 1, done(1))), []);
        let mut later = entry(1, 2, done(100));
        later.boot_id = "b".into();
        assert_eq!(headlines.take(&later), []);
    }
}
