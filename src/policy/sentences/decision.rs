//! Decisions as English; the one place where their wording is made.

use super::reason::still_uses;
use crate::{
    decision::{
        AdmissionDecision, ChangeCause, Claim, Decision, EngineDecision, GrowthDecision,
        LeaseDecision, LeaseEnd, MemoryDecision, NextLoad, NotReduced, PlanOutcome, StrayPlan,
        StrayReport, WorkerDecision,
    },
    lease::{LeaseName, TargetAnswer},
    page_pool::Release,
};
use cotenant_units::Bytes;

/// A decision as one line.
#[must_use]
pub fn render_decision(decision: &Decision) -> String {
    match decision {
        Decision::Lease(decision) => lease(decision),
        Decision::Admission(decision) => admission(decision),
        Decision::Engine(decision) => engine(decision),
        Decision::Worker(decision) => worker(decision),
        Decision::Growth(decision) => growth(decision),
        Decision::Memory(decision) => memory(decision),
    }
}

/// Why a lease ends, as its holder and operators read it.
#[must_use]
pub fn render_lease_end(lease: &LeaseName, end: &LeaseEnd) -> String {
    match end {
        LeaseEnd::Expired { term } => {
            let term = term.as_secs_f64();
            format!("lease {lease} expired: not renewed within its {term} s term")
        }
        LeaseEnd::ReleasedByOther { uid } => {
            format!("lease {lease} was released by uid {uid}, not by its holder")
        }
        LeaseEnd::NotReduced {
            target,
            late,
            cause,
        } => {
            let (cause, late) = (not_reduced(cause), late.as_secs_f64());
            format!(
                "lease {lease} ends: {cause}; its target of {target} was due {late:.1} s ago, and nothing is credited"
            )
        }
    }
}

fn not_reduced(cause: &NotReduced) -> String {
    let claimed = |claim: &Claim| match claim {
        Claim::Applied => "it answered `applied`",
        Claim::Deferred => "it asked for more time",
        Claim::Resized => "it asked for less itself",
    };
    match cause {
        NotReduced::Unanswered => "it has not answered".to_owned(),
        NotReduced::Refused { reason } => format!("it refused: {reason}"),
        NotReduced::Measured { used, claim } => format!("{} and still uses {used}", claimed(claim)),
        NotReduced::Unmeasurable { claim } => format!("{} and cannot be measured", claimed(claim)),
    }
}

