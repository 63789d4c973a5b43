//! `developer speakers`: several speakers on one model.
//!
//! It measures the time to the first token for a speaker who has just spoken, and for one after seven others; the
//! throughput of concurrent answers, compared with one answer alone; the time to the next token while a long prompt of
//! another speaker is computed; and the time to a call whose form leaves little choice.

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use cotenant::{
    cli::{
        bench::{
            daemon,
            load::Reading,
            report::{Limit, Report, median},
        },
        stage::Stage,
    },
    rpc::v1::{
        ChatMessage, ChatRole, Conversation, EngineState, GenerateRequest, SamplingOptions,
        generate_request::Input, generate_response::Message, llm_service_client::LlmServiceClient,
        operator_service_client::OperatorServiceClient,
    },
};
use serde_json::{Value, json};
use tonic::transport::Channel;

use crate::{bodies::exchange, soak::free_port};

/// Settings of the measurement.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct SpeakersArgs {
    /// The model, of at least 8192 tokens of context.
    #[arg(long)]
    pub model: PathBuf,
    /// Threads that compute.
    #[arg(long, default_value_t = 2)]
    pub threads: u32,
    /// KV capacity, in tokens.
    #[arg(long, default_value_t = 8192)]
    pub context: u32,
    /// Turns of each speaker.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(2..))]
    pub turns: u32,
    /// Texts shorter by this factor: a model of random weights has a token for nearly each letter.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=24))]
    pub shorter: u16,
    /// Answers at once.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(2..=8))]
    pub answers: u32,
}

pub(crate) async fn run(args: &SpeakersArgs) -> Result<Report, String> {
    let model = std::path::absolute(&args.model).map_err(|error| error.to_string())?;
    let port = free_port().map_err(|error| error.to_string())?;
    let stage = Stage::set(|folder| configuration(folder, &model, port, args))
        .map_err(|error| error.to_string())?;
    let channel = daemon::connected(&stage, PATIENCE).await?;
    let mut operator = OperatorServiceClient::new(channel.clone());
    daemon::until(&mut operator, PATIENCE, |status| {
        status
            .engine
            .as_ref()
            .is_some_and(|engine| engine.state() == EngineState::Ready && !engine.changing)
    })
    .await
    .map_err(daemon::last_words(&stage))?;
    let reading = Reading::now();
    let setting = format!("{}, {} threads", args.model.display(), args.threads);
    let mut report = Report::new("speakers", setting);
    turns(args, &channel, &mut report).await?;
    together(args, &channel, &mut report).await?;
    long_prompt(args, &channel, &mut report).await?;
    forced_call(port, &mut report).await?;
    report.others(&reading);
    Ok(report)
}

/// Measures speakers who take turns repeatedly.
async fn turns(args: &SpeakersArgs, channel: &Channel, report: &mut Report) -> Result<(), String> {
    let mut house: Vec<Vec<ChatMessage>> = (0..SPEAKERS).map(|_| vec![system(args)]).collect();
    let (mut cold, mut switched, mut warm) = (Vec::new(), Vec::new(), Vec::new());
    for turn in 0..args.turns {
        for (number, talk) in house.iter_mut().enumerate() {
            let first = ask_on(channel, talk, number, turn).await?;
            match (turn, number) {
                (0, 0) => cold.push(first),
                (0, _) => {}
                _ => switched.push(first),
            }
        }
    }
    let talk = house.first_mut().ok_or("there are no speakers")?;
    for turn in 0..args.turns + 1 {
        let first = ask_on(channel, talk, 0, args.turns + turn).await?;
        // The first one speaks after the others.
        if turn > 0 {
            warm.push(first);
        }
    }
    let [cold, switched, warm] = [cold, switched, warm].map(|all| median(&all).unwrap_or_default());
    report.figure("first token, cold", "ms", cold, None);
    report.figure("first token, warm", "ms", warm, None);
    report.figure(
        "first token after seven others have spoken",
        "ms",
        switched,
        None,
    );
    report.figure(
        "that over warm",
        "",
        switched / warm,
        Some(Limit::AtMost(1.3)),
    );
    Ok(())
}

