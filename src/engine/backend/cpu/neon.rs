//! Products with quantised rows for arm64 with dot products of bytes (`FEAT_DotProd`), in the file's own block layout
//! (ggml's `ggml-common.h`).
//!
//! This is the form for one token or a few; [`neon_tile`] has the one for many. Both agree to the bit, since both add up
//! each block in whole numbers, and then the blocks in one order: of 256 one after the other, of 32 each fourth one, and then
//! the four sums.

use std::arch::{aarch64::*, asm};

use super::{
    neon_tile::{self, TOKENS_MIN},
    quant::{BLOCK, Q8_0_BYTES, Q8K_BYTES, Q8K_SUMS, SUPER},
    rows::{Rows, six_bit_head},
};

/// Quants of a block of 256 in runs of 32, of which each half is a register.
pub(super) type Quants = [[int8x16_t; 2]; 8];

/// Sums of blocks of 32 that run beside each other: one would wait for itself.
pub(super) const SUMS: usize = 4;

macro_rules! rows {
    ($(#[$meta:meta])* $name:ident, $product:ident) => {
        $(#[$meta])*
        ///
        /// # Safety
        ///
        /// The machine has the instructions of [`Isa::Dotprod`](super::isa::Isa::Dotprod); `rows` is as its fields say.
        #[target_feature(enable = "neon,dotprod")]
        pub(super) unsafe fn $name(rows: &Rows<'_>) {
            if rows.tokens >= TOKENS_MIN {
                // SAFETY: passed on.
                unsafe { neon_tile::$name(rows) };
                return;
            }
            for (index, weight) in rows.weights.chunks_exact(rows.row_bytes).enumerate() {
                for token in 0..rows.tokens {
                    // SAFETY: a row, and the copy of a token.
                    let value = unsafe { $product(weight.as_ptr(), rows.copy(token), rows.columns) };
                    rows.put(token, index, value);
                }
            }
        }
    };
}

rows! {
    /// Rows of Q4_K.
    rows_q4k, q4k
}
rows! {
    /// Rows of Q5_K.
    rows_q5k, q5k
}
rows! {
    /// Rows of Q6_K.
    rows_q6k, q6k
}
rows! {
    /// Rows of Q8_0.
    rows_q8_0, q8_0
}
rows! {
    /// Rows of Q4_0.
    rows_q4_0, q4_0
}
rows! {
    /// Rows of Q4_1.
    rows_q4_1, q4_1
}
rows! {
    /// Rows of Q5_0.
    rows_q5_0, q5_0
}
rows! {
    /// Rows of Q5_1.
    rows_q5_1, q5_1
}
rows! {
    /// Rows of Q2_K.
    rows_q2k, q2k
}
rows! {
    /// Rows of Q3_K.
    rows_q3k, q3k
}

macro_rules! with_minimums {
    ($name:ident, $bytes:expr, $quants:ident) => {
        /// # Safety
        ///
        /// A row of blocks of this type and a copy in Q8_K, of `columns` elements.
        #[inline]
        #[target_feature(enable = "neon,dotprod")]
        unsafe fn $name(weight: *const u8, copy: *const u8, columns: usize) -> f32 {
            let blocks = columns / SUPER;
            let mut sums = vdup_n_f32(0.0);
            for index in 0..blocks {
                // SAFETY: inside row and copy; behind the copy's blocks lie their sums of 32.
                unsafe {
                    let (x, y) = (weight.add(index * $bytes), copy.add(index * Q8K_BYTES));
                    let sums_of_32 = copy.add(blocks * Q8K_BYTES + index * Q8K_SUMS);
                    let (scales, minimums) = six_bit_head(x);
                    let scales = bytes_to_words(scales);
                    let [a, b, c, d, e, f, g, h] = $quants(x);
                    let run = |quants, number: usize| run(quants, y.add(4 + 32 * number));
                    let first = [run(a, 0), run(b, 1), run(c, 2), run(d, 3)];
                    let last = [run(e, 4), run(f, 5), run(g, 6), run(h, 7)];
                    let products = scaled(vdupq_n_s32(0), first, vmovl_s16(vget_low_s16(scales)));
                    let products = scaled(products, last, vmovl_high_s16(scales));
                    let low = products_of(vdupq_n_s32(0), bytes_to_words(minimums), vld1q_s16(sums_of_32.cast()));
                    // Products and minimums side by side.
                    let both = vpaddq_s32(products, low);
                    let both = vcvt_f32_s32(vpadd_s32(vget_low_s32(both), vget_high_s32(both)));
                    let factors = vmul_n_f32(two_halves_at(x), y.cast::<f32>().read_unaligned());
                    sums = vfma_f32(sums, both, factors);
                }
            }
            vget_lane_f32::<0>(sums) - vget_lane_f32::<1>(sums)
        }
    };
}

with_minimums!(q4k, 144, quants_q4k);
with_minimums!(q5k, 176, quants_q5k);

macro_rules! by_sixteen {
    ($name:ident, $bytes:expr, $quants:ident, $heads:ident, $scale_at:expr, $less:expr) => {
        /// # Safety
        ///
        /// A row of blocks of this type and a copy in Q8_K, of `columns` elements.
        #[inline]
        #[target_feature(enable = "neon,dotprod")]
        unsafe fn $name(weight: *const u8, copy: *const u8, columns: usize) -> f32 {
            let less: Option<i32> = $less;
            let mut sums = vdup_n_f32(0.0);
            for index in 0..columns / SUPER {
                // SAFETY: inside row and copy.
                unsafe {
                    let (x, y) = (weight.add(index * $bytes), copy.add(index * Q8K_BYTES));
                    let (scales, mins) = $heads(x);
                    let quants = $quants(x);
                    let mut products = vdupq_n_s32(0);
                    for (half, scales) in scales.into_iter().enumerate() {
                        let sum = |number: usize| {
                            let y = vld1q_s8(y.add(4 + 128 * half + 16 * number).cast());
                            dot(vdupq_n_s32(0), quants[4 * half + number / 2][number % 2], y)
                        };
                        let first = [sum(0), sum(1), sum(2), sum(3)];
                        products = scaled(products, first, vmovl_s16(vget_low_s16(scales)));
                        let last = [sum(4), sum(5), sum(6), sum(7)];
                        products = scaled(products, last, vmovl_high_s16(scales));
                    }
                    let sums_of_16 = y.add(4 + SUPER).cast::<i16>();
                    let low = products_of(vdupq_n_s32(0), mins[0], vld1q_s16(sums_of_16));
                    let low = products_of(low, mins[1], vld1q_s16(sums_of_16.add(8)));
                    let factor = y.cast::<f32>().read_unaligned();
                    if let Some(shift) = less {
                        let products = vsubq_s32(products, vshlq_s32(low, vdupq_n_s32(shift)));
                        let total = vset_lane_f32::<0>(vaddvq_s32(products) as f32, vdup_n_f32(0.0));
                        sums = vfma_f32(sums, total, vdup_n_f32(half_at(x.add($scale_at)) * factor));
                    } else {
                        // Products and minimums side by side.
                        let both = vpaddq_s32(products, low);
                        let both = vcvt_f32_s32(vpadd_s32(vget_low_s32(both), vget_high_s32(both)));
                        sums = vfma_f32(sums, both, vmul_n_f32(two_halves_at(x.add($scale_at)), factor));
                    }
                }
            }
            vget_lane_f32::<0>(sums) - vget_lane_f32::<1>(sums)
        }
    };
}

by_sixteen!(q2k, 84, quants_q2k, heads_q2k, 80, None);
by_sixteen!(q3k, 110, quants_q3k, heads_q3k, 108, Some(2));
by_sixteen!(q6k, 210, quants_q6k, heads_q6k, 208, Some(5));

macro_rules! small {
    ($name:ident, $bytes:expr, $quants:ident, $minimum:expr) => {
        /// # Safety
        ///
        /// A row of blocks of this type and a copy in Q8_0, of `columns` elements.
        #[inline]
        #[target_feature(enable = "neon,dotprod")]
        unsafe fn $name(weight: *const u8, copy: *const u8, columns: usize) -> f32 {
            let blocks = columns / BLOCK;
            let behind = copy.wrapping_add(blocks * Q8_0_BYTES).cast::<f32>();
            let mut sums = vdupq_n_f32(0.0);
            let mut index = 0;
            while index + SUMS <= blocks {
                // SAFETY: four blocks of the row and of the copy, and their scales as `f32` behind the copy's blocks.
                unsafe {
                    let (x, y) = (weight.add(index * $bytes), copy.add(index * Q8_0_BYTES));
                    let run = |ahead: usize| run($quants(x.add(ahead * $bytes)), y.add(ahead * Q8_0_BYTES + 2));
                    let totals = totals([run(0), run(1), run(2), run(3)]);
                    let factors = vld1q_f32(behind.add(index));
                    if $minimum {
                        let y = vcvtq_f32_s32(vld1q_s32(behind.add(blocks + index).cast()));
                        let mins = vmulq_f32(four_halves_at(x.add(2), $bytes), factors);
                        sums = vfmaq_f32(sums, vmulq_n_f32(y, PER_START), mins);
                    }
                    sums = vfmaq_f32(sums, totals, vmulq_f32(four_halves_at(x, $bytes), factors));
                }
                index += SUMS;
            }
            if index < blocks {
                let (mut products, mut scales) = ([vdupq_n_s32(0); SUMS], [0f32; SUMS]);
                let (mut ys, mut mins) = ([0f32; SUMS], [0f32; SUMS]);
                for (ahead, index) in (index..blocks).enumerate() {
                    // SAFETY: a block of each, and its scale, as above.
                    unsafe {
                        let x = weight.add(index * $bytes);
                        products[ahead] = run($quants(x), copy.add(index * Q8_0_BYTES + 2));
                        let factor = behind.add(index).read_unaligned();
                        scales[ahead] = half_at(x) * factor;
                        if $minimum {
                            ys[ahead] = behind.add(blocks + index).cast::<i32>().read_unaligned() as f32 * PER_START;
                            mins[ahead] = half_at(x.add(2)) * factor;
                        }
                    }
                }
                // SAFETY: four numbers each.
                unsafe {
                    if $minimum {
                        sums = vfmaq_f32(sums, vld1q_f32(ys.as_ptr()), vld1q_f32(mins.as_ptr()));
                    }
                    sums = vfmaq_f32(sums, totals(products), vld1q_f32(scales.as_ptr()));
                }
            }
            let pairs = vget_low_f32(vpaddq_f32(sums, sums));
            vget_lane_f32::<0>(pairs) + vget_lane_f32::<1>(pairs)
        }
    };
}

small!(q8_0, Q8_0_BYTES, quants_q8_0, false);
small!(q4_0, 18, quants_q4_0, false);
small!(q4_1, 20, quants_q4_1, true);
small!(q5_0, 22, quants_q5_0, false);
small!(q5_1, 24, quants_q5_1, true);

/// Behind a copy's blocks and their factors lies -128 times each block's sum.
pub(super) const PER_START: f32 = -1.0 / 128.0;

/// # Safety
///
/// `block` is a Q4_K block.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn quants_q4k(block: *const u8) -> Quants {
    let mut quants = [[vdupq_n_s8(0); 2]; 8];
    for part in 0..4 {
        // SAFETY: 128 bytes of quants follow the 16 of the head.
        let both = unsafe { pair(block.add(16 + 32 * part)) };
        quants[2 * part] = signed(low(both));
        quants[2 * part + 1] = signed(high(both));
    }
    quants
}

/// # Safety
///
/// `block` is a Q5_K block.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn quants_q5k(block: *const u8) -> Quants {
    let one = vdupq_n_u8(1);
    let mut quants = [[vdupq_n_s8(0); 2]; 8];
    // SAFETY: 32 bytes of fifth bits follow the 16 of the head.
    let mut fifth = unsafe { pair(block.add(16)) };
    for part in 0..4 {
        // SAFETY: 128 bytes of quants follow.
        let both = unsafe { pair(block.add(48 + 32 * part)) };
        for (ahead, four) in [low(both), high(both)].into_iter().enumerate() {
            let bit = fifth.map(|bits| vshlq_n_u8::<4>(vandq_u8(bits, one)));
            fifth = fifth.map(|bits| vshrq_n_u8::<1>(bits));
            quants[2 * part + ahead] = signed(join(four, bit));
        }
    }
    quants
}

