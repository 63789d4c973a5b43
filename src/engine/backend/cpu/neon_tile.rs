//! Products of quantised rows with many tokens for arm64 with byte dot products.
//!
//! Four rows in the lanes of a register, eight at a time; with `MATRIX` by byte matrix products (`FEAT_I8MM`).
//!
//! A block of eight rows is unpacked once into groups of four columns, four rows adjacent, which stay in the
//! first-level cache while all tokens are processed: one `sdot` by element then multiplies four columns of four rows
//! with those of a token, so that sums need no shuffles, and one multiplication scales the sums of four rows. Two
//! registers of rows and four tokens form a tile of eight running sums, in which twelve loads serve 32 dot products.
//! The unpacked block and the sums take at most 21 KiB on the stack; nothing is kept.
//!
//! With matrix products a register has eight columns of two rows, and one `smmla` multiplies them with those of two
//! tokens: half as many instructions. Its sums are two rows by two tokens, and are rearranged to lanes of four rows at
//! the end of a block.
//!
//! The order of every sum is that of [`neon`](super::neon), so that chunks of one token and of many yield the same
//! bits, with either set.

use std::{
    arch::{aarch64::*, asm},
    hint,
    mem::transmute,
};

use super::{
    neon_unpack::{
        PER_START, SUMS, half_iq4_xs, half_q2k, half_q3k, half_q4k, half_q5k, half_q6k,
        half_scales, halves_of_four, heads_iq4_xs, heads_of_six_bits, heads_q2k, heads_q3k,
        heads_q6k, moved, pairs_of_four, power_scales, quants_iq4_nl, quants_mxfp4, quants_q4_0,
        quants_q4_1, quants_q5_0, quants_q5_1, quants_q8_0, widened,
    },
    quant::{BLOCK, Q8_0_BYTES, Q8K_BYTES, Q8K_SUMS, SUPER},
    rows::Rows,
};

/// For one token, unpacking to memory does not pay off; two take fewer instructions than each alone.
pub(super) const TOKENS_MIN: usize = 2;

/// Rows of a register.
const LANES: usize = 4;

/// Registers of rows processed together by a tile.
const PARTS: usize = 2;

/// Rows processed together by a tile.
pub(super) const ROWS: usize = LANES * PARTS;

/// Tokens processed on an unpacked block: their quants in a block of 256 are half of a first-level cache of 64 KiB.
const TOKENS: usize = 128;

/// Tokens of a tile: eight sums of products, eight of blocks, four registers of tokens and two of weights.
const STEP: usize = 4;

/// Columns of a register of a token.
const COLUMNS: usize = 16;

/// Blocks of 32 columns unpacked together.
const BLOCKS: usize = 16;

/// Sixteen columns of all rows: one register per four rows and four columns; with `MATRIX`, per two rows and eight
/// columns.
type Columns = [[int8x16_t; COLUMNS / 4]; PARTS];

/// One block of 256 columns of all rows.
struct Unpacked {
    quants: [Columns; SUPER / COLUMNS],
    /// Per 32 columns, or per 16 in Q6_K.
    scales: [[int32x4_t; PARTS]; 16],
    /// Factor of each sum of 32 activations, or of 16 in Q2_K.
    mins: [[int16x4_t; PARTS]; 16],
    scale: [float32x4_t; PARTS],
    min_scale: [float32x4_t; PARTS],
}

impl Unpacked {
    #[inline]
    #[target_feature(enable = "neon")]
    fn new() -> Self {
        Self {
            quants: [[[vdupq_n_s8(0); 4]; PARTS]; SUPER / COLUMNS],
            scales: [[vdupq_n_s32(0); PARTS]; 16],
            mins: [[vdup_n_s16(0); PARTS]; 16],
            scale: [vdupq_n_f32(0.0); PARTS],
            min_scale: [vdupq_n_f32(0.0); PARTS],
        }
    }

