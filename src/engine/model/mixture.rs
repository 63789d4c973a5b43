//! A mixture of experts: the feed-forward part of a layer, of which each token uses a few.

use std::{collections::VecDeque, time::Instant};

use super::{
    forward::{FFN_NORM, Pass},
    products::Failure,
    weights::{Place, Weights},
    workspace::Slot,
};
use crate::{
    backend::{
        Activate, Backend, Combine, Gather, Multiply, Norm, Operation, Product, Residual,
        RowBiases, Span, View,
    },
    preemption::{Preempt, Preemption, Work},
    reader::Missing,
    shape::{ExpertLayout, Layout},
    spec::{Beside, ExpertSpec, LayerSpec, Matrix, Role, Scores, Vector, root},
};

/// Experts of the rows of a chunk.
#[derive(Debug, PartialEq)]
struct Choice {
    /// By number.
    experts: Vec<Chosen>,
    /// For each row, its outputs and their weights, by number of the expert.
    terms: Vec<(u32, f32)>,
}

/// An expert that some rows have chosen.
#[derive(Debug, Default, PartialEq)]
struct Chosen {
    expert: usize,
    rows: Vec<u32>,
    /// Output of the first of these rows.
    first: usize,
}

/// Room with an expert's weights.
#[derive(Clone, Copy, Debug)]
enum Room {
    /// A room of the plan.
    Resident(usize),
    /// A room of staging.
    Staged(usize),
}

/// Computes the mixture of a layer. The outputs of a row are added in the order of the experts' numbers, so that its
/// bits depend on nothing else.
pub(super) fn compute(
    pass: &mut Pass<'_, '_>,
    index: usize,
    spec: &ExpertSpec,
) -> Result<(), Failure> {
    let (width, count, rows) = (pass.model.spec.width, spec.count, pass.rows);
    let router = [(Role::Router, Slot::Third, count)];
    if let Beside::Normed(_) = spec.beside {
        let scale = [Vector::RouterScale, Vector::FfnNormBias];
        pass.norm(index, Some(scale), &[Role::Router])?;
        pass.products(index, Slot::Normed, &router)?;
        pass.norm(index, Some(FFN_NORM), &[Role::FfnGate, Role::FfnUp])?;
        pass.gated(index, Slot::Experts)?;
        pass.norm(index, Some([Vector::ExpertNorm, Vector::FfnNormBias]), &[])?;
    } else {
        let roles = [Role::Router, Role::SharedGate, Role::FfnGate, Role::FfnUp];
        pass.norm(index, Some(FFN_NORM), &roles)?;
        pass.products(index, Slot::Normed, &router)?;
    }
    let mut shared: Vec<f32> = Vec::new();
    if let Beside::Added(_) = spec.beside {
        pass.gated(index, Slot::Experts)?;
        shared.resize(rows, 1.0);
    }
    if let Beside::Gated(_) = spec.beside {
        // Its outputs come before those of the others.
        pass.products(index, Slot::Normed, &[(Role::SharedGate, Slot::Fourth, 1)])?;
        pass.gated(index, Slot::Experts)?;
        let model = &mut pass.model;
        let gates = model.backend.read(&model.workspace.fourth, 0..rows)?;
        shared.extend(gates.iter().map(|gate| sigmoid(*gate)));
    }
    let bias = vector_of(pass, index, Vector::ScoreBias)?.unwrap_or_else(|| vec![0.0; count]);
    let added = vector_of(pass, index, Vector::RouterBias)?.unwrap_or_else(|| vec![0.0; count]);
    let factors = vector_of(pass, index, Vector::ExpertScale)?;
    let model = &mut pass.model;
    let logits = model
        .backend
        .read(&model.workspace.third, 0..rows * count)?;
    let scale = match spec.beside {
        Beside::Normed(_) => root(width).recip(),
        _ => 1.0,
    };
    let logits = logits.iter().zip(added.iter().cycle());
    let logits: Vec<f32> = logits.map(|(logit, add)| logit * scale + add).collect();
    let beside = if spec.beside.width() > 0 { rows } else { 0 };
    let mut choice = Choice::of((&logits, &bias), spec, (beside, &shared));
    if let Some(factors) = factors {
        choice.scale(&factors);
    }
    experts(pass, index, &choice)?;
    let (weights, fixed) = (&pass.model.weights, &pass.model.layout.fixed);
    let biases = weights.vector(fixed, index, Vector::ExpertDownBias);
    let biases = biases.map(|rows| RowBiases {
        rows,
        of: choice.experts_of_terms().into(),
    });
    let workspace = &pass.model.workspace;
    let outputs = rows * (spec.used + usize::from(spec.beside.width() > 0));
    pass.model.backend.queue(Operation::Combine(Combine {
        from: workspace.experts.view(0..outputs * width),
        terms: choice.terms.into(),
        biases,
        width,
        to: workspace.normed.view(0..rows * width),
    }))?;
    if let Beside::Normed(_) = spec.beside {
        add_beside(pass, index)?;
    }
    pass.residual = Some(pass.ffn_residual(index));
    Ok(())
}

