//! State of one worker: phase, process, rest, pending change.
//!
//! ```text
//!   stopped ── wanted ──► awaiting memory ── booked ──► starting ──► ready ◄──► (variants)
//!      ▲                        ▲                          │           │
//!      │ asked to               │ backoff over             ▼           ▼
//!      └──────── stopping ◄─────┴─── backing off ◄────── exited, not ready in time
//!                                        └── too often ──► degraded
//! ```
//!
//! A worker that is to end without a memory shortage *winds down* first: APIs send it no new requests, it completes the
//! running ones, and then it is stopped. A worker stopped for being idle is *asleep*: a request starts it.

mod breath;
mod exit;
mod lesson;
mod rest;
mod run;

use std::{mem, time::Duration};

use serde::{Deserialize, Serialize};

use self::run::{Ready, Stage};
pub(super) use self::{
    exit::AfterExit,
    run::{Resizing, Run, StopCause},
};
use super::{
    book::{BookedRun, BookedWorker, WorkerHistory},
    death::DeathSummary,
    event::WorkerCommand,
    lease::LeaseId,
    params::WorkerParams,
    reason::StopReason,
    restart::Restart,
    snapshot::{Rest, WorkerState},
};
use cotenant_units::{Bytes, Timestamp};

/// The arbiter's view of a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Worker {
    pub(super) params: WorkerParams,
    phase: Phase,
    /// Whether it should run.
    wanted: bool,
    /// Time of its turn at the start of the supervisor.
    begun_at: Option<Timestamp>,
    pub(super) requests: u32,
    pub(super) idle_since: Timestamp,
    pub(super) restart: Restart,
    /// Number of times it was recycled for its size.
    recycles: u32,
    pub(super) history: WorkerHistory,
    pub(super) last_death: Option<DeathSummary>,
    #[serde(default)]
    returns: Returns,
    /// Duration of its last start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    took: Option<Duration>,
}

/// Early returns of a worker that was stopped to make room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Returns {
    /// Time of the last stop to make room.
    shed_at: Option<Timestamp>,
    /// Consecutive stops after which it was ready again within [`RETURN_SOON`].
    in_a_row: u32,
}

/// Phase of a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Phase {
    /// Not running: at rest, or before its turn.
    Stopped(Option<Rest>),
    AwaitingMemory,
    BackingOff {
        until: Timestamp,
    },
    /// Failed too often, or in a way that requires an operator.
    Degraded,
    /// Has a process and a lease.
    Running(Box<Run>),
}

/// Consequence of an operator's command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Commanded {
    Start,
    Stop(StopReason),
    /// It did not run and is not to be started.
    Withdraw,
    Nothing,
}

/// A step taken for a ready worker depending on its load.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum RestStep {
    Stop(StopReason),
    Shrink {
        variant: String,
        idle: Duration,
    },
    /// It has work again and returns to the variant it had before it was shrunk for being idle.
    Grow {
        variant: String,
    },
}

/// An observation of a worker's peak memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lesson {
    /// Peak seen so far.
    Seen(Bytes),
    /// Peak of a complete start.
    Lived(Bytes),
}

impl Worker {
    pub(super) fn new(params: &WorkerParams) -> Self {
        Self {
            phase: Phase::Stopped(None),
            wanted: params.start.autostart,
            begun_at: None,
            requests: 0,
            idle_since: Timestamp::START,
            restart: Restart::default(),
            recycles: 0,
            history: WorkerHistory::default(),
            last_death: None,
            returns: Returns::default(),
            took: None,
            params: params.clone(),
        }
    }

    /// Applies new settings; returns whether they differ.
    pub(super) fn renew(&mut self, params: &WorkerParams) -> bool {
        let differ = self.params != *params;
        if differ {
            self.params = params.clone();
        }
        differ
    }

    pub(super) fn state(&self) -> WorkerState {
        match &self.phase {
            Phase::Stopped(_) => WorkerState::Stopped,
            Phase::AwaitingMemory => WorkerState::AwaitingMemory,
            Phase::BackingOff { .. } => WorkerState::BackingOff,
            Phase::Degraded => WorkerState::Degraded,
            Phase::Running(run) => match run.stage {
                Stage::Starting => WorkerState::Starting,
                Stage::Ready(_) => WorkerState::Ready,
                Stage::Stopping { .. } => WorkerState::Stopping,
            },
        }
    }

