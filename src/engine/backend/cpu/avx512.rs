//! Products with quantised rows for AVX-512.
//!
//! This is the single-token form; [`few512`] has the form for a few tokens, and [`tile`](super::tile) the one for many.
//! All agree to the bit, since each sums a block in integers, then every fourth block as `sum + total · (scale ·
//! factor)` in one rounding, then the four sums.
//!
//! K-quants share one inner loop: a block of 256 weights is unpacked into four registers of unsigned quants and four of
//! 16-bit scales. The constant part of the quants (their minimum, or the 32 that Q6_K subtracts) is applied through the
//! sums stored in Q8_K blocks. Four blocks share the last steps of their sums; rows are read one after another. Q4_K,
//! which takes the most work per byte, processes four rows at once in [`four_rows`](super::four_rows), except for long
//! rows.
//!
//! Q8_0, which takes the least work per byte, also processes four rows at once, which share the loads of the token, so
//! that more memory reads are in flight; the hardware prefetcher does not recognise four streams as one contiguous
//! region, so the rows after them are prefetched explicitly in memory order.
//!
//! Reads the file's own block layout: see `block_q4_K` and related types in ggml's `ggml-common.h`.

use std::arch::x86_64::*;

use super::{
    few512,
    quant::{BLOCK, Q8_0_BYTES, Q8K_BYTES, SUPER},
    rows::Rows,
    tile::BLOCKS as LANES,
    unpack256,
};

/// Prefetches a block of weights; the hardware prefetcher stops at page boundaries.
#[inline]
#[target_feature(enable = "avx512f")]
fn fetch<const BYTES: usize>(block: *const u8) {
    for line in 0..BYTES.div_ceil(64) {
        _mm_prefetch::<_MM_HINT_T0>(block.wrapping_add(64 * line).cast());
    }
}

/// Prefetches `BYTES` of the rows after the current ones: into the first-level cache if both fit, otherwise one level
/// further away.
#[inline]
#[target_feature(enable = "avx512f")]
fn fetch_next<const BYTES: usize>(ahead: *const u8, long: bool) {
    for line in 0..BYTES.div_ceil(64) {
        let line = ahead.wrapping_add(64 * line).cast();
        if long {
            _mm_prefetch::<_MM_HINT_T1>(line);
        } else {
            _mm_prefetch::<_MM_HINT_T0>(line);
        }
    }
}

/// Bytes of such rows that fit the first-level cache together with the rows after them and the token: half of its usual
/// size.
const NEAREST_MAX: usize = 16 * 1024;

/// Prefetch distance that hides memory latency: some 100 ns of work on one core.
const FETCH_AHEAD: usize = 2048;

/// A block of 256 weights, prepared for `maddubs` and `dpwssd`.
struct Block {
    quants: [__m512i; 4],
    scales: [__m512i; 4],
    /// Multiplied with the sums of 16 activations each.
    mins: __m256i,
}

