//! The demo model's own byte-level BPE, trained on the dialogues and described as GGUF metadata.

use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, SplitDelimiterBehavior, Tokenizer};

/// How the `qwen35` family cuts text into words before merging (the regular expression of its `tokenizer.json`).
const WORDS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Ends a conversation, and pads.
pub(crate) const END_OF_TEXT: &str = "<|endoftext|>";
/// Begins a message.
pub(crate) const MESSAGE_START: &str = "<|im_start|>";
/// Ends a message; the end-of-sequence token.
pub(crate) const MESSAGE_END: &str = "<|im_end|>";

/// Control tokens, in the order of their ids, after all others.
pub(crate) const CONTROL: [&str; 3] = [END_OF_TEXT, MESSAGE_START, MESSAGE_END];

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// A tokenizer and the merges it applies, best first.
pub(crate) struct Trained {
    /// Encodes and decodes.
    pub(crate) tokenizer: Tokenizer,
    /// Pairs in byte-level spelling, as `tokenizer.ggml.merges` wants them.
    pub(crate) merges: Vec<String>,
}

impl Trained {
    /// Trains on `lines` up to `vocabulary` tokens, the control tokens included.
    pub(crate) fn new(lines: &[String], vocabulary: usize) -> Result<Self> {
        let alphabet = ByteLevel::alphabet().into_iter().collect();
        let trainer = BpeTrainer::builder()
            .vocab_size(vocabulary - CONTROL.len())
            .min_frequency(2)
            .initial_alphabet(alphabet)
            .show_progress(false)
            .build();
        let mut tokenizer = untrained()?;
        tokenizer.train(
            &mut TrainerWrapper::BpeTrainer(trainer),
            lines.iter().map(String::as_str),
        )?;
        let saved: serde_json::Value = serde_json::from_str(&tokenizer.to_string(false)?)?;
        let merges = saved["model"]["merges"]
            .as_array()
            .ok_or("no merges")?
            .iter()
            .map(|pair| {
                Some(format!(
                    "{} {}",
                    pair.get(0)?.as_str()?,
                    pair.get(1)?.as_str()?
                ))
            })
            .collect::<Option<Vec<_>>>()
            .ok_or("a merge is no pair")?;
        tokenizer.add_special_tokens(CONTROL.map(|token| AddedToken::from(token, true)))?;
        Ok(Self { tokenizer, merges })
    }

    /// Token ids of `text`; control tokens in it are recognised.
    pub(crate) fn encode(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.tokenizer.encode_fast(text, false)?.get_ids().to_vec())
    }

    /// The id of a control token.
    pub(crate) fn control(&self, token: &str) -> u32 {
        self.tokenizer
            .token_to_id(token)
            .expect("control tokens are part of the vocabulary")
    }

    /// All tokens in the order of their ids.
    pub(crate) fn tokens(&self) -> Vec<String> {
        (0..self.tokenizer.get_vocab_size(true) as u32)
            .map(|id| self.tokenizer.id_to_token(id).expect("ids are dense"))
            .collect()
    }
}

fn untrained() -> Result<Tokenizer> {
    let words = Split::new(
        SplitPattern::Regex(WORDS.to_owned()),
        SplitDelimiterBehavior::Isolated,
        false,
    )?;
    let bytes = ByteLevel::new(false, false, false);
    let mut tokenizer = Tokenizer::new(BPE::default());
    tokenizer.with_pre_tokenizer(Some(Sequence::new(vec![
        PreTokenizerWrapper::Split(words),
        PreTokenizerWrapper::ByteLevel(bytes),
    ])));
    tokenizer.with_decoder(Some(ByteLevel::default()));
    Ok(tokenizer)
}