/// Measures answers one by one, and then concurrently.
async fn together(
    args: &SpeakersArgs,
    channel: &Channel,
    report: &mut Report,
) -> Result<(), String> {
    let asked: Vec<Vec<ChatMessage>> = (0..args.answers as usize)
        .map(|number| vec![system(args), user(&question(number, 100))])
        .collect();
    let mut alone = Vec::new();
    for talk in &asked {
        // First fill the cache with the prompt, then measure.
        generate(channel.clone(), talk.clone(), ANSWER).await?;
        alone.push(generate(channel.clone(), talk.clone(), ANSWER).await?);
    }
    let began = Instant::now();
    let running: Vec<_> = asked
        .iter()
        .map(|talk| tokio::spawn(generate(channel.clone(), talk.clone(), ANSWER)))
        .collect();
    let mut all = Vec::new();
    for answer in running {
        all.push(answer.await.map_err(|error| error.to_string())??);
    }
    let took = began.elapsed().as_secs_f64();
    let different = alone
        .iter()
        .zip(&all)
        .filter(|(alone, one)| alone.text != one.text);
    let tokens =
        |answers: &[Answer]| -> f64 { answers.iter().map(|one| f64::from(one.tokens)).sum() };
    let seconds: f64 = alone.iter().map(|one| one.took.as_secs_f64()).sum();
    let (one, several) = (tokens(&alone) / seconds, tokens(&all) / took);
    let gap = |answers: &[Answer]| {
        let gaps: Vec<f64> = answers
            .iter()
            .flat_map(|one| one.gaps.iter().copied())
            .collect();
        median(&gaps).unwrap_or_default()
    };
    report.figure("tokens/s of one answer", "", one, None);
    report.figure(
        format!("tokens/s of {} at once", args.answers),
        "",
        several,
        None,
    );
    report.figure(
        "that over one",
        "",
        several / one,
        Some(Limit::AtLeast(2.5)),
    );
    let slower = gap(&all) / gap(&alone);
    // Answers may end at different lengths, and begin one after the other.
    report.figure(
        "tokens/s while all are written, over one",
        "",
        f64::from(args.answers) / slower,
        None,
    );
    report.figure(
        "time between two tokens, over that of one",
        "",
        slower,
        Some(Limit::AtMost(1.5)),
    );
    let different = f64::from(u32::try_from(different.count()).unwrap_or(u32::MAX));
    report.figure(
        "answers that are not those of each alone",
        "",
        different,
        Some(Limit::AtMost(0.0)),
    );
    Ok(())
}

/// Measures a long prompt that arrives while an answer is generated.
async fn long_prompt(
    args: &SpeakersArgs,
    channel: &Channel,
    report: &mut Report,
) -> Result<(), String> {
    let talk = vec![system(args), user(&question(50, 1000))];
    let most = |answer: &Answer| answer.gaps.iter().copied().fold(0.0, f64::max);
    let usual = |answer: &Answer| median(&answer.gaps).unwrap_or_default();
    let alone = generate(channel.clone(), talk.clone(), LONG_ANSWER).await?;
    let writes = tokio::spawn(generate(channel.clone(), talk, LONG_ANSWER));
    tokio::time::sleep(Duration::from_millis(300)).await;
    let long = vec![user(&format!(
        "{} Shortly.",
        "The lamp in the hall is on, and the window is shut. "
            .repeat(LONG_PROMPT / usize::from(args.shorter))
    ))];
    let read = generate(channel.clone(), long, 4).await?;
    let written = writes.await.map_err(|error| error.to_string())??;
    report.figure(
        "tokens of a prompt that comes meanwhile",
        "",
        f64::from(read.prompt),
        None,
    );
    report.figure(
        "time to its first token",
        "ms",
        read.first.as_secs_f64() * 1e3,
        None,
    );
    report.figure(
        "greatest time between two tokens, over the usual",
        "",
        most(&written) / usual(&written),
        Some(Limit::AtMost(2.0)),
    );
    report.figure(
        "the same without a prompt that comes",
        "",
        most(&alone) / usual(&alone),
        None,
    );
    Ok(())
}

