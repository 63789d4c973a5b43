//! Recorder of events and actions for the journal and `cotenant events`.

use std::{sync::Arc, time::SystemTime};

use super::{hub::Hub, run::RunError};
use crate::{
    config::Config,
    journal::{Content, Journal, JournalEntry, JournalSettings, render},
    policy::{
        arbiter::Arbiter,
        event::{Action, Event},
        params::Params,
    },
    rpc::supervisor::{EventRecord, EventRecordKind, Supervisor as _},
    units::Timestamp,
};

/// The journal of this run.
pub(super) struct Recorder {
    journal: Journal,
}

impl Recorder {
    /// Opens the journal that `config` wants, and writes with what this run starts.
    pub(super) fn open(config: &Config, hub: &Arc<Hub>, params: &Params) -> Result<Self, RunError> {
        let mut settings = JournalSettings::default();
        if let Some(journal) = &config.journal {
            settings.path = Some(journal.path.clone());
            settings.file_max = journal.max_size;
            settings.files_kept = 1;
        }
        let seen = Arc::clone(hub);
        let observer = move |entry: &JournalEntry, _line: &str| {
            if let Some(record) = record_of(entry) {
                seen.events().push(record);
            }
        };
        let mut journal =
            Journal::open(&settings, hub.boot_id(), observer).map_err(|source| RunError::Journal { source })?;
        let (at, time) = hub.now();
        journal.record(at, time, Content::start(params.clone()));
        Ok(Self { journal })
    }

    /// Records all of `arbiter` if what follows could not be replayed otherwise.
    pub(super) fn checkpoint_if_wanted(&mut self, at: Timestamp, arbiter: &Arbiter) {
        if self.journal.wants_checkpoint() {
            let checkpoint = Box::new(arbiter.checkpoint());
            self.journal
                .record(at, SystemTime::now(), Content::Checkpoint(checkpoint));
        }
    }

    /// Records what happens to the arbiter, which has not been told yet.
    pub(super) fn event(&mut self, at: Timestamp, event: &Event) {
        self.journal
            .record(at, SystemTime::now(), Content::Event(event.clone()));
    }

    /// Records what was to be done about it.
    pub(super) fn action(&mut self, at: Timestamp, action: &Action) {
        self.journal
            .record(at, SystemTime::now(), Content::Action(action.clone()));
    }

    /// Lines that did not get into the file.
    pub(super) fn lost(&self) -> u64 {
        let (dropped, failed) = self.journal.lost();
        dropped.saturating_add(failed)
    }
}

/// The line as `cotenant events` shows it; `None` for those that come all the time and change nothing by themselves.
/// They are in the file, for `cotenant replay`.
fn record_of(entry: &JournalEntry) -> Option<EventRecord> {
    let (kind, body) = match &entry.content {
        Content::Start(start) => (EventRecordKind::Start, serde_json::to_string(start)),
        Content::Event(
            Event::Sampled(_)
            | Event::Measured { .. }
            | Event::DeadlineReached
            | Event::LeaseRenewed { .. }
            | Event::EngineActivity { .. }
            | Event::EngineCalibrated(_)
            | Event::EngineTimed(_)
            | Event::PeakMeasured { .. }
            | Event::WorkerActivity { .. },
        )
        | Content::Action(Action::SampleAfter { .. } | Action::Measure { .. } | Action::StorePeaks { .. })
        | Content::Checkpoint(_) => return None,
        Content::Event(event) => (EventRecordKind::Event, serde_json::to_string(event)),
        Content::Action(action) => (EventRecordKind::Action, serde_json::to_string(action)),
        Content::Dropped { lines } => (EventRecordKind::Dropped, Ok(format!("{{\"lines\":{lines}}}"))),
    };
    Some(EventRecord {
        sequence: entry.sequence,
        at: entry.at,
        time: SystemTime::UNIX_EPOCH + std::time::Duration::from_micros(entry.unix_us),
        kind,
        name: crate::journal::name(&entry.content).to_owned(),
        summary: render(entry),
        body_json: body.unwrap_or_else(|_| "{}".to_owned()),
    })
}
