//! Reasons as English.

use std::fmt::{Display, Formatter, Result};

use crate::{
    kv_type::KvType,
    reason::{
        Confirmation, IgnoredPressure, LevelReason, PlanChange, PlanReason, PlanSize,
        ReclaimReason, SpareReason, StopReason,
    },
};
use cotenant_units::Bytes;

/// What a holder is measured to use.
pub(super) fn still_uses(used: Option<Bytes>) -> String {
    used.map_or_else(
        || "cannot be measured".to_owned(),
        |used| format!("still uses {used}"),
    )
}

impl Display for ReclaimReason {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            Self::Request {
                tenant,
                class,
                needed,
                free,
                coming_back,
                budget,
            } => write!(
                f,
                "`{tenant}` ({class}) needs {needed} more, {free} is free and {coming_back} is on its way back, of a {budget} \
                 budget"
            ),
            Self::EngineFloor {
                missing,
                floor,
                free,
            } => {
                write!(
                    f,
                    "the engine needs {missing} more for its floor of {floor}, {free} is free"
                )
            }
            Self::Operator { asked } => write!(f, "an operator asked for {asked}"),
            Self::OverBudget { over, budget } => {
                write!(
                    f,
                    "{over} more is held than the budget, which was lowered to {budget}"
                )
            }
            Self::Pressure {
                level,
                headroom,
                watermark,
                missing,
                wanted,
            } => write!(
                f,
                "{level}: headroom {headroom} is below {watermark}, {missing} more are to come back for {wanted}"
            ),
        }
    }
}

/// `3 of 8 resident layers, 2048 KV tokens, 41 MiB`; tokens that are not kept as `f16` with their type.
impl Display for PlanSize {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let ((resident, layers), tokens) = (self.resident, self.kv_capacity);
        write!(
            f,
            "{resident} of {layers} resident layers, {tokens} KV tokens"
        )?;
        if self.kv_type != KvType::F16 {
            write!(f, " as {}", self.kv_type)?;
        }
        write!(f, ", {}", self.bytes)
    }
}

impl Display for PlanChange {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        write!(f, "from {} to {}", self.from, self.to)
    }
}

impl Display for PlanReason {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            Self::Shed {
                reclaim,
                gives,
                change,
            } => write!(f, "{reclaim}; the engine gives up {gives}: {change}"),
            Self::KvType { change } => write!(
                f,
                "an operator wants KV kept as {}: {change}",
                change.to.kv_type
            ),
            Self::Capacity { wanted, change } => {
                write!(
                    f,
                    "a request wants {wanted} tokens of KV capacity: {change}"
                )
            }
            Self::FullForNothing { now } => write!(f, "the full plan takes no more than {now}"),
            Self::Chunk {
                tokens,
                before,
                streamed,
                change,
            } => write!(
                f,
                "prompts are read in chunks of {tokens} tokens instead of {before}, for reading the {streamed} that each \
                 streams takes longer than computing: {change}"
            ),
            Self::Regrowth {
                gains,
                free,
                above,
                change,
            } => write!(
                f,
                "growing back by {gains}: {free} is free, headroom {above} above the watermark and its hysteresis; {change}"
            ),
            Self::Confirm => f.write_str("to know what is in force"),
            Self::Unanswered => f.write_str("asked before, without an answer"),
        }
    }
}

impl Display for IgnoredPressure {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let Self {
            worker,
            pid,
            target,
            ..
        } = self;
        let (used, late) = (still_uses(self.used), self.late.as_secs_f64());
        write!(
            f,
            "worker `{worker}` (pid {pid}) {used}, its target is {target}, {late:.1} s past the deadline: it was notified that \
             memory is short and has not come down; nothing is credited"
        )
    }
}

impl Display for StopReason {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            Self::Reclaim { held, reclaim } => write!(f, "for its {held}: {reclaim}"),
            Self::IgnoredPressure(ignored) => ignored.fmt(f),
            Self::NotReady { within } => {
                write!(f, "it did not answer within {:.1} s", within.as_secs_f64())
            }
            Self::NotStopped => {
                f.write_str("it has not ended within its grace, and is stopped again")
            }
            Self::NotChanged { variant, within } => {
                let within = within.as_secs_f64();
                write!(
                    f,
                    "it did not answer within {within:.1} s whether it is `{variant}`"
                )
            }
            Self::NotSmaller { used, held } => {
                let used = still_uses(*used);
                write!(
                    f,
                    "it reported that it has become smaller and {used}; it still holds {held}"
                )
            }
            Self::Idle => f.write_str("it has had nothing to do"),
            Self::Outgrown => f.write_str("it has outgrown what it may hold"),
            Self::Operator => f.write_str("an operator asked for it"),
            Self::Recycle => f.write_str("an operator asked to restart it"),
            Self::OverBudget { held, budget } => {
                write!(f, "it holds {held}, and the budget is {budget}")
            }
            Self::AskedBefore => f.write_str("it was asked to stop before the supervisor ended"),
        }
    }
}

