//! A loaded model: its components and the memory it holds.

use std::{
    ops::Deref,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    draft_kv::DraftKv,
    saved::Saved,
    sequence::Sequence,
    weights::{Place, Weights},
    workspace::{Needs, Workspace},
};
use crate::{
    arena::Backing,
    backend::{self, Backend, Buffer, Device, DeviceError},
    breakdown::Breakdown,
    disk::Retained,
    error::LoadErrorKind,
    gguf::Header,
    preemption::SliceEstimators,
    sayable::Sayable,
    shape::Layout,
    spec::Spec,
};
use cotenant_policy::{
    compute::Compute,
    kv_type::KvType,
    residency::{EnginePlan, ModelShape},
};
use cotenant_units::{Bytes, Tokens};

/// How a model is opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelOptions {
    /// Device to compute on.
    pub compute: Compute,
    /// Name that clients use; `general.name` of the file, or the file's stem, when absent.
    pub name: Option<String>,
    /// Longest context that will be requested; the model's own maximum if absent. Some models (Phi-3) use other rotary
    /// angles beyond a length, and choose when opened.
    pub context: Option<Tokens>,
    /// Conversations whose states have KV capacity beside it.
    pub conversations: u32,
    /// Whether tokens are drafted: the plan then has the memory for drafts.
    pub drafts: bool,
    /// Whether conversations are kept on disk: the plan then has the buffers of their transfers.
    pub keeps_conversations: bool,
    /// Whether KV capacity is populated at once or on first touch.
    pub kv_backing: Backing,
    /// Sayable tokens; all if absent.
    pub vocabulary: Option<Sayable>,
    /// Path of the program `cotenant`, which evaluates chat templates and grammars under resource limits; if absent,
    /// threads of this process evaluate them without limits.
    pub helper: Option<PathBuf>,
}

impl ModelOptions {
    /// Options with the file's own name, context and vocabulary, KV on touch, and `threads` CPU threads.
    pub fn for_threads(threads: usize) -> Self {
        Self {
            compute: threads.into(),
            name: None,
            context: None,
            conversations: 0,
            drafts: true,
            keeps_conversations: false,
            kv_backing: Backing::OnTouch,
            vocabulary: None,
            helper: None,
        }
    }

    pub(super) fn device(&self) -> Result<Arc<dyn Device>, LoadErrorKind> {
        backend::choose(self.compute)
    }
}

/// A GGUF model in memory, with one sequence.
///
/// Not shared: it belongs to the engine's thread.
pub struct Model {
    pub(super) backend: Box<dyn Backend>,
    pub(super) header: Arc<Header>,
    pub(super) spec: Spec,
    pub(super) layout: Layout,
    pub(super) shape: ModelShape,
    pub(super) plan: EnginePlan,
    pub(super) weights: Weights,
    pub(super) sequence: Sequence,
    pub(super) workspace: Workspace,
    pub(super) needs: Needs,
    /// Logits of the results, each followed by flags for non-finite values.
    pub(super) logits: Buffer,
    /// KV cache of the draft block, if there is one.
    pub(super) draft: Option<DraftKv>,
    /// Size of the next prefill chunk, in tokens.
    pub(super) chunk_wanted: usize,
    /// Estimators of the work between two preemption checks.
    pub(super) estimators: SliceEstimators,
    /// Allocation error at opening that reduced the resident layers.
    pub(super) refused: Option<String>,
    /// Conversations on disk.
    pub(super) saved: Option<Saved>,
}

/// Logits of the next token, one per token of the vocabulary.
#[derive(Debug)]
pub struct Logits<'model>(pub(super) &'model [f32]);

impl Deref for Logits<'_> {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        self.0
    }
}

impl Model {
    /// Waits until all queued operations are executed; required before memory is released.
    pub(super) fn finish(&mut self) -> Result<(), DeviceError> {
        let all = self.backend.mark();
        self.backend.wait(all)
    }

    /// Why fewer layers are resident than in the plan at opening.
    pub fn refused(&self) -> Option<&str> {
        self.refused.as_deref()
    }

    /// Drops the vocabulary and merges from the header, after a tokenizer was built from them.
    pub fn forget_lists(&mut self) {
        Arc::make_mut(&mut self.header).forget_lists();
    }

    /// Total time that kernels have waited for streamed weights.
    pub const fn waited(&self) -> Duration {
        self.weights.waited()
    }

    /// Size of each piece of the model.
    pub const fn shape(&self) -> &ModelShape {
        &self.shape
    }

    /// Header of the file: metadata for tokenizer and chat template.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The plan in force.
    pub const fn plan(&self) -> &EnginePlan {
        &self.plan
    }

    /// Length of the sequence in tokens.
    pub const fn position(&self) -> u32 {
        self.sequence.position
    }

    /// The smallest KV type that any token of the sequence has been stored in: lost precision returns only when the
    /// sequence is recomputed.
    pub const fn kv_precision(&self) -> KvType {
        self.sequence.kv_precision
    }

