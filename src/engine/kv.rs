//! KV cache: one range of address space per kind of layer, with the leased part open.
//!
//! Capacity is leased, and populated as tokens arrive: growing touches no page, and shrinking returns whole pages, huge
//! ones where blocks are large. With [`Backing::Now`], growing populates every page. Leased but untouched memory goes
//! to no other program, since the ledger counts all of it.
//!
//! All blocks have one [`KvType`]. A conversion is done in place: rows that become smaller move towards the start, and
//! the free end is returned to the kernel.
//!
//! Layers with sliding windows keep only the last blocks of a sequence, in a range of their own ([decision
//! 0027](../../docs/decisions/0027-layers-with-windows-keep-the-last-blocks.md)).
//!
//! Copies of recurrent state and windows use free places of the same capacity.

mod store;

use std::{io, ops::Range};

use self::store::{CopyId, Store, settle};
pub use self::store::{KvError, Resized};
use super::{
    arena::Backing,
    backend::{Backend, Buffer, Cells, DeviceError, Operation, Span},
};
use cotenant_policy::{kv_type::KvType, residency::KvShape};
use cotenant_units::{Bytes, Tokens};

/// Keys and values of one sequence, of parked ones and of copies.
#[derive(Debug)]
pub struct KvCache {
    shape: KvShape,
    /// Layers that see all tokens.
    whole: Store,
    /// Windowed layers, which see the last tokens.
    windows: Option<Store>,
    /// Working area: one windowed layer of a lane, while it is computed.
    aside: Option<Store>,
    /// Number of blocks with reserved address space.
    blocks_max: usize,
}

impl KvCache {
    /// Creates a cache in `f16` without capacity, and reserves address space for `tokens_max` tokens.
    ///
    /// # Errors
    /// When address space cannot be reserved.
    pub fn new(
        backend: &dyn Backend,
        shape: KvShape,
        tokens_max: u32,
        backing: Backing,
    ) -> io::Result<Self> {
        let blocks_max = blocks_for(&shape, tokens_max);
        let store = |shape, most| Store::new(backend, shape, (blocks_max, most), backing);
        let some = |layers: Option<u32>| {
            let windows = shape.windows().map(|(shape, blocks)| {
                let attention_layers = layers.unwrap_or(shape.attention_layers);
                let shape = KvShape {
                    attention_layers,
                    ..shape
                };
                store(shape, blocks as usize)
            });
            windows.transpose()
        };
        Ok(Self {
            whole: store(shape.whole(), usize::MAX)?,
            windows: some(None)?,
            aside: some(Some(1))?,
            shape,
            blocks_max,
        })
    }

    /// Changes the capacity to `capacity` tokens, rounded up to whole blocks, at least `used` and at most the
    /// `tokens_max` of [`Self::new`].
    ///
    /// With [`Backing::OnTouch`], the pages of new blocks are populated as tokens arrive.
    ///
    /// # Errors
    /// When the kernel refuses, or has no memory for [`Backing::Now`]; the previous blocks stay.
    pub fn resize(
        &mut self,
        backend: &mut dyn Backend,
        capacity: Tokens,
        used: u32,
    ) -> Result<Resized, KvError> {
        let (wanted, used) = (
            self.blocks_wanted(capacity, used),
            blocks_for(&self.shape, used),
        );
        let before = self.whole.blocks();
        let resized = self.whole.resize(backend, wanted, used)?;
        let Some(windows) = &mut self.windows else {
            return Ok(resized);
        };
        match windows.resize(backend, wanted, used) {
            Ok(more) => Ok(resized.and(more)),
            Err(error) => {
                if wanted > before {
                    self.whole.resize(backend, before, used).ok();
                }
                Err(error)
            }
        }
    }

