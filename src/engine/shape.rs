//! Where every piece of a model goes, in the file and in memory, and what it occupies there.

use std::sync::Arc;

use candle_core::quantized::GgmlDType;

use super::{
    arena::PAGE,
    gguf::{Header, TensorInfo},
    kv::KV_BLOCK_TOKENS,
    reader::Extent,
    spec::{LayerSpec, Spec, Vector},
};
use crate::{
    policy::residency::{KvShape, LayerKind, LayerShape, ModelShape},
    units::{Bytes, Tokens},
};

/// The layout of a model.
#[derive(Clone, Debug)]
pub struct Layout {
    /// The layers, first to last.
    pub layers: Vec<LayerLayout>,
    /// What is resident in every plan.
    pub fixed: FixedLayout,
    /// What activations need.
    pub widths: Widths,
    /// Length of the staging ring.
    pub ring: Bytes,
}

/// One layer's matrices, in an arena when resident and in pieces when streamed.
#[derive(Clone, Debug)]
pub struct LayerLayout {
    /// Parts of the file that fill the arena, each with its place there.
    pub runs: Vec<(Extent, usize)>,
    /// Length of the arena.
    pub arena: Bytes,
    /// Where each matrix starts in the arena.
    pub offsets: Vec<usize>,
    /// Pieces in the order of use.
    pub pieces: Vec<Piece>,
}

/// Some rows of a matrix, the unit of streaming.
#[derive(Clone, Debug)]
pub struct Piece {
    /// Index among the layer's matrices.
    pub matrix: usize,
    /// First row.
    pub row: usize,
    /// Number of rows.
    pub rows: usize,
    /// Where they lie.
    pub extent: Extent,
}

/// The mapping that is resident in every plan: vectors as `f32`, then the output head as it is in the file.
#[derive(Clone, Debug)]
pub struct FixedLayout {
    /// Each layer's vectors: what, from where, and the index of the first `f32`.
    pub vectors: Vec<Vec<(Vector, TensorInfo, usize)>>,
    /// Index of the first `f32` of the last norm.
    pub output_norm: usize,
    /// Index of the first `f32` of the rotary factors.
    pub rope_factors: Option<usize>,
    /// The head's part of the file.
    pub head: Extent,
    /// Where the aligned superset of the head is read to.
    pub head_target: usize,
    /// Where the head itself starts.
    pub head_offset: usize,
    /// Length of the mapping.
    pub bytes: Bytes,
}

/// Elements that one token needs in each activation buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Widths {
    /// Residual stream, and its normalised copy.
    pub stream: usize,
    /// The widest projection.
    pub wide: usize,
    /// The second one.
    pub second: usize,
    /// The third one.
    pub third: usize,
    /// The fourth one.
    pub fourth: usize,
    /// Mixer output before its projection.
    pub mixed: usize,
    /// Sines and cosines, twice where some layers rotate differently.
    pub rotary: usize,
    /// The longest matrix row: what has to be quantised.
    pub columns: usize,
}

impl Layout {
    /// Lays out `spec`.
    #[must_use]
    pub fn of(spec: &Spec) -> Self {
        let largest = spec.layers.iter().map(matrix_bytes).max().unwrap_or(0);
        let piece = (largest / PIECES_PER_LAYER).clamp(PIECE_MIN, PIECE_MAX);
        let layers: Vec<LayerLayout> = spec.layers.iter().map(|layer| LayerLayout::of(layer, piece)).collect();
        let slot = layers
            .iter()
            .flat_map(|layer| &layer.pieces)
            .map(|piece| piece.extent.aligned_bytes())
            .max()
            .unwrap_or(0);
        let weights: usize = spec.layers.iter().map(matrix_bytes).sum::<usize>() + spec.head.bytes.as_len();
        // Whole pieces, so that none of it lies idle.
        let pieces = (weights / RING_SHARE).clamp(slot * RING_PIECES, RING_MAX.max(slot * RING_PIECES)) / slot.max(1);
        Self {
            layers,
            fixed: FixedLayout::of(spec),
            widths: Widths::of(spec),
            ring: Bytes::of_len(slot * pieces),
        }
    }

