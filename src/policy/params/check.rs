//! Validation of parameters against limits and each other.

use std::{collections::BTreeSet, time::Duration};

use super::{
    ENGINE_TENANT, EngineParams, FILL_RATE_MIB_PER_S, ParamFault, Params, ParamsError,
    RestartParams,
};
use crate::lease::Class;
use cotenant_units::{Bytes, TimeSpan};

/// Adds a fault for each line whose condition holds: `wrong => "setting" = value, "problem with its {limit}";`.
macro_rules! faults {
    ($faults:ident: $($wrong:expr => $setting:expr, $value:expr, $($problem:expr),+;)+) => {
        $(if $wrong {
            $faults.push(ParamFault {
                setting: $setting.to_string(),
                value: $value.to_string(),
                problem: format!($($problem),+),
            });
        })+
    };
}

impl Params {
    /// Checks every setting against its limits and against the others.
    ///
    /// # Errors
    /// All faults at once.
    pub fn validate(&self) -> Result<(), ParamsError> {
        let mut faults = Vec::new();
        let budget = &self.budget;
        faults! { faults:
            budget.reserve >= budget.total =>
                "budget.reserve", budget.reserve, "leaves nothing of the total of {}", budget.total;
        }
        // Limits that are parts of an empty budget are faults of the same cause.
        if faults.is_empty() {
            self.check_pressure(&mut faults);
            self.check_shed(&mut faults);
            self.check_lease(&mut faults);
            if let Some(engine) = &self.engine {
                check_engine(engine, &mut faults);
            }
            self.check_workers(&mut faults);
        }
        if faults.is_empty() {
            Ok(())
        } else {
            Err(ParamsError { faults })
        }
    }

    fn check_pressure(&self, faults: &mut Vec<ParamFault>) {
        let (it, budget, reclaim) = (
            &self.pressure,
            self.budget.bytes(),
            self.shed.minimum_reclaim,
        );
        faults! { faults:
            it.elevated_below >= budget =>
                "pressure.elevated_below", it.elevated_below, "is not below the budget of {budget}";
            it.critical_below >= it.elevated_below =>
                "pressure.critical_below", it.critical_below,
                "is not below the upper watermark of {}", it.elevated_below;
            it.last_resort_below > it.critical_below =>
                "pressure.last_resort_below", it.last_resort_below,
                "is above the lower watermark of {}", it.critical_below;
            it.hysteresis > reclaim =>
                "pressure.hysteresis", it.hysteresis,
                "is above the minimum reclaim of {reclaim}: one shed would not end the level";
            it.dwell > DWELL_MAX => "pressure.dwell", TimeSpan(it.dwell), "is above {}", TimeSpan(DWELL_MAX);
            it.grace > GRACE_MAX => "pressure.grace", TimeSpan(it.grace), "is above {}", TimeSpan(GRACE_MAX);
            it.sample_min < SAMPLE_LEAST || it.sample_min > it.sample_max =>
                "pressure.sample_min", TimeSpan(it.sample_min),
                "is not between {} and sample_max of {}", TimeSpan(SAMPLE_LEAST), TimeSpan(it.sample_max);
            it.sample_max > SAMPLE_MOST =>
                "pressure.sample_max", TimeSpan(it.sample_max), "is above {}", TimeSpan(SAMPLE_MOST);
            it.fill_rate_mib_per_s == 0 =>
                "pressure.fill_rate_mib_per_s", it.fill_rate_mib_per_s,
                "is zero; {FILL_RATE_MIB_PER_S} fits most machines";
        }
    }

    fn check_shed(&self, faults: &mut Vec<ParamFault>) {
        let it = &self.shed;
        let left = self
            .budget
            .bytes()
            .saturating_sub(self.pressure.elevated_below);
        faults! { faults:
            it.minimum_reclaim >= left =>
                "shed.minimum_reclaim", it.minimum_reclaim,
                "is not below the {left} that the upper watermark leaves of the budget";
            it.settle > SETTLE_MAX => "shed.settle", TimeSpan(it.settle), "is above {}", TimeSpan(SETTLE_MAX);
            it.verify_poll < SAMPLE_LEAST =>
                "shed.verify_poll", TimeSpan(it.verify_poll), "is below {}", TimeSpan(SAMPLE_LEAST);
            it.verify_timeout < it.verify_poll =>
                "shed.verify_timeout", TimeSpan(it.verify_timeout),
                "is below verify_poll of {}", TimeSpan(it.verify_poll);
            it.verify_per_mille == 0 || it.verify_per_mille > 1000 =>
                "shed.verify_per_mille", it.verify_per_mille, "is not between 1 and 1000";
        }
        for class in Class::ALL {
            let deadline = it.deadlines.of(class);
            faults! { faults:
                deadline.is_zero() || deadline > DEADLINE_MAX =>
                    format!("shed.deadlines.{class}"), TimeSpan(deadline),
                    "is not above zero and up to {}", TimeSpan(DEADLINE_MAX);
            }
        }
    }

