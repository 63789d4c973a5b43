//! CUDA backend: the first GPU, by the driver API alone, with precompiled kernels.
//!
//! One stream executes all operations in order. Data written by the host for them is staged in page-locked slots;
//! memory waits for the stream before its release. See `docs/cuda.md`.

#[cfg(not(feature = "cuda"))]
mod absent;
#[cfg(feature = "cuda")]
mod context;
#[cfg(feature = "cuda")]
mod delta;
#[cfg(feature = "cuda")]
mod device;
#[cfg(feature = "cuda")]
mod driver;
#[cfg(feature = "cuda")]
mod gpu;
#[cfg(feature = "cuda")]
mod images;
#[cfg(feature = "cuda")]
mod launcher;
#[cfg(feature = "cuda")]
mod memory;
#[cfg(feature = "cuda")]
mod operations;
#[cfg(feature = "cuda")]
mod parameters;
#[cfg(feature = "cuda")]
mod probe;
#[cfg(feature = "cuda")]
mod queue;
#[cfg(feature = "cuda")]
mod segments;
#[cfg(feature = "cuda")]
mod staging;
#[cfg(feature = "cuda")]
mod trial;

#[cfg(not(feature = "cuda"))]
pub use absent::{describe, find, forget_probe, keep_probe_in, retry};
#[cfg(feature = "cuda")]
pub use device::{describe, find, retry};
#[cfg(feature = "cuda")]
pub use probe::{forget_probe, keep_probe_in};
