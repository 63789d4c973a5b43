//! Files of a model as its hub lists them: URLs, lengths, SHA-256.

use std::collections::BTreeMap;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use serde_json::Value;

use super::{
    client::{Client, shown},
    reference::{Choice, Reference},
};
use crate::exit::{self, CliError};
use cotenant_units::Bytes;

/// One file to fetch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Source {
    /// Its name in the folder.
    pub name: String,
    /// Its address.
    pub url: String,
    /// Its length.
    pub bytes: u64,
    /// Its SHA-256 in lower case, if known before it is fetched.
    pub sha256: Option<String>,
    /// Its version, as `If-Range` takes it.
    pub validator: Option<String>,
}

/// Base URLs of the hubs, without a slash at the end.
#[derive(Clone, Debug)]
pub(super) struct Hubs {
    /// Hugging Face, or a mirror of it.
    pub hugging_face: String,
    /// Ollama's registry.
    pub ollama: String,
}

impl Hubs {
    /// Hugging Face at `HF_ENDPOINT` as in its own tools, and Ollama's registry.
    pub(super) fn from_env() -> Result<Self, CliError> {
        let endpoint = std::env::var("HF_ENDPOINT").unwrap_or_default();
        let endpoint = match endpoint.trim_end_matches('/') {
            "" => "https://huggingface.co",
            endpoint => endpoint,
        };
        if !endpoint.starts_with("https://") && !endpoint.starts_with("http://") {
            let act = format!("cannot use HF_ENDPOINT `{endpoint}`: it is no http or https URL");
            return Err(CliError::plain(act, exit::USAGE));
        }
        Ok(Self {
            hugging_face: endpoint.to_owned(),
            ollama: "https://registry.ollama.ai".to_owned(),
        })
    }

    /// The files of a model; several in the order of their parts. `sha256` is that of a URL.
    pub(super) fn resolve(
        &self,
        client: &Client,
        reference: &Reference,
        sha256: Option<String>,
    ) -> Result<Vec<Source>, CliError> {
        match reference {
            Reference::HuggingFace {
                owner,
                repository,
                revision,
                choice,
            } => {
                let base = &self.hugging_face;
                let list = format!(
                    "{base}/api/models/{owner}/{repository}/tree/{revision}?recursive=true"
                );
                let found = choose(
                    &format!("{owner}/{repository}"),
                    listed(&client.json(&list, "application/json")?),
                    choice,
                )?;
                let at = format!("{base}/{owner}/{repository}/resolve/{revision}");
                found.into_iter().map(|file| file.source(&at)).collect()
            }
            Reference::Ollama {
                namespace,
                name,
                tag,
            } => {
                let at = format!("{}/v2/{namespace}/{name}", self.ollama);
                let manifest = format!("{at}/manifests/{tag}");
                let document = client.json(&manifest, MANIFEST)?;
                let (digest, bytes) = layer(&document).map_err(|problem| {
                    let act = format!("cannot use `{}`: {problem}", shown(&manifest));
                    CliError::plain(act, exit::FAILED)
                })?;
                let name = match namespace.as_str() {
                    "library" => format!("{name}-{tag}.gguf"),
                    owner => format!("{owner}-{name}-{tag}.gguf"),
                };
                Ok(vec![Source {
                    name: file_name(&name)?,
                    url: format!("{at}/blobs/sha256:{digest}"),
                    bytes,
                    sha256: Some(digest),
                    validator: None,
                }])
            }
            Reference::Url(url) => {
                let name = shown(url).rsplit('/').next().unwrap_or_default();
                let name = file_name(&percent_decode_str(name).decode_utf8_lossy())?;
                let opened = client.patiently(|| client.open(url, 0, None))?;
                Ok(vec![Source {
                    name,
                    url: url.clone(),
                    bytes: opened.total,
                    sha256,
                    validator: opened.validator,
                }])
            }
        }
    }
}

