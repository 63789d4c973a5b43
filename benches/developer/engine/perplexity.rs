//! Perplexity of a model on a text.
//!
//! Computed as in `llama-perplexity`, so that figures are comparable: the text is split into windows of one length,
//! each window starts with an empty sequence (and the begin token, if the model uses one), and only its second half
//! counts, where the model has enough context.

use cotenant::engine::{Flow, Model, tokenizer::Tokenizer};

use cotenant::cli::bench::engine::in_one_line;

/// Result of an evaluation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Perplexity {
    /// Mean negative log-likelihood of the counted tokens, in nats.
    pub(super) mean_nll: f64,
    /// Standard error of that mean, taking the tokens as independent.
    pub(super) standard_error: f64,
    pub(super) tokens: u64,
    /// Tokens excluded by the filter.
    pub(super) left_out: u64,
    pub(super) windows: u32,
}

impl Perplexity {
    /// Returns the number of equally likely tokens of the same difficulty: `exp` of the mean.
    pub(super) fn value(&self) -> f64 {
        self.mean_nll.exp()
    }
}

/// Evaluates `model` on `tokens` in windows of `window` tokens, counting only tokens accepted by `counts`. The model's
/// sequence is lost; its KV capacity must hold a window.
pub(super) fn evaluate(
    model: &mut Model,
    tokenizer: &Tokenizer,
    tokens: &[u32],
    window: usize,
    counts: &dyn Fn(u32) -> bool,
) -> Result<Perplexity, String> {
    if window < WINDOW_MIN {
        return Err(format!(
            "cannot evaluate in windows of {window} tokens: at least {WINDOW_MIN} are needed"
        ));
    }
    if tokens.len() < window {
        return Err(format!(
            "cannot evaluate {} tokens: one window has {window}",
            tokens.len()
        ));
    }
    let bos = tokenizer.bos().filter(|_| tokenizer.adds_bos());
    let first = window / 2;
    let mut sums = Sums::default();
    let mut windows = 0;
    for text in tokens.chunks_exact(window) {
        let mut input = text.to_vec();
        if let (Some(bos), Some(start)) = (bos, input.first_mut()) {
            *start = bos;
        }
        model.reset();
        let computed = model.forward_all(&input, &mut || Flow::Continue, &mut |at, logits| {
            // The logits after a token predict the next one.
            if at >= first
                && let Some(&next) = text.get(at + 1)
            {
                if counts(next) {
                    sums.add(nll(logits, next));
                } else {
                    sums.left_out += 1;
                }
            }
        });
        computed.map_err(|error| in_one_line(&error))?;
        windows += 1;
    }
    model.reset();
    Ok(sums.finish(windows))
}

/// Returns the negative logarithm of the probability of `token`; infinite if the model lacks it.
fn nll(logits: &[f32], token: u32) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits
        .iter()
        .map(|&logit| f64::from(logit - max).exp())
        .sum();
    usize::try_from(token)
        .ok()
        .and_then(|at| logits.get(at))
        .map_or(f64::INFINITY, |&logit| sum.ln() - f64::from(logit - max))
}

#[derive(Default)]
struct Sums {
    count: u64,
    left_out: u64,
    sum: f64,
    squares: f64,
}

impl Sums {
    fn add(&mut self, value: f64) {
        self.count += 1;
        self.sum += value;
        self.squares += value * value;
    }

    #[expect(
        clippy::cast_precision_loss,
        reason = "counts of tokens stay far below 2^52"
    )]
    fn finish(&self, windows: u32) -> Perplexity {
        let count = self.count as f64;
        let mean = self.sum / count;
        let variance = (self.squares / count - mean * mean).max(0.0);
        Perplexity {
            mean_nll: mean,
            standard_error: (variance / (count - 1.0).max(1.0)).sqrt(),
            tokens: self.count,
            left_out: self.left_out,
            windows,
        }
    }
}

/// The shortest window with counted tokens.
const WINDOW_MIN: usize = 4;

#[cfg(test)]
pub(crate) mod tests {
    use crate::weights::Weights as _;
    use cotenant::{
        engine::{
            ModelOptions,
            gguf::GgmlDType,
            spec::Architecture,
            synthetic::{Synthetic, TypeMix},
            text::TextSide,
        },
        policy::{kv_type::KvType, residency::EnginePlan},
        units::Tokens,
    };

    use super::*;

    /// Tests for the harness of this program.
    pub(crate) const TESTS: &[(&str, fn())] = &[
        (
            "engine::perplexity::equal_scores_are_as_hard_as_their_number",
            equal_scores_are_as_hard_as_their_number,
        ),
        (
            "engine::perplexity::the_mean_and_its_error_are_those_of_the_values",
            the_mean_and_its_error_are_those_of_the_values,
        ),
        (
            "engine::perplexity::it_does_not_depend_on_what_is_resident_and_is_near_the_vocabulary_for_random_weights",
            it_does_not_depend_on_what_is_resident_and_is_near_the_vocabulary_for_random_weights,
        ),
    ];

    fn equal_scores_are_as_hard_as_their_number() {
        assert!((nll(&[3.0; 8], 5) - 8f64.ln()).abs() < 1e-12);
        assert!((nll(&[1000.0, 0.0], 0)).abs() < 1e-12);
        assert_eq!(nll(&[0.0], 1), f64::INFINITY);
    }

    fn the_mean_and_its_error_are_those_of_the_values() {
        let mut sums = Sums::default();
        for value in [1.0, 2.0, 3.0] {
            sums.add(value);
        }
        let found = sums.finish(1);
        assert!((found.mean_nll - 2.0).abs() < 1e-12);
        assert!((found.standard_error - (2f64 / 3.0 / 2.0).sqrt()).abs() < 1e-12);
        assert!((found.value() - 2f64.exp()).abs() < 1e-12);
    }

    fn it_does_not_depend_on_what_is_resident_and_is_near_the_vocabulary_for_random_weights() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        Synthetic::tiny(Architecture::Qwen35, TypeMix::All(GgmlDType::Q8_0), 3)
            .write(&path)
            .unwrap();
        let found = |resident: &[u32], prefill_chunk: u32, tokens: &[u32], window| {
            let plan = EnginePlan {
                resident: resident.iter().copied().collect(),
                kv_capacity: Tokens::new(64),
                prefill_chunk: Tokens::new(prefill_chunk),
                kv_type: KvType::F16,
            };
            let mut model = Model::open(&path, &plan, &ModelOptions::for_threads(1)).unwrap();
            let text = TextSide::new(model.header(), model.shape().context_max).unwrap();
            evaluate(&mut model, text.tokenizer(), tokens, window, &|_| true)
        };
        let tokens: Vec<u32> = (0..200u32).map(|at| at * 37 % 256).collect();
        let resident = found(&[0, 1, 2, 3, 4], 32, &tokens, 64).unwrap();
        assert_eq!(found(&[], 5, &tokens, 64), Ok(resident));
        assert_eq!((resident.windows, resident.tokens), (3, 3 * 31));
        assert!((100.0..1000.0).contains(&resident.value()), "{resident:?}");
        let error = |tokens: &[u32], window| found(&[], 5, tokens, window).unwrap_err();
        assert_eq!(
            error(&tokens[..63], 64),
            "cannot evaluate 63 tokens: one window has 64"
        );
        assert_eq!(
            error(&tokens, 3),
            "cannot evaluate in windows of 3 tokens: at least 4 are needed"
        );
        assert!(error(&tokens, 128).contains("128"));
    }
}