fn lease(decision: &LeaseDecision) -> String {
    match decision {
        LeaseDecision::Answered {
            lease,
            answer,
            claimed,
        } => match (answer, claimed) {
            (TargetAnswer::Applied, Some(claimed)) => {
                format!("{lease} reports to use {claimed} now; not yet measured")
            }
            (TargetAnswer::Applied, None) => {
                format!("{lease} reports that it has come down; not yet measured")
            }
            (TargetAnswer::Deferred { overage }, _) => {
                format!("{lease} still needs {overage} above its target")
            }
            (TargetAnswer::Refused { reason }, _) => {
                format!("{lease} refuses its target: {reason}")
            }
        },
        LeaseDecision::NotBooked {
            tenant,
            asked,
            free,
        } => {
            format!("`{tenant}`: cannot book {asked}: {free} is free")
        }
        LeaseDecision::AnswerIgnored {
            lease,
            nonce,
            current,
        } => match current {
            Some(current) => format!(
                "{lease} answered target {nonce}, and target {current} is in force: ignored"
            ),
            None => format!("{lease} answered target {nonce}, and has no target: ignored"),
        },
        LeaseDecision::BeyondLease {
            holder,
            used,
            held,
            free,
        } => {
            let beyond = used.saturating_sub(*held);
            format!(
                "`{holder}` uses {used} and holds {held}: {beyond} are unaccounted; {free} is free"
            )
        }
        LeaseDecision::Reduced {
            lease,
            stays,
            freed,
            took,
            used,
            free,
            budget,
        } => {
            let took = took.as_millis();
            format!(
                "{lease} is down to {stays}, {freed} verified after {took} ms: it uses {used}; {free} is free of {budget}"
            )
        }
        LeaseDecision::WishNotSeen {
            lease,
            target,
            used,
        } => {
            let used = still_uses(*used);
            format!("{lease} wanted to come down to {target} and {used}: it keeps what it holds")
        }
        LeaseDecision::Closed {
            lease,
            held,
            rest,
            free,
            budget,
        } => {
            let rest = if *rest > Bytes::ZERO {
                format!("; {rest} is still in use and unaccounted")
            } else {
                String::new()
            };
            format!("{lease} is off the book with {held}{rest}; {free} is free of {budget}")
        }
        LeaseDecision::ClosedUnmeasured { lease, held } => {
            format!(
                "{lease} has ended and cannot be measured: its {held} are free as far as the last sample shows"
            )
        }
        LeaseDecision::ClosedUnaccounted { lease, held } => {
            format!(
                "{lease} has ended and was not measured in time: its {held} are unaccounted until it is"
            )
        }
        LeaseDecision::KeptUntilAcknowledged {
            lease,
            bytes,
            at_most,
            free,
            budget,
        } => {
            let at_most = at_most.as_secs_f64();
            format!(
                "{lease} has ended unacknowledged: {bytes} stay on the book for {at_most:.1} s at most; \
                 {free} is free of {budget}"
            )
        }
        LeaseDecision::HolderGone {
            lease,
            leases,
            free,
            budget,
        } => {
            let others = match leases - 1 {
                0 => String::new(),
                others => format!(" with {others} more leases"),
            };
            format!(
                "{lease}{others}: its process has ended and its memory is free; {free} is free of {budget}"
            )
        }
        LeaseDecision::Released { lease, held } => {
            format!("released {lease} with {held}, free once measured")
        }
        LeaseDecision::EndAcknowledged {
            lease, by: None, ..
        } => {
            format!("{lease} has ended, and its holder has acknowledged it")
        }
        LeaseDecision::EndAcknowledged {
            lease,
            by: Some(uid),
            held,
        } => {
            format!(
                "{lease}: end acknowledged by uid {uid} on the holder's behalf; {held} credited once measured"
            )
        }
        LeaseDecision::TakenOver {
            leases,
            workers,
            held,
            budget,
        } => {
            format!(
                "taken over from the run before: {leases} leases, {workers} workers, {held} held of {budget}"
            )
        }
        LeaseDecision::BookTooLate => {
            "a book of an earlier run comes too late and is not taken over".to_owned()
        }
        LeaseDecision::NameTaken { lease } => {
            format!("lease {lease} is not taken over: a worker has its name now")
        }
        LeaseDecision::NotTakenOver {
            lease,
            held,
            free,
            budget,
        } => {
            format!(
                "lease {lease} is not taken over: its {held} do not fit, {free} is free of {budget}"
            )
        }
    }
}

fn admission(decision: &AdmissionDecision) -> String {
    match decision {
        AdmissionDecision::DrainBegun => "draining: nothing new is admitted".to_owned(),
        AdmissionDecision::DrainEnded => {
            "the drain has ended: requests are admitted again".to_owned()
        }
        AdmissionDecision::Granted {
            lease,
            bytes,
            waited,
            free,
            budget,
        } => {
            format!(
                "granted {bytes} to {lease} after {} ms: {free} is free of {budget}",
                waited.as_millis()
            )
        }
        AdmissionDecision::Grown {
            lease,
            from,
            to,
            waited,
            free,
            budget,
        } => {
            format!(
                "grown {lease} from {from} to {to} after {} ms: {free} is free of {budget}",
                waited.as_millis()
            )
        }
        AdmissionDecision::Waits { tenant, denial } => format!("`{tenant}` waits: {denial}"),
        AdmissionDecision::OutOfReach { tenant, denial } => {
            format!("`{tenant}` waits for what it cannot have at present: {denial}")
        }
        AdmissionDecision::StartOutOfReach { worker, wait } => {
            format!("worker `{worker}` cannot be started: {wait}")
        }
        AdmissionDecision::Aged {
            tenant,
            class,
            waited,
            rank,
        } => {
            format!(
                "`{tenant}` ({class}) has waited for {} s and is served as {rank} now",
                waited.as_secs()
            )
        }
        AdmissionDecision::TurnOver { tenant, class } => {
            format!("`{tenant}` ({class}) has had its turn and waits on")
        }
        AdmissionDecision::Withdrawn { tenant } => format!("`{tenant}` does not wait any more"),
    }
}

