//! Token selection from the logits.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use rand::{Rng as _, SeedableRng as _, rngs::StdRng};

use super::gguf::Header;
use cotenant_conversation::SamplingWish;

/// Settings of token selection.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Flattens (above 1) or sharpens the distribution; 0 always takes the most likely token. Default 0, at most
    /// [`TEMPERATURE_MAX`].
    pub temperature: f64,
    /// Only the most likely tokens that together reach this probability are considered. Default 1 (all), at least
    /// [`TOP_P_MIN`].
    pub top_p: f64,
    /// Only this many of the most likely tokens are considered. Default `None` (all), at least 1.
    pub top_k: Option<u32>,
    /// Only tokens that are at least this many times as likely as the most likely one are considered. Default 0 (all),
    /// up to 1.
    pub min_p: f64,
    /// Seed of the random numbers: the same seed, settings and prompt give the same answer. Default 0.
    pub seed: u64,
    /// Divides the logits of tokens that occurred among the last [`REPEAT_WINDOW`]. Default 1 (no effect),
    /// [`REPEAT_PENALTY_MIN`] to [`REPEAT_PENALTY_MAX`].
    pub repeat_penalty: f32,
    /// Subtracted from a token's logit for each time it was generated. Default 0, −2 to 2.
    pub frequency_penalty: f32,
    /// Subtracted from the logit of every token that was generated. Default 0, −2 to 2.
    pub presence_penalty: f32,
}

impl Sampling {
    /// Always the most likely token.
    pub const GREEDY: Self = Self {
        temperature: 0.0,
        top_p: 1.0,
        top_k: None,
        min_p: 0.0,
        seed: 0,
        repeat_penalty: 1.0,
        frequency_penalty: 0.0,
        presence_penalty: 0.0,
    };

    /// Checks that each setting is in its range.
    ///
    /// # Errors
    /// The first setting out of range.
    pub fn validate(&self) -> Result<(), SamplingError> {
        let checks = [
            ("temperature", self.temperature, 0.0, TEMPERATURE_MAX),
            ("top_p", self.top_p, f64::from(TOP_P_MIN), 1.0),
            ("min_p", self.min_p, 0.0, 1.0),
            (
                "repeat_penalty",
                f64::from(self.repeat_penalty),
                f64::from(REPEAT_PENALTY_MIN),
                f64::from(REPEAT_PENALTY_MAX),
            ),
            (
                "frequency_penalty",
                f64::from(self.frequency_penalty),
                -2.0,
                2.0,
            ),
            (
                "presence_penalty",
                f64::from(self.presence_penalty),
                -2.0,
                2.0,
            ),
        ];
        for (setting, value, low, high) in checks {
            // Compared in the precision of the computation, so that a limit parsed from text is accepted. The form of
            // the comparison also refuses NaN.
            if !(low..=high).contains(&f64::from(narrow(value))) {
                return Err(SamplingError::OutOfRange {
                    setting,
                    value,
                    low,
                    high,
                });
            }
        }
        if self.top_k == Some(0) {
            return Err(SamplingError::OutOfRange {
                setting: "top_k",
                value: 0.0,
                low: 1.0,
                high: f64::from(u32::MAX),
            });
        }
        Ok(())
    }
}

impl Default for Sampling {
    fn default() -> Self {
        Self::GREEDY
    }
}

impl From<SamplingWish> for Sampling {
    /// The requested settings; absent ones mean the most likely token without penalties. A `top_p` of 0 leaves one
    /// token.
    fn from(wish: SamplingWish) -> Self {
        let greedy = Self::GREEDY;
        let alone = wish.top_p == Some(0.0);
        let narrowed = |wish: Option<f64>, default| wish.map_or(default, narrow);
        Self {
            temperature: if alone {
                0.0
            } else {
                wish.temperature.unwrap_or(greedy.temperature)
            },
            top_p: wish.top_p.filter(|_| !alone).unwrap_or(greedy.top_p),
            top_k: wish.top_k.filter(|top_k| *top_k > 0),
            min_p: wish.min_p.unwrap_or(greedy.min_p),
            seed: wish.seed.unwrap_or(greedy.seed),
            repeat_penalty: narrowed(wish.repeat_penalty, greedy.repeat_penalty),
            frequency_penalty: narrowed(wish.frequency_penalty, greedy.frequency_penalty),
            presence_penalty: narrowed(wish.presence_penalty, greedy.presence_penalty),
        }
    }
}

