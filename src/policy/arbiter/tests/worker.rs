//! Tests of the life cycle of workers.

use super::*;
use crate::{
    death::{DeathCertificate, DeathClass, DeathMemory, DeathVerdict},
    decision::{AdmissionDecision, WorkerDecision},
    params::VariantParams,
    peaks::LearnedPeak,
    pressure::PressureLevel,
    reason::StopReason,
    snapshot::WorkerState::{BackingOff, Degraded, Ready, Stopped},
};

fn dies(rig: &mut Rig, name: &str, class: DeathClass, needs_operator: bool) {
    rig.wait(10).tell(Event::WorkerDied {
        certificate: Box::new(DeathCertificate {
            worker: name.to_owned(),
            verdict: DeathVerdict {
                class,
                needs_operator,
                sentence: format!("worker `{name}` died"),
                remedy: Some("install it".to_owned()),
                ..DeathVerdict::default()
            },
            ..DeathCertificate::default()
        }),
    });
    rig.wait(10).exits(name, false, "exit code 3");
}

#[test]
fn an_unresponsive_worker_is_ended_once_it_is_the_process_that_runs() {
    let mut rig = Rig::with_workers(vec![worker("tts", 30)]);
    let unresponsive = |pid| Event::WorkerUnresponsive {
        worker: "tts".to_owned(),
        pid,
        evidence: "no answer within 30 s".to_owned(),
    };
    let aborts = |rig: &Rig| {
        let is_abort = |action: &Action| matches!(action, Action::AbortWorker { worker, .. } if worker == "tts");
        rig.actions.iter().any(is_abort)
    };
    rig.tell(unresponsive(7));
    assert!(!aborts(&rig), "it is still starting");
    rig.ready("tts", 30);
    rig.tell(unresponsive(6));
    assert!(!aborts(&rig), "another process");
    rig.tell(unresponsive(7));
    assert!(aborts(&rig));
    rig.wait(10).exits("tts", false, "exit code 3");
    assert_eq!(rig.worker("tts").state, BackingOff, "as after any failure");
}

#[test]
fn a_worker_that_would_die_in_the_same_way_again_waits_for_an_operator() {
    let mut rig = Rig::with_workers(vec![worker("tts", 30)]);
    dies(&mut rig, "tts", DeathClass::MissingLibrary, true);
    assert_eq!(rig.worker("tts").state, Degraded, "not even one start more");
    assert!(decided!(rig, Worker(WorkerDecision::NeedsOperator { .. })));
    let death = rig.worker("tts").last_death.unwrap();
    assert_eq!(
        (death.class, death.needs_operator),
        (DeathClass::MissingLibrary, true)
    );
    assert_eq!(rig.held("tts"), Bytes::ZERO);

    // Started by hand after its cause was removed, it is restarted like any other worker.
    rig.command("tts", WorkerCommand::Start);
    assert!(rig.starts("tts"));
    dies(&mut rig, "tts", DeathClass::SegmentationFault, false);
    assert_eq!(rig.worker("tts").state, BackingOff);
    assert_eq!(
        rig.worker("tts").last_death.unwrap().class,
        DeathClass::SegmentationFault
    );
}

/// ASR in `grammar` (40 MiB) or `open` (104 MiB).
fn asr() -> WorkerParams {
    WorkerParams {
        variants: vec![
            VariantParams {
                name: "grammar".to_owned(),
                steady: mib(40),
                peak: mib(50),
            },
            VariantParams {
                name: "open".to_owned(),
                steady: mib(104),
                peak: mib(104),
            },
        ],
        ..worker("asr", 40)
    }
}

#[test]
fn workers_do_not_wait_for_ever_for_an_engine_that_does_not_come() {
    let mut params = with_engine(params());
    params.workers = vec![worker("tts", 30)];
    let mut rig = Rig::sampled(params);
    rig.pass(119_000);
    assert!(!rig.starts("tts"));
    rig.pass(1000);
    assert!(rig.starts("tts"));
}

