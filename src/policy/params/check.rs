//! Validation of parameters against limits and each other.

use std::{collections::BTreeSet, time::Duration};

use super::{ENGINE_TENANT, EngineParams, FILL_RATE_MIB_PER_S, ParamFault, Params, ParamsError, RestartParams};
use crate::{policy::lease::Class, units::Bytes};

impl Params {
    /// Checks every setting against its limits and against the others.
    ///
    /// # Errors
    /// All faults at once.
    pub fn validate(&self) -> Result<(), ParamsError> {
        let mut faults = Faults::default();
        self.check_budget(&mut faults);
        if !faults.0.is_empty() {
            // Limits that are parts of an empty budget are faults of the same cause.
            return Err(ParamsError { faults: faults.0 });
        }
        self.check_pressure(&mut faults);
        self.check_shed(&mut faults);
        self.check_lease(&mut faults);
        if let Some(engine) = &self.engine {
            check_engine(engine, &mut faults);
        }
        self.check_workers(&mut faults);
        if faults.0.is_empty() {
            Ok(())
        } else {
            Err(ParamsError { faults: faults.0 })
        }
    }

    fn check_budget(&self, faults: &mut Faults) {
        let budget = &self.budget;
        if budget.reserve >= budget.total {
            faults.add(
                "budget.reserve",
                budget.reserve,
                format!("leaves nothing of the total of {}", budget.total),
            );
        }
    }

    fn check_pressure(&self, faults: &mut Faults) {
        let pressure = &self.pressure;
        let budget = self.budget.bytes();
        if pressure.elevated_below >= budget {
            faults.add(
                "pressure.elevated_below",
                pressure.elevated_below,
                format!("is not below the budget of {budget}"),
            );
        }
        faults.add_where(
            pressure.critical_below >= pressure.elevated_below,
            ("pressure.critical_below", pressure.critical_below),
            ("is not below the upper watermark of", pressure.elevated_below),
        );
        faults.add_where(
            pressure.last_resort_below > pressure.critical_below,
            ("pressure.last_resort_below", pressure.last_resort_below),
            ("is above the lower watermark of", pressure.critical_below),
        );
        if pressure.hysteresis > self.shed.minimum_reclaim {
            faults.add(
                "pressure.hysteresis",
                pressure.hysteresis,
                format!(
                    "is above the minimum reclaim of {}: one shed would not end the level",
                    self.shed.minimum_reclaim
                ),
            );
        }
        if pressure.dwell > DWELL_MAX {
            faults.add_time("pressure.dwell", pressure.dwell, format!("is above {DWELL_MAX:?}"));
        }
        if pressure.grace > GRACE_MAX {
            faults.add_time("pressure.grace", pressure.grace, format!("is above {GRACE_MAX:?}"));
        }
        if pressure.sample_min < SAMPLE_LEAST || pressure.sample_min > pressure.sample_max {
            faults.add_time(
                "pressure.sample_min",
                pressure.sample_min,
                format!(
                    "is not between {SAMPLE_LEAST:?} and sample_max of {:?}",
                    pressure.sample_max
                ),
            );
        }
        if pressure.sample_max > SAMPLE_MOST {
            faults.add_time(
                "pressure.sample_max",
                pressure.sample_max,
                format!("is above {SAMPLE_MOST:?}"),
            );
        }
        if pressure.fill_rate_mib_per_s == 0 {
            faults.add(
                "pressure.fill_rate_mib_per_s",
                0,
                format!("is zero; {FILL_RATE_MIB_PER_S} fits most machines"),
            );
        }
    }

