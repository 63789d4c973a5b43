//! Arithmetic of a plan: resident parts, context, speed.

use std::collections::BTreeSet;

use serde::Serialize;

use super::{
    device::Device,
    rehearsal::{Rehearsal, rehearse},
};
use cotenant_engine::protocol::Inspected;
use cotenant_policy::{
    kv_type::KvType,
    params::{EngineParams, Params, ParamsError, ResidencyMode},
    residency::{EnginePlan, ModelShape, PlanLimits},
};
use cotenant_units::{Bytes, Tokens};

pub(crate) struct Stack {
    /// The settings.
    pub params: Params,
    /// Order of shedding.
    pub mode: ResidencyMode,
}

impl Stack {
    /// Returns a stack of only an LLM, with defaults.
    pub(crate) fn alone(memory: Bytes, reserve: Bytes, engine: EngineParams) -> Self {
        let params = Params::for_budget(memory, reserve, cotenant_policy::params::Scope::Machine);
        Self {
            mode: engine.mode,
            params: Params {
                engine: Some(engine),
                ..params
            },
        }
    }

    fn engine(&self) -> EngineParams {
        self.params.engine.clone().unwrap_or_default()
    }

    pub(crate) fn worker_peaks(&self) -> Bytes {
        let peaks = self.params.workers.iter().map(|worker| {
            let learned = &self.params.peaks;
            learned.expected(&worker.name, None, worker.peak, worker.steady)
        });
        peaks.fold(Bytes::ZERO, Bytes::saturating_add)
    }
}

/// Result of the computation.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Forecast {
    /// Memory of the LLM with everything resident.
    pub llm: Pieces,
    /// Floor of the LLM.
    pub floor: Bytes,
    /// Limit of the LLM while pressure is Normal: the budget minus the workers' peaks, the watermark and its
    /// hysteresis.
    pub room: Bytes,
    /// Start, peak and sheds, decided by the arbiter.
    pub rehearsal: Rehearsal,
    /// Whether the stack works.
    pub verdict: Verdict,
    /// Longest context with all layers resident; zero if they do not fit.
    pub context_resident: Tokens,
    /// Longest context with all layers streamed.
    pub context_streamed: Tokens,
    /// Forecast of each mode.
    pub modes: Vec<ModeForecast>,
}

/// Memory of the LLM, piece by piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Pieces {
    /// Layers and output head.
    pub layers: Bytes,
    /// Norms, tokenizer, header.
    pub fixed: Bytes,
    /// KV cache for the configured context.
    pub kv: Bytes,
    /// KV capacity for the states of conversations.
    pub conversations: Bytes,
    /// Recurrent state.
    pub state: Bytes,
    /// Activations of a prefill chunk, and logits.
    pub workspace: Bytes,
    /// Total.
    pub total: Bytes,
    /// Tokens of the KV cache.
    pub context: Tokens,
    /// Their type.
    pub kv_type: KvType,
}

#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ModeForecast {
    /// The mode.
    pub mode: ResidencyMode,
    /// Layers in memory.
    pub resident_layers: u32,
    /// KV capacity.
    pub context: Tokens,
    /// Memory of the LLM.
    pub bytes: Bytes,
    /// Answer tokens per second, in thousandths: minimum, expected, maximum.
    pub milli_tokens_per_s: [u64; 3],
}

/// Whether a stack works on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Verdict {
    /// Everything is resident and pressure is Normal.
    Fits,
    /// The LLM runs with reduced memory.
    Reduced,
    /// Some holder can never start.
    Impossible,
}

impl Verdict {
    /// Returns whether everything starts.
    pub(crate) const fn works(self) -> bool {
        !matches!(self, Self::Impossible)
    }
}

