//! Products with quantised rows for arm64 with dot products of bytes (`FEAT_DotProd`), in the file's own block layout
//! (ggml's `ggml-common.h`).
//!
//! Some tokens at a time share what a block is unpacked to. The sums of a token run in one order, whatever is computed
//! beside them, so a chunk of many tokens has the bits of one.

use std::arch::{aarch64::*, asm};

use super::{
    matmul::{Rows, six_bit_head},
    quant::{BLOCK, Q8_0_BYTES, Q8K_BYTES, SUPER},
};

/// Tokens that share what a block is unpacked to: with two sums each, their registers and those of a run of 32 weights
/// are half of the 32 that there are.
const TOKENS_TOGETHER: usize = 4;

macro_rules! rows {
    ($(#[$meta:meta])* $name:ident, $product:ident) => {
        $(#[$meta])*
        ///
        /// # Safety
        ///
        /// The machine has the instructions of [`Isa::Dotprod`](super::isa::Isa::Dotprod); `rows` is as its fields say.
        #[target_feature(enable = "neon,dotprod")]
        pub(super) unsafe fn $name(rows: &Rows<'_>) {
            // The copies of a few tokens stay in the nearest cache while the rows of the item pass.
            let mut token = 0;
            while token < rows.tokens {
                let together = if rows.tokens - token < TOKENS_TOGETHER { 1 } else { TOKENS_TOGETHER };
                for (index, weight) in rows.weights.chunks_exact(rows.row_bytes).enumerate() {
                    if together == 1 {
                        // SAFETY: a row, and the copy of a token.
                        let [value] = unsafe { $product(weight.as_ptr(), [rows.copy(token)], rows.columns) };
                        rows.put(token, index, value);
                    } else {
                        let copies: [_; TOKENS_TOGETHER] = std::array::from_fn(|ahead| rows.copy(token + ahead));
                        // SAFETY: a row, and the copies of tokens.
                        let values = unsafe { $product(weight.as_ptr(), copies, rows.columns) };
                        for (ahead, value) in values.into_iter().enumerate() {
                            rows.put(token + ahead, index, value);
                        }
                    }
                }
                token += together;
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

/// # Safety
///
/// A row of Q4_K and copies in Q8_K, of `columns` elements.
#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn q4k<const T: usize>(weight: *const u8, copies: [*const u8; T], columns: usize) -> [f32; T] {
    let mut sums = Sums::new();
    for index in 0..columns / SUPER {
        // SAFETY: inside row and copies.
        unsafe {
            let (x, y) = (weight.add(index * 144), copies.map(|copy| copy.add(index * Q8K_BYTES)));
            let (scales, minimums, scale, min_scale) = six_bit_head(x);
            let scales = scales.to_le_bytes();
            let mut products = [vdupq_n_s32(0); T];
            for part in 0..4 {
                let both = pair(x.add(16 + 32 * part));
                run(&mut products, low(both), &y, 2 * part, scales[2 * part]);
                run(&mut products, high(both), &y, 2 * part + 1, scales[2 * part + 1]);
            }
            sums.add(&products, &y, scale, minimums, min_scale);
        }
    }
    sums.total()
}

/// # Safety
///
/// A row of Q5_K and copies in Q8_K, of `columns` elements.
#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn q5k<const T: usize>(weight: *const u8, copies: [*const u8; T], columns: usize) -> [f32; T] {
    let one = vdupq_n_u8(1);
    let mut sums = Sums::new();
    for index in 0..columns / SUPER {
        // SAFETY: inside row and copies.
        unsafe {
            let (x, y) = (weight.add(index * 176), copies.map(|copy| copy.add(index * Q8K_BYTES)));
            let (scales, minimums, scale, min_scale) = six_bit_head(x);
            let scales = scales.to_le_bytes();
            let mut fifth = pair(x.add(16));
            let mut products = [vdupq_n_s32(0); T];
            for part in 0..4 {
                let both = pair(x.add(48 + 32 * part));
                for (ahead, quants) in [low(both), high(both)].into_iter().enumerate() {
                    let bit = fifth.map(|bits| vshlq_n_u8::<4>(vandq_u8(bits, one)));
                    fifth = fifth.map(|bits| vshrq_n_u8::<1>(bits));
                    let number = 2 * part + ahead;
                    run(&mut products, join(quants, bit), &y, number, scales[number]);
                }
            }
            sums.add(&products, &y, scale, minimums, min_scale);
        }
    }
    sums.total()
}

/// # Safety
///
/// A row of Q6_K and copies in Q8_K, of `columns` elements.
#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn q6k<const T: usize>(weight: *const u8, copies: [*const u8; T], columns: usize) -> [f32; T] {
    let two = vdupq_n_u8(0b11_0000);
    let mut sums = Sums::new();
    for index in 0..columns / SUPER {
        // SAFETY: inside row and copies.
        unsafe {
            let (x, y) = (weight.add(index * 210), copies.map(|copy| copy.add(index * Q8K_BYTES)));
            let scales = x.add(192).cast::<i8>();
            let mut products = [vdupq_n_s32(0); T];
            for half in 0..2 {
                let top = pair(x.add(128 + 32 * half));
                let both = [pair(x.add(64 * half)), pair(x.add(64 * half + 32))];
                for part in 0..4 {
                    let nibbles = if part < 2 {
                        low(both[part])
                    } else {
                        high(both[part - 2])
                    };
                    let bits = top.map(|bits| {
                        let placed = match part {
                            0 => vshlq_n_u8::<4>(bits),
                            1 => vshlq_n_u8::<2>(bits),
                            2 => bits,
                            _ => vshrq_n_u8::<2>(bits),
                        };
                        vandq_u8(placed, two)
                    });
                    let number = 4 * half + part;
                    let quants = join(nibbles, bits).map(|quants| vreinterpretq_s8_u8(quants));
                    let scale = [scales.add(2 * number).read(), scales.add(2 * number + 1).read()];
                    for (product, y) in products.iter_mut().zip(&y) {
                        let y = y.add(4 + 32 * number).cast::<i8>();
                        for half in 0..2 {
                            let sum = dot(vdupq_n_s32(0), quants[half], vld1q_s8(y.add(16 * half)));
                            *product = vmlaq_n_s32(*product, sum, i32::from(scale[half]));
                        }
                    }
                }
            }
            // The quants are from -32 on.
            let wide = vld1q_s8(scales);
            let wide = [vmovl_s8(vget_low_s8(wide)), vmovl_high_s8(wide)];
            let scale = half_at(x.add(208));
            for (token, y) in y.iter().enumerate() {
                let sums_of_16 = y.add(4 + SUPER).cast::<i16>();
                let mut min = products_of(vdupq_n_s32(0), wide[0], vld1q_s16(sums_of_16));
                min = products_of(min, wide[1], vld1q_s16(sums_of_16.add(8)));
                let factor = scale * y.cast::<f32>().read_unaligned();
                sums.fuse(token, products[token], factor, min, 32.0 * factor);
            }
        }
    }
    sums.total()
}

/// # Safety
///
/// A row and copies of Q8_0, of `columns` elements.
#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn q8_0<const T: usize>(weight: *const u8, copies: [*const u8; T], columns: usize) -> [f32; T] {
    let mut sums = Sums::new();
    for index in 0..columns / BLOCK {
        // SAFETY: inside row and copies.
        unsafe {
            let x = weight.add(index * Q8_0_BYTES);
            let quants = [vld1q_s8(x.add(2).cast()), vld1q_s8(x.add(18).cast())];
            sums.add_small(index, quants, &copies, columns, half_at(x));
        }
    }
    sums.both()
}

/// # Safety
///
/// A row of Q4_0 and copies of Q8_0, of `columns` elements.
#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn q4_0<const T: usize>(weight: *const u8, copies: [*const u8; T], columns: usize) -> [f32; T] {
    let eight = vdupq_n_s8(8);
    let mut sums = Sums::new();
    for index in 0..columns / BLOCK {
        // SAFETY: inside row and copies.
        unsafe {
            let x = weight.add(index * 18);
            let both = vld1q_u8(x.add(2));
            let quants = [vandq_u8(both, vdupq_n_u8(15)), vshrq_n_u8::<4>(both)];
            let quants = quants.map(|quants| vsubq_s8(vreinterpretq_s8_u8(quants), eight));
            sums.add_small(index, quants, &copies, columns, half_at(x));
        }
    }
    sums.both()
}

/// Two sums of each of `T` tokens, four lanes each.
struct Sums<const T: usize> {
    first: [float32x4_t; T],
    second: [float32x4_t; T],
}

impl<const T: usize> Sums<T> {
    #[inline]
    #[target_feature(enable = "neon")]
    fn new() -> Self {
        Self {
            first: [vdupq_n_f32(0.0); T],
            second: [vdupq_n_f32(0.0); T],
        }
    }

    /// Adds the products of a block of 256 to the first sums, and its minimums to the second.
    ///
    /// # Safety
    ///
    /// `y` are Q8_K blocks.
    #[inline]
    #[target_feature(enable = "neon,dotprod")]
    unsafe fn add(&mut self, products: &[int32x4_t; T], y: &[*const u8; T], scale: f32, minimums: u64, min_scale: f32) {
        let minimums = vreinterpretq_s16_u16(vmovl_u8(vcreate_u8(minimums)));
        for (token, y) in y.iter().enumerate() {
            // SAFETY: the factor before the 256 quants, and the sums of 16 behind them.
            let (factor, sums_of_16) = unsafe {
                let sums = y.add(4 + SUPER).cast::<i16>();
                (
                    y.cast::<f32>().read_unaligned(),
                    [vld1q_s16(sums), vld1q_s16(sums.add(8))],
                )
            };
            let min = products_of(vdupq_n_s32(0), minimums, vpaddq_s16(sums_of_16[0], sums_of_16[1]));
            self.fuse(token, products[token], scale * factor, min, min_scale * factor);
        }
    }

    #[inline]
    #[target_feature(enable = "neon")]
    fn fuse(&mut self, token: usize, product: int32x4_t, factor: f32, min: int32x4_t, min_factor: f32) {
        self.first[token] = vfmaq_n_f32(self.first[token], vcvtq_f32_s32(product), factor);
        self.second[token] = vfmaq_n_f32(self.second[token], vcvtq_f32_s32(min), min_factor);
    }

    /// Adds the products of block `index` of 32 signed quants, to the two sums in turns: one would wait for itself.
    ///
    /// # Safety
    ///
    /// `copies` are rows of Q8_0 of `columns` elements, block `index` is one of theirs.
    #[inline]
    #[target_feature(enable = "neon,dotprod")]
    unsafe fn add_small(
        &mut self,
        index: usize,
        quants: [int8x16_t; 2],
        copies: &[*const u8; T],
        columns: usize,
        scale: f32,
    ) {
        let sums = if index.is_multiple_of(2) {
            &mut self.first
        } else {
            &mut self.second
        };
        for (sum, copy) in sums.iter_mut().zip(copies) {
            // SAFETY: the block's quants, and its scale as `f32` behind the row's blocks.
            let (y, factor) = unsafe {
                let y = copy.add(index * Q8_0_BYTES + 2).cast::<i8>();
                let factors = copy.add(columns / BLOCK * Q8_0_BYTES).cast::<f32>();
                ([vld1q_s8(y), vld1q_s8(y.add(16))], factors.add(index).read_unaligned())
            };
            let products = dot(dot(vdupq_n_s32(0), quants[0], y[0]), quants[1], y[1]);
            *sum = vfmaq_n_f32(*sum, vcvtq_f32_s32(products), scale * factor);
        }
    }

    /// The first sums less the second.
    #[inline]
    #[target_feature(enable = "neon")]
    fn total(self) -> [f32; T] {
        std::array::from_fn(|token| vaddvq_f32(vsubq_f32(self.first[token], self.second[token])))
    }

    /// Both sums together.
    #[inline]
    #[target_feature(enable = "neon")]
    fn both(self) -> [f32; T] {
        std::array::from_fn(|token| vaddvq_f32(vaddq_f32(self.first[token], self.second[token])))
    }
}

/// Adds the products of run `number` of 32 quants, times its scale.
///
/// # Safety
///
/// `y` are Q8_K blocks.
#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn run<const T: usize>(
    products: &mut [int32x4_t; T],
    quants: [uint8x16_t; 2],
    y: &[*const u8; T],
    number: usize,
    scale: u8,
) {
    let quants = quants.map(|quants| vreinterpretq_s8_u8(quants));
    for (product, y) in products.iter_mut().zip(y) {
        // SAFETY: 32 of the 256 quants.
        let y = unsafe {
            let y = y.add(4 + 32 * number).cast::<i8>();
            [vld1q_s8(y), vld1q_s8(y.add(16))]
        };
        let sum = dot(dot(vdupq_n_s32(0), quants[0], y[0]), quants[1], y[1]);
        *product = vmlaq_n_s32(*product, sum, i32::from(scale));
    }
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
unsafe fn half_at(address: *const u8) -> f32 {
    // SAFETY: the caller's promise.
    let bits = u16::from_le(unsafe { address.cast::<u16>().read_unaligned() });
    let half: f32;
    // SAFETY: one instruction that every machine of the target has, on registers alone.
    unsafe {
        asm!(
            "fcvt {half:s}, {bits:h}",
            half = out(vreg) half,
            bits = in(vreg) bits,
            // Not `preserves_flags`: a signalling NaN is told in FPSR, which is one of them.
            options(pure, nomem, nostack)
        );
    }
    half
}
