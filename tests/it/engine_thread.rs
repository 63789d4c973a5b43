//! The engine's thread from outside: plans during work, shutdown, and real models.
#![expect(clippy::panic, reason = "test helpers")]

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::channel,
    },
    time::{Duration, Instant},
};

use crate::weights::Weights as _;
use cotenant::{
    conversation::sinks::Sinks,
    engine::{
        ApplyFailure, ChatMessage, Client, Engine, EngineEvent, EngineHandle, EngineOptions,
        EnginePhase, FinishReason, Flow, ForwardError, GenerateError, GenerateEvent,
        GenerateRequest, LoadError, Model, ModelOptions, Prompt, RequestId, Role, Sampling,
        SubmitError,
        arena::{Backing, Mapping, SharedMapping},
        disk::{DiskTimeout, Retained},
        gguf::GgmlDType,
        sampling::{MaskError, TokenMask},
        spec::Architecture,
        synthetic::{Synthetic, TypeMix},
    },
    policy::{kv_type::KvType, lease::Class, residency::EnginePlan},
    units::{Bytes, Tokens},
};
use tokio::sync::mpsc;

use crate::stage::*;

#[test]
fn a_plan_is_taken_between_two_layers_of_a_long_prompt() {
    let (mut stage, keeper) = Stage::gated(EngineOptions::default(), babble);
    let mut stream = stage
        .handle
        .generate(limited(1, &"a".repeat(100), 5))
        .unwrap();
    assert!(matches!(stage.event(), EngineEvent::RequestStarted { .. }));
    keeper.arrived();
    stage.handle.apply(7, plan(512));
    keeper.go();
    // The prompt is far from complete: its next layer has not been released.
    match stage.event() {
        EngineEvent::Applied {
            revision, report, ..
        } => {
            assert_eq!((revision, report.plan.kv_capacity), (7, Tokens::new(512)));
        }
        other => panic!("{other:?}"),
    }
    keeper.open();
    assert_eq!(collect(&mut stream).reason(), FinishReason::Length);
    let snapshot = stage.handle.snapshot();
    assert_eq!(
        (
            snapshot.revision,
            snapshot.plan.as_ref().unwrap().kv_capacity
        ),
        (Some(7), Tokens::new(512))
    );
    assert!(snapshot.command_gap_max > Duration::ZERO);
    stage.stop();
}

#[test]
fn plans_do_not_change_the_answer_and_each_is_answered() {
    let mut stage = Stage::new(Setting::default(), babble);
    let alone = stage.ask(limited(1, "a", 300));
    let mut stream = stage.handle.generate(limited(2, "a", 300)).unwrap();
    let handle = stage.handle.clone();
    let asker = std::thread::spawn(move || {
        for revision in 0..200 {
            handle.apply(
                revision,
                plan(if revision % 2 == 0 { 320 } else { CONTEXT_MAX }),
            );
        }
    });
    let disturbed = collect(&mut stream);
    asker.join().unwrap();
    assert_eq!(alone.tokens, disturbed.tokens);
    let mut answered: Vec<u64> = (0..200)
        .map(|_| match stage.command_event() {
            EngineEvent::Applied { revision, .. } => revision,
            EngineEvent::ApplyFailed {
                revision,
                error: ApplyFailure::Superseded { by },
            } => {
                assert!(by > revision);
                revision
            }
            other => panic!("{other:?}"),
        })
        .collect();
    answered.sort_unstable();
    assert_eq!(answered, (0..200).collect::<Vec<_>>());
    assert_eq!(stage.handle.snapshot().revision, Some(199));
    stage.stop();
}

