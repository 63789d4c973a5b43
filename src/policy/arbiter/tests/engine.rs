//! Tests of the engine: its load, its plans, its failures.

use super::{kv::untouched, *};
use crate::{
    decision::{EngineDecision, NextLoad, PlanOutcome},
    engine_control::KvUse,
    engine_failure::NextTry,
    pressure::PressureLevel,
    reason::PlanReason,
    residency::FloorError,
    snapshot::EngineState,
};

#[test]
fn the_engine_waits_for_a_sample_and_is_loaded_in_full_when_memory_is_plentiful() {
    let mut rig = Rig::new(with_engine(params()));
    rig.tell(Event::EngineInspected { shape: shape() });
    assert_eq!(rig.plan_asked(), None);
    rig.sample(0);
    let (_, plan) = rig.plan_asked().unwrap();
    assert_eq!(
        (plan.resident.len(), plan.kv_capacity),
        (8, Tokens::new(4096))
    );
    assert_eq!(rig.held("llm"), mib(132), "booked before it is loaded");
    rig.engine_applies();
    assert_eq!(rig.snapshot().engine.state, EngineState::Ready);
}

#[test]
fn pressure_sheds_verifies_and_grows_back_after_the_dwell() {
    let mut rig = Rig::with_engine_ready(params());
    assert!(
        rig.samples(132)
            .iter()
            .all(|action| !matches!(action, Action::ApplyPlan { .. }))
    );
    rig.samples(390);
    assert_eq!(rig.snapshot().pressure.level, PressureLevel::Critical);
    let (revision, plan) = rig.plan_asked().unwrap();
    assert_eq!(rig.held("llm"), mib(132), "asking frees nothing");
    rig.wait(5);
    let used = rig.engine_applies_plan(revision, plan);
    assert_eq!(rig.held("llm"), used);
    assert!(used <= mib(132 - 62), "52 + 20 − 10 were missing: {used}");
    let shed = |outcome: &PlanOutcome| matches!(outcome, PlanOutcome::Shed { .. });
    assert!(decided!(rig, Engine(EngineDecision::Applied { outcome, .. }) if shed(outcome)));
    rig.measure("llm", used.whole_mib());
    // The neighbour ends.
    for _ in 0..40 {
        rig.wait(100).sample(used.whole_mib());
    }
    assert_eq!(rig.snapshot().pressure.level, PressureLevel::Normal);
    rig.wait(100).sample(used.whole_mib());
    let grown = rig.snapshot();
    assert_eq!(grown.engine.asked, grown.engine.full, "asked to grow back");
    assert_eq!(grown.totals.sheds, 1);
}

#[test]
fn at_elevated_the_engine_keeps_its_layers_until_critical_is_ahead() {
    let mut rig = Rig::with_engine_ready(params());
    rig.measure("llm", 132);
    // The neighbour grows slowly, and stays between the watermarks: 35 to 45 MiB are left.
    for used in [300, 320, 335, 345, 348, 350, 352, 354, 355, 355, 355, 355] {
        rig.wait(1000).sample(used);
        rig.measure("llm", 132);
    }
    assert_eq!(rig.snapshot().pressure.level, PressureLevel::Elevated);
    let kept = rig.snapshot().engine.asked.unwrap();
    assert_eq!(kept.resident.len(), 8, "no token becomes slower");
    // It continues to grow towards Critical.
    rig.samples(385);
    let asked = rig.snapshot().engine.asked.unwrap();
    assert!(asked.resident.len() < 8, "{asked:?}");
}

