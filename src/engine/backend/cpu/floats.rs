//! Products with rows of `f32`, `f16` and `bf16`, in tiles of rows by tokens.
//!
//! A row is divided into blocks of up to 1024 columns, assigned alternately, sixteen by sixteen, to two chains. The
//! products of a chain are summed in eight lanes, which are added by halves; then the chains of a block are added, one
//! block after another. A row is thus read in memory order with two concurrent sums, and a tile sums one chain of many
//! rows and tokens in registers: more chains would require more frequent lane additions. Columns after the last whole
//! turn form a separate chain. Any number of tokens and any instruction set yield the same bits as the portable loop.
//!
//! Up to four tokens are multiplied with rows in place: one or two with all chains of a row at once, so that memory is
//! read in order, more with fewer chains of several rows. For more tokens, a block of eight rows is widened once, each
//! chain separately, and stays in the caches while all tokens are processed. There, a register of AVX-512 has the lanes
//! of two rows, widened next to each other; a token's columns are loaded into both halves.

use std::{mem::transmute, ops::Range};

#[cfg(target_arch = "aarch64")]
use std::arch::aarch64::*;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use super::{float, rows::Rows};

/// Lanes of a chain's sum.
const LANES: usize = 8;

/// Chains of a block.
const CHAINS: usize = 2;

/// Columns per turn of a chain: a cache line of `f32`, so that each chain of a token reads whole lines.
const AT_ONCE: usize = 16;

/// Columns of one turn of all chains.
const TURN: usize = CHAINS * AT_ONCE;

/// Most turns of a block.
const TURNS_MAX: usize = 32;

/// Most columns of a chain in a block.
const CHAIN_MAX: usize = TURNS_MAX * AT_ONCE;

/// Prefetch distance within a row, since the hardware prefetcher stops at page boundaries: a sixth more memory
/// throughput than without (AMD Zen 5, one token, rows of 2 and 6 KiB); half and twice the distance are no better.
pub(super) const AHEAD: usize = 4096;

/// Rows widened at once.
const ROWS: usize = 8;

/// Tokens processed before the next rows are widened: their part of a block is 512 KiB.
const TOKENS: usize = 128;

/// Unchanged `f32`.
pub(super) const F32: u8 = 0;
/// Half precision.
pub(super) const F16: u8 = 1;
/// The upper half of an `f32`.
pub(super) const BF16: u8 = 2;

/// A block: its first column, and turns.
#[derive(Clone, Copy)]
struct Block {
    start: usize,
    turns: usize,
}

/// The blocks of a row, of nearly equal size, and the first column after them.
fn blocks(columns: usize) -> (impl Iterator<Item = Block> + Clone, usize) {
    let turns = columns / TURN;
    let count = turns.div_ceil(TURNS_MAX);
    let blocks = (0..count).map(move |number| {
        let first = number * turns / count;
        Block {
            start: first * TURN,
            turns: (number + 1) * turns / count - first,
        }
    });
    (blocks, turns * TURN)
}

/// The portable form: one row times one token.
#[inline(always)]
pub(super) fn dot<T: Copy>(weight: &[T], input: &[f32], widen: impl Fn(T) -> f32) -> f32 {
    let (blocks, whole) = blocks(weight.len());
    let mut total = 0.0;
    for Block { start, turns } in blocks {
        for chain in 0..CHAINS {
            let mut sums = [0f32; LANES];
            for turn in 0..turns {
                let from = start + turn * TURN + chain * AT_ONCE;
                for at in 0..AT_ONCE {
                    sums[at % LANES] =
                        widen(weight[from + at]).mul_add(input[from + at], sums[at % LANES]);
                }
            }
            total += float::sum(&mut sums);
        }
    }
    total + last(&weight[whole..], &input[whole..], widen)
}

/// The products of the columns after the last whole turn.
#[inline(always)]
fn last<T: Copy>(weight: &[T], input: &[f32], widen: impl Fn(T) -> f32) -> f32 {
    let mut sums = [0f32; LANES];
    let (mut left, mut right) = (weight.chunks_exact(LANES), input.chunks_exact(LANES));
    for (x, y) in (&mut left).zip(&mut right) {
        for lane in 0..LANES {
            sums[lane] = widen(x[lane]).mul_add(y[lane], sums[lane]);
        }
    }
    for (lane, (x, y)) in left.remainder().iter().zip(right.remainder()).enumerate() {
        sums[lane] = widen(*x).mul_add(*y, sums[lane]);
    }
    float::sum(&mut sums)
}

