//! Products with quantised rows for AVX2, in the file's own block layout (ggml's `ggml-common.h`).
//!
//! This is the form for one token or a few; [`avx2_tile`] has the one for many, with the same bits.

use std::arch::x86_64::*;

use super::{
    avx2_tile::{self, TOKENS_MIN, half_at, total},
    quant::{BLOCK, Q8_0_BYTES, Q8K_BYTES, SUPER},
    rows::{Rows, six_bit_head},
};

macro_rules! rows {
    ($(#[$meta:meta])* $name:ident, $product:ident) => {
        $(#[$meta])*
        ///
        /// # Safety
        ///
        /// The machine has the instructions of [`Isa::Avx2`](super::isa::Isa::Avx2); `rows` is as its fields say.
        #[target_feature(enable = "avx2,fma,f16c")]
        pub(super) unsafe fn $name(rows: &Rows<'_>) {
            if rows.tokens >= TOKENS_MIN {
                // SAFETY: passed on.
                unsafe { avx2_tile::$name(rows) };
                return;
            }
            for (index, weight) in rows.weights.chunks_exact(rows.row_bytes).enumerate() {
                for token in 0..rows.tokens {
                    // SAFETY: a row, and the copy of a token.
                    let value = unsafe { $product(weight.as_ptr(), rows.copy(token), rows.columns) };
                    rows.put(token, index, value);
                }
            }
        }
    };
}

rows! {
    /// Rows of Q4_K.
    rows_q4k, q4k
}
rows! {
    /// Rows of Q5_K.
    rows_q5k, q5k
}
rows! {
    /// Rows of Q6_K.
    rows_q6k, q6k
}
rows! {
    /// Rows of Q8_0.
    rows_q8_0, q8_0
}
rows! {
    /// Rows of Q4_0.
    rows_q4_0, q4_0
}

/// # Safety
///
/// A row of Q4_K and a copy in Q8_K, of `columns` elements.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn q4k(weight: *const u8, copy: *const u8, columns: usize) -> f32 {
    let low = _mm256_set1_epi8(15);
    let (mut sums, mut mins) = (_mm256_setzero_ps(), _mm256_setzero_ps());
    for index in 0..columns / SUPER {
        // SAFETY: inside row and copy.
        unsafe {
            let (x, y) = (weight.add(index * 144), copy.add(index * Q8K_BYTES));
            let (scales, min) = head(x, y, &mut mins);
            let mut sum = _mm256_setzero_si256();
            for part in 0..4 {
                let both = _mm256_loadu_si256(x.add(16 + 32 * part).cast());
                let runs = [
                    _mm256_and_si256(both, low),
                    _mm256_and_si256(_mm256_srli_epi16::<4>(both), low),
                ];
                for (ahead, quants) in runs.into_iter().enumerate() {
                    sum = run(sum, quants, y, 2 * part + ahead, &scales);
                }
            }
            sums = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), _mm256_set1_ps(min), sums);
        }
    }
    total(_mm256_sub_ps(sums, mins))
}

/// # Safety
///
/// A row of Q5_K and a copy in Q8_K, of `columns` elements.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn q5k(weight: *const u8, copy: *const u8, columns: usize) -> f32 {
    let (low, one) = (_mm256_set1_epi8(15), _mm256_set1_epi8(1));
    let (mut sums, mut mins) = (_mm256_setzero_ps(), _mm256_setzero_ps());
    for index in 0..columns / SUPER {
        // SAFETY: inside row and copy.
        unsafe {
            let (x, y) = (weight.add(index * 176), copy.add(index * Q8K_BYTES));
            let (scales, min) = head(x, y, &mut mins);
            let mut fifth = _mm256_loadu_si256(x.add(16).cast());
            let mut sum = _mm256_setzero_si256();
            for part in 0..4 {
                let both = _mm256_loadu_si256(x.add(48 + 32 * part).cast());
                let runs = [
                    _mm256_and_si256(both, low),
                    _mm256_and_si256(_mm256_srli_epi16::<4>(both), low),
                ];
                for (ahead, quants) in runs.into_iter().enumerate() {
                    let bit = _mm256_slli_epi16::<4>(_mm256_and_si256(fifth, one));
                    fifth = _mm256_srli_epi16::<1>(fifth);
                    sum = run(sum, _mm256_or_si256(quants, bit), y, 2 * part + ahead, &scales);
                }
            }
            sums = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), _mm256_set1_ps(min), sums);
        }
    }
    total(_mm256_sub_ps(sums, mins))
}

/// Scales of a Q4_K or Q5_K block and the factor of its products; adds its minimums to `mins`.
///
/// # Safety
///
/// `x` is such a block, `y` a Q8_K block.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn head(x: *const u8, y: *const u8, mins: &mut __m256) -> ([u8; 8], f32) {
    // SAFETY: the heads of both blocks, and the sums behind the 256 quants.
    unsafe {
        let ((scales, minimums), scale, min_scale) = (six_bit_head(x), half_at(x), half_at(x.add(2)));
        let factor = y.cast::<f32>().read_unaligned();
        let minimums = _mm_cvtepu8_epi16(_mm_set_epi64x(0, minimums.cast_signed()));
        let minimums = _mm256_set_m128i(
            _mm_unpackhi_epi16(minimums, minimums),
            _mm_unpacklo_epi16(minimums, minimums),
        );
        let min = _mm256_madd_epi16(minimums, _mm256_loadu_si256(y.add(4 + SUPER).cast()));
        *mins = _mm256_fmadd_ps(_mm256_cvtepi32_ps(min), _mm256_set1_ps(min_scale * factor), *mins);
        (scales.to_le_bytes(), scale * factor)
    }
}