/// Of a Q6_K block, with 32 added, so from 0 to 63.
///
/// # Safety
///
/// `block` is a Q6_K block.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn quants_q6k(block: *const u8) -> Quants {
    let two = vdupq_n_u8(0b11_0000);
    let mut quants = [[vdupq_n_s8(0); 2]; 8];
    for half in 0..2 {
        // SAFETY: 128 bytes of low bits, then 64 of high bits.
        let (top, both) = unsafe {
            (pair(block.add(128 + 32 * half)), [pair(block.add(64 * half)), pair(block.add(64 * half + 32))])
        };
        for part in 0..4 {
            let nibbles = if part < 2 { low(both[part]) } else { high(both[part - 2]) };
            let bits = top.map(|bits| {
                let placed = match part {
                    0 => vshlq_n_u8::<4>(bits),
                    1 => vshlq_n_u8::<2>(bits),
                    2 => bits,
                    _ => vshrq_n_u8::<2>(bits),
                };
                vandq_u8(placed, two)
            });
            quants[4 * half + part] = signed(join(nibbles, bits));
        }
    }
    quants
}

/// # Safety
///
/// `block` is a Q2_K block.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn quants_q2k(block: *const u8) -> Quants {
    // SAFETY: 64 bytes of quants follow the 16 of the head.
    unsafe { two_bits(block.add(16)) }
}

