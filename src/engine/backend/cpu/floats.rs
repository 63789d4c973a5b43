//! Products with rows of `f32`, `f16` and `bf16`, in tiles of some rows by some tokens.
//!
//! A part of some rows is widened once and stays in the first-level cache while all tokens go by. Each product is summed in
//! sixteen lanes, which are added by halves, so that one token and many, and every set of instructions, yield the same
//! bits as the portable loop.

use super::float;

/// Lanes of a product's sum.
pub(super) const LANES: usize = 16;

/// Columns that are widened at once.
const COLUMNS: usize = 512;

/// Rows that are widened at once.
const ROWS: usize = 8;

/// Tokens whose sums are kept meanwhile.
const TOKENS: usize = 32;

/// As they are.
pub(super) const F32: u8 = 0;
/// Half precision.
pub(super) const F16: u8 = 1;
/// The upper half of an `f32`.
pub(super) const BF16: u8 = 2;

/// The portable form: one row times one token.
#[inline(always)]
pub(super) fn dot<T: Copy>(weight: &[T], input: &[T], widen: impl Fn(T) -> f32) -> f32 {
    let mut sums = [0f32; LANES];
    let (mut left, mut right) = (weight.chunks_exact(LANES), input.chunks_exact(LANES));
    for (x, y) in (&mut left).zip(&mut right) {
        for lane in 0..LANES {
            sums[lane] = widen(x[lane]).mul_add(widen(y[lane]), sums[lane]);
        }
    }
    for (lane, (x, y)) in left.remainder().iter().zip(right.remainder()).enumerate() {
        sums[lane] = widen(*x).mul_add(widen(*y), sums[lane]);
    }
    float::sum(&mut sums)
}

/// Makes the module of a set: its features, its register of so many numbers, the rows and tokens of a tile, and what it does
/// with registers.
macro_rules! products {
    (
        $set:ident, $arch:ident, $features:literal, $register:ty, $width:expr, $rows:expr, $tokens:expr,
        $zero:expr, $load:expr, $store:expr, $fma:expr, $half:expr, $brain:expr, $sum:expr $(,)?
    ) => {
        pub(super) mod $set {
            use std::arch::$arch::*;

            use super::super::rows::Rows;
            use super::{BF16, COLUMNS, F16, F32, LANES, ROWS, TOKENS, element};

            /// Registers of a sum.
            const PARTS: usize = LANES / $width;

            type Sum = [$register; PARTS];

            /// Rows of type `KIND`.
            ///
            /// # Safety
            ///
            /// The machine has the set; `rows` is as its fields say.
            #[target_feature(enable = $features)]
            pub(in super::super) unsafe fn rows<const KIND: u8>(rows: &Rows<'_>) {
                let mut weights = [[0f32; COLUMNS]; ROWS];
                let mut tokens = [[0f32; COLUMNS]; $tokens];
                let mut sums = [[[$zero; PARTS]; ROWS]; TOKENS];
                let (count, all) = (rows.weights.len() / rows.row_bytes.max(1), rows.columns);
                for (from, first) in (0..rows.tokens)
                    .step_by(TOKENS)
                    .flat_map(|from| (0..count).step_by(ROWS).map(move |first| (from, first)))
                {
                    let (here, together) = (TOKENS.min(rows.tokens - from), ROWS.min(count - first));
                    sums[..here].fill([[$zero; PARTS]; ROWS]);
                    for start in (0..all).step_by(COLUMNS) {
                        let width = COLUMNS.min(all - start);
                        // One or two tokens take whole registers of a row as they lie.
                        let direct = here <= 2 && width.is_multiple_of(LANES);
                        let row_at =
                            |row: usize| rows.weights[(first + row).min(count - 1) * rows.row_bytes..].as_ptr();
                        for (row, to) in weights
                            .iter_mut()
                            .enumerate()
                            .take(if direct { 0 } else { together })
                        {
                            // SAFETY: columns of a row.
                            unsafe { widen::<KIND>(row_at(row), start, width, to) };
                        }
                        for token in (0..here).step_by($tokens) {
                            let step = $tokens.min(here - token);
                            for (ahead, to) in tokens.iter_mut().enumerate().take(step) {
                                let token = from + token + ahead;
                                let copy = if KIND == F32 {
                                    rows.floats[token * all..].as_ptr().cast()
                                } else {
                                    rows.copy(token)
                                };
                                // SAFETY: columns of a token.
                                unsafe { widen::<KIND>(copy, start, width, to) };
                            }
                            let sums = &mut sums[token..token + step];
                            let width = width.div_ceil(LANES) * LANES;
                            for row in (0..together).step_by($rows) {
                                let wide: [*const u8; $rows] =
                                    std::array::from_fn(|at| weights[(row + at) % ROWS].as_ptr().cast());
                                // SAFETY: so many columns of each row from `start`, or of what was widened.
                                unsafe {
                                    if step == $tokens {
                                        tile::<F32, $tokens>(wide, 0, &tokens, width, sums, row);
                                        continue;
                                    }
                                    for ahead in 0..step {
                                        let (token, sums) = (&tokens[ahead..=ahead], &mut sums[ahead..=ahead]);
                                        if direct {
                                            let rows = std::array::from_fn(|at| row_at(row + at));
                                            tile::<KIND, 1>(rows, start, token, width, sums, row);
                                        } else {
                                            tile::<F32, 1>(wide, 0, token, width, sums, row);
                                        }
                                    }
                                }
                            }
                        }
                    }
                    for (token, sums) in sums.iter().enumerate().take(here) {
                        for (row, sum) in sums.iter().enumerate().take(together) {
                            rows.put(from + token, first + row, $sum(sum));
                        }
                    }
                }
            }

            /// Adds the products of some rows of type `KIND`, from column `start`, with `N` tokens, `width` columns of each.
            ///
            /// # Safety
            ///
            /// There are so many columns of each row.
            #[target_feature(enable = $features)]
            unsafe fn tile<const KIND: u8, const N: usize>(
                weights: [*const u8; $rows],
                start: usize,
                tokens: &[[f32; COLUMNS]],
                width: usize,
                sums: &mut [[Sum; ROWS]],
                row: usize,
            ) {
                let Some(tokens) = tokens.first_chunk::<N>() else {
                    return;
                };
                let mut running = [[[$zero; PARTS]; $rows]; N];
                for ahead in 0..N {
                    for at in 0..$rows {
                        running[ahead][at] = sums[ahead][row + at];
                    }
                }
                for column in (0..width.min(COLUMNS)).step_by(LANES) {
                    for part in 0..PARTS {
                        let place = column + part * $width;
                        // SAFETY: a register of the columns that each row and each token has.
                        unsafe {
                            let mut ys = [$zero; N];
                            for ahead in 0..N {
                                ys[ahead] = $load(tokens[ahead].as_ptr().add(place));
                            }
                            for at in 0..$rows {
                                let x = register::<KIND>(weights[at], start + place);
                                for ahead in 0..N {
                                    running[ahead][at][part] = $fma(running[ahead][at][part], x, ys[ahead]);
                                }
                            }
                        }
                    }
                }
                for ahead in 0..N {
                    for at in 0..$rows {
                        sums[ahead][row + at] = running[ahead][at];
                    }
                }
            }

            /// A register of columns from `column` on.
            ///
            /// # Safety
            ///
            /// There are so many columns at `from`.
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn register<const KIND: u8>(from: *const u8, column: usize) -> $register {
                // SAFETY: the caller's promise.
                unsafe {
                    match KIND {
                        F16 => $half(from.cast::<u16>().add(column)),
                        BF16 => $brain(from.cast::<u16>().add(column)),
                        _ => $load(from.cast::<f32>().add(column)),
                    }
                }
            }

            /// `width` columns from `start` of what lies at `from`, and zeros up to a multiple of the lanes.
            ///
            /// # Safety
            ///
            /// There are so many columns.
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn widen<const KIND: u8>(from: *const u8, start: usize, width: usize, to: &mut [f32; COLUMNS]) {
                let mut at = 0;
                while at + $width <= width.min(COLUMNS) {
                    // SAFETY: a register of columns.
                    unsafe {
                        $store(to.as_mut_ptr().add(at), register::<KIND>(from, start + at));
                    }
                    at += $width;
                }
                for (ahead, to) in to
                    .iter_mut()
                    .enumerate()
                    .take(width.div_ceil(LANES) * LANES)
                    .skip(at)
                {
                    *to = if ahead < width {
                        // SAFETY: a column.
                        unsafe { element::<KIND>(from, start + ahead) }
                    } else {
                        0.0
                    };
                }
            }
        }
    };
}

