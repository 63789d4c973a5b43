//! `cotenant bench voice`: time from the end of an utterance to the answer.
//!
//! With real engines: flite speaks the commands, pocketsphinx recognises them, the demo model answers, flite speaks the
//! answer. Each command is first measured alone; with the neighbour, the answers must be the same.
//!
//! With `--clients`, several speakers take turns on one LLM. They send text, since over Wyoming only text carries the
//! name of a conversation, and interrupt each answer at its first audio.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use serde_json::{Map, Value, json};

use super::{daemon, load, report::milliseconds};
use crate::{
    Output, demo,
    output::{self, Column, Table},
    quantity,
    stage::{Process, Stage, places},
    talk::{Pace, Spoken, request_pipeline, utter},
};
use cotenant_rpc::v1::{
    GetStatusRequest, GetStatusResponse, operator_service_client::OperatorServiceClient,
};
use cotenant_speech::{
    audio::MonoAudio,
    client::{ClientError, ClientTimeouts, Endpoint, Exchange, WyomingClient},
    wyoming::{
        Event,
        event::{Ping, Transcript},
    },
};
use cotenant_threads::blocking;
use cotenant_units::{Bytes, causes::in_one_line};

/// Settings of the benchmark.
#[derive(Clone, Debug, clap::Args)]
pub struct VoiceArgs {
    /// Utterances in each of the two parts; with `--clients`, changes of speaker.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: u32,
    /// Send audio in real time, with 500 ms of silence at its end, as clients with end-of-speech detection do.
    #[arg(long)]
    pub live: bool,
    /// Number of speakers that alternate, two turns each, in separate conversations: a speaker is `cold` at first,
    /// `switched` after others have spoken, and `warm` in the second turn.
    #[arg(long, value_name = "N", conflicts_with = "live", value_parser = clap::value_parser!(u32).range(1..=16))]
    pub clients: Option<u32>,
    /// GGUF model instead of the demo model. Its answers are not compared.
    #[arg(long, value_name = "FILE")]
    pub model: Option<PathBuf>,
    /// Memory that the neighbour allocates.
    #[arg(long, value_name = "BYTES", default_value = "160MiB", value_parser = quantity::some)]
    pub neighbour: Bytes,
}

/// Sentences of the grammar in the stage.
const COMMANDS: [&str; 6] = [
    "turn on the kitchen light",
    "turn off the bedroom lamp",
    "lock the front door",
    "stop the music",
    "set a timer for ten minutes",
    "good night",
];

/// Total memory of the session, and its reserve: as in the demonstration. Another model adds one and a half times its
/// file size, for its context.
const TOTAL: Bytes = Bytes::from_mib(300);
const RESERVE: Bytes = Bytes::from_mib(56);

/// Time for which the neighbour holds its memory, without a lease.
const NEIGHBOUR_STAYS: Duration = Duration::from_secs(2);

/// Time between two neighbours, in which the engine regrows.
const NEIGHBOUR_GONE: Duration = Duration::from_secs(2);

/// Silence before the end of a live utterance: the default of OpenAI's turn detection.
const SILENCE: Duration = Duration::from_millis(500);

/// Pause between two `describe` requests.
const DESCRIBE_EVERY: Duration = Duration::from_millis(20);

/// Time limit of one step.
const PATIENCE: Duration = Duration::from_secs(30);

/// Measured stages of a turn: names in the table and in JSON.
const STAGES: [(&str, &str); 4] = [
    ("transcript", "heardMs"),
    ("first text", "firstTextMs"),
    ("first sound", "firstAudioMs"),
    DESCRIBED,
];
const DESCRIBED: (&str, &str) = ("`describe`, meanwhile", "describeMs");

/// Measured stages with several speakers.
const TURNS: [(&str, &str); 7] = [
    ("cold: first token", "coldFirstTokenMs"),
    ("cold: first sound", "coldFirstAudioMs"),
    ("switched: first token", "switchedFirstTokenMs"),
    ("switched: first sound", "switchedFirstAudioMs"),
    ("warm: first token", "warmFirstTokenMs"),
    ("warm: first sound", "warmFirstAudioMs"),
    DESCRIBED,
];

/// Times of each stage in one part, finally ascending.
type Part<const N: usize> = [Vec<Duration>; N];

