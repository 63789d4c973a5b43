//! Layout of a model: place and size of every piece in file and memory.

use std::{ops::Range, sync::Arc};

mod cache;

use self::cache::window_bytes;
pub(super) use self::cache::{WINDOW_ROWS, narrow};
pub use self::cache::{draft_kv, kv_shape, layer_state_bytes, sequence_state_bytes};
use super::{
    gguf::{GgmlDType, Header, TensorInfo},
    reader::Extent,
    spec::{AttentionSpec, ExpertSpec, LayerSpec, Matrix, RecurrentSpec, Role, Spec, Vector},
};
use cotenant_policy::residency::{LayerKind, LayerShape, ModelShape};
use cotenant_units::{Bytes, Tokens, page};

/// The layout of a model.
#[derive(Clone, Debug)]
pub struct Layout {
    /// Independently resident units in the order of use: layers, tensor groups of large layers, tiles of the head, the draft
    /// block.
    pub parts: Vec<PartLayout>,
    /// For each layer, and the draft block, the part that contains each of its matrices.
    pub layers: Vec<Vec<usize>>,
    /// The parts that are tiles of the output head.
    pub head: Range<usize>,
    /// The part that is the draft block, if there is one.
    pub draft: Option<usize>,
    /// Rooms for experts, if the model is a mixture.
    pub experts: Option<ExpertLayout>,
    /// Memory resident in every plan.
    pub fixed: FixedLayout,
    /// Widths of activation buffers.
    pub widths: Widths,
    /// Length of the staging ring.
    pub ring: Bytes,
}

/// Rooms for experts of a mixture. A room holds the rows of one expert in three matrices, in the alignment of the file.
#[derive(Clone, Debug)]
pub struct ExpertLayout {
    /// The rooms of each layer.
    pub layers: Vec<ExpertRooms>,
    /// Bytes of the largest room.
    pub room: usize,
    /// Rooms in use at once at most, for experts that are not resident: those of one token.
    pub staged: usize,
}

/// Rooms of one layer.
#[derive(Clone, Debug)]
pub struct ExpertRooms {
    /// Its parts with rooms.
    pub parts: Range<usize>,
    /// Rooms of each part but the last.
    pub each: usize,
    /// Bytes of a room.
    pub room: usize,
    /// Of each of [`Role::EXPERTS`] that the layer has, the index among the layer's matrices, and the offset in a room.
    pub places: Vec<(usize, usize)>,
    /// The extents of each expert, one per matrix.
    pub extents: Vec<Vec<Extent>>,
}

/// Matrices in an arena when resident, and in pieces when streamed; experts of a mixture are read one by one instead, and
/// their part has no pieces.
#[derive(Clone, Debug)]
pub struct PartLayout {
    /// The layer; `None` for a tile of the head.
    pub layer: Option<usize>,
    /// Parts of the same layer before this one, or tiles before it.
    pub number: usize,
    /// Ranges of the file that fill the arena, each with its offset there.
    pub runs: Vec<(Extent, usize)>,
    /// Length of the arena.
    pub arena: Bytes,
    /// Its matrices, in the order of use.
    pub slabs: Vec<Slab>,
    /// Pieces in the order of use.
    pub pieces: Vec<Piece>,
}

/// Rows of a matrix that are resident together: all of them in a layer, a subset in the head.
#[derive(Clone, Debug)]
pub struct Slab {
    /// Index among the layer's matrices; 0 in the head.
    pub matrix: usize,
    /// First row.
    pub row: usize,
    /// Number of rows.
    pub rows: usize,
    /// Bytes of a row.
    pub row_bytes: usize,
    /// Position in the file.
    pub extent: Extent,
    /// Offset of the first row in the arena.
    pub offset: usize,
}