/// Of 48 MiB of layers the staging ring takes 44: giving up all of them frees 4 MiB, and each token then reads them
/// all.
#[test]
fn layers_that_give_almost_nothing_are_kept_until_the_last_resort() {
    let mut rig = Rig::new(with_engine(params()));
    rig.sample(0);
    let shape = ModelShape {
        fixed_bytes: mib(16),
        ring_bytes: mib(44),
        ..sample_shape(12, mib(4))
    };
    rig.tell(Event::EngineInspected { shape });
    let full = rig.engine_applies();
    let mut reserved = mib(28);
    rig.tell(untouched(reserved));
    // Elevated without a slope: untouched KV is given up, which the kernel does not show.
    for _ in 0..6 {
        rig.wait(1000).sample(323);
        if let Some((revision, in_force)) = rig.plan_asked() {
            let given = full - rig.snapshot().engine.shape.unwrap().plan_bytes(&in_force);
            assert_eq!(in_force.resident.len(), 12);
            reserved = reserved.saturating_sub(given);
            rig.tell(Event::EngineApplied(EngineApplied {
                revision,
                in_force,
                freed: Bytes::ZERO,
                used: full - given,
                untouched: reserved,
                untouched_given: given,
                took: ms(1),
            }));
        }
    }
    assert!(reserved < mib(8), "{reserved}");
    // A neighbour takes 8 MiB/s, up to and beyond Critical.
    let mut resident = Vec::new();
    for used in [331, 339, 347, 355, 363, 371, 379, 385, 385, 393, 393] {
        rig.wait(1000).sample(used);
        if rig.plan_asked().is_some() {
            rig.engine_applies();
        }
        let level = rig.snapshot().pressure.level;
        resident.push((
            level,
            rig.snapshot().engine.in_force.unwrap().resident.len(),
        ));
    }
    let kept = [PressureLevel::Elevated, PressureLevel::Critical].map(|level| (level, 12));
    assert!(
        kept.iter().all(|kept| resident.contains(kept)),
        "{resident:?}"
    );
    assert!(
        !resident.contains(&(PressureLevel::Elevated, 0)),
        "{resident:?}"
    );
    assert_eq!(
        resident.last(),
        Some(&(PressureLevel::Critical, 0)),
        "the last resort"
    );
}

#[test]
fn a_capacity_in_use_is_kept_and_not_reclaimed_at_once() {
    let mut rig = Rig::with_engine_ready(params());
    rig.tell(activity(
        1,
        KvUse {
            used: Tokens::new(3000),
            ..KvUse::default()
        },
    ));
    rig.samples(399);
    let (_, plan) = rig.plan_asked().unwrap();
    // 71 MiB are needed: 7 layers less the ring are 66, plus 5 of the 8.5 MiB that the sequence does not use.
    assert_eq!(
        (plan.resident.len(), plan.kv_capacity),
        (1, Tokens::new(3456))
    );
}

#[test]
fn an_engine_that_does_not_answer_is_asked_again() {
    let mut rig = Rig::with_engine_ready(params());
    rig.samples(390);
    let (first, plan) = rig.plan_asked().unwrap();
    rig.pass(2500);
    let (second, again) = rig.plan_asked().unwrap();
    assert!(second > first);
    assert_eq!(plan, again);
    assert!(decided!(rig, Engine(EngineDecision::Unanswered { .. })));
    assert_eq!(rig.held("llm"), mib(132));
}

#[test]
fn a_failed_engine_comes_back_after_its_backoff_and_its_floor_is_kept_for_it() {
    let mut rig = Rig::with_engine_ready(params());
    rig.engine_fails(None);
    assert_eq!(
        (rig.held("llm"), rig.snapshot().engine.state),
        (Bytes::ZERO, EngineState::Failed)
    );
    rig.request("voice", Class::AudioRealtime, 1, 400, 0);
    assert_eq!(
        rig.granted().memory.held,
        mib(400 - 28),
        "the floor is kept"
    );
    rig.wait(600).sample(0);
    let (_, plan) = rig.plan_asked().unwrap();
    assert_eq!(shape().plan_bytes(&plan), mib(28));
}

#[test]
fn a_file_that_cannot_be_read_is_read_again_ever_more_rarely_and_reported_once() {
    let mut rig = Rig::new(with_engine(params()));
    rig.sample(0);
    let fails = |rig: &mut Rig| {
        rig.tell(Event::EngineFailed {
            reason: "cannot read it".to_owned(),
            cure: Cure::Reread,
            left: None,
        });
    };
    fails(&mut rig);
    assert!(decided!(
        rig,
        Engine(EngineDecision::Gone {
            next: NextLoad::ReadIn(_),
            ..
        })
    ));
    let mut waits = Vec::new();
    for _ in 0..12 {
        let failed = rig.now;
        let failure = rig.snapshot().engine.failure.unwrap();
        assert!(
            matches!(failure.next, NextTry::At(at) if at > failed),
            "{failure:?}"
        );
        while !rig.actions.contains(&Action::ReinspectModel) {
            rig.wait(100).sample(0);
        }
        waits.push(rig.now.saturating_since(failed));
        assert_eq!(rig.snapshot().engine.failure.unwrap().next, NextTry::Now);
        fails(&mut rig);
        assert!(
            !decided!(rig, Engine(EngineDecision::Gone { .. })),
            "it is no news"
        );
    }
    let longest = params()
        .engine
        .map_or(ms(30_000), |engine| engine.restart.backoff_max);
    assert!(
        waits.is_sorted() && waits[0] < ms(1000) && *waits.last().unwrap() <= longest + ms(200),
        "{waits:?}"
    );
    rig.tell(Event::EngineInspected { shape: shape() });
    assert!(rig.plan_asked().is_some(), "it is loaded at once");
}

