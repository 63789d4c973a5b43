//! Preemption points in the forward pass.
//!
//! A layer of a prompt's chunk takes long: 50 ms of a model of four billion weights, and several times that beside others.
//! So products, attention and the delta rule are cut into slices that take about 5 ms, and between two of them no
//! weight is being read: a plan that waits is put into force at once, also with the part whose product is half made. A
//! product goes on with the piece behind the last one, from memory or from the file.
//!
//! A device executes later what is queued. It is given as much work ahead as one slice, so that it never waits for the host, and
//! a plan waits for no more than that.

use std::time::{Duration, Instant};

use super::{
    backend::{Backend, DeviceError, Fence},
    error::{ApplyError, ApplyReport},
};
use cotenant_policy::residency::EnginePlan;

/// What a checkpoint wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Flow {
    /// Put this plan into force now, then go on. A smaller prefill chunk takes effect with the next chunk; a larger one
    /// is not taken in the middle of a pass, and the report says so.
    Apply(EnginePlan),
    /// Go on.
    Continue,
    /// Stop; the sequence waits for [`Model::recover`](super::Model::recover) or [`Model::reset`](super::Model::reset).
    Stop,
}

/// Polled within a pass, so that commands wait neither for a prompt nor for a layer; closures that return [`Flow`] are one.
pub trait Checkpoint {
    /// What to do now: between two layers, and now and then while the disk is waited for.
    fn poll(&mut self) -> Flow;

    /// The same in the middle of a layer, some milliseconds after the last poll; where that is depends on the clock.
    fn poll_in_layer(&mut self) -> Flow {
        Flow::Continue
    }

    /// Whether something else is wanted while a plan of [`Flow::Apply`] takes long to grow.
    fn wanted(&mut self) -> bool {
        false
    }

    /// Notified how a plan of [`Flow::Apply`] went.
    fn applied(&mut self, result: Result<ApplyReport, ApplyError>) {
        drop(result);
    }

    /// Notified when the smaller chunk of a plan that came while a chunk was under way is in force, at the end of that.
    fn rechunked(&mut self, report: ApplyReport) {
        drop(report);
    }
}

impl<F: FnMut() -> Flow> Checkpoint for F {
    fn poll(&mut self) -> Flow {
        self()
    }
}

/// Preemption points of one pass: the checkpoint and what it has asked for.
pub(super) struct Preemption<'pass> {
    checkpoint: &'pass mut dyn Checkpoint,
    pending: Option<EnginePlan>,
    stopped: bool,
    looked: Instant,
    pub(super) estimators: SliceEstimators,
    /// The last slice that was queued whole, while it is not known to have been executed.
    ahead: Option<Slice>,
    /// What was queued behind it.
    open: Option<Slice>,
}

/// Work that was queued and is not known to have been executed.
struct Slice {
    /// How much of a slice it is by the estimators, in parts of [`WHOLE`].
    share: u64,
    kinds: [bool; 4],
    /// Its end.
    fence: Fence,
    /// When it began, or could have begun.
    began: Instant,
}

/// Kinds of work, each with an estimator of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    Products,
    Attention,
    Delta,
    /// Whole layers of a single token.
    Layers,
}

impl Work {
    const ALL: [Self; 4] = [Self::Products, Self::Attention, Self::Delta, Self::Layers];
}

/// What a preemption point finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Preempt {
    /// Go on.
    No,
    /// A plan waits: pause where nothing is in use, and [`take`](Preemption::take) it.
    Pause,
    /// The pass is not wanted any more.
    Stop,
}

impl<'pass> Preemption<'pass> {
    pub(super) fn new(checkpoint: &'pass mut dyn Checkpoint, estimators: SliceEstimators) -> Self {
        Self {
            checkpoint,
            pending: None,
            stopped: false,
            looked: Instant::now(),
            estimators,
            ahead: None,
            open: None,
        }
    }

