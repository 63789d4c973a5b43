//! Products of four quantised rows at once with one token or a few, in 256-bit registers.
//!
//! Bytes of four rows are interleaved before they are unpacked: a register has eight columns of each. Sums therefore
//! stay in two lanes of a row, products of eight columns are summed in 16 bits with those of the next eight, the scales
//! of four rows are one register, and four rows share the loads of a token. A block is unpacked once for all tokens.
//!
//! Four rows are four streams, which the hardware prefetcher does not recognise as one contiguous region: the rows
//! after them are prefetched in memory order.
//!
//! The order of every sum is that of [`avx512`](super::avx512): each block in integers, every fourth block as `sum +
//! total · (scale · factor)` in one rounding, then the four sums by halves. All sets of x86-64 therefore yield the same
//! bits.

use std::{arch::x86_64::*, hint, mem::transmute};

use super::{
    quant::{BLOCK, Q8_0_BYTES, Q8K_BYTES, Q8K_SUMS, SUPER},
    rows::Rows,
    set256::{Dot, Set, add_bytes, add_words},
    tile256,
    unpack256::{
        Eight, Four, Heads, ROWS, Small, Super, excess, halves_of_eight, less, runs_of_chunk,
    },
};

/// Independent partial sums over blocks.
const SUMS: usize = 4;

/// Least prefetch distance: some 300 ns of work on one core.
const AHEAD_MIN: usize = 4608;

/// Calls a function for a few tokens, as many at a time as its sums have registers.
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

/// Four rows, and their tokens.
struct Job<'rows, const N: usize> {
    rows: &'rows Rows<'rows>,
    /// The first row, and the number of rows.
    first: usize,
    count: usize,
    token: usize,
    copies: [*const u8; N],
}

impl<'rows, const N: usize> Job<'rows, N> {
    fn new(rows: &'rows Rows<'rows>, first: usize, token: usize) -> Self {
        Self {
            rows,
            first,
            count: rows.weights.len() / rows.row_bytes,
            token,
            copies: std::array::from_fn(|ahead| rows.copy(token + ahead)),
        }
    }

    /// First prefetch address: the rows after them, or further ahead to cover memory latency. Each is prefetched once.
    fn ahead(&self) -> Option<*const u8> {
        let start = self.rows.weights[self.first * self.rows.row_bytes..].as_ptr();
        (self.token == 0).then(|| start.wrapping_add(AHEAD_MIN.max(ROWS * self.rows.row_bytes)))
    }
}

/// Prefetches the next `bytes`.
#[inline]
#[target_feature(enable = "avx2")]
fn fetch(ahead: &mut Option<*const u8>, bytes: usize) {
    if let Some(ahead) = ahead {
        for line in 0..bytes.div_ceil(64) {
            _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(64 * line).cast());
        }
        *ahead = ahead.wrapping_add(bytes);
    }
}

/// Rows with blocks of 256.
///
/// # Safety
///
/// The machine has AVX2, FMA, F16C and the set; `rows` is as its fields say.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn super_rows<S: Set, T: Super>(rows: &Rows<'_>) {
    if rows.tokens >= T::TILE_FROM {
        // SAFETY: the caller's promise.
        unsafe { tile256::super_rows::<S, T>(rows) };
        return;
    }
    for first in (0..rows.weights.len() / rows.row_bytes.max(1)).step_by(ROWS) {
        // SAFETY: existing rows and tokens.
        unsafe {
            for_tokens!(rows.tokens, |token| super_four::<S, T>(&Job::new(
                rows, first, token
            )));
        };
    }
}

