//! Waits, weighings and outcomes as English.

use std::fmt::{Display, Formatter, Result};

use crate::{
    event::{ChangedKeys, Done, ShedLimit, ShedOutcome, WorkerDone},
    growth_wait::GrowthWait,
    reboot::RebootReason,
    shedding::{Chosen, NextShed, Source, Weighing},
    snapshot::WorkerWait,
};
use cotenant_units::Bytes;

impl Display for GrowthWait {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            Self::NotLoaded => f.write_str("the engine is not loaded"),
            Self::Draining => f.write_str("the supervisor is draining"),
            Self::Pressure { level, left: None } => write!(f, "pressure is {level}"),
            Self::Pressure {
                level,
                left: Some(left),
            } => write!(
                f,
                "pressure stays {level} until its dwell ends in {:.1} s",
                left.as_secs_f64()
            ),
            Self::Requests { waiting: 1 } => f.write_str("1 request waits for memory"),
            Self::Requests { waiting } => write!(f, "{waiting} requests wait for memory"),
            Self::Sample => f.write_str("no sample is newer than the last change"),
            Self::Dwell { left } => write!(
                f,
                "the dwell after the last shed ends in {:.1} s",
                left.as_secs_f64()
            ),
            Self::Changing => f.write_str("a change is under way"),
            Self::Settling { left } => write!(
                f,
                "the last change settles for {:.1} s more",
                left.as_secs_f64()
            ),
            Self::Headroom {
                needs,
                has,
                elevated,
                hysteresis,
                reserved,
                step,
            } => {
                write!(
                    f,
                    "needs {needs} headroom, has {has} (Elevated {elevated} + hysteresis {hysteresis}"
                )?;
                if *reserved > Bytes::ZERO {
                    write!(f, " + {reserved} for workers")?;
                }
                write!(f, " + {step} for the next step)")
            }
            Self::Budget {
                needs,
                free,
                reserved,
            } => {
                write!(f, "needs {needs} of the budget, {free} is free")?;
                if *reserved > Bytes::ZERO {
                    write!(f, " and {reserved} of that is reserved for workers")?;
                }
                Ok(())
            }
        }
    }
}

impl Display for RebootReason {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            Self::OrphanedGpuMemory { bytes, of } => {
                write!(f, "no process holds {bytes} of the {of} that the GPU has")
            }
            Self::ContiguousRefused { refusals } => {
                write!(
                    f,
                    "the kernel refused contiguous memory {refusals} times though memory is plentiful"
                )
            }
            Self::Fragmented { free, largest } => {
                write!(f, "the largest free block has {largest} with {free} free")
            }
        }
    }
}

impl Display for WorkerWait {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let (needs, free) = (self.needs, self.free);
        write!(f, "it needs {needs}")?;
        if needs > self.configured {
            write!(
                f,
                ", by what it was seen to use, where {} is configured",
                self.configured
            )?;
        }
        if !self.is_out_of_reach() {
            return write!(f, ", and {free} is free for it");
        }
        write!(f, ", and at most {} can ever be had", self.most)?;
        for (number, (keeper, bytes)) in self.keepers.iter().enumerate() {
            let before = if number == 0 { " while" } else { "," };
            write!(f, "{before} `{keeper}` keeps {bytes}")?;
        }
        f.write_str(if needs > self.configured {
            "; raise the budget, lower what the others keep, or remove `peaks.json` in the state folder if that was no honest use"
        } else {
            "; raise the budget, lower what the others keep, or its `memory.peak`"
        })
    }
}

impl Display for Weighing {
    /// One line: who gives, who would have been dearer, who was spared.
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        write!(
            f,
            "weighed {} of {} that could come back",
            self.need, self.reclaimable
        )?;
        if let Some(mode) = self.mode {
            write!(f, ", {mode}")?;
        }
        if self.above_ppm > 0 {
            let above = self.above_ppm.div_ceil(1000);
            write!(f, ", at most {above} per mille above the cheapest set")?;
        }
        for weighed in &self.candidates {
            let bytes = weighed.bytes;
            match weighed.chosen {
                Some(chosen) => write!(f, "; {}: {chosen} of {bytes}", weighed.source)?,
                None => write!(f, "; not {}: {bytes}", weighed.source)?,
            }
            write!(
                f,
                " at {}.{} ms/MiB",
                weighed.score / 1000,
                weighed.score % 1000 / 100
            )?;
        }
        for spared in &self.spared {
            write!(
                f,
                "; {} with {} is spared: {}",
                spared.holder, spared.held, spared.why
            )?;
        }
        Ok(())
    }
}

impl Display for NextShed {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let Self {
            need,
            below,
            headroom,
            ..
        } = self;
        if self.chosen.is_empty() {
            return write!(
                f,
                "nothing that may be shed, with headroom below {below} (now {headroom})"
            );
        }
        for (index, Chosen { source, bytes, .. }) in self.chosen.iter().enumerate() {
            let separator = if index > 0 { ", " } else { "" };
            write!(f, "{separator}{source} ({bytes})")?;
        }
        write!(
            f,
            ": cheapest for {need}, with headroom below {below} (now {headroom})"
        )
    }
}

