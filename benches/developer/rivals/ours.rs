//! The arbiter on the simulated device.
//!
//! The first model is the engine, the others are workers; additional memory for an ASR request is a lease of its class.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::Duration,
};

use super::device::{Device, Work, load_time};
use super::rules::Kind;
use cotenant::{
    policy::{
        Arbiter,
        engine_failure::Cure,
        event::{Action, Answer, EngineApplied, Event, LeaseCall},
        kv_type::KvType,
        lease::{Class, LeaseRequest, LeaseView, Peer, Ticket},
        params::{EngineParams, Params, ParamsError, Scope, StartParams, WorkerParams},
        pressure::{GpuReading, MemoryReading, Sample},
        residency::{EnginePlan, KvShape, LayerKind, LayerShape, ModelShape},
    },
    units::{Bytes, Timestamp, Tokens},
};

/// The engine's name in the ledger, and in every trace.
pub(super) const ENGINE: &str = "llm";
const LAYERS: u32 = 32;
/// Prompt and history of a turn in the KV cache before generation.
const PROMPT_TOKENS: u32 = 600;
const MEASURE_EVERY: Duration = Duration::from_millis(500);

/// Returns a model of this full size: 32 layers, every fourth with attention (Qwen3.5), and 4096 tokens of f16 KV.
pub(crate) fn shape(full: Bytes) -> ModelShape {
    let (fixed_bytes, state_bytes, workspace) = (
        Bytes::from_mib(400),
        Bytes::from_mib(50),
        Bytes::from_mib(100),
    );
    let kv = KvShape {
        attention_layers: LAYERS / 4,
        kv_heads: 4,
        head_dim: 256,
        element_bytes: 2,
        granule: Bytes::ZERO,
        block_tokens: Tokens::new(64),
        windowed: None,
    };
    let rest = fixed_bytes
        + state_bytes
        + workspace
        + kv.capacity_bytes(EngineParams::default().kv_wanted, KvType::F16);
    let layer = Bytes::new(full.saturating_sub(rest).get() / u64::from(LAYERS));
    ModelShape {
        name: "bench".to_owned(),
        architecture: "qwen35".to_owned(),
        layers: (0..LAYERS)
            .map(|index| {
                let kind = if index % 4 == 3 {
                    LayerKind::Attention
                } else {
                    LayerKind::Recurrent
                };
                LayerShape::new(kind, 0, layer)
            })
            .collect(),
        fixed_bytes,
        state_bytes,
        kv,
        context_max: Tokens::new(32_768),
        workspace_fixed_bytes: workspace,
        workspace_bytes_per_token: Bytes::ZERO,
        ring_bytes: layer.saturating_mul(2),
    }
}

fn params(device: &Device<'_>) -> Params {
    let mut params = Params::for_budget(device.total, device.baseline, Scope::Machine);
    params.engine = Some(EngineParams::default());
    let workers = device
        .holders
        .iter()
        .filter(|holder| holder.model.name != ENGINE);
    params.workers = workers
        .map(|holder| WorkerParams {
            name: holder.model.name.to_owned(),
            class: match holder.model.kind {
                Kind::Llm => Class::Interactive,
                Kind::Asr | Kind::Tts => Class::AudioRealtime,
            },
            steady: holder.steady,
            peak: Bytes::from_mib(holder.model.peak_mib).max(holder.steady),
            start: StartParams {
                reload: load_time(holder.steady),
                ..StartParams::default()
            },
            ..WorkerParams::default()
        })
        .collect();
    params
}

/// Memory requested and granted for a request.
enum Need {
    Asked(Ticket),
    Granted(Box<LeaseView>),
    Denied,
}

/// Revision, plan, and its start time with the use at that time.
type Order = (u64, EnginePlan, Option<(Timestamp, Bytes)>);

struct Ours<'a, 'b> {
    device: &'a mut Device<'b>,
    arbiter: Arbiter,
    shape: ModelShape,
    events: VecDeque<Event>,
    /// The engine's pending plans, in order.
    plans: VecDeque<Order>,
    kv_used: u32,
    needs: BTreeMap<u64, Need>,
    tickets: u64,
    sample_at: Timestamp,
    measured_at: Timestamp,
    activity: BTreeMap<usize, u32>,
    stopping: BTreeSet<usize>,
}

