//! Workers that shed when they are told, without our code in them.
//!
//! Such a worker is told one thing only, that memory is short, and what it comes down to is known from its settings. So
//! it is asked as a tenant is, by a target with a deadline, and credited as a tenant is, when it is measured; but it
//! cannot answer, so that what is measured after it was told counts at once. One that does not come down is named,
//! never told again, and stopped unless it is at work.

use std::time::Duration;

use super::{
    core::{Arbiter, Phase, Revocation},
    worker::{StopCause, Worker},
};
use crate::{
    policy::{
        event::Action,
        growth_wait::GrowthWait,
        lease::{Class, LeaseId},
        pressure::PressureLevel,
        shedding::{Candidate, Cost, Source},
        snapshot::WorkerState,
        stop_or_shed::Purpose,
    },
    units::{Bytes, Timestamp},
};

impl Arbiter {
    /// What a worker gives back when it is told: of what it uses under pressure, of what it holds for a request.
    pub(super) fn told_candidate(&self, worker: &Worker, purpose: Purpose) -> Option<Candidate> {
        let (least, id) = (worker.params.shrinks_to?, worker.lease?);
        let (name, class) = (&worker.params.name, worker.params.class);
        let pressed = matches!(purpose, Purpose::Pressure(_));
        let spared = !purpose.takes_from(class)
            || worker.params.pinned
            || worker.deaf
            || (pressed && class < Class::LlmElastic && self.pressure.level() < PressureLevel::Critical);
        let waits = self.queue.values().any(|want| want.lease == id);
        let granted = matches!(self.leases.get(&id)?.phase, Phase::Granted);
        if spared || waits || !granted || worker.state != WorkerState::Ready || worker.resizing.is_some() {
            return None;
        }
        let held = self.ledger.held_by(id);
        let has = match self.ledger.measurement(name) {
            Some(measured) if pressed => measured.used,
            _ => held,
        };
        let bytes = has.saturating_sub(least);
        let reload = u64::try_from(worker.params.reload.as_micros()).unwrap_or(u64::MAX);
        let cost = Cost {
            free_us: u64::try_from(self.told_deadline(class).as_micros()).unwrap_or(u64::MAX),
            // What it can spare is of some use to it: less than what a smaller variant would cost.
            now_us: reload / 4,
            undo_us: self.engine.speed().reading_us(bytes),
            ..Cost::default()
        };
        let source = Source::WorkerTold { worker: name.clone() };
        (bytes > Bytes::ZERO).then(|| Candidate::whole(source, class, bytes, cost))
    }

    fn told_deadline(&self, class: Class) -> Duration {
        self.params.shed.deadlines.of(class).max(TOLD_DEADLINE_MIN)
    }

    /// Tells a worker to come down. Returns whether it was told.
    pub(super) fn tell_worker(&mut self, name: &str, reason: &str) -> bool {
        let told = self
            .workers
            .get(name)
            .and_then(|worker| worker.lease.zip(worker.params.shrinks_to));
        let Some((id, least)) = told else { return false };
        let class = self.leases.get(&id).map_or(Class::Batch, |lease| lease.class);
        let deadline = self.now + self.told_deadline(class);
        let nonce = self.begin_revocation(id, least, deadline, false);
        self.out.push(Action::SetTarget {
            lease: id,
            nonce,
            bytes: least,
            deadline,
            reason: reason.to_owned(),
        });
        true
    }

    /// Credits a worker that was told if the measurement shows it. Returns whether it has been told and not come down.
    pub(super) fn settle_told(&mut self, name: &str, used: Option<Bytes>, taken_at: Timestamp) -> bool {
        let Some(id) = self.workers.get(name).and_then(|worker| worker.lease) else {
            return false;
        };
        if !matches!(self.leases.get(&id).map(|lease| &lease.phase), Some(Phase::Revoking(_))) {
            return false;
        }
        self.verify_answered(id, used, taken_at);
        true
    }

    /// The deadline has passed, and the worker has not come down.
    pub(super) fn give_up_telling(&mut self, id: LeaseId, revocation: &Revocation, shown: &str) {
        let Some(lease) = self.leases.get_mut(&id) else { return };
        let name = lease.tenant.clone();
        lease.phase = Phase::Granted;
        self.ledger.set_moving(id, false);
        let late = self.now.saturating_since(revocation.target.deadline).as_secs_f64();
        let Some(worker) = self.workers.get_mut(&name) else {
            return;
        };
        worker.deaf = true;
        let (at_work, pid) = (worker.requests > 0, worker.pid.unwrap_or_default());
        if worker.state != WorkerState::Ready {
            return;
        }
        let reason = format!(
            "worker `{name}` (pid {pid}) {shown}, its target is {}, {late:.1} s past the deadline: it was told that \
             memory is short and has not come down; nothing is credited",
            revocation.target.bytes
        );
        if at_work {
            self.explain(format!("{reason}; it is at work and keeps what it holds"));
        } else {
            self.explain(format!("{reason}; stopping it"));
            self.stop_worker(&name, StopCause::Shed, &reason);
        }
    }

    /// What a worker that has come down lacks to its steady size.
    pub(super) fn told_lacks(&self, worker: &Worker) -> Option<Bytes> {
        let id = worker.lease.filter(|_| worker.params.shrinks_to.is_some())?;
        let granted = matches!(self.leases.get(&id)?.phase, Phase::Granted);
        let more = worker.steady().saturating_sub(self.ledger.held_by(id));
        (worker.state == WorkerState::Ready && granted && more > Bytes::ZERO).then_some(more)
    }

    /// Books a worker's steady size again. There is no way to tell it: it takes the memory when it needs it.
    pub(super) fn restore_told(&mut self, name: &str) -> Result<String, GrowthWait> {
        let Some((id, steady)) = self
            .workers
            .get(name)
            .and_then(|worker| Some((worker.lease?, worker.steady())))
        else {
            return Err(GrowthWait::Changing);
        };
        let now = self.now;
        match self.ledger.raise(id, steady, now) {
            Ok(()) => {
                self.changed_at = now;
                let message = format!("worker `{name}` may hold its {steady} again");
                self.explain(message.clone());
                Ok(message)
            }
            Err(_) => Err(GrowthWait::Budget {
                needs: steady,
                free: self.ledger.free(),
                reserved: Bytes::ZERO,
            }),
        }
    }
}

/// The shortest time that a worker has, whatever its class: programs that watch for memory pressure look at averages
/// of 100 ms within 1 s as a rule (systemd's `MemoryPressureThresholdSec=`), and giving 1 GiB back took 151 ms.
const TOLD_DEADLINE_MIN: Duration = Duration::from_secs(1);