/// The model file's recommendation, by llama.cpp's keys `general.sampling.…`; unusable values are left out.
pub(super) fn recommended(header: &Header) -> SamplingWish {
    let number = |key: &str, low: f64, high: f64| {
        let value = header
            .f32(&format!("general.sampling.{key}"))
            .map(f64::from);
        value.filter(|value| (low..=high).contains(value))
    };
    SamplingWish {
        temperature: number("temp", 0.0, TEMPERATURE_MAX),
        top_p: number("top_p", 0.0, 1.0),
        top_k: header.u32("general.sampling.top_k"),
        min_p: number("min_p", 0.0, 1.0),
        repeat_penalty: number(
            "penalty_repeat",
            f64::from(REPEAT_PENALTY_MIN),
            f64::from(REPEAT_PENALTY_MAX),
        ),
        ..SamplingWish::NONE
    }
}

impl SamplingError {
    /// The setting, its value, and the fault.
    pub fn parts(&self) -> (&'static str, String, String) {
        let Self::OutOfRange {
            setting,
            value,
            low,
            high,
        } = self;
        let problem = format!("is not between {} and {}", short(*low), short(*high));
        (*setting, short(*value), problem)
    }
}

/// An invalid sampling setting.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SamplingError {
    /// The value is out of range.
    #[error("{setting}: `{}` is not between {} and {}", short(*value), short(*low), short(*high))]
    OutOfRange {
        /// Name of the setting.
        setting: &'static str,
        /// The requested value.
        value: f64,
        /// Least value.
        low: f64,
        /// Greatest value.
        high: f64,
    },
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "logits are no more precise"
)]
const fn narrow(value: f64) -> f32 {
    value as f32
}

/// A number for display: without dozens of zeros, and without the digits added by widening an `f32` to `f64`.
fn short(value: f64) -> String {
    let narrow = narrow(value);
    match (
        f64::from(narrow) == value,
        value != 0.0 && value.abs() < 1e-3,
    ) {
        (true, true) => format!("{narrow:e}"),
        (true, false) => narrow.to_string(),
        (false, true) => format!("{value:e}"),
        (false, false) => value.to_string(),
    }
}

/// Logits from which no token can be chosen.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SampleError {
    /// No logits.
    #[error("the model returned no logits")]
    Empty,
    /// A logit is NaN, or none is finite.
    #[error("the logit of token {token} is {value}")]
    NotFinite {
        /// The first offending token.
        token: u32,
        /// Its logit.
        value: f32,
    },
}

/// Mask of tokens that the form of an answer disallows. Consulted between tokens.
pub trait TokenMask: Send {
    /// Whether [`Self::apply`] and [`Self::is_complete`] can be called without blocking; waits up to `wait`.
    ///
    /// # Errors
    /// The form cannot be followed any more.
    fn is_ready(&mut self, wait: Duration) -> Result<bool, MaskError>;

    /// Sets the logits of all disallowed tokens to −∞.
    ///
    /// # Errors
    /// The form cannot be followed any more.
    fn apply(&mut self, logits: &mut [f32]) -> Result<(), MaskError>;

    /// Records the chosen token and its bytes.
    ///
    /// # Errors
    /// The form cannot be followed any more.
    fn accept(&mut self, token: u32, bytes: &[u8]) -> Result<(), MaskError>;

    /// Whether the accepted tokens complete the answer.
    ///
    /// # Errors
    /// The form cannot be followed any more.
    fn is_complete(&mut self) -> Result<bool, MaskError>;

    /// Accepts the tokens that `choose` derives from the forced bytes, and returns them; empty if no bytes are forced
    /// or `choose` returns none. May be called after [`Self::is_complete`].
    ///
    /// # Errors
    /// The form cannot be followed any more.
    fn force(&mut self, choose: &mut dyn FnMut(&[u8]) -> Vec<u32>) -> Result<Vec<u32>, MaskError>;
}

/// Reason why the form of an answer cannot be followed any more.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MaskError {
    /// It exceeds the limits of its grammar engine.
    #[error("{message}")]
    Form {
        /// Description of the failure.
        message: String,
    },
    /// The process that follows it was lost.
    #[error("{message}")]
    Helper {
        /// Description of the failure.
        message: String,
    },
}

/// Token selection of one answer.
pub struct Sampler {
    settings: Sampling,
    random: StdRng,
    /// Counts of generated tokens; kept only if a penalty needs them.
    counts: BTreeMap<u32, u32>,
    /// Tokens that are never chosen.
    suppressed: Vec<u32>,
}

