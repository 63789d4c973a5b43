//! Engine's answer to a plan, and its effect.

use super::{EngineControl, PINNED_FOR, Pending, PlanKind};
use crate::{
    decision::{PlanOutcome, StrayPlan},
    event::EngineApplied,
};
use cotenant_units::{Bytes, Timestamp, Tokens};

/// Effect of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Confirmed {
    /// The model is loaded, and the engine answers.
    Ready,
    /// Memory was given up.
    Shed(Pending),
    /// The last known plan was sent again to learn the plan in force. Nothing was given up, whatever the engine
    /// corrected.
    Repeated,
    /// The plan in force has grown.
    Grown {
        asked: Pending,
        /// A request arrived in the meantime, so the larger chunk was omitted.
        without_chunk: bool,
    },
    /// The running chunk has ended, and with it its larger size.
    ChunkEnded,
    /// Nothing has changed.
    Unchanged,
}

impl Confirmed {
    /// Converts to the outcome that is reported, with the bytes credited and freed.
    pub(crate) const fn outcome(&self, credited: Bytes, applied: &EngineApplied) -> PlanOutcome {
        let (freed, untouched) = (applied.freed, applied.untouched_given);
        match self {
            Self::Ready => PlanOutcome::Ready,
            Self::Shed(_) => PlanOutcome::Shed {
                credited,
                freed,
                untouched,
            },
            Self::Grown { .. } => PlanOutcome::Grown,
            Self::ChunkEnded => PlanOutcome::ChunkEnded { credited, freed },
            Self::Repeated | Self::Unchanged => PlanOutcome::Confirmed,
        }
    }
}