/// # Safety
///
/// As in [`super_rows`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn super_four<S: Set, T: Super, const N: usize>(job: &Job<'_, N>) {
    let zero = _mm256_setzero_si256();
    let (mut four, mut ahead) = (job.rows.starts(job.first), job.ahead());
    // Hidden from the compiler, which would split one shuffle in two.
    let places: &Places = hint::black_box(&PLACES);
    let blocks = job.rows.columns / SUPER;
    let mut sums = [[_mm256_setzero_ps(); N]; SUMS];
    let (mut ys, mut sums_of_32) = (
        job.copies,
        job.copies.map(|copy| copy.wrapping_add(blocks * Q8K_BYTES)),
    );
    for index in 0..blocks {
        fetch(&mut ahead, ROWS * T::BYTES);
        let (mut totals, mut lows) = ([zero; N], [zero; N]);
        // SAFETY: a block of each row and of each copy, whose sums of 32 follow all blocks, and those of 16 are at its
        // end.
        let scale = unsafe {
            let heads = T::heads(four);
            add_columns::<S, T, N, 0>(four, &heads, &ys, places, &mut totals);
            add_columns::<S, T, N, 1>(four, &heads, &ys, places, &mut totals);
            add_columns::<S, T, N, 2>(four, &heads, &ys, places, &mut totals);
            add_columns::<S, T, N, 3>(four, &heads, &ys, places, &mut totals);
            let corrects = T::MINIMUMS || excess::<S, T>().is_some();
            for ahead in 0..if corrects { N } else { 0 } {
                let sums = if T::SUB == 32 {
                    sums_of_32[ahead]
                } else {
                    ys[ahead].add(4 + SUPER)
                };
                for (number, mins) in heads.mins.into_iter().enumerate().take(SUPER / T::SUB / 4) {
                    lows[ahead] =
                        add_words::<S>(lows[ahead], mins, eight_bytes(sums.add(8 * number)));
                }
            }
            heads.scale
        };
        for ahead in 0..N {
            if let Some(excess) = excess::<S, T>() {
                let excess = _mm256_sll_epi32(lows[ahead], _mm_cvtsi32_si128(excess));
                totals[ahead] = _mm256_sub_epi32(totals[ahead], excess);
            }
            let low = if T::MINIMUMS { lows[ahead] } else { zero };
            let both = _mm256_hadd_epi32(totals[ahead], low);
            // SAFETY: the factor of the block.
            let factor = _mm256_set1_ps(unsafe { ys[ahead].cast::<f32>().read_unaligned() });
            let sum = &mut sums[index % SUMS][ahead];
            *sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(both), _mm256_mul_ps(scale, factor), *sum);
            ys[ahead] = ys[ahead].wrapping_add(Q8K_BYTES);
            sums_of_32[ahead] = sums_of_32[ahead].wrapping_add(Q8K_SUMS);
        }
        four = four.map(|row| row.wrapping_add(T::BYTES));
    }
    for ahead in 0..N {
        let sum = |number: usize| sums[number][ahead];
        let sum = _mm256_add_ps(_mm256_add_ps(sum(0), sum(2)), _mm256_add_ps(sum(1), sum(3)));
        let (even, odd) = (_mm256_castps256_ps128(sum), _mm256_extractf128_ps::<1>(sum));
        let (sum, low) = (_mm_movelh_ps(even, odd), _mm_movehl_ps(odd, even));
        let sum = if T::MINIMUMS {
            _mm_sub_ps(sum, low)
        } else {
            sum
        };
        // SAFETY: four numbers in both types.
        job.rows
            .put_lanes(job.token + ahead, job.first, job.count, unsafe {
                transmute::<__m128, [f32; ROWS]>(sum)
            });
    }
}

/// Adds the products of 64 columns of four rows with those of `N` tokens, whose blocks are at `ys`.
///
/// # Safety
///
/// The machine has the set; `four` are blocks of the type.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn add_columns<S: Set, T: Super, const N: usize, const PART: usize>(
    four: Four,
    heads: &Heads,
    ys: &[*const u8; N],
    places: &Places,
    totals: &mut [__m256i; N],
) {
    let runs = runs_of_chunk::<T>();
    // Two runs of 32, or one half of each of four.
    let (chunk, half) = (2 * PART / runs, if T::SUB == 16 { PART % 2 } else { 0 });
    // SAFETY: the caller's promise.
    let quants = unsafe { T::unpack_four(four, chunk, half) };
    for run in 0..runs {
        let column = 32 * (runs * chunk + run) + 16 * half;
        let number = column / T::SUB;
        // SAFETY: 32 bytes; as many quants of each token as a block has; the machine has the set.
        unsafe {
            let place = _mm256_load_si256(places.0[number % 4].as_ptr().cast());
            let scale = _mm256_shuffle_epi8(heads.scales[number / 4], place);
            for ahead in 0..N {
                let total = &mut totals[ahead];
                let mut sum = _mm256_setzero_si256();
                for piece in 0..T::SUB / 8 {
                    let y = eight_bytes(ys[ahead].add(4 + column + 8 * piece));
                    let quants = quants[run][piece];
                    if !T::SIGNED {
                        sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(quants, y));
                    } else if S::DOT == Dot::Pairs {
                        // The sign moves to the other factor, since one of the two must be unsigned.
                        let (size, y) = (_mm256_abs_epi8(quants), _mm256_sign_epi8(y, quants));
                        *total = add_words::<S>(*total, _mm256_maddubs_epi16(size, y), scale);
                    } else {
                        let quants = _mm256_xor_si256(quants, _mm256_set1_epi8(i8::MIN));
                        sum = add_bytes::<S>(sum, quants, y);
                    }
                }
                if !T::SIGNED {
                    *total = add_words::<S>(*total, sum, scale);
                } else if S::DOT != Dot::Pairs {
                    let product = _mm256_mullo_epi32(sum, _mm256_srai_epi32::<16>(scale));
                    *total = _mm256_add_epi32(*total, product);
                }
            }
        }
    }
}

