//! Products with rows of `f32`, `f16` and `bf16`, in tiles of some rows by some tokens.
//!
//! Each product is summed in 32 lanes, which are added by halves, so that one token and many, and every set of instructions, yield
//! the same bits as the portable loop. So many lanes let one row be read at the speed of memory: fewer are one chain of sums, which
//! waits for itself, and several rows side by side are read more slowly than one stream. Up to four tokens meet one row at a time.
//! More of them meet tiles of four rows, whose registers hold a part of the lanes at a time; for many tokens a part of the rows is
//! widened once and stays in the first-level cache while the tokens go by.

use std::array::from_fn;

use super::{float, rows::Rows};

/// Lanes of a product's sum.
pub(super) const LANES: usize = float::LANES;

/// Rows of a tile.
const ROWS: usize = 4;

/// Columns that tokens go by at once: those of a tile's rows and of its tokens fit the first-level cache.
const COLUMNS: usize = 1024;

/// From how many tokens on rows of `bf16` are widened once for all: its conversion needs what sums need.
const WIDENED: usize = 12;

/// Tokens whose sums are kept meanwhile.
const TOKENS: usize = 128;

/// As they are.
pub(super) const F32: u8 = 0;
/// Half precision.
pub(super) const F16: u8 = 1;
/// The upper half of an `f32`.
pub(super) const BF16: u8 = 2;

