//! Scenarios of the arbiter: events in, actions and snapshots out.

/// Returns whether the last call made a decision of this form: `decided!(rig, Engine(EngineDecision::Unconfirmed))`.
macro_rules! decided {
    ($rig:expr, $machine:ident($decision:pat) $(if $guard:expr)?) => {
        $rig
            .decisions()
            .any(|decision| matches!(decision, Decision::$machine($decision) $(if $guard)?))
    };
}

/// Returns whether the last call requires an action of this form.
macro_rules! acts {
    ($rig:expr, $($action:tt)+) => {
        $rig.actions.iter().any(|action| matches!(action, $($action)+))
    };
}

mod cgroup;
mod chunk;
mod engine;
mod golden;
mod growth;
mod holder;
mod kv;
mod lease;
mod rest;
mod restore;
mod revoke;
mod settings;
mod worker;

use std::time::Duration;

use super::Arbiter;
use crate::{
    decision::Decision,
    denial::{Denial, Problem},
    engine_control::KvUse,
    engine_failure::Cure,
    event::{
        Action, Answer, CapacityWanted, Done, EngineApplied, Event, LeaseCall, LeaseResize,
        TargetAnswered, WorkerCommand, WorkerResize, WorkerResized,
    },
    kv_type::KvType,
    lease::{Class, LeaseRequest, LeaseView, Peer, Ticket},
    params::{EngineParams, Params, RestParams, Scope, StartParams, WorkerParams},
    pressure::{MemoryReading, Sample, sample_with},
    reason::StopReason,
    residency::{EnginePlan, ModelShape, sample_shape, small_model as shape},
    snapshot::{Snapshot, WorkerView},
};
use cotenant_units::{Bytes, Timestamp, Tokens};

pub(super) const fn mib(mib: u64) -> Bytes {
    Bytes::from_mib(mib)
}

pub(super) const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// A session with a budget of 400 MiB: Elevated below 52 MiB, Critical below 26 MiB, 20 MiB of minimum reclaim.
pub(super) fn params() -> Params {
    let mut params = Params::for_budget(mib(400), Bytes::ZERO, Scope::Session);
    params.pressure.dwell = ms(2000);
    params.shed.minimum_reclaim = mib(20);
    params
}

pub(super) fn with_engine(mut params: Params) -> Params {
    params.engine = Some(EngineParams::default());
    params
}

pub(super) fn worker(name: &str, mib_held: u64) -> WorkerParams {
    WorkerParams {
        name: name.to_owned(),
        steady: mib(mib_held),
        peak: mib(mib_held),
        start: StartParams {
            ready_timeout: ms(5000),
            ..StartParams::default()
        },
        ..WorkerParams::default()
    }
}

/// Returns a worker that is started only by a request or an operator.
pub(super) fn by_hand(name: &str, mib_held: u64) -> WorkerParams {
    let mut params = worker(name, mib_held);
    params.start.autostart = false;
    params
}

pub(super) fn of_class(class: Class, params: WorkerParams) -> WorkerParams {
    WorkerParams { class, ..params }
}

pub(super) fn recycled_above(limit_mib: u64) -> RestParams {
    RestParams {
        recycle_above: Some(mib(limit_mib)),
        ..RestParams::default()
    }
}

/// Returns the engine's activity with `requests` running and `kv` in its cache.
pub(super) fn activity(requests: u32, kv: KvUse) -> Event {
    Event::EngineActivity {
        requests,
        kv_used: kv.used.get(),
        kv_kept: kv.kept.get(),
        kv_prompt: 0,
        kv_most: kv.expected.get(),
        kv_droppable: kv.droppable.get(),
        kv_dropped: kv.dropped.get(),
        untouched: kv.untouched,
        beside: kv.beside,
    }
}

/// An arbiter, a clock, and the actions of the last call.
pub(super) struct Rig {
    pub(super) arbiter: Arbiter,
    pub(super) now: Timestamp,
    pub(super) actions: Vec<Action>,
    tickets: u64,
}

impl Rig {
    /// Returns a rig with a maximum age of samples of one hour, since scenarios give samples only where they need them.
    pub(super) fn new(mut params: Params) -> Self {
        params.pressure.sample_age_max = Duration::from_secs(3600);
        Self {
            arbiter: Arbiter::new(params).unwrap(),
            now: Timestamp::START,
            actions: Vec::new(),
            tickets: 0,
        }
    }