    /// Unpacks scales and minimums of four rows, eight per register, and the block-wide factors.
    #[inline]
    #[target_feature(enable = "neon")]
    fn unpack_heads<const N: usize>(
        &mut self,
        part: usize,
        heads: [([int16x8_t; N], [int16x8_t; N]); LANES],
        (scale, min_scale): (uint16x4_t, uint16x4_t),
    ) {
        let [a, b, c, d] = heads;
        for eight in 0..N {
            let scales = side_by_side([a.0[eight], b.0[eight], c.0[eight], d.0[eight]]);
            let mins = side_by_side([a.1[eight], b.1[eight], c.1[eight], d.1[eight]]);
            for (sub, (scales, mins)) in scales.into_iter().zip(mins).enumerate() {
                self.scales[8 * eight + sub][part] = vmovl_s16(scales);
                self.mins[8 * eight + sub][part] = mins;
            }
        }
        (self.scale[part], self.min_scale[part]) = (widened(scale), widened(min_scale));
    }
}

/// Rearranges eight numbers per row into registers of four rows each.
#[inline]
#[target_feature(enable = "neon")]
fn side_by_side(rows: [int16x8_t; LANES]) -> [int16x4_t; 8] {
    let [a, b, c, d] = rows;
    let mut turned = [vdup_n_s16(0); 8];
    // SAFETY: 64 bytes.
    unsafe { vst4q_s16(turned.as_mut_ptr().cast(), int16x8x4_t(a, b, c, d)) };
    turned
}

/// Rearranges sixteen columns of each of four rows into [`Columns`].
#[inline]
#[target_feature(enable = "neon")]
fn turn<const MATRIX: bool>(rows: [int8x16_t; LANES], turned: &mut [int8x16_t; COLUMNS / 4]) {
    let [a, b, c, d] = rows;
    if MATRIX {
        *turned = [
            eights::<0>(a, b),
            eights::<1>(a, b),
            eights::<0>(c, d),
            eights::<1>(c, d),
        ];
        return;
    }
    let [a, b, c, d] = rows.map(|row| vreinterpretq_s32_s8(row));
    // SAFETY: 64 bytes.
    unsafe { vst4q_s32(turned.as_mut_ptr().cast(), int32x4x4_t(a, b, c, d)) };
}

/// The first or the last eight columns of two rows or tokens.
#[inline]
#[target_feature(enable = "neon")]
fn eights<const HALF: usize>(a: int8x16_t, b: int8x16_t) -> int8x16_t {
    let (a, b) = (vreinterpretq_s64_s8(a), vreinterpretq_s64_s8(b));
    vreinterpretq_s8_s64(if HALF == 0 {
        vzip1q_s64(a, b)
    } else {
        vzip2q_s64(a, b)
    })
}

/// Calls a tile function for the remaining tokens, at most [`STEP`] at a time.
macro_rules! for_tokens {
    ($tokens:expr, |$token:ident| $function:ident[$($more:tt),*]($($argument:expr),* $(,)?)) => {{
        let mut $token = 0;
        while $token < $tokens {
            match $tokens - $token {
                STEP.. => {
                    $function::<STEP $(, $more)*>($($argument),*);
                    $token += STEP;
                }
                2.. => {
                    $function::<2 $(, $more)*>($($argument),*);
                    $token += 2;
                }
                _ => {
                    $function::<1 $(, $more)*>($($argument),*);
                    $token += 1;
                }
            }
        }
    }};
}

/// For each four rows, the running sum of a token and that of the minimums.
type SuperSums = [[float32x4_t; 2]; PARTS];

