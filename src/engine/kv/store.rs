//! Blocks of the layers of one kind: all of a sequence, or its last ones.
//!
//! A block table maps the blocks of a sequence to places. The oldest block is dropped without moving others: its place
//! is reused for a later block. A block is copied only if its place is returned to the kernel while the block stays.
//!
//! A store with fewer places than the sequence has blocks keeps the last ones: each new block overwrites the oldest.
//!
//! Other sequences may be parked beside the current one. Sequences with a common prefix share its blocks, which are
//! never written to. A place may also hold part of a copy (recurrent state, windows) instead of a block.

use std::{collections::BTreeSet, io, ops::Range};

use crate::{
    arena::Backing,
    backend::{Backend, Cells, Convert, DeviceError, Operation, Region, Span},
};
use cotenant_policy::{kv_type::KvType, residency::KvShape};
use cotenant_units::{Bytes, page};

/// Keys and values of some layers.
///
/// A block holds [`KvShape::block_tokens`] tokens of each layer, as `[layer][key, value][head][token][element]`, so
/// that one head's keys in a block are contiguous.
#[derive(Debug)]
pub(super) struct Store {
    /// Shape of its layers only.
    shape: KvShape,
    kind: KvType,
    space: Region,
    /// Maximum number of blocks of a sequence at the present capacity.
    blocks: usize,
    /// Maximum number of places.
    most: usize,
    /// The place of each block of the sequence, in units of blocks. Future blocks get the free places first, and then
    /// those of the oldest blocks.
    places: Vec<usize>,
    /// The first block whose place was not reused.
    first: usize,
    /// Block table of each parked sequence.
    parked: Vec<Vec<usize>>,
    /// Places of each copy.
    copies: Vec<(CopyId, Vec<usize>)>,
    /// The number of the last copy.
    last_copy: u64,
    /// Number of blocks to which the sequence can grow at free places.
    ready: usize,
    /// Places used only by copies and parked sequences.
    kept: usize,
    /// Memory from the start that was touched since it was last released; all of it with [`Backing::Now`].
    touched: Bytes,
    backing: Backing,
    /// Occupied places, and their order of reuse: allocated once, since both are computed during sheds.
    is_taken: Vec<bool>,
    order: Vec<usize>,
}

/// Effect of a change of capacity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resized {
    /// Bytes of released blocks.
    pub asked: Bytes,
    /// Released bytes that the kernel had in memory.
    pub freed: Bytes,
    /// Bytes of new blocks, all untouched.
    pub grown: Bytes,
}

/// Reason why a cache could not be changed.
#[derive(Debug, thiserror::Error)]
pub enum KvError {
    /// The device has failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Memory cannot be allocated, or the kernel refuses.
    #[error(transparent)]
    Memory(#[from] io::Error),
}

impl Resized {
    /// Returns the sum of both.
    pub(super) fn and(self, other: Self) -> Self {
        Self {
            asked: self.asked + other.asked,
            freed: self.freed + other.freed,
            grown: self.grown + other.grown,
        }
    }
}

/// Handle of a copy: bytes stored in places of a store instead of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CopyId(u64);

impl Store {
    /// Creates a store in `f16` without capacity, for sequences of `blocks_max` blocks, of which it keeps at most the
    /// last `most`.
    pub(super) fn new(
        backend: &dyn Backend,
        shape: KvShape,
        (blocks_max, most): (usize, usize),
        backing: Backing,
    ) -> io::Result<Self> {
        let most = most.min(blocks_max);
        let space = backend.reserve(bytes_of(&shape, most, KvType::F16), shape.granule)?;
        Ok(Self {
            backing: if space.is_memory_at_once() {
                Backing::Now
            } else {
                backing
            },
            space,
            shape,
            kind: KvType::F16,
            blocks: 0,
            most,
            places: (0..blocks_max).map(|block| block % most.max(1)).collect(),
            first: 0,
            parked: Vec::new(),
            copies: Vec::new(),
            last_copy: 0,
            ready: 0,
            kept: 0,
            touched: Bytes::ZERO,
            is_taken: vec![false; most],
            order: Vec::with_capacity(most),
        })
    }

