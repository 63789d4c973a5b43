//! Opening of a model, with reads and preparation in parallel.

use std::{io, path::Path, sync::Arc, time::Instant};

use super::{
    damage,
    draft_kv::DraftKv,
    experts::Experts,
    loaded::{Model, ModelOptions},
    residency,
    saved::with_transfers,
    sequence::Sequence,
    weights::{self, Vectors, Weights},
    workspace::{Needs, Workspace},
};
use crate::{
    arena::Backing,
    backend::{Backend, Buffer, Device, Limits, Operation},
    disk::{DiskTimeout, DiskWatch, Retained, WatchedWork},
    error::{ApplyError, LoadError, LoadErrorKind},
    gguf::Header,
    kv::KvCache,
    preemption::SliceEstimators,
    reader::{Extent, LoadProgress, Source, Stream, WeightFile},
    sayable::Sayable,
    shape::{self, Layout},
    spec::Spec,
    state::{RecurrentState, Trial},
};
use cotenant_policy::{
    kv_type::KvType,
    residency::{EnginePlan, LayerKind, ModelShape},
};
use cotenant_units::{Bytes, Tokens, causes::in_one_line};

/// A model file whose header was read, before its weights.
pub struct Opening {
    disk: Disk,
    device: Arc<dyn Device>,
    needs: Needs,
    file: Arc<WeightFile>,
    /// Extents of the vectors, which the system prefetches.
    vectors: Vec<Extent>,
    header: Arc<Header>,
    spec: Spec,
    pub(super) layout: Layout,
    shape: ModelShape,
    options: ModelOptions,
    progress: LoadProgress,
}

/// How the disk is accessed while a model is opened, and the limit after which it counts as stalled.
#[derive(Clone, Default)]
pub(super) struct Disk {
    pub(super) watch: DiskWatch,
    pub(super) limit: DiskTimeout,
    /// Wraps the source of large reads.
    #[cfg(test)]
    pub(super) wrap: Option<WrapSource>,
}

/// Wrapper between the file and its readers.
#[cfg(test)]
pub(super) type WrapSource = Arc<dyn Fn(Arc<WeightFile>) -> Arc<dyn Source> + Send + Sync>;

impl Disk {
    /// Runs `work`, which reads the file at `path`, on a thread that is abandoned if the disk hangs.
    fn attend<T: Send + 'static>(
        &self,
        path: &Path,
        work: impl FnOnce(&DiskWatch) -> Result<T, LoadError> + Send + 'static,
    ) -> Result<T, LoadError> {
        let work = WatchedWork::start(&self.watch, work);
        let work = work.map_err(|error| LoadError::new(path, LoadErrorKind::Threads(error)))?;
        work.wait(self.limit).unwrap_or_else(|(stalled, left)| {
            Err(LoadError::new(path, stalled.into()).leaving(left))
        })
    }

    fn source(&self, file: &Arc<WeightFile>) -> Arc<dyn Source> {
        #[cfg(test)]
        if let Some(wrap) = &self.wrap {
            return wrap(Arc::clone(file));
        }
        Arc::<WeightFile>::clone(file)
    }
}

impl Opening {
    /// Reads the header of the file at `path`, and computes the size of each piece.
    ///
    /// # Errors
    /// When the engine cannot compute with the file.
    pub fn read(path: &Path, options: &ModelOptions) -> Result<Self, LoadError> {
        let device = options
            .device()
            .map_err(|kind| LoadError::new(path, kind))?;
        Self::on(device, path, options, Layout::of, &Disk::default())
    }

