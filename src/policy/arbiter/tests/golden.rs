//! Published incidents on real boards, in MiB; total 15 656 unless stated.

use proptest::prelude::*;

use super::*;
use crate::{
    book::{AdoptedWorker, Book},
    decision::{AdmissionDecision, LeaseDecision},
    lease::LeaseState,
    peaks::{LearnedPeak, Peaks},
    pressure::PressureLevel,
    residency::PlanLimits,
    snapshot::{
        EngineState,
        WorkerState::{AwaitingMemory, BackingOff, Ready, Starting},
    },
};

fn board(reserve_mib: u64) -> Params {
    let mut params = Params::for_budget(mib(BOARD), mib(reserve_mib), Scope::Machine);
    params.pressure.dwell = ms(2000);
    params
}

const BOARD: u64 = 15_656;

fn grant(rig: &mut Rig, tenant: &str, class: Class, size: u64) -> LeaseView {
    rig.wait(10).request(tenant, class, size, size, 0);
    rig.granted()
}

/// An idle LLM at 12 947 of 15 656, and voice workers that need 2271 and 1092 more while they load.
#[test]
fn orin_nx_v071_is_refused() {
    let mut params = board(0);
    params.workers = vec![WorkerParams {
        steady: mib(2271),
        peak: mib(2271 + 1092),
        ..by_hand("voice", 0)
    }];
    let mut rig = Rig::new(params);
    rig.machine(BOARD, 0);
    let llm = grant(&mut rig, "trt", Class::Interactive, 12_947);
    rig.command("voice", WorkerCommand::Start);
    assert_eq!(rig.worker("voice").state, AwaitingMemory);
    assert!(decided!(
        rig,
        Admission(AdmissionDecision::Waits {
            denial: Denial::InsufficientMemory { asked, free, reclaimable, .. },
            ..
        }) if (*asked, *free, *reclaimable) == (mib(3363), mib(2709), Bytes::ZERO)
    ));
    // Tuning saves 1.5 GB: the worker starts, and 846 MiB are left, below the lower watermark.
    rig.resize(&llm, 1, 12_947 - 1500, 0);
    rig.wait(10).measure("trt", 12_947 - 1500);
    assert!(rig.starts("voice"));
    rig.wait(10);
    rig.machine(BOARD, 16_310 - 1500);
    rig.wait(10);
    rig.machine(BOARD, 16_310 - 1500);
    assert_eq!(rig.snapshot().pressure.headroom, Some(mib(846)));
    assert_eq!(rig.snapshot().pressure.level, PressureLevel::Critical);
}

/// Two runs of the same stack, stage by stage: everything fits, and 4203 and 4594 are left.
#[test]
fn orin_nx_v080_fits() {
    let trace =
        include_str!("../../../../tests/fixtures/jetson/traces/coresidency_orin-nx-16g_v080.tsv");
    let run = |name: &str| -> Vec<u64> {
        let stages = trace.lines().filter(|line| line.starts_with(name));
        stages
            .map(|line| line.split('\t').nth(2).unwrap().parse().unwrap())
            .collect()
    };
    // The first run ends without its LLM, projected at 5760: the whole use with it, baseline included.
    for (name, more, left) in [("0013", 11_453 - 6785, 4203), ("0014", 0, 4594)] {
        let stages = run(name);
        let mut rig = Rig::new(board(stages[0]));
        rig.machine(BOARD, stages[0]);
        for (number, pair) in stages.windows(2).enumerate() {
            let (before, used) = (pair[0], pair[1]);
            grant(
                &mut rig,
                &format!("stage{number}"),
                Class::AudioRealtime,
                used - before,
            );
            rig.wait(10);
            rig.machine(BOARD, used);
        }
        if more > 0 {
            grant(&mut rig, "llm-of-others", Class::LlmElastic, more);
            rig.wait(10);
            rig.machine(BOARD, 11_453);
        }
        let snapshot = rig.snapshot();
        assert_eq!(
            (snapshot.pressure.headroom, snapshot.pressure.level),
            (Some(mib(left)), PressureLevel::Normal),
            "{name}"
        );
        assert_eq!(
            (snapshot.memory.free, snapshot.memory.unaccounted),
            (mib(left), Bytes::ZERO),
            "{name}"
        );
    }
}

