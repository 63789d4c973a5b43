//! CPU backend: kernels for several instruction sets on a pool of threads.
//!
//! Every output element is one sum in a fixed order, independent of the computing thread and of concurrent work. Logits
//! therefore have the same bits for any number of threads, any prefill chunk and any residency.
#![expect(
    clippy::indexing_slicing,
    clippy::cast_precision_loss,
    clippy::inline_always,
    clippy::needless_range_loop,
    reason = "kernels index slices whose lengths their callers compute from checked shapes; widths are below 2^24; a \
              kernel's body has to be inlined into each of its versions; what an iterator calls would be compiled without \
              the instructions of a set"
)]

use std::{io, ops::Range};

use candle_core::quantized::k_quants::{
    BlockQ2K, BlockQ3K, BlockQ4_0, BlockQ4_1, BlockQ4K, BlockQ5_0, BlockQ5_1, BlockQ5K, BlockQ6K,
    BlockQ8_0, GgmlType,
};

use self::{copying::Copying, isa::Isa, pool::Pool, quant::Format, share::Share};
use super::{
    Activate, Backend, Buffer, Combine, Device, DeviceError, Fence, Finish, Gather, Limits,
    Multiply, Norm, Operation, Prepare, Region, RowBytes, Span, View, Widen,
    memory::{Access, Owner},
};
use crate::{
    arena::{Backing, Mapping},
    error::LoadErrorKind,
    gguf::GgmlDType,
    reserve::Reserve,
    spec::{Activation, AttentionSpec},
};
use cotenant_memory::heap;
use cotenant_units::Bytes;

/// An assertion in unit tests and debug builds: unlike `debug_assert`, also in fully optimised tests.
macro_rules! assert_in_tests {
    ($($condition:tt)*) => {
        if cfg!(any(test, debug_assertions)) {
            assert!($($condition)*);
        }
    };
}

mod affine;
mod attention;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod cells;
mod convolution;
mod copying;
mod delta;
#[cfg(target_arch = "x86_64")]
mod delta512;
mod delta_steps;
mod depthwise;
#[cfg(target_arch = "x86_64")]
mod few512;
mod flash;
#[cfg(target_arch = "x86_64")]
mod flash512;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod flash_tiles;
mod flash_walk;
mod float;
mod floats;
#[cfg(target_arch = "x86_64")]
mod four_rows;
mod isa;
mod kernels;
mod matmul;
#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(target_arch = "aarch64")]
mod neon_tile;
#[cfg(target_arch = "aarch64")]
mod neon_unpack;
#[cfg(target_arch = "x86_64")]
mod pairs512;
mod pool;
mod processors;
mod quant;
mod rows;
#[cfg(target_arch = "x86_64")]
mod rows256;
mod scan;
#[cfg(target_arch = "x86_64")]
mod set256;
mod share;
mod table;
#[cfg(test)]
mod test_numbers;
#[cfg(target_arch = "x86_64")]
mod tile;
#[cfg(target_arch = "x86_64")]
mod tile256;
#[cfg(target_arch = "x86_64")]
mod turned;
#[cfg(target_arch = "x86_64")]
mod unpack256;

/// Makes CPU backends created from now on use the kernels of this instruction set, to compare sets on one machine.
///
/// # Errors
///
/// The names of this machine's sets, if none has this name or another one was requested before.
pub fn use_instructions(name: &str) -> Result<(), Vec<&'static str>> {
    if Isa::choose(name) {
        Ok(())
    } else {
        Err(Isa::available().iter().map(|set| set.name()).collect())
    }
}

/// The CPU with this many threads, the caller included; at least 1.
#[derive(Clone, Copy, Debug)]
pub struct CpuDevice(pub usize);

impl Device for CpuDevice {
    fn copies_bytes(&self, types: &[GgmlDType], columns: usize) -> Bytes {
        let bytes: usize = Format::COPIES
            .into_iter()
            .filter(|&format| types.iter().any(|&dtype| Format::of(dtype) == format))
            .map(|format| matmul::padded(format, columns))
            .sum();
        Bytes::of_len(bytes)
    }

    fn scratch_bytes(&self, spec: &AttentionSpec) -> Bytes {
        attention::scratch_bytes(spec, self.0.max(1))
    }

    fn tries_states(&self) -> bool {
        true
    }

    fn start(&self, _: &Limits) -> Result<Box<dyn Backend>, LoadErrorKind> {
        Ok(Box::new(Cpu::new(self.0).map_err(LoadErrorKind::Threads)?))
    }
}

