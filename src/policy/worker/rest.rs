//! Rest of a worker: shrunk or stopped when idle, wound down when it outgrows its bounds.

use std::time::Duration;

use super::{
    Phase, RestStep, Worker,
    run::{Stage, WindCause, Winding},
};
use crate::reason::StopReason;
use cotenant_units::{Bytes, Timestamp};

impl Worker {
    /// Returns the next deadline of the worker. `may_rest` is false while it waits to grow, is under a target, or the
    /// daemon drains.
    pub(crate) fn next_deadline(&self, may_rest: bool, now: Timestamp) -> Option<Timestamp> {
        let own = [
            self.comes_up_by(now),
            self.due().map(|(at, _)| at),
            self.next_rest(may_rest, now),
        ];
        own.into_iter().flatten().min()
    }

    /// Returns the step of a ready worker that follows from the time and its requests.
    pub(crate) fn take_rest(&mut self, may_rest: bool, now: Timestamp) -> Option<RestStep> {
        let (smallest, requests) = (self.smallest().map(str::to_owned), self.requests);
        let (shrinks_at, sleeps_at) = (self.shrinks_at(), self.sleeps_at());
        let Phase::Running(run) = &mut self.phase else {
            return None;
        };
        let Stage::Ready(ready) = &mut run.stage else {
            return None;
        };
        if let Some(winding) = ready.winding {
            let quiet = requests == 0 && now >= winding.since + QUIET;
            return match winding.cause {
                WindCause::Idle if requests > 0 => {
                    ready.winding = None;
                    None
                }
                cause if quiet => Some(RestStep::Stop(match cause {
                    WindCause::Idle => StopReason::Idle,
                    WindCause::Outgrown => StopReason::Outgrown,
                })),
                // Still busy after `WIND_DOWN_MAX`: it accepts requests again, and is recycled at another time. A busy
                // worker is stopped only for a shortage of memory.
                WindCause::Outgrown if now >= winding.since + WIND_DOWN_MAX => {
                    ready.winding = None;
                    ready.over_since = None;
                    None
                }
                _ => None,
            };
        }
        if !may_rest || run.resizing.is_some() {
            return None;
        }
        if requests > 0 {
            ready.shrunk = false;
            let before_rest = ready.before_rest.take();
            return before_rest.map(|variant| RestStep::Grow { variant });
        }
        if sleeps_at.is_some_and(|at| at <= now) {
            ready.winding = Some(Winding {
                cause: WindCause::Idle,
                since: now,
            });
            return None;
        }
        shrinks_at.filter(|at| *at <= now)?;
        ready.shrunk = true;
        ready.before_rest = run.before_shed.clone().or_else(|| run.variant.clone());
        let idle = now.saturating_since(self.idle_since);
        smallest.map(|variant| RestStep::Shrink { variant, idle })
    }

    /// Returns when [`take_rest`](Self::take_rest) is next due without a change of requests.
    fn next_rest(&self, may_rest: bool, now: Timestamp) -> Option<Timestamp> {
        let run = self.run()?;
        let ready = run.ready()?;
        if let Some(winding) = ready.winding {
            let quiet = winding.since + QUIET;
            if self.requests == 0 && now < quiet {
                return Some(quiet);
            }
            return Some(winding.since + WIND_DOWN_MAX).filter(|at| *at > now);
        }
        if !may_rest || self.requests > 0 || run.resizing.is_some() {
            return None;
        }
        [self.shrinks_at(), self.sleeps_at()]
            .into_iter()
            .flatten()
            .min()
    }

    fn shrinks_at(&self) -> Option<Timestamp> {
        let shrunk = self.ready()?.shrunk;
        let after = self.params.rest.idle_shrink_after.filter(|_| !shrunk)?;
        self.smallest().map(|_| self.idle_since + after)
    }

    fn sleeps_at(&self) -> Option<Timestamp> {
        self.params
            .rest
            .idle_stop_after
            .map(|after| self.idle_since + after)
    }

    /// Returns the smallest variant, unless the worker is already as small.
    fn smallest(&self) -> Option<&str> {
        let variants = self.params.variants.iter();
        let least = variants.min_by_key(|variant| variant.steady)?;
        (least.steady < self.steady()).then_some(least.name.as_str())
    }

    /// Returns whether a worker above its bound may be restarted. After each recycle the required run time doubles, up
    /// to 64 times `stable_after`, so that a worker that outgrows its bound right after a start is not restarted in a
    /// loop.
    pub(super) fn may_be_recycled(&self, ready_at: Timestamp, now: Timestamp) -> bool {
        let stable = self.params.start.restart.stable_after;
        self.recycles == 0 || now >= ready_at + stable.saturating_mul(1 << self.recycles.min(6))
    }

    /// Records a measurement. Returns the bound that the worker has exceeded for `settle`; it then winds down. The
    /// bound is `recycle_above`; else, while memory is `wanted`, its peak, if its use after requests grows without end;
    /// else, at rest, twice the use of a `fresh` process, if one is to replace it.
    pub(crate) fn outgrows(
        &mut self,
        used: Bytes,
        (wanted, fresh): (bool, Option<Bytes>),
        settle: Duration,
        now: Timestamp,
    ) -> Option<Bytes> {
        let ready_at = self.ready()?.at;
        let may_be_recycled = self.may_be_recycled(ready_at, now);
        let (busy, rest) = (self.requests > 0, self.params.rest);
        let peak = self.params.peak_of(self.variant());
        let ready = self.ready_mut()?;
        ready.breath.measured(used, busy);
        let leaks = rest.recycle_leaks && wanted && ready.breath.leaks();
        let bounded = rest.recycle_above.or(leaks.then_some(peak));
        let renewed = rest.recycle_leaks && !busy;
        let above = bounded.or(fresh
            .filter(|_| renewed)
            .map(|fresh| fresh.saturating_add(fresh)));
        let Some(above) = above.filter(|above| used > *above) else {
            ready.over_since = None;
            return None;
        };
        let since = *ready.over_since.get_or_insert(now);
        let may_be_recycled = may_be_recycled || bounded.is_none();
        if ready.winding.is_some() || now < since + settle || !may_be_recycled {
            return None;
        }
        ready.winding = Some(Winding {
            cause: WindCause::Outgrown,
            since: now,
        });
        if bounded.is_some() {
            self.recycles = self.recycles.saturating_add(1);
        }
        Some(above)
    }
}

/// Time without requests before a worker that winds down is stopped: requests sent before the APIs were notified have
/// arrived by then.
const QUIET: Duration = Duration::from_millis(50);

/// Longest time for which a busy worker that winds down accepts no requests: as long as a client waits for a
/// transcript.
const WIND_DOWN_MAX: Duration = Duration::from_secs(30);
