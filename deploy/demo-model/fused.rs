//! Operations of the model that pass over memory once instead of five to ten times, each with its own gradient.
//!
//! Fusing is worth a factor of about 1.5 for a model this small, whose matrix products take only a third of the time otherwise.
//! The tests compare each gradient with the slope of the result.

use candle_core::{CpuStorage, CustomOp1, CustomOp2, Layout, Result, Shape, Storage, Tensor};

/// Taps of the causal convolution.
pub(crate) const TAPS: usize = 4;
/// Added to mean squares before the root.
pub(crate) const EPSILON: f64 = 1e-6;

/// `x / sqrt(mean(x²) + ε) × w` over the last dimension.
pub(crate) fn rms(x: &Tensor, w: &Tensor) -> Result<Tensor> {
    x.contiguous()?.apply_op2(w, Rms)
}

/// `silu(a) × b`.
pub(crate) fn silu_times(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    a.contiguous()?
        .apply_op2(&b.contiguous()?, Gate { silu: true })
}

/// `sigmoid(a) × b`.
pub(crate) fn sigmoid_times(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    a.contiguous()?
        .apply_op2(&b.contiguous()?, Gate { silu: false })
}

/// `silu` of a depthwise causal convolution of `[batch, time, channels]` with taps `[TAPS, channels]`, the last for the newest sample.
pub(crate) fn convolve_silu(x: &Tensor, taps: &Tensor) -> Result<Tensor> {
    x.contiguous()?.apply_op2(taps, ConvolveSilu)
}

/// Softmax over the last dimension of `scale × scores`, in which row `i` of each square sees its first `i + 1` columns only.
pub(crate) fn causal_softmax(scores: &Tensor, scale: f32) -> Result<Tensor> {
    scores.contiguous()?.apply_op1(CausalSoftmax { scale })
}

struct Rms;

impl CustomOp2 for Rms {
    fn name(&self) -> &'static str {
        "rms-norm"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        lx: &Layout,
        w: &CpuStorage,
        lw: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (x, w) = (slice(x, lx)?, slice(w, lw)?);
        let mut out = Vec::with_capacity(x.len());
        for row in x.chunks_exact(w.len()) {
            let scale = inverse_rms(row);
            out.extend(row.iter().zip(w).map(|(x, w)| x * scale * w));
        }
        Ok((CpuStorage::F32(out), lx.shape().clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        w: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let n = w.elem_count();
        let mut dx = Vec::with_capacity(x.elem_count());
        let mut dw = vec![0f32; n];
        read([x, w, gradient], |[x, w, g]| {
            for (row, g) in x.chunks_exact(n).zip(g.chunks_exact(n)) {
                let scale = inverse_rms(row);
                let dot: f32 = sum(row.iter().zip(g).zip(w).map(|((x, g), w)| x * g * w));
                let pull = dot * scale * scale * scale / n as f32;
                dx.extend(
                    row.iter()
                        .zip(g)
                        .zip(w)
                        .map(|((x, g), w)| g * w * scale - x * pull),
                );
                dw.iter_mut()
                    .zip(row)
                    .zip(g)
                    .for_each(|((dw, x), g)| *dw += x * scale * g);
            }
        })?;
        Ok((
            Some(Tensor::from_vec(dx, x.shape(), x.device())?),
            Some(Tensor::from_vec(dw, w.shape(), w.device())?),
        ))
    }
}

struct Gate {
    /// `silu` where true, else `sigmoid`.
    silu: bool,
}

impl Gate {
    /// The gate's value and its slope.
    fn at(&self, a: f32) -> (f32, f32) {
        let s = 1. / (1. + (-a).exp());
        if self.silu {
            (a * s, s * (1. + a * (1. - s)))
        } else {
            (s, s * (1. - s))
        }
    }
}

impl CustomOp2 for Gate {
    fn name(&self) -> &'static str {
        "gate"
    }

    fn cpu_fwd(
        &self,
        a: &CpuStorage,
        la: &Layout,
        b: &CpuStorage,
        lb: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let out = slice(a, la)?
            .iter()
            .zip(slice(b, lb)?)
            .map(|(&a, b)| self.at(a).0 * b)
            .collect();
        Ok((CpuStorage::F32(out), la.shape().clone()))
    }

    fn bwd(
        &self,
        a: &Tensor,
        b: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (mut da, mut db) = (
            Vec::with_capacity(a.elem_count()),
            Vec::with_capacity(a.elem_count()),
        );
        read([a, b, gradient], |[a, b, g]| {
            for ((&a, b), g) in a.iter().zip(b).zip(g) {
                let (value, slope) = self.at(a);
                da.push(g * b * slope);
                db.push(g * value);
            }
        })?;
        Ok((
            Some(Tensor::from_vec(da, a.shape(), a.device())?),
            Some(Tensor::from_vec(db, b.shape(), b.device())?),
        ))
    }
}