/// The portable form: one row times one token.
#[inline(always)]
pub(super) fn dot<T: Copy>(weight: &[T], input: &[f32], widen: impl Fn(T) -> f32) -> f32 {
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

/// Makes the module of a set: its features; its register and the lanes of it; what it does with them; for up to four tokens how many
/// registers of a row's sum are summed at once; the tokens of a tile.
macro_rules! products {
    (
        $set:ident, $arch:ident, $features:literal, ($register:ty, $width:expr),
        ($zero:expr, $load:expr, $store:expr, $fma:expr, $half:expr, $brain:expr, $sum:expr, $four:expr, $ask:expr),
        ($one:expr, $two:expr, $three:expr, $together:expr), [$($few:literal)* | $tokens:literal $($whole:ident)::+] $(,)?
    ) => {
        pub(super) mod $set {
            use std::{arch::$arch::*, array::from_fn, mem::MaybeUninit};

            use crate::engine::backend::cpu::floats::{
                Aligned, BF16, COLUMNS, F16, F32, LANES, Next, ROWS, TOKENS, WIDENED, bytes_of, element, rest, token,
            };
            use crate::engine::backend::cpu::rows::Rows;

            /// Columns in a register.
            const WIDTH: usize = $width;
            /// Registers of a product's sum.
            const PARTS: usize = LANES / WIDTH;

            type Sum = [$register; PARTS];

            /// Sums of the products of a tile's rows with up to as many tokens as a tile has, by registers of a sum.
            type Sums = [[[$register; ROWS]; $tokens]; PARTS];

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
                        1 => few::<KIND, 1, { $one }>(rows),
                        2 => few::<KIND, 2, { $two }>(rows),
                        3 => few::<KIND, 3, { $three }>(rows),
                        4 => few::<KIND, 4, { $together }>(rows),
                        WIDENED.. if KIND == BF16 => many::<KIND, F32>(rows),
                        _ => many::<KIND, KIND>(rows),
                    }
                }
            }

            /// Rows of type `KIND` times all `N` tokens, one row at a time, with `P` registers of its sums at once.
            ///
            /// # Safety
            ///
            /// As for `rows`.
            #[target_feature(enable = $features)]
            unsafe fn few<const KIND: u8, const N: usize, const P: usize>(rows: &Rows<'_>) {
                let (count, width) = (rows.weights.len() / rows.row_bytes.max(1), rows.columns);
                let tokens: [_; N] = from_fn(|at| token::<KIND>(rows, at));
                for row in 0..count {
                    let weights = rows.weights[row * rows.row_bytes..].as_ptr();
                    let mut sums = [[$zero; PARTS]; N];
                    for first in (0..PARTS).step_by(P) {
                        let mut running = [[[$zero; 1]; N]; P];
                        // SAFETY: all columns of the row and of each token.
                        unsafe {
                            add::<KIND, N, 1, P>([weights], tokens, width, first, &mut running);
                        }
                        for part in 0..P {
                            for ahead in 0..N {
                                sums[ahead][first + part] = running[part][ahead][0];
                            }
                        }
                    }
                    for ahead in 0..N {
                        rows.put(ahead, row, $sum(&sums[ahead]));
                    }
                }
            }

            /// Adds the products of `R` rows of type `KIND` with `N` tokens in `P` registers of their sums, from register `first` on.
            ///
            /// # Safety
            ///
            /// There are `width` columns of each row and each token.
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn add<const KIND: u8, const N: usize, const R: usize, const P: usize>(
                weights: [*const u8; R],
                tokens: [*const f32; N],
                width: usize,
                first: usize,
                sums: &mut [[[$register; R]; N]; P],
            ) {
                // By index: arrays made by functions were written to memory and copied.
                let (mut xs, mut ys) = (weights, tokens);
                for at in 0..R {
                    xs[at] = xs[at].wrapping_add(first * WIDTH * bytes_of(KIND));
                }
                for ahead in 0..N {
                    ys[ahead] = ys[ahead].wrapping_add(first * WIDTH);
                }
                let mut offset = 0usize;
                for _ in 0..width / LANES {
                    for part in 0..P {
                        let place = offset.wrapping_add(part * WIDTH);
                        let mut y = [$zero; N];
                        for ahead in 0..N {
                            // SAFETY: a register of the columns that each token has.
                            y[ahead] = unsafe { $load(ys[ahead].wrapping_add(place)) };
                        }
                        for at in 0..R {
                            // SAFETY: of the columns that each row has.
                            let x = unsafe { register::<KIND>(xs[at].wrapping_add(place.wrapping_mul(bytes_of(KIND)))) };
                            for ahead in 0..N {
                                sums[part][ahead][at] = $fma(sums[part][ahead][at], x, y[ahead]);
                            }
                        }
                    }
                    offset = offset.wrapping_add(LANES);
                }
                let (whole, left) = (width - width % LANES, width % LANES);
                if left == 0 {
                    return;
                }
                for at in 0..R {
                    // SAFETY: columns of a row.
                    let xs = rest(left, |column| unsafe { element::<KIND>(weights[at], whole + column) });
                    for ahead in 0..N {
                        // SAFETY: columns of a token.
                        let ys = rest(left, |column| unsafe { *tokens[ahead].add(whole + column) });
                        for part in 0..P {
                            let place = (first + part) * WIDTH;
                            // SAFETY: a register of the lanes.
                            let (x, y) = unsafe { ($load(xs.as_ptr().add(place)), $load(ys.as_ptr().add(place))) };
                            sums[part][ahead][at] = $fma(sums[part][ahead][at], x, y);
                        }
                    }
                }
            }

            /// Rows of type `KIND` times any number of tokens, in tiles, as they lie or first widened to type `TILE`.
            ///
            /// # Safety
            ///
            /// As for `rows`.
            #[target_feature(enable = $features)]
            unsafe fn many<const KIND: u8, const TILE: u8>(rows: &Rows<'_>) {
                // They are set where they are used.
                let (mut wide, mut sums) = (MaybeUninit::<Aligned>::uninit(), MaybeUninit::<[Sums; TOKENS]>::uninit());
                // SAFETY: a field of a value that is there.
                let wide: *mut f32 = unsafe { &raw mut (*wide.as_mut_ptr()).0 }.cast();
                let sums: *mut Sums = sums.as_mut_ptr().cast();
                let (count, all) = (rows.weights.len() / rows.row_bytes.max(1), rows.columns);
                for (from, first) in (0..rows.tokens)
                    .step_by(TOKENS)
                    .flat_map(|from| (0..count).step_by(ROWS).map(move |first| (from, first)))
                {
                    let here = TOKENS.min(rows.tokens - from);
                    for start in (0..all).step_by(COLUMNS) {
                        let width = COLUMNS.min(all - start);
                        let (begins, ends, left) = (start == 0, start + width == all, width % LANES);
                        // The last row stands in for those that are not there.
                        let mut weights: [*const u8; ROWS] = from_fn(|at| {
                            let row = &rows.weights[(first + at).min(count - 1) * rows.row_bytes..];
                            row.as_ptr().wrapping_add(start * bytes_of(KIND))
                        });
                        if const { KIND != TILE } {
                            for at in 0..ROWS {
                                let to = wide.wrapping_add(at * COLUMNS);
                                // SAFETY: so many columns of a row, and their place.
                                unsafe { widen::<KIND>(weights[at], width, to) };
                                weights[at] = to.cast();
                            }
                        }
                        let mut next = Next::new::<KIND>(rows, first, start, here.div_ceil($tokens));
                        let (mut at, mut sums) = (0, sums);
                        while at < here {
                            let step = (here - at).div_ceil((here - at).div_ceil($tokens));
                            next.prefetch(|line| $ask(line));
                            let token = |ahead: usize| {
                                token::<KIND>(rows, from + at + ahead.min(step - 1)).wrapping_add(start)
                            };
                            // SAFETY: so many columns of each row and each token, and their sums so far.
                            unsafe {
                                match step {
                                    $($few => tile_of::<TILE, $few>(weights, from_fn(token), width, sums.cast(), begins),)*
                                    _ => $($whole)::+::<TILE, $tokens>(weights, from_fn(token), width, sums.cast(), begins),
                                }
                                if left > 0 {
                                    let tokens: [_; $tokens] = from_fn(token);
                                    tail::<TILE>(weights, &tokens[..step], (width - left, left), sums);
                                }
                                if ends {
                                    for ahead in 0..step {
                                        let mut four = [[$zero; PARTS]; ROWS];
                                        for row in 0..ROWS {
                                            for part in 0..PARTS {
                                                four[row][part] = (*sums)[part][ahead][row];
                                            }
                                        }
                                        rows.put_rows(from + at + ahead, first, count, $four(four));
                                    }
                                }
                            }
                            sums = sums.wrapping_add(1);
                            at += step;
                        }
                    }
                }
            }

            /// Adds the products of a tile's rows with `N` tokens to their sums, or sets these when they begin.
            ///
            /// # Safety
            ///
            /// There are `width` columns of each row and each token, and `sums`.
            #[target_feature(enable = $features)]
            unsafe fn tile_of<const KIND: u8, const N: usize>(
                weights: [*const u8; ROWS],
                tokens: [*const f32; N],
                width: usize,
                sums: *mut $register,
                begins: bool,
            ) {
                // By index: arrays made by functions were written to memory and copied.
                for part in 0..PARTS {
                    let sums: *mut [$register; ROWS] = sums.wrapping_add(part * $tokens * ROWS).cast();
                    let mut running = [[$zero; ROWS]; N];
                    if !begins {
                        for ahead in 0..N {
                            for at in 0..ROWS {
                                // SAFETY: the caller's promise.
                                running[ahead][at] = unsafe { (*sums.wrapping_add(ahead))[at] };
                            }
                        }
                    }
                    let mut offset = part * WIDTH;
                    for _ in 0..width / LANES {
                        let mut ys = [$zero; N];
                        for ahead in 0..N {
                            // SAFETY: a register of the columns that each token has.
                            ys[ahead] = unsafe { $load(tokens[ahead].wrapping_add(offset)) };
                        }
                        for at in 0..ROWS {
                            // SAFETY: of the columns that each row has.
                            let x = unsafe { register::<KIND>(weights[at].wrapping_add(offset.wrapping_mul(bytes_of(KIND)))) };
                            for ahead in 0..N {
                                running[ahead][at] = $fma(running[ahead][at], x, ys[ahead]);
                            }
                        }
                        offset = offset.wrapping_add(LANES);
                    }
                    for ahead in 0..N {
                        for at in 0..ROWS {
                            // SAFETY: the caller's promise.
                            unsafe { (*sums.wrapping_add(ahead))[at] = running[ahead][at] };
                        }
                    }
                }
            }

            /// Adds the products of the last columns, fewer than lanes, behind `width` others.
            ///
            /// # Safety
            ///
            /// There are `left` columns there of each row and each token, and `sums`.
            #[cold]
            #[target_feature(enable = $features)]
            unsafe fn tail<const KIND: u8>(
                weights: [*const u8; ROWS],
                tokens: &[*const f32],
                (whole, left): (usize, usize),
                sums: *mut Sums,
            ) {
                for at in 0..ROWS {
                    // SAFETY: columns of a row.
                    let xs = rest(left, |column| unsafe { element::<KIND>(weights[at], whole + column) });
                    for (ahead, token) in tokens.iter().enumerate() {
                        // SAFETY: columns of a token.
                        let ys = rest(left, |column| unsafe { *token.add(whole + column) });
                        for part in 0..PARTS {
                            // SAFETY: a register of the lanes, and a sum.
                            unsafe {
                                let (x, y) = ($load(xs.as_ptr().add(part * WIDTH)), $load(ys.as_ptr().add(part * WIDTH)));
                                let sum = &mut (*sums)[part][ahead][at];
                                *sum = $fma(*sum, x, y);
                            }
                        }
                    }
                }
            }

            /// Widens `width` columns.
            ///
            /// # Safety
            ///
            /// There are these columns at `from`, and place for them at `to`.
            #[target_feature(enable = $features)]
            unsafe fn widen<const KIND: u8>(from: *const u8, width: usize, to: *mut f32) {
                let (mut at, mut out) = (from, to);
                for _ in 0..width / WIDTH {
                    // SAFETY: a register of columns, and its place.
                    unsafe { $store(out, register::<KIND>(at)) };
                    (at, out) = (at.wrapping_add(WIDTH * bytes_of(KIND)), out.wrapping_add(WIDTH));
                }
                for column in width - width % WIDTH..width {
                    // SAFETY: columns that are there.
                    unsafe { to.add(column).write(element::<KIND>(from, column)) };
                }
            }

            /// A register of columns.
            ///
            /// # Safety
            ///
            /// There are so many columns at `from`.
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn register<const KIND: u8>(from: *const u8) -> $register {
                // SAFETY: the caller's promise.
                unsafe {
                    match KIND {
                        F16 => $half(from.cast::<u16>()),
                        BF16 => $brain(from.cast::<u16>()),
                        _ => $load(from.cast::<f32>()),
                    }
                }
            }
        }
    };
}

