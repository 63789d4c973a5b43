//! Exhaustive search of an engine, a worker and a tenant.
//!
//! A budget of 100 MiB filled by an engine and a worker, and a tenant that asks for more than is left. The engine
//! performs its orders, keeps more than requested because it is in use, falsely reports compliance, fails at an order,
//! or dies; the worker becomes ready, works, sleeps and is woken, ends on request or by itself. Both are measured now,
//! or as they were a second ago.

use std::{
    collections::{BTreeSet, VecDeque},
    hash::{DefaultHasher, Hash, Hasher},
    mem,
    time::Duration,
};

use cotenant::{
    policy::{
        engine_failure::Cure,
        event::{Action, Answer, EngineApplied, Event, LeaseCall, TargetAnswered, WorkerCommand},
        lease::{Class, LeaseId, LeaseRequest, LeaseState, Peer, TargetAnswer, Ticket},
        params::{ENGINE_TENANT, EngineParams, RestParams, StartParams, WorkerParams},
        pressure::{MemoryReading, PressureLevel, Sample},
        residency::{EnginePlan, KvShape, LayerKind, LayerShape, ModelShape},
        snapshot::{EngineState, Snapshot, WorkerState},
    },
    units::{Bytes, Timestamp, Tokens},
};

use super::{BUDGET, Hashed, search::Book, small_params};
use crate::{
    device::mib,
    planted::{Planted, Subject},
};

