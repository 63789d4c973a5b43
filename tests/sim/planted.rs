//! Faults injected around the arbiter, each of which a checker must find.
//!
//! The loop and the arbiter contain none: their inputs, outputs and observed state are altered in transit.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use cotenant::{
    policy::{
        Arbiter,
        arbiter::Checkpoint,
        denial::Denial,
        event::{Action, Answer, EngineApplied, Event, LeaseCall, TargetAnswered, WorkerCommand},
        lease::{LeaseId, LeaseState, LeaseView, Peer, TargetAnswer, Ticket},
        params::{ENGINE_TENANT, Params},
        residency::EnginePlan,
        snapshot::{Rest, Snapshot},
    },
    units::{Bytes, Timestamp},
};
use serde::Serialize;

use crate::driven::Driven;

/// An injected fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) enum Planted {
    /// Reclaimed memory counts as released at once: it is reported as answered, applied and measured.
    FreedOnPaper,
    /// The arbiter hands out more than there is.
    DoubleGrant,
    /// No deadline is reported.
    LostDeadline,
    /// A renewal brings an expired lease back.
    ExpiredRenewed,
    /// A reply is taken for a measurement.
    LiarCredited,
    /// The lowest reading from before a reply is taken for one after it.
    StaleCredited,
    /// Silence counts as a reply, and as an acknowledgement of the end of a lease.
    SilenceCredited,
    /// The engine grows into the space of stopped workers.
    GrownIntoReserved,
    /// Nothing grows while a worker waits for memory that it can never get.
    HeldSmall,
    /// Unused memory of the engine counts as free.
    UnusedFree,
    /// The peak use of each life is read a tenth too high.
    HighWaterRaised,
}

/// The control loop, and the fault around it.
#[derive(Clone, Serialize)]
pub(crate) struct Subject {
    control: Driven,
    params: Params,
    planted: Option<Planted>,
    notes: Notes,
}

/// State of a fault.
#[derive(Clone, Debug, Default, Serialize)]
struct Notes {
    /// The lowest reading of each holder.
    lowest: BTreeMap<String, Bytes>,
    /// Targets and ends answered on behalf of holders.
    answered: BTreeSet<(u64, u64)>,
    /// Revived leases, and their expiry.
    revived: BTreeMap<u64, Timestamp>,
    /// Restart needs of stopped workers.
    reserved: BTreeMap<String, Bytes>,
}

impl Subject {
    pub(crate) fn new(params: &Params, planted: Option<Planted>) -> Self {
        let mut given = params.clone();
        if planted == Some(Planted::DoubleGrant) {
            let more = given.budget.total.per_mille(300);
            given.budget.total = given.budget.total.saturating_add(more);
        }
        let control = Driven::new(Arbiter::new(given).unwrap());
        Self {
            control,
            params: params.clone(),
            planted,
            notes: Notes::default(),
        }
    }

    /// Whether it may be restarted from its checkpoint, which does not contain the notes of a fault.
    pub(crate) fn restarts(&self) -> bool {
        self.planted.is_none()
    }

    pub(crate) fn restart(&mut self) {
        let text = serde_json::to_string(&self.checkpoint()).unwrap();
        self.control = Driven::new(
            serde_json::from_str::<Checkpoint>(&text)
                .unwrap()
                .resume()
                .unwrap(),
        );
    }

    pub(crate) fn checkpoint(&self) -> Checkpoint {
        Checkpoint::of(self.control.arbiter())
    }

    pub(crate) fn next_deadline(&self) -> Option<Timestamp> {
        let lost = self.planted == Some(Planted::LostDeadline);
        self.control.arbiter().next_deadline().filter(|_| !lost)
    }

