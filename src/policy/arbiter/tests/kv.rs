//! Tests of the engine's reductions and their prices.

use super::*;
use crate::{
    decision::{EngineDecision, MemoryDecision, PlanOutcome},
    engine_control::KvUse,
    event::{IdleConversation, ShedLimit},
    params::ResidencyMode,
    pressure::PressureLevel,
    shedding::Source,
    speed::Timing,
};

/// Returns the candidates of the last call, with the bytes taken from each.
fn weighed(rig: &Rig) -> Vec<(Source, Option<Bytes>)> {
    let weighing = rig.actions.iter().find_map(|action| match action {
        Action::Weighed { weighing } => Some(weighing.clone()),
        _ => None,
    });
    let candidates = weighing.unwrap().candidates.into_iter();
    candidates
        .map(|weighed| (weighed.source, weighed.chosen))
        .collect()
}

/// Returns a rig with slow prompts, so that context is worth more than layers.
pub(super) fn with_slow_prompts(params: Params) -> Rig {
    with_prompts_of(params, 5000)
}

/// Returns a rig whose engine takes `token_us` per token of a prompt.
fn with_prompts_of(params: Params, token_us: u64) -> Rig {
    let mut rig = Rig::with_engine_ready(params);
    for _ in 0..20 {
        rig.tell(Event::EngineTimed(Timing {
            prompt_tokens: Tokens::new(100),
            prompt_us: 100 * token_us,
            answer_tokens: Tokens::new(50),
            answer_us: 50 * 20_000,
        }));
    }
    rig
}

pub(super) fn untouched(untouched: Bytes) -> Event {
    activity(
        0,
        KvUse {
            untouched,
            ..KvUse::default()
        },
    )
}

#[test]
fn the_order_is_computed_from_what_the_user_loses() {
    let mut rig = Rig::with_engine_ready(params());
    rig.tell(activity(
        0,
        KvUse {
            kept: Tokens::new(1024),
            ..KvUse::default()
        },
    ));
    rig.operator_shed(mib(16));
    assert_eq!(
        weighed(&rig),
        [
            (Source::UnusedKv, Some(mib(16))),
            (Source::PrefixKv, None),
            (Source::Layers, None)
        ]
    );
    let (_, plan) = rig.plan_asked().unwrap();
    assert_eq!(
        (plan.resident.len(), plan.kv_capacity),
        (8, Tokens::new(2048))
    );
}

#[test]
fn conversations_that_were_idle_for_long_go_before_a_layer_and_others_after_it() {
    let plan_after = |idle_s: u64| {
        let mut rig = with_prompts_of(params(), 200);
        let one = IdleConversation {
            capacity: Tokens::new(1024),
            tokens: Tokens::new(1000),
            idle_ms: 1000 * idle_s,
            superseded: false,
        };
        rig.tell(activity(
            0,
            KvUse {
                kept: Tokens::new(1024),
                beside: vec![one; 3],
                ..KvUse::default()
            },
        ));
        rig.operator_shed(mib(16));
        let chosen: Vec<Source> = weighed(&rig)
            .into_iter()
            .filter_map(|(source, chosen)| chosen.map(|_| source))
            .collect();
        (chosen, rig.plan_asked().unwrap().1)
    };
    let (chosen, long) = plan_after(1200);
    assert_eq!(chosen, [Source::PrefixKv]);
    assert_eq!(
        (long.resident.len(), long.kv_capacity),
        (8, Tokens::new(2048))
    );
    let (chosen, short) = plan_after(1);
    assert_eq!(chosen, [Source::Layers]);
    assert_eq!(short.kv_capacity, Tokens::new(4096));
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
    // Not allowed: not a candidate, and used KV stays.
    let mut rig = Rig::with_engine_ready(params());
    rig.tell(running(0, 0));
    rig.operator_shed(mib(30));
    assert!(weighed(&rig).iter().all(|(source, _)| *source != oldest));
    assert!(rig.plan_asked().unwrap().1.kv_capacity >= Tokens::new(4000));
    // Allowed, in a mode that prefers speed: the oldest tokens go before layers.
    let mut settings = with_engine(params());
    settings.engine.as_mut().unwrap().mode = ResidencyMode::MaxSpeed;
    let mut rig = Rig::with_engine_ready_in(settings);
    rig.tell(running(3072, 0));
    rig.operator_shed(mib(20));
    let balance = weighed(&rig);
    let given = |source: &Source| balance.iter().find(|(name, _)| name == source).unwrap().1;
    assert!(given(&oldest) > Some(mib(18)), "{balance:?}");
    let (revision, plan) = rig.plan_asked().unwrap();
    assert!(
        plan.kv_capacity < Tokens::new(3000) && plan.resident.len() == 8,
        "{plan:?}"
    );
    rig.engine_applies_plan(revision, plan);
    // A loss is logged once.
    rig.tell(running(1900, 1152));
    assert!(decided!(
        rig,
        Engine(EngineDecision::ContextLost { tokens: 1152, .. })
    ));
    rig.tell(running(1900, 1152));
    assert!(!decided!(rig, Engine(EngineDecision::ContextLost { .. })));
    // Tokens that the engine kept in spite of a plan are not requested again, even if the request allows their loss.
    rig.operator_shed(mib(10));
    let (revision, plan) = rig.plan_asked().unwrap();
    let kept = EnginePlan {
        kv_capacity: Tokens::new(plan.kv_capacity.get() + 128),
        ..plan
    };
    rig.engine_applies_plan(revision, kept.clone());
    rig.operator_shed(mib(10));
    assert!(weighed(&rig).iter().all(|(source, _)| *source != oldest));
    assert_eq!(rig.plan_asked().unwrap().1.kv_capacity, kept.kv_capacity);
    // In a mode that prefers context, layers go first.
    let mut settings = with_engine(params());
    settings.engine.as_mut().unwrap().mode = ResidencyMode::MaxContext;
    let mut rig = Rig::with_engine_ready_in(settings);
    rig.tell(running(3072, 0));
    rig.operator_shed(mib(30));
    assert_eq!(rig.plan_asked().unwrap().1.kv_capacity, Tokens::new(4096));
}