/// Adds the output of the part beside the experts to theirs, each by its own norm.
fn add_beside(pass: &mut Pass<'_, '_>, index: usize) -> Result<(), Failure> {
    let (width, epsilon) = (pass.model.spec.width, pass.model.spec.epsilon);
    let floats = 0..pass.rows * width;
    let (weights, fixed) = (&pass.model.weights, &pass.model.layout.fixed);
    let vector = |vector| weights.vector(fixed, index, vector);
    let work = &pass.model.workspace;
    let beside = work.mixed.view(floats.clone());
    let of_beside = Norm {
        stream: work.experts.view(floats.clone()),
        normed: beside.clone(),
        residual: None,
        width,
        weight: vector(Vector::FfnBesideNorm),
        bias: None,
        epsilon,
        prepare: pass.prepare(index, &[], 0),
    };
    let of_experts = Norm {
        stream: beside,
        normed: work.normed.view(floats),
        residual: Some(Residual {
            bias: None,
            norm: vector(Vector::ExpertPostNorm),
            scale: 1.0,
            sum: None,
        }),
        weight: None,
        ..of_beside.clone()
    };
    for norm in [of_beside, of_experts] {
        pass.model.backend.queue(Operation::Norm(norm))?;
    }
    Ok(())
}

/// Reads a vector of a layer, if it has one of this kind.
fn vector_of(
    pass: &mut Pass<'_, '_>,
    index: usize,
    vector: Vector,
) -> Result<Option<Vec<f32>>, Failure> {
    let model = &mut pass.model;
    let Some(range) = model.layout.fixed.vector(index, vector) else {
        return Ok(None);
    };
    let read = model.backend.read(model.weights.fixed(), range)?;
    Ok(Some(read.to_vec()))
}

