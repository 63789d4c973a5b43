//! Products of quantised rows with many tokens for AVX-512: sixteen rows at a time, one in each lane.
//!
//! A block of sixteen rows is turned once into groups of four columns, sixteen rows side by side, which stay in the
//! first-level cache while all tokens go through them: one `dpbusd` then makes 64 products whose sums need no shuffles,
//! and the scales of sixteen rows are one register. The turned block is a few KiB on the stack; nothing is kept.
//!
//! The order of every sum is the one of [`avx512`](super::avx512), so that a chunk of one token and a chunk of many
//! yield the same bits.

use std::arch::x86_64::*;

use super::{
    avx512::LANES as BLOCKS,
    matmul::{Rows, half_at, six_bit_head},
    quant::{BLOCK, Q8_0_BYTES, Q8K_BYTES, SUPER},
};

/// Fewer tokens do not pay for turning.
pub(super) const TOKENS_MIN: usize = 6;

/// Rows of a tile: lanes of a register.
pub(super) const LANES: usize = 16;

/// Tokens that go through a turned block together: their sums take 32 KiB, of which a block touches a quarter.
const TOKENS: usize = 64;

/// Tokens multiplied at once: enough independent sums to cover the latency of `dpbusd`.
const STEP: usize = 4;

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
}

/// One block of 256 columns of sixteen rows.
struct Turned {
    /// Unsigned quants: of each group of four columns a line, of each row four bytes.
    quants: [Line; GROUPS],
    /// Scales of sub-blocks.
    scales: [Line; 16],
    /// For each pair of sums of 16 activations: two 16-bit factors in each lane.
    mins: [Line; 8],
    scale: [f32; LANES],
    min_scale: [f32; LANES],
}

/// Running sums of some tokens, one for each block of four.
struct Sums {
    values: [[Line; TOKENS]; BLOCKS],
    mins: [[Line; TOKENS]; BLOCKS],
}

/// The four sums of a token, added by halves.
#[inline]
#[target_feature(enable = "avx512f")]
fn last_sum(sums: &[[Line; TOKENS]; BLOCKS], token: usize, blocks: usize) -> __m512 {
    let sum = |block: usize| {
        if block < blocks {
            _mm512_castsi512_ps(sums[block][token].load())
        } else {
            _mm512_setzero_ps()
        }
    };
    _mm512_add_ps(_mm512_add_ps(sum(0), sum(2)), _mm512_add_ps(sum(1), sum(3)))
}

/// The dword at `address`.
///
/// # Safety
///
/// Four bytes can be read there.
#[inline(always)]
unsafe fn dword(address: *const u8) -> i32 {
    // SAFETY: the caller's promise.
    unsafe { address.cast::<i32>().read_unaligned() }
}