/// Of a Q3_K block, with 4 added, so from 0 to 7.
///
/// # Safety
///
/// `block` is a Q3_K block.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn quants_q3k(block: *const u8) -> Quants {
    // SAFETY: 32 bytes of third bits, then 64 of quants.
    let (mut third, mut quants) = unsafe { (pair(block), two_bits(block.add(32))) };
    for quants in &mut quants {
        for part in 0..2 {
            let bit = vshlq_n_u8::<2>(vandq_u8(third[part], vdupq_n_u8(1)));
            third[part] = vshrq_n_u8::<1>(third[part]);
            quants[part] = vorrq_s8(quants[part], vreinterpretq_s8_u8(bit));
        }
    }
    quants
}

/// 256 numbers of two bits.
///
/// # Safety
///
/// There are 64 bytes at `from`.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn two_bits(from: *const u8) -> Quants {
    let mut quants = [[vdupq_n_s8(0); 2]; 8];
    for half in 0..2 {
        // SAFETY: the caller's promise.
        let mut four = unsafe { pair(from.add(32 * half)) };
        for quants in &mut quants[4 * half..4 * half + 4] {
            for part in 0..2 {
                quants[part] = vreinterpretq_s8_u8(vandq_u8(four[part], vdupq_n_u8(3)));
                four[part] = vshrq_n_u8::<2>(four[part]);
            }
        }
    }
    quants
}

