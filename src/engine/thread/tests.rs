//! Tests of concurrent answers, on models that compute.

use cotenant_conversation::{ChatMessage, Prompt, Role};
use cotenant_policy::{kv_type::KvType, residency::EnginePlan};
use cotenant_units::Tokens;

use super::*;
use crate::{
    FinishReason, GenerateEvent, GenerateRequest, RequestId, Sampling,
    gguf::GgmlDType,
    spec::Architecture,
    synthetic::{Synthetic, TypeMix},
    weights::Weights as _,
};

const SPEAKERS: u64 = 12;

fn plan(resident: u32, kv_capacity: u32) -> EnginePlan {
    EnginePlan {
        resident: (0..resident).collect(),
        kv_capacity: Tokens::new(kv_capacity),
        prefill_chunk: Tokens::new(16),
        kv_type: KvType::F16,
    }
}

/// Returns a question of one of several speakers; some have random sampling, and some share a client.
fn spoken(id: u64, number: u64) -> GenerateRequest {
    let content = format!("please tell me a story about {number} lamps");
    let said = ChatMessage::new(Role::User, content);
    let temperature = [0.0, 0.8, 1.2][usize::try_from(number % 3).unwrap()];
    GenerateRequest {
        sampling: Sampling {
            temperature,
            seed: number,
            ..Sampling::GREEDY
        },
        max_tokens: Some(Tokens::new(60 + 5 * u32::try_from(number).unwrap())),
        client: number
            .is_multiple_of(2)
            .then(|| format!("client {number}").into()),
        ..GenerateRequest::new(RequestId::new(id), Prompt::Chat(vec![said].into()))
    }
}

/// Returns the text of an answer, and the reason of its end.
fn collect(stream: &mut mpsc::Receiver<GenerateEvent>) -> (String, FinishReason) {
    let mut all = String::new();
    loop {
        match stream.blocking_recv().unwrap() {
            GenerateEvent::Started { .. } => {}
            GenerateEvent::Delta { text, .. } => all.push_str(&text),
            GenerateEvent::Finished { reason, .. } => return (all, reason),
            GenerateEvent::Failed(error) => panic!("{error}"),
        }
    }
}

/// An engine with a model in a folder of its own, and its events.
struct Loaded {
    engine: Engine,
    events: mpsc::Receiver<EngineEvent>,
    _folder: tempfile::TempDir,
}

impl Loaded {
    /// Starts an engine that computes with `model`.
    fn with(model: &Synthetic, options: EngineOptions, threads: usize, plan: EnginePlan) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        model.write(&path).unwrap();
        Self::open(&path, folder, (options, threads), plan)
    }

    /// Starts an engine that computes with the model at `path`, and keeps `folder`.
    fn open(
        path: &Path,
        folder: tempfile::TempDir,
        (options, threads): (EngineOptions, usize),
        plan: EnginePlan,
    ) -> Self {
        let (sink, mut events) = mpsc::channel(4096);
        let engine = Engine::start(options, ModelOptions::for_threads(threads), sink).unwrap();
        engine.handle().load(path, plan);
        assert!(matches!(
            events.blocking_recv(),
            Some(EngineEvent::Ready { .. })
        ));
        Self {
            engine,
            events,
            _folder: folder,
        }
    }

    /// Ends the engine; returns the maximum number of concurrent requests.
    fn ran_at_once(mut self) -> usize {
        self.engine.handle().stop();
        self.engine.join();
        let (mut running, mut most) = (0usize, 0);
        while let Some(event) = self.events.blocking_recv() {
            match event {
                EngineEvent::RequestStarted { .. } => running += 1,
                // A request cancelled in the queue never ran.
                EngineEvent::RequestFinished { .. } => running = running.saturating_sub(1),
                _ => {}
            }
            most = running.max(most);
        }
        most
    }
}

fn tiny(architecture: Architecture) -> Synthetic {
    Synthetic::tiny(architecture, TypeMix::All(GgmlDType::Q8_0), 11)
}

#[test]
fn a_short_question_replaces_no_conversation_that_begins_alike() {
    let options = EngineOptions::default();
    let loaded = Loaded::with(&tiny(Architecture::Qwen3), options, 1, plan(5, 4096));
    let handle = loaded.engine.handle();
    for (id, question) in [(1, "where is the lamp?"), (2, "what is the weather?")] {
        let message = ChatMessage::new(Role::User, question.to_owned());
        let prompt = Prompt::Chat(vec![message].into());
        let request = GenerateRequest {
            max_tokens: Some(Tokens::new(4)),
            ..GenerateRequest::new(RequestId::new(id), prompt)
        };
        collect(&mut handle.generate(request).unwrap());
    }
    let kept = handle.snapshot().kept;
    let superseded: Vec<bool> = kept.iter().map(|one| one.is_superseded).collect();
    assert_eq!(superseded, [false], "{kept:?}");
}

