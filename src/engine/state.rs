//! Fixed-size recurrent state: matrices and the convolution's last inputs.

use std::{io, ops::Range};

use super::{
    arena::Backing,
    backend::{Backend, Buffer, DeviceError, Operation, View},
    shape,
    spec::{RecurrentSpec, Spec},
};
use cotenant_policy::residency::LayerKind;
use cotenant_units::{Bytes, page};

/// Recurrent state of the sequence, and a working area for one layer of a lane.
#[derive(Debug)]
pub struct RecurrentState {
    memory: Option<Buffer>,
    /// Working area: a layer of a lane's state, while it is computed.
    aside: Option<Buffer>,
    /// Elements per layer: matrices, then convolution.
    layer_len: usize,
    matrices_len: usize,
    /// For each layer of the model, its index among the recurrent ones.
    index: Vec<Option<usize>>,
}

impl RecurrentState {
    /// The state at the start of a sequence; memory is populated when it is [touched](Self::touch) or used.
    ///
    /// # Errors
    /// No memory.
    pub fn new(backend: &dyn Backend, spec: &Spec) -> io::Result<Self> {
        let allocate = |bytes| {
            let memory = (bytes > Bytes::ZERO).then(|| backend.allocate(bytes, Backing::OnTouch));
            memory.transpose()
        };
        let (matrices_len, conv_len) = spec.recurrent.map_or((0, 0), |recurrent| {
            (recurrent.state_len(), recurrent.conv_len())
        });
        Ok(Self {
            memory: allocate(shape::sequence_state_bytes(spec))?,
            aside: allocate(shape::layer_state_bytes(spec))?,
            layer_len: matrices_len + conv_len,
            matrices_len,
            index: recurrent_index(spec),
        })
    }

    /// Populates all of it at the start of a sequence: in pieces, so that other threads may map memory meanwhile.
    pub fn touch(&self) {
        if let Some(memory) = &self.memory {
            memory.touch();
        }
    }

    /// Populates the working area of lanes, between two passes.
    pub fn touch_aside(&self) {
        if let Some(aside) = &self.aside {
            aside.touch();
        }
    }

    /// Resets to the start of a sequence.
    ///
    /// # Errors
    /// The device has failed.
    pub fn reset(&self, backend: &mut dyn Backend) -> Result<(), DeviceError> {
        self.memory.as_ref().map_or(Ok(()), |memory| {
            let floats = memory.from(0);
            backend.queue(Operation::Fill { floats, value: 0.0 })
        })
    }

    /// Memory of the sequence's state; `None` for a model without recurrent layers.
    pub const fn memory(&self) -> Option<&Buffer> {
        self.memory.as_ref()
    }

    /// The matrices and the convolution state of layer `layer`; `None` for attention layers.
    pub fn layer(&self, layer: usize) -> Option<(View, View)> {
        let index = (*self.index.get(layer)?)?;
        Some(self.parts(self.memory.as_ref()?, index * self.layer_len))
    }

    /// The matrices and the convolution state in the working area, to which a lane's layer was copied.
    pub fn aside(&self) -> Option<(View, View)> {
        Some(self.parts(self.aside.as_ref()?, 0))
    }

    fn parts(&self, memory: &Buffer, start: usize) -> (View, View) {
        let (middle, end) = (start + self.matrices_len, start + self.layer_len);
        (memory.view(start..middle), memory.view(middle..end))
    }

    /// Byte range of the matrices of layer `layer` in a copy of the state.
    pub fn matrices_of_copy(&self, layer: usize) -> Option<Range<usize>> {
        let start = (*self.index.get(layer)?)? * self.layer_len;
        let bytes = |elements| elements * size_of::<f32>();
        Some(bytes(start)..bytes(start + self.matrices_len))
    }

