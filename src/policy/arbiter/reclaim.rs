//! Effects of reclaim: a set of shrinking holders is asked at once, processes that must be stopped one at a time.
//!
//! The choice of holders is made in [`crate::policy::reclaim`].

use super::{core::Arbiter, engine::Given, worker_orders::Less};
use crate::{
    policy::{
        decision::GrowthDecision,
        event::Action,
        lease::Class,
        reason::{ReclaimReason, StopReason},
        reclaim::{self, Reclaim, Relief},
        shedding::{Chosen, Source},
        stop_or_shed::{Purpose, Urgency},
        worker::StopCause,
    },
    units::Bytes,
};

impl Arbiter {
    /// Asks back `missing` bytes for a request of `class`; nothing, if not all of it can be had.
    pub(super) fn reclaim_for(&mut self, class: Class, missing: Bytes, reason: ReclaimReason) -> bool {
        let reclaim = reclaim::for_request(&self.state, class, missing, reason);
        reclaim.map(|reclaim| self.carry_out(reclaim)).is_some()
    }

    /// Sheds while the headroom is below the upper watermark.
    pub(super) fn relieve_pressure(&mut self) {
        let urgency = match reclaim::under_pressure(&self.state, self.relieved_at) {
            Relief::Waits => return,
            Relief::NotNeeded => {
                self.said.remove(NOTHING_LEFT);
                return;
            }
            Relief::Reclaim { urgency, reclaim } => {
                if self.carry_out(*reclaim) {
                    self.relieved_at = Some(self.state.now);
                    self.said.remove(NOTHING_LEFT);
                    return;
                }
                urgency
            }
            Relief::NothingLeft { urgency } => urgency,
        };
        let level = self.state.pressure.level();
        if urgency == Urgency::Warning {
            return self.decide_once(NOTHING_LEFT, &[], GrowthDecision::EngineSpared { level });
        }
        let own = self.sample.as_ref().and_then(|sample| sample.own_used);
        let unaccounted = self.state.ledger.unaccounted();
        let decision = GrowthDecision::NothingLeft { level, unaccounted, own };
        self.decide_once(NOTHING_LEFT, &[unaccounted, own.unwrap_or_default()], decision);
    }

    /// Asks for what was chosen, and says so. Returns whether a holder has been asked.
    pub(super) fn carry_out(&mut self, reclaim: Reclaim) -> bool {
        let Reclaim { purpose, reason, weighing, chosen } = reclaim;
        self.out.push(Action::Weighed { weighing });
        if chosen.iter().any(|one| !matches!(one.source, Source::Tenant { .. }))
            && let Some(backed_off) = self.state.dwell.undo(self.state.now)
        {
            self.decide(backed_off);
        }
        let mut asked = false;
        let mut given = Given::default();
        for Chosen { source, units, bytes } in chosen {
            match source {
                Source::UnusedKv | Source::PrefixKv => {
                    given.blocks = given.blocks.saturating_add(units);
                    given.block_bytes = given.block_bytes.saturating_add(bytes);
                }
                Source::OldestKv => {
                    given.blocks = given.blocks.saturating_add(units);
                    given.oldest = units;
                    given.block_bytes = given.block_bytes.saturating_add(bytes);
                }
                Source::KvType => given.smaller_types = units,
                Source::Layers => given.layers = given.layers.saturating_add(units),
                Source::PrefillChunk => given.smaller_chunk = true,
                Source::Tenant { lease: id, .. } => {
                    let held = self.state.ledger.held_by(id);
                    let from = match (purpose, self.state.leases.get(id)) {
                        (Purpose::Pressure(_), Some(lease)) => {
                            self.state.ledger.used_by(&lease.holder).map_or(held, |used| used.min(held))
                        }
                        _ => held,
                    };
                    self.set_target(id, from.saturating_sub(bytes), reason.clone());
                    asked = true;
                }
                Source::WorkerNotified { worker } => asked |= self.ask_for_less(&worker, Less::Notification, &reason),
                Source::WorkerVariant { worker, variant } => {
                    asked |= self.ask_for_less(&worker, Less::Variant(variant), &reason);
                }
                Source::WorkerStop { worker } => {
                    if !self.state.workers.is_any_stopping() {
                        let reclaim = reason.clone();
                        self.stop_worker(&worker, StopCause::Shed, StopReason::Reclaim { held: bytes, reclaim });
                        asked = true;
                    }
                }
            }
        }
        if given != Given::default() {
            asked |= self.shed_engine(given, reason) > Bytes::ZERO;
        }
        if asked {
            self.state.dwell.begin(self.state.now);
        }
        asked
    }
}

/// Subject of what is decided once.
const NOTHING_LEFT: &str = "nothing left to shed";
