//! Attention tiles for AVX-512: 6 queries by 64 tokens.

use std::arch::x86_64::*;

use super::{
    flash_tiles::half_squares,
    flash_walk::{LANES, QUERIES_TOGETHER, TOKENS_MAX, Walk, place},
};

/// Transposes tokens of `dim` elements, a multiple of [`LANES`], in squares of sixteen by sixteen.
///
/// # Safety
///
/// The machine has the instructions of [`Isa::Avx512`](super::isa::Isa::Avx512).
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(super) unsafe fn turn(wide: &[f32], dim: usize, turned: &mut [f32]) {
    let count = wide.len() / dim;
    assert_in_tests!(
        dim.is_multiple_of(LANES) && count <= TOKENS_MAX && turned.len() >= dim * TOKENS_MAX
    );
    for token in (0..count).step_by(LANES) {
        for element in (0..dim).step_by(LANES) {
            let mut rows = [_mm512_setzero_si512(); LANES];
            for (ahead, row) in rows.iter_mut().enumerate().take(count - token) {
                // SAFETY: sixteen elements of an existing token.
                *row = unsafe {
                    _mm512_loadu_si512(wide.as_ptr().add((token + ahead) * dim + element).cast())
                };
            }
            for (ahead, column) in square(rows).into_iter().enumerate() {
                // SAFETY: sixteen of the tokens of an element.
                unsafe {
                    let target = turned.as_mut_ptr().add(place(dim, element + ahead, token));
                    _mm512_storeu_si512(target.cast(), column);
                }
            }
        }
    }
}

/// As [`turn`], for `f16` tokens, which become `f32`.
///
/// # Safety
///
/// The machine has the instructions of [`Isa::Avx512`](super::isa::Isa::Avx512).
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(super) unsafe fn turn_halves(halves: &[u16], dim: usize, turned: &mut [f32]) {
    let count = halves.len() / dim;
    assert_in_tests!(
        dim.is_multiple_of(LANES) && count <= TOKENS_MAX && turned.len() >= dim * TOKENS_MAX
    );
    for token in (0..count).step_by(LANES) {
        for element in (0..dim).step_by(LANES) {
            let mut rows = [_mm256_setzero_si256(); LANES];
            let from = halves.as_ptr().wrapping_add(token * dim + element);
            // SAFETY: sixteen elements of an existing token.
            let load = |ahead: usize| unsafe { _mm256_loadu_si256(from.add(ahead * dim).cast()) };
            if count - token >= LANES {
                rows = std::array::from_fn(load);
            } else {
                for (ahead, row) in rows.iter_mut().enumerate().take(count - token) {
                    *row = load(ahead);
                }
            }
            let ([first, second], []) = rows.as_chunks::<8>() else {
                continue;
            };
            let eights = half_squares(*first).into_iter().zip(half_squares(*second));
            for (ahead, (first, second)) in eights.enumerate() {
                // SAFETY: sixteen of the tokens of an element, and of the eighth one after it.
                unsafe {
                    let target = turned.as_mut_ptr().add(place(dim, element + ahead, token));
                    _mm512_storeu_ps(
                        target,
                        _mm512_cvtph_ps(_mm256_permute2x128_si256::<0x20>(first, second)),
                    );
                    let high = _mm256_permute2x128_si256::<0x31>(first, second);
                    _mm512_storeu_ps(target.add(8 * LANES), _mm512_cvtph_ps(high));
                }
            }
        }
    }
}

/// Sixteen rows of sixteen numbers, transposed.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn square(rows: [__m512i; 16]) -> [__m512i; 16] {
    let zero = _mm512_setzero_si512();
    let (mut pairs, mut quads) = ([zero; 16], [zero; 16]);
    for at in 0..8 {
        pairs[2 * at] = _mm512_unpacklo_epi32(rows[2 * at], rows[2 * at + 1]);
        pairs[2 * at + 1] = _mm512_unpackhi_epi32(rows[2 * at], rows[2 * at + 1]);
    }
    // Quarter q of `quads[4 g + c]` is column 4 q + c of rows 4 g to 4 g + 3.
    for group in 0..4 {
        for high in 0..2 {
            let (first, second) = (pairs[4 * group + high], pairs[4 * group + 2 + high]);
            quads[4 * group + 2 * high] = _mm512_unpacklo_epi64(first, second);
            quads[4 * group + 2 * high + 1] = _mm512_unpackhi_epi64(first, second);
        }
    }
    let mut columns = [zero; 16];
    for column in 0..4 {
        let (a, b) = (quads[column], quads[4 + column]);
        let (c, d) = (quads[8 + column], quads[12 + column]);
        let (low, high) = (
            _mm512_shuffle_i32x4::<0x88>(a, b),
            _mm512_shuffle_i32x4::<0xdd>(a, b),
        );
        let (low2, high2) = (
            _mm512_shuffle_i32x4::<0x88>(c, d),
            _mm512_shuffle_i32x4::<0xdd>(c, d),
        );
        columns[column] = _mm512_shuffle_i32x4::<0x88>(low, low2);
        columns[4 + column] = _mm512_shuffle_i32x4::<0x88>(high, high2);
        columns[8 + column] = _mm512_shuffle_i32x4::<0xdd>(low, low2);
        columns[12 + column] = _mm512_shuffle_i32x4::<0xdd>(high, high2);
    }
    columns
}