/// A file of a repository.
#[derive(Clone, Debug)]
struct Listed {
    path: String,
    bytes: u64,
    sha256: Option<String>,
}

impl Listed {
    fn name(&self) -> &str {
        self.path.rsplit('/').next().unwrap_or_default()
    }

    fn source(self, at: &str) -> Result<Source, CliError> {
        let Some(sha256) = self.sha256.clone() else {
            let act = format!(
                "cannot verify `{}`: its hub lists no SHA-256 for it",
                self.path
            );
            return Err(CliError::plain(act, exit::FAILED)
                .with_hint("fetch it by its URL, without verification".to_owned()));
        };
        let leaves = |part: &str| matches!(part, "" | "." | "..");
        if self.path.split('/').any(leaves) {
            return Err(unusable_name(&self.path));
        }
        Ok(Source {
            name: file_name(self.name())?,
            url: format!("{at}/{}", utf8_percent_encode(&self.path, PATH)),
            bytes: self.bytes,
            sha256: Some(sha256),
            validator: None,
        })
    }
}

/// The GGUF files of a repository, by path.
fn listed(tree: &Value) -> Vec<Listed> {
    let files = tree.as_array().into_iter().flatten();
    let mut files: Vec<Listed> = files
        .filter_map(|file| {
            let path = file.get("path")?.as_str()?;
            let oid = file.pointer("/lfs/oid").and_then(Value::as_str);
            let bytes = file.pointer("/lfs/size").or_else(|| file.get("size"));
            is_gguf(path).then_some(Listed {
                path: path.to_owned(),
                bytes: bytes?.as_u64()?,
                sha256: oid.and_then(sha256),
            })
        })
        .collect();
    files.sort_by(|one, other| one.path.cmp(&other.path));
    files
}

/// The files of the chosen model.
fn choose(repository: &str, files: Vec<Listed>, choice: &Choice) -> Result<Vec<Listed>, CliError> {
    let mut models: BTreeMap<String, Vec<Listed>> = BTreeMap::new();
    for file in files {
        let model = match part(&file.path) {
            Some((stem, _, count)) => format!("{stem} of {count}"),
            None => file.path.clone(),
        };
        models.entry(model).or_default().push(file);
    }
    let wanted = match choice {
        Choice::Default => DEFAULT,
        Choice::Named(name) | Choice::Path(name) => name.as_str(),
    };
    let is_named = |files: &[Listed]| {
        let named = |file: &Listed| match choice {
            Choice::Path(path) => file.path == *path,
            _ => {
                let name = file.name();
                let stem = name.get(..name.len() - EXTENSION.len());
                name.eq_ignore_ascii_case(wanted)
                    || stem.is_some_and(|stem| stem.eq_ignore_ascii_case(wanted))
            }
        };
        files.iter().any(named)
    };
    let is_model = |files: &[Listed]| files.first().is_some_and(|file| !is_beside(file.name()));
    let is_of_type = |files: &[Listed]| {
        let name = files.first().map_or("", Listed::name);
        is_model(files) && has_type(name, wanted)
    };
    let by = |matches: &dyn Fn(&[Listed]) -> bool| -> Vec<Vec<Listed>> {
        let found = models.values().filter(|files| matches(files));
        found.cloned().collect()
    };
    let mut found = by(&is_named);
    if found.is_empty() && !matches!(choice, Choice::Path(_)) {
        found = by(&is_of_type);
    }
    if found.is_empty() && *choice == Choice::Default {
        // Without a choice, the only one.
        found = Some(by(&is_model))
            .filter(|models| models.len() == 1)
            .unwrap_or_default();
    }
    match (found.pop(), &found[..]) {
        (Some(files), []) => complete(files),
        (Some(last), others) => {
            let act = format!(
                "{} models of `{repository}` match `{wanted}`",
                others.len() + 1
            );
            Err(CliError::plain(act, exit::USAGE).with_hint(sizes(
                "write the name of one file behind a colon: ",
                others.iter().chain([&last]),
            )))
        }
        (None, _) if models.is_empty() => {
            let act = format!("`{repository}` has no .gguf file");
            let hint = "look for a repository of the same model whose name ends in GGUF";
            Err(CliError::plain(act, exit::FAILED).with_hint(hint.to_owned()))
        }
        (None, _) => {
            let act = format!("no model of `{repository}` matches `{wanted}`");
            Err(CliError::plain(act, exit::USAGE).with_hint(sizes("it has ", models.values())))
        }
    }
}

