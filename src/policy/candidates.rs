//! Holders that could give memory back, those that are spared, and workers that come back.
//!
//! The engine gives what its [supply](crate::engine_supply) holds, tenants what they hold beyond their least, workers
//! a smaller variant or themselves ([`stop_or_shed`](crate::stop_or_shed)). A holder that is as urgent as the request is
//! spared, and so is a pinned one.

use std::cmp::Reverse;

use super::{
    denial::{Denial, Holders, OPERATOR},
    engine_supply::EngineSupply,
    lease::{Class, LeaseId, LeaseKind},
    lease_table::{Lease, Phase},
    pressure::PressureLevel,
    reason::{Share, SpareReason},
    shedding::{Candidate, Source, Spared, micros, reclaimable},
    state::State,
    stop_or_shed::{Purpose, Urgency, offer, why_kept},
    worker::Worker,
};
use cotenant_units::Bytes;

impl State {
    /// Everything that could give memory back.
    pub(super) fn candidates(&self, purpose: Purpose) -> Vec<Candidate> {
        let mut candidates = Vec::new();
        if purpose.takes_from(Class::LlmElastic) {
            candidates.extend(self.engine_candidates(purpose));
        }
        for id in self.leases.ids() {
            candidates.extend(self.tenant_candidate(*id, purpose));
        }
        for worker in self.workers.values() {
            candidates.extend(self.worker_candidate(worker, purpose));
        }
        candidates
    }

    /// What one lease could give.
    pub(super) fn gives(&self, id: LeaseId, purpose: Purpose) -> Bytes {
        let Some(lease) = self.leases.get(id) else {
            return Bytes::ZERO;
        };
        let candidates = match lease.kind {
            LeaseKind::Engine if purpose.takes_from(lease.class) => self.engine_candidates(purpose),
            LeaseKind::Engine => Vec::new(),
            LeaseKind::Tenant => self.tenant_candidate(id, purpose).into_iter().collect(),
            LeaseKind::Worker => {
                let worker = self.workers.get(&lease.tenant);
                worker
                    .and_then(|worker| self.worker_candidate(worker, purpose))
                    .into_iter()
                    .collect()
            }
        };
        reclaimable(&candidates)
    }

    /// What the engine could give.
    pub(super) fn engine_candidates(&self, purpose: Purpose) -> Vec<Candidate> {
        if !self.engine.can_shed(self.now) {
            return Vec::new();
        }
        let (Some(shape), Some(limits), Some(goal)) = (
            self.engine.shape(),
            self.engine.limits(),
            self.engine.goal(),
        ) else {
            return Vec::new();
        };
        let supply = EngineSupply {
            shape,
            limits: &limits,
            goal,
            kept: self.engine.kv_kept(),
            held: self.engine.kv_held(),
            droppable: self.engine.kv.droppable,
            untouched: self.engine.untouched_blocks(),
            chunk_pinned: self.engine.is_chunk_pinned(),
        };
        supply.candidates(purpose != Purpose::Pressure(Urgency::Warning))
    }

    fn tenant_candidate(&self, id: LeaseId, purpose: Purpose) -> Option<Candidate> {
        let lease = self.leases.get(id)?;
        if lease.kind != LeaseKind::Tenant || self.why_spared(id, purpose).is_some() {
            return None;
        }
        let held = self.ledger.held_by(id);
        let used = match purpose {
            Purpose::Request(_) => held,
            Purpose::Pressure(_) => self
                .ledger
                .used_by(&lease.holder)
                .map_or(held, |used| used.min(held)),
        };
        let bytes = used.saturating_sub(lease.min);
        // It gives up what it has some use for, and waits for that as long as it may take over it.
        let waiting_us = micros(self.params.shed.deadlines.of(lease.class)) / 2;
        let cost_us = waiting_us.saturating_add(self.engine.speed().reading_us(bytes));
        let source = Source::Tenant {
            lease: id,
            tenant: lease.tenant.clone(),
        };
        let units = u32::try_from(bytes.get().div_ceil(TENANT_UNIT.get())).unwrap_or(u32::MAX);
        let mut candidate = Candidate::even(source, lease.class, TENANT_UNIT, units, cost_us);
        // The last unit may not be a whole one.
        for step in &mut candidate.steps {
            step.bytes = step.bytes.min(bytes);
        }
        (bytes > Bytes::ZERO).then_some(candidate)
    }

