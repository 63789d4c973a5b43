//! Shape of a model, plans of the engine, and the bytes of a plan.
//!
//! A plan states the resident layers, the KV capacity in tokens, and the tokens of a prefill chunk. Its bytes are
//! computed from the [`ModelShape`] in advance, so that ledger and engine use the same figure. Larger and smaller plans
//! are in `plan`.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::{
    kv_type::KvType,
    params::{EngineParams, ResidencyMode},
    speed::Calibration,
};
#[cfg(test)]
pub(crate) use crate::samples::{sample_shape, small_model};
use cotenant_units::{Bytes, Layers, Tokens};

/// The mixer of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LayerKind {
    /// Attends over the KV cache.
    Attention,
    /// Not a mixer: the block that drafts tokens, and its KV cache.
    Draft,
    /// Not a mixer: room for some experts of a layer's mixture.
    Experts,
    /// No mixer: a feed-forward part alone (Nemotron-H).
    FeedForward,
    /// Not a layer: a tile of the output head.
    Head,
    /// Keeps a state of fixed size (Gated DeltaNet, Mamba-2).
    Recurrent,
}

/// A part that is resident or streamed: a layer, a group of tensors of a large layer, room for some experts of a layer, a
/// tile of the output head, or the block that drafts tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerShape {
    /// The mixer of a layer, or what else it is.
    pub kind: LayerKind,
    /// Index of the part within its layer, or of the tile within the head.
    #[serde(default)]
    pub part: u32,
    /// Memory of the resident weights, in whole pages.
    pub resident_bytes: Bytes,
    /// The share of them that one token needs, in thousandths: all, except of experts.
    #[serde(default = "all_of_it", skip_serializing_if = "is_all_of_it")]
    pub used: u32,
}

const fn all_of_it() -> u32 {
    1000
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde passes a reference"
)]
const fn is_all_of_it(used: &u32) -> bool {
    *used == all_of_it()
}

impl LayerShape {
    /// Returns a part that each token needs as a whole.
    #[must_use]
    pub const fn new(kind: LayerKind, part: u32, resident_bytes: Bytes) -> Self {
        Self {
            kind,
            part,
            resident_bytes,
            used: all_of_it(),
        }
    }

    /// Returns the bytes that one token needs.
    #[must_use]
    pub fn token_bytes(&self) -> Bytes {
        self.resident_bytes.per_mille(self.used)
    }

    /// Returns whether the part is read through the ring while it is not resident; experts are read when a token needs
    /// them, and without the draft block nothing is drafted.
    #[must_use]
    pub fn is_streamed(&self) -> bool {
        !matches!(self.kind, LayerKind::Draft | LayerKind::Experts)
    }
}

/// Weights that are not in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Missing {
    /// All of them, which a chunk of a prompt needs.
    pub bytes: Bytes,
    /// Those of them that one token needs.
    pub token: Bytes,
}

impl Missing {
    /// Returns the weights without those of a part.
    #[must_use]
    pub fn without(self, part: &LayerShape) -> Self {
        Self {
            bytes: self.bytes.saturating_sub(part.resident_bytes),
            token: self.token.saturating_sub(part.token_bytes()),
        }
    }

    /// Returns `bytes` of these weights.
    #[must_use]
    pub fn only(self, bytes: Bytes) -> Self {
        let token = u128::from(self.token.get()) * u128::from(bytes.get())
            / u128::from(self.bytes.get().max(1));
        Self {
            bytes,
            token: Bytes::new(u64::try_from(token).unwrap_or(u64::MAX)),
        }
    }

    /// Returns the weights with those of a part.
    #[must_use]
    pub fn with(self, part: &LayerShape) -> Self {
        Self {
            bytes: self.bytes.saturating_add(part.resident_bytes),
            token: self.token.saturating_add(part.token_bytes()),
        }
    }
}

/// Bytes per token of context in the KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvShape {
    /// Layers with keys and values of their own, including windowed ones; recurrent layers keep a fixed state instead.
    pub attention_layers: u32,
    /// Key and value heads of one layer.
    pub kv_heads: u32,
    /// Elements of one head.
    pub head_dim: u32,
    /// Bytes of one element in the largest type: 2 for f16.
    pub element_bytes: u32,
    /// Unit of allocation and release, huge pages for large caches; zero for any size.
    #[serde(default)]
    pub granule: Bytes,
    /// Tokens of one KV block, the unit of capacity.
    pub block_tokens: Tokens,
    /// The layers with sliding windows among them, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub windowed: Option<WindowedKv>,
}

