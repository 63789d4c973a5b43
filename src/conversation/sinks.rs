//! Attention sinks: tokens that stay when the oldest are dropped.

use serde::{Deserialize, Serialize};

use cotenant_units::Tokens;

/// The beginning of a sequence, which stays when the oldest tokens behind it are dropped.
///
/// Models give the first tokens of a sequence much of their attention whatever they say: without them what follows falls
/// apart, with some of them it goes on ("attention sinks", <https://arxiv.org/abs/2309.17453>).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sinks {
    /// The whole prompt.
    Prompt,
    /// So many tokens.
    Tokens(Tokens),
}

impl Sinks {
    /// Of a request that allows dropping and does not say what stays: the four of the paper, and of Ollama's `num_keep`.
    pub const DEFAULT: Self = Self::Tokens(Tokens::new(4));

    /// As clients write it: a number of tokens, or -1 for the whole prompt (llama.cpp's `n_keep`); `None` for anything else.
    ///
    /// ```
    /// # use cotenant_conversation::sinks::Sinks;
    /// # use cotenant_units::Tokens;
    /// assert_eq!(Sinks::from_wire(-1), Some(Sinks::Prompt));
    /// assert_eq!(Sinks::from_wire(64), Some(Sinks::Tokens(Tokens::new(64))));
    /// assert_eq!(Sinks::from_wire(-2), None);
    /// ```
    #[must_use]
    pub fn from_wire(number: i64) -> Option<Self> {
        match number {
            -1 => Some(Self::Prompt),
            number => u32::try_from(number)
                .ok()
                .map(|tokens| Self::Tokens(Tokens::new(tokens))),
        }
    }

    /// How many tokens stay of a sequence that began with a prompt of `prompt`.
    #[must_use]
    pub const fn tokens(self, prompt: Tokens) -> Tokens {
        match self {
            Self::Prompt => prompt,
            Self::Tokens(tokens) => tokens,
        }
    }
}
