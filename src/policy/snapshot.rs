//! State of the arbiter as operators, metrics and tests see it.
#![expect(missing_docs, reason = "fields are named by what they hold")]

use std::{fmt, time::Duration};

use serde::{Deserialize, Serialize};

use super::{
    death::DeathSummary,
    engine_failure::EngineFailure,
    growth_wait::GrowthWait,
    lease::LeaseView,
    page_pool::Release,
    params::MachineMemory,
    peaks::Peaks,
    pressure::{PressureLevel, Sample},
    reboot::RebootReason,
    residency::{EnginePlan, ModelShape},
};
use cotenant_units::{Bytes, Timestamp, Tokens};

/// State of the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EngineState {
    /// No model is configured.
    #[default]
    Absent,
    /// The header is being read, the engine waits for memory, or the model is being loaded.
    Loading,
    /// Serves requests.
    Ready,
    /// Ended after a failure.
    Failed,
}

/// The engine's public state.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct EngineView {
    pub state: EngineState,
    pub shape: Option<ModelShape>,
    pub in_force: Option<EnginePlan>,
    /// The requested plan, if it is not in force yet.
    pub asked: Option<EnginePlan>,
    /// The plan for plentiful memory.
    pub full: Option<EnginePlan>,
    /// Condition that its growth waits for; `None` with the full plan, or during a change.
    pub waits: Option<GrowthWait>,
    /// Last failure, until it is ready again.
    pub failure: Option<EngineFailure>,
    /// Predicted speed of answers under the plan in force, in thousandths of a token per second, from the measurements
    /// at load.
    pub milli_tokens_per_s: Option<u64>,
    /// The same for the full plan.
    pub full_milli_tokens_per_s: Option<u64>,
    /// Contents of the KV cache.
    pub kv: KvView,
    /// Longest context of one conversation, if configured.
    #[serde(skip)]
    pub context: Option<Tokens>,
}

impl EngineView {
    /// Returns the longest context of one conversation under `plan`, whose KV capacity may also hold states of others.
    #[must_use]
    pub fn context_of(&self, plan: &EnginePlan) -> Tokens {
        plan.kv_capacity
            .min(self.context.unwrap_or(plan.kv_capacity))
    }

    /// Returns the predicted speed under the plan in force relative to the full plan, in thousandths, at most 1000;
    /// `None` until both are known.
    #[must_use]
    pub fn speed_permille(&self) -> Option<u64> {
        let (now, full) = (self.milli_tokens_per_s?, self.full_milli_tokens_per_s?);
        let permille = now.saturating_mul(1000).checked_div(full)?;
        Some(permille.min(1000))
    }
}

/// Contents of the KV cache, from the engine's last report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct KvView {
    /// Tokens of the running answer and its prompt.
    pub used: Tokens,
    /// Tokens kept from earlier answers while no request runs, including the space of state copies for resuming them.
    pub kept: Tokens,
    /// Oldest tokens of the running answer that were dropped, as its request permits.
    pub dropped: Tokens,
    /// Bytes held but not touched yet, which take no memory.
    pub untouched: Bytes,
}

/// State of a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkerState {
    /// Not running, and not wanted.
    #[default]
    Stopped,
    /// Wanted, and waiting for memory.
    AwaitingMemory,
    /// Wanted, and in back-off after a failure.
    BackingOff,
    /// Running, and not ready yet.
    Starting,
    /// Serves requests.
    Ready,
    /// Asked to stop.
    Stopping,
    /// Failed too often within the window, or in a way that requires an operator.
    Degraded,
}

impl WorkerState {
    /// Returns its name in messages.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Stopped => "stopped",
            Self::AwaitingMemory => "waiting for memory",
            Self::BackingOff => "backing off",
            Self::Starting => "starting",
            Self::Ready => "ready",
            Self::Stopping => "stopping",
            Self::Degraded => "degraded",
        }
    }
}

