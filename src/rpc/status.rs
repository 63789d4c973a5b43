//! Errors as clients see them: a code, a sentence, and details that a program can read.
//!
//! | situation | code | reason | details |
//! |---|---|---|---|
//! | does not fit now | RESOURCE_EXHAUSTED | `INSUFFICIENT_MEMORY` | QuotaFailure, RetryInfo |
//! | pressure | RESOURCE_EXHAUSTED | `PRESSURE_HIGH` | RetryInfo |
//! | a limit of each peer or of all | RESOURCE_EXHAUSTED | `QUOTA_EXCEEDED` | QuotaFailure, RetryInfo |
//! | never fits the budget | FAILED_PRECONDITION | `EXCEEDS_BUDGET` | QuotaFailure |
//! | the request's own content | INVALID_ARGUMENT | `INVALID_FIELD`, `CONTEXT_LENGTH_EXCEEDED` | BadRequest |
//! | the same request id, other content | ALREADY_EXISTS | `REQUEST_ID_REUSED` | |
//! | no such lease, or ended | NOT_FOUND | `UNKNOWN_LEASE` | ResourceInfo |
//! | no such worker | NOT_FOUND | `UNKNOWN_WORKER` | ResourceInfo |
//! | a lease of another run | FAILED_PRECONDITION | `BOOT_ID_CHANGED` | |
//! | somebody else's lease | PERMISSION_DENIED | `NOT_HOLDER` | |
//! | an old generation | FAILED_PRECONDITION | `STALE_GENERATION` | |
//! | the peer's role is too weak, it may not do this | PERMISSION_DENIED | `ROLE_MISSING`, `NOT_ALLOWED` | |
//! | draining, stopping, loading | UNAVAILABLE | `DRAINING`, `STOPPING`, `OVERLOADED`, `ENGINE_NOT_READY` | RetryInfo |
//! | KV cache reclaimed in mid-stream | ABORTED | `KV_RECLAIMED` | RetryInfo |
//! | a later call for the same lease came while this one waited | ABORTED | `REPLACED` | |
//! | the client does not read | ABORTED | `READER_STALLED` | |
//! | the worker failed and is started again | UNAVAILABLE | `WORKER_LOST` | RetryInfo |
//! | the call's deadline: passed, or it cannot be kept | DEADLINE_EXCEEDED | `DEADLINE_PASSED`, `DEADLINE_UNREACHABLE` | RetryInfo |
//! | nothing of the kind is configured, or an operator stopped it | FAILED_PRECONDITION | `NOT_CONFIGURED`, `STOPPED` | |
//! | no such model | NOT_FOUND | `UNKNOWN_MODEL` | ResourceInfo |
//! | the engine failed | INTERNAL | `ENGINE_LOST` | |
//!
//! All carry an ErrorInfo of domain `cotenant`; its metadata has the figures, bytes as decimal numbers.

use std::{collections::HashMap, time::Duration};

use tonic::{Code, Status};
use tonic_types::{ErrorDetails, FieldViolation, QuotaViolation, StatusExt};

use super::supervisor::SubmitError;
use crate::{
    policy::{lease::Denial, refusal::Refusal},
    units::Bytes,
};

/// Domain of every ErrorInfo.
pub const DOMAIN: &str = "cotenant";

