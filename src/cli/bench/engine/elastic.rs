//! Costs and benefits of elasticity.
//!
//! Compared with a static engine; during requested sheds; with a busy neighbour; and before the weights are in memory.

use std::{
    io,
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use super::{
    report::mib,
    subject::{Bench, count, spread},
};
use crate::bench::report::median;
use cotenant_engine::{
    ApplyError, ApplyReport, Checkpoint, Flow,
    arena::{Backing, Mapping},
    model::{GROWERS, raw_read},
    reader::WeightFile,
};
use cotenant_policy::residency::EnginePlan;
use cotenant_units::{Bytes, causes::in_one_line, lock::locked};

/// Request for a plan at a time unknown to the engine, with its measurements.
struct Order {
    at: Arc<Mutex<Option<Instant>>>,
    plan: EnginePlan,
    given: Option<Instant>,
    done: Option<Result<(Duration, ApplyReport), String>>,
}

impl Order {
    fn of(plan: EnginePlan) -> Self {
        Self {
            at: Arc::default(),
            plan,
            given: None,
            done: None,
        }
    }

    /// Sends the request at some time within `most` that varies with `turn`.
    fn ring_within(&self, turn: u32, most: Duration) -> Result<thread::JoinHandle<()>, String> {
        let clock = Arc::clone(&self.at);
        let most = u32::try_from(most.as_micros()).unwrap_or(u32::MAX).max(1);
        let wait = ORDER_LEAST + Duration::from_micros(u64::from(turn.wrapping_mul(7919) % most));
        let thread = thread::Builder::new().spawn(move || {
            thread::sleep(wait);
            *locked(&clock) = Some(Instant::now());
        });
        thread.map_err(|error| no_thread(&error))
    }

    /// Withdraws a request that the engine has not seen.
    fn forget(&self) {
        locked(&self.at).take();
    }
}

impl Checkpoint for Order {
    fn poll(&mut self) -> Flow {
        match locked(&self.at).take() {
            Some(at) => {
                self.given = Some(at);
                Flow::Apply(self.plan.clone())
            }
            None => Flow::Continue,
        }
    }

    fn poll_in_layer(&mut self) -> Flow {
        self.poll()
    }

    fn applied(&mut self, result: Result<ApplyReport, ApplyError>) {
        if let Some(given) = self.given.take() {
            let done = result.map(|report| (given.elapsed(), report));
            self.done = Some(done.map_err(|error| in_one_line(&error)));
        }
    }
}

impl Bench<'_> {
    /// Measures sheds requested during decoding, and the reload of the shed memory.
    pub(super) fn sheds(&mut self) -> Result<(), String> {
        let all = self.model.plan().clone();
        let mut order = Order::of(self.fewer(&all));
        for turn in 0..self.settings.sheds {
            self.model.reset();
            let first = self.tokens(turn, 1);
            self.forward(&first)?;
            // Within the first few tokens.
            let bell = order.ring_within(turn, FEW_TOKENS)?;
            while order.done.is_none() {
                let token = self.tokens(turn + 1, 1);
                self.pass(&token, &mut order)?;
            }
            bell.join().ok();
            if let Some(done) = order.done.take() {
                let (took, report) = done?;
                let shed = report.asked.whole_mib();
                self.values
                    .time(format!("shed of {shed} MiB, from the order"), took);
                self.values
                    .part("shed: pages gone, over asked", report.freed, report.asked);
                self.values.part(
                    "shed: resident set fallen, over asked less the ring",
                    report.rss_before.saturating_sub(report.rss_after),
                    report.asked.saturating_sub(report.grown),
                );
            }
            // Regrow at once, or after a pause in which a virtual machine's host may take the shed memory.
            let rest = match turn % 10 {
                0 => Some(""),
                5 => {
                    thread::sleep(REST);
                    Some(", 3 s after the shed")
                }
                _ => None,
            };
            let report = self.change(&all)?;
            if let Some(rest) = rest {
                let raw = self.read_raw(&order.plan)?;
                let took = report.took.as_secs_f64();
                self.values.add(
                    format!("regrow over reading alone{rest}"),
                    "ratio",
                    took / raw,
                );
                let what = format!("regrow of {:.0} MiB{rest}", mib(report.grown));
                self.values.time(what, report.took);
                self.values.add("reading that alone", "ms", raw * 1e3);
                if turn % 10 == 0 {
                    let what = format!("first touch of {:.0} MiB", mib(report.grown));
                    self.values.time(what, first_touch(report.grown)?);
                }
            }
        }
        Ok(())
    }

    /// Measures sheds requested during a prompt: until the request is noticed, and until it is completed.
    pub(super) fn prompt_sheds(&mut self) -> Result<(), String> {
        let all = self.model.plan().clone();
        let mut order = Order::of(self.fewer(&all));
        let mut expected = Vec::new();
        for turn in 0..=self.settings.sheds {
            self.model.reset();
            let prompt = self.tokens(0, PROMPT_SHED_TOKENS.min(self.settings.prompt_max));
            if turn == 0 {
                // The answer without a request, and its duration.
                let started = Instant::now();
                expected = self.forward(&prompt)?.to_vec();
                self.values
                    .time("prompt without an order", started.elapsed());
                continue;
            }
            // Within the first layers of the first chunk, or of the second.
            let bell = order.ring_within(turn, FEW_LAYERS)?;
            let logits = self.pass(&prompt, &mut order)?;
            if logits[..] != expected[..] {
                return Err("a shed during a prompt changed the logits".to_owned());
            }
            bell.join().ok();
            order.forget();
            if let Some(done) = order.done.take() {
                let (took, report) = done?;
                let shed = report.asked.whole_mib();
                let what = format!("shed of {shed} MiB in a prompt, from the order");
                self.values.time(what, took);
                let unseen = took.saturating_sub(report.took);
                self.values.time("of this until the order was seen", unseen);
                self.values.part(
                    "shed in a prompt: pages gone, over asked",
                    report.freed,
                    report.asked,
                );
            }
            self.change(&all)?;
        }
        Ok(())
    }

    /// Returns a plan smaller by this amount, spread evenly, so that a shed frees the requested bytes.
    fn fewer(&self, all: &EnginePlan) -> EnginePlan {
        let parts = count(self.layout.parts.len());
        let wanted = Bytes::from_mib(self.settings.shed_mib);
        let given = |share: u32| -> Bytes {
            let resident = spread(parts, share);
            (0u32..)
                .zip(&self.model.shape().layers)
                .filter(|(index, _)| !resident.contains(index))
                .map(|(_, part)| part.resident_bytes)
                .sum()
        };
        let share = (0..100)
            .rev()
            .find(|&share| given(share) >= wanted)
            .unwrap_or(0);
        EnginePlan {
            resident: spread(parts, share),
            ..all.clone()
        }
    }

    /// Returns the seconds to read the parts missing in `plan` as growth does, into memory already touched: the median
    /// of three.
    fn read_raw(&self, plan: &EnginePlan) -> Result<f64, String> {
        let file =
            WeightFile::open(self.model.header().parts()).map_err(|error| in_one_line(&error))?;
        let parts: Vec<_> = (0u32..)
            .zip(&self.layout.parts)
            .filter(|(index, _)| !plan.resident.contains(index))
            .map(|(_, part)| part)
            .collect();
        let times: Result<Vec<f64>, String> = (0..3)
            .map(|_| raw_read(&file, &parts).map(|took| took.as_secs_f64()))
            .map(|took| took.map_err(|error| in_one_line(&error)))
            .collect();
        median(&times?).ok_or_else(|| "nothing was read".to_owned())
    }
}