/// Computes the chosen experts, first those in memory; the others are read meanwhile.
fn experts(pass: &mut Pass<'_, '_>, index: usize, choice: &Choice) -> Result<(), Failure> {
    let place = place_of_experts(pass, index)?;
    let mut left: Vec<usize> = (0..choice.experts.len()).collect();
    let mut asked: VecDeque<(usize, usize)> = VecDeque::new();
    let before = loop {
        let (weights, layout) = (&mut pass.model.weights, &pass.model.layout);
        match weights.begin_experts(layout, &mut pass.preemption)? {
            Some(before) => break before,
            None => pass.preempt(Preempt::Pause, place)?,
        }
    };
    while !left.is_empty() {
        let number = |at: usize| choice.experts.get(at).map(|chosen| chosen.expert);
        let weights = &mut pass.model.weights;
        let is_here =
            |at: usize| number(at).is_some_and(|expert| weights.has_expert(index, expert));
        let here = left.iter().position(|at| is_here(*at));
        let absent = left.iter().copied().filter(|at| !is_here(*at));
        let wanted: Vec<usize> = absent
            .filter(|at| !asked.iter().any(|(one, _)| one == at))
            .collect();
        for at in wanted {
            let expert = (index, number(at).ok_or(Failure::NoMatrix)?);
            match weights.ask_for_expert(&pass.model.layout, expert)? {
                Some(room) => asked.push_back((at, room)),
                None => break,
            }
        }
        let (at, room) = match here.map(|here| left.remove(here)) {
            Some(at) => {
                let expert = number(at).ok_or(Failure::NoMatrix)?;
                let room = weights
                    .expert_room(index, expert)
                    .ok_or(Failure::NoMatrix)?;
                (at, Room::Resident(room))
            }
            None => {
                let (at, room) = asked.pop_front().ok_or(Failure::NoMatrix)?;
                if !weights.wait_for_expert(room, &mut pass.preemption)? {
                    asked.push_front((at, room));
                    pass.preempt(Preempt::Pause, place)?;
                    continue;
                }
                if !left.contains(&at) {
                    // It has become resident meanwhile.
                    pass.model.weights.free_expert(room);
                    continue;
                }
                left.retain(|one| *one != at);
                (at, Room::Staged(room))
            }
        };
        let chosen = choice.experts.get(at).ok_or(Failure::NoMatrix)?;
        expert(pass, index, chosen, room)?;
        if let Room::Staged(room) = room {
            let expert = (index, chosen.expert);
            // A chunk uses most experts once: only an empty room is worth filling.
            let since = if pass.rows < KEPT_ROWS { before } else { 0 };
            let (backend, layout) = (pass.model.backend.as_mut(), &pass.model.layout);
            let weights = &mut pass.model.weights;
            weights.keep_expert(backend, layout, expert, (room, since))?;
        }
        if pass.rows > 1 {
            let found = pass.preemption.check_if_due();
            pass.preempt(found, place)?;
        }
    }
    Ok(())
}

/// Computes one expert for its rows.
fn expert(
    pass: &mut Pass<'_, '_>,
    index: usize,
    chosen: &Chosen,
    room: Room,
) -> Result<(), Failure> {
    let spec = pass.model.spec.experts.ok_or(Failure::NoMatrix)?;
    let (width, inner, rows) = (pass.model.spec.width, spec.inner, chosen.rows.len());
    let layer = pass.model.spec.layer(index).ok_or(Failure::NoMatrix)?;
    let mut weights = Vec::with_capacity(Role::EXPERTS.len());
    let roles = Role::EXPERTS.into_iter();
    let roles = roles.filter(|role| layer.matrix(*role).is_some());
    for (at, role) in roles.enumerate() {
        let view = pass
            .model
            .weights
            .expert(&pass.model.layout, (index, chosen.expert), room, at);
        weights.push(view.zip(matrix_of(layer, role)).ok_or(Failure::NoMatrix)?);
    }
    let (gate, up, down) = match &weights[..] {
        [gate, up, down] => (Some(gate), up, down),
        [up, down] => (None, up, down),
        _ => return Err(Failure::NoMatrix),
    };
    let bias = |vector| {
        let all = pass.model.layout.fixed.vector(index, vector)?;
        let first = all.start + chosen.expert * inner;
        Some(pass.model.weights.fixed().view(first..first + inner))
    };
    let work = &pass.model.workspace;
    let product = |(weight, matrix): &(View, &Matrix), rows: usize, out: View| Product {
        weight: weight.clone(),
        part: None,
        dtype: matrix.tensor.dtype,
        rows,
        columns: matrix.columns,
        out,
        stride: rows,
        first: 0,
    };
    let (wide, second) = (
        work.wide.view(0..rows * inner),
        work.second.view(0..rows * inner),
    );
    let input = work.mixed.view(0..rows * width);
    let gather = Gather {
        from: work.normed.view(0..pass.rows * width),
        rows: chosen.rows.as_slice().into(),
        width,
        to: input.clone(),
        prepare: pass.prepare(index, &[Role::ExpertGate, Role::ExpertUp], 0),
    };
    let products = match gate {
        Some(gate) => vec![
            product(gate, inner, wide.clone()),
            product(up, inner, second.clone()),
        ],
        None => vec![product(up, inner, wide.clone())],
    };
    let gated = Multiply {
        products: products.as_slice().into(),
        input,
        copies: work.copies(),
        rows,
        activate: Some(Activate {
            activation: pass.model.spec.activation,
            gate: wide.clone(),
            up: gate.map(|_| second),
            gate_bias: bias(Vector::ExpertGateBias),
            up_bias: bias(Vector::ExpertUpBias),
            width: inner,
            prepare: pass.prepare(index, &[Role::ExpertDown], 0),
        }),
    };
    let out = chosen.first * width..(chosen.first + rows) * width;
    let products = [product(down, width, work.experts.view(out))];
    let output = Multiply {
        products: products.as_slice().into(),
        input: wide,
        copies: work.copies(),
        rows,
        activate: None,
    };
    let began = Instant::now();
    pass.model.backend.queue(Operation::Gather(gather))?;
    pass.model.backend.queue(Operation::Multiply(gated))?;
    pass.model.backend.queue(Operation::Multiply(output))?;
    if pass.rows > 1 {
        let work = (3 * width * inner * rows) as u64;
        let backend = pass.model.backend.as_mut();
        pass.preemption
            .queued(backend, Work::Products, work, began)?;
    }
    Ok(())
}