/// A call that the services themselves refuse, before or after the arbiter.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// The role of the peer does not cover the call.
    #[error("{call} is not open to uid {uid} ({role}): it needs the permission to {needed}")]
    RoleMissing {
        /// The call.
        call: &'static str,
        /// Who tried.
        uid: u32,
        /// Its role, or `no role`.
        role: String,
        /// What it needs.
        needed: String,
    },
    /// The deadline that the client set has passed.
    #[error("no answer within the {} ms that the client allows", .allowed.as_millis())]
    DeadlinePassed {
        /// What the client set.
        allowed: Duration,
    },
    /// A field of the request.
    #[error("{field}: `{value}` {problem}")]
    InvalidField {
        /// Its name.
        field: &'static str,
        /// Its value, shortened.
        value: String,
        /// `is not above zero`.
        problem: String,
    },
    /// A request by the name of a worker, by somebody else.
    #[error(
        "cannot grant a lease to `{worker}`: it is a worker, {}, and {asker} is not of it",
        .runs_as.map_or_else(|| "which has no process yet".to_owned(), |pid| format!("process {pid}"))
    )]
    NotTheWorker {
        /// The worker.
        worker: String,
        /// Its process, when it has one.
        runs_as: Option<u32>,
        /// Who asks: `process 7`, or that the kernel does not tell.
        asker: String,
    },
    /// A request by another name than that of the worker which the process is of.
    #[error(
        "cannot grant a lease to `{tenant}`: {asker} is of worker `{worker}`, process {runs_as}, and is measured with it; \
         what it needs is part of that worker's `memory`, or asked for by its name with `lease: own`"
    )]
    OfAWorker {
        /// The name asked by.
        tenant: String,
        /// The worker.
        worker: String,
        /// Its process.
        runs_as: u32,
        /// Who asks.
        asker: String,
    },
    /// Something that only the holder of a lease may do or say, by another process.
    #[error("lease `{lease}` is held by {holder}, which asked for it and is measured, not by {caller}")]
    NotTheHolder {
        /// The lease.
        lease: String,
        /// `process 7`, or that the kernel does not tell.
        holder: String,
        /// As `holder`, who calls.
        caller: String,
    },
    /// The lease is of another run of the supervisor.
    #[error("lease `{lease}` is of run `{given}` of the supervisor, this is run `{current}`: ask for a new lease")]
    BootIdChanged {
        /// The lease.
        lease: String,
        /// As given.
        given: String,
        /// As it is.
        current: String,
    },
    /// No such lease.
    #[error("lease `{lease}` is unknown or has ended")]
    UnknownLease {
        /// As the caller named it.
        lease: String,
    },
    /// No such worker.
    #[error("worker `{worker}` is unknown: there are {known}")]
    UnknownWorker {
        /// As the caller named it.
        worker: String,
        /// Those there are.
        known: String,
    },
    /// Too many open streams.
    #[error("{what} of this process are at their limit of {limit}")]
    QuotaExceeded {
        /// `streams`.
        what: &'static str,
        /// The limit.
        limit: u64,
    },
    /// The client did not take what was sent to it.
    #[error("the client has not read its stream for {} s", .patience.as_secs())]
    ReaderStalled {
        /// How long it may.
        patience: Duration,
    },
    /// The daemon ends.
    #[error("the supervisor is stopping")]
    Stopping,
    /// The event could not be handed over.
    #[error(transparent)]
    NotSubmitted(#[from] SubmitError),
    /// The arbiter gave an answer of another kind than the request's.
    #[error("the arbiter gave no fitting answer to {call}")]
    UnfitAnswer {
        /// The call.
        call: &'static str,
    },
}