#[test]
fn kv_that_was_never_touched_counts_as_used() {
    let mut rig = Rig::with_engine_ready(params());
    rig.tell(activity(
        0,
        KvUse {
            untouched: mib(30),
            ..KvUse::default()
        },
    ));
    // 80 of 400 MiB look free, but the engine may touch 30 of them with the next token.
    rig.samples(320);
    assert_eq!(rig.snapshot().pressure.level, PressureLevel::Elevated);
    assert_eq!(rig.plan_asked(), None, "it may have all that it wanted");
    rig.wait(2000).sample(320);
    let (revision, plan) = rig.plan_asked().unwrap();
    assert!(plan.kv_capacity < Tokens::new(4096), "{plan:?}");
    let given = mib(132) - shape().plan_bytes(&plan);
    rig.tell(Event::EngineApplied(EngineApplied {
        revision,
        in_force: plan,
        freed: Bytes::ZERO,
        used: mib(132) - given,
        untouched: mib(30).saturating_sub(given),
        untouched_given: given.min(mib(30)),
        took: ms(1),
    }));
    assert_eq!(rig.held("llm"), mib(132) - given);
    let shed = |outcome: &PlanOutcome| matches!(outcome, PlanOutcome::Shed { untouched, .. } if *untouched > Bytes::ZERO);
    assert!(decided!(rig, Engine(EngineDecision::Applied { outcome, .. }) if shed(outcome)));
}

/// Otherwise a release would be logged that reached neither the page pool nor the system.
#[test]
fn kv_that_was_never_touched_is_no_release() {
    let mut rig = Rig::with_engine_ready(params());
    let pooled = |rig: &mut Rig| {
        let mut sample = sample_with(mib(132), rig.wait(10).now);
        sample.gpu.nvmap_pool = Some(mib(10));
        rig.tell(Event::Sampled(sample));
    };
    for (freed, released) in [(0, false), (7, true)] {
        pooled(&mut rig);
        rig.operator_shed(mib(14));
        let (revision, in_force) = rig.plan_asked().unwrap();
        let used = shape().plan_bytes(&in_force);
        let given = rig.held("llm") - used;
        rig.tell(Event::EngineApplied(EngineApplied {
            revision,
            in_force,
            freed: mib(freed),
            used,
            untouched: Bytes::ZERO,
            untouched_given: given - mib(freed),
            took: ms(1),
        }));
        pooled(&mut rig);
        let shown =
            decided!(rig, Memory(MemoryDecision::Released(release)) if release.bytes == mib(freed));
        assert_eq!(shown, released, "{:#?}", rig.actions);
        assert_eq!(decided!(rig, Memory(MemoryDecision::Released(_))), released);
    }
}