fn engine(decision: &EngineDecision) -> String {
    match decision {
        EngineDecision::FloorExceedsBudget { error } => format!(
            "the model is not loaded: {error} with all memory free; use a smaller model or `llm.kv_floor`, or a larger budget"
        ),
        EngineDecision::NotConfigured { model } => {
            format!("`{model}` was inspected, and no engine is configured")
        }
        EngineDecision::AlreadyLoaded { model } => {
            format!("`{model}` was inspected while a model is loaded: ignored")
        }
        EngineDecision::Inspected {
            model,
            layers,
            token,
            full,
        } => {
            format!(
                "`{model}` has {layers} layers, {token} of KV for each token and needs {full} in full"
            )
        }
        EngineDecision::LoadDelayed { wait } => {
            let wait = wait.as_secs_f64();
            format!("the model was inspected again; it is loaded in {wait:.1} s")
        }
        EngineDecision::WaitsForMemory {
            error,
            free,
            kept,
            headroom,
            watermark,
        } => format!(
            "the engine waits for memory: {error}: {free} is free, {kept} is kept for workers, headroom is {headroom} with a \
             watermark of {watermark}"
        ),
        EngineDecision::Loading {
            plan,
            full,
            free,
            kept,
        } => format!(
            "loading the engine with {plan}, {full} in full: {free} is free after it, {kept} of that is kept for workers"
        ),
        EngineDecision::StrayPlan { revision, stray } => match stray {
            StrayPlan::NoLease => format!("the engine applied plan {revision}, and holds no lease"),
            StrayPlan::EarlierLoad => {
                format!("the engine applied plan {revision} of an earlier load: ignored")
            }
            StrayPlan::Failed { reason } => {
                format!("plan {revision} failed, and is no longer waited for: {reason}")
            }
        },
        EngineDecision::Applied {
            revision,
            outcome,
            plan,
            used,
            free,
            took,
        } => {
            let holds = plan.map_or_else(String::new, |plan| plan.to_string());
            let took = took.as_millis();
            match outcome {
                PlanOutcome::Ready => format!("engine ready after {took} ms: {holds}, uses {used}"),
                PlanOutcome::Shed {
                    credited,
                    freed,
                    untouched,
                } => {
                    let untouched = if *untouched > Bytes::ZERO {
                        format!(" and {untouched} had not been touched")
                    } else {
                        String::new()
                    };
                    format!(
                        "engine shed {credited} in {took} ms, the kernel shows {freed}{untouched}: {holds}, uses {used}; \
                         {free} is free"
                    )
                }
                PlanOutcome::ChunkEnded { credited, freed } => format!(
                    "a chunk of a prompt has ended, and smaller ones follow: engine gave up {credited} in {took} ms, the \
                     kernel shows {freed}: {holds}, uses {used}; {free} is free"
                ),
                PlanOutcome::Grown => {
                    format!("engine has grown in {took} ms: {holds}, uses {used}; {free} is free")
                }
                PlanOutcome::Confirmed => {
                    format!("engine applied plan {revision} in {took} ms: {holds}, uses {used}")
                }
            }
        }
        EngineDecision::Short {
            promised,
            credited,
            freed,
        } => {
            format!(
                "engine promised {promised}, {credited} are credited and the kernel shows {freed}"
            )
        }
        EngineDecision::NotApplied {
            revision,
            reason,
            plan,
            in_force,
        } => {
            let in_force = in_force.map_or_else(String::new, |plan| plan.to_string());
            format!(
                "the engine could not apply plan {revision} ({plan}): {reason}; in force was {in_force}"
            )
        }
        EngineDecision::Gone {
            reason,
            freed,
            next,
        } => {
            let next = match next {
                NextLoad::In(wait) => format!("loading again in {:.1} s", wait.as_secs_f64()),
                NextLoad::ReadIn(wait) => {
                    format!("reading its file again in {:.1} s", wait.as_secs_f64())
                }
                NextLoad::NeedsChange => "it is not loaded again until that has changed".to_owned(),
                NextLoad::GivenUp => "it failed too often and is not loaded again".to_owned(),
                NextLoad::WaitsForDisk { left } => {
                    format!(
                        "reads that hang keep {left}, and it is inspected again when the disk has answered"
                    )
                }
                NextLoad::NothingToLoad => "there is nothing to load".to_owned(),
            };
            format!("the LLM has failed: {reason}; {freed} are off the book; {next}")
        }
        EngineDecision::ContextLost { tokens, in_all } => format!(
            "the answer has lost {tokens} tokens of its context, the oldest, as its request allows: {in_all} in all"
        ),
        EngineDecision::Unconfirmed => {
            "the plan in force is unknown; asking for the last one that was known".to_owned()
        }
        EngineDecision::Unanswered { revision, after } => {
            let after = after.as_secs_f64();
            format!("the engine has not answered plan {revision} within {after:.1} s; asking again")
        }
    }
}