#[test]
fn a_worker_that_dies_comes_back_after_its_backoff_and_is_left_alone_after_too_many() {
    let mut rig = Rig::with_workers(vec![worker("tts", 30)]);
    assert!(rig.starts("tts"));
    rig.ready("tts", 30);
    for wait in [500, 1000, 2000] {
        rig.wait(10).exits("tts", false, "exit code 3");
        assert_eq!(
            (rig.worker("tts").state, rig.snapshot().memory.held),
            (BackingOff, Bytes::ZERO)
        );
        rig.pass(wait - 1);
        assert!(!rig.starts("tts"));
        rig.pass(1);
        assert!(rig.starts("tts"));
    }
    rig.wait(10).exits("tts", false, "exit code 3");
    assert_eq!(
        (rig.worker("tts").state, rig.worker("tts").failures),
        (Degraded, 4)
    );
    assert!(decided!(
        rig,
        Worker(WorkerDecision::GivenUp { failures: 4, .. })
    ));
    rig.command("tts", WorkerCommand::Start);
    assert!(rig.starts("tts"));
}

#[test]
fn a_worker_that_never_answers_is_stopped_and_counts_as_failed() {
    let mut rig = Rig::with_workers(vec![worker("tts", 30)]);
    rig.pass(5000);
    assert_eq!(
        rig.stop_reason("tts"),
        Some(StopReason::NotReady { within: ms(5000) })
    );
    rig.wait(10).exits("tts", true, "exit code 3");
    assert_eq!(rig.worker("tts").state, BackingOff);
}

/// Returns a rig with nothing free: the engine has 132 MiB, ASR 40 MiB, another tenant the rest.
fn no_room() -> Rig {
    let mut params = params();
    params.workers = vec![asr()];
    let mut rig = Rig::with_engine_ready(params);
    rig.ready("asr", 36);
    rig.request("other", Class::AudioRealtime, 228, 228, 0);
    rig.granted();
    assert_eq!(rig.snapshot().memory.free, Bytes::ZERO);
    rig
}

fn ask_variant(rig: &mut Rig, variant: &str, wait_ms: u64) {
    let ticket = rig.ticket();
    rig.tell(Event::WorkerResizeRequested(WorkerResize {
        ticket,
        worker: "asr".to_owned(),
        variant: variant.to_owned(),
        wait: ms(wait_ms),
        by: None,
    }));
}

fn resized(rig: &mut Rig, variant: &str, used_mib: u64, error: Option<&str>) {
    rig.wait(10).tell(Event::WorkerResized(WorkerResized {
        worker: "asr".to_owned(),
        variant: variant.to_owned(),
        used: Some(mib(used_mib)),
        error: error.map(str::to_owned),
    }));
}

#[test]
fn a_larger_variant_is_booked_before_the_worker_is_asked_and_the_engine_gives_way() {
    let mut rig = no_room();
    ask_variant(&mut rig, "open", 1000);
    assert!(!acts!(rig, Action::ResizeWorker { .. }));
    rig.engine_applies();
    assert!(acts!(rig, Action::ResizeWorker { variant, .. } if variant == "open"));
    assert_eq!((rig.held("asr"), rig.try_answer()), (mib(104), None));
    resized(&mut rig, "open", 99, None);
    assert!(matches!(rig.answer(), Answer::Done { .. }));
    assert_eq!(rig.held("asr"), mib(104));
    ask_variant(&mut rig, "grammar", 1000);
    resized(&mut rig, "grammar", 99, None);
    assert_eq!(
        rig.held("asr"),
        mib(99),
        "credited as far as it is measured"
    );
    rig.wait(50).measure("asr", 38);
    assert_eq!(rig.held("asr"), mib(40));
}

#[test]
fn a_change_that_fails_keeps_the_variant_and_gives_the_booking_back() {
    let mut rig = no_room();
    ask_variant(&mut rig, "open", 1000);
    rig.engine_applies();
    resized(&mut rig, "grammar", 36, Some("no such model"));
    assert!(matches!(
        rig.denial(),
        Denial::Invalid { problem: Problem::Kept { error }, .. } if error == "no such model"
    ));
    assert_eq!(rig.held("asr"), mib(40));
}

