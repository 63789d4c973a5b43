//! Unpacked blocks of quants for arm64, for products with one token ([`neon`](super::neon)) and with many
//! ([`neon_tile`](super::neon_tile)).

use std::arch::{aarch64::*, asm};

/// Quants of a block of 256 in runs of 32, of which each half is a register.
pub(super) type Quants = [[int8x16_t; 2]; 8];

/// Sums of blocks of 32 that run beside each other: one would wait for itself.
pub(super) const SUMS: usize = 4;

/// Behind a copy's blocks and their factors lies -128 times each block's sum.
pub(super) const PER_START: f32 = -1.0 / 128.0;

/// # Safety
///
/// `block` is a Q4_K block.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn quants_q4k(block: *const u8) -> Quants {
    let mut quants = [[vdupq_n_s8(0); 2]; 8];
    for part in 0..4 {
        // SAFETY: 128 bytes of quants follow the 16 of the head.
        let both = unsafe { pair(block.add(16 + 32 * part)) };
        quants[2 * part] = signed(low(both));
        quants[2 * part + 1] = signed(high(both));
    }
    quants
}

/// # Safety
///
/// `block` is a Q5_K block.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn quants_q5k(block: *const u8) -> Quants {
    let one = vdupq_n_u8(1);
    let mut quants = [[vdupq_n_s8(0); 2]; 8];
    // SAFETY: 32 bytes of fifth bits follow the 16 of the head.
    let mut fifth = unsafe { pair(block.add(16)) };
    for part in 0..4 {
        // SAFETY: 128 bytes of quants follow.
        let both = unsafe { pair(block.add(48 + 32 * part)) };
        for (ahead, four) in [low(both), high(both)].into_iter().enumerate() {
            let bit = fifth.map(|bits| vshlq_n_u8::<4>(vandq_u8(bits, one)));
            fifth = fifth.map(|bits| vshrq_n_u8::<1>(bits));
            quants[2 * part + ahead] = signed(join(four, bit));
        }
    }
    quants
}

/// Of a Q6_K block, with 32 added, so from 0 to 63.
///
/// # Safety
///
/// `block` is a Q6_K block.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn quants_q6k(block: *const u8) -> Quants {
    let two = vdupq_n_u8(0b11_0000);
    let mut quants = [[vdupq_n_s8(0); 2]; 8];
    for half in 0..2 {
        // SAFETY: 128 bytes of low bits, then 64 of high bits.
        let (top, both) = unsafe {
            (pair(block.add(128 + 32 * half)), [pair(block.add(64 * half)), pair(block.add(64 * half + 32))])
        };
        for part in 0..4 {
            let nibbles = if part < 2 { low(both[part]) } else { high(both[part - 2]) };
            let bits = top.map(|bits| {
                let placed = match part {
                    0 => vshlq_n_u8::<4>(bits),
                    1 => vshlq_n_u8::<2>(bits),
                    2 => bits,
                    _ => vshrq_n_u8::<2>(bits),
                };
                vandq_u8(placed, two)
            });
            quants[4 * half + part] = signed(join(nibbles, bits));
        }
    }
    quants
}

/// # Safety
///
/// `block` is a Q2_K block.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn quants_q2k(block: *const u8) -> Quants {
    // SAFETY: 64 bytes of quants follow the 16 of the head.
    unsafe { two_bits(block.add(16)) }
}

/// Of a Q3_K block, with 4 added, so from 0 to 7.
///
/// # Safety
///
/// `block` is a Q3_K block.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn quants_q3k(block: *const u8) -> Quants {
    // SAFETY: 32 bytes of third bits, then 64 of quants.
    let (mut third, mut quants) = unsafe { (pair(block), two_bits(block.add(32))) };
    for quants in &mut quants {
        for part in 0..2 {
            let bit = vshlq_n_u8::<2>(vandq_u8(third[part], vdupq_n_u8(1)));
            third[part] = vshrq_n_u8::<1>(third[part]);
            quants[part] = vorrq_s8(quants[part], vreinterpretq_s8_u8(bit));
        }
    }
    quants
}

/// 256 numbers of two bits.
///
/// # Safety
///
/// There are 64 bytes at `from`.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn two_bits(from: *const u8) -> Quants {
    let mut quants = [[vdupq_n_s8(0); 2]; 8];
    for half in 0..2 {
        // SAFETY: the caller's promise.
        let mut four = unsafe { pair(from.add(32 * half)) };
        for quants in &mut quants[4 * half..4 * half + 4] {
            for part in 0..2 {
                quants[part] = vreinterpretq_s8_u8(vandq_u8(four[part], vdupq_n_u8(3)));
                four[part] = vshrq_n_u8::<2>(four[part]);
            }
        }
    }
    quants
}

/// Sixteen numbers.
pub(super) type Sixteen = [int16x8_t; 2];

#[inline]
#[target_feature(enable = "neon")]
fn widened_bytes(bytes: int8x16_t) -> Sixteen {
    [vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes)]
}

/// Scales and minimums.
///
/// # Safety
///
/// `block` is a Q2_K block.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn heads_q2k(block: *const u8) -> (Sixteen, Sixteen) {
    // SAFETY: sixteen bytes are the head: of each the lower half is a scale and the upper one a minimum.
    let both = unsafe { vld1q_u8(block) };
    let [scales, mins] = signed([vandq_u8(both, vdupq_n_u8(15)), vshrq_n_u8::<4>(both)]);
    (widened_bytes(scales), widened_bytes(mins))
}