/// The CPU, which executes an operation when it is queued.
pub struct Cpu {
    isa: Isa,
    pool: Pool,
    owner: Owner,
}

impl Cpu {
    /// The CPU with `threads` threads, the caller included; at least 1.
    ///
    /// # Errors
    ///
    /// A thread cannot be started.
    pub fn new(threads: usize) -> io::Result<Self> {
        Ok(Self {
            isa: Isa::chosen(),
            pool: Pool::new(threads)?,
            owner: Owner::new(),
        })
    }
}

// SAFETY: operations are executed when they are queued.
unsafe impl Backend for Cpu {
    fn name(&self) -> String {
        format!("cpu ({}, {} threads)", self.isa.name(), self.pool.threads())
    }

    fn allocate(&self, bytes: Bytes, backing: Backing) -> io::Result<Buffer> {
        Ok(self.owner.buffer(Mapping::new(bytes, backing)?))
    }

    fn ring(&self, bytes: Bytes, backing: Backing) -> io::Result<Buffer> {
        self.allocate(bytes, backing)
    }

    fn reserve(&self, bytes: Bytes, granule: Bytes) -> io::Result<Region> {
        Ok(self.owner.region(Reserve::new(bytes, granule)?))
    }

    fn trim(&self) {
        heap::trim();
    }

    fn takes_parts(&self) -> bool {
        true
    }

    fn queue(&mut self, operation: Operation<'_>) -> Result<(), DeviceError> {
        let Self { isa, pool, owner } = self;
        let isa = *isa;
        match &operation {
            Operation::Activate(job) => activate(pool, isa, job, &mut Access::new(owner)),
            Operation::Attend(job) => attention::attend(pool, isa, job, &mut Access::new(owner)),
            Operation::Combine(job) => combine(pool, isa, job, &mut Access::new(owner)),
            Operation::Convert(job) => {
                cells::convert(pool, isa, job, Access::new(owner).region(&job.space)?)
            }
            Operation::Convolve(job) => {
                let access = &mut Access::new(owner);
                let made = convolution::convolve(pool, isa, job, access)?;
                copy_rows(pool, isa, &job.prepare, (made, job.spec.channels), access)
            }
            Operation::Delta(job) => {
                let access = &mut Access::new(owner);
                let made = delta::delta(pool, isa, job, access)?;
                copy_rows(pool, isa, &job.prepare, (made, job.spec.values()), access)
            }
            Operation::Fill { floats, value } => {
                Access::new(owner).write(floats)?.fill(*value);
                Ok(())
            }
            Operation::Finish(job) => finish(isa, job, &mut Access::new(owner)),
            Operation::Gather(job) => gather(pool, isa, job, &mut Access::new(owner)),
            Operation::Move { from, to } => move_bytes(pool, (from, to), &Access::new(owner)),
            Operation::Multiply(job) => {
                multiply(pool, isa, job, &mut Access::new(owner))?;
                let then = job.activate.as_ref();
                then.map_or(Ok(()), |job| {
                    activate(pool, isa, job, &mut Access::new(owner))
                })
            }
            Operation::Norm(job) => norm(pool, isa, job, &mut Access::new(owner)),
            Operation::Rotate(job) => {
                let mut access = Access::new(owner);
                let rows = access.write(&job.to)?.chunks_exact_mut(job.width.max(1));
                for (position, angles) in (job.position..).zip(rows) {
                    job.rotation.fill(position, job.factors.as_deref(), angles);
                }
                Ok(())
            }
            Operation::Scan(job) => {
                let access = &mut Access::new(owner);
                let made = scan::scan(pool, isa, job, access)?;
                copy_rows(pool, isa, &job.prepare, (made, job.spec.values()), access)
            }
            Operation::Widen(job) => widen_rows(job, owner),
        }
    }

    fn mark(&mut self) -> Fence {
        Fence::default()
    }

    fn done(&mut self, _: Fence) -> Result<bool, DeviceError> {
        Ok(true)
    }

    fn wait(&mut self, _: Fence) -> Result<(), DeviceError> {
        Ok(())
    }

    fn read<'a>(
        &'a mut self,
        from: &'a Buffer,
        floats: Range<usize>,
    ) -> Result<&'a [f32], DeviceError> {
        self.owner.read(from, floats)
    }
}

