//! Products with weight rows in the file's own block layout.

use candle_core::quantized::k_quants::{
    BlockQ2K, BlockQ3K, BlockQ4_0, BlockQ4_1, BlockQ4K, BlockQ5_0, BlockQ5_1, BlockQ5K, BlockQ6K,
    BlockQ8_0, BlockQ8K, GgmlType,
};

use super::{
    affine, float, floats, isa::Isa, kernels::Kernels, pool::Pool, quant::Format, rows::Rows,
    share::Share, table,
};
use crate::{
    backend::{Copies, DeviceError, Product},
    gguf::GgmlDType,
};

/// Start of a format's copy in the memory of `copies`, and the distance between its rows.
pub(crate) fn place(copies: &Copies, format: Format, columns: usize) -> (usize, usize) {
    let mut start = 0;
    for copy in Format::COPIES {
        if copy == format {
            break;
        }
        if copies.types.any(|dtype| Format::of(dtype) == copy) {
            start += copies.rows * padded(copy, copies.columns);
        }
    }
    (start, format.row_bytes(columns))
}

/// Bytes reserved for one row of a copy.
pub(crate) const fn padded(format: Format, columns: usize) -> usize {
    format.row_bytes(columns).next_multiple_of(64)
}

/// Computes products of `rows` rows.
pub(crate) fn project(pool: &mut Pool, isa: Isa, tasks: &[Task<'_>], rows: usize) {
    let total = tasks.iter().map(Task::items).sum();
    pool.run(total, &|mut item| {
        for task in tasks {
            if item < task.items() {
                task.do_item(isa, item, rows);
                return;
            }
            item -= task.items();
        }
    });
}

/// A product with opened memory.
pub(crate) struct Task<'job> {
    dtype: GgmlDType,
    weights: &'job [u8],
    /// Rows of the matrix.
    rows: usize,
    columns: usize,
    row_bytes: usize,
    rows_per_item: usize,
    floats: &'job [f32],
    copies: &'job [u8],
    copy_step: usize,
    out: Share<'job, f32>,
    stride: usize,
    first: usize,
}

impl<'job> Task<'job> {
    /// The product of `weights` with `tokens` rows of `floats`, whose copies are `copied`.
    pub(crate) fn new(
        product: &Product,
        weights: &'job [u8],
        out: Share<'job, f32>,
        (floats, copied, copies): (&'job [f32], &'job [u8], &Copies),
        tokens: usize,
    ) -> Result<Self, DeviceError> {
        let &Product {
            dtype,
            rows,
            columns,
            ..
        } = product;
        let row_bytes = columns / dtype.block_size() * dtype.type_size();
        let (start, copy_step) = place(copies, Format::of(dtype), columns);
        let copied = copied.get(start..start + tokens * copy_step);
        let (Some(copied), true) = (
            copied,
            weights.len() >= rows * row_bytes && floats.len() >= tokens * columns,
        ) else {
            return Err(DeviceError::new("a weight or an activation is cut"));
        };
        Ok(Self {
            dtype,
            weights,
            rows,
            columns,
            row_bytes,
            rows_per_item: rows_per_item(row_bytes, tokens).clamp(1, rows.max(1)),
            floats,
            copies: copied,
            copy_step,
            out,
            stride: product.stride,
            first: product.first,
        })
    }

    const fn items(&self) -> usize {
        self.rows.div_ceil(self.rows_per_item)
    }

    fn do_item(&self, isa: Isa, item: usize, tokens: usize) {
        let from = item * self.rows_per_item;
        let count = self.rows_per_item.min(self.rows - from);
        let rows = Rows {
            weights: &self.weights[from * self.row_bytes..(from + count) * self.row_bytes],
            row_bytes: self.row_bytes,
            columns: self.columns,
            floats: self.floats,
            copies: self.copies,
            copy_step: self.copy_step,
            tokens,
            out: &self.out,
            stride: self.stride,
            first: self.first + from,
        };
        rows.multiply(isa, self.dtype);
    }
}

