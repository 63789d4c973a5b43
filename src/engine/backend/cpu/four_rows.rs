//! Products of four Q4_K or IQ4_XS rows at once with one token, for AVX-512.
//!
//! In these types every byte contains two weights, so that the work per byte, not memory, limits a core: 19 GB/s with
//! one row at a time where memory provides 28. Four rows share the preparation of the token's block: its registers are
//! loaded and permuted to the order of the nibbles once, the heads of four blocks are unpacked together, one lane per
//! row, and the last steps of the four totals are done in one register. The four lanes of a row's sum (see
//! [`super::avx512`]) are therefore four registers here, and need no last sum across lanes. The order of every sum is
//! the same as there.
//!
//! Four rows are four streams, which the hardware prefetcher does not recognise as one contiguous region (10 GB/s): the
//! rows after them are prefetched in memory order, one block's bytes per block. For long rows that would exceed the
//! first-level cache together with the current data: they are processed one by one.

use std::{arch::x86_64::*, mem::transmute};

use super::{
    avx512::{self, add_pairs, sixteen_sums},
    few512,
    quant::{Q8K_BYTES, Q8K_SUMS, SUPER},
    rows::Rows,
    table::{IQ4, Table, raised},
    unpack256,
};

/// Rows processed together.
const ROWS: usize = 4;

/// A type with 256 weights in a block, four bits each.
trait Kind {
    /// Bytes of a block, and those in front of its quants.
    const BYTES: usize;
    const HEAD: usize;
    /// Whether there are minimums, whose scale follows that of the scales; if not, quants are reduced by `1 << LESS`,
    /// and minimums are the scales.
    const MINIMUMS: bool;
    const LESS: i32 = 0;
    /// The scales of four blocks.
    type Scales;

    /// # Safety
    ///
    /// The machine has the instructions of [`Isa::Avx512`](super::isa::Isa::Avx512).
    unsafe fn new() -> Self;

    /// Scales of the blocks with these heads, one row per 128 bits, and their eight minimums as 16-bit numbers.
    ///
    /// # Safety
    ///
    /// The machine has the instructions of [`Isa::Avx512`](super::isa::Isa::Avx512).
    unsafe fn scales_and_mins(&self, heads: __m512i) -> (Self::Scales, __m512i);

    /// The token's quants in the order of the lower and upper halves of each 64 bytes.
    ///
    /// # Safety
    ///
    /// As above.
    unsafe fn ordered(token: [__m512i; 4]) -> [__m512i; 4];

    /// The total of the block of row `ROW`, in sixteen lanes.
    ///
    /// # Safety
    ///
    /// As above; there are 128 bytes of quants at `quants`.
    unsafe fn total<const ROW: usize>(
        &self,
        quants: *const u8,
        scales: &Self::Scales,
        token: [__m512i; 4],
    ) -> __m512i;
}

/// Most blocks of a row that is not long: four such rows are 9 KiB, and so are the four prefetched ones.
const BLOCKS_MAX: usize = 16;

/// Constants for unpacking Q4_K.
struct Q4K {
    low: __m512i,
    six: __m512i,
    two: __m512i,
    /// Shifts of the third word of a head's scales, for scales and for minimums.
    third: __m512i,
    /// For each register of quants, the scales of its two runs of 32, as 16-bit numbers.
    scales: [__m512i; 4],
}