const WORKER: &str = "tts";
const TENANT: &str = "t0";
const HOLDERS: [&str; 3] = [ENGINE_TENANT, WORKER, TENANT];
const WORKER_PEAK: Bytes = mib(20);
const WORKER_STEADY: Bytes = mib(15);
const TERM: Duration = Duration::from_secs(2);
const MOMENT: Duration = Duration::from_millis(300);
const SECOND: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Letter {
    /// The tenant asks for more than is left, waits for it, and uses all of it at once.
    Ask(Class),
    Release,
    /// The tenant dies.
    Leave,
    /// The tenant shrinks to its target.
    Obey,
    /// The engine performs its next order.
    Apply,
    /// It reports its next order as performed without releasing anything.
    Pretend,
    FailOrder,
    EngineDies,
    /// An answer begins and fills the context, or ends.
    Talk,
    Hush,
    WorkerReady,
    /// The worker ends, on request or by itself.
    WorkerEnds,
    WorkerWorks,
    WorkerRests,
    WorkerWanted,
    Measure(&'static str),
    /// A measurement of a second ago arrives.
    MeasureLate(&'static str),
    Sample,
    /// A sample of a second ago arrives.
    SampleLate,
    /// Until the next deadline.
    Tick,
    /// A whole term.
    Wait,
    /// The machine stalls: nothing is served meanwhile.
    Standstill(Duration),
}

/// Real use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Use {
    engine: Bytes,
    worker: Bytes,
    tenant: Bytes,
}

impl Use {
    fn sum(self) -> Bytes {
        self.engine + self.worker + self.tenant
    }

    fn of(self, name: &str) -> Bytes {
        match name {
            ENGINE_TENANT => self.engine,
            WORKER => self.worker,
            _ => self.tenant,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Life {
    Gone,
    Starting,
    Ready,
}

#[derive(Clone)]
pub(super) struct Home {
    arbiter: Subject,
    shape: ModelShape,
    now: Timestamp,
    used: Use,
    /// Use by time, over the last second.
    history: VecDeque<(Timestamp, Use)>,
    in_force: Option<EnginePlan>,
    orders: VecDeque<(u64, EnginePlan)>,
    /// Context of the running answer, which is not released.
    kv_used: u32,
    worker: Life,
    stopping: bool,
    works: bool,
    lease: Option<(LeaseId, u64)>,
    target: Option<(u64, Bytes)>,
    term_ends: Timestamp,
    asked: bool,
    tickets: u64,
    open: Vec<Ticket>,
    /// Holders due for measurement.
    to_measure: BTreeSet<String>,
}

fn shape() -> ModelShape {
    ModelShape {
        name: "sim".to_owned(),
        architecture: "qwen35".to_owned(),
        layers: vec![LayerShape::new(LayerKind::Attention, 0, mib(12)); 4],
        fixed_bytes: mib(5),
        state_bytes: mib(1),
        kv: KvShape {
            attention_layers: 4,
            kv_heads: 2,
            head_dim: 128,
            element_bytes: 2,
            granule: Bytes::ZERO,
            block_tokens: Tokens::new(512),
            windowed: None,
        },
        context_max: Tokens::new(2048),
        workspace_fixed_bytes: mib(2),
        workspace_bytes_per_token: Bytes::ZERO,
        ring_bytes: mib(6),
    }
}

impl Home {
    /// The engine with its full plan, the worker running, every holder measured.
    pub(super) fn new(planted: Option<Planted>) -> Self {
        let mut params = small_params();
        params.engine = Some(EngineParams {
            kv_wanted: Tokens::new(2048),
            kv_floor: Tokens::new(512),
            apply_timeout: Duration::from_millis(500),
            load_timeout: Duration::from_secs(5),
            ..EngineParams::default()
        });
        params.workers = vec![WorkerParams {
            name: WORKER.to_owned(),
            class: Class::Interactive,
            steady: WORKER_STEADY,
            peak: WORKER_PEAK,
            stop_grace: MOMENT,
            start: StartParams {
                ready_timeout: Duration::from_secs(2),
                ..StartParams::default()
            },
            rest: RestParams {
                idle_stop_after: Some(Duration::from_millis(1500)),
                ..RestParams::default()
            },
            ..WorkerParams::default()
        }];
        let mut home = Self {
            arbiter: Subject::new(&params, planted),
            shape: shape(),
            now: Timestamp::from_millis(2000),
            used: Use::default(),
            history: VecDeque::new(),
            in_force: None,
            orders: VecDeque::new(),
            kv_used: 0,
            worker: Life::Gone,
            stopping: false,
            works: false,
            lease: None,
            target: None,
            term_ends: Timestamp::START,
            asked: false,
            tickets: 0,
            open: Vec::new(),
            to_measure: BTreeSet::new(),
        };
        let shape = home.shape.clone();
        home.take(Letter::Sample).unwrap();
        home.tell(Event::EngineInspected { shape }).unwrap();
        for _ in 0..4 {
            home.to_measure.extend(HOLDERS.map(str::to_owned));
            home.be_good().unwrap();
            home.take(Letter::Sample).unwrap();
        }
        assert!(home.is_whole(), "{:?}", home.arbiter.snapshot());
        home
    }

    /// The same, with an urgent tenant for which the engine is asked to make room.
    pub(super) fn asked(mut self) -> Self {
        self.take(Letter::Ask(Class::AudioRealtime)).unwrap();
        assert!(!self.orders.is_empty(), "the engine has not been asked");
        self
    }

    /// The engine has its full plan, and the worker is running.
    fn is_whole(&self) -> bool {
        let seen = self.arbiter.snapshot();
        seen.engine.state == EngineState::Ready
            && self.orders.is_empty()
            && self.in_force.as_ref().is_some_and(|plan| {
                plan.resident.len() == self.shape.layers.len() && plan.kv_capacity.get() == 2048
            })
            && seen
                .workers
                .iter()
                .all(|worker| worker.state == WorkerState::Ready)
    }

    fn ago(&self) -> Timestamp {
        Timestamp::START + self.now.since_start().saturating_sub(SECOND)
    }

    /// Use at that time.
    fn used_at(&self, then: Timestamp) -> Use {
        let before = self.history.iter().rev().find(|(from, _)| *from <= then);
        before
            .or(self.history.front())
            .map_or(self.used, |(_, used)| *used)
    }

    fn note_use(&mut self) {
        if self
            .history
            .back()
            .is_none_or(|(_, used)| *used != self.used)
        {
            self.history.push_back((self.now, self.used));
        }
        let ago = self.ago();
        while self.history.get(1).is_some_and(|(from, _)| *from <= ago) {
            self.history.pop_front();
        }
    }

    fn ticket(&mut self) -> Ticket {
        self.tickets += 1;
        self.open.push(Ticket(self.tickets));
        Ticket(self.tickets)
    }

    fn sample(&self, at: Timestamp) -> Event {
        Event::Sampled(Sample {
            taken_at: at,
            memory: MemoryReading {
                mem_total: Bytes::from_gib(1),
                mem_available: Bytes::from_mib(512),
                mem_free: Bytes::from_mib(512),
                group: None,
            },
            scope_used: Some(self.used_at(at).sum()),
            ..Sample::default()
        })
    }

    fn happens(&mut self, letter: Letter) -> Result<(), String> {
        let peer = Peer {
            uid: 1,
            ..Peer::default()
        };
        match letter {
            Letter::Ask(class) => {
                self.asked = true;
                let ticket = self.ticket();
                self.tell(Event::LeaseRequested {
                    ticket,
                    request: LeaseRequest {
                        tenant: TENANT.to_owned(),
                        request_id: String::new(),
                        peer,
                        class,
                        min: mib(30),
                        max: mib(40),
                        term: Some(TERM),
                        wait: Duration::from_secs(5),
                        validate_only: false,
                        cgroup: None,
                    },
                })
            }
            Letter::Release => {
                let (lease, generation) = self.lease.take().unwrap();
                (self.used.tenant, self.target) = (Bytes::ZERO, None);
                let ticket = self.ticket();
                self.tell(Event::LeaseReleased(LeaseCall {
                    ticket,
                    lease,
                    generation,
                    peer,
                }))
            }
            Letter::Leave => {
                let (lease, _) = self.lease.take().unwrap();
                (self.used.tenant, self.target) = (Bytes::ZERO, None);
                self.tell(Event::HolderLost { lease, pid: None })
            }
            Letter::Obey => {
                let (nonce, bytes) = self.target.take().unwrap();
                self.used.tenant = self.used.tenant.min(bytes);
                self.tell(Event::TargetAnswered(TargetAnswered {
                    lease: self.lease.unwrap().0,
                    nonce,
                    answer: TargetAnswer::Applied,
                    claimed: Some(bytes),
                }))
            }
            Letter::Apply | Letter::Pretend => {
                let (revision, mut plan) = self.orders.pop_front().unwrap();
                let before = self.used.engine;
                let kept = self
                    .kv_used
                    .next_multiple_of(self.shape.kv.block_tokens.get());
                plan.kv_capacity = plan.kv_capacity.max(Tokens::new(kept));
                let bytes = self.shape.plan_bytes(&plan);
                if letter == Letter::Apply || bytes > before {
                    self.used.engine = bytes;
                }
                self.in_force = Some(plan.clone());
                self.tell(Event::EngineApplied(EngineApplied {
                    revision,
                    in_force: plan,
                    freed: before.saturating_sub(self.used.engine),
                    used: self.used.engine,
                    untouched: Bytes::ZERO,
                    untouched_given: Bytes::ZERO,
                    took: Duration::from_millis(3),
                }))
            }
            Letter::FailOrder => {
                let (revision, _) = self.orders.pop_front().unwrap();
                self.tell(Event::EngineApplyFailed {
                    revision,
                    reason: "cannot".to_owned(),
                })
            }
            Letter::EngineDies => {
                self.orders.clear();
                (self.used.engine, self.in_force, self.kv_used) = (Bytes::ZERO, None, 0);
                self.tell(Event::EngineFailed {
                    reason: "dies".to_owned(),
                    cure: Cure::Reload,
                    left: None,
                })
            }
            Letter::Talk | Letter::Hush => {
                let capacity = self
                    .in_force
                    .as_ref()
                    .map_or(0, |plan| plan.kv_capacity.get());
                self.kv_used = if letter == Letter::Talk { capacity } else { 0 };
                self.tell(Event::EngineActivity {
                    requests: u32::from(letter == Letter::Talk),
                    kv_used: self.kv_used,
                    kv_kept: 0,
                    kv_prompt: 0,
                    kv_most: 0,
                    kv_droppable: 0,
                    kv_dropped: 0,
                    untouched: Bytes::ZERO,
                    beside: Vec::new(),
                })
            }
            Letter::WorkerReady => {
                self.worker = Life::Ready;
                self.used.worker = WORKER_STEADY;
                self.tell(Event::WorkerReady {
                    worker: WORKER.to_owned(),
                    pid: 1,
                })
            }
            Letter::WorkerEnds => {
                let intended = mem::take(&mut self.stopping);
                (self.worker, self.works, self.used.worker) = (Life::Gone, false, Bytes::ZERO);
                self.tell(Event::WorkerExited {
                    worker: WORKER.to_owned(),
                    intended,
                    cause: "exit code 0".to_owned(),
                })
            }
            Letter::WorkerWorks | Letter::WorkerRests => {
                self.works = letter == Letter::WorkerWorks;
                self.tell(Event::WorkerActivity {
                    worker: WORKER.to_owned(),
                    requests: u32::from(self.works),
                })
            }
            Letter::WorkerWanted => self.tell(Event::WorkerWanted {
                worker: WORKER.to_owned(),
                client: None,
            }),
            Letter::Measure(name) => self.measured(name, self.now),
            Letter::MeasureLate(name) => self.measured(name, self.ago()),
            Letter::Sample => self.tell(self.sample(self.now)),
            Letter::SampleLate => self.tell(self.sample(self.ago())),
            Letter::Tick => {
                self.now = self.arbiter.next_deadline().unwrap().max(self.now);
                self.end_term();
                self.tell(Event::DeadlineReached)
            }
            Letter::Wait => self.until(self.now + TERM, false),
            Letter::Standstill(pause) => {
                self.now = self.now + pause;
                self.end_term();
                Ok(())
            }
        }
    }

    fn measured(&mut self, name: &str, taken_at: Timestamp) -> Result<(), String> {
        let used = Some(self.used_at(taken_at).of(name));
        self.tell(Event::Measured {
            tenant: name.to_owned(),
            used,
            taken_at,
        })
    }

    /// Advances time with every deadline at its instant; if `good`, every holder complies.
    fn until(&mut self, end: Timestamp, good: bool) -> Result<(), String> {
        for _ in 0..4000 {
            let Some(due) = self.arbiter.next_deadline().filter(|due| *due <= end) else {
                break;
            };
            self.now = due.max(self.now);
            self.end_term();
            self.tell(Event::DeadlineReached)?;
            if good {
                self.be_good()?;
            }
        }
        self.now = end.max(self.now);
        self.end_term();
        self.tell(Event::DeadlineReached)
    }

    /// A tenant without messages for a term releases its memory.
    fn end_term(&mut self) {
        if self.lease.is_some() && self.term_ends <= self.now {
            (self.lease, self.target, self.used.tenant) = (None, None, Bytes::ZERO);
            self.note_use();
        }
    }

    /// Performs all orders, and measures every holder.
    fn be_good(&mut self) -> Result<(), String> {
        while !self.orders.is_empty() {
            self.take(Letter::Apply)?;
        }
        match self.worker {
            Life::Starting => self.take(Letter::WorkerReady)?,
            _ if self.stopping => self.take(Letter::WorkerEnds)?,
            _ => {}
        }
        if self.target.is_some() {
            self.take(Letter::Obey)?;
        }
        for name in HOLDERS {
            if self.to_measure.remove(name) {
                self.take(Letter::Measure(name))?;
            }
        }
        Ok(())
    }

    fn tell(&mut self, event: Event) -> Result<(), String> {
        self.note_use();
        let actions = self.arbiter.handle(self.now, event);
        for action in actions {
            self.follow(action)?;
        }
        self.note_use();
        self.check(&self.arbiter.snapshot())
    }

    /// The total fits, each holder's share covers its real use, and no busy worker is stopped while the engine could
    /// shed.
    fn check(&self, seen: &Snapshot) -> Result<(), String> {
        if seen.memory.held > BUDGET {
            return Err(format!(
                "over-commit: {} is held of {BUDGET}",
                seen.memory.held
            ));
        }
        for name in HOLDERS {
            let held: Bytes = seen
                .leases
                .iter()
                .filter(|lease| lease.tenant == name && lease.state != LeaseState::Requested)
                .map(|lease| lease.memory.held)
                .sum();
            let used = self.used.of(name);
            if held < used {
                return Err(format!(
                    "no book covers {name}: it really uses {used} and holds {held}"
                ));
            }
        }
        Ok(())
    }

    fn follow(&mut self, action: Action) -> Result<(), String> {
        match action {
            Action::Answer { ticket, answer } => {
                let Some(place) = self.open.iter().position(|open| *open == ticket) else {
                    return Err(format!("{ticket:?} is answered twice, or was never asked"));
                };
                self.open.remove(place);
                if let Answer::Lease { lease } = answer {
                    self.lease = Some((lease.id, lease.generation));
                    self.used.tenant = lease.memory.held;
                    self.term_ends = lease.expires_at.unwrap();
                }
            }
            Action::SetTarget {
                lease,
                nonce,
                bytes,
                ..
            } if self.lease.is_some_and(|(mine, _)| mine == lease) => {
                self.target = Some((nonce, bytes));
            }
            Action::EndLease { lease, .. }
                if self.lease.is_some_and(|(mine, _)| mine == lease.id) =>
            {
                (self.lease, self.target, self.used.tenant) = (None, None, Bytes::ZERO);
            }
            Action::LoadEngine { revision, plan } => {
                if self.in_force.is_some() {
                    return Err("a model is loaded beside one that is there".to_owned());
                }
                self.orders.push_back((revision, plan));
            }
            Action::ApplyPlan { revision, plan, .. } => {
                let floor = 512;
                if plan.kv_capacity.get() < floor {
                    return Err(format!("the engine is asked below its floor: {plan:?}"));
                }
                // A plan for an engine that has just died has no recipient.
                if self.in_force.is_some() || !self.orders.is_empty() {
                    self.orders.push_back((revision, plan));
                }
            }
            Action::StartWorker { .. } => {
                if self.worker != Life::Gone {
                    return Err("a worker is started that is there".to_owned());
                }
                (self.worker, self.used.worker) = (Life::Starting, WORKER_PEAK);
            }
            Action::StopWorker { .. } => {
                self.stopping = self.worker != Life::Gone;
            }
            Action::Measure { tenant } => {
                self.to_measure.insert(tenant);
            }
            _ => {}
        }
        Ok(())
    }
}

impl Book for Home {
    type Letter = Letter;

    fn letters(&self) -> Vec<Letter> {
        let mut letters = vec![
            Letter::Sample,
            Letter::SampleLate,
            Letter::Wait,
            Letter::Standstill(MOMENT),
            Letter::Measure(ENGINE_TENANT),
            Letter::MeasureLate(ENGINE_TENANT),
        ];
        if self.arbiter.next_deadline().is_some() {
            letters.push(Letter::Tick);
        }
        if !self.asked {
            letters.extend([Letter::Ask(Class::AudioRealtime), Letter::Ask(Class::Batch)]);
        }
        if self.lease.is_some() {
            letters.extend([
                Letter::Release,
                Letter::Leave,
                Letter::Measure(TENANT),
                Letter::MeasureLate(TENANT),
            ]);
        }
        if self.target.is_some() {
            letters.push(Letter::Obey);
        }
        if let Some((_, plan)) = self.orders.front() {
            letters.extend([Letter::Apply, Letter::FailOrder]);
            if self.shape.plan_bytes(plan) < self.used.engine {
                letters.push(Letter::Pretend);
            }
        }
        if self.in_force.is_some() {
            letters.push(Letter::EngineDies);
            letters.push(if self.kv_used == 0 {
                Letter::Talk
            } else {
                Letter::Hush
            });
        }
        match self.worker {
            Life::Gone => letters.push(Letter::WorkerWanted),
            Life::Starting => letters.extend([Letter::WorkerReady, Letter::WorkerEnds]),
            Life::Ready => {
                letters.extend([
                    Letter::WorkerEnds,
                    Letter::Measure(WORKER),
                    Letter::MeasureLate(WORKER),
                ]);
                letters.push(if self.works {
                    Letter::WorkerRests
                } else {
                    Letter::WorkerWorks
                });
            }
        }
        letters
    }

    fn take(&mut self, letter: Letter) -> Result<(), String> {
        self.happens(letter)?;
        self.now = self.now + Duration::from_millis(1);
        self.end_term();
        Ok(())
    }

    /// No client is active any more, and every holder complies: every request must be answered, the engine back at its
    /// full plan, and the worker running once it is wanted.
    fn settles(mut self) -> Result<(), String> {
        self.take(Letter::Hush)?;
        if self.works {
            self.take(Letter::WorkerRests)?;
        }
        let mut whole = 0;
        for second in 0..PATIENCE_S {
            self.to_measure.extend(HOLDERS.map(str::to_owned));
            self.be_good()?;
            self.take(Letter::Sample)?;
            // Operators repair abandoned holders, and clients ask for the worker.
            let seen = self.arbiter.snapshot();
            if seen.engine.state == EngineState::Failed && second > PATIENCE_S / 2 {
                let shape = self.shape.clone();
                self.tell(Event::EngineInspected { shape })?;
            }
            match seen.workers[0].state {
                WorkerState::Degraded => {
                    let ticket = self.ticket();
                    self.tell(Event::OperatorWorker {
                        ticket,
                        worker: WORKER.to_owned(),
                        command: WorkerCommand::Start,
                        by: None,
                    })?;
                }
                WorkerState::Stopped => self.take(Letter::WorkerWanted)?,
                _ => {}
            }
            self.be_good()?;
            let seen = self.arbiter.snapshot();
            let is_whole = self.is_whole()
                && self.open.is_empty()
                && seen.waiting == 0
                && seen.pressure.level == PressureLevel::Normal
                && seen.leases.len() == 2;
            whole = if is_whole { whole + 1 } else { 0 };
            if whole == 2 {
                return Ok(());
            }
            self.until(self.now + SECOND, true)?;
        }
        let seen = self.arbiter.snapshot();
        Err(format!(
            "not settled after {PATIENCE_S} s: {:?} wait; pressure is {}; the engine is {:?} with {:?}; the worker is {:?}; {:?}",
            self.open,
            seen.pressure.level,
            seen.engine.state,
            self.in_force,
            seen.workers[0].state,
            seen.leases
        ))
    }

    fn fingerprint(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        serde_json::to_writer(
            Hashed(&mut hasher),
            &(
                &self.arbiter,
                &self.in_force,
                &self.orders,
                self.lease,
                self.target,
            ),
        )
        .unwrap();
        (
            self.now,
            self.used,
            &self.history,
            self.kv_used,
            self.worker,
        )
            .hash(&mut hasher);
        (
            self.stopping,
            self.works,
            self.term_ends,
            self.asked,
            &self.open,
            &self.to_measure,
        )
            .hash(&mut hasher);
        hasher.finish()
    }
}

/// Longer than the longest backoff after a few failures. Our choice.
const PATIENCE_S: u32 = 90;
