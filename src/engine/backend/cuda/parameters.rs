//! Kernels and their parameters, as declared in `kernels/`.

use std::{
    ffi::{CStr, c_void},
    ptr,
};

use super::driver::Address;
use crate::{
    backend::Types,
    gguf::{GgmlDType, SUPPORTED},
};
use cotenant_policy::kv_type::KvType;

/// Kernels: each with its name in the module and the block size it was compiled for.
macro_rules! kernels {
    ($($kernel:ident $name:literal $threads:literal,)*) => {
        /// A kernel by its name.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(super) enum Kernel {
            $($kernel,)*
        }

        impl Kernel {
            /// Names of all kernels, in order.
            pub(super) const NAMES: &[&CStr] = &[$($name,)*];

            /// Threads per block.
            pub(super) const fn threads(self) -> u32 {
                match self {
                    $(Self::$kernel => $threads,)*
                }
            }
        }
    };
}

kernels! {
    Activate c"activate" 128,
    Attend128 c"attend_128" 256,
    Attend256 c"attend_256" 256,
    AttendFew128 c"attend_few_128" 256,
    AttendFew256 c"attend_few_256" 256,
    AttendJoin c"attend_join" 256,
    Convert c"convert" 128,
    Delta32 c"delta_32" 128,
    Delta64 c"delta_64" 128,
    Delta128 c"delta_128" 128,
    DeltaInputs32 c"delta_inputs_32" 128,
    DeltaInputs64 c"delta_inputs_64" 128,
    DeltaInputs128 c"delta_inputs_128" 128,
    DeltaChunk32 c"delta_chunk_32" 128,
    DeltaChunk64 c"delta_chunk_64" 128,
    DeltaChunk128 c"delta_chunk_128" 128,
    DeltaResults32 c"delta_results_32" 128,
    DeltaResults64 c"delta_results_64" 128,
    DeltaResults128 c"delta_results_128" 128,
    Embed c"embed" 128,
    Finish c"finish" 256,
    Heads c"heads" 128,
    Norm c"residual_norm" 512,
    Product1 c"product_1" 128,
    Product4 c"product_4" 128,
    Product8 c"product_8" 128,
    ProductNarrow c"product_narrow" 128,
    ProductTiles c"product_tiles" 128,
}

/// The parameters of a launch.
#[derive(Clone, Copy, Debug, PartialEq)]
#[expect(
    clippy::large_enum_variant,
    reason = "products are most of what is launched"
)]
pub(super) enum Job {
    Activate(ActivateJob),
    Attend(AttendJob),
    Convert(ConvertJob),
    Delta(DeltaJob),
    Embed(EmbedJob),
    Finish(FinishJob),
    Heads(HeadsJob),
    Join(JoinJob),
    Norm(NormJob),
    Products(Products),
}

impl Job {
    /// Pointers to the kernel's parameters; with fewer than six, the rest are not read.
    pub(super) fn places(&self) -> [*mut c_void; 6] {
        fn at<T>(parameter: &T) -> *mut c_void {
            ptr::from_ref(parameter).cast_mut().cast()
        }
        let one = |place: *mut c_void| {
            [
                place,
                ptr::null_mut(),
                ptr::null_mut(),
                ptr::null_mut(),
                ptr::null_mut(),
                ptr::null_mut(),
            ]
        };
        match self {
            Self::Activate(job) => [
                at(&job.gate),
                at(&job.up),
                at(&job.stride),
                at(&job.activation),
                at(&job.to),
                ptr::null_mut(),
            ],
            Self::Attend(job) => one(at(job)),
            Self::Convert(job) => [
                at(&job.memory),
                at(&job.first),
                at(&job.count),
                at(&job.dim),
                at(&job.from),
                at(&job.to),
            ],
            Self::Delta(job) => one(at(job)),
            Self::Embed(job) => one(at(job)),
            Self::Finish(job) => one(at(job)),
            Self::Heads(job) => one(at(job)),
            Self::Join(job) => one(at(job)),
            Self::Norm(job) => one(at(job)),
            Self::Products(job) => one(at(job)),
        }
    }
}

/// Parameters of `activate` in `layers.cu`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct ActivateJob {
    pub(super) gate: Address,
    pub(super) up: Address,
    pub(super) stride: u32,
    pub(super) activation: u32,
    pub(super) to: CopiesTo,
}

/// Parameters of `convert` in `attention.cu`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct ConvertJob {
    pub(super) memory: Address,
    pub(super) first: u64,
    pub(super) count: u32,
    pub(super) dim: u32,
    pub(super) from: u32,
    pub(super) to: u32,
}

