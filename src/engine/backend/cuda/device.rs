//! The first GPU as a device that may be chosen: whether it can compute, and which models.

use std::{
    io,
    sync::{Arc, Mutex, PoisonError},
};

use candle_core::quantized::GgmlDType;

use super::{
    driver::Driver,
    gpu::Gpu,
    operations::{DELTA_COUNTERS_MAX, scratch_floats},
    parameters::{copies_stride, formats_of, kind_of},
    queue::Cuda,
};
use crate::{
    engine::{
        arena::Backing,
        backend::{
            Backend, Buffer, Copies, Device, DeviceError, Multiply, Norm, Operation, Prepare, Product, Row, RowBytes,
            Types, Widen, cpu::CpuDevice,
        },
        error::{LoadErrorKind, Unavailable},
        spec::{AttentionSpec, Spec},
    },
    policy::{
        compute::{Compute, CudaKernels, CudaMemory, DeviceChoice},
        residency::KvShape,
    },
    units::Bytes,
};

/// The GPU, for which a trial has shown that it computes.
#[derive(Clone, Copy, Debug)]
struct CudaDevice {
    compute: Compute,
    trial: Trial,
}

/// What a trial has shown.
#[derive(Clone, Copy, Debug)]
struct Trial {
    /// Tensor cores compute the same as other kernels.
    tensor_cores: bool,
    /// Bytes of the pieces in which the cache comes and goes.
    granule: usize,
}

/// What the last trial of this process has shown, or why a GPU that was started since computes no more.
static VERDICT: Mutex<Option<Result<Trial, Unavailable>>> = Mutex::new(None);

/// The first GPU, once a trial has shown that it computes: the first call makes it.
///
/// # Errors
///
/// When there is none, or it does not.
pub fn find(compute: Compute) -> Result<Arc<dyn Device>, Unavailable> {
    Ok(Arc::new(CudaDevice::find(compute)?))
}

impl CudaDevice {
    fn find(compute: Compute) -> Result<Self, Unavailable> {
        let mut verdict = VERDICT.lock().unwrap_or_else(PoisonError::into_inner);
        let trial = verdict.get_or_insert_with(trial).clone()?;
        Ok(Self { compute, trial })
    }

    fn plain(&self) -> bool {
        !self.trial.tensor_cores || self.compute.device.kernels == CudaKernels::Plain
    }

    fn started(&self) -> Result<Cuda, Unavailable> {
        let gpu = Gpu::open()?;
        let mapped = match self.compute.device.memory {
            CudaMemory::Auto => gpu.driver.integrated,
            CudaMemory::Mapped => true,
            CudaMemory::Device => false,
        };
        let kernels = if self.plain() { ", without tensor cores" } else { "" };
        let name = format!("cuda ({}, {}{kernels})", gpu.driver.name, gpu.image);
        Cuda::new(&gpu, name, mapped, self.plain()).map_err(|error| refused(&error))
    }
}

impl Device for CudaDevice {
    fn copies_bytes(&self, types: &[GgmlDType], columns: usize) -> Bytes {
        Bytes::of_len(copies_stride(formats_of(types.iter().copied().collect()), columns))
    }

    fn scratch_bytes(&self, spec: &AttentionSpec) -> Bytes {
        Bytes::of_len(scratch_floats(spec.heads, spec.head_dim) * 4)
    }

    fn granule(&self) -> Bytes {
        Bytes::of_len(self.trial.granule)
    }

    fn instead(&self, spec: &Spec, kv: &KvShape) -> Result<Option<Arc<dyn Device>>, LoadErrorKind> {
        match (limit(spec, kv), self.compute.device.choice) {
            (None, _) => Ok(None),
            (Some(_), DeviceChoice::Auto) => Ok(Some(Arc::new(CpuDevice(self.compute.threads)))),
            (Some(reason), _) => Err(Unavailable::new(reason, "set `llm.device: cpu`").into()),
        }
    }

    fn start(&self) -> Result<Box<dyn Backend>, LoadErrorKind> {
        let started = self.started();
        if let Err(error) = &started {
            // What is chosen from now on is something else.
            *VERDICT.lock().unwrap_or_else(PoisonError::into_inner) = Some(Err(error.clone()));
        }
        Ok(Box::new(started?))
    }
}

