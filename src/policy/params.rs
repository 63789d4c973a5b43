//! Validated parameters of the policy.
//!
//! `config` builds [`Params`] from the file and checks the range of each value. What depends on the budget is checked by
//! [`Params::validate`], which tells all faults at once, so that a file with several mistakes is corrected in one go.

mod check;

use std::{fmt, time::Duration};

use serde::{Deserialize, Serialize};

use super::{kv_type::KvType, lease::Class, peaks::Peaks};
use cotenant_units::{Bytes, Tokens};

/// All settings of policy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Params {
    /// What may be handed out.
    pub budget: BudgetParams,
    /// Watermarks, dwell and sampling.
    pub pressure: PressureParams,
    /// How memory is taken back.
    pub shed: ShedParams,
    /// Limits on leases and requests.
    pub lease: LeaseParams,
    /// The LLM; `None` runs without one.
    pub engine: Option<EngineParams>,
    /// The workers, in any order.
    pub workers: Vec<WorkerParams>,
    /// What was learned of holders in earlier runs.
    #[serde(default)]
    pub peaks: Peaks,
    /// The memory that the budget is a part of.
    #[serde(default)]
    pub machine: MachineMemory,
}

/// Memory that a budget can be a part of: that of the machine, or the limit of a control group around the supervisor.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineMemory {
    /// `MemTotal`, or the limit where that is lower.
    pub total: Bytes,
    /// Path of the control group whose limit that is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limited_by: Option<String>,
}

impl MachineMemory {
    /// All memory of a machine without a limit.
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

/// Whose use counts against the budget.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scope {
    /// Everything on the machine; what the budget's total is, the machine has.
    #[default]
    Machine,
    /// A group of processes whose use is read as [`Sample::scope_used`](super::pressure::Sample::scope_used); what the
    /// machine has available still bounds it.
    Session,
}

/// What may be handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BudgetParams {
    /// Memory of the scope: `MemTotal` for the machine.
    pub total: Bytes,
    /// Memory that is never handed out: OS, CMA, display, the supervisor itself.
    pub reserve: Bytes,
    /// Whose use counts.
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
    /// How far above a watermark the headroom must be before its level is left. Default 2 % of the budget.
    pub hysteresis: Bytes,
    /// How long the headroom must stay above before the level falls, and before what was shed grows back. Default 60 s.
    pub dwell: Duration,
    /// Whether the dwell follows the LLM's growth: ten times its duration, from 1 s to `dwell`. Default no.
    #[serde(default)]
    pub dwell_by_growth: bool,
    /// How long a shortage that is Elevated may last before anything is shed for it. Default 2 s.
    #[serde(default)]
    pub grace: Duration,
    /// Shortest time between two samples. Default 10 ms.
    pub sample_min: Duration,
    /// Longest time between two samples. Default 1 s.
    pub sample_max: Duration,
    /// The greatest age of a sample that anything is granted on, or grows by. Default 5 times `sample_max`.
    #[serde(default = "sample_age_max")]
    pub sample_age_max: Duration,
    /// Fastest rate at which memory is expected to disappear, in MiB per second. Default 6000.
    pub fill_rate_mib_per_s: u32,
}

impl PressureParams {
    /// Five of the slowest intervals. Our choice: a sample may be late and one may be lost.
    #[must_use]
    pub const fn age_max(sample_max: Duration) -> Duration {
        sample_max.saturating_mul(5)
    }

    /// The defaults, scaled to a budget.
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

/// How memory is taken back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShedParams {
    /// What a shed under pressure leaves above the upper watermark, so that one action is enough where ten would
    /// nibble. Default 5 % of the budget.
    pub minimum_reclaim: Bytes,
    /// Time for the effect of a shed to show before the next one. Default 250 ms.
    pub settle: Duration,
    /// How long a holder has to reach a lower target, by its class. Default 50 ms, 250 ms, 2 s, 2 s.
    pub deadlines: ClassDeadlines,
    /// How long after its end a lease's bytes stay on the book while no measurement tells; then they are unaccounted.
    /// Default 5 s.
    pub verify_timeout: Duration,
}

