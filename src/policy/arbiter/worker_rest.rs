//! Idle workers: drained, stopped, and woken by the next request.
//!
//! A worker that is to end although nobody is in need *winds up* first: doors send it nothing new, what it does is
//! finished, and only then it is stopped. One that was stopped for having nothing to do is *asleep*: its memory is kept
//! for it against everybody but those who give it back when it is asked for, and a request starts it.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{
    core::Arbiter,
    queue::WantKind,
    worker::{StopCause, Worker},
};
use crate::{
    policy::snapshot::{Rest, WorkerState},
    units::{Bytes, Timestamp},
};

/// Why a worker takes nothing new.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum WindCause {
    /// It has had nothing to do for long.
    Idle,
    /// It holds more than it may.
    Outgrown,
}

/// A worker that takes nothing new, and ends when it has finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Winding {
    cause: WindCause,
    since: Timestamp,
}

/// What is known of a worker beside its work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct AtRest {
    pub(super) winding: Option<Winding>,
    /// It was stopped for having nothing to do.
    pub(super) asleep: bool,
    /// An operator stopped it: no request starts it.
    pub(super) by_operator: bool,
    /// It was asked into its smallest variant for having nothing to do, or could not be.
    pub(super) shrunk: bool,
    /// When it was last ready for the first time of its life.
    pub(super) ready_at: Option<Timestamp>,
    /// Since when it has been measured above what it may hold.
    over_since: Option<Timestamp>,
    /// How often it was recycled for that.
    recycles: u32,
    /// It was to be started anew for that when something else stopped it.
    #[serde(default)]
    pub(super) outgrown: bool,
    /// When it was taken over from an earlier run, which says nothing of what it has come to use since.
    #[serde(default)]
    pub(super) taken_over_at: Option<Timestamp>,
}

/// What becomes of what a worker has come to use beyond its bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Growth {
    /// It came back by itself, or the worker goes on with it: it is a need.
    Stays,
    /// It is not known yet, or the worker ends for it: the next one is started as if it had not been.
    Open,
}

impl Winding {
    /// Whether it ends for holding more than it may.
    pub(super) fn is_for_size(self) -> bool {
        self.cause == WindCause::Outgrown
    }
}

impl AtRest {
    /// What stays when its process is gone.
    pub(super) fn ended(self) -> Self {
        Self {
            by_operator: self.by_operator,
            recycles: self.recycles,
            ..Self::default()
        }
    }
}

impl Worker {
    /// Why it does not run, when that is for rest.
    pub(super) const fn rest_of(&self) -> Option<Rest> {
        match self.state {
            WorkerState::Stopped if self.rest.by_operator => Some(Rest::Operator),
            WorkerState::Stopped if self.rest.asleep => Some(Rest::Idle),
            WorkerState::Stopped if self.stopped_to_shed => Some(Rest::Shed),
            _ => None,
        }
    }

    fn is_idle(&self) -> bool {
        self.state == WorkerState::Ready && self.requests == 0 && !self.is_changing()
    }

    /// The smallest of its variants, when it is not in it.
    fn smallest(&self) -> Option<&str> {
        let steady = self.steady();
        self.params
            .variants
            .iter()
            .min_by_key(|variant| variant.steady)
            .filter(|variant| variant.steady < steady)
            .map(|variant| variant.name.as_str())
    }

    /// Whether it is started anew if it holds more than it may. One that outgrows its bounds again right after a start
    /// would do so for ever: each time waits longer.
    fn may_be_recycled(&self, ready_at: Timestamp, now: Timestamp) -> bool {
        let patience = self
            .params
            .restart
            .stable_after
            .saturating_mul(1 << self.rest.recycles.min(6));
        self.rest.recycles == 0 || now >= ready_at + patience
    }

    fn shrinks_at(&self) -> Option<Timestamp> {
        let after = self.params.idle_shrink_after.filter(|_| !self.rest.shrunk)?;
        self.smallest().map(|_| self.idle_since + after)
    }

    fn sleeps_at(&self) -> Option<Timestamp> {
        self.params.idle_stop_after.map(|after| self.idle_since + after)
    }

    /// When its winding up is to be looked at.
    fn winds_up_at(&self, now: Timestamp) -> Option<Timestamp> {
        let winding = self.rest.winding?;
        let quiet = winding.since + QUIET;
        if self.requests == 0 && now < quiet {
            return Some(quiet);
        }
        Some(winding.since + WIND_UP_MAX).filter(|at| *at > now)
    }
}

impl Arbiter {
    /// Somebody needs a worker: one that sleeps is started, one that was made small for having nothing to do grows back.
    pub(super) fn take_worker_wanted(&mut self, name: &str) {
        if self.draining {
            return;
        }
        let Some(worker) = self.workers.get(name) else { return };
        let its_turn_comes = worker.begun_at.is_none() && worker.params.autostart;
        if worker.state != WorkerState::Stopped || worker.rest.by_operator || its_turn_comes {
            return;
        }
        self.explain(format!("worker `{name}` is woken by a request"));
        self.want_worker(name);
    }

    fn leave_small_variant(&mut self, name: &str) {
        let Some(worker) = self.workers.get_mut(name) else {
            return;
        };
        worker.rest.shrunk = false;
        let Some(variant) = worker.variant_before_rest.take() else {
            return;
        };
        let (class, lease) = (worker.params.class, worker.lease);
        if let Some(lease) = lease {
            self.queue_own(name, class, lease, WantKind::WorkerVariant { variant });
        }
    }

