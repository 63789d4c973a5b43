//! Application of plans, between two tokens or within a pass.

use std::time::Instant;

use super::{growth::GrowError, loaded::Model, weights::Place, workspace::Workspace};
use crate::{
    arena,
    error::{ApplyError, ApplyReport},
    kv::{KvError, Resized},
    shape::PartLayout,
};
use cotenant_memory::emergency;
use cotenant_policy::{
    kv_type::KvType,
    residency::{EnginePlan, ModelShape},
};
use cotenant_units::{Bytes, Tokens};

/// Puts `plan` into force between two tokens: releases first, then grows. Growth that takes long is preempted by other
/// `wanted` work and keeps the parts read by then.
pub(super) fn apply(
    model: &mut Model,
    plan: &EnginePlan,
    wanted: &mut dyn FnMut() -> bool,
) -> Result<ApplyReport, ApplyError> {
    let mut used = model.sequence.kept();
    change(model, plan, Place::default(), &mut used, true, wanted)
}

/// Puts `plan` into force. `place` is computed next. `used` is the least KV capacity required, and is reduced by the
/// tokens dropped for the plan. The workspace changes only if `rechunk`, which means that no chunk is in progress.
/// Growth that takes long is preempted by other `wanted` work.
pub(super) fn change(
    model: &mut Model,
    plan: &EnginePlan,
    place: Place,
    used: &mut u32,
    rechunk: bool,
    wanted: &mut dyn FnMut() -> bool,
) -> Result<ApplyReport, ApplyError> {
    let gives = model.shape.plan_bytes(plan) < model.shape.plan_bytes(&model.plan);
    emergency::within_if(gives, || {
        let chunk = check(&model.shape, plan)?;
        if !rechunk {
            check_beside_chunk(model, plan)?;
        }
        Change::begin(model).carry_out(plan, (chunk, rechunk), place, used, wanted)
    })
}

/// Applies a smaller chunk size that was requested while a chunk was in progress, after the chunk, and reports the
/// result. If memory for the new workspace cannot be allocated, the old one stays.
pub(super) fn rechunk_if_wanted(model: &mut Model) -> Option<ApplyReport> {
    let chunk = model.chunk_wanted;
    if chunk == model.workspace.chunk() {
        return None;
    }
    emergency::within(|| {
        let mut change = Change::begin(model);
        let result = change.rechunk(chunk);
        change.model.chunk_wanted = change.model.workspace.chunk();
        change.note_plan();
        result.is_ok().then(|| change.report(0))
    })
}

/// A change of plan in progress.
struct Change<'model> {
    model: &'model mut Model,
    moved: Moved,
    started: Instant,
    rss_before: Bytes,
}

/// Bytes moved by a change of plan.
#[derive(Default)]
struct Moved {
    asked: Bytes,
    freed: Bytes,
    untouched: Bytes,
    grown: Bytes,
}

impl<'model> Change<'model> {
    fn begin(model: &'model mut Model) -> Self {
        let (started, rss_before) = (Instant::now(), arena::process_resident());
        Self {
            model,
            moved: Moved::default(),
            started,
            rss_before,
        }
    }

    fn carry_out(
        mut self,
        plan: &EnginePlan,
        (chunk, rechunk): (usize, bool),
        place: Place,
        used: &mut u32,
        wanted: &mut dyn FnMut() -> bool,
    ) -> Result<ApplyReport, ApplyError> {
        // A conversation that is being read back holds capacity, and gives it up.
        self.model.end_reload();
        // Queued operations may use memory that is about to be released.
        self.model.finish()?;
        self.model.weights.reclaim(self.model.backend.as_mut(), 0)?;
        let dropped = self.model.drop_for(plan.kv_capacity, *used);
        *used -= dropped;
        let result = self.release_then_grow(plan, (chunk, rechunk), (place, *used), wanted);
        self.note_plan();
        if rechunk && result.is_err() {
            // Cancel both the earlier and this plan's chunk size: applied later, they would not be reported.
            self.model.chunk_wanted = self.model.workspace.chunk();
        }
        result?;
        // A larger chunk later would take memory that this plan's report does not include. A client that requested a
        // smaller one relies on the size in force until it is notified of another.
        self.model.chunk_wanted = if rechunk {
            chunk
        } else {
            chunk.min(self.model.chunk_wanted)
        };
        Ok(self.report(dropped))
    }

