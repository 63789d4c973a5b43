//! Activations of one prefill chunk.

use std::io;

use crate::{
    arena::Backing,
    backend::{Backend, Buffer, Copies, Device, Limits, Types},
    shape::{self, Layout, Widths},
    spec::Spec,
    state::Trial,
};
use cotenant_policy::kv_type::KvType;
use cotenant_units::Bytes;

/// A device's memory needs beside activations.
#[derive(Clone, Copy, Debug)]
pub(super) struct Needs {
    /// Copies of one token's activations.
    pub(super) copies: Bytes,
    /// Scratch of attention, for any number of tokens.
    pub(super) scratch: Bytes,
    /// Inputs of layers with a state, of drafted tokens that are tried.
    pub(super) trial: Bytes,
    /// KV cache of the draft block.
    pub(super) draft_kv: Bytes,
    /// Fixed memory of the device context.
    pub(super) context: Bytes,
    /// Granularity of changes to the KV cache.
    pub(super) granule: Bytes,
    /// Size of the ring for streamed weights.
    pub(super) ring: Bytes,
}

impl Needs {
    pub(super) fn of(device: &dyn Device, layout: &Layout, spec: &Spec) -> Self {
        Self {
            copies: device.copies_bytes(&shape::distinct_types(spec), layout.widths.columns),
            scratch: if spec.attention_layers() > 0 {
                let kinds = spec.attention.kinds();
                let scratch = kinds.map(|kind| device.scratch_bytes(&kind)).max();
                scratch.unwrap_or_default()
            } else {
                Bytes::ZERO
            },
            trial: match device.tries_states() {
                true => Trial::bytes_for(spec),
                false => Bytes::ZERO,
            },
            draft_kv: shape::draft_kv(spec).map_or(Bytes::ZERO, |(kv, tokens)| {
                kv.capacity_bytes(tokens, KvType::F16)
            }),
            context: device.context_bytes(&Limits::of(spec, layout.parts.len())),
            granule: device.granule(),
            ring: device.ring_bytes(layout.ring),
        }
    }

    /// Memory for drafts.
    pub(super) const fn drafts(&self) -> Bytes {
        self.trial.saturating_add(self.draft_kv)
    }
}

/// Buffers for a chunk of up to `chunk` tokens.
pub(super) struct Workspace {
    pub(super) stream: Buffer,
    pub(super) normed: Buffer,
    pub(super) wide: Buffer,
    pub(super) second: Buffer,
    pub(super) third: Buffer,
    pub(super) fourth: Buffer,
    pub(super) mixed: Buffer,
    /// Outputs of the experts of a mixture.
    pub(super) experts: Buffer,
    pub(super) rotary: Buffer,
    /// Inputs of their own for all layers, and then the embeddings to which they add.
    pub(super) inputs: Buffer,
    /// Scratch of attention, for any number of tokens.
    pub(super) scratch: Buffer,
    copies: Buffer,
    columns: usize,
    types: Types,
    chunk: usize,
}

/// Buffers that products read from and write to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Slot {
    Experts,
    Fourth,
    Mixed,
    Normed,
    Second,
    Third,
    Wide,
}

impl Workspace {
    /// Allocates a workspace whose pages are populated by [`touch`](Self::touch), so that another one can be released
    /// first.
    pub(super) fn untouched(
        backend: &dyn Backend,
        (widths, needs): (&Widths, &Needs),
        spec: &Spec,
        chunk: usize,
    ) -> io::Result<Self> {
        let backing = Backing::OnTouch;
        let floats = |width: usize| backend.allocate(Bytes::of_len(width * chunk * 4), backing);
        Ok(Self {
            stream: floats(widths.stream)?,
            normed: floats(widths.stream)?,
            wide: floats(widths.wide)?,
            second: floats(widths.second)?,
            third: floats(widths.third)?,
            fourth: floats(widths.fourth)?,
            mixed: floats(widths.mixed)?,
            experts: floats(widths.experts)?,
            rotary: floats(widths.rotary)?,
            inputs: floats(widths.inputs)?,
            scratch: backend.allocate(needs.scratch, backing)?,
            copies: backend.allocate(needs.copies.saturating_mul(chunk as u64), backing)?,
            columns: widths.columns,
            types: shape::distinct_types(spec).into_iter().collect(),
            chunk,
        })
    }

    pub(super) const fn slot(&self, slot: Slot) -> &Buffer {
        match slot {
            Slot::Experts => &self.experts,
            Slot::Fourth => &self.fourth,
            Slot::Mixed => &self.mixed,
            Slot::Normed => &self.normed,
            Slot::Second => &self.second,
            Slot::Third => &self.third,
            Slot::Wide => &self.wide,
        }
    }

    /// Returns the destination of copies of activations.
    pub(super) fn copies(&self) -> Copies {
        Copies {
            memory: self.copies.view_bytes(0, self.copies.bytes().as_len()),
            rows: self.chunk,
            columns: self.columns,
            types: self.types,
        }
    }

    /// Maximum number of tokens.
    pub(super) const fn chunk(&self) -> usize {
        self.chunk
    }

    /// Populates all pages.
    pub(super) fn touch(&self) {
        for mapping in self.all() {
            mapping.populate();
        }
    }

    pub(super) fn bytes(&self) -> Bytes {
        self.all().into_iter().map(Buffer::bytes).sum()
    }

    pub(super) fn resident(&self) -> Bytes {
        self.all().into_iter().map(Buffer::resident).sum()
    }

    /// Releases all memory; returns the bytes that were in memory.
    pub(super) fn release(self) -> Bytes {
        let Self {
            stream,
            normed,
            wide,
            second,
            third,
            fourth,
            mixed,
            experts,
            rotary,
            inputs,
            scratch,
            copies,
            ..
        } = self;
        let all = [
            stream, normed, wide, second, third, fourth, mixed, experts, rotary, inputs, scratch,
            copies,
        ];
        all.into_iter().map(Buffer::release).sum()
    }

    const fn all(&self) -> [&Buffer; 12] {
        [
            &self.stream,
            &self.normed,
            &self.wide,
            &self.second,
            &self.third,
            &self.fourth,
            &self.mixed,
            &self.experts,
            &self.rotary,
            &self.inputs,
            &self.scratch,
            &self.copies,
        ]
    }
}
