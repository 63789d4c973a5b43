//! Tests of the engine: its load, its plans, its failures.

use super::*;
use crate::policy::{
    decision::{EngineDecision, NextLoad, PlanOutcome},
    engine_control::KvUse,
    pressure::PressureLevel,
    reason::PlanReason,
    residency::FloorError,
    snapshot::EngineState,
};

#[test]
fn the_engine_waits_for_a_sample_and_is_loaded_in_full_when_memory_is_plentiful() {
    let mut desk = Desk::new(with_engine(params()));
    desk.tell(Event::EngineInspected { shape: shape() });
    assert_eq!(desk.plan_asked(), None);
    desk.sample(0);
    let (_, plan) = desk.plan_asked().unwrap();
    assert_eq!((plan.resident.len(), plan.kv_capacity), (8, Tokens::new(4096)));
    assert_eq!(desk.held("llm"), mib(132), "booked before it is loaded");
    desk.engine_applies();
    assert_eq!(desk.snapshot().engine.state, EngineState::Ready);
}

#[test]
fn pressure_sheds_verifies_and_grows_back_after_the_dwell() {
    let mut desk = Desk::with_engine_ready(params());
    assert!(
        desk.samples(132)
            .iter()
            .all(|action| !matches!(action, Action::ApplyPlan { .. }))
    );
    desk.samples(390);
    assert_eq!(desk.snapshot().level, PressureLevel::Critical);
    let (revision, plan) = desk.plan_asked().unwrap();
    assert_eq!(desk.held("llm"), mib(132), "asking frees nothing");
    desk.wait(5);
    let used = desk.engine_applies_plan(revision, plan);
    assert_eq!(desk.held("llm"), used);
    assert!(used <= mib(132 - 62), "52 + 20 − 10 were missing: {used}");
    let shed = |outcome: &PlanOutcome| matches!(outcome, PlanOutcome::Shed { .. });
    assert!(decided!(desk, Engine(EngineDecision::Applied { outcome, .. }) if shed(outcome)));
    desk.measure("llm", used.whole_mib());
    // The neighbour goes away.
    for _ in 0..40 {
        desk.wait(100).sample(used.whole_mib());
    }
    assert_eq!(desk.snapshot().level, PressureLevel::Normal);
    desk.wait(100).sample(used.whole_mib());
    let grown = desk.snapshot();
    assert_eq!(grown.engine.asked, grown.engine.full, "asked to grow back");
    assert_eq!(grown.sheds, 1);
}

#[test]
fn at_elevated_the_engine_keeps_its_layers_until_critical_is_ahead() {
    let mut desk = Desk::with_engine_ready(params());
    desk.measure("llm", 132);
    // The neighbour comes up slowly, and stays between the watermarks: 35 to 45 MiB are left.
    for used in [300, 320, 335, 345, 348, 350, 352, 354, 355, 355, 355, 355] {
        desk.wait(1000).sample(used);
        desk.measure("llm", 132);
    }
    assert_eq!(desk.snapshot().level, PressureLevel::Elevated);
    let kept = desk.snapshot().engine.asked.unwrap();
    assert_eq!(kept.resident.len(), 8, "no token becomes slower");
    // It goes on, and Critical is ahead.
    desk.samples(385);
    let asked = desk.snapshot().engine.asked.unwrap();
    assert!(asked.resident.len() < 8, "{asked:?}");
}

#[test]
fn a_capacity_in_use_is_kept_and_not_asked_back_at_once() {
    let mut desk = Desk::with_engine_ready(params());
    desk.tell(activity(
        1,
        KvUse {
            used: Tokens::new(3000),
            ..KvUse::default()
        },
    ));
    desk.samples(399);
    let (_, plan) = desk.plan_asked().unwrap();
    // 71 MiB are needed: 7 layers less the ring are 66, and 5 of the 8.5 MiB that the sequence does not use.
    assert_eq!((plan.resident.len(), plan.kv_capacity), (1, Tokens::new(3456)));
}

#[test]
fn an_engine_that_does_not_answer_is_asked_again() {
    let mut desk = Desk::with_engine_ready(params());
    desk.samples(390);
    let (first, plan) = desk.plan_asked().unwrap();
    desk.pass(2500);
    let (second, again) = desk.plan_asked().unwrap();
    assert!(second > first);
    assert_eq!(plan, again);
    assert!(decided!(desk, Engine(EngineDecision::Unanswered { .. })));
    assert_eq!(desk.held("llm"), mib(132));
}

#[test]
fn a_failed_engine_comes_back_after_its_backoff_and_its_floor_is_kept_for_it() {
    let mut desk = Desk::with_engine_ready(params());
    desk.engine_fails(None);
    assert_eq!(
        (desk.held("llm"), desk.snapshot().engine.state),
        (Bytes::ZERO, EngineState::Failed)
    );
    desk.request("voice", Class::AudioRealtime, 1, 400, 0);
    assert_eq!(desk.granted().held, mib(400 - 28), "the floor is kept");
    desk.wait(600).sample(0);
    let (_, plan) = desk.plan_asked().unwrap();
    assert_eq!(shape().plan_bytes(&plan), mib(28));
}

#[test]
fn what_reads_keep_of_an_engine_on_a_disk_that_hangs_is_on_the_book_until_it_answers() {
    let mut desk = Desk::with_engine_ready(params());
    let free = desk.snapshot().free;
    let held = desk.held("llm");
    desk.engine_fails(Some(mib(20)));
    let snapshot = desk.snapshot();
    assert_eq!(
        (desk.held("llm"), snapshot.engine.state),
        (Bytes::ZERO, EngineState::Failed)
    );
    assert_eq!(snapshot.free, free + held - mib(20), "it cannot be granted");
    let hangs = NextLoad::WaitsForDisk { left: mib(20) };
    assert!(decided!(desk, Engine(EngineDecision::Gone { next, .. }) if *next == hangs));
    // Loading it again at once would hang as well.
    desk.wait(600).sample(20);
    assert_eq!(desk.plan_asked(), None);
    desk.tell(Event::EngineInspected { shape: shape() });
    assert!(desk.plan_asked().is_some());
    desk.sample(0);
    assert_eq!(desk.snapshot().unaccounted, Bytes::ZERO);
}

