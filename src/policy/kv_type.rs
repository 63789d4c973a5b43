//! Storage types of the KV cache.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Element type of the KV cache, the smallest first.
///
/// A smaller type loses precision of all stored tokens; a larger one applies to later tokens only, and lost precision
/// is restored only by recomputing them.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum KvType {
    /// Blocks of 32 elements of 4 bits with one `f16` scale: the layout of GGUF's `Q4_0`.
    Q4,
    /// Blocks of 32 elements of 8 bits with one `f16` scale: the layout of GGUF's `Q8_0`.
    Q8,
    /// One `f16` per element.
    #[default]
    F16,
}

impl KvType {
    /// All types, the smallest first.
    pub const ALL: [Self; 3] = [Self::Q4, Self::Q8, Self::F16];

    /// Returns the bytes of one head's `elements` for one token.
    ///
    /// ```
    /// # use cotenant_policy::kv_type::KvType;
    /// assert_eq!(KvType::ALL.map(|kind| kind.row_bytes(128)), [72, 136, 256]);
    /// ```
    #[must_use]
    pub const fn row_bytes(self, elements: u32) -> u64 {
        let elements = elements as u64;
        let scales = 2 * elements.div_ceil(SHARE_A_SCALE as u64);
        match self {
            Self::Q4 => scales + elements.div_ceil(2),
            Self::Q8 => scales + elements,
            Self::F16 => 2 * elements,
        }
    }

    /// Returns its name in the configuration and on the command line: `f16`, `q8`, `q4`.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Q4 => "q4",
            Self::Q8 => "q8",
            Self::F16 => "f16",
        }
    }

    /// Returns the next smaller type, if any.
    #[must_use]
    pub const fn smaller(self) -> Option<Self> {
        match self {
            Self::Q4 => None,
            Self::Q8 => Some(Self::Q4),
            Self::F16 => Some(Self::Q8),
        }
    }

    /// Returns the loss of value of context in this type compared with `f16`, in parts of 1024.
    ///
    /// Our choice: more than the price of context that is hardly ever needed, and well below that of streaming layers.
    #[must_use]
    pub const fn worth_lost(self) -> u64 {
        match self {
            Self::Q4 => 256,
            Self::Q8 => 64,
            Self::F16 => 0,
        }
    }
}

impl fmt::Display for KvType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.word())
    }
}

/// Elements that share a scale, as in GGUF's `Q8_0` and `Q4_0`.
pub const SHARE_A_SCALE: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn smaller_types_take_less_and_lose_more() {
        for pair in KvType::ALL.windows(2) {
            for elements in [8, 32, 80, 96, 256] {
                assert!(pair[0].row_bytes(elements) < pair[1].row_bytes(elements));
            }
            assert!(pair[0].worth_lost() > pair[1].worth_lost() && pair[0] < pair[1]);
            assert_eq!(pair[1].smaller(), Some(pair[0]));
        }
    }
}
