//! The KV cache: `f16` blocks of tokens, each a mapping of its own, so that capacity given up is memory given back.

use std::io;

use super::{
    arena::{Backing, Mapping},
    backend::Backend,
};
use crate::{
    policy::residency::KvShape,
    units::{Bytes, Tokens},
};

/// Keys and values of one sequence.
///
/// A block holds [`KvShape::block_tokens`] tokens of every attention layer, as
/// `[layer][key, value][head][token][element]`, so that one head's keys of a block are contiguous.
#[derive(Debug)]
pub struct KvCache {
    shape: KvShape,
    blocks: Vec<Mapping>,
}

/// Keys or values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Keys.
    Key,
    /// Values.
    Value,
}

/// What a change of capacity did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resized {
    /// Bytes of blocks that were given up.
    pub asked: Bytes,
    /// Bytes of these that the kernel had in memory.
    pub freed: Bytes,
    /// Bytes of new blocks.
    pub grown: Bytes,
}

impl KvCache {
    /// A cache without capacity.
    #[must_use]
    pub const fn new(shape: KvShape) -> Self {
        Self {
            shape,
            blocks: Vec::new(),
        }
    }

    /// Changes the capacity to `capacity` tokens, rounded up to whole blocks, and not below `used`.
    ///
    /// New blocks are real memory when this returns.
    ///
    /// # Errors
    ///
    /// When there is no memory; the blocks that were had stay.
    pub fn resize(&mut self, backend: &dyn Backend, capacity: Tokens, used: u32) -> io::Result<Resized> {
        let wanted = self.blocks_for(capacity.get().max(used));
        let mut resized = Resized::default();
        while self.blocks.len() > wanted {
            if let Some(block) = self.blocks.pop() {
                resized.asked += block.bytes();
                resized.freed += block.release();
            }
        }
        while self.blocks.len() < wanted {
            let block = backend.allocate(self.shape.block_bytes(), Backing::Now)?;
            resized.grown += block.bytes();
            self.blocks.push(block);
        }
        Ok(resized)
    }

    /// Tokens that the cache may hold.
    #[must_use]
    pub fn capacity(&self) -> Tokens {
        let blocks = u32::try_from(self.blocks.len()).unwrap_or(u32::MAX);
        Tokens::new(blocks.saturating_mul(self.shape.block_tokens.get()))
    }

    /// The capacity that a plan of `capacity` tokens comes to while `used` tokens are held.
    #[must_use]
    pub fn planned(&self, capacity: Tokens, used: u32) -> Tokens {
        let blocks = u32::try_from(self.blocks_for(capacity.get().max(used))).unwrap_or(u32::MAX);
        Tokens::new(blocks.saturating_mul(self.shape.block_tokens.get()))
    }

    /// Memory of all blocks.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        self.blocks.iter().map(Mapping::bytes).sum()
    }

    /// How much of it the kernel has in memory.
    #[must_use]
    pub fn resident(&self) -> Bytes {
        self.blocks.iter().map(Mapping::resident).sum()
    }

    /// What the cache is made of.
    #[must_use]
    pub const fn shape(&self) -> &KvShape {
        &self.shape
    }

    /// Block `index`.
    #[must_use]
    pub fn block(&self, index: usize) -> Option<&Mapping> {
        self.blocks.get(index)
    }

    /// Index of the first byte of one head's `part` of the attention layer `layer` in every block.
    #[must_use]
    pub const fn offset(&self, layer: usize, part: Part, head: usize) -> usize {
        let shape = &self.shape;
        let part = match part {
            Part::Key => 0,
            Part::Value => 1,
        };
        let row = (layer * 2 + part) * shape.kv_heads as usize + head;
        row * shape.block_tokens.get() as usize * shape.head_dim as usize * shape.element_bytes as usize
    }

    fn blocks_for(&self, tokens: u32) -> usize {
        if self.shape.block_tokens.get() == 0 {
            return 0;
        }
        tokens.div_ceil(self.shape.block_tokens.get()) as usize
    }
}

/// Tokens of one block: 64 keys of 128 elements are 16 KiB, which stays in the first-level cache while several query
/// heads go through it.
pub const KV_BLOCK_TOKENS: Tokens = Tokens::new(64);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::backend::cpu::Cpu;

    #[test]
    fn capacity_is_whole_blocks_of_real_memory_and_goes_back_to_the_kernel() {
        let shape = KvShape {
            attention_layers: 2,
            kv_heads: 2,
            head_dim: 64,
            element_bytes: 2,
            block_tokens: KV_BLOCK_TOKENS,
        };
        let backend = Cpu::new(1).unwrap();
        let mut cache = KvCache::new(shape);
        let resized = cache.resize(&backend, Tokens::new(130), 0).unwrap();
        assert_eq!(cache.capacity(), Tokens::new(192));
        assert_eq!(resized.grown, shape.capacity_bytes(Tokens::new(130)));
        assert_eq!(cache.resident(), cache.bytes());

        let resized = cache.resize(&backend, Tokens::ZERO, 65).unwrap();
        assert_eq!(cache.capacity(), Tokens::new(128), "two blocks hold 65 tokens");
        assert_eq!(
            (resized.asked, resized.freed),
            (shape.block_bytes(), shape.block_bytes())
        );
    }

    #[test]
    fn rows_of_a_block_do_not_overlap() {
        let shape = KvShape {
            attention_layers: 3,
            kv_heads: 2,
            head_dim: 16,
            element_bytes: 2,
            block_tokens: KV_BLOCK_TOKENS,
        };
        let cache = KvCache::new(shape);
        let mut starts: Vec<usize> = Vec::new();
        for layer in 0..3 {
            for part in [Part::Key, Part::Value] {
                for head in 0..2 {
                    starts.push(cache.offset(layer, part, head));
                }
            }
        }
        let row = 64 * 16 * 2;
        let expected: Vec<usize> = (0..12).map(|index| index * row).collect();
        assert_eq!(starts, expected);
        assert_eq!(shape.block_bytes(), Bytes::of_len(12 * row));
    }
}
