//! Reclaim for a request or under pressure.
//!
//! The cheapest set that suffices is computed over everybody who could give ([`candidates`](super::candidates)), and the
//! balance is told with it, winners and losers. A set of shrinking holders is asked at once; of processes that must be stopped, one at a time. Under pressure the
//! next round waits for the settle time and for a sample that is newer than what came back.

use super::{core::Arbiter, engine::Given, worker::Less};
use crate::{
    policy::{
        event::Action,
        lease::{Class, LeaseKind},
        lease_table::Phase,
        pressure::PressureLevel,
        shedding::{Candidate, Chosen, Source, Weighing, choose, reclaimable},
        stop_or_shed::{Purpose, Urgency, stops_for_what_is_owed},
        worker::StopCause,
    },
    units::Bytes,
};

impl Arbiter {
    /// Asks back `missing` bytes for a request of `class`; nothing, if not all of it can be had.
    pub(super) fn reclaim_for(&mut self, class: Class, missing: Bytes, reason: &str) -> bool {
        let purpose = Purpose::Request(class);
        let candidates = self.candidates(purpose);
        if reclaimable(&candidates) < missing {
            return false;
        }
        self.weigh_and_ask(&candidates, missing, purpose, reason);
        true
    }

    /// Asks back `missing` bytes of what the engine has beyond its floor; nothing, if not all of it can be had.
    pub(super) fn reclaim_from_engine(&mut self, missing: Bytes, reason: &str) -> bool {
        let purpose = Purpose::Request(Class::Interactive);
        let candidates = self.engine_candidates(purpose);
        if reclaimable(&candidates) < missing {
            return false;
        }
        self.weigh_and_ask(&candidates, missing, purpose, reason);
        true
    }

    /// What others could give back for `class`.
    pub(super) fn reclaimable_for(&self, class: Class) -> Bytes {
        reclaimable(&self.candidates(Purpose::Request(class)))
    }

    /// Sheds while the headroom is below the upper watermark.
    pub(super) fn relieve_pressure(&mut self) {
        let level = self.pressure.level();
        let (Some(headroom), Some(sampled_at)) = (self.pressure.headroom(), self.pressure.sampled_at()) else {
            return;
        };
        let elevated = self.params.pressure.elevated_below;
        if level == PressureLevel::Normal || headroom >= elevated {
            self.said.remove("nothing left to shed");
            return;
        }
        if self.pressure.in_grace(self.now) {
            return;
        }
        let settling = self
            .relieved_at
            .is_some_and(|at| self.now < at + self.params.shed.settle);
        if settling || sampled_at <= self.changed_at {
            return;
        }
        // What is lost before the next step may follow is part of this one: steps of one size never catch up with a neighbour
        // that takes as much in each settle time.
        let wanted = elevated
            .saturating_add(self.params.shed.minimum_reclaim)
            .saturating_add(self.pressure.lost_within(self.params.shed.settle));
        let need = wanted.saturating_sub(headroom);
        let coming = self.physically_coming_back(level);
        let missing = need.saturating_sub(coming);
        if missing == Bytes::ZERO {
            return;
        }
        let urgency = if headroom < self.params.pressure.last_resort_below {
            Urgency::LastResort
        } else if self.pressure.is_urgent() {
            Urgency::Urgent
        } else {
            Urgency::Warning
        };
        let purpose = Purpose::Pressure(urgency);
        let mut candidates = self.candidates(purpose);
        // What is asked for beyond the watermark is foresight, and nobody is stopped for that: who is stopped is chosen for
        // what is missing now, and foresight takes what is left of the others.
        let owed = elevated.saturating_sub(headroom).saturating_sub(coming);
        stops_for_what_is_owed(&mut candidates, owed);
        let reason =
            format!("{level}: headroom {headroom} is below {elevated}, {missing} more are to come back for {wanted}");
        if self.weigh_and_ask(&candidates, missing, purpose, &reason) {
            self.relieved_at = Some(self.now);
            self.said.remove("nothing left to shed");
        } else {
            self.explain_once(
                "nothing left to shed",
                if urgency == Urgency::Warning {
                    format!("{level}: nothing more is shed that would make the engine slower, until Critical is ahead")
                } else {
                    let own = self.sample.as_ref().and_then(|sample| sample.own_used);
                    format!(
                        "{level}: nothing is left to shed; {} is unaccounted, the supervisor itself uses {}",
                        self.ledger.unaccounted(),
                        own.map_or_else(|| "an unknown part".to_owned(), |own| own.to_string()),
                    )
                },
            );
        }
    }

