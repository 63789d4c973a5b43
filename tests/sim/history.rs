//! One history: faults, then calm, with the checkers throughout.

use std::{collections::BTreeMap, fmt::Write, sync::Arc, time::Duration};

use cotenant::{
    policy::{
        Arbiter,
        arbiter::Checkpoint,
        event::{Action, Answer, EngineApplied, Event},
        lease::LeaseKind,
        pressure::PressureLevel,
        reason::PlanReason,
        residency::EnginePlan,
        snapshot::{EngineState, EngineView, Rest, Snapshot, WorkerState, WorkerView},
    },
    rpc::target::Verdict,
    units::Timestamp,
};

use crate::{
    checkers::{self, Checker, Step, Tickets},
    faults::Faults,
    planted::Planted,
    world::World,
};

/// Counts of a history.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) steps: u64,
    pub(crate) grants: u64,
    pub(crate) denials: u64,
    pub(crate) sheds: u64,
    pub(crate) regrowths: u64,
    pub(crate) larger_chunks: u64,
    /// Chunks that stayed although a smaller one was requested, and were then replaced.
    pub(crate) chunks_kept: u64,
    pub(crate) chunks_ended: u64,
    pub(crate) ended_leases: u64,
    pub(crate) worker_starts: u64,
    pub(crate) level_changes: u64,
    pub(crate) restarts: u64,
    /// Verdicts on replies to targets.
    pub(crate) verdicts: BTreeMap<Verdict, u64>,
    /// Steps with each kind of fault.
    pub(crate) faults: Vec<u64>,
    pub(crate) transcript: String,
}

impl Outcome {
    pub(crate) fn add(&mut self, other: &Self) {
        self.steps += other.steps;
        self.grants += other.grants;
        self.denials += other.denials;
        self.sheds += other.sheds;
        self.regrowths += other.regrowths;
        self.larger_chunks += other.larger_chunks;
        self.chunks_kept += other.chunks_kept;
        self.chunks_ended += other.chunks_ended;
        self.ended_leases += other.ended_leases;
        self.worker_starts += other.worker_starts;
        self.level_changes += other.level_changes;
        self.restarts += other.restarts;
        for (verdict, more) in &other.verdicts {
            *self.verdicts.entry(*verdict).or_default() += more;
        }
        self.faults.resize(Faults::KINDS.len(), 0);
        for (sum, more) in self.faults.iter_mut().zip(&other.faults) {
            *sum += more;
        }
    }

    fn count(&mut self, before: &EngineView, event: &Event, actions: &[Action]) {
        self.steps += 1;
        if let Event::EngineApplied(EngineApplied { in_force, .. }) = event {
            let chunk = |plan: &Option<EnginePlan>| plan.as_ref().map(|plan| plan.prefill_chunk);
            let kept = chunk(&before.asked).is_some_and(|asked| asked < in_force.prefill_chunk);
            let ended = before.asked.is_none()
                && chunk(&before.in_force).is_some_and(|was| was > in_force.prefill_chunk);
            self.chunks_kept += u64::from(kept);
            self.chunks_ended += u64::from(ended);
        }
        for action in actions {
            match action {
                Action::Answer {
                    answer: Answer::Lease { .. },
                    ..
                } => self.grants += 1,
                Action::Answer {
                    answer: Answer::Denied { .. },
                    ..
                } => self.denials += 1,
                Action::ApplyPlan {
                    reason: PlanReason::Regrowth { .. },
                    ..
                } => self.regrowths += 1,
                Action::ApplyPlan {
                    reason: PlanReason::Chunk { .. },
                    ..
                } => self.larger_chunks += 1,
                Action::ApplyPlan { .. } | Action::SetTarget { .. } => self.sheds += 1,
                Action::EndLease { .. } => self.ended_leases += 1,
                Action::StartWorker { .. } => self.worker_starts += 1,
                Action::LevelChanged(_) => self.level_changes += 1,
                _ => {}
            }
        }
    }
}

/// Length of a history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Length {
    /// Many steps with faults, and then calm to the end of [`SETTLE`].
    Long,
    /// A few dozen steps with faults, and then calm until everything has settled, within [`SETTLE`].
    Short,
}

/// Events with faults in a long history.
const STORMY_STEPS: u64 = 1500;
/// Least calm at the end of a short history, so that replies to pending requests arrive.
const REST: Duration = Duration::from_secs(1);
/// Time in which everything must have settled after the faults: the longest wait of a request (6 s), terms (5 s),
/// backoffs (30 s), dwell (4 s) and an operator's round (45 s), in succession.
const SETTLE: Duration = Duration::from_secs(150);

