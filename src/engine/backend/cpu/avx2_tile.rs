//! Products of quantised rows with many tokens for AVX2.
//!
//! A block of a row is unpacked once, and all tokens go by, two at a time: what they have summed up so far lies in the
//! first-level cache. Whole numbers and the order of every sum are those of [`avx2`](super::avx2), so that a chunk of one
//! token and a chunk of many yield the same bits.

use std::arch::x86_64::*;

use super::{
    quant::{BLOCK, Q8_0_BYTES, Q8K_BYTES, SUPER},
    rows::{Rows, six_bit_head},
};

/// Fewer tokens do not pay for unpacking to memory.
pub(super) const TOKENS_MIN: usize = 4;

/// Tokens that go by an unpacked block: their sums fill half of a first-level cache of 32 KiB.
const TOKENS: usize = 256;

/// A block of 256 columns of a row.
struct Unpacked {
    /// Unsigned quants in runs of 32.
    quants: [__m256i; 8],
    /// The 16-bit scales of each run.
    scales: [__m256i; 8],
    /// For each sum of 16 activations, a 16-bit factor.
    mins: __m256i,
    scale: f32,
    /// Of the minimums; of Q6_K, how many times the scale.
    min_scale: f32,
}

macro_rules! super_tiles {
    ($(#[$meta:meta])* $name:ident, $bytes:expr, $unpack:ident, $separate_mins:expr) => {
        $(#[$meta])*
        ///
        /// # Safety
        ///
        /// The machine has the instructions of [`Isa::Avx2`](super::isa::Isa::Avx2); `rows` is as its fields say.
        #[target_feature(enable = "avx2,fma,f16c")]
        pub(super) unsafe fn $name(rows: &Rows<'_>) {
            let mut sums = [[_mm256_setzero_ps(); 2]; TOKENS];
            for from in (0..rows.tokens).step_by(TOKENS) {
                let tokens = TOKENS.min(rows.tokens - from);
                for (row, weight) in rows.weights.chunks_exact(rows.row_bytes).enumerate() {
                    sums[..tokens].fill([_mm256_setzero_ps(); 2]);
                    for index in 0..rows.columns / SUPER {
                        // SAFETY: a block of the row.
                        let block = unsafe { $unpack(weight.as_ptr().add(index * $bytes)) };
                        let copy = |token: usize| rows.copy(from + token).wrapping_add(index * Q8K_BYTES);
                        let mut token = 0;
                        // SAFETY: the block's copy of each of these tokens.
                        unsafe {
                            while token + 2 <= tokens {
                                let copies = [copy(token), copy(token + 1)];
                                add::<2, $separate_mins>(&block, copies, &mut sums[token..token + 2]);
                                token += 2;
                            }
                            if token < tokens {
                                add::<1, $separate_mins>(&block, [copy(token)], &mut sums[token..=token]);
                            }
                        }
                    }
                    for (token, [sum, low]) in sums[..tokens].iter().enumerate() {
                        rows.put(from + token, row, total(_mm256_sub_ps(*sum, *low)));
                    }
                }
            }
        }
    };
}

super_tiles! {
    /// Rows of Q4_K.
    rows_q4k, 144, unpack_q4k, true
}
super_tiles! {
    /// Rows of Q5_K.
    rows_q5k, 176, unpack_q5k, true
}
super_tiles! {
    /// Rows of Q6_K.
    rows_q6k, 210, unpack_q6k, false
}

/// Adds the products of a block with `N` tokens to their sums.
///
/// # Safety
///
/// `copies` are Q8_K blocks.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn add<const N: usize, const SEPARATE_MINS: bool>(
    block: &Unpacked,
    copies: [*const u8; N],
    sums: &mut [[__m256; 2]],
) {
    let mut totals = [_mm256_setzero_si256(); N];
    for run in 0..8 {
        let (quants, scales) = (block.quants[run], block.scales[run]);
        for token in 0..N {
            // SAFETY: 32 of the 256 quants.
            let y = unsafe { _mm256_loadu_si256(copies[token].add(4 + 32 * run).cast()) };
            let pairs = _mm256_madd_epi16(_mm256_maddubs_epi16(quants, y), scales);
            totals[token] = _mm256_add_epi32(totals[token], pairs);
        }
    }
    for token in 0..N {
        // SAFETY: the block's head, and the sums behind its quants.
        let (factor, low) = unsafe {
            let copy = copies[token];
            (
                copy.cast::<f32>().read_unaligned(),
                _mm256_madd_epi16(block.mins, _mm256_loadu_si256(copy.add(4 + SUPER).cast())),
            )
        };
        let scale = block.scale * factor;
        let min_scale = if SEPARATE_MINS {
            block.min_scale * factor
        } else {
            block.min_scale * scale
        };
        let [sum, lows] = &mut sums[token];
        *lows = _mm256_fmadd_ps(_mm256_cvtepi32_ps(low), _mm256_set1_ps(min_scale), *lows);
        *sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(totals[token]), _mm256_set1_ps(scale), *sum);
    }
}

