//! Unpacked blocks of every quantised type in 256-bit registers.
//!
//! They serve kernels for AVX2, AVX-VNNI and AVX-512: products with a few tokens ([`rows256`](super::rows256)) and with
//! many ([`tile256`](super::tile256)). Quants become unsigned bytes: the offset subtracted by a type is applied through
//! the sums of activations.

use std::arch::x86_64::*;

use super::{
    quant::SUPER,
    set256::{Dot, Set},
};

mod table;

/// Rows unpacked together.
pub(super) const ROWS: usize = 4;

/// A block of each of four rows.
pub(super) type Four = [*const u8; ROWS];

/// Block-wide data of 256 columns of four rows besides quants. Four 16-bit numbers of a row are 64 bits of a register:
/// rows 0 and 1 in its lower half, 2 and 3 in the upper one.
pub(super) struct Heads {
    /// Scales: sixteen per row, or eight if [`Super::SUB`] is 32.
    pub(super) scales: [__m256i; 4],
    /// As many factors of the sums of activations.
    pub(super) mins: [__m256i; 4],
    /// The `f32` factors of scales, followed after the two of each half by those of minimums.
    pub(super) scale: __m256,
}

/// A type with blocks of 256 columns.
pub(super) trait Super: Quants {
    /// Bytes of a block.
    const BYTES: usize;
    /// Number of tokens from which a tile is faster than a few rows with a few tokens at a time, in 256-bit registers
    /// (measured on Zen 5) and in 512-bit ones (measured on Ice Lake).
    const TILE_FROM: usize = 20;
    const TILE512_FROM: usize = 6;
    /// Columns that share a scale: 16 or 32. A 16-bit number holds the sum of their products in four lanes.
    const SUB: usize;
    /// Number of products of two quants that fit a 16-bit sum, as a power of two, at most those of a scale.
    const PAIRS: usize;
    /// Whether there are minimums; if not, quants are reduced by `1 << LESS`, and `mins` are the scales.
    const MINIMUMS: bool;
    const LESS: i32 = 0;
    /// Whether quants are already reduced, thus signed: only then do two products fit 16 bits. [`Self::LESS`] is 7.
    const SIGNED: bool = false;

    /// # Safety
    ///
    /// `four` are blocks of this type.
    unsafe fn heads(four: Four) -> Heads;
}

/// The quants of blocks of 256 columns.
pub(super) trait Quants {
    /// Those of one row in runs of 32.
    ///
    /// # Safety
    ///
    /// `block` is a block of this type.
    unsafe fn unpack(block: *const u8) -> [__m256i; RUNS];

    /// Those of four rows, for each run of 32 columns whose quants share bytes: eight columns of each row in a
    /// register, if sixteen columns share a scale those selected by `half`.
    ///
    /// # Safety
    ///
    /// `four` are blocks of this type.
    unsafe fn unpack_four(four: Four, chunk: usize, half: usize) -> [[__m256i; 4]; 4];
}

/// A type whose bytes contain quants of several runs of 32 columns.
pub(super) trait Runs: Super {
    /// For each run whose quants share bytes, 64 columns or 128, the unsigned quants from the bytes returned by `load`:
    /// several bytes from a position in the block, of one row or of several interleaved ones.
    ///
    /// # Safety
    ///
    /// The machine has AVX2.
    unsafe fn runs(chunk: usize, load: impl Fn(usize) -> __m256i) -> [__m256i; 4];
}

