//! Arithmetic of a plan: what fits, how much context, how fast.

use std::collections::BTreeSet;

use serde::Serialize;

use super::device::Device;
use crate::{
    engine::protocol::Inspected,
    policy::{
        kv_type::KvType,
        params::{EngineParams, Params, ParamsError, ResidencyMode},
        rehearsal::{Rehearsal, rehearse},
        residency::{EnginePlan, ModelShape, PlanLimits},
        streaming::Calibration,
    },
    units::{Bytes, Tokens},
};

/// What is planned for.
pub(crate) struct Stack {
    /// The settings.
    pub params: Params,
    /// What is given up first.
    pub mode: ResidencyMode,
}

impl Stack {
    /// An LLM alone, with the defaults.
    pub(crate) fn alone(memory: Bytes, reserve: Bytes, engine: EngineParams) -> Self {
        let params = Params::for_budget(memory, reserve, crate::policy::params::Scope::Machine);
        Self { mode: engine.mode, params: Params { engine: Some(engine), ..params } }
    }

    fn engine(&self) -> EngineParams {
        self.params.engine.clone().unwrap_or_default()
    }

    /// What all workers need at most.
    pub(crate) fn worker_peaks(&self) -> Bytes {
        let peaks = self.params.workers.iter().map(|worker| {
            let learned = &self.params.peaks;
            learned.expected(&worker.name, None, worker.peak, worker.steady)
        });
        peaks.fold(Bytes::ZERO, Bytes::saturating_add)
    }
}

/// What was computed.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Forecast {
    /// Memory of the LLM with everything resident.
    pub llm: Pieces,
    /// The least that the LLM runs with.
    pub floor: Bytes,
    /// What the LLM may hold while pressure is Normal: the budget without the workers' peaks, the watermark and its
    /// hysteresis.
    pub room: Bytes,
    /// Start, peak and sheds, as the arbiter decides them.
    pub rehearsal: Rehearsal,
    /// Whether it works.
    pub verdict: Verdict,
    /// The longest context with all layers resident; zero when they do not fit.
    pub context_resident: Tokens,
    /// The longest context with all layers streamed.
    pub context_streamed: Tokens,
    /// What each mode makes of the room.
    pub modes: Vec<ModeForecast>,
}

/// Memory of the LLM, piece by piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Pieces {
    /// Layers and output head.
    pub layers: Bytes,
    /// Norms, tokenizer, the header.
    pub fixed: Bytes,
    /// KV cache at the wanted context.
    pub kv: Bytes,
    /// Recurrent state.
    pub state: Bytes,
    /// Activations of a prefill chunk, and logits.
    pub workspace: Bytes,
    /// All of it.
    pub total: Bytes,
    /// Tokens of the KV cache.
    pub context: Tokens,
    /// Their type.
    pub kv_type: KvType,
}

/// What one mode makes of the room.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ModeForecast {
    /// The mode.
    pub mode: ResidencyMode,
    /// Layers in memory.
    pub resident_layers: u32,
    /// KV capacity.
    pub context: Tokens,
    /// Memory.
    pub bytes: Bytes,
    /// Tokens of an answer per second, in thousandths: least, expected, most.
    pub milli_tokens_per_s: [u64; 3],
}

/// Whether a stack works on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Verdict {
    /// Everything is resident and pressure is Normal.
    Fits,
    /// The LLM runs with less than everything.
    Reduced,
    /// Something never starts.
    Impossible,
}

impl Verdict {
    /// Whether everything starts.
    pub(crate) const fn works(self) -> bool {
        !matches!(self, Self::Impossible)
    }
}

