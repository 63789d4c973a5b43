//! What the thread needs of a model: the seam between answering requests and computing tokens.

use std::path::Path;

use super::{
    ApplyError, ApplyReport, Breakdown, ForwardError, Header, Model, ModelOptions,
    model::Checkpoint,
    text::TextSide,
    thread::{OpenError, Opened},
    tokenizer::Tokenizer,
};
use crate::{
    policy::residency::{EnginePlan, ModelShape},
    units::Bytes,
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

    /// Drops the sequence.
    fn reset(&mut self);

    /// The plan in force.
    fn plan(&self) -> &EnginePlan;

    /// What each piece of the model occupies.
    fn shape(&self) -> &ModelShape;

    /// Tokens of the sequence so far.
    fn position(&self) -> u32;

    /// Everything that is held now.
    fn breakdown(&self) -> Breakdown;
}

/// A GGUF model with what its tokenizer holds on the book.
///
/// The library's tables are a good part of what a small model holds (some 33 MiB for 152 000 tokens), and the model
/// itself does not know of them.
pub(super) struct Spoken {
    model: Model,
    shape: ModelShape,
    text_bytes: Bytes,
}

impl Spoken {
    /// What a file's model occupies, its text side included; refuses what could not be opened for its header.
    pub(super) fn inspect(path: &Path) -> Result<ModelShape, OpenError> {
        let (shape, header) = Model::inspect(path)?;
        Tokenizer::check(&header).map_err(|error| OpenError::text(path, error.into()))?;
        Ok(with_text(shape, text_bytes(&header)))
    }

    /// Opens a file with a first plan.
    pub(super) fn open(path: &Path, plan: &EnginePlan, options: &ModelOptions) -> Result<Opened, OpenError> {
        let mut model = Model::open(path, plan, options)?;
        let text_bytes = text_bytes(model.header());
        let text =
            TextSide::new(model.header(), model.shape().context_max).map_err(|error| OpenError::text(path, error))?;
        model.forget_lists();
        let shape = with_text(model.shape().clone(), text_bytes);
        Ok(Opened {
            model: Box::new(Self {
                model,
                shape,
                text_bytes,
            }),
            text,
        })
    }
}

/// What the text side occupies: whole pages, as everything on the book.
fn text_bytes(header: &Header) -> Bytes {
    Tokenizer::heap_bytes(header).round_up(Bytes::from_kib(4))
}

fn with_text(shape: ModelShape, text_bytes: Bytes) -> ModelShape {
    ModelShape {
        fixed_bytes: shape.fixed_bytes.saturating_add(text_bytes),
        ..shape
    }
}

impl LanguageModel for Spoken {
    fn forward(
        &mut self,
        tokens: &[u32],
        checkpoint: &mut dyn Checkpoint,
        logits: &mut Vec<f32>,
    ) -> Result<(), ForwardError> {
        let computed = self.model.forward(tokens, checkpoint)?;
        logits.clear();
        logits.extend_from_slice(&computed);
        Ok(())
    }

    fn apply(&mut self, plan: &EnginePlan) -> Result<ApplyReport, ApplyError> {
        self.model.apply(plan)
    }

    fn reset(&mut self) {
        self.model.reset();
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

    fn breakdown(&self) -> Breakdown {
        let breakdown = self.model.breakdown();
        Breakdown {
            header: breakdown.header.saturating_add(self.text_bytes),
            total: breakdown.total.saturating_add(self.text_bytes),
            ..breakdown
        }
    }
}
