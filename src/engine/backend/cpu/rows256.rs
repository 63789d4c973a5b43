//! Products of quantised rows with one token or a few, in registers of 256 bits.
//!
//! A block is unpacked once for all of them. The order of every sum is the one of [`avx512`](super::avx512): each block in whole
//! numbers, each fourth block as `sum + total · (scale · factor)` in one rounding, then the four sums by halves. So all sets
//! of x86-64 yield the same bits.

use std::{arch::x86_64::*, hint};

use super::{
    quant::{BLOCK, Q8_0_BYTES, Q8K_BYTES, Q8K_SUMS, SUPER},
    rows::Rows,
    tile256,
    unpack256::{Dot, RUNS, Set, Small, Super, add_bytes, add_words, four_halves, four_pairs, four_sums, less},
};

/// Blocks whose sums are brought to one register together, each in a lane of its own.
const LANES: usize = 4;

/// Calls a function for the tokens of a few, as many at a time as its sums have registers.
macro_rules! for_tokens {
    ($tokens:expr, |$token:ident| $function:ident::<$($kind:ident),*>($($argument:expr),* $(,)?)) => {{
        let mut $token = 0;
        while $token < $tokens {
            match $tokens - $token {
                4.. => {
                    $function::<$($kind,)* 4>($($argument),*);
                    $token += 4;
                }
                3 => {
                    $function::<$($kind,)* 3>($($argument),*);
                    $token += 3;
                }
                2 => {
                    $function::<$($kind,)* 2>($($argument),*);
                    $token += 2;
                }
                _ => {
                    $function::<$($kind,)* 1>($($argument),*);
                    $token += 1;
                }
            }
        }
    }};
}

/// Rows with blocks of 256.
///
/// # Safety
///
/// The machine has AVX2, FMA, F16C and the set; `rows` is as its fields say.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn super_rows<S: Set, T: Super>(rows: &Rows<'_>) {
    if rows.tokens >= tile256::TOKENS_MIN {
        // SAFETY: passed on.
        unsafe { tile256::super_rows::<S, T>(rows) };
        return;
    }
    for row in 0..rows.weights.len() / rows.row_bytes.max(1) {
        // SAFETY: a row, and tokens, that are there.
        unsafe { for_tokens!(rows.tokens, |token| super_row::<S, T>(rows, row, token)) };
    }
}

/// One row times `N` tokens.
///
/// # Safety
///
/// As in [`super_rows`]; there are such a row and such tokens.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn super_row<S: Set, T: Super, const N: usize>(rows: &Rows<'_>, row: usize, token: usize) {
    let (weight, blocks) = (rows.weights[row * rows.row_bytes..].as_ptr(), rows.columns / SUPER);
    let copies: [*const u8; N] = std::array::from_fn(|ahead| rows.copy(token + ahead));
    // Hidden from the compiler, which would make two shuffles of one.
    let places: &Places = hint::black_box(if T::SUB == 32 { &OF_32 } else { &OF_16 });
    let mut lanes = [[_mm_setzero_ps(); 2]; N];
    let mut first = 0;
    while first + LANES <= blocks {
        // SAFETY: four blocks of the row and of each copy.
        unsafe { super_group::<S, T, N, true>(weight, copies, first, blocks, places, &mut lanes) };
        first += LANES;
    }
    if first < blocks {
        // SAFETY: as many as are left.
        unsafe { super_group::<S, T, N, false>(weight, copies, first, blocks, places, &mut lanes) };
    }
    for (ahead, [sums, mins]) in lanes.into_iter().enumerate() {
        let (sums, mins) = (last_sum(sums), last_sum(mins));
        rows.put(token + ahead, row, if T::MINIMUMS { sums - mins } else { sums });
    }
}

