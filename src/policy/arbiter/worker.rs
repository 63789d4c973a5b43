//! Life of workers: started when memory is free, resized, stopped, restarted.
//!
//! ```text
//!   stopped ── wanted ──► awaiting memory ── booked ──► starting ──► ready ◄──► (variants)
//!      ▲                        ▲                          │           │
//!      │ asked to               │ backoff over             ▼           ▼
//!      └──────── stopping ◄─────┴─── backing off ◄────── exited, not ready in time
//!                                        └── too often ──► degraded
//! ```
//!
//! A worker's lease is ours: the peak is booked before it is started, and comes down to the steady size when the worker
//! is measured there. A variant that is larger is booked before the worker is asked; one that is smaller is credited
//! when it is measured.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{
    core::Arbiter,
    queue::{Want, WantKind},
    request::invalid,
    worker_rest::{AtRest, Winding},
};
use crate::{
    policy::{
        death::{DeathCertificate, DeathClass, DeathSummary},
        decision::WorkerDecision,
        event::Action,
        lease::{Class, Denial, LeaseId, Ticket},
        params::WorkerParams,
        restart::Restart,
        snapshot::WorkerState,
    },
    units::{Bytes, Timestamp},
};

/// What is known of a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Worker {
    pub(super) params: WorkerParams,
    pub(super) state: WorkerState,
    /// Whether it is to run.
    pub(super) wanted: bool,
    /// Whether its turn at the start of the supervisor has come, and when.
    pub(super) begun_at: Option<Timestamp>,
    pub(super) pid: Option<u32>,
    pub(super) variant: Option<String>,
    /// High water that another variant of this life may have left; what does not exceed it says nothing of this one.
    pub(super) peak_of_others: Option<Bytes>,
    /// Whether the next reading of the high water is one of another variant.
    pub(super) peak_is_of_others: bool,
    pub(super) lease: Option<LeaseId>,
    pub(super) requests: u32,
    pub(super) idle_since: Timestamp,
    pub(super) restart: Restart,
    pub(super) retry_at: Option<Timestamp>,
    /// When it was started, became ready, changed or was asked to stop.
    pub(super) state_since: Timestamp,
    pub(super) resizing: Option<Resizing>,
    pub(super) stop: Option<StopCause>,
    /// It was stopped to make room, and comes back when there is room.
    pub(super) stopped_to_shed: bool,
    /// The variant that it had before it was made smaller to make room.
    pub(super) variant_before_shed: Option<String>,
    /// The variant that it had before it was made smaller for having nothing to do.
    pub(super) variant_before_rest: Option<String>,
    pub(super) rest: AtRest,
    /// A smaller variant has to be measured by then.
    verify_by: Option<Timestamp>,
    pub(super) starts: u32,
    pub(super) failures: u32,
    pub(super) last_exit: Option<String>,
    /// The most that it has used in this life.
    #[serde(default)]
    pub(super) peak_seen: Option<Bytes>,
    /// Whether that has been learned from.
    #[serde(default)]
    pub(super) peak_counted: bool,
    #[serde(default)]
    pub(super) last_death: Option<DeathSummary>,
    /// Its present start, or the last one, ended in a way that another start would repeat.
    #[serde(default)]
    pub(super) needs_operator: bool,
    /// Whether it has shown in this life of its process that it can serve, to us or to the run before.
    #[serde(default)]
    pub(super) answered: bool,
    /// It was told that memory is short, and did not come down; holds until it is started again.
    #[serde(default)]
    pub(super) deaf: bool,
}

/// A change of variant under way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Resizing {
    pub(super) variant: String,
    pub(super) tickets: Vec<Ticket>,
    pub(super) asked_at: Timestamp,
    pub(super) to_shed: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum StopCause {
    Idle,
    Operator,
    Recycle,
    Shed,
    NotReady,
}