impl Rows<'_> {
    fn multiply(&self, isa: Isa, dtype: GgmlDType) {
        if let Some(kernel) = Kernels::of(isa).product(dtype) {
            // SAFETY: the set is only chosen where the machine has it; `weights` are whole rows by `chunks_exact`, and
            // copies of all tokens exist, which the creator of this value has checked.
            unsafe { kernel(self) };
            return;
        }
        for (index, weight) in self.weights.chunks_exact(self.row_bytes).enumerate() {
            for token in 0..self.tokens {
                self.put(token, index, self.product(dtype, weight, token));
            }
        }
    }

    /// The product of a row with `token` by a portable loop. Only [`Isa::Baseline`] has no kernels, so no loop is
    /// compiled for another set.
    fn product(&self, dtype: GgmlDType, weight: &[u8], token: usize) -> f32 {
        let columns = self.columns;
        let copy = &self.copies[token * self.copy_step..][..self.copy_step];
        match dtype {
            GgmlDType::F32 => floats::dot(
                cast::<f32>(weight),
                &self.floats[token * columns..][..columns],
                |x| x,
            ),
            GgmlDType::F16 => floats::dot(cast::<u16>(weight), cast(copy), float::half_to_float),
            GgmlDType::BF16 => {
                let widen = |bits: u16| f32::from_bits(u32::from(bits) << 16);
                floats::dot(
                    cast::<u16>(weight),
                    cast(&copy[..columns * size_of::<f32>()]),
                    widen,
                )
            }
            GgmlDType::Q8_0 => blocks::<BlockQ8_0>(columns, weight, copy),
            GgmlDType::Q4_0 => blocks::<BlockQ4_0>(columns, weight, copy),
            GgmlDType::Q4_1 => affine::dot_q4_1(weight, copy),
            GgmlDType::Q5_0 => blocks::<BlockQ5_0>(columns, weight, copy),
            GgmlDType::Q5_1 => affine::dot_q5_1(weight, copy),
            GgmlDType::Q2K => blocks::<BlockQ2K>(columns, weight, copy),
            GgmlDType::Q3K => blocks::<BlockQ3K>(columns, weight, copy),
            GgmlDType::Q4K => blocks::<BlockQ4K>(columns, weight, copy),
            GgmlDType::Q5K => blocks::<BlockQ5K>(columns, weight, copy),
            GgmlDType::Q6K => blocks::<BlockQ6K>(columns, weight, copy),
            GgmlDType::IQ4NL => table::IQ4_NL.dot(weight, copy),
            GgmlDType::IQ4XS => table::dot_iq4_xs(weight, copy),
            GgmlDType::MXFP4 => table::MXFP4.dot(weight, copy),
        }
    }
}

/// Candle's dot product of two rows of blocks: the portable one if its arm64 version has an instruction (`sdot`) that
/// the machine lacks, which candle does not check at run time, and for Q5_0, whose arm64 version is identical except
/// that it requires an even number of blocks.
fn blocks<T: GgmlType<VecDotType: Plain> + Plain>(
    columns: usize,
    weight: &[u8],
    copy: &[u8],
) -> f32 {
    let len = columns / T::VecDotType::BLCK_SIZE * size_of::<T::VecDotType>();
    let (weight, copy) = (cast::<T>(weight), cast::<T::VecDotType>(&copy[..len]));
    if T::DTYPE == candle_core::quantized::GgmlDType::Q5_0 || cfg!(target_arch = "aarch64") {
        T::vec_dot_unopt(columns, weight, copy)
    } else {
        T::vec_dot(columns, weight, copy)
    }
}

/// Plain numbers, or blocks of them, as contained in rows of weights and activations.
///
/// # Safety
///
/// Every bit pattern is a value of the type, and it has no padding.
pub(crate) unsafe trait Plain {}

macro_rules! plain {
    ($($kind:ty),*) => {
        $(
            // SAFETY: numbers, or a `repr(C)` structure of numbers without padding.
            unsafe impl Plain for $kind {}
        )*
    };
}
plain!(
    f32, u16, BlockQ2K, BlockQ3K, BlockQ4_0, BlockQ4_1, BlockQ4K, BlockQ5_0, BlockQ5_1, BlockQ5K,
    BlockQ6K, BlockQ8_0, BlockQ8K
);

