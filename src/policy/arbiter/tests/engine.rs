use super::*;
use crate::policy::{
    decision::{EngineDecision, GrowthDecision, NextLoad, PlanOutcome},
    engine_control::KvUse,
    event::ShedLimit,
    growth_wait::GrowthWait,
    params::ResidencyMode,
    pressure::PressureLevel,
    reason::PlanReason,
    residency::FloorError,
    shedding::Source,
    snapshot::EngineState,
    speed::Timing,
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
fn growth_does_not_take_what_the_neighbour_uses() {
    let mut desk = Desk::with_engine_ready(params());
    desk.samples(390);
    let used = desk.engine_applies().whole_mib();
    for _ in 0..60 {
        // 65 MiB are left: a layer would take 10 of them, and 60 have to stay.
        desk.wait(100).sample(used + 265);
        assert_eq!(desk.plan_asked(), None);
        desk.measure("llm", used);
    }
    assert_eq!(desk.snapshot().level, PressureLevel::Normal);
    assert_eq!(desk.snapshot().unaccounted, mib(265));
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
fn a_clients_wish_for_capacity_undoes_neither_a_shed_nor_the_dwell() {
    let mut desk = Desk::with_engine_ready(params());
    desk.operator_shed(mib(40));
    desk.engine_applies();
    desk.wait(10).sample(90);
    desk.wait(1000).wants_capacity(0, 4096);
    assert_eq!(desk.plan_asked(), None);
    assert!(
        matches!(
            desk.decisions().next(),
            Some(Decision::Growth(GrowthDecision::CapacityWithheld {
                wait: GrowthWait::Dwell { left },
                ..
            })) if *left < ms(1000)
        ),
        "{:#?}",
        desk.actions
    );
    // Where nothing stands against it, growth needs no wish.
    desk.wait(1000).sample(90);
    desk.engine_applies();
    assert_eq!(desk.held("llm"), mib(132));
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

#[test]
fn a_growth_that_failed_half_way_stays_on_the_book_until_the_engine_says_what_it_holds() {
    let mut desk = Desk::with_engine_ready(params());
    desk.samples(390);
    desk.engine_applies();
    let small = desk.held("llm");
    let mut asked = None;
    while asked.is_none() {
        desk.wait(100).sample(60);
        asked = desk.plan_asked();
    }
    let (revision, plan) = asked.unwrap();
    let asked = shape().plan_bytes(&plan);
    assert!(asked > small);
    let sheds = |desk: &Desk| (desk.snapshot().sheds, desk.snapshot().shed_bytes);
    let before = sheds(&desk);
    desk.engine_refuses(revision);
    assert_eq!(desk.held("llm"), asked, "layers before it are in memory");
    desk.measure("llm", small.whole_mib());
    assert_eq!(desk.held("llm"), asked, "also where it was measured before they were");
    desk.pass(250);
    let (revision, plan) = desk.plan_asked().unwrap();
    assert_eq!(shape().plan_bytes(&plan), small);
    // Where that fails as well, it is asked for again, after a longer time.
    desk.engine_refuses(revision);
    desk.pass(250);
    assert_eq!((desk.plan_asked(), desk.held("llm")), (None, asked));
    let dwell = params().pressure.dwell.as_millis();
    desk.pass(u64::try_from(dwell).unwrap());
    let (revision, plan) = desk.plan_asked().unwrap();
    assert_eq!(desk.engine_applies_plan(revision, plan), small);
    assert_eq!(desk.held("llm"), small);
    assert_eq!(sheds(&desk), before, "nothing was given up");
}

/// The candidates of the last call, with what was taken.
fn weighed(desk: &Desk) -> Vec<(Source, Option<Bytes>)> {
    let weighing = desk.actions.iter().find_map(|action| match action {
        Action::Weighed { weighing } => Some(weighing.clone()),
        _ => None,
    });
    let candidates = weighing.unwrap().candidates.into_iter();
    candidates.map(|weighed| (weighed.source, weighed.chosen)).collect()
}

#[test]
fn the_order_is_computed_from_what_the_user_loses() {
    let mut desk = Desk::with_engine_ready(params());
    desk.tell(activity(
        0,
        KvUse {
            kept: Tokens::new(1024),
            ..KvUse::default()
        },
    ));
    desk.operator_shed(mib(16));
    assert_eq!(
        weighed(&desk),
        [
            (Source::UnusedKv, Some(mib(16))),
            (Source::PrefixKv, None),
            (Source::Layers, None)
        ]
    );
    let (_, plan) = desk.plan_asked().unwrap();
    assert_eq!((plan.resident.len(), plan.kv_capacity), (8, Tokens::new(2048)));
}

#[test]
fn the_oldest_of_a_running_answer_goes_last_and_only_where_its_request_allows_that() {
    let running = |droppable, dropped| {
        activity(
            1,
            KvUse {
                used: Tokens::new(4000),
                droppable: Tokens::new(droppable),
                dropped: Tokens::new(dropped),
                ..KvUse::default()
            },
        )
    };
    let oldest = Source::OldestKv;
    // Not allowed, it is no candidate, and what is used stays.
    let mut desk = Desk::with_engine_ready(params());
    desk.tell(running(0, 0));
    desk.operator_shed(mib(30));
    assert!(weighed(&desk).iter().all(|(source, _)| *source != oldest));
    assert!(desk.plan_asked().unwrap().1.kv_capacity >= Tokens::new(4000));
    // Allowed, and in a mode that holds on to speed: layers are spared for it.
    let mut settings = with_engine(params());
    settings.engine.as_mut().unwrap().mode = ResidencyMode::MaxSpeed;
    let mut desk = Desk::with_engine_ready_in(settings);
    desk.tell(running(3072, 0));
    desk.operator_shed(mib(20));
    let balance = weighed(&desk);
    let given = |source: &Source| balance.iter().find(|(name, _)| name == source).unwrap().1;
    assert!(given(&oldest) > Some(mib(18)), "{balance:?}");
    let (revision, plan) = desk.plan_asked().unwrap();
    assert!(
        plan.kv_capacity < Tokens::new(3000) && plan.resident.len() == 8,
        "{plan:?}"
    );
    desk.engine_applies_plan(revision, plan);
    // What it has lost is decided once.
    desk.tell(running(1900, 1152));
    assert!(decided!(desk, Engine(EngineDecision::ContextLost { tokens: 1152, .. })));
    desk.tell(running(1900, 1152));
    assert!(!decided!(desk, Engine(EngineDecision::ContextLost { .. })));
    // Whatever it was said to lose: what the engine keeps of it, it cannot, and is not asked for it again.
    desk.operator_shed(mib(10));
    let (revision, plan) = desk.plan_asked().unwrap();
    let kept = EnginePlan {
        kv_capacity: Tokens::new(plan.kv_capacity.get() + 128),
        ..plan
    };
    desk.engine_applies_plan(revision, kept.clone());
    desk.operator_shed(mib(10));
    assert!(weighed(&desk).iter().all(|(source, _)| *source != oldest));
    assert_eq!(desk.plan_asked().unwrap().1.kv_capacity, kept.kv_capacity);
    // In a mode that holds on to context, layers go first.
    let mut settings = with_engine(params());
    settings.engine.as_mut().unwrap().mode = ResidencyMode::MaxContext;
    let mut desk = Desk::with_engine_ready_in(settings);
    desk.tell(running(3072, 0));
    desk.operator_shed(mib(30));
    assert_eq!(desk.plan_asked().unwrap().1.kv_capacity, Tokens::new(4096));
}

#[test]
fn kv_that_was_never_touched_counts_as_used() {
    let mut desk = Desk::with_engine_ready(params());
    desk.tell(activity(
        0,
        KvUse {
            untouched: mib(30),
            ..KvUse::default()
        },
    ));
    // 80 MiB seem to be left of 400, but the engine may touch 30 of them with the next token.
    desk.samples(320);
    assert_eq!(desk.snapshot().level, PressureLevel::Elevated);
    let (revision, plan) = desk.plan_asked().unwrap();
    assert!(plan.kv_capacity < Tokens::new(4096), "{plan:?}");
    let given = mib(132) - shape().plan_bytes(&plan);
    desk.tell(Event::EngineApplied {
        revision,
        in_force: plan,
        freed: Bytes::ZERO,
        used: mib(132) - given,
        untouched: mib(30).saturating_sub(given),
        untouched_given: given.min(mib(30)),
        took: ms(1),
    });
    assert_eq!(desk.held("llm"), mib(132) - given);
    let shed =
        |outcome: &PlanOutcome| matches!(outcome, PlanOutcome::Shed { untouched, .. } if *untouched > Bytes::ZERO);
    assert!(decided!(desk, Engine(EngineDecision::Applied { outcome, .. }) if shed(outcome)));
}

#[test]
fn kv_is_converted_only_where_that_is_allowed_and_by_its_cost() {
    let slow = Event::EngineTimed(Timing {
        prompt_tokens: Tokens::new(100),
        prompt_us: 100 * 2000,
        answer_tokens: Tokens::new(50),
        answer_us: 50 * 20_000,
    });
    // 32 MiB of KV are 17 as q8 and 9 as q4. Where context is dear, what it loses as q8 costs less than layers, and as q4
    // more than one or two of them; where it is cheap, its unused end costs least of all (weighed in blocks of 136 KiB as
    // q8, of which 16 are enough, so that five of 512 KiB go).
    for (least, is_slow, need, expected) in [
        (KvType::F16, true, 14, (6, 4096, KvType::F16)),
        (KvType::Q8, true, 14, (8, 4096, KvType::Q8)),
        (KvType::Q4, true, 14, (8, 4096, KvType::Q8)),
        (KvType::Q8, true, 40, (5, 4096, KvType::Q8)),
        (KvType::Q8, false, 2, (8, 3776, KvType::F16)),
    ] {
        let mut params = with_engine(params());
        params.engine.as_mut().unwrap().kv_type_least = least;
        let mut desk = Desk::with_engine_ready_in(params);
        for _ in 0..20 {
            if is_slow {
                desk.tell(slow.clone());
            }
        }
        desk.operator_shed(mib(need));
        let (revision, plan) = desk.plan_asked().unwrap();
        let asked = (plan.resident.len(), plan.kv_capacity.get(), plan.kv_type);
        assert_eq!(asked, expected, "{least} {is_slow} {need}: {:?}", weighed(&desk));
        let before = desk.held("llm");
        let used = desk.engine_applies_plan(revision, plan);
        assert!(desk.held("llm") == used && before - used >= mib(need), "{used}");
        // What was given up comes back, the type last or together with the rest.
        desk.measure("llm", used.whole_mib());
        for _ in 0..40 {
            desk.wait(100).sample(used.whole_mib());
        }
        let grown = desk.snapshot().engine;
        assert_eq!(grown.asked.or(grown.in_force), grown.full);
    }
}

#[test]
fn an_operator_has_kv_kept_in_another_type_and_is_answered_with_what_came_of_it() {
    let mut desk = Desk::with_engine_ready(params());
    desk.keep_kv_as(KvType::Q8);
    let (revision, plan) = desk.plan_asked().unwrap();
    assert_eq!(
        (plan.resident.len(), plan.kv_capacity, plan.kv_type),
        (8, Tokens::new(4096), KvType::Q8)
    );
    assert_eq!(desk.held("llm"), mib(132), "asking frees nothing");
    let used = desk.engine_applies_plan(revision, plan);
    assert_eq!(used, mib(117));
    let Done::KvChanged {
        before, held, freed, ..
    } = desk.done()
    else {
        panic!("{:?}", desk.answer());
    };
    assert_eq!((before, held, freed), (mib(132), mib(117), mib(15)));
    desk.measure("llm", 117);
    for _ in 0..40 {
        desk.wait(100).sample(117);
    }
    assert_eq!(desk.plan_asked(), None, "it stays so");
    desk.keep_kv_as(KvType::Q8);
    assert_eq!(desk.done(), Done::KvIs(KvType::Q8));
    // Up again only where there is room: 52 + 8 MiB are to stay free.
    desk.wait(100).sample(330);
    desk.keep_kv_as(KvType::F16);
    let more = Some(mib(15));
    let kv_type = KvType::F16;
    assert_eq!(desk.done(), Done::KvWhenRoom { kv_type, more });
    let full = desk.snapshot().engine.full.unwrap();
    assert_eq!(full.kv_type, KvType::F16);
    for _ in 0..40 {
        desk.wait(100).sample(117);
    }
    assert_eq!(desk.snapshot().engine.asked, Some(full));
    assert_eq!(desk.held("llm"), mib(132));
}

#[test]
fn modes_weigh_the_same_costs_otherwise() {
    for (mode, expected) in [
        (ResidencyMode::Balanced, (8, 2048)),
        (ResidencyMode::MaxSpeed, (8, 2048)),
        (ResidencyMode::MaxContext, (6, 4096)),
    ] {
        let mut params = with_engine(params());
        params.engine.as_mut().unwrap().mode = mode;
        let mut desk = Desk::with_engine_ready_in(params);
        desk.operator_shed(mib(16));
        let (_, plan) = desk.plan_asked().unwrap();
        assert_eq!((plan.resident.len(), plan.kv_capacity.get()), expected, "{mode}");
    }
}

/// An engine whose prompts are slow, so that context is worth more than layers.
fn with_slow_prompts(params: Params) -> Desk {
    let mut desk = Desk::with_engine_ready(params);
    for _ in 0..20 {
        desk.tell(Event::EngineTimed(Timing {
            prompt_tokens: Tokens::new(100),
            prompt_us: 100 * 5000,
            answer_tokens: Tokens::new(50),
            answer_us: 50 * 20_000,
        }));
    }
    desk
}

fn untouched(untouched: Bytes) -> Event {
    activity(
        0,
        KvUse {
            untouched,
            ..KvUse::default()
        },
    )
}

#[test]
fn an_engine_grows_back_into_the_headroom_that_it_was_loaded_in() {
    let mut settings = params();
    // A quarter of the budget, the default of small budgets: more than what is missing of the engine.
    settings.shed.minimum_reclaim = mib(100);
    let mut desk = Desk::with_engine_ready(settings);
    desk.samples(132 + 150);
    desk.operator_shed(mib(40));
    let used = desk.engine_applies().whole_mib();
    for _ in 0..30 {
        desk.wait(100).sample(used + 150);
    }
    let engine = desk.snapshot().engine;
    assert_eq!(
        engine.asked, engine.full,
        "in full it leaves 118 MiB, of which Elevated is 52"
    );
}

#[test]
fn two_steps_of_growth_never_rest_on_one_sample() {
    let mut desk = Desk::with_engine_ready(params());
    desk.operator_shed(mib(90));
    let used = desk.engine_applies().whole_mib();
    desk.measure("llm", used);
    desk.pass(2500);
    // 25 MiB may be used, above 52 of Elevated and 8 of hysteresis. The engine has grown in the instant of the sample.
    desk.sample(315);
    desk.engine_applies();
    let grown = desk.snapshot().engine.in_force;
    desk.pass(900);
    assert_eq!(desk.plan_asked(), None);
    // 30 MiB in the second step: the neighbour has gone meanwhile.
    desk.sample(310);
    assert!(desk.plan_asked().is_some() && desk.snapshot().engine.in_force == grown);
}

#[test]
fn two_sheds_never_rest_on_one_sample() {
    let mut desk = Desk::with_engine_ready(params());
    desk.samples(385);
    desk.engine_applies();
    desk.wait(300).measure("llm", 60);
    assert_eq!(desk.plan_asked(), None);
    desk.sample(385);
    assert!(desk.plan_asked().is_some());
}

#[test]
fn layers_grow_back_before_capacity_that_no_token_has_touched() {
    let mut desk = with_slow_prompts(params());
    desk.operator_shed(mib(90));
    let used = desk.engine_applies().whole_mib();
    let lost = desk.snapshot().engine.in_force.unwrap();
    assert!(
        lost.resident.len() < 8 && lost.kv_capacity < Tokens::new(4096),
        "{lost:?}"
    );
    for _ in 0..30 {
        // 25 MiB may be used, above 52 of Elevated and 8 of hysteresis.
        desk.wait(100).sample(315);
        desk.measure("llm", used);
    }
    let grown = desk.snapshot().engine.asked.unwrap();
    assert!(grown.resident.len() >= lost.resident.len() + 2, "{lost:?} {grown:?}");
}

#[test]
fn capacity_that_no_token_has_touched_is_shed_before_layers() {
    let mut desk = with_slow_prompts(params());
    desk.tell(untouched(mib(30)));
    desk.operator_shed(mib(16));
    let (_, plan) = desk.plan_asked().unwrap();
    assert_eq!((plan.resident.len(), plan.kv_capacity), (8, Tokens::new(2048)));
}

#[test]
fn a_regrow_that_does_nothing_is_refused() {
    let mut desk = Desk::with_engine_ready(params());
    desk.operator_shed(mib(40));
    desk.engine_applies();
    desk.samples(340);
    desk.regrow();
    assert!(matches!(desk.answer(), Answer::Denied { .. }), "{:?}", desk.answer());
}

#[test]
fn what_no_token_has_touched_is_held_and_not_used() {
    let mut desk = Desk::with_engine_ready(params());
    desk.measure("llm", 132);
    desk.tell(untouched(mib(30)));
    let lease = desk.lease("llm").unwrap();
    assert_eq!((lease.held, lease.used), (mib(132), Some(mib(102))));
    assert_eq!(desk.snapshot().used, mib(102));
}

/// Each end of what the configuration accepts for growth and shedding, with a shed and a growth: an accepted setting cannot
/// end the supervisor.
#[test]
fn growth_and_shedding_work_at_both_ends_of_every_accepted_range() {
    let hour = Duration::from_secs(3600);
    let minute = Duration::from_secs(60);
    type Set = fn(&mut Params, Duration);
    let ranges: [(Set, Duration, Duration); 8] = [
        (|params, span| params.shed.settle = span, Duration::ZERO, minute),
        (|params, span| params.pressure.dwell = span, Duration::ZERO, hour),
        (|params, span| params.pressure.grace = span, Duration::ZERO, minute),
        (|params, span| params.pressure.sample_min = span, ms(1), ms(1000)),
        (|params, span| params.pressure.sample_max = span, ms(10), ms(10_000)),
        (|params, span| params.shed.verify_timeout = span, ms(100), minute * 10),
        (
            |params, span| {
                let deadlines = &mut params.shed.deadlines;
                (deadlines.audio_realtime, deadlines.interactive) = (span, span);
                (deadlines.llm_elastic, deadlines.batch) = (span, span);
            },
            ms(1),
            minute,
        ),
        (
            |params, span| params.engine.as_mut().unwrap().apply_timeout = span,
            ms(100),
            minute * 10,
        ),
    ];
    let mut all = Vec::new();
    for (set, least, most) in ranges {
        for span in [least, most] {
            let mut params = with_engine(params());
            set(&mut params, span);
            params.pressure.sample_max = params.pressure.sample_max.max(params.pressure.sample_min);
            params.pressure.sample_min = params.pressure.sample_min.min(params.pressure.sample_max);
            all.push(params);
        }
    }
    for bytes in [Bytes::ZERO, mib(300)] {
        let mut params = with_engine(params());
        (params.shed.minimum_reclaim, params.pressure.hysteresis) = (bytes, Bytes::ZERO);
        all.push(params);
    }
    for params in all {
        let dwell = params.pressure.dwell;
        let mut desk = Desk::with_engine_ready_in(params);
        desk.samples(132);
        desk.operator_shed(mib(40));
        let (revision, plan) = desk.plan_asked().unwrap();
        desk.wait(1).engine_applies_plan(revision, plan);
        let used = desk.held("llm").whole_mib();
        desk.wait(10).sample(used);
        if desk.plan_asked().is_none() {
            desk.regrow();
        }
        let (grown, _) = desk.plan_asked().unwrap();
        desk.engine_applies();
        assert!(grown > revision);
        desk.samples(390);
        desk.pass(2000);
        desk.operator_shed(mib(10));
        if let Some((revision, _)) = desk.plan_asked() {
            let reason = "planted".to_owned();
            desk.tell(Event::EngineApplyFailed { revision, reason });
        }
        desk.pass(1000 + u64::try_from(dwell.as_millis()).unwrap());
    }
}

#[test]
fn a_request_that_needs_capacity_gets_it_from_layers_within_what_is_held() {
    let mut desk = Desk::with_engine_ready(params());
    desk.operator_shed(mib(70));
    let held = desk.engine_applies();
    let before = desk.snapshot().engine.in_force.unwrap();
    assert!(before.kv_capacity < Tokens::new(2000), "{before:?}");
    desk.wants_capacity(2000, 4096);
    let (revision, plan) = desk.plan_asked().unwrap();
    assert!(plan.kv_capacity >= Tokens::new(2000), "{plan:?}");
    assert!(plan.resident.len() < before.resident.len(), "{plan:?}");
    assert!(
        shape().plan_bytes(&plan) <= held,
        "what the operator wanted back stays back"
    );
    desk.engine_applies_plan(revision, plan.clone());
    // Nothing uses the capacity until the request begins, and it stays for it.
    desk.tell(untouched(mib(16)));
    desk.operator_shed(mib(8));
    let (_, less) = desk.plan_asked().unwrap();
    assert!(less.kv_capacity >= Tokens::new(2000), "{less:?}");
}

#[test]
fn a_request_for_capacity_that_no_plan_has_is_answered_with_what_is_missing() {
    let mut settings = with_engine(params());
    settings.engine.as_mut().unwrap().resident_min = 8;
    let mut desk = Desk::with_engine_ready_in(settings);
    desk.operator_shed(mib(25));
    desk.engine_applies();
    desk.wait(10).sample(90);
    desk.wants_capacity(4000, 4000);
    assert_eq!(desk.plan_asked(), None);
    assert!(matches!(
        desk.decisions().next(),
        Some(Decision::Growth(GrowthDecision::CapacityWithheld { .. }))
    ));
}

#[test]
fn what_growth_waits_for_is_in_the_snapshot_with_its_figures() {
    let mut desk = Desk::with_engine_ready(params());
    desk.sample(132);
    assert_eq!(desk.snapshot().engine.waits, None, "it has its full plan");
    desk.operator_shed(mib(40));
    assert_eq!(desk.snapshot().engine.waits, None, "it changes");
    desk.engine_applies();
    assert!(matches!(desk.snapshot().engine.waits, Some(GrowthWait::Dwell { .. })));
    // 61 MiB of headroom: a layer of 10 MiB would leave 51, and Elevated begins below 52.
    for _ in 0..30 {
        desk.wait(100).sample(339);
    }
    let wait = desk.snapshot().engine.waits.unwrap();
    let GrowthWait::Headroom { needs, has, .. } = wait else {
        panic!("{wait:?}");
    };
    assert_eq!((has, needs), (mib(61), mib(70)), "{wait:?}");
}

#[test]
fn a_shed_is_answered_with_what_limited_it() {
    let mut desk = Desk::with_engine_ready(params());
    desk.operator_shed(Bytes::from_gib(1));
    desk.engine_applies();
    let Answer::Shed(outcome) = desk.answer() else {
        panic!("{:?}", desk.answer());
    };
    let limit = ShedLimit::Floor { bytes: mib(28) };
    assert_eq!((outcome.freed, outcome.held), (mib(104), mib(28)));
    assert_eq!(outcome.limited_by, Some(limit));
}

#[test]
fn what_is_shed_next_is_what_is_shed_then() {
    let mut desk = Desk::with_engine_ready(params());
    desk.samples(132);
    let next = desk.arbiter.next_shed().unwrap();
    assert_eq!((next.below, next.headroom, next.need), (mib(52), mib(268), mib(20)));
    assert_eq!(next.chosen[0].source, Source::UnusedKv, "{next}");
    assert!(
        next.to_string()
            .contains("): cheapest for 20 MiB, with headroom below 52 MiB (now 268 MiB)"),
        "{next}"
    );
    // The headroom comes down to just below the watermark, for longer than the grace.
    desk.samples(349);
    let at_once = desk.plan_asked();
    desk.wait(2500);
    desk.samples(349);
    let (_, plan) = at_once.or_else(|| desk.plan_asked()).unwrap();
    assert!(plan.kv_capacity < Tokens::new(4096), "{plan:?}");
}
