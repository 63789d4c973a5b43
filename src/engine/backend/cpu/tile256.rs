//! Products of quantised rows with many tokens, in 256-bit registers.
//!
//! A block of eight rows is transposed once into groups of four columns, eight rows adjacent, which stay in the
//! first-level cache while all tokens are processed: sums need no shuffles, and the scales of eight rows are one
//! register. With AVX2, products are summed in 16 bits as long as they fit (all products of a scale with four-bit
//! quants), so that one instruction multiplies them by their scale and widens them. The transposed blocks and the sums
//! take some KiB on the stack.
//!
//! The order of every sum is that of [`rows256`](super::rows256).

use std::{arch::x86_64::*, hint, mem::transmute};

use super::{
    flash_tiles::square,
    quant::{BLOCK, Q8_0_BYTES, Q8K_BYTES, Q8K_SUMS, SUPER},
    rows::Rows,
    set256::{Dot, Set, add_bytes, add_words},
    unpack256::{RUNS, Small, Super, excess, halves_of_eight, less},
};

/// Rows of a register.
const LANES: usize = 8;

/// Registers of rows processed together by a tile.
const PAIR: usize = 2;

/// Tokens processed on a transposed block: with fewer, it would be transposed again more often.
const TOKENS: usize = 128;

/// Independent partial sums over blocks.
const SUMS: usize = 4;

/// Groups of four columns in a block of 256.
const GROUPS: usize = SUPER / 4;

/// Running sums of rows, per block of four and per token.
type Sums = [[[__m256; PAIR]; TOKENS]; SUMS];

/// A block of 256 columns of eight rows.
#[derive(Clone, Copy)]
struct Turned {
    /// Per group of four columns, four bytes per row.
    quants: [__m256i; GROUPS],
    /// 16-bit scales, each twice; 32-bit ones if four bytes are multiplied at once.
    scales: [__m256i; 16],
    /// 16-bit factors of two sums of activations each.
    mins: [__m256i; 8],
    scale: __m256,
    min_scale: __m256,
}

/// Eight blocks of 32 columns of eight rows.
#[derive(Clone, Copy)]
struct TurnedSmall {
    quants: [__m256i; GROUPS],
    scales: [__m256; RUNS],
    mins: [__m256; RUNS],
}

/// Calls a tile function for the remaining tokens, at most four at a time.
macro_rules! for_tokens {
    ($tokens:expr, $parts:expr, |$token:ident| $function:ident::<$($kind:ident),*>($($argument:expr),* $(,)?)) => {{
        let mut $token = 0;
        while $token < $tokens {
            match ($tokens - $token, $parts) {
                (4.., PAIR) => {
                    $function::<$($kind,)* 4, 2>($($argument),*);
                    $token += 4;
                }
                (_, PAIR) => {
                    $function::<$($kind,)* 1, 2>($($argument),*);
                    $token += 1;
                }
                (4.., _) => {
                    $function::<$($kind,)* 4, 1>($($argument),*);
                    $token += 4;
                }
                _ => {
                    $function::<$($kind,)* 1, 1>($($argument),*);
                    $token += 1;
                }
            }
        }
    }};
}

/// The dword at `address`, in all lanes.
///
/// # Safety
///
/// Four bytes can be read there.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn everywhere(address: *const u8) -> __m256i {
    // SAFETY: the caller's promise.
    _mm256_set1_epi32(unsafe { address.cast::<i32>().read_unaligned() })
}

/// Eight registers of eight dwords, transposed.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn square_words(rows: [__m256i; LANES]) -> [__m256i; LANES] {
    let (mut floats, mut columns) = ([_mm256_setzero_ps(); LANES], rows);
    for lane in 0..LANES {
        floats[lane] = _mm256_castsi256_ps(rows[lane]);
    }
    let turned = square(floats);
    for lane in 0..LANES {
        columns[lane] = _mm256_castps_si256(turned[lane]);
    }
    columns
}

