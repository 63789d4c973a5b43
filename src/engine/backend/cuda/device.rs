//! The first GPU as a selectable device: its capability, and the models it supports.

use std::sync::{Arc, Mutex};

use super::{
    context::scratch_floats,
    driver::Driver,
    gpu::Gpu,
    launcher::{DELTA_COUNTERS_MAX, own_bytes},
    memory::staged_bytes,
    parameters::{copies_stride, formats_of, kind_of},
    probe::Probe,
    queue::Cuda,
    segments::are_graphs_allowed,
    trial::{Trial, refused},
};
use crate::{
    backend::{Backend, Device, Limits, cpu::CpuDevice},
    error::{LoadErrorKind, Unavailable},
    gguf::{GgmlDType, dtype_name},
    spec::{AttentionSpec, RecurrentSpec, Spec},
};
use cotenant_policy::{
    compute::{Compute, CudaKernels, CudaMemory, DeviceChoice},
    residency::KvShape,
};
use cotenant_units::{Bytes, lock::locked};

/// The GPU, after a successful trial.
#[derive(Clone, Debug)]
struct CudaDevice {
    compute: Compute,
    trial: Trial,
    /// Present for integrated devices, whose weights may lie in either kind of memory, if the choice is left to the
    /// program.
    probe: Option<Probe>,
}

/// Result of the last trial, or the reason why a GPU started since has failed: until [`retry`].
static VERDICT: Mutex<Option<Result<Trial, Unavailable>>> = Mutex::new(None);

/// The first GPU, after a successful trial, which the first call performs.
///
/// # Errors
///
/// There is none, or it cannot compute.
pub fn find(compute: Compute) -> Result<Arc<dyn Device>, Unavailable> {
    Ok(Arc::new(CudaDevice::find(compute)?))
}

/// Makes the next [`find`] retry a GPU that failed.
pub fn retry() {
    let mut verdict = locked(&VERDICT);
    verdict.take_if(|verdict| verdict.is_err());
}

impl CudaDevice {
    fn find(compute: Compute) -> Result<Self, Unavailable> {
        let mut verdict = locked(&VERDICT);
        let trial = verdict.get_or_insert_with(Trial::run).clone()?;
        let is_asked = compute.device.memory == CudaMemory::Auto && is_integrated();
        let probe = if is_asked {
            Probe::of_device(trial.graphs).ok()
        } else {
            None
        };
        Ok(Self {
            compute,
            trial,
            probe,
        })
    }

    /// Whether weights lie in mappings that the device reads.
    fn mapped(&self) -> bool {
        match self.compute.device.memory {
            // Measurements that failed for lack of memory decide nothing.
            CudaMemory::Auto => self
                .probe
                .as_ref()
                .map_or_else(is_integrated, |probe| probe.speed.prefers_mapped()),
            CudaMemory::Mapped => true,
            CudaMemory::Device => false,
        }
    }

    fn plain(&self) -> bool {
        !self.trial.tensor_cores || self.compute.device.kernels == CudaKernels::Plain
    }

    fn started(&self, limits: &Limits) -> Result<Cuda, Unavailable> {
        let gpu = Gpu::open()?;
        let graphs = self.trial.graphs && are_graphs_allowed();
        gpu.set_graphs(graphs).map_err(|error| refused(&error))?;
        let kernels = if self.plain() {
            ", without tensor cores"
        } else {
            ""
        };
        let graphs = if graphs { "" } else { ", without graphs" };
        let memory = if self.mapped() { "mapped" } else { "device" };
        let name = format!(
            "cuda ({}, {}, {memory} memory{kernels}{graphs})",
            gpu.driver.name, gpu.image
        );
        Cuda::new(&gpu, name, self.mapped(), self.plain(), limits).map_err(|error| refused(&error))
    }
}

impl Device for CudaDevice {
    fn copies_bytes(&self, types: &[GgmlDType], columns: usize) -> Bytes {
        Bytes::of_len(copies_stride(
            formats_of(types.iter().copied().collect()),
            columns,
        ))
    }

    fn scratch_bytes(&self, spec: &AttentionSpec) -> Bytes {
        Bytes::of_len(scratch_floats(spec.heads, spec.head_dim) * 4)
    }

    fn context_bytes(&self, limits: &Limits) -> Bytes {
        Bytes::of_len(self.trial.context + own_bytes(limits))
    }

    fn granule(&self) -> Bytes {
        Bytes::of_len(self.trial.granule)
    }

    fn ring_bytes(&self, ring: Bytes) -> Bytes {
        if self.mapped() || is_integrated() {
            ring
        } else {
            staged_bytes(ring)
        }
    }

    fn instead(&self, spec: &Spec, kv: &KvShape) -> Result<Option<Arc<dyn Device>>, LoadErrorKind> {
        match (limit(spec, kv), self.compute.device.choice) {
            (None, _) => Ok(None),
            (Some(_), DeviceChoice::Auto) => Ok(Some(Arc::new(CpuDevice(self.compute.threads)))),
            (Some(reason), _) => Err(Unavailable::new(reason, "set `llm.device: cpu`").into()),
        }
    }

