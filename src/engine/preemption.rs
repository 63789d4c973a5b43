//! Preemption points in the forward pass.
//!
//! One layer of a prefill chunk takes long: 50 ms for a model of four billion weights, and several times that under
//! contention. Products, attention and the delta rule are therefore cut into slices of about 5 ms, and between two
//! slices no weight is being read: a pending plan is applied at once, even to the part whose product is incomplete. The
//! product resumes with the next piece, from memory or from the file.
//!
//! A device executes queued work later. One slice is queued ahead, so that the device never waits for the host, and a
//! plan waits for at most one slice.

use std::time::{Duration, Instant};

use super::{
    backend::{Backend, DeviceError, Fence},
    error::{ApplyError, ApplyReport},
};
use cotenant_policy::{kv_type::KvType, residency::EnginePlan};

/// Response of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Flow {
    /// Apply this plan now, then continue. A smaller prefill chunk takes effect with the next chunk; a larger one is
    /// refused in the middle of a pass, and the report says so.
    Apply(EnginePlan),
    /// Continue.
    Continue,
    /// Stop; the sequence needs [`Model::recover`](super::Model::recover) or [`Model::reset`](super::Model::reset).
    Stop,
}

/// Polled within a pass, so that commands wait neither for a prompt nor for a layer; implemented by closures that
/// return [`Flow`].
pub trait Checkpoint {
    /// The action to take now: called between layers, and periodically while waiting for the disk.
    fn poll(&mut self) -> Flow;

    /// As [`Self::poll`], in the middle of a layer, some milliseconds after the last poll; the position depends on the
    /// clock.
    fn poll_in_layer(&mut self) -> Flow {
        Flow::Continue
    }

    /// Whether another command is pending while a plan of [`Flow::Apply`] is still growing.
    fn wanted(&mut self) -> bool {
        false
    }

    /// Called with the result of a plan of [`Flow::Apply`].
    fn applied(&mut self, result: Result<ApplyReport, ApplyError>) {
        drop(result);
    }

    /// Called when the smaller chunk of a plan received during a chunk takes effect, at the end of that chunk.
    fn rechunked(&mut self, report: ApplyReport) {
        drop(report);
    }
}

impl<F: FnMut() -> Flow> Checkpoint for F {
    fn poll(&mut self) -> Flow {
        self()
    }
}

/// Preemption points of one pass: the checkpoint and its requests.
pub(super) struct Preemption<'pass> {
    checkpoint: &'pass mut dyn Checkpoint,
    pending: Option<EnginePlan>,
    /// KV type that must stay for the whole pass, if the pass depends on it.
    kv_type: Option<KvType>,
    /// A plan with another KV type, applied after the pass.
    later: Option<EnginePlan>,
    stopped: bool,
    looked: Instant,
    pub(super) estimators: SliceEstimators,
    /// The last complete slice queued, until its execution is confirmed.
    ahead: Option<Slice>,
    /// Work queued after it.
    open: Option<Slice>,
}

/// Queued work whose execution is not yet confirmed.
struct Slice {
    /// Its share of a slice by the estimators, in parts of [`WHOLE`].
    share: u64,
    kinds: [bool; 4],
    /// Its end.
    fence: Fence,
    /// Its start, or earliest possible start.
    began: Instant,
}

/// Kinds of work, each with its own estimator.
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

/// Result at a preemption point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Preempt {
    /// Continue.
    No,
    /// A plan is pending: pause with nothing in use, and [`take`](Preemption::take) it.
    Pause,
    /// The pass is cancelled.
    Stop,
}

impl<'pass> Preemption<'pass> {
    pub(super) fn new(checkpoint: &'pass mut dyn Checkpoint, estimators: SliceEstimators) -> Self {
        Self {
            checkpoint,
            pending: None,
            kv_type: None,
            later: None,
            stopped: false,
            looked: Instant::now(),
            estimators,
            ahead: None,
            open: None,
        }
    }