fn norm<'op>(
    pool: &mut Pool,
    isa: Isa,
    job: &'op Norm,
    access: &mut Access<'op>,
) -> Result<(), DeviceError> {
    let weight = access.read_some(job.weight.as_ref())?;
    let norm_bias = access.read_some(job.bias.as_ref())?;
    let width = job.width.max(1);
    let (stream, normed) = (access.write(&job.stream)?, access.write(&job.normed)?);
    let rows = same_len(stream, normed)? / width;
    let (mut bias, mut post_norm, mut scale, mut sum) = (None, None, None, None);
    if let Some(residual) = &job.residual {
        bias = access.read_some(residual.bias.as_ref())?;
        post_norm = access.read_some(residual.norm.as_ref())?;
        scale = Some(residual.scale);
        sum = access
            .read_some(residual.sum.as_ref())?
            .and_then(|sum| sum.first());
    }
    let copying = Copying::new(isa, &job.prepare, (rows, width), access)?;
    let (stream, normed) = (Share::new(stream), Share::new(normed));
    pool.run(rows, &|row| {
        // SAFETY: each row is one item.
        let stream = unsafe { stream.slice(row * width, width) };
        // SAFETY: as above.
        let normed = unsafe { normed.slice(row * width, width) };
        if let Some(scale) = scale {
            if let Some(bias) = bias {
                float::add(isa, normed, bias);
            }
            if let Some(weight) = post_norm {
                float::rms_row_in_place(isa, normed, weight, job.epsilon);
            }
            if scale != 1.0 {
                normed.iter_mut().for_each(|value| *value *= scale);
            }
            float::add(isa, stream, normed);
            if let Some(factor) = sum {
                stream.iter_mut().for_each(|value| *value *= factor);
            }
        }
        match (weight, norm_bias) {
            (Some(weight), Some(bias)) => {
                float::centre(isa, stream, normed);
                float::rms_row_in_place(isa, normed, weight, job.epsilon);
                float::add(isa, normed, bias);
            }
            (Some(weight), None) => float::rms_rows(isa, stream, weight, job.epsilon, normed),
            (None, _) => normed.copy_from_slice(stream),
        }
        // SAFETY: as above.
        unsafe { copying.row(row, normed) };
    });
    Ok(())
}

fn gather<'op>(
    pool: &mut Pool,
    isa: Isa,
    job: &'op Gather<'_>,
    access: &mut Access<'op>,
) -> Result<(), DeviceError> {
    let width = job.width.max(1);
    let to = access.write(&job.to)?;
    let from = access.read(&job.from)?;
    for (row, to) in job.rows.iter().zip(to.chunks_exact_mut(width)) {
        let start = *row as usize * width;
        let from = from.get(start..start + width).ok_or_else(no_row)?;
        to.copy_from_slice(from);
    }
    copy_rows(pool, isa, &job.prepare, (to, width), access)
}

fn combine<'op>(
    pool: &mut Pool,
    isa: Isa,
    job: &'op Combine<'_>,
    access: &mut Access<'op>,
) -> Result<(), DeviceError> {
    let width = job.width.max(1);
    let to = access.write(&job.to)?;
    let from = access.read(&job.from)?;
    let rows = to.len() / width;
    let each = job.terms.len() / rows.max(1);
    let held = from.len() / width;
    if job.terms.iter().any(|(row, _)| *row as usize >= held) {
        return Err(no_row());
    }
    let biases = match &job.biases {
        Some(biases) => {
            let rows = access.read(&biases.rows)?;
            let of = biases.of.as_ref();
            if of.len() < job.terms.len()
                || of
                    .iter()
                    .any(|row| (*row as usize + 1) * width > rows.len())
            {
                return Err(no_row());
            }
            Some((rows, of))
        }
        None => None,
    };
    let to = Share::new(to);
    pool.run(rows, &|row| {
        // SAFETY: each row is one item.
        let to = unsafe { to.slice(row * width, width) };
        to.fill(0.0);
        for (number, (term, factor)) in (row * each..).zip(&job.terms[row * each..][..each]) {
            let from = &from[*term as usize * width..][..width];
            match biases {
                None => float::add_scaled(isa, to, from, *factor),
                Some((rows, of)) => {
                    let bias = &rows[of[number] as usize * width..][..width];
                    float::add_biased(isa, to, from, bias, *factor);
                }
            }
        }
    });
    Ok(())
}

fn no_row() -> DeviceError {
    DeviceError::new("a row that does not exist is used")
}

