//! Events of workers: ready, gone, changed, measured, due.
//!
//! The state of each worker is in [`worker_control`](crate::policy::worker_control). A worker's lease is ours: the peak
//! is booked before it is started, and comes down to the steady size when the worker is measured there. A larger
//! variant is booked before the worker is asked; a smaller one is credited when it is measured. What a worker is asked
//! for is in `worker_orders`.

use std::time::Duration;

use super::core::Arbiter;
use crate::{
    policy::{
        admission::{Want, WantKind},
        death::{DeathCertificate, DeathClass},
        decision::{ChangeCause, Decision, StrayReport, WorkerDecision},
        denial::{Denial, Problem},
        event::{Action, Done, WorkerCommand, WorkerDone},
        lease::Ticket,
        reason::StopReason,
        snapshot::WorkerState,
        worker::{AfterExit, Commanded, Due, Failure, Resizing, RestStep, StopCause, Worker},
    },
    units::{Bytes, Timestamp},
};

impl Arbiter {
    pub(super) fn take_worker_ready(&mut self, name: &str, pid: u32) {
        let now = self.state.now;
        self.noted += 1;
        let Some(worker) = self.state.workers.get_mut(name) else {
            return;
        };
        let Some(took) = worker.answered(pid, now) else {
            let report = StrayReport::Ready { pid, state: worker.state() };
            self.ignore_worker(name, report);
            return;
        };
        let change = worker.run().and_then(|run| run.resizing.as_ref()).map(|resizing| resizing.variant.clone());
        self.state.changed_at = now;
        self.decide(WorkerDecision::Ready { worker: name.to_owned(), pid, took });
        if let Some(variant) = change {
            self.out.push(Action::ResizeWorker { worker: name.to_owned(), variant });
        }
        self.set_worker_moving(name);
        self.measure_worker(name);
    }

    pub(super) fn take_worker_died(&mut self, certificate: &DeathCertificate) {
        let Some(worker) = self.state.workers.get_mut(&certificate.worker) else {
            return;
        };
        worker.died(certificate.summary());
        if let Some(remedy) = &certificate.verdict.remedy {
            self.decide(WorkerDecision::Died {
                sentence: certificate.verdict.sentence.clone(),
                remedy: remedy.clone(),
            });
        }
        if certificate.verdict.class == DeathClass::MemcgOom {
            self.learn_from_oom(certificate);
        }
    }

    /// Ends the process that did not answer, unless it is not the one that runs now or is about to end.
    pub(super) fn take_worker_unresponsive(&mut self, name: &str, pid: u32, evidence: String) {
        let Some(worker) = self.state.workers.get(name) else {
            return;
        };
        if !worker.is_ready() || worker.run().is_none_or(|run| run.pid != Some(pid)) {
            return;
        }
        self.decide(WorkerDecision::Unresponsive { worker: name.to_owned(), pid, evidence: evidence.clone() });
        self.out.push(Action::AbortWorker { worker: name.to_owned(), evidence });
    }

    pub(super) fn take_worker_exited(&mut self, name: &str, intended: bool, cause: &str) {
        self.noted += 1;
        let Some(worker) = self.state.workers.get_mut(name) else {
            return;
        };
        let Some(ended) = worker.exited(intended, cause, self.state.now) else {
            let cause = cause.to_owned();
            self.ignore_worker(name, StrayReport::Exited { cause });
            return;
        };
        let freed = self.drop_lease(ended.lease);
        self.state.renew_worker(name);
        self.state.ledger.forget(name);
        self.state.changed_at = self.state.now;
        for ticket in ended.tickets {
            let denial = Denial::invalid(name, "worker", &name, Problem::Exited { cause: cause.to_owned() });
            self.deny(ticket, denial);
        }
        self.decide(WorkerDecision::Exited {
            worker: name.to_owned(),
            cause: cause.to_owned(),
            expected: ended.stopping || intended,
            freed,
            free: self.state.ledger.free(),
        });
        match ended.next {
            AfterExit::Rests => {}
            AfterExit::Sleeps => self.note_reclaimed(freed, false),
            AfterExit::Restarts => self.start_again_at_once(name),
            AfterExit::Shed { restarts_if_fits } => {
                self.note_reclaimed(freed, true);
                if restarts_if_fits && self.state.worker_peak(name, None) <= self.state.ledger.free() {
                    self.start_again_at_once(name);
                }
            }
            AfterExit::Failed(failure) => self.decide_failure(name, failure),
        }
    }