macro_rules! super_tiles {
    ($name:ident, $bytes:expr, $half:ident, $less:expr, $heads:ident, $sub:expr, $mins:expr, $scale_at:expr) => {
        /// All rows of this type times all tokens.
        ///
        /// # Safety
        ///
        /// The machine has the instructions of [`Isa::Dotprod`](super::isa::Isa::Dotprod), and with `MATRIX` those of
        /// [`Isa::I8mm`](super::isa::Isa::I8mm); `rows` is as its fields say.
        #[target_feature(enable = "neon,dotprod")]
        pub(super) unsafe fn $name<const MATRIX: bool>(rows: &Rows<'_>) {
            /// # Safety
            ///
            /// `starts` are blocks of this type.
            #[inline]
            #[target_feature(enable = "neon")]
            unsafe fn unpack<const MATRIX: bool>(starts: &[*const u8; ROWS], unpacked: &mut Unpacked) {
                let less = vdupq_n_s8($less);
                for (part, four) in starts.as_chunks::<LANES>().0.iter().enumerate() {
                    // SAFETY: the caller's promise.
                    let (heads, scales) = unsafe {
                        let at = moved(*four, $scale_at);
                        (
                            [$heads(four[0]), $heads(four[1]), $heads(four[2]), $heads(four[3])],
                            if $mins { pairs_of_four(at) } else { (halves_of_four(at), vdup_n_u16(0)) },
                        )
                    };
                    unpacked.unpack_heads(part, heads, scales);
                    let mut quants = [[[[less; 2]; 4]; 2]; LANES];
                    for (quants, block) in quants.iter_mut().zip(four) {
                        // SAFETY: the caller's promise.
                        *quants = unsafe { [$half(*block, 0), $half(*block, 1)] };
                    }
                    for (at, columns) in unpacked.quants.iter_mut().enumerate() {
                        let mut four = [less; LANES];
                        for (four, quants) in four.iter_mut().zip(&quants) {
                            *four = vsubq_s8(quants[at / 8][at / 2 % 4][at % 2], less);
                        }
                        turn::<MATRIX>(four, &mut columns[part]);
                    }
                }
            }
            let mut unpacked = Unpacked::new();
            let mut sums: [SuperSums; TOKENS] = [[[vdupq_n_f32(0.0); 2]; PARTS]; TOKENS];
            let count = rows.weights.len() / rows.row_bytes;
            let blocks = rows.columns / SUPER;
            for from in (0..rows.tokens).step_by(TOKENS) {
                let tokens = TOKENS.min(rows.tokens - from);
                for first in (0..count).step_by(ROWS) {
                    let starts = rows.starts::<ROWS>(first);
                    sums[..tokens].fill([[vdupq_n_f32(0.0); 2]; PARTS]);
                    for index in 0..blocks {
                        // SAFETY: blocks of whole rows.
                        unsafe {
                            unpack::<MATRIX>(&starts.map(|start| start.wrapping_add(index * $bytes)), &mut unpacked);
                        };
                        let place = (index * Q8K_BYTES, blocks * Q8K_BYTES + index * Q8K_SUMS);
                        // SAFETY: copies of this many tokens, each with this block.
                        unsafe {
                            for_tokens!(tokens, |token| multiply[$sub, $mins, MATRIX](
                                &unpacked, rows, from + token, place, &mut sums[token..],
                            ));
                        }
                    }
                    for (token, sums) in sums[..tokens].iter().enumerate() {
                        for (part, [sum, low]) in sums.iter().enumerate() {
                            // SAFETY: four numbers in both types.
                            let lanes = unsafe { transmute::<float32x4_t, [f32; LANES]>(vsubq_f32(*sum, *low)) };
                            rows.put_lanes(from + token, first + part * LANES, count, lanes);
                        }
                    }
                }
            }
        }
    };
}

super_tiles!(rows_q4k, 144, half_q4k, 0, heads_of_six_bits, 32, true, 0);
super_tiles!(rows_q5k, 176, half_q5k, 0, heads_of_six_bits, 32, true, 0);
super_tiles!(rows_q6k, 210, half_q6k, 32, heads_q6k, 16, false, 208);
super_tiles!(rows_q2k, 84, half_q2k, 0, heads_q2k, 16, true, 80);
super_tiles!(rows_q3k, 110, half_q3k, 4, heads_q3k, 16, false, 108);
super_tiles!(rows_iq4_xs, 136, half_iq4_xs, 0, heads_iq4_xs, 32, false, 0);

