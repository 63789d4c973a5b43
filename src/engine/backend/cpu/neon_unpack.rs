//! Unpacked blocks of quants for arm64.
//!
//! They serve products with one token ([`neon`](super::neon)) and with many ([`neon_tile`](super::neon_tile)).

use std::arch::{aarch64::*, asm};

use super::{
    rows::six_bit_head,
    table::{E2M1, IQ4, LEAST_POWER, Table},
};

/// A block of each of four rows.
pub(super) type Four = [*const u8; 4];

/// Independent sums over blocks of 32: a single one would stall on its own latency.
pub(super) const SUMS: usize = 4;

/// After a copy's blocks and their factors lies -128 times each block's sum.
pub(super) const PER_START: f32 = -1.0 / 128.0;

/// Quants of half a block of 256 in runs of 32, two registers each.
type Half = [[int8x16_t; 2]; 4];

/// # Safety
///
/// `block` is a Q4_K block.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn half_q4k(block: *const u8, half: usize) -> Half {
    // SAFETY: 128 bytes of quants follow the 16 of the head.
    let (first, last) = unsafe {
        (
            pair(block.add(16 + 64 * half)),
            pair(block.add(48 + 64 * half)),
        )
    };
    [
        signed(low(first)),
        signed(high(first)),
        signed(low(last)),
        signed(high(last)),
    ]
}

/// # Safety
///
/// `block` is a Q5_K block.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn half_q5k(block: *const u8, half: usize) -> Half {
    // SAFETY: 32 bytes of fifth bits follow the 16 of the head, and then 128 bytes of quants.
    let (fifth, first, last) = unsafe {
        (
            pair(block.add(16)),
            pair(block.add(48 + 64 * half)),
            pair(block.add(80 + 64 * half)),
        )
    };
    let with = |four: [uint8x16_t; 2], run: usize| join_bit(four, fifth, 4 * half + run, 4);
    [
        with(low(first), 0),
        with(high(first), 1),
        with(low(last), 2),
        with(high(last), 3),
    ]
}

/// Half of a Q6_K block, offset by 32, so from 0 to 63.
///
/// # Safety
///
/// `block` is a Q6_K block.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn half_q6k(block: *const u8, half: usize) -> Half {
    let (low, two) = (vdupq_n_u8(15), vdupq_n_u8(0b11_0000));
    // SAFETY: 128 bytes of low bits, then 64 of high bits.
    let (top, first, last) = unsafe {
        (
            pair(block.add(128 + 32 * half)),
            pair(block.add(64 * half)),
            pair(block.add(64 * half + 32)),
        )
    };
    let mut quants = [[vdupq_n_s8(0); 2]; 4];
    for part in 0..2 {
        let top = top[part];
        let runs = [
            select(low, first[part], vandq_u8(vshlq_n_u8::<4>(top), two)),
            select(low, last[part], vandq_u8(vshlq_n_u8::<2>(top), two)),
            shift_in(vandq_u8(top, two), first[part]),
            shift_in(vandq_u8(vshrq_n_u8::<2>(top), two), last[part]),
        ];
        for run in 0..4 {
            quants[run][part] = vreinterpretq_s8_u8(runs[run]);
        }
    }
    quants
}