macro_rules! super_rows {
    ($name:ident, $kind:ident, $bytes:expr, $unpack:ident, $heads:ident, $separate_mins:expr, $fetch:expr) => {
        /// All rows of this type times all tokens.
        ///
        /// # Safety
        ///
        /// The machine has the instructions of [`Isa::Avx512`](super::isa::Isa::Avx512); `rows` is as its fields say.
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
        pub(super) unsafe fn $name(rows: &Rows<'_>) {
            /// Adds `count` blocks, at most four, to the lanes of a row.
            ///
            /// # Safety
            ///
            /// As above; there are `count` blocks at `weight`, and in a copy of a token at `copy`.
            #[inline]
            #[target_feature(
                enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c"
            )]
            unsafe fn group(
                weight: *const u8,
                copy: *const u8,
                count: usize,
                lanes: &mut [__m128; 2],
            ) {
                let part = |lane: usize| {
                    if lane >= count {
                        return (_mm512_setzero_si512(), _mm256_setzero_si256());
                    }
                    let (block, y) = (
                        weight.wrapping_add(lane * $bytes),
                        copy.wrapping_add(lane * Q8K_BYTES + 4),
                    );
                    // On a core limited by memory alone, explicit prefetches only disturb the hardware prefetcher.
                    if $fetch {
                        fetch::<$bytes>(block.wrapping_add(FETCH_AHEAD));
                    }
                    // SAFETY: a block of the row, and one of the copy of this token.
                    unsafe { total::<$separate_mins>(&$unpack(block), y) }
                };
                let ((a, low_a), (b, low_b), (c, low_c), (d, low_d)) =
                    (part(0), part(1), part(2), part(3));
                // The last block substitutes for missing ones, whose totals are zero.
                let at = |lane: usize| lane.min(count - 1);
                let at = [0, at(1), at(2), at(3)];
                // SAFETY: the heads of blocks of this row and of this copy.
                let ((scales, min_scales), factors) = unsafe {
                    let factor = |lane: usize| {
                        copy.wrapping_add(at[lane] * Q8K_BYTES)
                            .cast::<f32>()
                            .read_unaligned()
                    };
                    (
                        $heads(weight, $bytes, at),
                        _mm_set_ps(factor(3), factor(2), factor(1), factor(0)),
                    )
                };
                let total = _mm_cvtepi32_ps(sixteen_sums(a, b, c, d));
                lanes[0] = _mm_fmadd_ps(total, _mm_mul_ps(scales, factors), lanes[0]);
                if $separate_mins {
                    let total = _mm_cvtepi32_ps(four_sums(low_a, low_b, low_c, low_d));
                    lanes[1] = _mm_fmadd_ps(total, _mm_mul_ps(min_scales, factors), lanes[1]);
                }
            }
            if rows.tokens > 1 {
                // SAFETY: the caller's promise.
                unsafe { few512::super_rows::<unpack256::$kind>(rows) };
                return;
            }
            for (index, weight) in rows.weights.chunks_exact(rows.row_bytes).enumerate() {
                let (mut block, mut copy) = (weight.as_ptr(), rows.copy(0));
                let (mut left, mut lanes) = (rows.columns / SUPER, [_mm_setzero_ps(); 2]);
                while left >= LANES {
                    // SAFETY: the row, and the copy of the token, have at least this many blocks left.
                    unsafe { group(block, copy, LANES, &mut lanes) };
                    (block, copy) = (
                        block.wrapping_add(LANES * $bytes),
                        copy.wrapping_add(LANES * Q8K_BYTES),
                    );
                    left -= LANES;
                }
                if left > 0 {
                    // SAFETY: as above.
                    unsafe { group(block, copy, left, &mut lanes) };
                }
                let [sums, mins] = lanes;
                rows.put(
                    0,
                    index,
                    if $separate_mins {
                        last_sum(sums) - last_sum(mins)
                    } else {
                        last_sum(sums)
                    },
                );
            }
        }
    };
}

super_rows!(rows_q4k, Q4K, 144, unpack_q4k, heads, true, true);
super_rows!(rows_q5k, Q5K, 176, unpack_q5k, heads, true, true);
super_rows!(rows_q6k, Q6K, 210, unpack_q6k, heads_q6k, false, false);

/// Totals of one block in sixteen lanes, and of its minimums in eight, if these have separate scales.
///
/// # Safety
///
/// `y` are the quants of a Q8_K block, followed by its sums.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn total<const SEPARATE_MINS: bool>(block: &Block, y: *const u8) -> (__m512i, __m256i) {
    // SAFETY: 32 bytes after the quants.
    let bsums = unsafe { _mm256_loadu_si256(y.add(SUPER).cast()) };
    let min = _mm256_madd_epi16(block.mins, bsums);
    let mut sum = if SEPARATE_MINS {
        _mm512_setzero_si512()
    } else {
        // 32 times the value that Q6_K subtracts from each quant, exactly, since these are integers.
        _mm512_zextsi256_si512(_mm256_sub_epi32(
            _mm256_setzero_si256(),
            _mm256_slli_epi32::<5>(min),
        ))
    };
    for part in 0..4 {
        // SAFETY: 256 bytes.
        let y = unsafe { _mm512_loadu_si512(y.add(64 * part).cast()) };
        sum = add_pairs(
            sum,
            _mm512_maddubs_epi16(block.quants[part], y),
            block.scales[part],
        );
    }
    (sum, min)
}

