//! Fixed-size recurrent state: matrices and the convolution's last inputs.

use std::io;

use super::{
    arena::Backing,
    backend::{Backend, Buffer, DeviceError, Operation, View},
    shape,
    spec::Spec,
};
use cotenant_policy::residency::LayerKind;
use cotenant_units::Bytes;

/// The recurrent state of one sequence.
#[derive(Debug)]
pub struct RecurrentState {
    memory: Option<Buffer>,
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
        let bytes = shape::state_bytes(spec);
        let mut next = 0;
        let index = spec
            .layers
            .iter()
            .map(|layer| {
                (layer.kind == LayerKind::Recurrent).then(|| {
                    next += 1;
                    next - 1
                })
            })
            .collect();
        let (matrices_len, conv_len) = spec.recurrent.map_or((0, 0), |recurrent| {
            (recurrent.state_len(), recurrent.conv_len())
        });
        Ok(Self {
            memory: if bytes == Bytes::ZERO {
                None
            } else {
                Some(backend.allocate(bytes, Backing::OnTouch)?)
            },
            layer_len: matrices_len + conv_len,
            matrices_len,
            index,
        })
    }

    /// Populates all of it at the start of a sequence: in pieces, so that other threads may map memory meanwhile.
    pub fn touch(&self) {
        if let Some(memory) = &self.memory {
            memory.touch();
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

    /// Its memory; `None` for a model without recurrent layers.
    #[must_use]
    pub const fn memory(&self) -> Option<&Buffer> {
        self.memory.as_ref()
    }

    /// The matrices and the convolution state of layer `layer`; `None` for attention layers.
    #[must_use]
    pub fn layer(&self, layer: usize) -> Option<(View, View)> {
        let index = (*self.index.get(layer)?)?;
        let start = index * self.layer_len;
        let (middle, end) = (start + self.matrices_len, start + self.layer_len);
        let memory = self.memory.as_ref()?;
        Some((memory.view(start..middle), memory.view(middle..end)))
    }

    /// Memory of the whole state.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        self.memory.as_ref().map_or(Bytes::ZERO, Buffer::bytes)
    }

    /// Resident size.
    #[must_use]
    pub fn resident(&self) -> Bytes {
        self.memory.as_ref().map_or(Bytes::ZERO, Buffer::resident)
    }
}
