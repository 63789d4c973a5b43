//! Products with rows of `bf16` in pairs, by `vdpbf16ps`.
//!
//! Sixteen lanes take the columns of a row two by two, the second of each pair first, and are added at the end. Any
//! number of tokens therefore yields the same bits; other sets sum in another order. For one or two tokens rows are
//! read in memory order; for more, tiles have four rows and six tokens.

use std::{
    arch::x86_64::*,
    array::from_fn,
    mem::{size_of, transmute},
};

use super::{floats::AHEAD, rows::Rows};

/// Columns in a register.
const WIDTH: usize = 32;

/// Rows of a tile.
const HEIGHT: usize = 4;

/// Most tokens for which rows are read in memory order.
const IN_ORDER_MAX: usize = 2;

/// All rows times all tokens.
///
/// # Safety
///
/// The machine has the instructions of [`Isa::Avx512Bf16`](super::isa::Isa::Avx512Bf16); `rows` is as its fields say.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")]
pub(super) unsafe fn rows(rows: &Rows<'_>) {
    let mut token = 0;
    while token < rows.tokens {
        // SAFETY: the caller's promise.
        token += unsafe {
            match rows.tokens - token {
                1 => tiles::<1>(rows, token),
                2 => tiles::<2>(rows, token),
                3 => tiles::<3>(rows, token),
                4 => tiles::<4>(rows, token),
                5 => tiles::<5>(rows, token),
                _ => tiles::<6>(rows, token),
            }
        };
    }
}

/// All rows times `N` tokens from `first` on; returns `N`.
///
/// # Safety
///
/// As for `rows`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")]
unsafe fn tiles<const N: usize>(rows: &Rows<'_>, first: usize) -> usize {
    let count = rows.weights.len() / rows.row_bytes;
    // The `bf16` form follows the widened numbers of a copy.
    let tokens: [_; N] = from_fn(|at| {
        rows.copy(first + at)
            .wrapping_add(rows.columns * size_of::<f32>())
    });
    for row in (0..count).step_by(HEIGHT) {
        let weights: [_; HEIGHT] = rows.starts(row);
        let mut sums = [[_mm512_setzero_ps(); HEIGHT]; N];
        // SAFETY: the columns of these rows and tokens exist.
        unsafe {
            if N > IN_ORDER_MAX {
                sums = tile(weights, tokens, rows.columns);
            } else {
                for row in 0..HEIGHT {
                    let of_row = tile(from_fn(|_: usize| weights[row]), tokens, rows.columns);
                    for token in 0..N {
                        let [sum] = of_row[token];
                        sums[token][row] = sum;
                    }
                }
            }
        }
        for token in 0..N {
            // SAFETY: four numbers in both types.
            rows.put_lanes(first + token, row, count, unsafe {
                transmute::<__m128, [f32; HEIGHT]>(four(sums[token]))
            });
        }
    }
    N
}

/// The sums of `R` rows with `N` tokens.
///
/// # Safety
///
/// Each row and each token has this many columns.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")]
unsafe fn tile<const R: usize, const N: usize>(
    weights: [*const u8; R],
    tokens: [*const u8; N],
    columns: usize,
) -> [[__m512; R]; N] {
    let mut sums = [[_mm512_setzero_ps(); R]; N];
    let whole = columns / WIDTH * size_of::<[u16; WIDTH]>();
    for at in (0..whole).step_by(size_of::<[u16; WIDTH]>()) {
        if R == 1 {
            _mm_prefetch::<_MM_HINT_T0>(weights[0].wrapping_add(at + AHEAD).cast());
        }
        // SAFETY: a register of columns.
        unsafe {
            meet(&mut sums, weights, tokens, |from| {
                _mm512_loadu_si512(from.add(at).cast())
            });
        };
    }
    if !columns.is_multiple_of(WIDTH) {
        let lanes = u32::MAX >> (WIDTH - columns % WIDTH);
        // SAFETY: as many columns as the mask has.
        unsafe {
            meet(&mut sums, weights, tokens, |from| {
                _mm512_maskz_loadu_epi16(lanes, from.add(whole).cast())
            });
        };
    }
    sums
}

/// Adds the products of a register of columns.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")]
fn meet<const R: usize, const N: usize>(
    sums: &mut [[__m512; R]; N],
    weights: [*const u8; R],
    tokens: [*const u8; N],
    load: impl Fn(*const u8) -> __m512i,
) {
    let mut ys = [_mm512_setzero_si512(); N];
    for token in 0..N {
        ys[token] = load(tokens[token]);
    }
    for row in 0..R {
        let x = load(weights[row]);
        for token in 0..N {
            sums[token][row] = _mm512_dpbf16_ps(sums[token][row], pairs(x), pairs(ys[token]));
        }
    }
}

/// Reinterprets thirty-two numbers for the instruction.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn pairs(bits: __m512i) -> __m512bh {
    // SAFETY: thirty-two numbers in both types.
    unsafe { transmute::<__m512i, __m512bh>(bits) }
}

/// The sums of the lanes of four registers.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn four(sums: [__m512; HEIGHT]) -> __m128 {
    let [a, b, c, d] = sums;
    let ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    let cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    let (ab, cd) = (_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    let (low, high) = (_mm512_unpacklo_pd(ab, cd), _mm512_unpackhi_pd(ab, cd));
    let abcd = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
    let halves = _mm256_add_ps(
        _mm512_castps512_ps256(abcd),
        _mm512_extractf32x8_ps::<1>(abcd),
    );
    _mm_add_ps(
        _mm256_castps256_ps128(halves),
        _mm256_extractf128_ps::<1>(halves),
    )
}