fn growth(decision: &GrowthDecision) -> String {
    match decision {
        GrowthDecision::CapacityWithheld {
            wanted,
            present,
            wait,
        } => {
            format!(
                "a client wants a KV capacity of {wanted} tokens, {present} are planned: {wait}"
            )
        }
        GrowthDecision::BackedOff { stayed, dwell } => format!(
            "what had grown back was shed again after {:.1} s; nothing grows for {:.1} s",
            stayed.as_secs_f64(),
            dwell.as_secs_f64()
        ),
        GrowthDecision::EngineSpared { level } => {
            format!(
                "{level}: nothing more is shed; what is left costs its users more than this level may"
            )
        }
        GrowthDecision::NothingLeft {
            level,
            unaccounted,
            own,
        } => {
            let own = own.map_or_else(|| "an unknown part".to_owned(), |own| own.to_string());
            format!(
                "{level}: nothing is left to shed; {unaccounted} is unaccounted, the supervisor itself uses {own}"
            )
        }
    }
}

fn memory(decision: &MemoryDecision) -> String {
    match decision {
        MemoryDecision::Released(Release {
            bytes,
            to_pool,
            to_os,
        }) => {
            format!("released {bytes}: {to_pool} to the GPU's page pool, {to_os} to the OS")
        }
        MemoryDecision::RebootAdvised(reason) => format!("reboot advised: {reason}"),
        MemoryDecision::TooSmall {
            machine,
            budget,
            reason,
        } => {
            format!(
                "the {machine} are too little, the budget is {budget}: {reason}; raise the limit or stop what needs it"
            )
        }
        MemoryDecision::RebootNotAdvised(reason) => {
            format!("reboot no longer advised; it was since {reason}")
        }
    }
}

