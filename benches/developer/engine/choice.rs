//! Plans of the policy compared with fixed plans.

use std::{collections::BTreeSet, thread, time::Instant};

use super::{Workbench, predict::GRID_TOKENS};
use cotenant::{
    cli::bench::engine::{TOKENS, count, in_one_line, spread},
    engine::arena::{Backing, Mapping},
    policy::{
        params::EngineParams,
        residency::{EnginePlan, PlanLimits},
    },
    units::{Bytes, Tokens},
};

/// Range of a model's budgets, from the floor to the full plan.
struct Room {
    limits: PlanLimits,
    floor: Bytes,
    full: Bytes,
}

impl Room {
    /// Returns the budget at `percent` of that range.
    fn budget(&self, percent: u64) -> Bytes {
        self.floor + Bytes::new(self.full.saturating_sub(self.floor).get() / 100 * percent)
    }
}

impl Workbench<'_> {
    /// Compares the policy's plan for a budget with fixed choices of resident parts: per budget, and with a neighbour
    /// of varying size.
    pub(crate) fn choice(&mut self) -> Result<(), String> {
        let room = self.room();
        self.hold(BTreeSet::new())?;
        let streaming = self.rate()?;
        for step in BUDGETS {
            let budget = room.budget(step);
            let automatic = self.automatic(&room, budget)?;
            let fixed = self.fixed(&automatic, budget);
            self.hold(automatic.resident.clone())?;
            let mut ours = self.rate()?;
            let mut best = 0f64;
            for resident in fixed {
                self.hold(resident)?;
                best = best.max(self.rate()?);
            }
            // Repeated at the end, to detect drift of the machine.
            self.hold(automatic.resident.clone())?;
            ours = f64::midpoint(ours, self.rate()?);
            self.values
                .add(format!("chosen plan at {step} % of the room"), TOKENS, ours);
            self.values.add(
                "chosen plan over the best fixed one",
                "ratio, all budgets",
                ours / best,
            );
            self.values.add(
                "chosen plan over full streaming",
                "ratio, all budgets",
                ours / streaming,
            );
        }
        self.beside_a_neighbour(&room)?;
        self.apply(100)?;
        Ok(())
    }

    /// A neighbour takes memory from the budget and returns it: compares a new plan each time, including the change,
    /// with the best plan that fits throughout.
    fn beside_a_neighbour(&mut self, room: &Room) -> Result<(), String> {
        let least = room.budget(NEIGHBOUR.into_iter().min().unwrap_or(0));
        let kept = self.automatic(room, least)?;
        let mut best = f64::INFINITY;
        for resident in self.fixed(&kept, least) {
            self.hold(resident)?;
            best = best.min(self.in_turns(room, |_, _| Ok(()))?);
        }
        self.apply(100)?;
        let ours = self.in_turns(room, |bench, budget| {
            let plan = bench.automatic(room, budget)?;
            bench.hold(plan.resident).map(drop)
        })?;
        let tokens = f64::from(TURN_TOKENS) * f64::from(count(NEIGHBOUR.len()));
        self.values.add(
            "planned again beside a neighbour that comes and goes",
            TOKENS,
            tokens / ours,
        );
        self.values.add(
            "the best fixed plan that fits all the while",
            TOKENS,
            tokens / best,
        );
        self.values.add(
            "planned again over the best fixed plan",
            "ratio",
            best / ours,
        );
        Ok(())
    }

    /// Returns the seconds for the tokens of all budgets, including `change`; the neighbour allocates its memory before
    /// the changed plan computes, and touches it meanwhile.
    fn in_turns(
        &mut self,
        room: &Room,
        mut change: impl FnMut(&mut Self, Bytes) -> Result<(), String>,
    ) -> Result<f64, String> {
        self.model.reset();
        let first = self.tokens(0, 1);
        self.forward(&first)?;
        let mut seconds = 0.0;
        for step in NEIGHBOUR {
            let budget = room.budget(step);
            let started = Instant::now();
            change(self, budget)?;
            let taken = room
                .full
                .saturating_sub(budget)
                .max(cotenant::units::page());
            thread::scope(|scope| {
                // Its memory is released after it was touched and the tokens are computed.
                let neighbour = scope.spawn(move || Mapping::new(taken, Backing::Now));
                let decoded = self.decode(TURN_TOKENS);
                seconds += started.elapsed().as_secs_f64();
                match neighbour.join() {
                    Ok(Ok(memory)) => drop(memory),
                    Ok(Err(problem)) => {
                        return Err(format!("the neighbour has no memory: {problem}"));
                    }
                    Err(panic) => std::panic::resume_unwind(panic),
                }
                decoded.map(drop)
            })?;
        }
        Ok(seconds)
    }

    fn room(&self) -> Room {
        let (shape, plan) = (self.model.shape(), self.model.plan());
        let limits = PlanLimits {
            kv_wanted: plan.kv_capacity,
            kv_floor: plan.kv_capacity,
            kv_used: Tokens::ZERO,
            prefill_chunk: plan.prefill_chunk,
            ..PlanLimits::new(&EngineParams::default(), Tokens::ZERO)
        };
        Room {
            floor: shape.plan_bytes(&shape.floor_plan(&limits)),
            full: shape.plan_bytes(&shape.full_plan(&limits)),
            limits,
        }
    }

    /// Returns the policy's plan for `budget`.
    fn automatic(&self, room: &Room, budget: Bytes) -> Result<EnginePlan, String> {
        self.model
            .shape()
            .plan(budget, &room.limits)
            .map_err(|error| in_one_line(&error))
    }

    /// Returns sets of parts that fit `budget`: from the front, from the back, and spread evenly.
    fn fixed(&self, plan: &EnginePlan, budget: Bytes) -> Vec<BTreeSet<u32>> {
        let parts = count(self.layout.parts.len());
        let fits = |resident: &BTreeSet<u32>| {
            let fixed = EnginePlan {
                resident: resident.clone(),
                ..plan.clone()
            };
            self.model.shape().plan_bytes(&fixed) <= budget
        };
        let front = (0..=parts).map(|many| (0..many).collect::<BTreeSet<u32>>());
        let back = (0..=parts).map(|many| (parts - many..parts).collect());
        let even = (0..=100).map(|share| spread(parts, share));
        [
            front.rev().find(|resident| fits(resident)),
            back.rev().find(|resident| fits(resident)),
            even.rev().find(|resident| fits(resident)),
        ]
        .into_iter()
        .flatten()
        .collect()
    }

    /// Measures tokens per second with the current resident parts.
    fn rate(&mut self) -> Result<f64, String> {
        self.model.reset();
        let first = self.tokens(0, 1);
        self.forward(&first)?;
        self.decode(1)?;
        Ok(1.0 / self.decode(GRID_TOKENS)?)
    }
}

/// Measured budgets between the floor and the full plan, in percent.
const BUDGETS: [u64; 8] = [5, 20, 40, 60, 75, 85, 92, 98];
/// Successive shares of the budget left by a varying neighbour.
const NEIGHBOUR: [u64; 8] = [100, 60, 25, 60, 92, 40, 75, 100];
const TURN_TOKENS: u32 = 24;
