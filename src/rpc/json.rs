//! Messages as JSON documents: names of proto3 JSON, with 64-bit integers as numbers.

use std::time::Duration;

use serde_json::{Value, json};

use super::{convert, supervisor::Supervisor, v1};

/// The state with its last events, for the page at `/`.
pub fn document(supervisor: &dyn Supervisor) -> Value {
    let mut document = status(&convert::full_status(supervisor));
    let log = supervisor.events().after(0, usize::MAX);
    let mut events: Vec<Value> = Vec::new();
    for record in log
        .records
        .iter()
        .rev()
        .filter(|record| !record.summary.is_empty())
    {
        if events.len() == EVENTS_SHOWN {
            break;
        }
        if record.name != "sampled" {
            let mut without_body = convert::journal_entry(record, supervisor.boot_id());
            without_body.body_json.clear();
            events.push(entry(&without_body));
        }
    }
    events.reverse();
    if let Some(fields) = document.as_object_mut() {
        fields.insert("events".to_owned(), Value::Array(events));
    }
    document
}

/// Name of an enum value without the prefix of its type: `audio_realtime`.
pub fn word(name: &str, prefix: &str) -> String {
    name.strip_prefix(prefix).unwrap_or(name).to_lowercase()
}

fn seconds(span: &prost_types::Duration) -> Value {
    // Proto3 JSON writes a duration as seconds with an `s`.
    Value::String(format!(
        "{}.{:06}s",
        span.seconds,
        span.nanos.unsigned_abs() / 1000
    ))
}

fn time(time: &prost_types::Timestamp) -> Value {
    Value::String(time.to_string())
}

/// A message as an object, with field names of proto3 JSON; values may be given explicitly. Nulls and empty texts are
/// omitted, as in proto3 JSON.
macro_rules! object {
    (@value $message:ident $field:ident) => { json!($message.$field) };
    (@value $message:ident $field:ident $value:expr) => { json!($value) };
    ($message:ident; $($field:ident $(= $value:expr)?),+ $(,)?) => {
        object([$((stringify!($field), object!(@value $message $field $($value)?))),+])
    };
}

fn object<const N: usize>(fields: [(&str, Value); N]) -> Value {
    let present = fields
        .into_iter()
        .filter(|(_, value)| !value.is_null() && value.as_str() != Some(""));
    present
        .map(|(name, value)| (camel_case(name), value))
        .collect()
}

/// A field's name in proto3 JSON: `ended_unix_us` becomes `endedUnixUs`.
pub fn camel_case(field: &str) -> String {
    let mut words = field.split('_');
    let mut name = words.next().unwrap_or_default().to_owned();
    for word in words {
        let mut letters = word.chars();
        name.extend(letters.next().map(|letter| letter.to_ascii_uppercase()));
        name.push_str(letters.as_str());
    }
    name
}

/// A lease.
pub fn lease(lease: &v1::Lease) -> Value {
    object!(lease;
        name, tenant,
        kind = lease.kind().as_str_name(),
        lease_class = lease.lease_class().as_str_name(),
        state = lease.state().as_str_name(),
        boot_id, generation, held_bytes, min_bytes, max_bytes, used_bytes,
        measure_time = lease.measure_time.as_ref().map(time),
        target = lease.target.as_ref().map(target_json),
        grant_time = lease.grant_time.as_ref().map(time),
        expire_time = lease.expire_time.as_ref().map(time),
        expires_in = lease.expires_in.as_ref().map(seconds),
        owner_uid, cgroup,
    )
}

fn target_json(target: &v1::Target) -> Value {
    object!(target;
        nonce, target_bytes,
        revoke_deadline = target.revoke_deadline.as_ref().map(time),
        deadline_in = target.deadline_in.as_ref().map(seconds),
        reason,
    )
}

/// The state.
pub fn status(status: &v1::GetStatusResponse) -> Value {
    object!(status;
        version, boot_id,
        uptime = status.uptime.as_ref().map(seconds),
        snapshot_time = status.snapshot_time.as_ref().map(time),
        last_sequence,
        budget = status.budget.as_ref().map(budget_json),
        pressure = status.pressure.as_ref().map(pressure_json),
        engine = status.engine.as_ref().map(engine_json),
        workers = status.workers.iter().map(worker_json).collect::<Value>(),
        leases = status.leases.iter().map(lease).collect::<Value>(),
        waiting_requests, running_answers, draining,
        learned_peaks = status.learned_peaks.iter().map(peak_json).collect::<Value>(),
        locked = (!status.locked.is_empty()).then_some(&status.locked),
        standby_served, standby_missed, next_shed,
        reboot_advised = (!status.reboot_advised.is_empty()).then_some(&status.reboot_advised),
        absent_addresses = (!status.absent_addresses.is_empty()).then_some(&status.absent_addresses),
        limited_by = (!status.limited_by.is_empty()).then_some(&status.limited_by),
    )
}