/// Defines the module of a set: its features; its register of at most eight lanes, the number of these that make eight,
/// and the operations on them; its register for many tokens, the number of rows in it, the registers and tokens of a
/// tile, and the operations on these.
macro_rules! products {
    (
        $set:ident, $arch:ident, $features:literal,
        ($narrow:ty, $parts:expr),
        ($zero:expr, $load:expr, $store:expr, $fma:expr, $half:expr, $brain:expr, $sum:expr $(,)?),
        ($wide:ty, $together:expr, $rows:expr, $tokens:expr),
        ($zeros:expr, $aligned:expr, $all:expr, $fmas:expr, $sums:expr, $ask:expr $(,)?) $(,)?
    ) => {
        pub(super) mod $set {
            use std::{arch::$arch::*, array::from_fn, mem::MaybeUninit};

            use crate::backend::cpu::floats::{
                AHEAD, AT_ONCE, BF16, Block, CHAIN_MAX, CHAINS, F16, LANES, ROWS, TOKENS, TURN,
                Widened, add_last, blocks, bytes_of, outputs, token, token_step,
            };
            use crate::backend::cpu::rows::Rows;

            /// Registers for the lanes of a row.
            const PARTS: usize = $parts;
            /// Columns of a row in a register.
            const WIDTH: usize = LANES / PARTS;
            /// Rows whose lanes share a register for many tokens.
            const TOGETHER: usize = $together;
            /// Rows of a tile.
            const HEIGHT: usize = $rows * TOGETHER;

            /// Rows of type `KIND`.
            ///
            /// # Safety
            ///
            /// The machine has the set; `rows` is as its fields say.
            #[target_feature(enable = $features)]
            pub(crate) unsafe fn rows<const KIND: u8>(rows: &Rows<'_>) {
                // SAFETY: the caller's promise.
                unsafe {
                    match rows.tokens {
                        1 => few::<KIND, 1, 1, 2>(rows),
                        2 => few::<KIND, 2, 1, 2>(rows),
                        3 => few::<KIND, 3, 3, 1>(rows),
                        4 => few::<KIND, 4, 2, 1>(rows),
                        _ => many::<KIND>(rows),
                    }
                }
            }

            /// Rows of type `KIND` times all `N` tokens, `R` rows and `C` chains at once, in place.
            ///
            /// # Safety
            ///
            /// As for `rows`.
            #[target_feature(enable = $features)]
            unsafe fn few<const KIND: u8, const N: usize, const R: usize, const C: usize>(
                rows: &Rows<'_>,
            ) {
                let count = rows.weights.len() / rows.row_bytes;
                let tokens: [_; N] = from_fn(|at| token::<KIND>(rows, at));
                let (blocks, whole) = blocks(rows.columns);
                for first in (0..count).step_by(R) {
                    let weights: [_; R] = rows.starts(first);
                    let mut totals = [[0f32; R]; N];
                    for Block { start, turns } in blocks.clone() {
                        for chain in (0..CHAINS).step_by(C) {
                            let column = start + chain * AT_ONCE;
                            // Several interleaved rows are not a stream for the hardware prefetcher.
                            let ahead = if R > 1 { R * rows.row_bytes } else { AHEAD };
                            // SAFETY: the columns of these turns exist.
                            let sums = unsafe {
                                chains::<KIND, N, R, C>(weights, tokens, column, turns, ahead)
                            };
                            for token in 0..N {
                                for row in 0..R {
                                    for chain in 0..C {
                                        totals[token][row] += $sum(&sums[token][row][chain]);
                                    }
                                }
                            }
                        }
                    }
                    for (token, totals) in totals.iter().enumerate() {
                        for (row, total) in totals.iter().enumerate().take(count - first) {
                            rows.put(token, first + row, *total);
                        }
                    }
                }
                add_last::<KIND>(rows, 0..N, whole);
            }

            /// The sums of `C` chains from the one whose columns start at `column`, of `R` rows of type `KIND` with `N`
            /// tokens. Prefetches the same columns at a distance of `ahead` bytes.
            ///
            /// # Safety
            ///
            /// Each row and each token has the columns of `turns` turns.
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn chains<const KIND: u8, const N: usize, const R: usize, const C: usize>(
                weights: [*const u8; R],
                tokens: [*const f32; N],
                column: usize,
                turns: usize,
                ahead: usize,
            ) -> [[[[$narrow; PARTS]; C]; R]; N] {
                let mut sums = [[[[$zero; PARTS]; C]; R]; N];
                for turn in 0..turns {
                    for chain in 0..C {
                        let from = column + turn * TURN + chain * AT_ONCE;
                        for row in 0..R {
                            $ask(
                                weights[row].wrapping_add(ahead + from * bytes_of(KIND)),
                                false,
                            );
                        }
                        for at in (0..AT_ONCE).step_by(WIDTH) {
                            let (place, part) = (from + at, at % LANES / WIDTH);
                            let mut ys = [$zero; N];
                            for token in 0..N {
                                // SAFETY: a register of columns of these turns.
                                ys[token] = unsafe { $load(tokens[token].add(place)) };
                            }
                            for row in 0..R {
                                // SAFETY: as above.
                                let x = unsafe { register::<KIND>(weights[row], place) };
                                for token in 0..N {
                                    sums[token][row][chain][part] =
                                        $fma(sums[token][row][chain][part], x, ys[token]);
                                }
                            }
                        }
                    }
                }
                sums
            }

            /// Rows of type `KIND` times any number of tokens.
            ///
            /// # Safety
            ///
            /// As for `rows`.
            #[target_feature(enable = $features)]
            unsafe fn many<const KIND: u8>(rows: &Rows<'_>) {
                // They are set before use.
                let mut weights = MaybeUninit::<Widened>::uninit();
                // SAFETY: a field of an existing value.
                let wide: *mut f32 = unsafe { &raw mut (*weights.as_mut_ptr()).0 }.cast();
                let count = rows.weights.len() / rows.row_bytes;
                let (blocks, whole) = blocks(rows.columns);
                for from in (0..rows.tokens).step_by(TOKENS) {
                    let here = TOKENS.min(rows.tokens - from);
                    for token in from..from + here {
                        let out = outputs(rows, token);
                        if out.len() < count {
                            return;
                        }
                        out.fill(0.0);
                    }
                    for block in blocks.clone() {
                        for first in (0..count).step_by(ROWS) {
                            for row in 0..ROWS {
                                let weight =
                                    &rows.weights[(first + row).min(count - 1) * rows.row_bytes..];
                                let group = row / TOGETHER * TOGETHER;
                                let to =
                                    wide.wrapping_add(group * CHAIN_MAX + (row - group) * LANES);
                                // SAFETY: the columns of these turns exist, and so does the place of the row's lanes.
                                unsafe { widen::<KIND>(weight.as_ptr(), block, to) };
                            }
                            // SAFETY: all rows have been widened, and the columns of these turns exist.
                            unsafe { meet::<KIND>(rows, wide, (first, from, here), block) };
                        }
                    }
                    add_last::<KIND>(rows, from..from + here, whole);
                }
            }

            /// Adds to the outputs of `here` tokens from `from` on the products with the rows from `first` on, whose
            /// columns of one block are widened.
            ///
            /// # Safety
            ///
            /// The rows are widened, and each token has these columns.
            #[target_feature(enable = $features)]
            unsafe fn meet<const KIND: u8>(
                rows: &Rows<'_>,
                wide: *const f32,
                (first, from, here): (usize, usize, usize),
                Block { start, turns }: Block,
            ) {
                let together = ROWS.min(rows.weights.len() / rows.row_bytes - first);
                // Meanwhile, the rows to be widened next are prefetched: they lie in short pieces.
                let lines = turns * TURN * bytes_of(KIND) / 64;
                let at_once = (ROWS * lines).div_ceil(CHAINS * here.div_ceil($tokens));
                let mut next = rows
                    .weights
                    .as_ptr()
                    .wrapping_add((first + ROWS) * rows.row_bytes + start * bytes_of(KIND));
                let (mut of_row, mut of_all) = (lines, ROWS * lines);
                let (step, stride) = (token_step::<KIND>(rows), rows.stride);
                for chain in 0..CHAINS {
                    let weights = wide.wrapping_add(chain * ROWS * CHAIN_MAX);
                    let mut token = token::<KIND>(rows, from).wrapping_add(start + chain * AT_ONCE);
                    let mut out = rows.out.pointer(from * stride + rows.first + first);
                    let mut left = here;
                    while left > 0 {
                        for _ in 0..at_once.min(of_all) {
                            $ask(next, true);
                            next = next.wrapping_add(64);
                            (of_row, of_all) = (of_row - 1, of_all - 1);
                            if of_row == 0 {
                                next = next.wrapping_add(rows.row_bytes - 64 * lines);
                                of_row = lines;
                            }
                        }
                        let count = if left < $tokens { left.min(3) } else { $tokens };
                        let (tokens, sums) = ((token, step), (out, stride));
                        // SAFETY: the caller's promise; the outputs of these rows and tokens, whose existence `many`
                        // has checked.
                        unsafe {
                            match count {
                                1 => tiles::<1>(weights, tokens, turns, sums, together),
                                2 => tiles::<2>(weights, tokens, turns, sums, together),
                                3 => tiles::<3>(weights, tokens, turns, sums, together),
                                _ => tiles::<$tokens>(weights, tokens, turns, sums, together),
                            }
                        }
                        (token, out) = (
                            token.wrapping_add(count * step),
                            out.wrapping_add(count * stride),
                        );
                        left -= count;
                    }
                }
            }

            /// Adds to outputs at the given distance per token the products of up to eight widened rows with `N`
            /// tokens, also at a given distance, over the columns of one chain.
            ///
            /// # Safety
            ///
            /// The rows are widened, each token has the columns of `turns` turns, and there are outputs of `together`
            /// rows.
            #[inline(never)]
            #[target_feature(enable = $features)]
            unsafe fn tiles<const N: usize>(
                weights: *const f32,
                (token, step): (*const f32, usize),
                turns: usize,
                (out, stride): (*mut f32, usize),
                together: usize,
            ) {
                let tokens: [_; N] = from_fn(|at| token.wrapping_add(at * step));
                for first in (0..together).step_by(HEIGHT) {
                    // SAFETY: the caller's promise.
                    let sums = unsafe { tile::<N>(weights.add(first * CHAIN_MAX), tokens, turns) };
                    for token in 0..N {
                        // SAFETY: as above.
                        let out = unsafe {
                            std::slice::from_raw_parts_mut(
                                out.add(token * stride + first),
                                HEIGHT.min(together - first),
                            )
                        };
                        if let Some(out) = out.first_chunk_mut::<HEIGHT>() {
                            for row in 0..HEIGHT {
                                out[row] += sums[token][row];
                            }
                        } else {
                            for (out, sum) in out.iter_mut().zip(sums[token]) {
                                *out += sum;
                            }
                        }
                    }
                }
            }

            /// The products of the widened rows of a tile with `N` tokens, over the columns of one chain.
            ///
            /// # Safety
            ///
            /// The rows are widened, and each token has the columns of `turns` turns.
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn tile<const N: usize>(
                weights: *const f32,
                tokens: [*const f32; N],
                turns: usize,
            ) -> [[f32; HEIGHT]; N] {
                // Indexed: arrays returned by functions were written to memory and copied.
                let mut sums = [[[$zeros; PARTS]; $rows]; N];
                for turn in 0..turns {
                    for at in (0..AT_ONCE).step_by(WIDTH) {
                        // SAFETY: a register of columns of these turns.
                        unsafe {
                            let mut ys = [$zeros; N];
                            for token in 0..N {
                                ys[token] = $all(tokens[token].add(turn * TURN + at));
                            }
                            for row in 0..$rows {
                                let lanes = at / LANES * LANES * TOGETHER + at % LANES;
                                let x = $aligned(
                                    weights
                                        .add((row * CHAIN_MAX + turn * AT_ONCE) * TOGETHER + lanes),
                                );
                                for token in 0..N {
                                    let part = at % LANES / WIDTH;
                                    sums[token][row][part] =
                                        $fmas(sums[token][row][part], x, ys[token]);
                                }
                            }
                        }
                    }
                }
                let mut out = [[0f32; HEIGHT]; N];
                for token in 0..N {
                    out[token] = $sums(&sums[token]);
                }
                out
            }

            /// A register of columns from `column` on.
            ///
            /// # Safety
            ///
            /// This many columns exist at `from`.
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn register<const KIND: u8>(from: *const u8, column: usize) -> $narrow {
                // SAFETY: the caller's promise.
                unsafe {
                    match KIND {
                        F16 => $half(from.cast::<u16>().add(column)),
                        BF16 => $brain(from.cast::<u16>().add(column)),
                        _ => $load(from.cast::<f32>().add(column)),
                    }
                }
            }

            /// The columns of `turns` turns from `start` on, each chain separately, to every [`TOGETHER`]th eight from
            /// `to` on.
            ///
            /// # Safety
            ///
            /// These columns exist at `from`, with room for them at `to`.
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn widen<const KIND: u8>(
                from: *const u8,
                Block { start, turns }: Block,
                to: *mut f32,
            ) {
                for turn in 0..turns {
                    for chain in 0..CHAINS {
                        for at in (0..AT_ONCE).step_by(WIDTH) {
                            let lanes = at / LANES * LANES * TOGETHER + at % LANES;
                            // SAFETY: a register of columns, and its place.
                            unsafe {
                                let x = register::<KIND>(
                                    from,
                                    start + turn * TURN + chain * AT_ONCE + at,
                                );
                                $store(
                                    to.add(
                                        chain * ROWS * CHAIN_MAX
                                            + turn * AT_ONCE * TOGETHER
                                            + lanes,
                                    ),
                                    x,
                                );
                            }
                        }
                    }
                }
            }
        }
    };
}

