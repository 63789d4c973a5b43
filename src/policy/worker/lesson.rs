//! Peak of a worker, learned for its next start.

use std::{mem, time::Duration};

use super::{Lesson, Worker, run::Run};
use cotenant_units::{Bytes, Timestamp};

impl Worker {
    /// Records the kernel's high water of this process. Returns whether it is learned at once.
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
        // During a change of variant, the peak may belong to either. Whether growth beyond the bounds lasts is known
        // with the next measurement.
        run.resizing.is_none() && run.peak.is_own(peak) && !may_have_outgrown
    }

    /// Returns the lesson of the high water once the worker is ready and was measured at rest at `measured_at`: the
    /// need of a start, or growth since then, unless it is to end for that growth.
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
        // Without the kernel's high water, use between two measurements is unknown.
        let peak = run.peak.seen?;
        let is_its_own = run.peak.is_own(peak);
        let bounded = self.params.rest.recycle_above.is_some();
        if self.may_have_outgrown(peak) {
            return (bounded && stays_grown && is_its_own).then_some(Lesson::Seen(peak));
        }
        let grown = !bounded && self.params.rest.recycle_leaks;
        let run = self.run_mut()?;
        // A process that was taken over counts as one life across all runs of the supervisor.
        let counted = mem::replace(&mut run.peak.counted, true) || run.taken_over_at.is_some();
        match is_its_own {
            true if !counted => Some(Lesson::Lived(peak)),
            // Growth that may have been a leak when read, and has levelled off since.
            true if grown => Some(Lesson::Seen(peak)),
            _ => None,
        }
    }

    /// Returns whether use beyond the bounds is a need: it lasts, or has ended. Otherwise it is undecided, or the
    /// worker is recycled for it, and the next start ignores it.
    fn stays_grown(&self, settle: Duration, now: Timestamp) -> bool {
        let Some(ready) = self.ready() else {
            return true;
        };
        ready.over_since.is_none_or(|since| {
            ready.winding.is_none() && !self.may_be_recycled(ready.at, now) && now >= since + settle
        })
    }

    /// Returns whether `peak` may be growth beyond the bounds since the start, which is no evidence for the need of a
    /// start. The time of a peak is unknown for a process that was taken over.
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
