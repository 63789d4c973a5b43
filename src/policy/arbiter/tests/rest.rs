//! Tests of workers at rest, start orders, and leases of workers.

use super::*;
use crate::{
    decision::{MemoryDecision, WorkerDecision},
    params::VariantParams,
    pressure::{GpuReading, GroupRoom, MemoryReading, PressureLevel},
    reason::StopReason,
    snapshot::{
        EngineState, Rest,
        WorkerState::{self, AwaitingMemory, BackingOff, Ready, Starting, Stopped, Stopping},
    },
};

fn sleepy(name: &str, mib_held: u64) -> WorkerParams {
    WorkerParams {
        rest: RestParams {
            idle_stop_after: Some(ms(60_000)),
            ..RestParams::default()
        },
        ..worker(name, mib_held)
    }
}

fn state(rig: &Rig, name: &str) -> (WorkerState, Option<Rest>) {
    let view = rig.worker(name);
    (view.state, view.rest)
}

/// Returns a rig with one ready worker.
fn with_ready(worker: WorkerParams, used_mib: u64) -> Rig {
    let name = worker.name.clone();
    let mut rig = Rig::with_workers(vec![worker]);
    rig.ready(&name, used_mib);
    rig
}

#[test]
fn a_worker_without_work_is_stopped_and_the_next_request_wakes_it() {
    let mut rig = with_ready(sleepy("tts", 100), 90);
    rig.pass(59_000);
    assert!(!rig.stops("tts"));
    rig.pass(2000);
    assert!(rig.stops("tts"), "{:#?}", rig.actions);
    rig.wait(10).exits("tts", true, "exit code 0");
    assert_eq!(state(&rig, "tts"), (Stopped, Some(Rest::Idle)));
    assert_eq!(rig.held("tts"), Bytes::ZERO);
    rig.pass(600_000);
    assert!(!rig.starts("tts"), "it sleeps until a request needs it");

    // Its memory stays reserved against tenants of the same class: 100 of a budget of 400.
    rig.request("other", Class::AudioRealtime, 301, 301, 0);
    assert!(matches!(rig.denial(), Denial::InsufficientMemory { free, .. } if free == mib(300)));
    rig.wait(1).wanted("tts");
    assert!(rig.starts("tts"), "{:#?}", rig.actions);
    assert_eq!(rig.held("tts"), mib(100));
}

#[test]
fn work_puts_off_the_sleep_and_a_request_in_the_last_moment_ends_the_winding_up() {
    let mut rig = with_ready(sleepy("tts", 100), 90);
    rig.busy("tts", 1);
    rig.pass(100_000);
    assert!(!rig.stops("tts"), "it works");
    rig.busy("tts", 0);
    rig.pass(59_990);
    assert!(!rig.worker("tts").winding_up);
    rig.pass(10);
    assert!(rig.worker("tts").winding_up, "APIs send it nothing new");
    rig.busy("tts", 1);
    assert!(!rig.worker("tts").winding_up, "one was on its way");
    rig.pass(1000);
    assert_eq!(state(&rig, "tts"), (Ready, None));
}

#[test]
fn the_engine_grows_into_the_space_of_one_that_sleeps_and_gives_it_back_when_it_wakes() {
    let mut settings = with_engine(params());
    settings.budget.total = mib(252);
    settings.workers = vec![sleepy("tts", 150)];
    let mut rig = Rig::sampled(settings);
    rig.tell(Event::EngineInspected { shape: shape() });
    let small = rig.engine_applies();
    rig.ready("tts", 150);
    rig.pass(61_000);
    rig.wait(10).exits("tts", true, "exit code 0");
    let used = rig.held("llm").whole_mib();
    rig.wait(10).sample(used);
    rig.wait(5000).sample(used);
    let full = rig.engine_applies();
    assert!(full > small, "{full} is not above {small}");

    rig.wait(10).sample(full.whole_mib());
    rig.wait(1).wanted("tts");
    assert_eq!(rig.worker("tts").state, AwaitingMemory);
    rig.engine_applies();
    assert_eq!(rig.worker("tts").state, Starting, "with its memory");
    assert_eq!(rig.held("tts"), mib(150));
}

