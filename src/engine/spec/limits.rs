//! Limits of header values.

#[expect(clippy::cast_precision_loss, reason = "widths are below 2^24")]
pub(crate) fn root(number: usize) -> f32 {
    (number as f32).sqrt()
}

pub(super) fn len(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

/// Four times the width of the largest current dense models.
pub(super) const WIDTH_MAX: usize = 1 << 18;
/// llama.cpp's `LLAMA_MAX_EXPERTS`.
pub(super) const EXPERTS_MAX: usize = 512;
pub(super) const HEADS_MAX: usize = 1024;
pub(super) const HEAD_DIM_MAX: usize = 1024;
/// Kernels process heads in steps of this many elements.
pub(super) const HEAD_DIM_MULTIPLE: usize = 8;
pub(super) const TAPS_MAX: usize = 16;
/// Positions become angles through `f32`, which represents integers exactly up to this value. The longest context of
/// current models is 10 Mi tokens.
pub(crate) const POSITIONS_MAX: u32 = 1 << 24;
/// llama.cpp's default for `full_attention_interval`.
pub(super) const FULL_ATTENTION_INTERVAL: usize = 4;