/// The blocks or numbers in `bytes`.
///
/// # Panics
///
/// If `bytes` is misaligned for them or ends inside one.
pub(crate) fn cast<T: Plain>(bytes: &[u8]) -> &[T] {
    // SAFETY: every bit pattern is a value of the type.
    let (head, blocks, tail) = unsafe { bytes.align_to::<T>() };
    assert!(
        head.is_empty() && tail.is_empty(),
        "a row is misaligned or cut"
    );
    blocks
}

/// Weight rows of one item.
fn rows_per_item(row_bytes: usize, tokens: usize) -> usize {
    if tokens < MANY_TOKENS {
        (FEW_TOKENS_BYTES / row_bytes.max(1)).next_multiple_of(FEW_ROWS_TOGETHER)
    } else {
        (MANY_TOKENS_BYTES / row_bytes.max(1)).next_multiple_of(ROWS_TOGETHER)
    }
}

/// Weight bytes per item for a single token or a few: some 3 µs of reading, so that no thread waits long for another at
/// the end of a product. With a quarter of that, reading took a tenth longer, probably because a claim is ordered with
/// all other memory accesses, so that few reads are in flight around it.
const FEW_TOKENS_BYTES: usize = 64 * 1024;
/// The same for many tokens, which cost far more per byte.
const MANY_TOKENS_BYTES: usize = 64 * 1024;
/// Number of tokens from which they count as many.
const MANY_TOKENS: usize = 6;
/// With many tokens, items are whole groups of the rows that kernels process together.
const ROWS_TOGETHER: usize = 32;
/// The same for a single token or a few. On arm64, a few tokens use the tile as well.
#[cfg(not(target_arch = "aarch64"))]
const FEW_ROWS_TOGETHER: usize = 16;
#[cfg(target_arch = "aarch64")]
const FEW_ROWS_TOGETHER: usize = super::neon_tile::ROWS;

#[cfg(test)]
mod tests {
    use super::{
        super::{
            copying::round_to_f16,
            dequantize,
            quant::{
                Q8_0_BYTES, Q8K_BYTES, Q8K_SUMS, SUPER, quantize_q8_0, quantize_q8k, round_to_bf16,
            },
            table::{E2M1, IQ4, Table},
            test_numbers::numbers,
        },
        *,
    };
    use crate::{
        arena::{Backing, Mapping},
        backend::memory::{Access, Owner},
        gguf::{SUPPORTED, dtype_name},
    };
    use cotenant_units::Bytes;
    use std::{fs, path::Path};

    /// Products of `rows` rows with `tokens` tokens, by a kernel: close to the portable loops, and for each token with
    /// the same bits as alone.
    fn products(
        isa: Isa,
        dtype: GgmlDType,
        columns: usize,
        rows: usize,
        tokens: usize,
    ) -> Vec<u32> {
        let weights = numbers(rows * columns, 1);
        let bytes = stored(dtype, &weights, columns);
        let input = numbers(tokens * columns, 2);
        let out = multiplied(isa, dtype, &bytes, &input, columns, tokens);
        for (token, out) in out.chunks(rows).enumerate() {
            let input = &input[token * columns..][..columns];
            let alone = multiplied(isa, dtype, &bytes, input, columns, 1);
            for row in 0..rows {
                assert_eq!(
                    out[row].to_bits(),
                    alone[row].to_bits(),
                    "{isa:?} {dtype:?} row {row} token {token}"
                );
            }
            let expected = multiplied(Isa::Baseline, dtype, &bytes, input, columns, 1);
            for (row, (got, expected)) in out.iter().zip(expected).enumerate() {
                let near = (got - expected).abs() <= 2e-6 * (columns as f32).sqrt();
                assert!(
                    near,
                    "{isa:?} {dtype:?} row {row} token {token}: {got} and {expected}"
                );
            }
        }
        out.into_iter().map(f32::to_bits).collect()
    }

