//! Validation of settings against the budget and each other; `config` checks each on its own.

use super::{ParamFault, Params, ParamsError};

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
    /// Checks the settings against the budget and against each other.
    ///
    /// # Errors
    /// All faults at once.
    pub fn validate(&self) -> Result<(), ParamsError> {
        let mut faults = Vec::new();
        faults! { faults:
            self.budget.reserve >= self.budget.total =>
                "budget.reserve", self.budget.reserve, "leaves nothing of the total of {}", self.budget.total;
        }
        // Limits derived from an empty budget would repeat the same fault.
        if faults.is_empty() {
            self.check_within_budget(&mut faults);
        }
        if faults.is_empty() {
            Ok(())
        } else {
            Err(ParamsError { faults })
        }
    }

    fn check_within_budget(&self, faults: &mut Vec<ParamFault>) {
        let (it, budget) = (&self.pressure, self.budget.bytes());
        let (reclaim, left) = (
            self.shed.minimum_reclaim,
            budget.saturating_sub(it.elevated_below),
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
            reclaim >= left =>
                "shed.minimum_reclaim", reclaim,
                "is not below the {left} that the upper watermark leaves of the budget";
        }
        for worker in &self.workers {
            let name = &worker.name;
            let variants = worker.variants.iter();
            let mut sizes: Vec<_> = variants
                .map(|it| (format!("{name}.{}", it.name), it.peak))
                .collect();
            if sizes.is_empty() {
                sizes.push((name.clone(), worker.peak));
            }
            for (at, peak) in sizes {
                faults! { faults:
                    peak > budget => format!("worker.{at}.peak"), peak, "is above the whole budget of {budget}";
                }
            }
        }
    }
}