    /// Converts the first `used` tokens to `kind`; the capacity stays the same.
    ///
    /// Memory that a smaller type does not need is returned to the kernel, as is memory behind the used tokens. A
    /// larger type does not restore precision that was lost earlier.
    ///
    /// # Errors
    /// When the kernel refuses. Widening leaves everything unchanged then; narrowing is complete, but memory was not
    /// returned.
    pub fn convert(
        &mut self,
        backend: &mut dyn Backend,
        kind: KvType,
        used: u32,
    ) -> Result<Resized, KvError> {
        let (from, used) = (self.kind(), blocks_for(&self.shape, used));
        if kind > from {
            settle(backend)?;
            let mut stores: Vec<&mut Store> = std::iter::once(&mut self.whole)
                .chain(&mut self.windows)
                .chain(&mut self.aside)
                .collect();
            if let Err(error) = stores.iter_mut().try_for_each(|store| store.open_as(kind)) {
                for store in stores {
                    store.open_as(from).ok();
                }
                return Err(error);
            }
        }
        let converted = self.whole.convert(backend, kind, used);
        let windows = self
            .windows
            .as_mut()
            .map(|windows| windows.convert(backend, kind, used));
        if let Some(aside) = &mut self.aside {
            aside.convert(backend, kind, 0)?;
        }
        Ok(converted?.and(windows.transpose()?.unwrap_or_default()))
    }

    /// Records that the first `tokens` tokens are about to be populated.
    pub(super) fn touch(&mut self, tokens: u32) {
        let blocks = blocks_for(&self.shape, tokens);
        self.stores_mut().for_each(|store| store.touch(blocks));
    }

    /// Records that tokens before `end` are about to be written, which overwrites older blocks of windowed layers.
    pub(super) fn write_up_to(&mut self, end: u32) {
        let blocks = blocks_for(&self.shape, end);
        self.stores_mut()
            .for_each(|store| store.write_up_to(blocks));
    }

    /// Whether the windowed layers hold all written tokens from `first` on.
    pub(super) fn has_window_from(&self, first: u32) -> bool {
        let block = first / self.shape.block_tokens.get().max(1);
        self.windows
            .as_ref()
            .is_none_or(|windows| windows.holds_from(block as usize))
    }

    /// Whether there are windowed layers.
    pub(super) const fn has_windows(&self) -> bool {
        self.windows.is_some()
    }

    /// Copies the recurrent state and the `windows` tokens of windowed layers to free places after those of the first
    /// `used` tokens. Returns `None` if there are too few. With `goes_on`, the copy gets as many window blocks as the
    /// layers keep, so that it can be extended.
    pub(super) fn save(
        &mut self,
        backend: &mut dyn Backend,
        used: u32,
        state: Option<&Buffer>,
        (windows, goes_on): (Range<u32>, bool),
    ) -> Result<Option<Copy>, DeviceError> {
        let windows = match self.windows {
            Some(_) => self.block_of(windows.start)..blocks_for(&self.shape, windows.end),
            None => 0..0,
        };
        let mut slots = windows.len();
        if let Some(aside) = self.aside.as_mut().filter(|_| goes_on) {
            slots = aside.most();
            // Lease its memory from the start.
            if aside.blocks() == 0 && aside.resize(backend, self.blocks_max, 0).is_err() {
                return Ok(None);
            }
        }
        let bytes = self.copy_len(state, slots);
        let Some(id) = self.whole.take(blocks_for(&self.shape, used), bytes) else {
            return Ok(None);
        };
        let copy = Copy { id, windows, slots };
        for (from, to) in self.spans(&copy, state) {
            backend.queue(Operation::Move { from, to })?;
        }
        Ok(Some(copy))
    }

    /// Restores a copy: the sequence is as it was when the copy was made.
    pub(super) fn restore(
        &mut self,
        backend: &mut dyn Backend,
        copy: &Copy,
        state: Option<&Buffer>,
    ) -> Result<(), DeviceError> {
        if let Some(windows) = &mut self.windows {
            windows.begin_at(copy.windows.start, copy.windows.end);
        }
        for (to, from) in self.spans(copy, state) {
            backend.queue(Operation::Move { from, to })?;
        }
        Ok(())
    }

    /// Returns where `bytes` of a copy are stored, part by part.
    pub(super) fn parts_of(&self, copy: &Copy, bytes: Range<usize>) -> Vec<Span> {
        self.whole.parts(copy.id, bytes)
    }

