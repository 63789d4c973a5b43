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
    /// Its header is read, it waits for memory, or it loads.
    Loading,
    /// Answers.
    Ready,
    /// Gone.
    Failed,
}

/// The engine as others see it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct EngineView {
    pub state: EngineState,
    pub shape: Option<ModelShape>,
    pub in_force: Option<EnginePlan>,
    /// What it has been asked for, if that is not in force yet.
    pub asked: Option<EnginePlan>,
    /// What it should hold when memory is plentiful.
    pub full: Option<EnginePlan>,
    /// What its growth waits for; `None` while it has its full plan, or changes.
    pub waits: Option<GrowthWait>,
    /// Why it failed last, until it is ready again.
    pub failure: Option<EngineFailure>,
    /// Tokens of an answer per second under the plan in force, in thousandths, as reckoned from what was measured when
    /// it was loaded.
    pub milli_tokens_per_s: Option<u64>,
    /// The same under the full plan.
    pub full_milli_tokens_per_s: Option<u64>,
    /// What is in the KV cache.
    pub kv: KvView,
}

impl EngineView {
    /// Predicted speed under the plan in force as a part of that under the full plan, in thousandths, at most 1000;
    /// `None` until both are known.
    #[must_use]
    pub fn speed_permille(&self) -> Option<u64> {
        let (now, full) = (self.milli_tokens_per_s?, self.full_milli_tokens_per_s?);
        let permille = now.saturating_mul(1000).checked_div(full)?;
        Some(permille.min(1000))
    }
}

/// Contents of the KV cache, as the engine last reported them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct KvView {
    /// Tokens of the running answer and its prompt.
    pub used: Tokens,
    /// Tokens that earlier answers have left while nothing runs, with the place of the copies of the state to go on from.
    pub kept: Tokens,
    /// Tokens that the running answer has lost, the oldest, as its request allows.
    pub dropped: Tokens,
    /// What is held and not touched yet, so that it takes no memory.
    pub untouched: Bytes,
}

/// State of a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkerState {
    /// Not running, and not wanted.
    #[default]
    Stopped,
    /// Wanted, and there is no memory for it yet.
    AwaitingMemory,
    /// Wanted, and waits after a failure.
    BackingOff,
    /// Runs and does not answer yet.
    Starting,
    /// Answers.
    Ready,
    /// Has been asked to stop.
    Stopping,
    /// Failed too often in a short time, or in a way that only an operator can cure.
    Degraded,
}

impl WorkerState {
    /// As messages name it.
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

/// Why a worker does not run although nothing is wrong with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rest {
    /// It had nothing to do; the next request starts it.
    Idle,
    /// An operator stopped it; only an operator starts it.
    Operator,
    /// Its memory was needed; it comes back when there is room, or with the next request.
    Shed,
}

/// A worker as others see it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct WorkerView {
    pub name: String,
    pub state: WorkerState,
    pub pid: Option<u32>,
    pub variant: Option<String>,
    /// Starts so far, the first one included.
    pub starts: u32,
    pub failures: u32,
    /// The last exit, in words.
    pub last_exit: Option<String>,
    /// What it died of last.
    pub last_death: Option<DeathSummary>,
    /// When it starts again, while it waits after a failure.
    pub retry_at: Option<Timestamp>,
    /// Why it does not run, when that is for rest.
    pub rest: Option<Rest>,
    /// Whether it takes nothing new, as it is about to be stopped or restarted.
    pub winding_up: bool,
    /// What it waits for, while there is not enough memory to start it.
    pub waits: Option<WorkerWait>,
}

/// The memory for which a worker waits to be started.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerWait {
    /// What has to be free for its start.
    pub needs: Bytes,
    /// What it is set to need; `needs` is more where more was seen.
    pub configured: Bytes,
    pub free: Bytes,
    /// The most that it can ever have, while those stay that keep what they have.
    pub most: Bytes,
    /// Those, and what each keeps.
    pub keepers: Vec<(String, Bytes)>,
}

impl WorkerWait {
    /// Whether it cannot be started, however long it waits.
    #[must_use]
    pub fn is_out_of_reach(&self) -> bool {
        self.needs > self.most
    }
}

