//! Blocks of the layers of one kind: all of a sequence, or its last ones.
//!
//! Blocks follow one another in a sequence by a table, which says where each lies. So the oldest can be dropped without
//! moving any other: its place becomes that of a block to come. Only where the place of a block that stays is given back
//! to the kernel is it copied to one that is free.
//!
//! A store with fewer places than the sequence has blocks keeps the last ones: each block to come takes the place of the
//! oldest that is left.
//!
//! Beside the sequence that is computed others may be parked. Sequences with the same tokens at the beginning have their
//! blocks there at the same places; none of these is written to. A place may also hold bytes that are no block: copies of what
//! a sequence cannot be cut back without.

use std::{collections::BTreeSet, io, ops::Range};

use crate::{
    arena::Backing,
    backend::{Backend, Cells, Convert, DeviceError, Operation, Region, Span},
};
use cotenant_policy::{kv_type::KvType, residency::KvShape};
use cotenant_units::{Bytes, page};

/// Keys and values of some layers.
///
/// A block holds [`KvShape::block_tokens`] tokens of each of them, as `[layer][key, value][head][token][element]`, so that
/// one head's keys of a block are contiguous.
#[derive(Debug)]
pub(super) struct Store {
    /// Of its layers alone.
    shape: KvShape,
    kind: KvType,
    space: Region,
    /// Blocks that a sequence may have.
    blocks: usize,
    /// Places that there are at most.
    most: usize,
    /// The place of each block that a sequence can have, counted in blocks. Those to come have the free places first, and
    /// then those of the oldest.
    places: Vec<usize>,
    /// The first block whose place has not become that of another.
    first: usize,
    /// The places of the blocks of each sequence that is parked.
    parked: Vec<Vec<usize>>,
    /// The places of each copy.
    copies: Vec<(CopyId, Vec<usize>)>,
    /// The number of the last copy.
    last_copy: u64,
    /// Blocks that the sequence may come to at free places.
    ready: usize,
    /// Places of copies, and of sequences that are parked only.
    kept: usize,
    /// Memory from the start that was used since what is behind it was given up; all of it where it is had as memory.
    touched: Bytes,
    backing: Backing,
    /// Which places blocks have, and in which order others take them: allocated once, as both are worked out during sheds.
    is_taken: Vec<bool>,
    order: Vec<usize>,
}

/// What a change of capacity did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resized {
    /// Bytes of blocks that were given up.
    pub asked: Bytes,
    /// Bytes of these that the kernel had in memory.
    pub freed: Bytes,
    /// Bytes of new blocks, none of them touched.
    pub grown: Bytes,
}

/// Why a cache could not be changed.
#[derive(Debug, thiserror::Error)]
pub enum KvError {
    /// The device has failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// There is no memory, or the kernel refuses.
    #[error(transparent)]
    Memory(#[from] io::Error),
}

impl Resized {
    /// Both together.
    pub(super) fn and(self, other: Self) -> Self {
        Self {
            asked: self.asked + other.asked,
            freed: self.freed + other.freed,
            grown: self.grown + other.grown,
        }
    }
}

/// Names bytes that places of a store hold instead of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CopyId(u64);

impl Store {
    /// A store in `f16` without capacity, for sequences of so many blocks, of which it keeps at most the last `most`.
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

    /// Changes the blocks that a sequence may have, which are no fewer than it has `used`.
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

    /// Opens what everything takes as `kind`, before it is converted to that: for a larger type.
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

    /// Keeps everything as `kind`, `used` blocks converted. Copies, which are not of that type, are given up.
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
            // Places behind the last token of the last block may have been touched by it.
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

    /// Notes that the first `blocks` blocks are about to be in memory.
    pub(super) fn touch(&mut self, blocks: usize) {
        self.touched = self.touched.max(self.bytes_of(self.places_of(blocks)));
    }

    /// Notes that blocks up to number `end` are about to be written: what lay at their places is lost.
    pub(super) fn write_up_to(&mut self, end: usize) {
        self.first = self.first.max(end.saturating_sub(self.open()));
    }

    /// Whether all blocks from `first` on are there that have been written.
    pub(super) const fn holds_from(&self, first: usize) -> bool {
        first >= self.first
    }

    /// Takes places for so many bytes that are no blocks, behind those of the first `used` blocks; `None` where not so many
    /// are free.
    pub(super) fn take(&mut self, used: usize, bytes: usize) -> Option<CopyId> {
        let count = self.places_for(bytes)?;
        let (places, len) = (self.next_places(used, count)?, self.block_len());
        // The last place is written in part.
        let ends = (0..).step_by(len).zip(&places);
        let end = ends.map(|(start, place)| place * len + len.min(bytes - start));
        self.touch_up_to(Bytes::of_len(end.max().unwrap_or(0)).round_up(page()));
        self.last_copy += 1;
        let id = CopyId(self.last_copy);
        self.copies.push((id, places));
        self.cut(used);
        Some(id)
    }

