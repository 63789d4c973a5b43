//! Operations of a model: opening, computing, changing its plan, and what becomes of its sequence.

use std::path::Path;

use super::{
    batch::Span,
    calibrate::{self, PartTime},
    damage,
    loaded::{Logits, Model, ModelOptions, Scores},
    opening::{self, Disk, Opening},
    parked::{Asked, Kept, Lane, Selected},
    pass, residency,
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
    streaming::Calibration,
};
use cotenant_units::Tokens;

impl Model {
    /// Reads the header of the file at `path` and computes what each piece will occupy on what is to compute, or with so many threads
    /// of the CPU; no weights are read.
    ///
    /// # Errors
    /// When the file is not a model that the engine can compute with.
    pub fn inspect(
        path: &Path,
        compute: impl Into<Compute>,
    ) -> Result<(ModelShape, Header), LoadError> {
        Self::inspect_with(path, None, compute)
    }

    /// As [`Self::inspect`], for a model that may say some tokens only.
    ///
    /// # Errors
    /// As there.
    pub fn inspect_with(
        path: &Path,
        vocabulary: Option<&Sayable>,
        compute: impl Into<Compute>,
    ) -> Result<(ModelShape, Header), LoadError> {
        let device = backend::choose(compute.into()).map_err(|kind| LoadError::new(path, kind))?;
        opening::inspect(device, path, vocabulary, &Disk::default())
    }

    /// Opens the file at `path` and puts `plan` into force.
    ///
    /// # Errors
    /// As [`Self::inspect`], and when weights cannot be read or memory cannot be had.
    pub fn open(path: &Path, plan: &EnginePlan, options: &ModelOptions) -> Result<Self, LoadError> {
        let mut model = Self::begin(path, plan, options)?;
        model.settle();
        Ok(model)
    }

    /// As [`Self::open`], but for memory that may still be found, see [`Opening::begin`].
    ///
    /// # Errors
    /// As there.
    pub fn begin(
        path: &Path,
        plan: &EnginePlan,
        options: &ModelOptions,
    ) -> Result<Self, LoadError> {
        Opening::read(path, options)?.begin(plan)
    }

    /// As [`Self::open`], with each layer and the output head in one part: what the finer parts cost is measured by it.
    ///
    /// # Errors
    /// As there.
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

    /// Waits until all that the plan holds is in memory, and gives back what opening has left free on the heap: then the book
    /// says what the kernel does.
    pub fn settle(&mut self) {
        self.weights.settle();
        self.workspace.touch();
        self.sequence.state.touch_aside();
        if self.sequence.position == 0 && !self.sequence.lost {
            self.sequence.state.touch();
        }
        self.backend.trim();
    }

