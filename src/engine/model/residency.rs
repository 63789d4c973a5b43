//! Application of plans, between two tokens or within a pass.

use std::time::Instant;

use super::{Model, growth::GrowError, weights::Place, workspace::Workspace};
use crate::{
    emergency,
    engine::{
        arena,
        error::{ApplyError, ApplyReport},
        kv::{KvError, Resized},
        shape::PartLayout,
    },
    policy::{
        kv_type::KvType,
        residency::{EnginePlan, ModelShape},
    },
    units::{Bytes, Tokens},
};

/// Bytes on their way.
#[derive(Default)]
struct Moved {
    asked: Bytes,
    freed: Bytes,
    untouched: Bytes,
    grown: Bytes,
}

impl Model {
    /// Puts `plan` into force between two tokens: releases first, then grows.
    ///
    /// A KV capacity below what the sequence uses is raised to it; the report says so.
    ///
    /// # Errors
    /// When the plan makes no sense, memory cannot be had, or weights cannot be read. What was done until then stays
    /// done, and [`Self::plan`] says what is in force.
    pub fn apply(&mut self, plan: &EnginePlan) -> Result<ApplyReport, ApplyError> {
        self.apply_until(plan, &mut || false)
    }

    /// As [`Self::apply`]; when growing takes long, it ends for whatever else is `wanted`, with the parts that it has by
    /// then: the report says which plan is in force.
    ///
    /// # Errors
    /// As there.
    pub fn apply_until(
        &mut self,
        plan: &EnginePlan,
        wanted: &mut dyn FnMut() -> bool,
    ) -> Result<ApplyReport, ApplyError> {
        self.change(plan, Place::default(), &mut self.position.clone(), true, wanted)
    }

    /// Puts `plan` into force. `place` is what will be computed next, `used` the least KV capacity that is needed,
    /// which becomes less where tokens may be dropped for the plan; the workspace changes only when `rechunk` says that no chunk is under way. When
    /// growing takes long it ends, with what there is, for whatever else is `wanted`.
    pub(super) fn change(
        &mut self,
        plan: &EnginePlan,
        place: Place,
        used: &mut u32,
        rechunk: bool,
        wanted: &mut dyn FnMut() -> bool,
    ) -> Result<ApplyReport, ApplyError> {
        let gives = self.shape.plan_bytes(plan) < self.shape.plan_bytes(&self.plan);
        emergency::within_if(gives, || self.change_now(plan, place, used, rechunk, wanted))
    }

    fn change_now(
        &mut self,
        plan: &EnginePlan,
        place: Place,
        used: &mut u32,
        rechunk: bool,
        wanted: &mut dyn FnMut() -> bool,
    ) -> Result<ApplyReport, ApplyError> {
        let chunk = check(&self.shape, plan)?;
        if !rechunk {
            self.check_beside_chunk(plan)?;
        }
        let started = Instant::now();
        let rss_before = arena::process_resident();
        let mut moved = Moved::default();
        // What is queued may use whatever is given up.
        self.finish()?;
        self.weights.reclaim(self.backend.as_mut(), 0)?;
        let dropped = self.drop_for(plan.kv_capacity, *used);
        *used -= dropped;
        let result = self.release_then_grow(plan, (chunk, rechunk), (place, *used), wanted, &mut moved);
        self.note_plan();
        if rechunk && result.is_err() {
            // Neither what was wanted before nor the plan's comes later, without its report.
            self.chunk_wanted = self.workspace.chunk();
        }
        result?;
        // A larger one would take memory that this plan's report does not tell of. And who has asked for a smaller one goes
        // on from the one that is in force until it is notified that it is not any more.
        self.chunk_wanted = if rechunk { chunk } else { chunk.min(self.chunk_wanted) };
        Ok(self.report(&moved, dropped, started, rss_before))
    }

    fn report(&self, moved: &Moved, dropped: u32, started: Instant, rss_before: Bytes) -> ApplyReport {
        ApplyReport {
            plan: self.plan.clone(),
            asked: moved.asked,
            freed: moved.freed,
            untouched: moved.untouched,
            held_untouched: self.untouched(),
            grown: moved.grown,
            dropped: Tokens::new(dropped),
            held: self.breakdown().total,
            rss_before,
            rss_after: arena::process_resident(),
            took: started.elapsed(),
        }
    }

    /// A chunk that is under way keeps its workspace: what grows into the place of that has to wait.
    fn check_beside_chunk(&self, plan: &EnginePlan) -> Result<(), ApplyError> {
        let beside = EnginePlan { prefill_chunk: plan.prefill_chunk.max(self.plan.prefill_chunk), ..plan.clone() };
        let (held, most) = (self.shape.plan_bytes(&beside), self.shape.plan_bytes(&self.plan));
        if held > most.max(self.shape.plan_bytes(plan)) {
            return Err(ApplyError::ChunkUnderWay {
                chunk: self.plan.prefill_chunk.get(),
                wanted: plan.prefill_chunk.get(),
            });
        }
        Ok(())
    }