/// Models with their sizes, in a line.
fn sizes<'files>(text: &str, models: impl Iterator<Item = &'files Vec<Listed>>) -> String {
    let models: Vec<String> = models
        .filter_map(|files| {
            let bytes = files
                .iter()
                .fold(0u64, |sum, file| sum.saturating_add(file.bytes));
            Some(format!("{} ({})", files.first()?.path, Bytes::new(bytes)))
        })
        .collect();
    let more = match models.len().saturating_sub(LISTED_MAX) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let first: Vec<String> = models.into_iter().take(LISTED_MAX).collect();
    format!("{text}{}{more}", first.join(", "))
}

/// The parts of a model, if all are there.
fn complete(files: Vec<Listed>) -> Result<Vec<Listed>, CliError> {
    let Some((_, _, count)) = files.first().and_then(|file| part(&file.path)) else {
        return Ok(files);
    };
    let numbers = files.iter().filter_map(|file| Some(part(&file.path)?.1));
    if numbers.eq(1..=count) {
        return Ok(files);
    }
    let first = files.first().map_or("", Listed::name);
    let act = format!(
        "cannot fetch `{first}`: {} of its {count} parts are listed",
        files.len()
    );
    Err(CliError::plain(act, exit::FAILED))
}

/// Stem, number and count of a part of a model in several files.
fn part(path: &str) -> Option<(&str, u32, u32)> {
    let (rest, count) = path
        .get(..path.len().checked_sub(EXTENSION.len())?)?
        .rsplit_once("-of-")?;
    let (stem, number) = rest.rsplit_once('-')?;
    let five = |digits: &str| match digits.len() {
        5 => digits.parse().ok(),
        _ => None,
    };
    Some((stem, five(number)?, five(count)?))
}

/// Whether the name has this type of weights: `Q4_K_M` is not in `IQ4_K_M` and `Q4_K` not in `Q4_K_M`.
fn has_type(name: &str, kind: &str) -> bool {
    let (name, kind) = (name.to_ascii_lowercase(), kind.to_ascii_lowercase());
    name.match_indices(&kind).any(|(at, _)| {
        let before = name.get(..at).and_then(|text| text.chars().next_back());
        let behind = name
            .get(at + kind.len()..)
            .and_then(|text| text.chars().next());
        !before.is_some_and(char::is_alphanumeric)
            && !behind.is_some_and(|c| c.is_alphanumeric() || c == '_')
    })
}

/// Files that are no model on their own: the vision part, and the statistics of a quantization.
fn is_beside(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    name.contains("mmproj") || name.contains("imatrix")
}

fn is_gguf(path: &str) -> bool {
    let start = path.len().checked_sub(EXTENSION.len());
    start
        .and_then(|start| path.get(start..))
        .is_some_and(|end| end.eq_ignore_ascii_case(EXTENSION))
}

/// SHA-256 and length of the model in a manifest of Ollama.
fn layer(manifest: &Value) -> Result<(String, u64), &'static str> {
    let layers = manifest.get("layers").and_then(Value::as_array);
    let layers = layers.ok_or("it lists no layers")?;
    let of = |kind: &str| {
        let kind = format!("application/vnd.ollama.image.{kind}");
        layers
            .iter()
            .filter(move |layer| layer.get("mediaType").and_then(Value::as_str) == Some(&kind))
    };
    if of("adapter").next().is_some() {
        return Err("it has an adapter, and adapters are not supported");
    }
    let mut models = of("model");
    let model = models.next().ok_or("it has no GGUF file")?;
    if models.next().is_some() {
        return Err("it has several GGUF files, which are not supported");
    }
    let digest = model.get("digest").and_then(Value::as_str);
    let digest = digest.and_then(|digest| sha256(digest.strip_prefix("sha256:")?));
    let bytes = model.get("size").and_then(Value::as_u64);
    digest
        .zip(bytes)
        .ok_or("its model has no SHA-256 or no size")
}