/// Some rows of a matrix, the unit of streaming.
#[derive(Clone, Debug)]
pub struct Piece {
    /// Index among the layer's matrices; 0 in the head.
    pub matrix: usize,
    /// First row.
    pub row: usize,
    /// Number of rows.
    pub rows: usize,
    /// Position in the file.
    pub extent: Extent,
}

/// The mapping that is resident in every plan: vectors as `f32`.
#[derive(Clone, Debug)]
pub struct FixedLayout {
    /// Vectors of each layer: kind, source, and index of the first `f32`.
    pub vectors: Vec<Vec<(Vector, TensorInfo, usize)>>,
    /// Index of the first `f32` of the last norm.
    pub output_norm: usize,
    /// Index of the first `f32` of the last norm's bias.
    pub output_norm_bias: Option<usize>,
    /// Index of the first `f32` of the bias of the logits.
    pub output_bias: Option<usize>,
    /// Index of the first `f32` of the rotary factors.
    pub rope_factors: Option<usize>,
    /// Length of the mapping.
    pub bytes: Bytes,
}

/// Elements per token in each activation buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Widths {
    /// Residual stream, and its normalised copy.
    pub stream: usize,
    /// Width of the widest projection.
    pub wide: usize,
    /// Width of the second one.
    pub second: usize,
    /// Width of the third one.
    pub third: usize,
    /// Width of the fourth one.
    pub fourth: usize,
    /// Mixer output before its projection.
    pub mixed: usize,
    /// Outputs of the experts of a mixture.
    pub experts: usize,
    /// Sines and cosines, of both kinds if some layers rotate differently.
    pub rotary: usize,
    /// Inputs of their own for all layers, and the embedding to which they add.
    pub inputs: usize,
    /// The longest matrix row, which bounds quantisation.
    pub columns: usize,
}

impl Layout {
    /// Lays out `spec`.
    pub fn of(spec: &Spec) -> Self {
        Self::in_parts(spec, PART_MIN)
    }

    /// Lays out `spec` in parts of at least `least` bytes, as far as tensor groups allow.
    pub fn in_parts(spec: &Spec, least: usize) -> Self {
        let largest = spec.layers.iter().map(matrix_bytes).max().unwrap_or(0);
        let piece = (largest / PIECES_PER_LAYER).clamp(PIECE_MIN, PIECE_MAX);
        let mut parts = Vec::new();
        let (mut layers, mut mixtures) = (Vec::new(), Vec::new());
        for (index, layer) in spec.layers.iter().enumerate() {
            let mut part_of = vec![0; layer.matrices.len()];
            for (number, group) in groups(layer, least).into_iter().enumerate() {
                for &matrix in &group {
                    if let Some(part) = part_of.get_mut(matrix) {
                        *part = parts.len();
                    }
                }
                let slabs = group
                    .iter()
                    .filter_map(|&matrix| Slab::of(matrix, layer.matrices.get(matrix)?));
                parts.push(PartLayout::of(Some(index), number, slabs.collect(), piece));
            }
            if let Some(experts) = &spec.experts {
                let rooms = ExpertRooms::of(layer, experts, least, parts.len());
                let rooms = rooms.unwrap_or_else(|| ExpertRooms::none(parts.len()));
                let number = parts
                    .iter()
                    .filter(|part| part.layer == Some(index))
                    .count();
                parts.extend((0..rooms.parts.len()).map(|part| rooms.part(index, number, part)));
                mixtures.push(rooms);
            }
            layers.push(part_of);
        }
        let experts = spec.experts.as_ref().map(|experts| ExpertLayout {
            room: mixtures.iter().map(|rooms| rooms.room).max().unwrap_or(0),
            layers: mixtures,
            staged: experts.used,
        });
        let head = parts.len();
        for (number, slabs) in head_tiles(spec, least).into_iter().enumerate() {
            parts.push(PartLayout::of(None, number, slabs, piece));
        }
        let head = head..parts.len();
        let slot = parts
            .iter()
            .flat_map(|part| &part.pieces)
            .map(|piece| piece.extent.aligned_bytes())
            .max()
            .unwrap_or(0);
        // Experts have no pieces.
        let streamed = parts.iter().filter(|part| !part.pieces.is_empty());
        let weights: usize = streamed.map(|part| part.arena.as_len()).sum();
        // Whole pieces, so that no part of the ring is idle.
        let slots = (weights / RING_SHARE)
            .clamp(slot * RING_PIECES, RING_MAX.max(slot * RING_PIECES))
            / slot.max(1);
        let draft = spec.draft.as_ref().map(|block| {
            let slabs = block.matrices.iter().enumerate();
            let slabs = slabs.filter_map(|(number, matrix)| Slab::of(number, matrix));
            layers.push(vec![parts.len(); block.matrices.len()]);
            let index = Some(spec.layers.len());
            parts.push(PartLayout::of(index, 0, slabs.collect(), piece));
            parts.len() - 1
        });
        Self {
            head,
            draft,
            parts,
            layers,
            experts,
            fixed: FixedLayout::of(spec),
            widths: Widths::of(spec),
            ring: Bytes::of_len(slot * slots),
        }
    }