fn in_two_sizes() -> WorkerParams {
    let variant = |name: &str, size| VariantParams {
        name: name.to_owned(),
        steady: mib(size),
        peak: mib(size),
    };
    WorkerParams {
        variants: vec![variant("open", 100), variant("grammar", 40)],
        rest: RestParams {
            idle_shrink_after: Some(ms(10_000)),
            ..RestParams::default()
        },
        ..worker("asr", 100)
    }
}

fn resized_to(rig: &Rig) -> Option<String> {
    rig.actions.iter().find_map(|action| match action {
        Action::ResizeWorker { variant, .. } => Some(variant.clone()),
        _ => None,
    })
}

fn resizes(rig: &mut Rig, variant: &str, used_mib: u64) {
    rig.wait(10).tell(Event::WorkerResized(WorkerResized {
        worker: "asr".to_owned(),
        variant: variant.to_owned(),
        used: Some(mib(used_mib)),
        error: None,
    }));
}

#[test]
fn a_worker_without_work_takes_its_smallest_variant_and_leaves_it_with_the_next_request() {
    let mut rig = with_ready(in_two_sizes(), 100);
    rig.pass(10_000);
    assert_eq!(resized_to(&rig).as_deref(), Some("grammar"));
    resizes(&mut rig, "grammar", 40);
    assert_eq!(rig.held("asr"), mib(40));
    rig.pass(60_000);
    assert_eq!(resized_to(&rig), None, "once is enough");
    rig.busy("asr", 1);
    assert_eq!(resized_to(&rig).as_deref(), Some("open"));
    assert_eq!(rig.held("asr"), mib(100), "booked before it grows");
    resizes(&mut rig, "open", 100);
    rig.busy("asr", 0);
    rig.pass(10_000);
    assert_eq!(resized_to(&rig).as_deref(), Some("grammar"), "and again");
}

#[test]
fn a_worker_that_cannot_become_smaller_is_not_asked_again_until_it_has_worked() {
    let mut rig = with_ready(in_two_sizes(), 100);
    rig.pass(10_000);
    rig.wait(10).tell(Event::WorkerResized(WorkerResized {
        worker: "asr".to_owned(),
        variant: "open".to_owned(),
        used: Some(mib(100)),
        error: Some("no grammar".to_owned()),
    }));
    rig.pass(60_000);
    assert_eq!(resized_to(&rig), None);
    rig.busy("asr", 1);
    assert_eq!(resized_to(&rig), None, "there is no size to go back to");
    rig.busy("asr", 0);
    rig.pass(10_000);
    assert_eq!(resized_to(&rig).as_deref(), Some("grammar"));
}

#[test]
fn a_worker_that_outgrows_its_bounds_ends_its_work_and_is_restarted_before_any_other_holder() {
    let mut rig = with_ready(
        WorkerParams {
            peak: mib(120),
            rest: recycled_above(150),
            ..worker("detector", 100)
        },
        100,
    );
    rig.busy("detector", 1);
    rig.wait(100).measure("detector", 149);
    assert!(!rig.worker("detector").winding_up, "within its bounds");
    rig.wait(100).measure("detector", 151);
    rig.wait(1000).measure("detector", 151);
    assert!(rig.worker("detector").winding_up);
    let outgrown = Decision::from(WorkerDecision::Outgrown {
        worker: "detector".to_owned(),
        used: mib(151),
        above: mib(150),
        held: rig.held("detector"),
        requests: 1,
    });
    assert!(
        rig.decisions().any(|decision| *decision == outgrown),
        "{:#?}",
        rig.actions
    );
    rig.pass(5000);
    assert!(!rig.stops("detector"), "it ends its request first");

    // A request waits for all free memory; the worker's own memory stays reserved.
    rig.request("other", Class::AudioRealtime, 320, 320, 60_000);
    rig.busy("detector", 0);
    assert!(rig.stops("detector"));
    rig.wait(10).exits("detector", true, "exit code 0");
    assert!(rig.starts("detector"), "{:#?}", rig.actions);
    assert_eq!(rig.held("detector"), mib(120));
    assert_eq!(rig.worker("detector").failures, 0, "that was no failure");

    // Outgrown again at once: not recycled before it has run for a while.
    rig.ready("detector", 151);
    for _ in 0..50 {
        rig.wait(1000).measure("detector", 151);
    }
    assert!(!rig.worker("detector").winding_up);
    for _ in 0..80 {
        rig.wait(1000).measure("detector", 151);
    }
    assert_eq!(rig.worker("detector").state, Stopping);
}