/// Why a worker without a fault does not run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rest {
    /// It was idle; the next request starts it.
    Idle,
    /// An operator stopped it; only an operator starts it.
    Operator,
    /// Its memory was reclaimed; it restarts when there is room, or with the next request.
    Shed,
}

/// A worker's public state.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct WorkerView {
    pub name: String,
    pub state: WorkerState,
    pub pid: Option<u32>,
    pub variant: Option<String>,
    /// Starts so far.
    pub starts: u32,
    pub failures: u32,
    /// The last exit, as text.
    pub last_exit: Option<String>,
    /// The last death.
    pub last_death: Option<DeathSummary>,
    /// Time of the next start during a back-off.
    pub retry_at: Option<Timestamp>,
    /// Reason for which it does not run, if not a fault.
    pub rest: Option<Rest>,
    /// Whether it accepts no requests because it is about to be stopped or restarted.
    pub winding_up: bool,
    /// Memory that it waits for, while there is too little to start it.
    pub waits: Option<WorkerWait>,
}

/// Memory that a worker needs to start, and the memory available.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerWait {
    /// Bytes that must be free for its start.
    pub needs: Bytes,
    /// The configured need; `needs` is larger if more was measured.
    pub configured: Bytes,
    pub free: Bytes,
    /// Maximum memory available to it, given what the `keepers` keep.
    pub most: Bytes,
    /// Holders that are not reclaimed for it, with the bytes that each keeps.
    pub keepers: Vec<(String, Bytes)>,
}

impl WorkerWait {
    /// Whether it cannot start, however long it waits.
    #[must_use]
    pub fn is_out_of_reach(&self) -> bool {
        self.needs > self.most
    }
}

/// The whole state. In JSON, the fields of the groups are flattened into one object.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Snapshot {
    pub at: Timestamp,
    #[serde(flatten)]
    pub memory: MemoryView,
    #[serde(flatten)]
    pub pressure: PressureView,
    /// All leases, including ended ones whose holders still use memory
    /// ([`LeaseState::Gone`](super::lease::LeaseState::Gone), nothing held), and waiting requests.
    pub leases: Vec<LeaseView>,
    pub waiting: u32,
    pub engine: EngineView,
    pub workers: Vec<WorkerView>,
    /// Learned peaks of holders.
    pub peaks: Peaks,
    pub draining: bool,
    #[serde(flatten)]
    pub totals: Totals,
    /// Destination of the last release, on a board with a page pool for the GPU.
    pub last_release: Option<Release>,
    /// Reasons for advising a reboot; empty if none is advised.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub reboot: Vec<RebootReason>,
}

impl Snapshot {
    /// Whether the level is Normal, no request waits and no reclaim is in progress, so that optional memory may be
    /// used.
    #[must_use]
    pub fn is_ample(&self) -> bool {
        self.pressure.level == PressureLevel::Normal
            && self.waiting == 0
            && self.memory.coming_back == Bytes::ZERO
    }
}

/// The budget and its use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MemoryView {
    pub budget: Bytes,
    /// Sum of all leases; those in transition count with the larger of old and new size.
    pub held: Bytes,
    /// Measured use of all holders.
    pub used: Bytes,
    /// Measured use beyond `held`, by known holders and by unmanaged processes.
    pub unaccounted: Bytes,
    /// Budget minus held minus unaccounted; at least zero.
    pub free: Bytes,
    /// The part of `unaccounted` used by unmanaged processes.
    pub unmanaged: Bytes,
    /// The part of `free` reserved for restarting the engine and workers.
    pub returning: Bytes,
    /// The part of `held` that is being reclaimed and not measured as released yet.
    pub coming_back: Bytes,
}