    /// The same as seen by the planner. `activations` is the backend's size of one token's quantised copy, `scratch`
    /// its threads' attention scratch.
    pub fn model_shape(
        &self,
        spec: &Spec,
        header: &Header,
        name: String,
        activations: Bytes,
        scratch: Bytes,
    ) -> ModelShape {
        let layers = self
            .parts
            .iter()
            .enumerate()
            .map(|(index, part)| {
                let kind = match part.layer.and_then(|layer| spec.layers.get(layer)) {
                    Some(layer) => layer.kind,
                    None if self.draft == Some(index) => LayerKind::Draft,
                    None => LayerKind::Head,
                };
                let shape = LayerShape::new(kind, narrow(part.number), part.arena);
                match spec.experts.filter(|_| part.pieces.is_empty()) {
                    None => shape,
                    Some(experts) => LayerShape {
                        kind: LayerKind::Experts,
                        used: narrow((1000 * experts.used).div_ceil(experts.count)),
                        ..shape
                    },
                }
            })
            .collect();
        ModelShape {
            name,
            architecture: header.architecture().to_owned(),
            layers,
            fixed_bytes: self
                .fixed
                .bytes
                .saturating_add(header.heap_bytes().round_up(page())),
            state_bytes: sequence_state_bytes(spec).saturating_add(layer_state_bytes(spec)),
            kv: kv_shape(spec),
            context_max: Tokens::new(spec.context_max),
            workspace_fixed_bytes: logits_bytes(spec)
                .round_up(page())
                .saturating_add(window_bytes(&kv_shape(spec)))
                .saturating_add(
                    self.experts
                        .as_ref()
                        .map_or(Bytes::ZERO, ExpertLayout::staging),
                )
                .saturating_add(scratch.round_up(page()))
                .saturating_add(page().saturating_mul(WORKSPACE_BUFFERS)),
            workspace_bytes_per_token: self.widths.bytes().saturating_add(activations),
            ring_bytes: self.ring,
        }
    }
}

impl Layout {
    /// Whether the ring brings a part while it is not resident: experts are read one by one, and the draft block is not
    /// read for a token.
    pub fn is_streamed(&self, part: usize) -> bool {
        let pieces = self.parts.get(part).map(|part| &part.pieces);
        self.draft != Some(part) && pieces.is_some_and(|pieces| !pieces.is_empty())
    }
}

impl ExpertLayout {
    /// Bytes of the rooms for experts that are not resident.
    pub fn staging(&self) -> Bytes {
        Bytes::of_len(self.room * self.staged).round_up(page())
    }
}