    fn start(&self, limits: &Limits) -> Result<Box<dyn Backend>, LoadErrorKind> {
        let error = match self.started(limits) {
            Ok(started) => return Ok(Box::new(started)),
            Err(error) => error,
        };
        // Later choices select another device.
        *locked(&VERDICT) = Some(Err(error.clone()));
        Err(match self.compute.device.choice {
            DeviceChoice::Auto => LoadErrorKind::GpuLost(error),
            DeviceChoice::Cpu | DeviceChoice::Cuda => error.into(),
        })
    }
}

/// The first GPU, or the reason why none computes, for display.
pub fn describe() -> String {
    let driver = match Driver::open() {
        Ok(driver) => driver,
        Err(error) => return format!("{error}: the LLM computes on the CPU"),
    };
    let (major, minor) = driver.capability;
    let memory = Bytes::of_len(driver.memory);
    let facts = format!(
        "{}, {memory}, compute capability {major}.{minor}",
        driver.name
    );
    let device = match CudaDevice::find(Compute::from(1)) {
        Ok(device) => device,
        Err(error) => return format!("{facts}; {error}: the LLM computes on the CPU"),
    };
    let context = device.context_bytes(&Limits::default());
    let facts = format!("{facts}; its context takes {context}");
    let facts = device
        .probe
        .as_ref()
        .map_or(facts.clone(), |probe| format!("{facts}; {probe}"));
    let tensor_cores = if device.plain() {
        "; tensor cores are not used: their results differ"
    } else {
        ""
    };
    let graphs = if device.trial.graphs {
        ""
    } else {
        "; launches are not captured as graphs: a graph fails, or its results differ"
    };
    format!("{facts}{tensor_cores}{graphs}")
}

fn is_integrated() -> bool {
    Driver::open().is_ok_and(|driver| driver.integrated)
}

/// Part of a model that the kernels do not support.
fn limit(spec: &Spec, kv: &KvShape) -> Option<String> {
    let matrices = spec.layers.iter().flat_map(|layer| &layer.matrices);
    let matrices = matrices.map(|matrix| (&matrix.tensor, matrix.columns));
    for (tensor, columns) in
        matrices.chain([(&spec.head, spec.width), (&spec.embedding, spec.width)])
    {
        let dtype = tensor.dtype;
        if kind_of(dtype).is_none() {
            let (name, dtype) = (&tensor.name, dtype_name(dtype));
            return Some(format!("tensor `{name}` has type {dtype}"));
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
    if !spec.architecture.norms().before {
        return Some("its layers have no preceding norm, which no kernel supports".to_owned());
    }
    if spec.architecture.centres() {
        return Some("its norms subtract the mean, which no kernel supports".to_owned());
    }
    if spec.attention.values_normed {
        return Some("its values are normalised, which no kernel supports".to_owned());
    }
    let attention = &spec.attention;
    let dim = attention.head_dim;
    if attention.score_cap.is_some() {
        return Some("its attention scores are capped, which no kernel supports".to_owned());
    }
    if spec.attention_layers() > 0 {
        if dim > 256 || !dim.is_multiple_of(8) {
            return Some(format!(
                "heads have {dim} elements: at most 256, a multiple of 8"
            ));
        }
        if kv.block_tokens.get() != 64 {
            return Some(format!(
                "blocks of its cache have {} tokens instead of 64",
                kv.block_tokens
            ));
        }
    }
    if spec.experts.is_some() {
        return Some("it is a mixture of experts, which no kernel supports".to_owned());
    }
    let recurrent = match spec.recurrent? {
        RecurrentSpec::Convolution(_) => {
            return Some("it has short convolutions, which no kernel supports".to_owned());
        }
        RecurrentSpec::Delta(delta) => delta,
        RecurrentSpec::Scan(_) => {
            return Some("it has selective scans (Mamba-2), which no kernel supports".to_owned());
        }
    };
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
    (counters > DELTA_COUNTERS_MAX)
        .then(|| format!("it has {} recurrent heads", recurrent.value_heads))
}

/// Whether a type is not quantised.
const fn is_plain(dtype: GgmlDType) -> bool {
    matches!(dtype, GgmlDType::F32 | GgmlDType::F16 | GgmlDType::BF16)
}

/// Alignment that kernels need for weights of a type: `ALIGN` of `weights.cuh`.
const fn alignment(dtype: GgmlDType) -> u64 {
    match dtype {
        GgmlDType::Q4K | GgmlDType::Q5K => 16,
        GgmlDType::Q5_1 | GgmlDType::IQ4XS => 8,
        GgmlDType::Q4_1 | GgmlDType::Q2K => 4,
        _ if is_plain(dtype) => 16,
        _ => 2,
    }
}

/// `TAPS_MAX` of `delta.cu`.
const TAPS_MAX: usize = 16;