/// Sixteen numbers.
pub(super) type Sixteen = [int16x8_t; 2];

#[inline]
#[target_feature(enable = "neon")]
fn widened_bytes(bytes: int8x16_t) -> Sixteen {
    [vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes)]
}

/// Scales and minimums.
///
/// # Safety
///
/// `block` is a Q2_K block.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn heads_q2k(block: *const u8) -> (Sixteen, Sixteen) {
    // SAFETY: sixteen bytes are the head: of each the lower half is a scale and the upper one a minimum.
    let both = unsafe { vld1q_u8(block) };
    let [scales, mins] = signed([vandq_u8(both, vdupq_n_u8(15)), vshrq_n_u8::<4>(both)]);
    (widened_bytes(scales), widened_bytes(mins))
}

/// Scales, which are the minimums too.
///
/// # Safety
///
/// `block` is a Q3_K block.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn heads_q3k(block: *const u8) -> (Sixteen, Sixteen) {
    // SAFETY: twelve bytes of scales follow 96 of quants: of eight bytes both halves are the lower bits, the last four have
    // the upper ones.
    let words = unsafe { block.add(96).cast::<[u32; 3]>().read_unaligned() };
    let [a, b, c] = words.map(u32::from_le);
    let scale = |four: u32, from: u32| (four & 0x0f0f_0f0f) | (((c >> from) & 0x0303_0303) << 4);
    let join = |low: u32, high: u32| vcreate_u8(u64::from(low) | (u64::from(high) << 32));
    let bytes = vcombine_u8(join(scale(a, 0), scale(b, 2)), join(scale(a >> 4, 4), scale(b >> 4, 6)));
    let scales = widened_bytes(vsubq_s8(vreinterpretq_s8_u8(bytes), vdupq_n_s8(32)));
    (scales, scales)
}

/// Scales, which are the minimums too.
///
/// # Safety
///
/// `block` is a Q6_K block.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn heads_q6k(block: *const u8) -> (Sixteen, Sixteen) {
    // SAFETY: 16 scales follow the 192 bytes of quants.
    let scales = widened_bytes(unsafe { vld1q_s8(block.add(192).cast()) });
    (scales, scales)
}

/// # Safety
///
/// `block` is a Q4_1 block.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn quants_q4_1(block: *const u8) -> [int8x16_t; 2] {
    // SAFETY: 16 bytes of quants behind scale and minimum.
    unsafe { nibbles(block.add(4)) }
}