/// `quants` where `mask` is set, else `others`. The compiler translates the intrinsic to three instructions.
#[inline]
#[target_feature(enable = "neon")]
fn select(mask: uint8x16_t, quants: uint8x16_t, mut others: uint8x16_t) -> uint8x16_t {
    // SAFETY: one instruction of every machine of the target, on registers only.
    unsafe {
        asm!(
            "bit {others:v}.16b, {quants:v}.16b, {mask:v}.16b",
            others = inout(vreg) others,
            quants = in(vreg) quants,
            mask = in(vreg) mask,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    others
}

/// Inserts the upper half of each byte of `quants` as the lower half of `bits`; as above.
#[inline]
#[target_feature(enable = "neon")]
fn shift_in(mut bits: uint8x16_t, quants: uint8x16_t) -> uint8x16_t {
    // SAFETY: as above.
    unsafe {
        asm!(
            "sri {bits:v}.16b, {quants:v}.16b, #4",
            bits = inout(vreg) bits,
            quants = in(vreg) quants,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    bits
}

/// # Safety
///
/// `block` is a Q2_K block.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn half_q2k(block: *const u8, half: usize) -> Half {
    // SAFETY: 64 bytes of quants follow the 16 of the head.
    let runs = unsafe { two_bits(block.add(16 + 32 * half)) };
    [
        signed(runs[0]),
        signed(runs[1]),
        signed(runs[2]),
        signed(runs[3]),
    ]
}

/// Half of a Q3_K block, offset by 4, so from 0 to 7.
///
/// # Safety
///
/// `block` is a Q3_K block.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn half_q3k(block: *const u8, half: usize) -> Half {
    // SAFETY: 32 bytes of third bits, then 64 of quants.
    let (third, runs) = unsafe { (pair(block), two_bits(block.add(32 + 32 * half))) };
    let with = |run: usize| join_bit(runs[run], third, 4 * half + run, 2);
    [with(0), with(1), with(2), with(3)]
}

/// 128 numbers of two bits.
///
/// # Safety
///
/// There are 32 bytes at `from`.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn two_bits(from: *const u8) -> [[uint8x16_t; 2]; 4] {
    // SAFETY: the caller's promise.
    let four = unsafe { pair(from) };
    let lowest = |bits: uint8x16_t| vandq_u8(bits, vdupq_n_u8(3));
    [
        four.map(|bits| lowest(bits)),
        four.map(|bits| lowest(vshrq_n_u8::<2>(bits))),
        four.map(|bits| lowest(vshrq_n_u8::<4>(bits))),
        four.map(|bits| vshrq_n_u8::<6>(bits)),
    ]
}

/// Sets bit `to`, which is clear, to bit `from` of each byte of `bits`.
#[inline]
#[target_feature(enable = "neon")]
fn join_bit(
    quants: [uint8x16_t; 2],
    bits: [uint8x16_t; 2],
    from: usize,
    to: usize,
) -> [int8x16_t; 2] {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        reason = "numbers of bits in a byte"
    )]
    let (shift, bit) = (vdupq_n_s8(to as i8 - from as i8), vdupq_n_u8(1 << to));
    let placed = bits.map(|bits| vandq_u8(vshlq_u8(bits, shift), bit));
    signed(join(quants, placed))
}

/// Half of an IQ4_XS block.
///
/// # Safety
///
/// `block` is an IQ4_XS block.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn half_iq4_xs(block: *const u8, half: usize) -> Half {
    // SAFETY: 16 bytes of indices for each run of 32 follow the 8 of the head.
    let run = |number: usize| unsafe { looked_up(IQ4, block.add(8 + 64 * half + 16 * number)) };
    [run(0), run(1), run(2), run(3)]
}

/// The table's entries for sixteen bytes of indices, those in lower halves first.
///
/// # Safety
///
/// They can be read at `from`.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn looked_up(table: Table, from: *const u8) -> [int8x16_t; 2] {
    // SAFETY: the caller's promise, and sixteen bytes.
    let (indices, table) = unsafe { (nibbles(from), vld1q_s8(table.as_ptr())) };
    indices.map(|indices| vqtbl1q_s8(table, vreinterpretq_u8_s8(indices)))
}

/// Sixteen numbers.
type Sixteen = [int16x8_t; 2];

#[inline]
#[target_feature(enable = "neon")]
fn widened_bytes(bytes: int8x16_t) -> Sixteen {
    [vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes)]
}

/// Scales and minimums of a Q4_K or Q5_K block.
///
/// # Safety
///
/// `block` is such a block.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn heads_of_six_bits(block: *const u8) -> ([int16x8_t; 1], [int16x8_t; 1]) {
    // SAFETY: the caller's promise.
    let (scales, mins) = unsafe { six_bit_head(block) };
    ([bytes_to_words(scales)], [bytes_to_words(mins)])
}

/// Scales and minimums.
///
/// # Safety
///
/// `block` is a Q2_K block.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn heads_q2k(block: *const u8) -> (Sixteen, Sixteen) {
    // SAFETY: sixteen bytes are the head: the lower half of each is a scale and the upper one a minimum.
    let both = unsafe { vld1q_u8(block) };
    let [scales, mins] = signed([vandq_u8(both, vdupq_n_u8(15)), vshrq_n_u8::<4>(both)]);
    (widened_bytes(scales), widened_bytes(mins))
}

