//! Calibration of computing and reading speed on this machine.

use std::time::{Duration, Instant};

use super::loaded::Model;
use crate::{error::ApplyError, preemption::Flow};
use cotenant_policy::{residency::EnginePlan, speed::Calibration};
use cotenant_units::Bytes;

/// Measures, restores the plan in force, and empties the sequence.
pub(super) fn calibrate(
    model: &mut Model,
    go_on: &mut dyn FnMut() -> bool,
) -> Result<Option<Calibration>, ApplyError> {
    let plan = model.plan.clone();
    if model.sequence.position != 0 || model.sequence.lost || plan.kv_capacity.get() < TOKENS_LEAST
    {
        return Ok(None);
    }
    let measured = measure(model, &plan, go_on);
    model.reset();
    model.apply(&plan)?;
    Ok(measured)
}

fn measure(
    model: &mut Model,
    plan: &EnginePlan,
    go_on: &mut dyn FnMut() -> bool,
) -> Option<Calibration> {
    let streams = model.streams();
    let (token, waited) = token_time(model, go_on)?;
    let computing = token.saturating_sub(waited);
    let prompt_token = prompt_token_time(model, computing, go_on)?;
    let few = if streams {
        (token, waited)
    } else {
        model
            .apply(&without(model, plan, model.shape.ring_bytes))
            .ok()?;
        token_time(model, go_on)?
    };
    let few_bytes = streamed_bytes(model);
    let alone =
        model
            .weights
            .read_alone(model.backend.as_mut(), &model.layout, READING_TIME, go_on);
    model.restart_stream();
    let (read, took) = alone?;
    let read_ns_per_mib = per_mib(took, read);
    // Bytes read during computing: all but those read while kernels waited.
    let in_computing =
        |bytes: Bytes, waited: Duration| bytes.saturating_sub(bytes_in(waited, read_ns_per_mib));
    let (read_busy_ns_per_mib, slowed_ns_per_mib) = if streams {
        // Computing was not measured alone, so `computing` already includes the slowdown by reading.
        (read_ns_per_mib, 0)
    } else {
        let wanted = bytes_in(computing.saturating_mul(2), read_ns_per_mib);
        model
            .apply(&without(model, plan, wanted.max(model.shape.ring_bytes)))
            .ok()?;
        let (token, waited) = token_time(model, go_on)?;
        let bytes = in_computing(streamed_bytes(model), waited);
        let busy = token.saturating_sub(waited);
        // Both runs show how much reading slows computing; their sum is less noisy than either.
        let lost =
            busy.saturating_sub(computing) + few.0.saturating_sub(few.1).saturating_sub(computing);
        (
            per_mib(busy, bytes).clamp(read_ns_per_mib, read_ns_per_mib.saturating_mul(BUSY_MAX)),
            per_mib(lost, bytes + in_computing(few_bytes, few.1)),
        )
    };
    let all = model.shape.weights().token;
    Some(Calibration {
        compute_ns_per_mib: per_mib(computing, all),
        read_ns_per_mib,
        read_busy_ns_per_mib,
        slowed_ns_per_mib,
        prefill_ns_per_mib: per_mib(prompt_token, all),
    })
}

/// Returns `plan` without parts of at least `wanted` bytes in total, spread evenly over the depth.
fn without(model: &Model, plan: &EnginePlan, wanted: Bytes) -> EnginePlan {
    let mut fewer = plan.clone();
    let parts = (0u32..).zip(&model.shape.layers);
    // Reading experts shows nothing of the ring.
    let parts = parts.filter(|(_, part)| part.is_streamed());
    let mut parts: Vec<(u32, Bytes)> = parts
        .map(|(index, part)| (index, part.resident_bytes))
        .collect();
    parts.sort_by_key(|(index, _)| index.reverse_bits());
    let mut given = Bytes::ZERO;
    for (index, bytes) in parts {
        if given >= wanted {
            break;
        }
        fewer.resident.remove(&index);
        given += bytes;
    }
    fewer
}

/// Bytes that the plan in force reads for each token.
fn streamed_bytes(model: &Model) -> Bytes {
    model.shape.missing(&model.plan.resident).token
}

