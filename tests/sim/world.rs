//! World around the arbiter: events, their times, and real memory use.

mod letters;
mod tenants;

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use cotenant::{
    policy::{
        engine_failure::Cure,
        event::{Action, Event, WorkerCommand, WorkerResize, WorkerResized},
        kv_type::KvType,
        lease::{LeaseId, Target, Ticket},
        params::Scope,
        pressure::{GpuReading, MemoryReading, Sample},
        snapshot::{EngineState, Rest, WorkerState},
    },
    rpc::target::Verdict,
    units::{Bytes, Timestamp},
};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use self::letters::{choose_high_water, choose_letters, choose_names};
use crate::{
    device::{self, Device, mib, millis},
    engine::Engine,
    faults::Faults,
    planted::{Planted, Subject},
    tenant::{Manners, Tenant},
    worker::{State, Worker},
};

/// A future happening.
#[derive(Clone, Debug)]
pub(crate) enum Happening {
    Deliver(Box<Event>),
    Sample,
    Measure(String),
    EngineCommand {
        life: u32,
    },
    EngineDies {
        life: u32,
    },
    Generate,
    TenantTurn(usize),
    TenantObeys {
        index: usize,
        lease: LeaseId,
        nonce: u64,
        bytes: Bytes,
        answers: bool,
    },
    TenantDefers {
        index: usize,
        target: Target,
        lease: LeaseId,
    },
    /// Its stream is restored, or was never lost: it learns that its lease has ended.
    TenantHearsEnd {
        index: usize,
        lease: LeaseId,
    },
    TenantLeaves {
        index: usize,
    },
    WorkerReady {
        name: String,
        life: u32,
    },
    WorkerExits {
        name: String,
        life: u32,
        intended: bool,
    },
    WorkerChanges {
        name: String,
        life: u32,
        variant: String,
    },
    WorkerShrinks {
        name: String,
        life: u32,
        bytes: Bytes,
    },
    WorkerTurn(String),
    Neighbour,
    Operator,
}

pub(crate) struct World {
    pub(crate) now: Timestamp,
    pub(crate) arbiter: Subject,
    pub(crate) device: Device,
    pub(crate) faults: Faults,
    pub(crate) calm: bool,
    pub(crate) engine: Engine,
    pub(crate) tenants: Vec<Tenant>,
    pub(crate) workers: BTreeMap<String, Worker>,
    neighbour: Bytes,
    rng: ChaCha8Rng,
    /// Source of events that only some histories have: see [`letters`].
    letters: Option<ChaCha8Rng>,
    /// Source of memory taken by requests of workers, in some histories.
    breath: Option<ChaCha8Rng>,
    /// Source of readings of workers' peaks, in some histories.
    high_water: Option<ChaCha8Rng>,
    /// The most that each worker has used in each of its variants, or in the variant assumed by the arbiter.
    pub(crate) used_most: BTreeMap<Variant, Bytes>,
    happenings: BTreeMap<(Timestamp, u64), Happening>,
    order: u64,
    tickets: u64,
    next_sample: Option<(Timestamp, u64)>,
    measured_at: Timestamp,
    /// Time of the last jump, after which everything is late.
    pub(crate) jumped_at: Timestamp,
    pub(crate) restarts: u64,
    /// Verdicts on replies to targets.
    pub(crate) verdicts: BTreeMap<Verdict, u64>,
    /// A sample that may be repeated.
    old_sample: Option<Sample>,
    /// Tenants notified of the end of their lease, and about to leave.
    leaving: BTreeSet<usize>,
}