    fn report(&self, dropped: u32) -> ApplyReport {
        ApplyReport {
            plan: self.model.plan.clone(),
            asked: self.moved.asked,
            freed: self.moved.freed,
            untouched: self.moved.untouched,
            held_untouched: self.model.untouched(),
            grown: self.moved.grown,
            dropped: Tokens::new(dropped),
            held: self.model.breakdown().total,
            rss_before: self.rss_before,
            rss_after: arena::process_resident(),
            took: self.started.elapsed(),
        }
    }

    fn release_then_grow(
        &mut self,
        plan: &EnginePlan,
        (chunk, rechunk): (usize, bool),
        (place, used): (Place, u32),
        wanted: &mut dyn FnMut() -> bool,
    ) -> Result<(), ApplyError> {
        let least = self.model.sequence.held(used);
        let mut changed = self.model.weights.needs_stream(&self.model.layout);
        let all = self.model.layout.parts.len();
        let shape = &self.model.shape;
        let has_all = |plan: &EnginePlan| shape.ring_beside(&plan.resident) == Bytes::ZERO;
        let (keeps_all, whole) = (has_all(plan), has_all(plan) || has_all(&self.model.plan));
        for (index, number) in (0..self.model.layout.parts.len()).zip(0u32..) {
            if !plan.resident.contains(&number) && self.model.weights.arena(index).is_some() {
                let (asked, freed) = self.model.weights.shed(index);
                self.moved.asked += asked;
                self.moved.freed += freed;
                changed = true;
            }
        }
        // After a failure the remaining steps are skipped, except the restart of the readers: they must bring the parts
        // that are not resident.
        let mut result = Ok(());
        if self.model.sequence.cache.planned(plan.kv_capacity, least)
            < self.model.sequence.cache.capacity()
        {
            result = self.resize_cache(plan.kv_capacity, used);
        }
        if result.is_ok() && plan.kv_type < self.model.sequence.cache.kind() {
            result = self.convert_cache(plan.kv_type, used);
        }
        if result.is_ok() && rechunk && chunk != self.model.workspace.chunk() {
            result = self.rechunk(chunk);
        }
        if result.is_ok()
            && self.model.sequence.cache.planned(plan.kv_capacity, least)
                > self.model.sequence.cache.capacity()
        {
            result = self.resize_cache(plan.kv_capacity, used);
        }
        if result.is_ok() && plan.kv_type > self.model.sequence.cache.kind() {
            result = self.convert_cache(plan.kv_type, used);
        }
        if result.is_ok() {
            let missing: Vec<usize> = (0..self.model.layout.parts.len())
                .zip(0u32..)
                .filter(|(index, number)| {
                    plan.resident.contains(number) && self.model.weights.arena(*index).is_none()
                })
                .map(|(index, _)| index)
                .collect();
            if !missing.is_empty() {
                changed = true;
                if keeps_all {
                    // Nothing will be streamed: release the ring before the parts are read.
                    let (asked, freed) = self.model.weights.stop_stream();
                    self.moved.asked += asked;
                    self.moved.freed += freed;
                }
                result = self.grow_parts(&missing, wanted);
            }
        }
        if changed {
            let short = (0u32..).zip(0..all).any(|(number, index)| {
                // Growth may have been preempted.
                plan.resident.contains(&number) && self.model.weights.arena(index).is_none()
            });
            if whole && (result.is_err() || short) {
                self.make_room_for_the_ring();
            }
            let restarted = self.start_stream(place);
            result = result.and(restarted);
        }
        result
    }

