//! Bounds of jobs: bytes, and time of a processor.

use std::time::Duration;

use cotenant_units::Bytes;

/// What the grammars that exist at once may allocate together: the one of the answer that is written and the one of the next,
/// or a single large one.
pub(super) const FORMS: Bytes = Bytes::from_mib(10);

/// What a grammar of so many bytes may allocate for an answer of so many tokens, beside what the helper shares with it. Measured
/// with llguidance 1.9 for 49,152 and 262,144 tokens: 3 MiB for the 5000 lexer states that are allowed, 120 to 160 bytes for
/// each byte of JSON schemas of 40 tools, 100 to 140 bytes for each token of an answer.
pub(crate) fn form_bytes(grammar: usize, answer_tokens: usize) -> Bytes {
    let most = FORM_BASE
        .saturating_add(grammar.saturating_mul(FORM_BYTES_PER_BYTE))
        .saturating_add(answer_tokens.saturating_mul(FORM_BYTES_PER_TOKEN));
    Bytes::of_len(most).round_up(Bytes::from_mib(1)).min(FORMS)
}

const FORM_BASE: usize = 4 << 20;
const FORM_BYTES_PER_BYTE: usize = 160;
const FORM_BYTES_PER_TOKEN: usize = 144;

/// What a text that is rendered may allocate, beside what it was given. One is rendered at a time.
pub(super) const RENDER: Bytes = Bytes::from_mib(2);

/// What the helper occupies once it has the vocabulary: its own structures, and the texts as they were sent.
pub(super) fn without_grammars(tokens: usize, text_bytes: usize) -> Bytes {
    OWN.saturating_add(Bytes::of_len(text_bytes + tokens * 4))
        .saturating_add(RENDER)
}

/// What the helper and its jobs occupy at most, of a vocabulary of so many texts. Either it builds the tree: a list of texts
/// (56 bytes each beside the text), places of the tokens (20 bytes each), nodes as they are inserted and as they are kept
/// (28 bytes each). Or jobs share it: nodes of 8 bytes, the text, places of 12 bytes for each token, and a quarter of that
/// again for the tokens that are no plain text.
pub(crate) fn most(tokens: usize, text_bytes: usize) -> Bytes {
    // Vocabularies that merge pairs have 2.0 to 2.3 nodes for each token.
    let nodes = text_bytes.min(tokens.saturating_mul(3));
    let built = Bytes::of_len(tokens * 76 + text_bytes * 2 + nodes * 28);
    let kept = Bytes::of_len((nodes * 8 + text_bytes + tokens * 12) / 4 * 5);
    OWN.saturating_add(RENDER)
        .saturating_add(built.max(kept.saturating_add(FORMS)))
}

/// What a process of this program holds before it has anything to do, and what a job touches of what it shares.
const OWN: Bytes = Bytes::from_mib(1);

/// What a job may take of a processor until its first answer. Our choice: a hundred times what the schemas of products take.
pub(super) const BUILD_CPU_MAX: Duration = Duration::from_secs(2);

/// What one token's mask may take of a processor.
pub(super) const STEP_CPU_MAX: Duration = Duration::from_millis(500);