#[test]
fn kv_is_converted_only_where_that_is_allowed_and_by_its_cost() {
    let slow = Event::EngineTimed(Timing {
        prompt_tokens: Tokens::new(100),
        prompt_us: 100 * 2000,
        answer_tokens: Tokens::new(50),
        answer_us: 50 * 2000,
    });
    // 32 MiB of KV become 17 as q8 and 9 as q4. If context is expensive, the loss of q8 costs less than layers, and
    // that of q4 more than one or two of them; if it is cheap, the unused end of the KV costs least.
    for (least, is_slow, need, expected) in [
        (KvType::F16, true, 14, (6, 4096, KvType::F16)),
        (KvType::Q8, true, 14, (8, 4096, KvType::Q8)),
        (KvType::Q4, true, 14, (8, 4096, KvType::Q8)),
        (KvType::Q8, true, 40, (5, 4096, KvType::Q8)),
        (KvType::Q8, false, 2, (8, 3840, KvType::F16)),
    ] {
        let mut params = with_engine(params());
        params.engine.as_mut().unwrap().kv_type_least = least;
        let mut rig = Rig::with_engine_ready_in(params);
        for _ in 0..20 {
            if is_slow {
                rig.tell(slow.clone());
            }
        }
        rig.operator_shed(mib(need));
        let (revision, plan) = rig.plan_asked().unwrap();
        let asked = (plan.resident.len(), plan.kv_capacity.get(), plan.kv_type);
        assert_eq!(
            asked,
            expected,
            "{least} {is_slow} {need}: {:?}",
            weighed(&rig)
        );
        let before = rig.held("llm");
        let used = rig.engine_applies_plan(revision, plan);
        assert!(
            rig.held("llm") == used && before - used >= mib(need),
            "{used}"
        );
        // All of it regrows, the type last or together with the rest.
        rig.measure("llm", used.whole_mib());
        for _ in 0..40 {
            rig.wait(100).sample(used.whole_mib());
        }
        let grown = rig.snapshot().engine;
        assert_eq!(grown.asked.or(grown.in_force), grown.full);
    }
}

#[test]
fn an_operator_has_kv_kept_in_another_type_and_is_answered_with_what_came_of_it() {
    let mut rig = Rig::with_engine_ready(params());
    rig.keep_kv_as(KvType::Q8);
    let (revision, plan) = rig.plan_asked().unwrap();
    assert_eq!(
        (plan.resident.len(), plan.kv_capacity, plan.kv_type),
        (8, Tokens::new(4096), KvType::Q8)
    );
    assert_eq!(rig.held("llm"), mib(132), "asking frees nothing");
    let used = rig.engine_applies_plan(revision, plan);
    assert_eq!(used, mib(117));
    let Done::KvChanged {
        before,
        held,
        freed,
        ..
    } = rig.done()
    else {
        panic!("{:?}", rig.answer());
    };
    assert_eq!((before, held, freed), (mib(132), mib(117), mib(15)));
    rig.measure("llm", 117);
    for _ in 0..40 {
        rig.wait(100).sample(117);
    }
    assert_eq!(rig.plan_asked(), None, "it stays so");
    rig.keep_kv_as(KvType::Q8);
    assert_eq!(rig.done(), Done::KvIs(KvType::Q8));
    // A larger type again only if it fits: 52 + 8 MiB must stay free.
    rig.wait(100).sample(330);
    rig.keep_kv_as(KvType::F16);
    let more = Some(mib(15));
    let kv_type = KvType::F16;
    assert_eq!(rig.done(), Done::KvWhenRoom { kv_type, more });
    let full = rig.snapshot().engine.full.unwrap();
    assert_eq!(full.kv_type, KvType::F16);
    for _ in 0..40 {
        rig.wait(100).sample(117);
    }
    assert_eq!(rig.snapshot().engine.asked, Some(full));
    assert_eq!(rig.held("llm"), mib(132));
}

#[test]
fn a_larger_type_does_not_take_what_a_failed_growth_still_holds() {
    let mut rig = Rig::with_engine_ready(params());
    rig.keep_kv_as(KvType::Q8);
    rig.engine_applies();
    rig.operator_shed(mib(60));
    let small = rig.engine_applies();
    rig.regrow();
    rig.wait(100).sample(small.whole_mib());
    let (revision, _) = rig.plan_asked().unwrap();
    rig.tell(Event::EngineApplyFailed {
        revision,
        reason: "planted".to_owned(),
    });
    assert!(
        rig.held("llm") > small,
        "what it has taken by then is not known"
    );
    rig.wait(100).sample(345);
    rig.keep_kv_as(KvType::F16);
    assert!(
        matches!(rig.done(), Done::KvWhenRoom { more: Some(_), .. }),
        "{:?}",
        rig.answer()
    );
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
        let mut rig = Rig::with_engine_ready_in(params);
        rig.operator_shed(mib(16));
        let (_, plan) = rig.plan_asked().unwrap();
        assert_eq!(
            (plan.resident.len(), plan.kv_capacity.get()),
            expected,
            "{mode}"
        );
    }
}

