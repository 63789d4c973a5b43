//! Exporter of events by OTLP, as log records.
//!
//! Unlike spans, events that could not be sent are sent again: their source keeps the last ones.

use std::{
    collections::BTreeMap,
    time::{Duration, SystemTime},
};

use tokio::time::{sleep, timeout};

use super::{
    otlp::{
        Collector, Export, ExportError, PAUSE, SEND_MAX, Sender,
        logs::v1::{
            ExportLogsServiceRequest, LogRecord, ResourceLogs, ScopeLogs,
            log_record::SeverityNumber,
        },
        nanos, pair, resource_of, scope,
        v1::{AnyValue, any_value::Value},
    },
    span::Attribute,
};
use cotenant_units::causes::in_one_line;

/// An event.
#[derive(Clone, Debug)]
pub struct EventRecord {
    /// Its time.
    pub at: SystemTime,
    /// Name of its kind.
    pub name: String,
    /// Its text.
    pub text: String,
    /// Whether it is unexpected.
    pub is_warning: bool,
    /// Its attributes.
    pub attributes: Vec<Attribute>,
}

/// Sends events to a collector.
pub struct EventExporter {
    sender: Sender,
    resource: BTreeMap<String, String>,
    has_failed: bool,
}

impl EventExporter {
    /// An exporter with these resource attributes.
    #[must_use]
    pub fn new(collector: Collector, resource: BTreeMap<String, String>) -> Self {
        Self {
            sender: Sender::new(collector),
            resource,
            has_failed: false,
        }
    }

    /// Sends a batch; returns whether the collector has accepted it, or would reject it again. Otherwise returns after a
    /// pause, and the batch should be sent again.
    pub async fn send(&mut self, events: &[EventRecord]) -> bool {
        let request = Export::Logs(self.request_of(events));
        let sent = timeout(SEND_MAX, self.sender.send(request))
            .await
            .unwrap_or(Err(ExportError::Late));
        let Err(error) = sent else {
            if std::mem::take(&mut self.has_failed) {
                tracing::info!("events are exported again");
            }
            return true;
        };
        if !std::mem::replace(&mut self.has_failed, true) {
            let reason = in_one_line(&error);
            let remedy = if error.is_final() {
                "they are dropped; set `telemetry.otlp_events: false` for a collector without logs"
            } else {
                "they are sent later"
            };
            tracing::warn!(
                collector = self.sender.collector.authority,
                reason,
                "cannot export events; {remedy}"
            );
        }
        self.sender.disconnect();
        sleep(PAUSE).await;
        error.is_final()
    }

    fn request_of(&self, events: &[EventRecord]) -> ExportLogsServiceRequest {
        let scope_logs = ScopeLogs {
            scope: Some(scope()),
            log_records: events.iter().map(record_of).collect(),
        };
        ExportLogsServiceRequest {
            resource_logs: vec![ResourceLogs {
                resource: Some(resource_of(&self.resource)),
                scope_logs: vec![scope_logs],
            }],
        }
    }
}

fn record_of(event: &EventRecord) -> LogRecord {
    let since = event.at.duration_since(SystemTime::UNIX_EPOCH);
    let severity = if event.is_warning {
        SeverityNumber::Warn
    } else {
        SeverityNumber::Info
    };
    LogRecord {
        time_unix_nano: nanos(since.unwrap_or(Duration::ZERO)),
        severity_number: severity.into(),
        body: Some(AnyValue {
            value: Some(Value::StringValue(event.text.clone())),
        }),
        attributes: event
            .attributes
            .iter()
            .map(|(key, value)| pair(key, value.into()))
            .collect(),
        event_name: event.name.clone(),
    }
}