#[test]
fn what_a_worker_has_grown_to_is_learned_when_it_goes_on_with_it_and_not_when_it_ends_for_it() {
    let mut rig = with_ready(
        WorkerParams {
            peak: mib(120),
            rest: recycled_above(120),
            ..worker("detector", 100)
        },
        100,
    );
    let learned = |rig: &Rig| {
        let peaks = rig.snapshot().peaks;
        peaks.of("detector", None).map(|peak| peak.bytes)
    };
    let uses = |rig: &mut Rig, used: u64, peak: u64| {
        rig.wait(100).peak("detector", peak);
        rig.measure("detector", used);
    };
    // The use of its start is learned at once, at any size.
    uses(&mut rig, 100, 130);
    assert_eq!(learned(&rig), Some(mib(130)));
    // Memory that it freed by itself was a need of its work.
    uses(&mut rig, 105, 150);
    assert_eq!(learned(&rig), Some(mib(150)));
    // Memory that it keeps causes the recycle; the next start reserves the earlier peak.
    for _ in 0..4 {
        uses(&mut rig, 300, 310);
    }
    assert!(rig.worker("detector").winding_up);
    rig.pass(100);
    assert_eq!(learned(&rig), Some(mib(150)));
    rig.wait(10).exits("detector", true, "exit code 0");
    assert!(rig.starts("detector"), "{:#?}", rig.actions);
    assert_eq!(rig.held("detector"), mib(165), "1.1 times 150");
    // If it grows to the same size at once, it is not recycled again: that is its size.
    rig.ready("detector", 100);
    uses(&mut rig, 100, 110);
    for _ in 0..4 {
        uses(&mut rig, 300, 310);
    }
    assert!(!rig.worker("detector").winding_up);
    assert_eq!(learned(&rig), Some(mib(310)));
}

#[test]
fn a_worker_that_was_to_be_restarted_is_even_if_its_memory_is_taken_first() {
    let mut rig = with_ready(
        WorkerParams {
            class: Class::Batch,
            peak: mib(120),
            rest: recycled_above(150),
            ..worker("detector", 100)
        },
        100,
    );
    rig.wait(10).measure("detector", 340);
    rig.wait(1000).measure("detector", 340);
    assert!(rig.worker("detector").winding_up);
    rig.samples(395);
    assert_eq!(rig.snapshot().pressure.level, PressureLevel::Critical);
    assert!(rig.stops("detector"), "{:#?}", rig.actions);
    let by_shed = |action: &Action| {
        matches!(
            action,
            Action::StopWorker {
                reason: StopReason::Reclaim { .. },
                ..
            }
        )
    };
    assert!(rig.actions.iter().any(by_shed), "before it had wound up");
    rig.wait(10).exits("detector", true, "SIGTERM");
    // At its grown size of 340 MiB it would not fit beside another holder.
    assert!(rig.starts("detector"), "{:#?}", rig.actions);
    assert_eq!(state(&rig, "detector"), (Starting, None));
}

#[test]
fn no_worker_is_stopped_in_its_work_for_its_size_while_memory_is_free() {
    let mut rig = with_ready(
        WorkerParams {
            rest: recycled_above(150),
            ..worker("detector", 100)
        },
        100,
    );
    rig.busy("detector", 1);
    rig.wait(10).measure("detector", 300);
    rig.wait(1000).measure("detector", 300);
    assert!(rig.worker("detector").winding_up);
    rig.pass(30_000);
    assert!(!rig.stops("detector"), "its work goes on");
    assert!(
        !rig.worker("detector").winding_up,
        "and it takes requests again"
    );
    assert_eq!(rig.held("detector"), mib(300));
    rig.busy("detector", 0);
    let recycled = (0..130).any(|_| {
        rig.wait(1000).measure("detector", 300);
        rig.stops("detector")
    });
    assert!(recycled, "it is recycled when it is idle");
}