impl Worker {
    pub(super) fn new(params: &WorkerParams) -> Self {
        Self {
            state: WorkerState::Stopped,
            wanted: params.autostart,
            begun_at: None,
            pid: None,
            variant: None,
            peak_of_others: None,
            peak_is_of_others: false,
            lease: None,
            requests: 0,
            idle_since: Timestamp::START,
            restart: Restart::new(params.restart),
            retry_at: None,
            state_since: Timestamp::START,
            resizing: None,
            stop: None,
            stopped_to_shed: false,
            variant_before_shed: None,
            variant_before_rest: None,
            rest: AtRest::default(),
            verify_by: None,
            starts: 0,
            failures: 0,
            last_exit: None,
            peak_seen: None,
            peak_counted: false,
            answered: false,
            last_death: None,
            needs_operator: false,
            deaf: false,
            params: params.clone(),
        }
    }

    pub(super) fn steady(&self) -> Bytes {
        self.params.steady_of(self.variant.as_deref())
    }

    /// What the worker will hold when what is under way is over.
    fn stays(&self, held: Bytes) -> Bytes {
        match (self.state, &self.resizing) {
            (WorkerState::Stopping, _) => Bytes::ZERO,
            (WorkerState::Ready, Some(resizing)) => self.params.steady_of(Some(&resizing.variant)),
            (WorkerState::Ready, None) if self.verify_by.is_some() => self.steady(),
            _ => held,
        }
    }

    /// Whether a change of its variant is under way or not yet verified.
    pub(super) const fn is_changing(&self) -> bool {
        self.resizing.is_some() || self.verify_by.is_some()
    }

    pub(super) fn is_waiting(&self) -> bool {
        matches!(self.state, WorkerState::AwaitingMemory)
    }

    /// Its turn at the start is over, for good or ill.
    pub(super) fn has_come_up(&self, now: Timestamp) -> bool {
        match self.state {
            WorkerState::Ready | WorkerState::Degraded | WorkerState::BackingOff => true,
            WorkerState::Stopped | WorkerState::Stopping => self.begun_at.is_some(),
            WorkerState::AwaitingMemory | WorkerState::Starting => {
                self.begun_at.is_some_and(|at| now >= at + self.params.ready_timeout)
            }
        }
    }
}

impl Arbiter {
    pub(super) fn take_worker_ready(&mut self, name: &str, pid: u32) {
        let now = self.now;
        self.noted += 1;
        let Some(worker) = self.workers.get_mut(name) else {
            return;
        };
        if worker.state != WorkerState::Starting {
            let state = worker.state;
            self.explain(format!(
                "worker `{name}` (pid {pid}) answers while it is {state:?}: ignored"
            ));
            return;
        }
        worker.state = WorkerState::Ready;
        worker.answered = true;
        worker.pid = Some(pid);
        worker.idle_since = now;
        worker.rest.ready_at = Some(now);
        worker.restart.ready(now);
        let took = now.saturating_since(worker.state_since).as_millis();
        worker.state_since = now;
        self.changed_at = now;
        // A change that an earlier run had asked for and not seen confirmed: asked again it does no harm.
        let change = worker.resizing.as_mut().map(|resizing| {
            resizing.asked_at = now;
            resizing.variant.clone()
        });
        self.explain(format!("worker `{name}` (pid {pid}) is ready after {took} ms"));
        if let Some(variant) = change {
            self.out.push(Action::ResizeWorker {
                worker: name.to_owned(),
                variant,
            });
        }
        self.set_worker_moving(name);
        self.out.push(Action::Measure {
            tenant: name.to_owned(),
        });
    }

    pub(super) fn take_worker_died(&mut self, certificate: &DeathCertificate) {
        let Some(worker) = self.workers.get_mut(&certificate.worker) else {
            return;
        };
        worker.needs_operator = certificate.needs_operator;
        worker.last_death = Some(certificate.summary());
        if let Some(remedy) = &certificate.remedy {
            self.explain(format!("{certificate}; {remedy}"));
        }
        if certificate.class == DeathClass::MemcgOom {
            self.learn_from_oom(certificate);
        }
    }