/// Runs the arbiter until the trace ends.
pub(super) fn run(device: &mut Device<'_>) -> Result<(), ParamsError> {
    let arbiter = Arbiter::new(params(device))?;
    let full = device
        .holders
        .iter()
        .find(|holder| holder.model.name == ENGINE);
    let shape = shape(full.map_or(Bytes::ZERO, |holder| holder.steady));
    let mut ours = Ours {
        device,
        arbiter,
        events: VecDeque::from([Event::EngineInspected {
            shape: shape.clone(),
        }]),
        shape,
        plans: VecDeque::new(),
        kv_used: 0,
        needs: BTreeMap::new(),
        tickets: 0,
        sample_at: Timestamp::START,
        measured_at: Timestamp::START,
        activity: BTreeMap::new(),
        stopping: BTreeSet::new(),
    };
    while !ours.device.ended() {
        ours.device.step();
        ours.note_deaths();
        ours.sample();
        ours.settle();
        ours.tell_activity();
        ours.give_back();
        ours.ask();
        ours.decide();
        ours.begin_ready();
    }
    Ok(())
}

impl Ours<'_, '_> {
    fn index(&self, name: &str) -> Option<usize> {
        self.device
            .holders
            .iter()
            .position(|holder| holder.model.name == name)
    }

    fn note_deaths(&mut self) {
        for index in self.device.died.clone() {
            if self.is_engine(index) {
                self.plans.clear();
                let reason = "the trace ends it".to_owned();
                self.events.push_back(Event::EngineFailed {
                    reason,
                    cure: Cure::Reload,
                    left: None,
                });
            } else {
                self.exited(index, false);
            }
        }
    }

    fn is_engine(&self, index: usize) -> bool {
        self.device
            .holders
            .get(index)
            .is_some_and(|holder| holder.model.name == ENGINE)
    }

    fn exited(&mut self, index: usize, intended: bool) {
        if let Some(holder) = self.device.holders.get(index) {
            self.events.push_back(Event::WorkerExited {
                worker: holder.model.name.to_owned(),
                intended,
                cause: "exit code 0".to_owned(),
            });
        }
    }

    /// Samples the machine, and periodically all holders.
    fn sample(&mut self) {
        let now = self.device.now;
        if now < self.sample_at {
            return;
        }
        self.sample_at = now + Duration::from_secs(1);
        if now.saturating_since(self.measured_at) >= MEASURE_EVERY {
            self.measured_at = now;
            for lease in self.arbiter.snapshot().leases {
                self.measure(lease.tenant);
            }
        }
        let free = self.device.total.saturating_sub(self.device.used());
        self.events.push_back(Event::Sampled(Sample {
            taken_at: now,
            memory: MemoryReading {
                mem_total: self.device.total,
                mem_available: free,
                mem_free: free,
                group: None,
            },
            gpu: GpuReading {
                cma_free: Some(Bytes::ZERO),
                ..GpuReading::default()
            },
            ..Sample::default()
        }));
    }

    fn measure(&mut self, tenant: String) {
        let used = match self
            .index(&tenant)
            .and_then(|index| self.device.holders.get(index))
        {
            Some(holder) => holder.used,
            None => {
                let its = |number: u64| tenant_of(number) == tenant;
                let mine = self
                    .device
                    .jobs
                    .iter()
                    .filter(|job| job.began.is_some() && its(job.number));
                mine.map(super::device::Job::extra).sum()
            }
        };
        self.events.push_back(Event::Measured {
            tenant,
            used: Some(used),
            taken_at: self.device.now,
        });
    }

