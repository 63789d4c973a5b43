//! Products with Q4_1 and Q5_1 weights (scale and minimum per block).
//!
//! ggml multiplies them with activations in Q8_1, which is Q8_0 plus the sum of each block. Candle implements these
//! products only as a plain loop; here the sum is computed along the way, so that no separate format is needed.

use super::{
    float::half_to_float,
    quant::{BLOCK, Q8_0_BYTES},
};

/// Product of a row of Q4_1 blocks with a row of Q8_0 blocks.
pub(crate) fn dot_q4_1(weight: &[u8], copy: &[u8]) -> f32 {
    let mut total = 0f32;
    for (x, y) in weight
        .chunks_exact(Q4_1_BYTES)
        .zip(copy.chunks_exact(Q8_0_BYTES))
    {
        let mut quants = [0u8; BLOCK];
        let (low, high) = quants.split_at_mut(BLOCK / 2);
        for ((low, high), byte) in low.iter_mut().zip(high).zip(&x[4..]) {
            *low = byte & 15;
            *high = byte >> 4;
        }
        total = add_block(total, x, &quants, y);
    }
    total
}

/// Product of a row of Q5_1 blocks with a row of Q8_0 blocks.
pub(crate) fn dot_q5_1(weight: &[u8], copy: &[u8]) -> f32 {
    let mut total = 0f32;
    for (x, y) in weight
        .chunks_exact(Q5_1_BYTES)
        .zip(copy.chunks_exact(Q8_0_BYTES))
    {
        let fifth = u32::from_le_bytes([x[4], x[5], x[6], x[7]]);
        let mut quants = [0u8; BLOCK];
        let (low, high) = quants.split_at_mut(BLOCK / 2);
        for (at, ((low, high), byte)) in low.iter_mut().zip(high).zip(&x[8..]).enumerate() {
            *low = (byte & 15) | u8::from(fifth >> at & 1 == 1) << 4;
            *high = (byte >> 4) | u8::from(fifth >> (at + BLOCK / 2) & 1 == 1) << 4;
        }
        total = add_block(total, x, &quants, y);
    }
    total
}

/// `total` plus one block: `(scale · q + minimum) · (scale' · q')`, summed.
#[inline(always)]
fn add_block(total: f32, x: &[u8], quants: &[u8; BLOCK], y: &[u8]) -> f32 {
    let half = |bytes: &[u8]| half_to_float(u16::from_le_bytes([bytes[0], bytes[1]]));
    let (mut products, mut sum) = (0i32, 0i32);
    for (q, y) in quants.iter().zip(&y[2..]) {
        let y = i32::from(y.cast_signed());
        products += i32::from(*q) * y;
        sum += y;
    }
    let scale = half(y);
    (products as f32).mul_add(
        half(x) * scale,
        (sum as f32).mul_add(half(&x[2..]) * scale, total),
    )
}

/// Scale, minimum, 32 quants of four bits.
const Q4_1_BYTES: usize = 20;
/// Scale, minimum, 32 fifth bits, 32 quants of four bits.
const Q5_1_BYTES: usize = 24;
