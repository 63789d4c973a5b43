//! A small `qwen35` language model with gradients: Gated DeltaNet layers, and full attention in each fourth layer.
//!
//! Weights are kept in the shapes that are easiest to train; `export.rs` joins them into the tensors of the file format.
//! Norm weights are the factors themselves, which is how the format stores them as well.
//! Only operations that carry a gradient are used; [`CrossEntropy`] and those of `fused.rs` bring their own.

use std::collections::BTreeMap;

use candle_core::{CpuStorage, CustomOp1, D, Device, Layout, Result, Shape, Tensor, Var};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::fused::{EPSILON, TAPS, causal_softmax, convolve_silu, rms, sigmoid_times, silu_times};

/// Width of the residual stream.
pub(crate) const WIDTH: usize = 256;
/// Hidden width of the feed-forward part.
pub(crate) const HIDDEN: usize = 256;
/// Number of layers.
pub(crate) const LAYERS: usize = 8;
/// Layer `i` attends when `(i + 1) % ATTENTION_INTERVAL == 0`.
pub(crate) const ATTENTION_INTERVAL: usize = 4;
/// Query heads of an attention layer.
pub(crate) const HEADS: usize = 4;
/// Key and value heads of an attention layer.
pub(crate) const KV_HEADS: usize = 2;
/// Elements of a head of an attention layer.
pub(crate) const HEAD: usize = 128;
/// Elements of a head that are rotated.
pub(crate) const ROTARY: usize = 32;
/// Base of the rotation's wavelengths.
pub(crate) const ROTARY_BASE: f64 = 1e7;
/// Query and key heads of a Gated DeltaNet layer.
pub(crate) const KEY_HEADS: usize = 2;
/// Value heads of a Gated DeltaNet layer; head `h` reads key head `h % KEY_HEADS`.
pub(crate) const VALUE_HEADS: usize = 4;
/// Elements of a head of a Gated DeltaNet layer.
pub(crate) const STATE: usize = 64;
/// Tokens that the delta rule handles at once.
pub(crate) const CHUNK: usize = 64;

/// The weights by name.
pub(crate) struct Model {
    /// Sorted by name, which fixes the order in which they are drawn and updated.
    pub(crate) weights: BTreeMap<String, Var>,
    device: Device,
}

/// Whether layer `i` is one of full attention.
pub(crate) const fn attends(layer: usize) -> bool {
    (layer + 1).is_multiple_of(ATTENTION_INTERVAL)
}

impl Model {
    /// Weights drawn from `seed`. candle's own CPU generator cannot be seeded.
    pub(crate) fn new(vocabulary: usize, seed: u64) -> Result<Self> {
        let mut weights = BTreeMap::new();
        let mut add = |name: String, shape: &[usize], start: Start| {
            weights.insert(name, (shape.to_vec(), start));
        };
        add(
            "embedding".into(),
            &[vocabulary, WIDTH],
            Start::Normal(0.03),
        );
        add("norm".into(), &[WIDTH], Start::Constant(1.));
        // what is added to the residual stream starts small
        let (inner, outer) = (
            Start::Normal(0.05),
            Start::Normal(0.05 / (2. * LAYERS as f32).sqrt()),
        );
        for i in 0..LAYERS {
            let mut add = |name: &str, shape: &[usize], start: Start| {
                add(format!("{i}.{name}"), shape, start);
            };
            add("norm1", &[WIDTH], Start::Constant(1.));
            add("norm2", &[WIDTH], Start::Constant(1.));
            add("gate", &[HIDDEN, WIDTH], inner);
            add("up", &[HIDDEN, WIDTH], inner);
            add("down", &[WIDTH, HIDDEN], outer);
            if attends(i) {
                add("q", &[HEADS * HEAD, WIDTH], inner);
                add("z", &[HEADS * HEAD, WIDTH], inner);
                add("k", &[KV_HEADS * HEAD, WIDTH], inner);
                add("v", &[KV_HEADS * HEAD, WIDTH], inner);
                add("out", &[WIDTH, HEADS * HEAD], outer);
                add("q_norm", &[HEAD], Start::Constant(1.));
                add("k_norm", &[HEAD], Start::Constant(1.));
            } else {
                for (name, rows) in [
                    ("q", KEY_HEADS * STATE),
                    ("k", KEY_HEADS * STATE),
                    ("v", VALUE_HEADS * STATE),
                ] {
                    add(name, &[rows, WIDTH], inner);
                    add(&format!("{name}_conv"), &[TAPS, rows], Start::Uniform(0.5));
                }
                add("z", &[VALUE_HEADS * STATE, WIDTH], inner);
                add("alpha", &[VALUE_HEADS, WIDTH], Start::Normal(0.02));
                add("beta", &[VALUE_HEADS, WIDTH], Start::Normal(0.02));
                add("dt", &[VALUE_HEADS], Start::Constant(-1.));
                add("a_log", &[VALUE_HEADS], Start::Decays);
                add("o_norm", &[STATE], Start::Constant(1.));
                add("out", &[WIDTH, VALUE_HEADS * STATE], outer);
            }
        }
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let device = Device::Cpu;
        let weights = weights
            .into_iter()
            .map(|(name, (shape, start))| {
                let values: Vec<f32> = (0..shape.iter().product())
                    .map(|i| start.draw(i, &mut rng))
                    .collect();
                Ok((
                    name,
                    Var::from_tensor(&Tensor::from_vec(values, shape, &device)?)?,
                ))
            })
            .collect::<Result<_>>()?;
        Ok(Self { weights, device })
    }

