//! Memory of the engine by kind.

use cotenant_units::Bytes;

/// What a model holds at one instant.
///
/// Each number is the length of mappings that are whole pages, except [`Self::header`], which is heap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Breakdown {
    /// Weights of the layers that are resident.
    pub weights: Bytes,
    /// Output head, norms and other small tensors, resident in every plan.
    pub fixed: Bytes,
    /// The header with vocabulary and tables, on the heap.
    pub header: Bytes,
    /// KV blocks: all that is leased for them.
    pub kv: Bytes,
    /// How much of that no token has needed yet. It is held, and takes no memory.
    pub kv_untouched: Bytes,
    /// How much of it has copies of recurrent state and of windows, from which prompts go on.
    pub kv_marks: Bytes,
    /// How much of it has tokens of other conversations than the one that was computed last.
    pub kv_parked: Bytes,
    /// Recurrent and convolution state.
    pub state: Bytes,
    /// Activations of one prefill chunk, logits, and what the device takes for itself.
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