/// The columns of a token that rows of type `KIND` are multiplied with.
fn token<const KIND: u8>(rows: &Rows<'_>, token: usize) -> *const f32 {
    match KIND {
        F32 => rows.floats[token * rows.columns..].as_ptr(),
        _ => rows.copy(token).cast(),
    }
}

/// The last `count` columns, fewer than lanes, and zeros behind them.
fn rest(count: usize, column: impl Fn(usize) -> f32) -> [f32; LANES] {
    from_fn(|at| if at < count { column(at) } else { 0.0 })
}

/// Widened rows, so that no register of them lies in two lines of the cache.
#[repr(align(64))]
struct Aligned([f32; ROWS * COLUMNS]);

/// Prefetches the pieces of rows that come next: the machine does not see short pieces of rows as one stream.
struct Next {
    at: *const u8,
    /// Lines of a row's piece, and those that are left of this one.
    lines: usize,
    left: usize,
    /// From the end of a piece to the next one.
    gap: usize,
    /// Lines at a time.
    each: usize,
}

impl Next {
    /// What comes after the columns from `start` on of the rows from `first` on, in so many `times`.
    fn new<const KIND: u8>(rows: &Rows<'_>, first: usize, start: usize, times: usize) -> Self {
        let (row, start) = if start + COLUMNS < rows.columns { (first, start + COLUMNS) } else { (first + ROWS, 0) };
        let lines = COLUMNS.min(rows.columns - start) * bytes_of(KIND) / 64;
        Self {
            at: rows.weights.as_ptr().wrapping_add(row * rows.row_bytes + start * bytes_of(KIND)),
            lines,
            left: lines,
            gap: rows.row_bytes - 64 * lines,
            each: (ROWS * lines).div_ceil(times),
        }
    }