#[test]
fn a_plan_that_cannot_be_is_reported_and_the_one_before_stays() {
    let mut stage = Stage::new(Setting::default(), babble);
    let mut impossible = plan(64);
    impossible.prefill_chunk = Tokens::ZERO;
    stage.handle.apply(3, impossible);
    match stage.command_event() {
        EngineEvent::ApplyFailed { revision: 3, error } => {
            assert_eq!(
                error.to_string(),
                "cannot apply the plan: cannot work with a prefill chunk of 0 tokens: it must be 1 to 512"
            );
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(
        stage.handle.snapshot().plan.unwrap().kv_capacity,
        Tokens::new(CONTEXT_MAX)
    );
    stage.stop();
}

#[test]
fn a_plan_below_what_a_running_answer_uses_is_raised_and_the_answer_goes_on() {
    let (mut stage, keeper) = Stage::gated(EngineOptions::default(), babble);
    let mut stream = stage
        .handle
        .generate(limited(1, &"a".repeat(40), 100))
        .unwrap();
    for _ in 0..6 * LAYERS {
        keeper.arrived(); // 5 chunks of the prompt, and a token
        keeper.go();
    }
    keeper.arrived();
    stage.handle.apply(1, plan(BLOCK));
    keeper.open();
    match stage.command_event() {
        EngineEvent::Applied { report, .. } => assert_eq!(report.plan.kv_capacity, Tokens::new(48)),
        other => panic!("{other:?}"),
    }
    let answer = collect(&mut stream);
    // It ends when the remaining capacity is used, and reports why; the text so far is correct.
    assert_eq!(answer.reason(), FinishReason::KvReclaimed);
    assert_eq!(answer.tokens.len(), 9);
    stage.handle.apply(2, plan(CONTEXT_MAX));
    assert!(matches!(
        stage.command_event(),
        EngineEvent::Applied { revision: 2, .. }
    ));
    let again = stage.ask(limited(2, &"a".repeat(40), 9));
    assert_eq!(again.tokens, answer.tokens);
    stage.stop();
}

/// Permits a request to grow the KV capacity to the model's maximum.
fn may_grow(request: GenerateRequest) -> GenerateRequest {
    GenerateRequest {
        grows_to: Tokens::new(CONTEXT_MAX),
        ..request
    }
}

#[test]
fn an_answer_asks_for_room_before_it_has_none_and_goes_on_as_if_it_had_had_it_all_along() {
    let mut stage = Stage::new(Setting::default(), babble);
    let whole = stage.ask(limited(1, "a", 300));
    assert_eq!(whole.tokens.len(), 300);
    stage.handle.apply(1, plan(2 * BLOCK));
    assert!(matches!(
        stage.command_event(),
        EngineEvent::Applied { revision: 1, .. }
    ));
    let mut stream = stage
        .handle
        .generate(may_grow(limited(2, "a", 300)))
        .unwrap();
    let mut revision = 1;
    let mut needs = Vec::new();
    while needs.last().is_none_or(|needed| *needed < 301) {
        match stage.events.blocking_recv().unwrap() {
            EngineEvent::CapacityWanted { needed, wanted, .. } => {
                assert_eq!(wanted, Tokens::new(301), "the prompt of one token, and 300");
                needs.push(needed.get());
                revision += 1;
                stage.handle.apply(revision, plan(needed.get()));
            }
            EngineEvent::ApplyFailed { revision, error } => panic!("{revision}: {error}"),
            _ => {}
        }
    }
    let answer = collect(&mut stream);
    assert_eq!(
        (answer.reason(), answer.tokens),
        (FinishReason::Length, whole.tokens)
    );
    assert!(needs.len() >= 2 && needs.is_sorted(), "{needs:?}");
    stage.stop();
}

#[test]
fn an_answer_that_gets_no_room_ends_and_says_why() {
    let mut stage = Stage::new(Setting::default(), babble);
    stage.handle.apply(1, plan(2 * BLOCK));
    assert!(matches!(
        stage.command_event(),
        EngineEvent::Applied { revision: 1, .. }
    ));
    let answer = stage.ask(may_grow(limited(1, "a", 300)));
    assert_eq!(
        (answer.reason(), answer.tokens.len()),
        (FinishReason::Length, 2 * BLOCK as usize)
    );
    stage.stop();
}

#[test]
fn a_finished_sequence_does_not_hold_capacity_against_a_plan() {
    let mut stage = Stage::new(Setting::default(), babble);
    stage.ask(limited(1, &"a".repeat(40), 50));
    stage.handle.apply(1, plan(BLOCK));
    match stage.command_event() {
        EngineEvent::Applied { report, .. } => {
            assert_eq!(report.plan.kv_capacity, Tokens::new(BLOCK));
        }
        other => panic!("{other:?}"),
    }
    stage.stop();
}

#[test]
fn a_thread_that_breaks_down_notifies_all_that_wait_and_ends() {
    let (mut stage, keeper) = Stage::gated(EngineOptions::default(), |_: &[u32]| Act::Break);
    let mut running = stage.handle.generate(request(1, "a")).unwrap();
    keeper.arrived();
    let mut waiting = stage.handle.generate(request(2, "a")).unwrap();
    keeper.open();
    for stream in [&mut running, &mut waiting] {
        let error = collect(stream).error();
        assert!(
            matches!(&error, GenerateError::EngineLost { message } if message.contains("the script says so")),
            "{error}"
        );
    }
    match stage.command_event() {
        EngineEvent::Failed { message, hung, .. } => {
            assert_eq!(message, "panic: the script says so");
            assert!(hung.is_none(), "{hung:?}");
        }
        other => panic!("{other:?}"),
    }
    assert!(matches!(stage.command_event(), EngineEvent::Stopped));
    assert!(stage.events.blocking_recv().is_none());
    let error = stage.handle.generate(request(3, "a")).unwrap_err();
    assert!(matches!(error, SubmitError::Failed { .. }), "{error}");
    assert!(matches!(
        stage.handle.snapshot().phase,
        EnginePhase::Failed { .. }
    ));
    stage.engine.join();
}

#[test]
fn a_thread_that_breaks_down_beside_a_read_that_hangs_tells_what_that_keeps() {
    let kept = Arc::new(SharedMapping::from(
        Mapping::new(RING, Backing::OnTouch).unwrap(),
    ));
    let setting = Setting {
        kept: Arc::downgrade(&kept),
        ..Setting::default()
    };
    let mut stage = Stage::new(setting, |_: &[u32]| Act::Break);
    let mut stream = stage.handle.generate(request(1, "a")).unwrap();
    collect(&mut stream).error();
    let left = match stage.command_event() {
        EngineEvent::Failed {
            hung: Some(left), ..
        } => left,
        other => panic!("{other:?}"),
    };
    assert_eq!((left.hangs(), left.bytes()), (true, RING));
    drop(kept);
    assert!(!left.hangs());
    stage.engine.join();
}

#[test]
fn a_growth_that_waits_for_a_disk_gives_way_to_whatever_else_is_ordered() {
    let hanging = || EnginePlan {
        prefill_chunk: HANGS,
        ..plan(512)
    };
    let failed = |event| match event {
        EngineEvent::ApplyFailed { revision, error } => {
            let text = error.to_string();
            assert!(
                text.contains("cannot read `layer 3`: the disk did not respond"),
                "{text}"
            );
            revision
        }
        other => panic!("{other:?}"),
    };
    let (mut stage, keeper) = Stage::gated(EngineOptions::default(), babble);
    // A plan while idle.
    stage.handle.apply(1, hanging());
    assert_eq!(keeper.arrived(), HANGS.get());
    stage.handle.apply(2, plan(64));
    assert_eq!(failed(stage.command_event()), 1);
    assert!(matches!(
        stage.command_event(),
        EngineEvent::Applied { revision: 2, .. }
    ));
    // A plan, and the end of a request during its prompt.
    let mut stream = stage.handle.generate(request(1, "a")).unwrap();
    keeper.arrived();
    stage.handle.apply(3, hanging());
    keeper.go();
    assert_eq!(keeper.arrived(), HANGS.get());
    stage.handle.apply(4, hanging());
    assert_eq!(failed(stage.command_event()), 3);
    keeper.arrived();
    keeper.go();
    assert_eq!(keeper.arrived(), HANGS.get());
    stage.handle.cancel(RequestId::new(1));
    assert_eq!(failed(stage.command_event()), 4);
    keeper.arrived();
    keeper.go();
    assert_eq!(collect(&mut stream).reason(), FinishReason::Cancelled);
    // The end of the thread.
    stage.handle.apply(5, hanging());
    assert_eq!(keeper.arrived(), HANGS.get());
    stage.stop();
}

#[test]
fn a_growth_that_waits_for_a_disk_gives_way_to_a_deadline_that_passes() {
    let hanging = || EnginePlan {
        prefill_chunk: HANGS,
        ..plan(512)
    };
    let soon = || Some(Instant::now() + Duration::from_millis(50));
    let (mut stage, keeper) = Stage::gated(EngineOptions::default(), babble);
    // Deadline of the answer that waits for the growth. If it passes before the plan arrives, no answer waits for the
    // growth.
    let due = GenerateRequest {
        deadline: soon(),
        ..request(1, "a")
    };
    let mut stream = stage.handle.generate(due).unwrap();
    keeper.arrived();
    stage.handle.apply(1, hanging());
    keeper.open();
    let error = collect(&mut stream).error();
    assert!(
        matches!(error, GenerateError::DeadlinePassed { .. }),
        "{error}"
    );
    stage.handle.apply(2, plan(64));
    assert!(matches!(
        stage.command_event(),
        EngineEvent::ApplyFailed { revision: 1, .. }
    ));
    assert!(matches!(
        stage.command_event(),
        EngineEvent::Applied { revision: 2, .. }
    ));
    // Deadline of an answer that waits while nothing runs.
    stage.handle.apply(3, hanging());
    let due = GenerateRequest {
        deadline: soon(),
        ..request(2, "a")
    };
    let error = collect(&mut stage.handle.generate(due).unwrap()).error();
    assert!(
        matches!(error, GenerateError::DeadlinePassed { .. }),
        "{error}"
    );
    stage.stop();
}

#[test]
fn what_a_hanging_read_keeps_is_reported_when_the_answer_fails_and_when_the_read_returns() {
    let left = Arc::<AtomicU64>::default();
    let setting = Setting {
        left: Arc::clone(&left),
        ..Setting::default()
    };
    let stage = Stage::new(setting, |_| Act::Stall);
    let mut watch = stage.handle.watch();
    assert_eq!(stage.handle.snapshot().held, Some(Bytes::ZERO));
    for hung in 1..3 {
        let error = stage.ask(request(hung, "?")).error();
        assert!(
            error
                .to_string()
                .contains("the disk did not respond for 4000 ms"),
            "{error}"
        );
        // Once the end is observed.
        assert_eq!(
            stage.handle.snapshot().held,
            Some(RING.saturating_mul(hung))
        );
    }
    left.store(0, Ordering::Release);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build();
    let reported = async {
        let reported = watch.wait_for(|snapshot| snapshot.held == Some(Bytes::ZERO));
        tokio::time::timeout(PATIENCE, reported)
            .await
            .unwrap()
            .unwrap();
    };
    runtime.unwrap().block_on(reported);
    stage.stop();
}

#[test]
fn an_engine_whose_file_holds_another_model_ends_so_that_it_is_loaded_again() {
    let mut stage = Stage::new(Setting::default(), |_| Act::Replaced);
    let error = stage.ask(request(1, "?")).error();
    assert!(
        error.to_string().contains("it holds another model now"),
        "{error}"
    );
    let failed = stage.command_event();
    let EngineEvent::Failed {
        message,
        hung: None,
        ..
    } = failed
    else {
        panic!("{failed:?}");
    };
    assert!(message.contains("it holds another model now"), "{message}");
    assert!(matches!(stage.command_event(), EngineEvent::Stopped));
}

#[test]
fn a_load_that_hangs_leaves_one_and_another_is_made_when_it_has_returned() {
    let kept = Arc::new(SharedMapping::from(
        Mapping::new(RING, Backing::OnTouch).unwrap(),
    ));
    let mark = Arc::downgrade(&kept);
    let opened = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&opened);
    let opener = move |path: &Path, _: &EnginePlan| {
        count.fetch_add(1, Ordering::AcqRel);
        let what = "blk.0.attn_norm.weight".into();
        let kind = DiskTimeout::default()
            .stalled(Duration::from_secs(4), &what)
            .into();
        let left = Retained::of([mark.clone()], Instant::now());
        Err(LoadError::new(path, kind).leaving(left))
    };
    let (sink, mut events) = mpsc::channel(64);
    let engine = Engine::start_with(EngineOptions::default(), Box::new(opener), sink).unwrap();
    let handle = engine.handle();
    let mut load = |expected: &str| {
        handle.load(Path::new("/model.gguf"), plan(64));
        match events.blocking_recv().unwrap() {
            EngineEvent::LoadFailed {
                message,
                hint,
                hung,
                ..
            } => {
                assert!(message.contains(expected), "{message}");
                assert!(hint.is_some() && hung.is_some());
            }
            other => panic!("{other:?}"),
        }
    };
    load("cannot read `blk.0.attn_norm.weight`");
    let snapshot = handle.snapshot();
    assert_eq!(
        (snapshot.held, snapshot.phase),
        (Some(RING), EnginePhase::Empty)
    );
    // A hanging disk is not accessed.
    load("cannot read `what an earlier load has asked for`");
    assert_eq!(
        (opened.load(Ordering::Acquire), handle.snapshot().held),
        (1, Some(RING))
    );
    let mut watch = handle.watch();
    drop(kept);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build();
    let reported = async {
        let reported = watch.wait_for(|snapshot| snapshot.held.is_none());
        tokio::time::timeout(PATIENCE, reported)
            .await
            .unwrap()
            .unwrap();
    };
    runtime.unwrap().block_on(reported);
    load("cannot read `blk.0.attn_norm.weight`");
    assert_eq!(opened.load(Ordering::Acquire), 2);
    handle.stop();
    engine.join();
}

#[test]
fn draining_answers_what_is_there_and_takes_nothing_more() {
    let (mut stage, keeper) = Stage::gated(EngineOptions::default(), recite(1, "ok"));
    let mut running = stage.handle.generate(request(1, "a")).unwrap();
    keeper.arrived();
    let mut waiting = stage.handle.generate(request(2, "a")).unwrap();
    stage.handle.drain();
    assert!(matches!(
        stage.handle.generate(request(3, "a")),
        Err(SubmitError::Draining)
    ));
    keeper.open();
    assert_eq!(collect(&mut running).text, "ok");
    assert_eq!(collect(&mut waiting).text, "ok");
    assert!(matches!(stage.command_event(), EngineEvent::Stopped));
    assert_eq!(stage.handle.snapshot().phase, EnginePhase::Stopped);
    stage.engine.join();
}

#[test]
fn stopping_fails_what_is_there_at_the_next_layer() {
    let (mut stage, keeper) = Stage::gated(EngineOptions::default(), drone);
    let mut running = stage.handle.generate(request(1, "a")).unwrap();
    keeper.arrived();
    let mut waiting = stage.handle.generate(request(2, "a")).unwrap();
    stage.handle.apply(1, plan(64));
    stage.handle.stop();
    keeper.open();
    assert_eq!(collect(&mut running).error(), GenerateError::Stopping);
    assert_eq!(collect(&mut waiting).error(), GenerateError::Stopping);
    match stage.command_event() {
        EngineEvent::ApplyFailed { revision: 1, error } => {
            assert_eq!(error, ApplyFailure::Stopping);
        }
        other => panic!("{other:?}"),
    }
    assert!(matches!(stage.command_event(), EngineEvent::Stopped));
    stage.engine.join();
}

#[test]
fn without_a_model_nothing_is_taken() {
    let (sink, mut events) = mpsc::channel(8);
    let opener = |_: &Path, _: &EnginePlan| panic!("no load was requested");
    let engine = Engine::start_with(EngineOptions::default(), Box::new(opener), sink).unwrap();
    let handle = engine.handle();
    let error = handle.generate(request(1, "a")).unwrap_err();
    assert!(
        matches!(
            error,
            SubmitError::NotReady {
                phase: "without a model"
            }
        ),
        "{error}"
    );
    handle.apply(1, plan(64));
    assert!(matches!(
        events.blocking_recv().unwrap(),
        EngineEvent::ApplyFailed {
            revision: 1,
            error: ApplyFailure::NoModel
        }
    ));
    drop(engine);
    assert!(matches!(
        events.blocking_recv().unwrap(),
        EngineEvent::Stopped
    ));
}

#[test]
fn a_daemon_that_does_not_listen_holds_up_no_answer() {
    // 64 slots, and two events for each of 40 requests.
    let stage = Stage::new(Setting::default(), recite(1, "ok"));
    for id in 0..40 {
        assert_eq!(stage.ask(request(id, "a")).text, "ok");
    }
    assert_eq!(stage.handle.snapshot().events_dropped, 16);
    stage.handle.stop();
    drop(stage.events);
    stage.engine.join();
}

/// Engine with a computing model of random weights.
struct Real {
    engine: Engine,
    handle: EngineHandle,
    events: mpsc::Receiver<EngineEvent>,
    path: PathBuf,
    _folder: tempfile::TempDir,
}

fn real_plan(
    resident: impl IntoIterator<Item = u32>,
    kv_capacity: u32,
    prefill_chunk: u32,
) -> EnginePlan {
    EnginePlan {
        resident: resident.into_iter().collect(),
        kv_capacity: Tokens::new(kv_capacity),
        prefill_chunk: Tokens::new(prefill_chunk),
        kv_type: KvType::F16,
    }
}

fn options() -> ModelOptions {
    ModelOptions::for_threads(1)
}

impl Real {
    fn new(architecture: Architecture) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        Synthetic::tiny(architecture, TypeMix::All(GgmlDType::Q8_0), 11)
            .write(&path)
            .unwrap();
        let (sink, events) = mpsc::channel(64);
        let engine = Engine::start(EngineOptions::default(), options(), sink).unwrap();
        let handle = engine.handle();
        handle.load(&path, real_plan(0..5, 512, 16));
        let mut real = Self {
            engine,
            handle,
            events,
            path,
            _folder: folder,
        };
        match real.events.blocking_recv().unwrap() {
            EngineEvent::Ready { .. } => real,
            other => panic!("{other:?}"),
        }
    }
}