    /// The same as the planner sees it. `activations` is what the backend needs for one token's quantised copy.
    #[must_use]
    pub fn model_shape(&self, spec: &Spec, header: &Header, name: String, activations: Bytes) -> ModelShape {
        let layers = spec
            .layers
            .iter()
            .zip(&self.layers)
            .map(|(layer, layout)| LayerShape {
                kind: layer.kind,
                resident_bytes: layout.arena,
            })
            .collect();
        let state = state_bytes(spec);
        ModelShape {
            name,
            architecture: header.architecture().to_owned(),
            layers,
            fixed_bytes: self.fixed.bytes.saturating_add(header.heap_bytes().round_up(PAGE)),
            state_bytes: state,
            kv: kv_shape(spec),
            context_max: Tokens::new(spec.context_max),
            workspace_fixed_bytes: Bytes::of_len(spec.vocabulary * 4)
                .round_up(PAGE)
                .saturating_add(PAGE.saturating_mul(WORKSPACE_BUFFERS)),
            workspace_bytes_per_token: self.widths.bytes().saturating_add(activations),
            ring_bytes: self.ring,
        }
    }
}

impl LayerLayout {
    fn of(layer: &LayerSpec, piece_bytes: usize) -> Self {
        let mut order: Vec<(usize, &TensorInfo)> =
            layer.matrices.iter().map(|matrix| &matrix.tensor).enumerate().collect();
        order.sort_by_key(|(_, tensor)| tensor.offset);
        let mut runs: Vec<(Extent, usize)> = Vec::new();
        let mut offsets = vec![0; layer.matrices.len()];
        let mut arena = 0usize;
        for (index, tensor) in order {
            let bytes = tensor.bytes.as_len();
            let end = tensor.offset + tensor.bytes.get();
            match runs.last_mut() {
                // Next to the one before: one read, one place.
                Some((run, _)) if tensor.offset.saturating_sub(run.offset + run.bytes as u64) <= GAP_MAX => {
                    run.bytes = usize::try_from(end - run.offset).unwrap_or(usize::MAX);
                }
                _ => {
                    if let Some((run, target)) = runs.last() {
                        arena = target + run.aligned_bytes();
                    }
                    let extent = Extent {
                        what: tensor.name.as_str().into(),
                        offset: tensor.offset,
                        bytes,
                    };
                    runs.push((extent, arena));
                }
            }
            if let Some((run, target)) = runs.last()
                && let Some(offset) = offsets.get_mut(index)
            {
                *offset = target + usize::try_from(tensor.offset - run.aligned_offset()).unwrap_or(0);
            }
        }
        if let Some((run, target)) = runs.last() {
            arena = target + run.aligned_bytes();
        }
        let pieces = layer
            .matrices
            .iter()
            .enumerate()
            .flat_map(|(index, matrix)| {
                let count = (matrix.rows * matrix.row_bytes).div_ceil(piece_bytes).max(1);
                let step = matrix.rows.div_ceil(count).max(1);
                let what: Arc<str> = matrix.tensor.name.as_str().into();
                (0..matrix.rows).step_by(step).map(move |row| {
                    let rows = step.min(matrix.rows - row);
                    Piece {
                        matrix: index,
                        row,
                        rows,
                        extent: Extent {
                            what: Arc::clone(&what),
                            offset: matrix.tensor.offset + (row * matrix.row_bytes) as u64,
                            bytes: rows * matrix.row_bytes,
                        },
                    }
                })
            })
            .collect();
        Self {
            runs,
            arena: Bytes::of_len(arena),
            offsets,
            pieces,
        }
    }
}

