//! Engine with a scripted model, and the means to observe it.
#![expect(clippy::panic, reason = "a model that breaks down")]

use std::{
    fs::File,
    path::Path,
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, Sender, channel},
    },
    time::{Duration, Instant},
};

use candle_core::quantized::gguf_file::{self, Value};
use cotenant::{
    engine::{
        ApplyError, ApplyReport, Breakdown, Checkpoint, Engine, EngineEvent, EngineHandle,
        EngineOptions, FinishReason, Flow, ForwardError, GenerateError, GenerateEvent,
        GenerateRequest, Header, LanguageModel, Prompt, RequestId, Usage,
        arena::SharedMapping,
        disk::{DiskTimeout, Retained},
        error::ReadError,
        language_model::Opened,
        text::TextSide,
        tokenizer::byte_symbol,
    },
    policy::{
        kv_type::KvType,
        residency::{EnginePlan, KvShape, LayerKind, LayerShape, ModelShape},
    },
    units::{Bytes, Tokens},
};
use tokio::sync::mpsc;

pub(crate) const CONTEXT_MAX: u32 = 1000;
pub(crate) const LAYERS: u32 = 4;
pub(crate) const BLOCK: u32 = 16;
/// Tokens 0 to 255 are bytes; control tokens follow, and one that is a space and the first half of a character.
pub(crate) const IM_END: u32 = 258;
pub(crate) const SPACE_AND_HALF: u32 = 259;
pub(crate) const VOCABULARY: u32 = 260;

/// Action of the model after a sequence.
pub(crate) enum Act {
    Break,
    NotANumber,
    Say(u32),
    /// Only this token is allowed, as with a reduced vocabulary.
    SayOnly(u32),
    /// The model's file contains another model.
    Replaced,
    /// The disk does not respond, and the target of the read is retained.
    Stall,
}

pub(crate) type Script = Box<dyn Fn(&[u32]) -> Act + Send>;

/// Model that follows its script, and may wait for the test at each layer.
pub(crate) struct Scripted {
    shape: ModelShape,
    plan: EnginePlan,
    sequence: Vec<u32>,
    script: Script,
    gate: Option<Gate>,
    left: Arc<AtomicU64>,
    /// Memory retained by a read when the model is abandoned.
    kept: Weak<SharedMapping>,
}

/// Chunk of a plan that waits for a hanging disk.
pub(crate) const HANGS: Tokens = Tokens::new(99);

/// Memory retained by a hanging read.
pub(crate) const RING: Bytes = Bytes::from_mib(1);

/// The model's side: reports that it has reached a layer, and waits for its release.
pub(crate) struct Gate {
    arrived: Sender<u32>,
    go: Receiver<()>,
}

/// The test's side. Dropping `go` lets the model run freely.
pub(crate) struct Keeper {
    arrived: Receiver<u32>,
    go: Sender<()>,
}

impl Keeper {
    /// Waits until the model has reached a layer.
    pub(crate) fn arrived(&self) -> u32 {
        self.arrived.recv_timeout(PATIENCE).unwrap()
    }

    pub(crate) fn go(&self) {
        self.go.send(()).unwrap();
    }

    pub(crate) fn open(self) {
        drop(self);
    }
}

pub(crate) fn gate() -> (Gate, Keeper) {
    let (arrived, arrivals) = channel();
    let (go, permits) = channel();
    let gate = Gate {
        arrived,
        go: permits,
    };
    (
        gate,
        Keeper {
            arrived: arrivals,
            go,
        },
    )
}