    fn decide_failure(&mut self, name: &str, failure: Failure) {
        let Some(worker) = self.state.workers.get(name) else {
            return;
        };
        let (name, failures, limits) = (name.to_owned(), worker.recent_failures(), worker.params.start.restart);
        self.decide(match failure {
            Failure::RetriesAt(at) => WorkerDecision::Restarting {
                worker: name,
                wait: at.saturating_since(self.state.now),
                failures,
                intensity: limits.intensity,
                window: limits.window,
            },
            Failure::GivenUp => WorkerDecision::GivenUp { worker: name, failures, window: limits.window },
            Failure::NeedsOperator => WorkerDecision::NeedsOperator { worker: name },
        });
    }

    pub(super) fn take_worker_activity(&mut self, name: &str, requests: u32) {
        if let Some(worker) = self.state.workers.get_mut(name) {
            worker.works(requests, self.state.now);
        }
    }

    /// A request needs a worker: one that sleeps is started, one that was made small for being idle grows back.
    pub(super) fn take_worker_wanted(&mut self, name: &str) {
        if !self.state.draining && self.state.workers.get(name).is_some_and(Worker::can_be_woken) {
            self.decide(WorkerDecision::Woken { worker: name.to_owned() });
            self.want_worker(name);
        }
    }

    pub(super) fn take_operator_worker(&mut self, ticket: Ticket, name: &str, command: WorkerCommand) {
        self.noted += 1;
        let Some(worker) = self.state.workers.get_mut(name) else {
            let denial = Denial::invalid(name, "worker", &name, Problem::NotConfigured);
            self.deny(ticket, denial);
            return;
        };
        if self.state.draining && command != WorkerCommand::Stop {
            let asked = worker.params.peak_of(None);
            let tenant = name.to_owned();
            self.deny(ticket, Denial::Draining { tenant, asked });
            return;
        }
        let done = match (command, worker.state()) {
            (WorkerCommand::Start, WorkerState::Ready) => WorkerDone::Runs,
            (WorkerCommand::Start, WorkerState::Starting) => WorkerDone::IsStarting,
            (WorkerCommand::Start, _) => WorkerDone::Starts,
            (WorkerCommand::Stop, _) => WorkerDone::Stops,
            (WorkerCommand::Recycle, _) => WorkerDone::Restarts,
        };
        match worker.command(command, self.state.now) {
            Commanded::Start => self.want_worker(name),
            Commanded::Stop(StopCause::Recycle) => {
                self.stop_worker(name, StopCause::Recycle, StopReason::Recycle);
            }
            Commanded::Stop(cause) => self.stop_worker(name, cause, StopReason::Operator),
            Commanded::Withdraw => self.state.queue.take_start_of(name),
            Commanded::Nothing => {}
        }
        let worker = name.to_owned();
        self.done(ticket, Done::Worker { worker, done });
    }

