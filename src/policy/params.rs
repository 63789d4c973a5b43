//! Validated parameters of the policy.
//!
//! `config` builds [`Params`] from the file and checks the range of each value. [`Params::validate`] checks the
//! constraints that depend on the budget, and reports all faults at once.

mod check;

use std::{fmt, time::Duration};

use serde::{Deserialize, Serialize};

use super::{kv_type::KvType, lease::Class, peaks::Peaks};
use cotenant_units::{Bytes, Tokens};

/// All settings of policy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Params {
    /// Memory that may be handed out.
    pub budget: BudgetParams,
    /// Watermarks, dwell and sampling.
    pub pressure: PressureParams,
    /// How memory is reclaimed.
    pub shed: ShedParams,
    /// Limits on leases and requests.
    pub lease: LeaseParams,
    /// The LLM; `None` runs without one.
    pub engine: Option<EngineParams>,
    /// The workers, in any order.
    pub workers: Vec<WorkerParams>,
    /// Peaks of holders learned in earlier runs.
    #[serde(default)]
    pub peaks: Peaks,
    /// The memory that contains the budget.
    #[serde(default)]
    pub machine: MachineMemory,
}

/// Memory that contains a budget: the machine's, or the limit of a control group around the supervisor.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineMemory {
    /// `MemTotal`, or the limit if that is lower.
    pub total: Bytes,
    /// Path of the control group that sets the limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limited_by: Option<String>,
}

impl MachineMemory {
    /// The memory of a machine without a control-group limit.
    #[must_use]
    pub const fn of(total: Bytes) -> Self {
        Self {
            total,
            limited_by: None,
        }
    }
}

/// `15656 MiB that this machine has`, `900 MiB that the control group `/box` allows`.
impl fmt::Display for MachineMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.limited_by {
            None => write!(f, "{} that this machine has", self.total),
            Some(group) => write!(f, "{} that the control group `{group}` allows", self.total),
        }
    }
}

/// Extent of the budget: the processes whose use counts against it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scope {
    /// The whole machine; the budget's total is its memory.
    #[default]
    Machine,
    /// A group of processes whose use is read as [`Sample::scope_used`](super::pressure::Sample::scope_used); also
    /// bounded by the machine's available memory.
    Session,
}

/// Size and extent of the budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BudgetParams {
    /// Memory of the scope: `MemTotal` for the machine.
    pub total: Bytes,
    /// Memory that is never handed out: OS, CMA, display, the supervisor itself.
    pub reserve: Bytes,
    /// Processes that count against it.
    pub scope: Scope,
}

impl BudgetParams {
    /// Memory that may be handed out: total minus reserve.
    #[must_use]
    pub const fn bytes(&self) -> Bytes {
        self.total.saturating_sub(self.reserve)
    }
}

/// Watermarks, dwell and sampling.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PressureParams {
    /// Headroom below which the level is Elevated. Default 13 % of the budget.
    pub elevated_below: Bytes,
    /// Headroom below which the level is Critical. Default 6.5 % of the budget.
    pub critical_below: Bytes,
    /// Headroom below which a busy worker may be ended. Default 3 % of the budget.
    pub last_resort_below: Bytes,
    /// Margin above a watermark required to leave its level. Default 2 % of the budget.
    pub hysteresis: Bytes,
    /// Time for which the headroom must stay above before the level falls and shed memory grows back. Default 60 s.
    pub dwell: Duration,
    /// Whether the dwell is derived from the duration of the LLM's growth: ten times that, from 1 s to `dwell`. Default
    /// no.
    #[serde(default)]
    pub dwell_by_growth: bool,
    /// Time for which a shortage at Elevated is tolerated before a shed. Default 2 s.
    #[serde(default)]
    pub grace: Duration,
    /// Minimum interval between two samples. Default 10 ms.
    pub sample_min: Duration,
    /// Maximum interval between two samples. Default 1 s.
    pub sample_max: Duration,
    /// Maximum age of a sample used for grants and growth. Default 5 times `sample_max`.
    #[serde(default = "sample_age_max")]
    pub sample_age_max: Duration,
    /// Highest expected rate of memory consumption, in MiB per second. Default 6000.
    pub fill_rate_mib_per_s: u32,
}