    /// Records work queued from `began` on. With deferred execution, once the work fills a slice, this waits for the
    /// slice before it: one slice runs and one is queued, so commands are noticed in time. The estimators learn the
    /// execution time.
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

    /// As [`Self::queued`], for a layer of a single token.
    pub(super) fn layer_queued(&mut self, backend: &mut dyn Backend) -> Result<(), DeviceError> {
        self.queued(backend, Work::Layers, LAYER, Instant::now())
    }

    /// Polls the checkpoint, at the end of a layer or while waiting for the disk.
    pub(super) fn check(&mut self) -> Preempt {
        self.ask(|checkpoint| checkpoint.poll())
    }

    /// Polls it in the middle of a layer, once a slice's time has passed since the last poll.
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
                Flow::Apply(plan) => {
                    // The later plan supersedes the earlier one.
                    let waits = self.kv_type.is_some_and(|kind| kind != plan.kv_type);
                    let (now, later) = if waits {
                        (None, Some(plan))
                    } else {
                        (Some(plan), None)
                    };
                    (self.pending, self.later) = (now, later);
                }
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

    /// Defers plans with another KV type to the end of the pass.
    pub(super) const fn keep_kv_type(&mut self, kind: KvType) {
        self.kv_type = Some(kind);
    }

    /// Takes the deferred plan.
    pub(super) const fn take_later(&mut self) -> Option<EnginePlan> {
        self.later.take()
    }

    /// The pending plan.
    pub(super) const fn take(&mut self) -> Option<EnginePlan> {
        // Nothing is in flight when it is applied, and its duration is no sample of a slice.
        (self.ahead, self.open) = (None, None);
        self.pending.take()
    }

    /// Whether a command other than the current plan is pending.
    pub(super) fn wanted(&mut self) -> bool {
        self.checkpoint.wanted()
    }

    /// Reports the result of a plan.
    pub(super) fn applied(&mut self, result: Result<ApplyReport, ApplyError>) {
        self.checkpoint.applied(result);
    }

    /// Reports that a smaller chunk has taken effect.
    pub(super) fn rechunked(&mut self, report: ApplyReport) {
        self.checkpoint.rechunked(report);
    }
}

/// Amount of each kind of work that fits a slice, learned from earlier slices.
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

    /// The smallest possible slices, with a poll after each.
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

/// Amount of one kind of work that fits a slice.
#[derive(Clone, Copy, Debug)]
pub(super) struct SliceEstimator {
    /// In multiplications.
    work: u64,
    slice: Duration,
}

impl SliceEstimator {
    /// Work until the next poll, in multiplications.
    pub(super) const fn work(self) -> u64 {
        self.work
    }

    /// Rows of this much work each until the next poll; at least one.
    pub(super) fn rows(self, work_of_row: u64) -> usize {
        usize::try_from(self.work / work_of_row.max(1)).map_or(usize::MAX, |rows| rows.max(1))
    }

    /// Learns from a slice. The estimate moves by at most a factor of two, because contention may have delayed a single
    /// slice.
    pub(super) fn learn(&mut self, work: u64, took: Duration) {
        let fits = u128::from(work) * self.slice.as_nanos() / took.as_nanos().max(1);
        let fits = u64::try_from(fits).unwrap_or(u64::MAX).min(WORK_MAX);
        // A small slice is a lower bound of the fitting work.
        if work >= self.work || fits < self.work {
            self.work = fits.clamp(self.work / 2, self.work.saturating_mul(2));
        }
    }
}

/// Our choice: a tenth of the 50 ms within which a command must be noticed. Threads synchronise once per slice, for at
/// most 0.1 ms.
const SLICE: Duration = Duration::from_millis(5);

/// Initial estimate: 30 ms at two multiplications per nanosecond and thread, the rate without vector instructions.
const WORK_FIRST: u64 = 1 << 26;

/// Parts of a slice.
const WHOLE: u64 = 1024;

/// Weight of a layer of a single token: initially eight make a slice.
const LAYER: u64 = WORK_FIRST / 8;

/// Beyond the capacity of any processor.
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
