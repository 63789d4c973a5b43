//! Products of quantised rows with many tokens for AVX-512.
//!
//! A block of sixteen rows is turned once into groups of four columns, sixteen rows side by side, which stay in the
//! first-level cache while all tokens go through them: one `dpbusd` then makes 64 products whose sums need no shuffles,
//! and the scales of sixteen rows are one register. Two such blocks and six tokens make a tile of twelve running sums, for
//! which eight loads serve twelve products. The turned blocks are some KiB on the stack; nothing is kept.
//!
//! The order of every sum is the one of [`avx512`](super::avx512), so that a chunk of one token and a chunk of many
//! yield the same bits.

use std::{arch::x86_64::*, hint, mem::transmute};

use super::{
    flash512::square,
    quant::{BLOCK, Q8_0_BYTES, Q8K_BYTES, Q8K_SUMS, SUPER},
    rows::Rows,
};

/// Blocks whose sums are brought to one register together, each in a lane of its own; a row's lanes are added at its end.
pub(super) const BLOCKS: usize = 4;

/// Rows of a register.
pub(super) const LANES: usize = 16;

/// Registers of rows that go through a tile together.
const PAIR: usize = 2;

/// Tokens that go through a turned block together: fewer would turn it again more often.
const TOKENS: usize = 128;

/// Tokens of a tile: twelve sums of products, twelve of blocks, two registers of weights and one of a token.
const STEP: usize = 6;

/// Groups of four columns in a block of 256.
const GROUPS: usize = SUPER / 4;

/// A register in memory.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Line([i32; LANES]);