/// Products of at most [`QUERIES_TOGETHER`] queries with the first `reach` keys of a transposed block.
///
/// # Safety
///
/// The machine has the instructions of [`Isa::Avx512`](super::isa::Isa::Avx512).
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(super) unsafe fn score(walks: &[Walk<'_>], keys: &[f32], reach: usize, scores: &mut [f32]) {
    let dim = keys.len() / TOKENS_MAX;
    let groups = reach.div_ceil(LANES).min(TOKENS_MAX / LANES);
    assert_in_tests!(
        scores.len() >= walks.len() * TOKENS_MAX
            && walks.iter().all(|walk| walk.query.len() == dim)
    );
    let (mut at, scores) = (0, scores.as_mut_ptr());
    while at < walks.len() {
        // SAFETY: this many queries of `dim` elements each, and as many rows of scores.
        at += unsafe {
            let (walks, scores) = (&walks[at..], scores.add(at * TOKENS_MAX));
            match walks.len() {
                QUERIES_TOGETHER.. => {
                    score_tile::<QUERIES_TOGETHER>(walks, keys, dim, groups, scores)
                }
                4.. => score_tile::<4>(walks, keys, dim, groups, scores),
                2.. => score_tile::<2>(walks, keys, dim, groups, scores),
                _ => score_tile::<1>(walks, keys, dim, groups, scores),
            }
        };
    }
}

/// # Safety
///
/// There are `N` queries of `dim` elements and as many rows of scores, and `keys` are groups of transposed tokens.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn score_tile<const N: usize>(
    walks: &[Walk<'_>],
    keys: &[f32],
    dim: usize,
    groups: usize,
    scores: *mut f32,
) -> usize {
    let mut queries = [std::ptr::null::<f32>(); N];
    for (query, walk) in queries.iter_mut().zip(walks) {
        *query = walk.query.as_ptr();
    }
    // SAFETY: the caller's promise; groups of tokens are consecutive.
    unsafe {
        if groups == 4 {
            score_part::<N, 4>(queries, keys.as_ptr(), dim, scores);
        } else {
            for group in 0..groups {
                let ahead = group * LANES;
                score_part::<N, 1>(
                    queries,
                    keys.as_ptr().add(ahead * dim),
                    dim,
                    scores.add(ahead),
                );
            }
        }
    }
    N
}

/// # Safety
///
/// `queries` have `dim` elements, `keys` are `G` groups of tokens, and `scores` has a row per query.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn score_part<const N: usize, const G: usize>(
    queries: [*const f32; N],
    keys: *const f32,
    dim: usize,
    scores: *mut f32,
) {
    let mut sums = [[_mm512_setzero_ps(); G]; N];
    for element in 0..dim {
        let mut row = [_mm512_setzero_ps(); G];
        for (group, row) in row.iter_mut().enumerate() {
            // SAFETY: a group of the tokens of this element.
            *row = unsafe { _mm512_loadu_ps(keys.wrapping_add((group * dim + element) * LANES)) };
        }
        for (query, sums) in queries.iter().zip(&mut sums) {
            // SAFETY: an element of the query.
            let x = unsafe { _mm512_set1_ps(*query.wrapping_add(element)) };
            for (sum, row) in sums.iter_mut().zip(row) {
                *sum = _mm512_fmadd_ps(row, x, *sum);
            }
        }
    }
    for (number, sums) in sums.into_iter().enumerate() {
        for (group, sum) in sums.into_iter().enumerate() {
            // SAFETY: a row of scores.
            unsafe {
                _mm512_storeu_ps(
                    scores.wrapping_add(number * TOKENS_MAX + group * LANES),
                    sum,
                );
            };
        }
    }
}