/// Broadcasts eight bytes to each 64 bits.
///
/// # Safety
///
/// They can be read.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn eight_bytes(at: *const u8) -> __m256i {
    // SAFETY: the caller's promise.
    _mm256_set1_epi64x(unsafe { at.cast::<i64>().read_unaligned() })
}

/// Positions of each of four 16-bit numbers of each row.
#[repr(align(32))]
struct Places([[u8; 32]; 4]);

static PLACES: Places = Places({
    const BYTES: [u8; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];
    let mut places = [[0; 32]; 4];
    let mut number = 0;
    while number < 4 {
        let mut at = 0;
        while at < 32 {
            places[number][at] = BYTES[at % 16 / 8 * 8 + 2 * number + at % 2];
            at += 1;
        }
        number += 1;
    }
    places
});

/// Rows with blocks of 32.
///
/// # Safety
///
/// The machine has AVX2, FMA, F16C and the set; `rows` is as its fields say.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn small_rows<S: Set, T: Small>(rows: &Rows<'_>) {
    if rows.tokens >= T::TILE_FROM {
        // SAFETY: the caller's promise.
        unsafe { tile256::small_rows::<S, T>(rows) };
        return;
    }
    for first in (0..rows.weights.len() / rows.row_bytes.max(1)).step_by(ROWS) {
        // SAFETY: existing rows and tokens.
        unsafe {
            for_tokens!(rows.tokens, |token| small_four::<S, T>(&Job::new(
                rows, first, token
            )));
        };
    }
}

/// Two sums of each of two blocks of four rows: of rows 0 and 1, and of rows 2 and 3.
type Pair = __m256;

/// # Safety
///
/// As in [`small_rows`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn small_four<S: Set, T: Small, const N: usize>(job: &Job<'_, N>) {
    let (mut four, mut ahead) = (job.rows.starts(job.first), job.ahead());
    let blocks = job.rows.columns / BLOCK;
    let mut sums: [[Pair; N]; SUMS / 2] = [[_mm256_setzero_ps(); N]; SUMS / 2];
    for index in (0..blocks / 2 * 2).step_by(2) {
        fetch(&mut ahead, 2 * ROWS * T::BYTES);
        // SAFETY: two blocks of each row, and of each copy.
        unsafe {
            small_pair::<S, T, N, true>(
                four,
                &job.copies,
                (index, blocks),
                &mut sums[index / 2 % 2],
            );
        };
        four = four.map(|row| row.wrapping_add(2 * T::BYTES));
    }
    if !blocks.is_multiple_of(2) {
        let index = blocks - 1;
        // SAFETY: the last block.
        unsafe {
            small_pair::<S, T, N, false>(
                four,
                &job.copies,
                (index, blocks),
                &mut sums[index / 2 % 2],
            );
        };
    }
    for ahead in 0..N {
        let sum = _mm256_add_ps(sums[0][ahead], sums[1][ahead]);
        let (even, odd) = (_mm256_castps256_ps128(sum), _mm256_extractf128_ps::<1>(sum));
        let sum = _mm_add_ps(_mm_movelh_ps(even, odd), _mm_movehl_ps(odd, even));
        // SAFETY: four numbers in both types.
        job.rows
            .put_lanes(job.token + ahead, job.first, job.count, unsafe {
                transmute::<__m128, [f32; ROWS]>(sum)
            });
    }
}