/// The digest in lower case, if it is one.
pub(super) fn sha256(text: &str) -> Option<String> {
    let is_hex = text.len() == 64 && text.chars().all(|c| c.is_ascii_hexdigit());
    is_hex.then(|| text.to_ascii_lowercase())
}

/// A name that stays in its folder, is visible there, and leaves room for `.part.json`.
fn file_name(name: &str) -> Result<String, CliError> {
    let is_fine = !name.starts_with('.')
        && is_gguf(name)
        && name.len() <= NAME_BYTES_MAX
        && !name.contains(['/', '\\'])
        && !name.chars().any(char::is_control);
    if is_fine {
        Ok(name.to_owned())
    } else {
        Err(unusable_name(name))
    }
}

fn unusable_name(name: &str) -> CliError {
    let name: String = name.chars().take(80).collect();
    let act = format!("cannot store a file under the name `{name}`");
    CliError::plain(act, exit::FAILED).with_hint(format!(
        "it must end in .gguf, with at most {NAME_BYTES_MAX} bytes, and stay in its folder"
    ))
}

/// Type of a manifest.
const MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
/// What most repositories have, and what Hugging Face and Ollama choose.
const DEFAULT: &str = "Q4_K_M";
const EXTENSION: &str = ".gguf";
/// Linux allows 255.
const NAME_BYTES_MAX: usize = 240;
/// Models named in one hint (our choice).
const LISTED_MAX: usize = 40;
/// Bytes of a path that URLs do not have as they are.
const PATH: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'/')
    .remove(b'-')
    .remove(b'_')
    .remove(b'.')
    .remove(b'~');

#[cfg(test)]
mod tests {
    use super::*;

    fn files(paths: &[&str]) -> Vec<Listed> {
        let tree: Vec<Value> = paths
            .iter()
            .map(|path| {
                serde_json::json!({"type": "file", "path": path, "size": 3 << 20, "oid": "0",
                    "lfs": {"oid": "AB".repeat(32), "size": 3 << 20, "pointerSize": 135}})
            })
            .collect();
        listed(&Value::Array(tree))
    }

    fn chosen(paths: &[&str], choice: &Choice) -> Result<Vec<String>, String> {
        choose("o/r", files(paths), choice)
            .map(|files| files.into_iter().map(|file| file.path).collect())
            .map_err(|error| format!("{error}: {}", error.hint().unwrap_or_default()))
    }

    fn named(name: &str) -> Choice {
        Choice::Named(name.to_owned())
    }

