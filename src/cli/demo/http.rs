//! HTTP client of the demonstration.

use std::{error::Error, net::SocketAddr, time::Duration};

use http_body_util::{BodyExt as _, Full};
use hyper::{Request, body::Bytes, client::conn::http1, header};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum HttpError {
    /// There was no answer.
    #[error("cannot ask `{path}`")]
    Transport {
        /// The path.
        path: &'static str,
        /// Why not.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// The answer says no.
    #[error("`{path}` answered {status}: {body}")]
    Status {
        /// The path.
        path: &'static str,
        /// The status.
        status: u16,
        /// The body, shortened.
        body: String,
    },
    /// The answer is not what it should be.
    #[error("`{path}` answered without `{field}`")]
    Field {
        /// The path.
        path: &'static str,
        /// What is missing.
        field: &'static str,
    },
}

/// A client of the OpenAI-compatible API.
#[derive(Clone, Debug)]
pub(super) struct Http {
    address: SocketAddr,
}

/// The longest that one request of the demonstration may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// Separates the parts of an upload; any text that does not occur in it.
const BOUNDARY: &str = "cotenant-demo-7f3d1c";

impl Http {
    /// A client of the API at `address`.
    pub(super) const fn new(address: SocketAddr) -> Self {
        Self { address }
    }

    /// Text to a WAV file.
    pub(super) async fn speak(&self, text: &str) -> Result<Bytes, HttpError> {
        let body = serde_json::json!({
            "model": "tts-1", "input": text, "voice": "alloy", "response_format": "wav",
        });
        self.post("/v1/audio/speech", "application/json", body.to_string().into()).await
    }

    /// A WAV file to text.
    pub(super) async fn hear(&self, wav: &[u8]) -> Result<String, HttpError> {
        const PATH: &str = "/v1/audio/transcriptions";
        let mut body = format!(
            "--{BOUNDARY}\r\ncontent-disposition: form-data; name=\"model\"\r\n\r\nwhisper-1\r\n\
             --{BOUNDARY}\r\ncontent-disposition: form-data; name=\"file\"; filename=\"q.wav\"\r\n\
             content-type: audio/wav\r\n\r\n"
        )
        .into_bytes();
        body.extend_from_slice(wav);
        body.extend_from_slice(format!("\r\n--{BOUNDARY}--\r\n").as_bytes());
        let kind = format!("multipart/form-data; boundary={BOUNDARY}");
        let answer = self.post(PATH, &kind, body.into()).await?;
        text_at(PATH, &answer, "/text")
    }

    /// A question to the LLM, answered greedily.
    pub(super) async fn ask(&self, question: &str) -> Result<String, HttpError> {
        const PATH: &str = "/v1/chat/completions";
        let body = serde_json::json!({
            "model": "demo", "temperature": 0, "max_tokens": 200,
            "messages": [{"role": "user", "content": question}],
        });
        let answer = self.post(PATH, "application/json", body.to_string().into()).await?;
        text_at(PATH, &answer, "/choices/0/message/content")
    }

    async fn post(&self, path: &'static str, kind: &str, body: Bytes) -> Result<Bytes, HttpError> {
        let exchanged = match tokio::time::timeout(PATIENCE, exchange(self.address, path, kind, body)).await {
            Ok(exchanged) => exchanged,
            Err(late) => Err(late.into()),
        };
        let (status, bytes) = exchanged.map_err(|source| HttpError::Transport { path, source })?;
        if status == 200 {
            return Ok(bytes);
        }
        Err(HttpError::Status { path, status, body: String::from_utf8_lossy(&bytes).chars().take(300).collect() })
    }
}

/// Sends one request on a connection of its own; returns the status and the body of the answer.
async fn exchange(
    address: SocketAddr,
    path: &str,
    kind: &str,
    body: Bytes,
) -> Result<(u16, Bytes), Box<dyn Error + Send + Sync>> {
    let stream = TcpStream::connect(address).await?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    // It ends with the answer; its errors are those of the answer.
    tokio::spawn(connection);
    let request = Request::post(path)
        .header(header::HOST, address.to_string())
        .header(header::CONTENT_TYPE, kind)
        .header(header::CONNECTION, "close")
        .body(Full::new(body))?;
    let response = sender.send_request(request).await?;
    let status = response.status().as_u16();
    Ok((status, response.into_body().collect().await?.to_bytes()))
}

fn text_at(path: &'static str, answer: &[u8], field: &'static str) -> Result<String, HttpError> {
    serde_json::from_slice::<serde_json::Value>(answer)
        .ok()
        .and_then(|value| value.pointer(field)?.as_str().map(str::to_owned))
        .ok_or(HttpError::Field { path, field })
}