impl<T: Runs> Quants for T {
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn unpack(block: *const u8) -> [__m256i; RUNS] {
        let mut quants = [_mm256_setzero_si256(); RUNS];
        for (chunk, quants) in quants.chunks_exact_mut(runs_of_chunk::<T>()).enumerate() {
            // SAFETY: inside the block; this function needs AVX2 too.
            let runs = unsafe { T::runs(chunk, |at| load(block.add(at))) };
            quants.copy_from_slice(&runs[..quants.len()]);
        }
        quants
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn unpack_four(four: Four, chunk: usize, half: usize) -> [[__m256i; 4]; 4] {
        let mut quants = [[_mm256_setzero_si256(); 4]; 4];
        for piece in 0..T::SUB / 8 {
            let (at, number) = (16 * (half + piece / 2), piece % 2);
            // SAFETY: inside the blocks; this function needs AVX2 too.
            let columns = unsafe { T::runs(chunk, |from| pieces(four, from + at)[number]) };
            for run in 0..runs_of_chunk::<T>() {
                quants[run][piece] = columns[run];
            }
        }
        quants
    }
}

/// Runs of 32 columns whose quants share bytes.
pub(super) const fn runs_of_chunk<T: Super>() -> usize {
    if T::SUB == 32 { 2 } else { 4 }
}

/// Sixteen bytes of four rows from `at` on: the first eight of each, and the last.
///
/// # Safety
///
/// Sixteen bytes can be read there in each row.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) unsafe fn pieces(four: Four, at: usize) -> [__m256i; 2] {
    // SAFETY: the caller's promise.
    let (even, odd) = unsafe { even_and_odd(four, at) };
    [
        _mm256_unpacklo_epi64(even, odd),
        _mm256_unpackhi_epi64(even, odd),
    ]
}

/// Sixteen bytes from `at` on of rows 0 and 2, and of rows 1 and 3.
///
/// # Safety
///
/// As in [`pieces`].
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn even_and_odd(four: Four, at: usize) -> (__m256i, __m256i) {
    // SAFETY: the caller's promise.
    let half = |row: usize| unsafe { _mm_loadu_si128(four[row].add(at).cast()) };
    (
        _mm256_set_m128i(half(2), half(0)),
        _mm256_set_m128i(half(3), half(1)),
    )
}

/// A type with blocks of 32 columns.
pub(super) trait Small {
    /// Bytes of a block.
    const BYTES: usize;
    /// As in [`Super`].
    const TILE_FROM: usize = 20;
    const TILE512_FROM: usize = 9;
    /// Offset that makes quants unsigned, a power of two; with 128 they are signed.
    const ADDED: i32;
    /// Number of products of two quants that fit a 16-bit sum.
    const PAIRS: usize;
    /// Whether a second `f16` is the block's minimum.
    const MINIMUM: bool = false;

    /// The quants of one row.
    ///
    /// # Safety
    ///
    /// `block` is a block of this type.
    unsafe fn unpack(block: *const u8) -> __m256i;

    /// The quants of four rows, eight columns of each in a register.
    ///
    /// # Safety
    ///
    /// `four` are blocks of this type.
    unsafe fn unpack_four(four: Four) -> [__m256i; 4];

    /// The scales of eight blocks.
    ///
    /// # Safety
    ///
    /// `eight` are blocks of this type.
    unsafe fn scales(eight: Eight) -> __m256;
}

/// Eight blocks.
pub(super) type Eight = [*const u8; 8];

/// Type tags for selecting kernels.
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
pub(super) struct IQ4NL;
pub(super) struct IQ4XS;
pub(super) struct MXFP4;

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

/// Bits `from` and above of each byte, masked by `mask`.
#[inline]
#[target_feature(enable = "avx2")]
fn bits(bytes: __m256i, from: usize, mask: i8) -> __m256i {
    let shifted = _mm256_srl_epi16(bytes, _mm_cvtsi64_si128(i64::try_from(from).unwrap_or(0)));
    _mm256_and_si256(shifted, _mm256_set1_epi8(mask))
}