fn place_of_experts(pass: &Pass<'_, '_>, index: usize) -> Result<Place, Failure> {
    let experts = pass.model.layout.experts.as_ref();
    let rooms = experts.and_then(|experts| experts.layers.get(index));
    Ok(Place {
        part: rooms.ok_or(Failure::NoMatrix)?.parts.start,
        piece: 0,
    })
}

fn matrix_of(layer: &LayerSpec, role: Role) -> Option<&Matrix> {
    layer.matrix(role).map(|(_, matrix)| matrix)
}

impl Weights {
    /// Prepares for the experts of a layer; returns the number of uses so far, or `None` if a plan has arrived.
    fn begin_experts(
        &mut self,
        layout: &Layout,
        preemption: &mut Preemption<'_>,
    ) -> Result<Option<u64>, Failure> {
        let (limit, experts) = self.experts_by();
        let (experts, layout) = experts
            .zip(layout.experts.as_ref())
            .ok_or(Failure::NoMatrix)?;
        let mut patience = || preemption.check() == Preempt::No;
        match experts.begin(layout, limit, &mut patience) {
            Ok(()) => Ok(Some(experts.clock())),
            Err(Missing::Stopped) if preemption.check() == Preempt::Pause => Ok(None),
            Err(Missing::Stopped) => Err(Failure::Stopped),
            Err(missing) => Err(Failure::Missing(missing)),
        }
    }

    fn has_expert(&self, layer: usize, expert: usize) -> bool {
        self.experts()
            .is_some_and(|experts| experts.has(layer, expert))
    }

    fn expert_room(&mut self, layer: usize, expert: usize) -> Option<usize> {
        self.experts_by().1?.use_room(layer, expert)
    }

    fn ask_for_expert(
        &mut self,
        layout: &Layout,
        expert: (usize, usize),
    ) -> Result<Option<usize>, Failure> {
        let source = std::sync::Arc::clone(self.source());
        let (_, experts) = self.experts_by();
        let (experts, layout) = experts
            .zip(layout.experts.as_ref())
            .ok_or(Failure::NoMatrix)?;
        experts
            .ask(&source, layout, expert)
            .map_err(Failure::Missing)
    }

    /// Waits for a room of staging; returns whether it is filled, or a plan has arrived.
    fn wait_for_expert(
        &mut self,
        room: usize,
        preemption: &mut Preemption<'_>,
    ) -> Result<bool, Failure> {
        let asked = Instant::now();
        let (limit, experts) = self.experts_by();
        let experts = experts.ok_or(Failure::NoMatrix)?;
        let mut patience = || preemption.check() == Preempt::No;
        let waited = experts.wait(room, limit, &mut patience);
        self.note_waited(asked.elapsed());
        match waited {
            Ok(()) => Ok(true),
            Err(Missing::Stopped) if preemption.check() == Preempt::Pause => Ok(false),
            Err(Missing::Stopped) => Err(Failure::Stopped),
            Err(missing) => Err(Failure::Missing(missing)),
        }
    }

    fn free_expert(&mut self, room: usize) {
        if let (_, Some(experts)) = self.experts_by() {
            experts.free(room);
        }
    }