    /// A sequence that is parked comes to so many blocks, at places behind those of the first `used` blocks; `false` where not
    /// so many are free.
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

    /// The next free places behind those of the first `used` blocks.
    fn next_places(&self, used: usize, count: usize) -> Option<Vec<usize>> {
        let places = self.places.get(used..used + count)?;
        self.is_ready(used + count).then(|| places.to_vec())
    }

    /// Notes that so much from the start is about to be memory.
    fn touch_up_to(&mut self, bytes: Bytes) {
        self.touched = self.touched.max(bytes.min(self.bytes()));
    }

    /// Blocks of the first `used` ones, and of these of the sequences that are parked, each once.
    pub(super) fn blocks_of(&self, used: usize, parked: impl Fn(usize) -> bool) -> usize {
        let own = self.places.get(..used).unwrap_or_default();
        let numbered = self.parked.iter().enumerate();
        let others = numbered.filter(|(number, _)| parked(*number));
        let all = own.iter().chain(others.flat_map(|(_, places)| places));
        all.collect::<BTreeSet<_>>().len()
    }

    /// Of each sequence that is parked, the blocks that only it has, and those that others have as well, or the first `used` ones.
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

    /// How many places so many bytes take; `None` for a store that holds nothing.
    pub(super) fn places_for(&self, bytes: usize) -> Option<usize> {
        let len = self.block_len();
        (len > 0).then(|| bytes.div_ceil(len))
    }

    /// Where the `bytes` of a copy lie: a part at each place. Nothing of a copy that is not there.
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

    /// The memory of block `index`, as a part of a copy.
    pub(super) fn block(&self, index: usize) -> Option<Span> {
        let (place, len) = (self.places.get(index)?, self.block_len());
        Some(Span::Region(
            self.space.lend(),
            place * len..(place + 1) * len,
        ))
    }

    /// The places of a sequence that is parked.
    pub(super) fn parked_places(&self, number: usize) -> &[usize] {
        self.parked.get(number).map_or(&[][..], Vec::as_slice)
    }

    /// The places of a copy.
    pub(super) fn copy_places(&self, id: CopyId) -> &[usize] {
        let copy = self.copies.iter().find(|(other, _)| *other == id);
        copy.map_or(&[][..], |(_, places)| places)
    }

    /// Takes over parked sequences and copies by their places, in a store that has none; returns the names of the copies.
    pub(super) fn take_over(
        &mut self,
        parked: Vec<Vec<usize>>,
        copies: Vec<Vec<usize>>,
    ) -> Vec<CopyId> {
        self.parked = parked;
        let first = self.last_copy + 1;
        self.copies = (first..).map(CopyId).zip(copies).collect();
        self.last_copy += self.copies.len() as u64;
        self.cut(0);
        self.copies.iter().map(|(id, _)| *id).collect()
    }

    /// Notes that the first places are about to be in memory.
    pub(super) fn touch_places(&mut self, count: usize) {
        self.touch_up_to(self.bytes_of(count).round_up(page()));
    }

    /// What the host has at a place; `None` in memory of a device. Nothing that is queued may use it.
    pub(super) fn bytes_at(&self, place: usize) -> Option<&[u8]> {
        let len = self.block_len();
        let start = self.space.range(place * len, len)?;
        // SAFETY: the range is open memory of that length; only operations write to it, none of which is in flight.
        Some(unsafe { std::slice::from_raw_parts(start.as_ptr(), len) })
    }

