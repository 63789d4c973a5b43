//! Tensors of a model file, grouped by purpose.

use std::collections::BTreeMap;

use serde::Serialize;

use super::{
    gguf::{Header, TensorInfo, dtype_name},
    spec::{Unused, depth, unused_part},
};
use cotenant_units::Bytes;

/// Tensors of one kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TensorGroup {
    /// Their purpose.
    pub kind: TensorKind,
    /// Number of tensors.
    pub tensors: u32,
    /// Their elements.
    pub elements: u64,
    /// Their length in the file.
    pub bytes: Bytes,
    /// Their types, the one with most bytes first.
    pub types: Vec<String>,
}

/// A tensor of a safetensors file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedTensor {
    /// `model.layers.0.mlp.up_proj.weight`.
    pub name: String,
    /// `BF16`.
    pub dtype: String,
    /// Elements in each dimension.
    pub dims: Vec<u64>,
    /// Its length in the file.
    pub bytes: Bytes,
}

/// Purposes of tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TensorKind {
    /// Rows of input embeddings, which are read one by one.
    Embedding,
    /// Projections of attention layers.
    Attention,
    /// Projections of layers with a state of fixed size.
    Recurrent,
    /// Gate, up and down.
    FeedForward,
    /// Norms, biases, convolutions, rotary factors.
    Vectors,
    /// The output head, if it is not the embedding.
    Head,
    /// Blocks for multi-token prediction, which stay in the file.
    MultiToken,
    /// Image encoder, which stays in the file.
    Vision,
}

impl TensorKind {
    /// A short name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Embedding => "embedding",
            Self::Attention => "attention",
            Self::Recurrent => "recurrent mixer",
            Self::FeedForward => "feed-forward",
            Self::Vectors => "norms, biases",
            Self::Head => "output head",
            Self::MultiToken => "multi-token prediction",
            Self::Vision => "vision",
        }
    }
}

/// Type name, dimensions and bytes of a tensor.
type Measured<'tensor> = (String, &'tensor [u64], Bytes);

impl TensorGroup {
    /// The non-empty groups of a header.
    pub fn of(header: &Header) -> Vec<Self> {
        let depth = depth(header);
        Self::grouped(header.tensors().map(|info| {
            let dtype = dtype_name(info.dtype).to_owned();
            let measured = (dtype, info.dims.as_slice(), info.bytes);
            (kind_of(header, info, depth), measured)
        }))
    }

    /// The groups of tensors with names of a Hugging Face repository.
    pub fn of_safetensors(tensors: &[NamedTensor]) -> Vec<Self> {
        Self::grouped(tensors.iter().map(|tensor| {
            let measured = (tensor.dtype.clone(), tensor.dims.as_slice(), tensor.bytes);
            (kind_of_published(tensor), measured)
        }))
    }

    fn grouped<'tensor>(
        tensors: impl Iterator<Item = (TensorKind, Measured<'tensor>)>,
    ) -> Vec<Self> {
        let mut found: BTreeMap<TensorKind, Vec<Measured<'_>>> = BTreeMap::new();
        for (kind, measured) in tensors {
            found.entry(kind).or_default().push(measured);
        }
        found
            .iter()
            .map(|(kind, group)| Self::sum(*kind, group))
            .collect()
    }

    fn sum(kind: TensorKind, group: &[Measured<'_>]) -> Self {
        let mut types: Vec<(String, Bytes)> = Vec::new();
        for (name, _, more) in group {
            match types.iter_mut().find(|(known, _)| known == name) {
                Some((_, bytes)) => *bytes = bytes.saturating_add(*more),
                None => types.push((name.clone(), *more)),
            }
        }
        types.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        let elements = |(_, dims, _): &(String, &[u64], Bytes)| {
            dims.iter().copied().fold(1, u64::saturating_mul)
        };
        Self {
            kind,
            tensors: u32::try_from(group.len()).unwrap_or(u32::MAX),
            elements: group.iter().map(elements).fold(0, u64::saturating_add),
            bytes: group
                .iter()
                .map(|(_, _, bytes)| *bytes)
                .fold(Bytes::ZERO, Bytes::saturating_add),
            types: types.into_iter().map(|(name, _)| name).collect(),
        }
    }
}

fn kind_of(header: &Header, info: &TensorInfo, depth: u32) -> TensorKind {
    let name = info.name.as_str();
    match unused_part(name, depth) {
        Some(Unused::Prediction) => return TensorKind::MultiToken,
        Some(Unused::Vision) => return TensorKind::Vision,
        None => {}
    }
    let Some((block, rest)) = name
        .strip_prefix("blk.")
        .and_then(|rest| rest.split_once('.'))
    else {
        return match name {
            "token_embd.weight" | "per_layer_token_embd.weight" => TensorKind::Embedding,
            "output.weight" => TensorKind::Head,
            "per_layer_model_proj.weight" => TensorKind::FeedForward,
            _ => TensorKind::Vectors,
        };
    };
    let is_matrix = info.dims.len() > 1 && !VECTORS.contains(&rest) && !rest.ends_with(".bias");
    match rest {
        _ if !is_matrix => TensorKind::Vectors,
        "inp_gate.weight" | "proj.weight" => TensorKind::FeedForward,
        _ if rest.starts_with("ffn_") => TensorKind::FeedForward,
        _ if header.tensor(&format!("blk.{block}.ssm_a")).is_some() => TensorKind::Recurrent,
        _ => TensorKind::Attention,
    }
}

/// Vectors of layers with a state that have two axes.
const VECTORS: [&str; 4] = ["ssm_a", "ssm_conv1d.weight", "ssm_d", "ssm_norm.weight"];

/// Classifies by the module names of transformers.
fn kind_of_published(tensor: &NamedTensor) -> TensorKind {
    let name = tensor.name.as_str();
    let has = |part: &str| name.contains(part);
    match name {
        _ if has("visual.") || has("vision_") || has("multi_modal") => TensorKind::Vision,
        _ if name.starts_with("mtp.") || has(".mtp.") => TensorKind::MultiToken,
        _ if has("embed_tokens") => TensorKind::Embedding,
        _ if has("lm_head") => TensorKind::Head,
        _ if tensor.dims.len() < 2 || has("conv1d") => TensorKind::Vectors,
        _ if has(".mlp.") || has(".feed_forward.") || has("per_layer_") => TensorKind::FeedForward,
        _ if has(".linear_attn.") => TensorKind::Recurrent,
        _ if has(".self_attn.") => TensorKind::Attention,
        _ => TensorKind::Vectors,
    }
}
