//! Trial of a GPU before its choice: correctness, and speed of reading weights.

use std::{
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

use super::{
    gpu::{Gpu, Observer},
    parameters::{copies_stride, formats_of},
    queue::Cuda,
};
use crate::{
    arena::Backing,
    backend::{
        Backend as _, Buffer, Copies, DeviceError, Finish, Limits, Multiply, Norm, Operation,
        Prepare, Product, Row, RowBytes, Types, Widen,
    },
    error::Unavailable,
    gguf::GgmlDType,
    shape::FLAGS,
};
use cotenant_units::Bytes;

/// Result of a trial.
#[derive(Clone, Copy, Debug)]
pub(super) struct Trial {
    /// Whether tensor cores give the same results as other kernels.
    pub(super) tensor_cores: bool,
    /// Whether captured graphs give the same results as separate commands.
    pub(super) graphs: bool,
    /// Size in bytes of the units in which the cache grows and shrinks.
    pub(super) granule: usize,
    /// Bytes of a context with its kernels and the maximum number of graphs.
    pub(super) context: usize,
}

impl Trial {
    /// Computes products of a prompt with and without tensor cores, in every kind of memory that a model needs, and
    /// some of one token with and without graphs.
    ///
    /// # Errors
    ///
    /// A call fails.
    pub(super) fn run() -> Result<Self, Unavailable> {
        let free = |observer: &Observer| observer.free().map_err(|error| refused(&error));
        let observer = Observer::new()?;
        let before = free(&observer)?;
        let gpu = Gpu::open()?;
        let product = |plain| {
            let mut cuda = cuda(&gpu, true, plain)?;
            let product = product(&mut cuda)?;
            let mut region = cuda.reserve(Bytes::of_len(gpu.granule), Bytes::ZERO)?;
            region.set_open(Bytes::of_len(gpu.granule))?;
            Ok::<_, io::Error>(product)
        };
        let by_others = product(true).map_err(|error| refused(&error))?;
        let by_tensor_cores = product(false).map_err(|error| refused(&error))?;
        let graphs = graphs_compute(&gpu).unwrap_or(false);
        let context = before.saturating_sub(free(&observer)?);
        Ok(Self {
            tensor_cores: by_others == by_tensor_cores,
            graphs,
            granule: gpu.granule,
            context: context.next_multiple_of(CONTEXT_STEP).min(CONTEXT_MAX),
        })
    }
}

/// Rate at which the single-token kernel reads weights, in bytes per second.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Speed {
    /// From device memory.
    pub(super) device: u64,
    /// From mappings read in place.
    pub(super) mapped: u64,
    /// Time per launch in a series, of a nearly empty kernel.
    pub(super) launch: Duration,
    /// The same within a graph, if available.
    pub(super) in_graph: Option<Duration>,
}

impl Speed {
    /// Measures within half a second.
    ///
    /// # Errors
    ///
    /// A call fails.
    pub(super) fn measure(graphs: bool) -> Result<Self, Unavailable> {
        let gpu = Gpu::open()?;
        let measured = || {
            Ok::<_, io::Error>(Self {
                device: reading(&gpu, false)?,
                mapped: reading(&gpu, true)?,
                launch: launching(&gpu, false)?,
                in_graph: if graphs {
                    Some(launching(&gpu, true)?)
                } else {
                    None
                },
            })
        };
        measured().map_err(|error| refused(&error))
    }

    /// Whether mapped weights are read equally fast: mapped, the system accounts for them and gets them back at once.
    pub(super) const fn prefers_mapped(&self) -> bool {
        self.mapped.saturating_mul(100) >= self.device.saturating_mul(MAPPED_PERCENT)
    }
}

pub(super) fn refused(error: &dyn std::error::Error) -> Unavailable {
    Unavailable::new(
        format!("the GPU failed its trial: {error}"),
        "check `dmesg` and the holders of its memory, or set `llm.device: cpu`",
    )
}

fn cuda(gpu: &Arc<Gpu>, mapped: bool, plain: bool) -> io::Result<Cuda> {
    Cuda::new(
        gpu,
        String::new(),
        mapped,
        plain,
        &Limits {
            parts: 1,
            said: 1,
            ..Limits::default()
        },
    )
}