impl World {
    pub(crate) fn new(seed: u64, planted: Option<Planted>) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let faults = Faults::choose(&mut rng);
        let mut device = device::choose(&mut rng);
        device::choose_habits(seed, &mut device);
        device::choose_hopeless(seed, &mut device);
        device::choose_ageing(seed, &mut device);
        let breathing = device::choose_breathing(seed, &mut device);
        let mut tenants = (0..rng.random_range(0..6))
            .map(|index| Tenant::new(index, &mut rng, &faults))
            .collect::<Vec<_>>();
        let letters = choose_letters(seed, &mut tenants);
        choose_names(seed, &mut tenants);
        let mut workers: BTreeMap<String, Worker> = device
            .params
            .workers
            .iter()
            .map(|worker| (worker.name.clone(), Worker::new(worker)))
            .collect();
        for (name, breath) in &breathing {
            if let Some(worker) = workers.get_mut(name) {
                worker.breathes = Some(*breath);
            }
        }
        let mut world = Self {
            now: Timestamp::START,
            arbiter: Subject::new(&device.params, planted),
            engine: Engine::new(seed, device.shape.as_ref()),
            device,
            faults,
            calm: false,
            tenants,
            workers,
            neighbour: Bytes::ZERO,
            rng,
            letters,
            breath: (!breathing.is_empty()).then(|| ChaCha8Rng::seed_from_u64(!seed)),
            high_water: choose_high_water(seed),
            used_most: BTreeMap::new(),
            happenings: BTreeMap::new(),
            order: 0,
            tickets: 0,
            next_sample: None,
            measured_at: Timestamp::START,
            jumped_at: Timestamp::START,
            restarts: 0,
            verdicts: BTreeMap::new(),
            old_sample: None,
            leaving: BTreeSet::new(),
        };
        world.begin();
        for (at, calibration) in device::choose_speeds(seed) {
            world.after(
                at,
                Happening::Deliver(Box::new(Event::EngineCalibrated(calibration))),
            );
        }
        world
    }

    fn begin(&mut self) {
        self.plan_sample(Duration::ZERO);
        if let Some(shape) = self.device.shape.clone() {
            let wait = millis(&mut self.rng, 0, 50);
            self.after(
                wait,
                Happening::Deliver(Box::new(Event::EngineInspected { shape })),
            );
            self.after(Duration::from_millis(500), Happening::Generate);
        }
        for index in 0..self.tenants.len() {
            let wait = millis(&mut self.rng, 0, 2000);
            self.after(wait, Happening::TenantTurn(index));
        }
        for name in self.workers.keys().cloned().collect::<Vec<_>>() {
            self.after(Duration::from_millis(700), Happening::WorkerTurn(name));
        }
        if self.faults.neighbour.exists() || self.faults.storms.exists() {
            self.after(Duration::from_millis(900), Happening::Neighbour);
        }
        if self.faults.operators.exists() {
            self.after(Duration::from_millis(800), Happening::Operator);
        }
    }

    /// The next event for the arbiter: one of the world, or a due deadline.
    pub(crate) fn next_event(&mut self) -> Event {
        if self.faults.clock_forward.strikes(&mut self.rng, 0.003) {
            let stood_still = millis(&mut self.rng, 100, 20_000);
            self.now = self.now + stood_still;
            self.jumped_at = self.now;
        }
        if self.arbiter.restarts() && self.faults.restarts.strikes(&mut self.rng, 0.004) {
            self.restart();
        }
        loop {
            let deadline = self.arbiter.next_deadline();
            let first = self.happenings.first_key_value().map(|((at, _), _)| *at);
            match (deadline, first) {
                (Some(deadline), first) if first.is_none_or(|first| deadline < first) => {
                    self.now = deadline.max(self.now);
                    return Event::DeadlineReached;
                }
                (_, Some(_)) => {
                    let ((at, order), happening) = self.happenings.pop_first().unwrap();
                    self.now = at.max(self.now);
                    if self.next_sample == Some((at, order)) {
                        self.next_sample = None;
                    }
                    if let Some(event) = self.happen(happening) {
                        return event;
                    }
                }
                (_, None) => unreachable!("the sampler never stops"),
            }
        }
    }

    /// The time reported to the arbiter: usually the real one.
    pub(crate) fn reported_time(&mut self, event: &Event) -> Timestamp {
        if !matches!(event, Event::DeadlineReached)
            && self.faults.clock_back.strikes(&mut self.rng, 0.02)
        {
            let back = millis(&mut self.rng, 1, 5000);
            let since = self.now.since_start().saturating_sub(back);
            return Timestamp::START + since;
        }
        self.now
    }

    /// The supervisor is killed between two events and resumes from its checkpoint: the state survives as text, events
    /// in flight are late by the duration of the start.
    fn restart(&mut self) {
        self.restarts += 1;
        self.arbiter.restart();
        let gap = millis(&mut self.rng, 10, 900);
        self.now = self.now + gap;
        self.jumped_at = self.now;
    }

    /// Real use of compliant holders, by name.
    pub(crate) fn honest_use(&self) -> BTreeMap<Process, Bytes> {
        let mut used = BTreeMap::new();
        used.insert(
            ("llm".to_owned(), None),
            self.engine.used(self.device.shape.as_ref()),
        );
        // Memory of requests is in no ledger before it is measured.
        for worker in self
            .workers
            .values()
            .filter(|worker| worker.breathes.is_none())
        {
            used.insert((worker.params.name.clone(), None), worker.used);
        }
        for (index, tenant) in self.tenants.iter().enumerate() {
            if tenant.is_honest() && tenant.relies(self.now) && !self.leaving.contains(&index) {
                used.insert((tenant.name.clone(), tenant.pid), tenant.used);
            }
        }
        used
    }

    /// Real use of holders that have not grown since they were asked to come down, non-compliant holders included.
    pub(crate) fn word_use(&self) -> BTreeMap<Process, Bytes> {
        let known = self.tenants.iter().enumerate().filter(|(index, tenant)| {
            matches!(tenant.manners, Manners::Honest | Manners::Misreporting)
                && tenant.relies(self.now)
                && !self.leaving.contains(index)
        });
        known
            .map(|(_, tenant)| ((tenant.name.clone(), tenant.pid), tenant.used))
            .collect()
    }

    /// Use of processes that comply under each of their names. Empty in a world with late notifications, measurements
    /// or replies.
    pub(crate) fn keeping(&self) -> BTreeMap<u32, Bytes> {
        let faults = &self.faults;
        let late = [
            faults.clock_forward,
            faults.lost_measurements,
            faults.lost_streams,
            faults.restarts,
        ];
        if late.iter().any(|fault| fault.exists()) {
            return BTreeMap::new();
        }
        let mut keeping: BTreeMap<u32, Option<Bytes>> = BTreeMap::new();
        for tenant in &self.tenants {
            if let Some(pid) = tenant.pid {
                let used = keeping.entry(pid).or_insert(Some(Bytes::ZERO));
                *used = used
                    .filter(|_| tenant.is_honest() && tenant.measurable)
                    .map(|sum| sum + tenant.used);
            }
        }
        keeping
            .into_iter()
            .filter_map(|(pid, used)| Some((pid, used?)))
            .collect()
    }

    pub(crate) fn busy(&self) -> Vec<String> {
        self.workers
            .values()
            .filter(|worker| worker.requests > 0)
            .map(|worker| worker.params.name.clone())
            .collect()
    }

    /// Ends the faults: non-compliant holders die, the neighbour leaves, operators repair abandoned holders.
    pub(crate) fn calm_down(&mut self) {
        self.calm = true;
        self.faults = Faults::default();
        self.neighbour = Bytes::ZERO;
        for index in 0..self.tenants.len() {
            if self.tenants[index].manners != Manners::Honest {
                self.kill_tenant(index);
                self.tenants[index].manners = Manners::Honest;
            }
        }
        let starts: Vec<String> = self.workers.keys().cloned().collect();
        for worker in starts {
            let ticket = self.ticket();
            self.deliver(Event::OperatorWorker {
                ticket,
                worker,
                command: WorkerCommand::Start,
                by: None,
            });
        }
        self.after(Duration::from_secs(40), Happening::Operator);
    }

    /// Performs the arbiter's actions.
    pub(crate) fn perform(&mut self, actions: &[Action]) {
        for action in actions {
            match action {
                Action::Answer { ticket, answer } => self.take_answer(*ticket, answer),
                Action::SetTarget {
                    lease,
                    nonce,
                    bytes,
                    ..
                } => self.take_target(*lease, *nonce, *bytes),
                Action::EndLease { lease, .. } => self.take_end(lease.id),
                Action::LoadEngine { revision, plan } => {
                    self.command_engine(*revision, plan.clone(), true);
                }
                Action::ApplyPlan { revision, plan, .. } => {
                    self.command_engine(*revision, plan.clone(), false);
                }
                Action::StartWorker { worker, variant } => {
                    self.start_worker(worker, variant.clone());
                }
                Action::StopWorker { worker, .. } | Action::AbortWorker { worker, .. } => {
                    self.stop_worker(worker);
                }
                Action::ResizeWorker { worker, variant } => {
                    self.resize_worker(worker, variant.clone());
                }
                Action::Measure { tenant } => {
                    let wait = millis(&mut self.rng, 1, 4);
                    self.after(wait, Happening::Measure(tenant.clone()));
                }
                Action::SampleAfter { wait } => self.plan_sample(*wait),
                Action::LevelChanged(_)
                | Action::EmptyPagePool { .. }
                | Action::Weighed { .. }
                | Action::InspectModel
                | Action::ReinspectModel
                | Action::StorePeaks { .. }
                | Action::Decided { .. } => {}
            }
        }
    }

    fn happen(&mut self, happening: Happening) -> Option<Event> {
        match happening {
            Happening::Deliver(event) => Some(*event),
            Happening::Sample => self.read_machine(),
            Happening::Measure(tenant) => self.measure(tenant),
            Happening::EngineCommand { life } => {
                let shape = self.device.shape.as_ref()?;
                if life != self.engine.life {
                    return None;
                }
                self.engine.carry_out(shape, &mut self.rng, &self.faults)
            }
            Happening::EngineDies { life } => {
                if life != self.engine.life || self.calm {
                    return None;
                }
                self.engine.die();
                Some(Event::EngineFailed {
                    reason: "sim: dies".to_owned(),
                    cure: Cure::Reload,
                    left: None,
                })
            }
            Happening::Generate => {
                let wait = millis(&mut self.rng, 20, 400);
                if !self.calm || self.engine.requests > 0 {
                    self.after(wait, Happening::Generate);
                }
                let shape = self.device.shape.as_ref()?;
                let block = shape.kv.block_tokens.get();
                let ended = self.engine.end_chunk(shape, &mut self.rng, self.calm);
                ended.or_else(|| {
                    self.engine
                        .generate(self.now, block, &mut self.rng, self.calm)
                })
            }
            Happening::TenantTurn(index) => self.tenant_turn(index),
            Happening::TenantObeys {
                index,
                lease,
                nonce,
                bytes,
                answers,
            } => self.tenant_obeys(index, lease, nonce, bytes, answers),
            Happening::TenantDefers {
                index,
                target,
                lease,
            } => self.tenant_defers(index, lease, &target),
            Happening::TenantHearsEnd { index, lease } => {
                if self.tenants[index].is_lease(lease) {
                    self.tenant_hears_end(index);
                }
                None
            }
            Happening::TenantLeaves { index } => self.tenant_leaves(index),
            Happening::WorkerReady { name, life } => {
                let worker = self.workers.get_mut(&name)?;
                if worker.life != life || worker.state != State::Starting {
                    return None;
                }
                worker.become_ready();
                Some(Event::WorkerReady {
                    worker: name,
                    pid: life,
                })
            }
            Happening::WorkerExits {
                name,
                life,
                intended,
            } => {
                let worker = self.workers.get_mut(&name)?;
                if worker.life != life || worker.state == State::Gone || (self.calm && !intended) {
                    return None;
                }
                worker.exit();
                Some(Event::WorkerExited {
                    worker: name,
                    intended,
                    cause: "sim".to_owned(),
                })
            }
            Happening::WorkerChanges {
                name,
                life,
                variant,
            } => self.worker_changes(name, life, variant),
            Happening::WorkerShrinks { name, life, bytes } => {
                let worker = self.workers.get_mut(&name)?;
                if worker.life == life && worker.state == State::Ready {
                    worker.used = worker.used.min(bytes);
                }
                None
            }
            Happening::WorkerTurn(name) => self.worker_turn(name),
            Happening::Neighbour => {
                self.neighbour_turn();
                None
            }
            Happening::Operator => self.operator_turn(),
        }
    }

    fn after(&mut self, wait: Duration, happening: Happening) -> (Timestamp, u64) {
        self.order += 1;
        let key = (self.now + wait, self.order);
        self.happenings.insert(key, happening);
        key
    }

    fn deliver(&mut self, event: Event) {
        self.after(Duration::ZERO, Happening::Deliver(Box::new(event)));
    }

    fn ticket(&mut self) -> Ticket {
        self.tickets += 1;
        Ticket(self.tickets)
    }

    // The machine.

    fn plan_sample(&mut self, wait: Duration) {
        let at = self.now + wait;
        if self.next_sample.is_some_and(|(next, _)| next <= at) {
            return;
        }
        if let Some(later) = self.next_sample.take() {
            self.happenings.remove(&later);
        }
        self.next_sample = Some(self.after(wait, Happening::Sample));
    }

    fn used_by_scope(&self) -> Bytes {
        let tenants: Bytes = self.tenants.iter().map(|tenant| tenant.used).sum();
        let workers: Bytes = self.workers.values().map(|worker| worker.used).sum();
        self.engine.used(self.device.shape.as_ref())
            + tenants
            + workers
            + self.neighbour
            + self.device.os_used
    }

    fn read_machine(&mut self) -> Option<Event> {
        let total = self.device.params.budget.total;
        let used = self.used_by_scope();
        let sample = match self.device.params.budget.scope {
            Scope::Session => Sample {
                taken_at: self.now,
                memory: MemoryReading {
                    mem_total: Bytes::from_gib(16),
                    mem_available: Bytes::from_gib(8),
                    mem_free: Bytes::from_gib(4),
                    group: None,
                },
                scope_used: Some(used),
                ..Sample::default()
            },
            Scope::Machine => Sample {
                taken_at: self.now,
                memory: MemoryReading {
                    mem_total: total,
                    mem_available: total.saturating_sub(used),
                    mem_free: total.saturating_sub(used),
                    group: None,
                },
                gpu: GpuReading {
                    cma_free: Some(Bytes::ZERO),
                    ..GpuReading::default()
                },
                ..Sample::default()
            },
        };
        if self.now.saturating_since(self.measured_at) >= Duration::from_millis(100) {
            self.measured_at = self.now;
            let holders: BTreeSet<String> = self
                .arbiter
                .snapshot()
                .leases
                .iter()
                .map(|lease| lease.holder().to_owned())
                .collect();
            for holder in holders {
                self.after(Duration::ZERO, Happening::Measure(holder));
            }
        }
        // Another one will be taken regardless of this one.
        self.plan_sample(Duration::from_secs(1));
        if self.faults.missing_samples.strikes(&mut self.rng, 0.01) {
            let silent = millis(&mut self.rng, 500, 4000);
            if let Some(planned) = self.next_sample.take() {
                self.happenings.remove(&planned);
            }
            self.next_sample = Some(self.after(silent, Happening::Sample));
            return None;
        }
        if self.rng.random_bool(0.1) {
            self.old_sample = Some(sample.clone());
        }
        if self.faults.stale_samples.strikes(&mut self.rng, 0.05)
            && let Some(old) = self.old_sample.clone()
        {
            let wait = millis(&mut self.rng, 0, 50);
            self.after(wait, Happening::Deliver(Box::new(Event::Sampled(old))));
        }
        if self.faults.late_samples.strikes(&mut self.rng, 0.2) {
            if self.rng.random_bool(0.3) {
                return None;
            }
            let wait = millis(&mut self.rng, 1, 400);
            self.after(wait, Happening::Deliver(Box::new(Event::Sampled(sample))));
            return None;
        }
        Some(Event::Sampled(sample))
    }

    fn measure(&mut self, tenant: String) -> Option<Event> {
        let lost = self.faults.lost_measurements.strikes(&mut self.rng, 0.2);
        let used = if tenant == "llm" {
            Some(self.engine.used(self.device.shape.as_ref()))
        } else if let Some(worker) = self.workers.get(&tenant) {
            Some(worker.used)
        } else if let Some(pid) = self.process_of(&tenant) {
            // All use by its process, under any name.
            let of_it = || self.tenants.iter().filter(|other| other.pid == Some(pid));
            let measurable = of_it().all(|tenant| tenant.measurable);
            measurable.then(|| of_it().map(|tenant| tenant.used).sum())
        } else {
            let tenant = self.tenants.iter().find(|other| other.name == tenant)?;
            tenant.measurable.then_some(tenant.used)
        };
        let read = self.read_high_water(&tenant);
        let event = Event::Measured {
            tenant,
            used: used.filter(|_| !lost || !self.rng.random_bool(0.5)),
            taken_at: self.now,
        };
        if lost {
            let wait = millis(&mut self.rng, 1, 300);
            self.after(wait, Happening::Deliver(Box::new(event)));
            return read;
        }
        if read.is_some() {
            self.deliver(event);
            return read;
        }
        Some(event)
    }

    /// Reads a worker's peak use: the kernel sums counters that change concurrently. Of a hopeless worker nothing is
    /// read, since its old observation is wrong and would gradually be forgotten.
    fn read_high_water(&mut self, name: &str) -> Option<Event> {
        if self.device.hopeless.as_deref() == Some(name) {
            return None;
        }
        let rng = self.high_water.as_mut()?;
        let worker = self
            .workers
            .get(name)
            .filter(|worker| worker.state != State::Gone)?;
        let seen = self.arbiter.snapshot();
        let taken_for = seen
            .workers
            .iter()
            .find(|view| view.name == name)?
            .variant
            .clone();
        note_use(&mut self.used_most, worker, taken_for);
        let less = rng.random_range(0..=worker.high_water.per_mille(20).get());
        let peak = worker.high_water.saturating_sub(Bytes::new(less));
        rng.random_bool(0.5).then(|| Event::PeakMeasured {
            worker: name.to_owned(),
            peak,
        })
    }

    /// The process behind a holder, where processes are distinguished.
    fn process_of(&self, holder: &str) -> Option<u32> {
        self.letters.as_ref()?;
        let seen = self.arbiter.snapshot();
        seen.leases
            .iter()
            .find(|lease| lease.holder() == holder)?
            .owner
            .owner_pid
    }

    fn neighbour_turn(&mut self) {
        if !(self.faults.neighbour.exists() || self.faults.storms.exists()) {
            return;
        }
        let total = self.device.params.budget.total;
        let room = total.saturating_sub(self.used_by_scope()) + self.neighbour;
        if self.faults.storms.exists() && self.rng.random_bool(0.7) {
            // A quarter of the remaining memory every few ms, and all of it back at once.
            let grown = self.neighbour + Bytes::new(room.saturating_sub(self.neighbour).get() / 4);
            let over = grown.get() > room.get() / 10 * 9 || self.rng.random_bool(0.05);
            self.neighbour = if over { Bytes::ZERO } else { grown };
            let wait = millis(&mut self.rng, 2, 60);
            self.after(wait, Happening::Neighbour);
            return;
        }
        self.neighbour = match self.rng.random_range(0..4) {
            0 => Bytes::ZERO,
            1 => Bytes::new(self.rng.random_range(0..=room.get() / 4)),
            2 => Bytes::new(self.rng.random_range(0..=room.get())),
            _ => self.neighbour.min(room),
        };
        let wait = millis(&mut self.rng, 5, 9000);
        self.after(wait, Happening::Neighbour);
    }

    // The engine.

    fn command_engine(
        &mut self,
        revision: u64,
        plan: cotenant::policy::residency::EnginePlan,
        loads: bool,
    ) {
        // A plan for an engine that has just died has no recipient.
        if !loads && !self.engine.lives() {
            return;
        }
        let at = self.engine.command(
            self.now,
            (revision, plan, loads),
            &mut self.rng,
            &self.faults,
        );
        let life = self.engine.life;
        self.after(
            at.saturating_since(self.now),
            Happening::EngineCommand { life },
        );
        if loads && self.faults.dying_engine.strikes(&mut self.rng, 0.6) {
            let wait = millis(&mut self.rng, 10, 9000);
            self.after(wait, Happening::EngineDies { life });
        }
    }

    // Workers.

    fn start_worker(&mut self, name: &str, variant: Option<String>) {
        let slow = if self.faults.slow_disk.strikes(&mut self.rng, 0.5) {
            10
        } else {
            1
        };
        let ready = millis(&mut self.rng, 30, 600) * slow;
        let crash = millis(&mut self.rng, 1, 4000);
        let never = self.faults.workers_never_ready.strikes(&mut self.rng, 0.3);
        let crashes = self.faults.crashing_workers.strikes(&mut self.rng, 0.4);
        let Some(worker) = self.workers.get_mut(name) else {
            return;
        };
        worker.start(variant);
        note_use(&mut self.used_most, worker, worker.variant.clone());
        let life = worker.life;
        let name = name.to_owned();
        if crashes {
            let intended = false;
            let name = name.clone();
            self.after(
                crash,
                Happening::WorkerExits {
                    name,
                    life,
                    intended,
                },
            );
        }
        if !never {
            self.after(ready, Happening::WorkerReady { name, life });
        }
    }

    fn stop_worker(&mut self, name: &str) {
        let stubborn = self.faults.crashing_workers.strikes(&mut self.rng, 0.2);
        let wait = if stubborn {
            millis(&mut self.rng, 300, 900)
        } else {
            millis(&mut self.rng, 1, 60)
        };
        let Some(worker) = self.workers.get(name) else {
            return;
        };
        let happening = Happening::WorkerExits {
            name: name.to_owned(),
            life: worker.life,
            intended: true,
        };
        self.after(wait, happening);
    }

    /// A worker notified of a shortage shrinks, unless it misreports: it cannot reply.
    fn tell_worker(&mut self, id: LeaseId, bytes: Bytes) {
        let seen = self.arbiter.snapshot();
        let Some(reported) = seen.leases.iter().find(|lease| lease.id == id) else {
            return;
        };
        let Some(worker) = self.workers.get(&reported.tenant) else {
            return;
        };
        if self.faults.lying_workers.strikes(&mut self.rng, 0.5) {
            return;
        }
        let life = worker.life;
        let wait = millis(&mut self.rng, 1, 900);
        let name = reported.tenant.clone();
        self.after(wait, Happening::WorkerShrinks { name, life, bytes });
    }

    fn resize_worker(&mut self, name: &str, variant: String) {
        let wait = millis(&mut self.rng, 5, 120);
        let Some(worker) = self.workers.get(name) else {
            return;
        };
        let happening = Happening::WorkerChanges {
            name: name.to_owned(),
            life: worker.life,
            variant,
        };
        self.after(wait, happening);
    }

    fn worker_changes(&mut self, name: String, life: u32, variant: String) -> Option<Event> {
        let fails = self.faults.lying_workers.strikes(&mut self.rng, 0.2);
        let lies = self.faults.lying_workers.strikes(&mut self.rng, 0.3);
        let lost = self.faults.lost_answers.strikes(&mut self.rng, 0.2);
        let worker = self.workers.get_mut(&name)?;
        if worker.life != life || worker.state != State::Ready {
            return None;
        }
        let error = fails.then(|| "sim: cannot".to_owned());
        if !fails {
            let steady = worker.params.steady_of(Some(&variant));
            if !(lies && steady < worker.used) {
                worker.used = steady;
            }
            worker.variant = Some(variant);
            worker.high_water = worker.high_water.max(worker.used);
            note_use(&mut self.used_most, worker, worker.variant.clone());
        }
        let event = Event::WorkerResized(WorkerResized {
            worker: name,
            variant: worker.variant.clone().unwrap_or_default(),
            used: Some(worker.used),
            error,
        });
        (!lost).then_some(event)
    }

    fn worker_turn(&mut self, name: String) -> Option<Event> {
        let wait = millis(&mut self.rng, 50, 1500);
        if !self.calm {
            self.after(wait, Happening::WorkerTurn(name.clone()));
        }
        let resizes = self.rng.random_bool(0.3);
        let variant = ["small", "large", "huge"][self.rng.random_range(0..3)].to_owned();
        let worker = self.workers.get_mut(&name)?;
        if resizes && !self.calm {
            let ticket = self.ticket();
            let wait = if self.rng.random_bool(0.3) {
                Duration::ZERO
            } else {
                millis(&mut self.rng, 1, 3000)
            };
            return Some(Event::WorkerResizeRequested(WorkerResize {
                ticket,
                worker: name,
                variant,
                wait,
                by: None,
            }));
        }
        if worker.state == State::Gone && worker.params.rest.idle_stop_after.is_some() && !self.calm
        {
            // A client asks for it.
            return Some(Event::WorkerWanted {
                worker: name,
                client: None,
            });
        }
        if worker.state != State::Ready {
            return None;
        }
        let requests = if self.calm {
            0
        } else {
            u32::from(self.rng.random_bool(0.5))
        };
        let peak = worker.params.peak;
        let more = self
            .breath
            .as_mut()
            .map_or(Bytes::ZERO, |rng| peak.per_mille(rng.random_range(0..1200)));
        worker.works(requests, more);
        note_use(&mut self.used_most, worker, worker.variant.clone());
        Some(Event::WorkerActivity {
            worker: name,
            requests: worker.requests,
        })
    }

    // Operators.

    fn operator_turn(&mut self) -> Option<Event> {
        let ticket = self.ticket();
        if self.calm {
            return self.repair(ticket);
        }
        let wait = millis(&mut self.rng, 100, 6000);
        self.after(wait, Happening::Operator);
        let names: Vec<String> = self.workers.keys().cloned().collect();
        match self.rng.random_range(0..5) {
            4 => Some(Event::OperatorKvType {
                ticket,
                kv_type: KvType::ALL[self.rng.random_range(0..KvType::ALL.len())],
                by: None,
            }),
            0 => Some(Event::OperatorShed {
                ticket,
                bytes: mib(self.rng.random_range(0..80)),
                by: None,
            }),
            1 => Some(Event::OperatorRegrow { ticket, by: None }),
            _ if names.is_empty() => None,
            _ => Some(Event::OperatorWorker {
                ticket,
                worker: names[self.rng.random_range(0..names.len())].clone(),
                command: [
                    WorkerCommand::Recycle,
                    WorkerCommand::Start,
                    WorkerCommand::Stop,
                ][self.rng.random_range(0..3)],
                by: None,
            }),
        }
    }

    /// Repairs abandoned holders once it is calm.
    fn repair(&mut self, ticket: Ticket) -> Option<Event> {
        let snapshot = self.arbiter.snapshot();
        self.after(Duration::from_secs(5), Happening::Operator);
        if snapshot.engine.state == EngineState::Failed && self.now > Timestamp::START {
            return self
                .device
                .shape
                .clone()
                .map(|shape| Event::EngineInspected { shape });
        }
        let given_up = snapshot
            .workers
            .iter()
            .filter(|worker| worker.rest != Some(Rest::Idle))
            .find(|worker| matches!(worker.state, WorkerState::Degraded | WorkerState::Stopped))?;
        Some(Event::OperatorWorker {
            ticket,
            worker: given_up.name.clone(),
            command: WorkerCommand::Start,
            by: None,
        })
    }
}

/// A worker by its name and variant.
pub(crate) type Variant = (String, Option<String>);

/// A holder by its name and process.
pub(crate) type Process = (String, Option<u32>);

fn note_use(used_most: &mut BTreeMap<Variant, Bytes>, worker: &Worker, variant: Option<String>) {
    let most = used_most
        .entry((worker.params.name.clone(), variant))
        .or_default();
    *most = (*most).max(worker.used);
}
