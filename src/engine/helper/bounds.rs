//! Bounds of jobs: memory and CPU time.

use std::time::Duration;

use cotenant_units::Bytes;

/// Total allocation limit of concurrent grammars: those of the running and the next answer, or a single large one.
pub(super) const FORMS: Bytes = Bytes::from_mib(10);

/// Allocation limit of a grammar of this many bytes, for an answer of this many tokens, beyond memory shared with the
/// helper. Measured with llguidance 1.9 for 49,152 and 262,144 tokens: 3 MiB for the 5000 allowed lexer states, 120 to
/// 160 bytes per byte of JSON schemas of 40 tools, 100 to 140 bytes per token of an answer.
pub(crate) fn form_bytes(grammar: usize, answer_tokens: usize) -> Bytes {
    let most = FORM_BASE
        .saturating_add(grammar.saturating_mul(FORM_BYTES_PER_BYTE))
        .saturating_add(answer_tokens.saturating_mul(FORM_BYTES_PER_TOKEN));
    Bytes::of_len(most).round_up(Bytes::from_mib(1)).min(FORMS)
}

const FORM_BASE: usize = 4 << 20;
const FORM_BYTES_PER_BYTE: usize = 160;
const FORM_BYTES_PER_TOKEN: usize = 144;

/// Allocation limit of rendering a text, beyond its input. Renderings are sequential.
pub(super) const RENDER: Bytes = Bytes::from_mib(2);

/// Memory of the helper with the vocabulary: its own structures, and the texts as sent.
pub(super) fn without_grammars(tokens: usize, text_bytes: usize) -> Bytes {
    OWN.saturating_add(Bytes::of_len(text_bytes + tokens * 4))
        .saturating_add(RENDER)
}

/// Upper bound of the helper and its jobs, for a vocabulary of this many texts. Either the tree is being built: a list
/// of texts (56 bytes each besides the text), positions of the tokens (20 bytes each), nodes in both insertion and
/// final form (28 bytes each). Or jobs share it: nodes of 8 bytes, the text, positions of 12 bytes per token, and a
/// quarter of that again for the tokens that are not plain text.
pub(crate) fn most(tokens: usize, text_bytes: usize) -> Bytes {
    // Vocabularies of merged pairs have 2.0 to 2.3 nodes per token.
    let nodes = text_bytes.min(tokens.saturating_mul(3));
    let built = Bytes::of_len(tokens * 76 + text_bytes * 2 + nodes * 28);
    let kept = Bytes::of_len((nodes * 8 + text_bytes + tokens * 12) / 4 * 5);
    OWN.saturating_add(RENDER)
        .saturating_add(built.max(kept.saturating_add(FORMS)))
}

/// Idle memory of a process of this program, and a job's writes to shared pages.
const OWN: Bytes = Bytes::from_mib(1);

/// CPU time of a job until its first reply. Our choice: a hundred times the time for schemas of products.
pub(super) const BUILD_CPU_MAX: Duration = Duration::from_secs(2);

/// CPU time of one token's mask.
pub(super) const STEP_CPU_MAX: Duration = Duration::from_millis(500);