impl ExpertRooms {
    /// Lays out the experts of a layer in parts of at least `least` bytes, the first of them with index `first`.
    fn of(layer: &LayerSpec, spec: &ExpertSpec, least: usize, first: usize) -> Option<Self> {
        let mut matrices = Vec::new();
        for role in Role::EXPERTS {
            let Some((number, matrix)) = layer.matrix(role) else {
                continue;
            };
            matrices.push((
                number,
                matrix,
                Arc::<str>::from(matrix.tensor.name.as_str()),
            ));
        }
        let extents_of = |expert: usize| {
            matrices.iter().map(move |(_, matrix, name)| {
                let bytes = matrix.rows / spec.count * matrix.row_bytes;
                // Twice as many where the tensor holds both factors, of which this one is the second.
                let step = matrix.tensor.bytes.as_len() / spec.count;
                let first = match matrix.role {
                    Role::ExpertUp => step - bytes,
                    _ => 0,
                };
                Extent {
                    what: Arc::clone(name),
                    offset: matrix.tensor.offset + (expert * step + first) as u64,
                    bytes,
                }
            })
        };
        layer.matrix(Role::ExpertDown)?;
        let extents = (0..spec.count).map(|expert| extents_of(expert).collect());
        let extents: Vec<Vec<Extent>> = extents.collect();
        let mut room = 0;
        let mut places = Vec::new();
        for (at, (number, ..)) in matrices.iter().enumerate() {
            places.push((*number, room));
            let of_matrix = extents.iter().filter_map(|extents| extents.get(at));
            room += of_matrix.map(Extent::aligned_bytes).max()?;
        }
        let each = least.div_ceil(room.max(1)).clamp(1, spec.count);
        Some(Self {
            parts: first..first + spec.count.div_ceil(each),
            each,
            room,
            places,
            extents,
        })
    }

    /// Those of a layer without experts.
    const fn none(first: usize) -> Self {
        Self {
            parts: first..first,
            each: 1,
            room: 0,
            places: Vec::new(),
            extents: Vec::new(),
        }
    }

    /// Part `part` of these, filled with the experts of the same numbers as its rooms.
    fn part(&self, layer: usize, first: usize, part: usize) -> PartLayout {
        let experts = self.extents.iter().skip(part * self.each).take(self.each);
        let runs = experts.clone().enumerate().flat_map(|(room, extents)| {
            let places = extents.iter().zip(&self.places);
            places.map(move |(extent, (_, offset))| (extent.clone(), room * self.room + offset))
        });
        PartLayout {
            layer: Some(layer),
            number: first + part,
            runs: runs.collect(),
            arena: Bytes::of_len(experts.len() * self.room),
            slabs: Vec::new(),
            pieces: Vec::new(),
        }
    }
}

impl Slab {
    /// All of a matrix.
    fn of(number: usize, matrix: &Matrix) -> Option<Self> {
        Some(Self {
            matrix: number,
            row: 0,
            rows: matrix.rows,
            row_bytes: matrix.row_bytes,
            extent: Extent {
                what: matrix.tensor.name.as_str().into(),
                offset: matrix.tensor.offset,
                bytes: matrix.rows.checked_mul(matrix.row_bytes)?,
            },
            offset: 0,
        })
    }
}

/// Matrices of a layer that are resident together, in the order of use: the mixer, gate and up, down and those of the
/// layer's own input, each with its preceding matrices if they are small.
fn groups(layer: &LayerSpec, least: usize) -> Vec<Vec<usize>> {
    let group_of = |role: Role| match role {
        Role::FfnGate | Role::FfnUp => 1,
        Role::FfnDown | Role::LayerGate | Role::LayerInput | Role::LayerOutput => 2,
        // They have parts of their own.
        Role::ExpertDown | Role::ExpertGate | Role::ExpertUp => 3,
        _ => 0,
    };
    let mut groups: Vec<(usize, Vec<usize>)> = Vec::new();
    for kind in 0..3 {
        let members = || {
            layer
                .matrices
                .iter()
                .enumerate()
                .filter(move |(_, matrix)| group_of(matrix.role) == kind)
        };
        let bytes: usize = members()
            .map(|(_, matrix)| matrix.rows * matrix.row_bytes)
            .sum();
        let members = members().map(|(number, _)| number);
        match groups.last_mut() {
            Some((before, group)) if *before < least || bytes < least => {
                *before += bytes;
                group.extend(members);
            }
            _ => groups.push((bytes, members.collect())),
        }
    }
    groups.into_iter().map(|(_, group)| group).collect()
}