impl PressureParams {
    /// Five sampling intervals of maximum length. Our choice: tolerates one late and one lost sample.
    #[must_use]
    pub const fn age_max(sample_max: Duration) -> Duration {
        sample_max.saturating_mul(5)
    }

    /// The defaults for a budget.
    #[must_use]
    pub fn scaled_to(budget: Bytes) -> Self {
        Self {
            elevated_below: budget.per_mille(ELEVATED_PER_MILLE),
            critical_below: budget.per_mille(CRITICAL_PER_MILLE),
            last_resort_below: budget.per_mille(LAST_RESORT_PER_MILLE),
            hysteresis: budget.per_mille(HYSTERESIS_PER_MILLE),
            dwell: DWELL,
            dwell_by_growth: false,
            grace: GRACE,
            sample_min: SAMPLE_MIN,
            sample_max: SAMPLE_MAX,
            sample_age_max: sample_age_max(),
            fill_rate_mib_per_s: FILL_RATE_MIB_PER_S,
        }
    }
}

/// How memory is reclaimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShedParams {
    /// Headroom above the upper watermark that a shed under pressure aims for, to replace many small sheds by one.
    /// Default 5 % of the budget.
    pub minimum_reclaim: Bytes,
    /// Time for a shed to take effect before the next one. Default 250 ms.
    pub settle: Duration,
    /// Time for a holder to reach a lower target, by class. Default 50 ms, 250 ms, 2 s, 2 s.
    pub deadlines: ClassDeadlines,
    /// Time for which the bytes of an ended lease stay in the ledger without a measurement; afterwards they are
    /// unaccounted. Default 5 s.
    pub verify_timeout: Duration,
}

impl ShedParams {
    /// The defaults for a budget.
    #[must_use]
    pub fn scaled_to(budget: Bytes) -> Self {
        Self {
            minimum_reclaim: budget.per_mille(MINIMUM_RECLAIM_PER_MILLE),
            settle: SETTLE,
            deadlines: ClassDeadlines::default(),
            verify_timeout: VERIFY_TIMEOUT,
        }
    }
}

/// Time for a holder to reach a lower target, by class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClassDeadlines {
    /// For [`Class::AudioRealtime`].
    pub audio_realtime: Duration,
    /// For [`Class::Interactive`].
    pub interactive: Duration,
    /// For [`Class::LlmElastic`], the engine included.
    pub llm_elastic: Duration,
    /// For [`Class::Batch`].
    pub batch: Duration,
}

impl ClassDeadlines {
    /// Returns the deadline of `class`.
    #[must_use]
    pub const fn of(&self, class: Class) -> Duration {
        match class {
            Class::AudioRealtime => self.audio_realtime,
            Class::Interactive => self.interactive,
            Class::LlmElastic => self.llm_elastic,
            Class::Batch => self.batch,
        }
    }
}

impl Default for ClassDeadlines {
    fn default() -> Self {
        Self {
            audio_realtime: Duration::from_millis(50),
            interactive: Duration::from_millis(250),
            llm_elastic: Duration::from_secs(2),
            batch: Duration::from_secs(2),
        }
    }
}

/// Limits on leases and requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseParams {
    /// Shortest term. Default 2 s.
    pub term_min: Duration,
    /// Longest term. Default 5 min.
    pub term_max: Duration,
    /// Longest wait of a request. Default 60 s.
    pub wait_max: Duration,
    /// Maximum number of waiting requests; one user may occupy half of it. Default 64.
    pub queue_max: u32,
    /// Maximum number of leases and waiting requests of one user. Default 64.
    pub leases_per_uid: u32,
}

