//! Opening a model: as much as can be at the same time, for somebody waits for the first token.

use std::{io, path::Path, sync::Arc, thread};

use super::{
    Model, ModelOptions,
    gap::Dropped,
    gate::Paces,
    residency,
    weights::{self, Weights},
    workspace::Workspace,
};
use crate::{
    engine::{
        arena::{Backing, Mapping},
        backend::{Backend, cpu::Cpu},
        error::{ApplyError, LoadError, LoadErrorKind},
        gguf::Header,
        kv::KvCache,
        reader::WeightFile,
        sayable::Sayable,
        shape::{self, Layout},
        spec::Spec,
        state::{Lineage, RecurrentState},
    },
    policy::{
        kv_type::KvType,
        residency::{EnginePlan, ModelShape},
    },
    units::{Bytes, Tokens},
};

/// A file whose header was read, before any of its weights are.
pub struct Opening {
    header: Arc<Header>,
    spec: Spec,
    layout: Layout,
    shape: ModelShape,
    options: ModelOptions,
}

impl Opening {
    /// Reads the header of the file at `path`, and computes what each piece will occupy.
    ///
    /// # Errors
    ///
    /// When the file is not a model that the engine can compute with.
    pub fn read(path: &Path, options: &ModelOptions) -> Result<Self, LoadError> {
        Self::in_layout(path, options, Layout::of)
    }

    pub(super) fn in_layout(
        path: &Path,
        options: &ModelOptions,
        layout: impl Fn(&Spec) -> Layout,
    ) -> Result<Self, LoadError> {
        let (header, spec) = read(path, options.context, options.vocabulary.as_ref())?;
        let layout = layout(&spec);
        let shape = model_shape(&header, &spec, &layout, options.name.as_deref(), options.threads);
        Ok(Self {
            header: Arc::new(header),
            spec,
            layout,
            shape,
            options: options.clone(),
        })
    }

    /// The file's header. Whoever keeps it should be done with it before [`Model::forget_lists`], which copies it otherwise.
    #[must_use]
    pub const fn header(&self) -> &Arc<Header> {
        &self.header
    }

    /// What each piece of the model occupies.
    #[must_use]
    pub const fn shape(&self) -> &ModelShape {
        &self.shape
    }

    /// Puts `plan` into force. Where it has weights streamed, memory may still be found for the ring afterwards:
    /// [`Model::settle`] waits for it, a token need not.
    ///
    /// # Errors
    ///
    /// When weights cannot be read or memory cannot be had.
    pub fn begin(self, plan: &EnginePlan) -> Result<Model, LoadError> {
        let path = self.header.path().to_owned();
        self.assemble(plan).map_err(|kind| LoadError::new(&path, kind))
    }

    fn assemble(self, plan: &EnginePlan) -> Result<Model, LoadErrorKind> {
        let Self {
            header,
            spec,
            layout,
            shape,
            options,
        } = self;
        let backend: Box<dyn Backend> = Box::new(Cpu::new(options.threads).map_err(LoadErrorKind::Threads)?);
        let chunk = residency::check(&shape, plan).map_err(|error| LoadErrorKind::Plan(error.to_string()))?;
        let file = Arc::new(WeightFile::open(header.parts()).map_err(LoadErrorKind::Open)?);
        // The first token waits for the disk, so the disk begins at once: with the vectors, and with what is streamed, while
        // memory is found for everything else.
        let vectors = weights::expect_vectors(&file, &layout.fixed, &spec);
        let resident = |part: usize| u32::try_from(part).is_ok_and(|part| plan.resident.contains(&part));
        let stream = weights::begin(&file, &layout, resident).map_err(refuse("the staging ring", layout.ring))?;
        let (vectors, memory) = thread::scope(|scope| {
            let read = || weights::read_vectors(&file, &vectors);
            let reading = thread::Builder::new().spawn_scoped(scope, read);
            let memory = Memory::new(backend.as_ref(), &spec, &layout, &shape, chunk, &options);
            let vectors = match reading {
                Ok(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
                Err(_) => read(),
            };
            (vectors, memory)
        });
        let Memory {
            state,
            workspace,
            cache,
            logits,
        } = memory?;
        let fixed = Weights::fixed_of(
            backend.as_ref(),
            &layout.fixed,
            &spec,
            &vectors.map_err(LoadErrorKind::Weights)?,
        )?;
        let dropped = Dropped::none(&spec.attention);
        let mut model = Model {
            weights: Weights::new(file, fixed, layout.parts.len(), stream),
            cache,
            plan: EnginePlan {
                resident: std::collections::BTreeSet::new(),
                kv_capacity: Tokens::ZERO,
                prefill_chunk: plan.prefill_chunk,
                kv_type: KvType::F16,
            },
            backend,
            header,
            spec,
            layout,
            shape,
            state,
            workspace,
            logits,
            lineage: Lineage::new(),
            snapshots: Vec::new(),
            mark_wanted: 0,
            position: 0,
            dropped,
            kv_precision: plan.kv_type,
            lost: false,
            chunk_wanted: chunk,
            paces: Paces::new(),
        };
        model.apply(plan).map_err(|error| match error {
            ApplyError::Allocate { what, bytes, source } => LoadErrorKind::Allocate { what, bytes, source },
            ApplyError::Read(error) => LoadErrorKind::Weights(error),
            ApplyError::Stalled { what, waited } => LoadErrorKind::Stalled { what, waited },
            other => LoadErrorKind::Plan(other.to_string()),
        })?;
        Ok(model)
    }
}

impl Model {
    /// Reads the header of the file at `path` and computes what each piece will occupy when so many threads compute; no
    /// weights are read.
    ///
    /// # Errors
    ///
    /// When the file is not a model that the engine can compute with.
    pub fn inspect(path: &Path, threads: usize) -> Result<(ModelShape, Header), LoadError> {
        Self::inspect_with(path, None, threads)
    }

