//! Choice of the device that computes a model.

use std::sync::Arc;

use super::{Device, cpu::CpuDevice, cuda};
use crate::error::{LoadErrorKind, Unavailable};
use cotenant_policy::compute::{Compute, DeviceChoice};

/// The device that is configured; the CPU instead of a GPU that does not compute, where nothing else is asked for.
///
/// # Errors
///
/// When a GPU is asked for, and there is none that computes.
pub fn choose(compute: Compute) -> Result<Arc<dyn Device>, LoadErrorKind> {
    let cpu = || Arc::new(CpuDevice(compute.threads));
    match compute.device.choice {
        DeviceChoice::Auto => Ok(cuda::find(compute).unwrap_or_else(|_| cpu())),
        DeviceChoice::Cpu => Ok(cpu()),
        DeviceChoice::Cuda => Ok(cuda::find(compute)?),
    }
}

/// Has a GPU that did not compute tried again by the next choice.
pub fn retry_gpu() {
    cuda::retry();
}

/// Why the CPU computes where a GPU may.
#[must_use]
pub fn without_gpu(compute: Compute) -> Option<Unavailable> {
    match compute.device.choice {
        DeviceChoice::Auto => cuda::find(compute).err(),
        DeviceChoice::Cpu | DeviceChoice::Cuda => None,
    }
}
