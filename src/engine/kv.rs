//! KV cache in one range of address space, of which the leased part is open.
//!
//! Capacity is leased, and becomes memory as tokens arrive: growing touches nothing, and shrinking gives back whole
//! pages, huge ones where blocks are large. Where it is to be memory at once, growing touches all of it. Between what is leased and what is touched no other program gets it, for the
//! book holds all of it.
//!
//! All blocks are kept in one [`KvType`]. Another one is put into force where they lie: rows that become smaller move
//! towards the start and leave an end behind that goes back to the kernel.
//!
//! Blocks follow one another in a sequence by a table, which says where each lies. So the oldest can be dropped without
//! moving any other: its place becomes that of a block to come. Only where the place of a block that stays is given back
//! to the kernel is it copied to one that is free.

use std::io;

use super::{
    arena::Backing,
    backend::{Backend, Cells, Convert, DeviceError, Operation, Region},
};
use crate::{
    policy::{kv_type::KvType, residency::KvShape},
    units::{Bytes, Tokens},
};

/// Keys and values of one sequence.
///
/// A block holds [`KvShape::block_tokens`] tokens of every attention layer, as
/// `[layer][key, value][head][token][element]`, so that one head's keys of a block are contiguous.
#[derive(Debug)]
pub struct KvCache {
    shape: KvShape,
    kind: KvType,
    space: Region,
    /// Blocks that may be used.
    blocks: usize,
    /// Blocks that there is address space for.
    blocks_max: usize,
    /// Where each block lies, counted in blocks: those that may be used lie at the first places, in any order.
    places: Vec<usize>,
    /// Memory from the start that was used since what is behind it was given up; all of it where it is had as memory.
    touched: Bytes,
    backing: Backing,
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

impl KvCache {
    /// A cache in `f16` without capacity, and with address space for `tokens_max` tokens.
    ///
    /// # Errors
    /// When there is no address space.
    pub fn new(backend: &dyn Backend, shape: KvShape, tokens_max: u32, backing: Backing) -> io::Result<Self> {
        let blocks_max = blocks_for(&shape, tokens_max);
        let space = backend.reserve(bytes_of(&shape, blocks_max, KvType::F16), shape.granule)?;
        Ok(Self {
            backing: if space.is_memory_at_once() { Backing::Now } else { backing },
            space,
            shape,
            kind: KvType::F16,
            blocks: 0,
            blocks_max,
            places: (0..blocks_max).collect(),
            touched: Bytes::ZERO,
        })
    }

    /// Changes the capacity to `capacity` tokens, rounded up to whole blocks, not below `used` and not above what the
    /// model was made for.
    ///
    /// With [`Backing::OnTouch`] new blocks are not memory yet: the kernel finds pages when tokens come.
    ///
    /// # Errors
    /// When the kernel refuses, or has no memory for blocks that are to be memory at once; the blocks that were had stay.
    pub fn resize(&mut self, backend: &mut dyn Backend, capacity: Tokens, used: u32) -> Result<Resized, KvError> {
        let wanted = self.blocks_wanted(capacity, used);
        self.clear_behind(backend, wanted, used)?;
        settle(backend)?;
        let before = self.bytes();
        let freed = self.space.set_open(self.bytes_of(wanted))?;
        if self.backing == Backing::Now
            && let Err(error) = self.space.populate_from(before)
        {
            self.space.set_open(before).ok();
            return Err(error.into());
        }
        self.blocks = wanted;
        self.touched = match self.backing {
            Backing::Now => self.bytes(),
            Backing::OnTouch => self.touched.min(self.bytes()),
        };
        Ok(Resized { asked: before.saturating_sub(self.bytes()), freed, grown: self.bytes().saturating_sub(before) })
    }

    /// Keeps everything as `kind`, the first `used` tokens converted; the capacity stays as it is.
    ///
    /// What the smaller type does not need goes back to the kernel, as does what was left behind the used tokens. The
    /// larger type does not restore precision that was lost earlier.
    ///
    /// # Errors
    /// When the kernel refuses. Going up, everything is as it was then; going down, only memory has not come back.
    pub fn convert(&mut self, backend: &mut dyn Backend, kind: KvType, used: u32) -> Result<Resized, KvError> {
        settle(backend)?;
        let (from, before, resident) = (self.kind, self.bytes(), self.resident());
        let blocks = self.places_of(used);
        if kind > from {
            self.space.set_open(bytes_of(&self.shape, self.blocks, kind))?;
            if self.backing == Backing::Now
                && let Err(error) = self.space.populate_from(before)
            {
                self.space.set_open(before).ok();
                return Err(error.into());
            }
        }
        let heads = 2 * self.shape.attention_layers as usize * self.shape.kv_heads as usize;
        backend.queue(Operation::Convert(Convert {
            space: self.space.lend(),
            rows: blocks * self.shape.block_tokens.get() as usize * heads,
            elements: self.shape.head_dim as usize,
            from,
            to: kind,
        }))?;
        settle(backend)?;
        self.kind = kind;
        let (kept, all) = (self.bytes_of(blocks), self.bytes());
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
        Ok(Resized { asked: before.saturating_sub(all), freed, grown: all.saturating_sub(before) })
    }

