//! A GGUF file as a [`LanguageModel`], including the memory of its tokenizer.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::Duration,
};

use super::{
    breakdown::Breakdown,
    chat::without_template,
    disk::Retained,
    error::{ApplyError, ApplyReport, ForwardError, LoadError, LoadErrorKind},
    gguf::Header,
    helper::Helper,
    language_model::{LanguageModel, Opened},
    model::{
        Asked, ExpertCounts, Kept, Lane, Model, ModelOptions, Opening, SaveDue, SaveStep,
        SavedView, Selected, Span,
    },
    preemption::{Checkpoint, Flow},
    protocol::{Expected, Inspected},
    reader::LoadProgress,
    sayable::Sayable,
    spec,
    tensor_group::TensorGroup,
    text::{TextError, TextSide},
    tokenizer::Tokenizer,
};
use cotenant_policy::{
    compute::Compute,
    kv_type::KvType,
    residency::{EnginePlan, LayerKind, ModelShape},
    speed::Calibration,
};
use cotenant_units::{Bytes, Tokens, page};

/// A GGUF model and its tokenizer, whose tables take about 33 MiB for 152 000 tokens.
pub(super) struct GgufModel {
    model: Model,
    shape: ModelShape,
    /// Memory of the tokenizer's tables.
    tables: Bytes,
    helper: Arc<Helper>,
}

impl GgufModel {
    /// Returns the memory layout of a file's model, including its text side; refuses a header that cannot be opened.
    pub(super) fn inspect(
        path: &Path,
        vocabulary: Option<&Sayable>,
        compute: Compute,
    ) -> Result<Inspected, LoadError> {
        let (inspected, header) = Self::read(path, vocabulary, compute)?;
        Tokenizer::check(&header)
            .map_err(|error| LoadError::new(path, TextError::from(error).into()))?;
        Ok(inspected)
    }

    /// As [`Self::inspect`], and refuses a file that [`open`](Self::open) would refuse, as far as this is known without
    /// building the tokenizer, which takes most of a second.
    pub(super) fn foresee(
        path: &Path,
        vocabulary: Option<&Sayable>,
        compute: Compute,
    ) -> Result<Inspected, LoadError> {
        let (inspected, header) = Self::read(path, vocabulary, compute)?;
        Model::refuse_zeros(&header).map_err(|kind| LoadError::new(path, kind))?;
        TextSide::check(&header).map_err(|error| LoadError::new(path, error.into()))?;
        Ok(inspected)
    }

    /// As [`Self::foresee`], and builds tokenizer and template like [`open`](Self::open).
    pub(super) fn check(
        path: &Path,
        vocabulary: Option<&Sayable>,
        compute: Compute,
        helper: Option<PathBuf>,
    ) -> Result<Inspected, LoadError> {
        let (inspected, header) = Self::read(path, vocabulary, compute)?;
        Model::refuse_zeros(&header).map_err(|kind| LoadError::new(path, kind))?;
        TextSide::with_helper(&header, inspected.shape.context_max, helper)
            .map_err(|error| LoadError::new(path, error.into()))?;
        Ok(inspected)
    }

    fn read(
        path: &Path,
        vocabulary: Option<&Sayable>,
        compute: Compute,
    ) -> Result<(Inspected, Header), LoadError> {
        let (shape, header, draft_bytes) = Model::inspect_drafts(path, vocabulary, compute)?;
        let text = TextSide::bytes_max(&header);
        let drafts = shape
            .layers
            .iter()
            .any(|part| part.kind == LayerKind::Draft);
        let inspected = Inspected {
            shape: with_text(shape, text),
            draft_bytes,
            text,
            unused: spec::unused(&header, drafts),
            without_template: without_template(&header),
            tensors: TensorGroup::of(&header),
            file_bytes: header.file_bytes(),
        };
        Ok((inspected, header))
    }

    /// Opens a file with an initial plan, made for the `expected` model.
    pub(super) fn open(
        path: &Path,
        plan: &EnginePlan,
        options: &ModelOptions,
        expected: &Expected,
        progress: &LoadProgress,
    ) -> Result<Opened, LoadError> {
        let opening = Opening::read(path, options)?.counted_by(progress);
        let (leased, tables) = (
            TextSide::bytes_max(opening.header()),
            tables_bytes(opening.header()),
        );
        let found = with_text(opening.shape().clone(), leased);
        if !expected.is(&found) {
            return Err(LoadError::new(path, LoadErrorKind::Replaced));
        }
        let (model, text) = Self::begin(opening, plan, options.helper.as_ref());
        let mut model = model?;
        let text = match text {
            Ok(text) => text,
            Err(error) => {
                let left = model.kept();
                drop(model);
                return Err(LoadError::new(path, error.into()).leaving(left));
            }
        };
        if let Err(kind) = model.prove() {
            let left = model.kept();
            drop(model);
            return Err(LoadError::new(path, kind).leaving(left));
        }
        model.forget_lists();
        model.settle();
        // Memory for the form of an answer is leased from the start, and allocated at first use.
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

    /// Builds the text side while the model begins to read its weights; the two are independent.
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
                Ok(thread) => thread
                    .join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
                Err(_) => make(),
            };
            (model, text)
        })
    }
}