/// A voice that uses 52 MiB at rest and 316 with a long sentence, configured with 180 and 260.
#[test]
fn a_lease_follows_a_worker_that_breathes_and_it_is_neither_recycled_nor_named() {
    let rest = RestParams {
        recycle_leaks: true,
        ..RestParams::default()
    };
    let mut rig = with_ready(
        WorkerParams {
            peak: mib(260),
            rest,
            ..worker("tts", 180)
        },
        52,
    );
    assert_eq!(rig.held("tts"), mib(180));
    let free = rig.snapshot().memory.free;
    for sentence in 0..20 {
        rig.wait(100).busy("tts", 1);
        if sentence > 0 {
            assert!(
                rig.held("tts") >= mib(316),
                "what it took last time is booked before it takes it"
            );
        }
        for used in [120, 260, 316] {
            rig.wait(1000).peak("tts", used);
            rig.measure("tts", used);
            assert_eq!(rig.snapshot().memory.unaccounted, mib(0), "{used}");
            assert!(rig.held("tts") >= mib(used));
        }
        rig.busy("tts", 0);
        rig.wait(1000).measure("tts", 75);
        assert_eq!(
            rig.held("tts"),
            mib(180),
            "it is back at what it is set to need"
        );
        assert_eq!(rig.snapshot().memory.free, free);
        assert_eq!(rig.worker("tts").state, Ready);
        assert!(!rig.worker("tts").winding_up);
    }
    let noise = |decision: &Decision| {
        matches!(
            decision,
            Decision::Lease(crate::decision::LeaseDecision::BeyondLease { .. })
        ) || matches!(decision, Decision::Worker(WorkerDecision::Outgrown { .. }))
    };
    assert!(!rig.decisions().any(noise), "{:#?}", rig.actions);
    let learned = rig.snapshot().peaks.of("tts", None).map(|peak| peak.bytes);
    assert_eq!(
        learned,
        Some(mib(316)),
        "the next start is by what it needs"
    );
}

#[test]
fn a_leak_ends_when_memory_is_wanted_and_the_worker_is_idle() {
    let rest = RestParams {
        recycle_leaks: true,
        ..RestParams::default()
    };
    let mut rig = with_ready(
        WorkerParams {
            peak: mib(120),
            rest,
            ..worker("tts", 100)
        },
        100,
    );
    let mut used = 100;
    let request = |rig: &mut Rig, used: u64| {
        rig.wait(100).busy("tts", 1);
        rig.wait(900).measure("tts", used);
        assert!(!rig.stops("tts"), "not in its work");
        rig.busy("tts", 0);
        rig.wait(1000).measure("tts", used);
        rig.pass(100);
    };
    while used < 200 {
        used += 8;
        request(&mut rig, used);
        assert!(
            !rig.worker("tts").winding_up && !rig.stops("tts"),
            "memory is free: {used} MiB"
        );
        assert_eq!(rig.held("tts"), mib(used));
    }
    for _ in 0..40 {
        used += 8;
        request(&mut rig, used);
        if rig.stops("tts") {
            break;
        }
    }
    assert!(rig.stops("tts"), "{used} MiB: {:#?}", rig.actions);
    assert!(
        rig.snapshot().memory.free < mib(64),
        "only when little was left"
    );
    rig.wait(10).exits("tts", true, "SIGTERM");
    assert!(rig.starts("tts"));
    assert!(
        rig.held("tts") < mib(200),
        "by what it needed before it leaked: {}",
        rig.held("tts")
    );
}

#[test]
fn no_request_starts_what_an_operator_has_stopped() {
    let mut rig = with_ready(sleepy("tts", 100), 90);
    rig.command("tts", WorkerCommand::Stop);
    rig.wait(10).exits("tts", true, "exit code 0");
    assert_eq!(state(&rig, "tts"), (Stopped, Some(Rest::Operator)));
    rig.wait(1).wanted("tts");
    assert!(!rig.starts("tts"));
    rig.command("tts", WorkerCommand::Start);
    assert!(rig.starts("tts"));
    assert_eq!(state(&rig, "tts"), (Starting, None));
}

