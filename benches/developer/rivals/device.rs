//! Device model for every policy: the cost of memory, loads and tokens, in steps of 20 ms.
//!
//! * A budget of 15 656 MiB less a baseline (Orin NX 16 GB, `free -m`).
//! * Loads run at 2.5 GB/s in total (NVMe on that board: 2 to 3 GB/s claimed); each byte that a holder acquires after
//!   the start counts as reloaded, KV cache included.
//! * Memory is released at 20 GiB/s: 2–3 ms for 125–150 MiB of layers are measured by `developer engine`.
//! * A neighbour grows and shrinks at 500 MiB/s.
//! * A token takes 80 ms with all layers in memory (4.9 GB of weights at the 60 GB/s measured for its GPU); each
//!   missing layer is read per token, at the rate of loads, in parallel with the computation: the slower of both
//!   counts. Loads do not slow tokens.
//! * A request without room proceeds anyway: excess use is counted as an over-commit, and no program is killed for it.
//!   On a board it would end in swap or in the OOM killer, so a policy that over-commits does better here than there.
//! * An answer is given the time that it takes with everything in memory; tokens not written by then are lost. A
//!   request that waits for its model can be served until then; a running request whose model is unloaded is lost, and
//!   counted as aborted.

use std::time::Duration;

use serde::Serialize;

use super::rules::Kind;
use super::trace::{Happening, Model, TOKEN_US, TOTAL_MIB, Trace, WARM_MS};
use cotenant::units::{Bytes, Timestamp};

pub(super) const STEP_MS: u64 = 20;
const LOAD_PER_STEP: Bytes = Bytes::new(2_500_000 * STEP_MS);
const RELEASE_PER_STEP: Bytes = Bytes::new((20 << 30) / 1000 * STEP_MS);
const NEIGHBOUR_PER_STEP: Bytes = Bytes::from_mib(500 * STEP_MS / 1000);
const LISTEN_DEADLINE_MS: u64 = 300;
const SAY_DEADLINE_MS: u64 = 1000;

/// Load time of `bytes`.
pub(super) fn load_time(bytes: Bytes) -> Duration {
    Duration::from_millis(bytes.get() / LOAD_PER_STEP.get() * STEP_MS)
}

/// Counted results.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Score {
    /// Requests of ASR and TTS.
    pub(super) audio: u64,
    /// Of these, not started in time, or aborted.
    pub(super) missed: u64,
    /// Of all, those that arrived while ASR and TTS did not fit beside the neighbour even without the LLM.
    pub(super) infeasible: u64,
    /// Times that use exceeded the budget, although unloading everything would have avoided it.
    pub(super) over_commits: u64,
    /// Bytes acquired after the start.
    pub(super) reloaded: Bytes,
    /// Bytes of layers read for single use.
    pub(super) streamed: Bytes,
    /// Requested tokens.
    pub(super) tokens: u64,
    /// Of these, not written within the time that they take with everything in memory.
    pub(super) tokens_lost: u64,
    /// Answers aborted, or without a token.
    pub(super) aborted: u64,
}

impl Score {
    pub(super) fn add(&mut self, other: &Self) {
        self.audio += other.audio;
        self.missed += other.missed;
        self.infeasible += other.infeasible;
        self.over_commits += other.over_commits;
        self.reloaded += other.reloaded;
        self.streamed += other.streamed;
        self.tokens += other.tokens;
        self.tokens_lost += other.tokens_lost;
        self.aborted += other.aborted;
    }
}

/// Memory that grows and shrinks at a rate.
#[derive(Clone, Debug)]
pub(super) struct Holder {
    pub(super) model: Model,
    /// In use.
    pub(super) used: Bytes,
    /// Its final use.
    pub(super) target: Bytes,
    pub(super) ready: bool,
    /// Its use once it is ready.
    pub(super) steady: Bytes,
    /// Bytes of layers to read per token.
    pub(super) streams: Bytes,
    pub(super) used_at: Timestamp,
}

/// Needs of a request.
#[derive(Clone, Copy, Debug)]
pub(super) enum Work {
    Audio { extra: Bytes, lasts_ms: u64 },
    Answer { tokens: u64, millionths: u64 },
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Job {
    pub(super) number: u64,
    /// Index of its model.
    pub(super) holder: usize,
    pub(super) work: Work,
    /// Latest start, or end of an answer.
    pub(super) until: Timestamp,
    pub(super) began: Option<Timestamp>,
}

pub(super) struct Device<'a> {
    pub(super) now: Timestamp,
    pub(super) total: Bytes,
    pub(super) baseline: Bytes,
    pub(super) holders: Vec<Holder>,
    pub(super) jobs: Vec<Job>,
    /// Models that died in this step.
    pub(super) died: Vec<usize>,
    pub(super) score: Score,
    neighbour: (Bytes, Bytes),
    trace: &'a Trace,
    next: usize,
    over: bool,
    numbers: u64,
}

