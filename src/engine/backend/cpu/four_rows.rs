//! Products of four Q4_K rows at once with one token, for AVX-512.
//!
//! In Q4_K every byte contains two weights, so that the work per byte, not memory, limits a core: 19 GB/s with one row
//! at a time where memory provides 28. Four rows share the preparation of the token's block: its registers are loaded
//! and permuted to the order of the nibbles once, the heads of four blocks are unpacked together, one lane per row, and
//! the last steps of the four totals are done in one register. The four lanes of a row's sum (see [`super::avx512`])
//! are therefore four registers here, and need no last sum across lanes. The order of every sum is the same as there.
//!
//! Four rows are four streams, which the hardware prefetcher does not recognise as one contiguous region (10 GB/s): the
//! rows after them are prefetched in memory order, one block's bytes per block. For long rows that would exceed the
//! first-level cache together with the current data: they are processed one by one.

use std::{arch::x86_64::*, mem::transmute};

use super::{
    avx512::{self, add_pairs, sixteen_sums},
    quant::{Q8K_BYTES, Q8K_SUMS, SUPER},
    rows::Rows,
};

/// Bytes of a Q4_K block.
const BYTES: usize = 144;

/// Rows processed together.
const ROWS: usize = 4;

/// Most blocks of a row that is not long: four such rows are 9 KiB, and so are the four prefetched ones.
const BLOCKS_MAX: usize = 16;

/// Constants for unpacking heads and quants.
struct Constants {
    low: __m512i,
    six: __m512i,
    two: __m512i,
    /// Shifts of the third word of a head's scales, for scales and for minimums.
    third: __m512i,
    /// For each register of quants, the scales of its two runs of 32, as 16-bit numbers.
    scales: [__m512i; 4],
    /// The first number of each 128 bits.
    firsts: __m512i,
}

impl Constants {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    fn new() -> Self {
        // Scales are the upper half of 128 bits; the upper byte of each 16-bit number is zero (bit 7 of its index).
        let scales = |run: i16| {
            let index = |run: i16| _mm256_set1_epi16(i16::MIN | (8 + run));
            _mm512_inserti64x4::<1>(_mm512_castsi256_si512(index(run)), index(run + 2))
        };
        Self {
            low: _mm512_set1_epi8(15),
            six: _mm512_set1_epi8(63),
            two: _mm512_set1_epi8(48),
            third: _mm512_set4_epi32(0, 4, 0, 0),
            scales: [scales(0), scales(1), scales(4), scales(5)],
            firsts: _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12, 8, 4, 0),
        }
    }

    /// Scales and minimums of the blocks with these heads, one row per 128 bits: eight scales as bytes in the upper
    /// half, and eight minimums as 16-bit numbers.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    fn scales_and_mins(&self, heads: __m512i) -> (__m512i, __m512i) {
        // Words 1 and 2 are the first four scales and minimums in six bits each, with two bits of the last four above
        // them, whose lower four bits are in word 3.
        let first = _mm512_and_si512(heads, self.six);
        let upper = _mm512_and_si512(_mm512_srli_epi32::<2>(heads), self.two);
        let lower = _mm512_srlv_epi32(_mm512_shuffle_epi32::<0b11_11_11_11>(heads), self.third);
        let last = _mm512_or_si512(_mm512_and_si512(lower, self.low), upper);
        let mins = _mm512_unpackhi_epi32(first, last);
        (
            _mm512_unpacklo_epi32(first, last),
            _mm512_unpacklo_epi8(mins, _mm512_setzero_si512()),
        )
    }

    /// The total of one block, in sixteen lanes. `scales` contains those of its row in each 128 bits.
    ///
    /// # Safety
    ///
    /// There are 128 bytes of quants at `quants`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    unsafe fn total(&self, quants: *const u8, scales: __m512i, token: [__m512i; 4]) -> __m512i {
        let scale = |register: usize| _mm512_shuffle_epi8(scales, self.scales[register]);
        // SAFETY: the caller's promise.
        let both = |half: usize| unsafe { _mm512_loadu_si512(quants.add(64 * half).cast()) };
        let lower = |both| _mm512_and_si512(both, self.low);
        let upper = |both| _mm512_and_si512(_mm512_srli_epi16::<4>(both), self.low);
        let (first, second) = (both(0), both(1));
        let sum = _mm512_madd_epi16(_mm512_maddubs_epi16(lower(first), token[0]), scale(0));
        let sum = add_pairs(sum, _mm512_maddubs_epi16(upper(first), token[1]), scale(1));
        let sum = add_pairs(sum, _mm512_maddubs_epi16(lower(second), token[2]), scale(2));
        add_pairs(sum, _mm512_maddubs_epi16(upper(second), token[3]), scale(3))
    }
}

