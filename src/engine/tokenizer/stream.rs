//! Streaming conversion of token bytes to text.

/// Joins the bytes of tokens to text, in whole characters.
#[derive(Debug, Default)]
pub struct TextStream {
    /// The start of an incomplete character, at most three bytes.
    pending: Vec<u8>,
}

impl TextStream {
    /// The text completed by `bytes`; invalid bytes become `U+FFFD`.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.pending.extend_from_slice(bytes);
        let mut text = String::new();
        let mut done = 0;
        for chunk in self.pending.utf8_chunks() {
            text.push_str(chunk.valid());
            done += chunk.valid().len();
            let invalid = chunk.invalid();
            let at_end = done + invalid.len() == self.pending.len();
            if invalid.is_empty() || (at_end && may_become_character(invalid)) {
                break;
            }
            text.push(char::REPLACEMENT_CHARACTER);
            done += invalid.len();
        }
        self.pending.drain(..done);
        text
    }

    /// The rest at the end of the stream: `U+FFFD` for an incomplete character.
    pub fn finish(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.pending)).into_owned()
    }
}

/// Whether incomplete bytes can become a character.
fn may_become_character(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}
