//! Weights that select one of sixteen values: IQ4_NL, IQ4_XS and MXFP4.
//!
//! Four bits are an index into a table of signed bytes. The kernels of each instruction set look up sixteen or more
//! indices at once; here are the tables, and the portable loops.

use super::quant::{BLOCK, Q8_0_BYTES, Q8K_BYTES, SUPER};

/// Sixteen values, of which four bits select one.
pub(super) type Table = [i8; 16];

/// The values of IQ4_NL and IQ4_XS (`kvalues_iq4nl` in ggml's `ggml-common.h`).
pub(super) const IQ4: Table = [
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
];

/// Twice the values of MXFP4 (E2M1 in "OCP Microscaling Formats" 1.0, table 5): three bits of size, and the sign.
pub(super) const E2M1: Table = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Adds `offset` to each value of a table; with 128, its bytes are unsigned.
#[cfg(target_arch = "x86_64")]
pub(super) const fn raised(mut table: Table, offset: u8) -> Table {
    let mut at = 0;
    while at < table.len() {
        table[at] = table[at].wrapping_add_unsigned(offset);
        at += 1;
    }
    table
}

/// The scale of an MXFP4 block, 2^(`exponent` - 127), halved for [`E2M1`]; with an exponent of 255 NaN, as in the
/// specification (E8M0).
pub(super) const fn half_of_power(exponent: u8) -> f32 {
    // The least power has no bits of exponent.
    let bits = (exponent as u32) << 23;
    let power = f32::from_bits(if bits == 0 { LEAST_POWER } else { bits });
    // Infinity less itself is NaN.
    power - 0.5 * power
}

/// The bits of 2^-127.
pub(super) const LEAST_POWER: u32 = 1 << 22;

/// A type with blocks of 32 columns.
pub(super) struct Small {
    bytes: usize,
    table: Table,
    /// The scale of a block, and its indices.
    read: fn(&[u8]) -> (f32, &[u8]),
}

/// An `f16` scale, 32 indices.
pub(super) const IQ4_NL: Small = Small {
    bytes: 18,
    table: IQ4,
    read: |block| (half(block), &block[2..]),
};

/// An exponent, 32 indices.
pub(super) const MXFP4: Small = Small {
    bytes: 17,
    table: E2M1,
    read: |block| (half_of_power(block[0]), &block[1..]),
};

impl Small {
    /// The scale and the values of each block.
    fn blocks(&self, row: &[u8]) -> impl Iterator<Item = (f32, [i8; BLOCK])> {
        row.chunks_exact(self.bytes).map(|block| {
            let (scale, indices) = (self.read)(block);
            (scale, looked_up(&self.table, indices))
        })
    }

    pub(super) fn to_float(&self, row: &[u8], out: &mut [f32]) {
        for ((scale, values), out) in self.blocks(row).zip(out.chunks_exact_mut(BLOCK)) {
            widen(scale, &values, out);
        }
    }

    /// Product of a row with a row of Q8_0 blocks.
    pub(super) fn dot(&self, row: &[u8], copy: &[u8]) -> f32 {
        let blocks = self.blocks(row).zip(copy.chunks_exact(Q8_0_BYTES));
        blocks.fold(0.0, |sum, ((scale, values), y)| {
            (products(&values, &y[2..]) as f32).mul_add(scale * half(y), sum)
        })
    }
}

/// The scale of each block of a row of IQ4_XS, and the scale and the values of each of its runs of 32: an `f16` scale,
/// the upper two bits of eight scales, their lower four bits, 256 indices.
fn iq4_xs(row: &[u8]) -> impl Iterator<Item = (f32, [(i32, [i8; BLOCK]); SUPER / BLOCK])> {
    row.chunks_exact(IQ4_XS_BYTES).map(|block| {
        let high = u16::from_le_bytes([block[2], block[3]]);
        let low = u32::from_le_bytes([block[4], block[5], block[6], block[7]]);
        let runs = std::array::from_fn(|run| {
            let scale = (low >> (4 * run) & 15) | u32::from(high >> (2 * run) & 3) << 4;
            let indices = &block[8 + BLOCK / 2 * run..][..BLOCK / 2];
            (scale.cast_signed() - 32, looked_up(&IQ4, indices))
        });
        (half(block), runs)
    })
}

/// A row of IQ4_XS as floats.
pub(super) fn iq4_xs_to_float(row: &[u8], out: &mut [f32]) {
    for ((factor, runs), out) in iq4_xs(row).zip(out.chunks_exact_mut(SUPER)) {
        for ((scale, values), out) in runs.iter().zip(out.chunks_exact_mut(BLOCK)) {
            widen(factor * *scale as f32, values, out);
        }
    }
}

/// Product of a row of IQ4_XS with a row of Q8_K blocks.
pub(super) fn dot_iq4_xs(row: &[u8], copy: &[u8]) -> f32 {
    let blocks = iq4_xs(row).zip(copy.chunks_exact(Q8K_BYTES));
    blocks.fold(0.0, |sum, ((scale, runs), y)| {
        let (factor, quants) = (f32::from_le_bytes([y[0], y[1], y[2], y[3]]), &y[4..]);
        let runs = runs.iter().zip(quants.chunks_exact(BLOCK));
        let total: i32 = runs
            .map(|((scale, values), y)| scale * products(values, y))
            .sum();
        (total as f32).mul_add(scale * factor, sum)
    })
}

/// The `f16` at the start of a block.
fn half(block: &[u8]) -> f32 {
    half::f16::from_le_bytes([block[0], block[1]]).to_f32()
}

/// The values for sixteen bytes of indices, those in lower halves first.
fn looked_up(table: &Table, indices: &[u8]) -> [i8; BLOCK] {
    let mut values = [0; BLOCK];
    let (low, high) = values.split_at_mut(BLOCK / 2);
    for ((low, high), byte) in low.iter_mut().zip(high).zip(indices) {
        *low = table[usize::from(byte & 15)];
        *high = table[usize::from(byte >> 4)];
    }
    values
}

fn widen(scale: f32, values: &[i8; BLOCK], out: &mut [f32]) {
    for (out, value) in out.iter_mut().zip(values) {
        *out = scale * f32::from(*value);
    }
}

/// The sum of products of values with the quants of a copy.
fn products(values: &[i8; BLOCK], quants: &[u8]) -> i32 {
    let products = values.iter().zip(quants);
    products
        .map(|(value, quant)| i32::from(*value) * i32::from(quant.cast_signed()))
        .sum()
}

/// `f16`, two and four bytes of scales, 256 indices.
const IQ4_XS_BYTES: usize = 136;