#[test]
fn an_unknown_worker_or_variant_is_refused() {
    let mut rig = no_room();
    ask_variant(&mut rig, "huge", 0);
    let known = vec!["grammar".to_owned(), "open".to_owned()];
    let problem = Problem::NotAVariant { known };
    assert_eq!(
        rig.denial(),
        Denial::invalid("asr", "variant", &"huge", problem)
    );
}

#[test]
fn an_idle_worker_of_a_lower_class_gives_way_and_comes_back() {
    let mut rig = Rig::with_workers(vec![of_class(Class::Batch, worker("indexer", 300))]);
    rig.ready("indexer", 300);
    rig.wait(10)
        .request("voice", Class::AudioRealtime, 200, 200, 5000);
    assert!(rig.stops("indexer"));
    rig.wait(10).exits("indexer", true, "exit code 3");
    let voice = rig.granted();
    assert_eq!(rig.worker("indexer").state, Stopped);
    rig.wait(10).lost(&voice);
    rig.samples(0);
    assert_eq!(rig.worker("indexer").state, Stopped, "not within the dwell");
    rig.wait(2000).sample(0);
    assert!(rig.starts("indexer"));
}

/// A neighbour leaves too little for the voice: until it ends, layers use what is free, then return it.
#[test]
fn the_room_of_a_stopped_worker_is_lent_to_layers_until_it_may_return() {
    let mut params = with_engine(params());
    params.pressure.dwell_by_growth = true;
    params.workers = vec![of_class(Class::AudioRealtime, worker("voice", 230))];
    let mut rig = Rig::with_engine_ready_in(params);
    rig.ready("voice", 230);
    rig.operator_shed(mib(60));
    let least = rig.engine_applies().whole_mib();
    rig.wait(1100).sample(230 + least);
    let beside = rig.engine_applies();
    // The regrown layers are shed again at once, and the voice is stopped as well.
    let mut stopped = false;
    for _ in 0..4 {
        rig.wait(300).samples(396);
        if rig.plan_asked().is_some() {
            rig.engine_applies();
        }
        stopped |= rig.stops("voice");
    }
    assert!(stopped);
    rig.wait(10).exits("voice", true, "exit code 0");
    let mut most = Bytes::ZERO;
    for step in 0..160 {
        let neighbour = if step < 100 { 100 } else { 0 };
        let used = neighbour + rig.held("llm").whole_mib();
        rig.wait(50).sample(used);
        if rig.plan_asked().is_some() {
            rig.engine_applies();
        }
        if rig.starts("voice") {
            assert_eq!(neighbour, 0);
            break;
        }
        most = most.max(rig.held("llm"));
    }
    assert!(rig.starts("voice"), "{:#?}", rig.snapshot().engine.waits);
    assert!(most > beside, "{most}");
}

#[test]
fn the_dearer_of_two_stopped_workers_comes_back_first() {
    let with_reload = |name: &str, seconds: u64| WorkerParams {
        class: Class::Batch,
        start: StartParams {
            reload: ms(1000 * seconds),
            ..worker(name, 150).start
        },
        ..worker(name, 150)
    };
    let mut rig = Rig::with_workers(vec![with_reload("quick", 1), with_reload("slow", 20)]);
    rig.ready("quick", 150);
    rig.ready("slow", 150);
    rig.wait(10)
        .request("voice", Class::AudioRealtime, 390, 390, 5000);
    assert!(rig.stops("quick"), "what costs least goes first");
    rig.wait(10).exits("quick", true, "exit code 3");
    assert!(rig.stops("slow"));
    rig.wait(10).exits("slow", true, "exit code 3");
    let voice = rig.granted();
    rig.wait(10).lost(&voice);
    rig.wait(2000).sample(0);
    assert!(
        rig.starts("slow") && !rig.starts("quick"),
        "{:#?}",
        rig.actions
    );
    rig.ready("slow", 150);
    rig.wait(10).sample(150);
    assert!(rig.starts("quick"));
}

