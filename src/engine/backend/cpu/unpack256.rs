//! Blocks of every quantised type in registers of 256 bits, as kernels for AVX2, AVX-VNNI and AVX-512 multiply them.
//!
//! One unpacking serves products with a few tokens ([`rows256`](super::rows256)) and with many ([`tile256`](super::tile256)).
//! Quants become unsigned bytes: what a type subtracts from them goes through the sums of activations.

use std::arch::x86_64::*;

use super::quant::SUPER;

/// How a set multiplies bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Dot {
    /// To pairs of 16 bits, which are multiplied and summed again (AVX2).
    Pairs,
    /// Four at once, in the encoding of AVX-VNNI.
    Vex,
    /// Four at once, in the encoding of AVX-512.
    Evex,
}

/// An instruction set with registers of 256 bits. What differs between sets is written as instructions, so that every
/// kernel is compiled for AVX2.
pub(super) trait Set {
    const DOT: Dot;
}

/// AVX2 alone.
pub(super) struct Avx2;
/// AVX2 and AVX-VNNI.
pub(super) struct AvxVnni;
/// AVX-512 VL and VNNI.
pub(super) struct Avx512;

impl Set for Avx2 {
    const DOT: Dot = Dot::Pairs;
}
impl Set for AvxVnni {
    const DOT: Dot = Dot::Vex;
}
impl Set for Avx512 {
    const DOT: Dot = Dot::Evex;
}

macro_rules! dot {
    ($vex:literal, $evex:literal, $set:ty, $sum:ident, $a:ident, $b:ident) => {
        // SAFETY: one instruction of the set, which the machine has, on registers alone.
        unsafe {
            match <$set>::DOT {
                Dot::Vex => std::arch::asm!(
                    $vex, inout(ymm_reg) $sum, in(ymm_reg) $a, in(ymm_reg) $b,
                    options(pure, nomem, nostack, preserves_flags)
                ),
                _ => std::arch::asm!(
                    $evex, inout(ymm_reg) $sum, in(ymm_reg) $a, in(ymm_reg) $b,
                    options(pure, nomem, nostack, preserves_flags)
                ),
            }
        }
    };
}

/// Adds the products of pairs of 16-bit numbers.
///
/// # Safety
///
/// The machine has the set.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn add_words<S: Set>(mut sum: __m256i, a: __m256i, b: __m256i) -> __m256i {
    if S::DOT == Dot::Pairs {
        return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
    }
    dot!(
        "{{vex}} vpdpwssd {0}, {1}, {2}",
        "{{evex}} vpdpwssd {0}, {1}, {2}",
        S,
        sum,
        a,
        b
    );
    sum
}

/// Adds the products of four unsigned with four signed bytes, of which no pair exceeds 16 bits.
///
/// # Safety
///
/// The machine has the set.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn add_bytes<S: Set>(mut sum: __m256i, unsigned: __m256i, signed: __m256i) -> __m256i {
    if S::DOT == Dot::Pairs {
        let pairs = _mm256_maddubs_epi16(unsigned, signed);
        return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    dot!(
        "{{vex}} vpdpbusd {0}, {1}, {2}",
        "{{evex}} vpdpbusd {0}, {1}, {2}",
        S,
        sum,
        unsigned,
        signed
    );
    sum
}

/// A block of 256 columns.
pub(super) struct Unpacked {
    /// Unsigned quants in runs of 32.
    pub(super) quants: [__m256i; 8],
    /// 16-bit scales: sixteen, or eight in the lower half where [`Super::SUB`] is 32.
    pub(super) scales: __m256i,
    /// As many 16-bit factors of the sums of activations.
    pub(super) mins: __m256i,
}

/// A type with blocks of 256 columns.
pub(super) trait Super {
    /// Bytes of a block.
    const BYTES: usize;
    /// Columns that share a scale: 16 or 32.
    const SUB: usize;
    /// How many products of two quants a 16-bit sum holds, as a power of two, at most those of a scale.
    const PAIRS: usize;
    /// Where a block has the half that its scales are multiplied with.
    const SCALE_AT: usize;
    /// Whether the half behind it is that of minimums; if not, quants are lessened by `1 << LESS`, and `mins` are the scales.
    const MINIMUMS: bool;
    const LESS: i32 = 0;

    /// # Safety
    ///
    /// `block` is a block of this type.
    unsafe fn unpack(block: *const u8) -> Unpacked;
}