/// Writes the four sums of each token, added by halves.
///
/// # Safety
///
/// The machine has AVX2.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn put(
    rows: &Rows<'_>,
    (from, tokens): (usize, usize),
    first: usize,
    sums: &Sums,
    lows: Option<&Sums>,
) {
    let count = rows.weights.len() / rows.row_bytes;
    let last = |sums: &Sums, token: usize, part: usize| {
        let sum = |number: usize| sums[number][token][part];
        _mm256_add_ps(_mm256_add_ps(sum(0), sum(2)), _mm256_add_ps(sum(1), sum(3)))
    };
    for token in 0..tokens {
        for part in 0..PAIR {
            let first = first + part * LANES;
            if first >= count {
                continue;
            }
            let mut value = last(sums, token, part);
            if let Some(lows) = lows {
                value = _mm256_sub_ps(value, last(lows, token, part));
            }
            // SAFETY: eight numbers in both types.
            rows.put_lanes(from + token, first, count, unsafe {
                transmute::<__m256, [f32; LANES]>(value)
            });
        }
    }
}

/// Rows with blocks of 256.
///
/// # Safety
///
/// As in [`rows256`](super::rows256).
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn super_rows<S: Set, T: Super>(rows: &Rows<'_>) {
    let zero = _mm256_setzero_si256();
    let none = Turned {
        quants: [zero; GROUPS],
        scales: [zero; 16],
        mins: [zero; 8],
        scale: _mm256_setzero_ps(),
        min_scale: _mm256_setzero_ps(),
    };
    let mut turned = [none; PAIR];
    let mut values: Sums = [[[_mm256_setzero_ps(); PAIR]; TOKENS]; SUMS];
    let mut lows = values;
    let (count, blocks) = (
        rows.weights.len() / rows.row_bytes.max(1),
        rows.columns / SUPER,
    );
    for from in (0..rows.tokens).step_by(TOKENS) {
        let tokens = TOKENS.min(rows.tokens - from);
        for first in (0..count).step_by(PAIR * LANES) {
            let parts = (count - first).div_ceil(LANES).min(PAIR);
            let starts = [rows.starts::<LANES>(first), rows.starts(first + LANES)];
            for sums in values.iter_mut().chain(&mut lows) {
                sums[..tokens].fill([_mm256_setzero_ps(); PAIR]);
            }
            for index in 0..blocks {
                for (turned, starts) in turned.iter_mut().zip(&starts).take(parts) {
                    // SAFETY: blocks of whole rows.
                    unsafe { turn::<S, T>(starts, index * T::BYTES, turned) };
                }
                let (values, lows) = (&mut values[index % SUMS], &mut lows[index % SUMS]);
                // SAFETY: copies of this many tokens, each with this block; the machine has the set.
                unsafe {
                    for_tokens!(tokens, parts, |token| multiply::<S, T>(
                        &turned,
                        rows,
                        from + token,
                        (index, blocks),
                        &mut values[token..],
                        &mut lows[token..],
                    ));
                }
            }
            // SAFETY: the machine has the set.
            unsafe {
                put(
                    rows,
                    (from, tokens),
                    first,
                    &values,
                    T::MINIMUMS.then_some(&lows),
                );
            };
        }
    }
}

