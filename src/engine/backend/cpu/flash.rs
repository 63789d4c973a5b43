//! Attention of several queries over one block of keys and values.
//!
//! Keys are converted to `f32` and transposed, so that tokens are adjacent, once for all queries; so are values, unless
//! few queries read them in their cache format. Scores and weighted values are products of small tiles whose sums stay
//! in registers. Every score is one sum over the elements in order, every weighted value one sum over the tokens in
//! order, and a token not seen by a query has weight zero: so a single query has the same bits as many.

use std::ops::Range;

use super::{
    cells,
    flash_walk::{LANES, QUERIES_TOGETHER, TOKENS_MAX, Walk},
    float::{exp, sigmoid, soft_cap},
    isa::{Isa, kernel},
    kernels::Kernels,
};
use cotenant_policy::kv_type::KvType;

impl Walk<'_> {
    /// Normalises the sum; a `sink` is a score without a value, which takes weight from the others.
    pub(crate) fn finish(self, isa: Isa, sink: Option<f32>) {
        let scale = match sink {
            None => 1.0 / self.weight,
            Some(sink) => scale_beside(isa, self.max, self.weight, sink),
        };
        scale_and_gate(isa, self.sum, scale, self.gate);
    }

    /// Number of tokens from `start` to `start + count` that matter, counted from the first.
    fn reach(&self, start: usize, count: usize) -> usize {
        self.seen.end.saturating_sub(start).min(count)
    }
}

/// Scratch memory of a thread for one block.
pub(crate) struct Scratch<'memory> {
    /// Keys or values in `f32` in the order of the cache: the elements of one token adjacent.
    wide: &'memory mut [f32],
    /// Transposed keys.
    keys: &'memory mut [f32],
    /// [`TOKENS_MAX`] scores per query.
    scores: &'memory mut [f32],
}

impl<'memory> Scratch<'memory> {
    /// Elements for heads of `dim` and at most `queries` concurrent queries.
    pub(crate) const fn elements(dim: usize, queries: usize) -> usize {
        TOKENS_MAX * (2 * dim + queries)
    }

    /// In `memory` of this many elements.
    pub(crate) fn new(memory: &'memory mut [f32], dim: usize) -> Self {
        let (wide, rest) = memory.split_at_mut(TOKENS_MAX * dim);
        let (keys, scores) = rest.split_at_mut(TOKENS_MAX * dim);
        Self { wide, keys, scores }
    }
}

/// Keys and values of several tokens in their cache format, each token contiguous.
#[derive(Clone, Copy)]
pub(crate) struct Cells<'block> {
    pub(crate) kind: KvType,
    pub(crate) dim: usize,
    pub(crate) keys: &'block [u8],
    pub(crate) values: &'block [u8],
    /// Memory needed next.
    pub(crate) ahead: &'block [u8],
}

