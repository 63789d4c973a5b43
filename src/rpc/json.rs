//! Messages as JSON documents: names of proto3 JSON, with 64-bit numbers as numbers.

use std::time::Duration;

use serde_json::{Map, Value, json};

use super::{convert, supervisor::Supervisor, v1};

/// The state with its last events: what the page at `/` shows.
#[must_use]
pub fn document(supervisor: &dyn Supervisor) -> Value {
    let mut document = status(&convert::full_status(supervisor));
    let log = supervisor.events().after(0, usize::MAX);
    let mut events: Vec<Value> = Vec::new();
    for record in log.records.iter().rev().filter(|record| !record.summary.is_empty()) {
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

/// Name of an enum's value without the prefix of its type: `audio_realtime`.
#[must_use]
pub fn word(name: &str, prefix: &str) -> String {
    name.strip_prefix(prefix).unwrap_or(name).to_lowercase()
}

fn seconds(span: &prost_types::Duration) -> Value {
    // Proto3 JSON writes a duration as seconds with an `s`.
    Value::String(format!("{}.{:06}s", span.seconds, span.nanos.unsigned_abs() / 1000))
}

fn time(time: &prost_types::Timestamp) -> Value {
    Value::String(time.to_string())
}

/// Leaves out what is not there, as proto3 JSON does.
fn object(fields: impl IntoIterator<Item = (&'static str, Option<Value>)>) -> Value {
    let fields: Map<_, _> = fields.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect();
    Value::Object(fields)
}

fn text(text: &str) -> Option<Value> {
    (!text.is_empty()).then(|| json!(text))
}

/// A lease.
#[must_use]
pub fn lease(lease: &v1::Lease) -> Value {
    object([
        ("name", Some(json!(lease.name))),
        ("tenant", Some(json!(lease.tenant))),
        ("kind", Some(json!(lease.kind().as_str_name()))),
        ("leaseClass", Some(json!(lease.lease_class().as_str_name()))),
        ("state", Some(json!(lease.state().as_str_name()))),
        ("bootId", Some(json!(lease.boot_id))),
        ("generation", Some(json!(lease.generation))),
        ("heldBytes", Some(json!(lease.held_bytes))),
        ("minBytes", Some(json!(lease.min_bytes))),
        ("maxBytes", Some(json!(lease.max_bytes))),
        ("usedBytes", lease.used_bytes.map(|used| json!(used))),
        ("measureTime", lease.measure_time.as_ref().map(time)),
        (
            "target",
            lease.target.as_ref().map(|target| {
                object([
                    ("nonce", Some(json!(target.nonce))),
                    ("targetBytes", Some(json!(target.target_bytes))),
                    ("revokeDeadline", target.revoke_deadline.as_ref().map(time)),
                    ("deadlineIn", target.deadline_in.as_ref().map(seconds)),
                    ("reason", text(&target.reason)),
                ])
            }),
        ),
        ("grantTime", lease.grant_time.as_ref().map(time)),
        ("expireTime", lease.expire_time.as_ref().map(time)),
        ("expiresIn", lease.expires_in.as_ref().map(seconds)),
        ("ownerUid", Some(json!(lease.owner_uid))),
    ])
}

/// The state.
#[must_use]
pub fn status(status: &v1::GetStatusResponse) -> Value {
    object([
        ("version", Some(json!(status.version))),
        ("bootId", Some(json!(status.boot_id))),
        ("uptime", status.uptime.as_ref().map(seconds)),
        ("snapshotTime", status.snapshot_time.as_ref().map(time)),
        ("lastSequence", Some(json!(status.last_sequence))),
        (
            "budget",
            status.budget.as_ref().map(|budget| {
                json!({
                    "budgetBytes": budget.budget_bytes,
                    "heldBytes": budget.held_bytes,
                    "usedBytes": budget.used_bytes,
                    "unaccountedBytes": budget.unaccounted_bytes,
                    "supervisorBytes": budget.supervisor_bytes,
                    "freeBytes": budget.free_bytes,
                })
            }),
        ),
        ("pressure", status.pressure.as_ref().map(pressure_json)),
        ("engine", status.engine.as_ref().map(engine_json)),
        ("workers", Some(status.workers.iter().map(worker_json).collect())),
        ("leases", Some(status.leases.iter().map(lease).collect())),
        ("waitingRequests", Some(json!(status.waiting_requests))),
        ("draining", Some(json!(status.draining))),
        ("learnedPeaks", Some(status.learned_peaks.iter().map(peak_json).collect())),
        ("locked", (!status.locked.is_empty()).then(|| json!(status.locked))),
        ("standbyServed", Some(json!(status.standby_served))),
        ("standbyMissed", Some(json!(status.standby_missed))),
        ("nextShed", text(&status.next_shed)),
        ("rebootAdvised", (!status.reboot_advised.is_empty()).then(|| json!(status.reboot_advised))),
    ])
}

fn peak_json(peak: &v1::LearnedPeak) -> Value {
    object([
        ("holder", Some(json!(peak.holder))),
        ("variant", text(&peak.variant)),
        ("peakBytes", Some(json!(peak.peak_bytes))),
        ("lives", Some(json!(peak.lives))),
    ])
}

fn pressure_json(pressure: &v1::Pressure) -> Value {
    let number = |value: Option<u64>| value.map(|value| json!(value));
    object([
        ("level", Some(json!(pressure.level().as_str_name()))),
        ("headroomBytes", number(pressure.headroom_bytes)),
        ("elevatedBelowBytes", Some(json!(pressure.elevated_below_bytes))),
        ("criticalBelowBytes", Some(json!(pressure.critical_below_bytes))),
        ("memTotalBytes", number(pressure.mem_total_bytes)),
        ("memAvailableBytes", number(pressure.mem_available_bytes)),
        ("cmaFreeBytes", number(pressure.cma_free_bytes)),
        ("someAvg10Ratio", pressure.some_avg10_ratio.map(|ratio| json!(ratio))),
        ("scopeUsedBytes", number(pressure.scope_used_bytes)),
        ("oomKills", number(pressure.oom_kills)),
        ("freeWithoutReclaimBytes", number(pressure.free_without_reclaim_bytes)),
        ("nvmapPoolBytes", number(pressure.nvmap_pool_bytes)),
        ("gpuUsedBytes", number(pressure.gpu_used_bytes)),
        ("gpuUsedIsInferred", pressure.gpu_used_bytes.map(|_| json!(pressure.gpu_used_is_inferred))),
        ("zramStoreBytes", number(pressure.zram_store_bytes)),
        ("largestFreeBlockBytes", number(pressure.largest_free_block_bytes)),
        ("releasedToPoolBytes", number(pressure.released_to_pool_bytes)),
        ("releasedToOsBytes", number(pressure.released_to_os_bytes)),
        ("cmaFailures", number(pressure.cma_failures)),
        ("losingBytesPerSecond", Some(json!(pressure.losing_bytes_per_second))),
        ("exhaustedIn", pressure.exhausted_in.as_ref().map(seconds)),
        ("stallWatch", text(&pressure.stall_watch)),
    ])
}

fn engine_json(engine: &v1::Engine) -> Value {
    object([
        ("state", Some(json!(engine.state().as_str_name()))),
        ("model", text(&engine.model)),
        ("architecture", text(&engine.architecture)),
        ("layersTotal", Some(json!(engine.layers_total))),
        ("layersResident", Some(json!(engine.layers_resident))),
        ("kvCapacityTokens", Some(json!(engine.kv_capacity_tokens))),
        ("kvCapacityFullTokens", Some(json!(engine.kv_capacity_full_tokens))),
        ("weightsResidentBytes", Some(json!(engine.weights_resident_bytes))),
        ("kvCapacityBytes", Some(json!(engine.kv_capacity_bytes))),
        ("kvType", text(&word(engine.kv_type().as_str_name(), "KV_TYPE_"))),
        ("kvUsedTokens", Some(json!(engine.kv_used_tokens))),
        ("kvKeptTokens", Some(json!(engine.kv_kept_tokens))),
        ("kvDroppedTokens", Some(json!(engine.kv_dropped_tokens))),
        ("kvUntouchedBytes", Some(json!(engine.kv_untouched_bytes))),
        ("prefillChunkTokens", Some(json!(engine.prefill_chunk_tokens))),
        ("commandGapMaxMs", command_gap_ms(engine).map(|ms| json!(ms))),
        ("planBytes", Some(json!(engine.plan_bytes))),
        ("fullPlanBytes", Some(json!(engine.full_plan_bytes))),
        ("changing", Some(json!(engine.changing))),
        ("milliTokensPerSecond", (engine.milli_tokens_per_second > 0).then(|| json!(engine.milli_tokens_per_second))),
        ("growthWaits", text(&engine.growth_waits)),
        ("loadReadBytes", (engine.load_bytes > 0).then(|| json!(engine.load_read_bytes))),
        ("loadBytes", (engine.load_bytes > 0).then(|| json!(engine.load_bytes))),
        ("kvBlockTokens", Some(json!(engine.kv_block_tokens))),
        ("sequences", Some(engine.sequences.iter().map(sequence_json).collect())),
        ("failure", text(&engine.failure)),
        ("sheds", Some(json!(engine.sheds))),
        ("shedBytes", Some(json!(engine.shed_bytes))),
        ("regrownBytes", Some(json!(engine.regrown_bytes))),
    ])
}

fn sequence_json(sequence: &v1::Sequence) -> Value {
    object([
        ("id", Some(json!(sequence.id))),
        ("state", Some(json!(sequence.state().as_str_name()))),
        ("client", text(&sequence.client)),
        ("class", text(&word(sequence.lease_class().as_str_name(), "LEASE_CLASS_"))),
        ("promptTokens", Some(json!(sequence.prompt_tokens))),
        ("reusedTokens", Some(json!(sequence.reused_tokens))),
        ("generatedTokens", Some(json!(sequence.generated_tokens))),
        ("kvTokens", Some(json!(sequence.kv_tokens))),
        ("kvBytes", Some(json!(sequence.kv_bytes))),
        ("kvBlocks", Some(json!(sequence.kv_blocks))),
        ("waited", sequence.waited.as_ref().map(seconds)),
    ])
}

fn worker_json(worker: &v1::Worker) -> Value {
    object([
        ("name", Some(json!(worker.name))),
        ("state", Some(json!(worker.state().as_str_name()))),
        ("pid", worker.pid.map(|pid| json!(pid))),
        ("variant", text(&worker.variant)),
        ("starts", Some(json!(worker.starts))),
        ("failures", Some(json!(worker.failures))),
        ("lastExit", text(&worker.last_exit)),
        ("deathClass", text(&worker.death_class)),
        ("needsOperator", worker.needs_operator.then(|| json!(true))),
        ("remedy", text(&worker.remedy)),
        ("waitsFor", text(&worker.waits_for)),
        ("resting", text(&worker.resting)),
        ("windingUp", worker.winding_up.then(|| json!(true))),
        ("confinement", (!worker.confinement.is_empty()).then(|| json!(worker.confinement))),
    ])
}

/// An event.
#[must_use]
pub fn entry(entry: &v1::JournalEntry) -> Value {
    object([
        ("sequence", Some(json!(entry.sequence))),
        ("bootId", Some(json!(entry.boot_id))),
        ("at", entry.at.as_ref().map(seconds)),
        ("time", entry.time.as_ref().map(time)),
        ("kind", Some(json!(entry.kind().as_str_name()))),
        ("name", Some(json!(entry.name))),
        ("summary", text(&entry.summary)),
        // As a document of its own rather than as text in a text; what cannot be read is left out.
        ("body", serde_json::from_str(&entry.body_json).ok()),
    ])
}

/// The longest time in which the engine could take no command, ms.
#[must_use]
pub fn command_gap_ms(engine: &v1::Engine) -> Option<f64> {
    let gap = engine.command_gap_max.as_ref()?;
    Duration::try_from(*gap).ok().map(|gap| gap.as_secs_f64() * 1e3)
}

/// Events of a document: what fits a screen (our choice).
const EVENTS_SHOWN: usize = 40;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_stay_numbers_in_json() {
        let held = v1::Lease { name: "asr#1".into(), held_bytes: u64::MAX, ..v1::Lease::default() };
        assert_eq!(lease(&held)["heldBytes"], json!(u64::MAX));
        assert_eq!(lease(&held).get("usedBytes"), None);
    }
}
