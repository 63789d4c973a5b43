//! `cotenant talk`: a recording through the Wyoming API, and the spoken answer.

use std::{
    fs,
    path::PathBuf,
    time::{Duration, Instant},
};

use super::{
    Global, Output,
    exit::{CliError, FAILED},
    output,
};
use cotenant_speech::{
    audio::{AudioError, MonoAudio, PcmDecoder, parse_wav},
    client::{ClientError, ClientTimeouts, Endpoint, Exchange, WyomingClient},
    wyoming::{
        AudioFormat, Event,
        event::{AudioChunk, AudioStart, AudioStop, RunPipeline},
    },
};
use cotenant_units::millis;

/// Settings of the verb.
#[derive(Clone, Debug, clap::Args)]
pub struct Talk {
    /// WAV file with the spoken input.
    pub recording: PathBuf,
    /// Address of the Wyoming API: `tcp://host:port` or `unix:///path`.
    #[arg(long, default_value = "tcp://127.0.0.1:10300", value_name = "URI")]
    pub uri: Endpoint,
    /// Write the spoken answer to this WAV file.
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
}

/// Results of one utterance; times are relative to its end.
#[derive(Clone, Debug, Default)]
pub(super) struct Spoken {
    pub(super) heard: String,
    pub(super) answer: String,
    pub(super) audio: MonoAudio,
    pub(super) heard_after: Duration,
    pub(super) first_text_after: Option<Duration>,
    pub(super) first_audio_after: Option<Duration>,
    pub(super) done_after: Duration,
}

pub(super) async fn run(global: &Global, args: &Talk) -> Result<(), CliError> {
    let path = args.recording.display();
    let file = fs::read(&args.recording)
        .map_err(|error| CliError::failed(format!("cannot read `{path}`"), error))?;
    let recording = parse_wav(&file, RECORDING_MAX)
        .map_err(|error| CliError::failed(format!("cannot use `{path}`"), error))?;
    let client = WyomingClient::new(args.uri.clone(), ClientTimeouts::default());
    let failed = |error: ClientError| CliError::failed("cannot talk", error);
    let mut exchange = client.open().await.map_err(failed)?;
    request_pipeline(&mut exchange, "asr")
        .await
        .map_err(failed)?;
    let spoken = utter(&mut exchange, &recording, Pace::AtOnce)
        .await
        .map_err(failed)?;
    if let Some(out) = args
        .out
        .as_ref()
        .filter(|_| !spoken.audio.samples.is_empty())
    {
        let wav = spoken
            .audio
            .to_wav()
            .map_err(|error| CliError::failed("cannot store the answer", error))?;
        let path = out.display();
        fs::write(out, wav)
            .map_err(|error| CliError::failed(format!("cannot write `{path}`"), error))?;
    }
    match global.output {
        Output::Table => output::write(&format!(
            "heard \"{}\" after {} ms\nanswer \"{}\"\nfirst text after {}, first sound after {}, all after {} ms\n",
            spoken.heard,
            spoken.heard_after.as_millis(),
            spoken.answer.trim(),
            milliseconds(spoken.first_text_after),
            milliseconds(spoken.first_audio_after),
            spoken.done_after.as_millis()
        ))?,
        Output::Json | Output::Ndjson => output::write_json(
            global.output,
            &serde_json::json!({
                "heard": spoken.heard,
                "answer": spoken.answer,
                "heardMs": millis(spoken.heard_after),
                "firstTextMs": spoken.first_text_after.map(millis),
                "firstAudioMs": spoken.first_audio_after.map(millis),
                "doneMs": millis(spoken.done_after),
                "audioMs": millis(spoken.audio.duration()),
            }),
        )?,
    }
    let unwritten = match &args.out {
        Some(out) if spoken.audio.samples.is_empty() => {
            format!("; `{}` is not written", out.display())
        }
        _ => String::new(),
    };
    match (spoken.heard.trim().is_empty(), unwritten.is_empty()) {
        (true, _) => Err(CliError::plain(
            format!("nothing was heard{unwritten}"),
            FAILED,
        )),
        (false, false) => Err(CliError::plain(
            format!("nothing was said{unwritten}"),
            FAILED,
        )),
        (false, true) => Ok(()),
    }
}