/// The first GPU, or why there is none that computes, for people.
#[must_use]
pub fn describe() -> String {
    let driver = match Driver::open() {
        Ok(driver) => driver,
        Err(error) => return format!("{error}: the LLM computes on the CPU"),
    };
    let (major, minor) = driver.capability;
    let memory = Bytes::of_len(driver.memory);
    let facts = format!("{}, {memory}, compute capability {major}.{minor}", driver.name);
    match CudaDevice::find(Compute::from(1)) {
        Ok(device) if device.plain() => format!("{facts}; tensor cores are not used: they compute something else"),
        Ok(_) => facts,
        Err(error) => format!("{facts}; {error}: the LLM computes on the CPU"),
    }
}

/// What of a model the kernels do not compute.
fn limit(spec: &Spec, kv: &KvShape) -> Option<String> {
    let matrices = spec.layers.iter().flat_map(|layer| &layer.matrices);
    let matrices = matrices.map(|matrix| (&matrix.tensor, matrix.columns));
    for (tensor, columns) in matrices.chain([(&spec.head, spec.width), (&spec.embedding, spec.width)]) {
        let dtype = tensor.dtype;
        if kind_of(dtype).is_none() {
            return Some(format!("tensor `{}` has type {dtype:?}", tensor.name));
        }
        let whole = if is_plain(dtype) { 8 } else { 32 };
        if columns % whole != 0 {
            let name = &tensor.name;
            return Some(format!(
                "tensor `{name}` has rows of {columns} elements, no multiple of {whole}"
            ));
        }
        let aligned = alignment(dtype);
        if tensor.offset % aligned != 0 {
            let (name, offset) = (&tensor.name, tensor.offset);
            return Some(format!(
                "tensor `{name}` starts at byte {offset}, no multiple of {aligned}"
            ));
        }
    }
    let attention = &spec.attention;
    let dim = attention.head_dim;
    if spec.attention_layers() > 0 {
        if dim > 256 || !dim.is_multiple_of(8) {
            return Some(format!("heads have {dim} elements: at most 256, a multiple of 8"));
        }
        if kv.block_tokens.get() != 64 {
            return Some(format!(
                "blocks of its cache have {} tokens instead of 64",
                kv.block_tokens
            ));
        }
    }
    let recurrent = spec.recurrent?;
    if !matches!(recurrent.head_dim, 32 | 64 | 128) {
        return Some(format!(
            "recurrent heads have {} elements: 32, 64 or 128",
            recurrent.head_dim
        ));
    }
    if recurrent.taps > TAPS_MAX {
        return Some(format!(
            "its convolution has {} taps, at most {TAPS_MAX}",
            recurrent.taps
        ));
    }
    let counters = recurrent.key_heads + recurrent.values().div_ceil(256);
    (counters > DELTA_COUNTERS_MAX).then(|| format!("it has {} recurrent heads", recurrent.value_heads))
}

/// Whether a type has no quants.
const fn is_plain(dtype: GgmlDType) -> bool {
    matches!(dtype, GgmlDType::F32 | GgmlDType::F16 | GgmlDType::BF16)
}

/// Where kernels read weights of a type: `ALIGN` of `weights.cuh`.
const fn alignment(dtype: GgmlDType) -> u64 {
    match dtype {
        GgmlDType::Q4K | GgmlDType::Q5K => 16,
        GgmlDType::Q5_1 => 8,
        GgmlDType::Q4_1 | GgmlDType::Q2K => 4,
        _ if is_plain(dtype) => 16,
        _ => 2,
    }
}

fn refused(error: &dyn std::error::Error) -> Unavailable {
    Unavailable::new(
        format!("the GPU does not compute: {error}"),
        "see `dmesg` and who holds its memory, or set `llm.device: cpu`",
    )
}

/// Computes products of a prompt with and without tensor cores, in every kind of memory that a model needs.
fn trial() -> Result<Trial, Unavailable> {
    let gpu = Gpu::open()?;
    let product = |plain| {
        let mut cuda = Cuda::new(&gpu, String::new(), true, plain).map_err(io::Error::from)?;
        let product = try_product(&mut cuda)?;
        let mut region = cuda.reserve(Bytes::of_len(gpu.granule), Bytes::ZERO)?;
        region.set_open(Bytes::of_len(gpu.granule))?;
        Ok::<_, io::Error>(product)
    };
    let by_others = product(true).map_err(|error| refused(&error))?;
    let by_tensor_cores = product(false).map_err(|error| refused(&error))?;
    Ok(Trial {
        tensor_cores: by_others == by_tensor_cores,
        granule: gpu.granule,
    })
}

