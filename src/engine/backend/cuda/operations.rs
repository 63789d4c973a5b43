//! Translation of operations to kernel launches.

use std::mem;

use super::{
    context::{Slice, attend_kernel, scratch_floats},
    driver::Address,
    launcher::{
        FINISH, FINISH_BLOCKS_MAX, HEAD_DIM_MAX, Launcher, PAIR, PAIR_COUNTERS_MAX, PAIR_ROWS,
        PARTIAL, POSITION, RESULT, word,
    },
    parameters::{
        ActivateJob, AttendJob, ConvertJob, CopiesTo, EmbedJob, FILE_PAGE, FinishJob, HeadsJob,
        Job, JoinJob, Kernel, Matrix, NormJob, Products, cell_kind, copies_stride, format_of,
        formats_of, kind_of, narrow_bytes, tiles_bytes,
    },
    segments::{Command, Tables},
};
use crate::{
    backend::{
        Activate, Attend, Convert, DeviceError, Finish, Multiply, Norm, Operation, Part, Prepare,
        Product, Rotate, RowBytes, View, Widen, cpu::dequantize, memory::Cells, offset_in_block,
    },
    spec::{Activation, Pairing},
};
use cotenant_policy::kv_type::KvType;

impl Launcher {
    /// Queues an operation; the thread is bound.
    pub(super) fn queue(&mut self, operation: &Operation<'_>) -> Result<(), DeviceError> {
        self.of_token = is_of_token(operation);
        if !self.of_token {
            self.commands.submit()?;
        }
        match operation {
            Operation::Activate(job) => self.activate(job),
            Operation::Attend(job) => self.attend(job),
            Operation::Convert(job) => self.convert(job),
            Operation::Combine(_)
            | Operation::Convolve(_)
            | Operation::Gather(_)
            | Operation::Scan(_) => Err(DeviceError::new(
                "there is no kernel for mixtures, short convolutions and scans",
            )),
            Operation::Delta(job) => self.delta(job),
            Operation::Fill { floats, value } => {
                let (to, count) = (self.at(floats)?, floats.len() / 4);
                self.command(&Command::Set {
                    to,
                    word: value.to_bits(),
                    count,
                })
            }
            Operation::Finish(job) => self.finish(job),
            Operation::Move { from, to } => {
                let bytes = from.len();
                if to.len() != bytes {
                    return Err(DeviceError::new(format!("{bytes} bytes meet {}", to.len())));
                }
                self.command(&Command::Copy {
                    from: self.owner.device_span(from)?,
                    to: self.owner.device_span(to)?,
                    bytes,
                })
            }
            Operation::Multiply(job) => self.multiply(job),
            Operation::Norm(job) => self.norm(job),
            Operation::Rotate(job) => self.rotate(job),
            Operation::Widen(job) => self.widen(job),
        }
    }

    /// Adds `bias` to each of `rows` rows of the same length.
    fn add_bias(&self, to: Address, rows: usize, bias: Option<&View>) -> Result<(), DeviceError> {
        let Some(bias) = bias else { return Ok(()) };
        let job = NormJob {
            stream: to,
            other: self.at(bias)?,
            to: CopiesTo {
                columns: word(bias.len() / 4)?,
                ..CopiesTo::default()
            },
            scale: 1.0,
            ..NormJob::default()
        };
        self.launch(Kernel::Norm, (word(rows)?, 1, 1), 0, Job::Norm(job))
    }