/// A type with blocks of 32 columns, whose quants follow a half that is their scale.
pub(super) trait Small {
    /// Bytes of a block.
    const BYTES: usize;
    /// What is added to quants to make them unsigned; with 128 they are signed.
    const ADDED: i32;
    /// How many products of two quants a 16-bit sum holds.
    const PAIRS: usize;
    /// Whether a second half is the block's minimum.
    const MINIMUM: bool = false;

    /// # Safety
    ///
    /// `block` is a block of this type.
    unsafe fn unpack(block: *const u8) -> __m256i;
}

/// Types by name, to choose kernels.
pub(super) struct Q2K;
pub(super) struct Q3K;
pub(super) struct Q4K;
pub(super) struct Q5K;
pub(super) struct Q6K;
pub(super) struct Q4_0;
pub(super) struct Q4_1;
pub(super) struct Q5_0;
pub(super) struct Q5_1;
pub(super) struct Q8_0;

#[inline]
#[target_feature(enable = "avx2")]
fn low_nibbles(bytes: __m256i) -> __m256i {
    _mm256_and_si256(bytes, _mm256_set1_epi8(15))
}

#[inline]
#[target_feature(enable = "avx2")]
fn high_nibbles(bytes: __m256i) -> __m256i {
    low_nibbles(_mm256_srli_epi16::<4>(bytes))
}

/// Bits `from` and above of each byte, of which `mask` are kept.
#[inline]
#[target_feature(enable = "avx2")]
fn bits(bytes: __m256i, from: usize, mask: i8) -> __m256i {
    let shifted = _mm256_srl_epi16(bytes, _mm_cvtsi64_si128(i64::try_from(from).unwrap_or(0)));
    _mm256_and_si256(shifted, _mm256_set1_epi8(mask))
}

/// # Safety
///
/// 32 bytes can be read at `at`.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn load(at: *const u8) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe { _mm256_loadu_si256(at.cast()) }
}

/// The scales and minimums of a Q4_K or Q5_K block, with its quants.
///
/// # Safety
///
/// `block` is such a block.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn with_head(block: *const u8, quants: [__m256i; 8]) -> Unpacked {
    // SAFETY: sixteen bytes are the head.
    let head = unsafe { _mm_loadu_si128(block.cast()) };
    // Words 1 and 2 are the first four scales and minimums in six bits each, and above them two bits of the last four, of which
    // word 3 has the lower four bits.
    let first = _mm_and_si128(head, _mm_set1_epi8(63));
    let upper = _mm_and_si128(_mm_srli_epi32::<2>(head), _mm_set1_epi8(0x30));
    let lower = _mm_srlv_epi32(_mm_shuffle_epi32::<0b11_11_11_11>(head), _mm_set_epi32(0, 4, 0, 0));
    let last = _mm_or_si128(_mm_and_si128(lower, _mm_set1_epi8(15)), upper);
    let (scales, mins) = (_mm_unpacklo_epi32(first, last), _mm_unpackhi_epi32(first, last));
    let zero = _mm_setzero_si128();
    Unpacked {
        quants,
        scales: _mm256_zextsi128_si256(_mm_unpackhi_epi8(scales, zero)),
        mins: _mm256_zextsi128_si256(_mm_unpacklo_epi8(mins, zero)),
    }
}

impl Super for Q4K {
    const BYTES: usize = 144;
    const SUB: usize = 32;
    const PAIRS: usize = 8;
    const SCALE_AT: usize = 0;
    const MINIMUMS: bool = true;

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn unpack(block: *const u8) -> Unpacked {
        let mut quants = [_mm256_setzero_si256(); 8];
        for part in 0..4 {
            // SAFETY: 128 bytes of quants follow the 16 of the head.
            let both = unsafe { load(block.add(16 + 32 * part)) };
            (quants[2 * part], quants[2 * part + 1]) = (low_nibbles(both), high_nibbles(both));
        }
        // SAFETY: passed on.
        unsafe { with_head(block, quants) }
    }
}

impl Super for Q5K {
    const BYTES: usize = 176;
    const SUB: usize = 32;
    const PAIRS: usize = 4;
    const SCALE_AT: usize = 0;
    const MINIMUMS: bool = true;

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn unpack(block: *const u8) -> Unpacked {
        // SAFETY: 32 bytes of fifth bits follow the 16 of the head.
        let fifth = unsafe { load(block.add(16)) };
        let mut quants = [fifth; 8];
        for part in 0..4 {
            // SAFETY: 128 bytes of quants follow.
            let both = unsafe { load(block.add(48 + 32 * part)) };
            for (ahead, four) in [low_nibbles(both), high_nibbles(both)].into_iter().enumerate() {
                let number = 2 * part + ahead;
                quants[number] = _mm256_or_si256(four, _mm256_slli_epi16::<4>(bits(fifth, number, 1)));
            }
        }
        // SAFETY: passed on.
        unsafe { with_head(block, quants) }
    }
}

