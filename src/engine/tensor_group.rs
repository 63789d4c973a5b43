//! Tensors of a model file, by what they are for.

use serde::Serialize;

use super::{
    gguf::{Header, TensorInfo, dtype_name},
    spec::{Unused, depth, unused_part},
};
use crate::units::Bytes;

/// Tensors of one kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TensorGroup {
    /// What they are for.
    pub kind: TensorKind,
    /// How many there are.
    pub tensors: u32,
    /// Their elements.
    pub elements: u64,
    /// Their length in the file.
    pub bytes: Bytes,
    /// Their types, the one with most bytes first.
    pub types: Vec<String>,
}

/// What tensors are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TensorKind {
    /// Rows of input embeddings, which are read one by one.
    Embedding,
    /// Projections of layers that attend.
    Attention,
    /// Projections of layers that keep a state of fixed size.
    Recurrent,
    /// Gate, up and down.
    FeedForward,
    /// Norms, biases, convolutions, rotary factors.
    Vectors,
    /// The output head, where it is not the embedding.
    Head,
    /// Blocks for multi-token prediction, which stay in the file.
    MultiToken,
    /// What turns pictures into embeddings, which stays in the file.
    Vision,
}

impl TensorKind {
    /// In a few words.
    #[must_use]
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

impl TensorGroup {
    /// The groups of a header, those without tensors left out.
    #[must_use]
    pub fn of(header: &Header) -> Vec<Self> {
        let depth = depth(header);
        let mut found: Vec<(TensorKind, Vec<&TensorInfo>)> = Vec::new();
        for info in header.tensors() {
            let kind = kind_of(header, info, depth);
            match found.iter_mut().find(|(known, _)| *known == kind) {
                Some((_, group)) => group.push(info),
                None => found.push((kind, vec![info])),
            }
        }
        found.sort_by_key(|(kind, _)| *kind);
        found.iter().map(|(kind, group)| Self::sum(*kind, group)).collect()
    }

    fn sum(kind: TensorKind, group: &[&TensorInfo]) -> Self {
        let mut types: Vec<(String, Bytes)> = Vec::new();
        for info in group {
            let name = dtype_name(info.dtype).to_owned();
            match types.iter_mut().find(|(known, _)| *known == name) {
                Some((_, bytes)) => *bytes = bytes.saturating_add(info.bytes),
                None => types.push((name, info.bytes)),
            }
        }
        types.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        let elements = |info: &&TensorInfo| info.dims.iter().copied().fold(1, u64::saturating_mul);
        Self {
            kind,
            tensors: u32::try_from(group.len()).unwrap_or(u32::MAX),
            elements: group.iter().map(elements).fold(0, u64::saturating_add),
            bytes: group.iter().map(|info| info.bytes).fold(Bytes::ZERO, Bytes::saturating_add),
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
    let Some((block, rest)) = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) else {
        return match name {
            "token_embd.weight" => TensorKind::Embedding,
            "output.weight" => TensorKind::Head,
            _ => TensorKind::Vectors,
        };
    };
    let is_matrix = info.dims.len() > 1 && !rest.starts_with("ssm_conv1d");
    match rest {
        _ if !is_matrix => TensorKind::Vectors,
        _ if rest.starts_with("ffn_") => TensorKind::FeedForward,
        _ if header.tensor(&format!("blk.{block}.ssm_a")).is_some() => TensorKind::Recurrent,
        _ => TensorKind::Attention,
    }
}
