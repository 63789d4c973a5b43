//! Backend trait: memory and arithmetic of one device.
//!
//! Operations are queued in order, as data on memory that the backend owns, and each is as coarse as one launch of a device
//! (a whole attention step, a whole Gated DeltaNet step). The host waits where it reads a result or gives memory up; what else it
//! writes that operations in flight use, they have copies of, or fences stand before it. The CPU executes at once.

use std::{io, ops::Range, sync::Arc};

use candle_core::quantized::GgmlDType;

use super::{
    arena::Backing,
    error::LoadErrorKind,
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
    Activate, Attend, Convert, Copies, Delta, Finish, Gap, Multiply, Norm, Operation, Prepare,
    Product, Residual, Rotate, Row, RowBytes, Types, Widen,
};

/// What is to compute a model: chosen before its file is opened, since a plan depends on what it needs.
pub trait Device: Send + Sync {
    /// Bytes of one token's [`Copies`] for products with weights of `types`.
    fn copies_bytes(&self, types: &[GgmlDType], columns: usize) -> Bytes;

    /// Bytes that attention needs beside its other memory, however many tokens there are.
    fn scratch_bytes(&self, spec: &AttentionSpec) -> Bytes;

    /// Bytes that it takes for itself once it is started, whatever it computes.
    fn context_bytes(&self, _: &Limits) -> Bytes {
        Bytes::ZERO
    }

    /// Memory that comes and goes part by part does so in pieces of this size at least.
    fn granule(&self) -> Bytes {
        page()
    }

    /// What a ring of so many bytes takes, with what it is staged in.
    fn ring_bytes(&self, ring: Bytes) -> Bytes {
        ring
    }

    /// What computes this model instead, where this device cannot.
    ///
    /// # Errors
    ///
    /// When nothing is to.
    fn instead(&self, _: &Spec, _: &KvShape) -> Result<Option<Arc<dyn Device>>, LoadErrorKind> {
        Ok(None)
    }

    /// Starts it, for operations within `limits`.
    ///
    /// # Errors
    ///
    /// When it cannot be had.
    fn start(&self, limits: &Limits) -> Result<Box<dyn Backend>, LoadErrorKind>;
}

/// The most that operations on one model have, so that a device has memory for them before the first.
#[derive(Clone, Copy, Debug, Default)]
pub struct Limits {
    /// Tokens of a context.
    pub context: u32,
    /// Ranges of the head's rows that are said.
    pub said: usize,
    /// Parts of the weights.
    pub parts: usize,
}

impl Limits {
    /// Those of a model in so many parts, whatever context it is opened with: what it needs is the same when it is inspected.
    #[must_use]
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
/// An error of it is permanent: every later call may return it again, and the engine ends.
///
/// # Safety
///
/// What [`done`](Self::done), [`wait`](Self::wait) and [`read`](Self::read) say to be executed is, and neither reads nor writes
/// memory any more: readers of files write to it then.
pub unsafe trait Backend: Send {
    /// Name and kernel set, for people: `cpu (avx2)`.
    fn name(&self) -> String;

    /// Memory that this backend computes on.
    ///
    /// # Errors
    ///
    /// When there is none.
    fn allocate(&self, bytes: Bytes, backing: Backing) -> io::Result<Buffer>;

    /// Memory of weights, which readers of files fill once, where it lies or through their own.
    ///
    /// # Errors
    ///
    /// When there is none.
    fn part(&self, bytes: Bytes) -> io::Result<Buffer> {
        self.allocate(bytes, Backing::OnTouch)
    }

    /// Memory that readers of files fill again and again, and that this backend computes on.
    ///
    /// # Errors
    ///
    /// When there is none.
    fn ring(&self, bytes: Bytes, backing: Backing) -> io::Result<Buffer>;

    /// Address space for memory that comes and goes part by part, and that this backend computes on.
    ///
    /// # Errors
    ///
    /// When there is none.
    fn reserve(&self, bytes: Bytes, granule: Bytes) -> io::Result<Region>;

    /// Gives back what it keeps for later without a holder: free pages of the allocator, on a device the driver's pools.
    /// Called when a model has been opened, and not during a shed.
    fn trim(&self);

    /// Queues an operation behind all others.
    ///
    /// # Errors
    ///
    /// When it cannot be executed, or an earlier one could not be.
    fn queue(&mut self, operation: Operation<'_>) -> Result<(), DeviceError>;

    /// The end of what is queued by now. What makes a segment is handed on to the device by then.
    fn mark(&mut self) -> Fence;

    /// Whether something before `fence` is held back, to be handed on together with what follows: a segment, a read and a wait do so.
    fn holds(&self, _: Fence) -> bool {
        false
    }

    /// Whether everything before `fence` has been executed.
    ///
    /// # Errors
    ///
    /// When something could not be.
    fn done(&mut self, fence: Fence) -> Result<bool, DeviceError>;

    /// Waits until everything before `fence` has been executed.
    ///
    /// # Errors
    ///
    /// When something could not be.
    fn wait(&mut self, fence: Fence) -> Result<(), DeviceError>;

    /// Waits for everything that is queued, and shows floats to the host.
    ///
    /// # Errors
    ///
    /// When something could not be executed.
    fn read<'a>(
        &'a mut self,
        from: &'a Buffer,
        floats: Range<usize>,
    ) -> Result<&'a [f32], DeviceError>;
}

/// A place in the order of a backend's operations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Fence(
    /// Operations before it.
    pub u64,
);