struct History {
    world: World,
    checkers: Vec<Box<dyn Checker>>,
    tickets: Tickets,
    before: Arc<Snapshot>,
    outcome: Outcome,
    record: bool,
    /// The last steps, for the report.
    tail: Vec<String>,
}

/// Runs the history of a seed.
pub(crate) fn run(
    seed: u64,
    length: Length,
    planted: Option<Planted>,
    record: bool,
) -> Result<Outcome, String> {
    let world = World::new(seed, planted);
    let mut history = History {
        before: world.arbiter.snapshot(),
        world,
        checkers: checkers::all(),
        tickets: Tickets::default(),
        outcome: Outcome::default(),
        record,
        tail: Vec::new(),
    };
    history.live(seed, length).map_err(|violation| {
        let device = &history.world.device.params;
        format!(
            "{violation}\nseed {seed}, step {}, at {}, faults {:?}, budget {:?}, pressure {:?}\nlast steps:\n{}",
            history.outcome.steps,
            history.world.now,
            history.world.faults,
            device.budget,
            device.pressure,
            history.tail.join("\n")
        )
    })?;
    history.outcome.restarts = history.world.restarts;
    history.outcome.verdicts = history.world.verdicts.clone();
    Ok(history.outcome)
}

impl History {
    fn live(&mut self, seed: u64, length: Length) -> Result<(), String> {
        let stormy = match length {
            Length::Long => STORMY_STEPS,
            Length::Short => 8 + seed % 57,
        };
        while self.outcome.steps < stormy {
            self.step()?;
        }
        self.outcome.faults = self
            .world
            .faults
            .existing()
            .into_iter()
            .map(|exists| if exists { stormy } else { 0 })
            .collect();
        self.world.calm_down();
        let begun = self.world.now;
        let mut changes = None;
        while self.world.now < begun + SETTLE {
            self.step()?;
            let now = (
                self.outcome.sheds,
                self.outcome.regrowths,
                self.outcome.level_changes,
            );
            if length == Length::Short
                && self.world.now >= begun + REST
                && self.has_settled().is_ok()
            {
                return Ok(());
            }
            if self.world.now >= begun + SETTLE / 3 * 2 && *changes.get_or_insert(now) != now {
                return Err(format!(
                    "oscillates: {:?} after the faults something still shrinks, grows or changes its level",
                    self.world.now.saturating_since(begun)
                ));
            }
        }
        self.has_settled()
    }

    fn step(&mut self) -> Result<(), String> {
        let event = self.world.next_event();
        let reported = self.world.reported_time(&event);
        let busy = self.world.busy();
        let actions = self.world.arbiter.handle(reported, event.clone());
        let after = self.world.arbiter.snapshot();
        let now = after.at;
        self.outcome.count(&self.before.engine, &event, &actions);
        self.remember(now, &event, &actions);
        let honest_use = self.world.honest_use();
        let word_use = self.world.word_use();
        let keeping = self.world.keeping();
        let params = &self.world.device.params;
        let step = Step {
            now,
            jumped: self.world.jumped_at == self.world.now,
            event: &event,
            actions: &actions,
            before: &self.before,
            after: &after,
            params,
            honest_use: &honest_use,
            word_use: &word_use,
            keeping: &keeping,
            busy: &busy,
            engine: &self.world.engine,
            used_most: &self.world.used_most,
        };
        for checker in &mut self.checkers {
            let reported = |violation| format!("{violation}\nat {now} {event:?}\n  {actions:?}");
            checker.check(&step).map_err(reported)?;
        }
        self.tickets.check(&step)?;
        self.world.perform(&actions);
        self.before = after;
        Ok(())
    }

    fn remember(&mut self, now: Timestamp, event: &Event, actions: &[Action]) {
        let samples = matches!(event, Event::Sampled(_) | Event::Measured { .. });
        if self.record {
            writeln!(self.outcome.transcript, "{now} {event:?} {actions:?}").unwrap();
        }
        if !samples || actions.len() > 1 {
            if self.tail.len() > 60 {
                self.tail.remove(0);
            }
            self.tail
                .push(format!("  {now} {event:?}\n      {actions:?}"));
        }
    }