fn chat(handle: &EngineHandle, id: u64, content: &str) -> Answer {
    let said = ChatMessage::new(Role::User, content);
    let request = GenerateRequest {
        sampling: Sampling {
            temperature: 0.8,
            top_p: 0.95,
            seed: 4,
            ..Sampling::GREEDY
        },
        max_tokens: Some(Tokens::new(40)),
        ..GenerateRequest::new(RequestId::new(id), Prompt::Chat(vec![said].into()))
    };
    collect(&mut handle.generate(request).unwrap())
}

#[test]
fn answers_of_models_that_compute_are_the_same_whatever_plans_arrive() {
    for architecture in [
        Architecture::Qwen35,
        Architecture::Qwen3,
        Architecture::Llama,
    ] {
        let Real {
            engine,
            handle,
            mut events,
            ..
        } = Real::new(architecture);
        let question = "tell me a story about a lamp ".repeat(2);
        let alone = chat(&handle, 1, &question);
        assert!(alone.tokens.len() > 2, "{alone:?}");
        let (done, stop) = channel::<()>();
        let (first, started) = channel();
        let asker = {
            let handle = handle.clone();
            std::thread::spawn(move || {
                let layers = [vec![], vec![0, 2], vec![1, 2, 3], vec![0, 1, 2, 3, 4]];
                for (at, revision) in (0usize..).zip(0u64..) {
                    let (kv, chunk) = ([512, 192][at % 2], [16, 3, 7, 32, 1][at % 5]);
                    handle.apply(revision, real_plan(layers[at % 4].clone(), kv, chunk));
                    loop {
                        match events.blocking_recv().unwrap() {
                            EngineEvent::Applied {
                                revision: of,
                                report,
                                breakdown,
                            } if of == revision => {
                                // Including the tokenizer's tables.
                                assert!(breakdown.is_none_or(|held| held.total == report.held));
                                break;
                            }
                            // Growth into the memory of a chunk must be requested again.
                            EngineEvent::ApplyFailed { error, .. } => {
                                assert!(
                                    error.to_string().contains("tokens is under way"),
                                    "{error}"
                                );
                                break;
                            }
                            _ => {}
                        }
                    }
                    let _ = first.send(());
                    if stop.try_recv().is_ok() {
                        return revision;
                    }
                }
                0
            })
        };
        started.recv().unwrap();
        for id in 2..4 {
            let disturbed = chat(&handle, id, &question);
            assert_eq!(disturbed.tokens, alone.tokens, "{architecture:?}");
            assert_eq!(disturbed.reason(), alone.reason());
        }
        done.send(()).unwrap();
        let revisions = asker.join().unwrap();
        assert!(
            revisions > 3,
            "{revisions} plans while 2 answers were written"
        );
        handle.stop();
        engine.join();
    }
}