/// The whole state. In JSON the groups are not to be seen: their fields stand beside each other.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Snapshot {
    pub at: Timestamp,
    #[serde(flatten)]
    pub memory: MemoryView,
    #[serde(flatten)]
    pub pressure: PressureView,
    /// All leases; those that have ended, as [`LeaseState::Gone`](super::lease::LeaseState::Gone) with nothing held, while
    /// their holders are measured to use memory; and requests that wait.
    pub leases: Vec<LeaseView>,
    pub waiting: u32,
    pub engine: EngineView,
    pub workers: Vec<WorkerView>,
    /// What was learned of holders' peaks.
    pub peaks: Peaks,
    pub draining: bool,
    #[serde(flatten)]
    pub totals: Totals,
    /// What became of the last memory that was given back, on a board with a page pool for the GPU.
    pub last_release: Option<Release>,
    /// Why a reboot is advised; empty while none is.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub reboot: Vec<RebootReason>,
}

impl Snapshot {
    /// Whether nothing is to be given back and nothing waits for memory, so that more may be done than was asked for.
    #[must_use]
    pub fn is_ample(&self) -> bool {
        self.pressure.level == PressureLevel::Normal
            && self.waiting == 0
            && self.memory.coming_back == Bytes::ZERO
    }
}

/// The budget, and what of it is held and used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MemoryView {
    pub budget: Bytes,
    /// Sum of all leases, those in transition with the larger of old and new.
    pub held: Bytes,
    /// What all holders were measured to use.
    pub used: Bytes,
    /// Measured use beyond what is held, of known holders and of unmanaged processes.
    pub unaccounted: Bytes,
    /// Budget minus held minus unaccounted; zero when those are more.
    pub free: Bytes,
    /// The part of `unaccounted` that no known holder uses.
    pub unmanaged: Bytes,
    /// The part of `free` that is kept for the engine and workers that are to come back.
    pub returning: Bytes,
    /// The part of `held` that holders have been asked to give back and that is not measured back yet.
    pub coming_back: Bytes,
}

/// The pressure level, and the figures that it comes from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PressureView {
    /// What can still be used before the budget is used up, by the last sample; `None` before the first. The part of the
    /// reserve that is not used does not count.
    pub headroom: Option<Bytes>,
    pub level: PressureLevel,
    /// Headroom below which the level is Elevated.
    pub elevated_below: Bytes,
    /// Headroom below which the level is Critical.
    pub critical_below: Bytes,
    /// What a shed under pressure leaves above `elevated_below`.
    pub minimum_reclaim: Bytes,
    /// What headroom has been losing per second over the last seconds.
    pub losing_per_s: Bytes,
    /// When nothing will be left at that rate, if that is near.
    pub exhausted_in: Option<Duration>,
    /// How long the last sample is trusted.
    pub sample_interval: Duration,
    pub sample: Option<Sample>,
    /// The memory that the budget is a part of.
    #[serde(flatten)]
    pub machine: MachineMemory,
}

/// What was given back and grown back so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Totals {
    /// Sheds carried out.
    pub sheds: u64,
    /// Bytes that sheds took off the book, touched or reserved.
    pub shed_bytes: Bytes,
    /// Bytes grown back.
    pub regrown_bytes: Bytes,
}

impl fmt::Display for WorkerWait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (needs, free) = (self.needs, self.free);
        write!(f, "it needs {needs}")?;
        if needs > self.configured {
            write!(
                f,
                ", by what it was seen to use, where {} is configured",
                self.configured
            )?;
        }
        if !self.is_out_of_reach() {
            return write!(f, ", and {free} is free for it");
        }
        write!(f, ", and at most {} can ever be had", self.most)?;
        for (number, (keeper, bytes)) in self.keepers.iter().enumerate() {
            let before = if number == 0 { " while" } else { "," };
            write!(f, "{before} `{keeper}` keeps {bytes}")?;
        }
        f.write_str(if needs > self.configured {
            "; raise the budget, lower what the others keep, or remove `peaks.json` in the state folder if that was no honest use"
        } else {
            "; raise the budget, lower what the others keep, or its `memory.peak`"
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
