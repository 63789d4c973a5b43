//! Specification of encoders of the BERT family: token states that see the whole text.

use super::{
    family::{Activation, AttentionSpec, LayerSpec, Pairing, Vector},
    keys::Keys,
    layers::LayerBuilder,
    limits::{HEADS_MAX, WIDTH_MAX, len, root},
    rotary::Rotary,
    rotation::Rotation,
    tensors::{bad_shape, tensor, vector},
};
use crate::{
    error::LoadErrorKind,
    gguf::{Header, TensorInfo},
};
use cotenant_units::Tokens;

/// An encoder that the engine can compute with.
#[derive(Clone, Debug)]
pub struct EncoderSpec {
    /// Elements of a token's state.
    pub width: usize,
    /// Width of the feed-forward part.
    pub feed_forward: usize,
    /// Tokens of the vocabulary.
    pub vocabulary: usize,
    /// Tokens of the longest text that the model was made for.
    pub context_max: u32,
    /// Added to the variance in every norm.
    pub epsilon: f32,
    /// Activation function of the feed-forward part.
    pub activation: Activation,
    /// Constants of attention.
    pub attention: AttentionSpec,
    /// Rows of token embeddings.
    pub embedding: TensorInfo,
    /// Rows added by position, unless positions are rotations.
    pub positions: Option<TensorInfo>,
    /// Rows added by the kind of a sentence, of which the first is used.
    pub types: Option<TensorInfo>,
    /// The layers. Their norms follow their parts in the file, and are here those before the next part, of which the
    /// residual stream is the result.
    pub layers: Vec<LayerSpec>,
    /// Weight and bias of the norm after the last layer.
    pub output_norm: [TensorInfo; 2],
}

impl EncoderSpec {
    /// Whether the file says that it is an encoder of this family.
    pub fn is_of(header: &Header) -> bool {
        [BERT, NOMIC].contains(&header.architecture())
    }

    /// Checks the header and finds all tensors.
    ///
    /// # Errors
    /// A missing or contradictory constant or tensor, or tensors that the engine would have to ignore.
    pub fn read(header: &Header) -> Result<Self, LoadErrorKind> {
        let keys = Keys { header };
        let is_nomic = header.architecture() == NOMIC;
        let depth = keys.count("block_count", DEPTH_MAX)?;
        let width = keys.count("embedding_length", WIDTH_MAX)?;
        let feed_forward = keys.count("feed_forward_length", WIDTH_MAX)?;
        let context_max = keys.context()?;
        let heads = keys.count("attention.head_count", HEADS_MAX)?;
        let head_dim = width / heads;
        keys.check_head("attention.value_length", head_dim)?;
        if head_dim * heads != width {
            let problem = format!("{heads} heads do not divide {width} elements");
            return Err(keys.wrong("attention.head_count", problem));
        }
        let causal = "attention.causal";
        if header.bool(&keys.full(causal)) == Some(true) {
            let problem = "an encoder that sees only earlier tokens is not supported";
            return Err(keys.wrong(causal, problem.to_owned()));
        }
        let rotary = if is_nomic { keys.rotary(width)? } else { 0 };
        let rotation = match is_nomic {
            true => Rotary::read(header, rotary, Some(Tokens::new(context_max)))?.rotation,
            false => Rotation::STILL,
        };
        let attention = AttentionSpec {
            heads,
            kv_heads: heads,
            head_dim,
            scale: 1.0 / root(head_dim),
            score_cap: None,
            rotary,
            rotation,
            local: None,
            pairing: Pairing::Halves,
            gated: false,
            values_normed: false,
        };
        let rows_of = |name: &str, least: u64| {
            let found = tensor(header, name)?;
            match found.dims.as_slice() {
                &[columns, rows] if columns == width as u64 && rows >= least => Ok(found.clone()),
                _ => Err(bad_shape(found, &format!("[{width}, {least} or more]"))),
            }
        };
        let tokens = header.strings("tokenizer.ggml.tokens");
        let tokens = tokens.map_or(1, |tokens| tokens.len() as u64);
        let embedding = rows_of("token_embd.weight", tokens)?;
        let positions = match is_nomic {
            true => None,
            false => Some(rows_of("position_embd.weight", u64::from(context_max))?),
        };
        let types = header
            .tensor(TYPES)
            .map(|_| rows_of(TYPES, 1))
            .transpose()?;
        let norm = |prefix: &str| -> Result<[TensorInfo; 2], LoadErrorKind> {
            let of = |end: &str| vector(header, &format!("{prefix}.{end}"), &[width]);
            Ok([of("weight")?, of("bias")?])
        };
        let (mut before, mut layers) = (norm("token_embd_norm")?, Vec::new());
        for index in 0..depth {
            let prefix = format!("blk.{index}.");
            let [weight, bias] =
                std::mem::replace(&mut before, norm(&format!("{prefix}layer_output_norm"))?);
            let mut builder = LayerBuilder {
                header,
                width,
                feed_forward,
                input: None,
                experts: None,
                attention: &attention,
                matrices: Vec::new(),
                vectors: vec![(Vector::MixerNorm, weight), (Vector::MixerNormBias, bias)],
                prefix,
            };
            layers.push(builder.encoder(is_nomic)?);
        }
        let spec = Self {
            width,
            feed_forward,
            vocabulary: embedding.dims.get(1).map_or(0, |&rows| len(rows)),
            context_max,
            epsilon: header
                .f32(&keys.full(EPSILON))
                .ok_or_else(|| keys.wrong(EPSILON, "it is missing".to_owned()))?,
            activation: if is_nomic {
                Activation::Silu
            } else {
                Activation::Gelu
            },
            attention,
            embedding,
            positions,
            types,
            layers,
            output_norm: before,
        };
        // An ignored tensor would change every vector.
        let is_stray = |info: &&TensorInfo| {
            spec.matrices()
                .chain(spec.vectors())
                .all(|known| known.name != info.name)
        };
        match header.tensors().find(is_stray) {
            None => Ok(spec),
            Some(stray) => Err(LoadErrorKind::TensorUnknown {
                tensor: stray.name.clone(),
                architecture: header.architecture().to_owned(),
            }),
        }
    }

    /// Tables of rows, and the matrices of products.
    pub fn matrices(&self) -> impl Iterator<Item = &TensorInfo> {
        let tables = [&self.embedding]
            .into_iter()
            .chain(&self.positions)
            .chain(&self.types);
        let of_layers = self.layers.iter().flat_map(|layer| &layer.matrices);
        tables.chain(of_layers.map(|matrix| &matrix.tensor))
    }

    /// Norms and biases.
    pub fn vectors(&self) -> impl Iterator<Item = &TensorInfo> {
        let of_layers = self.layers.iter().flat_map(|layer| &layer.vectors);
        of_layers.map(|(_, vector)| vector).chain(&self.output_norm)
    }
}

/// Positions are rows of a table.
const BERT: &str = "bert";
/// Positions are rotations, and the feed-forward part has a gate.
const NOMIC: &str = "nomic-bert";
const TYPES: &str = "token_types.weight";
const EPSILON: &str = "attention.layer_norm_epsilon";
/// Twice the layers of the largest published encoders.
const DEPTH_MAX: usize = 96;
