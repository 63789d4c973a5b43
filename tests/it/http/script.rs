//! Scripted backends that record their requests.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use cotenant::{
    conversation::refusal::Refusal,
    http::{
        Access, Api, Limits,
        backend::{
            AnswerPart, Asked, Backends, ChatBackend, ChatEvent, ChatRequest, ChatStream,
            EmbedRequest, EmbeddingBackend, FinishReason, HistoryQuery, ModelInfo, ModelKind,
            Prompt, RunningAnswers, SpeechBackend, SpeechRequest, SpeechStream, StatusBackend,
            TokenizerBackend, TranscribeRequest, Transcript, Usage, Voice, VoiceWish, Weights,
        },
        serve,
    },
    policy::{
        event::{Answer, Done, Event, ShedOutcome},
        lease::Ticket,
        pressure::PressureLevel,
        snapshot::Snapshot,
    },
    speech::{decoder::Decoder, embeddings::Embeddings},
    telemetry::Tracer,
    units::{Bytes, Tokens},
};
use futures_util::{FutureExt, StreamExt, future::BoxFuture, stream};
use tokio::{
    net::TcpListener,
    sync::{Notify, watch},
    task::JoinHandle,
};
use tokio_util::sync::CancellationToken;

#[derive(Clone, Debug)]
pub(super) enum Step {
    Event(ChatEvent),
    Stall(Duration),
    /// Waits until the test releases it.
    Gate,
    /// Never continues.
    Hang,
}

#[derive(Default)]
pub(super) struct Script {
    pub(super) refusals: Mutex<Vec<Refusal>>,
    pub(super) admission: Mutex<Option<Duration>>,
    pub(super) steps: Mutex<Vec<Step>>,
    pub(super) gate: Notify,
    pub(super) chats: Mutex<Vec<ChatRequest>>,
    pub(super) embedded: Mutex<Vec<EmbedRequest>>,
    pub(super) transcriptions: Mutex<Vec<TranscribeRequest>>,
    pub(super) speeches: Mutex<Vec<SpeechRequest>>,
    pub(super) transcript_after: Mutex<Option<Duration>>,
    pub(super) speech_rate: Mutex<Option<u32>>,
    pub(super) speech: Mutex<Vec<Result<Vec<i16>, Refusal>>>,
    pub(super) snapshot: Mutex<Snapshot>,
    pub(super) answers: Answers,
    pub(super) refused_twice: AtomicUsize,
    pub(super) ended: Mutex<Vec<(String, u16)>>,
    pub(super) request_ended: Notify,
    pub(super) first_tokens: AtomicUsize,
    pub(super) live: AtomicUsize,
    pub(super) dropped: Notify,
}

/// Running answers, and the state that they see.
pub(super) struct Answers(
    pub(super) watch::Sender<Arc<Snapshot>>,
    pub(super) RunningAnswers,
);

impl Default for Answers {
    fn default() -> Self {
        let states = watch::Sender::default();
        let answers = RunningAnswers::new(states.subscribe());
        Self(states, answers)
    }
}

impl Script {
    /// Refuses the next requests with these refusals, in order.
    pub(super) fn refuse(&self, refusals: impl IntoIterator<Item = Refusal>) {
        let mut queue = self.refusals.lock().unwrap();
        queue.extend(refusals);
        queue.reverse();
    }

    pub(super) fn answer(&self, steps: impl IntoIterator<Item = Step>) {
        *self.steps.lock().unwrap() = steps.into_iter().collect();
    }

    fn refusal(&self) -> Option<Refusal> {
        self.refusals.lock().unwrap().pop()
    }

    /// Waits until a request has ended, and returns its route and code.
    ///
    /// A request ends when the last byte of its response is sent, which its client may see earlier.
    pub(super) async fn next_ended(&self) -> (String, u16) {
        loop {
            if let Some(ended) = self.ended.lock().unwrap().pop() {
                return ended;
            }
            self.request_ended.notified().await;
        }
    }

    pub(super) async fn all_dropped(&self) {
        while self.live.load(Ordering::SeqCst) > 0 {
            self.dropped.notified().await;
        }
    }
}

/// Guard of a running generation.
struct Live(Arc<Script>);