    #[inline(always)]
    fn prefetch(&mut self, ask: impl Fn(*const u8)) {
        for _ in 0..self.each {
            ask(self.at);
            self.at = self.at.wrapping_add(64);
            self.left -= 1;
            if self.left == 0 {
                (self.at, self.left) = (self.at.wrapping_add(self.gap), self.lines);
            }
        }
    }
}

/// Bytes of one number.
const fn bytes_of(kind: u8) -> usize {
    if kind == F32 { 4 } else { 2 }
}

/// One number.
///
/// # Safety
///
/// There is such a column at `from`.
#[inline(always)]
unsafe fn element<const KIND: u8>(from: *const u8, column: usize) -> f32 {
    // SAFETY: the caller's promise.
    unsafe {
        match KIND {
            F16 => float::half_to_float(from.cast::<u16>().add(column).read_unaligned()),
            BF16 => f32::from_bits(u32::from(from.cast::<u16>().add(column).read_unaligned()) << 16),
            _ => from.cast::<f32>().add(column).read_unaligned(),
        }
    }
}

/// For each lane the half of a `bf16` number: of the lower four in the lower half of a register, of the others in the upper one.
#[cfg(target_arch = "x86_64")]
#[rustfmt::skip]
static HALVES: [i8; 32] = [
    -1, -1, 0, 1, -1, -1, 2, 3, -1, -1, 4, 5, -1, -1, 6, 7,
    -1, -1, 8, 9, -1, -1, 10, 11, -1, -1, 12, 13, -1, -1, 14, 15,
];