    fn norm(&mut self, job: &Norm) -> Result<(), DeviceError> {
        let weight = job.weight.as_ref().filter(|_| job.bias.is_none());
        let weight = weight.ok_or_else(|| {
            DeviceError::new("there is no kernel for parts without a norm, or with its bias")
        })?;
        let width = job.width;
        let rows = job.stream.len() / (4 * width).max(1);
        let normed = self.at(&job.normed)?;
        self.fits(&job.normed, job.stream.len())?;
        let mut launched = NormJob {
            stream: self.at(&job.stream)?,
            weight: self.at(weight)?,
            stride: word(width)?,
            scale: 1.0,
            epsilon: job.epsilon,
            ..NormJob::default()
        };
        if let Some(residual) = &job.residual {
            self.add_bias(normed, rows, residual.bias.as_ref())?;
            launched.other = normed;
            launched.post = self.some(residual.norm.as_ref())?;
            launched.scale = residual.scale;
        }
        launched.to = self.prepare(&job.prepare, rows, width)?;
        self.launch(Kernel::Norm, (word(rows)?, 1, 1), 0, Job::Norm(launched))
    }

    fn multiply(&mut self, job: &Multiply<'_>) -> Result<(), DeviceError> {
        if self.copied_in != self.at(&job.copies.memory)? {
            return Err(DeviceError::new("an input was not copied for its products"));
        }
        let Some(activate) = &job.activate else {
            return self.products(job, None);
        };
        if let Some(to) = self.pair_copies(job, activate)? {
            self.products(job, Some((activate, to)))?;
            self.copied = to;
            return Ok(());
        }
        self.products(job, None)?;
        self.activate(activate)
    }

    /// Destination of the copies of one token's activation if it is launched together with its products: next to the
    /// copies of their input, which other blocks still read. `None` if it is launched alone.
    fn pair_copies(
        &self,
        job: &Multiply<'_>,
        activate: &Activate,
    ) -> Result<Option<CopiesTo>, DeviceError> {
        let Prepare {
            copies,
            types,
            first,
        } = &activate.prepare;
        let is_whole = |product: &Product, out: &View| {
            product.rows == activate.width && product.first == 0 && product.out.is_same(out)
        };
        let [gate, up] = &*job.products else {
            return Ok(None);
        };
        let start = self.at(&copies.memory)?;
        let (formats, half) = (
            formats_of(*types),
            copies.memory.len() / 2 / COPIES_ALIGN * COPIES_ALIGN,
        );
        let stride = copies_stride(formats, activate.width);
        let fits = job.rows == 1
            && *first == 0
            && is_whole(gate, &activate.gate)
            && activate.up.as_ref().is_some_and(|to| is_whole(up, to))
            && activate.width.div_ceil(PAIR_ROWS) <= PAIR_COUNTERS_MAX
            && self.copied.base == start
            && stride.max(self.copied.stride as usize) <= half;
        Ok(fits.then_some(CopiesTo {
            base: start + half as u64,
            formats,
            columns: word(activate.width)?,
            stride: word(stride)?,
            unused: 0,
        }))
    }