/// The LLM is stopped, and TTS must not grow into the memory reserved for its return.
#[test]
fn zoe_outage_keeps_the_space_to_return() {
    let mut rig = Rig::with_engine_ready(params());
    rig.request("tts", Class::AudioRealtime, 100, 100, 0);
    let tts = rig.granted();
    rig.engine_fails(None);
    rig.resize(&tts, 390, 400, 0);
    assert!(matches!(rig.denial(), Denial::InsufficientMemory { free, .. } if free == mib(272)));
    rig.wait(600).sample(100);
    assert!(rig.plan_asked().is_some(), "the engine comes back");
}

/// The voice has grown over the whole board while unmeasured: its grown size is not the need of a start, so it is
/// restarted at its own size, with the whole LLM beside it.
#[test]
fn zoe_outage_restarts_the_voice_by_what_a_start_needs() {
    let mut params = with_engine(params());
    params.budget.total = mib(200);
    params.workers = vec![WorkerParams {
        class: Class::Batch,
        peak: mib(26),
        rest: recycled_above(26),
        ..worker("tts", 20)
    }];
    params.pressure.dwell = ms(100);
    params.pressure.elevated_below = mib(26);
    params.pressure.critical_below = mib(13);
    params.pressure.last_resort_below = mib(6);
    let mut rig = Rig::new(params);
    rig.tell(Event::Recovered {
        book: Book::default(),
        adopted: vec![AdoptedWorker {
            worker: "tts".to_owned(),
            pid: 7,
            variant: None,
        }],
    });
    rig.tell(Event::EngineInspected { shape: shape() });
    let ready = |rig: &mut Rig| {
        rig.answers("tts", 7);
    };
    let uses = |rig: &mut Rig, used: u64, peak: u64| {
        rig.peak("tts", peak);
        rig.measure("tts", used);
    };
    ready(&mut rig);
    for _ in 0..40 {
        rig.wait(10);
        uses(&mut rig, 180, 190);
        rig.wait(10).sample(180);
        if rig.worker("tts").winding_up {
            break;
        }
    }
    rig.pass(100);
    assert!(rig.stops("tts"), "{:#?}", rig.actions);
    rig.exits("tts", true, "SIGTERM");
    assert!(
        rig.starts("tts"),
        "by 1.1 times 190 MiB it would wait for ever: {:#?}",
        rig.actions
    );
    assert_eq!(rig.held("tts"), mib(26));
    ready(&mut rig);
    rig.wait(10);
    uses(&mut rig, 20, 22);
    for _ in 0..60 {
        let llm = rig.held("llm").whole_mib();
        rig.wait(10).sample(20 + llm);
        if rig.plan_asked().is_some() {
            rig.engine_applies();
        }
    }
    let engine = rig.snapshot().engine;
    assert_eq!(
        (engine.state, engine.in_force),
        (EngineState::Ready, engine.full)
    );
}

fn learned(holder: &str, peak: u64) -> Peaks {
    let holder = holder.to_owned();
    std::iter::once(LearnedPeak {
        holder,
        variant: None,
        bytes: mib(peak),
        lives: 1,
        start: None,
        model: None,
    })
    .collect()
}

fn grown_to_nothing_that_fits() -> Params {
    let mut params = params();
    params.workers = vec![of_class(Class::Batch, by_hand("indexer", 100))];
    params.peaks = learned("indexer", 360);
    params
}