/// Copies of activations: see `copies.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct CopiesTo {
    pub(super) base: Address,
    pub(super) formats: u32,
    pub(super) columns: u32,
    /// Bytes between tokens.
    pub(super) stride: u32,
    pub(super) unused: u32,
}

/// `Matrix` of `products.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Matrix {
    pub(super) offset: Address,
    pub(super) out: Address,
    pub(super) bias: Address,
    pub(super) part: u32,
    pub(super) kind: u32,
    pub(super) rows: u32,
    pub(super) stride: u32,
    pub(super) first_block: u32,
    /// Rows of each of several parts, and the start of the next.
    pub(super) tiles: u32,
}

impl Matrix {
    /// Number of consecutive parts, from `part` on, that contain its rows.
    pub(super) const fn parts(&self) -> u32 {
        if self.tiles == 0 {
            1
        } else {
            self.rows.div_ceil(self.tiles / FILE_PAGE)
        }
    }
}

/// Page size in which a launch counts the start of parts: `products.cu`.
pub(super) const FILE_PAGE: u32 = 4096;

/// `Products` of `products.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Products {
    pub(super) parts: Address,
    pub(super) input: CopiesTo,
    pub(super) pair_to: CopiesTo,
    pub(super) pair_counters: Address,
    pub(super) pair_activation: u32,
    pub(super) unused: u32,
    pub(super) tokens: u32,
    pub(super) matrices: u32,
    pub(super) matrix: [Matrix; MATRICES_MAX],
}

/// `Norm` of `layers.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct NormJob {
    pub(super) stream: Address,
    pub(super) other: Address,
    pub(super) post: Address,
    pub(super) weight: Address,
    pub(super) to: CopiesTo,
    pub(super) stride: u32,
    pub(super) scale: f32,
    pub(super) epsilon: f32,
    pub(super) unused: u32,
}

/// `Embed` of `layers.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct EmbedJob {
    pub(super) parts: Address,
    pub(super) offset: Address,
    pub(super) tokens: Address,
    pub(super) stream: Address,
    pub(super) scale: f32,
    pub(super) part: u32,
    pub(super) kind: u32,
    pub(super) width: u32,
    pub(super) row_bytes: u32,
    pub(super) unused: u32,
}

/// `Heads` of `layers.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct HeadsJob {
    pub(super) query: Address,
    pub(super) key: Address,
    pub(super) value: Address,
    pub(super) query_norm: Address,
    pub(super) key_norm: Address,
    pub(super) angles: Address,
    pub(super) back: Address,
    pub(super) growth: Address,
    pub(super) out: Address,
    pub(super) out_back: Address,
    pub(super) blocks: Address,
    pub(super) position: Address,
    pub(super) not_finite: Address,
    pub(super) key_offset: u64,
    pub(super) value_offset: u64,
    pub(super) heads: u32,
    pub(super) kv_heads: u32,
    pub(super) dim: u32,
    pub(super) rotary: u32,
    pub(super) query_stride: u32,
    pub(super) kv_stride: u32,
    pub(super) head_step: u32,
    pub(super) adjacent: u32,
    pub(super) kind: u32,
    pub(super) unused: u32,
    pub(super) epsilon: f32,
    pub(super) spare: f32,
}

/// `Attend` of `attention.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct AttendJob {
    pub(super) query: Address,
    pub(super) query_back: Address,
    pub(super) blocks: Address,
    pub(super) position: Address,
    pub(super) partial: Address,
    pub(super) key_offset: u64,
    pub(super) value_offset: u64,
    pub(super) tokens: u32,
    pub(super) heads: u32,
    pub(super) kv_heads: u32,
    pub(super) dim: u32,
    pub(super) kind: u32,
    pub(super) window: u32,
    pub(super) gap_after: u32,
    pub(super) run: u32,
    pub(super) scale: f32,
    pub(super) unused: u32,
}

/// `Join` of `attention.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct JoinJob {
    pub(super) partial: Address,
    pub(super) gate: Address,
    pub(super) to: CopiesTo,
    pub(super) position: Address,
    pub(super) heads: u32,
    pub(super) dim: u32,
    pub(super) groups: u32,
    pub(super) gate_stride: u32,
    pub(super) gate_step: u32,
    pub(super) run: u32,
}

/// `Delta` of `delta.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct DeltaJob {
    pub(super) mixed: Address,
    pub(super) gate: Address,
    pub(super) alpha: Address,
    pub(super) beta: Address,
    pub(super) taps: Address,
    pub(super) decay_bias: Address,
    pub(super) decay: Address,
    pub(super) norm: Address,
    pub(super) state: Address,
    pub(super) history: Address,
    pub(super) made: Address,
    pub(super) to: CopiesTo,
    pub(super) counters: Address,
    pub(super) key_heads: u32,
    pub(super) value_heads: u32,
    pub(super) taps_count: u32,
    pub(super) tokens: u32,
    pub(super) mixed_stride: u32,
    pub(super) gate_stride: u32,
    pub(super) alpha_stride: u32,
    pub(super) beta_stride: u32,
    pub(super) epsilon: f32,
    pub(super) unused: u32,
}