    /// Appends `tokens` to the sequence, in chunks of the plan's `prefill_chunk`, and returns the logits of the last one.
    ///
    /// # Errors
    /// See [`ForwardError`]; after most of them the sequence is lost.
    pub fn forward(
        &mut self,
        tokens: &[u32],
        checkpoint: &mut dyn Checkpoint,
    ) -> Result<Logits<'_>, ForwardError> {
        let first = pass::run(self, tokens, checkpoint, None)?;
        let row = self
            .sequence
            .position
            .saturating_sub(first)
            .saturating_sub(1);
        let read = pass::result(
            self.backend.as_mut(),
            &self.logits,
            self.spec.vocabulary,
            (first, row),
        );
        match read {
            Ok(logits) => Ok(Logits(logits)),
            Err(error) => {
                self.sequence.lost = true;
                Err(error)
            }
        }
    }

    /// As [`Self::forward`], returning the first of the most likely tokens alone where a device finds it: then nothing else is read.
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn forward_greedy(
        &mut self,
        tokens: &[u32],
        checkpoint: &mut dyn Checkpoint,
    ) -> Result<Scores<'_>, ForwardError> {
        let first = pass::run(self, tokens, checkpoint, None)?;
        let row = self
            .sequence
            .position
            .saturating_sub(first)
            .saturating_sub(1);
        let (vocabulary, backend) = (self.spec.vocabulary, self.backend.as_mut());
        match pass::greatest(backend, &self.logits, (vocabulary, 0), (first, row)) {
            Ok(Some(token)) => Ok(Scores::Greatest(token)),
            Ok(None) => {
                let logits = pass::result(backend, &self.logits, vocabulary, (first, row));
                logits.map(|logits| Scores::All(Logits(logits)))
            }
            Err(error) => {
                self.sequence.lost = true;
                Err(error)
            }
        }
    }

    /// As [`Self::forward`], handing the logits of every token to `each` with its index in `tokens`.
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

    /// How many answers may be computed together, with the present chunk size.
    #[must_use]
    pub fn answers_max(&self) -> usize {
        shape::ANSWERS_MAX.min(self.workspace.chunk())
    }

    /// How many tokens may be computed in one pass, with the present chunk size.
    #[must_use]
    pub const fn rows_max(&self) -> usize {
        self.workspace.chunk()
    }

    /// The conversations that are parked beside the sequence, in the order in which they were.
    #[must_use]
    pub fn kept_conversations(&self) -> Vec<Kept> {
        self.sequence.kept_conversations()
    }

    /// Sets the sequence, which has the tokens `held`, aside, to go on with it beside others; a new one begins. `None` where the
    /// model cannot do that.
    pub fn set_aside(&mut self, held: &[u32]) -> Option<Lane> {
        self.sequence.set_aside(self.backend.as_mut(), held)
    }

    /// Tokens of capacity that setting a conversation aside takes beside those of its tokens.
    #[must_use]
    pub fn aside_takes(&self) -> Tokens {
        Tokens::new(self.sequence.aside_takes())
    }

    /// Whether one that was set aside cannot be gone on with: another KV type, or a pass that did not finish, has taken its state.
    #[must_use]
    pub fn is_lost(&self, lane: Lane) -> bool {
        self.sequence.is_lost(lane)
    }

    /// How many tokens of the sequence the next pass may have at most.
    #[must_use]
    pub fn slice_max(&self) -> usize {
        let left = self.sequence.until_mark(self.streams());
        left.map_or(usize::MAX, |left| left.max(1))
            .min(self.rows_max())
    }

    /// One that was set aside becomes the sequence; the one until then, with the tokens `held`, stays as a conversation that may be
    /// gone on with. Returns its tokens.
    pub fn resume(&mut self, held: &[u32], lane: Lane) -> Option<Vec<u32>> {
        self.sequence.resume(self.backend.as_mut(), held, lane)
    }

    /// The answer of one that was set aside is over: it stays as a conversation that may be gone on with.
    pub fn leave(&mut self, lane: Lane) {
        self.sequence.leave(lane);
    }

    /// Finds places for so many more tokens of one that was set aside, beside all others; says whether there are.
    pub fn make_places(&mut self, lane: Lane, tokens: u32) -> bool {
        let kept = self.sequence.kept();
        self.sequence.make_places([(lane, tokens)], kept)
    }

    /// Appends the tokens of some spans to their conversations in one pass: a chunk of the plan at most, and
    /// [`Self::answers_max`] results, which are read by [`Self::logits_of`] or [`Self::greatest_of`] in the order of the spans.
    ///
    /// # Errors
    /// As [`Self::forward`]; after any of them nothing was appended, and a sequence that has a span is lost.
    pub fn forward_together(
        &mut self,
        spans: &[Span<'_>],
        checkpoint: &mut dyn Checkpoint,
    ) -> Result<(), ForwardError> {
        pass::run_together(self, spans, checkpoint)
    }

    /// The logits of one of the results of the last pass, of a token at `position` of its conversation.
    ///
    /// # Errors
    /// When they are not finite, or the device has failed.
    pub fn logits_of(&mut self, number: usize, position: u32) -> Result<Logits<'_>, ForwardError> {
        let (vocabulary, backend) = (self.spec.vocabulary, self.backend.as_mut());
        pass::result_of(backend, &self.logits, (vocabulary, number), position).map(Logits)
    }

    /// The first of the most likely tokens by one of the results of the last pass, where the device finds it; otherwise its logits.
    ///
    /// # Errors
    /// As [`Self::logits_of`].
    pub fn greatest_of(
        &mut self,
        number: usize,
        position: u32,
    ) -> Result<Scores<'_>, ForwardError> {
        let (vocabulary, backend) = (self.spec.vocabulary, self.backend.as_mut());
        let found = pass::greatest(backend, &self.logits, (vocabulary, number), (position, 0))?;
        match found {
            Some(token) => Ok(Scores::Greatest(token)),
            None => self.logits_of(number, position).map(Scores::All),
        }
    }

    /// Takes back the last tokens of one that was set aside, or of the sequence.
    pub fn take_back(&mut self, lane: Option<Lane>, tokens: u32) {
        self.sequence.take_back(lane, tokens);
    }

    /// As [`Self::kv_precision`], of one that was set aside.
    #[must_use]
    pub fn kv_precision_of(&self, lane: Lane) -> Option<KvType> {
        self.sequence.precision_of(lane)
    }

    /// Tokens of the capacity that the sequence takes, with those whose answers are under way beside it.
    #[must_use]
    pub fn held(&self) -> Tokens {
        Tokens::new(self.sequence.held(self.sequence.kept()))
    }

    /// Keeps places for a prompt that the sequence comes to so many tokens by, and that is read in several passes; for none
    /// once it has been read.
    pub fn expect(&mut self, tokens: u32) {
        self.sequence.expect(self.backend.as_mut(), tokens);
    }

    /// Puts `plan` into force between two tokens: releases first, then grows.
    ///
    /// A KV capacity below what the sequence uses is raised to it; the report says so.
    ///
    /// # Errors
    /// When the plan makes no sense, memory cannot be had, or weights cannot be read. What was done until then stays
    /// done, and [`Self::plan`] says what is in force.
    pub fn apply(&mut self, plan: &EnginePlan) -> Result<ApplyReport, ApplyError> {
        self.apply_until(plan, &mut || false)
    }

    /// As [`Self::apply`]; when growing takes long, it ends for whatever else is `wanted`, with the parts that it has by
    /// then: the report says which plan is in force.
    ///
    /// # Errors
    /// As there.
    pub fn apply_until(
        &mut self,
        plan: &EnginePlan,
        wanted: &mut dyn FnMut() -> bool,
    ) -> Result<ApplyReport, ApplyError> {
        residency::apply(self, plan, wanted)
    }

    /// Drops the sequence; what the plan holds stays.
    pub fn reset(&mut self) {
        let lost = self.sequence.lost;
        self.sequence.reset(self.backend.as_mut());
        if lost {
            self.restart_stream();
        }
    }

    /// Cuts the sequence back to the longest beginning of at most `tokens` tokens that can be gone on from; returns its
    /// length. Nothing is left of a sequence that was lost, nor of one that is kept in a larger type than it has been
    /// converted to before.
    pub fn keep(&mut self, tokens: u32) -> u32 {
        let lost = self.sequence.lost;
        self.sequence.keep(self.backend.as_mut(), tokens);
        if lost {
            self.restart_stream();
        }
        self.sequence.position
    }

    /// The conversation that has the most in common with a prompt becomes the sequence; the one until then, whose tokens are
    /// `held`, stays beside it as long as no other tokens need its place.
    pub fn select(&mut self, held: &[u32], asked: Asked<'_>) -> Selected {
        let lost = self.sequence.lost;
        let fork = self.sequence.select(self.backend.as_mut(), held, asked);
        if lost {
            self.restart_stream();
        }
        Selected {
            kept: self.sequence.position,
            fork,
        }
    }

    /// Takes up a sequence whose last pass was broken off, as far as it can be gone on from, and returns its length.
    /// What failed in another way is to be [`Self::reset`].
    pub fn recover(&mut self) -> u32 {
        if self.sequence.lost {
            // The readers may have been left in the middle of a pass.
            self.restart_stream();
            self.sequence.recover(self.backend.as_mut());
        }
        self.sequence.position
    }

    /// Marks the sequence when the next pass comes by `position`; with streamed layers where a chunk ends before it, since
    /// another chunk would read them once more.
    pub fn mark_at(&mut self, position: u32) {
        self.sequence.mark_at(position);
    }

    /// Marks the sequence when the next pass comes by `position`, where its prompt parts from another conversation, unless
    /// there is a mark that serves as well.
    pub fn fork_at(&mut self, position: u32) {
        self.sequence.marks.want_fork(position);
    }

    /// Allows that the oldest tokens behind the first `sinks` are dropped where the KV capacity is used up or becomes
    /// smaller, or forbids it. The first ones are rounded up to whole KV blocks.
    pub const fn allow_dropping(&mut self, sinks: Option<Tokens>) {
        self.sequence.dropped.sinks = match sinks {
            Some(sinks) => Some(sinks.get()),
            None => None,
        };
    }

    /// Drops the oldest block, to make room for more; returns how many tokens it held, none where it may not be.
    pub fn make_room(&mut self) -> Tokens {
        let turn = (&self.spec.attention, self.weights.rope_factors());
        let used = self.sequence.position;
        Tokens::new(self.sequence.drop_oldest(turn, 1, used))
    }

    /// Computes one token, and refuses weights with which that gives no result. Leaves an empty sequence.
    ///
    /// # Errors
    /// [`LoadErrorKind::Damaged`], and when they cannot be read.
    pub fn prove(&mut self) -> Result<(), LoadErrorKind> {
        damage::prove(self)
    }

    /// Refuses a file that ends in zeros, see [`LoadErrorKind::Damaged`].
    ///
    /// # Errors
    /// When it does, or cannot be read.
    pub fn refuse_zeros(header: &Header) -> Result<(), LoadErrorKind> {
        let file = WeightFile::open(header.parts()).map_err(LoadErrorKind::Open)?;
        damage::refuse_zeros(header, &file, &DiskWatch::default())
    }

    /// Measures how fast it computes and reads, alone and at the same time: about a second, or a few tokens where they
    /// take long. `go_on` is asked between layers. Leaves the plan in force as it was, and an empty sequence.
    ///
    /// When all is resident, parts that hold as much as the ring are given up meanwhile: it takes no more memory.
    ///
    /// `None` when it was broken off, or cannot be done: a sequence is under way, or the plan has no room for one.
    ///
    /// # Errors
    /// When the parts cannot be had again: they stay out, and the plan in force says so.
    pub fn calibrate(
        &mut self,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<Option<Calibration>, ApplyError> {
        calibrate::calibrate(self, go_on)
    }

    /// Measures what each part of the model takes of one token, in the order of the parts. `None` as for
    /// [`calibrate`](Self::calibrate), and where a part is streamed.
    pub fn part_times(&mut self, go_on: &mut dyn FnMut() -> bool) -> Option<Vec<PartTime>> {
        calibrate::part_times(self, go_on)
    }
}
