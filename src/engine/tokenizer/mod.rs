//! Tokenizer from the tables of the model file.
//!
//! The crate `tokenizers` implements byte-pair encoding; this module checks the file's tables and passes them on. The
//! existing reader (`candle_core`) falls back to GPT-2's rules for unknown pre-tokenizers, so that the model answers,
//! but badly. Here an unknown one is an error that names it.
//!
//! # Control tokens
//!
//! Texts such as `<|im_end|>` steer the model, so they may come only from the chat template and never from user text.
//! Plain encoding ([`Tokenizer::encode`]) therefore has no control tokens in its tables. [`Tokenizer::encode_rendered`]
//! recognises them, except where a mark in the text forbids it; [`chat`](super::chat) sets such marks in all text that
//! is not from the template.

use std::collections::{BTreeMap, BTreeSet};

use tokenizers::{NormalizerWrapper, TokenizerImpl, models::bpe::BPE, normalizers::unicode::NFC};

use self::{
    literals::Fragment,
    merges::{merge_lines, merges},
    rules::{Rules, Scheme},
    segments::{Cut, PAIR_BYTES, Segments},
    terms::{
        Bpe, KEY_ADD_BOS, KEY_BOS, KEY_EOM, KEY_EOS, KEY_EOT, KEY_MERGES, KEY_SPACE_FIRST,
        KEY_SUPPRESSED, KEY_TOKENS, KEY_TYPES, Order, TYPE_CONTROL, TYPE_UNKNOWN,
        TYPE_USER_DEFINED, WORDS_REMEMBERED,
    },
};
use super::gguf::{Header, StringTable};
use cotenant_units::Bytes;

mod error;
mod literals;
mod merges;
mod pieces;
mod rules;
mod segments;
mod sentence_pieces;
mod stream;
mod terms;
mod word_pieces;

pub use error::{EncodeError, TokenizerError};
pub(super) use pieces::Pieces;

pub(super) use literals::Literals;
pub use stream::TextStream;
pub use terms::byte_symbol;
pub(super) use word_pieces::WordPieces;

/// The vocabulary of a model and its rules.
pub struct Tokenizer {
    bpe: Bpe,
    pieces: Pieces,
    control: Literals,
    user_defined: Literals,
    /// Single tokens of an answer that have text.
    shown: Literals,
    ends: BTreeSet<u32>,
    suppressed: Vec<u32>,
    bos: Option<u32>,
    add_bos: bool,
    /// Positions at which long texts may be split.
    cut: Cut,
    /// Whether an implicit space precedes a text, as in SentencePiece.
    space_first: bool,
    /// Tokens that absorb the white space after them.
    swallowing: BTreeSet<u32>,
}

impl Tokenizer {
    /// Builds the tokenizer of a model file.
    ///
    /// # Errors
    /// Tables are missing, contradict each other, or are of an unsupported kind.
    pub fn from_header(header: &Header) -> Result<Self, TokenizerError> {
        let Tables {
            scheme,
            texts,
            types,
            bos,
            mut ends,
            in_channels,
        } = Tables::of(header)?;
        let mut vocabulary = tokenizers::models::bpe::Vocab::default();
        let mut pieces = Pieces::default();
        let mut control = Literals::default();
        let mut user_defined = Literals::default();
        let mut shown = Literals::default();
        let bytes_of: BTreeMap<char, u8> = (0..=u8::MAX)
            .map(|byte| (byte_symbol(byte), byte))
            .collect();
        for (token, text) in (0u32..).zip(texts.iter()) {
            if END_TEXTS.contains(&text) {
                ends.insert(token);
            }
            if in_channels && text == MESSAGE_END {
                ends.remove(&token);
            }
            let kind = usize::try_from(token)
                .ok()
                .and_then(|at| types.get(at))
                .copied();
            let is_shown = scheme.shows(text) || in_channels && CHANNEL_TEXTS.contains(&text);
            if is_shown && !ends.contains(&token) {
                pieces.push(text.bytes());
                control.insert(text, token);
                shown.insert(text, token);
                continue;
            }
            if ends.contains(&token)
                || bos == Some(token)
                || matches!(kind, Some(TYPE_UNKNOWN | TYPE_CONTROL))
            {
                pieces.push(std::iter::empty());
                control.insert(text, token);
                continue;
            }
            check_length(scheme, token, text, kind)?;
            if kind == Some(TYPE_USER_DEFINED) || scheme.keeps_whole(text) {
                pieces.push(text.bytes());
                user_defined.insert(text, token);
                shown.insert(text, token);
            } else {
                pieces.push(scheme.bytes(text, kind, &bytes_of).into_iter());
            }
            vocabulary.insert(text.to_owned(), token);
        }
        let swallowing = swallowing(header, &control, &user_defined);
        let (bpe, cut) = match scheme {
            Scheme::ByteLevel(rules) => (byte_level(header, rules, vocabulary)?, Cut::ByRules),
            Scheme::SentencePieces(order) => sentence_pieces::build(header, order, vocabulary)?,
        };
        Ok(Self {
            bpe,
            pieces,
            control: control.sorted(),
            user_defined: user_defined.sorted(),
            shown: shown.sorted(),
            ends,
            suppressed: suppressed(header),
            bos,
            add_bos: scheme.adds_bos(header.bool(KEY_ADD_BOS)) && bos.is_some(),
            cut,
            space_first: scheme == Scheme::SentencePieces(Order::Scores)
                && header.bool(KEY_SPACE_FIRST).unwrap_or(true),
            swallowing,
        })
    }