    pub(super) fn run(&self) -> Option<&Run> {
        match &self.phase {
            Phase::Running(run) => Some(run),
            _ => None,
        }
    }

    pub(super) fn run_mut(&mut self) -> Option<&mut Run> {
        match &mut self.phase {
            Phase::Running(run) => Some(run),
            _ => None,
        }
    }

    fn ready(&self) -> Option<&Ready> {
        self.run()?.ready()
    }

    fn ready_mut(&mut self) -> Option<&mut Ready> {
        self.run_mut()?.ready_mut()
    }

    pub(super) fn is_ready(&self) -> bool {
        self.ready().is_some()
    }

    /// Whether it is starting or ready.
    pub(super) fn is_up(&self) -> bool {
        self.run().is_some_and(|run| run.stopping().is_none())
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.run().is_some_and(|run| run.stopping().is_some())
    }

    pub(super) const fn is_waiting(&self) -> bool {
        matches!(self.phase, Phase::AwaitingMemory)
    }

    /// Whether it is ready and not changing.
    pub(super) fn is_settled(&self) -> bool {
        self.is_ready() && self.run().is_some_and(|run| run.resizing.is_none())
    }

    pub(super) fn lease(&self) -> Option<LeaseId> {
        self.run().map(|run| run.lease)
    }

    pub(super) fn variant(&self) -> Option<&str> {
        self.run()?.variant.as_deref()
    }

    pub(super) fn steady(&self) -> Bytes {
        self.params.steady_of(self.variant())
    }

    /// Returns the largest variant that is smaller than the present one and whose peak fits into `held`.
    pub(super) fn smaller_variant(&self, held: Bytes) -> Option<&str> {
        let steady = self.steady();
        let variants = self.params.variants.iter();
        variants
            .filter(|variant| variant.steady < steady && variant.peak <= held)
            .max_by_key(|variant| variant.steady)
            .map(|variant| variant.name.as_str())
    }

    /// Returns the reason for which it is at rest.
    pub(super) const fn rest(&self) -> Option<Rest> {
        match self.phase {
            Phase::Stopped(rest) => rest,
            _ => None,
        }
    }

    pub(super) const fn retry_at(&self) -> Option<Timestamp> {
        match self.phase {
            Phase::BackingOff { until } => Some(until),
            _ => None,
        }
    }

    pub(super) fn is_winding_down(&self) -> bool {
        self.ready().is_some_and(|ready| ready.winding.is_some())
    }

    pub(super) fn ignores_pressure(&self) -> bool {
        self.ready().is_some_and(|ready| ready.ignores_pressure)
    }

    /// Whether it was stopped to make room and will return.
    pub(super) const fn was_shed(&self) -> bool {
        self.wanted && matches!(self.phase, Phase::Stopped(Some(Rest::Shed)))
    }

    /// Whether it is asleep until the next request.
    pub(super) const fn is_asleep(&self) -> bool {
        self.wanted && matches!(self.phase, Phase::Stopped(Some(Rest::Idle)))
    }

    /// Whether it should run.
    pub(super) const fn is_wanted(&self) -> bool {
        self.wanted
    }

    /// Whether its turn at the start of the supervisor is still ahead.
    pub(super) const fn awaits_its_turn(&self) -> bool {
        self.begun_at.is_none() && self.params.start.autostart
    }

    /// Whether it waits to be started in its turn.
    pub(super) const fn awaits_its_start(&self) -> bool {
        self.wanted && self.begun_at.is_none() && matches!(self.phase, Phase::Stopped(_))
    }

    /// Whether a request starts it.
    pub(super) fn can_be_woken(&self) -> bool {
        matches!(
            self.phase,
            Phase::Stopped(None | Some(Rest::Idle | Rest::Shed))
        ) && !self.awaits_its_turn()
    }