    /// Number of parameters.
    pub(crate) fn parameters(&self) -> usize {
        self.weights.values().map(|w| w.elem_count()).sum()
    }

    /// Final hidden states `[batch × time, WIDTH]` of token ids `[batch, time]`; `time` is a multiple of [`CHUNK`].
    pub(crate) fn hidden(&self, ids: &Tensor) -> Result<Tensor> {
        let (b, t) = ids.dims2()?;
        let tables = Tables::new(t, &self.device)?;
        let mut x = self.w("embedding")?.index_select(&ids.flatten_all()?, 0)?;
        for i in 0..LAYERS {
            let layer = Layer {
                model: self,
                index: i,
            };
            let y = rms(&x, &layer.w("norm1")?)?;
            let y = if attends(i) {
                layer.attention(&y, b, t, &tables)?
            } else {
                layer.delta_net(&y, b, t)?
            };
            x = (x + y)?;
            let y = rms(&x, &layer.w("norm2")?)?;
            let y = silu_times(
                &linear(&y, &layer.w("gate")?)?,
                &linear(&y, &layer.w("up")?)?,
            )?;
            x = (x + linear(&y, &layer.w("down")?)?)?;
        }
        rms(&x, &self.w("norm")?)
    }

    /// Logits `[rows, vocabulary]` of hidden states `[rows, WIDTH]`; the head is the embedding.
    pub(crate) fn head(&self, hidden: &Tensor) -> Result<Tensor> {
        linear(hidden, &self.w("embedding")?)
    }

    fn w(&self, name: &str) -> Result<Tensor> {
        match self.weights.get(name) {
            Some(var) => Ok(var.as_tensor().clone()),
            None => candle_core::bail!("no weight `{name}`"),
        }
    }
}

struct Layer<'a> {
    model: &'a Model,
    index: usize,
}