impl Display for Source {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            Self::UnusedKv => f.write_str("unused KV blocks"),
            Self::PrefixKv => f.write_str("KV blocks of earlier answers"),
            Self::OldestKv => f.write_str("the oldest KV blocks of the running answer"),
            Self::KvType => f.write_str("KV in a smaller type"),
            Self::Layers => f.write_str("resident layers"),
            Self::PrefillChunk => f.write_str("larger prefill chunks"),
            Self::Tenant { lease, tenant } => write!(f, "{tenant}#{}", lease.0),
            Self::WorkerVariant { worker, variant } => {
                write!(f, "worker `{worker}` as `{variant}`")
            }
            Self::WorkerStop { worker } => write!(f, "stopping worker `{worker}`"),
            Self::WorkerNotified { worker } => write!(f, "notifying worker `{worker}`"),
        }
    }
}

impl Display for ShedOutcome {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let Self {
            asked, freed, held, ..
        } = self;
        write!(f, "shed {freed} of {asked}; the engine holds {held}")?;
        self.limited_by
            .map_or(Ok(()), |limit| write!(f, ": {limit}"))
    }
}

impl Display for ShedLimit {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            Self::Floor { bytes } => write!(f, "the floor of the engine is {bytes}"),
            Self::RunningAnswer { tokens } => {
                write!(f, "the running answer uses {tokens} tokens of KV")
            }
            Self::NotConfirmed => f.write_str("the engine has not confirmed the rest"),
        }
    }
}

impl Display for Done {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            Self::Decided(decision) => f.write_str(&super::render_decision(decision)),
            Self::Worker { worker, done } => match done {
                WorkerDone::Runs => write!(f, "worker `{worker}` already runs"),
                WorkerDone::IsStarting => write!(f, "worker `{worker}` is already starting"),
                WorkerDone::Starts => write!(f, "worker `{worker}` starts when there is memory"),
                WorkerDone::Stops => write!(f, "worker `{worker}` stops"),
                WorkerDone::Restarts => write!(f, "worker `{worker}` is restarted"),
                WorkerDone::IsIn { variant } => {
                    write!(f, "worker `{worker}` is in variant `{variant}`")
                }
            },
            Self::Grows(reason) => reason.fmt(f),
            Self::WorkerReturns { worker } => write!(f, "worker `{worker}` comes back"),
            Self::VariantReturns { worker, variant } => {
                write!(f, "worker `{worker}` goes back to variant `{variant}`")
            }
            Self::GrowsWhenSampled => f.write_str("what has room grows back with the next sample"),
            Self::FullSize => f.write_str("everything has its full size"),
            Self::NoEngine => f.write_str("no LLM is configured"),
            Self::Loaded => f.write_str("the model is loaded, or is being loaded"),
            Self::Inspecting => f.write_str(
                "the model's file is being read; `cotenant status` shows what comes of it",
            ),
            Self::KvIs(kind) => write!(f, "KV is kept as {kind} already"),
            Self::KvWhenLoaded(kind) => {
                write!(f, "KV will be kept as {kind} when the engine is loaded")
            }
            Self::KvWhenRoom { kv_type, more } => match more {
                Some(more) => write!(
                    f,
                    "KV will be kept as {kv_type} as soon as there is room for {more} more"
                ),
                None => write!(
                    f,
                    "KV will be kept as {kv_type} as soon as the book has room"
                ),
            },
            Self::KvChanged {
                kv_type,
                before,
                held,
                freed,
                untouched,
                took,
            } => {
                write!(f, "KV is kept as {kv_type}: ")?;
                let given = before.saturating_sub(*held);
                if given > Bytes::ZERO {
                    write!(
                        f,
                        "{given} reclaimed, the kernel shows {freed} and {untouched} had not been touched"
                    )?;
                } else {
                    write!(f, "{} more", held.saturating_sub(*before))?;
                }
                let took = took.as_secs_f64() * 1000.0;
                write!(
                    f,
                    ", in {took:.1} ms; the engine holds {held}, {before} before"
                )
            }
            Self::Reconfigured(changes) => changes.fmt(f),
        }
    }
}

impl Display for ChangedKeys {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match (self.applied.as_slice(), self.restart.as_slice()) {
            ([], []) => f.write_str("nothing has changed"),
            (applied, []) => write!(f, "applied: {}", applied.join(", ")),
            ([], restart) => write!(f, "needs a restart: {}", restart.join(", ")),
            (applied, restart) => write!(
                f,
                "applied: {}; needs a restart: {}",
                applied.join(", "),
                restart.join(", ")
            ),
        }
    }
}