/// `sum` plus the products of neighbours in `a` and `b`. The intrinsic of this instruction compiles to a product and an
/// addition, which takes twice the time when both units are busy.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) fn add_pairs(mut sum: __m512i, a: __m512i, b: __m512i) -> __m512i {
    // SAFETY: an instruction of the set, on registers only.
    unsafe {
        std::arch::asm!(
            "vpdpwssd {0}, {1}, {2}",
            inout(zmm_reg) sum,
            in(zmm_reg) a,
            in(zmm_reg) b,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sum
}

/// Scales and minimum scales of several Q4_K or Q5_K blocks of a row.
///
/// # Safety
///
/// The row has such blocks of `bytes` bytes at these indices.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn heads(row: *const u8, bytes: usize, at: [usize; LANES]) -> (__m128, __m128) {
    // SAFETY: two halves are the head of a block.
    let head = |lane: usize| unsafe { row.add(at[lane] * bytes).cast::<i32>().read_unaligned() };
    let both = _mm256_cvtph_ps(_mm_set_epi32(head(3), head(2), head(1), head(0)));
    let (low, high) = (
        _mm256_castps256_ps128(both),
        _mm256_extractf128_ps::<1>(both),
    );
    (
        _mm_shuffle_ps::<0b10_00_10_00>(low, high),
        _mm_shuffle_ps::<0b11_01_11_01>(low, high),
    )
}

/// Scales of several Q6_K blocks of a row.
///
/// # Safety
///
/// The row has such blocks of `bytes` bytes at these indices.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn heads_q6k(row: *const u8, bytes: usize, at: [usize; LANES]) -> (__m128, __m128) {
    // SAFETY: the last half of a block.
    (unsafe { halves(row.add(208), bytes, at) }, _mm_setzero_ps())
}

/// `f16` values at intervals of `bytes` bytes.
///
/// # Safety
///
/// There are `f16` values at these indices.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn halves(start: *const u8, bytes: usize, at: [usize; LANES]) -> __m128 {
    // SAFETY: the caller's promise.
    let half = |lane: usize| unsafe { start.add(at[lane] * bytes).cast::<u16>().read_unaligned() };
    let (a, b) = (u64::from(half(0)), u64::from(half(1)));
    let (c, d) = (u64::from(half(2)), u64::from(half(3)));
    let four = a | (b << 16) | (c << 32) | (d << 48);
    _mm_cvtph_ps(_mm_cvtsi64_si128(four.cast_signed()))
}

/// The lanes of a row's sum, by halves.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn last_sum(lanes: __m128) -> f32 {
    let halves = _mm_add_ps(lanes, _mm_movehl_ps(lanes, lanes));
    _mm_cvtss_f32(_mm_add_ss(halves, _mm_movehdup_ps(halves)))
}

/// The sums of all lanes of each of four registers of sixteen.
#[inline]
#[target_feature(enable = "avx512f,avx2")]
pub(super) fn sixteen_sums(a: __m512i, b: __m512i, c: __m512i, d: __m512i) -> __m128i {
    let pair = |x, y| _mm512_add_epi32(_mm512_unpacklo_epi32(x, y), _mm512_unpackhi_epi32(x, y));
    let (ab, cd) = (pair(a, b), pair(c, d));
    let all = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    let all = _mm256_add_epi32(
        _mm512_castsi512_si256(all),
        _mm512_extracti64x4_epi64::<1>(all),
    );
    _mm_add_epi32(
        _mm256_castsi256_si128(all),
        _mm256_extracti128_si256::<1>(all),
    )
}

