//! Tests of growth: order, timing and headroom.

use super::{
    kv::{untouched, with_slow_prompts},
    *,
};
use crate::{
    decision::GrowthDecision,
    growth_wait::GrowthWait,
    pressure::{LevelChange, PressureLevel},
};

#[test]
fn growth_does_not_take_what_the_neighbour_uses() {
    let mut rig = Rig::with_engine_ready(params());
    rig.samples(390);
    let used = rig.engine_applies().whole_mib();
    for _ in 0..60 {
        // 65 MiB are left: a layer would take 10 of them, and 60 must stay.
        rig.wait(100).sample(used + 265);
        assert_eq!(rig.plan_asked(), None);
        rig.measure("llm", used);
    }
    assert_eq!(rig.snapshot().pressure.level, PressureLevel::Normal);
    assert_eq!(rig.snapshot().memory.unaccounted, mib(265));
}

#[test]
fn growth_does_not_take_what_the_engine_has_leased_and_not_used_yet() {
    let grown_by = |unused| {
        let mut rig = Rig::with_engine_ready(params());
        rig.operator_shed(mib(60));
        let held = rig.engine_applies().whole_mib();
        // 40 MiB above the watermark and the hysteresis; growth waits for the dwell.
        rig.wait(10).measure("llm", held - unused);
        for _ in 0..40 {
            rig.wait(100).sample(300);
            if let Some((_, plan)) = rig.plan_asked() {
                return shape().plan_bytes(&plan).whole_mib() - held;
            }
        }
        0
    };
    let all = grown_by(0);
    assert!(all >= 20, "{all}");
    let less = grown_by(15);
    assert!(less > 0 && less + 10 <= all, "{less} of {all}");

    // The first answer uses the memory after the last sample and is measured before the next: the sample does not show
    // it.
    let mut rig = Rig::with_engine_ready(params());
    rig.operator_shed(mib(60));
    let held = rig.engine_applies().whole_mib();
    rig.wait(10).measure("llm", held - 15);
    rig.wait(1900).sample(300);
    assert_eq!(rig.plan_asked(), None);
    rig.wait(200).measure("llm", held);
    let (_, plan) = rig.plan_asked().unwrap();
    assert_eq!(shape().plan_bytes(&plan).whole_mib() - held, less);
}

#[test]
fn a_clients_wish_for_capacity_undoes_neither_a_shed_nor_the_dwell() {
    let mut rig = Rig::with_engine_ready(params());
    rig.operator_shed(mib(40));
    rig.engine_applies();
    rig.wait(10).sample(90);
    rig.wait(1000).wants_capacity(0, 4096);
    assert_eq!(rig.plan_asked(), None);
    assert!(
        matches!(
            rig.decisions().next(),
            Some(Decision::Growth(GrowthDecision::CapacityWithheld {
                wait: GrowthWait::Dwell { left },
                ..
            })) if *left < ms(1000)
        ),
        "{:#?}",
        rig.actions
    );
    // Without an obstacle, growth needs no command.
    rig.wait(1000).sample(90);
    rig.engine_applies();
    assert_eq!(rig.held("llm"), mib(132));
}

