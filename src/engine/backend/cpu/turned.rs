//! Transposed blocks of sixteen rows, for every quantised type.
//!
//! A register holds four columns of each row, so that a lane is a row.

use std::{arch::x86_64::*, hint};

use super::{
    quant::{BLOCK, Q8K_BYTES, Q8K_SUMS, SUPER},
    table::{E2M1, IQ4, LEAST_POWER, Table, raised},
    unpack256::{
        IQ4NL, IQ4XS, MXFP4, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0, Small, Super,
    },
};

/// Rows of a register.
pub(super) const LANES: usize = 16;

/// Blocks of sixteen consecutive rows.
#[derive(Clone, Copy)]
pub(super) struct Sixteen {
    /// Addresses of every fourth row.
    fours: [*const u8; 4],
    /// Bytes from a row to the next, second and third one after it.
    steps: [usize; 4],
}

impl Sixteen {
    pub(super) fn new(start: *const u8, row_bytes: usize) -> Self {
        // Hidden from the compiler, which would otherwise multiply again for each row.
        hint::black_box(Self {
            fours: [0, 4, 8, 12].map(|row| start.wrapping_add(row * row_bytes)),
            steps: [0, 1, 2, 3].map(|row| row * row_bytes),
        })
    }

    /// The same rows, advanced by `bytes`.
    #[inline(always)]
    pub(super) fn ahead(self, bytes: usize) -> Self {
        Self {
            fours: self.fours.map(|row| row.wrapping_add(bytes)),
            steps: self.steps,
        }
    }

    #[inline(always)]
    const fn row(&self, row: usize) -> *const u8 {
        self.fours[row / 4].wrapping_add(self.steps[row % 4])
    }

    /// Four dwords at `offset` of each row, transposed.
    ///
    /// # Safety
    ///
    /// 16 bytes from `offset` can be read in each row.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    pub(super) unsafe fn dwords(self, offset: usize) -> [__m512i; 4] {
        // Quarter q of number i has row 4 q + i.
        let rows = |ahead: usize| {
            // SAFETY: the caller's promise.
            let quarter = |row: usize| unsafe {
                _mm_loadu_si128(self.row(row + ahead).wrapping_add(offset).cast())
            };
            let low = _mm512_inserti32x4::<1>(_mm512_castsi128_si512(quarter(0)), quarter(4));
            _mm512_inserti32x4::<3>(_mm512_inserti32x4::<2>(low, quarter(8)), quarter(12))
        };
        let (a, b, c, d) = (rows(0), rows(1), rows(2), rows(3));
        let (low, high) = (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
        let (low2, high2) = (_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
        [
            _mm512_unpacklo_epi64(low, low2),
            _mm512_unpackhi_epi64(low, low2),
            _mm512_unpacklo_epi64(high, high2),
            _mm512_unpackhi_epi64(high, high2),
        ]
    }

    /// The dword at `offset` of each row.
    ///
    /// # Safety
    ///
    /// 16 bytes from `offset` can be read in each row.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    unsafe fn dword(self, offset: usize) -> __m512i {
        // SAFETY: the caller's promise.
        unsafe { self.dwords(offset)[0] }
    }
}

/// Prefetches `bytes` bytes of each of sixteen rows, as they follow one another from `start` on.
///
/// Few at a time, between computations: a burst that exceeds the processor's pending reads holds up all later ones (Q6_K
/// times four tokens took 1.6 times as long with a burst for each block, Zen 5).
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn prefetch(start: *const u8, bytes: usize) {
    for line in 0..(LANES * bytes).div_ceil(64) {
        _mm_prefetch::<_MM_HINT_T0>(start.wrapping_add(64 * line).cast());
    }
}

/// A block of 32 columns of sixteen rows.
pub(super) struct Block {
    /// Unsigned quants: one register per group of four columns, with four bytes per row. They have an offset of 128,
    /// except for types with a minimum.
    pub(super) quants: [__m512i; 8],
    pub(super) scale: __m512,
    pub(super) min: __m512,
}

