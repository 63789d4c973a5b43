//! Kernels on `f32`: norms, activations, rotation, dot products.

use super::isa::kernel;

/// Lanes of a sum; two registers of AVX-512, four of AVX2, eight of NEON.
pub(crate) const LANES: usize = 32;

/// The sum of products in fixed lanes.
#[inline(always)]
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0f32; LANES];
    let (mut left, mut right) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    for (x, y) in (&mut left).zip(&mut right) {
        for lane in 0..LANES {
            sums[lane] = x[lane].mul_add(y[lane], sums[lane]);
        }
    }
    for (lane, (x, y)) in left.remainder().iter().zip(right.remainder()).enumerate() {
        sums[lane] = x.mul_add(*y, sums[lane]);
    }
    sum(&mut sums)
}

/// The sum of all lanes, by halves.
#[inline(always)]
pub(crate) fn sum<const LANES: usize>(lanes: &mut [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// The value of an `f16` in `bits`; infinities and NaN, which caches and weights never contain, become large numbers.
#[inline(always)]
pub(crate) fn half_to_float(bits: u16) -> f32 {
    /// 2^112: the difference of the two exponent biases.
    const SCALE: f32 = f32::from_bits(0x7780_0000);
    let magnitude = f32::from_bits(u32::from(bits & 0x7fff) << 13) * SCALE;
    f32::from_bits(magnitude.to_bits() | (u32::from(bits & 0x8000) << 16))
}

#[inline(always)]
pub(crate) fn rms_row(input: &[f32], weight: &[f32], epsilon: f32, out: &mut [f32]) {
    let scale = rms_scale(input, epsilon);
    for ((y, x), w) in out.iter_mut().zip(input).zip(weight) {
        *y = x * scale * w;
    }
}

/// `row = rms(row) · weight` in place.
#[inline(always)]
pub(crate) fn rms_in_place(row: &mut [f32], weight: &[f32], epsilon: f32) {
    let scale = rms_scale(row, epsilon);
    for (x, w) in row.iter_mut().zip(weight) {
        *x = *x * scale * w;
    }
}

#[expect(clippy::cast_precision_loss, reason = "widths are far below 2^24")]
#[inline(always)]
fn rms_scale(row: &[f32], epsilon: f32) -> f32 {
    let mean = dot(row, row) / row.len() as f32;
    1.0 / (mean + epsilon).sqrt()
}

#[expect(clippy::cast_precision_loss, reason = "widths are far below 2^24")]
#[inline(always)]
fn mean(row: &[f32]) -> f32 {
    let mut sums = [0f32; LANES];
    for lanes in row.chunks(LANES) {
        for (sum, x) in sums.iter_mut().zip(lanes) {
            *sum += x;
        }
    }
    sum(&mut sums) / row.len() as f32
}

/// e^x to about one unit in the last place, in operations that vectorise and give the same bits on every instruction
/// set.
///
/// Clamped below -87 and above 88, so that neither end overflows; NaN stays NaN.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    /// 1.5 · 2^23: adding it rounds to an integer in the low bits.
    const ROUND: f32 = 12_582_912.0;
    /// ln 2 in two parts, the first with trailing zeros (Cody and Waite; as in Cephes' `expf`).
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let x = x.clamp(-87.0, 88.0);
    let rounded = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let power = rounded - ROUND;
    let rest = power.mul_add(-LN2_LOW, power.mul_add(-LN2_HIGH, x));
    // Cephes' polynomial for e^r on |r| ≤ ln 2 / 2.
    let series = [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_65, 0.5]
        .into_iter()
        .fold(1.987_569_1e-4, |sum: f32, factor: f32| {
            sum.mul_add(rest, factor)
        });
    let value = series.mul_add(rest * rest, rest) + 1.0;
    value * f32::from_bits((rounded.to_bits() << 23).wrapping_add(0x3f80_0000))
}

#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

#[inline(always)]
pub(crate) fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// `0.5 · x · (1 + tanh(√(2/π) · x · (1 + 0.044715 · x²)))`, which is `x · σ` of twice the inner part. ggml's CPU path
/// uses an `f16` lookup table, so its results are rounded more coarsely.
#[inline(always)]
pub(crate) fn gelu(x: f32) -> f32 {
    /// 2 · √(2/π).
    const OUTER: f32 = 1.595_769;
    x * sigmoid(OUTER * x * (0.044_715 * x).mul_add(x, 1.0))
}

/// ln(1 + e^x), as llama.cpp computes it.
#[inline(always)]
pub(crate) fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

/// Whether all are finite; processed in runs, so that checking a large vocabulary takes some µs.
pub(crate) fn all_finite(values: &[f32]) -> bool {
    let magnitude = |x: &f32| x.to_bits() & 0x7fff_ffff;
    values
        .chunks(1024)
        .all(|part| part.iter().map(magnitude).fold(0, u32::max) < f32::INFINITY.to_bits())
}

/// Limit of the gate and its factor, and slope of the gate's logistic function (gpt-oss).
const CLAMP: f32 = 7.0;
const CLAMPED_SLOPE: f32 = 1.702;

kernel! {
    /// The greatest value; −∞ if there is none.
    pub(crate) fn greatest(values: &[f32]) -> f32 {
        let mut lanes = [f32::NEG_INFINITY; 64];
        let (runs, rest) = values.as_chunks::<64>();
        for run in runs {
            for lane in 0..64 {
                // Not `max`, which is not a single instruction.
                lanes[lane] = if run[lane] > lanes[lane] { run[lane] } else { lanes[lane] };
            }
        }
        lanes.iter().chain(rest).copied().fold(f32::NEG_INFINITY, f32::max)
    }

    /// Normalises rows of `weight.len()` elements.
    pub(crate) fn rms_rows(input: &[f32], weight: &[f32], epsilon: f32, out: &mut [f32]) {
        let width = weight.len().max(1);
        for (x, y) in input.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
            rms_row(x, weight, epsilon, y);
        }
    }

    /// `out = input − mean`.
    pub(crate) fn centre(input: &[f32], out: &mut [f32]) {
        let mean = mean(input);
        for (y, x) in out.iter_mut().zip(input) {
            *y = x - mean;
        }
    }

    /// `x = cap · tanh(x · scale / cap)`; the hyperbolic tangent is `2 · σ(2x) − 1`.
    pub(crate) fn soft_cap(values: &mut [f32], scale: f32, cap: f32) {
        let inner = 2.0 * scale / cap;
        for x in values {
            *x = 2.0f32.mul_add(sigmoid(*x * inner), -1.0) * cap;
        }
    }

    /// `y += x · by`.
    pub(crate) fn add_scaled(y: &mut [f32], x: &[f32], by: f32) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = x.mul_add(by, *y);
        }
    }

    /// `y += (x + bias) · by`.
    pub(crate) fn add_biased(y: &mut [f32], x: &[f32], bias: &[f32], by: f32) {
        for ((y, x), bias) in y.iter_mut().zip(x).zip(bias) {
            *y = (x + bias).mul_add(by, *y);
        }
    }

    /// `y += x`.
    pub(crate) fn add(y: &mut [f32], x: &[f32]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y += x;
        }
    }

    /// Normalises a row in place.
    pub(crate) fn rms_row_in_place(row: &mut [f32], weight: &[f32], epsilon: f32) {
        rms_in_place(row, weight, epsilon);
    }

    /// As [`rms_row_in_place`], without weights.
    pub(crate) fn rms_of_row(row: &mut [f32], epsilon: f32) {
        let scale = rms_scale(row, epsilon);
        for x in row {
            *x *= scale;
        }
    }

    /// `gate = gate · σ(1.702 · gate) · (up + 1)`, with the gate limited to 7 and `up` to ±7 first.
    pub(crate) fn clamped_mul(gate: &mut [f32], up: &[f32]) {
        for (g, u) in gate.iter_mut().zip(up) {
            // Not `min`, which would turn a number that is none into one.
            let limited = if *g > CLAMP { CLAMP } else { *g };
            *g = limited * sigmoid(CLAMPED_SLOPE * limited) * (u.clamp(-CLAMP, CLAMP) + 1.0);
        }
    }

    /// `gate = gelu(gate) · up`.
    pub(crate) fn gelu_mul(gate: &mut [f32], up: &[f32]) {
        for (g, u) in gate.iter_mut().zip(up) {
            *g = gelu(*g) * u;
        }
    }

    /// `gate = gelu(gate)`; there is no factor.
    pub(crate) fn gelu_alone(gate: &mut [f32], _up: &[f32]) {
        for g in gate.iter_mut() {
            *g = gelu(*g);
        }
    }

    /// `gate = max(gate, 0)²`; there is no factor.
    pub(crate) fn relu_squared(gate: &mut [f32], _up: &[f32]) {
        for g in gate.iter_mut() {
            // Not `max`, which would turn a number that is none into one.
            let x = if *g < 0.0 { 0.0 } else { *g };
            *g = x * x;
        }
    }

    /// `gate = silu(gate) · up`.
    pub(crate) fn silu_mul(gate: &mut [f32], up: &[f32]) {
        for (g, u) in gate.iter_mut().zip(up) {
            *g = silu(*g) * u;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{isa::Isa, test_numbers::numbers},
        *,
    };

    #[test]
    fn every_instruction_set_gives_the_same_bits() {
        for len in [8, 32, 100, 1024] {
            let (x, w) = (numbers(3 * len, 1), numbers(len, 2));
            let mut reference = vec![0.0; 3 * len];
            rms_rows(Isa::Baseline, &x, &w, 1e-6, &mut reference);
            for &isa in Isa::available() {
                let mut out = vec![0.0; 3 * len];
                rms_rows(isa, &x, &w, 1e-6, &mut out);
                assert_eq!(out, reference, "{isa:?}");
            }
        }
    }

    #[test]
    fn the_exponential_is_right_to_a_few_units_and_the_same_everywhere() {
        let mut worst = 0f64;
        for step in -87_000i32..88_000 {
            let x = step as f32 / 1000.0;
            let right = f64::from(x).exp();
            worst = worst.max(((f64::from(exp(x)) - right) / right).abs());
        }
        assert!(worst < 3e-7, "{worst}");
        assert_eq!(exp(0.0), 1.0);
        assert!(
            exp(f32::INFINITY).is_finite()
                && exp(f32::NEG_INFINITY) < 1e-37
                && exp(f32::NAN).is_nan()
        );
        let (gate, up) = (numbers(1000, 4), numbers(1000, 5));
        let gate: Vec<f32> = gate.iter().map(|x| x * 20.0).collect();
        let mut reference = gate.clone();
        silu_mul(Isa::Baseline, &mut reference, &up);
        for &isa in Isa::available() {
            let mut out = gate.clone();
            silu_mul(isa, &mut out, &up);
            assert_eq!(out, reference, "{isa:?}");
        }
    }

    #[test]
    fn gelu_is_that_of_the_hyperbolic_tangent_and_the_same_everywhere() {
        for step in -800i16..=800 {
            let single = f32::from(step) / 100.0;
            let x = f64::from(single);
            let inner = (2.0 / std::f64::consts::PI).sqrt() * x * (1.0 + 0.044_715 * x * x);
            let right = 0.5 * x * (1.0 + inner.tanh());
            let ours = f64::from(gelu(single));
            assert!(
                (ours - right).abs() <= 1e-6 * x.abs().max(1e-3),
                "{x}: {ours} {right}"
            );
        }
        let (gate, up) = (numbers(1000, 6), numbers(1000, 7));
        let mut reference = gate.clone();
        gelu_mul(Isa::Baseline, &mut reference, &up);
        for &isa in Isa::available() {
            let mut out = gate.clone();
            gelu_mul(isa, &mut out, &up);
            assert_eq!(out, reference, "{isa:?}");
        }
    }

    #[test]
    fn a_limited_gate_is_that_of_gpt_oss_and_the_same_everywhere() {
        for (gate, up, right) in [
            (1.0f32, 2.0f32, 3.0 / (1.0 + (-1.702f64).exp())),
            (9.0, 9.0, 56.0 / (1.0 + (-1.702f64 * 7.0).exp())),
            (-9.0, -9.0, 54.0 / (1.0 + (1.702f64 * 9.0).exp())),
        ] {
            let mut out = [gate];
            clamped_mul(Isa::Baseline, &mut out, &[up]);
            let off = (f64::from(out[0]) - right).abs();
            assert!(off < 1e-5, "{gate} {up}: {out:?} {right}");
        }
        let mut broken = [f32::NAN, 1.0];
        clamped_mul(Isa::Baseline, &mut broken, &[1.0, f32::NAN]);
        assert!(broken.iter().all(|x| x.is_nan()), "{broken:?}");
        let (gate, up) = (numbers(1000, 10), numbers(1000, 11));
        let [gate, up] = [gate, up].map(|list| list.iter().map(|x| x * 20.0).collect::<Vec<_>>());
        let mut reference = gate.clone();
        clamped_mul(Isa::Baseline, &mut reference, &up);
        for &isa in Isa::available() {
            let mut out = gate.clone();
            clamped_mul(isa, &mut out, &up);
            assert_eq!(out, reference, "{isa:?}");
        }
    }

    #[test]
    fn a_centred_row_has_no_mean_and_is_the_same_everywhere() {
        for len in [8, 32, 100, 1024] {
            let row: Vec<f32> = numbers(len, 9).iter().map(|x| x + 5.0).collect();
            let mut reference = vec![0.0; len];
            centre(Isa::Baseline, &row, &mut reference);
            let mean = row.iter().map(|x| f64::from(*x)).sum::<f64>() / len as f64;
            for (got, x) in reference.iter().zip(&row) {
                assert!((f64::from(*got) - (f64::from(*x) - mean)).abs() < 1e-5);
            }
            for &isa in Isa::available() {
                let mut out = vec![0.0; len];
                centre(isa, &row, &mut out);
                assert_eq!(out, reference, "{isa:?}");
            }
        }
    }

    #[test]
    fn a_soft_cap_is_that_of_the_hyperbolic_tangent_and_the_same_everywhere() {
        for step in -2000i16..=2000 {
            let x = f32::from(step) / 10.0;
            let mut capped = [x];
            soft_cap(Isa::Baseline, &mut capped, 0.5, 30.0);
            let right = 30.0 * (f64::from(x) * 0.5 / 30.0).tanh();
            let off = (f64::from(capped[0]) - right).abs();
            assert!(off < 1e-5, "{x}: {capped:?} {right}");
        }
        let values: Vec<f32> = numbers(1000, 8).iter().map(|x| x * 100.0).collect();
        let mut reference = values.clone();
        soft_cap(Isa::Baseline, &mut reference, 0.125, 50.0);
        for &isa in Isa::available() {
            let mut out = values.clone();
            soft_cap(isa, &mut out, 0.125, 50.0);
            assert_eq!(out, reference, "{isa:?}");
        }
        let mut rest = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
        soft_cap(Isa::detect(), &mut rest, 1.0, 50.0);
        assert!(rest[0].is_nan() && rest[1..] == [50.0, -50.0], "{rest:?}");
    }

    #[test]
    fn halves_come_out_as_the_half_crate_has_them() {
        for bits in 0..=u16::MAX {
            let expected = half::f16::from_bits(bits).to_f32();
            if expected.is_finite() {
                assert_eq!(
                    half_to_float(bits).to_bits(),
                    expected.to_bits(),
                    "{bits:04x}"
                );
            }
        }
    }

    #[test]
    fn the_mean_square_of_a_normalised_row_is_one() {
        let x = numbers(256, 3);
        let mut out = vec![0.0; 256];
        rms_rows(Isa::detect(), &x, &vec![1.0; 256], 0.0, &mut out);
        let mean: f32 = out.iter().map(|v| v * v).sum::<f32>() / 256.0;
        assert!((mean - 1.0).abs() < 1e-5, "{mean}");
    }
}
