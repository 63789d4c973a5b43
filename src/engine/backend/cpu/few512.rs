//! Products of quantised rows with a few tokens for AVX-512.
//!
//! As in [`super::tile`], sixteen rows are transposed, so that a lane of a register is a row and sums need no shuffles.
//! Here the quants of a block stay in registers: storing them would pay off for more tokens only. A token value
//! broadcast to all lanes is multiplied with as many rows as registers allow: the broadcast takes as long as a product
//! (Ice Lake).
//!
//! The order of every sum is that of [`avx512`](super::avx512), so that single tokens and groups yield the same bits.

use std::{arch::x86_64::*, hint, mem::transmute};

use super::{
    quant::{BLOCK, Q8_0_BYTES, Q8K_BYTES, SUPER},
    rows::Rows,
    rows256,
    set256::Avx512,
    tile,
    turned::{LANES, Sixteen, TurnSmall, TurnSuper, everywhere, pairs_of_sums, prefetch},
};

/// Independent partial sums over blocks.
const SUMS: usize = 4;

/// The sums of `G` times sixteen rows with `N` tokens.
type Sums<const N: usize, const G: usize> = [[[__m512; G]; N]; SUMS];

/// `G` times sixteen rows, and `N` tokens.
struct Job<'rows, const N: usize, const G: usize> {
    rows: &'rows Rows<'rows>,
    first: usize,
    token: usize,
    blocks: [Sixteen; G],
    copies: [*const u8; N],
    /// Prefetch address: the rows after them. Each is prefetched once.
    ahead: Option<*const u8>,
}

/// Calls a function for all rows, up to a given number of registers at a time, and for all tokens, up to a given number
/// at a time.
macro_rules! for_jobs {
    ($rows:expr, $most:literal, $tokens:literal, |$job:ident| $call:expr) => {{
        let rows: &Rows<'_> = $rows;
        let count = rows.weights.len() / rows.row_bytes.max(1);
        let mut first = 0;
        while first < count {
            if count - first >= $most * LANES {
                for_jobs!(rows, first, $most, $tokens, |$job| $call);
                first += $most * LANES;
            } else {
                // The last sixteen, which may overlap completed ones.
                let last = first.min(count - LANES);
                for_jobs!(rows, last, 1, $tokens, |$job| $call);
                first += LANES;
            }
        }
    }};
    ($rows:expr, $first:expr, $registers:literal, $tokens:literal, |$job:ident| $call:expr) => {{
        let mut token = 0;
        while token < $rows.tokens {
            token += match $rows.tokens - token {
                8.. if $tokens == 8 => for_jobs!($rows, $first, token, 8, $registers, |$job| $call),
                4.. => for_jobs!($rows, $first, token, 4, $registers, |$job| $call),
                3 => for_jobs!($rows, $first, token, 3, $registers, |$job| $call),
                2 => for_jobs!($rows, $first, token, 2, $registers, |$job| $call),
                _ => for_jobs!($rows, $first, token, 1, $registers, |$job| $call),
            };
        }
    }};
    ($rows:expr, $first:expr, $token:expr, $count:literal, $registers:literal, |$job:ident| $call:expr) => {{
        let $job = Job::<$count, $registers>::new($rows, $first, $token);
        $call;
        $count
    }};
}

impl<'rows, const N: usize, const G: usize> Job<'rows, N, G> {
    fn new(rows: &'rows Rows<'rows>, first: usize, token: usize) -> Self {
        let start = rows.weights[first * rows.row_bytes..].as_ptr();
        let sixteen = LANES * rows.row_bytes;
        Self {
            rows,
            first,
            token,
            blocks: std::array::from_fn(|part| {
                Sixteen::new(start.wrapping_add(part * sixteen), rows.row_bytes)
            }),
            copies: std::array::from_fn(|ahead| rows.copy(token + ahead)),
            ahead: (token == 0).then(|| start.wrapping_add(G * sixteen)),
        }
    }

    /// Advances by `bytes` in each row.
    #[inline]
    fn go_on(&mut self, bytes: usize) {
        for blocks in &mut self.blocks {
            *blocks = blocks.ahead(bytes);
        }
    }

