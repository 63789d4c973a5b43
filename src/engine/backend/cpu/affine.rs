//! Products with Q4_1 and Q5_1 weights (scale and minimum per block).
//!
//! ggml multiplies them with activations in Q8_1, which is Q8_0 with the sum of each block beside it. Candle has these
//! products as a plain loop only; here the sum is taken on the way, so that they need no format of their own.

use super::{
    float::half_to_float,
    isa::kernel,
    quant::{BLOCK, Q8_0_BYTES},
};

kernel! {
    /// Product of a row of Q4_1 blocks with a row of Q8_0 blocks.
    pub(crate) fn dot_q4_1(weight: &[u8], copy: &[u8]) -> f32 {
        let mut total = 0f32;
        for (x, y) in weight.chunks_exact(Q4_1_BYTES).zip(copy.chunks_exact(Q8_0_BYTES)) {
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
}

kernel! {
    /// Product of a row of Q5_1 blocks with a row of Q8_0 blocks.
    pub(crate) fn dot_q5_1(weight: &[u8], copy: &[u8]) -> f32 {
        let mut total = 0f32;
        for (x, y) in weight.chunks_exact(Q5_1_BYTES).zip(copy.chunks_exact(Q8_0_BYTES)) {
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
}

/// `total` and one block more: `(scale · q + minimum) · (scale' · q')`, summed.
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
    (products as f32).mul_add(half(x) * scale, (sum as f32).mul_add(half(&x[2..]) * scale, total))
}

/// Scale, minimum, 32 quants of four bits.
const Q4_1_BYTES: usize = 20;
/// Scale, minimum, 32 fifth bits, 32 quants of four bits.
const Q5_1_BYTES: usize = 24;

#[cfg(test)]
mod tests {
    use candle_core::quantized::k_quants::{BlockQ4_1, BlockQ5_1, BlockQ8_0, GgmlType};

    use super::*;
    use crate::engine::backend::cpu::isa::Isa;

    fn check<T: GgmlType>(product: fn(Isa, &[u8], &[u8]) -> f32) {
        let numbers = |seed: u32| -> Vec<f32> {
            (0..256u32)
                .map(|at| ((at * 37 + seed).wrapping_mul(2_654_435_761) >> 8) as f32 / 8_388_608.0 - 0.7)
                .collect()
        };
        let (mut weight, mut input) = (vec![T::zeros(); 8], vec![BlockQ8_0::zeros(); 8]);
        T::from_float(&numbers(1), &mut weight);
        BlockQ8_0::from_float(&numbers(2), &mut input);
        let (mut x, mut y) = ([0f32; 256], [0f32; 256]);
        T::to_float(&weight, &mut x);
        BlockQ8_0::to_float(&input, &mut y);
        let expected: f64 = x.iter().zip(&y).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum();
        // SAFETY: blocks are plain numbers.
        let bytes = |blocks: &[T]| unsafe {
            std::slice::from_raw_parts(blocks.as_ptr().cast::<u8>(), size_of_val(blocks)).to_vec()
        };
        // SAFETY: as above.
        let copy = unsafe { std::slice::from_raw_parts(input.as_ptr().cast::<u8>(), size_of_val(input.as_slice())) };
        let reference = product(Isa::Baseline, &bytes(&weight), copy);
        assert!((f64::from(reference) - expected).abs() < 1e-4, "{reference} {expected}");
        for &isa in Isa::available() {
            assert_eq!(product(isa, &bytes(&weight), copy).to_bits(), reference.to_bits(), "{isa:?}");
        }
    }

    #[test]
    fn products_are_those_of_the_numbers_that_the_blocks_stand_for() {
        check::<BlockQ4_1>(dot_q4_1);
        check::<BlockQ5_1>(dot_q5_1);
    }
}