    /// Notes whether a worker holds more than it may, by its last measurement.
    pub(super) fn watch_growth(&mut self, name: &str, used: Bytes) {
        let now = self.now;
        let settle = self.params.shed.settle;
        let Some(worker) = self.workers.get_mut(name) else {
            return;
        };
        let (Some(above), WorkerState::Ready, Some(ready_at)) =
            (worker.params.recycle_above, worker.state, worker.rest.ready_at)
        else {
            return;
        };
        if used <= above {
            worker.rest.over_since = None;
            return;
        }
        let since = *worker.rest.over_since.get_or_insert(now);
        if worker.rest.winding.is_some() || now < since + settle || !worker.may_be_recycled(ready_at, now) {
            return;
        }
        worker.rest.winding = Some(Winding {
            cause: WindCause::Outgrown,
            since: now,
        });
        worker.rest.recycles = worker.rest.recycles.saturating_add(1);
        let requests = worker.requests;
        let held = self.worker_held(name);
        self.explain(format!(
            "worker `{name}` uses {used}, above {above} where it is recycled, and holds {held}: it takes nothing new, ends \
             its {requests} requests and is started anew"
        ));
    }

    /// What became of the last growth of a worker beyond its bounds.
    pub(super) fn growth_of(&self, name: &str) -> Growth {
        let Some(worker) = self.workers.get(name) else {
            return Growth::Open;
        };
        let rest = &worker.rest;
        let (Some(since), Some(ready_at)) = (rest.over_since, rest.ready_at) else {
            // What it has used at most it has given back by itself.
            return Growth::Stays;
        };
        if rest.winding.is_some() || worker.may_be_recycled(ready_at, self.now) {
            return Growth::Open;
        }
        if self.now < since + self.params.shed.settle {
            Growth::Open
        } else {
            Growth::Stays
        }
    }

    /// Serves what time and work have brought to workers that are ready. To be called last, when all else is decided.
    pub(super) fn serve_rests(&mut self) {
        let names: Vec<String> = self.workers.keys().cloned().collect();
        for name in names {
            self.serve_rest(&name);
        }
    }

    fn serve_rest(&mut self, name: &str) {
        let now = self.now;
        let draining = self.draining;
        let waits = self.waits_to_grow(name);
        let Some(worker) = self.workers.get_mut(name) else {
            return;
        };
        if worker.state != WorkerState::Ready {
            return;
        }
        if let Some(winding) = worker.rest.winding {
            let quiet = worker.requests == 0 && now >= winding.since + QUIET;
            let late = now >= winding.since + WIND_UP_MAX;
            if winding.cause == WindCause::Idle && worker.requests > 0 {
                worker.rest.winding = None;
            } else if quiet || late {
                self.end_winding(name, winding);
            }
            return;
        }
        if draining || waits || worker.is_changing() {
            return;
        }
        if worker.requests > 0 {
            self.leave_small_variant(name);
            self.serve_queue();
        } else if worker.sleeps_at().is_some_and(|at| at <= now) {
            worker.rest.winding = Some(Winding {
                cause: WindCause::Idle,
                since: now,
            });
        } else if worker.shrinks_at().is_some_and(|at| at <= now) {
            worker.rest.shrunk = true;
            let smallest = worker.smallest().map(str::to_owned);
            worker.variant_before_rest = worker.variant_before_shed.clone().or_else(|| worker.variant.clone());
            let idle = now.saturating_since(worker.idle_since).as_secs();
            if let Some(variant) = smallest {
                self.explain(format!(
                    "worker `{name}` changes to variant `{variant}`: nothing to do for {idle} s"
                ));
                self.resize_worker(name, variant, Vec::new(), false);
            }
        }
    }

    /// When [`serve_rest`](Self::serve_rest) has something to do for a worker.
    pub(super) fn next_rest(&self, worker: &Worker) -> Option<Timestamp> {
        if worker.state != WorkerState::Ready {
            return None;
        }
        if worker.rest.winding.is_some() {
            return worker.winds_up_at(self.now);
        }
        if self.draining || !worker.is_idle() || self.waits_to_grow(&worker.params.name) {
            return None;
        }
        [worker.shrinks_at(), worker.sleeps_at()].into_iter().flatten().min()
    }

    fn end_winding(&mut self, name: &str, winding: Winding) {
        let (cause, reason) = match winding.cause {
            WindCause::Idle => (StopCause::Idle, "it has had nothing to do"),
            WindCause::Outgrown => (StopCause::Recycle, "it has outgrown what it may hold"),
        };
        self.explain(format!("stopping worker `{name}`: {reason}"));
        self.stop_worker(name, cause, reason);
    }

    fn waits_to_grow(&self, name: &str) -> bool {
        let lease = self.workers.get(name).and_then(|worker| worker.lease);
        self.queue.values().any(|want| Some(want.lease) == lease)
    }
}

/// How long a worker must have been without work after doors were told to send none: a request that was on its way to
/// it has arrived by then.
const QUIET: Duration = Duration::from_millis(50);

/// How long the work of a worker that is wound up may take. As long as a client waits for a transcript.
const WIND_UP_MAX: Duration = Duration::from_secs(30);
