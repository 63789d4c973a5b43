//! Model specification: checked constants and tensors of the header, in the order of use.

use std::ops::Range;

use self::{
    keys::Keys,
    layers::{LAYER_INPUT_NORM, LAYER_PROJECTION, LayerBuilder},
    limits::{WIDTH_MAX, len},
    rotary::Rotary,
    tensors::{bad_shape, tensor, vector},
};
use super::{
    disk::DiskWatch,
    error::{LoadError, LoadErrorKind},
    gguf::{GgmlDType, Header, StringTable, TensorInfo},
    sayable::Sayable,
};
use cotenant_policy::residency::LayerKind;
use cotenant_units::{Bytes, Tokens};

mod encoder;
mod family;
mod keys;
mod layers;
mod limits;
mod rotary;
mod rotation;
mod tensors;

pub use encoder::EncoderSpec;
pub(super) use family::HeadNorms;
pub use family::{
    Activation, Architecture, AttentionSpec, Beside, ConvolutionSpec, DeltaSpec, ExpertSpec,
    LayerInputs, LayerSpec, LocalAttention, Matrix, Pairing, RecurrentSpec, Role, ScanSpec, Scores,
    Temperature, Vector,
};
pub(super) use limits::{POSITIONS_MAX, root};
pub use rotation::Rotation;

/// A model that the engine can compute with.
#[derive(Clone, Debug)]
pub struct Spec {
    /// GGUF architecture.
    pub architecture: Architecture,
    /// Width of the residual stream.
    pub width: usize,
    /// Width of the feed-forward part; of the widest one if it differs by layer.
    pub feed_forward: usize,
    /// Tokens of the vocabulary.
    pub vocabulary: usize,
    /// The longest context that the model was made for.
    pub context_max: u32,
    /// Added to the mean square in every norm.
    pub epsilon: f32,
    /// Factor of embeddings.
    pub embedding_scale: f32,
    /// Activation function of the feed-forward gate.
    pub activation: Activation,
    /// Factor of each part's output before it is added to the residual stream.
    pub residual_scale: f32,
    /// Divisor of logits.
    pub logit_scale: f32,
    /// Soft cap of logits, if the model has one.
    pub logit_cap: Option<f32>,
    /// Growth of queries with their position, if the model has it.
    pub temperature: Option<Temperature>,
    /// Attention layers.
    pub attention: AttentionSpec,
    /// Recurrent layers, if any.
    pub recurrent: Option<RecurrentSpec>,
    /// The mixture of experts in place of each layer's feed-forward part, if any.
    pub experts: Option<ExpertSpec>,
    /// Inputs of their own for layers, if they have them.
    pub layer_inputs: Option<LayerInputs>,
    /// The layers, first to last.
    pub layers: Vec<LayerSpec>,
    /// The block that drafts the token after the next one (multi-token prediction), if it can be used.
    pub draft: Option<LayerSpec>,
    /// Rows of input embeddings.
    pub embedding: TensorInfo,
    /// Output head; the embedding itself when tied.
    pub head: TensorInfo,
    /// Used rows of the head, in order; all if absent.
    pub said: Option<Vec<Range<usize>>>,
    /// Whether [`Self::head`] is [`Self::embedding`].
    pub tied: bool,
    /// Weight of the last norm.
    pub output_norm: TensorInfo,
    /// Bias of the last norm, which then subtracts the mean first.
    pub output_norm_bias: Option<TensorInfo>,
    /// Added to the logits.
    pub output_bias: Option<TensorInfo>,
    /// Divisors of the rotary angles (Llama 3.1 and later, Phi-3).
    pub rope_factors: Option<TensorInfo>,
}

impl Spec {
    /// Restricts the head to the given rows; keeps all if none are given.
    pub(super) fn reduce(
        &mut self,
        header: &Header,
        vocabulary: Option<&Sayable>,
        watch: &DiskWatch,
    ) -> Result<(), LoadError> {
        if let Some(vocabulary) = vocabulary {
            let rows = vocabulary
                .rows(header, self.vocabulary, watch)
                .map_err(|kind| LoadError::new(header.path(), kind))?;
            self.said = Some(rows);
        }
        Ok(())
    }
}