    /// Changes the maximum number of blocks of a sequence to `blocks`, at least `used`.
    pub(super) fn resize(
        &mut self,
        backend: &mut dyn Backend,
        blocks: usize,
        used: usize,
    ) -> Result<Resized, KvError> {
        let (had, wanted) = (self.open(), blocks.min(self.most));
        let used = used.min(self.blocks);
        self.clear_behind(backend, wanted, used)?;
        settle(backend)?;
        let before = self.bytes();
        let freed = match self.space.set_open(self.bytes_of(wanted)) {
            Ok(freed) => freed,
            Err(error) => {
                self.lay_out(used, had);
                return Err(error.into());
            }
        };
        if self.backing == Backing::Now
            && let Err(error) = self.space.populate_from(before)
        {
            self.space.set_open(before).ok();
            return Err(error.into());
        }
        self.blocks = blocks;
        self.lay_out(used, wanted);
        self.touched = match self.backing {
            Backing::Now => self.bytes(),
            Backing::OnTouch => self.touched.min(self.bytes()),
        };
        Ok(Resized {
            asked: before.saturating_sub(self.bytes()),
            freed,
            grown: self.bytes().saturating_sub(before),
        })
    }

    /// Opens the memory of a larger type `kind`, before the conversion to it.
    pub(super) fn open_as(&mut self, kind: KvType) -> Result<(), KvError> {
        let before = self.bytes();
        self.space
            .set_open(bytes_of(&self.shape, self.open(), kind))?;
        if self.backing == Backing::Now
            && let Err(error) = self.space.populate_from(before)
        {
            self.space.set_open(before).ok();
            return Err(error.into());
        }
        Ok(())
    }

    /// Converts `used` blocks to `kind`. Drops copies, which cannot be converted.
    pub(super) fn convert(
        &mut self,
        backend: &mut dyn Backend,
        kind: KvType,
        used: usize,
    ) -> Result<Resized, KvError> {
        settle(backend)?;
        self.keep_copies(|_| false);
        let (from, before, resident) = (self.kind, self.bytes(), self.resident());
        let places = self.places_held(used);
        let heads = 2 * self.shape.attention_layers as usize * self.shape.kv_heads as usize;
        backend.queue(Operation::Convert(Convert {
            space: self.space.lend(),
            rows: places * self.shape.block_tokens.get() as usize * heads,
            elements: self.shape.head_dim as usize,
            from,
            to: kind,
        }))?;
        settle(backend)?;
        self.kind = kind;
        let (kept, all) = (self.bytes_of(places), self.bytes());
        let mut freed = Bytes::ZERO;
        if kind < from {
            self.touched = self.touched.min(all);
            if self.backing == Backing::OnTouch {
                self.space.set_open(kept)?;
            }
            self.space.set_open(all)?;
            // The conversion may have touched places behind the last token of the last block.
            freed = resident.saturating_sub(self.resident());
        }
        self.touched = match self.backing {
            Backing::Now => all,
            Backing::OnTouch if kind < from => kept,
            Backing::OnTouch => self.touched.max(kept),
        };
        Ok(Resized {
            asked: before.saturating_sub(all),
            freed,
            grown: all.saturating_sub(before),
        })
    }

    /// Records that the first `blocks` blocks are about to be populated.
    pub(super) fn touch(&mut self, blocks: usize) {
        self.touched = self.touched.max(self.bytes_of(self.places_of(blocks)));
    }

    /// Records that blocks before `end` are about to be written, which overwrites the oldest ones.
    pub(super) fn write_up_to(&mut self, end: usize) {
        self.first = self.first.max(end.saturating_sub(self.open()));
    }

    /// Whether all written blocks from `first` on are held.
    pub(super) const fn holds_from(&self, first: usize) -> bool {
        first >= self.first
    }