    /// Reports holders that have reached their target.
    fn settle(&mut self) {
        for index in 0..self.device.holders.len() {
            if self.is_engine(index) || !self.device.is_settled(index) {
                continue;
            }
            if self.stopping.remove(&index) {
                self.exited(index, true);
            }
            let Some(holder) = self.device.holders.get_mut(index) else {
                continue;
            };
            if !holder.ready && holder.target > Bytes::ZERO {
                holder.ready = true;
                holder.target = holder.steady;
                let worker = holder.model.name.to_owned();
                self.events.push_back(Event::WorkerReady { worker, pid: 1 });
            }
        }
        self.settle_engine();
    }

    fn settle_engine(&mut self) {
        let Some(index) = self.index(ENGINE) else {
            return;
        };
        let now = self.device.now;
        if !self.device.is_settled(index) {
            return;
        }
        let Some(holder) = self.device.holders.get_mut(index) else {
            return;
        };
        if let Some((revision, in_force, Some((began, before)))) = self.plans.front().cloned() {
            self.plans.pop_front();
            holder.ready = true;
            self.events.push_back(Event::EngineApplied(EngineApplied {
                revision,
                in_force,
                freed: before.saturating_sub(holder.used),
                used: holder.used,
                untouched: Bytes::ZERO,
                untouched_given: Bytes::ZERO,
                took: now.saturating_since(began),
            }));
        }
        if let Some((_, plan, begun)) = self.plans.front_mut() {
            // The running sequence keeps its tokens.
            let block = self.shape.kv.block_tokens.get();
            let kept = Tokens::new(self.kv_used.next_multiple_of(block));
            plan.kv_capacity = plan.kv_capacity.max(kept);
            *begun = Some((now, holder.used));
            holder.target = self.shape.plan_bytes(plan);
            let layers = (0u32..).zip(&self.shape.layers);
            holder.streams = layers
                .filter(|(layer, _)| !plan.resident.contains(layer))
                .map(|(_, layer)| layer.resident_bytes)
                .sum();
        }
    }

    fn tell_activity(&mut self) {
        for (index, holder) in self.device.holders.iter().enumerate() {
            let jobs = self
                .device
                .jobs
                .iter()
                .filter(|job| job.holder == index && job.began.is_some());
            let requests = u32::try_from(jobs.clone().count()).unwrap_or(u32::MAX);
            let written = jobs.map(|job| match job.work {
                Work::Answer { millionths, .. } => {
                    PROMPT_TOKENS + u32::try_from(millionths / 1_000_000).unwrap_or(0)
                }
                Work::Audio { .. } => 0,
            });
            let kv_used = written.max().unwrap_or(0);
            let is_engine = holder.model.name == ENGINE;
            let known = self.activity.insert(index, requests).unwrap_or(0);
            let grown = is_engine && kv_used > self.kv_used + 32;
            if known == requests && !grown {
                continue;
            }
            self.events.push_back(if is_engine {
                self.kv_used = kv_used;
                Event::EngineActivity {
                    requests,
                    kv_used,
                    kv_kept: 0,
                    kv_prompt: 0,
                    kv_most: 0,
                    kv_droppable: 0,
                    kv_dropped: 0,
                    untouched: Bytes::ZERO,
                    beside: Vec::new(),
                }
            } else {
                Event::WorkerActivity {
                    worker: holder.model.name.to_owned(),
                    requests,
                }
            });
        }
    }

    /// Releases the grants of finished requests.
    fn give_back(&mut self) {
        let alive: BTreeSet<u64> = self.device.jobs.iter().map(|job| job.number).collect();
        let over: Vec<u64> = self
            .needs
            .keys()
            .copied()
            .filter(|number| !alive.contains(number))
            .collect();
        for number in over {
            match self.needs.remove(&number) {
                Some(Need::Granted(lease)) => {
                    let ticket = self.ticket();
                    self.events.push_back(Event::LeaseReleased(LeaseCall {
                        ticket,
                        lease: lease.id,
                        generation: lease.generation,
                        peer: Peer::default(),
                    }));
                    self.measure(lease.tenant);
                }
                Some(Need::Asked(ticket)) => self
                    .events
                    .push_back(Event::LeaseRequestCancelled { ticket }),
                Some(Need::Denied) | None => {}
            }
        }
    }