#[test]
fn under_critical_pressure_an_idle_worker_becomes_smaller_before_it_is_stopped() {
    let mut rig = Rig::with_workers(vec![asr()]);
    rig.ready("asr", 40);
    ask_variant(&mut rig, "open", 0);
    resized(&mut rig, "open", 100, None);
    rig.samples(395);
    assert!(
        acts!(rig, Action::ResizeWorker { variant, .. } if variant == "grammar"),
        "{:#?}",
        rig.actions
    );
    resized(&mut rig, "grammar", 38, None);
    assert_eq!(rig.held("asr"), mib(40));
    for _ in 0..50 {
        rig.wait(100).sample(38);
        if acts!(rig, Action::ResizeWorker { variant, .. } if variant == "open") {
            return;
        }
        assert_ne!(rig.worker("asr").state, Stopped);
    }
    panic!("the variant was not restored");
}

/// Its use when it confirms the change is no evidence of the bytes freed.
#[test]
fn a_smaller_variant_may_use_a_little_more_than_it_is_set_to() {
    let mut rig = Rig::with_workers(vec![asr()]);
    rig.ready("asr", 40);
    ask_variant(&mut rig, "open", 0);
    resized(&mut rig, "open", 100, None);
    rig.samples(395);
    rig.measure("asr", 45);
    resized(&mut rig, "grammar", 45, None);
    assert_eq!(rig.held("asr"), mib(45));
    rig.pass(1000);
    assert!(!rig.stops("asr"), "{:#?}", rig.actions);
}

#[test]
fn a_worker_is_stopped_for_what_is_missing_now_and_not_for_foresight() {
    let mut params = with_engine(params());
    params.shed.minimum_reclaim = mib(100);
    params.workers = vec![of_class(Class::Batch, worker("indexer", 150))];
    let mut rig = Rig::with_engine_ready_in(params);
    rig.ready("indexer", 150);
    rig.wait(60_000).sample(282);
    rig.measure("indexer", 150);
    rig.measure("llm", 132);
    // A neighbour starts: 24 of 26 MiB are left at Critical; 28 are missing and 128 wanted, of which the engine has
    // 104.
    rig.samples(376);
    assert_eq!(rig.snapshot().pressure.level, PressureLevel::Critical);
    assert!(!rig.stops("indexer"), "{:#?}", rig.actions);
    let used = rig.engine_applies().whole_mib();
    assert_eq!(used, 28, "all that the engine has");

    // The neighbour grows: between the watermarks no worker is stopped, though the level stays for its dwell.
    for left in [45, 38, 36] {
        rig.wait(400).samples(400 - left);
        assert!(
            !rig.stops("indexer"),
            "{left} MiB are left: {:#?}",
            rig.actions
        );
        assert_eq!(rig.snapshot().pressure.level, PressureLevel::Critical);
    }
    rig.wait(400).samples(380);
    assert!(rig.stops("indexer"), "{:#?}", rig.actions);
}

#[test]
fn who_is_stopped_is_chosen_for_what_is_missing_now() {
    let mut params = params();
    params.shed.minimum_reclaim = mib(100);
    params.workers = vec![
        of_class(Class::Batch, worker("indexer", 60)),
        of_class(Class::AudioRealtime, worker("voice", 150)),
    ];
    let mut rig = Rig::sampled(params);
    rig.ready("indexer", 60);
    rig.ready("voice", 150);
    rig.wait(60_000).sample(210);
    rig.measure("indexer", 60);
    rig.measure("voice", 150);
    // 24 of 26 MiB are left at Critical: 28 are missing and 128 wanted, which only the voice has, or both.
    rig.samples(376);
    assert_eq!(rig.snapshot().pressure.level, PressureLevel::Critical);
    assert!(rig.stops("indexer"), "{:#?}", rig.actions);
    assert!(!rig.stops("voice"), "{:#?}", rig.actions);
}