impl Default for LeaseParams {
    fn default() -> Self {
        Self {
            term_min: Duration::from_secs(2),
            term_max: Duration::from_secs(300),
            wait_max: Duration::from_secs(60),
            queue_max: 64,
            leases_per_uid: 64,
        }
    }
}

/// Relative value of context and speed in sheds and growth of the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "kebab-case")]
pub enum ResidencyMode {
    /// Minimizes the user's wait: for recomputing a prompt, or for streaming layers during an answer.
    #[error("balanced")]
    #[default]
    Balanced,
    /// Gives up layers before KV capacity: slower, with more context.
    #[error("max-context")]
    MaxContext,
    /// Gives up KV capacity before layers: faster, with less context.
    #[error("max-speed")]
    MaxSpeed,
}

/// The LLM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineParams {
    /// KV capacity when memory is plentiful; limited by the model's context.
    pub kv_wanted: Tokens,
    /// Conversations whose states the KV cache holds beside `kv_wanted`, for models that need a copy of a state or window
    /// to continue one. Default 0, as in versions before this setting.
    #[serde(default)]
    pub conversations: u32,
    /// Lowest usable KV capacity.
    pub kv_floor: Tokens,
    /// KV type when memory is plentiful. Default `f16`.
    #[serde(default)]
    pub kv_type: KvType,
    /// The smallest type to which KV is converted when memory is short; `kv_type` disables conversion. Default `f16`:
    /// no conversion unless configured.
    #[serde(default)]
    pub kv_type_least: KvType,
    /// Tokens of one prefill chunk.
    pub prefill_chunk: Tokens,
    /// Maximum chunk while parts are streamed: `prefill_chunk` is doubled as often as fits, if that makes prompts
    /// faster. Below twice `prefill_chunk` it never grows, as in versions before this setting. Default 512.
    #[serde(default)]
    pub prefill_chunk_max: Tokens,
    /// Layers that are always resident. Default 0.
    pub resident_min: u32,
    /// What a shed gives up first.
    pub mode: ResidencyMode,
    /// Time allowed for loading before the workers are started without waiting for it. Default 120 s.
    pub load_timeout: Duration,
    /// Time allowed for applying a plan before it is requested again. Default 2 s: one prefill chunk on a slow CPU.
    pub apply_timeout: Duration,
    /// Limits on loading it again after failures.
    pub restart: RestartParams,
}

impl Default for EngineParams {
    fn default() -> Self {
        Self {
            kv_wanted: Tokens::new(4096),
            conversations: 0,
            kv_floor: Tokens::new(512),
            kv_type: KvType::F16,
            kv_type_least: KvType::F16,
            prefill_chunk: Tokens::new(128),
            prefill_chunk_max: Tokens::new(512),
            resident_min: 0,
            mode: ResidencyMode::Balanced,
            load_timeout: Duration::from_secs(120),
            apply_timeout: Duration::from_secs(2),
            restart: RestartParams::default(),
        }
    }
}

/// A worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerParams {
    /// Its name in the ledger, the journal and the API.
    pub name: String,
    /// Urgency.
    pub class: Class,
    /// Memory held while running; for a worker without variants.
    pub steady: Bytes,
    /// Peak memory during its start, at least `steady`; for a worker without variants.
    pub peak: Bytes,
    /// Available sizes; it starts with the first. Empty for a worker of one size.
    pub variants: Vec<VariantParams>,
    /// Size to which it shrinks when notified of a shortage; `None` if it cannot be notified or does not shrink.
    pub shrinks_to: Option<Bytes>,
    /// When and how it is started.
    #[serde(flatten)]
    pub start: StartParams,
    /// Time between SIGTERM and SIGKILL. Default 1 s.
    pub stop_grace: Duration,
    /// Whether it is exempt from being stopped or shrunk to make room. Default no.
    #[serde(default)]
    pub pinned: bool,
    /// Whether it requests a lease itself, under its name. Until then its peak is booked.
    #[serde(default)]
    pub own_lease: bool,
    /// Behaviour when it is idle or has grown.
    #[serde(flatten)]
    pub rest: RestParams,
    /// Unique name of its program and model; learned peaks apply to this name only.
    pub model: Option<String>,
}

