//! Tests of the life of workers.

use super::*;
use crate::policy::{
    death::{DeathCertificate, DeathClass, DeathMemory, DeathVerdict},
    decision::WorkerDecision,
    params::VariantParams,
    pressure::PressureLevel,
    reason::StopReason,
    snapshot::WorkerState::{BackingOff, Degraded, Ready, Stopped},
};

fn dies(harness: &mut Harness, name: &str, class: DeathClass, needs_operator: bool) {
    harness.wait(10).tell(Event::WorkerDied {
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
    harness.wait(10).exits(name, false, "exit code 3");
}

#[test]
fn an_unresponsive_worker_is_ended_once_it_is_the_process_that_runs() {
    let mut harness = Harness::with_workers(vec![worker("tts", 30)]);
    let unresponsive = |pid| Event::WorkerUnresponsive {
        worker: "tts".to_owned(),
        pid,
        evidence: "no answer within 30 s".to_owned(),
    };
    let aborts = |harness: &Harness| {
        let is_abort = |action: &Action| matches!(action, Action::AbortWorker { worker, .. } if worker == "tts");
        harness.actions.iter().any(is_abort)
    };
    harness.tell(unresponsive(7));
    assert!(!aborts(&harness), "it is still starting");
    harness.ready("tts", 30);
    harness.tell(unresponsive(6));
    assert!(!aborts(&harness), "another process");
    harness.tell(unresponsive(7));
    assert!(aborts(&harness));
    harness.wait(10).exits("tts", false, "exit code 3");
    assert_eq!(harness.worker("tts").state, BackingOff, "as after any failure");
}

#[test]
fn a_worker_that_would_die_in_the_same_way_again_waits_for_an_operator() {
    let mut harness = Harness::with_workers(vec![worker("tts", 30)]);
    dies(&mut harness, "tts", DeathClass::MissingLibrary, true);
    assert_eq!(harness.worker("tts").state, Degraded, "not even one start more");
    assert!(decided!(harness, Worker(WorkerDecision::NeedsOperator { .. })));
    let death = harness.worker("tts").last_death.unwrap();
    assert_eq!((death.class, death.needs_operator), (DeathClass::MissingLibrary, true));
    assert_eq!(harness.held("tts"), Bytes::ZERO);

    // Cured and started by hand, it is a worker like any other.
    harness.command("tts", WorkerCommand::Start);
    assert!(harness.starts("tts"));
    dies(&mut harness, "tts", DeathClass::SegmentationFault, false);
    assert_eq!(harness.worker("tts").state, BackingOff);
    assert_eq!(
        harness.worker("tts").last_death.unwrap().class,
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
    let mut harness = Harness::sampled(params);
    harness.pass(119_000);
    assert!(!harness.starts("tts"));
    harness.pass(1000);
    assert!(harness.starts("tts"));
}

#[test]
fn a_worker_that_dies_comes_back_after_its_backoff_and_is_left_alone_after_too_many() {
    let mut harness = Harness::with_workers(vec![worker("tts", 30)]);
    assert!(harness.starts("tts"));
    harness.ready("tts", 30);
    for wait in [500, 1000, 2000] {
        harness.wait(10).exits("tts", false, "exit code 3");
        assert_eq!(
            (harness.worker("tts").state, harness.snapshot().held),
            (BackingOff, Bytes::ZERO)
        );
        harness.pass(wait - 1);
        assert!(!harness.starts("tts"));
        harness.pass(1);
        assert!(harness.starts("tts"));
    }
    harness.wait(10).exits("tts", false, "exit code 3");
    assert_eq!(
        (harness.worker("tts").state, harness.worker("tts").failures),
        (Degraded, 4)
    );
    assert!(decided!(harness, Worker(WorkerDecision::GivenUp { failures: 4, .. })));
    harness.command("tts", WorkerCommand::Start);
    assert!(harness.starts("tts"));
}

#[test]
fn a_worker_that_never_answers_is_stopped_and_counts_as_failed() {
    let mut harness = Harness::with_workers(vec![worker("tts", 30)]);
    harness.pass(5000);
    assert_eq!(
        harness.stop_reason("tts"),
        Some(StopReason::NotReady { within: ms(5000) })
    );
    harness.wait(10).exits("tts", true, "exit code 3");
    assert_eq!(harness.worker("tts").state, BackingOff);
}

/// A budget without room: the engine has 132 MiB, ASR 40 MiB, another tenant the rest.
fn no_room() -> Harness {
    let mut params = params();
    params.workers = vec![asr()];
    let mut harness = Harness::with_engine_ready(params);
    harness.ready("asr", 36);
    harness.request("other", Class::AudioRealtime, 228, 228, 0);
    harness.granted();
    assert_eq!(harness.snapshot().free, Bytes::ZERO);
    harness
}

fn ask_variant(harness: &mut Harness, variant: &str, wait_ms: u64) {
    let ticket = harness.ticket();
    harness.tell(Event::WorkerResizeRequested {
        ticket,
        worker: "asr".to_owned(),
        variant: variant.to_owned(),
        wait: ms(wait_ms),
    });
}

fn resized(harness: &mut Harness, variant: &str, used_mib: u64, error: Option<&str>) {
    harness.wait(10).tell(Event::WorkerResized {
        worker: "asr".to_owned(),
        variant: variant.to_owned(),
        used: Some(mib(used_mib)),
        error: error.map(str::to_owned),
    });
}

#[test]
fn a_larger_variant_is_booked_before_the_worker_is_asked_and_the_engine_gives_way() {
    let mut harness = no_room();
    ask_variant(&mut harness, "open", 1000);
    assert!(!acts!(harness, Action::ResizeWorker { .. }));
    harness.engine_applies();
    assert!(acts!(harness, Action::ResizeWorker { variant, .. } if variant == "open"));
    assert_eq!((harness.held("asr"), harness.try_answer()), (mib(104), None));
    resized(&mut harness, "open", 99, None);
    assert!(matches!(harness.answer(), Answer::Done { .. }));
    assert_eq!(harness.held("asr"), mib(104));
    ask_variant(&mut harness, "grammar", 1000);
    resized(&mut harness, "grammar", 99, None);
    assert_eq!(harness.held("asr"), mib(99), "credited as far as it is measured");
    harness.wait(50).measure("asr", 38);
    assert_eq!(harness.held("asr"), mib(40));
}

#[test]
fn a_change_that_fails_keeps_the_variant_and_gives_the_booking_back() {
    let mut harness = no_room();
    ask_variant(&mut harness, "open", 1000);
    harness.engine_applies();
    resized(&mut harness, "grammar", 36, Some("no such model"));
    assert!(matches!(
        harness.denial(),
        Denial::Invalid { problem: Problem::Kept { error }, .. } if error == "no such model"
    ));
    assert_eq!(harness.held("asr"), mib(40));
}

#[test]
fn an_unknown_worker_or_variant_is_refused() {
    let mut harness = no_room();
    ask_variant(&mut harness, "huge", 0);
    let known = vec!["grammar".to_owned(), "open".to_owned()];
    let problem = Problem::NotAVariant { known };
    assert_eq!(harness.denial(), Denial::invalid("asr", "variant", &"huge", problem));
}

#[test]
fn an_idle_worker_of_a_lower_class_gives_way_and_comes_back() {
    let mut harness = Harness::with_workers(vec![of_class(Class::Batch, worker("indexer", 300))]);
    harness.ready("indexer", 300);
    harness.wait(10).request("voice", Class::AudioRealtime, 200, 200, 5000);
    assert!(harness.stops("indexer"));
    harness.wait(10).exits("indexer", true, "exit code 3");
    let voice = harness.granted();
    assert_eq!(harness.worker("indexer").state, Stopped);
    harness.wait(10).lost(&voice);
    harness.samples(0);
    assert_eq!(harness.worker("indexer").state, Stopped, "not within the dwell");
    harness.wait(2000).sample(0);
    assert!(harness.starts("indexer"));
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
    let mut harness = Harness::with_workers(vec![with_reload("quick", 1), with_reload("slow", 20)]);
    harness.ready("quick", 150);
    harness.ready("slow", 150);
    harness.wait(10).request("voice", Class::AudioRealtime, 390, 390, 5000);
    assert!(harness.stops("quick"), "what costs least goes first");
    harness.wait(10).exits("quick", true, "exit code 3");
    assert!(harness.stops("slow"));
    harness.wait(10).exits("slow", true, "exit code 3");
    let voice = harness.granted();
    harness.wait(10).lost(&voice);
    harness.wait(2000).sample(0);
    assert!(
        harness.starts("slow") && !harness.starts("quick"),
        "{:#?}",
        harness.actions
    );
    harness.ready("slow", 150);
    harness.wait(10).sample(150);
    assert!(harness.starts("quick"));
}

#[test]
fn under_critical_pressure_an_idle_worker_becomes_smaller_before_it_is_stopped() {
    let mut harness = Harness::with_workers(vec![asr()]);
    harness.ready("asr", 40);
    ask_variant(&mut harness, "open", 0);
    resized(&mut harness, "open", 100, None);
    harness.samples(395);
    assert!(
        acts!(harness, Action::ResizeWorker { variant, .. } if variant == "grammar"),
        "{:#?}",
        harness.actions
    );
    resized(&mut harness, "grammar", 38, None);
    assert_eq!(harness.held("asr"), mib(40));
    for _ in 0..50 {
        harness.wait(100).sample(38);
        if acts!(harness, Action::ResizeWorker { variant, .. } if variant == "open") {
            return;
        }
        assert_ne!(harness.worker("asr").state, Stopped);
    }
    panic!("the variant was not restored");
}

#[test]
fn a_worker_is_stopped_for_what_is_missing_now_and_not_for_foresight() {
    let mut params = with_engine(params());
    params.shed.minimum_reclaim = mib(100);
    params.workers = vec![of_class(Class::Batch, worker("indexer", 150))];
    let mut harness = Harness::with_engine_ready_in(params);
    harness.ready("indexer", 150);
    harness.wait(60_000).sample(282);
    harness.measure("indexer", 150);
    harness.measure("llm", 132);
    // A neighbour: 24 of 26 MiB are left at Critical; 28 are missing and 128 wanted, of which the engine has 104.
    harness.samples(376);
    assert_eq!(harness.snapshot().level, PressureLevel::Critical);
    assert!(!harness.stops("indexer"), "{:#?}", harness.actions);
    let used = harness.engine_applies().whole_mib();
    assert_eq!(used, 28, "all that the engine has");

    // It takes more: between the watermarks no worker is stopped, though the level stays for its dwell.
    for left in [45, 38, 36] {
        harness.wait(400).samples(400 - left);
        assert!(!harness.stops("indexer"), "{left} MiB are left: {:#?}", harness.actions);
        assert_eq!(harness.snapshot().level, PressureLevel::Critical);
    }
    harness.wait(400).samples(380);
    assert!(harness.stops("indexer"), "{:#?}", harness.actions);
}

#[test]
fn who_is_stopped_is_chosen_for_what_is_missing_now() {
    let mut params = params();
    params.shed.minimum_reclaim = mib(100);
    params.workers = vec![
        of_class(Class::Batch, worker("indexer", 60)),
        of_class(Class::AudioRealtime, worker("voice", 150)),
    ];
    let mut harness = Harness::sampled(params);
    harness.ready("indexer", 60);
    harness.ready("voice", 150);
    harness.wait(60_000).sample(210);
    harness.measure("indexer", 60);
    harness.measure("voice", 150);
    // 24 MiB are left of 26 at Critical: 28 are missing and 128 wanted, which only the voice has, or both.
    harness.samples(376);
    assert_eq!(harness.snapshot().level, PressureLevel::Critical);
    assert!(harness.stops("indexer"), "{:#?}", harness.actions);
    assert!(!harness.stops("voice"), "{:#?}", harness.actions);
}

#[test]
fn an_operator_stops_and_starts_a_worker() {
    let mut harness = Harness::with_workers(vec![worker("tts", 30)]);
    harness.ready("tts", 30);
    harness.wait(10).command("tts", WorkerCommand::Stop);
    assert!(harness.stops("tts"));
    harness.wait(10).exits("tts", true, "exit code 3");
    harness.pass(60_000);
    assert_eq!(harness.worker("tts").state, Stopped);
    harness.wait(10).command("tts", WorkerCommand::Start);
    assert!(harness.starts("tts"));
    harness.ready("tts", 30);
    harness.wait(10).command("tts", WorkerCommand::Recycle);
    assert!(harness.stops("tts"));
    harness.wait(10).exits("tts", true, "exit code 3");
    assert!(harness.starts("tts"));
    harness.ready("tts", 30);
    assert_eq!(harness.worker("tts").state, Ready);
}

#[test]
fn a_worker_that_only_says_that_it_has_become_smaller_is_named_and_stopped() {
    let mut harness = Harness::with_workers(vec![asr()]);
    harness.ready("asr", 40);
    ask_variant(&mut harness, "open", 0);
    resized(&mut harness, "open", 100, None);
    harness.samples(395);
    resized(&mut harness, "grammar", 100, None);
    assert_eq!(harness.held("asr"), mib(100), "not credited");
    harness.pass(250);
    let stays = StopReason::NotSmaller {
        used: Some(mib(100)),
        held: mib(100),
    };
    assert_eq!(harness.stop_reason("asr"), Some(stays));
}

#[test]
fn a_kill_at_the_limit_of_its_group_raises_what_a_worker_is_expected_to_need() {
    let mut harness = Harness::with_workers(vec![worker("asr", 100)]);
    harness.ready("asr", 90);
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
    let learned = |harness: &Harness| {
        let mut stored = harness.actions.iter().filter_map(|action| match action {
            Action::StorePeaks { peaks } => peaks.of("asr", None).map(|peak| peak.bytes),
            _ => None,
        });
        stored.next_back()
    };
    // Any other end says nothing of it.
    harness.wait(10).tell(Event::WorkerDied {
        certificate: died(DeathClass::Abort),
    });
    assert_eq!(learned(&harness), None);
    harness.wait(10).tell(Event::WorkerDied {
        certificate: died(DeathClass::MemcgOom),
    });
    let once = learned(&harness).unwrap();
    assert_eq!(once, mib(168), "a fifth more than it had");
    harness.wait(10).tell(Event::WorkerDied {
        certificate: died(DeathClass::MemcgOom),
    });
    assert!(learned(&harness).unwrap() > once, "and again, when that was not enough");
    assert!(decided!(harness, Worker(WorkerDecision::PeakRaised { .. })));
}

/// One size of a worker was seen to need more than its file says; the other one keeps what its file says.
#[test]
fn each_variant_has_a_peak_of_its_own() {
    let mut harness = Harness::with_workers(vec![asr()]);
    let configured = harness.held("asr");
    let peak = |harness: &mut Harness, peak: u64, used: u64| {
        harness.wait(10).peak("asr", peak);
        harness.measure("asr", used);
    };
    harness.ready("asr", 40);
    peak(&mut harness, 42, 40);
    ask_variant(&mut harness, "open", 0);
    resized(&mut harness, "open", 100, None);
    peak(&mut harness, 180, 100);
    ask_variant(&mut harness, "grammar", 0);
    resized(&mut harness, "grammar", 40, None);
    // The kernel's memory is of the larger size, and says nothing of the smaller one.
    peak(&mut harness, 180, 40);
    ask_variant(&mut harness, "open", 0);
    assert_eq!(harness.held("asr"), mib(198), "1.1 times 180");
    harness.wait(10).exits("asr", false, "exit code 3");
    harness.pass(1000);
    assert!(harness.starts("asr"), "{:#?}", harness.actions);
    assert_eq!(harness.held("asr"), configured);
}