    /// Returns its size after the present change.
    pub(super) fn stays(&self, held: Bytes) -> Bytes {
        let Some(run) = self.run() else { return held };
        match (&run.stage, &run.resizing) {
            (Stage::Stopping { .. }, _) => Bytes::ZERO,
            (Stage::Ready(_), Some(resizing)) => self.params.steady_of(Some(&resizing.variant)),
            _ => held,
        }
    }

    /// Returns the bytes that its next start needs beyond `held`, for a start that takes `peak`; `None` unless it will
    /// start without waiting in the queue.
    pub(super) fn returns_for(&self, peak: Bytes, held: Bytes) -> Option<Bytes> {
        if !self.wanted {
            return None;
        }
        match &self.phase {
            Phase::Stopped(Some(Rest::Idle | Rest::Shed)) | Phase::BackingOff { .. } => Some(peak),
            Phase::Stopped(_) => self.awaits_its_turn().then_some(peak),
            Phase::Running(run) => match &run.stage {
                Stage::Starting => false,
                // Its next request will take as much as the last ones.
                Stage::Ready(ready) if !ready.is_outgrown() => {
                    let more = ready.breath.need().saturating_sub(held);
                    return (more > Bytes::ZERO).then_some(more);
                }
                Stage::Ready(_) => true,
                Stage::Stopping { cause, outgrown } => *outgrown || *cause == StopCause::Recycle,
            }
            .then(|| peak.saturating_sub(held)),
            Phase::AwaitingMemory | Phase::Degraded => None,
        }
    }

    /// Whether its turn at the start is over, successful or not.
    pub(super) fn has_come_up(&self, now: Timestamp) -> bool {
        self.begun_at.is_some() && self.comes_up_by(now).is_none()
    }

    /// Returns the end of its turn at the start, during that turn.
    fn comes_up_by(&self, now: Timestamp) -> Option<Timestamp> {
        let is_on = match &self.phase {
            Phase::AwaitingMemory => true,
            Phase::Running(run) => run.stage == Stage::Starting,
            Phase::Stopped(_) | Phase::BackingOff { .. } | Phase::Degraded => false,
        };
        let by = self.begun_at.filter(|_| is_on)? + self.params.start.ready_timeout;
        (by > now).then_some(by)
    }

    /// Marks it as wanted and waiting for memory.
    pub(super) fn want(&mut self, now: Timestamp) {
        self.wanted = true;
        self.begun_at.get_or_insert(now);
        self.phase = Phase::AwaitingMemory;
    }

    /// Starts it into `lease`, in its first variant.
    pub(super) fn start(&mut self, lease: LeaseId, now: Timestamp) {
        self.history.starts = self.history.starts.saturating_add(1);
        let variant = self
            .params
            .variants
            .first()
            .map(|variant| variant.name.clone());
        self.phase = Phase::Running(Box::new(Run::new(lease, variant, now)));
    }

    /// Takes it over from an earlier run of the supervisor.
    pub(super) fn adopt(&mut self, booked: &BookedRun, lease: LeaseId, pid: u32, now: Timestamp) {
        self.begun_at = Some(now);
        self.history.starts = self.history.starts.max(1);
        let resizes = self.params.variants.len() > 1;
        self.phase = Phase::Running(Box::new(Run::adopted(booked, lease, pid, resizes, now)));
    }

    /// Restores its wanted state and history from an earlier run, running or not.
    pub(super) fn restore(&mut self, booked: &BookedWorker, now: Timestamp) {
        self.wanted = booked.wanted;
        self.history = booked.history.clone();
        let rest = if self.params.start.autostart && !booked.wanted {
            // Only an operator disables a worker that starts automatically.
            Some(Rest::Operator)
        } else {
            booked.stopped_to_shed.then_some(Rest::Shed)
        };
        // A resting worker has had its turn, so that those behind it do not wait for it.
        self.begun_at = rest.map(|_| now);
        self.phase = Phase::Stopped(rest);
    }

    /// Returns its entry for the next run; `held` is the size of its lease.
    pub(super) fn booked(&self, held: Bytes) -> BookedWorker {
        BookedWorker {
            name: self.params.name.clone(),
            wanted: self.wanted,
            stopped_to_shed: self.was_shed(),
            run: self.run().map(|run| run.booked(held)).unwrap_or_default(),
            history: self.history.clone(),
        }
    }