    /// Rejects tables from which no tokenizer can be built, without building it.
    ///
    /// # Errors
    /// As [`Self::from_header`], except for rejections by the library.
    pub fn check(header: &Header) -> Result<(), TokenizerError> {
        let Tables {
            scheme,
            texts,
            types,
            bos: _,
            ends: _,
            in_channels: _,
        } = Tables::of(header)?;
        let kinds = types
            .iter()
            .copied()
            .map(Some)
            .chain(std::iter::repeat(None));
        for ((token, text), kind) in (0u32..).zip(texts.iter()).zip(kinds) {
            check_length(scheme, token, text, kind)?;
        }
        match scheme {
            Scheme::ByteLevel(_) | Scheme::SentencePieces(Order::Merges) => {
                merge_lines(header)?.try_for_each(|merge| merge.map(drop))
            }
            Scheme::SentencePieces(Order::Scores) => sentence_pieces::scores(header).map(drop),
        }
    }

    /// Heap memory of a header's tokenizer, within a few percent: the library's hash tables, whose sizes are powers of
    /// two, two texts per token, and the bytes of each token.
    pub fn heap_bytes(header: &Header) -> Bytes {
        let Some(texts) = header.strings(KEY_TOKENS) else {
            return Bytes::ZERO;
        };
        let merges = match header.strings(KEY_MERGES) {
            Some(merges) => merges.len(),
            None => sentence_pieces::merges_of(texts),
        };
        let cuts = match Scheme::of(header) {
            Ok(Scheme::SentencePieces(_)) => PAIR_BYTES,
            _ => 0,
        };
        // hashbrown uses at most seven eighths of the buckets, each with one control byte.
        let buckets = |entries: usize| (entries * 8 / 7 + 1).next_power_of_two();
        let by_text = buckets(texts.len()) * (size_of::<(String, u32)>() + 1);
        let by_token = buckets(texts.len()) * (size_of::<(u32, String)>() + 1);
        let by_pair = buckets(merges) * (size_of::<((u32, u32), (u32, u32))>() + 1);
        // glibc: eight bytes more, in steps of 16 from 32 on.
        let heap = |text: &str| (text.len() + 8).max(32).next_multiple_of(16);
        let texts: usize = texts
            .iter()
            .map(|text| 2 * heap(text) + text.len() + size_of::<u32>())
            .sum();
        Bytes::of_len(by_text + by_token + by_pair + texts + cuts)
    }