#[test]
fn capacity_that_no_token_has_touched_is_shed_before_layers() {
    let mut rig = with_slow_prompts(params());
    rig.tell(untouched(mib(30)));
    rig.operator_shed(mib(16));
    let (_, plan) = rig.plan_asked().unwrap();
    assert_eq!(
        (plan.resident.len(), plan.kv_capacity),
        (8, Tokens::new(2048))
    );
}

#[test]
fn what_no_token_has_touched_is_held_and_not_used() {
    let mut rig = Rig::with_engine_ready(params());
    rig.measure("llm", 132);
    rig.tell(untouched(mib(30)));
    let lease = rig.lease("llm").unwrap();
    assert_eq!(
        (lease.memory.held, lease.memory.used),
        (mib(132), Some(mib(102)))
    );
    assert_eq!(rig.snapshot().memory.used, mib(102));
}

#[test]
fn a_shed_is_answered_with_what_limited_it() {
    let mut rig = Rig::with_engine_ready(params());
    rig.operator_shed(Bytes::from_gib(1));
    rig.engine_applies();
    let Answer::Shed(outcome) = rig.answer() else {
        panic!("{:?}", rig.answer());
    };
    let limit = ShedLimit::Floor { bytes: mib(28) };
    assert_eq!((outcome.freed, outcome.held), (mib(104), mib(28)));
    assert_eq!(outcome.limited_by, Some(limit));
}

#[test]
fn a_shed_of_an_engine_at_its_floor_names_what_the_engine_can_give_and_nothing_of_others() {
    let mut rig = Rig::with_engine_ready(params());
    rig.operator_shed(Bytes::from_gib(1));
    rig.engine_applies();
    rig.wait(10).operator_shed(Bytes::from_gib(100));
    let denial = rig.denial();
    assert_eq!(
        denial.to_string(),
        "cannot shed 100 GiB: the LLM can release 0 B of its 28 MiB, because it has shed all that it can"
    );
}

#[test]
fn a_shed_without_an_llm_says_so() {
    let mut rig = Rig::new(params());
    rig.sample(0);
    rig.operator_shed(mib(10));
    assert_eq!(
        rig.denial().to_string(),
        "cannot shed 10 MiB: no LLM is loaded"
    );
}

#[test]
fn what_an_engine_holds_and_has_not_touched_is_neither_used_nor_a_peak() {
    let mut rig = Rig::new(with_engine(params()));
    rig.tell(Event::EngineInspected { shape: shape() });
    rig.sample(0);
    let (revision, in_force) = rig.plan_asked().unwrap();
    rig.wait(10).tell(Event::EngineApplied(EngineApplied {
        untouched: mib(30),
        ..EngineApplied::new(revision, in_force, mib(132), ms(3))
    }));
    rig.wait(1).measure("llm", 132);
    let snapshot = rig.snapshot();
    let peak = snapshot.peaks.of("llm", Some(&shape().name));
    assert_eq!(peak.map(|peak| peak.bytes), Some(mib(102)));
    assert_eq!(snapshot.memory.used, mib(102));
}

#[test]
fn what_is_shed_next_is_what_is_shed_then() {
    let mut rig = Rig::with_engine_ready(params());
    rig.samples(132);
    let next = rig.arbiter.next_shed().unwrap();
    assert_eq!(
        (next.below, next.headroom, next.need),
        (mib(52), mib(268), mib(20))
    );
    assert_eq!(next.chosen[0].source, Source::UnusedKv, "{next:?}");
    // The headroom falls just below the watermark, for longer than the grace.
    rig.samples(349);
    let at_once = rig.plan_asked();
    rig.wait(2500);
    rig.samples(349);
    let (_, plan) = at_once.or_else(|| rig.plan_asked()).unwrap();
    assert!(plan.kv_capacity < Tokens::new(4096), "{plan:?}");
}

/// Returns the activity of an answer of up to `most` tokens that has used `used`.
fn answering(used: u32, most: u32) -> Event {
    let [used, most] = [used, most].map(Tokens::new);
    activity(
        1,
        KvUse {
            used,
            expected: most,
            ..KvUse::default()
        },
    )
}