/// Attention layers that attend to and keep only the last tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WindowedKv {
    /// Number of layers.
    pub layers: u32,
    /// Maximum KV blocks of each layer: those of the window, and of the tokens computed together.
    pub blocks: u32,
    /// Their key and value heads, and the elements of one, if they differ from those of the other layers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heads: Option<(u32, u32)>,
}

impl KvShape {
    /// Returns the memory of one token of context as `kind`: keys and values of all layers that keep the whole context.
    /// Windowed layers add a constant, except for short contexts.
    ///
    /// ```
    /// # use cotenant_policy::{kv_type::KvType, residency::{KvShape, WindowedKv}};
    /// # use cotenant_units::{Bytes, Tokens};
    /// // Qwen3.5-4B: 8 of its 32 layers attend; 4 KV heads of 256 elements.
    /// let shape = KvShape {
    ///     attention_layers: 8, kv_heads: 4, head_dim: 256, element_bytes: 2, granule: Bytes::ZERO,
    ///     block_tokens: Tokens::new(64), windowed: None,
    /// };
    /// assert_eq!(shape.bytes_per_token(KvType::F16), Bytes::from_kib(32));
    /// assert_eq!(shape.bytes_per_token(KvType::Q8), Bytes::from_kib(17));
    /// assert_eq!(shape.blocks_bytes(1, KvType::F16), Bytes::from_mib(2));
    /// // Gemma 3 4B: 5 of 34 layers keep 20 KiB for each token, the others 116 KiB for the last tokens.
    /// let windowed = Some(WindowedKv { layers: 29, blocks: 25, heads: None });
    /// let shape = KvShape { attention_layers: 34, windowed, ..shape };
    /// assert_eq!(shape.bytes_per_token(KvType::F16), Bytes::from_kib(20));
    /// assert_eq!(
    ///     shape.capacity_bytes(Tokens::new(131_072), KvType::F16),
    ///     Bytes::from_kib(20 * 131_072 + 116 * 25 * 64),
    /// );
    /// ```
    #[must_use]
    pub const fn bytes_per_token(&self, kind: KvType) -> Bytes {
        let layers = self.attention_layers.saturating_sub(self.windowed_layers());
        let rows = 2 * layers as u64 * self.kv_heads as u64;
        Bytes::new(rows * self.row_bytes(kind))
    }

    /// Returns the number of layers that keep only the last tokens.
    #[must_use]
    pub const fn windowed_layers(&self) -> u32 {
        match self.windowed {
            Some(windowed) => windowed.layers,
            None => 0,
        }
    }

    /// Returns the shape of the layers that keep the whole context.
    #[must_use]
    pub const fn whole(&self) -> Self {
        Self {
            attention_layers: self.attention_layers.saturating_sub(self.windowed_layers()),
            windowed: None,
            ..*self
        }
    }

    /// Returns the shape of the windowed layers, and the maximum blocks of each.
    #[must_use]
    pub const fn windows(&self) -> Option<(Self, u32)> {
        let Some(windowed) = self.windowed else {
            return None;
        };
        if windowed.layers == 0 {
            return None;
        }
        let (kv_heads, head_dim) = match windowed.heads {
            Some(heads) => heads,
            None => (self.kv_heads, self.head_dim),
        };
        let shape = Self {
            attention_layers: windowed.layers,
            kv_heads,
            head_dim,
            windowed: None,
            ..*self
        };
        Some((shape, windowed.blocks))
    }

    /// Returns the maximum tokens of a sequence that can be cut back: windowed layers keep no older ones. `None` if
    /// there is no such limit.
    #[must_use]
    pub const fn cut_back_max(&self) -> Option<Tokens> {
        match self.windowed {
            Some(windowed) => Some(Tokens::new(
                windowed.blocks.saturating_mul(self.block_tokens.get()),
            )),
            None => None,
        }
    }

    /// Returns the bytes of the keys or the values of one head for one token.
    #[must_use]
    pub const fn row_bytes(&self, kind: KvType) -> u64 {
        match kind {
            KvType::F16 => self.head_dim as u64 * self.element_bytes as u64,
            KvType::Q8 | KvType::Q4 => kind.row_bytes(self.head_dim),
        }
    }

