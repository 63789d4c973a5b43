//! Models by their names in requests.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use axum::http::StatusCode;

use super::{
    api::Api,
    backend::{ModelInfo, ModelKind},
    fault::{Fault, shortened},
};
use cotenant_conversation::refusal::Refusal;

/// The requested chat model; the first one by default.
pub(super) fn model_named(api: &Api, name: Option<&str>) -> Result<String, Fault> {
    named(api, ModelKind::Chat, name).map(|model| model.id)
}

/// The requested model of a kind; the first one by default. Ollama's clients append `:latest` to a name without a tag.
pub(super) fn named(api: &Api, kind: ModelKind, name: Option<&str>) -> Result<ModelInfo, Fault> {
    let models = api.backends().status.models();
    let mut fitting = models.iter().filter(|model| model.kind == kind);
    let Some(name) = name else {
        let first = fitting.next().cloned();
        return first.ok_or_else(|| unknown_model("", []));
    };
    let plain = name.strip_suffix(":latest").unwrap_or(name);
    let is_called = |model: &&ModelInfo| model.is_called(name) || model.is_called(plain);
    match fitting.clone().find(is_called) {
        Some(model) => Ok(model.clone()),
        None => Err(match models.iter().find(is_called) {
            Some(other) => wrong_model(name, (task(other.kind), task(kind)), fitting),
            None => unknown_model(name, fitting),
        }),
    }
}

/// An identifier from name, size and time of a file, in the length that clients truncate to; not a digest of the
/// content.
pub(super) fn digest(model: &ModelInfo) -> String {
    (0u8..4)
        .map(|part| {
            let mut hasher = DefaultHasher::new();
            (part, &model.id, model.bytes.get(), model.created).hash(&mut hasher);
            format!("{:016x}", hasher.finish())
        })
        .collect()
}

/// OpenAI's `system_fingerprint`: while it is equal, equal seed, settings and prompt give an equal answer.
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

/// The refusal of an unknown model, which names the known ones.
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

pub(super) const fn task(kind: ModelKind) -> &'static str {
    match kind {
        ModelKind::Chat => "chat",
        ModelKind::Embedding => "embedding",
        ModelKind::Speech => "speech",
        ModelKind::Transcription => "transcription",
    }
}

/// The refusal of a known model for another task than the requested one.
fn wrong_model<'a>(
    id: &str,
    (task, requested): (&str, &str),
    models: impl IntoIterator<Item = &'a ModelInfo>,
) -> Fault {
    let known = match listed(models) {
        none if none.is_empty() => "there is none".to_owned(),
        known => format!("there is {known}"),
    };
    let message = format!("`{id}` is a model for {task}, not for {requested}; {known}");
    Fault::request(StatusCode::NOT_FOUND, "model_not_found", message).of_param("model")
}

fn listed<'a>(models: impl IntoIterator<Item = &'a ModelInfo>) -> String {
    let names = models.into_iter().map(|model| format!("`{}`", model.id));
    names.collect::<Vec<_>>().join(", ")
}