/// Scales, minimums and factors of a Q4_K or Q5_K block, with its quants.
///
/// # Safety
///
/// `block` is such a block.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn with_head(block: *const u8, quants: [__m256i; 8]) -> Unpacked {
    // SAFETY: the block's head.
    let ((scales, mins), scale, min_scale) = unsafe { (six_bit_head(block), half_at(block), half_at(block.add(2))) };
    let scales = scales.to_le_bytes();
    let mins = _mm_cvtepu8_epi16(_mm_set_epi64x(0, mins.cast_signed()));
    Unpacked {
        quants,
        scales: std::array::from_fn(|run| _mm256_set1_epi16(i16::from(scales[run]))),
        // Each minimum twice: sums are of 16, minimums of 32.
        mins: _mm256_set_m128i(_mm_unpackhi_epi16(mins, mins), _mm_unpacklo_epi16(mins, mins)),
        scale,
        min_scale,
    }
}

/// # Safety
///
/// `block` is a Q4_K block.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn unpack_q4k(block: *const u8) -> Unpacked {
    let low = _mm256_set1_epi8(15);
    let mut quants = [low; 8];
    for part in 0..4 {
        // SAFETY: 128 bytes of quants follow the 16 of the head.
        let both = unsafe { _mm256_loadu_si256(block.add(16 + 32 * part).cast()) };
        quants[2 * part] = _mm256_and_si256(both, low);
        quants[2 * part + 1] = _mm256_and_si256(_mm256_srli_epi16::<4>(both), low);
    }
    // SAFETY: passed on.
    unsafe { with_head(block, quants) }
}

/// # Safety
///
/// `block` is a Q5_K block.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn unpack_q5k(block: *const u8) -> Unpacked {
    let (low, one) = (_mm256_set1_epi8(15), _mm256_set1_epi8(1));
    // SAFETY: 32 bytes of fifth bits follow the 16 of the head.
    let mut fifth = unsafe { _mm256_loadu_si256(block.add(16).cast()) };
    let mut quants = [low; 8];
    for part in 0..4 {
        // SAFETY: 128 bytes of quants follow.
        let both = unsafe { _mm256_loadu_si256(block.add(48 + 32 * part).cast()) };
        let runs = [both, _mm256_srli_epi16::<4>(both)];
        for (ahead, run) in runs.into_iter().enumerate() {
            let bit = _mm256_slli_epi16::<4>(_mm256_and_si256(fifth, one));
            fifth = _mm256_srli_epi16::<1>(fifth);
            quants[2 * part + ahead] = _mm256_or_si256(_mm256_and_si256(run, low), bit);
        }
    }
    // SAFETY: passed on.
    unsafe { with_head(block, quants) }
}

