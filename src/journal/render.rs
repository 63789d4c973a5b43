//! Rendering of journal lines as English.

use std::fmt::{Display, Write};

use super::{Content, JournalEntry};
use cotenant_policy::{
    event::{
        Action, Answer, CapacityWanted, EngineApplied, Event, LeaseCall, LeaseResize, Origin,
        TargetAnswered, WorkerCommand, WorkerResize, WorkerResized,
    },
    kv_type::KvType,
    lease::{LeaseView, TargetAnswer},
    pressure::{LevelChange, Sample},
    residency::EnginePlan,
    shedding::Weighing,
};
use cotenant_units::{Bytes, TimeSpan};

/// Renders a line without its number and time.
pub fn render(entry: &JournalEntry) -> String {
    match &entry.content {
        Content::Start(start) => {
            let (params, version) = (&start.params, &start.version);
            let budget = params.budget.bytes();
            match &params.machine.limited_by {
                Some(_) => format!(
                    "supervisor {version} started with a budget of {budget}, of the {}",
                    params.machine
                ),
                None => format!("supervisor {version} started with a budget of {budget}"),
            }
        }
        Content::Event(event) => render_event(event),
        Content::Action(action) => render_action(action),
        Content::Checkpoint(_) => "checkpoint of the whole state".to_owned(),
        Content::Dropped { lines: 1 } => {
            "1 line is missing: the journal could not keep up".to_owned()
        }
        Content::Dropped { lines } => {
            format!("{lines} lines are missing: the journal could not keep up")
        }
    }
}

/// Renders ` of client `kitchen``, if known.
fn of_client(client: Option<&str>) -> String {
    client.map_or_else(String::new, |client| format!(" of client `{client}`"))
}

fn by_origin(by: &Option<Origin>) -> String {
    by.as_ref()
        .map_or_else(String::new, |by| format!(" by {by}"))
}

fn operator(by: &Option<Origin>) -> String {
    by.as_ref().map_or_else(
        || "an operator".to_owned(),
        |by| format!("an operator ({by})"),
    )
}