    /// Takes places for a copy of `bytes` bytes after those of the first `used` blocks; returns `None` if too few are
    /// free.
    pub(super) fn take(&mut self, used: usize, bytes: usize) -> Option<CopyId> {
        let count = self.places_for(bytes)?;
        let (places, len) = (self.next_places(used, count)?, self.block_len());
        // The last place is partly written.
        let ends = (0..).step_by(len).zip(&places);
        let end = ends.map(|(start, place)| place * len + len.min(bytes - start));
        self.touch_up_to(Bytes::of_len(end.max().unwrap_or(0)).round_up(page()));
        self.last_copy += 1;
        let id = CopyId(self.last_copy);
        self.copies.push((id, places));
        self.cut(used);
        Some(id)
    }

    /// Extends a parked sequence to `blocks` blocks, at places after those of the first `used` blocks; returns `false`
    /// if too few are free.
    pub(super) fn extend(&mut self, number: usize, blocks: usize, used: usize) -> bool {
        let had = self.parked.get(number).map_or(blocks, Vec::len);
        let Some(places) = self.next_places(used, blocks.saturating_sub(had)) else {
            return false;
        };
        if let Some(last) = places.iter().max() {
            self.touch_up_to(self.bytes_of(last + 1));
            if let Some(parked) = self.parked.get_mut(number) {
                parked.extend(places);
            }
            self.cut(used);
        }
        true
    }

    /// Returns the next `count` free places after those of the first `used` blocks.
    fn next_places(&self, used: usize, count: usize) -> Option<Vec<usize>> {
        let places = self.places.get(used..used + count)?;
        self.is_ready(used + count).then(|| places.to_vec())
    }

    /// Records that the first `bytes` bytes are about to be populated.
    fn touch_up_to(&mut self, bytes: Bytes) {
        self.touched = self.touched.max(bytes.min(self.bytes()));
    }

    /// Number of distinct blocks of the first `used` ones and of the selected parked sequences.
    pub(super) fn blocks_of(&self, used: usize, parked: impl Fn(usize) -> bool) -> usize {
        let own = self.places.get(..used).unwrap_or_default();
        let numbered = self.parked.iter().enumerate();
        let others = numbered.filter(|(number, _)| parked(*number));
        let all = own.iter().chain(others.flat_map(|(_, places)| places));
        all.collect::<BTreeSet<_>>().len()
    }

    /// For each parked sequence, the number of its own blocks, and of those shared with others or with the first `used`
    /// ones.
    pub(super) fn held_by_each(&self, used: usize) -> Vec<(usize, usize)> {
        let mut uses = vec![0u8; self.places.len()];
        let own = self.places.get(..used).unwrap_or_default();
        for place in self.parked.iter().flatten().chain(own) {
            if let Some(uses) = uses.get_mut(*place) {
                *uses = uses.saturating_add(1);
            }
        }
        let is_shared = |place: &&usize| uses.get(**place).is_some_and(|uses| *uses > 1);
        let held = |places: &Vec<usize>| {
            let shared = places.iter().filter(is_shared).count();
            (places.len() - shared, shared)
        };
        self.parked.iter().map(held).collect()
    }

    /// Number of places for `bytes` bytes; `None` for a store without layers.
    pub(super) fn places_for(&self, bytes: usize) -> Option<usize> {
        let len = self.block_len();
        (len > 0).then(|| bytes.div_ceil(len))
    }

    /// Returns where the `bytes` of a copy are stored, one part per place; empty for an unknown copy.
    pub(super) fn parts(&self, id: CopyId, bytes: Range<usize>) -> Vec<Span> {
        let len = self.block_len().max(1);
        let copy = self.copies.iter().find(|(other, _)| *other == id);
        let places = copy.map_or(&[][..], |(_, places)| places);
        let part = |(place, start): (&usize, usize)| {
            let from = bytes.start.clamp(start, start + len);
            let end = bytes.end.clamp(start, start + len);
            let at = place * len + (from - start);
            (from < end).then(|| Span::Region(self.space.lend(), at..at + (end - from)))
        };
        let starts = (0..).step_by(len);
        places.iter().zip(starts).filter_map(part).collect()
    }