    /// Marks it as ready. Returns the duration of the start, or `None` if it was not starting.
    pub(super) fn answered(&mut self, pid: u32, now: Timestamp) -> Option<Duration> {
        let took = self.run_mut()?.answered(pid, now)?;
        self.idle_since = now;
        self.took = Some(took);
        if let Some(shed_at) = self.returns.shed_at.take() {
            let soon = now.saturating_since(shed_at) < RETURN_SOON;
            self.returns.in_a_row = if soon {
                (self.returns.in_a_row + 1).min(RETURNS_MAX)
            } else {
                0
            };
        }
        self.restart.ready(now);
        Some(took)
    }

    /// Returns the expected duration of a start: that of the last one.
    pub(super) fn reload(&self) -> Duration {
        self.took.unwrap_or(self.params.start.reload)
    }

    /// Returns the time since it became ready.
    pub(super) fn has_run(&self, now: Timestamp) -> Duration {
        let ready = self.ready();
        ready.map_or(Duration::ZERO, |ready| now.saturating_since(ready.at))
    }

    /// Records the death of its process; the exit event follows.
    pub(super) fn died(&mut self, summary: DeathSummary) {
        if let Some(run) = self.run_mut() {
            run.needs_operator = summary.needs_operator;
        }
        self.last_death = Some(summary);
    }

    /// Records its number of requests. Returns whether it starts working.
    pub(super) fn works(&mut self, requests: u32, now: Timestamp) -> bool {
        if self.requests > 0 && requests == 0 {
            self.idle_since = now;
        }
        let begins = self.requests == 0 && requests > 0;
        self.requests = requests;
        if begins && let Some(ready) = self.ready_mut() {
            ready.breath.works();
        }
        begins
    }

    /// Returns the peak of its last requests; zero before the first.
    pub(super) fn breathes_to(&self) -> Bytes {
        self.ready()
            .map_or(Bytes::ZERO, |ready| ready.breath.need())
    }

    /// Returns the end of the time in which it is not stopped again to make room, because earlier stops were followed
    /// by early returns.
    pub(super) fn not_worth_stopping_until(&self) -> Option<Timestamp> {
        let ready_at = self.ready()?.at;
        let times = self.returns.in_a_row.checked_sub(1)?;
        Some(ready_at + RETURN_DWELL.saturating_mul(1 << times))
    }

    /// Records the end of its process. Returns its run and the consequence; `None` if there was no run.
    pub(super) fn exited(
        &mut self,
        intended: bool,
        cause: &str,
        now: Timestamp,
    ) -> Option<(Box<Run>, AfterExit)> {
        self.run()?;
        let Phase::Running(run) = mem::replace(&mut self.phase, Phase::Stopped(None)) else {
            return None;
        };
        self.requests = 0;
        self.history.last_exit = Some(cause.to_owned());
        let (rest, next) = match exit::consequence(&run, intended, self.wanted) {
            Some(consequence) => consequence,
            None => (None, self.failed(run.needs_operator, now)),
        };
        if intended && run.stopping().is_none() {
            self.wanted = false;
        }
        if rest.is_some() {
            self.phase = Phase::Stopped(rest);
        }
        self.returns.shed_at = matches!(next, AfterExit::Shed { .. }).then_some(now);
        Some((run, next))
    }

    fn failed(&mut self, needs_operator: bool, now: Timestamp) -> AfterExit {
        self.history.failures = self.history.failures.saturating_add(1);
        if !self.wanted {
            return AfterExit::Rests;
        }
        let retries = !needs_operator;
        let limits = &self.params.start.restart;
        let until = retries.then(|| self.restart.failed(limits, now)).flatten();
        self.phase = until.map_or(Phase::Degraded, |until| Phase::BackingOff { until });
        AfterExit::Failed { needs_operator }
    }

