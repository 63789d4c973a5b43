//! Memory of the engine by kind.

use cotenant_units::Bytes;

/// Memory held by a model at one instant.
///
/// Each number is the length of whole-page mappings, except [`Self::header`], which is heap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Breakdown {
    /// Weights of the resident layers.
    pub weights: Bytes,
    /// Output head, norms and other small tensors, resident in every plan.
    pub fixed: Bytes,
    /// The header with vocabulary and tables, on the heap.
    pub header: Bytes,
    /// KV blocks: everything leased for them.
    pub kv: Bytes,
    /// KV memory not yet used by any token: held, but not resident.
    pub kv_untouched: Bytes,
    /// KV memory with copies of recurrent state and of windows, from which prompts can continue.
    pub kv_marks: Bytes,
    /// KV memory with tokens of conversations other than the last computed one.
    pub kv_parked: Bytes,
    /// Recurrent and convolution state.
    pub state: Bytes,
    /// Activations of one prefill chunk, logits, and the device's own overhead.
    pub workspace: Bytes,
    /// Staging ring for streamed layers.
    pub ring: Bytes,
    /// All of the above.
    pub total: Bytes,
}

impl Breakdown {
    /// Held memory that is resident.
    pub const fn used(&self) -> Bytes {
        self.total.saturating_sub(self.kv_untouched)
    }
}