impl LanguageModel for Scripted {
    fn forward(
        &mut self,
        tokens: &[u32],
        checkpoint: &mut dyn Checkpoint,
        logits: &mut Vec<f32>,
    ) -> Result<(), ForwardError> {
        let needed = u32::try_from(self.sequence.len() + tokens.len()).unwrap();
        if needed > self.plan.kv_capacity.get() {
            return Err(ForwardError::KvFull {
                capacity: self.plan.kv_capacity,
                needed,
            });
        }
        for chunk in tokens.chunks(self.plan.prefill_chunk.get().try_into().unwrap()) {
            for layer in 0..LAYERS {
                if let Some(gate) = &self.gate
                    && (gate.arrived.send(layer).is_err() || gate.go.recv().is_err())
                {
                    self.gate = None;
                }
                match checkpoint.poll() {
                    Flow::Continue => {}
                    Flow::Stop => {
                        let position = self.position();
                        self.sequence.clear();
                        return Err(ForwardError::Cancelled { position, layer });
                    }
                    Flow::Apply(plan) => {
                        let result = self.apply_until(&plan, &mut || checkpoint.wanted());
                        checkpoint.applied(result);
                    }
                }
            }
            self.sequence.extend_from_slice(chunk);
        }
        logits.clear();
        logits.resize(VOCABULARY.try_into().unwrap(), 0.0);
        match (self.script)(&self.sequence) {
            Act::Break => panic!("the script says so"),
            Act::NotANumber => logits[3] = f32::NAN,
            Act::SayOnly(token) => {
                logits.fill(f32::NEG_INFINITY);
                logits[usize::try_from(token).unwrap()] = 1.0;
            }
            Act::Say(token) => logits[usize::try_from(token).unwrap()] = 1.0,
            Act::Replaced => {
                return Err(ForwardError::Read(ReadError {
                    path: "model.gguf".into(),
                    what: "layer 0".to_owned(),
                    offset: 0,
                    bytes: Bytes::ZERO,
                    problem: "it holds another model now".to_owned(),
                    replaced: true,
                }));
            }
            Act::Stall => {
                self.left.fetch_add(RING.get(), Ordering::AcqRel);
                return Err(DiskTimeout::default()
                    .stalled(Duration::from_secs(4), &"layer 0".into())
                    .into());
            }
        }
        Ok(())
    }

    fn apply(&mut self, plan: &EnginePlan) -> Result<ApplyReport, ApplyError> {
        if plan.prefill_chunk.get() == 0 {
            return Err(ApplyError::Chunk {
                chunk: 0,
                limit: 512,
            });
        }
        self.plan = EnginePlan {
            kv_capacity: plan
                .kv_capacity
                .max(Tokens::new(self.position().next_multiple_of(BLOCK))),
            ..plan.clone()
        };
        Ok(ApplyReport {
            untouched: Bytes::ZERO,
            held_untouched: Bytes::ZERO,
            plan: self.plan.clone(),
            asked: Bytes::ZERO,
            freed: Bytes::ZERO,
            grown: Bytes::ZERO,
            dropped: Tokens::ZERO,
            held: Bytes::ZERO,
            rss_before: Bytes::ZERO,
            rss_after: Bytes::ZERO,
            took: Duration::ZERO,
        })
    }

    fn apply_until(
        &mut self,
        plan: &EnginePlan,
        wanted: &mut dyn FnMut() -> bool,
    ) -> Result<ApplyReport, ApplyError> {
        if plan.prefill_chunk != HANGS {
            return self.apply(plan);
        }
        if let Some(gate) = &self.gate {
            gate.arrived.send(HANGS.get()).unwrap();
        }
        while !wanted() {
            std::thread::yield_now();
        }
        Err(DiskTimeout::default()
            .stalled(Duration::from_millis(500), &"layer 3".into())
            .into())
    }

    fn reset(&mut self) {
        self.sequence.clear();
    }

    fn plan(&self) -> &EnginePlan {
        &self.plan
    }

    fn shape(&self) -> &ModelShape {
        &self.shape
    }

    fn position(&self) -> u32 {
        self.sequence.len().try_into().unwrap()
    }

    fn breakdown(&self) -> Breakdown {
        Breakdown {
            kv_untouched: Bytes::ZERO,
            kv_marks: Bytes::ZERO,
            kv_parked: Bytes::ZERO,
            weights: Bytes::ZERO,
            fixed: Bytes::ZERO,
            header: Bytes::ZERO,
            kv: Bytes::ZERO,
            state: Bytes::ZERO,
            workspace: Bytes::ZERO,
            ring: self.left(),
            total: self.left(),
        }
    }

    fn left(&self) -> Bytes {
        Bytes::new(self.left.load(Ordering::Acquire))
    }

    fn kept(&self) -> Retained {
        Retained::of(vec![self.kept.clone()], Instant::now())
    }
}