/// Moves bit `from` of each byte to bit `to`.
#[inline]
#[target_feature(enable = "avx2")]
fn bit(bytes: __m256i, from: usize, to: usize) -> __m256i {
    let count = |bits: usize| _mm_cvtsi64_si128(i64::try_from(bits).unwrap_or(0));
    let shifted = if from < to {
        _mm256_sll_epi16(bytes, count(to - from))
    } else {
        _mm256_srl_epi16(bytes, count(from - to))
    };
    _mm256_and_si256(shifted, _mm256_set1_epi8(1 << to))
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

/// Scales and minimums of Q4_K or Q5_K blocks.
///
/// # Safety
///
/// `four` are such blocks.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn heads_of_six_bits(four: Four) -> Heads {
    // SAFETY: sixteen bytes are the head.
    let (even, odd) = unsafe { even_and_odd(four, 0) };
    // Words 1 and 2 are the first four scales and minimums in six bits each, with two bits of the last four above them,
    // whose lower four bits are in word 3.
    let (low, high) = (
        _mm256_unpacklo_epi32(even, odd),
        _mm256_unpackhi_epi32(even, odd),
    );
    let both =
        _mm256_shuffle_ps::<0b01_00_11_10>(_mm256_castsi256_ps(low), _mm256_castsi256_ps(high));
    let both = _mm256_castps_si256(both);
    let third = _mm256_shuffle_epi32::<0b11_10_11_10>(high);
    let third = _mm256_srlv_epi32(third, _mm256_set_epi32(4, 4, 0, 0, 4, 4, 0, 0));
    let first = _mm256_and_si256(both, _mm256_set1_epi8(63));
    let upper = _mm256_and_si256(_mm256_srli_epi32::<2>(both), _mm256_set1_epi8(0x30));
    let last = _mm256_or_si256(low_nibbles(third), upper);
    let zero = _mm256_setzero_si256();
    let halves = _mm256_permute4x64_epi64::<0b10_00>(_mm256_unpacklo_epi16(even, odd));
    Heads {
        scales: [
            _mm256_unpacklo_epi8(first, zero),
            _mm256_unpacklo_epi8(last, zero),
            zero,
            zero,
        ],
        mins: [
            _mm256_unpackhi_epi8(first, zero),
            _mm256_unpackhi_epi8(last, zero),
            zero,
            zero,
        ],
        scale: _mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
    }
}

/// Sixteen bytes of each row in the layout of [`pieces`], as 16-bit numbers in the layout of [`Heads`].
#[inline]
#[target_feature(enable = "avx2")]
fn words<const SIGNED: bool>(bytes: [__m256i; 2]) -> [__m256i; 4] {
    let mut words = [_mm256_setzero_si256(); 4];
    for (bytes, words) in bytes.into_iter().zip(words.chunks_exact_mut(2)) {
        let bytes = _mm256_shuffle_epi32::<0b11_01_10_00>(bytes);
        let zero = _mm256_setzero_si256();
        let above = if SIGNED {
            _mm256_cmpgt_epi8(zero, bytes)
        } else {
            zero
        };
        words[0] = _mm256_unpacklo_epi8(bytes, above);
        words[1] = _mm256_unpackhi_epi8(bytes, above);
    }
    words
}

/// The `f16` at `at` of each block in the layout of scales in [`Heads`].
///
/// # Safety
///
/// Two bytes can be read there.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn halves(four: Four, at: usize) -> __m256 {
    let half = |row: usize| {
        // SAFETY: the caller's promise.
        i64::from(u16::from_le(unsafe {
            four[row].add(at).cast::<u16>().read_unaligned()
        }))
    };
    let two = |row: usize| half(row) | (half(row + 1) << 16);
    _mm256_cvtph_ps(_mm_set_epi64x(two(2), two(0)))
}

impl Super for Q4K {
    const BYTES: usize = 144;
    const TILE_FROM: usize = 40;
    const TILE512_FROM: usize = 16;
    const SUB: usize = 32;
    const PAIRS: usize = 8;
    const MINIMUMS: bool = true;

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn heads(four: Four) -> Heads {
        // SAFETY: the caller's promise.
        unsafe { heads_of_six_bits(four) }
    }
}

