//! Rehearsal of a stack: its start and two shortages, decided by the arbiter.
//!
//! All decisions come from the daemon's arbiter. It receives the events of a machine on which every holder uses its
//! grant and every action succeeds at once, so predictions equal later decisions.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::Duration,
};

use serde::{Deserialize, Serialize};

use cotenant_policy::{
    arbiter::Arbiter,
    event::{Action, EngineApplied, Event, WorkerResized},
    params::{ENGINE_TENANT, Params, ParamsError},
    pressure::{MemoryReading, PressureLevel, Sample},
    residency::{EnginePlan, ModelShape},
    shedding::Source,
    snapshot::{EngineState, WorkerState},
};
use cotenant_units::{Bytes, Timestamp};

/// Course of a stack on a machine of this size.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Rehearsal {
    /// Holders in the order of their starts.
    pub(crate) starts: Vec<Start>,
    pub(crate) peak: Bytes,
    pub(crate) held: Bytes,
    /// Budget remaining after the starts.
    pub(crate) headroom: Bytes,
    pub(crate) level: PressureLevel,
    /// Plan of the engine after the starts; `None` if it was not loaded.
    pub(crate) plan: Option<EnginePlan>,
    /// Holders that could not start for lack of memory.
    pub(crate) waiting: Vec<String>,
    /// Reclaims when other programs take memory, milder shortage first.
    pub(crate) shortages: Vec<Shortage>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Start {
    pub(crate) holder: String,
    /// Sum of all leases after it.
    pub(crate) held: Bytes,
}

/// Shortage and its cost.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Shortage {
    pub(crate) level: PressureLevel,
    /// Memory taken by other programs.
    pub(crate) taken_by_others: Bytes,
    /// Reclaims, in order.
    pub(crate) reclaimed: Vec<Reclaimed>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Reclaimed {
    /// Holder and means.
    #[serde(flatten)]
    pub(crate) source: Source,
    pub(crate) bytes: Bytes,
}

/// Rehearses the stack of `params`, with the engine's model of `shape`.
///
/// # Errors
///
/// If the parameters cannot work.
pub(crate) fn rehearse(
    params: &Params,
    shape: Option<&ModelShape>,
) -> Result<Rehearsal, ParamsError> {
    let mut params = params.clone();
    if shape.is_none() {
        params.engine = None;
    }
    let mut stage = Stage::new(params, shape.cloned())?;
    stage.run(START_TIME);
    let after = stage.arbiter.snapshot();
    let is_waiting = |state: &WorkerState| {
        matches!(state, WorkerState::AwaitingMemory | WorkerState::BackingOff)
    };
    let mut waiting: Vec<String> = after
        .workers
        .iter()
        .filter(|worker| is_waiting(&worker.state))
        .map(|worker| worker.name.clone())
        .collect();
    if shape.is_some() && after.engine.state != EngineState::Ready {
        waiting.insert(0, ENGINE_TENANT.to_owned());
    }
    let (elevated, critical) = (after.pressure.elevated_below, after.pressure.critical_below);
    let mut rehearsal = Rehearsal {
        starts: std::mem::take(&mut stage.starts),
        peak: stage.peak,
        held: after.memory.held,
        headroom: after.pressure.headroom.unwrap_or_default(),
        level: after.pressure.level,
        plan: after.engine.in_force,
        waiting,
        shortages: Vec::new(),
    };
    for (level, target) in [
        (
            PressureLevel::Elevated,
            Bytes::new(elevated.get().midpoint(critical.get())),
        ),
        (PressureLevel::Critical, Bytes::new(critical.get() / 2)),
    ] {
        rehearsal.shortages.push(stage.shortage(level, target));
    }
    Ok(rehearsal)
}

/// Arbiter, and a machine on which every action succeeds at once.
struct Stage {
    arbiter: Arbiter,
    params: Params,
    shape: Option<ModelShape>,
    now: Timestamp,
    used: BTreeMap<String, Bytes>,
    /// Workers that have completed their start.
    settled: BTreeSet<String>,
    others: Bytes,
    events: VecDeque<Event>,
    starts: Vec<Start>,
    peak: Bytes,
    reclaimed: Vec<Reclaimed>,
}

impl Stage {
    fn new(mut params: Params, shape: Option<ModelShape>) -> Result<Self, ParamsError> {
        // The loading time of a real machine would only delay the workers here.
        params.pressure.sample_age_max = START_TIME.saturating_mul(4);
        let arbiter = Arbiter::new(params.clone())?;
        let mut events = VecDeque::new();
        if let Some(shape) = &shape {
            events.push_back(Event::EngineInspected {
                shape: shape.clone(),
            });
        }
        Ok(Self {
            arbiter,
            params,
            shape,
            now: Timestamp::START,
            used: BTreeMap::new(),
            settled: BTreeSet::new(),
            others: Bytes::ZERO,
            events,
            starts: Vec::new(),
            peak: Bytes::ZERO,
            reclaimed: Vec::new(),
        })
    }