impl Super for Q6K {
    const BYTES: usize = 210;
    const SUB: usize = 16;
    const PAIRS: usize = 2;
    const SCALE_AT: usize = 208;
    const MINIMUMS: bool = false;
    const LESS: i32 = 5;

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn unpack(block: *const u8) -> Unpacked {
        let mut quants = [_mm256_setzero_si256(); 8];
        let join = |four, two| _mm256_or_si256(four, _mm256_and_si256(two, _mm256_set1_epi8(0x30)));
        for half in 0..2 {
            // SAFETY: 128 bytes of low bits, then 64 of high bits.
            let (first, second, high) = unsafe {
                (
                    load(block.add(64 * half)),
                    load(block.add(64 * half + 32)),
                    load(block.add(128 + 32 * half)),
                )
            };
            quants[4 * half] = join(low_nibbles(first), _mm256_slli_epi16::<4>(high));
            quants[4 * half + 1] = join(low_nibbles(second), _mm256_slli_epi16::<2>(high));
            quants[4 * half + 2] = join(high_nibbles(first), high);
            quants[4 * half + 3] = join(high_nibbles(second), _mm256_srli_epi16::<2>(high));
        }
        // SAFETY: 16 scales follow the 192 bytes of quants.
        let scales = _mm256_cvtepi8_epi16(unsafe { _mm_loadu_si128(block.add(192).cast()) });
        Unpacked {
            quants,
            scales,
            mins: scales,
        }
    }
}

impl Super for Q2K {
    const BYTES: usize = 84;
    const SUB: usize = 16;
    const PAIRS: usize = 4;
    const SCALE_AT: usize = 80;
    const MINIMUMS: bool = true;

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn unpack(block: *const u8) -> Unpacked {
        let mut quants = [_mm256_setzero_si256(); 8];
        for (number, quants) in quants.iter_mut().enumerate() {
            // SAFETY: 64 bytes of quants follow the 16 of the head.
            let four = unsafe { load(block.add(16 + 32 * (number / 4))) };
            *quants = bits(four, 2 * (number % 4), 3);
        }
        // SAFETY: sixteen bytes are the head: of each the lower half is a scale and the upper one a minimum.
        let both = unsafe { _mm_loadu_si128(block.cast()) };
        let low = _mm_set1_epi8(15);
        Unpacked {
            quants,
            scales: _mm256_cvtepu8_epi16(_mm_and_si128(both, low)),
            mins: _mm256_cvtepu8_epi16(_mm_and_si128(_mm_srli_epi16::<4>(both), low)),
        }
    }
}

impl Super for Q3K {
    const BYTES: usize = 110;
    const SUB: usize = 16;
    const PAIRS: usize = 4;
    const SCALE_AT: usize = 108;
    const MINIMUMS: bool = false;
    const LESS: i32 = 2;

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn unpack(block: *const u8) -> Unpacked {
        // SAFETY: 32 bytes of third bits are the start.
        let third = unsafe { load(block) };
        let mut quants = [third; 8];
        for (number, quants) in quants.iter_mut().enumerate() {
            // SAFETY: 64 bytes of quants follow.
            let four = unsafe { load(block.add(32 + 32 * (number / 4))) };
            let bit = _mm256_slli_epi16::<2>(bits(third, number, 1));
            *quants = _mm256_or_si256(bits(four, 2 * (number % 4), 3), bit);
        }
        // SAFETY: twelve bytes of scales follow: of eight bytes both halves are the lower bits, the last four have the upper ones.
        let words = unsafe { block.add(96).cast::<[u32; 3]>().read_unaligned() };
        let [a, b, c] = words.map(u32::from_le);
        let (low, two) = (0x0f0f_0f0f, 0x0303_0303);
        let scale = |four: u32, from: u32| ((four & low) | (((c >> from) & two) << 4)).cast_signed();
        let bytes = _mm_set_epi32(scale(b >> 4, 6), scale(a >> 4, 4), scale(b, 2), scale(a, 0));
        let scales = _mm256_cvtepi8_epi16(_mm_sub_epi8(bytes, _mm_set1_epi8(32)));
        Unpacked {
            quants,
            scales,
            mins: scales,
        }
    }
}