    /// Returns the bytes of one KV block in all attention layers.
    #[must_use]
    pub const fn block_bytes(&self, kind: KvType) -> Bytes {
        let whole = self.bytes_per_token(kind);
        let of_token = match self.windows() {
            Some((windows, _)) => whole.saturating_add(windows.bytes_per_token(kind)),
            None => whole,
        };
        of_token.saturating_mul(self.block_tokens.get() as u64)
    }

    /// Returns the bytes of a capacity of `tokens`: whole blocks and whole granules.
    #[must_use]
    pub const fn capacity_bytes(&self, tokens: Tokens, kind: KvType) -> Bytes {
        if self.block_tokens.get() == 0 {
            return Bytes::ZERO;
        }
        self.blocks_bytes(tokens.get().div_ceil(self.block_tokens.get()), kind)
    }

    /// Returns the bytes of `blocks` blocks in whole granules; windowed layers count at most the blocks that they keep.
    #[must_use]
    pub const fn blocks_bytes(&self, blocks: u32, kind: KvType) -> Bytes {
        let tokens = self.block_tokens.get() as u64;
        let whole = self
            .bytes_per_token(kind)
            .saturating_mul(tokens)
            .saturating_mul(blocks as u64);
        let windows = self.windows_bytes(blocks, kind);
        whole
            .round_up(self.granule)
            .saturating_add(windows.round_up(self.granule))
    }

    /// Returns the bytes of the blocks that windowed layers keep of `blocks`.
    const fn windows_bytes(&self, blocks: u32, kind: KvType) -> Bytes {
        let Some((windows, most)) = self.windows() else {
            return Bytes::ZERO;
        };
        let kept = if blocks < most { blocks } else { most };
        windows.block_bytes(kind).saturating_mul(kept as u64)
    }

    /// Returns the maximum number of blocks at the end of `blocks` that take at most `bytes` together.
    #[must_use]
    pub fn blocks_within(&self, blocks: u32, kind: KvType, bytes: Bytes) -> u32 {
        let all = self.blocks_bytes(blocks, kind);
        let holds = |last: u32| all.saturating_sub(self.blocks_bytes(blocks - last, kind));
        let (mut least, mut most) = (0, blocks);
        while least < most {
            let middle = least + (most - least).div_ceil(2);
            if holds(middle) <= bytes {
                least = middle;
            } else {
                most = middle - 1;
            }
        }
        least
    }
}

/// Memory of a model by part, reported by the engine from the file's header.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelShape {
    /// Name that clients use.
    pub name: String,
    /// GGUF architecture: `qwen35`, `qwen3`, `llama`.
    pub architecture: String,
    /// The layers, first to last, some in several parts; then the output head in tiles.
    pub layers: Vec<LayerShape>,
    /// Memory resident in every plan: norms, tokenizer, the engine's own structures.
    pub fixed_bytes: Bytes,
    /// Recurrent and convolution state of one sequence.
    pub state_bytes: Bytes,
    /// KV cache.
    pub kv: KvShape,
    /// Longest context supported by the model.
    pub context_max: Tokens,
    /// Workspace that does not depend on the prefill chunk.
    pub workspace_fixed_bytes: Bytes,
    /// Workspace per token of a prefill chunk.
    pub workspace_bytes_per_token: Bytes,
    /// Staging ring, needed if any part is streamed.
    pub ring_bytes: Bytes,
}

/// Target sizes of the engine's memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EnginePlan {
    /// Indices of resident parts of [`ModelShape::layers`]; the others are streamed.
    pub resident: BTreeSet<u32>,
    /// KV capacity in tokens; whole blocks.
    pub kv_capacity: Tokens,
    /// Tokens of one prefill chunk.
    pub prefill_chunk: Tokens,
    /// KV type; `f16` in plans of older versions.
    #[serde(default)]
    pub kv_type: KvType,
}

impl EnginePlan {
    /// Returns the smallest plan that contains both plans.
    #[must_use]
    pub fn with_all_of(&self, other: &Self) -> Self {
        Self {
            resident: self.resident.union(&other.resident).copied().collect(),
            kv_capacity: self.kv_capacity.max(other.kv_capacity),
            prefill_chunk: self.prefill_chunk.max(other.prefill_chunk),
            kv_type: self.kv_type.max(other.kv_type),
        }
    }
}