/// Adds four blocks from `first`, or those that are there when not `WHOLE`, to the lanes of each token.
///
/// # Safety
///
/// The machine has the set; row and copies have `blocks` blocks, of which `first` is one and, when `WHOLE`, three more.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn super_group<S: Set, T: Super, const N: usize, const WHOLE: bool>(
    weight: *const u8,
    copies: [*const u8; N],
    first: usize,
    blocks: usize,
    places: &Places,
    lanes: &mut [[__m128; 2]; N],
) {
    let zero = _mm256_setzero_si256();
    let count = if WHOLE { LANES } else { LANES.min(blocks - first) };
    let weight = weight.wrapping_add(first * T::BYTES);
    let (mut ys, mut sums_of_32) = (copies, copies);
    for ahead in 0..N {
        ys[ahead] = copies[ahead].wrapping_add(first * Q8K_BYTES);
        sums_of_32[ahead] = copies[ahead].wrapping_add(blocks * Q8K_BYTES + first * Q8K_SUMS);
    }
    let (mut totals, mut lows) = ([[zero; LANES]; N], [[zero; LANES]; N]);
    for lane in 0..count {
        // SAFETY: a block of the row, and of each copy, with its sums of 32 behind all blocks.
        unsafe {
            let block = T::unpack(weight.add(lane * T::BYTES));
            let mut total = [zero; N];
            for run in 0..RUNS {
                let scale = scale_of::<T>(block.scales, run, places);
                for ahead in 0..N {
                    let y = ys[ahead].add(lane * Q8K_BYTES + 4 + 32 * run);
                    let pairs = _mm256_maddubs_epi16(block.quants[run], _mm256_loadu_si256(y.cast()));
                    total[ahead] = add_words::<S>(total[ahead], pairs, scale);
                }
            }
            for ahead in 0..N {
                // Sixteen sums of 16, or eight of 32.
                let sums = if T::SUB == 32 {
                    let sums = sums_of_32[ahead].add(lane * Q8K_SUMS);
                    _mm256_zextsi128_si256(_mm_loadu_si128(sums.cast()))
                } else {
                    _mm256_loadu_si256(ys[ahead].add(lane * Q8K_BYTES + 4 + SUPER).cast())
                };
                let low = _mm256_madd_epi16(block.mins, sums);
                if T::MINIMUMS {
                    (totals[ahead][lane], lows[ahead][lane]) = (total[ahead], low);
                } else {
                    let less = _mm256_sll_epi32(low, _mm_cvtsi32_si128(T::LESS));
                    totals[ahead][lane] = _mm256_sub_epi32(total[ahead], less);
                }
            }
        }
    }
    // The last block stands in for those that are not there, whose totals are zero.
    let at: [usize; LANES] = std::array::from_fn(|lane| if WHOLE { lane } else { lane.min(count - 1) });
    let place = |byte: usize| at.map(|lane| weight.wrapping_add(lane * T::BYTES + byte));
    // SAFETY: blocks of the row.
    let (scales, min_scales) = unsafe {
        if T::MINIMUMS {
            four_pairs(place(T::SCALE_AT))
        } else {
            (four_halves(place(T::SCALE_AT)), _mm_setzero_ps())
        }
    };
    for ahead in 0..N {
        // SAFETY: blocks of the copy.
        let factor = |lane: usize| unsafe { ys[ahead].add(at[lane] * Q8K_BYTES).cast::<f32>().read_unaligned() };
        let factors = _mm_set_ps(factor(3), factor(2), factor(1), factor(0));
        let add = |totals, scales, lanes| {
            _mm_fmadd_ps(_mm_cvtepi32_ps(four_sums(totals)), _mm_mul_ps(scales, factors), lanes)
        };
        lanes[ahead][0] = add(totals[ahead], scales, lanes[ahead][0]);
        if T::MINIMUMS {
            lanes[ahead][1] = add(lows[ahead], min_scales, lanes[ahead][1]);
        }
    }
}

/// The scales of run `run` beside its products.
#[inline]
#[target_feature(enable = "avx2")]
fn scale_of<T: Super>(scales: __m256i, run: usize, places: &Places) -> __m256i {
    let upper = T::SUB == 16 && run >= RUNS / 2;
    let both = if upper {
        _mm256_permute2x128_si256::<0x11>(scales, scales)
    } else {
        _mm256_permute2x128_si256::<0x00>(scales, scales)
    };
    // SAFETY: 32 bytes.
    let places = unsafe { _mm256_load_si256(places.0[run].as_ptr().cast()) };
    _mm256_shuffle_epi8(both, places)
}

/// Of each run, which byte of the scales goes to each of its sums.
#[repr(align(32))]
struct Places([[u8; 32]; RUNS]);

static OF_16: Places = Places::of(16);
static OF_32: Places = Places::of(32);

impl Places {
    /// For a scale of `sub` columns.
    const fn of(sub: usize) -> Self {
        const BYTES: [u8; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];
        let mut places = [[0; 32]; RUNS];
        let mut run = 0;
        while run < RUNS {
            let mut at = 0;
            while at < 32 {
                let number = if sub == 32 {
                    run
                } else {
                    2 * (run % (RUNS / 2)) + at / 16
                };
                places[run][at] = BYTES[2 * number + at % 2];
                at += 1;
            }
            run += 1;
        }
        Self(places)
    }
}

/// Rows with blocks of 32.
///
/// # Safety
///
/// The machine has AVX2, FMA, F16C and the set; `rows` is as its fields say.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn small_rows<S: Set, T: Small>(rows: &Rows<'_>) {
    if rows.tokens >= tile256::TOKENS_MIN {
        // SAFETY: passed on.
        unsafe { tile256::small_rows::<S, T>(rows) };
        return;
    }
    for row in 0..rows.weights.len() / rows.row_bytes.max(1) {
        // SAFETY: a row, and tokens, that are there.
        unsafe { for_tokens!(rows.tokens, |token| small_row::<S, T>(rows, row, token)) };
    }
}

