//! Tests of workers at rest, start orders, and leases of workers.

use super::*;
use crate::policy::{
    decision::{MemoryDecision, WorkerDecision},
    params::VariantParams,
    pressure::PressureLevel,
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

fn state(desk: &Desk, name: &str) -> (WorkerState, Option<Rest>) {
    let view = desk.worker(name);
    (view.state, view.rest)
}

/// A desk with one worker that is ready.
fn with_ready(worker: WorkerParams, used_mib: u64) -> Desk {
    let name = worker.name.clone();
    let mut desk = Desk::with_workers(vec![worker]);
    desk.ready(&name, used_mib);
    desk
}

#[test]
fn a_worker_without_work_is_stopped_and_the_next_request_wakes_it() {
    let mut desk = with_ready(sleepy("tts", 100), 90);
    desk.pass(59_000);
    assert!(!desk.stops("tts"));
    desk.pass(2000);
    assert!(desk.stops("tts"), "{:#?}", desk.actions);
    desk.wait(10).exits("tts", true, "exit code 0");
    assert_eq!(state(&desk, "tts"), (Stopped, Some(Rest::Idle)));
    assert_eq!(desk.held("tts"), Bytes::ZERO);
    desk.pass(600_000);
    assert!(!desk.starts("tts"), "it sleeps until a request needs it");

    // Its memory is kept for it against tenants that are as urgent: 400 of budget, 100 kept.
    desk.request("other", Class::AudioRealtime, 301, 301, 0);
    assert!(matches!(desk.denial(), Denial::InsufficientMemory { free, .. } if free == mib(300)));
    desk.wait(1).wanted("tts");
    assert!(desk.starts("tts"), "{:#?}", desk.actions);
    assert_eq!(desk.held("tts"), mib(100));
}

#[test]
fn work_puts_off_the_sleep_and_a_request_in_the_last_moment_ends_the_winding_up() {
    let mut desk = with_ready(sleepy("tts", 100), 90);
    desk.busy("tts", 1);
    desk.pass(100_000);
    assert!(!desk.stops("tts"), "it works");
    desk.busy("tts", 0);
    desk.pass(59_990);
    assert!(!desk.worker("tts").winding_up);
    desk.pass(10);
    assert!(desk.worker("tts").winding_up, "APIs send it nothing new");
    desk.busy("tts", 1);
    assert!(!desk.worker("tts").winding_up, "one was on its way");
    desk.pass(1000);
    assert_eq!(state(&desk, "tts"), (Ready, None));
}

#[test]
fn the_engine_grows_into_the_space_of_one_that_sleeps_and_gives_it_back_when_it_wakes() {
    let mut settings = with_engine(params());
    settings.budget.total = mib(252);
    settings.workers = vec![sleepy("tts", 150)];
    let mut desk = Desk::sampled(settings);
    desk.tell(Event::EngineInspected { shape: shape() });
    let small = desk.engine_applies();
    desk.ready("tts", 150);
    desk.pass(61_000);
    desk.wait(10).exits("tts", true, "exit code 0");
    let used = desk.held("llm").whole_mib();
    desk.wait(10).sample(used);
    desk.wait(5000).sample(used);
    let full = desk.engine_applies();
    assert!(full > small, "{full} is not above {small}");

    desk.wait(10).sample(full.whole_mib());
    desk.wait(1).wanted("tts");
    assert_eq!(desk.worker("tts").state, AwaitingMemory);
    desk.engine_applies();
    assert_eq!(desk.worker("tts").state, Starting, "with its memory");
    assert_eq!(desk.held("tts"), mib(150));
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

fn resized_to(desk: &Desk) -> Option<String> {
    desk.actions.iter().find_map(|action| match action {
        Action::ResizeWorker { variant, .. } => Some(variant.clone()),
        _ => None,
    })
}

fn resizes(desk: &mut Desk, variant: &str, used_mib: u64) {
    desk.wait(10).tell(Event::WorkerResized {
        worker: "asr".to_owned(),
        variant: variant.to_owned(),
        used: Some(mib(used_mib)),
        error: None,
    });
}

#[test]
fn a_worker_without_work_takes_its_smallest_variant_and_leaves_it_with_the_next_request() {
    let mut desk = with_ready(in_two_sizes(), 100);
    desk.pass(10_000);
    assert_eq!(resized_to(&desk).as_deref(), Some("grammar"));
    resizes(&mut desk, "grammar", 40);
    assert_eq!(desk.held("asr"), mib(40));
    desk.pass(60_000);
    assert_eq!(resized_to(&desk), None, "once is enough");
    desk.busy("asr", 1);
    assert_eq!(resized_to(&desk).as_deref(), Some("open"));
    assert_eq!(desk.held("asr"), mib(100), "booked before it grows");
    resizes(&mut desk, "open", 100);
    desk.busy("asr", 0);
    desk.pass(10_000);
    assert_eq!(resized_to(&desk).as_deref(), Some("grammar"), "and again");
}

#[test]
fn a_worker_that_cannot_become_smaller_is_not_asked_again_until_it_has_worked() {
    let mut desk = with_ready(in_two_sizes(), 100);
    desk.pass(10_000);
    desk.wait(10).tell(Event::WorkerResized {
        worker: "asr".to_owned(),
        variant: "open".to_owned(),
        used: Some(mib(100)),
        error: Some("no grammar".to_owned()),
    });
    desk.pass(60_000);
    assert_eq!(resized_to(&desk), None);
    desk.busy("asr", 1);
    assert_eq!(resized_to(&desk), None, "there is no size to go back to");
    desk.busy("asr", 0);
    desk.pass(10_000);
    assert_eq!(resized_to(&desk).as_deref(), Some("grammar"));
}

#[test]
fn a_worker_that_outgrows_its_bounds_ends_its_work_and_is_restarted_before_any_other_holder() {
    let mut desk = with_ready(
        WorkerParams {
            peak: mib(120),
            rest: recycled_above(150),
            ..worker("detector", 100)
        },
        100,
    );
    desk.busy("detector", 1);
    desk.wait(100).measure("detector", 149);
    assert!(!desk.worker("detector").winding_up, "within its bounds");
    desk.wait(100).measure("detector", 151);
    desk.wait(1000).measure("detector", 151);
    assert!(desk.worker("detector").winding_up);
    let outgrown = Decision::from(WorkerDecision::Outgrown {
        worker: "detector".to_owned(),
        used: mib(151),
        above: mib(150),
        held: desk.held("detector"),
        requests: 1,
    });
    assert!(
        desk.decisions().any(|decision| *decision == outgrown),
        "{:#?}",
        desk.actions
    );
    desk.pass(5000);
    assert!(!desk.stops("detector"), "it ends its request first");

    // A request waits for all that there is: the worker's own memory is not theirs.
    desk.request("other", Class::AudioRealtime, 320, 320, 60_000);
    desk.busy("detector", 0);
    assert!(desk.stops("detector"));
    desk.wait(10).exits("detector", true, "exit code 0");
    assert!(desk.starts("detector"), "{:#?}", desk.actions);
    assert_eq!(desk.held("detector"), mib(120));
    assert_eq!(desk.worker("detector").failures, 0, "that was no failure");

    // Outgrown again at once: not again before it has run for a while.
    desk.ready("detector", 151);
    for _ in 0..50 {
        desk.wait(1000).measure("detector", 151);
    }
    assert!(!desk.worker("detector").winding_up);
    for _ in 0..80 {
        desk.wait(1000).measure("detector", 151);
    }
    assert_eq!(desk.worker("detector").state, Stopping);
}

#[test]
fn what_a_worker_has_grown_to_is_learned_when_it_goes_on_with_it_and_not_when_it_ends_for_it() {
    let mut desk = with_ready(
        WorkerParams {
            peak: mib(120),
            rest: recycled_above(120),
            ..worker("detector", 100)
        },
        100,
    );
    let learned = |desk: &Desk| {
        let peaks = desk.snapshot().peaks;
        peaks.of("detector", None).map(|peak| peak.bytes)
    };
    let uses = |desk: &mut Desk, used: u64, peak: u64| {
        desk.wait(100).peak("detector", peak);
        desk.measure("detector", used);
    };
    // What its start took is learned at once, however much it was.
    uses(&mut desk, 100, 130);
    assert_eq!(learned(&desk), Some(mib(130)));
    // What it gave back by itself was a need of its work.
    uses(&mut desk, 105, 150);
    assert_eq!(learned(&desk), Some(mib(150)));
    // What it keeps is what it ends for, and the next start is by what was known before.
    for _ in 0..4 {
        uses(&mut desk, 300, 310);
    }
    assert!(desk.worker("detector").winding_up);
    desk.pass(100);
    assert_eq!(learned(&desk), Some(mib(150)));
    desk.wait(10).exits("detector", true, "exit code 0");
    assert!(desk.starts("detector"), "{:#?}", desk.actions);
    assert_eq!(desk.held("detector"), mib(165), "1.1 times 150");
    // Grown to the same at once, it is not ended for it again: it is as large as that.
    desk.ready("detector", 100);
    uses(&mut desk, 100, 110);
    for _ in 0..4 {
        uses(&mut desk, 300, 310);
    }
    assert!(!desk.worker("detector").winding_up);
    assert_eq!(learned(&desk), Some(mib(310)));
}

#[test]
fn a_worker_that_was_to_be_restarted_is_even_if_its_memory_is_taken_first() {
    let mut desk = with_ready(
        WorkerParams {
            class: Class::Batch,
            peak: mib(120),
            rest: recycled_above(150),
            ..worker("detector", 100)
        },
        100,
    );
    desk.wait(10).measure("detector", 340);
    desk.wait(1000).measure("detector", 340);
    assert!(desk.worker("detector").winding_up);
    desk.samples(395);
    assert_eq!(desk.snapshot().level, PressureLevel::Critical);
    assert!(desk.stops("detector"), "{:#?}", desk.actions);
    let by_shed = |action: &Action| {
        matches!(
            action,
            Action::StopWorker {
                reason: StopReason::Reclaim { .. },
                ..
            }
        )
    };
    assert!(desk.actions.iter().any(by_shed), "before it had wound up");
    desk.wait(10).exits("detector", true, "SIGTERM");
    // By the 340 MiB that it had grown to, it would not come back beside another holder.
    assert!(desk.starts("detector"), "{:#?}", desk.actions);
    assert_eq!(state(&desk, "detector"), (Starting, None));
}

#[test]
fn work_that_does_not_end_does_not_keep_a_worker_that_has_outgrown_its_bounds() {
    let mut desk = with_ready(
        WorkerParams {
            rest: recycled_above(150),
            ..worker("detector", 100)
        },
        100,
    );
    desk.busy("detector", 1);
    desk.wait(10).measure("detector", 300);
    desk.wait(1000).measure("detector", 300);
    desk.pass(29_000);
    assert!(!desk.stops("detector"));
    desk.pass(1000);
    assert!(desk.stops("detector"));
}

#[test]
fn no_request_starts_what_an_operator_has_stopped() {
    let mut desk = with_ready(sleepy("tts", 100), 90);
    desk.command("tts", WorkerCommand::Stop);
    desk.wait(10).exits("tts", true, "exit code 0");
    assert_eq!(state(&desk, "tts"), (Stopped, Some(Rest::Operator)));
    desk.wait(1).wanted("tts");
    assert!(!desk.starts("tts"));
    desk.command("tts", WorkerCommand::Start);
    assert!(desk.starts("tts"));
    assert_eq!(state(&desk, "tts"), (Starting, None));
}

#[test]
fn a_worker_that_is_not_started_by_itself_is_started_by_the_first_request() {
    let mut desk = Desk::with_workers(vec![by_hand("tts", 100)]);
    desk.pass(10_000);
    assert!(!desk.starts("tts"));
    desk.wait(1).wanted("tts");
    assert!(desk.starts("tts"));
}

#[test]
fn workers_wait_for_those_they_come_after_and_for_nobody_who_has_given_up() {
    let mut settings = params();
    let after = |name: &str, others: &[&str]| WorkerParams {
        start: StartParams {
            after: others.iter().map(|&other| other.to_owned()).collect(),
            ..worker(name, 30).start
        },
        ..worker(name, 30)
    };
    settings.workers = vec![after("a", &["c"]), after("b", &["a"]), after("c", &[])];
    let mut desk = Desk::sampled(settings);
    assert!(desk.starts("c") && !desk.starts("a"));
    // One that fails has been given up as far as order goes.
    desk.wait(10).exits("c", false, "exit code 3");
    assert!(desk.starts("a") && !desk.starts("b"));
    desk.ready("a", 30);
    assert!(desk.starts("b"));
}

#[test]
fn a_worker_that_asks_for_itself_takes_over_what_was_booked_for_it() {
    let mut desk = with_ready(
        WorkerParams {
            own_lease: true,
            peak: mib(250),
            ..worker("vision", 250)
        },
        200,
    );
    assert_eq!(desk.held("vision"), mib(250), "its peak until it has asked");
    // 150 are free beside it, so 300 only fit as it takes over its own.
    desk.request("vision", Class::Interactive, 300, 300, 0);
    let lease = desk.granted();
    assert_eq!(lease.held, mib(300));
    assert_eq!(desk.snapshot().held, mib(300), "nothing is booked twice");
    desk.wait(100).measure("vision", 280);
    assert_eq!(desk.snapshot().unaccounted, Bytes::ZERO);
    // Its name is not granted to another holder.
    desk.wait(10).exits("vision", false, "exit code 1");
    desk.wait(10).lost(&lease);
    desk.request("vision", Class::Interactive, 10, 10, 0);
    assert!(matches!(desk.denial(), Denial::Invalid { .. }), "it does not run");
}

/// Run 1 and 2 of a board with 15 656 MiB: TTS and ASR are started before the LLM, or after it. Either way every peak is
/// on the book before it is touched, and all run at the end.
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
        let mut desk = Desk::new(settings);
        let first = desk.tell(Event::EngineInspected { shape: shape() }).to_vec();
        desk.sample(0);
        desk.actions.splice(0..0, first);
        let mut order = Vec::new();
        let mut used = 0;
        for _ in 0..40 {
            if desk.starts("tts") || desk.starts("asr") {
                let name = if desk.starts("tts") { "tts" } else { "asr" };
                order.push(name);
                used += if name == "tts" { 34 } else { 60 };
                desk.ready(name, if name == "tts" { 34 } else { 60 });
            } else if desk.plan_asked().is_some() && desk.snapshot().engine.state == EngineState::Loading {
                order.push("llm");
                used += desk.engine_applies().whole_mib();
            } else {
                desk.wait(100).sample(used);
            }
        }
        let expected = if speech_first {
            ["tts", "asr", "llm"]
        } else {
            ["llm", "tts", "asr"]
        };
        assert_eq!(order, expected);
        assert!(["tts", "asr"].iter().all(|name| desk.worker(name).state == Ready));
        assert_eq!(desk.snapshot().engine.state, EngineState::Ready);
        assert_eq!(
            desk.snapshot()
                .workers
                .iter()
                .map(|worker| worker.failures)
                .sum::<u32>(),
            0
        );
    }
}