impl Line {
    const ZERO: Self = Self([0; LANES]);

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn load(&self) -> __m512i {
        // SAFETY: 64 aligned bytes.
        unsafe { _mm512_load_si512(self.0.as_ptr().cast()) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn store(&mut self, value: __m512i) {
        // SAFETY: 64 aligned bytes.
        unsafe { _mm512_store_si512(self.0.as_mut_ptr().cast(), value) };
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn floats(&self) -> __m512 {
        _mm512_castsi512_ps(self.load())
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn store_floats(&mut self, value: __m512) {
        self.store(_mm512_castps_si512(value));
    }

    /// Adds `total · scale`, to nothing when it is the first.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn add_product(&mut self, total: __m512, scale: __m512, first: bool) {
        let before = if first {
            _mm512_setzero_ps()
        } else {
            self.floats()
        };
        self.store_floats(_mm512_fmadd_ps(total, scale, before));
    }
}

/// One block of 256 columns of sixteen rows.
struct Turned {
    /// Unsigned quants: of each group of four columns a line, of each row four bytes.
    quants: [Line; GROUPS],
    /// Scales of sub-blocks.
    scales: [Line; 16],
    /// For each pair of sums of activations, of 32 where minimums have a scale of their own and else of 16: two 16-bit
    /// factors in each lane.
    mins: [Line; 8],
    scale: Line,
    min_scale: Line,
}

impl Turned {
    const ZERO: Self = Self {
        quants: [Line::ZERO; GROUPS],
        scales: [Line::ZERO; 16],
        mins: [Line::ZERO; 8],
        scale: Line::ZERO,
        min_scale: Line::ZERO,
    };
}

impl Turned {
    /// Stores the scales of sixteen sub-blocks and their minimums.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn store_sixteen(&mut self, scale: impl Fn(usize) -> __m512i, min: impl Fn(usize) -> __m512i) {
        for (sub, line) in self.scales.iter_mut().enumerate() {
            line.store(scale(sub));
        }
        for (pair, line) in self.mins.iter_mut().enumerate() {
            let even = _mm512_and_si512(min(2 * pair), _mm512_set1_epi32(0xffff));
            line.store(_mm512_or_si512(
                even,
                _mm512_slli_epi32::<16>(min(2 * pair + 1)),
            ));
        }
    }
}

/// Running sums of some tokens, one for each block of four.
type Sums = [[[Line; PAIR]; TOKENS]; BLOCKS];

/// The four sums of a token, added by halves.
#[inline]
#[target_feature(enable = "avx512f")]
fn last_sum(sums: &Sums, token: usize, part: usize, blocks: usize) -> __m512 {
    let sum = |block: usize| {
        if block < blocks {
            sums[block][token][part].floats()
        } else {
            _mm512_setzero_ps()
        }
    };
    _mm512_add_ps(_mm512_add_ps(sum(0), sum(2)), _mm512_add_ps(sum(1), sum(3)))
}

/// The dword at `address`, in all lanes.
///
/// # Safety
///
/// Four bytes can be read there.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn everywhere(address: *const u8) -> __m512i {
    // SAFETY: the caller's promise.
    _mm512_set1_epi32(unsafe { address.cast::<i32>().read_unaligned() })
}

/// Calls a tile function for one block of rows or for [`PAIR`], with as many tokens as there are left, at most [`STEP`],
/// until none is.
macro_rules! for_tokens {
    ($tokens:expr, |$token:ident| $function:ident::<$parts:literal $(, $more:tt)*>($($argument:expr),* $(,)?)) => {{
        let mut $token = 0;
        while $token < $tokens {
            match $tokens - $token {
                STEP.. => {
                    $function::<STEP, $parts $(, $more)*>($($argument),*);
                    $token += STEP;
                }
                4.. => {
                    $function::<4, $parts $(, $more)*>($($argument),*);
                    $token += 4;
                }
                2.. => {
                    $function::<2, $parts $(, $more)*>($($argument),*);
                    $token += 2;
                }
                _ => {
                    $function::<1, $parts $(, $more)*>($($argument),*);
                    $token += 1;
                }
            }
        }
    }};
    ($tokens:expr, $parts:expr, |$token:ident| $function:ident[$($more:tt),*]($($argument:expr),* $(,)?)) => {
        if $parts == PAIR {
            for_tokens!($tokens, |$token| $function::<2 $(, $more)*>($($argument),*));
        } else {
            for_tokens!($tokens, |$token| $function::<1 $(, $more)*>($($argument),*));
        }
    };
}

macro_rules! super_tiles {
    ($name:ident, $bytes:expr, $turn:ident, $sub:expr, $separate_mins:expr, $less:expr) => {
        /// All rows of this type times all tokens.
        ///
        /// # Safety
        ///
        /// The machine has the instructions of [`Isa::Avx512`](super::isa::Isa::Avx512); `rows` is as its fields say.
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
        pub(super) unsafe fn $name(rows: &Rows<'_>) {
            let mut turned = [Turned::ZERO; PAIR];
            let mut values: Sums = [[[Line::ZERO; PAIR]; TOKENS]; BLOCKS];
            let mut lows: Sums = [[[Line::ZERO; PAIR]; TOKENS]; BLOCKS];
            let count = rows.weights.len() / rows.row_bytes;
            let blocks = rows.columns / SUPER;
            for from in (0..rows.tokens).step_by(TOKENS) {
                let tokens = TOKENS.min(rows.tokens - from);
                for first in (0..count).step_by(PAIR * LANES) {
                    let parts = (count - first).div_ceil(LANES).min(PAIR);
                    let starts = [rows.starts::<LANES>(first), rows.starts(first + LANES)];
                    for index in 0..blocks {
                        for (part, turned) in turned.iter_mut().enumerate().take(parts) {
                            let place = index * $bytes;
                            let start = |lane: usize| starts[part][lane].wrapping_add(place);
                            // SAFETY: blocks of whole rows.
                            unsafe { $turn(start, turned) };
                        }
                        let copy = |token: usize| rows.copy(from + token).wrapping_add(index * Q8K_BYTES);
                        // SAFETY: copies of that many tokens, each with this block.
                        unsafe {
                            for_tokens!(tokens, parts, |token| multiply[$sub, $separate_mins, $less](
                                &turned,
                                copy,
                                (index, blocks),
                                &mut values,
                                &mut lows,
                                token,
                            ));
                        }
                    }
                    for token in 0..tokens {
                        for part in 0..parts {
                            let mut value = last_sum(&values, token, part, blocks);
                            if $separate_mins {
                                value = _mm512_sub_ps(value, last_sum(&lows, token, part, blocks));
                            }
                            // SAFETY: sixteen numbers either way.
                            let lanes = unsafe { transmute::<__m512, [f32; LANES]>(value) };
                            rows.put_lanes(from + token, first + part * LANES, count, lanes);
                        }
                    }
                }
            }
        }
    };
}

super_tiles!(rows_q4k, 144, turn_q4k, 32, true, 0);
super_tiles!(rows_q5k, 176, turn_q5k, 32, true, 0);
super_tiles!(rows_q6k, 210, turn_q6k, 16, false, 5);
super_tiles!(rows_q3k, 110, turn_q3k, 16, false, 2);
super_tiles!(rows_q2k, 84, turn_q2k, 16, true, 0);

/// One block of `G` times sixteen rows (its index, and how many a row has), times `N` tokens from `token`; `SUB` columns share a scale.
/// Without minimums of their own quants are 1 << `LESS` too large.
///
/// # Safety
///
/// `copy` gives the Q8_K block of each of these tokens.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn multiply<
    const N: usize,
    const G: usize,
    const SUB: usize,
    const SEPARATE_MINS: bool,
    const LESS: u32,
>(
    turned: &[Turned; PAIR],
    copy: impl Fn(usize) -> *const u8,
    (index, blocks): (usize, usize),
    values: &mut Sums,
    lows: &mut Sums,
    token: usize,
) {
    let zero = _mm512_setzero_si512();
    let copies: [*const u8; N] = std::array::from_fn(|ahead| copy(token + ahead));
    let mut totals = [[zero; G]; N];
    // Loops that are not unrolled: their products stay in an order in which none waits for another.
    let (subs, groups) = (hint::black_box(SUPER / SUB), hint::black_box(SUB / 4));
    let mut group = 0;
    for sub in 0..subs {
        let mut parts = [[zero; G]; N];
        for _ in 0..groups {
            let mut weights = [zero; G];
            for part in 0..G {
                // SAFETY: as many lines as there are groups.
                weights[part] = unsafe { turned[part].quants.get_unchecked(group) }.load();
            }
            for ahead in 0..N {
                // SAFETY: the block's quants.
                let y = unsafe { everywhere(copies[ahead].wrapping_add(4 + 4 * group)) };
                for part in 0..G {
                    parts[ahead][part] = _mm512_dpbusd_epi32(parts[ahead][part], weights[part], y);
                }
            }
            group += 1;
        }
        for part in 0..G {
            // SAFETY: as many lines as there are sub-blocks.
            let scales = unsafe { turned[part].scales.get_unchecked(sub) }.load();
            for ahead in 0..N {
                let product = _mm512_mullo_epi32(parts[ahead][part], scales);
                totals[ahead][part] = _mm512_add_epi32(totals[ahead][part], product);
            }
        }
    }
    // The block's sums: of 32 behind all blocks, or of 16 at its own end.
    let (pairs, place) = if SUB == BLOCK {
        (4, (blocks - index) * Q8K_BYTES + index * Q8K_SUMS)
    } else {
        (8, 4 + SUPER)
    };
    let mut mins = [[zero; G]; N];
    for pair in 0..hint::black_box(pairs) {
        for ahead in 0..N {
            // SAFETY: inside the copy of a token.
            let sums = unsafe { everywhere(copies[ahead].wrapping_add(place + 4 * pair)) };
            for part in 0..G {
                // SAFETY: as many lines as there are pairs.
                let factors = unsafe { turned[part].mins.get_unchecked(pair) }.load();
                mins[ahead][part] = _mm512_dpwssd_epi32(mins[ahead][part], factors, sums);
            }
        }
    }
    let (values, lows) = (
        &mut values[index % BLOCKS][token..token + N],
        &mut lows[index % BLOCKS][token..token + N],
    );
    for ahead in 0..N {
        // SAFETY: the block's head.
        let factor = _mm512_castsi512_ps(unsafe { everywhere(copies[ahead]) });
        for part in 0..G {
            let mut total = totals[ahead][part];
            if SEPARATE_MINS {
                let scale = _mm512_mul_ps(turned[part].min_scale.floats(), factor);
                lows[ahead][part].add_product(
                    _mm512_cvtepi32_ps(mins[ahead][part]),
                    scale,
                    index < BLOCKS,
                );
            } else {
                total = _mm512_sub_epi32(total, _mm512_slli_epi32::<LESS>(mins[ahead][part]));
            }
            let scale = _mm512_mul_ps(turned[part].scale.floats(), factor);
            values[ahead][part].add_product(_mm512_cvtepi32_ps(total), scale, index < BLOCKS);
        }
    }
}

/// Sixteen dwords at `offset` of sixteen rows, turned.
///
/// # Safety
///
/// `start` gives the rows, of which 64 bytes from `offset` can be read.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn dwords(start: impl Fn(usize) -> *const u8, offset: usize) -> [__m512i; 16] {
    // SAFETY: the caller's promise.
    square(std::array::from_fn(|lane| unsafe {
        _mm512_loadu_si512(start(lane).add(offset).cast())
    }))
}

