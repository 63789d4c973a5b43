//! What the thread needs of a model: the seam between answering requests and computing tokens.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    thread,
};

use super::{
    ApplyError, ApplyReport, Breakdown, Flow, ForwardError, Header, LoadError, LoadErrorKind, Model, ModelOptions,
    helper::{self, Helper},
    model::{Checkpoint, Opening},
    reader::Left,
    sayable::Sayable,
    spec,
    text::{TextError, TextSide},
    thread::{Inspected, OpenError, Opened},
    tokenizer::Tokenizer,
};
use crate::{
    policy::{
        kv_type::KvType,
        residency::{EnginePlan, ModelShape},
        streaming::Calibration,
    },
    units::{Bytes, Tokens},
};

/// A model with one sequence. GGUF files are opened as one; tests have others, which break down at will.
pub trait LanguageModel {
    /// Appends `tokens` to the sequence and puts the scores of the token after them into `logits`.
    ///
    /// The scores depend on the sequence alone: not on plans, nor on how the sequence was cut into calls.
    ///
    /// # Errors
    ///
    /// See [`ForwardError`].
    fn forward(
        &mut self,
        tokens: &[u32],
        checkpoint: &mut dyn Checkpoint,
        logits: &mut Vec<f32>,
    ) -> Result<(), ForwardError>;

    /// Puts a plan into force between two tokens.
    ///
    /// # Errors
    ///
    /// See [`ApplyError`].
    fn apply(&mut self, plan: &EnginePlan) -> Result<ApplyReport, ApplyError>;

    /// As [`Self::apply`]; when growing takes long, it ends with what there is for whatever else is `wanted`.
    ///
    /// # Errors
    ///
    /// See [`ApplyError`].
    fn apply_until(&mut self, plan: &EnginePlan, wanted: &mut dyn FnMut() -> bool) -> Result<ApplyReport, ApplyError> {
        let _ = wanted;
        self.apply(plan)
    }

    /// Measures what it can do; `go_on` is asked between layers. `None` where that says nothing, or was broken off.
    ///
    /// # Errors
    ///
    /// When less is in force afterwards: what had been given up for it could not be had again.
    fn calibrate(&mut self, go_on: &mut dyn FnMut() -> bool) -> Result<Option<Calibration>, ApplyError> {
        let _ = go_on;
        Ok(None)
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

    /// Takes up a sequence whose last pass was broken off, as far as it can be gone on from; returns its length.
    fn recover(&mut self) -> u32 {
        self.reset();
        0
    }

    /// Marks a place that the next pass comes by, so that the sequence can be cut back to it as long as there is room for
    /// what that takes; for models that cannot be cut back anywhere.
    fn mark_at(&mut self, _position: u32) {}

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

    /// The smallest type that any token of the sequence has been kept in.
    fn kv_precision(&self) -> KvType {
        self.plan().kv_type
    }

    /// Everything that is held now.
    fn breakdown(&self) -> Breakdown;

    /// How much of what is held nobody has touched yet.
    fn untouched(&self) -> Bytes {
        Bytes::ZERO
    }

    /// How much of what is held was given up, and is kept by reads that hang until they return.
    fn left(&self) -> Bytes {
        Bytes::ZERO
    }

    /// What reads that hang may keep when all of it is given up now.
    fn kept(&self) -> Left {
        Left::default()
    }
}

/// The model for which the next plan to load by was made, as it was inspected: a file that holds another one by then is not
/// loaded by it. Any model, while nothing is set.
#[derive(Clone, Debug, Default)]
pub struct Expected(Arc<Mutex<Option<ModelShape>>>);

impl Expected {
    /// From now on it is this one.
    pub fn set(&self, shape: Option<ModelShape>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = shape;
    }

