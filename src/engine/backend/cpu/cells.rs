//! Storage formats of the KV cache: store, load and convert.
//!
//! Elements form groups of 32 with a common scale, in the layouts of GGUF's `Q8_0` and `Q4_0`; a head whose length is
//! not a multiple of 32 ends in a shorter group. Given the scale, elements are converted independently, so the bits
//! depend neither on threads nor on instruction sets.

use super::{
    float::half_to_float,
    isa::{Isa, kernel},
    kernels::Kernels,
    pool::Pool,
};
use crate::{
    backend::{Convert, DeviceError},
    reserve::Reserve,
};
use cotenant_policy::kv_type::{KvType, SHARE_A_SCALE};

/// Stores one head's keys or values of one token, plus `bias` if present.
pub(super) fn store(
    isa: Isa,
    kind: KvType,
    source: &[f32],
    bias: Option<&[f32]>,
    target: &mut [u8],
) {
    match (kind, bias) {
        (KvType::F16, None) => {
            for (target, source) in target.chunks_exact_mut(2).zip(source) {
                target.copy_from_slice(&to_half(*source).to_ne_bytes());
            }
        }
        (KvType::F16, Some(bias)) => {
            for ((target, source), bias) in target.chunks_exact_mut(2).zip(source).zip(bias) {
                target.copy_from_slice(&to_half(*source + *bias).to_ne_bytes());
            }
        }
        (KvType::Q8 | KvType::Q4, bias) => {
            store_groups(isa, kind, source, bias.unwrap_or_default(), target);
        }
    }
}

/// Converts consecutive rows of `dim` elements to `f32`.
pub(super) fn widen(isa: Isa, kind: KvType, dim: usize, bytes: &[u8], floats: &mut [f32]) {
    match kind {
        KvType::F16 => widen_halves(isa, halves(bytes), floats),
        KvType::Q8 => widen_q8(isa, dim, bytes, floats),
        KvType::Q4 => widen_q4(isa, dim, bytes, floats),
    }
}

fn widen_halves(isa: Isa, halves: &[u16], floats: &mut [f32]) {
    match Kernels::of(isa).widen {
        // SAFETY: the set is only chosen where the machine has it.
        Some(widen) => unsafe { widen(halves, floats) },
        None => widen_plain(isa, halves, floats),
    }
}

/// The `f16` bits in a part of a block.
pub(super) fn halves(bytes: &[u8]) -> &[u16] {
    // SAFETY: every bit pattern is a `u16`; offsets in a block are even, so nothing is truncated.
    unsafe { bytes.align_to::<u16>() }.1
}

kernel! {
    /// See [`widen`].
    pub(crate) fn widen_plain(halves: &[u16], floats: &mut [f32]) {
        for (float, half) in floats.iter_mut().zip(halves) {
            *float = half_to_float(*half);
        }
    }

    /// See [`widen`].
    pub(crate) fn widen_q8(dim: usize, bytes: &[u8], floats: &mut [f32]) {
        let row = row_bytes(KvType::Q8, dim);
        for (bytes, floats) in bytes.chunks_exact(row).zip(floats.chunks_exact_mut(dim)) {
            for (bytes, floats) in bytes.chunks(2 + SHARE_A_SCALE).zip(floats.chunks_mut(SHARE_A_SCALE)) {
                read_q8(bytes, floats);
            }
        }
    }

    /// See [`widen`].
    pub(crate) fn widen_q4(dim: usize, bytes: &[u8], floats: &mut [f32]) {
        let row = row_bytes(KvType::Q4, dim);
        for (bytes, floats) in bytes.chunks_exact(row).zip(floats.chunks_exact_mut(dim)) {
            for (bytes, floats) in bytes.chunks(2 + SHARE_A_SCALE / 2).zip(floats.chunks_mut(SHARE_A_SCALE)) {
                read_q4(bytes, floats);
            }
        }
    }

    /// See [`store`].
    pub(crate) fn store_groups(kind: KvType, source: &[f32], bias: &[f32], target: &mut [u8]) {
        let step = group_bytes(kind, SHARE_A_SCALE);
        for (at, (source, target)) in source.chunks(SHARE_A_SCALE).zip(target.chunks_mut(step)).enumerate() {
            let mut group = [0f32; SHARE_A_SCALE];
            group[..source.len()].copy_from_slice(source);
            for (value, bias) in group.iter_mut().zip(bias.iter().skip(at * SHARE_A_SCALE)) {
                *value += *bias;
            }
            write_group(kind, &group, source.len(), target);
        }
    }
}