/// One row times `N` tokens.
///
/// # Safety
///
/// As in [`small_rows`]; there are such a row and such tokens.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn small_row<S: Set, T: Small, const N: usize>(rows: &Rows<'_>, row: usize, token: usize) {
    let (weight, blocks) = (rows.weights[row * rows.row_bytes..].as_ptr(), rows.columns / BLOCK);
    let copies: [*const u8; N] = std::array::from_fn(|ahead| rows.copy(token + ahead));
    let mut lanes = [_mm_setzero_ps(); N];
    let mut first = 0;
    while first + LANES <= blocks {
        // SAFETY: four blocks of the row and of each copy.
        unsafe { small_group::<S, T, N, true>(weight, copies, first, blocks, &mut lanes) };
        first += LANES;
    }
    if first < blocks {
        // SAFETY: as many as are left.
        unsafe { small_group::<S, T, N, false>(weight, copies, first, blocks, &mut lanes) };
    }
    for (ahead, lanes) in lanes.into_iter().enumerate() {
        rows.put(token + ahead, row, last_sum(lanes));
    }
}

/// Adds four blocks from `first`, or those that are there when not `WHOLE`, to the lanes of each token.
///
/// # Safety
///
/// The machine has the set; row and copies have `blocks` blocks, of which `first` is one and, when `WHOLE`, three more.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn small_group<S: Set, T: Small, const N: usize, const WHOLE: bool>(
    weight: *const u8,
    copies: [*const u8; N],
    first: usize,
    blocks: usize,
    lanes: &mut [__m128; N],
) {
    let count = if WHOLE { LANES } else { LANES.min(blocks - first) };
    let zero = _mm256_setzero_si256();
    let mut totals = [[zero; LANES]; N];
    for lane in 0..count {
        let index = first + lane;
        // SAFETY: a block of the row.
        let mut quants = unsafe { T::unpack(weight.add(index * T::BYTES)) };
        if S::DOT != Dot::Pairs && T::ADDED == 128 {
            quants = _mm256_xor_si256(quants, _mm256_set1_epi8(i8::MIN));
        }
        for ahead in 0..N {
            // SAFETY: 32 quants of the copy; the machine has the set.
            totals[ahead][lane] = unsafe {
                let y = _mm256_loadu_si256(copies[ahead].add(index * Q8_0_BYTES + 2).cast());
                if S::DOT == Dot::Pairs && T::ADDED == 128 {
                    // The sign moves to the other side, since one of the two must be unsigned.
                    add_bytes::<S>(zero, _mm256_abs_epi8(quants), _mm256_sign_epi8(y, quants))
                } else {
                    add_bytes::<S>(zero, quants, y)
                }
            };
        }
    }
    let at: [usize; LANES] = std::array::from_fn(|lane| first + lane.min(count - 1));
    let place = |byte: usize| at.map(|index| weight.wrapping_add(index * T::BYTES + byte));
    // SAFETY: blocks of the row.
    let (scales, mins) = unsafe {
        if T::MINIMUM {
            four_pairs(place(0))
        } else {
            (four_halves(place(0)), _mm_setzero_ps())
        }
    };
    for ahead in 0..N {
        let behind = copies[ahead].wrapping_add(blocks * Q8_0_BYTES);
        // SAFETY: behind the blocks come their factors, then -128 times their sums.
        let (factors, starts) = unsafe {
            let (factors, starts) = (behind.cast::<f32>(), behind.add(4 * blocks).cast::<i32>());
            if WHOLE {
                (
                    _mm_loadu_ps(factors.add(first)),
                    _mm_loadu_si128(starts.add(first).cast()),
                )
            } else {
                let (factor, start) = (
                    |lane: usize| factors.add(at[lane]).read_unaligned(),
                    |lane: usize| {
                        if lane < count {
                            starts.add(at[lane]).read_unaligned()
                        } else {
                            0
                        }
                    },
                );
                (
                    _mm_set_ps(factor(3), factor(2), factor(1), factor(0)),
                    _mm_set_epi32(start(3), start(2), start(1), start(0)),
                )
            }
        };
        if T::MINIMUM {
            let sums = _mm_mul_ps(_mm_cvtepi32_ps(starts), _mm_set1_ps(-1.0 / 128.0));
            lanes[ahead] = _mm_fmadd_ps(sums, _mm_mul_ps(mins, factors), lanes[ahead]);
        }
        let mut total = four_sums(totals[ahead]);
        if let Some(shift) = less::<S, T>() {
            total = _mm_add_epi32(total, _mm_sra_epi32(starts, _mm_cvtsi32_si128(shift)));
        }
        lanes[ahead] = _mm_fmadd_ps(_mm_cvtepi32_ps(total), _mm_mul_ps(scales, factors), lanes[ahead]);
    }
}

/// The sum of eight lanes, by halves.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn total(lanes: __m256) -> f32 {
    let four = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps::<1>(lanes));
    last_sum(four)
}

/// The lanes of a row's sum, by halves.
#[inline]
#[target_feature(enable = "avx2")]
fn last_sum(lanes: __m128) -> f32 {
    let halves = _mm_add_ps(lanes, _mm_movehl_ps(lanes, lanes));
    _mm_cvtss_f32(_mm_add_ss(halves, _mm_movehdup_ps(halves)))
}