impl Runs for Q4K {
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn runs(chunk: usize, load: impl Fn(usize) -> __m256i) -> [__m256i; 4] {
        // 128 bytes of quants follow the 16 of the head.
        let both = load(16 + 32 * chunk);
        [low_nibbles(both), high_nibbles(both), both, both]
    }
}

impl Super for Q5K {
    const BYTES: usize = 176;
    const SUB: usize = 32;
    const PAIRS: usize = 4;
    const MINIMUMS: bool = true;

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn heads(four: Four) -> Heads {
        // SAFETY: the caller's promise.
        unsafe { heads_of_six_bits(four) }
    }
}

impl Runs for Q5K {
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn runs(chunk: usize, load: impl Fn(usize) -> __m256i) -> [__m256i; 4] {
        // 32 bytes of fifth bits follow the 16 of the head, and then 128 bytes of quants.
        let (fifth, both) = (load(16), load(48 + 32 * chunk));
        let bit = |run: usize| bit(fifth, 2 * chunk + run, 4);
        let (low, high) = (low_nibbles(both), high_nibbles(both));
        [
            _mm256_or_si256(low, bit(0)),
            _mm256_or_si256(high, bit(1)),
            both,
            both,
        ]
    }
}

impl Super for Q6K {
    const BYTES: usize = 210;
    const SUB: usize = 16;
    const PAIRS: usize = 2;
    const MINIMUMS: bool = false;
    const LESS: i32 = 5;

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn heads(four: Four) -> Heads {
        // SAFETY: 16 scales follow the 192 bytes of quants, then an `f16`.
        let (scales, scale) = unsafe { (words::<true>(pieces(four, 192)), halves(four, 208)) };
        let mins = scales;
        Heads {
            scales,
            mins,
            scale,
        }
    }
}

impl Runs for Q6K {
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn runs(chunk: usize, load: impl Fn(usize) -> __m256i) -> [__m256i; 4] {
        // 128 bytes of low bits, then 64 of high bits.
        let (first, second) = (load(64 * chunk), load(64 * chunk + 32));
        let high = load(128 + 32 * chunk);
        let join = |four, two| _mm256_or_si256(four, _mm256_and_si256(two, _mm256_set1_epi8(0x30)));
        [
            join(low_nibbles(first), _mm256_slli_epi16::<4>(high)),
            join(low_nibbles(second), _mm256_slli_epi16::<2>(high)),
            join(high_nibbles(first), high),
            join(high_nibbles(second), _mm256_srli_epi16::<2>(high)),
        ]
    }
}

impl Super for Q2K {
    const BYTES: usize = 84;
    const TILE_FROM: usize = 40;
    const TILE512_FROM: usize = 9;
    const SUB: usize = 16;
    const PAIRS: usize = 4;
    const MINIMUMS: bool = true;

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn heads(four: Four) -> Heads {
        // SAFETY: sixteen bytes are the head: the lower half of each is a scale and the upper one a minimum. Two `f16`
        // values end the block.
        let (both, pair) = unsafe {
            let pair = |row: usize| four[row].add(80).cast::<i32>().read_unaligned();
            (
                pieces(four, 0),
                _mm_set_epi32(pair(3), pair(2), pair(1), pair(0)),
            )
        };
        let order = _mm_set_epi8(15, 14, 11, 10, 13, 12, 9, 8, 7, 6, 3, 2, 5, 4, 1, 0);
        Heads {
            scales: words::<false>([low_nibbles(both[0]), low_nibbles(both[1])]),
            mins: words::<false>([high_nibbles(both[0]), high_nibbles(both[1])]),
            scale: _mm256_cvtph_ps(_mm_shuffle_epi8(pair, order)),
        }
    }
}

impl Runs for Q2K {
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn runs(chunk: usize, load: impl Fn(usize) -> __m256i) -> [__m256i; 4] {
        // 64 bytes of quants follow the 16 of the head.
        let four = load(16 + 32 * chunk);
        [
            bits(four, 0, 3),
            bits(four, 2, 3),
            bits(four, 4, 3),
            bits(four, 6, 3),
        ]
    }
}

