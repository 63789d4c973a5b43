//! Products with quantised rows for arm64 with byte dot products (`FEAT_DotProd`).
//!
//! They read the file's own block layout (ggml's `ggml-common.h`).
//!
//! This is the single-token form: four rows at once, which share the loads of the token and the last steps of their
//! sums, one lane per row. [`neon_tile`] has the form for more tokens. Both agree to the bit, since both sum each block
//! in integers, and then the blocks in one order: blocks of 256 one after another, of blocks of 32 every fourth, and
//! then the four sums.

use std::{
    arch::{aarch64::*, asm},
    hint,
};

use super::{
    neon_tile::{self, TOKENS_MIN},
    neon_unpack::{
        Four, PER_START, SUMS, add_scaled, dot, half_iq4_xs, half_q2k, half_q3k, half_q4k,
        half_q5k, half_q6k, half_scales, halves_of_four, heads_iq4_xs, heads_of_six_bits,
        heads_q2k, heads_q3k, heads_q6k, moved, nibbles, pair, pairs_of_four, power_scales,
        products_of, quants_iq4_nl, quants_mxfp4, quants_q4_1, quants_q5_1, quants_q8_0, signed,
        widened, with_fifth,
    },
    quant::{BLOCK, Q8_0_BYTES, Q8K_BYTES, Q8K_SUMS, SUPER},
    rows::Rows,
};

/// Rows that are multiplied together.
const ROWS: usize = 4;

macro_rules! rows {
    ($name:ident, $product:ident, $block:expr) => {
        /// All rows of this type times all tokens.
        ///
        /// # Safety
        ///
        /// The machine has the instructions of [`Isa::Dotprod`](super::isa::Isa::Dotprod), and with `MATRIX` those of
        /// [`Isa::I8mm`](super::isa::Isa::I8mm); `rows` is as its fields say.
        #[target_feature(enable = "neon,dotprod")]
        pub(super) unsafe fn $name<const MATRIX: bool>(rows: &Rows<'_>) {
            if rows.tokens >= TOKENS_MIN {
                // SAFETY: the caller's promise.
                unsafe { neon_tile::$name::<MATRIX>(rows) };
                return;
            }
            let count = rows.weights.len() / rows.row_bytes.max(1);
            // Each of the four has a contiguous range of rows, which the hardware prefetcher follows as one stream;
            // adjacent rows would be jumping streams.
            let stretch = count.div_ceil(ROWS);
            for first in 0..stretch {
                let row = |at: usize| at * stretch + first;
                // The last row substitutes for missing ones.
                let start =
                    |at: usize| rows.weights[row(at).min(count - 1) * rows.row_bytes..].as_ptr();
                // Hidden from the compiler, which would otherwise recompute them for every block.
                let four = hint::black_box([start(0), start(1), start(2), start(3)]);
                // SAFETY: whole rows, and the copy of a token.
                let products = unsafe { $product(four, rows.copy(0), rows.columns / $block) };
                let mut lanes = [0f32; ROWS];
                // SAFETY: four numbers.
                unsafe { vst1q_f32(lanes.as_mut_ptr(), products) };
                for (at, product) in lanes
                    .into_iter()
                    .enumerate()
                    .take_while(|(at, _)| row(*at) < count)
                {
                    rows.put(0, row(at), product);
                }
            }
        }
    };
}

rows!(rows_q4k, q4k, SUPER);
rows!(rows_q5k, q5k, SUPER);
rows!(rows_q6k, q6k, SUPER);
rows!(rows_q8_0, q8_0, BLOCK);
rows!(rows_q4_0, q4_0, BLOCK);
rows!(rows_q4_1, q4_1, BLOCK);
rows!(rows_q5_0, q5_0, BLOCK);
rows!(rows_q5_1, q5_1, BLOCK);
rows!(rows_q2k, q2k, SUPER);
rows!(rows_q3k, q3k, SUPER);
rows!(rows_iq4_nl, iq4_nl, BLOCK);
rows!(rows_iq4_xs, iq4_xs, SUPER);
rows!(rows_mxfp4, mxfp4, BLOCK);

