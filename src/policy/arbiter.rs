//! Arbiter: the state machine driven by the daemon.
//!
//! ```text
//!               ┌───────────── handle(now, event) ─────────────┐
//!   event ────► │ due deadlines ─► the event ─► follow-up      │ ────► actions, in order
//!               └──────────────────────────────────────────────┘
//!     follow-up: start wanted workers ─► load the engine ─► serve the queue ─► shed under pressure ─► grow back
//! ```
//!
//! The follow-up is computed from the state alone, from scratch for every event: lost answers and crossed messages
//! leave no stale intention. There are three kinds of files:
//!
//! - Machines, which own their state and use no other: `lease_table`, `admission`, `pressure`, `dwell`,
//!   `engine_control`, `worker`, `ledger`.
//! - Decisions, functions of the read-only `State` of all machines: `reach`, `holder`, `reclaim`, `growth`.
//! - Below this file, functions of a `Context`, which is the state and the actions of one call. `*_events`, `requests`,
//!   `operator` and `restore` each handle one kind of event; `serve` and `*_orders` carry out decisions and never
//!   handle an event. Their imports show the order of calls.

mod checkpoint;
mod context;
mod engine_events;
mod engine_orders;
mod growth_orders;
mod invariants;
mod learn;
mod operator;
mod reclaim_orders;
mod requests;
mod restore;
mod serve;
mod view;
mod worker_events;
mod worker_orders;

#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};

pub use self::checkpoint::{Checkpoint, CheckpointError};
use self::context::{Context, Machine, Record};
use crate::{
    book::Book,
    decision::MemoryDecision,
    denial::Denial,
    engine_control::KvUse,
    event::{Action, Event},
    lease_table::LeaseTable,
    params::{ENGINE_TENANT, Params, ParamsError, Scope},
    pressure::Sample,
    reboot::Changed,
    reclaim,
    residency::EnginePlan,
    shedding::NextShed,
    snapshot::Snapshot,
    state::State,
};
use cotenant_units::{Bytes, Timestamp, Tokens};

/// The state machine driven by the daemon: receives events and returns the required actions.
///
/// ```
/// use cotenant_policy::{Arbiter, event::{Action, Event}, params::{Params, Scope}, pressure::{MemoryReading, Sample}};
/// use cotenant_units::{Bytes, Timestamp};
///
/// let params = Params::for_budget(Bytes::from_gib(8), Bytes::from_gib(1), Scope::Machine);
/// let mut arbiter = Arbiter::new(params)?;
/// let (mem_total, mem_available) = (Bytes::from_gib(8), Bytes::from_gib(7));
/// let memory = MemoryReading { mem_total, mem_available, ..MemoryReading::default() };
/// let sample = Sample { memory, ..Sample::default() };
/// let actions = arbiter.handle(Timestamp::START, Event::Sampled(sample));
/// assert!(matches!(actions[..], [Action::SampleAfter { .. }]));
/// # Ok::<(), cotenant_policy::params::ParamsError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Arbiter {
    #[serde(flatten)]
    state: State,
    #[serde(flatten)]
    machine: Machine,
    #[serde(flatten)]
    record: Record,
    /// Time before which no deadline is due; `None` if unknown.
    idle_until: Option<Timestamp>,
}

impl Arbiter {
    /// Creates an arbiter without leases.
    ///
    /// # Errors
    /// All faults of `params`.
    pub fn new(params: Params) -> Result<Self, ParamsError> {
        Ok(Self {
            state: State::new(params)?,
            machine: Machine::default(),
            record: Record::default(),
            idle_until: None,
        })
    }