fn failed(error: DeviceError) -> io::Error {
    io::Error::other(error)
}

/// Rows of floats with copies, as prepared by a norm for products.
struct Input {
    norm: Norm,
    normed: Buffer,
    copies: Copies,
    rows: usize,
    columns: usize,
}

impl Input {
    fn new(cuda: &mut Cuda, rows: usize, columns: usize, types: Types) -> io::Result<Self> {
        let floats = |count: usize| cuda.allocate(Bytes::of_len(count * 4), Backing::Now);
        let (stream, normed, weight) = (
            floats(rows * columns)?,
            floats(rows * columns)?,
            floats(columns)?,
        );
        let bytes = copies_stride(formats_of(types), columns) * rows;
        let copies = Copies {
            memory: cuda
                .allocate(Bytes::of_len(bytes), Backing::Now)?
                .view_bytes(0, bytes),
            rows,
            columns,
            types,
        };
        let numbers = |count: usize, scale: f32| {
            let numbers = (0..count)
                .map(|at| f32::from(u8::try_from(at * 37 % 251).unwrap_or(0)) * scale - 1.0);
            numbers.flat_map(f32::to_le_bytes).collect::<Vec<u8>>()
        };
        for (to, count, scale) in [(&stream, rows * columns, 0.008), (&weight, columns, 0.01)] {
            let row = Row {
                from: RowBytes::Host(numbers(count, scale).into()),
                to: to.view(0..count),
            };
            let widen = Widen {
                rows: std::slice::from_ref(&row).into(),
                dtype: GgmlDType::F32,
                scale: 1.0,
            };
            cuda.queue(Operation::Widen(widen)).map_err(failed)?;
        }
        let norm = Norm {
            stream: stream.view(0..rows * columns),
            width: columns,
            normed: normed.view(0..rows * columns),
            residual: None,
            weight: Some(weight.view(0..columns)),
            bias: None,
            epsilon: 1e-6,
            prepare: Prepare {
                copies: copies.clone(),
                types,
                first: 0,
            },
        };
        let input = Self {
            norm,
            normed,
            copies,
            rows,
            columns,
        };
        input.norm(cuda)?;
        Ok(input)
    }

    fn norm(&self, cuda: &mut Cuda) -> io::Result<()> {
        cuda.queue(Operation::Norm(self.norm.clone()))
            .map_err(failed)
    }

    fn multiply(&self, cuda: &mut Cuda, products: &[Product]) -> io::Result<()> {
        let multiply = Multiply {
            products: products.into(),
            input: self.normed.view(0..self.rows * self.columns),
            copies: self.copies.clone(),
            rows: self.rows,
            activate: None,
        };
        cuda.queue(Operation::Multiply(multiply)).map_err(failed)
    }
}

/// Result bits of products of some rows with weights of two types.
fn product(cuda: &mut Cuda) -> io::Result<Vec<u32>> {
    let input = Input::new(cuda, TOKENS, COLUMNS, TRIED.into_iter().collect())?;
    let each = TOKENS * ROWS;
    let out = cuda.allocate(Bytes::of_len(TRIED.len() * each * 4), Backing::Now)?;
    let weights: Vec<Buffer> = TRIED
        .into_iter()
        .map(|dtype| weights(cuda, dtype))
        .collect::<io::Result<_>>()?;
    let products = TRIED.into_iter().zip(&weights).enumerate();
    let products: Vec<Product> = products
        .map(|(number, (dtype, weights))| Product {
            weight: weights.view_bytes(0, ROWS * row_bytes(dtype, COLUMNS)),
            part: None,
            dtype,
            rows: ROWS,
            columns: COLUMNS,
            out: out.view(number * each..(number + 1) * each),
            stride: ROWS,
            first: 0,
        })
        .collect();
    input.multiply(cuda, &products)?;
    let made = cuda.read(&out, 0..TRIED.len() * each).map_err(failed)?;
    Ok(made.iter().map(|number| number.to_bits()).collect())
}