    pub(crate) fn handle(&mut self, now: Timestamp, mut event: Event) -> Vec<Action> {
        let Some(planted) = self.planted else {
            return self.control.handle(now, event);
        };
        let before = self.control.state();
        if planted == Planted::SilenceCredited {
            self.answer_for_the_silent(now, &before);
        }
        if let Event::Measured {
            tenant,
            used: Some(used),
            ..
        } = &event
        {
            let lowest = self.notes.lowest.entry(tenant.clone()).or_insert(*used);
            *lowest = (*lowest).min(*used);
        }
        if planted == Planted::UnusedFree
            && let Event::Measured {
                tenant,
                used: Some(used),
                ..
            } = &mut event
            && tenant == ENGINE_TENANT
        {
            *used = engine_bytes(&before).max(*used);
        }
        if planted == Planted::HighWaterRaised
            && let Event::PeakMeasured { peak, .. } = &mut event
        {
            *peak = peak.saturating_add(peak.per_mille(100));
        }
        let mut actions = self.control.handle(now, event.clone());
        match planted {
            Planted::FreedOnPaper => self.free_on_paper(now, &mut actions),
            Planted::ExpiredRenewed => self.revive(&event, &mut actions),
            Planted::LiarCredited | Planted::StaleCredited => {
                if let Event::TargetAnswered(TargetAnswered { lease, nonce, .. }) = event
                    && let Some((view, target)) = target_of(&before, lease, nonce)
                {
                    let used = match planted {
                        Planted::LiarCredited => {
                            Some(target.saturating_add(held_beside(&before, view)))
                        }
                        _ => self.notes.lowest.get(view.holder()).copied(),
                    };
                    if let Some(used) = used {
                        actions.extend(self.measured(now, view.holder(), used));
                    }
                }
            }
            Planted::GrownIntoReserved => self.forget_stopped_workers(now),
            Planted::HeldSmall => self.hold_small(&before, &mut actions),
            Planted::DoubleGrant
            | Planted::LostDeadline
            | Planted::SilenceCredited
            | Planted::UnusedFree
            | Planted::HighWaterRaised => {}
        }
        actions
    }

    /// The observed state of the arbiter.
    pub(crate) fn snapshot(&self) -> Arc<Snapshot> {
        let mut state = self.control.state();
        if self.planted.is_none() {
            return state;
        }
        let seen = Arc::make_mut(&mut state);
        match self.planted {
            Some(Planted::DoubleGrant) => {
                seen.memory.budget = self.params.budget.bytes();
                seen.memory.free = seen
                    .memory
                    .budget
                    .saturating_sub(seen.memory.held)
                    .saturating_sub(seen.memory.unaccounted);
            }
            Some(Planted::ExpiredRenewed) => {
                for lease in &mut seen.leases {
                    if let Some(until) = self
                        .notes
                        .revived
                        .get(&lease.id.0)
                        .filter(|until| **until > seen.at)
                    {
                        (lease.state, lease.expires_at, lease.target) =
                            (LeaseState::Granted, Some(*until), None);
                    }
                }
            }
            Some(Planted::GrownIntoReserved) => {
                let reserved = self.notes.reserved.values().copied().sum();
                seen.memory.returning = seen.memory.returning.saturating_add(reserved);
            }
            _ => {}
        }
        state
    }

    /// A fabricated reading, slightly after now.
    fn measured(&mut self, now: Timestamp, holder: &str, used: Bytes) -> Vec<Action> {
        let taken_at = now + MOMENT;
        let event = Event::Measured {
            tenant: holder.to_owned(),
            used: Some(used),
            taken_at,
        };
        self.control.handle(taken_at, event)
    }

    fn free_on_paper(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        let mut index = 0;
        while let Some(action) = actions.get(index).cloned() {
            index += 1;
            let seen = self.control.state();
            let more = match action {
                Action::SetTarget { lease, nonce, .. } => {
                    let Some((view, target)) = target_of(&seen, lease, nonce) else {
                        continue;
                    };
                    let used = target.saturating_add(held_beside(&seen, view));
                    let answer = Event::TargetAnswered(TargetAnswered {
                        lease,
                        nonce,
                        answer: TargetAnswer::Applied,
                        claimed: None,
                    });
                    let mut more = self.control.handle(now, answer);
                    more.extend(self.measured(now, view.holder(), used));
                    more
                }
                Action::ApplyPlan { revision, plan, .. }
                    if bytes_of(&seen, &plan) < engine_bytes(&seen) =>
                {
                    let used = bytes_of(&seen, &plan);
                    let applied = Event::EngineApplied(EngineApplied {
                        revision,
                        in_force: plan,
                        freed: engine_bytes(&seen).saturating_sub(used),
                        used,
                        untouched: Bytes::ZERO,
                        untouched_given: Bytes::ZERO,
                        took: MOMENT,
                    });
                    self.control.handle(now, applied)
                }
                _ => continue,
            };
            actions.extend(more);
        }
    }