/// Adds the products of run `number` of 32 quants.
///
/// # Safety
///
/// `y` is a Q8_K block.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn run(sum: __m256i, quants: __m256i, y: *const u8, number: usize, scales: &[u8; 8]) -> __m256i {
    // SAFETY: 32 of the 256 quants.
    let y = unsafe { _mm256_loadu_si256(y.add(4 + 32 * number).cast()) };
    let pairs = _mm256_maddubs_epi16(quants, y);
    _mm256_add_epi32(
        sum,
        _mm256_madd_epi16(pairs, _mm256_set1_epi16(i16::from(scales[number]))),
    )
}

/// # Safety
///
/// A row of Q6_K and a copy in Q8_K, of `columns` elements.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn q6k(weight: *const u8, copy: *const u8, columns: usize) -> f32 {
    let (low, two) = (_mm256_set1_epi8(15), _mm256_set1_epi8(3));
    let (mut sums, mut mins) = (_mm256_setzero_ps(), _mm256_setzero_ps());
    for index in 0..columns / SUPER {
        // SAFETY: inside row and copy.
        unsafe {
            let (x, y) = (weight.add(index * 210), copy.add(index * Q8K_BYTES));
            let scale = half_at(x.add(208)) * y.cast::<f32>().read_unaligned();
            let scales = _mm256_cvtepi8_epi16(_mm_loadu_si128(x.add(192).cast()));
            let min = _mm256_madd_epi16(scales, _mm256_loadu_si256(y.add(4 + SUPER).cast()));
            mins = _mm256_fmadd_ps(_mm256_cvtepi32_ps(min), _mm256_set1_ps(32.0 * scale), mins);
            let mut sum = _mm256_setzero_si256();
            for half in 0..2 {
                let high = _mm256_loadu_si256(x.add(128 + 32 * half).cast());
                for part in 0..4 {
                    let both = _mm256_loadu_si256(x.add(64 * half + 32 * (part % 2)).cast());
                    let nibbles = if part < 2 { both } else { _mm256_srli_epi16::<4>(both) };
                    let bits = match part {
                        0 => high,
                        1 => _mm256_srli_epi16::<2>(high),
                        2 => _mm256_srli_epi16::<4>(high),
                        _ => _mm256_srli_epi16::<6>(high),
                    };
                    let quants = _mm256_or_si256(
                        _mm256_and_si256(nibbles, low),
                        _mm256_slli_epi16::<4>(_mm256_and_si256(bits, two)),
                    );
                    let number = 4 * half + part;
                    let pairs = _mm256_maddubs_epi16(quants, _mm256_loadu_si256(y.add(4 + 32 * number).cast()));
                    let scale_at = |at: usize| _mm_set1_epi16(i16::from(x.add(192 + at).cast::<i8>().read()));
                    let scale = _mm256_set_m128i(scale_at(2 * number + 1), scale_at(2 * number));
                    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, scale));
                }
            }
            sums = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), _mm256_set1_ps(scale), sums);
        }
    }
    total(_mm256_sub_ps(sums, mins))
}

/// # Safety
///
/// A row and a copy of Q8_0, of `columns` elements.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn q8_0(weight: *const u8, copy: *const u8, columns: usize) -> f32 {
    let mut sums = _mm256_setzero_ps();
    for index in 0..columns / BLOCK {
        // SAFETY: inside row and copy.
        unsafe {
            let (x, y) = (weight.add(index * Q8_0_BYTES), copy.add(index * Q8_0_BYTES));
            let factor = half_at(x) * half_at(y);
            let quants = _mm256_loadu_si256(x.add(2).cast());
            sums = small(sums, quants, y, factor);
        }
    }
    total(sums)
}

/// # Safety
///
/// A row of Q4_0 and a copy of Q8_0, of `columns` elements.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn q4_0(weight: *const u8, copy: *const u8, columns: usize) -> f32 {
    let mut sums = _mm256_setzero_ps();
    for index in 0..columns / BLOCK {
        // SAFETY: inside row and copy.
        unsafe {
            let (x, y) = (weight.add(index * 18), copy.add(index * Q8_0_BYTES));
            let factor = half_at(x) * half_at(y);
            let both = _mm_loadu_si128(x.add(2).cast());
            let nibbles = _mm256_set_m128i(_mm_srli_epi16::<4>(both), both);
            let quants = _mm256_sub_epi8(_mm256_and_si256(nibbles, _mm256_set1_epi8(15)), _mm256_set1_epi8(8));
            sums = small(sums, quants, y, factor);
        }
    }
    total(sums)
}

/// Adds the products of 32 signed quants: the sign moves to the other side, since one of the two must be unsigned.
///
/// # Safety
///
/// `y` is a Q8_0 block.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn small(sums: __m256, quants: __m256i, y: *const u8, factor: f32) -> __m256 {
    // SAFETY: the block's 32 quants.
    let y = unsafe { _mm256_loadu_si256(y.add(2).cast()) };
    let pairs = _mm256_maddubs_epi16(_mm256_sign_epi8(quants, quants), _mm256_sign_epi8(y, quants));
    let sum = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), _mm256_set1_ps(factor), sums)
}