/// The columns of a token for products with rows of type `KIND`.
fn token<const KIND: u8>(rows: &Rows<'_>, token: usize) -> *const f32 {
    match KIND {
        F32 => rows.floats[token * rows.columns..].as_ptr(),
        _ => rows.copy(token).cast(),
    }
}

/// Distance between tokens, in numbers.
const fn token_step<const KIND: u8>(rows: &Rows<'_>) -> usize {
    match KIND {
        F32 => rows.columns,
        _ => rows.copy_step / size_of::<f32>(),
    }
}

/// The products of all rows with `token`.
#[expect(
    clippy::mut_from_ref,
    reason = "the thread that has these rows has their outputs alone, one at a time"
)]
fn outputs<'job>(rows: &'job Rows<'_>, token: usize) -> &'job mut [f32] {
    // SAFETY: each output element belongs to one weight row, and each of those to one item of the pool.
    unsafe {
        rows.out.slice(
            token * rows.stride + rows.first,
            rows.weights.len() / rows.row_bytes,
        )
    }
}

/// Adds the products of the columns from `whole` on, with the instructions of the caller's set.
#[inline(always)]
fn add_last<const KIND: u8>(rows: &Rows<'_>, tokens: Range<usize>, whole: usize) {
    if whole == rows.columns {
        return;
    }
    for at in tokens {
        // SAFETY: a token has this many columns.
        let input = unsafe {
            std::slice::from_raw_parts(token::<KIND>(rows, at).add(whole), rows.columns - whole)
        };
        for (out, row) in outputs(rows, at)
            .iter_mut()
            .zip(rows.weights.chunks_exact(rows.row_bytes))
        {
            let row = &row[whole * bytes_of(KIND)..];
            *out += match KIND {
                F16 => last(row.as_chunks().0, input, |bits| {
                    float::half_to_float(u16::from_le_bytes(bits))
                }),
                BF16 => last(row.as_chunks().0, input, |bits| {
                    f32::from_bits(u32::from(u16::from_le_bytes(bits)) << 16)
                }),
                _ => last(row.as_chunks().0, input, f32::from_le_bytes),
            };
        }
    }
}

