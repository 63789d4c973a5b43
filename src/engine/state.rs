//! Recurrent state of fixed size: matrices and the convolution's last inputs.

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
    /// Elements of one layer: matrices, then convolution.
    layer_len: usize,
    matrices_len: usize,
    /// For each layer of the model its number among the recurrent ones.
    index: Vec<Option<usize>>,
}

impl RecurrentState {
    /// The state at the start of a sequence; memory is found for it when it is [touched](Self::touch), or used.
    ///
    /// # Errors
    /// When there is no memory.
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

    /// Makes all of it memory, at the start of a sequence: piece by piece, so that other threads may map memory meanwhile.
    pub fn touch(&self) {
        if let Some(memory) = &self.memory {
            memory.touch();
        }
    }

    /// Back to the start of a sequence.
    ///
    /// # Errors
    /// When the device has failed.
    pub fn reset(&self, backend: &mut dyn Backend) -> Result<(), DeviceError> {
        self.memory.as_ref().map_or(Ok(()), |memory| {
            let floats = memory.from(0);
            backend.queue(Operation::Fill { floats, value: 0.0 })
        })
    }

    /// Its memory, of a model that has one.
    #[must_use]
    pub const fn memory(&self) -> Option<&Buffer> {
        self.memory.as_ref()
    }

    /// The matrices and the convolution's memory of layer `layer`; `None` for attention layers.
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

    /// How much of it the kernel has in memory.
    #[must_use]
    pub fn resident(&self) -> Bytes {
        self.memory.as_ref().map_or(Bytes::ZERO, Buffer::resident)
    }
}