    /// Whether `found` is it, whatever they are called.
    fn is(&self, found: &ModelShape) -> bool {
        let expected = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        expected.as_ref().is_none_or(|expected| {
            let named = ModelShape {
                name: found.name.clone(),
                ..expected.clone()
            };
            named == *found
        })
    }
}

/// A GGUF model with what its tokenizer holds on the book.
///
/// The library's tables are a good part of what a small model holds (some 33 MiB for 152 000 tokens), and the model
/// itself does not know of them.
pub(super) struct Spoken {
    model: Model,
    shape: ModelShape,
    /// What the tokenizer's tables hold.
    tables: Bytes,
    helper: Arc<Helper>,
}

impl Spoken {
    /// What a file's model occupies, its text side included; refuses what could not be opened for its header.
    pub(super) fn inspect(path: &Path, vocabulary: Option<&Sayable>, threads: usize) -> Result<Inspected, OpenError> {
        let (shape, header) = Model::inspect_with(path, vocabulary, threads)?;
        Tokenizer::check(&header).map_err(|error| OpenError::text(path, error.into()))?;
        Ok(Inspected {
            shape: with_text(shape, text_bytes(&header)),
            skipped_blocks: spec::skipped_blocks(&header),
        })
    }

    /// Opens a file with a first plan, made for the model that is `expected`.
    pub(super) fn open(
        path: &Path,
        plan: &EnginePlan,
        options: &ModelOptions,
        expected: &Expected,
    ) -> Result<Opened, OpenError> {
        let opening = Opening::read(path, options)?;
        let (leased, tables) = (text_bytes(opening.header()), tables_bytes(opening.header()));
        let found = with_text(opening.shape().clone(), leased);
        if !expected.is(&found) {
            return Err(LoadError::new(path, LoadErrorKind::Replaced).into());
        }
        let (model, text) = Self::begin(opening, plan, options.helper.as_ref());
        let mut model = model?;
        let text = match text {
            Ok(text) => text,
            Err(error) => {
                let left = model.kept();
                drop(model);
                return Err(OpenError::text(path, error).leaving(left));
            }
        };
        model.forget_lists();
        model.settle();
        // What the form of an answer needs is leased from the start, and made when it is first asked for.
        let shape = with_text(model.shape().clone(), leased);
        Ok(Opened {
            model: Box::new(Self {
                model,
                shape,
                tables,
                helper: text.helper(),
            }),
            text,
        })
    }

    /// Makes the text side while the model begins to read its weights: neither needs the other.
    fn begin(
        opening: Opening,
        plan: &EnginePlan,
        helper: Option<&PathBuf>,
    ) -> (Result<Model, LoadError>, Result<TextSide, TextError>) {
        let (header, context_max) = (Arc::clone(opening.header()), opening.shape().context_max);
        let make = || TextSide::with_helper(&header, context_max, helper.cloned());
        thread::scope(|scope| {
            let thread = thread::Builder::new().name("cotenant-text".to_owned());
            let making = thread.spawn_scoped(scope, make);
            let model = opening.begin(plan);
            let text = match making {
                Ok(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
                Err(_) => make(),
            };
            (model, text)
        })
    }
}

/// What the text side occupies at most: whole pages, as everything on the book.
fn text_bytes(header: &Header) -> Bytes {
    let texts = header.strings("tokenizer.ggml.tokens");
    let (tokens, bytes) = texts.map_or((0, 0), |texts| (texts.len(), texts.iter().map(str::len).sum()));
    Tokenizer::heap_bytes(header)
        .saturating_add(helper::most(tokens, bytes))
        .round_up(Bytes::from_kib(4))
}

/// What the tokenizer of a header holds once it is made, of [`text_bytes`].
fn tables_bytes(header: &Header) -> Bytes {
    Tokenizer::heap_bytes(header).round_up(Bytes::from_kib(4))
}

fn with_text(shape: ModelShape, text_bytes: Bytes) -> ModelShape {
    ModelShape {
        fixed_bytes: shape.fixed_bytes.saturating_add(text_bytes),
        ..shape
    }
}

impl Spoken {
    /// What the text side holds now.
    fn text_held(&self) -> Bytes {
        self.tables.saturating_add(self.helper.held())
    }
}

/// Tells of a model's reports with what the text side holds.
struct WithText<'checkpoint> {
    text: Bytes,
    checkpoint: &'checkpoint mut dyn Checkpoint,
}

impl Checkpoint for WithText<'_> {
    fn poll(&mut self) -> Flow {
        self.checkpoint.poll()
    }

    fn glance(&mut self) -> Flow {
        self.checkpoint.glance()
    }

