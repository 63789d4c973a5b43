//! CPU backend: kernels for several instruction sets on a pool of threads.
//!
//! Every output element is one sum in one order, whoever computes it and whatever is computed beside it. So logits have
//! the same bits for any number of threads, any prefill chunk and any residency.
#![expect(
    clippy::indexing_slicing,
    clippy::cast_precision_loss,
    clippy::inline_always,
    clippy::needless_range_loop,
    reason = "kernels index slices whose lengths their callers compute from checked shapes; widths are below 2^24; a \
              kernel's body has to be inlined into each of its versions; what an iterator calls would be compiled without \
              the instructions of a set"
)]

use std::{
    io,
    sync::{Mutex, PoisonError},
};

use candle_core::quantized::{
    GgmlDType,
    k_quants::{
        BlockQ2K, BlockQ3K, BlockQ4_0, BlockQ4_1, BlockQ4K, BlockQ5_0, BlockQ5_1, BlockQ5K, BlockQ6K, BlockQ8_0,
        GgmlType,
    },
};

use self::{isa::Isa, pool::Pool, quant::Format, share::Share};
use super::{AttentionJob, Backend, ConvertJob, DeltaJob, Prepared, Projection};
use crate::{
    engine::{
        arena::{self, Backing, Mapping},
        reserve::Reserve,
        spec::AttentionSpec,
    },
    units::Bytes,
};

mod affine;
mod attention;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod cells;
mod delta;
#[cfg(target_arch = "x86_64")]
mod delta512;
mod delta_steps;
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
mod pool;
mod processors;
mod quant;
mod rows;
#[cfg(target_arch = "x86_64")]
mod rows256;
mod share;
#[cfg(test)]
mod test_numbers;
#[cfg(target_arch = "x86_64")]
mod tile;
#[cfg(target_arch = "x86_64")]
mod tile256;
#[cfg(target_arch = "x86_64")]
mod unpack256;

/// Lets CPU backends that are made from now on use the kernels of this instruction set, to compare sets on one machine.
///
/// # Errors
///
/// The names of those that this machine has, when it has none of this name, or another one was asked for before.
pub fn use_instructions(name: &str) -> Result<(), Vec<&'static str>> {
    if Isa::choose(name) {
        Ok(())
    } else {
        Err(Isa::available().iter().map(|set| set.name()).collect())
    }
}

/// The CPU.
pub struct Cpu {
    isa: Isa,
    pool: Mutex<Pool>,
    threads: usize,
}

impl Cpu {
    /// The CPU with `threads` threads, of which the calling one is one; at least 1.
    ///
    /// # Errors
    ///
    /// When a thread cannot be started.
    pub fn new(threads: usize) -> io::Result<Self> {
        let pool = Pool::new(threads)?;
        Ok(Self {
            isa: Isa::chosen(),
            threads: pool.threads(),
            pool: Mutex::new(pool),
        })
    }

    /// Bytes that [`Backend::prepare`] needs for one token.
    #[must_use]
    pub fn prepared_bytes_for(types: &[GgmlDType], columns: usize) -> Bytes {
        let bytes: usize = Format::COPIES
            .into_iter()
            .filter(|&format| types.iter().any(|&dtype| Format::of(dtype) == format))
            .map(|format| matmul::padded(format, columns))
            .sum();
        Bytes::of_len(bytes)
    }

    /// Bytes that [`Backend::attend`] needs on so many threads.
    #[must_use]
    pub fn scratch_bytes_for(spec: &AttentionSpec, threads: usize) -> Bytes {
        attention::scratch_bytes(spec, threads)
    }

    /// An activation over all elements, in parts that threads claim.
    fn in_parts(&self, gate: &mut [f32], up: &[f32], kernel: fn(Isa, &mut [f32], &[f32])) {
        let len = gate.len();
        let gate = Share::new(gate);
        self.with_pool(|pool| {
            pool.run(len.div_ceil(ACTIVATION_ITEM), &|item| {
                let from = item * ACTIVATION_ITEM;
                let count = ACTIVATION_ITEM.min(len - from);
                // SAFETY: each part is one item.
                let gate = unsafe { gate.slice(from, count) };
                kernel(self.isa, gate, &up[from..from + count]);
            });
        });
    }

