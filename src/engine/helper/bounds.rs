//! Bounds of jobs: bytes, time of a processor, and how many exist at once.

use std::time::Duration;

use crate::units::Bytes;

/// Grammars that exist at once: one for the answer that is written, one for the next. Our choice: the engine writes one
/// answer at a time.
pub(super) const FORMS_MAX: usize = 2;

/// What one job may allocate, beside what it was given: a grammar's states grow with the vocabulary that masks are computed
/// over.
pub(super) fn job_bytes(tokens: usize) -> Bytes {
    Bytes::of_len((tokens * JOB_BYTES_PER_TOKEN).clamp(JOB_BYTES_MIN, JOB_BYTES_MAX))
}

/// What the helper and its jobs occupy at most: the tree, which has at most as many nodes as the texts have bytes, of 8 bytes
/// each; the texts and 12 bytes for each token; a mask of a bit for each token; the jobs.
pub(in crate::engine) fn most(tokens: usize, text_bytes: usize) -> Bytes {
    let tree = Bytes::of_len(text_bytes * 9 + tokens * 12 + tokens.div_ceil(8));
    let jobs = u64::try_from(FORMS_MAX + RENDERS_MAX).unwrap_or(u64::MAX);
    tree.saturating_add(Bytes::new(job_bytes(tokens).get().saturating_mul(jobs)))
}

/// Texts that are rendered at once; one takes milliseconds.
const RENDERS_MAX: usize = 1;

const JOB_BYTES_PER_TOKEN: usize = 128;
const JOB_BYTES_MIN: usize = 2 << 20;
const JOB_BYTES_MAX: usize = 16 << 20;

/// What a job may take of a processor until its first answer. Our choice: a hundred times what the schemas of products take.
pub(super) const BUILD_CPU_MAX: Duration = Duration::from_secs(2);

/// What one token's mask may take of a processor.
pub(super) const STEP_CPU_MAX: Duration = Duration::from_millis(500);