/// Rounds numbers through `f16`.
///
/// # Safety
///
/// The machine has AVX2 and F16C.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn round_to_f16(input: &[f32], out: &mut [u8]) {
    let (numbers, rest) = input.as_chunks::<LANES>();
    let (places, behind) = out.as_chunks_mut::<{ LANES * size_of::<f32>() }>();
    for (numbers, place) in numbers.iter().zip(&mut *places) {
        // SAFETY: eight numbers in both types.
        unsafe {
            let half =
                _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm256_loadu_ps(numbers.as_ptr()));
            _mm256_storeu_ps(place.as_mut_ptr().cast(), _mm256_cvtph_ps(half));
        }
    }
    let behind = places[numbers.len()..]
        .as_flattened_mut()
        .iter_mut()
        .chain(behind);
    let rest = rest
        .iter()
        .flat_map(|x| half::f16::from_f32(*x).to_f32().to_ne_bytes());
    for (to, byte) in behind.zip(rest) {
        *to = byte;
    }
}

/// A block of widened rows, one chain after another, aligned so that no register of them spans two cache lines.
#[repr(align(64))]
struct Widened([f32; CHAINS * ROWS * CHAIN_MAX]);

/// Bytes of one number.
const fn bytes_of(kind: u8) -> usize {
    if kind == F32 { 4 } else { 2 }
}

