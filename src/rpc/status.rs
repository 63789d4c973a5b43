//! Errors for clients: a code, a message, and machine-readable details.
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
//! | another holder's lease | PERMISSION_DENIED | `NOT_HOLDER` | |
//! | a control group whose processes count elsewhere | FAILED_PRECONDITION | `CGROUP_HELD` | |
//! | no such control group | NOT_FOUND | `UNKNOWN_CGROUP` | ResourceInfo |
//! | a control group, not through the path socket | PERMISSION_DENIED | `PATH_SOCKET_NEEDED` | |
//! | an old generation | FAILED_PRECONDITION | `STALE_GENERATION` | |
//! | the peer's role is too weak | PERMISSION_DENIED | `ROLE_MISSING` | |
//! | draining, stopping, loading | UNAVAILABLE | `DRAINING`, `STOPPING`, `OVERLOADED`, `ENGINE_NOT_READY` | RetryInfo |
//! | KV cache reclaimed in mid-stream | ABORTED | `KV_RECLAIMED` | RetryInfo |
//! | a later call for the same lease came while this one waited | ABORTED | `REPLACED` | |
//! | the client does not read | ABORTED | `READER_STALLED` | |
//! | the worker failed and is started again | UNAVAILABLE | `WORKER_LOST` | RetryInfo |
//! | the system gives no thread | UNAVAILABLE | `NO_THREAD` | RetryInfo |
//! | the call's deadline: passed, or it cannot be kept | DEADLINE_EXCEEDED | `DEADLINE_PASSED`, `DEADLINE_UNREACHABLE` | RetryInfo |
//! | the configuration cannot be used | FAILED_PRECONDITION | `CONFIG_INVALID` | |
//! | nothing of the kind is configured, or an operator stopped it | FAILED_PRECONDITION | `NOT_CONFIGURED`, `STOPPED` | |
//! | no such model | NOT_FOUND | `UNKNOWN_MODEL` | ResourceInfo |
//! | the engine failed | INTERNAL | `ENGINE_LOST` | |
//! | the engine failed, and no retry cures it | FAILED_PRECONDITION | `MODEL_FAILED` | |
//!
//! All have an ErrorInfo of domain `cotenant`; its metadata has the figures, bytes as decimal numbers, and `hint` if
//! the caller can remedy a denial.

use std::{collections::HashMap, fmt::Display, path::PathBuf, time::Duration};

use tonic::{Code, Status};
use tonic_types::{ErrorDetails, FieldViolation, QuotaViolation, StatusExt};

use super::{hint::hint, supervisor::SubmitError};
use cotenant_conversation::refusal::{Refusal, quoted};
use cotenant_policy::denial::Denial;
use cotenant_units::Bytes;

/// Domain of every ErrorInfo.
pub const DOMAIN: &str = "cotenant";

