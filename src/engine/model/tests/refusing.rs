//! Backend that refuses memory on demand.

use std::sync::{
    Mutex, Weak,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

use candle_core::quantized::GgmlDType;

use super::*;
use crate::engine::{
    backend::{AttentionJob, ConvertJob, DeltaJob, Prepared, Projection, cpu::Cpu},
    reader::Source,
    reserve::Reserve,
    spec::AttentionSpec,
};

/// What the backend does, told from outside.
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

struct Refuser {
    inner: Box<dyn Backend>,
    refusing: Refusing,
}

impl Backend for Refuser {
    fn name(&self) -> String {
        self.inner.name()
    }

    fn allocate(&self, bytes: Bytes, backing: Backing) -> io::Result<Mapping> {
        let orders = &self.refusing.0;
        let owners = orders.file.lock().unwrap().as_ref().map_or(0, Weak::strong_count);
        orders.owners.fetch_max(owners, Ordering::Relaxed);
        let left = |left: usize| left.checked_sub(1);
        let found = orders
            .left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, left)
            .is_ok();
        if orders.refuse.load(Ordering::Relaxed) && !found {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        self.inner.allocate(bytes, backing)
    }

    fn reserve(&self, bytes: Bytes, granule: Bytes) -> io::Result<Reserve> {
        self.inner.reserve(bytes, granule)
    }

    fn scratch_bytes(&self, spec: &AttentionSpec) -> Bytes {
        self.inner.scratch_bytes(spec)
    }

    fn trim(&self) {
        self.inner.trim();
    }

    fn prepared_bytes(&self, types: &[GgmlDType], columns: usize) -> Bytes {
        self.inner.prepared_bytes(types, columns)
    }

    fn dequantize(&self, dtype: GgmlDType, row: &[u8], out: &mut [f32]) {
        self.inner.dequantize(dtype, row, out);
    }

    fn rms_norm(&self, input: &[f32], weight: &[f32], epsilon: f32, rows: usize, out: &mut [f32]) {
        self.inner.rms_norm(input, weight, epsilon, rows, out);
    }

    fn rms_norm_in_place(&self, rows_of: &mut [f32], weight: &[f32], epsilon: f32, rows: usize) {
        self.inner.rms_norm_in_place(rows_of, weight, epsilon, rows);
    }

    fn prepare(&self, input: &[f32], rows: usize, columns: usize, types: &[GgmlDType], prepared: &mut Prepared) {
        self.inner.prepare(input, rows, columns, types, prepared);
    }

    fn project(&self, jobs: &mut [Projection<'_>], input: &[f32], prepared: &Prepared, rows: usize) {
        self.inner.project(jobs, input, prepared, rows);
    }

    fn add(&self, stream: &mut [f32], other: &[f32]) {
        self.inner.add(stream, other);
    }

    fn gelu_mul(&self, gate: &mut [f32], up: &[f32]) {
        self.inner.gelu_mul(gate, up);
    }

    fn silu_mul(&self, gate: &mut [f32], up: &[f32]) {
        self.inner.silu_mul(gate, up);
    }

    fn attend(&self, job: &mut AttentionJob<'_>) {
        self.inner.attend(job);
    }

    fn convert(&self, job: &mut ConvertJob<'_>) {
        self.inner.convert(job);
    }

    fn delta(&self, job: &mut DeltaJob<'_>) {
        self.inner.delta(job);
    }
}
