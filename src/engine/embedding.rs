//! A model that turns text into a vector: the state of the last token before the output head, of length 1.

use std::path::Path;

use super::{
    error::{ForwardError, LoadError},
    gguf::Header,
    model::{Model, ModelOptions},
    preemption::Flow,
    tokenizer::{EncodeError, Tokenizer, TokenizerError},
};
use cotenant_policy::{kv_type::KvType, residency::EnginePlan};
use cotenant_units::{Tokens, vector::normalise};

/// A model for embeddings, with all its layers in memory.
pub struct Embedder {
    model: Model,
    tokenizer: Tokenizer,
    /// Token that ends each text.
    end: Option<u32>,
    /// Longest text in tokens.
    context: u32,
}

/// A text as a vector.
#[derive(Clone, Debug, PartialEq)]
pub struct Embedded {
    /// The vector, of length 1.
    pub vector: Vec<f32>,
    /// Tokens of the text.
    pub tokens: u32,
}

impl Embedder {
    /// Opens a file for texts of up to `context` tokens, at most as many as the model supports.
    ///
    /// # Errors
    /// When the engine cannot compute with the file, or its vectors are of other than the last token.
    pub fn open(path: &Path, context: Tokens, threads: usize) -> Result<Self, OpenError> {
        let (shape, header) = Model::inspect(path, threads)?;
        let pooling = pooling(&header);
        if pooling != LAST {
            return Err(OpenError::Pooling(pooling));
        }
        let context = context.min(shape.context_max);
        let block = shape.kv.block_tokens.get().max(1);
        let plan = EnginePlan {
            resident: (0u32..).zip(&shape.layers).map(|(part, _)| part).collect(),
            kv_capacity: Tokens::new(context.get().next_multiple_of(block)),
            prefill_chunk: Tokens::new(CHUNK.min(context.get())),
            kv_type: KvType::F16,
        };
        let options = ModelOptions {
            context: Some(plan.kv_capacity),
            ..ModelOptions::for_threads(threads)
        };
        let tokenizer = Tokenizer::from_header(&header)?;
        let ends = header.bool("tokenizer.ggml.add_eos_token") == Some(true);
        let end = header.u32("tokenizer.ggml.eos_token_id");
        drop(header);
        let mut model = Model::open(path, &plan, &options)?;
        model.forget_lists();
        Ok(Self {
            model,
            tokenizer,
            end: end.filter(|_| ends),
            context: context.get(),
        })
    }

    /// Embeds a text. With `dimensions` its vector has only the first so many numbers, which models that are trained
    /// for it keep the most of the meaning in. A text that is too long is cut if `truncate` is set.
    ///
    /// # Errors
    /// When the text is too long, its vector has fewer numbers, or the model fails.
    pub fn embed(
        &mut self,
        text: &str,
        dimensions: Option<u32>,
        truncate: bool,
    ) -> Result<Embedded, EmbedError> {
        let mut tokens = self.tokenizer.encode(text)?;
        self.tokenizer.begin(&mut tokens);
        let limit = self.context as usize - usize::from(self.end.is_some());
        if tokens.len() > limit {
            if !truncate {
                return Err(EmbedError::TooLong {
                    tokens: tokens.len(),
                    limit,
                });
            }
            tokens.truncate(limit);
        }
        tokens.extend(self.end);
        self.model.reset();
        let state = self.model.forward_state(&tokens, &mut || Flow::Continue)?;
        let wanted = dimensions.map_or(state.len(), |dimensions| dimensions as usize);
        let state = state.get(..wanted).ok_or(EmbedError::Dimensions {
            wanted,
            limit: state.len(),
        })?;
        let mut vector = state.to_vec();
        normalise(&mut vector);
        Ok(Embedded {
            vector,
            tokens: u32::try_from(tokens.len()).unwrap_or(u32::MAX),
        })
    }
}

/// The pooling type of a file: llama.cpp's `LLAMA_POOLING_TYPE`. Files of models that generate text have none.
fn pooling(header: &Header) -> u32 {
    let key = format!("{}.pooling_type", header.architecture());
    header
        .u32(&key)
        .filter(|kind| *kind != NONE)
        .unwrap_or(LAST)
}

/// A file that cannot be used for embeddings.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// It cannot be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// Its tokenizer is unsupported.
    #[error("cannot read the tokenizer")]
    Tokenizer(#[from] TokenizerError),
    /// Its vectors are made otherwise.
    #[error(
        "pooling type {0} is not supported, only {LAST}, the last token (hint: run the model by `llama-server --embeddings` as worker)"
    )]
    Pooling(u32),
}

/// A text that was not embedded.
#[derive(Debug, thiserror::Error)]
pub enum EmbedError {
    /// It does not fit.
    #[error("the text has {tokens} tokens, the limit is {limit}")]
    TooLong {
        /// Its tokens.
        tokens: usize,
        /// The limit.
        limit: usize,
    },
    /// Vectors are shorter than requested.
    #[error("`dimensions` is {wanted}, vectors of this model have {limit} numbers")]
    Dimensions {
        /// The requested number.
        wanted: usize,
        /// The limit.
        limit: usize,
    },
    /// The text cannot be tokenized.
    #[error("cannot tokenize the text")]
    Encode(#[from] EncodeError),
    /// The model failed.
    #[error("cannot compute the vector")]
    Forward(#[from] ForwardError),
}

impl EmbedError {
    /// Whether the request, and not the model, is the cause.
    pub const fn is_of_request(&self) -> bool {
        matches!(self, Self::TooLong { .. } | Self::Dimensions { .. })
    }
}

/// llama.cpp's `LLAMA_POOLING_TYPE_NONE`: a vector for each token.
const NONE: u32 = 0;

/// llama.cpp's `LLAMA_POOLING_TYPE_LAST`.
const LAST: u32 = 3;

/// Tokens of one pass: texts for retrieval have a few hundred.
const CHUNK: u32 = 256;