    /// Prefetches a part of the next rows: `bytes` of each.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    fn prefetch(&mut self, bytes: usize) {
        if let Some(ahead) = &mut self.ahead {
            prefetch(*ahead, G * bytes);
            *ahead = ahead.wrapping_add(G * LANES * bytes);
        }
    }

    /// Writes the sums of a token.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    fn put(&self, token: usize, part: usize, sum: __m512) {
        // SAFETY: sixteen numbers in both types.
        let lanes = unsafe { transmute::<__m512, [f32; LANES]>(sum) };
        let first = self.first + part * LANES;
        self.rows
            .put_lanes(self.token + token, first, first + LANES, lanes);
    }
}

/// The four sums of a token, added pairwise by halves.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn last_sum<const N: usize, const G: usize>(
    sums: &Sums<N, G>,
    token: usize,
    part: usize,
) -> __m512 {
    let sum = |number: usize| sums[number][token][part];
    _mm512_add_ps(_mm512_add_ps(sum(0), sum(2)), _mm512_add_ps(sum(1), sum(3)))
}

/// All rows of a type with blocks of 32 times all tokens.
///
/// # Safety
///
/// The machine has the instructions of [`Isa::Avx512`](super::isa::Isa::Avx512); `rows` is as its fields say.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn small_rows<T: TurnSmall>(rows: &Rows<'_>) {
    // SAFETY: the caller's promise.
    unsafe {
        if rows.weights.len() / rows.row_bytes.max(1) < LANES || rows.tokens < T::TURNED_FROM {
            rows256::small_rows::<Avx512, T>(rows);
        } else if rows.tokens >= T::TILE512_FROM {
            tile::small_rows::<T>(rows);
        } else {
            for_jobs!(rows, 2, 8, |job| blocks_of_32::<T, _, _>(job));
        }
    }
}

/// # Safety
///
/// As in [`small_rows`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn blocks_of_32<T: TurnSmall, const N: usize, const G: usize>(mut job: Job<'_, N, G>) {
    let zero = _mm512_setzero_si512();
    let mut sums: Sums<N, G> = [[[_mm512_setzero_ps(); G]; N]; SUMS];
    let blocks = job.rows.columns / BLOCK;
    for index in 0..blocks {
        let (mut quants, mut scales) = ([[zero; 8]; G], [[_mm512_setzero_ps(); 2]; G]);
        for part in 0..G {
            // SAFETY: a block of each row.
            let block = unsafe { T::turn(job.blocks[part]) };
            (quants[part], scales[part]) = (block.quants, [block.scale, block.min]);
        }
        let behind = blocks * Q8_0_BYTES + 4 * index;
        let mut totals = [[zero; G]; N];
        // SAFETY: a block of each copy, followed after all blocks by their factors, then by -128 times their sums.
        unsafe {
            if !T::MINIMUM {
                for ahead in 0..N {
                    totals[ahead] =
                        [everywhere(job.copies[ahead].wrapping_add(behind + 4 * blocks)); G];
                }
            }
            for group in 0..8 {
                for ahead in 0..N {
                    let at = index * Q8_0_BYTES + 2 + 4 * group;
                    let y = everywhere(job.copies[ahead].wrapping_add(at));
                    for part in 0..G {
                        totals[ahead][part] =
                            _mm512_dpbusd_epi32(totals[ahead][part], quants[part][group], y);
                    }
                }
            }
        }
        for ahead in 0..N {
            let behind = job.copies[ahead].wrapping_add(behind);
            // SAFETY: as above.
            let (factor, start) = unsafe {
                (
                    everywhere(behind),
                    everywhere(behind.wrapping_add(4 * blocks)),
                )
            };
            let factor = _mm512_castsi512_ps(factor);
            for part in 0..G {
                let [scale, min] = scales[part];
                let sum = &mut sums[index % SUMS][ahead][part];
                if T::MINIMUM {
                    let ys = _mm512_mul_ps(_mm512_cvtepi32_ps(start), _mm512_set1_ps(-1.0 / 128.0));
                    *sum = _mm512_fmadd_ps(ys, _mm512_mul_ps(min, factor), *sum);
                }
                let total = _mm512_cvtepi32_ps(totals[ahead][part]);
                *sum = _mm512_fmadd_ps(total, _mm512_mul_ps(scale, factor), *sum);
            }
        }
        job.prefetch(T::BYTES);
        job.go_on(T::BYTES);
    }
    for ahead in 0..N {
        for part in 0..G {
            job.put(ahead, part, last_sum(&sums, ahead, part));
        }
    }
}

