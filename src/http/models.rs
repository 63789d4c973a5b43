//! Models by the names that clients give them.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use axum::http::StatusCode;

use super::{
    api::Api,
    backend::{ModelInfo, ModelKind},
    fault::{Fault, shortened},
};
use cotenant_conversation::refusal::Refusal;

/// The chat model that a client means; the first when it names none.
pub(super) fn model_named(api: &Api, name: Option<&str>) -> Result<String, Fault> {
    let models = api.backends().status.models();
    let mut chat = models.iter().filter(|model| model.kind == ModelKind::Chat);
    match name {
        Some(name) => match chat.clone().find(|model| model.is_called(name)) {
            Some(model) => Ok(model.id.clone()),
            None => match models.iter().find(|model| model.is_called(name)) {
                Some(other) => Err(wrong_model(name, task(other.kind), chat)),
                None => Err(unknown_model(name, chat)),
            },
        },
        None => chat
            .next()
            .map(|model| model.id.clone())
            .ok_or_else(|| unknown_model("", [])),
    }
}

/// Identifies a file by name, size and time, in the length that clients truncate; it is no digest of the content.
pub(super) fn digest(model: &ModelInfo) -> String {
    (0u8..4)
        .map(|part| {
            let mut hasher = DefaultHasher::new();
            (part, &model.id, model.bytes.get(), model.created).hash(&mut hasher);
            format!("{:016x}", hasher.finish())
        })
        .collect()
}

/// OpenAI's `system_fingerprint`: with the same one, the same seed, settings and prompt give the same answer.
pub(super) fn fingerprint(api: &Api, name: &str) -> String {
    let models = api.backends().status.models();
    let mut hasher = DefaultHasher::new();
    (
        env!("CARGO_PKG_VERSION"),
        models.iter().find(|model| model.id == name).map(digest),
    )
        .hash(&mut hasher);
    format!("fp_{:010x}", hasher.finish() >> 24)
}

/// The refusal of a model that is not there; names those that are.
pub(super) fn unknown_model<'a>(
    id: &str,
    models: impl IntoIterator<Item = &'a ModelInfo>,
) -> Fault {
    Fault::from(Refusal::UnknownModel {
        model: shortened(id),
        known: match listed(models) {
            none if none.is_empty() => none,
            known => format!("; there is {known}"),
        },
    })
}

/// The task of a model in one word.
pub(super) const fn task(kind: ModelKind) -> &'static str {
    match kind {
        ModelKind::Chat => "chat",
        ModelKind::Speech => "speech",
        ModelKind::Transcription => "transcription",
    }
}

/// The refusal of a model that is there, and not for chat.
pub(super) fn wrong_model<'a>(
    id: &str,
    task: &str,
    models: impl IntoIterator<Item = &'a ModelInfo>,
) -> Fault {
    let known = listed(models);
    let message = format!("`{id}` is a model for {task}, not for chat; there is {known}");
    Fault::request(StatusCode::NOT_FOUND, "model_not_found", message).of_param("model")
}

fn listed<'a>(models: impl IntoIterator<Item = &'a ModelInfo>) -> String {
    let names = models.into_iter().map(|model| format!("`{}`", model.id));
    names.collect::<Vec<_>>().join(", ")
}