/// One block of eight rows times `N` tokens from `token`, whose copies have it and its sums of 32 at `place`; `SUB`
/// columns share a scale.
///
/// # Safety
///
/// Copies of these tokens exist and have such a block.
#[target_feature(enable = "neon,dotprod")]
unsafe fn multiply<const N: usize, const SUB: usize, const MINS: bool, const MATRIX: bool>(
    unpacked: &Unpacked,
    rows: &Rows<'_>,
    token: usize,
    place: (usize, usize),
    sums: &mut [SuperSums],
) {
    let Some(sums) = sums.first_chunk_mut::<N>() else {
        return;
    };
    let copies: [_; N] = std::array::from_fn(|ahead| rows.copy(token + ahead));
    let zero = vdupq_n_s32(0);
    let mut totals = [[zero; PARTS]; STEP];
    // Not unrolled: otherwise the sums of all its iterations would exceed the registers.
    for sub in 0..hint::black_box(SUPER / SUB) {
        let mut products = [[zero; PARTS]; STEP];
        for part in 0..SUB / COLUMNS {
            let at = sub * (SUB / COLUMNS) + part;
            // SAFETY: the lines of a block, and the quants of as many columns of a token.
            unsafe {
                let columns = unpacked.quants.get_unchecked(at);
                add_columns::<N, MATRIX>(
                    columns,
                    &copies,
                    place.0 + 4 + COLUMNS * at,
                    &mut products,
                );
            }
        }
        for part in 0..PARTS {
            // SAFETY: one for each.
            let scale = unsafe { unpacked.scales.get_unchecked(sub) }[part];
            let scales = if MATRIX {
                [vzip1q_s32(scale, scale), vzip2q_s32(scale, scale)]
            } else {
                [scale; 2]
            };
            for at in 0..registers::<N, MATRIX>() {
                totals[at][part] = vmlaq_s32(totals[at][part], products[at][part], scales[at % 2]);
            }
        }
    }
    if MATRIX {
        by_token::<N>(&mut totals);
    }
    for (ahead, sums) in sums.iter_mut().enumerate() {
        // SAFETY: the block's factor.
        let factor = unsafe { copies[ahead].add(place.0).cast::<f32>().read_unaligned() };
        // The block's sums: of 16 at its own end, or of 32 after all blocks.
        let at = if SUB == 16 {
            place.0 + 4 + SUPER
        } else {
            place.1
        };
        for (part, [sum, low]) in sums.iter_mut().enumerate() {
            let scale = vmulq_n_f32(unpacked.scale[part], factor);
            *sum = vfmaq_f32(*sum, vcvtq_f32_s32(totals[ahead][part]), scale);
            if MINS {
                let mut total = zero;
                for eight in 0..SUPER / SUB / 8 {
                    // SAFETY: eight sums.
                    let sums = unsafe { vld1q_s16(copies[ahead].add(at + 16 * eight).cast()) };
                    let min = |sub: usize| unpacked.mins[8 * eight + sub][part];
                    let (first, last) = (vget_low_s16(sums), vget_high_s16(sums));
                    total = vmlal_lane_s16::<0>(total, min(0), first);
                    total = vmlal_lane_s16::<1>(total, min(1), first);
                    total = vmlal_lane_s16::<2>(total, min(2), first);
                    total = vmlal_lane_s16::<3>(total, min(3), first);
                    total = vmlal_lane_s16::<0>(total, min(4), last);
                    total = vmlal_lane_s16::<1>(total, min(5), last);
                    total = vmlal_lane_s16::<2>(total, min(6), last);
                    total = vmlal_lane_s16::<3>(total, min(7), last);
                }
                *low = vfmaq_f32(
                    *low,
                    vcvtq_f32_s32(total),
                    vmulq_n_f32(unpacked.min_scale[part], factor),
                );
            }
        }
    }
}