/// Contents of the file besides the text model, as text with sizes, which stay in the file; `drafts` says whether the draft
/// block is used.
pub(super) fn unused(header: &Header, drafts: bool) -> Vec<String> {
    let depth = depth(header);
    let drafts = drafts.then_some(Unused::Prediction);
    let bytes_of = |part: Unused| -> Bytes {
        let tensors = header
            .tensors()
            .filter(|info| unused_part(&info.name, depth) == Some(part) && drafts != Some(part));
        tensors.fold(Bytes::ZERO, |sum, info| sum.saturating_add(info.bytes))
    };
    let parts = [
        ("multi-token prediction", Unused::Prediction),
        ("vision", Unused::Vision),
    ];
    let sizes = parts.map(|(what, part)| (what, bytes_of(part)));
    let some = sizes.into_iter().filter(|(_, bytes)| *bytes > Bytes::ZERO);
    some.map(|(what, bytes)| format!("{what} ({bytes})"))
        .collect()
}

/// Parts of a file beside the layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unused {
    /// Blocks that predict more than one token.
    Prediction,
    /// Image encoder.
    Vision,
}

/// Layers of the text model, without blocks for multi-token prediction.
pub(super) fn depth(header: &Header) -> u32 {
    let keys = Keys { header };
    let blocks = header.u32(&keys.full("block_count")).unwrap_or(u32::MAX);
    blocks.saturating_sub(header.u32(&keys.full(KEY_SKIPPED)).unwrap_or(0))
}

/// The unused part to which a tensor belongs, in a model of `depth` blocks.
pub(super) fn unused_part(name: &str, depth: u32) -> Option<Unused> {
    let block = name
        .strip_prefix("blk.")
        .and_then(|rest| rest.split_once('.'));
    let behind =
        block.is_some_and(|(number, _)| number.parse().is_ok_and(|number: u32| number >= depth));
    if behind || name.starts_with("mtp.") {
        Some(Unused::Prediction)
    } else {
        let vision = VISION.iter().any(|prefix| name.starts_with(prefix));
        vision.then_some(Unused::Vision)
    }
}

/// Prefixes of tensor names of image encoders.
const VISION: [&str; 2] = ["v.", "mm."];

/// The key for multi-token-prediction blocks.
const KEY_SKIPPED: &str = "nextn_predict_layers";

impl Spec {
    /// Checks the header and finds all tensors of the architecture.
    ///
    /// # Errors
    /// An unknown architecture, a missing or contradictory constant or tensor, or tensors that the engine would have to
    /// ignore.
    pub fn read(header: &Header) -> Result<Self, LoadError> {
        Self::read_for(header, None)
    }