/// Converts rows in place: the new places begin where the old ones do.
///
/// Shrinking rows move towards the start, so the first is converted first; concurrently, as many as have new places
/// before the first old one still needed. Growing rows are converted in the opposite order.
pub(super) fn convert(
    pool: &mut Pool,
    isa: Isa,
    job: &Convert,
    space: &Reserve,
) -> Result<(), DeviceError> {
    let (from, to, dim) = (job.from, job.to, job.elements);
    let (old, new) = (row_bytes(from, dim), row_bytes(to, dim));
    let len = job.rows.saturating_mul(old.max(new));
    let Some(start) = space.range(0, len) else {
        return Err(DeviceError::new("what is converted of the cache is closed"));
    };
    let start = Address(start.as_ptr());
    let some = |first: usize, count: usize| {
        // SAFETY: `len` bytes from `start` are open, and one operation is executed at a time; rows of concurrent calls
        // do not overlap each other's places, as explained above.
        unsafe { convert_some(isa, (from, to), dim, start.at(), first, count) };
    };
    let mut run = |first: usize, end: usize| {
        let count = end - first;
        if count <= ROWS_PER_ITEM {
            some(first, count);
        } else {
            pool.run(count.div_ceil(ROWS_PER_ITEM), &|item| {
                let at = first + item * ROWS_PER_ITEM;
                some(at, ROWS_PER_ITEM.min(end - at));
            });
        }
    };
    if new <= old {
        let mut done = 0;
        while done < job.rows {
            // Memory before `done` rows of the old size is free; a single row is read before it is written.
            let end = (done * old / new).clamp(done + 1, job.rows);
            run(done, end);
            done = end;
        }
    } else {
        let mut left = job.rows;
        while left > 0 {
            let first = (left * old).div_ceil(new).min(left - 1);
            run(first, left);
            left = first;
        }
    }
    Ok(())
}

/// An address shared by threads.
#[derive(Clone, Copy)]
struct Address(*mut u8);

impl Address {
    const fn at(self) -> *mut u8 {
        self.0
    }
}

// SAFETY: each user states why places do not overlap.
unsafe impl Sync for Address {}

kernel! {
    /// Converts `count` rows from `first`, of `dim` elements each, in place. A row may overlap its own new place.
    pub(crate) fn convert_rows(kinds: (KvType, KvType), dim: usize, start: *mut u8, first: usize, count: usize) {
        let (from, to) = kinds;
        let (old, new) = (row_bytes(from, dim), row_bytes(to, dim));
        let groups = dim.div_ceil(SHARE_A_SCALE);
        for index in 0..count {
            let row = if new <= old { first + index } else { first + count - 1 - index };
            for at in 0..groups {
                let group = if new <= old { at } else { groups - 1 - at };
                let elements = SHARE_A_SCALE.min(dim - group * SHARE_A_SCALE);
                let (mut packed, mut wide): (_, Group) = ([0u8; 2 * SHARE_A_SCALE], [0.0; SHARE_A_SCALE]);
                let (had, has) = (group_bytes(from, elements), group_bytes(to, elements));
                let source = row * old + group * group_bytes(from, SHARE_A_SCALE);
                // SAFETY: inside the rows, as the caller of `convert_some` promises; the copy is on the stack.
                unsafe { std::ptr::copy_nonoverlapping(start.add(source), packed.as_mut_ptr(), had) };
                read_group(from, &packed[..had], &mut wide[..elements]);
                write_group(to, &wide, elements, &mut packed[..has]);
                let target = row * new + group * group_bytes(to, SHARE_A_SCALE);
                // SAFETY: as above.
                unsafe { std::ptr::copy_nonoverlapping(packed.as_ptr(), start.add(target), has) };
            }
        }
    }
}