    /// As [`Self::inspect`], for a model that may say some tokens only.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn inspect_with(
        path: &Path,
        vocabulary: Option<&Sayable>,
        threads: usize,
    ) -> Result<(ModelShape, Header), LoadError> {
        let (header, spec) = read(path, None, vocabulary)?;
        let layout = Layout::of(&spec);
        let shape = model_shape(&header, &spec, &layout, None, threads);
        Ok((shape, header))
    }

    /// Opens the file at `path` and puts `plan` into force.
    ///
    /// # Errors
    ///
    /// As [`Self::inspect`], and when weights cannot be read or memory cannot be had.
    pub fn open(path: &Path, plan: &EnginePlan, options: &ModelOptions) -> Result<Self, LoadError> {
        let model = Self::begin(path, plan, options)?;
        model.settle();
        Ok(model)
    }

    /// As [`Self::open`], but for the memory of the ring, see [`Opening::begin`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn begin(path: &Path, plan: &EnginePlan, options: &ModelOptions) -> Result<Self, LoadError> {
        Opening::read(path, options)?.begin(plan)
    }

    /// As [`Self::open`], with each layer and the output head in one part: what the finer parts cost is measured by it.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn open_whole(path: &Path, plan: &EnginePlan, options: &ModelOptions) -> Result<Self, LoadError> {
        let opening = Opening::in_layout(path, options, |spec| Layout::in_parts(spec, usize::MAX))?;
        let plan = EnginePlan {
            resident: (0u32..).zip(&opening.layout.parts).map(|(part, _)| part).collect(),
            ..plan.clone()
        };
        let model = opening.begin(&plan)?;
        model.settle();
        Ok(model)
    }

    /// Waits until all that the plan holds is in memory, and gives back what opening has left free on the heap: then the book
    /// says what the kernel does.
    pub fn settle(&self) {
        self.weights.settle();
        self.backend.trim();
    }
}

/// What a model computes with beside its weights.
struct Memory {
    state: RecurrentState,
    workspace: Workspace,
    cache: KvCache,
    logits: Mapping,
}

impl Memory {
    fn new(
        backend: &dyn Backend,
        spec: &Spec,
        layout: &Layout,
        shape: &ModelShape,
        chunk: usize,
        options: &ModelOptions,
    ) -> Result<Self, LoadErrorKind> {
        let logits_bytes = Bytes::of_len(spec.vocabulary * 4);
        let mut logits = backend
            .allocate(logits_bytes, Backing::Now)
            .map_err(refuse("the logits", logits_bytes))?;
        if spec.said.is_some() {
            // Of rows that are not there nothing is ever written.
            logits.floats_mut().fill(f32::NEG_INFINITY);
        }
        Ok(Self {
            state: RecurrentState::new(backend, spec).map_err(refuse("the state", shape.state_bytes))?,
            workspace: Workspace::new(backend, &layout.widths, spec, chunk).map_err(refuse(
                "the workspace",
                shape.workspace_bytes_per_token.saturating_mul(chunk as u64),
            ))?,
            cache: KvCache::new(backend, shape.kv, spec.context_max, options.kv_backing).map_err(refuse(
                "the KV cache (address space alone)",
                shape.kv.capacity_bytes(shape.context_max, KvType::F16),
            ))?,
            logits,
        })
    }
}

/// The header of a file, and what of it is computed with.
fn read(path: &Path, context: Option<Tokens>, vocabulary: Option<&Sayable>) -> Result<(Header, Spec), LoadError> {
    let header = Header::read(path)?;
    let mut spec = Spec::read_for(&header, context)?;
    spec.reduce(&header, vocabulary)?;
    Ok((header, spec))
}

/// That there is no memory for `what`.
fn refuse(what: &'static str, bytes: Bytes) -> impl FnOnce(io::Error) -> LoadErrorKind {
    move |source| LoadErrorKind::Allocate {
        what: what.to_owned(),
        bytes,
        source,
    }
}

fn model_shape(header: &Header, spec: &Spec, layout: &Layout, name: Option<&str>, threads: usize) -> ModelShape {
    let name = name
        .or_else(|| header.string("general.name"))
        .map(str::to_owned)
        .or_else(|| {
            header
                .path()
                .file_stem()
                .map(|stem| stem.to_string_lossy().into_owned())
        })
        .unwrap_or_else(|| "model".to_owned());
    let prepared = Cpu::prepared_bytes_for(&shape::distinct_types(spec), layout.widths.columns);
    let scratch = if spec.attention_layers() > 0 {
        Cpu::scratch_bytes_for(&spec.attention, threads.max(1))
    } else {
        Bytes::ZERO
    };
    layout.model_shape(spec, header, name, prepared, scratch)
}
