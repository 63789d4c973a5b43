//! Tests of settings that change while the supervisor runs.

use super::{revoke::applied, *};
use crate::{
    decision::MemoryDecision,
    event::ChangedKeys,
    params::MachineMemory,
    snapshot::{EngineState, WorkerState},
};

fn reconfigure(rig: &mut Rig, params: Params) -> Answer {
    let ticket = rig.ticket();
    let changes = ChangedKeys {
        applied: vec!["budget.dwell".to_owned()],
        restart: vec!["llm.path".to_owned()],
    };
    rig.tell(Event::Reconfigured {
        ticket,
        params: Box::new(params),
        changes,
        by: None,
    });
    rig.answer()
}

#[test]
fn a_smaller_budget_is_refused_below_what_is_held_and_in_force_above_it() {
    let mut rig = Rig::new(params());
    rig.sample(0);
    rig.request("camera", Class::Batch, 100, 100, 0);
    let smaller = |total| {
        let mut params = Params::for_budget(mib(total), Bytes::ZERO, Scope::Session);
        params.shed.minimum_reclaim = mib(8);
        params.pressure.hysteresis = mib(1);
        params
    };
    let before = rig.arbiter.params().clone();
    let denied = reconfigure(&mut rig, smaller(99));
    assert!(
        matches!(&denied, Answer::Denied { denial: Denial::Invalid { field, problem, .. }, .. }
            if field == "budget" && *problem == Problem::Text("is below the 100 MiB that is held; shed the LLM or stop workers first, or restart".to_owned())),
        "{denied:?}"
    );
    assert_eq!(rig.arbiter.params(), &before);
    let done = reconfigure(&mut rig, smaller(200));
    assert!(
        matches!(done, Answer::Done { done: Done::Reconfigured(changes) } if changes.restart == ["llm.path"])
    );
    assert_eq!(
        (rig.snapshot().memory.budget, rig.snapshot().memory.free),
        (mib(200), mib(100))
    );
    rig.wait(10).sample(100);
    rig.request("late", Class::Batch, 101, 101, 0);
    assert!(matches!(rig.denial(), Denial::InsufficientMemory { free, .. } if free == mib(100)));
}

#[test]
fn settings_that_cannot_be_change_nothing() {
    let mut rig = Rig::new(params());
    let before = rig.arbiter.params().clone();
    let mut wrong = params();
    wrong.pressure.critical_below = wrong.pressure.elevated_below;
    assert!(matches!(
        reconfigure(&mut rig, wrong),
        Answer::Denied { .. }
    ));
    assert_eq!(rig.arbiter.params(), &before);
}

#[test]
fn the_engine_the_scope_and_what_was_learned_stay() {
    let mut rig = Rig::with_engine_ready(params());
    let before = rig.arbiter.params().clone();
    let mut other = params();
    other.budget.scope = Scope::Machine;
    other.pressure.dwell = ms(7);
    reconfigure(&mut rig, other);
    let now = rig.arbiter.params();
    assert_eq!(
        (&now.engine, now.budget.scope),
        (&before.engine, before.budget.scope)
    );
    assert_eq!(now.pressure.dwell, ms(7));
}

#[test]
fn a_worker_goes_on_with_its_settings_until_it_is_started_again() {
    let mut settings = params();
    settings.workers = vec![worker("asr", 100)];
    let mut rig = Rig::new(settings.clone());
    rig.sample(0);
    rig.wait(10).tell(Event::WorkerReady {
        worker: "asr".to_owned(),
        pid: 7,
    });
    settings.workers = vec![worker("asr", 150)];
    reconfigure(&mut rig, settings);
    assert_eq!(rig.held("asr"), mib(100));
    let ticket = rig.ticket();
    rig.tell(Event::OperatorWorker {
        ticket,
        worker: "asr".to_owned(),
        command: WorkerCommand::Recycle,
        by: None,
    });
    rig.wait(10).sample(0);
    rig.tell(Event::WorkerExited {
        worker: "asr".to_owned(),
        intended: true,
        cause: "exit code 0".to_owned(),
    });
    assert_eq!(
        rig.worker("asr").state,
        WorkerState::Starting,
        "{:#?}",
        rig.actions
    );
    assert_eq!(rig.held("asr"), mib(150));
}

/// A shorter setting may move a future deadline into the past; it is served at once, and breaks no invariant.
#[test]
fn shorter_times_serve_what_has_become_due() {
    let mut slow = params();
    slow.shed.verify_timeout = Duration::from_secs(600);
    slow.pressure.dwell = Duration::from_secs(3600);
    slow.shed.settle = Duration::from_secs(60);
    for wait in [1, 50, 500, 5000, 100_000] {
        let mut rig = Rig::with_engine_ready(slow.clone());
        rig.request("camera", Class::Interactive, 100, 100, 9000);
        let lease = rig.granted();
        rig.tell(Event::LeaseReleased(LeaseCall {
            ticket: Ticket(77),
            lease: lease.id,
            generation: lease.generation,
            peer: peer(1000),
        }));
        rig.tell(Event::OperatorShed {
            ticket: Ticket(78),
            bytes: mib(20),
            by: None,
        });
        rig.pass(wait);
        reconfigure(&mut rig, params());
        rig.pass(10_000);
    }
}

