//! Backend trait: memory and arithmetic of one device.
//!
//! Operations are queued in order, as data on memory owned by the backend, and each is as coarse as one launch of a
//! device (a whole attention step, a whole Gated DeltaNet step). The host waits when it reads a result or releases
//! memory; other host writes to data in use are either copied into the operation or ordered by fences. The CPU executes
//! at once.

use std::{io, ops::Range, sync::Arc};

use super::{
    arena::Backing,
    error::LoadErrorKind,
    gguf::GgmlDType,
    spec::{AttentionSpec, Spec},
};
use cotenant_policy::residency::KvShape;
use cotenant_units::{Bytes, page};

mod choice;
pub mod cpu;
pub mod cuda;
#[cfg_attr(
    not(feature = "cuda"),
    expect(dead_code, reason = "only the backend of a GPU has memory of a device")
)]
mod memory;
mod operation;

pub use super::error::DeviceError;
pub use choice::{choose, retry_gpu, without_gpu};
pub use memory::{Buffer, Cells, Part, Region, Span, View, offset_in_block};
pub use operation::{
    Activate, Attend, Attended, Combine, Convert, Convolve, Copies, Delta, Finish, Gap, Gather,
    Matrices, Multiply, Norm, Operation, Prepare, Product, ROWS_TOGETHER, Residual, Rotate, Row,
    RowBiases, RowBytes, Scan, Types, Widen,
};

/// A compute device: chosen before the model's file is opened, since plans depend on its memory.
pub trait Device: Send + Sync {
    /// Bytes of one token's [`Copies`] for products with weights of `types`.
    fn copies_bytes(&self, types: &[GgmlDType], columns: usize) -> Bytes;

    /// Scratch bytes of attention, for any number of tokens.
    fn scratch_bytes(&self, spec: &AttentionSpec) -> Bytes;

    /// Bytes of its own once started, for any model.
    fn context_bytes(&self, _: &Limits) -> Bytes {
        Bytes::ZERO
    }

    /// Whether it computes layers with a state without advancing the state.
    fn tries_states(&self) -> bool {
        false
    }

    /// Minimum unit of memory that grows and shrinks.
    fn granule(&self) -> Bytes {
        page()
    }

    /// Bytes of a ring of this length, including its staging memory.
    fn ring_bytes(&self, ring: Bytes) -> Bytes {
        ring
    }

    /// The substitute device for a model that this device does not support.
    ///
    /// # Errors
    ///
    /// There is no substitute.
    fn instead(&self, _: &Spec, _: &KvShape) -> Result<Option<Arc<dyn Device>>, LoadErrorKind> {
        Ok(None)
    }

    /// Starts it, for operations within `limits`.
    ///
    /// # Errors
    ///
    /// It cannot be started.
    fn start(&self, limits: &Limits) -> Result<Box<dyn Backend>, LoadErrorKind>;
}

/// Upper bounds of operations on one model, so that a device allocates before the first.
#[derive(Clone, Copy, Debug, Default)]
pub struct Limits {
    /// Tokens of a context.
    pub context: u32,
    /// Ranges of the head's used rows.
    pub said: usize,
    /// Parts of the weights.
    pub parts: usize,
}

impl Limits {
    /// Limits of a model in this many parts, for any context: inspection must see the same needs as opening.
    pub fn of(spec: &Spec, parts: usize) -> Self {
        Self {
            context: spec.context_max,
            said: spec.said.as_ref().map_or(1, Vec::len),
            parts,
        }
    }
}

/// Memory and arithmetic of one device.
///
/// Errors are permanent: every later call may return them again, and the engine ends.
///
/// # Safety
///
/// Work reported as executed by [`done`](Self::done), [`wait`](Self::wait) and [`read`](Self::read) has been executed,
/// and neither reads nor writes memory any more: file readers write to it then.
pub unsafe trait Backend: Send {
    /// Name and kernel set, for display: `cpu (avx2)`.
    fn name(&self) -> String;

    /// Allocates memory for computing.
    ///
    /// # Errors
    ///
    /// No memory.
    fn allocate(&self, bytes: Bytes, backing: Backing) -> io::Result<Buffer>;

    /// Allocates memory for weights, which file readers fill once, in place or through staging.
    ///
    /// # Errors
    ///
    /// No memory.
    fn part(&self, bytes: Bytes) -> io::Result<Buffer> {
        self.allocate(bytes, Backing::OnTouch)
    }

    /// Allocates memory that file readers fill repeatedly and that this backend computes on.
    ///
    /// # Errors
    ///
    /// No memory.
    fn ring(&self, bytes: Bytes, backing: Backing) -> io::Result<Buffer>;

    /// Reserves address space for memory that grows and shrinks and that this backend computes on.
    ///
    /// # Errors
    ///
    /// No address space.
    fn reserve(&self, bytes: Bytes, granule: Bytes) -> io::Result<Region>;

    /// Releases caches without a holder: free pages of the allocator, on a device the driver's pools. Called after a
    /// model has been opened, and never during a shed.
    fn trim(&self);

    /// Whether [`Matrices::Parts`] are computed on where they are.
    fn takes_parts(&self) -> bool {
        false
    }

    /// Queues an operation after all others.
    ///
    /// # Errors
    ///
    /// It cannot be executed, or an earlier one could not be.
    fn queue(&mut self, operation: Operation<'_>) -> Result<(), DeviceError>;

    /// The end of the work queued so far. Complete segments have been submitted to the device by then.
    fn mark(&mut self) -> Fence;

    /// Whether work before `fence` is held for a joint submission with later work: the end of a segment, a read or a
    /// wait submits it.
    fn holds(&self, _: Fence) -> bool {
        false
    }

    /// Whether everything before `fence` has been executed.
    ///
    /// # Errors
    ///
    /// Some of it could not be executed.
    fn done(&mut self, fence: Fence) -> Result<bool, DeviceError>;

    /// Waits until everything before `fence` has been executed.
    ///
    /// # Errors
    ///
    /// Some of it could not be executed.
    fn wait(&mut self, fence: Fence) -> Result<(), DeviceError>;

    /// Waits for all queued work, and returns floats to the host.
    ///
    /// # Errors
    ///
    /// Some of it could not be executed.
    fn read<'a>(
        &'a mut self,
        from: &'a Buffer,
        floats: Range<usize>,
    ) -> Result<&'a [f32], DeviceError>;
}

/// A position in the order of a backend's operations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Fence(
    /// Operations before it.
    pub u64,
);
