//! What happened to others on real boards, in MiB as `free -m` prints them; total 15 656 unless said.

use super::*;
use crate::policy::{
    event::WorkerCommand,
    lease::LeaseState,
    pressure::PressureLevel,
    snapshot::WorkerState::{AwaitingMemory, Ready},
};

fn board(reserve_mib: u64) -> Params {
    let mut params = Params::for_budget(mib(15_656), mib(reserve_mib), Scope::Machine);
    params.pressure.dwell = ms(2000);
    params
}

/// A sample of the whole board with this much in use.
fn machine(desk: &mut Desk, used_mib: u64) -> &[Action] {
    let sample = Sample {
        taken_at: desk.now,
        mem_total: mib(15_656),
        mem_available: mib(15_656 - used_mib),
        mem_free: mib(15_656 - used_mib),
        ..Sample::default()
    };
    desk.tell(Event::Sampled(sample))
}

fn grant(desk: &mut Desk, tenant: &str, class: Class, size: u64) -> LeaseView {
    desk.wait(10).request(tenant, class, size, size, 0);
    desk.granted()
}

/// An LLM that idles at 12 947 of 15 656, and voice workers that need 2271 and 1092 more while they load.
#[test]
fn orin_nx_v071_is_refused() {
    let mut params = board(0);
    params.workers = vec![WorkerParams {
        steady: mib(2271),
        peak: mib(2271 + 1092),
        autostart: false,
        ..worker("voice", 0)
    }];
    let mut desk = Desk::new(params);
    machine(&mut desk, 0);
    let llm = grant(&mut desk, "trt", Class::Interactive, 12_947);
    let ticket = desk.ticket();
    desk.tell(Event::OperatorWorker {
        ticket,
        worker: "voice".to_owned(),
        command: WorkerCommand::Start,
    });
    assert_eq!(desk.worker("voice").state, AwaitingMemory);
    assert!(
        desk.said("cannot grant 3.2 GiB to `voice`: 2.6 GiB is free and 0 B can be reclaimed"),
        "{:#?}",
        desk.actions
    );
    // Knobs give 1.5 GB: it starts, and 846 MiB are left, which is below the lower watermark.
    let ticket = desk.ticket();
    desk.tell(Event::LeaseResizeRequested {
        ticket,
        lease: llm.id,
        generation: llm.generation,
        peer: peer(1000),
        min: mib(1),
        max: mib(12_947 - 1500),
        wait: Duration::ZERO,
    });
    desk.wait(10).measure("trt", 12_947 - 1500);
    assert!(desk.starts("voice"));
    desk.wait(10);
    machine(&mut desk, 16_310 - 1500);
    desk.wait(10);
    machine(&mut desk, 16_310 - 1500);
    assert_eq!(desk.snapshot().headroom, Some(mib(846)));
    assert_eq!(desk.snapshot().level, PressureLevel::Critical);
}

/// Baseline 3422; TTS +335, ASR +1936 with a peak of 1092 more, LLM +2219: all of it fits, with 4203 and more left.
#[test]
fn orin_nx_v080_fits() {
    let mut desk = Desk::new(board(3422));
    machine(&mut desk, 3422);
    grant(&mut desk, "tts", Class::AudioRealtime, 335);
    grant(&mut desk, "asr", Class::AudioRealtime, 1936 + 1092);
    grant(&mut desk, "trt", Class::Interactive, 2219);
    assert!(desk.snapshot().free >= mib(4203), "{}", desk.snapshot().free);
}

/// The LLM is stopped, and TTS must not grow into the space that it needs to come back.
#[test]
fn zoe_outage_keeps_the_space_to_return() {
    let mut desk = Desk::with_engine_ready(params());
    desk.request("tts", Class::AudioRealtime, 100, 100, 0);
    let tts = desk.granted();
    desk.tell(Event::EngineFailed {
        reason: "stopped for a build".to_owned(),
    });
    let ticket = desk.ticket();
    desk.tell(Event::LeaseResizeRequested {
        ticket,
        lease: tts.id,
        generation: tts.generation,
        peer: peer(1000),
        min: mib(390),
        max: mib(400),
        wait: Duration::ZERO,
    });
    assert!(matches!(desk.denial(), Denial::InsufficientMemory { free, .. } if free == mib(272)));
    desk.wait(600).sample(100);
    assert!(desk.plan_asked().is_some(), "the engine comes back");
}