/// Memory of a header's tokenizer, a part of [`TextSide::bytes_max`].
fn tables_bytes(header: &Header) -> Bytes {
    Tokenizer::heap_bytes(header).round_up(page())
}

fn with_text(shape: ModelShape, text_bytes: Bytes) -> ModelShape {
    ModelShape {
        fixed_bytes: shape.fixed_bytes.saturating_add(text_bytes),
        ..shape
    }
}

impl GgufModel {
    /// Memory of the text side now.
    fn text_held(&self) -> Bytes {
        self.tables.saturating_add(self.helper.held())
    }
}

/// Checkpoint that adds the memory of the text side to the model's reports.
struct WithText<'checkpoint> {
    text: Bytes,
    checkpoint: &'checkpoint mut dyn Checkpoint,
}

impl Checkpoint for WithText<'_> {
    fn poll(&mut self) -> Flow {
        self.checkpoint.poll()
    }

    fn poll_in_layer(&mut self) -> Flow {
        self.checkpoint.poll_in_layer()
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

impl LanguageModel for GgufModel {
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

    fn forward_greedy(
        &mut self,
        tokens: &[u32],
        checkpoint: &mut dyn Checkpoint,
        _logits: &mut Vec<f32>,
    ) -> Result<Option<u32>, ForwardError> {
        let mut checkpoint = WithText {
            text: self.text_held(),
            checkpoint,
        };
        self.model.forward_greedy(tokens, &mut checkpoint).map(Some)
    }

    fn refused(&self) -> Option<&str> {
        self.model.refused()
    }

    fn apply(&mut self, plan: &EnginePlan) -> Result<ApplyReport, ApplyError> {
        self.apply_until(plan, &mut || false)
    }

    fn apply_until(
        &mut self,
        plan: &EnginePlan,
        wanted: &mut dyn FnMut() -> bool,
    ) -> Result<ApplyReport, ApplyError> {
        let report = self.model.apply_until(plan, wanted)?;
        Ok(with_text_held(report, self.text_held()))
    }

    fn calibrate(
        &mut self,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<Option<Calibration>, ApplyError> {
        self.model.calibrate(go_on)
    }

    fn can_say(&self, token: u32) -> bool {
        self.model.can_say(token)
    }

    fn reset(&mut self) {
        self.model.reset();
    }

    fn keep(&mut self, tokens: u32) -> u32 {
        self.model.keep(tokens)
    }

    fn select(&mut self, held: &[u32], asked: Asked<'_>) -> Selected {
        self.model.select(held, asked)
    }

    fn answers_max(&self) -> usize {
        self.model.answers_max()
    }

    fn aside_takes(&self) -> Tokens {
        self.model.aside_takes()
    }

    fn is_lost(&self, lane: Lane) -> bool {
        self.model.is_lost(lane)
    }

    fn takes_back(&self) -> bool {
        self.model.takes_back()
    }

    fn drafts(&self) -> bool {
        self.model.drafts()
    }

    fn draft(&mut self, tokens: &[u32], most: usize, go_on: &mut dyn FnMut() -> bool) -> Vec<u32> {
        // A failure ends the draft; what causes it fails the next pass too.
        let drafted = self.model.draft(tokens, most, go_on);
        drafted.unwrap_or_default()
    }

    fn slice_max(&self) -> usize {
        self.model.slice_max()
    }

    fn open_saved(&mut self, path: &Path) -> io::Result<()> {
        self.model.open_saved(path)
    }

    fn save_conversation(
        &mut self,
        held: &[u32],
        due: SaveDue,
        go_on: &mut dyn FnMut() -> bool,
    ) -> SaveStep {
        self.model.save_conversation(held, due, go_on)
    }

    fn begin_reload(&mut self, held: &[u32], asked: Asked<'_>, token: Duration) -> Option<bool> {
        self.model.begin_reload(held, asked, token)
    }

    fn begin_read_ahead(&mut self, held: &[u32]) -> Option<bool> {
        self.model.begin_read_ahead(held)
    }

    fn reload(&mut self, patience: Duration) -> bool {
        self.model.reload(patience)
    }

    fn end_reload(&mut self) {
        self.model.end_reload();
    }

    fn saved_view(&self, held: &[u32]) -> SavedView {
        self.model.saved_view(held)
    }

    fn expert_counts(&self) -> Option<ExpertCounts> {
        self.model.expert_counts()
    }

    fn kept_conversations(&self) -> Vec<Kept> {
        self.model.kept_conversations()
    }

    fn set_aside(&mut self, held: &[u32]) -> Option<Lane> {
        self.model.set_aside(held)
    }

    fn resume(&mut self, held: &[u32], lane: Lane) -> Option<Vec<u32>> {
        self.model.resume(held, lane)
    }

    fn expect(&mut self, tokens: u32) {
        self.model.expect(tokens);
    }

    fn leave(&mut self, lane: Lane) {
        self.model.leave(lane);
    }

    fn make_places(&mut self, lane: Lane, tokens: u32) -> bool {
        self.model.make_places(lane, tokens)
    }

    fn rows_max(&self) -> usize {
        self.model.rows_max()
    }

    fn forward_together(
        &mut self,
        spans: &[Span<'_>],
        checkpoint: &mut dyn Checkpoint,
    ) -> Result<(), ForwardError> {
        let mut checkpoint = WithText {
            checkpoint,
            text: self.text_held(),
        };
        self.model.forward_together(spans, &mut checkpoint)
    }

    fn scores_of(
        &mut self,
        number: usize,
        position: u32,
        logits: &mut Vec<f32>,
    ) -> Result<(), ForwardError> {
        let computed = self.model.logits_of(number, position)?;
        logits.clear();
        logits.extend_from_slice(&computed);
        Ok(())
    }

    fn greatest_of(
        &mut self,
        number: usize,
        position: u32,
        _logits: &mut Vec<f32>,
    ) -> Result<Option<u32>, ForwardError> {
        self.model.greatest_of(number, position).map(Some)
    }

    fn take_back(&mut self, lane: Option<Lane>, tokens: u32) {
        self.model.take_back(lane, tokens);
    }

    fn held(&self) -> Tokens {
        self.model.held()
    }

    fn recover(&mut self) -> u32 {
        self.model.recover()
    }

    fn mark_at(&mut self, end: u32) {
        self.model.mark_at(end);
    }

    fn fork_at(&mut self, position: u32) {
        self.model.fork_at(position);
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

    fn kv_precision(&self, lane: Option<Lane>) -> KvType {
        let lane = lane.and_then(|lane| self.model.kv_precision_of(lane));
        lane.unwrap_or(self.model.kv_precision())
    }

    fn untouched(&self) -> Bytes {
        self.model.untouched()
    }

    fn left(&self) -> Bytes {
        self.model.left()
    }

    fn kept(&self) -> Retained {
        self.model.kept()
    }

    fn backend_name(&self) -> String {
        self.model.backend_name()
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
    use std::{fs, os::unix::fs::FileExt as _};

    use super::*;
    use crate::{
        gguf::GgmlDType,
        spec::Architecture,
        synthetic::{Synthetic, TypeMix},
        weights::Weights as _,
    };
    use cotenant_policy::{engine_failure::Cure, params::EngineParams, residency::PlanLimits};

    #[test]
    fn weights_that_give_no_result_are_refused_with_the_tensor_at_fault() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        let options = ModelOptions::for_threads(1);
        let limits = PlanLimits::new(&EngineParams::default(), Tokens::ZERO);
        let opened = |resident: bool| {
            let shape = GgufModel::inspect(&path, None, 1.into()).unwrap().shape;
            let plan = if resident {
                shape.full_plan(&limits)
            } else {
                shape.floor_plan(&limits)
            };
            GgufModel::open(
                &path,
                &plan,
                &options,
                &Expected::default(),
                &LoadProgress::default(),
            )
            .map(drop)
        };
        for (types, tensor, byte, problem) in [
            (
                GgmlDType::F32,
                "blk.1.ffn_norm.weight",
                0xff,
                "tensor `blk.1.ffn_norm.weight` has values",
            ),
            (
                GgmlDType::Q8_0,
                "blk.0.ffn_down.weight",
                0xff,
                "tensor `blk.0.ffn_down.weight` has values",
            ),
            (
                GgmlDType::F16,
                "blk.1.attn_q.weight",
                0xff,
                "tensor `blk.1.attn_q.weight` has values",
            ),
            (
                GgmlDType::Q8_0,
                "output_norm.weight",
                0,
                "every token is as likely as any other",
            ),
        ] {
            Synthetic::tiny(Architecture::Qwen3, TypeMix::All(types), 7)
                .write(&path)
                .unwrap();
            opened(true).unwrap();
            let header = Model::inspect(&path, 1).unwrap().1;
            let at = header.tensor(tensor).unwrap();
            let bytes = vec![byte; usize::try_from(at.bytes.get()).unwrap()];
            fs::File::options()
                .write(true)
                .open(&path)
                .unwrap()
                .write_all_at(&bytes, at.offset)
                .unwrap();
            for resident in [true, false] {
                let error = opened(resident).unwrap_err();
                assert!(
                    error.kind().to_string().contains(problem),
                    "{:?}",
                    error.kind()
                );
                assert!(
                    matches!(error.cure(), Cure::Change { remedy } if remedy.contains("fetch the file again"))
                );
            }
        }
    }

    #[test]
    fn what_the_tokenizer_holds_is_in_what_the_engine_says_that_it_holds() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/demo-model/demo.gguf");
        let options = ModelOptions::for_threads(1);
        let shape = GgufModel::inspect(&path, None, 1.into()).unwrap().shape;
        let limits = PlanLimits::new(&EngineParams::default(), Tokens::ZERO);
        let plan = shape.floor_plan(&limits);
        let opened = GgufModel::open(
            &path,
            &plan,
            &options,
            &Expected::default(),
            &LoadProgress::default(),
        )
        .unwrap();
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
