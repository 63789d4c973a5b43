//! Workers that react to pressure notifications, without our code in them.
//!
//! Such a worker learns one thing only, that memory is short, and what it comes down to is known from its settings. So
//! it is asked as a tenant is, by a target with a deadline, and credited as a tenant is, when it is measured; but it
//! cannot answer, so that what is measured after its notification counts at once. One that does not come down is named,
//! never notified again, and stopped unless it is at work.

use std::time::Duration;

use super::core::Arbiter;
use crate::{
    policy::{
        event::Action,
        growth_wait::GrowthWait,
        lease::{Class, LeaseId},
        lease_table::{Phase, Revocation},
        pressure::PressureLevel,
        shedding::{Candidate, Cost, Source, micros},
        stop_or_shed::Purpose,
        worker::{StopCause, Worker},
    },
    units::{Bytes, Timestamp},
};

impl Arbiter {
    /// What a worker gives back when it is notified: of what it uses under pressure, of what it holds for a request.
    pub(super) fn notified_candidate(&self, worker: &Worker, purpose: Purpose) -> Option<Candidate> {
        let (least, id) = (worker.params.shrinks_to?, worker.lease()?);
        let (name, class) = (&worker.params.name, worker.params.class);
        let pressed = matches!(purpose, Purpose::Pressure(_));
        let spared = !purpose.takes_from(class)
            || worker.params.pinned
            || worker.ignores_pressure()
            || (pressed && class < Class::LlmElastic && self.pressure.level() < PressureLevel::Critical);
        let waits = self.queue.waits_for(id);
        let granted = matches!(self.leases.get(id)?.phase, Phase::Granted);
        if spared || waits || !granted || !worker.is_settled() {
            return None;
        }
        let held = self.ledger.held_by(id);
        let has = match self.ledger.measurement(name) {
            Some(measured) if pressed => measured.used,
            _ => held,
        };
        let bytes = has.saturating_sub(least);
        let cost = Cost {
            free_us: micros(self.notified_deadline(class)),
            // What it can spare is of some use to it: less than what a smaller variant would cost.
            now_us: micros(worker.params.start.reload) / 4,
            undo_us: self.engine.speed().reading_us(bytes),
            ..Cost::default()
        };
        let source = Source::WorkerTold { worker: name.clone() };
        (bytes > Bytes::ZERO).then(|| Candidate::whole(source, class, bytes, cost))
    }

    fn notified_deadline(&self, class: Class) -> Duration {
        self.params.shed.deadlines.of(class).max(DEADLINE_MIN)
    }

    /// Notifies a worker that memory is short. Returns whether it was notified.
    pub(super) fn notify_of_pressure(&mut self, name: &str, reason: &str) -> bool {
        let worker = self.workers.get(name);
        let Some((id, least)) = worker.and_then(|worker| worker.lease().zip(worker.params.shrinks_to)) else {
            return false;
        };
        let class = self.leases.get(id).map_or(Class::Batch, |lease| lease.class);
        let deadline = self.now + self.notified_deadline(class);
        let nonce = self.with_leases(|leases, turn| leases.begin_revocation(id, least, deadline, false, turn));
        self.out.push(Action::SetTarget {
            lease: id,
            nonce,
            bytes: least,
            deadline,
            reason: reason.to_owned(),
        });
        true
    }

    /// Credits a worker that was notified if the measurement shows it. Returns whether it has been notified and not come
    /// down.
    pub(super) fn settle_notified(&mut self, name: &str, used: Option<Bytes>, taken_at: Timestamp) -> bool {
        let Some(id) = self.workers.get(name).and_then(Worker::lease) else {
            return false;
        };
        if !matches!(self.leases.get(id).map(|lease| &lease.phase), Some(Phase::Revoking(_))) {
            return false;
        }
        if let Some(revocation) = self.with_leases(|leases, turn| leases.verify(id, used, taken_at, turn)) {
            self.end_notification(id, &revocation);
        }
        true
    }

    /// The deadline has passed, and the worker has not come down.
    pub(super) fn end_notification(&mut self, id: LeaseId, revocation: &Revocation) {
        let Some(lease) = self.leases.get(id) else { return };
        let name = lease.tenant.clone();
        let used = revocation.evidence.used();
        let shown = used.map_or_else(|| "cannot be measured".to_owned(), |used| format!("still uses {used}"));
        let late = self.now.saturating_since(revocation.target.deadline).as_secs_f64();
        let Some(worker) = self.workers.get_mut(&name) else {
            return;
        };
        if !worker.ignored_pressure() {
            return;
        }
        let at_work = worker.requests > 0;
        let pid = worker.run().and_then(|run| run.pid).unwrap_or_default();
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
    pub(super) fn notified_lacks(&self, worker: &Worker) -> Option<Bytes> {
        let id = worker.lease().filter(|_| worker.params.shrinks_to.is_some())?;
        let granted = matches!(self.leases.get(id)?.phase, Phase::Granted);
        let more = worker.steady().saturating_sub(self.ledger.held_by(id));
        (worker.is_ready() && granted && more > Bytes::ZERO).then_some(more)
    }

    /// Books a worker's steady size again. It is not notified of that: it takes the memory when it needs it.
    pub(super) fn restore_notified(&mut self, name: &str) -> Result<String, GrowthWait> {
        let Some((id, steady)) = self
            .workers
            .get(name)
            .and_then(|worker| Some((worker.lease()?, worker.steady())))
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
const DEADLINE_MIN: Duration = Duration::from_secs(1);