/// Four dwords at `offset` of sixteen rows, turned.
///
/// # Safety
///
/// `start` gives the rows, of which 16 bytes from `offset` can be read.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn four_dwords(start: impl Fn(usize) -> *const u8, offset: usize) -> [__m512i; 4] {
    // Quarter q of number i has row 4 q + i.
    let rows = |ahead: usize| {
        // SAFETY: the caller's promise.
        let quarter =
            |row: usize| unsafe { _mm_loadu_si128(start(row + ahead).add(offset).cast()) };
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

/// The halves in the low parts of sixteen dwords.
#[inline]
#[target_feature(enable = "avx512f")]
fn low_halves(dwords: __m512i) -> __m512 {
    _mm512_cvtph_ps(_mm512_cvtepi32_epi16(dwords))
}

/// The halves at sixteen addresses.
///
/// # Safety
///
/// `start` gives addresses where two bytes can be read.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn halves(start: impl Fn(usize) -> *const u8) -> __m512 {
    // SAFETY: the caller's promise.
    let bits: [i16; LANES] =
        std::array::from_fn(|lane| unsafe { start(lane).cast::<i16>().read_unaligned() });
    // SAFETY: 32 bytes.
    _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(bits.as_ptr().cast()) })
}

/// The head of Q4_K and Q5_K blocks, as [`six_bit_head`](super::rows::six_bit_head) reads it.
///
/// # Safety
///
/// `start` gives such blocks.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn turn_head(start: impl Fn(usize) -> *const u8, turned: &mut Turned) {
    // SAFETY: sixteen bytes are the head of a block.
    let [both, a, b, c] = unsafe { four_dwords(start, 0) };
    turned.scale.store_floats(low_halves(both));
    turned
        .min_scale
        .store_floats(low_halves(_mm512_srli_epi32::<16>(both)));
    let (six, four, two) = (
        _mm512_set1_epi32(0x3f3f_3f3f),
        _mm512_set1_epi32(0x0f0f_0f0f),
        _mm512_set1_epi32(0x0303_0303),
    );
    let upper = |low: __m512i, high: __m512i| {
        let high = _mm512_slli_epi32::<4>(_mm512_and_si512(_mm512_srli_epi32::<6>(high), two));
        _mm512_or_si512(_mm512_and_si512(low, four), high)
    };
    let scales = [_mm512_and_si512(a, six), upper(c, a)];
    let mins = [
        _mm512_and_si512(b, six),
        upper(_mm512_srli_epi32::<4>(c), b),
    ];
    let byte = _mm512_set1_epi32(0xff);
    let pick = |bytes: __m512i, number: usize| {
        let count = _mm_set_epi64x(0, i64::try_from(8 * number).unwrap_or(0));
        _mm512_and_si512(_mm512_srl_epi32(bytes, count), byte)
    };
    for sub in 0..8 {
        turned.scales[sub].store(pick(scales[sub / 4], sub % 4));
    }
    for pair in 0..4 {
        let min = |sub: usize| pick(mins[sub / 4], sub % 4);
        let (even, odd) = (min(2 * pair), min(2 * pair + 1));
        turned.mins[pair].store(_mm512_or_si512(even, _mm512_slli_epi32::<16>(odd)));
    }
}

