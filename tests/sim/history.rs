//! One history: faults, then calm, and the checkers all the way.

use std::{fmt::Write, time::Duration};

use cotenant::{
    policy::{
        Arbiter,
        arbiter::Checkpoint,
        event::{Action, Answer, Event},
        lease::LeaseKind,
        params::Planted,
        pressure::PressureLevel,
        snapshot::{EngineState, Snapshot, WorkerState},
    },
    units::Timestamp,
};

use crate::{
    checkers::{self, Checker, Step, Tickets},
    world::World,
};

/// What a history did.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) steps: u64,
    pub(crate) grants: u64,
    pub(crate) denials: u64,
    pub(crate) sheds: u64,
    pub(crate) regrowths: u64,
    pub(crate) ended_leases: u64,
    pub(crate) worker_starts: u64,
    pub(crate) level_changes: u64,
    pub(crate) transcript: String,
}

impl Outcome {
    pub(crate) fn add(&mut self, other: &Self) {
        self.steps += other.steps;
        self.grants += other.grants;
        self.denials += other.denials;
        self.sheds += other.sheds;
        self.regrowths += other.regrowths;
        self.ended_leases += other.ended_leases;
        self.worker_starts += other.worker_starts;
        self.level_changes += other.level_changes;
    }

    fn count(&mut self, actions: &[Action]) {
        self.steps += 1;
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
                Action::ApplyPlan { reason, .. } if reason.starts_with("growing") => self.regrowths += 1,
                Action::ApplyPlan { .. } | Action::SetTarget { .. } => self.sheds += 1,
                Action::EndLease { .. } => self.ended_leases += 1,
                Action::StartWorker { .. } => self.worker_starts += 1,
                Action::LevelChanged { .. } => self.level_changes += 1,
                _ => {}
            }
        }
    }
}

/// Events with faults in one history.
const STORMY_STEPS: u64 = 1500;
/// Time in which everything must have settled once the faults are over: the longest wait of a request (6 s), terms (5 s),
/// backoffs (30 s), dwell (4 s) and an operator's round (45 s), one after the other.
const SETTLE: Duration = Duration::from_secs(150);

struct History {
    world: World,
    checkers: Vec<Box<dyn Checker>>,
    tickets: Tickets,
    before: Snapshot,
    outcome: Outcome,
    record: bool,
    /// The last steps, for the report.
    tail: Vec<String>,
}

/// Runs the history of a seed.
pub(crate) fn run(seed: u64, planted: Option<Planted>, record: bool) -> Result<Outcome, String> {
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
    history.live().map_err(|violation| {
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
    Ok(history.outcome)
}

impl History {
    fn live(&mut self) -> Result<(), String> {
        while self.outcome.steps < STORMY_STEPS {
            self.step()?;
        }
        self.world.calm_down();
        let end = self.world.now + SETTLE;
        while self.world.now < end {
            self.step()?;
        }
        self.has_settled()
    }

    fn step(&mut self) -> Result<(), String> {
        let event = self.world.next_event();
        let now = self.world.now;
        let busy = self.world.busy();
        let actions = self.world.arbiter.handle(now, event.clone());
        let after = self.world.arbiter.snapshot();
        self.outcome.count(&actions);
        self.remember(now, &event, &actions);
        let honest_use = self.world.honest_use();
        let params = &self.world.device.params;
        let step = Step {
            now,
            event: &event,
            actions: &actions,
            before: &self.before,
            after: &after,
            params,
            honest_use: &honest_use,
            busy: &busy,
        };
        for checker in &mut self.checkers {
            checker.check(&step)?;
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
            self.tail.push(format!("  {now} {event:?}\n      {actions:?}"));
        }
    }

    /// Everything is as if nothing had been.
    fn has_settled(&self) -> Result<(), String> {
        let snapshot = &self.before;
        let open = self.tickets.open();
        if !open.is_empty() {
            return Err(format!("not settled: {open:?} still wait"));
        }
        if snapshot.level != PressureLevel::Normal {
            return Err(format!("not settled: pressure is {}", snapshot.level));
        }
        if snapshot.waiting > 0 {
            return Err(format!("not settled: {} wait in the queue", snapshot.waiting));
        }
        if let Some(lease) = snapshot.leases.iter().find(|lease| lease.kind == LeaseKind::Tenant) {
            return Err(format!("not settled: {lease:?}"));
        }
        if let Some(worker) = snapshot
            .workers
            .iter()
            .find(|worker| worker.state != WorkerState::Ready)
        {
            return Err(format!("not settled: {worker:?}"));
        }
        if self.world.device.shape.is_some() {
            if snapshot.engine.state != EngineState::Ready {
                return Err(format!("not settled: the engine is {:?}", snapshot.engine.state));
            }
            if snapshot.engine.in_force != snapshot.engine.full {
                return Err(format!(
                    "not settled: the engine is at {:?} and not at {:?}; free {}, headroom {:?}",
                    snapshot.engine.in_force, snapshot.engine.full, snapshot.free, snapshot.headroom
                ));
            }
        }
        if snapshot.unaccounted.whole_mib() > 0 {
            return Err(format!("not settled: {} are unaccounted", snapshot.unaccounted));
        }
        Ok(())
    }
}

/// Goes on from a checkpoint that was written as text and read back, again and again, beside the one that just goes on.
pub(crate) fn resume(seed: u64) {
    let mut world = World::new(seed, None);
    let mut again: Option<Arbiter> = None;
    for step in 0..500 {
        // At every 7th step, so that checkpoints fall into every phase of leases, plans and starts.
        if step % 7 == 0 {
            let taken = world.arbiter.checkpoint();
            let text = serde_json::to_string(&taken).unwrap();
            let read: Checkpoint = serde_json::from_str(&text).unwrap();
            assert_eq!(read, taken, "seed {seed} at step {step}");
            again = Some(Arbiter::from_checkpoint(read).unwrap());
        }
        let event = world.next_event();
        let actions = world.arbiter.handle(world.now, event.clone());
        let again = again.as_mut().unwrap();
        assert_eq!(again.handle(world.now, event), actions, "seed {seed} at step {step}");
        assert_eq!(again.next_deadline(), world.arbiter.next_deadline());
        world.perform(&actions);
    }
    assert_eq!(again.unwrap().checkpoint(), world.arbiter.checkpoint());
}

/// Writes the events and actions of a history as JSON lines, reads them back, and compares what the arbiter does.
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
        assert_eq!(serde_json::to_string(&again).unwrap(), actions, "byte for byte");
    }
    assert_eq!(arbiter.snapshot(), world.arbiter.snapshot());
}