/// Scales, which also serve as minimums.
///
/// # Safety
///
/// `block` is a Q3_K block.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn heads_q3k(block: *const u8) -> (Sixteen, Sixteen) {
    // SAFETY: twelve bytes of scales follow 96 of quants: both halves of the first eight are the lower bits, the last
    // four have the upper ones.
    let words = unsafe { block.add(96).cast::<[u32; 3]>().read_unaligned() };
    let [a, b, c] = words.map(u32::from_le);
    let scale = |four: u32, from: u32| (four & 0x0f0f_0f0f) | (((c >> from) & 0x0303_0303) << 4);
    let join = |low: u32, high: u32| vcreate_u8(u64::from(low) | (u64::from(high) << 32));
    let bytes = vcombine_u8(
        join(scale(a, 0), scale(b, 2)),
        join(scale(a >> 4, 4), scale(b >> 4, 6)),
    );
    let scales = widened_bytes(vsubq_s8(vreinterpretq_s8_u8(bytes), vdupq_n_s8(32)));
    (scales, scales)
}

/// Scales, which also serve as minimums.
///
/// # Safety
///
/// `block` is a Q6_K block.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn heads_q6k(block: *const u8) -> (Sixteen, Sixteen) {
    // SAFETY: 16 scales follow the 192 bytes of quants.
    let scales = widened_bytes(unsafe { vld1q_s8(block.add(192).cast()) });
    (scales, scales)
}

/// Scales. There are no minimums, and quants are not reduced.
///
/// # Safety
///
/// `block` is an IQ4_XS block.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn heads_iq4_xs(block: *const u8) -> ([int16x8_t; 1], [int16x8_t; 1]) {
    // SAFETY: the upper two bits of eight scales and their lower four bits follow an `f16`.
    let (high, low) = unsafe {
        (
            block.add(2).cast::<u16>().read_unaligned(),
            block.add(4).cast::<[u8; 4]>().read_unaligned(),
        )
    };
    let low = vreinterpret_u8_u32(vdup_n_u32(u32::from_le_bytes(low)));
    let low = vzip1_u8(vand_u8(low, vdup_n_u8(15)), vshr_n_u8::<4>(low));
    let places = vcombine_s16(
        vcreate_s16(0xfffa_fffc_fffe_0000),
        vcreate_s16(0xfff2_fff4_fff6_fff8),
    );
    let high = vshlq_u16(vdupq_n_u16(u16::from_le(high)), places);
    let high = vshlq_n_u16::<4>(vandq_u16(high, vdupq_n_u16(3)));
    let scales = vreinterpretq_s16_u16(vorrq_u16(vmovl_u8(low), high));
    ([vsubq_s16(scales, vdupq_n_s16(32))], [vdupq_n_s16(0)])
}

/// # Safety
///
/// `block` is a Q4_1 block.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn quants_q4_1(block: *const u8) -> [int8x16_t; 2] {
    // SAFETY: 16 bytes of quants after scale and minimum.
    unsafe { nibbles(block.add(4)) }
}

/// # Safety
///
/// `block` is a Q5_0 block.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn quants_q5_0(block: *const u8) -> [int8x16_t; 2] {
    // SAFETY: four bytes of fifth bits and 16 of quants after the scale.
    let quants = unsafe { with_fifth(nibbles(block.add(6)), block.add(2)) };
    [
        vsubq_s8(quants[0], vdupq_n_s8(16)),
        vsubq_s8(quants[1], vdupq_n_s8(16)),
    ]
}

/// # Safety
///
/// `block` is a Q5_1 block.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn quants_q5_1(block: *const u8) -> [int8x16_t; 2] {
    // SAFETY: four bytes of fifth bits and 16 of quants after scale and minimum.
    unsafe { with_fifth(nibbles(block.add(8)), block.add(4)) }
}

/// 32 numbers of four bits, lower halves first.
///
/// # Safety
///
/// Sixteen bytes can be read at `from`.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn nibbles(from: *const u8) -> [int8x16_t; 2] {
    // SAFETY: the caller's promise.
    let both = unsafe { vld1q_u8(from) };
    signed([vandq_u8(both, vdupq_n_u8(15)), vshrq_n_u8::<4>(both)])
}

