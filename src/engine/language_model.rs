//! The model as seen by the engine's thread: sequences, plans and memory.

use std::{io, path::Path, time::Duration};

use super::{
    breakdown::Breakdown,
    disk::Retained,
    error::{ApplyError, ApplyReport, ForwardError, LoadError},
    model::{
        Asked, ExpertCounts, Kept, Lane, SaveDue, SaveStep, SavedView, Selected, Span,
        common_prefix,
    },
    preemption::Checkpoint,
    text::TextSide,
};
use cotenant_policy::{
    kv_type::KvType,
    residency::{EnginePlan, ModelShape},
    speed::Calibration,
};
use cotenant_units::{Bytes, Tokens};

/// Opens a model with an initial plan, on the engine's thread.
pub type Opener = Box<dyn FnMut(&Path, &EnginePlan) -> Result<Opened, LoadError> + Send>;

/// A model and its text side.
pub struct Opened {
    /// The model.
    pub model: Box<dyn LanguageModel>,
    /// Tokenizer and chat template.
    pub text: TextSide,
}

/// A model with one sequence and lanes. Implemented for GGUF files; tests implement models that fail on demand.
pub trait LanguageModel {
    /// Appends `tokens` to the sequence and writes the scores of the next token to `logits`.
    ///
    /// The scores depend only on the sequence: not on plans, nor on its division into calls.
    ///
    /// # Errors
    /// See [`ForwardError`].
    fn forward(
        &mut self,
        tokens: &[u32],
        checkpoint: &mut dyn Checkpoint,
        logits: &mut Vec<f32>,
    ) -> Result<(), ForwardError>;

    /// As [`Self::forward`], but may return the first of the most likely tokens instead of writing `logits`.
    ///
    /// # Errors
    /// As [`Self::forward`].
    fn forward_greedy(
        &mut self,
        tokens: &[u32],
        checkpoint: &mut dyn Checkpoint,
        logits: &mut Vec<f32>,
    ) -> Result<Option<u32>, ForwardError> {
        self.forward(tokens, checkpoint, logits).map(|()| None)
    }

    /// Maximum number of answers computed together, each a conversation of its own.
    fn answers_max(&self) -> usize {
        1
    }

    /// Experts of a mixture.
    fn expert_counts(&self) -> Option<ExpertCounts> {
        None
    }

    /// Parked conversations.
    fn kept_conversations(&self) -> Vec<Kept> {
        Vec::new()
    }

    /// Keeps conversations in a folder, and begins to read which ones it contains.
    ///
    /// # Errors
    /// When no thread can be started.
    fn open_saved(&mut self, _path: &Path) -> io::Result<()> {
        Ok(())
    }

    /// Saves the next conversation that is due, including the sequence, whose tokens are `held`; polls `go_on` between
    /// transfers.
    fn save_conversation(
        &mut self,
        _held: &[u32],
        _due: SaveDue,
        _go_on: &mut dyn FnMut() -> bool,
    ) -> SaveStep {
        SaveStep::Waits(None)
    }

    /// Begins to read back a saved conversation that a prompt can reuse, if that is faster than computing its tokens
    /// in `token` each. Returns whether it has begun: the sequence, whose tokens are `held`, is parked then. `None` while
    /// it is not known which conversations there are.
    fn begin_reload(&mut self, _held: &[u32], _asked: Asked<'_>, _token: Duration) -> Option<bool> {
        Some(false)
    }

    /// Begins to read the most recent conversation of an earlier run that fits in free capacity; returns whether it has
    /// begun, `None` while it is not known which there are.
    fn begin_read_ahead(&mut self, _held: &[u32]) -> Option<bool> {
        Some(false)
    }

    /// Continues a reload, waiting at most `patience` for the disk; returns whether it is still in progress.
    fn reload(&mut self, _patience: Duration) -> bool {
        false
    }

    /// Ends a reload.
    fn end_reload(&mut self) {}

    /// Saved conversations.
    fn saved_view(&self, _held: &[u32]) -> SavedView {
        SavedView::default()
    }