/// # Safety
///
/// The named rows lie at `start`, and no other thread uses them or their new places.
unsafe fn convert_some(
    isa: Isa,
    kinds: (KvType, KvType),
    dim: usize,
    start: *mut u8,
    first: usize,
    count: usize,
) {
    convert_rows(isa, kinds, dim, start, first, count);
}

pub(super) fn row_bytes(kind: KvType, dim: usize) -> usize {
    let rest = dim % SHARE_A_SCALE;
    let whole = dim / SHARE_A_SCALE * group_bytes(kind, SHARE_A_SCALE);
    if rest == 0 {
        whole
    } else {
        whole + group_bytes(kind, rest)
    }
}

#[inline(always)]
fn group_bytes(kind: KvType, elements: usize) -> usize {
    match kind {
        KvType::F16 => 2 * elements,
        KvType::Q8 => 2 + elements,
        KvType::Q4 => 2 + elements.div_ceil(2),
    }
}

#[inline(always)]
fn read_group(kind: KvType, bytes: &[u8], floats: &mut [f32]) {
    match kind {
        KvType::F16 => {
            if let (Ok(bytes), Ok(floats)) = (
                <&[u8; 64]>::try_from(bytes),
                <&mut Group>::try_from(&mut *floats),
            ) {
                for at in 0..SHARE_A_SCALE {
                    floats[at] =
                        half_to_float(u16::from_ne_bytes([bytes[2 * at], bytes[2 * at + 1]]));
                }
                return;
            }
            for (float, bytes) in floats.iter_mut().zip(bytes.chunks_exact(2)) {
                *float = half_to_float(u16::from_ne_bytes([bytes[0], bytes[1]]));
            }
        }
        KvType::Q8 => read_q8(bytes, floats),
        KvType::Q4 => read_q4(bytes, floats),
    }
}

/// Writes the elements of a zero-padded group that `bytes` has room for.
#[inline(always)]
fn write_group(kind: KvType, floats: &Group, elements: usize, bytes: &mut [u8]) {
    match kind {
        KvType::F16 => {
            if let Ok(bytes) = <&mut [u8; 64]>::try_from(&mut *bytes) {
                for at in 0..SHARE_A_SCALE {
                    [bytes[2 * at], bytes[2 * at + 1]] = to_half(floats[at]).to_ne_bytes();
                }
                return;
            }
            for (bytes, float) in bytes.chunks_exact_mut(2).zip(floats) {
                bytes.copy_from_slice(&to_half(*float).to_ne_bytes());
            }
        }
        KvType::Q8 => write_q8(floats, bytes),
        KvType::Q4 => write_q4(floats, elements, bytes),
    }
}

/// Elements with a common scale. Whole groups have loops of constant length, which compile to a few instructions.
type Group = [f32; SHARE_A_SCALE];

#[inline(always)]
fn read_q8(bytes: &[u8], floats: &mut [f32]) {
    let scale = half_to_float(u16::from_ne_bytes([bytes[0], bytes[1]]));
    if let (Ok(bytes), Ok(floats)) = (
        <&[u8; 34]>::try_from(bytes),
        <&mut Group>::try_from(&mut *floats),
    ) {
        for at in 0..SHARE_A_SCALE {
            floats[at] = f32::from(bytes[2 + at].cast_signed()) * scale;
        }
        return;
    }
    for (float, byte) in floats.iter_mut().zip(&bytes[2..]) {
        *float = f32::from(byte.cast_signed()) * scale;
    }
}

#[inline(always)]
fn write_q8(floats: &Group, bytes: &mut [u8]) {
    let (least, most) = ends(floats);
    let inverse = write_scale(most.max(-least) / 127.0, bytes);
    let eight = |x: f32| nearest((x * inverse).clamp(-127.0, 127.0));
    if let Ok(bytes) = <&mut [u8; 34]>::try_from(&mut *bytes) {
        for at in 0..SHARE_A_SCALE {
            bytes[2 + at] = eight(floats[at]);
        }
        return;
    }
    for (byte, float) in bytes[2..].iter_mut().zip(floats) {
        *byte = eight(*float);
    }
}