pub(crate) fn shape() -> ModelShape {
    ModelShape {
        name: "scripted".to_owned(),
        architecture: "qwen35".to_owned(),
        layers: vec![
            LayerShape::new(LayerKind::Attention, 0, Bytes::from_kib(4));
            LAYERS.try_into().unwrap()
        ],
        fixed_bytes: Bytes::ZERO,
        state_bytes: Bytes::ZERO,
        kv: KvShape {
            attention_layers: LAYERS,
            kv_heads: 1,
            head_dim: 1,
            element_bytes: 2,
            granule: Bytes::ZERO,
            block_tokens: Tokens::new(BLOCK),
            windowed: None,
        },
        context_max: Tokens::new(CONTEXT_MAX),
        workspace_fixed_bytes: Bytes::ZERO,
        workspace_bytes_per_token: Bytes::ZERO,
        ring_bytes: Bytes::ZERO,
    }
}

pub(crate) fn plan(kv_capacity: u32) -> EnginePlan {
    EnginePlan {
        resident: (0..LAYERS).collect(),
        kv_capacity: Tokens::new(kv_capacity),
        prefill_chunk: Tokens::new(8),
        kv_type: KvType::F16,
    }
}

/// Returns a header whose tokenizer has a token per byte, and ChatML's control tokens.
pub(crate) fn header() -> Header {
    header_with(None)
}

/// Returns the same header with a chat template.
pub(crate) fn header_with(template: Option<&str>) -> Header {
    let string = |text: &str| Value::String(text.to_owned());
    let mut tokens: Vec<Value> = (0..=u8::MAX)
        .map(|byte| string(&byte_symbol(byte).to_string()))
        .collect();
    // 0x20, 0xf0 and 0x9f, as written in byte-level vocabularies.
    tokens.extend(
        [
            "<|endoftext|>",
            "<|im_start|>",
            "<|im_end|>",
            "\u{120}\u{f0}\u{141}",
        ]
        .map(string),
    );
    let types = (0..tokens.len())
        .map(|at| Value::I32(if (256..259).contains(&at) { 3 } else { 1 }))
        .collect();
    let mut entries = vec![
        ("tokenizer.ggml.model", string("gpt2")),
        ("tokenizer.ggml.pre", string("qwen35")),
        ("tokenizer.ggml.tokens", Value::Array(tokens)),
        ("tokenizer.ggml.token_type", Value::Array(types)),
        ("tokenizer.ggml.merges", Value::Array(vec![string("a b")])),
        ("tokenizer.ggml.eos_token_id", Value::U32(IM_END)),
    ];
    entries.extend(template.map(|template| ("tokenizer.chat_template", string(template))));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("header.gguf");
    let entries: Vec<_> = entries.iter().map(|(key, value)| (*key, value)).collect();
    gguf_file::write(&mut File::create(&path).unwrap(), &entries, &[]).unwrap();
    Header::read(&path).unwrap()
}

/// Engine with a scripted model, ready.
pub(crate) struct Stage {
    pub(crate) engine: Engine,
    pub(crate) handle: EngineHandle,
    pub(crate) events: mpsc::Receiver<EngineEvent>,
}

pub(crate) struct Setting {
    pub(crate) options: EngineOptions,
    pub(crate) kv_capacity: u32,
    pub(crate) gate: Option<Gate>,
    /// Memory retained by hanging reads.
    pub(crate) left: Arc<AtomicU64>,
    /// Memory retained by a read when the model is abandoned.
    pub(crate) kept: Weak<SharedMapping>,
}

impl Default for Setting {
    fn default() -> Self {
        Self {
            options: EngineOptions::default(),
            kv_capacity: CONTEXT_MAX,
            gate: None,
            left: Arc::default(),
            kept: Weak::new(),
        }
    }
}

impl Stage {
    pub(crate) fn new(setting: Setting, script: impl Fn(&[u32]) -> Act + Send + 'static) -> Self {
        let (sink, events) = mpsc::channel(64);
        let mut model = Some(Scripted {
            shape: shape(),
            plan: plan(0),
            sequence: vec![],
            script: Box::new(script),
            gate: setting.gate,
            left: setting.left,
            kept: setting.kept,
        });
        let opener = move |_: &Path, plan: &EnginePlan| {
            let mut model = model.take().unwrap();
            model.plan = plan.clone();
            let text = TextSide::new(&header(), model.shape.context_max).unwrap();
            Ok(Opened {
                model: Box::new(model),
                text,
            })
        };
        let engine = Engine::start_with(setting.options, Box::new(opener), sink).unwrap();
        let handle = engine.handle();
        let mut stage = Self {
            engine,
            handle,
            events,
        };
        stage
            .handle
            .load(Path::new("scripted.gguf"), plan(setting.kv_capacity));
        assert!(matches!(stage.event(), EngineEvent::Ready { .. }));
        stage
    }