macro_rules! super_tiles {
    ($(#[$meta:meta])* $name:ident, $bytes:expr, $turn:ident, $sub:expr, $separate_mins:expr) => {
        $(#[$meta])*
        ///
        /// # Safety
        ///
        /// The machine has the instructions of [`Isa::Avx512`](super::isa::Isa::Avx512); `rows` is as its fields say.
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
        pub(super) unsafe fn $name(rows: &Rows<'_>) {
            let mut turned = Turned {
                quants: [Line::ZERO; GROUPS],
                scales: [Line::ZERO; 16],
                mins: [Line::ZERO; 8],
                scale: [0.0; LANES],
                min_scale: [0.0; LANES],
            };
            let mut sums = Sums {
                values: [[Line::ZERO; TOKENS]; BLOCKS],
                mins: [[Line::ZERO; TOKENS]; BLOCKS],
            };
            let count = rows.weights.len() / rows.row_bytes;
            for from in (0..rows.tokens).step_by(TOKENS) {
                let tokens = TOKENS.min(rows.tokens - from);
                for first in (0..count).step_by(LANES) {
                    for index in 0..rows.columns / SUPER {
                        let start = |lane: usize| {
                            // The last row stands in for those that are not there.
                            let row = (first + lane).min(count - 1);
                            rows.weights[row * rows.row_bytes + index * $bytes..].as_ptr()
                        };
                        // SAFETY: blocks of whole rows.
                        unsafe { $turn(start, &mut turned) };
                        let mut token = 0;
                        while token < tokens {
                            let left = tokens - token;
                            let copy = |ahead: usize| {
                                rows.copy(from + token + ahead).wrapping_add(index * Q8K_BYTES)
                            };
                            // SAFETY: copies of that many tokens, each with this block.
                            unsafe {
                                if left >= STEP {
                                    multiply::<STEP, $sub, $separate_mins>(&turned, copy, index, &mut sums, token);
                                    token += STEP;
                                } else {
                                    multiply::<1, $sub, $separate_mins>(&turned, copy, index, &mut sums, token);
                                    token += 1;
                                }
                            }
                        }
                    }
                    for token in 0..tokens {
                        let blocks = rows.columns / SUPER;
                        let mut value = last_sum(&sums.values, token, blocks);
                        if $separate_mins {
                            value = _mm512_sub_ps(value, last_sum(&sums.mins, token, blocks));
                        }
                        rows.put_sixteen(from + token, first, count, value);
                    }
                }
            }
        }
    };
}

super_tiles! {
    /// Rows of Q4_K.
    rows_q4k, 144, turn_q4k, 32, true
}
super_tiles! {
    /// Rows of Q5_K.
    rows_q5k, 176, turn_q5k, 32, true
}
super_tiles! {
    /// Rows of Q6_K.
    rows_q6k, 210, turn_q6k, 16, false
}

/// One block times `N` tokens; `SUB` columns share a scale.
///
/// # Safety
///
/// `copy` gives the Q8_K block of each of `N` tokens.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn multiply<const N: usize, const SUB: usize, const SEPARATE_MINS: bool>(
    turned: &Turned,
    copy: impl Fn(usize) -> *const u8,
    index: usize,
    sums: &mut Sums,
    token: usize,
) {
    let mut copies = [std::ptr::null::<u8>(); N];
    for (ahead, start) in copies.iter_mut().enumerate() {
        *start = copy(ahead);
    }
    let mut totals = [_mm512_setzero_si512(); N];
    for sub in 0..SUPER / SUB {
        let mut parts = [_mm512_setzero_si512(); N];
        for group in 0..SUB / 4 {
            let group = sub * (SUB / 4) + group;
            let weights = turned.quants[group].load();
            for ahead in 0..N {
                // SAFETY: the block's quants.
                let y = unsafe { dword(copies[ahead].add(4 + 4 * group)) };
                parts[ahead] = _mm512_dpbusd_epi32(parts[ahead], weights, _mm512_set1_epi32(y));
            }
        }
        let scales = turned.scales[sub].load();
        for ahead in 0..N {
            totals[ahead] = _mm512_add_epi32(totals[ahead], _mm512_mullo_epi32(parts[ahead], scales));
        }
    }
    for ahead in 0..N {
        let mut mins = _mm512_setzero_si512();
        for pair in 0..8 {
            // SAFETY: the block's sums.
            let bsums = unsafe { dword(copies[ahead].add(4 + SUPER + 4 * pair)) };
            mins = _mm512_dpwssd_epi32(mins, turned.mins[pair].load(), _mm512_set1_epi32(bsums));
        }
        // SAFETY: the block's head; sixteen scales.
        let (factor, scale, min_scale) = unsafe {
            (
                _mm512_set1_ps(copies[ahead].cast::<f32>().read_unaligned()),
                _mm512_loadu_ps(turned.scale.as_ptr()),
                _mm512_loadu_ps(turned.min_scale.as_ptr()),
            )
        };
        let lane = index % BLOCKS;
        let (value, low) = (
            &mut sums.values[lane][token + ahead],
            &mut sums.mins[lane][token + ahead],
        );
        let before = |line: &Line| {
            if index < BLOCKS {
                _mm512_setzero_ps()
            } else {
                _mm512_castsi512_ps(line.load())
            }
        };
        let total = if SEPARATE_MINS {
            let sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(mins), _mm512_mul_ps(min_scale, factor), before(low));
            low.store(_mm512_castps_si512(sum));
            totals[ahead]
        } else {
            _mm512_sub_epi32(totals[ahead], _mm512_slli_epi32::<5>(mins))
        };
        let sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(total), _mm512_mul_ps(scale, factor), before(value));
        value.store(_mm512_castps_si512(sum));
    }
}