fn multiply<'op>(
    pool: &mut Pool,
    isa: Isa,
    job: &'op Multiply<'_>,
    access: &mut Access<'op>,
) -> Result<(), DeviceError> {
    // Open written memory first, so that no weight overlaps it.
    let mut outs = Vec::with_capacity(job.products.len());
    let mut before: Option<(&View, usize)> = None;
    for product in job.products.iter() {
        let end = product.first + product.rows;
        let fits = end <= product.stride
            && (job.rows.max(1) - 1) * product.stride + end <= product.out.len() / 4;
        let shares = before.filter(|(out, _)| out.is_same(&product.out));
        if !fits || shares.is_some_and(|(_, end)| product.first < end) {
            return Err(DeviceError::new("a product has no place for its result"));
        }
        outs.push(match (shares, outs.last()) {
            (Some(_), Some(out)) => *out,
            _ => Share::new(access.write(&product.out)?),
        });
        before = Some((&product.out, end));
    }
    let (input, copies) = (
        access.read(&job.input)?,
        access.read_bytes(&job.copies.memory)?,
    );
    let mut tasks = Vec::with_capacity(outs.len());
    for (product, out) in job.products.iter().zip(outs) {
        let weights = access.weight(&product.weight)?;
        tasks.push(matmul::Task::new(
            product,
            weights,
            out,
            (input, copies, &job.copies),
            job.rows,
        )?);
    }
    matmul::project(pool, isa, &tasks, job.rows);
    Ok(())
}

/// Copies rows to the formats of the next products.
fn copy_rows<'op>(
    pool: &mut Pool,
    isa: Isa,
    prepare: &'op Prepare,
    (made, width): (&[f32], usize),
    access: &mut Access<'op>,
) -> Result<(), DeviceError> {
    let rows = made.len() / width.max(1);
    Copying::new(isa, prepare, (rows, width), access)?.all(pool, made, width);
    Ok(())
}

fn activate<'op>(
    pool: &mut Pool,
    isa: Isa,
    job: &'op Activate,
    access: &mut Access<'op>,
) -> Result<(), DeviceError> {
    let gate = access.write(&job.gate)?;
    // Without a factor, none is read.
    let up = match &job.up {
        Some(up) => access.write(up)?,
        None => &mut [],
    };
    let (len, width) = (gate.len(), job.width.max(1));
    if job.up.is_some() {
        same_len(gate, up)?;
    }
    for (bias, rows) in [(&job.gate_bias, &mut *gate), (&job.up_bias, &mut *up)] {
        if let Some(bias) = access.read_some(bias.as_ref())? {
            rows.chunks_exact_mut(width)
                .for_each(|row| float::add(isa, row, bias));
        }
    }
    let copying = Copying::new(isa, &job.prepare, (len / width, width), access)?;
    let kernel = match job.activation {
        Activation::Clamped => float::clamped_mul,
        Activation::Gelu if job.up.is_none() => float::gelu_alone,
        Activation::Gelu => float::gelu_mul,
        Activation::ReluSquared => float::relu_squared,
        Activation::Silu => float::silu_mul,
    };
    let share = Share::new(&mut *gate);
    pool.run(len.div_ceil(ACTIVATION_ITEM), &|item| {
        let from = item * ACTIVATION_ITEM;
        let count = ACTIVATION_ITEM.min(len - from);
        // SAFETY: each part is one item.
        let gate = unsafe { share.slice(from, count) };
        kernel(isa, gate, up.get(from..from + count).unwrap_or_default());
    });
    copying.all(pool, gate, width);
    Ok(())
}

fn finish<'op>(
    isa: Isa,
    job: &'op Finish<'_>,
    access: &mut Access<'op>,
) -> Result<(), DeviceError> {
    let (all, found) = (access.write(&job.logits)?, access.write(&job.found)?);
    let [greatest, value, broken] = found else {
        return Err(DeviceError::new("there is no room for what is found"));
    };
    let mut best = (f32::NEG_INFINITY, usize::MAX);
    let bias = access.read_some(job.bias.as_ref())?;
    for rows in job.said.iter() {
        let Some(logits) = all.get_mut(rows.clone()) else {
            return Err(DeviceError::new(
                "there are fewer logits than rows of the head",
            ));
        };
        if let Some(bias) = bias.and_then(|bias| bias.get(rows.clone())) {
            float::add(isa, logits, bias);
        }
        if job.scale != 1.0 {
            logits.iter_mut().for_each(|logit| *logit /= job.scale);
        }
        if let Some(cap) = job.cap {
            float::soft_cap(isa, logits, 1.0, cap);
        }
        if !float::all_finite(logits) {
            *broken = 1.0;
        }
        let most = float::greatest(isa, logits);
        if most > best.0
            && let Some(at) = logits.iter().position(|logit| *logit == most)
        {
            best = (most, rows.start + at);
        }
    }
    *value = best.0;
    *greatest = f32::from_bits(u32::try_from(best.1).unwrap_or(u32::MAX));
    Ok(())
}