    /// Makes the sequence, whose tokens are `held`, a lane that is computed beside others, and begins a new sequence.
    /// Returns `None` if the model cannot do that now.
    fn set_aside(&mut self, held: &[u32]) -> Option<Lane> {
        let _ = held;
        None
    }

    /// KV capacity, in tokens, that a lane takes beyond that of its tokens.
    fn aside_takes(&self) -> Tokens {
        Tokens::ZERO
    }

    /// Whether a lane cannot continue.
    fn is_lost(&self, _lane: Lane) -> bool {
        false
    }

    /// Whether [`Self::take_back`] is supported.
    fn takes_back(&self) -> bool {
        true
    }

    /// Whether a draft block is in memory.
    fn drafts(&self) -> bool {
        false
    }

    /// Drafts up to `most` tokens after `tokens`, the sequence and the token after it, by the draft block; polls `go_on`
    /// after each.
    fn draft(
        &mut self,
        _tokens: &[u32],
        _most: usize,
        _go_on: &mut dyn FnMut() -> bool,
    ) -> Vec<u32> {
        Vec::new()
    }

    /// Maximum number of the sequence's tokens in the next pass.
    fn slice_max(&self) -> usize {
        self.rows_max()
    }

    /// Makes a lane the sequence; the previous sequence, whose tokens are `held`, is parked. Returns the lane's tokens.
    fn resume(&mut self, held: &[u32], lane: Lane) -> Option<Vec<u32>> {
        let _ = (held, lane);
        None
    }

    /// Reserves capacity for a sequence that a prompt read in several passes extends to `tokens` tokens; 0 ends the
    /// reservation once it has been read.
    fn expect(&mut self, _tokens: u32) {}

    /// Ends the answer of a lane, which becomes a parked conversation.
    fn leave(&mut self, _lane: Lane) {}

    /// Reserves capacity for `tokens` more tokens of a lane, beside all others; returns whether there is enough.
    fn make_places(&mut self, lane: Lane, tokens: u32) -> bool {
        let _ = (lane, tokens);
        false
    }

    /// Maximum number of tokens in one pass.
    fn rows_max(&self) -> usize {
        self.plan().prefill_chunk.get() as usize
    }