/// An address in a row, which with `WAIT` the compiler cannot know before the products of another row: for types that
/// are costly to unpack it would otherwise unpack all rows first, and run out of registers.
#[inline]
#[target_feature(enable = "neon")]
fn after<const WAIT: bool>(mut place: *const u8, products: int32x4_t) -> *const u8 {
    if !WAIT {
        return place;
    }
    // SAFETY: no instruction at all.
    unsafe {
        asm!(
            "/* {place} {products:v} */",
            place = inout(reg) place,
            products = in(vreg) products,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    place
}

/// 128 columns of a token.
///
/// # Safety
///
/// They can be read.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn columns_of_half(y: *const u8) -> [int8x16_t; 8] {
    let mut columns = [vdupq_n_s8(0); 8];
    for (number, columns) in columns.iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        *columns = unsafe { vld1q_s8(y.add(16 * number).cast()) };
    }
    columns
}

/// Scales of eight columns' sums minus those of the next. The sum over all columns of products times scales equals the
/// sum of `running total · (scale - next scale)`: so products of a row accumulate in one register, which is never
/// cleared.
#[inline]
#[target_feature(enable = "neon")]
fn steps(scales: int16x8_t, next: int16x8_t) -> int16x8_t {
    vsubq_s16(scales, vextq_s16::<1>(scales, next))
}

macro_rules! supers {
    ($name:ident, $bytes:expr, $half:ident, $heads:ident, $sub:expr, $scale_at:expr, $less:expr, $wait:expr) => {
        /// # Safety
        ///
        /// Four rows of this many blocks of this type, and a copy in Q8_K.
        #[inline]
        #[target_feature(enable = "neon,dotprod")]
        unsafe fn $name(mut four: Four, copy: *const u8, blocks: usize) -> float32x4_t {
            /// Adds half a block to the running total of a row, and the total to its products.
            ///
            /// # Safety
            ///
            /// `block` is a block of this type.
            #[inline]
            #[target_feature(enable = "neon,dotprod")]
            unsafe fn add_half<const HALF: usize>(
                block: *const u8,
                ys: [int8x16_t; 8],
                scales: [int16x8_t; 2],
                running: &mut int32x4_t,
                products: &mut int32x4_t,
            ) {
                // SAFETY: the caller's promise.
                let [a, b, c, d] = unsafe { $half(block, HALF) };
                let (mut sum, mut total) = (*running, *products);
                let low = |of: int16x8_t| vmovl_s16(vget_low_s16(of));
                if $sub == 32 {
                    let scales = if HALF == 0 {
                        low(scales[0])
                    } else {
                        vmovl_high_s16(scales[0])
                    };
                    sum = dot(dot(sum, a[0], ys[0]), a[1], ys[1]);
                    total = add_scaled::<0>(total, sum, scales);
                    sum = dot(dot(sum, b[0], ys[2]), b[1], ys[3]);
                    total = add_scaled::<1>(total, sum, scales);
                    sum = dot(dot(sum, c[0], ys[4]), c[1], ys[5]);
                    total = add_scaled::<2>(total, sum, scales);
                    sum = dot(dot(sum, d[0], ys[6]), d[1], ys[7]);
                    total = add_scaled::<3>(total, sum, scales);
                } else {
                    let (first, last) = (low(scales[HALF]), vmovl_high_s16(scales[HALF]));
                    sum = dot(sum, a[0], ys[0]);
                    total = add_scaled::<0>(total, sum, first);
                    sum = dot(sum, a[1], ys[1]);
                    total = add_scaled::<1>(total, sum, first);
                    sum = dot(sum, b[0], ys[2]);
                    total = add_scaled::<2>(total, sum, first);
                    sum = dot(sum, b[1], ys[3]);
                    total = add_scaled::<3>(total, sum, first);
                    sum = dot(sum, c[0], ys[4]);
                    total = add_scaled::<0>(total, sum, last);
                    sum = dot(sum, c[1], ys[5]);
                    total = add_scaled::<1>(total, sum, last);
                    sum = dot(sum, d[0], ys[6]);
                    total = add_scaled::<2>(total, sum, last);
                    sum = dot(sum, d[1], ys[7]);
                    total = add_scaled::<3>(total, sum, last);
                }
                (*running, *products) = (sum, total);
            }

            let less: Option<i32> = $less;
            let (zero, zeros) = (vdupq_n_s32(0), vdupq_n_s16(0));
            let (mut sums, mut low_sums) = (vdupq_n_f32(0.0), vdupq_n_f32(0.0));
            for index in 0..blocks {
                // SAFETY: inside rows and copy; the sums of 32 follow the copy's blocks.
                unsafe {
                    let y = copy.add(index * Q8K_BYTES);
                    let activations = if $sub == 32 {
                        copy.add(blocks * Q8K_BYTES + index * Q8K_SUMS)
                    } else {
                        y.add(4 + SUPER)
                    };
                    let (mut products, mut running, mut lows) =
                        ([zero; ROWS], [zero; ROWS], [zero; ROWS]);
                    let mut scales = [[zeros; 2]; ROWS];
                    for row in 0..ROWS {
                        let (own, mins) = $heads(four[row]);
                        let few: &[int16x8_t] = &mins;
                        for part in 0..few.len() {
                            let of = vld1q_s16(activations.cast::<i16>().add(8 * part));
                            lows[row] = products_of(lows[row], mins[part], of);
                            let next = if part + 1 < few.len() {
                                own[part + 1]
                            } else {
                                zeros
                            };
                            scales[row][part] = steps(own[part], next);
                        }
                    }
                    let ys = columns_of_half(y.add(4));
                    add_half::<0>(four[0], ys, scales[0], &mut running[0], &mut products[0]);
                    add_half::<0>(
                        after::<{ $wait }>(four[1], products[0]),
                        ys,
                        scales[1],
                        &mut running[1],
                        &mut products[1],
                    );
                    add_half::<0>(
                        after::<{ $wait }>(four[2], products[1]),
                        ys,
                        scales[2],
                        &mut running[2],
                        &mut products[2],
                    );
                    add_half::<0>(
                        after::<{ $wait }>(four[3], products[2]),
                        ys,
                        scales[3],
                        &mut running[3],
                        &mut products[3],
                    );
                    let ys = columns_of_half(y.add(132));
                    add_half::<1>(four[0], ys, scales[0], &mut running[0], &mut products[0]);
                    add_half::<1>(
                        after::<{ $wait }>(four[1], products[0]),
                        ys,
                        scales[1],
                        &mut running[1],
                        &mut products[1],
                    );
                    add_half::<1>(
                        after::<{ $wait }>(four[2], products[1]),
                        ys,
                        scales[2],
                        &mut running[2],
                        &mut products[2],
                    );
                    add_half::<1>(
                        after::<{ $wait }>(four[3], products[2]),
                        ys,
                        scales[3],
                        &mut running[3],
                        &mut products[3],
                    );
                    let factor = y.cast::<f32>().read_unaligned();
                    let (total, low) = (side_by_side(products), side_by_side(lows));
                    if let Some(shift) = less {
                        let total =
                            vcvtq_f32_s32(vsubq_s32(total, vshlq_s32(low, vdupq_n_s32(shift))));
                        let scale = widened(halves_of_four(moved(four, $scale_at)));
                        sums = vfmaq_f32(sums, total, vmulq_n_f32(scale, factor));
                    } else {
                        let (scale, min_scale) = pairs_of_four(moved(four, $scale_at));
                        sums = vfmaq_f32(
                            sums,
                            vcvtq_f32_s32(total),
                            vmulq_n_f32(widened(scale), factor),
                        );
                        low_sums = vfmaq_f32(
                            low_sums,
                            vcvtq_f32_s32(low),
                            vmulq_n_f32(widened(min_scale), factor),
                        );
                    }
                }
                four = moved(four, $bytes);
            }
            if less.is_some() {
                sums
            } else {
                vsubq_f32(sums, low_sums)
            }
        }
    };
}