    /// As [`Self::read`], for contexts of up to `context` tokens; some models rotate differently beyond a length.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn read_for(header: &Header, context: Option<Tokens>) -> Result<Self, LoadError> {
        Self::read_kind(header, context).map_err(|kind| LoadError::new(header.path(), kind))
    }

    fn read_kind(header: &Header, context: Option<Tokens>) -> Result<Self, LoadErrorKind> {
        let name = header.architecture();
        let Some(architecture) = Architecture::ALL
            .into_iter()
            .find(|known| known.name() == name)
        else {
            return Err(LoadErrorKind::Architecture {
                architecture: name.to_owned(),
                known: known(),
            });
        };
        let keys = Keys { header };
        let blocks = keys.count("block_count", LAYERS_MAX)?;
        let skipped = keys.optional(KEY_SKIPPED, LAYERS_MAX)?.unwrap_or(0);
        let Some(depth) = blocks.checked_sub(skipped).filter(|&depth| depth > 0) else {
            return Err(keys.wrong(
                KEY_SKIPPED,
                format!("{skipped} of {blocks} blocks leaves none"),
            ));
        };
        let width = keys.count("embedding_length", WIDTH_MAX)?;
        let experts = keys.experts(architecture, depth)?;
        let feed_forward_of = |layer| match &experts {
            // Zero in layers that are a mixer.
            Some(experts) if architecture.is_nemotron() => {
                keys.width_of_layer(layer).map(|width| {
                    let beside = experts.beside.width();
                    if width > 0 { beside } else { 0 }
                })
            }
            Some(experts) if experts.beside.width() > 0 => Ok(experts.beside.width()),
            Some(experts) if experts.dense == 0 => Ok(experts.inner),
            _ if architecture.is_nemotron() => keys.width_of_layer(layer),
            _ => keys.count_of_layer("feed_forward_length", WIDTH_MAX, layer),
        };
        let rotary = keys.rotary(width)?;
        keys.check_sections(rotary)?;
        let Rotary { rotation, factors } = Rotary::read(header, rotary, context)?;
        let attention = keys.attention(architecture, width, rotation, depth)?;
        let recurrent = match architecture {
            Architecture::GraniteHybrid | Architecture::NemotronH | Architecture::NemotronHMoe => {
                Some(RecurrentSpec::Scan(keys.scan()?))
            }
            Architecture::Lfm2 | Architecture::Lfm2Moe => {
                Some(RecurrentSpec::Convolution(keys.convolution(width)?))
            }
            Architecture::Qwen35 | Architecture::Qwen35Moe => {
                Some(RecurrentSpec::Delta(keys.delta()?))
            }
            _ => None,
        };
        let embedding = tensor(header, "token_embd.weight")?;
        let vocabulary = match embedding.dims.get(1) {
            Some(&rows)
                if rows <= u64::from(u32::MAX) && embedding.has_dims(&[width as u64, rows]) =>
            {
                len(rows)
            }
            _ => return Err(bad_shape(embedding, &format!("[{width}, vocabulary]"))),
        };
        // Rows beyond the last token are padding; a token without a row would fail every prompt containing it.
        if let Some(tokens) = header
            .strings("tokenizer.ggml.tokens")
            .map(StringTable::len)
            && tokens > vocabulary
        {
            return Err(bad_shape(embedding, &format!("{tokens} tokens")));
        }
        let head = match header.tensor("output.weight") {
            Some(head) if head.has_dims(&embedding.dims) => Some(head),
            Some(head) => return Err(bad_shape(head, &format!("[{width}, {vocabulary}]"))),
            None => None,
        };
        let output_norm = match architecture {
            // llama.cpp's name for it, by a mistake that was kept.
            Architecture::Lfm2 | Architecture::Lfm2Moe => {
                vector(header, "token_embd_norm.weight", &[width])?
            }
            _ => vector(header, "output_norm.weight", &[width])?,
        };
        let output_norm_bias = match architecture.centres() {
            true => Some(vector(header, OUTPUT_NORM_BIAS, &[width])?),
            false => None,
        };
        let output_bias = match header.tensor("output.bias") {
            Some(_) => Some(vector(header, "output.bias", &[vocabulary])?),
            None => None,
        };
        let layer_inputs = keys.layer_inputs(architecture, depth, vocabulary)?;
        let own = depth - keys.borrowing(architecture, depth)?;
        let (mut layers, mut widest) = (Vec::new(), 0);
        for index in 0..depth {
            let feed_forward = feed_forward_of(index)?;
            widest = feed_forward.max(widest);
            let is_alone = architecture.is_nemotron() && feed_forward > 0;
            let mut builder = LayerBuilder {
                header,
                prefix: format!("blk.{index}."),
                width,
                feed_forward,
                input: layer_inputs.as_ref().map(|inputs| (index, inputs.width)),
                experts: experts.as_ref().filter(|experts| index >= experts.dense),
                attention: &attention,
                matrices: Vec::new(),
                vectors: Vec::new(),
            };
            let layer = match recurrent
                .as_ref()
                .filter(|_| !is_alone)
                .filter(|_| keys.is_recurrent(architecture, index))
            {
                Some(RecurrentSpec::Convolution(spec)) => builder.convolution(spec)?,
                Some(RecurrentSpec::Delta(spec)) => builder.delta(architecture, spec)?,
                Some(RecurrentSpec::Scan(spec)) => builder.scan(architecture, spec)?,
                None if is_alone => builder.feed_forward_alone(architecture)?,
                None => builder.attention(
                    architecture,
                    attention.local.is_some() && keys.is_local(architecture, index),
                    index >= own,
                )?,
            };
            refuse_unknown(header, &builder.prefix, &layer)?;
            layers.push(layer);
        }
        let draft = match architecture {
            Architecture::Qwen35 if skipped == 1 => {
                let mut builder = LayerBuilder {
                    header,
                    prefix: format!("blk.{depth}."),
                    width,
                    feed_forward: feed_forward_of(depth)?,
                    input: None,
                    experts: None,
                    attention: &attention,
                    matrices: Vec::new(),
                    vectors: Vec::new(),
                };
                builder.draft(architecture)?
            }
            _ => None,
        };
        refuse_stray(header, architecture, layer_inputs.as_ref())?;
        let epsilon = match architecture.centres() {
            true => LAYER_NORM_EPSILON,
            false => "attention.layer_norm_rms_epsilon",
        };
        Ok(Self {
            architecture,
            width,
            feed_forward: widest,
            vocabulary,
            context_max: keys.context()?,
            epsilon: header
                .f32(&keys.full(epsilon))
                .or_else(|| match architecture.is_nemotron() {
                    true => header.f32(&keys.full(LAYER_NORM_EPSILON)),
                    false => None,
                })
                .ok_or_else(|| keys.wrong(epsilon, "it is missing".to_owned()))?,
            embedding_scale: match architecture {
                _ if architecture.is_gemma() => root(width),
                _ if architecture.is_granite() => keys.factor("embedding_scale", 1.0)?,
                _ => 1.0,
            },
            residual_scale: match architecture {
                _ if architecture.is_granite() => keys.factor("residual_scale", 1.0)?,
                _ => 1.0,
            },
            logit_scale: match architecture {
                _ if architecture.is_granite() => keys.factor("logit_scale", 1.0)?,
                _ => 1.0,
            },
            temperature: match architecture {
                Architecture::Mistral3 => keys.temperature()?,
                _ => None,
            },
            activation: match architecture {
                _ if architecture.is_gemma() => Activation::Gelu,
                Architecture::GptOss => Activation::Clamped,
                _ if architecture.is_nemotron() => Activation::ReluSquared,
                _ => Activation::Silu,
            },
            logit_cap: match architecture {
                Architecture::Gemma2 => Some(keys.factor("final_logit_softcapping", LOGIT_CAP)?),
                Architecture::Gemma3 | Architecture::Gemma4 => header
                    .f32(&keys.full("final_logit_softcapping"))
                    .filter(|&cap| cap != 0.0),
                _ => None,
            },
            attention,
            recurrent,
            experts,
            layer_inputs,
            layers,
            draft,
            said: None,
            tied: head.is_none(),
            head: head.unwrap_or(embedding).clone(),
            embedding: embedding.clone(),
            output_norm,
            output_norm_bias,
            output_bias,
            rope_factors: factors,
        })
    }

    /// Length of a token's embedding in the file.
    pub fn embedding_row(&self) -> usize {
        self.width / self.embedding.dtype.block_size() * self.embedding.dtype.type_size()
    }

    /// A layer, or behind the last one the draft block.
    pub fn layer(&self, index: usize) -> Option<&LayerSpec> {
        let draft = self.draft.as_ref();
        let draft = draft.filter(|_| index == self.layers.len());
        self.layers.get(index).or(draft)
    }

    /// The layers, and the draft block.
    pub fn layers_and_draft(&self) -> impl Iterator<Item = &LayerSpec> {
        self.layers.iter().chain(&self.draft)
    }

    /// Tokens seen by a layer, itself included; `None` for all.
    pub fn window(&self, layer: &LayerSpec) -> Option<usize> {
        let local = self
            .attention
            .local
            .filter(|_| layer.local && layer.kind == LayerKind::Attention)?;
        local.window
    }

    /// Length of a token's embeddings for all layers in the file, if they have them.
    pub fn layer_inputs_row(&self) -> usize {
        self.layer_inputs.as_ref().map_or(0, |inputs| {
            let dtype = inputs.table.dtype;
            self.layers.len() * inputs.width / dtype.block_size() * dtype.type_size()
        })
    }

    /// Number of attention layers.
    pub fn attention_layers(&self) -> usize {
        self.layers
            .iter()
            .filter(|layer| layer.kind == LayerKind::Attention)
            .count()
    }

    /// Element types of all matrices and of the head.
    pub fn matrix_types(&self) -> impl Iterator<Item = GgmlDType> {
        self.layers_and_draft()
            .flat_map(|layer| &layer.matrices)
            .map(|matrix| matrix.tensor.dtype)
            .chain([self.head.dtype])
    }
}

