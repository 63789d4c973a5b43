//! The road from speech to speech.
//!
//! ```text
//! recording ─► recogniser ─► transcript ─► whoever answers ─► pieces of text ─► sentences ─► voice ─► samples
//! ```
//!
//! The voice speaks the first sentence while the rest of the answer is still being made. Who answers is the caller's
//! business: a closure that takes the transcript and returns a stream of text.

use std::{
    error::Error,
    pin::Pin,
    time::{Duration, Instant},
};

use tokio::sync::mpsc;
use tokio_stream::{Stream, StreamExt};

use super::{
    audio::{ASR_RATE_HZ, AudioError, MonoAudio},
    client::{ClientError, WyomingClient},
    resample::Resampler,
    sentences::Sentences,
};

/// Recogniser, answerer and voice in a row.
#[derive(Clone, Debug)]
pub struct Pipeline {
    /// The recogniser.
    pub asr: WyomingClient,
    /// The voice.
    pub tts: WyomingClient,
    /// Name of the voice, if it has several.
    pub voice: Option<String>,
    /// Samples per second of what comes out.
    pub output_rate_hz: u32,
}

/// A text in pieces, or the error that ended it.
pub type TextStream = Pin<Box<dyn Stream<Item = Result<String, BoxError>> + Send>>;

/// Any error of whoever answers.
pub type BoxError = Box<dyn Error + Send + Sync>;

/// What was heard and answered, and when each stage was reached, counted from the moment the recording was there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PipelineReport {
    /// What was heard.
    pub transcript: String,
    /// What was answered.
    pub answer: String,
    /// In how many pieces it was spoken.
    pub sentences: usize,
    /// The transcript was there.
    pub transcript_after: Duration,
    /// The first piece of the answer's text was there.
    pub first_text_after: Option<Duration>,
    /// The first samples of the answer were there.
    pub first_audio_after: Option<Duration>,
    /// All was there.
    pub finished_after: Duration,
    /// How long the answer plays.
    pub audio: Duration,
}

impl Pipeline {
    /// Hears `recording`, asks `answer` for a text, and sends it spoken to `output`, sentence by sentence.
    ///
    /// # Errors
    /// Names the stage that failed; what was spoken until then has been sent.
    pub async fn run<A, F>(
        &self,
        recording: MonoAudio,
        answer: A,
        output: mpsc::Sender<Vec<i16>>,
    ) -> Result<PipelineReport, PipelineError>
    where
        A: FnOnce(String) -> F,
        F: Future<Output = Result<TextStream, BoxError>>,
    {
        let begin = Instant::now();
        let recording = recording.resampled(ASR_RATE_HZ).map_err(PipelineError::Recording)?;
        let transcript = self.asr.transcribe(&recording).await.map_err(PipelineError::Hear)?;
        let transcript_after = begin.elapsed();
        if transcript.trim().is_empty() {
            return Err(PipelineError::NothingHeard {
                recording: recording.duration(),
            });
        }

        let cannot_answer = |source| PipelineError::Answer {
            transcript: transcript.clone(),
            source,
        };
        let mut text = answer(transcript.clone()).await.map_err(cannot_answer)?;
        let (to_voice, from_text) = mpsc::channel(SENTENCES_AHEAD);
        let read = async {
            let mut written = Written::default();
            let mut sentences = Sentences::default();
            while let Some(piece) = text.next().await {
                let piece = piece.map_err(cannot_answer)?;
                written.first_after.get_or_insert_with(|| begin.elapsed());
                written.text.push_str(&piece);
                for sentence in sentences.push(&piece) {
                    // The voice only stops listening when it failed, which is reported by itself.
                    let _ = to_voice.send(sentence).await;
                }
            }
            if let Some(sentence) = sentences.finish() {
                let _ = to_voice.send(sentence).await;
            }
            drop(to_voice);
            Ok(written)
        };
        let (written, spoken) = tokio::try_join!(read, self.speak(from_text, begin, &output))?;

        Ok(PipelineReport {
            transcript,
            answer: written.text,
            sentences: spoken.sentences,
            transcript_after,
            first_text_after: written.first_after,
            first_audio_after: spoken.first_after,
            finished_after: begin.elapsed(),
            audio: spoken.audio,
        })
    }