    /// Returns the memory of block `index` as a part of a copy.
    pub(super) fn block(&self, index: usize) -> Option<Span> {
        let (place, len) = (self.places.get(index)?, self.block_len());
        Some(Span::Region(
            self.space.lend(),
            place * len..(place + 1) * len,
        ))
    }

    /// Places of a parked sequence.
    pub(super) fn parked_places(&self, number: usize) -> &[usize] {
        self.parked.get(number).map_or(&[][..], Vec::as_slice)
    }

    /// Places of a copy.
    pub(super) fn copy_places(&self, id: CopyId) -> &[usize] {
        let copy = self.copies.iter().find(|(other, _)| *other == id);
        copy.map_or(&[][..], |(_, places)| places)
    }

    /// Places of the first `used` blocks of the sequence.
    pub(super) fn own_places(&self, used: usize) -> &[usize] {
        self.places.get(..used).unwrap_or_default()
    }

    /// Parks the first `blocks` blocks of a parked sequence, shared with it, as another one; none without a sequence.
    pub(super) fn park_shared(&mut self, number: Option<usize>, blocks: usize) {
        let from = number.and_then(|number| self.parked.get(number));
        let shared = from.and_then(|places| places.get(..blocks));
        let shared = shared.unwrap_or_default().to_vec();
        self.parked.push(shared);
    }

    /// Bytes at a place; `None` in device memory. No queued operation may use it.
    pub(super) fn bytes_at(&self, place: usize) -> Option<&[u8]> {
        let len = self.block_len();
        let start = self.space.range(place * len, len)?;
        // SAFETY: the range is open memory of that length; only operations write to it, none of which is in flight.
        Some(unsafe { std::slice::from_raw_parts(start.as_ptr(), len) })
    }