#[test]
fn a_disk_that_hangs_with_each_load_is_asked_less_and_less_often() {
    let mut desk = Desk::with_engine_ready(params());
    let longest = params().engine.map_or(ms(30_000), |engine| engine.restart.backoff_max);
    let mut waits = Vec::new();
    for _ in 0..12 {
        desk.engine_fails(Some(mib(20)));
        desk.pass(200);
        let answered = desk.now;
        desk.tell(Event::EngineInspected { shape: shape() });
        desk.sample(0);
        while desk.plan_asked().is_none() {
            assert_eq!(desk.snapshot().engine.state, EngineState::Failed);
            desk.wait(100).sample(0);
        }
        waits.push(desk.now.saturating_since(answered));
    }
    assert!(waits.is_sorted() && waits[0] < ms(1000), "{waits:?}");
    let last = *waits.last().unwrap();
    assert!(last <= longest && last > ms(20_000), "{waits:?}");
    desk.engine_applies();
    assert_eq!(desk.snapshot().engine.state, EngineState::Ready);
}

#[test]
fn a_model_that_cannot_fit_is_explained_once() {
    let mut params = params();
    params.budget.total = mib(90);
    params.pressure = crate::policy::params::PressureParams::scaled_to(mib(90));
    let mut desk = Desk::new(with_engine(params));
    desk.tell(Event::EngineInspected { shape: shape() });
    desk.sample(80);
    assert!(decided!(desk, Engine(EngineDecision::WaitsForMemory { error, .. }) if error.floor == mib(28)));
    desk.wait(1000).sample(80);
    assert!(!decided!(desk, Engine(EngineDecision::WaitsForMemory { .. })));
}

#[test]
fn a_model_whose_floor_exceeds_the_budget_is_refused_and_workers_are_served() {
    let mut params = with_engine(params());
    params.workers = vec![worker("tts", 50)];
    let mut desk = Desk::new(params);
    let large = ModelShape {
        fixed_bytes: mib(500),
        ..shape()
    };
    desk.sample(0);
    assert!(!desk.starts("tts"), "the engine comes first");
    desk.tell(Event::EngineInspected { shape: large });
    assert!(desk.starts("tts"), "{:#?}", desk.actions);
    let refused = EngineDecision::FloorExceedsBudget {
        error: FloorError {
            model: "tiny".to_owned(),
            floor: mib(512),
            resident: crate::units::Layers::new(0),
            layers: crate::units::Layers::new(8),
            kv_tokens: Tokens::new(512),
            available: mib(340),
        },
    };
    assert!(
        desk.decisions()
            .any(|decision| *decision == Decision::Engine(refused.clone()))
    );
    let engine = desk.snapshot().engine;
    let failure = engine.failure.unwrap_or_default();
    assert_eq!(engine.state, EngineState::Failed);
    assert!(failure.contains("its floor is 512 MiB"), "{failure}");
    assert_eq!(desk.snapshot().returning, Bytes::ZERO, "nothing is kept for it");
    // A file that fits is loaded when an operator has it read again.
    desk.load();
    assert!(desk.actions.contains(&Action::InspectModel));
    desk.tell(Event::EngineInspected { shape: shape() });
    assert!(desk.plan_asked().is_some(), "{:#?}", desk.actions);
}

#[test]
fn an_operator_sheds_and_regrows() {
    let mut desk = Desk::with_engine_ready(params());
    desk.operator_shed(mib(40));
    assert_eq!(desk.try_answer(), None);
    desk.engine_applies();
    assert!(matches!(desk.answer(), Answer::Shed(outcome) if outcome.asked == mib(40) && outcome.freed >= mib(40)));
    desk.wait(10).sample(90);
    desk.regrow();
    assert!(matches!(desk.done(), Done::Grows(PlanReason::Regrowth { .. })));
    assert_eq!(desk.engine_applies(), mib(132));
}

#[test]
fn a_shed_that_freed_nothing_is_not_credited() {
    let mut desk = Desk::with_engine_ready(params());
    desk.samples(390);
    let (revision, plan) = desk.plan_asked().unwrap();
    desk.engine_applied(revision, plan, Bytes::ZERO, mib(132));
    assert_eq!(desk.held("llm"), mib(132));
    assert!(decided!(desk, Engine(EngineDecision::Short { .. })));
}

#[test]
fn a_plan_without_an_answer_stays_on_the_book_until_it_is_known_what_is_in_force() {
    let mut desk = Desk::with_engine_ready(params());
    desk.samples(390);
    desk.engine_applies();
    let small = desk.held("llm");
    let ticket = desk.ticket();
    desk.wait(10).sample(60);
    desk.wait(2500).sample(60);
    desk.tell(Event::OperatorRegrow { ticket });
    let _ = desk.pass(2000);
    desk.pass(2000);
    let (revision, _) = desk.plan_asked().unwrap();
    assert!(decided!(desk, Engine(EngineDecision::Unanswered { .. })));
    desk.engine_refuses(revision);
    assert_eq!(desk.held("llm"), mib(132), "the first growth may be in force");
    desk.pass(250);
    let (revision, plan) = desk.plan_asked().unwrap();
    assert_eq!(desk.engine_applies_plan(revision, plan), small);
    assert_eq!(desk.held("llm"), small);
}