impl Live {
    fn begin(script: &Arc<Script>) -> Self {
        script.live.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(script))
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        self.0.live.fetch_sub(1, Ordering::SeqCst);
        self.0.dropped.notify_one();
    }
}

pub(super) fn started() -> Step {
    Step::Event(ChatEvent::Started {
        prompt_tokens: Tokens::new(12),
        cached_tokens: Tokens::new(8),
    })
}

pub(super) fn delta(text: &str) -> Step {
    Step::Event(ChatEvent::Part(AnswerPart::Text(text.to_owned())))
}

pub(super) fn finished() -> Step {
    Step::Event(ChatEvent::Finished {
        reason: FinishReason::Stop,
        usage: Usage {
            prompt_tokens: Tokens::new(12),
            cached_tokens: Tokens::new(8),
            completion_tokens: Tokens::new(3),
            ..Usage::default()
        },
    })
}

pub(super) fn failed(refusal: Refusal) -> Step {
    Step::Event(ChatEvent::Failed(refusal))
}

pub(super) fn engine_lost() -> Refusal {
    Refusal::EngineLost {
        reason: "its thread ended".to_owned(),
        retry_after: Duration::from_millis(50),
    }
}

struct Scripted(Arc<Script>);

impl ChatBackend for Scripted {
    fn chat(&self, request: ChatRequest) -> BoxFuture<'_, Result<ChatStream, Refusal>> {
        let script = Arc::clone(&self.0);
        let live = Live::begin(&script);
        let said = match &request.prompt {
            Prompt::Raw(text) | Prompt::Text(text) => text.as_str(),
            prompt => prompt
                .messages()
                .last()
                .map_or("", |message| &message.content),
        };
        let steps = said_in_prompt(&script, said);
        script.chats.lock().unwrap().push(request);
        async move {
            let wait = *script.admission.lock().unwrap();
            if let Some(wait) = wait {
                tokio::time::sleep(wait).await;
            }
            if let Some(refusal) = script.refusal() {
                return Err(refusal);
            }
            let steps = steps.unwrap_or_else(|| script.steps.lock().unwrap().clone());
            let state = (steps.into_iter(), script, live);
            Ok(
                stream::unfold(state, |(mut steps, script, live)| async move {
                    loop {
                        match steps.next()? {
                            Step::Event(event) => return Some((event, (steps, script, live))),
                            Step::Stall(time) => tokio::time::sleep(time).await,
                            Step::Gate => script.gate.notified().await,
                            Step::Hang => std::future::pending().await,
                        }
                    }
                })
                .boxed(),
            )
        }
        .boxed()
    }
}

/// One token per byte; 0 starts a sequence.
impl TokenizerBackend for Scripted {
    fn count(&self, prompt: Prompt) -> BoxFuture<'_, Result<Tokens, Refusal>> {
        let bytes: usize = prompt
            .messages()
            .iter()
            .map(|message| message.content.len())
            .sum();
        async move { Ok(Tokens::new(u32::try_from(bytes).unwrap())) }.boxed()
    }

    fn tokenize(
        &self,
        text: String,
        begin: bool,
        _control: bool,
    ) -> BoxFuture<'_, Result<Vec<u32>, Refusal>> {
        let begun = begin.then_some(0).into_iter();
        let tokens = begun.chain(text.bytes().map(u32::from)).collect();
        async move { Ok(tokens) }.boxed()
    }

    fn pieces(&self, tokens: Vec<u32>) -> BoxFuture<'_, Result<Vec<Vec<u8>>, Refusal>> {
        let bytes = |&token: &u32| u8::try_from(token).into_iter().collect();
        let pieces = tokens.iter().map(bytes).collect();
        async move { Ok(pieces) }.boxed()
    }
}

/// Parses the script that a client in another process puts into its prompt.
fn said_in_prompt(script: &Script, prompt: &str) -> Option<Vec<Step>> {
    let retry_after = Duration::from_millis(50);
    match prompt.strip_prefix("script: ")? {
        "refuse twice" if script.refused_twice.fetch_add(1, Ordering::SeqCst) < 2 => {
            script.refuse([Refusal::PressureHigh {
                act: "start a chat completion".to_owned(),
                level: PressureLevel::Critical,
                retry_after,
            }]);
            None
        }
        "refuse twice" => None,
        "too long" => {
            script.refuse([Refusal::ContextLengthExceeded {
                model: "tiny".to_owned(),
                prompt: Tokens::new(9000),
                limit: Tokens::new(4096),
            }]);
            None
        }
        "lose the engine" => Some(vec![started(), delta("It is "), failed(engine_lost())]),
        "stall" => {
            // longer than the client waits for a byte
            let stall = || Step::Stall(Duration::from_millis(1600));
            Some(vec![
                started(),
                stall(),
                delta("It is "),
                stall(),
                delta("done."),
                finished(),
            ])
        }
        other => panic!("no such script: {other}"),
    }
}