    /// The same, to be written.
    pub(super) fn bytes_at_mut(&mut self, place: usize) -> Option<&mut [u8]> {
        let len = self.block_len();
        let start = self.space.range(place * len, len)?;
        // SAFETY: as above, and the store is borrowed exclusively.
        Some(unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), len) })
    }

    /// Keeps the copies that are wanted.
    pub(super) fn keep_copies(&mut self, is_wanted: impl Fn(CopyId) -> bool) {
        self.copies.retain(|(id, _)| is_wanted(*id));
    }

    /// Memory of all copies.
    pub(super) fn copied(&self) -> Bytes {
        self.bytes_of(self.copies.iter().map(|(_, places)| places.len()).sum())
    }

    /// The sequence has nothing before block `start` any more, and places of their own for those up to `end`, which are about to
    /// be written.
    pub(super) fn begin_at(&mut self, start: usize, end: usize) {
        self.first = start;
        self.cut(start);
        self.touch(end);
    }

    /// Bytes of a block.
    pub(super) fn block_len(&self) -> usize {
        self.shape.block_bytes(self.kind).as_len()
    }

    /// Parks the first `used` blocks as those of another sequence, behind those that are parked already.
    pub(super) fn park(&mut self, used: usize) {
        let places = self.places.get(..used).unwrap_or_default();
        self.parked.push(places.to_vec());
    }

    /// Gives up a sequence that is parked.
    pub(super) fn forget(&mut self, number: usize) {
        if number < self.parked.len() {
            self.parked.remove(number);
        }
    }

    /// The sequence becomes one of so many blocks that are parked with another.
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

    /// The sequence ends behind so many blocks: others come next.
    pub(super) fn cut(&mut self, used: usize) {
        self.lay_out(used, self.open());
    }

    /// Whether the sequence may come to so many blocks without any that is parked being given up.
    pub(super) const fn is_ready(&self, blocks: usize) -> bool {
        blocks <= self.ready
    }

    /// Blocks of the first `used` ones and of all that are parked, each once.
    pub(super) fn held(&mut self, used: usize) -> usize {
        self.lay_out(used, self.open());
        self.open().saturating_sub(self.ready.saturating_sub(used))
    }

    /// Whether block `index` is one of a sequence that is parked as well.
    pub(super) fn is_shared(&self, index: usize) -> bool {
        let place = self.places.get(index);
        place.is_some_and(|place| self.parked.iter().flatten().any(|other| other == place))
    }

    /// Copies block `index`, which is the last one of the sequence, to a free place, which there has to be.
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

    /// Drops `count` blocks from block `first` on of `used`: those behind move up. No memory is given back by it.
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

    /// Blocks lie one after the other again, as nothing is held in them.
    pub(super) fn put_in_order(&mut self) {
        self.first = 0;
        self.lay_out(0, self.open());
    }

    /// Copies what lies at place `end` or behind it, and belongs to the first `used` blocks, to a sequence that is parked or
    /// to a copy, to free places before it.
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
        // Where each place from `end` on has moved to.
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

    /// Says where the blocks behind the first `used` will lie, with so many places open: what comes next as far to the front
    /// as it can, and once no place is free where the oldest lies. Returns the first block that is there.
    fn lay_out(&mut self, used: usize, open: usize) -> usize {
        self.is_taken.fill(false);
        let mut first = used;
        while first > self.first
            && let Some(is_taken) = self.places.get(first - 1).and_then(|place| self.is_taken.get_mut(*place))
            // A block before one that has its place is not there any more.
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
        // What is not there any more lies nowhere, and no place that is closed.
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

    /// Places from the first one on that have to be there for the last of `used` blocks.
    fn places_of(&self, used: usize) -> usize {
        let used = used.min(self.blocks);
        let places = self
            .places
            .get(used.saturating_sub(self.open())..used)
            .unwrap_or_default();
        places.iter().max().map_or(0, |place| place + 1)
    }

    /// As [`Self::places_of`], for sequences that are parked and for copies as well.
    fn places_held(&self, used: usize) -> usize {
        let copies = self.copies.iter().flat_map(|(_, places)| places);
        let others = self.parked.iter().flatten().chain(copies).max();
        others
            .map_or(0, |place| place + 1)
            .max(self.places_of(used))
    }

    /// Places that may be used.
    fn open(&self) -> usize {
        self.blocks.min(self.most)
    }

    pub(super) const fn kind(&self) -> KvType {
        self.kind
    }

    pub(super) const fn blocks(&self) -> usize {
        self.blocks
    }

    /// Places that there are at most.
    pub(super) const fn most(&self) -> usize {
        self.most
    }

    /// Memory of the blocks that belong to sequences that are parked only.
    pub(super) fn parked(&self) -> Bytes {
        self.bytes_of(self.kept).saturating_sub(self.copied())
    }

    /// Memory of all places, touched or not.
    pub(super) fn bytes(&self) -> Bytes {
        self.bytes_of(self.open())
    }

    /// How much of it has not been touched since it was had, and is therefore not in memory.
    pub(super) fn untouched(&self) -> Bytes {
        self.bytes().saturating_sub(self.touched)
    }

    /// How much of it the kernel has in memory.
    pub(super) fn resident(&self) -> Bytes {
        self.space.resident()
    }

    /// The store for an operation on a sequence that is parked.
    pub(super) fn cells_of(&self, number: usize) -> Cells<'_> {
        let places = self.parked.get(number).map_or(&[][..], Vec::as_slice);
        Cells {
            places: places.into(),
            ..self.cells()
        }
    }

    /// The store for an operation.
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
