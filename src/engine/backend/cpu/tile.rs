//! Products of quantised rows with many tokens for AVX-512.
//!
//! A block of sixteen rows is transposed once into groups of four columns, sixteen rows adjacent, which stay in the
//! first-level cache while all tokens are processed: one `dpbusd` then computes 64 products whose sums need no
//! shuffles, and the scales of sixteen rows are one register. Two such blocks and six tokens form a tile of twelve
//! running sums, in which eight loads serve twelve products. The transposed blocks take some KiB on the stack; nothing
//! is kept.
//!
//! The order of every sum is that of [`avx512`](super::avx512), so that chunks of one token and of many yield the same
//! bits.

use std::{arch::x86_64::*, hint, mem::transmute};

use super::{
    quant::{BLOCK, Q8_0_BYTES, Q8K_BYTES, SUPER},
    rows::Rows,
    turned::{Block, LANES, Sixteen, TurnSmall, TurnSuper, everywhere, pairs_of_sums, prefetch},
};

/// Blocks whose sums are combined in one register, one lane each; a row's lanes are added at its end.
pub(super) const BLOCKS: usize = 4;

/// Registers of rows processed together by a tile.
const PAIR: usize = 2;

/// Tokens processed on a transposed block: with fewer, it would be transposed again more often.
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

    /// Adds `total · scale`; the first one initialises the sum.
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
    /// Unsigned quants: one line per group of four columns, with four bytes per row.
    quants: [Line; GROUPS],
    /// Scales of sub-blocks.
    scales: [Line; 16],
    /// For each pair of sums of activations, of 32 if minimums have separate scales and otherwise of 16: two 16-bit
    /// factors per lane.
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

    /// Prefetches as many bytes from `ahead` on.
    ///
    /// # Safety
    ///
    /// `rows` are blocks of the type.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    unsafe fn store<T: TurnSuper>(&mut self, rows: Sixteen, ahead: *const u8) {
        // SAFETY: the caller's promise.
        let head = unsafe { T::head(rows) };
        self.scale.store_floats(head.scale);
        self.min_scale.store_floats(head.min_scale);
        for (line, scales) in self.scales.iter_mut().zip(head.scales) {
            line.store(scales);
        }
        for (line, mins) in self.mins.iter_mut().zip(head.mins) {
            line.store(mins);
        }
        let runs = 8 / T::CHUNKS;
        let bytes = T::BYTES.div_ceil(2 * T::CHUNKS);
        for chunk in 0..T::CHUNKS {
            for step in 0..2 {
                prefetch(
                    ahead.wrapping_add((2 * chunk + step) * LANES * bytes),
                    bytes,
                );
                // SAFETY: the caller's promise.
                let quants = unsafe { T::quants(rows, chunk, step) };
                for (part, quants) in quants.into_iter().enumerate().take(runs) {
                    let (run, half) = T::place(step, part);
                    let first = 8 * (runs * chunk + run) + 4 * half;
                    for (line, quants) in self.quants[first..].iter_mut().zip(quants) {
                        line.store(quants);
                    }
                }
            }
        }
    }
}

/// One block of 32 columns of sixteen rows.
struct TurnedSmall {
    /// As in [`Turned`].
    quants: [Line; 8],
    scale: Line,
    min: Line,
}

impl TurnedSmall {
    const ZERO: Self = Self {
        quants: [Line::ZERO; 8],
        scale: Line::ZERO,
        min: Line::ZERO,
    };

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    fn store(&mut self, block: &Block) {
        for (line, quants) in self.quants.iter_mut().zip(block.quants) {
            line.store(quants);
        }
        self.scale.store_floats(block.scale);
        self.min.store_floats(block.min);
    }
}

/// Running sums of several tokens, one per block of four.
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

/// Calls a tile function for one block of rows or for [`PAIR`], with at most [`STEP`] tokens at a time.
macro_rules! for_tokens {
    ($tokens:expr, $parts:expr, |$token:ident| $function:ident($($argument:expr),* $(,)?)) => {
        if $parts == PAIR {
            for_tokens!($tokens, |$token| $function::<2>($($argument),*));
        } else {
            for_tokens!($tokens, |$token| $function::<1>($($argument),*));
        }
    };
    ($tokens:expr, |$token:ident| $function:ident::<$parts:literal>($($argument:expr),* $(,)?)) => {{
        let mut $token = 0;
        while $token < $tokens {
            match $tokens - $token {
                6 | 9.. => {
                    $function::<T, STEP, $parts>($($argument),*);
                    $token += STEP;
                }
                4 | 7 | 8 => {
                    $function::<T, 4, $parts>($($argument),*);
                    $token += 4;
                }
                3 | 5 => {
                    $function::<T, 3, $parts>($($argument),*);
                    $token += 3;
                }
                2 => {
                    $function::<T, 2, $parts>($($argument),*);
                    $token += 2;
                }
                _ => {
                    $function::<T, 1, $parts>($($argument),*);
                    $token += 1;
                }
            }
        }
    }};
}