/// Sums of each four rows and each token in lanes of rows; with `MATRIX`, of each two rows and two tokens, and within a
/// pair of tokens those of the first two rows first.
type Products = [[int32x4_t; PARTS]; STEP];

/// Number of registers with sums per four rows.
const fn registers<const N: usize, const MATRIX: bool>() -> usize {
    if MATRIX { 2 * N.div_ceil(2) } else { N }
}

/// Rearranges sums of two rows by two tokens to lanes of rows per token.
#[inline]
#[target_feature(enable = "neon")]
fn by_token<const N: usize>(sums: &mut Products) {
    for pair in 0..N.div_ceil(2) {
        for part in 0..PARTS {
            let (first, last) = (sums[2 * pair][part], sums[2 * pair + 1][part]);
            sums[2 * pair][part] = vuzp1q_s32(first, last);
            sums[2 * pair + 1][part] = vuzp2q_s32(first, last);
        }
    }
}

/// Adds the products of eight columns of two rows with those of two tokens: a row of sums per row. `vmmlaq_s32` is not
/// stable yet.
///
/// # Safety
///
/// The machine has `FEAT_I8MM`, which is named only for the assembler.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn matrix(mut sum: int32x4_t, rows: int8x16_t, tokens: int8x16_t) -> int32x4_t {
    // SAFETY: one instruction on registers only, supported by the machine.
    unsafe {
        asm!(
            ".arch_extension i8mm",
            "smmla {sum:v}.4s, {rows:v}.16b, {tokens:v}.16b",
            sum = inout(vreg) sum,
            rows = in(vreg) rows,
            tokens = in(vreg) tokens,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sum
}

/// Adds the products of sixteen columns with those of `N` tokens, at `place` of their copies.
///
/// # Safety
///
/// There are sixteen quants at `place` of each copy; with `MATRIX` the machine has `FEAT_I8MM`.
#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn add_columns<const N: usize, const MATRIX: bool>(
    columns: &Columns,
    copies: &[*const u8; N],
    place: usize,
    products: &mut Products,
) {
    let mut y = [vdupq_n_s8(0); N];
    for (y, copy) in y.iter_mut().zip(copies) {
        // SAFETY: the caller's promise.
        *y = unsafe { vld1q_s8(copy.add(place).cast()) };
    }
    if MATRIX {
        // The last token substitutes for a missing one.
        for pair in 0..N.div_ceil(2) {
            let (first, second) = (y[2 * pair], y[(2 * pair + 1).min(N - 1)]);
            let tokens = [eights::<0>(first, second), eights::<1>(first, second)];
            for part in 0..PARTS {
                for rows in 0..2 {
                    let sum = &mut products[2 * pair + rows][part];
                    // SAFETY: the caller's promise.
                    unsafe {
                        *sum = matrix(*sum, columns[part][2 * rows], tokens[0]);
                        *sum = matrix(*sum, columns[part][2 * rows + 1], tokens[1]);
                    }
                }
            }
        }
        return;
    }
    add_four::<0, N>(columns, &y, products);
    add_four::<1, N>(columns, &y, products);
    add_four::<2, N>(columns, &y, products);
    add_four::<3, N>(columns, &y, products);
}

/// Adds the products of four of sixteen columns.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn add_four<const FOUR: usize, const N: usize>(
    columns: &Columns,
    y: &[int8x16_t; N],
    products: &mut Products,
) {
    for part in 0..PARTS {
        let weights = columns[part][FOUR];
        for (products, y) in products.iter_mut().zip(y) {
            products[part] = dot_by::<FOUR>(products[part], weights, *y);
        }
    }
}

