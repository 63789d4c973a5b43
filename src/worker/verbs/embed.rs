//! `cotenant worker embed`: embeddings by a GGUF model, over `POST /v1/embeddings` of OpenAI's API.

use std::{convert::Infallible, error::Error, io, net::Ipv4Addr, path::PathBuf};

use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Bytes, Incoming},
    header,
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::{net::TcpListener, sync::oneshot};
use tokio_util::task::TaskTracker;

use super::{
    error::VerbError,
    lifeline::tell_ready,
    serve::{EngineThread, on_one_thread},
};
use cotenant_speech::{client::Endpoint, embeddings::DIMENSIONS_MAX};

/// Options of `cotenant worker embed`.
#[derive(Clone, Debug, clap::Args)]
pub struct EmbedOptions {
    /// GGUF file of an encoder (architecture bert or nomic-bert), or of a decoder such as Qwen3-Embedding
    #[arg(long, value_name = "FILE")]
    pub model: PathBuf,
    /// Port on loopback to listen on
    #[arg(long)]
    pub port: u16,
    /// Longest text in tokens; memory for it is taken as texts arrive
    #[arg(long, value_name = "TOKENS", default_value_t = 2048, value_parser = clap::value_parser!(u32).range(16..))]
    pub context: u32,
    /// Threads that compute [default: one for each physical core]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub threads: Option<u16>,
}

/// A text to embed.
#[derive(Clone, Debug)]
pub struct EmbedText {
    /// The text.
    pub text: String,
    /// Numbers of the vector, if fewer are requested.
    pub dimensions: Option<u32>,
    /// Whether a text that is too long is cut.
    pub truncate: bool,
}

/// The reason why a text was not embedded.
#[derive(Clone, Debug)]
pub struct NotEmbedded {
    /// Whether the request, and not the model, is the cause.
    pub of_request: bool,
    /// The reason.
    pub reason: String,
}

/// A vector, and the tokens of its text.
pub type EmbedResult = Result<(Vec<f32>, u32), NotEmbedded>;

/// Serves until SIGTERM or SIGINT, with the model that `open` returns.
///
/// # Errors
/// If the model cannot be loaded, or the port cannot be bound.
pub fn run_embed<E, O>(options: &EmbedOptions, open: O) -> Result<(), VerbError>
where
    E: FnMut(EmbedText) -> EmbedResult + 'static,
    O: FnOnce() -> Result<E, Box<dyn Error + Send + Sync>> + Send + 'static,
{
    let path = options.model.clone();
    let make = move || open().map_err(|source| VerbError::Embedding { path, source });
    on_one_thread(|stop| async move {
        // A client that can connect is served: readiness is a connection.
        let thread = EngineThread::start(make, |embed: &mut E, job: Job| {
            // A disconnected client does not need the result.
            let _ = job.reply.send(embed(job.text));
        })?;
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, options.port))
            .await
            .map_err(|source| VerbError::Listen {
                endpoint: Endpoint::Tcp(format!("127.0.0.1:{}", options.port)),
                source,
            })?;
        tracing::info!(port = options.port, "serving");
        tell_ready();
        let connections = TaskTracker::new();
        while let Some(accepted) = stop.run_until_cancelled(listener.accept()).await {
            let stream = match accepted {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => continue,
                Err(error) => return Err(VerbError::Runtime(error)),
            };
            let (thread, stop) = (thread.clone(), stop.clone());
            connections.spawn(async move {
                let service = service_fn(|request| answer(&thread, request));
                let serving = http1::Builder::new()
                    .timer(TokioTimer::new())
                    .serve_connection(TokioIo::new(stream), service);
                let mut serving = std::pin::pin!(serving);
                let ended = tokio::select! {
                    ended = serving.as_mut() => ended,
                    () = stop.cancelled() => {
                        serving.as_mut().graceful_shutdown();
                        serving.await
                    }
                };
                if let Err(error) = ended {
                    tracing::debug!(%error, "client lost");
                }
            });
        }
        connections.close();
        connections.wait().await;
        Ok(())
    })
}