/// Runs the benchmark and prints its figures.
///
/// # Errors
/// If the daemon or a worker does not start, a request fails, or an answer differs.
pub(super) async fn run(args: &VoiceArgs, format: Output) -> Result<(), String> {
    let reading = load::Reading::now();
    let model = args.model.as_ref().map(std::path::absolute).transpose();
    let model = model.map_err(|error| error.to_string())?;
    let stage = Stage::set(|folder| configuration(folder, model.as_deref()))
        .map_err(|error| error.to_string())?;
    let problem = daemon::last_words(&stage);
    let mut operator = OperatorServiceClient::new(daemon::connected(&stage, PATIENCE).await?);
    daemon::until(&mut operator, PATIENCE, ready)
        .await
        .map_err(&problem)?;
    let socket = stage.socket().with_file_name("wyoming.sock");
    let client = WyomingClient::new(Endpoint::Unix(socket), ClientTimeouts::default());
    if let Some(clients) = args.clients {
        let mut number = 0;
        let part = async || {
            number += 1;
            turns(&client, clients, args.rounds, number).await
        };
        let (parts, sheds) = both(&mut operator, &client, args.neighbour, part)
            .await
            .map_err(&problem)?;
        let rounds = args.rounds;
        let what = format!("{clients} speakers, {rounds} changes each; {sheds} sheds meanwhile");
        let document = json!({
            "clients": clients, "rounds": rounds, "alone": null, "besideNeighbour": null, "sheds": sheds,
        });
        return print(format, TURNS, &parts, &what, document, &reading);
    }
    let recordings = recordings(&client).await.map_err(&problem)?;
    let mut exchange = client
        .open()
        .await
        .map_err(|error| problem(in_one_line(&error)))?;
    request_pipeline(&mut exchange, "asr")
        .await
        .map_err(|error| problem(in_one_line(&error)))?;

    let mut said = BTreeMap::new();
    // The first answers touch memory for the first time; they are the reference for later ones.
    for (command, recording) in &recordings {
        let spoken = one(&mut exchange, recording, Pace::AtOnce)
            .await
            .map_err(&problem)?;
        if spoken.heard != *command {
            return Err(problem(format!(
                "`{command}` was heard as `{}`",
                spoken.heard
            )));
        }
        said.insert(*command, spoken.answer);
    }
    let pace = match args.live {
        true => Pace::Live(SILENCE),
        false => Pace::AtOnce,
    };
    let mut different = Vec::new();
    let part = async || {
        let [mut heard, mut text, mut audio, described] = Part::default();
        for (command, recording) in recordings.iter().cycle().take(as_len(args.rounds)) {
            let spoken = one(&mut exchange, recording, pace).await?;
            // other models sample their tokens
            let same = model.is_some() || said.get(command) == Some(&spoken.answer);
            if spoken.heard != *command || !same {
                different.push(format!(
                    "{command}: heard `{}`, answered `{}`",
                    spoken.heard, spoken.answer
                ));
            }
            heard.push(spoken.heard_after);
            text.extend(spoken.first_text_after);
            audio.extend(spoken.first_audio_after);
        }
        Ok([heard, text, audio, described])
    };
    let (parts, sheds) = both(&mut operator, &client, args.neighbour, part)
        .await
        .map_err(&problem)?;
    let (rounds, wrong) = (args.rounds, different.len());
    let compared = if model.is_some() { 0 } else { 2 * rounds };
    let what = format!(
        "{rounds} utterances each; {sheds} sheds meanwhile; {compared} answers compared, {wrong} different"
    );
    let document = json!({
        "rounds": rounds, "alone": null, "besideNeighbour": null, "sheds": sheds,
        "answersCompared": compared, "answersDifferent": wrong,
    });
    print(format, STAGES, &parts, &what, document, &reading)?;
    if !different.is_empty() {
        return Err(format!("answers differ: {different:?}"));
    }
    Ok(())
}

async fn one(exchange: &mut Exchange, recording: &MonoAudio, pace: Pace) -> Result<Spoken, String> {
    let spoken = utter(exchange, recording, pace)
        .await
        .map_err(|error| in_one_line(&error))?;
    match spoken.first_audio_after {
        Some(_) => Ok(spoken),
        None => Err(format!(
            "`{}` was not answered aloud: `{}`",
            spoken.heard, spoken.answer
        )),
    }
}

/// Synthesises the commands as 16 kHz recordings.
async fn recordings(client: &WyomingClient) -> Result<Vec<(&'static str, MonoAudio)>, String> {
    let mut recordings = Vec::new();
    for command in COMMANDS {
        let speech = client
            .synthesize(command, None)
            .await
            .map_err(|error| in_one_line(&error))?;
        let audio = speech
            .collect(PATIENCE)
            .await
            .map_err(|error| in_one_line(&error))?;
        let audio = audio.resampled(cotenant_speech::audio::ASR_RATE_HZ);
        recordings.push((command, audio.map_err(|error| in_one_line(&error))?));
    }
    Ok(recordings)
}