/// # Safety
///
/// `start` gives Q4_K blocks.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn turn_q4k(start: impl Fn(usize) -> *const u8 + Copy, turned: &mut Turned) {
    // SAFETY: the caller's promise.
    unsafe { turn_head(start, turned) };
    let low = _mm512_set1_epi8(15);
    for half in 0..2 {
        // SAFETY: 128 bytes of quants follow the 16 of the head.
        let raw = unsafe { dwords(start, 16 + 64 * half) };
        for (at, both) in raw.into_iter().enumerate() {
            let (run, group) = (2 * half + at / 8, at % 8);
            turned.quants[16 * run + group].store(_mm512_and_si512(both, low));
            turned.quants[16 * run + 8 + group]
                .store(_mm512_and_si512(_mm512_srli_epi16::<4>(both), low));
        }
    }
}

/// # Safety
///
/// `start` gives Q5_K blocks.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn turn_q5k(start: impl Fn(usize) -> *const u8 + Copy, turned: &mut Turned) {
    // SAFETY: the caller's promise.
    unsafe { turn_head(start, turned) };
    let (low, one) = (_mm512_set1_epi8(15), _mm512_set1_epi8(1));
    // SAFETY: 32 bytes of fifth bits follow the 16 of the head; what is read behind them is in the block.
    let fifth = unsafe { dwords(start, 16) };
    for half in 0..2 {
        // SAFETY: 128 bytes of quants follow.
        let raw = unsafe { dwords(start, 48 + 64 * half) };
        for (at, both) in raw.into_iter().enumerate() {
            let (run, group) = (2 * half + at / 8, at % 8);
            let bit = |number: usize| {
                let shift = _mm_set_epi64x(0, i64::try_from(number).unwrap_or(0));
                _mm512_slli_epi16::<4>(_mm512_and_si512(_mm512_srl_epi16(fifth[group], shift), one))
            };
            turned.quants[16 * run + group]
                .store(_mm512_or_si512(_mm512_and_si512(both, low), bit(2 * run)));
            turned.quants[16 * run + 8 + group].store(_mm512_or_si512(
                _mm512_and_si512(_mm512_srli_epi16::<4>(both), low),
                bit(2 * run + 1),
            ));
        }
    }
}