/// The lane sums of four registers, each by halves.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx2")]
fn four(sums: [__m256; 4]) -> [f32; 4] {
    // For each of two registers: lanes 0 to 3 plus 4 to 7.
    let [a, b, c, d] = sums;
    let ab = _mm256_add_ps(
        _mm256_permute2f128_ps::<0x20>(a, b),
        _mm256_permute2f128_ps::<0x31>(a, b),
    );
    let cd = _mm256_add_ps(
        _mm256_permute2f128_ps::<0x20>(c, d),
        _mm256_permute2f128_ps::<0x31>(c, d),
    );
    // Then 0 and 1 plus 2 and 3: a a c c b b d d. Then these two.
    let pairs = _mm256_add_ps(
        _mm256_shuffle_ps::<0x44>(ab, cd),
        _mm256_shuffle_ps::<0xee>(ab, cd),
    );
    let sums = _mm256_add_ps(pairs, _mm256_movehdup_ps(pairs));
    let (ac, bd) = (
        _mm256_castps256_ps128(sums),
        _mm256_extractf128_ps::<1>(sums),
    );
    let abcd = _mm_movelh_ps(_mm_unpacklo_ps(ac, bd), _mm_unpackhi_ps(ac, bd));
    // SAFETY: four numbers in both types.
    unsafe { transmute(abcd) }
}