    /// Weights of an expert for one of those of [`Role::EXPERTS`] that the layer has.
    fn expert(
        &self,
        layout: &Layout,
        (layer, expert): (usize, usize),
        room: Room,
        at: usize,
    ) -> Option<View> {
        let (experts, layout) = self.experts().zip(layout.experts.as_ref())?;
        let rooms = layout.layers.get(layer)?;
        let extent = rooms.extents.get(expert)?.get(at)?;
        let (_, offset) = rooms.places.get(at)?;
        let span = (offset + extent.lead(), extent.bytes);
        match room {
            Room::Staged(room) => Some(experts.staged(layout, room, span)),
            Room::Resident(room) => {
                let (part, number) = experts.place(layer, room)?;
                let arena = self.arena(part)?;
                Some(arena.view_bytes(number * rooms.room + span.0, span.1))
            }
        }
    }

    /// Copies an expert from a room of staging to one of its layer that was not used after `since`, if there is one, and
    /// returns the room of staging.
    fn keep_expert(
        &mut self,
        backend: &mut dyn Backend,
        layout: &Layout,
        (layer, expert): (usize, usize),
        (staged, since): (usize, u64),
    ) -> Result<(), Failure> {
        let all: &ExpertLayout = layout.experts.as_ref().ok_or(Failure::NoMatrix)?;
        let bytes = all.layers.get(layer).ok_or(Failure::NoMatrix)?.room;
        let resident: Vec<bool> = (0..layout.parts.len())
            .map(|part| self.arena(part).is_some())
            .collect();
        let is_resident = |part: usize| resident.get(part).copied().unwrap_or(false);
        let experts = self.experts_by().1.ok_or(Failure::NoMatrix)?;
        let room = experts.take_room(layer, since, is_resident);
        let place = room.and_then(|room| experts.place(layer, room));
        let from = experts.staged(all, staged, (0, bytes));
        if let Some((part, number)) = place {
            let arena = self.arena(part).ok_or(Failure::NoMatrix)?;
            let to = arena.view_bytes(number * bytes, bytes);
            backend.queue(Operation::Move {
                from: Span::Buffer(from),
                to: Span::Buffer(to),
            })?;
        }
        // The readers may fill it again once nothing queued reads it.
        let fence = backend.mark();
        backend.wait(fence)?;
        let experts = self.experts_by().1.ok_or(Failure::NoMatrix)?;
        if let Some(room) = room {
            experts.keep(layer, room, expert);
        }
        experts.free(staged);
        Ok(())
    }
}

impl Choice {
    /// Chooses by the logits of a router and the bias of each expert. The first `beside` outputs are those of the part
    /// that computes every row, which `shared` weighs if they are added to the others.
    fn of(
        (logits, bias): (&[f32], &[f32]),
        spec: &ExpertSpec,
        (beside, shared): (usize, &[f32]),
    ) -> Self {
        let rows = logits.chunks_exact(spec.count.max(1));
        let chosen: Vec<Vec<(usize, f32)>> = rows.map(|row| best_of((row, bias), spec)).collect();
        let mut experts: Vec<Chosen> = (0..spec.count)
            .map(|expert| Chosen {
                expert,
                ..Chosen::default()
            })
            .collect();
        for (row, chosen) in (0u32..).zip(&chosen) {
            for (expert, _) in chosen {
                if let Some(one) = experts.get_mut(*expert) {
                    one.rows.push(row);
                }
            }
        }
        let mut first = beside;
        for one in &mut experts {
            one.first = first;
            first += one.rows.len();
        }
        let mut terms = Vec::with_capacity(first);
        for (row, chosen) in (0u32..).zip(&chosen) {
            for (expert, weight) in chosen {
                let one = experts.get(*expert);
                let output =
                    one.and_then(|one| Some(one.first + one.rows.binary_search(&row).ok()?));
                let output = output.and_then(|output| u32::try_from(output).ok());
                terms.push((output.unwrap_or(u32::MAX), *weight));
            }
            let weight = shared.get(row as usize);
            terms.extend(weight.map(|weight| (row, *weight)));
        }
        experts.retain(|one| !one.rows.is_empty());
        Self { experts, terms }
    }