/// A worker needs 396 of 400 MiB, and the LLM always keeps 28: the worker waits, the wait is logged, and no other
/// holder is shrunk or delayed for it.
#[test]
fn zoe_outage_keeps_no_holder_small_for_what_can_never_be_had() {
    let mut rig = Rig::with_engine_ready(grown_to_nothing_that_fits());
    let full = rig.held("llm");
    // The LLM has been shed when the wait begins.
    rig.request("asr", Class::AudioRealtime, 300, 300, 1000);
    rig.engine_applies();
    let asr = rig.granted();
    assert!(rig.held("llm") < full);
    rig.wanted("indexer");
    assert_eq!(rig.worker("indexer").state, AwaitingMemory);
    let out_of_reach = |decision: &Decision| match decision {
        Decision::Admission(AdmissionDecision::StartOutOfReach { worker, wait })
            if worker == "indexer" =>
        {
            assert_eq!(
                (wait.needs, wait.configured, wait.most),
                (mib(396), mib(100), mib(372))
            );
            assert_eq!(wait.keepers, [("llm".to_owned(), mib(28))]);
            true
        }
        _ => false,
    };
    assert!(rig.decisions().any(out_of_reach), "{:#?}", rig.actions);
    let waits = rig.worker("indexer").waits.unwrap();
    assert!(waits.is_out_of_reach());
    assert_eq!((waits.needs, waits.most), (mib(396), mib(372)));
    rig.wait(10).lost(&asr);
    rig.wait(2100).sample(100);
    assert!(!rig.decisions().any(out_of_reach), "decided once");
    assert_eq!(rig.engine_applies(), full, "the LLM is whole again");
    // The same class, and later in the queue: served all the same.
    rig.request("build", Class::Batch, 50, 50, 1000);
    assert_eq!(rig.granted().memory.held, mib(50));
    // Nothing is reserved for it.
    assert_eq!(rig.snapshot().memory.returning, Bytes::ZERO);
}

/// A start too large beside another worker becomes possible when that one ends.
#[test]
fn what_comes_within_reach_is_started() {
    let mut params = grown_to_nothing_that_fits();
    params.workers.push(worker("asr", 50));
    let mut rig = Rig::sampled(params);
    assert!(rig.starts("asr"));
    rig.answers("asr", 9);
    rig.wait(10).measure("asr", 50);
    rig.wanted("indexer");
    assert!(rig.worker("indexer").waits.unwrap().is_out_of_reach());
    rig.command("asr", WorkerCommand::Stop);
    assert!(!rig.worker("indexer").waits.unwrap().is_out_of_reach());
    rig.wait(10).exits("asr", true, "exit code 0");
    assert!(rig.starts("indexer"), "{:#?}", rig.actions);
    assert_eq!(rig.worker("indexer").waits, None);
}

/// A neighbour without a lease takes 1.5 GB for a while: it is unaccounted, and the engine sheds before it dies.
#[test]
fn zoe_crashloop_sheds_for_a_transient_without_a_lease() {
    let mut rig = Rig::with_engine_ready(params());
    rig.measure("llm", 132);
    let actions = rig.samples(132 + 250);
    assert!(
        actions
            .iter()
            .any(|action| matches!(action, Action::ApplyPlan { .. }))
    );
    assert_eq!(rig.snapshot().memory.unmanaged, mib(250));
    // The same use as a lease is denied to a class that cannot reclaim from the engine.
    let mut rig = Rig::with_engine_ready(params());
    rig.request("build", Class::Batch, 300, 300, 0);
    assert!(matches!(rig.denial(), Denial::InsufficientMemory { .. }));
}