#[test]
fn a_growth_that_failed_half_way_stays_on_the_book_until_the_engine_says_what_it_holds() {
    let mut rig = Rig::with_engine_ready(params());
    rig.samples(390);
    rig.engine_applies();
    let small = rig.held("llm");
    let mut asked = None;
    while asked.is_none() {
        rig.wait(100).sample(60);
        asked = rig.plan_asked();
    }
    let (revision, plan) = asked.unwrap();
    let asked = shape().plan_bytes(&plan);
    assert!(asked > small);
    let sheds = |rig: &Rig| {
        (
            rig.snapshot().totals.sheds,
            rig.snapshot().totals.shed_bytes,
        )
    };
    let before = sheds(&rig);
    rig.engine_refuses(revision);
    assert_eq!(rig.held("llm"), asked, "layers before it are in memory");
    rig.measure("llm", small.whole_mib());
    assert_eq!(
        rig.held("llm"),
        asked,
        "also where it was measured before they were"
    );
    rig.pass(250);
    let (revision, plan) = rig.plan_asked().unwrap();
    assert_eq!(shape().plan_bytes(&plan), small);
    // If that fails as well, it is sent again after a longer time.
    rig.engine_refuses(revision);
    rig.pass(250);
    assert_eq!((rig.plan_asked(), rig.held("llm")), (None, asked));
    let dwell = params().pressure.dwell.as_millis();
    rig.pass(u64::try_from(dwell).unwrap());
    let (revision, plan) = rig.plan_asked().unwrap();
    assert_eq!(rig.engine_applies_plan(revision, plan), small);
    assert_eq!(rig.held("llm"), small);
    assert_eq!(sheds(&rig), before, "nothing was given up");
}

#[test]
fn an_engine_grows_back_into_the_headroom_that_it_was_loaded_in() {
    let mut settings = params();
    // A quarter of the budget, the default of small budgets: more than the engine lacks.
    settings.shed.minimum_reclaim = mib(100);
    let mut rig = Rig::with_engine_ready(settings);
    rig.samples(132 + 150);
    rig.operator_shed(mib(40));
    let used = rig.engine_applies().whole_mib();
    for _ in 0..30 {
        rig.wait(100).sample(used + 150);
    }
    let engine = rig.snapshot().engine;
    assert_eq!(
        engine.asked, engine.full,
        "in full it leaves 118 MiB, of which Elevated is 52"
    );
}

#[test]
fn two_steps_of_growth_never_rest_on_one_sample() {
    let mut rig = Rig::with_engine_ready(params());
    rig.operator_shed(mib(90));
    let used = rig.engine_applies().whole_mib();
    rig.measure("llm", used);
    rig.pass(2500);
    // 25 MiB may be used, above 52 of Elevated and 8 of hysteresis. The engine has grown at the time of the sample.
    rig.sample(315);
    rig.engine_applies();
    let grown = rig.snapshot().engine.in_force;
    rig.pass(900);
    assert_eq!(rig.plan_asked(), None);
    // 30 MiB in the second step: the neighbour has ended in the meantime.
    rig.sample(310);
    assert!(rig.plan_asked().is_some() && rig.snapshot().engine.in_force == grown);
}

#[test]
fn two_sheds_never_rest_on_one_sample() {
    let mut rig = Rig::with_engine_ready(params());
    rig.samples(385);
    rig.engine_applies();
    rig.wait(300).measure("llm", 60);
    assert_eq!(rig.plan_asked(), None);
    rig.sample(385);
    assert!(rig.plan_asked().is_some());
}

#[test]
fn layers_grow_back_before_capacity_that_no_token_has_touched() {
    let mut rig = with_slow_prompts(params());
    rig.operator_shed(mib(90));
    let used = rig.engine_applies().whole_mib();
    let lost = rig.snapshot().engine.in_force.unwrap();
    assert!(
        lost.resident.len() < 8 && lost.kv_capacity < Tokens::new(4096),
        "{lost:?}"
    );
    for _ in 0..30 {
        // 25 MiB may be used, above 52 of Elevated and 8 of hysteresis.
        rig.wait(100).sample(315);
        rig.measure("llm", used);
    }
    let grown = rig.snapshot().engine.asked.unwrap();
    assert!(
        grown.resident.len() >= lost.resident.len() + 2,
        "{lost:?} {grown:?}"
    );
}

#[test]
fn a_regrow_right_after_a_release_grows_with_the_next_sample() {
    let mut rig = Rig::with_engine_ready(params());
    rig.operator_shed(mib(60));
    let held = rig.engine_applies().whole_mib();
    rig.measure("llm", held);
    rig.regrow();
    assert!(
        matches!(
            rig.answer(),
            Answer::Done {
                done: Done::GrowsWhenSampled
            }
        ),
        "{:#?}",
        rig.actions
    );
    assert_eq!(rig.plan_asked(), None);
    rig.wait(10).sample(held);
    assert!(rig.plan_asked().is_some(), "{:#?}", rig.actions);
}