impl Super for Q3K {
    const BYTES: usize = 110;
    const SUB: usize = 16;
    const PAIRS: usize = 4;
    const MINIMUMS: bool = false;
    const LESS: i32 = 2;

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn heads(four: Four) -> Heads {
        // SAFETY: the last 16 bytes: two of quants, twelve of scales, of which the first eight have the lower bits in
        // both halves and the last four the upper ones, and an `f16`.
        let ((even, odd), scale) = unsafe { (even_and_odd(four, 94), halves(four, 108)) };
        let (even, odd) = (_mm256_srli_si256::<2>(even), _mm256_srli_si256::<2>(odd));
        let low = _mm256_unpacklo_epi32(even, odd);
        let third = _mm256_unpackhi_epi32(even, odd);
        let third = _mm256_unpacklo_epi64(third, third);
        let upper = |shifted| _mm256_and_si256(shifted, _mm256_set1_epi8(0x30));
        let first = upper(_mm256_sllv_epi32(
            third,
            _mm256_set_epi32(2, 2, 4, 4, 2, 2, 4, 4),
        ));
        let last = upper(_mm256_srlv_epi32(
            third,
            _mm256_set_epi32(2, 2, 0, 0, 2, 2, 0, 0),
        ));
        let signed =
            |low, upper| _mm256_sub_epi8(_mm256_or_si256(low, upper), _mm256_set1_epi8(32));
        let order = |bytes| _mm256_shuffle_epi32::<0b11_01_10_00>(bytes);
        let scales = words::<true>([
            order(signed(low_nibbles(low), first)),
            order(signed(high_nibbles(low), last)),
        ]);
        let mins = scales;
        Heads {
            scales,
            mins,
            scale,
        }
    }
}

impl Runs for Q3K {
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn runs(chunk: usize, load: impl Fn(usize) -> __m256i) -> [__m256i; 4] {
        // It starts with 32 bytes of third bits, followed by 64 bytes of quants.
        let (third, four) = (load(0), load(32 + 32 * chunk));
        let join =
            |run: usize| _mm256_or_si256(bits(four, 2 * run, 3), bit(third, 4 * chunk + run, 2));
        [join(0), join(1), join(2), join(3)]
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
    // Each byte eight times, each of which keeps a different bit.
    let spread = _mm256_shuffle_epi8(bits, _mm256_set_epi64x(3 * EIGHT, 2 * EIGHT, EIGHT, 0));
    let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64.cast_signed());
    let set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit);
    _mm256_and_si256(set, _mm256_set1_epi8(16))
}

/// Sixteen bytes of each of four rows as nibbles: eight columns of each in a register.
///
/// # Safety
///
/// Sixteen bytes can be read at `at` of each.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn nibbles_of_four(four: Four, at: usize) -> [__m256i; 4] {
    // SAFETY: the caller's promise.
    let [first, last] = unsafe { pieces(four, at) };
    [
        low_nibbles(first),
        low_nibbles(last),
        high_nibbles(first),
        high_nibbles(last),
    ]
}

/// As [`nibbles_of_four`], with 32 bits of each row at `bits` as fifth ones.
///
/// # Safety
///
/// As above, and four bytes can be read at `bits` of each.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn with_fifth_bits(four: Four, bits: usize, at: usize) -> [__m256i; 4] {
    // SAFETY: the caller's promise.
    let (mut quants, bits) = unsafe {
        let word = |row: usize| four[row].add(bits).cast::<i32>().read_unaligned();
        (
            nibbles_of_four(four, at),
            _mm256_set_epi32(0, 0, word(3), word(2), 0, 0, word(1), word(0)),
        )
    };
    let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64.cast_signed());
    // A byte of each row eight times, each of which keeps a different bit.
    let mut places = _mm256_set_epi64x(EIGHT * 4, 0, EIGHT * 4, 0);
    for quants in &mut quants {
        let set = _mm256_cmpeq_epi8(
            _mm256_and_si256(_mm256_shuffle_epi8(bits, places), bit),
            bit,
        );
        *quants = _mm256_or_si256(*quants, _mm256_and_si256(set, _mm256_set1_epi8(16)));
        places = _mm256_add_epi8(places, _mm256_set1_epi8(1));
    }
    quants
}