    /// Applies one event and returns the actions it requires, in order.
    ///
    /// `now` is monotonic; an earlier value counts as the last one. Due deadlines are served before the event, so a
    /// renewal at the very end of a term is too late.
    ///
    /// # Panics
    /// If the ledger is inconsistent: see [`Arbiter::assert_invariants`].
    #[must_use]
    pub fn handle(&mut self, now: Timestamp, event: Event) -> Vec<Action> {
        self.state.now = self.state.now.max(now);
        let mut cx = Context {
            state: &mut self.state,
            machine: &mut self.machine,
            record: &mut self.record,
            out: Vec::new(),
        };
        if matches!(event, Event::LeaseRenewed(_))
            && self.idle_until.is_some_and(|until| cx.now < until)
        {
            // A renewal only postpones the end of one lease and skips the full pass, which is most of the work with
            // hundreds of tenants.
            take(&mut cx, event);
            return cx.out;
        }
        serve_deadlines(&mut cx);
        take(&mut cx, event);
        follow_up(&mut cx);
        let actions = cx.out;
        self.assert_invariants();
        self.idle_until = Some(self.next_deadline().unwrap_or(Timestamp::NEVER));
        actions
    }

    /// Returns the time at which [`DeadlineReached`](Event::DeadlineReached) is due, if ever; later than the last
    /// event.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Timestamp> {
        view::next_deadline(&self.state)
    }

    /// Returns the state as operators, metrics and tests see it.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        view::snapshot(&self.state, &self.machine, self.record.stats)
    }

    /// Returns the next shed and the headroom that triggers it; `None` before the first sample.
    #[must_use]
    pub fn next_shed(&self) -> Option<NextShed> {
        reclaim::next(&self.state)
    }

    /// The settings.
    #[must_use]
    pub const fn params(&self) -> &Params {
        &self.state.params
    }

    /// The time of the last event.
    #[must_use]
    pub const fn now(&self) -> Timestamp {
        self.state.now
    }

    /// Returns the part of the state that the next run needs.
    #[must_use]
    pub fn book(&self) -> Book {
        restore::book(&self.state)
    }

    /// Returns the engine's smallest plan, regardless of running requests: the fallback when the arbiter no longer
    /// decides. `None` without a model.
    #[must_use]
    pub fn floor_plan(&self) -> Option<EnginePlan> {
        self.state.engine.floor_plan()
    }

    /// Asserts the invariants of the state.
    ///
    /// # Panics
    /// If one is violated. An inconsistent ledger is fatal: restart rather than over-commit.
    #[expect(clippy::panic, reason = "a broken book is worth a restart; see above")]
    pub fn assert_invariants(&self) {
        if let Some(broken) = self.broken_invariant() {
            panic!("the book is broken at {}: {broken}", self.state.now);
        }
    }

    fn broken_invariant(&self) -> Option<String> {
        invariants::broken(&self.state)
    }
}

fn serve_deadlines(cx: &mut Context<'_>) {
    serve_lease_deadlines(cx);
    serve::serve_deadlines(cx);
    engine_orders::serve_deadlines(cx);
    worker_events::serve_deadlines(cx);
}

fn take(cx: &mut Context<'_>, event: Event) {
    let ticket = event.ticket();
    if let (Err(denial), Some(ticket)) = (route(cx, event), ticket) {
        cx.deny(ticket, denial);
    }
}