/// The used rows of the head in tiles, each of `least` bytes up to twice that.
fn head_tiles(spec: &Spec, least: usize) -> Vec<Vec<Slab>> {
    let all = 0..spec.vocabulary;
    let ranges = spec.said.as_deref().unwrap_or(std::slice::from_ref(&all));
    let row_bytes = spec.head.bytes.as_len() / spec.vocabulary.max(1);
    let rows: usize = ranges.iter().map(ExactSizeIterator::len).sum();
    let count = (rows * row_bytes / least.max(1)).max(1);
    let step = rows.div_ceil(count).max(1);
    let what: Arc<str> = spec.head.name.as_str().into();
    let mut tiles: Vec<Vec<Slab>> = Vec::new();
    let mut room = 0;
    for range in ranges {
        let mut row = range.start;
        while row < range.end {
            if room == 0 {
                tiles.push(Vec::new());
                room = step;
            }
            let rows = room.min(range.end - row);
            if let Some(tile) = tiles.last_mut() {
                tile.push(Slab {
                    matrix: 0,
                    row,
                    rows,
                    row_bytes,
                    extent: Extent {
                        what: Arc::clone(&what),
                        offset: spec.head.offset + (row * row_bytes) as u64,
                        bytes: rows * row_bytes,
                    },
                    offset: 0,
                });
            }
            (row, room) = (row + rows, room - rows);
        }
    }
    tiles
}

impl PartLayout {
    fn of(layer: Option<usize>, number: usize, mut slabs: Vec<Slab>, piece_bytes: usize) -> Self {
        // The gaps between rows of the head are removed on purpose.
        let gap_max = if layer.is_some() {
            GAP_MAX
        } else {
            page().get()
        };
        let mut runs: Vec<(Extent, usize)> = Vec::new();
        let mut arena = 0usize;
        let mut order: Vec<&mut Slab> = slabs.iter_mut().collect();
        order.sort_by_key(|slab| slab.extent.offset);
        for slab in order {
            let extent = &slab.extent;
            let end = extent.offset + extent.bytes as u64;
            match runs.last_mut() {
                // Adjacent to the previous one: one read, one place.
                Some((run, _))
                    if extent.offset.saturating_sub(run.offset + run.bytes as u64) <= gap_max =>
                {
                    let bytes = usize::try_from(end - run.offset).unwrap_or(usize::MAX);
                    run.bytes = run.bytes.max(bytes);
                }
                _ => {
                    if let Some((run, target)) = runs.last() {
                        arena = target + run.aligned_bytes();
                    }
                    runs.push((extent.clone(), arena));
                }
            }
            if let Some((run, target)) = runs.last() {
                slab.offset =
                    target + usize::try_from(extent.offset - run.aligned_offset()).unwrap_or(0);
            }
        }
        if let Some((run, target)) = runs.last() {
            arena = target + run.aligned_bytes();
        }
        let pieces = slabs
            .iter()
            .flat_map(|slab| {
                let count = slab.extent.bytes.div_ceil(piece_bytes).max(1);
                let step = slab.rows.div_ceil(count).max(1);
                (0..slab.rows).step_by(step).map(move |row| {
                    let rows = step.min(slab.rows - row);
                    Piece {
                        matrix: slab.matrix,
                        row: slab.row + row,
                        rows,
                        extent: Extent {
                            what: Arc::clone(&slab.extent.what),
                            offset: slab.extent.offset + (row * slab.row_bytes) as u64,
                            bytes: rows * slab.row_bytes,
                        },
                    }
                })
            })
            .collect();
        Self {
            layer,
            number,
            runs,
            arena: Bytes::of_len(arena),
            slabs,
            pieces,
        }
    }
}

