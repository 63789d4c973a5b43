//! Segmentation of long texts that preserves their tokens.

/// A text cut where every known rule cuts it as well, so that the pieces have the tokens of the whole.
pub(super) struct Segments<'text> {
    pub(super) rest: &'text str,
    /// Bytes from which on a place to cut is looked for.
    pub(super) target: usize,
    pub(super) cut: Cut,
}

/// Where a text may be cut without changing its tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cut {
    /// Where every set of rules for byte-level vocabularies cuts as well.
    Anywhere,
    /// Before a single space only: no token goes on across one.
    BeforeSpaces,
    /// Nowhere.
    Nowhere,
}

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
            if at >= self.target.max(1) && self.cut.allows(before, character, after) {
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
    fn allows(self, before: [Option<char>; 2], character: char, after: Option<char>) -> bool {
        match self {
            Self::Anywhere => may_cut(before, character, after),
            Self::BeforeSpaces => {
                character == ' '
                    && before[1].is_some_and(|before| !before.is_whitespace())
                    && after.is_some_and(|after| !after.is_whitespace())
            }
            Self::Nowhere => false,
        }
    }
}

/// Whether no rule joins what ends with `before` and what begins with `character`, nor looks ahead across that place.
///
/// A single line end is joined with no more than a slash; a single space goes with what follows it; and letters end before
/// punctuation, of which only such is taken here as is neither a mark nor a number by any table, and no apostrophe, since a
/// contraction may belong to its word.
fn may_cut(before: [Option<char>; 2], character: char, after: Option<char>) -> bool {
    let [Some(second), Some(before)] = before else {
        return false;
    };
    let letter = before.is_ascii_alphabetic()
        || matches!(before, '\u{3041}'..='\u{3096}' | '\u{30a1}'..='\u{30fa}' | '\u{4e00}'..='\u{9fff}' | '\u{ac00}'..='\u{d7a3}');
    let punctuation = (character.is_ascii_punctuation() && character != '\'')
        || matches!(character, '\u{3001}' | '\u{3002}' | '\u{ff0c}');
    (matches!(before, '\n' | '\r') && !second.is_whitespace() && !character.is_whitespace() && character != '/')
        || (character == ' ' && !before.is_whitespace() && after.is_some_and(|after| !after.is_whitespace()))
        || (letter && punctuation)
}