impl ShedParams {
    /// The defaults, scaled to a budget.
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

/// How long a holder has to reach a lower target, by its class.
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
    /// The one for `class`.
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
    /// Longest time that a request may wait. Default 60 s.
    pub wait_max: Duration,
    /// Requests that may wait at once; those of one user take half of the places at the most. Default 64.
    pub queue_max: u32,
    /// Leases and waiting requests of one user. Default 64.
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

/// What context and speed are worth to each other when the engine gives something up or grows back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "kebab-case")]
pub enum ResidencyMode {
    /// Whichever costs the user less time: reading a prompt again, or streaming layers for an answer.
    #[error("balanced")]
    #[default]
    Balanced,
    /// Layers before KV capacity: slower, and remembers more.
    #[error("max-context")]
    MaxContext,
    /// KV capacity before layers: as fast as can be, with a short memory.
    #[error("max-speed")]
    MaxSpeed,
}

/// The LLM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineParams {
    /// KV capacity when memory is plentiful; the model's own limit bounds it.
    pub kv_wanted: Tokens,
    /// KV capacity below which the engine is of no use.
    pub kv_floor: Tokens,
    /// In what form KV is kept when memory is plentiful. Default `f16`.
    #[serde(default)]
    pub kv_type: KvType,
    /// The smallest type to which KV is converted when memory is short; `kv_type` where it never is. Default `f16`, so
    /// that nothing is converted unless the configuration says so.
    #[serde(default)]
    pub kv_type_least: KvType,
    /// Tokens of one prefill chunk.
    pub prefill_chunk: Tokens,
    /// The most that a chunk may have while parts are streamed, where that makes prompts faster: so often doubled as fits.
    /// Below twice `prefill_chunk` it never grows, as in the time before there was a choice. Default 512.
    #[serde(default)]
    pub prefill_chunk_max: Tokens,
    /// Layers that stay resident whatever happens. Default 0.
    pub resident_min: u32,
    /// What goes first.
    pub mode: ResidencyMode,
    /// How long loading may take before the workers are started without waiting for it. Default 120 s.
    pub load_timeout: Duration,
    /// How long the engine may take over a plan before it is asked again. Default 2 s: one prefill chunk on a slow CPU.
    pub apply_timeout: Duration,
    /// When it may be loaded again after a failure.
    pub restart: RestartParams,
}

impl Default for EngineParams {
    fn default() -> Self {
        Self {
            kv_wanted: Tokens::new(4096),
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
    /// Its name, in the book and everywhere.
    pub name: String,
    /// Urgency.
    pub class: Class,
    /// What it holds while it works, where it has no variants.
    pub steady: Bytes,
    /// The most it needs while it starts, where it has no variants; at least `steady`.
    pub peak: Bytes,
    /// Sizes it can be run in; the first is the one it starts with. Empty for a worker of one size.
    pub variants: Vec<VariantParams>,
    /// What it comes down to when it is notified that memory is short; `None` when it cannot be notified, or keeps what
    /// it has.
    pub shrinks_to: Option<Bytes>,
    /// When and how it is started.
    #[serde(flatten)]
    pub start: StartParams,
    /// Time between SIGTERM and SIGKILL. Default 1 s.
    pub stop_grace: Duration,
    /// Whether it is never stopped nor made smaller to make room. Default no.
    #[serde(default)]
    pub pinned: bool,
    /// Whether it asks for a lease of its own, by its name. Until then its peak is booked for it.
    #[serde(default)]
    pub own_lease: bool,
    /// What it does when it is idle or has grown.
    #[serde(flatten)]
    pub rest: RestParams,
    /// What it runs, as a name that another program or model does not have: what was learned of its peak is of this one.
    pub model: Option<String>,
}

/// When and how a worker is started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartParams {
    /// Whether it is started with the supervisor.
    pub autostart: bool,
    /// Workers with a smaller number are started first; of equal ones, the first by name.
    pub start_order: u32,
    /// Workers, or the engine's tenant name, that must be up or given up before it is started.
    #[serde(default)]
    pub after: Vec<String>,
    /// Whether it is started before the engine is loaded.
    #[serde(default)]
    pub before_engine: bool,
    /// How long it may take to answer. Default 60 s.
    pub ready_timeout: Duration,
    /// How long it takes to start, for the comparison of costs. Default 1 s while unknown.
    pub reload: Duration,
    /// When it may be started again after a failure.
    pub restart: RestartParams,
}

/// What a worker does when it is idle or has grown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestParams {
    /// Time without work after which it is asked into its smallest variant.
    pub idle_shrink_after: Option<Duration>,
    /// Time without work after which it is stopped, to be started by the next request.
    pub idle_stop_after: Option<Duration>,
    /// Measured memory above which it winds down and is started again.
    pub recycle_above: Option<Bytes>,
    /// Whether it winds down and is started again when what is left after its work grows without end, beyond its peak, and
    /// memory is wanted.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub recycle_leaks: bool,
    /// Whether its sizes were left to be learned: its peak is what the first start reserves, and afterwards the kernel's
    /// figures count.
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
    /// What it holds while it works in `variant`; in its first one if `variant` is unknown.
    #[must_use]
    pub fn steady_of(&self, variant: Option<&str>) -> Bytes {
        self.variant(variant)
            .map_or(self.steady, |variant| variant.steady)
    }

