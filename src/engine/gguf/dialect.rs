//! Translation of Ollama's metadata keys and defaults to those of llama.cpp.
//!
//! Ollama publishes converted files: the families are those of llama.cpp, but some keys and tensors have other names,
//! keys with defaults in its program are missing, and the vision part is in the same file. The translation covers the
//! cases that Ollama itself translates before it hands such a file to llama.cpp.

use super::{
    header::{Header, TensorInfo},
    values::Value,
};

impl Header {
    /// Renames keys and tensors to those of llama.cpp, unless these exist.
    pub(super) fn translate(&mut self) {
        let architecture = self.architecture().to_owned();
        for (family, theirs, ours) in KEYS {
            if family == architecture {
                let (theirs, ours) = (format!("{family}.{theirs}"), format!("{family}.{ours}"));
                if let Some(value) = self.metadata.get(&theirs).cloned() {
                    self.metadata.entry(ours).or_insert(value);
                }
            }
        }
        match architecture.as_str() {
            "gemma3" => self.complete_gemma3(),
            "llama" if self.token(LLAMA3_FIRST) == Some("<|begin_of_text|>") => {
                self.cut_words_as("llama-bpe");
            }
            "mistral3" => self.cut_words_as("tekken"),
            "qwen35" => self.rename_time_steps(),
            _ => {}
        }
    }

    fn token(&self, index: usize) -> Option<&str> {
        self.strings("tokenizer.ggml.tokens")?.get(index)
    }

    /// Sets the pre-tokenizer rules if the file names none.
    fn cut_words_as(&mut self, rules: &str) {
        let (kind, pre) = ("tokenizer.ggml.model", "tokenizer.ggml.pre");
        if self.string(kind) == Some("gpt2")
            && matches!(self.string(pre), None | Some("" | "default"))
        {
            self.metadata
                .insert(pre.to_owned(), Value::String(rules.to_owned()));
        }
    }

    fn complete_gemma3(&mut self) {
        let is_vision = |name: &String| name.starts_with("v.");
        let long = self
            .u32("gemma3.context_length")
            .is_some_and(|context| context >= GEMMA3_LONG);
        let epsilon = "gemma3.attention.layer_norm_rms_epsilon";
        let unusual = self.tensors.keys().any(is_vision) || self.value(epsilon).is_none();
        if !unusual {
            return;
        }
        let mut put = |key: &str, value: Value| {
            self.metadata.entry(key.to_owned()).or_insert(value);
        };
        put(epsilon, Value::Float(1e-6));
        put("gemma3.rope.freq_base", Value::Float(1e6));
        if long {
            put(
                "gemma3.rope.scaling.type",
                Value::String("linear".to_owned()),
            );
            put("gemma3.rope.scaling.factor", Value::Float(8.0));
        }
        // Its last tokens stand for images and have no row in the embedding.
        let rows = self
            .tensor("token_embd.weight")
            .and_then(|tensor| tensor.dims.get(1));
        let Some(rows) = rows.and_then(|&rows| usize::try_from(rows).ok()) else {
            return;
        };
        for key in ["tokens", "scores", "token_type"] {
            if let Some(Value::Array(list)) =
                self.metadata.get_mut(&format!("tokenizer.ggml.{key}"))
            {
                list.truncate(rows);
            }
        }
    }

    /// Renames `blk.N.ssm_dt` to llama.cpp's `blk.N.ssm_dt.bias`.
    fn rename_time_steps(&mut self) {
        let theirs: Vec<String> = self
            .tensors
            .keys()
            .filter(|name| name.ends_with(".ssm_dt"))
            .cloned()
            .collect();
        for name in theirs {
            let ours = format!("{name}.bias");
            if self.tensors.contains_key(&ours) {
                continue;
            }
            if let Some(info) = self.tensors.remove(&name) {
                let info = TensorInfo {
                    name: ours.clone(),
                    ..info
                };
                self.tensors.insert(ours, info);
            }
        }
    }
}

/// Family, Ollama's key and llama.cpp's.
const KEYS: [(&str, &str, &str); 6] = [
    ("gemma3", "rope.global.freq_base", "rope.freq_base"),
    ("gemma3", "rope.local.freq_base", "rope.freq_base_swa"),
    (
        "mistral3",
        "rope.scaling.beta_fast",
        "rope.scaling.yarn_beta_fast",
    ),
    (
        "mistral3",
        "rope.scaling.beta_slow",
        "rope.scaling.yarn_beta_slow",
    ),
    (
        "mistral3",
        "rope.scaling.mscale_all_dim",
        "rope.scaling.yarn_log_multiplier",
    ),
    (
        "mistral3",
        "rope.scaling_beta",
        "attention.temperature_scale",
    ),
];

/// The first control token of Llama 3.
const LLAMA3_FIRST: usize = 128_000;

/// Gemma 3 from 4B on has this context and scales its rotation by 8 for it; the smaller models have less.
const GEMMA3_LONG: u32 = 131_072;
