//! Device and threads that compute the LLM.

/// Device that computes the LLM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// A usable GPU if there is one, otherwise the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// A GPU with CUDA; no fallback.
    Cuda,
}

/// Location of weights for a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CudaMemory {
    /// Mapped if GPU and CPU share memory and the GPU reads mappings as fast, otherwise on the device.
    #[default]
    Auto,
    /// Memory of the GPU.
    Device,
    /// Mappings of this process, read by the GPU in place.
    Mapped,
}

/// Kernels for prompts on a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CudaKernels {
    /// Tensor cores, if a comparison at the start shows equal results.
    #[default]
    Auto,
    /// Without tensor cores.
    Plain,
}

/// Configuration of the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceSettings {
    /// `llm.device`.
    pub choice: DeviceChoice,
    /// `llm.cuda.memory`.
    pub memory: CudaMemory,
    /// `llm.cuda.kernels`.
    pub kernels: CudaKernels,
}

/// A device, and the number of CPU threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compute {
    /// Threads, including the calling one; at least 1.
    pub threads: usize,
    /// The device.
    pub device: DeviceSettings,
}

/// The CPU alone, with this number of threads.
impl From<usize> for Compute {
    fn from(threads: usize) -> Self {
        Self {
            threads,
            device: DeviceSettings {
                choice: DeviceChoice::Cpu,
                ..DeviceSettings::default()
            },
        }
    }
}