    /// Byte range of layer `layer`, or of its convolution state, in a copy of the state, and its place in the working
    /// area.
    pub fn layer_of_copy(&self, layer: usize, is_whole: bool) -> Option<(Range<usize>, View)> {
        let matrices = self.matrices_of_copy(layer)?;
        let skipped = if is_whole { 0 } else { matrices.len() };
        let len = self.layer_len * size_of::<f32>();
        let view = self.aside.as_ref()?.view_bytes(skipped, len - skipped);
        Some((matrices.start + skipped..matrices.start + len, view))
    }

    fn buffers(&self) -> impl Iterator<Item = &Buffer> {
        self.memory.iter().chain(&self.aside)
    }

    /// Total memory.
    pub fn bytes(&self) -> Bytes {
        self.buffers().map(Buffer::bytes).sum()
    }

    /// Resident size.
    pub fn resident(&self) -> Bytes {
        self.buffers().map(Buffer::resident).sum()
    }
}

/// For each layer of a model, its index among the recurrent ones.
fn recurrent_index(spec: &Spec) -> Vec<Option<usize>> {
    let mut next = 0;
    let index = spec.layers.iter().map(|layer| {
        (layer.kind == LayerKind::Recurrent).then(|| {
            next += 1;
            next - 1
        })
    });
    index.collect()
}

/// Inputs of the rows that a pass has tried.
#[derive(Debug)]
pub struct Trial {
    memory: Buffer,
    /// Elements of a row in each group of inputs of a layer.
    pub widths: [usize; 3],
    /// For each layer of the model, its index among the recurrent ones.
    index: Vec<Option<usize>>,
    /// Rows that wait to be accepted.
    pub rows: usize,
}

/// Inputs of a recurrence: of the rows of a chunk, and of some of them, for the delta rule, decay and strength, for a
/// scan, the step.
pub type TrialInputs = [View; 3];

impl Trial {
    /// Memory for a model; none without layers with a state.
    pub fn bytes_for(spec: &Spec) -> Bytes {
        let layers = recurrent_index(spec).into_iter().flatten();
        let row: usize = spec
            .recurrent
            .map_or(0, |recurrent| widths(&recurrent).iter().sum());
        Bytes::of_len(layers.count() * shape::ANSWERS_MAX * row * 4).round_up(page())
    }

    /// Allocates `bytes` as computed by [`Self::bytes_for`]; nothing if there are none.
    ///
    /// # Errors
    /// No memory.
    pub fn new(backend: &dyn Backend, spec: &Spec, bytes: Bytes) -> io::Result<Option<Self>> {
        let Some(recurrent) = spec.recurrent.filter(|_| bytes > Bytes::ZERO) else {
            return Ok(None);
        };
        Ok(Some(Self {
            memory: backend.allocate(bytes, Backing::OnTouch)?,
            widths: widths(&recurrent),
            index: recurrent_index(spec),
            rows: 0,
        }))
    }

    /// Memory of the inputs.
    pub const fn memory(&self) -> &Buffer {
        &self.memory
    }

    /// Inputs of a layer of the model: of all `rows`, and of `some` of them; `None` for attention layers.
    pub fn inputs(&self, layer: usize, rows: usize, some: &Range<usize>) -> Option<TrialInputs> {
        let number = (*self.index.get(layer)?)?;
        let [wide, second, third] = self.widths;
        let start = number * shape::ANSWERS_MAX * (wide + second + third);
        let (middle, end) = (start + rows * wide, start + rows * (wide + second));
        Some([
            self.memory.view(start..middle),
            self.memory
                .view(middle + some.start * second..middle + some.end * second),
            self.memory
                .view(end + some.start * third..end + some.end * third),
        ])
    }
}

/// Elements of a row in each group of inputs.
fn widths(recurrent: &RecurrentSpec) -> [usize; 3] {
    let [second, third] = match recurrent {
        RecurrentSpec::Convolution(_) => [0, 0],
        RecurrentSpec::Delta(spec) => [spec.value_heads; 2],
        RecurrentSpec::Scan(spec) => [spec.heads, 0],
    };
    [recurrent.inputs(), second, third]
}