/// When and how a worker is started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartParams {
    /// Whether it is started with the supervisor.
    pub autostart: bool,
    /// Workers with a lower number start first; ties by name.
    pub start_order: u32,
    /// Workers, or the engine's tenant name, that must be ready, or whose start was given up, before it starts.
    #[serde(default)]
    pub after: Vec<String>,
    /// Whether it starts before the engine is loaded.
    #[serde(default)]
    pub before_engine: bool,
    /// Time allowed until it is ready. Default 60 s.
    pub ready_timeout: Duration,
    /// Duration of a start, for cost comparisons. Default 1 s while unknown.
    pub reload: Duration,
    /// Limits on restarts after failures.
    pub restart: RestartParams,
}

/// Behaviour of a worker when it is idle or has grown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestParams {
    /// Idle time after which it is switched to its smallest variant.
    pub idle_shrink_after: Option<Duration>,
    /// Idle time after which it is stopped; the next request starts it.
    pub idle_stop_after: Option<Duration>,
    /// Measured memory above which it is recycled.
    pub recycle_above: Option<Bytes>,
    /// Whether it is recycled when its memory after requests keeps growing beyond its peak and memory is wanted.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub recycle_leaks: bool,
    /// Whether its sizes are learned: the first start reserves `peak`, later ones use the kernel's figures.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub auto: bool,
}

impl Default for WorkerParams {
    fn default() -> Self {
        Self {
            name: String::new(),
            class: Class::AudioRealtime,
            steady: Bytes::ZERO,
            peak: Bytes::ZERO,
            variants: Vec::new(),
            shrinks_to: None,
            start: StartParams::default(),
            stop_grace: Duration::from_secs(1),
            pinned: false,
            own_lease: false,
            rest: RestParams::default(),
            model: None,
        }
    }
}

impl Default for StartParams {
    fn default() -> Self {
        Self {
            autostart: true,
            start_order: 0,
            after: Vec::new(),
            before_engine: false,
            ready_timeout: Duration::from_secs(60),
            reload: Duration::from_secs(1),
            restart: RestartParams::default(),
        }
    }
}

impl WorkerParams {
    /// Returns the memory held while running in `variant`; in the first one if `variant` is unknown.
    #[must_use]
    pub fn steady_of(&self, variant: Option<&str>) -> Bytes {
        self.variant(variant)
            .map_or(self.steady, |variant| variant.steady)
    }

    /// Returns the peak memory for switching to `variant`; to the first one if `variant` is unknown.
    #[must_use]
    pub fn peak_of(&self, variant: Option<&str>) -> Bytes {
        self.variant(variant)
            .map_or(self.peak, |variant| variant.peak)
            .max(self.steady_of(variant))
    }

    /// Returns a variant's settings; those of the first one if the name is unknown.
    pub(super) fn variant(&self, name: Option<&str>) -> Option<&VariantParams> {
        self.variants
            .iter()
            .find(|variant| Some(variant.name.as_str()) == name)
            .or_else(|| self.variants.first())
    }
}

/// One size of a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VariantParams {
    /// Its name: `grammar`, `open`.
    pub name: String,
    /// Memory held while running.
    pub steady: Bytes,
    /// Peak memory on the way to it; at least `steady`.
    pub peak: Bytes,
}

/// Limits on restarts after failures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestartParams {
    /// Failures within the window that are followed by a restart; one more ends the restarts. Default 3.
    pub intensity: u32,
    /// The window. Default 60 s.
    pub window: Duration,
    /// Wait before the first restart; doubled with each consecutive failure. Default 500 ms.
    pub backoff_min: Duration,
    /// Longest wait. Default 30 s.
    pub backoff_max: Duration,
    /// Time after which a ready process has its failures cleared. Default 60 s.
    pub stable_after: Duration,
}