/// The LLM goes away and TTS has grown: LLM comes back first, and TTS, which is stopped meanwhile, after it.
#[test]
fn zoe_outage_starts_the_llm_first_and_then_the_voice() {
    let mut settings = with_engine(params());
    settings.workers = vec![WorkerParams {
        peak: mib(160),
        rest: recycled_above(200),
        ..worker("tts", 150)
    }];
    let mut desk = Desk::sampled(settings);
    desk.tell(Event::EngineInspected { shape: shape() });
    desk.engine_applies();
    desk.ready("tts", 150);
    // It grows to 360 of 400 while the LLM is gone, and keeps that.
    desk.wait(10).engine_fails(None);
    desk.wait(10).measure("tts", 360);
    desk.samples(360);
    desk.wait(600).measure("tts", 360);
    desk.sample(360);
    assert!(desk.worker("tts").winding_up, "what it keeps is not its own");
    desk.pass(100);
    assert!(desk.stops("tts"));
    desk.wait(10).exits("tts", true, "exit code 0");
    let mut order = Vec::new();
    for _ in 0..200 {
        if desk.plan_asked().is_some() {
            order.push("llm");
            desk.engine_applies();
        } else if desk.starts("tts") {
            order.push("tts");
            desk.ready("tts", 150);
        } else {
            let used = desk.snapshot().held.whole_mib();
            desk.wait(100).samples(used);
        }
        if order.len() >= 2 && desk.worker("tts").state == Ready {
            break;
        }
    }
    assert_eq!(desk.worker("tts").state, Ready, "{order:?}");
    assert_eq!(desk.snapshot().engine.state, EngineState::Ready, "{order:?}");
    assert_eq!(desk.worker("tts").failures, 0);
}

