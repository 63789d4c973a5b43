//! Tokens processed together by the delta rule, or by a selective scan.

/// Several tokens of one head.
pub(super) struct Steps<'chunk> {
    pub(super) queries: &'chunk [&'chunk [f32]],
    pub(super) keys: &'chunk [&'chunk [f32]],
    pub(super) values: &'chunk [&'chunk [f32]],
    pub(super) decays: &'chunk [f32; TOKENS_TOGETHER],
    pub(super) strengths: &'chunk [f32; TOKENS_TOGETHER],
    /// Whether a key's known value is subtracted first, as the delta rule does and a selective scan does not.
    pub(super) corrects: bool,
}

/// Tokens applied while a row of the state stays in registers: their keys and queries fit the first-level cache.
pub(super) const TOKENS_TOGETHER: usize = 16;
/// Row length supported by this form: the state size of every public model of the family.
pub(super) const DIM: usize = 128;