struct ConvolveSilu;

impl ConvolveSilu {
    /// The convolution before `silu`.
    fn linear(x: &[f32], taps: &[f32], time: usize, channels: usize) -> Vec<f32> {
        let mut out = vec![0f32; x.len()];
        for (out, x) in out
            .chunks_exact_mut(time * channels)
            .zip(x.chunks_exact(time * channels))
        {
            for (tap, taps) in taps.chunks_exact(channels).enumerate() {
                let late = (TAPS - 1 - tap) * channels;
                for (out, x) in out[late..]
                    .chunks_exact_mut(channels)
                    .zip(x.chunks_exact(channels))
                {
                    out.iter_mut()
                        .zip(x)
                        .zip(taps)
                        .for_each(|((out, x), tap)| *out += x * tap);
                }
            }
        }
        out
    }
}

impl CustomOp2 for ConvolveSilu {
    fn name(&self) -> &'static str {
        "causal-convolution-silu"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        lx: &Layout,
        taps: &CpuStorage,
        lt: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (_, time, channels) = lx.shape().dims3()?;
        let mut out = Self::linear(slice(x, lx)?, slice(taps, lt)?, time, channels);
        out.iter_mut().for_each(|u| *u *= 1. / (1. + (-*u).exp()));
        Ok((CpuStorage::F32(out), lx.shape().clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        taps: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (_, time, channels) = x.dims3()?;
        let (mut dx, mut dt) = (vec![0f32; x.elem_count()], vec![0f32; taps.elem_count()]);
        read([x, taps, gradient], |[x, taps, g]| {
            let mut du = Self::linear(x, taps, time, channels);
            du.iter_mut()
                .zip(g)
                .for_each(|(u, g)| *u = g * Gate { silu: true }.at(*u).1);
            let block = time * channels;
            for ((dx, x), du) in dx
                .chunks_exact_mut(block)
                .zip(x.chunks_exact(block))
                .zip(du.chunks_exact(block))
            {
                for (tap, (taps, dt)) in taps
                    .chunks_exact(channels)
                    .zip(dt.chunks_exact_mut(channels))
                    .enumerate()
                {
                    let late = (TAPS - 1 - tap) * channels;
                    for ((dx, x), du) in dx
                        .chunks_exact_mut(channels)
                        .zip(x.chunks_exact(channels))
                        .zip(du[late..].chunks_exact(channels))
                    {
                        dx.iter_mut()
                            .zip(du)
                            .zip(taps)
                            .for_each(|((dx, du), tap)| *dx += du * tap);
                        dt.iter_mut()
                            .zip(du)
                            .zip(x)
                            .for_each(|((dt, du), x)| *dt += du * x);
                    }
                }
            }
        })?;
        Ok((
            Some(Tensor::from_vec(dx, x.shape(), x.device())?),
            Some(Tensor::from_vec(dt, taps.shape(), taps.device())?),
        ))
    }
}

struct CausalSoftmax {
    scale: f32,
}

impl CustomOp1 for CausalSoftmax {
    fn name(&self) -> &'static str {
        "causal-softmax"
    }

    fn cpu_fwd(&self, scores: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let scores = slice(scores, layout)?;
        let t = layout.dims().last().copied().unwrap_or(1);
        let mut out = vec![0f32; scores.len()];
        for (i, (out, row)) in out
            .chunks_exact_mut(t)
            .zip(scores.chunks_exact(t))
            .enumerate()
        {
            let (out, row) = (&mut out[..=i % t], &row[..=i % t]);
            let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            out.iter_mut()
                .zip(row)
                .for_each(|(out, x)| *out = ((x - max) * self.scale).exp());
            let share = 1. / sum(out.iter().copied());
            out.iter_mut().for_each(|out| *out *= share);
        }
        Ok((CpuStorage::F32(out), layout.shape().clone()))
    }

    fn bwd(&self, scores: &Tensor, result: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let t = scores.dim(candle_core::D::Minus1)?;
        let mut out = vec![0f32; scores.elem_count()];
        read([result, gradient], |[p, g]| {
            for (i, ((out, p), g)) in out
                .chunks_exact_mut(t)
                .zip(p.chunks_exact(t))
                .zip(g.chunks_exact(t))
                .enumerate()
            {
                let (p, g) = (&p[..=i % t], &g[..=i % t]);
                let mean: f32 = sum(p.iter().zip(g).map(|(p, g)| p * g));
                out.iter_mut()
                    .zip(p)
                    .zip(g)
                    .for_each(|((out, p), g)| *out = p * (g - mean) * self.scale);
            }
        })?;
        Ok(Some(Tensor::from_vec(
            out,
            scores.shape(),
            scores.device(),
        )?))
    }
}