/// Block-wide data of 256 columns of sixteen rows besides quants.
pub(super) struct Head {
    /// Scales of its sub-blocks: eight, or sixteen.
    pub(super) scales: [__m512i; 16],
    /// For each pair of sums of activations, of 32 if minimums have separate scales and otherwise of 16: two 16-bit
    /// factors per lane.
    pub(super) mins: [__m512i; 8],
    pub(super) scale: __m512,
    pub(super) min_scale: __m512,
}

/// A type with blocks of 32 columns.
pub(super) trait TurnSmall: Small {
    /// Number of tokens from which sixteen transposed rows are faster than four that are not (measured on Ice Lake).
    const TURNED_FROM: usize;

    /// # Safety
    ///
    /// The machine has AVX-512 BW; `rows` are blocks of this type.
    unsafe fn turn(rows: Sixteen) -> Block;
}

/// A type with blocks of 256 columns.
pub(super) trait TurnSuper: Super {
    /// As in [`TurnSmall`].
    const TURNED_FROM: usize = 1;

    /// # Safety
    ///
    /// The machine has AVX-512 BW; `rows` are blocks of this type.
    unsafe fn head(rows: Sixteen) -> Head;

    /// Number of column runs whose quants share bytes.
    const CHUNKS: usize = if Self::SUB == 32 { 4 } else { 2 };

    /// The unsigned quants of a chunk, in two steps: of as many parts of 16 columns as it has runs of 32.
    ///
    /// # Safety
    ///
    /// As in [`Self::head`].
    unsafe fn quants(rows: Sixteen, chunk: usize, step: usize) -> [[__m512i; 4]; 4];

    /// The run that a part of a step is from, and which half of it: bytes are shared by several runs.
    #[inline]
    fn place(step: usize, part: usize) -> (usize, usize) {
        (part, step)
    }
}

/// The dword at `address`, in all lanes.
///
/// # Safety
///
/// Four bytes can be read there.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn everywhere(address: *const u8) -> __m512i {
    // SAFETY: the caller's promise.
    _mm512_set1_epi32(unsafe { address.cast::<i32>().read_unaligned() })
}

/// Number of pairs of sums of activations per block, and their position relative to the block at `index` of a copy: of
/// 32 after all blocks, or of 16 at its own end.
pub(super) const fn pairs_of_sums<T: Super>(index: usize, blocks: usize) -> (usize, usize) {
    if T::SUB == BLOCK {
        (4, (blocks - index) * Q8K_BYTES + index * Q8K_SUMS)
    } else {
        (8, 4 + SUPER)
    }
}

/// The `f16` values in the low halves of sixteen dwords.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn low_halves(dwords: __m512i) -> __m512 {
    _mm512_cvtph_ps(_mm512_cvtepi32_epi16(dwords))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn high_halves(dwords: __m512i) -> __m512 {
    low_halves(_mm512_srli_epi32::<16>(dwords))
}

/// Quants of four bits: of the first 16 columns, and of the last.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn nibbles(raw: [__m512i; 4]) -> [__m512i; 8] {
    let low = _mm512_set1_epi8(15);
    let mut quants = [low; 8];
    for group in 0..4 {
        quants[group] = _mm512_and_si512(raw[group], low);
        quants[4 + group] = _mm512_and_si512(_mm512_srli_epi16::<4>(raw[group]), low);
    }
    quants
}