/// A process grows from 5 to 13.4 GB by the high water of its allocator: logged long before memory runs out.
#[test]
fn roboflow_ratchet_is_named_when_it_leaves_its_lease() {
    let mut rig = Rig::new(board(1224));
    rig.machine(BOARD, 1224);
    grant(&mut rig, "detector", Class::Interactive, 5000);
    let mut named = Vec::new();
    for used in (4000..=13_400).step_by(100) {
        rig.wait(1000);
        rig.measure("detector", used);
        let beyond = |decision: &Decision| matches!(decision, Decision::Lease(LeaseDecision::BeyondLease { holder, .. }) if holder == "detector");
        if rig.decisions().any(beyond) {
            named.push(used);
        }
        if used == 9000 {
            let (held, unaccounted) = (
                rig.snapshot().memory.held,
                rig.snapshot().memory.unaccounted,
            );
            assert_eq!((held, unaccounted), (mib(5000), mib(4000)));
        }
        let ticket = rig.ticket();
        let lease = rig.lease("detector").unwrap();
        rig.tell(Event::LeaseRenewed(LeaseCall {
            ticket,
            lease: lease.id,
            generation: lease.generation,
            peer: peer(1000),
        }));
    }
    assert_eq!(named, [5200], "once, and early");
}

/// Two alternating callers that do not fit together: the second waits its turn and is served, without a swap per
/// request.
#[test]
fn ab_thrash_is_served_in_turn() {
    let mut rig = Rig::with_engine_ready(params());
    let full = rig.held("llm");
    for round in 0..6 {
        let tenant = if round % 2 == 0 {
            "router"
        } else {
            "candidate"
        };
        rig.wait(100)
            .request(tenant, Class::Interactive, 300, 300, 1000);
        if rig.try_answer().is_none() {
            rig.engine_applies();
        }
        let lease = rig.granted();
        rig.wait(100).lost(&lease);
        let used = rig.held("llm").whole_mib();
        rig.wait(10).sample(used);
        assert_eq!(
            rig.lease(tenant).map(|lease| lease.state),
            None::<LeaseState>
        );
    }
    assert_eq!(
        rig.snapshot().totals.sheds,
        1,
        "the engine stays small while they alternate"
    );
    rig.wait(2000).sample(100);
    assert_eq!(rig.engine_applies(), full);
}

/// Peak of 2.9 times the steady size: the peak must fit, and the excess is returned afterwards.
#[test]
fn a_worker_with_a_high_peak_is_admitted_by_its_peak() {
    let mut params = board(1224);
    params.workers = vec![WorkerParams {
        steady: mib(1100),
        peak: mib(3160),
        ..worker("asr", 0)
    }];
    let mut rig = Rig::new(params);
    rig.machine(BOARD, 1224);
    assert_eq!(rig.held("asr"), mib(3160));
    rig.wait(10).answers("asr", 9);
    assert_eq!(rig.worker("asr").state, Ready);
    rig.wait(10).measure("asr", 1080);
    assert_eq!(rig.held("asr"), mib(1100));
}

/// A worker with a measured start of 6.3 GB is not started below 1.1 times that, whatever its configured peak.
#[test]
fn zoe_crashloop_does_not_start_below_what_the_load_needs() {
    let mut params = board(1224);
    params.workers = vec![of_class(Class::LlmElastic, worker("brain", 5400))];
    params.peaks = learned("brain", 6300);
    let mut rig = Rig::new(params);
    // The neighbour leaves 6929 of the budget, one too little, then one more.
    for (neighbour, state) in [(14_432 - 6929, AwaitingMemory), (14_432 - 6930, Starting)] {
        rig.machine(BOARD, 1224 + neighbour);
        rig.wait(10);
        rig.machine(BOARD, 1224 + neighbour);
        assert_eq!(rig.worker("brain").state, state, "{neighbour}");
        rig.wait(10);
    }
    assert_eq!(
        (rig.held("brain"), rig.worker("brain").starts),
        (mib(6930), 1)
    );
}

