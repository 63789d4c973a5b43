//! Attention tiles for AVX2 and NEON: 6 queries by 16 tokens.
//!
//! Both are one source, for registers of eight and of four numbers: 12 of 16, or 24 of 32 of them are sums.

#[cfg(target_arch = "aarch64")]
use std::arch::aarch64::*;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use super::{
    flash_walk::{LANES, QUERIES_TOGETHER, TOKENS_MAX, Walk},
    float::half_to_float,
};

#[cfg(target_arch = "aarch64")]
type Native = float32x4_t;
#[cfg(target_arch = "x86_64")]
type Native = __m256;

/// Numbers of a register.
const WIDTH: usize = size_of::<Native>() / size_of::<f32>();

/// Registers of a group of tokens or elements.
const PARTS: usize = LANES / WIDTH;

/// A group of tokens or elements.
type Group = [Native; PARTS];

/// Turns tokens of `dim` elements, a multiple of [`LANES`], in squares of a register's width; the tokens that are not there, up
/// to a multiple of [`LANES`], become zero.
///
/// # Safety
///
/// The machine has the instructions that these tiles are compiled for.
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
pub(super) unsafe fn turn(wide: &[f32], dim: usize, turned: &mut [f32]) {
    let count = wide.len() / dim;
    assert_in_tests!(dim.is_multiple_of(LANES) && count <= TOKENS_MAX && turned.len() >= dim * TOKENS_MAX);
    for token in (0..count.next_multiple_of(LANES)).step_by(WIDTH) {
        for element in (0..dim).step_by(WIDTH) {
            let mut rows = [zero(); WIDTH];
            for (ahead, row) in rows.iter_mut().enumerate().take(count.saturating_sub(token)) {
                // SAFETY: elements of a token that is there.
                *row = unsafe { load(wide.as_ptr().add((token + ahead) * dim + element)) };
            }
            for (ahead, column) in square(rows).into_iter().enumerate() {
                // SAFETY: some of the tokens of an element.
                unsafe { store(turned.as_mut_ptr().add((element + ahead) * TOKENS_MAX + token), column) };
            }
        }
    }
}

/// The `f32` that halves stand for.
///
/// # Safety
///
/// The machine has the instructions that these tiles are compiled for.
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
pub(super) unsafe fn widen(halves: &[u16], floats: &mut [f32]) {
    let (groups, rest) = halves.as_chunks::<WIDTH>();
    for (halves, floats) in groups.iter().zip(floats.as_chunks_mut::<WIDTH>().0) {
        // SAFETY: a register of numbers.
        unsafe { store(floats.as_mut_ptr(), load_halves(halves.as_ptr())) };
    }
    for (half, float) in rest.iter().zip(floats.iter_mut().skip(groups.len() * WIDTH)) {
        *float = half_to_float(*half);
    }
}

/// Calls a tile function with as many queries as there are left, at most [`QUERIES_TOGETHER`], until none is.
macro_rules! for_queries {
    ($count:expr, |$at:ident| $function:ident($($argument:expr),* $(,)?)) => {{
        let mut $at = 0;
        while $at < $count {
            match $count - $at {
                QUERIES_TOGETHER.. => {
                    $function::<QUERIES_TOGETHER>($($argument),*);
                    $at += QUERIES_TOGETHER;
                }
                4.. => {
                    $function::<4>($($argument),*);
                    $at += 4;
                }
                2.. => {
                    $function::<2>($($argument),*);
                    $at += 2;
                }
                _ => {
                    $function::<1>($($argument),*);
                    $at += 1;
                }
            }
        }
    }};
}

