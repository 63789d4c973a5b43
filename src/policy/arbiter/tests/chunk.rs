//! Tests of larger prefill chunks.

use super::*;
use crate::{
    decision::{EngineDecision, PlanOutcome},
    engine_control::KvUse,
    speed::Calibration,
};

/// Returns a model of 40 layers of 20 MiB, with 100 KiB of workspace per token of a chunk.
fn large() -> ModelShape {
    ModelShape {
        layers: sample_shape(40, mib(20)).layers,
        workspace_bytes_per_token: Bytes::from_kib(100),
        ..shape()
    }
}

/// Returns a calibration with a typical read speed, and this time to compute a prompt's token on a MiB.
fn measured(prefill_ns_per_mib: u64) -> Event {
    Event::EngineCalibrated(Calibration {
        compute_ns_per_mib: 18_700,
        read_ns_per_mib: 488_000,
        read_busy_ns_per_mib: 488_000,
        slowed_ns_per_mib: 0,
        prefill_ns_per_mib,
    })
}

const ACCELERATOR: u64 = 590;
const PROCESSOR: u64 = 20_000;

/// Returns a rig with a partly streamed model, loaded before any measurement.
fn streaming() -> (Rig, EnginePlan) {
    let mut rig = Rig::new(with_engine(params()));
    rig.sample(0);
    rig.tell(Event::EngineInspected { shape: large() });
    let used = rig.wait(1).engine_applies();
    rig.wait(10).sample(used.whole_mib());
    assert_eq!(rig.plan_asked(), None, "nothing more fits");
    let plan = rig.snapshot().engine.in_force.unwrap();
    assert!(
        !plan.resident.is_empty() && plan.resident.len() < 20,
        "{plan:?}"
    );
    assert_eq!(plan.prefill_chunk.get(), 128, "nothing was measured");
    (rig, plan)
}

#[test]
fn a_chunk_becomes_larger_once_it_was_measured_that_reading_takes_longer() {
    let (mut rig, before) = streaming();
    let held = rig.held("llm");
    rig.tell(measured(PROCESSOR));
    assert_eq!(rig.plan_asked(), None, "computing takes longer");
    rig.tell(measured(ACCELERATOR));
    let (revision, plan) = rig.plan_asked().unwrap();
    assert_eq!(plan.prefill_chunk.get(), 512);
    assert!(
        plan.resident.is_subset(&before.resident) && plan.resident.len() < before.resident.len()
    );
    assert_eq!(plan.kv_capacity, before.kv_capacity);
    let bytes = rig.engine_applies_plan(revision, plan.clone());
    assert!(bytes <= held + mib(20) && rig.held("llm") == bytes);
    // Neither another speed nor time changes anything more.
    for prefill in [ACCELERATOR, PROCESSOR, ACCELERATOR + 50, 400] {
        rig.tell(measured(prefill));
        for _ in 0..30 {
            rig.wait(100).sample(bytes.whole_mib());
            assert_eq!(rig.plan_asked(), None, "{prefill}");
        }
    }
    assert_eq!(rig.snapshot().engine.in_force, Some(plan));
}

#[test]
fn a_chunk_that_is_under_way_is_left_alone() {
    let (mut rig, _) = streaming();
    rig.tell(activity(1, KvUse::default()));
    rig.tell(measured(ACCELERATOR));
    assert_eq!(rig.plan_asked(), None);
    rig.tell(activity(0, KvUse::default()));
    let (_, plan) = rig.plan_asked().unwrap();
    assert_eq!(plan.prefill_chunk.get(), 512);
}

#[test]
fn a_larger_chunk_is_given_up_by_its_cost_down_to_the_floor() {
    let (mut rig, _) = streaming();
    rig.tell(measured(ACCELERATOR));
    let with_chunk = rig.engine_applies();
    let floor = rig.arbiter.floor_plan().unwrap();
    assert_eq!(floor.prefill_chunk.get(), 128);
    let floor_bytes = large().plan_bytes(&floor);
    rig.operator_shed(with_chunk - floor_bytes);
    let (revision, plan) = rig.plan_asked().unwrap();
    assert_eq!(plan, floor);
    rig.engine_applies_plan(revision, plan);
    assert_eq!(rig.held("llm"), floor_bytes);
    // It regrows after the dwell and not before; growth that takes no time causes no back-off.
    let used = floor_bytes.whole_mib();
    let grown = (0..60).find_map(|tenths| {
        rig.wait(100).sample(used);
        rig.plan_asked().map(|(_, plan)| (tenths, plan))
    });
    let (tenths, plan) = grown.unwrap();
    assert!(
        (18..38).contains(&tenths) && plan.prefill_chunk.get() == 512,
        "{tenths}: {plan:?}"
    );
}

#[test]
fn an_engine_in_its_full_plan_has_no_larger_chunk() {
    let mut params = with_engine(params());
    params.budget.total = mib(2000);
    let mut rig = Rig::sampled(params);
    rig.request("camera", Class::AudioRealtime, 1500, 1500, 0);
    let camera = rig.granted();
    rig.tell(Event::EngineInspected { shape: large() });
    let small = rig.wait(1).engine_applies();
    // The camera uses only part of its lease.
    rig.wait(10).sample(1300 + small.whole_mib());
    rig.tell(measured(ACCELERATOR));
    // Less is streamed, read in the time of about 170 tokens.
    assert_eq!(rig.plan_asked().unwrap().1.prefill_chunk.get(), 256);
    rig.engine_applies();
    rig.releases(&camera, peer(1000));
    rig.wait(10).measure("camera", 0);
    for busy in [true, false] {
        rig.tell(activity(u32::from(busy), KvUse::default()));
        for _ in 0..60 {
            let used = rig.held("llm").whole_mib();
            rig.wait(100).sample(used);
            if rig.plan_asked().is_some() {
                rig.engine_applies();
            }
        }
        let plan = rig.snapshot().engine.in_force.unwrap();
        // It grows at any time, and during the running chunk at most to the full plan.
        let chunk = if busy { 256 } else { 128 };
        assert_eq!((plan.resident.len(), plan.prefill_chunk.get()), (40, chunk));
        let full = rig.snapshot().engine.full.unwrap();
        assert!(large().plan_bytes(&plan) <= large().plan_bytes(&full));
    }
    assert_eq!(rig.snapshot().engine.in_force, rig.snapshot().engine.full);
}

