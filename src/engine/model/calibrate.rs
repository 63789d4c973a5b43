//! Calibration of computing and reading speed on this machine.

use std::time::{Duration, Instant};

use super::Model;
use crate::{
    engine::{error::ApplyError, preemption::Flow},
    policy::{residency::EnginePlan, streaming::Calibration},
    units::Bytes,
};

impl Model {
    /// Measures how fast it computes and reads, alone and at the same time: about a second, or a few tokens where they
    /// take long. `go_on` is asked between layers. Leaves the plan in force as it was, and an empty sequence.
    ///
    /// When all is resident, parts that hold as much as the ring are given up meanwhile: it takes no more memory.
    ///
    /// `None` when it was broken off, or cannot be done: a sequence is under way, or the plan has no room for one.
    ///
    /// # Errors
    /// When the parts cannot be had again: they stay out, and the plan in force says so.
    pub fn calibrate(&mut self, go_on: &mut dyn FnMut() -> bool) -> Result<Option<Calibration>, ApplyError> {
        let plan = self.plan.clone();
        if self.position != 0 || self.lost || plan.kv_capacity.get() < TOKENS_LEAST {
            return Ok(None);
        }
        let measured = self.measure(&plan, go_on);
        self.reset();
        self.apply(&plan)?;
        Ok(measured)
    }

    fn measure(&mut self, plan: &EnginePlan, go_on: &mut dyn FnMut() -> bool) -> Option<Calibration> {
        let streams = plan.resident.len() < self.layout.parts.len();
        let (token, waited) = self.token_time(go_on)?;
        let computing = token.saturating_sub(waited);
        let prompt_token = self.prompt_token_time(computing, go_on)?;
        let few = if streams {
            (token, waited)
        } else {
            self.apply(&self.without(plan, self.layout.ring)).ok()?;
            self.token_time(go_on)?
        };
        let few_bytes = self.streamed_bytes();
        let alone = self.weights.read_alone(self.backend.as_mut(), &self.layout, READING_TIME, go_on);
        self.restart_stream();
        let (read, took) = alone?;
        let read_ns_per_mib = per_mib(took, read);
        // What was not read while kernels waited was read while they computed.
        let in_computing = |bytes: Bytes, waited: Duration| bytes.saturating_sub(bytes_in(waited, read_ns_per_mib));
        let (read_busy_ns_per_mib, slowed_ns_per_mib) = if streams {
            // Computing alone was not seen: what it loses to reading is inside.
            (read_ns_per_mib, 0)
        } else {
            let wanted = bytes_in(computing.saturating_mul(2), read_ns_per_mib);
            self.apply(&self.without(plan, wanted.max(self.layout.ring))).ok()?;
            let (token, waited) = self.token_time(go_on)?;
            let bytes = in_computing(self.streamed_bytes(), waited);
            let busy = token.saturating_sub(waited);
            // Each of the two shows what computing loses to reading; together they are less at the mercy of a moment.
            let lost = busy.saturating_sub(computing) + few.0.saturating_sub(few.1).saturating_sub(computing);
            (
                per_mib(busy, bytes).clamp(read_ns_per_mib, read_ns_per_mib.saturating_mul(BUSY_MAX)),
                per_mib(lost, bytes + in_computing(few_bytes, few.1)),
            )
        };
        let all: Bytes = self.layout.parts.iter().map(|part| part.arena).sum();
        Some(Calibration {
            compute_ns_per_mib: per_mib(computing, all),
            read_ns_per_mib,
            read_busy_ns_per_mib,
            slowed_ns_per_mib,
            prefill_ns_per_mib: per_mib(prompt_token, all),
        })
    }

    /// Measures what each part of the model takes of one token, in the order of the parts; all of them have to be resident. On a
    /// device that computes behind queues, times are those of queueing.
    ///
    /// Commands are taken before each layer, which tells its end from the next one's beginning. The last layer is taken to be
    /// as fast for each MiB as the middle of the others, and the head to have the rest.
    ///
    /// `None` as for [`Self::calibrate`], and where a part is streamed.
    pub fn part_times(&mut self, go_on: &mut dyn FnMut() -> bool) -> Option<Vec<PartTime>> {
        let streams = self.plan.resident.len() < self.layout.parts.len();
        if streams || self.position != 0 || self.lost || self.plan.kv_capacity.get() < TOKENS_LEAST {
            return None;
        }
        let mut passes = Vec::new();
        let begun = Instant::now();
        for turn in 0..TOKENS_MAX.min(self.plan.kv_capacity.get()) {
            let mut marks = Vec::with_capacity(self.spec.layers.len() + 1);
            let mut checkpoint = || {
                marks.push(Instant::now());
                if go_on() { Flow::Continue } else { Flow::Stop }
            };
            let result = self.forward(&[1], &mut checkpoint).map(drop);
            if result.is_err() {
                self.reset();
                return None;
            }
            marks.push(Instant::now());
            // Memory is touched for the first time in the first.
            if turn > 0 && marks.len() == self.spec.layers.len() + 1 {
                passes.push(marks.windows(2).map(between).collect::<Vec<_>>());
            }
            if turn > TOKENS_MIN && begun.elapsed() > TOKENS_TIME {
                break;
            }
        }
        self.reset();
        let layers: Vec<Duration> = (0..self.spec.layers.len()).filter_map(|layer| middle_of(&passes, layer)).collect();
        (layers.len() == self.spec.layers.len()).then(|| self.split(&layers))
    }