#[test]
fn a_worker_that_is_not_started_by_itself_is_started_by_the_first_request() {
    let mut rig = Rig::with_workers(vec![by_hand("tts", 100)]);
    rig.pass(10_000);
    assert!(!rig.starts("tts"));
    rig.wait(1).wanted("tts");
    assert!(rig.starts("tts"));
}

#[test]
fn workers_wait_for_those_they_come_after_and_for_none_that_has_given_up() {
    let mut settings = params();
    let after = |name: &str, others: &[&str]| WorkerParams {
        start: StartParams {
            after: others.iter().map(|&other| other.to_owned()).collect(),
            ..worker(name, 30).start
        },
        ..worker(name, 30)
    };
    settings.workers = vec![after("a", &["c"]), after("b", &["a"]), after("c", &[])];
    let mut rig = Rig::sampled(settings);
    assert!(rig.starts("c") && !rig.starts("a"));
    // A failed worker no longer holds up the order of starts.
    rig.wait(10).exits("c", false, "exit code 3");
    assert!(rig.starts("a") && !rig.starts("b"));
    rig.ready("a", 30);
    assert!(rig.starts("b"));
}

#[test]
fn a_worker_that_asks_for_itself_takes_over_what_was_booked_for_it() {
    let mut rig = with_ready(
        WorkerParams {
            own_lease: true,
            peak: mib(250),
            ..worker("vision", 250)
        },
        200,
    );
    assert_eq!(rig.held("vision"), mib(250), "its peak until it has asked");
    // 150 are free beside it: 300 fit only because the lease replaces its own reservation.
    rig.request("vision", Class::Interactive, 300, 300, 0);
    let lease = rig.granted();
    assert_eq!(lease.memory.held, mib(300));
    assert_eq!(
        rig.snapshot().memory.held,
        mib(300),
        "nothing is booked twice"
    );
    rig.wait(100).measure("vision", 280);
    assert_eq!(rig.snapshot().memory.unaccounted, Bytes::ZERO);
    // Its name is reserved.
    rig.wait(10).exits("vision", false, "exit code 1");
    rig.wait(10).lost(&lease);
    rig.request("vision", Class::Interactive, 10, 10, 0);
    assert!(
        matches!(rig.denial(), Denial::Invalid { .. }),
        "it does not run"
    );
}

/// Runs 1 and 2 of a board with 15 656 MiB: TTS and ASR are started before the LLM, or after it. In both, every peak is
/// booked before it is touched, and all run in the end.
#[test]
fn orin_nx_v080_ends_well_in_either_order() {
    for speech_first in [true, false] {
        let mut settings = with_engine(params());
        settings.workers = vec![
            WorkerParams {
                peak: mib(45),
                start: StartParams {
                    before_engine: speech_first,
                    start_order: 0,
                    ..worker("tts", 34).start
                },
                ..worker("tts", 34)
            },
            WorkerParams {
                peak: mib(130),
                start: StartParams {
                    before_engine: speech_first,
                    start_order: 1,
                    ..worker("asr", 60).start
                },
                ..worker("asr", 60)
            },
        ];
        let mut rig = Rig::new(settings);
        let first = rig.tell(Event::EngineInspected { shape: shape() }).to_vec();
        rig.sample(0);
        rig.actions.splice(0..0, first);
        let mut order = Vec::new();
        let mut used = 0;
        for _ in 0..40 {
            if rig.starts("tts") || rig.starts("asr") {
                let name = if rig.starts("tts") { "tts" } else { "asr" };
                order.push(name);
                used += if name == "tts" { 34 } else { 60 };
                rig.ready(name, if name == "tts" { 34 } else { 60 });
            } else if rig.plan_asked().is_some()
                && rig.snapshot().engine.state == EngineState::Loading
            {
                order.push("llm");
                used += rig.engine_applies().whole_mib();
            } else {
                rig.wait(100).sample(used);
            }
        }
        let expected = if speech_first {
            ["tts", "asr", "llm"]
        } else {
            ["llm", "tts", "asr"]
        };
        assert_eq!(order, expected);
        assert!(
            ["tts", "asr"]
                .iter()
                .all(|name| rig.worker(name).state == Ready)
        );
        assert_eq!(rig.snapshot().engine.state, EngineState::Ready);
        assert_eq!(
            rig.snapshot()
                .workers
                .iter()
                .map(|worker| worker.failures)
                .sum::<u32>(),
            0
        );
    }
}