/// A reload needs 6.3 GB and a neighbour has taken a part of it for a while: nothing is started into a hole that is too
/// small, so that a loop of crashes has one failed start at the most.
#[test]
fn zoe_crashloop_has_one_failed_start_at_the_most() {
    let mut settings = Params::for_budget(mib(15_656), mib(1224), Scope::Machine);
    settings.pressure.dwell = ms(2000);
    settings.workers = vec![WorkerParams {
        class: Class::LlmElastic,
        peak: mib(6930),
        ..worker("llama-server", 6300)
    }];
    let mut desk = Desk::new(settings);
    let machine = |desk: &mut Desk, used_mib: u64| desk.machine(15_656, used_mib).to_vec();
    let base = 1224 + 4000; // the OS, and a container without a lease
    machine(&mut desk, base);
    assert!(desk.starts("llama-server"), "{:#?}", desk.actions);
    desk.ready("llama-server", 6300);
    machine(&mut desk, base + 6300);
    // The neighbour comes, and the next allocation fails.
    desk.wait(1000);
    machine(&mut desk, base + 6300 + 3800);
    desk.wait(10).exits(
        "llama-server",
        false,
        "exit code 1: NvMapMemAllocInternalTagged: 1075072515 error 12",
    );
    let (mut starts, mut failed) = (0, 0);
    for second in 0..120 {
        let neighbour = if second < 90 { 3800 } else { 0 };
        let loaded = desk.worker("llama-server").state == Ready;
        desk.wait(1000);
        let used = base + neighbour + if loaded { 6300 } else { 0 };
        let mut actions = machine(&mut desk, used);
        actions.extend_from_slice(desk.pass(1));
        let started = actions
            .iter()
            .any(|action| matches!(action, Action::StartWorker { .. }));
        if started {
            starts += 1;
            if neighbour > 0 {
                failed += 1;
                desk.wait(10).exits("llama-server", false, "exit code 1: error 12");
            } else {
                desk.ready("llama-server", 6300);
            }
        } else if neighbour > 0 {
            let state = desk.worker("llama-server").state;
            assert!(matches!(state, BackingOff | AwaitingMemory | Stopped), "{state:?}");
        }
    }
    assert_eq!(
        (starts, failed),
        (1, 0),
        "it waits for its memory, and that costs no attempt"
    );
    assert_eq!(desk.worker("llama-server").state, Ready);
    assert_ne!(desk.worker("llama-server").state, Stopping);
}