/// Returns the resize of a machine to `total` MiB by the limit of a control group.
fn within(total: u64) -> Event {
    let machine = MachineMemory {
        total: mib(total),
        limited_by: Some("/box".to_owned()),
    };
    let mut params = Params::for_budget(mib(total), Bytes::ZERO, Scope::Session);
    params.pressure.dwell = ms(2000);
    params.shed.minimum_reclaim = mib(20).min(mib(total / 4));
    Event::Resized {
        machine,
        params: Ok(Box::new(params)),
    }
}

#[test]
fn a_limit_that_is_lowered_makes_holders_come_within_the_budget_that_follows_from_it() {
    let mut rig = Rig::with_engine_ready(params());
    let full = rig.held("llm");
    rig.request("camera", Class::Batch, 40, 100, 0);
    assert_eq!(rig.granted().memory.held, mib(100));
    let budget = (full + mib(60)).get() >> 20;
    rig.wait(10).tell(within(budget));
    assert_eq!(rig.snapshot().memory.budget, mib(budget));
    assert_eq!(
        rig.snapshot().pressure.machine.limited_by.as_deref(),
        Some("/box")
    );
    // More is held than the budget: nothing is free, and lower classes are reclaimed.
    assert_eq!(rig.snapshot().memory.free, Bytes::ZERO);
    let asked = |rig: &Rig| {
        rig.actions
            .iter()
            .any(|action| matches!(action, Action::SetTarget { .. } | Action::ApplyPlan { .. }))
    };
    assert!(asked(&rig), "{:#?}", rig.actions);
    let orders = rig.actions.clone();
    rig.request("late", Class::Batch, 1, 1, 0);
    assert!(
        matches!(rig.denial(), Denial::InsufficientMemory { budget: now, .. } if now == mib(budget))
    );
    // A target is not repeated before its time.
    rig.wait(1).tell(Event::DeadlineReached);
    assert!(!asked(&rig), "{:#?}", rig.actions);
    rig.actions = orders;
    for _ in 0..10 {
        let target = rig.actions.iter().find_map(|action| match action {
            Action::SetTarget {
                lease,
                nonce,
                bytes,
                ..
            } => Some((*lease, *nonce, *bytes)),
            _ => None,
        });
        if rig.plan_asked().is_some() {
            rig.engine_applies();
        }
        if let Some((lease, nonce, bytes)) = target {
            rig.wait(10).tell(applied(lease, nonce));
            rig.wait(10).measure("camera", bytes.get() >> 20);
        }
        if rig.snapshot().memory.held <= mib(budget) {
            break;
        }
        rig.wait(300).tell(Event::DeadlineReached);
    }
    assert!(
        rig.snapshot().memory.held <= mib(budget),
        "{:#?}",
        rig.snapshot().memory
    );
    // The limit is raised again.
    rig.wait(10).tell(within(400));
    assert_eq!(rig.snapshot().memory.budget, mib(400));
}

#[test]
fn a_limit_below_the_floor_or_below_the_reserve_is_named_and_what_runs_stays() {
    let mut rig = Rig::with_engine_ready(params());
    rig.wait(10).tell(within(20));
    assert!(
        decided!(rig, Memory(MemoryDecision::TooSmall { reason, machine, .. })
            if reason.contains("floor of 28 MiB") && machine.limited_by.as_deref() == Some("/box")),
        "{:#?}",
        rig.actions
    );
    for _ in 0..4 {
        if rig.plan_asked().is_some() {
            rig.engine_applies();
        }
        rig.wait(300).tell(Event::DeadlineReached);
    }
    assert_eq!(rig.held("llm"), mib(28), "it keeps its floor");
    // No valid settings result: those in force stay.
    let machine = MachineMemory::of(mib(1));
    let reason = "budget.reserve: leaves nothing".to_owned();
    rig.wait(10).tell(Event::Resized {
        machine,
        params: Err(reason.clone()),
    });
    assert!(
        decided!(rig, Memory(MemoryDecision::TooSmall { reason: said, .. }) if *said == reason)
    );
    assert_eq!(rig.snapshot().memory.budget, mib(20));
}

#[test]
fn a_model_that_was_too_large_is_read_again_when_the_limit_is_raised() {
    let mut rig = Rig::new(with_engine(Params { ..params() }));
    rig.sample(0);
    rig.tell(within(100));
    rig.tell(Event::EngineInspected {
        shape: ModelShape {
            fixed_bytes: mib(200),
            ..shape()
        },
    });
    assert_eq!(rig.snapshot().engine.state, EngineState::Failed);
    rig.tell(within(120));
    assert!(!rig.actions.contains(&Action::InspectModel));
    rig.tell(within(400));
    assert!(
        rig.actions.contains(&Action::InspectModel),
        "{:#?}",
        rig.actions
    );
}