/// Reports a plan in which the engine keeps the running chunk.
fn keeps_chunk(rig: &mut Rig, chunk: Tokens) -> Bytes {
    let (revision, asked) = rig.plan_asked().unwrap();
    assert!(asked.prefill_chunk < chunk, "{asked:?}");
    let in_force = EnginePlan {
        prefill_chunk: chunk,
        ..asked
    };
    rig.engine_applies_plan(revision, in_force)
}

#[test]
fn a_chunk_under_way_is_asked_for_once_and_layers_are_given_meanwhile() {
    let (mut rig, _) = streaming();
    rig.tell(measured(ACCELERATOR));
    rig.engine_applies();
    let larger = rig.snapshot().engine.in_force.unwrap();
    rig.tell(activity(1, KvUse::default()));
    // Computing is now so slow that a larger chunk is worth nothing: it is given up first.
    rig.tell(measured(PROCESSOR));
    let held = rig.held("llm");
    rig.wait(10).sample(held.whole_mib());
    let wanted = rig.snapshot().memory.free.whole_mib() + 30;
    rig.request("asr", Class::AudioRealtime, wanted, wanted, 5000);
    let (_, asked) = rig.plan_asked().unwrap();
    assert_eq!(
        (asked.prefill_chunk.get(), &asked.resident),
        (128, &larger.resident)
    );
    // The running chunk continues: the missing memory comes from layers at once, and the chunk is not requested again.
    let kept = keeps_chunk(&mut rig, larger.prefill_chunk);
    assert_eq!((kept, rig.held("llm")), (held, held), "nothing is back");
    let (revision, layers) = rig.plan_asked().unwrap();
    assert_eq!(layers.prefill_chunk, larger.prefill_chunk);
    assert!(layers.resident.len() < larger.resident.len(), "{layers:?}");
    rig.engine_applies_plan(revision, layers.clone());
    assert_eq!(rig.granted().memory.held, mib(wanted));
    for _ in 0..30 {
        let used = rig.held("llm").whole_mib();
        rig.wait(100).sample(used);
        assert_eq!(rig.plan_asked(), None, "nothing is needed");
    }
    // The chunk ends, and the bytes it frees are logged.
    let smaller = EnginePlan {
        prefill_chunk: Tokens::new(128),
        ..layers
    };
    let before = rig.held("llm");
    let bytes = rig.engine_applies_plan(revision, smaller.clone());
    assert!(
        decided!(
            rig,
            Engine(EngineDecision::Applied {
                outcome: PlanOutcome::ChunkEnded { .. },
                ..
            })
        ),
        "{:#?}",
        rig.actions
    );
    assert_eq!(
        before.saturating_sub(bytes),
        large().chunk_bytes(Tokens::new(128), Tokens::new(512))
    );
    assert_eq!(rig.held("llm"), bytes);
    assert_eq!(rig.snapshot().engine.in_force, Some(smaller));
}

#[test]
fn a_chunk_under_way_is_asked_for_again_after_a_while_or_when_the_answer_has_ended() {
    for finishes in [false, true] {
        let (mut rig, _) = streaming();
        rig.tell(measured(ACCELERATOR));
        rig.engine_applies();
        rig.tell(activity(1, KvUse::default()));
        let chunk = rig.snapshot().engine.in_force.unwrap().prefill_chunk;
        let floor = rig.arbiter.floor_plan().unwrap();
        let all = rig.held("llm").saturating_sub(large().plan_bytes(&floor));
        rig.operator_shed(all);
        keeps_chunk(&mut rig, chunk);
        assert_eq!(rig.plan_asked(), None);
        // Nothing else can be given up.
        let shed = |rig: &mut Rig| {
            rig.operator_shed(all);
            rig.plan_asked().map(|(_, plan)| plan)
        };
        assert_eq!(shed(&mut rig), None);
        if finishes {
            rig.tell(activity(0, KvUse::default()));
        } else {
            rig.pass(1000);
        }
        assert_eq!(shed(&mut rig), Some(floor));
    }
}

#[test]
fn layers_that_should_have_made_room_for_a_chunk_come_back_at_once_where_a_prompt_was_first() {
    let (mut rig, before) = streaming();
    rig.tell(measured(ACCELERATOR));
    let (revision, plan) = rig.plan_asked().unwrap();
    assert!(plan.resident.len() < before.resident.len());
    rig.tell(activity(1, KvUse::default()));
    let without = EnginePlan {
        prefill_chunk: before.prefill_chunk,
        ..plan
    };
    let bytes = rig.engine_applies_plan(revision, without);
    let settle = params().shed.settle;
    let back = (0..30).find_map(|_| {
        rig.wait(100).sample(bytes.whole_mib());
        rig.plan_asked()
    });
    let (_, back) = back.unwrap();
    assert_eq!(back, before);
    assert!(
        rig.now.since_start() < settle + ms(1500),
        "{} is not the dwell",
        rig.now
    );
}