#[test]
fn a_failure_that_only_a_change_cures_is_permanent_until_the_file_is_read_again() {
    let mut rig = Rig::with_engine_ready(params());
    let remedy = "fetch it again".to_owned();
    rig.tell(Event::EngineFailed {
        reason: "it is cut".to_owned(),
        cure: Cure::Change { remedy },
        left: None,
    });
    assert!(decided!(
        rig,
        Engine(EngineDecision::Gone {
            next: NextLoad::NeedsChange,
            ..
        })
    ));
    let failure = rig.snapshot().engine.failure.unwrap();
    assert_eq!(
        (failure.permanent(), failure.to_string().as_str()),
        (Some("fetch it again"), "it is cut (hint: fetch it again)")
    );
    for _ in 0..600 {
        rig.wait(1000).sample(0);
        let inspects =
            |action: &Action| matches!(action, Action::InspectModel | Action::ReinspectModel);
        assert!(!rig.actions.iter().any(inspects) && rig.plan_asked().is_none());
    }
    rig.tell(Event::EngineInspected { shape: shape() });
    assert!(rig.plan_asked().is_some());
    rig.engine_applies();
    assert_eq!(rig.snapshot().engine.failure, None);
}

#[test]
fn what_reads_keep_of_an_engine_on_a_disk_that_hangs_is_on_the_book_until_it_answers() {
    let mut rig = Rig::with_engine_ready(params());
    let free = rig.snapshot().memory.free;
    let held = rig.held("llm");
    rig.engine_fails(Some(mib(20)));
    let snapshot = rig.snapshot();
    assert_eq!(
        (rig.held("llm"), snapshot.engine.state),
        (Bytes::ZERO, EngineState::Failed)
    );
    assert_eq!(
        snapshot.memory.free,
        free + held - mib(20),
        "it cannot be granted"
    );
    let hangs = NextLoad::WaitsForDisk { left: mib(20) };
    assert!(decided!(rig, Engine(EngineDecision::Gone { next, .. }) if *next == hangs));
    // A load right away would block as well.
    rig.wait(600).sample(20);
    assert_eq!(rig.plan_asked(), None);
    rig.tell(Event::EngineInspected { shape: shape() });
    assert!(rig.plan_asked().is_some());
    rig.sample(0);
    assert_eq!(rig.snapshot().memory.unaccounted, Bytes::ZERO);
}

#[test]
fn a_disk_that_hangs_with_each_load_is_asked_less_and_less_often() {
    let mut rig = Rig::with_engine_ready(params());
    let longest = params()
        .engine
        .map_or(ms(30_000), |engine| engine.restart.backoff_max);
    let mut waits = Vec::new();
    for _ in 0..12 {
        rig.engine_fails(Some(mib(20)));
        rig.pass(200);
        let answered = rig.now;
        rig.tell(Event::EngineInspected { shape: shape() });
        rig.sample(0);
        while rig.plan_asked().is_none() {
            assert_eq!(rig.snapshot().engine.state, EngineState::Failed);
            rig.wait(100).sample(0);
        }
        waits.push(rig.now.saturating_since(answered));
    }
    assert!(waits.is_sorted() && waits[0] < ms(1000), "{waits:?}");
    let last = *waits.last().unwrap();
    assert!(last <= longest && last > ms(20_000), "{waits:?}");
    rig.engine_applies();
    assert_eq!(rig.snapshot().engine.state, EngineState::Ready);
}