/// Transposes the blocks at `place` of eight rows.
///
/// # Safety
///
/// The rows that start at `starts` have a block there.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn turn<S: Set, T: Super>(starts: &[*const u8; LANES], place: usize, turned: &mut Turned) {
    let mut quants = [[_mm256_setzero_si256(); LANES]; RUNS];
    let blocks = starts.map(|start| start.wrapping_add(place));
    for lane in 0..LANES {
        // SAFETY: the caller's promise.
        let runs = unsafe { T::unpack(blocks[lane]) };
        for run in 0..RUNS {
            quants[run][lane] = if S::DOT != Dot::Pairs && T::SIGNED {
                _mm256_xor_si256(runs[run], _mm256_set1_epi8(i8::MIN))
            } else {
                runs[run]
            };
        }
    }
    for run in 0..RUNS {
        turned.quants[8 * run..8 * run + 8].copy_from_slice(&square_words(quants[run]));
    }
    let [a, b, c, d, e, f, g, h] = blocks;
    // SAFETY: the caller's promise.
    let (left, right) = unsafe { (T::heads([a, b, c, d]), T::heads([e, f, g, h])) };
    for number in 0..SUPER / T::SUB / 4 {
        turned.mins[2 * number..2 * number + 2]
            .copy_from_slice(&pairs(left.mins[number], right.mins[number]));
        for (pair, both) in pairs(left.scales[number], right.scales[number])
            .into_iter()
            .enumerate()
        {
            let (low, high) = (_mm256_slli_epi32::<16>(both), _mm256_srai_epi32::<16>(both));
            let scales = if S::DOT == Dot::Pairs {
                let (low_half, high_half) =
                    (_mm256_srli_epi32::<16>(low), _mm256_slli_epi32::<16>(high));
                let high = _mm256_srli_epi32::<16>(high_half);
                [
                    _mm256_or_si256(low, low_half),
                    _mm256_or_si256(high_half, high),
                ]
            } else {
                [_mm256_srai_epi32::<16>(low), high]
            };
            turned.scales[4 * number + 2 * pair..][..2].copy_from_slice(&scales);
        }
    }
    let words = |of: __m256| _mm256_castps_si256(of);
    let [scale, min_scale] = pairs_of_words(words(left.scale), words(right.scale));
    (turned.scale, turned.min_scale) = (_mm256_castsi256_ps(scale), _mm256_castsi256_ps(min_scale));
}

/// From four 16-bit numbers per row of eight rows, in the layout of [`Heads`](super::unpack256::Heads), the first two
/// and the last two of each row in adjacent lanes.
#[inline]
#[target_feature(enable = "avx2")]
fn pairs(left: __m256i, right: __m256i) -> [__m256i; 2] {
    // Pairs of a row are adjacent there: first those of one kind.
    let apart = |of| _mm256_shuffle_epi32::<0b11_01_10_00>(of);
    pairs_of_words(apart(left), apart(right))
}

/// From two rows' words of one kind and then of another in each half of each register, those of eight rows per kind.
#[inline]
#[target_feature(enable = "avx2")]
fn pairs_of_words(left: __m256i, right: __m256i) -> [__m256i; 2] {
    let order = _mm256_set_epi32(7, 6, 3, 2, 5, 4, 1, 0);
    let both = [
        _mm256_unpacklo_epi64(left, right),
        _mm256_unpackhi_epi64(left, right),
    ];
    both.map(|both| _mm256_permutevar8x32_epi32(both, order))
}

