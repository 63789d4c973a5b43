//! The model as the engine's thread uses it: one sequence, plans, and what is held.

use std::{io, path::Path};

use super::{
    breakdown::Breakdown,
    disk::Retained,
    error::{ApplyError, ApplyReport, ForwardError, LoadError},
    model::{Asked, Kept, Lane, Saved, Selected, Span, common_prefix},
    preemption::Checkpoint,
    text::TextSide,
};
use cotenant_policy::{
    kv_type::KvType,
    residency::{EnginePlan, ModelShape},
    streaming::Calibration,
};
use cotenant_units::{Bytes, Tokens};

/// Opens a model with a first plan, on the engine's thread.
pub type Opener = Box<dyn FnMut(&Path, &EnginePlan) -> Result<Opened, LoadError> + Send>;

/// A model and how to talk with it.
pub struct Opened {
    /// The model.
    pub model: Box<dyn LanguageModel>,
    /// Tokenizer and chat template.
    pub text: TextSide,
}

/// A model with one sequence. GGUF files are opened as one; tests have others, which break down at will.
pub trait LanguageModel {
    /// Appends `tokens` to the sequence and puts the scores of the token after them into `logits`.
    ///
    /// The scores depend on the sequence alone: not on plans, nor on how the sequence was cut into calls.
    ///
    /// # Errors
    /// See [`ForwardError`].
    fn forward(
        &mut self,
        tokens: &[u32],
        checkpoint: &mut dyn Checkpoint,
        logits: &mut Vec<f32>,
    ) -> Result<(), ForwardError>;

    /// As [`Self::forward`] for a token that is the first of the most likely: says which, or puts the scores into `logits`.
    ///
    /// # Errors
    /// As there.
    fn forward_greedy(
        &mut self,
        tokens: &[u32],
        checkpoint: &mut dyn Checkpoint,
        logits: &mut Vec<f32>,
    ) -> Result<Option<u32>, ForwardError> {
        self.forward(tokens, checkpoint, logits).map(|()| None)
    }

    /// How many answers may be computed together, each a sequence of its own.
    fn answers_max(&self) -> usize {
        1
    }

    /// The conversations that are kept beside the sequence.
    fn kept_conversations(&self) -> Vec<Kept> {
        Vec::new()
    }

    /// Writes the conversations that can be gone on from to a file, the sequence with the tokens `held` among them.
    ///
    /// # Errors
    /// When it cannot be written.
    fn save_conversations(&mut self, _held: &[u32], _path: &Path) -> io::Result<Saved> {
        Ok(Saved::default())
    }

    /// Takes over the conversations of such a file, and removes it; `go_on` is asked between reads.
    ///
    /// # Errors
    /// When it cannot be read, is damaged, or belongs to another model.
    fn restore_conversations(
        &mut self,
        _path: &Path,
        _go_on: &mut dyn FnMut() -> bool,
    ) -> io::Result<Saved> {
        Ok(Saved::default())
    }

    /// Sets the sequence, which has the tokens `held`, aside, to go on with it beside others; a new one begins. `None` where the
    /// model cannot do that.
    fn set_aside(&mut self, held: &[u32]) -> Option<Lane> {
        let _ = held;
        None
    }

    /// Tokens of capacity that setting a conversation aside takes beside those of its tokens.
    fn aside_takes(&self) -> Tokens {
        Tokens::ZERO
    }

    /// Whether one that was set aside cannot be gone on with.
    fn is_lost(&self, _lane: Lane) -> bool {
        false
    }

    /// Whether [`Self::take_back`] takes back any tokens.
    fn takes_back(&self) -> bool {
        true
    }

    /// How many tokens of the sequence the next pass may have at most.
    fn slice_max(&self) -> usize {
        self.rows_max()
    }

    /// One that was set aside becomes the sequence; the one until then, with the tokens `held`, stays as a conversation that may be
    /// gone on with. Returns its tokens.
    fn resume(&mut self, held: &[u32], lane: Lane) -> Option<Vec<u32>> {
        let _ = (held, lane);
        None
    }

    /// Keeps places for a prompt that the sequence comes to so many tokens by, and that is read in several passes; for none once
    /// it has been read.
    fn expect(&mut self, _tokens: u32) {}

    /// The answer of one that was set aside is over: it stays as a conversation that may be gone on with.
    fn leave(&mut self, _lane: Lane) {}

    /// Finds places for so many more tokens of one that was set aside, beside all others; says whether there are.
    fn make_places(&mut self, lane: Lane, tokens: u32) -> bool {
        let _ = (lane, tokens);
        false
    }

    /// How many tokens may be computed in one pass.
    fn rows_max(&self) -> usize {
        self.plan().prefill_chunk.get() as usize
    }