/// All rows of a type with blocks of 256 times all tokens.
///
/// # Safety
///
/// As in [`small_rows`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn super_rows<T: TurnSuper>(rows: &Rows<'_>) {
    // SAFETY: the caller's promise.
    unsafe {
        if rows.weights.len() / rows.row_bytes.max(1) < LANES || rows.tokens < T::TURNED_FROM {
            rows256::super_rows::<Avx512, T>(rows);
        } else if rows.tokens >= T::TILE512_FROM {
            tile::super_rows::<T>(rows);
        } else {
            for_jobs!(rows, 1, 4, |job| blocks_of_256::<T, _>(job));
        }
    }
}

/// # Safety
///
/// As in [`small_rows`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn blocks_of_256<T: TurnSuper, const N: usize>(mut job: Job<'_, N, 1>) {
    let zero = _mm512_setzero_si512();
    let mut sums: Sums<N, 1> = [[[_mm512_setzero_ps()]; N]; SUMS];
    let mut lows: Sums<N, 1> = [[[_mm512_setzero_ps()]; N]; SUMS];
    let blocks = job.rows.columns / SUPER;
    let (runs, subs_of_run) = (256 / 32 / T::CHUNKS, 32 / T::SUB);
    for index in 0..blocks {
        // SAFETY: a block of each row.
        let head = unsafe { T::head(job.blocks[0]) };
        let mut copies = job.copies;
        for copy in &mut copies {
            *copy = copy.wrapping_add(index * Q8K_BYTES);
        }
        let mut totals = [zero; N];
        // Not unrolled: that would exceed the instruction cache of a core.
        for chunk in 0..hint::black_box(T::CHUNKS) {
            let mut parts = [[zero; N]; 4];
            for step in 0..2 {
                job.prefetch(T::BYTES.div_ceil(2 * T::CHUNKS));
                // SAFETY: a block of each row.
                let quants = unsafe { T::quants(job.blocks[0], chunk, step) };
                for part in 0..runs {
                    let (run, half) = T::place(step, part);
                    let is_last = half + 1 >= 2 / subs_of_run;
                    // Of types with a scale for each half, no sum is kept: it stays in registers.
                    let mut sums = if subs_of_run == 2 {
                        [zero; N]
                    } else {
                        parts[run]
                    };
                    for group in 0..4 {
                        for ahead in 0..N {
                            let at = 4 + 32 * (runs * chunk + run) + 16 * half + 4 * group;
                            // SAFETY: as many quants of each token as a block has.
                            let y = unsafe { everywhere(copies[ahead].wrapping_add(at)) };
                            sums[ahead] = _mm512_dpbusd_epi32(sums[ahead], quants[part][group], y);
                        }
                    }
                    if is_last {
                        let sub = subs_of_run * (runs * chunk + run) + half * (subs_of_run - 1);
                        for ahead in 0..N {
                            let product = _mm512_mullo_epi32(sums[ahead], head.scales[sub]);
                            totals[ahead] = _mm512_add_epi32(totals[ahead], product);
                        }
                    } else {
                        parts[run] = sums;
                    }
                }
            }
        }
        let (pairs, place) = pairs_of_sums::<T>(index, blocks);
        for ahead in 0..N {
            let mut low = zero;
            for pair in 0..pairs {
                // SAFETY: the block's sums.
                let sums = unsafe { everywhere(copies[ahead].wrapping_add(place + 4 * pair)) };
                low = _mm512_dpwssd_epi32(low, head.mins[pair], sums);
            }
            // SAFETY: the block's factor.
            let factor = _mm512_castsi512_ps(unsafe { everywhere(copies[ahead]) });
            let mut total = totals[ahead];
            if T::MINIMUMS {
                let sum = &mut lows[index % SUMS][ahead][0];
                let scale = _mm512_mul_ps(head.min_scale, factor);
                *sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(low), scale, *sum);
            } else {
                total = _mm512_sub_epi32(total, _mm512_sll_epi32(low, _mm_cvtsi32_si128(T::LESS)));
            }
            let sum = &mut sums[index % SUMS][ahead][0];
            let scale = _mm512_mul_ps(head.scale, factor);
            *sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(total), scale, *sum);
        }
        job.go_on(T::BYTES);
    }
    for ahead in 0..N {
        let mut sum = last_sum(&sums, ahead, 0);
        if T::MINIMUMS {
            sum = _mm512_sub_ps(sum, last_sum(&lows, ahead, 0));
        }
        job.put(ahead, 0, sum);
    }
}
