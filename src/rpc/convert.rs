//! Conversion between proto and domain types.

use std::time::{Duration, SystemTime};

use super::{
    status::{CallError, shorten},
    supervisor::Supervisor,
    v1,
};
use cotenant_policy::{
    death::DeathCertificate,
    engine_failure::NextTry,
    event::WorkerCommand,
    kv_type::KvType,
    lease::{Class, LeaseId, LeaseKind, LeaseState, LeaseView, Target},
    pressure::{GpuUse, PressureLevel},
    residency::{EnginePlan, ModelShape},
    snapshot::{EngineState, EngineView, Rest, Snapshot, WorkerState, WorkerView},
};
use cotenant_units::{Bytes, Timestamp};

/// Both clocks at one instant, to convert between them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock {
    now: Timestamp,
    wall: SystemTime,
}

impl Clock {
    /// From [`super::Supervisor::now`].
    pub(super) const fn new((now, wall): (Timestamp, SystemTime)) -> Self {
        Self { now, wall }
    }

    pub(super) fn time(self, at: Timestamp) -> prost_types::Timestamp {
        let time = if at > self.now {
            self.wall.checked_add(at.saturating_since(self.now))
        } else {
            self.wall.checked_sub(self.now.saturating_since(at))
        };
        let last = prost_types::Timestamp {
            seconds: MAX_SECONDS,
            nanos: 0,
        };
        time.map(prost_types::Timestamp::from)
            .filter(|time| time.seconds < MAX_SECONDS)
            .unwrap_or(last)
    }

    /// Time left until then.
    pub(super) fn left(self, at: Timestamp) -> prost_types::Duration {
        duration(at.saturating_since(self.now))
    }
}

/// Saturates.
pub(super) fn duration(duration: Duration) -> prost_types::Duration {
    prost_types::Duration::try_from(duration).unwrap_or(prost_types::Duration {
        seconds: i64::MAX,
        nanos: 0,
    })
}

pub(super) fn lease(view: &LeaseView, boot_id: &str, clock: Clock) -> v1::Lease {
    v1::Lease {
        name: view.name(),
        tenant: view.tenant.clone(),
        kind: match view.kind {
            LeaseKind::Engine => v1::LeaseKind::Engine,
            LeaseKind::Tenant => v1::LeaseKind::Tenant,
            LeaseKind::Worker => v1::LeaseKind::Worker,
        }
        .into(),
        lease_class: class(view.class).into(),
        state: match view.state {
            LeaseState::Requested => v1::LeaseState::Requested,
            LeaseState::Granted => v1::LeaseState::Granted,
            LeaseState::Revoking => v1::LeaseState::Revoking,
            LeaseState::Gone => v1::LeaseState::Gone,
        }
        .into(),
        boot_id: boot_id.to_owned(),
        generation: view.generation,
        held_bytes: view.memory.held.get(),
        min_bytes: view.memory.min.get(),
        max_bytes: view.memory.max.get(),
        used_bytes: view.memory.used.map(Bytes::get),
        measure_time: view.memory.used_at.map(|at| clock.time(at)),
        target: view
            .target
            .as_ref()
            .map(|at| target(at, String::new(), clock)),
        grant_time: (view.state != LeaseState::Requested).then(|| clock.time(view.granted_at)),
        expire_time: view.expires_at.map(|at| clock.time(at)),
        expires_in: view.expires_at.map(|at| clock.left(at)),
        owner_uid: view.owner.owner_uid,
        cgroup: view.owner.cgroup.clone().unwrap_or_default(),
    }
}

pub(super) fn target(target: &Target, reason: String, clock: Clock) -> v1::Target {
    v1::Target {
        nonce: target.nonce,
        target_bytes: target.bytes.get(),
        revoke_deadline: Some(clock.time(target.deadline)),
        deadline_in: Some(clock.left(target.deadline)),
        reason,
    }
}

/// A class on the wire.
pub const fn class(class: Class) -> v1::LeaseClass {
    match class {
        Class::AudioRealtime => v1::LeaseClass::AudioRealtime,
        Class::Interactive => v1::LeaseClass::Interactive,
        Class::LlmElastic => v1::LeaseClass::LlmElastic,
        Class::Batch => v1::LeaseClass::Batch,
    }
}