#[test]
fn an_operator_stops_and_starts_a_worker() {
    let mut rig = Rig::with_workers(vec![worker("tts", 30)]);
    rig.ready("tts", 30);
    rig.wait(10).command("tts", WorkerCommand::Stop);
    assert!(rig.stops("tts"));
    rig.wait(10).exits("tts", true, "exit code 3");
    rig.pass(60_000);
    assert_eq!(rig.worker("tts").state, Stopped);
    rig.wait(10).command("tts", WorkerCommand::Start);
    assert!(rig.starts("tts"));
    rig.ready("tts", 30);
    rig.wait(10).command("tts", WorkerCommand::Recycle);
    assert!(rig.stops("tts"));
    rig.wait(10).exits("tts", true, "exit code 3");
    assert!(rig.starts("tts"));
    rig.ready("tts", 30);
    assert_eq!(rig.worker("tts").state, Ready);
}

#[test]
fn a_worker_that_only_says_that_it_has_become_smaller_is_named_and_stopped() {
    let mut rig = Rig::with_workers(vec![asr()]);
    rig.ready("asr", 40);
    ask_variant(&mut rig, "open", 0);
    resized(&mut rig, "open", 100, None);
    rig.samples(395);
    resized(&mut rig, "grammar", 100, None);
    assert_eq!(rig.held("asr"), mib(104), "not credited");
    rig.pass(450);
    let stays = StopReason::IgnoredPressure(crate::reason::IgnoredPressure {
        worker: "asr".to_owned(),
        pid: 7,
        used: Some(mib(100)),
        target: mib(40),
        late: ms(200),
    });
    assert_eq!(rig.stop_reason("asr"), Some(stays));
}

#[test]
fn a_kill_at_the_limit_of_its_group_raises_what_a_worker_is_expected_to_need() {
    let mut rig = Rig::with_workers(vec![worker("asr", 100)]);
    rig.ready("asr", 90);
    let died = |class| {
        Box::new(DeathCertificate {
            worker: "asr".to_owned(),
            verdict: DeathVerdict {
                class,
                ..DeathVerdict::default()
            },
            memory: DeathMemory {
                peak_resident: Some(mib(140)),
                ..DeathMemory::default()
            },
            ..DeathCertificate::default()
        })
    };
    let learned = |rig: &Rig| {
        let mut stored = rig.actions.iter().filter_map(|action| match action {
            Action::StorePeaks { peaks } => peaks.of("asr", None).map(|peak| peak.bytes),
            _ => None,
        });
        stored.next_back()
    };
    // Other exits are no evidence of its need.
    rig.wait(10).tell(Event::WorkerDied {
        certificate: died(DeathClass::Abort),
    });
    assert_eq!(learned(&rig), None);
    rig.wait(10).tell(Event::WorkerDied {
        certificate: died(DeathClass::MemcgOom),
    });
    let once = learned(&rig).unwrap();
    assert_eq!(once, mib(168), "a fifth more than it had");
    rig.wait(10).tell(Event::WorkerDied {
        certificate: died(DeathClass::MemcgOom),
    });
    assert!(
        learned(&rig).unwrap() > once,
        "and again, when that was not enough"
    );
    assert!(decided!(rig, Worker(WorkerDecision::PeakRaised { .. })));
}

/// Returns the learned peak of a variant.
fn peak_of(rig: &Rig, variant: &str) -> Option<Bytes> {
    rig.snapshot()
        .peaks
        .of("asr", Some(variant))
        .map(|peak| peak.bytes)
}

