//! Activations in the quantised formats of ggml.

use super::{float::half_to_float, isa::kernel};
use crate::gguf::GgmlDType;

/// A format of activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    /// `f32` rounded to brain floating point, for weights of that type; followed by the same row as `bf16`.
    Bf16,
    /// Unchanged.
    F32,
    /// `f32` rounded to half precision, for weights of that type.
    F16,
    /// Blocks of 32 `i8` with an `f16` scale; a row's blocks are followed by the scales as `f32`, and then, as `i32`,
    /// by -128 times each block's sum, which corrects for weights read as unsigned numbers.
    Q8_0,
    /// Blocks of 256 `i8` with an `f32` scale and sums of 16; a row's blocks are followed by each block's sums of 32 as
    /// `i16`.
    Q8K,
}

impl Format {
    /// All except [`Self::F32`], which needs no copy; in memory order.
    pub(crate) const COPIES: [Self; 4] = [Self::Q8_0, Self::Q8K, Self::F16, Self::Bf16];

    /// The format for products with weights of `dtype`.
    pub(crate) const fn of(dtype: GgmlDType) -> Self {
        match dtype {
            GgmlDType::F32 => Self::F32,
            GgmlDType::F16 => Self::F16,
            GgmlDType::BF16 => Self::Bf16,
            GgmlDType::Q4_0
            | GgmlDType::Q4_1
            | GgmlDType::Q5_0
            | GgmlDType::Q5_1
            | GgmlDType::Q8_0
            | GgmlDType::IQ4NL
            | GgmlDType::MXFP4 => Self::Q8_0,
            GgmlDType::Q2K
            | GgmlDType::Q3K
            | GgmlDType::Q4K
            | GgmlDType::Q5K
            | GgmlDType::Q6K
            | GgmlDType::IQ4XS => Self::Q8K,
        }
    }

    /// Bytes of a row of `columns` elements.
    pub(crate) const fn row_bytes(self, columns: usize) -> usize {
        match self {
            Self::F32 => 0,
            Self::F16 => columns * 4,
            Self::Bf16 => columns * 4 + (columns * 2).next_multiple_of(4),
            Self::Q8_0 => columns.div_ceil(BLOCK) * (Q8_0_BYTES + 8),
            Self::Q8K => columns.div_ceil(SUPER) * (Q8K_BYTES + Q8K_SUMS),
        }
    }
}