    fn check_shed(&self, faults: &mut Faults) {
        let shed = &self.shed;
        let left = self.budget.bytes().saturating_sub(self.pressure.elevated_below);
        if shed.minimum_reclaim >= left {
            faults.add(
                "shed.minimum_reclaim",
                shed.minimum_reclaim,
                format!("is not below the {left} that the upper watermark leaves of the budget"),
            );
        }
        if shed.settle > SETTLE_MAX {
            faults.add_time("shed.settle", shed.settle, format!("is above {SETTLE_MAX:?}"));
        }
        if shed.verify_poll < SAMPLE_LEAST {
            faults.add_time(
                "shed.verify_poll",
                shed.verify_poll,
                format!("is below {SAMPLE_LEAST:?}"),
            );
        }
        if shed.verify_timeout < shed.verify_poll {
            faults.add_time(
                "shed.verify_timeout",
                shed.verify_timeout,
                format!("is below verify_poll of {:?}", shed.verify_poll),
            );
        }
        if shed.verify_per_mille == 0 || shed.verify_per_mille > 1000 {
            faults.add(
                "shed.verify_per_mille",
                shed.verify_per_mille,
                "is not between 1 and 1000".to_owned(),
            );
        }
        for class in [
            Class::AudioRealtime,
            Class::Interactive,
            Class::LlmElastic,
            Class::Batch,
        ] {
            let deadline = shed.deadlines.of(class);
            if deadline.is_zero() || deadline > DEADLINE_MAX {
                faults.add_time(
                    &format!("shed.deadlines.{class}"),
                    deadline,
                    format!("is not above zero and up to {DEADLINE_MAX:?}"),
                );
            }
        }
    }

    fn check_lease(&self, faults: &mut Faults) {
        let lease = &self.lease;
        if lease.term_min.is_zero() || lease.term_min > lease.term_max {
            faults.add_time(
                "lease.term_min",
                lease.term_min,
                format!("is not above zero and up to term_max of {:?}", lease.term_max),
            );
        }
        for (setting, value) in [
            ("lease.queue_max", lease.queue_max),
            ("lease.leases_per_uid", lease.leases_per_uid),
            ("lease.text_max", lease.text_max),
        ] {
            if value == 0 || value > COUNT_MAX {
                faults.add(setting, value, format!("is not between 1 and {COUNT_MAX}"));
            }
        }
    }

    fn check_workers(&self, faults: &mut Faults) {
        let budget = self.budget.bytes();
        let mut names = BTreeSet::new();
        for worker in &self.workers {
            let name = &worker.name;
            if name.is_empty() || name == ENGINE_TENANT {
                faults.add(
                    "worker.name",
                    name,
                    "is empty or the name of the engine's own lease".to_owned(),
                );
            }
            if !names.insert(name) {
                faults.add("worker.name", name, "is used by two workers".to_owned());
            }
            let mut variants = BTreeSet::new();
            for variant in &worker.variants {
                if !variants.insert(&variant.name) {
                    faults.add(
                        &format!("worker.{name}.variants"),
                        &variant.name,
                        "is used by two variants".to_owned(),
                    );
                }
            }
            let sizes = if worker.variants.is_empty() {
                vec![(String::new(), worker.steady, worker.peak)]
            } else {
                worker
                    .variants
                    .iter()
                    .map(|variant| (format!(".{}", variant.name), variant.steady, variant.peak))
                    .collect()
            };
            for (variant, steady, peak) in sizes {
                if steady == Bytes::ZERO {
                    faults.add(&format!("worker.{name}{variant}.steady"), steady, "is zero".to_owned());
                }
                if peak < steady {
                    faults.add(
                        &format!("worker.{name}{variant}.peak"),
                        peak,
                        format!("is below its steady size of {steady}"),
                    );
                }
                if peak > budget {
                    faults.add(
                        &format!("worker.{name}{variant}.peak"),
                        peak,
                        format!("is above the whole budget of {budget}"),
                    );
                }
            }
            if worker.start.ready_timeout.is_zero() {
                faults.add_time(
                    &format!("worker.{name}.ready_timeout"),
                    worker.start.ready_timeout,
                    "is zero".to_owned(),
                );
            }
            check_restart(&format!("worker.{name}.restart"), &worker.start.restart, faults);
        }
    }
}

