//! Blocks whose quants are looked up in a table of sixteen values.

use std::arch::x86_64::*;

use super::{
    super::table::{E2M1, IQ4, LEAST_POWER, Table, raised},
    Eight, Four, Heads, IQ4NL, IQ4XS, MXFP4, Quants, RUNS, Small, Super, halves, halves_of_eight,
    nibbles, nibbles_of_four, small,
};

small!(
    IQ4NL,
    18,
    128,
    1,
    false,
    |block| looked_up(IQ4, nibbles(block.add(2))),
    looked_up_four(2, IQ4),
    halves_of_eight
);
small!(
    MXFP4,
    17,
    16,
    4,
    false,
    |block| looked_up(E2M1_RAISED, nibbles(block.add(1))),
    looked_up_four(1, E2M1_RAISED),
    powers_of_eight
);

/// Values of MXFP4 with an offset of 16.
const E2M1_RAISED: Table = raised(E2M1, 16);

impl Quants for IQ4XS {
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn unpack(block: *const u8) -> [__m256i; RUNS] {
        let mut quants = [_mm256_setzero_si256(); RUNS];
        for (run, quants) in quants.iter_mut().enumerate() {
            // SAFETY: 16 bytes of indices for each run follow the 8 of the head.
            *quants = looked_up(IQ4, unsafe { nibbles(block.add(8 + 16 * run)) });
        }
        quants
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn unpack_four(four: Four, chunk: usize, _: usize) -> [[__m256i; 4]; 4] {
        let at = 8 + 32 * chunk;
        // SAFETY: as above.
        let [first, second] = unsafe {
            [
                looked_up_four(four, at, IQ4),
                looked_up_four(four, at + 16, IQ4),
            ]
        };
        [first, second, first, second]
    }
}

impl Super for IQ4XS {
    const BYTES: usize = 136;
    const TILE_FROM: usize = 40;
    const TILE512_FROM: usize = 10;
    const SUB: usize = 32;
    const PAIRS: usize = 1;
    const MINIMUMS: bool = false;
    const LESS: i32 = 7;
    const SIGNED: bool = true;

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn heads(four: Four) -> Heads {
        // SAFETY: eight bytes are the head: an `f16`, the upper two bits of eight scales, and their lower four bits.
        let (head, scale) = unsafe {
            let head = |row: usize| four[row].cast::<i64>().read_unaligned();
            (
                _mm256_set_epi64x(head(3), head(2), head(1), head(0)),
                halves(four, 0),
            )
        };
        // Each product moves the bits of one scale to the same place.
        let four_scales = |number: i64| {
            let (low, high) = (4 + 2 * number, 2 + number);
            let low = words_of_bytes(head, [low, low, low + 1, low + 1]);
            let low = _mm256_mullo_epi16(low, _mm256_set1_epi64x(0x0001_0010_0001_0010));
            let high = words_of_bytes(head, [high; 4]);
            let high = _mm256_mullo_epi16(high, _mm256_set1_epi64x(0x0001_0004_0010_0040));
            let scales = _mm256_or_si256(
                _mm256_and_si256(_mm256_srli_epi16::<4>(low), _mm256_set1_epi16(15)),
                _mm256_and_si256(_mm256_srli_epi16::<2>(high), _mm256_set1_epi16(0x30)),
            );
            _mm256_sub_epi16(scales, _mm256_set1_epi16(32))
        };
        let zero = _mm256_setzero_si256();
        let scales = [four_scales(0), four_scales(1), zero, zero];
        let mins = scales;
        Heads {
            scales,
            mins,
            scale,
        }
    }
}

/// Entries of a table with these indices.
#[inline]
#[target_feature(enable = "avx2")]
fn looked_up(table: Table, indices: __m256i) -> __m256i {
    // SAFETY: sixteen bytes.
    let table = unsafe { _mm_loadu_si128(table.as_ptr().cast()) };
    _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), indices)
}

/// As [`nibbles_of_four`], looked up in a table.
///
/// # Safety
///
/// As there.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn looked_up_four(four: Four, at: usize, table: Table) -> [__m256i; 4] {
    // SAFETY: the caller's promise.
    let mut quants = unsafe { nibbles_of_four(four, at) };
    for quants in &mut quants {
        *quants = looked_up(table, *quants);
    }
    quants
}

/// Four of the eight bytes of each row, as 16-bit numbers.
#[inline]
#[target_feature(enable = "avx2")]
fn words_of_bytes(rows: __m256i, bytes: [i64; 4]) -> __m256i {
    // The upper byte of each number is zero (bit 7 of its index).
    let place = |row: i64| {
        let places = bytes.iter().rev();
        places.fold(0, |all: i64, byte| (all << 16) | 0x8000 | (8 * row + byte))
    };
    _mm256_shuffle_epi8(
        rows,
        _mm256_set_epi64x(place(1), place(0), place(1), place(0)),
    )
}

/// The numbers of [`half_of_power`](super::super::table::half_of_power) for the bytes at eight addresses.
///
/// # Safety
///
/// They can be read.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn powers_of_eight(eight: Eight) -> __m256 {
    // SAFETY: the caller's promise.
    let byte = |at: usize| i64::from(unsafe { eight[at].read() }) << (8 * at);
    let bytes = (0..8).fold(0, |all, at| all | byte(at));
    let exponents = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(bytes));
    let bits = _mm256_slli_epi32::<23>(exponents);
    let least = _mm256_set1_epi32(LEAST_POWER.cast_signed());
    let power = _mm256_castsi256_ps(_mm256_max_epi32(bits, least));
    _mm256_fnmadd_ps(power, _mm256_set1_ps(0.5), power)
}
