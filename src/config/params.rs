//! Parameters of the policy, derived from settings for a machine of known size.

use std::time::Duration;

use super::{Config, Fault, LeaseHolder, Watermark, WorkerConfig, confinement::before_llm};
use cotenant_policy::params::{
    EngineParams, LeaseParams, MachineMemory, ParamFault, Params, PressureParams, RestParams,
    ShedParams, StartParams, WorkerParams,
};
use cotenant_units::{Bytes, fnv1a};

impl Config {
    /// Returns the settings of policy for a `machine`. Its whole memory is the budget unless `budget.total` is set.
    ///
    /// # Errors
    /// If the total exceeds the machine's memory, and as [`Config::params_within`].
    pub fn params(&self, machine: &MachineMemory) -> Result<Params, Vec<Fault>> {
        if let Some(total) = self.budget.total.filter(|total| *total > machine.total) {
            let hint = match machine.limited_by {
                None => "omit `budget.total` to use the machine's memory, or lower it",
                Some(_) => "omit `budget.total` to follow the limit, lower it, or raise the limit",
            };
            let problem = format!("`{total}` is above the {machine}");
            return Err(vec![Fault::new(
                "budget.total".to_owned(),
                problem,
                Some(hint.to_owned()),
            )]);
        }
        self.params_within(machine)
    }

    /// Returns the settings of policy for a machine that may have less than `budget.total`, since a limit may be
    /// lowered at any time.
    ///
    /// # Errors
    /// All contradictions with a budget of that size: a reserve or watermarks that leave nothing, workers whose memory
    /// can never be granted.
    pub fn params_within(&self, machine: &MachineMemory) -> Result<Params, Vec<Fault>> {
        let total = self
            .budget
            .total
            .map_or(machine.total, |total| total.min(machine.total));
        let reserve = self.budget.reserve_of(total);
        let defaults = Params::for_budget(total, reserve, self.budget.scope);
        let budget = defaults.budget.bytes();
        let limit =
            |set: Option<Watermark>, default: Bytes| set.map_or(default, |mark| mark.of(budget));
        let marks = &self.budget.watermarks;
        let before_llm = before_llm(self);
        let hysteresis = limit(self.budget.hysteresis, defaults.pressure.hysteresis);
        // A larger hysteresis raises the minimum reclaim, up to a quarter of the budget, so that one shed ends the
        // level.
        let ends_level = hysteresis.min(budget.per_mille(250));
        let params = Params {
            pressure: PressureParams {
                elevated_below: limit(marks.elevated, defaults.pressure.elevated_below),
                critical_below: limit(marks.critical, defaults.pressure.critical_below),
                last_resort_below: limit(marks.last_resort, defaults.pressure.last_resort_below),
                hysteresis,
                dwell: self.budget.dwell.unwrap_or(defaults.pressure.dwell),
                dwell_by_growth: self.budget.dwell.is_none(),
                grace: self.budget.grace,
                sample_min: self.budget.sample_min,
                sample_max: self.budget.sample_max,
                sample_age_max: PressureParams::age_max(self.budget.sample_max),
                fill_rate_mib_per_s: self.budget.fill_rate_mib_per_s,
            },
            shed: ShedParams {
                minimum_reclaim: self
                    .shedding
                    .reclaim_min
                    .unwrap_or(defaults.shed.minimum_reclaim.max(ends_level)),
                settle: self.shedding.settle,
                deadlines: self.shedding.deadlines,
                verify_timeout: self.shedding.verify_timeout,
            },
            lease: LeaseParams {
                term_min: self.leases.term_min,
                term_max: self.leases.term_max,
                wait_max: self.leases.wait_max,
                queue_max: self.leases.queue_max,
                leases_per_uid: self.leases.per_user_max,
            },
            engine: self.llm.as_ref().map(|llm| EngineParams {
                kv_wanted: llm.context,
                conversations: llm.conversations,
                kv_floor: llm.kv_floor,
                kv_type: llm.kv_type,
                kv_type_least: llm.kv_type_least,
                prefill_chunk: llm.prefill_chunk,
                prefill_chunk_max: llm.prefill_chunk_max,
                resident_min: llm.resident_layers_min.get(),
                mode: llm.mode,
                load_timeout: llm.load_timeout,
                apply_timeout: llm.apply_timeout,
                restart: llm.restart,
            }),
            workers: (0..)
                .zip(&self.workers)
                .map(|(start_order, config)| worker(config, start_order, &before_llm, budget))
                .collect(),
            machine: machine.clone(),
            ..defaults
        };
        match params.validate() {
            Ok(()) => Ok(params),
            Err(error) => Err(error.faults.iter().map(|fault| self.fault(fault)).collect()),
        }
    }