    fn check_lease(&self, faults: &mut Vec<ParamFault>) {
        let it = &self.lease;
        faults! { faults:
            it.term_min.is_zero() || it.term_min > it.term_max =>
                "lease.term_min", TimeSpan(it.term_min),
                "is not above zero and up to term_max of {}", TimeSpan(it.term_max);
        }
        for (setting, value) in [
            ("lease.queue_max", it.queue_max),
            ("lease.leases_per_uid", it.leases_per_uid),
            ("lease.text_max", it.text_max),
        ] {
            faults! { faults:
                value == 0 || value > COUNT_MAX => setting, value, "is not between 1 and {COUNT_MAX}";
            }
        }
    }

    fn check_workers(&self, faults: &mut Vec<ParamFault>) {
        let budget = self.budget.bytes();
        let mut names = BTreeSet::new();
        for worker in &self.workers {
            let name = &worker.name;
            faults! { faults:
                name.is_empty() || name == ENGINE_TENANT =>
                    "worker.name", name, "is empty or the name of the engine's own lease";
                !names.insert(name) => "worker.name", name, "is used by two workers";
            }
            let mut variants = BTreeSet::new();
            for variant in worker.variants.iter().map(|variant| &variant.name) {
                faults! { faults:
                    !variants.insert(variant) =>
                        format!("worker.{name}.variants"), variant, "is used by two variants";
                }
            }
            let mut sizes = vec![(String::new(), worker.steady, worker.peak)];
            if !worker.variants.is_empty() {
                let variants = worker.variants.iter();
                sizes = variants
                    .map(|it| (format!(".{}", it.name), it.steady, it.peak))
                    .collect();
            }
            for (variant, steady, peak) in sizes {
                let at = format!("worker.{name}{variant}");
                faults! { faults:
                    steady == Bytes::ZERO => format!("{at}.steady"), steady, "is zero";
                    peak < steady => format!("{at}.peak"), peak, "is below its steady size of {steady}";
                    peak > budget => format!("{at}.peak"), peak, "is above the whole budget of {budget}";
                }
            }
            let start = &worker.start;
            faults! { faults:
                start.ready_timeout.is_zero() =>
                    format!("worker.{name}.ready_timeout"), TimeSpan(start.ready_timeout), "is zero";
            }
            check_restart(&format!("worker.{name}.restart"), &start.restart, faults);
        }
    }
}

fn check_engine(it: &EngineParams, faults: &mut Vec<ParamFault>) {
    faults! { faults:
        it.kv_floor.get() == 0 || it.kv_floor > it.kv_wanted =>
            "engine.kv_floor", it.kv_floor, "is not between 1 and kv_wanted of {} tokens", it.kv_wanted;
        it.kv_type_least > it.kv_type =>
            "engine.kv_type_least", it.kv_type_least, "is larger than kv_type, {}", it.kv_type;
        it.prefill_chunk.get() == 0 => "engine.prefill_chunk", it.prefill_chunk, "is zero";
        it.prefill_chunk_max.get() != 0 && it.prefill_chunk > it.prefill_chunk_max =>
            "engine.prefill_chunk", it.prefill_chunk, "is larger than prefill_chunk_max, {}", it.prefill_chunk_max;
        it.apply_timeout.is_zero() => "engine.apply_timeout", TimeSpan(it.apply_timeout), "is zero";
    }
    check_restart("engine.restart", &it.restart, faults);
}

fn check_restart(at: &str, it: &RestartParams, faults: &mut Vec<ParamFault>) {
    faults! { faults:
        it.backoff_min.is_zero() || it.backoff_min > it.backoff_max =>
            format!("{at}.backoff_min"), TimeSpan(it.backoff_min),
            "is not above zero and up to backoff_max of {}", TimeSpan(it.backoff_max);
        it.window.is_zero() => format!("{at}.window"), TimeSpan(it.window), "is zero";
        it.intensity > INTENSITY_MAX => format!("{at}.intensity"), it.intensity, "is above {INTENSITY_MAX}";
    }
}

const GRACE_MAX: Duration = Duration::from_secs(60);
const DWELL_MAX: Duration = Duration::from_secs(3600);
const SAMPLE_LEAST: Duration = Duration::from_millis(1);
const SAMPLE_MOST: Duration = Duration::from_secs(10);
const SETTLE_MAX: Duration = Duration::from_secs(60);
const DEADLINE_MAX: Duration = Duration::from_secs(60);
const COUNT_MAX: u32 = 100_000;
const INTENSITY_MAX: u32 = 100;