kernel! {
    /// Rounds a row to brain floating point.
    pub(crate) fn round_to_bf16(input: &[f32], out: &mut [u8]) {
        let (wide, short) = out.split_at_mut(input.len() * 4);
        for ((x, wide), short) in input.iter().zip(wide.chunks_exact_mut(4)).zip(short.chunks_exact_mut(2)) {
            let bits = x.to_bits();
            // To the nearest, ties to even; NaN stays NaN.
            let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1))) >> 16;
            let brain = if x.is_nan() { (bits >> 16) | 0x40 } else { rounded };
            wide.copy_from_slice(&(brain << 16).to_ne_bytes());
            short.copy_from_slice(&brain.to_ne_bytes()[if cfg!(target_endian = "little") { 0..2 } else { 2..4 }]);
        }
    }

    /// Quantises a row to Q8_0: rounded to even, as in ggml's AVX2 path.
    pub(crate) fn quantize_q8_0(input: &[f32], out: &mut [u8]) {
        let count = input.len() / BLOCK;
        let (blocks, behind) = out.split_at_mut(count * Q8_0_BYTES);
        let (factors, starts) = behind.split_at_mut(count * 4);
        let behind = factors.chunks_exact_mut(4).zip(starts.chunks_exact_mut(4));
        for ((x, block), (factor, start)) in input
            .chunks_exact(BLOCK)
            .zip(blocks.chunks_exact_mut(Q8_0_BYTES))
            .zip(behind)
        {
            let mut lanes = [0u32; BLOCK];
            for (lane, x) in lanes.iter_mut().zip(x) {
                *lane = magnitude(*x);
            }
            let largest = f32::from_bits(largest_of(&mut lanes));
            let scale = half::f16::from_f32(largest / 127.0);
            let inverse = if largest == 0.0 { 0.0 } else { 127.0 / largest };
            block[..2].copy_from_slice(&scale.to_bits().to_le_bytes());
            let mut sum = 0i32;
            for (quant, x) in block[2..].iter_mut().zip(x) {
                *quant = to_byte(x * inverse);
                sum = sum.wrapping_add(i32::from(quant.cast_signed()));
            }
            let read = if largest.is_finite() {
                half_to_float(scale.to_bits())
            } else {
                f32::NAN
            };
            factor.copy_from_slice(&read.to_ne_bytes());
            start.copy_from_slice(&(-128 * sum).to_ne_bytes());
        }
    }

    /// Quantises a row to Q8_K: the element furthest from zero becomes -127.
    pub(crate) fn quantize_q8k(input: &[f32], out: &mut [u8]) {
        let (blocks, behind) = out.split_at_mut(input.len() / SUPER * Q8K_BYTES);
        let blocks = blocks.chunks_exact_mut(Q8K_BYTES).zip(behind.chunks_exact_mut(Q8K_SUMS));
        for (x, (block, wide)) in input.chunks_exact(SUPER).zip(blocks) {
            let (mut all, mut negative) = ([0u32; BLOCK], [0f32; BLOCK]);
            for part in x.chunks_exact(BLOCK) {
                for lane in 0..BLOCK {
                    all[lane] = all[lane].max(magnitude(part[lane]));
                    negative[lane] = greater(negative[lane], -part[lane]);
                }
            }
            let (largest, lowest) = (largest_of(&mut all), largest_of(&mut negative.map(f32::to_bits)));
            let furthest = if lowest == largest {
                -f32::from_bits(lowest)
            } else {
                f32::from_bits(largest)
            };
            let (scale, quants) = block.split_at_mut(4);
            let (quants, sums) = quants.split_at_mut(SUPER);
            if furthest == 0.0 {
                scale.fill(0);
                quants.fill(0);
                sums.fill(0);
                wide.fill(0);
                continue;
            }
            let inverse = -127.0 / furthest;
            scale.copy_from_slice(&(1.0 / inverse).to_le_bytes());
            for (quant, x) in quants.iter_mut().zip(x) {
                *quant = to_byte(x * inverse);
            }
            for (sum, quants) in sums.chunks_exact_mut(2).zip(quants.chunks_exact(16)) {
                let mut total = 0i16;
                for quant in quants {
                    total = total.wrapping_add(i16::from(quant.cast_signed()));
                }
                sum.copy_from_slice(&total.to_le_bytes());
            }
            for (sum, pair) in wide.chunks_exact_mut(2).zip(sums.chunks_exact(4)) {
                let half = |at: usize| i16::from_le_bytes([pair[at], pair[at + 1]]);
                sum.copy_from_slice(&half(0).wrapping_add(half(2)).to_le_bytes());
            }
        }
    }
}

/// The bits of the absolute value, which order like the values; a NaN sorts above infinity, and is therefore not lost
/// in a maximum as it would be with floats.
#[inline(always)]
const fn magnitude(x: f32) -> u32 {
    x.to_bits() & 0x7fff_ffff
}

#[inline(always)]
fn largest_of(lanes: &mut [u32; BLOCK]) -> u32 {
    let mut width = BLOCK / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] = lanes[lane].max(lanes[lane + width]);
        }
        width /= 2;
    }
    lanes[0]
}

/// The greater of two numbers, or `known` if `other` is NaN: one instruction, where `f32::max` takes three.
#[inline(always)]
fn greater(known: f32, other: f32) -> f32 {
    if other > known { other } else { known }
}

/// Nearest integer, ties to even, from -127 to 127 by construction.
#[expect(
    clippy::cast_possible_truncation,
    reason = "the lowest byte is the number"
)]
#[inline(always)]
fn to_byte(x: f32) -> u8 {
    /// 1.5 · 2^23: adding it rounds to an integer in the low bits. A cast would not vectorise, since it defines results
    /// for infinities and NaN.
    const ROUND: f32 = 12_582_912.0;
    // The caller scales by the largest magnitude, so the value is finite unless the input was not; then the scale is
    // not finite either, and neither is any product with the block.
    (x.clamp(-127.0, 127.0) + ROUND).to_bits() as u8
}

/// Elements of a Q8_0 block.
pub(crate) const BLOCK: usize = 32;
/// Bytes of a Q8_0 block.
pub(crate) const Q8_0_BYTES: usize = 34;
/// Elements of a Q8_K block.
pub(crate) const SUPER: usize = 256;
/// Bytes of a Q8_K block.
pub(crate) const Q8K_BYTES: usize = 4 + SUPER + SUPER / 8;
/// Bytes of the sums of 32 of a Q8_K block, stored after a row's blocks.
pub(crate) const Q8K_SUMS: usize = SUPER / 16;
