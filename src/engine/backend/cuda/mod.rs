//! CUDA backend: the first GPU, by the driver alone, with kernels that were compiled before.
//!
//! One stream has all operations in order. What the host writes for them is staged in page-locked slots; memory waits for the stream before it is given up. See `docs/cuda.md`.

#[cfg(not(feature = "cuda"))]
mod absent;
#[cfg(feature = "cuda")]
mod context;
#[cfg(feature = "cuda")]
mod device;
#[cfg(feature = "cuda")]
mod driver;
#[cfg(feature = "cuda")]
mod gpu;
#[cfg(feature = "cuda")]
mod images;
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