#[test]
fn an_answer_that_may_lose_its_oldest_context_goes_on_where_another_one_ends() {
    let Real {
        engine,
        handle,
        mut events,
        ..
    } = Real::new(Architecture::Qwen35);
    handle.apply(1, real_plan(0..5, 192, 64));
    let prompt: Vec<u32> = (40..140).collect();
    let ask = |id, sinks, max_tokens| {
        let request = GenerateRequest {
            max_tokens: Some(Tokens::new(max_tokens)),
            sinks,
            ..GenerateRequest::new(RequestId::new(id), Prompt::Tokens(prompt.clone()))
        };
        let answer = collect(&mut handle.generate(request).unwrap());
        let Some(Ok((reason, usage))) = answer.end else {
            panic!("{answer:?}");
        };
        let (said, dropped) = (usage.completion_tokens.get(), usage.dropped_tokens.get());
        (
            answer.tokens,
            answer.started.unwrap().1,
            (reason, said, dropped),
        )
    };
    // 192 tokens are kept; the last token of an answer is reported but not kept.
    let (short, _, end) = ask(1, None, 170);
    assert_eq!(end, (FinishReason::Length, 93, 0));
    let (long, _, end) = ask(2, Some(Sinks::DEFAULT), 170);
    assert_eq!(
        end,
        (FinishReason::Length, 170, 128),
        "two blocks, as they were needed"
    );
    assert_eq!(long[..short.len()], short[..]);
    // The remainder is not a prefix of anything.
    let (again, cached, _) = ask(3, None, 170);
    assert_eq!((cached, again), (0, short));
    // A cancelled answer, mostly during a pass, also reports the tokens dropped until then.
    let mut lost = vec![0, 128, 0];
    for id in 11..14 {
        let request = GenerateRequest {
            sinks: Some(Sinks::DEFAULT),
            max_tokens: Some(Tokens::new(2000)),
            ..GenerateRequest::new(RequestId::new(id), Prompt::Tokens(prompt.clone()))
        };
        let finished = handle.snapshot().requests_finished;
        let mut stream = handle.generate(request).unwrap();
        loop {
            let now = handle.snapshot();
            let dropped = now
                .running
                .first()
                .is_some_and(|running| running.dropped > Tokens::ZERO);
            if dropped || now.requests_finished > finished {
                break;
            }
            std::thread::yield_now();
        }
        handle.cancel(RequestId::new(id));
        let Some(Ok((_, usage))) = collect(&mut stream).end else {
            panic!("it was cancelled, or ended");
        };
        assert!(usage.dropped_tokens > Tokens::ZERO, "{usage:?}");
        lost.push(usage.dropped_tokens.get());
    }
    // If the whole prompt is kept, nothing old can be dropped.
    let (_, _, end) = ask(4, Some(Sinks::Prompt), 170);
    assert_eq!(end, (FinishReason::Length, 93, 0));
    handle.stop();
    engine.join();
    let finished = std::iter::from_fn(|| events.blocking_recv()).filter_map(|event| match event {
        EngineEvent::RequestFinished { usage, .. } => Some(usage.dropped_tokens.get()),
        _ => None,
    });
    lost.push(0);
    assert_eq!(finished.collect::<Vec<_>>(), lost);
}