/// As `tile_of`, of three tokens with AVX2. Twelve sums, three tokens and a row are all sixteen registers, for which the compiler
/// writes twice as many moves as products.
///
/// # Safety
///
/// As there; the machine has AVX2, FMA and F16C.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn tile_avx2<const KIND: u8, const N: usize>(
    weights: [*const u8; ROWS],
    tokens: [*const f32; 3],
    width: usize,
    sums: *mut std::arch::x86_64::__m256,
    begins: bool,
) {
    use std::arch::{asm, x86_64::_mm256_setzero_ps};
    macro_rules! add {
        ($sums:ident, $at:ident, $end:ident, $token:literal, $step:literal, $load:literal $(, $then:literal)?) => {
            asm!(
                "2:",
                concat!("vmovups {y0}, [{t0} + {at} * ", $token, "]"),
                concat!("vmovups {y1}, [{t1} + {at} * ", $token, "]"),
                concat!("vmovups {y2}, [{t2} + {at} * ", $token, "]"),
                concat!($load, " {x}, [{w0} + {at}]"),
                $($then,)?
                "vfmadd231ps {s0}, {x}, {y0}",
                "vfmadd231ps {s4}, {x}, {y1}",
                "vfmadd231ps {s8}, {x}, {y2}",
                concat!($load, " {x}, [{w1} + {at}]"),
                $($then,)?
                "vfmadd231ps {s1}, {x}, {y0}",
                "vfmadd231ps {s5}, {x}, {y1}",
                "vfmadd231ps {s9}, {x}, {y2}",
                concat!($load, " {x}, [{w2} + {at}]"),
                $($then,)?
                "vfmadd231ps {s2}, {x}, {y0}",
                "vfmadd231ps {s6}, {x}, {y1}",
                "vfmadd231ps {s10}, {x}, {y2}",
                concat!($load, " {x}, [{w3} + {at}]"),
                $($then,)?
                "vfmadd231ps {s3}, {x}, {y0}",
                "vfmadd231ps {s7}, {x}, {y1}",
                "vfmadd231ps {s11}, {x}, {y2}",
                concat!("add {at}, ", $step),
                "cmp {at}, {end} /* {halves} */",
                "jb 2b",
                at = inout(reg) $at => _,
                end = in(reg) $end,
                w0 = in(reg) weights[0], w1 = in(reg) weights[1], w2 = in(reg) weights[2], w3 = in(reg) weights[3],
                t0 = in(reg) tokens[0], t1 = in(reg) tokens[1], t2 = in(reg) tokens[2],
                halves = in(reg) HALVES.as_ptr(),
                s0 = inout(ymm_reg) $sums[0], s1 = inout(ymm_reg) $sums[1], s2 = inout(ymm_reg) $sums[2],
                s3 = inout(ymm_reg) $sums[3], s4 = inout(ymm_reg) $sums[4], s5 = inout(ymm_reg) $sums[5],
                s6 = inout(ymm_reg) $sums[6], s7 = inout(ymm_reg) $sums[7], s8 = inout(ymm_reg) $sums[8],
                s9 = inout(ymm_reg) $sums[9], s10 = inout(ymm_reg) $sums[10], s11 = inout(ymm_reg) $sums[11],
                y0 = out(ymm_reg) _, y1 = out(ymm_reg) _, y2 = out(ymm_reg) _, x = out(ymm_reg) _,
                options(readonly, nostack),
            )
        };
    }
    let bytes = const { bytes_of(KIND) };
    for part in 0..LANES / 8 {
        let place: *mut [_; 12] = sums.wrapping_add(12 * part).cast();
        // SAFETY: the caller's promise.
        let mut sums = if begins { [_mm256_setzero_ps(); 12] } else { unsafe { *place } };
        let (at, end) = (part * 8 * bytes, (part * 8 + width / LANES * LANES) * bytes);
        if width >= LANES {
            // SAFETY: columns that each row and each token has.
            unsafe {
                match KIND {
                    F16 => add!(sums, at, end, "2", "64", "vcvtph2ps"),
                    BF16 => add!(sums, at, end, "2", "64", "vbroadcasti128", "vpshufb {x}, {x}, [{halves}]"),
                    _ => add!(sums, at, end, "1", "128", "vmovups"),
                }
            }
        }
        // SAFETY: the caller's promise.
        unsafe { *place = sums };
    }
}

