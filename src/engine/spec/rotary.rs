//! Rotary position embedding and its scaling to longer contexts.
//!
//! The four methods of GGUF files (`rope.scaling.type`), with the arithmetic of ggml's `ggml_rope_cache_init`, so that
//! the angles agree: `none`, `linear`, `yarn` (<https://arxiv.org/abs/2309.00071>), `longrope` (a divisor per pair, one
//! list for short and one for long contexts). Llama 3.1 uses `none` with a divisor per pair.

use super::{
    family::Architecture,
    keys::Keys,
    limits::len,
    rotation::{BASE, Rotation},
    tensors::{tensor, vector},
};
use crate::{
    error::LoadErrorKind,
    gguf::{Header, TensorInfo, Value},
};
use cotenant_units::Tokens;

/// Rotation settings of a file: the rotation of layers that see everything, and its divisors.
pub(super) struct Rotary {
    pub(super) rotation: Rotation,
    pub(super) factors: Option<TensorInfo>,
}

impl Rotary {
    /// Reads the keys and divisors of `header` for heads of `rotary` rotated elements.
    ///
    /// `context` is the longest context that will be used; models with two lists of divisors choose by it, as llama.cpp
    /// does.
    pub(super) fn read(
        header: &Header,
        rotary: usize,
        context: Option<Tokens>,
    ) -> Result<Self, LoadErrorKind> {
        let keys = Keys { header };
        let base = header.f32(&keys.full("rope.freq_base")).unwrap_or(BASE);
        let trained = keys.context()?;
        let key = keys.full("rope.scaling.type");
        let kind = match header.value(&key) {
            // ggml's default; without a factor it has no effect.
            None => "linear",
            Some(Value::String(kind)) => kind.as_str(),
            Some(other) => {
                return Err(LoadErrorKind::Metadata {
                    key,
                    problem: format!("{other} is not a text"),
                });
            }
        };
        let factor = ["rope.scaling.factor", "rope.scale_linear"]
            .iter()
            .find_map(|key| header.f32(&keys.full(key)))
            .filter(|&factor| factor != 0.0)
            .unwrap_or(1.0);
        if !factor.is_finite() || factor < 0.0 {
            return Err(keys.wrong(
                "rope.scaling.factor",
                format!("{factor} is not a positive number"),
            ));
        }
        let original = header
            .u32(&keys.full("rope.scaling.original_context_length"))
            .filter(|&original| original > 0);
        let magnitude = header
            .f32(&keys.full("rope.scaling.attn_factor"))
            .unwrap_or(1.0);
        let mut rotation = Rotation {
            base,
            scale: 1.0 / factor,
            blend: None,
            magnitude,
        };
        match kind {
            "none" => rotation.scale = 1.0,
            "linear" | "longrope" => {}
            "yarn" => {
                // llama.cpp reads these for two families only, of which this is the supported one; for the others it
                // uses its defaults regardless of the file.
                let own = |key: &str, default: f32| match header.f32(&keys.full(key)) {
                    Some(value) if header.architecture() == Architecture::Mistral3.name() => value,
                    _ => default,
                };
                let fast = own("rope.scaling.yarn_beta_fast", YARN_BETA_FAST);
                let slow = own("rope.scaling.yarn_beta_slow", YARN_BETA_SLOW);
                let all = own("rope.scaling.yarn_log_multiplier", 0.0);
                let context = original.unwrap_or(trained);
                rotation.blend = Some((
                    yarn_pair(rotary, context, fast, base).floor().max(0.0),
                    yarn_pair(rotary, context, slow, base)
                        .ceil()
                        .min(yarn_last(rotary)),
                ));
                // The magnitude of the paper, which ggml and its callers compute from two factors.
                let stretched = |times: f32| {
                    if factor <= 1.0 {
                        1.0
                    } else {
                        0.1 * times * factor.ln() + 1.0
                    }
                };
                rotation.magnitude *= stretched(1.0) / stretched(all);
            }
            other => {
                return Err(LoadErrorKind::Metadata {
                    key,
                    problem: format!(
                        "`{other}` is not supported; none, linear, yarn and longrope are"
                    ),
                });
            }
        }
        // Granite's notation for a model without positions.
        let finetuned = header.bool(&keys.full("rope.scaling.finetuned"));
        let is_granite = [Architecture::Granite, Architecture::GraniteHybrid]
            .iter()
            .any(|family| family.name() == header.architecture());
        let is_still = [Architecture::NemotronH, Architecture::NemotronHMoe]
            .iter()
            .any(|family| family.name() == header.architecture());
        if is_still || is_granite && finetuned == Some(false) {
            rotation = Rotation::STILL;
        }
        let pairs = [rotary / 2];
        let long = context.map_or(trained, Tokens::get).min(trained) > original.unwrap_or(trained);
        let name = if header.tensor("rope_freqs.weight").is_some() {
            Some("rope_freqs.weight")
        } else if header.tensor(LONG).is_some() || header.tensor(SHORT).is_some() {
            Some(if long { LONG } else { SHORT })
        } else {
            None
        };
        let factors = match name {
            Some(name) => {
                tensor(header, name)?;
                Some(vector(header, name, &pairs)?)
            }
            None if kind == "longrope" => {
                return Err(LoadErrorKind::TensorMissing {
                    tensor: if long { LONG } else { SHORT }.to_owned(),
                });
            }
            None => None,
        };
        Ok(Self { rotation, factors })
    }
}