impl<'a> Device<'a> {
    pub(super) fn new(trace: &'a Trace) -> Self {
        let holders = trace.models.iter().map(|model| Holder {
            model: *model,
            used: Bytes::ZERO,
            target: Bytes::ZERO,
            ready: false,
            steady: Bytes::from_mib(model.steady_mib),
            streams: Bytes::ZERO,
            used_at: Timestamp::START,
        });
        Self {
            now: Timestamp::START,
            total: Bytes::from_mib(TOTAL_MIB),
            baseline: Bytes::from_mib(trace.baseline_mib),
            holders: holders.collect(),
            jobs: Vec::new(),
            died: Vec::new(),
            score: Score::default(),
            neighbour: (Bytes::ZERO, Bytes::ZERO),
            trace,
            next: 0,
            over: false,
            numbers: 0,
        }
    }

    pub(super) const fn ended(&self) -> bool {
        self.now.as_micros() >= self.trace.ends_ms * 1000
    }

    pub(super) const fn budget(&self) -> Bytes {
        self.total.saturating_sub(self.baseline)
    }

    /// Use on the whole machine.
    pub(super) fn used(&self) -> Bytes {
        let holders: Bytes = self.holders.iter().map(|holder| holder.used).sum();
        self.baseline + holders + self.extras() + self.neighbour.0
    }

    /// Use by running requests besides their models.
    pub(super) fn extras(&self) -> Bytes {
        self.jobs
            .iter()
            .filter(|job| job.began.is_some())
            .map(Job::extra)
            .sum()
    }

    pub(super) fn is_busy(&self, index: usize) -> bool {
        self.jobs
            .iter()
            .any(|job| job.holder == index && job.began.is_some())
    }

    pub(super) fn begin(&mut self, number: u64) {
        let now = self.now;
        if let Some(job) = self.jobs.iter_mut().find(|job| job.number == number) {
            job.began = Some(now);
            if let Some(holder) = self.holders.get_mut(job.holder) {
                holder.used_at = now;
            }
        }
    }

    pub(super) fn load(&mut self, index: usize) {
        let now = self.now;
        if let Some(holder) = self.holders.get_mut(index) {
            holder.target = Bytes::from_mib(holder.model.peak_mib).max(holder.steady);
            holder.used_at = now;
        }
    }

    /// Releases its memory; its running work is lost.
    pub(super) fn unload(&mut self, index: usize) {
        if let Some(holder) = self.holders.get_mut(index) {
            holder.target = Bytes::ZERO;
            holder.ready = false;
        }
        self.cut_off(index);
    }

    /// Whether its memory has reached its target.
    pub(super) fn is_settled(&self, index: usize) -> bool {
        self.holders
            .get(index)
            .is_none_or(|holder| holder.used == holder.target)
    }

    /// Advances one step: happenings, then memory, then work, then the count.
    pub(super) fn step(&mut self) {
        self.now = self.now + Duration::from_millis(STEP_MS);
        self.died.clear();
        while let Some((at, happening)) = self.trace.happenings.get(self.next)
            && *at * 1000 <= self.now.as_micros()
        {
            self.next += 1;
            self.happen(*happening);
        }
        self.move_memory();
        self.work();
        self.count();
    }

    fn happen(&mut self, happening: Happening) {
        let find = |holders: &[Holder], name: &str| {
            holders.iter().position(|holder| holder.model.name == name)
        };
        match happening {
            Happening::Listen {
                extra_mib,
                lasts_ms,
            } => {
                self.audio(
                    Kind::Asr,
                    Bytes::from_mib(extra_mib),
                    lasts_ms,
                    LISTEN_DEADLINE_MS,
                );
            }
            Happening::Say { lasts_ms } => {
                self.audio(Kind::Tts, Bytes::ZERO, lasts_ms, SAY_DEADLINE_MS);
            }
            Happening::Answer { model, tokens } => {
                if let Some(holder) = find(&self.holders, model) {
                    self.score.tokens += tokens;
                    let work = Work::Answer {
                        tokens,
                        millionths: 0,
                    };
                    // Tolerance for the rounding of steps.
                    self.job(holder, work, tokens * TOKEN_US / 1000 + 2 * STEP_MS);
                }
            }
            Happening::Neighbour { mib } => self.neighbour.1 = Bytes::from_mib(mib),
            Happening::Dies { model } => {
                let Some(index) = find(&self.holders, model) else {
                    return;
                };
                self.unload(index);
                if let Some(holder) = self.holders.get_mut(index) {
                    holder.used = Bytes::ZERO;
                }
                self.died.push(index);
            }
            Happening::Grows { model, mib } => {
                let holder = self
                    .holders
                    .iter_mut()
                    .find(|holder| holder.model.name == model);
                if let Some(holder) = holder {
                    holder.steady += Bytes::from_mib(mib);
                    if holder.ready {
                        holder.target = holder.steady;
                    }
                }
            }
        }
    }