/// The sums of all lanes of each of four registers.
#[inline]
#[target_feature(enable = "avx2")]
fn four_sums(a: __m256i, b: __m256i, c: __m256i, d: __m256i) -> __m128i {
    let pair = |x, y| _mm256_add_epi32(_mm256_unpacklo_epi32(x, y), _mm256_unpackhi_epi32(x, y));
    let (ab, cd) = (pair(a, b), pair(c, d));
    let all = _mm256_add_epi32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
    _mm_add_epi32(
        _mm256_castsi256_si128(all),
        _mm256_extracti128_si256::<1>(all),
    )
}

/// # Safety
///
/// `block` is a Q4_K block.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn unpack_q4k(block: *const u8) -> Block {
    let low = _mm512_set1_epi8(15);
    let mut quants = [_mm512_setzero_si512(); 4];
    for half in 0..2 {
        // SAFETY: 128 bytes of quants follow the 16 bytes of scales.
        let both = unsafe { _mm512_loadu_si512(block.add(16 + 64 * half).cast()) };
        [quants[2 * half], quants[2 * half + 1]] = in_order(
            _mm512_and_si512(both, low),
            _mm512_and_si512(_mm512_srli_epi16::<4>(both), low),
        );
    }
    // SAFETY: the block's head.
    unsafe { with_head(block, quants) }
}

/// # Safety
///
/// `block` is a Q5_K block.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn unpack_q5k(block: *const u8) -> Block {
    let (low, one) = (_mm512_set1_epi8(15), _mm512_set1_epi8(1));
    // SAFETY: 32 bytes of fifth bits follow the 16 bytes of scales.
    let fifth = _mm512_broadcast_i64x4(unsafe { _mm256_loadu_si256(block.add(16).cast()) });
    let mut quants = [_mm512_setzero_si512(); 4];
    for half in 0..2 {
        // SAFETY: 128 bytes of quants follow.
        let both = unsafe { _mm512_loadu_si512(block.add(48 + 64 * half).cast()) };
        // Bit j of a byte belongs to the j-th run of 32 weights: runs 4h and 4h+2 here, 4h+1 and 4h+3 below.
        let shift = _mm512_add_epi64(
            _mm512_set_epi64(2, 2, 2, 2, 0, 0, 0, 0),
            _mm512_set1_epi64(4 * i64::from(half == 1)),
        );
        let even = _mm512_and_si512(_mm512_srlv_epi64(fifth, shift), one);
        let odd = _mm512_and_si512(
            _mm512_srlv_epi64(fifth, _mm512_add_epi64(shift, _mm512_set1_epi64(1))),
            one,
        );
        [quants[2 * half], quants[2 * half + 1]] = in_order(
            _mm512_or_si512(_mm512_and_si512(both, low), _mm512_slli_epi16::<4>(even)),
            _mm512_or_si512(
                _mm512_and_si512(_mm512_srli_epi16::<4>(both), low),
                _mm512_slli_epi16::<4>(odd),
            ),
        );
    }
    // SAFETY: the block's head.
    unsafe { with_head(block, quants) }
}

/// From runs (0, 2) and (1, 3) to (0, 1) and (2, 3).
#[inline]
#[target_feature(enable = "avx512f")]
fn in_order(even: __m512i, odd: __m512i) -> [__m512i; 2] {
    [
        _mm512_shuffle_i64x2::<0x44>(even, odd),
        _mm512_shuffle_i64x2::<0xee>(even, odd),
    ]
}