/// Sixteen bytes as 32 nibbles, lower halves first.
///
/// # Safety
///
/// Sixteen bytes can be read at `at`.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn nibbles(at: *const u8) -> __m256i {
    // SAFETY: the caller's promise.
    let both = unsafe { _mm_loadu_si128(at.cast()) };
    low_nibbles(_mm256_set_m128i(_mm_srli_epi16::<4>(both), both))
}

/// 32 bits as the fifth bits of 32 bytes.
///
/// # Safety
///
/// Four bytes can be read at `at`.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn fifth_bits(at: *const u8) -> __m256i {
    // SAFETY: the caller's promise.
    let bits = _mm256_set1_epi32(unsafe { at.cast::<i32>().read_unaligned() });
    let eight = |byte: i64| 0x0101_0101_0101_0101 * byte;
    // Each byte eight times, of which each keeps another bit.
    let spread = _mm256_shuffle_epi8(bits, _mm256_set_epi64x(eight(3), eight(2), eight(1), 0));
    let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64.cast_signed());
    let set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit);
    _mm256_and_si256(set, _mm256_set1_epi8(16))
}

macro_rules! small {
    ($name:ident, $bytes:expr, $added:expr, $pairs:expr, $minimum:expr, |$block:ident| $unpack:expr) => {
        impl Small for $name {
            const BYTES: usize = $bytes;
            const ADDED: i32 = $added;
            const PAIRS: usize = $pairs;
            const MINIMUM: bool = $minimum;

            #[inline]
            #[target_feature(enable = "avx2")]
            unsafe fn unpack($block: *const u8) -> __m256i {
                // SAFETY: inside the block.
                unsafe { $unpack }
            }
        }
    };
}

small!(Q8_0, 34, 128, 1, false, |block| load(block.add(2)));
small!(Q4_0, 18, 8, 8, false, |block| nibbles(block.add(2)));
small!(Q4_1, 20, 0, 8, true, |block| nibbles(block.add(4)));
small!(Q5_0, 22, 16, 4, false, |block| _mm256_or_si256(
    nibbles(block.add(6)),
    fifth_bits(block.add(2))
));
small!(Q5_1, 24, 0, 4, true, |block| _mm256_or_si256(
    nibbles(block.add(8)),
    fifth_bits(block.add(4))
));

/// By how many bits -128 times the sum of activations is shifted to make up for what was added to quants, if anything was.
#[inline]
pub(super) fn less<S: Set, T: Small>() -> Option<i32> {
    match T::ADDED {
        0 => None,
        128 if S::DOT == Dot::Pairs => None,
        added => Some(7 - added.ilog2().cast_signed()),
    }
}

/// The halves at four addresses as `f32`.
///
/// # Safety
///
/// Two bytes can be read at each.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn four_halves(at: [*const u8; 4]) -> __m128 {
    // SAFETY: the caller's promise.
    let half = |lane: usize| u64::from(u16::from_le(unsafe { at[lane].cast::<u16>().read_unaligned() }));
    let four = half(0) | (half(1) << 16) | (half(2) << 32) | (half(3) << 48);
    _mm_cvtph_ps(_mm_cvtsi64_si128(four.cast_signed()))
}

/// The two halves at each of four addresses as `f32`: the first ones, and the second ones.
///
/// # Safety
///
/// Four bytes can be read at each.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn four_pairs(at: [*const u8; 4]) -> (__m128, __m128) {
    // SAFETY: the caller's promise.
    let pair = |lane: usize| unsafe { at[lane].cast::<i32>().read_unaligned() };
    let both = _mm256_cvtph_ps(_mm_set_epi32(pair(3), pair(2), pair(1), pair(0)));
    let (low, high) = (_mm256_castps256_ps128(both), _mm256_extractf128_ps::<1>(both));
    (
        _mm_shuffle_ps::<0b10_00_10_00>(low, high),
        _mm_shuffle_ps::<0b11_01_11_01>(low, high),
    )
}

/// The sums of all lanes of each of four registers.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn four_sums([a, b, c, d]: [__m256i; 4]) -> __m128i {
    let pair = |x, y| _mm256_add_epi32(_mm256_unpacklo_epi32(x, y), _mm256_unpackhi_epi32(x, y));
    let (ab, cd) = (pair(a, b), pair(c, d));
    let all = _mm256_add_epi32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
    _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256::<1>(all))
}

/// Runs of 32 in a block of 256.
pub(super) const RUNS: usize = SUPER / 32;