/// The pressure level and its inputs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PressureView {
    /// Remaining memory of the budget in the last sample; `None` before the first. The unused part of the reserve does
    /// not count.
    pub headroom: Option<Bytes>,
    pub level: PressureLevel,
    /// Headroom below which the level is Elevated.
    pub elevated_below: Bytes,
    /// Headroom below which the level is Critical.
    pub critical_below: Bytes,
    /// Headroom above `elevated_below` that a shed under pressure aims for.
    pub minimum_reclaim: Bytes,
    /// Loss of headroom per second over the last seconds.
    pub losing_per_s: Bytes,
    /// Time until exhaustion at that rate, if it is near.
    pub exhausted_in: Option<Duration>,
    /// Validity of the last sample: time until the next one is due.
    pub sample_interval: Duration,
    pub sample: Option<Sample>,
    /// The memory that contains the budget.
    #[serde(flatten)]
    pub machine: MachineMemory,
}

/// Totals of sheds and growth.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Totals {
    /// Sheds carried out.
    pub sheds: u64,
    /// Bytes removed from the ledger by sheds, touched or not.
    pub shed_bytes: Bytes,
    /// Bytes regrown.
    pub regrown_bytes: Bytes,
}

impl fmt::Display for WorkerWait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (needs, free) = (self.needs, self.free);
        write!(f, "it needs {needs}")?;
        if needs > self.configured {
            write!(f, ", as observed, where {} is configured", self.configured)?;
        }
        if !self.is_out_of_reach() {
            return write!(f, ", and {free} is free for it");
        }
        write!(f, ", and at most {} can become free", self.most)?;
        for (number, (keeper, bytes)) in self.keepers.iter().enumerate() {
            let before = if number == 0 { " while" } else { "," };
            write!(f, "{before} `{keeper}` keeps {bytes}")?;
        }
        f.write_str(if needs > self.configured {
            "; raise the budget, shrink the others, or remove `peaks.json` in the state folder if the observed use was exceptional"
        } else {
            "; raise the budget, shrink the others, or lower its `memory.peak`"
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speed_is_a_part_of_the_full_speed_once_both_are_known() {
        for (now, full, permille) in [
            (None, Some(8000), None),
            (Some(8000), None, None),
            (Some(0), Some(0), None),
            (Some(3000), Some(8000), Some(375)),
            (Some(9000), Some(8000), Some(1000)),
        ] {
            let engine = EngineView {
                milli_tokens_per_s: now,
                full_milli_tokens_per_s: full,
                ..EngineView::default()
            };
            assert_eq!(engine.speed_permille(), permille, "{now:?} of {full:?}");
        }
    }

    #[test]
    fn capacity_for_states_is_no_context() {
        let context = |capacity: u32, most: Option<u32>| {
            let plan = EnginePlan {
                resident: [].into(),
                kv_capacity: Tokens::new(capacity),
                prefill_chunk: Tokens::new(128),
                kv_type: crate::kv_type::KvType::F16,
            };
            let engine = EngineView {
                context: most.map(Tokens::new),
                ..EngineView::default()
            };
            engine.context_of(&plan).get()
        };
        assert_eq!(context(7680, Some(4096)), 4096);
        assert_eq!(context(1024, Some(4096)), 1024);
        assert_eq!(context(7680, None), 7680);
    }

    #[test]
    fn groups_are_not_to_be_seen_in_json() {
        let sample = Some(Sample::default());
        let pressure = PressureView {
            sample,
            ..PressureView::default()
        };
        let state = Snapshot {
            pressure,
            ..Snapshot::default()
        };
        let text = serde_json::to_string(&state).unwrap();
        let start = r#"{"at":0,"budget":0,"held":0,"used":0,"unaccounted":0,"free":0,"unmanaged":0,"returning":0,"#;
        assert!(text.starts_with(start), "{text}");
        assert!(
            text.contains(r#""sample":{"taken_at":0,"mem_total":0,"mem_available":0,"mem_free":0,"cma_free":null,"#)
        );
        assert!(
            text.contains(r#""sheds":0,"shed_bytes":0,"regrown_bytes":0,"last_release":null}"#),
            "{text}"
        );
    }
}
