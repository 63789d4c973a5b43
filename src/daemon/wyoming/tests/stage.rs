//! Scripted backends and a client for the tests of the Wyoming API.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures_util::{StreamExt as _, future::BoxFuture, stream};
use serde_json::json;
use tokio::{
    net::{
        UnixStream,
        unix::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::{Notify, watch},
    time::timeout,
};
use tokio_util::sync::CancellationToken;

use super::super::{
    info_cache::{self, InfoCache},
    listen::INFO_FILE,
    shared::{Api, Backends},
};
use cotenant_config::WyomingConfig;
use cotenant_conversation::refusal::Refusal;
use cotenant_http::backend::{
    AnswerPart, ChatBackend, ChatEvent, ChatMessage, ChatRequest, ChatStream, FinishReason,
    RunningAnswers, SpeechBackend, SpeechRequest, SpeechStream, TranscribeRequest, Transcript,
    Usage,
};
use cotenant_policy::snapshot::Snapshot;
use cotenant_speech::{
    client::Endpoint,
    server::{Server, ServerLimits},
    wyoming::{
        AudioFormat, Event, Frame, FrameLimits, FrameReader, Info,
        event::{AudioChunk, AudioStart, AudioStop, RunPipeline, Transcript as Written},
        info::{Artifact, Model, TtsProgram},
        write_frame,
    },
};
use cotenant_telemetry::{Metrics, Tracer};
use cotenant_units::{Bytes, Tokens};

/// Longest wait; only failing tests reach it.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);

// ---- backends ----

/// Next step of a scripted backend.
pub(super) enum Turn<T> {
    Give(T),
    Refuse(Refusal),
}

/// Audio of a voice, or the error that ends it.
pub(super) type Chunks = Vec<Result<Vec<i16>, Refusal>>;

#[derive(Default)]
pub(super) struct Script {
    pub(super) transcripts: Mutex<VecDeque<Turn<String>>>,
    pub(super) heard: Mutex<Vec<TranscribeRequest>>,
    pub(super) speech: Mutex<VecDeque<Turn<Chunks>>>,
    pub(super) spoken: Mutex<Vec<SpeechRequest>>,
    pub(super) chats: Mutex<VecDeque<Turn<Vec<Step>>>>,
    pub(super) asked: Mutex<Vec<ChatRequest>>,
    /// Number of open chat streams.
    pub(super) generating: Arc<AtomicUsize>,
    /// Notified when a stream is dropped.
    pub(super) dropped: Arc<Notify>,
}

/// Step of a scripted answer.
pub(super) enum Step {
    Say(&'static str),
    Fail(Refusal),
    Hang,
}

impl SpeechBackend for Script {
    fn transcribe(&self, request: TranscribeRequest) -> BoxFuture<'_, Result<Transcript, Refusal>> {
        self.heard.lock().unwrap().push(request);
        let language = None;
        Box::pin(async move {
            next_turn(&self.transcripts)
                .await
                .map(|text| Transcript { text, language })
        })
    }

    fn synthesize(&self, request: SpeechRequest) -> BoxFuture<'_, Result<SpeechStream, Refusal>> {
        // Unscripted text is spoken as one sample per character.
        let default = vec![Ok(vec![1; request.text.len()])];
        self.spoken.lock().unwrap().push(request);
        let turn = self.speech.lock().unwrap().pop_front();
        Box::pin(async move {
            let chunks = match turn {
                None => default,
                Some(Turn::Give(chunks)) => chunks,
                Some(Turn::Refuse(refusal)) => return Err(refusal),
            };
            Ok(SpeechStream {
                rate: 16_000,
                voice: None,
                ignored: &[],
                chunks: stream::iter(chunks).boxed(),
            })
        })
    }
}

pub(super) async fn next_turn<T>(turns: &Mutex<VecDeque<Turn<T>>>) -> Result<T, Refusal> {
    let turn = turns.lock().unwrap().pop_front();
    match turn {
        Some(Turn::Give(value)) => Ok(value),
        Some(Turn::Refuse(refusal)) => Err(refusal),
        None => std::future::pending().await,
    }
}

pub(super) struct Alive(Arc<AtomicUsize>, Arc<Notify>);

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
        self.1.notify_one();
    }
}