    /// Ends the process that did not answer, unless it is not the one that runs now or is about to end.
    pub(super) fn take_worker_unresponsive(&mut self, name: &str, pid: u32, evidence: String) {
        let Some(worker) = self.workers.get(name) else { return };
        if worker.state != WorkerState::Ready || worker.pid != Some(pid) {
            return;
        }
        self.decide(WorkerDecision::Unresponsive {
            worker: name.to_owned(),
            pid,
            evidence: evidence.clone(),
        });
        self.out.push(Action::AbortWorker {
            worker: name.to_owned(),
            evidence,
        });
    }

    pub(super) fn take_worker_exited(&mut self, name: &str, intended: bool, cause: &str) {
        let now = self.now;
        self.noted += 1;
        let Some(worker) = self.workers.get_mut(name) else {
            return;
        };
        if !matches!(
            worker.state,
            WorkerState::Starting | WorkerState::Ready | WorkerState::Stopping
        ) {
            self.explain(format!("worker `{name}` exited ({cause}) and was not running: ignored"));
            return;
        }
        worker.pid = None;
        worker.requests = 0;
        worker.last_exit = Some(cause.to_owned());
        worker.verify_by = None;
        let outgrown = worker.rest.outgrown;
        worker.rest = worker.rest.ended();
        worker.variant_before_rest = None;
        let stop = worker.stop.take();
        let resizing = worker.resizing.take();
        worker.variant = None;
        worker.peak_of_others = None;
        worker.peak_is_of_others = false;
        worker.state_since = now;
        let was_stopping = worker.state == WorkerState::Stopping;
        worker.state = WorkerState::Stopped;
        let lease = worker.lease.take();
        let freed = lease.map_or(Bytes::ZERO, |id| self.drop_lease(id));
        self.ledger.forget(name);
        self.changed_at = now;
        for ticket in resizing.map(|resizing| resizing.tickets).unwrap_or_default() {
            let denial = invalid(name, "worker", &name, format!("exited while it changed: {cause}"));
            self.deny(ticket, denial);
        }
        self.explain(format!(
            "worker `{name}` exited ({cause}), {}; {freed} are off the book, {} is free",
            if was_stopping || intended {
                "as asked"
            } else {
                "nobody had asked for it"
            },
            self.ledger.free()
        ));
        match stop {
            Some(StopCause::Operator) => {}
            Some(StopCause::Idle) => {
                if let Some(worker) = self.workers.get_mut(name) {
                    worker.rest.asleep = true;
                }
                self.note_reclaimed(freed, false);
            }
            Some(StopCause::Recycle) => self.start_again_at_once(name),
            Some(StopCause::Shed) => {
                self.note_reclaimed(freed, true);
                let fits = self.worker_peak(name, None) <= self.ledger.free();
                let wanted = self.workers.get(name).is_some_and(|worker| worker.wanted);
                if outgrown && wanted && fits {
                    // It was about to be started anew as small as it was: by what it had grown to, it might never come back.
                    self.start_again_at_once(name);
                } else if let Some(worker) = self.workers.get_mut(name) {
                    worker.stopped_to_shed = wanted;
                }
            }
            Some(StopCause::NotReady) => self.worker_failed(name),
            None if intended => {
                if let Some(worker) = self.workers.get_mut(name) {
                    worker.wanted = false;
                }
            }
            None => self.worker_failed(name),
        }
    }

    pub(super) fn take_worker_activity(&mut self, name: &str, requests: u32) {
        let now = self.now;
        if let Some(worker) = self.workers.get_mut(name) {
            if worker.requests > 0 && requests == 0 {
                worker.idle_since = now;
            }
            worker.requests = requests;
        }
    }