fn render_event(event: &Event) -> String {
    match event {
        Event::Sampled(sample) => render_sample(sample),
        Event::Measured { tenant, used, .. } => {
            format!("`{tenant}` measured: {}", or_unknown(*used))
        }
        Event::LeaseRequested { request, .. } => {
            let mut line = format!(
                "`{}` ({}) requests {}",
                request.tenant,
                request.class,
                range(request.min, request.max)
            );
            if let Some(cgroup) = &request.cgroup {
                let _ = write!(line, " for control group `{cgroup}`");
            }
            if request.validate_only {
                line.push_str(", as a query only");
            } else if !request.wait.is_zero() {
                let _ = write!(line, ", waits up to {}", TimeSpan(request.wait));
            }
            line
        }
        Event::LeaseRequestCancelled { ticket } => {
            format!("request {} was withdrawn", ticket.0)
        }
        Event::LeaseRenewed(LeaseCall { lease, .. }) => {
            format!("lease {} renewed by its holder", lease.0)
        }
        Event::LeaseResizeRequested(LeaseResize {
            lease, min, max, ..
        }) => {
            format!("lease {} requests {}", lease.0, range(*min, *max))
        }
        Event::LeaseReleased(LeaseCall { lease, .. }) => {
            format!("release of lease {} requested", lease.0)
        }
        Event::TargetAnswered(TargetAnswered {
            lease,
            nonce,
            answer,
            ..
        }) => {
            let answer = match answer {
                TargetAnswer::Applied => "applied".to_owned(),
                TargetAnswer::Deferred { overage } => format!("deferred, {overage} still in use"),
                TargetAnswer::Refused { reason } => format!("refused: {reason}"),
            };
            format!("lease {} answers target {nonce}: {answer}", lease.0)
        }
        Event::HolderLost { lease, pid: None } => {
            format!("the holder of lease {} is gone", lease.0)
        }
        Event::HolderLost {
            lease,
            pid: Some(pid),
        } => format!("process {pid}, holder of lease {}, has ended", lease.0),
        Event::EngineInspected { shape } => {
            format!(
                "model `{}` ({}) has {}",
                shape.name,
                shape.architecture,
                counted(shape.layer_count(), "layer")
            )
        }
        Event::EngineApplied(EngineApplied {
            revision,
            in_force,
            freed,
            used,
            took,
            untouched,
            untouched_given,
        }) => format!(
            "engine applied plan {revision}: {}; {}uses {} of {used} held, took {took:.1?}",
            plan(in_force),
            given_back(*freed, *untouched_given),
            used.saturating_sub(*untouched)
        ),
        Event::EngineApplyFailed { revision, reason } => {
            format!("engine could not apply plan {revision}: {reason}")
        }
        Event::EngineFailed {
            reason, left: None, ..
        } => format!("engine failed: {reason}"),
        Event::EngineFailed {
            reason,
            left: Some(left),
            ..
        } => {
            format!("engine failed: {reason}; hung reads hold {left}")
        }
        Event::EngineActivity {
            requests,
            kv_used,
            kv_kept,
            kv_dropped,
            untouched,
            beside,
            ..
        } => format!(
            "engine has {}, {kv_used} tokens in the KV cache, {kv_kept} of earlier answers, {} beside, {untouched} untouched{}",
            counted(*requests, "request"),
            counted(beside.len() as u64, "conversation"),
            match kv_dropped {
                0 => String::new(),
                dropped => format!(", {dropped} tokens dropped"),
            }
        ),
        Event::EngineCalibrated(by) => format!(
            "engine computes a MiB in {} µs and reads one in {} µs, {} while computing, which slows computing by {}",
            by.compute_ns_per_mib / 1000,
            by.read_ns_per_mib / 1000,
            by.read_busy_ns_per_mib / 1000,
            by.slowed_ns_per_mib / 1000
        ),
        Event::EngineTimed(timing) => format!(
            "engine prefilled {} tokens in {} ms and generated {} in {} ms",
            timing.prompt_tokens,
            timing.prompt_us / 1000,
            timing.answer_tokens,
            timing.answer_us / 1000
        ),
        Event::WorkerReady { worker, pid } => format!("worker `{worker}` (pid {pid}) is ready"),
        Event::WorkerDied { certificate } => {
            format!(
                "{certificate} [{}, {}]",
                certificate.verdict.class, certificate.verdict.confidence
            )
        }
        Event::WorkerExited {
            worker,
            intended,
            cause,
        } => {
            let asked = if *intended {
                "as requested"
            } else {
                "unrequested"
            };
            format!("worker `{worker}` ended {asked}: {cause}")
        }
        Event::PeakMeasured { worker, peak } => {
            format!("worker `{worker}` has a measured peak of {peak}")
        }
        Event::WorkerActivity { worker, requests } => {
            format!("worker `{worker}` has {}", counted(*requests, "request"))
        }
        Event::WorkerWanted { worker, client } => {
            format!(
                "a request{} waits for worker `{worker}`",
                of_client(client.as_deref())
            )
        }
        Event::WorkerResizeRequested(WorkerResize {
            worker,
            variant,
            by,
            ..
        }) => {
            format!(
                "worker `{worker}` is requested as `{variant}`{}",
                by_origin(by)
            )
        }
        Event::WorkerResized(WorkerResized {
            worker,
            variant,
            used,
            error,
        }) => match error {
            Some(error) => format!("worker `{worker}` stays `{variant}`: {error}"),
            None => format!(
                "worker `{worker}` is now `{variant}`, {}",
                or_unknown(*used)
            ),
        },
        Event::WorkerUnresponsive {
            worker,
            pid,
            evidence,
        } => {
            format!("worker `{worker}` (pid {pid}) did not answer: {evidence}")
        }
        Event::CapacityWanted(CapacityWanted {
            needed,
            wanted,
            client,
            is_running,
        }) => format!(
            "{}{} requests a KV capacity of {wanted} tokens and needs {needed}",
            if *is_running {
                "the running answer"
            } else {
                "a request"
            },
            of_client(client.as_deref())
        ),
        Event::OperatorShed { bytes, by, .. } => {
            format!("{} requests a shed of {bytes}", operator(by))
        }
        Event::OperatorRegrow { by, .. } => format!("{} requests regrowth", operator(by)),
        Event::OperatorKvType { kv_type, by, .. } => {
            format!("{} requests the KV type {kv_type}", operator(by))
        }
        Event::OperatorWorker {
            worker,
            command,
            by,
            ..
        } => {
            let command = match command {
                WorkerCommand::Recycle => "recycles",
                WorkerCommand::Start => "starts",
                WorkerCommand::Stop => "stops",
            };
            format!("{} {command} worker `{worker}`", operator(by))
        }
        Event::Recovered { book, adopted } => format!(
            "found from the previous run: {} and {}",
            counted(book.leases.len(), "lease"),
            counted(adopted.len(), "living worker")
        ),
        Event::BookLost { kept } => {
            format!(
                "the leases of the previous run are lost: its ledger is damaged, and kept as `{kept}`"
            )
        }
        Event::DrainRequested { by } => format!("a drain is requested{}", by_origin(by)),
        Event::DrainCancelled { by } => format!("{} ends the drain", operator(by)),
        Event::OperatorLoad { by, .. } => {
            format!("{} requests a load of the model", operator(by))
        }
        Event::Reconfigured {
            params,
            changes,
            by,
            ..
        } => {
            format!(
                "configuration reloaded{}, budget {}: {changes}",
                by_origin(by),
                params.budget.bytes()
            )
        }
        Event::ReloadRefused { cause, by } => {
            let by = by_origin(by);
            format!("configuration not reloaded{by}, nothing changed: {cause}")
        }
        Event::Resized {
            machine,
            params: Ok(params),
        } => {
            format!(
                "the budget changed to {}, of the {machine}",
                params.budget.bytes()
            )
        }
        Event::Resized {
            machine,
            params: Err(reason),
        } => format!("no valid budget for the {machine}: {reason}"),
        Event::DeadlineReached => "a deadline has passed".to_owned(),
    }
}