/// Adds two blocks of four rows (the first one's index, and the number of blocks per row), or one if not `BOTH`, to the
/// sums of each token.
///
/// # Safety
///
/// The machine has the set; such blocks exist at `four`, and in each copy.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn small_pair<S: Set, T: Small, const N: usize, const BOTH: bool>(
    four: Four,
    copies: &[*const u8; N],
    (index, blocks): (usize, usize),
    sums: &mut [Pair; N],
) {
    let zero = _mm256_setzero_si256();
    let second = if BOTH { T::BYTES } else { 0 };
    let mut totals = [[zero; 2]; N];
    for block in 0..if BOTH { 2 } else { 1 } {
        // SAFETY: a block of each row.
        let quants = unsafe { T::unpack_four(four.map(|row| row.wrapping_add(block * T::BYTES))) };
        for ahead in 0..N {
            let y = copies[ahead].wrapping_add((index + block) * Q8_0_BYTES + 2);
            // SAFETY: 32 quants of the copy; the machine has the set.
            totals[ahead][block] = unsafe { small_total::<S, T>(quants, y) };
        }
    }
    let [a, b, c, d] = four;
    let further = |row: *const u8| row.wrapping_add(second);
    // Of rows 0 and 1 first, then of 2 and 3.
    let eight: Eight = [a, b, further(a), further(b), c, d, further(c), further(d)];
    // SAFETY: blocks, whose scale is followed by their minimum if any.
    let (scales, mins) = unsafe {
        (
            T::scales(eight),
            if T::MINIMUM {
                halves_of_eight(eight.map(|block| block.wrapping_add(2)))
            } else {
                _mm256_setzero_ps()
            },
        )
    };
    for ahead in 0..N {
        let behind = copies[ahead].wrapping_add(blocks * Q8_0_BYTES + 4 * index);
        // SAFETY: the blocks are followed by their factors, then by -128 times their sums.
        let (factors, starts) = unsafe {
            if BOTH {
                (eight_bytes(behind), eight_bytes(behind.add(4 * blocks)))
            } else {
                let four_bytes =
                    |at: *const u8| _mm_cvtsi32_si128(at.cast::<i32>().read_unaligned());
                let one = |at| _mm256_broadcastq_epi64(four_bytes(at));
                (one(behind), one(behind.add(4 * blocks)))
            }
        };
        let factors = _mm256_castsi256_ps(_mm256_shuffle_epi32::<0b01_01_00_00>(factors));
        let starts = _mm256_shuffle_epi32::<0b01_01_00_00>(starts);
        let sum = &mut sums[ahead];
        if T::MINIMUM {
            let ys = _mm256_mul_ps(_mm256_cvtepi32_ps(starts), _mm256_set1_ps(-1.0 / 128.0));
            *sum = _mm256_fmadd_ps(ys, _mm256_mul_ps(mins, factors), *sum);
        }
        let mut total = _mm256_hadd_epi32(totals[ahead][0], totals[ahead][1]);
        if let Some(shift) = less::<S, T>() {
            total = _mm256_add_epi32(total, _mm256_sra_epi32(starts, _mm_cvtsi32_si128(shift)));
        }
        *sum = _mm256_fmadd_ps(
            _mm256_cvtepi32_ps(total),
            _mm256_mul_ps(scales, factors),
            *sum,
        );
    }
}

/// The products of 32 columns of four rows with those of a token at `y`, in two lanes of each row.
///
/// # Safety
///
/// There are 32 quants at `y`; the machine has the set.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn small_total<S: Set, T: Small>(quants: [__m256i; 4], y: *const u8) -> __m256i {
    let zero = _mm256_setzero_si256();
    let (mut total, mut words) = (zero, zero);
    for (piece, mut quants) in quants.into_iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe {
            let y = eight_bytes(y.add(8 * piece));
            if S::DOT != Dot::Pairs {
                if T::ADDED == 128 {
                    quants = _mm256_xor_si256(quants, _mm256_set1_epi8(i8::MIN));
                }
                total = add_bytes::<S>(total, quants, y);
            } else if T::ADDED == 128 {
                // The sign moves to the other factor, since one of the two must be unsigned.
                total = add_bytes::<S>(total, _mm256_abs_epi8(quants), _mm256_sign_epi8(y, quants));
            } else {
                words = _mm256_add_epi16(words, _mm256_maddubs_epi16(quants, y));
            }
        }
    }
    if S::DOT == Dot::Pairs && T::ADDED != 128 {
        // SAFETY: as above.
        total = unsafe { add_words::<S>(total, words, _mm256_set1_epi16(1)) };
    }
    total
}

/// The sum of eight lanes, by halves.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn total(lanes: __m256) -> f32 {
    let four = _mm_add_ps(
        _mm256_castps256_ps128(lanes),
        _mm256_extractf128_ps::<1>(lanes),
    );
    let halves = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(halves, _mm_movehdup_ps(halves)))
}