/// # Safety
///
/// `start` gives Q6_K blocks.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn turn_q6k(start: impl Fn(usize) -> *const u8 + Copy, turned: &mut Turned) {
    // SAFETY: 128 bytes of low bits, 64 of high bits, 16 scales and a half.
    let (raw, bytes, scale) = unsafe {
        (
            [dwords(start, 0), dwords(start, 64), dwords(start, 128)],
            four_dwords(start, 192),
            halves(|lane| start(lane).wrapping_add(208)),
        )
    };
    turned.scale.store_floats(scale);
    let scale = |sub: usize| {
        let count = _mm_set_epi64x(0, i64::try_from(24 - 8 * (sub % 4)).unwrap_or(0));
        _mm512_srai_epi32::<24>(_mm512_sll_epi32(bytes[sub / 4], count))
    };
    turned.store_sixteen(scale, scale);
    let (low, high) = (_mm512_set1_epi8(15), _mm512_set1_epi8(0x30));
    for half in 0..2 {
        for group in 0..8 {
            let bits = raw[2][8 * half + group];
            let (first, second) = (raw[half][group], raw[half][8 + group]);
            let base = 32 * half + group;
            let quants = &mut turned.quants;
            let join = |four, two| {
                _mm512_or_si512(_mm512_and_si512(four, low), _mm512_and_si512(two, high))
            };
            quants[base].store(join(first, _mm512_slli_epi16::<4>(bits)));
            quants[base + 8].store(join(second, _mm512_slli_epi16::<2>(bits)));
            quants[base + 16].store(join(_mm512_srli_epi16::<4>(first), bits));
            quants[base + 24].store(join(
                _mm512_srli_epi16::<4>(second),
                _mm512_srli_epi16::<2>(bits),
            ));
        }
    }
}

