//! Activations of one prefill chunk.

use std::io;

use super::products::Want;
use crate::{
    engine::{
        arena::{Backing, Mapping},
        backend::{Backend, Prepared},
        shape::{self, Widths},
        spec::{Role, Spec},
    },
    units::Bytes,
};

/// Buffers for a chunk of some number of tokens.
pub(super) struct Workspace {
    pub(super) stream: Mapping,
    pub(super) normed: Mapping,
    pub(super) wide: Mapping,
    pub(super) second: Mapping,
    pub(super) third: Mapping,
    pub(super) fourth: Mapping,
    pub(super) mixed: Mapping,
    pub(super) rotary: Mapping,
    /// Of the attention, for any number of tokens.
    pub(super) scratch: Mapping,
    pub(super) prepared: Prepared,
    chunk: usize,
}

/// Buffers that products read from and write to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Buffer {
    Fourth,
    Mixed,
    Normed,
    Second,
    Third,
    Wide,
}

impl Workspace {
    /// In memory that is not there before it is [touched](Self::touch), so that another one can go before.
    pub(super) fn untouched(backend: &dyn Backend, widths: &Widths, spec: &Spec, chunk: usize) -> io::Result<Self> {
        let backing = Backing::OnTouch;
        let floats = |width: usize| backend.allocate(Bytes::of_len(width * chunk * 4), backing);
        let types = shape::distinct_types(spec);
        let prepared = backend.prepared_bytes(&types, widths.columns);
        let scratch = if spec.attention_layers() > 0 {
            backend.scratch_bytes(&spec.attention)
        } else {
            Bytes::ZERO
        };
        Ok(Self {
            stream: floats(widths.stream)?,
            normed: floats(widths.stream)?,
            wide: floats(widths.wide)?,
            second: floats(widths.second)?,
            third: floats(widths.third)?,
            fourth: floats(widths.fourth)?,
            mixed: floats(widths.mixed)?,
            rotary: floats(widths.rotary)?,
            scratch: backend.allocate(scratch, backing)?,
            prepared: Prepared {
                memory: backend.allocate(prepared.saturating_mul(chunk as u64), backing)?,
                rows: chunk,
                columns: widths.columns,
                types,
            },
            chunk,
        })
    }

    /// The input of products, where their results go, and the copies of the input.
    pub(super) fn lend(
        &mut self,
        source: Buffer,
        wants: &[(Role, Buffer, usize)],
    ) -> (&[f32], Vec<Want<'_>>, &mut Prepared) {
        let all = [
            (Buffer::Normed, &mut self.normed),
            (Buffer::Wide, &mut self.wide),
            (Buffer::Second, &mut self.second),
            (Buffer::Third, &mut self.third),
            (Buffer::Fourth, &mut self.fourth),
            (Buffer::Mixed, &mut self.mixed),
        ];
        let mut input: &[f32] = &[];
        let mut results = Vec::with_capacity(wants.len());
        for (name, memory) in all {
            if name == source {
                input = memory.floats();
            } else if let Some(&(role, _, stride)) = wants.iter().find(|(_, target, _)| *target == name) {
                let out = memory.floats_mut();
                results.push(Want { role, out, stride });
            }
        }
        (input, results, &mut self.prepared)
    }

    /// Tokens that fit.
    pub(super) const fn chunk(&self) -> usize {
        self.chunk
    }

    /// Makes all of it memory.
    pub(super) fn touch(&self) {
        for mapping in self.all() {
            // What the kernel does not give now it gives at the first use, or nobody has it.
            mapping.populate().ok();
        }
    }

    pub(super) fn bytes(&self) -> Bytes {
        self.all().into_iter().map(Mapping::bytes).sum()
    }

    pub(super) fn resident(&self) -> Bytes {
        self.all().into_iter().map(Mapping::resident).sum()
    }

    const fn all(&self) -> [&Mapping; 10] {
        [
            &self.stream,
            &self.normed,
            &self.wide,
            &self.second,
            &self.third,
            &self.fourth,
            &self.mixed,
            &self.rotary,
            &self.scratch,
            &self.prepared.memory,
        ]
    }
}