/// Scales and minimums of Q4_K and Q5_K: eight of six bits each in twelve bytes.
///
/// # Safety
///
/// `block` is a Q4_K or Q5_K block.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn with_head(block: *const u8, quants: [__m512i; 4]) -> Block {
    // SAFETY: two halves and twelve bytes are the head of the block.
    let (scales, mins) = unsafe { super::rows::six_bit_head(block) };
    let scales = _mm512_castsi128_si512(_mm_cvtepu8_epi16(_mm_set_epi64x(0, scales.cast_signed())));
    let mins = _mm_cvtepu8_epi16(_mm_set_epi64x(0, mins.cast_signed()));
    // Each minimum twice: sums cover 16 columns, minimums 32.
    let mins = _mm256_set_m128i(
        _mm_unpackhi_epi16(mins, mins),
        _mm_unpacklo_epi16(mins, mins),
    );
    let pick = |first: i16| {
        _mm512_permutexvar_epi16(
            _mm512_inserti64x4::<1>(_mm512_set1_epi16(first), _mm256_set1_epi16(first + 1)),
            scales,
        )
    };
    Block {
        quants,
        scales: [pick(0), pick(2), pick(4), pick(6)],
        mins,
    }
}

/// # Safety
///
/// `block` is a Q6_K block.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn unpack_q6k(block: *const u8) -> Block {
    let (low, six) = (_mm512_set1_epi8(15), _mm512_set1_epi8(63));
    // Four bits from `quants`, two from `high`: the third truth table selects the second where the first is set.
    let join =
        |quants, high| _mm512_and_si512(_mm512_ternarylogic_epi64::<0xca>(low, quants, high), six);
    let mut quants = [_mm512_setzero_si512(); 4];
    for half in 0..2 {
        // SAFETY: 128 bytes of low bits, then 64 of high bits.
        let (both, high) = unsafe {
            (
                _mm512_loadu_si512(block.add(64 * half).cast()),
                _mm512_broadcast_i64x4(_mm256_loadu_si256(block.add(128 + 32 * half).cast())),
            )
        };
        // The high bits of the four runs of 32 lie at 0, 2, 4 and 6; shift them to 4.
        let first = _mm512_sllv_epi64(high, _mm512_set_epi64(2, 2, 2, 2, 4, 4, 4, 4));
        let second = _mm512_srlv_epi64(high, _mm512_set_epi64(2, 2, 2, 2, 0, 0, 0, 0));
        quants[2 * half] = join(both, first);
        quants[2 * half + 1] = join(_mm512_srli_epi16::<4>(both), second);
    }
    // SAFETY: 16 scales follow the 192 bytes of quants.
    let scales = _mm256_cvtepi8_epi16(unsafe { _mm_loadu_si128(block.add(192).cast()) });
    let wide = _mm512_castsi256_si512(scales);
    let pick = |first: i16| {
        let quarter = |ahead: i16| _mm_set1_epi16(first + ahead);
        let index = _mm512_inserti32x4::<1>(_mm512_castsi128_si512(quarter(0)), quarter(1));
        let index = _mm512_inserti32x4::<2>(index, quarter(2));
        _mm512_permutexvar_epi16(_mm512_inserti32x4::<3>(index, quarter(3)), wide)
    };
    Block {
        quants,
        scales: [pick(0), pick(4), pick(8), pick(12)],
        mins: scales,
    }
}