    /// Capacity that copies take, in tokens.
    pub(super) fn tokens_of_copies<'a>(&self, copies: impl Iterator<Item = &'a Copy>) -> u32 {
        let places = copies.map(|copy| self.whole.copy_places(copy.id).len());
        self.tokens_of(places.sum()).get()
    }

    /// Capacity that an extensible copy takes, in tokens.
    pub(super) fn tokens_of_copy(&self, state: Option<&Buffer>) -> u32 {
        let slots = self.aside.as_ref().map_or(0, Store::most);
        let places = self.whole.places_for(self.copy_len(state, slots));
        self.tokens_of(places.unwrap_or(0)).get()
    }

    /// Records that a copy's conversation has grown to `tokens` tokens.
    pub(super) fn extend_copy(&self, copy: &mut Copy, tokens: u32) {
        let end = blocks_for(&self.shape, tokens).max(copy.windows.end);
        if self.has_windows() {
            copy.windows = copy.windows.start.max(end.saturating_sub(copy.slots))..end;
        }
    }

    /// Returns the stored blocks of a windowed layer in the window of a token at `position`, part by part, each with
    /// its target in the working area; with `is_written`, only the block of that token. `number` is the layer's index
    /// among the windowed layers.
    pub(super) fn window_of_copy(
        &self,
        (copy, state): (&Copy, Option<&Buffer>),
        number: usize,
        (position, is_written): (u32, bool),
    ) -> Vec<(Span, Span)> {
        let last = self.block_of(position);
        let first = copy
            .windows
            .start
            .max((last + 1).saturating_sub(copy.slots));
        let blocks = if is_written { last } else { first }..last + 1;
        let len = self.aside.as_ref().map_or(0, Store::block_len);
        let mut all = Vec::new();
        for index in blocks {
            let Some(Span::Region(space, block)) =
                self.aside.as_ref().and_then(|aside| aside.block(index))
            else {
                continue;
            };
            let start = self.copy_len(state, copy.slot(index)) + number * len;
            let mut at = block.start;
            for part in self.whole.parts(copy.id, start..start + len) {
                let bytes = at..at + part.len();
                at += part.len();
                all.push((part, Span::Region(space.lend(), bytes)));
            }
        }
        all
    }

    /// Returns the working area as the operand of an operation.
    pub(super) fn cells_aside(&self) -> Option<Cells<'_>> {
        self.aside.as_ref().map(Store::cells)
    }

    /// Memory of the working area.
    pub fn aside(&self) -> Bytes {
        self.aside.as_ref().map_or(Bytes::ZERO, Store::bytes)
    }

    /// Returns the contents of a copy and where they are stored, part by part.
    fn spans(&self, copy: &Copy, state: Option<&Buffer>) -> Vec<(Span, Span)> {
        let mut all = Vec::new();
        if let Some(state) = state {
            let mut at = 0;
            for part in self.whole.parts(copy.id, 0..state.bytes().as_len()) {
                let view = state.view_bytes(at, part.len());
                at += part.len();
                all.push((Span::Buffer(view), part));
            }
        }
        for index in copy.windows.clone() {
            let start = self.copy_len(state, copy.slot(index));
            let Some(Span::Region(space, block)) = self
                .windows
                .as_ref()
                .and_then(|windows| windows.block(index))
            else {
                continue;
            };
            let mut at = block.start;
            for part in self.whole.parts(copy.id, start..start + block.len()) {
                let bytes = at..at + part.len();
                at += part.len();
                all.push((Span::Region(space.lend(), bytes), part));
            }
        }
        all
    }

    fn copy_len(&self, state: Option<&Buffer>, windows: usize) -> usize {
        let block = self.windows.as_ref().map_or(0, Store::block_len);
        state.map_or(0, |state| state.bytes().as_len()) + windows * block
    }

    /// Whether a copy with a window of `window` tokens fits beside the first `used` tokens after all else is evicted.
    pub(super) fn may_save(&self, used: u32, state: Option<&Buffer>, window: u32) -> bool {
        let windows = blocks_for(&self.shape, window) + 1;
        let places = self.whole.places_for(self.copy_len(state, windows));
        places.is_some_and(|places| blocks_for(&self.shape, used) + places <= self.whole.blocks())
    }

    /// Places of a parked sequence.
    pub(super) fn parked_places(&self, number: usize) -> &[usize] {
        self.whole.parked_places(number)
    }

    /// Returns a copy's places, its blocks of windowed layers, and its number of slots for such blocks.
    pub(super) fn copy_places(&self, copy: &Copy) -> (&[usize], Range<usize>, usize) {
        let places = self.whole.copy_places(copy.id);
        (places, copy.windows.clone(), copy.slots)
    }

    /// Places of the first `tokens` tokens of the sequence.
    pub(super) fn own_places(&self, tokens: u32) -> &[usize] {
        self.whole.own_places(blocks_for(&self.shape, tokens))
    }

    /// Parks the first `blocks` blocks of parked sequence `number` as another sequence; none of `None`.
    pub(super) fn park_shared(&mut self, number: Option<usize>, blocks: usize) {
        self.whole.park_shared(number, blocks);
    }

    /// Takes free places after those of the first `used` tokens for a copy with these windows, whose contents follow.
    /// Returns `None` if there are too few, or if a copy takes another number of `places`.
    pub(super) fn place_copy(
        &mut self,
        used: u32,
        state: Option<&Buffer>,
        (windows, slots): (Range<usize>, usize),
        places: usize,
    ) -> Option<Copy> {
        let bytes = self.copy_len(state, slots);
        if self.whole.places_for(bytes)? != places {
            return None;
        }
        let id = self.whole.take(blocks_for(&self.shape, used), bytes)?;
        Some(Copy { id, windows, slots })
    }

    /// Waits until nothing in flight uses the cache.
    pub(super) fn settle(&self, backend: &mut dyn Backend) -> Result<(), DeviceError> {
        settle(backend)
    }

    /// Bytes at a place, once the cache is settled; `None` in device memory.
    pub(super) fn bytes_at(&self, place: usize) -> Option<&[u8]> {
        self.whole.bytes_at(place)
    }

    /// Mutable bytes at a place, as [`Self::bytes_at`].
    pub(super) fn bytes_at_mut(&mut self, place: usize) -> Option<&mut [u8]> {
        self.whole.bytes_at_mut(place)
    }

    /// Bytes per place.
    pub(super) fn place_len(&self) -> usize {
        self.whole.block_len()
    }

    /// Bytes per place of another type.
    pub(super) fn place_len_of(&self, kind: KvType) -> usize {
        self.whole.block_len_of(kind)
    }

    /// Drops all copies except `wanted`; their places are free after the next [cut](Self::cut).
    pub(super) fn keep_copies<'a>(&mut self, wanted: impl Iterator<Item = &'a Copy>) {
        let wanted: Vec<CopyId> = wanted.map(|copy| copy.id).collect();
        self.whole.keep_copies(|id| wanted.contains(&id));
    }

    /// Memory of all copies.
    pub fn copied(&self) -> Bytes {
        self.whole.copied()
    }

    /// Drops `count` blocks from block `first` on of those that hold `used` tokens; later blocks move up. Releases no
    /// memory.
    pub(super) fn drop_blocks(&mut self, first: usize, count: usize, used: u32) {
        let used = blocks_for(&self.shape, used);
        self.stores_mut()
            .for_each(|store| store.drop_blocks(first, count, used));
    }

    /// Parks the first `tokens` tokens as another sequence, after those already parked. Not for caches with windowed
    /// layers.
    pub(super) fn park(&mut self, tokens: u32) {
        self.whole.park(blocks_for(&self.shape, tokens));
    }

    /// Evicts a parked sequence.
    pub(super) fn forget(&mut self, number: usize) {
        self.whole.forget(number);
    }

    /// Extends a parked sequence to `tokens` tokens, beside the first `used` tokens of the current one; returns `false`
    /// if there are too few free places.
    pub(super) fn extend(&mut self, number: usize, tokens: u32, used: u32) -> bool {
        let [blocks, used] = [tokens, used].map(|tokens| blocks_for(&self.shape, tokens));
        self.whole.extend(number, blocks, used)
    }

    /// Capacity, in tokens, of the first `used` ones and of the selected parked sequences; shared blocks count once.
    pub(super) fn tokens_held(&self, used: u32, parked: impl Fn(usize) -> bool) -> u32 {
        let blocks = self.whole.blocks_of(blocks_for(&self.shape, used), parked);
        self.tokens_of(blocks).get()
    }

    /// For each parked sequence, the tokens in blocks of its own, and in blocks shared with others or with the first
    /// `used` tokens of the current sequence.
    pub(super) fn held(&self, used: u32) -> Vec<(Tokens, Tokens)> {
        let blocks = self.whole.held_by_each(blocks_for(&self.shape, used));
        let tokens = |(own, shared)| (self.tokens_of(own), self.tokens_of(shared));
        blocks.into_iter().map(tokens).collect()
    }

    /// Capacity that a copy takes, in tokens; 0 if it occurs more than once in `all`.
    pub(super) fn copy_tokens(&self, copy: &Copy, all: &[&Copy]) -> Tokens {
        let times = all.iter().filter(|other| other.id == copy.id).count();
        let places = if times > 1 {
            0
        } else {
            self.whole.copy_places(copy.id).len()
        };
        self.tokens_of(places)
    }

    /// Returns the cache as the operand of an operation on a parked sequence.
    pub(super) fn cells_of(&self, number: usize) -> Cells<'_> {
        self.whole.cells_of(number)
    }

    /// Makes the first `tokens` tokens of a parked sequence the current one.
    pub(super) fn take_up(&mut self, number: usize, tokens: u32) {
        self.whole.take_up(number, blocks_for(&self.shape, tokens));
    }

    /// Cuts the sequence to `tokens` tokens.
    pub(super) fn cut(&mut self, tokens: u32) {
        self.whole.cut(blocks_for(&self.shape, tokens));
    }

    /// Whether the sequence can grow to `tokens` tokens without evicting a parked one.
    pub(super) fn is_ready(&self, tokens: u32) -> bool {
        self.whole.is_ready(blocks_for(&self.shape, tokens))
    }

    /// Whether `used` tokens of the sequence and all parked ones fit into `capacity`.
    pub(super) fn fits(&mut self, capacity: Tokens, used: u32) -> bool {
        let blocks = self.blocks_wanted(capacity, used);
        self.whole.held(blocks_for(&self.shape, used)) <= blocks
    }

    /// Memory of blocks that only parked sequences use.
    pub fn parked(&self) -> Bytes {
        self.whole.parked()
    }

    /// Whether the last of `tokens` tokens is within a block that a parked sequence shares.
    pub(super) fn is_shared(&self, tokens: u32) -> bool {
        let block = self.shape.block_tokens.get().max(1);
        !tokens.is_multiple_of(block) && self.whole.is_shared((tokens / block) as usize)
    }

    /// Copies the block of the last of `tokens` tokens, before the sequence is written on (copy on write).
    pub(super) fn part(
        &mut self,
        backend: &mut dyn Backend,
        tokens: u32,
    ) -> Result<(), DeviceError> {
        let block = tokens / self.shape.block_tokens.get().max(1);
        self.whole.part(backend, block as usize)
    }

    /// Restores the order of blocks in an empty cache.
    pub(super) fn put_in_order(&mut self) {
        self.stores_mut().for_each(Store::put_in_order);
    }

    fn stores(&self) -> impl Iterator<Item = &Store> {
        std::iter::once(&self.whole).chain(&self.windows)
    }

    fn stores_mut(&mut self) -> impl Iterator<Item = &mut Store> {
        std::iter::once(&mut self.whole).chain(&mut self.windows)
    }

    /// KV type of all blocks.
    pub const fn kind(&self) -> KvType {
        self.whole.kind()
    }

    /// Capacity in tokens.
    pub fn capacity(&self) -> Tokens {
        self.tokens_of(self.whole.blocks())
    }

    /// Capacity of a plan of `capacity` tokens while `used` tokens are held.
    pub fn planned(&self, capacity: Tokens, used: u32) -> Tokens {
        self.tokens_of(self.blocks_wanted(capacity, used))
    }

    /// Leased memory: all blocks, touched or not.
    pub fn bytes(&self) -> Bytes {
        self.stores().map(Store::bytes).sum()
    }

    /// Leased memory that was never touched, and is therefore not in memory.
    pub fn untouched(&self) -> Bytes {
        self.stores().map(Store::untouched).sum()
    }

    /// Leased memory that the kernel has populated.
    pub fn resident(&self) -> Bytes {
        self.stores().map(Store::resident).sum()
    }

    /// Shape of the cache.
    pub const fn shape(&self) -> &KvShape {
        &self.shape
    }

    /// Returns the cache as the operand of a layer's operation.
    pub fn cells(&self, is_windowed: bool) -> Cells<'_> {
        self.windows
            .as_ref()
            .filter(|_| is_windowed)
            .unwrap_or(&self.whole)
            .cells()
    }

    /// Returns the block of a token.
    fn block_of(&self, token: u32) -> usize {
        (token / self.shape.block_tokens.get().max(1)) as usize
    }

    fn blocks_wanted(&self, capacity: Tokens, used: u32) -> usize {
        blocks_for(&self.shape, capacity.get().max(used)).min(self.blocks_max)
    }

    fn tokens_of(&self, blocks: usize) -> Tokens {
        let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
        Tokens::new(blocks.saturating_mul(self.shape.block_tokens.get()))
    }
}