/// The kernel's high water is read while the worker shrinks, then a little lower, then as before, since the kernel sums
/// its counters without synchronisation. None of these readings belongs to the smaller variant.
#[test]
fn a_high_water_of_another_variant_that_is_not_read_twice_alike_is_not_learned() {
    let mut rig = Rig::with_workers(vec![asr()]);
    let configured = rig.held("asr");
    rig.ready("asr", 40);
    rig.wait(10).peak("asr", 42);
    ask_variant(&mut rig, "open", 0);
    resized(&mut rig, "open", 100, None);
    rig.wait(10).peak("asr", 100);
    ask_variant(&mut rig, "grammar", 0);
    rig.wait(10).peak("asr", 107);
    resized(&mut rig, "grammar", 40, None);
    for peak in [106, 107, 108, 106] {
        rig.wait(10).peak("asr", peak);
        rig.measure("asr", 40);
    }
    assert_eq!(
        (peak_of(&rig, "grammar"), peak_of(&rig, "open")),
        (Some(mib(42)), Some(mib(100)))
    );
    rig.wait(10).exits("asr", false, "exit code 3");
    rig.pass(1000);
    assert!(rig.starts("asr"), "{:#?}", rig.actions);
    assert_eq!(rig.held("asr"), configured);
    // A refused change may have used more temporarily.
    rig.ready("asr", 40);
    rig.wait(10).peak("asr", 42);
    ask_variant(&mut rig, "open", 0);
    rig.wait(10).peak("asr", 105);
    resized(&mut rig, "grammar", 40, Some("no vocabulary"));
    for peak in [104, 105] {
        rig.wait(10).peak("asr", peak);
        rig.measure("asr", 40);
    }
    assert_eq!(peak_of(&rig, "grammar"), Some(mib(42)));
    // Its own later peaks are learned as usual.
    rig.wait(10).peak("asr", 130);
    assert_eq!(peak_of(&rig, "grammar"), Some(mib(130)));
}

/// A first reading during or after a change may date from before it.
#[test]
fn a_high_water_that_was_not_read_before_a_change_is_learned_of_no_size() {
    let mut rig = Rig::with_workers(vec![asr()]);
    rig.ready("asr", 40);
    ask_variant(&mut rig, "open", 0);
    resized(&mut rig, "open", 100, None);
    rig.wait(10).peak("asr", 101);
    rig.measure("asr", 100);
    ask_variant(&mut rig, "grammar", 0);
    resized(&mut rig, "grammar", 40, None);
    ask_variant(&mut rig, "open", 0);
    rig.wait(10).peak("asr", 102);
    rig.measure("asr", 40);
    assert_eq!(
        (peak_of(&rig, "grammar"), peak_of(&rig, "open")),
        (None, None)
    );
    resized(&mut rig, "open", 100, None);
    rig.wait(10).peak("asr", 130);
    assert_eq!(
        (peak_of(&rig, "grammar"), peak_of(&rig, "open")),
        (None, Some(mib(130)))
    );
}

/// A wait is explained again when its figures have changed, and when another wait begins, at any figures.
#[test]
fn a_wait_is_explained_once_for_figures_that_waver() {
    let mut rig = Rig::sampled(params());
    let free = rig.snapshot().memory.free.whole_mib();
    rig.request("other", Class::AudioRealtime, free - 60, free - 60, 0);
    rig.granted();
    rig.wait(10).measure("other", free - 60);
    let explains = |rig: &Rig| decided!(rig, Admission(AdmissionDecision::Waits { .. }));
    rig.request("late", Class::AudioRealtime, 70, 70, 150);
    assert!(explains(&rig), "{:#?}", rig.actions);
    let mut explained = |more: u64| {
        rig.samples(free - 60 + more);
        explains(&rig)
    };
    assert_eq!(
        [32, 33, 32, 40, 40].map(&mut explained),
        [true, false, false, true, false]
    );
    rig.pass(100);
    rig.request("late", Class::AudioRealtime, 70, 70, 150);
    assert!(explains(&rig), "{:#?}", rig.actions);
}

