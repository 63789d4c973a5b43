//! Embeddings: `POST /v1/embeddings`, and Ollama's `POST /api/embed` and `POST /api/embeddings`.
//!
//! A request is divided into parts of a few texts, so that long ones leave the worker to others in between, and a
//! worker that is restarted meanwhile loses one part.

use std::time::Instant;

use axum::{
    Extension,
    extract::{Request, State},
    http::header,
    response::{IntoResponse, Response},
};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Map, Value, json};

use super::{
    answer::read_json,
    api::{Api, Meta},
    backend::{EmbedRequest, ModelKind, RequestMeta},
    fault::{Fault, invalid},
    fields::ignored,
    memory::RequestMemory,
    models::named,
    numbers::Whole,
    ollama::OllamaFault,
    patience::{is_of_memory, patiently},
    stream::{held_for_memory, ignored_header},
};
use cotenant_conversation::refusals::not_configured;
use cotenant_speech::embeddings::{DIMENSIONS_MAX, Embeddings, TEXTS_MAX};
use cotenant_units::{Bytes, vector::normalise};

#[derive(Deserialize)]
struct WireOpenai {
    model: Option<String>,
    input: Option<WireInput>,
    encoding_format: Option<String>,
    dimensions: Option<Whole>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

#[derive(Deserialize)]
struct WireOllama {
    model: Option<String>,
    input: Option<WireInput>,
    truncate: Option<bool>,
    dimensions: Option<Whole>,
    /// Workers stop by `idle` of the configuration.
    #[serde(rename = "keep_alive")]
    _keep_alive: Option<Value>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

#[derive(Deserialize)]
struct WireSingle {
    model: Option<String>,
    prompt: Option<String>,
    #[serde(rename = "keep_alive")]
    _keep_alive: Option<Value>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum WireInput {
    One(String),
    Many(Vec<String>),
    Other(Value),
}

impl WireInput {
    /// The texts of a field.
    fn texts(input: Option<Self>) -> Result<Vec<String>, Fault> {
        let texts = match input {
            None => return Err(Fault::invalid(INPUT, "", "is missing")),
            Some(Self::One(text)) => vec![text],
            Some(Self::Many(texts)) => texts,
            Some(Self::Other(value)) => {
                return invalid(
                    INPUT,
                    value,
                    "is neither a text nor a list of texts: tokens depend on the model (hint: LangChain sends texts with \
                     `check_embedding_ctx_length=False`)",
                );
            }
        };
        if texts.len() > INPUTS_MAX {
            let problem = format!("is above the limit of {INPUTS_MAX} texts");
            return invalid(INPUT, format!("{} texts", texts.len()), problem);
        }
        match texts.iter().position(|text| text.trim().is_empty()) {
            Some(empty) => invalid(&format!("{INPUT}[{empty}]"), "", "is empty"),
            None => Ok(texts),
        }
    }
}

/// `POST /v1/embeddings`.
pub(super) async fn openai(
    State(api): State<Api>,
    Extension(meta): Meta,
    request: Request,
) -> Result<Response, Fault> {
    let (wire, memory) = read::<WireOpenai>(&api, request).await?;
    let base64 = match wire.encoding_format.as_deref() {
        None | Some("float") => false,
        Some("base64") => true,
        Some(other) => {
            return invalid("encoding_format", other, "is neither `float` nor `base64`");
        }
    };
    let ignored = ignored_header(&ignored([], &wire.others));
    let asked = Asked {
        model: named(&api, ModelKind::Embedding, wire.model.as_deref())?.id,
        texts: WireInput::texts(wire.input)?,
        dimensions: dimensions(wire.dimensions)?,
        truncate: false,
    };
    let model = json!(wire.model.as_ref().unwrap_or(&asked.model));
    let found = embedded(&api, &meta, &memory, asked).await?;
    let mut body = br#"{"object":"list","data":["#.to_vec();
    for (index, vector) in found.vectors.iter().enumerate() {
        separate(&mut body, index);
        body.extend_from_slice(br#"{"object":"embedding","index":"#);
        body.extend_from_slice(index.to_string().as_bytes());
        body.extend_from_slice(br#","embedding":"#);
        if base64 {
            let bytes: Vec<u8> = vector
                .iter()
                .flat_map(|number| number.to_le_bytes())
                .collect();
            body.push(b'"');
            body.extend_from_slice(BASE64_STANDARD.encode(bytes).as_bytes());
            body.push(b'"');
        } else {
            write_numbers(&mut body, vector);
        }
        body.push(b'}');
    }
    let tokens = found.tokens;
    let end = format!(
        r#"],"model":{model},"usage":{{"prompt_tokens":{tokens},"total_tokens":{tokens}}}}}"#
    );
    body.extend_from_slice(end.as_bytes());
    Ok((ignored, as_json(body)).into_response())
}

/// `POST /api/embed`: vectors of length 1. A request without input returns none.
pub(super) async fn ollama(
    State(api): State<Api>,
    Extension(meta): Meta,
    request: Request,
) -> Result<Response, OllamaFault> {
    let began = Instant::now();
    let (wire, memory) = read::<WireOllama>(&api, request).await?;
    let ignored = ignored_header(&ignored([], &wire.others));
    let model = named(&api, ModelKind::Embedding, wire.model.as_deref())?.id;
    let shown = json!(wire.model.as_ref().unwrap_or(&model));
    let texts = match wire.input {
        None => Vec::new(),
        Some(WireInput::One(text)) if text.is_empty() => Vec::new(),
        input => WireInput::texts(input)?,
    };
    let asked = Asked {
        model,
        texts,
        dimensions: dimensions(wire.dimensions)?,
        truncate: wire.truncate != Some(false),
    };
    let mut found = embedded(&api, &meta, &memory, asked).await?;
    for vector in &mut found.vectors {
        normalise(vector);
    }
    let mut body = format!(r#"{{"model":{shown},"embeddings":["#).into_bytes();
    for (index, vector) in found.vectors.iter().enumerate() {
        separate(&mut body, index);
        write_numbers(&mut body, vector);
    }
    let (total, tokens) = (began.elapsed().as_nanos(), found.tokens);
    let end =
        format!(r#"],"total_duration":{total},"load_duration":0,"prompt_eval_count":{tokens}}}"#);
    body.extend_from_slice(end.as_bytes());
    Ok((ignored, as_json(body)).into_response())
}

/// `POST /api/embeddings`, the predecessor of [`ollama`] for one text, as the worker returns it.
pub(super) async fn ollama_single(
    State(api): State<Api>,
    Extension(meta): Meta,
    request: Request,
) -> Result<Response, OllamaFault> {
    let (wire, memory) = read::<WireSingle>(&api, request).await?;
    let ignored = ignored_header(&ignored([], &wire.others));
    let texts = wire.prompt.filter(|prompt| !prompt.is_empty());
    let asked = Asked {
        model: named(&api, ModelKind::Embedding, wire.model.as_deref())?.id,
        texts: texts.into_iter().collect(),
        dimensions: None,
        truncate: true,
    };
    let found = embedded(&api, &meta, &memory, asked).await?;
    let mut body = br#"{"embedding":"#.to_vec();
    write_numbers(&mut body, found.vectors.first().map_or(&[], Vec::as_slice));
    body.push(b'}');
    Ok((ignored, as_json(body)).into_response())
}

async fn read<T: DeserializeOwned>(
    api: &Api,
    request: Request,
) -> Result<(T, RequestMemory), Fault> {
    if api.backends().embedding.is_none() {
        return Err(not_configured(ACT, "worker with `role: embedding`").into());
    }
    read_json(api, request).await
}

/// A request for embeddings in any form.
struct Asked {
    model: String,
    texts: Vec<String>,
    dimensions: Option<u32>,
    truncate: bool,
}

/// Embeds the texts part by part; the memory of the vectors, and of their JSON, counts for the request.
async fn embedded(
    api: &Api,
    meta: &RequestMeta,
    memory: &RequestMemory,
    asked: Asked,
) -> Result<Embeddings, Fault> {
    let backend = api.backends().embedding.clone();
    let backend = backend.ok_or_else(|| not_configured(ACT, "model for embeddings"))?;
    let hold = held_for_memory(api, meta);
    // In a drain nothing begins, and the worker is asked in vain.
    let meta = RequestMeta {
        part_of: api.backends().status.answers().begin(),
        ..meta.clone()
    };
    let mut all = Embeddings::default();
    for texts in asked.texts.chunks(TEXTS_MAX) {
        let request = EmbedRequest {
            meta: meta.clone(),
            model: asked.model.clone(),
            texts: texts.to_vec(),
            dimensions: asked.dimensions,
            truncate: asked.truncate,
        };
        let part = patiently(hold, is_of_memory, || backend.embed(request.clone())).await?;
        let numbers: usize = part.vectors.iter().map(Vec::len).sum();
        let bytes = Bytes::of_len(numbers * NUMBER_BYTES);
        memory.hold_more(api.request_memory(), ACT, bytes)?;
        all.vectors.extend(part.vectors);
        all.tokens = all.tokens.saturating_add(part.tokens);
    }
    Ok(all)
}

fn dimensions(wire: Option<Whole>) -> Result<Option<u32>, Fault> {
    let Some(number) = wire else { return Ok(None) };
    let fits = |count: &u32| (1..=DIMENSIONS_MAX).contains(&(*count as usize));
    match number.to().filter(fits) {
        Some(count) => Ok(Some(count)),
        None => invalid(
            "dimensions",
            number,
            format!("is not between 1 and {DIMENSIONS_MAX}"),
        ),
    }
}

fn separate(body: &mut Vec<u8>, index: usize) {
    if index > 0 {
        body.push(b',');
    }
}

fn write_numbers(body: &mut Vec<u8>, vector: &[f32]) {
    // Finite numbers are written to memory without an error.
    let _infallible = serde_json::to_writer(body, vector);
}

fn as_json(body: Vec<u8>) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], body).into_response()
}

/// Continuation of "cannot".
const ACT: &str = "embed text";

const INPUT: &str = "input";

/// From OpenAI's reference.
const INPUTS_MAX: usize = 2048;

/// A number, and its text in JSON: sign, nine digits, point, exponent, comma.
const NUMBER_BYTES: usize = 4 + 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_are_texts_and_the_rest_is_refused_by_name() {
        let read = |json: &str| WireInput::texts(serde_json::from_str(json).unwrap());
        assert_eq!(read("\"a b\"").unwrap(), ["a b"]);
        assert_eq!(read("[\"a\",\"b\"]").unwrap(), ["a", "b"]);
        assert!(read("[]").unwrap().is_empty());
        for (json, says) in [
            ("null", "input: is missing"),
            (
                "[1, 2]",
                "input: `[1,2]` is neither a text nor a list of texts",
            ),
            ("[[1], [2]]", "`check_embedding_ctx_length=False`"),
            ("[\"a\", \" \"]", "input[1]: is empty"),
        ] {
            let fault = read(json).unwrap_err().to_json().to_string();
            assert!(fault.contains(says), "{fault}");
        }
        let many = vec!["a"; INPUTS_MAX + 1];
        let fault = read(&json!(many).to_string()).unwrap_err();
        assert!(
            fault
                .to_json()
                .to_string()
                .contains("`2049 texts` is above the limit of 2048")
        );
    }
}
