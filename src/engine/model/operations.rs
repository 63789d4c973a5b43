//! Operations of a model: opening, computing, changes of plan, and its sequences.

use std::{io, path::Path, time::Duration};

use super::{
    batch::Span,
    calibrate::{self, PartTime},
    damage, draft,
    experts::{ExpertCounts, Experts},
    loaded::{Logits, Model, ModelOptions},
    opening::{self, Disk, Opening},
    parked::{Asked, Kept, Lane, Selected},
    pass, residency,
    saved::{Memory, SaveDue, SaveStep, Saved, SavedView},
    trial,
};
use crate::{
    backend,
    disk::DiskWatch,
    error::{ApplyError, ApplyReport, ForwardError, LoadError, LoadErrorKind},
    gguf::Header,
    preemption::Checkpoint,
    reader::WeightFile,
    sayable::Sayable,
    shape::{self, Layout},
    spec::Spec,
};
use cotenant_policy::{
    compute::Compute,
    kv_type::KvType,
    residency::{EnginePlan, ModelShape},
    speed::Calibration,
};
use cotenant_units::{Bytes, Tokens};

impl Model {
    /// Reads the header of the file at `path` and computes the size of each piece on `compute` (a device, or a number
    /// of CPU threads); reads no weights.
    ///
    /// # Errors
    /// When the engine cannot compute with the file.
    pub fn inspect(
        path: &Path,
        compute: impl Into<Compute>,
    ) -> Result<(ModelShape, Header), LoadError> {
        Self::inspect_with(path, None, compute)
    }

    /// As [`Self::inspect`], for a model with a reduced vocabulary.
    ///
    /// # Errors
    /// As [`Self::inspect`].
    pub fn inspect_with(
        path: &Path,
        vocabulary: Option<&Sayable>,
        compute: impl Into<Compute>,
    ) -> Result<(ModelShape, Header), LoadError> {
        let inspected = Self::inspect_drafts(path, vocabulary, compute);
        inspected.map(|(shape, header, _)| (shape, header))
    }

    /// As [`Self::inspect_with`], and returns the fixed memory for drafts.
    pub(crate) fn inspect_drafts(
        path: &Path,
        vocabulary: Option<&Sayable>,
        compute: impl Into<Compute>,
    ) -> Result<(ModelShape, Header, Bytes), LoadError> {
        let device = backend::choose(compute.into()).map_err(|kind| LoadError::new(path, kind))?;
        opening::inspect(device, path, vocabulary, &Disk::default())
    }

    /// Opens the file at `path` and puts `plan` into force.
    ///
    /// # Errors
    /// As [`Self::inspect`], and when weights cannot be read or memory cannot be allocated.
    pub fn open(path: &Path, plan: &EnginePlan, options: &ModelOptions) -> Result<Self, LoadError> {
        let mut model = Self::begin(path, plan, options)?;
        model.settle();
        Ok(model)
    }

    /// As [`Self::open`], but some memory may not be populated yet, see [`Opening::begin`].
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn begin(
        path: &Path,
        plan: &EnginePlan,
        options: &ModelOptions,
    ) -> Result<Self, LoadError> {
        Opening::read(path, options)?.begin(plan)
    }