/// Measures a call with four parameters, and a text of as many tokens.
async fn forced_call(port: u16, report: &mut Report) -> Result<(), String> {
    let one_of = |values: [&str; 3]| json!({"enum": values});
    let call = json!({
        "model": "speakers",
        "temperature": 0,
        "messages": [{"role": "user", "content": "Turn on the light in the kitchen at 80 percent, warm."}],
        "tools": [{"type": "function", "function": {"name": "set_light_in_room", "parameters": {
            "type": "object",
            "properties": {
                "room_name": one_of(["kitchen", "hall", "bedroom"]),
                "brightness_percent": {"type": "integer", "minimum": 0, "maximum": 100},
                "color_temperature": one_of(["warm_white", "cold_white", "daylight"]),
                "turn_on_immediately": {"type": "boolean"},
            },
            "required": ["room_name", "brightness_percent", "color_temperature", "turn_on_immediately"],
            "additionalProperties": false,
        }}}],
        "tool_choice": {"type": "function", "function": {"name": "set_light_in_room"}},
    });
    let (call_takes, tokens) = timed(port, &call).await?;
    let text = json!({
        "model": "speakers",
        "temperature": 0,
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "max_tokens": tokens,
    });
    let (text_takes, told) = timed(port, &text).await?;
    let (call_takes, text_takes) = (call_takes / tokens, text_takes / told);
    report.figure("tokens of a call by its form", "", tokens, None);
    report.figure("tokens/s of it", "", 1.0 / call_takes, None);
    report.figure("tokens/s of a text of as many", "", 1.0 / text_takes, None);
    report.figure(
        "the one over the other",
        "",
        text_takes / call_takes,
        Some(Limit::AtLeast(1.5)),
    );
    Ok(())
}

/// Returns seconds and tokens of a chat completion: the median of several, after one that caches the prompt.
async fn timed(port: u16, body: &Value) -> Result<(f64, f64), String> {
    let body = body.to_string();
    let (mut takes, mut tokens) = (Vec::new(), 0.0);
    for turn in 0..CALLS + 1 {
        let began = Instant::now();
        let answer = exchange(port, "/v1/chat/completions", body.as_bytes()).await?;
        let took = began.elapsed().as_secs_f64();
        let answer = String::from_utf8_lossy(&answer);
        let said: Value = answer
            .split_once("\r\n\r\n")
            .and_then(|(_, body)| serde_json::from_str(body).ok())
            .unwrap_or_default();
        tokens = said
            .pointer("/usage/completion_tokens")
            .and_then(Value::as_f64)
            .ok_or_else(|| format!("no completion: {answer}"))?;
        if turn > 0 {
            takes.push(took);
        }
    }
    Ok((median(&takes).unwrap_or_default(), tokens))
}

/// Continues the conversation, including the answer. Returns the time to the first token, in ms.
async fn ask_on(
    channel: &Channel,
    talk: &mut Vec<ChatMessage>,
    number: usize,
    turn: u32,
) -> Result<f64, String> {
    talk.push(user(&question(number, turn)));
    let answer = generate(channel.clone(), talk.clone(), SHORT_ANSWER).await?;
    talk.push(ChatMessage {
        role: ChatRole::Assistant.into(),
        content: answer.text,
    });
    Ok(answer.first.as_secs_f64() * 1e3)
}

struct Answer {
    text: String,
    prompt: u32,
    tokens: u32,
    first: Duration,
    took: Duration,
    /// Times between two pieces, in ms.
    gaps: Vec<f64>,
}