/// Products of some queries with the first `reach` keys of a turned block.
///
/// # Safety
///
/// The machine has the instructions that these tiles are compiled for.
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
pub(super) unsafe fn score(walks: &[Walk<'_>], keys: &[f32], reach: usize, scores: &mut [f32]) {
    let dim = keys.len() / TOKENS_MAX;
    let groups = reach.div_ceil(LANES).min(TOKENS_MAX / LANES);
    assert_in_tests!(scores.len() >= walks.len() * TOKENS_MAX && walks.iter().all(|walk| walk.query.len() == dim));
    for first in (0..groups).map(|group| group * LANES) {
        // SAFETY: as many queries as said, each of `dim` elements, and as many rows of scores; a group of tokens is there.
        unsafe {
            let (keys, scores) = (keys.as_ptr().add(first), scores.as_mut_ptr().add(first));
            for_queries!(walks.len(), |at| score_tile(&walks[at..], keys, dim, scores.add(at * TOKENS_MAX)));
        }
    }
}

/// # Safety
///
/// There are `N` queries of `dim` elements and as many rows of scores, and `keys` are `dim` rows of at least a group of tokens.
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
unsafe fn score_tile<const N: usize>(walks: &[Walk<'_>], keys: *const f32, dim: usize, scores: *mut f32) {
    let mut queries = [std::ptr::null::<f32>(); N];
    for (query, walk) in queries.iter_mut().zip(walks) {
        *query = walk.query.as_ptr();
    }
    let mut sums = [[zero(); PARTS]; N];
    for element in 0..dim {
        // SAFETY: a group of the tokens of this element, and an element of each query.
        unsafe {
            let row = load_group(keys.add(element * TOKENS_MAX));
            for (query, sums) in queries.iter().zip(&mut sums) {
                add_products(sums, &row, *query.add(element));
            }
        }
    }
    for (number, sums) in sums.iter().enumerate() {
        // SAFETY: a row of scores.
        unsafe { store_group(scores.add(number * TOKENS_MAX), sums) };
    }
}

/// Adds the weighted values, whose elements are a multiple of [`LANES`], to the sums of some queries.
///
/// # Safety
///
/// The machine has the instructions that these tiles are compiled for.
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
pub(super) unsafe fn weigh(walks: &mut [Walk<'_>], values: &[f32], weights: &[f32]) {
    let dim = walks.first().map_or(LANES, |walk| walk.sum.len());
    assert_in_tests!(dim.is_multiple_of(LANES) && weights.len() >= walks.len() * TOKENS_MAX);
    for from in (0..dim).step_by(LANES) {
        let values = (values.as_ptr().wrapping_add(from), values.len() / dim);
        // SAFETY: as many queries as said, and rows of weights for them; a group of elements is there.
        unsafe {
            for_queries!(walks.len(), |at| weigh_tile(
                &mut walks[at..],
                values,
                dim,
                from,
                weights.as_ptr().add(at * TOKENS_MAX),
            ));
        }
    }
}

/// # Safety
///
/// There are `N` queries, with a group of elements from `from`, and as many rows of weights; `values` are so many groups,
/// `dim` apart.
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
unsafe fn weigh_tile<const N: usize>(
    walks: &mut [Walk<'_>],
    (values, count): (*const f32, usize),
    dim: usize,
    from: usize,
    weights: *const f32,
) {
    let mut totals = [[zero(); PARTS]; N];
    for (walk, totals) in walks.iter().zip(&mut totals) {
        // SAFETY: the caller's promise.
        *totals = unsafe { load_group(walk.sum.as_ptr().add(from)) };
    }
    for token in 0..count {
        // SAFETY: a group of a token, and its weight for each query.
        unsafe {
            let row = load_group(values.add(token * dim));
            for (number, totals) in totals.iter_mut().enumerate() {
                add_products(totals, &row, *weights.add(number * TOKENS_MAX + token));
            }
        }
    }
    for (walk, totals) in walks.iter_mut().zip(&totals) {
        // SAFETY: the caller's promise.
        unsafe { store_group(walk.sum.as_mut_ptr().add(from), totals) };
    }
}

/// # Safety
///
/// There is a group at `from`.
#[inline]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
unsafe fn load_group(from: *const f32) -> Group {
    let mut group = [zero(); PARTS];
    for (part, register) in group.iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        *register = unsafe { load(from.add(part * WIDTH)) };
    }
    group
}

/// # Safety
///
/// There is room for a group at `to`.
#[inline]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
unsafe fn store_group(to: *mut f32, group: &Group) {
    for (part, register) in group.iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe { store(to.add(part * WIDTH), *register) };
    }
}

/// `sums += row · x`, in one rounding.
#[inline]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
fn add_products(sums: &mut Group, row: &Group, x: f32) {
    for (sum, row) in sums.iter_mut().zip(row) {
        #[cfg(target_arch = "aarch64")]
        {
            *sum = vfmaq_n_f32(*sum, *row, x);
        }
        #[cfg(target_arch = "x86_64")]
        {
            *sum = _mm256_fmadd_ps(*row, _mm256_set1_ps(x), *sum);
        }
    }
}

#[inline]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
fn zero() -> Native {
    #[cfg(target_arch = "aarch64")]
    {
        vdupq_n_f32(0.0)
    }
    #[cfg(target_arch = "x86_64")]
    {
        _mm256_setzero_ps()
    }
}

/// # Safety
///
/// There are as many numbers at `from` as a register has.
#[inline]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
unsafe fn load(from: *const f32) -> Native {
    // SAFETY: the caller's promise.
    unsafe {
        #[cfg(target_arch = "aarch64")]
        {
            vld1q_f32(from)
        }
        #[cfg(target_arch = "x86_64")]
        {
            _mm256_loadu_ps(from)
        }
    }
}

/// # Safety
///
/// There are as many halves at `from` as a register has numbers.
#[inline]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
unsafe fn load_halves(from: *const u16) -> Native {
    // SAFETY: the caller's promise.
    unsafe {
        #[cfg(target_arch = "aarch64")]
        {
            super::neon_unpack::widened(vld1_u16(from))
        }
        #[cfg(target_arch = "x86_64")]
        {
            _mm256_cvtph_ps(_mm_loadu_si128(from.cast()))
        }
    }
}

/// # Safety
///
/// There is room for a register at `to`.
#[inline]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
unsafe fn store(to: *mut f32, register: Native) {
    // SAFETY: the caller's promise.
    unsafe {
        #[cfg(target_arch = "aarch64")]
        vst1q_f32(to, register);
        #[cfg(target_arch = "x86_64")]
        _mm256_storeu_ps(to, register);
    }
}

/// Four rows of four numbers, turned.
#[cfg(target_arch = "aarch64")]
#[inline]
#[target_feature(enable = "neon")]
fn square([a, b, c, d]: [Native; WIDTH]) -> [Native; WIDTH] {
    let wide = |of| vreinterpretq_f64_f32(of);
    let (even, odd) = (wide(vtrn1q_f32(a, b)), wide(vtrn2q_f32(a, b)));
    let (even2, odd2) = (wide(vtrn1q_f32(c, d)), wide(vtrn2q_f32(c, d)));
    [
        vreinterpretq_f32_f64(vtrn1q_f64(even, even2)),
        vreinterpretq_f32_f64(vtrn1q_f64(odd, odd2)),
        vreinterpretq_f32_f64(vtrn2q_f64(even, even2)),
        vreinterpretq_f32_f64(vtrn2q_f64(odd, odd2)),
    ]
}

/// Eight rows of eight numbers, turned.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn square(rows: [Native; WIDTH]) -> [Native; WIDTH] {
    let (mut quads, mut columns) = ([zero(); WIDTH], [zero(); WIDTH]);
    for half in 0..2 {
        let at = 4 * half;
        let (low, high) = (_mm256_unpacklo_ps(rows[at], rows[at + 1]), _mm256_unpackhi_ps(rows[at], rows[at + 1]));
        let (low2, high2) =
            (_mm256_unpacklo_ps(rows[at + 2], rows[at + 3]), _mm256_unpackhi_ps(rows[at + 2], rows[at + 3]));
        // Half h of number c is column 4 h + c of four rows.
        quads[at] = _mm256_shuffle_ps::<0x44>(low, low2);
        quads[at + 1] = _mm256_shuffle_ps::<0xee>(low, low2);
        quads[at + 2] = _mm256_shuffle_ps::<0x44>(high, high2);
        quads[at + 3] = _mm256_shuffle_ps::<0xee>(high, high2);
    }
    for column in 0..4 {
        columns[column] = _mm256_permute2f128_ps::<0x20>(quads[column], quads[4 + column]);
        columns[4 + column] = _mm256_permute2f128_ps::<0x31>(quads[column], quads[4 + column]);
    }
    columns
}