    /// Returns a rig with the engine ready in its full plan, all of its lease in use.
    pub(super) fn with_engine_ready(params: Params) -> Self {
        Self::with_engine_ready_in(with_engine(params))
    }

    /// As [`Self::with_engine_ready`], with settings that include the engine.
    pub(super) fn with_engine_ready_in(params: Params) -> Self {
        let mut rig = Self::new(params);
        rig.sample(0);
        rig.tell(Event::EngineInspected { shape: shape() });
        rig.engine_applies();
        rig
    }

    /// Returns a rig without an engine, after one sample.
    pub(super) fn sampled(params: Params) -> Self {
        let mut rig = Self::new(params);
        rig.sample(0);
        rig
    }

    pub(super) fn with_workers(workers: Vec<WorkerParams>) -> Self {
        Self::sampled(Params {
            workers,
            ..params()
        })
    }

    pub(super) fn tell(&mut self, event: Event) -> &[Action] {
        self.actions = self.arbiter.handle(self.now, event);
        &self.actions
    }

    pub(super) fn wait(&mut self, millis: u64) -> &mut Self {
        self.now = self.now + ms(millis);
        self
    }

    /// Advances the clock, with a call at each deadline; keeps all actions.
    pub(super) fn pass(&mut self, millis: u64) -> &[Action] {
        let end = self.now + ms(millis);
        let mut all = Vec::new();
        while let Some(next) = self.arbiter.next_deadline().filter(|next| *next <= end) {
            self.now = next;
            all.extend(self.arbiter.handle(next, Event::DeadlineReached));
        }
        self.now = end;
        all.extend(self.arbiter.handle(end, Event::DeadlineReached));
        self.actions = all;
        &self.actions
    }

    /// Applies a sample in which the session uses `used_mib`.
    pub(super) fn sample(&mut self, used_mib: u64) -> &[Action] {
        self.tell(Event::Sampled(sample_with(mib(used_mib), self.now)))
    }

    /// Applies a sample of a machine of `total` MiB with `used` in use.
    pub(super) fn machine(&mut self, total: u64, used: u64) -> &[Action] {
        self.tell(Event::Sampled(Sample {
            taken_at: self.now,
            memory: MemoryReading {
                mem_total: mib(total),
                mem_available: mib(total - used),
                mem_free: mib(total - used),
                group: None,
            },
            ..Sample::default()
        }))
    }

    /// Applies two samples, 10 ms apart, so that they confirm each other.
    pub(super) fn samples(&mut self, used_mib: u64) -> Vec<Action> {
        let mut actions = self.wait(10).sample(used_mib).to_vec();
        actions.extend_from_slice(self.wait(10).sample(used_mib));
        self.actions.clone_from(&actions);
        actions
    }

    pub(super) fn measure(&mut self, tenant: &str, used_mib: u64) -> &[Action] {
        self.tell(Event::Measured {
            tenant: tenant.to_owned(),
            used: Some(mib(used_mib)),
            taken_at: self.now,
        })
    }

    /// Applies a measurement taken earlier.
    pub(super) fn measure_at(&mut self, tenant: &str, used_mib: u64, taken_at: Timestamp) {
        self.tell(Event::Measured {
            tenant: tenant.to_owned(),
            used: Some(mib(used_mib)),
            taken_at,
        });
    }

    pub(super) fn peak(&mut self, worker: &str, peak_mib: u64) {
        let (worker, peak) = (worker.to_owned(), mib(peak_mib));
        self.tell(Event::PeakMeasured { worker, peak });
    }

    pub(super) fn ticket(&mut self) -> Ticket {
        self.tickets += 1;
        Ticket(self.tickets)
    }

    /// Sends an event that is answered by a ticket.
    fn call(&mut self, event: impl FnOnce(Ticket) -> Event) {
        let ticket = self.ticket();
        self.tell(event(ticket));
    }

    pub(super) fn ask(&mut self, request: LeaseRequest) {
        self.call(|ticket| Event::LeaseRequested { ticket, request });
    }

    pub(super) fn renew(&mut self, lease: &LeaseView) {
        self.call(|ticket| {
            Event::LeaseRenewed(LeaseCall {
                ticket,
                lease: lease.id,
                generation: lease.generation,
                peer: peer(1000),
            })
        });
    }