/// 122 GB with 97 free, and a loader dies at weight 113 of 2034 without a kernel message: not a shortage.
#[test]
fn thor_silent_is_no_shortage() {
    let total = 122 * 1024;
    let mut params = Params::for_budget(mib(total), mib(4096), Scope::Machine);
    params.workers = vec![worker("loader", 60_000)];
    let mut rig = Rig::new(params);
    let sample = |rig: &mut Rig| rig.wait(10).machine(total, total - 97 * 1024).to_vec();
    sample(&mut rig);
    assert_eq!(rig.worker("loader").state, Starting);
    rig.exits(
        "loader",
        false,
        "killed by SIGKILL, sender unknown, at 113/2034",
    );
    let view = rig.worker("loader");
    assert_eq!(view.state, BackingOff);
    assert_eq!(
        view.last_exit.as_deref(),
        Some("killed by SIGKILL, sender unknown, at 113/2034")
    );
    let actions = sample(&mut rig);
    assert!(
        !actions
            .iter()
            .any(|action| matches!(action, Action::LevelChanged(_) | Action::Weighed { .. })),
        "{actions:#?}"
    );
    assert_eq!(
        (rig.held("loader"), rig.snapshot().pressure.level),
        (Bytes::ZERO, PressureLevel::Normal)
    );
}

/// A 9B model that needs 7220 in full, on a tablet with 2820 for it: never more resident than fits, never less than
/// full streaming, and after a warning no regrowth before the dwell.
#[test]
fn ipad_cliff_is_not_walked_over() {
    let model = ModelShape {
        layers: sample_shape(32, mib(170)).layers,
        fixed_bytes: mib(1500),
        ring_bytes: mib(170),
        ..shape()
    };
    let mut params = with_engine(Params::for_budget(
        mib(8192),
        mib(8192 - 5300),
        Scope::Machine,
    ));
    params.pressure.dwell = ms(2000);
    let mut rig = Rig::new(params.clone());
    let sample = |rig: &mut Rig, available: u64| rig.machine(8192, 8192 - available).to_vec();
    let applies = |rig: &mut Rig, shape: &ModelShape| {
        let (revision, plan) = rig
            .plan_asked()
            .unwrap_or_else(|| panic!("{:#?}", rig.actions));
        let used = shape.plan_bytes(&plan);
        let freed = rig.held("llm").saturating_sub(used);
        rig.engine_applied(revision, plan.clone(), freed, used);
        plan
    };
    // 2820 above the upper watermark and the hysteresis.
    let spare = params.pressure.elevated_below + params.pressure.hysteresis;
    sample(&mut rig, 2820 + spare.whole_mib());
    rig.tell(Event::EngineInspected {
        shape: model.clone(),
    });
    rig.now = rig.now + ms(10);
    let plan = applies(&mut rig, &model);
    assert!(
        model.plan_bytes(&plan) <= mib(2820) && plan.resident.len() < 24,
        "{plan:?}"
    );
    let limits = PlanLimits::new(&EngineParams::default(), Tokens::ZERO);
    assert!(plan.resident.len() > model.floor_plan(&limits).resident.len());
    // The warning: 5.3 GB become 1.6, and all optional memory is shed at once.
    rig.wait(10);
    sample(&mut rig, 0);
    if rig.plan_asked().is_none() {
        rig.wait(10);
        sample(&mut rig, 0);
    }
    let shed = applies(&mut rig, &model);
    assert!(
        shed.resident.is_empty()
            && model.plan_bytes(&shed) >= model.plan_bytes(&model.floor_plan(&limits))
    );
    assert_eq!(rig.snapshot().engine.state, EngineState::Ready);
    for step in 1..=3 {
        rig.wait(600);
        let actions = sample(&mut rig, 2820 + 1500);
        assert!(
            !actions
                .iter()
                .any(|action| matches!(action, Action::ApplyPlan { .. })),
            "within the dwell: {step}"
        );
    }
    for _ in 0..10 {
        rig.wait(600);
        sample(&mut rig, 2820 + 1500);
    }
    let grown = rig.snapshot().engine.asked.unwrap();
    assert!(
        !grown.resident.is_empty() && grown.resident.len() < 24,
        "{grown:?}"
    );
}

