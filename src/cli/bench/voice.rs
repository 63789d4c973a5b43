//! `cotenant bench voice`: time from the end of an utterance to the answer.
//!
//! Real engines: flite speaks the commands, pocketsphinx recognises them, the demo model answers, flite speaks the
//! answer. Each command is asked alone first; beside the neighbour the words must be the same.

use std::{
    collections::BTreeMap,
    path::Path,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use super::{daemon, load, report::milliseconds};
use crate::{
    Output, demo,
    output::{self, Column, Table},
    stage::{Process, Stage, places},
    talk::{Pace, Spoken, request_pipeline, utter},
};
use cotenant_rpc::v1::{
    GetStatusRequest, GetStatusResponse, operator_service_client::OperatorServiceClient,
};
use cotenant_speech::{
    audio::MonoAudio,
    client::{ClientTimeouts, Endpoint, Exchange, WyomingClient},
};
use cotenant_threads::blocking;
use cotenant_units::Bytes;
use cotenant_units::causes::in_one_line;

/// Settings of the benchmark.
#[derive(Clone, Debug, clap::Args)]
pub struct VoiceArgs {
    /// Utterances in each of the two parts.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: u32,
    /// Send audio as a microphone does, with 500 ms of silence before its end: clients that look for the end of speech
    /// send as much.
    #[arg(long)]
    pub live: bool,
}

/// Sentences of the grammar that the stage brings.
const COMMANDS: [&str; 6] = [
    "turn on the kitchen light",
    "turn off the bedroom lamp",
    "lock the front door",
    "stop the music",
    "set a timer for ten minutes",
    "good night",
];

/// All memory of the session, and its reserve: as in the demonstration.
const TOTAL: Bytes = Bytes::from_mib(300);
const RESERVE: Bytes = Bytes::from_mib(56);

/// Memory that the neighbour takes without a lease, its rate per second, and how long it keeps it.
const NEIGHBOUR: Bytes = Bytes::from_mib(160);
const NEIGHBOUR_RATE: Bytes = Bytes::from_mib(160);
const NEIGHBOUR_STAYS: Duration = Duration::from_secs(2);

/// Time between two neighbours, in which the engine grows back.
const NEIGHBOUR_GONE: Duration = Duration::from_secs(2);

/// Silence before the end of a live utterance: the default of OpenAI's detector of turns.
const SILENCE: Duration = Duration::from_millis(500);

/// Pause between two `describe` requests.
const DESCRIBE_EVERY: Duration = Duration::from_millis(20);

/// The longest that one step may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// Times of one part, ascending once it is done.
#[derive(Default)]
struct Part {
    heard: Vec<Duration>,
    first_text: Vec<Duration>,
    first_audio: Vec<Duration>,
    described: Vec<Duration>,
}

/// Runs the benchmark and prints its figures.
///
/// # Errors
/// When the daemon or a worker does not come up, a request fails, or an answer differs.
pub(super) async fn run(args: &VoiceArgs, format: Output) -> Result<(), String> {
    let reading = load::Reading::now();
    let stage = Stage::set(configuration).map_err(|error| error.to_string())?;
    let problem = daemon::last_words(&stage);
    let mut operator = OperatorServiceClient::new(daemon::connected(&stage, PATIENCE).await?);
    daemon::until(&mut operator, PATIENCE, ready)
        .await
        .map_err(&problem)?;
    let socket = stage.socket().with_file_name("wyoming.sock");
    let client = WyomingClient::new(Endpoint::Unix(socket), ClientTimeouts::default());
    let recordings = recordings(&client).await.map_err(&problem)?;
    let mut exchange = client
        .open()
        .await
        .map_err(|error| problem(in_one_line(&error)))?;
    request_pipeline(&mut exchange)
        .await
        .map_err(|error| problem(in_one_line(&error)))?;

    let mut said = BTreeMap::new();
    // The first answers touch memory for the first time, and are the reference for later ones.
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
    let mut part = async |different: &mut Vec<String>| {
        let mut part = Part::default();
        for round in 0..args.rounds {
            let place = usize::try_from(round).unwrap_or(0) % recordings.len().max(1);
            let Some((command, recording)) = recordings.get(place) else {
                break;
            };
            let spoken = one(&mut exchange, recording, pace).await?;
            if spoken.heard != *command || said.get(command) != Some(&spoken.answer) {
                different.push(format!(
                    "{command}: heard `{}`, answered `{}`",
                    spoken.heard, spoken.answer
                ));
            }
            part.heard.push(spoken.heard_after);
            part.first_text.extend(spoken.first_text_after);
            part.first_audio.extend(spoken.first_audio_after);
        }
        Ok::<_, String>(part)
    };
    let alone = describing(&client, part(&mut different))
        .await
        .map_err(&problem)?;
    let before = status(&mut operator).await?;
    let squeezed = async {
        daemon::until(&mut operator, PATIENCE, |status| {
            sheds(status) > sheds(&before)
        })
        .await?;
        describing(&client, part(&mut different)).await
    };
    let beside = tokio::select! {
        part = squeezed => part.map_err(&problem)?,
        failed = neighbours() => return Err(failed),
    };
    let after = status(&mut operator).await?;
    let meanwhile = sheds(&after).saturating_sub(sheds(&before));
    print(
        format,
        args,
        (alone, beside),
        meanwhile,
        different.len(),
        reading.foreign_percent(),
    )?;
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

/// The commands as recordings of 16 kHz.
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

/// Sends `describe` repeatedly, each time on a new connection, while `part` runs.
async fn describing(
    client: &WyomingClient,
    part: impl Future<Output = Result<Part, String>>,
) -> Result<Part, String> {
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
    part.described = described;
    for times in [
        &mut part.heard,
        &mut part.first_text,
        &mut part.first_audio,
        &mut part.described,
    ] {
        times.sort_unstable();
    }
    Ok(part)
}

/// Neighbours that come and go until this is dropped; returns only when none can be started.
async fn neighbours() -> String {
    loop {
        let neighbour = match Process::ballast(NEIGHBOUR, NEIGHBOUR_RATE) {
            Ok(neighbour) => neighbour,
            Err(error) => return format!("cannot start a neighbour: {error}"),
        };
        tokio::time::sleep(Duration::from_secs(1) + NEIGHBOUR_STAYS).await;
        // It ends at once; waiting for it would hold up the measurement.
        let ended = blocking(move || drop(neighbour)).await;
        if let Err(error) = ended {
            return error.to_string();
        }
        tokio::time::sleep(NEIGHBOUR_GONE).await;
    }
}

fn print(
    format: Output,
    args: &VoiceArgs,
    (alone, beside): (Part, Part),
    sheds: u64,
    different: usize,
    foreign: Option<f64>,
) -> Result<(), String> {
    let compared = 2 * args.rounds;
    if format != Output::Table {
        let part = |part: &Part| {
            json!({
                "heardMs": spread(&part.heard),
                "firstTextMs": spread(&part.first_text),
                "firstAudioMs": spread(&part.first_audio),
                "describeMs": spread(&part.described),
            })
        };
        let document = json!({
            "rounds": args.rounds,
            "alone": part(&alone),
            "besideNeighbour": part(&beside),
            "sheds": sheds,
            "answersCompared": compared,
            "answersDifferent": different,
            "foreignPercent": foreign,
        });
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
    for (what, alone, beside) in [
        ("transcript", &alone.heard, &beside.heard),
        ("first text", &alone.first_text, &beside.first_text),
        ("first sound", &alone.first_audio, &beside.first_audio),
        ("`describe`, meanwhile", &alone.described, &beside.described),
    ] {
        let cell =
            |times: &[Duration], per_mille| format!("{:.1} ms", milliseconds(times, per_mille));
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
        "{}{} utterances each; {sheds} sheds meanwhile; {compared} answers compared, {different} different; others used \
         {foreign} of the processors\n",
        table.render(),
        args.rounds
    );
    output::write(&text).map_err(|_| "the output is closed".to_owned())
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

fn configuration(folder: &Path) -> String {
    let (places, folder) = (places(folder), folder.display());
    format!(
        "\
budget:
  total: {total}MiB
  reserve: {reserve}MiB
  scope: session
  dwell: 500ms
  sample_max: 100ms
  fill_rate_max: 400MiB
shedding: {{reclaim_min: 16MiB}}
llm: {{path: {folder}/demo.gguf, name: demo, threads: 1, context: 65536, kv_floor: 512, mode: balanced}}
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
        total = TOTAL.whole_mib(),
        reserve = RESERVE.whole_mib(),
    )
}