/// The pair whose angle completes `turns` revolutions within `context` positions (`ggml_rope_yarn_corr_dim`).
#[expect(
    clippy::cast_precision_loss,
    reason = "head sizes and contexts are far below 2^24, or need no last bit"
)]
fn yarn_pair(rotary: usize, context: u32, turns: f32, base: f32) -> f32 {
    rotary as f32 * (context as f32 / (turns * 2.0 * std::f32::consts::PI)).ln() / (2.0 * base.ln())
}

#[expect(clippy::cast_precision_loss, reason = "head sizes are far below 2^24")]
fn yarn_last(rotary: usize) -> f32 {
    len(rotary as u64).saturating_sub(1) as f32
}

/// Names of Phi-3's divisors, which are mutually exclusive.
pub(super) const LONG: &str = "rope_factors_long.weight";
pub(super) const SHORT: &str = "rope_factors_short.weight";
/// llama.cpp's defaults, which are the paper's.
const YARN_BETA_FAST: f32 = 32.0;
const YARN_BETA_SLOW: f32 = 1.0;

#[cfg(test)]
mod tests {
    use super::*;

    fn angles(rotation: Rotation, position: usize, factors: Option<&[f32]>) -> Vec<f32> {
        let mut out = vec![0.0; 16];
        rotation.fill(position, factors, &mut out);
        out.chunks_exact(2)
            .map(|pair| pair[1].atan2(pair[0]))
            .collect()
    }

    #[test]
    fn a_stretched_context_turns_slower_by_its_factor() {
        let plain = angles(Rotation::plain(10_000.0), 1, None);
        let slow = angles(
            Rotation {
                scale: 0.25,
                ..Rotation::plain(10_000.0)
            },
            4,
            None,
        );
        for (a, b) in plain.iter().zip(&slow) {
            assert!((a - b).abs() < 1e-6, "{a} {b}");
        }
    }

    #[test]
    fn yarn_keeps_fast_pairs_and_slows_the_others() {
        let yarn = Rotation {
            scale: 0.25,
            blend: Some((2.0, 5.0)),
            ..Rotation::plain(10_000.0)
        };
        let (plain, mixed) = (
            angles(Rotation::plain(10_000.0), 1, None),
            angles(yarn, 1, None),
        );
        for pair in 0..=2 {
            assert!((plain[pair] - mixed[pair]).abs() < 1e-6);
        }
        for pair in 5..8 {
            assert!((plain[pair] * 0.25 - mixed[pair]).abs() < 1e-6);
        }
        assert!(mixed[3] < plain[3] && mixed[3] > 0.25 * plain[3]);
    }

    /// As in llama.cpp: YaRN's ramp and magnitude are read from the file for this family only.
    #[test]
    fn what_a_file_says_of_yarn_counts_for_mistral_3_alone() {
        use candle_core::quantized::gguf_file::Value;
        let read = |family: &str, more: &[(&str, f32)]| {
            let full = |key: &str| format!("{family}.{key}");
            let mut entries = vec![
                (
                    "general.architecture".to_owned(),
                    Value::String(family.to_owned()),
                ),
                (full("context_length"), Value::U32(4096)),
                (full("rope.scaling.type"), Value::String("yarn".to_owned())),
                (full("rope.scaling.factor"), Value::F32(16.0)),
            ];
            entries
                .extend(more.iter().map(|(key, value)| {
                    (full(&format!("rope.scaling.{key}")), Value::F32(*value))
                }));
            let entries: Vec<_> = entries
                .iter()
                .map(|(key, value)| (key.as_str(), value.clone()))
                .collect();
            let header = crate::test_vocabulary::header(&entries);
            Rotary::read(&header, 128, None).unwrap().rotation
        };
        for (key, value) in [
            ("yarn_beta_fast", 8.0),
            ("yarn_beta_slow", 4.0),
            ("yarn_log_multiplier", 1.0),
        ] {
            for family in ["llama", "qwen2", "qwen3"] {
                assert_eq!(
                    read(family, &[(key, value)]),
                    read(family, &[]),
                    "{family} {key}"
                );
            }
            assert_ne!(
                read("mistral3", &[(key, value)]),
                read("mistral3", &[]),
                "{key}"
            );
        }
        assert!((read("mistral3", &[]).magnitude - 1.277_26).abs() < 1e-4);
        assert!((read("mistral3", &[("yarn_log_multiplier", 1.0)]).magnitude - 1.0).abs() < 1e-6);
    }

    #[test]
    fn divisors_divide_each_pair() {
        let factors = [1.0, 2.0, 4.0, 8.0, 1.0, 1.0, 1.0, 1.0];
        let (plain, divided) = (
            angles(Rotation::plain(10_000.0), 1, None),
            angles(Rotation::plain(10_000.0), 1, Some(&factors)),
        );
        for (pair, factor) in factors.iter().enumerate() {
            assert!((plain[pair] / factor - divided[pair]).abs() < 1e-6);
        }
    }
}
