//! Pre-tokenizer rules of model families.

use std::{collections::BTreeMap, str::FromStr};

use tokenizers::{
    PreTokenizerWrapper, SplitDelimiterBehavior,
    pre_tokenizers::{
        byte_level::ByteLevel,
        sequence::Sequence,
        split::{Split, SplitPattern},
    },
};

use super::{
    error::TokenizerError,
    sentence_pieces,
    terms::{KEY_MODEL, KEY_PRE, Order, PIECE_BYTES_MAX, TYPE_BYTE},
};
use crate::gguf::Header;

/// Encoding scheme of a vocabulary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scheme {
    /// Tokens are bytes, written as characters (GPT-2 and its descendants).
    ByteLevel(Rules),
    /// Tokens are text with a mark for spaces, with single bytes for text without tokens.
    SentencePieces(Order),
}

impl Scheme {
    /// The scheme named by a header.
    pub(super) fn of(header: &Header) -> Result<Self, TokenizerError> {
        let kind = header
            .string(KEY_MODEL)
            .ok_or(TokenizerError::Missing { key: KEY_MODEL })?;
        match kind {
            "gpt2" => Ok(Self::ByteLevel(
                header
                    .string(KEY_PRE)
                    .ok_or(TokenizerError::Missing { key: KEY_PRE })?
                    .parse()?,
            )),
            "gemma4" => Ok(Self::SentencePieces(Order::Merges)),
            // As Ollama's converter writes it.
            "llama" if header.string(KEY_PRE) == Some("gemma4") => {
                Ok(Self::SentencePieces(Order::Merges))
            }
            // Files of this kind contain `default` or nothing: there is only one rule.
            "llama" => Ok(Self::SentencePieces(Order::Scores)),
            other => Err(TokenizerError::UnknownModel {
                model: other.to_owned(),
            }),
        }
    }

    /// Length limit of a token's text, control tokens excepted.
    pub(super) const fn piece_bytes_max(self) -> usize {
        match self {
            Self::ByteLevel(_) => BYTE_LEVEL_PIECE_MAX,
            Self::SentencePieces(_) => PIECE_BYTES_MAX,
        }
    }

    /// Whether a sequence begins with a special token; `stated` is the file's setting.
    pub(super) fn adds_bos(self, stated: Option<bool>) -> bool {
        match self {
            Self::ByteLevel(rules) => stated.unwrap_or(rules.adds_bos()),
            // Converters have denied it although Gemma 4 needs it.
            Self::SentencePieces(Order::Merges) => true,
            Self::SentencePieces(Order::Scores) => stated.unwrap_or(true),
        }
    }

    /// Whether a text is a control token that is part of an answer, whatever kind the file states.
    pub(super) fn shows(self, text: &str) -> bool {
        self == Self::SentencePieces(Order::Merges) && SHOWN.contains(&text)
    }

    /// Whether a text is one token in any position: runs of line ends, which no piece joins with other text.
    pub(super) fn keeps_whole(self, text: &str) -> bool {
        self == Self::SentencePieces(Order::Merges) && text.bytes().all(|byte| byte == b'\n')
    }

    /// The bytes of an ordinary token.
    pub(super) fn bytes(
        self,
        text: &str,
        kind: Option<i32>,
        alphabet: &BTreeMap<char, u8>,
    ) -> Vec<u8> {
        match self {
            Self::SentencePieces(_) => sentence_pieces::bytes(text, kind == Some(TYPE_BYTE)),
            Self::ByteLevel(_) => {
                // A character outside the alphabet represents itself, as in llama.cpp.
                let mut bytes = Vec::with_capacity(text.len());
                for character in text.chars() {
                    match alphabet.get(&character) {
                        Some(&byte) => bytes.push(byte),
                        None => bytes.extend(character.encode_utf8(&mut [0; 4]).bytes()),
                    }
                }
                bytes
            }
        }
    }
}