/// A measured peak above the configured one applies to its variant only; the other keeps its configured peak.
#[test]
fn each_variant_has_a_peak_of_its_own() {
    let mut rig = Rig::with_workers(vec![asr()]);
    let configured = rig.held("asr");
    let peak = |rig: &mut Rig, peak: u64, used: u64| {
        rig.wait(10).peak("asr", peak);
        rig.measure("asr", used);
    };
    rig.ready("asr", 40);
    peak(&mut rig, 42, 40);
    ask_variant(&mut rig, "open", 0);
    resized(&mut rig, "open", 100, None);
    peak(&mut rig, 180, 100);
    ask_variant(&mut rig, "grammar", 0);
    resized(&mut rig, "grammar", 40, None);
    // The kernel's high water belongs to the larger variant, and is no evidence for the smaller one.
    peak(&mut rig, 180, 40);
    ask_variant(&mut rig, "open", 0);
    assert_eq!(rig.held("asr"), mib(198), "1.1 times 180");
    rig.wait(10).exits("asr", false, "exit code 3");
    rig.pass(1000);
    assert!(rig.starts("asr"), "{:#?}", rig.actions);
    assert_eq!(rig.held("asr"), configured);
}

#[test]
fn a_worker_whose_requests_take_much_is_started_with_what_its_starts_take() {
    let mut params = params();
    params.workers = vec![by_hand("tts", 100)];
    let learned = |start| LearnedPeak {
        holder: "tts".to_owned(),
        variant: None,
        bytes: mib(290),
        lives: 4,
        start,
        model: None,
    };
    for (start, starts) in [(None, false), (Some(mib(120)), true)] {
        let mut params = params.clone();
        params.peaks = std::iter::once(learned(start)).collect();
        let mut rig = Rig::sampled(params);
        rig.request("camera", Class::AudioRealtime, 180, 180, 0);
        rig.granted();
        rig.wanted("tts");
        assert_eq!(rig.starts("tts"), starts, "{start:?}: {:#?}", rig.actions);
        if starts {
            // The free part of its peak, and at least 1.1 times the use of a start.
            assert_eq!(rig.held("tts"), mib(220));
        }
    }
}

#[test]
fn of_two_idle_workers_the_one_that_has_grown_since_its_start_is_stopped() {
    let mut params = params();
    params.shed.minimum_reclaim = mib(20);
    params.workers = vec![worker("asr", 150), worker("tts", 150)];
    let learned = |holder: &str, start| LearnedPeak {
        holder: holder.to_owned(),
        variant: None,
        bytes: mib(150),
        lives: 4,
        start: Some(mib(start)),
        model: None,
    };
    for grown in ["asr", "tts"] {
        let mut params = params.clone();
        // `steady` counts for a start as well.
        for worker in &mut params.workers {
            if worker.name == grown {
                worker.steady = mib(60);
            }
        }
        params.peaks = ["asr", "tts"]
            .map(|name| learned(name, if name == grown { 50 } else { 136 }))
            .into_iter()
            .collect();
        let mut rig = Rig::sampled(params);
        for name in ["asr", "tts"] {
            rig.ready(name, 150);
            rig.wait(10).measure(name, 150);
        }
        rig.wait(1000).sample(300);
        rig.samples(376);
        for name in ["asr", "tts"] {
            assert_eq!(
                rig.stops(name),
                name == grown,
                "{grown}: {:#?}",
                rig.actions
            );
        }
    }
}

#[test]
fn a_busy_worker_is_stopped_at_the_last_resort_only_where_the_idle_ones_do_not_suffice() {
    for (idle, stopped) in [(150, "asr"), (20, "tts")] {
        let mut rig = Rig::with_workers(vec![worker("asr", idle), worker("tts", 60)]);
        rig.wait(900).ready("asr", idle);
        // It allocates all of its memory again when started: a stop frees little.
        rig.wait(10).peak("asr", idle);
        // A stop of this worker frees most of its growth.
        rig.wait(900).ready("tts", 50);
        rig.wait(10).peak("tts", 52);
        rig.wait(10_000).busy("tts", 1);
        rig.wait(200).measure("tts", 150);
        let actions = rig.samples(395);
        let stops = |name: &str| {
            actions
                .iter()
                .any(|action| matches!(action, Action::StopWorker { worker, .. } if worker == name))
        };
        assert_eq!(
            ["asr", "tts"].map(stops),
            [stopped == "asr", stopped == "tts"],
            "{idle}"
        );
    }
}
