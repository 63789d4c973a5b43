//! Random weights of synthetic models, for tests and benchmarks.
//!
//! Quantised weights are drawn as blocks instead of being quantised from floats: random quants with a suitable scale
//! serve equally well, and a gigabyte takes seconds instead of minutes. The same seed gives the same file.

use std::{
    fs::File,
    io::{self, BufWriter, Write},
    path::Path,
};

use cotenant_engine::{
    gguf::GgmlDType,
    spec::Architecture,
    synthetic::{ALIGNMENT, Draw, Entry, Gemma4, Synthetic, Tensor, TypeMix, header_of},
};

/// Models with weights.
pub trait Weights: Sized {
    /// Returns a model of `architecture` that a test computes in milliseconds, with rows of 256 elements, a multiple of
    /// every type's block.
    fn tiny(architecture: Architecture, types: TypeMix, seed: u64) -> Self;

    /// Writes the model to `path`.
    ///
    /// # Errors
    /// If the file cannot be written.
    fn write(&self, path: &Path) -> io::Result<()>;
}

impl Weights for Synthetic {
    fn tiny(architecture: Architecture, types: TypeMix, seed: u64) -> Self {
        Self {
            architecture,
            layers: 4,
            width: 256,
            feed_forward: 256,
            heads: 4,
            kv_heads: 2,
            // Half of it where layers have a window, in rows that are still a multiple of 256.
            head_dim: match architecture {
                Architecture::Gemma4 => 128,
                _ => 64,
            },
            rotary: match architecture {
                Architecture::Gemma4 => 128,
                Architecture::Qwen35 | Architecture::Qwen35Moe | Architecture::StableLm => 16,
                Architecture::Phi3 => 48,
                _ => 64,
            },
            rotary_base: 10_000.0,
            // Few tokens, so that windows matter in short tests.
            windows: match architecture {
                Architecture::Gemma2
                | Architecture::Gemma3
                | Architecture::Gemma4
                | Architecture::GptOss => (6, 2),
                Architecture::Olmo2 => (6, 4),
                _ => (0, 0),
            },
            recurrent: (2, 4, 64),
            experts: match architecture {
                Architecture::GptOss
                | Architecture::Lfm2Moe
                | Architecture::NemotronHMoe
                | Architecture::Qwen3Moe
                | Architecture::Qwen35Moe
                | Architecture::Qwen3VlMoe => (8, 2),
                _ => (0, 0),
            },
            gemma4: match architecture {
                Architecture::Gemma4 => Gemma4 {
                    layer_inputs: 256,
                    borrowing: 2,
                    doubled: true,
                    local_kv_heads: 2,
                },
                _ => Gemma4::NONE,
            },
            vocabulary: 320,
            context_max: 4096,
            tied: !matches!(
                architecture,
                Architecture::GptOss
                    | Architecture::Llama
                    | Architecture::Mistral3
                    | Architecture::NemotronH
                    | Architecture::NemotronHMoe
                    | Architecture::Olmo2
                    | Architecture::StableLm
            ),
            nextn: 0,
            types,
            seed,
        }
    }

    fn write(&self, path: &Path) -> io::Result<()> {
        write_part(
            path,
            &self.metadata(),
            &self.tensors(),
            &mut Random(self.seed),
        )
    }
}

/// Writes a file with some tensors.
pub fn write_part(
    path: &Path,
    entries: &[(String, Entry)],
    tensors: &[Tensor],
    random: &mut Random,
) -> io::Result<()> {
    let mut out = BufWriter::with_capacity(1 << 20, File::create(path)?);
    let (header, _) = header_of(entries, tensors);
    out.write_all(&header)?;
    let mut row = Vec::new();
    for tensor in tensors {
        let mut written = 0u64;
        for _ in 0..tensor.rows {
            row.clear();
            draw(tensor, random, &mut row);
            out.write_all(&row)?;
            written += row.len() as u64;
        }
        let padding = written.next_multiple_of(ALIGNMENT) - written;
        out.write_all(vec![0u8; usize::try_from(padding).unwrap_or(0)].as_slice())?;
    }
    out.flush()
}

