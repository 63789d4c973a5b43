//! Tokens to which the delta rule is applied together.

/// Some tokens of one head.
pub(super) struct Steps<'chunk> {
    pub(super) queries: &'chunk [&'chunk [f32]],
    pub(super) keys: &'chunk [&'chunk [f32]],
    pub(super) values: &'chunk [&'chunk [f32]],
    pub(super) decays: &'chunk [f32; TOKENS_TOGETHER],
    pub(super) strengths: &'chunk [f32; TOKENS_TOGETHER],
}

/// Tokens that go by while a row of the state stays in registers: their keys and queries fit the first-level cache.
pub(super) const TOKENS_TOGETHER: usize = 16;
/// Elements of a row that this form is for: the state size of every public model of the family.
pub(super) const DIM: usize = 128;