/// A call refused by the services themselves, before or after the arbiter.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// The role of the peer does not cover the call.
    #[error("{call} is not open to {} ({role}): it needs the permission to {needed}", caller(.uid))]
    RoleMissing {
        /// The call.
        call: &'static str,
        /// User of the caller.
        uid: u32,
        /// Its role, or `no role`.
        role: String,
        /// Required role.
        needed: String,
        /// The configuration key that grants it.
        remedy: String,
    },
    /// The client's deadline has passed.
    #[error("no answer within the {} ms that the client allows", .allowed.as_millis())]
    DeadlinePassed {
        /// The client's timeout.
        allowed: Duration,
    },
    /// A field of the request.
    #[error("{field}: `{value}` {problem}")]
    InvalidField {
        /// Name of the field.
        field: &'static str,
        /// Its value, shortened.
        value: String,
        /// `is not above zero`.
        problem: String,
    },
    /// A request under the name of a worker, by another process.
    #[error(
        "cannot grant a lease to `{worker}`: it is a worker, {}, to which {asker} does not belong",
        .runs_as.map_or_else(|| "which has no process yet".to_owned(), |pid| format!("process {pid}"))
    )]
    NotTheWorker {
        /// The worker.
        worker: String,
        /// Its process, if running.
        runs_as: Option<u32>,
        /// The caller, `process 7`, or a note that the kernel does not identify it.
        asker: String,
    },
    /// A request of a worker's process under another name.
    #[error(
        "cannot grant a lease to `{tenant}`: {asker} belongs to worker `{worker}`, process {runs_as}, and is measured with \
         it; include its need in that worker's `memory`, or request it in its name with `lease: own`"
    )]
    OfAWorker {
        /// Name in the request.
        tenant: String,
        /// The worker.
        worker: String,
        /// Its process.
        runs_as: u32,
        /// The caller.
        asker: String,
    },
    /// A request for a control group through another listener than the path socket.
    #[error(
        "cannot grant a lease for control group `{cgroup}`: the call came through an abstract socket, which any process \
         in the network namespace reaches"
    )]
    NotThePathSocket {
        /// The control group.
        cgroup: String,
    },
    /// No such control group.
    #[error(
        "cannot grant a lease for control group `{cgroup}`: {}",
        .mount.as_ref().map_or_else(
            || "no hierarchy with the memory controller is mounted".to_owned(),
            |mount| format!("there is no such group below `{}`", mount.display())
        )
    )]
    UnknownCgroup {
        /// The control group.
        cgroup: String,
        /// Mount point of the hierarchy.
        mount: Option<PathBuf>,
    },
    /// A control group with processes that the supervisor has booked itself.
    #[error(
        "cannot grant a lease for control group `{cgroup}`: it contains {}, process {runs_as}, whose memory is booked",
        .worker.as_ref().map_or_else(|| "the supervisor".to_owned(), |worker| format!("worker `{worker}`"))
    )]
    OurCgroup {
        /// The control group.
        cgroup: String,
        /// The worker; `None` for the supervisor itself.
        worker: Option<String>,
        /// Its process.
        runs_as: u32,
    },
    /// An action reserved to the holder of a lease, by another process.
    #[error(
        "lease `{lease}` is held by {holder}, which requested it and is measured, not by {caller}"
    )]
    NotTheHolder {
        /// The lease.
        lease: String,
        /// `process 7`, or a note that the kernel does not identify it.
        holder: String,
        /// The caller, in the form of `holder`.
        caller: String,
    },
    /// The lease belongs to another run of the supervisor.
    #[error(
        "lease `{lease}` belongs to run `{given}` of the supervisor, this is run `{current}`: request a new lease"
    )]
    BootIdChanged {
        /// The lease.
        lease: String,
        /// Run in the request.
        given: String,
        /// Current run.
        current: String,
    },
    /// No such lease.
    #[error("lease `{lease}` is unknown or has ended")]
    UnknownLease {
        /// Name in the request.
        lease: String,
    },
    /// No such worker.
    #[error("worker `{worker}` is unknown: known are {known}")]
    UnknownWorker {
        /// Name in the request.
        worker: String,
        /// Existing names.
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
    /// The client did not read its stream.
    #[error("the client has not read its stream for {} s", .patience.as_secs())]
    ReaderStalled {
        /// Permitted time without reading.
        patience: Duration,
    },
    /// The configuration file cannot be used; the current configuration stays in force.
    #[error("{report}")]
    ConfigInvalid {
        /// All faults, with place and remedy.
        report: String,
    },
    /// The daemon is stopping.
    #[error("the supervisor is stopping")]
    Stopping,
    /// The event could not be submitted.
    #[error(transparent)]
    NotSubmitted(#[from] SubmitError),
    /// The arbiter's response does not match the request.
    #[error("the arbiter sent an unexpected reply to {call}")]
    UnfitAnswer {
        /// The call.
        call: &'static str,
    },
}

/// A caller for messages; remote callers have no user id here.
fn caller(uid: &u32) -> String {
    match *uid {
        u32::MAX => "this client".to_owned(),
        uid => format!("uid {uid}"),
    }
}

/// The status for an answer of the arbiter that does not match the request.
pub(super) fn unfit(call: &'static str) -> Status {
    CallError::UnfitAnswer { call }.into()
}

/// The status of a denial.
pub fn of_denial(denial: &Denial, retry_after: Option<Duration>) -> Status {
    use Denial as D;
    let message = denial.to_string();
    let build = |code, reason| Builder::new(code, reason, &message);
    let soon = retry_after.unwrap_or(RETRY_AFTER);
    let builder = match denial {
        D::InsufficientMemory {
            tenant,
            asked,
            free,
            reclaimable,
            budget,
            holders,
        } => build(Code::ResourceExhausted, "INSUFFICIENT_MEMORY")
            .with("tenant", tenant)
            .with_bytes("asked_bytes", *asked)
            .with_bytes("free_bytes", *free)
            .with_bytes("reclaimable_bytes", *reclaimable)
            .with_bytes("budget_bytes", *budget)
            .with("holders", holders.to_string().trim())
            .memory_limit(*budget)
            .retry(soon),
        D::ExceedsBudget {
            tenant,
            asked,
            budget,
        } => build(Code::FailedPrecondition, "EXCEEDS_BUDGET")
            .with("tenant", tenant)
            .with_bytes("asked_bytes", *asked)
            .with_bytes("budget_bytes", *budget)
            .memory_limit(*budget),
        D::Invalid {
            tenant,
            field,
            value,
            problem,
        } => build(Code::InvalidArgument, "INVALID_FIELD")
            .with("tenant", tenant)
            .invalid_field(proto_field(field), value, &problem.to_string()),
        D::RequestIdReused { tenant, request_id } => {
            build(Code::AlreadyExists, "REQUEST_ID_REUSED")
                .with("tenant", tenant)
                .with("request_id", request_id)
        }
        D::QuotaExceeded {
            tenant,
            what,
            limit,
        } => build(Code::ResourceExhausted, "QUOTA_EXCEEDED")
            .with("tenant", tenant)
            .with("quota", what)
            .with("limit", limit)
            .quota(&what.to_string(), &what.to_string(), *limit)
            .retry(retry_after),
        D::UnknownLease { lease } => {
            build(Code::NotFound, "UNKNOWN_LEASE").resource("lease", lease)
        }
        D::Replaced { lease } => build(Code::Aborted, "REPLACED").with("lease", lease),
        D::StaleGeneration {
            lease,
            generation,
            current,
        } => build(Code::FailedPrecondition, "STALE_GENERATION")
            .with("lease", lease)
            .with("generation", generation)
            .with("current", current),
        D::NotHolder {
            lease,
            uid,
            problem,
        } => build(Code::PermissionDenied, "NOT_HOLDER")
            .with("lease", lease)
            .with("uid", uid)
            .with("problem", problem),
        D::CgroupHeld {
            tenant,
            cgroup,
            held,
            lease,
        } => build(Code::FailedPrecondition, "CGROUP_HELD")
            .with("tenant", tenant)
            .with("cgroup", cgroup)
            .with("held", held)
            .with("lease", lease),
        D::StaleSample {
            tenant,
            asked,
            age,
            limit,
        } => build(Code::Unavailable, "STALE_SAMPLE")
            .with("tenant", tenant)
            .with_bytes("asked_bytes", *asked)
            .with("age_ms", age.as_millis())
            .with("limit_ms", limit.as_millis())
            .retry(soon),
        D::PressureHigh {
            tenant,
            asked,
            class,
            level,
        } => build(Code::ResourceExhausted, "PRESSURE_HIGH")
            .with("tenant", tenant)
            .with_bytes("asked_bytes", *asked)
            .with("class", class)
            .with("level", level)
            .retry(soon),
        D::NotGrowing { wait } => build(Code::FailedPrecondition, "NOT_GROWING")
            .with("wait", wait)
            .retry(retry_after),
        D::Draining { tenant, asked } => build(Code::Unavailable, "DRAINING")
            .with("tenant", tenant)
            .with_bytes("asked_bytes", *asked)
            .retry(retry_after.unwrap_or(RESTART_AFTER)),
    };
    match hint(denial) {
        Some(hint) => builder.with("hint", hint).status(),
        None => builder.status(),
    }
}

impl From<CallError> for Status {
    fn from(error: CallError) -> Self {
        use CallError as E;
        let message = error.to_string();
        let build = |code, reason| Builder::new(code, reason, &message);
        let builder = match error {
            E::RoleMissing {
                call,
                uid,
                role,
                needed,
                remedy,
            } => build(Code::PermissionDenied, "ROLE_MISSING")
                .with("call", call)
                .with("uid", uid)
                .with("role", role)
                .with("needed", needed)
                .with("hint", remedy),
            E::DeadlinePassed { allowed } => build(Code::DeadlineExceeded, "DEADLINE_PASSED")
                .with("allowed_ms", allowed.as_millis()),
            E::InvalidField {
                field,
                value,
                problem,
            } => {
                build(Code::InvalidArgument, "INVALID_FIELD").invalid_field(field, &value, &problem)
            }
            E::NotTheWorker {
                worker,
                runs_as,
                asker,
            } => build(Code::PermissionDenied, "NOT_HOLDER")
                .with("worker", worker)
                .with(
                    "pid",
                    runs_as.map(|pid| pid.to_string()).unwrap_or_default(),
                )
                .with("asker", asker),
            E::OfAWorker {
                worker,
                runs_as,
                asker,
                ..
            } => build(Code::PermissionDenied, "NOT_HOLDER")
                .with("worker", worker)
                .with("pid", runs_as)
                .with("asker", asker),
            E::NotThePathSocket { cgroup } => build(Code::PermissionDenied, "PATH_SOCKET_NEEDED")
                .with("cgroup", cgroup)
                .with(
                    "hint",
                    "connect to the path socket, `grpc.socket` of the configuration",
                ),
            E::UnknownCgroup { cgroup, .. } => build(Code::NotFound, "UNKNOWN_CGROUP")
                .resource("cgroup", &cgroup)
                .with(
                    "hint",
                    "`systemctl show -P ControlGroup UNIT` prints the group of a unit",
                ),
            E::OurCgroup {
                cgroup,
                worker,
                runs_as,
            } => build(Code::FailedPrecondition, "CGROUP_HELD")
                .with("cgroup", cgroup)
                .with("worker", worker.unwrap_or_default())
                .with("pid", runs_as)
                .with("hint", "name a group without processes of the supervisor"),
            E::NotTheHolder {
                lease,
                holder,
                caller,
            } => build(Code::PermissionDenied, "NOT_HOLDER")
                .with("lease", lease)
                .with("holder", holder)
                .with("caller", caller),
            E::BootIdChanged {
                lease,
                given,
                current,
            } => build(Code::FailedPrecondition, "BOOT_ID_CHANGED")
                .with("lease", lease)
                .with("given_boot_id", given)
                .with("boot_id", current),
            E::UnknownLease { lease } => {
                build(Code::NotFound, "UNKNOWN_LEASE").resource("lease", &lease)
            }
            E::UnknownWorker { worker, known } => build(Code::NotFound, "UNKNOWN_WORKER")
                .with("known", known)
                .resource("worker", &worker),
            E::QuotaExceeded { what, limit } => build(Code::ResourceExhausted, "QUOTA_EXCEEDED")
                .with("quota", what)
                .with("limit", limit)
                .quota("peer", what, limit),
            E::ReaderStalled { patience } => {
                build(Code::Aborted, "READER_STALLED").with("patience_ms", patience.as_millis())
            }
            E::Stopping | E::NotSubmitted(SubmitError::Stopped) => {
                build(Code::Unavailable, "STOPPING").retry(RESTART_AFTER)
            }
            E::NotSubmitted(SubmitError::Full) => {
                build(Code::Unavailable, "OVERLOADED").retry(RETRY_AFTER)
            }
            E::ConfigInvalid { .. } => build(Code::FailedPrecondition, "CONFIG_INVALID"),
            E::UnfitAnswer { call } => build(Code::Internal, "UNFIT_ANSWER").with("call", call),
        };
        builder.status()
    }
}

/// The status of a refused request, with the figures that `conversation/refusals.rs` leaves to each protocol.
pub fn refused(refusal: Refusal) -> Status {
    use Refusal as R;
    let message = refusal.to_string();
    let build = |code, reason| Builder::new(code, reason, &message);
    let retry_after = refusal.retry_after().unwrap_or_default();
    let builder = match refusal {
        R::InsufficientMemory {
            asked,
            free,
            reclaimable,
            budget,
            ..
        } => build(Code::ResourceExhausted, "INSUFFICIENT_MEMORY")
            .with_bytes("asked_bytes", asked)
            .with_bytes("free_bytes", free)
            .with_bytes("reclaimable_bytes", reclaimable)
            .with_bytes("budget_bytes", budget)
            .memory_limit(budget)
            .retry(retry_after),
        R::PressureHigh { level, .. } => build(Code::ResourceExhausted, "PRESSURE_HIGH")
            .with("level", level)
            .retry(retry_after),
        R::ContextLengthExceeded {
            model,
            prompt,
            limit,
        } => build(Code::InvalidArgument, "CONTEXT_LENGTH_EXCEEDED")
            .with("model", model)
            .with("prompt_tokens", prompt)
            .with("context_tokens", limit)
            .bad_request("input", message.as_str()),
        // Not INVALID_ARGUMENT, which clients treat as permanent.
        R::KvCapacityShed {
            model,
            prompt,
            capacity,
            limit,
            ..
        } => build(Code::ResourceExhausted, "INSUFFICIENT_MEMORY")
            .with("model", model)
            .with("prompt_tokens", prompt)
            .with("capacity_tokens", capacity)
            .with("context_tokens", limit)
            .quota("pools/kv", "kv_capacity_tokens", u64::from(capacity.get()))
            .retry(retry_after),
        R::KvReclaimed { generated, .. } => build(Code::Aborted, "KV_RECLAIMED")
            .with("completion_tokens", generated)
            .retry(retry_after),
        R::QuotaExceeded { what, limit, .. } => build(Code::ResourceExhausted, "QUOTA_EXCEEDED")
            .with("quota", &what)
            .with("limit", limit)
            .quota(&what, &what, limit)
            .retry(retry_after),
        R::Draining { .. } => {
            build(Code::Unavailable, "DRAINING").retry(retry_after.max(RESTART_AFTER))
        }
        R::Starting { who, state, .. } => build(Code::Unavailable, "ENGINE_NOT_READY")
            .with("who", who)
            .with("state", state)
            .retry(retry_after),
        R::EngineLost { .. } => build(Code::Internal, "ENGINE_LOST"),
        R::ModelFailed { .. } => build(Code::FailedPrecondition, "MODEL_FAILED"),
        R::WorkerLost { worker, .. } => build(Code::Unavailable, "WORKER_LOST")
            .with("worker", worker)
            .retry(retry_after),
        R::NoThread { .. } => build(Code::Unavailable, "NO_THREAD").retry(retry_after),
        R::DeadlineUnreachable {
            patience_ms,
            expected_ms,
            ..
        } => build(Code::DeadlineExceeded, "DEADLINE_UNREACHABLE")
            .with("patience_ms", patience_ms)
            .with("expected_ms", expected_ms)
            .retry(retry_after),
        R::Invalid {
            field,
            value,
            problem,
        } => build(Code::InvalidArgument, "INVALID_FIELD").invalid_field(&field, &value, &problem),
        R::UnknownModel { model, .. } => {
            build(Code::NotFound, "UNKNOWN_MODEL").resource("model", &model)
        }
        R::NotConfigured { what, .. } => {
            build(Code::FailedPrecondition, "NOT_CONFIGURED").with("what", what)
        }
        R::Stopped { worker, .. } => {
            build(Code::FailedPrecondition, "STOPPED").with("worker", worker)
        }
    };
    builder.status()
}

/// A status with its details; values and message are shortened.
struct Builder<'a> {
    code: Code,
    reason: &'static str,
    message: &'a str,
    figures: HashMap<String, String>,
    details: ErrorDetails,
}

