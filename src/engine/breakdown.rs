//! Memory of the engine by kind and layer.

use serde::{Deserialize, Serialize};

use crate::{
    policy::{kv_type::KvType, residency::LayerKind},
    units::{Bytes, Tokens},
};

/// What a model holds at one instant.
///
/// Each number is the length of mappings that are whole pages, except [`Self::header`], which is heap.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Breakdown {
    /// Each layer in order.
    pub layers: Vec<LayerBreakdown>,
    /// Output head, norms and other small tensors, resident in every plan.
    pub fixed: Bytes,
    /// The header with vocabulary and tables, on the heap.
    pub header: Bytes,
    /// KV blocks: all that is leased for them.
    pub kv: Bytes,
    /// How much of that no token has needed yet. It is held, and takes no memory.
    #[serde(default)]
    pub kv_untouched: Bytes,
    /// How much of it, where no token has been yet, copies of the recurrent state take, from which prompts go on.
    #[serde(default)]
    pub kv_marks: Bytes,
    /// In what form they are kept.
    #[serde(default)]
    pub kv_type: KvType,
    /// Tokens that these blocks may hold.
    pub kv_capacity: Tokens,
    /// Tokens that they hold now.
    pub kv_used: Tokens,
    /// Recurrent and convolution state.
    pub state: Bytes,
    /// Activations of one prefill chunk, and logits.
    pub workspace: Bytes,
    /// Staging ring for streamed layers.
    pub ring: Bytes,
    /// All of the above.
    pub total: Bytes,
}

impl Breakdown {
    /// What is held and in memory.
    #[must_use]
    pub const fn used(&self) -> Bytes {
        self.total.saturating_sub(self.kv_untouched)
    }
}

/// What one layer holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerBreakdown {
    /// Attention or recurrent.
    pub kind: LayerKind,
    /// Whether its weights are in memory.
    pub resident: bool,
    /// Its weights in memory.
    pub weights: Bytes,
    /// Its part of the KV blocks.
    pub kv: Bytes,
    /// Its part of the state.
    pub state: Bytes,
}