    pub(super) fn take_worker_resize(&mut self, ticket: Ticket, name: String, variant: String, wait: Duration) {
        let fault = match self.workers.get(&name) {
            None => Err(invalid(&name, "worker", &name, "is not configured".to_owned())),
            Some(worker) if !worker.params.variants.iter().any(|known| known.name == variant) => {
                let known: Vec<&str> = worker.params.variants.iter().map(|known| known.name.as_str()).collect();
                let problem = format!("is not one of its variants: {}", known.join(", "));
                Err(invalid(&name, "variant", &variant, problem))
            }
            Some(worker) if worker.state != WorkerState::Ready => {
                let problem = format!("is {:?} and cannot change", worker.state);
                Err(invalid(&name, "worker", &name, problem))
            }
            Some(_) if self.draining => Err(Denial::Draining {
                tenant: name.clone(),
                asked: self.worker_peak(&name, Some(&variant)),
            }),
            Some(worker) => Ok(worker),
        };
        let worker = match fault {
            Ok(worker) => worker,
            Err(denial) => {
                self.deny(ticket, denial);
                return;
            }
        };
        if let Some(resizing) = &worker.resizing {
            if resizing.variant == variant {
                if let Some(resizing) = self.workers.get_mut(&name).and_then(|worker| worker.resizing.as_mut()) {
                    resizing.tickets.push(ticket);
                }
            } else {
                let problem = format!("is changing to `{}`; ask again when it has", resizing.variant);
                self.deny(ticket, invalid(&name, "worker", &name, problem));
            }
            return;
        }
        if worker.variant.as_ref() == Some(&variant) {
            self.done(ticket, format!("worker `{name}` is in variant `{variant}`"));
            return;
        }
        let wait = wait.min(self.params.lease.wait_max);
        let Some(lease) = worker.lease else { return };
        let want = Want {
            class: worker.params.class,
            lease,
            tickets: vec![ticket],
            since: self.now,
            ages_from: self.now,
            deadline: Some(self.now + wait),
            kind: WantKind::WorkerVariant { variant },
            tenant: name,
        };
        self.ask_or_queue(want, wait);
    }

    pub(super) fn take_worker_resized(&mut self, name: &str, variant: &str, used: Option<Bytes>, error: Option<&str>) {
        let now = self.now;
        self.noted += 1;
        let Some(worker) = self.workers.get_mut(name) else {
            return;
        };
        if worker.state != WorkerState::Ready {
            self.explain(format!(
                "worker `{name}` changed to `{variant}` while it does not run: ignored"
            ));
            return;
        }
        let resizing = worker.resizing.take();
        let before = worker.params.steady_of(worker.variant.as_deref());
        let smaller = worker.params.steady_of(Some(variant)) < before;
        // The kernel remembers one high water for the whole life.
        worker.peak_of_others = worker.peak_of_others.max(worker.peak_seen);
        worker.peak_is_of_others |= smaller;
        worker.variant = Some(variant.to_owned());
        worker.state_since = now;
        let to_shed = resizing.as_ref().is_some_and(|resizing| resizing.to_shed);
        if error.is_none() && to_shed {
            // Others wait for it, so a worker that only says so is not believed for long.
            let class = worker.params.class;
            let believed = self.params.shed.deadlines.of(class).max(self.params.shed.settle);
            worker.verify_by = Some(now + believed);
        }
        if !to_shed && error.is_none() {
            worker.variant_before_shed = None;
        }
        if error.is_some() {
            // It has kept its size, so that there is none to go back to.
            worker.variant_before_rest = None;
        }
        let took = resizing
            .as_ref()
            .map_or(0, |resizing| now.saturating_since(resizing.asked_at).as_millis());
        self.changed_at = now;
        if let Some(used) = used {
            self.ledger.measure(name, used, now);
        }
        self.settle_worker(name);
        let held = self.worker_held(name);
        let shown = used.map_or_else(String::new, |used| format!(", uses {used}"));
        let message = match error {
            None => format!("worker `{name}` is in variant `{variant}` after {took} ms{shown}, holds {held}"),
            Some(error) => format!("worker `{name}` stays in variant `{variant}`: {error}{shown}"),
        };
        self.explain(message.clone());
        for ticket in resizing.map(|resizing| resizing.tickets).unwrap_or_default() {
            match error {
                None => self.done(ticket, message.clone()),
                Some(error) => self.deny(ticket, invalid(name, "variant", &variant, format!("was kept: {error}"))),
            }
        }
        self.out.push(Action::Measure {
            tenant: name.to_owned(),
        });
    }

