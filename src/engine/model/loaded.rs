//! A loaded model: what it consists of, and what it holds now.

use std::{
    ops::Deref,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
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
    /// What computes.
    pub compute: Compute,
    /// Name that clients use; `general.name` of the file, or the file's stem, when absent.
    pub name: Option<String>,
    /// The longest context that will be asked for; what the model was made for, when absent. Some models (Phi-3) turn
    /// positions by other angles beyond a length, and choose when they are opened.
    pub context: Option<Tokens>,
    /// Whether KV capacity is memory from the moment it is had, or as tokens come.
    pub kv_backing: Backing,
    /// Which tokens it may say; all when absent.
    pub vocabulary: Option<Sayable>,
    /// The program `cotenant`, which computes chat templates and grammars under bounds; threads of this process do, without
    /// bounds, when absent.
    pub helper: Option<PathBuf>,
}

impl ModelOptions {
    /// The file's own name, context and vocabulary, KV as tokens come, on so many threads of the CPU.
    #[must_use]
    pub fn for_threads(threads: usize) -> Self {
        Self {
            compute: threads.into(),
            name: None,
            context: None,
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
    /// Of one token; behind them, whether results are not finite.
    pub(super) logits: Buffer,
    /// Tokens of the next prefill chunk.
    pub(super) chunk_wanted: usize,
    /// How much is computed between two looks for commands.
    pub(super) estimators: SliceEstimators,
    /// What was refused while it was opened, so that it has fewer layers.
    pub(super) refused: Option<String>,
}

/// The scores of the next token, one for each token of the vocabulary.
#[derive(Debug)]
pub struct Logits<'model>(pub(super) &'model [f32]);

/// What a token is chosen by.
#[derive(Debug)]
pub enum Scores<'model> {
    /// The first of the most likely tokens, which the device has found.
    Greatest(u32),
    /// All scores.
    All(Logits<'model>),
}

impl Deref for Logits<'_> {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        self.0
    }
}

impl Model {
    /// Waits until all that was queued has been executed: before memory is given up.
    pub(super) fn finish(&mut self) -> Result<(), DeviceError> {
        let all = self.backend.mark();
        self.backend.wait(all)
    }

    /// Why fewer layers are resident than the plan had with which it was opened.
    #[must_use]
    pub fn refused(&self) -> Option<&str> {
        self.refused.as_deref()
    }

    /// Drops the vocabulary and merges from the header, once a tokenizer was built from them.
    pub fn forget_lists(&mut self) {
        Arc::make_mut(&mut self.header).forget_lists();
    }

    /// Time that kernels have waited for streamed weights so far.
    #[must_use]
    pub const fn waited(&self) -> Duration {
        self.weights.waited()
    }

    /// What each piece of the model occupies.
    #[must_use]
    pub const fn shape(&self) -> &ModelShape {
        &self.shape
    }

    /// The file's header: metadata for tokenizer and chat template.
    #[must_use]
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The plan in force.
    #[must_use]
    pub const fn plan(&self) -> &EnginePlan {
        &self.plan
    }

    /// Tokens of the sequence so far.
    #[must_use]
    pub const fn position(&self) -> u32 {
        self.sequence.position
    }

    /// The smallest type that any token of the sequence has been kept in: what a conversion has lost stays lost until the
    /// sequence is read again.
    #[must_use]
    pub const fn kv_precision(&self) -> KvType {
        self.sequence.kv_precision
    }

    /// Tokens of the vocabulary: the length of [`Logits`].
    #[must_use]
    pub fn vocabulary(&self) -> u32 {
        u32::try_from(self.spec.vocabulary).unwrap_or(u32::MAX)
    }

    /// Whether `token` may be said: whether the head has a row for it.
    #[must_use]
    pub fn can_say(&self, token: u32) -> bool {
        let said = self.spec.said.as_deref();
        token < self.vocabulary()
            && said.is_none_or(|said| said.iter().any(|rows| rows.contains(&(token as usize))))
    }

    /// What computes, for people.
    #[must_use]
    pub fn backend_name(&self) -> String {
        self.backend.name()
    }

    /// Everything that is held now.
    #[must_use]
    pub fn breakdown(&self) -> Breakdown {
        let weights = |layer| self.held_of(Some(layer)).1;
        let weights: Bytes = (0..self.spec.layers.len()).map(weights).sum();
        let (_, head) = self.held_of(None);
        let (fixed, header) = (
            self.weights.fixed().bytes() + head,
            self.header.heap_bytes(),
        );
        let (kv, state) = (self.sequence.cache.bytes(), self.sequence.state.bytes());
        let workspace = self.workspace.bytes()
            + self.logits.bytes()
            + self.sequence.cache.aside()
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

    /// Whether all of a layer, or of the output head, is in memory, and how much of it is.
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

    /// The same as the kernel sees it: pages of our mappings that are in memory (`mincore`). The header is heap and left
    /// out.
    #[must_use]
    pub fn kernel_resident(&self) -> Bytes {
        self.weights.resident()
            + self.sequence.resident()
            + self.workspace.resident()
            + self.logits.resident()
            + self.needs.context
    }

    /// Held bytes that no page backs yet: never touched.
    #[must_use]
    pub fn untouched(&self) -> Bytes {
        self.sequence.cache.untouched()
    }

    /// What is held, was given up, and is kept by reads that hang until they return.
    #[must_use]
    pub fn left(&self) -> Bytes {
        self.weights.left_bytes()
    }

    /// What reads that hang may keep when the model is given up now.
    #[must_use]
    pub fn kept(&self) -> Retained {
        self.weights.kept(Instant::now())
    }

    /// Tokens of the sequence that were dropped, and how many stayed before them.
    #[must_use]
    pub const fn dropped(&self) -> (Tokens, Tokens) {
        (
            Tokens::new(self.sequence.dropped.tokens),
            Tokens::new(self.sequence.dropped.after),
        )
    }

    /// Tokens that could be dropped now.
    #[must_use]
    pub fn droppable(&self) -> Tokens {
        self.sequence.droppable()
    }

    /// Whether copies of its state or of windows are needed to go back: other models can be cut back anywhere.
    #[must_use]
    pub fn has_copies(&self) -> bool {
        self.sequence.has_copies()
    }

    /// Whether parts are read for every token.
    pub(super) fn streams(&self) -> bool {
        self.plan.resident.len() < self.layout.parts.len()
    }

    /// Drops as much as `used` tokens are too many for `capacity`, as far as that is allowed; returns how many.
    pub(super) fn drop_for(&mut self, capacity: Tokens, used: u32) -> u32 {
        let turn = (&self.spec.attention, self.weights.rope_factors());
        self.sequence.drop_for(turn, capacity, used)
    }

    /// Makes the readers bring streamed parts from the first one on.
    pub(super) fn restart_stream(&mut self) {
        // Without a stream the next pass reports that the weights are missing, and tries again.
        if self.weights.reclaim(self.backend.as_mut(), 0).is_ok() {
            self.weights
                .stream(self.backend.as_ref(), &self.layout, Place::default())
                .ok();
        }
    }
}
