//! Vocabulary keys, limits and types shared by the parts of the tokenizer.

use tokenizers::{
    DecoderWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper, TokenizerImpl,
    models::bpe::BPE,
};

/// The library's encoder.
pub(super) type Bpe = TokenizerImpl<
    BPE,
    NormalizerWrapper,
    PreTokenizerWrapper,
    PostProcessorWrapper,
    DecoderWrapper,
>;

/// Order in which pieces are joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// A list of merges (Gemma 4).
    Merges,
    /// The scores of the pieces (Llama 2, Gemma to Gemma 3, Phi-3).
    Scores,
}

pub(super) const KEY_MODEL: &str = "tokenizer.ggml.model";
pub(super) const KEY_PRE: &str = "tokenizer.ggml.pre";
pub(super) const KEY_TOKENS: &str = "tokenizer.ggml.tokens";
pub(super) const KEY_TYPES: &str = "tokenizer.ggml.token_type";
pub(super) const KEY_MERGES: &str = "tokenizer.ggml.merges";
pub(super) const KEY_BOS: &str = "tokenizer.ggml.bos_token_id";
pub(super) const KEY_EOS: &str = "tokenizer.ggml.eos_token_id";
pub(super) const KEY_EOT: &str = "tokenizer.ggml.eot_token_id";
pub(super) const KEY_EOM: &str = "tokenizer.ggml.eom_token_id";
pub(super) const KEY_SCORES: &str = "tokenizer.ggml.scores";
pub(super) const KEY_SPACE_FIRST: &str = "tokenizer.ggml.add_space_prefix";
pub(super) const KEY_SUPPRESSED: &str = "tokenizer.ggml.suppress_tokens";
pub(super) const KEY_ADD_BOS: &str = "tokenizer.ggml.add_bos_token";

/// Longest text without a split that is encoded as a whole: about 18 MiB temporarily.
pub(super) const UNBROKEN_BYTES_MAX: usize = 128 << 10;

/// Size of the library's word cache: disabled. It would cache on every encoding thread, 32 bytes per byte of a word,
/// for the lifetime of the thread, and prompts are encoded on any free thread.
pub(super) const WORDS_REMEMBERED: usize = 0;

/// Token types of GGUF (`enum llama_token_type` in `llama.h`).
pub(super) const TYPE_UNKNOWN: i32 = 2;
pub(super) const TYPE_CONTROL: i32 = 3;
pub(super) const TYPE_USER_DEFINED: i32 = 4;
pub(super) const TYPE_BYTE: i32 = 6;

/// The longest piece of a SentencePiece vocabulary. The pieces of Gemma 3 have up to 93 bytes (31 spaces), those of
/// Llama 2 and Phi-3 up to 48; longer ones are refused, since finding merges takes quadratic time.
pub(super) const PIECE_BYTES_MAX: usize = 256;

/// The character that represents a space there (U+2581).
pub(super) const SPACE: char = '\u{2581}';

/// The character that represents `byte` in byte-level vocabularies: printable ones themselves, others from U+0100 on
/// (GPT-2's `bytes_to_unicode`).
pub fn byte_symbol(byte: u8) -> char {
    let plain = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if plain(byte) {
        return char::from(byte);
    }
    let number = (0..byte).filter(|&before| !plain(before)).count();
    u32::try_from(number)
        .ok()
        .and_then(|number| char::from_u32(256 + number))
        .unwrap_or(char::REPLACEMENT_CHARACTER)
}