impl Layer<'_> {
    fn w(&self, name: &str) -> Result<Tensor> {
        self.model.w(&format!("{}.{name}", self.index))
    }

    fn attention(&self, x: &Tensor, b: usize, t: usize, tables: &Tables) -> Result<Tensor> {
        let heads = |name: &str, n: usize| linear(x, &self.w(name)?)?.reshape((b, t, n, HEAD));
        let q = tables.rotate(&rms(&heads("q", HEADS)?, &self.w("q_norm")?)?)?;
        let k = tables.rotate(&rms(&heads("k", KV_HEADS)?, &self.w("k_norm")?)?)?;
        let group = HEADS / KV_HEADS;
        // query heads that share a key head stand above each other
        let q = q
            .reshape((b, t, KV_HEADS, group, HEAD))?
            .permute((0, 2, 3, 1, 4))?
            .contiguous()?
            .reshape((b * KV_HEADS, group * t, HEAD))?;
        let k = k
            .permute((0, 2, 3, 1))?
            .contiguous()?
            .reshape((b * KV_HEADS, HEAD, t))?;
        let v = heads("v", KV_HEADS)?
            .transpose(1, 2)?
            .contiguous()?
            .reshape((b * KV_HEADS, t, HEAD))?;
        let y = causal_softmax(&q.matmul(&k)?, 1. / (HEAD as f32).sqrt())?.matmul(&v)?;
        let y = y
            .reshape((b, KV_HEADS, group, t, HEAD))?
            .permute((0, 3, 1, 2, 4))?
            .contiguous()?
            .reshape((b * t, HEADS * HEAD))?;
        linear(
            &sigmoid_times(&linear(x, &self.w("z")?)?, &y)?,
            &self.w("out")?,
        )
    }

    fn delta_net(&self, x: &Tensor, b: usize, t: usize) -> Result<Tensor> {
        let mixed = |name: &str| {
            let u = linear(x, &self.w(name)?)?;
            let n = u.dim(1)?;
            convolve_silu(&u.reshape((b, t, n))?, &self.w(&format!("{name}_conv"))?)
        };
        let q =
            (l2(&mixed("q")?.reshape((b, t, KEY_HEADS, STATE))?)? * (1. / (STATE as f64).sqrt()))?;
        let k = l2(&mixed("k")?.reshape((b, t, KEY_HEADS, STATE))?)?;
        let v = mixed("v")?.reshape((b, t, VALUE_HEADS, STATE))?;
        let beta = sigmoid(&linear(x, &self.w("beta")?)?)?.reshape((b, t, VALUE_HEADS))?;
        let dt = softplus(&linear(x, &self.w("alpha")?)?.broadcast_add(&self.w("dt")?)?)?;
        let g = dt
            .broadcast_mul(&self.w("a_log")?.exp()?.neg()?)?
            .reshape((b, t, VALUE_HEADS))?;
        let o = delta_rule(&q, &k, &v, &g, &beta)?;
        let o = rms(&o, &self.w("o_norm")?)?.reshape((b * t, VALUE_HEADS * STATE))?;
        linear(
            &silu_times(&linear(x, &self.w("z")?)?, &o)?,
            &self.w("out")?,
        )
    }
}