/// One block of `G` times eight rows (its index, and the number of blocks per row), times `N` tokens from `token`.
///
/// # Safety
///
/// The machine has the set, and copies of these tokens exist, with this block.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn multiply<S: Set, T: Super, const N: usize, const G: usize>(
    turned: &[Turned; PAIR],
    rows: &Rows<'_>,
    token: usize,
    (index, blocks): (usize, usize),
    values: &mut [[__m256; PAIR]],
    lows: &mut [[__m256; PAIR]],
) {
    let zero = _mm256_setzero_si256();
    let copies: [*const u8; N] =
        std::array::from_fn(|ahead| rows.copy(token + ahead).wrapping_add(index * Q8K_BYTES));
    let mut totals = [[zero; G]; N];
    // Not unrolled: the sums stay in registers.
    for sub in 0..hint::black_box(SUPER / T::SUB) {
        // SAFETY: groups and scales of the block.
        unsafe {
            let quants = std::array::from_fn(|part| {
                turned
                    .get_unchecked(part)
                    .quants
                    .as_ptr()
                    .add(sub * T::SUB / 4)
            });
            let ys = copies.map(|copy| copy.wrapping_add(4 + sub * T::SUB));
            let mut scales = [zero; G];
            for part in 0..G {
                scales[part] = *turned.get_unchecked(part).scales.get_unchecked(sub);
            }
            if S::DOT == Dot::Pairs {
                let groups = T::SUB / 4;
                let groups = if T::PAIRS != 2 {
                    hint::black_box(groups)
                } else {
                    groups
                };
                for first in (0..groups).step_by(T::PAIRS) {
                    if T::SIGNED {
                        add_signed::<S, N, G>(quants, ys, first, scales, &mut totals);
                        continue;
                    }
                    let sums = sums_of_pairs::<N, G>(quants, ys, first, T::PAIRS.min(T::SUB / 4));
                    for ahead in 0..N {
                        for part in 0..G {
                            totals[ahead][part] = add_words::<S>(
                                totals[ahead][part],
                                sums[ahead][part],
                                scales[part],
                            );
                        }
                    }
                }
            } else {
                let mut sums = [[zero; G]; N];
                sums_of_fours::<S, N, G>(quants, ys, 0, T::SUB / 4, &mut sums);
                for ahead in 0..N {
                    for part in 0..G {
                        let product = _mm256_mullo_epi32(sums[ahead][part], scales[part]);
                        totals[ahead][part] = _mm256_add_epi32(totals[ahead][part], product);
                    }
                }
            }
        }
    }
    // The block's sums: of 32 after all blocks, or of 16 at its own end.
    let (pairs, place) = if T::SUB == 32 {
        (4, (blocks - index) * Q8K_BYTES + index * Q8K_SUMS)
    } else {
        (8, 4 + SUPER)
    };
    let mut mins = [[zero; G]; N];
    let corrects = T::MINIMUMS || excess::<S, T>().is_some();
    for pair in 0..if corrects { hint::black_box(pairs) } else { 0 } {
        for ahead in 0..N {
            // SAFETY: inside the copy of a token; the machine has the set.
            unsafe {
                let sums = everywhere(copies[ahead].wrapping_add(place + 4 * pair));
                for part in 0..G {
                    let factors = *turned.get_unchecked(part).mins.get_unchecked(pair);
                    mins[ahead][part] = add_words::<S>(mins[ahead][part], factors, sums);
                }
            }
        }
    }
    for ahead in 0..N {
        // SAFETY: the block's head.
        let factor = _mm256_castsi256_ps(unsafe { everywhere(copies[ahead]) });
        for part in 0..G {
            let mut total = totals[ahead][part];
            let add = |total, scale, sum: &mut __m256| {
                *sum = _mm256_fmadd_ps(
                    _mm256_cvtepi32_ps(total),
                    _mm256_mul_ps(scale, factor),
                    *sum,
                );
            };
            if T::MINIMUMS {
                add(
                    mins[ahead][part],
                    turned[part].min_scale,
                    &mut lows[ahead][part],
                );
            }
            if let Some(excess) = excess::<S, T>() {
                let excess = _mm256_sll_epi32(mins[ahead][part], _mm_cvtsi32_si128(excess));
                total = _mm256_sub_epi32(total, excess);
            }
            add(total, turned[part].scale, &mut values[ahead][part]);
        }
    }
}

/// The products of `count` groups from `first` with those of each token, in 16 bits.
///
/// # Safety
///
/// Such groups exist at each of `quants` and `ys`.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn sums_of_pairs<const N: usize, const G: usize>(
    quants: [*const __m256i; G],
    ys: [*const u8; N],
    first: usize,
    count: usize,
) -> [[__m256i; G]; N] {
    let mut sums = [[_mm256_setzero_si256(); G]; N];
    // Long loops are not unrolled: sums would not stay in registers.
    let end = if count > 2 {
        hint::black_box(first + count)
    } else {
        first + count
    };
    for group in first..end {
        let mut weights = [_mm256_setzero_si256(); G];
        for part in 0..G {
            // SAFETY: the caller's promise.
            weights[part] = unsafe { quants[part].add(group).read() };
        }
        for ahead in 0..N {
            // SAFETY: the caller's promise.
            let y = unsafe { everywhere(ys[ahead].add(4 * group)) };
            for part in 0..G {
                let pairs = _mm256_maddubs_epi16(weights[part], y);
                sums[ahead][part] = _mm256_add_epi16(sums[ahead][part], pairs);
            }
        }
    }
    sums
}