fn no_thread(error: &io::Error) -> String {
    format!("cannot start a thread: {error}")
}

/// Measures how long the threads that grow the engine take to populate new memory, without reading.
fn first_touch(bytes: Bytes) -> Result<Duration, String> {
    let share = Bytes::new(bytes.get() / GROWERS as u64);
    let started = Instant::now();
    let found = thread::scope(|scope| {
        let threads: Vec<_> = (0..GROWERS)
            .map(|_| {
                thread::Builder::new()
                    .spawn_scoped(scope, move || Mapping::new(share, Backing::Now))
            })
            .collect::<io::Result<_>>()
            .map_err(|error| no_thread(&error))?;
        let found = threads.into_iter().map(|thread| {
            let mapping = thread
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            mapping.map_err(|error| in_one_line(&error))
        });
        found.collect::<Result<Vec<_>, String>>()
    })?;
    let took = started.elapsed();
    drop(found);
    Ok(took)
}

/// Tokens of the prompt during which memory is requested.
const PROMPT_SHED_TOKENS: u32 = 256;
/// Earliest time of a request, and the ranges while decoding and while reading a prompt.
const ORDER_LEAST: Duration = Duration::from_micros(500);
const FEW_TOKENS: Duration = Duration::from_millis(20);
const FEW_LAYERS: Duration = Duration::from_millis(100);
/// Pause after a shed, as labelled in the results: the free pages of a virtual machine are reported to its host after 2
/// s (`PAGE_REPORTING_DELAY` in Linux's `mm/page_reporting.c`).
const REST: Duration = Duration::from_secs(3);