/// Rows of Q4_K.
///
/// # Safety
///
/// The machine has the instructions of [`Isa::Avx512`](super::isa::Isa::Avx512); `rows` is as its fields say.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn rows_q4k(rows: &Rows<'_>) {
    if rows.tokens > 1 || rows.columns / SUPER > BLOCKS_MAX {
        // SAFETY: the caller's promise.
        unsafe { avx512::rows_q4k(rows) };
        return;
    }
    let count = rows.weights.len() / rows.row_bytes.max(1);
    let constants = Constants::new();
    for first in (0..count).step_by(ROWS) {
        let four: [_; ROWS] = rows.starts(first);
        let ahead = four[0].wrapping_add(ROWS * rows.row_bytes);
        // SAFETY: whole rows, and the copy of the token.
        let products =
            unsafe { products(&constants, four, ahead, rows.copy(0), rows.columns / SUPER) };
        // SAFETY: four numbers in both types.
        rows.put_lanes(0, first, count, unsafe {
            transmute::<__m128, [f32; ROWS]>(products)
        });
    }
}

/// The products of four rows with a token. Prefetches the bytes from `ahead` on.
///
/// # Safety
///
/// Each row has `blocks` blocks, and so has the copy of the token, followed by its sums.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn products(
    constants: &Constants,
    mut four: [*const u8; ROWS],
    mut ahead: *const u8,
    copy: *const u8,
    blocks: usize,
) -> __m128 {
    let (mut y, mut sums_of_32) = (copy, copy.wrapping_add(blocks * Q8K_BYTES));
    let (mut sums, mut mins) = ([_mm_setzero_ps(); 4], [_mm_setzero_ps(); 4]);
    for _ in 0..blocks {
        for line in 0..ROWS * BYTES / 64 {
            _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(64 * line).cast());
        }
        ahead = ahead.wrapping_add(ROWS * BYTES);
        // SAFETY: sixteen bytes are the head of a block.
        let head = |row: usize| unsafe { _mm_loadu_si128(four[row].cast()) };
        let heads = _mm512_inserti32x4::<1>(_mm512_castsi128_si512(head(0)), head(1));
        let heads = _mm512_inserti32x4::<3>(_mm512_inserti32x4::<2>(heads, head(2)), head(3));
        let (scales, small) = constants.scales_and_mins(heads);
        // SAFETY: 256 quants after the factor of the block, and eight sums of 32.
        let (factor, token, of_32) = unsafe {
            let quants = |at: usize| _mm512_loadu_si512(y.add(4 + 64 * at).cast());
            (
                _mm_set1_ps(y.cast::<f32>().read_unaligned()),
                [quants(0), quants(1), quants(2), quants(3)],
                _mm512_broadcast_i32x4(_mm_loadu_si128(sums_of_32.cast())),
            )
        };
        // The lower nibbles of 64 bytes are runs 0 and 2 of 32 weights, the upper ones runs 1 and 3.
        let token = [
            _mm512_shuffle_i64x2::<0x44>(token[0], token[1]),
            _mm512_shuffle_i64x2::<0xee>(token[0], token[1]),
            _mm512_shuffle_i64x2::<0x44>(token[2], token[3]),
            _mm512_shuffle_i64x2::<0xee>(token[2], token[3]),
        ];
        // SAFETY: 128 bytes of quants follow the head of a block.
        let total =
            |row: usize, scales| unsafe { constants.total(four[row].add(16), scales, token) };
        let total = sixteen_sums(
            total(0, _mm512_shuffle_i32x4::<0x00>(scales, scales)),
            total(1, _mm512_shuffle_i32x4::<0x55>(scales, scales)),
            total(2, _mm512_shuffle_i32x4::<0xaa>(scales, scales)),
            total(3, _mm512_shuffle_i32x4::<0xff>(scales, scales)),
        );
        let min = _mm512_madd_epi16(small, of_32);
        let min = _mm512_add_epi32(min, _mm512_shuffle_epi32::<0b10_11_00_01>(min));
        let min = _mm512_add_epi32(min, _mm512_shuffle_epi32::<0b01_00_11_10>(min));
        let firsts = |of| _mm512_castsi512_si128(_mm512_permutexvar_epi32(constants.firsts, of));
        // The first word of a head contains the scale of its scales and that of its minimums, in `f16`.
        let both = _mm256_cvtph_ps(firsts(heads));
        let (low, high) = (
            _mm256_castps256_ps128(both),
            _mm256_extractf128_ps::<1>(both),
        );
        let (scale, min_scale) = (
            _mm_shuffle_ps::<0b10_00_10_00>(low, high),
            _mm_shuffle_ps::<0b11_01_11_01>(low, high),
        );
        // The sums of each fourth block, in turn.
        let next = |sums: [__m128; 4], total, scale| {
            let sum = _mm_fmadd_ps(_mm_cvtepi32_ps(total), _mm_mul_ps(scale, factor), sums[0]);
            [sums[1], sums[2], sums[3], sum]
        };
        sums = next(sums, total, scale);
        mins = next(mins, firsts(min), min_scale);
        four = four.map(|row| row.wrapping_add(BYTES));
        (y, sums_of_32) = (y.wrapping_add(Q8K_BYTES), sums_of_32.wrapping_add(Q8K_SUMS));
    }
    // Independent of the final turn, the sums of even and of odd blocks are added first, like the lanes of a row
    // elsewhere.
    let last =
        |sums: [__m128; 4]| _mm_add_ps(_mm_add_ps(sums[0], sums[2]), _mm_add_ps(sums[1], sums[3]));
    _mm_sub_ps(last(sums), last(mins))
}