    /// The most it needs to get into `variant`; into its first one if `variant` is unknown.
    #[must_use]
    pub fn peak_of(&self, variant: Option<&str>) -> Bytes {
        self.variant(variant)
            .map_or(self.peak, |variant| variant.peak)
            .max(self.steady_of(variant))
    }

    /// The settings for a variant; those of the first one if it is unknown.
    pub(super) fn variant(&self, name: Option<&str>) -> Option<&VariantParams> {
        self.variants
            .iter()
            .find(|variant| Some(variant.name.as_str()) == name)
            .or_else(|| self.variants.first())
    }
}

/// One size that a worker can be run in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VariantParams {
    /// Its name: `grammar`, `open`.
    pub name: String,
    /// What the worker holds while it works.
    pub steady: Bytes,
    /// The most it needs to get there; at least `steady`.
    pub peak: Bytes,
}

/// When something that failed may be started again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestartParams {
    /// Failures within the window that are answered with a restart; one more gives up. Default 3.
    pub intensity: u32,
    /// The window. Default 60 s.
    pub window: Duration,
    /// Wait before the first restart; doubles with each failure in a row. Default 500 ms.
    pub backoff_min: Duration,
    /// Longest wait. Default 30 s.
    pub backoff_max: Duration,
    /// How long it must have answered before its failures are forgotten. Default 60 s.
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

/// One thing that is wrong with [`Params`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{setting}: `{value}` {problem}")]
pub struct ParamFault {
    /// The setting, as a path: `pressure.critical_below`.
    pub setting: String,
    /// Its value.
    pub value: String,
    /// What is wrong, with the limit.
    pub problem: String,
}

/// Everything that is wrong with [`Params`].
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

    /// Settings of the worker `name`.
    #[must_use]
    pub fn worker(&self, name: &str) -> Option<&WorkerParams> {
        self.workers.iter().find(|worker| worker.name == name)
    }
}

/// Name of the engine's own lease in the book.
pub const ENGINE_TENANT: &str = "llm";

/// Part of a promise, in thousandths, that must be measured back before a target counts as reached. Ollama accepts 75 % and
/// over-commits; page rounding explains a few percent.
pub const VERIFY_PER_MILLE: u32 = 900;

/// Upper watermark: 2.0 GiB of 15 656 MiB, below which voice on an Orin NX degraded in the field.
const ELEVATED_PER_MILLE: u32 = 130;
/// Lower watermark: 1.0 GiB of 15 656 MiB.
const CRITICAL_PER_MILLE: u32 = 65;
/// Last resort: 0.4 to 0.5 GiB of 15 656 MiB.
const LAST_RESORT_PER_MILLE: u32 = 30;
/// Below the minimum reclaim, so that one shed ends the level; above the noise of one sample.
const HYSTERESIS_PER_MILLE: u32 = 20;
/// kubelet's eviction threshold has a minimum reclaim too. A quarter of 636 MiB took every layer of a small model for a shortage
/// of 6 MiB, and 8 % of it half of them.
const MINIMUM_RECLAIM_PER_MILLE: u32 = 50;
/// lmkd-linux calms down for 60 s; kubelet's 5 min are too slow for voice.
const DWELL: Duration = Duration::from_secs(60);
/// The field on a board of this kind: Elevated is waited out for 2 s, Critical is not.
const GRACE: Duration = Duration::from_secs(2);
/// lmkd polls every 10 ms after an event; earlyoom never waits longer than 1 s.
const SAMPLE_MIN: Duration = Duration::from_millis(10);
const SAMPLE_MAX: Duration = Duration::from_secs(1);
fn sample_age_max() -> Duration {
    PressureParams::age_max(SAMPLE_MAX)
}
/// What earlyoom saw with `stress -m 4 --vm-bytes 4G` on a desktop.
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
