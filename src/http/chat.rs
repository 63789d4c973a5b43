//! `POST /v1/chat/completions`.

use std::time::Instant;

use axum::{
    Extension,
    extract::{Request, State},
    response::{IntoResponse, Response},
};

use super::{
    answer::{answer, read_json},
    api::{Api, Meta, unix_seconds},
    chat_wire::WireRequest,
    chat_writer::ChatWriter,
    fault::Fault,
    models::model_named,
    stream::ignored_header,
};

/// `POST /v1/chat/completions`.
pub(super) async fn completions(
    State(api): State<Api>,
    Extension(meta): Meta,
    request: Request,
) -> Result<Response, Fault> {
    let began = Instant::now();
    let (wire, _memory): (WireRequest, _) = read_json(&api, request).await?;
    let model = model_named(&api, wire.model.as_deref())?;
    let writer = ChatWriter::new(
        api.fresh_id("chatcmpl-"),
        unix_seconds(),
        model.clone(),
        wire.include_usage(),
    );
    let ignored = ignored_header(&wire.ignored());
    let request = wire.into_request(meta, model)?;
    Ok((ignored, answer(api, request, writer, began).await?).into_response())
}
