//! The doors: one event in, the actions out.

use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
    time::Duration,
};

use serde::{Deserialize, Serialize};

use super::{
    engine::Applied,
    queue::{Place, Want},
    revoke::Ghost,
};
use crate::{
    policy::{
        book::LastNumbers,
        deadline::Deadline,
        decision::{AdmissionDecision, Decision, LeaseName},
        dwell::Dwell,
        engine_control::{EngineControl, KvUse},
        event::{Action, Answer, Event},
        lease::{Class, Denial, LeaseId, LeaseKind, LeaseRequest, Target, TargetAnswer, Ticket},
        ledger::Ledger,
        params::{Params, ParamsError, Scope},
        peaks::Peaks,
        pressure::{Pressure, Sample},
        snapshot::Snapshot,
        worker_control::WorkerControl,
    },
    units::{Bytes, Timestamp, Tokens},
};

/// The one state machine that the daemon talks to: takes what happened, and says what must be done about it.
///
/// ```
/// use cotenant::policy::{Arbiter, event::{Action, Event}, params::{Params, Scope}, pressure::Sample};
/// use cotenant::units::{Bytes, Timestamp};
///
/// let params = Params::for_budget(Bytes::from_gib(8), Bytes::from_gib(1), Scope::Machine);
/// let mut arbiter = Arbiter::new(params)?;
/// let sample = Sample { mem_total: Bytes::from_gib(8), mem_available: Bytes::from_gib(7), ..Sample::default() };
/// let actions = arbiter.handle(Timestamp::START, Event::Sampled(sample));
/// assert!(matches!(actions[..], [Action::SampleAfter { .. }]));
/// # Ok::<(), cotenant::policy::params::ParamsError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Arbiter {
    pub(super) params: Params,
    pub(super) now: Timestamp,
    pub(super) ledger: Ledger,
    pub(super) pressure: Pressure,
    pub(super) sample: Option<Sample>,
    #[serde(with = "crate::policy::pairs")]
    pub(super) leases: BTreeMap<LeaseId, Lease>,
    /// Holders whose leases have ended, and that are still measured to use memory.
    pub(super) ghosts: BTreeMap<String, Ghost>,
    #[serde(with = "crate::policy::pairs")]
    pub(super) queue: BTreeMap<Place, Want>,
    pub(super) engine: EngineControl,
    pub(super) workers: WorkerControl,
    /// What was learned of holders, in earlier runs and in this one.
    #[serde(default)]
    pub(super) peaks: Peaks,
    pub(super) draining: bool,
    /// When something may grow back.
    pub(super) dwell: Dwell,
    /// The last shed under pressure.
    pub(super) relieved_at: Option<Timestamp>,
    /// The last time that memory came back or was handed out, so that an older sample says nothing.
    pub(super) changed_at: Timestamp,
    pub(super) stats: Stats,
    pub(super) counters: Counters,
    /// Changes of what outlives this run, besides those that the ledger counts.
    pub(super) noted: u64,
    /// Holders that are measured beyond what they hold.
    pub(super) beyond: BTreeSet<String>,
    /// What was last explained under a subject, so that it is not said again with each sample.
    pub(super) said: BTreeMap<String, String>,
    /// Until when there is nothing to do by the clock; `None` when that is not known.
    #[serde(default)]
    pub(super) idle_until: Option<Timestamp>,
    /// Actions of the present call.
    #[serde(skip)]
    pub(super) out: Vec<Action>,
}

/// A lease that is on the book.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Lease {
    pub(super) tenant: String,
    /// As whom its process is measured: the tenant, unless another process has that name too. Empty in an older checkpoint.
    #[serde(default)]
    pub(super) holder: String,
    pub(super) kind: LeaseKind,
    pub(super) class: Class,
    pub(super) generation: u64,
    pub(super) min: Bytes,
    pub(super) max: Bytes,
    pub(super) granted_at: Timestamp,
    pub(super) expires_at: Option<Timestamp>,
    pub(super) owner_uid: u32,
    pub(super) owner_pid: Option<u32>,
    /// What was asked, for tenants.
    pub(super) request: Option<LeaseRequest>,
    pub(super) phase: Phase,
}

impl Lease {
    /// As whom its process is measured, and booked.
    pub(super) fn holder(&self) -> &str {
        if self.holder.is_empty() {
            &self.tenant
        } else {
            &self.holder
        }
    }
}

/// Where a lease on the book is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Phase {
    Granted,
    Revoking(Revocation),
    /// Has ended; its bytes stay on the book until something tells that they are back, or where they are.
    Ending {
        since: Timestamp,
        deadline: Timestamp,
        next_poll: Timestamp,
        /// The holder cannot be measured: a sample of the scope has to do.
        unmeasurable: bool,
        /// What it may still take, as far as it knows.
        #[serde(default)]
        belief: Option<Belief>,
    },
}