    /// Numbers of the experts whose outputs the terms are.
    fn experts_of_terms(&self) -> Vec<u32> {
        let number = |(output, _): &(u32, f32)| {
            let behind = |one: &Chosen| one.first <= *output as usize;
            let before = self.experts.partition_point(behind).saturating_sub(1);
            let expert = self.experts.get(before).map(|one| one.expert);
            expert.and_then(|expert| u32::try_from(expert).ok())
        };
        let numbers = self.terms.iter().map(number);
        numbers.map(|number| number.unwrap_or(u32::MAX)).collect()
    }

    /// Multiplies the weights by the factor of each expert's output.
    fn scale(&mut self, factors: &[f32]) {
        for one in &self.experts {
            let outputs = one.first..one.first + one.rows.len();
            let factor = factors.get(one.expert).copied().unwrap_or(1.0);
            let own = |(output, _): &&mut (u32, f32)| outputs.contains(&(*output as usize));
            let terms = self.terms.iter_mut().filter(own);
            terms.for_each(|(_, weight)| *weight *= factor);
        }
    }
}

/// The best experts of a token and their weights, by number; of equals, those with the smaller numbers.
fn best_of((logits, bias): (&[f32], &[f32]), spec: &ExpertSpec) -> Vec<(usize, f32)> {
    let powers = |logits: &[f32]| -> Vec<f32> {
        let greatest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        logits
            .iter()
            .map(|logit| (logit - greatest).exp())
            .collect()
    };
    let scores: Vec<f32> = match spec.scores {
        Scores::Logits => logits.to_vec(),
        Scores::Sigmoid => logits.iter().map(|logit| sigmoid(*logit)).collect(),
        Scores::Softmax => {
            let powers = powers(logits);
            let all: f32 = powers.iter().sum();
            powers.iter().map(|power| power / all).collect()
        }
    };
    let biased = scores.iter().zip(bias).map(|(score, bias)| score + bias);
    let mut best: Vec<(usize, f32)> = biased.enumerate().collect();
    best.sort_by(|one, other| other.1.total_cmp(&one.1).then(one.0.cmp(&other.0)));
    best.truncate(spec.used);
    best.sort_by_key(|(expert, _)| *expert);
    for (expert, weight) in &mut best {
        *weight = scores.get(*expert).copied().unwrap_or_default();
    }
    if spec.scores == Scores::Logits {
        let chosen: Vec<f32> = best.iter().map(|(_, logit)| *logit).collect();
        let weights = best.iter_mut().zip(powers(&chosen));
        weights.for_each(|((_, weight), power)| *weight = power);
    }
    let sum: f32 = best.iter().map(|(_, weight)| weight).sum();
    let sum = sum.max(WEIGHTS_LEAST);
    best.iter_mut()
        .for_each(|(_, weight)| *weight = *weight / sum * spec.scale);
    best
}

fn sigmoid(logit: f32) -> f32 {
    1.0 / (1.0 + (-logit).exp())
}