/// The LLM fails and TTS has grown: the LLM is started first, and TTS, stopped in the meantime, after it.
#[test]
fn zoe_outage_starts_the_llm_first_and_then_the_voice() {
    let mut settings = with_engine(params());
    settings.workers = vec![WorkerParams {
        peak: mib(160),
        rest: recycled_above(200),
        ..worker("tts", 150)
    }];
    let mut rig = Rig::sampled(settings);
    rig.tell(Event::EngineInspected { shape: shape() });
    rig.engine_applies();
    rig.ready("tts", 150);
    // TTS grows to 360 of 400 while the LLM is gone, and keeps it.
    rig.wait(10).engine_fails(None);
    rig.wait(10).measure("tts", 360);
    rig.samples(360);
    rig.wait(600).measure("tts", 360);
    rig.sample(360);
    assert!(rig.worker("tts").winding_up, "what it keeps is not its own");
    rig.pass(100);
    assert!(rig.stops("tts"));
    rig.wait(10).exits("tts", true, "exit code 0");
    let mut order = Vec::new();
    for _ in 0..200 {
        if rig.plan_asked().is_some() {
            order.push("llm");
            rig.engine_applies();
        } else if rig.starts("tts") {
            order.push("tts");
            rig.ready("tts", 150);
        } else {
            let used = rig.snapshot().memory.held.whole_mib();
            rig.wait(100).samples(used);
        }
        if order.len() >= 2 && rig.worker("tts").state == Ready {
            break;
        }
    }
    assert_eq!(rig.worker("tts").state, Ready, "{order:?}");
    assert_eq!(rig.snapshot().engine.state, EngineState::Ready, "{order:?}");
    assert_eq!(rig.worker("tts").failures, 0);
}

/// A reload needs 6.3 GB while a neighbour uses a part of it: nothing is started into too little memory, so a crash
/// loop has at most one failed start.
#[test]
fn zoe_crashloop_has_one_failed_start_at_the_most() {
    let mut settings = Params::for_budget(mib(15_656), mib(1224), Scope::Machine);
    settings.pressure.dwell = ms(2000);
    settings.workers = vec![WorkerParams {
        class: Class::LlmElastic,
        peak: mib(6930),
        ..worker("llama-server", 6300)
    }];
    let mut rig = Rig::new(settings);
    let machine = |rig: &mut Rig, used_mib: u64| rig.machine(15_656, used_mib).to_vec();
    let base = 1224 + 4000; // the OS, and a container without a lease
    machine(&mut rig, base);
    assert!(rig.starts("llama-server"), "{:#?}", rig.actions);
    rig.ready("llama-server", 6300);
    machine(&mut rig, base + 6300);
    // The neighbour starts, and the next allocation fails.
    rig.wait(1000);
    machine(&mut rig, base + 6300 + 3800);
    rig.wait(10).exits(
        "llama-server",
        false,
        "exit code 1: NvMapMemAllocInternalTagged: 1075072515 error 12",
    );
    let (mut starts, mut failed) = (0, 0);
    for second in 0..120 {
        let neighbour = if second < 90 { 3800 } else { 0 };
        let loaded = rig.worker("llama-server").state == Ready;
        rig.wait(1000);
        let used = base + neighbour + if loaded { 6300 } else { 0 };
        let mut actions = machine(&mut rig, used);
        actions.extend_from_slice(rig.pass(1));
        let started = actions
            .iter()
            .any(|action| matches!(action, Action::StartWorker { .. }));
        if started {
            starts += 1;
            if neighbour > 0 {
                failed += 1;
                rig.wait(10)
                    .exits("llama-server", false, "exit code 1: error 12");
            } else {
                rig.ready("llama-server", 6300);
            }
        } else if neighbour > 0 {
            let state = rig.worker("llama-server").state;
            assert!(
                matches!(state, BackingOff | AwaitingMemory | Stopped),
                "{state:?}"
            );
        }
    }
    assert_eq!(
        (starts, failed),
        (1, 0),
        "it waits for its memory, and that costs no attempt"
    );
    assert_eq!(rig.worker("llama-server").state, Ready);
    assert_ne!(rig.worker("llama-server").state, Stopping);
}