/// Copy of the recurrent state and windows at one position of a sequence.
#[derive(Clone, Debug)]
pub struct Copy {
    id: CopyId,
    /// Its blocks of windowed layers.
    windows: Range<usize>,
    /// Number of its slots for such blocks, used as a ring.
    slots: usize,
}

impl Copy {
    /// Returns the slot of block `index`.
    fn slot(&self, index: usize) -> usize {
        index % self.slots.max(1)
    }
}

fn blocks_for(shape: &KvShape, tokens: u32) -> usize {
    if shape.block_tokens.get() == 0 {
        return 0;
    }
    tokens.div_ceil(shape.block_tokens.get()) as usize
}

/// Tokens per block: 64 keys of 128 elements are 16 KiB, which stays in the first-level cache while several query heads
/// read it.
pub const KV_BLOCK_TOKENS: Tokens = Tokens::new(64);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        arena::HUGE_PAGE,
        backend::{Part, cpu::Cpu, offset_in_block},
    };
    use cotenant_policy::residency::WindowedKv;
    use cotenant_units::page;

    fn shape(head_dim: u32, granule: Bytes) -> KvShape {
        KvShape {
            attention_layers: 3,
            kv_heads: 2,
            head_dim,
            element_bytes: 2,
            granule,
            block_tokens: KV_BLOCK_TOKENS,
            windowed: None,
        }
    }

    /// Returns the bytes of a block.
    fn block(cache: &mut KvCache, index: usize) -> Option<&mut [u8]> {
        block_of(cache, false, index)
    }

    fn block_of(cache: &mut KvCache, is_windowed: bool, index: usize) -> Option<&mut [u8]> {
        let cells = cache.cells(is_windowed);
        let len = cells.shape.block_bytes(cells.kind).as_len();
        let start = cells.space.range(*cells.places.get(index)? * len, len)?;
        // SAFETY: open, and the cache is borrowed.
        Some(unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), len) })
    }

    #[test]
    fn capacity_becomes_memory_when_it_is_used_and_goes_back_to_the_kernel() {
        // Blocks of 96 KiB and of 768 KiB: the latter in huge pages, of which 2 2/3 blocks fill one.
        for shape in [shape(64, page()), shape(512, HUGE_PAGE)] {
            let mut backend = Cpu::new(1).unwrap();
            let mut cache = KvCache::new(&backend, shape, 4096, Backing::OnTouch).unwrap();
            let resized = cache.resize(&mut backend, Tokens::new(1000), 0).unwrap();
            assert_eq!(cache.capacity(), Tokens::new(1024));
            assert_eq!(
                resized.grown,
                shape.capacity_bytes(Tokens::new(1024), KvType::F16)
            );
            assert_eq!(
                (cache.untouched(), cache.resident()),
                (cache.bytes(), Bytes::ZERO)
            );

            for index in 0..8 {
                cache.touch(u32::try_from(index * 64 + 1).unwrap());
                block(&mut cache, index).unwrap().fill(7);
            }
            let touched = shape.capacity_bytes(Tokens::new(512), KvType::F16);
            assert_eq!(cache.untouched(), cache.bytes() - touched);
            assert!(
                cache.resident() <= touched
                    && cache.resident() >= shape.block_bytes(KvType::F16).saturating_mul(8)
            );

            let untouched = cache.untouched();
            let resized = cache.resize(&mut backend, Tokens::ZERO, 65).unwrap();
            assert_eq!(
                cache.capacity(),
                Tokens::new(128),
                "two blocks hold 65 tokens"
            );
            let kept = shape.capacity_bytes(Tokens::new(128), KvType::F16);
            assert_eq!(
                resized.asked,
                shape.capacity_bytes(Tokens::new(1024), KvType::F16) - kept
            );
            assert_eq!(resized.asked, resized.freed + untouched);
            assert_eq!((cache.untouched(), cache.resident()), (Bytes::ZERO, kept));
            assert_eq!(block(&mut cache, 1).unwrap()[0], 7);
            assert!(block(&mut cache, 2).is_none());
        }
    }

    #[test]
    fn capacity_that_is_memory_at_once_is_all_there_and_all_freed() {
        for shape in [shape(64, page()), shape(512, HUGE_PAGE)] {
            let mut backend = Cpu::new(1).unwrap();
            let mut cache = KvCache::new(&backend, shape, 4096, Backing::Now).unwrap();
            cache.resize(&mut backend, Tokens::new(512), 0).unwrap();
            block(&mut cache, 7).unwrap().fill(9);
            cache.resize(&mut backend, Tokens::new(1024), 512).unwrap();
            assert!(cache.resident() >= shape.capacity_bytes(Tokens::new(1024), KvType::F16));
            assert_eq!(cache.untouched(), Bytes::ZERO);
            assert_eq!(
                block(&mut cache, 7).unwrap()[0],
                9,
                "what is used is left alone"
            );

            let before = cache.resident();
            let resized = cache.resize(&mut backend, Tokens::new(128), 65).unwrap();
            assert_eq!(resized.freed, before - cache.resident());
            assert!(
                resized.freed >= resized.asked.saturating_sub(HUGE_PAGE),
                "{resized:?}"
            );

            let (before, held) = (cache.resident(), cache.bytes());
            let moved = cache.convert(&mut backend, KvType::Q8, 65).unwrap();
            assert_eq!(moved.freed, before - cache.resident());
            assert!(moved.asked == held - cache.bytes() && cache.untouched() == Bytes::ZERO);
            cache.convert(&mut backend, KvType::F16, 65).unwrap();
            assert!(cache.untouched() == Bytes::ZERO && cache.resident() >= held);
        }
    }

    #[test]
    fn a_smaller_type_gives_pages_back_at_once_and_a_larger_one_touches_what_is_used() {
        for (shape, granule) in [
            (shape(64, page()), page()),
            (shape(512, HUGE_PAGE), HUGE_PAGE),
        ] {
            let mut backend = Cpu::new(2).unwrap();
            let mut cache = KvCache::new(&backend, shape, 4096, Backing::OnTouch).unwrap();
            cache.resize(&mut backend, Tokens::new(1024), 0).unwrap();
            cache.touch(700);
            for index in 0..11 {
                block(&mut cache, index).unwrap().fill(0x3c);
            }
            let first = block(&mut cache, 0).unwrap()[..2].to_vec();
            let mut held = cache.bytes();
            for (kind, used) in [
                (KvType::Q8, 500u32),
                (KvType::Q4, 450),
                (KvType::Q8, 450),
                (KvType::F16, 450),
            ] {
                let (resident, untouched) = (cache.resident(), cache.untouched());
                let moved = cache.convert(&mut backend, kind, used).unwrap();
                assert_eq!((cache.kind(), cache.capacity()), (kind, Tokens::new(1024)));
                assert_eq!(cache.bytes(), shape.capacity_bytes(Tokens::new(1024), kind));
                assert_eq!(
                    (moved.asked, moved.grown),
                    (
                        held.saturating_sub(cache.bytes()),
                        cache.bytes().saturating_sub(held)
                    )
                );
                assert_eq!(
                    cache.bytes() - cache.untouched(),
                    shape.capacity_bytes(Tokens::new(used.next_multiple_of(64)), kind)
                );
                assert!(cache.resident() <= cache.bytes() - cache.untouched());
                if moved.asked > Bytes::ZERO {
                    assert_eq!(
                        moved.freed,
                        resident - cache.resident(),
                        "the kernel's own count"
                    );
                    assert!(moved.asked + cache.untouched() >= moved.freed + untouched);
                    assert!(moved.asked + cache.untouched() <= moved.freed + untouched + granule);
                }
                held = cache.bytes();
            }
            // One value in each group of 32 is exact in any type, and all are equal here.
            assert_eq!(block(&mut cache, 6).unwrap()[..2], first);
        }
    }

    #[test]
    fn layers_with_windows_keep_so_many_blocks_and_their_places_come_round() {
        let shape = KvShape {
            windowed: Some(WindowedKv {
                layers: 2,
                blocks: 5,
                heads: None,
            }),
            ..shape(64, page())
        };
        let (kind, mut backend) = (KvType::F16, Cpu::new(1).unwrap());
        let mut cache = KvCache::new(&backend, shape, 4096, Backing::OnTouch).unwrap();
        let places = |cache: &KvCache| cache.cells(true).places.to_vec();
        let bytes = |blocks: u64, windows: u64| Bytes::from_kib(32 * blocks + 64 * windows);
        for (capacity, expected) in [
            (256, bytes(4, 4)),
            (320, bytes(5, 5)),
            (1024, bytes(16, 5)),
            (4096, bytes(64, 5)),
        ] {
            cache
                .resize(&mut backend, Tokens::new(capacity), 0)
                .unwrap();
            assert_eq!(
                (
                    cache.bytes(),
                    shape.capacity_bytes(Tokens::new(capacity), kind)
                ),
                (expected, expected)
            );
        }
        cache.resize(&mut backend, Tokens::new(1024), 0).unwrap();
        assert_eq!(places(&cache)[..12], [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]);
        assert_eq!(
            cache.cells(false).places[..12],
            (0..12).collect::<Vec<_>>()[..]
        );

        // Seven blocks: the first two are lost.
        for index in 0..7 {
            cache.touch(64 * (u32::try_from(index).unwrap() + 1));
            cache.write_up_to(64 * (u32::try_from(index).unwrap() + 1));
            block_of(&mut cache, true, index)
                .unwrap()
                .fill(u8::try_from(index).unwrap());
            block(&mut cache, index).unwrap().fill(7);
        }
        assert_eq!(
            (cache.has_window_from(127), cache.has_window_from(128)),
            (false, true)
        );
        assert_eq!(cache.untouched(), bytes(9, 0));
        assert_eq!(cache.resident(), bytes(7, 5));

        // Block 3 is dropped: its place is reused first, and then those of the oldest blocks.
        cache.drop_blocks(3, 1, 7 * 64);
        assert_eq!(places(&cache)[2..12], [2, 4, 0, 1, 3, 2, 4, 0, 1, 3]);
        assert_eq!(
            (cache.has_window_from(127), cache.has_window_from(128)),
            (false, true)
        );
        let firsts = |cache: &mut KvCache, blocks: Range<usize>| {
            blocks
                .map(|index| block_of(cache, true, index).unwrap()[0])
                .collect::<Vec<_>>()
        };
        assert_eq!(firsts(&mut cache, 2..6), [2, 4, 5, 6]);

        // Fewer blocks than the windows keep: those behind the end move to free places.
        cache.drop_blocks(2, 1, 6 * 64);
        cache.drop_blocks(0, 2, 5 * 64);
        let resized = cache
            .resize(&mut backend, Tokens::new(192), 3 * 64)
            .unwrap();
        assert_eq!(resized.asked, bytes(13, 2));
        assert_eq!(firsts(&mut cache, 0..3), [4, 5, 6]);
        assert!(cache.has_window_from(0));
        cache.convert(&mut backend, KvType::Q8, 3 * 64).unwrap();
        assert_eq!(
            cache.bytes(),
            shape.capacity_bytes(Tokens::new(192), KvType::Q8)
        );
        cache.put_in_order();
        assert_eq!(places(&cache), [0, 1, 2]);
    }

    #[test]
    fn no_capacity_is_beyond_what_the_model_was_made_for() {
        let mut backend = Cpu::new(1).unwrap();
        let mut cache = KvCache::new(&backend, shape(64, page()), 200, Backing::OnTouch).unwrap();
        cache.resize(&mut backend, Tokens::new(100_000), 0).unwrap();
        assert_eq!(cache.capacity(), Tokens::new(256));
        assert_eq!(cache.planned(Tokens::new(100_000), 0), Tokens::new(256));
    }

    #[test]
    fn rows_of_a_block_do_not_overlap() {
        let shape = shape(16, Bytes::ZERO);
        let mut starts: Vec<usize> = Vec::new();
        for layer in 0..3 {
            for part in [Part::Key, Part::Value] {
                for head in 0..2 {
                    starts.push(offset_in_block(&shape, KvType::F16, layer, part, head));
                }
            }
        }
        let row = 64 * 16 * 2;
        let expected: Vec<usize> = (0..12).map(|index| index * row).collect();
        assert_eq!(starts, expected);
        assert_eq!(shape.block_bytes(KvType::F16), Bytes::of_len(12 * row));
    }
}