    pub(super) fn take_worker_resize(&mut self, ticket: Ticket, name: String, variant: String, wait: Duration) {
        let refuse = |arbiter: &mut Self, field, value: &str, problem| {
            arbiter.deny(ticket, Denial::invalid(&name, field, &value, problem));
        };
        let Some(worker) = self.state.workers.get_mut(&name) else {
            refuse(self, "worker", &name, Problem::NotConfigured);
            return;
        };
        let known = &worker.params.variants;
        if !known.iter().any(|known| known.name == variant) {
            let known = known.iter().map(|known| known.name.clone()).collect();
            refuse(self, "variant", &variant, Problem::NotAVariant { known });
            return;
        }
        if !worker.is_ready() {
            let state = worker.state();
            refuse(self, "worker", &name, Problem::NotReady { state });
            return;
        }
        if self.state.draining {
            let asked = self.state.worker_peak(&name, Some(&variant));
            self.deny(ticket, Denial::Draining { tenant: name, asked });
            return;
        }
        let class = worker.params.class;
        let Some(run) = worker.run_mut() else { return };
        if let Some(resizing) = &mut run.resizing {
            if resizing.variant == variant {
                resizing.tickets.push(ticket);
            } else {
                let variant = resizing.variant.clone();
                refuse(self, "worker", &name, Problem::ChangingTo { variant });
            }
            return;
        }
        if run.variant.as_ref() == Some(&variant) {
            let done = WorkerDone::IsIn { variant };
            return self.done(ticket, Done::Worker { worker: name, done });
        }
        let wait = wait.min(self.state.params.lease.wait_max);
        let kind = WantKind::WorkerVariant { variant };
        let want = Want::ours(&name, class, run.lease, kind, self.state.now).asked(ticket, wait);
        self.ask_or_queue(want, wait);
    }

    pub(super) fn take_worker_resized(&mut self, name: &str, variant: &str, used: Option<Bytes>, error: Option<&str>) {
        let now = self.state.now;
        self.noted += 1;
        let Some(worker) = self.state.workers.get_mut(name) else {
            return;
        };
        let believed = self.state.params.shed.deadlines.of(worker.params.class).max(self.state.params.shed.settle);
        let Some(resizing) = worker.changed(variant, error.is_some(), believed, now) else {
            let variant = variant.to_owned();
            self.ignore_worker(name, StrayReport::Changed { variant });
            return;
        };
        let took = resizing.as_ref().map_or(Duration::ZERO, |resizing| now.saturating_since(resizing.asked_at));
        self.state.changed_at = now;
        if let Some(used) = used {
            self.state.ledger.measure(name, used, now);
        }
        self.settle_worker(name);
        let (worker, tickets) = (name.to_owned(), resizing.map(|resizing| resizing.tickets));
        let variant = variant.to_owned();
        let answer = if let Some(error) = error {
            let kept = Problem::Kept { error: error.to_owned() };
            let denial = Denial::invalid(name, "variant", &variant, kept);
            self.decide(WorkerDecision::VariantKept { worker, variant, error: error.to_owned(), used });
            Err(denial)
        } else {
            let held = self.state.worker_held(name);
            let decision = Decision::from(WorkerDecision::Resized { worker, variant, took, used, held });
            self.decide(decision.clone());
            Ok(Done::Decided(decision))
        };
        for ticket in tickets.unwrap_or_default() {
            match &answer {
                Ok(done) => self.done(ticket, done.clone()),
                Err(denial) => self.deny(ticket, denial.clone()),
            }
        }
        self.measure_worker(name);
    }

    pub(super) fn serve_worker_deadlines(&mut self) {
        while let Some((name, due)) = self.state.workers.take_due(self.state.now) {
            let within =
                self.state.workers.get(&name).map_or(Duration::ZERO, |worker| worker.params.start.ready_timeout);
            match due {
                Due::Retry => self.want_worker(&name),
                Due::NotReady => self.stop_worker(&name, StopCause::NotReady, StopReason::NotReady { within }),
                Due::NotStopped => self.out.push(Action::StopWorker { worker: name, reason: StopReason::NotStopped }),
                Due::NotChanged(Resizing { variant, tickets, .. }) => {
                    let denial = Denial::invalid(&name, "variant", &variant, Problem::NotAnswered { within });
                    self.deny_all(tickets, &denial);
                    // It may still change at any time, to a size that could not be booked by then.
                    let reason = StopReason::NotChanged { variant, within };
                    self.stop_worker(&name, StopCause::NotReady, reason);
                }
                Due::NotSmaller => {
                    let used = self.state.ledger.used_by(&name);
                    let held = self.state.worker_held(&name);
                    if self.state.workers.get(&name).is_some_and(|worker| worker.requests == 0) {
                        self.stop_worker(&name, StopCause::Shed, StopReason::NotSmaller { used, held });
                    } else {
                        self.decide(WorkerDecision::NotSmaller { worker: name, used, held });
                    }
                }
            }
        }
    }