    fn run(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            self.sample();
            self.settle();
            self.peak = self.peak.max(self.arbiter.snapshot().memory.held);
            let tick = self.now + TICK;
            let due = self
                .arbiter
                .next_deadline()
                .filter(|due| *due > self.now && *due < tick);
            self.now = due.unwrap_or(tick);
            self.handle(Event::DeadlineReached);
            self.settle();
        }
    }

    /// Takes memory until the headroom is `target`, and returns the resulting reclaims.
    fn shortage(&mut self, level: PressureLevel, target: Bytes) -> Shortage {
        let headroom = self
            .arbiter
            .snapshot()
            .pressure
            .headroom
            .unwrap_or_default();
        let before = self.others;
        self.others = self.others.saturating_add(headroom.saturating_sub(target));
        self.reclaimed.clear();
        self.run(SHORTAGE_TIME);
        Shortage {
            level,
            taken_by_others: self.others.saturating_sub(before),
            reclaimed: std::mem::take(&mut self.reclaimed),
        }
    }

    fn sample(&mut self) {
        let used: Bytes = self.used.values().copied().sum();
        let taken = [self.params.budget.reserve, used, self.others];
        let total = self.params.budget.total;
        let available = taken.into_iter().fold(total, Bytes::saturating_sub);
        self.handle(Event::Sampled(Sample {
            taken_at: self.now,
            memory: MemoryReading {
                mem_total: total,
                mem_available: available,
                mem_free: available,
                group: None,
            },
            scope_used: Some(used.saturating_add(self.others)),
            ..Sample::default()
        }));
        let measured: Vec<_> = self
            .used
            .iter()
            .map(|(name, used)| (name.clone(), *used))
            .collect();
        for (name, used) in measured {
            self.measured(name, used);
        }
    }

    fn measured(&mut self, tenant: String, used: Bytes) {
        self.handle(Event::Measured {
            tenant,
            used: Some(used),
            taken_at: self.now,
        });
    }

    /// Feeds the arbiter the outcomes of its actions until there are none left.
    fn settle(&mut self) {
        for _ in 0..EVENTS_MAX {
            let Some(event) = self.events.pop_front() else {
                return;
            };
            self.handle(event);
        }
    }

    fn handle(&mut self, event: Event) {
        let actions = self.arbiter.handle(self.now, event);
        for action in actions {
            self.perform(action);
        }
    }

    fn perform(&mut self, action: Action) {
        match action {
            Action::InspectModel | Action::ReinspectModel => {
                let shape = self.shape.clone();
                self.events
                    .extend(shape.map(|shape| Event::EngineInspected { shape }));
            }
            Action::LoadEngine { revision, plan } => {
                self.started(ENGINE_TENANT);
                self.apply(revision, plan);
            }
            Action::ApplyPlan { revision, plan, .. } => self.apply(revision, plan),
            Action::StartWorker { worker, variant } => self.start(&worker, variant.as_deref()),
            Action::StopWorker { worker, .. } => {
                self.used.insert(worker.clone(), Bytes::ZERO);
                self.events.push_back(Event::WorkerExited {
                    worker,
                    intended: true,
                    cause: String::new(),
                });
            }
            Action::ResizeWorker { worker, variant } => {
                let steady = self
                    .params
                    .worker(&worker)
                    .map(|it| it.steady_of(Some(&variant)));
                self.used.insert(worker.clone(), steady.unwrap_or_default());
                self.events.push_back(Event::WorkerResized(WorkerResized {
                    worker,
                    variant,
                    used: steady,
                    error: None,
                }));
            }
            Action::Measure { tenant } => {
                let used = self.used.get(&tenant).copied();
                self.events.push_back(Event::Measured {
                    tenant,
                    used,
                    taken_at: self.now,
                });
            }
            Action::Weighed { weighing } => {
                for weighed in weighing.candidates {
                    self.note(weighed.source, weighed.chosen.unwrap_or_default());
                }
            }
            _ => {}
        }
    }

    fn note(&mut self, source: Source, bytes: Bytes) {
        if bytes == Bytes::ZERO {
            return;
        }
        match self
            .reclaimed
            .iter_mut()
            .find(|before| before.source == source)
        {
            Some(before) => before.bytes = before.bytes.saturating_add(bytes),
            None => self.reclaimed.push(Reclaimed { source, bytes }),
        }
    }

    fn start(&mut self, worker: &str, variant: Option<&str>) {
        self.started(worker);
        let steady = self.params.worker(worker).map(|it| it.steady_of(variant));
        self.used
            .insert(worker.to_owned(), steady.unwrap_or_default());
        let pid = FIRST_PID.saturating_add(u32::try_from(self.settled.len()).unwrap_or(u32::MAX));
        self.settled.insert(worker.to_owned());
        self.events.push_back(Event::WorkerReady {
            worker: worker.to_owned(),
            pid,
        });
    }

    fn started(&mut self, holder: &str) {
        let held = self.arbiter.snapshot().memory.held;
        self.peak = self.peak.max(held);
        if self.starts.iter().all(|start| start.holder != holder) {
            self.starts.push(Start {
                holder: holder.to_owned(),
                held,
            });
        }
    }

    fn apply(&mut self, revision: u64, plan: EnginePlan) {
        let Some(shape) = &self.shape else { return };
        let used = shape.plan_bytes(&plan);
        let before = self
            .used
            .insert(ENGINE_TENANT.to_owned(), used)
            .unwrap_or_default();
        self.events.push_back(Event::EngineApplied(EngineApplied {
            freed: before.saturating_sub(used),
            ..EngineApplied::new(revision, plan, used, APPLYING)
        }));
    }
}

/// Longer than the default wait of workers for an engine that does not load, and than the dwell before it grows.
const START_TIME: Duration = Duration::from_secs(135);
/// Longer than the grace of Elevated, shorter than the dwell.
const SHORTAGE_TIME: Duration = Duration::from_secs(15);
const TICK: Duration = Duration::from_secs(1);
/// Our choice: reading a plan of several GiB takes longer, releasing memory less.
const APPLYING: Duration = Duration::from_millis(20);
/// Limit on events caused by one tick.
const EVENTS_MAX: usize = 10_000;
const FIRST_PID: u32 = 1000;