    fn ticket(&mut self) -> Ticket {
        self.tickets += 1;
        Ticket(self.tickets)
    }

    /// Requests memory for waiting requests: their worker, then their lease.
    fn ask(&mut self) {
        let now = self.device.now;
        let waiting: Vec<_> = self
            .device
            .jobs
            .iter()
            .filter(|job| job.began.is_none())
            .copied()
            .collect();
        for job in waiting {
            let Some(holder) = self.device.holders.get(job.holder) else {
                continue;
            };
            if holder.target == Bytes::ZERO && !self.is_engine(job.holder) {
                let worker = holder.model.name.to_owned();
                self.events.push_back(Event::WorkerWanted {
                    worker,
                    client: None,
                });
            }
            if job.extra() == Bytes::ZERO || self.needs.contains_key(&job.number) {
                continue;
            }
            let ticket = self.ticket();
            self.needs.insert(job.number, Need::Asked(ticket));
            let request = LeaseRequest {
                tenant: tenant_of(job.number),
                request_id: job.number.to_string(),
                peer: Peer::default(),
                class: Class::AudioRealtime,
                min: job.extra(),
                max: job.extra(),
                term: Some(Duration::from_secs(60)),
                wait: job.until.saturating_since(now),
                validate_only: false,
                cgroup: None,
            };
            self.events
                .push_back(Event::LeaseRequested { ticket, request });
        }
    }

    fn decide(&mut self) {
        let now = self.device.now;
        if self.events.is_empty() && self.arbiter.next_deadline().is_some_and(|next| next <= now) {
            self.events.push_back(Event::DeadlineReached);
        }
        while let Some(event) = self.events.pop_front() {
            for action in self.arbiter.handle(now, event) {
                self.perform(action);
            }
        }
    }

    fn perform(&mut self, action: Action) {
        match action {
            Action::Answer { ticket, answer } => {
                let need = self.needs.values_mut();
                let mut asked =
                    need.filter(|need| matches!(need, Need::Asked(asked) if *asked == ticket));
                if let Some(need) = asked.next() {
                    *need = match answer {
                        Answer::Lease { lease } => Need::Granted(Box::new(lease)),
                        _ => Need::Denied,
                    };
                }
            }
            Action::LoadEngine { revision, plan } | Action::ApplyPlan { revision, plan, .. } => {
                self.plans.push_back((revision, plan, None));
            }
            Action::StartWorker { worker, .. } => {
                if let Some(index) = self.index(&worker) {
                    self.device.load(index);
                }
            }
            Action::StopWorker { worker, .. } | Action::AbortWorker { worker, .. } => {
                if let Some(index) = self.index(&worker) {
                    self.device.unload(index);
                    self.stopping.insert(index);
                }
            }
            Action::Measure { tenant } => self.measure(tenant),
            Action::SampleAfter { wait } => {
                self.sample_at = self.sample_at.min(self.device.now + wait);
            }
            // No lease outlasts its term here, workers have no variants, and nothing is persisted.
            Action::SetTarget { .. }
            | Action::EndLease { .. }
            | Action::ResizeWorker { .. }
            | Action::InspectModel
            | Action::ReinspectModel
            | Action::StorePeaks { .. }
            | Action::LevelChanged { .. }
            | Action::EmptyPagePool { .. }
            | Action::Weighed { .. }
            | Action::Decided { .. } => {}
        }
    }

    fn begin_ready(&mut self) {
        let ready: Vec<u64> = self
            .device
            .jobs
            .iter()
            .filter(|job| job.began.is_none())
            .filter(|job| {
                self.device
                    .holders
                    .get(job.holder)
                    .is_some_and(|holder| holder.ready)
            })
            .filter(|job| {
                job.extra() == Bytes::ZERO
                    || matches!(self.needs.get(&job.number), Some(Need::Granted(_)))
            })
            .map(|job| job.number)
            .collect();
        for number in ready {
            self.device.begin(number);
        }
    }
}

fn tenant_of(number: u64) -> String {
    format!("speech{number}")
}