    /// Tokens of the vocabulary: the length of [`Logits`].
    pub fn vocabulary(&self) -> u32 {
        u32::try_from(self.spec.vocabulary).unwrap_or(u32::MAX)
    }

    /// Whether `token` is sayable: whether the head has a row for it.
    pub fn can_say(&self, token: u32) -> bool {
        let said = self.spec.said.as_deref();
        token < self.vocabulary()
            && said.is_none_or(|said| said.iter().any(|rows| rows.contains(&(token as usize))))
    }

    /// Name of the backend, for display.
    pub fn backend_name(&self) -> String {
        self.backend.name()
    }

    /// All memory held.
    pub fn breakdown(&self) -> Breakdown {
        let weights = |layer| self.held_of(Some(layer)).1;
        let layers = 0..self.spec.layers_and_draft().count();
        let weights: Bytes = layers.map(weights).sum();
        let (_, head) = self.held_of(None);
        let (fixed, header) = (
            self.weights.fixed().bytes() + head,
            self.header.heap_bytes(),
        );
        let (kv, state) = (self.sequence.cache.bytes(), self.sequence.state.bytes());
        let workspace = self.workspace.bytes()
            + self.logits.bytes()
            + self.sequence.cache.aside()
            + self.sequence.trial_bytes()
            + self.draft.as_ref().map_or(Bytes::ZERO, DraftKv::bytes)
            + self.weights.staging().map_or(Bytes::ZERO, Buffer::bytes)
            + self.saved.as_ref().map_or(Bytes::ZERO, Saved::buffer_bytes)
            + self.needs.context;
        let ring = self.weights.ring_bytes();
        Breakdown {
            weights,
            fixed,
            header,
            kv,
            kv_untouched: self.untouched(),
            kv_marks: self.sequence.cache.copied(),
            kv_parked: self.sequence.cache.parked(),
            state,
            workspace,
            ring,
            total: [weights, fixed, header, kv, state, workspace, ring]
                .into_iter()
                .sum(),
        }
    }

    /// Whether all of a layer, or of the output head (`None`), is in memory, and the bytes of it that are.
    fn held_of(&self, layer: Option<usize>) -> (bool, Bytes) {
        let parts = self.layout.parts.iter().enumerate();
        let arenas = parts
            .filter(|(_, part)| part.layer == layer)
            .map(|(index, _)| self.weights.arena(index));
        arenas.fold((true, Bytes::ZERO), |(all, bytes), arena| {
            (
                all && arena.is_some(),
                bytes + arena.map_or(Bytes::ZERO, Buffer::bytes),
            )
        })
    }

    /// Bytes of our mappings that are in memory according to the kernel (`mincore`). The header is on the heap and not
    /// included.
    pub fn kernel_resident(&self) -> Bytes {
        self.weights.resident()
            + self.sequence.resident()
            + self.workspace.resident()
            + self.logits.resident()
            + self.draft.as_ref().map_or(Bytes::ZERO, DraftKv::resident)
            + self.saved.as_ref().map_or(Bytes::ZERO, Saved::buffer_bytes)
            + self.needs.context
    }

    /// Held bytes without pages: never touched.
    pub fn untouched(&self) -> Bytes {
        self.sequence.cache.untouched()
    }

    /// Bytes of released memory that hanging reads keep until they return.
    pub fn left(&self) -> Bytes {
        self.weights.left_bytes()
    }

    /// Memory that hanging reads would keep if the model were dropped now.
    #[must_use]
    pub fn kept(&self) -> Retained {
        self.weights.kept(Instant::now())
    }

    /// Dropped tokens of the sequence, and the tokens kept before them.
    pub const fn dropped(&self) -> (Tokens, Tokens) {
        (
            Tokens::new(self.sequence.dropped.tokens),
            Tokens::new(self.sequence.dropped.after),
        )
    }

    /// Number of tokens that can be dropped now.
    pub fn droppable(&self) -> Tokens {
        self.sequence.droppable()
    }

    /// Whether cutting back needs copies of state or windows; other models can be cut back anywhere.
    pub fn has_copies(&self) -> bool {
        self.sequence.has_copies()
    }

    /// Whether parts are streamed.
    pub(super) fn streams(&self) -> bool {
        let is_absent = |part: &usize| self.weights.arena(*part).is_none();
        let mut parts = 0..self.layout.parts.len();
        parts.any(|part| is_absent(&part) && self.layout.draft != Some(part))
    }

    /// Drops the excess of `used` tokens over `capacity`, as far as dropping is allowed; returns the number dropped.
    pub(super) fn drop_for(&mut self, capacity: Tokens, used: u32) -> u32 {
        let turn = (&self.spec.attention, self.weights.rope_factors());
        self.sequence.drop_for(turn, capacity, used)
    }

    /// Restarts the stream at the first part.
    pub(super) fn restart_stream(&mut self) {
        // Without a stream, the next pass reports missing weights and retries.
        if self.weights.reclaim(self.backend.as_mut(), 0).is_ok() {
            self.weights
                .stream(self.backend.as_ref(), &self.layout, Place::default())
                .ok();
        }
    }
}
