//! Backend that refuses memory on demand.

use std::{
    ops::Range,
    sync::{
        Mutex, Weak,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use super::*;
use crate::engine::{
    backend::{Backend, Buffer, DeviceError, Fence, Limits, Operation, Region, cpu::Cpu},
    error::LoadErrorKind,
    reader::Source,
};

/// What the backend does, set from outside.
#[derive(Clone, Default)]
pub(super) struct Refusing(Arc<Orders>);

#[derive(Default)]
struct Orders {
    refuse: AtomicBool,
    /// How much memory is found before all is refused.
    left: AtomicUsize,
    file: Mutex<Option<Weak<dyn Source>>>,
    owners: AtomicUsize,
}

impl Refusing {
    /// Takes the place of the model's backend.
    pub(super) fn put_into(model: &mut Model) -> Self {
        let orders = Self::default();
        let inner = std::mem::replace(&mut model.backend, Box::new(Cpu::new(1).unwrap()));
        let refusing = orders.clone();
        model.backend = Box::new(Refuser { inner, refusing });
        orders
    }

    pub(super) fn refuse(&self, refuse: bool) {
        self.0.left.store(0, Ordering::Relaxed);
        self.0.refuse.store(refuse, Ordering::Relaxed);
    }

    /// Memory is found so many times more.
    pub(super) fn refuse_after(&self, times: usize) {
        self.refuse(true);
        self.0.left.store(times, Ordering::Relaxed);
    }

    /// Counts from now on who has the file whenever memory is asked for.
    pub(super) fn watch(&self, model: &Model) {
        *self.0.file.lock().unwrap() = Some(Arc::downgrade(model.weights.file()));
    }

    /// The most that had it.
    pub(super) fn owners_of_the_file(&self) -> usize {
        self.0.owners.load(Ordering::Relaxed)
    }
}

/// The CPU, on which memory is found so many times only.
pub(super) struct Scarce(pub(super) usize);

impl Device for Scarce {
    fn copies_bytes(&self, types: &[GgmlDType], columns: usize) -> Bytes {
        CpuDevice(1).copies_bytes(types, columns)
    }

    fn scratch_bytes(&self, spec: &crate::engine::spec::AttentionSpec) -> Bytes {
        CpuDevice(1).scratch_bytes(spec)
    }

    fn start(&self, limits: &Limits) -> Result<Box<dyn Backend>, LoadErrorKind> {
        let refusing = Refusing::default();
        refusing.refuse_after(self.0);
        Ok(Box::new(Refuser { inner: CpuDevice(1).start(limits)?, refusing }))
    }
}

struct Refuser {
    inner: Box<dyn Backend>,
    refusing: Refusing,
}

// SAFETY: what is executed is the inner backend's business.
unsafe impl Backend for Refuser {
    fn name(&self) -> String {
        self.inner.name()
    }

    fn allocate(&self, bytes: Bytes, backing: Backing) -> io::Result<Buffer> {
        let orders = &self.refusing.0;
        let owners = orders.file.lock().unwrap().as_ref().map_or(0, Weak::strong_count);
        orders.owners.fetch_max(owners, Ordering::Relaxed);
        let left = |left: usize| left.checked_sub(1);
        let found = orders.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, left).is_ok();
        if orders.refuse.load(Ordering::Relaxed) && !found {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        self.inner.allocate(bytes, backing)
    }

    fn ring(&self, bytes: Bytes, backing: Backing) -> io::Result<Buffer> {
        self.inner.ring(bytes, backing)
    }

    fn reserve(&self, bytes: Bytes, granule: Bytes) -> io::Result<Region> {
        self.inner.reserve(bytes, granule)
    }

    fn trim(&self) {
        self.inner.trim();
    }

    fn queue(&mut self, operation: Operation<'_>) -> Result<(), DeviceError> {
        self.inner.queue(operation)
    }

    fn mark(&mut self) -> Fence {
        self.inner.mark()
    }

    fn done(&mut self, fence: Fence) -> Result<bool, DeviceError> {
        self.inner.done(fence)
    }

    fn wait(&mut self, fence: Fence) -> Result<(), DeviceError> {
        self.inner.wait(fence)
    }

    fn read<'a>(&'a mut self, from: &'a Buffer, floats: Range<usize>) -> Result<&'a [f32], DeviceError> {
        self.inner.read(from, floats)
    }
}