impl ChatBackend for Script {
    fn chat(&self, request: ChatRequest) -> BoxFuture<'_, Result<ChatStream, Refusal>> {
        self.asked.lock().unwrap().push(request);
        let turn = self.chats.lock().unwrap().pop_front();
        Box::pin(async move {
            let steps = match turn.expect("no answer is scripted") {
                Turn::Give(steps) => steps,
                Turn::Refuse(refusal) => return Err(refusal),
            };
            self.generating.fetch_add(1, Ordering::SeqCst);
            let alive = Alive(Arc::clone(&self.generating), Arc::clone(&self.dropped));
            let end = ChatEvent::Finished {
                reason: FinishReason::Stop,
                usage: Usage::default(),
            };
            Ok(stream::iter(steps)
                .then(|step| async {
                    match step {
                        Step::Say(text) => ChatEvent::Part(AnswerPart::Text(text.to_owned())),
                        Step::Fail(refusal) => ChatEvent::Failed(refusal),
                        Step::Hang => std::future::pending().await,
                    }
                })
                .chain(stream::iter([end]))
                .map(move |event| {
                    let _ = &alive;
                    event
                })
                .boxed())
        })
    }
}

// ---- the API ----

pub(super) struct Served {
    /// State reported by the arbiter.
    pub(super) states: watch::Sender<Arc<Snapshot>>,
    pub(super) folder: tempfile::TempDir,
    pub(super) script: Arc<Script>,
    pub(super) metrics: Arc<Metrics>,
    pub(super) api: Api,
    pub(super) stop: CancellationToken,
}

impl Drop for Served {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

pub(super) fn settings() -> WyomingConfig {
    WyomingConfig {
        listen: Vec::new(),
        languages: vec!["en".to_owned()],
        system: None,
        wait_max: Duration::from_secs(20),
        audio_max: Duration::from_secs(2),
        connections_max: 32,
        conversations_max: 4,
        history_max: Bytes::from_kib(1),
    }
}

pub(super) async fn served(settings: WyomingConfig) -> Served {
    let script = Arc::new(Script::default());
    let metrics = Arc::new(Metrics::new());
    let states = watch::Sender::new(Arc::default());
    let backends = Backends {
        speech: Some(Arc::clone(&script) as Arc<dyn SpeechBackend>),
        chat: Some((
            Arc::clone(&script) as Arc<dyn ChatBackend>,
            "demo".to_owned(),
        )),
        asr: None,
        tts: None,
        metrics: Arc::clone(&metrics),
        tracer: Tracer::default(),
        answers: Arc::new(RunningAnswers::new(states.subscribe())),
    };
    let folder = tempfile::tempdir().unwrap();
    // Description of the voice from an earlier run.
    let voice = TtsProgram {
        voices: vec![Model {
            artifact: Artifact {
                name: "slt".to_owned(),
                installed: true,
                ..Artifact::default()
            },
            languages: vec!["en-US".to_owned()],
            speakers: Vec::new(),
        }],
        ..TtsProgram::default()
    };
    let said = Info {
        tts: vec![voice],
        ..Info::default()
    };
    let path = folder.path().join(INFO_FILE);
    std::fs::write(&path, json!({ "tts": said }).to_string()).unwrap();
    let parts = info_cache::Parts {
        tts: Some("tts".to_owned()),
        llm: Some("demo".to_owned()),
        ..info_cache::Parts::default()
    };
    let aliases = BTreeMap::from([("alloy".to_owned(), "slt".to_owned())]);
    let (mut api, _) = Api::new(backends, settings, aliases, None);
    let (cache, _) = InfoCache::open(parts, Some(path));
    Arc::get_mut(&mut api.0).unwrap().cache = cache;
    let endpoint = Endpoint::Unix(folder.path().join("api.sock"));
    let server = Server::bind(&endpoint, ServerLimits::default())
        .await
        .unwrap();
    let stop = CancellationToken::new();
    tokio::spawn(server.run(api.clone(), stop.clone()));
    Served {
        states,
        api,
        folder,
        script,
        metrics,
        stop,
    }
}

impl Served {
    pub(super) async fn connect(&self) -> Client {
        let stream = UnixStream::connect(self.folder.path().join("api.sock"))
            .await
            .unwrap();
        let (reader, writer) = stream.into_split();
        Client {
            reader: FrameReader::new(reader, FrameLimits::default()),
            writer,
        }
    }