#[inline(always)]
fn read_q4(bytes: &[u8], floats: &mut [f32]) {
    let scale = half_to_float(u16::from_ne_bytes([bytes[0], bytes[1]]));
    if let (Ok(bytes), Ok(floats)) = (
        <&[u8; 18]>::try_from(bytes),
        <&mut Group>::try_from(&mut *floats),
    ) {
        for at in 0..SHARE_A_SCALE / 2 {
            floats[at] = (f32::from(bytes[2 + at] & 15) - 8.0) * scale;
            floats[at + SHARE_A_SCALE / 2] = (f32::from(bytes[2 + at] >> 4) - 8.0) * scale;
        }
        return;
    }
    let half = floats.len().div_ceil(2);
    let (low, high) = floats.split_at_mut(half);
    for (float, byte) in low.iter_mut().zip(&bytes[2..]) {
        *float = (f32::from(byte & 15) - 8.0) * scale;
    }
    for (float, byte) in high.iter_mut().zip(&bytes[2..]) {
        *float = (f32::from(byte >> 4) - 8.0) * scale;
    }
}

#[inline(always)]
fn write_q4(floats: &Group, elements: usize, bytes: &mut [u8]) {
    // The value furthest from zero becomes -8 exactly, as in GGUF's quantiser.
    let (least, most) = ends(floats);
    let furthest = if most >= -least { most } else { least };
    let inverse = write_scale(furthest / -8.0, bytes);
    let four = |x: f32| nearest((x * inverse).clamp(-8.0, 7.0) + 8.0);
    if let Ok(bytes) = <&mut [u8; 18]>::try_from(&mut *bytes) {
        for at in 0..SHARE_A_SCALE / 2 {
            bytes[2 + at] = four(floats[at]) | (four(floats[at + SHARE_A_SCALE / 2]) << 4);
        }
        return;
    }
    let (low, high) = floats[..elements].split_at(elements.div_ceil(2));
    for (byte, float) in bytes[2..].iter_mut().zip(low) {
        *byte = four(*float);
    }
    for (byte, float) in bytes[2..].iter_mut().zip(high) {
        *byte |= four(*float) << 4;
    }
}

/// The least and greatest of a group and zero, ignoring NaN.
#[inline(always)]
fn ends(floats: &Group) -> (f32, f32) {
    const LANES: usize = SHARE_A_SCALE / 2;
    let (mut least, mut most) = ([0f32; LANES], [0f32; LANES]);
    for at in 0..LANES {
        for x in [floats[at], floats[at + LANES]] {
            least[at] = if x < least[at] { x } else { least[at] };
            most[at] = if x > most[at] { x } else { most[at] };
        }
    }
    let mut width = LANES / 2;
    while width > 0 {
        for at in 0..width {
            least[at] = least[at].min(least[at + width]);
            most[at] = most[at].max(most[at + width]);
        }
        width /= 2;
    }
    (least[0], most[0])
}

/// Writes a scale and returns the inverse of its stored value; zero for a zero scale.
#[inline(always)]
fn write_scale(scale: f32, bytes: &mut [u8]) -> f32 {
    let bits = to_half(scale);
    bytes[..2].copy_from_slice(&bits.to_ne_bytes());
    let scale = half_to_float(bits);
    if scale == 0.0 { 0.0 } else { 1.0 / scale }
}

/// The nearest integer, ties to even, in its low byte.
#[inline(always)]
fn nearest(x: f32) -> u8 {
    /// 1.5 · 2^23: adding it rounds to an integer in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let [low, ..] = (x + ROUND).to_bits().to_le_bytes();
    low
}

