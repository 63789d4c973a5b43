//! Start of workers: order, restarts, operators' commands.

use super::{
    core::{Arbiter, Lease, Phase},
    queue::{Want, WantKind},
    reach::out_of_reach,
    request::invalid,
    worker::{StopCause, Worker},
};
use crate::{
    policy::{
        decision::WorkerDecision,
        event::{Action, WorkerCommand},
        lease::{Denial, LeaseId, LeaseKind, Ticket},
        restart::Verdict,
        snapshot::WorkerState,
    },
    units::{Bytes, Timestamp},
};

impl Arbiter {
    pub(super) fn take_operator_worker(&mut self, ticket: Ticket, name: &str, command: WorkerCommand) {
        self.noted += 1;
        let Some(worker) = self.workers.get_mut(name) else {
            let denial = invalid(name, "worker", &name, "is not configured".to_owned());
            self.deny(ticket, denial);
            return;
        };
        if self.draining && command != WorkerCommand::Stop {
            let asked = worker.params.peak_of(None);
            let tenant = name.to_owned();
            self.deny(ticket, Denial::Draining { tenant, asked });
            return;
        }
        let state = worker.state;
        let runs = matches!(state, WorkerState::Starting | WorkerState::Ready);
        match command {
            WorkerCommand::Start => {
                worker.restart.forget();
                worker.stopped_to_shed = false;
                worker.rest.by_operator = false;
                if worker.state == WorkerState::Stopping {
                    worker.wanted = true;
                    worker.stop = Some(StopCause::Recycle);
                } else if !runs && !worker.is_waiting() {
                    self.want_worker(name);
                }
                self.done(
                    ticket,
                    match state {
                        WorkerState::Ready => format!("worker `{name}` already runs"),
                        WorkerState::Starting => format!("worker `{name}` is already starting"),
                        _ => format!("worker `{name}` starts when there is memory"),
                    },
                );
            }
            WorkerCommand::Stop => {
                worker.wanted = false;
                worker.stopped_to_shed = false;
                worker.rest.by_operator = true;
                worker.rest.asleep = false;
                worker.retry_at = None;
                if runs {
                    self.stop_worker(name, StopCause::Operator, "an operator asked for it");
                } else if worker.state == WorkerState::Stopping {
                    worker.stop = Some(StopCause::Operator);
                } else {
                    worker.state = WorkerState::Stopped;
                    worker.begun_at.get_or_insert(self.now);
                    self.forget_start_of(name);
                }
                self.done(ticket, format!("worker `{name}` stops"));
            }
            WorkerCommand::Recycle => {
                worker.wanted = true;
                worker.restart.forget();
                worker.stopped_to_shed = false;
                worker.rest.by_operator = false;
                if runs {
                    self.stop_worker(name, StopCause::Recycle, "an operator asked to start it anew");
                } else if worker.state == WorkerState::Stopping {
                    worker.stop = Some(StopCause::Recycle);
                } else if !worker.is_waiting() {
                    self.want_worker(name);
                }
                self.done(ticket, format!("worker `{name}` is started anew"));
            }
        }
    }

    /// At the start of the supervisor the engine comes first, since it has the largest allocations, but for workers that
    /// are to come before it; then the workers, one after the other, each when the one before answers or has had its
    /// time, and when all are up that it comes after.
    pub(super) fn start_workers_in_order(&mut self) {
        if self.draining {
            return;
        }
        let engine_is_up = self.engine_has_come_up();
        let mut order: Vec<(bool, u32, String)> = self
            .workers
            .values()
            .filter(|worker| worker.params.autostart)
            .map(|worker| {
                let params = &worker.params;
                (!params.before_engine, params.start_order, params.name.clone())
            })
            .collect();
        order.sort();
        for (after_engine, _, name) in order {
            let Some(worker) = self.workers.get(&name) else {
                continue;
            };
            if after_engine && !engine_is_up {
                break;
            }
            if worker.begun_at.is_none() && worker.wanted && worker.state == WorkerState::Stopped {
                if !worker.params.after.iter().all(|other| self.is_up_or_given_up(other)) {
                    continue;
                }
                self.want_worker(&name);
                break;
            }
            if !worker.has_come_up(self.now) {
                break;
            }
        }
    }

    /// Whether all workers that come before the engine are up, or have had their time.
    pub(super) fn first_workers_are_up(&self) -> bool {
        self.draining
            || self
                .workers
                .values()
                .filter(|worker| worker.params.before_engine && worker.wanted)
                .all(|worker| worker.has_come_up(self.now))
    }

    fn is_up_or_given_up(&self, name: &str) -> bool {
        match self.workers.get(name) {
            // The engine, which the order has waited for already, or nobody.
            None => true,
            Some(worker) => !worker.wanted || worker.has_come_up(self.now),
        }
    }

    /// Starts a worker that has just ended in order to be started anew: its memory is its own before it is anybody's.
    pub(super) fn start_again_at_once(&mut self, name: &str) {
        let fits = self.worker_peak(name, None) <= self.ledger.free();
        if self.draining || !fits {
            self.want_worker(name);
            return;
        }
        let id = self.counters.lease();
        self.start_worker(name, id);
    }

