//! Products with rows of `f32`, `f16` and `bf16`, in tiles of some rows by some tokens.
//!
//! Up to four tokens are multiplied with rows in place, some rows at once, while the next rows are prefetched. For more tokens, a
//! part of eight rows is widened once and stays in the first-level cache while the tokens go by. Each product is summed in eight
//! lanes, which are added by halves, so that one token and many, and every set of instructions, yield the same bits as the
//! portable loop. A register of AVX-512 has the lanes of two rows, which are widened next to each other; a token's columns are
//! loaded into both halves.

use std::array::from_fn;

use super::{float, rows::Rows};

/// Lanes of a product's sum.
pub(super) const LANES: usize = 8;

/// How far ahead rows are prefetched, at least: some 100 ns of reading on one core.
const AHEAD: usize = 2048;

/// Bytes of rows that are read side by side, at most, if those after them go into the first-level cache.
const NEAREST_MAX: usize = 8 * 1024;

/// Columns that are widened at once.
const COLUMNS: usize = 512;

/// Rows that are widened at once.
const ROWS: usize = 8;

/// Tokens whose sums are kept meanwhile.
const TOKENS: usize = 128;

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

/// Makes the module of a set: its features; its register of at most eight lanes, how many of these make eight, and what it
/// does with them; its register for many tokens, the rows that this one has lanes of, such registers and tokens of a tile, and
/// what it does with these.
macro_rules! products {
    (
        $set:ident, $arch:ident, $features:literal,
        ($narrow:ty, $parts:expr),
        ($zero:expr, $load:expr, $store:expr, $fma:expr, $half:expr, $brain:expr, $sum:expr, $ask:expr),
        ($wide:ty, $together:expr, $rows:expr, $tokens:expr),
        ($zeros:expr, $aligned:expr, $all:expr, $fmas:expr, $split:expr) $(,)?
    ) => {
        pub(super) mod $set {
            use std::{arch::$arch::*, array::from_fn, mem::MaybeUninit};

            use crate::engine::backend::cpu::floats::{
                AHEAD, Aligned, BF16, COLUMNS, F16, LANES, NEAREST_MAX, ROWS, TOKENS, bytes_of, element, rest, token,
            };
            use crate::engine::backend::cpu::rows::Rows;

            /// Registers of the lanes of a row.
            const PARTS: usize = $parts;
            /// Columns of a row in a register.
            const WIDTH: usize = LANES / PARTS;
            /// Rows that a register for many tokens has lanes of.
            const TOGETHER: usize = $together;
            /// Such registers of the rows that are widened at once.
            const GROUPS: usize = ROWS / TOGETHER;

            type Sum = [$wide; PARTS];

            /// Rows of type `KIND`.
            ///
            /// # Safety
            ///
            /// The machine has the set; `rows` is as its fields say.
            #[target_feature(enable = $features)]
            pub(crate) unsafe fn rows<const KIND: u8>(rows: &Rows<'_>) {
                // SAFETY: the caller's promise.
                unsafe {
                    match rows.tokens {
                        1 => few::<KIND, 1, 2>(rows),
                        2 => few::<KIND, 2, 4>(rows),
                        3 => few::<KIND, 3, 4>(rows),
                        4 => few::<KIND, 4, 3>(rows),
                        _ => many::<KIND>(rows),
                    }
                }
            }

            /// Rows of type `KIND` times all `N` tokens, `R` rows at once, as they lie.
            ///
            /// # Safety
            ///
            /// As for `rows`.
            #[target_feature(enable = $features)]
            unsafe fn few<const KIND: u8, const N: usize, const R: usize>(rows: &Rows<'_>) {
                let (count, width) = (rows.weights.len() / rows.row_bytes.max(1), rows.columns);
                let tokens: [_; N] = from_fn(|at| token::<KIND>(rows, at));
                // The machine's own prefetch does not see rows side by side as the one stream that they are together: those after
                // them are prefetched in the order in which they lie, long ones into the second-level cache.
                let long = R * rows.row_bytes > NEAREST_MAX;
                let distance = if long { R * rows.row_bytes } else { (R - 1) * rows.row_bytes + AHEAD };
                for first in (0..count).step_by(R) {
                    let weights: [_; R] =
                        from_fn(|at| rows.weights[(first + at).min(count - 1) * rows.row_bytes..].as_ptr());
                    let ahead = weights[0].wrapping_add(distance);
                    // SAFETY: all columns of each row and each token.
                    let sums = unsafe { products::<KIND, N, R>(weights, tokens, width, (ahead, long)) };
                    for (token, sums) in sums.iter().enumerate() {
                        for (row, sum) in sums.iter().enumerate().take(count - first) {
                            rows.put(token, first + row, *sum);
                        }
                    }
                }
            }

            /// The products of `R` rows of type `KIND` with `N` tokens; prefetches from a place on, into the first or second level.
            ///
            /// # Safety
            ///
            /// There are `width` columns of each row and each token.
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn products<const KIND: u8, const N: usize, const R: usize>(
                weights: [*const u8; R],
                tokens: [*const f32; N],
                width: usize,
                (mut ahead, long): (*const u8, bool),
            ) -> [[f32; R]; N] {
                let mut sums = [[[$zero; PARTS]; R]; N];
                let whole = width - width % LANES;
                let line = const { 64 / bytes_of(KIND) };
                let mut column = 0;
                while column + line <= whole {
                    for number in 0..R {
                        $ask(ahead.wrapping_add(64 * number), long);
                    }
                    ahead = ahead.wrapping_add(64 * R);
                    for ahead in (0..line).step_by(LANES) {
                        // SAFETY: columns that each row and each token has.
                        unsafe { add::<KIND, N, R>(weights, tokens, column + ahead, &mut sums) };
                    }
                    column += line;
                }
                while column < whole {
                    // SAFETY: as above.
                    unsafe { add::<KIND, N, R>(weights, tokens, column, &mut sums) };
                    column += LANES;
                }
                if whole < width {
                    for at in 0..R {
                        // SAFETY: columns of a row.
                        let xs = rest(width - whole, |column| unsafe { element::<KIND>(weights[at], whole + column) });
                        for ahead in 0..N {
                            // SAFETY: columns of a token.
                            let ys = rest(width - whole, |column| unsafe { *tokens[ahead].add(whole + column) });
                            for part in 0..PARTS {
                                // SAFETY: a register of the lanes.
                                let (x, y) = unsafe {
                                    ($load(xs.as_ptr().add(part * WIDTH)), $load(ys.as_ptr().add(part * WIDTH)))
                                };
                                sums[ahead][at][part] = $fma(sums[ahead][at][part], x, y);
                            }
                        }
                    }
                }
                sums.map(|sums| sums.map(|sum| $sum(&sum)))
            }

            /// Adds the products of eight columns.
            ///
            /// # Safety
            ///
            /// Each row and each token has these columns.
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn add<const KIND: u8, const N: usize, const R: usize>(
                weights: [*const u8; R],
                tokens: [*const f32; N],
                column: usize,
                sums: &mut [[[$narrow; PARTS]; R]; N],
            ) {
                for part in 0..PARTS {
                    let place = column + part * WIDTH;
                    let mut ys = [$zero; N];
                    for ahead in 0..N {
                        // SAFETY: a register of columns.
                        ys[ahead] = unsafe { $load(tokens[ahead].add(place)) };
                    }
                    for at in 0..R {
                        // SAFETY: as above.
                        let x = unsafe { register::<KIND>(weights[at], place) };
                        for ahead in 0..N {
                            sums[ahead][at][part] = $fma(sums[ahead][at][part], x, ys[ahead]);
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
                // They are set where they are used: most calls are for few rows or tokens.
                let (mut weights, mut sums) =
                    (MaybeUninit::<Aligned>::uninit(), MaybeUninit::<[[Sum; GROUPS]; TOKENS]>::uninit());
                // SAFETY: a field of a value that is there.
                let wide: *mut f32 = unsafe { &raw mut (*weights.as_mut_ptr()).0 }.cast();
                let (count, all) = (rows.weights.len() / rows.row_bytes.max(1), rows.columns);
                let lines = COLUMNS.min(all) * bytes_of(KIND) / 64;
                for (from, first) in (0..rows.tokens)
                    .step_by(TOKENS)
                    .flat_map(|from| (0..count).step_by(ROWS).map(move |first| (from, first)))
                {
                    let (here, together) = (TOKENS.min(rows.tokens - from), ROWS.min(count - first));
                    let groups = together.div_ceil(TOGETHER);
                    if together < ROWS {
                        weights.write(Aligned([0.0; ROWS * COLUMNS]));
                    }
                    // SAFETY: sums of that many tokens, which are zeros then.
                    let sums = unsafe {
                        let start: *mut [Sum; GROUPS] = sums.as_mut_ptr().cast();
                        start.write_bytes(0, here);
                        std::slice::from_raw_parts_mut(start, here)
                    };
                    for start in (0..all).step_by(COLUMNS) {
                        let width = COLUMNS.min(all - start);
                        for row in 0..together {
                            let group = row / TOGETHER * TOGETHER;
                            let to = group * COLUMNS + (row - group) * LANES;
                            let row = rows.weights[(first + row) * rows.row_bytes..].as_ptr();
                            // SAFETY: so many columns of a row.
                            unsafe { widen::<KIND>(row, start..start + width, wide.add(to)) };
                        }
                        // The part that is widened next is prefetched meanwhile: it lies in short pieces.
                        let next = if start + COLUMNS < all { (first, start + COLUMNS) } else { (first + ROWS, 0) };
                        let (mut asked, mut at) = (0, 0);
                        while at < here {
                            let step = if here - at < $tokens { 3.min(here - at) } else { $tokens };
                            while asked < ROWS * lines * (at + step) / here {
                                let (row, line) =
                                    (next.0 + asked / lines, next.1 * bytes_of(KIND) + asked % lines * 64);
                                $ask(rows.weights.as_ptr().wrapping_add(row * rows.row_bytes + line), true);
                                asked += 1;
                            }
                            let place = |ahead: usize| token::<KIND>(rows, from + at + ahead).wrapping_add(start);
                            for group in (0..groups).step_by($rows) {
                                let weights = wide.wrapping_add(group * TOGETHER * COLUMNS);
                                // SAFETY: so many columns of each row and each token.
                                unsafe {
                                    match step {
                                        1 => tile::<1>(weights, from_fn(place), width, &mut sums[at..], group),
                                        2 => tile::<2>(weights, from_fn(place), width, &mut sums[at..], group),
                                        3 => tile::<3>(weights, from_fn(place), width, &mut sums[at..], group),
                                        _ => tile::<$tokens>(weights, from_fn(place), width, &mut sums[at..], group),
                                    }
                                }
                            }
                            at += step;
                        }
                    }
                    for (token, sums) in sums.iter().enumerate() {
                        for (group, sum) in sums.iter().enumerate().take(groups) {
                            let row = group * TOGETHER;
                            for (at, lanes) in $split(sum).iter().enumerate().take(together - row) {
                                rows.put(from + token, first + row + at, $sum(lanes));
                            }
                        }
                    }
                }
            }

            /// Adds the products of the rows from the register `group` on, widened, with `N` tokens, to their sums.
            ///
            /// # Safety
            ///
            /// There are `width` columns of each token, and of each row as many, and zeros to a whole eight.
            #[target_feature(enable = $features)]
            unsafe fn tile<const N: usize>(
                weights: *const f32,
                tokens: [*const f32; N],
                width: usize,
                sums: &mut [[Sum; GROUPS]],
                group: usize,
            ) {
                // By index: arrays made by functions were written to memory and copied.
                let mut running = [[[$zeros; PARTS]; $rows]; N];
                for ahead in 0..N {
                    for at in 0..$rows {
                        running[ahead][at] = sums[ahead][group + at];
                    }
                }
                let whole = width - width % LANES;
                for column in (0..whole).step_by(LANES) {
                    for part in 0..PARTS {
                        // SAFETY: a register of the columns that each row and each token has.
                        unsafe {
                            let mut ys = [$zeros; N];
                            for ahead in 0..N {
                                ys[ahead] = $all(tokens[ahead].add(column + part * WIDTH));
                            }
                            for at in 0..$rows {
                                let x = $aligned(weights.add((at * COLUMNS + column) * TOGETHER + part * WIDTH));
                                for ahead in 0..N {
                                    running[ahead][at][part] = $fmas(running[ahead][at][part], x, ys[ahead]);
                                }
                            }
                        }
                    }
                }
                for ahead in 0..N {
                    if whole == width {
                        break;
                    }
                    // SAFETY: columns of a token.
                    let ys = rest(width - whole, |column| unsafe { *tokens[ahead].add(whole + column) });
                    for at in 0..$rows {
                        for part in 0..PARTS {
                            // SAFETY: a register of the lanes, and of the row.
                            running[ahead][at][part] = unsafe {
                                let x = $aligned(weights.add((at * COLUMNS + whole) * TOGETHER + part * WIDTH));
                                $fmas(running[ahead][at][part], x, $all(ys.as_ptr().add(part * WIDTH)))
                            };
                        }
                    }
                }
                for ahead in 0..N {
                    for at in 0..$rows {
                        sums[ahead][group + at] = running[ahead][at];
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
            unsafe fn register<const KIND: u8>(from: *const u8, column: usize) -> $narrow {
                // SAFETY: the caller's promise.
                unsafe {
                    match KIND {
                        F16 => $half(from.cast::<u16>().add(column)),
                        BF16 => $brain(from.cast::<u16>().add(column)),
                        _ => $load(from.cast::<f32>().add(column)),
                    }
                }
            }

            /// `columns` of a row to every [`TOGETHER`]th eight from `to` on; behind the last one zeros, to a whole eight.
            ///
            /// # Safety
            ///
            /// There are these columns at `from`, and place for them at `to`.
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn widen<const KIND: u8>(from: *const u8, columns: std::ops::Range<usize>, to: *mut f32) {
                for column in columns.clone().step_by(LANES) {
                    // SAFETY: a register of columns, and the place of eight.
                    unsafe {
                        let to = to.add((column - columns.start) * TOGETHER);
                        if column + LANES <= columns.end {
                            for part in 0..PARTS {
                                $store(to.add(part * WIDTH), register::<KIND>(from, column + part * WIDTH));
                            }
                        } else {
                            to.cast::<[f32; LANES]>()
                                .write(rest(columns.end - column, |at| element::<KIND>(from, column + at)));
                        }
                    }
                }
            }
        }
    };
}

/// The columns of a token that rows of type `KIND` are multiplied with.
fn token<const KIND: u8>(rows: &Rows<'_>, token: usize) -> *const f32 {
    match KIND {
        F32 => rows.floats[token * rows.columns..].as_ptr(),
        _ => rows.copy(token).cast(),
    }
}

/// The last `count` columns, fewer than eight, and zeros behind them.
fn rest(count: usize, column: impl Fn(usize) -> f32) -> [f32; LANES] {
    from_fn(|at| if at < count { column(at) } else { 0.0 })
}

/// Widened rows, so that no register of them lies in two lines of the cache.
#[repr(align(64))]
struct Aligned([f32; ROWS * COLUMNS]);

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
    (__m256, 1),
    (
        _mm256_setzero_ps(),
        |from: *const f32| _mm256_loadu_ps(from),
        |to: *mut f32, value| _mm256_storeu_ps(to, value),
        |sum, x, y| _mm256_fmadd_ps(x, y, sum),
        |from: *const u16| _mm256_cvtph_ps(_mm_loadu_si128(from.cast())),
        |from: *const u16| {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        },
        |sum: &[__m256; 1]| crate::engine::backend::cpu::rows256::total(sum[0]),
        |line: *const u8, far: bool| if far {
            _mm_prefetch::<_MM_HINT_T1>(line.cast());
        } else {
            _mm_prefetch::<_MM_HINT_T0>(line.cast());
        }
    ),
    (__m256, 1, 4, 3),
    (
        _mm256_setzero_ps(),
        |from: *const f32| _mm256_load_ps(from),
        |from: *const f32| _mm256_loadu_ps(from),
        |sum, x, y| _mm256_fmadd_ps(x, y, sum),
        |sum: &Sum| [*sum]
    ),
);

#[cfg(target_arch = "x86_64")]
products!(
    avx512,
    x86_64,
    "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c",
    (__m256, 1),
    (
        _mm256_setzero_ps(),
        |from: *const f32| _mm256_loadu_ps(from),
        |to: *mut f32, value| _mm256_storeu_ps(to, value),
        |sum, x, y| _mm256_fmadd_ps(x, y, sum),
        |from: *const u16| _mm256_cvtph_ps(_mm_loadu_si128(from.cast())),
        |from: *const u16| {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        },
        |sum: &[__m256; 1]| crate::engine::backend::cpu::rows256::total(sum[0]),
        |line: *const u8, far: bool| if far {
            _mm_prefetch::<_MM_HINT_T1>(line.cast());
        } else {
            _mm_prefetch::<_MM_HINT_T0>(line.cast());
        }
    ),
    (__m512, 2, 4, 6),
    (
        _mm512_setzero_ps(),
        |from: *const f32| _mm512_load_ps(from),
        |from: *const f32| _mm512_broadcast_f32x8(_mm256_loadu_ps(from)),
        |sum, x, y| _mm512_fmadd_ps(x, y, sum),
        |sum: &Sum| [[_mm512_castps512_ps256(sum[0])], [_mm512_extractf32x8_ps::<1>(sum[0])]]
    ),
);

#[cfg(target_arch = "aarch64")]
products!(
    neon,
    aarch64,
    "neon",
    (float32x4_t, 2),
    (
        vdupq_n_f32(0.0),
        |from: *const f32| vld1q_f32(from),
        |to: *mut f32, value| vst1q_f32(to, value),
        |sum, x, y| vfmaq_f32(sum, x, y),
        |from: *const u16| crate::engine::backend::cpu::neon_unpack::widened(vld1_u16(from)),
        |from: *const u16| vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(from))),
        |sum: &[float32x4_t; 2]| {
            let four = vaddq_f32(sum[0], sum[1]);
            let two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
            vget_lane_f32::<0>(two) + vget_lane_f32::<1>(two)
        },
        |_line: *const u8, _far: bool| ()
    ),
    (float32x4_t, 1, 4, 3),
    (
        vdupq_n_f32(0.0),
        |from: *const f32| vld1q_f32(from),
        |from: *const f32| vld1q_f32(from),
        |sum, x, y| vfmaq_f32(sum, x, y),
        |sum: &Sum| [*sum]
    ),
);