/// Embeds a text as its length, its number in the part, and further numbers of 0.5.
impl EmbeddingBackend for Scripted {
    fn embed(&self, request: EmbedRequest) -> BoxFuture<'_, Result<Embeddings, Refusal>> {
        let script = Arc::clone(&self.0);
        async move {
            if let Some(refusal) = script.refusal() {
                return Err(refusal);
            }
            let length = request.dimensions.unwrap_or(3) as usize;
            let vectors = request
                .texts
                .iter()
                .zip(0u16..)
                .map(|(text, number)| {
                    let text = f32::from(u8::try_from(text.len()).unwrap());
                    let mut vector = vec![text, f32::from(number)];
                    vector.resize(length, 0.5);
                    vector
                })
                .collect();
            let tokens = request.texts.len() as u64;
            script.embedded.lock().unwrap().push(request);
            Ok(Embeddings { vectors, tokens })
        }
        .boxed()
    }
}

impl SpeechBackend for Scripted {
    fn transcribe(&self, request: TranscribeRequest) -> BoxFuture<'_, Result<Transcript, Refusal>> {
        // As in the daemon: without speech, no recogniser is asked.
        let silent = request.audio.samples.iter().all(|&sample| sample == 0);
        self.0.transcriptions.lock().unwrap().push(request);
        let script = Arc::clone(&self.0);
        async move {
            let wait = *script.transcript_after.lock().unwrap();
            if let Some(wait) = wait {
                tokio::time::sleep(wait).await;
            }
            match script.refusal() {
                Some(refusal) => Err(refusal),
                None => Ok(Transcript {
                    text: if silent { "" } else { "turn on the light" }.to_owned(),
                    language: Some("en".to_owned()),
                }),
            }
        }
        .boxed()
    }

    fn synthesize(&self, request: SpeechRequest) -> BoxFuture<'_, Result<SpeechStream, Refusal>> {
        // Like a voice with a single speed.
        let ignored: &[_] = if request.speed == 1.0 {
            &[]
        } else {
            &["speed"]
        };
        // Like a worker that announces the voice of `amy`.
        let voice = match request.voice.clone() {
            VoiceWish::Any => None,
            VoiceWish::Known(name) => Some(name),
            VoiceWish::Asked { name, .. } if name == "amy" => Some(name),
            VoiceWish::Asked { otherwise, .. } => otherwise,
        };
        self.0.speeches.lock().unwrap().push(request);
        let script = Arc::clone(&self.0);
        async move {
            if let Some(refusal) = script.refusal() {
                return Err(refusal);
            }
            let chunks = script.speech.lock().unwrap().clone();
            Ok(SpeechStream {
                voice,
                ignored,
                rate: script.speech_rate.lock().unwrap().unwrap_or(16_000),
                chunks: stream::iter(chunks).boxed(),
            })
        }
        .boxed()
    }

    fn voices(&self) -> BoxFuture<'_, Vec<String>> {
        async { vec!["amy".to_owned(), "slt".to_owned()] }.boxed()
    }
}

struct ScriptedStatus {
    script: Arc<Script>,
}