macro_rules! small_rows {
    ($name:ident, $kind:ident, $bytes:expr, $unpack:ident, $together:expr) => {
        /// All rows of this type times all tokens.
        ///
        /// # Safety
        ///
        /// The machine has the instructions of [`Isa::Avx512`](super::isa::Isa::Avx512); `rows` is as its fields say.
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
        pub(super) unsafe fn $name(rows: &Rows<'_>) {
            /// Adds `count` blocks, at most four, to the lanes of a row. Weights are read as unsigned numbers with an
            /// offset of 128.
            ///
            /// # Safety
            ///
            /// As above; there are `count` blocks at `weight`, and in a copy of a token at `copy`, whose factors and
            /// corrections for the offset of 128 are at `behind`.
            #[inline]
            #[target_feature(
                enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c"
            )]
            unsafe fn group(
                weight: *const u8,
                copy: *const u8,
                behind: [*const u8; 2],
                count: usize,
                lanes: &mut __m128,
            ) {
                let part = |lane: usize| {
                    if lane >= count {
                        return _mm256_setzero_si256();
                    }
                    let (block, y) = (
                        weight.wrapping_add(lane * $bytes + 2),
                        copy.wrapping_add(lane * Q8_0_BYTES + 2),
                    );
                    // SAFETY: inside the row, and inside the copy of this token.
                    let (quants, y) = unsafe { ($unpack(block), _mm256_loadu_si256(y.cast())) };
                    _mm256_dpbusd_epi32(
                        _mm256_setzero_si256(),
                        _mm256_xor_si256(quants, _mm256_set1_epi8(-128)),
                        y,
                    )
                };
                let (a, b, c, d) = (part(0), part(1), part(2), part(3));
                // The last block substitutes for missing ones, whose totals are zero.
                let at = |lane: usize| lane.min(count - 1);
                // SAFETY: the heads of blocks of this row.
                let scales = unsafe { halves(weight, $bytes, [0, at(1), at(2), at(3)]) };
                let mask = 0b1111_u8 >> (LANES - count);
                // SAFETY: the mask stays inside.
                let (factors, starts) = unsafe {
                    (
                        _mm_maskz_loadu_ps(mask, behind[0].cast()),
                        _mm_maskz_loadu_epi32(mask, behind[1].cast()),
                    )
                };
                let total = _mm_cvtepi32_ps(_mm_add_epi32(four_sums(a, b, c, d), starts));
                *lanes = _mm_fmadd_ps(total, _mm_mul_ps(scales, factors), *lanes);
            }
            if rows.tokens > 1 {
                // SAFETY: the caller's promise.
                unsafe { few512::small_rows::<unpack256::$kind>(rows) };
                return;
            }
            let count = rows.weights.len() / rows.row_bytes.max(1);
            let long = $together * rows.row_bytes > NEAREST_MAX;
            for first in (0..count).step_by($together) {
                let (mut left, mut lanes) = (rows.columns / BLOCK, [_mm_setzero_ps(); $together]);
                let (mut blocks, mut copy) = (rows.starts::<$together>(first), rows.copy(0));
                let factors = copy.wrapping_add(left * Q8_0_BYTES);
                let mut behind = [factors, factors.wrapping_add(4 * left)];
                let mut ahead = blocks[0].wrapping_add($together * rows.row_bytes);
                while left >= LANES {
                    if $together > 1 {
                        fetch_next::<{ $together * LANES * $bytes }>(ahead, long);
                        ahead = ahead.wrapping_add($together * LANES * $bytes);
                    }
                    // Indexed: calls that are not inlined, for example of iterators, would be compiled without these
                    // instructions.
                    for row in 0..$together {
                        // SAFETY: the row, and the copy of the token, have at least this many blocks left.
                        unsafe { group(blocks[row], copy, behind, LANES, &mut lanes[row]) };
                        blocks[row] = blocks[row].wrapping_add(LANES * $bytes);
                    }
                    copy = copy.wrapping_add(LANES * Q8_0_BYTES);
                    behind = [
                        behind[0].wrapping_add(4 * LANES),
                        behind[1].wrapping_add(4 * LANES),
                    ];
                    left -= LANES;
                }
                for row in 0..(count - first).min($together) {
                    if left > 0 {
                        // SAFETY: as above.
                        unsafe { group(blocks[row], copy, behind, left, &mut lanes[row]) };
                    }
                    rows.put(0, first + row, last_sum(lanes[row]));
                }
            }
        }
    };
}

small_rows!(rows_q8_0, Q8_0, 34, unpack_q8_0, 4);

/// # Safety
///
/// `quants` are those of a Q8_0 block.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn unpack_q8_0(quants: *const u8) -> __m256i {
    // SAFETY: 32 bytes.
    unsafe { _mm256_loadu_si256(quants.cast()) }
}
