//! Splitter of streamed text into sentences for speech.

use super::spoken::spoken;

/// Collects pieces of text and returns whole sentences, without markup.
///
/// ```
/// # use cotenant_speech::sentences::Sentences;
/// let mut sentences = Sentences::default();
/// assert!(sentences.push("It is 21.5 degrees").is_empty());
/// assert_eq!(sentences.push(". The window").concat(), "It is 21.5 degrees.");
/// assert_eq!(sentences.finish().as_deref(), Some("The window"));
/// ```
#[derive(Clone, Debug, Default)]
pub struct Sentences {
    pending: String,
}

impl Sentences {
    /// Adds a piece and returns the sentences that are now complete.
    pub fn push(&mut self, piece: &str) -> Vec<String> {
        self.pending.push_str(piece);
        let mut whole = Vec::new();
        while let Some(end) = first_end(&self.pending) {
            let rest = self.pending.split_off(end);
            let sentence = std::mem::replace(&mut self.pending, rest);
            whole.extend(spoken(&sentence));
        }
        whole
    }

    /// Returns the remaining text, if it can be spoken.
    #[must_use]
    pub fn finish(self) -> Option<String> {
        spoken(&self.pending)
    }
}

/// Index behind the first sentence of `text`; `None` while it may continue.
fn first_end(text: &str) -> Option<usize> {
    let mut characters = text.char_indices().peekable();
    let mut last_break = None;
    while let Some((at, character)) = characters.next() {
        let behind = at + character.len_utf8();
        let next = characters.peek().map(|&(_, next)| next);
        match character {
            '\n' | '。' | '！' | '？' => return Some(behind),
            '!' | '?' | '…' if next.is_some_and(char::is_whitespace) => return Some(behind),
            '.' if next.is_some_and(char::is_whitespace)
                && !is_abbreviated(text.get(..at).unwrap_or_default()) =>
            {
                return Some(behind);
            }
            // A quotation ends with its sentence.
            '"' | '\'' | '”' | '’' | ')' if next.is_some_and(char::is_whitespace) => {
                let before = text.get(..at).unwrap_or_default();
                if before.ends_with(['.', '!', '?', '…']) {
                    return Some(behind);
                }
            }
            ' ' | ',' | ';' => last_break = Some(behind),
            _ => {}
        }
        if behind >= SENTENCE_BYTES_MAX {
            return Some(last_break.unwrap_or(behind));
        }
    }
    None
}

/// Whether a full stop after `text` belongs to a list number, an initial or a title.
fn is_abbreviated(text: &str) -> bool {
    let word = text.rsplit(char::is_whitespace).next().unwrap_or_default();
    let is_number = !word.is_empty() && word.chars().all(|character| character.is_ascii_digit());
    // "2. Turn it off" begins a line; "in room 2." does not.
    let begins_line = text.trim_start().len() == word.len() || text.ends_with(&format!("\n{word}"));
    let is_initial =
        word.chars().count() == 1 && word.chars().all(char::is_uppercase) && word != "I";
    (is_number && begins_line) || is_initial || TITLES.contains(&word)
}

/// Words whose full stop does not end a sentence.
const TITLES: [&str; 9] = ["Dr", "Mr", "Mrs", "Ms", "St", "e.g", "i.e", "No", "vs"];

/// A longer sentence is cut at its last space or comma: some 20 s of speech.
const SENTENCE_BYTES_MAX: usize = 300;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn cut(text: &str) -> Vec<String> {
        let mut sentences = Sentences::default();
        let mut whole = sentences.push(text);
        whole.extend(sentences.finish());
        whole
    }

    #[test]
    fn sentences_end_where_a_reader_would_stop() {
        assert_eq!(
            cut("Hello! It is 21.5 degrees. Dr. Who left at 7.30 p.m. today?\nYes."),
            [
                "Hello!",
                "It is 21.5 degrees.",
                "Dr. Who left at 7.30 p.m.",
                "today?",
                "Yes."
            ]
        );
        assert_eq!(
            cut("1. Turn it off. 2. Wait."),
            ["1. Turn it off.", "2. Wait."]
        );
        assert_eq!(
            cut("Go to room 2. Then stop."),
            ["Go to room 2.", "Then stop."]
        );
        assert_eq!(cut("\"Stop.\" He did."), ["\"Stop.\"", "He did."]);
        assert_eq!(cut("一。二"), ["一。", "二"]);
    }

    #[test]
    fn what_cannot_be_spoken_is_dropped() {
        assert_eq!(cut(" \n ... \n - \n"), Vec::<String>::new());
        assert_eq!(
            cut("## Plan\n**Wait. Then go.** 👍\n|a|b|\n|-|-|\n"),
            ["Plan", "Wait.", "Then go.", "a, b"]
        );
    }

    #[test]
    fn a_text_without_an_end_is_cut_between_words() {
        let text = "word, ".repeat(200);
        let parts = cut(&text);
        assert!(
            parts
                .iter()
                .all(|part| part.len() <= SENTENCE_BYTES_MAX && part.starts_with("word"))
        );
        assert_eq!(parts.join(" "), text.trim());
    }

    proptest! {
        #[test]
        fn the_cuts_do_not_depend_on_the_pieces_and_lose_nothing(text in "[a-zA-Z0-9 .!?\n\"…é,]{0,400}", size in 1usize..20) {
            let mut sentences = Sentences::default();
            let mut whole = Vec::new();
            let characters: Vec<char> = text.chars().collect();
            for piece in characters.chunks(size) {
                whole.extend(sentences.push(&piece.iter().collect::<String>()));
            }
            whole.extend(sentences.finish());
            prop_assert_eq!(&whole, &cut(&text));
            let spoken = |text: &str| text.chars().filter(|c| c.is_alphanumeric()).collect::<String>();
            prop_assert_eq!(spoken(&whole.concat()), spoken(&text));
        }
    }
}
