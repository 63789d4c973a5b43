//! Copies of rows in the formats required by products.

use half::slice::HalfFloatSliceExt;

use super::{
    isa::Isa,
    kernels::Kernels,
    matmul,
    pool::Pool,
    quant::{self, Format},
    share::Share,
};
use crate::backend::{DeviceError, Prepare, memory::Access};

/// Copies of rows in the formats required by products.
pub(super) struct Copying<'op> {
    isa: Isa,
    memory: Share<'op, u8>,
    /// For each format, the place of its first row and the distance between rows.
    places: [Option<(Format, usize, usize)>; Format::COPIES.len()],
}

impl<'op> Copying<'op> {
    /// For `rows` rows of `columns` elements.
    pub(super) fn new(
        isa: Isa,
        prepare: &'op Prepare,
        (rows, columns): (usize, usize),
        access: &mut Access<'op>,
    ) -> Result<Self, DeviceError> {
        let copies = &prepare.copies;
        if prepare.first + rows > copies.rows || columns > copies.columns {
            let reason = format!("{rows} rows of {columns} elements are too many for their copies");
            return Err(DeviceError::new(reason));
        }
        let places = Format::COPIES.map(|format| {
            let wanted = prepare.types.any(|dtype| Format::of(dtype) == format);
            let (start, step) = matmul::place(copies, format, columns);
            wanted.then_some((format, start + prepare.first * step, step))
        });
        let memory = if places.iter().any(Option::is_some) {
            access.write_bytes(&copies.memory)?
        } else {
            &mut []
        };
        Ok(Self {
            isa,
            memory: Share::new(memory),
            places,
        })
    }

    /// # Safety
    ///
    /// No other thread copies this row.
    pub(super) unsafe fn row(&self, row: usize, input: &[f32]) {
        for &(format, start, step) in self.places.iter().flatten() {
            // SAFETY: each row has its own place in each format.
            let copy = unsafe { self.memory.slice(start + row * step, step) };
            match format {
                Format::F32 => {}
                Format::Q8_0 => quant::quantize_q8_0(self.isa, input, copy),
                Format::Q8K => quant::quantize_q8k(self.isa, input, copy),
                Format::F16 => match Kernels::of(self.isa).round {
                    // SAFETY: the set is only chosen where the machine has it.
                    Some(round) => unsafe { round(input, copy) },
                    None => round_to_f16(input, copy),
                },
                Format::Bf16 => quant::round_to_bf16(self.isa, input, copy),
            }
        }
    }

    /// Copies all rows of `input`.
    pub(super) fn all(&self, pool: &mut Pool, input: &[f32], columns: usize) {
        if self.places.iter().any(Option::is_some) {
            pool.run(input.len() / columns.max(1), &|row| {
                // SAFETY: each row is one item.
                unsafe { self.row(row, &input[row * columns..][..columns]) };
            });
        }
    }
}

/// Rounds through `f16`, vectorised: the scalar form took a twentieth of a prompt's time.
pub(super) fn round_to_f16(input: &[f32], copy: &mut [u8]) {
    const TOGETHER: usize = 256;
    let (mut halves, mut wide) = ([half::f16::ZERO; TOGETHER], [0f32; TOGETHER]);
    for (input, copy) in input.chunks(TOGETHER).zip(copy.chunks_mut(4 * TOGETHER)) {
        let (halves, wide) = (&mut halves[..input.len()], &mut wide[..input.len()]);
        halves.convert_from_f32_slice(input);
        halves.convert_to_f32_slice(wide);
        for (x, to) in wide.iter().zip(copy.chunks_exact_mut(4)) {
            to.copy_from_slice(&x.to_ne_bytes());
        }
    }
}