impl Sampler {
    /// A sampler in its initial state.
    ///
    /// # Errors
    /// A setting is out of its range.
    pub fn new(settings: Sampling) -> Result<Self, SamplingError> {
        settings.validate()?;
        Ok(Self {
            settings,
            random: StdRng::seed_from_u64(settings.seed),
            counts: BTreeMap::new(),
            suppressed: Vec::new(),
        })
    }

    /// Never chooses these tokens.
    #[must_use]
    pub fn suppressing(self, tokens: &[u32]) -> Self {
        Self {
            suppressed: tokens.to_vec(),
            ..self
        }
    }

    /// The next token. `context` is the sequence so far, prompt included.
    ///
    /// # Errors
    /// A logit is NaN or +∞, all are −∞, or there is none.
    pub fn next(&mut self, logits: &[f32], context: &[u32]) -> Result<u32, SampleError> {
        check(logits)?;
        let changed;
        let logits = if self.changes_logits() {
            changed = self.changed(logits, context);
            check(&changed)?;
            &changed
        } else {
            logits
        };
        let token = if self.settings.temperature < TEMPERATURE_MIN {
            argmax(logits)
        } else {
            self.draw(logits)
        };
        if self.settings.frequency_penalty != 0.0 || self.settings.presence_penalty != 0.0 {
            *self.counts.entry(token).or_insert(0) += 1;
        }
        Ok(token)
    }

    /// Whether [`Self::next`] is the plain argmax, independent of the context.
    pub fn is_greedy(&self) -> bool {
        self.settings.temperature < TEMPERATURE_MIN && !self.changes_logits()
    }

    fn changes_logits(&self) -> bool {
        let Sampling {
            repeat_penalty,
            frequency_penalty,
            presence_penalty,
            ..
        } = self.settings;
        let has_penalty =
            repeat_penalty != 1.0 || frequency_penalty != 0.0 || presence_penalty != 0.0;
        has_penalty || !self.suppressed.is_empty()
    }

    /// The logits after the penalties, −∞ for suppressed tokens.
    fn changed(&self, logits: &[f32], context: &[u32]) -> Vec<f32> {
        let mut values = logits.to_vec();
        let logit_of = |values: &mut Vec<f32>, token: u32, change: &dyn Fn(f32) -> f32| {
            if let Some(logit) = usize::try_from(token)
                .ok()
                .and_then(|at| values.get_mut(at))
            {
                *logit = change(*logit);
            }
        };
        for (&token, &count) in &self.counts {
            #[expect(
                clippy::cast_precision_loss,
                reason = "counts of tokens stay far below 2^24"
            )]
            let times = count as f32;
            let less = self.settings.frequency_penalty * times + self.settings.presence_penalty;
            logit_of(&mut values, token, &|logit| logit - less);
        }
        let penalty = self.settings.repeat_penalty;
        if penalty != 1.0 {
            let recent = context
                .get(context.len().saturating_sub(REPEAT_WINDOW)..)
                .unwrap_or(context);
            for token in recent.iter().copied().collect::<BTreeSet<u32>>() {
                logit_of(&mut values, token, &|logit| {
                    if logit >= 0.0 {
                        logit / penalty
                    } else {
                        logit * penalty
                    }
                });
            }
        }
        for &token in &self.suppressed {
            logit_of(&mut values, token, &|_| f32::NEG_INFINITY);
        }
        values
    }

    /// A random token: by the softmax of the logits over the temperature, restricted to the `top_k` most likely tokens,
    /// to the fewest of them that reach `top_p` of the whole distribution, and to those with at least `min_p` of the
    /// first one's probability.
    fn draw(&mut self, logits: &[f32]) -> u32 {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "settings between 1e-30 and 1e7, which an f32 holds"
        )]
        let (inverse, top_p, min_p) = (
            (1.0 / self.settings.temperature) as f32,
            self.settings.top_p as f32,
            self.settings.min_p as f32,
        );
        let greatest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut likely: Vec<(u32, f32)> = (0u32..)
            .zip(logits)
            .map(|(token, &logit)| (token, ((logit - greatest) * inverse).exp()))
            .filter(|(_, weight)| *weight > 0.0)
            .collect();
        let whole: f32 = likely.iter().map(|(_, weight)| weight).sum();
        let by_weight = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
        let top_k = self.settings.top_k.and_then(|k| usize::try_from(k).ok());
        if let Some(k) = top_k.filter(|k| *k < likely.len()) {
            likely.select_nth_unstable_by(k, by_weight);
            likely.truncate(k);
        }
        if self.settings.top_p < 1.0 {
            likely.sort_unstable_by(by_weight);
            let mut reached = 0.0;
            let enough = likely.iter().position(|(_, weight)| {
                reached += weight;
                reached >= top_p * whole
            });
            likely.truncate(enough.map_or(likely.len(), |last| last + 1));
        }
        if min_p > 0.0 {
            // The most likely token has weight 1.
            likely.retain(|(_, weight)| *weight >= min_p);
        }
        let total: f32 = likely.iter().map(|(_, weight)| weight).sum();
        let mut left = self.random.random::<f32>() * total;
        for &(token, weight) in &likely {
            left -= weight;
            if left < 0.0 {
                return token;
            }
        }
        // Rounding can leave a remainder; the most likely token always exists.
        likely
            .last()
            .map_or_else(|| argmax(logits), |(token, _)| *token)
    }
}

