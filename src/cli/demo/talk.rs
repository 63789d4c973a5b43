//! Continuous requests to the LLM, with comparison of the answers.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use tonic::transport::Channel;

use cotenant_rpc::v1::{
    ChatMessage, ChatRole, Conversation, GenerateRequest, SamplingOptions, generate_request::Input,
    generate_response::Message, llm_service_client::LlmServiceClient,
};
use cotenant_units::lock::locked;

/// Results of the conversation.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Number of completed stories.
    pub stories: u64,
    /// Their tokens.
    pub tokens: u64,
    /// Number of stories that differ from the first one.
    pub different: u64,
    /// Stories that broke off or were refused.
    pub failures: Vec<String>,
    /// First answer to each prompt.
    reported: BTreeMap<usize, String>,
}

/// Phase of the LLM in the current request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// It reads the prompt.
    Prompt,
    /// It writes the answer.
    Answer,
}

/// Task that keeps the LLM generating.
pub struct Talk {
    outcome: Arc<Mutex<Outcome>>,
    enough: Arc<AtomicBool>,
    pieces: Pieces,
    phase: Phases,
    task: tokio::task::JoinHandle<()>,
}

/// Times of the last pieces, which are one token each with the demo model's vocabulary.
type Pieces = Arc<Mutex<VecDeque<Instant>>>;

/// Current phase, and its start.
type Phases = Arc<Mutex<Option<(Phase, Instant)>>>;

/// Age beyond which pieces do not count for the present rate.
const RATE_WINDOW: Duration = Duration::from_millis(1500);

impl Talk {
    /// Repeats a request until stopped.
    pub fn start(client: LlmServiceClient<Channel>, prompt: &str, began: Instant) -> Self {
        Self::start_with(client, vec![prompt.to_owned()], TOKENS, began)
    }

    /// Repeats requests for answers of at most this many tokens until stopped.
    pub fn start_with(
        client: LlmServiceClient<Channel>,
        prompts: Vec<String>,
        tokens: u32,
        began: Instant,
    ) -> Self {
        let outcome = Arc::new(Mutex::new(Outcome::default()));
        let enough = Arc::new(AtomicBool::new(false));
        let pieces = Pieces::default();
        let phase = Phases::default();
        let words = Words {
            prompts,
            tokens,
            pieces: Arc::clone(&pieces),
            phase: Arc::clone(&phase),
        };
        let task = tokio::spawn(talk(
            client,
            words,
            began,
            Arc::clone(&outcome),
            Arc::clone(&enough),
        ));
        Self {
            outcome,
            enough,
            pieces,
            phase,
            task,
        }
    }

    /// Returns the LLM's phase in the current request, and its start.
    pub fn phase(&self) -> Option<(Phase, Instant)> {
        *locked(&self.phase)
    }

    /// Waits until this many stories are completed.
    pub async fn stories(&self, count: u64, limit: Duration) -> bool {
        let end = Instant::now() + limit;
        while Instant::now() < end {
            if self.outcome().stories >= count {
                return true;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        false
    }

    /// Returns the recent rate in tokens per second.
    pub fn rate(&self) -> f64 {
        let pieces = locked(&self.pieces);
        let recent = pieces
            .iter()
            .filter(|at| at.elapsed() < RATE_WINDOW)
            .count();
        // Initially, the window is shorter.
        let span = pieces
            .front()
            .map_or(RATE_WINDOW, |first| first.elapsed().min(RATE_WINDOW));
        u32::try_from(recent).map_or(0.0, f64::from) / span.as_secs_f64().max(f64::EPSILON)
    }

    /// Returns the results so far.
    pub fn outcome(&self) -> Outcome {
        locked(&self.outcome).clone()
    }

    /// Stops after the current story.
    pub async fn stop(self) -> Outcome {
        self.enough.store(true, Ordering::Relaxed);
        let _ = self.task.await;
        locked(&self.outcome).clone()
    }
}

/// Tokens of a story (our choice: some seconds of generation).
const TOKENS: u32 = 256;

/// Prompts, and counters of their answers.
struct Words {
    prompts: Vec<String>,
    tokens: u32,
    pieces: Pieces,
    phase: Phases,
}

impl Words {
    fn begin(&self, phase: Phase) {
        let mut now = locked(&self.phase);
        if now.is_none_or(|(last, _)| last != phase) {
            *now = Some((phase, Instant::now()));
        }
    }

    fn count(&self) {
        let now = Instant::now();
        let mut pieces = locked(&self.pieces);
        pieces.push_back(now);
        while pieces
            .front()
            .is_some_and(|at| now.duration_since(*at) > RATE_WINDOW)
        {
            pieces.pop_front();
        }
    }
}

async fn talk(
    mut client: LlmServiceClient<Channel>,
    words: Words,
    began: Instant,
    outcome: Arc<Mutex<Outcome>>,
    enough: Arc<AtomicBool>,
) {
    for which in (0..words.prompts.len()).cycle() {
        if enough.load(Ordering::Relaxed) {
            return;
        }
        let reported = story(&mut client, &words, which).await;
        let mut outcome = locked(&outcome);
        match reported {
            Ok((text, tokens)) => {
                outcome.stories += 1;
                outcome.tokens += u64::from(tokens);
                let first = outcome
                    .reported
                    .entry(which)
                    .or_insert_with(|| text.clone());
                outcome.different += u64::from(*first != text);
            }
            Err(problem) => {
                let at = began.elapsed().as_secs_f64();
                outcome.failures.push(format!("{at:.1} s: {problem}"));
                if outcome.failures.len() > 20 {
                    return;
                }
            }
        }
    }
}

async fn story(
    client: &mut LlmServiceClient<Channel>,
    words: &Words,
    which: usize,
) -> Result<(String, u32), String> {
    words.begin(Phase::Prompt);
    let request = GenerateRequest {
        input: Some(Input::Conversation(Conversation {
            messages: vec![ChatMessage {
                role: ChatRole::User.into(),
                content: words.prompts.get(which).cloned().unwrap_or_default(),
            }],
        })),
        sampling: Some(SamplingOptions {
            temperature: Some(0.0),
            ..SamplingOptions::default()
        }),
        max_tokens: Some(words.tokens),
        stop: Vec::new(),
        context_shift: None,
    };
    let status = |status: tonic::Status| format!("{}: {}", status.code(), status.message());
    let mut stream = client.generate(request).await.map_err(status)?.into_inner();
    let mut text = String::new();
    while let Some(response) = stream.message().await.map_err(status)? {
        match response.message {
            Some(Message::Delta(delta)) => {
                words.begin(Phase::Answer);
                words.count();
                text.push_str(&delta.text);
            }
            Some(Message::Finished(finished)) => {
                let tokens = finished.usage.map_or(0, |usage| usage.completion_tokens);
                return Ok((text, tokens));
            }
            Some(Message::Started(_)) | None => {}
        }
    }
    Err("the stream ended in mid-answer".to_owned())
}