    fn worker_candidate(&self, worker: &Worker, purpose: Purpose) -> Option<Candidate> {
        let spared = self.why_spared(worker.lease()?, purpose).is_some();
        if spared {
            None
        } else {
            offer(self, worker, purpose)
        }
    }

    /// Why a lease is not asked to give anything for `purpose`; `None` if it can be asked.
    pub(super) fn why_spared(&self, id: LeaseId, purpose: Purpose) -> Option<SpareReason> {
        let lease = self.leases.get(id)?;
        let critical = self.pressure.level() == PressureLevel::Critical;
        if let Purpose::Request(urgent) = purpose
            && lease.class <= urgent
        {
            let than = if lease.class == urgent {
                SpareReason::AsUrgent
            } else {
                SpareReason::MoreUrgent
            };
            return Some(than(lease.class));
        }
        match (&lease.phase, lease.kind) {
            (Phase::Revoking(revocation), _) => {
                return Some(SpareReason::ComingDown {
                    to: revocation.target.bytes,
                });
            }
            (Phase::Ending { .. }, _) => return Some(SpareReason::Ending),
            (Phase::Granted, _) => {}
        }
        match lease.kind {
            LeaseKind::Engine => {
                let gives = self.engine_candidates(purpose);
                if !self.engine.can_shed(self.now) {
                    Some(SpareReason::EngineBusy)
                } else if gives.is_empty() && purpose == Purpose::Pressure(Urgency::Warning) {
                    Some(SpareReason::KeepsLayers)
                } else if gives.is_empty() {
                    Some(SpareReason::AllGiven)
                } else {
                    None
                }
            }
            LeaseKind::Tenant => {
                let pressed = matches!(purpose, Purpose::Pressure(_));
                // One that waits to become larger is asked like any other: the request is served before it.
                if pressed && lease.class < Class::LlmElastic && !critical {
                    Some(SpareReason::BeforeCritical(lease.class))
                } else if self.ledger.held_by(id) <= lease.min {
                    Some(SpareReason::AtLeast(lease.min))
                } else {
                    None
                }
            }
            LeaseKind::Worker => {
                let worker = self.workers.get(&lease.tenant)?;
                why_kept(self, worker, purpose)
            }
        }
    }

    /// That there is not enough for `tenant`, and who has what. What is `own` to it already, or booked for the worker that
    /// it is, is part of what it asks for; another lease of its name may be of any process.
    pub(super) fn insufficient(
        &self,
        tenant: &str,
        own: Option<LeaseId>,
        asked: Bytes,
        class: Class,
    ) -> Denial {
        let is_own = |(id, lease): &(LeaseId, &Lease)| {
            Some(*id) == own || (lease.kind == LeaseKind::Worker && lease.tenant == tenant)
        };
        let others = self.leases.iter().filter(|one| !is_own(one));
        let purpose = Purpose::Request(class);
        let shares = others.map(|(id, _)| Share {
            holder: self.leases.name_of(id),
            held: self.ledger.held_by(id),
            gives: self.gives(id, purpose),
            spared: self.why_spared(id, purpose),
        });
        Denial::InsufficientMemory {
            tenant: tenant.to_owned(),
            asked,
            free: self.available(class, true),
            reclaimable: self.reclaimable_for(class),
            budget: self.ledger.budget(),
            holders: Holders {
                class,
                shares: shares.collect(),
                unaccounted: self.ledger.unaccounted(),
            },
        }
    }

    /// That the engine gives an operator nothing of `asked`, and why; nothing else is shed on command.
    pub(super) fn nothing_to_shed(&self, asked: Bytes) -> Denial {
        let class = Class::AudioRealtime;
        let engine = self.engine.lease;
        let mut denial = self.insufficient(OPERATOR, None, asked, class);
        if let Denial::InsufficientMemory {
            free,
            reclaimable,
            holders,
            ..
        } = &mut denial
        {
            *free = Bytes::ZERO;
            *reclaimable = engine.map_or(Bytes::ZERO, |id| self.gives(id, Purpose::Request(class)));
            holders
                .shares
                .retain(|share| Some(share.holder.id) == engine);
            holders.unaccounted = Bytes::ZERO;
        }
        denial
    }