/// A text for the engine's thread.
struct Job {
    text: EmbedText,
    reply: oneshot::Sender<EmbedResult>,
}

#[derive(Deserialize)]
struct Asked {
    input: Input,
    #[serde(default)]
    dimensions: Option<u32>,
    #[serde(default)]
    truncate: bool,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Input {
    One(String),
    Many(Vec<String>),
}

#[derive(Serialize)]
struct Answer {
    object: &'static str,
    data: Vec<Datum>,
    usage: Value,
}

#[derive(Serialize)]
struct Datum {
    object: &'static str,
    index: usize,
    embedding: Vec<f32>,
}

async fn answer(
    thread: &EngineThread<Job>,
    request: Request<Incoming>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let answered = match (request.method(), request.uri().path()) {
        (&Method::GET, "/health") => Ok(json!({"status": "ok"}).to_string().into_bytes()),
        (&Method::POST, "/v1/embeddings") => embeddings(thread, request).await,
        (method, path) => Err((
            StatusCode::NOT_FOUND,
            format!("cannot {method} {path} (hint: POST /v1/embeddings)"),
        )),
    };
    let (status, body) = match answered {
        Ok(body) => (StatusCode::OK, body),
        Err((status, message)) => {
            let error = json!({"error": {"message": message, "code": status.as_u16()}});
            (status, error.to_string().into_bytes())
        }
    };
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    let json = header::HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, json);
    Ok(response)
}

async fn embeddings(
    thread: &EngineThread<Job>,
    request: Request<Incoming>,
) -> Result<Vec<u8>, (StatusCode, String)> {
    let bad = |reason: String| (StatusCode::BAD_REQUEST, reason);
    let body = Limited::new(request.into_body(), BODY_MAX).collect().await;
    let body = body.map_err(|error| bad(format!("cannot read the request: {error}")))?;
    let asked: Asked = serde_json::from_slice(&body.to_bytes())
        .map_err(|error| bad(format!("cannot read the request: {error}")))?;
    let texts = match asked.input {
        Input::One(text) => vec![text],
        Input::Many(texts) => texts,
    };
    if texts.len() > INPUTS_MAX {
        let count = texts.len();
        return Err(bad(format!(
            "{count} texts are above the limit of {INPUTS_MAX}"
        )));
    }
    if let Some(count) = asked.dimensions
        && !(1..=DIMENSIONS_MAX).contains(&(count as usize))
    {
        return Err(bad(format!(
            "`dimensions` is {count}, not between 1 and {DIMENSIONS_MAX}"
        )));
    }
    let (mut data, mut total) = (Vec::new(), 0u64);
    for (index, text) in texts.into_iter().enumerate() {
        let text = EmbedText {
            text,
            dimensions: asked.dimensions,
            truncate: asked.truncate,
        };
        let embedded = thread.ask(|reply| Job { text, reply }).await;
        let (embedding, tokens) = embedded
            .ok_or_else(|| {
                let busy = "too many requests at once".to_owned();
                (StatusCode::SERVICE_UNAVAILABLE, busy)
            })?
            .map_err(|error| match error.of_request {
                true => bad(format!("input[{index}]: {}", error.reason)),
                false => (StatusCode::INTERNAL_SERVER_ERROR, error.reason),
            })?;
        total += u64::from(tokens);
        data.push(Datum {
            object: "embedding",
            index,
            embedding,
        });
    }
    let answer = Answer {
        object: "list",
        data,
        usage: json!({"prompt_tokens": total, "total_tokens": total}),
    };
    serde_json::to_vec(&answer)
        .map_err(|error| (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))
}

/// 2048 texts of a few hundred tokens.
const BODY_MAX: usize = 8 << 20;

/// From OpenAI's reference.
const INPUTS_MAX: usize = 2048;