    /// Tokenizes a text in which control tokens have no meaning.
    ///
    /// Texts that the model file lists as user-defined, such as `<think>`, are single tokens, as in every other reader
    /// of such a file.
    ///
    /// # Errors
    /// The library fails.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, EncodeError> {
        let mut tokens = Vec::new();
        self.encode_plain(text, None, &mut tokens)?;
        Ok(tokens)
    }

    /// Tokens of forced bytes, up to the first that may merge with following text.
    pub(super) fn encode_ahead(&self, bytes: &[u8]) -> Vec<u32> {
        let mut tokens = Vec::new();
        let text = bytes.utf8_chunks().next().map_or("", |chunk| chunk.valid());
        for fragment in self.shown.split(text) {
            match fragment {
                Fragment::Token(token) => tokens.push(token),
                Fragment::Text(text) => {
                    if self
                        .encode_in_segments(text, SEGMENT_BYTES, &mut tokens)
                        .is_err()
                    {
                        return Vec::new();
                    }
                }
            }
        }
        tokens.pop();
        let said: Vec<u8> = tokens
            .iter()
            .flat_map(|&token| self.bytes(token))
            .copied()
            .collect();
        if !bytes.starts_with(&said) {
            tokens.clear();
        }
        tokens
    }

    /// Tokens of a rendered template: control tokens are recognised unless `mark` is among their characters. The marks
    /// themselves are dropped.
    ///
    /// # Errors
    /// The library fails.
    pub fn encode_rendered(&self, text: &str, mark: Option<char>) -> Result<Vec<u32>, EncodeError> {
        let mut tokens = Vec::new();
        let mut before = None;
        for fragment in self.control.split(text) {
            match (fragment, mark) {
                (Fragment::Token(token), _) => {
                    tokens.push(token);
                    before = Some(token);
                    continue;
                }
                (Fragment::Text(text), None) => self.encode_plain(text, before, &mut tokens)?,
                (Fragment::Text(text), Some(mark)) => {
                    self.encode_plain(&text.replace(mark, ""), before, &mut tokens)?;
                }
            }
        }
        Ok(tokens)
    }

    /// Prepends the token that begins each sequence, if the model uses one and it is missing.
    pub fn begin(&self, tokens: &mut Vec<u32>) {
        if let Some(bos) = self.bos
            && self.add_bos
            && tokens.first() != Some(&bos)
        {
            tokens.insert(0, bos);
        }
    }

    /// The bytes of a token; empty for control tokens and unknown ones. A character may span several tokens:
    /// [`TextStream`] joins them.
    pub fn bytes(&self, token: u32) -> &[u8] {
        self.pieces.get(token)
    }

    /// Text of a complete token sequence; invalid bytes become `U+FFFD`.
    pub fn decode(&self, tokens: &[u32]) -> String {
        let mut stream = TextStream::default();
        let mut text = String::new();
        for &token in tokens {
            text.push_str(&stream.push(self.bytes(token)));
        }
        text.push_str(&stream.finish());
        text
    }

    /// Whether the model ends its answer with `token`.
    pub fn is_end(&self, token: u32) -> bool {
        self.ends.contains(&token)
    }

    /// The tokens that end an answer.
    pub fn ends(&self) -> impl Iterator<Item = u32> {
        self.ends.iter().copied()
    }

    /// Tokens that the model's publisher rules out in answers.
    pub(super) fn suppressed(&self) -> &[u32] {
        &self.suppressed
    }

    /// Control tokens around messages in channels, if answers consist of them.
    pub(super) fn channel_tokens(&self) -> impl Iterator<Item = u32> {
        CHANNEL_TEXTS
            .iter()
            .filter_map(|text| self.shown.find(text))
    }

    /// The bytes of all tokens.
    pub(super) const fn pieces(&self) -> &Pieces {
        &self.pieces
    }

    /// The number of tokens.
    pub fn vocabulary(&self) -> u32 {
        self.pieces.len()
    }

    /// The token that begins a sequence, if the file names one.
    pub const fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// Whether sequences begin with [`Self::bos`].
    pub const fn adds_bos(&self) -> bool {
        self.add_bos
    }

    /// The control token with this text.
    pub fn control(&self, text: &str) -> Option<u32> {
        self.control.find(text)
    }

    /// The texts of all control tokens.
    pub(super) const fn control_texts(&self) -> &Literals {
        &self.control
    }

    /// Tokens of a text after the control token `before`.
    fn encode_plain(
        &self,
        text: &str,
        mut before: Option<u32>,
        tokens: &mut Vec<u32>,
    ) -> Result<(), EncodeError> {
        for fragment in self.user_defined.split(text) {
            match fragment {
                Fragment::Token(token) => {
                    tokens.push(token);
                    before = Some(token);
                }
                Fragment::Text(text) => {
                    let text = match before {
                        Some(token) if self.swallowing.contains(&token) => {
                            text.trim_start_matches(|character: char| {
                                character.is_ascii_whitespace() || character == '\u{b}'
                            })
                        }
                        _ => text,
                    };
                    if self.space_first && !text.is_empty() {
                        self.encode_in_segments(&format!(" {text}"), SEGMENT_BYTES, tokens)?;
                    } else {
                        self.encode_in_segments(text, SEGMENT_BYTES, tokens)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// The library needs some 140 bytes of working memory per byte of text, so it receives segments.
    fn encode_in_segments(
        &self,
        text: &str,
        target: usize,
        tokens: &mut Vec<u32>,
    ) -> Result<(), EncodeError> {
        for segment in (Segments {
            rest: text,
            target,
            cut: &self.cut,
        }) {
            let encoding =
                self.bpe
                    .encode_fast(segment, false)
                    .map_err(|error| EncodeError::Library {
                        message: error.to_string(),
                    })?;
            tokens.extend_from_slice(encoding.get_ids());
        }
        Ok(())
    }
}

/// Refuses texts that occur in no vocabulary, and a few of which would make the work unbounded. Control tokens may have
/// any length: they are not decomposed.
const fn check_length(
    scheme: Scheme,
    token: u32,
    text: &str,
    kind: Option<i32>,
) -> Result<(), TokenizerError> {
    let (bytes, limit) = (text.len(), scheme.piece_bytes_max());
    if bytes <= limit || matches!(kind, Some(TYPE_UNKNOWN | TYPE_CONTROL)) {
        return Ok(());
    }
    Err(TokenizerError::PieceTooLong {
        token,
        bytes,
        limit,
    })
}

/// Token tables of a header.
struct Tables<'header> {
    scheme: Scheme,
    texts: &'header StringTable,
    /// Kinds of the tokens; empty if absent from the header.
    types: &'header [i32],
    bos: Option<u32>,
    ends: BTreeSet<u32>,
    /// Whether answers are messages in channels (gpt-oss): recognised as by llama.cpp.
    in_channels: bool,
}

impl<'header> Tables<'header> {
    fn of(header: &'header Header) -> Result<Self, TokenizerError> {
        let scheme = Scheme::of(header)?;
        let texts = header
            .strings(KEY_TOKENS)
            .ok_or(TokenizerError::Missing { key: KEY_TOKENS })?;
        let count = u32::try_from(texts.len()).unwrap_or(u32::MAX);
        let types = header.ints(KEY_TYPES).unwrap_or_default();
        if !types.is_empty() && types.len() != texts.len() {
            return Err(TokenizerError::Invalid {
                key: KEY_TYPES,
                problem: format!("it has {} entries for {count} tokens", types.len()),
            });
        }
        let id = |key: &'static str| match header.u32(key) {
            Some(id) if id >= count => Err(TokenizerError::Invalid {
                key,
                problem: format!("it names token {id} of {count}"),
            }),
            id => Ok(id),
        };
        let (bos, named_ends) = (id(KEY_BOS)?, [id(KEY_EOS)?, id(KEY_EOT)?, id(KEY_EOM)?]);
        Ok(Self {
            scheme,
            texts,
            types,
            bos,
            ends: named_ends.into_iter().flatten().collect(),
            in_channels: CHANNEL_ENDS
                .iter()
                .all(|end| texts.iter().any(|text| text == *end)),
        })
    }
}

/// The library's encoder for a byte-level vocabulary.
fn byte_level(
    header: &Header,
    rules: Rules,
    vocabulary: tokenizers::models::bpe::Vocab,
) -> Result<Bpe, TokenizerError> {
    let merges = merges(header, &vocabulary)?;
    let bpe = BPE::builder()
        .vocab_and_merges(vocabulary, merges)
        .ignore_merges(rules.ignores_merges())
        .cache_capacity(WORDS_REMEMBERED)
        .build()
        .map_err(|error| TokenizerError::library(&error))?;
    let mut bpe = TokenizerImpl::new(bpe);
    bpe.with_pre_tokenizer(Some(rules.splitter()?));
    if rules.normalises() {
        bpe.with_normalizer(Some(NormalizerWrapper::from(NFC)))
            .map_err(|error| TokenizerError::library(&error))?;
    }
    Ok(bpe)
}

/// The tokens of the file's list of those never to be generated.
fn suppressed(header: &Header) -> Vec<u32> {
    let listed = header.ints(KEY_SUPPRESSED).unwrap_or_default().iter();
    listed
        .filter_map(|&token| u32::try_from(token).ok())
        .collect()
}

/// Tokens that absorb the white space after them: all but three special tokens of Phi-3, by its publisher's
/// `tokenizer.json`, which GGUF files omit; llama.cpp also recognises it by the model's name.
fn swallowing(header: &Header, control: &Literals, user_defined: &Literals) -> BTreeSet<u32> {
    let name = header
        .string("general.name")
        .unwrap_or_default()
        .to_lowercase();
    if !name.contains("phi-3") && !name.contains("phi3") {
        return BTreeSet::new();
    }
    [control, user_defined]
        .into_iter()
        .flat_map(Literals::entries)
        .filter(|(text, _)| !["<unk>", "<s>", "<|endoftext|>"].contains(text))
        .map(|(_, token)| token)
        .collect()
}

/// Length of text segments for encoding, for which the library needs about 1 MiB.
const SEGMENT_BYTES: usize = 8 << 10;

/// End of a message; it ends an answer, unless this has channels.
const MESSAGE_END: &str = "<|end|>";
/// Ends of an answer with channels.
const CHANNEL_ENDS: [&str; 2] = ["<|return|>", "<|call|>"];
/// Control tokens of the messages in channels, which are part of an answer.
const CHANNEL_TEXTS: [&str; 5] = [
    "<|start|>",
    MESSAGE_END,
    "<|message|>",
    "<|channel|>",
    "<|constrain|>",
];

/// Texts that end an answer regardless of the file; files often name only one of several. The part of llama.cpp's list
/// (`special_eog_ids` in `src/llama-vocab.cpp`) that occurs in the supported families.
const END_TEXTS: &[&str] = &[
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    MESSAGE_END,
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
];

#[cfg(test)]
mod tests;
