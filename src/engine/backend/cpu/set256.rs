//! Instruction sets with 256-bit registers, and their products of bytes.

use std::arch::x86_64::*;

/// Byte multiplication of an instruction set.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Dot {
    /// Into pairs of 16 bits, which are multiplied and summed again (AVX2).
    Pairs,
    /// Four at once, in the encoding of AVX-VNNI.
    Vex,
    /// Four at once, in the encoding of AVX-512.
    Evex,
    /// Emulation of the previous two by AVX2 instructions.
    #[cfg(test)]
    Emulated,
}

/// An instruction set with 256-bit registers. Differences between sets are written as single instructions, so that
/// every kernel is compiled for AVX2.
pub(super) trait Set {
    const DOT: Dot;
}

/// Only AVX2.
pub(super) struct Avx2;
/// AVX2 and AVX-VNNI.
pub(super) struct AvxVnni;
/// AVX-512 VL and VNNI.
pub(super) struct Avx512;

/// AVX-VNNI on any machine with AVX2, so that the code around its instructions is tested there too.
#[cfg(test)]
pub(super) struct EmulatedVnni;

#[cfg(test)]
impl Set for EmulatedVnni {
    const DOT: Dot = Dot::Emulated;
}
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
        // SAFETY: one instruction of the set, which the machine has, on registers only.
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
    if !matches!(S::DOT, Dot::Vex | Dot::Evex) {
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

/// Adds the products of four unsigned with four signed bytes, no pair of which exceeds 16 bits.
///
/// # Safety
///
/// The machine has the set.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn add_bytes<S: Set>(
    mut sum: __m256i,
    unsigned: __m256i,
    signed: __m256i,
) -> __m256i {
    if S::DOT == Dot::Pairs {
        let pairs = _mm256_maddubs_epi16(unsigned, signed);
        return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    #[cfg(test)]
    if S::DOT == Dot::Emulated {
        return emulated_bytes(sum, unsigned, signed);
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

/// `vpdpbusd`: products of four unsigned with four signed bytes, added without saturation.
#[cfg(test)]
#[target_feature(enable = "avx2")]
fn emulated_bytes(sum: __m256i, unsigned: __m256i, signed: __m256i) -> __m256i {
    let half = |high: bool| {
        let of = |bytes| {
            if high {
                _mm256_extracti128_si256::<1>(bytes)
            } else {
                _mm256_castsi256_si128(bytes)
            }
        };
        _mm256_madd_epi16(
            _mm256_cvtepu8_epi16(of(unsigned)),
            _mm256_cvtepi8_epi16(of(signed)),
        )
    };
    // Pairs of neighbours: the first and third 64 bits are from the lower half.
    let fours = _mm256_hadd_epi32(half(false), half(true));
    _mm256_add_epi32(sum, _mm256_permute4x64_epi64::<0b11_01_10_00>(fours))
}