    fn revive(&mut self, event: &Event, actions: &mut [Action]) {
        let Event::LeaseRenewed(LeaseCall { ticket, lease, .. }) = event else {
            return;
        };
        let seen = self.control.state();
        let Some(view) = seen.leases.iter().find(|view| view.id == *lease) else {
            return;
        };
        for action in actions {
            if let Action::Answer { ticket: of, answer } = action
                && of == ticket
                && matches!(
                    answer,
                    Answer::Denied {
                        denial: Denial::UnknownLease { .. },
                        ..
                    }
                )
            {
                let until = seen.at + Duration::from_secs(1);
                self.notes.revived.insert(lease.0, until);
                let lease = LeaseView {
                    state: LeaseState::Granted,
                    expires_at: Some(until),
                    target: None,
                    ..view.clone()
                };
                *answer = Answer::Lease { lease };
            }
        }
    }

    /// Answers each expired target, and acknowledges each end of a lease.
    fn answer_for_the_silent(&mut self, now: Timestamp, seen: &Snapshot) {
        for view in &seen.leases {
            let Some(target) = &view.target else { continue };
            let silent = match view.state {
                LeaseState::Revoking => target.deadline < now,
                state => state == LeaseState::Gone,
            };
            if !silent || !self.notes.answered.insert((view.id.0, target.nonce)) {
                continue;
            }
            // Its reply to an end would be answered itself: nothing waits for that.
            let _ = match view.state {
                LeaseState::Revoking => self.control.handle(
                    target.deadline,
                    Event::TargetAnswered(TargetAnswered {
                        lease: view.id,
                        nonce: target.nonce,
                        answer: TargetAnswer::Applied,
                        claimed: None,
                    }),
                ),
                _ => self.control.handle(
                    seen.at,
                    Event::LeaseReleased(LeaseCall {
                        ticket: Ticket(u64::MAX),
                        lease: view.id,
                        generation: view.generation,
                        peer: Peer {
                            uid: view.owner.owner_uid,
                            pid: view.owner.owner_pid,
                            operator: true,
                        },
                    }),
                ),
            };
        }
    }

    /// Workers stopped to make room are treated as stopped by an operator, so that nothing is reserved for them.
    fn forget_stopped_workers(&mut self, now: Timestamp) {
        for worker in self.control.state().workers.clone() {
            if worker.rest != Some(Rest::Shed) {
                continue;
            }
            let peak = self
                .params
                .worker(&worker.name)
                .map_or(Bytes::ZERO, |params| params.peak_of(None));
            self.notes.reserved.insert(worker.name.clone(), peak);
            let _ = self.control.handle(
                now,
                Event::OperatorWorker {
                    ticket: Ticket(u64::MAX),
                    worker: worker.name,
                    command: WorkerCommand::Stop,
                    by: None,
                },
            );
        }
    }

    fn hold_small(&self, before: &Snapshot, actions: &mut Vec<Action>) {
        let seen = self.control.state();
        let hopeless = |wait: &cotenant::policy::snapshot::WorkerWait| wait.is_out_of_reach();
        if seen
            .workers
            .iter()
            .any(|worker| worker.waits.as_ref().is_some_and(hopeless))
        {
            actions.retain(|action| {
                !matches!(action, Action::ApplyPlan { plan, .. } if bytes_of(before, plan) > engine_bytes(before))
            });
        }
    }
}

/// A lease with this target in force, and the target.
fn target_of(seen: &Snapshot, lease: LeaseId, nonce: u64) -> Option<(&LeaseView, Bytes)> {
    let view = seen.leases.iter().find(|view| view.id == lease)?;
    let target = view
        .target
        .as_ref()
        .filter(|target| target.nonce == nonce)?;
    Some((view, target.bytes))
}

/// Memory of a lease's holder outside that lease.
fn held_beside(seen: &Snapshot, view: &LeaseView) -> Bytes {
    let others = seen
        .leases
        .iter()
        .filter(|other| other.holder() == view.holder() && other.id != view.id);
    others.map(|other| other.memory.held).sum()
}

fn bytes_of(seen: &Snapshot, plan: &EnginePlan) -> Bytes {
    seen.engine
        .shape
        .as_ref()
        .map_or(Bytes::ZERO, |shape| shape.plan_bytes(plan))
}

fn engine_bytes(seen: &Snapshot) -> Bytes {
    seen.engine
        .in_force
        .as_ref()
        .map_or(Bytes::ZERO, |plan| bytes_of(seen, plan))
}

const MOMENT: Duration = Duration::from_micros(1);