/// Byte `number` of each dword.
#[inline]
#[target_feature(enable = "avx512f")]
fn byte(dwords: __m512i, number: usize) -> __m512i {
    let count = _mm_set_epi64x(0, i64::try_from(8 * number).unwrap_or(0));
    _mm512_and_si512(_mm512_srl_epi32(dwords, count), _mm512_set1_epi32(0xff))
}

/// Two bits of each byte of 64, of runs of 32 columns one after the other: `join` makes quants of them, by the run and the group
/// of four columns in it.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn turn_two_bits(
    raw: [__m512i; 16],
    turned: &mut Turned,
    join: impl Fn(__m512i, usize, usize) -> __m512i,
) {
    let two = _mm512_set1_epi8(3);
    for (at, four) in raw.into_iter().enumerate() {
        let (half, group) = (at / 8, at % 8);
        let runs = [
            four,
            _mm512_srli_epi16::<2>(four),
            _mm512_srli_epi16::<4>(four),
            _mm512_srli_epi16::<6>(four),
        ];
        for (run, bits) in runs.into_iter().enumerate() {
            let run = 4 * half + run;
            turned.quants[8 * run + group].store(join(_mm512_and_si512(bits, two), run, group));
        }
    }
}

/// # Safety
///
/// `start` gives Q2_K blocks.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn turn_q2k(start: impl Fn(usize) -> *const u8 + Copy, turned: &mut Turned) {
    // SAFETY: sixteen bytes of which the lower half is a scale and the upper one a minimum, 64 of quants, and two halves, which
    // end the 16 bytes from 68 on.
    let (heads, raw, [.., both]) = unsafe {
        (
            four_dwords(start, 0),
            dwords(start, 16),
            four_dwords(start, 68),
        )
    };
    turned.scale.store_floats(low_halves(both));
    turned
        .min_scale
        .store_floats(low_halves(_mm512_srli_epi32::<16>(both)));
    let head = |sub: usize| byte(heads[sub / 4], sub % 4);
    turned.store_sixteen(
        |sub| _mm512_and_si512(head(sub), _mm512_set1_epi32(15)),
        |sub| _mm512_srli_epi32::<4>(head(sub)),
    );
    turn_two_bits(raw, turned, |bits, _, _| bits);
}

/// # Safety
///
/// `start` gives Q3_K blocks.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn turn_q3k(start: impl Fn(usize) -> *const u8 + Copy, turned: &mut Turned) {
    // SAFETY: 32 bytes of third bits, 64 of quants, twelve of scales and a half, which end the 16 bytes from 94 on.
    let (third, raw, last) =
        unsafe { (dwords(start, 0), dwords(start, 32), four_dwords(start, 94)) };
    turned
        .scale
        .store_floats(low_halves(_mm512_srli_epi32::<16>(last[3])));
    let word = |at: usize| {
        _mm512_or_si512(
            _mm512_srli_epi32::<16>(last[at]),
            _mm512_slli_epi32::<16>(last[at + 1]),
        )
    };
    // Of eight bytes both halves are the lower bits, the last four have the upper ones.
    let (a, b, c) = (word(0), word(1), word(2));
    let join = |low: __m512i, upper: __m512i| {
        let upper = _mm512_slli_epi32::<4>(_mm512_and_si512(upper, _mm512_set1_epi32(0x0303_0303)));
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
    turned.store_sixteen(scale, scale);
    turn_two_bits(raw, turned, |bits, run, group| {
        let shift = _mm_set_epi64x(0, i64::try_from(run).unwrap_or(0));
        let third = _mm512_and_si512(_mm512_srl_epi16(third[group], shift), _mm512_set1_epi8(1));
        _mm512_or_si512(bits, _mm512_slli_epi16::<2>(third))
    });
}