/// One slot, and requests A B A A C A B C: served in order of arrival, so C is served within its wait however often A
/// requests.
#[test]
fn ab_thrash_serves_c_within_its_wait() {
    let mut rig = Rig::sampled(params());
    let mut served: Vec<(String, Duration)> = Vec::new();
    let note = |rig: &Rig, served: &mut Vec<(String, Duration)>| {
        for action in &rig.actions {
            if let Action::Answer {
                answer: Answer::Lease { lease },
                ..
            } = action
            {
                served.push((lease.tenant.clone(), rig.now.since_start()));
            }
        }
    };
    for (number, who) in ["a", "b", "a", "a", "c", "a", "b", "c"]
        .into_iter()
        .enumerate()
    {
        rig.request(
            &format!("{who}{number}"),
            Class::Interactive,
            300,
            300,
            20_000,
        );
        note(&rig, &mut served);
    }
    while served.len() < 8 {
        let (tenant, _) = served.last().unwrap().clone();
        let lease = rig.lease(&tenant).unwrap();
        // A repeats its request while others wait.
        let again = format!("a{}", rig.now);
        rig.wait(1000)
            .request(&again, Class::Interactive, 300, 300, 500);
        rig.lost(&lease);
        note(&rig, &mut served);
    }
    let order: Vec<&str> = served.iter().map(|(tenant, _)| &tenant[..2]).collect();
    assert_eq!(order, ["a0", "b1", "a2", "a3", "c4", "a5", "b6", "c7"]);
    assert!(
        served.iter().all(|(_, at)| *at < Duration::from_secs(20)),
        "{served:?}"
    );
}

/// A holder renews and resizes its own 6 of 12 GiB while 6 are free: its lease does not count against it.
#[test]
fn a_holder_is_not_in_its_own_way() {
    let mut params = Params::for_budget(Bytes::from_gib(12), Bytes::ZERO, Scope::Session);
    params.pressure.elevated_below = mib(2);
    params.pressure.critical_below = mib(1);
    params.pressure.last_resort_below = mib(1);
    params.pressure.hysteresis = mib(1);
    let mut rig = Rig::sampled(params);
    let lease = grant(&mut rig, "a", Class::Interactive, 6 * 1024);
    rig.samples(6 * 1024);
    rig.measure("a", 6 * 1024);
    rig.renew(&lease);
    assert_eq!(rig.granted().memory.held, Bytes::from_gib(6));
    let ticket = rig.ticket();
    rig.tell(Event::LeaseResizeRequested(LeaseResize {
        ticket,
        lease: lease.id,
        generation: lease.generation,
        peer: peer(1000),
        min: Bytes::from_gib(12),
        max: Bytes::from_gib(12),
        wait: Duration::ZERO,
    }));
    assert_eq!(rig.granted().memory.held, Bytes::from_gib(12));
}

/// A lease released by an operator ends for its holder too.
#[test]
fn a_release_by_an_operator_ends_the_lease_for_its_holder() {
    let mut rig = Rig::sampled(params());
    let lease = grant(&mut rig, "a", Class::Interactive, 100);
    let ticket = rig.ticket();
    rig.tell(Event::LeaseReleased(LeaseCall {
        ticket,
        lease: lease.id,
        generation: lease.generation,
        peer: Peer {
            uid: 0,
            operator: true,
            ..Peer::default()
        },
    }));
    assert!(
        acts!(rig, Action::EndLease { lease: ended, .. } if ended.id == lease.id),
        "{:#?}",
        rig.actions
    );
}

