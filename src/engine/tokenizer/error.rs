//! Errors of a tokenizer.

use super::terms::{KEY_MODEL, KEY_PRE, KEY_TOKENS};

/// Reason why a model file's tokenizer cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenizerError {
    /// An invalid entry.
    #[error("cannot use the tokenizer: `{key}`: {problem}")]
    Invalid {
        /// Its key.
        key: &'static str,
        /// The fault.
        problem: String,
    },
    /// The library refused the tables.
    #[error("cannot use the tokenizer: {message}")]
    Library {
        /// Message of the library.
        message: String,
    },
    /// A missing entry, or one of another type.
    #[error("cannot use the tokenizer: `{key}` is missing or of another type")]
    Missing {
        /// Its key.
        key: &'static str,
    },
    /// A text longer than in any known vocabulary.
    #[error(
        "cannot use the tokenizer: token {token} of `{KEY_TOKENS}` has {bytes} bytes, of at most {limit}"
    )]
    PieceTooLong {
        /// The token.
        token: u32,
        /// The length of its text in the file.
        bytes: usize,
        /// The length limit.
        limit: usize,
    },
    /// An unsupported tokenizer model.
    #[error(
        "cannot use the tokenizer: `{KEY_MODEL}` is `{model}`; supported are `gemma4`, `gpt2` and `llama`"
    )]
    UnknownModel {
        /// Value in the file.
        model: String,
    },
    /// A vocabulary of another kind in an encoder.
    #[error(
        "cannot use the tokenizer: `{KEY_MODEL}` is `{model}`; encoders are supported with `bert`"
    )]
    NotWordPieces {
        /// Value in the file.
        model: String,
    },
    /// Unknown pre-tokenizer rules; with guessed ones the model would answer badly.
    #[error("cannot use the tokenizer: `{KEY_PRE}` is `{pre}`; supported are {known}")]
    UnknownPre {
        /// Value in the file.
        pre: String,
        /// The supported ones.
        known: String,
    },
}

impl TokenizerError {
    pub(super) fn library(error: &dyn std::fmt::Display) -> Self {
        Self::Library {
            message: error.to_string(),
        }
    }

    /// The remedy.
    pub const fn hint(&self) -> &'static str {
        match self {
            Self::UnknownModel { .. } | Self::UnknownPre { .. } => {
                "use a model of the families Qwen, Llama, Gemma or Phi"
            }
            Self::NotWordPieces { .. } => {
                "use an encoder with word pieces, for example all-MiniLM-L6-v2"
            }
            Self::Invalid { .. }
            | Self::Library { .. }
            | Self::Missing { .. }
            | Self::PieceTooLong { .. } => "convert the model again with a current llama.cpp",
        }
    }
}

/// Reason why a text cannot be tokenized.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    /// The library failed.
    #[error("the tokenizer failed: {message}")]
    Library {
        /// Message of the library.
        message: String,
    },
}