#[cfg(target_arch = "x86_64")]
products!(
    avx2,
    x86_64,
    "avx2,fma,f16c",
    (__m256, 8),
    (
        _mm256_setzero_ps(),
        |from: *const f32| _mm256_loadu_ps(from),
        |to: *mut f32, value| _mm256_storeu_ps(to, value),
        |sum, x, y| _mm256_fmadd_ps(x, y, sum),
        |from: *const u16| _mm256_cvtph_ps(_mm_loadu_si128(from.cast())),
        |from: *const u16| {
            // One instruction for the upper halves of eight numbers; widening and shifting are two.
            let halves = _mm256_loadu_si256(crate::engine::backend::cpu::floats::HALVES.as_ptr().cast());
            let both = _mm256_broadcastsi128_si256(_mm_loadu_si128(from.cast()));
            _mm256_castsi256_ps(_mm256_shuffle_epi8(both, halves))
        },
        |sum: &Sum| {
            let sixteen = (_mm256_add_ps(sum[0], sum[2]), _mm256_add_ps(sum[1], sum[3]));
            crate::engine::backend::cpu::rows256::total(_mm256_add_ps(sixteen.0, sixteen.1))
        },
        |four: [Sum; ROWS]| {
            let eight = |sum: Sum| _mm256_add_ps(_mm256_add_ps(sum[0], sum[2]), _mm256_add_ps(sum[1], sum[3]));
            crate::engine::backend::cpu::rows256::totals(four.map(eight))
        },
        |line: *const u8| _mm_prefetch::<_MM_HINT_T1>(line.cast())
    ),
    (4, 4, 4, 2),
    [1 2 | 3 super::tile_avx2],
);

#[cfg(target_arch = "x86_64")]
products!(
    avx512,
    x86_64,
    "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c",
    (__m512, 16),
    (
        _mm512_setzero_ps(),
        |from: *const f32| _mm512_loadu_ps(from),
        |to: *mut f32, value| _mm512_storeu_ps(to, value),
        |sum, x, y| _mm512_fmadd_ps(x, y, sum),
        |from: *const u16| _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())),
        |from: *const u16| {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        },
        |sum: &Sum| {
            let sum = _mm512_add_ps(sum[0], sum[1]);
            let eight = _mm256_add_ps(_mm512_castps512_ps256(sum), _mm512_extractf32x8_ps::<1>(sum));
            crate::engine::backend::cpu::rows256::total(eight)
        },
        |four: [Sum; ROWS]| {
            let eight = |sum: Sum| {
                let sum = _mm512_add_ps(sum[0], sum[1]);
                _mm256_add_ps(_mm512_castps512_ps256(sum), _mm512_extractf32x8_ps::<1>(sum))
            };
            crate::engine::backend::cpu::rows256::totals(four.map(eight))
        },
        |line: *const u8| _mm_prefetch::<_MM_HINT_T1>(line.cast())
    ),
    (2, 2, 2, 2),
    [1 2 3 4 5 | 6 tile_of],
);

#[cfg(target_arch = "aarch64")]
products!(
    neon,
    aarch64,
    "neon",
    (float32x4_t, 4),
    (
        vdupq_n_f32(0.0),
        |from: *const f32| vld1q_f32(from),
        |to: *mut f32, value| vst1q_f32(to, value),
        |sum, x, y| vfmaq_f32(sum, x, y),
        |from: *const u16| crate::engine::backend::cpu::neon_unpack::widened(vld1_u16(from)),
        |from: *const u16| vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(from))),
        |sum: &Sum| {
            let pair = |at: usize| vaddq_f32(vaddq_f32(sum[at], sum[at + 4]), vaddq_f32(sum[at + 2], sum[at + 6]));
            let four = vaddq_f32(pair(0), pair(1));
            let two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
            vget_lane_f32::<0>(two) + vget_lane_f32::<1>(two)
        },
        |four: [Sum; ROWS]| {
            four.map(|sum| {
                let pair = |at: usize| vaddq_f32(vaddq_f32(sum[at], sum[at + 4]), vaddq_f32(sum[at + 2], sum[at + 6]));
                let four = vaddq_f32(pair(0), pair(1));
                let two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
                vget_lane_f32::<0>(two) + vget_lane_f32::<1>(two)
            })
        },
        |_line: *const u8| ()
    ),
    (8, 8, 8, 4),
    [1 2 | 3 tile_of],
);