fn widen_rows(job: &Widen<'_>, owner: &mut Owner) -> Result<(), DeviceError> {
    for row in job.rows.iter() {
        let mut access = Access::new(owner);
        let out = access.write(&row.to)?;
        let bytes = match &row.from {
            RowBytes::Host(bytes) => bytes,
            RowBytes::View(view) => access.weight(view)?,
        };
        if bytes.len() < out.len() / job.dtype.block_size() * job.dtype.type_size() {
            return Err(DeviceError::new("a row of the file is cut"));
        }
        dequantize(job.dtype, bytes, out);
        if job.scale != 1.0 {
            out.iter_mut().for_each(|value| *value *= job.scale);
        }
    }
    Ok(())
}

/// A row of the file's type as floats.
pub(crate) fn dequantize(dtype: GgmlDType, row: &[u8], out: &mut [f32]) {
    match dtype {
        GgmlDType::F32 => out.copy_from_slice(matmul::cast(row)),
        GgmlDType::F16 => widen(row, out, float::half_to_float),
        GgmlDType::BF16 => widen(row, out, |bits| f32::from_bits(u32::from(bits) << 16)),
        GgmlDType::Q8_0 => BlockQ8_0::to_float(matmul::cast(row), out),
        GgmlDType::Q4_0 => BlockQ4_0::to_float(matmul::cast(row), out),
        GgmlDType::Q4_1 => BlockQ4_1::to_float(matmul::cast(row), out),
        GgmlDType::Q5_0 => BlockQ5_0::to_float(matmul::cast(row), out),
        GgmlDType::Q5_1 => BlockQ5_1::to_float(matmul::cast(row), out),
        GgmlDType::Q2K => BlockQ2K::to_float(matmul::cast(row), out),
        GgmlDType::Q3K => BlockQ3K::to_float(matmul::cast(row), out),
        GgmlDType::Q4K => BlockQ4K::to_float(matmul::cast(row), out),
        GgmlDType::Q5K => BlockQ5K::to_float(matmul::cast(row), out),
        GgmlDType::Q6K => BlockQ6K::to_float(matmul::cast(row), out),
        GgmlDType::IQ4NL => table::IQ4_NL.to_float(row, out),
        GgmlDType::IQ4XS => table::iq4_xs_to_float(row, out),
        GgmlDType::MXFP4 => table::MXFP4.to_float(row, out),
    }
}

/// Copies bytes to a target of the same length.
fn move_bytes(
    pool: &mut Pool,
    (from, to): (&Span, &Span),
    access: &Access<'_>,
) -> Result<(), DeviceError> {
    let len = from.len();
    if to.len() != len {
        return Err(DeviceError::new(format!("{len} bytes meet {}", to.len())));
    }
    let (from, to) = (access.span(from)?, access.span(to)?);
    let apart = from.addr().get().abs_diff(to.addr().get());
    if apart < len || len < 2 * MOVED_ITEM {
        // SAFETY: both are memory of that length, and one operation is executed at a time.
        unsafe { std::ptr::copy(from.as_ptr(), to.as_ptr(), len) };
        return Ok(());
    }
    // SAFETY: as above, and they have nothing in common.
    let (from, to) = unsafe {
        let from = std::slice::from_raw_parts(from.as_ptr().cast_const(), len);
        (from, std::slice::from_raw_parts_mut(to.as_ptr(), len))
    };
    let share = Share::new(to);
    pool.run(len.div_ceil(MOVED_ITEM), &|item| {
        let start = item * MOVED_ITEM;
        let from = &from[start..len.min(start + MOVED_ITEM)];
        // SAFETY: each part is one item.
        unsafe { share.slice(start, from.len()) }.copy_from_slice(from);
    });
    Ok(())
}

/// Bytes per item of a move: some ten us, at which a second thread pays.
const MOVED_ITEM: usize = 128 << 10;

fn same_len(one: &[f32], other: &[f32]) -> Result<usize, DeviceError> {
    if one.len() == other.len() {
        Ok(one.len())
    } else {
        Err(DeviceError::new(format!(
            "{} floats meet {}",
            one.len(),
            other.len()
        )))
    }
}

fn widen(row: &[u8], out: &mut [f32], convert: impl Fn(u16) -> f32) {
    for (out, bits) in out.iter_mut().zip(matmul::cast::<u16>(row)) {
        *out = convert(*bits);
    }
}

/// Elements per item of the activation: some µs of exponentials.
const ACTIVATION_ITEM: usize = 1024;
