//! Products with rows of `f32`, `f16` and `bf16`, in tiles of some rows by some tokens.
//!
//! One or two tokens meet rows as they lie; the next rows are asked for meanwhile. For more, a part of some rows is widened
//! once and stays in the first-level cache while the tokens go by. Each product is summed in sixteen lanes, which are added
//! by halves, so that one token and many, and every set of instructions, yield the same bits as the portable loop.

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
pub(super) fn dot<T: Copy>(weight: &[T], input: &[f32], widen: impl Fn(T) -> f32) -> f32 {
    let mut sums = [0f32; LANES];
    let (mut left, mut right) = (weight.chunks_exact(LANES), input.chunks_exact(LANES));
    for (x, y) in (&mut left).zip(&mut right) {
        for lane in 0..LANES {
            sums[lane] = widen(x[lane]).mul_add(y[lane], sums[lane]);
        }
    }
    for (lane, (x, y)) in left.remainder().iter().zip(right.remainder()).enumerate() {
        sums[lane] = widen(*x).mul_add(*y, sums[lane]);
    }
    float::sum(&mut sums)
}

/// Makes the module of a set: its features, its register of so many numbers, the rows and tokens of a tile, the rows beside
/// two tokens, and what it does with registers.
macro_rules! products {
    (
        $set:ident, $arch:ident, $features:literal, $register:ty, $width:expr, $rows:expr, $tokens:expr, $beside:expr,
        $zero:expr, $load:expr, $store:expr, $fma:expr, $half:expr, $brain:expr, $sum:expr, $ask:expr $(,)?
    ) => {
        pub(super) mod $set {
            use std::{arch::$arch::*, array::from_fn};

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
                // SAFETY: the caller's promise.
                unsafe {
                    match rows.tokens {
                        1 => few::<KIND, 1, 4>(rows),
                        2 => few::<KIND, 2, $beside>(rows),
                        _ => many::<KIND>(rows),
                    }
                }
            }

            /// The columns of a token that rows of type `KIND` are multiplied with.
            fn token<const KIND: u8>(rows: &Rows<'_>, token: usize) -> *const f32 {
                match KIND {
                    F32 => rows.floats[token * rows.columns..].as_ptr(),
                    _ => rows.copy(token).cast(),
                }
            }

            /// Rows of type `KIND` times all `N` tokens, `R` rows at once, as they lie.
            ///
            /// # Safety
            ///
            /// As for `rows`.
            #[target_feature(enable = $features)]
            unsafe fn few<const KIND: u8, const N: usize, const R: usize>(rows: &Rows<'_>) {
                let (count, all) = (rows.weights.len() / rows.row_bytes.max(1), rows.columns);
                let inputs: [_; N] = from_fn(|at| token::<KIND>(rows, at));
                for first in (0..count).step_by(R) {
                    let weights: [_; R] =
                        from_fn(|at| rows.weights[(first + at).min(count - 1) * rows.row_bytes..].as_ptr());
                    let mut sums = [[[$zero; PARTS]; R]; N];
                    // SAFETY: all columns of each row and each token.
                    unsafe { add::<KIND, N, R, true>(weights, inputs, all, &mut sums) };
                    for (token, sums) in sums.iter().enumerate() {
                        for (row, sum) in sums.iter().enumerate().take(count - first) {
                            rows.put(token, first + row, $sum(sum));
                        }
                    }
                }
            }

            /// Rows of type `KIND` times any number of tokens.
            ///
            /// # Safety
            ///
            /// As for `rows`.
            #[target_feature(enable = $features)]
            unsafe fn many<const KIND: u8>(rows: &Rows<'_>) {
                let mut weights = super::Aligned([[0f32; COLUMNS]; ROWS]);
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
                        for (row, to) in weights.0.iter_mut().enumerate().take(together) {
                            let row = rows.weights[(first + row) * rows.row_bytes..].as_ptr();
                            // SAFETY: columns of a row.
                            unsafe { widen::<KIND>(row, start, &mut to[..width]) };
                        }
                        for token in (0..here).step_by($tokens) {
                            let step = $tokens.min(here - token);
                            let at = |ahead: usize| self::token::<KIND>(rows, from + token + ahead).wrapping_add(start);
                            for row in (0..together).step_by($rows) {
                                let wide = from_fn(|ahead| weights.0[(row + ahead) % ROWS].as_ptr());
                                // SAFETY: so many columns of each row and each token.
                                unsafe {
                                    if step == $tokens {
                                        tile::<$tokens>(wide, from_fn(at), width, &mut sums[token..], row);
                                        continue;
                                    }
                                    for ahead in 0..step {
                                        tile::<1>(wide, [at(ahead)], width, &mut sums[token + ahead..], row);
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

            /// Adds the products of the rows from `row`, widened, with `N` tokens, to their sums.
            ///
            /// # Safety
            ///
            /// There are `width` columns of each row and each token.
            #[target_feature(enable = $features)]
            unsafe fn tile<const N: usize>(
                weights: [*const f32; $rows],
                tokens: [*const f32; N],
                width: usize,
                sums: &mut [[Sum; ROWS]],
                row: usize,
            ) {
                let mut running: [[Sum; $rows]; N] = from_fn(|ahead| from_fn(|at| sums[ahead][row + at]));
                // SAFETY: the caller's promise.
                unsafe {
                    add::<F32, N, $rows, false>(weights.map(<*const f32>::cast), tokens, width, &mut running);
                }
                for ahead in 0..N {
                    for at in 0..$rows {
                        sums[ahead][row + at] = running[ahead][at];
                    }
                }
            }

            /// Adds the products of `R` rows of type `KIND` with `N` tokens to `sums`; with `ASK` it asks for the rows after them.
            ///
            /// # Safety
            ///
            /// There are `width` columns of each row and each token.
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn add<const KIND: u8, const N: usize, const R: usize, const ASK: bool>(
                weights: [*const u8; R],
                tokens: [*const f32; N],
                width: usize,
                sums: &mut [[Sum; R]; N],
            ) {
                let mut running = *sums;
                let whole = width - width % LANES;
                for column in (0..whole).step_by(LANES) {
                    if ASK {
                        let bytes = column * super::bytes_of(KIND);
                        for row in weights {
                            $ask(row.wrapping_add(bytes + R * width * super::bytes_of(KIND)));
                        }
                    }
                    for part in 0..PARTS {
                        let place = column + part * $width;
                        // SAFETY: a register of the columns that each row and each token has.
                        unsafe {
                            let ys: [_; N] = from_fn(|ahead| $load(tokens[ahead].add(place)));
                            for at in 0..R {
                                let x = register::<KIND>(weights[at], place);
                                for ahead in 0..N {
                                    running[ahead][at][part] = $fma(running[ahead][at][part], x, ys[ahead]);
                                }
                            }
                        }
                    }
                }
                if whole < width {
                    let rest = |column: &dyn Fn(usize) -> f32| {
                        let mut lanes = [0f32; LANES];
                        for (ahead, lane) in lanes.iter_mut().enumerate().take(width - whole) {
                            *lane = column(whole + ahead);
                        }
                        lanes
                    };
                    for at in 0..R {
                        // SAFETY: a column of a row.
                        let x = rest(&|column| unsafe { element::<KIND>(weights[at], column) });
                        for ahead in 0..N {
                            // SAFETY: a column of a token.
                            let y = rest(&|column| unsafe { *tokens[ahead].add(column) });
                            for part in 0..PARTS {
                                // SAFETY: a register of the lanes.
                                running[ahead][at][part] = unsafe {
                                    let (x, y) = (x.as_ptr().add(part * $width), y.as_ptr().add(part * $width));
                                    $fma(running[ahead][at][part], $load(x), $load(y))
                                };
                            }
                        }
                    }
                }
                *sums = running;
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

            /// Columns from `start` of what lies at `from`, as many as `to` takes.
            ///
            /// # Safety
            ///
            /// There are so many columns.
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn widen<const KIND: u8>(from: *const u8, start: usize, to: &mut [f32]) {
                let whole = to.len() - to.len() % $width;
                for at in (0..whole).step_by($width) {
                    // SAFETY: a register of columns.
                    unsafe { $store(to.as_mut_ptr().add(at), register::<KIND>(from, start + at)) };
                }
                for (at, to) in to.iter_mut().enumerate().skip(whole) {
                    // SAFETY: a column.
                    *to = unsafe { element::<KIND>(from, start + at) };
                }
            }
        }
    };
}

/// Widened rows, so that no register of them lies in two lines of the cache.
#[repr(align(64))]
struct Aligned([[f32; COLUMNS]; ROWS]);

/// Bytes of one number.
const fn bytes_of(kind: u8) -> usize {
    if kind == F32 { 4 } else { 2 }
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
    2,
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
    |row: *const u8| _mm_prefetch::<_MM_HINT_T0>(row.cast()),
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
    |row: *const u8| _mm_prefetch::<_MM_HINT_T0>(row.cast()),
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
    2,
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
    |_row: *const u8| (),
);
