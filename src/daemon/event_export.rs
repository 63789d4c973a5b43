//! Source of the exporter of events: the lines of `cotenant events`, without output of workers.

use std::{sync::Arc, time::SystemTime};

use serde_json::Value;
use tokio::time::{Duration, sleep};

use super::control_handle::ControlHandle;
use cotenant_rpc::{EventLog, Supervisor as _, v1};
use cotenant_telemetry::{EventExporter, EventRecord, SpanValue};

/// Sends the lines of the event log as they come. While the collector is away they stay in the log, which evicts the
/// oldest.
pub(super) async fn export(control: Arc<ControlHandle>, mut exporter: EventExporter) {
    let log: &EventLog = control.events();
    let mut news = log.last_sequence();
    let mut after = 0;
    loop {
        let page = log.after(after, BATCH);
        let Some(newest) = page.records.last().map(|line| line.sequence) else {
            if news.changed().await.is_err() {
                return;
            }
            // Lines of one decision come together.
            sleep(GATHER).await;
            continue;
        };
        if after > 0 && page.missed > 0 {
            tracing::warn!(
                missed = page.missed,
                "events were evicted before the collector received them"
            );
        }
        let events: Vec<EventRecord> = page
            .records
            .iter()
            .map(|line| event_of(line, control.boot_id()))
            .collect();
        if exporter.send(&events).await {
            after = newest;
        }
    }
}

fn event_of(line: &v1::JournalEntry, boot_id: &str) -> EventRecord {
    let at = line.time.and_then(|time| SystemTime::try_from(time).ok());
    let sequence = i64::try_from(line.sequence).unwrap_or(i64::MAX);
    let mut attributes = vec![
        ("cotenant.sequence", SpanValue::Whole(sequence)),
        ("cotenant.boot_id", SpanValue::Text(boot_id.to_owned())),
    ];
    if let Some(postmortem) = postmortem_of(line) {
        attributes.push(("cotenant.postmortem", SpanValue::Text(postmortem)));
    }
    EventRecord {
        at: at.unwrap_or(SystemTime::UNIX_EPOCH),
        name: format!("cotenant.{}", line.name),
        text: line.summary.clone(),
        is_warning: UNEXPECTED.contains(&line.name.as_str()),
        attributes,
    }
}

/// The death certificate as JSON, without the worker's output, which may contain what users say.
fn postmortem_of(line: &v1::JournalEntry) -> Option<String> {
    let body = (line.name == "worker_died").then_some(&line.body_json)?;
    let mut body: Value = serde_json::from_str(body).ok()?;
    let certificate = body.get_mut("certificate")?.as_object_mut()?;
    certificate.remove("last_lines");
    certificate.remove("load_progress");
    if let Some(evidence) = certificate
        .get_mut("evidence")
        .and_then(Value::as_array_mut)
    {
        evidence.retain(|finding| finding["source"] != "output");
    }
    serde_json::to_string(certificate).ok()
}

/// Names of lines that report something unexpected.
const UNEXPECTED: [&str; 9] = [
    "abort_worker",
    "book_lost",
    "dropped",
    "engine_apply_failed",
    "engine_failed",
    "holder_lost",
    "level_changed",
    "worker_died",
    "worker_unresponsive",
];

/// Maximum lines of a batch; each has some 500 bytes, a post-mortem some KiB.
const BATCH: usize = 64;

/// Gathering time of a batch, as for spans.
const GATHER: Duration = Duration::from_millis(500);