    /// Notes that the first `tokens` tokens are about to be in memory.
    pub(super) fn touch(&mut self, tokens: u32) {
        self.touched = self.touched.max(self.bytes_of(self.places_of(tokens)));
    }

    /// Gives back what is in memory behind the first `used` tokens; the capacity stays as it is. Nothing where all of it is
    /// had as memory.
    ///
    /// # Errors
    /// When the device has failed.
    pub(super) fn give_back_behind(&mut self, backend: &mut dyn Backend, used: u32) -> Result<(), DeviceError> {
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

    /// Drops `count` blocks from block `first` on of those that hold `used` tokens: those behind move up. No memory is
    /// given back by it.
    pub(super) fn drop_blocks(&mut self, first: usize, count: usize, used: u32) {
        let left = blocks_for(&self.shape, used).min(self.blocks).saturating_sub(count);
        if let Some(places) = self.places.get_mut(first..self.blocks)
            && count <= places.len()
        {
            places.rotate_left(count);
        }
        self.sort_free(left);
    }

    /// Blocks lie one after the other again, as nothing is held in them.
    pub(super) fn put_in_order(&mut self) {
        self.sort_free(0);
    }

    /// Copies what lies at place `end` or behind it, and belongs to the first `used` tokens, to free places before it.
    fn clear_behind(&mut self, backend: &mut dyn Backend, end: usize, used: u32) -> Result<(), DeviceError> {
        let used = blocks_for(&self.shape, used).min(self.blocks);
        if end >= self.blocks || used > end {
            return Ok(());
        }
        self.sort_free(used);
        let len = self.shape.block_bytes(self.kind).as_len();
        let mut free = used;
        for block in 0..used {
            let (Some(&from), Some(&to)) = (self.places.get(block), self.places.get(free)) else {
                break;
            };
            if from < end {
                continue;
            }
            backend.queue(Operation::Move { space: self.space.lend(), from: from * len, to: to * len, len })?;
            self.places.swap(block, free);
            free += 1;
        }
        self.sort_free(used);
        let places = self.places.iter().take(used).max().map_or(0, |place| place + 1);
        self.touched = self.touched.max(self.bytes_of(places));
        Ok(())
    }

    /// Orders the places behind the first `used` blocks, so that what comes next lies as far to the front as it can.
    fn sort_free(&mut self, used: usize) {
        if let Some(free) = self.places.get_mut(used..self.blocks) {
            free.sort_unstable();
        }
    }

    /// Places from the first one on that have to be there for the first `used` tokens.
    fn places_of(&self, used: u32) -> usize {
        let blocks = blocks_for(&self.shape, used).min(self.blocks);
        let places = self.places.iter().take(blocks);
        places.max().map_or(0, |place| place + 1)
    }

    /// What everything is kept as.
    #[must_use]
    pub const fn kind(&self) -> KvType {
        self.kind
    }

    /// Tokens that the cache may hold.
    #[must_use]
    pub fn capacity(&self) -> Tokens {
        self.tokens_of(self.blocks)
    }

    /// The capacity that a plan of `capacity` tokens comes to while `used` tokens are held.
    #[must_use]
    pub fn planned(&self, capacity: Tokens, used: u32) -> Tokens {
        self.tokens_of(self.blocks_wanted(capacity, used))
    }

    /// Memory that is leased: that of all blocks, touched or not.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        self.bytes_of(self.blocks)
    }

    /// How much of it has not been touched since it was had, and is therefore not in memory.
    #[must_use]
    pub fn untouched(&self) -> Bytes {
        self.bytes().saturating_sub(self.touched)
    }

    /// How much of it the kernel has in memory.
    #[must_use]
    pub fn resident(&self) -> Bytes {
        self.space.resident()
    }

    /// What the cache is made of.
    #[must_use]
    pub const fn shape(&self) -> &KvShape {
        &self.shape
    }

    /// The cache for an operation.
    #[must_use]
    pub fn cells(&self) -> Cells<'_> {
        Cells {
            space: self.space.lend(),
            kind: self.kind,
            shape: self.shape,
            places: self.places.get(..self.blocks).unwrap_or_default().into(),
        }
    }

    fn bytes_of(&self, blocks: usize) -> Bytes {
        bytes_of(&self.shape, blocks, self.kind)
    }

    fn blocks_wanted(&self, capacity: Tokens, used: u32) -> usize {
        blocks_for(&self.shape, capacity.get().max(used)).min(self.blocks_max)
    }

    fn tokens_of(&self, blocks: usize) -> Tokens {
        let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
        Tokens::new(blocks.saturating_mul(self.shape.block_tokens.get()))
    }
}