    /// Lets a worker change; the caller has made sure that the larger size fits.
    pub(super) fn grow_worker(&mut self, name: &str, variant: String, tickets: Vec<Ticket>) {
        let changeable = self
            .workers
            .get(name)
            .filter(|worker| worker.state == WorkerState::Ready && worker.resizing.is_none())
            .and_then(|worker| worker.lease);
        let peak = self.worker_peak(name, Some(&variant));
        let booked = changeable.is_some_and(|id| self.grow_lease(id, peak));
        if !booked {
            for ticket in tickets {
                self.deny(
                    ticket,
                    invalid(name, "worker", &name, "cannot change at present".to_owned()),
                );
            }
            return;
        }
        self.resize_worker(name, variant, tickets, false);
    }

    /// Makes an idle worker smaller, to make room.
    pub(super) fn shrink_worker(&mut self, name: &str, variant: String, reason: &str) {
        if let Some(worker) = self.workers.get_mut(name) {
            let before = worker.variant.clone();
            worker.variant_before_shed = worker.variant_before_shed.take().or(before);
        }
        self.explain(format!("worker `{name}` changes to variant `{variant}`: {reason}"));
        self.resize_worker(name, variant, Vec::new(), true);
    }

    /// Stops an idle worker, or at the last resort a busy one, to make room.
    pub(super) fn stop_worker_to_shed(&mut self, name: &str, reason: &str) {
        self.stop_worker(name, StopCause::Shed, reason);
    }

    pub(super) fn serve_worker_deadlines(&mut self) {
        let now = self.now;
        let names: Vec<String> = self.workers.keys().cloned().collect();
        for name in names {
            let Some(worker) = self.workers.get_mut(&name) else {
                continue;
            };
            match worker.state {
                WorkerState::BackingOff if worker.retry_at.is_some_and(|at| at <= now) => self.want_worker(&name),
                WorkerState::Starting if worker.state_since + worker.params.ready_timeout <= now => {
                    let timeout = worker.params.ready_timeout.as_secs_f64();
                    let reason = format!("worker `{name}` did not answer within {timeout:.1} s; stopping it");
                    self.explain(reason.clone());
                    self.stop_worker(&name, StopCause::NotReady, &reason);
                }
                WorkerState::Stopping if worker.stop_overdue() <= now => {
                    worker.state_since = now;
                    let reason = format!("worker `{name}` has not ended within its grace; stopping it again");
                    self.explain(reason.clone());
                    self.out.push(Action::StopWorker { worker: name, reason });
                }
                WorkerState::Ready => self.serve_ready_worker(&name),
                _ => {}
            }
        }
    }

    pub(super) fn next_worker_deadline(&self) -> Option<Timestamp> {
        let starts_with_engine = self.engine_overdue();
        let each = self.workers.values().filter_map(|worker| {
            let begins = worker
                .begun_at
                .filter(|_| !worker.has_come_up(self.now))
                .map(|at| at + worker.params.ready_timeout);
            let own = match worker.state {
                WorkerState::BackingOff => worker.retry_at,
                WorkerState::Starting => Some(worker.state_since + worker.params.ready_timeout),
                WorkerState::Stopping => Some(worker.stop_overdue()),
                WorkerState::Ready => {
                    let resizing = worker
                        .resizing
                        .as_ref()
                        .map(|resizing| resizing.asked_at + worker.params.ready_timeout);
                    [resizing, worker.verify_by, self.next_rest(worker)]
                        .into_iter()
                        .flatten()
                        .min()
                }
                WorkerState::Stopped | WorkerState::AwaitingMemory | WorkerState::Degraded => None,
            };
            [begins, own].into_iter().flatten().min()
        });
        each.chain(starts_with_engine).min()
    }