/// One number.
///
/// # Safety
///
/// There is such a column at `from`.
#[inline(always)]
unsafe fn element<const KIND: u8>(from: *const u8, column: usize) -> f32 {
    // SAFETY: the caller's promise.
    unsafe {
        match KIND {
            F16 => float::half_to_float(from.cast::<u16>().add(column).read_unaligned()),
            BF16 => f32::from_bits(u32::from(from.cast::<u16>().add(column).read_unaligned()) << 16),
            _ => from.cast::<f32>().add(column).read_unaligned(),
        }
    }
}

#[cfg(target_arch = "x86_64")]
products!(
    avx2,
    x86_64,
    "avx2,fma,f16c",
    __m256,
    8,
    2,
    3,
    _mm256_setzero_ps(),
    |from: *const f32| _mm256_loadu_ps(from),
    |to: *mut f32, value| _mm256_storeu_ps(to, value),
    |sum, x, y| _mm256_fmadd_ps(x, y, sum),
    |from: *const u16| _mm256_cvtph_ps(_mm_loadu_si128(from.cast())),
    |from: *const u16| {
        let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
    },
    |sum: &Sum| super::super::rows256::total(_mm256_add_ps(sum[0], sum[1])),
);

#[cfg(target_arch = "x86_64")]
products!(
    avx512,
    x86_64,
    "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c",
    __m512,
    16,
    4,
    4,
    _mm512_setzero_ps(),
    |from: *const f32| _mm512_loadu_ps(from),
    |to: *mut f32, value| _mm512_storeu_ps(to, value),
    |sum, x, y| _mm512_fmadd_ps(x, y, sum),
    |from: *const u16| _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())),
    |from: *const u16| {
        let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
    },
    |sum: &Sum| {
        let halves = (_mm512_castps512_ps256(sum[0]), _mm512_extractf32x8_ps::<1>(sum[0]));
        super::super::rows256::total(_mm256_add_ps(halves.0, halves.1))
    },
);

#[cfg(target_arch = "aarch64")]
products!(
    neon,
    aarch64,
    "neon",
    float32x4_t,
    4,
    2,
    3,
    vdupq_n_f32(0.0),
    |from: *const f32| vld1q_f32(from),
    |to: *mut f32, value| vst1q_f32(to, value),
    |sum, x, y| vfmaq_f32(sum, x, y),
    |from: *const u16| super::super::neon::widened(vld1_u16(from)),
    |from: *const u16| vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(from))),
    |sum: &Sum| {
        let four = vaddq_f32(vaddq_f32(sum[0], sum[2]), vaddq_f32(sum[1], sum[3]));
        let two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
        vget_lane_f32::<0>(two) + vget_lane_f32::<1>(two)
    },
);
