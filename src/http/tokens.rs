//! Handlers of `POST /tokenize` and `POST /detokenize`, in the form of llama.cpp's server.

use std::{fmt::Write as _, sync::Arc};

use axum::{
    Json,
    body::Body,
    extract::{Request, State},
    http::{HeaderValue, header},
    response::{IntoResponse, Response},
};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    answer::read_plain_json,
    api::Api,
    backend::TokenizerBackend,
    fault::{Fault, invalid},
    numbers::Whole,
};
use cotenant_conversation::refusals::not_configured;

#[derive(Debug, Deserialize)]
struct WireTokenize {
    content: String,
    #[serde(default)]
    add_special: bool,
    /// Whether control tokens in the text are recognised; llama.cpp's default is yes.
    parse_special: Option<bool>,
    #[serde(default)]
    with_pieces: bool,
}

pub(super) async fn tokenize(State(api): State<Api>, request: Request) -> Result<Response, Fault> {
    let (wire, _memory): (WireTokenize, _) = read_plain_json(&api, request).await?;
    let length = wire.content.len();
    if length > TEXT_MAX {
        return invalid(
            "content",
            format!("{length} bytes"),
            format!("is above the limit of {TEXT_MAX} bytes"),
        );
    }
    let backend = tokenizer(&api)?;
    let control = wire.parse_special != Some(false);
    let tokens = backend
        .tokenize(wire.content, wire.add_special, control)
        .await?;
    let mut json = String::with_capacity(tokens.len() * 8);
    json.push_str("{\"tokens\":[");
    if wire.with_pieces {
        let pieces = backend.pieces(tokens.clone()).await?;
        for (index, (token, piece)) in tokens.iter().zip(&pieces).enumerate() {
            let comma = if index == 0 { "" } else { "," };
            // a piece that is not valid UTF-8 is returned as bytes
            let piece =
                std::str::from_utf8(piece).map_or_else(|_| json!(piece), |text| json!(text));
            let _infallible = write!(json, "{comma}{{\"id\":{token},\"piece\":{piece}}}");
        }
    } else {
        for (index, token) in tokens.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            let _infallible = write!(json, "{comma}{token}");
        }
    }
    json.push_str("]}");
    let kind = [(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/json"),
    )];
    Ok((kind, Body::from(json)).into_response())
}

#[derive(Debug, Deserialize)]
struct WireDetokenize {
    tokens: Vec<Whole>,
}

pub(super) async fn detokenize(
    State(api): State<Api>,
    request: Request,
) -> Result<Json<Value>, Fault> {
    let (wire, _memory): (WireDetokenize, _) = read_plain_json(&api, request).await?;
    let count = wire.tokens.len();
    if count > TOKENS_MAX {
        return invalid(
            "tokens",
            format!("{count} tokens"),
            format!("is above the limit of {TOKENS_MAX}"),
        );
    }
    let token = |token: Whole| {
        token
            .to()
            .ok_or_else(|| Fault::invalid("tokens", token, "is not a token"))
    };
    let tokens = wire
        .tokens
        .into_iter()
        .map(token)
        .collect::<Result<Vec<u32>, Fault>>()?;
    let pieces = tokenizer(&api)?.pieces(tokens).await;
    let pieces = pieces.map_err(|refusal| Fault::from(refusal).input_named("tokens"));
    let bytes = pieces?.concat();
    Ok(Json(json!({"content": String::from_utf8_lossy(&bytes)})))
}

/// The tokenizer of the model, or 404.
pub(super) fn tokenizer(api: &Api) -> Result<Arc<dyn TokenizerBackend>, Fault> {
    let tokenizer = api.backends().tokenizer.clone();
    tokenizer.ok_or_else(|| not_configured("count tokens", "model").into())
}

/// Our choice: more than a context of 32k tokens, and at most 2 MiB of tokens and 8 MiB of their pieces.
const TEXT_MAX: usize = 256 << 10;
/// Our choice, likewise.
const TOKENS_MAX: usize = 128 << 10;