    /// Whether no trace of the faults is left.
    fn has_settled(&self) -> Result<(), String> {
        let snapshot = &self.before;
        let open = self.tickets.open();
        if !open.is_empty() {
            return Err(format!("not settled: {open:?} still wait"));
        }
        if snapshot.pressure.level != PressureLevel::Normal {
            return Err(format!(
                "not settled: pressure is {}",
                snapshot.pressure.level
            ));
        }
        // A request that can never be satisfied continues to wait, and keeps no other holder small.
        let hopeless = self.world.device.hopeless.as_deref();
        let awaits = |worker: &WorkerView| {
            Some(worker.name.as_str()) == hopeless && worker.state == WorkerState::AwaitingMemory
        };
        let waiting = usize::from(snapshot.workers.iter().any(awaits));
        if usize::try_from(snapshot.waiting).unwrap() > waiting {
            return Err(format!(
                "not settled: {} wait in the queue",
                snapshot.waiting
            ));
        }
        if let Some(lease) = snapshot
            .leases
            .iter()
            .find(|lease| lease.kind == LeaseKind::Tenant)
        {
            return Err(format!("not settled: {lease:?}"));
        }
        if let Some(worker) = snapshot
            .workers
            .iter()
            .filter(|worker| worker.rest != Some(Rest::Idle))
            .find(|worker| worker.state != WorkerState::Ready && !awaits(worker))
        {
            return Err(format!("not settled: {worker:?}"));
        }
        if self.world.device.shape.is_some() {
            if snapshot.engine.state != EngineState::Ready {
                return Err(format!(
                    "not settled: the engine is {:?}",
                    snapshot.engine.state
                ));
            }
            if snapshot.engine.in_force != snapshot.engine.full {
                return Err(format!(
                    "not settled: the engine is at {:?} and not at {:?}; free {}, headroom {:?}",
                    snapshot.engine.in_force,
                    snapshot.engine.full,
                    snapshot.memory.free,
                    snapshot.pressure.headroom
                ));
            }
        }
        if snapshot.memory.unaccounted.whole_mib() > 0 {
            return Err(format!(
                "not settled: {} are unaccounted",
                snapshot.memory.unaccounted
            ));
        }
        Ok(())
    }
}

/// Resumes repeatedly from a checkpoint written and read as text, in parallel with an uninterrupted run.
pub(crate) fn resume(seed: u64) {
    let mut world = World::new(seed, None);
    let mut again: Option<Arbiter> = None;
    for step in 0..500 {
        // At every 7th step, so that checkpoints cover every phase of leases, plans and starts.
        if step % 7 == 0 {
            let taken = world.arbiter.checkpoint();
            let text = serde_json::to_string(&taken).unwrap();
            let read: Checkpoint = serde_json::from_str(&text).unwrap();
            assert_eq!(read, taken, "seed {seed} at step {step}");
            again = Some(read.resume().unwrap());
        }
        let event = world.next_event();
        let actions = world.arbiter.handle(world.now, event.clone());
        let again = again.as_mut().unwrap();
        assert_eq!(
            again.handle(world.now, event),
            actions,
            "seed {seed} at step {step}"
        );
        assert_eq!(again.next_deadline(), world.arbiter.next_deadline());
        world.perform(&actions);
    }
    assert_eq!(Checkpoint::of(&again.unwrap()), world.arbiter.checkpoint());
}

/// Writes the events and actions of a history as JSON lines, reads them back, and compares the arbiter's decisions.
pub(crate) fn replay(seed: u64) {
    let mut world = World::new(seed, None);
    let mut lines = Vec::new();
    for _ in 0..500 {
        let event = world.next_event();
        let actions = world.arbiter.handle(world.now, event.clone());
        lines.push((
            world.now,
            serde_json::to_string(&event).unwrap(),
            serde_json::to_string(&actions).unwrap(),
        ));
        world.perform(&actions);
    }
    let mut arbiter = Arbiter::new(world.device.params.clone()).unwrap();
    for (now, event, actions) in lines {
        let event: Event = serde_json::from_str(&event).unwrap();
        let expected: Vec<Action> = serde_json::from_str(&actions).unwrap();
        let again = arbiter.handle(now, event);
        assert_eq!(again, expected, "seed {seed} at {now}");
        assert_eq!(
            serde_json::to_string(&again).unwrap(),
            actions,
            "byte for byte"
        );
    }
    assert_eq!(arbiter.snapshot(), *world.arbiter.snapshot());
}