    /// As [`Self::read`], on a given device and with a given layout.
    pub(super) fn on(
        device: Arc<dyn Device>,
        path: &Path,
        options: &ModelOptions,
        layout: impl Fn(&Spec) -> Layout + Send + 'static,
        disk: &Disk,
    ) -> Result<Self, LoadError> {
        let (theirs, options, stays) = (path.to_owned(), options.clone(), disk.clone());
        disk.attend(path, move |watch| {
            let (header, mut spec, file) =
                read(&theirs, options.context, options.vocabulary.as_ref(), watch)?;
            damage::refuse_zeros(&header, &file, watch)
                .map_err(|kind| LoadError::new(&theirs, kind))?;
            let device = for_model(device, &theirs, &mut spec)?;
            let layout = layout(&spec);
            let mut needs = Needs::of(device.as_ref(), &layout, &spec);
            let mut shape = model_shape(&header, &spec, &layout, options.name.as_deref(), &needs);
            if options.keeps_conversations {
                shape = with_transfers(shape);
            }
            if !options.drafts {
                shape = without_drafts(shape, needs.drafts());
                (needs.trial, needs.draft_kv) = (Bytes::ZERO, Bytes::ZERO);
            }
            // The first token depends on the disk: prefetch now.
            let vectors = weights::expect_vectors(&file, &layout.fixed, &spec, watch);
            Ok(Self {
                disk: stays,
                device,
                needs,
                file: Arc::new(file),
                vectors,
                header: Arc::new(header),
                spec,
                layout,
                shape,
                options,
                progress: LoadProgress::default(),
            })
        })
    }

    /// Counts the bytes read by [`Self::begin`] in `progress`.
    pub(crate) fn counted_by(self, progress: &LoadProgress) -> Self {
        Self {
            progress: progress.clone(),
            ..self
        }
    }

    /// The file's header. Drop clones of it before [`Model::forget_lists`], which otherwise copies the header.
    pub const fn header(&self) -> &Arc<Header> {
        &self.header
    }

    /// Size of each piece of the model.
    pub const fn shape(&self) -> &ModelShape {
        &self.shape
    }

    /// Puts `plan` into force. Pages of the ring, the state and the workspace may still be missing afterwards:
    /// [`Model::settle`] waits for them, a token need not.
    ///
    /// If an allocation for a layer fails, it retries once with fewer layers: [`Model::plan`] is the plan in force, and
    /// [`Model::refused`] the reason.
    ///
    /// # Errors
    /// When weights cannot be read or memory cannot be allocated.
    pub fn begin(self, plan: &EnginePlan) -> Result<Model, LoadError> {
        let path = self.header.path().to_owned();
        let mut left = Retained::of(Vec::new(), Instant::now());
        // A failed assembly has released its memory by now, except the part that hanging reads keep.
        self.assemble(plan, &mut left)
            .map_err(|kind| LoadError::new(&path, kind).leaving(left))
    }