#[test]
fn a_continued_conversation_has_the_answer_of_one_from_the_start() {
    let Real { engine, handle, .. } = Real::new(Architecture::Qwen35);
    let tokens = |client: &str, id, prompt: &[u32]| {
        let request = GenerateRequest {
            max_tokens: Some(Tokens::new(12)),
            client: Some(client.into()),
            ..GenerateRequest::new(RequestId::new(id), Prompt::Tokens(prompt.to_vec()))
        };
        collect(&mut handle.generate(request).unwrap())
    };
    let mut prompt: Vec<u32> = (40..90).collect();
    let first = tokens("one", 1, &prompt);
    prompt.extend(&first.tokens);
    prompt.extend(100..110);
    let continued = tokens("one", 2, &prompt);
    assert!(
        continued.started.unwrap().1 >= 50,
        "{:?}",
        continued.started
    );
    // Another client has no cached prefix.
    let afresh = tokens("another", 4, &prompt);
    assert_eq!(afresh.started.unwrap().1, 0);
    assert_eq!(continued.tokens, afresh.tokens);
    handle.stop();
    engine.join();
}

#[test]
fn a_second_conversation_goes_on_after_the_system_prompt_of_the_first() {
    let Real { engine, handle, .. } = Real::new(Architecture::Qwen35);
    handle.apply(1, real_plan(0..5, 2048, 16));
    let system = "The lamp in the hall is on. ".repeat(4);
    let asked = |id, client: &str, question: &str| {
        let messages = vec![
            ChatMessage::new(Role::System, &*system),
            ChatMessage::new(Role::User, question),
        ];
        let request = GenerateRequest {
            max_tokens: Some(Tokens::new(8)),
            client: Some(client.into()),
            ..GenerateRequest::new(RequestId::new(id), Prompt::Chat(messages.into()))
        };
        collect(&mut handle.generate(request).unwrap())
    };
    let first = asked(1, "house", "Is the window open?");
    let second = asked(2, "house", "Which rooms are dark, and which are not?");
    let afresh = asked(3, "another", "Which rooms are dark, and which are not?");
    let cached = [&first, &second, &afresh].map(|answer| answer.started.unwrap().1);
    assert!(
        cached[0] == 0 && cached[1] >= 100 && cached[2] == 0,
        "{cached:?}"
    );
    assert_eq!(second.tokens, afresh.tokens);
    handle.stop();
    engine.join();
}