fn budget_json(budget: &v1::Budget) -> Value {
    // Without `object!`, so that an unknown own use of the supervisor is shown as null.
    json!({
        "budgetBytes": budget.budget_bytes,
        "heldBytes": budget.held_bytes,
        "usedBytes": budget.used_bytes,
        "unaccountedBytes": budget.unaccounted_bytes,
        "supervisorBytes": budget.supervisor_bytes,
        "freeBytes": budget.free_bytes,
        "totalBytes": budget.total_bytes,
    })
}

fn peak_json(peak: &v1::LearnedPeak) -> Value {
    object!(peak; holder, variant, peak_bytes, lives)
}

fn pressure_json(pressure: &v1::Pressure) -> Value {
    object!(pressure;
        level = pressure.level().as_str_name(),
        headroom_bytes, elevated_below_bytes, critical_below_bytes, mem_total_bytes, mem_available_bytes,
        cma_free_bytes, some_avg10_ratio, scope_used_bytes, oom_kills, free_without_reclaim_bytes,
        nvmap_pool_bytes, gpu_used_bytes,
        gpu_used_is_inferred = pressure.gpu_used_bytes.map(|_| pressure.gpu_used_is_inferred),
        zram_store_bytes, largest_free_block_bytes, released_to_pool_bytes, released_to_os_bytes,
        cma_failures, losing_bytes_per_second,
        exhausted_in = pressure.exhausted_in.as_ref().map(seconds),
        stall_watch,
    )
}

fn engine_json(engine: &v1::Engine) -> Value {
    let is_loading = engine.load_bytes > 0;
    object!(engine;
        state = engine.state().as_str_name(),
        model, architecture, layers_total, layers_resident, kv_capacity_tokens, kv_capacity_full_tokens,
        weights_resident_bytes, kv_capacity_bytes,
        kv_type = word(engine.kv_type().as_str_name(), "KV_TYPE_"),
        kv_used_tokens, kv_kept_tokens, kv_dropped_tokens, kv_untouched_bytes, prefill_chunk_tokens,
        command_gap_max_ms = command_gap_ms(engine),
        plan_bytes, full_plan_bytes, changing,
        milli_tokens_per_second = Some(engine.milli_tokens_per_second).filter(|speed| *speed > 0),
        growth_waits,
        load_read_bytes = is_loading.then_some(engine.load_read_bytes),
        load_bytes = is_loading.then_some(engine.load_bytes),
        kv_block_tokens,
        experts = engine.experts.as_ref().map(|experts| object!(experts; total, resident, found, read)),
        sequences = engine.sequences.iter().map(sequence_json).collect::<Value>(),
        failure,
        failed_permanently = engine.failed_permanently.then_some(true),
        next_try = engine.next_try.as_ref().map(seconds),
        sheds, shed_bytes, regrown_bytes,
    )
}

fn sequence_json(sequence: &v1::Sequence) -> Value {
    object!(sequence;
        id,
        state = sequence.state().as_str_name(),
        client,
        class = word(sequence.lease_class().as_str_name(), "LEASE_CLASS_"),
        prompt_tokens, reused_tokens, generated_tokens, kv_tokens, kv_bytes, kv_blocks,
        shared_bytes = Some(sequence.shared_bytes).filter(|bytes| *bytes > 0),
        waited = sequence.waited.as_ref().map(seconds),
        idle = sequence.idle.as_ref().map(seconds),
        disk_bytes = Some(sequence.disk_bytes).filter(|bytes| *bytes > 0),
    )
}

fn worker_json(worker: &v1::Worker) -> Value {
    object!(worker;
        name,
        state = worker.state().as_str_name(),
        pid, variant, starts, failures, last_exit, death_class,
        needs_operator = worker.needs_operator.then_some(true),
        remedy, waits_for, resting,
        winding_up = worker.winding_up.then_some(true),
        confinement = (!worker.confinement.is_empty()).then_some(&worker.confinement),
    )
}

/// An event.
pub fn entry(entry: &v1::JournalEntry) -> Value {
    object!(entry;
        sequence, boot_id,
        at = entry.at.as_ref().map(seconds),
        time = entry.time.as_ref().map(time),
        kind = entry.kind().as_str_name(),
        name, summary,
        // A nested document rather than text; omitted if unreadable.
        body = serde_json::from_str::<Value>(&entry.body_json).ok(),
    )
}

/// The longest time without accepting commands, in ms.
pub fn command_gap_ms(engine: &v1::Engine) -> Option<f64> {
    let gap = engine.command_gap_max.as_ref()?;
    Duration::try_from(*gap)
        .ok()
        .map(|gap| gap.as_secs_f64() * 1e3)
}

/// Events in a document. Our choice: one screen.
const EVENTS_SHOWN: usize = 40;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_stay_numbers_in_json() {
        let held = v1::Lease {
            name: "asr#1".into(),
            held_bytes: u64::MAX,
            ..v1::Lease::default()
        };
        assert_eq!(lease(&held)["heldBytes"], json!(u64::MAX));
        assert_eq!(lease(&held).get("usedBytes"), None);
    }
}