    #[test]
    fn one_model_of_a_repository_is_chosen_by_its_type_or_its_name() {
        let paths = [
            "README.md",
            "m-IQ4_XS.gguf",
            "m-Q4_K_M.gguf",
            "m-Q4_K_S.gguf",
            "m.Q8_0.GGUF",
            "mmproj-Q4_K_M.gguf",
            "sub/m-q5_k_m.gguf",
        ];
        for (choice, expected) in [
            (Choice::Default, "m-Q4_K_M.gguf"),
            (named("q8_0"), "m.Q8_0.GGUF"),
            (named("Q5_K_M"), "sub/m-q5_k_m.gguf"),
            (named("M-Q4_K_S"), "m-Q4_K_S.gguf"),
            (named("mmproj-Q4_K_M.gguf"), "mmproj-Q4_K_M.gguf"),
            (
                Choice::Path("sub/m-q5_k_m.gguf".to_owned()),
                "sub/m-q5_k_m.gguf",
            ),
        ] {
            assert_eq!(chosen(&paths, &choice), Ok(vec![expected.to_owned()]));
        }
        for wanted in ["Q4_K", "4", "Q2_K"] {
            let error = chosen(&paths, &named(wanted)).unwrap_err();
            assert!(error.contains("m-IQ4_XS.gguf (3 MiB)"), "{wanted}: {error}");
        }
        let two = ["m-UD-Q4_K_M.gguf", "m-Q4_K_M.gguf"];
        assert_eq!(
            chosen(&two, &Choice::Default).unwrap_err(),
            "2 models of `o/r` match `Q4_K_M`: write the name of one file behind a colon: \
             m-Q4_K_M.gguf (3 MiB), m-UD-Q4_K_M.gguf (3 MiB)"
        );
        assert_eq!(
            chosen(&["m-f16.gguf", "mmproj.gguf"], &Choice::Default),
            Ok(vec!["m-f16.gguf".to_owned()])
        );
        assert!(chosen(&["m-f16.gguf", "m-f32.gguf"], &Choice::Default).is_err());
        assert!(chosen(&["model.safetensors"], &Choice::Default).is_err());
    }

    #[test]
    fn the_parts_of_a_model_are_fetched_together_or_not_at_all() {
        let path = |part: u32| format!("Q8_0/m-Q8_0-{part:05}-of-00003.gguf");
        let paths: Vec<String> = [2, 3, 1].map(path).to_vec();
        let paths: Vec<&str> = paths.iter().map(String::as_str).collect();
        let all = Ok([1, 2, 3].map(path).to_vec());
        assert_eq!(chosen(&paths, &named("Q8_0")), all);
        assert_eq!(chosen(&paths, &Choice::Path(path(2))), all);
        let error = chosen(&paths[..2], &named("Q8_0")).unwrap_err();
        assert!(error.contains("2 of its 3 parts"), "{error}");
    }

    #[test]
    fn a_name_that_leaves_its_folder_is_refused() {
        for path in [
            "../x.gguf",
            "a/../../x.gguf",
            "/x.gguf",
            "a//x.gguf",
            ".gguf",
            "a/.x.gguf",
            "a\\x.gguf",
            "a\nb.gguf",
        ] {
            let file = files(&[path]).pop().unwrap();
            assert!(file.source("http://hub").is_err(), "{path}");
        }
        let name = |length: usize| format!("{}.gguf", "x".repeat(length - 5));
        assert!(file_name(&name(NAME_BYTES_MAX)).is_ok());
        assert!(file_name(&name(NAME_BYTES_MAX + 1)).is_err());
        let file = files(&["a b/c#?%.gguf"]).pop().unwrap();
        let source = file.source("http://hub").unwrap();
        assert_eq!(source.name, "c#?%.gguf");
        assert_eq!(source.url, "http://hub/a%20b/c%23%3F%25.gguf");
    }

    #[test]
    fn a_manifest_names_one_model_with_its_digest() {
        let layer_of = |kind: &str, digest: &str| {
            serde_json::json!({"mediaType": format!("application/vnd.ollama.image.{kind}"),
                "digest": digest, "size": 7})
        };
        let digest = format!("sha256:{}", "cd".repeat(32));
        let (model, template) = (layer_of("model", &digest), layer_of("template", &digest));
        let layers = |layers: &[&Value]| layer(&serde_json::json!({"layers": layers}));
        assert_eq!(layers(&[&template, &model]), Ok(("cd".repeat(32), 7)));
        assert!(layers(&[&template]).is_err());
        assert!(layers(&[&model, &model]).is_err());
        assert!(layers(&[&model, &layer_of("adapter", &digest)]).is_err());
        for digest in ["sha256:../../x", "sha512:cd", &"cd".repeat(32)] {
            assert!(layers(&[&layer_of("model", digest)]).is_err());
        }
        assert!(layer(&Value::Null).is_err());
    }
}