    /// Starts an engine whose model waits at each layer.
    pub(crate) fn gated(
        options: EngineOptions,
        script: impl Fn(&[u32]) -> Act + Send + 'static,
    ) -> (Self, Keeper) {
        let (gate, keeper) = gate();
        let setting = Setting {
            options,
            gate: Some(gate),
            ..Setting::default()
        };
        (Self::new(setting, script), keeper)
    }

    pub(crate) fn event(&mut self) -> EngineEvent {
        self.events.blocking_recv().unwrap()
    }

    /// Returns the next event about a plan or about the engine as a whole.
    pub(crate) fn command_event(&mut self) -> EngineEvent {
        loop {
            match self.event() {
                EngineEvent::RequestStarted { .. } | EngineEvent::RequestFinished { .. } => {}
                event => return event,
            }
        }
    }

    pub(crate) fn finished(&mut self, id: u64) -> Result<FinishReason, GenerateError> {
        loop {
            if let EngineEvent::RequestFinished {
                id: ended, outcome, ..
            } = self.event()
                && ended == RequestId::new(id)
            {
                return outcome;
            }
        }
    }

    pub(crate) fn ask(&self, request: GenerateRequest) -> Answer {
        collect(&mut self.handle.generate(request).unwrap())
    }

    pub(crate) fn stop(self) {
        self.handle.stop();
        self.engine.join();
    }
}

#[derive(Debug, Default)]
pub(crate) struct Answer {
    pub(crate) text: String,
    pub(crate) tokens: Vec<u32>,
    pub(crate) started: Option<(u32, u32)>,
    pub(crate) end: Option<Result<(FinishReason, Usage), GenerateError>>,
}

impl Answer {
    pub(crate) fn reason(&self) -> FinishReason {
        self.end.clone().unwrap().unwrap().0
    }

    pub(crate) fn error(&self) -> GenerateError {
        self.end.clone().unwrap().unwrap_err()
    }
}

pub(crate) fn collect(stream: &mut mpsc::Receiver<GenerateEvent>) -> Answer {
    let mut answer = Answer::default();
    while let Some(event) = stream.blocking_recv() {
        assert!(answer.end.is_none(), "nothing follows the end: {event:?}");
        match event {
            GenerateEvent::Started {
                prompt_tokens,
                cached_tokens,
            } => {
                answer.started = Some((prompt_tokens.get(), cached_tokens.get()));
            }
            GenerateEvent::Delta { text, tokens } => {
                assert!(!text.is_empty());
                answer.text.push_str(&text);
                answer.tokens.extend(tokens);
            }
            GenerateEvent::Finished { reason, usage } => answer.end = Some(Ok((reason, usage))),
            GenerateEvent::Failed(error) => answer.end = Some(Err(error)),
        }
    }
    answer
}

pub(crate) fn request(id: u64, text: &str) -> GenerateRequest {
    GenerateRequest::new(RequestId::new(id), Prompt::Text(text.to_owned()))
}

pub(crate) fn limited(id: u64, text: &str, max_tokens: u32) -> GenerateRequest {
    GenerateRequest {
        max_tokens: Some(Tokens::new(max_tokens)),
        ..request(id, text)
    }
}

/// Generates letters that depend on the whole sequence.
pub(crate) fn babble(sequence: &[u32]) -> Act {
    let hash = sequence.iter().fold(7u32, |hash, &token| {
        hash.wrapping_mul(31).wrapping_add(token)
    });
    Act::Say(u32::from(b'a') + hash % 26)
}

/// Generates the same letter, for endless answers.
pub(crate) fn drone(_: &[u32]) -> Act {
    Act::Say(u32::from(b'z'))
}

/// Generates a text after a prompt of `prompt` tokens, then the end.
pub(crate) fn recite(prompt: usize, text: &'static str) -> impl Fn(&[u32]) -> Act + Send {
    move |sequence| {
        Act::Say(
            text.as_bytes()
                .get(sequence.len() - prompt)
                .map_or(IM_END, |&byte| u32::from(byte)),
        )
    }
}

/// Longer than any operation on a busy machine, so that it only ends failing tests.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