impl Display for LevelReason {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            Self::AllStalled {
                headroom,
                watermark,
                stalled_us,
                of_us,
            } => write!(
                f,
                "headroom {headroom} is below {watermark}, and all tasks stalled {stalled_us} µs of {of_us} µs"
            ),
            Self::StallsAgain {
                headroom,
                watermark,
                stalls,
                scans,
            } => write!(
                f,
                "headroom {headroom} is below {watermark}, and {stalls} allocations stalled and {scans} pages were scanned by \
                 their callers, again"
            ),
            Self::Refaults {
                headroom,
                per_s,
                lasted,
            } => {
                let lasted = lasted.as_secs_f64();
                write!(
                    f,
                    "headroom {headroom} is not plentiful, and {per_s} file pages are read again per second for {lasted:.1} s"
                )
            }
            Self::CmaRefused { headroom, refused } => {
                write!(
                    f,
                    "headroom {headroom} is not plentiful, and CMA refused {refused} allocations"
                )
            }
            Self::Below {
                headroom,
                watermark,
                by,
            } => write!(f, "headroom {headroom} is below {watermark} ({by})"),
            Self::Above {
                headroom,
                lasted,
                dwell,
            } => write!(
                f,
                "headroom {headroom} and above the watermark for {:.1} s, dwell {:.1} s",
                lasted.as_secs_f64(),
                dwell.as_secs_f64()
            ),
        }
    }
}

impl Display for Confirmation {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            Self::SecondSample { before } => write!(f, "second sample in a row, {before} before"),
            Self::FirstSample { before } => {
                write!(f, "first sample below the lower watermark, {before} before")
            }
            Self::Slope {
                lost,
                took_ms,
                left,
                ahead_ms,
            } => {
                write!(
                    f,
                    "{lost} lost in {took_ms} ms, so {left} is left in {ahead_ms} ms"
                )
            }
            Self::Stalled { stalled_us, of_us } => {
                write!(f, "PSI some stalled {stalled_us} µs of {of_us} µs")
            }
            Self::Stalls { count } => write!(f, "{count} allocations stalled"),
            Self::Scans { pages } => write!(f, "{pages} pages scanned by those who allocate"),
            Self::SwapIns { pages, took_ms } => {
                write!(f, "{pages} pages swapped in within {took_ms} ms")
            }
            Self::Refaults { pages, took_ms } => {
                write!(f, "{pages} file pages refaulted in {took_ms} ms")
            }
        }
    }
}

impl Display for SpareReason {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        f.write_str(match self {
            Self::AsUrgent(class) => return write!(f, "{class} is as urgent"),
            Self::MoreUrgent(class) => return write!(f, "{class} is more urgent"),
            Self::ComingDown { to } => return write!(f, "is coming down to {to} already"),
            Self::BeforeCritical(class) => return write!(f, "{class} gives at Critical only"),
            Self::AtLeast(least) => return write!(f, "is at its least of {least}"),
            Self::WantedAgain { remaining } => {
                let seconds = remaining.as_secs_f64();
                return write!(f, "was wanted again at once when it was stopped; it is not stopped for {seconds:.0} s");
            }
            Self::Ending => "is ending already",
            Self::EngineBusy => "is loading, or failed to shed a moment ago",
            Self::KeepsLayers => "has no KV blocks to give, and its layers cost more than this level may",
            Self::AllGiven => "has given up all that it can",
            Self::Pinned => "is pinned",
            Self::Changing => "is changing",
            Self::Busy => "is busy",
            Self::WaitsToGrow => "waits to become larger",
            Self::WorkersBeforeCritical => "workers give at Critical only",
            Self::Recovered => "headroom is above the critical watermark; workers are stopped only below it",
            Self::OthersSuffice => "would be stopped, and others give what is missing now",
        })
    }
}
