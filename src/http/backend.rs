//! Backends that the APIs need, as traits that `daemon` implements.
//!
//! Everything here is plain data, without engine, worker or lease. A request carries the client's fields; an answer is
//! a stream of events. **Dropping a future or a stream cancels the work behind it**, so a client that disconnects frees
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
use cotenant_policy::snapshot::Snapshot;
use cotenant_speech::{audio::MonoAudio, decoder::Decoder};
use cotenant_telemetry::{SpanContext, Tracer};
use cotenant_units::{Bytes, Tokens};

/// The backends of the APIs.
#[derive(Clone)]
pub struct Backends {
    /// The LLM; `None` when no model is configured.
    pub chat: Option<Arc<dyn ChatBackend>>,
    /// Token counter.
    pub tokenizer: Option<Arc<dyn TokenizerBackend>>,
    /// Reads the audio files that clients send.
    pub decoder: Decoder,
    /// Speech to text and text to speech; `None` when no speech worker is configured.
    pub speech: Option<Arc<dyn SpeechBackend>>,
    /// State and metrics.
    pub status: Arc<dyn StatusBackend>,
    /// Begins the spans of requests.
    pub tracer: Tracer,
}

impl Backends {
    /// Speech, in order to act so.
    pub(super) fn speech(&self, act: &str, what: &str) -> Result<Arc<dyn SpeechBackend>, Refusal> {
        self.speech.clone().ok_or_else(|| not_configured(act, what))
    }
}

/// Metadata of every request besides its content.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestMeta {
    /// `x-request-id`: the caller's, or one made here. The same one goes back in the answer and into the log.
    pub id: String,
    /// Longest pause between two bytes that the client accepts, from `x-stainless-read-timeout`.
    ///
    /// Work that cannot begin within this time should be refused at once.
    pub patience: Option<Duration>,
    /// The client with this key; `None` if no key is needed.
    pub client: Option<Arc<Client>>,
    /// The span that this is a part of: at first the caller's, from its header `traceparent`.
    pub trace: Option<SpanContext>,
    /// Whether the client has not asked yet, and probably will. Done only while memory is ample, by what is idle, and
    /// refused otherwise; given up at [`RunningAnswers::unwanted`].
    pub early: bool,
    /// The answer that this is a stage of. It was admitted before, so a drain does not refuse its stages.
    pub part_of: Option<RunningAnswer>,
}

/// Answers that run, and whether more are admitted.
#[derive(Debug)]
pub struct RunningAnswers {
    /// Has one reference for each answer, and this one.
    all: Arc<()>,
    states: watch::Receiver<Arc<Snapshot>>,
    requests: watch::Sender<()>,
}

/// An answer, which runs until its last clone is dropped: the stages of one answer have clones of it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(
    clippy::redundant_allocation,
    reason = "clones of the outer one are one answer, each inner one is counted"
)]
pub struct RunningAnswer(Arc<Arc<()>>);

impl RunningAnswers {
    /// No answers; `states` are those of the arbiter.
    #[must_use]
    pub fn new(states: watch::Receiver<Arc<Snapshot>>) -> Self {
        Self {
            all: Arc::default(),
            states,
            requests: watch::Sender::default(),
        }
    }

    /// The end of work ahead of a request that begins now: memory is asked for, or a client asks for the recogniser or
    /// the LLM.
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

    /// A client asks for the recogniser or the LLM: work ahead of requests makes way.
    pub fn make_way(&self) {
        self.requests.send_replace(());
    }

    /// How many run.
    #[must_use]
    pub fn count(&self) -> usize {
        Arc::strong_count(&self.all).saturating_sub(1)
    }

    /// Counts one more answer; `None` in a drain.
    #[must_use]
    pub fn begin(&self) -> Option<RunningAnswer> {
        // Counted before the look: a drain never seems to be over while an answer is between both.
        let answer = RunningAnswer(Arc::new(Arc::clone(&self.all)));
        (!self.states.borrow().draining).then_some(answer)
    }
}

/// The LLM.
pub trait ChatBackend: Send + Sync + 'static {
    /// Admits one chat completion, or refuses it.
    ///
    /// Resolves when it is *admitted*, not when it has generated something: a refusal is only visible as a status
    /// code before the first byte. The stream ends after [`ChatEvent::Finished`] or [`ChatEvent::Failed`]. Dropping
    /// the future or the stream cancels the generation.
    fn chat(&self, request: ChatRequest) -> BoxFuture<'_, Result<ChatStream, Refusal>>;
}