    /// Times of layers as those of parts; that of the last layer has the head in it.
    fn split(&self, layers: &[Duration]) -> Vec<PartTime> {
        let parts = &self.layout.parts;
        let bytes_of = |layer: Option<usize>| -> Bytes {
            parts.iter().filter(|part| part.layer == layer).map(|part| part.arena).sum()
        };
        let rates = layers.iter().enumerate().map(|(layer, time)| per_mib(*time, bytes_of(Some(layer))));
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
        let head = per_mib(with_head.saturating_sub(Duration::from_nanos(alone)), bytes_of(None));
        let times = parts.iter().map(|part| PartTime {
            bytes: part.arena,
            ns_per_mib: part.layer.and_then(|layer| rates.get(layer).copied()).unwrap_or(head),
        });
        times.collect()
    }

    /// `plan` without parts, spread through the depth, that hold at least `wanted`.
    fn without(&self, plan: &EnginePlan, wanted: Bytes) -> EnginePlan {
        let mut fewer = plan.clone();
        let mut parts: Vec<(u32, Bytes)> = (0u32..).zip(self.layout.parts.iter().map(|part| part.arena)).collect();
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
    fn streamed_bytes(&self) -> Bytes {
        let parts = self.layout.parts.iter().enumerate();
        parts.filter(|(index, _)| self.weights.arena(*index).is_none()).map(|(_, part)| part.arena).sum()
    }

    /// Time to compute one token of a prompt: of a short chunk, in which it takes rather longer than in a long one. A token of
    /// an answer takes `token`.
    fn prompt_token_time(&mut self, token: Duration, go_on: &mut dyn FnMut() -> bool) -> Option<Duration> {
        self.reset();
        let fit = TOKENS_TIME.as_nanos() / token.as_nanos().max(1);
        let fit = u32::try_from(fit).unwrap_or(u32::MAX).clamp(PROMPT_MIN, PROMPT_MAX);
        let tokens = fit.min(self.plan.kv_capacity.get()).min(self.plan.prefill_chunk.get());
        let prompt = vec![1; usize::try_from(tokens).ok()?];
        let (started, waited) = (Instant::now(), self.weights.waited());
        let mut checkpoint = || if go_on() { Flow::Continue } else { Flow::Stop };
        self.forward(&prompt, &mut checkpoint).ok()?;
        let computing = started.elapsed().saturating_sub(self.weights.waited().saturating_sub(waited));
        computing.checked_div(tokens)
    }

    /// Time of one token, and what of it was spent waiting for the disk: the mean of the middle half.
    fn token_time(&mut self, go_on: &mut dyn FnMut() -> bool) -> Option<(Duration, Duration)> {
        self.reset();
        let mut times = Vec::new();
        let mut begun = Instant::now();
        for turn in 0..TOKENS_MAX.min(self.plan.kv_capacity.get()) {
            let (started, waited) = (Instant::now(), self.weights.waited());
            let mut checkpoint = || if go_on() { Flow::Continue } else { Flow::Stop };
            self.forward(&[1], &mut checkpoint).ok()?;
            let times_of_it = (started.elapsed(), self.weights.waited().saturating_sub(waited));
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
        let count = u32::try_from(middle.len()).ok().filter(|count| *count > 0)?;
        let (tokens, waits): (Vec<Duration>, Vec<Duration>) = middle.iter().copied().unzip();
        Some((tokens.into_iter().sum::<Duration>() / count, waits.into_iter().sum::<Duration>() / count))
    }
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
    let mut times: Vec<Duration> = passes.iter().filter_map(|pass| pass.get(place).copied()).collect();
    times.sort_unstable();
    let middle = times.get(times.len() / 4..times.len() - times.len() / 4)?;
    middle.iter().sum::<Duration>().checked_div(u32::try_from(middle.len()).ok()?)
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