fn worker(decision: &WorkerDecision) -> String {
    match decision {
        WorkerDecision::Starting {
            worker,
            peak,
            free,
            budget,
        } => {
            format!(
                "starting worker `{worker}` with {peak} held for its peak; {free} is free of {budget}"
            )
        }
        WorkerDecision::Unresponsive {
            worker,
            pid,
            evidence,
        } => {
            format!("worker `{worker}` (pid {pid}) does not respond and is ended: {evidence}")
        }
        WorkerDecision::Ready { worker, pid, took } => {
            format!(
                "worker `{worker}` (pid {pid}) is ready after {} ms",
                took.as_millis()
            )
        }
        WorkerDecision::Ignored { worker, report } => match report {
            StrayReport::Ready { pid, state } => {
                format!(
                    "worker `{worker}` (pid {pid}) answers while it is {}: ignored",
                    state.word()
                )
            }
            StrayReport::Exited { cause } => {
                format!("worker `{worker}` exited ({cause}) and was not running: ignored")
            }
            StrayReport::Changed { variant } => {
                format!("worker `{worker}` changed to `{variant}` while it does not run: ignored")
            }
        },
        // Its event says how it died.
        WorkerDecision::Died { remedy, .. } => format!("remedy: {remedy}"),
        WorkerDecision::Exited {
            worker,
            expected,
            freed,
            free,
            ..
        } => {
            let asked = if *expected {
                "as requested"
            } else {
                "unexpectedly"
            };
            format!(
                "worker `{worker}` exited {asked}: {freed} returned to the budget, {free} is free"
            )
        }
        WorkerDecision::Restarting {
            worker,
            wait,
            failures,
            intensity,
            window,
        } => format!(
            "worker `{worker}` starts again in {:.1} s, failure {failures} of {intensity} within {:.0} s",
            wait.as_secs_f64(),
            window.as_secs_f64()
        ),
        WorkerDecision::GivenUp {
            worker,
            failures,
            window,
        } => format!(
            "worker `{worker}` failed {failures} times within {:.0} s and is left alone; start it by hand",
            window.as_secs_f64()
        ),
        WorkerDecision::NeedsOperator { worker } => format!(
            "worker `{worker}` would end in the same way again and is left alone; start it by hand when its cause is cured"
        ),
        WorkerDecision::Woken { worker } => format!("worker `{worker}` is woken by a request"),
        WorkerDecision::Changing {
            worker,
            variant,
            cause,
        } => {
            let why = match cause {
                ChangeCause::Asked => "asked for".to_owned(),
                ChangeCause::Room { reason } => reason.to_string(),
                ChangeCause::Idle { idle } => format!("nothing to do for {} s", idle.as_secs()),
            };
            format!("worker `{worker}` changes to variant `{variant}`: {why}")
        }
        WorkerDecision::Settled {
            worker,
            used,
            stays,
            freed,
            free,
        } => {
            format!(
                "worker `{worker}` uses {used}: its lease comes down by {freed} to {stays}, {free} is free"
            )
        }
        WorkerDecision::Outgrown {
            worker,
            used,
            above,
            held,
            requests,
        } => format!(
            "worker `{worker}` uses {used}, above {above} where it is recycled, and holds {held}: it takes nothing new, ends \
             its {requests} requests and is restarted"
        ),
        WorkerDecision::PeakLearned {
            worker,
            variant,
            peak,
            configured,
        } => {
            let variant = variant
                .as_ref()
                .map_or_else(String::new, |variant| format!(" in variant `{variant}`"));
            format!(
                "worker `{worker}` used {peak}{variant}, and its start reserved {configured}: from now on its own peak counts"
            )
        }
        WorkerDecision::PeakRaised { worker, had, needs } => format!(
            "worker `{worker}` was killed at the limit of its group with {had}: from now on {needs} has to be free for it"
        ),
        WorkerDecision::IgnoresPressure(ignored) => {
            format!("{ignored}; it is at work and keeps what it holds")
        }
        WorkerDecision::NotSmaller { worker, used, held } => {
            let used = still_uses(*used);
            format!(
                "worker `{worker}` reported that it has become smaller and {used}; it still holds {held}"
            )
        }
        WorkerDecision::Restored { worker, steady } => {
            format!("worker `{worker}` may hold its {steady} again")
        }
        WorkerDecision::Resized {
            worker,
            variant,
            took,
            used,
            held,
        } => {
            let took = took.as_millis();
            format!(
                "worker `{worker}` is in variant `{variant}` after {took} ms{}, holds {held}",
                uses(*used)
            )
        }
        WorkerDecision::VariantKept {
            worker,
            variant,
            error,
            used,
        } => {
            format!(
                "worker `{worker}` stays in variant `{variant}`: {error}{}",
                uses(*used)
            )
        }
        WorkerDecision::TakenOver { worker, pid, held } => {
            format!(
                "worker `{worker}` (pid {pid}) has outlived the run before and is taken over with {held}"
            )
        }
    }
}

fn uses(used: Option<Bytes>) -> String {
    used.map_or_else(String::new, |used| format!(", uses {used}"))
}