/// Rejects logits that define no distribution.
fn check(logits: &[f32]) -> Result<(), SampleError> {
    let mut any_finite = false;
    for (token, &value) in (0u32..).zip(logits) {
        // −∞ rules a token out and is valid.
        if value.is_nan() || value == f32::INFINITY {
            return Err(SampleError::NotFinite { token, value });
        }
        any_finite |= value.is_finite();
    }
    match logits.first() {
        None => Err(SampleError::Empty),
        Some(&value) if !any_finite => Err(SampleError::NotFinite { token: 0, value }),
        Some(_) => Ok(()),
    }
}

/// The first of the greatest entries; 0 if empty.
fn argmax(logits: &[f32]) -> u32 {
    let mut best = (0u32, f32::NEG_INFINITY);
    for (token, &value) in (0u32..).zip(logits) {
        if value > best.1 {
            best = (token, value);
        }
    }
    best.0
}

/// Highest accepted temperature; the limit of the OpenAI API.
pub const TEMPERATURE_MAX: f64 = 2.0;

/// Least accepted `top_p`: below any probability that makes a difference, and well above the least positive `f32`.
pub const TOP_P_MIN: f32 = 1e-30;

/// Range of the repetition penalty. Usual values are 1 to 2; logits stay below a few hundred, and a hundred times that
/// is still far from the limit of an `f32`.
pub const REPEAT_PENALTY_MIN: f32 = 0.01;
/// See [`REPEAT_PENALTY_MIN`].
pub const REPEAT_PENALTY_MAX: f32 = 10.0;

/// Below it the most likely token is taken; the same figure as in candle.
const TEMPERATURE_MIN: f64 = 1e-7;

/// Window of the repetition penalty in tokens; the default of llama.cpp (`repeat_last_n`).
pub const REPEAT_WINDOW: usize = 64;

#[cfg(test)]
mod tests {
    use candle_core::quantized::gguf_file::Value;

    use super::{super::test_vocabulary::TestVocabulary, *};

    fn sampler(settings: Sampling) -> Sampler {
        Sampler::new(settings).unwrap()
    }

    /// Tokens repeatedly drawn from the same logits.
    fn draws(settings: Sampling, logits: &[f32], count: usize) -> Vec<u32> {
        let mut sampler = sampler(settings);
        let mut context = vec![];
        for _ in 0..count {
            let token = sampler.next(logits, &context).unwrap();
            context.push(token);
        }
        context
    }

    #[test]
    fn temperature_zero_takes_the_first_of_the_most_likely() {
        assert_eq!(
            draws(Sampling::GREEDY, &[1.0, 3.0, 3.0, f32::NEG_INFINITY], 2),
            [1, 1]
        );
    }

    #[test]
    fn tokens_come_as_often_as_the_softmax_gives() {
        let logits = [1.0f32, 0.0, -1.0, 2.0];
        let temperature = 0.7;
        let settings = Sampling {
            temperature: f64::from(temperature),
            seed: 11,
            ..Sampling::GREEDY
        };
        let count = 20_000u16;
        let drawn = draws(settings, &logits, usize::from(count));
        let whole: f32 = logits.iter().map(|logit| (logit / temperature).exp()).sum();
        for (token, logit) in (0u32..).zip(logits) {
            let expected = f64::from((logit / temperature).exp() / whole);
            let found: f64 = drawn
                .iter()
                .filter(|drawn| **drawn == token)
                .map(|_| 1.0 / f64::from(count))
                .sum();
            // Four standard deviations of the expected share.
            let bound = 4.0 * (expected * (1.0 - expected) / f64::from(count)).sqrt();
            assert!(
                (found - expected).abs() < bound,
                "{token}: {found} of {expected}"
            );
        }
    }

