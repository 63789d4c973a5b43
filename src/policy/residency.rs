//! What the engine should hold: from the shape of a model and a number of bytes to a plan.
//!
//! A plan says which layers are resident, how many tokens the KV cache may hold, and how many tokens one prefill
//! chunk has. Every byte of it can be computed beforehand from the [`ModelShape`], so that the book and the engine
//! speak of the same number.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::units::{Bytes, Tokens};

/// What kind of mixer a layer has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LayerKind {
    /// Attends over the KV cache.
    Attention,
    /// Keeps a state of fixed size (Gated DeltaNet).
    Recurrent,
}

/// One layer as the planner sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerShape {
    /// Attention or recurrent.
    pub kind: LayerKind,
    /// Memory that the layer's weights occupy when resident, whole pages included.
    pub resident_bytes: Bytes,
}

/// What one token of context occupies in the KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvShape {
    /// Layers that attend; recurrent layers keep a fixed state instead.
    pub attention_layers: u32,
    /// Key and value heads of one layer.
    pub kv_heads: u32,
    /// Elements of one head.
    pub head_dim: u32,
    /// Bytes of one element: 2 for f16.
    pub element_bytes: u32,
    /// Tokens of one KV block, the unit in which capacity is allocated and given back.
    pub block_tokens: Tokens,
}

impl KvShape {
    /// Memory that one token of context occupies, keys and values of all attention layers together.
    ///
    /// ```
    /// # use cotenant::{policy::residency::KvShape, units::{Bytes, Tokens}};
    /// // Qwen3.5-4B: 8 of its 32 layers attend; 4 KV heads of 256 elements, in f16.
    /// let shape = KvShape { attention_layers: 8, kv_heads: 4, head_dim: 256, element_bytes: 2, block_tokens: Tokens::new(64) };
    /// assert_eq!(shape.bytes_per_token(), Bytes::from_kib(32));
    /// assert_eq!(shape.block_bytes(), Bytes::from_mib(2));
    /// ```
    #[must_use]
    pub const fn bytes_per_token(&self) -> Bytes {
        let elements = 2 * self.attention_layers as u64 * self.kv_heads as u64 * self.head_dim as u64;
        Bytes::new(elements * self.element_bytes as u64)
    }

    /// Memory that one KV block occupies in all attention layers together.
    #[must_use]
    pub const fn block_bytes(&self) -> Bytes {
        self.bytes_per_token().saturating_mul(self.block_tokens.get() as u64)
    }

    /// Memory that a capacity of `tokens` occupies: whole blocks.
    #[must_use]
    pub const fn capacity_bytes(&self, tokens: Tokens) -> Bytes {
        if self.block_tokens.get() == 0 {
            return Bytes::ZERO;
        }
        self.block_bytes()
            .saturating_mul(tokens.get().div_ceil(self.block_tokens.get()) as u64)
    }
}

/// The memory of a model, piece by piece, as the engine reports it after it has read the file's header.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelShape {
    /// Name that clients use.
    pub name: String,
    /// GGUF architecture: `qwen35`, `qwen3`, `llama`.
    pub architecture: String,
    /// The layers, first to last.
    pub layers: Vec<LayerShape>,
    /// What is resident in every plan: output head, norms, tokenizer, the engine's own structures.
    pub fixed_bytes: Bytes,
    /// Recurrent and convolution state of one sequence.
    pub state_bytes: Bytes,
    /// KV cache.
    pub kv: KvShape,
    /// The longest context that the model was made for.
    pub context_max: Tokens,
    /// Workspace that does not depend on the prefill chunk.
    pub workspace_fixed_bytes: Bytes,
    /// Workspace for each token of a prefill chunk.
    pub workspace_bytes_per_token: Bytes,
    /// Staging ring that is needed as soon as one layer is streamed.
    pub ring_bytes: Bytes,
}

/// What the engine should hold.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EnginePlan {
    /// Layers whose weights are in memory; the others are streamed.
    pub resident: BTreeSet<u32>,
    /// Tokens that the KV cache may hold; whole blocks.
    pub kv_capacity: Tokens,
    /// Tokens of one prefill chunk.
    pub prefill_chunk: Tokens,
}

impl ModelShape {
    /// The bytes that the engine holds under `plan`, all kinds together.
    #[must_use]
    pub fn plan_bytes(&self, plan: &EnginePlan) -> Bytes {
        let resident: Bytes = self
            .layers
            .iter()
            .zip(0u32..)
            .filter(|(_, index)| plan.resident.contains(index))
            .map(|(layer, _)| layer.resident_bytes)
            .sum();
        let ring = if plan.resident.len() < self.layers.len() {
            self.ring_bytes
        } else {
            Bytes::ZERO
        };
        let workspace = self
            .workspace_bytes_per_token
            .saturating_mul(u64::from(plan.prefill_chunk.get()))
            .saturating_add(self.workspace_fixed_bytes);
        [
            self.fixed_bytes,
            self.state_bytes,
            self.kv.capacity_bytes(plan.kv_capacity),
            workspace,
            ring,
        ]
        .into_iter()
        .fold(resident, Bytes::saturating_add)
    }
}