    /// Bytes that holders have been asked for and have not given back, by what they use.
    ///
    /// At Critical nobody but the engine is waited for any longer than the settle time.
    fn physically_coming_back(&self, level: PressureLevel) -> Bytes {
        let patient = level < PressureLevel::Critical;
        let settle = self.params.shed.settle;
        let mut sum = Bytes::ZERO;
        for (id, lease) in self.leases.iter() {
            let held = self.ledger.held_by(id);
            let used = self
                .ledger
                .measurement(&lease.holder)
                .map_or(held, |measured| measured.used);
            let stays = match (&lease.phase, lease.kind) {
                (Phase::Revoking(revocation), _)
                    if !revocation.voluntary && (patient || self.now < revocation.asked_at + settle) =>
                {
                    revocation.target.bytes
                }
                (Phase::Granted, LeaseKind::Worker) if patient => self.worker_stays(&lease.tenant, held),
                (Phase::Granted, LeaseKind::Engine) => match self.engine.goal() {
                    Some(goal) if !self.engine.plans.pending.is_empty() => self.engine.bytes_in(goal),
                    _ => held,
                },
                (Phase::Granted | Phase::Revoking(_) | Phase::Ending { .. }, _) => held,
            };
            if stays < held {
                sum = sum.saturating_add(used.saturating_sub(stays));
            }
        }
        sum
    }

    /// Asks the cheapest set back that suffices. Returns whether anybody has been asked.
    pub(super) fn weigh_and_ask(
        &mut self,
        candidates: &[Candidate],
        need: Bytes,
        purpose: Purpose,
        reason: &str,
    ) -> bool {
        let chosen = choose(candidates, need);
        if chosen.is_empty() {
            return false;
        }
        let mut weighing = Weighing::new(reason, need, candidates, &chosen);
        weighing.mode = self.engine.mode().filter(|_| self.engine.lease.is_some());
        weighing.spared = self.spared(purpose);
        if let Purpose::Pressure(_) = purpose {
            weighing
                .spared
                .extend(self.not_stopped_for_foresight(candidates, purpose));
        }
        self.out.push(Action::Weighed { weighing });
        self.carry_out(chosen, purpose, reason)
    }

    fn carry_out(&mut self, chosen: Vec<Chosen>, purpose: Purpose, reason: &str) -> bool {
        if chosen.iter().any(|one| !matches!(one.source, Source::Tenant { .. }))
            && let Some(backed_off) = self.dwell.undo(self.now)
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
                    let held = self.ledger.held_by(id);
                    let from = match (purpose, self.leases.get(id)) {
                        (Purpose::Pressure(_), Some(lease)) => self
                            .ledger
                            .measurement(&lease.holder)
                            .map_or(held, |measured| measured.used.min(held)),
                        _ => held,
                    };
                    self.set_target(id, from.saturating_sub(bytes), reason);
                    asked = true;
                }
                Source::WorkerTold { worker } => asked |= self.ask_for_less(&worker, Less::Notification, reason),
                Source::WorkerVariant { worker, variant } => {
                    asked |= self.ask_for_less(&worker, Less::Variant(variant), reason);
                }
                Source::WorkerStop { worker } => {
                    if !self.workers.is_any_stopping() {
                        self.explain(format!("stopping worker `{worker}` for its {bytes}: {reason}"));
                        self.stop_worker(&worker, StopCause::Shed, reason);
                        asked = true;
                    }
                }
            }
        }
        if given != Given::default() {
            asked |= self.shed_engine(given, reason) > Bytes::ZERO;
        }
        if asked {
            self.dwell.begin(self.now);
        }
        asked
    }
}