/// What the holder of a lease that has ended may take while it has not heard of the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Belief {
    pub(super) bytes: Bytes,
    /// The end of the term that it was granted last: after it no holder relies on its lease, heard or not.
    pub(super) until: Timestamp,
}

/// A lower target under way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Revocation {
    pub(super) target: Target,
    pub(super) asked_at: Timestamp,
    /// What the holder was measured to use when it was asked.
    pub(super) used_before: Option<Bytes>,
    pub(super) answered: Option<TargetAnswer>,
    /// When it answered that it has come down, or will.
    pub(super) answered_at: Option<Timestamp>,
    /// When it first answered that its memory is back.
    #[serde(default)]
    pub(super) applied_at: Option<Timestamp>,
    /// What a reading newer than its claim has shown.
    #[serde(default)]
    pub(super) evidence: Evidence,
    pub(super) next_poll: Timestamp,
    /// The holder itself lowered its lease: nothing is ended if that does not show.
    pub(super) voluntary: bool,
}

/// What is known of a holder since it answered its target.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Evidence {
    /// It has not been read since.
    #[default]
    Missing,
    /// It uses this much, which is above its target.
    Above { used: Bytes },
    /// It could not be read.
    Unmeasurable,
}

/// Sums for the snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Stats {
    pub(super) sheds: u64,
    pub(super) shed_bytes: Bytes,
    pub(super) regrown_bytes: Bytes,
}

/// The last number of each kind that was given out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Counters {
    lease: u64,
    generation: u64,
    nonce: u64,
    revision: u64,
    arrival: u64,
}

impl Counters {
    pub(super) const fn last(&self) -> LastNumbers {
        LastNumbers {
            lease: self.lease,
            generation: self.generation,
            nonce: self.nonce,
        }
    }
    /// Goes on behind the numbers of an earlier run.
    pub(super) fn skip(&mut self, last: LastNumbers) {
        self.lease = self.lease.max(last.lease);
        self.generation = self.generation.max(last.generation);
        self.nonce = self.nonce.max(last.nonce);
    }
    pub(super) const fn lease(&mut self) -> LeaseId {
        self.lease += 1;
        LeaseId(self.lease)
    }
    pub(super) const fn generation(&mut self) -> u64 {
        self.generation += 1;
        self.generation
    }
    pub(super) const fn nonce(&mut self) -> u64 {
        self.nonce += 1;
        self.nonce
    }
    pub(super) const fn revision(&mut self) -> u64 {
        self.revision += 1;
        self.revision
    }
    pub(super) const fn arrival(&mut self) -> u64 {
        self.arrival += 1;
        self.arrival
    }
}

impl Arbiter {
    /// An arbiter with an empty book.
    ///
    /// # Errors
    /// All faults of `params`.
    pub fn new(params: Params) -> Result<Self, ParamsError> {
        params.validate()?;
        let mut peaks = params.peaks.clone();
        for worker in &params.workers {
            peaks.forget_other_models(&worker.name, worker.model.as_deref());
        }
        Ok(Self {
            now: Timestamp::START,
            ledger: Ledger::new(params.budget.bytes(), params.budget.reserve),
            pressure: Pressure::new(params.pressure),
            sample: None,
            leases: BTreeMap::new(),
            ghosts: BTreeMap::new(),
            queue: BTreeMap::new(),
            engine: EngineControl::new(params.engine.as_ref()),
            workers: WorkerControl::new(&params.workers),
            peaks,
            draining: false,
            dwell: Dwell::new(params.pressure.dwell),
            relieved_at: None,
            changed_at: Timestamp::START,
            stats: Stats::default(),
            counters: Counters::default(),
            noted: 0,
            beyond: BTreeSet::new(),
            said: BTreeMap::new(),
            idle_until: None,
            out: Vec::new(),
            params,
        })
    }

    /// Takes one event and returns what must be done about it, in order.
    ///
    /// `now` never goes back; an earlier one is taken for the last. Deadlines that are due are served before the event,
    /// so that a renewal at the very end of a term comes too late.
    ///
    /// # Panics
    /// If the book is broken: see [`Arbiter::assert_invariants`].
    #[must_use]
    pub fn handle(&mut self, now: Timestamp, event: Event) -> Vec<Action> {
        self.now = self.now.max(now);
        if let Event::LeaseRenewed { lease, .. } = event
            && self.idle_until.is_some_and(|until| self.now < until)
        {
            // The end of one lease moves away, and nothing else: the whole book need not be gone through for it. With
            // hundreds of tenants that is most of what there is to do.
            self.take(event);
            self.assert_lasts(lease);
            return mem::take(&mut self.out);
        }
        self.serve_lease_deadlines();
        self.serve_queue_deadlines();
        self.serve_engine_deadlines();
        self.serve_worker_deadlines();
        self.take(event);
        self.follow_up();
        self.assert_invariants();
        self.idle_until = Some(self.next_deadline().unwrap_or(Timestamp::NEVER));
        mem::take(&mut self.out)
    }

