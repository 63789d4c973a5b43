//! Backends of the APIs, as traits that `daemon` implements.
//!
//! Requests and events are plain data, without engine, worker or lease. A request carries the client's fields; an
//! answer is a stream of events. **Dropping a future or a stream cancels its work**, so a client that disconnects frees
//! its resources.

use std::{sync::Arc, time::Duration};

use futures_util::{future::BoxFuture, stream::BoxStream};
use tokio::sync::{mpsc, watch};

use super::Client;
pub use cotenant_conversation::{
    AnswerForm, AnswerPart, ChatMessage, Conversation, FinishReason, Prompt, Role, SamplingWish,
    ToolCall, Usage,
};
use cotenant_conversation::{refusal::Refusal, refusals::not_configured, sinks::Sinks};
use cotenant_policy::{
    event::{Answer, Event},
    lease::Ticket,
    snapshot::Snapshot,
};
use cotenant_speech::{audio::MonoAudio, decoder::Decoder, embeddings::Embeddings};
use cotenant_telemetry::{SpanContext, Tracer};
use cotenant_units::{Bytes, Tokens};

/// The backends of the APIs.
#[derive(Clone)]
pub struct Backends {
    /// The LLM; `None` when no model is configured.
    pub chat: Option<Arc<dyn ChatBackend>>,
    /// Token counter.
    pub tokenizer: Option<Arc<dyn TokenizerBackend>>,
    /// Decodes uploaded audio files.
    pub decoder: Decoder,
    /// Speech to text and text to speech; `None` when no speech worker is configured.
    pub speech: Option<Arc<dyn SpeechBackend>>,
    /// Text to vectors; `None` when no worker for embeddings is configured.
    pub embedding: Option<Arc<dyn EmbeddingBackend>>,
    /// State and metrics.
    pub status: Arc<dyn StatusBackend>,
    /// Starts the spans of requests.
    pub tracer: Tracer,
}

impl Backends {
    /// The speech backend; the refusal says that `act` needs it.
    pub(super) fn speech(&self, act: &str, what: &str) -> Result<Arc<dyn SpeechBackend>, Refusal> {
        self.speech.clone().ok_or_else(|| not_configured(act, what))
    }
}

/// Metadata of every request besides its content.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestMeta {
    /// `x-request-id`, the caller's or a generated one; returned in the response and logged.
    pub id: String,
    /// Longest pause between two bytes that the client accepts, from `x-stainless-read-timeout`.
    ///
    /// Work that cannot begin within this time should be refused at once.
    pub patience: Option<Duration>,
    /// The client of the key; `None` if no key is needed.
    pub client: Option<Arc<Client>>,
    /// The parent span: initially the caller's, from its header `traceparent`.
    pub trace: Option<SpanContext>,
    /// Speculative work ahead of a request that the client has probably finished. Done only while memory is ample and
    /// the backends are idle, otherwise refused; cancelled at [`RunningAnswers::unwanted`].
    pub early: bool,
    /// The answer of which this is a stage. The answer is already admitted, so a drain does not refuse its stages.
    pub part_of: Option<RunningAnswer>,
}

/// Counts running answers, and refuses more in a drain.
#[derive(Debug)]
pub struct RunningAnswers {
    /// One reference per answer, plus this one.
    all: Arc<()>,
    states: watch::Receiver<Arc<Snapshot>>,
    requests: watch::Sender<()>,
}

/// A running answer; ends when its last clone is dropped. Stages of one answer share it as clones.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(
    clippy::redundant_allocation,
    reason = "clones of the outer one are one answer, each inner one is counted"
)]
pub struct RunningAnswer(Arc<Arc<()>>);

impl RunningAnswers {
    /// No answers yet; `states` are the arbiter's.
    pub fn new(states: watch::Receiver<Arc<Snapshot>>) -> Self {
        Self {
            all: Arc::default(),
            states,
            requests: watch::Sender::default(),
        }
    }