impl FixedLayout {
    /// Range of a layer's vector, in elements.
    pub fn vector(&self, index: usize, vector: Vector) -> Option<Range<usize>> {
        let mut vectors = self.vectors.get(index)?.iter();
        let (_, tensor, at) = vectors.find(|(kind, _, _)| *kind == vector)?;
        let elements: u64 = tensor.dims.iter().product();
        Some(*at..*at + usize::try_from(elements).ok()?)
    }

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
            .layers_and_draft()
            .map(|layer| {
                layer
                    .vectors
                    .iter()
                    .map(|(vector, tensor)| (*vector, tensor.clone(), place(tensor)))
                    .collect()
            })
            .collect();
        let output_norm = place(&spec.output_norm);
        let output_norm_bias = spec.output_norm_bias.as_ref().map(&mut place);
        let output_bias = spec.output_bias.as_ref().map(&mut place);
        let rope_factors = spec.rope_factors.as_ref().map(&mut place);
        Self {
            vectors,
            output_norm,
            output_norm_bias,
            output_bias,
            rope_factors,
            bytes: Bytes::of_len(next * 4).round_up(page()),
        }
    }
}

impl Widths {
    fn of(spec: &Spec) -> Self {
        let attention = &spec.attention;
        let most = |of: fn(&AttentionSpec) -> usize| attention.kinds().map(|kind| of(&kind)).max();
        let query = most(AttentionSpec::query).unwrap_or(0);
        let kv = most(AttentionSpec::kv).unwrap_or(0);
        let projected = most(AttentionSpec::projected).unwrap_or(0);
        let attends = spec.attention_layers() > 0;
        let inputs = spec.layer_inputs.as_ref();
        let of = |width: fn(&RecurrentSpec) -> usize| spec.recurrent.as_ref().map_or(0, width);
        let (values, heads) = (of(RecurrentSpec::values), of(RecurrentSpec::value_heads));
        let experts = spec.experts;
        let ff = experts
            .map_or(0, |experts| experts.inner)
            .max(inputs.map_or(0, |inputs| inputs.width))
            .max(spec.feed_forward);
        let draft = spec.draft.as_ref().map_or(0, |_| 2 * spec.width);
        let shared = usize::from(experts.is_some_and(|experts| experts.beside.width() > 0));
        Self {
            stream: spec.width,
            wide: projected.max(of(RecurrentSpec::inputs)).max(ff).max(draft),
            second: kv.max(values).max(ff).max(draft),
            third: kv
                .max(heads)
                .max(experts.map_or(0, |experts| experts.count)),
            fourth: heads.max(shared),
            mixed: query
                .max(of(RecurrentSpec::scratch))
                .max(experts.map_or(0, |_| spec.width)),
            experts: experts.map_or(0, |experts| (experts.used + shared) * spec.width),
            rotary: match attends {
                true => attention.kinds().map(|kind| kind.rotary).sum(),
                false => 0,
            },
            inputs: inputs.map_or(0, |inputs| spec.layers.len() * inputs.width + spec.width),
            columns: spec.width.max(query).max(values).max(ff).max(draft),
        }
    }

    /// Bytes of all buffers for one token.
    pub const fn bytes(&self) -> Bytes {
        let elements = 2 * self.stream
            + self.wide
            + self.second
            + self.third
            + self.fourth
            + self.mixed
            + self.experts
            + self.rotary
            + self.inputs;
        Bytes::of_len(elements * 4)
    }
}