    /// When [`Event::DeadlineReached`] is due, if ever; later than the last event.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Timestamp> {
        [
            self.next_lease_deadline(),
            self.next_queue_deadline(),
            self.engine.next_deadline(self.now),
            self.next_worker_deadline(),
            self.dwell.ends(self.now),
            self.pressure.grace_ends().filter(|end| *end > self.now),
        ]
        .into_iter()
        .flatten()
        .min()
    }

    /// The settings.
    #[must_use]
    pub const fn params(&self) -> &Params {
        &self.params
    }

    /// The state as operators, metrics and tests see it.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        self.view()
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::Sampled(sample) => self.take_sample(sample),
            Event::Measured { tenant, used, taken_at } => self.take_measurement(&tenant, used, taken_at),
            Event::LeaseRequested { ticket, request } => self.take_request(ticket, request),
            Event::LeaseRequestCancelled { ticket } => self.take_cancellation(ticket),
            Event::LeaseRenewed {
                ticket,
                lease,
                generation,
                peer,
            } => self.take_renewal(ticket, lease, generation, &peer),
            Event::LeaseResizeRequested {
                ticket,
                lease,
                generation,
                peer,
                min,
                max,
                wait,
            } => self.take_resize(ticket, lease, generation, &peer, (min, max), wait),
            Event::LeaseReleased {
                ticket,
                lease,
                generation,
                peer,
            } => self.take_release(ticket, lease, generation, &peer),
            Event::TargetAnswered {
                lease,
                nonce,
                answer,
                claimed,
            } => self.take_target_answer(lease, nonce, answer, claimed),
            Event::HolderLost { lease, pid } => self.take_holder_lost(lease, pid),
            Event::EngineInspected { shape } => self.take_engine_inspected(shape),
            Event::EngineApplied {
                revision,
                in_force,
                freed,
                used,
                untouched,
                untouched_given,
                took,
            } => {
                let applied = Applied {
                    freed,
                    used,
                    untouched,
                    untouched_given,
                    took,
                };
                self.take_engine_applied(revision, in_force, &applied);
            }
            Event::EngineApplyFailed { revision, reason } => self.take_engine_apply_failed(revision, &reason),
            Event::EngineFailed { reason, left } => self.take_engine_failed(&reason, left),
            Event::EngineActivity {
                requests,
                kv_used,
                kv_kept,
                kv_droppable,
                kv_dropped,
                untouched,
            } => self.take_engine_activity(
                requests,
                KvUse {
                    used: Tokens::new(kv_used),
                    kept: Tokens::new(kv_kept),
                    droppable: Tokens::new(kv_droppable),
                    dropped: Tokens::new(kv_dropped),
                    untouched,
                    pinned: None,
                },
            ),
            Event::EngineCalibrated(calibration) => self.engine.calibrated(calibration),
            Event::EngineTimed(timing) => self.engine.timed(&timing),
            Event::WorkerReady { worker, pid } => self.take_worker_ready(&worker, pid),
            Event::WorkerDied { certificate } => self.take_worker_died(&certificate),
            Event::WorkerExited {
                worker,
                intended,
                cause,
            } => self.take_worker_exited(&worker, intended, &cause),
            Event::PeakMeasured { worker, peak } => self.take_peak(&worker, peak),
            Event::WorkerActivity { worker, requests } => self.take_worker_activity(&worker, requests),
            Event::WorkerWanted { worker } => self.take_worker_wanted(&worker),
            Event::WorkerResizeRequested {
                ticket,
                worker,
                variant,
                wait,
            } => self.take_worker_resize(ticket, worker, variant, wait),
            Event::WorkerResized {
                worker,
                variant,
                used,
                error,
            } => self.take_worker_resized(&worker, &variant, used, error.as_deref()),
            Event::WorkerUnresponsive { worker, pid, evidence } => {
                self.take_worker_unresponsive(&worker, pid, evidence);
            }
            Event::CapacityWanted { needed, wanted } => self.take_capacity_wanted(needed, wanted),
            Event::OperatorShed { ticket, bytes } => self.take_operator_shed(ticket, bytes),
            Event::OperatorRegrow { ticket } => self.take_operator_regrow(ticket),
            Event::OperatorKvType { ticket, kv_type } => self.take_operator_kv_type(ticket, kv_type),
            Event::OperatorWorker {
                ticket,
                worker,
                command,
            } => self.take_operator_worker(ticket, &worker, command),
            Event::Recovered { book, adopted } => self.take_recovered(book, &adopted),
            Event::DrainRequested => self.take_drain(),
            Event::DrainCancelled => self.take_drain_cancelled(),
            Event::OperatorLoad { ticket } => self.take_operator_load(ticket),
            Event::DeadlineReached => {}
        }
    }

    fn follow_up(&mut self) {
        self.start_workers_in_order();
        self.load_engine_if_it_fits();
        self.serve_queue();
        self.relieve_pressure();
        self.grow_back();
        self.serve_rests();
    }

    fn take_sample(&mut self, mut sample: Sample) {
        sample.taken_at = sample.taken_at.min(self.now);
        if self.pressure.sampled_at().is_some_and(|last| sample.taken_at <= last) {
            self.out.push(Action::SampleAfter {
                wait: self.pressure.interval(),
            });
            return;
        }
        // What the engine has leased and not touched looks available, and may be touched with the next token.
        let untouched = self.engine.kv.untouched;
        let machine = sample.available().saturating_sub(untouched);
        let scope_used = match self.params.budget.scope {
            Scope::Machine => Some(sample.mem_total.max(self.params.budget.total).saturating_sub(machine)),
            Scope::Session => sample.scope_used.map(|used| used.saturating_add(untouched)),
        };
        let scope_left = match scope_used {
            Some(used) => {
                self.ledger.observe_scope(used, sample.taken_at);
                match self.params.budget.scope {
                    Scope::Machine => machine,
                    Scope::Session => self.params.budget.total.saturating_sub(used),
                }
            }
            // Unknown is not zero: the book decides.
            None => self.params.budget.total.saturating_sub(self.ledger.used_by_holders()),
        };
        let headroom = scope_left.saturating_sub(self.ledger.unused_reserve()).min(machine);
        if let Some(change) = self.pressure.observe(&sample, headroom) {
            self.out.push(Action::LevelChanged {
                from: change.from,
                to: change.to,
                reason: change.reason,
            });
        }
        self.out.push(Action::SampleAfter {
            wait: self.pressure.interval(),
        });
        self.close_unmeasurable(sample.taken_at);
        self.sample = Some(sample);
    }

    fn take_drain(&mut self) {
        if !self.draining {
            self.draining = true;
            self.decide(AdmissionDecision::DrainBegun);
            self.deny_all_waiting();
        }
    }

    fn take_drain_cancelled(&mut self) {
        if mem::take(&mut self.draining) {
            self.decide(AdmissionDecision::DrainEnded);
        }
    }

    pub(super) fn answer(&mut self, ticket: Ticket, answer: Answer) {
        self.out.push(Action::Answer { ticket, answer });
    }

    pub(super) fn done(&mut self, ticket: Ticket, message: String) {
        self.answer(ticket, Answer::Done { message });
    }

    pub(super) fn deny(&mut self, ticket: Ticket, denial: Denial) {
        let retry_after = self.retry_after(&denial);
        self.answer(ticket, Answer::Denied { denial, retry_after });
    }

    pub(super) fn decide(&mut self, decision: impl Into<Decision>) {
        let decision = decision.into();
        self.out.push(Action::Decided { decision });
    }

    pub(super) fn explain(&mut self, message: String) {
        self.out.push(Action::Explain { message });
    }

    /// Explains a state that lasts, once for each change of the words.
    pub(super) fn explain_once(&mut self, subject: &str, message: String) {
        if self.said.get(subject) != Some(&message) {
            self.said.insert(subject.to_owned(), message.clone());
            self.explain(message);
        }
    }

    /// The instant after `span`, later than now whatever a setting says: a deadline that is due at once would go unserved.
    pub(super) fn later(&self, span: Duration) -> Timestamp {
        Deadline::after(self.now, span).at()
    }

    /// The name of a lease in decisions.
    pub(super) fn name_of(&self, id: LeaseId) -> LeaseName {
        let tenant = self.leases.get(&id).map(|lease| lease.tenant.clone());
        LeaseName {
            id,
            tenant: tenant.unwrap_or_default(),
        }
    }

    /// `asr#7`.
    pub(super) fn lease_name(&self, id: LeaseId) -> String {
        self.leases
            .get(&id)
            .map_or_else(|| format!("#{}", id.0), |lease| format!("{}#{}", lease.tenant, id.0))
    }
}