    /// Resolves when speculative work that begins now must end: memory is requested, or a client needs the recogniser
    /// or the LLM.
    #[must_use]
    pub fn unwanted(&self) -> BoxFuture<'static, ()> {
        let (mut states, mut requests) = (self.states.clone(), self.requests.subscribe());
        Box::pin(async move {
            tokio::select! {
                _ = states.wait_for(|state| !state.is_ample()) => {}
                _ = requests.changed() => {}
            }
        })
    }

    /// Cancels speculative work: a client needs the recogniser or the LLM.
    pub fn make_way(&self) {
        self.requests.send_replace(());
    }

    /// The number of running answers.
    pub fn count(&self) -> usize {
        Arc::strong_count(&self.all).saturating_sub(1)
    }

    /// Counts one more answer; `None` in a drain.
    pub fn begin(&self) -> Option<RunningAnswer> {
        // Counted before the check, so that a drain cannot seem complete while an answer starts.
        let answer = RunningAnswer(Arc::new(Arc::clone(&self.all)));
        (!self.states.borrow().draining).then_some(answer)
    }
}

/// The LLM.
pub trait ChatBackend: Send + Sync + 'static {
    /// Admits one chat completion, or refuses it.
    ///
    /// Resolves on *admission*, before anything is generated: only before the first byte can a refusal be a status
    /// code. The stream ends after [`ChatEvent::Finished`] or [`ChatEvent::Failed`]. Dropping the future or the stream
    /// cancels the generation.
    fn chat(&self, request: ChatRequest) -> BoxFuture<'_, Result<ChatStream, Refusal>>;
}

/// Events of one chat completion, in the order of the variants of [`ChatEvent`].
pub type ChatStream = BoxStream<'static, ChatEvent>;

/// One chat completion as requested.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChatRequest {
    /// Id, patience.
    pub meta: RequestMeta,
    /// Name of the model; one of [`StatusBackend::models`].
    pub model: String,
    /// The conversation to continue; never empty.
    pub prompt: Prompt,
    /// Maximum number of tokens to generate; `None` leaves it to the model and the context.
    pub max_tokens: Option<Tokens>,
    /// How tokens are chosen.
    pub sampling: ChatSampling,
    /// Texts that end the answer and are omitted from it; none is empty.
    pub stop: Vec<String>,
    /// Required form of the answer.
    pub form: Option<AnswerForm>,
    /// KV capacity that the client requests; the arbiter may grant less.
    pub context_wanted: Option<Tokens>,
    /// Tokens that are kept when the oldest context is dropped to continue the answer; `None` forbids dropping.
    pub sinks: Option<Sinks>,
    /// Part of an overlong prompt that is kept; `None` refuses the prompt.
    pub retention: Option<Retention>,
    /// Whether [`ChatEvent::Context`] is requested.
    pub context_reported: bool,
    /// Whether the answer is streamed. Otherwise it must be complete within the client's patience.
    pub streamed: bool,
}

/// Kept part of an overlong prompt, as the part of the context that it fills.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Retention {
    /// The latest whole messages.
    Messages(f64),
    /// The same; an overlong last message keeps only its end.
    Text(f64),
}

/// How the tokens of an answer are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ChatSampling {
    /// The client's values, which override the recommendation of the model's file.
    pub asked: SamplingWish,
    /// Defaults of the API, if neither client nor file sets a value. Without any, decoding is greedy.
    pub defaults: SamplingWish,
}

impl Default for ChatSampling {
    /// For APIs without such fields.
    fn default() -> Self {
        Self {
            asked: SamplingWish::NONE,
            defaults: SamplingWish::AS_COMPUTED,
        }
    }
}

/// Tokenizer of the loaded model.
pub trait TokenizerBackend: Send + Sync + 'static {
    /// The number of tokens of a prompt of any length.
    fn count(&self, prompt: Prompt) -> BoxFuture<'_, Result<Tokens, Refusal>>;

    /// The tokens of a text; options: a beginning-of-sequence token, and recognition of control tokens.
    fn tokenize(
        &self,
        text: String,
        begin: bool,
        control: bool,
    ) -> BoxFuture<'_, Result<Vec<u32>, Refusal>>;

    /// The bytes of each token; empty for a control token.
    fn pieces(&self, tokens: Vec<u32>) -> BoxFuture<'_, Result<Vec<Vec<u8>>, Refusal>>;
}