/// The state in one message, completed by [`Supervisor::complete`].
pub(super) fn full_status(supervisor: &dyn Supervisor) -> v1::GetStatusResponse {
    // Read before the state, so that the state contains every event up to it.
    let last_sequence = *supervisor.events().last_sequence().borrow();
    let snapshot = supervisor.snapshot().borrow().clone();
    let clock = Clock::new(supervisor.now());
    let mut status = status(&snapshot, supervisor.boot_id(), last_sequence, clock);
    supervisor.complete(&mut status);
    status
}

/// The arbiter's state in one message.
fn status(
    snapshot: &Snapshot,
    boot_id: &str,
    last_sequence: u64,
    clock: Clock,
) -> v1::GetStatusResponse {
    let sample = snapshot.pressure.sample.as_ref();
    let gpu = sample.and_then(|sample| sample.gpu.gpu_used);
    v1::GetStatusResponse {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        boot_id: boot_id.to_owned(),
        uptime: Some(duration(clock.now.since_start())),
        snapshot_time: Some(clock.time(snapshot.at)),
        last_sequence,
        budget: Some(v1::Budget {
            budget_bytes: snapshot.memory.budget.get(),
            held_bytes: snapshot.memory.held.get(),
            used_bytes: snapshot.memory.used.get(),
            unaccounted_bytes: snapshot.memory.unaccounted.get(),
            free_bytes: snapshot.memory.free.get(),
            supervisor_bytes: sample.and_then(|sample| sample.own_used).map(Bytes::get),
            total_bytes: snapshot.pressure.machine.total.get(),
        }),
        pressure: Some(v1::Pressure {
            level: match snapshot.pressure.level {
                PressureLevel::Normal => v1::PressureLevel::Normal,
                PressureLevel::Elevated => v1::PressureLevel::Elevated,
                PressureLevel::Critical => v1::PressureLevel::Critical,
            }
            .into(),
            headroom_bytes: snapshot.pressure.headroom.map(Bytes::get),
            elevated_below_bytes: snapshot.pressure.elevated_below.get(),
            critical_below_bytes: snapshot.pressure.critical_below.get(),
            mem_total_bytes: sample.map(|sample| sample.memory.mem_total.get()),
            mem_available_bytes: sample.map(|sample| sample.memory.mem_available.get()),
            cma_free_bytes: sample
                .and_then(|sample| sample.gpu.cma_free)
                .map(Bytes::get),
            // Hundredths of a percent.
            some_avg10_ratio: sample
                .and_then(|sample| sample.stalls.psi_some_avg10)
                .map(|avg10| f64::from(avg10) / 10_000.0),
            scope_used_bytes: sample.and_then(|sample| sample.scope_used).map(Bytes::get),
            oom_kills: sample.and_then(|sample| sample.counters.oom_kills),
            free_without_reclaim_bytes: sample.map(|sample| sample.free_without_reclaim().get()),
            nvmap_pool_bytes: sample
                .and_then(|sample| sample.gpu.nvmap_pool)
                .map(Bytes::get),
            losing_bytes_per_second: snapshot.pressure.losing_per_s.get(),
            exhausted_in: snapshot
                .pressure
                .exhausted_in
                .and_then(|left| left.try_into().ok()),
            stall_watch: sample
                .and_then(|sample| sample.stall_watch)
                .map_or_else(String::new, |watch| watch.to_string()),
            gpu_used_bytes: gpu.map(|gpu| gpu.bytes().get()),
            gpu_used_is_inferred: matches!(gpu, Some(GpuUse::Inferred(_))),
            zram_store_bytes: sample.and_then(|sample| sample.zram_store).map(Bytes::get),
            largest_free_block_bytes: sample
                .and_then(|sample| sample.largest_free)
                .map(Bytes::get),
            released_to_pool_bytes: snapshot.last_release.map(|release| release.to_pool.get()),
            released_to_os_bytes: snapshot.last_release.map(|release| release.to_os.get()),
            cma_failures: sample.and_then(|sample| sample.counters.cma_failures),
        }),
        engine: Some(engine(snapshot, clock)),
        workers: snapshot.workers.iter().map(worker).collect(),
        leases: snapshot
            .leases
            .iter()
            .map(|view| lease(view, boot_id, clock))
            .collect(),
        waiting_requests: snapshot.waiting,
        draining: snapshot.draining,
        limited_by: snapshot
            .pressure
            .machine
            .limited_by
            .clone()
            .unwrap_or_default(),
        reboot_advised: snapshot.reboot.iter().map(ToString::to_string).collect(),
        learned_peaks: snapshot
            .peaks
            .iter()
            .map(|peak| v1::LearnedPeak {
                holder: peak.holder.clone(),
                variant: peak.variant.clone().unwrap_or_default(),
                peak_bytes: peak.bytes.get(),
                lives: peak.lives,
            })
            .collect(),
        ..v1::GetStatusResponse::default()
    }
}

