//! Segmentation of long texts that preserves their tokens.

use super::terms::{SPACE, UNBROKEN_BYTES_MAX};

/// A text split at positions where every known rule splits too, so that the segments have the tokens of the whole.
pub(super) struct Segments<'text> {
    pub(super) rest: &'text str,
    /// Length after which a split is searched for.
    pub(super) target: usize,
    pub(super) cut: &'text Cut,
}

/// Positions at which a text may be split without changing its tokens.
#[derive(Debug)]
pub(super) enum Cut {
    /// Positions at which every set of rules for byte-level vocabularies splits too.
    ByRules,
    /// Between two characters that are adjacent in no piece, regardless of the surrounding text.
    BetweenPieces(Pairs),
}

/// Pairs of characters that are adjacent in a piece, and hash collisions: a missed split costs little, a wrong one
/// would change tokens.
#[derive(Debug)]
pub(super) struct Pairs {
    bits: Vec<u64>,
}

impl Pairs {
    /// From these pieces.
    pub(super) fn of<'piece>(pieces: impl Iterator<Item = &'piece str>) -> Self {
        let mut pairs = Self {
            bits: vec![0; PAIR_BITS / 64],
        };
        for piece in pieces {
            for (left, right) in piece.chars().zip(piece.chars().skip(1)) {
                let (word, bit) = Self::place(left, right);
                if let Some(word) = pairs.bits.get_mut(word) {
                    *word |= bit;
                }
            }
        }
        pairs
    }

    fn has(&self, left: char, right: char) -> bool {
        let (word, bit) = Self::place(left, right);
        self.bits.get(word).is_some_and(|word| word & bit != 0)
    }

    /// The word and bit of a pair, by a multiplicative hash.
    fn place(left: char, right: char) -> (usize, u64) {
        let pair = u64::from(u32::from(left)) << 32 | u64::from(u32::from(right));
        let hash = pair.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - PAIR_BITS.ilog2());
        (usize::try_from(hash / 64).unwrap_or(0), 1 << (hash % 64))
    }
}

/// The 262 000 pieces of Gemma 3 set 6 bits in 100; 256 KiB.
const PAIR_BITS: usize = 1 << 21;

/// Memory of [`Pairs`].
pub(super) const PAIR_BYTES: usize = PAIR_BITS / 8;

impl<'text> Iterator for Segments<'text> {
    type Item = &'text str;

    fn next(&mut self) -> Option<&'text str> {
        if self.rest.is_empty() {
            return None;
        }
        let mut before = [None; 2];
        let mut characters = self.rest.char_indices().peekable();
        while let Some((at, character)) = characters.next() {
            let after = characters.peek().map(|&(_, character)| character);
            if at >= self.target.max(1)
                && (self.cut.allows(before, character, after) || must_cut(at))
            {
                let (segment, rest) = self.rest.split_at_checked(at)?;
                self.rest = rest;
                return Some(segment);
            }
            before = [before[1], Some(character)];
        }
        Some(std::mem::take(&mut self.rest))
    }
}

impl Cut {
    fn allows(&self, before: [Option<char>; 2], character: char, after: Option<char>) -> bool {
        // As written in the pieces.
        let written = |character: char| if character == ' ' { SPACE } else { character };
        match self {
            Self::ByRules => may_cut(before, character, after),
            Self::BetweenPieces(pairs) => {
                before[1].is_some_and(|before| !pairs.has(written(before), written(character)))
            }
        }
    }
}

/// Whether a text is split at this length even inside a possible token: in an encoded picture or one character
/// repeated, which is not natural text. A few tokens next to the split may then differ from those of the whole, and the
/// work grows linearly with the length.
const fn must_cut(length: usize) -> bool {
    length >= UNBROKEN_BYTES_MAX - 4
}

/// Whether no rule joins text ending in `before` with `character`, or looks ahead across that position.
///
/// A single line end is joined with at most a slash; a single space belongs to the text after it; and letters end
/// before punctuation, of which only characters count that no table lists as a mark or a number, and not the
/// apostrophe, since a contraction may belong to its word.
fn may_cut(before: [Option<char>; 2], character: char, after: Option<char>) -> bool {
    let [Some(second), Some(before)] = before else {
        return false;
    };
    let letter = before.is_ascii_alphabetic()
        || matches!(before, '\u{3041}'..='\u{3096}' | '\u{30a1}'..='\u{30fa}' | '\u{4e00}'..='\u{9fff}' | '\u{ac00}'..='\u{d7a3}');
    let punctuation = (character.is_ascii_punctuation() && character != '\'')
        || matches!(character, '\u{3001}' | '\u{3002}' | '\u{ff0c}');
    (matches!(before, '\n' | '\r')
        && !second.is_whitespace()
        && !character.is_whitespace()
        && character != '/')
        || (character == ' '
            && !before.is_whitespace()
            && after.is_some_and(|after| !after.is_whitespace()))
        || (letter && punctuation)
}