/// Events of one chat completion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChatEvent {
    /// The prompt has been tokenized. Sent once, first.
    Started {
        /// Tokens of the prompt.
        prompt_tokens: Tokens,
        /// Prompt tokens that were still in the KV cache.
        cached_tokens: Tokens,
    },
    /// A piece of the answer, in whole characters.
    Part(AnswerPart),
    /// The tokens of prompt and answer, to be the prefix of a later conversation. Sent before the end, if requested.
    Context(Vec<u32>),
    /// The answer is complete. Sent last.
    Finished {
        /// Why it ended.
        reason: FinishReason,
        /// Resource usage.
        usage: Usage,
    },
    /// The answer cannot be completed. Sent last.
    Failed(Refusal),
}

/// Speech to text and text to speech.
pub trait SpeechBackend: Send + Sync + 'static {
    /// Transcribes speech. Audio without speech gives an empty text, not an error.
    fn transcribe(&self, request: TranscribeRequest) -> BoxFuture<'_, Result<Transcript, Refusal>>;

    /// Synthesises text. Resolves when the rate is known, that is, when synthesis has begun.
    fn synthesize(&self, request: SpeechRequest) -> BoxFuture<'_, Result<SpeechStream, Refusal>>;

    /// Names of the voices that the worker announces, or announced last if it is not running.
    fn voices(&self) -> BoxFuture<'_, Vec<String>> {
        Box::pin(async { Vec::new() })
    }
}

/// Speech to transcribe.
#[derive(Clone, Debug)]
pub struct TranscribeRequest {
    /// Id, patience.
    pub meta: RequestMeta,
    /// Name of the model, as given by the client.
    pub model: String,
    /// 16 kHz mono.
    pub audio: Arc<MonoAudio>,
    /// Language expected by the client: `en`.
    pub language: Option<String>,
    /// Text that resembles the expected one.
    pub prompt: Option<String>,
    /// Receiver of partial transcripts, from recognisers that send them; the whole text follows at the end.
    pub pieces: Option<mpsc::Sender<String>>,
}

/// Transcribed text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Transcript {
    /// The text; empty without speech.
    pub text: String,
    /// Language of the text: `en`.
    pub language: Option<String>,
}

/// Text to synthesise.
#[derive(Clone, Debug, PartialEq)]
pub struct SpeechRequest {
    /// Id, patience.
    pub meta: RequestMeta,
    /// Name of the model, as given by the client.
    pub model: String,
    /// The text; never blank.
    pub text: String,
    /// The requested voice.
    pub voice: VoiceWish,
    /// A speaker of a multi-speaker voice.
    pub speaker: Option<String>,
    /// 0.25 to 4; 1 is the voice's normal speed.
    pub speed: f64,
    /// Whether the answer is sent whole. It must then be complete within the client's patience; otherwise it must begin
    /// within it.
    pub whole: bool,
}

/// The voice that a client requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum VoiceWish {
    /// The worker's default.
    #[default]
    Any,
    /// A voice in the configuration or the worker's description.
    Known(String),
    /// A voice named only by the client: used if the worker announces it, otherwise `otherwise` is used.
    Asked {
        /// Name given by the client.
        name: String,
        /// The default voice of the configuration, if any.
        otherwise: Option<String>,
    },
}

impl From<Option<String>> for VoiceWish {
    fn from(known: Option<String>) -> Self {
        known.map_or(Self::Any, Self::Known)
    }
}

/// Speech as it is synthesised.
pub struct SpeechStream {
    /// Samples per second of the chunks.
    pub rate: u32,
    /// The voice in use; `None` if the worker chooses.
    pub voice: Option<String>,
    /// Fields of the request that the voice ignores.
    pub ignored: &'static [&'static str],
    /// Mono samples; an `Err` is the last item.
    pub chunks: BoxStream<'static, Result<Vec<i16>, Refusal>>,
}

