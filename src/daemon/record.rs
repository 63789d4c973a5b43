//! Recorder of events and actions for the journal and `cotenant events`.

use std::{sync::Arc, time::SystemTime};

use super::{control_handle::ControlHandle, error::RunError};
use crate::{
    config::Config,
    emergency,
    journal::{Content, Journal, JournalEntry, JournalSettings, render},
    policy::{
        arbiter::{Arbiter, Checkpoint},
        event::{Action, Event},
        params::Params,
    },
    rpc::supervisor::{EventRecord, EventRecordKind, Supervisor as _},
    units::Timestamp,
};

/// The journal of this run.
pub(super) struct Recorder {
    journal: Journal,
    /// The event that is being handled.
    handled: Option<(Timestamp, Event)>,
}

impl Recorder {
    /// Opens the journal that `config` wants, and writes with what this run starts.
    pub(super) fn open(config: &Config, control: &Arc<ControlHandle>, params: &Params) -> Result<Self, RunError> {
        let mut settings = JournalSettings::default();
        if let Some(journal) = &config.journal {
            settings.path = Some(journal.path.clone());
            settings.file_max = journal.max_size;
            settings.files_kept = 1;
        }
        let seen = Arc::clone(control);
        let mut shown = Shown::default();
        let observer = move |entry: &JournalEntry, _line: &str| {
            if let Some(record) = record_of(entry).filter(|record| shown.is_news(record)) {
                seen.events().push(record);
            }
        };
        let mut journal =
            Journal::open(&settings, control.boot_id(), observer).map_err(|source| RunError::Journal { source })?;
        let (at, time) = control.now();
        journal.record(at, time, Content::start(params.clone()));
        Ok(Self { journal, handled: None })
    }

    /// Records all of `arbiter` if what follows could not be replayed otherwise.
    pub(super) fn checkpoint_if_wanted(&mut self, at: Timestamp, arbiter: &Arbiter) {
        if self.journal.wants_checkpoint() {
            let checkpoint = Box::new(Checkpoint::of(arbiter));
            self.journal.record(at, SystemTime::now(), Content::Checkpoint(checkpoint));
        }
    }

    /// Notes what the arbiter is about to handle. It is recorded with what was decided about it, or when this is dropped.
    ///
    /// Lines may wait for a disk that stalls, for as long as it stalls. So none of them lies in the emergency reserve,
    /// which an event is copied into while the arbiter handles it.
    pub(super) fn event(&mut self, at: Timestamp, event: &Event) {
        self.handled = Some((at, event.clone()));
    }

    /// Records the event that was handled, and what is to be done about it.
    pub(super) fn actions(&mut self, at: Timestamp, actions: &[Action]) {
        emergency::outside(|| {
            self.record_handled();
            for action in actions {
                self.journal.record(at, SystemTime::now(), Content::Action(action.clone()));
            }
        });
    }

    fn record_handled(&mut self) {
        if let Some((at, event)) = self.handled.take() {
            // Copied once more: the first copy goes back to the reserve.
            let line = Content::Event(event.clone());
            self.journal.record(at, SystemTime::now(), line);
        }
    }

    /// Lines that did not get into the file.
    pub(super) fn lost(&self) -> u64 {
        let (dropped, failed) = self.journal.lost();
        dropped.saturating_add(failed)
    }
}

impl Drop for Recorder {
    /// An event at which the arbiter panicked is what the next reader of the journal looks for.
    fn drop(&mut self) {
        self.record_handled();
    }
}

/// What was said of the present moment. A death, the exit that follows from it and what is decided about it may read
/// the same; readers see one line for each fact, and the journal has all of them.
#[derive(Default)]
struct Shown {
    at: Timestamp,
    summaries: Vec<String>,
}

impl Shown {
    /// Whether a line says what was not said yet at its instant.
    fn is_news(&mut self, record: &EventRecord) -> bool {
        if self.at != record.at {
            self.at = record.at;
            self.summaries.clear();
        }
        let is_news = !self.summaries.contains(&record.summary);
        if is_news {
            self.summaries.push(record.summary.clone());
        }
        is_news
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

#[cfg(test)]
mod tests {
    use super::*;

    fn record(at: u64, summary: &str) -> EventRecord {
        EventRecord {
            sequence: 1,
            at: Timestamp::from_millis(at),
            time: SystemTime::UNIX_EPOCH,
            kind: EventRecordKind::Event,
            name: "worker_exited".to_owned(),
            summary: summary.to_owned(),
            body_json: "{}".to_owned(),
        }
    }

    #[test]
    fn a_sentence_is_shown_once_for_each_instant() {
        let mut shown = Shown::default();
        let lines = [(1, "asr died"), (1, "40 MiB is free"), (1, "asr died"), (2, "asr died")];
        let news = lines.map(|(at, summary)| shown.is_news(&record(at, summary)));
        assert_eq!(news, [true, true, false, true]);
    }
}