/// Adds 32 bits as the fifth bits.
///
/// # Safety
///
/// Four bytes can be read at `from`.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn with_fifth(quants: [int8x16_t; 2], from: *const u8) -> [int8x16_t; 2] {
    // SAFETY: the caller's promise.
    let bits = unsafe { from.cast::<[u8; 4]>().read_unaligned() };
    let bit = vreinterpretq_u8_u64(vdupq_n_u64(0x8040_2010_0804_0201));
    let mut joined = quants;
    for (half, quants) in joined.iter_mut().enumerate() {
        // Each byte eight times, each of which keeps a different bit.
        let spread = vcombine_u8(vdup_n_u8(bits[2 * half]), vdup_n_u8(bits[2 * half + 1]));
        let fifth = vandq_u8(vtstq_u8(spread, bit), vdupq_n_u8(16));
        *quants = vorrq_s8(*quants, vreinterpretq_s8_u8(fifth));
    }
    joined
}

/// # Safety
///
/// `block` is a Q8_0 block.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn quants_q8_0(block: *const u8) -> [int8x16_t; 2] {
    // SAFETY: 32 bytes of quants after the scale.
    signed(unsafe { pair(block.add(2)) })
}

/// # Safety
///
/// `block` is a Q4_0 block.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn quants_q4_0(block: *const u8) -> [int8x16_t; 2] {
    // SAFETY: 16 bytes of quants after the scale.
    let both = unsafe { vld1q_u8(block.add(2)) };
    let quants = signed([vandq_u8(both, vdupq_n_u8(15)), vshrq_n_u8::<4>(both)]);
    quants.map(|quants| vsubq_s8(quants, vdupq_n_s8(8)))
}

/// # Safety
///
/// `block` is an IQ4_NL block.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn quants_iq4_nl(block: *const u8) -> [int8x16_t; 2] {
    // SAFETY: 16 bytes of indices after the scale.
    unsafe { looked_up(IQ4, block.add(2)) }
}

/// # Safety
///
/// `block` is an MXFP4 block.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn quants_mxfp4(block: *const u8) -> [int8x16_t; 2] {
    // SAFETY: 16 bytes of indices after the exponent.
    unsafe { looked_up(E2M1, block.add(1)) }
}

/// Adds a product times the scale in lane `LANE`. With the intrinsic, the compiler would broadcast and widen each scale
/// separately, since it sees their origin.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn add_scaled<const LANE: usize>(
    mut sum: int32x4_t,
    product: int32x4_t,
    scales: int32x4_t,
) -> int32x4_t {
    // SAFETY: one instruction of every machine of the target, on registers only.
    unsafe {
        asm!(
            "mla {sum:v}.4s, {product:v}.4s, {scales:v}.s[{lane}]",
            sum = inout(vreg) sum,
            product = in(vreg) product,
            scales = in(vreg) scales,
            lane = const LANE,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sum
}

/// Eight bytes as 16-bit numbers.
#[inline]
#[target_feature(enable = "neon")]
fn bytes_to_words(bytes: u64) -> int16x8_t {
    vreinterpretq_s16_u16(vmovl_u8(vcreate_u8(bytes)))
}

/// Adds the products of eight pairs, two in each lane.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn products_of(sum: int32x4_t, a: int16x8_t, b: int16x8_t) -> int32x4_t {
    vmlal_high_s16(vmlal_s16(sum, vget_low_s16(a), vget_low_s16(b)), a, b)
}

/// # Safety
///
/// 32 bytes can be read at `address`.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn pair(address: *const u8) -> [uint8x16_t; 2] {
    // SAFETY: the caller's promise.
    unsafe { [vld1q_u8(address), vld1q_u8(address.add(16))] }
}

/// The lower half of each byte.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn low(both: [uint8x16_t; 2]) -> [uint8x16_t; 2] {
    both.map(|both| vandq_u8(both, vdupq_n_u8(15)))
}

/// The upper half of each byte.
#[inline]
#[target_feature(enable = "neon")]
fn high(both: [uint8x16_t; 2]) -> [uint8x16_t; 2] {
    both.map(|both| vshrq_n_u8::<4>(both))
}