    /// Speaks each sentence as it comes.
    async fn speak(
        &self,
        mut sentences: mpsc::Receiver<String>,
        begin: Instant,
        output: &mpsc::Sender<Vec<i16>>,
    ) -> Result<Spoken, PipelineError> {
        let mut spoken = Spoken::default();
        while let Some(sentence) = sentences.recv().await {
            let failed = |source| PipelineError::Speak {
                sentence: sentence.clone(),
                source,
            };
            let bad_audio = |error: AudioError| failed(ClientError::Audio(error));
            let mut speech = self
                .tts
                .synthesize(&sentence, self.voice.as_deref())
                .await
                .map_err(failed)?;
            let mut resampler = match speech.sample_rate_hz() {
                rate if rate == self.output_rate_hz => None,
                rate => Some(Resampler::new(rate, self.output_rate_hz).map_err(|error| bad_audio(error.into()))?),
            };
            loop {
                let samples = match (speech.next().await, &mut resampler) {
                    (Some(samples), None) => samples.map_err(failed)?,
                    (Some(samples), Some(resampler)) => resampler
                        .push(&samples.map_err(failed)?)
                        .map_err(|error| bad_audio(error.into()))?,
                    (None, _) => break,
                };
                spoken.send(samples, self.output_rate_hz, begin, output).await?;
            }
            if let Some(resampler) = resampler {
                let rest = resampler.finish().map_err(|error| bad_audio(error.into()))?;
                spoken.send(rest, self.output_rate_hz, begin, output).await?;
            }
            spoken.sentences += 1;
        }
        Ok(spoken)
    }
}

/// What was answered so far.
#[derive(Default)]
struct Written {
    text: String,
    first_after: Option<Duration>,
}

/// What was spoken so far.
#[derive(Default)]
struct Spoken {
    sentences: usize,
    first_after: Option<Duration>,
    audio: Duration,
}

impl Spoken {
    async fn send(
        &mut self,
        samples: Vec<i16>,
        rate_hz: u32,
        begin: Instant,
        output: &mpsc::Sender<Vec<i16>>,
    ) -> Result<(), PipelineError> {
        if samples.is_empty() {
            return Ok(());
        }
        let audio = MonoAudio::new(rate_hz, samples);
        let duration = audio.duration();
        output
            .send(audio.samples)
            .await
            .map_err(|_| PipelineError::OutputClosed)?;
        self.first_after.get_or_insert_with(|| begin.elapsed());
        self.audio += duration;
        Ok(())
    }
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PipelineError {
    /// The recording cannot be used.
    #[error("cannot use the recording")]
    Recording(#[source] AudioError),
    /// The recogniser failed.
    #[error("cannot hear the recording")]
    Hear(#[source] ClientError),
    /// The recogniser heard no words.
    #[error("nothing was heard in a recording of {:.1} s", recording.as_secs_f64())]
    NothingHeard {
        /// How long it is.
        recording: Duration,
    },
    /// The answerer failed.
    #[error("cannot answer `{transcript}`")]
    Answer {
        /// What was heard.
        transcript: String,
        /// Why not.
        #[source]
        source: BoxError,
    },
    /// The voice failed.
    #[error("cannot speak `{sentence}`")]
    Speak {
        /// What was to be said.
        sentence: String,
        /// Why not.
        #[source]
        source: ClientError,
    },
    /// Whoever listens has gone.
    #[error("nobody takes the spoken answer any more")]
    OutputClosed,
}

/// Sentences that may wait for the voice; then the answer waits.
const SENTENCES_AHEAD: usize = 8;
