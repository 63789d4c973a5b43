//! A model that turns text into a vector of length 1: from the states of an encoder, or the last one of a decoder.

use std::path::Path;

use super::{
    encoder::Encoder,
    error::{ForwardError, LoadError},
    gguf::Header,
    model::{Model, ModelOptions},
    preemption::Flow,
    spec::EncoderSpec,
    tokenizer::{EncodeError, Tokenizer, TokenizerError, WordPieces},
};
use cotenant_policy::{kv_type::KvType, residency::EnginePlan};
use cotenant_units::{Tokens, vector::normalise};

/// A model for embeddings, with all its layers in memory.
pub struct Embedder {
    kind: Kind,
    /// Longest text in tokens.
    context: usize,
}

enum Kind {
    /// A decoder, whose vector is the state of the last token.
    Decoder {
        model: Box<Model>,
        tokenizer: Box<Tokenizer>,
        /// Token that ends each text.
        end: Option<u32>,
    },
    /// An encoder.
    Encoder {
        model: Box<Encoder>,
        tokenizer: WordPieces,
        pooling: Pooling,
    },
}

/// The vector of a text from the states of its tokens.
#[derive(Clone, Copy)]
enum Pooling {
    First,
    Last,
    Mean,
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
    /// When the engine cannot compute with the file, or its vectors are made in an unsupported way.
    pub fn open(path: &Path, context: Tokens, threads: usize) -> Result<Self, OpenError> {
        if let Some((model, header)) = Encoder::open(path, context, threads)? {
            let (pooling, tokenizer) = of_encoder(&header)?;
            let context = model.context();
            let kind = Kind::Encoder {
                model: Box::new(model),
                tokenizer,
                pooling,
            };
            return Ok(Self { kind, context });
        }
        let (shape, header) = Model::inspect(path, threads)?;
        let pooling = pooling(&header).filter(|kind| ![NONE, LAST].contains(kind));
        if let Some(pooling) = pooling {
            let supported = "3 (last token)";
            return Err(OpenError::Pooling { pooling, supported });
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
        let tokenizer = Box::new(Tokenizer::from_header(&header)?);
        let ends = header.bool("tokenizer.ggml.add_eos_token") == Some(true);
        let end = header.u32("tokenizer.ggml.eos_token_id");
        drop(header);
        let mut model = Box::new(Model::open(path, &plan, &options)?);
        model.forget_lists();
        Ok(Self {
            kind: Kind::Decoder {
                model,
                tokenizer,
                end: end.filter(|_| ends),
            },
            context: context.get() as usize,
        })
    }

    /// Whether the file at `path` is an encoder, by its header alone.
    ///
    /// # Errors
    /// It is one that [`Self::open`] refuses, or the header cannot be read.
    pub fn is_encoder(path: &Path) -> Result<bool, OpenError> {
        let header = Header::read(path)?;
        if !EncoderSpec::is_of(&header) {
            return Ok(false);
        }
        EncoderSpec::read(&header).map_err(|kind| LoadError::new(path, kind))?;
        of_encoder(&header).map(|_| true)
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
        let (mut tokens, end) = match &self.kind {
            Kind::Decoder { tokenizer, end, .. } => {
                let mut tokens = tokenizer.encode(text)?;
                tokenizer.begin(&mut tokens);
                (tokens, *end)
            }
            Kind::Encoder { tokenizer, .. } => (tokenizer.encode(text)?, Some(tokenizer.end())),
        };
        let limit = self.context.saturating_sub(usize::from(end.is_some()));
        if tokens.len() > limit {
            if !truncate {
                return Err(EmbedError::TooLong {
                    tokens: tokens.len(),
                    limit,
                });
            }
            tokens.truncate(limit);
        }
        tokens.extend(end);
        let state = match &mut self.kind {
            Kind::Decoder { model, .. } => {
                model.reset();
                model
                    .forward_state(&tokens, &mut || Flow::Continue)?
                    .to_vec()
            }
            Kind::Encoder { model, pooling, .. } => {
                let width = model.width();
                pooling.of(model.states(&tokens)?, width)
            }
        };
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

/// The pooling and the tokenizer of an encoder.
fn of_encoder(header: &Header) -> Result<(Pooling, WordPieces), OpenError> {
    let pooling = match pooling(header).unwrap_or(NONE) {
        MEAN => Pooling::Mean,
        FIRST => Pooling::First,
        LAST => Pooling::Last,
        pooling => {
            let supported = "1 (mean), 2 (first token) and 3 (last token)";
            return Err(OpenError::Pooling { pooling, supported });
        }
    };
    Ok((pooling, WordPieces::from_header(header)?))
}

impl Pooling {
    /// The vector from states of `width` elements.
    fn of(self, states: &[f32], width: usize) -> Vec<f32> {
        let mut rows = states.chunks_exact(width.max(1));
        match self {
            Self::First => rows.next().unwrap_or_default().to_vec(),
            Self::Last => rows.next_back().unwrap_or_default().to_vec(),
            // The sum has the direction of the mean.
            Self::Mean => rows.fold(vec![0.0; width], |mut sum, row| {
                sum.iter_mut()
                    .zip(row)
                    .for_each(|(sum, value)| *sum += value);
                sum
            }),
        }
    }
}

/// The pooling type of a file: llama.cpp's `LLAMA_POOLING_TYPE`. Files of models that generate text have none.
fn pooling(header: &Header) -> Option<u32> {
    header.u32(&format!("{}.pooling_type", header.architecture()))
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
    /// Its vectors are made otherwise, or it gives scores instead.
    #[error(
        "pooling type {} is not supported, only {supported} (hint: run the model by `llama-server --embeddings` as worker)",
        named(*pooling)
    )]
    Pooling {
        /// Its pooling type.
        pooling: u32,
        /// The supported ones.
        supported: &'static str,
    },
}

/// A pooling type with its name.
fn named(pooling: u32) -> String {
    let names = ["none", "mean", "first token", "last token", "rank"];
    let name = names.get(pooling as usize).unwrap_or(&"unknown");
    format!("{pooling} ({name})")
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

/// llama.cpp's `LLAMA_POOLING_TYPE_MEAN`.
const MEAN: u32 = 1;

/// llama.cpp's `LLAMA_POOLING_TYPE_CLS`.
const FIRST: u32 = 2;

/// llama.cpp's `LLAMA_POOLING_TYPE_LAST`.
const LAST: u32 = 3;

/// Tokens of one pass: texts for retrieval have a few hundred.
const CHUNK: u32 = 256;