/// Adds to each lane the products of its four bytes with the four of element `FOUR`. `vdotq_laneq_s32` is not stable
/// yet.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn dot_by<const FOUR: usize>(mut sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: one instruction of an enabled set, on registers only.
    unsafe {
        asm!(
            "sdot {sum:v}.4s, {a:v}.16b, {b:v}.4b[{four}]",
            sum = inout(vreg) sum,
            a = in(vreg) a,
            b = in(vreg) b,
            four = const FOUR,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sum
}

/// Several blocks of 32 columns of all rows.
struct UnpackedSmall {
    quants: [[Columns; BLOCK / COLUMNS]; BLOCKS],
    scales: [[float32x4_t; PARTS]; BLOCKS],
    mins: [[float32x4_t; PARTS]; BLOCKS],
}

/// For each four rows, the running sums of a token.
type SmallSums = [[float32x4_t; PARTS]; SUMS];

macro_rules! small_tiles {
    ($name:ident, $bytes:expr, $quants:ident, $minimum:expr, $scales:ident) => {
        /// All rows of this type times all tokens.
        ///
        /// # Safety
        ///
        /// The machine has the instructions of [`Isa::Dotprod`](super::isa::Isa::Dotprod), and with `MATRIX` those of
        /// [`Isa::I8mm`](super::isa::Isa::I8mm); `rows` is as its fields say.
        #[target_feature(enable = "neon,dotprod")]
        pub(super) unsafe fn $name<const MATRIX: bool>(rows: &Rows<'_>) {
            /// # Safety
            ///
            /// At `starts` there are `count` blocks of this type.
            #[inline]
            #[target_feature(enable = "neon")]
            unsafe fn unpack<const MATRIX: bool>(
                starts: &[*const u8; ROWS],
                count: usize,
                unpacked: &mut UnpackedSmall,
            ) {
                for at in 0..count {
                    for (part, four) in starts.as_chunks::<LANES>().0.iter().enumerate() {
                        let four = moved(*four, at * $bytes);
                        // SAFETY: a block of each row, which starts with its scale, followed by its minimum if any.
                        let ([a, b, c, d], (scales, mins)) = unsafe {
                            (
                                [$quants(four[0]), $quants(four[1]), $quants(four[2]), $quants(four[3])],
                                if $minimum {
                                    let (scales, mins) = pairs_of_four(four);
                                    (widened(scales), widened(mins))
                                } else {
                                    ($scales(four), vdupq_n_f32(0.0))
                                },
                            )
                        };
                        turn::<MATRIX>([a[0], b[0], c[0], d[0]], &mut unpacked.quants[at][0][part]);
                        turn::<MATRIX>([a[1], b[1], c[1], d[1]], &mut unpacked.quants[at][1][part]);
                        (unpacked.scales[at][part], unpacked.mins[at][part]) = (scales, mins);
                    }
                }
            }
            let mut unpacked = UnpackedSmall {
                quants: [[[[vdupq_n_s8(0); 4]; PARTS]; BLOCK / COLUMNS]; BLOCKS],
                scales: [[vdupq_n_f32(0.0); PARTS]; BLOCKS],
                mins: [[vdupq_n_f32(0.0); PARTS]; BLOCKS],
            };
            let mut sums: [SmallSums; TOKENS] = [[[vdupq_n_f32(0.0); PARTS]; SUMS]; TOKENS];
            let count = rows.weights.len() / rows.row_bytes;
            let all = rows.columns / BLOCK;
            for from in (0..rows.tokens).step_by(TOKENS) {
                let tokens = TOKENS.min(rows.tokens - from);
                for first in (0..count).step_by(ROWS) {
                    let starts = rows.starts::<ROWS>(first);
                    sums[..tokens].fill([[vdupq_n_f32(0.0); PARTS]; SUMS]);
                    for index in (0..all).step_by(BLOCKS) {
                        let blocks = BLOCKS.min(all - index);
                        let starts = starts.map(|start| start.wrapping_add(index * $bytes));
                        let place = (index * Q8_0_BYTES, all * Q8_0_BYTES + index * 4, all * 4);
                        // SAFETY: blocks of whole rows, and copies of this many tokens, each with these blocks.
                        unsafe {
                            unpack::<MATRIX>(&starts, blocks, &mut unpacked);
                            for_tokens!(tokens, |token| multiply_small[$minimum, MATRIX](
                                &unpacked, blocks, rows, from + token, place, &mut sums[token..],
                            ));
                        }
                    }
                    for (token, [a, b, c, d]) in sums[..tokens].iter().enumerate() {
                        for part in 0..PARTS {
                            let total = vaddq_f32(vaddq_f32(a[part], b[part]), vaddq_f32(c[part], d[part]));
                            // SAFETY: four numbers in both types.
                            let lanes = unsafe { transmute::<float32x4_t, [f32; LANES]>(total) };
                            rows.put_lanes(from + token, first + part * LANES, count, lanes);
                        }
                    }
                }
            }
        }
    };
}

small_tiles!(rows_q8_0, Q8_0_BYTES, quants_q8_0, false, half_scales);
small_tiles!(rows_q4_0, 18, quants_q4_0, false, half_scales);
small_tiles!(rows_q4_1, 20, quants_q4_1, true, half_scales);
small_tiles!(rows_q5_0, 22, quants_q5_0, false, half_scales);
small_tiles!(rows_q5_1, 24, quants_q5_1, true, half_scales);
small_tiles!(rows_iq4_nl, 18, quants_iq4_nl, false, half_scales);
small_tiles!(rows_mxfp4, 17, quants_mxfp4, false, power_scales);

/// Several blocks of eight rows times `N` tokens from `token`, whose copies have them, with their factors at `place`
/// and the correction by their sums at a distance after those. The first block's number is a multiple of [`SUMS`].
///
/// # Safety
///
/// Copies of these tokens exist and have such blocks.
#[target_feature(enable = "neon,dotprod")]
unsafe fn multiply_small<const N: usize, const MINIMUM: bool, const MATRIX: bool>(
    unpacked: &UnpackedSmall,
    blocks: usize,
    rows: &Rows<'_>,
    token: usize,
    place: (usize, usize, usize),
    sums: &mut [SmallSums],
) {
    let Some(sums) = sums.first_chunk_mut::<N>() else {
        return;
    };
    let copies: [_; N] = std::array::from_fn(|ahead| rows.copy(token + ahead));
    // Every fourth block, whose sums stay in registers meanwhile.
    for number in 0..SUMS {
        let mut running = [[vdupq_n_f32(0.0); PARTS]; N];
        for (running, sums) in running.iter_mut().zip(&*sums) {
            *running = sums[number];
        }
        for at in (number..blocks.min(BLOCKS)).step_by(SUMS) {
            let mut products = [[vdupq_n_s32(0); PARTS]; STEP];
            for (half, columns) in unpacked.quants[at].iter().enumerate() {
                // SAFETY: the quants of as many columns of a token, after their scale.
                unsafe {
                    let place = place.0 + at * Q8_0_BYTES + 2 + COLUMNS * half;
                    add_columns::<N, MATRIX>(columns, &copies, place, &mut products);
                }
            }
            if MATRIX {
                by_token::<N>(&mut products);
            }
            for ahead in 0..N {
                // SAFETY: the block's factor, and -128 times its sum.
                let (factor, start) = unsafe {
                    let behind = copies[ahead].add(place.1 + 4 * at);
                    (
                        behind.cast::<f32>().read_unaligned(),
                        behind.add(place.2).cast::<i32>().read_unaligned(),
                    )
                };
                for part in 0..PARTS {
                    if MINIMUM {
                        let min = vmulq_n_f32(unpacked.mins[at][part], factor);
                        let y = vdupq_n_f32(start as f32 * PER_START);
                        running[ahead][part] = vfmaq_f32(running[ahead][part], y, min);
                    }
                    let scale = vmulq_n_f32(unpacked.scales[at][part], factor);
                    running[ahead][part] = vfmaq_f32(
                        running[ahead][part],
                        vcvtq_f32_s32(products[ahead][part]),
                        scale,
                    );
                }
            }
        }
        for (running, sums) in running.iter().zip(&mut *sums) {
            sums[number] = *running;
        }
    }
}