    /// Products, with the activation of two of them and the destination of its copies.
    fn products(
        &mut self,
        job: &Multiply<'_>,
        pair: Option<(&Activate, CopiesTo)>,
    ) -> Result<(), DeviceError> {
        let (kernel, rows, tokens) = match job.rows {
            0 => return Ok(()),
            1 if pair.is_none() && self.is_narrow(job) => (Kernel::ProductNarrow, 8, 1),
            1 => (Kernel::Product1, 32, 1),
            2..=4 => (Kernel::Product4, 32, 4),
            5..=8 => (Kernel::Product8, 32, 8),
            _ if self.plain => (Kernel::Product8, 32, 8),
            _ => (Kernel::ProductTiles, 64, 32),
        };
        let parts = self.parts_of(&job.products)?;
        let mut left = &*job.products;
        while !left.is_empty() {
            let mut launched = Products {
                parts,
                input: self.copied,
                tokens: word(job.rows)?,
                ..Products::default()
            };
            let (mut blocks, mut weights, mut shared) = (0, 0, 0);
            while let Some((product, others)) = left.split_first() {
                let Some(matrix) = launched.matrix.get_mut(launched.matrices as usize) else {
                    break;
                };
                *matrix = self.matrix(product, job.rows, blocks)?;
                left = others;
                if kernel == Kernel::Product1 {
                    left = self.add_tiles(matrix, product, others)?;
                }
                let tile = if matrix.tiles == 0 {
                    matrix.rows
                } else {
                    matrix.tiles / FILE_PAGE
                };
                let last = matrix.rows - (matrix.parts() - 1) * tile;
                blocks += (matrix.parts() - 1) * tile.div_ceil(rows) + last.div_ceil(rows);
                weights += product.weight.len() / product.rows.max(1) * matrix.rows as usize;
                shared = shared.max(match kernel {
                    Kernel::ProductNarrow => narrow_bytes(product.dtype),
                    Kernel::ProductTiles => tiles_bytes(product.dtype),
                    _ => 0,
                });
                launched.matrices += 1;
            }
            if let Some((activate, to)) = pair {
                (launched.pair_to, launched.pair_counters) = (to, self.counter(PAIR));
                launched.pair_activation = number_of(activate.activation);
                let biases = [&activate.gate_bias, &activate.up_bias];
                for (matrix, bias) in launched.matrix.iter_mut().zip(biases) {
                    matrix.bias = self.some(bias.as_ref())?;
                }
            }
            let grid = (blocks, word(job.rows.div_ceil(tokens))?, 1);
            let job = Job::Products(launched);
            let shared = word(shared)?;
            self.command_with(
                &Command::Launch {
                    kernel,
                    grid,
                    shared,
                    job,
                },
                weights,
            )?;
        }
        Ok(())
    }