/// All rows of a type with blocks of 256 times all tokens.
///
/// # Safety
///
/// The machine has the instructions of [`Isa::Avx512`](super::isa::Isa::Avx512); `rows` is as its fields say.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn super_rows<T: TurnSuper>(rows: &Rows<'_>) {
    let mut turned = [Turned::ZERO; PAIR];
    let mut values: Sums = [[[Line::ZERO; PAIR]; TOKENS]; BLOCKS];
    let mut lows: Sums = [[[Line::ZERO; PAIR]; TOKENS]; BLOCKS];
    let blocks = rows.columns / SUPER;
    for group in Group::all(rows) {
        for index in 0..blocks {
            for (part, turned) in turned.iter_mut().enumerate().take(group.parts) {
                let blocks_before = part * blocks + index;
                let ahead = group.ahead(blocks_before * LANES * T::BYTES);
                // SAFETY: blocks of whole rows.
                unsafe { turned.store::<T>(group.at(part, index * T::BYTES), ahead) };
            }
            let copy = |token: usize| {
                rows.copy(group.from + token)
                    .wrapping_add(index * Q8K_BYTES)
            };
            // SAFETY: copies of this many tokens, each with this block.
            unsafe {
                for_tokens!(group.tokens, group.parts, |token| multiply(
                    &turned,
                    copy,
                    (index, blocks),
                    &mut values,
                    &mut lows,
                    token,
                ));
            }
        }
        group.put(|token, part| {
            let value = last_sum(&values, token, part, blocks);
            if T::MINIMUMS {
                _mm512_sub_ps(value, last_sum(&lows, token, part, blocks))
            } else {
                value
            }
        });
    }
}

/// All rows of a type with blocks of 32 times all tokens.
///
/// # Safety
///
/// As in [`super_rows`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn small_rows<T: TurnSmall>(rows: &Rows<'_>) {
    let mut turned = [TurnedSmall::ZERO; PAIR];
    let mut sums: Sums = [[[Line::ZERO; PAIR]; TOKENS]; BLOCKS];
    let blocks = rows.columns / BLOCK;
    for group in Group::all(rows) {
        for index in 0..blocks {
            for (part, turned) in turned.iter_mut().enumerate().take(group.parts) {
                // SAFETY: blocks of whole rows.
                turned.store(&unsafe { T::turn(group.at(part, index * T::BYTES)) });
            }
            let copy = |token: usize| rows.copy(group.from + token);
            // SAFETY: copies of this many tokens, each with this block.
            unsafe {
                for_tokens!(group.tokens, group.parts, |token| multiply_small(
                    &turned,
                    copy,
                    (index, blocks),
                    &mut sums,
                    token,
                ));
            }
        }
        group.put(|token, part| last_sum(&sums, token, part, blocks));
    }
}

/// Rows and tokens processed together by a tile.
struct Group<'rows> {
    rows: &'rows Rows<'rows>,
    /// The first token, and the number of tokens.
    from: usize,
    tokens: usize,
    /// The first row of each register, and the number of rows.
    first: [usize; PAIR],
    parts: usize,
    starts: [Sixteen; PAIR],
}

impl<'rows> Group<'rows> {
    /// All groups; if fewer than sixteen rows are left, some are computed twice.
    fn all(rows: &'rows Rows<'rows>) -> impl Iterator<Item = Self> {
        let count = rows.weights.len() / rows.row_bytes.max(1);
        (0..rows.tokens).step_by(TOKENS).flat_map(move |from| {
            (0..count).step_by(PAIR * LANES).map(move |first| {
                let first = [first, first + LANES].map(|first| first.min(count - LANES));
                Self {
                    rows,
                    from,
                    tokens: TOKENS.min(rows.tokens - from),
                    first,
                    parts: if first[0] < first[1] { PAIR } else { 1 },
                    starts: first.map(|first| {
                        Sixteen::new(
                            rows.weights[first * rows.row_bytes..].as_ptr(),
                            rows.row_bytes,
                        )
                    }),
                }
            })
        })
    }

    /// Address of the byte at `place` after these rows.
    fn ahead(&self, place: usize) -> *const u8 {
        let all = self.first[self.parts - 1] + LANES;
        self.rows
            .weights
            .as_ptr()
            .wrapping_add(all * self.rows.row_bytes + place)
    }

