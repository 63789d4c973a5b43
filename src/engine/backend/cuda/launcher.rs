//! Launches of kernels, and the memory that all of them share.

use std::{io, sync::Arc};

use super::{
    context::SCRATCH_ROWS,
    driver::Address,
    gpu::{Commands, Gpu},
    memory::{Allocation, allocated_bytes},
    parameters::{CopiesTo, Job, Kernel, copies_stride, formats_of},
    segments::{Command, Tables},
    staging::{STAGING_BYTES, Staging, Table},
};
use crate::{
    arena::DeviceMemory as _,
    backend::{DeviceError, Limits, Prepare, View, memory::Owner},
};

/// Translator of operations to launches.
pub(super) struct Launcher {
    pub(super) commands: Commands,
    pub(super) staging: Staging,
    pub(super) owner: Owner,
    /// Whether prompts are multiplied without tensor cores.
    pub(super) plain: bool,
    /// Whether the current operation belongs to a single token, so that its commands are held for a segment.
    pub(super) of_token: bool,
    /// Counters of kernels, at separate places: see the constants below.
    pub(super) counters: Allocation,
    /// Addresses of the weights' parts, after one at zero, so that offsets in it are addresses.
    pub(super) parts: Table<Address>,
    pub(super) places: Vec<Address>,
    /// Addresses of the cache's blocks: of layers that see all tokens, and of those with windows.
    pub(super) blocks: [Table<u64>; 2],
    /// Growth of queries, cosines and sines of a gap, and the used rows of the head.
    pub(super) growth: Table<f32>,
    pub(super) back: Table<f32>,
    pub(super) said: Table<[u32; 2]>,
    /// Pending value of the word at [`POSITION`].
    pub(super) position: Option<u32>,
    /// The last copies made, and the memory requested for them, of which they may occupy the second half.
    pub(super) copied: CopiesTo,
    pub(super) copied_in: Address,
}

impl Launcher {
    /// Allocates memory for all operations within `limits`.
    pub(super) fn new(
        gpu: &Arc<Gpu>,
        owner: Owner,
        plain: bool,
        limits: &Limits,
    ) -> io::Result<Self> {
        let [parts, blocks, growth, back, said] = table_places(limits);
        let table = |blocks| Table::new(gpu, Some(Tables::Cache), blocks);
        Ok(Self {
            owner,
            plain,
            of_token: false,
            counters: Allocation::new(gpu, COUNTERS_BYTES)?,
            parts: Table::new(gpu, None, parts)?,
            places: vec![0; parts],
            blocks: [table(blocks)?, table(blocks)?],
            growth: Table::new(gpu, Some(Tables::Cache), growth)?,
            back: Table::new(gpu, Some(Tables::Cache), back)?,
            said: Table::new(gpu, Some(Tables::Said), said)?,
            position: None,
            copied: CopiesTo::default(),
            copied_in: 0,
            staging: Staging::new(gpu)?,
            commands: Commands::on(gpu),
        })
    }

    pub(super) fn at(&self, view: &View) -> Result<Address, DeviceError> {
        self.owner.device_address(view)
    }

    pub(super) fn some(&self, view: Option<&View>) -> Result<Address, DeviceError> {
        view.map_or(Ok(0), |view| self.at(view))
    }

    pub(super) fn fits(&self, view: &View, bytes: usize) -> Result<(), DeviceError> {
        if view.len() >= bytes {
            Ok(())
        } else {
            let reason = format!("{bytes} bytes do not fit a view of {}", view.len());
            Err(DeviceError::new(reason))
        }
    }

    pub(super) fn launch(
        &self,
        kernel: Kernel,
        grid: (u32, u32, u32),
        shared: u32,
        job: Job,
    ) -> Result<(), DeviceError> {
        self.command(&Command::Launch {
            kernel,
            grid,
            shared,
            job,
        })
    }

    pub(super) fn command(&self, command: &Command) -> Result<(), DeviceError> {
        self.command_with(command, 0)
    }

    /// A command that reads this many bytes of weights.
    pub(super) fn command_with(
        &self,
        command: &Command,
        weights: usize,
    ) -> Result<(), DeviceError> {
        // SAFETY: parameters of the kernel, with addresses of buffers, which wait for queued work before their release.
        Ok(unsafe {
            self.commands
                .queue(command, self.of_token.then_some(weights))
        }?)
    }

    pub(super) fn counter(&self, place: usize) -> Address {
        self.counters.address() + place as u64
    }

    /// Destination of copies of rows of `columns` elements, from row `prepare.first` on.
    pub(super) fn prepare(
        &mut self,
        prepare: &Prepare,
        rows: usize,
        columns: usize,
    ) -> Result<CopiesTo, DeviceError> {
        let formats = formats_of(prepare.types);
        let stride = copies_stride(formats, columns);
        self.fits(&prepare.copies.memory, (prepare.first + rows) * stride)?;
        self.copied = CopiesTo {
            base: self.at(&prepare.copies.memory)?,
            formats,
            columns: word(columns)?,
            stride: word(stride)?,
            unused: 0,
        };
        self.copied_in = self.copied.base;
        Ok(CopiesTo {
            base: self.copied.base + (prepare.first * stride) as u64,
            ..self.copied
        })
    }
}

pub(super) fn word(number: usize) -> Result<u32, DeviceError> {
    u32::try_from(number)
        .map_err(|_| DeviceError::new(format!("{number} is more than a kernel counts")))
}

// Places among the counters:
pub(super) const POSITION: usize = 64;
pub(super) const RESULT: usize = 128;
pub(super) const FINISH: usize = 192;
pub(super) const DELTA: usize = 256;
/// Key heads, with 256 results each.
pub(super) const DELTA_COUNTERS_MAX: usize = 2048;
pub(super) const PARTIAL: usize = DELTA + 4 * DELTA_COUNTERS_MAX;
pub(super) const FINISH_BLOCKS_MAX: usize = 4096;
pub(super) const PAIR: usize = PARTIAL + 12 * FINISH_BLOCKS_MAX;
/// Rows of a gate that are activated together: `pair_of` of `products.cu`.
pub(super) const PAIR_ROWS: usize = 256;
/// One per [`PAIR_ROWS`] rows of a gate: 262144 of them.
pub(super) const PAIR_COUNTERS_MAX: usize = 1024;
const COUNTERS_BYTES: usize = PAIR + 4 * PAIR_COUNTERS_MAX;

/// Capacities of a launcher's tables: parts, blocks, growth of queries, cosines and sines of a gap, and used rows.
fn table_places(limits: &Limits) -> [usize; 5] {
    let blocks = usize::try_from(limits.context)
        .unwrap_or(usize::MAX)
        .div_ceil(BLOCK_TOKENS);
    [
        1 + limits.parts,
        blocks,
        SCRATCH_ROWS,
        HEAD_DIM_MAX,
        limits.said,
    ]
}

/// A launcher's own memory: counters, tables, and their staging.
pub(super) fn own_bytes(limits: &Limits) -> usize {
    let [parts, blocks, growth, back, said] = table_places(limits);
    let pages = [
        COUNTERS_BYTES,
        parts * 8,
        blocks * 8,
        blocks * 8,
        growth * 4,
        back * 4,
        said * 8,
    ]
    .map(allocated_bytes);
    pages.into_iter().sum::<usize>() + STAGING_BYTES
}

/// Tokens of a block of the cache, and elements of a head: maxima.
const BLOCK_TOKENS: usize = 64;
pub(super) const HEAD_DIM_MAX: usize = 256;