fn engine(snapshot: &Snapshot, clock: Clock) -> v1::Engine {
    let EngineView {
        state,
        shape,
        in_force,
        asked,
        full,
        waits,
        failure,
        milli_tokens_per_s,
        full_milli_tokens_per_s: _,
        kv,
        context: _,
    } = &snapshot.engine;
    let bytes_of = |plan: &Option<EnginePlan>| match (shape, plan) {
        (Some(shape), Some(plan)) => shape.plan_bytes(plan).get(),
        _ => 0,
    };
    v1::Engine {
        state: match state {
            EngineState::Absent => v1::EngineState::Absent,
            EngineState::Loading => v1::EngineState::Loading,
            EngineState::Ready => v1::EngineState::Ready,
            EngineState::Failed => v1::EngineState::Failed,
        }
        .into(),
        model: shape
            .as_ref()
            .map(|shape| shape.name.clone())
            .unwrap_or_default(),
        architecture: shape
            .as_ref()
            .map(|shape| shape.architecture.clone())
            .unwrap_or_default(),
        layers_total: shape.as_ref().map_or(0, ModelShape::layer_count),
        layers_resident: match (shape, in_force) {
            (Some(shape), Some(plan)) => shape.resident_layers(plan),
            _ => 0,
        },
        kv_capacity_tokens: in_force.as_ref().map_or(0, |plan| plan.kv_capacity.get()),
        kv_capacity_full_tokens: full.as_ref().map_or(0, |plan| plan.kv_capacity.get()),
        weights_resident_bytes: match (shape, in_force) {
            (Some(shape), Some(plan)) => weights(shape, plan).get(),
            _ => 0,
        },
        kv_capacity_bytes: match (shape, in_force) {
            (Some(shape), Some(plan)) => shape
                .kv
                .capacity_bytes(plan.kv_capacity, plan.kv_type)
                .get(),
            _ => 0,
        },
        plan_bytes: bytes_of(in_force),
        full_plan_bytes: bytes_of(full),
        changing: asked.is_some(),
        failure: failure
            .as_ref()
            .map(ToString::to_string)
            .unwrap_or_default(),
        failed_permanently: failure
            .as_ref()
            .is_some_and(|failure| failure.permanent().is_some()),
        next_try: match failure.as_ref().map(|failure| &failure.next) {
            Some(NextTry::At(at)) => Some(clock.left(*at)),
            _ => None,
        },
        sheds: snapshot.totals.sheds,
        shed_bytes: snapshot.totals.shed_bytes.get(),
        regrown_bytes: snapshot.totals.regrown_bytes.get(),
        milli_tokens_per_second: milli_tokens_per_s.unwrap_or(0),
        kv_type: in_force
            .as_ref()
            .map_or(v1::KvType::Unspecified, |plan| kv_type(plan.kv_type))
            .into(),
        kv_used_tokens: kv.used.get(),
        kv_kept_tokens: kv.kept.get(),
        kv_dropped_tokens: kv.dropped.get(),
        kv_untouched_bytes: kv.untouched.get(),
        prefill_chunk_tokens: in_force.as_ref().map_or(0, |plan| plan.prefill_chunk.get()),
        growth_waits: waits.map_or_else(String::new, |wait| wait.to_string()),
        kv_block_tokens: shape
            .as_ref()
            .map_or(0, |shape| shape.kv.block_tokens.get()),
        ..v1::Engine::default()
    }
}

pub(super) const fn kv_type(kind: KvType) -> v1::KvType {
    match kind {
        KvType::F16 => v1::KvType::F16,
        KvType::Q8 => v1::KvType::Q8,
        KvType::Q4 => v1::KvType::Q4,
    }
}

fn weights(shape: &ModelShape, plan: &EnginePlan) -> Bytes {
    (0u32..)
        .zip(&shape.layers)
        .filter(|(index, _)| plan.resident.contains(index))
        .fold(Bytes::ZERO, |sum, (_, layer)| {
            sum.saturating_add(layer.resident_bytes)
        })
}