async fn generate(
    channel: Channel,
    messages: Vec<ChatMessage>,
    most: u32,
) -> Result<Answer, String> {
    let asked = GenerateRequest {
        input: Some(Input::Conversation(Conversation { messages })),
        sampling: Some(SamplingOptions {
            temperature: Some(0.0),
            ..SamplingOptions::default()
        }),
        max_tokens: Some(most),
        ..GenerateRequest::default()
    };
    let failed = |status: tonic::Status| format!("{}: {}", status.code(), status.message());
    let began = Instant::now();
    let mut client = LlmServiceClient::new(channel);
    let mut stream = client.generate(asked).await.map_err(failed)?.into_inner();
    let (mut text, mut times) = (String::new(), Vec::new());
    while let Some(response) = stream.message().await.map_err(failed)? {
        match response.message {
            Some(Message::Delta(delta)) => {
                times.push(Instant::now());
                text.push_str(&delta.text);
            }
            Some(Message::Finished(finished)) => {
                let usage = finished.usage.unwrap_or_default();
                let first = times.first().copied().unwrap_or_else(Instant::now);
                let between = |pair: &[Instant]| match pair {
                    [one, next] => next.duration_since(*one).as_secs_f64() * 1e3,
                    _ => 0.0,
                };
                return Ok(Answer {
                    text,
                    prompt: usage.prompt_tokens,
                    tokens: usage.completion_tokens,
                    first: first.duration_since(began),
                    took: began.elapsed(),
                    gaps: times.windows(2).map(between).collect(),
                });
            }
            Some(Message::Started(_)) | None => {}
        }
    }
    Err("the stream ended in mid-answer".to_owned())
}

fn system(args: &SpeakersArgs) -> ChatMessage {
    ChatMessage {
        role: ChatRole::System.into(),
        content: SYSTEM.repeat(SYSTEM_TIMES / usize::from(args.shorter)),
    }
}

fn user(content: &str) -> ChatMessage {
    ChatMessage {
        role: ChatRole::User.into(),
        content: content.to_owned(),
    }
}

fn question(number: usize, turn: u32) -> String {
    let room = ROOMS.get(number % ROOMS.len()).copied().unwrap_or("house");
    format!(
        "This is about the {room}, for time number {turn}: tell me about the things that people do there."
    )
}

/// With room for the states of all speakers. Without drafts, because their hit rate differs between a text and a call, and only a single answer uses them.
fn configuration(folder: &Path, model: &Path, port: u16, args: &SpeakersArgs) -> String {
    let (model, threads, context) = (model.display(), args.threads, args.context);
    let folder = folder.display();
    format!(
        "\
budget: {{total: 8GiB, reserve: 256MiB, scope: session}}
llm: {{path: {model}, name: speakers, threads: {threads}, context: {context}, conversations: {SPEAKERS}, drafts: false}}
grpc: {{socket: {folder}/cotenant.sock, abstract_name: none}}
http: {{listen: \"127.0.0.1:{port}\"}}
journal: {{path: {folder}/journal.ndjson}}
state_dir: {folder}/state
runtime_dir: {folder}
log: {{filter: error, format: text}}
"
    )
}

const SPEAKERS: usize = 8;
const ROOMS: [&str; SPEAKERS] = [
    "kitchen", "hall", "study", "garden", "cellar", "attic", "bedroom", "bathroom",
];
/// Some 600 tokens.
const SYSTEM: &str = "You are the voice of a house with eight rooms. Answer in one or two short sentences, and say what you have done. ";
const SYSTEM_TIMES: usize = 24;
/// Some 4000 tokens.
const LONG_PROMPT: usize = 290;
const SHORT_ANSWER: u32 = 24;
const ANSWER: u32 = 128;
const LONG_ANSWER: u32 = 1024;
const CALLS: u32 = 7;
const PATIENCE: Duration = Duration::from_secs(120);
