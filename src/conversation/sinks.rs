//! Attention sinks: tokens that are kept when the oldest are dropped.

use serde::{Deserialize, Serialize};

use cotenant_units::Tokens;

/// The beginning of a sequence that is kept when older tokens behind it are dropped.
///
/// Models direct much of their attention to the first tokens of a sequence, whatever they are: without them the output
/// degenerates, with some of them it remains stable ("attention sinks", <https://arxiv.org/abs/2309.17453>).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sinks {
    /// The whole prompt.
    Prompt,
    /// A number of tokens.
    Tokens(Tokens),
}

impl Sinks {
    /// Default if a request permits dropping without a number: four, as in the paper and Ollama's `num_keep`.
    pub const DEFAULT: Self = Self::Tokens(Tokens::new(4));

    /// The wire format: a number of tokens, or -1 for the whole prompt (llama.cpp's `n_keep`); `None` for other values.
    ///
    /// ```
    /// # use cotenant_conversation::sinks::Sinks;
    /// # use cotenant_units::Tokens;
    /// assert_eq!(Sinks::from_wire(-1), Some(Sinks::Prompt));
    /// assert_eq!(Sinks::from_wire(64), Some(Sinks::Tokens(Tokens::new(64))));
    /// assert_eq!(Sinks::from_wire(-2), None);
    /// ```
    pub fn from_wire(number: i64) -> Option<Self> {
        match number {
            -1 => Some(Self::Prompt),
            number => u32::try_from(number)
                .ok()
                .map(|tokens| Self::Tokens(Tokens::new(tokens))),
        }
    }

    /// The number of kept tokens of a sequence that began with a prompt of `prompt`.
    #[must_use]
    pub const fn tokens(self, prompt: Tokens) -> Tokens {
        match self {
            Self::Prompt => prompt,
            Self::Tokens(tokens) => tokens,
        }
    }
}