    /// Addresses of the bytes at `place` in each row of a register.
    #[inline(always)]
    fn at(&self, part: usize, place: usize) -> Sixteen {
        self.starts[part].ahead(place)
    }

    /// Writes the products, given by `sum` per token and register.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn put(&self, sum: impl Fn(usize, usize) -> __m512) {
        for token in 0..self.tokens {
            for part in 0..self.parts {
                // SAFETY: sixteen numbers in both types.
                let lanes = unsafe { transmute::<__m512, [f32; LANES]>(sum(token, part)) };
                let first = self.first[part];
                self.rows
                    .put_lanes(self.from + token, first, first + LANES, lanes);
            }
        }
    }
}

/// One block of `G` times sixteen rows (its index, and the number of blocks per row), times `N` tokens from `token`.
///
/// # Safety
///
/// `copy` returns the Q8_K block of each of these tokens.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn multiply<T: TurnSuper, const N: usize, const G: usize>(
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
    // Not unrolled: the products then keep an order without stalls on each other.
    let (subs, groups) = (hint::black_box(SUPER / T::SUB), hint::black_box(T::SUB / 4));
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
    let (pairs, place) = pairs_of_sums::<T>(index, blocks);
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
            if T::MINIMUMS {
                let scale = _mm512_mul_ps(turned[part].min_scale.floats(), factor);
                lows[ahead][part].add_product(
                    _mm512_cvtepi32_ps(mins[ahead][part]),
                    scale,
                    index < BLOCKS,
                );
            } else {
                total = _mm512_sub_epi32(
                    total,
                    _mm512_sll_epi32(mins[ahead][part], _mm_cvtsi32_si128(T::LESS)),
                );
            }
            let scale = _mm512_mul_ps(turned[part].scale.floats(), factor);
            values[ahead][part].add_product(_mm512_cvtepi32_ps(total), scale, index < BLOCKS);
        }
    }
}

/// One block of `G` times sixteen rows (its index, and the number of blocks per row), times `N` tokens from `token`.
///
/// # Safety
///
/// `copy` returns the copy of each of these tokens.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn multiply_small<T: TurnSmall, const N: usize, const G: usize>(
    turned: &[TurnedSmall; PAIR],
    copy: impl Fn(usize) -> *const u8,
    (index, blocks): (usize, usize),
    sums: &mut Sums,
    token: usize,
) {
    let copies: [*const u8; N] = std::array::from_fn(|ahead| copy(token + ahead));
    let behind = blocks * Q8_0_BYTES + 4 * index;
    let mut parts = [[_mm512_setzero_si512(); G]; N];
    if !T::MINIMUM {
        for ahead in 0..N {
            // SAFETY: the blocks are followed by their factors, then by the correction for the offset of 128.
            parts[ahead] =
                [unsafe { everywhere(copies[ahead].wrapping_add(behind + 4 * blocks)) }; G];
        }
    }
    // As in `multiply`.
    for group in 0..hint::black_box(8usize) {
        let mut weights = [_mm512_setzero_si512(); G];
        for part in 0..G {
            // SAFETY: eight lines.
            weights[part] = unsafe { turned[part].quants.get_unchecked(group) }.load();
        }
        for ahead in 0..N {
            let at = index * Q8_0_BYTES + 2 + 4 * group;
            // SAFETY: the block's quants.
            let y = unsafe { everywhere(copies[ahead].wrapping_add(at)) };
            for part in 0..G {
                parts[ahead][part] = _mm512_dpbusd_epi32(parts[ahead][part], weights[part], y);
            }
        }
    }
    let sums = &mut sums[index % BLOCKS][token..token + N];
    for ahead in 0..N {
        // SAFETY: the block's factor, and -128 times its sum.
        let (factor, start) = unsafe {
            let behind = copies[ahead].wrapping_add(behind);
            (
                everywhere(behind),
                everywhere(behind.wrapping_add(4 * blocks)),
            )
        };
        let factor = _mm512_castsi512_ps(factor);
        for part in 0..G {
            let sum = &mut sums[ahead][part];
            let mut first = index < BLOCKS;
            if T::MINIMUM {
                let ys = _mm512_mul_ps(_mm512_cvtepi32_ps(start), _mm512_set1_ps(-1.0 / 128.0));
                sum.add_product(ys, _mm512_mul_ps(turned[part].min.floats(), factor), first);
                first = false;
            }
            let scale = _mm512_mul_ps(turned[part].scale.floats(), factor);
            sum.add_product(_mm512_cvtepi32_ps(parts[ahead][part]), scale, first);
        }
    }
}