impl EngineControl {
    /// Applies the engine's report of a plan.
    ///
    /// # Errors
    /// If it answers no plan of the present load.
    pub(crate) fn confirm(
        &mut self,
        applied: &EngineApplied,
        now: Timestamp,
    ) -> Result<Confirmed, StrayPlan> {
        let (revision, in_force) = (applied.revision, applied.in_force.clone());
        if self.lease.is_none() {
            return Err(StrayPlan::NoLease);
        }
        let asked = self.plans.pending.remove(&revision);
        let loads = asked
            .as_ref()
            .is_some_and(|asked| asked.kind == PlanKind::Load);
        if !self.is_ready() && !loads {
            return Err(StrayPlan::EarlierLoad);
        }
        self.plans.settled(revision);
        if let Some(asked) = &asked
            && in_force.kv_capacity > asked.plan.kv_capacity
        {
            self.pin_capacity(in_force.kv_capacity, now);
            // If the oldest tokens may be dropped, the engine has already dropped as many as it can.
            self.kv.droppable = Tokens::ZERO;
        }
        let before = self.plans.in_force.take();
        let chunk_was = before.as_ref().map(|plan| plan.prefill_chunk);
        let chunk_is_smaller = chunk_was.is_some_and(|chunk| in_force.prefill_chunk < chunk);
        if asked
            .as_ref()
            .is_some_and(|asked| in_force.prefill_chunk > asked.plan.prefill_chunk)
        {
            self.blocked.chunk = Some(now + PINNED_FOR);
        } else if chunk_is_smaller {
            self.blocked.chunk = None;
        }
        let was = before
            .as_ref()
            .map_or(Bytes::ZERO, |plan| self.bytes_in(plan));
        let is = self.bytes_in(&in_force);
        let chunk = in_force.prefill_chunk;
        self.plans.in_force = Some(in_force);
        self.kv.untouched = applied.untouched;
        if self.ready(now) {
            return Ok(Confirmed::Ready);
        }
        Ok(match asked {
            None if chunk_is_smaller => Confirmed::ChunkEnded,
            Some(asked) if asked.kind == PlanKind::Shed => {
                let gives_up = asked.from > self.bytes_in(&asked.plan) || was > is;
                if gives_up {
                    Confirmed::Shed(asked)
                } else {
                    Confirmed::Repeated
                }
            }
            Some(asked) if asked.kind == PlanKind::Regrow => {
                let without_chunk = chunk < asked.plan.prefill_chunk;
                Confirmed::Grown {
                    asked,
                    without_chunk,
                }
            }
            Some(_) | None => Confirmed::Unchanged,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{
        engine_failure::Cure,
        lease::LeaseId,
        params::EngineParams,
        residency::{EnginePlan, small_model},
    };

    /// Returns an engine with a pending load, and the plan of that load.
    fn loading() -> (EngineControl, EnginePlan) {
        let mut engine = EngineControl::new(Some(&EngineParams::default()));
        engine.inspected(small_model(), Timestamp::START);
        engine.load(LeaseId(1), Timestamp::START);
        let full = engine.full_plan().unwrap();
        ask(&mut engine, full.clone(), PlanKind::Load);
        (engine, full)
    }

    fn ask(engine: &mut EngineControl, plan: EnginePlan, kind: PlanKind) -> u64 {
        let from = engine
            .goal()
            .map_or(Bytes::ZERO, |goal| engine.bytes_in(goal));
        engine.plans.last += 1;
        let revision = engine.plans.last;
        engine.plans.pending.insert(
            revision,
            Pending {
                plan,
                asked_at: Timestamp::START,
                kind,
                from,
            },
        );
        revision
    }

    fn confirm(
        engine: &mut EngineControl,
        revision: u64,
        plan: &EnginePlan,
    ) -> Result<Confirmed, StrayPlan> {
        let applied = EngineApplied::new(revision, plan.clone(), Bytes::ZERO, Duration::ZERO);
        engine.confirm(&applied, Timestamp::from_millis(1))
    }

    #[test]
    fn an_answer_counts_only_for_the_engine_that_was_asked() {
        let (mut engine, full) = loading();
        assert_eq!(confirm(&mut engine, 7, &full), Err(StrayPlan::EarlierLoad));
        assert_eq!(confirm(&mut engine, 1, &full), Ok(Confirmed::Ready));
        assert_eq!(confirm(&mut engine, 1, &full), Ok(Confirmed::Unchanged));
        engine.failed("gone", Cure::Reload, None, Timestamp::from_millis(2));
        assert_eq!(confirm(&mut engine, 1, &full), Err(StrayPlan::NoLease));
    }

    #[test]
    fn what_is_given_up_counts_and_not_the_name_of_the_plan() {
        let (mut engine, full) = loading();
        assert_eq!(confirm(&mut engine, 1, &full), Ok(Confirmed::Ready));
        let repeated = ask(&mut engine, full.clone(), PlanKind::Shed);
        assert_eq!(
            confirm(&mut engine, repeated, &full),
            Ok(Confirmed::Repeated)
        );
        let mut less = full.clone();
        less.resident.pop_last();
        let shed = ask(&mut engine, less.clone(), PlanKind::Shed);
        assert!(
            matches!(confirm(&mut engine, shed, &less), Ok(Confirmed::Shed(asked)) if asked.plan == less)
        );
        let grown = ask(&mut engine, full.clone(), PlanKind::Regrow);
        assert!(matches!(
            confirm(&mut engine, grown, &full),
            Ok(Confirmed::Grown {
                without_chunk: false,
                ..
            })
        ));
    }

    #[test]
    fn a_capacity_that_a_sequence_needs_is_kept_when_less_was_asked() {
        let (mut engine, full) = loading();
        assert_eq!(confirm(&mut engine, 1, &full), Ok(Confirmed::Ready));
        let less = EnginePlan {
            kv_capacity: Tokens::ZERO,
            ..full.clone()
        };
        let shed = ask(&mut engine, less, PlanKind::Shed);
        assert_eq!(
            confirm(&mut engine, shed, &full).map(|_| engine.kv.pinned.map(|(tokens, _)| tokens)),
            Ok(Some(full.kv_capacity))
        );
    }
}