/// Constraints of a plan besides its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanLimits {
    /// KV capacity of the full plan for tokens.
    pub kv_wanted: Tokens,
    /// Conversations whose states have capacity beside it.
    pub conversations: u32,
    /// KV capacity of the floor.
    pub kv_floor: Tokens,
    /// KV capacity in use by the running sequence: lower bound of every plan.
    pub kv_used: Tokens,
    /// KV type of the full plan.
    pub kv_type: KvType,
    /// The smallest KV type that a plan may have.
    pub kv_type_least: KvType,
    /// Tokens of one prefill chunk.
    pub prefill_chunk: Tokens,
    /// Maximum chunk set by [`ModelShape::rechunked`].
    pub prefill_chunk_max: Tokens,
    /// Layers that are resident in every plan.
    pub resident_min: u32,
    /// Relative value of context and speed.
    pub mode: ResidencyMode,
    /// Speed used for prices.
    pub speed: Calibration,
}

impl PlanLimits {
    /// Returns the configured limits while a sequence uses `kv_used` tokens, with field values for the speed.
    #[must_use]
    pub fn new(params: &EngineParams, kv_used: Tokens) -> Self {
        Self {
            kv_wanted: params.kv_wanted,
            conversations: params.conversations,
            kv_floor: params.kv_floor,
            kv_used,
            kv_type: params.kv_type,
            kv_type_least: params.kv_type_least.min(params.kv_type),
            prefill_chunk: params.prefill_chunk,
            prefill_chunk_max: params.prefill_chunk,
            resident_min: params.resident_min,
            mode: params.mode,
            speed: Calibration::FIELD,
        }
    }

    /// Sets a measured speed.
    #[must_use]
    pub const fn at_speed(self, speed: Calibration) -> Self {
        Self { speed, ..self }
    }

    /// Permits larger chunks while parts are streamed; requires a measured prompt speed.
    #[must_use]
    pub fn with_chunks_up_to(self, most: Tokens) -> Self {
        Self {
            prefill_chunk_max: most.max(self.prefill_chunk),
            ..self
        }
    }

    /// Fixes the chunk of all plans, as required while a prompt may be in progress.
    #[must_use]
    pub const fn at_chunk(self, chunk: Tokens) -> Self {
        Self {
            prefill_chunk: chunk,
            prefill_chunk_max: chunk,
            ..self
        }
    }
}

/// The floor of the model does not fit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error(
    "cannot fit `{model}`: its floor is {floor} ({resident} of {layers} layers, {kv_tokens} KV tokens), the engine may hold {available}"
)]
pub struct FloorError {
    /// Name of the model.
    pub model: String,
    /// Bytes of the floor.
    pub floor: Bytes,
    /// Resident layers of the floor.
    pub resident: Layers,
    /// Layers of the model.
    pub layers: Layers,
    /// KV capacity of the floor.
    pub kv_tokens: Tokens,
    /// Bytes available.
    pub available: Bytes,
}

impl ModelShape {
    /// Returns the bytes of the weights that one token needs.
    #[must_use]
    pub fn token_bytes(&self) -> Bytes {
        self.weights().token.saturating_add(self.fixed_bytes)
    }

    /// Returns the weights that are not in memory if these parts are `resident`.
    #[must_use]
    pub fn missing(&self, resident: &BTreeSet<u32>) -> Missing {
        let missing = self.parts_without(resident);
        missing.fold(Missing::default(), Missing::with)
    }

    /// Returns all weights.
    #[must_use]
    pub fn weights(&self) -> Missing {
        self.missing(&BTreeSet::new())
    }

    fn parts_without(&self, resident: &BTreeSet<u32>) -> impl Iterator<Item = &LayerShape> {
        let parts = self.layers.iter().zip(0u32..);
        parts
            .filter(|(_, index)| !resident.contains(index))
            .map(|(part, _)| part)
    }