/// The distinct types of matrices.
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
    layer
        .matrices
        .iter()
        .filter(|matrix| !Role::EXPERTS.contains(&matrix.role))
        .map(|matrix| matrix.rows * matrix.row_bytes)
        .sum()
}

/// Tensors of one layer within this distance are read in one go, including the gap: norms and biases lie there.
const GAP_MAX: u64 = 256 * 1024;
/// Smaller tensor groups are resident together with their neighbours: an arena ends in up to 2 MiB of small pages,
/// which are slower to read and to release than the huge ones before them.
const PART_MIN: usize = 8 << 20;
/// Least number of pieces of a streamed layer, so that the ring stays smaller than the layer.
const PIECES_PER_LAYER: usize = 8;
/// Smaller reads cost more in system calls than they save in memory.
const PIECE_MIN: usize = 64 * 1024;
/// Larger reads bring no gain: 4 MiB reads reach the full rate of NVMe disks.
const PIECE_MAX: usize = 4 << 20;
/// Least number of pieces in the ring: one in use, one being read, and two as slack between the two rates.
const RING_PIECES: usize = 4;
/// The ring's share of the weights: the disk continues while the resident layers between two streamed ones, and the
/// output head, are computed; memory is some 12 times as fast as the disk.
const RING_SHARE: usize = 16;
/// The largest ring.
const RING_MAX: usize = 64 << 20;
/// Distance between the logits of two rows, in floats.
pub(super) const fn logits_stride(spec: &Spec) -> usize {
    spec.vocabulary + FLAGS
}

/// Memory of the logits of all tokens computed together.
pub(super) fn logits_bytes(spec: &Spec) -> Bytes {
    Bytes::of_len(logits_stride(spec) * 4 * ANSWERS_MAX)
}

/// Maximum number of answers computed together. Our choice: at this number, some processors take longer to compute a
/// pass than to read the weights, and more answers gain nothing.
pub(super) const ANSWERS_MAX: usize = 8;