    /// Converts a fault found by policy to its path in the file.
    fn fault(&self, fault: &ParamFault) -> Fault {
        let (path, hint) = match fault.setting.as_str() {
            "budget.reserve" => ("budget.reserve".to_owned(), BUDGET_HINT),
            "pressure.elevated_below" => ("budget.watermarks.elevated".to_owned(), WATERMARK_HINT),
            "pressure.critical_below" => ("budget.watermarks.critical".to_owned(), WATERMARK_HINT),
            "pressure.last_resort_below" => {
                ("budget.watermarks.last_resort".to_owned(), WATERMARK_HINT)
            }
            "pressure.hysteresis" => (
                "budget.hysteresis".to_owned(),
                "lower `budget.hysteresis` or raise `shedding.reclaim_min`",
            ),
            "shed.minimum_reclaim" => (
                "shedding.reclaim_min".to_owned(),
                "lower `shedding.reclaim_min` or `budget.watermarks.elevated`",
            ),
            other => (self.worker_path(other), WORKER_HINT),
        };
        let value = match self.percentage_at(&path) {
            Some(written) => format!("`{written}`, here {},", fault.value),
            None => format!("`{}`", fault.value),
        };
        Fault::new(
            path,
            format!("{value} {}", fault.problem),
            Some(hint.to_owned()),
        )
    }

    /// Returns a watermark as written, if it is a percentage.
    fn percentage_at(&self, path: &str) -> Option<String> {
        let marks = &self.budget.watermarks;
        let mark = match path {
            "budget.watermarks.elevated" => marks.elevated,
            "budget.watermarks.critical" => marks.critical,
            "budget.watermarks.last_resort" => marks.last_resort,
            "budget.hysteresis" => self.budget.hysteresis,
            _ => None,
        };
        match mark? {
            Watermark::PerMille(part) if part % 10 == 0 => Some(format!("{}%", part / 10)),
            Watermark::PerMille(part) => Some(format!("{}.{}%", part / 10, part % 10)),
            Watermark::Bytes(_) => None,
        }
    }

    /// Converts `worker.asr.open.peak` to `workers[0].memory.variants[1].peak`.
    fn worker_path(&self, setting: &str) -> String {
        let mut steps = setting.split('.').skip(1);
        let (name, size) = (steps.next(), steps.next());
        let mut workers = self.workers.iter().zip(0..);
        let Some((worker, index)) = workers.find(|(worker, _)| Some(worker.name.as_str()) == name)
        else {
            return "workers".to_owned();
        };
        let mut variants = worker.memory.variants.iter();
        match variants.position(|variant| Some(variant.name.as_str()) == size) {
            Some(place) => format!("workers[{index}].memory.variants[{place}].peak"),
            None => format!("workers[{index}].memory.peak"),
        }
    }
}

fn worker(
    config: &WorkerConfig,
    start_order: u32,
    before_llm: &[String],
    budget: Bytes,
) -> WorkerParams {
    // A size not stated in the configuration must not make a small budget unusable.
    let least = Bytes::new(budget.get() / AUTO_SHARE).max(config.memory.steady);
    let peak = if config.memory.auto {
        config.memory.peak.min(least)
    } else {
        config.memory.peak
    };
    WorkerParams {
        name: config.name.clone(),
        class: config.class,
        steady: config.memory.steady,
        peak,
        variants: config.memory.variants.clone(),
        shrinks_to: config.pressure.shrinks_to,
        pinned: config.pinned,
        stop_grace: config.stop_grace,
        own_lease: config.lease == LeaseHolder::Own,
        model: Some(model(config)),
        start: StartParams {
            autostart: config.autostart,
            start_order,
            ready_timeout: config.ready.timeout.saturating_add(READY_BACKSTOP),
            restart: config.restart,
            after: config.after.clone(),
            before_engine: before_llm.contains(&config.name),
            ..StartParams::default()
        },
        rest: RestParams {
            idle_shrink_after: config.idle.shrink_after,
            idle_stop_after: config.idle.stop_after,
            recycle_above: config.memory.recycle_above,
            auto: config.memory.auto,
            recycle_leaks: config.memory.recycle_leaks,
        },
    }
}

/// Returns a hash of a worker's arguments and environment: another program, model or option gives another hash.
fn model(config: &WorkerConfig) -> String {
    let words = config.argv.iter();
    let words = words.chain(config.env.iter().flat_map(|(name, value)| [name, value]));
    let hash = fnv1a(words.flat_map(|word| word.bytes().chain([0])));
    format!("{hash:016x}")
}

/// Divisor of the budget that bounds the initial reservation of a worker with learned sizes (our choice: a recogniser,
/// a voice and an LLM).
const AUTO_SHARE: u64 = 3;

/// Time that policy allows a worker beyond `ready.timeout`. Our choice: longer than threads wait on a busy machine.
/// Normally the worker's own supervision ends the wait, with the error of the last attempt; the arbiter's deadline is
/// the backstop.
const READY_BACKSTOP: Duration = Duration::from_secs(5);

const BUDGET_HINT: &str = "lower `budget.reserve` or raise `budget.total`";
const WATERMARK_HINT: &str =
    "watermarks fall from `elevated` over `critical` to `last_resort`, all below the budget";
const WORKER_HINT: &str = "correct what the worker needs, or raise `budget.total`";