#[test]
fn conversations_that_alternate_go_on_from_what_they_have_in_common() {
    for architecture in [Architecture::Qwen35, Architecture::Qwen3] {
        let (mut shared, alone) = (Real::new(architecture), Real::new(architecture));
        alone.handle.apply(1, real_plan(0..5, 2048, 16));
        let mut ids = 0;
        let mut tokens = |handle: &EngineHandle, client: &str, prompt: &[u32]| {
            ids += 1;
            let request = GenerateRequest {
                max_tokens: Some(Tokens::new(5)),
                client: Some(client.into()),
                ..GenerateRequest::new(RequestId::new(ids), Prompt::Tokens(prompt.to_vec()))
            };
            collect(&mut handle.generate(request).unwrap())
        };
        // Both start with long requests, and share a system prompt.
        let system: Vec<u32> = (0..150).map(|index| index * 7 % 300).collect();
        let mut conversations = [3, 5].map(|step| {
            let own = (0..60).map(|index| index * step % 290 + step);
            system.iter().copied().chain(own).collect::<Vec<u32>>()
        });
        // Layers, capacity and chunk change between the turns.
        let plans = [
            real_plan(0..5, 2048, 16),
            real_plan(0..5, 2048, 16),
            real_plan([0, 2], 2048, 64),
            real_plan([], 1536, 32),
            real_plan(0..5, 2048, 512),
            real_plan([1], 1024, 512),
        ];
        for (turn, plan) in (0..12).zip(plans.iter().cycle()) {
            shared.handle.apply(turn, plan.clone());
            let applied = std::iter::from_fn(|| shared.events.blocking_recv());
            assert!(applied.into_iter().any(
                |event| matches!(event, EngineEvent::Applied { revision, .. } if revision == turn)
            ));
            let conversation = &mut conversations[usize::from(turn % 2 == 1)];
            conversation.extend([u32::try_from(turn).unwrap() + 20, 7, 9]);
            let answer = tokens(&shared.handle, "both", conversation);
            let (read, cached) = answer.started.unwrap();
            assert_eq!(read as usize, conversation.len());
            // The first two have no cached prefix; the second reveals where they diverge.
            assert!(
                turn < 2 || cached >= 150,
                "{architecture:?}: {cached} tokens at turn {turn}"
            );
            let from_the_start = tokens(&alone.handle, &turn.to_string(), conversation);
            assert_eq!(from_the_start.started.unwrap().1, 0);
            assert_eq!(
                answer.tokens, from_the_start.tokens,
                "{architecture:?}, turn {turn}"
            );
            conversation.extend(&answer.tokens);
        }
        for Real {
            engine,
            handle,
            events,
            ..
        } in [shared, alone]
        {
            handle.stop();
            drop(events);
            engine.join();
        }
    }
}

#[test]
fn a_conversation_goes_on_from_an_answer_that_was_interrupted() {
    for architecture in [Architecture::Qwen35, Architecture::Qwen3] {
        let Real {
            engine,
            handle,
            mut events,
            ..
        } = Real::new(architecture);
        let request = |id, prompt: &[u32], most| GenerateRequest {
            max_tokens: Some(Tokens::new(most)),
            ..GenerateRequest::new(RequestId::new(id), Prompt::Tokens(prompt.to_vec()))
        };
        let prompt: Vec<u32> = (40..112).collect();
        // Capacity for the copy of the recurrent state beside the longest answer, however late it is cancelled.
        handle.apply(1, real_plan(0..5, 2048, 16));
        // On a machine that cancels late, the answer may be complete.
        let interrupt = |ids: std::ops::Range<u64>| {
            let done = ids.clone().any(|id| {
                collect(&mut handle.generate(request(id, &[1, 2, 3], 2)).unwrap());
                let mut stream = handle.generate(request(id + 100, &prompt, 400)).unwrap();
                while stream
                    .blocking_recv()
                    .is_some_and(|part| !matches!(part, GenerateEvent::Delta { .. }))
                {
                }
                handle.cancel(RequestId::new(id + 100));
                collect(&mut stream).reason() == FinishReason::Cancelled
            });
            assert!(done, "{architecture:?}");
        };
        interrupt(100..120);
        let mut longer = prompt.clone();
        longer.extend(200..220);
        let continued = collect(&mut handle.generate(request(2, &longer, 6)).unwrap());
        let cached = continued.started.unwrap().1;
        let least = if architecture == Architecture::Qwen35 {
            64
        } else {
            72
        };
        assert!((least..=72).contains(&cached), "{architecture:?}: {cached}");
        let another = GenerateRequest {
            client: Some("another".into()),
            ..request(4, &longer, 6)
        };
        let afresh = collect(&mut handle.generate(another).unwrap());
        assert_eq!(
            (afresh.started.unwrap().1, &afresh.tokens),
            (0, &continued.tokens)
        );

        // Memory kept for that is released first.
        interrupt(300..320);
        handle.apply(9, real_plan(0..5, 64, 16));
        let applied = std::iter::from_fn(|| events.blocking_recv()).find_map(|event| match event {
            EngineEvent::Applied {
                revision: 9,
                report,
                ..
            } => Some(report.plan.kv_capacity),
            _ => None,
        });
        assert_eq!(applied, Some(Tokens::new(64)));
        handle.stop();
        engine.join();
    }
}