impl FixedLayout {
    fn of(spec: &Spec) -> Self {
        let mut next = 0usize;
        let mut place = |tensor: &TensorInfo| {
            let start = next;
            let elements: u64 = tensor.dims.iter().product();
            // Each vector starts at a cache line.
            next = (start + usize::try_from(elements).unwrap_or(usize::MAX)).next_multiple_of(16);
            start
        };
        let vectors = spec
            .layers
            .iter()
            .map(|layer| {
                layer
                    .vectors
                    .iter()
                    .map(|(vector, tensor)| (*vector, tensor.clone(), place(tensor)))
                    .collect()
            })
            .collect();
        let output_norm = place(&spec.output_norm);
        let rope_factors = spec.rope_factors.as_ref().map(&mut place);
        let head = Extent {
            what: spec.head.name.as_str().into(),
            offset: spec.head.offset,
            bytes: spec.head.bytes.as_len(),
        };
        let head_target = (next * 4).next_multiple_of(PAGE.as_len());
        Self {
            vectors,
            output_norm,
            rope_factors,
            head_target,
            head_offset: head_target + head.lead(),
            bytes: Bytes::of_len(head_target + head.aligned_bytes()),
            head,
        }
    }
}

impl Widths {
    fn of(spec: &Spec) -> Self {
        let attention = &spec.attention;
        let query = attention.heads * attention.head_dim;
        let kv = attention.kv_heads * attention.head_dim;
        let attends = spec.attention_layers() > 0;
        let (channels, values, heads) = spec.recurrent.map_or((0, 0, 0), |recurrent| {
            (recurrent.channels(), recurrent.values(), recurrent.value_heads)
        });
        let projected = if attention.gated { 2 * query } else { query };
        let ff = spec.feed_forward;
        Self {
            stream: spec.width,
            wide: projected.max(channels).max(ff),
            second: kv.max(values).max(ff),
            third: kv.max(heads),
            fourth: heads,
            mixed: query.max(channels),
            rotary: match (attends, attention.local) {
                (false, _) => 0,
                (true, None) => attention.rotary,
                (true, Some(_)) => 2 * attention.rotary,
            },
            columns: spec.width.max(query).max(values).max(ff),
        }
    }

    /// Bytes of all buffers for one token.
    #[must_use]
    pub const fn bytes(&self) -> Bytes {
        let elements = 2 * self.stream + self.wide + self.second + self.third + self.fourth + self.mixed + self.rotary;
        Bytes::of_len(elements * 4)
    }
}

/// What the KV cache of `spec` occupies for each token.
#[must_use]
pub fn kv_shape(spec: &Spec) -> KvShape {
    let mut shape = KvShape {
        attention_layers: narrow(spec.attention_layers()),
        kv_heads: narrow(spec.attention.kv_heads),
        head_dim: narrow(spec.attention.head_dim),
        element_bytes: 2,
        block_tokens: KV_BLOCK_TOKENS,
    };
    // Blocks are whole pages, so that the plan and the kernel count alike; heads are multiples of 8 elements.
    if !shape.block_bytes().get().is_multiple_of(PAGE.get()) {
        shape.block_tokens = Tokens::new(2 * KV_BLOCK_TOKENS.get());
    }
    shape
}

/// Recurrent and convolution state of one sequence, in whole pages; nothing for models without recurrent layers.
#[must_use]
pub fn state_bytes(spec: &Spec) -> Bytes {
    let layers = spec
        .layers
        .iter()
        .filter(|layer| layer.kind == LayerKind::Recurrent)
        .count();
    spec.recurrent.map_or(Bytes::ZERO, |recurrent| {
        Bytes::of_len(layers * (recurrent.state_len() + recurrent.conv_len()) * 4).round_up(PAGE)
    })
}