/// Repeats a byte eight times.
const EIGHT: i64 = 0x0101_0101_0101_0101;

/// The 32 bytes of each of four rows at `at`: eight columns of each in a register.
///
/// # Safety
///
/// They are readable.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn bytes_of_four(four: Four, at: usize) -> [__m256i; 4] {
    // SAFETY: the caller's promise.
    let ([a, b], [c, d]) = unsafe { (pieces(four, at), pieces(four, at + 16)) };
    [a, b, c, d]
}

/// The `f16` values at eight addresses as `f32`.
///
/// # Safety
///
/// Two bytes can be read at each.
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn halves_of_eight(eight: Eight) -> __m256 {
    let half = |at: usize| {
        // SAFETY: the caller's promise.
        i64::from(u16::from_le(unsafe {
            eight[at].cast::<u16>().read_unaligned()
        }))
    };
    let four =
        |at: usize| half(at) | (half(at + 1) << 16) | (half(at + 2) << 32) | (half(at + 3) << 48);
    _mm256_cvtph_ps(_mm_set_epi64x(four(4), four(0)))
}

macro_rules! small {
    ($name:ident, $bytes:expr, $added:expr, $pairs:expr, $minimum:expr, |$block:ident| $unpack:expr, $four:ident($($at:expr),*), $scales:ident) => {
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

            #[inline]
            #[target_feature(enable = "avx2")]
            unsafe fn unpack_four(four: Four) -> [__m256i; 4] {
                // SAFETY: inside the blocks.
                unsafe { $four(four, $($at),*) }
            }

            #[inline]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn scales(eight: Eight) -> __m256 {
                // SAFETY: blocks start with their scales.
                unsafe { $scales(eight) }
            }
        }
    };
}

use small;

small!(
    Q8_0,
    34,
    128,
    1,
    false,
    |block| load(block.add(2)),
    bytes_of_four(2),
    halves_of_eight
);
small!(
    Q4_0,
    18,
    8,
    8,
    false,
    |block| nibbles(block.add(2)),
    nibbles_of_four(2),
    halves_of_eight
);
small!(
    Q4_1,
    20,
    0,
    8,
    true,
    |block| nibbles(block.add(4)),
    nibbles_of_four(4),
    halves_of_eight
);
small!(
    Q5_0,
    22,
    16,
    4,
    false,
    |block| _mm256_or_si256(nibbles(block.add(6)), fifth_bits(block.add(2))),
    with_fifth_bits(2, 6),
    halves_of_eight
);
small!(
    Q5_1,
    24,
    0,
    4,
    true,
    |block| _mm256_or_si256(nibbles(block.add(8)), fifth_bits(block.add(4))),
    with_fifth_bits(4, 8),
    halves_of_eight
);

/// Shift of -128 times the sum of activations that corrects for the offset of quants, if any.
#[inline]
pub(super) fn less<S: Set, T: Small>() -> Option<i32> {
    match T::ADDED {
        0 => None,
        128 if S::DOT == Dot::Pairs => None,
        added => Some(7 - added.ilog2().cast_signed()),
    }
}

/// Binary logarithm of the offset of quants that sums of activations correct; `None` if quants have no such offset.
#[inline]
pub(super) fn excess<S: Set, T: Super>() -> Option<i32> {
    let is_exact = T::MINIMUMS || (T::SIGNED && S::DOT == Dot::Pairs);
    (!is_exact).then_some(T::LESS)
}

/// Runs of 32 in a block of 256.
pub(super) const RUNS: usize = SUPER / 32;