/// Eight blocks of 32 columns of sixteen rows.
struct TurnedSmall {
    /// Quants plus 128, as in [`Turned`].
    quants: [Line; GROUPS],
    scales: [Line; 8],
}

impl TurnedSmall {
    const ZERO: Self = Self {
        quants: [Line::ZERO; GROUPS],
        scales: [Line::ZERO; 8],
    };
}

macro_rules! small_tiles {
    ($name:ident, $bytes:expr, $turn:ident) => {
        /// All rows of this type times all tokens.
        ///
        /// # Safety
        ///
        /// The machine has the instructions of [`Isa::Avx512`](super::isa::Isa::Avx512); `rows` is as its fields say.
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
        pub(super) unsafe fn $name(rows: &Rows<'_>) {
            let mut turned = [TurnedSmall::ZERO; PAIR];
            let mut sums: Sums = [[[Line::ZERO; PAIR]; TOKENS]; BLOCKS];
            let count = rows.weights.len() / rows.row_bytes;
            let all = rows.columns / BLOCK;
            for from in (0..rows.tokens).step_by(TOKENS) {
                let tokens = TOKENS.min(rows.tokens - from);
                for first in (0..count).step_by(PAIR * LANES) {
                    let parts = (count - first).div_ceil(LANES).min(PAIR);
                    let starts = [rows.starts::<LANES>(first), rows.starts(first + LANES)];
                    for index in (0..all).step_by(8) {
                        let blocks = 8.min(all - index);
                        for (part, turned) in turned.iter_mut().enumerate().take(parts) {
                            let place = index * $bytes;
                            let start = |lane: usize| starts[part][lane].wrapping_add(place);
                            // SAFETY: blocks of whole rows.
                            unsafe { $turn(start, blocks, turned) };
                        }
                        let copy = |token: usize| rows.copy(from + token);
                        // SAFETY: copies of that many tokens, each with these blocks.
                        unsafe {
                            for_tokens!(tokens, parts, |token| multiply_small[](
                                &turned, copy, (index, blocks, all), &mut sums, token,
                            ));
                        }
                    }
                    for token in 0..tokens {
                        for part in 0..parts {
                            // SAFETY: sixteen numbers either way.
                            let lanes = unsafe { transmute::<__m512, [f32; LANES]>(last_sum(&sums, token, part, all)) };
                            rows.put_lanes(from + token, first + part * LANES, count, lanes);
                        }
                    }
                }
            }
        }
    };
}

small_tiles!(rows_q8_0, 34, turn_q8_0);
small_tiles!(rows_q4_0, 18, turn_q4_0);