    /// Products of rows in `bytes` with the tokens of `input`, checked for stray writes around them.
    fn multiplied(
        isa: Isa,
        dtype: GgmlDType,
        bytes: &[u8],
        input: &[f32],
        columns: usize,
        tokens: usize,
    ) -> Vec<f32> {
        let rows = bytes.len() / (columns / dtype.block_size() * dtype.type_size());
        let format = Format::of(dtype);
        let step = format.row_bytes(columns);
        let bytes_of_all = (tokens * padded(format, columns)).max(64);
        let memory = Mapping::new(Bytes::of_len(bytes_of_all), Backing::Now).unwrap();
        for (token, input) in input.chunks(columns).enumerate() {
            let start = memory.range(token * step, step).unwrap();
            // SAFETY: inside the mapping, which is not shared until the copies are read.
            let copy = unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), step) };
            // Independent of the set, so that all sets have the same copies.
            match format {
                Format::F32 => {}
                Format::Q8K => quantize_q8k(Isa::Baseline, input, copy),
                Format::Q8_0 => quantize_q8_0(Isa::Baseline, input, copy),
                Format::F16 => round_to_f16(input, copy),
                Format::Bf16 => round_to_bf16(Isa::Baseline, input, copy),
            }
        }
        let mut owner = Owner::new();
        let buffer = owner.buffer(memory);
        let copies = Copies {
            memory: buffer.view_bytes(0, bytes_of_all),
            rows: tokens,
            columns,
            types: [dtype].into_iter().collect(),
        };
        let mut out = vec![0.0; tokens * (rows + 3)];
        let product = Product {
            weight: buffer.from(0),
            part: None,
            dtype,
            rows,
            columns,
            out: buffer.from(0),
            stride: rows + 3,
            first: 2,
        };
        let copied = Access::new(&mut owner).read_bytes(&copies.memory).unwrap();
        let from = (input, copied, &copies);
        let task = Task::new(&product, bytes, Share::new(&mut out), from, tokens).unwrap();
        project(&mut Pool::new(2).unwrap(), isa, &[task], tokens);
        out.chunks(rows + 3)
            .flat_map(|out| out[2..rows + 2].to_vec())
            .collect()
    }

    /// Rows in file format, with all scales in use.
    fn stored(dtype: GgmlDType, weights: &[f32], columns: usize) -> Vec<u8> {
        fn blocks<T: GgmlType>(weights: &[f32], columns: usize) -> Vec<u8> {
            let mut blocks = vec![T::zeros(); weights.len() / T::BLCK_SIZE];
            for (row, blocks) in weights
                .chunks(columns)
                .zip(blocks.chunks_mut(columns / T::BLCK_SIZE))
            {
                T::from_float(row, blocks);
            }
            let len = size_of_val(blocks.as_slice());
            // SAFETY: blocks are plain numbers.
            unsafe { std::slice::from_raw_parts(blocks.as_ptr().cast::<u8>(), len) }.to_vec()
        }
        match dtype {
            GgmlDType::F32 => weights.iter().flat_map(|x| x.to_le_bytes()).collect(),
            GgmlDType::F16 => weights
                .iter()
                .flat_map(|x| half::f16::from_f32(*x).to_le_bytes())
                .collect(),
            GgmlDType::BF16 => weights
                .iter()
                .flat_map(|x| half::bf16::from_f32(*x).to_le_bytes())
                .collect(),
            GgmlDType::Q4_0 => blocks::<BlockQ4_0>(weights, columns),
            GgmlDType::Q4_1 => blocks::<BlockQ4_1>(weights, columns),
            GgmlDType::Q5_0 => blocks::<BlockQ5_0>(weights, columns),
            GgmlDType::Q5_1 => blocks::<BlockQ5_1>(weights, columns),
            GgmlDType::Q8_0 => blocks::<BlockQ8_0>(weights, columns),
            GgmlDType::Q2K => blocks::<BlockQ2K>(weights, columns),
            GgmlDType::Q3K => blocks::<BlockQ3K>(weights, columns),
            GgmlDType::Q4K => blocks::<BlockQ4K>(weights, columns),
            GgmlDType::Q5K => blocks::<BlockQ5K>(weights, columns),
            GgmlDType::Q6K => blocks::<BlockQ6K>(weights, columns),
            GgmlDType::IQ4NL | GgmlDType::IQ4XS | GgmlDType::MXFP4 => {
                let blocks = weights.chunks(dtype.block_size());
                blocks.flat_map(|block| in_table(dtype, block)).collect()
            }
        }
    }

    /// A block with the nearest values of the type's table.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "exponents and scales of weights between -1 and 1"
    )]
    fn in_table(dtype: GgmlDType, weights: &[f32]) -> Vec<u8> {
        let runs = || weights.chunks(32);
        let largest = |run: &[f32]| run.iter().fold(0f32, |all, x| all.max(x.abs()));
        let nearest = |table: &Table, scale: f32, x: f32| {
            let distance = |at: &usize| (f32::from(table[*at]) * scale - x).abs();
            let at = (0..16).min_by(|a, b| distance(a).total_cmp(&distance(b)));
            u8::try_from(at.unwrap()).unwrap()
        };
        let indices = |table: &Table, scale: f32, run: &[f32]| -> Vec<u8> {
            let (low, high) = run.split_at(16);
            let both = low.iter().zip(high);
            both.map(|(x, y)| nearest(table, scale, *x) | nearest(table, scale, *y) << 4)
                .collect()
        };
        let half = |x: f32| half::f16::from_f32(x).to_le_bytes();
        match dtype {
            GgmlDType::IQ4NL => {
                let scale = half(largest(weights) / 113.0);
                let read = half::f16::from_le_bytes(scale).to_f32();
                [&scale, indices(&IQ4, read, weights).as_slice()].concat()
            }
            GgmlDType::MXFP4 => {
                let exponent = (largest(weights) / 12.0).log2().ceil();
                let indices = indices(&E2M1, exponent.exp2(), weights);
                [&[(128.0 + exponent) as u8], indices.as_slice()].concat()
            }
            _ => {
                let scale = half(largest(weights) / (113.0 * 31.0));
                let factor = half::f16::from_le_bytes(scale).to_f32();
                // Every second scale is negative.
                let scales: Vec<i32> = runs()
                    .enumerate()
                    .map(|(at, run)| {
                        let scale = (largest(run) / (113.0 * factor)).ceil() as i32;
                        if at % 2 == 0 { scale.min(31) } else { -scale }
                    })
                    .collect();
                let (mut high, mut low) = (0u16, 0u32);
                for (at, scale) in scales.iter().enumerate() {
                    let bits = (scale + 32).cast_unsigned();
                    high |= u16::try_from(bits >> 4).unwrap() << (2 * at);
                    low |= (bits & 15) << (4 * at);
                }
                let runs = runs().zip(&scales);
                let indices =
                    runs.flat_map(|(run, scale)| indices(&IQ4, *scale as f32 * factor, run));
                let head = [scale.as_slice(), &high.to_le_bytes(), &low.to_le_bytes()].concat();
                head.into_iter().chain(indices).collect()
            }
        }
    }

    /// All sets agree with the portable loops, and those of x86-64 to the bit with each other, except the one that
    /// multiplies `bf16` in pairs.
    fn compare(dtype: GgmlDType, columns: usize, rows: usize, tokens: usize) {
        let mut before = None;
        for &isa in Isa::available().iter().filter(|isa| **isa != Isa::Baseline) {
            let now = products(isa, dtype, columns, rows, tokens);
            if dtype == GgmlDType::BF16 && isa.name() == "avx512-bf16" {
                continue;
            }
            let known = before.get_or_insert_with(|| now.clone());
            assert!(
                now == *known,
                "{isa:?} {dtype:?}, {rows} rows of {columns}, {tokens} tokens"
            );
        }
    }

    const SUPERS: [GgmlDType; 6] = [
        GgmlDType::Q2K,
        GgmlDType::Q3K,
        GgmlDType::Q4K,
        GgmlDType::Q5K,
        GgmlDType::Q6K,
        GgmlDType::IQ4XS,
    ];
    const SMALL: [GgmlDType; 7] = [
        GgmlDType::Q4_0,
        GgmlDType::Q4_1,
        GgmlDType::Q5_0,
        GgmlDType::Q5_1,
        GgmlDType::Q8_0,
        GgmlDType::IQ4NL,
        GgmlDType::MXFP4,
    ];
    const FLOATS: [GgmlDType; 3] = [GgmlDType::F16, GgmlDType::BF16, GgmlDType::F32];

    /// For all sets of the target, even if this machine lacks them.
    #[test]
    fn every_supported_type_has_a_kernel_in_each_set() {
        for &isa in Isa::ALL.iter().filter(|isa| **isa != Isa::Baseline) {
            for dtype in SUPPORTED {
                assert!(
                    Kernels::of(isa).product(dtype).is_some(),
                    "{isa:?} has no kernel for {dtype:?}"
                );
            }
        }
        let tested = SUPERS.into_iter().chain(SMALL).chain(FLOATS);
        assert!(
            SUPPORTED
                .into_iter()
                .all(|dtype| tested.clone().any(|of| of == dtype)),
            "a type is in no test"
        );
    }

    #[test]
    fn products_agree_with_the_portable_loops_for_any_number_of_tokens_and_have_the_same_bits_in_each_set()
     {
        // With 128 tokens processed together, and the rest by fours, twos and ones.
        for tokens in [1, 2, 3, 4, 5, 8, 17, 41, 133] {
            for dtype in SUPERS {
                compare(dtype, 512, 19, tokens);
            }
            for dtype in SMALL {
                compare(dtype, 352, 21, tokens);
            }
            for dtype in FLOATS {
                compare(dtype, 96 + tokens, 21, tokens);
            }
        }
    }

    #[test]
    fn rows_whose_blocks_and_number_are_no_multiple_of_four_are_complete() {
        for (rows, tokens) in [(1, 1), (2, 5), (7, 1), (7, 10), (7, 42)] {
            for dtype in SUPERS {
                for blocks in [1, 5, 6, 7, 17] {
                    compare(dtype, 256 * blocks, rows, tokens);
                }
            }
            for dtype in SMALL {
                for blocks in [1, 2, 7, 123] {
                    compare(dtype, 32 * blocks, rows, tokens);
                }
            }
            for dtype in FLOATS {
                for columns in [1, 7, 16, 31, 513, 1030] {
                    compare(dtype, columns, rows, tokens);
                }
            }
        }
    }

    #[test]
    fn the_largest_quants_and_activations_do_not_overflow() {
        for dtype in SUPERS.into_iter().chain(SMALL) {
            let columns = 512;
            let (block, bytes) = (dtype.block_size(), dtype.type_size());
            for quants in [0xff, 0x00, 0x80, 0x7f] {
                let mut row = vec![quants; columns / block * bytes];
                // Scales of one, and the least others.
                for block in row.chunks_mut(bytes) {
                    let (at, halves) = match dtype {
                        // An exponent instead, of 2^0.
                        GgmlDType::MXFP4 => {
                            block[0] = 128;
                            continue;
                        }
                        GgmlDType::Q6K => (208, 1),
                        GgmlDType::Q3K => (108, 1),
                        GgmlDType::Q2K => (80, 2),
                        GgmlDType::Q4K | GgmlDType::Q5K | GgmlDType::Q4_1 | GgmlDType::Q5_1 => {
                            (0, 2)
                        }
                        _ => (0, 1),
                    };
                    for half in 0..halves {
                        block[at + 2 * half..at + 2 * half + 2].copy_from_slice(&[0, 0x3c]);
                    }
                }
                let (first, second) = (vec![1.0; columns], vec![-1.0; columns]);
                for input in [first, second] {
                    let tokens = input.repeat(9);
                    let expected = multiplied(Isa::Baseline, dtype, &row, &input, columns, 1)[0];
                    for &isa in Isa::available() {
                        for got in multiplied(isa, dtype, &row, &tokens, columns, 9) {
                            let near = (got - expected).abs() <= 1e-5 * expected.abs().max(1.0);
                            assert!(near, "{isa:?} {dtype:?} {quants:#x}: {got} and {expected}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn the_portable_loops_multiply_the_numbers_that_weights_stand_for() {
        let (columns, rows) = (512, 3);
        // With integers whose furthest from zero in each block of 32 is -127, copies in all formats are exact.
        let mut input: Vec<f32> = numbers(columns, 2)
            .into_iter()
            .map(|x| (126.0 * x).round())
            .collect();
        input.iter_mut().step_by(32).for_each(|x| *x = -127.0);
        for dtype in SUPERS.into_iter().chain(SMALL).chain(FLOATS) {
            let bytes = stored(dtype, &numbers(rows * columns, 1), columns);
            let out = multiplied(Isa::Baseline, dtype, &bytes, &input, columns, 1);
            for (row, got) in bytes.chunks(bytes.len() / rows).zip(out) {
                let mut weights = vec![0.0; columns];
                dequantize(dtype, row, &mut weights);
                let terms = weights
                    .iter()
                    .zip(&input)
                    .map(|(x, y)| f64::from(*x) * f64::from(*y));
                let (expected, size) = terms.fold((0.0, 0.0), |(sum, size), term| {
                    (sum + term, size + term.abs())
                });
                assert!(
                    (f64::from(got) - expected).abs() <= 1e-6 * size,
                    "{dtype:?}: {got} and {expected}"
                );
            }
        }
    }

    #[test]
    fn blocks_stand_for_the_numbers_that_ggml_reads_from_them() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
        let folder = folder.join("../../tests/fixtures/reference-blocks");
        for dtype in SUPERS.into_iter().chain(SMALL) {
            let file = |ending: &str| {
                let name = dtype_name(dtype).to_lowercase().replace("_k", "_K");
                fs::read(folder.join(format!("{name}.{ending}"))).unwrap()
            };
            let (stored, expected) = (file("blocks"), file("f32"));
            let mut blocks = Mapping::new(Bytes::of_len(stored.len()), Backing::Now).unwrap();
            let blocks = &mut blocks.bytes_mut()[..stored.len()];
            blocks.copy_from_slice(&stored);
            let mut numbers = vec![0.0; stored.len() / dtype.type_size() * dtype.block_size()];
            dequantize(dtype, blocks, &mut numbers);
            let numbers: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
            assert!(numbers == expected, "{dtype:?}");
        }
    }

    #[test]
    #[should_panic(expected = "a row is misaligned or cut")]
    fn a_misaligned_row_is_refused() {
        let mut bytes = Mapping::new(Bytes::new(64), Backing::Now).unwrap();
        cast::<u16>(&bytes.bytes_mut()[1..33]);
    }

    #[test]
    fn activations_that_are_not_finite_give_products_that_are_not() {
        for &isa in Isa::available() {
            for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                for at in [0, 31, 255] {
                    let mut input = numbers(512, 9);
                    input[at] = bad;
                    let mut copy = vec![0u8; Format::Q8K.row_bytes(512)];
                    quantize_q8k(isa, &input, &mut copy);
                    let scale = f32::from_le_bytes([copy[0], copy[1], copy[2], copy[3]]);
                    assert!(!scale.is_finite(), "{isa:?} {bad} at {at}");
                    let mut copy = vec![0u8; Format::Q8_0.row_bytes(512)];
                    quantize_q8_0(isa, &input, &mut copy);
                    let block = at / 32 * Q8_0_BYTES;
                    let scale =
                        half::f16::from_bits(u16::from_le_bytes([copy[block], copy[block + 1]]));
                    assert!(!scale.is_finite(), "{isa:?} {bad} at {at}");
                }
            }
        }
    }

    #[test]
    fn activations_are_rounded_to_half_precision_with_the_same_bits_in_each_set() {
        let input: Vec<f32> = numbers(93, 9)
            .into_iter()
            .chain([f32::INFINITY, f32::MAX, -0.0, 1e-7, 1e-40])
            .collect();
        let mut expected = vec![0u8; Format::F16.row_bytes(input.len())];
        round_to_f16(&input, &mut expected);
        for round in Isa::available()
            .iter()
            .filter_map(|&isa| Kernels::of(isa).round)
        {
            let mut copy = vec![0u8; expected.len()];
            // SAFETY: the machine has the set.
            unsafe { round(&input, &mut copy) };
            assert_eq!(copy, expected);
        }
    }

    #[test]
    fn activations_are_rounded_to_brain_floating_point_to_the_nearest() {
        let odd = [
            f32::NAN,
            -f32::NAN,
            f32::INFINITY,
            f32::MAX,
            -0.0,
            1e-40,
            1.003_906_2,
            1.011_718_7,
        ];
        let input: Vec<f32> = numbers(93, 9).into_iter().chain(odd).collect();
        for &isa in Isa::available() {
            let mut copy = vec![0u8; Format::Bf16.row_bytes(input.len())];
            round_to_bf16(isa, &input, &mut copy);
            let (wide, short) = copy.split_at(4 * input.len());
            for ((x, wide), short) in input
                .iter()
                .zip(wide.chunks_exact(4))
                .zip(short.chunks_exact(2))
            {
                let expected = half::bf16::from_f32(*x);
                assert_eq!(short, expected.to_bits().to_ne_bytes(), "{isa:?} {x}");
                assert_eq!(
                    wide,
                    expected.to_f32().to_bits().to_ne_bytes(),
                    "{isa:?} {x}"
                );
            }
        }
    }

    #[test]
    fn activations_are_quantised_as_candle_does_it() {
        let input = numbers(512, 9);
        for &isa in Isa::available() {
            let mut ours = vec![0u8; Format::Q8K.row_bytes(512)];
            quantize_q8k(isa, &input, &mut ours);
            let mut theirs = vec![BlockQ8K::zeros(); 2];
            GgmlType::from_float(&input, &mut theirs);
            let (blocks, wide) = ours.split_at(2 * Q8K_BYTES);
            assert!(cast::<BlockQ8K>(blocks) == theirs.as_slice(), "{isa:?}");
            for (block, wide) in blocks
                .chunks_exact(Q8K_BYTES)
                .zip(wide.chunks_exact(Q8K_SUMS))
            {
                for (quants, sum) in block[4..4 + SUPER]
                    .chunks_exact(32)
                    .zip(wide.chunks_exact(2))
                {
                    let expected: i16 = quants
                        .iter()
                        .map(|quant| i16::from(quant.cast_signed()))
                        .sum();
                    assert_eq!(i16::from_le_bytes([sum[0], sum[1]]), expected, "{isa:?}");
                }
            }
            let mut ours = vec![0u8; Format::Q8_0.row_bytes(512)];
            quantize_q8_0(isa, &input, &mut ours);
            let mut theirs = vec![BlockQ8_0::zeros(); 16];
            GgmlType::from_float(&input, &mut theirs);
            let (blocks, behind) = ours.split_at(16 * Q8_0_BYTES);
            assert!(cast::<BlockQ8_0>(blocks) == theirs.as_slice(), "{isa:?}");
            let four = |at: usize| [behind[at], behind[at + 1], behind[at + 2], behind[at + 3]];
            for (at, block) in blocks.chunks_exact(Q8_0_BYTES).enumerate() {
                let scale = half::f16::from_bits(u16::from_le_bytes([block[0], block[1]]));
                let sum: i32 = block[2..]
                    .iter()
                    .map(|quant| i32::from(quant.cast_signed()))
                    .sum();
                assert_eq!(f32::from_ne_bytes(four(4 * at)), scale.to_f32(), "{isa:?}");
                assert_eq!(i32::from_ne_bytes(four(64 + 4 * at)), -128 * sum, "{isa:?}");
            }
        }
    }
}