/// Rules that split a text before pairs are merged.
///
/// The expressions are those of the published models, in llama.cpp's form (`src/llama-vocab.cpp`); another spelling
/// would change the model's input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rules {
    /// For old files without rules.
    Default,
    Gpt2,
    /// Words split by capitals; Phi-4-mini.
    Gpt4o,
    Llama3,
    Qwen2,
    Qwen35,
    /// GPT-2 after single digits are split off.
    SmolLm,
    /// As Llama 3, but merges always apply.
    Smaug,
    /// Rules of Mistral.
    Tekken,
}

impl FromStr for Rules {
    type Err = TokenizerError;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        NAMES
            .iter()
            .find(|(known, _)| *known == name)
            .map(|&(_, rules)| rules)
            .ok_or_else(|| TokenizerError::UnknownPre {
                pre: name.to_owned(),
                known: known(),
            })
    }
}

/// Values of `tokenizer.ggml.pre`, as in llama.cpp.
const NAMES: &[(&str, Rules)] = &[
    ("command-r", Rules::SmolLm),
    ("dbrx", Rules::Smaug),
    ("deepseek-r1-qwen", Rules::Qwen2),
    ("default", Rules::Default),
    ("falcon-h1", Rules::Llama3),
    ("falcon3", Rules::Llama3),
    ("gpt-2", Rules::Gpt2),
    ("gpt-4o", Rules::Gpt4o),
    ("gpt2", Rules::Gpt2),
    ("lfm2", Rules::Llama3),
    ("llama-bpe", Rules::Llama3),
    ("llama-v3", Rules::Llama3),
    ("llama3", Rules::Llama3),
    ("llama4", Rules::Gpt4o),
    ("megrez", Rules::Qwen2),
    ("olmo", Rules::Gpt2),
    ("pixtral", Rules::Llama3),
    ("qwen2", Rules::Qwen2),
    ("qwen35", Rules::Qwen35),
    ("refact", Rules::SmolLm),
    ("smaug-bpe", Rules::Smaug),
    ("smollm", Rules::SmolLm),
    ("stablelm2", Rules::Qwen2),
    ("starcoder", Rules::SmolLm),
    ("tekken", Rules::Tekken),
];

/// The names of all rules, for errors.
fn known() -> String {
    let names: Vec<_> = NAMES.iter().map(|(name, _)| format!("`{name}`")).collect();
    match names.split_last() {
        Some((last, others)) => format!("{} and {last}", others.join(", ")),
        None => String::new(),
    }
}

impl Rules {
    const fn expressions(self) -> &'static [&'static str] {
        match self {
            Self::Default => &[
                r"[\p{P}\$\+<=>\^~\|]+",
                r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
                r"\p{N}+",
                "[0-9][0-9][0-9]",
            ],
            Self::Gpt2 => {
                &[r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"]
            }
            Self::Gpt4o => &[concat!(
                r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
                r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
                r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            )],
            Self::Tekken => &[concat!(
                r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
                r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
                r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            )],
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

    /// Whether a word that is a token stays whole even if its merges lead elsewhere.
    pub(super) const fn ignores_merges(self) -> bool {
        matches!(self, Self::Llama3 | Self::Tekken)
    }

    /// Whether a sequence begins with a special token, unless the file sets it.
    pub(super) const fn adds_bos(self) -> bool {
        matches!(self, Self::Llama3 | Self::Tekken)
    }

    /// Whether texts are first composed (Unicode NFC), by the publishers' `tokenizer.json`. llama.cpp does not; it
    /// matters for decomposed accents only.
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

/// Texts around the thoughts, calls and strings of Gemma 4's answers, as in llama.cpp's converter.
const SHOWN: [&str; 6] = [
    "<|channel>",
    "<channel|>",
    "<|tool_call>",
    "<tool_call|>",
    "<tool_response|>",
    "<|\"|>",
];

/// The grammar library recurses into a token byte by byte. GPT-2, Llama 3 and Qwen have texts of up to 256 bytes in the
/// file, Command R one of 1024 (512 spaces, each written with two bytes).
const BYTE_LEVEL_PIECE_MAX: usize = 2048;