/// Blocks of `G` times sixteen rows (the first one, how many, and how many a row has), times `N` tokens from `token`.
///
/// # Safety
///
/// `copy` gives the copy of each of these tokens.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn multiply_small<const N: usize, const G: usize>(
    turned: &[TurnedSmall; PAIR],
    copy: impl Fn(usize) -> *const u8,
    (first, blocks, all): (usize, usize, usize),
    sums: &mut Sums,
    token: usize,
) {
    let copies: [*const u8; N] = std::array::from_fn(|ahead| copy(token + ahead));
    // As in `multiply`.
    let groups = hint::black_box(8usize);
    for block in 0..blocks {
        let index = first + block;
        let mut parts = [[_mm512_setzero_si512(); G]; N];
        for ahead in 0..N {
            // SAFETY: behind the blocks come their factors, then what makes up for the 128.
            parts[ahead] = [unsafe {
                everywhere(copies[ahead].wrapping_add(all * (Q8_0_BYTES + 4) + 4 * index))
            }; G];
        }
        for group in 0..groups {
            let mut weights = [_mm512_setzero_si512(); G];
            for part in 0..G {
                // SAFETY: eight lines for each block.
                weights[part] =
                    unsafe { turned[part].quants.get_unchecked(8 * block + group) }.load();
            }
            for ahead in 0..N {
                // SAFETY: the block's quants.
                let y = unsafe {
                    everywhere(copies[ahead].wrapping_add(index * Q8_0_BYTES + 2 + 4 * group))
                };
                for part in 0..G {
                    parts[ahead][part] = _mm512_dpbusd_epi32(parts[ahead][part], weights[part], y);
                }
            }
        }
        let sums = &mut sums[block % BLOCKS][token..token + N];
        for ahead in 0..N {
            // SAFETY: the block's factor.
            let factor =
                unsafe { everywhere(copies[ahead].wrapping_add(all * Q8_0_BYTES + 4 * index)) };
            for part in 0..G {
                let scale = _mm512_mul_ps(
                    turned[part].scales[block].floats(),
                    _mm512_castsi512_ps(factor),
                );
                sums[ahead][part].add_product(
                    _mm512_cvtepi32_ps(parts[ahead][part]),
                    scale,
                    index < BLOCKS,
                );
            }
        }
    }
}

/// # Safety
///
/// `start` gives `blocks` Q8_0 blocks of each of sixteen rows.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn turn_q8_0(
    start: impl Fn(usize) -> *const u8 + Copy,
    blocks: usize,
    turned: &mut TurnedSmall,
) {
    let unsigned = _mm512_set1_epi8(i8::MIN);
    for block in (0..blocks).step_by(2) {
        let next = (block + 1).min(blocks - 1);
        let rows = std::array::from_fn(|lane| {
            // SAFETY: 32 bytes of each of two blocks.
            let (low, high) = unsafe {
                let row = start(lane);
                (
                    _mm256_loadu_si256(row.add(block * 34 + 2).cast()),
                    _mm256_loadu_si256(row.add(next * 34 + 2).cast()),
                )
            };
            _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high)
        });
        for (line, quants) in turned.quants[8 * block..].iter_mut().zip(square(rows)) {
            line.store(_mm512_xor_si512(quants, unsigned));
        }
    }
    for (block, scales) in turned.scales[..blocks].iter_mut().enumerate() {
        // SAFETY: the block's head.
        scales.store_floats(unsafe { halves(|lane| start(lane).wrapping_add(block * 34)) });
    }
}

/// # Safety
///
/// `start` gives `blocks` Q4_0 blocks of each of sixteen rows.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn turn_q4_0(
    start: impl Fn(usize) -> *const u8 + Copy,
    blocks: usize,
    turned: &mut TurnedSmall,
) {
    let low = _mm512_set1_epi8(15);
    // From 0 to 15 that stand for -8 to 7, to the same plus 128.
    let ahead = _mm512_set1_epi8(120);
    for block in 0..blocks {
        // SAFETY: 16 bytes of quants behind the scale.
        let raw = unsafe { four_dwords(start, block * 18 + 2) };
        for (group, both) in raw.into_iter().enumerate() {
            let (first, second) = (both, _mm512_srli_epi16::<4>(both));
            turned.quants[8 * block + group]
                .store(_mm512_add_epi8(_mm512_and_si512(first, low), ahead));
            turned.quants[8 * block + 4 + group]
                .store(_mm512_add_epi8(_mm512_and_si512(second, low), ahead));
        }
        // SAFETY: the block's head.
        turned.scales[block]
            .store_floats(unsafe { halves(|lane| start(lane).wrapping_add(block * 18)) });
    }
}