/// Bits of products of some rows with weights of two types.
fn try_product(cuda: &mut Cuda) -> io::Result<Vec<u32>> {
    let failed = |error: DeviceError| io::Error::other(error);
    let floats = |cuda: &Cuda, count: usize| cuda.allocate(Bytes::of_len(count * 4), Backing::Now);
    let types: Types = TRIED.into_iter().collect();
    let (stream, normed) = (floats(cuda, TOKENS * COLUMNS)?, floats(cuda, TOKENS * COLUMNS)?);
    let (weight, out) = (floats(cuda, COLUMNS)?, floats(cuda, TRIED.len() * TOKENS * ROWS)?);
    let copies_bytes = copies_stride(formats_of(types), COLUMNS) * TOKENS;
    let copies = cuda.allocate(Bytes::of_len(copies_bytes), Backing::Now)?;
    let copies = Copies {
        memory: copies.view_bytes(0, copies_bytes),
        rows: TOKENS,
        columns: COLUMNS,
        types,
    };
    let numbers = |count: usize, scale: f32| {
        let numbers = (0..count).map(|at| f32::from(u8::try_from(at * 37 % 251).unwrap_or(0)) * scale - 1.0);
        numbers.flat_map(f32::to_le_bytes).collect::<Vec<u8>>()
    };
    for (to, count, scale) in [(&stream, TOKENS * COLUMNS, 0.008), (&weight, COLUMNS, 0.01)] {
        let row = Row {
            from: RowBytes::Host(numbers(count, scale).into()),
            to: to.view(0..count),
        };
        let widen = Widen {
            rows: std::slice::from_ref(&row).into(),
            dtype: GgmlDType::F32,
            scale: 1.0,
        };
        cuda.queue(Operation::Widen(widen)).map_err(failed)?;
    }
    let norm = Norm {
        stream: stream.view(0..TOKENS * COLUMNS),
        normed: normed.view(0..TOKENS * COLUMNS),
        residual: None,
        weight: weight.view(0..COLUMNS),
        epsilon: 1e-6,
        prepare: Prepare {
            copies: copies.clone(),
            types,
            first: 0,
        },
    };
    cuda.queue(Operation::Norm(norm)).map_err(failed)?;
    let weights: Vec<Buffer> = TRIED
        .into_iter()
        .map(|dtype| weights(cuda, dtype))
        .collect::<io::Result<_>>()?;
    let products = TRIED.into_iter().zip(&weights).enumerate();
    let products: Vec<Product> = products
        .map(|(number, (dtype, weights))| Product {
            weight: weights.view_bytes(0, ROWS * row_bytes(dtype)),
            dtype,
            rows: ROWS,
            columns: COLUMNS,
            out: out.view(number * TOKENS * ROWS..(number + 1) * TOKENS * ROWS),
            stride: ROWS,
            first: 0,
        })
        .collect();
    let multiply = Multiply {
        products: products.into(),
        input: normed.view(0..TOKENS * COLUMNS),
        copies,
        rows: TOKENS,
    };
    cuda.queue(Operation::Multiply(multiply)).map_err(failed)?;
    let made = cuda.read(&out, 0..TRIED.len() * TOKENS * ROWS).map_err(failed)?;
    Ok(made.iter().map(|number| number.to_bits()).collect())
}

/// Weights in memory that the host fills, with scales that are finite.
fn weights(cuda: &Cuda, dtype: GgmlDType) -> io::Result<Buffer> {
    let bytes = ROWS * row_bytes(dtype);
    let memory = cuda.ring(Bytes::of_len(bytes), Backing::Now)?;
    let block = dtype.type_size();
    let numbers: Vec<u8> = (0..bytes)
        .map(|at| match (at % block, dtype) {
            (1, _) | (3, GgmlDType::Q4K) => 0x20,
            (at_block, _) => u8::try_from((at + 7 * at_block) % 253).unwrap_or(0),
        })
        .collect();
    let place = memory.shared().range(0, bytes).ok_or(io::ErrorKind::InvalidData)?;
    // SAFETY: a mapping that was made just now, which nothing else has.
    unsafe { place.as_ptr().copy_from_nonoverlapping(numbers.as_ptr(), bytes) };
    Ok(memory)
}

const fn row_bytes(dtype: GgmlDType) -> usize {
    match dtype {
        GgmlDType::Q4K => 144,
        _ => 272,
    }
}

/// What is tried: a type of each shape of blocks, more rows than an odd number of tiles has, and more tokens than other kernels take at once.
const TRIED: [GgmlDType; 2] = [GgmlDType::Q4K, GgmlDType::Q8_0];
const COLUMNS: usize = 256;
const ROWS: usize = 80;
const TOKENS: usize = 9;
/// `TAPS_MAX` of `delta.cu`.
const TAPS_MAX: usize = 16;