/// Absurd sizes and a clock that goes back are answered, and leave the ledger unchanged.
#[test]
fn absurd_requests_leave_the_book_untouched() {
    let mut rig = Rig::new(params());
    rig.wait(5000).sample(0);
    let lease = grant(&mut rig, "a", Class::Interactive, 100);
    let before = rig.snapshot();
    for (min, max) in [
        (0, 0),
        (0, u64::MAX),
        (u64::MAX, u64::MAX),
        (10, 9),
        (1 << 63, 1 << 63),
    ] {
        let ticket = rig.ticket();
        let request = LeaseRequest {
            min: Bytes::new(min),
            max: Bytes::new(max),
            ..request("b", Class::Interactive, 1, 1, 0)
        };
        rig.tell(Event::LeaseRequested { ticket, request });
        assert!(
            matches!(
                rig.denial(),
                Denial::Invalid { .. } | Denial::ExceedsBudget { .. }
            ),
            "{min} {max}"
        );
        let ticket = rig.ticket();
        rig.tell(Event::LeaseResizeRequested(LeaseResize {
            ticket,
            lease: lease.id,
            generation: lease.generation,
            peer: peer(1000),
            min: Bytes::new(min),
            max: Bytes::new(max),
            wait: Duration::ZERO,
        }));
        assert!(
            matches!(
                rig.denial(),
                Denial::Invalid { .. } | Denial::ExceedsBudget { .. }
            ),
            "{min} {max}"
        );
    }
    for generation in [0, lease.generation + 1, u64::MAX] {
        let ticket = rig.ticket();
        rig.tell(Event::LeaseReleased(LeaseCall {
            ticket,
            lease: lease.id,
            generation,
            peer: peer(1000),
        }));
        assert!(
            matches!(rig.denial(), Denial::StaleGeneration { current, .. } if current == lease.generation),
            "{generation}"
        );
    }
    let now = rig.now;
    rig.now = Timestamp::START;
    rig.request("late", Class::Interactive, 400, 400, 0);
    assert!(matches!(rig.denial(), Denial::InsufficientMemory { .. }));
    rig.now = now;
    let after = rig.snapshot();
    assert_eq!(
        (after.memory.held, after.memory.free, after.at),
        (before.memory.held, before.memory.free, before.at)
    );
    assert_eq!(after.leases, before.leases);
}

proptest! {
    /// A and B alternate: regrown memory is not shed again within the dwell of the last shed.
    #[test]
    fn ab_thrash_swaps_once_in_a_dwell_at_most(steps in prop::collection::vec((10u64..900, 50u64..350, any::<bool>()), 10..80)) {
        let mut rig = Rig::with_engine_ready(params());
        let dwell = ms(2000);
        let mut goal = rig.held("llm");
        let (mut shed_at, mut swaps, mut grew) = (None::<Timestamp>, Vec::new(), false);
        for (number, (wait, size, leaves)) in steps.into_iter().enumerate() {
            let tenant = if number % 2 == 0 { "router" } else { "candidate" };
            rig.wait(wait).request(tenant, Class::Interactive, size, size, 0);
            for round in 0..3 {
                while let Some((revision, plan)) = rig.plan_asked() {
                    let bytes = shape().plan_bytes(&plan);
                    if bytes < goal {
                        if grew {
                            swaps.push(rig.now);
                        }
                        (grew, shed_at) = (false, Some(rig.now));
                    } else if bytes > goal {
                        prop_assert!(shed_at.is_none_or(|at| rig.now.saturating_since(at) >= dwell));
                        grew = true;
                    }
                    goal = bytes;
                    rig.engine_applies_plan(revision, plan);
                }
                if round == 0 && leaves && let Some(lease) = rig.lease(tenant) {
                    rig.wait(5).lost(&lease);
                } else {
                    let held = rig.snapshot().memory.held.whole_mib();
                    rig.wait(5).sample(held);
                }
            }
            for other in ["router", "candidate"] {
                if let Some(lease) = rig.lease(other) {
                    rig.lost(&lease);
                }
            }
        }
        for pair in swaps.windows(2) {
            prop_assert!(pair[1].saturating_since(pair[0]) >= dwell, "{swaps:?}");
        }
    }
}
