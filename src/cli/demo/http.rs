//! HTTP client of the demonstration.

use std::{net::SocketAddr, time::Duration};

#[derive(Debug, thiserror::Error)]
pub(super) enum HttpError {
    /// There was no answer.
    #[error("cannot request `{path}`")]
    Transport {
        /// The path.
        path: &'static str,
        /// The cause.
        source: Box<ureq::Error>,
    },
    /// The response is an error.
    #[error("`{path}` answered {status}: {body}")]
    Status {
        /// The path.
        path: &'static str,
        /// The status.
        status: u16,
        /// The body, truncated.
        body: String,
    },
    /// The response lacks an expected field.
    #[error("`{path}` answered without `{field}`")]
    Field {
        /// The path.
        path: &'static str,
        /// The missing field.
        field: &'static str,
    },
}

/// Client of the OpenAI-compatible API.
#[derive(Clone, Debug)]
pub(super) struct Http {
    agent: ureq::Agent,
    base: String,
    model: &'static str,
}

const PATIENCE: Duration = Duration::from_secs(30);

/// Separator of the parts of an upload; occurs in none of them.
const BOUNDARY: &str = "cotenant-demo-7f3d1c";

impl Http {
    /// Creates a client of the API at `address` for this LLM.
    pub(super) fn new(address: SocketAddr, model: &'static str) -> Self {
        let agent = ureq::Agent::config_builder()
            .timeout_global(Some(PATIENCE))
            .http_status_as_error(false)
            .build()
            .into();
        Self {
            agent,
            base: format!("http://{address}"),
            model,
        }
    }

    /// Synthesises text to a WAV file.
    pub(super) fn speak(&self, text: &str) -> Result<Vec<u8>, HttpError> {
        let body = serde_json::json!({
            "model": "tts-1", "input": text, "voice": "alloy", "response_format": "wav",
        });
        self.post(
            "/v1/audio/speech",
            "application/json",
            body.to_string().as_bytes(),
        )
    }

    /// Transcribes a WAV file.
    pub(super) fn hear(&self, wav: &[u8]) -> Result<String, HttpError> {
        const PATH: &str = "/v1/audio/transcriptions";
        let mut body = format!(
            "--{BOUNDARY}\r\ncontent-disposition: form-data; name=\"model\"\r\n\r\nwhisper-1\r\n\
             --{BOUNDARY}\r\ncontent-disposition: form-data; name=\"file\"; filename=\"q.wav\"\r\n\
             content-type: audio/wav\r\n\r\n"
        )
        .into_bytes();
        body.extend_from_slice(wav);
        body.extend_from_slice(format!("\r\n--{BOUNDARY}--\r\n").as_bytes());
        let answer = self.post(
            PATH,
            &format!("multipart/form-data; boundary={BOUNDARY}"),
            &body,
        )?;
        text_at(PATH, &answer, "/text")
    }

    /// Asks the LLM, which answers greedily.
    pub(super) fn ask(&self, question: &str) -> Result<String, HttpError> {
        const PATH: &str = "/v1/chat/completions";
        let body = serde_json::json!({
            "model": self.model, "temperature": 0, "max_tokens": 200,
            "messages": [{"role": "user", "content": question}],
        });
        let answer = self.post(PATH, "application/json", body.to_string().as_bytes())?;
        text_at(PATH, &answer, "/choices/0/message/content")
    }

    fn post(&self, path: &'static str, kind: &str, body: &[u8]) -> Result<Vec<u8>, HttpError> {
        let transport = |source| HttpError::Transport {
            path,
            source: Box::new(source),
        };
        let mut response = self
            .agent
            .post(format!("{}{path}", self.base))
            .header("content-type", kind)
            .send(body)
            .map_err(transport)?;
        let status = response.status().as_u16();
        let bytes = response.body_mut().read_to_vec().map_err(transport)?;
        if status == 200 {
            return Ok(bytes);
        }
        Err(HttpError::Status {
            path,
            status,
            body: String::from_utf8_lossy(&bytes).chars().take(300).collect(),
        })
    }
}

fn text_at(path: &'static str, answer: &[u8], field: &'static str) -> Result<String, HttpError> {
    serde_json::from_slice::<serde_json::Value>(answer)
        .ok()
        .and_then(|value| value.pointer(field)?.as_str().map(str::to_owned))
        .ok_or(HttpError::Field { path, field })
}