impl Forecast {
    pub(crate) fn new(
        device: &Device,
        stack: &Stack,
        inspected: &Inspected,
    ) -> Result<Self, ParamsError> {
        let shape = &inspected.shape;
        let engine = stack.engine();
        let limits = PlanLimits::new(&engine, Tokens::ZERO).at_speed(device.rates.speed());
        let full = shape.full_plan(&limits);
        let context = limits.kv_wanted.min(full.kv_capacity);
        let llm = Pieces::of(shape, &full, context);
        let floor = shape.plan_bytes(&shape.floor_plan(&limits));
        let pressure = &stack.params.pressure;
        let kept = [
            stack.worker_peaks(),
            pressure.elevated_below,
            pressure.hysteresis,
        ];
        let room = kept
            .into_iter()
            .fold(stack.params.budget.bytes(), Bytes::saturating_sub);
        let rehearsal = rehearse(&stack.params, Some(shape))?;
        let in_full = rehearsal.plan.as_ref().is_some_and(|plan| {
            plan.resident.len() == shape.layers.len() && plan.kv_capacity >= context
        });
        let verdict = match (&rehearsal.waiting[..], in_full) {
            ([], true) => Verdict::Fits,
            ([], false) => Verdict::Reduced,
            _ => Verdict::Impossible,
        };
        let modes = [
            ResidencyMode::Balanced,
            ResidencyMode::MaxContext,
            ResidencyMode::MaxSpeed,
        ]
        .into_iter()
        .filter_map(|mode| {
            let plan = shape.plan(room, &PlanLimits { mode, ..limits }).ok()?;
            Some(ModeForecast {
                mode,
                resident_layers: shape.resident_layers(&plan),
                context: plan.kv_capacity.min(context),
                bytes: shape.plan_bytes(&plan),
                milli_tokens_per_s: speeds(shape, &plan.resident, device),
            })
        })
        .collect();
        Ok(Self {
            llm,
            floor,
            room,
            verdict,
            context_resident: longest(shape, &full, room),
            context_streamed: longest(
                shape,
                &EnginePlan {
                    resident: BTreeSet::new(),
                    ..full
                },
                room,
            ),
            modes,
            rehearsal,
        })
    }
}

impl Pieces {
    fn of(shape: &ModelShape, plan: &EnginePlan, context: Tokens) -> Self {
        let layers = shape.weights().bytes;
        let capacity = |tokens| shape.kv.capacity_bytes(tokens, plan.kv_type);
        let kv = capacity(context);
        let conversations = capacity(plan.kv_capacity).saturating_sub(kv);
        let total = shape.plan_bytes(plan);
        let others = [
            layers,
            kv,
            conversations,
            shape.fixed_bytes,
            shape.state_bytes,
        ];
        Self {
            layers,
            fixed: shape.fixed_bytes,
            kv,
            conversations,
            state: shape.state_bytes,
            workspace: others.into_iter().fold(total, Bytes::saturating_sub),
            total,
            context,
            kv_type: plan.kv_type,
        }
    }
}

/// Returns the longest context of the model with which `plan` fits into `room`, in whole blocks.
fn longest(shape: &ModelShape, plan: &EnginePlan, room: Bytes) -> Tokens {
    let block = shape.kv.block_tokens.get().max(1);
    let fits = |blocks: u32| {
        let plan = EnginePlan {
            kv_capacity: Tokens::new(blocks.saturating_mul(block)),
            ..plan.clone()
        };
        shape.plan_bytes(&plan) <= room
    };
    let (mut least, mut most) = (0, shape.context_max.get() / block);
    while least < most {
        let middle = least + (most - least).div_ceil(2);
        if fits(middle) {
            least = middle;
        } else {
            most = middle - 1;
        }
    }
    Tokens::new(least.saturating_mul(block))
}