impl Forecast {
    /// Computes it.
    pub(crate) fn new(device: &Device, stack: &Stack, inspected: &Inspected) -> Result<Self, ParamsError> {
        let shape = &inspected.shape;
        let engine = stack.engine();
        let limits = PlanLimits::new(&engine, Tokens::ZERO).at_speed(device.rates.speed());
        let full = shape.full_plan(&limits);
        let llm = Pieces::of(shape, &full);
        let floor = shape.plan_bytes(&shape.floor_plan(&limits));
        let pressure = &stack.params.pressure;
        let kept = [stack.worker_peaks(), pressure.elevated_below, pressure.hysteresis];
        let room = kept.into_iter().fold(stack.params.budget.bytes(), Bytes::saturating_sub);
        let rehearsal = rehearse(&stack.params, Some(shape))?;
        let in_full = rehearsal
            .plan
            .as_ref()
            .is_some_and(|plan| plan.resident.len() == shape.layers.len() && plan.kv_capacity >= full.kv_capacity);
        let verdict = match (&rehearsal.waiting[..], in_full) {
            ([], true) => Verdict::Fits,
            ([], false) => Verdict::Reduced,
            _ => Verdict::Impossible,
        };
        let modes = [ResidencyMode::Balanced, ResidencyMode::MaxContext, ResidencyMode::MaxSpeed]
            .into_iter()
            .filter_map(|mode| {
                let plan = shape.plan(room, &PlanLimits { mode, ..limits }).ok()?;
                Some(ModeForecast {
                    mode,
                    resident_layers: shape.resident_layers(&plan),
                    context: plan.kv_capacity,
                    bytes: shape.plan_bytes(&plan),
                    milli_tokens_per_s: speeds(shape, &plan.resident, device),
                })
            })
            .collect();
        Ok(Self {
            llm,
            floor,
            room,
            verdict,
            context_resident: longest(shape, &full, room),
            context_streamed: longest(shape, &EnginePlan { resident: BTreeSet::new(), ..full }, room),
            modes,
            rehearsal,
        })
    }
}

impl Pieces {
    fn of(shape: &ModelShape, plan: &EnginePlan) -> Self {
        let layers = shape.bytes_without(&BTreeSet::new());
        let kv = shape.kv.capacity_bytes(plan.kv_capacity, plan.kv_type);
        let total = shape.plan_bytes(plan);
        let others = [layers, kv, shape.fixed_bytes, shape.state_bytes];
        Self {
            layers,
            fixed: shape.fixed_bytes,
            kv,
            state: shape.state_bytes,
            workspace: others.into_iter().fold(total, Bytes::saturating_sub),
            total,
            context: plan.kv_capacity,
            kv_type: plan.kv_type,
        }
    }
}

/// The longest context of the model with which `plan` fits into `room`, in whole blocks.
fn longest(shape: &ModelShape, plan: &EnginePlan, room: Bytes) -> Tokens {
    let block = shape.kv.block_tokens.get().max(1);
    let fits = |blocks: u32| {
        let plan = EnginePlan { kv_capacity: Tokens::new(blocks.saturating_mul(block)), ..plan.clone() };
        shape.plan_bytes(&plan) <= room
    };
    let (mut least, mut most) = (0, shape.context_max.get() / block);
    while least < most {
        let middle = least + (most - least).div_ceil(2);
        if fits(middle) {
            least = middle;
        } else {
            most = middle - 1;
        }
    }
    Tokens::new(least.saturating_mul(block))
}

/// Tokens of an answer per second with these parts resident, in thousandths: least, expected, most.
fn speeds(shape: &ModelShape, resident: &BTreeSet<u32>, device: &Device) -> [u64; 3] {
    let speed = device.rates.speed();
    let assumed = Calibration {
        compute_ns_per_mib: speed.decode_ns_per_mib,
        read_ns_per_mib: speed.read_ns_per_mib,
        read_busy_ns_per_mib: speed.read_ns_per_mib,
        slowed_ns_per_mib: 0,
        prefill_ns_per_mib: speed.prefill_ns_per_mib,
    };
    let expected = device.calibration.unwrap_or(assumed).milli_tokens_per_s(shape, resident);
    let part = |percent: u64| expected.saturating_mul(percent) / 100;
    let error = device.rates.error_percent;
    [part(100u64.saturating_sub(error)), expected, part(100 + error)]
}
