//! Encoders of the BERT family: each token of a text sees all others.
//!
//! The whole model is in memory. A text is computed in one pass, so that one layer's keys and values serve all layers.

use std::path::Path;

use self::weights::{EncoderFile, Weights, allocate, widen};
use super::{
    backend::{
        Activate, Attend, Attended, Backend, Buffer, Cells, Copies, Device as _, DeviceError,
        Limits, Multiply, Norm, Operation, Prepare, Product, Region, Residual, Rotate, Types, View,
        cpu::CpuDevice,
    },
    error::{ForwardError, LoadError, LoadErrorKind},
    gguf::{GgmlDType, Header, TensorInfo},
    spec::{AttentionSpec, EncoderSpec, LayerSpec, Role, Vector},
};
use cotenant_policy::{kv_type::KvType, residency::KvShape};
use cotenant_units::{Bytes, Tokens};

mod weights;

/// An encoder with its weights in memory.
pub(crate) struct Encoder {
    backend: Box<dyn Backend>,
    spec: EncoderSpec,
    weights: Weights,
    workspace: Workspace,
}

impl Encoder {
    /// Opens a file for texts of up to `context` tokens; `None` if it is of another kind.
    ///
    /// # Errors
    /// When the engine cannot compute with the file.
    pub(crate) fn open(
        path: &Path,
        context: Tokens,
        threads: usize,
    ) -> Result<Option<(Self, Header)>, LoadError> {
        let failed = |kind| LoadError::new(path, kind);
        let Some((header, file)) = EncoderFile::read(path)? else {
            return Ok(None);
        };
        let device = CpuDevice(threads);
        let mut backend = device.start(&Limits::default()).map_err(failed)?;
        let spec = file.spec.clone();
        let tokens = context.get().min(spec.context_max) as usize;
        let workspace = Workspace::new(backend.as_ref(), device, &spec, tokens).map_err(failed)?;
        let weights = file.load(backend.as_mut()).map_err(failed)?;
        let mut encoder = Self {
            backend,
            spec,
            weights,
            workspace,
        };
        encoder.states(&[0]).map_err(|error| {
            let problem = error.to_string();
            failed(LoadErrorKind::Damaged { problem })
        })?;
        Ok(Some((encoder, header)))
    }

    /// Tokens of the longest text.
    pub(crate) const fn context(&self) -> usize {
        self.workspace.tokens
    }

    /// Elements of a state.
    pub(crate) const fn width(&self) -> usize {
        self.spec.width
    }

    /// Computes the state of each token, one after another.
    ///
    /// # Errors
    /// When there are none or too many, or a result is not finite.
    pub(crate) fn states(&mut self, tokens: &[u32]) -> Result<&[f32], ForwardError> {
        let limit = self.context();
        if tokens.len() > limit {
            let tokens = tokens.len();
            return Err(ForwardError::BeyondChunk { tokens, limit });
        }
        let vocabulary = u32::try_from(self.spec.vocabulary).unwrap_or(u32::MAX);
        if let Some(&token) = tokens.iter().find(|&&token| token >= vocabulary) {
            return Err(ForwardError::Token { token, vocabulary });
        }
        if tokens.is_empty() {
            return Err(ForwardError::NoTokens);
        }
        let Self {
            backend,
            spec,
            weights,
            workspace,
        } = self;
        let mut pass = Pass {
            backend: backend.as_mut(),
            spec,
            weights,
            workspace,
            rows: tokens.len(),
            stream: &workspace.stream,
            other: &workspace.other,
            bias: Some(weights.sentence.clone()),
        };
        pass.embed(tokens)?;
        for layer in &spec.layers {
            let norm = [Vector::MixerNorm, Vector::MixerNormBias];
            pass.norm(
                norm.map(|kind| pass.vector(layer, kind)),
                types(layer, &QKV),
            )?;
            pass.attention(layer)?;
            let norm = [Vector::FfnNorm, Vector::FfnNormBias];
            let next = [Role::FfnGate, Role::FfnUp];
            pass.norm(
                norm.map(|kind| pass.vector(layer, kind)),
                types(layer, &next),
            )?;
            pass.feed_forward(layer)?;
        }
        let norm = spec.output_norm.each_ref();
        pass.norm(
            norm.map(|vector| weights.of(vector).map(Some)),
            Types::default(),
        )?;
        let Pass {
            backend, stream, ..
        } = pass;
        let is_broken = backend.read(&workspace.broken, 0..1)? != [0.0];
        let states = backend.read(stream, 0..tokens.len() * spec.width)?;
        if is_broken || !states.iter().all(|value| value.is_finite()) {
            return Err(ForwardError::NotFinite { position: 0 });
        }
        Ok(states)
    }
}