/// Events of one chat completion, in the order of the variants of [`ChatEvent`].
pub type ChatStream = BoxStream<'static, ChatEvent>;

/// One chat completion as the client wants it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChatRequest {
    /// Id, patience.
    pub meta: RequestMeta,
    /// Name of the model; one of [`StatusBackend::models`].
    pub model: String,
    /// The conversation to continue; never empty.
    pub prompt: Prompt,
    /// Most tokens to generate; `None` leaves it to the model and the context.
    pub max_tokens: Option<Tokens>,
    /// How tokens are chosen.
    pub sampling: ChatSampling,
    /// Texts that end the answer, themselves left out; none empty.
    pub stop: Vec<String>,
    /// The form that the answer must have.
    pub form: Option<AnswerForm>,
    /// KV capacity that the client would like to have; a wish, which the arbiter grants or not.
    pub context_wanted: Option<Tokens>,
    /// Tokens that stay when the oldest part of the context is dropped so that the answer continues; `None` if nothing
    /// may be dropped.
    pub sinks: Option<Sinks>,
    /// Part of a prompt beyond the context that stays; `None` if it is refused.
    pub retention: Option<Retention>,
    /// Whether [`ChatEvent::Context`] is requested.
    pub context_reported: bool,
    /// Whether the answer is streamed. Otherwise it must be complete within the client's patience.
    pub streamed: bool,
}

/// Part of an overlong prompt that stays, as the part of the context that it fills.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Retention {
    /// The latest messages, each of them whole.
    Messages(f64),
    /// As above; an overlong last message keeps only its end.
    Text(f64),
}

/// How the tokens of an answer are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ChatSampling {
    /// The client's wish, which precedes the recommendation of the model's file.
    pub asked: SamplingWish,
    /// Defaults of the API, if neither client nor file sets a value. Without them decoding is greedy.
    pub defaults: SamplingWish,
}

impl Default for ChatSampling {
    /// Of an API that has no word for it.
    fn default() -> Self {
        Self {
            asked: SamplingWish::NONE,
            defaults: SamplingWish::AS_COMPUTED,
        }
    }
}

/// Tokenizer of the loaded model.
pub trait TokenizerBackend: Send + Sync + 'static {
    /// The number of tokens of a prompt, however long it is.
    fn count(&self, prompt: Prompt) -> BoxFuture<'_, Result<Tokens, Refusal>>;

    /// The tokens of a text, optionally with the beginning-of-sequence token and with control tokens recognised in it.
    fn tokenize(
        &self,
        text: String,
        begin: bool,
        control: bool,
    ) -> BoxFuture<'_, Result<Vec<u32>, Refusal>>;

    /// The bytes of each token; none for a control token.
    fn pieces(&self, tokens: Vec<u32>) -> BoxFuture<'_, Result<Vec<Vec<u8>>, Refusal>>;
}

/// Events of one chat completion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChatEvent {
    /// The prompt has been tokenized. Comes once, first.
    Started {
        /// Tokens of the prompt.
        prompt_tokens: Tokens,
        /// Prompt tokens that were still in the KV cache.
        cached_tokens: Tokens,
    },
    /// More of the answer; whole characters.
    Part(AnswerPart),
    /// The tokens of prompt and answer, as the prefix of a later conversation. Sent before the end, if requested.
    Context(Vec<u32>),
    /// The answer is complete. Comes last.
    Finished {
        /// Why it ended.
        reason: FinishReason,
        /// Resource usage.
        usage: Usage,
    },
    /// The answer cannot be completed. Comes last.
    Failed(Refusal),
}

/// Speech to text and text to speech.
pub trait SpeechBackend: Send + Sync + 'static {
    /// Turns speech into text. No speech in it gives an empty text, not an error.
    fn transcribe(&self, request: TranscribeRequest) -> BoxFuture<'_, Result<Transcript, Refusal>>;

    /// Turns text into speech. Resolves when the rate is known, which is when synthesis has begun.
    fn synthesize(&self, request: SpeechRequest) -> BoxFuture<'_, Result<SpeechStream, Refusal>>;

    /// Names of the voices that the worker announces; those that it announced last while it does not run.
    fn voices(&self) -> BoxFuture<'_, Vec<String>> {
        Box::pin(async { Vec::new() })
    }
}