/// # Safety
///
/// `block` is a Q6_K block.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn unpack_q6k(block: *const u8) -> Unpacked {
    let (low, two) = (_mm256_set1_epi8(15), _mm256_set1_epi8(3));
    let mut quants = [low; 8];
    for half in 0..2 {
        // SAFETY: 128 bytes of low bits, then 64 of high bits.
        let (first, second, high) = unsafe {
            (
                _mm256_loadu_si256(block.add(64 * half).cast()),
                _mm256_loadu_si256(block.add(64 * half + 32).cast()),
                _mm256_loadu_si256(block.add(128 + 32 * half).cast()),
            )
        };
        let join = |four: __m256i, bits: __m256i| {
            let bits = _mm256_slli_epi16::<4>(_mm256_and_si256(bits, two));
            _mm256_or_si256(_mm256_and_si256(four, low), bits)
        };
        quants[4 * half] = join(first, high);
        quants[4 * half + 1] = join(second, _mm256_srli_epi16::<2>(high));
        quants[4 * half + 2] = join(_mm256_srli_epi16::<4>(first), _mm256_srli_epi16::<4>(high));
        quants[4 * half + 3] = join(_mm256_srli_epi16::<4>(second), _mm256_srli_epi16::<6>(high));
    }
    // SAFETY: 16 scales follow the 192 bytes of quants, and a half them.
    let (bytes, scale) = unsafe { (_mm_loadu_si128(block.add(192).cast()), half_at(block.add(208))) };
    let mut scales = [low; 8];
    for (run, scales) in scales.iter_mut().enumerate() {
        // SAFETY: two of the 16 scales.
        let scale = |at: usize| _mm_set1_epi16(i16::from(unsafe { block.add(192 + at).cast::<i8>().read() }));
        *scales = _mm256_set_m128i(scale(2 * run + 1), scale(2 * run));
    }
    Unpacked {
        quants,
        scales,
        mins: _mm256_cvtepi8_epi16(bytes),
        scale,
        min_scale: 32.0,
    }
}

macro_rules! small_tiles {
    ($(#[$meta:meta])* $name:ident, $bytes:expr, $unpack:ident) => {
        $(#[$meta])*
        ///
        /// # Safety
        ///
        /// The machine has the instructions of [`Isa::Avx2`](super::isa::Isa::Avx2); `rows` is as its fields say.
        #[target_feature(enable = "avx2,fma,f16c")]
        pub(super) unsafe fn $name(rows: &Rows<'_>) {
            let mut sums = [_mm256_setzero_ps(); TOKENS];
            let blocks = rows.columns / BLOCK;
            for from in (0..rows.tokens).step_by(TOKENS) {
                let tokens = TOKENS.min(rows.tokens - from);
                for (row, weight) in rows.weights.chunks_exact(rows.row_bytes).enumerate() {
                    sums[..tokens].fill(_mm256_setzero_ps());
                    for index in 0..blocks {
                        // SAFETY: a block of the row.
                        let (quants, scale) = unsafe {
                            let block = weight.as_ptr().add(index * $bytes);
                            ($unpack(block.add(2)), half_at(block))
                        };
                        let size = _mm256_abs_epi8(quants);
                        for (token, sum) in sums[..tokens].iter_mut().enumerate() {
                            let copy = rows.copy(from + token);
                            // SAFETY: the block's quants in the copy, and its factor behind all blocks.
                            let (y, factor) = unsafe {
                                (
                                    _mm256_loadu_si256(copy.add(index * Q8_0_BYTES + 2).cast()),
                                    copy.add(blocks * Q8_0_BYTES + 4 * index).cast::<f32>().read_unaligned(),
                                )
                            };
                            let pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(y, quants));
                            let products = _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
                            *sum = _mm256_fmadd_ps(products, _mm256_set1_ps(scale * factor), *sum);
                        }
                    }
                    for (token, sum) in sums[..tokens].iter().enumerate() {
                        rows.put(from + token, row, total(*sum));
                    }
                }
            }
        }
    };
}

small_tiles! {
    /// Rows of Q8_0.
    rows_q8_0, 34, unpack_q8_0
}
small_tiles! {
    /// Rows of Q4_0.
    rows_q4_0, 18, unpack_q4_0
}

/// # Safety
///
/// `quants` are those of a Q8_0 block.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn unpack_q8_0(quants: *const u8) -> __m256i {
    // SAFETY: 32 bytes.
    unsafe { _mm256_loadu_si256(quants.cast()) }
}

/// # Safety
///
/// `quants` are those of a Q4_0 block.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn unpack_q4_0(quants: *const u8) -> __m256i {
    // SAFETY: 16 bytes.
    let both = unsafe { _mm_loadu_si128(quants.cast()) };
    let nibbles = _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16::<4>(both), both), _mm256_set1_epi8(15));
    _mm256_sub_epi8(nibbles, _mm256_set1_epi8(8))
}

/// The half at `address` as `f32`.
///
/// # Safety
///
/// Two bytes can be read there.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn half_at(address: *const u8) -> f32 {
    // SAFETY: the caller's promise.
    let bits = u16::from_le(unsafe { address.cast::<u16>().read_unaligned() });
    _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits))))
}

#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn total(sums: __m256) -> f32 {
    let four = _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps::<1>(sums));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
}