    /// Credits what a measurement of a worker shows, once it is where it wants to be.
    pub(super) fn settle_worker(&mut self, name: &str) {
        if let Some(used) = self.ledger.measurement(name).map(|measured| measured.used) {
            self.watch_growth(name, used);
        }
        let Some(worker) = self.workers.get(name) else { return };
        let (WorkerState::Ready, None, Some(id)) = (worker.state, &worker.resizing, worker.lease) else {
            return;
        };
        let Some(measured) = self
            .ledger
            .measurement(name)
            .filter(|measured| measured.at >= worker.state_since)
        else {
            return;
        };
        let held = self.ledger.held_by(id);
        let steady = worker.steady();
        let tolerance = held
            .saturating_sub(steady)
            .per_mille(1000u32.saturating_sub(self.params.shed.verify_per_mille));
        let stays = if measured.used <= steady.saturating_add(tolerance) {
            steady
        } else {
            measured.used.max(steady)
        };
        let to_shed = worker.verify_by.is_some();
        let freed = self.ledger.lower(id, stays);
        self.set_worker_moving(name);
        if freed > Bytes::ZERO {
            self.changed_at = self.now;
            self.explain(format!(
                "worker `{name}` uses {}: its lease comes down by {freed} to {stays}, {} is free",
                measured.used,
                self.ledger.free()
            ));
        }
        if stays == steady && to_shed {
            if let Some(worker) = self.workers.get_mut(name) {
                worker.verify_by = None;
            }
            self.note_reclaimed(freed, true);
        }
    }

    pub(super) fn worker_stays(&self, name: &str, held: Bytes) -> Bytes {
        self.workers
            .get(name)
            .map_or(held, |worker| worker.stays(held).min(held))
    }

    pub(super) fn worker_held(&self, name: &str) -> Bytes {
        let lease = self.workers.get(name).and_then(|worker| worker.lease);
        lease.map_or(Bytes::ZERO, |id| self.ledger.held_by(id))
    }

    /// Whether a worker is being stopped: one at a time is enough.
    pub(super) fn a_worker_is_stopping(&self) -> bool {
        self.workers
            .values()
            .any(|worker| worker.state == WorkerState::Stopping)
    }

    /// Space of workers that are wanted, do not run, are not in the queue and could be started some time; and what those lack for their start that are
    /// about to be started anew.
    pub(super) fn returning_workers(&self) -> Vec<(Class, Bytes)> {
        let needs = |worker: &Worker| {
            let peak = self.worker_peak(&worker.params.name, None);
            let comes_back = worker.state == WorkerState::Stopped
                && (worker.stopped_to_shed
                    || worker.rest.asleep
                    || (worker.begun_at.is_none() && worker.params.autostart));
            if comes_back || worker.state == WorkerState::BackingOff {
                return Some(peak);
            }
            let is_for_size = worker.rest.outgrown || worker.rest.winding.is_some_and(Winding::is_for_size);
            (is_for_size || worker.stop == Some(StopCause::Recycle))
                .then(|| peak.saturating_sub(self.worker_held(&worker.params.name)))
        };
        let wanted = self.workers.values().filter(|worker| worker.wanted);
        wanted
            .filter(|worker| !self.start_is_out_of_reach(worker))
            .filter_map(|worker| needs(worker).map(|bytes| (worker.params.class, bytes)))
            .collect()
    }

    /// Space of all workers that are wanted, do not run and could be started some time. Those that sleep do not
    /// count where they are more urgent: whoever asks, the engine, gives it back when one wakes.
    pub(super) fn returning_or_waiting_workers(&self) -> Bytes {
        let peak = |worker: &Worker| self.worker_peak(&worker.params.name, None);
        let waiting = self.workers.values().filter(|worker| worker.is_waiting());
        let waiting = waiting.filter(|worker| !self.start_is_out_of_reach(worker)).map(peak);
        let asleep = self
            .workers
            .values()
            .filter(|worker| worker.wanted && worker.rest.asleep && worker.state == WorkerState::Stopped)
            .filter(|worker| worker.params.class < Class::LlmElastic)
            .filter(|worker| !self.start_is_out_of_reach(worker))
            .map(peak)
            .fold(Bytes::ZERO, Bytes::saturating_add);
        self.returning_workers()
            .into_iter()
            .map(|(_, bytes)| bytes)
            .chain(waiting)
            .fold(Bytes::ZERO, Bytes::saturating_add)
            .saturating_sub(asleep)
    }