/// The types that matrices have, each once.
#[must_use]
pub fn distinct_types(spec: &Spec) -> Vec<GgmlDType> {
    let mut types = Vec::new();
    for dtype in spec.matrix_types() {
        if !types.contains(&dtype) {
            types.push(dtype);
        }
    }
    types
}

fn matrix_bytes(layer: &LayerSpec) -> usize {
    layer.matrices.iter().map(|matrix| matrix.rows * matrix.row_bytes).sum()
}

fn narrow(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

/// Tensors of one layer that are no further apart are read in one go, the gap included: norms and biases lie there.
const GAP_MAX: u64 = 256 * 1024;
/// A streamed layer comes in so many pieces or more, so that the ring stays below the layer.
const PIECES_PER_LAYER: usize = 8;
/// Smaller reads cost more in calls than they save in memory.
const PIECE_MIN: usize = 64 * 1024;
/// Larger reads gain nothing: 4 MiB reads reach the full rate of NVMe disks.
const PIECE_MAX: usize = 4 << 20;
/// Pieces that fit the ring at least: one in use, one being read, and two for the unevenness between the two.
const RING_PIECES: usize = 4;
/// The ring is this part of the weights: while the resident ones between two streamed layers are computed on, and the
/// output head, the disk goes on; memory is some 12 times as fast as it.
const RING_SHARE: usize = 16;
/// The largest ring.
const RING_MAX: usize = 64 << 20;
/// Activation buffers, each rounded up to a page.
const WORKSPACE_BUFFERS: u64 = 14;

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::engine::{
        spec::Architecture,
        synthetic::{Synthetic, TypeMix},
    };

    fn layout(model: &Synthetic) -> (Spec, Layout, tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        model.write(&path).unwrap();
        let spec = Spec::read(&Header::read(&path).unwrap()).unwrap();
        let layout = Layout::of(&spec);
        (spec, layout, folder, path)
    }

    #[test]
    fn pieces_cover_each_matrix_once_and_the_ring_holds_several() {
        for architecture in [Architecture::Qwen35, Architecture::Llama] {
            let model = Synthetic {
                feed_forward: 1024,
                ..Synthetic::tiny(architecture, TypeMix::All(GgmlDType::F32), 1)
            };
            let (spec, layout, ..) = layout(&model);
            for (layer, parts) in spec.layers.iter().zip(&layout.layers) {
                for (index, matrix) in layer.matrices.iter().enumerate() {
                    let mut row = 0;
                    let mut offset = matrix.tensor.offset;
                    for piece in parts.pieces.iter().filter(|piece| piece.matrix == index) {
                        assert_eq!((piece.row, piece.extent.offset), (row, offset));
                        row += piece.rows;
                        offset += piece.extent.bytes as u64;
                        assert!(piece.extent.aligned_bytes() * RING_PIECES <= layout.ring.as_len());
                    }
                    assert_eq!(row, matrix.rows);
                    assert_eq!(offset, matrix.tensor.offset + matrix.tensor.bytes.get());
                }
                assert!(layout.ring <= parts.arena, "a ring is less than a layer");
            }
        }
    }

    #[test]
    fn arenas_hold_little_more_than_the_matrices() {
        let (spec, layout, ..) = layout(&Synthetic::tiny(Architecture::Qwen35, TypeMix::All(GgmlDType::Q8_0), 1));
        for (layer, parts) in spec.layers.iter().zip(&layout.layers) {
            let bytes: Bytes = layer.matrices.iter().map(|matrix| matrix.tensor.bytes).sum();
            assert!(
                parts.arena >= bytes && parts.arena <= bytes + Bytes::from_kib(8),
                "{}",
                parts.arena
            );
            for (offset, matrix) in parts.offsets.iter().zip(&layer.matrices) {
                let start = Bytes::of_len(*offset);
                assert!(start + matrix.tensor.bytes <= parts.arena);
                assert_eq!(start.get() % PAGE.get(), matrix.tensor.offset % PAGE.get());
            }
        }
    }
}