/// Draws one row.
fn draw(tensor: &Tensor, random: &mut Random, out: &mut Vec<u8>) {
    #[expect(clippy::cast_precision_loss, reason = "columns are far below 2^24")]
    let size = 1.0 / (tensor.columns as f32).sqrt();
    let blocks = tensor.columns as usize / tensor.dtype.block_size();
    for _ in 0..blocks {
        match tensor.dtype {
            GgmlDType::F32 => {
                let value = match tensor.draw {
                    Draw::Bias => random.spread() * 0.3,
                    Draw::Decay => -0.55 - 0.5 * random.spread(),
                    Draw::Factors => 4.5 + 3.5 * random.spread(),
                    Draw::Matrix => random.spread() * size * SQRT_3,
                    Draw::Norm => 1.0 + 0.1 * random.spread(),
                };
                out.extend_from_slice(&value.to_le_bytes());
            }
            GgmlDType::F16 => put_half(out, random.spread() * size * SQRT_3),
            GgmlDType::BF16 => {
                let value = half::bf16::from_f32(random.spread() * size * SQRT_3);
                out.extend_from_slice(&value.to_bits().to_le_bytes());
            }
            // In all arms below: a scale for which the spread of the whole block is `size`, then random quants.
            GgmlDType::Q8_0 => {
                put_half(out, size / 73.9);
                random.fill(out, 32);
            }
            GgmlDType::Q4_0 => {
                put_half(out, size / 4.6);
                random.fill(out, 16);
            }
            GgmlDType::Q5_0 => {
                put_half(out, size / 9.2);
                random.fill(out, 20);
            }
            GgmlDType::Q4_1 | GgmlDType::Q5_1 => {
                let (spread, middle, bytes) = match tensor.dtype {
                    GgmlDType::Q4_1 => (4.6, 7.5, 16),
                    _ => (9.2, 15.5, 20),
                };
                put_half(out, size / spread);
                put_half(out, -size / spread * middle);
                random.fill(out, bytes);
            }
            GgmlDType::Q2K => {
                // Equal 4-bit scales and minimums, so that quants are around 1.5.
                for _ in 0..16 {
                    let scale = random.between(8, 16);
                    out.push(scale | (scale << 4));
                }
                random.fill(out, 64);
                put_half(out, size / (1.12 * 11.7));
                put_half(out, 1.5 * size / (1.12 * 11.7));
            }
            GgmlDType::Q3K => {
                random.fill(out, 32 + 64 + 12);
                put_half(out, size / (2.3 * 18.6));
            }
            GgmlDType::Q4K | GgmlDType::Q5K => {
                // value = d·s·q − dmin·m with m = s, and dmin chosen so that values are around zero.
                let five = tensor.dtype == GgmlDType::Q5K;
                let (spread, middle) = if five { (9.2, 15.5) } else { (4.6, 7.5) };
                let scale = size / (spread * 48.0);
                put_half(out, scale);
                put_half(out, scale * middle);
                out.extend_from_slice(&random.packed_scales());
                random.fill(out, if five { 160 } else { 128 });
            }
            GgmlDType::IQ4NL => {
                put_half(out, size / 67.4);
                random.fill(out, 16);
            }
            GgmlDType::IQ4XS => {
                // 6-bit scales, stored with an offset of 32.
                put_half(out, size / (67.4 * 18.5));
                random.fill(out, 6 + 128);
            }
            GgmlDType::MXFP4 => {
                // Nearest power of two: the spread of the doubled values is 5.9.
                let exponent = 128.0 + (size / 5.9).log2().round();
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "rows have fewer than 2^100 columns"
                )]
                out.push(exponent as u8);
                random.fill(out, 16);
            }
            GgmlDType::Q6K => {
                random.fill(out, 192);
                for _ in 0..16 {
                    out.push(random.between(32, 96));
                }
                put_half(out, size / (18.5 * 66.0));
            }
        }
    }
}

fn put_half(out: &mut Vec<u8>, value: f32) {
    out.extend_from_slice(&half::f16::from_f32(value).to_bits().to_le_bytes());
}

/// SplitMix64 generator: small, fast, and identical on all platforms.
pub struct Random(pub u64);

impl Random {
    const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a value between -1 and 1.
    #[expect(clippy::cast_precision_loss, reason = "24 bits fit")]
    fn spread(&mut self) -> f32 {
        (self.next() >> 40) as f32 / 8_388_608.0 - 1.0
    }

    #[expect(
        clippy::cast_possible_truncation,
        reason = "the remainder is below 256"
    )]
    const fn between(&mut self, low: u8, high: u8) -> u8 {
        low + (self.next() % (high - low) as u64) as u8
    }

    fn fill(&mut self, out: &mut Vec<u8>, mut bytes: usize) {
        while bytes > 0 {
            let word = self.next().to_le_bytes();
            let count = bytes.min(word.len());
            out.extend(word.iter().take(count));
            bytes -= count;
        }
    }

    /// Returns eight 6-bit scales from 32 to 63, with equal minimums, packed as in K-quants.
    fn packed_scales(&mut self) -> [u8; 12] {
        let scales: [u8; 8] = std::array::from_fn(|_| self.between(32, 64));
        let mut packed = [0u8; 12];
        let (low, high) = scales.split_at(4);
        for (index, (low, high)) in low.iter().zip(high).enumerate() {
            let top = (high >> 4) << 6;
            if let [scale, _, _, _, min, _, _, _, both, ..] =
                packed.get_mut(index..).unwrap_or_default()
            {
                *scale = low | top;
                *min = low | top;
                *both = (high & 15) | (high << 4);
            }
        }
        packed
    }
}

const SQRT_3: f32 = 1.732_050_8;