#[test]
fn answers_that_run_together_are_those_of_each_alone_whatever_plans_arrive() {
    for architecture in [
        Architecture::Qwen3,
        Architecture::Llama,
        Architecture::Qwen35,
        Architecture::Gemma3,
    ] {
        let options = EngineOptions::default();
        let loaded = Loaded::with(&tiny(architecture), options, 1, plan(5, 4096));
        let handle = loaded.engine.handle();
        let alone: Vec<_> = (0..SPEAKERS)
            .map(|number| collect(&mut handle.generate(spoken(number, number)).unwrap()))
            .collect();
        assert!(alone.iter().any(|(text, _)| text.len() > 10));
        for round in 1..4u64 {
            let id = |number| RequestId::new(100 * round + number);
            let ask = |number| handle.generate(spoken(id(number).get(), number)).unwrap();
            let mut streams: Vec<_> = (0..SPEAKERS).map(ask).collect();
            // One request is cancelled, and the plan changes repeatedly.
            handle.cancel(id(3));
            for turn in 0..40u64 {
                let kv = [4096, 1024, 320][usize::try_from(turn % 3).unwrap()];
                let resident = u32::try_from(turn % 6).unwrap();
                handle.apply(1000 * round + turn, plan(resident, kv));
                std::thread::sleep(Duration::from_millis(2));
            }
            handle.apply(1000 * round + 100, plan(5, 4096));
            for ((number, stream), (expected, end)) in (0..).zip(&mut streams).zip(&alone) {
                let (text, reason) = collect(stream);
                assert!(
                    expected.starts_with(&text),
                    "{architecture:?}, {number}: {text}"
                );
                // Without capacity, or cancelled, the answer is a prefix.
                match reason {
                    FinishReason::Cancelled => assert_eq!(number, 3),
                    FinishReason::KvReclaimed => {}
                    _ => assert_eq!((&text, &reason), (expected, end)),
                }
            }
        }
        // Maximum number of concurrent answers.
        let most = loaded.ran_at_once();
        // Copies of states and windows take capacity from other answers.
        let has_copies = matches!(architecture, Architecture::Qwen35 | Architecture::Gemma3);
        let least = if has_copies { 2 } else { 5 };
        assert!(most >= least, "{architecture:?}: {most}");
    }
}

#[test]
fn answers_whose_states_fill_the_cache_wait_for_each_other_and_lose_no_token() {
    // Large enough that its answers take longer than an answer without a place waits for one.
    let model = Synthetic {
        layers: 8,
        width: 768,
        feed_forward: 3072,
        ..tiny(Architecture::Qwen35)
    };
    // A state takes 400 tokens of capacity, and so does a copy for the next prompt: two states fit with their answers, but
    // no copies beside them.
    let loaded = Loaded::with(&model, EngineOptions::default(), 2, plan(9, 2048));
    let handle = loaded.engine.handle();
    let ask = |id: u64, number: u64| {
        let request = GenerateRequest {
            max_tokens: Some(Tokens::new(300)),
            ..spoken(id, number)
        };
        handle.generate(request).unwrap()
    };
    let alone: Vec<_> = (0..4)
        .map(|number| collect(&mut ask(number, number)))
        .collect();
    let mut streams: Vec<_> = (0..4).map(|number| ask(100 + number, number)).collect();
    for (stream, expected) in streams.iter_mut().zip(&alone) {
        assert_eq!(collect(stream), *expected);
    }
    assert_eq!(loaded.ran_at_once(), 2);
}

#[test]
fn answers_that_run_together_outlive_another_kv_type() {
    for architecture in [Architecture::Qwen35, Architecture::Gemma3] {
        let options = EngineOptions::default();
        let loaded = Loaded::with(&tiny(architecture), options, 1, plan(5, 4096));
        let handle = loaded.engine.handle();
        let asked = |number| GenerateRequest {
            max_tokens: Some(Tokens::new(400)),
            ..spoken(number, number)
        };
        let mut streams: Vec<_> = (0..4)
            .map(|number| handle.generate(asked(number)).unwrap())
            .collect();
        for (revision, kv_type) in (0..12).zip([KvType::Q8, KvType::F16].into_iter().cycle()) {
            let other = EnginePlan {
                kv_type,
                ..plan(5, 4096)
            };
            handle.apply(revision, other);
            std::thread::sleep(Duration::from_millis(10));
        }
        for stream in &mut streams {
            let (text, reason) = collect(stream);
            assert!(!text.is_empty(), "{architecture:?}: {reason:?}");
            assert!(
                matches!(reason, FinishReason::Stop | FinishReason::Length),
                "{architecture:?}: {reason:?}"
            );
        }
        assert!(loaded.ran_at_once() > 1, "{architecture:?}");
    }
}