/// A name and its value for [`ErrorDetails::set_error_info`].
type Figure = (&'static str, String);

/// The status of a denial.
#[must_use]
pub fn of_denial(denial: &Denial, retry_after: Option<Duration>) -> Status {
    let message = denial.to_string();
    match denial {
        Denial::InsufficientMemory {
            tenant,
            asked,
            free,
            reclaimable,
            budget,
            holders,
        } => build(
            Code::ResourceExhausted,
            &message,
            "INSUFFICIENT_MEMORY",
            [
                ("tenant", tenant.clone()),
                bytes("asked_bytes", *asked),
                bytes("free_bytes", *free),
                bytes("reclaimable_bytes", *reclaimable),
                bytes("budget_bytes", *budget),
                ("holders", holders.trim().to_owned()),
            ],
            |details| {
                details.set_quota_failure(vec![memory_violation(&message, *budget)]);
                details.set_retry_info(Some(retry_after.unwrap_or(RETRY_AFTER)));
            },
        ),
        Denial::ExceedsBudget { tenant, asked, budget } => build(
            Code::FailedPrecondition,
            &message,
            "EXCEEDS_BUDGET",
            [
                ("tenant", tenant.clone()),
                bytes("asked_bytes", *asked),
                bytes("budget_bytes", *budget),
            ],
            |details| {
                details.set_quota_failure(vec![memory_violation(&message, *budget)]);
            },
        ),
        Denial::Invalid {
            tenant,
            field,
            value,
            problem,
        } => build(
            Code::InvalidArgument,
            &message,
            "INVALID_FIELD",
            [("tenant", tenant.clone()), ("field", proto_field(field).to_owned())],
            |details| {
                details.set_bad_request(vec![FieldViolation::new(
                    proto_field(field),
                    format!("`{value}` {problem}"),
                )]);
            },
        ),
        Denial::RequestIdReused { tenant, request_id } => build(
            Code::AlreadyExists,
            &message,
            "REQUEST_ID_REUSED",
            [("tenant", tenant.clone()), ("request_id", request_id.clone())],
            |_| {},
        ),
        Denial::QuotaExceeded { tenant, what, limit } => build(
            Code::ResourceExhausted,
            &message,
            "QUOTA_EXCEEDED",
            [
                ("tenant", tenant.clone()),
                ("quota", what.clone()),
                ("limit", limit.to_string()),
            ],
            |details| {
                details.set_quota_failure(vec![violation(what, what, &message, *limit)]);
                details.set_retry_info(retry_after);
            },
        ),
        Denial::UnknownLease { lease } => unknown_lease(&message, lease),
        Denial::Replaced { lease } => build(Code::Aborted, &message, "REPLACED", [("lease", lease.clone())], |_| {}),
        Denial::StaleGeneration {
            lease,
            generation,
            current,
        } => build(
            Code::FailedPrecondition,
            &message,
            "STALE_GENERATION",
            [
                ("lease", lease.clone()),
                ("generation", generation.to_string()),
                ("current", current.to_string()),
            ],
            |_| {},
        ),
        Denial::NotHolder { lease, uid, problem } => build(
            Code::PermissionDenied,
            &message,
            "NOT_HOLDER",
            [
                ("lease", lease.clone()),
                ("uid", uid.to_string()),
                ("problem", problem.clone()),
            ],
            |_| {},
        ),
        Denial::StaleSample {
            tenant,
            asked,
            age,
            limit,
        } => build(
            Code::Unavailable,
            &message,
            "STALE_SAMPLE",
            [
                ("tenant", tenant.clone()),
                bytes("asked_bytes", *asked),
                ("age_ms", age.as_millis().to_string()),
                ("limit_ms", limit.as_millis().to_string()),
            ],
            |details| {
                details.set_retry_info(Some(retry_after.unwrap_or(RETRY_AFTER)));
            },
        ),
        Denial::PressureHigh {
            tenant,
            asked,
            class,
            level,
        } => build(
            Code::ResourceExhausted,
            &message,
            "PRESSURE_HIGH",
            [
                ("tenant", tenant.clone()),
                bytes("asked_bytes", *asked),
                ("class", class.to_string()),
                ("level", level.to_string()),
            ],
            |details| {
                details.set_retry_info(Some(retry_after.unwrap_or(RETRY_AFTER)));
            },
        ),
        Denial::NotGrowing { wait } => build(
            Code::FailedPrecondition,
            &message,
            "NOT_GROWING",
            [("wait", wait.to_string())],
            |details| {
                details.set_retry_info(retry_after);
            },
        ),
        Denial::Draining { tenant, asked } => build(
            Code::Unavailable,
            &message,
            "DRAINING",
            [("tenant", tenant.clone()), bytes("asked_bytes", *asked)],
            |details| {
                details.set_retry_info(Some(retry_after.unwrap_or(RESTART_AFTER)));
            },
        ),
    }
}

impl From<CallError> for Status {
    fn from(error: CallError) -> Self {
        let message = error.to_string();
        match error {
            CallError::RoleMissing {
                call,
                uid,
                role,
                needed,
            } => build(
                Code::PermissionDenied,
                &message,
                "ROLE_MISSING",
                [
                    ("call", call.to_owned()),
                    ("uid", uid.to_string()),
                    ("role", role),
                    ("needed", needed),
                ],
                |_| {},
            ),
            CallError::DeadlinePassed { allowed } => build(
                Code::DeadlineExceeded,
                &message,
                "DEADLINE_PASSED",
                [("allowed_ms", allowed.as_millis().to_string())],
                |_| {},
            ),
            CallError::InvalidField { field, value, problem } => build(
                Code::InvalidArgument,
                &message,
                "INVALID_FIELD",
                [("field", field.to_owned())],
                |details| {
                    details.set_bad_request(vec![FieldViolation::new(field, format!("`{value}` {problem}"))]);
                },
            ),
            CallError::NotTheWorker { worker, runs_as, asker } => build(
                Code::PermissionDenied,
                &message,
                "NOT_HOLDER",
                [
                    ("worker", worker),
                    ("pid", runs_as.map(|pid| pid.to_string()).unwrap_or_default()),
                    ("asker", asker),
                ],
                |_| {},
            ),
            CallError::OfAWorker {
                worker, runs_as, asker, ..
            } => build(
                Code::PermissionDenied,
                &message,
                "NOT_HOLDER",
                [("worker", worker), ("pid", runs_as.to_string()), ("asker", asker)],
                |_| {},
            ),
            CallError::NotTheHolder { lease, holder, caller } => build(
                Code::PermissionDenied,
                &message,
                "NOT_HOLDER",
                [("lease", lease), ("holder", holder), ("caller", caller)],
                |_| {},
            ),
            CallError::BootIdChanged { lease, given, current } => build(
                Code::FailedPrecondition,
                &message,
                "BOOT_ID_CHANGED",
                [("lease", lease), ("given_boot_id", given), ("boot_id", current)],
                |_| {},
            ),
            CallError::UnknownLease { lease } => unknown_lease(&message, &lease),
            CallError::UnknownWorker { worker, known } => build(
                Code::NotFound,
                &message,
                "UNKNOWN_WORKER",
                [("worker", worker.clone()), ("known", known)],
                |details| {
                    details.set_resource_info("cotenant.worker", worker, "", message.as_str());
                },
            ),
            CallError::QuotaExceeded { what, limit } => build(
                Code::ResourceExhausted,
                &message,
                "QUOTA_EXCEEDED",
                [("quota", what.to_owned()), ("limit", limit.to_string())],
                |details| {
                    details.set_quota_failure(vec![violation("peer", what, &message, limit)]);
                },
            ),
            CallError::ReaderStalled { patience } => build(
                Code::Aborted,
                &message,
                "READER_STALLED",
                [("patience_ms", patience.as_millis().to_string())],
                |_| {},
            ),
            CallError::Stopping | CallError::NotSubmitted(SubmitError::Stopped) => {
                build(Code::Unavailable, &message, "STOPPING", [], |details| {
                    details.set_retry_info(Some(RESTART_AFTER));
                })
            }
            CallError::NotSubmitted(SubmitError::Full) => {
                build(Code::Unavailable, &message, "OVERLOADED", [], |details| {
                    details.set_retry_info(Some(RETRY_AFTER));
                })
            }
            CallError::UnfitAnswer { call } => build(
                Code::Internal,
                &message,
                "UNFIT_ANSWER",
                [("call", call.to_owned())],
                |_| {},
            ),
        }
    }
}

/// The same table for what a door refuses; `http/fault.rs` and `daemon/wyoming/refuse.rs` have it for their protocols.
impl From<Refusal> for Status {
    fn from(refusal: Refusal) -> Self {
        let message = refusal.to_string();
        let retry = |details: &mut ErrorDetails, after: Duration| {
            details.set_retry_info(Some(after));
        };
        match refusal {
            Refusal::InsufficientMemory {
                act: _,
                asked,
                free,
                reclaimable,
                budget,
                retry_after,
            } => build(
                Code::ResourceExhausted,
                &message,
                "INSUFFICIENT_MEMORY",
                [
                    bytes("asked_bytes", asked),
                    bytes("free_bytes", free),
                    bytes("reclaimable_bytes", reclaimable),
                    bytes("budget_bytes", budget),
                ],
                |details| {
                    details.set_quota_failure(vec![memory_violation(&message, budget)]);
                    retry(details, retry_after);
                },
            ),
            Refusal::PressureHigh {
                act: _,
                level,
                retry_after,
            } => build(
                Code::ResourceExhausted,
                &message,
                "PRESSURE_HIGH",
                [("level", level.to_string())],
                |details| retry(details, retry_after),
            ),
            Refusal::ExceedsBudget { act: _, asked, budget } => build(
                Code::FailedPrecondition,
                &message,
                "EXCEEDS_BUDGET",
                [bytes("asked_bytes", asked), bytes("budget_bytes", budget)],
                |details| {
                    details.set_quota_failure(vec![memory_violation(&message, budget)]);
                },
            ),
            Refusal::ContextLengthExceeded { model, prompt, limit } => build(
                Code::InvalidArgument,
                &message,
                "CONTEXT_LENGTH_EXCEEDED",
                [
                    ("model", model),
                    ("prompt_tokens", prompt.to_string()),
                    ("context_tokens", limit.to_string()),
                ],
                |details| {
                    details.set_bad_request(vec![FieldViolation::new("input", message.as_str())]);
                },
            ),
            // Not INVALID_ARGUMENT, which clients take for final.
            Refusal::KvCapacityShed {
                model,
                prompt,
                capacity,
                limit,
                retry_after,
            } => build(
                Code::ResourceExhausted,
                &message,
                "INSUFFICIENT_MEMORY",
                [
                    ("model", model),
                    ("prompt_tokens", prompt.to_string()),
                    ("capacity_tokens", capacity.to_string()),
                    ("context_tokens", limit.to_string()),
                ],
                |details| {
                    let tokens = u64::from(capacity.get());
                    details.set_quota_failure(vec![violation("pools/kv", "kv_capacity_tokens", &message, tokens)]);
                    retry(details, retry_after);
                },
            ),
            Refusal::KvReclaimed { generated, retry_after } => build(
                Code::Aborted,
                &message,
                "KV_RECLAIMED",
                [("completion_tokens", generated.to_string())],
                |details| retry(details, retry_after),
            ),
            Refusal::QuotaExceeded {
                act: _,
                what,
                limit,
                retry_after,
            } => build(
                Code::ResourceExhausted,
                &message,
                "QUOTA_EXCEEDED",
                [("quota", what.clone()), ("limit", limit.to_string())],
                |details| {
                    details.set_quota_failure(vec![violation(&what, &what, &message, limit)]);
                    retry(details, retry_after);
                },
            ),
            Refusal::Draining { act: _, retry_after } => {
                build(Code::Unavailable, &message, "DRAINING", [], |details| {
                    retry(details, retry_after.max(RESTART_AFTER));
                })
            }
            Refusal::Starting {
                act: _,
                who,
                state,
                retry_after,
            } => build(
                Code::Unavailable,
                &message,
                "ENGINE_NOT_READY",
                [("who", who), ("state", state)],
                |details| retry(details, retry_after),
            ),
            Refusal::EngineLost { .. } => build(Code::Internal, &message, "ENGINE_LOST", [], |_| {}),
            Refusal::WorkerLost {
                worker,
                reason: _,
                retry_after,
            } => build(
                Code::Unavailable,
                &message,
                "WORKER_LOST",
                [("worker", worker)],
                |details| retry(details, retry_after),
            ),
            Refusal::DeadlineUnreachable {
                act: _,
                patience_ms,
                expected_ms,
                retry_after,
            } => build(
                Code::DeadlineExceeded,
                &message,
                "DEADLINE_UNREACHABLE",
                [
                    ("patience_ms", patience_ms.to_string()),
                    ("expected_ms", expected_ms.to_string()),
                ],
                |details| retry(details, retry_after),
            ),
            Refusal::Invalid { field, value, problem } => build(
                Code::InvalidArgument,
                &message,
                "INVALID_FIELD",
                [("field", field.clone())],
                |details| {
                    details.set_bad_request(vec![FieldViolation::new(field, format!("`{value}` {problem}"))]);
                },
            ),
            Refusal::UnknownModel { model, known: _ } => build(
                Code::NotFound,
                &message,
                "UNKNOWN_MODEL",
                [("model", model.clone())],
                |details| {
                    details.set_resource_info("cotenant.model", model, "", message.as_str());
                },
            ),
            Refusal::NotConfigured { act: _, what } => build(
                Code::FailedPrecondition,
                &message,
                "NOT_CONFIGURED",
                [("what", what)],
                |_| {},
            ),
            Refusal::Stopped { act: _, worker } => build(
                Code::FailedPrecondition,
                &message,
                "STOPPED",
                [("worker", worker)],
                |_| {},
            ),
            Refusal::UnknownLease { lease } => unknown_lease(&message, &lease),
            Refusal::NotAllowed { act: _, problem } => build(
                Code::PermissionDenied,
                &message,
                "NOT_ALLOWED",
                [("problem", problem)],
                |_| {},
            ),
        }
    }
}

fn unknown_lease(message: &str, lease: &str) -> Status {
    build(
        Code::NotFound,
        message,
        "UNKNOWN_LEASE",
        [("lease", lease.to_owned())],
        |details| {
            details.set_resource_info("cotenant.lease", lease, "", message);
        },
    )
}

fn build<const N: usize>(
    code: Code,
    message: &str,
    reason: &'static str,
    figures: [Figure; N],
    more: impl FnOnce(&mut ErrorDetails),
) -> Status {
    let message = shorten(message, MESSAGE_MAX);
    let metadata: HashMap<String, String> = figures
        .into_iter()
        .map(|(name, value)| (name.to_owned(), shorten(&value, MESSAGE_MAX)))
        .collect();
    let mut details = ErrorDetails::with_error_info(reason, DOMAIN, metadata);
    more(&mut details);
    Status::with_error_details(code, message, details)
}

/// The proto's name of a field that policy names by what it means.
fn proto_field(field: &str) -> &str {
    match field {
        "max" => "max_bytes",
        "min" => "min_bytes",
        "wait" => "max_wait",
        other => other,
    }
}

fn bytes(name: &'static str, bytes: Bytes) -> Figure {
    (name, bytes.get().to_string())
}

fn memory_violation(description: &str, budget: Bytes) -> QuotaViolation {
    violation("pools/unified", "unified_memory_bytes", description, budget.get())
}

fn violation(subject: &str, metric: &str, description: &str, value: u64) -> QuotaViolation {
    QuotaViolation {
        subject: subject.to_owned(),
        quota_metric: metric.to_owned(),
        quota_value: i64::try_from(value).unwrap_or(i64::MAX),
        ..QuotaViolation::new(subject, shorten(description, MESSAGE_MAX))
    }
}

/// Shortens a text to at most `limit` bytes, and marks the cut.
pub(super) fn shorten(text: &str, limit: usize) -> String {
    if text.len() <= limit {
        return text.to_owned();
    }
    let cut = text.floor_char_boundary(limit.saturating_sub('…'.len_utf8()));
    format!("{}…", text.split_at(cut).0)
}

/// Longest message or figure. It travels up to four times in one trailer, once more by a third in base64, and clients
/// refuse trailers above 8 KiB (gRPC core: `grpc.max_metadata_size`).
const MESSAGE_MAX: usize = 1024;

/// When to try again where nobody knows better: a shed and its verification take less (our choice).
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// When to try again after a restart: `RestartSec=1s` of the unit, and as much again to start (our choice).
const RESTART_AFTER: Duration = Duration::from_secs(2);
