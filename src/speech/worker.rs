//! Client of a speech worker with any supported protocol.

use tokio::sync::mpsc;

use super::{
    audio::MonoAudio,
    client::{ClientError, Heard, SpeechStream, WyomingClient},
    http::{HttpClient, Manner},
};

/// A client of one worker.
#[derive(Clone, Debug)]
pub enum SpeechClient {
    /// Over HTTP.
    Http(HttpClient),
    /// Over Wyoming.
    Wyoming(WyomingClient),
}

impl SpeechClient {
    /// Transcribes `audio` with the expected `language`. Partial transcripts are sent to `pieces` as they arrive.
    ///
    /// # Errors
    /// If the worker cannot be reached, does not reply in time, refuses, or replies with something else.
    pub async fn hear(
        &self,
        audio: &MonoAudio,
        language: Option<&str>,
        pieces: Option<&mpsc::Sender<String>>,
    ) -> Result<Heard, ClientError> {
        match self {
            Self::Http(client) => client.hear(audio, language).await,
            Self::Wyoming(client) => client.hear(audio, language, pieces).await,
        }
    }

    /// Whether the worker supports speed; Wyoming has no field for it.
    pub const fn takes_speed(&self) -> bool {
        match self {
            Self::Http(client) => client.takes_speed(),
            Self::Wyoming(_) => false,
        }
    }

    /// Synthesises `text`; returns as soon as the audio begins. Dropping the returned value closes the connection.
    ///
    /// # Errors
    /// As for [`hear`](Self::hear); later failures are items of the stream.
    pub async fn synthesize(
        &self,
        text: &str,
        said: &Manner<'_>,
    ) -> Result<SpeechStream, ClientError> {
        match self {
            Self::Http(client) => client.synthesize(text, said).await,
            Self::Wyoming(client) => client.speak(text, said.voice, said.speaker).await,
        }
    }

    /// Languages that the worker announces, if any; errors as for [`hear`](Self::hear).
    pub async fn languages(&self) -> Result<Vec<String>, ClientError> {
        let Self::Wyoming(client) = self else {
            return Ok(Vec::new());
        };
        let info = client.describe().await?;
        let models = info.asr.into_iter().flat_map(|program| program.models);
        let mut languages: Vec<String> = Vec::new();
        for language in models.flat_map(|model| model.languages) {
            if !languages.contains(&language) {
                languages.push(language);
            }
        }
        Ok(languages)
    }

    /// Names of the installed voices that the worker announces, if any; errors as for [`hear`](Self::hear).
    pub async fn voices(&self) -> Result<Vec<String>, ClientError> {
        let Self::Wyoming(client) = self else {
            return Ok(Vec::new());
        };
        let info = client.describe().await?;
        let voices = info
            .tts
            .into_iter()
            .flat_map(|program| program.voices)
            .map(|voice| voice.artifact);
        Ok(voices
            .filter(|voice| voice.installed)
            .map(|voice| voice.name)
            .collect())
    }
}
