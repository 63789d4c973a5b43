//! The rules by which families of models cut a text before pairs are merged.

use std::str::FromStr;

use tokenizers::{
    PreTokenizerWrapper, SplitDelimiterBehavior,
    pre_tokenizers::{
        byte_level::ByteLevel,
        sequence::Sequence,
        split::{Split, SplitPattern},
    },
};

use super::{super::gguf::Header, KEY_MODEL, KEY_PRE, TokenizerError};

/// The rules by which a text is cut before pairs are merged.
///
/// The expressions are those that the models were published with, in the form that llama.cpp gives them
/// (`src/llama-vocab.cpp`); spelling them differently changes what a model sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rules {
    /// What old files without rules of their own are read with.
    Default,
    Gpt2,
    Llama3,
    Qwen2,
    Qwen35,
    /// GPT-2 after single digits were split off.
    SmolLm,
    /// As Llama 3, but merges always apply.
    Smaug,
}

impl FromStr for Rules {
    type Err = TokenizerError;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Ok(match name {
            "default" => Self::Default,
            "gpt-2" | "gpt2" => Self::Gpt2,
            "llama3" | "llama-v3" | "llama-bpe" | "falcon3" | "falcon-h1" | "lfm2" | "pixtral" => Self::Llama3,
            "qwen2" | "deepseek-r1-qwen" | "megrez" => Self::Qwen2,
            "qwen35" => Self::Qwen35,
            "smollm" | "starcoder" | "refact" | "command-r" => Self::SmolLm,
            "smaug-bpe" | "dbrx" => Self::Smaug,
            _ => return Err(TokenizerError::UnknownPre { pre: name.to_owned() }),
        })
    }
}

impl Rules {
    /// The rules that a header names.
    pub(super) fn of(header: &Header) -> Result<Self, TokenizerError> {
        let kind = header
            .string(KEY_MODEL)
            .ok_or(TokenizerError::Missing { key: KEY_MODEL })?;
        if kind != "gpt2" {
            return Err(TokenizerError::UnknownModel { model: kind.to_owned() });
        }
        header
            .string(KEY_PRE)
            .ok_or(TokenizerError::Missing { key: KEY_PRE })?
            .parse()
    }

    const fn expressions(self) -> &'static [&'static str] {
        match self {
            Self::Default => &[
                r"[\p{P}\$\+<=>\^~\|]+",
                r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
                r"\p{N}+",
                "[0-9][0-9][0-9]",
            ],
            Self::Gpt2 => &[r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"],
            Self::Llama3 | Self::Smaug => &[concat!(
                r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])",
                r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            )],
            Self::Qwen2 => &[concat!(
                r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])",
                r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            )],
            Self::Qwen35 => &[concat!(
                r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])",
                r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            )],
            Self::SmolLm => &[
                r"\p{N}",
                r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
            ],
        }
    }

    /// Whether a word that is a token stays whole even when merges lead elsewhere.
    pub(super) const fn ignores_merges(self) -> bool {
        matches!(self, Self::Llama3)
    }

    /// Whether a sequence begins with a token of its own when the file does not say.
    pub(super) const fn adds_bos(self) -> bool {
        matches!(self, Self::Llama3)
    }

    /// Whether texts are composed (Unicode NFC) first, as the publishers' `tokenizer.json` has it. llama.cpp does not;
    /// it makes a difference for decomposed accents only.
    pub(super) const fn normalises(self) -> bool {
        matches!(self, Self::Qwen2 | Self::Qwen35)
    }

    pub(super) fn splitter(self) -> Result<PreTokenizerWrapper, TokenizerError> {
        let mut steps = Vec::new();
        for expression in self.expressions() {
            let split = Split::new(
                SplitPattern::Regex((*expression).to_owned()),
                SplitDelimiterBehavior::Isolated,
                false,
            )
            .map_err(|error| TokenizerError::Library {
                message: error.to_string(),
            })?;
            steps.push(PreTokenizerWrapper::from(split));
        }
        steps.push(ByteLevel::new(false, false, false).into());
        Ok(Sequence::new(steps).into())
    }
}