    fn release_then_grow(
        &mut self,
        plan: &EnginePlan,
        (chunk, rechunk): (usize, bool),
        (place, used): (Place, u32),
        wanted: &mut dyn FnMut() -> bool,
        moved: &mut Moved,
    ) -> Result<(), ApplyError> {
        let mut changed = self.weights.needs_stream();
        let all = self.layout.parts.len();
        let whole = plan.resident.len() == all || self.plan.resident.len() == all;
        for (index, number) in (0..self.layout.parts.len()).zip(0u32..) {
            if !plan.resident.contains(&number) && self.weights.arena(index).is_some() {
                let (asked, freed) = self.weights.shed(index);
                moved.asked += asked;
                moved.freed += freed;
                changed = true;
            }
        }
        // What follows a failure is left out, but for the readers: what they bring has to be what is not there.
        let mut result = Ok(());
        if self.cache.planned(plan.kv_capacity, used) < self.cache.capacity() {
            result = self.resize_cache(plan.kv_capacity, used, moved);
        }
        if result.is_ok() && plan.kv_type < self.cache.kind() {
            result = self.convert_cache(plan.kv_type, used, moved);
        }
        if result.is_ok() && rechunk && chunk != self.workspace.chunk() {
            result = self.rechunk(chunk, moved);
        }
        if result.is_ok() && self.cache.planned(plan.kv_capacity, used) > self.cache.capacity() {
            result = self.resize_cache(plan.kv_capacity, used, moved);
        }
        if result.is_ok() && plan.kv_type > self.cache.kind() {
            result = self.convert_cache(plan.kv_type, used, moved);
        }
        if result.is_ok() {
            let missing: Vec<usize> = (0..self.layout.parts.len())
                .zip(0u32..)
                .filter(|(index, number)| plan.resident.contains(number) && self.weights.arena(*index).is_none())
                .map(|(index, _)| index)
                .collect();
            if !missing.is_empty() {
                changed = true;
                if plan.resident.len() == all {
                    // Nothing will be streamed: the ring makes room for the parts instead of lying beside them.
                    let (asked, freed) = self.weights.stop_stream();
                    moved.asked += asked;
                    moved.freed += freed;
                }
                result = self.grow_parts(&missing, wanted, moved);
            }
        }
        if changed {
            let short = (0u32..).zip(0..all).any(|(number, index)| {
                // Growing may have given way to something else.
                plan.resident.contains(&number) && self.weights.arena(index).is_none()
            });
            if whole && (result.is_err() || short) {
                self.make_room_for_the_ring(moved);
            }
            let restarted = self.start_stream(place, moved);
            result = result.and(restarted);
        }
        result
    }

    /// Gives up as many of the last parts as the ring needs room: between a plan without a ring and one that could not be
    /// carried out, no more is held than by the larger of both.
    fn make_room_for_the_ring(&mut self, moved: &mut Moved) {
        let parts = self.layout.parts.len();
        let bytes_of = |index: usize| self.layout.parts.get(index).map_or(Bytes::ZERO, |part| part.arena);
        let absent = (0..parts).filter(|index| self.weights.arena(*index).is_none());
        let mut room: Bytes = absent.map(bytes_of).sum();
        for index in (0..parts).rev() {
            if room >= self.shape.ring_bytes || room == Bytes::ZERO {
                return;
            }
            if self.weights.arena(index).is_some() {
                let (asked, freed) = self.weights.shed(index);
                room += asked;
                moved.asked += asked;
                moved.freed += freed;
            }
        }
    }