/// The sums of the halves of four registers, each by halves.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f")]
fn eight(sums: [__m512; 4]) -> [f32; 8] {
    // Quarters: a a b b and c c d d become a b c d.
    let [ab, cd, ef, gh] = sums;
    let low = _mm512_add_ps(
        _mm512_shuffle_f32x4::<0x88>(ab, cd),
        _mm512_shuffle_f32x4::<0xdd>(ab, cd),
    );
    let high = _mm512_add_ps(
        _mm512_shuffle_f32x4::<0x88>(ef, gh),
        _mm512_shuffle_f32x4::<0xdd>(ef, gh),
    );
    // Then a a e e b b f f c c g g d d h h.
    let pairs = _mm512_add_ps(
        _mm512_shuffle_ps::<0x44>(low, high),
        _mm512_shuffle_ps::<0xee>(low, high),
    );
    let sums = _mm512_add_ps(pairs, _mm512_movehdup_ps(pairs));
    let order = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 0, 0, 0, 0, 0, 0, 0);
    // SAFETY: eight numbers in both types.
    unsafe { transmute(_mm512_castps512_ps256(_mm512_permutexvar_ps(order, sums))) }
}

/// The lane sums of four pairs of registers, each by halves.
#[cfg(target_arch = "aarch64")]
#[inline]
#[target_feature(enable = "neon")]
fn four(sums: &[[float32x4_t; 2]; 4]) -> [f32; 4] {
    let lanes = |row: usize| vaddq_f32(sums[row][0], sums[row][1]);
    let pairs = |a: float32x4_t, b: float32x4_t| {
        vcombine_f32(
            vadd_f32(vget_low_f32(a), vget_high_f32(a)),
            vadd_f32(vget_low_f32(b), vget_high_f32(b)),
        )
    };
    let abcd = vpaddq_f32(pairs(lanes(0), lanes(1)), pairs(lanes(2), lanes(3)));
    // SAFETY: four numbers in both types.
    unsafe { transmute(abcd) }
}