    /// Notes that work was queued, from `began` on. Where it is executed later, this waits, as soon as it makes a slice, for the
    /// slice before it: so one is under way and one is ahead, and a command is seen in time. The estimators learn how long work
    /// takes to be executed.
    pub(super) fn queued(
        &mut self,
        backend: &mut dyn Backend,
        kind: Work,
        work: u64,
        began: Instant,
    ) -> Result<(), DeviceError> {
        let fence = backend.mark();
        if self.ahead.is_none() && self.open.is_none() && backend.done(fence)? {
            self.estimators.of_kind(kind).learn(work, began.elapsed());
            return Ok(());
        }
        let share = work.saturating_mul(WHOLE) / self.estimators.of_kind(kind).work.max(1);
        let mut open = self.open.take().unwrap_or(Slice {
            share: 0,
            kinds: [false; 4],
            fence,
            began,
        });
        (open.share, open.fence) = (open.share.saturating_add(share), fence);
        if let Some(seen) = open.kinds.get_mut(kind as usize) {
            *seen = true;
        }
        if open.share < WHOLE || backend.holds(fence) {
            self.open = Some(open);
            return Ok(());
        }
        if let Some(before) = self.ahead.take() {
            backend.wait(before.fence)?;
            let took = before.began.elapsed();
            for kind in Work::ALL
                .into_iter()
                .filter(|kind| before.kinds.get(*kind as usize) == Some(&true))
            {
                let estimator = self.estimators.of_kind(kind);
                estimator.learn(estimator.work.saturating_mul(before.share) / WHOLE, took);
            }
            open.began = Instant::now();
        }
        self.ahead = Some(open);
        Ok(())
    }

    /// The same for a layer of a single token.
    pub(super) fn layer_queued(&mut self, backend: &mut dyn Backend) -> Result<(), DeviceError> {
        self.queued(backend, Work::Layers, LAYER, Instant::now())
    }

    /// Asks the checkpoint, at the end of a layer or while the disk is waited for.
    pub(super) fn check(&mut self) -> Preempt {
        self.ask(|checkpoint| checkpoint.poll())
    }

    /// Asks it in the middle of a layer, when a slice's time has gone by since the last time.
    pub(super) fn check_if_due(&mut self) -> Preempt {
        if self.looked.elapsed() >= self.estimators.slice {
            self.ask(|checkpoint| checkpoint.poll_in_layer())
        } else {
            Preempt::No
        }
    }

    fn ask(&mut self, question: impl FnOnce(&mut dyn Checkpoint) -> Flow) -> Preempt {
        if self.pending.is_none() && !self.stopped {
            self.looked = Instant::now();
            match question(&mut *self.checkpoint) {
                Flow::Continue => {}
                Flow::Apply(plan) => self.pending = Some(plan),
                Flow::Stop => self.stopped = true,
            }
        }
        if self.stopped {
            Preempt::Stop
        } else if self.pending.is_some() {
            Preempt::Pause
        } else {
            Preempt::No
        }
    }

    /// The plan that waits.
    pub(super) const fn take(&mut self) -> Option<EnginePlan> {
        // Nothing is in flight when it is put into force, and the time which that takes says nothing of slices.
        (self.ahead, self.open) = (None, None);
        self.pending.take()
    }

    /// Whether something else is wanted than the plan under way.
    pub(super) fn wanted(&mut self) -> bool {
        self.checkpoint.wanted()
    }

    /// Tells how a plan went.
    pub(super) fn applied(&mut self, result: Result<ApplyReport, ApplyError>) {
        self.checkpoint.applied(result);
    }

    /// Tells that a smaller chunk has come into force.
    pub(super) fn rechunked(&mut self, report: ApplyReport) {
        self.checkpoint.rechunked(report);
    }
}

/// How much of each kind of work fits a slice, as learned from the slices before.
#[derive(Clone, Copy, Debug)]
pub(super) struct SliceEstimators {
    pub(super) products: SliceEstimator,
    pub(super) attention: SliceEstimator,
    pub(super) delta: SliceEstimator,
    layers: SliceEstimator,
    slice: Duration,
}

impl SliceEstimators {
    /// For slices of [`SLICE`].
    pub(super) const fn new() -> Self {
        Self::of(SLICE, WORK_FIRST)
    }