/// # Safety
///
/// `block` is a Q5_0 block.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn quants_q5_0(block: *const u8) -> [int8x16_t; 2] {
    // SAFETY: four bytes of fifth bits and 16 of quants behind the scale.
    let quants = unsafe { with_fifth(nibbles(block.add(6)), block.add(2)) };
    [vsubq_s8(quants[0], vdupq_n_s8(16)), vsubq_s8(quants[1], vdupq_n_s8(16))]
}

/// # Safety
///
/// `block` is a Q5_1 block.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn quants_q5_1(block: *const u8) -> [int8x16_t; 2] {
    // SAFETY: four bytes of fifth bits and 16 of quants behind scale and minimum.
    unsafe { with_fifth(nibbles(block.add(8)), block.add(4)) }
}

/// 32 numbers of four bits, lower halves first.
///
/// # Safety
///
/// Sixteen bytes can be read at `from`.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn nibbles(from: *const u8) -> [int8x16_t; 2] {
    // SAFETY: the caller's promise.
    let both = unsafe { vld1q_u8(from) };
    signed([vandq_u8(both, vdupq_n_u8(15)), vshrq_n_u8::<4>(both)])
}

/// With 32 bits as the fifth ones.
///
/// # Safety
///
/// Four bytes can be read at `from`.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn with_fifth(quants: [int8x16_t; 2], from: *const u8) -> [int8x16_t; 2] {
    // SAFETY: the caller's promise.
    let bits = unsafe { from.cast::<[u8; 4]>().read_unaligned() };
    let bit = vreinterpretq_u8_u64(vdupq_n_u64(0x8040_2010_0804_0201));
    let mut joined = quants;
    for (half, quants) in joined.iter_mut().enumerate() {
        // Each byte eight times, of which each keeps another bit.
        let spread = vcombine_u8(vdup_n_u8(bits[2 * half]), vdup_n_u8(bits[2 * half + 1]));
        let fifth = vandq_u8(vtstq_u8(spread, bit), vdupq_n_u8(16));
        *quants = vorrq_s8(*quants, vreinterpretq_s8_u8(fifth));
    }
    joined
}

/// # Safety
///
/// `block` is a Q8_0 block.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn quants_q8_0(block: *const u8) -> [int8x16_t; 2] {
    // SAFETY: 32 bytes of quants behind the scale.
    signed(unsafe { pair(block.add(2)) })
}

/// # Safety
///
/// `block` is a Q4_0 block.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn quants_q4_0(block: *const u8) -> [int8x16_t; 2] {
    // SAFETY: 16 bytes of quants behind the scale.
    let both = unsafe { vld1q_u8(block.add(2)) };
    let quants = signed([vandq_u8(both, vdupq_n_u8(15)), vshrq_n_u8::<4>(both)]);
    quants.map(|quants| vsubq_s8(quants, vdupq_n_s8(8)))
}

/// The products of 32 quants, summed in four lanes.
///
/// # Safety
///
/// There are 32 quants at `y`.
#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn run(quants: [int8x16_t; 2], y: *const u8) -> int32x4_t {
    // SAFETY: the caller's promise.
    let y = signed(unsafe { pair(y) });
    dot(dot(vdupq_n_s32(0), quants[0], y[0]), quants[1], y[1])
}

/// Adds four products, each times its scale.
#[inline]
#[target_feature(enable = "neon")]
fn scaled(sum: int32x4_t, products: [int32x4_t; 4], scales: int32x4_t) -> int32x4_t {
    let [a, b, c, d] = products;
    let sum = add_scaled::<1>(add_scaled::<0>(sum, a, scales), b, scales);
    add_scaled::<3>(add_scaled::<2>(sum, c, scales), d, scales)
}