    /// Applies an operator's command and returns its consequence.
    pub(super) fn command(&mut self, command: WorkerCommand, now: Timestamp) -> Commanded {
        let (up, waiting) = (self.is_up(), self.is_waiting());
        let stopping = self.run_mut().and_then(Run::stopping_mut);
        match command {
            WorkerCommand::Stop => {
                self.wanted = false;
                if up {
                    return Commanded::Stop(StopReason::Operator);
                }
                if let Some(cause) = self.run_mut().and_then(Run::stopping_mut) {
                    *cause = StopCause::Operator;
                    return Commanded::Nothing;
                }
                self.begun_at.get_or_insert(now);
                self.phase = Phase::Stopped(Some(Rest::Operator));
                Commanded::Withdraw
            }
            WorkerCommand::Start | WorkerCommand::Recycle => {
                if let Some(cause) = stopping {
                    *cause = StopCause::Recycle;
                    self.wanted = true;
                }
                self.restart.forget();
                match command {
                    WorkerCommand::Recycle if up => {
                        self.wanted = true;
                        Commanded::Stop(StopReason::Recycle)
                    }
                    _ if up || waiting || self.is_stopping() => Commanded::Nothing,
                    _ => Commanded::Start,
                }
            }
        }
    }

    /// Records the end of a change of variant. Returns the requested change, or `None` if it is not ready.
    pub(super) fn changed(
        &mut self,
        variant: &str,
        failed: bool,
        now: Timestamp,
    ) -> Option<Option<Resizing>> {
        let smaller = self.params.steady_of(Some(variant)) < self.steady();
        self.run_mut()?.changed((variant, smaller), failed, now)
    }

    /// Records that it did not shrink after a request. Returns whether it is ready.
    pub(super) fn ignored_pressure(&mut self) -> bool {
        let ready = self.ready_mut();
        ready.is_some_and(|ready| {
            ready.ignores_pressure = true;
            true
        })
    }

    /// Takes the step due at `now`: a reason to stop it, or `None` to start it again.
    pub(super) fn take_due(&mut self, now: Timestamp) -> Option<Option<StopReason>> {
        let (_, due) = self.due().filter(|(at, _)| *at <= now)?;
        if let Some(run) = self.run_mut().filter(|run| run.stopping().is_some()) {
            run.since = now;
        }
        Some(due)
    }

    /// Returns the next step and its time.
    fn due(&self) -> Option<(Timestamp, Option<StopReason>)> {
        match &self.phase {
            Phase::BackingOff { until } => Some((*until, None)),
            Phase::Running(run) => {
                let (at, reason) = run.due(&self.params.start, self.params.stop_grace)?;
                Some((at, Some(reason)))
            }
            Phase::Stopped(_) | Phase::AwaitingMemory | Phase::Degraded => None,
        }
    }
}

/// Time within which a return after a stop to make room counts as early. Our choice: twice the load time of a large
/// model.
const RETURN_SOON: Duration = Duration::from_secs(60);