#[cfg(target_arch = "x86_64")]
products!(
    avx2,
    x86_64,
    "avx2,fma,f16c",
    (__m256, 1),
    (
        _mm256_setzero_ps(),
        |from: *const f32| _mm256_loadu_ps(from),
        |to: *mut f32, value| _mm256_storeu_ps(to, value),
        |sum, x, y| _mm256_fmadd_ps(x, y, sum),
        |from: *const u16| _mm256_cvtph_ps(_mm_loadu_si128(from.cast())),
        |from: *const u16| {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        },
        |sum: &[__m256; 1]| crate::backend::cpu::rows256::total(sum[0]),
    ),
    (__m256, 1, 4, 3),
    (
        _mm256_setzero_ps(),
        |from: *const f32| _mm256_load_ps(from),
        |from: *const f32| _mm256_loadu_ps(from),
        |sum, x, y| _mm256_fmadd_ps(x, y, sum),
        |sums: &[[__m256; 1]; 4]| crate::backend::cpu::floats::four([
            sums[0][0], sums[1][0], sums[2][0], sums[3][0]
        ]),
        |line: *const u8, far: bool| if far {
            _mm_prefetch::<_MM_HINT_T1>(line.cast());
        } else {
            _mm_prefetch::<_MM_HINT_T0>(line.cast());
        },
    ),
);

#[cfg(target_arch = "x86_64")]
products!(
    avx512,
    x86_64,
    "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c",
    (__m256, 1),
    (
        _mm256_setzero_ps(),
        |from: *const f32| _mm256_loadu_ps(from),
        |to: *mut f32, value| _mm256_storeu_ps(to, value),
        |sum, x, y| _mm256_fmadd_ps(x, y, sum),
        |from: *const u16| _mm256_cvtph_ps(_mm_loadu_si128(from.cast())),
        |from: *const u16| {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        },
        |sum: &[__m256; 1]| crate::backend::cpu::rows256::total(sum[0]),
    ),
    (__m512, 2, 4, 6),
    (
        _mm512_setzero_ps(),
        |from: *const f32| _mm512_load_ps(from),
        |from: *const f32| _mm512_broadcast_f32x8(_mm256_loadu_ps(from)),
        |sum, x, y| _mm512_fmadd_ps(x, y, sum),
        |sums: &[[__m512; 1]; 4]| crate::backend::cpu::floats::eight([
            sums[0][0], sums[1][0], sums[2][0], sums[3][0]
        ]),
        |line: *const u8, far: bool| if far {
            _mm_prefetch::<_MM_HINT_T1>(line.cast());
        } else {
            _mm_prefetch::<_MM_HINT_T0>(line.cast());
        },
    ),
);

#[cfg(target_arch = "aarch64")]
products!(
    neon,
    aarch64,
    "neon",
    (float32x4_t, 2),
    (
        vdupq_n_f32(0.0),
        |from: *const f32| vld1q_f32(from),
        |to: *mut f32, value| vst1q_f32(to, value),
        |sum, x, y| vfmaq_f32(sum, x, y),
        |from: *const u16| crate::backend::cpu::neon_unpack::widened(vld1_u16(from)),
        |from: *const u16| vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(from))),
        |sum: &[float32x4_t; 2]| {
            let four = vaddq_f32(sum[0], sum[1]);
            let two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
            vget_lane_f32::<0>(two) + vget_lane_f32::<1>(two)
        },
    ),
    (float32x4_t, 1, 4, 3),
    (
        vdupq_n_f32(0.0),
        |from: *const f32| vld1q_f32(from),
        |from: *const f32| vld1q_f32(from),
        |sum, x, y| vfmaq_f32(sum, x, y),
        |sums: &[[float32x4_t; 2]; 4]| crate::backend::cpu::floats::four(sums),
        |_line: *const u8, _far: bool| (),
    ),
);
