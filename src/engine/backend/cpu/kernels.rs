//! Hand-written kernels, in one table per instruction set.

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use super::flash_tiles;
#[cfg(target_arch = "x86_64")]
use super::{
    avx512, delta512, few512, flash512, floats, four_rows, pairs512,
    rows256::{small_rows, super_rows},
    set256, unpack256 as u,
};
use super::{
    delta_steps::{DIM, Steps, TOKENS_TOGETHER},
    flash_walk::{LANES, Walk},
    isa::Isa,
    rows::Rows,
};
#[cfg(target_arch = "aarch64")]
use super::{floats, neon};
use crate::gguf::GgmlDType;

/// The kernels of one instruction set. An absent one is replaced by the portable form, which has the same bits.
///
/// Calling a kernel requires that the machine has the set; its users document its contract.
pub(super) struct Kernels {
    /// Products of quantised rows.
    products: &'static [(GgmlDType, Product)],
    pub(super) widen: Option<Widen>,
    /// Rounds numbers through `f16`.
    pub(super) round: Option<Round>,
    pub(super) turn: Option<Turn>,
    pub(super) turn_halves: Option<TurnHalves>,
    pub(super) score: Option<Score>,
    /// With the required divisor of a head's elements.
    pub(super) weigh: Option<(Weigh<f32>, usize)>,
    pub(super) weigh_halves: Option<(Weigh<u16>, usize)>,
    pub(super) delta: Option<Delta>,
}