fn worker(view: &WorkerView) -> v1::Worker {
    let death = view.last_death.as_ref();
    v1::Worker {
        name: view.name.clone(),
        state: match view.state {
            WorkerState::Stopped => v1::WorkerState::Stopped,
            WorkerState::AwaitingMemory => v1::WorkerState::AwaitingMemory,
            WorkerState::BackingOff => v1::WorkerState::BackingOff,
            WorkerState::Starting => v1::WorkerState::Starting,
            WorkerState::Ready => v1::WorkerState::Ready,
            WorkerState::Stopping => v1::WorkerState::Stopping,
            WorkerState::Degraded => v1::WorkerState::Degraded,
        }
        .into(),
        pid: view.pid,
        variant: view.variant.clone().unwrap_or_default(),
        starts: view.starts,
        failures: view.failures,
        last_exit: view.last_exit.clone().unwrap_or_default(),
        resting: match view.rest {
            None => "",
            Some(Rest::Idle) => "idle",
            Some(Rest::Operator) => "operator",
            Some(Rest::Shed) => "shed",
        }
        .to_owned(),
        winding_up: view.winding_up,
        death_class: death.map_or_else(String::new, |death| death.class.name().to_owned()),
        needs_operator: death.is_some_and(|death| death.needs_operator),
        remedy: death
            .and_then(|death| death.remedy.clone())
            .unwrap_or_default(),
        waits_for: view
            .waits
            .as_ref()
            .map(ToString::to_string)
            .unwrap_or_default(),
        ..v1::Worker::default()
    }
}

pub(super) fn death(certificate: &DeathCertificate) -> v1::DeathCertificate {
    let end = SystemTime::UNIX_EPOCH + Duration::from_micros(certificate.end.ended_unix_us);
    v1::DeathCertificate {
        worker: certificate.worker.clone(),
        start: certificate.start,
        pid: certificate.pid,
        death_class: certificate.verdict.class.name().to_owned(),
        confidence: certificate.verdict.confidence.to_string(),
        sentence: certificate.verdict.sentence.clone(),
        remedy: certificate.verdict.remedy.clone().unwrap_or_default(),
        needs_operator: certificate.verdict.needs_operator,
        exit_code: certificate.end.exit_code,
        signal: certificate.end.signal,
        end_time: Some(end.into()),
        lived: Some(duration(Duration::from_millis(certificate.end.lived_ms))),
        certificate_delay: Some(duration(Duration::from_micros(certificate.took_us))),
        certificate_json: serde_json::to_string(certificate).unwrap_or_default(),
    }
}

/// An event as it is sent.
pub(super) fn journal_entry(record: &v1::JournalEntry, boot_id: &str) -> v1::JournalEntry {
    v1::JournalEntry {
        boot_id: boot_id.to_owned(),
        ..record.clone()
    }
}

pub(super) fn class_of(number: i32) -> Result<Class, CallError> {
    match v1::LeaseClass::try_from(number) {
        Ok(v1::LeaseClass::AudioRealtime) => Ok(Class::AudioRealtime),
        Ok(v1::LeaseClass::Interactive) => Ok(Class::Interactive),
        Ok(v1::LeaseClass::LlmElastic) => Ok(Class::LlmElastic),
        Ok(v1::LeaseClass::Batch) => Ok(Class::Batch),
        Ok(v1::LeaseClass::Unspecified) => refuse("lease_class", "", "is not set"),
        Err(_) => refuse("lease_class", &number.to_string(), "is not a known class"),
    }
}

/// Checks that clients may request a lease of this kind.
pub(super) fn tenant_kind(number: i32) -> Result<(), CallError> {
    match v1::LeaseKind::try_from(number) {
        Ok(v1::LeaseKind::Unspecified | v1::LeaseKind::Tenant) => Ok(()),
        Ok(kind @ (v1::LeaseKind::Engine | v1::LeaseKind::Worker)) => refuse(
            "kind",
            kind.as_str_name(),
            "is reserved for the supervisor: request LEASE_KIND_TENANT",
        ),
        Err(_) => refuse("kind", &number.to_string(), "is not a known kind"),
    }
}

pub(super) fn command_of(number: i32) -> Result<WorkerCommand, CallError> {
    match v1::WorkerCommand::try_from(number) {
        Ok(v1::WorkerCommand::Start) => Ok(WorkerCommand::Start),
        Ok(v1::WorkerCommand::Stop) => Ok(WorkerCommand::Stop),
        Ok(v1::WorkerCommand::Recycle) => Ok(WorkerCommand::Recycle),
        Ok(v1::WorkerCommand::Unspecified) => refuse("command", "", "is not set"),
        Err(_) => refuse("command", &number.to_string(), "is not a known command"),
    }
}