fn route(cx: &mut Context<'_>, event: Event) -> Result<(), Denial> {
    match event {
        Event::Sampled(sample) => take_sample(cx, sample),
        Event::Measured {
            tenant,
            used,
            taken_at,
        } => take_measurement(cx, &tenant, used, taken_at),
        Event::LeaseRequested { ticket, request } => {
            return requests::take_request(cx, ticket, request);
        }
        Event::LeaseRequestCancelled { ticket } => requests::take_cancellation(cx, ticket),
        Event::LeaseRenewed(call) => return requests::take_renewal(cx, &call),
        Event::LeaseResizeRequested(call) => return requests::take_resize(cx, &call),
        Event::LeaseReleased(call) => return requests::take_release(cx, &call),
        Event::TargetAnswered(answer) => {
            cx.with_leases(|leases, turn| leases.answer_target(&answer, turn));
        }
        Event::HolderLost { lease, pid } => {
            cx.with_leases(|leases, turn| leases.holder_gone(lease, pid, turn));
        }
        Event::EngineInspected { shape } => engine_events::take_inspected(cx, shape),
        Event::EngineApplied(applied) => engine_events::take_applied(cx, &applied),
        Event::EngineApplyFailed { revision, reason } => {
            engine_events::take_apply_failed(cx, revision, &reason);
        }
        Event::EngineFailed { reason, cure, left } => {
            engine_events::take_failed(cx, &reason, cure, left);
        }
        Event::EngineActivity {
            requests,
            kv_used,
            kv_kept,
            kv_prompt,
            kv_most,
            kv_droppable,
            kv_dropped,
            untouched,
            beside,
        } => {
            let [used, kept, droppable, dropped] =
                [kv_used, kv_kept, kv_droppable, kv_dropped].map(Tokens::new);
            let expected = KvUse::expected(used, Tokens::new(kv_prompt), Tokens::new(kv_most));
            let kv = KvUse {
                used,
                kept,
                expected,
                droppable,
                dropped,
                untouched,
                beside,
                at: cx.now,
                pinned: None,
            };
            engine_events::take_activity(cx, requests, kv);
        }
        Event::EngineCalibrated(calibration) => cx.engine.calibrated(calibration),
        Event::EngineTimed(timing) => {
            cx.engine.timed(&timing);
            cx.renew_dwell();
        }
        Event::WorkerReady { worker, pid } => worker_events::take_ready(cx, &worker, pid),
        Event::WorkerDied { certificate } => worker_events::take_died(cx, &certificate),
        Event::WorkerExited {
            worker,
            intended,
            cause,
        } => worker_events::take_exited(cx, &worker, intended, &cause),
        Event::PeakMeasured { worker, peak } => learn::take_peak(cx, &worker, peak),
        Event::WorkerActivity { worker, requests } => {
            worker_events::take_activity(cx, &worker, requests);
        }
        Event::WorkerWanted { worker, .. } => worker_events::take_wanted(cx, &worker),
        Event::WorkerResizeRequested(call) => return worker_events::take_resize(cx, call),
        Event::WorkerResized(resized) => worker_events::take_resized(cx, &resized),
        Event::WorkerUnresponsive {
            worker,
            pid,
            evidence,
        } => {
            worker_events::take_unresponsive(cx, &worker, pid, evidence);
        }
        Event::CapacityWanted(want) => growth_orders::take_capacity_wanted(cx, &want),
        Event::OperatorShed { ticket, bytes, .. } => {
            return operator::take_shed(cx, ticket, bytes);
        }
        Event::OperatorRegrow { ticket, .. } => {
            return operator::take_regrow(cx, ticket);
        }
        Event::OperatorKvType {
            ticket, kv_type, ..
        } => {
            return operator::take_kv_type(cx, ticket, kv_type);
        }
        Event::OperatorWorker {
            ticket,
            worker,
            command,
            ..
        } => return worker_events::take_command(cx, ticket, &worker, command),
        Event::Recovered { book, adopted } => restore::take_recovered(cx, book, &adopted),
        Event::DrainRequested { .. } => operator::take_drain(cx),
        Event::DrainCancelled { .. } => operator::take_drain_cancelled(cx),
        Event::OperatorLoad { ticket, .. } => operator::take_load(cx, ticket),
        Event::Reconfigured {
            ticket,
            params,
            changes,
            ..
        } => {
            operator::take_reconfigured(cx, ticket, *params, changes)?;
            // Shorter settings may have made deadlines due.
            serve_deadlines(cx);
        }
        Event::Resized { machine, params } => {
            operator::take_resized(cx, machine, params);
            serve_deadlines(cx);
        }
        Event::BookLost { .. } | Event::ReloadRefused { .. } | Event::DeadlineReached => {}
    }
    Ok(())
}

fn follow_up(cx: &mut Context<'_>) {
    worker_events::start_in_order(cx);
    growth_orders::load_engine(cx);
    serve::serve_queue(cx);
    reclaim_orders::come_within_budget(cx);
    reclaim_orders::relieve_pressure(cx);
    growth_orders::grow_back(cx);
    worker_events::serve_rests(cx);
    cx.ledger.lower_ceiling();
}