/// Returns a repetitive question, so that tokens are drafted for the answer.
fn repeating(id: u64, number: u64) -> GenerateRequest {
    let content = "the lamp in the hall is on and ".repeat(1 + usize::try_from(number).unwrap());
    let said = ChatMessage::new(Role::User, content);
    GenerateRequest {
        prompt: Prompt::Chat(vec![said].into()),
        max_tokens: Some(Tokens::new(120)),
        ..spoken(id, number)
    }
}

/// Compares answers of two engines, one of which drafts, while layers are released and read again.
fn compare_drafts(
    open: &dyn Fn(EngineOptions) -> Loaded,
    parts: u32,
    ask: &dyn Fn(&Loaded, u64) -> GenerateRequest,
    (questions, least): (u64, u64),
) {
    let start = |drafts: bool| {
        open(EngineOptions {
            drafts,
            ..EngineOptions::default()
        })
    };
    let (with, without) = (start(true), start(false));
    let mut revision = 0;
    for number in 0..questions {
        let request = ask(&without, number);
        let expected = collect(&mut without.engine.handle().generate(request.clone()).unwrap());
        for turn in 0..3u64 {
            let id = RequestId::new(100 * (turn + 1) + number);
            let request = GenerateRequest {
                id,
                ..request.clone()
            };
            let mut stream = with.engine.handle().generate(request).unwrap();
            if turn > 0 {
                // While drafts are verified.
                let resident = u32::try_from(number + turn).unwrap() % (parts + 1);
                revision += 1;
                with.engine.handle().apply(revision, plan(resident, 4096));
            }
            assert_eq!(collect(&mut stream), expected, "question {number}");
        }
    }
    let (with, without) = (
        with.engine.handle().snapshot(),
        without.engine.handle().snapshot(),
    );
    assert!(with.tokens_drafted > 0, "{with:?}");
    assert!(with.drafts_accepted >= least, "{with:?}");
    assert_eq!(without.tokens_drafted, 0);
}

#[test]
fn drafts_change_no_token_whatever_plans_arrive() {
    let open = |options| Loaded::with(&tiny(Architecture::Qwen3), options, 1, plan(5, 4096));
    let ask = |_: &Loaded, number| repeating(number, number);
    compare_drafts(&open, 5, &ask, (SPEAKERS, 101));
}

#[test]
fn drafts_of_a_model_with_a_state_change_no_token_whatever_plans_arrive() {
    // Trained: the answers of random weights to a repetitive question do not repeat it.
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/demo-model/demo.gguf");
    let parts = Engine::inspect(&path, 1).unwrap().layers.len();
    let parts = u32::try_from(parts).unwrap();
    let open = |options| {
        let folder = tempfile::tempdir().unwrap();
        Loaded::open(&path, folder, (options, 1), plan(parts, 4096))
    };
    // The second telling repeats the first.
    let ask = |loaded: &Loaded, number: u64| {
        let animal = ["fox", "cat", "dog"][usize::try_from(number).unwrap()];
        let question = format!("can you tell me a long story about a {animal} in the forest");
        let question = ChatMessage::new(Role::User, question);
        let request = |id, said: Vec<ChatMessage>| GenerateRequest {
            prompt: Prompt::Chat(said.into()),
            ..repeating(id, 0)
        };
        let first = request(1000 + number, vec![question.clone()]);
        let (story, _) = collect(&mut loaded.engine.handle().generate(first).unwrap());
        let story = ChatMessage::new(Role::Assistant, story);
        request(number, vec![question.clone(), story, question])
    };
    compare_drafts(&open, parts, &ask, (2, 20));
}

#[test]
fn drafts_of_a_block_change_no_token_whatever_plans_arrive() {
    let model = Synthetic {
        nextn: 1,
        ..tiny(Architecture::Qwen35)
    };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    model.write(&path).unwrap();
    let parts = Engine::inspect(&path, 1).unwrap().layers.len();
    let parts = u32::try_from(parts).unwrap();
    let open = |options: EngineOptions| {
        // Without drafts, the block is no part of the model.
        let parts = parts - u32::from(!options.drafts);
        Loaded::with(&model, options, 1, plan(parts, 4096))
    };
    let ask = |_: &Loaded, number| spoken(number, number);
    // Random weights, whose drafts are wrong.
    compare_drafts(&open, parts, &ask, (SPEAKERS, 0));
}