#[test]
fn a_shed_leaves_a_running_answer_room_for_its_next_sentences() {
    let capacity_after = |answer| {
        let mut rig = Rig::with_engine_ready(params());
        rig.tell(answer);
        rig.operator_shed(mib(120));
        rig.plan_asked().unwrap().1.kv_capacity.get()
    };
    assert_eq!(
        capacity_after(answering(1000, 4000)),
        1152,
        "1000 tokens and 128, in blocks of 64"
    );
    assert_eq!(
        capacity_after(answering(1000, 1030)),
        1088,
        "no more than it may come to"
    );
    let prompt = Event::EngineActivity {
        requests: 1,
        kv_used: 128,
        kv_kept: 0,
        kv_prompt: 2000,
        kv_most: 4000,
        kv_droppable: 0,
        kv_dropped: 0,
        untouched: Bytes::ZERO,
        beside: Vec::new(),
    };
    assert_eq!(
        capacity_after(prompt),
        2176,
        "a prompt that is being read keeps its room"
    );
}

/// Returns a rig whose engine has just lost KV capacity during an answer, at Critical; its plan, and the bytes it
/// holds.
fn shed_while_answering() -> (Rig, EnginePlan, Bytes) {
    let mut rig = Rig::with_engine_ready(params());
    rig.tell(answering(1000, 4000));
    rig.samples(385);
    let held = rig.engine_applies();
    rig.wait(10).sample(385);
    assert_eq!(
        (rig.snapshot().pressure.level, rig.plan_asked()),
        (PressureLevel::Critical, None)
    );
    let plan = rig.snapshot().engine.in_force.unwrap();
    assert!(
        !plan.resident.is_empty() && plan.kv_capacity < Tokens::new(2000),
        "{plan:?}"
    );
    (rig, plan, held)
}

#[test]
fn a_running_answer_gets_room_from_layers_even_at_critical() {
    let (mut rig, before, held) = shed_while_answering();
    let needed = before.kv_capacity.get() + 128;
    rig.wants_capacity(needed, 4000);
    assert_eq!(rig.plan_asked(), None, "a request that has not begun waits");
    rig.answer_wants_capacity(needed, 4000);
    let (_, plan) = rig.plan_asked().unwrap();
    assert!(
        plan.kv_capacity >= Tokens::new(needed) && plan.resident.len() < before.resident.len(),
        "{plan:?}"
    );
    assert!(shape().plan_bytes(&plan) <= held, "{plan:?}");
}

#[test]
fn room_that_a_plan_gave_before_it_failed_stays_with_the_answer_that_uses_it() {
    let (mut rig, before, held) = shed_while_answering();
    let needed = before.kv_capacity.get() + 128;
    rig.answer_wants_capacity(needed, 4000);
    let (revision, _) = rig.plan_asked().unwrap();
    rig.engine_refuses(revision);
    rig.tell(answering(needed - 10, 4000));
    rig.pass(10_000);
    let (_, plan) = rig.plan_asked().unwrap();
    assert!(plan.kv_capacity >= Tokens::new(needed), "{plan:?}");
    assert!(shape().plan_bytes(&plan) <= held, "{plan:?}");
}

#[test]
fn a_running_answer_gets_what_it_needs_and_no_more_of_what_is_free_before_the_dwell_is_over() {
    let mut rig = Rig::with_engine_ready(params());
    rig.tell(answering(1000, 4000));
    rig.operator_shed(mib(40));
    rig.engine_applies();
    rig.wait(10).sample(90);
    let before = rig.snapshot().engine.in_force.unwrap();
    let needed = before.kv_capacity.get() + 128;
    rig.wants_capacity(needed, 4000);
    let (_, plan) = rig.plan_asked().unwrap();
    assert!(
        plan.resident.len() < before.resident.len(),
        "a request that has not begun gets it from layers: {plan:?}"
    );
    let mut rig = Rig::with_engine_ready(params());
    rig.tell(answering(1000, 4000));
    rig.operator_shed(mib(40));
    rig.engine_applies();
    rig.wait(10).sample(90);
    rig.answer_wants_capacity(needed, 4000);
    let (_, plan) = rig.plan_asked().unwrap();
    assert_eq!(
        (plan.kv_capacity, &plan.resident),
        (Tokens::new(needed), &before.resident),
        "{plan:?}"
    );
}

#[test]
fn a_layer_that_a_running_answer_takes_serves_it_for_more_than_one_block() {
    let (mut rig, before, _) = shed_while_answering();
    rig.answer_wants_capacity(before.kv_capacity.get() + 64, 4000);
    let (_, plan) = rig.plan_asked().unwrap();
    // A layer of 10 MiB is worth 640 tokens, less the ring for the first one.
    assert_eq!(plan.resident.len() + 1, before.resident.len(), "{plan:?}");
    assert!(
        plan.kv_capacity.get() >= before.kv_capacity.get() + 512,
        "{plan:?}"
    );
}