/// A text's pass through the layers.
struct Pass<'pass> {
    backend: &'pass mut dyn Backend,
    spec: &'pass EncoderSpec,
    weights: &'pass Weights,
    workspace: &'pass Workspace,
    /// Tokens of the text.
    rows: usize,
    /// The residual stream.
    stream: &'pass Buffer,
    /// Output of the last part; the norm of its sum with the residual stream is the next residual stream, in its place.
    other: &'pass Buffer,
    /// Bias of that output.
    bias: Option<View>,
}

impl Pass<'_> {
    fn rows_of(&self, buffer: &Buffer, width: usize) -> View {
        buffer.view(0..self.rows * width)
    }

    fn vector(&self, layer: &LayerSpec, kind: Vector) -> Result<Option<View>, DeviceError> {
        let found = layer.vectors.iter().find(|(known, _)| *known == kind);
        found.map(|(_, tensor)| self.weights.of(tensor)).transpose()
    }

    /// Writes the embeddings of the tokens, and those of their positions as the output of the first part.
    fn embed(&mut self, tokens: &[u32]) -> Result<(), DeviceError> {
        let (width, weights) = (self.spec.width, self.weights);
        let floats = self.workspace.broken.view(0..1);
        self.backend.queue(Operation::Fill { floats, value: 0.0 })?;
        let rows_of = |table: &TensorInfo, numbers: &[u32], to: &Buffer| {
            let row = |(at, number): (usize, &u32)| {
                let from = weights.row(table, width, *number as usize)?;
                Ok((from, to.view(at * width..(at + 1) * width)))
            };
            let rows = numbers.iter().enumerate().map(row);
            rows.collect::<Result<Vec<_>, DeviceError>>()
        };
        let rows = rows_of(&self.spec.embedding, tokens, self.stream)?;
        widen(self.backend, &self.spec.embedding, rows)?;
        if let Some(table) = &self.spec.positions {
            let positions: Vec<u32> = (0..).take(self.rows).collect();
            return widen(self.backend, table, rows_of(table, &positions, self.other)?);
        }
        let floats = self.rows_of(self.other, width);
        self.backend.queue(Operation::Fill { floats, value: 0.0 })?;
        let AttentionSpec {
            rotation, rotary, ..
        } = self.spec.attention;
        self.backend.queue(Operation::Rotate(Rotate {
            rotation,
            factors: None,
            position: 0,
            width: rotary,
            to: self.rows_of(&self.workspace.rotary, rotary),
        }))
    }

    /// Adds the output of the last part to the residual stream, and norms the sum for products with weights of `types`.
    fn norm(
        &mut self,
        [weight, bias]: [Result<Option<View>, DeviceError>; 2],
        types: Types,
    ) -> Result<(), DeviceError> {
        self.backend.queue(Operation::Norm(Norm {
            stream: self.rows_of(self.stream, self.spec.width),
            width: self.spec.width,
            normed: self.rows_of(self.other, self.spec.width),
            residual: Some(Residual {
                bias: self.bias.take(),
                norm: None,
                scale: 1.0,
                sum: None,
            }),
            weight: weight?,
            bias: bias?,
            epsilon: self.spec.epsilon,
            prepare: self.workspace.prepare(types),
        }))?;
        std::mem::swap(&mut self.stream, &mut self.other);
        Ok(())
    }

    /// Multiplies the rows in `input`, whose copies exist, with matrices of a layer.
    fn multiply(
        &mut self,
        layer: &LayerSpec,
        input: View,
        wants: &[(Role, View)],
        activate: Option<Activate>,
    ) -> Result<(), DeviceError> {
        let product = |(role, out): &(Role, View)| {
            let (_, matrix) = layer.matrix(*role)?;
            let weight = self.weights.of(&matrix.tensor);
            Some(weight.map(|weight| Product {
                weight,
                part: None,
                dtype: matrix.tensor.dtype,
                rows: matrix.rows,
                columns: matrix.columns,
                out: out.clone(),
                stride: matrix.rows,
                first: 0,
            }))
        };
        let products = wants.iter().filter_map(product);
        self.backend.queue(Operation::Multiply(Multiply {
            products: products.collect::<Result<Vec<_>, _>>()?.into(),
            input,
            copies: self.workspace.copies.clone(),
            rows: self.rows,
            activate,
        }))
    }

    fn attention(&mut self, layer: &LayerSpec) -> Result<(), DeviceError> {
        let (work, width) = (self.workspace, self.spec.width);
        let slots = [&work.query, &work.key, &work.value, &work.mixed];
        let [query, key, value, mixed] = slots.map(|slot| self.rows_of(slot, width));
        let input = self.rows_of(self.stream, width);
        let wants = [
            (Role::Query, query.clone()),
            (Role::Key, key.clone()),
            (Role::Value, value.clone()),
        ];
        self.multiply(layer, input, &wants, None)?;
        self.backend.queue(Operation::Attend(Attend {
            spec: self.spec.attention,
            is_causal: false,
            window: None,
            gap: None,
            temperature: None,
            query_bias: self.vector(layer, Vector::QueryBias)?,
            key_bias: self.vector(layer, Vector::KeyBias)?,
            value_bias: self.vector(layer, Vector::ValueBias)?,
            epsilon: self.spec.epsilon,
            query_norm: None,
            key_norm: None,
            sinks: None,
            rotary: self.rows_of(&work.rotary, self.spec.attention.rotary),
            query,
            stored: Some([key, value]),
            sequences: vec![Attended {
                rows: self.rows,
                position: 0,
                cells: Cells {
                    space: work.cells.lend(),
                    kind: KvType::F16,
                    shape: work.shape,
                    places: work.places.as_slice().into(),
                },
                flag: 0,
            }],
            layer: 0,
            out: mixed.clone(),
            scratch: work.scratch.from(0),
            broken: work.broken.view(0..1),
            prepare: work.prepare(types(layer, &[Role::Output])),
        }))?;
        let output = self.rows_of(self.other, width);
        self.multiply(layer, mixed, &[(Role::Output, output)], None)?;
        self.bias = self.vector(layer, Vector::OutputBias)?;
        Ok(())
    }

    fn feed_forward(&mut self, layer: &LayerSpec) -> Result<(), DeviceError> {
        let (work, inner) = (self.workspace, self.spec.feed_forward);
        let [gate, up] = [&work.wide, &work.second].map(|slot| self.rows_of(slot, inner));
        let [input, output] =
            [self.stream, self.other].map(|slot| self.rows_of(slot, self.spec.width));
        let has_gate = layer.matrix(Role::FfnGate).is_some();
        let bias = self.vector(layer, Vector::FfnUpBias)?;
        let wants = match has_gate {
            true => vec![(Role::FfnGate, gate.clone()), (Role::FfnUp, up.clone())],
            false => vec![(Role::FfnUp, gate.clone())],
        };
        let activate = Activate {
            activation: self.spec.activation,
            gate: gate.clone(),
            up: has_gate.then_some(up),
            gate_bias: bias.clone().filter(|_| !has_gate),
            up_bias: bias.filter(|_| has_gate),
            width: inner,
            prepare: work.prepare(types(layer, &[Role::FfnDown])),
        };
        self.multiply(layer, input, &wants, Some(activate))?;
        self.multiply(layer, gate, &[(Role::FfnDown, output)], None)?;
        self.bias = self.vector(layer, Vector::FfnDownBias)?;
        Ok(())
    }
}