    /// Extends a matrix by its continuation in other parts, such as tiles of the head, and returns the remaining
    /// products.
    fn add_tiles<'p>(
        &self,
        matrix: &mut Matrix,
        first: &Product,
        mut others: &'p [Product],
    ) -> Result<&'p [Product], DeviceError> {
        let (Some(part), page) = (first.part, u64::from(FILE_PAGE)) else {
            return Ok(others);
        };
        let (tile, bytes) = (matrix.rows, first.weight.len() as u64 % page);
        if tile > u32::MAX / FILE_PAGE || matrix.offset >= page {
            return Ok(others);
        }
        while let Some((next, rest)) = others.split_first() {
            let number = matrix.rows.div_ceil(tile.max(1));
            let (_, offset) = self.owner.device_place(&next.weight)?;
            let follows = matrix.rows == number * tile
                && next.rows <= first.rows
                && next.part == Some(part + number as usize)
                && next.first == first.first + matrix.rows as usize
                && offset == (matrix.offset + u64::from(number) * bytes) % page
                && (next.dtype, next.columns, next.stride)
                    == (first.dtype, first.columns, first.stride)
                && next.out.is_same(&first.out);
            if !follows {
                break;
            }
            self.matrix(next, 1, 0)?;
            matrix.rows += word(next.rows)?;
            matrix.tiles = tile * FILE_PAGE + word(usize::try_from(bytes).unwrap_or_default())?;
            others = rest;
        }
        Ok(others)
    }

    /// Quantised matrices for which blocks of 32 rows leave multiprocessors idle.
    fn is_narrow(&self, job: &Multiply<'_>) -> bool {
        let blocks: usize = job
            .products
            .iter()
            .map(|product| product.rows.div_ceil(32))
            .sum();
        blocks <= self.commands.processors()
            && job
                .products
                .iter()
                .all(|product| narrow_bytes(product.dtype) > 0)
    }

    /// The table of parts, including those of these products.
    fn parts_of(&mut self, products: &[Product]) -> Result<Address, DeviceError> {
        let mut is_same = true;
        for product in products {
            let Some(number) = product.part else { continue };
            let (place, _) = self.owner.device_place(&product.weight)?;
            let known = self.places.get_mut(number + 1);
            let known =
                known.ok_or_else(|| DeviceError::new(format!("there is no part {number}")))?;
            if mem::replace(known, place) != place {
                self.commands
                    .before_writing(Tables::Part(word(number + 1)?))?;
                is_same = false;
            }
        }
        if is_same {
            return Ok(self.parts.address());
        }
        self.parts
            .put(&mut self.staging, self.places.iter().copied().map(Ok))
    }

    fn matrix(
        &self,
        product: &Product,
        tokens: usize,
        first_block: u32,
    ) -> Result<Matrix, DeviceError> {
        let dtype = product.dtype;
        let kind = kind_of(dtype)
            .ok_or_else(|| DeviceError::new(format!("there is no kernel for {dtype:?}")))?;
        let row_bytes = product.columns / dtype.block_size() * dtype.type_size();
        self.fits(&product.weight, product.rows * row_bytes)?;
        let end = product.first + product.rows;
        self.fits(&product.out, ((tokens - 1) * product.stride + end) * 4)?;
        if product.columns != self.copied.columns as usize
            || format_of(dtype) & self.copied.formats == 0
        {
            return Err(DeviceError::new("an input was copied for other products"));
        }
        let (part, offset) = match product.part {
            Some(number) => (
                word(number + 1)?,
                self.owner.device_place(&product.weight)?.1,
            ),
            None => (0, self.at(&product.weight)?),
        };
        Ok(Matrix {
            part,
            offset,
            out: self.at(&product.out)? + 4 * product.first as u64,
            kind,
            rows: word(product.rows)?,
            stride: word(product.stride)?,
            first_block,
            ..Matrix::default()
        })
    }

    fn activate(&mut self, job: &Activate) -> Result<(), DeviceError> {
        let rows = job.gate.len() / 4 / job.width.max(1);
        let up = job.up.as_ref();
        let up = up.ok_or_else(|| DeviceError::new("there is no kernel without a factor"))?;
        self.fits(up, job.gate.len())?;
        let (gate, up) = (self.at(&job.gate)?, self.at(up)?);
        self.add_bias(gate, rows, job.gate_bias.as_ref())?;
        self.add_bias(up, rows, job.up_bias.as_ref())?;
        let launched = ActivateJob {
            gate,
            up,
            stride: word(job.width)?,
            activation: number_of(job.activation),
            to: self.prepare(&job.prepare, rows, job.width)?,
        };
        let grid = (word(job.width.div_ceil(1024))?, word(rows)?, 1);
        self.launch(Kernel::Activate, grid, 0, Job::Activate(launched))
    }

    fn rotate(&mut self, job: &Rotate<'_>) -> Result<(), DeviceError> {
        let target = self.at(&job.to)?;
        let mut angles = vec![0.0f32; job.to.len() / 4];
        for (position, angles) in (job.position..).zip(angles.chunks_exact_mut(job.width.max(1))) {
            job.rotation.fill(position, job.factors.as_deref(), angles);
        }
        // SAFETY: valid as long as the view, whose buffer waits for queued work before its release.
        Ok(unsafe { self.staging.send(target, &angles) }?)
    }

    fn widen(&mut self, job: &Widen<'_>) -> Result<(), DeviceError> {
        let kind = kind_of(job.dtype).unwrap_or_default();
        for row in job.rows.iter() {
            let target = self.at(&row.to)?;
            let elements = row.to.len() / 4;
            let row_bytes = elements / job.dtype.block_size() * job.dtype.type_size();
            match &row.from {
                RowBytes::Host(bytes) => {
                    if bytes.len() < row_bytes {
                        return Err(DeviceError::new("a row of the file is cut"));
                    }
                    let mut floats = vec![0.0f32; elements];
                    dequantize(job.dtype, bytes, &mut floats);
                    floats.iter_mut().for_each(|value| *value *= job.scale);
                    // SAFETY: valid as long as the view, whose buffer waits for queued work before its release.
                    unsafe { self.staging.send(target, &floats) }?;
                }
                RowBytes::View(view) => {
                    self.fits(view, row_bytes)?;
                    let launched = EmbedJob {
                        parts: self.parts.address(),
                        offset: self.at(view)?,
                        stream: target,
                        scale: job.scale,
                        kind,
                        width: word(elements)?,
                        row_bytes: word(row_bytes)?,
                        ..EmbedJob::default()
                    };
                    let grid = (word(elements.div_ceil(1024))?, 1, 1);
                    self.launch(Kernel::Embed, grid, 0, Job::Embed(launched))?;
                }
            }
        }
        Ok(())
    }

    /// Sets the word with the number of preceding tokens.
    fn set_position(&mut self, position: usize) -> Result<Address, DeviceError> {
        let (position, place) = (word(position)?, self.counter(POSITION));
        if self.position != Some(position) {
            self.position = None;
            self.commands.before_writing(Tables::Cache)?;
            // SAFETY: a word of the counters.
            unsafe { self.commands.set(place, position, 1) }?;
            self.position = Some(position);
        }
        Ok(place)
    }

    /// The table of the cache's blocks, each of which is open.
    fn table(
        &mut self,
        cells: &Cells<'_>,
        is_windowed: bool,
        tokens: usize,
    ) -> Result<Address, DeviceError> {
        let len = cells.shape.block_bytes(cells.kind).as_len();
        let used = tokens.div_ceil(cells.shape.block_tokens.get().max(1) as usize);
        let places = cells.places.iter().take(used);
        if places.len() < used {
            return Err(DeviceError::new("the cache has no room for its tokens"));
        }
        let addresses = places.map(|place| self.owner.device_range(&cells.space, place * len, len));
        let [whole, windows] = &mut self.blocks;
        let blocks = if is_windowed { windows } else { whole };
        blocks.put(&mut self.staging, addresses)
    }

    fn attend(&mut self, job: &Attend<'_>) -> Result<(), DeviceError> {
        let spec = &job.spec;
        let (dim, query) = (spec.head_dim, spec.heads * spec.head_dim);
        let step = if spec.gated { 2 * dim } else { dim };
        let (query_row, key_row) = (spec.heads * step, spec.kv_heads * dim);
        if !job.is_causal {
            return Err(DeviceError::new("no kernel attends to later tokens"));
        }
        let Some([key, value]) = &job.stored else {
            return Err(DeviceError::new(
                "no kernel attends to the keys of another layer",
            ));
        };
        let all_rows = job.rows();
        for (view, row) in [
            (&job.query, query_row),
            (key, key_row),
            (value, key_row),
            (&job.out, query),
        ] {
            self.fits(view, all_rows * row * 4)?;
        }
        let (queries, keys, values) = (self.at(&job.query)?, self.at(key)?, self.at(value)?);
        self.add_bias(queries, all_rows, job.query_bias.as_ref())?;
        self.add_bias(keys, all_rows, job.key_bias.as_ref())?;
        self.add_bias(values, all_rows, job.value_bias.as_ref())?;
        let back = match &job.gap {
            Some(gap) => self
                .back
                .put(&mut self.staging, gap.back.iter().copied().map(Ok))?,
            None => 0,
        };
        if dim > HEAD_DIM_MAX {
            return Err(DeviceError::new(format!(
                "heads of {dim} elements are too long"
            )));
        }
        self.fits(&job.scratch, scratch_floats(spec.heads, dim) * 4)?;
        let partial = self.at(&job.scratch)?;
        let to = self.prepare(&job.prepare, all_rows, query)?;
        let mut before = 0;
        for sequence in &job.sequences {
            let cells = &sequence.cells;
            let offset =
                |part| offset_in_block(&cells.shape, cells.kind, job.layer, part, 0) as u64;
            let (key_offset, value_offset) = (offset(Part::Key), offset(Part::Value));
            let end = sequence.position + sequence.rows;
            let blocks = self.table(cells, job.window.is_some(), end)?;
            let kind = cell_kind(cells.kind);
            let not_finite = self.at(&job.broken)? + (sequence.flag * 4) as u64;
            let mut done = 0;
            while done < sequence.rows {
                let (first, position) = (before + done, sequence.position + done);
                let shape = (spec.heads, spec.kv_heads, dim);
                let Slice {
                    rows,
                    tiles,
                    groups,
                    run,
                    is_few,
                } = Slice::of(
                    shape,
                    sequence.rows - done,
                    position,
                    self.commands.processors(),
                );
                let turned_back = partial
                    + ((scratch_floats(spec.heads, dim) - rows * spec.heads * dim) * 4) as u64;
                let of_rows = |start: Address, row: usize| start + (first * row * 4) as u64;
                let query_floats = of_rows(queries, query_row);
                let position_at = self.set_position(position)?;
                let growth = match &job.temperature {
                    Some(temperature) => {
                        let growth =
                            (position..position + rows).map(|position| temperature.at(position));
                        self.growth.put(&mut self.staging, growth.map(Ok))?
                    }
                    None => 0,
                };
                let turned = of_rows(self.at(&job.out)?, query);
                let heads = HeadsJob {
                    query: query_floats,
                    key: of_rows(keys, key_row),
                    value: of_rows(values, key_row),
                    query_norm: self.some(job.query_norm.as_ref())?,
                    key_norm: self.some(job.key_norm.as_ref())?,
                    angles: of_rows(self.at(&job.rotary)?, spec.rotary),
                    back,
                    growth,
                    out: turned,
                    out_back: turned_back,
                    blocks,
                    position: position_at,
                    not_finite,
                    key_offset,
                    value_offset,
                    heads: word(spec.heads)?,
                    kv_heads: word(spec.kv_heads)?,
                    dim: word(dim)?,
                    rotary: word(spec.rotary)?,
                    query_stride: word(query_row)?,
                    kv_stride: word(key_row)?,
                    head_step: word(step)?,
                    adjacent: u32::from(spec.pairing == Pairing::Adjacent),
                    kind,
                    epsilon: job.epsilon,
                    ..HeadsJob::default()
                };
                let all_heads = word((spec.heads + 2 * spec.kv_heads).div_ceil(4))?;
                self.launch(
                    Kernel::Heads,
                    (all_heads, word(rows)?, 1),
                    0,
                    Job::Heads(heads),
                )?;
                let attend = AttendJob {
                    query: turned,
                    query_back: if back == 0 { 0 } else { turned_back },
                    blocks,
                    position: position_at,
                    partial,
                    key_offset,
                    value_offset,
                    tokens: word(rows)?,
                    heads: word(spec.heads)?,
                    kv_heads: word(spec.kv_heads)?,
                    dim: word(dim)?,
                    kind,
                    window: word(job.window.unwrap_or(0))?,
                    gap_after: word(job.gap.as_ref().map_or(0, |gap| gap.after))?,
                    run,
                    scale: spec.scale,
                    unused: 0,
                };
                let (kernel, shared) = attend_kernel(is_few, dim);
                let grid = (word(spec.kv_heads)?, word(tiles)?, word(groups)?);
                self.launch(kernel, grid, shared, Job::Attend(attend))?;
                let join = JoinJob {
                    partial,
                    gate: if spec.gated {
                        query_floats + 4 * dim as u64
                    } else {
                        0
                    },
                    to: CopiesTo {
                        base: to.base + (first as u64) * u64::from(to.stride),
                        ..to
                    },
                    position: position_at,
                    heads: word(spec.heads)?,
                    dim: word(dim)?,
                    groups: word(groups)?,
                    gate_stride: word(query_row)?,
                    gate_step: word(step)?,
                    run,
                };
                let columns = if groups == 1 { 2048 } else { 256 };
                let grid = (word(query.div_ceil(columns))?, word(rows)?, 1);
                self.launch(Kernel::AttendJoin, grid, 0, Job::Join(join))?;
                done += rows;
            }
            before += sequence.rows;
        }
        Ok(())
    }

    fn convert(&self, job: &Convert) -> Result<(), DeviceError> {
        let elements = u32::try_from(job.elements).unwrap_or(u32::MAX);
        let bytes = |kind: KvType| usize::try_from(kind.row_bytes(elements)).unwrap_or(usize::MAX);
        let (had, has) = (bytes(job.from), bytes(job.to));
        let memory = self
            .owner
            .device_range(&job.space, 0, job.rows * had.max(has))?;
        let wave = |first: usize, end: usize| {
            let count = word(end - first)?;
            let (from, to) = (cell_kind(job.from), cell_kind(job.to));
            let launched = ConvertJob {
                memory,
                first: first as u64,
                count,
                dim: elements,
                from,
                to,
            };
            self.launch(
                Kernel::Convert,
                (count.div_ceil(4), 1, 1),
                0,
                Job::Convert(launched),
            )
        };
        // In waves that overwrite rows of earlier waves, but no row read by another block of the same wave.
        if has <= had {
            let mut done = 0;
            while done < job.rows {
                let end = (done * had / has.max(1)).clamp(done + 1, job.rows);
                wave(done, end)?;
                done = end;
            }
        } else {
            let mut left = job.rows;
            while left > 0 {
                let first = (left * had).div_ceil(has).min(left - 1);
                wave(first, left)?;
                left = first;
            }
        }
        Ok(())
    }

    fn finish(&mut self, job: &Finish<'_>) -> Result<(), DeviceError> {
        let logits = self.at(&job.logits)?;
        let found = self.at(&job.found)?;
        self.fits(&job.found, 12)?;
        self.add_bias(logits, 1, job.bias.as_ref())?;
        let ranges = job
            .said
            .iter()
            .map(|rows| Ok([word(rows.start)?, word(rows.end)?]));
        let vocabulary = job.logits.len() / 4;
        let blocks = vocabulary.div_ceil(1024);
        if blocks > FINISH_BLOCKS_MAX {
            return Err(DeviceError::new(format!(
                "a vocabulary of {vocabulary} is too large"
            )));
        }
        let launched = FinishJob {
            logits,
            ranges_count: word(job.said.len())?,
            ranges: self.said.put(&mut self.staging, ranges)?,
            partial: self.counter(PARTIAL),
            counter: self.counter(FINISH),
            result: self.counter(RESULT),
            vocabulary: word(vocabulary)?,
            scale: job.scale,
            cap: job.cap.unwrap_or(0.0),
        };
        self.launch(
            Kernel::Finish,
            (word(blocks)?, 1, 1),
            0,
            Job::Finish(launched),
        )?;
        self.command(&Command::Copy {
            from: self.counter(RESULT),
            to: found,
            bytes: 12,
        })
    }
}