/// The head of Q4_K and Q5_K blocks.
///
/// # Safety
///
/// `block` is such a block.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn turn_head(block: *const u8, lane: usize, turned: &mut Turned) {
    // SAFETY: the caller's promise.
    let (scales, mins, scale, min_scale) = unsafe { six_bit_head(block) };
    (turned.scale[lane], turned.min_scale[lane]) = (scale, min_scale);
    for sub in 0..8 {
        turned.scales[sub].0[lane] = i32::from(scales.to_le_bytes()[sub]);
        // Two sums of 16 for each minimum of 32.
        turned.mins[sub].0[lane] = i32::from(mins.to_le_bytes()[sub]) * 0x1_0001;
    }
}

/// # Safety
///
/// `start` gives Q4_K blocks.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn turn_q4k(start: impl Fn(usize) -> *const u8, turned: &mut Turned) {
    let mut raw = [Line::ZERO; 32];
    for lane in 0..LANES {
        let block = start(lane);
        // SAFETY: the head, then 128 bytes of quants.
        unsafe {
            turn_head(block, lane, turned);
            for (at, line) in raw.iter_mut().enumerate() {
                line.0[lane] = dword(block.add(16 + 4 * at));
            }
        }
    }
    let low = _mm512_set1_epi8(15);
    for (at, line) in raw.iter().enumerate() {
        let (run, group) = (at / 8, at % 8);
        let both = line.load();
        turned.quants[16 * run + group].store(_mm512_and_si512(both, low));
        turned.quants[16 * run + 8 + group].store(_mm512_and_si512(_mm512_srli_epi16::<4>(both), low));
    }
}

/// # Safety
///
/// `start` gives Q5_K blocks.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn turn_q5k(start: impl Fn(usize) -> *const u8, turned: &mut Turned) {
    let mut raw = [Line::ZERO; 40];
    for lane in 0..LANES {
        let block = start(lane);
        // SAFETY: the head, 32 bytes of fifth bits, 128 bytes of quants.
        unsafe {
            turn_head(block, lane, turned);
            for (at, line) in raw.iter_mut().enumerate() {
                line.0[lane] = dword(block.add(16 + 4 * at));
            }
        }
    }
    let (low, one) = (_mm512_set1_epi8(15), _mm512_set1_epi8(1));
    let (fifth, quants) = raw.split_at(8);
    for (at, line) in quants.iter().enumerate() {
        let (run, group) = (at / 8, at % 8);
        let (both, bits) = (line.load(), fifth[group].load());
        let bit = |number: usize| {
            let shift = _mm_set_epi64x(0, i64::try_from(number).unwrap_or(0));
            _mm512_slli_epi16::<4>(_mm512_and_si512(_mm512_srl_epi16(bits, shift), one))
        };
        turned.quants[16 * run + group].store(_mm512_or_si512(_mm512_and_si512(both, low), bit(2 * run)));
        turned.quants[16 * run + 8 + group].store(_mm512_or_si512(
            _mm512_and_si512(_mm512_srli_epi16::<4>(both), low),
            bit(2 * run + 1),
        ));
    }
}