/// Adds bits of a dword of each row as fifth bits of its 32 quants.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn with_fifth_bits(mut quants: [__m512i; 8], bits: __m512i) -> [__m512i; 8] {
    for pair in 0..4 {
        // A byte of each row four times, each of which keeps a different bit.
        let byte = _mm512_set_epi32(12, 8, 4, 0, 12, 8, 4, 0, 12, 8, 4, 0, 12, 8, 4, 0);
        let byte = _mm512_mullo_epi32(
            _mm512_add_epi32(byte, _mm512_set1_epi32(i32::try_from(pair).unwrap_or(0))),
            _mm512_set1_epi32(0x0101_0101),
        );
        let spread = _mm512_shuffle_epi8(bits, byte);
        for (half, mask) in [0x0804_0201, 0x8040_2010_u32.cast_signed()]
            .into_iter()
            .enumerate()
        {
            let set = _mm512_test_epi8_mask(spread, _mm512_set1_epi32(mask));
            let quants = &mut quants[2 * pair + half];
            *quants = _mm512_mask_add_epi8(*quants, set, *quants, _mm512_set1_epi8(16));
        }
    }
    quants
}

/// Offset that converts unsigned quants, 128 too large, to signed ones.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn add(mut quants: [__m512i; 8], added: i8) -> [__m512i; 8] {
    for quants in &mut quants {
        *quants = _mm512_add_epi8(*quants, _mm512_set1_epi8(added));
    }
    quants
}

/// Entries of a table with these indices.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn looked_up<const N: usize>(table: Table, mut indices: [__m512i; N]) -> [__m512i; N] {
    // SAFETY: sixteen bytes.
    let table = _mm512_broadcast_i32x4(unsafe { _mm_loadu_si128(table.as_ptr().cast()) });
    for indices in &mut indices {
        *indices = _mm512_shuffle_epi8(table, *indices);
    }
    indices
}

/// The numbers of [`half_of_power`](super::table::half_of_power) for the lowest bytes of sixteen dwords.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn powers(dwords: __m512i) -> __m512 {
    let bits = _mm512_slli_epi32::<23>(byte(dwords, 0));
    let least = _mm512_set1_epi32(LEAST_POWER.cast_signed());
    let power = _mm512_castsi512_ps(_mm512_max_epi32(bits, least));
    _mm512_fnmadd_ps(power, _mm512_set1_ps(0.5), power)
}

macro_rules! small {
    ($name:ident, $from:literal, |$rows:ident| ($quants:expr, $scale:expr, $min:expr)) => {
        impl TurnSmall for $name {
            const TURNED_FROM: usize = $from;

            #[inline]
            #[target_feature(
                enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c"
            )]
            unsafe fn turn($rows: Sixteen) -> Block {
                // SAFETY: inside the blocks.
                unsafe {
                    Block {
                        quants: $quants,
                        scale: $scale,
                        min: $min,
                    }
                }
            }
        }
    };
}

small!(Q8_0, 2, |rows| (
    {
        let ([a, b, c, d], [e, f, g, h]) = (rows.dwords(2), rows.dwords(18));
        add([a, b, c, d, e, f, g, h], i8::MIN)
    },
    low_halves(rows.dword(0)),
    _mm512_setzero_ps()
));
// From 0 to 15, meaning -8 to 7, to the same plus 128.
small!(Q4_0, 1, |rows| (
    add(nibbles(rows.dwords(2)), 120),
    low_halves(rows.dword(0)),
    _mm512_setzero_ps()
));
small!(Q4_1, 1, |rows| (
    nibbles(rows.dwords(4)),
    low_halves(rows.dword(0)),
    high_halves(rows.dword(0))
));
// From 0 to 31, meaning -16 to 15, to the same plus 128.
small!(Q5_0, 2, |rows| (
    add(with_fifth_bits(nibbles(rows.dwords(6)), rows.dword(2)), 112),
    low_halves(rows.dword(0)),
    _mm512_setzero_ps()
));
small!(Q5_1, 2, |rows| (
    with_fifth_bits(nibbles(rows.dwords(8)), rows.dword(4)),
    low_halves(rows.dword(0)),
    high_halves(rows.dword(0))
));

small!(IQ4NL, 1, |rows| (
    looked_up(IQ4_RAISED, nibbles(rows.dwords(2))),
    low_halves(rows.dword(0)),
    _mm512_setzero_ps()
));
small!(MXFP4, 1, |rows| (
    looked_up(E2M1_RAISED, nibbles(rows.dwords(1))),
    powers(rows.dword(0)),
    _mm512_setzero_ps()
));

