//! Speech worker behind any of the supported protocols.

use tokio::sync::mpsc;

use super::{
    audio::MonoAudio,
    client::{ClientError, Heard, SpeechStream, WyomingClient},
    http::{HttpSpeechClient, Manner},
};

/// Asks one worker to hear or to speak.
#[derive(Clone, Debug)]
pub enum SpeechClient {
    /// Over HTTP.
    Http(HttpSpeechClient),
    /// In Wyoming's events.
    Wyoming(WyomingClient),
}

impl SpeechClient {
    /// The transcript of `audio`, from a worker set to expect `language`. Partial transcripts are passed on to `pieces`
    /// as they arrive.
    ///
    /// # Errors
    /// When it cannot be reached, does not answer in time, refuses, or answers something else.
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

    /// Whether the worker honours the requested speed. Wyoming has no field for it.
    #[must_use]
    pub const fn takes_speed(&self) -> bool {
        match self {
            Self::Http(client) => client.takes_speed(),
            Self::Wyoming(_) => false,
        }
    }

    /// Speaks `text`; returns as soon as the audio begins. Dropping the returned
    /// value closes the connection.
    ///
    /// # Errors
    /// As [`hear`](Self::hear); later failures come as items.
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

    /// Languages that the worker announces; empty if it announces none.
    ///
    /// # Errors
    /// As [`hear`](Self::hear).
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

    /// Names of the voices that the worker announces; empty if it announces none. Voices that it would have to download
    /// first are omitted.
    ///
    /// # Errors
    /// As [`hear`](Self::hear).
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