/// Speech to be turned into text.
#[derive(Clone, Debug)]
pub struct TranscribeRequest {
    /// Id, patience.
    pub meta: RequestMeta,
    /// Name of the model, as the client gave it.
    pub model: String,
    /// 16 kHz mono.
    pub audio: Arc<MonoAudio>,
    /// Language that the client expects: `en`.
    pub language: Option<String>,
    /// Text that the client expects something like.
    pub prompt: Option<String>,
    /// Receiver of partial transcripts, for recognisers that send them; the whole text follows at the end.
    pub pieces: Option<mpsc::Sender<String>>,
}

/// Text found in speech.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Transcript {
    /// The text; empty when there was no speech.
    pub text: String,
    /// Language of it: `en`.
    pub language: Option<String>,
}

/// Text to be turned into speech.
#[derive(Clone, Debug, PartialEq)]
pub struct SpeechRequest {
    /// Id, patience.
    pub meta: RequestMeta,
    /// Name of the model, as the client gave it.
    pub model: String,
    /// The text; never blank.
    pub text: String,
    /// The voice that is to speak.
    pub voice: VoiceWish,
    /// A speaker of a multi-speaker voice.
    pub speaker: Option<String>,
    /// 0.25 to 4; 1 is the voice's own.
    pub speed: f64,
    /// Whether the answer is sent in one piece. It must then be complete within the client's patience; otherwise it
    /// must begin within it.
    pub whole: bool,
}

/// The voice that a client would like.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum VoiceWish {
    /// The worker's own choice.
    #[default]
    Any,
    /// One that the configuration or the worker's description names.
    Known(String),
    /// One that only the client names: it speaks if the worker announces it, else the other one does.
    Asked {
        /// Name that clients use.
        name: String,
        /// The default voice, where the configuration names any.
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
    /// The voice that speaks; `None` where the worker chooses.
    pub voice: Option<String>,
    /// Fields of the request that the voice does not honour.
    pub ignored: &'static [&'static str],
    /// Mono samples; an `Err` is the last item.
    pub chunks: BoxStream<'static, Result<Vec<i16>, Refusal>>,
}

/// State and metrics. Every method answers from memory, at once.
pub trait StatusBackend: Send + Sync + 'static {
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

    /// Models that clients may name.
    fn models(&self) -> Vec<ModelInfo>;

    /// The chat template of the LLM, once its file's header has been read.
    fn template(&self) -> Option<String> {
        None
    }

    /// Voices that clients may name; the first is taken when none is named.
    fn voices(&self) -> Vec<Voice>;

    /// The answers that run, those of several stages as one.
    fn answers(&self) -> &RunningAnswers;

    /// A request has ended, `took` after its head was read: its last byte is sent, or the client has gone.
    ///
    /// `route` is the pattern of the path, or `unmatched`; `code` is 499 when the client has gone before the answer.
    fn request_ended(&self, route: &str, code: u16, took: Duration);

    /// A chat completion has its first text, `took` after its head was read.
    fn first_token(&self, took: Duration);
}

/// A model that clients may name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelInfo {
    /// Its name.
    pub id: String,
    /// Other names for it.
    pub aliases: Vec<String>,
    /// Task of the model.
    pub kind: ModelKind,
    /// When it was made or loaded, in seconds since 1970; 0 when that is not known.
    pub created: u64,
    /// Size of its file; zero when that is not known.
    pub bytes: Bytes,
    /// Its weights, once its file's header has been read.
    pub weights: Option<Weights>,
}

/// Number and type of a model's weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Weights {
    /// How many there are.
    pub parameters: u64,
    /// The type of most of them: `Q4_K`.
    pub quantization: String,
}

impl ModelInfo {
    /// Whether a client's name denotes this model.
    #[must_use]
    pub fn is_called(&self, name: &str) -> bool {
        self.id == name || self.aliases.iter().any(|alias| alias == name)
    }
}

/// Task of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelKind {
    /// Answers in text.
    Chat,
    /// Turns text into speech.
    Speech,
    /// Turns speech into text.
    Transcription,
}

/// A voice that clients may name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Voice {
    /// Its name, as the worker knows it.
    pub name: String,
    /// Other names for it: `alloy`.
    pub aliases: Vec<String>,
}