/// Time without stops after the first early return; doubled with each further one, up to [`RETURNS_MAX`] of them.
const RETURN_DWELL: Duration = Duration::from_secs(10);
const RETURNS_MAX: u32 = 6;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::params::{RestParams, VariantParams};

    const fn at(millis: u64) -> Timestamp {
        Timestamp::from_millis(millis)
    }

    fn variant(name: &str, mib: u64) -> VariantParams {
        VariantParams {
            name: name.to_owned(),
            steady: Bytes::from_mib(mib),
            peak: Bytes::from_mib(mib),
        }
    }

    /// Ready at 100 ms, in `open`; asked into `small` when idle for 1 s, and stopped when idle for 2 s.
    fn ready() -> Worker {
        let mut worker = Worker::new(&WorkerParams {
            variants: vec![variant("open", 100), variant("small", 40)],
            rest: RestParams {
                auto: false,
                idle_shrink_after: Some(Duration::from_secs(1)),
                idle_stop_after: Some(Duration::from_secs(2)),
                recycle_above: Some(Bytes::from_mib(150)),
                recycle_leaks: false,
            },
            ..WorkerParams::default()
        });
        worker.want(at(0));
        worker.start(LeaseId(1), at(10));
        assert_eq!(worker.answered(7, at(100)), Some(Duration::from_millis(90)));
        worker
    }

    fn exit(worker: &mut Worker) -> AfterExit {
        worker.exited(false, "SIGTERM", at(5000)).unwrap().1
    }

    #[test]
    fn what_follows_an_exit_is_decided_by_what_the_stop_was_for() {
        for (cause, next, rest) in [
            (StopCause::Operator, AfterExit::Rests, Some(Rest::Operator)),
            (StopCause::Idle, AfterExit::Sleeps, Some(Rest::Idle)),
            (
                StopCause::Shed,
                AfterExit::Shed {
                    restarts_if_fits: false,
                },
                Some(Rest::Shed),
            ),
            (StopCause::Recycle, AfterExit::Restarts, None),
            (
                StopCause::NotReady,
                AfterExit::Failed {
                    needs_operator: false,
                },
                None,
            ),
        ] {
            let mut worker = ready();
            worker.run_mut().unwrap().stop(cause, at(200));
            assert_eq!(worker.state(), WorkerState::Stopping);
            assert_eq!(
                (exit(&mut worker), worker.rest()),
                (next, rest),
                "{cause:?}"
            );
            let failed = cause == StopCause::NotReady;
            assert_eq!(worker.retry_at(), failed.then_some(at(5500)), "{cause:?}");
            assert!(worker.exited(false, "again", at(5001)).is_none());
        }
    }

    #[test]
    fn an_operators_last_word_counts_while_a_worker_stops() {
        let mut worker = ready();
        assert_eq!(
            worker.command(WorkerCommand::Stop, at(200)),
            Commanded::Stop(StopReason::Operator)
        );
        worker.run_mut().unwrap().stop(StopCause::Operator, at(200));
        assert_eq!(
            worker.command(WorkerCommand::Start, at(300)),
            Commanded::Nothing
        );
        assert_eq!(exit(&mut worker), AfterExit::Restarts);
    }

    #[test]
    fn what_is_due_is_taken_once() {
        let mut worker = ready();
        let resizing = Resizing {
            variant: "small".to_owned(),
            tickets: Vec::new(),
            asked_at: at(200),
            to_shed: true,
        };
        worker.run_mut().unwrap().change(resizing.clone());
        assert_eq!(worker.stays(Bytes::from_mib(100)), Bytes::from_mib(40));
        assert!(worker.changed("small", false, at(300)).is_some());
        assert_eq!(worker.take_due(at(60_300)), None);
        worker.run_mut().unwrap().change(resizing);
        assert_eq!(worker.take_due(at(60_199)), None);
        assert!(matches!(
            worker.take_due(at(60_200)),
            Some(Some(StopReason::NotChanged { .. }))
        ));
        worker
            .run_mut()
            .unwrap()
            .stop(StopCause::NotReady, at(60_200));
        assert_eq!(
            worker.take_due(at(63_200)),
            Some(Some(StopReason::NotStopped))
        );
        assert!(worker.take_due(at(63_200)).is_none());
    }

    #[test]
    fn a_worker_that_is_wanted_at_once_each_time_is_stopped_less_and_less_often() {
        let mut worker = ready();
        assert_eq!(worker.not_worth_stopping_until(), None);
        let mut now = at(1000);
        for returns in 0..8u32 {
            worker.run_mut().unwrap().stop(StopCause::Shed, now);
            worker.exited(true, "SIGTERM", now).unwrap();
            now = now + Duration::from_secs(2);
            worker.want(now);
            worker.start(LeaseId(2), now);
            worker.answered(8, now);
            let spared = Duration::from_secs(10) * (1 << returns.min(5));
            assert_eq!(
                worker.not_worth_stopping_until(),
                Some(now + spared),
                "{returns}"
            );
        }
        // One without a request for a while is worth stopping.
        worker.run_mut().unwrap().stop(StopCause::Shed, now);
        worker.exited(true, "SIGTERM", now).unwrap();
        now = now + Duration::from_secs(61);
        worker.want(now);
        worker.start(LeaseId(3), now);
        worker.answered(9, now);
        assert_eq!(worker.not_worth_stopping_until(), None);
    }
}
