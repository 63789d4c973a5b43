//! Peak use of a worker: what is learned of it for the next start.

use std::{mem, time::Duration};

use super::{Lesson, Worker, run::Run};
use cotenant_units::{Bytes, Timestamp};

impl Worker {
    /// Takes what the kernel remembers as the most that this life has used. Returns whether that is learned at once.
    pub(crate) fn peaked(&mut self, peak: Bytes) -> bool {
        if !self.is_up() {
            return false;
        }
        let may_have_outgrown = self.may_have_outgrown(peak);
        let Some(run) = self.run_mut() else {
            return false;
        };
        run.peak.seen = run.peak.seen.max(Some(peak));
        if mem::take(&mut run.peak.next_is_of_others) {
            run.peak.leave();
        }
        // Between two sizes it is unknown of which one it is the peak. Of one that may have outgrown its bounds it is known with
        // the next measurement whether that stays.
        run.resizing.is_none() && run.peak.is_own(peak) && !may_have_outgrown
    }

    /// The lesson of its high water when it has come up and is measured at rest, at `measured_at`: the need of a start;
    /// and what it has come to use since, unless it is to end for that.
    pub(crate) fn lesson(
        &mut self,
        measured_at: Timestamp,
        settle: Duration,
        now: Timestamp,
    ) -> Option<Lesson> {
        let stays_grown = self.stays_grown(settle, now);
        let at_rest = |run: &&Run| {
            run.ready().is_some() && run.resizing.is_none() && measured_at >= run.since
        };
        let run = self.run().filter(at_rest)?;
        // Without the kernel's high water it is unknown what happened between two measurements.
        let peak = run.peak.seen?;
        let is_its_own = run.peak.is_own(peak);
        let bounded = self.params.rest.recycle_above.is_some();
        if self.may_have_outgrown(peak) {
            return (bounded && stays_grown && is_its_own).then_some(Lesson::Seen(peak));
        }
        let grown = !bounded && self.params.rest.recycle_leaks;
        let run = self.run_mut()?;
        // A process that was taken over has lived once, however many supervisors it has seen.
        let counted = mem::replace(&mut run.peak.counted, true) || run.taken_over_at.is_some();
        match is_its_own {
            true if !counted => Some(Lesson::Lived(peak)),
            // What may have been a leak when it was read, and has found its level since.
            true if grown => Some(Lesson::Seen(peak)),
            _ => None,
        }
    }

    /// Whether it goes on with its use beyond its bounds, or came back from it: then that is a need. Otherwise it is not known
    /// yet, or the worker ends for it, and the next one is started as if it had not been.
    fn stays_grown(&self, settle: Duration, now: Timestamp) -> bool {
        let Some(ready) = self.ready() else {
            return true;
        };
        ready.over_since.is_none_or(|since| {
            ready.winding.is_none() && !self.may_be_recycled(ready.at, now) && now >= since + settle
        })
    }

    /// Whether a peak may be one that it has grown to beyond its bounds since it was started, which says nothing of what
    /// a start takes: of a process that was taken over, it is unknown when it was.
    fn may_have_outgrown(&self, peak: Bytes) -> bool {
        let since_its_start = self
            .run()
            .is_some_and(|run| run.peak.counted || run.taken_over_at.is_some());
        let rest = self.params.rest;
        let may_leak = || self.ready().is_some_and(|ready| ready.breath.may_leak());
        let above = rest.recycle_above.or_else(|| {
            (rest.recycle_leaks && may_leak()).then(|| self.params.peak_of(self.variant()))
        });
        since_its_start && above.is_some_and(|above| peak > above)
    }
}
