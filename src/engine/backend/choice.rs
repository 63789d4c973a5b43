//! Selection of the compute device.

use std::sync::Arc;

use super::{Device, cpu::CpuDevice, cuda};
use crate::error::{LoadErrorKind, Unavailable};
use cotenant_policy::compute::{Compute, DeviceChoice};

/// The configured device; the CPU instead of a GPU that cannot compute, unless the GPU is required.
///
/// # Errors
///
/// A GPU is required, and none computes.
pub fn choose(compute: Compute) -> Result<Arc<dyn Device>, LoadErrorKind> {
    let cpu = || Arc::new(CpuDevice(compute.threads));
    match compute.device.choice {
        DeviceChoice::Auto => Ok(cuda::find(compute).unwrap_or_else(|_| cpu())),
        DeviceChoice::Cpu => Ok(cpu()),
        DeviceChoice::Cuda => Ok(cuda::find(compute)?),
    }
}

/// Makes the next choice retry a GPU that failed.
pub fn retry_gpu() {
    cuda::retry();
}

/// Why the CPU computes although a GPU is allowed.
pub fn without_gpu(compute: Compute) -> Option<Unavailable> {
    match compute.device.choice {
        DeviceChoice::Auto => cuda::find(compute).err(),
        DeviceChoice::Cpu | DeviceChoice::Cuda => None,
    }
}