    pub(super) fn hears(&self, text: &str) {
        let turn = Turn::Give(text.to_owned());
        self.script.transcripts.lock().unwrap().push_back(turn);
    }

    pub(super) fn answers(&self, steps: Vec<Step>) {
        self.script
            .chats
            .lock()
            .unwrap()
            .push_back(Turn::Give(steps));
    }

    /// Returns the LLM's last prompt, without roles.
    pub(super) fn asked(&self) -> Vec<String> {
        let asked = self.script.asked.lock().unwrap();
        let messages = asked.last().unwrap().prompt.messages();
        messages
            .iter()
            .map(|message: &ChatMessage| message.content.clone())
            .collect()
    }
}

pub(super) struct Client {
    pub(super) reader: FrameReader<OwnedReadHalf>,
    pub(super) writer: OwnedWriteHalf,
}

impl Client {
    pub(super) async fn say(&mut self, event: Event) {
        write_frame(&mut self.writer, &event.into_frame())
            .await
            .unwrap();
    }

    pub(super) async fn next(&mut self) -> Option<Frame> {
        timeout(PATIENCE, self.reader.next())
            .await
            .expect("no answer")
            .unwrap()
    }

    /// Returns everything up to an event of this kind.
    pub(super) async fn until(&mut self, kind: &str) -> Vec<Frame> {
        let mut frames = Vec::new();
        loop {
            let frame = self
                .next()
                .await
                .unwrap_or_else(|| panic!("closed after {frames:?}"));
            let found = frame.kind == kind;
            frames.push(frame);
            if found {
                return frames;
            }
        }
    }

    /// Returns text and code of the next error, after which the connection is closed.
    pub(super) async fn refusal(&mut self) -> (String, String) {
        let error = self.until("error").await.pop().unwrap();
        assert!(self.next().await.is_none(), "it is not closed");
        let word = |key: &str| error.data[key].as_str().unwrap().to_owned();
        (word("code"), word("text"))
    }

    pub(super) async fn utter(&mut self, samples: usize) {
        let format = AudioFormat::mono_16_bit(16_000);
        self.say(audio_start(format)).await;
        for size in [4096; 64].iter().scan(samples, |left, &most| {
            let size = most.min(*left);
            *left -= size;
            (size > 0).then_some(size)
        }) {
            self.say(chunk(format, vec![0; 2 * size])).await;
        }
        self.say(Event::AudioStop(AudioStop::default())).await;
    }
}

pub(super) fn audio_start(format: AudioFormat) -> Event {
    Event::AudioStart(AudioStart {
        format,
        timestamp: None,
    })
}

pub(super) fn chunk(format: AudioFormat, audio: Vec<u8>) -> Event {
    Event::AudioChunk(AudioChunk {
        format,
        timestamp: None,
        audio,
    })
}

pub(super) fn asks(text: &str, conversation: Option<&str>) -> Event {
    Event::Transcript(Written {
        text: text.to_owned(),
        language: None,
        context: conversation.map(|id| json!({"conversation_id": id}).as_object().unwrap().clone()),
    })
}

pub(super) fn pipeline(start: &str, end: &str) -> Event {
    Event::RunPipeline(RunPipeline {
        start_stage: start.to_owned(),
        end_stage: end.to_owned(),
    })
}

pub(super) fn kinds(frames: &[Frame]) -> Vec<&str> {
    let mut kinds: Vec<&str> = frames.iter().map(|frame| frame.kind.as_str()).collect();
    kinds.dedup();
    kinds
}

pub(super) fn starting() -> Refusal {
    Refusal::Starting {
        act: "transcribe speech".to_owned(),
        who: "worker `asr`".to_owned(),
        state: "starting".to_owned(),
        retry_after: Duration::from_millis(500),
    }
}

pub(super) fn shed() -> Refusal {
    Refusal::KvCapacityShed {
        model: "demo".to_owned(),
        prompt: Tokens::new(900),
        capacity: Tokens::new(512),
        limit: Tokens::new(4096),
        retry_after: Duration::from_secs(1),
    }
}

// ---- clients ----