    #[test]
    fn a_seed_gives_the_same_tokens_again_and_another_gives_others() {
        let settings = |seed| Sampling {
            temperature: 1.0,
            seed,
            ..Sampling::GREEDY
        };
        let logits = [0.0; 16];
        assert_eq!(
            draws(settings(1), &logits, 32),
            draws(settings(1), &logits, 32)
        );
        assert_ne!(
            draws(settings(1), &logits, 32),
            draws(settings(2), &logits, 32)
        );
    }

    #[test]
    fn top_k_top_p_and_min_p_leave_out_the_unlikely() {
        let logits = [3.0, 2.9, 2.8, -5.0, -5.0];
        let warm = Sampling {
            temperature: 1.0,
            ..Sampling::GREEDY
        };
        for settings in [
            Sampling {
                top_k: Some(2),
                ..warm
            },
            Sampling { top_p: 0.6, ..warm },
            Sampling {
                top_k: Some(3),
                top_p: 0.6,
                ..warm
            },
            Sampling {
                min_p: 0.85,
                ..warm
            },
        ] {
            let tokens = draws(settings, &logits, 200);
            assert!(tokens.iter().all(|&token| token < 2), "{settings:?}");
            assert!(tokens.contains(&0) && tokens.contains(&1), "{settings:?}");
        }
    }

    #[test]
    fn a_wish_takes_what_it_says_and_the_most_likely_token_for_the_rest() {
        let with = |wish: SamplingWish| Sampling::from(wish);
        assert_eq!(with(SamplingWish::NONE), Sampling::GREEDY);
        let cold = SamplingWish {
            temperature: Some(1.0),
            top_p: Some(0.0),
            top_k: Some(0),
            ..SamplingWish::NONE
        };
        assert_eq!(with(cold), Sampling::GREEDY);
        let own = SamplingWish {
            temperature: Some(0.6),
            top_k: Some(20),
            ..SamplingWish::NONE
        };
        let api = SamplingWish {
            temperature: Some(1.0),
            top_p: Some(0.9),
            ..SamplingWish::NONE
        };
        let asked = SamplingWish {
            top_k: Some(0),
            seed: Some(7),
            ..SamplingWish::NONE
        };
        let expected = Sampling {
            temperature: 0.6,
            top_p: 0.9,
            seed: 7,
            ..Sampling::GREEDY
        };
        assert_eq!(with(asked.or(own).or(api)), expected);
    }

    #[test]
    fn what_a_models_file_recommends_is_taken_as_far_as_it_can_be_used() {
        let mut vocabulary = TestVocabulary::chatml();
        assert_eq!(recommended(&vocabulary.header()), SamplingWish::NONE);
        vocabulary.more.extend([
            ("general.sampling.temp", Value::F32(0.5)),
            ("general.sampling.top_k", Value::I32(20)),
            ("general.sampling.top_p", Value::F32(9.0)),
            ("general.sampling.min_p", Value::F32(f32::NAN)),
            ("general.sampling.penalty_repeat", Value::F32(1.5)),
        ]);
        let expected = SamplingWish {
            temperature: Some(0.5),
            top_k: Some(20),
            repeat_penalty: Some(1.5),
            ..SamplingWish::NONE
        };
        assert_eq!(recommended(&vocabulary.header()), expected);
    }

    #[test]
    fn suppressed_tokens_are_never_chosen() {
        for settings in [
            Sampling::GREEDY,
            Sampling {
                temperature: 1.0,
                ..Sampling::GREEDY
            },
        ] {
            let mut sampler = sampler(settings).suppressing(&[1, 9]);
            assert!(!sampler.is_greedy(), "the greatest logit may be ruled out");
            for _ in 0..50 {
                assert_ne!(sampler.next(&[1.0, 9.0, 1.0], &[]).unwrap(), 1);
            }
            assert!(sampler.next(&[f32::NEG_INFINITY, 1.0], &[]).is_err());
        }
    }

