//! Errors of a tokenizer.

use super::terms::{KEY_MODEL, KEY_PRE, KEY_TOKENS};

/// Why a model file's tokenizer cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenizerError {
    /// An entry makes no sense.
    #[error("cannot use the tokenizer: `{key}`: {problem}")]
    Invalid {
        /// Its key.
        key: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// The library refused the tables.
    #[error("cannot use the tokenizer: {message}")]
    Library {
        /// What it said.
        message: String,
    },
    /// An entry is not there, or of another type.
    #[error("cannot use the tokenizer: `{key}` is missing or of another type")]
    Missing {
        /// Its key.
        key: &'static str,
    },
    /// A text that is longer than what any vocabulary has.
    #[error(
        "cannot use the tokenizer: token {token} of `{KEY_TOKENS}` has {bytes} bytes, of at most {limit}"
    )]
    PieceTooLong {
        /// The token.
        token: u32,
        /// The length of its text in the file.
        bytes: usize,
        /// The longest that is taken.
        limit: usize,
    },
    /// Another way of making tokens.
    #[error(
        "cannot use the tokenizer: `{KEY_MODEL}` is `{model}`; supported are `gpt2` and `llama`"
    )]
    UnknownModel {
        /// What the file says.
        model: String,
    },
    /// Unknown rules; guessing them would give a model that answers badly.
    #[error("cannot use the tokenizer: `{KEY_PRE}` is `{pre}`; supported are {known}")]
    UnknownPre {
        /// What the file says.
        pre: String,
        /// Those that are.
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
    #[must_use]
    pub const fn hint(&self) -> &'static str {
        match self {
            Self::UnknownModel { .. } | Self::UnknownPre { .. } => {
                "use a model of the families Qwen, Llama, Gemma 3 or Phi"
            }
            Self::Invalid { .. }
            | Self::Library { .. }
            | Self::Missing { .. }
            | Self::PieceTooLong { .. } => "convert the model again with a current llama.cpp",
        }
    }
}

/// Why a text cannot be turned into tokens.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    /// The library failed.
    #[error("the tokenizer failed: {message}")]
    Library {
        /// What it said.
        message: String,
    },
}