#[test]
fn a_pass_that_was_broken_off_anywhere_is_gone_on_from_with_the_same_bits() {
    for (architecture, resident) in [(Architecture::Qwen3, 0..5), (Architecture::Qwen35, 0..2)] {
        let real = Real::new(architecture);
        let plan = real_plan(resident, 2048, 16);
        let mut model = Model::open(&real.path, &plan, &options()).unwrap();
        let prompt: Vec<u32> = (0..72).map(|index| index * 7 % 300).collect();
        let expected = model
            .forward(&prompt, &mut || Flow::Continue)
            .unwrap()
            .to_vec();
        let mut kept = Vec::new();
        for stop in [1, 6, 11] {
            model.reset();
            model.mark_at(16);
            model
                .forward(&prompt[..24], &mut || Flow::Continue)
                .unwrap();
            let mut polls = 0;
            let mut broken = || {
                polls += 1;
                if polls >= stop {
                    Flow::Stop
                } else {
                    Flow::Continue
                }
            };
            let error = model.forward(&prompt[24..], &mut broken).unwrap_err();
            assert!(matches!(error, ForwardError::Cancelled { .. }), "{error}");
            let position = model.recover();
            assert_eq!(position, model.position());
            kept.push(position);
            let rest = &prompt[position as usize..];
            assert!(
                model.forward(rest, &mut || Flow::Continue).unwrap()[..] == expected,
                "{architecture:?}, broken off at {stop}, {position} tokens kept"
            );
            let held = model.breakdown();
            assert!(held.kv_marks + model.untouched() <= held.kv, "{held:?}");
        }
        // Completed chunks are kept; of a recurrent state, the copy at the mark.
        let expected = if model.shape().state_bytes > Bytes::ZERO {
            [16, 16, 16]
        } else {
            [24, 40, 56]
        };
        assert_eq!(kept, expected, "{architecture:?}");
    }
}

#[test]
fn what_the_engine_holds_is_within_what_its_plan_says() {
    let real = Real::new(Architecture::Qwen35);
    let shape = Engine::inspect(&real.path, 1).unwrap();
    let (without_text, _) = Model::inspect(&real.path, 1).unwrap();
    assert!(
        shape.fixed_bytes > without_text.fixed_bytes,
        "the tokenizer is on the book"
    );
    let snapshot = real.handle.snapshot();
    assert_eq!(shape, *snapshot.shape.unwrap());
    let (plan, held) = (
        snapshot.plan.unwrap(),
        real.handle.snapshot().breakdown.unwrap(),
    );
    assert!(
        held.total <= shape.plan_bytes(&plan),
        "{} of {}",
        held.total,
        shape.plan_bytes(&plan)
    );
    assert!(held.total > Bytes::ZERO);
    real.handle.stop();
    real.engine.join();
}