    fn grow_parts(
        &mut self,
        missing: &[usize],
        wanted: &mut dyn FnMut() -> bool,
        moved: &mut Moved,
    ) -> Result<(), ApplyError> {
        let parts: Vec<(usize, &PartLayout)> =
            missing.iter().filter_map(|&index| Some((index, self.layout.parts.get(index)?))).collect();
        let (grown, result) = self.weights.grow(self.backend.as_ref(), &parts, wanted);
        moved.grown += grown;
        result.map_err(|(index, error)| match error {
            GrowError::Read(error) => ApplyError::Read(error),
            GrowError::Stalled(what, waited) => ApplyError::Stalled { what: what.to_string(), waited },
            GrowError::Allocate(source) => {
                let part = self.layout.parts.get(index);
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

    fn resize_cache(&mut self, capacity: Tokens, used: u32, moved: &mut Moved) -> Result<(), ApplyError> {
        let untouched = self.untouched();
        let kind = self.cache.kind();
        let resized = self.cache.resize(self.backend.as_mut(), capacity, used);
        let bytes = self.shape.kv.capacity_bytes(capacity, kind);
        let resized = resized.map_err(|error| refused(error, format!("a KV capacity of {capacity} tokens"), bytes))?;
        self.note_moved(resized, untouched, moved);
        Ok(())
    }

    /// Brings the `used` tokens of the KV cache to another type.
    fn convert_cache(&mut self, kind: KvType, used: u32, moved: &mut Moved) -> Result<(), ApplyError> {
        let (untouched, capacity) = (self.untouched(), self.cache.capacity());
        let converted = self.cache.convert(self.backend.as_mut(), kind, used);
        // Also after a failure: it may have come behind the conversion, or before it.
        let now = self.cache.kind();
        self.kv_precision = if used == 0 { now } else { self.kv_precision.min(now) };
        let bytes = self.shape.kv.capacity_bytes(capacity, kind);
        let what = || format!("a KV capacity of {capacity} tokens as {kind}");
        let resized = converted.map_err(|error| refused(error, what(), bytes))?;
        self.note_moved(resized, untouched, moved);
        Ok(())
    }

    fn note_moved(&mut self, resized: Resized, untouched: Bytes, moved: &mut Moved) {
        moved.asked += resized.asked;
        moved.freed += resized.freed + self.fit_marks();
        moved.untouched += untouched.saturating_sub(self.untouched());
        moved.grown += resized.grown;
    }

    /// Replaces the workspace by one for `chunk` tokens.
    fn rechunk(&mut self, chunk: usize, moved: &mut Moved) -> Result<(), ApplyError> {
        self.finish()?;
        let (backend, sizes) = (self.backend.as_ref(), (&self.layout.widths, &self.needs));
        let workspace =
            Workspace::untouched(backend, sizes, &self.spec, chunk).map_err(|source| ApplyError::Allocate {
                what: format!("a prefill chunk of {chunk} tokens"),
                bytes: self.shape.workspace_bytes_per_token.saturating_mul(chunk as u64),
                source,
            })?;
        let before = std::mem::replace(&mut self.workspace, workspace);
        moved.asked += before.bytes();
        // At no time are both in memory: that is not leased.
        moved.freed += before.release();
        self.workspace.touch();
        moved.grown += self.workspace.bytes();
        Ok(())
    }

    /// Puts a smaller chunk size that was wanted while a chunk was under way into force, now that it is not, and reports
    /// what came of it. Without memory for it the old one stays.
    pub(super) fn rechunk_if_wanted(&mut self) -> Option<ApplyReport> {
        let chunk = self.chunk_wanted;
        if chunk == self.workspace.chunk() {
            return None;
        }
        emergency::within(|| {
            let (started, rss_before) = (Instant::now(), arena::process_resident());
            let mut moved = Moved::default();
            let result = self.rechunk(chunk, &mut moved);
            self.chunk_wanted = self.workspace.chunk();
            self.note_plan();
            result.is_ok().then(|| self.report(&moved, 0, started, rss_before))
        })
    }

    /// Makes the readers bring streamed parts from the first one on.
    pub(super) fn restart_stream(&mut self) {
        // Without a stream the next pass reports that the weights are missing, and tries again.
        self.start_stream(Place::default(), &mut Moved::default()).ok();
    }

    fn start_stream(&mut self, place: Place, moved: &mut Moved) -> Result<(), ApplyError> {
        self.weights.reclaim(self.backend.as_mut(), 0)?;
        let (grown, asked, freed) =
            self.weights.stream(self.backend.as_ref(), &self.layout, place).map_err(|source| ApplyError::Allocate {
                what: "the staging ring".to_owned(),
                bytes: self.layout.ring,
                source,
            })?;
        moved.grown += grown;
        moved.asked += asked;
        moved.freed += freed;
        Ok(())
    }

    /// Writes down what is in force.
    fn note_plan(&mut self) {
        self.plan = EnginePlan {
            resident: (0..self.layout.parts.len())
                .zip(0u32..)
                .filter(|(index, _)| self.weights.arena(*index).is_some())
                .map(|(_, number)| number)
                .collect(),
            kv_capacity: self.cache.capacity(),
            prefill_chunk: Tokens::new(u32::try_from(self.workspace.chunk()).unwrap_or(u32::MAX)),
            kv_type: self.cache.kind(),
        };
    }
}

/// What it means for a plan that the cache could not be changed.
fn refused(error: KvError, what: String, bytes: Bytes) -> ApplyError {
    match error {
        KvError::Device(error) => error.into(),
        KvError::Memory(source) => ApplyError::Allocate { what, bytes, source },
    }
}

/// Checks that `plan` is one for `shape`, and returns its prefill chunk.
pub(super) fn check(shape: &ModelShape, plan: &EnginePlan) -> Result<usize, ApplyError> {
    let layers = u32::try_from(shape.layers.len()).unwrap_or(u32::MAX);
    if let Some(&layer) = plan.resident.last().filter(|&&layer| layer >= layers) {
        return Err(ApplyError::Plan { layer, layers });
    }
    let chunk = plan.prefill_chunk.get();
    if chunk == 0 || chunk > CHUNK_MAX {
        return Err(ApplyError::Chunk { chunk, limit: CHUNK_MAX });
    }
    Ok(chunk as usize)
}

/// A larger chunk would not make prefill faster: at 512 rows the products are bound by arithmetic.
const CHUNK_MAX: u32 = 4096;