    fn wanted(&mut self) -> bool {
        self.checkpoint.wanted()
    }

    fn applied(&mut self, result: Result<ApplyReport, ApplyError>) {
        self.checkpoint
            .applied(result.map(|report| with_text_held(report, self.text)));
    }

    fn rechunked(&mut self, report: ApplyReport) {
        self.checkpoint.rechunked(with_text_held(report, self.text));
    }
}

fn with_text_held(report: ApplyReport, text: Bytes) -> ApplyReport {
    ApplyReport {
        held: report.held.saturating_add(text),
        ..report
    }
}

impl LanguageModel for Spoken {
    fn forward(
        &mut self,
        tokens: &[u32],
        checkpoint: &mut dyn Checkpoint,
        logits: &mut Vec<f32>,
    ) -> Result<(), ForwardError> {
        let mut checkpoint = WithText {
            text: self.text_held(),
            checkpoint,
        };
        let computed = self.model.forward(tokens, &mut checkpoint)?;
        logits.clear();
        logits.extend_from_slice(&computed);
        Ok(())
    }

    fn apply(&mut self, plan: &EnginePlan) -> Result<ApplyReport, ApplyError> {
        self.apply_until(plan, &mut || false)
    }

    fn apply_until(&mut self, plan: &EnginePlan, wanted: &mut dyn FnMut() -> bool) -> Result<ApplyReport, ApplyError> {
        let report = self.model.apply_until(plan, wanted)?;
        Ok(with_text_held(report, self.text_held()))
    }

    fn calibrate(&mut self, go_on: &mut dyn FnMut() -> bool) -> Result<Option<Calibration>, ApplyError> {
        self.model.calibrate(go_on)
    }

    fn reset(&mut self) {
        self.model.reset();
    }

    fn keep(&mut self, tokens: u32) -> u32 {
        self.model.keep(tokens)
    }

    fn recover(&mut self) -> u32 {
        self.model.recover()
    }

    fn mark_at(&mut self, position: u32) {
        self.model.mark_at(position);
    }

    fn allow_dropping(&mut self, sinks: Option<Tokens>) {
        self.model.allow_dropping(sinks);
    }

    fn make_room(&mut self) -> Tokens {
        self.model.make_room()
    }

    fn dropped(&self) -> (Tokens, Tokens) {
        self.model.dropped()
    }

    fn droppable(&self) -> Tokens {
        self.model.droppable()
    }

    fn plan(&self) -> &EnginePlan {
        self.model.plan()
    }

    fn shape(&self) -> &ModelShape {
        &self.shape
    }

    fn position(&self) -> u32 {
        self.model.position()
    }

    fn kv_precision(&self) -> KvType {
        self.model.kv_precision()
    }

    fn untouched(&self) -> Bytes {
        self.model.untouched()
    }

    fn left(&self) -> Bytes {
        self.model.left()
    }

    fn kept(&self) -> Left {
        self.model.kept()
    }

    fn breakdown(&self) -> Breakdown {
        let breakdown = self.model.breakdown();
        let text = self.text_held();
        Breakdown {
            header: breakdown.header.saturating_add(text),
            total: breakdown.total.saturating_add(text),
            ..breakdown
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{params::EngineParams, residency::PlanLimits};

    #[test]
    fn what_the_tokenizer_holds_is_in_what_the_engine_says_that_it_holds() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/demo-model/demo.gguf");
        let options = ModelOptions::for_threads(1);
        let shape = Spoken::inspect(&path, None, 1).unwrap().shape;
        let limits = PlanLimits::new(&EngineParams::default(), Tokens::ZERO);
        let plan = shape.floor_plan(&limits);
        let opened = Spoken::open(&path, &plan, &options, &Expected::default()).unwrap();
        let mut alone = Model::open(&path, &plan, &options).unwrap();
        let tables = tables_bytes(alone.header());
        assert!(tables > Bytes::from_kib(64), "{tables}");
        alone.forget_lists();
        alone.settle();
        let held = opened.model.breakdown().total;
        assert_eq!(held.saturating_sub(alone.breakdown().total), tables);
        assert!(held <= shape.plan_bytes(&plan));
    }
}