/// Text to vectors.
pub trait EmbeddingBackend: Send + Sync + 'static {
    /// Embeds texts, in their order.
    fn embed(&self, request: EmbedRequest) -> BoxFuture<'_, Result<Embeddings, Refusal>>;
}

/// Texts to embed.
#[derive(Clone, Debug)]
pub struct EmbedRequest {
    /// Id, patience.
    pub meta: RequestMeta,
    /// Name of the model; one of [`StatusBackend::models`].
    pub model: String,
    /// The texts; none is empty, at most [`TEXTS_MAX`](cotenant_speech::embeddings::TEXTS_MAX).
    pub texts: Vec<String>,
    /// Shortened length of a vector, from a client that requests one.
    pub dimensions: Option<u32>,
    /// Whether a text beyond the context of the model is cut instead of refused.
    pub truncate: bool,
}

/// An event with the ticket of its answer.
pub type Asked = Box<dyn FnOnce(Ticket) -> Event + Send>;

/// State, metrics and commands. No method blocks.
pub trait StatusBackend: Send + Sync + 'static {
    /// Sends an operator's command to the arbiter; returns its answer, or `None` if the supervisor cannot take it.
    fn ask(&self, asked: Asked) -> BoxFuture<'static, Option<Answer>>;

    /// The arbiter's state after the last event.
    fn snapshot(&self) -> Arc<Snapshot>;

    /// Age of the last sample of the machine; `None` before the first one.
    fn sample_age(&self) -> Option<Duration> {
        None
    }

    /// All metrics as Prometheus text (OpenMetrics, ending in `# EOF`).
    fn metrics(&self) -> String;

    /// The state as `cotenant status -o json` prints it, with the last events.
    fn document(&self) -> serde_json::Value;

    /// Memory, speed and decisions over time, for the page.
    fn history(&self, query: &HistoryQuery) -> serde_json::Value;

    /// Models offered to clients.
    fn models(&self) -> Vec<ModelInfo>;

    /// The chat template of the LLM, once its file's header has been read.
    fn template(&self) -> Option<String> {
        None
    }

    /// Voices offered to clients; the first is the default.
    fn voices(&self) -> Vec<Voice>;

    /// Running answers; the stages of one count once.
    fn answers(&self) -> &RunningAnswers;

    /// Records the end of a request, `took` after its head was read: the last byte was sent, or the client
    /// disconnected.
    ///
    /// `route` is the pattern of the path, or `unmatched`; `code` is 499 if the client disconnected before the answer.
    fn request_ended(&self, route: &str, code: u16, took: Duration);

    /// Records the first text of a chat completion, `took` after its head was read.
    fn first_token(&self, took: Duration);
}

/// Part of the history that a client requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HistoryQuery {
    /// A day in steps of a minute instead of an hour in steps of some seconds.
    pub day: bool,
    /// First second, since 1970; `None` for all.
    pub after_s: Option<u64>,
}

/// A model offered to clients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelInfo {
    /// Primary name.
    pub id: String,
    /// Aliases.
    pub aliases: Vec<String>,
    /// Task of the model.
    pub kind: ModelKind,
    /// Creation or load time, in seconds since 1970; 0 if unknown.
    pub created: u64,
    /// Size of its file; zero if unknown.
    pub bytes: Bytes,
    /// Its weights, once the header of its file has been read.
    pub weights: Option<Weights>,
}

/// Number and type of a model's weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Weights {
    /// Number of weights.
    pub parameters: u64,
    /// The most common type: `Q4_K`.
    pub quantization: String,
}

impl ModelInfo {
    /// Whether the model has this name.
    pub fn is_called(&self, name: &str) -> bool {
        self.id == name || self.aliases.iter().any(|alias| alias == name)
    }
}

/// Task of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelKind {
    /// Answers in text.
    Chat,
    /// Turns text into vectors.
    Embedding,
    /// Turns text into speech.
    Speech,
    /// Turns speech into text.
    Transcription,
}

/// A voice offered to clients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Voice {
    /// Name used by the worker.
    pub name: String,
    /// Aliases: `alloy`.
    pub aliases: Vec<String>,
}