/// Scales, which are the minimums too.
///
/// # Safety
///
/// `block` is a Q3_K block.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn heads_q3k(block: *const u8) -> (Sixteen, Sixteen) {
    // SAFETY: twelve bytes of scales follow 96 of quants: of eight bytes both halves are the lower bits, the last four have
    // the upper ones.
    let words = unsafe { block.add(96).cast::<[u32; 3]>().read_unaligned() };
    let [a, b, c] = words.map(u32::from_le);
    let scale = |four: u32, from: u32| (four & 0x0f0f_0f0f) | (((c >> from) & 0x0303_0303) << 4);
    let join = |low: u32, high: u32| vcreate_u8(u64::from(low) | (u64::from(high) << 32));
    let bytes = vcombine_u8(join(scale(a, 0), scale(b, 2)), join(scale(a >> 4, 4), scale(b >> 4, 6)));
    let scales = widened_bytes(vsubq_s8(vreinterpretq_s8_u8(bytes), vdupq_n_s8(32)));
    (scales, scales)
}

/// Scales, which are the minimums too.
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

/// # Safety
///
/// `block` is a Q4_1 block.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn quants_q4_1(block: *const u8) -> [int8x16_t; 2] {
    // SAFETY: 16 bytes of quants behind scale and minimum.
    unsafe { nibbles(block.add(4)) }
}

/// # Safety
///
/// `block` is a Q5_0 block.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn quants_q5_0(block: *const u8) -> [int8x16_t; 2] {
    // SAFETY: four bytes of fifth bits and 16 of quants behind the scale.
    let quants = unsafe { with_fifth(nibbles(block.add(6)), block.add(2)) };
    [vsubq_s8(quants[0], vdupq_n_s8(16)), vsubq_s8(quants[1], vdupq_n_s8(16))]
}

/// # Safety
///
/// `block` is a Q5_1 block.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn quants_q5_1(block: *const u8) -> [int8x16_t; 2] {
    // SAFETY: four bytes of fifth bits and 16 of quants behind scale and minimum.
    unsafe { with_fifth(nibbles(block.add(8)), block.add(4)) }
}

/// 32 numbers of four bits, lower halves first.
///
/// # Safety
///
/// Sixteen bytes can be read at `from`.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn nibbles(from: *const u8) -> [int8x16_t; 2] {
    // SAFETY: the caller's promise.
    let both = unsafe { vld1q_u8(from) };
    signed([vandq_u8(both, vdupq_n_u8(15)), vshrq_n_u8::<4>(both)])
}

/// With 32 bits as the fifth ones.
///
/// # Safety
///
/// Four bytes can be read at `from`.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn with_fifth(quants: [int8x16_t; 2], from: *const u8) -> [int8x16_t; 2] {
    // SAFETY: the caller's promise.
    let bits = unsafe { from.cast::<[u8; 4]>().read_unaligned() };
    let bit = vreinterpretq_u8_u64(vdupq_n_u64(0x8040_2010_0804_0201));
    let mut joined = quants;
    for (half, quants) in joined.iter_mut().enumerate() {
        // Each byte eight times, of which each keeps another bit.
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
    // SAFETY: 32 bytes of quants behind the scale.
    signed(unsafe { pair(block.add(2)) })
}

/// # Safety
///
/// `block` is a Q4_0 block.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn quants_q4_0(block: *const u8) -> [int8x16_t; 2] {
    // SAFETY: 16 bytes of quants behind the scale.
    let both = unsafe { vld1q_u8(block.add(2)) };
    let quants = signed([vandq_u8(both, vdupq_n_u8(15)), vshrq_n_u8::<4>(both)]);
    quants.map(|quants| vsubq_s8(quants, vdupq_n_s8(8)))
}

/// Eight bytes as 16-bit numbers.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn bytes_to_words(bytes: u64) -> int16x8_t {
    vreinterpretq_s16_u16(vmovl_u8(vcreate_u8(bytes)))
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
fn low(both: [uint8x16_t; 2]) -> [uint8x16_t; 2] {
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

/// The half at `address` as `f32`, in one instruction, which has no stable name yet.
///
/// # Safety
///
/// Two bytes can be read there.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn half_at(address: *const u8) -> f32 {
    // SAFETY: the caller's promise.
    let bits = u16::from_le(unsafe { address.cast::<u16>().read_unaligned() });
    let half: f32;
    // SAFETY: one instruction that every machine of the target has, on registers alone.
    unsafe {
        asm!(
            "fcvt {half:s}, {bits:h}",
            half = out(vreg) half,
            bits = in(vreg) bits,
            // Not `preserves_flags`: a signalling NaN is told in FPSR, which is one of them.
            options(pure, nomem, nostack)
        );
    }
    half
}

/// The two halves at `address` as `f32`.
///
/// # Safety
///
/// Four bytes can be read there.
#[inline]
#[target_feature(enable = "neon")]
pub(super) unsafe fn two_halves_at(address: *const u8) -> float32x2_t {
    // SAFETY: the caller's promise.
    let bits = u32::from_le(unsafe { address.cast::<u32>().read_unaligned() });
    vget_low_f32(widened(vcreate_u16(u64::from(bits))))
}

/// Four halves as `f32`.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn widened(halves: uint16x4_t) -> float32x4_t {
    let wide: float32x4_t;
    // SAFETY: one instruction that every machine of the target has, on registers alone.
    unsafe {
        asm!(
            "fcvtl {wide:v}.4s, {halves:v}.4h",
            wide = lateout(vreg) wide,
            halves = in(vreg) halves,
            // Not `preserves_flags`, as above.
            options(pure, nomem, nostack)
        );
    }
    wide
}