#[test]
fn no_more_answers_run_together_than_the_options_allow() {
    for most in [1, 2] {
        let options = EngineOptions {
            answers_max: most,
            ..EngineOptions::default()
        };
        let loaded = Loaded::with(&tiny(Architecture::Qwen3), options, 1, plan(5, 4096));
        let handle = loaded.engine.handle();
        // Used to refuse a request whose answer would begin too late.
        assert_eq!(handle.snapshot().answers_max, most);
        let ask = |number| handle.generate(spoken(number, number)).unwrap();
        let mut streams: Vec<_> = (0..6).map(ask).collect();
        for stream in &mut streams {
            collect(stream);
        }
        assert_eq!(loaded.ran_at_once(), most);
    }
}

#[test]
fn a_shed_ends_a_cold_conversation_and_its_next_turn_reads_it_back() {
    for architecture in [Architecture::Qwen3, Architecture::Qwen35] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        // Slow to compute, so that reading is worth it on any disk.
        let model = Synthetic {
            layers: 8,
            width: 768,
            feed_forward: 3072,
            ..tiny(architecture)
        };
        model.write(&path).unwrap();
        let start = || {
            let (sink, events) = mpsc::channel(4096);
            let options = EngineOptions {
                conversations: Some(folder.path().join("saved")),
                save_after: Duration::ZERO,
                ..EngineOptions::default()
            };
            let engine = Engine::start(options, ModelOptions::for_threads(1), sink).unwrap();
            let handle = engine.handle();
            handle.load(&path, plan(9, 2048));
            (engine, handle, events)
        };
        let (engine, handle, mut events) = start();
        let ready = |events: &mut mpsc::Receiver<EngineEvent>| {
            while !matches!(events.blocking_recv(), Some(EngineEvent::Ready { .. })) {}
        };
        ready(&mut events);
        let said = |role, text: &str| ChatMessage::new(role, text.to_owned());
        let question = "please tell me a story about lamps. ".repeat(20);
        let mut messages = vec![said(Role::User, &question)];
        let ask = |handle: &EngineHandle, id: u64, messages: &[ChatMessage]| {
            let request = GenerateRequest {
                sampling: Sampling::GREEDY,
                max_tokens: Some(Tokens::new(4)),
                ..GenerateRequest::new(RequestId::new(id), Prompt::Chat(messages.to_vec().into()))
            };
            let mut stream = handle.generate(request).unwrap();
            let Some(GenerateEvent::Started {
                prompt_tokens: prompt,
                cached_tokens: cached,
            }) = stream.blocking_recv()
            else {
                panic!("it was refused");
            };
            let (text, _) = collect(&mut stream);
            (text, prompt, cached)
        };
        let (answer, first, _) = ask(&handle, 1, &messages);
        assert!(first > Tokens::new(128), "{first}");
        while handle.snapshot().saved.conversations.is_empty() {
            std::thread::yield_now();
        }
        for (revision, kv) in [(1, 64), (2, 2048)] {
            handle.apply(revision, plan(9, kv));
            let applied = |event| matches!(event, Some(EngineEvent::Applied { revision: of, .. }) if of == revision);
            while !applied(events.blocking_recv()) {}
        }
        let snapshot = handle.snapshot();
        assert!(
            snapshot.position <= Tokens::new(64) && snapshot.kept.is_empty(),
            "{architecture:?}: {} {:?}",
            snapshot.position,
            snapshot.kept
        );
        messages.push(said(Role::Assistant, &answer));
        messages.push(said(Role::User, "and now?"));
        let (answer, prompt, cached) = ask(&handle, 2, &messages);
        assert!(
            cached.get() + 64 >= first.get(),
            "{architecture:?}: {cached} of {prompt}"
        );
        let counts = handle.snapshot().saved.counts;
        assert_eq!((counts.reloaded, counts.failed), (1, 0));
        // The daemon ends, and another one continues.
        handle.stop();
        engine.join();
        let (engine, handle, mut events) = start();
        ready(&mut events);
        messages.push(said(Role::Assistant, &answer));
        messages.push(said(Role::User, "and then?"));
        let (_, longer, cached) = ask(&handle, 3, &messages);
        assert!(
            cached.get() + 64 >= prompt.get(),
            "{architecture:?}: {cached} of {longer}"
        );
        handle.stop();
        engine.join();
    }
}