    #[test]
    fn penalties_make_repetition_less_likely() {
        let logits = [1.0, 0.9, 0.5];
        for settings in [
            Sampling {
                repeat_penalty: 1.5,
                ..Sampling::GREEDY
            },
            Sampling {
                frequency_penalty: 0.3,
                ..Sampling::GREEDY
            },
            Sampling {
                presence_penalty: 0.3,
                ..Sampling::GREEDY
            },
        ] {
            assert_eq!(draws(settings, &logits, 2), [0, 1], "{settings:?}");
        }
    }

    #[test]
    fn what_is_not_a_number_is_an_error_whatever_the_settings() {
        for temperature in [0.0, 1.0] {
            for (logits, token) in [
                (vec![1.0, f32::NAN], 1),
                (vec![f32::INFINITY, 1.0], 0),
                (vec![f32::NEG_INFINITY; 3], 0),
            ] {
                let settings = Sampling {
                    temperature,
                    ..Sampling::GREEDY
                };
                match sampler(settings).next(&logits, &[]) {
                    Err(SampleError::NotFinite { token: found, .. }) => assert_eq!(found, token),
                    other => panic!("{other:?}"),
                }
            }
        }
        assert_eq!(
            sampler(Sampling::GREEDY).next(&[], &[]),
            Err(SampleError::Empty)
        );
    }

    #[test]
    fn the_least_and_the_greatest_settings_give_tokens() {
        let logits = [300.0, -300.0, 299.0, f32::NEG_INFINITY];
        for repeat_penalty in [REPEAT_PENALTY_MIN, REPEAT_PENALTY_MAX] {
            for top_p in [f64::from(TOP_P_MIN), 9.999_999_999_999_999e-31, 1.0] {
                for temperature in [0.0, 1e-7, TEMPERATURE_MAX] {
                    let settings = Sampling {
                        temperature,
                        top_p,
                        top_k: None,
                        min_p: 1.0 - top_p,
                        seed: 3,
                        repeat_penalty,
                        frequency_penalty: -2.0,
                        presence_penalty: 2.0,
                    };
                    settings.validate().unwrap();
                    let drawn = draws(settings, &logits, 80);
                    assert!(
                        drawn.iter().all(|&token| token < 3),
                        "{settings:?}: {drawn:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_penalty_that_overflows_names_the_token() {
        let mut sampler = sampler(Sampling {
            repeat_penalty: REPEAT_PENALTY_MIN,
            temperature: 1.0,
            ..Sampling::GREEDY
        });
        assert_eq!(
            sampler.next(&[1.0, f32::MAX], &[1]),
            Err(SampleError::NotFinite {
                token: 1,
                value: f32::INFINITY
            })
        );
    }

    #[test]
    fn settings_that_would_be_lost_in_the_arithmetic_are_refused_with_the_limit() {
        let good = Sampling::GREEDY;
        let said = |settings: Sampling| settings.validate().unwrap_err().to_string();
        assert_eq!(
            said(Sampling {
                top_p: 1e-46,
                ..good
            }),
            "top_p: `1e-46` is not between 1e-30 and 1"
        );
        assert_eq!(
            said(Sampling {
                repeat_penalty: 2e-38,
                ..good
            }),
            "repeat_penalty: `2e-38` is not between 0.01 and 10"
        );
        assert_eq!(
            said(Sampling {
                temperature: 2.5,
                ..good
            }),
            "temperature: `2.5` is not between 0 and 2"
        );
    }

    #[test]
    fn settings_out_of_range_are_named() {
        let good = Sampling::GREEDY;
        for (settings, name) in [
            (
                Sampling {
                    temperature: 2.1,
                    ..good
                },
                "temperature",
            ),
            (
                Sampling {
                    temperature: f64::NAN,
                    ..good
                },
                "temperature",
            ),
            (Sampling { top_p: 0.0, ..good }, "top_p"),
            (
                Sampling {
                    top_k: Some(0),
                    ..good
                },
                "top_k",
            ),
            (
                Sampling {
                    repeat_penalty: 0.0,
                    ..good
                },
                "repeat_penalty",
            ),
            (
                Sampling {
                    frequency_penalty: -3.0,
                    ..good
                },
                "frequency_penalty",
            ),
            (
                Sampling {
                    presence_penalty: f32::INFINITY,
                    ..good
                },
                "presence_penalty",
            ),
        ] {
            let error = settings.validate().unwrap_err().to_string();
            assert!(error.starts_with(name), "{error}");
        }
    }
}