    /// Reports the exit of a holder's process.
    pub(super) fn lost(&mut self, lease: &LeaseView) -> &[Action] {
        self.tell(Event::HolderLost {
            lease: lease.id,
            pid: None,
        })
    }

    pub(super) fn operator_shed(&mut self, bytes: Bytes) {
        self.call(|ticket| Event::OperatorShed {
            ticket,
            bytes,
            by: None,
        });
    }

    pub(super) fn regrow(&mut self) {
        self.call(|ticket| Event::OperatorRegrow { ticket, by: None });
    }

    pub(super) fn keep_kv_as(&mut self, kv_type: KvType) {
        self.call(|ticket| Event::OperatorKvType {
            ticket,
            kv_type,
            by: None,
        });
    }

    pub(super) fn load(&mut self) {
        self.call(|ticket| Event::OperatorLoad { ticket, by: None });
    }

    pub(super) fn command(&mut self, worker: &str, command: WorkerCommand) {
        let worker = worker.to_owned();
        self.call(|ticket| Event::OperatorWorker {
            ticket,
            worker,
            command,
            by: None,
        });
    }

    pub(super) fn wants_capacity(&mut self, needed: u32, wanted: u32) {
        let (needed, wanted) = (Tokens::new(needed), Tokens::new(wanted));
        self.tell(Event::CapacityWanted(CapacityWanted {
            needed,
            wanted,
            client: None,
            is_running: false,
        }));
    }

    /// Requests capacity for a running answer that has reached the end of its KV.
    pub(super) fn answer_wants_capacity(&mut self, needed: u32, wanted: u32) {
        let (needed, wanted) = (Tokens::new(needed), Tokens::new(wanted));
        self.tell(Event::CapacityWanted(CapacityWanted {
            needed,
            wanted,
            client: None,
            is_running: true,
        }));
    }

    pub(super) fn engine_fails(&mut self, left: Option<Bytes>) {
        let reason = "it panicked".to_owned();
        self.tell(Event::EngineFailed {
            reason,
            cure: Cure::Reload,
            left,
        });
    }

    pub(super) fn engine_refuses(&mut self, revision: u64) {
        let reason = "a layer could not be read".to_owned();
        self.tell(Event::EngineApplyFailed { revision, reason });
    }

    pub(super) fn answers(&mut self, worker: &str, pid: u32) {
        let worker = worker.to_owned();
        self.tell(Event::WorkerReady { worker, pid });
    }

    /// Reports a worker as ready and measured; keeps the actions of both.
    pub(super) fn ready(&mut self, worker: &str, used_mib: u64) {
        self.wait(10).answers(worker, 7);
        let first = self.actions.clone();
        self.wait(1).measure(worker, used_mib);
        self.actions.splice(0..0, first);
    }

    pub(super) fn exits(&mut self, worker: &str, intended: bool, cause: &str) {
        let (worker, cause) = (worker.to_owned(), cause.to_owned());
        self.tell(Event::WorkerExited {
            worker,
            intended,
            cause,
        });
    }

    pub(super) fn busy(&mut self, worker: &str, requests: u32) {
        let worker = worker.to_owned();
        self.wait(1)
            .tell(Event::WorkerActivity { worker, requests });
    }

    /// Reports a request that waits for a worker.
    pub(super) fn wanted(&mut self, worker: &str) {
        let worker = worker.to_owned();
        self.tell(Event::WorkerWanted {
            worker,
            client: None,
        });
    }

    pub(super) fn request(
        &mut self,
        tenant: &str,
        class: Class,
        min: u64,
        max: u64,
        wait_ms: u64,
    ) -> &[Action] {
        self.ask(request(tenant, class, min, max, wait_ms));
        &self.actions
    }

    /// Returns the lease granted by the last call.
    pub(super) fn granted(&self) -> LeaseView {
        match self.answer() {
            Answer::Lease { lease } => lease,
            other => panic!("not granted: {other:?}"),
        }
    }

    pub(super) fn denial(&self) -> Denial {
        match self.answer() {
            Answer::Denied { denial, .. } => denial,
            other => panic!("not denied: {other:?}"),
        }
    }

    pub(super) fn done(&self) -> Done {
        match self.answer() {
            Answer::Done { done } => done,
            other => panic!("not done: {other:?}"),
        }
    }