/// Measures the time of each part per token, in the order of the parts; all parts must be resident. On a device with
/// queues, it measures queueing.
///
/// Layer boundaries are the checkpoint polls before each layer. The last layer cannot be separated from the head: it is
/// assumed to take the median time per MiB of the other layers, and the head the remainder.
///
/// Returns `None` as [`calibrate`] does, and if a part is streamed.
pub(super) fn part_times(
    model: &mut Model,
    go_on: &mut dyn FnMut() -> bool,
) -> Option<Vec<PartTime>> {
    let streams = model.streams();
    if streams
        || model.sequence.position != 0
        || model.sequence.lost
        || model.plan.kv_capacity.get() < TOKENS_LEAST
    {
        return None;
    }
    let mut passes = Vec::new();
    let begun = Instant::now();
    for turn in 0..TOKENS_MAX.min(model.plan.kv_capacity.get()) {
        let mut marks = Vec::with_capacity(model.spec.layers.len() + 1);
        let mut checkpoint = || {
            marks.push(Instant::now());
            if go_on() { Flow::Continue } else { Flow::Stop }
        };
        let result = model.forward(&[1], &mut checkpoint).map(drop);
        if result.is_err() {
            model.reset();
            return None;
        }
        marks.push(Instant::now());
        // The first pass touches memory for the first time.
        if turn > 0 && marks.len() == model.spec.layers.len() + 1 {
            passes.push(marks.windows(2).map(between).collect::<Vec<_>>());
        }
        if turn > TOKENS_MIN && begun.elapsed() > TOKENS_TIME {
            break;
        }
    }
    model.reset();
    let layers: Vec<Duration> = (0..model.spec.layers.len())
        .filter_map(|layer| middle_of(&passes, layer))
        .collect();
    (layers.len() == model.spec.layers.len()).then(|| split(model, &layers))
}

/// Converts times of layers to times of parts; the time of the last layer includes the head.
fn split(model: &Model, layers: &[Duration]) -> Vec<PartTime> {
    let parts = &model.layout.parts;
    let bytes_of = |layer: Option<usize>| -> Bytes {
        let parts = parts.iter().zip(&model.shape.layers);
        parts
            .filter(|(part, _)| part.layer == layer)
            .map(|(_, shape)| shape.token_bytes())
            .sum()
    };
    let rates = layers
        .iter()
        .enumerate()
        .map(|(layer, time)| per_mib(*time, bytes_of(Some(layer))));
    let mut rates: Vec<u64> = rates.collect();
    let last = layers.len().saturating_sub(1);
    let mut others: Vec<u64> = rates.iter().copied().take(last).collect();
    others.sort_unstable();
    if let (Some(middle), Some(rate)) = (others.get(others.len() / 2), rates.get_mut(last)) {
        *rate = *middle;
    }
    let with_head = layers.last().copied().unwrap_or_default();
    let alone = rates.get(last).map_or(0, |rate| {
        let ns = u128::from(*rate) * u128::from(bytes_of(Some(last)).get()) / u128::from(MIB.get());
        u64::try_from(ns).unwrap_or(u64::MAX)
    });
    let head = per_mib(
        with_head.saturating_sub(Duration::from_nanos(alone)),
        bytes_of(None),
    );
    let times = parts.iter().zip(&model.shape.layers);
    let times = times.map(|(part, shape)| PartTime {
        bytes: shape.token_bytes(),
        ns_per_mib: part
            .layer
            .and_then(|layer| rates.get(layer).copied())
            .unwrap_or(head),
    });
    times.collect()
}

/// Computing time per prompt token, measured on one short chunk, where it is higher than in a long one. `token` is the
/// time of an answer token.
fn prompt_token_time(
    model: &mut Model,
    token: Duration,
    go_on: &mut dyn FnMut() -> bool,
) -> Option<Duration> {
    model.reset();
    let fit = TOKENS_TIME.as_nanos() / token.as_nanos().max(1);
    let fit = u32::try_from(fit)
        .unwrap_or(u32::MAX)
        .clamp(PROMPT_MIN, PROMPT_MAX);
    let tokens = fit
        .min(model.plan.kv_capacity.get())
        .min(model.plan.prefill_chunk.get());
    let prompt = vec![1; usize::try_from(tokens).ok()?];
    let (started, waited) = (Instant::now(), model.weights.waited());
    let mut checkpoint = || if go_on() { Flow::Continue } else { Flow::Stop };
    model.forward(&prompt, &mut checkpoint).ok()?;
    let computing = started
        .elapsed()
        .saturating_sub(model.weights.waited().saturating_sub(waited));
    computing.checked_div(tokens)
}