impl Kind for Q4K {
    const BYTES: usize = 144;
    const HEAD: usize = 16;
    const MINIMUMS: bool = true;
    /// Eight bytes in the upper half of each 128 bits.
    type Scales = __m512i;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    unsafe fn new() -> Self {
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
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    unsafe fn scales_and_mins(&self, heads: __m512i) -> (__m512i, __m512i) {
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

    /// The lower nibbles of 64 bytes are runs 0 and 2 of 32 weights, the upper ones runs 1 and 3.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    unsafe fn ordered(token: [__m512i; 4]) -> [__m512i; 4] {
        [
            _mm512_shuffle_i64x2::<0x44>(token[0], token[1]),
            _mm512_shuffle_i64x2::<0xee>(token[0], token[1]),
            _mm512_shuffle_i64x2::<0x44>(token[2], token[3]),
            _mm512_shuffle_i64x2::<0xee>(token[2], token[3]),
        ]
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    unsafe fn total<const ROW: usize>(
        &self,
        quants: *const u8,
        scales: &__m512i,
        token: [__m512i; 4],
    ) -> __m512i {
        // Those of the row in each 128 bits.
        let scales = match ROW {
            0 => _mm512_shuffle_i32x4::<0x00>(*scales, *scales),
            1 => _mm512_shuffle_i32x4::<0x55>(*scales, *scales),
            2 => _mm512_shuffle_i32x4::<0xaa>(*scales, *scales),
            _ => _mm512_shuffle_i32x4::<0xff>(*scales, *scales),
        };
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

/// Constants for unpacking IQ4_XS.
struct IQ4XS {
    low: __m512i,
    table: __m512i,
    /// The bytes with four bits of each scale, and with two; and factors that move these to one place.
    lower: [__m512i; 2],
    upper: [__m512i; 2],
    /// Indices of the scales of a row's first four runs among those of two rows; the last four follow.
    first: __m512i,
}

impl Kind for IQ4XS {
    const BYTES: usize = 136;
    const HEAD: usize = 8;
    const MINIMUMS: bool = false;
    const LESS: i32 = 7;
    /// Eight of each of two rows, as dwords.
    type Scales = [__m512i; 2];

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    unsafe fn new() -> Self {
        let words = |low: i64, high: i64| _mm512_broadcast_i32x4(_mm_set_epi64x(high, low));
        // SAFETY: sixteen bytes.
        let table = unsafe { _mm_loadu_si128(RAISED.as_ptr().cast()) };
        Self {
            low: _mm512_set1_epi8(15),
            table: _mm512_broadcast_i32x4(table),
            // The upper byte of each 16-bit number is zero (bit 7 of its index).
            lower: [
                words(
                    0x8005_8005_8004_8004_u64.cast_signed(),
                    0x8007_8007_8006_8006_u64.cast_signed(),
                ),
                _mm512_set1_epi64(0x0001_0010_0001_0010),
            ],
            upper: [
                words(
                    0x8002_8002_8002_8002_u64.cast_signed(),
                    0x8003_8003_8003_8003_u64.cast_signed(),
                ),
                _mm512_set1_epi64(0x0001_0004_0010_0040),
            ],
            first: _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0),
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    unsafe fn scales_and_mins(&self, heads: __m512i) -> ([__m512i; 2], __m512i) {
        let bits = |[places, factors]: [__m512i; 2]| {
            _mm512_mullo_epi16(_mm512_shuffle_epi8(heads, places), factors)
        };
        let lower = _mm512_and_si512(
            _mm512_srli_epi16::<4>(bits(self.lower)),
            _mm512_set1_epi16(15),
        );
        let upper = _mm512_and_si512(
            _mm512_srli_epi16::<2>(bits(self.upper)),
            _mm512_set1_epi16(0x30),
        );
        let scales = _mm512_sub_epi16(_mm512_or_si512(lower, upper), _mm512_set1_epi16(32));
        let two = [
            _mm512_castsi512_si256(scales),
            _mm512_extracti64x4_epi64::<1>(scales),
        ];
        (two.map(|two| _mm512_cvtepi16_epi32(two)), scales)
    }

    /// The lower nibbles of 64 bytes are the first halves of four runs of 32 weights, the upper ones the last halves.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    unsafe fn ordered(token: [__m512i; 4]) -> [__m512i; 4] {
        [
            _mm512_shuffle_i32x4::<0b10_00_10_00>(token[0], token[1]),
            _mm512_shuffle_i32x4::<0b11_01_11_01>(token[0], token[1]),
            _mm512_shuffle_i32x4::<0b10_00_10_00>(token[2], token[3]),
            _mm512_shuffle_i32x4::<0b11_01_11_01>(token[2], token[3]),
        ]
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    unsafe fn total<const ROW: usize>(
        &self,
        quants: *const u8,
        scales: &[__m512i; 2],
        token: [__m512i; 4],
    ) -> __m512i {
        let half = |half: usize| {
            // SAFETY: the caller's promise.
            let both = unsafe { _mm512_loadu_si512(quants.add(64 * half).cast()) };
            let lower = _mm512_and_si512(both, self.low);
            let upper = _mm512_and_si512(_mm512_srli_epi16::<4>(both), self.low);
            let looked_up = |indices| _mm512_shuffle_epi8(self.table, indices);
            let sum =
                _mm512_dpbusd_epi32(_mm512_setzero_si512(), looked_up(lower), token[2 * half]);
            let sum = _mm512_dpbusd_epi32(sum, looked_up(upper), token[2 * half + 1]);
            let ahead = i32::try_from(8 * (ROW % 2) + 4 * half).unwrap_or(0);
            let places = _mm512_add_epi32(self.first, _mm512_set1_epi32(ahead));
            _mm512_mullo_epi32(sum, _mm512_permutexvar_epi32(places, scales[ROW / 2]))
        };
        _mm512_add_epi32(half(0), half(1))
    }
}

/// The values of IQ4_XS, unsigned.
const RAISED: Table = raised(IQ4, 128);

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
    // SAFETY: as above.
    unsafe { multiply::<Q4K>(rows) };
}

/// Rows of IQ4_XS.
///
/// # Safety
///
/// As in [`rows_q4k`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn rows_iq4_xs(rows: &Rows<'_>) {
    // SAFETY: the caller's promise.
    unsafe {
        if rows.tokens > 1 || rows.columns / SUPER > BLOCKS_MAX {
            few512::super_rows::<unpack256::IQ4XS>(rows);
        } else {
            multiply::<IQ4XS>(rows);
        }
    }
}

/// All rows, which are not long, times one token.
///
/// # Safety
///
/// As in [`rows_q4k`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn multiply<K: Kind>(rows: &Rows<'_>) {
    let count = rows.weights.len() / rows.row_bytes.max(1);
    // SAFETY: the caller's promise.
    let kind = unsafe { K::new() };
    for first in (0..count).step_by(ROWS) {
        let four: [_; ROWS] = rows.starts(first);
        let ahead = four[0].wrapping_add(ROWS * rows.row_bytes);
        // SAFETY: whole rows, and the copy of the token.
        let products = unsafe { products(&kind, four, ahead, rows.copy(0), rows.columns / SUPER) };
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
unsafe fn products<K: Kind>(
    kind: &K,
    mut four: [*const u8; ROWS],
    mut ahead: *const u8,
    copy: *const u8,
    blocks: usize,
) -> __m128 {
    let (mut y, mut sums_of_32) = (copy, copy.wrapping_add(blocks * Q8K_BYTES));
    let (mut sums, mut mins) = ([_mm_setzero_ps(); 4], [_mm_setzero_ps(); 4]);
    // The first number of each 128 bits.
    let places = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12, 8, 4, 0);
    for _ in 0..blocks {
        for line in 0..ROWS * K::BYTES / 64 {
            _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(64 * line).cast());
        }
        ahead = ahead.wrapping_add(ROWS * K::BYTES);
        // SAFETY: sixteen bytes are the head of a block.
        let head = |row: usize| unsafe { _mm_loadu_si128(four[row].cast()) };
        let heads = _mm512_inserti32x4::<1>(_mm512_castsi128_si512(head(0)), head(1));
        let heads = _mm512_inserti32x4::<3>(_mm512_inserti32x4::<2>(heads, head(2)), head(3));
        // SAFETY: 256 quants after the factor of the block, and eight sums of 32; the machine has the instructions.
        let (factor, token, of_32, (scales, small)) = unsafe {
            let quants = |at: usize| _mm512_loadu_si512(y.add(4 + 64 * at).cast());
            (
                _mm_set1_ps(y.cast::<f32>().read_unaligned()),
                K::ordered([quants(0), quants(1), quants(2), quants(3)]),
                _mm512_broadcast_i32x4(_mm_loadu_si128(sums_of_32.cast())),
                kind.scales_and_mins(heads),
            )
        };
        let quants = four.map(|row| row.wrapping_add(K::HEAD));
        // SAFETY: 128 bytes of quants follow the head of a block.
        let total = unsafe {
            sixteen_sums(
                kind.total::<0>(quants[0], &scales, token),
                kind.total::<1>(quants[1], &scales, token),
                kind.total::<2>(quants[2], &scales, token),
                kind.total::<3>(quants[3], &scales, token),
            )
        };
        let min = _mm512_madd_epi16(small, of_32);
        let min = _mm512_add_epi32(min, _mm512_shuffle_epi32::<0b10_11_00_01>(min));
        let min = _mm512_add_epi32(min, _mm512_shuffle_epi32::<0b01_00_11_10>(min));
        let firsts = |of| _mm512_castsi512_si128(_mm512_permutexvar_epi32(places, of));
        // The first word of a head contains the scale of its scales and that of its minimums, if any, in `f16`.
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
        if K::MINIMUMS {
            sums = next(sums, total, scale);
            mins = next(mins, firsts(min), min_scale);
        } else {
            let less = _mm_sll_epi32(firsts(min), _mm_cvtsi32_si128(K::LESS));
            sums = next(sums, _mm_sub_epi32(total, less), scale);
        }
        four = four.map(|row| row.wrapping_add(K::BYTES));
        (y, sums_of_32) = (y.wrapping_add(Q8K_BYTES), sums_of_32.wrapping_add(Q8K_SUMS));
    }
    // Independent of the final turn, the sums of even and of odd blocks are added first, like the lanes of a row
    // elsewhere.
    let last =
        |sums: [__m128; 4]| _mm_add_ps(_mm_add_ps(sums[0], sums[2]), _mm_add_ps(sums[1], sums[3]));
    if K::MINIMUMS {
        _mm_sub_ps(last(sums), last(mins))
    } else {
        last(sums)
    }
}