pub(super) fn kv_type_of(number: i32) -> Result<KvType, CallError> {
    match v1::KvType::try_from(number) {
        Ok(v1::KvType::F16) => Ok(KvType::F16),
        Ok(v1::KvType::Q8) => Ok(KvType::Q8),
        Ok(v1::KvType::Q4) => Ok(KvType::Q4),
        Ok(v1::KvType::Unspecified) => refuse("kv_type", "", "is not set"),
        Err(_) => refuse("kv_type", &number.to_string(), "is not a known type"),
    }
}

/// The number in a lease's name, `asr#7`.
pub(super) fn lease_id_of(name: &str) -> Result<LeaseId, CallError> {
    name.rsplit_once('#')
        .filter(|(tenant, number)| {
            !tenant.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
        })
        .and_then(|(_, number)| number.parse().ok())
        .map(LeaseId)
        .ok_or_else(|| invalid("name", name, "is not the name of a lease, such as `asr#7`"))
}

/// Minimum and maximum size of a request; a maximum of zero equals the minimum.
pub(super) fn sizes_of(min: u64, max: u64) -> Result<(Bytes, Bytes), CallError> {
    let min = size_of("min_bytes", min)?;
    if max == 0 {
        return Ok((min, min));
    }
    let max = size_of("max_bytes", max)?;
    if max < min {
        return refuse(
            "max_bytes",
            &max.to_string(),
            &format!("is below min_bytes, {min}"),
        );
    }
    Ok((min, max))
}

/// A size above zero and within [`SIZE_MAX`].
pub(super) fn size_of(field: &'static str, bytes: u64) -> Result<Bytes, CallError> {
    match bytes {
        0 => refuse(field, "0", "is not above zero"),
        bytes if bytes > SIZE_MAX => refuse(
            field,
            &Bytes::new(bytes).to_string(),
            &format!("is above the limit of {}", Bytes::new(SIZE_MAX)),
        ),
        bytes => Ok(Bytes::new(bytes)),
    }
}

/// A time span of a request; `None` if unset.
pub(super) fn span_of(
    field: &'static str,
    span: Option<prost_types::Duration>,
    limit: Duration,
) -> Result<Option<Duration>, CallError> {
    let Some(span) = span else { return Ok(None) };
    let value = format!("{}.{:09}s", span.seconds, span.nanos);
    // Manual conversion: `Duration::try_from` of prost-types 0.14 panics at the least number of seconds.
    let span = match (u64::try_from(span.seconds), u32::try_from(span.nanos)) {
        (Ok(seconds), Ok(nanos)) if nanos < 1_000_000_000 => Duration::new(seconds, nanos),
        (Ok(_), Ok(_)) => return refuse(field, &value, "has a second or more in its nanoseconds"),
        _ => return refuse(field, &value, "is negative"),
    };
    if span > limit {
        return refuse(
            field,
            &value,
            &format!("is above the limit of {} s", limit.as_secs()),
        );
    }
    Ok(Some(span))
}

/// A name of 1 to `limit` characters: a letter, then letters, digits, `-`, `_` and `.`.
pub(super) fn name_of(
    field: &'static str,
    name: String,
    limit: usize,
) -> Result<String, CallError> {
    let mut characters = name.chars();
    let fits = characters
        .next()
        .is_some_and(|first| first.is_ascii_alphabetic())
        && characters.all(|next| next.is_ascii_alphanumeric() || matches!(next, '-' | '_' | '.'))
        && name.len() <= limit;
    if fits {
        Ok(name)
    } else {
        refuse(
            field,
            &name,
            &format!(
                "is not a name of 1 to {limit} characters: a letter, then letters, digits, `-`, `_`, `.`"
            ),
        )
    }
}

/// The path of a control group, or `None` if it is empty.
pub(super) fn cgroup_of(path: String) -> Result<Option<String>, CallError> {
    let below = path.strip_prefix('/').unwrap_or("..");
    let is_step = |part: &str| !matches!(part, "" | "." | "..") && !part.contains(char::is_control);
    match path.as_str() {
        "" => Ok(None),
        "/" => refuse(
            "cgroup",
            &path,
            "is the root group, which has every process: name a group below it",
        ),
        _ if path.len() > CGROUP_MAX => refuse(
            "cgroup",
            &path,
            &format!("has {} bytes, at most {CGROUP_MAX} are read", path.len()),
        ),
        _ if below.split('/').all(is_step) => Ok(Some(path)),
        _ => refuse(
            "cgroup",
            &path,
            "is not an absolute path without `.`, `..`, `//` and a slash at its end",
        ),
    }
}