    /// Releases as many of the last parts as the ring needs: after a failed change from a plan without a ring, no more
    /// is held than by the larger of both plans.
    fn make_room_for_the_ring(&mut self) {
        let parts = self.model.layout.parts.len();
        let bytes_of = |index: usize| {
            self.model
                .layout
                .parts
                .get(index)
                .map_or(Bytes::ZERO, |part| part.arena)
        };
        let absent = (0..parts).filter(|index| self.model.weights.arena(*index).is_none());
        let mut room: Bytes = absent.map(bytes_of).sum();
        for index in (0..parts).rev() {
            if room >= self.model.shape.ring_bytes || room == Bytes::ZERO {
                return;
            }
            if self.model.weights.arena(index).is_some() {
                let (asked, freed) = self.model.weights.shed(index);
                room += asked;
                self.moved.asked += asked;
                self.moved.freed += freed;
            }
        }
    }

    fn grow_parts(
        &mut self,
        missing: &[usize],
        wanted: &mut dyn FnMut() -> bool,
    ) -> Result<(), ApplyError> {
        let parts: Vec<(usize, &PartLayout)> = missing
            .iter()
            .filter_map(|&index| Some((index, self.model.layout.parts.get(index)?)))
            .collect();
        let (grown, result) = self
            .model
            .weights
            .grow(self.model.backend.as_ref(), &parts, wanted);
        self.moved.grown += grown;
        result.map_err(|(index, error)| match error {
            GrowError::Read(error) => ApplyError::Read(error),
            GrowError::Stalled(stalled) => stalled.into(),
            GrowError::Allocate(source) => {
                let part = self.model.layout.parts.get(index);
                ApplyError::Allocate {
                    what: match part.and_then(|part| part.layer) {
                        Some(layer) => format!("layer {layer}"),
                        None => "the output head".to_owned(),
                    },
                    bytes: part.map_or(Bytes::ZERO, |part| part.arena),
                    source,
                }
            }
        })
    }

    fn resize_cache(&mut self, capacity: Tokens, used: u32) -> Result<(), ApplyError> {
        let untouched = self.model.untouched();
        let kind = self.model.sequence.cache.kind();
        let resized = self
            .model
            .sequence
            .resize(self.model.backend.as_mut(), capacity, used);
        let bytes = self.model.shape.kv.capacity_bytes(capacity, kind);
        let resized = resized.map_err(|error| {
            refused(error, format!("a KV capacity of {capacity} tokens"), bytes)
        })?;
        self.note_moved(resized, untouched);
        Ok(())
    }

    /// Converts the `used` tokens of the KV cache to another type.
    fn convert_cache(&mut self, kind: KvType, used: u32) -> Result<(), ApplyError> {
        let (untouched, capacity) = (self.model.untouched(), self.model.sequence.cache.capacity());
        let converted = self
            .model
            .sequence
            .convert(self.model.backend.as_mut(), kind, used);
        let bytes = self.model.shape.kv.capacity_bytes(capacity, kind);
        let what = || format!("a KV capacity of {capacity} tokens as {kind}");
        let resized = converted.map_err(|error| refused(error, what(), bytes))?;
        self.note_moved(resized, untouched);
        Ok(())
    }

    fn note_moved(&mut self, resized: Resized, untouched: Bytes) {
        self.moved.asked += resized.asked;
        self.moved.freed += resized.freed;
        self.moved.untouched += untouched.saturating_sub(self.model.untouched());
        self.moved.grown += resized.grown;
    }