/// Weights in host-written memory, with finite scales.
fn weights(cuda: &Cuda, dtype: GgmlDType) -> io::Result<Buffer> {
    let bytes = ROWS * row_bytes(dtype, COLUMNS);
    let memory = cuda.mapping(Bytes::of_len(bytes))?;
    let block = dtype.type_size();
    let numbers: Vec<u8> = (0..bytes)
        .map(|at| match (at % block, dtype) {
            (1, _) | (3, GgmlDType::Q4K) => 0x20,
            (at_block, _) => u8::try_from((at + 7 * at_block) % 253).unwrap_or(0),
        })
        .collect();
    let place = memory
        .shared()
        .range(0, bytes)
        .ok_or(io::ErrorKind::InvalidData)?;
    // SAFETY: a mapping created above and not shared.
    unsafe {
        place
            .as_ptr()
            .copy_from_nonoverlapping(numbers.as_ptr(), bytes);
    };
    Ok(memory)
}

/// Rate of one token's product in bytes per second, with weights in device memory, or mapped: first with few weights;
/// then, unless that is slow, with more than any cache holds.
fn reading(gpu: &Arc<Gpu>, mapped: bool) -> io::Result<u64> {
    let mut cuda = cuda(gpu, mapped, true)?;
    let (few, took) = timed_product(&mut cuda, FEW)?;
    if took > FEW_TAKE_MAX {
        return Ok(per_second(few, took));
    }
    let (many, took) = timed_product(&mut cuda, MANY)?;
    Ok(per_second(many, took))
}

/// The shortest time of several products of one token with about this many bytes of weights.
fn timed_product(cuda: &mut Cuda, bytes: usize) -> io::Result<(usize, Duration)> {
    let dtype = GgmlDType::Q8_0;
    let input = Input::new(cuda, 1, WIDE, [dtype].into_iter().collect())?;
    let rows = bytes / row_bytes(dtype, WIDE);
    let bytes = rows * row_bytes(dtype, WIDE);
    let (weights, out) = (
        cuda.part(Bytes::of_len(bytes))?,
        cuda.allocate(Bytes::of_len(rows * 4), Backing::Now)?,
    );
    let product = Product {
        weight: weights.view_bytes(0, bytes),
        part: None,
        dtype,
        rows,
        columns: WIDE,
        out: out.view(0..rows),
        stride: rows,
        first: 0,
    };
    let mut shortest = Duration::MAX;
    for _ in 0..TURNS {
        shortest = shortest.min(timed(cuda, |cuda| {
            input.multiply(cuda, std::slice::from_ref(&product))
        })?);
    }
    Ok((bytes, shortest))
}

/// Products of a row with few weights of a resident part, and their results, with room for flags after them.
fn small_products(cuda: &Cuda, count: usize) -> io::Result<(Vec<Product>, Buffer)> {
    let dtype = GgmlDType::Q8_0;
    let out = cuda.allocate(Bytes::of_len((count * FEW_ROWS + FLAGS) * 4), Backing::Now)?;
    let weight = weights(cuda, dtype)?.view_bytes(0, FEW_ROWS * row_bytes(dtype, COLUMNS));
    let product = |number: usize| Product {
        weight: weight.clone(),
        part: Some(0),
        dtype,
        rows: FEW_ROWS,
        columns: COLUMNS,
        out: out.view(number * FEW_ROWS..(number + 1) * FEW_ROWS),
        stride: FEW_ROWS,
        first: 0,
    };
    Ok(((0..count).map(product).collect(), out))
}

/// Whether a segment of a token has the same results when captured and when launched again. Captures the maximum number
/// of graphs, to measure their memory.
fn graphs_compute(gpu: &Arc<Gpu>) -> io::Result<bool> {
    let mut cuda = cuda(gpu, true, true)?;
    let types = [GgmlDType::Q8_0].into_iter().collect();
    let input = Input::new(&mut cuda, 1, COLUMNS, types)?;
    let (products, out) = small_products(&cuda, 8)?;
    let floats = 0..products.len() * FEW_ROWS + FLAGS;
    gpu.set_graphs(true)?;
    let mut results = Vec::new();
    for _ in 0..3 {
        cuda.queue(Operation::Fill {
            floats: out.view(floats.clone()),
            value: 0.0,
        })
        .map_err(failed)?;
        for product in &products {
            input.norm(&mut cuda)?;
            input.multiply(&mut cuda, std::slice::from_ref(product))?;
        }
        // Its result is copied after them.
        cuda.queue(Operation::Finish(Finish {
            logits: out.view(0..products.len() * FEW_ROWS),
            said: std::slice::from_ref(&(0..products.len() * FEW_ROWS)).into(),
            bias: None,
            scale: 1.0,
            cap: None,
            found: out.view(floats.end - FLAGS..floats.end),
        }))
        .map_err(failed)?;
        let made = cuda.read(&out, floats.clone()).map_err(failed)?;
        results.push(
            made.iter()
                .map(|number| number.to_bits())
                .collect::<Vec<u32>>(),
        );
    }
    Ok(gpu.fill_up()? && results.windows(2).all(|two| two.first() == two.last()))
}

