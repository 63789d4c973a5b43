//! Tests of growth: what comes back, when, and into which headroom.

use super::{
    kv::{untouched, with_slow_prompts},
    *,
};
use crate::policy::{decision::GrowthDecision, growth_wait::GrowthWait, pressure::PressureLevel};

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
fn a_regrow_that_does_nothing_is_refused() {
    let mut desk = Desk::with_engine_ready(params());
    desk.operator_shed(mib(40));
    desk.engine_applies();
    desk.samples(340);
    desk.regrow();
    assert!(matches!(desk.answer(), Answer::Denied { .. }), "{:?}", desk.answer());
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
