//! Blocks of the layers of one kind: all of a sequence, or its last ones.
//!
//! Blocks follow one another in a sequence by a table, which says where each lies. So the oldest can be dropped without
//! moving any other: its place becomes that of a block to come. Only where the place of a block that stays is given back
//! to the kernel is it copied to one that is free.
//!
//! A store with fewer places than the sequence has blocks keeps the last ones: each block to come takes the place of the
//! oldest that is left.

use std::{io, ops::Range};

use crate::{
    arena::Backing,
    backend::{Backend, Cells, Convert, DeviceError, Operation, Region},
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

/// Blocks of a store as they were.
#[derive(Debug)]
pub struct Copied {
    /// Which of its sequence.
    blocks: Range<usize>,
    /// Bytes of one.
    len: usize,
    space: Region,
    bytes: Bytes,
}

impl Copied {
    /// Memory of the copy.
    pub(crate) const fn bytes(&self) -> Bytes {
        self.bytes
    }

    /// How much of it the kernel has in memory.
    pub(crate) fn resident(&self) -> Bytes {
        self.space.resident()
    }

    /// Gives it up, once nothing in flight uses it; returns what the kernel had of it.
    pub(crate) fn release(mut self) -> Bytes {
        self.space.set_open(Bytes::ZERO).unwrap_or(Bytes::ZERO)
    }
}

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

    /// Keeps everything as `kind`, `used` blocks converted.
    pub(super) fn convert(
        &mut self,
        backend: &mut dyn Backend,
        kind: KvType,
        used: usize,
    ) -> Result<Resized, KvError> {
        settle(backend)?;
        let (from, before, resident) = (self.kind, self.bytes(), self.resident());
        let places = self.places_of(used);
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

    /// Copies some blocks into memory of their own; nothing where there is none.
    pub(super) fn copy(
        &self,
        backend: &mut dyn Backend,
        blocks: Range<usize>,
    ) -> Result<Option<Copied>, DeviceError> {
        let len = self.shape.block_bytes(self.kind).as_len();
        let bytes = Bytes::of_len(blocks.len() * len).round_up(page());
        let Ok(mut space) = backend.reserve(bytes, page()) else {
            return Ok(None);
        };
        if space.set_open(bytes).is_err() {
            return Ok(None);
        }
        let places = self.places.get(blocks.clone()).unwrap_or_default();
        for (place, at) in places.iter().zip((0..).step_by(len.max(1))) {
            let (from, to) = ((self.space.lend(), place * len), (space.lend(), at));
            backend.queue(Operation::Move { from, to, len })?;
        }
        Ok(Some(Copied {
            blocks,
            len,
            space,
            bytes,
        }))
    }

    /// Puts a copy back, which was taken in the type in force: nothing before it is there any more.
    pub(super) fn restore(
        &mut self,
        backend: &mut dyn Backend,
        copied: &Copied,
    ) -> Result<(), DeviceError> {
        let len = copied.len;
        // With nothing held, so that each block has a place of its own whatever has come and gone meanwhile.
        self.first = copied.blocks.start;
        self.lay_out(copied.blocks.start, self.open());
        self.touch(copied.blocks.end);
        let places = self.places.get(copied.blocks.clone()).unwrap_or_default();
        for (place, at) in places.iter().zip((0..).step_by(len.max(1))) {
            let (from, to) = ((copied.space.lend(), at), (self.space.lend(), place * len));
            backend.queue(Operation::Move { from, to, len })?;
        }
        Ok(())
    }

    /// Bytes of a copy of so many blocks.
    pub(super) fn copy_bytes(&self, blocks: usize) -> Bytes {
        Bytes::of_len(blocks * self.shape.block_bytes(self.kind).as_len()).round_up(page())
    }

    /// Gives back what is in memory behind the first `used` blocks; the capacity stays as it is. Nothing where all of it is
    /// had as memory.
    pub(super) fn give_back_behind(
        &mut self,
        backend: &mut dyn Backend,
        used: usize,
    ) -> Result<(), DeviceError> {
        let (kept, all) = (self.bytes_of(self.places_of(used)), self.bytes());
        if self.backing == Backing::Now || self.touched <= kept {
            return Ok(());
        }
        settle(backend)?;
        // What the kernel does not take back stays touched.
        if self.space.set_open(kept).is_ok() {
            self.touched = kept;
        }
        self.space
            .set_open(all)
            .map(drop)
            .map_err(|error| DeviceError::new(format!("cannot open the KV cache: {error}")))
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

    /// Copies what lies at place `end` or behind it, and belongs to the first `used` blocks, to free places before it.
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
        let len = self.shape.block_bytes(self.kind).as_len();
        let mut free = used;
        for block in first..used {
            let (Some(&from), Some(&to)) = (self.places.get(block), self.places.get(free)) else {
                break;
            };
            if from < end {
                continue;
            }
            let (from, to) = (
                (self.space.lend(), from * len),
                (self.space.lend(), to * len),
            );
            backend.queue(Operation::Move { from, to, len })?;
            self.places.swap(block, free);
            free += 1;
        }
        self.lay_out(used, end);
        self.touched = self.touched.max(self.bytes_of(self.places_of(used)));
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
        self.order.clear();
        let free = self
            .is_taken
            .iter()
            .take(open)
            .enumerate()
            .filter(|(_, is_taken)| !**is_taken);
        self.order.extend(free.map(|(place, _)| place));
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