/// Adds the products of `count` groups from `first` with those of each token, in 32 bits.
///
/// # Safety
///
/// The machine has the set; such groups exist at each of `quants` and `ys`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn sums_of_fours<S: Set, const N: usize, const G: usize>(
    quants: [*const __m256i; G],
    ys: [*const u8; N],
    first: usize,
    count: usize,
    sums: &mut [[__m256i; G]; N],
) {
    for group in first..hint::black_box(first + count) {
        let mut weights = [_mm256_setzero_si256(); G];
        for part in 0..G {
            // SAFETY: the caller's promise.
            weights[part] = unsafe { quants[part].add(group).read() };
        }
        for ahead in 0..N {
            // SAFETY: the caller's promise.
            unsafe {
                let y = everywhere(ys[ahead].add(4 * group));
                for part in 0..G {
                    sums[ahead][part] = add_bytes::<S>(sums[ahead][part], weights[part], y);
                }
            }
        }
    }
}

/// Rows with blocks of 32.
///
/// # Safety
///
/// As in [`rows256`](super::rows256).
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn small_rows<S: Set, T: Small>(rows: &Rows<'_>) {
    let none = TurnedSmall {
        quants: [_mm256_setzero_si256(); GROUPS],
        scales: [_mm256_setzero_ps(); RUNS],
        mins: [_mm256_setzero_ps(); RUNS],
    };
    let mut turned = [none; PAIR];
    let mut sums: Sums = [[[_mm256_setzero_ps(); PAIR]; TOKENS]; SUMS];
    let (count, all) = (
        rows.weights.len() / rows.row_bytes.max(1),
        rows.columns / BLOCK,
    );
    for from in (0..rows.tokens).step_by(TOKENS) {
        let tokens = TOKENS.min(rows.tokens - from);
        for first in (0..count).step_by(PAIR * LANES) {
            let parts = (count - first).div_ceil(LANES).min(PAIR);
            let starts = [rows.starts::<LANES>(first), rows.starts(first + LANES)];
            for sums in &mut sums {
                sums[..tokens].fill([_mm256_setzero_ps(); PAIR]);
            }
            for index in (0..all).step_by(RUNS) {
                let blocks = RUNS.min(all - index);
                for (turned, starts) in turned.iter_mut().zip(&starts).take(parts) {
                    // SAFETY: blocks of whole rows.
                    unsafe { turn_small::<S, T>(starts, (index, blocks), turned) };
                }
                // SAFETY: copies of this many tokens, each with these blocks; the machine has the set.
                unsafe {
                    for_tokens!(tokens, parts, |token| multiply_small::<S, T>(
                        &turned,
                        rows,
                        from + token,
                        (index, blocks, all),
                        &mut sums,
                        token,
                    ));
                }
            }
            // SAFETY: the machine has the set.
            unsafe { put(rows, (from, tokens), first, &sums, None) };
        }
    }
}

/// Transposes several blocks (the first one, and their number) of eight rows.
///
/// # Safety
///
/// The rows that start at `starts` have these blocks.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn turn_small<S: Set, T: Small>(
    starts: &[*const u8; LANES],
    (first, blocks): (usize, usize),
    turned: &mut TurnedSmall,
) {
    for block in 0..blocks {
        let at = |byte: usize| {
            move |lane: usize| starts[lane].wrapping_add((first + block) * T::BYTES + byte)
        };
        // SAFETY: the caller's promise.
        unsafe {
            let mut quants = [_mm256_setzero_si256(); LANES];
            for (lane, quants) in quants.iter_mut().enumerate() {
                *quants = T::unpack(at(0)(lane));
                if S::DOT != Dot::Pairs && T::ADDED == 128 {
                    *quants = _mm256_xor_si256(*quants, _mm256_set1_epi8(i8::MIN));
                }
            }
            turned.quants[8 * block..8 * block + 8].copy_from_slice(&square_words(quants));
            turned.scales[block] = T::scales(std::array::from_fn(at(0)));
            if T::MINIMUM {
                turned.mins[block] = halves_of_eight(std::array::from_fn(at(2)));
            }
        }
    }
}