const IQ4_RAISED: Table = raised(IQ4, 128);
const E2M1_RAISED: Table = raised(E2M1, 128);

/// Byte `number` of each dword.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn byte(dwords: __m512i, number: usize) -> __m512i {
    let count = _mm_set_epi64x(0, i64::try_from(8 * number).unwrap_or(0));
    _mm512_and_si512(_mm512_srl_epi32(dwords, count), _mm512_set1_epi32(0xff))
}

/// Two 16-bit numbers in each lane.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn pair(even: __m512i, odd: __m512i) -> __m512i {
    // The third truth table selects the second where the first is set.
    _mm512_ternarylogic_epi32::<0xca>(
        _mm512_set1_epi32(0xffff),
        even,
        _mm512_slli_epi32::<16>(odd),
    )
}

impl Head {
    /// Sixteen scales and minimums.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    fn of_sixteen(
        (scale, min_scale): (__m512, __m512),
        sub_scale: impl Fn(usize) -> __m512i,
        sub_min: impl Fn(usize) -> __m512i,
    ) -> Self {
        let zero = _mm512_setzero_si512();
        let (mut scales, mut mins) = ([zero; 16], [zero; 8]);
        for sub in 0..16 {
            scales[sub] = sub_scale(sub);
        }
        for number in 0..8 {
            mins[number] = pair(sub_min(2 * number), sub_min(2 * number + 1));
        }
        Self {
            scales,
            mins,
            scale,
            min_scale,
        }
    }

    /// The head of Q4_K and Q5_K blocks, as [`six_bit_head`](super::rows::six_bit_head) reads it.
    ///
    /// # Safety
    ///
    /// `rows` are such blocks.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    unsafe fn of_six_bits(rows: Sixteen) -> Self {
        // SAFETY: sixteen bytes are the head of a block.
        let [both, a, b, c] = unsafe { rows.dwords(0) };
        let (six, four, two) = (
            _mm512_set1_epi32(0x3f3f_3f3f),
            _mm512_set1_epi32(0x0f0f_0f0f),
            _mm512_set1_epi32(0x3030_3030),
        );
        let upper = |low: __m512i, high: __m512i| {
            let high = _mm512_and_si512(_mm512_srli_epi32::<2>(high), two);
            _mm512_or_si512(_mm512_and_si512(low, four), high)
        };
        let first = [_mm512_and_si512(a, six), upper(c, a)];
        let last = [
            _mm512_and_si512(b, six),
            upper(_mm512_srli_epi32::<4>(c), b),
        ];
        let zero = _mm512_setzero_si512();
        let (mut scales, mut mins) = ([zero; 16], [zero; 8]);
        for sub in 0..8 {
            scales[sub] = byte(first[sub / 4], sub % 4);
        }
        // Bytes 0 and 1, and bytes 2 and 3, as 16-bit numbers.
        let spread = |from: i32| {
            _mm512_add_epi32(
                _mm512_set4_epi32(0x000d_000c, 0x0009_0008, 0x0005_0004, 0x0001_0000),
                _mm512_set1_epi32(from * 0x0001_0001),
            )
        };
        let mask = _mm512_set1_epi32(0x00ff_00ff);
        for number in 0..4 {
            let from = if number % 2 == 0 { 0 } else { 2 };
            mins[number] =
                _mm512_and_si512(_mm512_shuffle_epi8(last[number / 2], spread(from)), mask);
        }
        Self {
            scales,
            mins,
            scale: low_halves(both),
            min_scale: high_halves(both),
        }
    }
}