type Product = unsafe fn(&Rows<'_>);
type Widen = unsafe fn(&[u16], &mut [f32]);
type Round = unsafe fn(&[f32], &mut [u8]);
type Turn = unsafe fn(&[f32], usize, &mut [f32]);
type TurnHalves = unsafe fn(&[u16], usize, &mut [f32]);
type Score = unsafe fn(&[Walk<'_>], &[f32], usize, &mut [f32]);
type Delta = unsafe fn(&mut [f32], usize, &Steps<'_>, &mut [[f32; DIM]; TOKENS_TOGETHER]);
type Weigh<T> = unsafe fn(&mut [Walk<'_>], &[T], &[f32]);

impl Kernels {
    pub(super) const fn of(isa: Isa) -> &'static Self {
        match isa {
            Isa::Baseline => &BASELINE,
            #[cfg(target_arch = "aarch64")]
            Isa::Dotprod => &DOTPROD,
            #[cfg(target_arch = "aarch64")]
            Isa::I8mm => &I8MM,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => &AVX2,
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => &AVX_VNNI,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => &AVX512,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => &AVX512_BF16,
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
    widen: None,
    round: None,
    turn: None,
    turn_halves: None,
    score: None,
    weigh: None,
    weigh_halves: None,
    delta: None,
};

/// Products of every type on arm64, with matrix products for quantised rows with many tokens if available.
#[cfg(target_arch = "aarch64")]
macro_rules! products_neon {
    ($matrix:literal) => {
        [
            (GgmlDType::Q4K, neon::rows_q4k::<$matrix>),
            (GgmlDType::Q5K, neon::rows_q5k::<$matrix>),
            (GgmlDType::Q6K, neon::rows_q6k::<$matrix>),
            (GgmlDType::Q8_0, neon::rows_q8_0::<$matrix>),
            (GgmlDType::Q4_0, neon::rows_q4_0::<$matrix>),
            (GgmlDType::Q4_1, neon::rows_q4_1::<$matrix>),
            (GgmlDType::Q5_0, neon::rows_q5_0::<$matrix>),
            (GgmlDType::Q5_1, neon::rows_q5_1::<$matrix>),
            (GgmlDType::Q3K, neon::rows_q3k::<$matrix>),
            (GgmlDType::Q2K, neon::rows_q2k::<$matrix>),
            (GgmlDType::IQ4XS, neon::rows_iq4_xs::<$matrix>),
            (GgmlDType::IQ4NL, neon::rows_iq4_nl::<$matrix>),
            (GgmlDType::MXFP4, neon::rows_mxfp4::<$matrix>),
            (GgmlDType::F16, floats::neon::rows::<{ floats::F16 }>),
            (GgmlDType::BF16, floats::neon::rows::<{ floats::BF16 }>),
            (GgmlDType::F32, floats::neon::rows::<{ floats::F32 }>),
        ]
    };
}

#[cfg(target_arch = "aarch64")]
static DOTPROD: Kernels = Kernels {
    products: &products_neon!(false),
    widen: Some(flash_tiles::widen),
    turn: Some(flash_tiles::turn),
    turn_halves: Some(flash_tiles::turn_halves),
    score: Some(flash_tiles::score),
    weigh: Some((flash_tiles::weigh, LANES)),
    weigh_halves: Some((flash_tiles::weigh, LANES)),
    ..BASELINE
};

#[cfg(target_arch = "aarch64")]
static I8MM: Kernels = Kernels {
    products: &products_neon!(true),
    ..DOTPROD
};

/// Products of every quantised type in 256-bit registers, with the instructions of a set.
#[cfg(target_arch = "x86_64")]
macro_rules! products256 {
    ($set:ty) => {
        [
            (GgmlDType::Q4K, super_rows::<$set, u::Q4K>),
            (GgmlDType::Q6K, super_rows::<$set, u::Q6K>),
            (GgmlDType::Q8_0, small_rows::<$set, u::Q8_0>),
            (GgmlDType::Q5K, super_rows::<$set, u::Q5K>),
            (GgmlDType::Q3K, super_rows::<$set, u::Q3K>),
            (GgmlDType::Q2K, super_rows::<$set, u::Q2K>),
            (GgmlDType::Q4_0, small_rows::<$set, u::Q4_0>),
            (GgmlDType::Q4_1, small_rows::<$set, u::Q4_1>),
            (GgmlDType::Q5_0, small_rows::<$set, u::Q5_0>),
            (GgmlDType::Q5_1, small_rows::<$set, u::Q5_1>),
            (GgmlDType::IQ4XS, super_rows::<$set, u::IQ4XS>),
            (GgmlDType::IQ4NL, small_rows::<$set, u::IQ4NL>),
            (GgmlDType::MXFP4, small_rows::<$set, u::MXFP4>),
            (GgmlDType::F16, floats::avx2::rows::<{ floats::F16 }>),
            (GgmlDType::BF16, floats::avx2::rows::<{ floats::BF16 }>),
            (GgmlDType::F32, floats::avx2::rows::<{ floats::F32 }>),
        ]
    };
}

#[cfg(target_arch = "x86_64")]
static AVX2: Kernels = Kernels {
    products: &products256!(set256::Avx2),
    widen: Some(flash_tiles::widen),
    round: Some(floats::round_to_f16),
    turn: Some(flash_tiles::turn),
    turn_halves: Some(flash_tiles::turn_halves),
    score: Some(flash_tiles::score),
    weigh: Some((flash_tiles::weigh, LANES)),
    weigh_halves: Some((flash_tiles::weigh, LANES)),
    ..BASELINE
};

#[cfg(target_arch = "x86_64")]
static AVX_VNNI: Kernels = Kernels {
    products: &products256!(set256::AvxVnni),
    ..AVX2
};

/// Products of every type in 512-bit registers, with a separate function for `bf16`.
#[cfg(target_arch = "x86_64")]
macro_rules! products512 {
    ($brain:expr) => {
        [
            (GgmlDType::Q4K, four_rows::rows_q4k),
            (GgmlDType::Q5K, avx512::rows_q5k),
            (GgmlDType::Q6K, avx512::rows_q6k),
            (GgmlDType::Q8_0, avx512::rows_q8_0),
            (GgmlDType::Q4_0, few512::small_rows::<u::Q4_0>),
            (GgmlDType::Q3K, few512::super_rows::<u::Q3K>),
            (GgmlDType::Q2K, few512::super_rows::<u::Q2K>),
            (GgmlDType::Q4_1, few512::small_rows::<u::Q4_1>),
            (GgmlDType::Q5_0, few512::small_rows::<u::Q5_0>),
            (GgmlDType::Q5_1, few512::small_rows::<u::Q5_1>),
            (GgmlDType::IQ4XS, four_rows::rows_iq4_xs),
            (GgmlDType::IQ4NL, few512::small_rows::<u::IQ4NL>),
            (GgmlDType::MXFP4, few512::small_rows::<u::MXFP4>),
            (GgmlDType::F16, floats::avx512::rows::<{ floats::F16 }>),
            (GgmlDType::BF16, $brain),
            (GgmlDType::F32, floats::avx512::rows::<{ floats::F32 }>),
        ]
    };
}

#[cfg(target_arch = "x86_64")]
static AVX512: Kernels = Kernels {
    products: &products512!(floats::avx512::rows::<{ floats::BF16 }>),
    widen: Some(flash512::widen),
    round: Some(floats::round_to_f16),
    turn: Some(flash512::turn),
    turn_halves: Some(flash512::turn_halves),
    score: Some(flash512::score),
    weigh: Some((flash512::weigh, 1)),
    weigh_halves: Some((flash512::weigh, 1)),
    delta: Some(delta512::apply),
};

#[cfg(target_arch = "x86_64")]
static AVX512_BF16: Kernels = Kernels {
    products: &products512!(pairs512::rows),
    ..AVX512
};