    /// As [`Self::open`], with each layer and the output head in one part: the baseline for the cost of smaller parts.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_whole(
        path: &Path,
        plan: &EnginePlan,
        options: &ModelOptions,
    ) -> Result<Self, LoadError> {
        let layout = |spec: &Spec| Layout::in_parts(spec, usize::MAX);
        let device = options
            .device()
            .map_err(|kind| LoadError::new(path, kind))?;
        let opening = Opening::on(device, path, options, layout, &Disk::default())?;
        let plan = EnginePlan {
            resident: (0u32..)
                .zip(&opening.layout.parts)
                .map(|(part, _)| part)
                .collect(),
            ..plan.clone()
        };
        let mut model = opening.begin(&plan)?;
        model.settle();
        Ok(model)
    }

    /// Waits until all memory of the plan is populated, and returns heap memory that opening has freed to the system:
    /// afterwards the ledger matches the kernel.
    pub fn settle(&mut self) {
        self.weights.settle();
        self.workspace.touch();
        self.sequence.state.touch_aside();
        if let Some(trial) = &self.sequence.trial {
            trial.memory().touch();
        }
        if self.sequence.position == 0 && !self.sequence.lost {
            self.sequence.state.touch();
        }
        self.backend.trim();
    }

    /// Appends `tokens` to the sequence, in chunks of the plan's `prefill_chunk`, and returns the logits of the last
    /// token.
    ///
    /// # Errors
    /// See [`ForwardError`]; after most of them the sequence is lost.
    pub fn forward(
        &mut self,
        tokens: &[u32],
        checkpoint: &mut dyn Checkpoint,
    ) -> Result<Logits<'_>, ForwardError> {
        let place = self.run(tokens, checkpoint)?;
        let (vocabulary, backend) = (self.spec.vocabulary, self.backend.as_mut());
        let read = pass::result(backend, &self.logits, (vocabulary, 0), place);
        self.sequence.lost |= read.is_err();
        read.map(Logits)
    }

    /// As [`Self::forward`], but returns only the first of the most likely tokens.
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn forward_greedy(
        &mut self,
        tokens: &[u32],
        checkpoint: &mut dyn Checkpoint,
    ) -> Result<u32, ForwardError> {
        let place = self.run(tokens, checkpoint)?;
        let (vocabulary, backend) = (self.spec.vocabulary, self.backend.as_mut());
        let found = pass::greatest(backend, &self.logits, (vocabulary, 0), place);
        self.sequence.lost |= found.is_err();
        found
    }

    /// As [`Self::forward`], but returns the last token's state after the output norm: one number for each of the
    /// model's width.
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn forward_state(
        &mut self,
        tokens: &[u32],
        checkpoint: &mut dyn Checkpoint,
    ) -> Result<&[f32], ForwardError> {
        let (first, row) = self.run(tokens, checkpoint)?;
        let (vocabulary, backend) = (self.spec.vocabulary, self.backend.as_mut());
        pass::result(backend, &self.logits, (vocabulary, 0), (first, row))?;
        let (at, width) = (row as usize * self.spec.width, self.spec.width);
        Ok(backend.read(&self.workspace.normed, at..at + width)?)
    }

    /// Appends `tokens`; returns the first position of the last chunk, and the row of the last token in it.
    fn run(
        &mut self,
        tokens: &[u32],
        checkpoint: &mut dyn Checkpoint,
    ) -> Result<(u32, u32), ForwardError> {
        let first = pass::run(self, tokens, checkpoint, None)?;
        let length = self.sequence.position.saturating_sub(first);
        Ok((first, length.saturating_sub(1)))
    }

    /// As [`Self::forward`], and passes the logits of every token to `each` with its index in `tokens`.
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn forward_all(
        &mut self,
        tokens: &[u32],
        checkpoint: &mut dyn Checkpoint,
        each: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<(), ForwardError> {
        pass::run(self, tokens, checkpoint, Some(each)).map(drop)
    }

    /// Maximum number of answers computed together, with the present chunk size.
    pub fn answers_max(&self) -> usize {
        shape::ANSWERS_MAX.min(self.rows_max())
    }

    /// Maximum number of tokens in one pass, with the present chunk size.
    pub fn rows_max(&self) -> usize {
        // A later layer attends to the window of the first row after that of the last one was written.
        let spec = &self.spec;
        let mut borrowing = spec.layers.iter().filter(|layer| layer.borrows);
        match borrowing.any(|layer| spec.window(layer).is_some()) {
            true => self.workspace.chunk().min(shape::WINDOW_ROWS),
            false => self.workspace.chunk(),
        }
    }

    /// Begins to read which conversations are saved in the folder at `path`, and keeps further ones there.
    ///
    /// # Errors
    /// When no thread can be started, or the files of the model cannot be recognised by a later run.
    pub fn open_saved(&mut self, path: &Path) -> io::Result<()> {
        let files = self.weights.source().identity();
        let files = files.ok_or_else(|| io::Error::other("the model's files were not sampled"))?;
        let factors = self.weights.rope_factors().unwrap_or_default();
        let sizes = (&self.sequence.cache, self.vocabulary());
        self.saved = Some(Saved::start(
            path,
            files,
            factors,
            sizes,
            self.weights.limit(),
        )?);
        Ok(())
    }

    /// Saves the next conversation that is due, including the sequence, whose tokens are `held`; polls `go_on` between
    /// transfers.
    pub fn save_conversation(
        &mut self,
        held: &[u32],
        due: SaveDue,
        go_on: &mut dyn FnMut() -> bool,
    ) -> SaveStep {
        let (saved, memory) = self.saved_and_memory();
        saved.map_or(SaveStep::Waits(None), |saved| {
            saved.save(memory, held, due, go_on)
        })
    }

    /// Begins to read back a saved conversation of which a prompt can reuse more than of those in memory, if that is
    /// faster than computing its tokens in `token` each. Returns whether it has begun: the sequence, whose tokens are
    /// `held`, is parked then, and an empty one begins. `None` while it is not known which conversations there are.
    pub fn begin_reload(
        &mut self,
        held: &[u32],
        asked: Asked<'_>,
        token: Duration,
    ) -> Option<bool> {
        let lost = self.sequence.lost;
        let (saved, memory) = self.saved_and_memory();
        let begun = saved.map_or(Some(false), |saved| {
            let is_known = !saved.is_opening();
            is_known.then(|| saved.begin_reload(memory, held, asked, token))
        });
        if begun == Some(true) && lost {
            self.restart_stream();
        }
        begun
    }

    /// Begins to read the most recent conversation that an earlier run has saved and that fits in free capacity; `held`
    /// are the tokens of the sequence. Returns whether it has begun, `None` while it is not known which there are.
    pub fn begin_read_ahead(&mut self, held: &[u32]) -> Option<bool> {
        let (saved, memory) = self.saved_and_memory();
        saved.map_or(Some(false), |saved| saved.begin_read_ahead(memory, held))
    }

    /// Continues a reload, for which it waits at most `patience`; returns whether it is still in progress.
    pub fn reload(&mut self, patience: Duration) -> bool {
        let (saved, memory) = self.saved_and_memory();
        saved.is_some_and(|saved| saved.go_on(memory, patience))
    }

    /// Ends a reload. Of a conversation that can be cut back anywhere, the tokens read so far stay.
    pub fn end_reload(&mut self) {
        let (saved, memory) = self.saved_and_memory();
        if let Some(saved) = saved {
            saved.end(memory.sequence);
        }
    }

    fn saved_and_memory(&mut self) -> (Option<&mut Saved>, Memory<'_>) {
        let memory = Memory {
            sequence: &mut self.sequence,
            backend: self.backend.as_mut(),
        };
        (self.saved.as_mut(), memory)
    }

    /// Experts of a mixture.
    pub fn expert_counts(&self) -> Option<ExpertCounts> {
        self.weights.experts().map(Experts::counts)
    }

    /// Parked conversations, in the order in which they were parked.
    pub fn kept_conversations(&self) -> Vec<Kept> {
        let mut kept = self.sequence.kept_conversations();
        if let Some(saved) = &self.saved {
            saved.note_kept(&mut kept, &self.sequence);
        }
        kept
    }

    /// Saved conversations; `held` are the tokens of the sequence.
    pub fn saved_view(&self, held: &[u32]) -> SavedView {
        let client = self.sequence.conversation.client.as_deref();
        let saved = self.saved.as_ref();
        saved.map_or_else(SavedView::default, |saved| saved.view(client, held))
    }

    /// Makes the sequence, whose tokens are `held`, a lane that is computed beside others, and begins a new sequence.
    /// Returns `None` if the model cannot do that now.
    pub fn set_aside(&mut self, held: &[u32]) -> Option<Lane> {
        self.sequence.set_aside(self.backend.as_mut(), held)
    }

    /// KV capacity, in tokens, that a lane takes beyond that of its tokens.
    pub fn aside_takes(&self) -> Tokens {
        Tokens::new(self.sequence.aside_takes())
    }

    /// Whether a lane cannot continue: a change of KV type or an incomplete pass has destroyed its state.
    pub fn is_lost(&self, lane: Lane) -> bool {
        self.sequence.is_lost(lane)
    }

    /// Maximum number of the sequence's tokens in the next pass.
    pub fn slice_max(&self) -> usize {
        let left = self.sequence.until_mark(self.streams());
        left.map_or(usize::MAX, |left| left.max(1))
            .min(self.rows_max())
    }

    /// Makes a lane the sequence; the previous sequence, whose tokens are `held`, is parked. Returns the lane's tokens.
    pub fn resume(&mut self, held: &[u32], lane: Lane) -> Option<Vec<u32>> {
        self.sequence.resume(self.backend.as_mut(), held, lane)
    }

    /// Ends the answer of a lane, which becomes a parked conversation.
    pub fn leave(&mut self, lane: Lane) {
        self.sequence.leave(lane);
    }

    /// Reserves blocks for `tokens` more tokens of a lane, beside all others; returns whether there are enough.
    pub fn make_places(&mut self, lane: Lane, tokens: u32) -> bool {
        let kept = self.sequence.kept();
        self.sequence.make_places([(lane, tokens)], kept)
    }

    /// Appends the tokens of `spans` to their conversations in one pass: at most a chunk of the plan, and at most
    /// [`Self::answers_max`] results. [`Self::logits_of`] and [`Self::greatest_of`] read the results in the order of
    /// the spans.
    ///
    /// # Errors
    /// As [`Self::forward`]; after any of them nothing was appended, and a sequence with a span is lost.
    pub fn forward_together(
        &mut self,
        spans: &[Span<'_>],
        checkpoint: &mut dyn Checkpoint,
    ) -> Result<(), ForwardError> {
        pass::run_together(self, spans, checkpoint)
    }

    /// Returns the logits of result `number` of the last pass, of a token at `position` of its conversation.
    ///
    /// # Errors
    /// When they are not finite, or the device has failed.
    pub fn logits_of(&mut self, number: usize, position: u32) -> Result<Logits<'_>, ForwardError> {
        let (vocabulary, backend) = (self.spec.vocabulary, self.backend.as_mut());
        pass::result(backend, &self.logits, (vocabulary, number), (position, 0)).map(Logits)
    }

    /// Returns the first of the most likely tokens of result `number` of the last pass.
    ///
    /// # Errors
    /// As [`Self::logits_of`].
    pub fn greatest_of(&mut self, number: usize, position: u32) -> Result<u32, ForwardError> {
        let (vocabulary, backend) = (self.spec.vocabulary, self.backend.as_mut());
        pass::greatest(backend, &self.logits, (vocabulary, number), (position, 0))
    }

    /// Whether the last tokens of the sequence can be removed after a pass in which all of them had results.
    pub fn takes_back(&self) -> bool {
        self.sequence.takes_back()
    }

    /// Drafts up to `most` tokens that may follow `tokens`, the sequence and the token after it, by the draft block. Returns
    /// none if the block is not in memory, or if the state before them is not known; fewer if `go_on`, polled after each,
    /// is false.
    ///
    /// # Errors
    /// As [`Self::forward`]; the sequence stays.
    pub fn draft(
        &mut self,
        tokens: &[u32],
        most: usize,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<Vec<u32>, ForwardError> {
        draft::draft(self, tokens, most, go_on)
    }

    /// Whether [`Self::draft`] may return tokens under the present plan.
    pub fn drafts(&self) -> bool {
        draft::is_ready(self)
    }

    /// Removes the last tokens of a lane, or of the sequence; the others of a draft are accepted.
    pub fn take_back(&mut self, lane: Option<Lane>, tokens: u32) {
        self.sequence.take_back(lane, tokens);
        let tried = self.sequence.trial.as_ref().map_or(0, |trial| trial.rows);
        if lane.is_none() && tried > 0 {
            let accepted = trial::accept(self, tried.saturating_sub(tokens as usize));
            self.sequence.note(accepted);
        }
    }

    /// As [`Self::kv_precision`], of a lane.
    pub fn kv_precision_of(&self, lane: Lane) -> Option<KvType> {
        self.sequence.precision_of(lane)
    }

    /// KV capacity, in tokens, that the sequence and all lanes take.
    pub fn held(&self) -> Tokens {
        Tokens::new(self.sequence.held(self.sequence.kept()))
    }

    /// Reserves blocks for a sequence that a prompt read in several passes extends to `tokens` tokens; 0 ends the
    /// reservation once it has been read.
    pub fn expect(&mut self, tokens: u32) {
        self.sequence.expect(self.backend.as_mut(), tokens);
    }

    /// Puts `plan` into force between two tokens: releases first, then grows.
    ///
    /// A KV capacity below the use of the sequence is raised to it; the report says so.
    ///
    /// # Errors
    /// When the plan is invalid, memory cannot be allocated, or weights cannot be read. Changes made by then remain;
    /// [`Self::plan`] is the plan in force.
    pub fn apply(&mut self, plan: &EnginePlan) -> Result<ApplyReport, ApplyError> {
        self.apply_until(plan, &mut || false)
    }

    /// As [`Self::apply`], but growth that takes long is preempted by other `wanted` work and keeps the parts read by
    /// then: the report contains the plan in force.
    ///
    /// # Errors
    /// As [`Self::apply`].
    pub fn apply_until(
        &mut self,
        plan: &EnginePlan,
        wanted: &mut dyn FnMut() -> bool,
    ) -> Result<ApplyReport, ApplyError> {
        residency::apply(self, plan, wanted)
    }

    /// Drops the sequence; memory of the plan stays.
    pub fn reset(&mut self) {
        let lost = self.sequence.lost;
        self.sequence.reset(self.backend.as_mut());
        if lost {
            self.restart_stream();
        }
    }

    /// Cuts the sequence back to its longest usable prefix of at most `tokens` tokens, and returns the length. The
    /// result is empty for a lost sequence, and for one whose tokens were once stored in a smaller KV type than the
    /// present one.
    pub fn keep(&mut self, tokens: u32) -> u32 {
        let lost = self.sequence.lost;
        self.sequence.keep(self.backend.as_mut(), tokens);
        if lost {
            self.restart_stream();
        }
        self.sequence.position
    }

    /// Makes the conversation with the longest common prefix with a prompt the sequence; the previous sequence, whose
    /// tokens are `held`, is parked until its blocks are needed.
    pub fn select(&mut self, held: &[u32], asked: Asked<'_>) -> Selected {
        let lost = self.sequence.lost;
        let fork = self.sequence.select(self.backend.as_mut(), held, asked);
        if let Some(draft) = &mut self.draft {
            draft.forget();
        }
        if lost {
            self.restart_stream();
        }
        Selected {
            kept: self.sequence.position,
            fork,
        }
    }

    /// Recovers the usable prefix of a sequence whose last pass was cancelled, and returns its length. After other
    /// failures, [`Self::reset`].
    pub fn recover(&mut self) -> u32 {
        if self.sequence.lost {
            // The readers may have stopped in the middle of a pass.
            self.restart_stream();
            self.sequence.recover(self.backend.as_mut());
        }
        self.sequence.position
    }

    /// Marks the sequence when the next pass reaches `end`, where the next prompt is likely to diverge from this one.
    /// With streamed layers the mark is at the last end of a chunk before it, since another chunk would read the layers
    /// once more.
    pub fn mark_at(&mut self, end: u32) {
        self.sequence.mark_at(end);
    }

    /// Marks the sequence when the next pass reaches `position`, where its prompt diverges from another conversation,
    /// unless an existing mark serves.
    pub fn fork_at(&mut self, position: u32) {
        self.sequence.marks.want_fork(position);
    }

    /// Allows or forbids dropping the oldest tokens after the first `sinks` when the KV capacity is used up or shrinks.
    /// `sinks` is rounded up to whole KV blocks.
    pub const fn allow_dropping(&mut self, sinks: Option<Tokens>) {
        self.sequence.dropped.sinks = match sinks {
            Some(sinks) => Some(sinks.get()),
            None => None,
        };
    }

    /// Drops the oldest block to make room; returns the number of tokens dropped, 0 if dropping is not allowed.
    pub fn make_room(&mut self) -> Tokens {
        let turn = (&self.spec.attention, self.weights.rope_factors());
        let used = self.sequence.position;
        Tokens::new(self.sequence.drop_oldest(turn, 1, used))
    }

    /// Computes one token and refuses weights that give no usable result. Leaves an empty sequence.
    ///
    /// # Errors
    /// [`LoadErrorKind::Damaged`], and when weights cannot be read.
    pub fn prove(&mut self) -> Result<(), LoadErrorKind> {
        damage::prove(self)
    }

    /// Refuses a file that ends in zeros, see [`LoadErrorKind::Damaged`].
    ///
    /// # Errors
    /// When the file is damaged so, or cannot be read.
    pub fn refuse_zeros(header: &Header) -> Result<(), LoadErrorKind> {
        let file = WeightFile::open(header.parts()).map_err(LoadErrorKind::Open)?;
        damage::refuse_zeros(header, &file, &DiskWatch::default())
    }

    /// Measures the speed of computing and reading, separately and together: for about a second, or a few tokens if
    /// these take long. Polls `go_on` between layers. Leaves the plan in force, and an empty sequence.
    ///
    /// If all parts are resident, it releases parts of the ring's size meanwhile, so that it needs no more memory.
    ///
    /// Returns `None` when cancelled, or if a sequence is in progress or the plan has no room for one.
    ///
    /// # Errors
    /// When the released parts cannot be read again: they stay out, and the plan in force says so.
    pub fn calibrate(
        &mut self,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<Option<Calibration>, ApplyError> {
        calibrate::calibrate(self, go_on)
    }

    /// Measures the time of each part per token, in the order of the parts. Returns `None` as
    /// [`calibrate`](Self::calibrate) does, and if a part is streamed.
    pub fn part_times(&mut self, go_on: &mut dyn FnMut() -> bool) -> Option<Vec<PartTime>> {
        calibrate::part_times(self, go_on)
    }
}