#[test]
fn a_model_that_cannot_fit_is_explained_once() {
    let mut params = params();
    params.budget.total = mib(90);
    params.pressure = crate::params::PressureParams::scaled_to(mib(90));
    let mut rig = Rig::new(with_engine(params));
    rig.tell(Event::EngineInspected { shape: shape() });
    rig.sample(80);
    assert!(
        decided!(rig, Engine(EngineDecision::WaitsForMemory { error, .. }) if error.floor == mib(28))
    );
    rig.wait(1000).sample(80);
    assert!(!decided!(
        rig,
        Engine(EngineDecision::WaitsForMemory { .. })
    ));
}

#[test]
fn a_model_whose_floor_exceeds_the_budget_is_refused_and_workers_are_served() {
    let mut params = with_engine(params());
    params.workers = vec![worker("tts", 50)];
    let mut rig = Rig::new(params);
    let large = ModelShape {
        fixed_bytes: mib(500),
        ..shape()
    };
    rig.sample(0);
    assert!(!rig.starts("tts"), "the engine comes first");
    rig.tell(Event::EngineInspected { shape: large });
    assert!(rig.starts("tts"), "{:#?}", rig.actions);
    let refused = EngineDecision::FloorExceedsBudget {
        error: FloorError {
            model: "tiny".to_owned(),
            floor: mib(512),
            resident: cotenant_units::Layers::new(0),
            layers: cotenant_units::Layers::new(8),
            kv_tokens: Tokens::new(512),
            available: mib(340),
        },
    };
    assert!(
        rig.decisions()
            .any(|decision| *decision == Decision::Engine(refused.clone()))
    );
    let engine = rig.snapshot().engine;
    let failure = engine.failure.expect("it has failed").reason;
    assert_eq!(engine.state, EngineState::Failed);
    assert!(failure.contains("its floor is 512 MiB"), "{failure}");
    assert_eq!(
        rig.snapshot().memory.returning,
        Bytes::ZERO,
        "nothing is kept for it"
    );
    // A file that fits is loaded when an operator requests an inspection.
    rig.load();
    assert!(rig.actions.contains(&Action::InspectModel));
    rig.tell(Event::EngineInspected { shape: shape() });
    assert!(rig.plan_asked().is_some(), "{:#?}", rig.actions);
}

#[test]
fn an_operator_sheds_and_regrows() {
    let mut rig = Rig::with_engine_ready(params());
    rig.operator_shed(mib(40));
    assert_eq!(rig.try_answer(), None);
    rig.engine_applies();
    assert!(
        matches!(rig.answer(), Answer::Shed(outcome) if outcome.asked == mib(40) && outcome.freed >= mib(40))
    );
    rig.wait(10).sample(90);
    rig.regrow();
    assert!(matches!(
        rig.done(),
        Done::Grows(PlanReason::Regrowth { .. })
    ));
    assert_eq!(rig.engine_applies(), mib(132));
}

#[test]
fn a_shed_that_freed_nothing_is_not_credited() {
    let mut rig = Rig::with_engine_ready(params());
    rig.samples(390);
    let (revision, plan) = rig.plan_asked().unwrap();
    rig.engine_applied(revision, plan, Bytes::ZERO, mib(132));
    assert_eq!(rig.held("llm"), mib(132));
    assert!(decided!(rig, Engine(EngineDecision::Short { .. })));
}

#[test]
fn a_plan_without_an_answer_stays_on_the_book_until_it_is_known_what_is_in_force() {
    let mut rig = Rig::with_engine_ready(params());
    rig.samples(390);
    rig.engine_applies();
    let small = rig.held("llm");
    let ticket = rig.ticket();
    rig.wait(10).sample(60);
    rig.wait(2500).sample(60);
    rig.tell(Event::OperatorRegrow { ticket, by: None });
    let _ = rig.pass(2000);
    rig.pass(2000);
    let (revision, _) = rig.plan_asked().unwrap();
    assert!(decided!(rig, Engine(EngineDecision::Unanswered { .. })));
    rig.engine_refuses(revision);
    assert_eq!(
        rig.held("llm"),
        mib(132),
        "the first growth may be in force"
    );
    rig.pass(250);
    let (revision, plan) = rig.plan_asked().unwrap();
    assert_eq!(rig.engine_applies_plan(revision, plan), small);
    assert_eq!(rig.held("llm"), small);
}