#[test]
fn a_shed_is_split_into_what_the_page_pool_of_the_gpu_keeps_and_what_everybody_can_have() {
    let mut desk = Desk::with_engine_ready(params());
    let sample = |desk: &mut Desk, pool: u64, available: u64| {
        let sample = Sample {
            taken_at: desk.wait(10).now,
            mem_total: Bytes::from_gib(8),
            mem_available: mib(available),
            nvmap_pool: Some(mib(pool)),
            scope_used: Some(mib(132)),
            ..Sample::default()
        };
        desk.tell(Event::Sampled(sample)).to_vec()
    };
    sample(&mut desk, 10, 4096);
    let ticket = desk.ticket();
    desk.wait(10).tell(Event::OperatorShed { ticket, bytes: mib(40) });
    desk.wait(10).engine_applies();
    sample(&mut desk, 40, 4100);
    let release = desk.snapshot().last_release.unwrap();
    assert_eq!((release.to_pool, release.to_os), (mib(30), mib(4)));
    assert!(release.bytes >= mib(40), "{release:?}");
    let decided = Decision::from(MemoryDecision::Released(release));
    assert_eq!(desk.decisions().collect::<Vec<_>>(), [&decided]);
    // Programs of the processor have next to nothing, and the pool has much.
    let actions = sample(&mut desk, 300, 30);
    assert!(
        actions.contains(&Action::EmptyPagePool { bytes: mib(300) }),
        "{actions:#?}"
    );
}