supers!(q4k, 144, half_q4k, heads_of_six_bits, 32, 0, None, false);
supers!(q5k, 176, half_q5k, heads_of_six_bits, 32, 0, None, true);
supers!(q2k, 84, half_q2k, heads_q2k, 16, 80, None, false);
supers!(q3k, 110, half_q3k, heads_q3k, 16, 108, Some(2), true);
supers!(q6k, 210, half_q6k, heads_q6k, 16, 208, Some(5), true);
supers!(
    iq4_xs,
    136,
    half_iq4_xs,
    heads_iq4_xs,
    32,
    0,
    Some(0),
    false
);

macro_rules! small {
    ($name:ident, $bytes:expr, |$block:ident| $quants:expr, $added:expr, $minimum:expr, $scales:ident) => {
        /// # Safety
        ///
        /// Four rows of this many blocks of this type, and a copy in Q8_0.
        #[inline]
        #[target_feature(enable = "neon,dotprod")]
        unsafe fn $name(mut four: Four, copy: *const u8, blocks: usize) -> float32x4_t {
            /// Adds the block at distance `AT`, of four rows and of the token at `y`, whose factors and starts are at
            /// `behind`.
            ///
            /// # Safety
            ///
            /// They can be read.
            #[inline]
            #[target_feature(enable = "neon,dotprod")]
            unsafe fn add_one<const AT: usize>(
                mut sums: float32x4_t,
                four: Four,
                y: *const u8,
                behind: [*const u8; 2],
            ) -> float32x4_t {
                // Quants are unsigned, offset by this power of two, which sums of activations correct.
                let added: Option<i32> = $added;
                let (four, y) = (moved(four, AT * $bytes), y.wrapping_add(AT * Q8_0_BYTES));
                // SAFETY: the caller's promise.
                unsafe {
                    let ys = signed(pair(y));
                    let mut products = [vdupq_n_s32(0); ROWS];
                    for row in 0..ROWS {
                        let $block = four[row];
                        let quants: [int8x16_t; 2] = $quants;
                        products[row] = dot(dot(products[row], quants[0], ys[0]), quants[1], ys[1]);
                    }
                    let mut total = side_by_side(products);
                    let start = behind[1].cast::<i32>().add(AT).read_unaligned();
                    if let Some(added) = added {
                        total = vaddq_s32(total, vdupq_n_s32(start >> (7 - added)));
                    }
                    let factor = behind[0].cast::<f32>().add(AT).read_unaligned();
                    let scales = if $minimum {
                        let (scales, mins) = pairs_of_four(four);
                        let y = vdupq_n_f32(start as f32 * PER_START);
                        sums = vfmaq_f32(sums, y, vmulq_n_f32(widened(mins), factor));
                        widened(scales)
                    } else {
                        $scales(four)
                    };
                    vfmaq_f32(sums, vcvtq_f32_s32(total), vmulq_n_f32(scales, factor))
                }
            }
            let mut y = copy.wrapping_add(2);
            let factors = copy.wrapping_add(blocks * Q8_0_BYTES);
            let mut behind = [factors, factors.wrapping_add(4 * blocks)];
            let mut sums = [vdupq_n_f32(0.0); SUMS];
            for _ in 0..blocks / SUMS {
                // SAFETY: blocks of each row and of the copy, whose factors and starts follow its blocks.
                unsafe {
                    sums[0] = add_one::<0>(sums[0], four, y, behind);
                    sums[1] = add_one::<1>(sums[1], four, y, behind);
                    sums[2] = add_one::<2>(sums[2], four, y, behind);
                    sums[3] = add_one::<3>(sums[3], four, y, behind);
                }
                four = moved(four, SUMS * $bytes);
                y = y.wrapping_add(SUMS * Q8_0_BYTES);
                behind = [
                    behind[0].wrapping_add(4 * SUMS),
                    behind[1].wrapping_add(4 * SUMS),
                ];
            }
            for number in 0..blocks % SUMS {
                // SAFETY: as above.
                sums[number] = unsafe { add_one::<0>(sums[number], four, y, behind) };
                four = moved(four, $bytes);
                y = y.wrapping_add(Q8_0_BYTES);
                behind = [behind[0].wrapping_add(4), behind[1].wrapping_add(4)];
            }
            vaddq_f32(vaddq_f32(sums[0], sums[1]), vaddq_f32(sums[2], sums[3]))
        }
    };
}

small!(
    q8_0,
    Q8_0_BYTES,
    |block| quants_q8_0(block),
    None,
    false,
    half_scales
);
small!(
    q4_0,
    18,
    |block| nibbles(block.add(2)),
    Some(3),
    false,
    half_scales
);
small!(
    q4_1,
    20,
    |block| quants_q4_1(block),
    None,
    true,
    half_scales
);
small!(
    q5_0,
    22,
    |block| with_fifth(nibbles(block.add(6)), block.add(2)),
    Some(4),
    false,
    half_scales
);
small!(
    q5_1,
    24,
    |block| quants_q5_1(block),
    None,
    true,
    half_scales
);
small!(
    iq4_nl,
    18,
    |block| quants_iq4_nl(block),
    None,
    false,
    half_scales
);
small!(
    mxfp4,
    17,
    |block| quants_mxfp4(block),
    None,
    false,
    power_scales
);

/// The lane sums of four rows' products, in adjacent lanes.
#[inline]
#[target_feature(enable = "neon")]
fn side_by_side([a, b, c, d]: [int32x4_t; ROWS]) -> int32x4_t {
    vpaddq_s32(vpaddq_s32(a, b), vpaddq_s32(c, d))
}