/// Waits until nothing in flight uses the cache.
fn settle(backend: &mut dyn Backend) -> Result<(), DeviceError> {
    let all = backend.mark();
    backend.wait(all)
}

fn blocks_for(shape: &KvShape, tokens: u32) -> usize {
    if shape.block_tokens.get() == 0 {
        return 0;
    }
    tokens.div_ceil(shape.block_tokens.get()) as usize
}

fn bytes_of(shape: &KvShape, blocks: usize, kind: KvType) -> Bytes {
    shape.blocks_bytes(u32::try_from(blocks).unwrap_or(u32::MAX), kind)
}

/// Tokens of one block: 64 keys of 128 elements are 16 KiB, which stays in the first-level cache while several query
/// heads go through it.
pub const KV_BLOCK_TOKENS: Tokens = Tokens::new(64);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        engine::{
            arena::HUGE_PAGE,
            backend::{Part, cpu::Cpu, offset_in_block},
        },
        units::page,
    };

    fn shape(head_dim: u32, granule: Bytes) -> KvShape {
        KvShape { attention_layers: 3, kv_heads: 2, head_dim, element_bytes: 2, granule, block_tokens: KV_BLOCK_TOKENS }
    }

    /// The bytes of a block.
    fn block(cache: &mut KvCache, index: usize) -> Option<&mut [u8]> {
        let len = cache.shape.block_bytes(cache.kind).as_len();
        let place = *cache.places[..cache.blocks].get(index)?;
        let start = cache.space.range(place * len, len)?;
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
            assert_eq!(resized.grown, shape.capacity_bytes(Tokens::new(1024), KvType::F16));
            assert_eq!((cache.untouched(), cache.resident()), (cache.bytes(), Bytes::ZERO));

            for index in 0..8 {
                cache.touch(u32::try_from(index * 64 + 1).unwrap());
                block(&mut cache, index).unwrap().fill(7);
            }
            let touched = shape.capacity_bytes(Tokens::new(512), KvType::F16);
            assert_eq!(cache.untouched(), cache.bytes() - touched);
            assert!(
                cache.resident() <= touched && cache.resident() >= shape.block_bytes(KvType::F16).saturating_mul(8)
            );

            let untouched = cache.untouched();
            let resized = cache.resize(&mut backend, Tokens::ZERO, 65).unwrap();
            assert_eq!(cache.capacity(), Tokens::new(128), "two blocks hold 65 tokens");
            let kept = shape.capacity_bytes(Tokens::new(128), KvType::F16);
            assert_eq!(resized.asked, shape.capacity_bytes(Tokens::new(1024), KvType::F16) - kept);
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
            assert_eq!(block(&mut cache, 7).unwrap()[0], 9, "what is used is left alone");

            let before = cache.resident();
            let resized = cache.resize(&mut backend, Tokens::new(128), 65).unwrap();
            assert_eq!(resized.freed, before - cache.resident());
            assert!(resized.freed >= resized.asked.saturating_sub(HUGE_PAGE), "{resized:?}");

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
        for (shape, granule) in [(shape(64, page()), page()), (shape(512, HUGE_PAGE), HUGE_PAGE)] {
            let mut backend = Cpu::new(2).unwrap();
            let mut cache = KvCache::new(&backend, shape, 4096, Backing::OnTouch).unwrap();
            cache.resize(&mut backend, Tokens::new(1024), 0).unwrap();
            cache.touch(700);
            for index in 0..11 {
                block(&mut cache, index).unwrap().fill(0x3c);
            }
            let first = block(&mut cache, 0).unwrap()[..2].to_vec();
            let mut held = cache.bytes();
            for (kind, used) in [(KvType::Q8, 500u32), (KvType::Q4, 450), (KvType::Q8, 450), (KvType::F16, 450)] {
                let (resident, untouched) = (cache.resident(), cache.untouched());
                let moved = cache.convert(&mut backend, kind, used).unwrap();
                assert_eq!((cache.kind(), cache.capacity()), (kind, Tokens::new(1024)));
                assert_eq!(cache.bytes(), shape.capacity_bytes(Tokens::new(1024), kind));
                assert_eq!(
                    (moved.asked, moved.grown),
                    (held.saturating_sub(cache.bytes()), cache.bytes().saturating_sub(held))
                );
                assert_eq!(
                    cache.bytes() - cache.untouched(),
                    shape.capacity_bytes(Tokens::new(used.next_multiple_of(64)), kind)
                );
                assert!(cache.resident() <= cache.bytes() - cache.untouched());
                if moved.asked > Bytes::ZERO {
                    assert_eq!(moved.freed, resident - cache.resident(), "the kernel's own count");
                    assert!(moved.asked + cache.untouched() >= moved.freed + untouched);
                    assert!(moved.asked + cache.untouched() <= moved.freed + untouched + granule);
                }
                held = cache.bytes();
            }
            // One value in each group of 32 is exact in any type, and all are the same here.
            assert_eq!(block(&mut cache, 6).unwrap()[..2], first);
        }
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