/// Longest path of a control group: those of pods have some 200 bytes (our choice).
const CGROUP_MAX: usize = 1024;

/// The error for a field of a request.
pub(super) fn invalid(field: &'static str, value: &str, problem: &str) -> CallError {
    CallError::InvalidField {
        field,
        value: shorten(value, VALUE_SHOWN),
        problem: problem.to_owned(),
    }
}

/// Refuses a field of a request.
///
/// # Errors
/// Always [`invalid`].
pub(super) fn refuse<T, E: From<CallError>>(
    field: &'static str,
    value: &str,
    problem: &str,
) -> Result<T, E> {
    Err(invalid(field, value, problem).into())
}

/// Shown characters of a faulty value.
const VALUE_SHOWN: usize = 80;

/// 1 PiB: above every machine's memory, and small enough that sums of sizes do not overflow.
const SIZE_MAX: u64 = 1 << 50;

/// The last second of a proto timestamp: the end of the year 9999.
const MAX_SECONDS: i64 = 253_402_300_799;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_leases_are_read() {
        assert_eq!(lease_id_of("asr#7").unwrap(), LeaseId(7));
        assert_eq!(lease_id_of("a#b#12").unwrap(), LeaseId(12));
        for name in [
            "",
            "asr",
            "asr#",
            "#7",
            "asr#-1",
            "asr#+7",
            "asr#99999999999999999999",
        ] {
            assert!(lease_id_of(name).is_err(), "{name}");
        }
    }

    #[test]
    fn zero_and_absurd_sizes_are_refused() {
        assert!(sizes_of(0, 5).is_err());
        assert!(sizes_of(6, 5).is_err());
        assert!(sizes_of(u64::MAX, 0).is_err());
        assert!(sizes_of(1, u64::MAX).is_err());
        assert_eq!(sizes_of(5, 0).unwrap(), (Bytes::new(5), Bytes::new(5)));
        assert_eq!(sizes_of(5, 9).unwrap(), (Bytes::new(5), Bytes::new(9)));
    }

    #[test]
    fn negative_and_endless_spans_are_refused() {
        let limit = Duration::from_secs(60);
        let span = |seconds, nanos| Some(prost_types::Duration { seconds, nanos });
        assert_eq!(span_of("term", None, limit).unwrap(), None);
        assert_eq!(
            span_of("term", span(1, 5), limit).unwrap(),
            Some(Duration::new(1, 5))
        );
        for (seconds, nanos) in [
            (-1, 0),
            (0, -1),
            (61, 0),
            (i64::MAX, i32::MAX),
            (i64::MIN, i32::MIN),
        ] {
            assert!(
                span_of("term", span(seconds, nanos), limit).is_err(),
                "{seconds} {nanos}"
            );
        }
    }

    #[test]
    fn a_wall_clock_that_goes_back_changes_no_time_that_is_left() {
        let (now, end) = (
            Timestamp::from_millis(5_000),
            Timestamp::from_millis(35_000),
        );
        let noon = SystemTime::UNIX_EPOCH + Duration::from_secs(43_200);
        let before = Clock::new((now, noon));
        let after = Clock::new((now, SystemTime::UNIX_EPOCH));
        assert_eq!(before.left(end), after.left(end));
        assert_eq!(after.left(end).seconds, 30);
        assert_eq!(before.time(end).seconds - after.time(end).seconds, 43_200);
        // Times before the epoch, from a clock that was never set, must not panic.
        assert_eq!(after.time(Timestamp::START).seconds, -5);
    }

    #[test]
    fn a_time_without_end_is_shown_as_the_last_one() {
        let clock = Clock::new((Timestamp::from_millis(5), SystemTime::UNIX_EPOCH));
        assert_eq!(clock.time(Timestamp::from_millis(1005)).seconds, 1);
        assert_eq!(clock.left(Timestamp::from_millis(4)).seconds, 0);
        assert!(clock.time(Timestamp::NEVER).seconds <= MAX_SECONDS);
    }
}