    /// Workers that could be stopped, and are not among the `candidates`, since others give what is missing now.
    pub(super) fn not_stopped_for_foresight(
        &self,
        candidates: &[Candidate],
        purpose: Purpose,
    ) -> Vec<Spared> {
        self.workers
            .values()
            .filter_map(|worker| {
                let id = worker.lease()?;
                let could = self.worker_candidate(worker, purpose)?;
                let among = candidates
                    .iter()
                    .any(|candidate| candidate.source == could.source);
                (!among).then(|| Spared {
                    why: SpareReason::OthersSuffice,
                    holder: self.leases.name_of(id).to_string(),
                    held: self.ledger.held_by(id),
                })
            })
            .collect()
    }

    /// Holders that are not asked, with the reason.
    pub(super) fn spared(&self, purpose: Purpose) -> Vec<Spared> {
        self.leases
            .ids()
            .filter_map(|id| {
                Some(Spared {
                    why: self.why_spared(*id, purpose)?,
                    holder: self.leases.name_of(*id).to_string(),
                    held: self.ledger.held_by(*id),
                })
            })
            .collect()
    }

    /// Workers that were stopped, made smaller or notified to make room and fit again, with what being without it
    /// costs.
    pub(super) fn worker_returns(&self, room: Bytes) -> Vec<Candidate> {
        // Of two that are worth the same for their size, the more urgent one, and then the one that is started first.
        let mut stopped: Vec<_> = self
            .workers
            .values()
            .filter(|worker| worker.was_shed())
            .collect();
        stopped
            .sort_by_key(|worker| Reverse((worker.params.class, worker.params.start.start_order)));
        let stopped = stopped.into_iter().map(|worker| {
            let params = &worker.params;
            let source = Source::WorkerStop {
                worker: params.name.clone(),
            };
            let least = self.start_least(&params.name);
            Candidate::whole(source, params.class, least, micros(worker.reload()))
        });
        let stopped = stopped.filter(|gain| gain.bytes() <= room.min(self.ledger.free()));
        let variants = self
            .workers
            .values()
            .filter_map(|worker| self.variant_return(worker));
        let notified = self
            .workers
            .values()
            .filter_map(|worker| self.notified_return(worker));
        let running = variants.chain(notified);
        let running = running.filter(|gain| gain.bytes() <= self.room_beside(gain.class, room));
        stopped.chain(running).collect()
    }

    fn variant_return(&self, worker: &Worker) -> Option<Candidate> {
        let variant = worker
            .run()?
            .before_shed
            .clone()
            .filter(|_| worker.is_settled())?;
        let (name, reload) = (&worker.params.name, micros(worker.reload()));
        let peak = self.worker_peak(name, Some(&variant));
        let source = Source::WorkerVariant {
            worker: name.clone(),
            variant,
        };
        let more = peak.saturating_sub(self.worker_held(name));
        Some(Candidate::whole(
            source,
            worker.params.class,
            more,
            reload.saturating_add(reload / 2),
        ))
    }

    fn notified_return(&self, worker: &Worker) -> Option<Candidate> {
        let more = self.notified_lacks(worker)?;
        let cost_us =
            (micros(worker.reload()) / 4).saturating_add(self.engine.speed().reading_us(more));
        let source = Source::WorkerNotified {
            worker: worker.params.name.clone(),
        };
        Some(Candidate::whole(source, worker.params.class, more, cost_us))
    }

    /// What is left of the room for a running worker when those have theirs that come back and are as urgent.
    fn room_beside(&self, class: Class, room: Bytes) -> Bytes {
        let returning = self.returning_workers().into_iter();
        let kept = returning.filter(|(returning, _)| *returning <= class);
        let kept = kept
            .map(|(_, bytes)| bytes)
            .fold(Bytes::ZERO, Bytes::saturating_add);
        room.saturating_sub(kept).min(self.available(class, true))
    }

    /// What others could give back for `class`.
    pub(super) fn reclaimable_for(&self, class: Class) -> Bytes {
        reclaimable(&self.candidates(Purpose::Request(class)))
    }
}

/// Tenants count in bytes; a step of the search is a part of what they have, and what it gives too much is spared.
const TENANT_UNIT: Bytes = Bytes::new(4096);
