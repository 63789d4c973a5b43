//! Addresses of models: `hf.co/OWNER/REPO[:QUANT]`, `ollama.com/NAME[:TAG]`, or a URL.

use std::str::FromStr;

/// The address of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Reference {
    /// A repository of Hugging Face.
    HuggingFace {
        /// Its owner.
        owner: String,
        /// Its name.
        repository: String,
        /// Branch, tag or commit.
        revision: String,
        /// The file in it.
        choice: Choice,
    },
    /// A model of Ollama's registry.
    Ollama {
        /// Its owner; `library` for Ollama's own.
        namespace: String,
        /// Its name.
        name: String,
        /// Its tag.
        tag: String,
    },
    /// A file by its URL.
    Url(String),
}

/// Choice among the models of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Choice {
    /// None was given.
    Default,
    /// A quantization such as `Q4_K_M`, or the name of a file.
    Named(String),
    /// The path of a file.
    Path(String),
}

impl FromStr for Reference {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (scheme, rest) = match text.split_once("://") {
            Some((scheme @ ("http" | "https"), rest)) => (Some(scheme), rest),
            Some((scheme, _)) => {
                return Err(format!(
                    "`{scheme}` is not supported; use http, https, hf.co or ollama.com"
                ));
            }
            None => (None, text),
        };
        let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
        if host.contains('@') {
            return Err("a URL with a user name is not supported".to_owned());
        }
        match (scheme, host) {
            (_, "hf.co" | "huggingface.co") => hugging_face(path),
            (_, "ollama.com" | "registry.ollama.ai") => ollama(path),
            (Some(_), host) if !host.is_empty() => Ok(Self::Url(text.to_owned())),
            _ => Err(FORMS.to_owned()),
        }
    }
}

fn hugging_face(path: &str) -> Result<Reference, String> {
    let mut segments = path.trim_end_matches('/').splitn(5, '/');
    let mut next = || segments.next().unwrap_or_default();
    let (owner, repository, verb, revision, file) = (next(), next(), next(), next(), next());
    let (repository, choice, revision) = match (verb, revision, file) {
        ("", "", "") => match repository.split_once(':') {
            Some((repository, chosen)) => (repository, Choice::Named(named(chosen)?), "main"),
            None => (repository, Choice::Default, "main"),
        },
        // As the address of a file's page or download in a browser.
        ("resolve" | "blob", revision, file) if !file.is_empty() => {
            let file = file.split(['?', '#']).next().unwrap_or_default();
            let file = percent_encoding::percent_decode_str(file).decode_utf8();
            let file = file.map_err(|error| format!("its file name is not UTF-8: {error}"))?;
            (repository, Choice::Path(file.into_owned()), revision)
        }
        _ => return Err(FORMS.to_owned()),
    };
    Ok(Reference::HuggingFace {
        owner: named(owner)?,
        repository: named(repository)?,
        revision: named(revision)?,
        choice,
    })
}

fn ollama(path: &str) -> Result<Reference, String> {
    let path = path.trim_end_matches('/');
    let (path, tag) = path.split_once(':').unwrap_or((path, "latest"));
    let (namespace, name) = path.split_once('/').unwrap_or(("library", path));
    Ok(Reference::Ollama {
        namespace: named(namespace)?,
        name: named(name)?,
        tag: named(tag)?,
    })
}

/// A part of an address that can neither leave its folder nor end the path.
fn named(part: &str) -> Result<String, String> {
    let is_fine = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    if part.is_empty() {
        return Err(FORMS.to_owned());
    }
    if part.starts_with('.') || part.len() > PART_BYTES_MAX || !part.chars().all(is_fine) {
        return Err(format!(
            "`{part}` must be at most {PART_BYTES_MAX} letters, digits, `-`, `_` and `.`, with no `.` in front"
        ));
    }
    Ok(part.to_owned())
}

const FORMS: &str =
    "not the address of a model; write hf.co/OWNER/REPO[:QUANT], ollama.com/NAME[:TAG] or a URL";

/// Hugging Face allows 96 bytes for a name; files of models have longer ones.
const PART_BYTES_MAX: usize = 128;

#[cfg(test)]
mod tests {
    use super::*;

    fn hugging_face(choice: Choice, revision: &str) -> Reference {
        Reference::HuggingFace {
            owner: "Qwen".to_owned(),
            repository: "Qwen3-4B-GGUF".to_owned(),
            revision: revision.to_owned(),
            choice,
        }
    }

    #[test]
    fn addresses_are_read_as_people_write_and_copy_them() {
        let named = |name: &str| Choice::Named(name.to_owned());
        let path = |path: &str| Choice::Path(path.to_owned());
        for (text, expected) in [
            (
                "hf.co/Qwen/Qwen3-4B-GGUF",
                hugging_face(Choice::Default, "main"),
            ),
            (
                "https://huggingface.co/Qwen/Qwen3-4B-GGUF/",
                hugging_face(Choice::Default, "main"),
            ),
            (
                "hf.co/Qwen/Qwen3-4B-GGUF:Q8_0",
                hugging_face(named("Q8_0"), "main"),
            ),
            (
                "https://huggingface.co/Qwen/Qwen3-4B-GGUF/resolve/main/a/b%20c.gguf?download=true",
                hugging_face(path("a/b c.gguf"), "main"),
            ),
            (
                "https://huggingface.co/Qwen/Qwen3-4B-GGUF/blob/v1/a.gguf",
                hugging_face(path("a.gguf"), "v1"),
            ),
        ] {
            assert_eq!(text.parse(), Ok(expected), "{text}");
        }
        for (text, namespace, tag) in [
            ("ollama.com/smollm2", "library", "latest"),
            ("https://ollama.com/library/smollm2:135m", "library", "135m"),
            ("registry.ollama.ai/me/smollm2:q4", "me", "q4"),
        ] {
            let expected = Reference::Ollama {
                namespace: namespace.to_owned(),
                name: "smollm2".to_owned(),
                tag: tag.to_owned(),
            };
            assert_eq!(text.parse(), Ok(expected), "{text}");
        }
        let url = "http://10.0.0.1:8000/models/a.gguf";
        assert_eq!(url.parse(), Ok(Reference::Url(url.to_owned())));
    }

    #[test]
    fn an_address_that_leaves_its_place_is_refused() {
        for text in [
            "",
            "model.gguf",
            "/etc/passwd",
            "file:///etc/passwd",
            "https://",
            "https://me:secret@example.org/a.gguf",
            "hf.co",
            "hf.co/only",
            "hf.co/../..",
            "hf.co/a/b/c",
            "hf.co/a/b:../c",
            "hf.co/a/b:",
            "hf.co/a b/c",
            "hf.co/a/b/resolve/main/",
            "ollama.com/",
            "ollama.com/../x",
            "ollama.com/a/b/c",
            "ollama.com/a:b:c",
            "ollama.com/a?b",
        ] {
            assert!(text.parse::<Reference>().is_err(), "{text}");
        }
        let long = format!("hf.co/a/{}", "b".repeat(PART_BYTES_MAX + 1));
        assert!(long.parse::<Reference>().is_err());
        let longest = format!("hf.co/a/{}", "b".repeat(PART_BYTES_MAX));
        assert!(longest.parse::<Reference>().is_ok());
    }
}