/// Adds a product times the scale in lane `LANE`. With the name of this instruction the compiler would spread and widen each
/// scale by itself, since it sees where they come from.
#[inline]
#[target_feature(enable = "neon")]
fn add_scaled<const LANE: usize>(mut sum: int32x4_t, product: int32x4_t, scales: int32x4_t) -> int32x4_t {
    // SAFETY: one instruction that every machine of the target has, on registers alone.
    unsafe {
        asm!(
            "mla {sum:v}.4s, {product:v}.4s, {scales:v}.s[{lane}]",
            sum = inout(vreg) sum,
            product = in(vreg) product,
            scales = in(vreg) scales,
            lane = const LANE,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sum
}

/// The sums of the lanes of four products, side by side.
#[inline]
#[target_feature(enable = "neon")]
fn totals(products: [int32x4_t; SUMS]) -> float32x4_t {
    let [a, b, c, d] = products;
    vcvtq_f32_s32(vpaddq_s32(vpaddq_s32(a, b), vpaddq_s32(c, d)))
}

/// Eight bytes as 16-bit numbers.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn bytes_to_words(bytes: u64) -> int16x8_t {
    vreinterpretq_s16_u16(vmovl_u8(vcreate_u8(bytes)))
}

/// Adds the products of eight pairs, two in each lane.
#[inline]
#[target_feature(enable = "neon")]
fn products_of(sum: int32x4_t, a: int16x8_t, b: int16x8_t) -> int32x4_t {
    vmlal_high_s16(vmlal_s16(sum, vget_low_s16(a), vget_low_s16(b)), a, b)
}

/// # Safety
///
/// 32 bytes can be read at `address`.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn pair(address: *const u8) -> [uint8x16_t; 2] {
    // SAFETY: the caller's promise.
    unsafe { [vld1q_u8(address), vld1q_u8(address.add(16))] }
}

/// The lower half of each byte.
#[inline]
#[target_feature(enable = "neon")]
fn low(both: [uint8x16_t; 2]) -> [uint8x16_t; 2] {
    both.map(|both| vandq_u8(both, vdupq_n_u8(15)))
}

/// The upper half of each byte.
#[inline]
#[target_feature(enable = "neon")]
fn high(both: [uint8x16_t; 2]) -> [uint8x16_t; 2] {
    both.map(|both| vshrq_n_u8::<4>(both))
}

#[inline]
#[target_feature(enable = "neon")]
fn signed(bytes: [uint8x16_t; 2]) -> [int8x16_t; 2] {
    bytes.map(|bytes| vreinterpretq_s8_u8(bytes))
}

#[inline]
#[target_feature(enable = "neon")]
fn join(a: [uint8x16_t; 2], b: [uint8x16_t; 2]) -> [uint8x16_t; 2] {
    [vorrq_u8(a[0], b[0]), vorrq_u8(a[1], b[1])]
}

/// Adds the products of four bytes each to each lane. `vdotq_s32` is not stable yet.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn dot(mut sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: one instruction of an enabled set, on registers alone.
    unsafe {
        asm!(
            "sdot {sum:v}.4s, {a:v}.16b, {b:v}.16b",
            sum = inout(vreg) sum,
            a = in(vreg) a,
            b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sum
}

/// The half at `address` as `f32`, in one instruction, which has no stable name yet.
///
/// # Safety
///
/// Two bytes can be read there.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn half_at(address: *const u8) -> f32 {
    // SAFETY: the caller's promise.
    let bits = u16::from_le(unsafe { address.cast::<u16>().read_unaligned() });
    let half: f32;
    // SAFETY: one instruction that every machine of the target has, on registers alone.
    unsafe {
        asm!(
            "fcvt {half:s}, {bits:h}",
            half = out(vreg) half,
            bits = in(vreg) bits,
            // Not `preserves_flags`: a signalling NaN is reported in FPSR, which is one of them.
            options(pure, nomem, nostack)
        );
    }
    half
}

/// The two halves at `address` as `f32`.
///
/// # Safety
///
/// Four bytes can be read there.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn two_halves_at(address: *const u8) -> float32x2_t {
    // SAFETY: the caller's promise.
    let bits = u32::from_le(unsafe { address.cast::<u32>().read_unaligned() });
    vget_low_f32(widened(vcreate_u16(u64::from(bits))))
}

/// The four halves at `address` and `step` bytes apart as `f32`.
///
/// # Safety
///
/// Two bytes can be read at each.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn four_halves_at(address: *const u8, step: usize) -> float32x4_t {
    let at = |number: usize| address.wrapping_add(number * step).cast::<u16>();
    // SAFETY: the caller's promise.
    unsafe {
        let bits = vld1_lane_u16::<1>(at(1), vld1_dup_u16(at(0)));
        widened(vld1_lane_u16::<3>(at(3), vld1_lane_u16::<2>(at(2), bits)))
    }
}

/// Four halves as `f32`.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn widened(halves: uint16x4_t) -> float32x4_t {
    let wide: float32x4_t;
    // SAFETY: one instruction that every machine of the target has, on registers alone.
    unsafe {
        asm!(
            "fcvtl {wide:v}.4s, {halves:v}.4h",
            wide = lateout(vreg) wide,
            halves = in(vreg) halves,
            // Not `preserves_flags`, as above.
            options(pure, nomem, nostack)
        );
    }
    wide
}