impl Default for RestartParams {
    fn default() -> Self {
        Self {
            intensity: 3,
            window: Duration::from_secs(60),
            backoff_min: Duration::from_millis(500),
            backoff_max: Duration::from_secs(30),
            stable_after: Duration::from_secs(60),
        }
    }
}

/// One fault in [`Params`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{setting}: `{value}` {problem}")]
pub struct ParamFault {
    /// The setting, as a path: `pressure.critical_below`.
    pub setting: String,
    /// Its value.
    pub value: String,
    /// The fault, with the limit.
    pub problem: String,
}

/// All faults in [`Params`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", .faults.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
pub struct ParamsError {
    /// The faults, in the order of the settings; never empty.
    pub faults: Vec<ParamFault>,
}

impl Params {
    /// The defaults for a budget, without engine and workers.
    #[must_use]
    pub fn for_budget(total: Bytes, reserve: Bytes, scope: Scope) -> Self {
        let budget = BudgetParams {
            total,
            reserve,
            scope,
        };
        Self {
            budget,
            pressure: PressureParams::scaled_to(budget.bytes()),
            shed: ShedParams::scaled_to(budget.bytes()),
            lease: LeaseParams::default(),
            engine: None,
            workers: Vec::new(),
            peaks: Peaks::default(),
            machine: MachineMemory::of(total),
        }
    }

    /// Returns the settings of the worker `name`.
    #[must_use]
    pub fn worker(&self, name: &str) -> Option<&WorkerParams> {
        self.workers.iter().find(|worker| worker.name == name)
    }
}

/// Tenant name of the engine's own lease.
pub const ENGINE_TENANT: &str = "llm";

/// Part of a promised release, in thousandths, that must be measured before a target counts as reached. Ollama accepts
/// 75 % and over-commits; page rounding explains a few percent.
pub const VERIFY_PER_MILLE: u32 = 900;

/// Upper watermark: 2.0 GiB of 15 656 MiB, below which voice on an Orin NX degraded in the field.
const ELEVATED_PER_MILLE: u32 = 130;
/// Lower watermark: 1.0 GiB of 15 656 MiB.
const CRITICAL_PER_MILLE: u32 = 65;
/// Last resort: 0.4 to 0.5 GiB of 15 656 MiB.
const LAST_RESORT_PER_MILLE: u32 = 30;
/// Less than the minimum reclaim, so that one shed ends the level; more than the noise of one sample.
const HYSTERESIS_PER_MILLE: u32 = 20;
/// kubelet's eviction threshold has a minimum reclaim too. With a quarter of 636 MiB, a shortage of 6 MiB took every
/// layer of a small model; with 8 %, half of them.
const MINIMUM_RECLAIM_PER_MILLE: u32 = 50;
/// lmkd-linux waits 60 s; kubelet's 5 min are too slow for voice.
const DWELL: Duration = Duration::from_secs(60);
/// Field practice on a board of this kind: tolerate Elevated for 2 s, Critical not at all.
const GRACE: Duration = Duration::from_secs(2);
/// lmkd polls every 10 ms after an event; earlyoom waits at most 1 s.
const SAMPLE_MIN: Duration = Duration::from_millis(10);
const SAMPLE_MAX: Duration = Duration::from_secs(1);
fn sample_age_max() -> Duration {
    PressureParams::age_max(SAMPLE_MAX)
}
/// Rate reported by earlyoom with `stress -m 4 --vm-bytes 4G` on a desktop.
const FILL_RATE_MIB_PER_S: u32 = 6000;
/// Longer than unmapping 1 GiB takes (151 ms measured).
const SETTLE: Duration = Duration::from_millis(250);
const VERIFY_TIMEOUT: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_valid_for_small_and_large_budgets() {
        for mib in [64, 400, 15_656, 131_072] {
            let params = Params {
                engine: Some(EngineParams::default()),
                ..Params::for_budget(
                    Bytes::from_mib(mib),
                    Bytes::from_mib(mib / 10),
                    Scope::Machine,
                )
            };
            assert_eq!(params.validate(), Ok(()), "{mib} MiB");
        }
    }
}