    fn serve_ready_worker(&mut self, name: &str) {
        let now = self.now;
        let Some(worker) = self.workers.get_mut(name) else {
            return;
        };
        if let Some(resizing) = &worker.resizing
            && resizing.asked_at + worker.params.ready_timeout <= now
        {
            let timeout = worker.params.ready_timeout.as_secs_f64();
            let problem = format!("was asked for and not answered within {timeout:.1} s");
            let resizing = worker.resizing.take();
            worker.state_since = now;
            let (variant, tickets) =
                resizing.map_or_else(Default::default, |resizing| (resizing.variant, resizing.tickets));
            self.explain(format!("worker `{name}`: variant `{variant}` {problem}"));
            for ticket in tickets {
                self.deny(ticket, invalid(name, "variant", &variant, problem.clone()));
            }
            // It may still change at any time, to a size that nobody could book by then.
            let reason = format!("worker `{name}` did not answer within {timeout:.1} s whether it is `{variant}`");
            self.stop_worker(name, StopCause::NotReady, &reason);
            return;
        }
        if worker.verify_by.is_some_and(|by| by <= now) {
            worker.verify_by = None;
            let idle = worker.requests == 0;
            let used = self.ledger.measurement(name).map(|measured| measured.used);
            let shown = used.map_or_else(|| "cannot be measured".to_owned(), |used| format!("still uses {used}"));
            let held = self.worker_held(name);
            let reason = format!("worker `{name}` said that it has become smaller and {shown}; it still holds {held}");
            self.explain(reason.clone());
            if idle {
                self.stop_worker(name, StopCause::Shed, &reason);
            }
        }
    }

    pub(super) fn resize_worker(&mut self, name: &str, variant: String, tickets: Vec<Ticket>, to_shed: bool) {
        let now = self.now;
        self.noted += 1;
        if let Some(worker) = self.workers.get_mut(name) {
            worker.resizing = Some(Resizing {
                variant: variant.clone(),
                tickets,
                asked_at: now,
                to_shed,
            });
        }
        self.set_worker_moving(name);
        self.out.push(Action::ResizeWorker {
            worker: name.to_owned(),
            variant,
        });
    }

    pub(super) fn stop_worker(&mut self, name: &str, cause: StopCause, reason: &str) {
        let now = self.now;
        self.noted += 1;
        let Some(worker) = self.workers.get_mut(name) else {
            return;
        };
        worker.state = WorkerState::Stopping;
        worker.state_since = now;
        worker.rest.outgrown = worker.rest.winding.take().is_some_and(Winding::is_for_size);
        worker.stop = Some(cause);
        let lease = worker.lease;
        let tickets = worker
            .resizing
            .take()
            .map(|resizing| resizing.tickets)
            .unwrap_or_default();
        let denial = invalid(name, "worker", &name, format!("is being stopped: {reason}"));
        for ticket in tickets {
            self.deny(ticket, denial.clone());
        }
        if let Some(id) = lease {
            self.forget_wants_of(id, &denial);
            self.ledger.set_moving(id, true);
        }
        self.out.push(Action::StopWorker {
            worker: name.to_owned(),
            reason: reason.to_owned(),
        });
    }

    fn set_worker_moving(&mut self, name: &str) {
        if let Some(worker) = self.workers.get(name)
            && let Some(id) = worker.lease
        {
            let measured = self.ledger.measurement(name);
            let settled = worker.state == WorkerState::Ready
                && worker.resizing.is_none()
                && measured.is_some_and(|measured| measured.at >= worker.state_since);
            self.ledger.set_moving(id, !settled);
        }
    }
}

impl Worker {
    /// When a worker that was asked to stop is asked again.
    fn stop_overdue(&self) -> Timestamp {
        self.state_since + self.params.stop_grace + STOP_SLACK
    }
}

/// After its grace a worker is killed; reaping one that holds 1 GiB took 182 to 248 ms.
const STOP_SLACK: Duration = Duration::from_secs(2);
