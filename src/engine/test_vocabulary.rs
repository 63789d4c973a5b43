//! Small tokenizers for tests.

use std::{fs::File, io::Write};

use candle_core::quantized::gguf_file::{self, Value};

use super::{gguf::Header, tokenizer::byte_symbol};

/// A vocabulary that tests modify before it is written.
pub(super) struct TestVocabulary {
    pub(super) model: &'static str,
    pub(super) pre: &'static str,
    /// Texts of merges, `left right`; their results become tokens.
    pub(super) merges: Vec<&'static str>,
    /// Control tokens; they follow the merges' results.
    pub(super) control: Vec<&'static str>,
    /// User-defined tokens; they follow the control tokens.
    pub(super) user_defined: Vec<&'static str>,
    /// More entries.
    pub(super) more: Vec<(&'static str, Value)>,
}

/// The control tokens of gpt-oss.
pub(super) const CHANNEL_TOKENS: [&str; 7] = [
    "<|return|>",
    "<|constrain|>",
    "<|channel|>",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|call|>",
];

impl TestVocabulary {
    /// All bytes, some merges, ChatML and `<think>`.
    pub(super) fn chatml() -> Self {
        Self {
            model: "gpt2",
            pre: "qwen35",
            merges: vec![
                "h e", "l l", "he ll", "hell o", "Ġ w", "u s", "us e", "use r",
            ],
            control: vec!["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            user_defined: vec!["<think>", "</think>"],
            more: vec![],
        }
    }

    /// The texts of all tokens.
    pub(super) fn texts(&self) -> Vec<String> {
        let mut texts: Vec<String> = (0..=u8::MAX)
            .map(|byte| byte_symbol(byte).to_string())
            .collect();
        texts.extend(self.merges.iter().map(|merge| merge.replace(' ', "")));
        texts.extend(
            self.control
                .iter()
                .chain(&self.user_defined)
                .map(|&text| text.to_owned()),
        );
        texts
    }

    /// The token with this text.
    pub(super) fn id(&self, text: &str) -> u32 {
        u32::try_from(self.texts().iter().position(|known| known == text).unwrap()).unwrap()
    }

    /// The header of a file that contains only this vocabulary.
    pub(super) fn header(&self) -> Header {
        let texts = self.texts();
        let plain = texts.len() - self.control.len() - self.user_defined.len();
        let types = (0..texts.len()).map(|at| match at {
            at if at < plain => 1,
            at if at < plain + self.control.len() => 3,
            _ => 4,
        });
        let string = |text: &str| Value::String(text.to_owned());
        let mut entries = vec![
            ("tokenizer.ggml.model", string(self.model)),
            ("tokenizer.ggml.pre", string(self.pre)),
            (
                "tokenizer.ggml.tokens",
                Value::Array(texts.iter().map(|text| string(text)).collect()),
            ),
            (
                "tokenizer.ggml.token_type",
                Value::Array(types.map(Value::I32).collect()),
            ),
            (
                "tokenizer.ggml.merges",
                Value::Array(self.merges.iter().map(|merge| string(merge)).collect()),
            ),
        ];
        entries.retain(|(key, _)| !self.more.iter().any(|(other, _)| other == key));
        entries.extend(self.more.iter().cloned());
        header(&entries)
    }
}

/// The header of a file with these entries and no tensors.
pub(super) fn header(entries: &[(&str, Value)]) -> Header {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("vocabulary.gguf");
    let entries: Vec<_> = entries.iter().map(|(key, value)| (*key, value)).collect();
    let mut file = File::create(&path).unwrap();
    gguf_file::write(&mut file, &entries, &[]).unwrap();
    file.flush().unwrap();
    Header::read(&path).unwrap()
}