fn inverse_rms(row: &[f32]) -> f32 {
    let squares = sum(row.iter().map(|x| x * x));
    1. / (squares / row.len() as f32 + EPSILON as f32).sqrt()
}

/// A sum in eight lanes, which the compiler may keep in one register.
fn sum(values: impl Iterator<Item = f32>) -> f32 {
    let mut lanes = [0f32; 8];
    values.enumerate().for_each(|(i, x)| lanes[i % 8] += x);
    lanes.iter().sum()
}

fn slice<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    match layout.contiguous_offsets() {
        Some((from, to)) => Ok(&storage.as_slice::<f32>()?[from..to]),
        None => candle_core::bail!("a fused operation needs contiguous input"),
    }
}

/// Lends the values of `tensors` to `f`.
fn read<const N: usize, R>(tensors: [&Tensor; N], f: impl FnOnce([&[f32]; N]) -> R) -> Result<R> {
    let tensors = tensors.map(Tensor::contiguous);
    let mut owned = Vec::with_capacity(N);
    for tensor in tensors {
        owned.push(tensor?);
    }
    let held: Vec<_> = owned.iter().map(Tensor::storage_and_layout).collect();
    let mut slices: [&[f32]; N] = [&[]; N];
    for (to, (storage, layout)) in slices.iter_mut().zip(&held) {
        let Storage::Cpu(storage) = &**storage else {
            candle_core::bail!("a fused operation runs on the CPU only")
        };
        *to = slice(storage, layout)?;
    }
    Ok(f(slices))
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;

    fn noise(shape: &[usize], seed: u64) -> Var {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let values: Vec<f32> = (0..shape.iter().product())
            .map(|_| rng.random_range(-1.5..1.5))
            .collect();
        Var::from_tensor(&Tensor::from_vec(values, shape, &Device::Cpu).unwrap()).unwrap()
    }

    /// Compares the gradient of a fixed random projection of `f` with finite differences.
    fn check(inputs: &[Var], f: impl Fn(&[Tensor]) -> Tensor) {
        let tensors: Vec<Tensor> = inputs.iter().map(|v| v.as_tensor().clone()).collect();
        let along = noise(f(&tensors).dims(), 99).as_tensor().detach();
        let value = |tensors: &[Tensor]| (f(tensors) * &along).unwrap().sum_all().unwrap();
        let gradients = value(&tensors).backward().unwrap();
        for (which, input) in inputs.iter().enumerate() {
            let gradient = gradients
                .get(input)
                .unwrap()
                .flatten_all()
                .unwrap()
                .to_vec1::<f32>()
                .unwrap();
            let values = input.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            for i in (0..values.len()).step_by(7) {
                let at = |step: f32| {
                    let mut values = values.clone();
                    values[i] += step;
                    let mut tensors = tensors.clone();
                    tensors[which] = Tensor::from_vec(values, input.shape(), &Device::Cpu).unwrap();
                    value(&tensors).to_scalar::<f32>().unwrap()
                };
                let slope = (at(0.01) - at(-0.01)) / 0.02;
                assert!(
                    (slope - gradient[i]).abs() < 4e-3 * (1. + slope.abs()),
                    "input {which}, element {i}: {slope} is not {}",
                    gradient[i]
                );
            }
        }
    }

    #[test]
    fn each_gradient_is_the_slope() {
        check(&[noise(&[3, 16], 1), noise(&[16], 2)], |x| {
            rms(&x[0], &x[1]).unwrap()
        });
        check(&[noise(&[3, 16], 3), noise(&[3, 16], 4)], |x| {
            silu_times(&x[0], &x[1]).unwrap()
        });
        check(&[noise(&[3, 16], 5), noise(&[3, 16], 6)], |x| {
            sigmoid_times(&x[0], &x[1]).unwrap()
        });
        check(&[noise(&[2, 9, 5], 7), noise(&[TAPS, 5], 8)], |x| {
            convolve_silu(&x[0], &x[1]).unwrap()
        });
        check(&[noise(&[2, 6, 6], 9)], |x| {
            causal_softmax(&x[0], 0.7).unwrap()
        });
    }

    #[test]
    fn the_last_tap_meets_the_newest_sample() {
        let x = Tensor::new(&[[[1f32], [2.], [3.], [4.], [5.]]], &Device::Cpu).unwrap();
        let taps = Tensor::new(&[[1000f32], [100.], [10.], [1.]], &Device::Cpu).unwrap();
        let got = convolve_silu(&x, &taps)
            .unwrap()
            .flatten_all()
            .unwrap()
            .to_vec1::<f32>()
            .unwrap();
        for (got, want) in got.iter().zip([1f32, 12., 123., 1234., 2345.]) {
            assert!((got - want / (1. + (-want).exp())).abs() < 1e-3);
        }
    }
}