/// A neighbour without a lease takes 1.5 GB for a while: unaccounted, and the engine gives way before it dies.
#[test]
fn zoe_crashloop_sheds_for_a_transient_without_a_lease() {
    let mut desk = Desk::with_engine_ready(params());
    desk.measure("llm", 132);
    let actions = desk.samples(132 + 250);
    assert!(actions.iter().any(|action| matches!(action, Action::ApplyPlan { .. })));
    assert_eq!(desk.snapshot().strangers, mib(250));
    // The same with a lease is denied for a class that cannot take from the engine.
    let mut desk = Desk::with_engine_ready(params());
    desk.request("build", Class::Batch, 300, 300, 0);
    assert!(matches!(desk.denial(), Denial::InsufficientMemory { .. }));
}

/// A process grows from 5 to 13.4 GB by the high water of its allocator: named long before it is at the end.
#[test]
fn roboflow_ratchet_is_named_when_it_leaves_its_lease() {
    let mut desk = Desk::new(board(1224));
    machine(&mut desk, 1224);
    grant(&mut desk, "detector", Class::Interactive, 5000);
    let mut named = Vec::new();
    for used in (4000..=13_400).step_by(100) {
        desk.wait(1000);
        desk.measure("detector", used);
        if desk.said("`detector` uses") {
            named.push(used);
        }
        if used == 9000 {
            let (held, unaccounted) = (desk.snapshot().held, desk.snapshot().unaccounted);
            assert_eq!((held, unaccounted), (mib(5000), mib(4000)));
        }
        let ticket = desk.ticket();
        let lease = desk.lease("detector").unwrap();
        desk.tell(Event::LeaseRenewed {
            ticket,
            lease: lease.id,
            generation: lease.generation,
            peer: peer(1000),
        });
    }
    assert_eq!(named, [5200], "once, and early");
}

/// Two alternating callers that do not fit together: the second waits its turn and is served, nothing swaps per request.
#[test]
fn ab_thrash_is_served_in_turn() {
    let mut desk = Desk::with_engine_ready(params());
    let full = desk.held("llm");
    for round in 0..6 {
        let tenant = if round % 2 == 0 { "router" } else { "candidate" };
        desk.wait(100).request(tenant, Class::Interactive, 300, 300, 1000);
        if desk.try_answer().is_none() {
            desk.engine_applies();
        }
        let lease = desk.granted();
        desk.wait(100).tell(Event::HolderLost { lease: lease.id });
        let used = desk.held("llm").whole_mib();
        desk.wait(10).sample(used);
        assert_eq!(desk.lease(tenant).map(|lease| lease.state), None::<LeaseState>);
    }
    assert_eq!(desk.snapshot().sheds, 1, "the engine stays small while they alternate");
    desk.wait(2000).sample(100);
    assert_eq!(desk.engine_applies(), full);
}

/// Peak over steady of 2.9: the peak is what has to fit, and it is given back when it is over.
#[test]
fn a_worker_with_a_high_peak_is_admitted_by_its_peak() {
    let mut params = board(1224);
    params.workers = vec![WorkerParams {
        steady: mib(1100),
        peak: mib(3160),
        ..worker("asr", 0)
    }];
    let mut desk = Desk::new(params);
    machine(&mut desk, 1224);
    assert_eq!(desk.held("asr"), mib(3160));
    desk.wait(10).tell(Event::WorkerReady {
        worker: "asr".to_owned(),
        pid: 9,
    });
    assert_eq!(desk.worker("asr").state, Ready);
    desk.wait(10).measure("asr", 1080);
    assert_eq!(desk.held("asr"), mib(1100));
}
