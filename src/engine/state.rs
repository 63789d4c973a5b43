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

/// A copy of the state at some position of the sequence.
#[derive(Debug)]
pub struct Snapshot {
    position: u32,
    memory: Option<Buffer>,
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

    /// Memory for a copy of the state.
    ///
    /// # Errors
    /// When there is none.
    pub fn room(&self, backend: &dyn Backend) -> io::Result<Snapshot> {
        let allocate = |memory: &Buffer| backend.allocate(memory.bytes(), Backing::OnTouch);
        Ok(Snapshot {
            position: 0,
            memory: self.memory.as_ref().map(allocate).transpose()?,
        })
    }

    /// Copies the state, which belongs to `position`, over an earlier copy or into new [room](Self::room); says whether
    /// the device has failed.
    pub fn snapshot(
        &self,
        backend: &mut dyn Backend,
        room: Snapshot,
        position: u32,
    ) -> (Snapshot, Result<(), DeviceError>) {
        let copied = copy(backend, self.memory.as_ref(), room.memory.as_ref());
        let snapshot = Snapshot { position, ..room };
        (snapshot, copied)
    }

    /// Puts a copy back.
    ///
    /// # Errors
    /// When the device has failed.
    pub fn restore(
        &self,
        backend: &mut dyn Backend,
        snapshot: &Snapshot,
    ) -> Result<(), DeviceError> {
        copy(backend, snapshot.memory.as_ref(), self.memory.as_ref())
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

fn copy(
    backend: &mut dyn Backend,
    from: Option<&Buffer>,
    to: Option<&Buffer>,
) -> Result<(), DeviceError> {
    from.zip(to).map_or(Ok(()), |(from, to)| {
        backend.queue(Operation::Copy {
            from: from.from(0),
            to: to.from(0),
        })
    })
}

impl Snapshot {
    /// Tokens of the sequence when it was taken.
    #[must_use]
    pub const fn position(&self) -> u32 {
        self.position
    }

    /// Memory of the copy.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        self.memory.as_ref().map_or(Bytes::ZERO, Buffer::bytes)
    }

    /// How much of it the kernel has in memory.
    #[must_use]
    pub fn resident(&self) -> Bytes {
        self.memory.as_ref().map_or(Bytes::ZERO, Buffer::resident)
    }

    /// Gives it up, as [`Buffer::release`].
    #[must_use]
    pub fn release(self) -> Bytes {
        self.memory.map_or(Bytes::ZERO, Buffer::release)
    }
}