/// Processes one block of at most [`TOKENS_MAX`] tokens for all queries; their products with keys are multiplied by the
/// scale, and then capped if there is a cap.
pub(crate) fn step(
    scratch: &mut Scratch<'_>,
    isa: Isa,
    cells: Cells<'_>,
    (scale, cap): (f32, Option<f32>),
    tokens: Range<usize>,
    walks: &mut [Walk<'_>],
) {
    let (start, count) = (tokens.start, tokens.len().min(TOKENS_MAX));
    let Cells { kind, dim, .. } = cells;
    let Scratch {
        wide,
        keys: turned,
        scores,
    } = scratch;
    let (wide, turned) = (&mut wide[..count * dim], &mut turned[..TOKENS_MAX * dim]);
    ask_for(cells.values);
    match Kernels::of(isa).turn_halves {
        Some(turn) if kind == KvType::F16 && dim.is_multiple_of(LANES) => {
            let keys = cells::halves(cells.keys)
                .get(..count * dim)
                .unwrap_or_default();
            // SAFETY: the set is only chosen where the machine has it.
            unsafe { turn(keys, dim, turned) };
        }
        _ => {
            cells::widen(isa, kind, dim, cells.keys, wide);
            turn(isa, wide, dim, turned);
        }
    }
    for (walks, scores) in walks
        .chunks(QUERIES_TOGETHER)
        .zip(scores.chunks_mut(QUERIES_TOGETHER * TOKENS_MAX))
    {
        let reach = walks
            .iter()
            .map(|walk| walk.reach(start, count))
            .max()
            .unwrap_or(0);
        score(isa, walks, turned, reach, scores);
    }
    for (walk, scores) in walks.iter_mut().zip(scores.chunks_exact_mut(TOKENS_MAX)) {
        let first = walk.seen.start.saturating_sub(start);
        let end = walk.reach(start, count);
        if first >= end {
            scores.fill(0.0);
            continue;
        }
        let scale = match cap {
            Some(cap) => {
                soft_cap(isa, &mut scores[first..end], scale, cap);
                1.0
            }
            None => scale,
        };
        // Nothing was seen before the first block, and `exp` never returns zero.
        let fresh = start <= walk.seen.start;
        soften(
            isa,
            scores,
            scale,
            first,
            end,
            fresh,
            &mut walk.max,
            &mut walk.weight,
            walk.sum,
        );
    }
    ask_for(cells.ahead);
    if let (true, KvType::F16, Some((weigh, multiple))) = (
        walks.len() <= QUERIES_TOGETHER,
        kind,
        Kernels::of(isa).weigh_halves,
    ) && dim.is_multiple_of(multiple)
    {
        let reach = walks
            .iter()
            .map(|walk| walk.reach(start, count))
            .max()
            .unwrap_or(0);
        let values = cells::halves(cells.values)
            .get(..reach * dim)
            .unwrap_or_default();
        // SAFETY: the set is only chosen where the machine has it.
        unsafe { weigh(walks, values, scores) };
        return;
    }
    cells::widen(isa, kind, dim, cells.values, wide);
    for (walks, scores) in walks
        .chunks_mut(QUERIES_TOGETHER)
        .zip(scores.chunks(QUERIES_TOGETHER * TOKENS_MAX))
    {
        let reach = walks
            .iter()
            .map(|walk| walk.reach(start, count))
            .max()
            .unwrap_or(0);
        weigh(isa, walks, &wide[..reach * dim], scores);
    }
}

/// Prefetches memory: blocks are scattered, and the hardware prefetcher neither crosses pages nor follows transposed
/// rows. One line at a time: a plain loop over addresses would issue one prefetch per cycle, most of which are dropped
/// (9 instead of 17 GB/s from one core of Zen 5).
fn ask_for(bytes: &[u8]) {
    for line in bytes.chunks(64) {
        // SAFETY: an instruction of every machine of the target, which may refer to unmapped memory.
        unsafe {
            #[cfg(target_arch = "x86_64")]
            std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(
                line.as_ptr().cast(),
            );
            #[cfg(target_arch = "aarch64")]
            std::arch::asm!("prfm pldl2keep, [{}]", in(reg) line.as_ptr(), options(nostack, readonly, preserves_flags));
        }
    }
}

/// Transposes tokens of `dim` elements each into the layout of [`place`](super::flash_walk::place); missing tokens, up
/// to a multiple of [`LANES`], become zero.
fn turn(isa: Isa, wide: &[f32], dim: usize, turned: &mut [f32]) {
    match Kernels::of(isa).turn {
        // SAFETY: the set is only chosen where the machine has it.
        Some(turn) if dim.is_multiple_of(LANES) => unsafe { turn(wide, dim, turned) },
        _ => turn_plain(isa, wide, dim, turned),
    }
}

/// Products of all queries with the first `reach` keys.
fn score(isa: Isa, walks: &[Walk<'_>], keys: &[f32], reach: usize, scores: &mut [f32]) {
    if let Some(score) = Kernels::of(isa).score {
        // SAFETY: the set is only chosen where the machine has it.
        unsafe { score(walks, keys, reach, scores) };
        return;
    }
    for (walk, scores) in walks.iter().zip(scores.chunks_exact_mut(TOKENS_MAX)) {
        score_plain(isa, walk.query, keys, reach, scores);
    }
}

/// Adds the weighted values of the tokens in `values` to the sum of each query.
fn weigh(isa: Isa, walks: &mut [Walk<'_>], values: &[f32], scores: &[f32]) {
    if let Some((weigh, multiple)) = Kernels::of(isa).weigh
        && walks
            .iter()
            .all(|walk| walk.sum.len().is_multiple_of(multiple))
    {
        // SAFETY: the set is only chosen where the machine has it.
        unsafe { weigh(walks, values, scores) };
        return;
    }
    for (walk, scores) in walks.iter_mut().zip(scores.chunks_exact(TOKENS_MAX)) {
        weigh_plain(isa, walk.sum, values, scores);
    }
}

kernel! {
    /// See [`turn`].
    pub(crate) fn turn_plain(wide: &[f32], dim: usize, turned: &mut [f32]) {
        let groups = (wide.len() / dim).div_ceil(LANES);
        for (group, group_of) in turned.chunks_exact_mut(LANES * dim).take(groups).enumerate() {
            for (element, row) in group_of.chunks_exact_mut(LANES).enumerate() {
                for (token, out) in (group * LANES..).zip(row) {
                    *out = wide.get(token * dim + element).copied().unwrap_or(0.0);
                }
            }
        }
    }

    /// See [`score`].
    pub(crate) fn score_plain(query: &[f32], keys: &[f32], reach: usize, scores: &mut [f32]) {
        let groups = keys.chunks_exact(LANES * query.len()).take(reach.div_ceil(LANES));
        for (keys, scores) in groups.zip(scores.chunks_exact_mut(LANES)) {
            let mut sums = [0f32; LANES];
            for (x, row) in query.iter().zip(keys.chunks_exact(LANES)) {
                for lane in 0..LANES {
                    sums[lane] = row[lane].mul_add(*x, sums[lane]);
                }
            }
            scores.copy_from_slice(&sums);
        }
    }

    /// See [`weigh`].
    pub(crate) fn weigh_plain(sum: &mut [f32], values: &[f32], weights: &[f32]) {
        let dim = sum.len();
        for (sums, from) in sum.chunks_mut(LANES).zip((0..dim).step_by(LANES)) {
            let mut lanes = [0f32; LANES];
            lanes[..sums.len()].copy_from_slice(sums);
            for (value, weight) in values.chunks_exact(dim).zip(weights) {
                for (lane, x) in lanes.iter_mut().zip(&value[from..][..sums.len()]) {
                    *lane = x.mul_add(*weight, *lane);
                }
            }
            sums.copy_from_slice(&lanes[..sums.len()]);
        }
    }

    /// Converts scores to weights: for the tokens from `first` to `end` of a block relative to the largest score so
    /// far, for all others zero. Rescales `weight` and `sum` to the new largest score.
    pub(crate) fn soften(
        scores: &mut [f32],
        scale: f32,
        first: usize,
        end: usize,
        fresh: bool,
        max: &mut f32,
        weight: &mut f32,
        sum: &mut [f32],
    ) {
        scores[..first].fill(f32::NEG_INFINITY);
        scores[end..].fill(f32::NEG_INFINITY);
        let mut largest = [f32::NEG_INFINITY; LANES];
        for scores in scores.chunks_exact_mut(LANES) {
            for lane in 0..LANES {
                scores[lane] *= scale;
                // Not `max`, which is not a single instruction.
                largest[lane] = if scores[lane] > largest[lane] { scores[lane] } else { largest[lane] };
            }
        }
        let mut width = LANES / 2;
        while width > 0 {
            for lane in 0..width {
                largest[lane] = largest[lane].max(largest[lane + width]);
            }
            width /= 2;
        }
        let new = max.max(largest[0]);
        let mut shrink = if fresh { 0.0 } else { 1.0 };
        if new > *max {
            shrink *= exp(*max - new);
            for value in sum.iter_mut() {
                *value *= shrink;
            }
            *max = new;
        }
        for score in scores.iter_mut() {
            *score = exp(*score - new);
        }
        scores[..first].fill(0.0);
        scores[end..].fill(0.0);
        let mut totals = [0f32; LANES];
        for scores in scores.chunks_exact(LANES) {
            for lane in 0..LANES {
                totals[lane] += scores[lane];
            }
        }
        let mut width = LANES / 2;
        while width > 0 {
            for lane in 0..width {
                totals[lane] += totals[lane + width];
            }
            width /= 2;
        }
        *weight = weight.mul_add(shrink, totals[0]);
    }

    /// Factor of the sum of a head whose scores are at most `max`, with a further score that has no value.
    pub(crate) fn scale_beside(max: f32, weight: f32, sink: f32) -> f32 {
        let greatest = if sink > max { sink } else { max };
        let shrink = exp(max - greatest);
        shrink / weight.mul_add(shrink, exp(sink - greatest))
    }

    /// The last step of one head: normalises weights to a sum of one, and applies the output gate if present.
    pub(crate) fn scale_and_gate(sum: &mut [f32], scale: f32, gate: &[f32]) {
        for value in sum.iter_mut() {
            *value *= scale;
        }
        for (value, gate) in sum.iter_mut().zip(gate) {
            *value *= sigmoid(*gate);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::test_numbers::numbers, *};

    /// Rows in their cache format, and the values read from it.
    fn kept(kind: KvType, dim: usize, rows: &[f32]) -> (Vec<u8>, Vec<f32>) {
        let row_bytes = cells::row_bytes(kind, dim);
        let (mut bytes, mut read) = (vec![0; rows.len() / dim * row_bytes], vec![0.0; rows.len()]);
        for (row, bytes) in rows
            .chunks_exact(dim)
            .zip(bytes.chunks_exact_mut(row_bytes))
        {
            cells::store(Isa::Baseline, kind, row, None, bytes);
        }
        cells::widen(Isa::Baseline, kind, dim, &bytes, &mut read);
        (bytes, read)
    }

    /// Attention of the queries with the given indices, each of which sees the tokens up to its own, at most `window`.
    fn attend(
        isa: Isa,
        kind: KvType,
        dim: usize,
        total: usize,
        (window, cap): (usize, Option<f32>),
        which: Range<usize>,
    ) -> Vec<Vec<f32>> {
        let queries = numbers(total * dim, 1);
        let [keys, values] = [2, 3].map(|seed| kept(kind, dim, &numbers(total * dim, seed)).0);
        let mut outs = vec![vec![0.0; dim]; which.len()];
        let end = which.end;
        let mut walks: Vec<Walk<'_>> = which
            .zip(&mut outs)
            .map(|(row, out)| {
                let seen = (row + 1).saturating_sub(window)..row + 1;
                Walk::new(&queries[row * dim..][..dim], &[], seen, out)
            })
            .collect();
        let mut memory = vec![f32::NAN; Scratch::elements(dim, walks.len())];
        let mut scratch = Scratch::new(&mut memory, dim);
        for start in (0..end).step_by(TOKENS_MAX) {
            let tokens = start..end.min(start + TOKENS_MAX);
            let row_bytes = cells::row_bytes(kind, dim);
            let bytes = start * row_bytes..tokens.end * row_bytes;
            let cells = Cells {
                kind,
                dim,
                keys: &keys[bytes.clone()],
                values: &values[bytes],
                ahead: &[],
            };
            step(&mut scratch, isa, cells, (0.5, cap), tokens, &mut walks);
        }
        for walk in walks {
            walk.finish(isa, None);
        }
        outs
    }

    /// The plain formula in `f64`.
    fn expected(
        kind: KvType,
        dim: usize,
        total: usize,
        (window, cap): (usize, Option<f32>),
        row: usize,
    ) -> Vec<f64> {
        let queries = numbers(total * dim, 1);
        let [keys, values] = [2, 3].map(|seed| kept(kind, dim, &numbers(total * dim, seed)).1);
        let seen = (row + 1).saturating_sub(window)..row + 1;
        let weights: Vec<f64> = seen
            .clone()
            .map(|token| {
                let dot: f64 = (0..dim)
                    .map(|at| {
                        f64::from(queries[row * dim + at]) * f64::from(keys[token * dim + at])
                    })
                    .sum();
                let cap = cap.map(f64::from);
                cap.map_or(0.5 * dot, |cap| cap * (0.5 * dot / cap).tanh())
                    .exp()
            })
            .collect();
        let total: f64 = weights.iter().sum();
        (0..dim)
            .map(|at| {
                let sum: f64 = seen
                    .clone()
                    .zip(&weights)
                    .map(|(token, weight)| weight * f64::from(values[token * dim + at]))
                    .sum();
                sum / total
            })
            .collect()
    }

    #[test]
    fn attention_is_the_formula_for_any_set_of_instructions_and_any_number_of_queries() {
        for (kind, dim, window, cap) in [
            (KvType::F16, 8, usize::MAX, None),
            (KvType::F16, 24, 70, None),
            (KvType::F16, 64, 5, None),
            (KvType::F16, 80, usize::MAX, Some(0.5)),
            (KvType::F16, 128, 64, None),
            (KvType::F16, 256, usize::MAX, None),
            (KvType::F16, 256, 70, Some(2.0)),
            (KvType::Q8, 64, 100, None),
        ] {
            let (total, window) = (150, (window, cap));
            let reference = attend(Isa::Baseline, kind, dim, total, window, 0..total);
            for (row, out) in reference.iter().enumerate() {
                for (got, right) in out.iter().zip(expected(kind, dim, total, window, row)) {
                    assert!(
                        (f64::from(*got) - right).abs() < 2e-5,
                        "{kind} {dim} {cap:?} {row}: {got} {right}"
                    );
                }
            }
            for &isa in Isa::available() {
                for which in [0..total, 0..1, 63..65, 100..101, 64..128, 140..150, 3..8] {
                    let got = attend(isa, kind, dim, total, window, which.clone());
                    assert_eq!(
                        got,
                        reference[which.clone()],
                        "{isa:?} {kind} {dim} {which:?}"
                    );
                }
            }
        }
    }
}