    /// Appends the tokens of some spans to their conversations in one pass, [`Self::rows_max`] of them with
    /// [`Self::answers_max`] results at most; these are read by [`Self::scores_of`] in the order of the spans.
    ///
    /// # Errors
    /// As [`Self::forward`]; after any of them nothing was appended, and a sequence that has a span is lost.
    fn forward_together(
        &mut self,
        spans: &[Span<'_>],
        checkpoint: &mut dyn Checkpoint,
    ) -> Result<(), ForwardError> {
        let _ = (spans, checkpoint);
        Err(ForwardError::SequenceLost)
    }

    /// The scores of one of the results of the last pass, of a token at `position` of its conversation.
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

    /// As [`Self::scores_of`] for a token that is the first of the most likely: says which, or puts the scores into `logits`.
    ///
    /// # Errors
    /// As there.
    fn greatest_of(
        &mut self,
        number: usize,
        position: u32,
        logits: &mut Vec<f32>,
    ) -> Result<Option<u32>, ForwardError> {
        self.scores_of(number, position, logits).map(|()| None)
    }

    /// Takes back the last tokens of one that was set aside, or of the sequence.
    fn take_back(&mut self, _lane: Option<Lane>, _tokens: u32) {}

    /// Tokens of the capacity that the sequence takes, with those whose answers are under way beside it.
    fn held(&self) -> Tokens {
        Tokens::new(self.position())
    }

    /// Why less is in force than what it was opened with, where that is so.
    fn refused(&self) -> Option<&str> {
        None
    }

    /// Puts a plan into force between two tokens.
    ///
    /// # Errors
    /// See [`ApplyError`].
    fn apply(&mut self, plan: &EnginePlan) -> Result<ApplyReport, ApplyError>;

    /// As [`Self::apply`]; when growing takes long, it ends with what there is for whatever else is `wanted`.
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

    /// Measures what it can do; `go_on` is asked between layers. `None` where that says nothing, or was broken off.
    ///
    /// # Errors
    /// When less is in force afterwards: what had been given up for it could not be had again.
    fn calibrate(
        &mut self,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<Option<Calibration>, ApplyError> {
        let _ = go_on;
        Ok(None)
    }

    /// Whether a token can be said: a reduced vocabulary leaves others out.
    fn can_say(&self, _token: u32) -> bool {
        true
    }

    /// Drops the sequence.
    fn reset(&mut self);

    /// Cuts the sequence back to the longest beginning of at most `tokens` tokens that can be gone on from, and returns
    /// its length.
    fn keep(&mut self, tokens: u32) -> u32 {
        if tokens < self.position() {
            self.reset();
        }
        self.position()
    }

    /// The conversation of the client that has the most in common with a prompt becomes the sequence, as far as that can be
    /// gone on from; `held` is what the sequence has until then.
    fn select(&mut self, held: &[u32], asked: Asked<'_>) -> Selected {
        // At least one token must be left to compute, since the scores after the sequence are not kept.
        let most = u32::try_from(asked.prompt.len().saturating_sub(1)).unwrap_or(u32::MAX);
        let kept = self.keep(common_prefix(held, asked.prompt).min(most));
        Selected { kept, fork: None }
    }

    /// Takes up a sequence whose last pass was broken off, as far as it can be gone on from; returns its length.
    fn recover(&mut self) -> u32 {
        self.reset();
        0
    }

    /// Marks a place that the next pass comes by, so that the sequence can be cut back to it as long as there is room for
    /// what that takes; for models that cannot be cut back anywhere.
    fn mark_at(&mut self, _position: u32) {}

    /// Marks a place of the next pass as [`Self::mark_at`] does, where its prompt has parted from another conversation.
    fn fork_at(&mut self, _position: u32) {}

    /// Allows that the oldest tokens behind the first `sinks` of the sequence are dropped where the KV capacity is used up
    /// or becomes smaller, or forbids it.
    fn allow_dropping(&mut self, _sinks: Option<Tokens>) {}

    /// Drops some of the oldest tokens if that is allowed; returns how many.
    fn make_room(&mut self) -> Tokens {
        Tokens::ZERO
    }

    /// Tokens of the sequence that were dropped, and how many stayed before them.
    fn dropped(&self) -> (Tokens, Tokens) {
        (Tokens::ZERO, Tokens::ZERO)
    }

    /// Tokens that could be dropped now.
    fn droppable(&self) -> Tokens {
        Tokens::ZERO
    }

    /// The plan in force.
    fn plan(&self) -> &EnginePlan;

    /// What each piece of the model occupies.
    fn shape(&self) -> &ModelShape;

    /// Tokens of the sequence so far.
    fn position(&self) -> u32;

    /// The smallest type that any token of the sequence, or of one that was set aside, has been kept in.
    fn kv_precision(&self, lane: Option<Lane>) -> KvType {
        let _ = lane;
        self.plan().kv_type
    }

    /// What computes, for people.
    fn backend_name(&self) -> String {
        String::new()
    }

    /// Everything that is held now.
    fn breakdown(&self) -> Breakdown;

    /// How much of what is held is still untouched.
    fn untouched(&self) -> Bytes {
        Bytes::ZERO
    }

    /// How much of what is held was given up, and is kept by reads that hang until they return.
    fn left(&self) -> Bytes {
        Bytes::ZERO
    }

    /// What reads that hang may keep when all of it is given up now.
    fn kept(&self) -> Retained {
        Retained::default()
    }
}