impl<'a> Builder<'a> {
    fn new(code: Code, reason: &'static str, message: &'a str) -> Self {
        Self {
            code,
            reason,
            message,
            figures: HashMap::new(),
            details: ErrorDetails::new(),
        }
    }

    fn with(mut self, name: &str, value: impl Display) -> Self {
        self.figures
            .insert(name.to_owned(), shorten(&value.to_string(), MESSAGE_MAX));
        self
    }

    fn with_bytes(self, name: &str, bytes: Bytes) -> Self {
        self.with(name, bytes.get())
    }

    fn retry(mut self, after: impl Into<Option<Duration>>) -> Self {
        self.details.set_retry_info(after.into());
        self
    }

    fn bad_request(mut self, field: &str, problem: &str) -> Self {
        self.details
            .set_bad_request(vec![FieldViolation::new(field, problem)]);
        self
    }

    fn invalid_field(self, field: &str, value: &str, problem: &str) -> Self {
        self.with("field", field)
            .bad_request(field, &format!("{}{problem}", quoted(value)))
    }

    /// Names the missing resource, also in the metadata under its kind.
    fn resource(mut self, kind: &str, name: &str) -> Self {
        self.details
            .set_resource_info(format!("{DOMAIN}.{kind}"), name, "", self.message);
        self.with(kind, name)
    }