macro_rules! turn_super {
    ($name:ident, |$head:ident| $make:expr, |$rows:ident, $chunk:ident, $at:ident| $runs:expr) => {
        impl TurnSuper for $name {
            #[inline]
            #[target_feature(
                enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c"
            )]
            unsafe fn head($head: Sixteen) -> Head {
                // SAFETY: inside the blocks.
                unsafe { $make }
            }

            #[inline]
            #[target_feature(
                enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c"
            )]
            unsafe fn quants($rows: Sixteen, $chunk: usize, half: usize) -> [[__m512i; 4]; 4] {
                let $at = 16 * half;
                // SAFETY: inside the blocks.
                unsafe { $runs }
            }
        }
    };
}

/// Bits `from` and above of each byte, masked by `mask`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn bits(bytes: [__m512i; 4], from: usize, mask: i8) -> [__m512i; 4] {
    let count = _mm_set_epi64x(0, i64::try_from(from).unwrap_or(0));
    let mut kept = bytes;
    for kept in &mut kept {
        *kept = _mm512_and_si512(_mm512_srl_epi16(*kept, count), _mm512_set1_epi8(mask));
    }
    kept
}

/// Moves bit `from` of each byte to bit `to`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn above(low: [__m512i; 4], high: [__m512i; 4], from: usize, to: usize, mask: i8) -> [__m512i; 4] {
    let count = |bits: usize| _mm_set_epi64x(0, i64::try_from(bits).unwrap_or(0));
    let mut joined = low;
    for group in 0..4 {
        let shifted = if from < to {
            _mm512_sll_epi16(high[group], count(to - from))
        } else {
            _mm512_srl_epi16(high[group], count(from - to))
        };
        joined[group] = _mm512_or_si512(
            low[group],
            _mm512_and_si512(shifted, _mm512_set1_epi8(mask)),
        );
    }
    joined
}

turn_super!(Q4K, |rows| Head::of_six_bits(rows), |rows, chunk, at| {
    let both = rows.dwords(16 + 32 * chunk + at);
    [bits(both, 0, 15), bits(both, 4, 15), both, both]
});

turn_super!(Q5K, |rows| Head::of_six_bits(rows), |rows, chunk, at| {
    let (fifth, both) = (rows.dwords(16 + at), rows.dwords(48 + 32 * chunk + at));
    [
        above(bits(both, 0, 15), fifth, 2 * chunk, 4, 16),
        above(bits(both, 4, 15), fifth, 2 * chunk + 1, 4, 16),
        both,
        both,
    ]
});

turn_super!(
    Q6K,
    |rows| {
        let (bytes, last) = (rows.dwords(192), rows.dwords(194));
        let scale = |sub: usize| {
            let count = _mm_set_epi64x(0, i64::try_from(24 - 8 * (sub % 4)).unwrap_or(0));
            _mm512_srai_epi32::<24>(_mm512_sll_epi32(bytes[sub / 4], count))
        };
        Head::of_sixteen((high_halves(last[3]), _mm512_setzero_ps()), scale, scale)
    },
    |rows, chunk, at| {
        let (first, second) = (
            rows.dwords(64 * chunk + at),
            rows.dwords(64 * chunk + 32 + at),
        );
        let high = rows.dwords(128 + 32 * chunk + at);
        [
            above(bits(first, 0, 15), high, 0, 4, 0x30),
            above(bits(second, 0, 15), high, 2, 4, 0x30),
            above(bits(first, 4, 15), high, 4, 4, 0x30),
            above(bits(second, 4, 15), high, 6, 4, 0x30),
        ]
    }
);

turn_super!(
    Q2K,
    |rows| {
        let (heads, last) = (rows.dwords(0), rows.dwords(68));
        let head = |sub: usize| byte(heads[sub / 4], sub % 4);
        Head::of_sixteen(
            (low_halves(last[3]), high_halves(last[3])),
            |sub| _mm512_and_si512(head(sub), _mm512_set1_epi32(15)),
            |sub| _mm512_srli_epi32::<4>(head(sub)),
        )
    },
    |rows, chunk, at| {
        let four = rows.dwords(16 + 32 * chunk + at);
        [
            bits(four, 0, 3),
            bits(four, 2, 3),
            bits(four, 4, 3),
            bits(four, 6, 3),
        ]
    }
);