/// An ignored tensor, such as a bias, a scale or an expert, would silently change every answer.
fn refuse_unknown(header: &Header, prefix: &str, layer: &LayerSpec) -> Result<(), LoadErrorKind> {
    // Some converters keep the unused keys and values of layers that use those of another.
    let is_unused = |name: &str| {
        let parts = ["attn_k.", "attn_k_norm.", "attn_v."];
        let part = name.strip_prefix(prefix);
        layer.borrows && part.is_some_and(|part| parts.iter().any(|known| part.starts_with(known)))
    };
    let stray = header.tensors().find(|info| {
        info.name.starts_with(prefix)
            && !is_unused(&info.name)
            && !layer
                .matrices
                .iter()
                .any(|matrix| matrix.tensor.name == info.name)
            && !layer
                .vectors
                .iter()
                .any(|(_, known)| known.name == info.name)
    });
    match stray {
        None => Ok(()),
        Some(info) => Err(LoadErrorKind::TensorUnknown {
            tensor: info.name.clone(),
            architecture: header.architecture().to_owned(),
        }),
    }
}

/// The same for tensors outside layers.
fn refuse_stray(
    header: &Header,
    architecture: Architecture,
    inputs: Option<&LayerInputs>,
) -> Result<(), LoadErrorKind> {
    let of_inputs = |inputs: &LayerInputs| {
        let table = inputs.table.name.clone();
        [
            table,
            LAYER_PROJECTION.to_owned(),
            LAYER_INPUT_NORM.to_owned(),
        ]
    };
    let of_inputs = inputs
        .map(of_inputs)
        .into_iter()
        .flatten()
        .collect::<Vec<_>>();
    let stray = header.tensors().find(|info| {
        let name = info.name.as_str();
        let beside = ["blk.", "mtp."].iter().chain(&VISION);
        let bias = architecture.centres().then_some(OUTPUT_NORM_BIAS);
        !OUTSIDE_LAYERS.contains(&name)
            && of_inputs.iter().all(|known| known != name)
            && bias != Some(name)
            && !beside.into_iter().any(|prefix| name.starts_with(prefix))
    });
    match stray {
        None => Ok(()),
        Some(info) => Err(LoadErrorKind::TensorUnknown {
            tensor: info.name.clone(),
            architecture: header.architecture().to_owned(),
        }),
    }
}

/// The names of all families, for errors.
fn known() -> String {
    let [names @ .., last] = Architecture::ALL.map(Architecture::name);
    format!("{} and {last}", names.join(", "))
}

const LAYER_NORM_EPSILON: &str = "attention.layer_norm_epsilon";
const OUTPUT_NORM_BIAS: &str = "output_norm.bias";
const OUTSIDE_LAYERS: [&str; 8] = [
    "output.bias",
    "token_embd.weight",
    "output.weight",
    "output_norm.weight",
    "token_embd_norm.weight",
    "rope_freqs.weight",
    rotary::LONG,
    rotary::SHORT,
];
/// llama.cpp's default for the logits of Gemma 2.
const LOGIT_CAP: f32 = 30.0;
/// llama.cpp's `LLAMA_MAX_LAYERS`.
const LAYERS_MAX: usize = 512;