/// Time per launch in a queued series of products with 32 rows.
fn launching(gpu: &Arc<Gpu>, in_graph: bool) -> io::Result<Duration> {
    let mut cuda = cuda(gpu, true, true)?;
    let types = [GgmlDType::Q8_0].into_iter().collect();
    let input = Input::new(&mut cuda, 1, COLUMNS, types)?;
    let (product, _) = small_products(&cuda, 1)?;
    gpu.set_graphs(in_graph)?;
    let mut took = Vec::new();
    for _ in 0..2 + TURNS {
        took.push(timed(&mut cuda, |cuda| {
            (0..LAUNCHES).try_for_each(|_| input.multiply(cuda, &product))
        })?);
    }
    // The first run has no graph yet, and the second captures it.
    Ok(took.into_iter().skip(2).min().unwrap_or_default() / LAUNCHES)
}

/// Time until the work queued by `work` has been executed.
fn timed(cuda: &mut Cuda, work: impl FnOnce(&mut Cuda) -> io::Result<()>) -> io::Result<Duration> {
    let before = cuda.mark();
    cuda.wait(before).map_err(failed)?;
    let began = Instant::now();
    work(cuda)?;
    let behind = cuda.mark();
    cuda.wait(behind).map_err(failed)?;
    Ok(began.elapsed())
}

fn per_second(bytes: usize, took: Duration) -> u64 {
    let per_second = bytes as u128 * 1_000_000_000 / took.as_nanos().max(1);
    u64::try_from(per_second).unwrap_or(u64::MAX)
}

const fn row_bytes(dtype: GgmlDType, columns: usize) -> usize {
    match dtype {
        GgmlDType::Q4K => columns / 256 * 144,
        _ => columns / 32 * 34,
    }
}

/// Types of the trial, one per block shape, an odd number of tiles plus a remainder, and more tokens than other kernels
/// take at once.
const TRIED: [GgmlDType; 2] = [GgmlDType::Q4K, GgmlDType::Q8_0];
const COLUMNS: usize = 256;
const ROWS: usize = 80;
const TOKENS: usize = 9;
/// Rounding of a context's memory, so that trials agree, and the most that counts as its own: on integrated devices
/// other processes allocate concurrently. Our choice; a context of CUDA 12 takes 100 to 500 MiB.
const CONTEXT_STEP: usize = 8 << 20;
const CONTEXT_MAX: usize = 1 << 30;
/// Columns of the timed product's matrix: as in a model of 4 to 8 billion weights.
const WIDE: usize = 4096;
/// Weights of the timed product: few fit in a cache, many do not (Orin: 4 MiB); many take 1 ms on Orin.
const FEW: usize = 1 << 20;
const MANY: usize = 64 << 20;
/// A device that takes longer for few is slower than any disk, and is not timed with many.
const FEW_TAKE_MAX: Duration = Duration::from_millis(4);
const TURNS: u32 = 4;
const FEW_ROWS: usize = 32;
/// The number in a segment.
const LAUNCHES: u32 = 64;
/// Mapped weights are preferred at this share of the device rate, which allows for the noise between two measurements.
const MAPPED_PERCENT: u64 = 97;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mapped_memory_is_preferred_where_it_is_read_as_fast() {
        let speed = |mapped| Speed {
            device: 60_000_000_000,
            mapped,
            launch: Duration::ZERO,
            in_graph: None,
        };
        assert!(speed(58_200_000_000).prefers_mapped() && speed(70_000_000_000).prefers_mapped());
        assert!(!speed(58_000_000_000).prefers_mapped());
    }
}