/// # Safety
///
/// `start` gives Q6_K blocks.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn turn_q6k(start: impl Fn(usize) -> *const u8, turned: &mut Turned) {
    let mut raw = [Line::ZERO; 48];
    for lane in 0..LANES {
        let block = start(lane);
        // SAFETY: 192 bytes of quants, 16 scales and a half.
        unsafe {
            for (at, line) in raw.iter_mut().enumerate() {
                line.0[lane] = dword(block.add(4 * at));
            }
            turned.scale[lane] = half_at(block.add(208));
            for sub in 0..16 {
                turned.scales[sub].0[lane] = i32::from(block.add(192 + sub).cast::<i8>().read());
            }
        }
    }
    for pair in 0..8 {
        let (even, odd) = (turned.scales[2 * pair].load(), turned.scales[2 * pair + 1].load());
        let even = _mm512_and_si512(even, _mm512_set1_epi32(0xffff));
        turned.mins[pair].store(_mm512_or_si512(even, _mm512_slli_epi32::<16>(odd)));
    }
    let (low, high) = (_mm512_set1_epi8(15), _mm512_set1_epi8(0x30));
    for half in 0..2 {
        for group in 0..8 {
            let bits = raw[32 + 8 * half + group].load();
            let (first, second) = (raw[16 * half + group].load(), raw[16 * half + 8 + group].load());
            let base = 32 * half + group;
            let quants = &mut turned.quants;
            let join = |four, two| _mm512_or_si512(_mm512_and_si512(four, low), _mm512_and_si512(two, high));
            quants[base].store(join(first, _mm512_slli_epi16::<4>(bits)));
            quants[base + 8].store(join(second, _mm512_slli_epi16::<2>(bits)));
            quants[base + 16].store(join(_mm512_srli_epi16::<4>(first), bits));
            quants[base + 24].store(join(_mm512_srli_epi16::<4>(second), _mm512_srli_epi16::<2>(bits)));
        }
    }
}

/// Eight blocks of 32 columns of sixteen rows.
struct TurnedSmall {
    /// Signed quants, as in [`Turned`].
    quants: [Line; GROUPS],
    /// For each block -128 times the sum of a row's quants: activations are made unsigned by adding 128.
    starts: [Line; 8],
    scales: [[f32; LANES]; 8],
}

macro_rules! small_tiles {
    ($(#[$meta:meta])* $name:ident, $bytes:expr, $turn:ident) => {
        $(#[$meta])*
        ///
        /// # Safety
        ///
        /// The machine has the instructions of [`Isa::Avx512`](super::isa::Isa::Avx512); `rows` is as its fields say.
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
        pub(super) unsafe fn $name(rows: &Rows<'_>) {
            let mut turned = TurnedSmall {
                quants: [Line::ZERO; GROUPS],
                starts: [Line::ZERO; 8],
                scales: [[0.0; LANES]; 8],
            };
            let mut sums = [[Line::ZERO; TOKENS]; BLOCKS];
            let count = rows.weights.len() / rows.row_bytes;
            let all = rows.columns / BLOCK;
            for from in (0..rows.tokens).step_by(TOKENS) {
                let tokens = TOKENS.min(rows.tokens - from);
                for first in (0..count).step_by(LANES) {
                    for index in (0..all).step_by(8) {
                        let blocks = 8.min(all - index);
                        for lane in 0..LANES {
                            // The last row stands in for those that are not there.
                            let row = (first + lane).min(count - 1);
                            let start = &rows.weights[row * rows.row_bytes + index * $bytes..];
                            for block in 0..blocks {
                                // SAFETY: blocks of a whole row.
                                unsafe {
                                    let start = start.as_ptr().add(block * $bytes);
                                    turned.scales[block][lane] = half_at(start);
                                    $turn(start.add(2), lane, &mut turned.quants[8 * block..8 * block + 8]);
                                }
                            }
                        }
                        for (start, quants) in turned.starts.iter_mut().zip(turned.quants.chunks_exact(8)) {
                            let mut sum = _mm512_setzero_si512();
                            for line in quants {
                                sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), line.load());
                            }
                            start.store(_mm512_sub_epi32(_mm512_setzero_si512(), _mm512_slli_epi32::<7>(sum)));
                        }
                        let mut token = 0;
                        while token < tokens {
                            let left = tokens - token;
                            let copy = |ahead: usize| {
                                rows.copy(from + token + ahead).wrapping_add(index * Q8_0_BYTES)
                            };
                            // SAFETY: copies of that many tokens, each with these blocks.
                            unsafe {
                                if left >= STEP {
                                    multiply_small::<STEP>(&turned, blocks, copy, index == 0, &mut sums, token);
                                    token += STEP;
                                } else {
                                    multiply_small::<1>(&turned, blocks, copy, index == 0, &mut sums, token);
                                    token += 1;
                                }
                            }
                        }
                    }
                    for token in 0..tokens {
                        rows.put_sixteen(from + token, first, count, last_sum(&sums, token, all));
                    }
                }
            }
        }
    };
}