/// Blocks of `G` times eight rows (the first one, their number, and the number per row), times `N` tokens from `token`;
/// `number` is the first one's index among the sums.
///
/// # Safety
///
/// The machine has the set, and copies of these tokens exist, with these blocks.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn multiply_small<S: Set, T: Small, const N: usize, const G: usize>(
    turned: &[TurnedSmall; PAIR],
    rows: &Rows<'_>,
    token: usize,
    (first, blocks, all): (usize, usize, usize),
    sums: &mut Sums,
    number: usize,
) {
    let zero = _mm256_setzero_si256();
    let copies: [*const u8; N] = std::array::from_fn(|ahead| rows.copy(token + ahead));
    for block in 0..blocks {
        let index = first + block;
        let mut totals = [[zero; G]; N];
        let mut starts = [zero; N];
        for ahead in 0..N {
            // SAFETY: the blocks are followed by their factors, then by -128 times their sums.
            starts[ahead] = unsafe {
                everywhere(copies[ahead].wrapping_add(all * (Q8_0_BYTES + 4) + 4 * index))
            };
            if let Some(shift) = less::<S, T>() {
                totals[ahead] = [_mm256_sra_epi32(starts[ahead], _mm_cvtsi32_si128(shift)); G];
            }
        }
        // SAFETY: eight groups of the block; the machine has the set.
        unsafe {
            let quants = std::array::from_fn(|part| {
                turned.get_unchecked(part).quants.as_ptr().add(8 * block)
            });
            let ys = copies.map(|copy| copy.wrapping_add(index * Q8_0_BYTES + 2));
            if S::DOT != Dot::Pairs {
                sums_of_fours::<S, N, G>(quants, ys, 0, 8, &mut totals);
            } else {
                let ones = _mm256_set1_epi16(1);
                for first in (0..hint::black_box(8)).step_by(T::PAIRS) {
                    if T::ADDED == 128 {
                        add_signed::<S, N, G>(quants, ys, first, [ones; G], &mut totals);
                        continue;
                    }
                    let sums = sums_of_pairs::<N, G>(quants, ys, first, T::PAIRS);
                    for ahead in 0..N {
                        for part in 0..G {
                            totals[ahead][part] =
                                add_words::<S>(totals[ahead][part], sums[ahead][part], ones);
                        }
                    }
                }
            }
        }
        let sums = &mut sums[index % SUMS][number..number + N];
        for ahead in 0..N {
            // SAFETY: the block's factor.
            let factor =
                unsafe { everywhere(copies[ahead].wrapping_add(all * Q8_0_BYTES + 4 * index)) };
            let factor = _mm256_castsi256_ps(factor);
            for part in 0..G {
                let sum = &mut sums[ahead][part];
                if T::MINIMUM {
                    let ys = _mm256_mul_ps(
                        _mm256_cvtepi32_ps(starts[ahead]),
                        _mm256_set1_ps(-1.0 / 128.0),
                    );
                    *sum =
                        _mm256_fmadd_ps(ys, _mm256_mul_ps(turned[part].mins[block], factor), *sum);
                }
                let scale = _mm256_mul_ps(turned[part].scales[block], factor);
                *sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(totals[ahead][part]), scale, *sum);
            }
        }
    }
}

/// Adds the products of a group of signed quants with that of each token, times 16-bit factors: the sign moves to the
/// other factor, since one must be unsigned.
///
/// # Safety
///
/// The machine has the set; such a group exists at each of `quants` and `ys`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn add_signed<S: Set, const N: usize, const G: usize>(
    quants: [*const __m256i; G],
    ys: [*const u8; N],
    group: usize,
    factors: [__m256i; G],
    totals: &mut [[__m256i; G]; N],
) {
    let (mut weights, mut sizes) = ([_mm256_setzero_si256(); G], [_mm256_setzero_si256(); G]);
    for part in 0..G {
        // SAFETY: the caller's promise.
        weights[part] = unsafe { quants[part].add(group).read() };
        sizes[part] = _mm256_abs_epi8(weights[part]);
    }
    for ahead in 0..N {
        // SAFETY: the caller's promise.
        unsafe {
            let y = everywhere(ys[ahead].add(4 * group));
            for part in 0..G {
                let pairs = _mm256_maddubs_epi16(sizes[part], _mm256_sign_epi8(y, weights[part]));
                totals[ahead][part] = add_words::<S>(totals[ahead][part], pairs, factors[part]);
            }
        }
    }
}