/// Whether an operation is for a single token with weights at fixed addresses: with the next token it will usually be
/// identical.
fn is_of_token(operation: &Operation<'_>) -> bool {
    match operation {
        Operation::Activate(job) => job.gate.len() == 4 * job.width,
        Operation::Attend(job) => job.rows() == 1,
        Operation::Delta(job) => job.rows.len() == 1,
        Operation::Finish(_) => true,
        Operation::Multiply(job) => {
            job.rows == 1 && job.products.iter().all(|product| product.part.is_some())
        }
        Operation::Norm(job) => job.stream.len() == 4 * job.width,
        Operation::Combine(_)
        | Operation::Convert(_)
        | Operation::Convolve(_)
        | Operation::Gather(_)
        | Operation::Fill { .. }
        | Operation::Move { .. }
        | Operation::Rotate(_)
        | Operation::Scan(_)
        | Operation::Widen(_) => false,
    }
}

/// Number of an activation in the kernels.
const fn number_of(activation: Activation) -> u32 {
    match activation {
        Activation::Silu => 1,
        Activation::Gelu => 2,
        // Of models only that are refused.
        Activation::Clamped | Activation::ReluSquared => 3,
    }
}

/// Alignment of copies, which kernels process in units of this size.
const COPIES_ALIGN: usize = 16;
