//! Tokens processed together by the delta rule.

/// Several tokens of one head.
pub(super) struct Steps<'chunk> {
    pub(super) queries: &'chunk [&'chunk [f32]],
    pub(super) keys: &'chunk [&'chunk [f32]],
    pub(super) values: &'chunk [&'chunk [f32]],
    pub(super) decays: &'chunk [f32; TOKENS_TOGETHER],
    pub(super) strengths: &'chunk [f32; TOKENS_TOGETHER],
}

/// Tokens applied while a row of the state stays in registers: their keys and queries fit the first-level cache.
pub(super) const TOKENS_TOGETHER: usize = 16;
/// Row length supported by this form: the state size of every public model of the family.
pub(super) const DIM: usize = 128;