#[test]
fn a_regrow_that_does_nothing_is_refused() {
    let mut rig = Rig::with_engine_ready(params());
    rig.operator_shed(mib(40));
    rig.engine_applies();
    rig.samples(340);
    rig.regrow();
    assert!(
        matches!(rig.answer(), Answer::Denied { .. }),
        "{:?}",
        rig.answer()
    );
}

#[test]
fn a_level_that_only_dwells_does_so_for_one_dwell_and_a_regrow_ends_it() {
    let level = |rig: &Rig| rig.snapshot().pressure.level;
    let mut rig = Rig::with_engine_ready(params());
    let mut backed_off = 0;
    for round in 0..3 {
        rig.samples(390);
        backed_off += usize::from(decided!(rig, Growth(GrowthDecision::BackedOff { .. })));
        let used = rig.engine_applies().whole_mib();
        assert_eq!(level(&rig), PressureLevel::Critical);
        if round == 2 {
            // Denied until the headroom has recovered, and the remedy names no other class.
            rig.regrow();
            let denial = rig.denial();
            let by_level = |denial| {
                matches!(
                    denial,
                    &Denial::NotGrowing {
                        wait: GrowthWait::Pressure { .. }
                    }
                )
            };
            assert!(by_level(&denial), "{denial:?}");
            rig.wait(300).sample(used);
            rig.regrow();
            assert!(
                matches!(rig.answer(), Answer::Done { .. }),
                "{:?}",
                rig.answer()
            );
            assert!(acts!(
                rig,
                Action::LevelChanged(LevelChange {
                    to: PressureLevel::Normal,
                    ..
                })
            ));
            return assert_eq!(backed_off, 2);
        }
        // Independent of the number of back-offs, and before any growth.
        rig.wait(100).sample(used);
        for _ in 0..20 {
            assert_eq!(level(&rig), PressureLevel::Critical);
            rig.wait(100).sample(used);
        }
        assert_eq!(level(&rig), PressureLevel::Normal);
        while rig.plan_asked().is_none() {
            rig.wait(100).sample(used);
        }
        rig.engine_applies();
    }
}

/// Both ends of each accepted range of growth and shedding, with a shed and a growth: no accepted setting can end the
/// supervisor.
#[test]
fn growth_and_shedding_work_at_both_ends_of_every_accepted_range() {
    let hour = Duration::from_secs(3600);
    let minute = Duration::from_secs(60);
    type Set = fn(&mut Params, Duration);
    let ranges: [(Set, Duration, Duration); 8] = [
        (
            |params, span| params.shed.settle = span,
            Duration::ZERO,
            minute,
        ),
        (
            |params, span| params.pressure.dwell = span,
            Duration::ZERO,
            hour,
        ),
        (
            |params, span| params.pressure.grace = span,
            Duration::ZERO,
            minute,
        ),
        (
            |params, span| params.pressure.sample_min = span,
            ms(1),
            ms(1000),
        ),
        (
            |params, span| params.pressure.sample_max = span,
            ms(10),
            ms(10_000),
        ),
        (
            |params, span| params.shed.verify_timeout = span,
            ms(100),
            minute * 10,
        ),
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
        let mut rig = Rig::with_engine_ready_in(params);
        rig.samples(132);
        rig.operator_shed(mib(40));
        let (revision, plan) = rig.plan_asked().unwrap();
        rig.wait(1).engine_applies_plan(revision, plan);
        let used = rig.held("llm").whole_mib();
        rig.wait(10).sample(used);
        if rig.plan_asked().is_none() {
            rig.regrow();
        }
        let (grown, _) = rig.plan_asked().unwrap();
        rig.engine_applies();
        assert!(grown > revision);
        rig.samples(390);
        rig.pass(2000);
        rig.operator_shed(mib(10));
        if let Some((revision, _)) = rig.plan_asked() {
            let reason = "planted".to_owned();
            rig.tell(Event::EngineApplyFailed { revision, reason });
        }
        rig.pass(1000 + u64::try_from(dwell.as_millis()).unwrap());
    }
}

