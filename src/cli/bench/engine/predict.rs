//! What is foretold of the speed, and what is chosen by it.

use std::collections::BTreeSet;

use super::{Bench, TOKENS, count, spread, told};
use crate::{
    policy::residency::PlanLimits,
    units::{Bytes, Tokens},
};

impl Bench<'_> {
    /// Calibrates, foretells the speed of many residencies, and measures each.
    pub(super) fn prediction(&mut self) -> Result<(), String> {
        self.model.reset();
        let started = std::time::Instant::now();
        let calibration = self
            .model
            .calibrate(&mut || true)
            .ok_or("the engine could not be calibrated")?;
        self.values
            .add("calibration", "ms", started.elapsed().as_secs_f64() * 1e3);
        let first = self.tokens(0, 1);
        let parts = count(self.layout.parts.len());
        for share in GRID {
            let resident = spread(parts, share);
            let foretold = calibration.milli_tokens_per_s(self.model.shape(), &resident);
            let foretold = f64::from(u32::try_from(foretold).unwrap_or(u32::MAX)) / 1e3;
            self.hold(resident)?;
            self.model.reset();
            self.forward(&first)?;
            // The first tokens fill the ring.
            self.decode(2)?;
            let measured = 1.0 / self.decode(if share == 100 { self.args.generate } else { GRID_TOKENS })?;
            self.values.add(format!("foretold at {share} %"), TOKENS, foretold);
            self.values.add(format!("measured at {share} %"), TOKENS, measured);
            self.values.add(
                ERRORS,
                "% off, all residencies",
                100.0 * (foretold / measured - 1.0).abs(),
            );
        }
        self.apply(100)?;
        Ok(())
    }

    /// The plan that the policy makes of a budget, against fixed ways to choose what is resident, budget by budget.
    pub(super) fn choice(&mut self) -> Result<(), String> {
        let shape = self.model.shape().clone();
        let plan = self.model.plan().clone();
        let limits = PlanLimits {
            kv_wanted: plan.kv_capacity,
            kv_floor: plan.kv_capacity,
            kv_used: Tokens::ZERO,
            prefill_chunk: plan.prefill_chunk,
            ..PlanLimits::new(&crate::policy::params::EngineParams::default(), Tokens::ZERO)
        };
        let floor = shape.plan_bytes(&shape.floor_plan(&limits));
        let full = shape.plan_bytes(&shape.full_plan(&limits));
        let parts = count(self.layout.parts.len());
        let room = full.saturating_sub(floor).get();
        self.hold(BTreeSet::new())?;
        let streaming = self.rate()?;
        for step in BUDGETS {
            let budget = floor + Bytes::new(room / 100 * step);
            let automatic = shape.plan(budget, &limits).map_err(|error| told(&error))?;
            let fits = |resident: &BTreeSet<u32>| {
                let fixed = crate::policy::residency::EnginePlan {
                    resident: resident.clone(),
                    ..automatic.clone()
                };
                shape.plan_bytes(&fixed) <= budget
            };
            // As many as fit, from the front, from the back, and spread evenly.
            let front = (0..=parts).map(|many| (0..many).collect::<BTreeSet<u32>>());
            let back = (0..=parts).map(|many| (parts - many..parts).collect());
            let even = (0..=100).map(|share| spread(parts, share));
            let fixed: Vec<BTreeSet<u32>> = [
                front.rev().find(|resident| fits(resident)),
                back.rev().find(|resident| fits(resident)),
                even.rev().find(|resident| fits(resident)),
            ]
            .into_iter()
            .flatten()
            .collect();
            self.hold(automatic.resident.clone())?;
            let mut ours = self.rate()?;
            let mut best = 0f64;
            for resident in fixed {
                self.hold(resident)?;
                best = best.max(self.rate()?);
            }
            // Once more afterwards, for a machine that drifts.
            self.hold(automatic.resident.clone())?;
            ours = f64::midpoint(ours, self.rate()?);
            self.values
                .add(format!("chosen plan at {step} % of the room"), TOKENS, ours);
            self.values
                .add("chosen plan over the best fixed one", "ratio, all budgets", ours / best);
            self.values.add(
                "chosen plan over full streaming",
                "ratio, all budgets",
                ours / streaming,
            );
        }
        self.apply(100)?;
        Ok(())
    }

    /// Tokens per second with what is resident now.
    fn rate(&mut self) -> Result<f64, String> {
        self.model.reset();
        let first = self.tokens(0, 1);
        self.forward(&first)?;
        self.decode(1)?;
        Ok(1.0 / self.decode(GRID_TOKENS)?)
    }

    /// Makes these parts resident.
    pub(super) fn hold(&mut self, resident: BTreeSet<u32>) -> Result<crate::engine::ApplyReport, String> {
        let mut plan = self.model.plan().clone();
        plan.resident = resident;
        self.model.apply(&plan).map_err(|error| told(&error))
    }
}

/// Errors of all predictions.
pub(super) const ERRORS: &str = "prediction error";
/// Resident shares that are foretold.
const GRID: [u32; 11] = [100, 97, 94, 90, 85, 75, 60, 50, 40, 25, 0];
/// Tokens that one of these is measured over.
const GRID_TOKENS: u32 = 8;
/// Budgets between the floor and the full plan, in percent.
const BUDGETS: [u64; 8] = [5, 20, 40, 60, 75, 85, 92, 98];