/// The nearest finite `f16`, ties to even; NaN stays NaN. Branch-free, so that it vectorises.
#[inline(always)]
pub(super) fn to_half(x: f32) -> u16 {
    /// 0.5: adding it to a value that becomes a subnormal `f16` leaves its bits at the end.
    const SUBNORMAL: u32 = 126 << 23;
    /// The least value that becomes a normal `f16`: 2^-14.
    const NORMAL: u32 = 113 << 23;
    let bits = x.clamp(-HALF_MAX, HALF_MAX).to_bits();
    let magnitude = bits & 0x7fff_ffff;
    let odd = (magnitude >> 13) & 1;
    let normal = magnitude.wrapping_sub(112 << 23).wrapping_add(0xfff + odd) >> 13;
    let small = (f32::from_bits(magnitude) + f32::from_bits(SUBNORMAL))
        .to_bits()
        .wrapping_sub(SUBNORMAL);
    let half = if magnitude < NORMAL { small } else { normal };
    let half = if magnitude > 0x7f80_0000 {
        0x7e00
    } else {
        half
    };
    let [low, high, ..] = (half | ((bits >> 16) & 0x8000)).to_le_bytes();
    u16::from_le_bytes([low, high])
}

/// The largest `f16`. The cache holds finite values only, so that a zero weight hides them.
const HALF_MAX: f32 = 65504.0;
/// Rows converted per item: some tens of KiB.
const ROWS_PER_ITEM: usize = 128;

#[cfg(test)]
mod tests {
    use candle_core::quantized::k_quants::{BlockQ4_0, BlockQ8_0, GgmlType};

    use super::{super::test_numbers, *};
    use crate::backend::memory::{Access, Owner};
    use cotenant_units::{Bytes, page};

    fn numbers(len: usize, seed: u32) -> Vec<f32> {
        let numbers = test_numbers::numbers(len, seed);
        numbers.into_iter().map(|x| x * 3.0).collect()
    }

    fn stored(isa: Isa, kind: KvType, dim: usize, source: &[f32]) -> Vec<u8> {
        let row = row_bytes(kind, dim);
        let mut bytes = vec![0xff; source.len() / dim * row];
        for (source, bytes) in source.chunks_exact(dim).zip(bytes.chunks_exact_mut(row)) {
            store(isa, kind, source, None, bytes);
        }
        bytes
    }

    fn read(isa: Isa, kind: KvType, dim: usize, bytes: &[u8]) -> Vec<f32> {
        let mut floats = vec![0.0; bytes.len() / row_bytes(kind, dim) * dim];
        widen(isa, kind, dim, bytes, &mut floats);
        floats
    }

    #[test]
    fn what_is_stored_comes_back_within_its_step_and_with_the_same_bits_on_any_set() {
        for dim in [8, 24, 64, 80, 96, 128, 256] {
            let source = numbers(5 * dim, 1);
            for (kind, steps) in [
                (KvType::F16, 2047.0),
                (KvType::Q8, 253.0),
                (KvType::Q4, 15.9),
            ] {
                assert_eq!(
                    row_bytes(kind, dim) as u64,
                    kind.row_bytes(u32::try_from(dim).unwrap())
                );
                let reference = stored(Isa::Baseline, kind, dim, &source);
                let floats = read(Isa::Baseline, kind, dim, &reference);
                for (group, back) in source
                    .chunks_exact(dim)
                    .zip(floats.chunks_exact(dim))
                    .flat_map(|(row, back)| {
                        row.chunks(SHARE_A_SCALE).zip(back.chunks(SHARE_A_SCALE))
                    })
                {
                    let largest = group.iter().fold(0f32, |most, x| most.max(x.abs()));
                    for (x, y) in group.iter().zip(back) {
                        // In q4, one end of the range has 7 steps and the other 8.
                        let step = largest / steps * if kind == KvType::Q4 { 2.0 } else { 1.02 };
                        assert!((x - y).abs() <= step, "{kind} {dim}: {x} {y} of {largest}");
                    }
                }
                for &isa in Isa::available() {
                    assert_eq!(
                        stored(isa, kind, dim, &source),
                        reference,
                        "{isa:?} {kind} {dim}"
                    );
                    assert_eq!(
                        read(isa, kind, dim, &reference),
                        floats,
                        "{isa:?} {kind} {dim}"
                    );
                }
            }
        }
    }