#[test]
fn a_request_that_needs_capacity_gets_it_from_layers_within_what_is_held() {
    let mut rig = Rig::with_engine_ready(params());
    rig.operator_shed(mib(70));
    let held = rig.engine_applies();
    let before = rig.snapshot().engine.in_force.unwrap();
    assert!(before.kv_capacity < Tokens::new(2000), "{before:?}");
    rig.wants_capacity(2000, 4096);
    let (revision, plan) = rig.plan_asked().unwrap();
    assert!(plan.kv_capacity >= Tokens::new(2000), "{plan:?}");
    assert!(plan.resident.len() < before.resident.len(), "{plan:?}");
    assert!(
        shape().plan_bytes(&plan) <= held,
        "what the operator wanted back stays back"
    );
    rig.engine_applies_plan(revision, plan.clone());
    // The capacity is unused until the request begins, and stays reserved for it.
    rig.tell(untouched(mib(16)));
    rig.operator_shed(mib(8));
    let (_, less) = rig.plan_asked().unwrap();
    assert!(less.kv_capacity >= Tokens::new(2000), "{less:?}");
}

#[test]
fn a_request_for_capacity_that_no_plan_has_is_answered_with_what_is_missing() {
    let mut settings = with_engine(params());
    settings.engine.as_mut().unwrap().resident_min = 8;
    let mut rig = Rig::with_engine_ready_in(settings);
    rig.operator_shed(mib(25));
    rig.engine_applies();
    rig.wait(10).sample(90);
    rig.wants_capacity(4000, 4000);
    assert_eq!(rig.plan_asked(), None);
    assert!(matches!(
        rig.decisions().next(),
        Some(Decision::Growth(GrowthDecision::CapacityWithheld { .. }))
    ));
}

#[test]
fn what_growth_waits_for_is_in_the_snapshot_with_its_figures() {
    let mut rig = Rig::with_engine_ready(params());
    rig.sample(132);
    assert_eq!(rig.snapshot().engine.waits, None, "it has its full plan");
    rig.operator_shed(mib(40));
    assert_eq!(rig.snapshot().engine.waits, None, "it changes");
    rig.engine_applies();
    assert!(matches!(
        rig.snapshot().engine.waits,
        Some(GrowthWait::Dwell { .. })
    ));
    // 61 MiB of headroom: a layer of 10 MiB would leave 51, and Elevated begins below 52.
    for _ in 0..30 {
        rig.wait(100).sample(339);
    }
    let wait = rig.snapshot().engine.waits.unwrap();
    let GrowthWait::Headroom { needs, has, .. } = wait else {
        panic!("{wait:?}");
    };
    assert_eq!((has, needs), (mib(61), mib(70)), "{wait:?}");
}

/// The engine of the rig was loaded within 5 ms: with a dwell of 60 s it would stream for a minute.
#[test]
fn the_dwell_is_as_long_as_growth_is_worth_where_the_settings_leave_it_open() {
    for (by_growth, grows_within_ms) in [(true, 1000..=1500), (false, 60_000..=61_000)] {
        let mut settings = params();
        settings.pressure.dwell = ms(60_000);
        settings.pressure.dwell_by_growth = by_growth;
        let mut rig = Rig::with_engine_ready(settings);
        rig.operator_shed(mib(60));
        rig.engine_applies();
        let (mut waited, mut asked) = (0, None);
        while asked.is_none() && waited < 100_000 {
            waited += 100;
            rig.wait(100).sample(150);
            asked = rig.plan_asked();
        }
        assert!(grows_within_ms.contains(&waited), "{by_growth}: {waited}");
    }
}