    /// Appends the tokens of `spans` to their conversations in one pass, with at most [`Self::rows_max`] tokens and
    /// [`Self::answers_max`] results; [`Self::scores_of`] reads the results in the order of the spans.
    ///
    /// # Errors
    /// As [`Self::forward`]; after any of them nothing was appended, and a sequence with a span is lost.
    fn forward_together(
        &mut self,
        spans: &[Span<'_>],
        checkpoint: &mut dyn Checkpoint,
    ) -> Result<(), ForwardError> {
        let _ = (spans, checkpoint);
        Err(ForwardError::SequenceLost)
    }

    /// Writes the scores of result `number` of the last pass, of a token at `position` of its conversation, to
    /// `logits`.
    ///
    /// # Errors
    /// When they are not finite, or the device has failed.
    fn scores_of(
        &mut self,
        number: usize,
        position: u32,
        logits: &mut Vec<f32>,
    ) -> Result<(), ForwardError> {
        let _ = (number, position, logits);
        Err(ForwardError::SequenceLost)
    }

    /// As [`Self::scores_of`], but may return the first of the most likely tokens instead of writing `logits`.
    ///
    /// # Errors
    /// As [`Self::scores_of`].
    fn greatest_of(
        &mut self,
        number: usize,
        position: u32,
        logits: &mut Vec<f32>,
    ) -> Result<Option<u32>, ForwardError> {
        self.scores_of(number, position, logits).map(|()| None)
    }

    /// Removes the last tokens of a lane, or of the sequence.
    fn take_back(&mut self, _lane: Option<Lane>, _tokens: u32) {}

    /// KV capacity, in tokens, that the sequence and all lanes take.
    fn held(&self) -> Tokens {
        Tokens::new(self.position())
    }

    /// Why less is in force than the plan at opening, if so.
    fn refused(&self) -> Option<&str> {
        None
    }

    /// Puts a plan into force between two tokens.
    ///
    /// # Errors
    /// See [`ApplyError`].
    fn apply(&mut self, plan: &EnginePlan) -> Result<ApplyReport, ApplyError>;

    /// As [`Self::apply`], but growth that takes long is preempted by other `wanted` work and keeps the parts read by
    /// then.
    ///
    /// # Errors
    /// See [`ApplyError`].
    fn apply_until(
        &mut self,
        plan: &EnginePlan,
        wanted: &mut dyn FnMut() -> bool,
    ) -> Result<ApplyReport, ApplyError> {
        let _ = wanted;
        self.apply(plan)
    }

    /// Measures the speed of computing and reading; polls `go_on` between layers. Returns `None` if a measurement is
    /// not possible or was cancelled.
    ///
    /// # Errors
    /// When memory released for the measurement cannot be allocated again, so that less is in force.
    fn calibrate(
        &mut self,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<Option<Calibration>, ApplyError> {
        let _ = go_on;
        Ok(None)
    }

    /// Whether a token is sayable; a reduced vocabulary lacks some.
    fn can_say(&self, _token: u32) -> bool {
        true
    }

    /// Drops the sequence.
    fn reset(&mut self);

    /// Cuts the sequence back to its longest usable prefix of at most `tokens` tokens, and returns the length.
    fn keep(&mut self, tokens: u32) -> u32 {
        if tokens < self.position() {
            self.reset();
        }
        self.position()
    }

    /// Makes the client's conversation with the longest common prefix with a prompt the sequence, cut back to the
    /// usable part; `held` are the tokens of the previous sequence.
    fn select(&mut self, held: &[u32], asked: Asked<'_>) -> Selected {
        // At least one token must be computed, since the scores after the sequence are not kept.
        let most = u32::try_from(asked.prompt.len().saturating_sub(1)).unwrap_or(u32::MAX);
        let kept = self.keep(common_prefix(held, asked.prompt).min(most));
        Selected { kept, fork: None }
    }

    /// Recovers the usable prefix of a sequence whose last pass was cancelled, and returns its length.
    fn recover(&mut self) -> u32 {
        self.reset();
        0
    }

    /// Marks `end`, where the next prompt is likely to diverge, in the next pass, so that the sequence can be cut back to
    /// it while there is capacity for its copy; for models that cannot be cut back anywhere.
    fn mark_at(&mut self, _end: u32) {}

    /// As [`Self::mark_at`], where a prompt diverges from another conversation.
    fn fork_at(&mut self, _position: u32) {}

    /// Allows or forbids dropping the oldest tokens after the first `sinks` when the KV capacity is used up or shrinks.
    fn allow_dropping(&mut self, _sinks: Option<Tokens>) {}

    /// Drops some of the oldest tokens if allowed; returns the number.
    fn make_room(&mut self) -> Tokens {
        Tokens::ZERO
    }

    /// Dropped tokens of the sequence, and the tokens kept before them.
    fn dropped(&self) -> (Tokens, Tokens) {
        (Tokens::ZERO, Tokens::ZERO)
    }

    /// Number of tokens that can be dropped now.
    fn droppable(&self) -> Tokens {
        Tokens::ZERO
    }

    /// The plan in force.
    fn plan(&self) -> &EnginePlan;

    /// Size of each piece of the model.
    fn shape(&self) -> &ModelShape;

    /// Length of the sequence in tokens.
    fn position(&self) -> u32;

    /// The smallest KV type that any token of the sequence, or of a lane, has been stored in.
    fn kv_precision(&self, lane: Option<Lane>) -> KvType {
        let _ = lane;
        self.plan().kv_type
    }

    /// Name of the backend, for display.
    fn backend_name(&self) -> String {
        String::new()
    }

    /// All memory held.
    fn breakdown(&self) -> Breakdown;

    /// Held memory that is untouched.
    fn untouched(&self) -> Bytes {
        Bytes::ZERO
    }

    /// Released memory that hanging reads keep until they return.
    fn left(&self) -> Bytes {
        Bytes::ZERO
    }

    /// Memory that hanging reads would keep if the model were dropped now.
    fn kept(&self) -> Retained {
        Retained::default()
    }
}