impl StatusBackend for ScriptedStatus {
    fn ask(&self, asked: Asked) -> BoxFuture<'static, Option<Answer>> {
        let answer = match asked(Ticket(1)) {
            Event::OperatorShed { bytes, .. } => Answer::Shed(ShedOutcome {
                asked: bytes,
                freed: bytes,
                held: Bytes::from_mib(20),
                limited_by: None,
            }),
            Event::OperatorRegrow { .. } => Answer::Done {
                done: Done::FullSize,
            },
            event => panic!("{event:?}"),
        };
        Box::pin(std::future::ready(Some(answer)))
    }

    fn answers(&self) -> &RunningAnswers {
        &self.script.answers.1
    }

    fn snapshot(&self) -> Arc<Snapshot> {
        Arc::new(self.script.snapshot.lock().unwrap().clone())
    }

    fn metrics(&self) -> String {
        "# EOF
"
        .to_owned()
    }

    fn document(&self) -> serde_json::Value {
        serde_json::json!({"version": "scripted"})
    }

    fn history(&self, query: &HistoryQuery) -> serde_json::Value {
        serde_json::json!({"day": query.day, "after": query.after_s})
    }

    fn models(&self) -> Vec<ModelInfo> {
        [
            ("tiny", ModelKind::Chat),
            ("org/other", ModelKind::Chat),
            ("pocketsphinx", ModelKind::Transcription),
            ("flite", ModelKind::Speech),
            ("minilm", ModelKind::Embedding),
        ]
        .map(|(id, kind)| ModelInfo {
            id: id.to_owned(),
            aliases: if id == "tiny" {
                vec!["gpt-small".to_owned()]
            } else {
                Vec::new()
            },
            kind,
            created: 1_700_000_000,
            bytes: Bytes::from_mib(5),
            weights: (id == "tiny").then(|| Weights {
                parameters: 4_650_000,
                quantization: "Q8_0".to_owned(),
            }),
        })
        .to_vec()
    }

    fn template(&self) -> Option<String> {
        Some("{{ messages }}<think>".to_owned())
    }

    fn voices(&self) -> Vec<Voice> {
        vec![
            Voice {
                name: "slt".to_owned(),
                aliases: vec!["alloy".to_owned(), "nova".to_owned()],
            },
            Voice {
                name: "kal".to_owned(),
                aliases: vec!["echo".to_owned()],
            },
        ]
    }

    fn request_ended(&self, route: &str, code: u16, _took: Duration) {
        self.script
            .ended
            .lock()
            .unwrap()
            .push((route.to_owned(), code));
        self.script.request_ended.notify_one();
    }

    fn first_token(&self, _took: Duration) {
        self.script.first_tokens.fetch_add(1, Ordering::SeqCst);
    }
}

/// APIs open for the lifetime of the value.
pub(super) struct Open {
    pub(super) address: SocketAddr,
    pub(super) script: Arc<Script>,
    pub(super) api: Api,
    pub(super) shutdown: CancellationToken,
    pub(super) serving: JoinHandle<()>,
}

impl Drop for Open {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

/// Opens APIs that refuse immediately, without waiting.
pub(super) async fn open() -> Open {
    open_with(
        Limits {
            memory_patience: Duration::ZERO,
            ..Limits::default()
        },
        true,
    )
    .await
}

pub(super) async fn open_with(limits: Limits, with_models: bool) -> Open {
    open_to(limits, with_models, Access::default()).await
}

/// Opens APIs for the clients in `access`.
pub(super) async fn open_to(limits: Limits, with_models: bool, access: Access) -> Open {
    let script = Arc::new(Script::default());
    script.answer([started(), delta("It is "), delta("done."), finished()]);
    *script.speech.lock().unwrap() = vec![Ok(vec![1000; 8000]), Ok(vec![-1000; 8000])];
    let scripted = Arc::new(Scripted(Arc::clone(&script)));
    let backends = Backends {
        chat: with_models.then(|| Arc::clone(&scripted) as Arc<dyn ChatBackend>),
        tokenizer: with_models.then(|| Arc::clone(&scripted) as Arc<dyn TokenizerBackend>),
        decoder: Decoder::new(env!("CARGO_BIN_EXE_cotenant").into()),
        speech: with_models.then(|| Arc::clone(&scripted) as Arc<dyn SpeechBackend>),
        embedding: with_models.then_some(scripted as Arc<dyn EmbeddingBackend>),
        status: Arc::new(ScriptedStatus {
            script: Arc::clone(&script),
        }),
        tracer: Tracer::default(),
    };
    let api = Api::with_access(
        backends,
        limits,
        watch::Sender::new(Arc::new(access)).subscribe(),
    );
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    let shutdown = CancellationToken::new();
    let serving = tokio::spawn(serve(listener, api.clone(), shutdown.clone()));
    Open {
        address,
        script,
        api,
        shutdown,
        serving,
    }
}