/// Least sum of the weights, as in llama.cpp (`build_moe_ffn`): 2^-14.
const WEIGHTS_LEAST: f32 = 6.103_515_6e-5;
/// Rows of a chunk from which on its experts replace no others in memory. Our choice: answers that are computed together
/// are fewer.
const KEPT_ROWS: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    const SPEC: ExpertSpec = ExpertSpec {
        count: 4,
        used: 2,
        inner: 1,
        beside: Beside::Nothing,
        dense: 0,
        scores: Scores::Softmax,
        scale: 1.0,
    };
    const NO_BIAS: [f32; 4] = [0.0; 4];

    #[test]
    fn each_row_has_its_best_experts_by_number_with_weights_that_sum_to_one() {
        let logits = [0.0, 1.0, 2.0, -1.0, 3.0, 0.0, 0.0, 3.0];
        let choice = Choice::of((&logits, &NO_BIAS), &SPEC, (0, &[]));
        let experts: Vec<(usize, &[u32])> = choice
            .experts
            .iter()
            .map(|one| (one.expert, one.rows.as_slice()))
            .collect();
        assert_eq!(experts, [(0, &[1][..]), (1, &[0]), (2, &[0]), (3, &[1])]);
        let outputs: Vec<u32> = choice.terms.iter().map(|(output, _)| *output).collect();
        assert_eq!(outputs, [1, 2, 0, 3]);
        let weights: Vec<f32> = choice.terms.iter().map(|(_, weight)| *weight).collect();
        let first = 1.0 / (1.0 + 1f32.exp());
        assert!((weights[0] - first).abs() < 1e-6, "{weights:?}");
        assert!((weights[0] + weights[1] - 1.0).abs() < 1e-6, "{weights:?}");
        assert_eq!(weights[2..], [0.5, 0.5]);
    }

    #[test]
    fn the_expert_of_every_row_comes_first_and_is_added_last() {
        let choice = Choice::of(
            (&[0.0, 1.0, 2.0, -1.0, 3.0, 0.0, 0.0, 3.0], &NO_BIAS),
            &SPEC,
            (2, &[0.25, 0.75]),
        );
        let firsts: Vec<usize> = choice.experts.iter().map(|one| one.first).collect();
        assert_eq!(firsts, [2, 3, 4, 5]);
        let outputs: Vec<u32> = choice.terms.iter().map(|(output, _)| *output).collect();
        assert_eq!(outputs, [3, 4, 0, 2, 5, 1]);
        assert_eq!((choice.terms[2].1, choice.terms[5].1), (0.25, 0.75));
    }

    #[test]
    fn a_bias_decides_the_choice_and_changes_no_weight() {
        let spec = ExpertSpec {
            scores: Scores::Sigmoid,
            ..SPEC
        };
        let best = best_of((&[0.0, 9.0, 0.0, 0.0], &[0.0, -1.0, 0.0, 0.1]), &spec);
        assert_eq!(best, [(0, 0.5), (3, 0.5)]);
        let best = best_of((&[0.0, 9.0, 0.0, 0.0], &NO_BIAS), &spec);
        assert_eq!(best[1].0, 1);
        assert!((best[1].1 - 2.0 / 3.0).abs() < 1e-3, "{best:?}");
    }

    #[test]
    fn weights_are_scaled_after_their_sum_is_one() {
        let spec = ExpertSpec { scale: 2.5, ..SPEC };
        assert_eq!(
            best_of((&[0.5; 4], &NO_BIAS), &spec),
            [(0, 1.25), (1, 1.25)]
        );
    }

    #[test]
    fn logits_decide_and_their_probabilities_among_the_chosen_are_the_weights() {
        let spec = ExpertSpec {
            scores: Scores::Logits,
            ..SPEC
        };
        let best = best_of((&[90.0, -1.0, 91.0, 2.0], &NO_BIAS), &spec);
        let first = 1.0 / (1.0 + 1f32.exp());
        assert_eq!((best[0].0, best[1].0), (0, 2));
        assert!((best[0].1 - first).abs() < 1e-6, "{best:?}");
        assert!((best[0].1 + best[1].1 - 1.0).abs() < 1e-6, "{best:?}");
        for logit in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let best = best_of((&[logit; 4], &NO_BIAS), &spec);
            assert!(best.len() == 2 && best.iter().all(|(_, weight)| weight.is_nan()));
        }
        let logits = [0.0, 1.0, 2.0, -1.0, 3.0, 0.0, 0.0, 3.0];
        let choice = Choice::of((&logits, &NO_BIAS), &spec, (0, &[]));
        assert_eq!(choice.experts_of_terms(), [1, 2, 0, 3]);
    }

    #[test]
    fn equal_experts_are_taken_by_number_and_numbers_that_are_none_choose_as_many() {
        let all = |logit: f32| best_of((&[logit; 4], &NO_BIAS), &SPEC);
        assert_eq!(all(0.5), [(0, 0.5), (1, 0.5)]);
        assert_eq!(all(f32::NAN).len(), 2);
        assert_eq!(all(f32::INFINITY).len(), 2);
        assert_eq!(all(f32::NEG_INFINITY).len(), 2);
    }
}