    /// Slices as small as can be, and a look after each.
    #[cfg(test)]
    pub(super) const fn finest() -> Self {
        Self::of(Duration::ZERO, 0)
    }

    const fn of(slice: Duration, work: u64) -> Self {
        let estimator = SliceEstimator { work, slice };
        Self {
            products: estimator,
            attention: estimator,
            delta: estimator,
            layers: estimator,
            slice,
        }
    }

    const fn of_kind(&mut self, kind: Work) -> &mut SliceEstimator {
        match kind {
            Work::Products => &mut self.products,
            Work::Attention => &mut self.attention,
            Work::Delta => &mut self.delta,
            Work::Layers => &mut self.layers,
        }
    }
}

/// How much of one kind of work fits a slice.
#[derive(Clone, Copy, Debug)]
pub(super) struct SliceEstimator {
    /// In multiplications.
    work: u64,
    slice: Duration,
}

impl SliceEstimator {
    /// How much to do before looking again, in multiplications.
    pub(super) const fn work(self) -> u64 {
        self.work
    }

    /// How many rows of so much work each to do before looking again; at least one.
    pub(super) fn rows(self, work_of_row: u64) -> usize {
        usize::try_from(self.work / work_of_row.max(1)).map_or(usize::MAX, |rows| rows.max(1))
    }

    /// Learns from a slice. What it says is followed by halves and doubles, for a single slice may have been held up by
    /// others.
    pub(super) fn learn(&mut self, work: u64, took: Duration) {
        let fits = u128::from(work) * self.slice.as_nanos() / took.as_nanos().max(1);
        let fits = u64::try_from(fits).unwrap_or(u64::MAX).min(WORK_MAX);
        // A small slice says that less than it fits, and not that no more would.
        if work >= self.work || fits < self.work {
            self.work = fits.clamp(self.work / 2, self.work.saturating_mul(2));
        }
    }
}

/// Our choice: a tenth of the 50 ms in which an order is to be seen. Threads wait for each other once in a slice, for 0.1 ms
/// at most.
const SLICE: Duration = Duration::from_millis(5);

/// Before anything was learned: 30 ms where a thread makes two multiplications in a nanosecond, as one without vector
/// instructions does.
const WORK_FIRST: u64 = 1 << 26;

/// A slice.
const WHOLE: u64 = 1024;

/// What a layer of a single token counts for: eight of them before anything was learned.
const LAYER: u64 = WORK_FIRST / 8;

/// More is no slice of any processor.
const WORK_MAX: u64 = 1 << 40;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pace_follows_the_slices_and_one_that_was_held_up_halves_it() {
        let mut estimator = SliceEstimators::new().products;
        for _ in 0..20 {
            let took = Duration::from_nanos(estimator.work() / 200);
            estimator.learn(estimator.work(), took);
        }
        let learned = estimator.work();
        assert!(
            learned.abs_diff(1_000_000_000) < 1000,
            "5 ms at 200 in a nanosecond: {learned}"
        );
        estimator.learn(learned, Duration::from_secs(1));
        assert_eq!(estimator.work(), learned / 2);
        // The end of a product is less than a slice.
        estimator.learn(1000, Duration::from_nanos(5));
        assert_eq!(estimator.work(), learned / 2);
        assert_eq!(
            (estimator.rows(200_000_000), estimator.rows(u64::MAX)),
            (2, 1)
        );
    }

    #[test]
    fn what_the_checkpoint_has_said_is_not_asked_again_until_it_was_done() {
        let mut said = vec![Flow::Stop, Flow::Continue];
        let mut checkpoint = || said.pop().unwrap();
        let mut preemption = Preemption::new(&mut checkpoint, SliceEstimators::new());
        assert_eq!(preemption.check_if_due(), Preempt::No, "it is not yet time");
        assert_eq!(preemption.check(), Preempt::No);
        assert_eq!(
            (preemption.check(), preemption.check()),
            (Preempt::Stop, Preempt::Stop)
        );
        assert!(preemption.take().is_none());
    }
}