/// Returns answer tokens per second with these parts resident, in thousandths: minimum, expected, maximum. The ends
/// combine the disk's interval with the error of computing.
pub(crate) fn speeds(shape: &ModelShape, resident: &BTreeSet<u32>, device: &Device) -> [u64; 3] {
    let Device {
        rates, calibration, ..
    } = device;
    let expected = calibration.unwrap_or(rates.speed());
    let [slow, fast] = rates.disk_interval_mib_per_s;
    let reading = |mib_per_s: u64| {
        let ns = expected
            .read_ns_per_mib
            .saturating_mul(rates.disk_mib_per_s);
        (ns / mib_per_s.max(1)).max(1)
    };
    let computing =
        |percent: u64| (expected.compute_ns_per_mib.saturating_mul(100) / percent.max(1)).max(1);
    let least = expected
        .with_reading(reading(slow).max(expected.read_ns_per_mib))
        .with_computing(computing(100u64.saturating_sub(rates.error_percent)));
    let most = expected
        .with_reading(reading(fast).min(expected.read_ns_per_mib))
        .with_computing(computing(100 + rates.error_percent));
    let layers = device.layers.as_ref().filter(|layers| layers.are_of(shape));
    [least, expected, most].map(|by| match layers {
        Some(layers) => by.milli_tokens_per_s_by(shape, resident, &|part| layers.cost(part)),
        None => by.milli_tokens_per_s(shape, resident),
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rand::{Rng as _, SeedableRng as _};
    use rand_chacha::ChaCha8Rng;

    use super::*;
    use crate::plan::{
        calibrate::{Coefficients, LayerCosts, Setting},
        disk::{DiskRates, Mark},
    };
    use cotenant_dev::samples::sample_shape;
    use cotenant_engine::PartTime;
    use cotenant_policy::speed::Calibration;

    /// Simulated machine: 40 parts of 10 MiB, 10 ms of computing per token.
    struct Machine {
        compute_ns_per_mib: u64,
        /// Disk rates in MiB per second with durations; repeated.
        disk: Vec<(u64, Duration)>,
        now: Duration,
        /// Time of each part per MiB, in percent of the mean.
        costs: fn(u64) -> u64,
    }

    const MIB: u64 = 1 << 20;

    impl Machine {
        fn shape() -> ModelShape {
            ModelShape {
                ring_bytes: Bytes::from_mib(24),
                ..sample_shape(40, Bytes::from_mib(10))
            }
        }

        /// Returns when a read of `mib` started at `at` ends.
        fn read_by(&self, mut at: Duration, mib: u64) -> Duration {
            let round: Duration = self.disk.iter().map(|phase| phase.1).sum();
            let mut left = mib * MIB;
            loop {
                let mut into =
                    Duration::from_nanos(u64::try_from(at.as_nanos() % round.as_nanos()).unwrap());
                let phase = self.disk.iter().find(|phase| {
                    let within = into < phase.1;
                    into = into.saturating_sub(phase.1);
                    within
                });
                let (rate, _) = *phase.unwrap();
                // The rate is constant within a step of a millisecond.
                let bytes = rate * MIB / 1000;
                if bytes >= left {
                    return at + Duration::from_nanos(1_000_000 * left / bytes.max(1));
                }
                left -= bytes;
                at += Duration::from_millis(1);
            }
        }

        /// Simulates one token: a reader at most a ring ahead, and kernels that wait for it. Computed piece by piece
        /// from the times of reading and computing, independently of the prediction.
        fn token(
            &mut self,
            resident: &BTreeSet<u32>,
            jobs: &mut Vec<(Duration, Duration)>,
        ) -> Duration {
            let began = self.now;
            let ring_pieces = 24 / PIECE_MIB;
            for part in 0..40 {
                let ns = self.compute_ns_per_mib * (self.costs)(u64::from(part)) / 100;
                let compute = Duration::from_nanos(ns * PIECE_MIB);
                for _ in 0..10 / PIECE_MIB {
                    if !resident.contains(&part) {
                        let free = jobs
                            .len()
                            .checked_sub(usize::try_from(ring_pieces).unwrap());
                        let free_at = free.map_or(Duration::ZERO, |piece| jobs[piece].1);
                        let last = jobs.last().map_or(Duration::ZERO, |job| job.0);
                        let read = self.read_by(last.max(free_at), PIECE_MIB);
                        let computed = self.now.max(read) + compute;
                        jobs.push((read, computed));
                        self.now = computed;
                    } else {
                        self.now += compute;
                    }
                }
            }
            self.now - began
        }

        /// Returns tokens per second, in thousandths, of each of these tokens.
        fn answer(&mut self, resident: &BTreeSet<u32>, tokens: usize) -> Vec<u64> {
            let mut jobs = Vec::new();
            let times = (0..tokens + 2)
                .map(|_| self.token(resident, &mut jobs))
                .collect::<Vec<_>>();
            let rates = times
                .iter()
                .skip(2)
                .map(|time| u64::try_from(1_000_000_000_000 / time.as_nanos()).unwrap());
            rates.collect()
        }

        /// Returns the device as calibrated by `cotenant calibrate`.
        fn calibrated(&mut self) -> Device {
            let mut marks: Vec<Mark> = vec![(Duration::ZERO, 0)];
            let began = self.now;
            for piece in 1..2000 {
                if self.now - began > Duration::from_secs(8) {
                    break;
                }
                self.now = self.read_by(self.now, 4);
                marks.push((self.now - began, piece * 4 * MIB));
            }
            let disk = DiskRates::of(&marks);
            // Rounds that differ by some percent, like those of a real machine.
            let round = |percent: u64| Calibration {
                compute_ns_per_mib: self.compute_ns_per_mib * percent / 100,
                read_ns_per_mib: 1_000_000_000 / disk.sustained_mib_per_s,
                read_busy_ns_per_mib: 1_000_000_000 / disk.sustained_mib_per_s,
                slowed_ns_per_mib: 0,
                prefill_ns_per_mib: 0,
            };
            let rounds = [98, 100, 103, 99, 101].map(round).to_vec();
            let setting = Setting {
                processor: String::new(),
                threads: 1,
                weights: String::new(),
            };
            // Layer by layer, as measured in a round.
            let part_of = |part: u64, percent: u64| PartTime {
                bytes: Bytes::from_mib(10),
                ns_per_mib: self.compute_ns_per_mib * (self.costs)(part) / 100 * percent / 100,
            };
            let layers =
                [97, 100, 102].map(|percent| (0..40).map(|part| part_of(part, percent)).collect());
            let mut kept = Coefficients::of(rounds, disk, setting).unwrap();
            kept.layers = LayerCosts::of(&layers);
            let board = Device::boards().next().unwrap();
            Device {
                rates: kept.rates(),
                calibration: Some(kept.calibration),
                layers: kept.layers,
                ..board
            }
        }
    }

    fn machine(disk: Vec<(u64, Duration)>, costs: fn(u64) -> u64) -> Machine {
        Machine {
            compute_ns_per_mib: 25_000,
            disk,
            now: Duration::ZERO,
            costs,
        }
    }

    const PIECE_MIB: u64 = 2;

    /// Selects this many of 40 parts, spread over the depth.
    fn spread(parts: u32) -> BTreeSet<u32> {
        let mut order: Vec<u32> = (0..40).collect();
        order.sort_by_key(|part| part.reverse_bits());
        order.into_iter().take(parts as usize).collect()
    }

    #[test]
    fn a_calibrated_plan_is_within_a_tenth_of_what_is_measured_at_each_residency() {
        for rate in [300, 1000, 3000] {
            let mut machine = machine(vec![(rate, Duration::from_secs(1))], |_| 100);
            let device = machine.calibrated();
            for parts in [0, 10, 20, 30, 36, 40] {
                let resident = spread(parts);
                let [least, expected, most] = speeds(&Machine::shape(), &resident, &device);
                let measured = machine.answer(&resident, 16);
                let mean = measured.iter().sum::<u64>() / 16;
                assert!(
                    mean.abs_diff(expected) * 10 <= mean,
                    "{rate} MiB/s, {parts} of 40: {mean} measured, {expected} planned"
                );
                assert!(
                    (least..=most).contains(&mean),
                    "{rate} MiB/s, {parts} of 40: {mean} in {least} to {most}"
                );
            }
        }
    }

    #[test]
    fn layers_that_differ_are_planned_within_a_tenth_which_their_mean_is_not() {
        // The first half takes 1.6 times the mean, the second 0.4 times, and the disk is in between.
        let costs = |part| if part < 20 { 160 } else { 40 };
        let mut off = Vec::new();
        for rate in [40_000, 45_000] {
            let mut machine = machine(vec![(rate, Duration::from_secs(1))], costs);
            let device = machine.calibrated();
            let by_the_mean = Device {
                layers: None,
                ..device.clone()
            };
            for resident in
                [0, 5, 10, 15, 20, 40].map(|parts| (0..parts).collect::<BTreeSet<u32>>())
            {
                let measured = machine.answer(&resident, 16).iter().sum::<u64>() / 16;
                let [_, expected, _] = speeds(&Machine::shape(), &resident, &device);
                assert!(
                    measured.abs_diff(expected) * 10 <= measured,
                    "{rate} MiB/s, {} of 40: {measured} measured, {expected} planned",
                    resident.len()
                );
                let [_, mean, _] = speeds(&Machine::shape(), &resident, &by_the_mean);
                off.push(measured.abs_diff(mean) * 100 / measured);
            }
        }
        assert!(off.iter().any(|percent| *percent > 10), "{off:?}");
        // For another model, only the mean is known.
        let device = machine(vec![(40_000, Duration::from_secs(1))], costs).calibrated();
        let other = ModelShape {
            layers: Machine::shape().layers.into_iter().skip(1).collect(),
            ..Machine::shape()
        };
        let by_the_mean = Device {
            layers: None,
            ..device.clone()
        };
        let nothing = BTreeSet::new();
        assert_eq!(
            speeds(&other, &nothing, &device),
            speeds(&other, &nothing, &by_the_mean)
        );
    }

    #[test]
    fn the_interval_on_a_disk_that_wanders_holds_95_percent_of_the_time() {
        let mut random = ChaCha8Rng::seed_from_u64(19);
        // Two random rates, or five, each for some tenths of a second.
        let mut by_chance = |rates: &[u64]| -> Vec<(u64, Duration)> {
            let phase = |_| {
                let rate = rates[random.random_range(0..rates.len())];
                (rate, Duration::from_millis(random.random_range(50..400)))
            };
            (0..400).map(phase).collect()
        };
        let two = by_chance(&[400, 2000, 2000]);
        let five = by_chance(&[400, 700, 1000, 1500, 2000]);
        for disk in [two, five] {
            let mut machine = machine(disk, |_| 100);
            let device = machine.calibrated();
            assert!(
                device.rates.disk_interval_mib_per_s[0] * 2
                    < device.rates.disk_interval_mib_per_s[1]
            );
            for parts in [0, 10, 20, 30, 36, 40] {
                let resident = spread(parts);
                let [least, expected, most] = speeds(&Machine::shape(), &resident, &device);
                let measured = machine.answer(&resident, 400);
                // Weighted by time rather than tokens: slow ones take longer.
                let lasting = |rates: &mut dyn Iterator<Item = &u64>| {
                    rates.map(|rate| 1_000_000_000 / rate).sum::<u64>()
                };
                let within =
                    lasting(&mut measured.iter().filter(|rate| (least..=most).contains(rate)));
                let whole = lasting(&mut measured.iter());
                assert!(
                    within * 100 >= whole * 95,
                    "{parts} of 40: {within} of {whole} in {least} to {expected} to {most}"
                );
                // The forecast is useful: no wider than the disk, and a tenth at each end of reading and computing.
                assert!(most <= least * 8, "{parts} of 40: {least} to {most}");
            }
        }
    }
}