    /// Builds the model; records in `left` the memory that readers may keep.
    fn assemble(self, plan: &EnginePlan, left: &mut Retained) -> Result<Model, LoadErrorKind> {
        let Self {
            disk,
            device,
            needs,
            file,
            vectors,
            header,
            spec,
            layout,
            shape,
            options,
            progress,
        } = self;
        let began = Instant::now();
        let mut backend = device.start(&Limits::of(&spec, layout.parts.len()))?;
        let chunk = residency::check(&shape, plan)
            .map_err(|error| LoadErrorKind::Plan(error.to_string()))?;
        // The first token depends on the disk: read the vectors and the streamed parts while memory is allocated.
        let vectors =
            Vectors::begin(&file, vectors, &disk.watch).map_err(LoadErrorKind::Threads)?;
        let source = progress.counting(disk.source(&file));
        let parts = (0u32..)
            .zip(&shape.layers)
            .filter(|(part, _)| plan.resident.contains(part));
        progress.begin(parts.fold(Bytes::ZERO, |sum, (_, part)| {
            sum.saturating_add(part.resident_bytes)
        }));
        let resident =
            |part: usize| u32::try_from(part).is_ok_and(|part| plan.resident.contains(&part));
        let stream = weights::begin(
            backend.as_ref(),
            Arc::clone(&source),
            &layout,
            resident,
            disk.limit,
        )
        .map_err(refuse("the staging ring", shape.ring_bytes))?;
        left.add(Retained::of(stream.as_ref().map(Stream::ring_mark), began));
        let memory = Memory::new(
            backend.as_mut(),
            &spec,
            (&layout, &needs),
            &shape,
            chunk,
            &options,
        );
        let vectors = vectors.wait(disk.limit).map_err(|(stalled, work)| {
            left.add(work);
            stalled
        })?;
        let Memory {
            state,
            trial,
            draft,
            workspace,
            cache,
            logits,
        } = memory?;
        let fixed = Weights::fixed_of(backend.as_mut(), &layout.fixed, &spec, &vectors?)?;
        let experts = layout.experts.as_ref().map(|experts| {
            let staging = backend.allocate(experts.staging(), Backing::Now);
            let staging = staging.map_err(refuse("experts in use", experts.staging()))?;
            Ok::<_, LoadErrorKind>(Experts::new(experts, staging))
        });
        let parts = layout.parts.len();
        let mut model = Model {
            weights: Weights::new(
                source,
                fixed,
                parts,
                experts.transpose()?,
                (stream, disk.limit),
            ),
            sequence: Sequence::new(cache, (state, trial), &spec.attention, plan.kv_type),
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
            workspace,
            needs,
            logits,
            draft,
            chunk_wanted: chunk,
            estimators: SliceEstimators::new(),
            refused: None,
            saved: None,
        };
        let mut applied = residency::apply(&mut model, plan, &mut || false);
        if let Err(error @ ApplyError::Allocate { .. }) = &applied
            && let Some(fewer) = with_room(&model, plan)
        {
            model.refused = Some(in_one_line(error));
            applied = residency::apply(&mut model, &fewer, &mut || false);
        }
        progress.end();
        applied.map_err(|error| {
            left.add(model.weights.kept(began));
            match error {
                ApplyError::Allocate {
                    what,
                    bytes,
                    source,
                } => LoadErrorKind::Allocate {
                    what,
                    bytes,
                    source,
                },
                ApplyError::Device(error) => error.into(),
                ApplyError::Read(error) => error.into(),
                ApplyError::Stalled(stalled) => stalled.into(),
                other => LoadErrorKind::Plan(other.to_string()),
            }
        })?;
        Ok(model)
    }
}

/// Returns the plan with only the allocated parts, less as many of the last ones as leave room for the untouched KV
/// cells and a ring; `None` if none is left to release.
fn with_room(model: &Model, plan: &EnginePlan) -> Option<EnginePlan> {
    let mut fewer = EnginePlan {
        resident: model.plan.resident.clone(),
        ..plan.clone()
    };
    let (mut room, needed) = (Bytes::ZERO, model.untouched());
    while room == Bytes::ZERO
        || room < needed
        || model.shape.plan_bytes(&fewer) > model.shape.plan_bytes(plan)
    {
        let last = usize::try_from(fewer.resident.pop_last()?).ok()?;
        room = room.saturating_add(model.layout.parts.get(last)?.arena);
    }
    Some(fewer)
}

/// Returns the shape without the draft block and the `fixed` memory for drafts.
pub(crate) fn without_drafts(mut shape: ModelShape, fixed: Bytes) -> ModelShape {
    shape.layers.retain(|part| part.kind != LayerKind::Draft);
    shape.workspace_fixed_bytes = shape.workspace_fixed_bytes.saturating_sub(fixed);
    shape
}

/// Reads a header, and computes the size of each piece; also returns the fixed memory for drafts.
pub(super) fn inspect(
    device: Arc<dyn Device>,
    path: &Path,
    vocabulary: Option<&Sayable>,
    disk: &Disk,
) -> Result<(ModelShape, Header, Bytes), LoadError> {
    let (theirs, vocabulary) = (path.to_owned(), vocabulary.cloned());
    disk.attend(path, move |watch| {
        let (header, mut spec, _) = read(&theirs, None, vocabulary.as_ref(), watch)?;
        let device = for_model(device, &theirs, &mut spec)?;
        let layout = Layout::of(&spec);
        let needs = Needs::of(device.as_ref(), &layout, &spec);
        let shape = model_shape(&header, &spec, &layout, None, &needs);
        Ok((shape, header, needs.drafts()))
    })
}

/// A model's memory apart from its weights.
struct Memory {
    state: RecurrentState,
    trial: Option<Trial>,
    draft: Option<DraftKv>,
    workspace: Workspace,
    cache: KvCache,
    logits: Buffer,
}