    /// Queues the start of a worker.
    pub(super) fn want_worker(&mut self, name: &str) {
        let now = self.now;
        self.noted += 1;
        let Some(worker) = self.workers.get_mut(name) else {
            return;
        };
        worker.wanted = true;
        worker.begun_at.get_or_insert(now);
        worker.stopped_to_shed = false;
        worker.rest.asleep = false;
        worker.retry_at = None;
        worker.state = WorkerState::AwaitingMemory;
        let class = worker.params.class;
        let id = self.counters.lease();
        self.queue_own(name, class, id, WantKind::WorkerStart);
    }

    /// Starts a worker; the caller has made sure that its peak fits.
    pub(super) fn start_worker(&mut self, name: &str, id: LeaseId) {
        let now = self.now;
        self.noted += 1;
        let peak = self.worker_peak(name, None);
        let Some(worker) = self.workers.get(name) else { return };
        let variant = worker.params.variants.first().map(|variant| variant.name.clone());
        let generation = self.counters.generation();
        let lease = worker.new_lease(generation, now);
        if !self.grant(id, peak, lease) {
            self.want_worker(name);
            return;
        }
        self.ledger.set_moving(id, true);
        if let Some(worker) = self.workers.get_mut(name) {
            worker.lease = Some(id);
            worker.state = WorkerState::Starting;
            worker.state_since = now;
            worker.starts = worker.starts.saturating_add(1);
            worker.variant.clone_from(&variant);
            worker.variant_before_shed = None;
            (worker.peak_seen, worker.peak_counted) = (None, false);
            worker.answered = false;
            worker.needs_operator = false;
            worker.deaf = false;
        }
        self.said.remove(&out_of_reach(name));
        self.decide(WorkerDecision::Starting {
            worker: name.to_owned(),
            peak,
            free: self.ledger.free(),
            budget: self.ledger.budget(),
        });
        self.out.push(Action::StartWorker {
            worker: name.to_owned(),
            variant,
        });
    }

    pub(super) fn worker_failed(&mut self, name: &str) {
        let now = self.now;
        self.noted += 1;
        let Some(worker) = self.workers.get_mut(name) else {
            return;
        };
        worker.failures = worker.failures.saturating_add(1);
        if !worker.wanted {
            return;
        }
        if std::mem::take(&mut worker.needs_operator) {
            worker.state = WorkerState::Degraded;
            worker.retry_at = None;
            self.explain(format!(
                "worker `{name}` would end in the same way again and is left alone; start it by hand when its cause is cured"
            ));
            return;
        }
        let message = match worker.restart.failed(now) {
            Verdict::RetryAt(at) => {
                worker.state = WorkerState::BackingOff;
                worker.retry_at = Some(at);
                format!(
                    "worker `{name}` starts again in {:.1} s, failure {} of {} within {:.0} s",
                    at.saturating_since(now).as_secs_f64(),
                    worker.restart.recent_failures(),
                    worker.params.restart.intensity,
                    worker.params.restart.window.as_secs_f64()
                )
            }
            Verdict::GiveUp => {
                worker.state = WorkerState::Degraded;
                worker.retry_at = None;
                format!(
                    "worker `{name}` failed {} times within {:.0} s and is left alone; start it by hand",
                    worker.restart.recent_failures(),
                    worker.params.restart.window.as_secs_f64()
                )
            }
        };
        self.explain(message);
    }

    /// Whether a request by this name is that of a worker which holds a lease of its own, and runs.
    pub(super) fn asks_for_itself(&self, name: &str) -> bool {
        self.workers.get(name).is_some_and(|worker| {
            worker.params.own_lease && matches!(worker.state, WorkerState::Starting | WorkerState::Ready)
        })
    }

    /// What is booked for a worker that now asks for itself.
    pub(super) fn reserved_until_asked(&self, want: &Want) -> Option<(LeaseId, Bytes)> {
        let id = self
            .workers
            .get(&want.tenant)
            .filter(|worker| worker.params.own_lease)?
            .lease?;
        let asks = matches!(want.kind, WantKind::Lease(_));
        asks.then(|| (id, self.ledger.held_by(id)))
    }

    fn forget_start_of(&mut self, name: &str) {
        self.queue
            .retain(|_, want| !(want.tenant == name && matches!(want.kind, WantKind::WorkerStart)));
    }
}

impl Worker {
    /// The lease that we hold for it.
    pub(super) fn new_lease(&self, generation: u64, now: Timestamp) -> Lease {
        let variants = self.params.variants.iter();
        let peaks = variants.map(|variant| variant.peak);
        Lease {
            tenant: self.params.name.clone(),
            holder: String::new(),
            kind: LeaseKind::Worker,
            class: self.params.class,
            generation,
            min: self.params.steady_of(None),
            max: peaks.max().unwrap_or(self.params.peak_of(None)),
            granted_at: now,
            expires_at: None,
            owner_uid: 0,
            owner_pid: None,
            request: None,
            phase: Phase::Granted,
        }
    }
}
