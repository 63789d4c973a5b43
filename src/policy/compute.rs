//! Which device computes the LLM, and how.

/// What computes the LLM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// A GPU where there is one that can, else the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// A GPU by CUDA, or nothing.
    Cuda,
}

/// Where weights lie for a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CudaMemory {
    /// Mapped where GPU and CPU share memory and it reads weights there as fast, else on the device.
    #[default]
    Auto,
    /// In memory of the GPU.
    Device,
    /// In mappings of this process, which the GPU reads where they lie.
    Mapped,
}

/// Kernels for prompts on a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CudaKernels {
    /// Tensor cores, where a comparison at the start shows that they compute the same.
    #[default]
    Auto,
    /// Without tensor cores.
    Plain,
}

/// What is configured of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceSettings {
    /// `llm.device`.
    pub choice: DeviceChoice,
    /// `llm.cuda.memory`.
    pub memory: CudaMemory,
    /// `llm.cuda.kernels`.
    pub kernels: CudaKernels,
}

/// What computes: a device, and threads of the CPU where that is the one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compute {
    /// Threads, the calling one included; at least 1.
    pub threads: usize,
    /// Which device.
    pub device: DeviceSettings,
}

/// The CPU alone, with so many threads.
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