/// The gated delta rule from an empty state, in chunks.
///
/// `q`, `k` are `[batch, time, KEY_HEADS, STATE]`, `v` and the result `[batch, time, VALUE_HEADS, STATE]`, `g` (the logarithm of the
/// decay) and `beta` `[batch, time, VALUE_HEADS]`. With `G` the running sum of `g` in the chunk and `D_ij = exp(G_i − G_j)` for
/// `i ≥ j`, the corrected values of a chunk solve `(I + A) V' = β (V − K S ⊙ exp G)` where `A` is the strict lower part of
/// `(β K) Kᵀ ⊙ D`. As `A` is nilpotent, `(I + A)⁻¹ = (I − A)(I + A²)(I + A⁴)…` ends after `log2 CHUNK` factors. What a chunk does
/// to the state is linear, so only the product of small matrices remains to be done one chunk after the other.
///
/// The powers of `A` grow with the number of equal keys: for a chunk of one token repeated they reach 1e17, and nothing of the result
/// is right. Dialogues are far from that, and padding must stay so. An engine, which meets any text, solves `(I + A) x = y` by
/// substitution instead.
pub(crate) fn delta_rule(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    g: &Tensor,
    beta: &Tensor,
) -> Result<Tensor> {
    let (b, t, key_heads, state) = q.dims4()?;
    let heads = v.dim(2)?;
    let (n, c, share) = (t / CHUNK, CHUNK, heads / key_heads);
    let device = q.device();
    // chunks first, so that one chunk of a result is contiguous
    let chunked = |x: &Tensor, h: usize| {
        x.reshape((b, n, c, h, state))?
            .permute((1, 0, 3, 2, 4))?
            .contiguous()?
            .reshape((n * b * h, c, state))
    };
    let shared = |x: &Tensor| {
        let (_, rows, columns) = x.dims3()?;
        x.reshape((n * b, 1, key_heads, rows, columns))?
            .broadcast_as((n * b, share, key_heads, rows, columns))?
            .contiguous()?
            .reshape((n * b * heads, rows, columns))
    };
    let column = |x: &Tensor| {
        x.reshape((b, n, c, heads))?
            .permute((1, 0, 3, 2))?
            .contiguous()?
            .reshape((n * b * heads, c))
    };
    let (q, k) = (chunked(q, key_heads)?, chunked(k, key_heads)?);
    let v = chunked(v, heads)?;
    let k_t = k.transpose(1, 2)?.contiguous()?;
    let (kk, qk) = (shared(&k.matmul(&k_t)?)?, shared(&q.matmul(&k_t)?)?);
    let (q, k) = (shared(&q)?, shared(&k)?);

    let upper: Vec<f32> = (0..c * c)
        .map(|i| f32::from(u8::from(i / c <= i % c)))
        .collect();
    let sums = column(g)?.matmul(&Tensor::from_vec(upper, (c, c), device)?)?;
    let last = sums.narrow(1, c - 1, 1)?;
    let beta = column(beta)?.unsqueeze(2)?;
    // masked before the exponential, which would overflow above the diagonal
    let mask: Vec<f32> = (0..c * c)
        .map(|i| if i % c > i / c { -1e4 } else { 0. })
        .collect();
    let mask = Tensor::from_vec(mask, (c, c), device)?;
    let decay = sums
        .unsqueeze(2)?
        .broadcast_sub(&sums.unsqueeze(1)?)?
        .broadcast_add(&mask)?
        .exp()?;
    let strict: Vec<f32> = (0..c * c)
        .map(|i| f32::from(u8::from(i % c < i / c)))
        .collect();
    let strict = Tensor::from_vec(strict, (c, c), device)?;
    let a = (kk * &decay)?
        .broadcast_mul(&strict)?
        .broadcast_mul(&beta)?;

    let identity = Tensor::eye(c, candle_core::DType::F32, device)?;
    let mut inverse = a.neg()?.broadcast_add(&identity)?;
    let mut power = a;
    let mut covered = 2;
    while covered < c {
        power = power.matmul(&power)?;
        inverse = (&inverse + inverse.matmul(&power)?)?;
        covered *= 2;
    }
    let growth = sums.exp()?.unsqueeze(2)?;
    let values = inverse.matmul(&v.broadcast_mul(&beta)?)?;
    let keys = inverse.matmul(&k.broadcast_mul(&(beta * &growth)?)?)?;
    let rest = last.broadcast_sub(&sums)?.exp()?.unsqueeze(2)?;
    let k_t = k.broadcast_mul(&rest)?.transpose(1, 2)?.contiguous()?;

    let each = |x: Tensor| x.reshape((n, b * heads, state, state));
    let identity = Tensor::eye(state, candle_core::DType::F32, device)?;
    let carry = last
        .exp()?
        .unsqueeze(2)?
        .broadcast_mul(&identity.unsqueeze(0)?)?;
    let carry = each((carry - k_t.matmul(&keys)?)?)?;
    let enter = each(k_t.matmul(&values)?)?;
    let mut states = vec![Tensor::zeros(
        (b * heads, state, state),
        candle_core::DType::F32,
        device,
    )?];
    for i in 1..n {
        let before = &states[i - 1];
        let after = enter.get(i - 1)?;
        states.push(if i == 1 {
            after
        } else {
            (carry.get(i - 1)?.matmul(before)? + after)?
        });
    }
    let states = Tensor::cat(&states, 0)?;

    let values = (values - keys.matmul(&states)?)?;
    let o = (q.broadcast_mul(&growth)?.matmul(&states)? + (qk * decay)?.matmul(&values)?)?;
    o.reshape((n, b, heads, c, state))?
        .permute((1, 0, 3, 2, 4))?
        .contiguous()?
        .reshape((b, t, heads, state))
}

/// Weighted mean of −log softmax(logits)\[target\] over the rows.
pub(crate) struct CrossEntropy {
    /// Right token of each row.
    pub(crate) targets: Vec<u32>,
    /// Weight of each row.
    pub(crate) weights: Vec<f32>,
}

impl CrossEntropy {
    fn rows<'a>(&'a self, logits: &'a [f32]) -> impl Iterator<Item = (&'a [f32], usize, f32)> {
        let width = logits.len() / self.targets.len();
        logits
            .chunks_exact(width)
            .zip(&self.targets)
            .zip(&self.weights)
            .map(|((row, &target), &weight)| (row, target as usize, weight))
    }

    fn total(&self) -> f32 {
        self.weights.iter().sum::<f32>().max(1.)
    }
}