    /// Returns the KV capacity of type `kind` that the states and windows of `conversations` take: one of each while
    /// its answer is set aside and one for its next prompt, and one at the end of their common prefix.
    #[must_use]
    pub fn tokens_of_copies(&self, conversations: u32, kind: KvType) -> Tokens {
        let block = self.kv.bytes_per_token(kind).get() * u64::from(self.kv.block_tokens.get());
        let copy = self
            .state_bytes
            .saturating_add(self.kv.windows_bytes(u32::MAX, kind));
        if conversations == 0 || block == 0 || copy == Bytes::ZERO {
            return Tokens::ZERO;
        }
        let blocks = u32::try_from(copy.get().div_ceil(block)).unwrap_or(u32::MAX);
        let copies = conversations.saturating_mul(2).saturating_add(1);
        let tokens = self.kv.block_tokens.get().saturating_mul(blocks);
        Tokens::new(tokens.saturating_mul(copies))
    }

    /// Returns the bytes of the ring if it is needed while only these parts are `resident`.
    #[must_use]
    pub fn ring_beside(&self, resident: &BTreeSet<u32>) -> Bytes {
        if self.parts_without(resident).any(LayerShape::is_streamed) {
            self.ring_bytes
        } else {
            Bytes::ZERO
        }
    }

    /// Returns the minimum bytes of one more layer: the last one makes the staging ring unnecessary. `None` if all are
    /// resident.
    pub(crate) fn least_layer_without(&self, resident: &BTreeSet<u32>) -> Option<Bytes> {
        let missing = self.parts_without(resident);
        let layer = missing.map(|layer| layer.resident_bytes).min()?;
        let ring = self.ring_beside(resident);
        let all = self.missing(resident).bytes.saturating_sub(ring);
        Some(layer.min(all))
    }

    /// Returns the number of layers, regardless of their parts.
    #[must_use]
    pub fn layer_count(&self) -> u32 {
        let firsts = self
            .layers
            .iter()
            .filter(|part| !matches!(part.kind, LayerKind::Draft | LayerKind::Head))
            .filter(|part| part.part == 0);
        u32::try_from(firsts.count()).unwrap_or(u32::MAX)
    }

    /// Returns the number of layers that are completely resident under `plan`, regardless of their experts.
    #[must_use]
    pub fn resident_layers(&self, plan: &EnginePlan) -> u32 {
        let mut layers = 0;
        let mut whole = false;
        let parts = self.layers.iter().zip(0u32..);
        for (part, index) in parts.filter(|(part, _)| part.is_streamed()) {
            if part.part == 0 || part.kind == LayerKind::Head {
                layers += u32::from(whole);
                whole = part.kind != LayerKind::Head;
            }
            whole &= plan.resident.contains(&index);
        }
        layers + u32::from(whole)
    }

    /// Returns the number of parts that correspond to `layers` layers.
    pub(crate) fn parts_of(&self, layers: u32) -> usize {
        let layers_in_all = u64::from(self.layer_count().max(1));
        let of_layers = |part: &&LayerShape| part.is_streamed() && part.kind != LayerKind::Head;
        let parts = self.layers.iter().filter(of_layers).count() as u64;
        let parts = u64::from(layers)
            .saturating_mul(parts)
            .div_ceil(layers_in_all);
        usize::try_from(parts).unwrap_or(usize::MAX)
    }

    /// Returns the bytes that the engine holds under `plan`.
    #[must_use]
    pub fn plan_bytes(&self, plan: &EnginePlan) -> Bytes {
        let layers = plan.resident.iter().filter_map(|index| {
            let index = usize::try_from(*index).ok()?;
            self.layers.get(index)
        });
        let resident: Bytes = layers.map(|layer| layer.resident_bytes).sum();
        let ring = self.ring_beside(&plan.resident);
        let workspace = self
            .workspace_bytes_per_token
            .saturating_mul(u64::from(plan.prefill_chunk.get()))
            .saturating_add(self.workspace_fixed_bytes);
        [
            self.fixed_bytes,
            self.state_bytes,
            self.kv.capacity_bytes(plan.kv_capacity, plan.kv_type),
            workspace,
            ring,
        ]
        .into_iter()
        .fold(resident, Bytes::saturating_add)
    }

    /// Returns the additional bytes of a larger chunk.
    #[must_use]
    pub fn chunk_bytes(&self, smaller: Tokens, larger: Tokens) -> Bytes {
        let more = larger.get().saturating_sub(smaller.get());
        self.workspace_bytes_per_token
            .saturating_mul(u64::from(more))
    }
}