#[test]
fn a_shed_is_split_into_what_the_page_pool_of_the_gpu_keeps_and_what_any_holder_can_have() {
    let mut rig = Rig::with_engine_ready(params());
    let sample = |rig: &mut Rig, pool: u64, available: u64| {
        let sample = Sample {
            taken_at: rig.wait(10).now,
            memory: MemoryReading {
                mem_total: Bytes::from_gib(8),
                mem_available: mib(available),
                ..MemoryReading::default()
            },
            gpu: GpuReading {
                nvmap_pool: Some(mib(pool)),
                ..GpuReading::default()
            },
            scope_used: Some(mib(132)),
            ..Sample::default()
        };
        rig.tell(Event::Sampled(sample)).to_vec()
    };
    sample(&mut rig, 10, 4096);
    let ticket = rig.ticket();
    rig.wait(10).tell(Event::OperatorShed {
        ticket,
        bytes: mib(40),
        by: None,
    });
    rig.wait(10).engine_applies();
    sample(&mut rig, 40, 4100);
    let release = rig.snapshot().last_release.unwrap();
    assert_eq!((release.to_pool, release.to_os), (mib(30), mib(4)));
    assert!(release.bytes >= mib(40), "{release:?}");
    let decided = Decision::from(MemoryDecision::Released(release));
    assert_eq!(rig.decisions().collect::<Vec<_>>(), [&decided]);
    // CPU programs have almost no free memory, and the pool holds 300 MiB.
    let actions = sample(&mut rig, 300, 30);
    assert!(
        actions.contains(&Action::EmptyPagePool { bytes: mib(300) }),
        "{actions:#?}"
    );
}

#[test]
fn a_neighbour_in_the_same_control_group_is_pressure_however_much_the_machine_has() {
    let mut rig = Rig::new(with_engine(Params::for_budget(
        mib(400),
        Bytes::ZERO,
        Scope::Machine,
    )));
    let sample = |rig: &mut Rig, left: u64| {
        let sample = Sample {
            taken_at: rig.wait(10).now,
            memory: MemoryReading {
                mem_total: Bytes::from_gib(8),
                mem_available: Bytes::from_gib(7),
                mem_free: Bytes::from_gib(7),
                group: Some(GroupRoom {
                    limit: mib(400),
                    left: mib(left),
                }),
            },
            ..Sample::default()
        };
        rig.tell(Event::Sampled(sample)).to_vec()
    };
    sample(&mut rig, 390);
    rig.tell(Event::EngineInspected { shape: shape() });
    rig.engine_applies();
    sample(&mut rig, 250);
    sample(&mut rig, 250);
    let before = rig.snapshot();
    assert_eq!(before.pressure.level, PressureLevel::Normal);
    assert!(
        before
            .pressure
            .headroom
            .is_some_and(|headroom| headroom <= mib(250)),
        "{:?}",
        before.pressure
    );
    let mut actions = sample(&mut rig, 10);
    actions.extend(sample(&mut rig, 10));
    assert_eq!(rig.snapshot().pressure.level, PressureLevel::Critical);
    assert!(
        actions
            .iter()
            .any(|action| matches!(action, Action::ApplyPlan { .. })),
        "{actions:#?}"
    );
}