/// Measures the same alone and with neighbours; returns the times of both, and the sheds of the latter.
async fn both<const N: usize>(
    operator: &mut Operator,
    client: &WyomingClient,
    neighbour: Bytes,
    mut part: impl AsyncFnMut() -> Result<Part<N>, String>,
) -> Result<([Part<N>; 2], u64), String> {
    let alone = describing(client, part()).await?;
    let before = sheds(&status(operator).await?);
    let squeezed = async {
        daemon::until(operator, PATIENCE, |status| sheds(status) > before).await?;
        describing(client, part()).await
    };
    let beside = tokio::select! {
        part = squeezed => part?,
        failed = neighbours(neighbour) => return Err(failed),
    };
    let after = sheds(&status(operator).await?);
    Ok(([alone, beside], after.saturating_sub(before)))
}

/// Measures speakers in separate conversations, each with two turns before the next one.
async fn turns(
    client: &WyomingClient,
    clients: u32,
    changes: u32,
    part: u32,
) -> Result<Part<7>, String> {
    let mut speakers = Vec::new();
    for number in 1..=clients {
        let mut exchange = client.open().await.map_err(|error| in_one_line(&error))?;
        request_pipeline(&mut exchange, "handle")
            .await
            .map_err(|error| in_one_line(&error))?;
        speakers.push((format!("speaker {number} in part {part}"), exchange));
    }
    let [mut cold, mut switched, mut warm] = [(); 3].map(|()| (Vec::new(), Vec::new()));
    let mut commands = COMMANDS.iter().cycle();
    for change in 0..changes {
        let Some((name, exchange)) = speakers.get_mut(as_len(change % clients)) else {
            break;
        };
        let first = match change {
            new if new < clients => &mut cold,
            _ if clients > 1 => &mut switched,
            _ => &mut warm,
        };
        let (token, sound) = turn(exchange, name, commands.next()).await?;
        first.0.push(token);
        first.1.push(sound);
        let (token, sound) = turn(exchange, name, commands.next()).await?;
        warm.0.push(token);
        warm.1.push(sound);
    }
    let [(a, b), (c, d), (e, f)] = [cold, switched, warm];
    Ok([a, b, c, d, e, f, Vec::new()])
}

/// Runs a turn in the conversation of this name, and interrupts its answer; returns the times to its first token and
/// first audio.
async fn turn(
    exchange: &mut Exchange,
    name: &str,
    command: Option<&&str>,
) -> Result<(Duration, Duration), String> {
    let failed = |error: ClientError| in_one_line(&error);
    let said = Transcript {
        text: format!("{name}: {}", command.unwrap_or(&"")),
        language: None,
        context: Some(Map::from_iter([(
            "conversation_id".to_owned(),
            json!(name),
        )])),
    };
    let began = Instant::now();
    let mut token = None;
    exchange
        .send(Event::Transcript(said))
        .await
        .map_err(failed)?;
    let sound = loop {
        match exchange.receive().await.map_err(failed)? {
            Event::HandledChunk(_) => {
                token.get_or_insert_with(|| began.elapsed());
            }
            Event::AudioChunk(_) => break began.elapsed(),
            Event::NotHandled(reason) => return Err(reason.text.unwrap_or_default()),
            Event::AudioStop(_) => return Err(format!("`{name}` was not answered aloud")),
            _ => {}
        }
    };
    // the next turn starts when this one has ended completely
    request_pipeline(exchange, "handle").await.map_err(failed)?;
    exchange
        .send(Event::Ping(Ping::default()))
        .await
        .map_err(failed)?;
    while !matches!(exchange.receive().await.map_err(failed)?, Event::Pong(_)) {}
    Ok((token.unwrap_or(sound), sound))
}

/// Sends `describe` repeatedly, each time on a new connection, while `part` runs.
async fn describing<const N: usize>(
    client: &WyomingClient,
    part: impl Future<Output = Result<Part<N>, String>>,
) -> Result<Part<N>, String> {
    let mut described = Vec::new();
    let asking = async {
        loop {
            let began = Instant::now();
            if let Err(error) = client.describe().await {
                return in_one_line(&error);
            }
            described.push(began.elapsed());
            tokio::time::sleep(DESCRIBE_EVERY).await;
        }
    };
    let mut part = tokio::select! {
        part = part => part?,
        failed = asking => return Err(failed),
    };
    if let Some(last) = part.last_mut() {
        *last = described;
    }
    part.iter_mut().for_each(|times| times.sort_unstable());
    Ok(part)
}

/// Starts and ends neighbours until dropped; returns only if none can be started.
async fn neighbours(bytes: Bytes) -> String {
    loop {
        // The rate equals the size, so it takes one second.
        let neighbour = match Process::ballast(bytes, bytes) {
            Ok(neighbour) => neighbour,
            Err(error) => return format!("cannot start a neighbour: {error}"),
        };
        tokio::time::sleep(Duration::from_secs(1) + NEIGHBOUR_STAYS).await;
        // It ends at once; waiting for it would delay the measurement.
        let ended = blocking(move || drop(neighbour)).await;
        if let Err(error) = ended {
            return error.to_string();
        }
        tokio::time::sleep(NEIGHBOUR_GONE).await;
    }
}

