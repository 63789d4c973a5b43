//! Attention tiles for AVX2 and NEON: 6 queries by 16 tokens.
//!
//! One source for both, with registers of eight and of four numbers: sums take 12 of 16, or 24 of 32 of them.

#[cfg(target_arch = "aarch64")]
use std::arch::aarch64::*;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use super::{
    flash_walk::{LANES, QUERIES_TOGETHER, TOKENS_MAX, Walk, place},
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

/// Transposes tokens of `dim` elements, a multiple of [`LANES`], one register width at a time; missing tokens, up to a
/// multiple of [`LANES`], become zero.
///
/// # Safety
///
/// The machine has the instructions for which these tiles are compiled.
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
pub(super) unsafe fn turn(wide: &[f32], dim: usize, turned: &mut [f32]) {
    let count = wide.len() / dim;
    assert_in_tests!(
        dim.is_multiple_of(LANES) && count <= TOKENS_MAX && turned.len() >= dim * TOKENS_MAX
    );
    for token in (0..count.next_multiple_of(LANES)).step_by(WIDTH) {
        for element in (0..dim).step_by(WIDTH) {
            let mut rows = [zero(); WIDTH];
            for (ahead, row) in rows
                .iter_mut()
                .enumerate()
                .take(count.saturating_sub(token))
            {
                // SAFETY: elements of an existing token.
                *row = unsafe { f32::load(wide.as_ptr().add((token + ahead) * dim + element)) };
            }
            for (ahead, column) in square(rows).into_iter().enumerate() {
                // SAFETY: some of the tokens of an element.
                unsafe {
                    store(
                        turned.as_mut_ptr().add(place(dim, element + ahead, token)),
                        column,
                    );
                };
            }
        }
    }
}

/// As [`turn`], for `f16` tokens, which become `f32`.
///
/// # Safety
///
/// The machine has the instructions for which these tiles are compiled.
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
pub(super) unsafe fn turn_halves(halves: &[u16], dim: usize, turned: &mut [f32]) {
    let count = halves.len() / dim;
    assert_in_tests!(
        dim.is_multiple_of(LANES) && count <= TOKENS_MAX && turned.len() >= dim * TOKENS_MAX
    );
    for token in (0..count.next_multiple_of(LANES)).step_by(HALF_ROWS) {
        for element in (0..dim).step_by(HALVES) {
            let tokens = count.saturating_sub(token);
            // SAFETY: elements of existing tokens.
            let columns =
                unsafe { half_columns(halves.as_ptr().add(token * dim + element), dim, tokens) };
            for (ahead, column) in columns.iter().enumerate() {
                // SAFETY: some of the tokens of an element.
                unsafe {
                    store_halves(
                        turned.as_mut_ptr().add(place(dim, element + ahead, token)),
                        *column,
                    );
                };
            }
        }
    }
}

/// Converts `f16` values to `f32`.
///
/// # Safety
///
/// The machine has the instructions for which these tiles are compiled.
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
pub(super) unsafe fn widen(halves: &[u16], floats: &mut [f32]) {
    let (groups, rest) = halves.as_chunks::<WIDTH>();
    for (halves, floats) in groups.iter().zip(floats.as_chunks_mut::<WIDTH>().0) {
        // SAFETY: a register of numbers.
        unsafe { store(floats.as_mut_ptr(), u16::load(halves.as_ptr())) };
    }
    for (half, float) in rest
        .iter()
        .zip(floats.iter_mut().skip(groups.len() * WIDTH))
    {
        *float = half_to_float(*half);
    }
}

/// Calls a tile function for the remaining queries, at most [`QUERIES_TOGETHER`] at a time.
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

/// Calls a tile function for consecutive groups, combining enough of them that few queries still have enough
/// independent sums to keep the processor busy.
macro_rules! for_groups {
    ($queries:ident, $count:expr, |$at:ident| $function:ident($($argument:expr),* $(,)?)) => {{
        let mut $at = 0;
        while $at < $count {
            match $count - $at {
                4.. if $queries == 1 => {
                    $function::<$queries, 4>($($argument),*);
                    $at += 4;
                }
                2.. if $queries <= 2 => {
                    $function::<$queries, 2>($($argument),*);
                    $at += 2;
                }
                _ => {
                    $function::<$queries, 1>($($argument),*);
                    $at += 1;
                }
            }
        }
    }};
}

/// Products of several queries with the first `reach` keys of a transposed block.
///
/// # Safety
///
/// The machine has the instructions for which these tiles are compiled.
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
pub(super) unsafe fn score(walks: &[Walk<'_>], keys: &[f32], reach: usize, scores: &mut [f32]) {
    let dim = keys.len() / TOKENS_MAX;
    let groups = reach.div_ceil(LANES).min(TOKENS_MAX / LANES);
    assert_in_tests!(
        scores.len() >= walks.len() * TOKENS_MAX
            && walks.iter().all(|walk| walk.query.len() == dim)
    );
    let (keys, scores) = (keys.as_ptr(), scores.as_mut_ptr());
    // SAFETY: this many queries of `dim` elements each, and as many rows of scores; the groups of tokens exist.
    unsafe {
        for_queries!(walks.len(), |at| score_groups(
            &walks[at..],
            keys,
            dim,
            groups,
            scores.add(at * TOKENS_MAX)
        ));
    }
}

/// # Safety
///
/// There are `N` queries of `dim` elements and as many rows of scores, and this many groups of tokens in `keys`.
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
unsafe fn score_groups<const N: usize>(
    walks: &[Walk<'_>],
    keys: *const f32,
    dim: usize,
    groups: usize,
    scores: *mut f32,
) {
    let mut queries = [std::ptr::null::<f32>(); N];
    for (query, walk) in queries.iter_mut().zip(walks) {
        *query = walk.query.as_ptr();
    }
    // SAFETY: the caller's promise.
    unsafe {
        for_groups!(N, groups, |at| score_tile(
            &queries,
            keys.add(at * dim * LANES),
            dim,
            scores.add(at * LANES)
        ));
    }
}

/// # Safety
///
/// `queries` have `dim` elements, `keys` are `G` groups of tokens, and there is a row of scores per query.
#[inline]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
unsafe fn score_tile<const N: usize, const G: usize>(
    queries: &[*const f32; N],
    keys: *const f32,
    dim: usize,
    scores: *mut f32,
) {
    let mut sums = [[[zero(); PARTS]; G]; N];
    for element in 0..dim {
        // SAFETY: an element of the tokens of each group, and of each query.
        unsafe {
            let mut row = [[zero(); PARTS]; G];
            for (group, row) in row.iter_mut().enumerate() {
                *row = load_group(keys.add((group * dim + element) * LANES));
            }
            for (query, sums) in queries.iter().zip(&mut sums) {
                add_products(sums, &row, *query.add(element));
            }
        }
    }
    for (number, sums) in sums.iter().enumerate() {
        // SAFETY: a row of scores.
        unsafe { store_groups(scores.add(number * TOKENS_MAX), sums) };
    }
}

/// Adds the weighted values, whose elements are a multiple of [`LANES`], to the sums of several queries.
///
/// # Safety
///
/// The machine has the instructions for which these tiles are compiled.
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
pub(super) unsafe fn weigh<T: Element>(walks: &mut [Walk<'_>], values: &[T], weights: &[f32]) {
    let dim = walks.first().map_or(LANES, |walk| walk.sum.len());
    assert_in_tests!(dim.is_multiple_of(LANES) && weights.len() >= walks.len() * TOKENS_MAX);
    let (values, weights) = ((values.as_ptr(), values.len() / dim), weights.as_ptr());
    // SAFETY: this many queries, and rows of weights for them.
    unsafe {
        for_queries!(walks.len(), |at| weigh_groups(
            &mut walks[at..],
            values,
            dim,
            weights.add(at * TOKENS_MAX)
        ));
    }
}

/// # Safety
///
/// There are `N` queries of `dim` elements and as many rows of weights; `values` are this many tokens of as many
/// elements.
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
unsafe fn weigh_groups<const N: usize>(
    walks: &mut [Walk<'_>],
    (values, count): (*const impl Element, usize),
    dim: usize,
    weights: *const f32,
) {
    let mut sums = [std::ptr::null_mut::<f32>(); N];
    for (sum, walk) in sums.iter_mut().zip(walks) {
        *sum = walk.sum.as_mut_ptr();
    }
    // SAFETY: the caller's promise.
    unsafe {
        for_groups!(N, dim / LANES, |at| weigh_tile(
            sums.map(|sum| sum.add(at * LANES)),
            (values.add(at * LANES), count),
            dim,
            weights,
        ));
    }
}

/// # Safety
///
/// `sums` are `G` groups of elements, `values` has as many per token, `dim` apart, and there is a row of weights per
/// query.
#[inline]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
unsafe fn weigh_tile<const N: usize, const G: usize>(
    sums: [*mut f32; N],
    (values, count): (*const impl Element, usize),
    dim: usize,
    weights: *const f32,
) {
    let mut totals = [[[zero(); PARTS]; G]; N];
    for (sum, totals) in sums.iter().zip(&mut totals) {
        for (group, total) in totals.iter_mut().enumerate() {
            // SAFETY: the caller's promise.
            *total = unsafe { load_group(sum.add(group * LANES)) };
        }
    }
    for token in 0..count {
        // SAFETY: groups of a token, and its weight for each query.
        unsafe {
            let mut row = [[zero(); PARTS]; G];
            for (group, row) in row.iter_mut().enumerate() {
                *row = load_group(values.add(token * dim + group * LANES));
            }
            for (number, totals) in totals.iter_mut().enumerate() {
                add_products(totals, &row, *weights.add(number * TOKENS_MAX + token));
            }
        }
    }
    for (sum, totals) in sums.iter().zip(&totals) {
        // SAFETY: the caller's promise.
        unsafe { store_groups(*sum, totals) };
    }
}

/// Element type of values while they are weighted.
pub(super) trait Element: Copy {
    /// # Safety
    ///
    /// A register's worth of elements exists at `from`, and the machine has the instructions of these tiles.
    unsafe fn load(from: *const Self) -> Native;
}

/// # Safety
///
/// There is a group at `from`.
#[inline]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
unsafe fn load_group<T: Element>(from: *const T) -> Group {
    let mut group = [zero(); PARTS];
    for (part, register) in group.iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        *register = unsafe { T::load(from.add(part * WIDTH)) };
    }
    group
}

impl Element for f32 {
    #[inline]
    #[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
    #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
    unsafe fn load(from: *const Self) -> Native {
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
}

/// Bits of `f16`.
impl Element for u16 {
    #[inline]
    #[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
    #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
    unsafe fn load(from: *const Self) -> Native {
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
}

/// # Safety
///
/// There is room for the groups at `to`.
#[inline]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
unsafe fn store_groups<const G: usize>(to: *mut f32, groups: &[Group; G]) {
    for (at, register) in groups.as_flattened().iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe { store(to.add(at * WIDTH), *register) };
    }
}

/// `sums += row · x`, in one rounding.
#[inline]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
fn add_products<const G: usize>(sums: &mut [Group; G], row: &[Group; G], x: f32) {
    for (sum, row) in sums.as_flattened_mut().iter_mut().zip(row.as_flattened()) {
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

/// Tokens and elements of a square of `f16`: eight tokens by as many elements as a register has bytes.
const HALF_ROWS: usize = 8;
#[cfg(target_arch = "aarch64")]
const HALVES: usize = 8;
#[cfg(target_arch = "x86_64")]
const HALVES: usize = 16;

/// Eight tokens of an element, in `f16`.
#[cfg(target_arch = "aarch64")]
type HalfColumn = uint16x8_t;
#[cfg(target_arch = "x86_64")]
type HalfColumn = __m128i;

/// Eight rows of `f16`, `step` apart, transposed; rows beyond `tokens` are zero.
///
/// # Safety
///
/// Each of this many rows has as many elements.
#[cfg(target_arch = "aarch64")]
#[inline]
#[target_feature(enable = "neon")]
unsafe fn half_columns(from: *const u16, step: usize, tokens: usize) -> [HalfColumn; HALVES] {
    let mut rows = [vdupq_n_u16(0); HALF_ROWS];
    for (ahead, row) in rows.iter_mut().enumerate().take(tokens) {
        // SAFETY: the caller's promise.
        *row = unsafe { vld1q_u16(from.add(ahead * step)) };
    }
    let (mut pairs, mut quads, mut columns) = (rows, rows, rows);
    for at in [0, 2, 4, 6] {
        pairs[at] = vtrn1q_u16(rows[at], rows[at + 1]);
        pairs[at + 1] = vtrn2q_u16(rows[at], rows[at + 1]);
    }
    let words = |of| vreinterpretq_u32_u16(of);
    for at in [0, 1, 4, 5] {
        quads[at] = vreinterpretq_u16_u32(vtrn1q_u32(words(pairs[at]), words(pairs[at + 2])));
        quads[at + 2] = vreinterpretq_u16_u32(vtrn2q_u32(words(pairs[at]), words(pairs[at + 2])));
    }
    let doubles = |of| vreinterpretq_u64_u16(of);
    for at in 0..4 {
        columns[at] = vreinterpretq_u16_u64(vtrn1q_u64(doubles(quads[at]), doubles(quads[at + 4])));
        columns[at + 4] =
            vreinterpretq_u16_u64(vtrn2q_u64(doubles(quads[at]), doubles(quads[at + 4])));
    }
    columns
}

/// Eight rows of `f16`, `step` apart, transposed; rows beyond `tokens` are zero.
///
/// # Safety
///
/// Each of this many rows has as many elements.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn half_columns(from: *const u16, step: usize, tokens: usize) -> [HalfColumn; HALVES] {
    // SAFETY: the caller's promise.
    let load = |ahead: usize| unsafe { _mm256_loadu_si256(from.add(ahead * step).cast()) };
    let mut rows = [_mm256_setzero_si256(); HALF_ROWS];
    if tokens >= HALF_ROWS {
        rows = std::array::from_fn(load);
    } else {
        for (ahead, row) in rows.iter_mut().enumerate().take(tokens) {
            *row = load(ahead);
        }
    }
    let mut columns = [_mm_setzero_si128(); HALVES];
    for (at, both) in half_squares(rows).into_iter().enumerate() {
        columns[at] = _mm256_castsi256_si128(both);
        columns[at + 8] = _mm256_extracti128_si256::<1>(both);
    }
    columns
}

/// Eight rows of sixteen `f16` as two squares, each transposed: half h of column c is column 8 h + c.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn half_squares(rows: [__m256i; HALF_ROWS]) -> [__m256i; HALF_ROWS] {
    let (mut pairs, mut quads, mut columns) = (rows, rows, rows);
    for at in 0..4 {
        pairs[at] = _mm256_unpacklo_epi16(rows[2 * at], rows[2 * at + 1]);
        pairs[4 + at] = _mm256_unpackhi_epi16(rows[2 * at], rows[2 * at + 1]);
    }
    // `pairs[4 h + p]` has columns 4 h to 4 h + 3 of rows 2 p and 2 p + 1; `quads[4 h + 2 q + g]` has columns 4 h + 2 q
    // and the next one of rows 4 g to 4 g + 3.
    for high in [0, 4] {
        for group in 0..2 {
            let (first, second) = (pairs[high + 2 * group], pairs[high + 2 * group + 1]);
            quads[high + group] = _mm256_unpacklo_epi32(first, second);
            quads[high + 2 + group] = _mm256_unpackhi_epi32(first, second);
        }
        for two in [0, 2] {
            columns[high + two] = _mm256_unpacklo_epi64(quads[high + two], quads[high + two + 1]);
            columns[high + two + 1] =
                _mm256_unpackhi_epi64(quads[high + two], quads[high + two + 1]);
        }
    }
    columns
}

/// # Safety
///
/// There is room for eight numbers at `to`.
#[inline]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
unsafe fn store_halves(to: *mut f32, column: HalfColumn) {
    // SAFETY: the caller's promise.
    unsafe {
        #[cfg(target_arch = "aarch64")]
        {
            vst1q_f32(to, super::neon_unpack::widened(vget_low_u16(column)));
            vst1q_f32(
                to.add(4),
                super::neon_unpack::widened(vget_high_u16(column)),
            );
        }
        #[cfg(target_arch = "x86_64")]
        _mm256_storeu_ps(to, _mm256_cvtph_ps(column));
    }
}

/// Four rows of four numbers, transposed.
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

/// Eight rows of eight numbers, transposed.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn square(rows: [Native; WIDTH]) -> [Native; WIDTH] {
    let (mut quads, mut columns) = ([zero(); WIDTH], [zero(); WIDTH]);
    for half in 0..2 {
        let at = 4 * half;
        let (low, high) = (
            _mm256_unpacklo_ps(rows[at], rows[at + 1]),
            _mm256_unpackhi_ps(rows[at], rows[at + 1]),
        );
        let (low2, high2) = (
            _mm256_unpacklo_ps(rows[at + 2], rows[at + 3]),
            _mm256_unpackhi_ps(rows[at + 2], rows[at + 3]),
        );
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