/// A voice that keeps 250 MiB after a long sentence, and uses 50 after a start.
#[test]
fn a_grown_worker_that_starts_quickly_is_renewed_for_a_request_that_waits() {
    let rest = RestParams {
        recycle_leaks: true,
        ..RestParams::default()
    };
    let mut rig = Rig::with_workers(vec![WorkerParams {
        peak: mib(100),
        rest,
        ..worker("tts", 60)
    }]);
    rig.wait(900).ready("tts", 50);
    rig.wait(10).peak("tts", 52);
    rig.measure("tts", 50);
    rig.request("camera", Class::AudioRealtime, 120, 120, 0);
    rig.granted();
    rig.wait(10).busy("tts", 1);
    rig.wait(200).measure("tts", 250);
    rig.busy("tts", 0);
    let stopped = |rig: &mut Rig| {
        (0..20).any(|_| {
            rig.wait(200).measure("tts", 250);
            rig.stops("tts")
        })
    };
    assert!(!stopped(&mut rig), "nothing waits");
    rig.request("microphone", Class::AudioRealtime, 100, 100, 60_000);
    assert!(stopped(&mut rig), "{:#?}", rig.actions);
    rig.wait(10).exits("tts", true, "exit code 0");
    assert_eq!(rig.held("microphone"), mib(100));
}

/// The engine streams layers beside a voice that has kept 250 MiB; restarted, it uses 50.
#[test]
fn a_grown_worker_is_renewed_for_an_engine_that_streams_once_it_rests_and_has_run_for_long() {
    let rest = RestParams {
        recycle_leaks: true,
        ..RestParams::default()
    };
    let voice = WorkerParams {
        peak: mib(100),
        rest,
        ..worker("tts", 60)
    };
    let mut rig = Rig::with_engine_ready(Params {
        workers: vec![voice],
        ..params()
    });
    rig.wait(900).ready("tts", 50);
    rig.wait(10).peak("tts", 52);
    rig.measure("tts", 50);
    let grow = |rig: &mut Rig| {
        rig.wait(10).busy("tts", 1);
        rig.wait(200).measure("tts", 250);
        rig.busy("tts", 0);
    };
    let first_stop = |rig: &mut Rig| {
        (1..100u64).find(|_| {
            rig.wait(200).measure("tts", 250);
            rig.stops("tts")
        })
    };
    grow(&mut rig);
    assert_eq!(first_stop(&mut rig), None, "the engine has all its layers");
    rig.operator_shed(mib(400));
    rig.engine_applies();
    grow(&mut rig);
    // One second after its last sentence, plus a quarter as margin.
    assert!(
        matches!(first_stop(&mut rig), Some(6..=8)),
        "{:#?}",
        rig.actions
    );
    rig.wait(10).exits("tts", true, "exit code 0");
    assert!(rig.starts("tts"), "{:#?}", rig.actions);
    assert_eq!(rig.worker("tts").failures, 0);
    rig.wait(900).ready("tts", 50);
    grow(&mut rig);
    // Its start takes 0.9 s: it runs for 18 s before the next one.
    let next = first_stop(&mut rig);
    assert!(matches!(next, Some(80..=95)), "{next:?} {:#?}", rig.actions);
}

/// A voice keeps 120 of 400 MiB at rest, and needs 50: after its restart a request for 300 fits, one for 360 does not.
#[test]
fn a_grown_worker_is_renewed_for_a_request_that_only_its_renewal_brings_within_reach() {
    let rest = RestParams {
        recycle_leaks: true,
        ..RestParams::default()
    };
    for (needs, is_renewed) in [(300, true), (360, false)] {
        let mut rig = Rig::with_workers(vec![WorkerParams {
            peak: mib(120),
            rest,
            ..worker("tts", 120)
        }]);
        rig.wait(900).ready("tts", 50);
        rig.wait(10).peak("tts", 52);
        rig.measure("tts", 50);
        rig.request("camera", Class::AudioRealtime, 100, 100, 0);
        rig.granted();
        rig.wait(10).busy("tts", 1);
        rig.wait(200).measure("tts", 250);
        rig.busy("tts", 0);
        rig.wait(10)
            .request("microphone", Class::AudioRealtime, needs, needs, 60_000);
        let stopped = (0..20).any(|_| {
            rig.wait(200).measure("tts", 250);
            rig.stops("tts")
        });
        assert_eq!(stopped, is_renewed, "{needs}: {:#?}", rig.actions);
    }
}