/// Adds the weighted values to the sums of at most [`QUERIES_TOGETHER`] queries.
///
/// # Safety
///
/// The machine has the instructions of [`Isa::Avx512`](super::isa::Isa::Avx512).
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(super) unsafe fn weigh<T: Element>(walks: &mut [Walk<'_>], values: &[T], weights: &[f32]) {
    assert_in_tests!(weights.len() >= walks.len() * TOKENS_MAX);
    let mut at = 0;
    while at < walks.len() {
        let weights = &weights[at * TOKENS_MAX..];
        // SAFETY: this many queries, and rows of weights for them.
        at += unsafe {
            let walks = &mut walks[at..];
            match walks.len() {
                QUERIES_TOGETHER.. => weigh_tile::<QUERIES_TOGETHER, T>(walks, values, weights),
                4.. => weigh_tile::<4, T>(walks, values, weights),
                2.. => weigh_tile::<2, T>(walks, values, weights),
                _ => weigh_tile::<1, T>(walks, values, weights),
            }
        };
    }
}

/// # Safety
///
/// There are `N` queries and as many rows of weights; `values` are whole tokens.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn weigh_tile<const N: usize, T: Element>(
    walks: &mut [Walk<'_>],
    values: &[T],
    weights: &[f32],
) -> usize {
    let dim = walks.first().map_or(1, |walk| walk.sum.len());
    let count = values.len() / dim;
    let mut sums = [std::ptr::null_mut::<f32>(); N];
    for (sum, walk) in sums.iter_mut().zip(walks) {
        *sum = walk.sum.as_mut_ptr();
    }
    let mut from = 0;
    while from < dim {
        let left = dim - from;
        let sums = sums.map(|sum| sum.wrapping_add(from));
        let values = values.as_ptr().wrapping_add(from);
        // SAFETY: inside the rows, for a part that begins in them; the mask keeps the last part inside.
        from += unsafe {
            if left >= 4 * LANES {
                weigh_part::<N, 4, T>(sums, values, dim, count, weights.as_ptr(), u16::MAX)
            } else {
                let mask = u16::MAX >> (LANES - left.min(LANES));
                weigh_part::<N, 1, T>(sums, values, dim, count, weights.as_ptr(), mask)
            }
        };
    }
    N
}

/// # Safety
///
/// `sums` and `values` have `G` groups of elements, of which those in `mask` exist; `values` has `count` rows, `dim`
/// apart; `weights` has a row per query.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn weigh_part<const N: usize, const G: usize, T: Element>(
    sums: [*mut f32; N],
    values: *const T,
    dim: usize,
    count: usize,
    weights: *const f32,
    mask: u16,
) -> usize {
    let mut totals = [[_mm512_setzero_ps(); G]; N];
    for (sum, totals) in sums.iter().zip(&mut totals) {
        for (group, total) in totals.iter_mut().enumerate() {
            // SAFETY: the caller's promise.
            *total = unsafe { _mm512_maskz_loadu_ps(mask, sum.wrapping_add(group * LANES)) };
        }
    }
    for token in 0..count {
        let mut row = [_mm512_setzero_ps(); G];
        for (group, row) in row.iter_mut().enumerate() {
            // SAFETY: the caller's promise.
            *row = unsafe { T::load(mask, values.wrapping_add(token * dim + group * LANES)) };
        }
        for (number, totals) in totals.iter_mut().enumerate() {
            // SAFETY: a weight of this query.
            let weight =
                unsafe { _mm512_set1_ps(*weights.wrapping_add(number * TOKENS_MAX + token)) };
            for (total, row) in totals.iter_mut().zip(row) {
                *total = _mm512_fmadd_ps(row, weight, *total);
            }
        }
    }
    for (sum, totals) in sums.iter().zip(totals) {
        for (group, total) in totals.into_iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe { _mm512_mask_storeu_ps(sum.wrapping_add(group * LANES), mask, total) };
        }
    }
    G * LANES
}

/// Element type of values while they are weighted.
pub(super) trait Element: Copy {
    /// # Safety
    ///
    /// The elements of `mask` exist at `from`, and the machine has the instructions of these tiles.
    unsafe fn load(mask: u16, from: *const Self) -> __m512;
}

impl Element for f32 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn load(mask: u16, from: *const Self) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_maskz_loadu_ps(mask, from) }
    }
}

/// Bits of `f16`.
impl Element for u16 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn load(mask: u16, from: *const Self) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, from.cast())) }
    }
}

/// Converts `f16` values to `f32`.
///
/// # Safety
///
/// The machine has the instructions of [`Isa::Avx512`](super::isa::Isa::Avx512).
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(super) unsafe fn widen(halves: &[u16], floats: &mut [f32]) {
    let len = halves.len().min(floats.len());
    let (from, to) = (halves.as_ptr(), floats.as_mut_ptr());
    for at in (0..len / LANES).map(|group| group * LANES) {
        // SAFETY: a group of both.
        unsafe {
            _mm512_storeu_ps(
                to.add(at),
                _mm512_cvtph_ps(_mm256_loadu_si256(from.add(at).cast())),
            );
        };
    }
    let (rest, mask) = (len - len % LANES, !(u16::MAX << (len % LANES)));
    // SAFETY: the remaining elements of both.
    unsafe { _mm512_mask_storeu_ps(to.add(rest), mask, u16::load(mask, from.add(rest))) };
}