    /// Mutable bytes at a place, as [`Self::bytes_at`].
    pub(super) fn bytes_at_mut(&mut self, place: usize) -> Option<&mut [u8]> {
        let len = self.block_len();
        let start = self.space.range(place * len, len)?;
        // SAFETY: as above, and the store is borrowed exclusively.
        Some(unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), len) })
    }

    /// Drops all copies except the wanted ones.
    pub(super) fn keep_copies(&mut self, is_wanted: impl Fn(CopyId) -> bool) {
        self.copies.retain(|(id, _)| is_wanted(*id));
    }

    /// Memory of all copies.
    pub(super) fn copied(&self) -> Bytes {
        self.bytes_of(self.copies.iter().map(|(_, places)| places.len()).sum())
    }

    /// Drops the sequence's blocks before `start`, and assigns places to the blocks up to `end`, which are about to be
    /// written.
    pub(super) fn begin_at(&mut self, start: usize, end: usize) {
        self.first = start;
        self.cut(start);
        self.touch(end);
    }

    /// Bytes per block.
    pub(super) fn block_len(&self) -> usize {
        self.block_len_of(self.kind)
    }

    /// Bytes per block of another type.
    pub(super) fn block_len_of(&self, kind: KvType) -> usize {
        self.shape.block_bytes(kind).as_len()
    }

    /// Parks the first `used` blocks as another sequence, after those already parked.
    pub(super) fn park(&mut self, used: usize) {
        let places = self.places.get(..used).unwrap_or_default();
        self.parked.push(places.to_vec());
    }

    /// Evicts a parked sequence.
    pub(super) fn forget(&mut self, number: usize) {
        if number < self.parked.len() {
            self.parked.remove(number);
        }
    }

    /// Makes the first `blocks` blocks of a parked sequence, shared with it, the current sequence.
    pub(super) fn take_up(&mut self, number: usize, blocks: usize) {
        if let Some(from) = self
            .parked
            .get(number)
            .and_then(|places| places.get(..blocks))
            && let Some(to) = self.places.get_mut(..blocks)
        {
            to.copy_from_slice(from);
        }
        self.cut(blocks);
    }

    /// Cuts the sequence to `used` blocks and lays out the later ones.
    pub(super) fn cut(&mut self, used: usize) {
        self.lay_out(used, self.open());
    }

    /// Whether the sequence can grow to `blocks` blocks without evicting a parked one.
    pub(super) const fn is_ready(&self, blocks: usize) -> bool {
        blocks <= self.ready
    }

    /// Number of distinct blocks of the first `used` ones and of all parked sequences.
    pub(super) fn held(&mut self, used: usize) -> usize {
        self.lay_out(used, self.open());
        self.open().saturating_sub(self.ready.saturating_sub(used))
    }

    /// Whether block `index` is shared with a parked sequence.
    pub(super) fn is_shared(&self, index: usize) -> bool {
        let place = self.places.get(index);
        place.is_some_and(|place| self.parked.iter().flatten().any(|other| other == place))
    }

    /// Copies block `index`, the last one of the sequence, to a free place, which must exist.
    pub(super) fn part(
        &mut self,
        backend: &mut dyn Backend,
        index: usize,
    ) -> Result<(), DeviceError> {
        self.lay_out(index + 1, self.open());
        let Some((from, to)) = self.block(index).zip(self.block(index + 1)) else {
            return Ok(());
        };
        backend.queue(Operation::Move { from, to })?;
        self.places.copy_within(index + 1..index + 2, index);
        self.cut(index + 1);
        self.touch(index + 1);
        Ok(())
    }

    /// Drops `count` blocks from block `first` on of `used`; later blocks move up. Releases no memory.
    pub(super) fn drop_blocks(&mut self, first: usize, count: usize, used: usize) {
        let used = used.min(self.blocks);
        if let Some(places) = self.places.get_mut(first..used)
            && count <= places.len()
        {
            places.rotate_left(count);
        }
        if self.first > first {
            self.first = self.first.saturating_sub(count).max(first);
        }
        self.lay_out(used.saturating_sub(count), self.open());
    }

    /// Restores the order of blocks in an empty store.
    pub(super) fn put_in_order(&mut self) {
        self.first = 0;
        self.lay_out(0, self.open());
    }

    /// Moves blocks at places from `end` on that belong to the first `used` blocks, a parked sequence or a copy to free
    /// places before `end`.
    fn clear_behind(
        &mut self,
        backend: &mut dyn Backend,
        end: usize,
        used: usize,
    ) -> Result<(), DeviceError> {
        if end >= self.open() || used > end {
            return Ok(());
        }
        let first = self.lay_out(used, self.open());
        let len = self.block_len();
        // New place of each place from `end` on.
        self.order.clear();
        let mut free = 0;
        for from in end..self.open() {
            let mut to = from;
            if self.is_taken.get(from) == Some(&true) {
                while self.is_taken.get(free) == Some(&true) {
                    free += 1;
                }
                to = free;
                free += 1;
                let block =
                    |place: usize| Span::Region(self.space.lend(), place * len..(place + 1) * len);
                let (from, to) = (block(from), block(to));
                backend.queue(Operation::Move { from, to })?;
            }
            self.order.push(to);
        }
        let own = self.places.get_mut(first..used).unwrap_or_default();
        let copies = self.copies.iter_mut().flat_map(|(_, places)| places);
        let others = self.parked.iter_mut().flatten().chain(copies);
        for place in own.iter_mut().chain(others) {
            if let Some(to) = place.checked_sub(end).and_then(|at| self.order.get(at)) {
                *place = *to;
            }
        }
        self.lay_out(used, end);
        self.touched = self.touched.max(self.bytes_of(self.places_held(used)));
        Ok(())
    }

    /// Assigns places to the blocks after the first `used`, with `open` places: free places in ascending order, and
    /// then those of the oldest blocks. Returns the first block that is still held.
    fn lay_out(&mut self, used: usize, open: usize) -> usize {
        self.is_taken.fill(false);
        let mut first = used;
        while first > self.first
            && let Some(is_taken) = self.places.get(first - 1).and_then(|place| self.is_taken.get_mut(*place))
            // A block whose place a later block uses is no longer held.
            && !std::mem::replace(is_taken, true)
        {
            first -= 1;
        }
        let copies = self.copies.iter().flat_map(|(_, places)| places);
        for place in self.parked.iter().flatten().chain(copies) {
            if let Some(is_taken) = self.is_taken.get_mut(*place) {
                *is_taken = true;
            }
        }
        self.order.clear();
        let free = self
            .is_taken
            .iter()
            .take(open)
            .enumerate()
            .filter(|(_, is_taken)| !**is_taken);
        self.order.extend(free.map(|(place, _)| place));
        self.ready = used + self.order.len();
        self.kept = open.saturating_sub(self.order.len() + used - first);
        self.order
            .extend(self.places.get(first..used).unwrap_or_default());
        // Blocks that are no longer held must not refer to a closed place.
        for place in self
            .places
            .iter_mut()
            .take(first)
            .filter(|place| **place >= open)
        {
            *place = 0;
        }
        if let Some(places) = self.places.get_mut(used..) {
            for (place, next) in places.iter_mut().zip(self.order.iter().cycle()) {
                *place = *next;
            }
        }
        first
    }

    /// Number of places, counted from the first, that cover the held ones of `used` blocks.
    fn places_of(&self, used: usize) -> usize {
        let used = used.min(self.blocks);
        let places = self
            .places
            .get(used.saturating_sub(self.open())..used)
            .unwrap_or_default();
        places.iter().max().map_or(0, |place| place + 1)
    }

    /// As [`Self::places_of`], including parked sequences and copies.
    fn places_held(&self, used: usize) -> usize {
        let copies = self.copies.iter().flat_map(|(_, places)| places);
        let others = self.parked.iter().flatten().chain(copies).max();
        others
            .map_or(0, |place| place + 1)
            .max(self.places_of(used))
    }

    /// Number of usable places.
    fn open(&self) -> usize {
        self.blocks.min(self.most)
    }

    pub(super) const fn kind(&self) -> KvType {
        self.kind
    }

    pub(super) const fn blocks(&self) -> usize {
        self.blocks
    }

    /// Maximum number of places.
    pub(super) const fn most(&self) -> usize {
        self.most
    }

    /// Memory of blocks that only parked sequences use.
    pub(super) fn parked(&self) -> Bytes {
        self.bytes_of(self.kept).saturating_sub(self.copied())
    }

    /// Memory of all places, touched or not.
    pub(super) fn bytes(&self) -> Bytes {
        self.bytes_of(self.open())
    }

    /// Memory that was never touched, and is therefore not in memory.
    pub(super) fn untouched(&self) -> Bytes {
        self.bytes().saturating_sub(self.touched)
    }

    /// Memory that the kernel has populated.
    pub(super) fn resident(&self) -> Bytes {
        self.space.resident()
    }

    /// Returns the store as the operand of an operation on a parked sequence.
    pub(super) fn cells_of(&self, number: usize) -> Cells<'_> {
        let places = self.parked.get(number).map_or(&[][..], Vec::as_slice);
        Cells {
            places: places.into(),
            ..self.cells()
        }
    }

    /// Returns the store as the operand of an operation.
    pub(super) fn cells(&self) -> Cells<'_> {
        Cells {
            space: self.space.lend(),
            kind: self.kind,
            shape: self.shape,
            places: self.places.get(..self.blocks).unwrap_or_default().into(),
        }
    }

    fn bytes_of(&self, places: usize) -> Bytes {
        bytes_of(&self.shape, places, self.kind)
    }
}

fn bytes_of(shape: &KvShape, blocks: usize, kind: KvType) -> Bytes {
    shape.blocks_bytes(u32::try_from(blocks).unwrap_or(u32::MAX), kind)
}

/// Waits until nothing in flight uses the cache.
pub(super) fn settle(backend: &mut dyn Backend) -> Result<(), DeviceError> {
    let all = backend.mark();
    backend.wait(all)
}