    /// Never waits: operations are called one after the other, by the one thread that owns the model.
    fn with_pool(&self, work: impl FnOnce(&mut Pool)) {
        work(&mut self.pool.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

impl Backend for Cpu {
    fn name(&self) -> String {
        format!("cpu ({}, {} threads)", self.isa.name(), self.threads)
    }

    fn allocate(&self, bytes: Bytes, backing: Backing) -> io::Result<Mapping> {
        Mapping::new(bytes, backing)
    }

    fn reserve(&self, bytes: Bytes, granule: Bytes) -> io::Result<Reserve> {
        Reserve::new(bytes, granule)
    }

    fn trim(&self) {
        arena::trim_heap();
    }

    fn prepared_bytes(&self, types: &[GgmlDType], columns: usize) -> Bytes {
        Self::prepared_bytes_for(types, columns)
    }

    fn scratch_bytes(&self, spec: &AttentionSpec) -> Bytes {
        Self::scratch_bytes_for(spec, self.threads)
    }

    fn dequantize(&self, dtype: GgmlDType, row: &[u8], out: &mut [f32]) {
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
            // Refused when the header is read.
            GgmlDType::Q8_1 | GgmlDType::Q8K => out.fill(f32::NAN),
        }
    }

    fn rms_norm(&self, input: &[f32], weight: &[f32], epsilon: f32, rows: usize, out: &mut [f32]) {
        let width = weight.len();
        let out = Share::new(out);
        self.with_pool(|pool| {
            pool.run(rows, &|row| {
                // SAFETY: each row is one item.
                let out = unsafe { out.slice(row * width, width) };
                float::rms_rows(self.isa, &input[row * width..][..width], weight, epsilon, out);
            });
        });
    }

    fn rms_norm_in_place(&self, rows_of: &mut [f32], weight: &[f32], epsilon: f32, rows: usize) {
        let width = weight.len();
        let rows_of = Share::new(rows_of);
        self.with_pool(|pool| {
            pool.run(rows, &|row| {
                // SAFETY: each row is one item.
                let row = unsafe { rows_of.slice(row * width, width) };
                float::rms_row_in_place(self.isa, row, weight, epsilon);
            });
        });
    }

    fn prepare(&self, input: &[f32], rows: usize, columns: usize, types: &[GgmlDType], prepared: &mut Prepared) {
        for format in Format::COPIES {
            if !types.iter().any(|&dtype| Format::of(dtype) == format) {
                continue;
            }
            let (start, step) = matmul::place(prepared, format, columns);
            let Some(copies) = prepared.memory.slice_mut(start, rows * step) else {
                debug_assert!(false, "a chunk is larger than its workspace");
                return;
            };
            let copies = Share::new(copies);
            self.with_pool(|pool| {
                pool.run(rows, &|row| {
                    let input = &input[row * columns..][..columns];
                    // SAFETY: each row is one item.
                    let copy = unsafe { copies.slice(row * step, step) };
                    match format {
                        Format::F32 => {}
                        Format::Q8_0 => quant::quantize_q8_0(self.isa, input, copy),
                        Format::Q8K => quant::quantize_q8k(self.isa, input, copy),
                        Format::F16 => narrow(input, copy, |x| half::f16::from_f32(x).to_bits()),
                        Format::Bf16 => narrow(input, copy, |x| half::bf16::from_f32(x).to_bits()),
                    }
                });
            });
        }
    }

    fn project(&self, jobs: &mut [Projection<'_>], input: &[f32], prepared: &Prepared, rows: usize) {
        self.with_pool(|pool| matmul::project(pool, self.isa, jobs, input, prepared, rows));
    }

    fn add(&self, stream: &mut [f32], other: &[f32]) {
        float::add(self.isa, stream, other);
    }

    fn gelu_mul(&self, gate: &mut [f32], up: &[f32]) {
        self.in_parts(gate, up, float::gelu_mul);
    }

    fn silu_mul(&self, gate: &mut [f32], up: &[f32]) {
        self.in_parts(gate, up, float::silu_mul);
    }

    fn attend(&self, job: &mut AttentionJob<'_>) {
        self.with_pool(|pool| attention::attend(pool, self.isa, job));
    }

    fn convert(&self, job: &mut ConvertJob<'_>) {
        self.with_pool(|pool| cells::convert(pool, self.isa, job));
    }

    fn delta(&self, job: &mut DeltaJob<'_>) {
        self.with_pool(|pool| delta::delta(pool, self.isa, job));
    }
}

fn widen(row: &[u8], out: &mut [f32], convert: impl Fn(u16) -> f32) {
    for (out, bits) in out.iter_mut().zip(matmul::cast::<u16>(row)) {
        *out = convert(*bits);
    }
}

fn narrow(input: &[f32], copy: &mut [u8], convert: impl Fn(f32) -> u16) {
    for (x, bits) in input.iter().zip(copy.chunks_exact_mut(2)) {
        bits.copy_from_slice(&convert(*x).to_ne_bytes());
    }
}

/// Elements of one item of the activation: some µs of exponentials.
const ACTIVATION_ITEM: usize = 1024;