/// Time of one token, and the part of it spent waiting for the disk: means of the middle half.
fn token_time(model: &mut Model, go_on: &mut dyn FnMut() -> bool) -> Option<(Duration, Duration)> {
    model.reset();
    let mut times = Vec::new();
    let mut begun = Instant::now();
    for turn in 0..TOKENS_MAX.min(model.plan.kv_capacity.get()) {
        let (started, waited) = (Instant::now(), model.weights.waited());
        let mut checkpoint = || if go_on() { Flow::Continue } else { Flow::Stop };
        model.forward(&[1], &mut checkpoint).ok()?;
        let times_of_it = (
            started.elapsed(),
            model.weights.waited().saturating_sub(waited),
        );
        match turn {
            // The first pass touches memory for the first time, with an empty ring.
            0 => begun = Instant::now(),
            _ => times.push(times_of_it),
        }
        if turn >= TOKENS_MIN && begun.elapsed() > TOKENS_TIME {
            break;
        }
    }
    times.sort();
    let middle = times.get(times.len() / 4..times.len() - times.len() / 4)?;
    let count = u32::try_from(middle.len())
        .ok()
        .filter(|count| *count > 0)?;
    let (tokens, waits): (Vec<Duration>, Vec<Duration>) = middle.iter().copied().unzip();
    Some((
        tokens.into_iter().sum::<Duration>() / count,
        waits.into_iter().sum::<Duration>() / count,
    ))
}

/// Time of one part of a model per token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartTime {
    /// Size of its weights.
    pub bytes: Bytes,
    /// Time per MiB, ns.
    pub ns_per_mib: u64,
}

fn between(pair: &[Instant]) -> Duration {
    match pair {
        [from, to] => to.saturating_duration_since(*from),
        _ => Duration::ZERO,
    }
}

/// Mean of the middle half of all passes' times at `place`.
fn middle_of(passes: &[Vec<Duration>], place: usize) -> Option<Duration> {
    let mut times: Vec<Duration> = passes
        .iter()
        .filter_map(|pass| pass.get(place).copied())
        .collect();
    times.sort_unstable();
    let middle = times.get(times.len() / 4..times.len() - times.len() / 4)?;
    middle
        .iter()
        .sum::<Duration>()
        .checked_div(u32::try_from(middle.len()).ok()?)
}

/// Bytes read in `time`.
fn bytes_in(time: Duration, ns_per_mib: u64) -> Bytes {
    let bytes = time.as_nanos() * u128::from(MIB.get()) / u128::from(ns_per_mib.max(1));
    Bytes::new(u64::try_from(bytes).unwrap_or(u64::MAX))
}

/// Nanoseconds per MiB.
fn per_mib(time: Duration, bytes: Bytes) -> u64 {
    let ns = time.as_nanos() * u128::from(MIB.get()) / u128::from(bytes.get().max(1));
    u64::try_from(ns).unwrap_or(u64::MAX).max(1)
}

const MIB: Bytes = Bytes::from_mib(1);
/// Tokens averaged for one figure: as many as fit [`TOKENS_TIME`], within these bounds.
const TOKENS_MIN: u32 = 3;
const TOKENS_MAX: u32 = 48;
/// KV capacity required for a calibration.
const TOKENS_LEAST: u32 = 16;
/// Time limit for the tokens of one figure: three figures stay below 3 s unless a token takes more than 200 ms.
const TOKENS_TIME: Duration = Duration::from_millis(550);
/// Length of the timed prompt: as many tokens as decode in [`TOKENS_TIME`], within these bounds.
const PROMPT_MIN: u32 = 16;
const PROMPT_MAX: u32 = 64;
/// Upper bound of the slowdown of reading while kernels compute, as a factor of the time to read alone.
const BUSY_MAX: u64 = 16;
/// Time limit for reading alone: several windows.
const READING_TIME: Duration = Duration::from_millis(700);
