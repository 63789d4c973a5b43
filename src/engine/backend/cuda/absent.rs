//! Substitute for CUDA in builds without it.

use std::{path::Path, sync::Arc};

use crate::{backend::Device, error::Unavailable};
use cotenant_policy::compute::Compute;

/// No GPU.
///
/// # Errors
///
/// Always.
pub fn find(_: Compute) -> Result<Arc<dyn Device>, Unavailable> {
    let reason = "CUDA was left out of this build";
    Err(Unavailable::new(
        reason,
        "build with the feature `cuda`, or set `llm.device: cpu`",
    ))
}

/// Does nothing.
pub const fn keep_probe_in(_: &Path) {}

/// Does nothing.
pub const fn forget_probe() {}

/// Does nothing.
pub const fn retry() {}

/// A note that the build has no CUDA.
pub fn describe() -> String {
    "left out of this build: the LLM computes on the CPU".to_owned()
}