/// Handles a sample of the machine: headroom, level, page pool, advice to reboot.
fn take_sample(cx: &mut Context<'_>, mut sample: Sample) {
    sample.taken_at = sample.taken_at.min(cx.now);
    let last = cx.pressure.sampled_at();
    if last.is_some_and(|last| sample.taken_at <= last) {
        cx.out.push(Action::SampleAfter {
            wait: cx.pressure.interval(),
        });
        return;
    }
    // Memory that the engine holds but has not touched looks available, and may be touched with the next token.
    let untouched = cx.engine.kv.untouched;
    let machine = sample.available().saturating_sub(untouched);
    let budget = cx.params.budget;
    let (whole, used) = match budget.scope {
        Scope::Machine => {
            let whole = sample.total().max(budget.total);
            (whole, Some(whole.saturating_sub(machine)))
        }
        Scope::Session => {
            let used = sample.scope_used.map(|used| used.saturating_add(untouched));
            (budget.total, used)
        }
    };
    if let Some(used) = used {
        cx.ledger.observe_scope(used, sample.taken_at);
    }
    // Without a reading, assume the use in the ledger, not zero.
    let used = used.unwrap_or_else(|| cx.ledger.used_by_holders());
    let headroom = whole
        .saturating_sub(used)
        .saturating_sub(cx.ledger.unused_reserve())
        .min(machine);
    let promised = cx.promised_at(sample.taken_at);
    let change = cx.pressure.observe(&sample, headroom);
    cx.note_level(change);
    cx.pressure.note_promised(promised);
    if let Some(release) = cx.machine.page_pool.observe(&sample) {
        cx.decide(MemoryDecision::Released(release));
    }
    for changed in cx.machine.reboot.observe(&sample, cx.pressure.level()) {
        cx.decide(match changed {
            Changed::Advised(reason) => MemoryDecision::RebootAdvised(reason),
            Changed::NotAdvised(reason) => MemoryDecision::RebootNotAdvised(reason),
        });
    }
    let short = cx.params.pressure.elevated_below;
    if let Some(bytes) = cx.machine.page_pool.bytes_to_empty(short, cx.now) {
        cx.out.push(Action::EmptyPagePool { bytes });
    }
    cx.out.push(Action::SampleAfter {
        wait: cx.pressure.interval(),
    });
    cx.with_leases(|leases, turn| leases.close_unmeasurable(sample.taken_at, turn));
}

/// Handles a measurement of a holder, and settles pending releases.
fn take_measurement(cx: &mut Context<'_>, tenant: &str, used: Option<Bytes>, taken_at: Timestamp) {
    let taken_at = taken_at.min(cx.now);
    match used {
        Some(used) if cx.leases.is_known(tenant) => {
            cx.ledger.measure(tenant, used, taken_at);
        }
        Some(_) => return,
        None => {}
    }
    // A measurement older than the last one is out of date.
    let newest = cx.ledger.measurement(tenant).map(|measured| measured.at);
    if used.is_some() && newest.is_some_and(|at| taken_at < at) {
        return;
    }
    if tenant == ENGINE_TENANT {
        learn::from_engine(cx);
        engine_orders::settle(cx);
    } else {
        let is_worker = cx.workers.contains_key(tenant);
        if is_worker && !worker_orders::settle_notified(cx, tenant, used, taken_at) {
            worker_events::settle(cx, tenant);
        }
        // A worker that requests its lease itself is settled like a tenant.
        cx.with_leases(|leases, turn| leases.settle(tenant, used, taken_at, turn));
        if is_worker {
            learn::from_life(cx, tenant);
        }
    }
    cx.with_leases(|leases, turn| leases.watch_bounds(tenant, turn));
}

fn serve_lease_deadlines(cx: &mut Context<'_>) {
    cx.with_leases(LeaseTable::expire);
    for id in cx.leases.overdue(&cx.params.shed, cx.now) {
        if let Some(revocation) = cx.with_leases(|leases, turn| leases.escalate(id, turn)) {
            worker_orders::end_notification(cx, id, &revocation);
        }
    }
    cx.with_leases(LeaseTable::poll);
}
