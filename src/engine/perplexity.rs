//! Perplexity of a model on a text.
//!
//! Computed as `llama-perplexity` does, so that the figures can be compared: the text is cut into windows of one length,
//! each window starts with an empty sequence (and the token that begins one, where the model wants it), and only the
//! second half of a window counts, where the model has seen enough to go by.

use super::{Flow, ForwardError, Model, tokenizer::Tokenizer};

/// The outcome of an evaluation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Perplexity {
    /// Mean negative log-likelihood of the tokens that counted, in nats.
    pub mean_nll: f64,
    /// Standard error of that mean, taking the tokens as independent.
    pub standard_error: f64,
    /// Tokens that counted.
    pub tokens: u64,
    /// Tokens in their place that did not count, since they were left out.
    pub left_out: u64,
    /// Windows.
    pub windows: u32,
}

impl Perplexity {
    /// The number of equally likely tokens that would be as hard to guess: `exp` of the mean.
    #[must_use]
    pub fn value(&self) -> f64 {
        self.mean_nll.exp()
    }
}

/// Evaluates `model` on `tokens` in windows of `window` tokens. The model's sequence is lost; its KV capacity must hold a
/// window.
///
/// # Errors
///
/// When there are not enough tokens for a window, the window is too short, or the model fails.
pub fn evaluate(
    model: &mut Model,
    tokenizer: &Tokenizer,
    tokens: &[u32],
    window: usize,
) -> Result<Perplexity, PerplexityError> {
    evaluate_those(model, tokenizer, tokens, window, &|_| true)
}

/// As [`evaluate`], where only those tokens count that `counts` says.
///
/// # Errors
///
/// As there.
pub fn evaluate_those(
    model: &mut Model,
    tokenizer: &Tokenizer,
    tokens: &[u32],
    window: usize,
    counts: &dyn Fn(u32) -> bool,
) -> Result<Perplexity, PerplexityError> {
    if window < WINDOW_MIN {
        return Err(PerplexityError::Window {
            window,
            limit: WINDOW_MIN,
        });
    }
    if tokens.len() < window {
        return Err(PerplexityError::TooShort {
            tokens: tokens.len(),
            window,
        });
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
        model.forward_all(&input, &mut || Flow::Continue, &mut |at, logits| {
            // The scores after a token are about the one behind it.
            if at >= first
                && let Some(&next) = text.get(at + 1)
            {
                if counts(next) {
                    sums.add(nll(logits, next));
                } else {
                    sums.left_out += 1;
                }
            }
        })?;
        windows += 1;
    }
    model.reset();
    Ok(sums.finish(windows))
}

/// Negative logarithm of the probability of `token`; infinite when the model does not have it.
fn nll(logits: &[f32], token: u32) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - max).exp()).sum();
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

    #[expect(clippy::cast_precision_loss, reason = "counts of tokens stay far below 2^52")]
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

/// Why a text cannot be evaluated.
#[derive(Debug, thiserror::Error)]
pub enum PerplexityError {
    /// The model failed.
    #[error("cannot evaluate the text")]
    Forward(#[from] ForwardError),
    /// Less than one window.
    #[error("cannot evaluate {tokens} tokens: one window has {window}")]
    TooShort {
        /// Tokens of the text.
        tokens: usize,
        /// Tokens of a window.
        window: usize,
    },
    /// A window without a second half.
    #[error("cannot evaluate in windows of {window} tokens: at least {limit} are needed")]
    Window {
        /// Tokens of a window.
        window: usize,
        /// The fewest.
        limit: usize,
    },
}

/// The shortest window of which something counts.
const WINDOW_MIN: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_scores_are_as_hard_as_their_number() {
        assert!((nll(&[3.0; 8], 5) - 8f64.ln()).abs() < 1e-12);
        assert!((nll(&[1000.0, 0.0], 0)).abs() < 1e-12);
        assert_eq!(nll(&[0.0], 1), f64::INFINITY);
    }

    #[test]
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
}
