//! Kernels written by hand, in one table for each instruction set.

use candle_core::quantized::GgmlDType;

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use super::flash_tiles;
#[cfg(target_arch = "aarch64")]
use super::neon;
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512, delta512, flash512, four_rows};
use super::{
    delta_steps::{DIM, Steps, TOKENS_TOGETHER},
    flash_walk::{LANES, Walk},
    isa::Isa,
    rows::Rows,
};

/// The kernels of one instruction set. Where one is absent the portable form is used, which has the same bits.
///
/// The machine has to have the set for each of them; what they compute is said where they are used.
pub(super) struct Kernels {
    /// Products of quantised rows.
    products: &'static [(GgmlDType, Product)],
    pub(super) dot_f32: Option<Dot>,
    pub(super) widen: Option<Widen>,
    pub(super) turn: Option<Turn>,
    pub(super) score: Option<Score>,
    /// With what the elements of a head have to be a multiple of.
    pub(super) weigh: Option<(Weigh, usize)>,
    pub(super) delta: Option<Delta>,
}

type Product = unsafe fn(&Rows<'_>);
type Dot = unsafe fn(&[f32], &[f32]) -> f32;
type Widen = unsafe fn(&[u16], &mut [f32]);
type Turn = unsafe fn(&[f32], usize, &mut [f32]);
type Score = unsafe fn(&[Walk<'_>], &[f32], usize, &mut [f32]);
type Delta = unsafe fn(&mut [f32], &Steps<'_>, &mut [[f32; DIM]; TOKENS_TOGETHER]);
type Weigh = unsafe fn(&mut [Walk<'_>], &[f32], &[f32]);

impl Kernels {
    pub(super) const fn of(isa: Isa) -> &'static Self {
        match isa {
            Isa::Baseline => &BASELINE,
            #[cfg(target_arch = "aarch64")]
            Isa::Dotprod => &DOTPROD,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => &AVX2,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => &AVX512,
        }
    }

    /// Multiplies rows of weights in `dtype`.
    pub(super) fn product(&self, dtype: GgmlDType) -> Option<Product> {
        let found = self.products.iter().find(|(of, _)| *of == dtype);
        found.map(|(_, product)| *product)
    }
}

const BASELINE: Kernels = Kernels {
    products: &[],
    dot_f32: None,
    widen: None,
    turn: None,
    score: None,
    weigh: None,
    delta: None,
};

#[cfg(target_arch = "aarch64")]
static DOTPROD: Kernels = Kernels {
    products: &[
        (GgmlDType::Q4K, neon::rows_q4k),
        (GgmlDType::Q5K, neon::rows_q5k),
        (GgmlDType::Q6K, neon::rows_q6k),
        (GgmlDType::Q8_0, neon::rows_q8_0),
        (GgmlDType::Q4_0, neon::rows_q4_0),
    ],
    turn: Some(flash_tiles::turn),
    score: Some(flash_tiles::score),
    weigh: Some((flash_tiles::weigh, LANES)),
    ..BASELINE
};

#[cfg(target_arch = "x86_64")]
static AVX2: Kernels = Kernels {
    products: &[
        (GgmlDType::Q4K, avx2::rows_q4k),
        (GgmlDType::Q5K, avx2::rows_q5k),
        (GgmlDType::Q6K, avx2::rows_q6k),
        (GgmlDType::Q8_0, avx2::rows_q8_0),
        (GgmlDType::Q4_0, avx2::rows_q4_0),
    ],
    turn: Some(flash_tiles::turn),
    score: Some(flash_tiles::score),
    weigh: Some((flash_tiles::weigh, LANES)),
    ..BASELINE
};

#[cfg(target_arch = "x86_64")]
static AVX512: Kernels = Kernels {
    products: &[
        (GgmlDType::Q4K, four_rows::rows_q4k),
        (GgmlDType::Q5K, avx512::rows_q5k),
        (GgmlDType::Q6K, avx512::rows_q6k),
        (GgmlDType::Q8_0, avx512::rows_q8_0),
        (GgmlDType::Q4_0, avx512::rows_q4_0),
    ],
    dot_f32: Some(avx512::dot_f32),
    widen: Some(flash512::widen),
    turn: Some(flash512::turn),
    score: Some(flash512::score),
    weigh: Some((flash512::weigh, 1)),
    delta: Some(delta512::apply),
};