/// Renders an action.
pub fn render_action(action: &Action) -> String {
    match action {
        Action::Answer { answer, .. } => match answer {
            Answer::Lease { lease } => format!("{}: holds {}", lease.name(), lease_words(lease)),
            Answer::WouldGrant {
                bytes,
                after_shedding,
            } => {
                format!("would grant {bytes}, after shedding {after_shedding}")
            }
            Answer::Shed(outcome) => outcome.to_string(),
            Answer::Done { done } => done.to_string(),
            Answer::Denied {
                denial,
                retry_after,
            } => match retry_after {
                Some(wait) => format!("denied: {denial}; try again in {wait:.1?}"),
                None => format!("denied: {denial}"),
            },
        },
        Action::SetTarget {
            lease,
            bytes,
            reason,
            ..
        } => format!("lease {} shrinks to {bytes}: {reason}", lease.0),
        Action::EndLease { lease, end } => format!("lease {lease} {end}"),
        Action::LoadEngine {
            revision,
            plan: wanted,
        } => format!("load the model, plan {revision}: {}", plan(wanted)),
        Action::ApplyPlan {
            revision,
            plan: wanted,
            reason,
        } => format!("plan {revision}: {}; {reason}", plan(wanted)),
        Action::StartWorker { worker, variant } => match variant {
            Some(variant) => format!("start worker `{worker}` as `{variant}`"),
            None => format!("start worker `{worker}`"),
        },
        Action::StopWorker { worker, reason } => format!("stop worker `{worker}`: {reason}"),
        Action::AbortWorker { worker, evidence } => format!("abort worker `{worker}`: {evidence}"),
        Action::ResizeWorker { worker, variant } => {
            format!("worker `{worker}` may switch to `{variant}`")
        }
        Action::Measure { tenant } => format!("measure `{tenant}`"),
        Action::EmptyPagePool { bytes } => {
            format!("return {bytes} of the GPU's page pool to the OS")
        }
        Action::SampleAfter { wait } => format!("read the machine in {wait:.1?}"),
        Action::LevelChanged(LevelChange { from, to, reason }) => {
            format!("pressure {from} -> {to}: {reason}")
        }
        Action::InspectModel => "read the header of the model's file".to_owned(),
        Action::ReinspectModel => "read the header of the model's file again".to_owned(),
        Action::StorePeaks { peaks } => format!("store {} learned peaks", peaks.iter().count()),
        Action::Weighed { weighing } => weighed(weighing),
        Action::Decided { decision } => decision.to_string(),
    }
}

/// Renders the chosen givers, the more expensive ones, and those spared.
fn weighed(weighing: &Weighing) -> String {
    let (need, reclaimable) = (weighing.need, weighing.reclaimable);
    let mut text = format!("weighed candidates: {need} needed of {reclaimable} reclaimable");
    if let Some(mode) = weighing.mode {
        let _ = write!(text, ", {mode}");
    }
    if weighing.above_ppm > 0 {
        let above = weighing.above_ppm.div_ceil(1000);
        let _ = write!(text, ", at most {above} per mille above the cheapest set");
    }
    for one in &weighing.candidates {
        let _ = match one.chosen {
            Some(chosen) => write!(text, "; {}: {chosen} of {}", one.source, one.bytes),
            None => write!(text, "; not {}: {}", one.source, one.bytes),
        };
        let (ms, tenths) = (one.score / 1000, one.score % 1000 / 100);
        let _ = write!(text, " at {ms}.{tenths} ms/MiB");
    }
    for spared in &weighing.spared {
        let (holder, held, why) = (&spared.holder, spared.held, &spared.why);
        let _ = write!(text, "; {holder} with {held} is spared: {why}");
    }
    text
}