#[test]
fn a_file_that_cannot_be_loaded_is_reported_and_another_may_follow() {
    let good = Real::new(Architecture::Qwen3);
    let (sink, mut events) = mpsc::channel(8);
    let engine = Engine::start(EngineOptions::default(), options(), sink).unwrap();
    let handle = engine.handle();
    let junk = good.path.with_file_name("junk.gguf");
    std::fs::write(&junk, b"not a model at all").unwrap();
    for path in [Path::new("/nonexistent/model.gguf"), &junk] {
        assert!(Engine::inspect(path, 1).is_err());
        handle.load(path, real_plan(0..5, 64, 16));
        match events.blocking_recv().unwrap() {
            EngineEvent::LoadFailed {
                path: of, message, ..
            } => {
                assert_eq!(of, path);
                assert!(
                    message.starts_with(&format!("cannot load model `{}`: ", path.display())),
                    "{message}"
                );
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(handle.snapshot().phase, EnginePhase::Empty);
    }
    handle.load(&good.path, real_plan(0..5, 64, 16));
    assert!(matches!(
        events.blocking_recv().unwrap(),
        EngineEvent::Ready { .. }
    ));
    handle.load(&good.path, real_plan(0..5, 64, 16));
    assert!(matches!(
        events.blocking_recv().unwrap(),
        EngineEvent::LoadFailed { message, .. } if message == "a model is loaded already"
    ));
    for engine in [engine, good.engine] {
        engine.handle().stop();
        engine.join();
    }
}

#[test]
fn the_time_of_an_answer_includes_its_prompt() {
    let (stage, keeper) = Stage::gated(EngineOptions::default(), babble);
    let due = GenerateRequest {
        time_max: Some(Duration::ZERO),
        ..limited(1, &"a".repeat(100), 5)
    };
    let mut stream = stage.handle.generate(due).unwrap();
    keeper.arrived();
    keeper.open();
    let answer = collect(&mut stream);
    assert_eq!(
        (answer.reason(), answer.tokens.len()),
        (FinishReason::Length, 0)
    );
    // The computed part of the prompt is kept, and the next one is answered.
    assert_eq!(stage.ask(limited(2, &"a".repeat(100), 5)).tokens.len(), 5);
    stage.stop();
}

/// Form whose computation never completes.
struct NeverReady;

impl TokenMask for NeverReady {
    fn is_ready(&mut self, wait: Duration) -> Result<bool, MaskError> {
        std::thread::sleep(wait);
        Ok(false)
    }

    fn apply(&mut self, _logits: &mut [f32]) -> Result<(), MaskError> {
        Err(MaskError::Form {
            message: "asked before it was ready".to_owned(),
        })
    }

    fn accept(&mut self, _token: u32, _bytes: &[u8]) -> Result<(), MaskError> {
        Ok(())
    }

    fn is_complete(&mut self) -> Result<bool, MaskError> {
        Ok(false)
    }

    fn force(&mut self, _choose: &mut dyn FnMut(&[u8]) -> Vec<u32>) -> Result<Vec<u32>, MaskError> {
        Ok(Vec::new())
    }
}

#[test]
fn the_time_of_an_answer_includes_the_wait_for_its_form() {
    let stage = Stage::new(Setting::default(), babble);
    let due = GenerateRequest {
        time_max: Some(Duration::from_millis(100)),
        ..limited(1, "a", 5)
    };
    let mut prepared = stage.handle.prepare(&due, Client::PATIENT).unwrap();
    prepared.mask = Some(Box::new(NeverReady));
    let answer = collect(&mut stage.handle.submit(due, prepared).unwrap());
    assert_eq!(
        (answer.reason(), answer.tokens.len()),
        (FinishReason::Length, 0)
    );
    assert_eq!(stage.ask(limited(2, "a", 5)).tokens.len(), 5);
    stage.stop();
}

/// Form that forces some letters: all at once, or one at a time.
struct Led {
    letters: &'static [u8],
    said: usize,
    at_once: bool,
}

impl TokenMask for Led {
    fn is_ready(&mut self, _wait: Duration) -> Result<bool, MaskError> {
        Ok(true)
    }

    fn apply(&mut self, logits: &mut [f32]) -> Result<(), MaskError> {
        if let Some(&letter) = self.letters.get(self.said) {
            for (token, logit) in logits.iter_mut().enumerate() {
                if token != usize::from(letter) {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
        Ok(())
    }

    fn accept(&mut self, _token: u32, _bytes: &[u8]) -> Result<(), MaskError> {
        self.said += 1;
        Ok(())
    }

    fn is_complete(&mut self) -> Result<bool, MaskError> {
        Ok(false)
    }

    fn force(&mut self, choose: &mut dyn FnMut(&[u8]) -> Vec<u32>) -> Result<Vec<u32>, MaskError> {
        let left = self.letters.get(self.said..).unwrap_or_default();
        if !self.at_once || left.is_empty() {
            return Ok(Vec::new());
        }
        let tokens = choose(left);
        self.said += tokens.len();
        Ok(tokens)
    }
}

#[test]
fn what_a_form_forces_ends_and_goes_on_as_token_by_token() {
    let long: &[u8] = &[b'q'; 200];
    for (letters, most, stop, context) in [
        (b"kitchen".as_slice(), 20, None, 512),
        // Ends within the forced text: token limit, stop text, end of the KV capacity.
        (b"kitchen", 3, None, 512),
        (b"kitchen", 20, Some("tc"), 512),
        (long, 300, None, 128),
        (long, 300, None, 512),
    ] {
        let answer_of = |at_once| {
            let mut stage = Stage::new(
                Setting {
                    kv_capacity: context,
                    ..Setting::default()
                },
                babble,
            );
            let asked = GenerateRequest {
                stop: stop.map(str::to_owned).into_iter().collect(),
                ..limited(1, "a", most)
            };
            let mut prepared = stage.handle.prepare(&asked, Client::PATIENT).unwrap();
            prepared.mask = Some(Box::new(Led {
                letters,
                said: 0,
                at_once,
            }));
            let answer = collect(&mut stage.handle.submit(asked, prepared).unwrap());
            let timed = loop {
                if let EngineEvent::RequestFinished { prompt_took, .. } = stage.event() {
                    break prompt_took.is_some();
                }
            };
            assert_eq!(
                timed, !at_once,
                "a pass of several tokens tells no time for one"
            );
            let next = stage.ask(limited(2, &format!("a{}", answer.text), 5));
            stage.stop();
            (
                answer.text.clone(),
                answer.tokens.clone(),
                answer.reason(),
                next.text,
            )
        };
        assert_eq!(
            answer_of(true),
            answer_of(false),
            "{most} {stop:?} {context}"
        );
    }
}

#[test]
fn a_long_answer_ends_while_others_as_urgent_wait() {
    for (class, written) in [
        (Class::AudioRealtime, 1),
        (Class::Interactive, 1),
        (Class::Batch, 9),
    ] {
        let (stage, keeper) = Stage::gated(EngineOptions::default(), drone);
        let long = GenerateRequest {
            time_shared: Some(Duration::ZERO),
            ..limited(1, "a", 9)
        };
        let mut first = stage.handle.generate(long).unwrap();
        keeper.arrived();
        let mut second = stage
            .handle
            .generate(GenerateRequest {
                class,
                ..limited(2, "b", 3)
            })
            .unwrap();
        keeper.open();
        let answer = collect(&mut first);
        assert_eq!(
            (answer.reason(), answer.tokens.len()),
            (FinishReason::Length, written),
            "{class:?} waits"
        );
        assert_eq!(collect(&mut second).tokens.len(), 3);
        stage.stop();
    }
    // Alone, it has no time limit.
    let stage = Stage::new(Setting::default(), drone);
    let alone = GenerateRequest {
        time_shared: Some(Duration::ZERO),
        ..limited(1, "a", 50)
    };
    assert_eq!(stage.ask(alone).tokens.len(), 50);
    stage.stop();
}

#[test]
fn requests_of_one_class_begin_in_the_order_in_which_they_came() {
    let (mut stage, keeper) = Stage::gated(EngineOptions::default(), babble);
    let mut streams = vec![stage.handle.generate(limited(0, "a", 2)).unwrap()];
    keeper.arrived();
    // As many as may wait.
    streams.extend((1..=16u64).map(|id| {
        stage
            .handle
            .generate(limited(id, &"b".repeat(usize::try_from(id).unwrap()), 2))
            .unwrap()
    }));
    keeper.open();
    let mut begun = Vec::new();
    while begun.len() < streams.len() {
        if let EngineEvent::RequestStarted { id, .. } = stage.event() {
            begun.push(id.get());
        }
    }
    assert_eq!(begun, (0..=16).collect::<Vec<_>>());
    assert!(
        streams
            .iter_mut()
            .all(|stream| collect(stream).reason() == FinishReason::Length)
    );
    stage.stop();
}