/// Requests the pipeline from this stage to speech.
pub(super) async fn request_pipeline(
    exchange: &mut Exchange,
    from: &str,
) -> Result<(), ClientError> {
    let pipeline = RunPipeline {
        start_stage: from.to_owned(),
        end_stage: "tts".to_owned(),
    };
    exchange.send(Event::RunPipeline(pipeline)).await
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pace {
    /// At once, like a file.
    AtOnce,
    /// In real time, like a microphone, with this silence before the end.
    Live(Duration),
}

/// Sends a recording, and receives the complete answer.
pub(super) async fn utter(
    exchange: &mut Exchange,
    recording: &MonoAudio,
    pace: Pace,
) -> Result<Spoken, ClientError> {
    let format = AudioFormat::mono_16_bit(recording.sample_rate_hz);
    let start = AudioStart {
        format,
        timestamp: None,
    };
    exchange.send(Event::AudioStart(start)).await?;
    let mut said = recording.clone();
    if let Pace::Live(silence) = pace {
        said.pad(Duration::ZERO, silence);
    }
    let mut next = tokio::time::Instant::now();
    for samples in said.samples.chunks(CHUNK_SAMPLES) {
        if let Pace::Live(_) = pace {
            next += MonoAudio::new(said.sample_rate_hz, samples.to_vec()).duration();
            tokio::time::sleep_until(next).await;
        }
        let chunk = AudioChunk {
            format,
            timestamp: None,
            audio: cotenant_speech::audio::pcm_bytes(samples),
        };
        exchange.send(Event::AudioChunk(chunk)).await?;
    }
    exchange
        .send(Event::AudioStop(AudioStop::default()))
        .await?;
    let ended = Instant::now();
    let mut spoken = Spoken::default();
    let mut decoder: Option<PcmDecoder> = None;
    let unusable = |error: AudioError| ClientError::Audio(error);
    loop {
        match exchange.receive().await? {
            Event::Transcript(heard) => {
                spoken.heard = heard.text;
                spoken.heard_after = ended.elapsed();
            }
            Event::HandledChunk(piece) => {
                spoken
                    .first_text_after
                    .get_or_insert_with(|| ended.elapsed());
                spoken.answer.push_str(&piece.text);
            }
            // Nothing was recognised, so there is no speech.
            Event::NotHandled(_) if spoken.heard.trim().is_empty() => break,
            Event::NotHandled(reason) => spoken.answer = reason.text.unwrap_or_default(),
            Event::AudioStart(start) => {
                spoken.audio.sample_rate_hz = start.format.rate;
                decoder = Some(PcmDecoder::new(start.format).map_err(unusable)?);
            }
            Event::AudioChunk(chunk) => {
                spoken
                    .first_audio_after
                    .get_or_insert_with(|| ended.elapsed());
                if let Some(decoder) = &mut decoder {
                    spoken.audio.samples.extend(decoder.push(&chunk.audio));
                }
            }
            Event::AudioStop(_) => break,
            // An answer without words is not spoken.
            Event::HandledStop if spoken.answer.trim().is_empty() => break,
            _ => {}
        }
    }
    spoken.done_after = ended.elapsed();
    Ok(spoken)
}

fn milliseconds(time: Option<Duration>) -> String {
    time.map_or_else(
        || "never".to_owned(),
        |time| format!("{} ms", time.as_millis()),
    )
}

/// Longest recording read; the API has its own limit.
const RECORDING_MAX: Duration = Duration::from_secs(600);

/// Samples per message: 64 ms at 16 kHz.
const CHUNK_SAMPLES: usize = 1024;
