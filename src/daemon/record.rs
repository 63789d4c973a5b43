//! Recorder of events and actions for the journal and `cotenant events`.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use super::{control_handle::ControlHandle, error::RunError};
use cotenant_config::Config;
use cotenant_journal::{Content, Journal, JournalEntry, JournalSettings, render};
use cotenant_memory::emergency;
use cotenant_policy::{
    arbiter::{Arbiter, Checkpoint},
    event::{Action, Event},
    params::Params,
};
use cotenant_rpc::{Supervisor as _, v1};
use cotenant_units::Timestamp;

pub(super) struct Recorder {
    journal: Journal,
    control: Arc<ControlHandle>,
    handled: Option<(Timestamp, Event)>,
}

impl Recorder {
    /// Opens the journal of `config`, and writes the settings of this run.
    pub(super) fn open(
        config: &Config,
        control: &Arc<ControlHandle>,
        params: &Params,
    ) -> Result<Self, RunError> {
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
            seen.history().line(entry);
            seen.events().note_passed(entry.sequence);
        };
        let mut journal = Journal::open(&settings, control.boot_id(), observer)
            .map_err(|source| RunError::Journal { source })?;
        let (at, time) = control.now();
        journal.record(at, time, Content::start(params.clone()));
        Ok(Self {
            journal,
            control: Arc::clone(control),
            handled: None,
        })
    }

    /// Records the complete state of `arbiter` if later lines could not be replayed otherwise.
    pub(super) fn checkpoint_if_wanted(&mut self, at: Timestamp, arbiter: &Arbiter) {
        if self.journal.wants_checkpoint() {
            let checkpoint = Box::new(Checkpoint::of(arbiter));
            self.journal
                .record(at, SystemTime::now(), Content::Checkpoint(checkpoint));
        }
    }

    /// Keeps the event that the arbiter is about to handle. It is recorded with its actions, or when this is dropped.
    ///
    /// Lines may wait as long as a disk stalls. Therefore they are not allocated from the emergency reserve, unlike the
    /// arbiter's copy of the event.
    pub(super) fn event(&mut self, at: Timestamp, event: &Event) {
        self.handled = Some((at, event.clone()));
    }

    pub(super) fn actions(&mut self, at: Timestamp, actions: &[Action]) {
        emergency::outside(|| {
            self.record_handled();
            for action in actions {
                self.journal
                    .record(at, SystemTime::now(), Content::Action(action.clone()));
            }
        });
        let events = self.control.events();
        events.note_recorded(self.journal.last_sequence());
    }

    fn record_handled(&mut self) {
        if let Some((at, event)) = self.handled.take() {
            // Cloned again, so that the first copy returns to the reserve.
            let line = Content::Event(event.clone());
            self.journal.record(at, SystemTime::now(), line);
        }
    }

    pub(super) fn lost(&self) -> u64 {
        let (dropped, failed) = self.journal.lost();
        dropped.saturating_add(failed)
    }
}

impl Drop for Recorder {
    /// An event on which the arbiter panicked is the most important line for a reader of the journal.
    fn drop(&mut self) {
        self.record_handled();
    }
}

/// Sentences of the present instant. A death, its exit and the decision about it may read the same: readers see one
/// line per fact, the journal has all of them.
#[derive(Default)]
struct Shown {
    at: Option<prost_types::Duration>,
    summaries: Vec<String>,
}

impl Shown {
    /// Returns whether a line is new at its instant.
    fn is_news(&mut self, record: &v1::JournalEntry) -> bool {
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

/// Converts a line for `cotenant events`; `None` for frequent lines without an effect of their own, which only the file
/// contains, for `cotenant replay`.
fn record_of(entry: &JournalEntry) -> Option<v1::JournalEntry> {
    let (kind, body) = match &entry.content {
        Content::Start(start) => (v1::EntryKind::Start, serde_json::to_string(start)),
        Content::Event(
            Event::Sampled(_)
            | Event::Measured { .. }
            | Event::DeadlineReached
            | Event::LeaseRenewed(_)
            | Event::EngineActivity { .. }
            | Event::EngineCalibrated(_)
            | Event::EngineTimed(_)
            | Event::PeakMeasured { .. }
            | Event::WorkerActivity { .. },
        )
        | Content::Action(
            Action::SampleAfter { .. } | Action::Measure { .. } | Action::StorePeaks { .. },
        )
        | Content::Checkpoint(_) => return None,
        Content::Event(event) => (v1::EntryKind::Event, serde_json::to_string(event)),
        Content::Action(action) => (v1::EntryKind::Action, serde_json::to_string(action)),
        Content::Dropped { lines } => {
            (v1::EntryKind::Dropped, Ok(format!("{{\"lines\":{lines}}}")))
        }
    };
    let body_json = body.unwrap_or_else(|_| "{}".to_owned());
    let name = match kind {
        v1::EntryKind::Start => "start",
        v1::EntryKind::Dropped => "dropped",
        // The tag comes first: `{"event":"drain_requested"}`.
        _ => body_json.split('"').nth(3).unwrap_or_default(),
    };
    let time = SystemTime::UNIX_EPOCH + Duration::from_micros(entry.unix_us);
    Some(v1::JournalEntry {
        sequence: entry.sequence,
        boot_id: String::new(),
        at: entry.at.since_start().try_into().ok(),
        time: Some(time.into()),
        kind: kind.into(),
        name: name.to_owned(),
        summary: render(entry),
        body_json,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(seconds: i64, summary: &str) -> v1::JournalEntry {
        let at = prost_types::Duration { seconds, nanos: 0 };
        v1::JournalEntry {
            at: Some(at),
            summary: summary.to_owned(),
            ..v1::JournalEntry::default()
        }
    }

    #[test]
    fn the_name_of_a_line_is_the_one_that_the_journal_writes() {
        let name = |content| {
            let entry = JournalEntry {
                sequence: 1,
                boot_id: "a".to_owned(),
                at: Timestamp::START,
                unix_us: 0,
                content,
            };
            record_of(&entry).map(|record| record.name)
        };
        assert_eq!(
            name(Content::Event(Event::DrainRequested { by: None })).as_deref(),
            Some("drain_requested")
        );
        assert_eq!(
            name(Content::Action(Action::InspectModel)).as_deref(),
            Some("inspect_model")
        );
        assert_eq!(
            name(Content::Dropped { lines: 2 }).as_deref(),
            Some("dropped")
        );
    }

    #[test]
    fn a_sentence_is_shown_once_for_each_instant() {
        let mut shown = Shown::default();
        let lines = [
            (1, "asr died"),
            (1, "40 MiB is free"),
            (1, "asr died"),
            (2, "asr died"),
        ];
        let news = lines.map(|(at, summary)| shown.is_news(&record(at, summary)));
        assert_eq!(news, [true, true, false, true]);
    }
}