#[inline]
#[target_feature(enable = "neon")]
pub(super) fn signed(bytes: [uint8x16_t; 2]) -> [int8x16_t; 2] {
    bytes.map(|bytes| vreinterpretq_s8_u8(bytes))
}

#[inline]
#[target_feature(enable = "neon")]
fn join(a: [uint8x16_t; 2], b: [uint8x16_t; 2]) -> [uint8x16_t; 2] {
    [vorrq_u8(a[0], b[0]), vorrq_u8(a[1], b[1])]
}

/// Adds the products of four bytes each to each lane. `vdotq_s32` is not stable yet.
#[inline]
#[target_feature(enable = "neon,dotprod")]
pub(super) fn dot(mut sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: one instruction of an enabled set, on registers only.
    unsafe {
        asm!(
            "sdot {sum:v}.4s, {a:v}.16b, {b:v}.16b",
            sum = inout(vreg) sum,
            a = in(vreg) a,
            b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sum
}

/// Addresses `bytes` further in each row. Not a closure: one in a function with `sdot` is not inlined into its callers.
#[inline]
pub(super) const fn moved(four: Four, bytes: usize) -> Four {
    [
        four[0].wrapping_add(bytes),
        four[1].wrapping_add(bytes),
        four[2].wrapping_add(bytes),
        four[3].wrapping_add(bytes),
    ]
}

/// The `f16` values at four addresses. They are joined outside the vector units, which are busy.
///
/// # Safety
///
/// Two bytes can be read at each.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn halves_of_four(four: Four) -> uint16x4_t {
    // SAFETY: the caller's promise.
    let half = |row: usize| {
        u64::from(u16::from_le(unsafe {
            four[row].cast::<u16>().read_unaligned()
        }))
    };
    vcreate_u16((half(0) | (half(1) << 16)) | ((half(2) | (half(3) << 16)) << 32))
}

/// The two `f16` values at each of four addresses: the first ones, and the second ones.
///
/// # Safety
///
/// Four bytes can be read at each.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn pairs_of_four(four: Four) -> (uint16x4_t, uint16x4_t) {
    // SAFETY: the caller's promise.
    let pair = |row: usize| {
        u64::from(u32::from_le(unsafe {
            four[row].cast::<u32>().read_unaligned()
        }))
    };
    let all = vcombine_u64(
        vcreate_u64(pair(0) | (pair(1) << 32)),
        vcreate_u64(pair(2) | (pair(3) << 32)),
    );
    let all = vreinterpretq_u32_u64(all);
    (vmovn_u32(all), vshrn_n_u32::<16>(all))
}

/// The `f16` scales of four blocks, with which they start, as `f32`.
///
/// # Safety
///
/// Two bytes can be read at each.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn half_scales(four: Four) -> float32x4_t {
    // SAFETY: the caller's promise.
    widened(unsafe { halves_of_four(four) })
}

/// The scales of four blocks that start with an exponent: [`half_of_power`](super::table::half_of_power).
///
/// # Safety
///
/// A byte can be read at each.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn power_scales(four: Four) -> float32x4_t {
    // SAFETY: the caller's promise.
    let byte = |row: usize| u64::from(unsafe { four[row].read() });
    let exponents = vcombine_u64(
        vcreate_u64(byte(0) | (byte(1) << 32)),
        vcreate_u64(byte(2) | (byte(3) << 32)),
    );
    let bits = vshlq_n_u32::<23>(vreinterpretq_u32_u64(exponents));
    let power = vreinterpretq_f32_u32(vmaxq_u32(bits, vdupq_n_u32(LEAST_POWER)));
    vfmsq_f32(power, power, vdupq_n_f32(0.5))
}

/// Four `f16` values as `f32`, in one instruction, which has no stable intrinsic yet.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn widened(halves: uint16x4_t) -> float32x4_t {
    let wide: float32x4_t;
    // SAFETY: one instruction of every machine of the target, on registers only.
    unsafe {
        asm!(
            "fcvtl {wide:v}.4s, {halves:v}.4h",
            wide = lateout(vreg) wide,
            halves = in(vreg) halves,
            // Not `preserves_flags`: a signalling NaN is reported in FPSR, which counts as flags.
            options(pure, nomem, nostack)
        );
    }
    wide
}