fn check_engine(engine: &EngineParams, faults: &mut Faults) {
    if engine.kv_floor.get() == 0 || engine.kv_floor > engine.kv_wanted {
        faults.add(
            "engine.kv_floor",
            engine.kv_floor,
            format!("is not between 1 and kv_wanted of {} tokens", engine.kv_wanted),
        );
    }
    faults.add_where(
        engine.kv_type_least > engine.kv_type,
        ("engine.kv_type_least", engine.kv_type_least),
        ("is larger than kv_type,", engine.kv_type),
    );
    if engine.prefill_chunk.get() == 0 {
        faults.add("engine.prefill_chunk", engine.prefill_chunk, "is zero".to_owned());
    }
    if engine.prefill_chunk_max.get() != 0 {
        faults.add_where(
            engine.prefill_chunk > engine.prefill_chunk_max,
            ("engine.prefill_chunk", engine.prefill_chunk),
            ("is larger than prefill_chunk_max,", engine.prefill_chunk_max),
        );
    }
    if engine.apply_timeout.is_zero() {
        faults.add_time("engine.apply_timeout", engine.apply_timeout, "is zero".to_owned());
    }
    check_restart("engine.restart", &engine.restart, faults);
}

fn check_restart(at: &str, restart: &RestartParams, faults: &mut Faults) {
    if restart.backoff_min.is_zero() || restart.backoff_min > restart.backoff_max {
        faults.add_time(
            &format!("{at}.backoff_min"),
            restart.backoff_min,
            format!("is not above zero and up to backoff_max of {:?}", restart.backoff_max),
        );
    }
    if restart.window.is_zero() {
        faults.add_time(&format!("{at}.window"), restart.window, "is zero".to_owned());
    }
    if restart.intensity > INTENSITY_MAX {
        faults.add(
            &format!("{at}.intensity"),
            restart.intensity,
            format!("is above {INTENSITY_MAX}"),
        );
    }
}

#[derive(Default)]
struct Faults(Vec<ParamFault>);

impl Faults {
    fn add(&mut self, setting: &str, value: impl ToString + Copy, problem: String) {
        self.0.push(ParamFault {
            setting: setting.to_owned(),
            value: value.to_string(),
            problem,
        });
    }

    /// What is wrong is how a value stands to another one.
    fn add_where<T: ToString + Copy>(&mut self, wrong: bool, (setting, value): (&str, T), (problem, limit): (&str, T)) {
        if wrong {
            self.add(setting, value, format!("{problem} {}", limit.to_string()));
        }
    }

    fn add_time(&mut self, setting: &str, value: Duration, problem: String) {
        self.add(setting, format!("{value:?}").as_str(), problem);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::params::{Scope, WorkerParams};

    #[test]
    fn all_faults_are_told_at_once() {
        let mut params = Params::for_budget(Bytes::from_mib(400), Bytes::ZERO, Scope::Session);
        params.pressure.critical_below = Bytes::from_mib(300);
        params.pressure.fill_rate_mib_per_s = 0;
        params.lease.queue_max = 0;
        params.workers = vec![
            WorkerParams {
                name: "asr".to_owned(),
                steady: Bytes::from_mib(900),
                peak: Bytes::from_mib(10),
                ..WorkerParams::default()
            },
            WorkerParams {
                name: "asr".to_owned(),
                ..WorkerParams::default()
            },
        ];
        let error = params.validate().unwrap_err();
        let settings: Vec<&str> = error.faults.iter().map(|fault| fault.setting.as_str()).collect();
        assert_eq!(
            settings,
            [
                "pressure.critical_below",
                "pressure.fill_rate_mib_per_s",
                "lease.queue_max",
                "worker.asr.peak",
                "worker.name",
                "worker.asr.steady"
            ]
        );
        assert_eq!(
            error.faults[0].to_string(),
            "pressure.critical_below: `300 MiB` is not below the upper watermark of 52 MiB"
        );
    }
}