    fn quota(mut self, subject: &str, metric: &str, value: u64) -> Self {
        self.details.set_quota_failure(vec![QuotaViolation {
            subject: subject.to_owned(),
            quota_metric: metric.to_owned(),
            quota_value: i64::try_from(value).unwrap_or(i64::MAX),
            ..QuotaViolation::new(subject, shorten(self.message, MESSAGE_MAX))
        }]);
        self
    }

    fn memory_limit(self, budget: Bytes) -> Self {
        self.quota("pools/unified", "unified_memory_bytes", budget.get())
    }

    fn status(mut self) -> Status {
        self.details
            .set_error_info(self.reason, DOMAIN, self.figures);
        Status::with_error_details(self.code, shorten(self.message, MESSAGE_MAX), self.details)
    }
}

/// The proto name of a field of policy.
fn proto_field(field: &str) -> &str {
    match field {
        "max" => "max_bytes",
        "min" => "min_bytes",
        "wait" => "max_wait",
        other => other,
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

/// Longest message or figure. A trailer contains it up to four times, enlarged by a third in base64, and clients refuse
/// trailers above 8 KiB (gRPC core: `grpc.max_metadata_size`).
const MESSAGE_MAX: usize = 1024;

/// Retry delay if the decision states none: a shed and its verification take less (our choice).
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Retry delay after a restart: `RestartSec=1s` of the unit, and as much again to start (our choice).
const RESTART_AFTER: Duration = Duration::from_secs(2);