    #[test]
    fn halves_are_made_as_the_half_crate_makes_them() {
        let special = [
            0.0,
            -0.0,
            1.0,
            65504.0,
            65519.0,
            6.1e-5,
            6.0e-8,
            2.9e-8,
            2.98e-8,
            1e-30,
            f32::MIN_POSITIVE,
        ];
        let spread =
            (0u32..200_000).map(|at| f32::from_bits(at.wrapping_mul(21_503) % 0x4780_0000));
        for x in special.into_iter().chain(spread).flat_map(|x| [x, -x]) {
            let right = half::f16::from_f32(x.clamp(-HALF_MAX, HALF_MAX)).to_bits();
            assert_eq!(to_half(x), right, "{x}");
        }
        assert!(
            half::f16::from_bits(to_half(f32::NAN)).is_nan()
                && to_half(f32::INFINITY) == to_half(HALF_MAX)
        );
    }

    #[test]
    fn the_layouts_are_those_of_gguf() {
        let source = numbers(128, 3);
        let blocks = stored(Isa::detect(), KvType::Q8, 128, &source);
        let mut theirs = vec![0.0; 128];
        BlockQ8_0::to_float(super::super::matmul::cast(&blocks), &mut theirs);
        assert_eq!(read(Isa::detect(), KvType::Q8, 128, &blocks), theirs);
        let blocks = stored(Isa::detect(), KvType::Q4, 128, &source);
        BlockQ4_0::to_float(super::super::matmul::cast(&blocks), &mut theirs);
        assert_eq!(read(Isa::detect(), KvType::Q4, 128, &blocks), theirs);
    }

    #[test]
    fn what_is_too_large_too_small_or_no_number_stays_finite() {
        for kind in KvType::ALL {
            for value in [0.0, 1e-9, 1e9, -1e9, f32::INFINITY, f32::NAN] {
                if kind == KvType::F16 && value.is_nan() {
                    continue; // stays NaN, and is detected in the logits, like a NaN in a query
                }
                let mut source = numbers(64, 5);
                source[40] = value;
                let back = read(
                    Isa::detect(),
                    kind,
                    64,
                    &stored(Isa::detect(), kind, 64, &source),
                );
                assert!(
                    back.iter().all(|x| x.is_finite()),
                    "{kind} {value}: {back:?}"
                );
            }
        }
    }

    #[test]
    fn converting_in_place_is_reading_and_storing_again_for_any_number_of_rows_and_threads() {
        for dim in [24, 64, 80] {
            for rows in [1, 2, 3, 100, 1500] {
                let source = numbers(rows * dim, 7);
                for (from, to) in KvType::ALL
                    .into_iter()
                    .flat_map(|from| KvType::ALL.map(|to| (from, to)))
                {
                    let before = stored(Isa::detect(), from, dim, &source);
                    let expected = stored(
                        Isa::detect(),
                        to,
                        dim,
                        &read(Isa::detect(), from, dim, &before),
                    );
                    for threads in [1, 3] {
                        let mut space = Reserve::new(Bytes::from_mib(1), page()).unwrap();
                        space.set_open(Bytes::from_mib(1)).unwrap();
                        let mut owner = Owner::new();
                        let space = owner.region(space);
                        let start = space.range(0, 1 << 20).unwrap().as_ptr();
                        // SAFETY: open, and not shared with other threads.
                        unsafe {
                            std::ptr::copy_nonoverlapping(before.as_ptr(), start, before.len());
                        };
                        let mut pool = Pool::new(threads).unwrap();
                        let job = Convert {
                            space,
                            rows,
                            elements: dim,
                            from,
                            to,
                        };
                        let access = Access::new(&mut owner);
                        let space = access.region(&job.space).unwrap();
                        convert(&mut pool, Isa::detect(), &job, space).unwrap();
                        // SAFETY: as above.
                        let after = unsafe { std::slice::from_raw_parts(start, expected.len()) };
                        assert!(
                            after == expected,
                            "{from} to {to}, {rows} rows of {dim}, {threads} threads"
                        );
                    }
                }
            }
        }
    }
}