small_tiles! {
    /// Rows of Q8_0.
    rows_q8_0, 34, turn_q8_0
}
small_tiles! {
    /// Rows of Q4_0.
    rows_q4_0, 18, turn_q4_0
}

/// Up to eight blocks times `N` tokens.
///
/// # Safety
///
/// `copy` gives as many Q8_0 blocks of each of `N` tokens.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn multiply_small<const N: usize>(
    turned: &TurnedSmall,
    blocks: usize,
    copy: impl Fn(usize) -> *const u8,
    fresh: bool,
    sums: &mut [[Line; TOKENS]; BLOCKS],
    token: usize,
) {
    let mut copies = [std::ptr::null::<u8>(); N];
    for (ahead, start) in copies.iter_mut().enumerate() {
        *start = copy(ahead);
    }
    let unsigned = _mm512_set1_epi8(i8::MIN);
    for block in 0..blocks {
        let mut parts = [turned.starts[block].load(); N];
        for group in 0..8 {
            let weights = turned.quants[8 * block + group].load();
            for ahead in 0..N {
                // SAFETY: the block's quants.
                let y = unsafe { dword(copies[ahead].add(block * Q8_0_BYTES + 2 + 4 * group)) };
                let y = _mm512_xor_si512(_mm512_set1_epi32(y), unsigned);
                parts[ahead] = _mm512_dpbusd_epi32(parts[ahead], y, weights);
            }
        }
        // SAFETY: sixteen scales.
        let scale = unsafe { _mm512_loadu_ps(turned.scales[block].as_ptr()) };
        for ahead in 0..N {
            // SAFETY: the block's head.
            let factor = _mm512_set1_ps(unsafe { half_at(copies[ahead].add(block * Q8_0_BYTES)) });
            let sum = &mut sums[block % BLOCKS][token + ahead];
            let before = if fresh && block < BLOCKS {
                _mm512_setzero_ps()
            } else {
                _mm512_castsi512_ps(sum.load())
            };
            let total = _mm512_cvtepi32_ps(parts[ahead]);
            sum.store(_mm512_castps_si512(_mm512_fmadd_ps(
                total,
                _mm512_mul_ps(scale, factor),
                before,
            )));
        }
    }
}

/// # Safety
///
/// `quants` are those of a Q8_0 block.
#[inline(always)]
unsafe fn turn_q8_0(quants: *const u8, lane: usize, lines: &mut [Line]) {
    for (group, line) in lines.iter_mut().enumerate() {
        // SAFETY: 32 bytes.
        line.0[lane] = unsafe { dword(quants.add(4 * group)) };
    }
}

/// # Safety
///
/// `quants` are those of a Q4_0 block.
#[inline(always)]
unsafe fn turn_q4_0(quants: *const u8, lane: usize, lines: &mut [Line]) {
    let (low, high) = lines.split_at_mut(4);
    for (group, (low, high)) in low.iter_mut().zip(high).enumerate() {
        // SAFETY: 16 bytes.
        let both = unsafe { dword(quants.add(4 * group)) };
        let less_eight = |nibbles: i32| {
            let bytes = (nibbles & 0x0f0f_0f0f).to_le_bytes();
            i32::from_le_bytes(bytes.map(|byte| byte.wrapping_sub(8)))
        };
        (low.0[lane], high.0[lane]) = (less_eight(both), less_eight(both >> 4));
    }
}