turn_super!(
    Q3K,
    |rows| {
        // The first two of the 16 bytes from 94 on are quants, followed by twelve of scales and an `f16`.
        let last = rows.dwords(94);
        let word = |at: usize| {
            _mm512_or_si512(
                _mm512_srli_epi32::<16>(last[at]),
                _mm512_slli_epi32::<16>(last[at + 1]),
            )
        };
        // Both halves of the first eight bytes are the lower bits, the last four have the upper ones.
        let (a, b, c) = (word(0), word(1), word(2));
        let join = |low: __m512i, upper: __m512i| {
            let upper =
                _mm512_slli_epi32::<4>(_mm512_and_si512(upper, _mm512_set1_epi32(0x0303_0303)));
            _mm512_or_si512(_mm512_and_si512(low, _mm512_set1_epi32(0x0f0f_0f0f)), upper)
        };
        let scales = [
            join(a, c),
            join(b, _mm512_srli_epi32::<2>(c)),
            join(_mm512_srli_epi32::<4>(a), _mm512_srli_epi32::<4>(c)),
            join(_mm512_srli_epi32::<4>(b), _mm512_srli_epi32::<6>(c)),
        ];
        let scale =
            |sub: usize| _mm512_sub_epi32(byte(scales[sub / 4], sub % 4), _mm512_set1_epi32(32));
        Head::of_sixteen((high_halves(last[3]), _mm512_setzero_ps()), scale, scale)
    },
    |rows, chunk, at| {
        let (third, four) = (rows.dwords(at), rows.dwords(32 + 32 * chunk + at));
        [
            above(bits(four, 0, 3), third, 4 * chunk, 2, 4),
            above(bits(four, 2, 3), third, 4 * chunk + 1, 2, 4),
            above(bits(four, 4, 3), third, 4 * chunk + 2, 2, 4),
            above(bits(four, 6, 3), third, 4 * chunk + 3, 2, 4),
        ]
    }
);

impl TurnSuper for IQ4XS {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    unsafe fn head(rows: Sixteen) -> Head {
        // SAFETY: eight bytes are the head of a block, which is longer than sixteen.
        let [both, low, ..] = unsafe { rows.dwords(0) };
        let high = _mm512_srli_epi32::<16>(both);
        let bits = |of: __m512i, from: usize, mask: i32| {
            let count = _mm_set_epi64x(0, i64::try_from(from).unwrap_or(0));
            _mm512_and_si512(_mm512_srl_epi32(of, count), _mm512_set1_epi32(mask))
        };
        let zero = _mm512_setzero_si512();
        let (mut scales, mut mins) = ([zero; 16], [zero; 8]);
        for sub in 0..8 {
            let upper = _mm512_slli_epi32::<4>(bits(high, 2 * sub, 3));
            let scale = _mm512_or_si512(bits(low, 4 * sub, 15), upper);
            scales[sub] = _mm512_sub_epi32(scale, _mm512_set1_epi32(32));
        }
        for number in 0..4 {
            mins[number] = pair(scales[2 * number], scales[2 * number + 1]);
        }
        Head {
            scales,
            mins,
            scale: low_halves(both),
            min_scale: _mm512_setzero_ps(),
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    unsafe fn quants(rows: Sixteen, chunk: usize, step: usize) -> [[__m512i; 4]; 4] {
        // SAFETY: 16 bytes of indices for each run follow the 8 of the head.
        let both = unsafe { rows.dwords(8 + 16 * (2 * chunk + step)) };
        let half = |from: usize| looked_up(IQ4_RAISED, bits(both, from, 15));
        [half(0), half(4), both, both]
    }

    /// Bytes are shared by the halves of a run.
    #[inline]
    fn place(step: usize, part: usize) -> (usize, usize) {
        (step, part)
    }
}