    fn audio(&mut self, kind: Kind, extra: Bytes, lasts_ms: u64, within_ms: u64) {
        if let Some(holder) = self
            .holders
            .iter()
            .position(|holder| holder.model.kind == kind)
        {
            self.score.audio += 1;
            let audio = self
                .holders
                .iter()
                .filter(|holder| holder.model.kind != Kind::Llm);
            let needs = audio.map(|holder| holder.steady).sum::<Bytes>() + extra + self.extras();
            self.score.infeasible +=
                u64::from(self.baseline + self.neighbour.0 + needs > self.total);
            self.job(holder, Work::Audio { extra, lasts_ms }, within_ms);
        }
    }

    fn job(&mut self, holder: usize, work: Work, within_ms: u64) {
        self.numbers += 1;
        self.jobs.push(Job {
            number: self.numbers,
            holder,
            work,
            until: self.now + Duration::from_millis(within_ms),
            began: None,
        });
    }

    fn move_memory(&mut self) {
        let warm = self.now.as_micros() >= WARM_MS * 1000;
        let mut left = LOAD_PER_STEP;
        for holder in &mut self.holders {
            if holder.used < holder.target {
                let step = left.min(holder.target - holder.used);
                left -= step;
                holder.used += step;
                if warm {
                    self.score.reloaded += step;
                }
            } else {
                holder.used = holder
                    .used
                    .saturating_sub(RELEASE_PER_STEP)
                    .max(holder.target);
            }
        }
        let (used, target) = self.neighbour;
        self.neighbour.0 = if used < target {
            (used + NEIGHBOUR_PER_STEP).min(target)
        } else {
            used.saturating_sub(NEIGHBOUR_PER_STEP).max(target)
        };
    }

    fn work(&mut self) {
        let (now, holders, score) = (self.now, &mut self.holders, &mut self.score);
        self.jobs.retain_mut(|job| {
            let Some(holder) = holders.get_mut(job.holder) else {
                return false;
            };
            match (&mut job.work, job.began) {
                (Work::Audio { .. }, None) if now > job.until => {
                    score.missed += 1;
                    return false;
                }
                (Work::Audio { lasts_ms, .. }, Some(began)) => {
                    holder.used_at = now;
                    return now.saturating_since(began) < Duration::from_millis(*lasts_ms);
                }
                (Work::Answer { millionths, tokens }, Some(_)) => {
                    holder.used_at = now;
                    let read_us =
                        holder.streams.get() / (LOAD_PER_STEP.get() / (STEP_MS * 1000)).max(1);
                    let done = (STEP_MS * 1_000_000_000 / TOKEN_US.max(read_us))
                        .min(*tokens * 1_000_000 - *millionths);
                    *millionths += done;
                    score.streamed += Bytes::new(holder.streams.get() / 1000 * (done / 1000));
                    if *millionths >= *tokens * 1_000_000 {
                        return false;
                    }
                }
                _ => {}
            }
            if let Work::Answer { tokens, millionths } = job.work
                && now >= job.until
            {
                score.tokens_lost += tokens - millionths / 1_000_000;
                score.aborted += u64::from(millionths < 1_000_000);
                return false;
            }
            true
        });
    }

    fn cut_off(&mut self, index: usize) {
        let score = &mut self.score;
        self.jobs.retain(|job| {
            let cut = job.holder == index && job.began.is_some();
            match job.work {
                Work::Audio { .. } if cut => score.missed += 1,
                Work::Answer { tokens, millionths } if cut => {
                    score.tokens_lost += tokens - millionths / 1_000_000;
                    score.aborted += 1;
                }
                _ => {}
            }
            !cut
        });
    }

    fn count(&mut self) {
        let avoidable = self.baseline + self.neighbour.0 <= self.total;
        let over = self.used() > self.total && avoidable;
        self.score.over_commits += u64::from(over && !self.over);
        self.over = over;
    }
}

impl Job {
    pub(super) const fn extra(&self) -> Bytes {
        match self.work {
            Work::Audio { extra, .. } => extra,
            Work::Answer { .. } => Bytes::ZERO,
        }
    }
}
