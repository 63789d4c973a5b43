//! Calibration of computing and reading speed on this machine.

use std::time::{Duration, Instant};

use super::loaded::Model;
use crate::{error::ApplyError, preemption::Flow};
use cotenant_policy::{residency::EnginePlan, streaming::Calibration};
use cotenant_units::Bytes;

/// Measures, puts the plan in force back, and empties the sequence.
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
    // What was not read while kernels waited was read while they computed.
    let in_computing =
        |bytes: Bytes, waited: Duration| bytes.saturating_sub(bytes_in(waited, read_ns_per_mib));
    let (read_busy_ns_per_mib, slowed_ns_per_mib) = if streams {
        // Computing alone was not seen: what it loses to reading is inside.
        (read_ns_per_mib, 0)
    } else {
        let wanted = bytes_in(computing.saturating_mul(2), read_ns_per_mib);
        model
            .apply(&without(model, plan, wanted.max(model.shape.ring_bytes)))
            .ok()?;
        let (token, waited) = token_time(model, go_on)?;
        let bytes = in_computing(streamed_bytes(model), waited);
        let busy = token.saturating_sub(waited);
        // Each of the two shows what computing loses to reading; together they are less at the mercy of a moment.
        let lost =
            busy.saturating_sub(computing) + few.0.saturating_sub(few.1).saturating_sub(computing);
        (
            per_mib(busy, bytes).clamp(read_ns_per_mib, read_ns_per_mib.saturating_mul(BUSY_MAX)),
            per_mib(lost, bytes + in_computing(few_bytes, few.1)),
        )
    };
    let all: Bytes = model.layout.parts.iter().map(|part| part.arena).sum();
    Some(Calibration {
        compute_ns_per_mib: per_mib(computing, all),
        read_ns_per_mib,
        read_busy_ns_per_mib,
        slowed_ns_per_mib,
        prefill_ns_per_mib: per_mib(prompt_token, all),
    })
}

/// `plan` without parts, spread through the depth, that hold at least `wanted`.
fn without(model: &Model, plan: &EnginePlan, wanted: Bytes) -> EnginePlan {
    let mut fewer = plan.clone();
    let mut parts: Vec<(u32, Bytes)> = (0u32..)
        .zip(model.layout.parts.iter().map(|part| part.arena))
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

/// What the plan in force reads for each token.
fn streamed_bytes(model: &Model) -> Bytes {
    let parts = model.layout.parts.iter().enumerate();
    parts
        .filter(|(index, _)| model.weights.arena(*index).is_none())
        .map(|(_, part)| part.arena)
        .sum()
}

/// Measures what each part of the model takes of one token, in the order of the parts; all of them have to be resident. On a
/// device that computes behind queues, times are those of queueing.
///
/// Commands are taken before each layer, which tells its end from the next one's beginning. The last layer is taken to be
/// as fast for each MiB as the middle of the others, and the head to have the rest.
///
/// `None` as for [`calibrate`], and where a part is streamed.
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
        // Memory is touched for the first time in the first.
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

/// Times of layers as those of parts; that of the last layer has the head in it.
fn split(model: &Model, layers: &[Duration]) -> Vec<PartTime> {
    let parts = &model.layout.parts;
    let bytes_of = |layer: Option<usize>| -> Bytes {
        parts
            .iter()
            .filter(|part| part.layer == layer)
            .map(|part| part.arena)
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
    let times = parts.iter().map(|part| PartTime {
        bytes: part.arena,
        ns_per_mib: part
            .layer
            .and_then(|layer| rates.get(layer).copied())
            .unwrap_or(head),
    });
    times.collect()
}

/// Time to compute one token of a prompt: of a short chunk, in which it takes rather longer than in a long one. A token of
/// an answer takes `token`.
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

/// Time of one token, and what of it was spent waiting for the disk: the mean of the middle half.
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
            // Memory is touched for the first time, and the ring is empty.
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

/// What one part of a model takes of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartTime {
    /// Its weights.
    pub bytes: Bytes,
    /// Time for each MiB of them, ns.
    pub ns_per_mib: u64,
}

fn between(pair: &[Instant]) -> Duration {
    match pair {
        [from, to] => to.saturating_duration_since(*from),
        _ => Duration::ZERO,
    }
}

/// The mean of the middle half of what passes have at this place.
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

/// Bytes in `time`.
fn bytes_in(time: Duration, ns_per_mib: u64) -> Bytes {
    let bytes = time.as_nanos() * u128::from(MIB.get()) / u128::from(ns_per_mib.max(1));
    Bytes::new(u64::try_from(bytes).unwrap_or(u64::MAX))
}

/// Nanoseconds for each MiB of `bytes`.
fn per_mib(time: Duration, bytes: Bytes) -> u64 {
    let ns = time.as_nanos() * u128::from(MIB.get()) / u128::from(bytes.get().max(1));
    u64::try_from(ns).unwrap_or(u64::MAX).max(1)
}

const MIB: Bytes = Bytes::from_mib(1);
/// Tokens that a figure is taken over: as many as fit the time, within these.
const TOKENS_MIN: u32 = 3;
const TOKENS_MAX: u32 = 48;
/// Room for so many has to be there.
const TOKENS_LEAST: u32 = 16;
/// Time for the tokens of one figure: three figures stay below 3 s unless a token takes more than 200 ms.
const TOKENS_TIME: Duration = Duration::from_millis(550);
/// Tokens of the prompt that is timed: as many as would fit that time one by one, within these.
const PROMPT_MIN: u32 = 16;
const PROMPT_MAX: u32 = 64;
/// Reading is taken to be no slower than so many times its own estimator while kernels compute.
const BUSY_MAX: u64 = 16;
/// Time for reading alone: several windows of it.
const READING_TIME: Duration = Duration::from_millis(700);