/// `Finish` of `layers.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct FinishJob {
    pub(super) logits: Address,
    pub(super) ranges: Address,
    pub(super) partial: Address,
    pub(super) counter: Address,
    pub(super) result: Address,
    pub(super) ranges_count: u32,
    pub(super) vocabulary: u32,
    pub(super) scale: f32,
    pub(super) cap: f32,
}

/// Dynamic shared memory of `product_narrow` for weights of a type: two stages of 32 segments, and the contribution of
/// a round of steps to eight rows.
pub(super) fn narrow_bytes(dtype: GgmlDType) -> usize {
    let Some(step) = step_bytes(dtype) else {
        return 0;
    };
    let together = match step {
        211.. => 1,
        111.. => 2,
        85.. => 3,
        _ => 4,
    };
    let words = match dtype {
        GgmlDType::Q2K | GgmlDType::Q4K | GgmlDType::Q5K => 4,
        GgmlDType::Q3K | GgmlDType::Q6K | GgmlDType::IQ4XS => 2,
        _ => 1,
    };
    2 * 32 * odd_units(together * step) + 4 * together * (8 / together) * 8 * words * 4
}

/// Dynamic shared memory of `product_tiles` for weights of a type: two stages of 64 rows and 32 tokens, and the
/// converted form of one.
pub(super) fn tiles_bytes(dtype: GgmlDType) -> usize {
    let Some(step) = step_bytes(dtype) else {
        return 0;
    };
    let scales = if dtype.block_size() == 256 { 4 } else { 32 };
    2 * (64 * odd_units(step) + 32 * (272 + 32 + scales)) + 64 * 64 + 32 * 32
}

/// Bytes of 256 columns of a row of a quantised type.
fn step_bytes(dtype: GgmlDType) -> Option<usize> {
    match dtype {
        GgmlDType::F32 | GgmlDType::F16 | GgmlDType::BF16 => None,
        _ => Some(256 / dtype.block_size() * dtype.type_size()),
    }
}

/// Bytes padded to an odd number of units of 16.
const fn odd_units(bytes: usize) -> usize {
    (((bytes + 29) / 16) | 1) * 16
}

/// Number of a weight type among `Type` of `weights.cuh`, whose order is that of [`SUPPORTED`]; `None` for types
/// without a kernel.
pub(super) fn kind_of(dtype: GgmlDType) -> Option<u32> {
    SUPPORTED
        .iter()
        .position(|known| *known == dtype)
        .and_then(|number| u32::try_from(number).ok())
}

/// The format of activations for products with weights of a type: one of `Format` of `copies.cuh`.
pub(super) const fn format_of(dtype: GgmlDType) -> u32 {
    match dtype {
        GgmlDType::F32 => F32,
        GgmlDType::F16 => F16,
        GgmlDType::BF16 => BF16,
        _ if dtype.block_size() == 256 => Q8K,
        _ => Q8_0,
    }
}

/// All formats needed by products with weights of these types.
pub(super) fn formats_of(types: Types) -> u32 {
    FORMATS
        .into_iter()
        .filter(|format| types.any(|dtype| format_of(dtype) == *format))
        .sum()
}

/// Bytes of a token's copies in all of `formats`, as computed by `format_bytes` of `copies.cuh`.
pub(super) fn copies_stride(formats: u32, columns: usize) -> usize {
    let of = |format: u32| match format {
        F32 => 4 * columns,
        Q8K => columns + columns / 8 + columns / 64,
        Q8_0 => columns + columns / 8 + columns / 8,
        _ => 2 * columns,
    };
    let wanted = FORMATS.into_iter().filter(|format| formats & format != 0);
    wanted.map(|format| of(format).next_multiple_of(16)).sum()
}

/// Number of a cache type among `CellKind` of `cells.cuh`.
pub(super) const fn cell_kind(kind: KvType) -> u32 {
    match kind {
        KvType::F16 => 0,
        KvType::Q8 => 1,
        KvType::Q4 => 2,
    }
}

/// Most matrices per launch.
pub(super) const MATRICES_MAX: usize = 8;
const F32: u32 = 1;
const Q8K: u32 = 2;
const Q8_0: u32 = 4;
const F16: u32 = 8;
const BF16: u32 = 16;
const FORMATS: [u32; 5] = [F32, Q8K, Q8_0, F16, BF16];