/// Words after the logits: whether keys or values are not finite, and the findings of
/// [`Finish`](super::backend::Finish).
pub(super) const FLAGS: usize = 4;
/// Activation buffers, each rounded up to a page.
const WORKSPACE_BUFFERS: u64 = 14;

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::{cache::kv_shape_with, *};
    use crate::{
        spec::Architecture,
        synthetic::{Synthetic, TypeMix},
        weights::Weights as _,
    };
    use cotenant_policy::kv_type::KvType;

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
            let (spec, ..) = layout(&model);
            for least in [usize::MAX, 300_000, 1] {
                let layout = Layout::in_parts(&spec, least);
                let layers = spec.layers.iter().map(|layer| layer.matrices.as_slice());
                for (index, matrices) in layers.enumerate() {
                    for (number, matrix) in matrices.iter().enumerate() {
                        let part = &layout.parts[layout.layers[index][number]];
                        assert_eq!(part.layer, Some(index));
                        let pieces = part.pieces.iter().filter(|piece| piece.matrix == number);
                        covered(&layout, pieces, 0, matrix.rows, &matrix.tensor);
                    }
                }
                let head = layout.parts[layout.head.clone()].iter();
                let pieces = head.flat_map(|part| &part.pieces);
                covered(&layout, pieces, 0, spec.vocabulary, &spec.head);
                let parts_of_a_layer = layout
                    .parts
                    .iter()
                    .filter(|part| part.layer == Some(0))
                    .count();
                assert_eq!(
                    parts_of_a_layer,
                    if least == usize::MAX { 1 } else { 3 },
                    "{least}"
                );
                assert_eq!(layout.head.len() > 1, least == 1);
            }
        }
    }

    #[test]
    fn a_run_has_all_of_its_slabs_also_where_one_lies_within_another() {
        let slab = |matrix, offset: u64, bytes: usize| Slab {
            matrix,
            row: 0,
            rows: 1,
            row_bytes: bytes,
            offset: 0,
            extent: Extent {
                what: "slab".into(),
                offset,
                bytes,
            },
        };
        let slabs = vec![
            slab(0, 0, 1 << 20),
            slab(1, 4096, 100 << 10),
            slab(2, 1 << 20, 1 << 20),
            slab(3, 8 << 20, 4096),
        ];
        let part = PartLayout::of(Some(0), 0, slabs, 1 << 20);
        assert_eq!(part.runs.len(), 2, "the last one lies far off");
        for slab in &part.slabs {
            let (run, target) = part
                .runs
                .iter()
                .rfind(|(run, _)| run.offset <= slab.extent.offset)
                .unwrap();
            assert!(slab.extent.offset + slab.extent.bytes as u64 <= run.offset + run.bytes as u64);
            let ahead = usize::try_from(slab.extent.offset - run.offset).unwrap();
            assert_eq!(slab.offset, target + ahead);
            assert!(slab.offset + slab.extent.bytes <= part.arena.as_len());
        }
    }

    fn covered<'a>(
        layout: &Layout,
        pieces: impl Iterator<Item = &'a Piece>,
        mut row: usize,
        rows: usize,
        tensor: &TensorInfo,
    ) {
        let mut offset = tensor.offset;
        for piece in pieces {
            assert_eq!((piece.row, piece.extent.offset), (row, offset));
            row += piece.rows;
            offset += piece.extent.bytes as u64;
            assert!(piece.extent.aligned_bytes() * RING_PIECES <= layout.ring.as_len());
        }
        assert_eq!(row, rows);
        assert_eq!(offset, tensor.offset + tensor.bytes.get());
    }

    #[test]
    fn blocks_of_the_cache_are_whole_pages_of_any_kernel_or_are_rounded_to_them() {
        let (spec, ..) = layout(&Synthetic::tiny(
            Architecture::Qwen35,
            TypeMix::All(GgmlDType::Q8_0),
            1,
        ));
        for page in [4, 16, 64].map(Bytes::from_kib) {
            let shape = kv_shape_with(&spec, page);
            assert!(shape.granule >= page && shape.granule.get().is_multiple_of(page.get()));
            for tokens in [1, 64, 65, 1000] {
                let bytes = shape.capacity_bytes(Tokens::new(tokens), KvType::F16);
                assert!(
                    bytes > Bytes::ZERO && bytes.get().is_multiple_of(page.get()),
                    "{tokens}: {bytes}"
                );
            }
        }
    }

    #[test]
    fn a_large_cache_takes_huge_pages_only_where_these_have_2_mib() {
        let (mut spec, ..) = layout(&Synthetic::tiny(
            Architecture::Qwen35,
            TypeMix::All(GgmlDType::Q8_0),
            1,
        ));
        (spec.attention.kv_heads, spec.attention.head_dim) = (64, 256);
        let granule = |kib| kv_shape_with(&spec, Bytes::from_kib(kib)).granule;
        assert_eq!(
            [4, 16, 64].map(granule),
            [2048, 16, 64].map(Bytes::from_kib)
        );
    }

    #[test]
    fn arenas_hold_little_more_than_the_matrices() {
        let (_, layout, ..) = layout(&Synthetic::tiny(
            Architecture::Qwen35,
            TypeMix::All(GgmlDType::Q8_0),
            1,
        ));
        for part in &layout.parts {
            let bytes: Bytes = part
                .slabs
                .iter()
                .map(|slab| Bytes::of_len(slab.extent.bytes))
                .sum();
            assert!(
                part.arena >= bytes && part.arena <= bytes + page().saturating_mul(2),
                "{}",
                part.arena
            );
            for slab in &part.slabs {
                let start = Bytes::of_len(slab.offset);
                assert!(start + Bytes::of_len(slab.extent.bytes) <= part.arena);
                assert_eq!(
                    start.get() % page().get(),
                    slab.extent.offset % page().get()
                );
            }
        }
    }
}