#[cfg(test)]
mod tests {
    use super::{
        super::{
            isa::Isa,
            quant::{Format, quantize_q8_0, quantize_q8k},
            set256,
            share::Share,
            test_numbers::numbers,
            unpack256 as u,
        },
        *,
    };

    type Kernel = unsafe fn(&Rows<'_>);

    /// A type: its name, columns and bytes of a block, positions of its scales, and its kernels.
    type Kind = (&'static str, usize, usize, &'static [usize], Kernel, Kernel);

    macro_rules! kinds {
        ($function:ident, $columns:expr, $($name:ident $bytes:expr, $scales:expr;)*) => {
            [$((
                stringify!($name),
                $columns,
                $bytes,
                const { let scales: &'static [usize] = &$scales; scales },
                $function::<set256::Avx2, u::$name> as Kernel,
                $function::<set256::EmulatedVnni, u::$name> as Kernel,
            )),*]
        };
    }

    /// Products of `rows` with `tokens` tokens.
    fn products(
        kernel: Kernel,
        (columns, row_bytes): (usize, usize),
        rows: &[u8],
        copies: &[u8],
        tokens: usize,
    ) -> Vec<u32> {
        let count = rows.len() / row_bytes;
        let mut out = vec![0f32; count * tokens];
        let share = Share::new(&mut out);
        let rows = Rows {
            weights: rows,
            row_bytes,
            columns,
            floats: &[],
            copies,
            copy_step: copies.len() / tokens,
            tokens,
            out: &share,
            stride: count,
            first: 0,
        };
        // SAFETY: whole rows and copies; the machine has AVX2, and no other operation runs.
        unsafe { kernel(&rows) };
        out.into_iter().map(f32::to_bits).collect()
    }

    #[test]
    fn products_of_bytes_by_one_instruction_have_the_bits_of_those_by_two() {
        if !Isa::available().contains(&Isa::Avx2) {
            return;
        }
        let supers = kinds! { super_rows, SUPER,
            Q4K 144, [0, 2]; Q5K 176, [0, 2]; Q6K 210, [208]; Q2K 84, [80, 82]; Q3K 110, [108];
            IQ4XS 136, [0];
        };
        let small = kinds! { small_rows, BLOCK,
            Q8_0 34, [0]; Q4_0 18, [0]; Q4_1 20, [0, 2]; Q5_0 22, [0]; Q5_1 24, [0, 2];
            IQ4NL 18, [0]; MXFP4 17, [0];
        };
        let all: Vec<Kind> = supers.into_iter().chain(small).collect();
        let columns = 2 * SUPER;
        for (name, block, bytes, scales, pairs, fours) in all {
            let row_bytes = columns / block * bytes;
            // All values of a byte, and the least and the largest alone, with scales of one.
            for fill in [None, Some(0xff), Some(0x80), Some(0x7f), Some(0)] {
                let byte =
                    |at: usize| fill.unwrap_or_else(|| u8::try_from(at * 151 % 256).unwrap());
                let mut rows: Vec<u8> = (0..5 * row_bytes).map(byte).collect();
                for block in rows.chunks_mut(bytes) {
                    for &at in scales {
                        let one: &[u8] = if name == "MXFP4" { &[128] } else { &[0, 0x3c] };
                        block[at..at + one.len()].copy_from_slice(one);
                    }
                }
                for tokens in [1, 3, 9, 41] {
                    for input in [
                        numbers(tokens * columns, 3),
                        vec![1.0; tokens * columns],
                        vec![-1.0; tokens * columns],
                    ] {
                        let format = if block == SUPER {
                            Format::Q8K
                        } else {
                            Format::Q8_0
                        };
                        let mut copies = vec![0u8; tokens * format.row_bytes(columns)];
                        let step = format.row_bytes(columns);
                        for (input, copy) in input.chunks(columns).zip(copies.chunks_mut(step)) {
                            if block == SUPER {
                                quantize_q8k(Isa::Baseline, input, copy);
                            } else {
                                quantize_q8_0(Isa::Baseline, input, copy);
                            }
                        }
                        let shape = (columns, row_bytes);
                        let one = products(pairs, shape, &rows, &copies, tokens);
                        assert!(
                            one == products(fours, shape, &rows, &copies, tokens),
                            "{name} {fill:?} {tokens}"
                        );
                    }
                }
            }
        }
    }
}