/// Buffers for a text of up to `tokens` tokens, whose pages are populated as texts arrive.
struct Workspace {
    tokens: usize,
    stream: Buffer,
    other: Buffer,
    query: Buffer,
    key: Buffer,
    value: Buffer,
    mixed: Buffer,
    wide: Buffer,
    second: Buffer,
    rotary: Buffer,
    scratch: Buffer,
    /// Not zero if a key or a value is not finite.
    broken: Buffer,
    copies: Copies,
    /// Keys and values of one layer.
    cells: Region,
    shape: KvShape,
    places: Vec<usize>,
}

impl Workspace {
    fn new(
        backend: &dyn Backend,
        device: CpuDevice,
        spec: &EncoderSpec,
        tokens: usize,
    ) -> Result<Self, LoadErrorKind> {
        let floats = |width: usize| allocate(backend, "the workspace", tokens * width * 4);
        let attention = &spec.attention;
        let to_u32 = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        let shape = KvShape {
            attention_layers: 1,
            kv_heads: to_u32(attention.kv_heads),
            head_dim: to_u32(attention.head_dim),
            element_bytes: 2,
            granule: Bytes::ZERO,
            block_tokens: Tokens::new(BLOCK_TOKENS),
            windowed: None,
        };
        let blocks = tokens.div_ceil(BLOCK_TOKENS as usize);
        let bytes = shape.blocks_bytes(to_u32(blocks), KvType::F16);
        let cells = backend.reserve(bytes, Bytes::ZERO).and_then(|mut cells| {
            cells.set_open(bytes)?;
            Ok(cells)
        });
        let types: Vec<GgmlDType> = spec.matrices().map(|tensor| tensor.dtype).collect();
        let columns = spec.width.max(spec.feed_forward);
        let copies = device.copies_bytes(&types, columns).as_len() * tokens;
        let copies = allocate(backend, "the workspace", copies)?;
        let scratch = device.scratch_bytes(attention).as_len();
        Ok(Self {
            tokens,
            stream: floats(spec.width)?,
            other: floats(spec.width)?,
            query: floats(spec.width)?,
            key: floats(spec.width)?,
            value: floats(spec.width)?,
            mixed: floats(spec.width)?,
            wide: floats(spec.feed_forward)?,
            second: floats(spec.feed_forward)?,
            rotary: floats(attention.rotary)?,
            scratch: allocate(backend, "the workspace", scratch)?,
            broken: floats(1)?,
            copies: Copies {
                memory: copies.view_bytes(0, copies.bytes().as_len()),
                rows: tokens,
                columns,
                types: types.into_iter().collect(),
            },
            cells: cells.map_err(|source| LoadErrorKind::Allocate {
                what: "keys and values".to_owned(),
                bytes,
                source,
            })?,
            shape,
            places: (0..blocks).collect(),
        })
    }

    fn prepare(&self, types: Types) -> Prepare {
        Prepare {
            copies: self.copies.clone(),
            types,
            first: 0,
        }
    }
}

/// Types of a layer's matrices with these roles.
fn types(layer: &LayerSpec, roles: &[Role]) -> Types {
    let matrices = roles.iter().filter_map(|role| layer.matrix(*role));
    matrices.map(|(_, matrix)| matrix.tensor.dtype).collect()
}

const QKV: [Role; 3] = [Role::Query, Role::Key, Role::Value];
/// Tokens of a block of keys and values: those of [the engine's models](crate::shape).
const BLOCK_TOKENS: u32 = 64;