impl CustomOp1 for CrossEntropy {
    fn name(&self) -> &'static str {
        "weighted-cross-entropy"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let Some((from, to)) = layout.contiguous_offsets() else {
            candle_core::bail!("logits are not contiguous")
        };
        let logits = &storage.as_slice::<f32>()?[from..to];
        let sum: f64 = self
            .rows(logits)
            .filter(|(_, _, weight)| *weight > 0.)
            .map(|(row, target, weight)| {
                let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let sum: f32 = row.iter().map(|x| (x - max).exp()).sum();
                f64::from(weight * (sum.ln() + max - row[target]))
            })
            .sum();
        Ok((
            CpuStorage::F32(vec![(sum / f64::from(self.total())) as f32]),
            Shape::from(()),
        ))
    }

    fn bwd(&self, logits: &Tensor, _loss: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let scale = gradient.to_scalar::<f32>()? / self.total();
        let shape = logits.shape().clone();
        let logits = logits.flatten_all()?.to_vec1::<f32>()?;
        let mut out = Vec::with_capacity(logits.len());
        for (row, target, weight) in self.rows(&logits) {
            let start = out.len();
            let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            out.extend(row.iter().map(|x| (x - max).exp()));
            let factor = scale * weight / out[start..].iter().sum::<f32>();
            out[start..].iter_mut().for_each(|x| *x *= factor);
            out[start + target] -= scale * weight;
        }
        Ok(Some(Tensor::from_vec(out, shape, &Device::Cpu)?))
    }
}

/// Rotation angles for one length.
struct Tables {
    cos: Tensor,
    sin: Tensor,
    /// Takes each rotated element's partner, with the sign; zero for the rest of the head.
    partner: Tensor,
}

impl Tables {
    fn new(t: usize, device: &Device) -> Result<Self> {
        let half = ROTARY / 2;
        let angle = |position: usize, i: usize| {
            (position as f64 * ROTARY_BASE.powf(-2. * (i % half) as f64 / ROTARY as f64)) as f32
        };
        let table = |rotated: fn(f32) -> f32, rest: f32| -> Result<Tensor> {
            let values = (0..t * HEAD)
                .map(|at| {
                    if at % HEAD < ROTARY {
                        rotated(angle(at / HEAD, at % HEAD))
                    } else {
                        rest
                    }
                })
                .collect();
            Tensor::from_vec::<_, f32>(values, (1, t, 1, HEAD), device)
        };
        let mut partner = vec![0f32; HEAD * HEAD];
        for i in 0..half {
            partner[(i + half) * HEAD + i] = -1.;
            partner[i * HEAD + i + half] = 1.;
        }
        Ok(Self {
            cos: table(f32::cos, 1.)?,
            sin: table(f32::sin, 0.)?,
            partner: Tensor::from_vec(partner, (HEAD, HEAD), device)?,
        })
    }

    /// Rotates `[batch, time, heads, HEAD]`.
    fn rotate(&self, x: &Tensor) -> Result<Tensor> {
        let shape = x.dims4()?;
        let partners = x
            .reshape(((), HEAD))?
            .matmul(&self.partner)?
            .reshape(shape)?;
        x.broadcast_mul(&self.cos)? + partners.broadcast_mul(&self.sin)?
    }
}

#[derive(Clone, Copy)]
enum Start {
    Constant(f32),
    /// Heads that forget within three to a thousand tokens.
    Decays,
    Normal(f32),
    Uniform(f32),
}

impl Start {
    fn draw(self, index: usize, rng: &mut ChaCha8Rng) -> f32 {
        match self {
            Self::Constant(value) => value,
            // exp(a_log) × softplus(−1) is the decay per token
            Self::Decays => ([0.001_f32, 0.01, 0.05, 0.3][index % 4] / 0.3133).ln(),
            Self::Normal(deviation) => {
                let (a, b): (f32, f32) = (rng.random(), rng.random());
                (-2. * (1. - a).ln()).sqrt() * (std::f32::consts::TAU * b).cos() * deviation
            }
            Self::Uniform(limit) => rng.random_range(-limit..limit),
        }
    }
}

fn linear(x: &Tensor, w: &Tensor) -> Result<Tensor> {
    x.matmul(&w.t()?)
}

/// `x / sqrt(Σx² + ε)` over the last dimension.
fn l2(x: &Tensor) -> Result<Tensor> {
    let scale = (x.sqr()?.sum_keepdim(D::Minus1)? + EPSILON)?
        .sqrt()?
        .recip()?;
    x.broadcast_mul(&scale)
}