fn print<const N: usize>(
    format: Output,
    rows: [(&str, &str); N],
    [alone, beside]: &[Part<N>; 2],
    what: &str,
    mut document: Value,
    reading: &load::Reading,
) -> Result<(), String> {
    let foreign = reading.foreign_percent();
    if format != Output::Table {
        let part = |part: &Part<N>| -> Map<String, Value> {
            let keys = rows.iter().map(|(_, key)| (*key).to_owned());
            keys.zip(part.iter().map(|times| spread(times))).collect()
        };
        if let Some(document) = document.as_object_mut() {
            document.insert("alone".to_owned(), part(alone).into());
            document.insert("besideNeighbour".to_owned(), part(beside).into());
            document.insert("foreignPercent".to_owned(), json!(foreign));
        }
        return output::write_json(format, &document)
            .map_err(|_| "the output is closed".to_owned());
    }
    let mut table = Table::new([
        Column::Text("FROM THE END OF THE UTTERANCE"),
        Column::Figure("ALONE P50"),
        Column::Figure("P99"),
        Column::Figure("BESIDE A NEIGHBOUR P50"),
        Column::Figure("P99"),
    ]);
    for (((what, _), alone), beside) in rows.into_iter().zip(alone).zip(beside) {
        let cell = |times: &[Duration], per_mille| match times {
            [] => "-".to_owned(),
            times => format!("{:.1} ms", milliseconds(times, per_mille)),
        };
        table.row([
            what.to_owned(),
            cell(alone, 500),
            cell(alone, 990),
            cell(beside, 500),
            cell(beside, 990),
        ]);
    }
    let foreign = foreign.map_or_else(|| "unknown".to_owned(), |percent| format!("{percent:.0} %"));
    let text = format!(
        "{}{what}; others used {foreign} of the processors\n",
        table.render()
    );
    output::write(&text).map_err(|_| "the output is closed".to_owned())
}

fn as_len(count: u32) -> usize {
    usize::try_from(count).unwrap_or(usize::MAX)
}

fn spread(times: &[Duration]) -> Value {
    let at = |per_mille| milliseconds(times, per_mille);
    json!({"p50": at(500), "p99": at(990), "max": at(1000)})
}

type Operator = OperatorServiceClient<tonic::transport::Channel>;

async fn status(operator: &mut Operator) -> Result<GetStatusResponse, String> {
    let status = operator.get_status(GetStatusRequest {}).await;
    Ok(status
        .map_err(|status| status.message().to_owned())?
        .into_inner())
}

fn sheds(status: &GetStatusResponse) -> u64 {
    status.engine.as_ref().map_or(0, |engine| engine.sheds)
}

fn ready(status: &GetStatusResponse) -> bool {
    demo::ready(status)
        && status
            .engine
            .as_ref()
            .is_some_and(|engine| !engine.changing)
}

fn configuration(folder: &Path, model: Option<&Path>) -> String {
    let (places, folder) = (places(folder), folder.display());
    let (llm, total) = match model {
        None => (
            format!("path: {folder}/demo.gguf, name: demo, threads: 1, context: 65536"),
            TOTAL,
        ),
        Some(model) => (
            format!(
                "path: {}, name: model, context: 8192",
                json!(model.to_string_lossy())
            ),
            TOTAL.saturating_add(Bytes::new(
                fs::metadata(model).map_or(0, |file| file.len() / 2 * 3),
            )),
        ),
    };
    format!(
        "\
budget:
  total: {total}MiB
  reserve: {reserve}MiB
  scope: session
  dwell: 500ms
  sample_max: 100ms
  fill_rate_max: 400MiB
shedding: {{reclaim_min: {reclaim}MiB}}
llm: {{{llm}, kv_floor: 512, mode: balanced}}
workers:
  - name: tts
    role: tts
    argv: [\"${{SELF}}\", worker, tts, --socket, \"${{SOCKET}}\"]
    memory: {{steady: 10MiB, peak: 16MiB}}
  - name: asr
    role: asr
    argv: [\"${{SELF}}\", worker, asr, --socket, \"${{SOCKET}}\", --vocabulary, grammar, --grammar, {folder}/home.gram]
    memory: {{steady: 40MiB, peak: 48MiB}}
http: {{listen: none}}
wyoming: {{listen: [\"unix://{folder}/wyoming.sock\"]}}
{places}",
        total = total.whole_mib(),
        // above the hysteresis, a part of the total
        reclaim = (total.whole_mib() / 32).max(16),
        reserve = RESERVE.whole_mib(),
    )
}