    /// Serves what time and work have brought to workers that are ready. To be called last, when all else is decided.
    pub(super) fn serve_rests(&mut self) {
        let mut last: Option<String> = None;
        loop {
            let may_rest = |id| !self.state.draining && !self.state.queue.waits_for(id);
            let Some((name, step)) = self.state.workers.take_rest(last.as_deref(), may_rest, self.state.now) else {
                return;
            };
            match step {
                RestStep::Stop(cause) => {
                    let reason = match cause {
                        StopCause::Idle => StopReason::Idle,
                        _ => StopReason::Outgrown,
                    };
                    self.stop_worker(&name, cause, reason);
                }
                RestStep::Shrink { variant, idle } => {
                    self.change_worker(&name, variant, Vec::new(), ChangeCause::Idle { idle });
                }
                RestStep::Work { before_rest } => {
                    if let Some(variant) = before_rest {
                        self.queue_variant(&name, variant);
                    }
                    self.serve_queue();
                }
            }
            last = Some(name);
        }
    }

    pub(super) fn next_worker_deadline(&self) -> Option<Timestamp> {
        let state = &self.state;
        let may_rest = |id| !state.draining && !state.queue.waits_for(id);
        let workers = state.workers.next_deadline(may_rest, state.now);
        [workers, state.engine.holds_workers_until(state.now)].into_iter().flatten().min()
    }

    /// Starts the next one whose turn has come.
    pub(super) fn start_workers_in_order(&mut self) {
        if self.state.draining {
            return;
        }
        let next = self
            .state
            .workers
            .next_to_start(self.state.engine.holds_workers_until(self.state.now).is_none(), self.state.now);
        if let Some(name) = next.map(str::to_owned) {
            self.want_worker(&name);
        }
    }

    /// Credits what a measurement of a worker shows, once it is where it wants to be.
    pub(super) fn settle_worker(&mut self, name: &str) {
        let Some(measured) = self.state.ledger.measurement(name) else {
            return;
        };
        self.watch_growth(name, measured.used);
        let Some(worker) = self.state.workers.get_mut(name).filter(|worker| worker.is_settled()) else {
            return;
        };
        let Some(id) = worker.run().filter(|run| measured.at >= run.since).map(|run| run.lease) else {
            return;
        };
        let held = self.state.ledger.held_by(id);
        let steady = worker.steady();
        let tolerance =
            held.saturating_sub(steady).per_mille(1000u32.saturating_sub(self.state.params.shed.verify_per_mille));
        let is_steady = measured.used <= steady.saturating_add(tolerance);
        let stays = if is_steady { steady } else { measured.used.max(steady) };
        let to_shed = stays == steady && worker.take_verified();
        let freed = self.state.ledger.lower(id, stays);
        self.set_worker_moving(name);
        if freed > Bytes::ZERO {
            self.state.changed_at = self.state.now;
            self.decide(WorkerDecision::Settled {
                worker: name.to_owned(),
                used: measured.used,
                stays,
                freed,
                free: self.state.ledger.free(),
            });
        }
        if to_shed {
            self.note_reclaimed(freed, true);
        }
    }

    /// Has a worker wind down that holds more than it may, by its last measurement.
    fn watch_growth(&mut self, name: &str, used: Bytes) {
        let settle = self.state.params.shed.settle;
        let Some(worker) = self.state.workers.get_mut(name) else {
            return;
        };
        if let Some(above) = worker.outgrows(used, settle, self.state.now) {
            let requests = worker.requests;
            self.decide(WorkerDecision::Outgrown {
                worker: name.to_owned(),
                used,
                above,
                held: self.state.worker_held(name),
                requests,
            });
        }
    }

    fn ignore_worker(&mut self, name: &str, report: StrayReport) {
        self.decide(WorkerDecision::Ignored { worker: name.to_owned(), report });
    }

    fn measure_worker(&mut self, name: &str) {
        self.out.push(Action::Measure { tenant: name.to_owned() });
    }
}