impl Memory {
    fn new(
        backend: &mut dyn Backend,
        spec: &Spec,
        (layout, needs): (&Layout, &Needs),
        shape: &ModelShape,
        chunk: usize,
        options: &ModelOptions,
    ) -> Result<Self, LoadErrorKind> {
        // A device's address space may be smaller than the longest context requires.
        let context = options
            .context
            .map_or(u32::MAX, Tokens::get)
            .min(spec.context_max);
        // Copies take the most capacity of the smallest type.
        let copies = shape.tokens_of_copies(options.conversations, KvType::Q4);
        let capacity = context.saturating_add(copies.get());
        let logits_bytes = shape::logits_bytes(spec);
        let logits = backend
            .allocate(logits_bytes, Backing::Now)
            .map_err(refuse("the logits", logits_bytes))?;
        if spec.said.is_some() {
            // The logits of removed tokens are never written.
            for row in 0..shape::ANSWERS_MAX {
                let first = row * shape::logits_stride(spec);
                backend.queue(Operation::Fill {
                    floats: logits.view(first..first + spec.vocabulary),
                    value: f32::NEG_INFINITY,
                })?;
            }
        }
        Ok(Self {
            state: RecurrentState::new(backend, spec)
                .map_err(refuse("the state", shape.state_bytes))?,
            trial: Trial::new(backend, spec, needs.trial)
                .map_err(refuse("drafted tokens", needs.trial))?,
            draft: DraftKv::new(backend, spec, needs.draft_kv)?,
            // The first pass touches these pages while it waits for the disk; `settle` populates the rest.
            workspace: Workspace::untouched(backend, (&layout.widths, needs), spec, chunk)
                .map_err(refuse(
                    "the workspace",
                    shape.workspace_bytes_per_token.saturating_mul(chunk as u64),
                ))?,
            cache: KvCache::new(backend, shape.kv, capacity, options.kv_backing).map_err(
                refuse(
                    "the KV cache (address space alone)",
                    shape.kv.capacity_bytes(Tokens::new(capacity), KvType::F16),
                ),
            )?,
            logits,
        })
    }
}

/// Reads a file's header and the spec, and opens the file for its weights.
fn read(
    path: &Path,
    context: Option<Tokens>,
    vocabulary: Option<&Sayable>,
    watch: &DiskWatch,
) -> Result<(Header, Spec, WeightFile), LoadError> {
    let (header, files) = Header::read_watched(path, watch)?;
    let mut spec = Spec::read_for(&header, context)?;
    spec.reduce(&header, vocabulary, watch)?;
    let file =
        WeightFile::of(header.parts(), files, watch).map_err(|kind| LoadError::new(path, kind))?;
    Ok((header, spec, file))
}

/// Returns the device's substitute for this model, if it has one, else the device. Removes a draft block of which the
/// device could not take tokens back.
fn for_model(
    device: Arc<dyn Device>,
    path: &Path,
    spec: &mut Spec,
) -> Result<Arc<dyn Device>, LoadError> {
    let other = device.instead(spec, &shape::kv_shape(spec));
    let other = other.map_err(|kind| LoadError::new(path, kind))?;
    let device = other.unwrap_or(device);
    spec.draft = spec.draft.take().filter(|_| device.tries_states());
    Ok(device)
}

/// Returns an adapter from an allocation failure of `bytes` for `what` to an error.
fn refuse(what: &'static str, bytes: Bytes) -> impl FnOnce(io::Error) -> LoadErrorKind {
    move |source| LoadErrorKind::Allocate {
        what: what.to_owned(),
        bytes,
        source,
    }
}

fn model_shape(
    header: &Header,
    spec: &Spec,
    layout: &Layout,
    name: Option<&str>,
    needs: &Needs,
) -> ModelShape {
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
    let mut shape = layout.model_shape(spec, header, name, needs.copies, needs.scratch);
    shape.workspace_fixed_bytes = shape
        .workspace_fixed_bytes
        .saturating_add(needs.context)
        .saturating_add(needs.drafts());
    shape.kv.granule = shape.kv.granule.max(needs.granule);
    shape.ring_bytes = needs.ring;
    shape
}