fn render_sample(sample: &Sample) -> String {
    let mut line = format!(
        "{} of {} available",
        sample.memory.mem_available, sample.memory.mem_total
    );
    if let Some(group) = sample.memory.group {
        let _ = write!(
            line,
            ", {} of {} left in the control group",
            group.left, group.limit
        );
    }
    if let Some(used) = sample.scope_used {
        let _ = write!(line, ", session uses {used}");
    }
    if let Some(cma) = sample.gpu.cma_free {
        let _ = write!(line, ", CMA free {cma}");
    }
    if let Some(avg10) = sample.stalls.psi_some_avg10 {
        let _ = write!(line, ", stalled {}.{:02} %", avg10 / 100, avg10 % 100);
    }
    line
}

fn lease_words(lease: &LeaseView) -> String {
    let mut words = format!(
        "{} of {}",
        lease.memory.held,
        range(lease.memory.min, lease.memory.max)
    );
    if let Some(target) = &lease.target {
        let _ = write!(words, ", asked to shrink to {}", target.bytes);
    }
    words
}

/// Renders a count with its noun: `1 part`, `2 parts`.
fn counted<N: Copy + Display + PartialEq + From<u8>>(count: N, noun: &str) -> String {
    let end = if count == N::from(1) { "" } else { "s" };
    format!("{count} {noun}{end}")
}

/// Renders the memory returned to the kernel, and the part that was reserved but never touched.
pub(super) fn given_back(freed: Bytes, reserved: Bytes) -> String {
    match (freed, reserved) {
        (Bytes::ZERO, Bytes::ZERO) => String::new(),
        (freed, Bytes::ZERO) => format!("{freed} verified back, "),
        (Bytes::ZERO, reserved) => format!("{reserved} of untouched reservations released, "),
        (freed, reserved) => {
            format!("{freed} verified back and {reserved} of untouched reservations released, ")
        }
    }
}

fn plan(plan: &EnginePlan) -> String {
    format!(
        "{} resident (layers, output head), KV capacity {} tokens{}, prefill by {}",
        counted(plan.resident.len(), "part"),
        plan.kv_capacity,
        match plan.kv_type {
            KvType::F16 => String::new(),
            kind => format!(" as {kind}"),
        },
        plan.prefill_chunk
    )
}

fn range(min: Bytes, max: Bytes) -> String {
    if min == max {
        min.to_string()
    } else {
        format!("{min} to {max}")
    }
}

fn or_unknown(bytes: Option<Bytes>) -> String {
    bytes.map_or_else(|| "unknown".to_owned(), |bytes| bytes.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use cotenant_policy::pressure::{MemoryReading, StallReading};
    use cotenant_units::{Timestamp, Tokens};

    fn entry(content: Content) -> JournalEntry {
        JournalEntry {
            sequence: 1,
            boot_id: "a".into(),
            at: Timestamp::START,
            unix_us: 0,
            content,
        }
    }

    #[test]
    fn what_was_reserved_alone_is_not_verified_back() {
        let applied = |freed, untouched_given| {
            render(&entry(Content::Event(Event::EngineApplied(
                EngineApplied {
                    revision: 3,
                    in_force: EnginePlan {
                        resident: (0..9).collect(),
                        kv_capacity: Tokens::new(512),
                        prefill_chunk: Tokens::new(128),
                        kv_type: KvType::F16,
                    },
                    freed: Bytes::from_mib(freed),
                    used: Bytes::from_mib(40),
                    untouched: Bytes::from_mib(10),
                    untouched_given: Bytes::from_mib(untouched_given),
                    took: std::time::Duration::from_millis(2),
                },
            ))))
        };
        let line = applied(0, 85);
        assert!(
            line.contains("85 MiB of untouched reservations released")
                && !line.contains("verified"),
            "{line}"
        );
        assert!(line.contains("uses 30 MiB of 40 MiB held"), "{line}");
        let line = applied(7, 85);
        assert!(
            line.contains("7 MiB verified back and 85 MiB of untouched"),
            "{line}"
        );
        assert!(!applied(0, 0).contains("0 B"), "{}", applied(0, 0));
    }

    #[test]
    fn a_sample_is_one_line_of_what_is_known() {
        let sample = Sample {
            memory: MemoryReading {
                mem_total: Bytes::from_gib(16),
                mem_available: Bytes::from_gib(3),
                ..MemoryReading::default()
            },
            stalls: StallReading {
                psi_some_avg10: Some(1205),
                ..StallReading::default()
            },
            ..Sample::default()
        };
        assert_eq!(
            render(&entry(Content::Event(Event::Sampled(sample)))),
            "3 GiB of 16 GiB available, stalled 12.05 %"
        );
    }
}