    pub(super) fn answer(&self) -> Answer {
        self.try_answer()
            .unwrap_or_else(|| panic!("no answer in {:#?}", self.actions))
    }

    pub(super) fn try_answer(&self) -> Option<Answer> {
        self.actions.iter().find_map(|action| match action {
            Action::Answer { answer, .. } => Some(answer.clone()),
            _ => None,
        })
    }

    pub(super) fn plan_asked(&self) -> Option<(u64, EnginePlan)> {
        self.actions.iter().find_map(|action| match action {
            Action::ApplyPlan { revision, plan, .. } | Action::LoadEngine { revision, plan } => {
                Some((*revision, plan.clone()))
            }
            _ => None,
        })
    }

    /// Applies the plan of the last call; returns its bytes.
    pub(super) fn engine_applies(&mut self) -> Bytes {
        let (revision, plan) = self
            .plan_asked()
            .unwrap_or_else(|| panic!("no plan in {:#?}", self.actions));
        self.engine_applies_plan(revision, plan)
    }

    pub(super) fn engine_applies_plan(&mut self, revision: u64, plan: EnginePlan) -> Bytes {
        let shape = self.snapshot().engine.shape.unwrap_or_else(shape);
        let used = shape.plan_bytes(&plan);
        let before = self.lease("llm").map_or(used, |lease| lease.memory.held);
        self.engine_applied(revision, plan, before.saturating_sub(used), used);
        used
    }

    /// Reports a plan in force, with the bytes freed and in use, all touched.
    pub(super) fn engine_applied(
        &mut self,
        revision: u64,
        in_force: EnginePlan,
        freed: Bytes,
        used: Bytes,
    ) {
        self.tell(Event::EngineApplied(EngineApplied {
            freed,
            ..EngineApplied::new(revision, in_force, used, ms(5))
        }));
    }

    pub(super) fn snapshot(&self) -> Snapshot {
        self.arbiter.snapshot()
    }

    pub(super) fn lease(&self, tenant: &str) -> Option<LeaseView> {
        self.snapshot()
            .leases
            .into_iter()
            .find(|lease| lease.tenant == tenant)
    }

    pub(super) fn held(&self, tenant: &str) -> Bytes {
        self.lease(tenant)
            .map_or(Bytes::ZERO, |lease| lease.memory.held)
    }

    pub(super) fn worker(&self, name: &str) -> WorkerView {
        self.snapshot()
            .workers
            .into_iter()
            .find(|worker| worker.name == name)
            .unwrap()
    }

    /// Returns the decisions of the last call.
    pub(super) fn decisions(&self) -> impl Iterator<Item = &Decision> {
        self.actions.iter().filter_map(|action| match action {
            Action::Decided { decision } => Some(decision),
            _ => None,
        })
    }

    pub(super) fn starts(&self, name: &str) -> bool {
        acts!(self, Action::StartWorker { worker, .. } if worker == name)
    }

    pub(super) fn stops(&self, name: &str) -> bool {
        self.stop_reason(name).is_some()
    }

    /// Returns why the last call stopped a worker.
    pub(super) fn stop_reason(&self, name: &str) -> Option<StopReason> {
        self.actions.iter().find_map(|action| match action {
            Action::StopWorker { worker, reason } if worker == name => Some(reason.clone()),
            _ => None,
        })
    }
}

pub(super) fn peer(uid: u32) -> Peer {
    Peer {
        uid,
        ..Peer::default()
    }
}

pub(super) fn request(
    tenant: &str,
    class: Class,
    min: u64,
    max: u64,
    wait_ms: u64,
) -> LeaseRequest {
    LeaseRequest {
        tenant: tenant.to_owned(),
        request_id: String::new(),
        peer: peer(1000),
        class,
        min: mib(min),
        max: mib(max),
        term: Some(Duration::from_secs(10)),
        wait: ms(wait_ms),
        validate_only: false,
        cgroup: None,
    }
}

/// Returns a request of a known process that does not wait.
pub(super) fn of_process(
    tenant: &str,
    class: Class,
    (min, max): (u64, u64),
    uid: u32,
    pid: u32,
) -> LeaseRequest {
    LeaseRequest {
        peer: Peer {
            pid: Some(pid),
            ..peer(uid)
        },
        ..request(tenant, class, min, max, 0)
    }
}