fn sigmoid(x: &Tensor) -> Result<Tensor> {
    (x.neg()?.exp()? + 1.)?.recip()
}

fn softplus(x: &Tensor) -> Result<Tensor> {
    // log(1 + e^x) = max(x, 0) + log(1 + e^-|x|)
    x.relu()? + (x.abs()?.neg()?.exp()? + 1.)?.log()?
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(shape: &[usize], rng: &mut ChaCha8Rng) -> Tensor {
        let values: Vec<f32> = (0..shape.iter().product())
            .map(|_| Start::Normal(1.).draw(0, rng))
            .collect();
        Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
    }

    #[test]
    fn the_chunked_delta_rule_equals_the_recurrence() {
        let mut rng = ChaCha8Rng::seed_from_u64(3);
        let (b, t) = (2, 4 * CHUNK);
        let q = l2(&noise(&[b, t, KEY_HEADS, STATE], &mut rng)).unwrap();
        let k = l2(&noise(&[b, t, KEY_HEADS, STATE], &mut rng)).unwrap();
        let v = noise(&[b, t, VALUE_HEADS, STATE], &mut rng);
        let g = (noise(&[b, t, VALUE_HEADS], &mut rng).sqr().unwrap() * -0.1).unwrap();
        let beta = sigmoid(&noise(&[b, t, VALUE_HEADS], &mut rng)).unwrap();
        let got = delta_rule(&q, &k, &v, &g, &beta)
            .unwrap()
            .flatten_all()
            .unwrap()
            .to_vec1::<f32>()
            .unwrap();
        let flat = |x: &Tensor| x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let (q, k, v, g, beta) = (flat(&q), flat(&k), flat(&v), flat(&g), flat(&beta));
        let mut worst = 0f32;
        for batch in 0..b {
            for head in 0..VALUE_HEADS {
                let mut s = vec![0f64; STATE * STATE];
                for step in batch * t..(batch + 1) * t {
                    let key = (step * KEY_HEADS + head % KEY_HEADS) * STATE;
                    let value = (step * VALUE_HEADS + head) * STATE;
                    let (decay, beta) = (
                        f64::from(g[step * VALUE_HEADS + head]).exp(),
                        f64::from(beta[step * VALUE_HEADS + head]),
                    );
                    s.iter_mut().for_each(|x| *x *= decay);
                    for j in 0..STATE {
                        let seen: f64 = (0..STATE)
                            .map(|i| s[i * STATE + j] * f64::from(k[key + i]))
                            .sum();
                        let delta = beta * (f64::from(v[value + j]) - seen);
                        (0..STATE).for_each(|i| s[i * STATE + j] += f64::from(k[key + i]) * delta);
                        let o: f64 = (0..STATE)
                            .map(|i| s[i * STATE + j] * f64::from(q[key + i]))
                            .sum();
                        worst = worst.max((o as f32 - got[value + j]).abs());
                    }
                }
            }
        }
        assert!(worst < 2e-5, "worst difference {worst}");
    }

    #[test]
    fn the_gradient_of_the_loss_is_its_slope() {
        let mut rng = ChaCha8Rng::seed_from_u64(4);
        let logits = Var::from_tensor(&noise(&[3, 7], &mut rng)).unwrap();
        let loss = |x: &Tensor| {
            x.apply_op1(CrossEntropy {
                targets: vec![1, 0, 6],
                weights: vec![1., 0.2, 1.],
            })
            .unwrap()
        };
        let gradient = loss(&logits)
            .backward()
            .unwrap()
            .get(&logits)
            .unwrap()
            .flatten_all()
            .unwrap()
            .to_vec1::<f32>()
            .unwrap();
        let values = logits.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        for i in 0..values.len() {
            let at = |step: f32| {
                let mut values = values.clone();
                values[i] += step;
                loss(&Tensor::from_vec(values, (3, 7), &Device::Cpu).unwrap())
                    .to_scalar::<f32>()
                    .unwrap()
            };
            let slope = (at(0.01) - at(-0.01)) / 0.02;
            assert!(
                (slope - gradient[i]).abs() < 1e-3,
                "{slope} is not {}",
                gradient[i]
            );
        }
    }
}