    /// Replaces the workspace by one for `chunk` tokens.
    fn rechunk(&mut self, chunk: usize) -> Result<(), ApplyError> {
        self.model.finish()?;
        if let Some(draft) = &mut self.model.draft {
            draft.note_states(None, 0);
        }
        let (backend, sizes) = (
            self.model.backend.as_ref(),
            (&self.model.layout.widths, &self.model.needs),
        );
        let workspace =
            Workspace::untouched(backend, sizes, &self.model.spec, chunk).map_err(|source| {
                ApplyError::Allocate {
                    what: format!("a prefill chunk of {chunk} tokens"),
                    bytes: self
                        .model
                        .shape
                        .workspace_bytes_per_token
                        .saturating_mul(chunk as u64),
                    source,
                }
            })?;
        let before = std::mem::replace(&mut self.model.workspace, workspace);
        self.moved.asked += before.bytes();
        // The two workspaces are never in memory together, since the lease covers only one.
        self.moved.freed += before.release();
        self.model.workspace.touch();
        self.moved.grown += self.model.workspace.bytes();
        Ok(())
    }

    fn start_stream(&mut self, place: Place) -> Result<(), ApplyError> {
        self.model.weights.reclaim(self.model.backend.as_mut(), 0)?;
        let (grown, asked, freed) = self
            .model
            .weights
            .stream(self.model.backend.as_ref(), &self.model.layout, place)
            .map_err(|source| ApplyError::Allocate {
                what: "the staging ring".to_owned(),
                bytes: self.model.shape.ring_bytes,
                source,
            })?;
        self.moved.grown += grown;
        self.moved.asked += asked;
        self.moved.freed += freed;
        Ok(())
    }

    /// Records the plan in force.
    fn note_plan(&mut self) {
        self.model.plan = EnginePlan {
            resident: (0..self.model.layout.parts.len())
                .zip(0u32..)
                .filter(|(index, _)| self.model.weights.arena(*index).is_some())
                .map(|(_, number)| number)
                .collect(),
            kv_capacity: self.model.sequence.cache.capacity(),
            prefill_chunk: Tokens::new(
                u32::try_from(self.model.workspace.chunk()).unwrap_or(u32::MAX),
            ),
            kv_type: self.model.sequence.cache.kind(),
        };
    }
}

/// Refuses growth into the workspace of a chunk in progress, which is kept until its end.
fn check_beside_chunk(model: &Model, plan: &EnginePlan) -> Result<(), ApplyError> {
    let beside = EnginePlan {
        prefill_chunk: plan.prefill_chunk.max(model.plan.prefill_chunk),
        ..plan.clone()
    };
    let (held, most) = (
        model.shape.plan_bytes(&beside),
        model.shape.plan_bytes(&model.plan),
    );
    if held > most.max(model.shape.plan_bytes(plan)) {
        return Err(ApplyError::ChunkUnderWay {
            chunk: model.plan.prefill_chunk.get(),
            wanted: plan.prefill_chunk.get(),
        });
    }
    Ok(())
}

/// Converts a failed change of the cache to the error of the plan.
fn refused(error: KvError, what: String, bytes: Bytes) -> ApplyError {
    match error {
        KvError::Device(error) => error.into(),
        KvError::Memory(source) => ApplyError::Allocate {
            what,
            bytes,
            source,
        },
    }
}

/// Checks that `plan` is valid for `shape`, and returns its prefill chunk.
pub(super) fn check(shape: &ModelShape, plan: &EnginePlan) -> Result<usize, ApplyError> {
    let layers = u32::try_from(shape.layers.len()).unwrap_or(u32::MAX);
    if let Some(&layer) = plan.resident.last().filter(|&&layer| layer >= layers) {
        return Err(ApplyError::Plan { layer, layers });
    }
    let chunk = plan.prefill_chunk.get();
    if chunk == 0 || chunk > CHUNK_MAX {
        return Err(ApplyError::Chunk {
            chunk,
            limit: CHUNK_MAX,
        });
    }
    Ok(chunk as usize)
}

/// Largest chunk: prefill is bound by arithmetic from 512 rows on.
const CHUNK_MAX: u32 = 4096;
