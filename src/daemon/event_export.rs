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
    let mut text = line.summary.clone();
    if let Some((sentence, certificate)) = postmortem_of(line) {
        text = sentence;
        attributes.push(("cotenant.postmortem", SpanValue::Text(certificate)));
    }
    EventRecord {
        at: at.unwrap_or(SystemTime::UNIX_EPOCH),
        name: format!("cotenant.{}", line.name),
        text,
        is_warning: UNEXPECTED.contains(&line.name.as_str()),
        attributes,
    }
}

/// A death in one sentence, and its certificate as JSON. Both lack the worker's output, which may contain what users say;
/// the certificate's sentence and remedy are left out as they quote it.
fn postmortem_of(line: &v1::JournalEntry) -> Option<(String, String)> {
    let body = (line.name == "worker_died").then_some(&line.body_json)?;
    let mut body: Value = serde_json::from_str(body).ok()?;
    let certificate = body.get_mut("certificate")?.as_object_mut()?;
    for quoting in ["last_lines", "load_progress", "sentence", "remedy"] {
        certificate.remove(quoting);
    }
    if let Some(evidence) = certificate
        .get_mut("evidence")
        .and_then(Value::as_array_mut)
    {
        evidence.retain(|finding| finding["source"] != "output");
    }
    let of = |key: &str| certificate.get(key).and_then(Value::as_str).unwrap_or("?");
    let sentence = format!(
        "worker `{}` died: {}, {}",
        of("worker"),
        of("class"),
        of("confidence")
    );
    Some((sentence, serde_json::to_string(certificate).ok()?))
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

#[cfg(test)]
mod tests {
    use super::*;
    use cotenant_policy::{
        death::{Confidence, DeathCertificate, DeathClass, DeathVerdict, Finding},
        event::Event,
    };

    #[test]
    fn a_death_is_sent_without_anything_that_the_worker_has_written() {
        let said = "turn on the `kitchen` light";
        let verdict = DeathVerdict {
            class: DeathClass::Abort,
            confidence: Confidence::Likely,
            sentence: format!("`asr` aborted, saying `{said}`"),
            evidence: vec![
                Finding::new("output", said),
                Finding::new("waitid", "SIGABRT"),
            ],
            remedy: Some(format!("avoid `{said}`")),
            needs_operator: false,
        };
        let certificate = DeathCertificate {
            worker: "asr".to_owned(),
            verdict,
            load_progress: Some(said.to_owned()),
            last_lines: vec![said.to_owned()],
            ..DeathCertificate::default()
        };
        let summary = certificate.to_string();
        let event = Event::WorkerDied {
            certificate: Box::new(certificate),
        };
        let line = v1::JournalEntry {
            name: "worker_died".to_owned(),
            summary,
            body_json: serde_json::to_string(&event).unwrap(),
            ..v1::JournalEntry::default()
        };
        let sent = event_of(&line, "run");
        assert_eq!(sent.text, "worker `asr` died: abort, likely");
        let all = format!("{sent:?}");
        assert!(all.contains("SIGABRT") && !all.contains("kitchen"), "{all}");
    }
}
